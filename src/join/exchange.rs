//! Exchanges: launches in which a rank sends to all others and receives from all of them, as in an all-to-all, or to and from
//! several neighbours, as in a ring or at the edges of a grid.
//!
//! Each transfer of such a launch waits for its two ends. A rank whose launch starts later than those of its peers, or whose
//! ends are shorter where their clocks differ, keeps them waiting. Among neighbours who waits for a late rank is late for its
//! next neighbour: the one that all its peers wait for is late. Launches with one peer say less: in a pipeline one end waits in
//! every step.
//!
//! A launch is one kernel: when one of its transfers starts is when all of them do. NCCL 2.28.9 stamps few of the transfers of
//! an all-to-all of eight ranks so that their ends can be believed, and one start in two. Where CUDA events time the launch as
//! a whole, the one that is shorter than those of its peers is the late rank's.

use super::instance::{LATE_NS, Late, Measure, Part};
use super::op_queue::Key;
use crate::model::{Func, Lane, OpRecord, Rank, Track};
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

/// Incomplete launches and their transfers that are kept at most, 144 and 32 bytes each. A tick may bring many at once. Of so
/// many launches the times are known.
const LAUNCHES_KEPT: usize = 1 << 14;
const TRANSFERS_KEPT: usize = 1 << 19;
/// Complete launches that wait for those of their neighbors at most: all of them are of one exchange, or of a few.
const HOST_LAUNCHES_KEPT: usize = 1 << 10;
/// Complete launches that may be left in the order beyond the incomplete ones.
const ORDER_SLACK: usize = 64;
/// Larger communicators are not followed: few of their exchanges would fit.
const RANKS_MAX: usize = 128;

/// A rank, and the number of its launch.
type LaunchKey = (Rank, u64);

/// One launch: how many transfers were issued with it, and what is known of those that are finished.
#[derive(Debug, Clone, Default)]
struct ExchangeLaunch {
    /// Transfers with others that were issued.
    issued: usize,
    sent: usize,
    received: usize,
    with_itself: bool,
    /// Its transfers with others. The list is emptied once the launch is known to be over.
    transfers: Vec<Key>,
    /// The peer of its last finished transfer, and whether there were others.
    peer: Option<Rank>,
    has_several_peers: bool,
    /// Its last finished transfer.
    transfer: Option<Key>,
    /// The transfers that are over, by their other ends.
    ends: Vec<PeerEnd>,
    /// The shortest of its own ends, where these are what is compared.
    shortest_ns: Option<u64>,
}

/// The other end of a transfer.
#[derive(Debug, Clone, Copy)]
struct PeerEnd {
    launch: LaunchKey,
    /// Both ends are on one host, so that their starts compare.
    one_clock: bool,
    /// The time that it waited for the rank, in ns: it took so much longer than the rank's own end. Absent where starts are
    /// compared, or where an end is not known.
    longer_ns: Option<i64>,
}

/// When the first known transfer of a launch started, host monotonic ns.
#[derive(Debug, Clone, Copy)]
struct LaunchStart {
    ns: u64,
    /// Its end is believed as well.
    is_whole: bool,
}

/// The times of a launch, as far as they are known.
#[derive(Debug, Clone, Copy, Default)]
struct LaunchTimes {
    start: Option<LaunchStart>,
    /// How long the whole launch took by CUDA events, in ns.
    lasted_ns: Option<u64>,
}

/// A complete launch whose rank has neighbors on its own host and on others.
#[derive(Debug, Clone)]
struct HostLaunch {
    /// The report of its rank where the host is late; without the lateness, which is known once the host is judged.
    report: LateExchange,
    /// The launches of its neighbors on the same host.
    local: BTreeSet<LaunchKey>,
    /// The least time in ns that a neighbor on another host waited for it.
    waited_ns: i64,
    /// All its neighbors waited for it, those on its own host as well.
    is_late: bool,
}

