//! How segments are read: in turns, side by side, and to the same end as all at once.

use crate::support::{Room, run};
use ringwatch::ingest::{Place, Segments, now_ns};
use ringwatch::join::{Communicator, Finished, Join};
use ringwatch::model::{OPERATIONS, OpRecord, SegmentId, Sink, Source, Spare, Timing, Update};
use std::collections::{BTreeMap, BTreeSet};

const RANKS: u32 = 4;
/// What one segment may tell in a turn: what is new, and what waited for its rest.
const IN_A_TURN: usize = 512;
/// After this, in ns, nothing that lacks stamps is waited for.
const LATER_NS: u64 = 10_000_000_000;

/// Four ranks' segments, written by the plugin as fast as it can, every kernel timed.
fn played(how: &[&str]) -> Room {
    let room = Room::new();
    let plugin = room.plugin();
    for rank in 0..RANKS {
        let mut command = room.ringwatch(["replay", "--scenario", "mixed", "--unpaced"]);
        command.args(how).args(["--rank", &rank.to_string(), "--plugin"]).arg(&plugin);
        let said = run(command.env("RINGWATCH_DETAIL", "full"));
        assert_eq!(said.code, Some(0), "{}", said.err);
    }
    room
}

/// Counts at every rest, as of a moment at which nothing has waited too long, or at the end alone; remembers what came between
/// two rests.
struct Taken {
    settles_ns: Option<u64>,
    join: Join,
    turns: Vec<BTreeMap<SegmentId, usize>>,
    told: u64,
    last: BTreeMap<(SegmentId, u64), OpRecord>,
    /// The youngest that was told, by segment.
    newest: BTreeMap<SegmentId, u64>,
    /// Collectives that were counted before the end.
    midway: u64,
}

impl Taken {
    fn of(room: &Room, settles_ns: Option<u64>) -> Self {
        let mut taken = Taken {
            settles_ns,
            join: Join::new(),
            turns: vec![BTreeMap::new()],
            told: 0,
            last: BTreeMap::new(),
            newest: BTreeMap::new(),
            midway: 0,
        };
        taken.join.keep_finished();
        let now = now_ns();
        Segments::new(vec![Place::Dir(room.segments())]).poll_each(now, &mut taken);
        taken.midway = taken.join.communicators().map(Communicator::finished).sum();
        taken.join.tick(now + LATER_NS);
        taken
    }

    fn finished(&mut self) -> Vec<Finished> {
        let mut all = self.join.take_finished();
        all.sort_by_key(|f| (f.comm, f.track, f.operation.order));
        all
    }
}

impl Sink for Taken {
    fn take(&mut self, update: Update) {
        if let Update::Op(op) = &update {
            self.told += 1;
            *self.turns.last_mut().unwrap().entry(op.segment).or_default() += 1;
            if self.last.insert((op.segment, op.ticket), OpRecord::clone(op)).is_none() {
                let before = self.newest.insert(op.segment, op.ticket);
                assert!(before < Some(op.ticket), "{} is told after {before:?}", op.ticket);
            }
        }
        self.join.feed(update);
    }

    fn rest(&mut self, spare: &mut Spare) {
        self.turns.push(BTreeMap::new());
        if let Some(now_ns) = self.settles_ns {
            self.join.settle(now_ns);
            spare.take_from(self.join.spare());
        }
    }
}

