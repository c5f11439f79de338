//! Late ranks of collectives, exchanges and transfers.

use super::super::exchange::ExchangeContext;
use super::super::instance::{Instance, IssuedAt, LATE_NS, Late, Measure, Part};
use super::unjudged::SPEAKS_FOR_NS;
use super::{Communicator, Key, LATE_KEPT, LateEvent, Suspicion, Waited};
use crate::model::{Launch, Rank, Track};

/// Operations of a communicator before its rhythm is learned.
const WARM_UP: u64 = 8;
/// Lateness by the hosts' times that is told before the operation is known to have ended, in ns.
pub(super) const VERY_LATE_NS: u64 = 100_000_000;
/// Transfers between two ranks after which a very late transfer of theirs is told.
const USUAL_WAITS: u32 = 8;
/// Waits after which a host that is a little late is told: these show the rhythm of several steps.
const USUAL_WAITS_MANY: u32 = 2 * Waited::OF;
/// A GPU that begins within this share of what its peer waited was waiting for its host.
const AT_ONCE: u64 = 8;
/// Ranks that may be late instead of the last one: more are not looked at.
const LATE_AS_WELL: usize = 8;
/// Launches of peers of a late rank that are looked at.
const LAUNCHES_COMPARED: usize = 4;
/// Late arrivals among which those of one moment lie.
const LATE_NEAR: usize = 16;

/// The manner in which a rank was late; see the fields of [`LateEvent`].
#[derive(Debug, Clone, Copy)]
struct Manner {
    in_exchange: bool,
    by_host: bool,
    by_own_work: bool,
    by_calls: bool,
    speaks_for: f64,
    carried_ns: u64,
    /// When it came, where its own part does not say so.
    came_ns: Option<u64>,
}

impl Default for Manner {
    fn default() -> Self {
        Manner {
            in_exchange: false,
            by_host: false,
            by_own_work: false,
            by_calls: false,
            speaks_for: 1.0,
            carried_ns: 0,
            came_ns: None,
        }
    }
}

impl Communicator {
    /// Tells very late ranks of operations that all have issued and whose end nothing tells but a later one, which may
    /// not come: by the hosts' times.
    pub(super) fn weigh(&mut self, fresh: &[Key], expected: usize) {
        for key in fresh.iter().copied() {
            if matches!(key.0, Track::Pair(..)) || key.1 == 0 {
                continue;
            }
            let Some(i) = self.instances.get_mut(&key) else { continue };
            let issued = |p: &Part| p.op.issued_ns.is_some() && (p.is_silent() || p.finished);
            if i.weighed || i.parts.len() < expected {
                continue;
            }
            if !i.parts.values().any(Part::is_silent) || !i.parts.values().all(issued) {
                continue;
            }
            i.weighed = true;
            self.confirm_late(key);
            let agreed = self.mismatch.is_none_or(|m| key < m || m.0 != key.0);
            let proven =
                self.late_on_host(key.0, key.1, expected).filter(|l| agreed && l.by_ns >= VERY_LATE_NS);
            if proven.is_none() && agreed {
                self.suspect_late(key, expected);
            }
            if let Some(late) = proven {
                self.suspected_late = None;
                self.judged += 1;
                self.tell_late(key, late, None, Manner::default());
            }
        }
    }

    /// Remembers a rank that issued an operation much later than ranks ever did, and took more than twice as long as the
    /// others since the one before, where nothing says whether the GPUs were idle: what the others do next tells whether
    /// they waited. Operations that the others issued meanwhile show the same rank late; the first one is kept.
    fn suspect_late(&mut self, key: Key, expected: usize) {
        let suspected = self.suspected_late.take();
        let Some(late) = self.instances.get(&key).and_then(|i| i.late_on_host(expected)) else { return };
        let is_same = |s: &Suspicion| s.first.0 == key.0 && s.late.rank == late.rank;
        if let Some(suspected) = suspected.filter(|s| is_same(s) && late.by_ns >= VERY_LATE_NS) {
            self.suspected_late = Some(Suspicion { newest: key.1, ..suspected });
            return;
        }
        let Some(before) = key.1.checked_sub(1).filter(|_| key.1 >= WARM_UP) else { return };
        let (this, before) = (self.instances.get(&key), self.instances.get(&(key.0, before)));
        let took = |r: &Rank| {
            let issued = |i: Option<&Instance>| i?.parts.get(r)?.op.issued_ns;
            Some(issued(this)?.saturating_sub(issued(before)?))
        };
        let unusual = late.by_ns >= VERY_LATE_NS && late.by_ns / 2 >= self.longest_ns;
        let others = || self.members.keys().filter(|r| **r != late.rank);
        if unusual && others().all(|r| took(r).is_some_and(|ns| ns < late.by_ns)) {
            self.suspected_late = Some(Suspicion { first: key, newest: key.1, late });
        }
    }

    /// Reports the rank that is suspected to be late if the others issued nothing of this communicator until it came. Only
    /// the operation after the newest one that shows it late says so: later ones come after it in any case.
    fn confirm_late(&mut self, next: Key) {
        let Some(s) = self.suspected_late.filter(|s| s.first.0 == next.0) else { return };
        let issued_ns = |key: &Key, rank: &Rank| self.instances.get(key)?.parts.get(rank)?.op.issued_ns;
        let told = self.instances.get(&s.first).is_none_or(|i| i.late_told.is_some());
        let came_ns = issued_ns(&s.first, &s.late.rank).filter(|_| s.newest.checked_add(1) == Some(next.1));
        let Some(came_ns) = came_ns.filter(|_| !told) else {
            self.suspected_late = None;
            return;
        };
        let waited = |r: &Rank| *r == s.late.rank || issued_ns(&next, r).is_some_and(|t| t >= came_ns);
        if self.members.keys().all(waited) {
            self.suspected_late = None;
            self.judged += 1;
            self.tell_late(s.first, s.late, None, Manner { by_calls: true, ..Manner::default() });
        }
    }

