//! The hosts of a job: what each process does next, and the calls that it issues.

use super::case::{FOREVER, Ns};
use super::program::{Action, Planned};
use super::{Event, Item, Key, MS, Part, Simulation, State, US, hash, noise};
use ringwatch::model::{Func, Lane, Making, Rank, Track};

/// True for one in so many runs, as the plugin's governor chooses them: a loop of any length has all its places timed.
fn is_timed(run: u64, timed_of: u64) -> bool {
    const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;
    let spread = run.wrapping_mul(GOLDEN);
    (spread ^ spread >> 32).wrapping_mul(GOLDEN) <= u64::MAX / timed_of.max(1)
}

impl Simulation {
    pub(super) fn host(&mut self, rank: u32, mut t: u64) {
        // Room may come free before the calls are over after which it had to wait.
        t = t.max(self.processes[rank as usize].host_until);
        loop {
            let p = &mut self.processes[rank as usize];
            p.host_until = t;
            if p.state != State::Runs {
                return;
            }
            let Some((number, action)) = p.actions.get(p.next).cloned() else {
                p.state = State::Done;
                return;
            };
            let queued: usize = p.streams.values().map(|s| s.queue.len() + usize::from(s.running > 0)).sum();
            if matches!(action, Action::Sync) && queued > 0 {
                p.state = State::WaitsForStreams;
                return;
            }
            if matches!(action, Action::Compute(..) | Action::Calls(..) | Action::Replay(..))
                && queued >= self.case.depth
            {
                p.state = State::WaitsForRoom;
                return;
            }
            p.state = State::Runs;
            p.next += 1;
            match action {
                Action::Sync => {}
                Action::Host(ns) => {
                    let ns = Ns((ns.0 as f64 * self.pace(rank, self.case.hosts_differ, 1)) as u64);
                    let took = self.noisy(ns, noise::of_action(rank, number, 0));
                    self.push(t + took, Event::Host(rank));
                    return;
                }
                Action::Idle(ns) => {
                    let took = self.noisy(ns, noise::of_action(u32::MAX, number, 0));
                    self.push(t + took, Event::Host(rank));
                    return;
                }
                Action::Compute(ns, stream) => {
                    t += 5 * US;
                    let took = if ns >= FOREVER {
                        ns
                    } else {
                        let ns = Ns((ns.0 as f64 * self.pace(rank, self.case.gpus_differ, 0)) as u64);
                        Ns(self.noisy(ns, noise::of_action(rank, number, 0)))
                    };
                    self.enqueue(rank, stream, Item::Kernel(took), t);
                }
                Action::Calls(planned, stream) => {
                    let mut keys = Vec::new();
                    for (i, p) in (1..).zip(planned) {
                        t += 8 * US + self.below(4 * US, noise::of_action(rank, number, i));
                        keys.push(self.issue(rank, p, stream, t, false));
                    }
                    self.launch_together(rank, &keys);
                    self.enqueue(rank, stream, Item::Ops(keys), t);
                }
                Action::Replay(planned, stream) => {
                    t += 20 * US;
                    self.enqueue(rank, stream, Item::Replay(planned), t);
                }
                Action::Wait { stream, on } => {
                    let upto = p.streams.entry(on).or_default().issued;
                    self.enqueue(rank, stream, Item::Wait(on, upto), t);
                }
                other => self.control(rank, other, t),
            }
        }
    }

    /// What changes the state of a process or of its communicators.
    fn control(&mut self, rank: u32, action: Action, t: u64) {
        let p = &mut self.processes[rank as usize];
        match action {
            Action::Make(name) => self.enters(rank, &name, t),
            Action::Free(name) => {
                let (comm, own) = self.place(rank, &name);
                self.comms[comm].freed[own as usize] = Some(t);
                self.comms[comm].changed[own as usize] = true;
            }
            Action::Hang => p.state = State::Hangs,
            Action::Stop => (p.state, p.mute_until) = (State::Stopped, u64::MAX),
            Action::Pause(ns) => {
                (p.state, p.mute_until) = (State::Stopped, t + ns.0);
                self.push(t + ns.0, Event::Resumes(rank));
            }
            Action::Die(how) => self.die(rank, t, how),
            Action::Abort(name) => {
                p.state = State::Hangs;
                let (comm, own) = self.place(rank, &name);
                self.comms[comm].making[own as usize] = Some(Making::Aborted);
                self.comms[comm].changed[own as usize] = true;
                self.kill_ops(rank, Some(comm));
            }
            other => unreachable!("{other:?} is work"),
        }
    }

    /// A rank's communicator of a name, and its rank in it.
    pub(super) fn place(&self, rank: u32, name: &str) -> (usize, u32) {
        let comms = self.by_name.get(name).unwrap_or_else(|| panic!("no communicator is called {name}"));
        comms
            .iter()
            .find_map(|c| Some((*c, self.comms[*c].members.binary_search(&rank).ok()? as u32)))
            .unwrap_or_else(|| panic!("rank {rank} is not in {name}"))
    }

