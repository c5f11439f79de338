//! Every version of the profiler's ABI against every recording: what the segments say afterwards is what the
//! recording holds, as far as that version tells, and the plugin's books balance.

use crate::support::{Play, Players, Room};
use ringwatch::ingest::{Place, Segments, now_ns};
use ringwatch::join::{Join, Track};
use ringwatch::model::{
    Algo, CommId, CommRecord, DataType, Func, Lane, OpRecord, Proto, Rank, SegmentId, Source, Update,
};
use ringwatch::replay::{Call, Descriptor, PlayReport, RankTrace, Scenario, fixture};
use ringwatch_wire::codes::{Flaw, Loss, call};
use ringwatch_wire::layout::Region;
use ringwatch_wire::reader::{ChannelSlot, Found, ProxySlot, Reader};
use ringwatch_wire::sync::Word;
use std::collections::{BTreeMap, HashMap};
use std::path::Path;

/// One operation, as the recording has it and as the segment should.
#[derive(Debug, Clone, PartialEq)]
struct Op {
    comm: u64,
    lane: Lane,
    order: u64,
    func: Func,
    dtype: Option<DataType>,
    count: u64,
    root: Option<Rank>,
    algo: Option<Algo>,
    proto: Option<Proto>,
    channels: Option<u8>,
    warps: Option<u8>,
    seq: Option<u64>,
    captured: bool,
    started: u16,
    stopped: u16,
    /// Network transfers and their bytes.
    transfers: usize,
    bytes: u64,
}

/// What one rank's segment should hold.
#[derive(Debug, Default)]
struct Expected {
    /// Id, rank, ranks, collectives by call and by replay.
    comms: Vec<(u64, u32, u32, u64, u64)>,
    ops: Vec<Op>,
    /// Channel and duration on the GPU's clock, in order of their starts.
    kernels: Vec<(u8, Option<i64>)>,
    /// Peer, direction and bytes of the transfers, in order of their starts.
    transfers: Vec<(i32, bool, u64)>,
    proxy_controls: u64,
}

fn named<T: Copy>(all: &[T], name: impl Fn(T) -> &'static str, text: &str) -> Option<T> {
    all.iter().copied().find(|t| name(*t) == text)
}

fn func(text: &str) -> Func {
    named(Func::ALL, Func::as_str, text).unwrap_or(Func::Unknown)
}

fn dtype(text: &str) -> Option<DataType> {
    named(DataType::ALL, DataType::as_str, text)
}

/// What a handle of the recording stands for.
#[derive(Debug, Clone)]
enum Thing {
    /// A call: captured or not, its type and count, and whether it was issued.
    Call {
        captured: bool,
        dtype: Option<DataType>,
        count: u64,
        issued: bool,
    },
    Op(usize),
    Kernel {
        kernel: usize,
        op: usize,
        stamp_ns: u64,
        stopped: bool,
    },
    Transfer {
        transfer: usize,
        op: Option<usize>,
        send: bool,
    },
    /// A step of a transfer, and the state in which it is.
    Step {
        transfer: u64,
        state: u32,
    },
}

