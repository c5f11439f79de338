//! A segment's file as words, read-only, whatever its owner does to it.
//!
//! The owner may shrink the file while it is mapped, and touching a page behind its end raises SIGBUS. The handler here
//! then replaces the whole mapping by zeros: a segment of zeros has no magic, so it is given up at the next poll. To
//! replace single pages would cost a mapping of the kernel's for each, of which a process may have 65,530. Any other
//! SIGBUS takes its usual way.
//!
//! A fault in a mapping of tmpfs cannot be held up for ever by its owner. It takes neither the inode's lock nor one that is
//! held while user memory is read: `write` copies into a locked page with faults switched off, and `userfaultfd` stops the
//! processes that registered for it alone. A fault waits for a hole that is being punched, for as long as the kernel takes
//! for the pages that are there; then the segment is given up.

#![expect(unsafe_code, reason = "maps files and handles SIGBUS")]

use super::directory::{Failure, FileId};
use super::lock::{self, Lock};
use super::probe::FileFacts;
use super::search::reason_of;
use crate::model::UnreadReason;
use ringwatch_wire::layout::{FORMAT_VERSION, Geometry, HEADER_BYTES, MAX_BYTES, Region};
use ringwatch_wire::reader::{OpenError, Reader};
use ringwatch_wire::sync::Word;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};
use std::fs::File;
use std::sync::Once;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, UNIX_EPOCH};

/// Why a file is not read.
#[derive(Debug, thiserror::Error)]
pub(super) enum MapError {
    /// The file cannot be opened or mapped.
    #[error("cannot be read: {0}{advice}", advice = reason_of(*.0).1)]
    Io(#[from] rustix::io::Errno),
    /// Not a regular file.
    #[error("not a regular file")]
    NotFile,
    /// Of another user than its directory.
    #[error("it belongs to user {file}, and its directory to user {owner}")]
    ForeignOwner {
        /// The owner of the file.
        file: u32,
        /// The owner of the directory.
        owner: u32,
    },
    /// The same process as another segment, which is followed.
    #[error(
        "it says to be a process whose segment is another file, which is read; remove the one that is a copy"
    )]
    Duplicate,
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
    /// Parts of it take no memory yet.
    #[error("parts of it were never written; read, they would take this process's memory")]
    Holes,
    /// Larger than any plugin makes one.
    #[error("its tables are larger than any plugin makes them")]
    TooLarge,
    /// All places for guarded mappings are taken, or the quota of its user is used up.
    #[error("more than {0} segments {1}")]
    TooMany(usize, &'static str),
}

impl MapError {
    /// The same as a reason to count.
    pub(super) fn reason(&self) -> UnreadReason {
        match self {
            MapError::Io(errno) => reason_of(*errno).0,
            MapError::NotFile | MapError::NotSegment | MapError::Geometry | MapError::Length(_) => {
                UnreadReason::NotASegment
            }
            MapError::ForeignOwner { .. } => UnreadReason::ForeignOwner,
            MapError::Duplicate => UnreadReason::Duplicate,
            MapError::Opening | MapError::NotReady => UnreadReason::Incomplete,
            MapError::Version(_) => UnreadReason::FormatVersion,
            MapError::Holes | MapError::TooLarge | MapError::TooMany(..) => UnreadReason::Limits,
        }
    }
}

