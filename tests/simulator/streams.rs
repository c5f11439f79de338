//! The streams of a job: what starts when, and when operations end.

use super::case::{Call, FOREVER, Ns};
use super::{Event, Item, Key, MS, Process, Simulation, State, Stream, US, noise};
use ringwatch::model::{Func, Lane, Track};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

/// The communicators of a launch.
fn comms_of(keys: &[Key]) -> Vec<usize> {
    let mut comms: Vec<usize> = keys.iter().map(|k| k.0).collect();
    comms.sort_unstable();
    comms.dedup();
    comms
}

/// Whether all launches of the same communicators that were issued before this one have ended.
fn is_next(launches: &HashMap<usize, VecDeque<Key>>, keys: &[Key]) -> bool {
    let first = keys.first();
    comms_of(keys).iter().all(|c| launches.get(c).and_then(VecDeque::front) == first)
}

impl Process {
    fn queue_launch(&mut self, keys: &[Key]) {
        let Some(first) = keys.first() else { return };
        for comm in comms_of(keys) {
            self.launches.entry(comm).or_default().push_back(*first);
        }
    }
}

impl Simulation {
    pub(super) fn enqueue(&mut self, rank: u32, stream: u8, item: Item, t: u64) {
        let p = &mut self.processes[rank as usize];
        if let Item::Ops(keys) = &item {
            p.queue_launch(keys);
        }
        let s = p.streams.entry(stream).or_default();
        s.queue.push_back(item);
        s.issued += 1;
        self.advance(rank, stream, t);
    }

    /// Starts what is at a stream's head, if nothing runs on it.
    pub(super) fn advance(&mut self, rank: u32, stream: u8, t: u64) {
        let p = &mut self.processes[rank as usize];
        if matches!(p.state, State::Dead(_)) {
            return;
        }
        let s = p.streams.entry(stream).or_default();
        if s.running > 0 {
            return;
        }
        match s.queue.pop_front() {
            None => self.wake(rank, t),
            Some(Item::Kernel(ns)) => {
                s.running = 1;
                // A kernel that never ends is as likely one that polls a flag as one that computes.
                s.computes = ns < FOREVER || rank.is_multiple_of(2);
                if ns < FOREVER {
                    self.push(t + ns.0, Event::KernelEnds(rank, stream));
                }
                self.load_changed(rank, t);
                self.wake(rank, t);
            }
            // NCCL runs the launches of a communicator one after the other, on whatever streams they are.
            Some(Item::Ops(keys)) if !is_next(&p.launches, &keys) => s.queue.push_front(Item::Ops(keys)),
            Some(Item::Ops(keys)) => {
                s.launched = comms_of(&keys);
                s.running = keys.len();
                s.computes = false;
                self.load_changed(rank, t);
                self.launched(rank, &keys);
                for key in keys {
                    self.starts(rank, key, t + 3 * US);
                }
                self.wake(rank, t);
            }
            Some(Item::Wait(on, upto)) => {
                let other = p.streams.get(&on).map_or(0, |o| o.finished);
                let s = p.streams.entry(stream).or_default();
                if other < upto {
                    s.queue.push_front(Item::Wait(on, upto));
                    return;
                }
                s.finished += 1;
                self.advance(rank, stream, t);
                self.release(rank, stream, t);
            }
            Some(Item::Replay(planned)) => {
                let keys: Vec<Key> =
                    planned.into_iter().map(|p| self.issue(rank, p, stream, t, true)).collect();
                let p = &mut self.processes[rank as usize];
                keys.iter().for_each(|k| p.queue_launch(std::slice::from_ref(k)));
                let s = p.streams.entry(stream).or_default();
                // Its last operation finishes it.
                s.finished = s.finished.wrapping_sub(keys.len() as u64 - 1);
                keys.into_iter().rev().for_each(|k| s.queue.push_front(Item::Ops(vec![k])));
                self.advance(rank, stream, t);
            }
        }
    }

    /// A host that waited for its streams goes on.
    pub(super) fn wake(&mut self, rank: u32, t: u64) {
        let state = &mut self.processes[rank as usize].state;
        if matches!(state, State::WaitsForStreams | State::WaitsForRoom) {
            *state = State::Runs;
            self.push(t + 10 * US, Event::Host(rank));
        }
    }

    pub(super) fn starts(&mut self, rank: u32, key: Key, t: u64) {
        let own = self.own(key.0, rank);
        let seen = self.seen(rank, t, noise::of_op(key, own, 1));
        let Some(op) = self.ops.get_mut(&key) else { return };
        if let Some(part) = op.parts.get_mut(&own) {
            part.started = Some(t);
            part.start_seen = seen;
            // In a graph the kernel waits for the callback that issues it.
            if part.lane == Lane::Replay {
                (part.called, part.issued) = (t - 2 * US, t - US);
            }
        }
        op.last_start = op.last_start.max(t);
        self.mark(key, own);
        self.may_end(key, own);
    }