/// The size of a communicator, and whether the times of a transfer's two ends can be compared.
#[derive(Debug, Clone, Copy)]
pub(super) struct ExchangeContext {
    /// Ranks of the communicator.
    pub(super) ranks: usize,
    /// The times of both ends are of one host: then starts are compared. NCCL 2.28 reports wrong ends of a launch in which a rank
    /// sends to itself as well: those of its own copy.
    pub(super) one_clock: bool,
}

/// A late rank of an exchange.
#[derive(Debug, Clone, Copy)]
pub(super) struct LateExchange {
    pub(super) late: Late,
    /// The transfer time in ns.
    pub(super) transfer_ns: Option<u64>,
    /// One of the rank's transfers in it.
    pub(super) transfer: Key,
    /// When its launch started, host monotonic ns, where that is known.
    pub(super) came_ns: Option<u64>,
    /// All ranks take part in it.
    pub(super) with_all: bool,
}

/// The launches of a communicator that may turn out to be exchanges.
#[derive(Debug, Clone, Default)]
pub(super) struct Exchanges {
    incomplete: HashMap<LaunchKey, ExchangeLaunch>,
    /// Oldest first; some may be complete.
    order: VecDeque<LaunchKey>,
    /// When the newest launch of each rank was issued, host monotonic ns, and that launch. Of older ones all transfers are
    /// known. Numbers of launches in lines and in operation slots do not compare.
    newest: BTreeMap<Rank, (u64, u64)>,
    /// The launch of each rank that is complete if nothing more of it comes.
    pending: BTreeMap<Rank, u64>,
    transfers: usize,
    times: HashMap<LaunchKey, LaunchTimes>,
    /// Their launches, oldest first.
    timed: VecDeque<LaunchKey>,
    /// One with all others was complete.
    seen: bool,
    /// Complete launches that wait for those of their neighbors on the same host, and the order in which they came.
    host_launches: HashMap<LaunchKey, HostLaunch>,
    host_launches_order: VecDeque<LaunchKey>,
}

impl Exchanges {
    /// True where the communicator's transfers are those of exchanges between all ranks.
    pub(super) fn are_usual(&self) -> bool {
        self.seen
    }

    /// Memory that it takes, in bytes, as an estimate.
    pub(super) fn weight(&self) -> usize {
        const LAUNCH: usize = 2 * size_of::<(LaunchKey, ExchangeLaunch)>();
        const HOST_LAUNCH: usize = 2 * size_of::<(LaunchKey, HostLaunch)>() + 2 * size_of::<LaunchKey>();
        let local: usize = self.host_launches.values().map(|l| l.local.len()).sum();
        self.incomplete.len() * LAUNCH
            + self.host_launches.len() * HOST_LAUNCH
            + local * 2 * size_of::<LaunchKey>()
            + (self.order.len() + self.timed.len()) * size_of::<LaunchKey>()
            + self.times.len() * 2 * size_of::<(LaunchKey, LaunchTimes)>()
            + self.transfers * size_of::<PeerEnd>().max(size_of::<Key>())
    }

    /// Takes a finished transfer of a communicator. Returns the late ranks of the exchanges that are known to be complete.
    pub(super) fn add(
        &mut self,
        transfer: Key,
        ends: [&Part; 2],
        context: ExchangeContext,
    ) -> Vec<LateExchange> {
        let Track::Pair(from, to) = transfer.0 else { return Vec::new() };
        let [sent, received] = ends;
        let mut late = Vec::new();
        if from == to || context.ranks > RANKS_MAX {
            return late;
        }
        for (rank, own, peer) in [(from, sent, received), (to, received, sent)] {
            self.add_end(rank, transfer, own, peer, context, &mut late);
        }
        late
    }

