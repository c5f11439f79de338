//! From the model to what travels, and back. What comes in may be anything: it is read without trust.

use super::message as m;
use super::texts::clipped as text;
use crate::model::{
    Algo, BEYOND_MEMORY, Beat, Begun, Call, CallKind, CallState, CommId, CommRecord, DataType, Departure,
    Exchange, Exit, Flags, Func, HostFact, Job, Lane, Launch, Liveness, Making, Mix, NetPhase, NetProgress,
    OpRecord, PairBeat, ProcessState, Proto, Rank, RedOp, Returned, RulesState, SegmentId, SegmentRecord,
    Signatures, Sketch, Timing, Told, Track, TunerRules, Untimed, WorkSecond, WorkState,
};
use std::path::PathBuf;

/// Seconds of work of a process that one message may tell.
const SECONDS_OF_WORK: usize = 32;

/// Labels of a process, reasons of losses and frames of a stack that are kept.
const LIST: usize = 64;
/// The number of [`Timing::Launch`]. Those from 3 on are reasons why an operation has no time.
const LAUNCH_TIMED: u32 = 64;
/// Network transfers of one operation that are kept: channels times peers.
const TRANSFERS: usize = 512;

/// A word's number: its place in the list plus one, 0 where it is absent.
fn number<T: Copy + PartialEq>(all: &[T], value: Option<T>) -> u32 {
    let at = value.and_then(|v| all.iter().position(|a| *a == v));
    at.map_or(0, |n| n as u32 + 1)
}

fn word<T: Copy>(all: &[T], number: u32) -> Option<T> {
    all.get((number as usize).checked_sub(1)?).copied()
}

fn byte(n: u32) -> u8 {
    u8::try_from(n).unwrap_or(u8::MAX)
}

fn short(n: u32) -> u16 {
    u16::try_from(n).unwrap_or(u16::MAX)
}

/// A reason that an agent of this version knows; others are kept as one.
fn reason(what: &str) -> &'static str {
    KNOWN.iter().find(|k| **k == what).copied().unwrap_or("lost for another reason")
}

/// The names of losses of segments and readers, in their words.
const KNOWN: &[&str] = &[
    "slot being written",
    "unknown communicator",
    "bad arguments",
    "communicator table full",
    "segment spoilt by its owner",
    "foreign handle",
    "stale handle",
    "unknown event type",
    "unknown state",
    "no room in shared memory",
    "parent of the wrong kind",
    "operations",
    "channel stamps",
    "network transfers",
    BEYOND_MEMORY,
];

pub(super) fn track(t: Track) -> (u32, u32, u32) {
    match t {
        Track::Collective => (1, 0, 0),
        Track::Replay => (2, 0, 0),
        Track::Pair(a, b) => (3, a.0, b.0),
    }
}

impl m::OperationKey {
    /// The name of an operation.
    pub fn of(comm: CommId, of: Track, order: u64) -> Self {
        let (track, from, to) = track(of);
        m::OperationKey { comm: comm.nccl_hash(), track, from, to, order, owner: comm.owner() }
    }

    /// The operation that it names; absent where it names none.
    pub fn key(&self) -> Option<(CommId, Track, u64)> {
        let track = match self.track {
            1 => Track::Collective,
            2 => Track::Replay,
            3 => Track::Pair(Rank(self.from), Rank(self.to)),
            _ => return None,
        };
        Some((CommId::new(self.comm, self.owner), track, self.order))
    }
}