    pub(super) fn own(&self, comm: usize, rank: u32) -> u32 {
        self.comms[comm].members.binary_search(&rank).unwrap_or(0) as u32
    }

    pub(super) fn mark(&mut self, key: Key, own: u32) {
        if let Some(part) = self.ops.get_mut(&key).and_then(|o| o.parts.get_mut(&own))
            && !std::mem::replace(&mut part.dirty, true)
        {
            self.dirty.push((key, own));
        }
    }

    /// A collective ends when all its ranks have started it and agree on what it is.
    pub(super) fn may_end(&mut self, key: Key, own: u32) {
        let needed = match key.1 {
            Track::Pair(a, b) if a == b => 1,
            Track::Pair(..) => 2,
            _ => self.comms[key.0].members.len(),
        };
        let ranks = self.comms[key.0].members.len() as u64;
        let Some(op) = self.ops.get(&key) else { return };
        let Some((first, way)) = op.parts.values().next().map(|p| (p.planned.call.clone(), p.way)) else {
            return;
        };
        let agree = |c: &Call| {
            let kind = matches!(key.1, Track::Pair(..)) || c.func == first.func && c.root == first.root;
            kind && c.count == first.count && c.dtype == first.dtype
        };
        let part = op.parts.get(&own);
        let good = part.is_some_and(|p| {
            p.planned.stuck.is_none() && !p.planned.broken && agree(&p.planned.call) && p.way == way
        });
        let good = op.good + usize::from(good);
        if let Some(op) = self.ops.get_mut(&key) {
            op.good = good;
        }
        let Some(op) = self.ops.get(&key) else { return };
        if self.case.buffered && matches!(first.func, Func::Broadcast | Func::Reduce) {
            return self.chain_ends(key, &first);
        }
        if op.dead || op.ends.is_some() || good < needed {
            return;
        }
        let bytes = first.count * first.dtype.size();
        let setup = if key.2 == 0 { 20 * MS } else { 0 };
        let (last_start, own_time) = (op.last_start, op.takes);
        let data = (bytes as f64 / 100.0 * self.slowness(key, last_start)) as u64;
        let takes = Ns(self.case.latency.0 + setup + data + if ranks > 64 { 200 * US } else { 0 });
        let takes = own_time.unwrap_or(takes);
        let disturbed = self.case.disturbed > 0.0
            && self.below(10_000, noise::of_op(key, 0, 2)) < (self.case.disturbed * 10_000.0) as u64;
        let more = if disturbed { 2 + self.below(8, noise::of_op(key, 0, 3)) } else { 1 };
        let at = last_start + self.noisy(takes, noise::of_op(key, 0, 4)) * more;
        if let Some(op) = self.ops.get_mut(&key) {
            op.ends = Some(at);
        }
        self.push(at, Event::Ends(key));
    }

    /// In a chain a rank ends when it and all before it have started: from the root on, or from the leaf on to the root.
    pub(super) fn chain_ends(&mut self, key: Key, call: &Call) {
        let n = self.comms[key.0].members.len() as u32;
        let first = call.root.unwrap_or(0) + u32::from(call.func == Func::Reduce);
        let Some(op) = self.ops.get(&key).filter(|o| !o.dead) else { return };
        let mut latest = 0;
        let mut ends = Vec::new();
        for own in (0..n).map(|i| (first + i) % n) {
            let Some((part, started)) = op.parts.get(&own).and_then(|p| Some((p, p.started?))) else { break };
            latest = latest.max(started) + self.case.latency.0;
            if part.ended.is_none() {
                ends.push((own, latest));
            }
        }
        for (own, at) in ends {
            self.push(at, Event::PartEnds(key, own));
        }
    }

    pub(super) fn rank_ends(&mut self, key: Key, own: u32, t: u64) {
        let part = self.ops.get(&key).filter(|o| !o.dead).and_then(|o| o.parts.get(&own));
        let Some(stream) = part.filter(|p| p.ended.is_none()).map(|p| p.stream) else { return };
        self.tells_end(key, own, t);
        let rank = self.comms[key.0].members[own as usize];
        self.part_ends(rank, stream, t);
    }

    pub(super) fn op_ends(&mut self, key: Key, t: u64) {
        let Some(op) = self.ops.get(&key).filter(|o| !o.dead) else { return };
        let owns: Vec<(u32, u8)> = op.parts.iter().map(|(own, p)| (*own, p.stream)).collect();
        let last_start = op.last_start;
        for (own, stream) in owns {
            // They end within the last step of each other.
            let end = t + self.below(3 * US, noise::of_op(key, own, 6));
            self.tells_end(key, own, end);
            let rank = self.comms[key.0].members[own as usize];
            self.moved_data(rank, end - last_start);
            self.part_ends(rank, stream, end);
        }
    }

