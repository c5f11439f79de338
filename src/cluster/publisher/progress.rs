//! How far the ranks are: beats, signatures, and what stands still.

use super::{
    AGAIN_NS, AHEAD, IDLE_NS, IN_DOUBT_NS, OPEN_MAX, Priority, Publisher, REFRESH_NS, STANDS_NS, Sent,
};
use crate::cluster::message as m;
use crate::cluster::subject::{Topic, bucket};
use crate::join::{Communicator, Exchanged, Instance, Join, Launches, Part, signature, types};
use crate::model::{Beat, CommId, OpState, PairBeat, Rank, SegmentId, Track};
use prost::Message as _;
use std::collections::{BTreeMap, HashSet};

/// One rank's part of an operation that stands still.
pub(super) type Stood = (CommId, Track, u64, Rank);

impl Publisher {
    /// Operations that stand still, with a few of those behind them.
    pub(super) fn tell_standing(
        &mut self,
        join: &Join,
        now_ns: u64,
        all: bool,
        moved: &mut HashSet<(CommId, Rank)>,
    ) {
        for c in join.communicators().filter(|c| !c.closed()) {
            for track in [Track::Collective, Track::Replay] {
                let Some((first, _)) = c.incomplete_of(track).next() else { continue };
                self.tell_split(c, track, now_ns, moved);
                for rank in c.members().keys() {
                    for order in standing_of(c, track, first, *rank, now_ns, all) {
                        self.tell_open(c, (track, order), *rank, now_ns, moved, true);
                    }
                }
            }
            let mut behind: BTreeMap<Track, usize> = BTreeMap::new();
            for (track, order, instance) in c.incomplete().filter(|(t, ..)| matches!(t, Track::Pair(..))) {
                let old = |t: u64| now_ns >= t.saturating_add(STANDS_NS);
                let n = behind.entry(track).or_default();
                if *n > AHEAD || *n == 0 && !instance.began_ns().is_some_and(old) {
                    *n = AHEAD + 1;
                    continue;
                }
                *n += 1;
                for rank in instance.parts.iter().filter(|(_, p)| !p.finished).map(|(r, _)| *r) {
                    self.tell_open(c, (track, order), rank, now_ns, moved, true);
                }
            }
        }
    }

    /// The first operation that ranks of this node run in different ways: it proves a fault, wherever they stand. It is
    /// announced, because those of other nodes tell who is wrong.
    fn tell_split(
        &mut self,
        c: &Communicator,
        track: Track,
        now_ns: u64,
        moved: &mut HashSet<(CommId, Rank)>,
    ) {
        let Some((_, order, instance)) = c.split().find(|(t, ..)| *t == track) else { return };
        let is_told = |rank: &Rank| self.standing.contains_key(&(c.id, track, order, *rank));
        if !instance.parts.keys().any(is_told) {
            self.announce(vec![(c.id, track, order)]);
        }
        for rank in instance.parts.keys() {
            self.tell_open(c, (track, order), *rank, now_ns, moved, true);
        }
    }

    /// All operations that are not over of the processes that are idle, as far as there is room: any of them may tell who
    /// waits for whom.
    pub(super) fn tell_idle(&mut self, join: &Join, now_ns: u64) {
        let is_idle = |t: &u64| now_ns >= t.saturating_add(IDLE_NS);
        let idle: HashSet<SegmentId> =
            self.moved.iter().filter(|(_, t)| is_idle(t)).map(|(s, _)| *s).collect();
        if idle.is_empty() {
            return;
        }
        // The beats of idle processes are told already: who moves here is of no interest.
        let mut moved = HashSet::new();
        for c in join.communicators().filter(|c| !c.closed()) {
            let mut told: BTreeMap<Rank, usize> = BTreeMap::new();
            for (track, order, instance) in c.incomplete() {
                // Operations that somebody asked for are told on their own.
                if self.asked.contains(&(c.id, track, order)) {
                    continue;
                }
                let waits = |p: &Part| !p.finished && idle.contains(&p.op.segment);
                for rank in instance.parts.iter().filter(|(_, p)| waits(p)).map(|(r, _)| *r) {
                    let n = told.entry(rank).or_default();
                    if *n < OPEN_MAX {
                        *n += 1;
                        self.tell_open(c, (track, order), rank, now_ns, &mut moved, false);
                    }
                }
            }
        }
    }

    /// Tells all operations that are not counted yet, whatever is known of their ends, with the next messages.
    pub fn tell_all_open(&mut self, join: &Join, now_ns: u64) {
        let mut moved = HashSet::new();
        for c in join.communicators() {
            for (track, order, instance) in c.incomplete() {
                for rank in instance.parts.keys() {
                    self.tell_open(c, (track, order), *rank, now_ns, &mut moved, true);
                }
            }
        }
    }

