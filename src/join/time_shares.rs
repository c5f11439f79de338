//! The time of a process: how much of it is inside collectives, and who exchanges how much with whom.

use super::timing::Kernel;
use crate::model::{Exchange, Rank};
use std::collections::{BTreeSet, VecDeque};

/// Seconds of history.
const SECONDS: usize = 120;
/// Kernels of this length, in ns, are waits of which a process comes out with much to do.
const LONG_NS: u64 = 1_000_000_000;
/// Peers of a rank that are remembered.
const PEERS_MAX: usize = 4096;

/// When a process issued operations, in any communicator, host monotonic ns; as closely as its node reports it.
#[derive(Debug, Clone, Copy, Default)]
pub struct Issuing {
    last_ns: Option<u64>,
    /// The last time that it issued nothing for long: from when to when.
    silence: Option<(u64, u64)>,
    lead_ns: u64,
}

impl Issuing {
    /// Takes that it issued something.
    pub(super) fn add(&mut self, at_ns: u64) {
        let since = self.last_ns.filter(|last| at_ns.saturating_sub(*last) >= LONG_NS);
        self.silence = since.map(|last| (last, at_ns)).or(self.silence);
        self.last_ns = self.last_ns.max(Some(at_ns));
    }

    /// Takes that a GPU started an operation so long after it was issued, in ns.
    pub(super) fn leads(&mut self, by_ns: u64) {
        self.lead_ns = self.lead_ns.max(by_ns);
    }

    /// The farthest that its host was ahead of a GPU, in ns, as far as operations are timed.
    pub fn lead_ns(&self) -> u64 {
        self.lead_ns
    }

    /// When it last issued something.
    pub fn last_ns(&self) -> Option<u64> {
        self.last_ns
    }

    /// From when to when it last issued nothing for a second or more, of the silences that are over.
    pub fn silence(&self) -> Option<(u64, u64)> {
        self.silence
    }
}

/// Time of a process's timed kernels, and how much of it is left when what runs at the same time counts once.
#[derive(Debug, Clone, Default)]
pub struct Busy {
    /// By second: its number, the sum of durations, and the time that they cover, in ns.
    seconds: VecDeque<(u64, f64, f64)>,
    /// Until when the kernels so far reach, host clock ns.
    covered_ns: u64,
    /// The same of those that took long.
    long_ns: Option<u64>,
}

impl Busy {
    /// Takes a kernel; they come in about the order of their ends.
    pub(super) fn add(&mut self, k: &Kernel) {
        let end = k.start_ns.saturating_add(k.duration_ns);
        let fresh = end.saturating_sub(k.start_ns.max(self.covered_ns));
        self.covered_ns = self.covered_ns.max(end);
        if k.duration_ns >= LONG_NS {
            self.long_ns = self.long_ns.max(Some(end));
        }
        let at = end / 1_000_000_000;
        match self.seconds.back_mut() {
            Some(s) if s.0 >= at => {
                s.1 += k.duration_ns as f64;
                s.2 += fresh as f64;
            }
            _ => self.seconds.push_back((at, k.duration_ns as f64, fresh as f64)),
        }
        while self.seconds.len() > SECONDS {
            self.seconds.pop_front();
        }
    }

    /// Takes that the process waited in a transfer from one moment to another, host clock ns: its peer had not come.
    pub(super) fn waited(&mut self, from_ns: u64, until_ns: u64) {
        if until_ns.saturating_sub(from_ns) >= LONG_NS {
            self.long_ns = self.long_ns.max(Some(until_ns));
        }
    }

    /// When a kernel last ended, host clock ns; absent without any.
    pub fn released_ns(&self) -> Option<u64> {
        (!self.seconds.is_empty()).then_some(self.covered_ns)
    }

    /// When a kernel last ended that took a second or more, or a peer came for whom the process had waited as long, host clock ns.
    pub fn released_long_ns(&self) -> Option<u64> {
        self.long_ns
    }

