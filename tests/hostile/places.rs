//! Mounts and links in place of /dev/shm: nothing of anybody else is deleted, and nobody waits for them.

use super::forged::{Forged, Writer};
use super::fuse::{Attack, Hanging};
use super::ground::{ATTACKER, Ground, Running, USER, alone, program_for_all};
use super::unread::{followed, unread};
use crate::support::agent::{Agent, diagnosed};
use crate::support::{Play, Players, Room, as_user, assert_missing_rank, findings, run, until, wait};
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

/// The attacker's ways to lead an agent from its /dev/shm to the home of another user.
const WAYS: &[(&str, &str)] = &[
    (
        "a bind mount as a user's directory",
        "mount -t tmpfs t /dev/shm; mkdir /dev/shm/ringwatch-1; mount --bind \"$0\" /dev/shm/ringwatch-1",
    ),
    ("a link as a user's directory", "mount -t tmpfs t /dev/shm; ln -s \"$0\" /dev/shm/ringwatch-1"),
    ("a bind mount over /dev/shm", "mount --bind \"$1\" /dev/shm"),
    ("a link in place of /dev/shm", "mount -t tmpfs t /dev; ln -s \"$1\" /dev/shm"),
];

/// A tmpfs of a user below the host's own /dev/shm, as fusermount lets users have file systems anywhere.
struct Mounted(PathBuf);

impl Mounted {
    fn on(ground: &Ground, path: PathBuf) -> Self {
        fs::create_dir(&path).expect("made");
        let options = format!("uid={USER},gid={USER},mode=700");
        let mut mount = ground.room.command("mount");
        let mounted = mount.args(["-t", "tmpfs", "-o", &options, "ringwatch-test"]).arg(&path).status();
        assert!(mounted.expect("mount starts").success());
        Mounted(path)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // The room is removed after it.
        drop(std::process::Command::new("umount").arg(&self.0).status());
    }
}

#[test]
fn no_mount_and_no_link_has_another_users_files_deleted() {
    let Some(ground) = Ground::with_namespaces("no_mount_and_no_link_has_another_users_files_deleted") else {
        return;
    };
    let _alone = alone();
    // On a disk, as homes are. Its parent belongs to nobody in particular, so that it can be bound as well.
    let disk = tempfile::Builder::new().prefix("rw-hostile-").tempdir_in(disk()).expect("a directory");
    ground.open_to_all(disk.path());
    let home = disk.path().join("ringwatch-home");
    fs::create_dir(&home).expect("made");
    std::os::unix::fs::chown(&home, Some(USER), Some(USER)).expect("root may");
    fs::set_permissions(&home, std::os::unix::fs::PermissionsExt::from_mode(0o700)).expect("root may");
    let kept: Vec<PathBuf> =
        as_user(USER, || (0..3).map(|_| Forged::small(Writer::dead()).put(&home)).collect());
    let arguments = [home.to_str().expect("text"), disk.path().to_str().expect("text")];
    let attackers: Vec<_> =
        WAYS.iter().map(|(_, script)| ground.occupied("-Urm", script, &arguments)).collect();
    // A dead segment in the host's own place shows when the agent has cleaned.
    let shm = ground.directory("shm", 0);
    ground.open_to_all(&shm);
    let own = shm.join(format!("ringwatch-{USER}"));
    fs::create_dir(&own).expect("made");
    std::os::unix::fs::chown(&own, Some(USER), Some(USER)).expect("root may");
    let mounted = Mounted::on(&ground, shm.join("ringwatch-mounted"));
    let behind = as_user(USER, || Forged::small(Writer::dead()).put(&mounted.0));
    let agent = ground.agent_of_host(&shm);
    let removed = as_user(USER, || Forged::small(Writer::dead()).put(&own));
    until("the agent cleans its own place", || (!removed.exists()).then_some(()));
    for path in kept.iter().chain([&behind]) {
        assert!(path.exists(), "{} was deleted", path.display());
    }
    until("they are reported", || (unread(&agent, "foreign-owner") >= 3.0).then_some(()));
    let line = agent.says("ringwatch-mounted");
    assert!(line.contains("not read (foreign-owner)"), "{line}");
    drop(attackers);
    let (_, log) = agent.end_with_log();
    assert!(kept.iter().chain([&behind]).all(|path| path.exists()), "{log:#?}");
    let removals: Vec<&String> = log.iter().filter(|l| l.contains("removed ")).collect();
    assert!(removals.iter().all(|l| !l.contains("ringwatch-home") && !l.contains("/proc/")), "{removals:#?}");
    ground.assert_memory_held();
}

