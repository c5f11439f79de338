use super::*;
use crate::event::{self, Api, Body, Coll, bit};
use crate::gate;
use crate::governor::{self, Facts, Governor};
use crate::handle::{Handle, Kind, VALUE_MASK};
use crate::live::Live;
use crate::record;
use crate::runtime::names::{RECV, SEND};
use crate::runtime::settings::{Detail, Graphs, Settings};
use ringwatch_wire::codes::kind;
use ringwatch_wire::layout::Geometry;
use ringwatch_wire::layout::{comm, head};
use ringwatch_wire::ring::Segment;
use std::cell::Cell;

// A driver whose events are 500 ns apart.
extern "C" fn create(event: *mut Event, _: c_uint) -> c_int {
    // SAFETY: a place for one event.
    unsafe { *event = 1 };
    SUCCESS
}
extern "C" fn record(_: Event, _: Stream) -> c_int {
    SUCCESS
}
thread_local! {
    /// A communicator's word, and what it was when an event was asked for last.
    static LOOKED_AT: Cell<(Option<&'static Word>, u64)> = const { Cell::new((None, 0)) };
}
thread_local! {
    /// The number of questions until events have not happened yet.
    static HAPPENED: Cell<usize> = const { Cell::new(usize::MAX) };
}
extern "C" fn query(_: Event) -> c_int {
    let Some(left) = HAPPENED.get().checked_sub(1) else { return NOT_READY };
    HAPPENED.set(left);
    let (word, _) = LOOKED_AT.get();
    LOOKED_AT.set((word, word.map_or(0, Word::get)));
    SUCCESS
}
extern "C" fn elapsed(ms: *mut f32, _: Event, _: Event) -> c_int {
    // SAFETY: a place for one float.
    unsafe { *ms = 0.000_5 };
    SUCCESS
}
extern "C" fn capturing(_: Stream, status: *mut c_int) -> c_int {
    // SAFETY: a place for one int.
    unsafe { *status = NOT_CAPTURING };
    SUCCESS
}
extern "C" fn exchange(_: *mut c_int) -> c_int {
    SUCCESS
}
extern "C" fn context(context: *mut cuda::Context) -> c_int {
    // SAFETY: a place for one context.
    unsafe { *context = 1 };
    SUCCESS
}

fn words(n: usize) -> &'static [Word] {
    Vec::leak((0..n).map(|_| Word::new(0)).collect())
}

/// A process with one communicator's pool.
fn live() -> &'static Live {
    let contexts = Contexts::of(context, exchange);
    let driver = Driver { create, record, query, elapsed, capturing, contexts };
    let facts = Facts { abi: 5, nccl: 22_809, refused: true, switchable: true, events: true };
    let (detail, graphs) = (Detail::Auto, Graphs::Watch);
    let settings = Settings { dir: None, bytes: None, budget_ppm: 10_000, detail, graphs };
    let nobody = Segment::new(&[], &Geometry::full());
    let governor = Governor::new(words(governor::WORDS), &nobody, gate::Process::sample(), &facts, &settings);
    let live = Live::sample(governor, EventPairs::new(Some(driver), words(WORDS)));
    live.governor.begin(now_ns());
    live.segment.comm.claim().expect("a slot is free").1.publish();
    live.events.open(0);
    live
}

fn begin(live: &Live) -> EventPair {
    // Long enough ago.
    live.events.begin(&live.segment, 0, 7, now_ns().saturating_sub(1_000_000_000)).expect("a pair is free")
}

/// An operation that was issued and is to be timed by a pair, if it is bound.
fn issue(live: &Live, pair: EventPair) -> (u64, Binding) {
    let (ticket, slot) = live.segment.op.claim().expect("a slot is free");
    let binding = live.events.bind(pair, ticket, false);
    slot.set(op::WHAT, u64::from(kind::COLLECTIVE) << 16);
    slot.set(op::ISSUED_NS, now_ns());
    slot.set(op::TIMED, told(pair.number(), false));
    slot.publish();
    (ticket, binding)
}

fn time_of(live: &Live, ticket: u64) -> Option<u64> {
    SlotRef::of(&live.segment.op, ticket).expect("it is there").mark(op::EVENT_NS)
}

fn flaws(live: &Live, flaw: Flaw) -> u64 {
    live.segment.get(head::FLAWS + flaw as usize)
}