    fn tell_late(
        &mut self,
        (track, order): (Track, u64),
        late: Late,
        transfer_ns: Option<u64>,
        manner: Manner,
    ) {
        let Manner { in_exchange, by_host, by_own_work, by_calls, speaks_for, carried_ns, came_ns } = manner;
        let Some(instance) = self.instances.get_mut(&(track, order)) else { return };
        instance.late_told = Some(late);
        let at_ns = instance.began_ns().unwrap_or(0);
        let came_ns = came_ns.or_else(|| {
            instance.parts.get(&late.rank).and_then(|p| match late.measure {
                Measure::Gpu => p.started_ns.or(p.op.issued_ns),
                Measure::Host | Measure::Standstill => p.op.issued_ns,
            })
        });
        let Some(first) = instance.first().map(|p| p.op.clone()) else { return };
        let operation = self.describe(track, order, &first);
        if let Some(m) = self.members.get_mut(&late.rank) {
            m.late += 1;
            m.worst_late_ns = Some(m.worst_late_ns.unwrap_or(0).max(late.by_ns));
        }
        if self.late.len() == LATE_KEPT {
            self.late.pop_front();
        }
        // A rank that is very late in a collective is found by the hosts' times where nothing is timed. In an exchange it speaks for
        // others only if it was very late shortly before.
        let is_again = |e: &LateEvent| {
            e.in_exchange
                && e.rank == late.rank
                && e.by_ns >= VERY_LATE_NS
                && e.held_elsewhere != Some(true)
                && at_ns.saturating_sub(e.at_ns) < SPEAKS_FOR_NS
        };
        let is_one_of_many = late.measure == Measure::Gpu
            && (late.by_ns < VERY_LATE_NS || in_exchange && self.late.iter().any(is_again));
        self.late.push_back(LateEvent {
            speaks_for: if is_one_of_many { speaks_for } else { 1.0 },
            track,
            operation,
            rank: late.rank,
            by_ns: late.by_ns,
            measure: late.measure,
            transfer_ns,
            at_ns,
            came_ns: came_ns.unwrap_or(at_ns),
            held_elsewhere: None,
            elsewhere_ns: 0,
            carried_ns,
            unsure: false,
            excuse: None,
            finished: 0,
            in_exchange,
            by_host,
            by_own_work,
            by_calls,
        });
    }

    /// Others wait for a rank in an operation, since a moment and still now, host monotonic ns.
    pub(in crate::join) fn wait_for(&mut self, key: Key, rank: Rank, since_ns: u64, now_ns: u64) {
        if let Some(instance) = self.instances.get_mut(&key) {
            instance.wait_for(rank, since_ns, now_ns);
        }
    }

    /// The ranks that came to a collective at most half of its lateness before its late rank, the last one first: each with how
    /// late it was, and when it came.
    pub(in crate::join) fn late_as_well(&self, e: &LateEvent) -> Vec<(Rank, u64, u64)> {
        let Some(instance) = self.instance(e.track, e.operation.order) else { return Vec::new() };
        let is_collective = !matches!(e.track, Track::Pair(..)) && e.measure == Measure::Gpu;
        // Kernels of one operation end together.
        let took_ns = |r: &Rank| instance.parts.get(r).and_then(Part::duration_ns);
        let Some(least_ns) = took_ns(&e.rank).filter(|_| is_collective) else { return Vec::new() };
        let of = |(rank, part): (&Rank, &Part)| {
            let waited_ns = part.duration_ns()?.saturating_sub(least_ns);
            let is_late = *rank != e.rank && waited_ns < e.by_ns / 2;
            let by_ns = e.by_ns.saturating_sub(waited_ns);
            is_late.then_some((*rank, by_ns, part.started_ns?))
        };
        let mut all: Vec<(Rank, u64, u64)> = instance.parts.iter().filter_map(of).collect();
        all.sort_by_key(|(.., came_ns)| std::cmp::Reverse(*came_ns));
        all.truncate(LATE_AS_WELL);
        all
    }

    /// True where all that waited for a late rank of a transfer waited for somebody else: a launch of several transfers has one end,
    /// and that is of the peer that came last.
    pub(in crate::join) fn waited_for_another(&self, e: &LateEvent) -> bool {
        let Track::Pair(..) = e.track else { return false };
        let own = self.instance(e.track, e.operation.order).and_then(|i| i.parts.get(&e.rank));
        let Some((launch, own)) = own.map(|p| (p.op.launch(), p)).filter(|(l, _)| l.is_known()) else {
            return false;
        };
        let own_ns = own.kernel.map_or(0, |k| k.duration_ns);
        let waited = |p: &Part| p.kernel.is_some_and(|k| k.duration_ns.saturating_sub(own_ns) >= e.by_ns / 2);
        let peers = self.of_launch(e.rank, launch).filter_map(|i| {
            let mut ends = i.parts.iter().filter(|(r, _)| **r != e.rank);
            ends.find(|(_, p)| waited(p)).map(|(r, p)| (*r, p.op.launch()))
        });
        let mut peers = peers.take(LAUNCHES_COMPARED + 1).peekable();
        let after_ns = e.came_ns.saturating_add(e.by_ns / 2);
        peers.peek().is_some()
            && (1..).zip(peers).all(|(n, (peer, of_peer))| {
                n <= LAUNCHES_COMPARED && self.launch_waited_after(peer, of_peer, e.rank, after_ns)
            })
    }

