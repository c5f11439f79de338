//! Skipped tests: libtest cannot mark a test as skipped at run time, so a test that lacks a tool reports it here.
//!
//! The line goes to the terminal although the test passes, and `tests/skipped` lists all of them at the end of
//! `cargo test --workspace`. With `CI` set, where `.ci/run` installs everything, a skipped test is a failure.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::PathBuf;

/// Reports that a test did not run, and what it needs.
///
/// # Panics
/// With `CI` set to anything but an empty text, `0` or `false`.
pub(crate) fn skipped(test: &str, needs: &str) {
    let in_ci = std::env::var("CI").is_ok_and(|v| !matches!(v.as_str(), "" | "0" | "false"));
    assert!(
        !in_ci,
        "{test} needs {needs}, and in CI no test may be skipped; .ci/run installs what tests need"
    );
    let line = format!("SKIPPED: {test} needs {needs}\n");
    // The macros' output is captured by libtest and shown for failed tests only; the stream itself is not.
    drop(std::io::stderr().write_all(line.as_bytes()));
    // A list that cannot be written takes nothing from the line above.
    drop(write(&line));
}

fn write(line: &str) -> std::io::Result<()> {
    let Some(list) = list() else { return Ok(()) };
    fs::create_dir_all(list.parent().unwrap_or(&list))?;
    // One write below PIPE_BUF, so that lines of tests that run at the same time stay whole.
    OpenOptions::new().create(true).append(true).open(list)?.write_all(line.as_bytes())
}

/// The list of this run: all test binaries of one `cargo test` have the same parent.
pub(crate) fn list() -> Option<PathBuf> {
    let parent = std::os::unix::process::parent_id();
    // target/debug/deps/NAME-HASH
    let target = std::env::current_exe().ok()?.ancestors().nth(3)?.to_owned();
    Some(target.join("tmp/skipped").join(format!("{parent}-{}", started(parent)?)))
}

/// When a process started, in clock ticks since boot: the same pid may have been another process's.
pub(crate) fn started(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // Behind the name, which may hold anything; the state is field 3, the start time field 22.
    stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()
}
