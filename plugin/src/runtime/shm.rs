//! Makes the segment's file: exclusive, private, mapped, with all its blocks reserved.
//!
//! The file gets its name only when it is a whole segment. Whatever kills the process, nobody finds a part of one.

#![expect(unsafe_code, reason = "maps the file")]

use crate::runtime::directory;
use crate::runtime::log::{Log, Message};
use crate::runtime::process::Identity;
use crate::runtime::reap::reap;
use crate::runtime::settings::Settings;
use crate::runtime::sys::{self, Fd, FileSystem, InChild};
use core::ffi::c_void;
use ringwatch_wire::layout::Geometry;
use ringwatch_wire::sync::Word;

/// Makes and maps the segment, which `format` fills; `None`, and a line in NCCL's log, when that cannot be done.
///
/// `format` runs a second time, on zeros, where the file cannot get its name last.
pub(crate) fn create(
    settings: &Settings,
    identity: &Identity,
    log: &Log,
    format: impl Fn(&[Word], &Geometry),
) -> Option<(&'static [Word], Geometry)> {
    // A directory beside the usual one is removed again where another process has made an older one meanwhile.
    let is_removed = |made: &Result<_, Message>| matches!(made, Err(Message::NoFile));
    let mut made = make(settings, identity, log, &format);
    for _ in 0..RETRIES {
        if !is_removed(&made) {
            break;
        }
        made = make(settings, identity, log, &format);
    }
    match made {
        Ok(made) => {
            log.say(Message::Opened);
            Some(made)
        }
        Err(message) => {
            log.say(message);
            None
        }
    }
}

/// How often a segment is tried again.
const RETRIES: u32 = 3;

/// File systems in memory: a store never waits for anything.
const IN_MEMORY: [u64; 2] = [0x0102_1994, 0x8584_58f6];
/// Disks of this host (ext, XFS, Btrfs, overlay): a store may wait when a page is being written back. Taken
/// because the user named the directory, and said in the log.
const ON_DISK: [u64; 4] = [0xef53, 0x5846_5342, 0x9123_683e, 0x794c_7630];

/// Says whether stores to a file here can harm the job. A server's file system can end it by SIGBUS.
pub(crate) fn suitable(fs: &FileSystem, log: &Log) -> Result<(), Message> {
    if IN_MEMORY.contains(&fs.kind) {
        return Ok(());
    }
    if ON_DISK.contains(&fs.kind) {
        log.say(Message::OnDisk);
        return Ok(());
    }
    Err(Message::BadFileSystem)
}

/// The largest segment that may be made here: NCCL itself lives on the same /dev/shm, and so do the node's
/// other ranks, of which there are usually eight. Together they take a sixteenth.
fn largest(settings: &Settings, fs: &FileSystem) -> Result<Geometry, Message> {
    let share = (fs.total / 128).min(fs.free / 8).max(fs.free.min(32 << 10));
    let bytes = share.min(settings.bytes.unwrap_or(u64::MAX)).min(Geometry::full().bytes());
    let geometry = Geometry::within(bytes).ok_or(Message::NoSpace)?;
    // Growing a file beyond the process's limit raises SIGXFSZ, which ends a job.
    let limit = sys::file_size_limit().unwrap_or(u64::MAX);
    if geometry.bytes() <= limit {
        Ok(geometry)
    } else {
        Geometry::within(limit).ok_or(Message::FileSizeLimit)
    }
}

fn make(
    settings: &Settings,
    identity: &Identity,
    log: &Log,
    format: &impl Fn(&[Word], &Geometry),
) -> Result<(&'static [Word], Geometry), Message> {
    let dir = directory::open(settings, identity, log)?;
    let fs = sys::file_system(&dir).ok_or(Message::NoDirectory)?;
    suitable(&fs, log)?;
    reap(&dir, &fs, identity);
    let largest = largest(settings, &fs)?;
    let name = identity.segment_name().text();
    if let Some(file) = sys::create_unnamed(&dir) {
        let draft = Draft::new(file, largest).ok_or(Message::NoSpace)?;
        format(draft.words(), &draft.geometry);
        if sys::link(&draft.file, &dir, name.as_c()) {
            return Ok(draft.keep());
        }
    }
    // Old overlay file systems have no unnamed files, and without /proc none gets a name.
    let file = sys::create(&dir, name.as_c()).ok_or(Message::NoFile)?;
    let Some(draft) = Draft::new(file, largest) else {
        sys::unlink(&dir, name.as_c());
        return Err(Message::NoSpace);
    };
    format(draft.words(), &draft.geometry);
    Ok(draft.keep())
}

/// A locked and mapped file that is going to be a segment. Dropped, it is unmapped and closed.
struct Draft {
    file: Fd,
    at: *mut c_void,
    bytes: usize,
    geometry: Geometry,
}

impl Draft {
    fn new(file: Fd, largest: Geometry) -> Option<Self> {
        // Held while this process lives, in every namespace; before the file has a name or a length, so that
        // nobody takes it for a dead one. Where the kernel refuses, readers still have the pid.
        sys::lock(&file);
        let mut geometry = largest;
        loop {
            let bytes = geometry.bytes();
            if sys::reserve(&file, bytes)
                && let Ok(len) = usize::try_from(bytes)
                && let Some(at) = sys::map(Some(&file), len)
            {
                // A forked child has no use for it. Where the kernel refuses, the child just keeps the mapping.
                // SAFETY: our own fresh mapping, whole.
                unsafe { sys::on_fork(at, len, InChild::Absent) };
                return Some(Draft { file, at, bytes: len, geometry });
            }
            // What was free a moment ago has been taken: try half.
            geometry = Geometry::within(bytes.saturating_sub(1))?;
        }
    }

    fn words(&self) -> &[Word] {
        // SAFETY: `bytes` bytes are mapped, page-aligned, while this value lives; `Word` is an atomic u64, valid
        // for any bytes and for being written by others.
        unsafe { core::slice::from_raw_parts(self.at.cast::<Word>(), self.bytes / size_of::<Word>()) }
    }

    /// Makes mapping, descriptor and lock last as long as the process.
    fn keep(self) -> (&'static [Word], Geometry) {
        let kept = core::mem::ManuallyDrop::new(self);
        // SAFETY: as in `words`, and nothing unmaps it any more.
        let words =
            unsafe { core::slice::from_raw_parts(kept.at.cast::<Word>(), kept.bytes / size_of::<Word>()) };
        (words, kept.geometry)
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        // SAFETY: our own mapping, whole; the slices that `words` returned have ended.
        unsafe { sys::unmap(self.at, self.bytes) };
    }
}