#[test]
fn names_in_dev_shm_keep_nobody_out() {
    let Some(ground) = Ground::of("names_in_dev_shm_keep_nobody_out") else { return };
    let _alone = alone();
    let shm = ground.directory("shm", 0);
    fs::set_permissions(&shm, std::os::unix::fs::PermissionsExt::from_mode(0o1777)).expect("root may");
    as_user(ATTACKER, || {
        for n in 0..5000 {
            fs::write(shm.join(format!("ringwatch-f{n}")), "").expect("written");
            fs::create_dir(shm.join(format!("ringwatch-d{n}"))).expect("made");
        }
    });
    // Two that are there before the agent, and one that comes later.
    let users = [0, USER];
    let directory = |uid: u32| {
        let own = shm.join(format!("ringwatch-{uid}"));
        fs::create_dir(&own).expect("made");
        std::os::unix::fs::chown(&own, Some(uid), Some(uid)).expect("root may");
        own
    };
    // A segment lives by a process of its own user: that of another one's is removed.
    let idle = [0, USER, USER + 1].map(|uid| (uid, ground.idle(uid)));
    let put = |uid: u32, own: &Path| {
        let (_, process) = idle.iter().find(|(u, _)| *u == uid).expect("a process of this user");
        as_user(uid, || Forged::small(Writer::running(process.0.id())).put(own))
    };
    for uid in users {
        put(uid, &directory(uid));
    }
    let agent = ground.agent_of_host(&shm);
    until("those that were there are read", || (followed(&agent) >= 2.0).then_some(()));
    put(USER + 1, &directory(USER + 1));
    until("the one that came later is read", || (followed(&agent) >= 3.0).then_some(()));
    ground.assert_memory_held();
}

#[test]
fn a_mount_on_a_segment_is_not_looked_into() {
    let Some(ground) = Ground::of("a_mount_on_a_segment_is_not_looked_into") else { return };
    let _alone = alone();
    let shm = ground.directory("shm", 0);
    ground.open_to_all(&shm);
    let own = shm.join(format!("ringwatch-{USER}"));
    fs::create_dir(&own).expect("made");
    std::os::unix::fs::chown(&own, Some(USER), Some(USER)).expect("root may");
    // As fusermount lets users mount on files of theirs; what is mounted here would be read if it were opened.
    let behind = ground.directory("behind", USER);
    let mounted = Mounted::on(&ground, behind.join("fs"));
    let idle = ground.idle(USER);
    let other = as_user(USER, || Forged::small(Writer::running(idle.0.id())).put(&mounted.0));
    let file = own.join("1-2-3.seg");
    fs::write(&file, "").expect("written");
    let bound = ground.room.command("mount").arg("--bind").args([&other, &file]).status();
    assert!(bound.expect("mount starts").success());
    let bound = Mounted(file);
    let agent = ground.agent_of_host(&shm);
    let line = agent.says("1-2-3.seg");
    assert!(line.contains("not read (foreign-owner)") && line.contains("mounted on it"), "{line}");
    assert_eq!(followed(&agent), 0.0);
    drop((agent, bound));
}

/// A directory on a disk: where segments are never read, unless an administrator names it.
fn disk() -> PathBuf {
    let of_build = Path::new(env!("CARGO_TARGET_TMPDIR")).to_owned();
    let reachable = of_build.ancestors().all(|d| {
        fs::metadata(d).is_ok_and(|m| std::os::unix::fs::PermissionsExt::mode(&m.permissions()) & 0o001 != 0)
    });
    if reachable { of_build } else { std::env::temp_dir() }
}

/// Asserts that the agent is well, reads others' segments, and reports one namespace as not answering.
fn assert_serves(agent: &Agent, room: &Room) {
    let began = Instant::now();
    assert_eq!(agent.get("/livez"), (200, "ok\n".to_owned()));
    assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
    let line = agent.says("does not answer");
    assert!(line.contains(&format!("user {ATTACKER}")), "{line}");
    assert_eq!(unread(agent, "unresponsive"), 1.0);
    assert_missing_rank(&findings(&diagnosed(room)));
    assert_eq!(agent.get("/livez"), (200, "ok\n".to_owned()));
    assert_eq!(agent.get("/readyz"), (200, "ok\n".to_owned()));
}

#[test]
fn a_file_system_that_does_not_answer_is_named_once_and_skipped() {
    let test = "a_file_system_that_does_not_answer_is_named_once_and_skipped";
    let Some(ground) = Ground::with_namespaces(test) else { return };
    let _alone = alone();
    let Some(hanging) = Hanging::start(&ground, &Attack::ContainerShm, test) else { return };
    let shm = ground.directory("shm", 0);
    ground.open_to_all(&shm);
    let own = shm.join("ringwatch-0");
    fs::create_dir(&own).expect("made");
    let agent = ground.agent_of_host(&shm);
    let directory = [("RINGWATCH_DIR", own.as_os_str())];
    let players = Players::start_with(&ground.room, Play::of("missing-rank").hold(120), &directory);
    assert_serves(&agent, &ground.room);
    let log = agent.kill_with_log();
    // The next agent finds it as it was.
    let agent = ground.agent_of_host(&shm);
    assert_serves(&agent, &ground.room);
    drop(players);
    let (_, again) = agent.end_with_log();
    for log in [log, again] {
        let named: Vec<&String> = log.iter().filter(|l| l.contains("does not answer")).collect();
        assert!(named.is_empty(), "named once: {named:#?}");
    }
    assert!(hanging.process.0.id() > 0);
    drop(hanging);
    ground.assert_memory_held();
}

