//! The price of a callback in instructions, counted by Valgrind: a gate that no noise of a machine moves.
//!
//! The same calls are made eight thousand and sixteen thousand times; the difference is what eight thousand cost, and the ways
//! to them fall out.

#![allow(unsafe_code, reason = "plays NCCL's part of a C interface")]
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

mod support;

use ringwatch_wire::tuning::{
    ALGORITHMS, ALL_ENTRIES, ANY_PIPE_OPS, CANDIDATES, ROWS_MAX, Registered, Row, entries_of, entry,
};
use std::path::Path;
use std::process::{Command, Stdio};
use support::bare::Bare;
use support::library::{Plugin, plugin_library};
use support::trace::{self, Executed, Price};
use support::tuner::{Asked, Tuner};

/// The kinds of operations that are counted, and their limits. A group has two collectives, a pair a send and a receive.
const GATES: [(&str, u64); 5] =
    [("kernel", 265), ("coll", 470), ("with-handles", 1340), ("group", 1430), ("pair", 1435)];

/// The limits of a bare collective.
struct Limit {
    detail: &'static str,
    instructions: u64,
    locked: u64,
    counter_reads: u64,
    code_lines: u64,
    data_lines: usize,
}

/// With GPU times (the launch is an event as well) and without.
const LIMITS: [Limit; 2] = [
    // A call that Valgrind interrupts is one after a pause, and has a record.
    Limit { detail: "auto", instructions: 560, locked: 1, counter_reads: 1, code_lines: 30, data_lines: 12 },
    Limit { detail: "calls", instructions: 415, locked: 0, counter_reads: 1, code_lines: 26, data_lines: 12 },
];
/// Calls before and between the marks, where data lines are counted.
const FIRST: u64 = 100;
const TRACED: u64 = 100;
/// Questions to the tuner, with as many rules as a table may have: how many instructions an answer may have, and how many
/// it has at least.
const TUNER_GATES: [(&str, u64, u64); 5] = [
    ("tuner-off", 26, 2),
    ("tuner-none", 300, 20),
    ("tuner-prefer", 300, 20),
    ("tuner-forbid", 300, 20),
    ("tuner-protocol", 300, 20),
];
/// The ways to the first time differ by a few thousand instructions from run to run: of so many times that is less than one each.
const TIMES: u64 = 8192;
const WHAT: &str = "RINGWATCH_COUNT_WHAT";
const HOW_OFTEN: &str = "RINGWATCH_COUNT_TIMES";

/// In the child: the calls.
fn make_calls(what: &str, times: u64) {
    let plugin = Plugin::built();
    let always = matches!(what, "coll" | "kernel");
    let context = if always { plugin.init(5, 7).context } else { plugin.init_switched(7) };
    let mut bare = Bare::new(&plugin, context);
    match what {
        "with-handles" => bare.capture(),
        _ => bare.in_plan(),
    }
    let coll = bare.coll();
    for _ in 0..times {
        match what {
            "coll" => {
                bare.coll();
            }
            "kernel" => bare.kernel(coll),
            "group" => bare.group(),
            "pair" => bare.pair(),
            what => {
                bare.call(what == "auto");
            }
        }
    }
}

/// In the child: bare calls, each between two marks.
fn make_marked_calls(detail: &str) {
    let plugin = Plugin::built();
    let mut bare = Bare::new(&plugin, plugin.init_switched(7));
    for _ in 0..FIRST {
        bare.call(detail == "auto");
    }
    trace::announce();
    for _ in 0..TRACED {
        bare.call(detail == "auto");
        trace::mark();
    }
}

/// In the child: the tuner's answers.
fn ask_tuner(what: &str, times: u64) {
    let (tuner, plugin) = (Tuner::built(), Plugin::built());
    // Two ranks of this process agree with each other.
    std::thread::scope(|s| {
        let rank = |rank| {
            plugin.init_with(5, 7, c"pg", 2, rank, None);
            tuner.init(5, 7, 2, 1, None).1
        };
        let other = s.spawn(move || rank(1));
        let context = rank(0);
        other.join().unwrap();
        let bytes = match what {
            "tuner-prefer" => PREFER,
            "tuner-forbid" => FORBID,
            "tuner-protocol" => PROTOCOL,
            _ => 0,
        };
        let context = if what == "tuner-off" { 0 } else { context };
        let costs = Asked::all_reduce(bytes);
        let mut asked = costs.clone();
        for _ in 0..times {
            asked.costs.copy_from_slice(&costs.costs);
            tuner.ask(5, context, &mut asked);
        }
        let changed = asked.costs != costs.costs;
        assert_eq!(changed, !matches!(what, "tuner-off" | "tuner-none"), "{what}");
    });
}

/// A size with one preferred entry.
const PREFER: usize = 1_000_000;
/// A size whose last rule forbids all entries but one.
const FORBID: usize = 2_000_000;
/// A size whose last rule prefers a protocol, whatever the algorithm.
const PROTOCOL: usize = 3_000_000;