#[test]
fn a_number_says_which_shot_it_is() {
    for pair in [(0, 0, 0), (0, 7, 1), (POOLS - 1, PAIRS - 1, GENERATION)] {
        let pair = EventPair { pool: pair.0, index: pair.1, generation: pair.2 };
        assert_eq!(EventPair::from_number(pair.number()), Some(pair));
        assert!(pair.number() >> EventPair::NUMBER_BITS == 0);
    }
    for none in [0, EventPair::NO_NUMBER, 1 << PLACE_BITS] {
        assert_eq!(EventPair::from_number(none), None);
    }
}

#[test]
fn a_launchs_time_is_its_one_operations() {
    let live = live();
    let pair = begin(live);
    live.events.end(&live.segment, pair);
    let (ticket, binding) = issue(live, pair);
    live.events.read(&live.segment, 0);
    assert_eq!((binding, time_of(live, ticket)), (Binding::Bound, Some(500)));
    // It was read: a later one comes too late.
    assert_eq!(issue(live, pair).1, Binding::Late);
}

#[test]
fn the_time_of_several_operations_is_none_of_theirs() {
    let live = live();
    let pair = begin(live);
    live.events.end(&live.segment, pair);
    let both = [issue(live, pair), issue(live, pair)];
    live.events.read(&live.segment, 0);
    assert_eq!(both.map(|(_, b)| b), [Binding::Bound, Binding::Shared]);
    assert_eq!(both.map(|(t, _)| time_of(live, t)), [None; 2]);
    assert_eq!(flaws(live, Flaw::EventMatch), 1);
}

#[test]
fn an_operation_that_is_issued_late_gets_no_other_launchs_time() {
    let live = live();
    let late = begin(live);
    for _ in 1..PAIRS {
        begin(live);
    }
    let again = begin(live);
    assert_eq!((late.pool, late.index), (again.pool, again.index), "the pair was taken again");
    // The end of the first launch is not the second one's, nor is its operation.
    live.events.end(&live.segment, late);
    let before = issue(live, late);
    let after = issue(live, again);
    live.events.end(&live.segment, again);
    live.events.read(&live.segment, 0);
    assert_eq!((before.1, time_of(live, before.0)), (Binding::Late, None));
    assert_eq!((after.1, time_of(live, after.0)), (Binding::Bound, Some(500)));
    assert_eq!(Flaw::ALL.map(|f| flaws(live, f)), [0; Flaw::ALL.len()]);
}

#[test]
fn a_host_far_ahead_of_its_gpu_gets_pairs_as_launches_end_and_in_their_order() {
    let live = live();
    let launch = || {
        let pair = live.events.begin(&live.segment, 0, 7, now_ns().saturating_sub(1_000_000_000))?;
        live.events.end(&live.segment, pair);
        Some(issue(live, pair).0)
    };
    HAPPENED.set(0);
    let mut open: Vec<u64> = (0..PAIRS).map_while(|_| launch()).collect();
    assert_eq!((open.len(), launch()), (PAIRS, None));
    for ended in [1, 5, PAIRS - 1, PAIRS, 3] {
        HAPPENED.set(ended);
        let more: Vec<u64> = (0..PAIRS + 1).map_while(|_| launch()).collect();
        assert_eq!((more.len(), HAPPENED.get()), (ended, 0));
        let over: Vec<u64> = open.drain(..ended).collect();
        assert!(over.iter().all(|t| time_of(live, *t) == Some(500)), "the oldest ended");
        open.extend(more);
        assert!(open.iter().all(|t| time_of(live, *t).is_none()));
    }
    // A communicator that ends has the times of all that ended before.
    HAPPENED.set(usize::MAX);
    live.events.read(&live.segment, 0);
    assert!(open.iter().all(|t| time_of(live, *t) == Some(500)));
    assert_eq!(Flaw::ALL.map(|f| flaws(live, f)), [0; Flaw::ALL.len()]);
}