    /// True where a rank's launch has one end for all its transfers, and another of its peers than this one came after a moment.
    fn launch_waited_after(&self, rank: Rank, launch: Launch, but: Rank, after_ns: u64) -> bool {
        let end_ns = |i: &Instance| i.parts.get(&rank).and_then(|p| p.kernel).map(|k| k.end_ns());
        let mut ends = self.of_launch(rank, launch).map(end_ns);
        let first = ends.next().flatten();
        let is_later = |(r, p): (&Rank, &Part)| {
            let came_ns = p.started_ns.or(p.kernel.map(|k| k.start_ns));
            *r != rank && *r != but && came_ns.is_some_and(|t| t > after_ns)
        };
        first.is_some()
            && ends.all(|end| end == first)
            && self.of_launch(rank, launch).flat_map(|i| i.parts.iter()).any(is_later)
    }

    /// Returns the peers of a rank's transfer and of those that were launched with it: when each of them had issued it, and when it
    /// came to it, host monotonic ns. Only times of one host compare.
    pub(in crate::join) fn peers_came<'a>(
        &'a self,
        transfer: &'a Instance,
        rank: Rank,
    ) -> impl Iterator<Item = (Rank, (IssuedAt, u64))> {
        let launch = transfer.parts.get(&rank).map(|p| p.op.launch()).filter(|l| l.is_known());
        let others = launch.into_iter().flat_map(move |l| self.of_launch(rank, l));
        let all = std::iter::once(transfer).chain(others);
        let came = |(r, p): (&Rank, &Part)| Some((*r, (p.issued_at()?, p.kernel?.start_ns)));
        let is_peer = move |(r, _): &(&Rank, &Part)| **r != rank && self.share_clock(**r, rank);
        let peers = all.flat_map(|i| i.parts.iter()).filter(is_peer);
        peers.filter_map(came)
    }

    /// The transfers of a rank's launch; none where it is not known.
    fn of_launch(&self, rank: Rank, launch: Launch) -> impl Iterator<Item = &Instance> {
        let is_of_it =
            move |i: &&Instance| i.parts.get(&rank).is_some_and(|p| p.op.launch().shared_with(launch));
        let transfers = self.instances().filter(|(track, ..)| matches!(track, Track::Pair(..)));
        transfers.map(|(.., i)| i).filter(is_of_it)
    }

    /// Says of a late arrival whose it is, and what explains it.
    pub(in crate::join) fn explain_late(
        &mut self,
        e: &LateEvent,
        (rank, by_ns, came_ns): (Rank, u64, u64),
        explain: impl FnOnce(&mut LateEvent),
    ) {
        let place = |l: &LateEvent| (l.track, l.operation.order, l.rank);
        let is_it = |l: &&mut LateEvent| place(l) == place(e) && l.held_elsewhere.is_none();
        let Some(event) = self.late.iter_mut().find(is_it) else { return };
        (event.rank, event.by_ns, event.came_ns) = (rank, by_ns, came_ns);
        if rank != e.rank {
            event.carried_ns = 0;
        }
        explain(event);
        let cost_ns = event.cost_ns();
        if rank != e.rank {
            if let Some(m) = self.members.get_mut(&e.rank) {
                m.late = m.late.saturating_sub(1);
            }
            if let Some(m) = self.members.get_mut(&rank) {
                m.late += 1;
                m.worst_late_ns = Some(m.worst_late_ns.unwrap_or(0).max(by_ns));
            }
        }
        self.add_late_cost(rank, came_ns, cost_ns);
    }

    /// Judges the ranks of a finished collective: their waiting, the job's rhythm, and who came late.
    pub(super) fn judge(
        &mut self,
        key: (Track, u64),
        needed: usize,
        transfer_ns: Option<u64>,
    ) -> Option<Late> {
        let (track, order) = key;
        let instance = self.instances.get(&key)?;
        let issued = || instance.parts.values().filter_map(|p| p.op.issued_ns);
        let longest_ns = self.longest_ns;
        // While a job gets going it has no rhythm yet.
        if let (true, Some(first), Some(last)) = (order >= WARM_UP, issued().min(), issued().max()) {
            self.longest_ns = self.longest_ns.max(last - first);
        }
        for (rank, ns) in transfer_ns.into_iter().flat_map(|t| instance.waiting_ns(t)) {
            if let Some(m) = self.members.get_mut(&rank) {
                m.waiting_ns = Some(m.waiting_ns.unwrap_or(0).saturating_add(ns));
            }
        }
        // The first operation sets up connections, at a different pace on every rank.
        if order == 0 {
            return None;
        }
        if let Some(told) = instance.late_told {
            return Some(told);
        }
        let gpu = instance.late_on_gpu(needed, self.one_clock());
        let host = || self.late_on_host(track, order, needed);
        // Where an untimed operation before it had the GPUs wait for a late host, they come to this one together.
        let by_gpu_ns = gpu.map_or(0, |l| l.by_ns);
        let is_more = |l: &Late| l.by_ns >= VERY_LATE_NS && l.by_ns / 2 >= by_gpu_ns.max(longest_ns);
        let waited_before = || host().filter(|l| order >= WARM_UP && is_more(l));
        let known = waited_before().or(gpu).or_else(host);
        // Ranks of one host are compared by its clock.
        let needs_standstill = known.is_none() && !self.one_clock();
        let stood = needs_standstill.then(|| instance.late_by_standstill()).flatten();
        let late = known.or(stood.map(|(late, _)| late));
        let at_ns = instance.began_ns().unwrap_or(0);
        let [unjudged, _] = &mut self.unjudged;
        let Some(found) = late else {
            unjudged.add(1.0);
            return None;
        };
        self.judged += 1;
        unjudged.judged(at_ns, 1.0);
        let speaks_for = unjudged.speaks_for(1.0);
        let is_by_gpu = found.measure == Measure::Gpu;
        let carried_ns = if is_by_gpu { self.leads.carried_ns(key, found) } else { 0 };
        if found.by_ns >= LATE_NS {
            let came_ns = stood.map(|(_, came_ns)| came_ns);
            let manner = Manner { speaks_for, carried_ns, came_ns, ..Manner::default() };
            self.tell_late(key, found, transfer_ns, manner);
        }
        late
    }

    /// Reports the late ranks of the exchanges that a transfer completes; returns one of them.
    pub(super) fn judge_exchanges(&mut self, key: Key, ranks: usize) -> Option<Late> {
        let Track::Pair(from, to) = key.0 else { return None };
        let context = ExchangeContext { ranks, one_clock: self.share_clock(from, to) };
        let instance = self.instances.get(&key)?;
        let (parts, at_ns) = (&instance.parts, instance.began_ns().unwrap_or(0));
        let ends = [parts.get(&from)?, parts.get(&to)?];
        let transfers = (ranks * ranks.saturating_sub(1)).max(1) as f64;
        let [_, unjudged] = &mut self.unjudged;
        if from != to && self.exchanges.is_timed(ends, context) {
            unjudged.judged(at_ns, 1.0 / transfers);
        } else if from != to {
            unjudged.add(1.0);
        }
        let speaks_for = unjudged.speaks_for(transfers);
        let found = self.exchanges.add(key, ends, context);
        for e in &found {
            let part = self.instances.get(&e.transfer).and_then(|i| i.parts.get(&e.late.rank));
            let came_ns = e.came_ns.or_else(|| part.and_then(|p| p.started_ns.or(p.op.issued_ns)));
            let known = came_ns.filter(|_| !e.with_all).and_then(|t| self.told(e.late.rank, t, e.late.by_ns));
            if let Some(at) = known {
                self.confirm_exchange(at, e.late.by_ns);
                continue;
            }
            self.judged += 1;
            // How many transfers one with neighbours has is not known.
            let speaks_for = if e.with_all { speaks_for } else { 1.0 };
            let manner = Manner { in_exchange: true, speaks_for, came_ns, ..Manner::default() };
            self.tell_late(e.transfer, e.late, e.transfer_ns, manner);
        }
        found.into_iter().find(|e| e.with_all).map(|e| e.late)
    }

    /// Judges the two ranks of a finished transfer. In a pipeline one of them waits for the other in every step, and
    /// that is nobody's fault: late is who keeps the other waiting for much longer than usual, where the host is the
    /// reason or the wait very long.
    pub(super) fn judge_transfer(&mut self, key: Key, from: Rank, to: Rank) -> Option<Late> {
        let instance = self.instances.get(&key)?;
        let kernel = |r: Rank| instance.parts.get(&r)?.kernel;
        let Some((sent, received)) = kernel(from).zip(kernel(to)) else {
            let (late, came_ns) =
                instance.late_by_standstill().filter(|_| key.1 >= u64::from(USUAL_WAITS))?;
            return self.judge_standstill(key, (from, to), late, came_ns);
        };
        // NCCL 2.28 tells the end of a launch by one thread: a receive may seem to end before its send began, though nothing
        // can have come by then. A send may really be over so soon, with what it sent in the receiver's buffer.
        let receiver_waited_ns = match self.share_clock(from, to) {
            true => sent.start_ns.saturating_sub(received.start_ns),
            false => received.duration_ns.saturating_sub(sent.duration_ns),
        };
        let sender_waited_ns = sent.duration_ns.saturating_sub(received.duration_ns);
        let (rank, waiting, wait_ns) = match receiver_waited_ns >= sender_waited_ns {
            true => (from, 1, receiver_waited_ns),
            false => (to, 0, sender_waited_ns),
        };
        let came = instance.parts.get(&rank)?;
        let after_issue_ns = came.kernel?.start_ns.saturating_sub(came.op.issued_ns?);
        let came_ns = came.started_ns.or(came.op.issued_ns)?;
        let transfer_ns = sent.duration_ns.min(received.duration_ns);
        // Exchanges are judged as a whole.
        let is_by_itself = from != to && !self.exchanges.are_usual();
        let longer = [from, to].map(|r| is_by_itself.then(|| self.note_own_work(key, r)).flatten());
        let longer_ns = longer[usize::from(rank == to)].unwrap_or(0).min(wait_ns);
        let both = &mut self.pairs.get_mut(&(from, to)).filter(|_| from != to && key.1 > 0)?.waits;
        both.iter_mut().for_each(Waited::pass);
        let judged = both.iter().map(|w| w.times).sum::<u32>();
        let waits = &mut both[waiting];
        let longer_wait_ns = wait_ns.saturating_sub(waits.usual_ns());
        // An end that hardly waited in so many transfers usually does not, but may begin to wait a little in each step.
        let least_ns = if waits.times >= USUAL_WAITS_MANY { LATE_NS } else { VERY_LATE_NS };
        let by_host = judged >= USUAL_WAITS_MANY
            && longer_wait_ns >= least_ns
            && after_issue_ns <= longer_wait_ns / AT_ONCE
            && is_by_itself;
        let by_own_work = !by_host && longer_ns >= LATE_NS;
        // A late host costs all that its peer waited beyond the longest wait known.
        let by_ns = match (by_own_work, by_host) {
            (true, _) => longer_ns,
            (_, true) => wait_ns.saturating_sub(waits.longest_known_ns()),
            _ => longer_wait_ns,
        };
        let is_late = by_host || by_own_work || judged >= USUAL_WAITS && by_ns >= VERY_LATE_NS;
        if by_own_work || !is_late {
            waits.add(wait_ns, came_ns);
        }
        if by_host {
            waits.longer_from_ns = None;
        }
        if !is_late {
            return None;
        }
        let late = Late { rank, by_ns, measure: Measure::Gpu };
        if self.told(rank, came_ns, by_ns).is_none() {
            let manner = Manner { by_host, by_own_work, ..Manner::default() };
            self.tell_late(key, late, Some(transfer_ns), manner);
        }
        Some(late)
    }

    /// Judges a transfer without times in which one end stood still: late is what it kept the other waiting for beyond what it
    /// usually does.
    fn judge_standstill(
        &mut self,
        key: Key,
        (from, to): (Rank, Rank),
        late: Late,
        came_ns: u64,
    ) -> Option<Late> {
        let waiting = usize::from(late.rank == from);
        let waits = &mut self.pairs.get_mut(&(from, to))?.waits[waiting];
        let by_ns = late.by_ns.saturating_sub(waits.usual_ns());
        waits.add(late.by_ns, came_ns);
        let late = Late { by_ns, ..late };
        if by_ns < VERY_LATE_NS {
            return None;
        }
        if self.told(late.rank, came_ns, by_ns).is_none() {
            self.tell_late(key, late, None, Manner { came_ns: Some(came_ns), ..Manner::default() });
        }
        Some(late)
    }

    /// The place among the late arrivals where a rank was told as late for about the same time: several peers may have waited
    /// for it at once.
    fn told(&self, rank: Rank, came_ns: u64, by_ns: u64) -> Option<usize> {
        let is_same = |e: &LateEvent| {
            e.rank == rank
                && e.came_ns.saturating_sub(e.by_ns) < came_ns
                && came_ns.saturating_sub(by_ns) < e.came_ns
        };
        let newest = self.late.len().saturating_sub(LATE_NEAR);
        self.late.range(newest..).rposition(is_same).map(|at| newest + at)
    }

    /// Takes a late arrival that was seen in one transfer for one that all peers of its launch waited for so long, in ns: what it
    /// cost is known from now on. By the end of its launch one peer may seem to have waited, though it waited for another.
    fn confirm_exchange(&mut self, at: usize, by_ns: u64) {
        let is_it = |e: &&mut LateEvent| !e.costs() && by_ns >= e.by_ns / 2;
        let Some(e) = self.late.get_mut(at).filter(is_it) else { return };
        e.in_exchange = true;
        self.judged += 1;
        let (rank, came_ns, cost_ns) = (e.rank, e.came_ns, e.cost_ns());
        self.add_late_cost(rank, came_ns, cost_ns);
    }

    /// True when the times of two ranks are of one host's one boot.
    pub(super) fn share_clock(&self, one: Rank, other: Rank) -> bool {
        let clock = |r: Rank| self.members.get(&r).map(|m| m.record.host_clock);
        clock(one).is_some() && clock(one) == clock(other)
    }

    /// True when the times of all ranks seen are of one host's one boot.
    pub(super) fn one_clock(&self) -> bool {
        let mut clocks = self.members.values().map(|m| m.record.host_clock);
        let first = clocks.next();
        clocks.all(|c| Some(c) == first)
    }

    /// Lateness by the hosts' issue times, where the GPUs' stamps cannot be believed. A host that issues late is
    /// late only if nothing of this track was still running: it need not run ahead of its GPU. Replays are
    /// issued by callbacks in the stream, when the GPU comes to them.
    fn late_on_host(&self, track: Track, order: u64, needed: usize) -> Option<Late> {
        if matches!(track, Track::Pair(..)) || !self.one_clock() {
            return None;
        }
        let this = self.instance(track, order)?;
        if track == Track::Replay {
            return this.late_on_host(needed);
        }
        let before = self.instance(track, order.checked_sub(1)?)?;
        let began = this.began_ns()?;
        // Where ranks wait for each other, one that has seen its own part end knows that all were there.
        let first = this.first()?;
        let by_itself = before.parts.get(&first.op.rank).and_then(|p| p.ended_seen_ns);
        let all = before.first().is_some_and(|p| !p.op.func.is_rooted());
        let idle = (all && by_itself.is_some_and(|e| e <= began))
            || before.ended_seen_ns().is_some_and(|e| e <= began);
        if idle { this.late_on_host(needed) } else { None }
    }
}

