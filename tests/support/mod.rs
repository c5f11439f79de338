//! What the tests of the whole program share: a room of their own to write in, players of recordings that end
//! with the test, processes that end in time, and JSON that keeps the order of its keys.

pub(crate) mod agent;
pub(crate) mod fake_gpu;
mod json;
pub(crate) mod machine;
pub(crate) mod nats;
pub(crate) mod prometheus;
pub(crate) mod skip;
pub(crate) mod watchdog;

pub(crate) use json::Json;
pub(crate) use skip::skipped;

use ringwatch::replay::PlayReport;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

/// The program under test.
pub(crate) const PROGRAM: &str = env!("CARGO_BIN_EXE_ringwatch");

/// Longer than anything here takes on a busy machine: a hang is a failure, slowness is not.
pub(crate) const PATIENCE: Duration = Duration::from_secs(90);

/// Directories that go with the test, so that nothing of it meets the machine's own jobs.
#[derive(Debug)]
pub(crate) struct Room {
    dir: tempfile::TempDir,
}

impl Room {
    pub(crate) fn new() -> Self {
        // In memory, as in use: on a disk the plugin says that a store may wait. Not by a name that `top` looks for.
        let base = Some(PathBuf::from("/dev/shm")).filter(|d| d.is_dir()).unwrap_or_else(std::env::temp_dir);
        let dir = tempfile::Builder::new().prefix("rw-test-").tempdir_in(base).expect("a directory");
        for name in ["segments", "cache", "tmp"] {
            fs::create_dir(dir.path().join(name)).expect("a directory");
        }
        Room { dir }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) fn segments(&self) -> PathBuf {
        self.path("segments")
    }

    /// The plugin that the program carries, as a file.
    pub(crate) fn plugin(&self) -> PathBuf {
        ringwatch::bundle::install(&self.path("plugin")).expect("the plugin is written")
    }

    /// A command in an environment without a trace of whoever runs the tests.
    pub(crate) fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        for (name, _) in std::env::vars_os() {
            let text = name.to_string_lossy();
            let foreign = ["RINGWATCH_", "NCCL_", "SLURM_", "OMPI_", "PMI_", "TORCHELASTIC_", "LSB_", "PBS_"];
            if foreign.iter().any(|f| text.starts_with(f)) || text == "RANK" || text == "WORLD_SIZE" {
                command.env_remove(name);
            }
        }
        command
            .env_remove("LD_LIBRARY_PATH")
            .env("HOME", self.dir.path())
            .env("XDG_CACHE_HOME", self.path("cache"))
            .env("TMPDIR", self.path("tmp"))
            .env("RINGWATCH_DIR", self.segments())
            // An agent of a test leaves nothing behind on this machine.
            .env("RINGWATCH_AGENT_FINDINGS__DIRECTORY", "null")
            .stdin(Stdio::null());
        command
    }

    /// The program under test with these arguments.
    pub(crate) fn ringwatch<I: IntoIterator<Item = S>, S: AsRef<std::ffi::OsStr>>(
        &self,
        arguments: I,
    ) -> Command {
        let mut command = self.command(PROGRAM);
        command.args(arguments);
        command
    }

    /// The names of the segments, sorted.
    pub(crate) fn segment_files(&self) -> Vec<PathBuf> {
        files(&self.segments())
    }
}

/// What lies in a directory, sorted; nothing where there is none.
pub(crate) fn files(dir: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(dir) else { return Vec::new() };
    let mut files: Vec<PathBuf> = entries.flatten().map(|e| e.path()).collect();
    files.sort();
    files
}

/// What a finished command said.
#[derive(Debug)]
pub(crate) struct Said {
    pub(crate) code: Option<i32>,
    pub(crate) out: String,
    pub(crate) err: String,
}

/// Runs a command to its end, within the patience.
pub(crate) fn run(command: &mut Command) -> Said {
    let o = output(command);
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("text");
    Said { code: o.status.code(), out: text(o.stdout), err: text(o.stderr) }
}

/// Runs a command to its end, within the patience.
pub(crate) fn output(command: &mut Command) -> Output {
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the command starts");
    finish(child)
}

/// Waits for a process and takes what it wrote to its pipes.
pub(crate) fn finish(mut child: Child) -> Output {
    let (out, err) = (drain(child.stdout.take()), drain(child.stderr.take()));
    let status = wait(&mut child);
    let join = |t: std::thread::JoinHandle<Vec<u8>>| t.join().expect("the reader ends");
    Output { status, stdout: join(out), stderr: join(err) }
}

/// Reads a pipe to its end, on a thread so that a full one holds nobody up.
pub(crate) fn drain(pipe: Option<impl Read + Send + 'static>) -> std::thread::JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut pipe) = pipe {
            pipe.read_to_end(&mut bytes).expect("the pipe is read");
        }
        bytes
    })
}

