//! The slot, mark and opening protocols under every interleaving and every outcome that the memory model
//! allows, with no preemption bound. Run by
//! `RUSTFLAGS="--cfg loom" cargo test -p ringwatch-wire --test loom --release --target-dir target/loom`.

#![cfg(loom)]
#![allow(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "the plugin's bans are not its tests'"
)]
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

use loom::sync::Arc;
use loom::thread;
use ringwatch_wire::codes::Loss;
use ringwatch_wire::layout::{Geometry, head};
use ringwatch_wire::lines::{self, LineRing};
use ringwatch_wire::reader::{OpenError, Reader};
use ringwatch_wire::ring::{Ring, Segment};
use ringwatch_wire::sync::{self, Seen, Word};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Stamp and at most two words.
const STRIDE: usize = 3;
/// Two slots: tickets 0 and 2 share the first.
const SHIFT: u32 = 1;

struct Tiny<const W: usize = STRIDE> {
    words: Vec<Word>,
    next: Word,
}

impl<const W: usize> Tiny<W> {
    fn new() -> Self {
        Tiny { words: (0..W << SHIFT).map(|_| Word::new(0)).collect(), next: Word::new(0) }
    }

    fn ring(&self) -> Ring<'_, W> {
        Ring::new(&self.words, Some(&self.next), SHIFT)
    }

    /// The slot of tickets 0, 2, 4.
    fn slot(&self) -> &[Word; W] {
        self.ring().slot(0).unwrap()
    }

    fn mark_word(&self) -> &Word {
        &self.slot()[1]
    }

    /// Takes the next ticket and writes `value` into both words.
    fn write(&self, value: u64) -> Result<u64, Loss> {
        let (ticket, claim) = self.ring().claim()?;
        claim.set(1, value);
        claim.set(2, value);
        claim.publish();
        Ok(ticket)
    }

    /// Where loom is to try both orders. It remembers one last access of a word alone, so that a load by one
    /// thread is forgotten when another loads before it swaps; additions to one word it always tries both
    /// ways. Relaxed, it orders nothing else.
    fn turn(&self) {
        self.next.add(0);
    }

    fn read(&self) -> (Seen, [u64; W]) {
        self.turn();
        let mut out = [0; W];
        let seen = sync::read(self.slot(), &mut out);
        (seen, out)
    }
}

/// Runs a model without any bound on preemptions, and counts what its readers met, so that a model in which
/// nothing interesting can happen is found out.
fn explore(name: &str, met: &'static Met, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = None;
    builder.max_branches = 100_000;
    let runs = Count::default();
    let counted = runs.clone();
    let begun = std::time::Instant::now();
    builder.check(move || {
        counted.fetch_add(1, Ordering::Relaxed);
        model();
    });
    eprintln!("{name}: {} executions in {:?}", runs.load(Ordering::Relaxed), begun.elapsed());
    let seen = met.seen.lock().unwrap();
    for what in met.wanted {
        let times = seen.iter().filter(|s| *s == what).count();
        eprintln!("{name}: met `{what}` {times} times");
        assert!(times > 0, "{name}: no execution met `{what}`");
    }
}

type Count = std::sync::Arc<AtomicUsize>;

/// The states that a model's readers must meet in some execution.
struct Met {
    wanted: &'static [&'static str],
    seen: Mutex<Vec<&'static str>>,
}

impl Met {
    const fn of(wanted: &'static [&'static str]) -> Self {
        Met { wanted, seen: Mutex::new(Vec::new()) }
    }

    fn meet(&self, what: &'static str) {
        assert!(self.wanted.contains(&what), "{what} is not awaited");
        self.seen.lock().unwrap().push(what);
    }
}

#[test]
fn a_whole_read_is_never_torn_while_a_slot_is_reused() {
    static MET: Met = Met::of(&["empty", "busy", "first", "later"]);
    explore("reuse", &MET, || {
        let t = Arc::new(Tiny::<STRIDE>::new());
        let w = t.clone();
        let writer = thread::spawn(move || {
            assert_eq!(w.write(10), Ok(0));
            assert_eq!(w.write(11), Ok(1));
            assert_eq!(w.write(12), Ok(2));
        });
        match t.read() {
            (Seen::Whole(0), out) => {
                assert_eq!(out[1..], [10, 10]);
                MET.meet("first");
            }
            (Seen::Whole(2), out) => {
                assert_eq!(out[1..], [12, 12]);
                MET.meet("later");
            }
            (Seen::Whole(other), _) => panic!("ticket {other} never had this slot"),
            (Seen::Busy, _) => MET.meet("busy"),
            (Seen::Empty, _) => MET.meet("empty"),
        }
        writer.join().unwrap();
        assert_eq!(t.read().0, Seen::Whole(2));
    });
}

