//! Rules for NCCL's tuner: from what people write to the flat table that the plugin reads.
//!
//! Rules are read from YAML or from the CSV of NVIDIA's example tuner, checked, and compiled. Every error names the file,
//! the line and what to do.

mod compile;
mod csv;
mod names;
pub mod search;
#[cfg(test)]
mod tests;
mod yaml;

pub use compile::Compiled;
pub use names::{ALGORITHMS, COLLECTIVES, PROTOCOLS};
pub use ringwatch_wire::cost_log;

use ringwatch_wire::tuning::{self, entries_of, entry};
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Longest file of rules that is read, in bytes.
const TEXT_MAX: u64 = 1 << 20;

/// An error in rules.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file cannot be read.
    #[error("cannot read rules from {}: {why}; config/tune.yaml is a sample", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        why: io::Error,
    },
    /// The rules are not what they should be.
    #[error("{origin}:{line}: {why}")]
    Rule {
        /// The file.
        origin: String,
        /// The line, from 1.
        line: usize,
        /// The error, and the remedy.
        why: String,
    },
}

/// Numbers from the first to the last, both included.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Range<T> {
    /// The first.
    pub min: T,
    /// The last.
    pub max: T,
}

impl Range<u32> {
    /// Every number.
    pub const ANY: Self = Range { min: 0, max: u32::MAX };
}

impl Range<u64> {
    /// Every size.
    pub const ANY: Self = Range { min: 0, max: u64::MAX };
}

impl<T: Ord + Copy> Range<T> {
    fn overlaps(self, other: Self) -> bool {
        self.min <= other.max && other.min <= self.max
    }
}

/// An algorithm, a protocol, or both; NCCL's numbers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Selection {
    /// The algorithm; absent for any.
    pub algorithm: Option<usize>,
    /// The protocol; absent for any.
    pub protocol: Option<usize>,
}

impl Selection {
    /// The entries of NCCL's cost table that it means, a bit each; none for a selection of nothing.
    pub fn entries(self) -> u32 {
        match (self.algorithm, self.protocol) {
            (Some(a), Some(p)) => entry(a, p),
            (Some(a), None) => entries_of(a),
            (None, Some(p)) => (0..tuning::ALGORITHMS).map(|a| entry(a, p)).fold(0, |all, e| all | e),
            (None, None) => 0,
        }
    }
}

/// One rule, as people mean it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    /// The line that it begins in, from 1.
    pub line: usize,
    /// The collective, NCCL's number.
    pub collective: usize,
    /// Sizes in bytes.
    pub bytes: Range<u64>,
    /// Numbers of ranks.
    pub ranks: Range<u32>,
    /// Numbers of nodes.
    pub nodes: Range<u32>,
    /// True where both buffers are registered; absent for either.
    pub is_registered: Option<bool>,
    /// Number of pipelined operations; absent for any.
    pub pipe_ops: Option<u32>,
    /// The choice. An empty selection leaves it to NCCL.
    pub choose: Selection,
    /// Selections that NCCL must not choose.
    pub forbid: Vec<Selection>,
    /// Number of channels; absent for NCCL's own.
    pub channels: Option<u8>,
}

impl Rule {
    /// Checks the rule by itself.
    fn check(&self) -> Result<(), String> {
        let chooses = self.choose != Selection::default();
        let all = self.forbid.iter().fold(0, |all, s| all | s.entries());
        if self.bytes.min > self.bytes.max {
            Err("min_bytes is above max_bytes; no size matches".to_owned())
        } else if self.ranks.min > self.ranks.max || self.nodes.min > self.nodes.max {
            Err("a range of ranks or nodes ends before it begins; write 2-8".to_owned())
        } else if !chooses && self.forbid.is_empty() && self.channels.is_none() {
            Err("the rule changes nothing; give it algorithm, protocol, channels or forbid".to_owned())
        } else if chooses && !self.forbid.is_empty() {
            Err("forbid does nothing beside algorithm or protocol, which win over all others; leave one of them out".to_owned())
        } else if self.forbid.iter().any(|s| s.entries() == 0) {
            Err("an entry of forbid is empty; give it algorithm, protocol or both".to_owned())
        } else if all == tuning::ALL_ENTRIES {
            Err("everything is forbidden; leave something that NCCL can choose".to_owned())
        } else if self.channels.is_some_and(|c| !(1..=tuning::CHANNELS_MAX).contains(&c)) {
            Err(format!("channels is not from 1 to {}", tuning::CHANNELS_MAX))
        } else {
            Ok(())
        }
    }
}

/// Checked rules, in order of priority.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rules {
    origin: String,
    all: Vec<Rule>,
    min_channels: Option<u32>,
}

