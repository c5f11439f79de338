//! The few system calls that init makes, through libc.
//!
//! All are old symbols: nothing here needs a glibc newer than 2.17, so `fstat`, `getrandom` and the signal mask,
//! which came, changed or moved later, go through `syscall`. rustix would be safer, but its file descriptors assert,
//! and this library links no panicking code.

#![expect(unsafe_code, reason = "system calls")]

use crate::runtime::segment_name::Text;
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

/// Flags for opening a directory.
pub(crate) const DIRECTORY: c_int = libc::O_RDONLY | libc::O_DIRECTORY | libc::O_CLOEXEC;
const NOFOLLOW: c_int = libc::O_NOFOLLOW;
/// Only the descriptor that creates it may write to a new file: `truncate` or `cp` by the job's own user, which
/// would end the job by SIGBUS, are refused.
const OWNER_READS: libc::mode_t = 0o400;

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

/// Creates a file without a name; `None` where the file system has no such files.
pub(crate) fn create_unnamed(dir: &Fd) -> Option<Fd> {
    let flags = libc::O_TMPFILE | libc::O_RDWR | libc::O_CLOEXEC;
    // SAFETY: a NUL-terminated name and an open directory.
    fd(unsafe { libc::openat(dir.0, c".".as_ptr(), flags, OWNER_READS) })
}

/// Gives a file of [`create_unnamed`] its name; false where that cannot be done or the name is taken.
pub(crate) fn link(file: &Fd, dir: &Fd, name: &CStr) -> bool {
    // Of this thread: another thread may have descriptors of its own.
    let mut own = Text::<48>::new();
    own.push(b"/proc/thread-self/fd/").push_number(u64::from(file.0.unsigned_abs()), 10);
    let follow = libc::AT_SYMLINK_FOLLOW;
    // SAFETY: NUL-terminated paths and an open directory.
    unsafe { libc::linkat(libc::AT_FDCWD, own.as_c().as_ptr(), dir.0, name.as_ptr(), follow) == 0 }
}

/// Creates a file that must not exist yet.
pub(crate) fn create(dir: &Fd, name: &CStr) -> Option<Fd> {
    let flags = libc::O_RDWR | libc::O_CREAT | libc::O_EXCL | libc::O_NOFOLLOW | libc::O_CLOEXEC;
    // SAFETY: a NUL-terminated name and an open directory.
    fd(unsafe { libc::openat(dir.0, name.as_ptr(), flags, OWNER_READS) })
}

/// Opens a file whose every write goes to its end, and makes it where it is not there.
pub(crate) fn open_to_append(dir: &Fd, name: &CStr) -> Option<Fd> {
    let flags = libc::O_RDWR | libc::O_CREAT | libc::O_APPEND | libc::O_NOFOLLOW | libc::O_CLOEXEC;
    // A name may be a pipe, whose open must not wait.
    let flags = flags | libc::O_NONBLOCK;
    let mode: libc::mode_t = 0o600;
    // SAFETY: a NUL-terminated name and an open directory.
    fd(unsafe { libc::openat(dir.0, name.as_ptr(), flags, mode) })
}

/// Writes all bytes at once to the end of a file; false where it cannot.
pub(crate) fn append(file: &Fd, bytes: &[u8]) -> bool {
    // SAFETY: the buffer is ours and as long as said.
    let write = || unsafe { libc::syscall(libc::SYS_write, file.0, bytes.as_ptr(), bytes.len()) };
    without_file_size_signal(|| usize::try_from(write()) == Ok(bytes.len()))
}

/// Writes a line to standard error. Nothing could be done about an error.
pub(crate) fn complain(text: &CStr) {
    let bytes = text.to_bytes();
    // SAFETY: the buffers are as long as said.
    unsafe {
        libc::syscall(libc::SYS_write, 2, bytes.as_ptr(), bytes.len());
        libc::syscall(libc::SYS_write, 2, c"\n".as_ptr(), 1);
    }
}