#[test]
fn a_slot_written_again_is_seen_before_or_after_never_between() {
    static MET: Met = Met::of(&["before", "after", "busy"]);
    explore("again", &MET, || {
        let t = Arc::new(Tiny::<STRIDE>::new());
        t.write(10).unwrap();
        let w = t.clone();
        let writer = thread::spawn(move || {
            w.turn();
            let again = w.ring().claim_again(0).unwrap();
            again.set(1, 20);
            again.set(2, 20);
            again.publish();
        });
        let mut newest = 0;
        for _ in 0..2 {
            match t.read() {
                (Seen::Whole(0), out) => {
                    let [stamp, a, b] = out;
                    assert_eq!(a, b);
                    // Version 1 was published first; the bits above `busy` count.
                    assert_eq!(stamp >> 1 & 0x7fff, a / 10, "the stamp's version names the words");
                    assert!(a >= newest, "a reader never goes back");
                    newest = a;
                    MET.meet(if a == 10 { "before" } else { "after" });
                }
                (Seen::Busy, _) => MET.meet("busy"),
                other => panic!("{other:?}"),
            }
        }
        writer.join().unwrap();
    });
}

#[test]
fn a_ticket_keeps_its_slot_while_it_is_written_again_and_loses_it_to_a_later_one() {
    static MET: Met = Met::of(&["kept", "lost"]);
    explore("holds", &MET, || {
        let t = Arc::new(Tiny::<2>::new());
        sync::claim_new(t.slot(), 0).unwrap().publish();
        let w = t.clone();
        let writer = thread::spawn(move || {
            w.turn();
            w.ring().claim_again(0).unwrap().publish();
            w.next.add(1);
            sync::claim_new(w.slot(), 2).unwrap().publish();
        });
        t.turn();
        let before = t.next.add(0);
        if sync::holds(t.slot(), 0) {
            MET.meet("kept");
        } else {
            MET.meet("lost");
            assert!(t.next.add(0) == 1, "lost while it was only written again (after {before})");
        }
        assert!(!sync::holds(t.slot(), 1));
        writer.join().unwrap();
        assert!(sync::holds(t.slot(), 2) && !sync::holds(t.slot(), 0));
    });
}

#[test]
fn two_writers_of_one_slot_never_mix() {
    static MET: Met = Met::of(&["both", "only_first", "only_later"]);
    explore("two writers", &MET, || {
        let t = Arc::new(Tiny::<STRIDE>::new());
        let write = |ticket: u64| {
            let t = t.clone();
            thread::spawn(move || {
                t.turn();
                let Some(claim) = sync::claim_new(t.slot(), ticket) else { return false };
                claim.set(1, 10 + ticket);
                claim.set(2, 10 + ticket);
                claim.publish();
                true
            })
        };
        let (first, later) = (write(0), write(2));
        if let (Seen::Whole(ticket), out) = t.read() {
            assert_eq!(out[1..], [10 + ticket, 10 + ticket]);
        }
        let (first, later) = (first.join().unwrap(), later.join().unwrap());
        let (seen, out) = t.read();
        let has = if later { 2 } else { 0 };
        assert!(first || later, "somebody gets it");
        assert_eq!(seen, Seen::Whole(has));
        assert_eq!(out[1..], [10 + has, 10 + has]);
        MET.meet(if first && later {
            "both"
        } else if first {
            "only_first"
        } else {
            "only_later"
        });
    });
}

/// Ticket 0 has the slot; a thread that still believes so marks it, by `stale`, while ticket 2 takes it and
/// marks it 9. Both read afterwards: a third thread to read takes loom from seconds to a quarter of an hour.
fn stale_marker(name: &str, met: &'static Met, stale: fn(&Tiny<2>)) {
    explore(name, met, move || {
        let t = Arc::new(Tiny::<2>::new());
        let (old, new) = (t.ring().lap(0), t.ring().lap(2));
        let look = move |t: &Tiny<2>| {
            let (seen, out) = t.read();
            match seen {
                Seen::Whole(0) => match sync::marked(out[1], old) {
                    None => {}
                    Some(7) => met.meet("own"),
                    other => panic!("the old lap reads {other:?}"),
                },
                Seen::Whole(2) => match sync::marked(out[1], new) {
                    None => met.meet("absent"),
                    Some(9) => met.meet("present"),
                    other => panic!("the new lap reads {other:?}"),
                },
                _ => {}
            }
        };
        sync::claim_new(t.slot(), 0).unwrap().publish();
        let s = t.clone();
        let sleeper = thread::spawn(move || {
            stale(&s);
            look(&s);
        });
        t.turn();
        let claim = sync::claim_new(t.slot(), 2).unwrap();
        claim.set(1, 0);
        claim.publish();
        t.mark_word().set(sync::mark(new, 9));
        look(&t);
        sleeper.join().unwrap();
        let last = sync::marked(t.mark_word().get(), new);
        assert!(matches!(last, None | Some(9)), "{last:?}");
    });
}

