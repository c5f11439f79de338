//! The unit for systemd: what `systemd-analyze` says of it, and systemd that runs it beside a job of another user.
//!
//! systemd is process 1 of namespaces of its own, so that the sandbox and the limits are the ones that it makes.

use crate::support::{PROGRAM, Room, Said, run, skipped, until};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

const UNIT: &str = include_str!("../../config/deploy/ringwatch-agent.service");
const SOCKET: &str = include_str!("../../config/deploy/ringwatch-agent.socket");

/// The values of a key, in their order.
fn values(key: &str) -> Vec<&'static str> {
    UNIT.lines().filter_map(|l| l.strip_prefix(key)?.strip_prefix('=')).collect()
}

/// The value of a key that is there once.
fn value(key: &str) -> &'static str {
    let all = values(key);
    assert_eq!(all.len(), 1, "{key}: {all:?}");
    all[0]
}

/// True where a program can be started; without it the test counts as skipped.
fn has(test: &str, program: &str) -> bool {
    let there = Command::new(program).arg("--version").output().is_ok_and(|o| o.status.success());
    if !there {
        skipped(test, program);
    }
    there
}

#[test]
fn systemd_accepts_every_line() {
    let test = "systemd_accepts_every_line";
    if !has(test, "systemd-analyze") {
        return;
    }
    let room = Room::new();
    let path = room.path("ringwatch-agent.service");
    fs::write(&path, UNIT.replace("/usr/bin/ringwatch", PROGRAM)).unwrap();
    let verify = |path: &Path| {
        let verified = run(room.command("systemd-analyze").args(["verify", "--man=no"]).arg(path));
        // What it does not know it ignores, says so, and succeeds.
        assert_eq!((verified.code, verified.out.as_str(), verified.err.as_str()), (Some(0), "", ""));
    };
    verify(&path);
    let socket = room.path("ringwatch-agent.socket");
    fs::write(&socket, SOCKET).unwrap();
    verify(&socket);
    verify(&path);
    // Of ten; 9.6 is a service without a sandbox.
    let exposed = ["security", "--offline=yes", "--no-pager", "--threshold=40"];
    let secure = run(room.command("systemd-analyze").args(exposed).arg(&path));
    assert_eq!(secure.code, Some(0), "{}{}", secure.out, secure.err);
}

#[test]
fn it_fits_systemd_252_and_a_host_without_settings() {
    assert_eq!((value("Type"), value("ExecReload")), ("notify", "/bin/kill -HUP $MAINPID"));
    // What is run before, and files that have to be there, would keep it from starting without settings.
    assert_eq!(values("ExecStartPre"), [""; 0]);
    assert_eq!(value("ExecStart"), "/usr/bin/ringwatch agent");
    assert!(values("EnvironmentFile").iter().all(|f| f.starts_with('-')));
    assert_eq!((value("RuntimeDirectory"), value("StateDirectory")), ("ringwatch", "ringwatch"));
}

/// All that systemd is to start, without the machine's own services.
const TARGET: &str = "[Unit]
DefaultDependencies=no
Wants=ringwatch-agent.service rank@0.service rank@1.service rank@2.service rank@3.service
";
/// Added to the unit, which waits for services of the machine that are not started here.
const AGENT: &str = "[Unit]
DefaultDependencies=no
[Service]
StandardOutput=file:/run/shared/agent.out
StandardError=file:/run/shared/agent.err
";
/// Added to the socket, which belongs to a target that is not started here.
const PORT: &str = "[Unit]
DefaultDependencies=no
";
const RANK: &str = "[Unit]
DefaultDependencies=no
[Service]
User=nobody
Environment=RANK=%i WORLD_SIZE=4
ExecStart=python3 /usr/bin/rank.py /usr/bin/plugin.so %i 4
StandardOutput=file:/run/shared/rank-%i.out
StandardError=file:/run/shared/rank-%i.err
";
/// Added to the ranks that are in containers.
const CONTAINER: &str = "[Service]
TemporaryFileSystem=/dev/shm:mode=1777
";