#[cfg(test)]
mod tests {
    use crate::join::testing::{all_reduce, member, process};
    use crate::join::{Join, Measure};
    use crate::model::{CommId, Func, Lane, Rank, Timing, Untimed, Update};

    const MS: u64 = 1_000_000;

    /// How often rank 1 came late, and by how many ms in all, in a pipeline of two stages: rank 0 waits for what rank 1
    /// sends, `usual_ms` in each of 300 steps and `wait_ms` in each of 20 more. Rank 1's GPU starts `after_ms` after its host
    /// has issued. As NCCL 2.28 reports it, the receive ends at once.
    fn late(usual_ms: u64, wait_ms: u64, after_ms: u64) -> (usize, u64) {
        late_while_ahead(usual_ms, wait_ms, |_| after_ms)
    }

    /// The same with a host that is ahead of its GPU by so many ms at each of the transfers.
    fn late_while_ahead(usual_ms: u64, wait_ms: u64, after_ms: impl Fn(u64) -> u64) -> (usize, u64) {
        let mut j = Join::new();
        for r in 0..2 {
            j.feed(process(r));
            j.feed(member(r, 2, 1));
        }
        for order in 0..320 {
            let start_ns = (1_000 + order * 200) * MS;
            let wait_ns = if order < 300 { usual_ms } else { wait_ms } * MS;
            for (rank, func, start_ns) in [(0, Func::Recv, start_ns), (1, Func::Send, start_ns + wait_ns)] {
                let mut op = all_reduce(
                    rank,
                    order,
                    start_ns - after_ms(order) * MS - 1_000,
                    Some((start_ns, Some(start_ns + 20_000))),
                );
                op.func = func;
                op.lane = if rank == 1 { Lane::Send(Rank(0)) } else { Lane::Recv(Rank(1)) };
                j.feed(Update::Op(Box::new(op)));
            }
        }
        j.tick(100_000 * MS);
        let c = j.communicators().next().expect("one");
        assert!(c.late().all(|e| e.rank == Rank(1) && e.by_host && e.costs()));
        (c.late().count(), c.late().map(|e| e.by_ns / MS).sum())
    }

