#![expect(unsafe_code, reason = "looks at a mask that the governor writes")]

use super::*;
use crate::communicator::Comm;
use crate::event_pairs::EventPairs;
use crate::ffi::InitArgs;
use crate::gate::RUN_MASK;
use crate::live::Live;
use crate::opening::enter_comm;
use crate::record;
use crate::runtime::clock::now_ns;
use core::ffi::c_int;
use ringwatch_wire::layout::{Geometry, comm};

const FACTS: Facts = Facts { abi: 5, nccl: 22_809, refused: false, switchable: true, events: true };
const ASKED: c_int = 0xf5f;
const MS: u64 = 1_000_000;
const TURN: u64 = 256;

fn settings() -> Settings {
    Settings { dir: None, bytes: None, budget_ppm: 10_000, detail: Detail::Auto, graphs: Graphs::Watch }
}

fn governor(facts: &Facts, settings: &Settings) -> Governor {
    let words = Vec::leak((0..WORDS).map(|_| Word::new(0)).collect());
    let geometry = Geometry::full();
    let all = Vec::leak((0..geometry.bytes() / 8).map(|_| Word::new(0)).collect());
    let g = Governor::new(words, &Segment::new(all, &geometry), gate::Process::sample(), facts, settings);
    g.begin(0);
    g
}

/// NCCL's mask, and a communicator.
fn stage(g: &Governor) -> (&'static c_int, Comm) {
    let mask: &'static mut c_int = Box::leak(Box::new(0));
    let place = std::ptr::from_mut(mask);
    *mask = g.mask(ASKED, 0, place.expose_provenance());
    // SAFETY: leaked; what writes to it later goes through the same pointer.
    let mask = unsafe { &*place };
    let geometry = Geometry::full();
    let words: &'static [Word] = Vec::leak((0..geometry.bytes() / 8).map(|_| Word::new(0)).collect());
    let segment = Segment::new(words, &geometry);
    let (ticket, slot) = segment.comm.claim().expect("a fresh segment");
    slot.publish();
    let slot = segment.comm.held(ticket).expect("published");
    (mask, Comm::new(ticket, slot))
}

fn asks(mask: &c_int) -> bool {
    // SAFETY: a place of our own.
    unsafe { std::ptr::read_volatile(mask) & KERNEL_CH != 0 }
}

/// Issues operations, `every` ns apart, and says which were timed.
fn issue(g: &Governor, c: &Comm, mask: &c_int, orders: std::ops::Range<u64>, every: u64) -> Vec<bool> {
    orders
        .map(|order| {
            let timed = asks(mask);
            g.issued(c, (COLLECTIVES, order), 2, timed, order * every);
            timed
        })
        .collect()
}

#[test]
fn each_nccl_has_its_way() {
    let kernel = |facts: Facts, s: Settings| governor(&facts, &s).kernel;
    assert_eq!(kernel(FACTS, settings()), Kernel::Switched);
    assert_eq!(kernel(Facts { nccl: 23_007, abi: 6, ..FACTS }, settings()), Kernel::Switched);
    assert_eq!(kernel(Facts { nccl: 23_203, abi: 7, ..FACTS }, settings()), Kernel::Once);
    assert_eq!(kernel(Facts { nccl: 23_203, abi: 6, ..FACTS }, settings()), Kernel::Once);
    assert_eq!(kernel(Facts { nccl: 0, abi: 7, ..FACTS }, settings()), Kernel::Once);
    assert_eq!(kernel(Facts { abi: 3, nccl: 22_605, ..FACTS }, settings()), Kernel::Refused);
    assert_eq!(kernel(Facts { refused: true, ..FACTS }, settings()), Kernel::Refused);
    assert_eq!(kernel(Facts { switchable: false, ..FACTS }, settings()), Kernel::Always);
    let full = Settings { detail: Detail::Full, ..settings() };
    assert_eq!(kernel(FACTS, full), Kernel::Always);
    assert_eq!(kernel(Facts { refused: true, ..FACTS }, full), Kernel::Refused, "full does no harm either");
    assert_eq!(kernel(FACTS, Settings { detail: Detail::Calls, ..settings() }), Kernel::Unwanted);
    assert_eq!(kernel(FACTS, Settings { budget_ppm: 0, ..settings() }), Kernel::Unwanted);
    assert_eq!(kernel(FACTS, Settings { graphs: Graphs::Full, ..settings() }), Kernel::Always);
    assert_eq!(kernel(FACTS, Settings { graphs: Graphs::Off, ..settings() }), Kernel::Refused);
}