#[test]
fn a_look_reads_in_turns_side_by_side_and_counts_the_same() {
    let begun_ns = now_ns();
    let room = played(&["--loops", "60", "--honour-mask"]);
    let (mut in_turns, mut at_once) = (Taken::of(&room, Some(begun_ns)), Taken::of(&room, None));

    let segments: BTreeSet<SegmentId> = in_turns.last.keys().map(|(s, _)| *s).collect();
    assert_eq!(segments.len(), RANKS as usize);
    let busy: Vec<_> = in_turns.turns.iter().filter(|t| !t.is_empty()).collect();
    assert!(busy.len() > 10, "{} turns", busy.len());
    assert_eq!(busy[0].len(), segments.len(), "side by side from the first on");
    let most = in_turns.turns.iter().flat_map(BTreeMap::values).max().copied().unwrap_or(0);
    assert!(most <= IN_A_TURN, "{most} operations of one segment in a turn");

    // What is told of an operation is told once, but for those whose rest lies far behind.
    let operations = in_turns.last.len() as u64;
    assert!(
        operations > 1_000 && in_turns.told < operations + operations / 5,
        "{} of {operations}",
        in_turns.told
    );
    let timed =
        in_turns.last.values().filter(|o| o.timing == Timing::Kernel && o.all_channels_stopped()).count();
    assert!(timed > 100, "{timed} of {operations} are timed");

    // The room of what was forgotten is used again in the middle: nothing of that shows.
    assert_eq!(in_turns.last, at_once.last);
    let over = same(&mut in_turns, &mut at_once);
    assert!(over.len() > 1_000, "{} are over", over.len());
    assert!(in_turns.midway > 500 && at_once.midway == 0, "{} and {}", in_turns.midway, at_once.midway);
}

#[test]
fn operations_are_not_told_before_their_transfers() {
    // Of several communicators, whose transfers lie in the ring in no order of theirs.
    let begun_ns = now_ns();
    let room = played(&["--loops", "8", "--two-node"]);
    let (mut in_turns, mut at_once) = (Taken::of(&room, Some(begun_ns)), Taken::of(&room, None));
    assert!(in_turns.last.len() > 4 * 64, "{} operations would take turns", in_turns.last.len());
    let comms: BTreeSet<_> = in_turns.last.values().filter(|o| !o.net.is_empty()).map(|o| o.comm).collect();
    assert!(comms.len() > 1, "{comms:?}");
    assert_eq!(in_turns.told, in_turns.last.len() as u64, "each is told once, with all that came of it");
    assert_eq!(in_turns.last, at_once.last);
    let over = same(&mut in_turns, &mut at_once);
    assert!(over.iter().flat_map(|f| &f.parts).any(|p| !p.net.is_empty()), "transfers are counted with them");
}

/// What was over, if both found the same.
fn same(in_turns: &mut Taken, at_once: &mut Taken) -> Vec<Finished> {
    let (a, b) = (in_turns.finished(), at_once.finished());
    assert_eq!(a.len(), b.len());
    for (a, b) in a.iter().zip(&b) {
        assert_eq!(a, b);
    }
    let classes = |j: &Join| j.classes().map(|(k, c)| (*k, c.count())).collect::<Vec<_>>();
    assert_eq!(classes(&in_turns.join), classes(&at_once.join));
    a
}

#[test]
fn what_was_read_to_its_end_does_not_hasten_looks() {
    let room = Room::new();
    let mut segments = Segments::new(vec![Place::Dir(room.segments())]);
    let longest = std::time::Duration::from_millis(50);
    segments.look_every(longest);
    let mut now = now_ns();
    drop(segments.poll(now));
    // A small segment, which the recording fills.
    let mut command =
        room.ringwatch(["replay", "--scenario", "mixed", "--unpaced", "--rank", "0", "--plugin"]);
    let said = run(command.arg(room.plugin()).env("RINGWATCH_SEGMENT_BYTES", "65536"));
    assert_eq!(said.code, Some(0), "{}", said.err);
    now += 200_000_000;
    drop(segments.poll(now));
    for _ in 0..10 {
        now += u64::try_from(segments.pause().as_nanos()).unwrap();
        drop(segments.poll(now));
    }
    assert!(segments.pause() >= longest, "{:?}", segments.pause());
}

