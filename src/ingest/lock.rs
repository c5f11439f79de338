//! The lock that a segment's writer holds while it lives.
//!
//! The writer holds a POSIX record lock, which no child inherits, and which names its holder as this process sees it. The
//! plugins of 0.1 before that held an flock; both are looked at.

#![expect(unsafe_code, reason = "no library asks for a lock's holder")]

use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::os::fd::AsRawFd;

/// The holder of a segment's lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Lock {
    /// Nobody: its process is gone.
    Free,
    /// This process, as seen from here.
    Process(u32),
    /// Somebody who is not seen from here.
    Hidden,
}

/// Asks who holds the lock of a file.
pub(super) fn holder(file: &File) -> Lock {
    // SAFETY: all zeros are a valid struct flock, of integers alone.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = libc::F_WRLCK as libc::c_short;
    lock.l_whence = libc::SEEK_SET as libc::c_short;
    // SAFETY: an open descriptor; the kernel fills the struct that it is given.
    let asked = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETLK, &raw mut lock) };
    if asked == 0 && i32::from(lock.l_type) != libc::F_UNLCK {
        return match u32::try_from(lock.l_pid) {
            Ok(pid) if pid > 0 => Lock::Process(pid),
            _ => Lock::Hidden,
        };
    }
    match flock(file, FlockOperation::NonBlockingLockShared) {
        Ok(()) => {
            // To be asked is not to be held: the next writer shall find it free.
            flock(file, FlockOperation::Unlock).ok();
            Lock::Free
        }
        Err(rustix::io::Errno::WOULDBLOCK) => Lock::Hidden,
        Err(_) => Lock::Free,
    }
}

/// True when a process has the file open for writing, or mapped so, in whichever namespace it runs; false where this
/// process may not know.
///
/// The kernel refuses a lease for reading then. A descriptor that is closed takes nothing from that while the mapping lasts.
pub(super) fn is_written(file: &File) -> bool {
    /// The kernel's number of the request, which the library lacks.
    const F_SETSIG: libc::c_int = 10;
    let fd = file.as_raw_fd();
    // SAFETY: an open descriptor, and numbers.
    unsafe {
        // Whoever opens the file for writing meanwhile causes this signal, which ends nobody.
        libc::fcntl(fd, F_SETSIG, libc::SIGURG);
        if libc::fcntl(fd, libc::F_SETLEASE, libc::F_RDLCK) != 0 {
            return std::io::Error::last_os_error().raw_os_error() == Some(libc::EAGAIN);
        }
        libc::fcntl(fd, libc::F_SETLEASE, libc::F_UNLCK);
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader};
    use std::process::{Command, Stdio};

    /// The variable by which a test names the file and the kind of lock to the process that it starts from its own
    /// program.
    const FILE: &str = "RINGWATCH_TEST_LOCKED";
    const RECORD: &str = "RINGWATCH_TEST_RECORD_LOCK";

    /// A process that holds a lock on a file, and a child of it that inherits what can be inherited.
    fn holds(path: &std::path::Path, is_record: bool) -> std::process::Child {
        let mut child = Command::new(std::env::current_exe().expect("this program"))
            .args(["--exact", "ingest::lock::tests::who_is_told_to_holds_a_lock", "--nocapture"])
            .env(FILE, path)
            .env(RECORD, if is_record { "1" } else { "0" })
            .stdout(Stdio::piped())
            .process_group(0)
            .spawn()
            .expect("this program starts");
        let mut lines = BufReader::new(child.stdout.take().expect("a pipe")).lines();
        assert!(lines.any(|l| l.expect("text").ends_with("held")));
        // Its pipe stays: what it says later is nobody's.
        std::mem::forget(lines);
        child
    }

    #[test]
    fn who_is_told_to_holds_a_lock() {
        let Some(path) = std::env::var_os(FILE) else { return };
        let file = File::options().read(true).write(true).open(path).expect("opens");
        // The child gets the descriptor as a stream of its own, which no exec closes. Here that copy is closed at once, and
        // with it would go a record lock that was there before.
        let copy = file.try_clone().expect("a copy");
        let mut child = Command::new("sleep").arg("60").stdin(copy).spawn().expect("starts");
        if std::env::var(RECORD).expect("set") == "1" {
            rustix::fs::fcntl_lock(&file, FlockOperation::NonBlockingLockExclusive).expect("free");
        } else {
            flock(&file, FlockOperation::NonBlockingLockExclusive).expect("free");
        }
        println!("held");
        child.wait().expect("our own");
        drop(file);
    }

    use std::os::unix::process::CommandExt;

    fn end(mut child: std::process::Child) {
        let group = rustix::process::Pid::from_child(&child);
        rustix::process::kill_process_group(group, rustix::process::Signal::KILL).expect("our own");
        child.wait().expect("gone");
    }

    #[test]
    fn a_record_lock_names_its_holder_and_no_child_inherits_it() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let read = File::open(file.path()).expect("opens");
        assert_eq!(holder(&read), Lock::Free);
        let mut child = holds(file.path(), true);
        assert_eq!(holder(&read), Lock::Process(child.id()));
        child.kill().expect("our own");
        child.wait().expect("gone");
        assert_eq!(holder(&read), Lock::Free, "its child lives on");
        end(child);
    }

    #[test]
    fn a_file_that_is_mapped_for_writing_is_written_though_it_is_closed() {
        let file = tempfile::NamedTempFile::new_in("/dev/shm").expect("a file");
        file.as_file().set_len(4096).expect("room");
        let read = File::open(file.path()).expect("opens");
        let access = rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::WRITE;
        let shared = rustix::mm::MapFlags::SHARED;
        // SAFETY: a new mapping wherever the kernel likes.
        let at = unsafe { rustix::mm::mmap(std::ptr::null_mut(), 4096, access, shared, file.as_file(), 0) };
        let at = at.expect("mapped");
        let path = file.into_temp_path();
        assert_eq!((holder(&read), is_written(&read)), (Lock::Free, true));
        // SAFETY: our own mapping, whole, which nobody uses.
        unsafe { rustix::mm::munmap(at, 4096) }.expect("our own");
        assert!(!is_written(&read));
        drop(path);
    }

    #[test]
    fn a_lock_of_an_older_plugin_counts_as_well() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let read = File::open(file.path()).expect("opens");
        let child = holds(file.path(), false);
        assert_eq!(holder(&read), Lock::Hidden);
        end(child);
        let began = std::time::Instant::now();
        while holder(&read) != Lock::Free {
            assert!(began.elapsed() < std::time::Duration::from_secs(10));
        }
    }
}
