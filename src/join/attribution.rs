//! The bytes that the wires of a GPU, or the network of a node, moved, compared with what operations should have
//! moved, second by second.
//!
//! A reading and an operation are both spread evenly over their time; seconds are compared when late records have had
//! their time to come. Nothing is kept of a single operation.

use super::wire::Wire;
use crate::model::{CommId, Func, Traffic};
use std::collections::{BTreeMap, VecDeque};

/// The length of a window, in ns.
const WINDOW_NS: u64 = 1_000_000_000;
/// A window is compared when it has been over for so many windows.
const SETTLE: u64 = 3;
/// Windows kept of each GPU.
const KEPT: usize = 120;
/// An operation that takes longer than so many windows is given to the last ones.
const LONGEST: u64 = 60;
/// Readings have to cover this share of a window.
const COVERED: f64 = 0.9;
/// Up to this share above what is expected is the wire's own: acknowledgements, padding, edges of windows.
const MARGIN: f64 = 0.05;
/// The same of a network: TCP puts 66 bytes before every 1,448, and its acknowledgements come on top; RoCE 78 before
/// 1,024 or 4,096.
const NETWORK_MARGIN: f64 = 0.1;
/// Below this, in bytes a window, there is always something: barriers, memory mapped by others.
const NOISE_BYTES: f64 = 1e6;
/// Communicators and functions that are counted apart; what more there are is counted under communicator 0.
const KEYS: usize = 512;

/// One operation's part on one GPU, as it goes into the books.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Carried {
    pub(super) comm: CommId,
    pub(super) func: Func,
    /// Absent where it is not known what it should move.
    pub(super) wire: Option<Wire>,
    pub(super) from_ns: u64,
    pub(super) to_ns: u64,
    /// True where that time is a guess.
    pub(super) estimated: bool,
}

/// One second of one GPU's wires.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct WireWindow {
    /// Its number: seconds of the host's monotonic clock.
    pub second: u64,
    /// The bytes that the counters moved.
    measured: Wire,
    /// For how much of it there were readings, in ns.
    covered_ns: f64,
    /// The bytes that each communicator's operations should have moved.
    by: Vec<(CommId, Func, Wire)>,
    /// True where the time of an operation in it is a guess: the second may be another one.
    pub estimated: bool,
    /// Operations in it of which it is not known what they should move.
    pub unknown: u64,
    /// True for a network's.
    network: bool,
}

impl WireWindow {
    /// The bytes that the counters moved, where they were read for the whole of it.
    pub fn measured(&self) -> Option<Wire> {
        (self.covered_ns >= WINDOW_NS as f64 * COVERED).then_some(self.measured)
    }

    /// The bytes that its operations should have moved.
    pub fn expected(&self) -> Wire {
        self.by.iter().fold(Wire::default(), |sum, (.., w)| add(sum, *w))
    }

    /// The same by communicator and function.
    pub fn by(&self) -> impl Iterator<Item = (CommId, Func, Wire)> {
        self.by.iter().copied()
    }

    /// When it began, host monotonic ns.
    pub fn from_ns(&self) -> u64 {
        self.second.saturating_mul(WINDOW_NS)
    }

    /// The expected bytes as a share of the moved ones: near 1 where the wire carries these operations and no more.
    /// Absent where either is not known, or nothing was to be moved.
    pub fn efficiency(&self) -> Option<f64> {
        let (measured, expected) = (self.measured()?, self.expected());
        let (measured, expected) =
            (measured.tx_bytes + measured.rx_bytes, expected.tx_bytes + expected.rx_bytes);
        (self.unknown == 0 && expected > NOISE_BYTES && measured > 0.0).then(|| expected / measured)
    }

    /// The bytes that none of the known operations moved, beyond the wire's own.
    pub fn foreign(&self) -> Option<Wire> {
        let (measured, expected) = (self.measured().filter(|_| self.unknown == 0)?, self.expected());
        Some(Wire {
            tx_bytes: self.beyond(measured.tx_bytes, expected.tx_bytes),
            rx_bytes: self.beyond(measured.rx_bytes, expected.rx_bytes),
        })
    }

