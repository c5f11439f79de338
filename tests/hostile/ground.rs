//! What every attack begins with: a root agent in its cgroup, and an attacker without rights.

use super::cgroup::Cgroup;
use crate::support::agent::Agent;
use crate::support::{PROGRAM, Room, skipped, until};
use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

/// The user who attacks, and one who only has jobs. Neither has an account.
pub(crate) const ATTACKER: u32 = 12_345;
pub(crate) const USER: u32 = 60_321;

/// A room that all users can enter, and the agent's cgroup.
#[derive(Debug)]
pub(crate) struct Ground {
    cgroup: Cgroup,
    pub(crate) room: Room,
}

/// A process that ends with this value.
#[derive(Debug)]
pub(crate) struct Running(pub(crate) Child);

impl Drop for Running {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

/// Agents that look into every container of the host see each other's attackers: one at a time.
pub(crate) fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Ground {
    /// `None` where no such agent or attacker can be had, and the test counts as skipped.
    pub(crate) fn of(test: &str) -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            skipped(test, "root");
            return None;
        }
        let Some(cgroup) = Cgroup::new() else {
            skipped(test, "the right to make a memory cgroup");
            return None;
        };
        let room = Room::new();
        let ground = Ground { cgroup, room };
        ground.open_to_all(&ground.room.path(""));
        ground.open_to_all(&ground.directory("run", 0));
        Some(ground)
    }

    /// The same, where users may have namespaces of their own.
    pub(crate) fn with_namespaces(test: &str) -> Option<Self> {
        static MAY: OnceLock<bool> = OnceLock::new();
        let ground = Self::of(test)?;
        let made = || ground.contained("-Urm", "true", &[]).status().is_ok_and(|s| s.success());
        if !*MAY.get_or_init(made) {
            skipped(test, "user and mount namespaces for users (unshare, setpriv)");
            return None;
        }
        Some(ground)
    }

    /// Lets every user enter a directory.
    pub(crate) fn open_to_all(&self, path: &Path) {
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).expect("our own directory");
    }

    /// A new directory of a user in the room, which nobody else may enter.
    pub(crate) fn directory(&self, name: &str, owner: u32) -> PathBuf {
        let path = self.room.path(name);
        fs::create_dir(&path).expect("a new directory");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).expect("our own directory");
        chown(&path, Some(owner), Some(owner)).expect("root may");
        path
    }

    /// The same, with a number in its name that no other one has.
    pub(crate) fn new_directory(&self, name: &str, owner: u32) -> PathBuf {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        self.directory(&format!("{name}-{}", NUMBER.fetch_add(1, Ordering::Relaxed)), owner)
    }

    /// The agent, which reads these directories.
    pub(crate) fn agent(&self, directories: &[&Path], commands: &str) -> Agent {
        let named = format!("segments.directories={directories:?}");
        self.start(commands, &["--set", &named])
    }

    /// An agent that reads the whole host, of which it has its own /dev/shm: this directory of the room. It keeps no
    /// segment of a dead process.
    pub(crate) fn agent_of_host(&self, shm: &Path) -> Agent {
        self.agent_of_host_by(shm, "")
    }

    /// The same, started by a program.
    pub(crate) fn agent_of_host_by(&self, shm: &Path, program: &str) -> Agent {
        let mounts = self.mounts_of_host(shm);
        let commands =
            format!("exec unshare -m sh -c '{mounts} && exec {program} \"$0\" \"$@\"' \"$0\" \"$@\" &&");
        self.start(&commands, &["--set", "segments.directories=[]", "--set", "segments.keep_mib=0"])
    }

    /// Commands that put a directory of the room over /dev/shm.
    fn mounts_of_host(&self, shm: &Path) -> String {
        let room = self.room.path("");
        let name = room.file_name().expect("a name");
        let inner = shm.join(name);
        // To try to make it anyway would wait for a lock that an attacker may hold.
        if !inner.exists() {
            fs::create_dir(&inner).expect("a mount point");
        }
        // The room itself has to be where it was, below the directory that covers it.
        format!(
            "mount --bind {} {} && mount --rbind {} /dev/shm",
            room.display(),
            inner.display(),
            shm.display()
        )
    }

    /// A user's command on the host of [`Ground::agent_of_host`].
    pub(crate) fn on_host(&self, shm: &Path, uid: u32, program: &str) -> Command {
        let user = format!("setpriv --reuid {uid} --regid {uid} --clear-groups --no-new-privs");
        let script = format!("{} && exec {user} \"$@\"", self.mounts_of_host(shm));
        let mut command = self.room.command("unshare");
        command.args(["-m", "sh", "-c", &script, "sh", program]).env_remove("RINGWATCH_DIR");
        command
    }

    fn start(&self, commands: &str, more: &[&str]) -> Agent {
        // An agent of before can be put in its place, to see a test fail.
        let program =
            std::env::var_os("RINGWATCH_HOSTILE_AGENT").map_or_else(|| PROGRAM.into(), PathBuf::from);
        // Its code becomes the memory of whoever reads it first, and an unoptimized program is larger than what the agent may
        // have: it would go on reading its own code from the disk again.
        drop(fs::read(&program).expect("it is there"));
        Agent::prepared(&self.room, &program, &format!("{}{commands}", self.cgroup.enter()), more)
    }

    /// Asserts that the agent's processes had enough memory.
    pub(crate) fn assert_memory_held(&self) {
        assert_eq!(self.cgroup.killed(), 0, "killed for want of memory; peak {:?}", self.cgroup.peak_bytes());
    }

    /// A command as a user without any capability.
    pub(crate) fn as_user(&self, uid: u32, program: &str) -> Command {
        let mut command = self.room.command("setpriv");
        let uid = uid.to_string();
        command.args(["--reuid", &uid, "--regid", &uid, "--clear-groups", "--no-new-privs", program]);
        command
    }

    /// A shell of the attacker in namespaces of its own (options of `unshare`), where it is root; `arguments` are `$0`
    /// and `$@`.
    pub(crate) fn contained(&self, namespaces: &str, script: &str, arguments: &[&str]) -> Command {
        self.contained_as(ATTACKER, namespaces, script, arguments)
    }

    fn contained_as(&self, uid: u32, namespaces: &str, script: &str, arguments: &[&str]) -> Command {
        let mut command = self.as_user(uid, "unshare");
        command.args([namespaces, "--net", "--kill-child", "sh", "-c", script]).args(arguments);
        command
    }

    /// The same, when it has done its script; it stays in its namespaces until it is dropped.
    pub(crate) fn occupied(&self, namespaces: &str, script: &str, arguments: &[&str]) -> Running {
        self.occupied_as(ATTACKER, namespaces, script, arguments)
    }

    /// The same by another user.
    pub(crate) fn occupied_as(
        &self,
        uid: u32,
        namespaces: &str,
        script: &str,
        arguments: &[&str],
    ) -> Running {
        let script = format!("set -e; {script}; echo ready; exec sleep 600");
        let mut command = self.contained_as(uid, namespaces, &script, arguments);
        let mut running = Running(command.stdout(Stdio::piped()).spawn().expect("it starts"));
        let mut line = String::new();
        let out = running.0.stdout.as_mut().expect("a pipe");
        BufReader::new(out).read_line(&mut line).expect("it says so");
        assert_eq!(line, "ready\n");
        running
    }

    /// A process of a user that does nothing.
    pub(crate) fn idle(&self, uid: u32) -> Running {
        let mut command = self.as_user(uid, "sleep");
        let running = Running(command.arg("600").spawn().expect("it starts"));
        // The same process is root's at first, and nobody's business while it changes its user.
        let proc = format!("/proc/{}", running.0.id());
        until("it is the user's", || fs::metadata(&proc).ok().filter(|m| m.uid() == uid));
        running
    }
}

/// The program under test, as a path that every user may run wherever the tests were built.
pub(crate) fn program_for_all() -> String {
    static OPEN: OnceLock<File> = OnceLock::new();
    let file = OPEN.get_or_init(|| {
        let file = File::open(PROGRAM).expect("it is there");
        rustix::io::fcntl_setfd(&file, rustix::io::FdFlags::empty()).expect("our own descriptor");
        file
    });
    format!("/proc/self/fd/{}", file.as_raw_fd())
}
