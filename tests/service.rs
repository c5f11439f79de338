//! The unit for systemd: what `systemd-analyze` says of it, and the agent started as it says, in its sandbox.
//!
//! There is no systemd to run it here. The test makes the unit's mounts, capabilities, limits and filter of system calls by
//! itself, from the lines of the unit. DevicePolicy=, RestrictAddressFamilies=, ProtectKernel*= and the limits of cgroups are
//! not made.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(unsafe_code, reason = "a filter of system calls has no safe name")]

mod support;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::net::UnixDatagram;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Instant;
use support::{PATIENCE, PROGRAM, Room, run, skipped};

const UNIT: &str = include_str!("../config/deploy/ringwatch-agent.service");

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
    let verified = run(room.command("systemd-analyze").args(["verify", "--man=no"]).arg(&path));
    // What it does not know it ignores, says so, and succeeds.
    assert_eq!((verified.code, verified.out.as_str(), verified.err.as_str()), (Some(0), "", ""));
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

/// The names of all system calls of systemd's groups.
fn calls(groups: &[&str]) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    let mut left: Vec<String> = groups.iter().map(|g| (*g).to_owned()).collect();
    while let Some(group) = left.pop() {
        let said =
            Command::new("systemd-analyze").args(["syscall-filter", "--no-pager", &group]).output().unwrap();
        assert!(said.status.success(), "{group}");
        for line in String::from_utf8(said.stdout).unwrap().lines().skip(1) {
            match line.trim() {
                "" => {}
                comment if comment.starts_with('#') => {}
                inner if inner.starts_with('@') => left.push(inner.to_owned()),
                name => drop(names.insert(name.to_owned())),
            }
        }
    }
    names
}

/// The numbers of system calls on this machine; absent without the kernel's headers.
fn numbers() -> Option<BTreeMap<String, u32>> {
    let names =
        ["x86_64-linux-gnu/asm/unistd_64.h", "aarch64-linux-gnu/asm/unistd.h", "asm-generic/unistd.h"];
    let text = names.iter().find_map(|n| fs::read_to_string(format!("/usr/include/{n}")).ok())?;
    let number = |line: &str| {
        let (name, n) = line.strip_prefix("#define __NR_")?.split_once(' ')?;
        Some((name.to_owned(), n.trim().parse().ok()?))
    };
    Some(text.lines().filter_map(number).collect())
}

const ALLOWED: &str = "RINGWATCH_TEST_ALLOWED_CALLS";
const LINE: &str = "RINGWATCH_TEST_EXEC";

/// Started by the test below in its sandbox: allows the system calls that are named, and becomes the agent.
#[test]
#[ignore = "another test starts it in a sandbox"]
fn becomes_the_agent_behind_a_filter() {
    let allowed = std::env::var(ALLOWED).unwrap();
    let statement = |code: u32, k: u32| libc::sock_filter { code: code as u16, jt: 0, jf: 0, k };
    // The number of the call is the first word of what a filter sees.
    let mut filter = vec![statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0)];
    for n in allowed.split(',').map(|n| n.parse().unwrap()) {
        let equal = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
        filter.push(libc::sock_filter { code: equal, jt: 0, jf: 1, k: n });
        filter.push(statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW));
    }
    let refuse = libc::SECCOMP_RET_ERRNO | libc::EPERM as u32;
    filter.push(statement(libc::BPF_RET | libc::BPF_K, refuse));
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: the kernel copies the program, which lives until then; it has as many statements as it says.
    let set = unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) };
    assert_eq!(set, 0, "{}", std::io::Error::last_os_error());
    let line = std::env::var(LINE).unwrap();
    let mut words = line.split(' ');
    let mut command = Command::new(words.next().unwrap());
    let error = command.args(words).env_remove(ALLOWED).env_remove(LINE).exec();
    panic!("{line}: {error}");
}

/// The agent in its sandbox; all of it ends with this value.
struct Service {
    child: Child,
    lines: Receiver<String>,
}

