//! Readings in a file, one JSON object a line, as they were taken or to be taken again.
//!
//! Times in the file count from its first reading; played again they count from the first time somebody asks.

use super::{Absent, Batch, Sampler};
use crate::model::{Fact, Reading, steers};
use serde_json::Value;
use std::io::{self, BufRead, Read as _, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Lines longer than this are none of ours.
const LONGEST_LINE: usize = 1 << 20;
/// Texts longer than this are none of ours, in bytes.
const LONGEST_TEXT: usize = 1024;

/// Between two looks at what is due.
const PERIOD: Duration = Duration::from_millis(20);

/// Why a recording cannot be played.
#[derive(Debug, thiserror::Error)]
pub enum RecordingError {
    /// The file cannot be read.
    #[error("cannot read the recording {path}: {source}")]
    Unreadable {
        /// The file.
        path: String,
        /// The system's error.
        source: io::Error,
    },
    /// A line is no reading.
    #[error(
        "{path}, line {line}: not a reading: {why}; every line is one JSON object with host, at_ns and fact"
    )]
    BadLine {
        /// The file.
        path: String,
        /// The line, from 1.
        line: usize,
        /// The fault in it.
        why: String,
    },
}

/// A recording that is played as it went.
#[derive(Debug)]
pub struct Recorded {
    /// Oldest first; times count from the first.
    readings: Vec<Reading>,
    next: usize,
    begun_ns: Option<u64>,
}

impl Recorded {
    /// Reads a file.
    pub fn open(path: &Path) -> Result<Self, RecordingError> {
        let name = path.display().to_string();
        let unreadable = |source| RecordingError::Unreadable { path: name.clone(), source };
        let file = std::fs::File::open(path).map_err(unreadable)?;
        Self::read(io::BufReader::new(file), &name)
    }

    /// Reads lines; `name` is what errors call them.
    pub fn read(mut lines: impl BufRead, name: &str) -> Result<Self, RecordingError> {
        let mut readings = Vec::new();
        let mut text = Vec::new();
        for line in 1.. {
            text.clear();
            // Of a line without end no more is read than tells that it is too long.
            let most = LONGEST_LINE as u64 + 2;
            let read = lines.by_ref().take(most).read_until(b'\n', &mut text);
            let n = read.map_err(|source| RecordingError::Unreadable { path: name.to_owned(), source })?;
            if n == 0 {
                break;
            }
            if !text.trim_ascii().is_empty() {
                let reading = reading(text.trim_ascii_end());
                readings.push(reading.map_err(|why| RecordingError::BadLine {
                    path: name.to_owned(),
                    line,
                    why,
                })?);
            }
        }
        readings.sort_by_key(|r| r.at_ns);
        let first = readings.first().map_or(0, |r| r.at_ns);
        readings.iter_mut().for_each(|r| shift(r, |t| t.saturating_sub(first)));
        Ok(Recorded { readings, next: 0, begun_ns: None })
    }

    /// How long it goes.
    pub fn length(&self) -> Duration {
        Duration::from_nanos(self.readings.last().map_or(0, |r| r.at_ns))
    }

    /// The readings that are due at a moment; the first call begins it.
    pub fn due(&mut self, now_ns: u64) -> Vec<Reading> {
        let begun = *self.begun_ns.get_or_insert(now_ns);
        let until = now_ns.saturating_sub(begun);
        let rest = self.readings.get(self.next..).unwrap_or_default();
        let due: Vec<Reading> = rest.iter().take_while(|r| r.at_ns <= until).cloned().collect();
        self.next += due.len();
        due.into_iter()
            .map(|mut r| {
                shift(&mut r, |t| t.saturating_add(begun));
                r
            })
            .collect()
    }
}

/// The reading of a line, or why it is none. A line that leaves out what is absent may be shorter than the same one when it is
/// written, so both have to be of a sensible length.
fn reading(line: &[u8]) -> Result<Reading, String> {
    let long = |n: usize| format!("longer than {LONGEST_LINE} bytes ({n})");
    if line.len() > LONGEST_LINE {
        return Err(long(line.len()));
    }
    let value: Value = serde_json::from_slice(line).map_err(|e| e.to_string())?;
    if !has_plain_texts(&value) {
        return Err(format!("a text in it holds control characters or more than {LONGEST_TEXT} bytes"));
    }
    let reading: Reading = serde_json::from_value(value).map_err(|e| e.to_string())?;
    match serde_json::to_vec(&reading).map_err(|e| e.to_string())?.len() {
        n if n > LONGEST_LINE => Err(long(n)),
        _ => Ok(reading),
    }
}

/// True where no text is endless, and none could steer a terminal.
fn has_plain_texts(value: &Value) -> bool {
    let plain = |s: &str| s.len() <= LONGEST_TEXT && !s.chars().any(steers);
    match value {
        Value::String(s) => plain(s),
        Value::Array(all) => all.iter().all(has_plain_texts),
        Value::Object(all) => all.iter().all(|(k, v)| plain(k) && has_plain_texts(v)),
        _ => true,
    }
}

