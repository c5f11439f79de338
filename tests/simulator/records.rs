//! What the agents of a job read: processes, communicators, operations and the facts of hosts.

use super::{BEGIN, Key, LOOK_ALIVE, MS, Part, S, Simulation, State, US, WALL};
use ringwatch::model::{
    ChannelStamp, CommRecord, Exit, Flags, HostFact, Job, Lane, Liveness, NetPhase, NetProgress, OpRecord,
    ProcessState, Rank, SegmentId, SegmentRecord, Timing, Untimed, Update,
};

impl Simulation {
    // What is read of it.

    pub(super) fn node(&self, rank: u32) -> u32 {
        rank / self.case.ranks.div_ceil(self.case.nodes)
    }

    /// The PCI address of a rank's GPU. No two ranks of a host have the same one.
    pub(super) fn gpu_address(&self, rank: u32) -> String {
        let local = rank % self.case.ranks.div_ceil(self.case.nodes).max(8);
        format!("{:04x}:{:02x}:00.0", local / 256, local % 256)
    }

    /// A moment on a rank's host clock.
    pub(super) fn mono(&self, rank: u32, t: u64) -> u64 {
        BEGIN + self.host_time(u64::from(self.node(rank)), t)
    }

    /// A moment on a host's clock.
    pub(crate) fn host_now(&self, host: &str, t: u64) -> u64 {
        let node: u64 = host.trim_start_matches("node").parse().expect("a host of this job");
        BEGIN + self.host_time(node, t)
    }

    /// A host's time: hosts were started at other moments, and their clocks drift.
    fn host_time(&self, node: u64, t: u64) -> u64 {
        let drift = self.case.host_drift_ppm * (node % 5) as f64 / 5.0;
        t + node * 5_000 * S + (t as f64 * drift / 1e6) as u64
    }

    /// A moment on a rank's GPU clock.
    pub(super) fn gpu(&self, rank: u32, t: u64) -> u64 {
        let drift = self.case.drift_ppm * f64::from(rank % 7) / 7.0;
        WALL + u64::from(rank) * 17 * S + t + (t as f64 * drift / 1e6) as u64
    }

    pub(super) fn segment(&self, rank: u32) -> SegmentId {
        SegmentId(u64::from(self.epoch) * 10_000_000 + u64::from(rank) + 1)
    }

    pub(super) fn tell(&mut self, now: u64) -> Vec<Update> {
        let mut out = Vec::new();
        for rank in 0..self.case.ranks {
            let p = &self.processes[rank as usize];
            let absent = self.case.comms.values().any(|m| !m.later && m.without.contains(&rank));
            let dead = p.died_ns.filter(|d| *d + LOOK_ALIVE <= now);
            if (!self.told && !absent) || dead.is_some() && !p.told_dead || p.losses > 0 {
                out.push(self.process(rank, dead));
            }
            if p.missed > 0 {
                out.push(Update::Missed { segment: self.segment(rank), what: "operations", count: p.missed });
            }
            let p = &mut self.processes[rank as usize];
            p.told_dead |= dead.is_some();
            p.missed = 0;
        }
        self.told = true;
        for at in 0..self.comms.len() {
            for own in 0..self.comms[at].members.len() {
                if std::mem::take(&mut self.comms[at].changed[own]) {
                    out.push(self.comm(at, own as u32));
                }
            }
        }
        for (key, own) in std::mem::take(&mut self.dirty) {
            let rank = self.comms[key.0].members[own as usize];
            let Some(op) = self.ops.get(&key) else { continue };
            let Some(part) = op.parts.get(&own) else { continue };
            let died = self.processes[rank as usize].died_ns;
            let seen = now.min(died.unwrap_or(u64::MAX));
            let to_come = part.started.is_some() && part.start_seen > now
                || part.told_end().is_some() && part.end_seen > now;
            // Data that moves on shows at every look.
            let moves = op.takes.is_some() && part.ended.is_none();
            let stuck = op.stuck.filter(|_| part.started.is_some());
            if !part.planned.unrecorded && !part.planned.overwritten {
                out.push(Update::Op(Box::new(self.record(key, own, rank, part, stuck, seen))));
            }
            if let Some(part) = self.ops.get_mut(&key).and_then(|o| o.parts.get_mut(&own)) {
                part.dirty = (to_come || moves) && died.is_none();
                if part.dirty {
                    self.dirty.push((key, own));
                }
            }
        }
        if self.case.host_facts && now >= self.facts_at {
            self.facts_at = now + 500 * MS;
            out.extend((0..self.case.ranks).map(|r| self.fact(r, now)));
        }
        out.extend(self.readings(now));
        self.without_lost_node(out, now)
    }