/// The events of a communicator, as NCCL sends them.
struct Nccl(&'static Live);

impl Nccl {
    fn start(&self, bit: u32, parent: u64, body: Body) -> u64 {
        let comm = Handle { kind: Kind::Comm, value: 0 }.pack(self.0.nonce);
        record::start(self.0, comm, &event::Event { bit, parent, rank: 0, body }).expect("recorded").handle
    }

    fn group(&self, depth: i32) -> u64 {
        self.start(bit::GROUP_API, 0, Body::GroupApi { depth, captured: false })
    }

    /// A call after a pause, which is worth timing.
    fn call(&self, group: u64) -> u64 {
        let c = crate::communicator::Comm::of(&self.0.segment, 0).expect("it is there");
        c.set(comm::CALLED_NS, 1);
        let (collective, captured) = (true, false);
        let api = Api { collective, func: 5, dtype: 8, count: 1, root: 0, stream: 7, captured, user_tag: 0 };
        self.start(bit::COLL_API, group, Body::Api(api))
    }

    /// A launch, and the operations that it carries.
    fn launch(&self, group: u64, calls: &[u64]) -> Vec<(u8, Option<u64>)> {
        let launch = self.start(bit::KERNEL_LAUNCH, group, Body::KernelLaunch { stream: 7 });
        if launch != 0 {
            record::stop(self.0, launch).expect("recorded");
        }
        let issue = |call: &u64| {
            let coll = Coll {
                comm: None,
                seq: 0,
                func: 5,
                dtype: 8,
                algo: 0,
                proto: 0,
                count: 1,
                root: 0,
                channels: 1,
                warps: 1,
                in_place: false,
                symmetric: false,
                copy_engine: false,
                plan: 0,
                user_tag: 0,
                variant: [0; 4],
                stream: 0,
            };
            self.start(bit::COLL, *call, Body::Coll(coll)) & VALUE_MASK
        };
        let tickets: Vec<u64> = calls.iter().map(issue).collect();
        self.0.events.read(&self.0.segment, 0);
        let timing = |t: &u64| {
            let told = SlotRef::of(&self.0.segment.op, *t).expect("it is there").word(op::TIMED);
            ((told & 0xff) as u8, time_of(self.0, *t))
        };
        tickets.iter().map(timing).collect()
    }
}

#[test]
fn calls_of_one_group_are_launched_together() {
    let nccl = Nccl(live());
    let (alone, together) = ((timed::EVENTS, Some(500)), (timed::NOT_ALONE, None));
    for _ in 0..3 {
        let bare = nccl.group(1);
        assert_eq!(nccl.launch(bare, &[nccl.call(bare)]), [alone]);
        let two = nccl.group(2);
        let calls = [nccl.call(two), nccl.call(two)];
        assert_eq!(nccl.launch(two, &calls), [together; 2]);
        let one = nccl.group(2);
        assert_eq!(nccl.launch(one, &[nccl.call(one)]), [alone]);
        // NCCL tells of no launch of a symmetric kernel: the next call is alone all the same.
        nccl.call(nccl.group(1));
        let bare = nccl.group(1);
        assert_eq!(nccl.launch(bare, &[nccl.call(bare)]), [alone]);
        nccl.call(nccl.group(1));
        let one = nccl.group(2);
        assert_eq!(nccl.launch(one, &[nccl.call(one)]), [alone]);
    }
}

#[test]
fn sends_and_receives_that_are_launched_together_are_timed_as_one_launch() {
    let nccl = Nccl(live());
    let transfer = |group, func: u8| {
        let c = crate::communicator::Comm::of(&nccl.0.segment, 0).expect("it is there");
        c.set(comm::CALLED_NS, 1);
        let api = Api {
            collective: false,
            func,
            dtype: 8,
            count: 1,
            root: 0,
            stream: 7,
            captured: false,
            user_tag: 0,
        };
        nccl.start(bit::P2P_API, group, Body::Api(api))
    };
    let exchange = || {
        let group = nccl.group(2);
        let calls = [SEND, RECV, SEND, RECV].map(|func| transfer(group, func));
        nccl.launch(group, &calls)
    };
    let none = (timed::NOT_ALONE, None);
    for _ in 0..3 {
        assert_eq!(exchange(), [(timed::LAUNCH, Some(500)), none, none, none]);
        // One alone has its own time.
        let group = nccl.group(2);
        assert_eq!(nccl.launch(group, &[transfer(group, SEND)]), [(timed::EVENTS, Some(500))]);
        // Collectives of one launch have no common time.
        let two = nccl.group(2);
        let calls = [nccl.call(two), nccl.call(two)];
        assert_eq!(nccl.launch(two, &calls), [none; 2]);
    }
    assert_eq!(Flaw::ALL.map(|f| flaws(nccl.0, f)), [0; Flaw::ALL.len()]);
}

#[test]
fn a_communicator_gives_back_what_it_holds_before_its_slot_is_free() {
    let live = live();
    let pair = begin(live);
    live.events.end(&live.segment, pair);
    let c = crate::communicator::Comm::of(&live.segment, 0).expect("it is there");
    let finalized = live.segment.comm.held(0).and_then(|s| s.get(comm::FINALIZED_NS)).expect("a word");
    LOOKED_AT.set((Some(finalized), u64::MAX));
    assert!(record::end(live, &c));
    assert_eq!(LOOKED_AT.get().1, 0, "its events were read while it had the slot");
    assert!(finalized.get() != 0 && !record::end(live, &c));
}
