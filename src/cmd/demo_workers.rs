//! The processes of a comparison: one a variant, alive together, measuring in turns.

use super::FINDINGS;
use super::self_check::{Audit, Auditor};
use crate::bench::{Report, Settings, Step, order};
use crate::bundle;
use anyhow::{Context, bail};
use std::ffi::{OsStr, OsString};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

pub(super) const PLUGIN_VARIABLE: &str = "NCCL_PROFILER_PLUGIN";
pub(super) const PATH_VARIABLE: &str = "LD_LIBRARY_PATH";
const OWN_VARIABLES: &str = "RINGWATCH_";
/// A child that was given its last turn has so long to end.
const ENDING: Duration = Duration::from_secs(30);
/// Between looks at a child and its segments.
const LOOK: Duration = Duration::from_millis(1);
/// Lines of a failed child that are told.
const LAST_LINES: usize = 8;
/// The part of a child's output that is kept, in bytes.
const KEPT: usize = 64 << 10;

/// The environment of a child.
#[derive(Debug)]
pub(super) struct Variant {
    pub(super) name: String,
    /// A directory in front of the library path, and the plugin's name there.
    pub(super) plugin: Option<(Option<PathBuf>, OsString)>,
    pub(super) variables: Vec<(String, String)>,
    /// It may write segments.
    pub(super) segments: bool,
}

impl Variant {
    /// Returns whether it loads this program's own plugin.
    pub(super) fn is_ours(&self) -> bool {
        self.plugin.as_ref().is_some_and(|(_, file)| file == bundle::FILE_NAME)
    }

    /// Nothing of another plugin's, and what this one needs.
    fn dress(&self, command: &mut Command, segments: &Path) {
        command.env_remove(PLUGIN_VARIABLE);
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with(OWN_VARIABLES) {
                command.env_remove(name);
            }
        }
        if let Some((dir, file)) = &self.plugin {
            command.env(PLUGIN_VARIABLE, file);
            if let Some(dir) = dir {
                command.env(PATH_VARIABLE, library_path(dir));
            }
        }
        if self.segments {
            command.env("RINGWATCH_DIR", segments);
        }
        command.envs(self.variables.iter().map(|(k, v)| (k, v)));
    }
}

/// The library path with a directory in front of it.
pub(super) fn library_path(dir: &Path) -> OsString {
    let mut path = dir.as_os_str().to_owned();
    if let Some(old) = std::env::var_os(PATH_VARIABLE).filter(|p| !p.is_empty()) {
        path.push(":");
        path.push(old);
    }
    path
}

/// The result of one variant in one round: its report, which another rank's process may have, or why it failed; and
/// what its segments held.
pub(super) type Outcome = (anyhow::Result<Option<Report>>, Option<Audit>);

/// One variant's process in one round.
#[derive(Debug)]
pub(super) struct Player {
    child: Child,
    socket: UnixStream,
    said: Vec<std::thread::JoinHandle<Vec<u8>>>,
    result: PathBuf,
    /// The directories of the result and of the segments, which go with it.
    _places: [TempDir; 2],
    auditor: Option<Auditor>,
    limit: Duration,
    /// It waits for a turn.
    playing: bool,
    failure: Option<anyhow::Error>,
}

impl Drop for Player {
    fn drop(&mut self) {
        // It has ended long ago, or nobody wants it any more; both calls fail in the first case.
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

impl Player {
    /// Starts a variant. `limit` is the longest that getting ready, and each turn, may take.
    pub(super) fn start(v: &Variant, s: &Settings, epoch: u64, limit: Duration) -> anyhow::Result<Self> {
        let exe = std::env::current_exe().context("cannot find ringwatch's own program")?;
        let room = scratch()?;
        // Not among the segments.
        let place = tempfile::tempdir().context("cannot make a temporary directory for the result")?;
        let result = place.path().join("result.json");
        let (socket, theirs) = UnixStream::pair().context("cannot make a pair of sockets")?;
        socket.set_read_timeout(Some(LOOK))?;
        let mut command = Command::new(exe);
        command.arg("bench").args(arguments(s)).args(["--epoch", &epoch.to_string(), "--turns", "--result"]);
        command.arg(&result);
        v.dress(&mut command, room.path());
        command.stdin(OwnedFd::from(theirs)).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().context("cannot start ringwatch again")?;
        let said = vec![keep_last(child.stderr.take()), keep_last(child.stdout.take())];
        let auditor = v.segments.then(|| Auditor::new(room.path()));
        Ok(Player {
            child,
            socket,
            said,
            result,
            _places: [place, room],
            auditor,
            limit,
            playing: true,
            failure: None,
        })
    }

    fn look(&mut self) {
        if let Some(auditor) = &mut self.auditor {
            auditor.look();
        }
    }

    /// Waits until it is ready, or its turn is over, or it has ended.
    fn hear(&mut self) {
        let start = Instant::now();
        let mut byte = [0];
        loop {
            match self.socket.read(&mut byte) {
                Ok(1) => return,
                Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
                // It has ended; how, its exit status says.
                _ => {
                    self.playing = false;
                    return;
                }
            }
            self.look();
            if start.elapsed() > self.limit {
                self.playing = false;
                self.failure = Some(anyhow::anyhow!("it did not end in {} s", self.limit.as_secs()));
                self.child.kill().ok();
                return;
            }
        }
    }

    fn take_turn(&mut self) {
        if self.socket.write_all(&[0]).is_ok() {
            self.hear();
        } else {
            self.playing = false;
        }
    }

    /// Waits for the result. The child ends by itself, now that it has had its turns.
    pub(super) fn finish(mut self) -> Outcome {
        let ended = self.wait();
        let audit = self.auditor.take().and_then(Auditor::finish);
        let said: Vec<_> = self.said.drain(..).map(|t| t.join().unwrap_or_default()).collect();
        let last = said.iter().map(|s| last_lines(s)).find(|s| !s.is_empty()).unwrap_or_default();
        (self.report(ended, &last), audit)
    }

    fn report(&mut self, ended: anyhow::Result<ExitStatus>, last: &str) -> anyhow::Result<Option<Report>> {
        if let Some(failure) = self.failure.take() {
            return Err(failure.context(last.to_owned()));
        }
        let status = ended.with_context(|| last.to_owned())?;
        match status.code() {
            Some(code) if code == 0 || code == i32::from(FINDINGS) => {}
            _ => bail!("{status}\n{last}"),
        }
        if !self.result.exists() {
            return Ok(None);
        }
        let json = std::fs::read(&self.result).context("cannot read its result")?;
        Ok(Some(serde_json::from_slice(&json).context("cannot read its result")?))
    }

    fn wait(&mut self) -> anyhow::Result<ExitStatus> {
        let start = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status);
            }
            // Who is given turns elsewhere lives as long as the first process's does.
            if !self.playing && start.elapsed() > ENDING {
                self.child.kill()?;
                self.child.wait()?;
                bail!("it had its turns and did not end in {} s", ENDING.as_secs());
            }
            self.look();
            std::thread::sleep(LOOK);
        }
    }
}