#[test]
fn what_a_process_lost_before_the_first_look_is_counted_unless_it_ran_before() {
    let room = Room::new();
    let place = || vec![Place::Dir(room.segments())];
    let mut from_the_start = Segments::new(place());
    drop(from_the_start.poll(now_ns()));
    // The rings of a small segment are written over many times.
    let mut command = room.ringwatch(["replay", "--scenario", "mixed", "--unpaced", "--loops", "60"]);
    let command = command.args(["--rank", "0", "--plugin"]).arg(room.plugin());
    let said = run(command.env("RINGWATCH_SEGMENT_BYTES", "65536"));
    assert_eq!(said.code, Some(0), "{}", said.err);

    let operations = |segments: &mut Segments| {
        let (mut told, mut lost) = (BTreeSet::new(), 0);
        // It is listed in one look and read in a later one.
        for _ in 0..100 {
            for update in segments.poll(now_ns()) {
                match update {
                    Update::Op(op) => _ = told.insert(op.ticket),
                    Update::Missed { what, count, .. } if what == OPERATIONS => lost += count,
                    _ => {}
                }
            }
            if !told.is_empty() && segments.is_searched() {
                break;
            }
            std::thread::sleep(segments.pause());
        }
        (told, lost)
    };
    let (told, lost) = operations(&mut from_the_start);
    let last = told.last().copied().unwrap();
    assert!(lost > 0, "{} of {last} were told", told.len());
    assert_eq!(told.len() as u64 + lost, last + 1, "each one is told or counted as lost");
    let (told, lost) = operations(&mut Segments::new(place()));
    assert_eq!((told.last().copied(), lost), (Some(last), 0), "it ran before anybody looked");
}

/// What one rank of two calls, as a recorder writes it: bare all-reduces, and now and then a group of two.
fn calls_of(rank: u32, groups: u64) -> String {
    let mut log = format!("0 1 init ctx=1 id=a name=- nn=1 nr=2 r={rank}\n");
    let (mut handle, mut seq) = (1, 0);
    let mut start = |log: &mut String, parent: u64, what: &str| {
        handle += 1;
        *log += &format!("{handle} 1 start h={handle} c=1 p={parent} {what}\n");
        handle
    };
    let call = "CollApi AllReduce n=8 dt=ncclFloat32 root=0 st=0x7f graph=0";
    for n in 0..groups {
        let (depth, calls) = if n % 50 == 49 { (2, 2) } else { (1, 1) };
        let group = start(&mut log, 0, &format!("GroupApi depth={depth} graph=0"));
        let called: Vec<u64> = (0..calls).map(|_| start(&mut log, group, call)).collect();
        start(&mut log, 0, "Group");
        for parent in called {
            let issue = "AllReduce n=8 root=0 dt=ncclFloat32 nch=2 nw=16 algo=RING proto=LL";
            start(&mut log, parent, &format!("Coll rank={rank} seq={seq} {issue}"));
            seq += 1;
        }
    }
    log
}

/// What is told of collectives, in this order.
#[derive(Default)]
struct Told {
    orders: BTreeMap<u32, Vec<Option<u64>>>,
    /// How many of them were in lines.
    lines: u64,
    join: Join,
}

impl Sink for Told {
    fn take(&mut self, update: Update) {
        if let Update::Op(op) = &update {
            self.orders.entry(op.rank.0).or_default().push(op.order);
            self.lines += op.ticket >> 43;
        }
        self.join.feed(update);
    }

    fn rest(&mut self, _: &mut Spare) {}
}

#[test]
fn bare_collectives_are_told_with_all_others_in_the_order_of_their_issue() {
    const GROUPS: u64 = 800;
    let room = Room::new();
    let plugin = room.plugin();
    for rank in 0..2 {
        let trace = room.path(&format!("log{rank}"));
        std::fs::write(&trace, calls_of(rank, GROUPS)).unwrap();
        let mut command =
            room.ringwatch(["replay", "--scenario", "mixed", "--rank", "0", "--unpaced", "--trace"]);
        let said = run(command.arg(trace).arg("--plugin").arg(&plugin).env("RINGWATCH_DETAIL", "calls"));
        assert_eq!(said.code, Some(0), "{}", said.err);
    }
    let mut told = Told::default();
    Segments::new(vec![Place::Dir(room.segments())]).poll_each(now_ns(), &mut told);
    let issued = GROUPS + GROUPS / 50;
    for orders in told.orders.values() {
        assert!(orders.iter().copied().eq((0..issued).map(Some)), "{orders:?}");
    }
    assert_eq!(told.orders.len(), 2);
    // The first 64 have operation slots, and the groups.
    assert!(told.lines > GROUPS && told.lines < 2 * GROUPS, "{} lines", told.lines);
    let seen: Vec<_> = told.join.communicators().map(|c| c.members().len()).collect();
    assert_eq!(seen, [2], "both ranks are of one communicator");
}