    /// The share of the kernels' time that is left when overlaps count once: 1 where nothing does. Absent without any.
    pub fn overlap(&self) -> Option<f64> {
        let (sum, covered) = self.seconds.iter().fold((0.0, 0.0), |(a, b), s| (a + s.1, b + s.2));
        (sum > 0.0).then(|| covered / sum)
    }
}

/// The bytes that a rank exchanged with single others, by sends and receives.
#[derive(Debug, Clone, Default)]
pub struct Exchanged {
    /// Bytes sent.
    pub sent_bytes: u64,
    /// Bytes received.
    pub received_bytes: u64,
    /// Sends.
    pub sends: u64,
    /// Whom it sent to.
    pub(super) peers: BTreeSet<Rank>,
    /// To how many it sent, where only that was told.
    told_peers: u64,
}

impl Exchanged {
    pub(super) fn sent(&mut self, to: Rank, bytes: u64) {
        self.sends += 1;
        self.sent_bytes = self.sent_bytes.saturating_add(bytes);
        if self.peers.len() < PEERS_MAX {
            self.peers.insert(to);
        }
    }

    pub(super) fn received(&mut self, bytes: u64) {
        self.received_bytes = self.received_bytes.saturating_add(bytes);
    }

    /// The message about it for another join.
    pub fn told(&self) -> Exchange {
        Exchange {
            sent_bytes: self.sent_bytes,
            received_bytes: self.received_bytes,
            sends: self.sends,
            peers: self.told_peers.max(self.peers.len() as u64),
        }
    }

    /// Takes what was told of it.
    pub(super) fn take(&mut self, e: &Exchange) {
        self.sent_bytes = self.sent_bytes.max(e.sent_bytes);
        self.received_bytes = self.received_bytes.max(e.received_bytes);
        self.sends = self.sends.max(e.sends);
        self.told_peers = self.told_peers.max(e.peers);
    }

    /// True when it has sent to at least so many others, or to as many as are remembered.
    pub fn knows(&self, others: usize) -> bool {
        self.told().peers as usize >= others.min(PEERS_MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kernel(start_ns: u64, duration_ns: u64) -> Kernel {
        Kernel { start_ns, duration_ns, believed: 1, stamped: 1 }
    }

    #[test]
    fn what_overlaps_counts_once() {
        let mut b = Busy::default();
        assert_eq!(b.overlap(), None);
        b.add(&kernel(0, 100));
        b.add(&kernel(200, 100));
        assert_eq!(b.overlap(), Some(1.0));
        // Beside the second, and half beyond it.
        b.add(&kernel(250, 100));
        b.add(&kernel(260, 40));
        assert_eq!(b.overlap(), Some(250.0 / 340.0));
    }

    #[test]
    fn a_silence_is_over_with_the_next_operation() {
        let mut i = Issuing::default();
        i.add(LONG_NS);
        assert_eq!((i.last_ns(), i.silence()), (Some(LONG_NS), None));
        i.add(LONG_NS * 3);
        i.add(LONG_NS * 2);
        i.add(LONG_NS * 3 + 1);
        assert_eq!((i.last_ns(), i.silence()), (Some(LONG_NS * 3 + 1), Some((LONG_NS, LONG_NS * 3))));
    }

    #[test]
    fn who_came_out_of_what_and_when() {
        let mut b = Busy::default();
        assert_eq!((b.released_ns(), b.released_long_ns()), (None, None));
        b.add(&kernel(1_000, LONG_NS));
        b.add(&kernel(LONG_NS * 3, LONG_NS - 1));
        assert_eq!((b.released_ns(), b.released_long_ns()), (Some(LONG_NS * 4 - 1), Some(LONG_NS + 1_000)));
        b.waited(LONG_NS * 5, LONG_NS * 6 - 1);
        assert_eq!(b.released_long_ns(), Some(LONG_NS + 1_000), "its peer came soon");
        b.waited(LONG_NS * 5, LONG_NS * 6);
        assert_eq!(b.released_long_ns(), Some(LONG_NS * 6));
    }
}