/// Reads up to the buffer's length from an offset on; 0 on any error.
pub(crate) fn read_at(file: &Fd, into: &mut [u8], offset: u64) -> usize {
    // SAFETY: the buffer is ours and as long as said.
    let n = unsafe { libc::syscall(libc::SYS_pread64, file.0, into.as_mut_ptr(), into.len(), offset) };
    usize::try_from(n).unwrap_or(0)
}

/// Reserves blocks for writes to come, without making the file longer.
pub(crate) fn reserve_behind(file: &Fd, bytes: u64) -> bool {
    let Ok(length) = libc::off_t::try_from(bytes) else { return false };
    // SAFETY: our own descriptor.
    let grow = || unsafe { libc::fallocate(file.0, libc::FALLOC_FL_KEEP_SIZE, 0, length) == 0 };
    without_file_size_signal(grow)
}

/// Makes a directory for its owner alone; true also when it is there already.
pub(crate) fn make_dir(path: &CStr) -> bool {
    // SAFETY: a NUL-terminated path.
    unsafe { libc::mkdirat(libc::AT_FDCWD, path.as_ptr(), 0o700) == 0 || errno() == libc::EEXIST }
}

/// Makes a directory in another one for its owner alone; false where it is not made, [`exists`] then says why.
pub(crate) fn make_dir_at(dir: &Fd, name: &CStr) -> bool {
    // SAFETY: a NUL-terminated name and an open directory.
    unsafe { libc::mkdirat(dir.0, name.as_ptr(), 0o700) == 0 }
}

/// True when the call before failed because there is something of that name.
pub(crate) fn exists() -> bool {
    errno() == libc::EEXIST
}

/// Removes an empty directory; it stays where it is not empty.
pub(crate) fn remove_dir_at(dir: &Fd, name: &CStr) {
    // SAFETY: a NUL-terminated name and an open directory.
    unsafe { libc::unlinkat(dir.0, name.as_ptr(), libc::AT_REMOVEDIR) };
}

/// Opens a directory in another one, no link.
pub(crate) fn open_dir_at(dir: &Fd, name: &CStr) -> Option<Fd> {
    // SAFETY: a NUL-terminated name and an open directory.
    fd(unsafe { libc::openat(dir.0, name.as_ptr(), DIRECTORY | NOFOLLOW) })
}

/// Removes a file; false where it stays.
pub(crate) fn unlink(dir: &Fd, name: &CStr) -> bool {
    // SAFETY: a NUL-terminated name and an open directory.
    unsafe { libc::unlinkat(dir.0, name.as_ptr(), 0) == 0 }
}

/// Reads up to the buffer's length; 0 on any error.
pub(crate) fn read(file: &Fd, into: &mut [u8]) -> usize {
    // SAFETY: the buffer is ours and as long as said.
    let n = unsafe { libc::read(file.0, into.as_mut_ptr().cast(), into.len()) };
    usize::try_from(n).unwrap_or(0)
}

/// Facts about a file system.
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

/// The kernel's facts of one file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Facts {
    /// Neither a directory nor a link, pipe, socket or device.
    pub(crate) is_regular: bool,
    /// User id of the owner.
    pub(crate) uid: u32,
    /// Length in bytes.
    pub(crate) bytes: u64,
    /// Last modification, ns since 1970.
    pub(crate) modified_ns: u64,
    device: u64,
    /// Number of the file in its file system.
    pub(crate) inode: u64,
}

fn facts_by(call: impl FnOnce(*mut libc::stat) -> libc::c_long) -> Option<Facts> {
    let mut s = core::mem::MaybeUninit::<libc::stat>::zeroed();
    if call(s.as_mut_ptr()) != 0 {
        return None;
    }
    // SAFETY: zeroed before and filled by the kernel; integers of any value are valid.
    let s = unsafe { s.assume_init() };
    let second = u64::try_from(s.st_mtime).unwrap_or(0);
    Some(Facts {
        is_regular: s.st_mode & libc::S_IFMT == libc::S_IFREG,
        uid: s.st_uid,
        bytes: u64::try_from(s.st_size).unwrap_or(0),
        modified_ns: second.saturating_mul(1_000_000_000).saturating_add(s.st_mtime_nsec as u64),
        device: s.st_dev,
        inode: s.st_ino,
    })
}

