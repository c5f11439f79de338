//! A simulated job: hosts that run ahead, streams that run in order, collectives that end when all ranks have
//! started them, and the records that the plugins of its processes would leave behind.
//!
//! It models NCCL and GPUs, not the rules: what is found follows from what happens. Times are ns since the job began;
//! every host has a clock of its own, every GPU too.

mod callbacks;
mod case;
mod history;
mod hosts;
mod load;
mod machines;
mod noise;
mod program;
mod records;
mod streams;
mod timing;

pub(crate) use callbacks::AHEAD_NS;
pub(crate) use case::{Call, Case, Choice, Expected, FOREVER, Fault, Members, Ns, Slow, Step};
pub(crate) use history::Stay;
use program::{Action, Planned};
use ringwatch::join::ClockPair;
use ringwatch::model::{Algo, CommId, Lane, Making, Proto, Track, Update};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap, VecDeque};
use std::sync::Arc;

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
    /// A stopped process goes on.
    Resumes(u32),
    /// A communicator is made.
    Made(usize),
    NodeDies(u32),
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
    /// Until so many items of another stream are finished.
    Wait(u8, u64),
}

#[derive(Debug, Default)]
struct Stream {
    queue: VecDeque<Item>,
    /// Parts of what runs that have not ended.
    running: usize,
    /// The communicators of the launch that runs.
    launched: Vec<usize>,
    /// Items that were issued to it, and those of them that are finished.
    issued: u64,
    finished: u64,
    /// What runs is a kernel that uses the GPU's memory.
    computes: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Runs,
    WaitsForStreams,
    WaitsForRoom,
    /// In the making of a communicator.
    Joins,
    Hangs,
    Stopped,
    Dead(i32),
    Done,
}

#[derive(Debug)]
struct Process {
    actions: Vec<(u32, Action)>,
    next: usize,
    state: State,
    died_ns: Option<u64>,
    /// Until when it tells nothing: it is stopped.
    mute_until: u64,
    /// Until when its host is at its last call.
    host_until: u64,
    told_dead: bool,
    streams: BTreeMap<u8, Stream>,
    /// By communicator: its launches that have not ended, in the order of the calls, each by its first operation.
    launches: HashMap<usize, VecDeque<Key>>,
    tickets: u64,
    losses: u64,
    missed: u64,
    load: load::Load,
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
    /// When each rank entered its making, and when it was freed.
    entered: Vec<Option<u64>>,
    freed: Vec<Option<u64>>,
    without: Vec<u32>,
}

#[derive(Debug)]
struct Part {
    planned: Planned,
    /// The launch that carried it together with others.
    plan: Option<u64>,
    lane: Lane,
    stream: u8,
    ticket: u64,
    called: u64,
    issued: u64,
    started: Option<u64>,
    start_seen: u64,
    ended: Option<u64>,
    /// The end that NCCL tells, where that is another transfer's of its launch.
    told_end: Option<u64>,
    end_seen: u64,
    /// The transfers of its launch, where one of them tells the end of all.
    launch: Option<Arc<[Key]>>,
    /// The transfers of its launch, where CUDA events time it as a whole.
    by_events: Option<Arc<[Key]>>,
    timed: bool,
    stamped: bool,
    dirty: bool,
    way: Way,
}

impl Part {
    /// When it ended, as NCCL tells it.
    fn told_end(&self) -> Option<u64> {
        if self.launch.is_some() || self.by_events.is_some() { self.told_end } else { self.ended }
    }
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
    load_read_at: u64,
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
                let incomplete = !members.without.is_empty() && !members.later;
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
                    changed: ranks.iter().map(|r| !members.later && !members.without.contains(r)).collect(),
                    pairs: HashMap::new(),
                    incomplete,
                    entered: vec![(!members.later).then_some(begin); n],
                    freed: vec![None; n],
                    without: members.without.clone(),
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
            load_read_at: 0,
            case: case.clone(),
        };
        for rank in 0..case.ranks {
            let stuck = sim.comms.iter().any(|c| c.incomplete && c.members.contains(&rank));
            sim.processes.push(Process {
                actions: case.actions(rank),
                next: 0,
                state: if stuck { State::Hangs } else { State::Runs },
                died_ns: None,
                mute_until: 0,
                host_until: 0,
                told_dead: false,
                streams: BTreeMap::new(),
                launches: HashMap::new(),
                tickets: 0,
                losses: 0,
                missed: 0,
                load: load::Load::default(),
            });
            let at = begin + sim.below(50 * MS, noise::of_action(rank, u32::MAX, 0));
            sim.push(at, Event::Host(rank));
        }
        if let Some((node, at)) = sim.case.node_loss {
            sim.push(at.0, Event::NodeDies(node));
        }
        sim
    }

    /// A communicator's id.
    pub(crate) fn id(name: &str, group: usize, epoch: u32) -> CommId {
        CommId::unowned(hash(&format!("{name}/{group}/{epoch}")))
    }

    fn push(&mut self, at: u64, event: Event) {
        self.events += 1;
        self.heap.push(Reverse((at, self.events, event)));
    }

    /// Everybody dies within a moment, as when a launcher starts anew.
    pub(crate) fn kill_all(&mut self, now: u64) {
        for rank in 0..self.case.ranks {
            let at = now + self.below(30 * MS, noise::of_action(rank, u32::MAX, 1));
            self.die(rank, at, 15);
        }
    }

    /// Lets the job go on until `now`.
    pub(crate) fn run_to(&mut self, now: u64) {
        while let Some(Reverse((at, _, _))) = self.heap.peek()
            && *at <= now
        {
            let Some(Reverse((at, _, event))) = self.heap.pop() else { break };
            match event {
                Event::Host(rank) => self.host(rank, at),
                Event::Resumes(rank) => self.resumes(rank, at),
                Event::Made(comm) => self.made(comm, at),
                Event::NodeDies(node) => self.node_dies(node, at),
                Event::KernelEnds(rank, stream) => self.part_ends(rank, stream, at),
                Event::Ends(key) => self.op_ends(key, at),
                Event::PartEnds(key, own) => self.rank_ends(key, own, at),
            }
        }
    }

    /// What the agents read, looking at `now`.
    pub(crate) fn look(&mut self, now: u64) -> Vec<Update> {
        self.run_to(now);
        let out = self.tell(now);
        self.last_look = now;
        out
    }
}
