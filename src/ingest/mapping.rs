//! A segment's file as words, read-only, whatever its owner does to it.
//!
//! The owner may shrink the file while it is mapped, and touching a page behind its end raises SIGBUS. The
//! handler here puts zeros in place of such pages of our own mappings; a segment of zeros has no magic and is
//! given up at the next look. Any other SIGBUS takes its usual way.

#![expect(unsafe_code, reason = "maps files and handles SIGBUS")]

use ringwatch_wire::layout::{FORMAT_VERSION, HEADER_BYTES, MAX_BYTES, head};
use ringwatch_wire::reader::{OpenError, Reader};
use ringwatch_wire::sync::Word;
use rustix::fs::{Mode, OFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::Path;
use std::sync::Once;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Why a file is not read.
#[derive(Debug, thiserror::Error)]
pub(super) enum MapError {
    /// The file cannot be opened or mapped.
    #[error("cannot be read: {0}; run ringwatch as the job's user or as root")]
    Io(#[from] std::io::Error),
    /// Not a regular file.
    #[error("not a regular file")]
    NotFile,
    /// Too short or too long.
    #[error("{0} bytes long, which no segment is (between {HEADER_BYTES} and {MAX_BYTES})")]
    Length(u64),
    /// Being opened by its writer.
    #[error("its process is opening it now")]
    Opening,
    /// Never opened.
    #[error("not ready: its process was killed while it opened it")]
    NotReady,
    /// Something else.
    #[error("not a segment: it does not begin as one")]
    NotSegment,
    /// Of another version.
    #[error(
        "format version {0}, this ringwatch reads {FORMAT_VERSION}; use the plugin and the program of one release"
    )]
    Version(u32),
    /// Contradicts itself.
    #[error("not a segment: its table of regions is wrong")]
    Geometry,
    /// All places for guarded mappings are taken.
    #[error("too many segments are mapped at once")]
    TooMany,
}

impl From<OpenError> for MapError {
    fn from(e: OpenError) -> Self {
        match e {
            OpenError::Short => MapError::Geometry,
            OpenError::NotReady => MapError::NotReady,
            OpenError::Version(v) => MapError::Version(v),
            OpenError::Geometry => MapError::Geometry,
        }
    }
}

const GUARDED: usize = 8192;
static STARTS: [AtomicUsize; GUARDED] = [const { AtomicUsize::new(0) }; GUARDED];
static ENDS: [AtomicUsize; GUARDED] = [const { AtomicUsize::new(0) }; GUARDED];
static INSTALL: Once = Once::new();
const PAGE: usize = 4096;

extern "C" fn on_sigbus(signal: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel passes a filled siginfo to a SA_SIGINFO handler.
    let at = unsafe { (*info).si_addr() }.addr();
    for (start, end) in STARTS.iter().zip(&ENDS) {
        if (start.load(Ordering::Acquire)..end.load(Ordering::Acquire)).contains(&at) {
            let page = std::ptr::with_exposed_provenance_mut::<libc::c_void>(at & !(PAGE - 1));
            // SAFETY: replaces one page of our own read-only mapping by zeros; mmap is a plain system call
            // and may be made in a signal handler.
            let placed = unsafe {
                libc::mmap(
                    page,
                    PAGE,
                    libc::PROT_READ,
                    libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED,
                    -1,
                    0,
                )
            };
            if placed != libc::MAP_FAILED {
                return;
            }
        }
    }
    // Not ours: back to the default, and the fault repeats with its usual end.
    // SAFETY: signal() may be called in a signal handler.
    unsafe { libc::signal(signal, libc::SIG_DFL) };
}

fn install() {
    INSTALL.call_once(|| {
        // SAFETY: an all-zero sigaction is valid; the handler only does what a handler may.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction =
                (on_sigbus as extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void)) as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_NODEFER;
            libc::sigaction(libc::SIGBUS, &action, std::ptr::null_mut());
        }
    });
}

/// An empty file younger than this may be being made.
const YOUNG: std::time::Duration = std::time::Duration::from_secs(1);