    #[test]
    fn a_stage_whose_host_is_late_is_told_beyond_the_pipelines_bubbles() {
        assert_eq!(late(6, 56, 0), (20, 20 * 50));
        assert_eq!(late(6, 9, 0), (0, 0), "steps differ by a half");
        assert_eq!(late(50, 50, 0), (0, 0), "this is how it always was");
        assert_eq!(late(6, 56, 30), (0, 0), "the GPU was busy when the host issued it");
    }

    /// How often rank 0 came late. Rank 1 sends to it, and waits `first_ms` at the fourth of `steps` transfers and 150 ms in each
    /// of 20 more; in the others rank 0 waits 6 ms.
    fn late_receiver(steps: u64, first_ms: u64) -> usize {
        let mut j = Join::new();
        for r in 0..2 {
            j.feed(process(r));
            j.feed(member(r, 2, 1));
        }
        for order in 0..steps + 20 {
            let both_ns = (1_006 + order * 200) * MS;
            let receiver_ns = match order {
                3 => both_ns + first_ms * MS,
                _ if order < steps => both_ns - 6 * MS,
                _ => both_ns + 150 * MS,
            };
            let end_ns = both_ns.max(receiver_ns) + 20_000;
            for (rank, func, start_ns) in [(0, Func::Recv, receiver_ns), (1, Func::Send, both_ns)] {
                let mut op = all_reduce(rank, order, start_ns - 1_000, Some((start_ns, Some(end_ns))));
                op.func = func;
                op.lane = if rank == 1 { Lane::Send(Rank(0)) } else { Lane::Recv(Rank(1)) };
                j.feed(Update::Op(Box::new(op)));
            }
            if order % 100 == 99 {
                j.tick(both_ns);
            }
        }
        j.tick(1_000_000 * MS);
        let c = j.communicators().next().expect("one");
        assert!(c.late().all(|e| e.rank == Rank(0) && e.costs()));
        c.late().filter(|e| e.by_host).count()
    }

