//! The few system calls that init makes, through libc.
//!
//! All are old symbols: nothing here needs a glibc newer than 2.17, so `fstat` and `getrandom`, which came
//! or changed later, go through `syscall`. rustix would be the safer dress, but its file descriptors assert,
//! and this library links no panicking code.

#![expect(unsafe_code, reason = "system calls")]

use core::ffi::{CStr, c_int, c_void};

/// A file descriptor, closed when dropped.
#[derive(Debug)]
pub(crate) struct Fd(c_int);

impl Drop for Fd {
    fn drop(&mut self) {
        // SAFETY: our own descriptor, closed once. Nothing could be done about an error.
        unsafe { libc::close(self.0) };
    }
}

/// What a directory entry of ours may be opened with.
pub(crate) const DIRECTORY: c_int = libc::O_RDONLY | libc::O_DIRECTORY | libc::O_CLOEXEC;
pub(crate) const NOFOLLOW: c_int = libc::O_NOFOLLOW;
const NEW_FILE: c_int = libc::O_RDWR | libc::O_CREAT | libc::O_EXCL | libc::O_NOFOLLOW | libc::O_CLOEXEC;

fn fd(raw: c_int) -> Option<Fd> {
    if raw >= 0 { Some(Fd(raw)) } else { None }
}

fn errno() -> c_int {
    // SAFETY: libc's errno of this thread.
    unsafe { *libc::__errno_location() }
}

/// Opens a path.
pub(crate) fn open(path: &CStr, flags: c_int) -> Option<Fd> {
    // SAFETY: a NUL-terminated path.
    fd(unsafe { libc::open(path.as_ptr(), flags | libc::O_CLOEXEC) })
}

/// Creates a file that must not exist yet, readable and writable by its owner alone.
pub(crate) fn create(dir: &Fd, name: &CStr) -> Option<Fd> {
    let mode: libc::mode_t = 0o600;
    // SAFETY: a NUL-terminated name and an open directory.
    fd(unsafe { libc::openat(dir.0, name.as_ptr(), NEW_FILE, mode) })
}

/// Makes a directory for its owner alone; true also when it is there already.
pub(crate) fn make_dir(path: &CStr) -> bool {
    // SAFETY: a NUL-terminated path.
    unsafe { libc::mkdir(path.as_ptr(), 0o700) == 0 || errno() == libc::EEXIST }
}

/// Removes a file.
pub(crate) fn unlink(dir: &Fd, name: &CStr) {
    // SAFETY: a NUL-terminated name and an open directory. A file that cannot be removed stays empty.
    unsafe { libc::unlinkat(dir.0, name.as_ptr(), 0) };
}

/// Reads up to the buffer's length; 0 on any error.
pub(crate) fn read(file: &Fd, into: &mut [u8]) -> usize {
    // SAFETY: the buffer is ours and as long as said.
    let n = unsafe { libc::read(file.0, into.as_mut_ptr().cast(), into.len()) };
    usize::try_from(n).unwrap_or(0)
}

/// What is known of a file system.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FileSystem {
    /// Its magic number.
    pub(crate) kind: u64,
    /// Its size in bytes.
    pub(crate) total: u64,
    /// Bytes free for ordinary users.
    pub(crate) free: u64,
}

/// The file system of a file.
pub(crate) fn file_system(file: &Fd) -> Option<FileSystem> {
    let mut s = core::mem::MaybeUninit::<libc::statfs>::zeroed();
    // SAFETY: fills the struct of its own declaration.
    if unsafe { libc::fstatfs(file.0, s.as_mut_ptr()) } != 0 {
        return None;
    }
    // SAFETY: filled, and zeroed before; integers of any value are valid.
    let s = unsafe { s.assume_init() };
    let block = s.f_bsize as u64;
    Some(FileSystem {
        kind: s.f_type as u64 & 0xffff_ffff,
        total: s.f_blocks.saturating_mul(block),
        free: s.f_bavail.saturating_mul(block),
    })
}

fn stat(file: &Fd) -> Option<libc::stat> {
    let mut s = core::mem::MaybeUninit::<libc::stat>::zeroed();
    // SAFETY: the kernel fills libc's struct stat, which on 64-bit Linux is the kernel's own.
    if unsafe { libc::syscall(libc::SYS_fstat, file.0, s.as_mut_ptr()) } != 0 {
        return None;
    }
    // SAFETY: filled, and zeroed before; integers of any value are valid.
    Some(unsafe { s.assume_init() })
}

/// Owner of a file.
pub(crate) fn owner(file: &Fd) -> Option<u32> {
    stat(file).map(|s| s.st_uid)
}

/// Length of a file in bytes.
pub(crate) fn length(file: &Fd) -> u64 {
    stat(file).and_then(|s| u64::try_from(s.st_size).ok()).unwrap_or(0)
}

/// Opens a file of a directory for reading, if it is there.
pub(crate) fn open_at(dir: &Fd, name: &CStr) -> Option<Fd> {
    let flags = libc::O_RDONLY | libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_CLOEXEC;
    // SAFETY: a NUL-terminated name and an open directory.
    fd(unsafe { libc::openat(dir.0, name.as_ptr(), flags) })
}

/// Takes a file's lock, which says that its process lives; false when somebody has it.
pub(crate) fn lock(file: &Fd) -> bool {
    // SAFETY: our own descriptor.
    unsafe { libc::flock(file.0, libc::LOCK_EX | libc::LOCK_NB) == 0 }
}