#[test]
fn a_slow_job_is_timed_completely() {
    let g = governor(&FACTS, &settings());
    let (mask, c) = stage(&g);
    let timed = issue(&g, &c, mask, 0..2_000, 10 * MS);
    assert!(timed.iter().all(|t| *t), "{:?}", timed.iter().position(|t| !t));
}

#[test]
fn a_fast_job_is_timed_in_runs_within_the_budget() {
    let g = governor(&FACTS, &settings());
    let (mask, c) = stage(&g);
    let every = 8_000;
    let timed = issue(&g, &c, mask, 0..1_000_000, every);
    // After the first tokens are spent: each run costs its waking and its channels.
    let later = &timed[500_000..];
    let blocks = || later.chunks(RUN_MASK as usize + 1);
    let runs = blocks().filter(|b| b.contains(&true)).count() as u64;
    let count = later.iter().filter(|t| **t).count() as u64;
    let cost = runs * WAKE_COST_NS + count * 2 * CHANNEL_COST_NS;
    let wall = later.len() as u64 * every;
    // What the bucket has saved may be spent as well.
    assert!(cost <= (wall + DEEP_NS) / 100, "{cost} ns of {wall}");
    assert!(cost * 400 >= wall, "{cost} ns of {wall}: the budget is there to be used");
    assert_eq!(500_000 & RUN_MASK, 0);
    assert!(
        blocks().all(|b| b.iter().all(|t| *t == b[0])),
        "runs are whole, and begin at multiples of 32 on every rank"
    );
}

#[test]
fn what_a_reader_wants_is_timed_first_and_within_the_budget() {
    let g = governor(&FACTS, &settings());
    let (mask, wanted) = stage(&g);
    let (_, other) = stage(&g);
    wanted.set(comm::ID, 7);
    other.set(comm::ID, 8);
    // stage() gave NCCL's mask a place for each: one is written.
    g.set(MASK_AT, std::ptr::from_ref(mask).expose_provenance() as u64);
    let every = 4_000;
    // Kernel events are the process's: what is called while they are on is timed, whoever they are on for. So the
    // two take turns, as a job's phases do.
    let both = |turns: std::ops::Range<u64>| {
        let mut timed = [0_u64; 2];
        for turn in turns {
            for (i, c) in [&wanted, &other].into_iter().enumerate() {
                for order in turn * TURN..(turn + 1) * TURN {
                    let on = asks(mask);
                    timed[i] += u64::from(on);
                    g.issued(c, (COLLECTIVES, order), 2, on, (order + (turn + i as u64) * TURN) * every);
                }
            }
        }
        timed
    };
    both(0..800);
    let fair = both(800..2_000);
    assert!(fair[0] > 0 && fair[1] > fair[0] / 4, "{fair:?}");
    let (until, comm) = g.wish.expect("a segment");
    comm.set(7);
    until.set(now_ns() + 60_000_000_000);
    let before = g.get(TOKENS) as i64;
    let burst = both(2_000..3_200);
    let wall = 1_200 * 2 * TURN * every;
    let spent = before - g.get(TOKENS) as i64 + g.income(1_000_000) as i64 * (wall / 1_000_000) as i64;
    assert!(spent <= (wall + DEEP_NS) as i64 / 100, "{spent} ns of {wall}");
    assert!(burst[0] * 2 > fair[0] + fair[1], "most of what the budget has: {burst:?}, before {fair:?}");
    assert!(burst[1] * 10 < burst[0], "{burst:?}");
    // A moment that has passed is no wish, and is looked at once.
    until.set(1);
    let after = both(3_200..4_400);
    assert_eq!(until.get(), 0);
    assert!(after[1] > after[0] / 4, "{after:?}");
    until.set(u64::MAX);
    both(4_400..4_401);
    assert_eq!(until.get(), 0, "nobody wants anything for centuries");
}