/// systemd as process 1 of its own namespaces; all of it ends with this value.
struct Machine {
    child: Child,
    /// Holds what the services write.
    shared: PathBuf,
    group: String,
}

impl Machine {
    fn start(files: &Path, shared: &Path) -> Self {
        let group = format!("ringwatch-service-{}", std::process::id());
        let child = Command::new("unshare")
            .args(["--mount", "--pid", "--fork", "--uts", "--ipc", "--net", "--kill-child", "sh", "-c"])
            .args([include_str!("boot.sh"), "boot.sh"])
            .args([files.as_os_str(), group.as_ref(), shared.as_os_str()])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(fs::File::create(shared.join("boot.err")).unwrap())
            .spawn()
            .unwrap();
        Machine { child, shared: shared.to_owned(), group }
    }

    /// What services wrote to a file.
    fn text(&self, file: &str) -> String {
        fs::read_to_string(self.shared.join(file)).unwrap_or_default()
    }

    /// Runs a command inside.
    fn run(&self, command: &[&str]) -> Said {
        let children = format!("/proc/{0}/task/{0}/children", self.child.id());
        let init = fs::read_to_string(children).unwrap();
        run(Command::new("nsenter")
            .args(["--mount", "--pid", "--net", "--target", init.trim()])
            .args(command))
    }

    /// Waits until a file holds a text.
    fn writes(&self, file: &str, text: &str) {
        until(&format!("{file} holds {text:?}"), || self.text(file).contains(text).then_some(()));
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for file in ["boot.err", "agent.out", "agent.err", "rank-0.err", "rank-3.err"] {
                eprintln!("{file}:\n{}", self.text(file));
            }
        }
        drop(self.child.kill());
        drop(self.child.wait());
        for line in self.text("groups").lines() {
            let point = line.split(' ').next().unwrap();
            until("the control groups are empty", || remove(&Path::new(point).join(&self.group)));
        }
    }
}

/// Removes a control group and those below it.
fn remove(group: &Path) -> Option<()> {
    for entry in fs::read_dir(group).ok()?.flatten().filter(|e| e.path().is_dir()) {
        remove(&entry.path())?;
    }
    fs::remove_dir(group).ok()
}