#[test]
fn a_directory_that_somebody_made_for_another_user_is_reported_for_that_user() {
    let test = "a_directory_that_somebody_made_for_another_user_is_reported_for_that_user";
    let Some(ground) = Ground::of(test) else { return };
    let _alone = alone();
    let shm = ground.directory("shm", 0);
    fs::set_permissions(&shm, std::os::unix::fs::PermissionsExt::from_mode(0o1777)).expect("root may");
    as_user(ATTACKER, || fs::create_dir(shm.join(format!("ringwatch-{USER}")))).expect("made");
    let agent = ground.agent_of_host(&shm);
    let line = agent.says(&format!("ringwatch-{USER}"));
    assert!(line.contains("not read (foreign-owner)"), "{line}");
    assert!(line.contains(&format!("belongs to user {ATTACKER}")), "{line}");
    assert_eq!(unread(&agent, "foreign-owner"), 1.0);
    let (_, log) = agent.end_with_log();
    assert!(log.iter().all(|l| !l.contains("foreign-owner")), "once: {log:#?}");
}

#[test]
fn without_the_right_to_find_containers_each_user_is_reported_once() {
    let test = "without_the_right_to_find_containers_each_user_is_reported_once";
    let Some(ground) = Ground::with_namespaces(test) else { return };
    let _alone = alone();
    let containers = [0; 3].map(|_| ground.occupied("-Urm", "mount -t tmpfs t /dev/shm", &[]));
    let shm = ground.directory("shm", 0);
    ground.open_to_all(&shm);
    let agent = ground.agent_of_host_by(&shm, "setpriv --bounding-set -sys_ptrace");
    let line = agent.says(&format!("containers of user {ATTACKER}"));
    assert!(line.contains("not read (permission)") && line.contains("CAP_SYS_PTRACE"), "{line}");
    assert!(unread(&agent, "permission") >= 1.0);
    let (_, log) = agent.end_with_log();
    assert!(log.iter().all(|l| !l.contains(&format!("containers of user {ATTACKER}"))), "once: {log:#?}");
    drop(containers);
}

#[test]
fn a_directory_that_somebody_else_made_first_hides_no_job() {
    let Some(ground) = Ground::of("a_directory_that_somebody_else_made_first_hides_no_job") else { return };
    let _alone = alone();
    let (shm, cache) = (ground.directory("shm", 0), ground.directory("cache-of-user", USER));
    fs::set_permissions(&shm, std::os::unix::fs::PermissionsExt::from_mode(0o1777)).expect("root may");
    as_user(ATTACKER, || fs::create_dir(shm.join(format!("ringwatch-{USER}"))).expect("made"));
    let agent = ground.agent_of_host(&shm);
    let command = |arguments: &[&str]| {
        let mut command = ground.on_host(&shm, USER, &program_for_all());
        command.args(arguments).env("XDG_CACHE_HOME", &cache);
        command
    };
    let start_at = ringwatch::replay::monotonic_ns() + 2_000_000_000;
    let script = format!(
        "for r in 0 1 2 3; do {} replay --scenario missing-rank --rank $r --start-at {start_at} \
         --plugin \"$NCCL_PROFILER_PLUGIN\" --hold 120 & pids=\"$pids $!\"; done; trap 'kill $pids' TERM; wait",
        program_for_all()
    );
    let mut job = command(&["run", "--", "sh", "-c", &script]);
    let mut job = Running(job.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("it starts"));
    let mut said = BufReader::new(job.0.stderr.take().expect("a pipe")).lines().map_while(Result::ok);
    assert!(said.any(|l| l.contains("missing-rank: rank 3")), "`run` reads its own job");
    until("the agent reads the job", || (followed(&agent) == 4.0).then_some(()));
    assert_missing_rank(&findings(&diagnosed(&ground.room)));
    let diagnosis = run(&mut command(&["diagnose"]));
    assert!(diagnosis.code == Some(1) && diagnosis.out.contains("missing-rank: rank 3"), "{diagnosis:?}");
    let top = run(&mut command(&["top", "--once"]));
    assert!(top.code == Some(0) && top.out.contains("missing-rank"), "{top:?}");
    assert!(fs::read_dir(shm.join(format!("ringwatch-{USER}"))).expect("there").next().is_none());
    rustix::process::kill_process(rustix::process::Pid::from_child(&job.0), rustix::process::Signal::TERM)
        .expect("it runs");
    wait(&mut job.0);
    ground.assert_memory_held();
}
