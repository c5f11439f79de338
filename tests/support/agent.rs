//! The agent as a process, and what it says.

use super::{PATIENCE, Room, drain, run, until, wait};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

/// An agent; it ends with this value, if not before.
#[derive(Debug)]
pub(crate) struct Agent {
    pub(crate) child: Child,
    /// Where it serves /metrics.
    pub(crate) address: String,
    err: Receiver<String>,
    out: Option<std::thread::JoinHandle<Vec<u8>>>,
}

impl Agent {
    /// Watches the room's segments; `more` is added to its command line, and overrides what is there.
    pub(crate) fn start(room: &Room, more: &[&str]) -> Self {
        Self::with(room, more, &[])
    }

    /// The same, with more in its environment.
    pub(crate) fn with(room: &Room, more: &[&str], variables: &[(&str, PathBuf)]) -> Self {
        let more = more.iter().map(|m| (*m).to_owned());
        let mut command = room.ringwatch(arguments(room).into_iter().chain(more));
        Self::run(command.envs(variables.iter().map(|(k, v)| (k, v))))
    }

    /// One that is started by a shell with limits (the options of `ulimit`, in this order).
    pub(crate) fn limited(room: &Room, limits: &[(&str, u64)]) -> Self {
        let set: String = limits.iter().map(|(option, n)| format!("ulimit {option} {n} && ")).collect();
        Self::prepared(room, Path::new(super::PROGRAM), &set, &[])
    }

    /// A program that a shell becomes after these commands, which end in `&&`; `more` as in [`Agent::start`].
    pub(crate) fn prepared(room: &Room, program: &Path, commands: &str, more: &[&str]) -> Self {
        let mut command = room.command("sh");
        command.args(["-c", &format!("{commands} exec \"$0\" \"$@\"")]).arg(program);
        Self::run(command.args(arguments(room)).args(more))
    }

    /// One that the service manager hands a socket, as systemd does it: the socket is descriptor 3 of the process that
    /// `LISTEN_PID` names.
    pub(crate) fn handed(room: &Room, socket: impl Into<Stdio>) -> Self {
        let mut command = room.command("sh");
        let commands = "exec 3<&0 </dev/null && export LISTEN_FDS=1 LISTEN_PID=$$ && exec \"$0\" \"$@\"";
        command.args(["-c", commands, super::PROGRAM]).stdin(socket);
        Self::run(command.args(arguments(room)))
    }

    /// An analyser, which is asked in the same ways.
    pub(crate) fn analyser(room: &Room, more: &[&str]) -> Self {
        let set = ["analyser", "--json", "--set", "http.listen=127.0.0.1:0"];
        Self::run(&mut room.ringwatch(set.iter().chain(more)))
    }

    /// One that may not listen yet: its address is that of the settings.
    pub(crate) fn without_port(room: &Room, more: &[&str], address: &str) -> Self {
        let listen = format!("http.listen={address}");
        let more = more.iter().copied().chain(["--set", &listen]).map(str::to_owned);
        let mut agent = Self::spawn(&mut room.ringwatch(arguments(room).into_iter().chain(more)));
        address.clone_into(&mut agent.address);
        agent
    }

    fn run(command: &mut Command) -> Self {
        let mut agent = Self::spawn(command);
        let line = agent.says("listening on http://");
        let rest = line.split_once("http://").map_or("", |(_, rest)| rest);
        // In JSON more follows.
        let address = rest.trim_end_matches(|c: char| !c.is_ascii_digit());
        agent.address = address.split('"').next().unwrap_or_default().to_owned();
        agent
    }

    fn spawn(command: &mut Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
        let pipe = BufReader::new(child.stderr.take().expect("a pipe"));
        let (said, err) = mpsc::channel();
        // Read all the time, so that a full pipe holds nobody up.
        std::thread::spawn(move || pipe.lines().map_while(Result::ok).try_for_each(|l| said.send(l)));
        let out = Some(drain(child.stdout.take()));
        Agent { child, address: String::new(), err, out }
    }

    /// Status and body of a GET.
    pub(crate) fn get(&self, path: &str) -> (u32, String) {
        get(&self.address, path)
    }

    /// The series of a metric, without comments: labels and value, sorted.
    pub(crate) fn series(&self, metric: &str) -> Vec<(String, f64)> {
        let (status, body) = self.get("/metrics");
        assert_eq!(status, 200, "{body}");
        let of = |line: &str| {
            let (labels, value) = line.strip_prefix(metric)?.split_once("} ")?;
            let labels = labels.strip_prefix('{')?;
            // What follows the value is an exemplar.
            Some((labels.to_owned(), value.split(' ').next()?.parse().ok()?))
        };
        let mut all: Vec<(String, f64)> = body.lines().filter_map(of).collect();
        all.sort_by(|a, b| a.0.cmp(&b.0));
        all
    }

