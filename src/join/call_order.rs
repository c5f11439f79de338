//! The order in which a process issues its calls, and where it left that order.
//!
//! Training loops repeat themselves: after the same calls comes the same call. A process that for once issues another one
//! than ever before left a call out, made one too many or swapped two. By itself this says little, since loops pause for an
//! evaluation or a checkpoint; among processes that stand still it tells who is out of order.
//!
//! What comes next is looked up by the last runs of equal calls ([`RUNS`]) and by the place in the present run. Calls are taken
//! when all that were issued before are known.

use super::call_mix::CallMixes;
use crate::model::{Call, CallKind, CallState, CommId, Departure, Mix, OpRecord, SegmentId, Track};
use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};

/// Runs of equal calls by which a place in the loop is known again: many, or where that place was never passed before, few.
const RUNS: [usize; 2] = [32, 8];
/// So long after its issue a call is taken, in ns: records of several rings of one process are not read at one moment.
const SETTLE_NS: u64 = 100_000_000;
/// Places in a loop that are remembered, and calls that have not been taken yet.
const REMEMBERED: usize = 4096;
/// Calls that have not been taken yet, of a process that issues few.
const FEW: usize = 64;
/// Times are kept in these units, in ns.
const UNIT_NS: u64 = 1_000_000;

/// Equal calls in a row.
#[derive(Debug, Clone, Copy)]
struct Run {
    kind: u16,
    calls: u16,
}

/// The call that came next at a place in the loop.
#[derive(Debug, Clone, Copy)]
struct Next {
    kind: u16,
    times: u16,
    /// When it was last passed, in units since the first call.
    last: u32,
    /// Different calls came next: it tells nothing.
    varies: bool,
}

/// See the module.
#[derive(Debug, Clone, Default)]
pub struct CallOrder {
    /// Calls that were not taken yet, behind the numbers of their records.
    fresh: Vec<(u64, Call)>,
    /// Calls that were issued before this moment are taken, host monotonic ns.
    taken_ns: u64,
    first_ns: Option<u64>,
    kinds: Vec<(CallKind, u64)>,
    numbers: HashMap<CallKind, u16>,
    /// The last runs; the last one is the present one.
    runs: VecDeque<Run>,
    next: HashMap<u64, Next, BuildHasherDefault<Direct>>,
    left: Option<Departure>,
    usual_ns: Option<u64>,
    mixes: CallMixes,
}

/// Keys are hashes already.
#[derive(Debug, Default)]
struct Direct(u64);

impl Hasher for Direct {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|b| self.0 = self.0.rotate_left(8) ^ u64::from(*b));
    }
    fn write_u64(&mut self, n: u64) {
        self.0 = n;
    }
}

impl CallOrder {
    /// The departure from its usual order that counts; absent where it never left it.
    pub fn left(&self) -> Option<&Departure> {
        self.left.as_ref()
    }

    /// When it last issued the call that usually comes next.
    pub fn usual_ns(&self) -> Option<u64> {
        self.usual_ns
    }

    /// How it mixes transfers and collectives of a communicator.
    pub fn mix(&self, comm: CommId) -> Option<Mix> {
        self.mixes.of(comm)
    }

    /// The state that agents tell where not every record comes.
    pub fn state(&self, segment: SegmentId) -> CallState {
        CallState { segment, left: self.left, usual_ns: self.usual_ns, mixes: self.mixes.all() }
    }

    /// Takes what was told of it.
    pub(super) fn told(&mut self, state: &CallState) {
        (self.left, self.usual_ns) = (state.left, state.usual_ns);
        self.mixes = CallMixes::told(&state.mixes);
    }

    /// Takes that an operation was issued.
    pub(super) fn add(&mut self, op: &OpRecord) {
        let (Some(order), Some(issued_ns)) = (op.order, op.issued_ns) else { return };
        let Some(track) = track(op).filter(|_| issued_ns >= self.taken_ns) else { return };
        if self.fresh.len() >= REMEMBERED {
            self.lose();
        }
        let kind = CallKind { comm: op.comm, track, func: op.func };
        self.fresh.push((op.ticket, Call { kind, order, issued_ns }));
    }

    /// Takes that records are lost: what comes next is not what came next.
    pub(super) fn lose(&mut self) {
        self.fresh.clear();
        self.runs.clear();
        self.mixes.lose();
    }

    /// Forgets what it has learned, and keeps what it has found.
    pub(super) fn rest(&mut self) {
        let (taken_ns, left, usual_ns) = (self.taken_ns, self.left, self.usual_ns);
        let mixes = std::mem::take(&mut self.mixes);
        *self = CallOrder { taken_ns, left, usual_ns, mixes, ..CallOrder::default() };
    }

