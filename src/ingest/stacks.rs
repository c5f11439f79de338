//! Where a process is in its code, asked when somebody is named: of py-spy (<https://github.com/benfred/py-spy>), of
//! elfutils' eu-stack for programs that are not Python, and of the kernel.
//!
//! Unless native frames are wanted, the process's memory is only read and nothing stops it (`--nonblocking`). For native
//! frames a tool has to stop it for a moment; one that takes long about it is ended, and the process goes on. All of it
//! runs on a thread of its own, seldom; where a tool is missing or may not look, there is no stack.

use super::process::stat;
use super::threads;
use crate::model::SegmentId;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::Read;
use std::process::{Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

/// A process is asked again after this, in ns.
const AGAIN_NS: u64 = 30_000_000_000;
/// So many are asked at once.
const AT_ONCE: usize = 4;
/// Whoever takes longer is left.
const PATIENCE: Duration = Duration::from_secs(5);
/// A tool that holds a process for longer is ended.
const HELD_MAX: Duration = Duration::from_millis(500);
/// How often that is looked at.
const LOOK: Duration = Duration::from_millis(5);
/// Frames and bytes of output that are kept.
const FRAMES_MAX: usize = 64;
const OUTPUT_MAX: u64 = 4 << 20;

/// How far into a culprit's process is looked.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum StackKind {
    /// Not at all.
    Off,
    /// Its Python frames, by py-spy, and where its threads are in the kernel. It is only read, and never stopped.
    #[default]
    Python,
    /// Its native frames as well, by py-spy or eu-stack, which stop it for some tens of milliseconds, half a second at
    /// most.
    Native,
}

/// Where a process is.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Answer {
    /// Its main thread's frames, innermost first.
    pub frames: Vec<String>,
    /// Where its threads are in the kernel.
    pub threads: Vec<String>,
}

/// One thread as `py-spy dump --json` prints it.
#[derive(Debug, Deserialize)]
struct Thread {
    pid: u32,
    os_thread_id: Option<u32>,
    thread_name: Option<String>,
    frames: Vec<Frame>,
}

#[derive(Debug, Deserialize)]
struct Frame {
    name: String,
    filename: String,
    /// Of a native frame: the library.
    module: Option<String>,
    short_filename: Option<String>,
    line: i64,
}

/// The programs that are asked.
#[derive(Debug, Clone)]
struct Tools {
    py_spy: OsString,
    eu_stack: OsString,
}

/// What was asked, and what came.
#[derive(Debug)]
pub(super) struct Stacks {
    kind: StackKind,
    tools: Tools,
    asked: BTreeMap<SegmentId, u64>,
    running: usize,
    send: Sender<(SegmentId, Answer)>,
    answers: Receiver<(SegmentId, Answer)>,
}

impl Stacks {
    pub(super) fn new() -> Self {
        Self::with(StackKind::default(), Tools { py_spy: "py-spy".into(), eu_stack: "eu-stack".into() })
    }

    fn with(kind: StackKind, tools: Tools) -> Self {
        let (send, answers) = channel();
        Stacks { kind, tools, asked: BTreeMap::new(), running: 0, send, answers }
    }

    /// From now on looks so far.
    pub(super) fn set(&mut self, kind: StackKind) {
        self.kind = kind;
    }

    /// Begins to ask where a process is, unless that was done a short time ago.
    pub(super) fn ask(&mut self, segment: SegmentId, pid: u32, now_ns: u64) {
        self.asked.retain(|_, t| now_ns.saturating_sub(*t) < AGAIN_NS);
        if self.kind == StackKind::Off || self.running >= AT_ONCE || self.asked.contains_key(&segment) {
            return;
        }
        self.asked.insert(segment, now_ns);
        let (kind, tools, send) = (self.kind, self.tools.clone(), self.send.clone());
        let work = move || {
            let frames = match kind {
                StackKind::Off => None,
                StackKind::Python => python(&tools, pid, false),
                StackKind::Native => python(&tools, pid, true).or_else(|| native(&tools, pid)),
            };
            let threads = threads::places(pid);
            // Whoever asked may be gone.
            send.send((segment, Answer { frames: frames.unwrap_or_default(), threads })).ok();
        };
        if std::thread::Builder::new().name("stack".to_owned()).spawn(work).is_ok() {
            self.running += 1;
        }
    }

