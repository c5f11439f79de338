//! The end of a communicator's operations: complete ones are counted and judged, old ones evicted.

use super::super::class_key::{ClassKey, size_class};
use super::super::exchange::Exchanges;
use super::super::finished::{Finished, FinishedPart, Operation, Outbox};
use super::super::instance::{Instance, Part, busbw};
use super::super::stats::{Class, Sample};
use super::super::work::Passed;
use super::expected_traffic::{carried, crossed};
use super::{Communicator, HELD, Key, all_stopped, attached_bytes};
use crate::model::{Func, Rank, Spare, Timing, Track};
use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};

/// Complete collectives that are kept, and transfers at least.
const KEPT: usize = 256;
/// Complete transfers that are kept for each rank of a communicator: an all-to-all makes two of them for each pair.
const KEPT_A_RANK: usize = 64;
/// Complete transfers that are kept at most, of however many ranks.
const TRANSFERS_MAX: usize = 2048;
/// Classes of operations of a communicator that are told apart; those of others are not counted.
const CLASSES_MAX: usize = 512;
/// An operation that is known to be done is counted without its missing stamps after this, in ns: NCCL's
/// callbacks can be over 50 ms late.
const STAMPS_GRACE_NS: u64 = 1_000_000_000;

/// Records of other ranks that have not come by then, in ns, will not come.
const RECORDS_GRACE_NS: u64 = 5_000_000_000;

/// While processes may be missing, it is asked again so often, in ns.
const SEARCHED_AGAIN_NS: u64 = 50_000_000;

/// The processes of a communicator are found by then, in ns after it was made or after an operation was issued; or they are
/// not waited for.
const SEARCHED_BY_NS: u64 = 10_000_000_000;

/// The answer to whether an operation can be counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ready {
    Now,
    /// Time alone makes it so, at the latest then, host monotonic ns.
    At(u64),
    NotYet,
}

/// Since when all channels have reported an end though no stamp can be of this operation, host monotonic ns. NCCL 2.28 counts
/// the operations of a channel wrongly after a rank sent to itself.
fn foreign_stamps_since(part: &Part) -> Option<u64> {
    part.ended_seen_ns.filter(|_| all_stopped(&part.op) && part.duration_ns().is_none())
}

impl Communicator {
    /// Counts what is complete and forgets what is old.
    pub(in crate::join) fn settle(
        &mut self,
        now_ns: u64,
        searched_ns: Option<u64>,
        classes: &mut BTreeMap<ClassKey, Box<Class>>,
        outbox: &mut Outbox,
    ) {
        let expected = self.expected();
        let mut fresh = self.fresh(now_ns);
        fresh.retain(|key| match self.ready(*key, now_ns) {
            Ready::Now if self.may_lack_ranks(*key, searched_ns, now_ns) => {
                self.due.insert((now_ns.saturating_add(SEARCHED_AGAIN_NS), *key));
                true
            }
            Ready::Now => {
                self.count(*key, expected, classes, outbox);
                false
            }
            Ready::At(at_ns) => {
                self.due.insert((at_ns, *key));
                true
            }
            Ready::NotYet => true,
        });
        self.weigh(&fresh, expected);
        if self.touched.is_empty() {
            // Its room is used again.
            self.touched = fresh;
            self.touched.clear();
        }
        self.forget(expected, classes, outbox);
        // Of what will be due in a far future most was given up meanwhile.
        if self.due.len() > 2 * HELD {
            let instances = &self.instances;
            self.due.retain(|(_, key)| instances.is_open(key));
        }
    }

    /// The operations to look at now, by track and order: those of which something was heard, and those whose time has
    /// come.
    fn fresh(&mut self, now_ns: u64) -> Vec<Key> {
        let mut fresh = std::mem::take(&mut self.touched);
        while self.due.first().is_some_and(|(at_ns, _)| *at_ns <= now_ns) {
            fresh.extend(self.due.pop_first().map(|(_, key)| key));
        }
        if std::mem::take(&mut self.rescan) {
            fresh.clear();
            fresh.extend(self.instances.open().map(|(key, _)| *key));
        } else {
            fresh.sort();
            fresh.dedup();
        }
        fresh.retain(|key| self.instances.look_at(key));
        fresh
    }