    /// When what happens on a rank's GPU is written down, by NCCL's thread in its process.
    fn seen(&mut self, rank: u32, t: u64, draw: u64) -> u64 {
        let late = self.case.late_records.map_or(60 * US, |l| l.0);
        let seen = t + 10 * US + self.below(late, draw);
        seen.max(self.processes[rank as usize].mute_until)
    }

    /// Transfers of one launch end together in what NCCL tells.
    fn launched(&mut self, rank: u32, keys: &[Key]) {
        if keys.len() < 2 || !keys.iter().all(|k| matches!(k.1, Track::Pair(..))) {
            return;
        }
        let all: Arc<[Key]> = keys.into();
        for key in keys {
            let own = self.own(key.0, rank);
            if let Some(part) = self.ops.get_mut(key).and_then(|o| o.parts.get_mut(&own)) {
                if self.case.launches_by_events && part.planned.exchange {
                    part.by_events = Some(Arc::clone(&all));
                } else if self.case.one_end_a_launch {
                    part.launch = Some(Arc::clone(&all));
                }
            }
        }
    }

    /// A transfer of a launch ends that is timed as a whole. With the last of them the launch ends: its first transfer tells.
    fn launch_ends(&mut self, rank: u32, launch: &[Key], seen: u64) {
        let own = |at: usize| self.own(at, rank);
        let ends: Option<Vec<u64>> =
            launch.iter().map(|k| self.ops.get(k)?.parts.get(&own(k.0))?.ended).collect();
        let Some(last) = ends.and_then(|ends| ends.into_iter().max()) else { return };
        for key in launch {
            let own = self.own(key.0, rank);
            if let Some(part) = self.ops.get_mut(key).and_then(|o| o.parts.get_mut(&own)) {
                (part.told_end, part.end_seen) = (Some(last), seen.max(part.start_seen));
            }
        }
        self.mark(launch[0], self.own(launch[0].0, rank));
    }

    /// A rank's part ends, and so does in the records what it speaks for.
    fn tells_end(&mut self, key: Key, own: u32, end: u64) {
        let rank = self.comms[key.0].members[own as usize];
        let seen = self.seen(rank, end, noise::of_op(key, own, 5));
        let Some(part) = self.ops.get_mut(&key).and_then(|o| o.parts.get_mut(&own)) else { return };
        part.ended = Some(end);
        if let Some(launch) = part.by_events.clone() {
            return self.launch_ends(rank, &launch, seen);
        }
        let Some(launch) = part.launch.clone() else {
            part.end_seen = seen.max(part.start_seen);
            return self.mark(key, own);
        };
        let speaker = self.below(launch.len() as u64, noise::of_op(launch[0], own, 8)) as usize;
        if launch[speaker] != key {
            return;
        }
        for key in launch.iter() {
            let own = self.own(key.0, rank);
            if let Some(part) = self.ops.get_mut(key).and_then(|o| o.parts.get_mut(&own)) {
                (part.told_end, part.end_seen) = (Some(end), seen.max(part.start_seen));
            }
            self.mark(*key, own);
        }
    }

    pub(super) fn part_ends(&mut self, rank: u32, stream: u8, t: u64) {
        let p = &mut self.processes[rank as usize];
        let mut over = Vec::new();
        if let Some(s) = p.streams.get_mut(&stream) {
            s.running = s.running.saturating_sub(1);
            if s.running == 0 {
                s.finished = s.finished.wrapping_add(1);
                over = std::mem::take(&mut s.launched);
            }
        }
        for comm in &over {
            p.launches.get_mut(comm).map(VecDeque::pop_front);
        }
        self.load_changed(rank, t);
        self.advance(rank, stream, t);
        self.release(rank, stream, t);
        if !over.is_empty() {
            self.launch_next(rank, stream, t);
        }
    }

    /// Starts launches on other streams that waited for one on this stream.
    fn launch_next(&mut self, rank: u32, stream: u8, t: u64) {
        let p = &self.processes[rank as usize];
        let may_start = |s: &Stream| {
            s.running == 0 && matches!(s.queue.front(), Some(Item::Ops(keys)) if is_next(&p.launches, keys))
        };
        let next: Vec<u8> = p
            .streams
            .iter()
            .filter(|(other, s)| **other != stream && may_start(s))
            .map(|(o, _)| *o)
            .collect();
        next.into_iter().for_each(|other| self.advance(rank, other, t));
    }

    /// Lets the streams go on that wait for this one.
    fn release(&mut self, rank: u32, stream: u8, t: u64) {
        let waits = |s: &Stream| matches!(s.queue.front(), Some(Item::Wait(on, _)) if *on == stream);
        let waiting: Vec<u8> = self.processes[rank as usize]
            .streams
            .iter()
            .filter(|(_, s)| s.running == 0 && waits(s))
            .map(|(other, _)| *other)
            .collect();
        waiting.into_iter().for_each(|other| self.advance(rank, other, t));
    }
}
