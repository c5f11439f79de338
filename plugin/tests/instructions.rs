//! The price of a callback in instructions, counted by Valgrind: a gate that no noise of a machine moves.
//!
//! The same calls are made a thousand and two thousand times; the difference is what a thousand cost, and the ways
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
use support::tuner::{Asked, Tuner};

/// What is counted, and how much of it there may be.
const GATES: [(&str, u64); 4] = [("kernel", 250), ("coll", 400), ("call", 1200), ("call-and-launch", 1300)];
/// Questions to the tuner, with as many rules as a table may have: how many instructions an answer may have, and how many
/// it has at least.
const TUNER_GATES: [(&str, u64, u64); 5] = [
    ("tuner-off", 24, 2),
    ("tuner-none", 300, 20),
    ("tuner-prefer", 300, 20),
    ("tuner-forbid", 300, 20),
    ("tuner-protocol", 300, 20),
];
const TIMES: u64 = 1000;
const WHAT: &str = "RINGWATCH_COUNT_WHAT";
const HOW_OFTEN: &str = "RINGWATCH_COUNT_TIMES";

/// In the child: the calls.
fn make_calls(what: &str, times: u64) {
    let plugin = Plugin::built();
    let mut bare = Bare::new(&plugin, plugin.init(5, 7).context);
    let coll = bare.coll();
    for _ in 0..times {
        match what {
            "coll" => {
                bare.coll();
            }
            "kernel" => bare.kernel(coll),
            "call" => {
                bare.call(false);
            }
            _ => {
                bare.call(true);
            }
        }
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

fn instructions(test: &str, dir: &Path, what: &str, times: u64) -> u64 {
    let out = dir.join("callgrind.out");
    let ran = Command::new("valgrind")
        .args(["--tool=callgrind", "--compress-strings=no", "--compress-pos=no"])
        .arg(format!("--callgrind-out-file={}", out.display()))
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", test, "--test-threads=1", "--nocapture"])
        .env(WHAT, what)
        .env(HOW_OFTEN, times.to_string())
        .env("RINGWATCH_PLUGIN_SO", plugin_library())
        .env("RINGWATCH_DIR", dir)
        .env("RINGWATCH_TUNE", dir.join("rules"))
        .output()
        .unwrap();
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    let counts = if what.starts_with("tuner") { is_of_answer } else { is_of_callback };
    own(&std::fs::read_to_string(&out).unwrap(), counts)
}

/// The clock is tied anew by time, which is the machine's and not the callback's.
fn is_of_callback(function: &str) -> bool {
    !(function.contains("clock") && function.contains("asked"))
}

/// The ranks' agreement polls, and so takes as long as it takes.
fn is_of_answer(function: &str) -> bool {
    ["get_coll_info", "decision", "context", "partition_point"].iter().any(|name| function.contains(name))
}

/// Instructions of the library's own functions, as far as they count, from callgrind's file: lines of `position cost` under
/// the object that an `ob=` line names; the line after `calls=` holds what the called function cost.
fn own(text: &str, counts: fn(&str) -> bool) -> u64 {
    let library = plugin_library().file_name().unwrap().to_str().unwrap();
    let (mut ours, mut counted, mut of_call, mut sum) = (false, false, false, 0);
    for line in text.lines() {
        if let Some(object) = line.strip_prefix("ob=") {
            ours = object.ends_with(library);
        } else if let Some(function) = line.strip_prefix("fn=") {
            counted = counts(function);
        } else if line.starts_with("calls=") {
            of_call = true;
        } else if let Some((_, cost)) =
            line.split_once(' ').filter(|_| line.starts_with(|c: char| c.is_ascii_digit()))
        {
            if ours && counted && !of_call {
                sum += cost.trim().parse::<u64>().unwrap();
            }
            of_call = false;
        }
    }
    sum
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

/// Instructions of one time, by the difference between many and twice as many.
fn each(test: &str, dir: &Path, what: &str) -> u64 {
    let count = |times| instructions(test, dir, what, times);
    (count(2 * TIMES) - count(TIMES)) / TIMES
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
        let each = each(test, dir.path(), what);
        eprintln!("{what}: {each} instructions, at most {most}");
        assert!(each <= most, "{what}: {each} instructions, more than {most}");
        assert!(each > 20, "{what}: {each} instructions: nothing was counted");
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
        let each = each(test, dir.path(), what);
        eprintln!("{what}: {each} instructions, at most {most}");
        assert!(each <= most, "{what}: {each} instructions, more than {most}");
        assert!(each >= least, "{what}: {each} instructions: nothing was counted");
    }
}