    /// Returns whether an operation can be counted.
    fn ready(&self, key: Key, now_ns: u64) -> Ready {
        let Some(instance) = self.instances.get(&key) else { return Ready::NotYet };
        let parts = match key.0 {
            // The other end may be on a node that is not seen.
            Track::Pair(a, b) if a != b => [a, b].iter().filter(|r| self.members.contains_key(r)).count(),
            Track::Pair(..) => 1,
            _ => self.members.len(),
        };
        if instance.parts.len() < parts {
            return self.given_up(key, instance, now_ns);
        }
        let mut ready = Ready::Now;
        // Nothing may report when a copy to itself has ended, and nobody waits for it.
        let is_copy = matches!(key.0, Track::Pair(a, b) if a == b);
        for (rank, p) in instance.parts.iter() {
            // Its record may bring the time of the whole launch.
            if is_copy && p.op.timing == Timing::Launch && p.op.event_ns.is_none() {
                let grace_ns = p.op.issued_ns.unwrap_or(0).saturating_add(STAMPS_GRACE_NS);
                if now_ns < grace_ns {
                    return Ready::At(grace_ns);
                }
            }
            if !p.finished && !is_copy {
                let foreign_since_ns = foreign_stamps_since(p).filter(|_| matches!(key.0, Track::Pair(..)));
                let Some(since_ns) = foreign_since_ns else { return Ready::NotYet };
                let trusted_ns = since_ns.saturating_add(STAMPS_GRACE_NS);
                if now_ns < trusted_ns || !self.has_passed(*rank, p) {
                    return Ready::At(trusted_ns.max(now_ns.saturating_add(STAMPS_GRACE_NS)));
                }
            }
            // The network's threads tell the last bytes after the kernel has stopped.
            let moved = p.op.issued_ns.is_none() || p.op.net.iter().all(|n| n.stop_ns.is_some());
            let timed = p.duration_ns().is_some() || p.op.timing.is_silent();
            if timed && moved {
                continue;
            }
            let Some(issued) = p.op.issued_ns else { return Ready::NotYet };
            let old_ns = issued.saturating_add(STAMPS_GRACE_NS).saturating_add(1);
            if now_ns < old_ns {
                ready = Ready::At(if let Ready::At(other) = ready { other.max(old_ns) } else { old_ns });
            }
        }
        ready
    }

    /// True while processes of this host may take part that were not found yet. All of them were there when an operation of
    /// the communicator ended, and a search that began after that finds them.
    fn may_lack_ranks(&mut self, key: Key, searched_ns: Option<u64>, now_ns: u64) -> bool {
        let Some(searched_ns) = searched_ns else { return false };
        let is_known = |rank: &Rank| self.members.contains_key(rank);
        let all_known = match key.0 {
            Track::Pair(from, to) => is_known(&from) && is_known(&to),
            _ => self.members.len() >= self.expected(),
        };
        if all_known {
            return false;
        }
        let ended_ns = *self.first_ended_ns.get_or_insert(now_ns);
        if searched_ns > ended_ns || self.instances.open_len() > HELD / 2 {
            return false;
        }
        let made_ns = self.members.values().map(|m| m.record.init_ns).max().unwrap_or(0);
        let issued = |i: &Instance| i.parts.values().filter_map(|p| p.op.issued_ns).max();
        let issued_ns = self.instances.get(&key).and_then(issued).unwrap_or(0);
        let is_young = |since_ns: u64, at_ns: u64| at_ns < since_ns.saturating_add(SEARCHED_BY_NS);
        is_young(made_ns, issued_ns) && is_young(issued_ns, now_ns)
    }