    /// The share of the moved bytes that belongs to an expectation, as a factor of it: all that was moved, as long as
    /// it is no more than the wire's own beyond what was expected.
    fn share(&self, measured: f64, expected: f64) -> f64 {
        if expected <= 0.0 {
            return 0.0;
        }
        (measured - self.beyond(measured, expected)) / expected
    }

    fn beyond(&self, measured: f64, expected: f64) -> f64 {
        let margin = if self.network { NETWORK_MARGIN } else { MARGIN };
        let more = measured - expected;
        if more > expected * margin + NOISE_BYTES { more } else { 0.0 }
    }
}

fn add(a: Wire, b: Wire) -> Wire {
    Wire { tx_bytes: a.tx_bytes + b.tx_bytes, rx_bytes: a.rx_bytes + b.rx_bytes }
}

/// The bytes that a communicator's operations of one function moved on a GPU's wires since the readings began.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Share {
    /// The bytes that they should have moved.
    pub expected: Wire,
    /// The bytes that the counters moved for them, in seconds that were read.
    pub attributed: Wire,
    /// The bytes that they should have moved in the seconds that were read.
    pub comparable: Wire,
}

/// One GPU's wires since its readings began.
#[derive(Debug, Clone, Default)]
pub struct WireTotals {
    /// The bytes that the counters moved.
    pub measured: Wire,
    /// The bytes that no known operation moved, in seconds that were compared.
    pub foreign: Wire,
    /// The bytes in seconds with operations of which it is not known what they should move.
    pub unknown: Wire,
    by: BTreeMap<(CommId, Func), Share>,
}

impl WireTotals {
    /// By communicator and function.
    pub fn by(&self) -> impl Iterator<Item = (CommId, Func, &Share)> {
        self.by.iter().map(|((c, f), s)| (*c, *f, s))
    }

    fn of(&mut self, comm: CommId, func: Func) -> &mut Share {
        let full = self.by.len() >= KEYS && !self.by.contains_key(&(comm, func));
        self.by.entry((if full { CommId::unowned(0) } else { comm }, func)).or_default()
    }
}

/// The books of one GPU.
#[derive(Debug, Clone, Default)]
pub(super) struct Books {
    windows: VecDeque<WireWindow>,
    /// Windows below this are compared.
    settled: u64,
    totals: WireTotals,
    network: bool,
}

impl Books {
    /// Totals of a network.
    pub(super) fn of_network() -> Self {
        Books { network: true, ..Books::default() }
    }

    pub(super) fn windows(&self) -> impl DoubleEndedIterator<Item = &WireWindow> {
        self.windows.iter().filter(|w| w.second < self.settled)
    }

    pub(super) fn totals(&self) -> &WireTotals {
        &self.totals
    }

    /// The windows of a time, each with the share of the time that is in it. Those that are compared or forgotten
    /// already are left out.
    fn over(&mut self, from_ns: u64, to_ns: u64, mut each: impl FnMut(&mut WireWindow, f64)) {
        let last = to_ns / WINDOW_NS;
        let first = (from_ns / WINDOW_NS).max(last.saturating_sub(LONGEST));
        let from_ns = from_ns.max(first * WINDOW_NS);
        let whole = to_ns.saturating_sub(from_ns);
        for second in first..=last {
            let (begin, end) = (second * WINDOW_NS, (second + 1).saturating_mul(WINDOW_NS));
            let inside = to_ns.min(end).saturating_sub(from_ns.max(begin));
            // A moment belongs to one window.
            let share = if whole == 0 { 1.0 } else { inside as f64 / whole as f64 };
            if share > 0.0 && second >= self.settled {
                each(self.window(second), share);
            }
        }
    }

    fn window(&mut self, second: u64) -> &mut WireWindow {
        let at = self.windows.partition_point(|w| w.second < second);
        if self.windows.get(at).is_none_or(|w| w.second != second) {
            self.windows.insert(at, WireWindow { second, network: self.network, ..WireWindow::default() });
        }
        &mut self.windows[at]
    }