    /// Takes a transfer that a rank issued. Two ranks of a pipeline look like an exchange, but send nothing to themselves; when
    /// such a copy is over is told by nothing, as NCCL 2.28 does not stamp it.
    pub(super) fn issue(&mut self, op: &OpRecord, ranks: Option<u32>) {
        let (Lane::Send(peer) | Lane::Recv(peer), Some(plan)) = (op.lane, op.plan) else { return };
        if ranks.is_none_or(|n| n as usize > RANKS_MAX) {
            return;
        }
        let newest = self.newest.entry(op.rank).or_default();
        *newest = (op.issued_ns.unwrap_or(0), plan).max(*newest);
        let launch = self.launch((op.rank, plan));
        if peer == op.rank {
            launch.with_itself = true;
        } else {
            launch.issued += 1;
            let (from, to) = if op.func == Func::Send { (op.rank, peer) } else { (peer, op.rank) };
            launch.transfers.extend(op.order.map(|order| (Track::Pair(from, to), order)));
            self.transfers += 1;
        }
        self.forget();
    }

    /// Takes when a transfer of a rank's launch started, host monotonic ns. One of which the end is believed too is believed
    /// before others.
    pub(super) fn start(&mut self, rank: Rank, plan: u64, ns: u64, is_whole: bool) {
        if !self.newest.contains_key(&rank) {
            return;
        }
        let times = self.times_of((rank, plan));
        if times.start.is_none_or(|known| (is_whole, known.ns) > (known.is_whole, ns)) {
            times.start = Some(LaunchStart { ns, is_whole });
        }
    }

    /// Takes how long a rank's launch took as a whole, in ns, and returns those of its transfers that are known: their ends on
    /// this rank are over.
    pub(super) fn lasted(&mut self, rank: Rank, plan: u64, ns: u64) -> Vec<Key> {
        self.times_of((rank, plan)).lasted_ns = Some(ns);
        let over = self.incomplete.get_mut(&(rank, plan));
        let over = over.map_or_else(Vec::new, |launch| std::mem::take(&mut launch.transfers));
        self.transfers -= over.len();
        over
    }

    /// True where a rank's launch was timed as a whole, and is over.
    pub(super) fn is_over(&self, rank: Rank, plan: u64) -> bool {
        self.times.get(&(rank, plan)).is_some_and(|t| t.lasted_ns.is_some())
    }

    /// The times of a launch; those of the oldest one are forgotten for a new one.
    fn times_of(&mut self, key: LaunchKey) -> &mut LaunchTimes {
        if !self.times.contains_key(&key) {
            self.timed.push_back(key);
            if self.timed.len() > LAUNCHES_KEPT
                && let Some(oldest) = self.timed.pop_front()
            {
                self.times.remove(&oldest);
            }
        }
        self.times.entry(key).or_default()
    }

    /// True where it is known which end of a transfer waited for the other one.
    pub(super) fn is_timed(&self, ends: [&Part; 2], context: ExchangeContext) -> bool {
        let times = |p: &Part| self.times.get(&(p.op.rank, p.op.plan?)).copied();
        let times = ends.map(|p| times(p).unwrap_or_default());
        let compared = match context.one_clock {
            true => times.iter().all(|t| t.start.is_some()),
            false => ends.iter().all(|p| p.kernel.is_some()),
        };
        compared || times.iter().all(|t| t.lasted_ns.is_some())
    }

    fn add_end(
        &mut self,
        rank: Rank,
        transfer: Key,
        own: &Part,
        peer: &Part,
        context: ExchangeContext,
        late: &mut Vec<LateExchange>,
    ) {
        let Some((plan, peer_plan)) = own.op.plan.zip(peer.op.plan) else { return };
        let (key, peer_launch) = ((rank, plan), (peer.op.rank, peer_plan));
        let kernels = own.kernel.zip(peer.kernel).filter(|_| !context.one_clock);
        self.transfers += 1;
        let launch = self.launch(key);
        launch.has_several_peers |= launch.peer.is_some_and(|p| p != peer.op.rank);
        launch.peer = Some(peer.op.rank);
        launch.transfer = Some(transfer);
        if own.op.func == Func::Send {
            launch.sent += 1;
        } else {
            launch.received += 1;
        }
        let longer_ns = kernels.and_then(|(own, peer)| peer.duration_ns.checked_signed_diff(own.duration_ns));
        launch.ends.push(PeerEnd { launch: peer_launch, one_clock: context.one_clock, longer_ns });
        if let Some((own, _)) = kernels {
            let own_ns = own.duration_ns;
            launch.shortest_ns = Some(launch.shortest_ns.map_or(own_ns, |s| s.min(own_ns)));
        }
        let before = self.pending.get(&rank).copied().filter(|plan| *plan != key.1);
        if let Some(plan) = before {
            self.judge((rank, plan), context, late);
        }
        self.judge(key, context, late);
        self.forget();
    }

