//! A segment's file: where it is, its mapping, and its lock.

use super::decode;
use super::descriptors::is_shortage;
use super::directory::{Directory, OpenError};
use super::lock::{self, Lock};
use super::mapping::{MapError, Mapping};
use super::process::{self, Life};
use ringwatch_wire::layout::head;
use rustix::io::Errno;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::SystemTime;

/// A segment that was found and mapped.
#[derive(Debug)]
pub(super) struct SegmentFile {
    directory: Arc<Directory>,
    name: OsString,
    pub(super) mapping: Mapping,
    /// When it was last written, and its length.
    written: SystemTime,
    bytes: u64,
}

impl SegmentFile {
    /// Opens and maps it; who holds its lock is told beside it.
    pub(super) fn open(directory: &Arc<Directory>, name: &OsStr) -> Result<(Self, Lock), MapError> {
        let (file, stat) = directory.open(name)?;
        let mapping = Mapping::of(&file, &stat)?;
        let written = file.metadata().and_then(|m| m.modified()).unwrap_or(SystemTime::UNIX_EPOCH);
        let bytes = u64::try_from(stat.st_size).unwrap_or(0);
        let opened =
            SegmentFile { directory: Arc::clone(directory), name: name.to_owned(), mapping, written, bytes };
        Ok((opened, lock::holder(&file)))
    }

    /// Its path, for people.
    pub(super) fn path(&self) -> PathBuf {
        self.directory.path().join(&self.name)
    }

    /// Who holds its lock now. A file that is not there any more has no lock that could be asked for.
    pub(super) fn lock(&self) -> Lock {
        match self.directory.open(&self.name) {
            Ok((file, _)) => lock::holder(&file),
            // Nothing is known of the lock then, and a process does not end by that.
            Err(OpenError::Io(e)) if is_shortage(e) || e == Errno::WOULDBLOCK => Lock::Hidden,
            Err(_) => Lock::Free,
        }
    }

    /// Writes the two words by which a reader requests detail of a communicator, and until when.
    ///
    /// They are written through the file: the mapping stays one that cannot be written to.
    pub(super) fn request_detail(&self, comm: u64, until_ns: u64) -> Result<(), MapError> {
        let file = self.directory.open_to_write(&self.name, self.mapping.file())?;
        let put = |word: usize, value: u64| file.write_all_at(&value.to_le_bytes(), word as u64 * 8);
        put(head::WANTED_COMM, comm)
            .and_then(|()| put(head::WANTED_UNTIL, until_ns))
            .map_err(|e| MapError::Io(rustix::io::Errno::from_io_error(&e).unwrap_or(rustix::io::Errno::IO)))
    }

    /// When it was last written, and its length in bytes.
    pub(super) fn written(&self) -> (SystemTime, u64) {
        (self.written, self.bytes)
    }

    /// The process behind it; `None` when that is gone.
    ///
    /// # Errors
    /// As [`Life::find`].
    pub(super) fn life(&self, lock: Lock) -> Result<Option<Life>, Errno> {
        let Some(reader) = self.mapping.reader() else { return Ok(None) };
        let boot = decode::text(&reader.text::<{ head::BOOT_ID_WORDS }>(head::BOOT_ID));
        let this_boot = boot.is_none() || process::boot_id().is_none() || boot == process::boot_id();
        if !this_boot {
            return Ok(None);
        }
        Life::find(reader.pid(), reader.header(head::START_TICKS), self.mapping.owner(), lock)
    }

    /// True when its name is one that the plugin gives, and says the same as its header: only then may it be removed.
    pub(super) fn is_named_by_plugin(&self) -> bool {
        let Some(reader) = self.mapping.reader() else { return false };
        let header = (reader.pid(), reader.header(head::START_TICKS), reader.header(head::NONCE));
        name_of_plugin(&self.name) == Some(header)
    }
}

/// The pid, start time and nonce in a name as the plugin makes it, `4711-123456-9f3c.seg`.
pub(super) fn name_of_plugin(name: &OsStr) -> Option<(u32, u64, u64)> {
    let name = std::str::from_utf8(name.as_bytes()).ok()?;
    let mut parts = name.strip_suffix(".seg")?.split('-');
    let (pid, ticks, nonce) = (parts.next()?, parts.next()?, parts.next()?);
    let read: (u32, u64, u64) =
        (pid.parse().ok()?, ticks.parse().ok()?, u64::from_str_radix(nonce, 16).ok()?);
    // The plugin writes a number in one way: no sign, no leading zero, no capitals, and nothing behind it.
    (format!("{}-{}-{:x}.seg", read.0, read.1, read.2) == name).then_some(read)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_the_plugin_are_taken_for_such() {
        assert_eq!(name_of_plugin(OsStr::new("12-345-9f.seg")), Some((12, 345, 0x9f)));
        for other in [
            "12-345-9f",
            "a.seg",
            "12-345.seg",
            "12-345-9f-1.seg",
            "+1-2-3.seg",
            "1-2-XYZ.seg",
            "1-2-AB.seg",
            "--.seg",
        ] {
            assert_eq!(name_of_plugin(OsStr::new(other)), None, "{other}");
        }
    }
}