/// Moves all times of a reading.
fn shift(reading: &mut Reading, by: impl Fn(u64) -> u64) {
    reading.at_ns = by(reading.at_ns);
    if let Fact::Traffic(t) = &mut reading.fact {
        t.from_ns = by(t.from_ns);
    }
}

impl Sampler for Recorded {
    fn name(&self) -> &'static str {
        "recording"
    }

    fn period(&self) -> Duration {
        PERIOD
    }

    fn sample(&mut self, now_ns: u64, batch: &mut Batch) -> Result<(), Absent> {
        self.due(now_ns).into_iter().for_each(|r| batch.pass(r));
        Ok(())
    }
}

/// A recording that is opened when it is first asked for, and again where that did not go well: whoever makes the
/// samplers need not answer for the file.
#[derive(Debug)]
pub(super) struct Replayed {
    path: PathBuf,
    open: Option<Recorded>,
}

impl Replayed {
    /// Of this file.
    pub(super) fn of(path: &Path) -> Self {
        Replayed { path: path.to_owned(), open: None }
    }
}

impl Sampler for Replayed {
    fn name(&self) -> &'static str {
        "recording"
    }

    fn period(&self) -> Duration {
        PERIOD
    }

    fn sample(&mut self, now_ns: u64, batch: &mut Batch) -> Result<(), Absent> {
        let recorded = match &mut self.open {
            Some(recorded) => recorded,
            none => none.insert(Recorded::open(&self.path).map_err(|e| Absent(e.to_string()))?),
        };
        recorded.sample(now_ns, batch)
    }
}

/// Writes readings as they come.
#[derive(Debug)]
pub struct Recorder<W> {
    to: W,
}

impl<W: Write> Recorder<W> {
    /// Into this.
    pub fn new(to: W) -> Self {
        Recorder { to }
    }

    /// Adds readings.
    pub fn write(&mut self, readings: &[Reading]) -> io::Result<()> {
        for r in readings {
            serde_json::to_writer(&mut self.to, r)?;
            self.to.write_all(b"\n")?;
        }
        self.to.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{NodeFact, Traffic};

    fn node(at_ns: u64) -> Reading {
        let fact = NodeFact { cpu_busy: Some(0.5), ..NodeFact::default() };
        Reading { host: "a".to_owned(), at_ns, fact: Fact::Node(fact) }
    }

    #[test]
    fn what_was_written_comes_again_at_its_pace() {
        let traffic = Traffic { gpu: "0000:1a:00.0".to_owned(), from_ns: 1_100, ..Traffic::default() };
        let second = Reading { host: "b".to_owned(), at_ns: 1_500, fact: Fact::Traffic(traffic) };
        let mut file = Vec::new();
        Recorder::new(&mut file).write(&[node(1_000), second, node(3_000)]).unwrap();
        let mut played = Recorded::read(file.as_slice(), "x").unwrap();
        assert_eq!(played.length(), Duration::from_nanos(2_000));
        assert_eq!(played.due(70_000), [node(70_000)]);
        let next = played.due(71_000);
        assert_eq!((next.len(), next[0].at_ns, next[0].host.as_str()), (1, 70_500, "b"));
        assert!(matches!(&next[0].fact, Fact::Traffic(t) if t.from_ns == 70_100), "{next:?}");
        assert_eq!(played.due(71_500), []);
        assert_eq!(played.due(u64::MAX).len(), 1);
        assert_eq!(played.due(u64::MAX), []);
    }

    #[test]
    fn a_bad_line_is_named() {
        let good = serde_json::to_string(&node(1)).unwrap();
        let error =
            Recorded::read(format!("{good}\n\n{{\"host\": 3}}\n").as_bytes(), "day.jsonl").unwrap_err();
        let text = error.to_string();
        assert!(text.starts_with("day.jsonl, line 3: not a reading:"), "{text}");
        let error = Recorded::open(Path::new("/nonexistent.jsonl")).unwrap_err().to_string();
        assert!(error.contains("cannot read the recording /nonexistent.jsonl"), "{error}");
        let steering = good.replace("\"host\":\"a\"", "\"host\":\"a\\u001b[2J\"");
        let error = Recorded::read(steering.as_bytes(), "x").unwrap_err().to_string();
        assert!(error.contains("line 1") && error.contains("control characters"), "{error}");
        let long = "x".repeat(LONGEST_LINE + 1);
        assert!(
            Recorded::read(long.as_bytes(), "x")
                .unwrap_err()
                .to_string()
                .contains("longer than 1048576 bytes")
        );
        // Shorter than a line may be, and longer when it is written with all that is absent in it.
        let links = vec!["{}"; 50_000].join(",");
        let gpu = format!("{{\"gpu\":\"0000:1a:00.0\",\"links\":[{links}]}}");
        let line = format!("{{\"host\":\"a\",\"at_ns\":1,\"fact\":{{\"gpu\":{gpu}}}}}\n");
        let error = Recorded::read(line.as_bytes(), "x").unwrap_err().to_string();
        assert!(line.len() < LONGEST_LINE && error.contains("line 1: not a reading: longer than"), "{error}");
    }
}