#[test]
fn ranks_that_never_speak_time_the_same_runs() {
    // The second rank started with less, and is a little slower.
    let ranks = [8_000, 9_000].map(|every| {
        let g = governor(&FACTS, &settings());
        let (mask, c) = stage(&g);
        let timed = issue(&g, &c, mask, 0..1_000_000, every);
        timed.chunks(32).map(|run| run.iter().all(|t| *t)).collect::<Vec<_>>()
    });
    let count = |f: &dyn Fn(bool, bool) -> bool| {
        ranks[0].iter().zip(&ranks[1]).skip(10_000).filter(|(a, b)| f(**a, **b)).count()
    };
    let (both, either) = (count(&|a, b| a && b), count(&|a, b| a || b));
    assert!(both * 4 >= either && both > 10, "{both} of {either} runs are timed on both");
}

#[test]
fn two_communicators_share_the_mask_and_the_bucket() {
    let g = governor(&FACTS, &settings());
    let (mask, a) = stage(&g);
    let (_, b) = stage(&g);
    g.mask(ASKED, 0, std::ptr::from_ref(mask).expose_provenance());
    for order in 0..200_000u64 {
        for c in [&a, &b] {
            let timed = asks(mask);
            g.issued(c, (COLLECTIVES, order), 24, timed, order * 8_000);
        }
    }
    // b waits for a run when it is freed: nobody is timed for its sake any more.
    if b.word(comm::WANTS) == 0 {
        b.set(comm::WANTS, 1);
        g.words[WANTED].add(1);
    }
    g.finalized(&b);
    assert_eq!(g.get(WANTED), a.word(comm::WANTS));
}

#[test]
fn collectives_do_not_break_off_a_run_of_transfers() {
    let g = governor(&FACTS, &settings());
    let (mask, c) = stage(&g);
    // A training step as with experts: collectives, then exchanges; a millisecond lies between two operations.
    let (mut collectives, mut transfers) = (0u64, 0u64);
    let (mut of_transfers, mut timed) = (Vec::new(), 0u64);
    let all_ms = 280_000;
    for now_ms in 0..all_ms {
        let (kind, order) = match now_ms % 14 {
            0..8 => (COLLECTIVES, &mut collectives),
            _ => (TRANSFERS, &mut transfers),
        };
        let asked = asks(mask);
        g.issued(&c, (kind, *order), 24, asked, now_ms * MS);
        *order += 1;
        timed += u64::from(asked);
        if kind == TRANSFERS {
            of_transfers.push(asked);
        }
    }
    let whole = of_transfers.chunks(32).filter(|run| run.iter().all(|t| *t)).count();
    assert!(whole > 200, "{whole} of {} runs are whole", of_transfers.len() / 32);
    let (spent, budget) = (timed * (24 * CHANNEL_COST_NS + WAKE_COST_NS), all_ms * MS / 100);
    assert!(spent * 50 < budget * 51, "{spent} of {budget} ns");
}

/// A stage of a pipeline that sends to the next one and receives from it, some transfers behind: whether each was timed.
fn stage_of_pipeline(
    g: &Governor,
    c: &Comm,
    mask: &c_int,
    steps: std::ops::Range<u64>,
    at_ns: impl Fn(u64) -> u64,
) -> Vec<bool> {
    let mut timed = Vec::new();
    for n in steps {
        for order in [n, n.saturating_sub(3)] {
            timed.push(asks(mask));
            g.issued(c, (TRANSFERS, order), 16, timed.last() == Some(&true), at_ns(n));
        }
    }
    timed
}

#[test]
fn a_job_that_has_become_slow_is_timed_more_often() {
    let g = governor(&FACTS, &settings());
    let (mask, c) = stage(&g);
    // A burst has made one run in 64 due.
    g.set(SHIFT, 6);
    let slow = stage_of_pipeline(&g, &c, mask, 5_000..6_000, |n| {
        // Launches after a pause are timed by events meanwhile, and keep an eye on the bucket.
        c.set(comm::HINT, AFTER_PAUSE);
        g.launch(&c, 0, n * 20 * MS);
        n * 20 * MS
    });
    let late = &slow[slow.len() / 2..];
    let timed = late.iter().filter(|t| **t).count();
    assert!(timed * 10 > late.len() * 9, "{timed} of {}", late.len());
}

#[test]
fn a_run_can_be_paid_however_small_the_budget() {
    let g = governor(&FACTS, &Settings { budget_ppm: 100, ..settings() });
    let (mask, c) = stage(&g);
    // A hundred seconds have a budget of 10 ms, a run of 24 channels costs 0.8 ms.
    let timed = stage_of_pipeline(&g, &c, mask, 0..50_000, |n| n * 2 * MS);
    assert!(timed.iter().filter(|t| **t).count() >= 100);
}