    /// An estimate of the memory behind it, in bytes.
    pub(super) fn weight(&self) -> usize {
        self.fresh.capacity() * size_of::<(u64, Call)>()
            + self.next.capacity() * size_of::<(u64, Next)>()
            + self.kinds.capacity() * size_of::<(CallKind, u64)>()
            + self.numbers.capacity() * size_of::<(CallKind, u16)>()
            + self.mixes.weight()
    }

    /// True where calls are to be taken.
    pub(super) fn is_fresh(&self) -> bool {
        !self.fresh.is_empty()
    }

    /// Takes the calls of which all earlier ones are known.
    pub(super) fn settle(&mut self, now_ns: u64) {
        self.taken_ns = now_ns.saturating_sub(SETTLE_NS);
        self.fresh.sort_unstable_by_key(|(ticket, call)| (call.issued_ns, *ticket));
        self.fresh.dedup_by_key(|(ticket, _)| *ticket);
        let n = self.fresh.partition_point(|(_, call)| call.issued_ns < self.taken_ns);
        let due: Vec<Call> = self.fresh.drain(..n).map(|(_, call)| call).collect();
        due.into_iter().for_each(|c| self.take(c));
        let room = 2 * n.max(FEW);
        if self.fresh.capacity() > 4 * room {
            self.fresh.shrink_to(room);
        }
    }

    fn take(&mut self, call: Call) {
        self.mixes.take(&call);
        let is_new = !self.numbers.contains_key(&call.kind);
        let Some(kind) = self.number(&call) else { return };
        let first_ns = *self.first_ns.get_or_insert(call.issued_ns);
        let at = u32::try_from(call.issued_ns.saturating_sub(first_ns) / UNIT_NS).unwrap_or(u32::MAX);
        self.compare(kind, &call, at, is_new);
        advance(&mut self.runs, kind);
        if let Some((_, order)) = self.kinds.get_mut(usize::from(kind)) {
            *order = call.order;
        }
    }

    /// Compares a call with what came next at this place before.
    fn compare(&mut self, kind: u16, call: &Call, at: u32, is_new: bool) {
        let mut verdict = None;
        for many in RUNS {
            let Some(place) = place(&self.runs, many) else { continue };
            let room = self.next.len() < REMEMBERED;
            let Some(next) = self.next.get_mut(&place) else {
                if room {
                    self.next.insert(place, Next { kind, times: 1, last: at, varies: false });
                }
                continue;
            };
            if !next.varies {
                verdict = verdict.or(Some((many, *next)));
            }
            next.last = at;
            next.times = next.times.saturating_add(u16::from(next.kind == kind));
            next.varies |= next.kind != kind;
        }
        let Some((many, before)) = verdict else { return };
        if before.kind == kind {
            self.usual_ns = Some(call.issued_ns);
            return;
        }
        // What it never called before belongs to another part of the job.
        if is_new || self.left.as_ref().is_some_and(|left| left.loop_ends_ns() >= call.issued_ns) {
            return;
        }
        let mut had_it = self.runs.clone();
        advance(&mut had_it, before.kind);
        let after_it = place(&had_it, many).and_then(|p| self.next.get(&p));
        let Some((usual, last_order)) = self.kinds.get(usize::from(before.kind)) else { return };
        self.left = Some(Departure {
            call: *call,
            usual: Call { kind: *usual, order: last_order.saturating_add(1), issued_ns: call.issued_ns },
            times: before.times,
            left_out: after_it.is_some_and(|n| !n.varies && n.kind == kind),
            loop_ns: u64::from(at.saturating_sub(before.last)).saturating_mul(UNIT_NS),
        });
    }

    /// The number of a kind of calls. Where there are too many it begins anew.
    fn number(&mut self, call: &Call) -> Option<u16> {
        if let Some(n) = self.numbers.get(&call.kind) {
            return Some(*n);
        }
        if self.kinds.len() >= REMEMBERED {
            *self = CallOrder { taken_ns: self.taken_ns, ..CallOrder::default() };
        }
        let n = u16::try_from(self.kinds.len()).ok()?;
        self.kinds.push((call.kind, call.order));
        self.numbers.insert(call.kind, n);
        Some(n)
    }
}

/// The track of an operation that a call issued.
fn track(op: &OpRecord) -> Option<Track> {
    op.track().filter(|t| *t != Track::Replay)
}

/// Goes on by a call.
fn advance(runs: &mut VecDeque<Run>, kind: u16) {
    match runs.back_mut().filter(|r| r.kind == kind) {
        Some(run) => run.calls = run.calls.saturating_add(1),
        None => {
            if runs.len() >= RUNS[0] {
                runs.pop_front();
            }
            runs.push_back(Run { kind, calls: 1 });
        }
    }
}