/// A mapped segment.
#[derive(Debug)]
pub(super) struct Mapping {
    words: &'static [Word],
    at: *mut std::ffi::c_void,
    bytes: usize,
    guard: usize,
    file: std::fs::File,
}

// SAFETY: the mapping is read-only here and made of atomics; it belongs to this value alone.
unsafe impl Send for Mapping {}

impl Mapping {
    /// Whose file it is; nobody's where that cannot be said.
    pub(super) fn owner(&self) -> u32 {
        self.file.metadata().map_or(u32::MAX, |m| std::os::unix::fs::MetadataExt::uid(&m))
    }

    /// Gives its pages back; they come again where they are read, as they are in the file. A ring is read once, and all of it
    /// would count for ours.
    pub(super) fn give_back(&self) {
        // SAFETY: our own mapping, read-only: nothing in it is lost. What the kernel refuses stays as it is.
        unsafe { madvise(self.at, self.bytes, Advice::LinuxDontNeed) }.unwrap_or_default();
    }

    /// Opens and maps a file and checks that it is a segment.
    pub(super) fn open(path: &Path) -> Result<Self, MapError> {
        install();
        // Opening a device can do things; only what is a file already is opened.
        if !std::fs::symlink_metadata(path)?.is_file() {
            return Err(MapError::NotFile);
        }
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file =
            std::fs::File::from(rustix::fs::open(path, flags, Mode::empty()).map_err(std::io::Error::from)?);
        let meta = file.metadata()?;
        let kind = meta.file_type();
        if !kind.is_file() || kind.is_fifo() {
            return Err(MapError::NotFile);
        }
        let len = meta.len();
        if len == 0 {
            // Between its making and its lock a file is empty, for an instant.
            let young = meta.modified()?.elapsed().is_ok_and(|age| age < YOUNG);
            return Err(if young || is_locked(&file) { MapError::Opening } else { MapError::NotReady });
        }
        if len < HEADER_BYTES as u64 {
            return Err(MapError::Length(len));
        }
        if len > MAX_BYTES {
            return Err(MapError::Length(len));
        }
        let bytes = (len as usize) & !7;
        // SAFETY: a new read-only mapping wherever the kernel likes.
        let at = unsafe { mmap(std::ptr::null_mut(), bytes, ProtFlags::READ, MapFlags::SHARED, &file, 0) }
            .map_err(std::io::Error::from)?;
        let start = at.expose_provenance();
        let mut guard = GUARDED;
        for (i, slot) in STARTS.iter().enumerate() {
            if slot.compare_exchange(0, start, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                ENDS[i].store(start + bytes, Ordering::Release);
                guard = i;
                break;
            }
        }
        // SAFETY: `bytes` bytes are mapped until this value is dropped; `Word` is an atomic u64, which may
        // have any value and may be changed by others.
        let words = unsafe { std::slice::from_raw_parts(at.cast::<Word>(), bytes / 8) };
        let mapping = Mapping { words, at, bytes, guard, file };
        if guard == GUARDED {
            return Err(MapError::TooMany);
        }
        match Reader::open(mapping.words) {
            Ok(_) => Ok(mapping),
            // The writer puts the magic there last, over zeros: anything else never becomes a segment.
            Err(OpenError::NotReady) if mapping.words.first().is_some_and(|w| w.get() != 0) => {
                Err(MapError::NotSegment)
            }
            Err(OpenError::NotReady) if mapping.is_locked() => Err(MapError::Opening),
            Err(e) => Err(e.into()),
        }
    }

    /// True while a process holds the segment's lock, which its writer does for as long as it lives.
    pub(super) fn is_locked(&self) -> bool {
        is_locked(&self.file)
    }

    /// Writes the two words by which a reader says of which communicator it wants detail, and until when.
    ///
    /// They are written through the file: the mapping stays one that cannot be written to.
    pub(super) fn want(&self, comm: u64, until_ns: u64) -> std::io::Result<()> {
        let own = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        let file = std::fs::OpenOptions::new().write(true).open(own)?;
        file.write_all_at(&comm.to_le_bytes(), head::WANTED_COMM as u64 * 8)?;
        file.write_all_at(&until_ns.to_le_bytes(), head::WANTED_UNTIL as u64 * 8)
    }