/// Waits for a process, which is killed where it does not end.
pub(crate) fn wait(child: &mut Child) -> ExitStatus {
    let until = Instant::now() + PATIENCE;
    loop {
        if let Some(status) = child.try_wait().expect("a child of ours") {
            return status;
        }
        if Instant::now() > until {
            child.kill().expect("our own child");
            child.wait().expect("our own child");
            panic!("process {} did not end in {PATIENCE:?}", child.id());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Asks again and again, until there is an answer.
pub(crate) fn until<T>(what: &str, mut ask: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + PATIENCE;
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(Instant::now() < end, "{what}: not in {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Does something as another user, on a thread whose credentials are its own.
pub(crate) fn as_user<T: Send>(uid: u32, what: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|s| {
        let there = s.spawn(|| {
            let (user, group) = (rustix::process::Uid::from_raw(uid), rustix::process::Gid::from_raw(uid));
            rustix::thread::set_thread_groups(&[]).expect("root may");
            rustix::thread::set_thread_res_gid(group, group, group).expect("root may");
            rustix::thread::set_thread_res_uid(user, user, user).expect("root may");
            what()
        });
        there.join().expect("it does not panic")
    })
}

/// Ends what other threads do in the meantime when it is dropped: also when the test fails.
#[derive(Debug)]
pub(crate) struct Meanwhile<'a>(pub(crate) &'a std::sync::atomic::AtomicBool);

impl Drop for Meanwhile<'_> {
    fn drop(&mut self) {
        self.0.store(true, std::sync::atomic::Ordering::Relaxed);
    }
}

/// How a recording is played.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Play {
    pub(crate) scenario: &'static str,
    pub(crate) two_node: bool,
    pub(crate) ranks: &'static [usize],
    pub(crate) abi: u8,
    pub(crate) unpaced: bool,
    /// How often; each time with communicators of its own.
    pub(crate) loops: u32,
    /// Times as fast as it was recorded, unless it is unpaced.
    pub(crate) speed: f64,
    /// Seconds that the processes live on afterwards.
    pub(crate) hold: u32,
}

/// Operations that are known to have ended after the recording `mixed` over two nodes: 37 of 38 collectives of all ranks, 4 of two
/// halves, 16 transfers and 4 copies of a rank to itself. After such a copy the stamps of each operation are those of the one
/// before. That the last transfers have ended is known as a later collective has started.
pub(crate) const ENDED_IN_MIXED: f64 = 61.0;

impl Play {
    /// All ranks of a one-node recording at its own pace, by the ABI it was recorded with.
    pub(crate) fn of(scenario: &'static str) -> Self {
        Play {
            scenario,
            two_node: false,
            ranks: &[0, 1, 2, 3],
            abi: 5,
            unpaced: false,
            loops: 1,
            speed: 1.0,
            hold: 0,
        }
    }

    pub(crate) fn unpaced(self) -> Self {
        Play { unpaced: true, ..self }
    }

    pub(crate) fn two_node(self) -> Self {
        Play { two_node: true, ..self }
    }

    pub(crate) fn loops(self, loops: u32) -> Self {
        Play { loops, ..self }
    }

    pub(crate) fn speed(self, speed: f64) -> Self {
        Play { speed, ..self }
    }

    pub(crate) fn hold(self, hold: u32) -> Self {
        Play { hold, ..self }
    }

    pub(crate) fn ranks(self, ranks: &'static [usize]) -> Self {
        Play { ranks, ..self }
    }
}

/// One process a rank, as in the job itself. They end with this value, if not before.
#[derive(Debug)]
pub(crate) struct Players {
    pub(crate) children: Vec<Child>,
}

impl Players {
    pub(crate) fn start(room: &Room, play: Play) -> Self {
        Self::start_with(room, play, &[])
    }

    /// The same, with more in the environment.
    pub(crate) fn start_with(room: &Room, play: Play, variables: &[(&str, &std::ffi::OsStr)]) -> Self {
        let plugin = room.plugin();
        // Processes start one after the other; the recording begins when all are there.
        let start_at = ringwatch::replay::monotonic_ns() + 500_000_000;
        let mut players = Players { children: Vec::new() };
        for rank in play.ranks {
            let mut command = room.ringwatch(["replay", "--scenario", play.scenario]);
            command
                .args(["--rank", &rank.to_string(), "--abi", &play.abi.to_string()])
                .args(["--loops", &play.loops.to_string()])
                .args(["--hold", &play.hold.to_string(), "--plugin"])
                .arg(&plugin)
                .env("RANK", rank.to_string())
                .env("WORLD_SIZE", "4")
                .env("RINGWATCH_JOB", "test")
                .envs(variables.iter().copied())
                .stdout(Stdio::piped());
            if play.two_node {
                command.arg("--two-node");
            }
            if play.unpaced {
                command.arg("--unpaced");
            } else {
                command
                    .args(["--start-at", &start_at.to_string()])
                    .args(["--speed", &play.speed.to_string()]);
            }
            players.children.push(command.spawn().expect("a player starts"));
        }
        players
    }

    /// Waits until every recording was played, which is when its report comes.
    pub(crate) fn played(&mut self) -> Vec<PlayReport> {
        self.children
            .iter_mut()
            .map(|c| {
                let mut line = String::new();
                let out = c.stdout.as_mut().expect("a pipe");
                std::io::BufRead::read_line(&mut std::io::BufReader::new(out), &mut line)
                    .expect("the report is read");
                serde_json::from_str(&line).expect("a report")
            })
            .collect()
    }

    /// Lets the players come to their own end.
    pub(crate) fn end(mut self) {
        for c in &mut self.children {
            assert!(wait(c).success(), "a player failed");
        }
    }

    /// SIGKILL for all of them, as a node's OOM killer or scheduler does it.
    pub(crate) fn kill(&mut self) {
        for c in &mut self.children {
            // It may have ended already.
            c.kill().ok();
            c.wait().expect("our own child");
        }
    }
}

impl Drop for Players {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Findings as the program prints them: one object a line, each of exactly the documented shape.
pub(crate) fn findings(out: &str) -> Vec<Json> {
    out.lines()
        .map(|line| {
            let finding: Json = serde_json::from_str(line).expect("each line is one JSON object");
            assert_shape(&finding);
            finding
        })
        .collect()
}

/// Changes of findings as a daemon prints them: what changed, and the finding.
pub(crate) fn changes(out: &str) -> Vec<(String, Json)> {
    out.lines()
        .map(|line| {
            let rest = line.strip_prefix("{\"change\":\"").expect("a change");
            let (change, finding) = rest.split_once("\",").expect("a finding");
            (change.to_owned(), findings(&format!("{{{finding}")).remove(0))
        })
        .collect()
}

/// The findings among them that were opened.
pub(crate) fn opened(out: &str) -> Vec<Json> {
    changes(out).into_iter().filter(|(change, _)| change == "opened").map(|(_, f)| f).collect()
}

fn assert_shape(f: &Json) {
    let first = ["kind", "communicator", "owner", "ranks", "operation", "since", "evidence", "advice"];
    let added = [
        "id",
        "cause",
        "victims",
        "severity",
        "confidence",
        "first_seen",
        "last_seen",
        "open",
        "closed_at",
        "close_reason",
        "count",
    ];
    // What is not slow has no price, and most communicators have no name.
    let mut keys = f.keys();
    keys.retain(|k| !["cost", "communicator_name"].contains(k));
    assert_eq!(keys, [first.as_slice(), added.as_slice()].concat(), "{f:?}");
    assert_eq!(
        f.get("operation").keys(),
        ["order", "func", "bytes", "dtype", "algo", "proto", "redop", "track"],
        "{f:?}"
    );
    let id = f.get("communicator").text();
    assert!(id.len() == 16 && id.bytes().all(|b| b.is_ascii_hexdigit()), "{id}");
    assert!(!f.get("ranks").list().is_empty(), "{f:?}");
    assert!(!f.get("evidence").list().is_empty(), "{f:?}");
    for e in f.get("evidence").list() {
        assert_eq!(e.keys(), ["text", "value", "unit"], "{f:?}");
        assert!(!e.get("text").text().is_empty(), "{f:?}");
        // A number without its unit says nothing, nor does a unit without a number.
        assert_eq!(*e.get("value") == Json::Null, *e.get("unit") == Json::Null, "{f:?}");
    }
    assert!(!f.get("advice").text().is_empty(), "{f:?}");
}

/// The ranks of a finding.
pub(crate) fn ranks(f: &Json) -> Vec<u32> {
    f.get("ranks").list().iter().map(|r| r.number() as u32).collect()
}

/// The texts of its evidence.
pub(crate) fn evidence(f: &Json) -> Vec<&str> {
    f.get("evidence").list().iter().map(|e| e.get("text").text()).collect()
}

/// The one finding of the recording in which rank 3 never issues the last all-reduce.
pub(crate) fn assert_missing_rank(found: &[Json]) {
    assert_eq!(found.len(), 1, "{found:#?}");
    let f = &found[0];
    assert_eq!((f.get("kind").text(), ranks(f)), ("missing-rank", vec![3]), "{f:#?}");
    let op = f.get("operation");
    assert_eq!((op.get("func").text(), op.get("bytes")), ("AllReduce", &Json::Number(16_777_216.0)));
    assert_eq!(op.get("order"), &Json::Number(3.0));
    assert_eq!(op.get("dtype").text(), "ncclFloat32");
}

/// The one finding of the recording in which rank 1 issues an all-gather for an all-reduce.
pub(crate) fn assert_mismatch(found: &[Json]) {
    assert_eq!(found.len(), 1, "{found:#?}");
    let f = &found[0];
    assert_eq!((f.get("kind").text(), ranks(f)), ("mismatch", vec![1]), "{f:#?}");
    let op = f.get("operation");
    assert_eq!((op.get("func").text(), op.get("bytes")), ("AllReduce", &Json::Number(16_777_216.0)));
    assert_eq!(op.get("order"), &Json::Number(3.0));
    let facts = evidence(f);
    let says = |text: &str| facts.iter().any(|e| e.contains(text));
    assert!(says("rank 1 issued AllGather of"), "{facts:#?}");
    assert!(says("ranks 0, 2, 3 issued AllReduce of"), "{facts:#?}");
    assert!(says("issue order 3 on all of them"), "{facts:#?}");
}
