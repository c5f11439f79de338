//! File descriptors: segments need one each, so connections may only take a small share of them.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tracing::warn;

/// The soft limit is raised to the hard one, but not beyond this.
const MOST: u64 = 65_536;

/// How many connections the servers may hold at once. Together they are at most a fifth of all descriptors, unless
/// there are fewer than 64 of these.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::runtime) struct Shares {
    /// HTTP.
    pub(in crate::runtime) http: usize,
    /// The Unix socket.
    pub(in crate::runtime) socket: usize,
}

impl Shares {
    fn of(descriptors: u64) -> Self {
        let share = |of: u64, least: u64, most: u64| (descriptors / of).clamp(least, most) as usize;
        Shares { http: share(8, 4, 128), socket: share(16, 4, 64) }
    }
}

/// Raises the soft limit of descriptors as far as it goes, and returns what connections may take of them.
pub(in crate::runtime) fn raise() -> Shares {
    let limit = getrlimit(Resource::Nofile);
    // Absent means unlimited.
    let (soft, hard) = (limit.current.unwrap_or(MOST), limit.maximum.unwrap_or(MOST));
    let wanted = hard.min(MOST).max(soft);
    let raised = Rlimit { current: Some(wanted), maximum: limit.maximum };
    match setrlimit(Resource::Nofile, raised) {
        Ok(()) => Shares::of(wanted),
        Err(e) => {
            warn!("the limit of open files stays {soft}: {e}");
            Shares::of(soft)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_take_a_small_share_however_many_descriptors_there_are() {
        assert_eq!(Shares::of(65_536), Shares { http: 128, socket: 64 });
        assert_eq!(Shares::of(1024), Shares { http: 128, socket: 64 });
        assert_eq!(Shares::of(256), Shares { http: 32, socket: 16 });
        for descriptors in 64..4096 {
            let shares = Shares::of(descriptors);
            assert!((shares.http + shares.socket) as u64 * 5 <= descriptors, "{descriptors}: {shares:?}");
        }
    }
}
