//! Where a process is in its code, asked when somebody is named: of py-spy (<https://github.com/benfred/py-spy>), and of
//! elfutils' eu-stack for programs that are not Python.
//!
//! Unless native frames are wanted, the process's memory is only read and nothing stops it (`--nonblocking`). For native
//! frames a tool has to stop it for a moment; one that takes long about it is ended, and the process goes on. A probe
//! of its own runs the tool, seldom; where a tool is missing or may not look, there is no stack.

use super::rights::Watched;
use super::tool::output;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::ffi::OsString;
use std::process::Command;

/// Frames that are kept.
const FRAMES_MAX: usize = 64;
/// The longest name of a function, and of a file, in characters: both are the job's.
const NAME_MAX: usize = 256;

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

impl Answer {
    /// True where nothing could be found out.
    pub(super) fn is_empty(&self) -> bool {
        self.frames.is_empty() && self.threads.is_empty()
    }
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

/// The frames of a process's main thread, as far as these tools see them.
pub(super) fn read(kind: StackKind, watched: Watched) -> Vec<String> {
    read_with(&Tools { py_spy: "py-spy".into(), eu_stack: "eu-stack".into() }, kind, watched)
}

fn read_with(tools: &Tools, kind: StackKind, watched: Watched) -> Vec<String> {
    let frames = match kind {
        StackKind::Off => None,
        StackKind::Python => python(tools, watched, false),
        StackKind::Native => python(tools, watched, true).or_else(|| native(tools, watched)),
    };
    frames.unwrap_or_default()
}

/// The frames of a Python program.
fn python(tools: &Tools, watched: Watched, native: bool) -> Option<Vec<String>> {
    let how = if native { "--native" } else { "--nonblocking" };
    frames(&output(
        Command::new(&tools.py_spy).args(["dump", "--json", how, "--pid", &watched.pid.to_string()]),
        watched,
    )?)
}

/// The frames of any other program's main thread.
fn native(tools: &Tools, watched: Watched) -> Option<Vec<String>> {
    let most = FRAMES_MAX.to_string();
    let said = output(
        Command::new(&tools.eu_stack).args(["-1", "-m", "-n", &most, "-p", &watched.pid.to_string()]),
        watched,
    )?;
    Some(native_frames(&said)).filter(|frames| !frames.is_empty())
}

/// The frames that eu-stack prints.
pub(super) fn native_frames(text: &[u8]) -> Vec<String> {
    String::from_utf8_lossy(text).lines().filter_map(native_frame).take(FRAMES_MAX).collect()
}

/// A line of eu-stack's, `#0  0x00007fe906605503 clock_nanosleep@GLIBC_2.2.5 - /usr/lib/libc.so.6`; nothing of those
/// without a name.
fn native_frame(line: &str) -> Option<String> {
    let (_, rest) = line.strip_prefix('#')?.split_once("0x")?;
    let (_, rest) = rest.split_once(' ')?;
    let (name, module) = rest.split_once("- ").unwrap_or((rest, ""));
    let name = name.trim().split('@').next().filter(|n| !n.is_empty())?;
    let module = module.trim().rsplit('/').next().unwrap_or_default();
    Some(if module.is_empty() { shown(name) } else { format!("{} ({})", shown(name), shown(module)) })
}

/// A name of the job's own choice: it could steer a terminal, and be as long as all that the tool prints.
fn shown(name: &str) -> String {
    let end = name.char_indices().nth(NAME_MAX).map_or(name.len(), |(at, _)| at);
    let cut = if end < name.len() { "..." } else { "" };
    format!("{}{cut}", name[..end].escape_debug())
}

/// The main thread's frames, innermost first: `function (file:line)`, or `function (library)` where no line is known.
pub(super) fn frames(json: &[u8]) -> Option<Vec<String>> {
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
        let line = if f.line > 0 { format!(":{}", f.line) } else { String::new() };
        format!("{} ({}{line})", shown(&f.name), shown(file))
    };
    let named = |f: &&Frame| !f.name.starts_with("0x");
    Some(main.frames.iter().filter(named).take(FRAMES_MAX).map(text).collect())
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::skip;
    use super::super::threads::places;
    use super::super::tool::state;
    use super::*;
    use std::process::Stdio;
    use std::time::{Duration, Instant};