    /// The sum of a metric's series.
    pub(crate) fn sum(&self, metric: &str) -> f64 {
        self.series(metric).iter().map(|(_, v)| v).sum()
    }

    pub(crate) fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).expect("our own child");
    }

    /// The lines on its standard error that nobody has taken yet.
    pub(crate) fn said_so_far(&self) -> Vec<String> {
        self.err.try_iter().collect()
    }

    /// The next line on its standard error with this in it.
    pub(crate) fn says(&self, text: &str) -> String {
        let mut before = Vec::new();
        let end = Instant::now() + PATIENCE;
        loop {
            let Ok(line) = self.err.recv_timeout(end.saturating_duration_since(Instant::now())) else {
                panic!("the agent never said {text:?}, but {before:#?}");
            };
            if line.contains(text) {
                return line;
            }
            before.push(line);
        }
    }

    /// The lines on its standard error until each of these texts was in one of them.
    pub(crate) fn says_all(&self, texts: &[&str]) -> Vec<String> {
        let (mut lines, end) = (Vec::new(), Instant::now() + PATIENCE);
        let mut missing = texts.to_vec();
        while !missing.is_empty() {
            let Ok(line) = self.err.recv_timeout(end.saturating_duration_since(Instant::now())) else {
                panic!("the agent never said {missing:?}, but {lines:#?}");
            };
            missing.retain(|text| !line.contains(text));
            lines.push(line);
        }
        lines
    }

    /// SIGKILL, as the kernel does it where memory is short.
    pub(crate) fn kill(mut self) {
        self.child.kill().expect("our own child");
        self.child.wait().expect("our own child");
    }

    /// SIGKILL as well; the rest of its log.
    pub(crate) fn kill_with_log(mut self) -> Vec<String> {
        self.child.kill().expect("our own child");
        self.child.wait().expect("our own child");
        self.err.iter().collect()
    }

    /// Ends it as a service manager does; what it told, and the rest of its log.
    pub(crate) fn end_with_log(mut self) -> (String, Vec<String>) {
        self.signal(rustix::process::Signal::TERM);
        wait(&mut self.child);
        let out = self.out.take().map(|o| o.join().expect("the reader ends")).unwrap_or_default();
        (String::from_utf8(out).expect("text"), self.err.iter().collect())
    }

    /// Ends it as a service manager does; what it told, and its exit code.
    pub(crate) fn end(mut self) -> (String, Option<i32>) {
        self.signal(rustix::process::Signal::TERM);
        let code = wait(&mut self.child).code();
        let out = self.out.take().map(|o| o.join().expect("the reader ends")).unwrap_or_default();
        (String::from_utf8(out).expect("text"), code)
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// Status and body of a GET.
pub(crate) fn get(address: &str, path: &str) -> (u32, String) {
    let mut s = TcpStream::connect(address).expect("it listens");
    s.set_read_timeout(Some(Duration::from_secs(20))).expect("a socket");
    write!(s, "GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n").expect("it reads");
    let mut text = String::new();
    s.read_to_string(&mut text).expect("it answers");
    let (head, body) = text.split_once("\r\n\r\n").expect("HTTP");
    let status = head.split_whitespace().nth(1).and_then(|s| s.parse().ok());
    (status.expect("a status"), body.to_owned())
}

/// The arguments of a room's agent.
fn arguments(room: &Room) -> Vec<String> {
    let directories = format!("segments.directories=[{:?}]", room.segments());
    let socket = format!("socket.path={}", socket(room).display());
    let findings = format!("findings.directory={}", room.path("state").display());
    let set = [directories.as_str(), &socket, &findings, "http.listen=127.0.0.1:0"];
    let set = set.into_iter().flat_map(|s| ["--set", s]);
    ["agent", "--json"].into_iter().chain(set).map(str::to_owned).collect()
}

/// Where the agent of a room listens.
pub(crate) fn socket(room: &Room) -> PathBuf {
    room.path("run/agent.sock")
}

/// What `ringwatch diagnose --agent` prints, once it prints a finding.
pub(crate) fn diagnosed(room: &Room) -> String {
    let socket = socket(room);
    until("a finding", || {
        let mut command = room.ringwatch(["diagnose", "--json", "--agent"]);
        let said = run(command.arg(&socket));
        (said.code == Some(1)).then_some(said.out)
    })
}
