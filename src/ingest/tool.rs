//! Runs a tool that reads another process, py-spy for example, and bounds its time and its memory.
//!
//! A tool reads what the watched job made, so the job decides how much memory the tool wants. The tool runs in this
//! process's control group: without a bound of its own it would have the kernel kill the agent. The job decides as well
//! which files the tool opens, and one may never be opened: such a tool is abandoned.

use super::memory_room;
use super::process::stat;
use super::rights::{Watched, restrict};
use rustix::process::Pid;
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
/// Abandoned tools of one user, and of all: with so many no other tool is started.
const ABANDONED_OF_USER_MAX: usize = 2;
const ABANDONED_MAX: usize = 8;
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
    // Two tools at once would share the room.
    static ABANDONED: Mutex<Abandoned> = Mutex::new(Abandoned(Vec::new()));
    let mut abandoned = ABANDONED.lock().unwrap_or_else(PoisonError::into_inner);
    if !abandoned.may_start(watched.owner) {
        return None;
    }
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
        abandoned.0.push((watched.owner, child));
    }
    // A process whose debugger is gone goes on by itself, but for a stop that was on its way.
    if text.is_none() && !was_stopped && state(pid) == Some(b'T') {
        let pid = i32::try_from(pid).ok().and_then(Pid::from_raw)?;
        // It may have ended meanwhile.
        rustix::process::kill_process(pid, rustix::process::Signal::CONT).ok();
    }
    text
}

/// Tools that cannot be killed, as the kernel waits for a file system in their place, and whose processes they read.
#[derive(Debug)]
struct Abandoned(Vec<(u32, Child)>);

impl Abandoned {
    /// True where a tool may be started for a process of this user. Those that have gone meanwhile do not count.
    fn may_start(&mut self, owner: u32) -> bool {
        self.0.retain_mut(|(_, tool)| matches!(tool.try_wait(), Ok(None)));
        let of_user = self.0.iter().filter(|(user, _)| *user == owner).count();
        of_user < ABANDONED_OF_USER_MAX && self.0.len() < ABANDONED_MAX
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

/// The state of a process as the kernel abbreviates it, `S` for example.
pub(super) fn state(pid: u32) -> Option<u8> {
    stat(pid).ok()?.map(|s| s.state)
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
    fn a_user_whose_files_hold_tools_up_keeps_nobody_else_from_theirs() {
        let mut abandoned = Abandoned((0..ABANDONED_OF_USER_MAX).map(|_| (7, sleeper())).collect());
        assert!(!abandoned.may_start(7) && abandoned.may_start(8));
        abandoned.0.iter_mut().for_each(|(_, tool)| tool.kill().unwrap());
        assert!(abandoned.0.iter_mut().all(|(_, tool)| has_ended(tool)));
        assert!(abandoned.may_start(7) && abandoned.0.is_empty());
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