#[test]
fn kernel_events_end_for_good_where_they_cannot_come_back() {
    let g = governor(&Facts { nccl: 23_203, abi: 7, ..FACTS }, &settings());
    let (mask, c) = stage(&g);
    let timed = issue(&g, &c, mask, 0..200_000, 8_000);
    let ended = timed.iter().position(|t| !t).expect("the budget is spent");
    assert!(ended > 100 && timed[ended..].iter().all(|t| !t));
    assert!(!asks(mask), "and not asked for by the next communicator's init");
    assert_eq!(g.mask(ASKED, 0, std::ptr::from_ref(mask).expose_provenance()) & KERNEL_CH, 0);
    // What is timed now is timed by CUDA events, one in a few hundred.
    let events = (0..200_000u64).filter(|o| g.launch(&c, *o, 1_600 * MS + o * 8_000)).count() as u64;
    let (cost, wall) = (events * EVENT_COST_NS, 200_000 * 8_000);
    assert!(events > 100 && cost * 100 <= wall + wall / 2, "{events}");
}

#[test]
fn a_capture_ends_kernel_events_where_they_would_be_wrong() {
    let g = governor(&FACTS, &settings());
    let (mask, c) = stage(&g);
    assert!(g.spoils_captures());
    g.captured();
    assert!(!asks(mask) && !g.spoils_captures());
    assert!(issue(&g, &c, mask, 0..1_000, 10 * MS).iter().all(|t| !t));
    let g = governor(&Facts { nccl: 23_203, abi: 7, ..FACTS }, &settings());
    let (mask, _) = stage(&g);
    g.captured();
    assert!(asks(mask), "NCCL 2.31 counts right only if nothing changes");
}

#[test]
fn another_plugin_that_changes_its_mind_is_followed() {
    let g = governor(&FACTS, &settings());
    let (mask, c) = stage(&g);
    // SAFETY: a place of our own.
    let now = || unsafe { std::ptr::read_volatile(mask) };
    let ours = ASKED & !KERNEL_CH;
    g.follow(0x20);
    assert_eq!(now() & !KERNEL_CH, ours | 0x20);
    g.follow(KERNEL_CH);
    assert!(issue(&g, &c, mask, 0..100_000, 8_000).iter().all(|t| *t), "kernel events for all of it");
    g.follow(0);
    assert_eq!(now(), ours, "what is switched begins with off");
    assert!(issue(&g, &c, mask, 100_000..1_000_000, 8_000).iter().any(|t| *t), "and goes on");
    g.follow(KERNEL_PHASE);
    assert_eq!(now(), ours | KERNEL_PHASE | KERNEL_CH, "no phases without kernels");
    // Once the budget was spent, or a graph was captured, later kernel events are the other plugin's alone.
    g.follow(0);
    g.captured();
    g.follow(KERNEL_CH);
    assert!(asks(mask) && !g.kernel_on());
    let g = governor(&Facts { nccl: 23_203, abi: 7, ..FACTS }, &settings());
    let (mask, _) = stage(&g);
    g.follow(KERNEL_CH);
    g.follow(0);
    assert!(asks(mask) && g.kernel_on(), "never off: the stamps are right");
    let off = Settings { detail: Detail::Calls, ..settings() };
    let g = governor(&Facts { nccl: 23_203, abi: 7, ..FACTS }, &off);
    let (mask, _) = stage(&g);
    for (theirs, on) in [(KERNEL_CH, true), (0, false), (KERNEL_CH, false)] {
        g.follow(theirs);
        assert_eq!((asks(mask), g.kernel_on()), (theirs != 0, on), "wrong after a pause");
    }
}

#[test]
fn a_pause_and_a_large_operation_are_worth_a_pair_of_events() {
    let g = governor(&FACTS, &settings());
    let (_, c) = stage(&g);
    assert!(!g.launch(&c, 0, MS), "the regular ones are for kernel events");
    for hint in [AFTER_PAUSE, LARGE] {
        c.set(comm::HINT, hint);
        assert!(g.launch(&c, 1, 2 * MS));
    }
    assert!(!governor(&Facts { events: false, ..FACTS }, &settings()).launch(&c, 1, 3 * MS));
}

