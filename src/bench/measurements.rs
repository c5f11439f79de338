//! A file holds what benchmarks measured: several reports in one JSON document, or a single report.

use super::result::{Report, SCHEMA};
use serde::{Deserialize, Serialize};
use std::fs::{self, Permissions};
use std::io::{self, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use tempfile::NamedTempFile;

/// A file that is longer is none of ours, in bytes: some thousand sizes with hundreds of repeats.
const BYTES_MAX: u64 = 256 << 20;

/// An error with a file of measurements.
#[derive(Debug, thiserror::Error)]
pub enum MeasurementsError {
    /// The file cannot be read.
    #[error("cannot read {}: {why}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        why: io::Error,
    },
    /// The file holds something else.
    #[error(
        "{}: {why}; it is not what ringwatch bench --save or --json writes", path.display()
    )]
    Json {
        /// The file.
        path: PathBuf,
        /// Why.
        why: serde_json::Error,
    },
    /// The file holds JSON of another kind or version.
    #[error("{}: {why}", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// The text says what the file holds, and the remedy.
        why: String,
    },
    /// The file cannot be written.
    #[error("cannot write {}: {why}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// Why.
        why: io::Error,
    },
}

/// Reports of one or several benchmarks, with every repeat.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Measurements {
    /// [`SCHEMA`].
    pub schema: u32,
    /// In the order of time.
    pub reports: Vec<Report>,
}

impl Measurements {
    /// Takes reports.
    #[must_use]
    pub fn new(reports: Vec<Report>) -> Self {
        Measurements { schema: SCHEMA, reports }
    }

    /// Reads what `--save` or `--json` wrote.
    ///
    /// # Errors
    /// The error says what is wrong with the file, and what it should be.
    pub fn load(path: &Path) -> Result<Self, MeasurementsError> {
        let path = path.to_owned();
        let mut text = Vec::new();
        let read = fs::File::open(&path).and_then(|f| f.take(BYTES_MAX + 1).read_to_end(&mut text));
        match read {
            Ok(n) if n as u64 > BYTES_MAX => {
                let why =
                    io::Error::other(format!("longer than {BYTES_MAX} bytes, too long for measurements"));
                Err(MeasurementsError::Read { path, why })
            }
            Ok(_) => Self::read(&text, path),
            Err(why) => Err(MeasurementsError::Read { path, why }),
        }
    }

    /// Reads a file's content. `path` names it in errors.
    ///
    /// # Errors
    /// The error says what is wrong with the file, and what it should be.
    pub fn read(text: &[u8], path: PathBuf) -> Result<Self, MeasurementsError> {
        let content = |why: String| MeasurementsError::Content { path: path.clone(), why };
        let json = |why| MeasurementsError::Json { path: path.clone(), why };
        let value: serde_json::Value = serde_json::from_slice(text).map_err(json)?;
        if let Some(schema) = value.get("schema").filter(|s| **s != SCHEMA) {
            return Err(content(format!(
                "schema {schema}, and this ringwatch reads {SCHEMA}; measure again"
            )));
        }
        if value.get("trials").is_some() {
            return Err(content(
                "it holds a comparison (--compare); save a benchmark with --save".to_owned(),
            ));
        }
        // Read from the text once more: only so do errors have a line.
        let all = if value.get("reports").is_some() {
            serde_json::from_slice::<Self>(text).map_err(json)?
        } else {
            Self::new(vec![serde_json::from_slice(text).map_err(json)?])
        };
        if all.reports.is_empty() {
            return Err(content("it holds no measurement; measure again".to_owned()));
        }
        if let Some(report) = all.reports.iter().find(|r| r.schema != SCHEMA) {
            let why = format!("schema {}, and this ringwatch reads {SCHEMA}; measure again", report.schema);
            return Err(content(why));
        }
        Ok(all)
    }

    /// Checks that a file can be written, before work is done that it should hold.
    ///
    /// # Errors
    /// The system's error.
    pub fn check_destination(path: &Path) -> Result<(), MeasurementsError> {
        let write = |why| MeasurementsError::Write { path: path.to_owned(), why };
        beside(path).map(drop).map_err(write)
    }

    /// Writes the file, which others see whole or not at all. What it held before is replaced.
    ///
    /// # Errors
    /// The system's error; the old file is still there then.
    pub fn save(&self, path: &Path) -> Result<(), MeasurementsError> {
        let write = |why| MeasurementsError::Write { path: path.to_owned(), why };
        let mut text = serde_json::to_vec(self).map_err(|e| write(e.into()))?;
        text.push(b'\n');
        let (mut file, path) = beside(path).map_err(write)?;
        file.write_all(&text).map_err(write)?;
        file.persist(path).map(drop).map_err(|e| write(e.error))
    }
}

/// A new file in the directory of another, and the path that it should get: where that is a link, the link's end.
fn beside(path: &Path) -> io::Result<(NamedTempFile, PathBuf)> {
    let path = match fs::metadata(path) {
        Ok(there) if !there.is_file() => {
            return Err(io::Error::other("it is there and no regular file; name another one"));
        }
        Ok(_) => path.canonicalize()?,
        Err(e) if e.kind() == io::ErrorKind::NotFound => path.to_owned(),
        Err(e) => return Err(e),
    };
    let directory = path.parent().filter(|d| !d.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // The process's umask takes its part of these.
    let mode = Permissions::from_mode(0o666);
    let file = tempfile::Builder::new().prefix(".bench-").permissions(mode).tempfile_in(directory)?;
    Ok((file, path))
}