#[test]
fn a_stale_mark_is_never_read_by_the_next_lap() {
    static MET: Met = Met::of(&["own", "absent", "present"]);
    stale_marker("stale mark", &MET, |t| {
        sync::mark_set(t.mark_word(), t.ring().lap(0), 7, || sync::holds(t.slot(), 0));
    });
}

#[test]
fn a_stale_mark_put_is_never_read_by_the_next_lap() {
    static MET: Met = Met::of(&["own", "absent", "present"]);
    stale_marker("stale mark_put", &MET, |t| {
        if sync::holds(t.slot(), 0) {
            sync::mark_put(t.mark_word(), t.ring().lap(0), 7);
        }
    });
}

#[test]
fn a_stale_mark_once_is_never_read_by_the_next_lap() {
    static MET: Met = Met::of(&["own", "absent", "present"]);
    stale_marker("stale mark_once", &MET, |t| {
        sync::mark_once(t.mark_word(), t.ring().lap(0), 7, || sync::holds(t.slot(), 0));
    });
}

#[test]
fn a_stale_mark_add_is_never_read_by_the_next_lap() {
    static MET: Met = Met::of(&["own", "absent", "present"]);
    stale_marker("stale mark_add", &MET, |t| {
        sync::mark_add(t.mark_word(), t.ring().lap(0), 7, || sync::holds(t.slot(), 0));
    });
}

#[test]
fn a_stale_mark_add_takes_nothing_from_the_next_laps_count() {
    static MET: Met = Met::of(&["counted"]);
    explore("stale mark_add, count", &MET, || {
        let t = Arc::new(Tiny::<2>::new());
        sync::claim_new(t.slot(), 0).unwrap().publish();
        let s = t.clone();
        let sleeper = thread::spawn(move || {
            sync::mark_add(s.mark_word(), s.ring().lap(0), 7, || sync::holds(s.slot(), 0))
        });
        let new = t.ring().lap(2);
        // The word is 0 still, so it is not emptied here: loom does not hold a swap to follow what it read
        // directly, and lets a swap of the 0 before land behind a plain store of 0.
        sync::claim_new(t.slot(), 2).unwrap().publish();
        let add = || sync::mark_add(t.mark_word(), new, 1, || sync::holds(t.slot(), 2));
        let sum = u64::from(add()) + u64::from(add());
        sleeper.join().unwrap();
        assert_eq!(sync::marked(t.mark_word().get(), new), Some(sum));
        MET.meet("counted");
    });
}

#[test]
fn a_stale_mark_spoils_nothing_that_the_next_lap_has_set() {
    static MET: Met = Met::of(&["kept"]);
    explore("stale marks, value", &MET, || {
        let t = Arc::new(Tiny::<2>::new());
        sync::claim_new(t.slot(), 0).unwrap().publish();
        let s = t.clone();
        let sleeper = thread::spawn(move || {
            sync::mark_set(s.mark_word(), s.ring().lap(0), 7, || sync::holds(s.slot(), 0));
        });
        let new = t.ring().lap(2);
        sync::claim_new(t.slot(), 2).unwrap().publish();
        let held = || sync::holds(t.slot(), 2);
        let first = sync::mark_once(t.mark_word(), new, 9, held);
        let second = sync::mark_once(t.mark_word(), new, 8, held);
        sleeper.join().unwrap();
        assert!(first && !second, "set once, and only once");
        assert_eq!(sync::marked(t.mark_word().get(), new), Some(9));
        MET.meet("kept");
    });
}