    /// True where the rank's GPU has started what the rank issued later, in another launch. NCCL runs the launches of a
    /// communicator one after the other, so this one has ended.
    fn has_passed(&self, rank: Rank, part: &Part) -> bool {
        let begun = self.members.get(&rank).and_then(|m| m.newest_begun);
        begun.zip(part.issued_at()).is_some_and(|(newest, own)| own.is_before(newest))
    }

    /// Where not every record comes, an operation that all are through with is counted as it is after a while.
    fn given_up(&self, key: Key, instance: &Instance, now_ns: u64) -> Ready {
        let told = instance.parts.keys().next().and_then(|r| self.members.get(r));
        if told.is_none_or(|m| !m.counted_by_beats) {
            return Ready::NotYet;
        }
        let began = instance.parts.values().filter_map(|p| p.op.issued_ns).max().unwrap_or(0);
        let later = now_ns.max(began).saturating_add(RECORDS_GRACE_NS);
        if now_ns < began.saturating_add(RECORDS_GRACE_NS) {
            return Ready::At(later);
        }
        let through = match key.0 {
            Track::Pair(..) => instance.parts.values().all(|p| p.finished),
            track => self.seats.iter().all(|s| key.1 < s.done(track)),
        };
        if through { Ready::Now } else { Ready::At(later) }
    }

    fn count(
        &mut self,
        key: (Track, u64),
        expected: usize,
        classes: &mut BTreeMap<ClassKey, Box<Class>>,
        outbox: &mut Outbox,
    ) {
        self.split.remove(&key);
        let ranks = self.ranks();
        let made_ns = self.members.values().next().map_or(0, |m| m.record.init_ns);
        let Some(instance) = self.instances.close(&key) else { return };
        let all_timed = instance.parts.values().all(|p| p.duration_ns().is_some());
        let age_ns = instance.began_ns().unwrap_or(0).saturating_sub(made_ns);
        let rate = key.1 as f64 / (age_ns as f64 / 1e9).max(1.0);
        let sampled = outbox.wanted() && outbox.takes((self.id, key.0, key.1), all_timed, rate);
        let told = if sampled { instance.told() } else { Vec::new() };
        let attached: usize = instance.parts.values().map(|p| attached_bytes(&p.op)).sum();
        let mut parts = Vec::with_capacity(if outbox.wanted() { instance.parts.len() } else { 0 });
        for part in instance.parts.values_mut() {
            // What was made of them is kept.
            outbox.spare().give_stamps(std::mem::take(&mut part.op.stamps));
            let net = std::mem::take(&mut part.op.net);
            if outbox.wanted() {
                parts.push(FinishedPart::of(part, net));
            }
        }
        self.parts_kept += instance.parts.len();
        self.parts_open -= instance.parts.len();
        self.attached_bytes -= attached;
        let instance = &*instance;
        let Some(first) = instance.first().map(|p| &p.op) else { return };
        let channels = first.channels;
        let (track, order) = key;
        let described = outbox.wanted().then(|| Operation::of(first, order, ranks));
        let collective = !matches!(track, Track::Pair(..));
        if instance.parts.values().all(|p| p.finished) {
            match track {
                Track::Pair(from, to) => {
                    self.pairs.entry((from, to)).and_modify(|n| n.finished = n.finished.saturating_add(1));
                }
                _ => self.finished += 1,
            }
        }
        let needed = track.ranks(expected);
        // Ranks that disagree do not run one operation: no time of theirs says anything about it.
        let agreed = self.mismatch.is_none_or(|m| key < m || m.0 != track);
        let transfer_ns = if agreed { instance.transfer_ns(needed) } else { None };
        let durations = instance.parts.values().filter_map(Part::duration_ns);
        let (busy, timed) = durations.fold((0.0, 0u32), |(sum, n), d| (sum + d as f64, n + 1));
        let busy_ns = (timed > 0).then(|| busy / f64::from(timed));
        let bytes = first.bytes(ranks);
        let func = if collective { first.func } else { Func::SendRecv };
        let (algo, proto) = if collective { (first.algo, first.proto) } else { (None, None) };
        let class = ClassKey { comm: self.id, func, size_class: bytes.and_then(size_class), algo, proto };
        let at_ns = instance.began_ns().unwrap_or(0);
        let pair = match track {
            Track::Pair(a, b) => Some((a, b)),
            _ => None,
        };
        let by_events = instance.parts.values().any(|p| p.kernel.is_none());
        let on = channels.filter(|_| collective);
        let sample = Sample { at_ns, bytes, transfer_ns, busy_ns, pair, by_events, channels: on };
        self.learn(class, &sample, classes);
        if outbox.metered() && agreed {
            carried(self, key, transfer_ns, |segment, gpu, c| outbox.carry(segment, gpu, c));
        }
        if outbox.networked() && agreed && self.spans_nodes() {
            outbox.cross(crossed(self, key, transfer_ns));
        }
        if collective && agreed && transfer_ns.is_some() && !self.one_clock() {
            self.tell_ends(key, outbox);
        }
        self.tell_passed(key, outbox);
        let late = match track {
            _ if !agreed => None,
            Track::Pair(from, to) => {
                self.judge_exchanges(key, expected).or_else(|| self.judge_transfer(key, from, to))
            }
            _ => self.judge(key, needed, transfer_ns),
        };
        let Some(operation) = described else { return };
        for part in &mut parts {
            part.waiting_ns = transfer_ns.and_then(|t| Some(part.duration_ns?.saturating_sub(t)));
        }
        let of = ranks.or(u32::try_from(expected).ok()).unwrap_or(0);
        outbox.put(Finished {
            comm: self.id,
            track,
            operation,
            func,
            ranks,
            size_class: class.size_class,
            channels,
            began_ns: (at_ns > 0).then_some(at_ns),
            transfer_ns,
            busbw: bytes.zip(transfer_ns).and_then(|(b, t)| busbw(func, b, of, t as f64)),
            late,
            parts,
            told,
        });
    }