    /// One rank's part of an operation that is not over, unless it was told as it is.
    fn tell_open(
        &mut self,
        c: &Communicator,
        (track, order): (Track, u64),
        rank: Rank,
        now_ns: u64,
        moved: &mut HashSet<(CommId, Rank)>,
        urgent: bool,
    ) {
        let Some(part) = c.instance(track, order).and_then(|i| i.parts.get(&rank)) else { return };
        let (print, started) = (print(part), part.started_ns.is_some());
        let key = (c.id, track, order, rank);
        let due = self
            .standing
            .get(&key)
            .is_none_or(|s| s.what.1 != started || s.what.0 != print && now_ns >= s.at_ns + AGAIN_NS);
        if !due {
            return;
        }
        moved.insert((c.id, rank));
        if self.tell_record(c.id, &part.told(), urgent) {
            self.standing.insert(key, Sent { what: (print, started), at_ns: now_ns });
        }
    }

    /// Notes which parts that were told as standing have ended. True where one has: its beat has to come with it, whether or not those
    /// of other nodes have ended as well.
    pub(super) fn note_released(&mut self, join: &Join) -> bool {
        let is_over = |(comm, track, order, rank): &Stood| {
            let instance = join.communicator(*comm).and_then(|c| c.instance(*track, *order));
            instance.and_then(|i| i.parts.get(rank)).is_none_or(|p| p.finished)
        };
        let is_new = |key: &&Stood| !self.released.contains(*key) && is_over(key);
        let new: Vec<Stood> = self.standing.keys().filter(is_new).copied().collect();
        self.released.extend(&new);
        !new.is_empty()
    }

    /// How far every rank is: once a second where it moved, at once where something stands still.
    pub(super) fn tell_beats(
        &mut self,
        join: &Join,
        now_ns: u64,
        all: bool,
        moved: &HashSet<(CommId, Rank)>,
    ) {
        for c in join.communicators() {
            for (rank, member) in c.members() {
                let key = (c.id, *rank);
                if !all && !moved.contains(&key) && self.beats.contains_key(&key) {
                    continue;
                }
                let beat = m::Beat::of(&Beat {
                    segment: member.record.segment,
                    comm: c.id,
                    rank: *rank,
                    issued: member.record.issued,
                    replayed: member.record.replayed,
                    done: c.done(Track::Collective, *rank),
                    replays_done: c.done(Track::Replay, *rank),
                    exchanged: member.exchanged().map(Exchanged::told).unwrap_or_default(),
                    begun: member.begun(),
                });
                let was = self.beats.get(&key);
                if was.is_none_or(|s| s.what != beat) {
                    self.moved.insert(member.record.segment, now_ns);
                }
                let stale = |s: &Sent<m::Beat>| now_ns >= s.at_ns + REFRESH_NS && !c.closed();
                if was.is_none_or(|s| s.what != beat || stale(s)) {
                    let bytes = beat.encoded_len();
                    if self.pay(bytes, Priority::First) {
                        self.draft(Topic::Bucket(bucket(c.id)), bytes).beats.push(beat);
                        self.beats.insert(key, Sent { what: beat, at_ns: now_ns });
                    }
                }
            }
            if all {
                self.tell_signatures(c);
            }
            self.tell_pairs(c, now_ns, all, moved);
        }
    }

    /// Sends the hashes of what ranks issued since the last time.
    fn tell_signatures(&mut self, c: &Communicator) {
        let ranks = c.ranks();
        for (rank, member) in c.members() {
            let from = self.signed.get(&(c.id, *rank)).copied().unwrap_or(0);
            let part = |o: u64| c.instance(Track::Collective, o)?.parts.get(rank);
            // What is no longer held here cannot be told any more.
            let Some(from) = (from..member.record.issued).rev().take_while(|o| part(*o).is_some()).last()
            else {
                continue;
            };
            let of = |o| part(o).map(|p| (signature(&p.op, ranks), types(&p.op)));
            let (signatures, types): (Vec<u32>, Vec<u8>) = (from..member.record.issued).map_while(of).unzip();
            self.signed.insert((c.id, *rank), from + signatures.len() as u64);
            let (segment, comm, rank) = (member.record.segment.0, c.id.nccl_hash(), rank.0);
            let told = m::Signatures { segment, comm, rank, from, signatures };
            let bytes = told.encoded_len();
            if self.pay(bytes, Priority::Usual) {
                self.draft(Topic::Bucket(bucket(c.id)), bytes).signatures.push(told);
            }
            if types.iter().any(|t| *t != 0) {
                let told = m::Types { segment, comm, rank, from, types };
                let bytes = told.encoded_len();
                if self.pay(bytes, Priority::Usual) {
                    self.draft(Topic::Bucket(bucket(c.id)), bytes).types.push(told);
                }
            }
        }
    }

