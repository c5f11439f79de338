//! A simulated job: hosts that run ahead, streams that run in order, collectives that end when all ranks have
//! started them, and the records that the plugins of its processes would leave behind.
//!
//! It models NCCL and GPUs, not the rules: what is found follows from what happens. Times are ns since the job began;
//! every host has a clock of its own, every GPU too.

mod callbacks;

mod case;
mod machines;

pub(crate) use callbacks::AHEAD_NS;
use case::{Action, Call, Choice, FOREVER, Ns, Planned};
pub(crate) use case::{Case, Expected};
use ringwatch::join::ClockPair;
use ringwatch::model::{
    Algo, ChannelStamp, CommId, CommRecord, Exit, Flags, Func, HostFact, Job, Lane, Liveness, Making,
    NetPhase, NetProgress, OpRecord, ProcessState, Proto, Rank, SegmentId, SegmentRecord, Timing, Track,
    Untimed, Update,
};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap, VecDeque};

const US: u64 = 1_000;
const MS: u64 = 1_000_000;
const S: u64 = 1_000_000_000;
/// The first host's monotonic clock when the job begins.
pub(crate) const BEGIN: u64 = 1_000 * S;
/// The wall clock then.
const WALL: u64 = 1_795_244_764 * S;
/// Time that agents take to see that a process is gone.
const LOOK_ALIVE: u64 = 100 * MS;

type Key = (usize, Track, u64);

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Host(u32),
    KernelEnds(u32, u8),
    Ends(Key),
    /// One rank's part of a rooted operation.
    PartEnds(Key, u32),
}

#[derive(Debug)]
enum Item {
    Kernel(Ns),
    Ops(Vec<Key>),
    Replay(Vec<Planned>),
}

#[derive(Debug, Default)]
struct Stream {
    queue: VecDeque<Item>,
    /// Parts of what runs that have not ended.
    running: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Runs,
    WaitsForStreams,
    WaitsForRoom,
    Hangs,
    Stopped,
    Dead(i32),
    Done,
}

#[derive(Debug)]
struct Process {
    actions: Vec<Action>,
    next: usize,
    state: State,
    died_ns: Option<u64>,
    told_dead: bool,
    streams: BTreeMap<u8, Stream>,
    tickets: u64,
    losses: u64,
    missed: u64,
}

#[derive(Debug)]
struct Comm {
    id: CommId,
    members: Vec<u32>,
    nodes: u32,
    issued: Vec<u64>,
    replayed: Vec<u64>,
    lost: Vec<u64>,
    making: Vec<Option<Making>>,
    changed: Vec<bool>,
    pairs: HashMap<(u32, u32, bool), u64>,
    /// Never complete: somebody does not join.
    incomplete: bool,
    misjudged_by: Option<u32>,
}

#[derive(Debug)]
struct Part {
    planned: Planned,
    lane: Lane,
    stream: u8,
    ticket: u64,
    called: u64,
    issued: u64,
    started: Option<u64>,
    start_seen: u64,
    ended: Option<u64>,
    end_seen: u64,
    timed: bool,
    stamped: bool,
    dirty: bool,
    way: Way,
}

/// How NCCL runs it: algorithm, protocol and channels.
type Way = (Algo, Proto, u8);

#[derive(Debug, Default)]
struct Op {
    parts: BTreeMap<u32, Part>,
    ends: Option<u64>,
    dead: bool,
    last_start: u64,
    /// Parts that have started, and could end.
    good: usize,
    /// The ranks between which its data is stuck.
    stuck: Option<(u32, u32)>,
    /// How long its data takes, where that is not its size's own time.
    takes: Option<Ns>,
}

/// A job, and how far it is.
#[derive(Debug)]
pub(crate) struct Simulation {
    case: Case,
    epoch: u32,
    begin: u64,
    seed: u64,
    processes: Vec<Process>,
    comms: Vec<Comm>,
    by_name: BTreeMap<String, Vec<usize>>,
    ops: BTreeMap<Key, Op>,
    dirty: Vec<(Key, u32)>,
    heap: BinaryHeap<Reverse<(u64, u64, Event)>>,
    events: u64,
    told: bool,
    last_look: u64,
    facts_at: u64,
    read_at: u64,
}

fn hash(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3))
}

impl Simulation {
    /// The pair of clocks of whoever watches: the first host's.
    pub(crate) const OBSERVER: ClockPair = ClockPair { mono_ns: BEGIN, unix_ns: WALL };