    fn forget(&mut self) {
        while (self.transfers > TRANSFERS_KEPT || self.incomplete.len() > LAUNCHES_KEPT)
            && let Some(oldest) = self.order.pop_front()
        {
            self.remove(oldest);
        }
    }

    fn launch(&mut self, key: LaunchKey) -> &mut ExchangeLaunch {
        self.incomplete.entry(key).or_insert_with(|| {
            self.order.push_back(key);
            ExchangeLaunch::default()
        })
    }

    fn remove(&mut self, key: LaunchKey) {
        if let Some(launch) = self.incomplete.remove(&key) {
            self.transfers -= launch.ends.len() + launch.transfers.len();
        }
    }

    /// Judges a launch that is a complete exchange: its rank is late where its peers waited for it, and all ranks of a host where
    /// those of other hosts waited for them.
    fn judge(&mut self, key: LaunchKey, context: ExchangeContext, late: &mut Vec<LateExchange>) {
        let Some(launch) = self.incomplete.get(&key) else { return };
        let with_all = launch.is_with_all(context.ranks);
        if !with_all {
            if !launch.is_with_neighbours() {
                return;
            }
            if self.newest.get(&key.0).is_some_and(|newest| newest.1 == key.1) {
                self.pending.insert(key.0, key.1);
                return;
            }
        }
        let by_itself = self.late_of(key, launch, with_all, context);
        late.extend(by_itself);
        let host_launch = if with_all { None } else { self.host_launch(key, launch, by_itself.is_some()) };
        self.seen |= with_all;
        if self.pending.get(&key.0) == Some(&key.1) {
            self.pending.remove(&key.0);
        }
        self.remove(key);
        if self.order.len() > 2 * self.incomplete.len() + ORDER_SLACK {
            self.order.retain(|key| self.incomplete.contains_key(key));
        }
        if let Some(launch) = host_launch {
            self.judge_host(key, launch, late);
        }
    }

    /// Describes a complete launch for the judgement of its host; absent where its rank has no neighbor on its own host, or none on
    /// another one, or the times of those are not known.
    fn host_launch(&self, key: LaunchKey, launch: &ExchangeLaunch, is_late: bool) -> Option<HostLaunch> {
        let (local, remote): (Vec<&PeerEnd>, Vec<&PeerEnd>) = launch.ends.iter().partition(|e| e.one_clock);
        let waited_ns: Option<Vec<i64>> = remote.iter().map(|e| e.longer_ns).collect();
        let came_ns = self.times.get(&key).and_then(|t| t.start).map(|s| s.ns);
        let late = Late { rank: key.0, by_ns: 0, measure: Measure::Gpu };
        let (transfer, transfer_ns) = (launch.transfer?, launch.shortest_ns);
        (!local.is_empty()).then_some(HostLaunch {
            report: LateExchange { late, transfer_ns, transfer, came_ns, with_all: false },
            local: local.iter().map(|e| e.launch).collect(),
            waited_ns: waited_ns?.into_iter().min()?,
            is_late,
        })
    }