    fn tell_pairs(&mut self, c: &Communicator, now_ns: u64, all: bool, moved: &HashSet<(CommId, Rank)>) {
        let launches = Launches::of(c);
        for ((from, to), sent, received, first) in c.pairs() {
            for (own, peer, sent, received) in [(from, to, sent, 0), (to, from, 0, received)] {
                let Some(member) = c.members().get(&own) else { continue };
                if sent + received == 0 || !(all || moved.contains(&(c.id, own))) {
                    continue;
                }
                let key = (c.id, own, peer);
                let was = self.pairs.get(&key);
                // Each direction is counted by itself.
                let sent = sent.max(was.map_or(0, |p| p.sent));
                let received = received.max(was.map_or(0, |p| p.received));
                let segment = member.record.segment;
                let done = |track, issued: u64| (issued > 0).then(|| c.transfers_done(track, own, issued));
                let (to_peer, from_peer) = (Track::Pair(own, peer), Track::Pair(peer, own));
                let (sent_done, received_done) = (done(to_peer, sent), done(from_peer, received));
                let last = |done: Option<u64>| done.and_then(|d| d.checked_sub(1));
                let may_run =
                    |track, done| last(done).is_some_and(|order| launches.may_run(track, order, own, now_ns));
                let is_newest = |order| launches.is_newest_for_long(to_peer, order, own, now_ns);
                let beat = PairBeat {
                    segment,
                    comm: c.id,
                    rank: own,
                    peer,
                    sent,
                    received,
                    from: first,
                    sent_done,
                    received_done,
                    sent_may_run: may_run(to_peer, sent_done),
                    received_may_run: may_run(from_peer, received_done),
                    sent_is_newest: last(sent_done).is_some_and(is_newest),
                };
                let newest = last(sent_done).filter(|_| beat.sent_is_newest);
                let beat = m::Pair::of(&beat);
                let was_newest = was.is_some_and(|p| p.sent_is_newest && p.sent_done == beat.sent_done);
                if was == Some(&beat) || !self.pay(beat.encoded_len(), Priority::First) {
                    continue;
                }
                self.draft(Topic::Bucket(bucket(c.id)), beat.encoded_len()).pairs.push(beat);
                self.pairs.insert(key, beat);
                // That send may still run, as far as its receive is not known to be over: its record tells in which launch it is.
                let instance = newest.filter(|_| !was_newest).and_then(|order| c.instance(to_peer, order));
                let is_received = |i: &Instance| i.parts.get(&peer).is_some_and(|p| p.finished);
                let sent = instance.filter(|i| !is_received(i)).and_then(|i| i.parts.get(&own));
                if let Some(part) = sent {
                    self.tell_record(c.id, &part.told(), true);
                }
            }
        }
    }
}

/// The operations of a rank that tell why it stands still, if it does: the oldest that is not over and those right
/// behind it; where nothing tells whether that is over, also the first that is timed, and the newest.
fn standing_of(c: &Communicator, track: Track, first: u64, rank: Rank, now_ns: u64, all: bool) -> Vec<u64> {
    let done = c.done(track, rank);
    let open = || {
        let parts = c.incomplete_of(track).filter(move |(order, _)| *order >= done.max(first));
        parts.filter_map(move |(order, i)| Some((order, i.parts.get(&rank).filter(|p| !p.finished)?)))
    };
    let Some((oldest, part)) = open().next() else { return Vec::new() };
    let in_doubt = c.state(track, oldest, rank) == OpState::InDoubt;
    let limit = if in_doubt { IN_DOUBT_NS } else { STANDS_NS };
    if part.op.issued_ns.is_none_or(|t| now_ns < t.saturating_add(limit)) {
        return Vec::new();
    }
    let mut told: Vec<u64> = open().take(AHEAD + 1).map(|(order, _)| order).collect();
    if in_doubt {
        if !all {
            return Vec::new();
        }
        told.truncate(1);
        told.extend(open().find(|(_, p)| !p.is_silent()).map(|(order, _)| order));
        let last: Vec<u64> = open().map(|(order, _)| order).collect();
        told.extend(last.iter().rev().take(2));
        told.dedup();
    }
    told
}

/// A number that changes when a part has moved on, or is timed in another way.
fn print(part: &Part) -> u64 {
    let net = part.op.net.iter().map(|n| n.bytes.wrapping_add(u64::from(n.done) << 40));
    let is_silent = u64::from(part.op.timing.is_silent());
    let all = [is_silent, u64::from(part.op.started), u64::from(part.op.stopped), part.op.net.len() as u64];
    all.into_iter().chain(net).fold(7, |h: u64, n| h.wrapping_mul(0x100_0000_01b3).wrapping_add(n))
}
