//! Runs a tool that reads another process, py-spy for example, and bounds its time and its memory.
//!
//! A tool reads what the watched job made, so the job decides how much memory the tool wants. The tool runs in this
//! process's control group: without a bound of its own it would have the kernel kill the agent. The job decides as well
//! which files the tool opens, and one may never be opened. So a probe runs one tool, and stays for as long as the tool
//! cannot be ended.

use super::memory_room;
use super::rights::{Watched, restrict};
use rustix::process::Pid;
use std::fs;
use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A tool that takes longer is ended.
const RUN_MAX: Duration = Duration::from_secs(5);
/// A tool that holds a process for longer is ended.
const HELD_MAX: Duration = Duration::from_millis(500);
/// A tool that is killed and not gone after this is abandoned.
const KILLED_MAX: Duration = Duration::from_secs(1);
/// The pause between two looks at the watched process.
const POLL: Duration = Duration::from_millis(5);
/// The output that is kept, in bytes.
const OUTPUT_MAX: u64 = 4 << 20;
/// The memory that a tool needs at least, in bytes: py-spy 0.4.1 takes 32 MB for a program of 111 MB with debug information.
const MEMORY_MIN: u64 = 48 << 20;
/// The memory that a tool may take at most, in bytes.
const MEMORY_MAX: u64 = 1 << 30;
/// The room in the control group that stays this process's own, in bytes.
const RESERVED: u64 = 16 << 20;

/// Runs a tool and returns what it prints about a process. Returns nothing when the tool is missing, takes too long, holds the
/// process for too long, or when the control group has too little room for it.
pub(super) fn output(command: &mut Command, watched: Watched) -> Option<Vec<u8>> {
    within(command, watched, memory_room::bytes())
}

fn within(command: &mut Command, watched: Watched, room: Option<u64>) -> Option<Vec<u8>> {
    let pid = watched.pid;
    let memory = room.map_or(MEMORY_MAX, |room| room.saturating_sub(RESERVED).min(MEMORY_MAX));
    if memory < MEMORY_MIN {
        return None;
    }
    let was_stopped = state(pid) == Some(b'T');
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    restrict(command, watched, memory);
    let mut child = command.spawn().ok()?;
    let text = read(&mut child, pid);
    // It fails if the tool has ended by itself.
    child.kill().ok();
    if !has_ended(&mut child) {
        LEFT.lock().unwrap_or_else(PoisonError::into_inner).push(child);
    }
    // A process whose debugger is gone goes on by itself, but for a stop that was on its way.
    if text.is_none() && !was_stopped && state(pid) == Some(b'T') {
        let pid = i32::try_from(pid).ok().and_then(Pid::from_raw)?;
        // It may have ended meanwhile.
        rustix::process::kill_process(pid, rustix::process::Signal::CONT).ok();
    }
    text
}

/// Tools that cannot be ended, as the kernel waits for a file system in their place.
static LEFT: Mutex<Vec<Child>> = Mutex::new(Vec::new());

/// Waits for the end of tools that could not be ended.
pub(super) fn wait_for_left() {
    for tool in LEFT.lock().unwrap_or_else(PoisonError::into_inner).iter_mut() {
        // It was killed, and ends when the kernel lets it.
        tool.wait().ok();
    }
}

/// True once a killed tool is gone; false where it does not go in time.
fn has_ended(tool: &mut Child) -> bool {
    let begun = Instant::now();
    while let Ok(None) = tool.try_wait() {
        if begun.elapsed() >= KILLED_MAX {
            return false;
        }
        std::thread::sleep(POLL);
    }
    true
}

/// The state of a process as the kernel abbreviates it, `S` for example. It is read where no exec can hold it up.
pub(super) fn state(pid: u32) -> Option<u8> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    status.lines().find_map(|l| l.strip_prefix("State:"))?.trim().bytes().next()
}

/// All that a tool prints, if it ends in time.
fn read(child: &mut Child, pid: u32) -> Option<Vec<u8>> {
    let out = child.stdout.take()?;
    let (send, all) = channel();
    let work = move || {
        let mut text = Vec::new();
        if out.take(OUTPUT_MAX).read_to_end(&mut text).is_ok() {
            // The receiver may have given up.
            send.send(text).ok();
        }
    };
    std::thread::Builder::new().name("stack-text".to_owned()).spawn(work).ok()?;
    let begun = Instant::now();
    let mut held: Option<Instant> = None;
    while begun.elapsed() < RUN_MAX {
        match all.recv_timeout(POLL) {
            Ok(text) => return Some(text),
            Err(RecvTimeoutError::Disconnected) => return None,
            Err(RecvTimeoutError::Timeout) => {}
        }
        held = (state(pid) == Some(b't')).then(|| held.unwrap_or_else(Instant::now));
        if held.is_some_and(|since| since.elapsed() >= HELD_MAX) {
            return None;
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::super::stacks::tests::{sleeper, there_is, tool, until};
    use super::*;

    /// A process that does not exist.
    const NOBODY: Watched = Watched { pid: u32::MAX, owner: 0 };

    #[test]
    fn a_stop_that_an_ended_tool_left_behind_is_taken_back() {
        let mut watched = sleeper();
        let pid = watched.id();
        assert!(until(pid, b"S"));
        let (_dir, hangs) = tool("py-spy", "kill -STOP \"$5\"; exec sleep 100");
        let arguments = ["dump", "--json", "--native", "--pid", &pid.to_string()];
        assert_eq!(
            output(Command::new(&hangs).args(arguments), Watched { pid, owner: 0 }),
            None,
            "it said nothing in time"
        );
        let goes_on = until(pid, b"S");
        watched.kill().unwrap();
        watched.wait().unwrap();
        assert!(goes_on);
    }

    #[test]
    fn a_tool_that_holds_a_process_is_ended() {
        if !there_is("gdb", "a_tool_that_holds_a_process_is_ended") {
            return;
        }
        let mut watched = sleeper();
        let pid = watched.id();
        let (_dir, holds) = tool("py-spy", "exec gdb -nx -batch -p \"$5\" -ex 'shell sleep 100'");
        let begun = Instant::now();
        let arguments = ["dump", "--json", "--native", "--pid", &pid.to_string()];
        let said = output(Command::new(&holds).args(arguments), Watched { pid, owner: 0 });
        let took = begun.elapsed();
        let goes_on = until(pid, b"S");
        watched.kill().unwrap();
        watched.wait().unwrap();
        assert!(said.is_none() && goes_on && took >= HELD_MAX, "{took:?}");
    }

    #[test]
    fn a_tool_has_the_memory_that_the_control_group_has_left() {
        let (_dir, asks) = tool("py-spy", "sleep 0.3; ulimit -d; cat /proc/$$/oom_score_adj");
        let printed = |room| {
            let out = within(&mut Command::new(&asks), NOBODY, room)?;
            Some(String::from_utf8_lossy(&out).into_owned())
        };
        assert_eq!(printed(None).as_deref(), Some("1048576\n1000\n"));
        assert_eq!(printed(Some(RESERVED + MEMORY_MIN)).as_deref(), Some("49152\n1000\n"));
        assert_eq!(printed(Some(RESERVED + MEMORY_MIN - 1)), None);
        let (_dir, greedy) = tool("py-spy", "sleep 0.3; head -c 90000000 /dev/zero | tail -n 1 | wc -c");
        let much = within(&mut Command::new(&greedy), NOBODY, Some(RESERVED + MEMORY_MIN));
        assert_eq!(much.as_deref(), Some(&b"0\n"[..]), "it gets no more memory");
    }
}
