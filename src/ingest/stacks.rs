//! Where a process is in its code, asked of py-spy (<https://github.com/benfred/py-spy>) when somebody is named.
//!
//! It only reads the process's memory and does not stop it (`--nonblocking`), runs on a thread of its own, seldom, and
//! where it is missing or may not look there is no stack.

use crate::model::SegmentId;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::Read;
use std::process::{Command, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

/// A process is asked again after this, in ns.
const AGAIN_NS: u64 = 30_000_000_000;
/// So many are asked at once.
const AT_ONCE: usize = 4;
/// Whoever takes longer is left.
const PATIENCE: Duration = Duration::from_secs(5);
/// Frames and bytes of output that are kept.
const FRAMES_MAX: usize = 64;
const OUTPUT_MAX: u64 = 4 << 20;

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
    line: i64,
}

/// What was asked, and what came.
#[derive(Debug)]
pub(super) struct Stacks {
    tool: OsString,
    asked: BTreeMap<SegmentId, u64>,
    running: usize,
    send: Sender<(SegmentId, Vec<String>)>,
    answers: Receiver<(SegmentId, Vec<String>)>,
}

impl Stacks {
    pub(super) fn new() -> Self {
        Self::with("py-spy".into())
    }

    fn with(tool: OsString) -> Self {
        let (send, answers) = channel();
        Stacks { tool, asked: BTreeMap::new(), running: 0, send, answers }
    }

    /// Begins to ask where a process is, unless that was done a short time ago.
    pub(super) fn ask(&mut self, segment: SegmentId, pid: u32, now_ns: u64) {
        self.asked.retain(|_, t| now_ns.saturating_sub(*t) < AGAIN_NS);
        if self.running >= AT_ONCE || self.asked.contains_key(&segment) {
            return;
        }
        self.asked.insert(segment, now_ns);
        let (tool, send) = (self.tool.clone(), self.send.clone());
        let work = move || {
            // Whoever asked may be gone.
            send.send((segment, ask(&tool, pid).unwrap_or_default())).ok();
        };
        if std::thread::Builder::new().name("stack".to_owned()).spawn(work).is_ok() {
            self.running += 1;
        }
    }

    /// What has come since the last call; nothing for those that could not be asked.
    pub(super) fn take(&mut self) -> Vec<(SegmentId, Vec<String>)> {
        let all: Vec<_> = self.answers.try_iter().collect();
        self.running -= all.len().min(self.running);
        all.into_iter().filter(|(_, stack)| !stack.is_empty()).collect()
    }
}

fn ask(tool: &OsString, pid: u32) -> Option<Vec<String>> {
    let mut command = Command::new(tool);
    command.args(["dump", "--json", "--nonblocking", "--pid", &pid.to_string()]);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().ok()?;
    let text = read(&mut child);
    // It has ended, or nobody waits for it any more; both calls fail in the first case.
    child.kill().ok();
    child.wait().ok();
    frames(&text?)
}

/// All that it prints, if it ends in time.
fn read(child: &mut std::process::Child) -> Option<Vec<u8>> {
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
    all.recv_timeout(PATIENCE).ok()
}

/// The main thread's frames, innermost first: `function (file:line)`.
fn frames(json: &[u8]) -> Option<Vec<String>> {
    let threads: Vec<Thread> = serde_json::from_slice(json).ok()?;
    let main = threads
        .iter()
        .find(|t| t.os_thread_id == Some(t.pid))
        .or_else(|| threads.iter().find(|t| t.thread_name.as_deref() == Some("MainThread")))
        .or(threads.first())?;
    let text = |f: &Frame| {
        // Names are the job's, and could steer a terminal.
        format!("{} ({}:{})", f.name, f.filename, f.line).escape_debug().to_string()
    };
    Some(main.frames.iter().take(FRAMES_MAX).map(text).collect())
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

    fn tool(script: &str) -> (tempfile::TempDir, OsString) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("py-spy");
        std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(&path, mode).unwrap();
        (dir, path.into())
    }

    fn answer(stacks: &mut Stacks) -> Vec<(SegmentId, Vec<String>)> {
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
        let (_dir, path) = tool(&format!("cat <<'END'\n{DUMP}\nEND"));
        let mut stacks = Stacks::with(path);
        stacks.ask(SegmentId(1), 7, 0);
        stacks.ask(SegmentId(1), 7, AGAIN_NS / 2);
        assert_eq!(stacks.running, 1);
        let got = answer(&mut stacks);
        assert_eq!((got.len(), got[0].0, got[0].1.len()), (1, SegmentId(1), 2));
        stacks.ask(SegmentId(1), 7, AGAIN_NS + 1);
        assert_eq!(stacks.running, 1);
    }

    #[test]
    fn what_is_missing_or_refuses_gives_nothing() {
        let (_dir, refuses) = tool("echo no >&2; exit 1");
        for path in [refuses, "/nowhere/py-spy".into()] {
            let mut stacks = Stacks::with(path);
            stacks.ask(SegmentId(1), 7, 0);
            assert_eq!(answer(&mut stacks), []);
        }
    }
}