/// The files that lie over those of the machine.
fn files(room: &Room, at: &Path, py_spy: &Path) {
    let (bin, units) = (at.join("usr/bin"), at.join("etc/systemd/system"));
    fs::create_dir_all(&bin).unwrap();
    for (name, from) in [("ringwatch", Path::new(PROGRAM)), ("plugin.so", &room.plugin()), ("py-spy", py_spy)]
    {
        fs::copy(from, bin.join(name)).unwrap();
    }
    fs::write(bin.join("rank.py"), include_str!("rank.py")).unwrap();
    for (name, text) in [
        ("test.target", TARGET),
        ("ringwatch-agent.service", UNIT),
        ("ringwatch-agent.service.d/test.conf", AGENT),
        ("ringwatch-agent.socket", SOCKET),
        ("ringwatch-agent.socket.d/test.conf", PORT),
        ("rank@.service", RANK),
        ("rank@2.service.d/container.conf", CONTAINER),
        ("rank@3.service.d/container.conf", CONTAINER),
    ] {
        let path = units.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
}

fn stop(machine: &Machine) {
    let stopped = machine.run(&["systemctl", "stop", "ringwatch-agent"]);
    assert_eq!(stopped.code, Some(0), "{}", stopped.err);
}

/// Takes the port, as whoever it runs as.
const TAKE: &str = "import socket, sys
try:
    socket.create_server(('127.0.0.1', 9478))
except OSError as e:
    sys.exit(e.strerror)";
/// Scrapes once.
const SCRAPE: &str = "import urllib.request
print(urllib.request.urlopen('http://127.0.0.1:9478/metrics', timeout=60).read().decode())";

/// Asserts that no user gets the agent's port while it is stopped, and that a scrape waits for the agent.
fn assert_port_is_held(machine: &Machine) {
    machine.writes("agent.err", "a socket of the service manager");
    stop(machine);
    let nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"];
    let taken = machine.run(&[&nobody[..], &["/usr/bin/python3", "-c", TAKE]].concat());
    assert!(taken.code == Some(1) && taken.err.contains("Address already in use"), "{}", taken.err);
    let scraped = machine.run(&["/usr/bin/python3", "-c", SCRAPE]);
    assert!(scraped.out.contains("ringwatch_agent_listen_failures_total{"), "{}", scraped.err);
    let active = machine.run(&["systemctl", "is-active", "ringwatch-agent"]);
    assert_eq!(active.out, "active\n");
}

#[test]
fn systemd_runs_the_agent_and_the_sandbox_hides_no_job_from_it() {
    let test = "systemd_runs_the_agent_and_the_sandbox_hides_no_job_from_it";
    let may = Command::new("unshare").args(["--mount", "--pid", "--fork", "--mount-proc", "true"]).output();
    if !may.is_ok_and(|o| o.status.success()) {
        return skipped(test, "unshare, and the right to make mount and pid namespaces (root)");
    }
    if !has(test, "systemctl") || !has(test, "/usr/bin/python3") || !has(test, "py-spy") {
        return;
    }
    let path = std::env::var_os("PATH").unwrap();
    let py_spy = std::env::split_paths(&path).map(|dir| dir.join("py-spy")).find(|p| p.is_file()).unwrap();
    let room = Room::new();
    let outside = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    // Two layers of one overlay cannot be on one file system, one inside the other.
    let (over, shared) = (room.path("files"), outside.path().join("shared"));
    files(&room, &over, &py_spy);
    fs::create_dir(&shared).unwrap();

    let machine = Machine::start(&over, &shared);
    machine.writes("agent.err", "listening on http://");
    machine.writes("agent.out", "missing-rank: rank 3");
    // The stack comes a moment after the finding.
    until("the finding has the stack", || {
        let said = machine.run(&["ringwatch", "diagnose", "--agent"]);
        (said.code == Some(1) && said.out.contains("rank 3 is at load_batch (/usr/bin/rank.py:"))
            .then_some(())
    });
    assert!(!machine.text("agent.err").contains("not read"), "{}", machine.text("agent.err"));

    let limit = machine.text("groups").lines().find_map(|line| {
        let slice = Path::new(line.split(' ').next()?).join(&machine.group).join("system.slice");
        let group = slice.join("ringwatch-agent.service");
        let read = |file| fs::read_to_string(group.join(file)).ok();
        read("memory.max").or_else(|| read("memory.limit_in_bytes"))
    });
    assert_eq!(limit.as_deref(), Some("268435456\n"), "MemoryMax= is {}", value("MemoryMax"));

    let reloaded = machine.run(&["systemctl", "reload", "ringwatch-agent"]);
    assert_eq!(reloaded.code, Some(0), "{}", reloaded.err);
    machine.writes("agent.err", "the settings were read again");
    let active = machine.run(&["systemctl", "is-active", "ringwatch-agent"]);
    assert_eq!(active.out, "active\n");
    assert_port_is_held(&machine);
    stop(&machine);
    let show = ["systemctl", "show", "--property=Result,NRestarts,ActiveState", "ringwatch-agent"];
    let shown = machine.run(&show).out;
    for line in ["Result=success", "NRestarts=0", "ActiveState=inactive"] {
        assert!(shown.lines().any(|l| l == line), "{line} in {shown}");
    }
    let kept = machine.run(&["ls", "/var/lib/ringwatch"]);
    assert!(kept.code == Some(0) && !kept.out.is_empty(), "findings outlive the agent: {}", kept.err);
}