    /// Reports that processes are through with an operation. Nobody is before all ranks have started it.
    fn tell_passed(&self, key: Key, outbox: &mut Outbox) {
        let Some(instance) = self.instances.get(&key) else { return };
        let starts = instance.parts.values().filter_map(|p| Some(p.kernel?.start_ns));
        let is_for_all = self.one_clock() && instance.first().is_some_and(|p| !p.op.func.is_rooted());
        let last_start_ns = starts.max().filter(|_| is_for_all).unwrap_or(0);
        for part in instance.parts.values() {
            let mut what = DefaultHasher::new();
            (self.id, key.0, part.op.func).hash(&mut what);
            outbox.pass(Passed {
                segment: part.op.segment,
                ticket: part.op.ticket,
                what: what.finish(),
                comm: self.id,
                track: key.0,
                order: key.1,
                func: part.op.func,
                launch: part.op.launch(),
                reported_end_ns: part.kernel.map_or(0, |k| k.end_ns()),
                kernel: part.kernel.map(|k| (k.start_ns, k.end_ns().max(last_start_ns))),
            });
        }
    }

    /// Adds an operation to the statistics of its class.
    fn learn(&mut self, key: ClassKey, sample: &Sample, classes: &mut BTreeMap<ClassKey, Box<Class>>) {
        if self.classes >= CLASSES_MAX && !classes.contains_key(&key) {
            return;
        }
        let class = classes.entry(key).or_insert_with(|| {
            self.classes += 1;
            self.class_bytes += Class::default().weight();
            Box::default()
        });
        let before = class.weight();
        class.add(sample);
        self.class_bytes = self.class_bytes + class.weight() - before;
    }

    /// All ranks of a collective end within its last step, but for those of a rooted one.
    fn tell_ends(&self, key: (Track, u64), outbox: &mut Outbox) {
        let Some(instance) = self.instances.get(&key) else { return };
        if instance.first().is_none_or(|p| p.op.func.is_rooted()) {
            return;
        }
        let ends = instance.parts.values().map(|p| Some((p.op.segment, p.kernel?.end_ns())));
        if let Some(ends) = ends.collect() {
            outbox.ended((self.id, ends));
        }
    }