impl From<Failure> for MapError {
    fn from(why: Failure) -> Self {
        match why {
            Failure::NotFile => MapError::NotFile,
            Failure::ForeignOwner { file, owner } => MapError::ForeignOwner { file, owner },
            Failure::TooYoung => MapError::Opening,
            Failure::Mounted => MapError::Io(rustix::io::Errno::XDEV),
            why => MapError::Io(why.errno().unwrap_or(rustix::io::Errno::IO)),
        }
    }
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

extern "C" fn on_sigbus(signal: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel passes a filled siginfo to a SA_SIGINFO handler.
    let at = unsafe { (*info).si_addr() }.addr();
    for (start, end) in STARTS.iter().zip(&ENDS) {
        let (start, end) = (start.load(Ordering::Acquire), end.load(Ordering::Acquire));
        if (start..end).contains(&at) {
            // The first fault of a mapping is its last: nothing of the file is mapped any more.
            let whole = std::ptr::with_exposed_provenance_mut::<libc::c_void>(start);
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
            // SAFETY: replaces a read-only mapping of our own by zeros, whole, while the thread that reads it stands here;
            // mmap is a plain system call and may be made in a signal handler.
            let placed = unsafe { libc::mmap(whole, end - start, libc::PROT_READ, flags, -1, 0) };
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
const YOUNG: Duration = Duration::from_secs(1);

/// A mapped segment.
#[derive(Debug)]
pub(super) struct Mapping {
    words: &'static [Word],
    at: *mut std::ffi::c_void,
    bytes: usize,
    guard: usize,
    owner: u32,
    file: FileId,
    /// The open file, where somebody looks at it again.
    open: Option<File>,
    /// How many blocks it had at first, where holes in it would be filled at this process's expense.
    blocks: Option<i64>,
    closed: bool,
}

// SAFETY: the mapping is read-only here and made of atomics; it belongs to this value alone.
unsafe impl Send for Mapping {}

impl Mapping {
    /// Maps an open file and checks that it is a segment. The file is kept where it holds the lock by which its process is
    /// known to live.
    pub(super) fn of(file: File, facts: &FileFacts, lock: Lock, keeps_lock: bool) -> Result<Self, MapError> {
        install();
        let len = facts.bytes;
        if len == 0 {
            // Plugins of before made the file, took its lock and then gave it a length.
            let opening = is_young(facts) || lock != Lock::Free;
            return Err(if opening { MapError::Opening } else { MapError::NotReady });
        }
        if !(HEADER_BYTES as u64..=MAX_BYTES).contains(&len) {
            return Err(MapError::Length(len));
        }
        let bytes = (len as usize) & !7;
        let guard = reserve().ok_or(MapError::TooMany(GUARDED, "are mapped at once"))?;
        // SAFETY: a new read-only mapping wherever the kernel likes.
        let at = unsafe { mmap(std::ptr::null_mut(), bytes, ProtFlags::READ, MapFlags::SHARED, &file, 0) };
        let at = at.inspect_err(|_| STARTS[guard].store(0, Ordering::Release))?;
        let start = at.expose_provenance();
        STARTS[guard].store(start, Ordering::Release);
        ENDS[guard].store(start + bytes, Ordering::Release);
        // SAFETY: `bytes` bytes are mapped until this value is dropped; `Word` is an atomic u64, which may
        // have any value and may be changed by others.
        let words = unsafe { std::slice::from_raw_parts(at.cast::<Word>(), bytes / 8) };
        let mut mapping = Mapping {
            words,
            at,
            bytes,
            guard,
            owner: facts.owner,
            file: facts.id,
            open: None,
            blocks: None,
            closed: false,
        };
        // A page of tmpfs that is read through a mapping before it was written becomes memory of the reader's cgroup. The
        // plugin reserves all of them. A user's own agent shares its user's memory with it anyway.
        if facts.is_on_tmpfs && facts.owner != rustix::process::geteuid().as_raw() {
            mapping.blocks = Some(facts.blocks);
        }
        if mapping.blocks.is_some() || keeps_lock {
            mapping.open = Some(file);
        }
        if mapping.has_holes() {
            return Err(MapError::Holes);
        }
        match Reader::open(mapping.words) {
            Ok(reader) if is_larger_than_any(&reader) => Err(MapError::TooLarge),
            Ok(_) => Ok(mapping),
            // The writer puts the magic there last, over zeros: anything else never becomes a segment.
            Err(OpenError::NotReady) if mapping.words.first().is_some_and(|w| w.get() != 0) => {
                Err(MapError::NotSegment)
            }
            Err(OpenError::NotReady) if lock != Lock::Free => Err(MapError::Opening),
            Err(e) => Err(e.into()),
        }
    }

    /// The owner of the file.
    pub(super) fn owner(&self) -> u32 {
        self.owner
    }

    /// The identity of the file.
    pub(super) fn file(&self) -> FileId {
        self.file
    }

    /// Gives its pages back; they come again where they are read, as they are in the file. A ring is read once, and all of it
    /// would count for ours.
    pub(super) fn give_back(&self) {
        // SAFETY: our own mapping, read-only: nothing in it is lost. What the kernel refuses stays as it is.
        unsafe { madvise(self.at, self.bytes, Advice::LinuxDontNeed) }.unwrap_or_default();
    }

    /// Gives up what is held for reading it: it was read to its end.
    pub(super) fn close(&mut self) {
        (self.open, self.closed) = (None, true);
        self.give_back();
    }

    /// The holder of its lock now. The question waits for nobody.
    pub(super) fn lock(&self) -> Lock {
        self.open.as_ref().map_or(Lock::Free, lock::holder)
    }

    /// The segment as it is now; `None` once its owner has spoilt it, or it was closed.
    pub(super) fn reader(&self) -> Option<Reader<'_>> {
        if self.closed || self.has_holes() { None } else { Reader::open(self.words).ok() }
    }

    /// True where pages of it are not there although the file is long enough, or it has become shorter. Blocks behind its end
    /// can stand for as many holes; but then reading has filled one, and there are more than at the first look.
    fn has_holes(&self) -> bool {
        let (Some(file), Some(blocks)) = (&self.open, &self.blocks) else { return false };
        // This takes no lock of the inode, except in Linux 6.12-rc5 and some stable releases of November 2024, where whoever
        // holds it keeps this process waiting (commit d949d1d14fa2, taken back by d1aa0c04294e).
        rustix::fs::fstat(file).map_or(true, |now| {
            let bytes = i64::try_from(self.bytes).unwrap_or(i64::MAX);
            now.st_size < bytes || now.st_blocks.saturating_mul(512) < bytes || now.st_blocks != *blocks
        })
    }
}

/// Takes a free place for a guarded mapping.
fn reserve() -> Option<usize> {
    // Nothing can fault below the first page.
    const TAKEN: usize = 1;
    let free =
        |start: &AtomicUsize| start.compare_exchange(0, TAKEN, Ordering::AcqRel, Ordering::Relaxed).is_ok();
    STARTS.iter().position(free)
}

fn is_young(facts: &FileFacts) -> bool {
    let written = UNIX_EPOCH + Duration::from_nanos(facts.written_ns);
    // A clock that was set back makes nothing old.
    written.elapsed().is_ok_and(|age| age < YOUNG)
}

/// Memory is bounded by what a plugin can write, not by what a file can say.
fn is_larger_than_any(reader: &Reader<'_>) -> bool {
    let most = Geometry::full();
    let lines = most.lines();
    Region::ALL.iter().any(|r| reader.ring(*r).slots() > 1 << most.shift(*r))
        || reader.line_rings() > lines.rings() as usize
        || reader.line_ring(0).slots() > 1 << lines.shift()
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

    fn open(path: &std::path::Path) -> Result<Mapping, MapError> {
        let dir =
            super::super::directory::Directory::named(path.parent().expect("a directory")).expect("opens");
        let (file, stat) = dir.open(path.file_name().expect("a name"))?;
        let facts = super::super::probe::facts(&file, &stat).expect("known");
        let lock = lock::holder(&file);
        Mapping::of(file, &facts, lock, false)
    }

    #[test]
    fn a_file_that_shrinks_while_it_is_mapped_is_given_up() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("a.seg");
        std::fs::write(&path, segment_bytes()).expect("written");
        let m = open(&path).expect("a segment");
        assert!(m.reader().is_some());
        std::fs::File::options().write(true).open(&path).expect("opens").set_len(0).expect("shrinks");
        assert!(m.reader().is_none(), "zeros in place of a crash");
    }

    #[test]
    fn a_file_cut_page_by_page_costs_one_mapping_of_the_kernel() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("page-by-page.seg");
        let bytes = segment_bytes();
        std::fs::write(&path, &bytes).expect("written");
        let m = open(&path).expect("a segment");
        let areas = || std::fs::read_to_string("/proc/self/maps").expect("our mappings").lines().count();
        let before = areas();
        let file = std::fs::File::options().write(true).open(&path).expect("opens");
        for page in (0..bytes.len() / 4096).rev() {
            file.set_len(page as u64 * 4096).expect("shrinks");
            assert_eq!(m.words[page * 512].get(), 0);
        }
        assert!(m.reader().is_none() && areas() <= before + 8, "{before} areas before, {} after", areas());
    }

    #[test]
    fn tables_larger_than_any_plugin_makes_are_refused() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("large.seg");
        let g = Geometry::new([16, 4, 4, 6, 4]);
        let words: Vec<Word> = (0..g.bytes() / 8).map(|_| Word::new(0)).collect();
        let s = ringwatch_wire::ring::Segment::new(&words, &g);
        s.format(&g);
        s.open_for_readers();
        let bytes: Vec<u8> = words.iter().flat_map(|w| w.get().to_le_bytes()).collect();
        std::fs::write(&path, bytes).expect("written");
        let refused = open(&path).expect_err("refused");
        assert_eq!((refused.reason(), matches!(refused, MapError::TooLarge)), (UnreadReason::Limits, true));
    }

    #[test]
    fn pages_that_were_given_back_come_again_as_they_are_in_the_file() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("given-back.seg");
        let bytes = segment_bytes();
        std::fs::write(&path, &bytes).expect("written");
        let m = open(&path).expect("a segment");
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
        std::os::unix::fs::FileExt::write_all_at(&file, &7u64.to_le_bytes(), last as u64).expect("written");
        assert_eq!(read().last(), Some(&7));
    }

    #[test]
    fn what_is_no_segment_is_refused_by_name() {
        let dir = tempfile::tempdir().expect("a directory");
        let put = |name: &str, bytes: &[u8]| {
            let p = dir.path().join(name);
            std::fs::write(&p, bytes).expect("written");
            open(&p).expect_err("refused").to_string()
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
        assert!(open(&dir.path().join("link")).is_err());
    }
}