/// Calls `each` with the names in a directory, in the kernel's order.
pub(crate) fn names(dir: &Fd, mut each: impl FnMut(&CStr)) {
    /// Offset of a name in the kernel's struct linux_dirent64.
    const NAME: usize = 19;
    let mut buffer = [0u64; 512];
    loop {
        let room = size_of_val(&buffer);
        // SAFETY: fills at most `room` bytes of ours with whole entries.
        let got = unsafe { libc::syscall(libc::SYS_getdents64, dir.0, buffer.as_mut_ptr(), room) };
        let Ok(got) = usize::try_from(got) else { return };
        if got == 0 {
            return;
        }
        let start = buffer.as_ptr().cast::<u8>();
        let mut at = 0usize;
        while at + NAME < got {
            // SAFETY: `at` is an entry's start within what the kernel filled; its length lies at offset 16.
            let length = unsafe { start.add(at + 16).cast::<u16>().read_unaligned() };
            // SAFETY: an entry's name is NUL-terminated within the entry.
            each(unsafe { CStr::from_ptr(start.add(at + NAME).cast()) });
            if length == 0 {
                return;
            }
            at += usize::from(length);
        }
    }
}

/// Gives a file its length, every block reserved, so that no later write can meet a full disk.
pub(crate) fn reserve(file: &Fd, bytes: u64) -> bool {
    let Ok(len) = libc::off_t::try_from(bytes) else { return false };
    // SAFETY: our own descriptor.
    unsafe { libc::ftruncate(file.0, 0) == 0 && libc::fallocate(file.0, 0, 0, len) == 0 }
}

/// Maps a whole file shared, or (without one) fresh private memory; the pages are made at once.
pub(crate) fn map(file: Option<&Fd>, len: usize) -> Option<*mut c_void> {
    let kind = if file.is_some() { libc::MAP_SHARED } else { libc::MAP_PRIVATE | libc::MAP_ANONYMOUS };
    let at = file.map_or(-1, |f| f.0);
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping wherever the kernel likes: it replaces nothing.
    let p = unsafe { libc::mmap(core::ptr::null_mut(), len, access, kind | libc::MAP_POPULATE, at, 0) };
    if p == libc::MAP_FAILED { None } else { Some(p) }
}

/// What a forked child is to find in a mapping.
#[derive(Debug, Clone, Copy)]
pub(crate) enum InChild {
    /// Zeros.
    Wiped,
    /// Nothing.
    Absent,
}

/// Says what a forked child finds in a mapping; false when the kernel cannot.
///
/// # Safety
/// The range must be a whole mapping of the caller's own.
pub(crate) unsafe fn on_fork(at: *mut c_void, len: usize, what: InChild) -> bool {
    let advice = match what {
        InChild::Wiped => libc::MADV_WIPEONFORK,
        InChild::Absent => libc::MADV_DONTFORK,
    };
    // SAFETY: the caller's mapping; the advice changes nothing in this process.
    unsafe { libc::madvise(at, len, advice) == 0 }
}

/// Unmaps.
///
/// # Safety
/// The range must be a whole mapping that nobody uses any more.
pub(crate) unsafe fn unmap(at: *mut c_void, len: usize) {
    // SAFETY: as the caller promises. A failure only leaves it mapped.
    unsafe { libc::munmap(at, len) };
}

/// Process id and effective user id.
pub(crate) fn ids() -> (u32, u32) {
    // SAFETY: these cannot fail.
    unsafe { (libc::getpid() as u32, libc::geteuid()) }
}

/// Number of this thread.
pub(crate) fn thread() -> u64 {
    // SAFETY: it cannot fail.
    unsafe { libc::syscall(libc::SYS_gettid) as u64 }
}

/// A random word, if the kernel has randomness already.
pub(crate) fn random() -> Option<u64> {
    let mut word = 0u64;
    // SAFETY: fills up to eight bytes of ours.
    let n = unsafe { libc::syscall(libc::SYS_getrandom, &raw mut word, 8usize, libc::GRND_NONBLOCK) };
    if n == 8 { Some(word) } else { None }
}

/// Sleeps for 0.1 ms.
pub(crate) fn nap() {
    let t = libc::timespec { tv_sec: 0, tv_nsec: 100_000 };
    // SAFETY: reads one timespec; waking early is as good.
    unsafe { libc::nanosleep(&t, core::ptr::null_mut()) };
}

/// The host's name, NUL-padded.
pub(crate) fn host_name() -> [u8; 65] {
    let mut u = core::mem::MaybeUninit::<libc::utsname>::zeroed();
    // SAFETY: fills the struct of its own declaration.
    let ok = unsafe { libc::uname(u.as_mut_ptr()) } == 0;
    // SAFETY: zeroed before; bytes of any value are valid.
    let u = unsafe { u.assume_init() };
    let mut name = [0; 65];
    if ok {
        for (to, from) in name.iter_mut().zip(u.nodename) {
            *to = from as u8;
        }
    }
    name
}

/// A monotonic or real-time clock in ns, read through the vDSO.
#[inline]
pub(crate) fn clock_ns(clock: c_int) -> u64 {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: fills one timespec; for these clocks it cannot fail, and would leave 0.
    unsafe { libc::clock_gettime(clock, &mut t) };
    (t.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(t.tv_nsec as u64)
}

pub(crate) const MONOTONIC: c_int = libc::CLOCK_MONOTONIC;
pub(crate) const REALTIME: c_int = libc::CLOCK_REALTIME;

/// A variable of the environment; empty counts as unset.
pub(crate) fn variable(name: &CStr) -> Option<&'static CStr> {
    // SAFETY: a NUL-terminated name. The value stays valid unless the program changes its environment
    // during init, which no getenv in any library survives.
    let value = unsafe { libc::getenv(name.as_ptr()) };
    if value.is_null() {
        return None;
    }
    // SAFETY: getenv returns a NUL-terminated string.
    let text = unsafe { CStr::from_ptr(value) };
    if text.is_empty() { None } else { Some(text) }
}