    fn forget(&mut self, expected: usize, classes: &mut BTreeMap<ClassKey, Box<Class>>, outbox: &mut Outbox) {
        let (collectives, transfers) = self.instances.counted_len();
        let transfers_kept = expected.saturating_mul(KEPT_A_RANK).clamp(KEPT, TRANSFERS_MAX);
        let surplus = (collectives.saturating_sub(KEPT), transfers.saturating_sub(transfers_kept));
        if surplus != (0, 0) {
            self.forget_counted(surplus, Some(outbox.spare()));
        }
        // Incomplete ones whose rest was lost: the oldest of them are counted as they are.
        while self.instances.open_len() > HELD {
            // Tracks are ordered collectives first: the last key is the pair that matters least.
            let pair = self.instances.last_open().filter(|k| matches!(k.0, Track::Pair(..)));
            let Some(key) = pair.or_else(|| self.instances.open().next().map(|(k, _)| *k)) else { break };
            self.count(key, expected, classes, outbox);
        }
    }

    /// Forgets so many collectives and transfers that were counted first; their room is given back where nobody takes it to use it
    /// again.
    fn forget_counted(&mut self, n: (usize, usize), mut spare: Option<&mut Spare>) {
        let (timed, parts) = (&mut self.timed, &mut self.parts_kept);
        self.instances.forget(n, self.mismatch, spare.is_some(), |key, instance| {
            *parts -= instance.parts.len();
            if !timed.is_empty() && instance.parts.values().any(|p| p.kernel.is_some()) {
                timed.remove(key);
            }
            if let Some(spare) = &mut spare {
                spare.give(instance.parts.drain().map(|p| p.op));
            }
        });
    }

    /// The number of ranks' parts of counted operations that are kept.
    pub(in crate::join) fn parts_kept(&self) -> usize {
        self.parts_kept
    }

    /// Makes room where its user has used too much memory: of what was counted and of what was not the older half goes.
    pub(in crate::join) fn relieve(
        &mut self,
        classes: &mut BTreeMap<ClassKey, Box<Class>>,
        outbox: &mut Outbox,
    ) {
        self.count_open(self.instances.open_len().div_ceil(2), classes, outbox);
        self.halve();
        self.instances.shorten_evicted();
        self.late.drain(..self.late.len() / 2);
        self.pairs.clear();
        self.exchanges = Exchanges::default();
    }

    /// Counts the oldest incomplete operations as they are.
    pub(in crate::join) fn count_open(
        &mut self,
        most: usize,
        classes: &mut BTreeMap<ClassKey, Box<Class>>,
        outbox: &mut Outbox,
    ) {
        let expected = self.expected();
        let oldest: Vec<Key> = self.instances.open().take(most).map(|(key, _)| *key).collect();
        for key in oldest {
            self.count(key, expected, classes, outbox);
        }
    }

    /// Keeps the younger half of what was counted, and no room for more.
    pub(in crate::join) fn halve(&mut self) {
        let (collectives, transfers) = self.instances.counted_len();
        self.forget_counted((collectives.div_ceil(2), transfers.div_ceil(2)), None);
    }
}

#[cfg(test)]
mod tests {
    use super::KEPT_A_RANK;
    use crate::join::testing::{all_reduce, member, process};
    use crate::join::{Join, MemoryLimit, account};
    use crate::model::{Func, Lane, OpRecord, Rank, Track, Update};

    const MS: u64 = 1_000_000;

    /// Two ranks of one communicator.
    fn two_ranks() -> Join {
        let mut j = Join::new();
        (0..2).for_each(|rank| j.feed(process(rank)));
        (0..2).for_each(|rank| j.feed(member(rank, 2, 0)));
        j.keep_finished();
        j
    }