    /// The job's `epoch`-th start, at a moment of its time.
    pub(crate) fn new(case: &Case, name: &str, epoch: u32, begin: u64) -> Self {
        let mut comms = Vec::new();
        let mut by_name: BTreeMap<String, Vec<usize>> = BTreeMap::new();
        for (comm, members) in &case.comms {
            for (group, ranks) in members.groups(case.ranks).into_iter().enumerate() {
                let n = ranks.len();
                by_name.entry(comm.clone()).or_default().push(comms.len());
                comms.push(Comm {
                    id: Self::id(comm, group, epoch),
                    issued: vec![0; n],
                    replayed: vec![0; n],
                    lost: vec![0; n],
                    making: ranks
                        .iter()
                        .map(|_| {
                            let begun = !members.without.is_empty();
                            members.preloaded.then_some(if begun {
                                Making::Begun
                            } else {
                                Making::Ready(None)
                            })
                        })
                        .collect(),
                    changed: ranks.iter().map(|r| !members.without.contains(r)).collect(),
                    pairs: HashMap::new(),
                    incomplete: !members.without.is_empty(),
                    misjudged_by: members.misjudged_by,
                    nodes: {
                        let a_node = case.ranks.div_ceil(case.nodes);
                        let mut nodes: Vec<u32> = ranks.iter().map(|r| r / a_node).collect();
                        nodes.dedup();
                        nodes.len() as u32
                    },
                    members: ranks,
                });
            }
        }
        let mut sim = Simulation {
            epoch,
            begin,
            seed: hash(name) ^ u64::from(epoch) << 32 | 1,
            processes: Vec::new(),
            comms,
            by_name,
            ops: BTreeMap::new(),
            dirty: Vec::new(),
            heap: BinaryHeap::new(),
            events: 0,
            told: false,
            last_look: 0,
            facts_at: 0,
            read_at: 0,
            case: case.clone(),
        };
        for rank in 0..case.ranks {
            let stuck = sim.comms.iter().any(|c| c.incomplete && c.members.contains(&rank));
            sim.processes.push(Process {
                actions: case.actions(rank),
                next: 0,
                state: if stuck { State::Hangs } else { State::Runs },
                died_ns: None,
                told_dead: false,
                streams: BTreeMap::new(),
                tickets: 0,
                losses: 0,
                missed: 0,
            });
            let at = begin + sim.below(50 * MS);
            sim.push(at, Event::Host(rank));
        }
        sim
    }

    /// A communicator's id.
    pub(crate) fn id(name: &str, group: usize, epoch: u32) -> CommId {
        CommId(hash(&format!("{name}/{group}/{epoch}")))
    }

    fn random(&mut self) -> u64 {
        self.seed ^= self.seed << 13;
        self.seed ^= self.seed >> 7;
        self.seed ^= self.seed << 17;
        self.seed
    }

    fn below(&mut self, n: u64) -> u64 {
        self.random() % n.max(1)
    }

    fn noisy(&mut self, t: Ns) -> u64 {
        let wide = (t.0 as f64 * self.case.noise) as u64;
        t.0 + self.below(wide)
    }

    fn push(&mut self, at: u64, event: Event) {
        self.events += 1;
        self.heap.push(Reverse((at, self.events, event)));
    }

    /// Everybody dies within a moment, as when a launcher starts anew.
    pub(crate) fn kill_all(&mut self, now: u64) {
        for rank in 0..self.case.ranks {
            let at = now + self.below(30 * MS);
            self.die(rank, at, 15);
        }
    }

    /// What the agents read, looking at `now`.
    pub(crate) fn look(&mut self, now: u64) -> Vec<Update> {
        while let Some(Reverse((at, _, _))) = self.heap.peek()
            && *at <= now
        {
            let Some(Reverse((at, _, event))) = self.heap.pop() else { break };
            match event {
                Event::Host(rank) => self.host(rank, at),
                Event::KernelEnds(rank, stream) => self.part_ends(rank, stream, at),
                Event::Ends(key) => self.op_ends(key, at),
                Event::PartEnds(key, own) => self.rank_ends(key, own, at),
            }
        }
        let out = self.tell(now);
        self.last_look = now;
        out
    }