impl m::Process {
    /// The message about a process.
    pub fn of(p: &SegmentRecord, missed: impl Iterator<Item = (&'static str, u64)>) -> Self {
        let loss = |(what, count): (&'static str, u64)| m::Loss { what: what.to_owned(), count };
        m::Process {
            segment: p.id.0,
            pid: p.pid,
            program: p.program.clone(),
            nccl: p.nccl.clone(),
            abi: p.abi,
            job: p.job.name.clone(),
            job_rank: p.job.rank,
            job_size: p.job.size,
            job_local: p.job.local,
            labels: p.job.labels.clone(),
            owner: p.owner,
            alive: p.liveness == Liveness::Alive,
            gone_ns: match p.liveness {
                Liveness::Gone(at) => at,
                Liveness::Alive | Liveness::Unknown => None,
            },
            created_ns: p.created_ns,
            created_unix_ns: p.created_unix_ns,
            losses: p.losses.iter().filter(|(_, n)| *n > 0).copied().map(loss).collect(),
            missed: missed.map(loss).collect(),
            shares_communicators: false,
        }
    }

    /// A process of a node.
    pub(super) fn record(self, id: SegmentId, node: &str) -> SegmentRecord {
        let labels = self.labels.into_iter().take(LIST).map(|(k, v)| (text(k), text(v))).collect();
        SegmentRecord {
            id,
            path: PathBuf::new(),
            pid: self.pid,
            host: node.to_owned(),
            program: text(self.program),
            nccl: self.nccl.map(text),
            abi: self.abi,
            job: Job {
                name: self.job.map(text),
                rank: self.job_rank,
                size: self.job_size,
                local: self.job_local,
                labels,
            },
            owner: self.owner,
            liveness: if self.alive { Liveness::Alive } else { Liveness::Gone(self.gone_ns) },
            created_ns: self.created_ns,
            created_unix_ns: self.created_unix_ns,
            losses: self.losses.into_iter().take(LIST).map(|l| (reason(&l.what), l.count)).collect(),
        }
    }

    /// The losses of its reader, in this reader's words.
    pub(super) fn missed(&self) -> impl Iterator<Item = (&'static str, u64)> {
        self.missed.iter().take(LIST).map(|l| (reason(&l.what), l.count))
    }
}

impl m::Member {
    /// The message about a membership.
    pub fn of(c: &CommRecord) -> Self {
        let (making, ready_ns, result) = match c.making {
            None => (0, None, 0),
            Some(Making::Begun) => (1, None, 0),
            Some(Making::Ready(at)) => (2, at, 0),
            Some(Making::Failed(result)) => (3, None, u32::from(result)),
            Some(Making::Aborted) => (4, None, 0),
        };
        m::Member {
            segment: c.segment.0,
            comm: c.comm.nccl_hash(),
            rank: c.rank.0,
            ranks: c.ranks,
            nodes: c.nodes,
            name: c.name.clone(),
            gpu: c.gpu.as_deref().map(str::to_owned),
            host_clock: c.host_clock,
            issued: c.issued,
            replayed: c.replayed,
            init_ns: c.init_ns,
            making,
            ready_ns,
            result,
            finalized_ns: c.finalized_ns,
            left: false,
            rules: match c.rules.map(|r| r.state) {
                None => 0,
                Some(RulesState::Applied) => 1,
                Some(RulesState::Different) => 2,
                Some(RulesState::AbsentRank) => 3,
                Some(RulesState::Off) => 4,
            },
            rules_hash: c.rules.and_then(|r| r.hash),
        }
    }

    /// A membership of a node's process.
    pub(super) fn record(self, segment: SegmentId, comm: CommId, host_clock: u64) -> CommRecord {
        CommRecord {
            segment,
            comm,
            rank: Rank(self.rank),
            ranks: self.ranks,
            nodes: self.nodes,
            name: self.name.map(text),
            gpu: self.gpu.map(text).map(Into::into),
            host_clock,
            issued: self.issued,
            replayed: self.replayed,
            init_ns: self.init_ns,
            making: match self.making {
                1 => Some(Making::Begun),
                2 => Some(Making::Ready(self.ready_ns)),
                3 => Some(Making::Failed(byte(self.result))),
                4 => Some(Making::Aborted),
                _ => None,
            },
            rules: match self.rules {
                1 => Some(RulesState::Applied),
                2 => Some(RulesState::Different),
                3 => Some(RulesState::AbsentRank),
                4 => Some(RulesState::Off),
                _ => None,
            }
            .map(|state| TunerRules { state, hash: self.rules_hash }),
            finalized_ns: self.finalized_ns,
        }
    }
}

impl m::Beat {
    /// The message about how far a rank is.
    pub fn of(b: &Beat) -> Self {
        m::Beat {
            segment: b.segment.0,
            comm: b.comm.nccl_hash(),
            rank: b.rank.0,
            issued: b.issued,
            open: b.issued.saturating_sub(b.done),
            replayed: b.replayed,
            replays_open: b.replayed.saturating_sub(b.replays_done),
            sent_bytes: b.exchanged.sent_bytes,
            received_bytes: b.exchanged.received_bytes,
            sends: b.exchanged.sends,
            peers: b.exchanged.peers,
            begun_issued_ns: b.begun.map(|b| b.issued_ns),
            begun_plan: b.begun.and_then(|b| b.launch.number()),
        }
    }

    pub(super) fn beat(&self, segment: SegmentId, comm: CommId) -> Beat {
        Beat {
            segment,
            comm,
            rank: Rank(self.rank),
            issued: self.issued,
            replayed: self.replayed,
            done: self.issued.saturating_sub(self.open),
            replays_done: self.replayed.saturating_sub(self.replays_open),
            exchanged: Exchange {
                sent_bytes: self.sent_bytes,
                received_bytes: self.received_bytes,
                sends: self.sends,
                peers: self.peers,
            },
            begun: self.begun_issued_ns.map(|ns| Begun {
                issued_ns: ns,
                host_ns: ns,
                launch: Launch::numbered(self.begun_plan),
            }),
        }
    }
}

impl m::Call {
    fn of(c: &Call) -> Self {
        m::Call {
            operation: Some(m::OperationKey::of(c.kind.comm, c.kind.track, c.order)),
            func: number(Func::ALL, Some(c.kind.func)),
            issued_ns: c.issued_ns,
        }
    }

    fn call(&self) -> Option<Call> {
        let (comm, track, order) = self.operation?.key()?;
        let kind = CallKind { comm, track, func: word(Func::ALL, self.func)? };
        Some(Call { kind, order, issued_ns: self.issued_ns })
    }
}

impl m::Work {
    /// The message about how long a process works.
    pub fn of(state: &WorkState) -> Self {
        let second = |s: &WorkSecond| m::WorkSecond {
            second: s.second,
            took_ns: s.took_ns,
            usual_ns: s.usual_ns,
            error_ns: s.error_ns,
            step_ns: s.step_ns,
            usual_step_ns: s.usual_step_ns,
        };
        m::Work {
            segment: state.segment.0,
            seconds: state.seconds.iter().map(second).collect(),
            long: state.long.as_ref().map(m::Call::of),
        }
    }

    /// The same for the join; times that cannot be are left out.
    pub(super) fn state(&self, segment: SegmentId) -> WorkState {
        let is_time = |ns: &f32| ns.is_finite() && *ns >= 0.0;
        let can_be = |s: &&m::WorkSecond| {
            [s.took_ns, s.usual_ns, s.error_ns, s.step_ns, s.usual_step_ns].iter().all(is_time)
        };
        let second = |s: &m::WorkSecond| WorkSecond {
            second: s.second,
            took_ns: s.took_ns,
            usual_ns: s.usual_ns,
            error_ns: s.error_ns,
            step_ns: s.step_ns,
            usual_step_ns: s.usual_step_ns,
        };
        let seconds = self.seconds.iter().take(SECONDS_OF_WORK).filter(can_be).map(second).collect();
        WorkState { segment, seconds, long: self.long.and_then(|c| c.call()) }
    }
}

impl m::Calls {
    /// The message about the order of a process's calls.
    pub fn of(state: &CallState) -> Self {
        let left = state.left.map(|d| m::Departure {
            call: Some(m::Call::of(&d.call)),
            usual: Some(m::Call::of(&d.usual)),
            times: d.times.into(),
            left_out: d.left_out,
            loop_ns: d.loop_ns,
        });
        let mixes = state.mixes.iter().map(m::CallMix::of).collect();
        m::Calls { segment: state.segment.0, left, usual_ns: state.usual_ns, mixes }
    }

    pub(super) fn state(&self, segment: SegmentId) -> CallState {
        let left = self.left.and_then(|d| {
            Some(Departure {
                call: d.call?.call()?,
                usual: d.usual?.call()?,
                times: short(d.times),
                left_out: d.left_out,
                loop_ns: d.loop_ns,
            })
        });
        let mixes = self.mixes.iter().take(LIST).filter_map(m::CallMix::mix).collect();
        CallState { segment, left, usual_ns: self.usual_ns, mixes }
    }
}

impl m::CallMix {
    fn of(mix: &Mix) -> Self {
        let first = Some(m::OperationKey::of(mix.comm, Track::Collective, mix.first));
        m::CallMix { first, before: mix.before.clone(), since: mix.since }
    }

    fn mix(&self) -> Option<Mix> {
        let (comm, _, first) = self.first?.key()?;
        let before = self.before.iter().take(LIST).copied().collect();
        Some(Mix { comm, first, before, since: self.since })
    }
}

impl m::Pair {
    /// The message about a rank's transfers to and from another.
    pub fn of(p: &PairBeat) -> Self {
        m::Pair {
            segment: p.segment.0,
            comm: p.comm.nccl_hash(),
            rank: p.rank.0,
            peer: p.peer.0,
            sent: p.sent,
            received: p.received,
            from: p.from,
            sent_done: p.sent_done,
            received_done: p.received_done,
            sent_may_run: p.sent_may_run,
            received_may_run: p.received_may_run,
            sent_is_newest: p.sent_is_newest,
        }
    }

    pub(super) fn beat(&self, segment: SegmentId, comm: CommId) -> PairBeat {
        PairBeat {
            segment,
            comm,
            rank: Rank(self.rank),
            peer: Rank(self.peer),
            sent: self.sent,
            received: self.received,
            from: self.from,
            sent_done: self.sent_done,
            received_done: self.received_done,
            sent_may_run: self.sent_may_run,
            received_may_run: self.received_may_run,
            sent_is_newest: self.sent_is_newest,
        }
    }
}

impl m::Signatures {
    pub(super) fn signatures(self, segment: SegmentId, comm: CommId) -> Signatures {
        Signatures {
            segment,
            comm,
            rank: Rank(self.rank),
            from: self.from,
            signatures: self.signatures,
            types: Vec::new(),
        }
    }
}

impl m::Types {
    pub(super) fn types(self, segment: SegmentId, comm: CommId) -> Signatures {
        Signatures {
            segment,
            comm,
            rank: Rank(self.rank),
            from: self.from,
            signatures: Vec::new(),
            types: self.types,
        }
    }
}

/// The most that one sketch may count: no node does more in an hour.
const COUNTED: u64 = 1 << 40;

impl m::Sketch {
    /// The sketch of a node, from its rank's process; absent where that cannot be.
    pub(super) fn sketch(self, segment: SegmentId, comm: CommId) -> Option<Sketch> {
        let sane = (1..=COUNTED).contains(&self.count)
            && self.timed <= self.count
            && self.by_events <= self.timed
            && self.ranks > 0
            && (1..=Self::SECONDS).contains(&self.seconds)
            && self.size_class <= 64;
        // Rising buckets of 64 bits, each with something in it, and together as many as were timed.
        let last = 64 * u32::from(Sketch::BUCKETS);
        let rising = self.buckets.is_sorted_by(|a, b| a < b) && self.buckets.last().is_none_or(|b| *b < last);
        let all = self.counts.iter().try_fold(0u64, |sum, n| sum.checked_add(*n).filter(|_| *n > 0));
        if !sane || !rising || self.buckets.len() != self.counts.len() || all != Some(self.timed) {
            return None;
        }
        let times = self.buckets.iter().zip(self.counts).map(|(b, n)| (short(*b), n)).collect();
        Some(Sketch {
            segment,
            comm,
            rank: Rank(self.rank),
            ranks: self.ranks,
            func: word(Func::ALL, self.func).unwrap_or(Func::Unknown),
            size_class: self.size_class.checked_sub(1).map(byte),
            algo: word(Algo::ALL, self.algo),
            proto: word(Proto::ALL, self.proto),
            count: self.count,
            timed: self.timed,
            by_events: self.by_events,
            bytes: self.bytes,
            busy_ns: self.busy_ns,
            from_ns: self.from_s.saturating_mul(1_000_000_000),
            seconds: self.seconds,
            whole: self.whole,
            times,
        })
    }
}

impl m::Record {
    /// The message about an operation.
    pub fn of(t: &Told) -> Self {
        let o = &t.op;
        let (lane, peer) = match o.lane {
            Lane::Collective => (1, 0),
            Lane::Replay => (2, 0),
            Lane::Send(peer) => (3, peer.0),
            Lane::Recv(peer) => (4, peer.0),
            Lane::Call => (5, 0),
        };
        let f = o.flags;
        let flags = [f.captured, f.in_place, f.copy_engine, f.symmetric, f.preloaded, f.grouped];
        m::Record {
            segment: o.segment.0,
            ticket: o.ticket,
            comm: o.comm.nccl_hash(),
            rank: o.rank.0,
            lane,
            peer,
            order: o.order,
            func: number(Func::ALL, Some(o.func)),
            dtype: number(DataType::ALL, o.dtype),
            count: o.count,
            root: o.root.map(|r| r.0),
            algo: number(Algo::ALL, o.algo),
            proto: number(Proto::ALL, o.proto),
            channels: o.channels.map(u32::from),
            warps: o.warps.map(u32::from),
            seq: o.seq,
            plan: o.plan,
            flags: (0u32..).zip(flags).map(|(bit, on)| u32::from(on) << bit).sum(),
            called_ns: o.called_ns,
            returned_ns: o.returned.map(|r| r.at_ns),
            result: o.returned.map_or(0, |r| u32::from(r.result)),
            redop: number(RedOp::ALL, o.redop),
            issued_ns: o.issued_ns,
            timing: match o.timing {
                Timing::Unknown => 0,
                Timing::Kernel => 1,
                Timing::Events => 2,
                Timing::Launch => LAUNCH_TIMED,
                Timing::Not(why) => 2 + number(Untimed::ALL, Some(why)),
            },
            event_ns: o.event_ns,
            event_seen_ns: o.event_seen_ns,
            started: u32::from(o.started),
            stopped: u32::from(o.stopped),
            started_ns: t.started_ns,
            duration_ns: t.duration_ns,
            ended_seen_ns: t.ended_seen_ns,
            finished: t.finished,
            net: o.net.iter().map(net_of).collect(),
        }
    }

    /// The operation; absent where it is none.
    pub(super) fn told(self, segment: SegmentId, comm: CommId) -> Option<Told> {
        let lane = match self.lane {
            1 => Lane::Collective,
            2 => Lane::Replay,
            3 => Lane::Send(Rank(self.peer)),
            4 => Lane::Recv(Rank(self.peer)),
            5 => Lane::Call,
            _ => return None,
        };
        let flag = |bit: u32| self.flags >> bit & 1 == 1;
        let op = OpRecord {
            segment,
            ticket: self.ticket,
            comm,
            rank: Rank(self.rank),
            lane,
            order: self.order,
            func: word(Func::ALL, self.func).unwrap_or(Func::Unknown),
            dtype: word(DataType::ALL, self.dtype),
            count: self.count,
            root: self.root.map(Rank),
            algo: word(Algo::ALL, self.algo),
            proto: word(Proto::ALL, self.proto),
            channels: self.channels.map(byte),
            warps: self.warps.map(byte),
            seq: self.seq,
            plan: self.plan,
            flags: Flags {
                captured: flag(0),
                in_place: flag(1),
                copy_engine: flag(2),
                symmetric: flag(3),
                preloaded: flag(4),
                grouped: flag(5),
            },
            called_ns: self.called_ns,
            returned: self.returned_ns.map(|at_ns| Returned { at_ns, result: byte(self.result) }),
            redop: word(RedOp::ALL, self.redop),
            issued_ns: self.issued_ns,
            timing: match self.timing {
                1 => Timing::Kernel,
                2 => Timing::Events,
                LAUNCH_TIMED => Timing::Launch,
                n => word(Untimed::ALL, n.saturating_sub(2)).map_or(Timing::Unknown, Timing::Not),
            },
            event_ns: self.event_ns,
            event_seen_ns: self.event_seen_ns,
            started: short(self.started),
            stopped: short(self.stopped),
            stamps: Vec::new(),
            net: self.net.into_iter().take(TRANSFERS).map(net).collect(),
        };
        Some(Told {
            op,
            started_ns: self.started_ns,
            duration_ns: self.duration_ns,
            ended_seen_ns: self.ended_seen_ns,
            finished: self.finished,
        })
    }
}

const PHASES: &[NetPhase] =
    &[NetPhase::Posted, NetPhase::Gpu, NetPhase::Peer, NetPhase::Wire, NetPhase::Flush];

fn net_of(n: &NetProgress) -> m::Net {
    m::Net {
        channel: u32::from(n.channel),
        peer: n.peer.0,
        is_send: n.is_send,
        steps: n.steps,
        started: n.started,
        done: n.done,
        bytes: n.bytes,
        start_ns: n.start_ns,
        stop_ns: n.stop_ns,
        waited_ns: n.waited_ns.to_vec(),
        waiting: number(PHASES, n.waiting.map(|w| w.0)),
        waiting_since_ns: n.waiting.map_or(0, |w| w.1),
    }
}

fn net(n: m::Net) -> NetProgress {
    let waited = |i: usize| n.waited_ns.get(i).copied().unwrap_or(0);
    NetProgress {
        channel: byte(n.channel),
        peer: Rank(n.peer),
        is_send: n.is_send,
        steps: n.steps,
        started: n.started,
        done: n.done,
        bytes: n.bytes,
        start_ns: n.start_ns,
        stop_ns: n.stop_ns,
        waited_ns: [waited(0), waited(1), waited(2), waited(3)],
        waiting: word(PHASES, n.waiting).map(|phase| (phase, n.waiting_since_ns)),
    }
}

impl m::Host {
    /// The message about the operating system's facts.
    pub fn of(h: &HostFact) -> Self {
        let (state, wchan) = match &h.state {
            None => (0, None),
            Some(ProcessState::Running) => (1, None),
            Some(ProcessState::Sleeping { wchan }) => (2, wchan.clone()),
            Some(ProcessState::Blocked { wchan }) => (3, wchan.clone()),
            Some(ProcessState::Stopped { traced: false }) => (4, None),
            Some(ProcessState::Stopped { traced: true }) => (5, None),
            Some(ProcessState::Zombie(_)) => (6, None),
            Some(ProcessState::Gone(_)) => (7, None),
        };
        let (exit_code, signal) = match h.exit() {
            Some(Exit::Code(code)) => (Some(code), None),
            Some(Exit::Signal(n)) => (None, Some(n)),
            None => (None, None),
        };
        m::Host {
            segment: h.segment.0,
            at_ns: h.at_ns,
            state,
            wchan,
            exit_code,
            signal,
            cpu_starved: h.cpu_starved,
            cpu_throttled: h.cpu_throttled,
            nccl_starved: h.nccl_starved,
            nccl_busy: h.nccl_busy,
            memory_pressure: h.memory_pressure,
            oom_kills: h.oom_kills,
            stack: h.stack.clone(),
            threads: h.threads.clone(),
            stack_ns: h.stack_ns,
        }
    }

    pub(super) fn fact(self, segment: SegmentId) -> HostFact {
        let exit = self.exit_code.map(Exit::Code).or(self.signal.map(Exit::Signal));
        let wchan = self.wchan.map(text);
        let share = |s: Option<f64>| s.filter(|s| (0.0..=1.0).contains(s));
        HostFact {
            segment,
            at_ns: self.at_ns,
            state: match self.state {
                1 => Some(ProcessState::Running),
                2 => Some(ProcessState::Sleeping { wchan }),
                3 => Some(ProcessState::Blocked { wchan }),
                4 => Some(ProcessState::Stopped { traced: false }),
                5 => Some(ProcessState::Stopped { traced: true }),
                6 => Some(ProcessState::Zombie(exit)),
                7 => Some(ProcessState::Gone(exit)),
                _ => None,
            },
            cpu_starved: share(self.cpu_starved),
            cpu_throttled: share(self.cpu_throttled),
            nccl_starved: share(self.nccl_starved),
            nccl_busy: share(self.nccl_busy),
            memory_pressure: share(self.memory_pressure),
            oom_kills: self.oom_kills,
            stack: self.stack.into_iter().take(LIST).map(text).collect(),
            threads: self.threads.into_iter().take(LIST).map(text).collect(),
            stack_ns: self.stack_ns,
        }
    }
}