#[test]
fn nothing_is_written_where_nccls_mask_cannot_be() {
    let g = governor(&Facts { switchable: false, ..FACTS }, &settings());
    let (mask, c) = stage(&g);
    assert!(issue(&g, &c, mask, 0..10_000, 1_000).iter().all(|t| *t));
    assert_eq!(g.why_not(false), timed::NOT_BUDGET);
}

#[test]
fn a_slot_that_is_given_on_waits_for_nothing() {
    let live = Live::sample(governor(&FACTS, &settings()), EventPairs::new(None, &[]));
    let g = &live.governor;
    let ticket = enter_comm(live, &InitArgs::unknown()).expect("there is room");
    let c = Comm::of(&live.segment, ticket).expect("it is there");
    let wait = || {
        c.set(comm::WANTS, 1);
        g.words[WANTED].add(1);
    };
    wait();
    g.finalized(&c);
    g.finalized(&c);
    assert_eq!(g.get(WANTED), 0);
    // A late event of an ended communicator.
    assert!(record::end(live, &c));
    wait();
    let again = (0..live.segment.comm.slots()).find(|_| {
        let next = enter_comm(live, &InitArgs::unknown()).expect("there is room");
        next % live.segment.comm.slots() == ticket
    });
    assert!(again.is_some(), "the slot was taken again");
    assert_eq!(g.get(WANTED), 0);
}

#[test]
fn kernel_events_are_never_switched_amid_a_group_that_sends_and_receives() {
    for on in [true, false] {
        let g = governor(&FACTS, &settings());
        let (mask, c) = stage(&g);
        g.switch(on);
        // Nothing was sent or received: a group of collectives is in nobody's way.
        g.group_begins();
        g.switch(!on);
        assert_eq!(asks(mask), !on);
        g.switch(on);
        g.saw_transfer(true, true);
        g.switch(on);
        assert_eq!(asks(mask), on, "another thread's group goes on");
        g.switch(!on);
        assert_eq!(asks(mask), on);
        assert_ne!(g.get(ENDED), 0, "threads that meet once meet again");
        g.group_was_called();
        g.issued(&c, (TRANSFERS, 1), 2, on, 0);
        assert!(!asks(mask), "they end with the first chance");
        assert_eq!(g.mask(ASKED, 0, std::ptr::from_ref(mask).expose_provenance()) & KERNEL_CH, 0);
    }
}

#[test]
fn a_group_that_shows_up_at_a_switch_decides_by_its_first_call() {
    // Each row holds the first calls of groups, and whether a switch on and one off are taken back for a group that shows up.
    for (first_calls, taken_back) in
        [([true].as_slice(), [false, true]), (&[false], [true, false]), (&[true, false], [false, false])]
    {
        let g = governor(&FACTS, &settings());
        stage(&g);
        for is_send in first_calls {
            g.saw_transfer(*is_send, true);
        }
        for (on, taken_back) in [true, false].into_iter().zip(taken_back) {
            assert!(!g.came_too_late(on), "nothing shows up");
            g.group_begins();
            assert_eq!(g.came_too_late(on), taken_back, "{first_calls:?}, {on}");
            g.group_was_called();
        }
    }
}

#[test]
fn groups_one_after_the_other_leave_kernel_events_alone() {
    let g = governor(&FACTS, &settings());
    let (mask, c) = stage(&g);
    let timed = (0..20_000u64).filter(|n| {
        g.saw_transfer(true, true);
        g.group_begins();
        g.group_was_called();
        let timed = asks(mask);
        g.issued(&c, (TRANSFERS, *n), 2, timed, n * 50_000);
        timed
    });
    let count = timed.count();
    assert!(count > 100 && count < 20_000, "{count}");
    assert_eq!(g.get(ENDED), 0);
}

#[test]
fn a_capture_in_a_group_waits_for_the_end_of_the_group() {
    let g = governor(&FACTS, &settings());
    let (mask, c) = stage(&g);
    g.group_begins();
    g.saw_transfer(true, true);
    g.captured();
    assert!(asks(mask), "its first call has read the mask");
    g.group_was_called();
    g.issued(&c, (TRANSFERS, 0), 2, true, 0);
    assert!(!asks(mask));
}