    /// Judges the launches of a host's ranks that are neighbors of each other, once all of them are complete: they are late where
    /// each kept its neighbors on other hosts waiting, and none was late to those on its own host as well. A host with a rank that
    /// has no neighbor on another one is not judged: nothing shows that this rank was late.
    fn judge_host(&mut self, key: LaunchKey, launch: HostLaunch, late: &mut Vec<LateExchange>) {
        if self.host_launches.insert(key, launch).is_none() {
            self.host_launches_order.push_back(key);
        }
        while self.host_launches_order.len() > HOST_LAUNCHES_KEPT
            && let Some(oldest) = self.host_launches_order.pop_front()
        {
            self.host_launches.remove(&oldest);
        }
        let (mut members, mut ahead) = (BTreeSet::from([key]), vec![key]);
        while let Some(next) = ahead.pop() {
            let Some(member) = self.host_launches.get(&next) else { return };
            ahead.extend(member.local.iter().copied().filter(|n| members.insert(*n)));
        }
        let members: Vec<HostLaunch> = members.iter().filter_map(|m| self.host_launches.remove(m)).collect();
        let waited_ns = members.iter().map(|m| m.waited_ns).min().and_then(|ns| u64::try_from(ns).ok());
        let Some(by_ns) = waited_ns.filter(|ns| *ns >= LATE_NS) else { return };
        if members.iter().any(|m| m.is_late) {
            return;
        }
        late.extend(
            members.into_iter().map(|m| LateExchange { late: Late { by_ns, ..m.report.late }, ..m.report }),
        );
    }

    /// A launch's rank is late by what the median of all others waited for it, of more than half of which that is known, or by
    /// what each of its neighbours did. By the times of whole launches it is late by what three quarters of the others waited.
    fn late_of(
        &self,
        key: LaunchKey,
        launch: &ExchangeLaunch,
        with_all: bool,
        context: ExchangeContext,
    ) -> Option<LateExchange> {
        let start_ns = |key: &LaunchKey| self.times.get(key)?.start.map(|s| s.ns);
        let lasted_ns = |key: &LaunchKey| self.times.get(key)?.lasted_ns;
        let (came_ns, own_ns) = (start_ns(&key), lasted_ns(&key));
        let by_ends = |end: &PeerEnd| match end.one_clock {
            true => came_ns?.checked_signed_diff(start_ns(&end.launch)?),
            false => end.longer_ns,
        };
        // How long a launch took says that its rank waited, not for whom: among neighbors, and among three ranks of which two have
        // slow data, others than the late one have short launches as well.
        let may_compare = with_all && context.ranks != 3;
        let by_launches =
            |end: &PeerEnd| lasted_ns(&end.launch).filter(|_| may_compare)?.checked_signed_diff(own_ns?);
        let waited_for_ns = |end: &PeerEnd| by_ends(end).or_else(|| by_launches(end));
        let mut waited: Vec<i64> = launch.ends.iter().filter_map(waited_for_ns).collect();
        let all = launch.ends.len();
        let is_enough = if with_all { waited.len() > all / 2 } else { waited.len() == all };
        let most = waited.len().checked_sub(1).filter(|_| is_enough)?;
        // A launch that is timed as a whole is longer as well where it has slow data: nearly all have to be longer.
        let at = match (with_all, came_ns.is_none() && own_ns.is_some()) {
            (true, false) => most / 2,
            (true, true) => (most + 1) / 4,
            (false, _) => 0,
        };
        let waited_ns = u64::try_from(*waited.select_nth_unstable(at).1).ok()?;
        let late = Late { rank: key.0, by_ns: waited_ns, measure: Measure::Gpu };
        let (transfer, transfer_ns) = (launch.transfer?, launch.shortest_ns.or(own_ns));
        (waited_ns >= LATE_NS).then_some(LateExchange { late, transfer_ns, transfer, came_ns, with_all })
    }
}

impl ExchangeLaunch {
    fn is_with_all(&self, ranks: usize) -> bool {
        let others = ranks.saturating_sub(1);
        others > 0 && self.sent == others && self.received == others && (ranks > 2 || self.with_itself)
    }

    fn is_with_neighbours(&self) -> bool {
        self.has_several_peers
            && self.sent > 0
            && self.received > 0
            && self.sent + self.received == self.issued
    }
}

#[cfg(test)]
mod tests {
    use super::{Exchanges, LAUNCHES_KEPT};
    use crate::join::Join;
    use crate::join::communicator::LateEvent;
    use crate::join::testing::{all_reduce, member, process};
    use crate::model::{Func, Lane, OpRecord, Rank, Timing, Untimed, Update};

