//! The price of a callback in instructions, counted by Valgrind: a gate that no noise of a machine moves.
//!
//! The same calls are made a thousand and two thousand times; the difference is what a thousand cost, and the ways
//! to them fall out.

#![allow(unsafe_code, reason = "plays NCCL's part of a C interface")]
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

mod support;

use std::path::Path;
use std::process::{Command, Stdio};
use support::bare::Bare;
use support::library::{Plugin, plugin_library};

/// What is counted, and how much of it there may be.
const GATES: [(&str, u64); 4] = [("kernel", 250), ("coll", 400), ("call", 1200), ("call-and-launch", 1300)];
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

fn instructions(dir: &Path, what: &str, times: u64) -> u64 {
    let out = dir.join("callgrind.out");
    let ran = Command::new("valgrind")
        .args(["--tool=callgrind", "--compress-strings=no", "--compress-pos=no"])
        .arg(format!("--callgrind-out-file={}", out.display()))
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "callbacks_cost_few_instructions", "--test-threads=1", "--nocapture"])
        .env(WHAT, what)
        .env(HOW_OFTEN, times.to_string())
        .env("RINGWATCH_PLUGIN_SO", plugin_library())
        .env("RINGWATCH_DIR", dir)
        .output()
        .unwrap();
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    own(&std::fs::read_to_string(&out).unwrap())
}

/// Instructions of the library's own functions, from callgrind's file: lines of `position cost` under the object
/// that an `ob=` line names; the line after `calls=` holds what the called function cost.
fn own(text: &str) -> u64 {
    let library = plugin_library().file_name().unwrap().to_str().unwrap();
    let (mut ours, mut tie, mut of_call, mut sum) = (false, false, false, 0);
    for line in text.lines() {
        if let Some(object) = line.strip_prefix("ob=") {
            ours = object.ends_with(library);
        } else if let Some(function) = line.strip_prefix("fn=") {
            // The clock is tied anew by time, which is the machine's and not the callback's.
            tie = function.contains("clock") && function.contains("asked");
        } else if line.starts_with("calls=") {
            of_call = true;
        } else if let Some((_, cost)) =
            line.split_once(' ').filter(|_| line.starts_with(|c: char| c.is_ascii_digit()))
        {
            if ours && !tie && !of_call {
                sum += cost.trim().parse::<u64>().unwrap();
            }
            of_call = false;
        }
    }
    sum
}

#[test]
fn callbacks_cost_few_instructions() {
    if let Ok(what) = std::env::var(WHAT) {
        return make_calls(&what, std::env::var(HOW_OFTEN).unwrap().parse().unwrap());
    }
    let there =
        Command::new("valgrind").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    if !there.is_ok_and(|s| s.success()) {
        support::skip::skipped("callbacks_cost_few_instructions", "valgrind");
        return;
    }
    let dir = tempfile::Builder::new().tempdir_in("/dev/shm").unwrap();
    for (what, most) in GATES {
        let count = |times| instructions(dir.path(), what, times);
        let each = (count(2 * TIMES) - count(TIMES)) / TIMES;
        eprintln!("{what}: {each} instructions, at most {most}");
        assert!(each <= most, "{what}: {each} instructions, more than {most}");
        assert!(each > 20, "{what}: {each} instructions: nothing was counted");
    }
}