#[test]
fn additions_of_two_threads_add_up() {
    static MET: Met = Met::of(&["both"]);
    explore("two adders", &MET, || {
        let t = Arc::new(Tiny::<2>::new());
        sync::claim_new(t.slot(), 0).unwrap().publish();
        let lap = t.ring().lap(0);
        let add = |n: u64| {
            let t = t.clone();
            thread::spawn(move || {
                let done = sync::mark_add(t.mark_word(), lap, n, || sync::holds(t.slot(), 0));
                if done { n } else { 0 }
            })
        };
        let (a, b) = (add(1), add(1 << 16));
        let sum = a.join().unwrap() + b.join().unwrap();
        assert_eq!(sync::marked(t.mark_word().get(), lap), (sum != 0).then_some(sum));
        if sum == 1 | 1 << 16 {
            MET.meet("both");
        }
    });
}

/// A ring of two lines.
struct TinyLines {
    head: lines::Head,
    lines: Vec<lines::Line>,
    /// Where loom is to try both orders, see [`Tiny::turn`].
    turn: Word,
}

impl TinyLines {
    fn new() -> Self {
        let line = || std::array::from_fn(|_| Word::new(0));
        TinyLines {
            head: std::array::from_fn(|_| Word::new(0)),
            lines: (0..1 << SHIFT).map(|_| line()).collect(),
            turn: Word::new(0),
        }
    }

    fn ring(&self) -> LineRing<'_> {
        LineRing::new(&self.head, &self.lines, SHIFT)
    }

    fn call(&self, ticket: u64) {
        let n = 10 + ticket;
        let call = lines::Call { what: n, count: n, called_ns: n, stream: n };
        lines::call(&self.head, self.ring().line(ticket).unwrap(), ticket, &call);
    }

    fn issue(&self, ticket: u64) {
        let n = 20 + ticket;
        let issue = lines::Issue { seq: n, order: n, issue: n };
        lines::issue(self.ring().line(ticket).unwrap(), self.ring().lap(ticket), &issue);
    }

    /// The line of tickets 0 and 2.
    fn read(&self) -> (Seen, [u64; 8]) {
        self.turn.add(0);
        let mut out = [0; 8];
        let seen = sync::read(self.ring().line(0).unwrap(), &mut out);
        (seen, out)
    }
}

/// Writes a slot as the one thread that ever does: with plain stores.
fn write_alone<const W: usize>(t: &Tiny<W>, ticket: u64, value: u64) {
    let stamp = sync::begin_alone(t.slot(), ticket);
    t.slot()[1..].iter().for_each(|w| w.set(value));
    sync::publish_alone(t.slot(), stamp);
}

#[test]
fn a_slot_of_plain_stores_is_never_torn() {
    static MET: Met = Met::of(&["empty", "busy", "first", "later"]);
    explore("alone", &MET, || {
        let t = Arc::new(Tiny::<STRIDE>::new());
        let w = t.clone();
        let writer = thread::spawn(move || {
            w.turn();
            write_alone(&w, 0, 10);
            write_alone(&w, 2, 12);
        });
        match t.read() {
            (Seen::Whole(ticket @ (0 | 2)), out) => {
                assert_eq!(out[1..], [10 + ticket; 2]);
                MET.meet(if ticket == 0 { "first" } else { "later" });
            }
            (Seen::Whole(other), _) => panic!("ticket {other} never had this slot"),
            (Seen::Busy, _) => MET.meet("busy"),
            (Seen::Empty, _) => MET.meet("empty"),
        }
        writer.join().unwrap();
        assert_eq!(t.read().0, Seen::Whole(2));
    });
}

/// A call's mark is its own or absent, also once its line has another call's.
#[test]
fn an_issue_in_a_line_is_of_its_own_call() {
    static MET: Met = Met::of(&["called", "issued", "next"]);
    explore("issue", &MET, || {
        let t = Arc::new(Tiny::<2>::new());
        write_alone(&t, 0, 0);
        let w = t.clone();
        let writer = thread::spawn(move || {
            w.turn();
            sync::mark_put(w.mark_word(), w.ring().lap(0), 7);
            write_alone(&w, 2, 0);
        });
        if let (Seen::Whole(ticket), out) = t.read() {
            match (ticket, sync::marked(out[1], t.ring().lap(ticket))) {
                (0, None) => MET.meet("called"),
                (0, Some(7)) => MET.meet("issued"),
                (2, None) => MET.meet("next"),
                other => panic!("{other:?}"),
            }
        }
        writer.join().unwrap();
    });
}