/// Reads a recording as NCCL's documentation does, without a look at how the plugin does it.
fn expected(rank: &RankTrace, abi: u8) -> Expected {
    let mut e = Expected::default();
    let mut contexts: HashMap<u64, usize> = HashMap::new();
    let mut things: HashMap<u64, Thing> = HashMap::new();
    let mut pairs: HashMap<(usize, Lane), u64> = HashMap::new();
    for event in &rank.events {
        match &event.call {
            Call::Init { ctx, comm_id, ranks, rank, .. } => {
                contexts.insert(*ctx, e.comms.len());
                e.comms.push((*comm_id, *rank as u32, *ranks as u32, 0, 0));
            }
            Call::Start { handle, ctx, parent, descriptor } => {
                let comm = contexts[ctx];
                let thing = match descriptor {
                    Descriptor::CollApi { datatype, count, graph_captured, .. }
                    | Descriptor::P2pApi { datatype, count, graph_captured, .. } => Thing::Call {
                        captured: *graph_captured,
                        dtype: dtype(datatype),
                        count: *count,
                        issued: false,
                    },
                    Descriptor::Coll {
                        seq,
                        func: f,
                        count,
                        root,
                        datatype,
                        channels,
                        warps,
                        algo,
                        proto,
                        ..
                    } => {
                        let call = things.get_mut(parent).filter(|_| abi >= 5);
                        let mut said = (dtype(datatype), *count);
                        let mut lane = Lane::Collective;
                        // Since v5 the call is known: it names the user's own type and count, and tells the
                        // replay of a graph from an operation that was called.
                        if let Some(Thing::Call { captured, dtype, count, issued }) = call {
                            if *captured {
                                lane = Lane::Replay;
                            } else if !*issued {
                                said = (*dtype, *count);
                            }
                            *issued = true;
                        }
                        let c = &mut e.comms[comm];
                        let counter = if lane == Lane::Replay { &mut c.4 } else { &mut c.3 };
                        let order = *counter;
                        *counter += 1;
                        e.ops.push(Op {
                            comm: c.0,
                            lane,
                            order,
                            func: func(f),
                            dtype: said.0,
                            count: said.1,
                            root: u32::try_from(*root).ok().map(Rank),
                            algo: named(Algo::ALL, Algo::as_str, algo),
                            proto: named(Proto::ALL, Proto::as_str, proto),
                            // Up to v3 NCCL tells the most that it may use, not what it uses.
                            channels: (abi >= 4).then_some(*channels),
                            warps: Some(*warps),
                            seq: Some(*seq),
                            captured: false,
                            started: 0,
                            stopped: 0,
                            transfers: 0,
                            bytes: 0,
                        });
                        Thing::Op(e.ops.len() - 1)
                    }
                    Descriptor::P2p { func: f, count, datatype, peer, channels, .. } => {
                        let peer = Rank(u32::try_from(*peer).expect("a peer"));
                        let lane = if func(f) == Func::Recv { Lane::Recv(peer) } else { Lane::Send(peer) };
                        let next = pairs.entry((comm, lane)).or_default();
                        let order = *next;
                        *next += 1;
                        e.ops.push(Op {
                            comm: e.comms[comm].0,
                            lane,
                            order,
                            func: func(f),
                            dtype: dtype(datatype),
                            count: *count,
                            root: None,
                            algo: None,
                            proto: None,
                            channels: (abi >= 4).then_some(*channels),
                            warps: None,
                            seq: None,
                            captured: false,
                            started: 0,
                            stopped: 0,
                            transfers: 0,
                            bytes: 0,
                        });
                        Thing::Op(e.ops.len() - 1)
                    }
                    Descriptor::KernelCh { channel, stamp_ns } if abi >= 3 => {
                        let Some(Thing::Op(op)) = things.get(parent).cloned() else {
                            panic!("a kernel without an operation")
                        };
                        e.ops[op].started += 1;
                        e.kernels.push((*channel, None));
                        let kernel = e.kernels.len() - 1;
                        Thing::Kernel { kernel, op, stamp_ns: *stamp_ns, stopped: false }
                    }
                    Descriptor::ProxyOp { peer, send, .. } => {
                        let op = match things.get(parent) {
                            Some(Thing::Op(op)) => Some(*op),
                            _ => None,
                        };
                        if let Some(op) = op {
                            e.ops[op].transfers += 1;
                        }
                        e.transfers.push((*peer, *send, 0));
                        Thing::Transfer { transfer: e.transfers.len() - 1, op, send: *send }
                    }
                    Descriptor::ProxyStep { .. } => Thing::Step { transfer: *parent, state: 0 },
                    Descriptor::Other(32) => {
                        e.proxy_controls += 1;
                        continue;
                    }
                    _ => continue,
                };
                things.insert(*handle, thing);
            }
            Call::Stop { handle } => {
                if let Some(Thing::Kernel { op, stopped, .. }) = things.get_mut(handle)
                    && !std::mem::replace(stopped, true)
                {
                    e.ops[*op].stopped += 1;
                }
            }
            Call::State { handle, state, arg } => match things.get(handle).cloned() {
                // v3 has no such state: there a kernel's stop is the event's.
                Some(Thing::Kernel { kernel, op, stamp_ns, stopped: false }) if *state == 22 && abi >= 4 => {
                    e.kernels[kernel].1 = arg.map(|stop| stop.wrapping_sub(stamp_ns) as i64);
                    e.ops[op].stopped += 1;
                    things.insert(*handle, Thing::Kernel { kernel, op, stamp_ns, stopped: true });
                }
                Some(Thing::Step { transfer, state: before }) => {
                    let Some(Thing::Transfer { transfer: t, op, send }) = things.get(&transfer).cloned()
                    else {
                        panic!("a step without its transfer")
                    };
                    // Bytes are told when a send has gone to the network and when a receive came from it.
                    if *state == if send { 9 } else { 11 } && before != *state {
                        let bytes = arg.unwrap_or(0);
                        e.transfers[t].2 += bytes;
                        if let Some(op) = op {
                            e.ops[op].bytes += bytes;
                        }
                    }
                    things.insert(*handle, Thing::Step { transfer, state: *state });
                }
                _ => {}
            },
            Call::Finalize { .. } => {}
        }
    }
    e
}