    /// Feeds a rank's finished operations of these orders, one a millisecond.
    fn feed(j: &mut Join, rank: u32, orders: std::ops::Range<u64>) {
        for order in orders {
            let at_ns = (order + 1) * MS;
            j.feed(Update::Op(Box::new(all_reduce(rank, order, at_ns, Some((at_ns, Some(at_ns + 1_000)))))));
        }
    }

    /// Counts open operations as they are and evicts them, as where memory is short.
    fn make_room(j: &mut Join) {
        let c = j.comms.values_mut().next().expect("one");
        (0..16).for_each(|_| c.relieve(&mut j.classes, &mut j.outbox));
        assert_eq!(c.held(), (0, 0));
    }

    fn lost(j: &Join) -> u64 {
        j.processes().map(crate::join::Process::hidden).sum()
    }

    #[test]
    fn of_an_all_to_all_the_transfers_of_all_ranks_are_kept_alike() {
        const RANKS: u32 = 8;
        let mut j = Join::new();
        (0..RANKS).for_each(|rank| j.feed(process(rank)));
        (0..RANKS).for_each(|rank| j.feed(member(rank, RANKS, 0)));
        for round in 0..40 {
            let at_ns = (round + 1) * 10 * MS;
            let pairs = (0..RANKS).flat_map(|a| (0..RANKS).map(move |b| (a, b))).filter(|(a, b)| a != b);
            for (from, to) in pairs {
                for (rank, func, lane) in
                    [(from, Func::Send, Lane::Send(Rank(to))), (to, Func::Recv, Lane::Recv(Rank(from)))]
                {
                    let op = all_reduce(rank, round, at_ns, Some((at_ns, Some(at_ns + 1_000))));
                    j.feed(Update::Op(Box::new(OpRecord { func, lane, ..op })));
                }
            }
            j.tick(at_ns + 5 * MS);
        }
        j.tick(60_000 * MS);
        let c = j.communicators().next().expect("one");
        let kept = |rank: u32| c.instances().filter(|(.., i)| i.parts.contains_key(&Rank(rank))).count();
        let all: Vec<usize> = (0..RANKS).map(kept).collect();
        assert_eq!(all.iter().sum::<usize>(), 2 * KEPT_A_RANK * RANKS as usize);
        assert!(all.iter().all(|n| n.abs_diff(2 * KEPT_A_RANK) <= RANKS as usize), "{all:?}");
    }

    #[test]
    fn an_operation_that_was_counted_and_evicted_counts_once_however_late_its_other_records_come() {
        let mut j = two_ranks();
        feed(&mut j, 0, 0..1_000);
        make_room(&mut j);
        assert_eq!(j.take_finished().len(), 1_000);
        feed(&mut j, 1, 0..1_010);
        feed(&mut j, 0, 1_000..1_010);
        j.tick(60_000 * MS);
        assert_eq!((j.take_finished().len(), lost(&j)), (10, 0));
    }

    #[test]
    fn of_a_retired_communicator_nothing_is_lost_in_silence_and_nothing_counts_twice() {
        let mut j = two_ranks();
        feed(&mut j, 0, 0..100);
        let id = j.communicators().next().expect("one").id;
        j.retire(id);
        assert_eq!((j.take_finished().len(), j.communicators().count()), (100, 1), "counted as they are");
        j.retire(id);
        assert_eq!(j.communicators().count(), 0);
        feed(&mut j, 1, 0..103);
        feed(&mut j, 0, 100..103);
        assert_eq!(lost(&j), 3, "each lost operation once");
        (0..2).for_each(|rank| j.feed(member(rank, 2, 0)));
        feed(&mut j, 0, 0..105);
        feed(&mut j, 1, 0..105);
        j.tick(60_000 * MS);
        assert_eq!((j.take_finished().len(), lost(&j)), (2, 3), "the communicator is found again");
    }