    #[test]
    fn an_end_that_never_waited_reports_a_late_host_as_well() {
        assert_eq!(late_receiver(300, 0), 20);
    }

    #[test]
    fn how_long_the_start_took_is_forgotten_by_an_end_that_hardly_waits() {
        assert_eq!(late_receiver(300, 190), 0, "190 ms may be usual");
        assert_eq!(late_receiver(1_100, 190), 20);
    }

    #[test]
    fn a_host_that_was_ahead_when_it_became_late_is_told_once_it_is_not() {
        let ahead_ms = |order: u64| 300_u64.saturating_sub(30 * order.saturating_sub(300));
        assert_eq!(late_while_ahead(6, 56, ahead_ms), (10, 10 * 50));
    }

    /// By how many tenths of a second rank 1 came late, for whose sends another host's receives wait so long, with a look every 100 ms.
    /// Every second transfer is timed.
    fn late_by_standstills(waits_ms: &[u64]) -> Vec<u64> {
        let mut j = Join::new();
        for r in 0..2 {
            j.feed(process(r));
            let Update::Comm(mut c) = member(r, 2, 1) else { unreachable!("a member") };
            c.host_clock = u64::from(r);
            j.feed(Update::Comm(c));
        }
        let mut at_ns = 1_000 * MS;
        for (order, wait_ms) in (0..).zip(waits_ms) {
            let end = |rank: u32, issued_ns: u64, ended_ns: Option<u64>| {
                let is_timed = order % 2 == 0;
                let kernel = is_timed.then_some((issued_ns + 1_000, ended_ns));
                let mut op = all_reduce(rank, order, issued_ns, kernel);
                (op.func, op.lane) = match rank {
                    0 => (Func::Recv, Lane::Recv(Rank(1))),
                    _ => (Func::Send, Lane::Send(Rank(0))),
                };
                if !is_timed {
                    op.timing = Timing::Not(Untimed::Budget);
                }
                Update::Op(Box::new(op))
            };
            j.feed(end(0, at_ns, None));
            (1..=wait_ms / 100).for_each(|n| j.tick(at_ns + n * 100 * MS));
            let came_ns = at_ns + wait_ms * MS;
            (0..2).for_each(|r| j.feed(end(r, if r == 0 { at_ns } else { came_ns }, Some(came_ns + MS))));
            at_ns = came_ns + 50 * MS;
        }
        j.tick(at_ns + 60_000 * MS);
        let c = j.communicators().next().expect("one");
        let late = c.late().filter(|e| e.measure == Measure::Standstill);
        late.inspect(|e| assert!(e.rank == Rank(1) && e.costs()))
            .map(|e| e.by_ns.div_ceil(100 * MS))
            .collect()
    }