    pub(super) fn issue(
        &mut self,
        rank: u32,
        mut planned: Planned,
        stream: u8,
        t: u64,
        replayed: bool,
    ) -> Key {
        let (at, own) = self.place(rank, &planned.call.comm);
        let timed_of = self.case.timed_of.unwrap_or(1);
        let comm = &mut self.comms[at];
        let n = comm.members.len() as i64;
        let peer = (i64::from(own) + planned.call.by).rem_euclid(n) as u32;
        let (lane, track, order) = match planned.call.func {
            Func::Send | Func::Recv => {
                let send = planned.call.func == Func::Send;
                let (from, to) = if send { (own, peer) } else { (peer, own) };
                let next = comm.pairs.entry((from, to, send)).or_default();
                *next += 1;
                let lane = if send { Lane::Send(Rank(peer)) } else { Lane::Recv(Rank(peer)) };
                (lane, Track::Pair(Rank(from), Rank(to)), *next - 1)
            }
            _ => {
                let (count, lane, track) = if replayed {
                    (&mut comm.replayed, Lane::Replay, Track::Replay)
                } else {
                    (&mut comm.issued, Lane::Collective, Track::Collective)
                };
                count[own as usize] += 1;
                (lane, track, count[own as usize] - 1)
            }
        };
        comm.changed[own as usize] = true;
        let call = &mut planned.call;
        if let Track::Pair(from, to) = track {
            let more = call.from.get(&from.0).unwrap_or(&1.0) * call.to.get(&to.0).unwrap_or(&1.0);
            call.count = (call.count as f64 * more) as u64;
        }
        if let Some(most) = call.varies {
            // The same on all its ranks.
            call.count *= 1 + hash(&format!("{at} {track} {order}")) / 7 % u64::from(most);
        }
        let func = call.func;
        comm.lost[own as usize] += u64::from(planned.unrecorded);
        let process = &mut self.processes[rank as usize];
        process.losses += u64::from(planned.unrecorded);
        process.missed += u64::from(planned.overwritten);
        process.tickets += 1;
        let ticket = process.tickets;
        let key = (at, track, order);
        let luck = self.draw(noise::of_op(key, own, 0)) % 10_000;
        let stamped = luck as f64 >= self.case.lost_stamps * 10_000.0;
        let timed = is_timed(order / 32, timed_of) && self.case.abi >= 3;
        let way = self.way(rank, at, func, order);
        let part = Part {
            planned,
            plan: None,
            lane,
            stream,
            ticket,
            called: t,
            issued: t + 5 * US,
            started: None,
            start_seen: 0,
            ended: None,
            told_end: None,
            end_seen: 0,
            launch: None,
            by_events: None,
            timed,
            stamped,
            dirty: true,
            way,
        };
        let op = self.ops.entry(key).or_default();
        op.stuck = op.stuck.or(part.planned.stuck);
        op.takes = op.takes.or(part.planned.takes);
        op.parts.insert(own, part);
        self.dirty.push((key, own));
        key
    }

    pub(super) fn die(&mut self, rank: u32, t: u64, how: i32) {
        let p = &mut self.processes[rank as usize];
        if !matches!(p.state, State::Dead(_)) {
            p.state = State::Dead(how);
            p.died_ns = Some(t);
            p.streams.clear();
            p.launches.clear();
            self.load_changed(rank, t);
            self.kill_ops(rank, None);
        }
    }

    /// What a rank was in does not end any more.
    pub(super) fn kill_ops(&mut self, rank: u32, only: Option<usize>) {
        let own: Vec<u32> = (0..self.comms.len()).map(|c| self.own(c, rank)).collect();
        for (key, op) in &mut self.ops {
            let is_in =
                self.comms[key.0].members.binary_search(&rank).is_ok() && op.parts.contains_key(&own[key.0]);
            if is_in && only.is_none_or(|c| c == key.0) && op.parts.values().any(|p| p.ended.is_none()) {
                op.dead = true;
            }
        }
    }

    // What is read of it.

    /// Calls of one group are carried by one launch.
    fn launch_together(&mut self, rank: u32, keys: &[Key]) {
        if keys.len() < 2 || !self.case.keyed {
            return;
        }
        let plan = self.processes[rank as usize].tickets;
        for key in keys {
            let own = self.own(key.0, rank);
            if let Some(part) = self.ops.get_mut(key).and_then(|o| o.parts.get_mut(&own)) {
                part.plan = Some(plan);
            }
        }
    }

    pub(super) fn resumes(&mut self, rank: u32, t: u64) {
        let state = &mut self.processes[rank as usize].state;
        if *state == State::Stopped {
            *state = State::Runs;
            self.host(rank, t);
        }
    }

    /// A rank enters the making of a communicator, and waits for its other members there.
    fn enters(&mut self, rank: u32, name: &str, t: u64) {
        let (at, own) = self.place(rank, name);
        let own = own as usize;
        let comm = &mut self.comms[at];
        if comm.without.contains(&rank) {
            self.processes[rank as usize].state = State::Hangs;
            return;
        }
        comm.entered[own] = Some(t);
        comm.changed[own] = true;
        comm.making[own] = comm.making[own].map(|_| Making::Begun);
        self.processes[rank as usize].state = State::Joins;
        if self.comms[at].entered.iter().all(Option::is_some) {
            let takes = 20 * MS + self.below(20 * MS, noise::of_op((at, Track::Collective, 0), 0, 9));
            self.push(t + takes, Event::Made(at));
        }
    }

    /// All members of a communicator go on.
    pub(super) fn made(&mut self, at: usize, t: u64) {
        for own in 0..self.comms[at].members.len() {
            let rank = self.comms[at].members[own];
            let comm = &mut self.comms[at];
            comm.making[own] = comm.making[own].map(|_| Making::Ready(None));
            comm.changed[own] = true;
            let state = &mut self.processes[rank as usize].state;
            if *state == State::Joins {
                *state = State::Runs;
                self.push(t, Event::Host(rank));
            }
        }
    }

    /// Everything on a node is gone at once.
    pub(super) fn node_dies(&mut self, node: u32, t: u64) {
        for rank in (0..self.case.ranks).filter(|r| self.node(*r) == node).collect::<Vec<_>>() {
            self.die(rank, t, 9);
        }
    }
}
