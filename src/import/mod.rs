//! Files that other tools wrote about a job, as a source: all rules, screens and reports work on them.
//!
//! Formats that are read: dumps of PyTorch's Flight Recorder, as pickle or JSON. A fact that a format lacks stays unknown.
//! How long ranks have waited is counted until the files were written, by their times of modification.

mod document;
mod fault;
mod flight_recorder;
mod json;
mod pickle;

use crate::model::{Evidence, Finding, Sink, Source, Spare, Update};
use document::Document;
use fault::Fault;
use flight_recorder::Recorder;
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

/// Bytes of a file that are read.
const FILE_MAX: u64 = 256 << 20;
/// Updates after which the consumer may work on what it has taken.
const REST_EVERY: u64 = 4096;
/// Dumps that were written within this time are of one moment, in ns.
const ONE_MOMENT_NS: u64 = 60_000_000_000;
/// Files of a directory that are read.
const FILES_MAX: usize = 1 << 17;

/// Why files cannot be imported.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file or directory cannot be read.
    #[error("{}: {why}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Why it cannot.
        why: std::io::Error,
    },
    /// A file is damaged, or of another format.
    #[error("{}: {why}", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// The first fault and its position.
        why: String,
    },
    /// There is nothing to read.
    #[error("{}: no file in it is a Flight Recorder dump; their names end with the rank, as nccl_trace_rank_0 does", path.display())]
    Nothing {
        /// The directory.
        path: PathBuf,
    },
}

/// The files of one job.
#[derive(Debug, Default)]
pub struct Import {
    recorder: Recorder,
    /// Files of a directory that are of no known format.
    skipped: Vec<PathBuf>,
    /// When the first and the last file were written, Unix time in ns.
    written_ns: Option<(u64, u64)>,
    is_read: bool,
}

impl Import {
    /// Reads files, or all files of directories.
    ///
    /// # Errors
    /// A file cannot be read, or has a fault; the text names its position.
    pub fn open(paths: &[PathBuf]) -> Result<Self, Error> {
        let mut import = Import::default();
        for path in paths {
            let file = |why| Error::File { path: path.clone(), why };
            if !fs::metadata(path).map_err(file)?.is_dir() {
                import.read(path, true)?;
                continue;
            }
            let mut files = Vec::new();
            for entry in fs::read_dir(path).map_err(file)?.take(FILES_MAX) {
                let entry = entry.map_err(file)?;
                if entry.file_type().map_err(file)?.is_file() {
                    files.push(entry.path());
                }
            }
            files.sort();
            for file in files {
                import.read(&file, false)?;
            }
            if import.recorder.is_empty() {
                return Err(Error::Nothing { path: path.clone() });
            }
        }
        Ok(import)
    }

    /// The moment that the files describe, Unix time in ns: that of the last file, and no earlier than any moment in them.
    pub fn at_ns(&self) -> u64 {
        self.recorder.newest_ns().max(self.written_ns.map_or(0, |(_, last)| last))
    }

    /// What the files do not say, a sentence each.
    pub fn notes(&self) -> Vec<String> {
        let skipped = self.skipped.iter().map(|p| {
            let name = p.display().to_string();
            format!("not read: {}: its format is not known", name.escape_debug())
        });
        let apart = self.written_ns.map_or(0, |(first, last)| (last - first) / 1_000_000_000);
        let apart = (apart > ONE_MOMENT_NS / 1_000_000_000).then(|| {
            format!("the files were written within {apart} s, and not at once: ranks with older ones may seem to be missing")
        });
        skipped.chain(self.recorder.notes()).chain(apart).collect()
    }

    /// Facts about a finding that only these files have, such as lines of source code.
    pub fn evidence(&self, finding: &Finding) -> Vec<Evidence> {
        self.recorder.evidence(finding)
    }

    /// Reads a file. Of those that were not named, files of unknown formats are skipped.
    fn read(&mut self, path: &Path, is_named: bool) -> Result<(), Error> {
        let file = |why| Error::File { path: path.to_owned(), why };
        let mut bytes = Vec::new();
        let mut limited = File::open(path).map_err(file)?.take(FILE_MAX + 1);
        limited.read_to_end(&mut bytes).map_err(file)?;
        if !is_named && !is_known(&bytes) {
            self.skipped.push(path.to_owned());
            return Ok(());
        }
        self.note_time(path);
        let content = |why: Fault| Error::Content { path: path.to_owned(), why: why.to_string() };
        self.take(path, &bytes).map_err(content)
    }

    fn note_time(&mut self, path: &Path) {
        let modified = fs::metadata(path).and_then(|m| m.modified()).ok();
        let since = modified.and_then(|m| m.duration_since(UNIX_EPOCH).ok());
        if let Some(at_ns) = since.and_then(|d| u64::try_from(d.as_nanos()).ok()) {
            let (first, last) = self.written_ns.unwrap_or((at_ns, at_ns));
            self.written_ns = Some((first.min(at_ns), last.max(at_ns)));
        }
    }

    fn take(&mut self, path: &Path, bytes: &[u8]) -> Result<(), Fault> {
        if bytes.len() as u64 > FILE_MAX {
            return Err(Fault::of_file(format!("it has more than {} MiB", FILE_MAX >> 20)));
        }
        let document = parse(bytes)?;
        let rank = rank_of(path).ok_or_else(|| {
            Fault::of_file("its name does not end with a rank, as nccl_trace_rank_0 does; restore the name")
        })?;
        self.recorder.take(path, rank, &document)
    }

    /// Everything that bytes of a file named like this hold, for the fuzz targets.
    ///
    /// # Errors
    /// The first fault and its position.
    pub fn of_bytes(name: &Path, bytes: &[u8]) -> Result<Self, String> {
        let mut import = Import::default();
        import.take(name, bytes).map_err(|e| e.to_string())?;
        Ok(import)
    }
}

/// True where the first byte is that of a known format.
fn is_known(bytes: &[u8]) -> bool {
    matches!(bytes.first(), Some(&pickle::MAGIC | b'{'))
}

fn parse(bytes: &[u8]) -> Result<Document, Fault> {
    match bytes.first() {
        Some(&pickle::MAGIC) => pickle::read(bytes),
        Some(b'{') => json::read(bytes),
        Some(_) => Err(Fault::of_file("it is neither a pickle nor a JSON object")),
        None => Err(Fault::of_file("it is empty")),
    }
}

/// The rank at the end of a file's name, in front of its extension.
fn rank_of(path: &Path) -> Option<u32> {
    let name = path.file_stem()?.to_str()?;
    let digits = name.len() - name.trim_end_matches(|c: char| c.is_ascii_digit()).len();
    name.get(name.len() - digits..)?.parse().ok()
}

impl Source for Import {
    fn poll(&mut self, now_ns: u64) -> Vec<Update> {
        let mut updates = Vec::new();
        self.poll_each(now_ns, &mut |update| updates.push(update));
        updates
    }

    fn poll_each(&mut self, _now_ns: u64, sink: &mut dyn Sink) {
        if std::mem::replace(&mut self.is_read, true) {
            return;
        }
        let (mut spare, mut taken) = (Spare::default(), 0_u64);
        self.recorder.updates(|update| {
            sink.take(update);
            taken += 1;
            if taken.is_multiple_of(REST_EVERY) {
                sink.rest(&mut spare);
            }
        });
    }

    fn describe(&self) -> String {
        self.recorder.describe()
    }
}