/// What one segment holds, by the wire format.
struct Wire {
    kernels: Vec<ChannelSlot>,
    transfers: Vec<ProxySlot>,
}

fn all<T>(n: u64, get: impl Fn(u64) -> Found<T>) -> Vec<T> {
    (0..n)
        .map(|ticket| match get(ticket) {
            Found::Is(record) => record,
            Found::NotYet => panic!("ticket {ticket} was never published"),
            Found::Overwritten => panic!("ticket {ticket} was overwritten"),
        })
        .collect()
}

/// Checks the books of one segment against the calls that were made.
fn balance(reader: &Reader<'_>, report: &PlayReport, controls: u64, what: &str) {
    assert_eq!(report.nonzero_returns, 0, "{what}");
    // NCCL 2.27, which alone uses v4, does not bear kernel events, and the log says so.
    let warned = |w: &String| !(what.starts_with("v4") && w.contains("GPU times are not asked for"));
    assert!(!report.warnings.iter().any(warned), "{what}: {:?}", report.warnings);
    assert_eq!(report.unwritten_handles, 0, "{what}");
    for bit in 0..16 {
        let name = event_name(bit);
        let made = report.starts.get(name).copied().unwrap_or(0);
        // Groups, and launches that are not timed, carry nothing that is kept beside their operations.
        let booked = if [8, 11].contains(&bit) { 0 } else { made };
        assert_eq!(reader.seen(bit), booked, "{what}: starts of {name} seen and made");
    }
    assert_eq!(reader.seen(call::START_UNKNOWN), 0, "{what}");
    // Plans, calls and operations have no end of their own.
    let made =
        |bits: &[usize]| -> u64 { bits.iter().filter_map(|b| report.starts.get(event_name(*b))).sum() };
    // From v4 on a kernel's record shows its stop time, and its stop says nothing more.
    let kernels = if reader.abi() >= Some(4) { made(&[6]) } else { 0 };
    let ended = report.stops - made(&[0, 1, 2, 9, 10, 12]);
    let groups = made(&[8]);
    let least = |n: u64| n.saturating_sub(groups * 2 + kernels);
    assert!((least(ended)..=ended).contains(&reader.seen(call::STOP)), "{what}: stops");
    assert!((least(report.states)..=report.states).contains(&reader.seen(call::STATE)), "{what}: states");
    assert_eq!(reader.seen(call::INIT), report.inits, "{what}: inits");
    assert_eq!(reader.seen(call::FINALIZE), report.finalizes, "{what}: finalizes");
    let sum = |of: &dyn Fn(usize) -> u64| (0..call::COUNT).map(of).sum::<u64>();
    let (seen, recorded) = (sum(&|k| reader.seen(k)), sum(&|k| reader.recorded(k)));
    let lost: BTreeMap<&str, u64> =
        Loss::ALL.into_iter().map(|l| (l.as_str(), reader.lost(l))).filter(|(_, n)| *n > 0).collect();
    assert_eq!(seen, recorded + lost.values().sum::<u64>(), "{what}: seen = recorded + lost ({lost:?})");
    for kind in 0..call::COUNT {
        let unrecorded = reader.seen(kind) - reader.recorded(kind);
        // Proxy control carries nothing about an operation; all else leaves a record.
        let explained = if kind == 5 { controls } else { 0 };
        assert_eq!(unrecorded, explained, "{what}: unrecorded calls of kind {kind} ({lost:?})");
    }
    let explained = BTreeMap::from([(Loss::NotRecorded.as_str(), controls)]);
    let explained = explained.into_iter().filter(|(_, n)| *n > 0).collect::<BTreeMap<_, _>>();
    assert_eq!(lost, explained, "{what}");
    for flaw in Flaw::ALL {
        assert_eq!(reader.flaws(flaw), 0, "{what}: {}", flaw.as_str());
    }
}