    const S: u64 = 1_000_000_000;

    /// One end of a transfer of a rank's launch `plan`; the launch starts at `start_ns`, and ends when both ends are there.
    fn end(rank: u32, peer: u32, func: Func, order: u64, plan: u64, times_ns: (u64, u64)) -> OpRecord {
        let mut op = all_reduce(rank, order, times_ns.0 - 5_000, Some((times_ns.0, Some(times_ns.1))));
        op.ticket = order << 16 | u64::from(peer) << 1 | u64::from(func == Func::Send);
        op.func = func;
        op.lane = if func == Func::Send { Lane::Send(Rank(peer)) } else { Lane::Recv(Rank(peer)) };
        op.plan = Some(plan);
        op
    }

    /// The late ranks and by how many ms they were, after ten rounds in which each of `ranks` ranks sends to those that
    /// `peers` gives and receives from those that send to it; rank 1 comes 50 ms late in each.
    fn late(ranks: u32, with_itself: bool, peers: impl Fn(u32, u32) -> bool) -> Vec<(u32, u64)> {
        late_of(&job(ranks, &[1], with_itself, peers))
    }

    fn late_of(j: &Join) -> Vec<(u32, u64)> {
        let c = j.communicators().next().expect("one");
        c.late().map(|e| (e.rank.0, e.by_ns / 1_000_000)).collect()
    }

    fn job(ranks: u32, late: &[u32], with_itself: bool, peers: impl Fn(u32, u32) -> bool) -> Join {
        job_of(ranks, |r| if late.contains(&r) { 50 } else { 0 }, with_itself, peers)
    }

    /// The same with ranks that are behind by so many ms.
    fn job_of(
        ranks: u32,
        behind_ms: impl Fn(u32) -> u64,
        with_itself: bool,
        peers: impl Fn(u32, u32) -> bool,
    ) -> Join {
        let mut j = Join::new();
        for r in 0..ranks {
            j.feed(process(r));
            j.feed(member(r, ranks, 1));
        }
        for order in 0..10 {
            let begin_ns = (order + 1) * S;
            let start_ns = |r: u32| begin_ns + behind_ms(r) * 1_000_000;
            for (from, to) in (0..ranks).flat_map(|a| (0..ranks).map(move |b| (a, b))) {
                if !(from != to && peers(from, to) || from == to && with_itself) {
                    continue;
                }
                let both_ns = start_ns(from).max(start_ns(to)) + 1_000_000;
                for (rank, peer, func) in [(from, to, Func::Send), (to, from, Func::Recv)] {
                    // As NCCL 2.28 reports it.
                    let end_ns = if with_itself { start_ns(rank) + 30_000 } else { both_ns };
                    let mut op = end(rank, peer, func, order, order, (start_ns(rank), end_ns));
                    if rank == peer {
                        op.stamps.clear();
                        (op.started, op.stopped) = (0, 0);
                    }
                    j.feed(Update::Op(Box::new(op)));
                }
            }
        }
        j.tick(20 * S);
        j
    }

    #[test]
    fn the_late_rank_of_an_all_to_all_is_named() {
        for ranks in [3, 4, 8] {
            let found = late(ranks, false, |_, _| true);
            assert_eq!(found.len(), 10, "{found:?}");
            assert!(found.iter().all(|l| *l == (1, 50)), "{found:?}");
        }
    }

    #[test]
    fn what_two_late_ranks_of_an_exchange_cost_is_counted_once() {
        let mut j = job(8, &[6, 7], false, |_, _| true);
        let costs = |j: &Join| {
            let c = j.communicators().next().expect("one");
            c.members().values().map(|m| m.late_cost_ns).collect::<Vec<_>>()
        };
        let before = costs(&j);
        assert_eq!(before.iter().filter(|ns| **ns > 0).count(), 2, "{before:?}");
        (21..31).for_each(|s| j.tick(s * S));
        assert_eq!(costs(&j), before);
    }