    /// Takes a reading that ended at a moment.
    pub(super) fn read(&mut self, at_ns: u64, traffic: &Traffic) {
        let Some(moved) = traffic.nvlink else { return };
        self.moved(traffic.from_ns, at_ns, Wire { tx_bytes: moved.tx_bytes, rx_bytes: moved.rx_bytes });
    }

    /// Takes what the counters moved between two moments.
    pub(super) fn moved(&mut self, from_ns: u64, at_ns: u64, moved: Wire) {
        let sane = |n: f64| n.is_finite() && n >= 0.0;
        if !sane(moved.tx_bytes) || !sane(moved.rx_bytes) || from_ns >= at_ns {
            return;
        }
        self.totals.measured = add(self.totals.measured, moved);
        let length = (at_ns - from_ns) as f64;
        self.over(from_ns, at_ns, |w, share| {
            w.measured = add(w.measured, moved.times(share));
            w.covered_ns += length * share;
        });
    }

    /// Takes an operation.
    pub(super) fn carry(&mut self, c: &Carried) {
        if let Some(wire) = c.wire {
            let share = self.totals.of(c.comm, c.func);
            share.expected = add(share.expected, wire);
        }
        let to_ns = c.to_ns.max(c.from_ns);
        self.over(c.from_ns, to_ns, |w, share| {
            w.estimated |= c.estimated;
            let Some(wire) = c.wire else {
                w.unknown += 1;
                return;
            };
            let full = w.by.len() >= KEYS;
            match w.by.iter_mut().find(|(comm, func, _)| (*comm, *func) == (c.comm, c.func)) {
                Some((.., known)) => *known = add(*known, wire.times(share)),
                None if full => w.unknown += 1,
                None => w.by.push((c.comm, c.func, wire.times(share))),
            }
        });
    }