    /// The segment as it is now; `None` once its owner has spoilt it.
    pub(super) fn reader(&self) -> Option<Reader<'_>> {
        Reader::open(self.words).ok()
    }
}

fn is_locked(file: &std::fs::File) -> bool {
    use rustix::fs::{FlockOperation, flock};
    match flock(file, FlockOperation::NonBlockingLockShared) {
        Ok(()) => {
            // Nobody has it, and we do not want it.
            flock(file, FlockOperation::Unlock).ok();
            false
        }
        Err(e) => e == rustix::io::Errno::WOULDBLOCK,
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if let (Some(start), Some(end)) = (STARTS.get(self.guard), ENDS.get(self.guard)) {
            end.store(0, Ordering::Release);
            start.store(0, Ordering::Release);
        }
        // SAFETY: our own mapping, whole; `words` dies with this value.
        if let Err(e) = unsafe { munmap(self.at, self.bytes) } {
            debug_assert!(false, "munmap: {e}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringwatch_wire::layout::Geometry;

    fn segment_bytes() -> Vec<u8> {
        let g = Geometry::within(64 << 10).expect("fits");
        let words: Vec<Word> = (0..g.bytes() / 8).map(|_| Word::new(0)).collect();
        let s = ringwatch_wire::ring::Segment::new(&words, &g);
        s.format(&g);
        s.open_for_readers();
        words.iter().flat_map(|w| w.get().to_le_bytes()).collect()
    }

    #[test]
    fn a_file_that_shrinks_while_it_is_mapped_is_given_up() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("a.seg");
        std::fs::write(&path, segment_bytes()).expect("written");
        let m = Mapping::open(&path).expect("a segment");
        assert!(m.reader().is_some());
        std::fs::File::options().write(true).open(&path).expect("opens").set_len(0).expect("shrinks");
        assert!(m.reader().is_none(), "zeros in place of a crash");
    }

    #[test]
    fn pages_that_were_given_back_come_again_as_they_are_in_the_file() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("given-back.seg");
        let bytes = segment_bytes();
        std::fs::write(&path, &bytes).expect("written");
        let m = Mapping::open(&path).expect("a segment");
        let resident = || {
            let smaps = std::fs::read_to_string("/proc/self/smaps").expect("our mappings");
            let own = smaps.lines().skip_while(|l| !l.ends_with("given-back.seg"));
            let rss = own.skip(1).find_map(|l| l.strip_prefix("Rss:")).expect("ours");
            rss.trim().trim_end_matches(" kB").parse::<u64>().expect("a number")
        };
        let read = || m.words.iter().map(Word::get).collect::<Vec<u64>>();
        let before = read();
        assert!(resident() > 0);
        m.give_back();
        assert_eq!(resident(), 0);
        assert_eq!(read(), before);
        // What is written meanwhile is seen.
        let last = before.len() * 8 - 8;
        let file = std::fs::File::options().write(true).open(&path).expect("opens");
        m.give_back();
        file.write_all_at(&7u64.to_le_bytes(), last as u64).expect("written");
        assert_eq!(read().last(), Some(&7));
    }

    #[test]
    fn what_is_no_segment_is_refused_by_name() {
        let dir = tempfile::tempdir().expect("a directory");
        let put = |name: &str, bytes: &[u8]| {
            let p = dir.path().join(name);
            std::fs::write(&p, bytes).expect("written");
            Mapping::open(&p).expect_err("refused").to_string()
        };
        let good = segment_bytes();
        assert!(put("short", &good[..100]).contains("100 bytes"));
        assert!(put("zeros", &vec![0; 8192]).contains("not ready"));
        assert!(put("noise", &[7; 8192]).contains("not a segment"));
        let mut other = good.clone();
        other[8] = 9;
        assert!(put("version", &other).contains("format version 9"));
        assert!(put("cut", &good[..good.len() - 4096]).contains("table of regions"));
        std::os::unix::fs::symlink("/etc/passwd", dir.path().join("link")).expect("a link");
        assert!(Mapping::open(&dir.path().join("link")).is_err());
    }
}