    #[test]
    fn two_ranks_that_send_nothing_to_themselves_may_be_a_pipeline() {
        assert_eq!(late(2, true, |_, _| true).len(), 10);
        assert_eq!(late(2, false, |_, _| true), []);
    }

    #[test]
    fn among_neighbours_the_one_that_all_its_peers_wait_for_is_late() {
        // Of 7 in a row rank 3 is slow: each of the others waits 50 ms for its neighbour on that side.
        let next_to = |a: u32, b: u32| a.abs_diff(b) == 1;
        let late = late_of(&job_of(7, |r| 150 - 50 * u64::from(r.abs_diff(3)), false, next_to));
        assert_eq!(late.len(), 9, "of the last launch more may come: {late:?}");
        assert!(late.iter().all(|l| *l == (3, 50)), "{late:?}");
    }

    /// The late ranks of 20 launches of a ring of four, in which some ranks come 200 ms late to the last ten. `host` says where a
    /// rank is, and `one_end` whether the ends of its launch are those of the transfers that are over first.
    fn late_in_ring(
        late: &[u32],
        host: impl Fn(u32) -> u64,
        one_end: impl Fn(u32) -> bool,
    ) -> Vec<LateEvent> {
        let mut j = Join::new();
        for r in 0..4 {
            j.feed(process(r));
            let Update::Comm(mut c) = member(r, 4, 1) else { unreachable!("a member") };
            c.host_clock = host(r);
            j.feed(Update::Comm(c));
        }
        for order in 0..20 {
            let begin_ns = (order + 1) * S;
            let late_ns = if order < 10 { 0 } else { 200_000_000 };
            let start_ns = |r: u32| begin_ns + if late.contains(&r) { late_ns } else { 0 };
            for (rank, peer) in (0..4).flat_map(|r| [(r, (r + 1) % 4), (r, (r + 3) % 4)]) {
                let is_over_ns =
                    if one_end(rank) { start_ns(rank) } else { start_ns(rank).max(start_ns(peer)) };
                for func in [Func::Send, Func::Recv] {
                    let times_ns = (start_ns(rank), is_over_ns + 1_000_000);
                    j.feed(Update::Op(Box::new(end(rank, peer, func, order, order, times_ns))));
                }
            }
            j.tick(begin_ns + S / 2);
        }
        j.tick(100 * S);
        j.communicators().next().expect("one").late().cloned().collect()
    }

    #[test]
    fn what_a_late_neighbor_costs_is_known_though_one_transfer_showed_it_first() {
        let late = late_in_ring(&[1], |_| 1, |_| true);
        let of_rank: Vec<_> = late.iter().filter(|e| e.rank == Rank(1)).collect();
        let is_confirmed = |e: &&&LateEvent| e.in_exchange;
        assert!(
            of_rank.iter().filter(is_confirmed).count() >= 9,
            "of the last launch more may come: {late:?}"
        );
        assert!(of_rank.iter().filter(|e| e.cost_ns() > S / 10).count() >= 9, "{of_rank:?}");
        assert!(late.iter().all(|e| e.rank == Rank(1) || e.cost_ns() == 0), "{late:?}");
    }

    #[test]
    fn starts_on_one_host_and_ends_on_others_show_the_late_neighbor() {
        // Ranks 0 and 1 are on one host. The ends of rank 0 say nothing.
        let late = late_in_ring(&[1], |r| u64::from(r / 2), |r| r == 0);
        let in_exchange: Vec<u32> = late.iter().filter(|e| e.in_exchange).map(|e| e.rank.0).collect();
        assert!(in_exchange.len() >= 9 && in_exchange.iter().all(|r| *r == 1), "{late:?}");
    }

    #[test]
    fn ranks_of_one_host_that_are_late_together_are_named() {
        let named = |late: &[u32]| {
            let late = late_in_ring(late, |r| u64::from(r / 2), |_| false);
            late.iter().filter(|e| e.in_exchange).map(|e| (e.rank.0, e.by_ns / 1_000_000)).collect::<Vec<_>>()
        };
        let late = named(&[2, 3]);
        assert!(late.len() >= 16 && late.iter().all(|(r, ms)| *r >= 2 && *ms == 200), "{late:?}");
        // Two neighbors on different hosts: each of the hosts has a neighbor that was not kept waiting.
        assert_eq!(named(&[1, 2]), []);
    }