    /// Compares what has been over for long enough.
    pub(super) fn settle(&mut self, now_ns: u64) {
        let below = (now_ns / WINDOW_NS).saturating_sub(SETTLE);
        if below <= self.settled {
            return;
        }
        let fresh: Vec<WireWindow> =
            self.windows.iter().filter(|w| (self.settled..below).contains(&w.second)).cloned().collect();
        self.settled = below;
        for w in fresh {
            let Some(measured) = w.measured() else { continue };
            if w.unknown > 0 {
                self.totals.unknown = add(self.totals.unknown, measured);
                continue;
            }
            if let Some(foreign) = w.foreign() {
                self.totals.foreign = add(self.totals.foreign, foreign);
            }
            let all = w.expected();
            let tx = w.share(measured.tx_bytes, all.tx_bytes);
            let rx = w.share(measured.rx_bytes, all.rx_bytes);
            for (comm, func, expected) in w.by {
                let share = self.totals.of(comm, func);
                share.comparable = add(share.comparable, expected);
                let moved = Wire { tx_bytes: expected.tx_bytes * tx, rx_bytes: expected.rx_bytes * rx };
                share.attributed = add(share.attributed, moved);
            }
        }
        while self.windows.len() > KEPT {
            self.windows.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Moved;

    const S: u64 = WINDOW_NS;
    const GB: f64 = 1e9;

    fn traffic(from_ns: u64, tx: f64, rx: f64) -> Traffic {
        let nvlink = Some(Moved { tx_bytes: tx, rx_bytes: rx });
        Traffic { gpu: "0000:1a:00.0".to_owned(), from_ns, nvlink, ..Traffic::default() }
    }

    fn op(comm: u64, from_ns: u64, to_ns: u64, bytes: Option<f64>) -> Carried {
        Carried {
            comm: CommId::unowned(comm),
            func: Func::AllReduce,
            wire: bytes.map(|b| Wire { tx_bytes: b, rx_bytes: b }),
            from_ns,
            to_ns,
            estimated: false,
        }
    }

    /// Readings ten times a second, of so many bytes a second.
    fn read(books: &mut Books, seconds: std::ops::Range<u64>, a_second: f64) {
        for i in seconds.start * 10..seconds.end * 10 {
            books.read((i + 1) * S / 10, &traffic(i * S / 10, a_second / 10.0, a_second / 10.0));
        }
    }

    #[test]
    fn operations_that_fill_the_wire_explain_it() {
        let mut books = Books::default();
        read(&mut books, 10..20, 1.01 * GB);
        // 2.5 ms each, across every edge.
        for i in 0..4_000 {
            let from = 10 * S + i * 2_500_000;
            books.carry(&op(7, from, from + 2_500_000, Some(GB / 400.0)));
        }
        books.settle(23 * S);
        let windows: Vec<&WireWindow> = books.windows().collect();
        assert_eq!(windows.len(), 10);
        for w in windows {
            assert!((w.expected().tx_bytes / GB - 1.0).abs() < 1e-6, "{w:?}");
            assert!((w.efficiency().expect("both are known") - 1.0 / 1.01).abs() < 1e-6, "{w:?}");
            assert_eq!(w.foreign(), Some(Wire::default()));
        }
        let (comm, _, share) = books.totals().by().next().expect("one");
        assert_eq!(comm, CommId::unowned(7));
        assert!((share.attributed.tx_bytes / (10.0 * GB) - 1.01).abs() < 1e-6, "what was moved: {share:?}");
        assert!((share.expected.tx_bytes / (10.0 * GB) - 1.0).abs() < 1e-6, "{share:?}");
    }

    #[test]
    fn the_rest_is_foreign_and_two_communicators_share_by_what_they_should_move() {
        let mut books = Books::default();
        read(&mut books, 10..12, 4.0 * GB);
        books.carry(&op(1, 10 * S, 12 * S, Some(2.0 * GB)));
        books.carry(&op(2, 10 * S, 12 * S, Some(4.0 * GB)));
        books.settle(20 * S);
        let w = books.windows().next().expect("a window");
        assert!((w.foreign().expect("known").rx_bytes / GB - 1.0).abs() < 1e-9, "{w:?}");
        let shares: Vec<f64> = books.totals().by().map(|(.., s)| s.attributed.tx_bytes / GB).collect();
        assert!((shares[0] - 2.0).abs() < 1e-9 && (shares[1] - 4.0).abs() < 1e-9, "{shares:?}");
        assert!((books.totals().foreign.tx_bytes / GB - 2.0).abs() < 1e-9);
        assert!((books.totals().measured.tx_bytes / GB - 8.0).abs() < 1e-9);
    }

    #[test]
    fn an_idle_wire_is_nobodys() {
        let mut books = Books::default();
        read(&mut books, 10..14, 2e5);
        books.settle(20 * S);
        assert_eq!(books.windows().count(), 4);
        assert!(books.windows().all(|w| w.efficiency().is_none() && w.foreign() == Some(Wire::default())));
        assert_eq!(books.totals().foreign, Wire::default());
    }

    #[test]
    fn a_second_without_readings_or_with_the_unknown_says_nothing() {
        let mut books = Books::default();
        read(&mut books, 10..11, GB);
        books.carry(&op(1, 11 * S, 12 * S, Some(GB)));
        books.carry(&op(2, 10 * S, 10 * S, None));
        books.settle(20 * S);
        for w in books.windows() {
            assert_eq!((w.efficiency(), w.foreign()), (None, None), "{w:?}");
        }
        assert!((books.totals().unknown.tx_bytes / GB - 1.0).abs() < 1e-9);
        let (.., share) = books.totals().by().next().expect("one");
        assert_eq!((share.expected.tx_bytes, share.comparable.tx_bytes), (GB, 0.0));
    }

    #[test]
    fn odd_readings_and_endless_operations_are_bounded() {
        let mut books = Books::default();
        books.read(0, &traffic(0, 1.0, 1.0));
        books.read(5, &traffic(9, 1.0, 1.0));
        books.read(S, &traffic(0, f64::NAN, 1.0));
        books.read(u64::MAX, &traffic(0, 1.0, 1.0));
        books.carry(&op(1, 0, u64::MAX, Some(1.0)));
        assert!(books.windows.len() <= 61, "{}", books.windows.len());
        for i in 0..1_000 {
            books.carry(&op(i, i * S, i * S, Some(1.0)));
            books.settle(i * S);
        }
        assert!(books.windows.len() <= KEPT + 5 + 61 && books.totals().by().count() <= KEYS + 1);
    }
}