    #[test]
    fn a_transfer_without_times_that_stands_still_is_late_beyond_what_is_usual() {
        let once =
            |at: usize, ms: u64| -> Vec<u64> { (0..21).map(|n| if n == at { ms } else { 10 }).collect() };
        assert_eq!(late_by_standstills(&once(15, 2_500)), [25]);
        assert_eq!(late_by_standstills(&once(15, 900)), [0; 0], "looks see it too coarsely");
        assert_eq!(late_by_standstills(&once(3, 2_500)), [0; 0], "the job gets going");
        let often: Vec<u64> = (0..31).map(|n| if n > 10 && n % 2 == 1 { 1_300 } else { 10 }).collect();
        assert_eq!(late_by_standstills(&often), [13], "it is usual from the second one on");
    }

    #[test]
    fn of_two_that_come_together_the_one_that_nobody_held_is_late() {
        // Ranks 2 and 3 come a second late to the last operation of all: rank 3 was in one of the two, for which rank 2 had not
        // come.
        let mut j = Join::new();
        for r in 0..4 {
            j.feed(process(r));
            j.feed(member(r, 4, 21));
            for order in 0..21 {
                let start_ns = (1_000 + order * 200) * MS;
                let late_ns = if order == 20 && r >= 2 { 1_000 * MS + u64::from(r) * 1_000 } else { 0 };
                let end_ns = start_ns + 20_000 + if order == 20 { 1_000 * MS + 20_000 } else { 0 };
                let kernel = Some((start_ns + late_ns, Some(end_ns)));
                j.feed(Update::Op(Box::new(all_reduce(r, order, start_ns - 1_000, kernel))));
            }
            if r >= 2 {
                let Update::Comm(mut own) = member(r, 2, 2) else { unreachable!("a member") };
                (own.comm, own.rank) = (CommId::unowned(8), Rank(r - 2));
                j.feed(Update::Comm(own));
                for order in 0..2 {
                    let at_ns = (4_900 + order * 101) * MS;
                    let start_ns = at_ns + if r == 2 && order == 1 { 995 * MS } else { 0 };
                    let end_ns = at_ns + order * 996 * MS + 1_000;
                    let mut op = all_reduce(r, order, at_ns - 1_000, Some((start_ns, Some(end_ns))));
                    (op.comm, op.rank) = (CommId::unowned(8), Rank(r - 2));
                    j.feed(Update::Op(Box::new(op)));
                }
            }
        }
        j.tick(100_000 * MS);
        let c = j.communicator(CommId::unowned(7)).expect("that of all");
        let late: Vec<_> = c.late().filter(|e| e.operation.order == 20).collect();
        let [event] = late.as_slice() else { panic!("{late:?}") };
        assert_eq!((event.rank, event.held_elsewhere), (Rank(2), Some(false)));
        assert!(event.cost_ns() > 900 * MS, "{event:?}");
        let count = |r: u32| c.members()[&Rank(r)].late;
        assert_eq!((count(2), count(3)), (1, 0));
    }

    /// Whether rank 1 counts as held elsewhere, which comes 100 ms late to the last of 21 operations: from before until `left_ms`
    /// after it came, it is in a receive of another communicator.
    fn held_by_receive(left_ms: i64) -> Option<bool> {
        let mut j = Join::new();
        for r in 0..2 {
            j.feed(process(r));
            j.feed(member(r, 2, 21));
            for order in 0..21 {
                let at_ns = (1_000 + order * 200) * MS;
                let late_ns = if order == 20 { 100 * MS } else { 0 };
                let start_ns = at_ns + if r == 1 { late_ns } else { 0 };
                let kernel = Some((start_ns, Some(at_ns + late_ns + 20_000)));
                j.feed(Update::Op(Box::new(all_reduce(r, order, at_ns - 1_000, kernel))));
            }
        }
        let Update::Comm(mut own) = member(1, 2, 1) else { unreachable!("a member") };
        (own.comm, own.rank) = (CommId::unowned(8), Rank(1));
        j.feed(Update::Comm(own));
        let came_ns = 5_100 * MS;
        let kernel = Some((came_ns - 150 * MS, Some(came_ns.strict_add_signed(left_ms * MS as i64))));
        let mut receive = all_reduce(1, 0, came_ns - 200 * MS, kernel);
        (receive.comm, receive.rank, receive.func, receive.lane) =
            (CommId::unowned(8), Rank(1), Func::Recv, Lane::Recv(Rank(0)));
        j.feed(Update::Op(Box::new(receive)));
        j.tick(100_000 * MS);
        let c = j.communicator(CommId::unowned(7)).expect("that of both");
        c.late().find(|e| e.operation.order == 20 && e.rank == Rank(1)).expect("it is late").held_elsewhere
    }