/// As many rules as there may be for one collective, of the sizes 1 and up, 4 KiB each.
fn many_rules() -> Vec<Row> {
    let row = |n: u64| Row {
        min_bytes: n * 4096 + 1,
        max_bytes: (n + 1) * 4096,
        min_ranks: 0,
        max_ranks: u32::MAX,
        min_nodes: 0,
        max_nodes: u32::MAX,
        prefer: entry(1, 0),
        forbid: 0,
        pipe_ops: ANY_PIPE_OPS,
        collective: 4,
        channels: 4,
        registered: Registered::Any,
    };
    // Of the dearest sizes all rules but the last are impossible, as NVLS is here.
    let impossible = Row { prefer: entries_of(4), ..row(0) };
    let last_of = |bytes: usize| match bytes {
        FORBID => Row { prefer: 0, forbid: ALL_ENTRIES & !entry(1, 0), ..row(0) },
        _ => Row { prefer: (0..ALGORITHMS).map(|a| entry(a, 2)).fold(0, |all, e| all | e), ..row(0) },
    };
    let mut rows = Vec::new();
    for n in 0..(ROWS_MAX - 2 * (CANDIDATES - 1)) as u64 {
        let range = row(n);
        let dear = [FORBID, PROTOCOL].into_iter().find(|b| *b as u64 / 4096 == n);
        let with_range = |r: Row| Row { min_bytes: range.min_bytes, max_bytes: range.max_bytes, ..r };
        match dear {
            Some(bytes) => {
                rows.extend([with_range(impossible); CANDIDATES - 1]);
                rows.push(with_range(last_of(bytes)));
            }
            None => rows.push(range),
        }
    }
    rows
}

/// The child that does `what` so often.
fn child(test: &str, dir: &Path, what: &str, times: u64) -> Command {
    let mut child = Command::new(std::env::current_exe().unwrap());
    child
        .args(["--exact", test, "--test-threads=1", "--nocapture"])
        .env(WHAT, what)
        .env(HOW_OFTEN, times.to_string())
        .env("RINGWATCH_PLUGIN_SO", plugin_library())
        .env("RINGWATCH_DIR", dir)
        .env(
            "RINGWATCH_DETAIL",
            if matches!(what, "calls" | "with-handles" | "group" | "pair") { "calls" } else { "auto" },
        )
        // Valgrind's calls are so slow that all would be timed.
        .env("RINGWATCH_OVERHEAD_BUDGET", "0.0001%")
        .env("RINGWATCH_TUNE", dir.join("rules"));
    child
}

fn executed(test: &str, dir: &Path, what: &str, times: u64) -> Executed {
    let counts = if what.starts_with("tuner") { is_of_answer } else { is_of_callback };
    trace::executed(&mut child(test, dir, what, times), &dir.join("callgrind.out"), counts)
}

/// The clock is tied anew by time, which is the machine's and not the callback's.
fn is_of_callback(function: &str) -> bool {
    !(function.contains("clock") && function.contains("asked"))
}

/// The ranks' agreement polls, and so takes as long as it takes.
fn is_of_answer(function: &str) -> bool {
    ["get_coll_info", "decision", "context", "partition_point"].iter().any(|name| function.contains(name))
}

/// True where Valgrind is there; otherwise the test counts as skipped.
fn can_count(test: &str) -> bool {
    let there =
        Command::new("valgrind").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    let can = there.is_ok_and(|s| s.success());
    if !can {
        support::skip::skipped(test, "valgrind");
    }
    can
}

/// The price of one time.
fn price(test: &str, dir: &Path, what: &str) -> Price {
    let run = |times| executed(test, dir, what, times);
    Price::of(&run(TIMES), &run(2 * TIMES), TIMES)
}

#[test]
fn callbacks_cost_few_instructions() {
    let test = "callbacks_cost_few_instructions";
    if let Ok(what) = std::env::var(WHAT) {
        return make_calls(&what, std::env::var(HOW_OFTEN).unwrap().parse().unwrap());
    }
    if !can_count(test) {
        return;
    }
    let dir = tempfile::Builder::new().tempdir_in("/dev/shm").unwrap();
    for (what, most) in GATES {
        let each = price(test, dir.path(), what).instructions;
        eprintln!("{what}: {each} instructions, at most {most}");
        assert!(each <= most, "{what}: {each} instructions, more than {most}");
        assert!(each > 20, "{what}: {each} instructions: nothing was counted");
    }
}

#[test]
fn a_bare_collective_stays_within_its_limits() {
    let test = "a_bare_collective_stays_within_its_limits";
    if let Ok(what) = std::env::var(WHAT) {
        return match std::env::var(HOW_OFTEN).unwrap().parse().unwrap() {
            0 => make_marked_calls(&what),
            times => make_calls(&what, times),
        };
    }
    if !can_count(test) {
        return;
    }
    let dir = tempfile::Builder::new().tempdir_in("/dev/shm").unwrap();
    // Lackey's calls are so slow that each comes after a pause: their lines are counted where that makes no difference.
    let data_lines = trace::data_lines(&mut child(test, dir.path(), "calls", 0));
    for limit in LIMITS {
        let price = price(test, dir.path(), limit.detail);
        eprintln!("{}: {price:?}, {data_lines} lines of data", limit.detail);
        assert!(price.instructions > 20 && data_lines > 2, "nothing was counted");
        assert!(price.instructions <= limit.instructions, "instructions");
        assert!(price.locked <= limit.locked, "locked instructions");
        assert!(price.counter_reads <= limit.counter_reads, "reads of the counter");
        assert!(price.code_lines <= limit.code_lines, "lines of code");
        assert!(data_lines <= limit.data_lines, "lines of data");
    }
}

#[test]
fn the_tuner_answers_in_300_instructions() {
    let test = "the_tuner_answers_in_300_instructions";
    if let Ok(what) = std::env::var(WHAT) {
        return ask_tuner(&what, std::env::var(HOW_OFTEN).unwrap().parse().unwrap());
    }
    if !can_count(test) {
        return;
    }
    let dir = tempfile::Builder::new().tempdir_in("/dev/shm").unwrap();
    support::tuner::write_rules(&dir.path().join("rules"), &many_rules());
    for (what, most, least) in TUNER_GATES {
        let each = price(test, dir.path(), what).instructions;
        eprintln!("{what}: {each} instructions, at most {most}");
        assert!(each <= most, "{what}: {each} instructions, more than {most}");
        assert!(each >= least, "{what}: {each} instructions: nothing was counted");
    }
}