    fn host(&mut self, rank: u32, mut t: u64) {
        loop {
            let p = &mut self.processes[rank as usize];
            if p.state != State::Runs {
                return;
            }
            let Some(action) = p.actions.get(p.next).cloned() else {
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
                    let took = self.noisy(ns);
                    self.push(t + took, Event::Host(rank));
                    return;
                }
                Action::Compute(ns, stream) => {
                    t += 5 * US;
                    let took = if ns >= FOREVER { ns } else { Ns(self.noisy(ns)) };
                    self.enqueue(rank, stream, Item::Kernel(took), t);
                }
                Action::Calls(planned, stream) => {
                    let mut keys = Vec::new();
                    for p in planned {
                        t += 8 * US + self.below(4 * US);
                        keys.push(self.issue(rank, p, stream, t, false));
                    }
                    self.enqueue(rank, stream, Item::Ops(keys), t);
                }
                Action::Replay(planned, stream) => {
                    t += 20 * US;
                    self.enqueue(rank, stream, Item::Replay(planned), t);
                }
                Action::Hang => p.state = State::Hangs,
                Action::Stop => p.state = State::Stopped,
                Action::Die(how) => self.die(rank, t, how),
                Action::Abort(name) => {
                    p.state = State::Hangs;
                    let (comm, own) = self.place(rank, &name);
                    self.comms[comm].making[own as usize] = Some(Making::Aborted);
                    self.comms[comm].changed[own as usize] = true;
                    self.kill_ops(rank, Some(comm));
                }
            }
        }
    }

    /// A rank's communicator of a name, and its rank in it.
    fn place(&self, rank: u32, name: &str) -> (usize, u32) {
        let comms = self.by_name.get(name).unwrap_or_else(|| panic!("no communicator is called {name}"));
        comms
            .iter()
            .find_map(|c| Some((*c, self.comms[*c].members.binary_search(&rank).ok()? as u32)))
            .unwrap_or_else(|| panic!("rank {rank} is not in {name}"))
    }

    fn issue(&mut self, rank: u32, mut planned: Planned, stream: u8, t: u64, replayed: bool) -> Key {
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
        let stamped = (self.random() % 10_000) as f64 >= self.case.lost_stamps * 10_000.0;
        let timed = order / 32 % timed_of == 0 && self.case.abi >= 3;
        let key = (at, track, order);
        let way = self.way(rank, at, func, order);
        let part = Part {
            planned,
            lane,
            stream,
            ticket,
            called: t,
            issued: t + 5 * US,
            started: None,
            start_seen: 0,
            ended: None,
            end_seen: 0,
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

    fn enqueue(&mut self, rank: u32, stream: u8, item: Item, t: u64) {
        self.processes[rank as usize].streams.entry(stream).or_default().queue.push_back(item);
        self.advance(rank, stream, t);
    }

    /// Starts what is at a stream's head, if nothing runs on it.
    fn advance(&mut self, rank: u32, stream: u8, t: u64) {
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
                if ns < FOREVER {
                    self.push(t + ns.0, Event::KernelEnds(rank, stream));
                }
                self.wake(rank, t);
            }
            Some(Item::Ops(keys)) => {
                s.running = keys.len();
                for key in keys {
                    self.starts(rank, key, t + 3 * US);
                }
                self.wake(rank, t);
            }
            Some(Item::Replay(planned)) => {
                let keys: Vec<Key> =
                    planned.into_iter().map(|p| self.issue(rank, p, stream, t, true)).collect();
                let s = self.processes[rank as usize].streams.entry(stream).or_default();
                keys.into_iter().rev().for_each(|k| s.queue.push_front(Item::Ops(vec![k])));
                self.advance(rank, stream, t);
            }
        }
    }

    /// A host that waited for its streams goes on.
    fn wake(&mut self, rank: u32, t: u64) {
        let state = &mut self.processes[rank as usize].state;
        if matches!(state, State::WaitsForStreams | State::WaitsForRoom) {
            *state = State::Runs;
            self.push(t + 10 * US, Event::Host(rank));
        }
    }

    fn starts(&mut self, rank: u32, key: Key, t: u64) {
        let late = self.case.late_records.map_or(60 * US, |l| l.0);
        let seen = t + 10 * US + self.below(late);
        let own = self.own(key.0, rank);
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

    fn own(&self, comm: usize, rank: u32) -> u32 {
        self.comms[comm].members.binary_search(&rank).unwrap_or(0) as u32
    }

    fn mark(&mut self, key: Key, own: u32) {
        if let Some(part) = self.ops.get_mut(&key).and_then(|o| o.parts.get_mut(&own))
            && !std::mem::replace(&mut part.dirty, true)
        {
            self.dirty.push((key, own));
        }
    }

    /// A collective ends when all its ranks have started it and agree on what it is.
    fn may_end(&mut self, key: Key, own: u32) {
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
        let disturbed =
            self.case.disturbed > 0.0 && self.below(10_000) < (self.case.disturbed * 10_000.0) as u64;
        let more = if disturbed { 2 + self.below(8) } else { 1 };
        let at = last_start + self.noisy(takes) * more;
        if let Some(op) = self.ops.get_mut(&key) {
            op.ends = Some(at);
        }
        self.push(at, Event::Ends(key));
    }

    /// In a chain a rank ends when it and all before it have started: from the root on, or from the leaf on to the root.
    fn chain_ends(&mut self, key: Key, call: &Call) {
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

    fn rank_ends(&mut self, key: Key, own: u32, t: u64) {
        let late = self.case.late_records.map_or(60 * US, |l| l.0);
        let seen = t + 10 * US + self.below(late);
        let part = self.ops.get_mut(&key).filter(|o| !o.dead).and_then(|o| o.parts.get_mut(&own));
        let Some(part) = part.filter(|p| p.ended.is_none()) else { return };
        part.ended = Some(t);
        part.end_seen = seen.max(part.start_seen);
        let stream = part.stream;
        self.mark(key, own);
        let rank = self.comms[key.0].members[own as usize];
        self.part_ends(rank, stream, t);
    }

    /// How NCCL runs a rank's operation.
    fn way(&self, rank: u32, comm: usize, func: Func, order: u64) -> Way {
        let is_it = |c: &&Choice| {
            self.by_name.get(&c.comm).is_some_and(|all| all.contains(&comm))
                && c.ranks.as_ref().is_none_or(|r| r.contains(&rank))
                && c.func.is_none_or(|f| f == func)
                && order >= c.from
                && c.every.is_none_or(|n| (order - c.from).is_multiple_of(n))
        };
        let chosen = self.case.choices.iter().find(is_it);
        chosen.map_or((Algo::Ring, Proto::Simple, 1), |c| (c.algo, c.proto, c.channels))
    }

    /// How many times as long an operation's data takes as it should.
    fn slowness(&mut self, (at, track, order): Key, t: u64) -> f64 {
        let mut factor = 1.0;
        for s in self.case.slow.clone() {
            let members = &self.comms[at].members;
            // From whom to whom its data goes.
            let hops: Vec<(u32, u32)> = match track {
                Track::Pair(a, b) => vec![(members[a.0 as usize], members[b.0 as usize])],
                _ => (0..members.len()).map(|i| (members[i], members[(i + 1) % members.len()])).collect(),
            };
            let comm = |name: &String| {
                let (name, group) =
                    name.split_once('/').map_or((name.as_str(), None), |(n, g)| (n, g.parse().ok()));
                let all = &self.by_name[name];
                group.map_or_else(|| all.contains(&at), |g: usize| all[g] == at)
            };
            let host = |h: u32| hops.iter().any(|(a, b)| (self.node(*a) == h) != (self.node(*b) == h));
            let pair = |(x, y): (u32, u32)| hops.iter().any(|h| *h == (x, y) || *h == (y, x));
            let hit = s.comm.as_ref().is_none_or(comm)
                && s.host.is_none_or(host)
                && s.pair.is_none_or(pair)
                && (s.from.0..s.until.0).contains(&t)
                && s.orders.is_none_or(|(a, b)| (a..b).contains(&order));
            let now = s.share.is_none_or(|share| self.below(10_000) < (share * 10_000.0) as u64);
            if hit && now {
                factor *= s.factor;
            }
        }
        factor
    }

    fn op_ends(&mut self, key: Key, t: u64) {
        let late = self.case.late_records.map_or(60 * US, |l| l.0);
        let Some(op) = self.ops.get(&key).filter(|o| !o.dead) else { return };
        let owns: Vec<(u32, u8)> = op.parts.iter().map(|(own, p)| (*own, p.stream)).collect();
        for (own, stream) in owns {
            // They end within the last step of each other.
            let end = t + self.below(3 * US);
            let seen = end + 10 * US + self.below(late);
            if let Some(part) = self.ops.get_mut(&key).and_then(|o| o.parts.get_mut(&own)) {
                part.ended = Some(end);
                part.end_seen = seen.max(part.start_seen);
            }
            self.mark(key, own);
            let rank = self.comms[key.0].members[own as usize];
            self.part_ends(rank, stream, end);
        }
    }

    fn part_ends(&mut self, rank: u32, stream: u8, t: u64) {
        if let Some(s) = self.processes[rank as usize].streams.get_mut(&stream) {
            s.running = s.running.saturating_sub(1);
        }
        self.advance(rank, stream, t);
    }

    fn die(&mut self, rank: u32, t: u64, how: i32) {
        let p = &mut self.processes[rank as usize];
        if !matches!(p.state, State::Dead(_)) {
            p.state = State::Dead(how);
            p.died_ns = Some(t);
            self.kill_ops(rank, None);
        }
    }

    /// What a rank was in does not end any more.
    fn kill_ops(&mut self, rank: u32, only: Option<usize>) {
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

    fn node(&self, rank: u32) -> u32 {
        rank / self.case.ranks.div_ceil(self.case.nodes)
    }

    /// A moment on a rank's host clock.
    fn mono(&self, rank: u32, t: u64) -> u64 {
        BEGIN + t + u64::from(self.node(rank)) * 5_000 * S
    }

    /// A moment on a host's clock.
    pub(crate) fn host_now(&self, host: &str, t: u64) -> u64 {
        let node: u64 = host.trim_start_matches("node").parse().expect("a host of this job");
        BEGIN + t + node * 5_000 * S
    }

    /// A moment on a rank's GPU clock.
    fn gpu(&self, rank: u32, t: u64) -> u64 {
        let drift = self.case.drift_ppm * f64::from(rank % 7) / 7.0;
        WALL + u64::from(rank) * 17 * S + t + (t as f64 * drift / 1e6) as u64
    }

    fn segment(&self, rank: u32) -> SegmentId {
        SegmentId(u64::from(self.epoch) * 10_000_000 + u64::from(rank) + 1)
    }

    fn tell(&mut self, now: u64) -> Vec<Update> {
        let mut out = Vec::new();
        for rank in 0..self.case.ranks {
            let p = &self.processes[rank as usize];
            let absent = self.case.comms.values().any(|m| m.without.contains(&rank));
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
                || part.ended.is_some() && part.end_seen > now;
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
        out
    }

    fn process(&self, rank: u32, dead: Option<u64>) -> Update {
        let (n, node) = (self.case.ranks, self.node(rank));
        let losses = self.processes[rank as usize].losses;
        let last = dead.map(|d| d / LOOK_ALIVE * LOOK_ALIVE);
        Update::Segment(SegmentRecord {
            id: self.segment(rank),
            path: format!("/dev/shm/ringwatch-0/{rank}.seg").into(),
            pid: 1_000 + rank + self.epoch * 100_000,
            host: format!("node{node}"),
            program: "python3".into(),
            nccl: Some("2.28.9".into()),
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

    fn comm(&self, at: usize, own: u32) -> Update {
        let c = &self.comms[at];
        let rank = c.members[own as usize];
        let misjudged = u32::from(c.misjudged_by == Some(rank));
        Update::Comm(CommRecord {
            segment: self.segment(rank),
            comm: c.id,
            rank: Rank(own),
            ranks: Some(c.members.len() as u32 + misjudged),
            nodes: Some(c.nodes),
            name: None,
            gpu: Some(format!("0000:{:02x}:00.0", rank % 8).into()),
            host_clock: u64::from(self.node(rank)) + 1,
            issued: c.issued[own as usize] - c.lost[own as usize],
            replayed: c.replayed[own as usize],
            init_ns: self.mono(rank, self.begin),
            making: c.making[own as usize],
            finalized_ns: None,
        })
    }

    fn fact(&self, rank: u32, now: u64) -> Update {
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

    fn record(
        &self,
        (at, _, order): Key,
        own: u32,
        rank: u32,
        part: &Part,
        stuck: Option<(u32, u32)>,
        now: u64,
    ) -> OpRecord {
        let call = &part.planned.call;
        let n = self.comms[at].members.len() as u32;
        let started = part.started.filter(|_| part.start_seen <= now);
        let ended = part.ended.filter(|_| part.end_seen <= now);
        let (algo, proto, channels) = part.way;
        let stamp = |channel| {
            started.filter(|_| part.timed && part.stamped).map(|start| ChannelStamp {
                channel,
                start_gpu_ns: Some(self.gpu(rank, start)),
                stop_gpu_ns: ended.map(|e| self.gpu(rank, e)),
                start_seen_ns: self.mono(rank, part.start_seen),
                stop_seen_ns: ended.map(|_| self.mono(rank, part.end_seen)),
            })
        };
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
            plan: None,
            flags: Flags::default(),
            called_ns: Some(self.mono(rank, part.called)),
            returned: None,
            redop: call.redop,
            issued_ns: Some(self.mono(rank, part.issued)),
            timing: match part.timed {
                true => Timing::Kernel,
                false if self.case.abi < 3 => Timing::Not(Untimed::Offered),
                false => Timing::Not(Untimed::Budget),
            },
            event_ns: None,
            event_seen_ns: None,
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
    fn moving(&self, rank: u32, own: u32, n: u32, since: u64, ended: Option<u64>, now: u64) -> NetProgress {
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
    fn transfers(&self, rank: u32, own: u32, n: u32, (from, to): (u32, u32), since: u64) -> Vec<NetProgress> {
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