impl Rules {
    /// Reads a file: NVIDIA's CSV where its name ends in `.csv` or `.conf`, YAML otherwise.
    ///
    /// # Errors
    /// The first error, with file and line.
    pub fn load(path: &Path) -> Result<Self, Error> {
        let read = |why| Error::Read { path: path.to_owned(), why };
        let length = fs::metadata(path).map_err(read)?.len();
        if length > TEXT_MAX {
            return Err(read(io::Error::other(format!("longer than {TEXT_MAX} bytes, too long for rules"))));
        }
        let text = fs::read_to_string(path).map_err(read)?;
        let origin = path.display().to_string();
        let is_csv = path.extension().is_some_and(|e| e == "csv" || e == "conf");
        if is_csv { Self::from_csv(&text, &origin) } else { Self::from_yaml(&text, &origin) }
    }

    /// Reads YAML. `origin` names it in errors.
    ///
    /// # Errors
    /// The first error, with the line.
    pub fn from_yaml(text: &str, origin: &str) -> Result<Self, Error> {
        Self::checked(yaml::read(text), origin)
    }

    /// Reads the CSV of NVIDIA's example tuner. `origin` names it in errors.
    ///
    /// # Errors
    /// The first error, with the line.
    pub fn from_csv(text: &str, origin: &str) -> Result<Self, Error> {
        Self::checked(csv::read(text).map(|all| (all, None)), origin)
    }

    /// Takes rules that a program made. `origin` names them in errors.
    ///
    /// # Errors
    /// The first rule that is wrong.
    pub fn of(all: Vec<Rule>, origin: &str) -> Result<Self, Error> {
        Self::checked(Ok((all, None)), origin)
    }

    fn checked(read: Result<(Vec<Rule>, Option<u32>), Fault>, origin: &str) -> Result<Self, Error> {
        let checked = read.and_then(|(all, min_channels)| {
            if let Some(first) = all.get(tuning::ROWS_MAX) {
                let why = format!("more than {} rules; merge some of them", tuning::ROWS_MAX);
                return Err(Fault { line: first.line, why });
            }
            let wrong = all.iter().find_map(|r| r.check().err().map(|why| Fault { line: r.line, why }));
            wrong.map_or(Ok((all, min_channels)), Err)
        });
        let origin = origin.to_owned();
        match checked {
            Ok((all, min_channels)) => Ok(Rules { origin, all, min_channels }),
            Err(Fault { line, why }) => Err(Error::Rule { origin, line, why }),
        }
    }

    /// The rules, in order.
    pub fn all(&self) -> &[Rule] {
        &self.all
    }

    /// The least number of channels that a job's communicators need (`NCCL_MIN_NCHANNELS`), which no rule can set.
    pub fn min_channels(&self) -> Option<u32> {
        self.min_channels
    }

    /// Compiles the rules to the table that the plugin reads.
    ///
    /// # Errors
    /// The rule that does not fit into a table.
    pub fn compile(&self) -> Result<Compiled, Error> {
        compile::compile(&self.all).map_err(|f| self.error(f))
    }

    /// The rules as the CSV of NVIDIA's example tuner, in which every size has a row.
    ///
    /// # Errors
    /// The first rule that the CSV cannot express.
    pub fn to_csv(&self) -> Result<String, Error> {
        csv::write(&self.all).map_err(|f| self.error(f))
    }

    /// Warnings about these rules.
    pub fn warnings(&self) -> Vec<String> {
        let of = |r: &Rule, what: &str| format!("{}:{}: {what}", self.origin, r.line);
        let registered = self.all.iter().filter(|r| r.is_registered.is_some()).map(|r| {
            of(r, "registered: the ranks decide differently, and hang, unless all of them register their buffers alike")
        });
        let unused = compile::unused(&self.all);
        registered
            .chain(unused.iter().map(|r| of(r, "no size is left for this rule; rules above it decide all")))
            .collect()
    }

    fn error(&self, fault: Fault) -> Error {
        Error::Rule { origin: self.origin.clone(), line: fault.line, why: fault.why }
    }
}

/// An error in a line, before the file's name is known.
#[derive(Debug)]
struct Fault {
    line: usize,
    why: String,
}

/// Puts compiled rules into a directory, under a name that tells their content, and returns the path.
///
/// # Errors
/// The system's error, where the directory or the file cannot be written.
pub fn install(compiled: &Compiled, directory: &Path) -> io::Result<PathBuf> {
    fs::create_dir_all(directory)?;
    let path = directory.join(format!("tune-{:016x}.rules", compiled.hash()));
    if fs::read(&path).is_ok_and(|there| there == compiled.bytes()) {
        return Ok(path);
    }
    write(compiled, &path)?;
    Ok(path)
}

/// Writes compiled rules to a file, which other processes see whole or not at all.
///
/// # Errors
/// The system's error.
pub fn write(compiled: &Compiled, path: &Path) -> io::Result<()> {
    let mut fresh = path.as_os_str().to_owned();
    fresh.push(format!(".{}", std::process::id()));
    let written = fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o644)
        .open(&fresh)
        .and_then(|mut file| file.write_all(compiled.bytes()))
        .and_then(|()| fs::rename(&fresh, path));
    if written.is_err() {
        // Nothing half-written stays; the first error is the one that counts.
        fs::remove_file(&fresh).ok();
    }
    written
}