    /// What has come since the last call; nothing for those that could not be asked.
    pub(super) fn take(&mut self) -> Vec<(SegmentId, Answer)> {
        let all: Vec<_> = self.answers.try_iter().collect();
        self.running -= all.len().min(self.running);
        all.into_iter().filter(|(_, answer)| *answer != Answer::default()).collect()
    }
}

/// The frames of a Python program.
fn python(tools: &Tools, pid: u32, native: bool) -> Option<Vec<String>> {
    let how = if native { "--native" } else { "--nonblocking" };
    frames(&output(
        Command::new(&tools.py_spy).args(["dump", "--json", how, "--pid", &pid.to_string()]),
        pid,
    )?)
}

/// The frames of any other program's main thread.
fn native(tools: &Tools, pid: u32) -> Option<Vec<String>> {
    let most = FRAMES_MAX.to_string();
    let said =
        output(Command::new(&tools.eu_stack).args(["-1", "-m", "-n", &most, "-p", &pid.to_string()]), pid)?;
    let frames: Vec<String> = String::from_utf8_lossy(&said).lines().filter_map(native_frame).collect();
    (!frames.is_empty()).then_some(frames)
}

/// A line of eu-stack's, `#0  0x00007fe906605503 clock_nanosleep@GLIBC_2.2.5 - /usr/lib/libc.so.6`; nothing of those
/// without a name.
fn native_frame(line: &str) -> Option<String> {
    let (_, rest) = line.strip_prefix('#')?.split_once("0x")?;
    let (_, rest) = rest.split_once(' ')?;
    let (name, module) = rest.split_once("- ").unwrap_or((rest, ""));
    let name = name.trim().split('@').next().filter(|n| !n.is_empty())?;
    let module = module.trim().rsplit('/').next().unwrap_or_default();
    let text = if module.is_empty() { name.to_owned() } else { format!("{name} ({module})") };
    Some(text.escape_debug().to_string())
}

/// What a tool prints about a process, if it ends in time and does not hold the process for long.
fn output(command: &mut Command, pid: u32) -> Option<Vec<u8>> {
    let was_stopped = state(pid) == Some(b'T');
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().ok()?;
    let text = read(&mut child, pid);
    // It has ended, or nobody waits for it any more; both calls fail in the first case.
    child.kill().ok();
    child.wait().ok();
    // A process whose debugger is gone goes on by itself, but for a stop that was on its way.
    if text.is_none() && !was_stopped && state(pid) == Some(b'T') {
        let pid = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw)?;
        // It may have ended meanwhile.
        rustix::process::kill_process(pid, rustix::process::Signal::CONT).ok();
    }
    text
}

fn state(pid: u32) -> Option<u8> {
    stat(pid).map(|s| s.state)
}