fn event_name(bit: usize) -> &'static str {
    Descriptor::Other(1 << bit).type_name()
}

fn read_wire(path: &Path, report: &PlayReport, controls: u64, what: &str) -> Wire {
    let bytes = std::fs::read(path).expect("a segment");
    let words: Vec<Word> =
        bytes.as_chunks::<8>().0.iter().map(|w| Word::new(u64::from_le_bytes(*w))).collect();
    let reader = Reader::open(&words).expect("a segment");
    balance(&reader, report, controls, what);
    Wire {
        kernels: all(reader.ring(Region::Channel).next(), |t| reader.channel(t)),
        transfers: all(reader.ring(Region::Proxy).next(), |t| reader.proxy(t)),
    }
}

/// What ingest makes of the folder: the last word on each communicator and operation, by segment, and the join.
struct Read {
    comms: HashMap<SegmentId, Vec<CommRecord>>,
    ops: HashMap<SegmentId, BTreeMap<u64, OpRecord>>,
    pids: HashMap<u32, SegmentId>,
    join: Join,
}

fn read(dir: &Path) -> Read {
    let mut source = Segments::new(vec![Place::Dir(dir.to_owned())]);
    let (mut comms, mut ops, mut pids) =
        (HashMap::<_, Vec<_>>::new(), HashMap::<_, BTreeMap<_, _>>::new(), HashMap::new());
    let mut join = Join::new();
    for update in source.poll(now_ns()) {
        match &update {
            Update::Segment(s) => {
                assert_eq!(s.losses, vec![], "{s:?}");
                pids.insert(s.pid, s.id);
            }
            Update::Comm(c) => comms.entry(c.segment).or_default().push(c.clone()),
            Update::Op(o) => {
                ops.entry(o.segment).or_default().insert(o.ticket, OpRecord::clone(o));
            }
            Update::Missed { .. } | Update::Left { .. } => panic!("{update:?}"),
            _ => {}
        }
        join.feed(update);
    }
    assert_eq!(source.unread(None), []);
    join.tick(now_ns());
    Read { comms, ops, pids, join }
}

fn found(o: &OpRecord) -> Op {
    Op {
        comm: o.comm.nccl_hash(),
        lane: o.lane,
        order: o.order.expect("issued"),
        func: o.func,
        dtype: o.dtype,
        count: o.count,
        root: o.root,
        algo: o.algo,
        proto: o.proto,
        channels: o.channels,
        warps: o.warps,
        seq: o.seq,
        captured: o.flags.captured,
        started: o.started,
        stopped: o.stopped,
        transfers: o.net.len(),
        bytes: o.net.iter().map(|n| n.bytes).sum(),
    }
}

