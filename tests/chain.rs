//! The recordings played on the plugin alone and with another one behind it: the segments say the same.

use crate::support;
use crate::support::{Play, Players, Room, skipped};
use ringwatch::ingest::{Place, Segments, now_ns};
use ringwatch::model::{CommRecord, Lane, OpRecord, Source, Update};
use ringwatch::replay::Scenario;
use ringwatch_wire::codes::{Loss, call};
use ringwatch_wire::layout::Region;
use ringwatch_wire::reader::{Found, Reader};
use ringwatch_wire::sync::Word;
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::process::Command;

/// What the segments of one job hold, by rank, apart from the moments.
#[derive(Debug, PartialEq)]
struct Told {
    comms: Vec<String>,
    /// By communicator, lane and issue order.
    ops: BTreeMap<(u64, Lane, Option<u64>, u64), String>,
    kernels: Vec<(u8, u64, Option<u64>, Option<i64>)>,
    transfers: Vec<(i32, bool, u64, u64, u64, bool)>,
    /// Callbacks that left a record, by kind; what was lost.
    booked: Vec<u64>,
    lost: Vec<(&'static str, u64)>,
}

fn comm(c: &CommRecord) -> String {
    format!("{:?} {:?} {:?} {} {}", c.comm, c.rank, c.ranks, c.issued, c.replayed)
}

fn op(o: &OpRecord) -> String {
    let net: Vec<u64> = o.net.iter().map(|n| n.bytes).collect();
    format!(
        "{:?} {:?} {} {:?} {:?} {:?} {:?} {:?} {:?} {} {} {net:?} called {} issued {}",
        o.func,
        o.dtype,
        o.count,
        o.root,
        o.algo,
        o.proto,
        o.channels,
        o.seq,
        o.flags,
        o.started,
        o.stopped,
        o.called_ns.is_some(),
        o.issued_ns.is_some(),
    )
}

fn all<T>(n: u64, get: impl Fn(u64) -> Found<T>) -> impl Iterator<Item = T> {
    (0..n).map(move |ticket| match get(ticket) {
        Found::Is(record) => record,
        Found::NotYet | Found::Overwritten => panic!("ticket {ticket} is not there"),
    })
}

fn played(play: Play, chained: bool) -> Vec<Told> {
    let room = Room::new();
    let other = ringwatch::bundle::install_null(&room.path("other")).expect("the other plugin is written");
    // It asks for what ours asks for, but kernel events, which with ABI v4 ours would not have.
    let variables = [("RINGWATCH_CHAIN", other.as_os_str()), ("RINGWATCH_NULL_MASK", "0xf1f".as_ref())];
    let mut players = Players::start_with(&room, play, if chained { &variables } else { &[] });
    for report in players.played() {
        assert_eq!((report.nonzero_returns, report.unwritten_handles), (0, 0), "{play:?}");
        let refused = report.warnings.iter().any(|w| w.contains("RINGWATCH_CHAIN"));
        assert!(!refused, "{play:?}: {:?}", report.warnings);
    }
    let pids: Vec<u32> = players.children.iter().map(std::process::Child::id).collect();
    players.end();

    let mut source = Segments::new(vec![Place::Dir(room.segments())]);
    let (mut comms, mut ops, mut ids) =
        (HashMap::<_, BTreeMap<_, _>>::new(), HashMap::<_, BTreeMap<_, _>>::new(), HashMap::new());
    for update in source.poll(now_ns()) {
        match update {
            Update::Segment(s) => {
                ids.insert(s.pid, s.id);
            }
            Update::Comm(c) => {
                comms.entry(c.segment).or_default().insert((c.comm.nccl_hash(), c.rank.0), comm(&c));
            }
            Update::Op(o) => {
                ops.entry(o.segment).or_default().insert(o.ticket, OpRecord::clone(&o));
            }
            Update::Missed { .. } | Update::Left { .. } => panic!("{update:?}"),
            _ => {}
        }
    }
    let by_rank = pids.iter().map(|pid| {
        let id = ids[pid];
        let own = |p: &&std::path::PathBuf| {
            p.file_name().is_some_and(|n| n.to_string_lossy().starts_with(&format!("{pid}-")))
        };
        let files = room.segment_files();
        let bytes = std::fs::read(files.iter().find(own).expect("the rank's segment")).expect("read");
        let words: Vec<Word> =
            bytes.as_chunks::<8>().0.iter().map(|w| Word::new(u64::from_le_bytes(*w))).collect();
        let r = Reader::open(&words).expect("a segment");
        let key = |o: &OpRecord, ticket: u64| {
            // What has no order is known by its place.
            (o.comm.nccl_hash(), o.lane, o.order, if o.order.is_none() { ticket } else { 0 })
        };
        let kernels = all(r.ring(Region::Channel).next(), |t| r.channel(t))
            .map(|c| (c.channel, c.op, c.start_gpu_ns.map(|_| 0), c.duration_ns));
        let transfers = all(r.ring(Region::Proxy).next(), |t| r.proxy(t))
            .map(|t| (t.peer, t.is_send, t.bytes, t.started, t.done, t.stop_ns.is_some()));
        Told {
            comms: comms[&id].values().cloned().collect(),
            ops: ops[&id].iter().map(|(t, o)| (key(o, *t), op(o))).collect(),
            kernels: kernels.collect(),
            transfers: transfers.collect(),
            booked: (0..call::COUNT).map(|k| r.recorded(k)).collect(),
            lost: Loss::ALL.iter().map(|l| (l.as_str(), r.lost(*l))).filter(|l| l.1 > 0).collect(),
        }
    });
    by_rank.collect()
}

fn check(abi: u8) {
    for scenario in Scenario::ALL {
        for two_node in [false, true] {
            let play = Play { abi, two_node, ..Play::of(scenario.as_str()).unpaced() };
            let (alone, chained) = (played(play, false), played(play, true));
            for (rank, (a, c)) in alone.iter().zip(&chained).enumerate() {
                let what = format!("v{abi} {scenario} two-node {two_node} rank {rank}");
                assert!(!a.ops.is_empty(), "{what}");
                assert!(a == c, "{what}:\n{a:#?}\n{c:#?}");
            }
        }
    }
}

#[test]
fn a_plugin_behind_ours_changes_nothing_up_to_v4() {
    for abi in 1..=4 {
        check(abi);
    }
}

#[test]
fn a_plugin_behind_ours_changes_nothing_from_v5_on() {
    for abi in 5..=7 {
        check(abi);
    }
}

/// A plugin that writes down every callback; `None` without a C compiler, and the test counts as skipped.
fn recorder(test: &str, room: &Room) -> Option<PathBuf> {
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/plugin/tests/support/recorder.c");
    let to = room.path("recorder.so");
    let made = Command::new("cc").args(["-shared", "-fPIC", "-lpthread", source, "-o"]).arg(&to).output();
    let Ok(made) = made else {
        skipped(test, "a C compiler (cc)");
        return None;
    };
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    Some(to)
}

/// What the recorder writes down, and which masks and NULL handles it answers with.
#[derive(Debug, Clone, Copy)]
struct Recorded {
    play: Play,
    rank: usize,
    mask: u32,
    nulls: u32,
}

/// What the recorder hears in NCCL's one slot, or behind our plugin there. NCCL leaves out what nobody asks for.
fn heard(room: &Room, other: &Path, r: Recorded, chained: bool) -> Vec<String> {
    let ours = room.plugin();
    let log = room.path("log");
    let mut command = room.ringwatch(["replay", "--unpaced", "--honour-mask", "--scenario", r.play.scenario]);
    command
        .args(["--rank", &r.rank.to_string(), "--abi", &r.play.abi.to_string(), "--plugin"])
        .arg(if chained { &ours } else { other })
        .args(r.play.two_node.then_some("--two-node"))
        .env("RECORDER_LOG", &log)
        .env("RECORDER_MASK", format!("{:x}", r.mask))
        .env("RECORDER_NULL", format!("{:x}", r.nulls))
        .env("RECORDER_STRICT", "1");
    if chained {
        command.env("RINGWATCH_CHAIN", other);
    }
    let said = support::run(&mut command);
    assert_eq!(said.code, Some(0), "{r:x?}: {}", said.err);
    let text = std::fs::read_to_string(&log).expect("the recorder wrote its log");
    // How late a call is moves the GPU's stamps.
    let moments = |line: &str| {
        let stop = line.contains(" state 22 ");
        let word = |w: &&str| !(w.starts_with("stamp=") || stop && w.starts_with("value="));
        line.split(' ').filter(word).collect::<Vec<_>>().join(" ")
    };
    text.lines().map(moments).collect()
}

#[track_caller]
fn hears_the_same(room: &Room, other: &Path, r: Recorded) -> usize {
    let (alone, chained) = (heard(room, other, r, false), heard(room, other, r, true));
    for (i, (a, c)) in alone.iter().zip(&chained).enumerate() {
        assert_eq!(a, c, "{r:x?}: call {i}, alone and chained");
    }
    assert_eq!(alone.len(), chained.len(), "{r:x?}");
    alone.len()
}

/// Every type by itself, what NVIDIA's Inspector and example ask for, everything, and nothing.
const MASKS: [u32; 22] = [
    0x1, 0x2, 0x4, 0x8, 0x10, 0x20, 0x40, 0x80, 0x100, 0x200, 0x400, 0x800, 0x1000, 0x2000, 0x4000, 0x8000,
    0x42, 0x46, 0x1f, 0x840, 0xffff, 0,
];

fn another_plugin_hears_what_it_would_alone(test: &str, versions: std::ops::RangeInclusive<u8>) {
    let room = Room::new();
    let Some(other) = recorder(test, &room) else { return };
    for abi in versions {
        let mut most = 0;
        for mask in MASKS {
            let play = Play { abi, ..Play::of("mixed").two_node() };
            most = most.max(hears_the_same(&room, &other, Recorded { play, rank: 1, mask, nulls: 0 }));
        }
        assert!(most > 1000, "v{abi}: {most}");
        for scenario in Scenario::ALL {
            for two_node in [false, true] {
                for rank in 0..4 {
                    let play = Play { abi, two_node, ..Play::of(scenario.as_str()) };
                    let mask = [0x46, 0x18, 0x3, 0x702][rank];
                    hears_the_same(&room, &other, Recorded { play, rank, mask, nulls: 0 });
                }
            }
        }
    }
}

#[test]
fn another_plugin_hears_what_it_would_alone_up_to_v4() {
    another_plugin_hears_what_it_would_alone("another_plugin_hears_what_it_would_alone_up_to_v4", 1..=4);
}

#[test]
fn another_plugin_hears_what_it_would_alone_from_v5_on() {
    another_plugin_hears_what_it_would_alone("another_plugin_hears_what_it_would_alone_from_v5_on", 5..=7);
}

/// NCCL leaves out what belongs to an event for which a plugin gave NULL, by version more or less of it; our own handle
/// in its place must not bring it back.
#[test]
fn what_another_plugin_refuses_stays_refused() {
    let room = Room::new();
    let Some(other) = recorder("what_another_plugin_refuses_stays_refused", &room) else { return };
    for abi in 1..=7 {
        // Groups, calls, operations, transfers and steps.
        for (nulls, mask) in [(0x1, 0x7), (0x300, 0xf07), (0x8, 0x1f), (0x10, 0x1f), (0x2, 0x2)] {
            let play = Play { abi, ..Play::of("mixed").two_node() };
            hears_the_same(&room, &other, Recorded { play, rank: 2, mask, nulls });
        }
    }
}
