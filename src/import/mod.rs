//! Files that other tools wrote about a job, as a source: all rules, screens and reports work on them.
//!
//! Formats that are read: dumps of PyTorch's Flight Recorder, as pickle or JSON. A fact that a format lacks stays unknown.
//! How long ranks have waited is counted until the oldest file was written, by its time of modification.

mod document;
mod fault;
mod flight_recorder;
mod json;
mod pickle;

use crate::model::{Evidence, Finding, Sink, Source, Spare, Update};
use document::Document;
use fault::Fault;
use flight_recorder::Dumps;
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

/// Bytes of a file that are read.
const FILE_MAX: u64 = 128 << 20;
/// Updates after which the consumer may work on what it has taken.
const REST_EVERY: u64 = 4096;
/// Files of a directory that are read.
const FILES_MAX: usize = 1 << 17;

/// The reason why files cannot be imported.
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
    #[error("{}: {why}; copy the file again, or leave it out", path.display())]
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
    recorder: Dumps,
    /// Entries of a directory that are no dumps, and why.
    skipped: Vec<(PathBuf, String)>,
    /// Unix time in ns.
    now_ns: u64,
    is_read: bool,
}

impl Import {
    /// Reads files, or all files of directories. `now_ns` is Unix time in ns: files of the future are taken to be of now.
    ///
    /// # Errors
    /// A file cannot be read, or has a fault; the text names its position.
    pub fn open(paths: &[PathBuf], now_ns: u64) -> Result<Self, Error> {
        let mut import = Import { now_ns, ..Import::default() };
        for path in paths {
            let file = |why| Error::File { path: path.clone(), why };
            if !fs::metadata(path).map_err(file)?.is_dir() {
                import.read(path, true)?;
                continue;
            }
            let mut files = Vec::new();
            for entry in fs::read_dir(path).map_err(file)?.take(FILES_MAX) {
                files.push(entry.map_err(file)?.path());
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

    /// The moment that the files describe, Unix time in ns.
    pub fn at_ns(&self) -> u64 {
        self.recorder.at_ns()
    }

    /// Returns what the files lack, in sentences.
    pub fn notes(&self) -> Vec<String> {
        let skipped = self.skipped.iter().map(|(path, why)| {
            let name = path.display().to_string();
            format!("not read: {}: {why}", name.escape_debug())
        });
        skipped.chain(self.recorder.notes()).collect()
    }

    /// Facts about a finding that only these files have, such as lines of source code.
    pub fn evidence(&self, finding: &Finding) -> Vec<Evidence> {
        self.recorder.evidence(finding)
    }

    /// Reads a file. Files that were not named and are no dumps are skipped.
    fn read(&mut self, path: &Path, is_named: bool) -> Result<(), Error> {
        let file = |why| Error::File { path: path.to_owned(), why };
        let content = |why: Fault| Error::Content { path: path.to_owned(), why: why.to_string() };
        let about = fs::metadata(path).map_err(file)?;
        if !about.is_file() {
            let why = if about.is_dir() { "it is a directory: name it as well" } else { "it is no file" };
            if is_named {
                return Err(content(Fault::of_file(why)));
            }
            self.skipped.push((path.to_owned(), why.to_owned()));
            return Ok(());
        }
        let mut bytes = Vec::new();
        let mut limited = File::open(path).map_err(file)?.take(FILE_MAX + 1);
        limited.read_to_end(&mut bytes).map_err(file)?;
        if !is_named && !is_known(&bytes) && (rank_of(path).is_none() || !bytes.is_empty()) {
            self.skipped.push((path.to_owned(), "its format is not known".to_owned()));
            return Ok(());
        }
        match self.take(path, written_ns(&about).min(self.now_ns), &bytes) {
            Err(_) if !is_named && rank_of(path).is_none() => {
                self.skipped.push((path.to_owned(), "its name does not end with a rank".to_owned()));
                Ok(())
            }
            result => result.map_err(content),
        }
    }

    fn take(&mut self, path: &Path, written_ns: u64, bytes: &[u8]) -> Result<(), Fault> {
        if bytes.len() as u64 > FILE_MAX {
            return Err(Fault::of_file(format!("it has more than {} MiB", FILE_MAX >> 20)));
        }
        let document = parse(bytes)?;
        let rank = rank_of(path).ok_or_else(|| {
            Fault::of_file("its name does not end with a rank, as nccl_trace_rank_0 does; restore the name")
        })?;
        self.recorder.take(path, rank, written_ns, &document)
    }

    /// Reads what the bytes of a file with this name hold, for the fuzz targets.
    ///
    /// # Errors
    /// The first fault and its position.
    pub fn of_bytes(name: &Path, bytes: &[u8]) -> Result<Self, String> {
        let mut import = Import::default();
        import.take(name, 0, bytes).map_err(|e| e.to_string())?;
        Ok(import)
    }
}

/// When a file was written, Unix time in ns; 0 where the file system does not say.
fn written_ns(about: &fs::Metadata) -> u64 {
    let at = about.modified().unwrap_or(UNIX_EPOCH);
    at.duration_since(UNIX_EPOCH).ok().and_then(|d| u64::try_from(d.as_nanos()).ok()).unwrap_or(0)
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
        None => Err(Fault::of_file("it is empty: the dump was cut off")),
    }
}

/// The rank at the end of a file's name: in an extension of its own, else in front of the extension.
fn rank_of(path: &Path) -> Option<u32> {
    if let Some(rank) = path.extension().and_then(|e| e.to_str()?.parse().ok()) {
        return Some(rank);
    }
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