    /// Nobody reads on a node that is gone.
    fn without_lost_node(&self, mut out: Vec<Update>, now: u64) -> Vec<Update> {
        let Some((node, _)) = self.case.node_loss.filter(|(_, at)| at.0 <= now) else { return out };
        let lost: Vec<SegmentId> =
            (0..self.case.ranks).filter(|r| self.node(*r) == node).map(|r| self.segment(r)).collect();
        out.retain(|u| match u {
            Update::Segment(s) => !lost.contains(&s.id),
            Update::Comm(c) => !lost.contains(&c.segment),
            Update::Op(o) => !lost.contains(&o.segment),
            Update::Missed { segment, .. } => !lost.contains(segment),
            Update::Host(h) => !lost.contains(&h.segment),
            _ => true,
        });
        out
    }

    pub(super) fn process(&self, rank: u32, dead: Option<u64>) -> Update {
        let (n, node) = (self.case.ranks, self.node(rank));
        let losses = self.processes[rank as usize].losses;
        let last = dead.map(|d| d / LOOK_ALIVE * LOOK_ALIVE);
        Update::Segment(SegmentRecord {
            id: self.segment(rank),
            path: format!("/dev/shm/ringwatch-0/{rank}.seg").into(),
            pid: 1_000 + rank + self.epoch * 100_000,
            host: format!("node{node}"),
            program: "python3".into(),
            nccl: Some(self.case.nccl.clone()),
            abi: Some(self.case.abi),
            job: Job {
                name: Some("job".into()),
                rank: Some(rank),
                size: Some(n),
                local: Some(n / self.case.nodes),
                ..Job::default()
            },
            owner: None,
            liveness: last.map_or(Liveness::Alive, |d| Liveness::Gone(Some(self.mono(rank, d)))),
            created_ns: self.mono(rank, self.begin),
            // Wall clocks agree as well as NTP makes them.
            created_unix_ns: WALL + self.begin + u64::from(node % 5) * MS,
            losses: if losses > 0 { vec![("slot being written", losses)] } else { Vec::new() },
        })
    }

    pub(super) fn comm(&self, at: usize, own: u32) -> Update {
        let c = &self.comms[at];
        let rank = c.members[own as usize];
        let misjudged = u32::from(c.misjudged_by == Some(rank));
        Update::Comm(CommRecord {
            segment: self.segment(rank),
            comm: c.id,
            rank: Rank(own),
            ranks: (!self.case.sizes_unknown).then_some(c.members.len() as u32 + misjudged),
            nodes: Some(c.nodes),
            name: None,
            gpu: Some(self.gpu_address(rank).into()),
            host_clock: u64::from(self.node(rank)) + 1,
            issued: c.issued[own as usize] - c.lost[own as usize],
            replayed: c.replayed[own as usize],
            init_ns: self.mono(rank, c.entered[own as usize].unwrap_or(self.begin)),
            making: c.making[own as usize],
            rules: None,
            finalized_ns: c.freed[own as usize].map(|t| self.mono(rank, t)),
        })
    }

    pub(super) fn fact(&self, rank: u32, now: u64) -> Update {
        let mut fact = HostFact::new(self.segment(rank), self.mono(rank, now));
        fact.state = Some(match self.processes[rank as usize].state {
            State::Dead(n) => ProcessState::Gone(Some(if n > 0 { Exit::Signal(n) } else { Exit::Code(-n) })),
            State::Stopped => ProcessState::Stopped { traced: false },
            State::Runs => ProcessState::Running,
            _ => ProcessState::Sleeping { wchan: Some("futex_wait_queue".into()) },
        });
        fact.cpu_starved = Some(0.0);
        Update::Host(Box::new(fact))
    }