/// A place in the loop, by so many runs; absent where there were fewer.
fn place(runs: &VecDeque<Run>, many: usize) -> Option<u64> {
    let first = runs.len().checked_sub(many)?;
    let mix = |hash: u64, r: &Run| {
        let run = u64::from(r.kind) << 16 | u64::from(r.calls);
        (hash ^ run).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
    };
    Some(runs.range(first..).fold(many as u64, mix))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::join::testing::op;
    use crate::model::{CommId, Lane, Rank};
    use std::collections::HashMap;

    const MS: u64 = 1_000_000;

    /// Calls by letter, one a millisecond: `a` to `y` are communicators, `s` and `r` a send and a receive.
    struct Job {
        order: CallOrder,
        orders: HashMap<char, u64>,
        at_ns: u64,
    }

    impl Job {
        fn new() -> Self {
            Job { order: CallOrder::default(), orders: HashMap::new(), at_ns: MS }
        }

        fn call(&mut self, letters: &str) {
            for c in letters.chars() {
                let order = self.orders.entry(c).or_default();
                let lane = match c {
                    's' => Lane::Send(Rank(1)),
                    'r' => Lane::Recv(Rank(1)),
                    _ => Lane::Collective,
                };
                let comm = CommId::unowned(if "sr".contains(c) { 1 } else { c.into() });
                let mut record = op(lane, *order);
                (record.comm, record.ticket, record.issued_ns) = (comm, self.at_ns, Some(self.at_ns));
                self.order.add(&record);
                // Records come again when the operation goes on.
                self.order.add(&record);
                *order += 1;
                self.at_ns += MS;
            }
            self.order.settle(self.at_ns + SETTLE_NS);
        }

        fn left(&self) -> Option<(char, u64, char, u64, bool)> {
            let letter = |c: &Call| match c.kind.track {
                Track::Collective => c.kind.comm.nccl_hash() as u8 as char,
                Track::Pair(from, _) => ['s', 'r'][from.0 as usize],
                Track::Replay => unreachable!("no call"),
            };
            let d = self.order.left()?;
            Some((letter(&d.call), d.call.order, letter(&d.usual), d.usual.order, d.left_out))
        }
    }

    const LOOP: &str = "aabsabrcabsabrabd";

    #[test]
    fn what_was_learned_is_given_up_and_what_was_found_stays() {
        let mut order = CallOrder::default();
        let mut record = op(Lane::Collective, 0);
        for n in 0..1_000u64 {
            (record.order, record.ticket, record.issued_ns) = (Some(n), n, Some(n * MS));
            (0..2).for_each(|_| order.add(&record));
        }
        assert_eq!(order.runs.len(), 0);
        order.settle(2_000 * MS);
        assert_eq!(order.runs.back().map(|r| r.calls), Some(1_000), "none was lost");
        assert!(order.weight() > 0);
        order.rest();
        assert_eq!((order.weight(), order.runs.len()), (0, 0));
        let mut job = Job::new();
        (0..20).for_each(|_| job.call(LOOP));
        job.call("aabsarb");
        let left = job.left();
        job.order.rest();
        assert!(left.is_some() && job.left() == left, "{left:?}");
    }

    #[test]
    fn a_loop_keeps_to_its_order() {
        let mut job = Job::new();
        (0..40).for_each(|_| job.call(LOOP));
        assert_eq!(job.left(), None);
        assert_eq!(job.order.usual_ns(), Some(job.at_ns - MS));
    }

    #[test]
    fn calls_that_were_left_out_made_once_more_or_swapped_are_seen() {
        let left = |calls: &str| {
            let mut job = Job::new();
            (0..6).for_each(|_| job.call(LOOP));
            job.call(calls);
            job.left()
        };
        assert_eq!(left("aabsabrabsabrabd"), Some(('a', 39, 'c', 6, true)), "c is left out");
        assert_eq!(left("aabsabrccabsabrabd"), Some(('c', 7, 'a', 39, false)), "one more c");
        assert_eq!(left("aabsabracbsabrabd"), Some(('a', 39, 'c', 6, true)), "a and c in each other's place");
        assert_eq!(left(LOOP), None);
    }

    #[test]
    fn what_was_never_called_before_and_what_follows_lost_records_says_nothing() {
        let mut job = Job::new();
        (0..6).for_each(|_| job.call(LOOP));
        job.call("aabsx");
        assert_eq!(job.left(), None, "an evaluation begins");
        let mut job = Job::new();
        (0..6).for_each(|_| job.call(LOOP));
        job.order.lose();
        job.call("absabrabd");
        assert_eq!(job.left(), None);
        // A place at which now this comes and now that.
        let mut job = Job::new();
        (0..20).for_each(|n| job.call(if n % 2 == 0 { "aab" } else { "aac" }));
        assert_eq!(job.left(), None);
    }
}
