//! Making the segment's file: exclusive, private, all its blocks reserved, mapped.

#![expect(unsafe_code, reason = "maps the file")]

use crate::log::{Log, Message};
use crate::process::Identity;
use crate::settings::Settings;
use crate::sys::{self, Fd, FileSystem, InChild};
use core::ffi::CStr;
use ringwatch_wire::layout::Geometry;
use ringwatch_wire::sync::Word;

/// A path or name, NUL-terminated, built without a heap.
struct Text<const N: usize> {
    bytes: [u8; N],
    len: usize,
}

impl<const N: usize> Text<N> {
    const fn new() -> Self {
        Text { bytes: [0; N], len: 0 }
    }

    fn push(&mut self, more: &[u8]) -> &mut Self {
        for b in more {
            // The last byte stays NUL.
            if self.len + 1 < N
                && let Some(place) = self.bytes.get_mut(self.len)
            {
                *place = *b;
                self.len += 1;
            }
        }
        self
    }

    fn push_number(&mut self, n: u64, radix: u64) -> &mut Self {
        let mut divisor = 1u64;
        // The radixes are the constants 10 and 16; `max` says so to the compiler, which then needs no
        // code for a division by zero.
        let radix = radix.max(2);
        while let Some(d) = divisor.checked_mul(radix)
            && d <= n
        {
            divisor = d;
        }
        while divisor > 0 {
            let digit = (n / divisor % radix) as u8;
            self.push(&[if digit < 10 { b'0' + digit } else { b'a' + digit - 10 }]);
            divisor /= radix;
        }
        self
    }

    fn as_c(&self) -> &CStr {
        // SAFETY: `push` leaves at least one NUL behind the text, and the pointer is to all of it.
        unsafe { CStr::from_ptr(self.bytes.as_ptr().cast()) }
    }
}

/// Makes and maps the segment. `None`, and a line in NCCL's log, when that cannot be done.
pub(crate) fn create(
    settings: &Settings,
    identity: &Identity,
    log: &Log,
) -> Option<(&'static [Word], Geometry)> {
    let dir = match open_dir(settings, identity) {
        Ok(dir) => dir,
        Err(message) => {
            log.say(message);
            return None;
        }
    };
    let mut name = Text::<64>::new();
    name.push_number(u64::from(identity.pid), 10)
        .push(b"-")
        .push_number(identity.start_ticks, 10)
        .push(b"-")
        .push_number(identity.nonce, 16)
        .push(b".seg");
    match make(settings, &dir, name.as_c(), log) {
        Ok(m) => {
            log.say(Message::Opened);
            Some(m)
        }
        Err(message) => {
            log.say(message);
            None
        }
    }
}

fn open_dir(settings: &Settings, identity: &Identity) -> Result<Fd, Message> {
    if let Some(dir) = settings.dir {
        if !sys::make_dir(dir) {
            return Err(Message::NoDirectory);
        }
        return sys::open(dir, sys::DIRECTORY).ok_or(Message::NoDirectory);
    }
    let mut path = Text::<64>::new();
    path.push(b"/dev/shm/ringwatch-").push_number(u64::from(identity.uid), 10);
    let path = path.as_c();
    if !sys::make_dir(path) {
        return Err(Message::NoDirectory);
    }
    let dir = sys::open(path, sys::DIRECTORY | sys::NOFOLLOW).ok_or(Message::NoDirectory)?;
    // /dev/shm is everybody's: somebody else may have made this directory to catch our files.
    if sys::owner(&dir) == Some(identity.uid) { Ok(dir) } else { Err(Message::DirectoryOwner) }
}

/// File systems in memory: a store never waits for anything.
const IN_MEMORY: [u64; 2] = [0x0102_1994, 0x8584_58f6];
/// Disks of this host (ext, XFS, Btrfs, overlay): a store may wait when a page is being written back. Taken
/// because the user named the directory, and said in the log.
const ON_DISK: [u64; 4] = [0xef53, 0x5846_5342, 0x9123_683e, 0x794c_7630];

/// Says whether stores to a file here can harm the job. A server's file system can end it by SIGBUS.
fn suitable(fs: &FileSystem, log: &Log) -> Result<(), Message> {
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
fn limit(settings: &Settings, fs: &FileSystem) -> u64 {
    let share = (fs.total / 128).min(fs.free / 8).max(fs.free.min(32 << 10));
    share.min(settings.bytes.unwrap_or(u64::MAX)).min(Geometry::full().bytes())
}

/// Removes segments of dead processes where they take too much room, so that restart after restart does not
/// fill the shared memory that NCCL needs. What an agent has not read by then is lost with them.
fn reap(dir: &Fd, fs: &FileSystem) {
    let budget = (fs.total / 16).min(64 << 20);
    let mut dead = 0u64;
    sys::names(dir, |name| {
        if !name.to_bytes().ends_with(b".seg") {
            return;
        }
        let Some(file) = sys::open_at(dir, name) else { return };
        let bytes = sys::length(&file);
        // An empty one is being made this moment; one whose lock is held is alive, in whatever container.
        if bytes == 0 || !sys::lock(&file) {
            return;
        }
        dead = dead.saturating_add(bytes);
        if dead > budget {
            sys::unlink(dir, name);
        }
    });
}

fn make(
    settings: &Settings,
    dir: &Fd,
    name: &CStr,
    log: &Log,
) -> Result<(&'static [Word], Geometry), Message> {
    let fs = sys::file_system(dir).ok_or(Message::NoDirectory)?;
    suitable(&fs, log)?;
    reap(dir, &fs);
    let mut geometry = Geometry::within(limit(settings, &fs)).ok_or(Message::NoSpace)?;
    let file = sys::create(dir, name).ok_or(Message::NoFile)?;
    // Held while this process lives, in every namespace; before the file has a length, so that nobody takes it
    // for a dead one.
    sys::lock(&file);
    loop {
        let bytes = geometry.bytes();
        if sys::reserve(&file, bytes)
            && let Some(words) = map(&file, bytes)
        {
            // The descriptor stays open for its lock.
            core::mem::forget(file);
            return Ok((words, geometry));
        }
        // What was free a moment ago has been taken: try half.
        match Geometry::within(bytes.saturating_sub(1)) {
            Some(g) => geometry = g,
            None => {
                sys::unlink(dir, name);
                return Err(Message::NoSpace);
            }
        }
    }
}

fn map(file: &Fd, bytes: u64) -> Option<&'static [Word]> {
    let len = usize::try_from(bytes).ok()?;
    let at = sys::map(Some(file), len)?;
    // A forked child has no use for it. Where the kernel refuses, the child just keeps the mapping.
    // SAFETY: our own fresh mapping, whole.
    unsafe { sys::on_fork(at, len, InChild::Absent) };
    // SAFETY: `len` bytes are mapped, page-aligned and for good; `Word` is an atomic u64, valid for any bytes
    // and for being written by others.
    Some(unsafe { core::slice::from_raw_parts(at.cast::<Word>(), len / size_of::<Word>()) })
}