    #[test]
    fn a_second_communicator_of_the_same_id_counts_by_itself() {
        let mut j = two_ranks();
        feed(&mut j, 0, 0..1_000);
        make_room(&mut j);
        assert_eq!(j.take_finished().len(), 1_000);
        for rank in 0..2 {
            let Update::Comm(mut again) = member(rank, 2, 0) else { unreachable!("a member") };
            again.init_ns = 2_000 * MS;
            j.feed(Update::Comm(again));
        }
        (0..2).for_each(|rank| feed(&mut j, rank, 0..700));
        j.tick(120_000 * MS);
        assert_eq!((j.take_finished().len(), lost(&j)), (700, 0), "it was made after all of them");
    }

    #[test]
    fn records_of_counted_operations_are_not_lost_where_memory_is_short() {
        let mut j = two_ranks();
        feed(&mut j, 0, 0..100);
        make_room(&mut j);
        j.limit_memory(MemoryLimit::OfUsers(1));
        let comm = j.comms.values_mut().next().expect("one");
        comm.accounted_bytes = 0;
        account(&mut j.memory, comm);
        assert!(j.memory.is_short());
        feed(&mut j, 1, 0..110);
        assert_eq!((j.take_finished().len(), lost(&j)), (100, 10), "only what was never counted");
    }

    #[test]
    fn copies_to_itself_without_stamps_leave_room_for_others() {
        let mut j = Join::new();
        j.feed(process(0));
        j.feed(member(0, 1, 0));
        for order in 0..5_000 {
            let mut op = all_reduce(0, order, order * MS, None);
            (op.func, op.lane) = (Func::Send, Lane::Send(Rank(0)));
            j.feed(Update::Op(Box::new(op)));
            if order % 100 == 99 {
                j.tick(order * MS);
            }
        }
        let c = j.communicators().next().expect("one");
        let open = c.incomplete_transfers().count();
        assert!((1..=1_100).contains(&open), "those of the last second: {open}");
    }

    /// Three ranks exchange in a ring every 100 ms. The stamps of the first pair say that it ended 50 ms before each call; of
    /// launch `hangs` the other pairs are never stamped.
    fn ring(launches: u64, hangs: Option<u64>) -> Vec<u64> {
        let mut j = Join::new();
        for r in 0..3 {
            j.feed(process(r));
            j.feed(member(r, 3, 0));
        }
        for order in 0..launches {
            let at_ns = (order + 1) * 100 * MS;
            for (from, to) in [(0, 1), (1, 2), (2, 0)] {
                for (rank, func) in [(from, Func::Send), (to, Func::Recv)] {
                    let start_ns = if from == 0 { at_ns - 50 * MS } else { at_ns };
                    let is_stamped = from == 0 || hangs.is_none_or(|h| order < h);
                    let kernel = is_stamped.then_some((start_ns, Some(start_ns + MS)));
                    let mut op = all_reduce(rank, order, at_ns - 1_000, kernel);
                    op.ticket = 2 * order + u64::from(func == Func::Send);
                    // The numbers of plans wrap.
                    (op.func, op.plan) = (func, Some((order + 20) % 32));
                    op.lane = if rank == from { Lane::Send(Rank(to)) } else { Lane::Recv(Rank(from)) };
                    j.feed(Update::Op(Box::new(op)));
                }
            }
        }
        (launches..launches + 50).for_each(|n| j.tick(n * 100 * MS));
        let c = j.communicators().next().expect("one");
        let first = |(track, order, _)| (track == Track::Pair(Rank(0), Rank(1))).then_some(order);
        c.incomplete_transfers().filter_map(first).collect()
    }

    #[test]
    fn transfers_with_stamps_of_another_operation_end_once_a_later_launch_runs() {
        assert_eq!(ring(20, None), [19], "nothing reports the end of the last one");
    }

    #[test]
    fn stamps_of_an_earlier_launch_do_not_end_the_one_that_hangs() {
        assert_eq!(ring(20, Some(18)), [17, 18, 19], "no launch after 17 is known to run");
    }
}