    pub(super) fn record(
        &self,
        (at, track, order): Key,
        own: u32,
        rank: u32,
        part: &Part,
        stuck: Option<(u32, u32)>,
        now: u64,
    ) -> OpRecord {
        let call = &part.planned.call;
        let n = self.comms[at].members.len() as u32;
        let started = part.started.filter(|_| part.start_seen <= now);
        let ended = part.told_end().filter(|_| part.end_seen <= now);
        let (algo, proto, channels) = part.way;
        let stamp = |channel| {
            started.filter(|_| part.timed && part.stamped && part.by_events.is_none()).map(|start| {
                ChannelStamp {
                    channel,
                    start_gpu_ns: Some(self.gpu(rank, start)),
                    stop_gpu_ns: ended.map(|e| self.gpu(rank, e)),
                    start_seen_ns: self.mono(rank, part.start_seen),
                    stop_seen_ns: ended.map(|_| self.mono(rank, part.end_seen)),
                }
            })
        };
        // A launch that CUDA events time as a whole has one time, which its first transfer tells.
        let is_first = |launch: &[Key]| launch.first().is_some_and(|first| *first == (at, track, order));
        let lasted = part.by_events.as_ref().filter(|launch| part.timed && is_first(launch));
        let lasted = lasted.map(|_| ended.zip(started).map(|(end, start)| end - start));
        let stamps: Vec<ChannelStamp> = (0..channels).filter_map(stamp).collect();
        let lost = if part.lane == Lane::Collective { self.comms[at].lost[own as usize] } else { 0 };
        let lane = part.lane;
        OpRecord {
            segment: self.segment(rank),
            ticket: part.ticket,
            comm: self.comms[at].id,
            rank: Rank(own),
            lane,
            order: Some(order - lost.min(order)),
            func: call.func,
            dtype: Some(call.dtype),
            count: call.count,
            root: call.root.map(Rank),
            algo: Some(algo),
            proto: Some(proto),
            channels: Some(channels),
            warps: Some(16),
            seq: Some(order),
            plan: part.plan,
            flags: Flags::default(),
            called_ns: Some(self.mono(rank, part.called)),
            returned: None,
            redop: call.redop,
            issued_ns: Some(self.mono(rank, part.issued)),
            timing: match part.timed {
                true if lasted.is_some() => Timing::Launch,
                true if part.by_events.is_some() => Timing::Not(Untimed::Alone),
                true => Timing::Kernel,
                false if self.case.abi < 3 => Timing::Not(Untimed::Offered),
                false => Timing::Not(Untimed::Budget),
            },
            event_ns: lasted.flatten(),
            event_seen_ns: lasted.flatten().map(|_| self.mono(rank, part.end_seen)),
            started: stamps.len() as u16,
            stopped: stamps.iter().filter(|s| s.stop_seen_ns.is_some()).count() as u16,
            stamps,
            net: match (part.planned.takes, started) {
                (Some(_), Some(since)) => vec![self.moving(rank, own, n, since, ended, now)],
                _ => stuck
                    .map_or_else(Vec::new, |link| self.transfers(rank, own, n, link, started.unwrap_or(now))),
            },
        }
    }

    /// A transfer that is slow and moves on.
    pub(super) fn moving(
        &self,
        rank: u32,
        own: u32,
        n: u32,
        since: u64,
        ended: Option<u64>,
        now: u64,
    ) -> NetProgress {
        let done = u32::try_from(now.saturating_sub(since) / (10 * MS)).unwrap_or(u32::MAX);
        NetProgress {
            channel: 0,
            peer: Rank((own + 1) % n),
            is_send: true,
            steps: u32::MAX,
            started: done,
            done,
            bytes: u64::from(done) * 4096,
            start_ns: self.mono(rank, since),
            stop_ns: ended.map(|e| self.mono(rank, e)),
            waited_ns: [0; 4],
            waiting: Some((NetPhase::Wire, self.mono(rank, now))),
        }
    }

    /// A ring that is cut between two ranks: data stays on the wire there, and behind it everybody runs dry.
    pub(super) fn transfers(
        &self,
        rank: u32,
        own: u32,
        n: u32,
        (from, to): (u32, u32),
        since: u64,
    ) -> Vec<NetProgress> {
        let behind = u64::from((own + n - to) % n) * 50 * US;
        let (next, before) = ((own + 1) % n, (own + n - 1) % n);
        let at = self.mono(rank, since + 200 * US + behind);
        let done = 3 + u32::try_from(behind / (50 * US)).unwrap_or(0).min(4);
        let transfer = |peer: u32, is_send: bool, phase| NetProgress {
            channel: 0,
            peer: Rank(peer),
            is_send,
            steps: 16,
            started: done + 1,
            done,
            bytes: u64::from(done) * 524_288,
            start_ns: self.mono(rank, since),
            stop_ns: None,
            waited_ns: [0; 4],
            waiting: Some((phase, at)),
        };
        let cut = own == from;
        vec![
            transfer(next, true, if cut { NetPhase::Wire } else { NetPhase::Gpu }),
            transfer(before, false, NetPhase::Wire),
        ]
    }
}