/// Lets one after the other measure one size once, again and again, until all have ended. Each is first, second, ...
/// equally often.
pub(super) fn give_turns(players: &mut [Player], round: u32) {
    players.iter_mut().for_each(Player::hear);
    let mut turn = round;
    while players.iter().any(|p| p.playing) {
        for i in order(players.len(), turn) {
            if let Some(player) = players.get_mut(i).filter(|p| p.playing) {
                player.take_turn();
            }
        }
        turn = turn.wrapping_add(1);
    }
}

/// Reads a pipe to its end and keeps the last of it.
fn keep_last(pipe: Option<impl Read + Send + 'static>) -> std::thread::JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let mut kept = Vec::new();
        let mut piece = [0; 4096];
        let Some(mut pipe) = pipe else { return kept };
        while let Ok(n) = pipe.read(&mut piece) {
            if n == 0 {
                break;
            }
            kept.extend_from_slice(&piece[..n]);
            if kept.len() > 2 * KEPT {
                kept.drain(..kept.len() - KEPT);
            }
        }
        kept
    })
}

fn last_lines(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    let lines: Vec<&str> = text.lines().filter(|l| !l.trim().is_empty()).collect();
    lines[lines.len().saturating_sub(LAST_LINES)..].join("\n")
}

/// A directory in memory that goes with the child.
pub(super) fn scratch() -> anyhow::Result<tempfile::TempDir> {
    let shm = PathBuf::from("/dev/shm");
    let base = if shm.is_dir() { shm } else { std::env::temp_dir() };
    tempfile::Builder::new()
        .prefix("rw-bench-")
        .tempdir_in(&base)
        .or_else(|_| tempfile::tempdir())
        .with_context(|| format!("cannot make a directory in {} or the temporary directory", base.display()))
}

/// The settings as options again.
fn arguments(s: &Settings) -> Vec<OsString> {
    let mut a: Vec<OsString> = vec![s.collective.as_str().into()];
    let mut option = |name: &str, value: &dyn AsRef<OsStr>| {
        a.push(name.into());
        a.push(value.as_ref().to_owned());
    };
    match (s.sizes.is_empty(), s.step) {
        (false, _) => {
            let sizes: Vec<String> = s.sizes.iter().map(u64::to_string).collect();
            option("--sizes", &sizes.join(","));
        }
        (true, Step::Factor(f)) => option("--step-factor", &f.to_string()),
        (true, Step::Bytes(b)) => option("--step-bytes", &b.to_string()),
    }
    if s.sizes.is_empty() {
        option("--min-bytes", &s.min_bytes.to_string());
        option("--max-bytes", &s.max_bytes.to_string());
    }
    for (name, value) in [
        ("--iters", s.iters),
        ("--warmup-iters", s.warmup_iters),
        ("--check", u32::from(s.check)),
        ("--root", s.root),
        ("--batch", s.batch),
        ("--repeat", s.repeat),
    ] {
        option(name, &value.to_string());
    }
    option("--op", &s.redop.as_str());
    option("--dtype", &s.dtype.as_str());
    option("--timeout", &s.timeout_s.to_string());
    if s.threads > 0 {
        option("--threads", &s.threads.to_string());
        option("--gpus", &s.gpus.to_string());
    }
    if let Some(n) = s.graph {
        option("--cuda-graph", &n.to_string());
    }
    if let Some(ms) = s.millis {
        option("--millis", &ms.to_string());
    }
    if let Some(path) = &s.nccl {
        option("--nccl", path);
    }
    if let Some(path) = &s.cuda {
        option("--cuda", path);
    }
    for (flag, set) in [("--blocking", s.blocking), ("--pin", s.pin), ("--events", s.events)] {
        if set {
            a.push(flag.into());
        }
    }
    a
}