impl Drop for Service {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

impl Service {
    /// Waits for a line on its standard output or error.
    fn says(&self, text: &str) -> String {
        let (end, mut before) = (Instant::now() + PATIENCE, Vec::new());
        loop {
            let Ok(line) = self.lines.recv_timeout(end.saturating_duration_since(Instant::now())) else {
                panic!("it never said {text:?}, but {before:#?}");
            };
            if line.contains(text) {
                return line;
            }
            before.push(line);
        }
    }
}

/// Makes the unit's mounts in namespaces of its own, jobs of a user, and becomes the agent with the unit's rights.
const SANDBOX: &str = r#"
set -e
mount --make-rprivate /
mount -t overlay overlay -o lowerdir=$ROOM/bin:/usr/bin /usr/bin
for dir in /dev/shm /run /var/lib /tmp /var/tmp; do mount -t tmpfs none $dir; chmod 1777 $dir; done
for dir in /run/$RUNTIME /var/lib/$STATE; do mkdir -m 755 $dir; mount --bind $dir $dir; done
# Players end with their parent, which must not be the one that becomes the agent.
(
  for rank in 0 1 2 3; do
    RANK=$rank WORLD_SIZE=4 RINGWATCH_JOB=test setpriv --reuid 60001 --regid 60001 --clear-groups \
      ringwatch replay --scenario missing-rank --rank $rank --hold 60 --plugin /usr/bin/plugin.so >/dev/null &
  done
  wait
) &
while read -r device dir rest; do
  case $dir in
    /dev|/dev/*|/proc|/proc/*|/sys|/sys/*|/run/$RUNTIME|/var/lib/$STATE) ;;
    # Some are hidden below what was mounted here; the loop below says whether enough is read-only.
    *) mount -o remount,bind,ro $dir 2>/dev/null || true ;;
  esac
done < /proc/self/mounts
for dir in /etc /usr /run /home /tmp; do if touch $dir/x 2>/dev/null; then echo "$dir can be written to" >&2; exit 1; fi; done
mount -t tmpfs none /tmp
ulimit -c $CORE
# More than the hard limit takes a right that containers may not have.
ulimit -n $NOFILE 2>/dev/null || ulimit -n $(ulimit -Hn)
exec setpriv --bounding-set $CAPABILITIES --inh-caps $CAPABILITIES --no-new-privs \
  "$LAUNCHER" --exact becomes_the_agent_behind_a_filter --ignored --nocapture
"#;

/// Receives what the service manager would.
struct Manager {
    socket: UnixDatagram,
    heard: String,
}

impl Manager {
    fn hears(&mut self, text: &str) {
        while !self.heard.contains(text) {
            let mut buffer = [0; 256];
            let n =
                self.socket.recv(&mut buffer).unwrap_or_else(|e| panic!("{text}: {e}, but {:?}", self.heard));
            self.heard.push_str(std::str::from_utf8(&buffer[..n]).unwrap());
        }
    }
}

#[test]
fn the_agent_starts_reloads_and_sees_users_jobs_in_its_sandbox() {
    let test = "the_agent_starts_reloads_and_sees_users_jobs_in_its_sandbox";
    let may = Command::new("unshare").args(["-m", "-p", "-f", "--mount-proc", "true"]).output();
    if !may.is_ok_and(|o| o.status.success()) {
        return skipped(test, "unshare, and the right to make mount and pid namespaces (root)");
    }
    if !has(test, "setpriv") || !has(test, "systemd-analyze") {
        return;
    }
    let Some(numbers) = numbers() else {
        return skipped(test, "the kernel's headers (apt install linux-libc-dev)");
    };
    let room = Room::new();
    fs::create_dir(room.path("bin")).unwrap();
    fs::copy(PROGRAM, room.path("bin/ringwatch")).unwrap();
    fs::copy(room.plugin(), room.path("bin/plugin.so")).unwrap();
    // The group holds what RestrictNamespaces= takes away.
    let filter: Vec<&str> = value("SystemCallFilter").split(' ').collect();
    let calls = calls(&filter).into_iter().filter(|c| !["setns", "unshare"].contains(&c.as_str()));
    let allowed: Vec<String> = calls.filter_map(|c| Some(numbers.get(&c)?.to_string())).collect();
    assert!(allowed.len() > 200, "{allowed:?}");
    let capabilities = value("CapabilityBoundingSet").replace("CAP_", "+").to_lowercase().replace(' ', ",");
    // Where the sandbox has not put something else.
    let outside = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let notify = outside.path().join("notify");
    let socket = UnixDatagram::bind(&notify).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut manager = Manager { socket, heard: String::new() };

    let mut command = room.command("unshare");
    command
        .args(["-m", "-p", "-f", "--mount-proc", "--kill-child", "sh", "-c", SANDBOX])
        .env_remove("RINGWATCH_DIR")
        .env("ROOM", room.path(""))
        .env("RUNTIME", value("RuntimeDirectory"))
        .env("STATE", value("StateDirectory"))
        .env("NOFILE", value("LimitNOFILE"))
        .env("CORE", value("LimitCORE"))
        .env("CAPABILITIES", format!("-all,{capabilities}"))
        .env("LAUNCHER", std::env::current_exe().unwrap())
        .env(ALLOWED, allowed.join(","))
        .env(LINE, value("ExecStart"))
        .env("NOTIFY_SOCKET", &notify)
        .env("RINGWATCH_AGENT_HTTP__LISTEN", "127.0.0.1:0");
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let (send, lines) = channel();
    let pipes: [Box<dyn std::io::Read + Send>; 2] =
        [Box::new(child.stdout.take().unwrap()), Box::new(child.stderr.take().unwrap())];
    for pipe in pipes {
        let send = send.clone();
        std::thread::spawn(move || {
            BufReader::new(pipe).lines().map_while(Result::ok).try_for_each(|l| send.send(l))
        });
    }
    drop(send);
    let service = Service { child, lines };

    service.says("listening on http://127.0.0.1:");
    manager.hears("READY=1");
    let found = service.says("missing-rank");
    assert!(found.contains("rank 3"), "{found}");
    let children = format!("/proc/{0}/task/{0}/children", service.child.id());
    let agent: i32 = fs::read_to_string(children).unwrap().trim().parse().unwrap();
    let status = fs::read_to_string(format!("/proc/{agent}/status")).unwrap();
    for line in ["NoNewPrivs:\t1", "Seccomp:\t2"] {
        assert!(status.contains(line), "{line} in {status}");
    }
    let socket = PathBuf::from(format!("/proc/{agent}/root/run/ringwatch/agent.sock"));
    let diagnosed = run(room.ringwatch(["diagnose", "--agent"]).arg(&socket));
    assert!(diagnosed.code == Some(1) && diagnosed.out.contains("missing-rank"), "{}", diagnosed.err);
    // As ExecReload= does it.
    let pid = rustix::process::Pid::from_raw(agent).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::HUP).unwrap();
    manager.heard.clear();
    manager.hears("RELOADING=1");
    manager.hears("MONOTONIC_USEC=");
    manager.hears("READY=1");
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    manager.hears("STOPPING=1");
}