    const DUMP: &str = r#"[
        {"pid": 7, "thread_id": 1, "thread_name": "Thread-1", "os_thread_id": 9, "active": false, "frames": []},
        {"pid": 7, "thread_id": 2, "thread_name": "MainThread", "os_thread_id": 7, "active": true, "frames": [
            {"name": "load", "filename": "data\u001b.py", "line": 12}, {"name": "<module>", "filename": "train.py", "line": 3}
        ]}
    ]"#;

    /// A process that there is not.
    const NOBODY: Watched = Watched { pid: u32::MAX, owner: 0 };

    /// A tool of that name.
    pub(in super::super) fn tool(name: &str, script: &str) -> (tempfile::TempDir, OsString) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(name);
        std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(&path, mode).unwrap();
        (dir, path.into())
    }

    #[test]
    fn the_main_threads_frames_are_kept_and_cannot_steer_a_terminal() {
        let said = frames(DUMP.as_bytes()).unwrap();
        assert_eq!(said, ["load (data\\u{1b}.py:12)", "<module> (train.py:3)"]);
        assert_eq!(frames(b"Error: permission denied"), None);
        assert_eq!(frames(b"[]"), None);
    }

    #[test]
    fn what_is_missing_or_refuses_gives_nothing() {
        let (_dir, refuses) = tool("py-spy", "echo no >&2; exit 1");
        for py_spy in [refuses, "/nowhere/py-spy".into()] {
            let tools = Tools { py_spy, eu_stack: "/nowhere/eu-stack".into() };
            for kind in [StackKind::Python, StackKind::Native] {
                assert_eq!(read_with(&tools, kind, NOBODY), [""; 0]);
            }
        }
    }

    #[test]
    fn how_far_it_looks_is_what_is_set() {
        let said = |kind: StackKind| {
            let (_a, py_spy) = tool("py-spy", r#"echo "$3" >> "$(dirname "$0")/asked"; exit 1"#);
            let (_b, eu_stack) =
                tool("eu-stack", "echo '#0  0x00007f0000000001 pause@GLIBC_2 - /lib/libc.so.6'");
            let frames = read_with(&Tools { py_spy, eu_stack }, kind, NOBODY);
            (std::fs::read_to_string(_a.path().join("asked")).unwrap_or_default(), frames)
        };
        assert_eq!(said(StackKind::Off), (String::new(), vec![]));
        assert_eq!(said(StackKind::Python), ("--nonblocking\n".into(), vec![]));
        assert_eq!(said(StackKind::Native), ("--native\n".into(), vec!["pause (libc.so.6)".into()]));
        let (_dir, py_spy) = tool("py-spy", &format!("cat <<'END'\n{DUMP}\nEND"));
        let tools = Tools { py_spy, eu_stack: "/nowhere/eu-stack".into() };
        assert_eq!(read_with(&tools, StackKind::Python, NOBODY).len(), 2);
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

    pub(in super::super) fn sleeper() -> std::process::Child {
        Command::new("sleep").arg("100").stdout(Stdio::null()).spawn().unwrap()
    }

    /// Waits until a process is in one of these states.
    pub(in super::super) fn until(pid: u32, states: &[u8]) -> bool {
        let until = Instant::now() + Duration::from_secs(20);
        while Instant::now() < until {
            if state(pid).is_some_and(|s| states.contains(&s)) {
                return true;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        false
    }

    /// True where a program can be run; without it the test counts as skipped.
    pub(in super::super) fn there_is(program: &str, test: &str) -> bool {
        let there =
            Command::new(program).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
        if there.is_err() {
            skip::skipped(test, program);
        }
        there.is_ok()
    }

    /// The answer of the real tools about a real process, once it is where it is to be.
    fn really(kind: StackKind, pid: u32, wanted: &str) -> Answer {
        let until = Instant::now() + Duration::from_secs(30);
        loop {
            let got = Answer { frames: read(kind, Watched { pid, owner: 0 }), threads: places(pid) };
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
        let python = really(StackKind::Python, pid, "load (<string>:3)");
        let native = really(StackKind::Native, pid, "load (<string>:3)");
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
        let python = read(StackKind::Python, Watched { pid, owner: 0 });
        let native = really(StackKind::Native, pid, "nanosleep");
        let goes_on = until(pid, b"S");
        watched.kill().unwrap();
        watched.wait().unwrap();
        assert_eq!(python, [""; 0]);
        assert!(native.frames.iter().any(|f| f.contains("nanosleep (libc")) && goes_on, "{native:?}");
    }
}