    /// Says whether rank 1 may have been held elsewhere when it came 100 ms late to operations 20, 22, and 24. It issued an untimed
    /// one, at this moment, together with another rank; rank 2 comes together with it.
    fn is_unsure(other: u32, issued_ms: u64) -> Vec<bool> {
        let mut j = Join::new();
        let of_host = |r: u32, ranks: u32, issued: u64| {
            let Update::Comm(mut c) = member(r, ranks, issued) else { unreachable!("a member") };
            c.host_clock = u64::from(r);
            c
        };
        for r in 0..4 {
            j.feed(process(r));
            j.feed(Update::Comm(of_host(r, 4, 25)));
            for order in 0..25 {
                let at_ns = (1_000 + order * 200) * MS;
                let late_ns = if order >= 20 && order % 2 == 0 { 100 * MS } else { 0 };
                let start_ns = match r {
                    1 => at_ns + late_ns,
                    2 if other == 2 => at_ns + late_ns / 100 * 99,
                    _ => at_ns,
                };
                let kernel = Some((start_ns, Some(at_ns + late_ns + 20_000)));
                j.feed(Update::Op(Box::new(all_reduce(r, order, at_ns - 1_000, kernel))));
            }
        }
        for (rank, p) in (0..).zip([1, other]) {
            let mut own = of_host(p, 2, 1);
            (own.comm, own.rank) = (CommId::unowned(8), Rank(rank));
            j.feed(Update::Comm(own));
            let mut op = all_reduce(p, 0, issued_ms * MS, None);
            (op.comm, op.rank) = (CommId::unowned(8), Rank(rank));
            op.timing = Timing::Not(Untimed::Budget);
            j.feed(Update::Op(Box::new(op)));
        }
        j.tick(100_000 * MS);
        let c = j.communicator(CommId::unowned(7)).expect("that of all");
        let late = c.late().filter(|e| e.operation.order >= 20);
        late.inspect(|e| assert_eq!(e.excuse.is_some(), e.unsure)).map(|e| e.unsure).collect()
    }

    #[test]
    fn whoever_came_before_held_nobody_in_what_it_issued_earlier() {
        assert_eq!(is_unsure(0, 4_990), [false; 3], "rank 0 was through with it");
    }

    #[test]
    fn an_untimed_operation_holds_a_rank_once() {
        assert_eq!(is_unsure(2, 4_990), [true, false, false]);
    }

    #[test]
    fn an_operation_that_was_issued_later_holds_nobody() {
        assert_eq!(is_unsure(2, 5_010), [false, true, false], "it is issued after the first of the three");
    }

    #[test]
    fn of_the_peers_of_a_launch_with_one_end_the_last_one_kept_it_waiting() {
        // Rank 0 of a ring of four is slow. Each rank is on a host of its own. NCCL tells one end for a launch: that of the transfer
        // with rank 0.
        let mut j = Join::new();
        for r in 0..4u32 {
            j.feed(process(r));
            let Update::Comm(mut c) = member(r, 4, 1) else { unreachable!("a member") };
            c.host_clock = u64::from(r);
            j.feed(Update::Comm(c));
        }
        for order in 0..20 {
            let begin_ns = (order + 1) * 1_000 * MS;
            let late_ns = if order >= 16 { 200 * MS } else { 0 };
            let start_ns = |r: u32| begin_ns + if r == 0 { late_ns } else { 0 };
            for (rank, peer) in (0..4u32).flat_map(|r| [(r, (r + 1) % 4), (r, (r + 3) % 4)]) {
                // Rank 2 has no transfer with rank 0.
                let end_ns = begin_ns + 1_000 + if rank == 2 { 0 } else { late_ns };
                for (func, lane) in
                    [(Func::Send, Lane::Send(Rank(peer))), (Func::Recv, Lane::Recv(Rank(peer)))]
                {
                    let kernel = Some((start_ns(rank), Some(end_ns)));
                    let mut op = all_reduce(rank, order, start_ns(rank) - 1_000, kernel);
                    (op.func, op.lane, op.plan) = (func, lane, Some(order));
                    op.ticket = order << 8 | u64::from(peer) << 1 | u64::from(func == Func::Send);
                    j.feed(Update::Op(Box::new(op)));
                }
            }
            j.tick(begin_ns + 900 * MS);
        }
        j.tick(100_000 * MS);
        let c = j.communicators().next().expect("one");
        let guilty: Vec<u32> =
            c.late().filter(|e| e.held_elsewhere == Some(false)).map(|e| e.rank.0).collect();
        assert!(guilty.len() >= 3 && guilty.iter().all(|r| *r == 0), "{guilty:?}");
        assert!(c.late().any(|e| e.rank == Rank(2)), "its end alone looks late as well");
    }

    #[test]
    fn what_still_runs_when_a_rank_comes_did_not_hold_it() {
        assert_eq!(held_by_receive(-1), Some(true));
        assert_eq!(held_by_receive(50), Some(false), "a receive in another stream");
    }

    #[test]
    fn a_host_that_was_away_is_late_though_the_gpus_come_together() {
        // Hosts see each operation end before they issue the next. Rank 1 issues the last one a second late; before it, an
        // untimed operation elsewhere has brought the GPUs together.
        let mut j = Join::new();
        for r in 0..2 {
            j.feed(process(r));
            j.feed(member(r, 2, 21));
            for order in 0..21 {
                let at_ns = (1_000 + order * 200) * MS;
                let issued_ns = at_ns + if order == 20 && r == 1 { 1_000 * MS } else { 0 };
                let start_ns = at_ns + 1_000 + if order == 20 { 1_001 * MS } else { 0 };
                let kernel = Some((start_ns, Some(start_ns + 20_000)));
                j.feed(Update::Op(Box::new(all_reduce(r, order, issued_ns, kernel))));
            }
        }
        j.tick(100_000 * MS);
        let c = j.communicators().next().expect("one");
        let late: Vec<_> = c.late().map(|e| (e.operation.order, e.rank, e.measure, e.by_ns / MS)).collect();
        assert_eq!(late, [(20, Rank(1), Measure::Host, 1_000)]);
    }
}