/// All that it prints, if it ends in time.
fn read(child: &mut std::process::Child, pid: u32) -> Option<Vec<u8>> {
    let out = child.stdout.take()?;
    let (send, all) = channel();
    let work = move || {
        let mut text = Vec::new();
        if out.take(OUTPUT_MAX).read_to_end(&mut text).is_ok() {
            // Whoever asked may have given up.
            send.send(text).ok();
        }
    };
    std::thread::Builder::new().name("stack-text".to_owned()).spawn(work).ok()?;
    let begun = Instant::now();
    let mut held: Option<Instant> = None;
    while begun.elapsed() < PATIENCE {
        match all.recv_timeout(LOOK) {
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

/// The main thread's frames, innermost first: `function (file:line)`, or `function (library)` where no line is known.
fn frames(json: &[u8]) -> Option<Vec<String>> {
    let threads: Vec<Thread> = serde_json::from_slice(json).ok()?;
    let main = threads
        .iter()
        .find(|t| t.os_thread_id == Some(t.pid))
        .or_else(|| threads.iter().find(|t| t.thread_name.as_deref() == Some("MainThread")))
        .or(threads.first())?;
    let text = |f: &Frame| {
        // Native frames name the file as it was where it was built.
        let short = f.short_filename.as_ref().filter(|_| f.module.is_some());
        let file = short.unwrap_or(&f.filename);
        let at = if f.line > 0 { format!("{file}:{}", f.line) } else { file.clone() };
        // Names are the job's, and could steer a terminal.
        format!("{} ({at})", f.name).escape_debug().to_string()
    };
    let named = |f: &&Frame| !f.name.starts_with("0x");
    Some(main.frames.iter().filter(named).take(FRAMES_MAX).map(text).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    const DUMP: &str = r#"[
        {"pid": 7, "thread_id": 1, "thread_name": "Thread-1", "os_thread_id": 9, "active": false, "frames": []},
        {"pid": 7, "thread_id": 2, "thread_name": "MainThread", "os_thread_id": 7, "active": true, "frames": [
            {"name": "load", "filename": "data\u001b.py", "line": 12}, {"name": "<module>", "filename": "train.py", "line": 3}
        ]}
    ]"#;

    /// A process that there is not.
    const NOBODY: u32 = u32::MAX;

    /// A tool of that name.
    fn tool(name: &str, script: &str) -> (tempfile::TempDir, OsString) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(name);
        std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(&path, mode).unwrap();
        (dir, path.into())
    }

    fn stacks(kind: StackKind, py_spy: OsString, eu_stack: OsString) -> Stacks {
        Stacks::with(kind, Tools { py_spy, eu_stack })
    }

    fn answer(stacks: &mut Stacks) -> Vec<(SegmentId, Answer)> {
        let until = Instant::now() + Duration::from_secs(20);
        while stacks.running > 0 && Instant::now() < until {
            let got = stacks.take();
            if !got.is_empty() {
                return got;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Vec::new()
    }

    #[test]
    fn the_main_threads_frames_are_kept_and_cannot_steer_a_terminal() {
        let said = frames(DUMP.as_bytes()).unwrap();
        assert_eq!(said, ["load (data\\u{1b}.py:12)", "<module> (train.py:3)"]);
        assert_eq!(frames(b"Error: permission denied"), None);
        assert_eq!(frames(b"[]"), None);
    }

    #[test]
    fn a_process_is_asked_once_and_again_after_a_while() {
        let (_dir, path) = tool("py-spy", &format!("cat <<'END'\n{DUMP}\nEND"));
        let mut stacks = stacks(StackKind::Python, path, "/nowhere/eu-stack".into());
        stacks.ask(SegmentId(1), NOBODY, 0);
        stacks.ask(SegmentId(1), NOBODY, AGAIN_NS / 2);
        assert_eq!(stacks.running, 1);
        let got = answer(&mut stacks);
        assert_eq!((got.len(), got[0].0, got[0].1.frames.len()), (1, SegmentId(1), 2));
        stacks.ask(SegmentId(1), NOBODY, AGAIN_NS + 1);
        assert_eq!(stacks.running, 1);
    }

    #[test]
    fn what_is_missing_or_refuses_gives_nothing() {
        let (_dir, refuses) = tool("py-spy", "echo no >&2; exit 1");
        for path in [refuses, "/nowhere/py-spy".into()] {
            for kind in [StackKind::Python, StackKind::Native] {
                let mut stacks = stacks(kind, path.clone(), "/nowhere/eu-stack".into());
                stacks.ask(SegmentId(1), NOBODY, 0);
                assert_eq!(answer(&mut stacks), []);
            }
        }
    }

    #[test]
    fn how_far_it_looks_is_what_is_set() {
        let said = |kind: StackKind| {
            let (_a, py_spy) = tool("py-spy", r#"echo "$3" >> "$(dirname "$0")/asked"; exit 1"#);
            let (_b, eu_stack) =
                tool("eu-stack", "echo '#0  0x00007f0000000001 pause@GLIBC_2 - /lib/libc.so.6'");
            let mut stacks = stacks(kind, py_spy, eu_stack);
            stacks.ask(SegmentId(1), NOBODY, 0);
            let frames = answer(&mut stacks).pop().map(|(_, a)| a.frames);
            (std::fs::read_to_string(_a.path().join("asked")).unwrap_or_default(), frames)
        };
        assert_eq!(said(StackKind::Off), (String::new(), None));
        assert_eq!(said(StackKind::Python), ("--nonblocking\n".into(), None));
        assert_eq!(said(StackKind::Native), ("--native\n".into(), Some(vec!["pause (libc.so.6)".into()])));
    }

    #[test]
    fn frames_of_other_programs_are_those_with_a_name() {
        let of = |line| native_frame(line);
        assert_eq!(
            of("#0  0x00007fe906605503 clock_nanosleep@GLIBC_2.2.5 - /usr/lib/x86_64-linux-gnu/libc.so.6")
                .as_deref(),
            Some("clock_nanosleep (libc.so.6)")
        );
        assert_eq!(of("#7  0x00007fc908a8cd9e PyCFuncPtr_call").as_deref(), Some("PyCFuncPtr_call"));
        assert_eq!(of("#2  0x00005626e43eb4af - /usr/bin/sleep"), None);
        assert_eq!(of("#3  0x00007fc908a71f7a"), None);
        assert_eq!(of("TID 21408:"), None);
    }

    fn sleeper() -> std::process::Child {
        Command::new("sleep").arg("100").stdout(Stdio::null()).spawn().unwrap()
    }

    /// Waits until a process is in one of these states.
    fn until(pid: u32, states: &[u8]) -> bool {
        let until = Instant::now() + Duration::from_secs(20);
        while Instant::now() < until {
            if state(pid).is_some_and(|s| states.contains(&s)) {
                return true;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        false
    }

    #[test]
    fn a_stop_that_an_ended_tool_left_behind_is_taken_back() {
        let mut watched = sleeper();
        let pid = watched.id();
        assert!(until(pid, b"S"));
        let (_dir, hangs) = tool("py-spy", "kill -STOP \"$5\"; exec sleep 100");
        let arguments = ["dump", "--json", "--native", "--pid", &pid.to_string()];
        assert_eq!(output(Command::new(&hangs).args(arguments), pid), None, "it said nothing in time");
        let goes_on = until(pid, b"S");
        watched.kill().unwrap();
        watched.wait().unwrap();
        assert!(goes_on);
    }

    /// True where a program is there to be run; says of a test that it is skipped where not.
    fn there_is(program: &str, test: &str) -> bool {
        let there =
            Command::new(program).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
        if there.is_err() {
            eprintln!("{test}: skipped, there is no {program} on the path");
        }
        there.is_ok()
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
        let said = output(Command::new(&holds).args(arguments), pid);
        let took = begun.elapsed();
        let goes_on = until(pid, b"S");
        watched.kill().unwrap();
        watched.wait().unwrap();
        assert!(said.is_none() && goes_on && took >= HELD_MAX, "{took:?}");
    }

    /// What the real tools say of a real process, once it is where it is to be.
    fn really(kind: StackKind, pid: u32, wanted: &str) -> Answer {
        let until = Instant::now() + Duration::from_secs(30);
        loop {
            let got = ask_once(kind, pid);
            if got.frames.iter().any(|f| f.contains(wanted)) || Instant::now() > until {
                return got;
            }
        }
    }

    #[test]
    fn a_python_program_that_hangs_in_native_code_is_told_through_and_goes_on() {
        let test = "a_python_program_that_hangs_in_native_code_is_told_through_and_goes_on";
        if !there_is("py-spy", test) || !there_is("python3", test) {
            return;
        }
        let program = "import ctypes\ndef load():\n    ctypes.CDLL(None).sleep(1000)\ndef train():\n    load()\ntrain()\n";
        let mut watched =
            Command::new("python3").args(["-c", program]).stdout(Stdio::null()).spawn().unwrap();
        let pid = watched.id();
        let python = really(StackKind::Python, pid, "load");
        let native = really(StackKind::Native, pid, "load");
        let goes_on = until(pid, b"S");
        watched.kill().unwrap();
        watched.wait().unwrap();
        assert_eq!(python.frames, ["load (<string>:3)", "train (<string>:5)", "<module> (<string>:6)"]);
        let at = |text: &str| native.frames.iter().position(|f| f.contains(text));
        assert!(at("nanosleep").is_some() && at("nanosleep") < at("load (<string>:3)"), "{native:?}");
        assert!(at("load (<string>:3)") < at("train (<string>:5)") && goes_on, "{native:?}");
        assert!(
            native.threads.iter().any(|t| t.contains("nanosleep") || t.contains("a call that goes on")),
            "{python:?}"
        );
    }

    #[test]
    fn a_program_that_is_not_python_is_told_by_eu_stack() {
        let test = "a_program_that_is_not_python_is_told_by_eu_stack";
        if !there_is("eu-stack", test) {
            return;
        }
        let mut watched = sleeper();
        let pid = watched.id();
        let (python, native) =
            (ask_once(StackKind::Python, pid), really(StackKind::Native, pid, "nanosleep"));
        let goes_on = until(pid, b"S");
        watched.kill().unwrap();
        watched.wait().unwrap();
        assert_eq!(python.frames, Vec::<String>::new());
        assert!(native.frames.iter().any(|f| f.contains("nanosleep (libc")) && goes_on, "{native:?}");
    }

    fn ask_once(kind: StackKind, pid: u32) -> Answer {
        let mut stacks = stacks(kind, "py-spy".into(), "eu-stack".into());
        stacks.ask(SegmentId(1), pid, 0);
        answer(&mut stacks).pop().map(|(_, a)| a).unwrap_or_default()
    }
}