fn check(abi: u8, scenario: Scenario, two_node: bool) {
    let what = format!("v{abi} {} {scenario}", if two_node { "two-node" } else { "one-node" });
    let room = Room::new();
    let play = Play { abi, two_node, ..Play::of(scenario.as_str()).unpaced() };
    let mut players = Players::start(&room, play);
    let reports = players.played();
    let pids: Vec<u32> = players.children.iter().map(std::process::Child::id).collect();
    players.end();

    let trace = fixture(scenario, two_node);
    let read = read(&room.segments());
    assert_eq!(read.pids.len(), 4, "{what}");
    let mut joined: BTreeMap<(CommId, Track, u64), usize> = BTreeMap::new();
    for (rank, ((trace, report), pid)) in trace.ranks.iter().zip(&reports).zip(&pids).enumerate() {
        let what = format!("{what} rank {rank}");
        let want = expected(trace, abi);
        let files = room.segment_files();
        let file = files
            .iter()
            .find(|f| f.file_name().is_some_and(|n| n.to_string_lossy().starts_with(&format!("{pid}-"))))
            .expect("the rank's segment");
        let wire = read_wire(file, report, want.proxy_controls, &what);
        let segment = read.pids[pid];

        // Up to v3 a communicator is known by its operations alone, and its size never.
        let mut comms: Vec<_> = read.comms[&segment]
            .iter()
            .map(|c| (c.comm.nccl_hash(), c.rank.0, c.ranks.unwrap_or(0), c.issued, c.replayed))
            .collect();
        comms.sort();
        let mut want_comms = want.comms.clone();
        if abi <= 3 {
            want_comms.retain(|c| want.ops.iter().any(|o| o.comm == c.0));
            want_comms.iter_mut().for_each(|c| c.2 = 0);
        }
        want_comms.sort();
        assert_eq!(comms, want_comms, "{what}");

        // The segment's order is that of the calls, the recording's that of issue: compared by lane and order.
        let sorted = |mut ops: Vec<Op>| {
            ops.sort_by_key(|o| (o.comm, o.lane, o.order));
            ops
        };
        let records = &read.ops[&segment];
        let issued = sorted(records.values().filter(|o| o.order.is_some()).map(found).collect());
        let want_ops = sorted(want.ops.clone());
        assert_eq!(issued.len(), want_ops.len(), "{what}: operations");
        for (issued, want) in issued.iter().zip(&want_ops) {
            assert_eq!(issued, want, "{what}");
        }
        // What has no order was called and not issued: captured into a graph, or stuck.
        for o in records.values().filter(|o| o.order.is_none()) {
            assert!(abi >= 5 && o.called_ns.is_some() && o.started == 0, "{what}: {o:?}");
        }
        for o in &want.ops {
            let rank = Rank(want.comms.iter().find(|c| c.0 == o.comm).expect("its communicator").1);
            let track = match o.lane {
                Lane::Collective => Track::Collective,
                Lane::Replay => Track::Replay,
                Lane::Send(peer) => Track::Pair(rank, peer),
                Lane::Recv(peer) if peer == rank => continue,
                Lane::Recv(peer) => Track::Pair(peer, rank),
                Lane::Call => continue,
            };
            *joined.entry((CommId::unowned(o.comm), track, o.order)).or_default() += 1;
        }

        assert_eq!(wire.kernels.len(), want.kernels.len(), "{what}: kernels");
        for (have, (channel, duration)) in wire.kernels.iter().zip(&want.kernels) {
            assert_eq!(have.channel, *channel, "{what}");
            assert_eq!(have.duration_ns, *duration, "{what}: {have:?}");
            assert_eq!(have.start_gpu_ns.is_some(), abi >= 4, "{what}: {have:?}");
        }
        if abi >= 3 {
            assert!(!wire.kernels.is_empty(), "{what}");
            let stopped = wire.kernels.iter().filter(|k| k.stop_seen_ns.is_some()).count();
            let want_stopped: usize = want.ops.iter().map(|o| usize::from(o.stopped)).sum();
            assert_eq!(stopped, want_stopped, "{what}: kernels stopped");
        }
        let transfers: Vec<_> = wire.transfers.iter().map(|t| (t.peer, t.is_send, t.bytes)).collect();
        assert_eq!(transfers, want.transfers, "{what}: transfers");
        assert_eq!(transfers.iter().any(|t| t.2 > 0), two_node, "{what}: bytes on the network");
    }
    // The join finds the same operations, each with all the ranks that issued it.
    let instances: BTreeMap<_, _> = read
        .join
        .communicators()
        .flat_map(|c| {
            c.instances().map(|(t, o, i)| ((CommId::unowned(c.id.nccl_hash()), t, o), i.parts.len()))
        })
        .collect();
    assert_eq!(instances, joined, "{what}: joined");
}

fn check_all(abi: u8) {
    for scenario in Scenario::ALL {
        for two_node in [false, true] {
            check(abi, scenario, two_node);
        }
    }
}

#[test]
fn v1_tells_what_the_recordings_hold() {
    check_all(1);
}

#[test]
fn v2_tells_what_the_recordings_hold() {
    check_all(2);
}

#[test]
fn v3_tells_what_the_recordings_hold() {
    check_all(3);
}

#[test]
fn v4_tells_what_the_recordings_hold() {
    check_all(4);
}

#[test]
fn v5_tells_what_the_recordings_hold() {
    check_all(5);
}

#[test]
fn v6_tells_what_the_recordings_hold() {
    check_all(6);
}

#[test]
fn v7_tells_what_the_recordings_hold() {
    check_all(7);
}