    #[test]
    fn one_start_of_a_launch_is_enough() {
        // NCCL 2.28.9 stamps one transfer in two of eight ranks' all-to-all, and tells the end of few.
        let mut j = Join::new();
        for r in 0..8 {
            j.feed(process(r));
            j.feed(member(r, 8, 1));
        }
        for order in 0..10 {
            let start_ns = |r: u32| (order + 1) * S + if r == 1 { 50_000_000 } else { 0 };
            for (from, to) in (0..8).flat_map(|a| (0..8).map(move |b| (a, b))).filter(|(a, b)| a != b) {
                for (rank, peer, func) in [(from, to, Func::Send), (to, from, Func::Recv)] {
                    let times_ns = (start_ns(rank), start_ns(rank) + 60_000_000);
                    let mut op = end(rank, peer, func, order, order, times_ns);
                    if (rank + peer) % 4 != 1 {
                        op.stamps.clear();
                    }
                    j.feed(Update::Op(Box::new(op)));
                }
            }
            j.tick((order + 4) * S);
        }
        j.tick(20 * S);
        let late = late_of(&j);
        assert!(late.len() > 8 && late.iter().all(|l| *l == (1, 50)), "{late:?}");
    }

    #[test]
    fn the_times_of_whole_launches_show_the_late_rank() {
        for (ranks, comes_late) in [(2, false), (4, false), (2, true), (4, true)] {
            let mut j = Join::new();
            let mut times = Vec::new();
            for r in 0..ranks {
                j.feed(process(r));
                j.feed(member(r, ranks, 1));
            }
            for order in 0..10 {
                let start_ns = |r: u32| (order + 1) * S + if r == 1 { 50_000_000 } else { 0 };
                let all = (0..ranks).flat_map(|a| (0..ranks).map(move |b| (a, b)));
                for (from, to) in all {
                    for (rank, peer, func) in [(from, to, Func::Send), (to, from, Func::Recv)] {
                        let times_ns = (start_ns(rank), start_ns(1) + 2_000_000);
                        let mut op = end(rank, peer, func, order, order, times_ns);
                        op.stamps.clear();
                        (op.started, op.stopped) = (0, 0);
                        op.timing = Timing::Not(Untimed::Alone);
                        // The copy to itself comes first.
                        if rank == peer && func == Func::Send {
                            op.timing = Timing::Launch;
                            let untold = op.clone();
                            op.event_ns = Some(times_ns.1 - times_ns.0);
                            op.event_seen_ns = Some(times_ns.1 + 1_000);
                            if comes_late {
                                times.push(std::mem::replace(&mut op, untold));
                            }
                        }
                        j.feed(Update::Op(Box::new(op)));
                    }
                }
                j.tick((order + 2) * S);
                // The plugin reads events at a later launch, when the copy was counted.
                times.drain(..).for_each(|op| j.feed(Update::Op(Box::new(op))));
            }
            j.tick(20 * S);
            let late = late_of(&j);
            assert!(late.len() > 7 && late.iter().all(|l| *l == (1, 50)), "{ranks} ranks: {late:?}");
            let c = j.communicators().next().expect("one");
            assert_eq!(c.coverage().timed, 0, "the time is no transfer's own");
        }
    }

    #[test]
    fn what_nobody_stamped_is_forgotten() {
        let mut e = Exchanges::default();
        for plan in 0..3 * LAUNCHES_KEPT as u64 {
            e.issue(&end(0, 1, Func::Send, plan, plan, (10_000, 20_000)), Some(2));
        }
        assert_eq!((e.incomplete.len(), e.order.len()), (LAUNCHES_KEPT, LAUNCHES_KEPT));
        assert!(e.weight() > 100 * LAUNCHES_KEPT, "what it takes is accounted: {}", e.weight());
    }
}
