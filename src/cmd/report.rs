//! `ringwatch report`: each job on one page, as a document, or its operations as a table or a timeline.

use super::shared_sink::SharedSink;
use super::{baselines, diagnose, monitor_of, playback};
use crate::cli::{Report, ReportFormat, Reported};
use crate::detect::Baseline;
use crate::ingest::now_ns;
use crate::join::{FinishedSink, busbw};
use crate::model::{Snapshot, Source};
use crate::report::{self, Document, Form};
use crate::runtime::{Monitor, ask};
use crate::timeline::{Bandwidth, History, JobCharts, OperationTable, Perfetto, TableFormat};
use anyhow::{Context, bail};
use std::collections::BTreeSet;
use std::fs::{File, Permissions};
use std::io::{self, BufWriter, IsTerminal, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

pub(super) fn run(o: &Report) -> anyhow::Result<u8> {
    let format = if o.json { ReportFormat::Json } else { o.format };
    let is_binary = matches!(format, ReportFormat::Parquet | ReportFormat::Perfetto);
    if is_binary && o.output.is_none() && io::stdout().is_terminal() {
        bail!("this format is not for terminals: name a file (-o FILE)");
    }
    let mut output = Output::open(o.output.as_deref())?;
    let follower = Follower::of(format, &output)?;
    if o.on.agent.is_some()
        && matches!(format, ReportFormat::Csv | ReportFormat::Parquet | ReportFormat::Perfetto)
    {
        bail!(
            "an agent does not keep operations: name directories of segments, or a recording (--replay DIR; ringwatch record makes one)"
        );
    }
    let seen = look(&o.on, &follower)?;
    match format {
        ReportFormat::Text => report::Pages::of(&seen.snapshot).text(&mut output)?,
        ReportFormat::Json => {
            serde_json::to_writer(&mut output, &report::Pages::of(&seen.snapshot))?;
            writeln!(output)?;
        }
        ReportFormat::Html | ReportFormat::Md => {
            let form = if format == ReportFormat::Html { Form::Html } else { Form::Markdown };
            let mut notes = seen.notes;
            if o.on.agent.is_some() {
                notes.push("An agent does not keep operations, so there are no charts of them. A recording has them (ringwatch record).".to_owned());
            }
            Document { snapshot: &seen.snapshot, charts: &seen.charts, notes: &notes }
                .write(form, &mut output)?;
        }
        // They are written while operations finish.
        ReportFormat::Csv | ReportFormat::Parquet | ReportFormat::Perfetto => {}
    }
    drop(follower);
    output.finish()?;
    Ok(0)
}

/// All that is known of these jobs now. Standard error names what it lacks.
pub(super) fn snapshot(on: &Reported) -> anyhow::Result<Snapshot> {
    Ok(look(on, &Follower::Nothing)?.snapshot)
}

/// The state of the jobs, their charts, and notes about gaps.
struct Seen {
    snapshot: Snapshot,
    charts: Vec<JobCharts>,
    notes: Vec<String>,
}

fn look(on: &Reported, follower: &Follower) -> anyhow::Result<Seen> {
    for dir in &on.dirs {
        diagnose::directory(dir)?;
    }
    if let Some(socket) = &on.agent {
        return Ok(Seen { snapshot: ask(socket)?, charts: Vec::new(), notes: Vec::new() });
    }
    let baselines = baselines(&on.baseline)?;
    if let Some(dir) = &on.replay {
        let (monitor, at_ns) = playback::play(dir, follower.sink())?;
        let notes = monitor.source().notes();
        return follower.seen(&monitor, at_ns, notes, &baselines);
    }
    if !on.import.is_empty() {
        let monitor = diagnose::imported(&on.import, follower.sink())?;
        diagnose::say_moment(&monitor);
        let notes = monitor.source().notes();
        let mut seen = follower.seen(&monitor, monitor.source().at_ns(), notes, &baselines)?;
        diagnose::add_evidence(monitor.source(), &mut seen.snapshot.findings);
        return Ok(seen);
    }
    let monitor = monitor_of(&on.dirs).with_baselines(baselines.clone()).with_steps();
    let mut monitor = monitor.with_sink(follower.sink());
    diagnose::read(&mut monitor)?;
    let now_ns = now_ns();
    monitor.end(now_ns);
    follower.seen(&monitor, now_ns, Vec::new(), &baselines)
}

/// The receiver of finished operations that a format needs.
enum Follower {
    Nothing,
    Charts(SharedSink<History>),
    Table(SharedSink<OperationTable<Part>>),
    Trace(SharedSink<Perfetto<Part>>),
}

impl Follower {
    fn of(format: ReportFormat, output: &Output) -> anyhow::Result<Self> {
        let table = |format| -> anyhow::Result<Self> {
            Ok(Follower::Table(SharedSink::new(OperationTable::new(output.part(), format)?)))
        };
        Ok(match format {
            ReportFormat::Text | ReportFormat::Json => Follower::Nothing,
            ReportFormat::Html | ReportFormat::Md => Follower::Charts(SharedSink::default()),
            ReportFormat::Csv => table(TableFormat::Csv)?,
            ReportFormat::Parquet => table(TableFormat::Parquet)?,
            ReportFormat::Perfetto => Follower::Trace(SharedSink::new(Perfetto::new(output.part()))),
        })
    }

    fn sink(&self) -> Option<Box<dyn FinishedSink>> {
        match self {
            Follower::Nothing => None,
            Follower::Charts(history) => Some(history.boxed()),
            Follower::Table(table) => Some(table.boxed()),
            Follower::Trace(trace) => Some(trace.boxed()),
        }
    }

    /// Finishes the output of the operations, and returns what was seen. Standard error has the notes as well.
    fn seen<S: Source>(
        &self,
        monitor: &Monitor<S>,
        at_ns: u64,
        mut notes: Vec<String>,
        baselines: &[Baseline],
    ) -> anyhow::Result<Seen> {
        let snapshot = monitor.snapshot(at_ns);
        let mut charts = Vec::new();
        match self {
            Follower::Nothing => {}
            Follower::Charts(history) => {
                let history = history.lock();
                charts = history.charts(&snapshot, monitor.join());
                if history.left_out() > 0 {
                    notes.push(format!(
                        "{} operations are in no chart: too many finished at once, or there are too many processes",
                        history.left_out()
                    ));
                }
                expect(&mut charts, baselines);
            }
            Follower::Table(table) => drop(table.lock().finish()?),
            Follower::Trace(trace) => {
                let (_, left_out) = trace.lock().finish(&snapshot.findings, monitor.join())?;
                if left_out > 0 {
                    notes
                        .push(format!("{left_out} slices are left out: a rank had too many at once, or the trace has more than a browser shows"));
                }
            }
        }
        let dropped = monitor.join().finished_dropped();
        if dropped > 0 && !matches!(self, Follower::Nothing | Follower::Charts(_)) {
            notes.push(format!("{dropped} operations are left out: too many were finished at once"));
        }
        notes.iter().for_each(|note| eprintln!("ringwatch: {note}"));
        Ok(Seen { snapshot, charts, notes })
    }
}

/// Adds the bandwidth that baselines expect of operations that the job has.
fn expect(charts: &mut [JobCharts], baselines: &[Baseline]) {
    for charts in charts {
        let own: BTreeSet<(&str, Option<u32>)> =
            charts.bandwidth.iter().map(|b| (b.operation, b.ranks)).collect();
        let asked = baselines.iter().filter(|b| own.contains(&(b.func.as_str(), Some(b.ranks))));
        charts.expected = asked
            .filter_map(|b| {
                Some(Bandwidth {
                    operation: b.func.as_str(),
                    ranks: Some(b.ranks),
                    algorithm: None,
                    bytes: b.bytes as f64,
                    busbw: busbw(b.func, b.bytes, b.ranks, b.time_ns)?,
                    count: 0,
                })
            })
            .collect();
    }
}

fn lock<T>(shared: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Standard output, or a file that appears when it is complete.
struct Output {
    to: Arc<Mutex<Box<dyn Write + Send>>>,
    file: Option<(tempfile::TempPath, PathBuf)>,
}

impl Output {
    fn open(path: Option<&Path>) -> anyhow::Result<Self> {
        let Some(path) = path else {
            let to: Box<dyn Write + Send> = Box::new(BufWriter::new(io::stdout()));
            return Ok(Output { to: Arc::new(Mutex::new(to)), file: None });
        };
        let what = || format!("-o {}", path.display());
        // A link's target is written, and a device or a pipe stays one.
        let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
        match path.metadata().map(|m| m.file_type()) {
            Ok(kind) if kind.is_dir() => bail!("{}: it is a directory; name a file", what()),
            Ok(kind) if !kind.is_file() => {
                let file = File::options().write(true).open(&path).with_context(what)?;
                let to: Box<dyn Write + Send> = Box::new(BufWriter::new(file));
                return Ok(Output { to: Arc::new(Mutex::new(to)), file: None });
            }
            _ => {}
        }
        let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
        // A report may say what other users' jobs do.
        let draft = tempfile::Builder::new()
            .prefix(".ringwatch-")
            .permissions(Permissions::from_mode(0o600))
            .tempfile_in(dir)
            .with_context(what)?;
        let (file, draft) = draft.into_parts();
        let to: Box<dyn Write + Send> = Box::new(BufWriter::new(file));
        Ok(Output { to: Arc::new(Mutex::new(to)), file: Some((draft, path)) })
    }

    /// The same output, for somebody else.
    fn part(&self) -> Part {
        Part(Arc::clone(&self.to))
    }

    /// Ends the output: a file gets its name.
    fn finish(mut self) -> anyhow::Result<()> {
        self.flush()?;
        if let Some((draft, path)) = self.file {
            draft.persist(&path).with_context(|| format!("-o {}", path.display()))?;
        }
        Ok(())
    }
}

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        lock(&self.to).write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        lock(&self.to).flush()
    }
}

/// One of several writers of an output.
struct Part(Arc<Mutex<Box<dyn Write + Send>>>);

impl Write for Part {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        lock(&self.0).write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        lock(&self.0).flush()
    }
}