/// Facts of an open file.
pub(crate) fn facts(file: &Fd) -> Option<Facts> {
    // SAFETY: the kernel fills libc's struct stat, which on 64-bit Linux is the kernel's own.
    facts_by(|s| unsafe { libc::syscall(libc::SYS_fstat, file.0, s) })
}

/// Facts of a file in a directory, or of the link where it is one.
pub(crate) fn facts_at(dir: &Fd, name: &CStr) -> Option<Facts> {
    let flags = libc::AT_SYMLINK_NOFOLLOW;
    // SAFETY: as above, with a NUL-terminated name and an open directory.
    facts_by(|s| unsafe { libc::syscall(libc::SYS_newfstatat, dir.0, name.as_ptr(), s, flags) })
}

/// Opens a file of a directory for reading, if it is there.
pub(crate) fn open_at(dir: &Fd, name: &CStr) -> Option<Fd> {
    let flags = libc::O_RDONLY | libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_CLOEXEC;
    // SAFETY: a NUL-terminated name and an open directory.
    fd(unsafe { libc::openat(dir.0, name.as_ptr(), flags) })
}

/// A record lock for writing on a whole file.
fn whole_file_lock() -> libc::flock {
    libc::flock {
        l_type: libc::F_WRLCK as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    }
}

/// True when a process has the file open for writing, or mapped so, in whichever namespace it runs.
///
/// The kernel refuses a lease for reading then. A descriptor that is closed takes nothing from that while the mapping lasts.
pub(crate) fn is_written(file: &Fd) -> bool {
    /// The kernel's number of the request, which the library lacks.
    const F_SETSIG: c_int = 10;
    // SAFETY: our own descriptor, and numbers.
    unsafe {
        // Whoever opens the file for writing meanwhile causes this signal, which nobody hears unless they ask for it.
        libc::syscall(libc::SYS_fcntl, file.0, F_SETSIG, libc::SIGURG);
        if libc::syscall(libc::SYS_fcntl, file.0, libc::F_SETLEASE, libc::F_RDLCK) != 0 {
            return errno() == libc::EAGAIN;
        }
        libc::syscall(libc::SYS_fcntl, file.0, libc::F_SETLEASE, libc::F_UNLCK);
    }
    false
}

/// Takes a file's lock, which says that its process lives; false when somebody has it.
///
/// A POSIX record lock belongs to the process: no forked child inherits it. The process loses it when it closes
/// any descriptor of the file.
pub(crate) fn lock(file: &Fd) -> bool {
    let lock = whole_file_lock();
    // SAFETY: our own descriptor; the kernel reads the struct, which on 64-bit Linux is its own.
    unsafe { libc::syscall(libc::SYS_fcntl, file.0, libc::F_SETLK, &raw const lock) == 0 }
}

/// True when another process holds the file's lock; plugins before the first release hold an flock.
pub(crate) fn is_locked(file: &Fd) -> bool {
    let mut lock = whole_file_lock();
    // SAFETY: our own descriptor; the kernel reads and fills the struct.
    let asked = unsafe { libc::syscall(libc::SYS_fcntl, file.0, libc::F_GETLK, &raw mut lock) } == 0;
    if asked && lock.l_type != libc::F_UNLCK as libc::c_short {
        return true;
    }
    // Shared, so that two readers that ask at once do not take each other for the writer. It goes with the
    // descriptor.
    // SAFETY: our own descriptor.
    unsafe { libc::flock(file.0, libc::LOCK_SH | libc::LOCK_NB) != 0 && errno() == libc::EWOULDBLOCK }
}

/// Calls `each` with the names in a directory, in the kernel's order, until it returns false.
pub(crate) fn names(dir: &Fd, mut each: impl FnMut(&CStr) -> bool) {
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
            let is_wanted = each(unsafe { CStr::from_ptr(start.add(at + NAME).cast()) });
            if length == 0 || !is_wanted {
                return;
            }
            at += usize::from(length);
        }
    }
}

