//! Locks of files as another process sees them.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::Path;

/// A record lock for writing on a whole file.
fn whole_file() -> libc::flock {
    libc::flock {
        l_type: libc::F_WRLCK as i16,
        l_whence: libc::SEEK_SET as i16,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    }
}

/// Takes a file's POSIX record lock, which is held until this process closes the file.
pub fn locked(path: &Path) -> File {
    let file = File::options().write(true).open(path).unwrap();
    // SAFETY: reads one struct.
    assert_eq!(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLK, &whole_file()) }, 0);
    file
}

/// Pid of the process that holds the POSIX record lock of a file, as this pid namespace knows it.
///
/// Not for the process that holds it: the open file that is closed here would take its lock away.
pub fn holder(path: &Path) -> Option<i32> {
    let file = File::open(path).unwrap();
    let mut lock = whole_file();
    // SAFETY: fills one struct.
    assert_eq!(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETLK, &mut lock) }, 0);
    (i32::from(lock.l_type) != libc::F_UNLCK).then_some(lock.l_pid)
}

/// True while some process has the file open with an flock on it.
pub fn is_flocked(path: &Path) -> bool {
    let file = File::open(path).unwrap();
    // SAFETY: our own descriptor.
    unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_SH | libc::LOCK_NB) != 0 }
}

/// Takes a file's flock, as plugins before the first release did; it is held until the file is closed.
pub fn flocked(path: &Path) -> File {
    let file = File::open(path).unwrap();
    // SAFETY: our own descriptor.
    assert_eq!(unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) }, 0);
    file
}