/// A call that several threads want to issue is issued by one, and its marks are that one's.
#[test]
fn a_call_in_a_line_is_taken_by_one_thread() {
    static MET: Met = Met::of(&["first", "second"]);
    explore("taken call", &MET, || {
        let t = Arc::new(TinyLines::new());
        t.call(0);
        let issue = |value: u64| {
            let t = t.clone();
            thread::spawn(move || {
                let line = t.ring().line(0).unwrap();
                let taken = lines::is_pending(line) && lines::take_call(line);
                if taken {
                    let issue = lines::Issue { seq: value, order: value, issue: value };
                    lines::issue(line, t.ring().lap(0), &issue);
                }
                taken
            })
        };
        let (first, second) = (issue(1), issue(2));
        let marks = |out: [u64; 8]| [5, 6, 7].map(|i: usize| sync::marked(out[i], t.ring().lap(0)));
        // The last mark is there only behind the others, or is absent: it is read after them.
        if let [_, _, Some(issue)] = marks(t.read().1) {
            assert!(issue == 1 || issue == 2);
        }
        let (first, second) = (first.join().unwrap(), second.join().unwrap());
        assert!(first != second, "exactly one takes it");
        let value = if first { 1 } else { 2 };
        assert_eq!(marks(t.read().1), [Some(value); 3]);
        MET.meet(if first { "first" } else { "second" });
    });
}

/// The line of a launch is never taken for a call.
#[test]
fn a_launch_in_a_line_is_no_pending_call() {
    let launch = || {
        let t = TinyLines::new();
        let call = lines::Call { what: 0, count: 0, called_ns: 5, stream: 0 };
        lines::launch(&t.head, t.ring().line(0).unwrap(), 0, &call);
        let line = t.ring().line(0).unwrap();
        assert!(!lines::is_pending(line) && !lines::take_call(line));
        assert_eq!(t.ring().next(), 1);
    };
    loom::model(launch);
}

/// The next ticket names a line only when it is there, or was there.
#[test]
fn a_ring_of_lines_names_no_line_before_it_is_whole() {
    static MET: Met = Met::of(&["none", "one"]);
    explore("next line", &MET, || {
        let t = Arc::new(TinyLines::new());
        let w = t.clone();
        let writer = thread::spawn(move || {
            w.turn.add(0);
            w.call(0);
        });
        t.turn.add(0);
        if t.ring().next() == 1 {
            assert_eq!(t.read().0, Seen::Whole(0));
            MET.meet("one");
        } else {
            MET.meet("none");
        }
        writer.join().unwrap();
    });
}

/// Two threads want one ring of lines: one gets it, and the other goes to the shared ring.
#[test]
fn a_ring_of_lines_belongs_to_one_thread() {
    static MET: Met = Met::of(&["first", "second"]);
    explore("owner", &MET, || {
        let t = Arc::new((TinyLines::new(), Tiny::<STRIDE>::new()));
        let record = |thread: u64| {
            let t = t.clone();
            thread::spawn(move || {
                let own = lines::take(&t.0.head, thread);
                if own {
                    t.0.call(0);
                    t.0.issue(0);
                } else {
                    t.1.write(thread).unwrap();
                }
                assert_eq!(lines::take(&t.0.head, thread), own, "it stays so");
                own
            })
        };
        let (first, second) = (record(1), record(2));
        let (first, second) = (first.join().unwrap(), second.join().unwrap());
        assert!(first != second, "exactly one gets it");
        MET.meet(if first { "first" } else { "second" });
        let (seen, out) = t.0.read();
        assert_eq!((seen, &out[1..5]), (Seen::Whole(0), &[10; 4][..]));
        let other = if first { 2 } else { 1 };
        assert_eq!(t.1.read().1[1..], [other, other]);
    });
}

#[test]
fn a_segment_that_opens_is_whole() {
    static MET: Met = Met::of(&["not_ready", "open"]);
    explore("opening", &MET, || {
        let geometry = Geometry::new([0; 5]);
        let words: Vec<Word> = (0..geometry.bytes() / 8).map(|_| Word::new(0)).collect();
        let words = Arc::new(words);
        let w = words.clone();
        let writer = thread::spawn(move || {
            let segment = Segment::new(&w, &geometry);
            segment.format(&geometry);
            segment.set(head::NONCE, 77);
            segment.open_for_readers();
        });
        match Reader::open(&words) {
            Ok(reader) => {
                assert_eq!(reader.header(head::NONCE), 77);
                MET.meet("open");
            }
            Err(OpenError::NotReady) => MET.meet("not_ready"),
            Err(other) => panic!("{other:?}"),
        }
        writer.join().unwrap();
    });
}