/// Longest file that this process may make, in bytes; `None` where the kernel does not tell.
pub(crate) fn file_size_limit() -> Option<u64> {
    // The kernel's struct rlimit64: soft and hard limit.
    let mut limits = [u64::MAX; 2];
    let none = core::ptr::null::<u64>();
    // SAFETY: fills two words of ours.
    let r = unsafe { libc::syscall(libc::SYS_prlimit64, 0, libc::RLIMIT_FSIZE, none, limits.as_mut_ptr()) };
    (r == 0).then_some(limits[0])
}

/// Gives a file its length, every block reserved, so that no later write can meet a full disk.
pub(crate) fn reserve(file: &Fd, bytes: u64) -> bool {
    let Ok(len) = libc::off_t::try_from(bytes) else { return false };
    // SAFETY: our own descriptor.
    let grow = || unsafe { libc::ftruncate(file.0, 0) == 0 && libc::fallocate(file.0, 0, 0, len) == 0 };
    without_file_size_signal(grow)
}

/// Runs `grow` with SIGXFSZ blocked in this thread, and takes back the signal that it raised: somebody may lower
/// the limit after it was read. False where the signal cannot be blocked.
fn without_file_size_signal(grow: impl FnOnce() -> bool) -> bool {
    /// The kernel's signal set: a bit a signal, from 1.
    const SIGNAL: u64 = 1 << (libc::SIGXFSZ - 1);
    let change = |how: c_int, set: u64, before: *mut u64| {
        // SAFETY: reads one word and fills one, or none where the pointer is NULL.
        unsafe { libc::syscall(libc::SYS_rt_sigprocmask, how, &raw const set, before, size_of::<u64>()) == 0 }
    };
    let pending = || {
        let mut set = 0u64;
        // SAFETY: fills one word.
        unsafe { libc::syscall(libc::SYS_rt_sigpending, &raw mut set, size_of::<u64>()) };
        set & SIGNAL != 0
    };
    let mut mask = 0u64;
    if !change(libc::SIG_BLOCK, SIGNAL, &raw mut mask) {
        return false;
    }
    // A signal that was pending before is the job's own.
    let of_job = pending();
    let grown = grow();
    if !of_job && pending() {
        let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        let set = SIGNAL;
        let none = core::ptr::null_mut::<libc::siginfo_t>();
        // SAFETY: reads a word and a timespec of ours, and waits for nothing.
        unsafe {
            libc::syscall(libc::SYS_rt_sigtimedwait, &raw const set, none, &raw const now, size_of::<u64>())
        };
    }
    change(libc::SIG_SETMASK, mask, core::ptr::null_mut());
    grown
}

/// Runs `f` with all signals of this thread blocked. A thread that it starts inherits that.
pub(crate) fn without_signals<T>(f: impl FnOnce() -> T) -> T {
    let (all, mut before) = (u64::MAX, 0u64);
    let none = core::ptr::null_mut::<u64>();
    let bytes = size_of::<u64>();
    // SAFETY: the kernel's signal set is one word; it is read, and the other one filled.
    unsafe {
        libc::syscall(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, &raw const all, &raw mut before, bytes)
    };
    let out = f();
    // SAFETY: as above.
    unsafe { libc::syscall(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, &raw const before, none, bytes) };
    out
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

/// The content of a mapping in a forked child.
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

/// The address of the calling thread's control block, which no other living thread has.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(crate) fn thread_address() -> u64 {
    let address;
    // SAFETY: reads the first word of the thread's control block, which holds its own address.
    unsafe {
        core::arch::asm!("mov {}, fs:0", out(reg) address, options(nostack, readonly, pure, preserves_flags));
    }
    address
}

/// The same.
#[cfg(target_arch = "aarch64")]
#[inline(always)]
pub(crate) fn thread_address() -> u64 {
    let address;
    // SAFETY: reads the register that holds the address of the thread's control block.
    unsafe {
        core::arch::asm!("mrs {}, tpidr_el0", out(reg) address, options(nostack, nomem, pure, preserves_flags));
    }
    address
}
