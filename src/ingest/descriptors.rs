//! File descriptors that are held for long.
//!
//! A process that runs out of descriptors answers nobody: to accept a connection takes one, and so does every look at a
//! file. The kernel gives the lowest free number, so what is held for long may have the lower numbers alone, and those
//! above are free again as soon as what took them for a moment is done.

use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use std::os::fd::{AsRawFd, OwnedFd};

/// One in so many descriptors is never held for long. The daemons' connections take at most a fifth.
const SPARE_SHARE: u64 = 4;
/// Descriptors that come at once at most: a packet takes 253 of them.
const AT_ONCE_MAX: usize = 64;

/// The descriptor, where it may be held for long.
///
/// # Errors
/// `MFILE` where its number is one that is kept for short uses.
pub(super) fn held(fd: OwnedFd) -> Result<OwnedFd, Errno> {
    let number = u64::try_from(fd.as_raw_fd()).unwrap_or(0);
    match getrlimit(Resource::Nofile).current {
        Some(limit) if number >= below(limit) => Err(Errno::MFILE),
        _ => Ok(fd),
    }
}

/// Number of descriptors that may come at once, before it is known which of them may be held: a small part of those that
/// are kept for short uses.
pub(super) fn at_once() -> usize {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    usize::try_from(limit / 32).unwrap_or(usize::MAX).clamp(1, AT_ONCE_MAX)
}

/// The first number that no descriptor may have that is held for long.
fn below(limit: u64) -> u64 {
    limit - limit / SPARE_SHARE
}

/// True for an error that says nothing of what was to be opened: no descriptor or no memory was left for it.
pub(super) fn is_shortage(errno: Errno) -> bool {
    matches!(errno, Errno::MFILE | Errno::NFILE | Errno::NOMEM)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quarter_is_kept_for_short_uses() {
        assert_eq!(below(64), 48);
        assert_eq!(below(1024), 768);
        assert_eq!(below(0), 0);
    }

    #[test]
    fn a_low_number_is_held_and_the_last_ones_are_not() {
        let open = || OwnedFd::from(std::fs::File::open("/dev/null").expect("opens"));
        assert!(held(open()).is_ok());
        let limit = getrlimit(Resource::Nofile).current.expect("limited");
        let last = i32::try_from(limit - 1).expect("a number");
        let high = rustix::io::fcntl_dupfd_cloexec(open(), last).expect("the last one");
        assert_eq!(held(high).expect_err("kept for short uses"), Errno::MFILE);
    }
}
