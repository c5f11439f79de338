//! Files, directories and processes of an attacker that never answer: the agent serves everybody else, also after a restart.

use super::forged::{ALL_REDUCE, Forged, Writer};
use super::fuse::{Attack, Hanging};
use super::ground::{ATTACKER, Ground, USER, alone};
use super::unread::{followed, unread};
use crate::support::agent::{Agent, diagnosed, socket};
use crate::support::{
    Json, PROGRAM, Play, Players, as_user, assert_missing_rank, findings, ranks, run, until,
};
use ringwatch::ingest::{Place, ProbeCommand, Segments, now_ns};
use ringwatch::model::{Source as _, Update};
use ringwatch_wire::layout::head;
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// A host's /dev/shm with the directories of three users, and a job of root's that hangs.
struct Host {
    shm: PathBuf,
    /// The attacker's directory.
    own: PathBuf,
    _players: Players,
    ground: Ground,
}

impl Host {
    fn new(test: &str) -> Option<Self> {
        let ground = Ground::with_namespaces(test)?;
        let shm = ground.directory("shm", 0);
        fs::set_permissions(&shm, std::os::unix::fs::PermissionsExt::from_mode(0o1777)).expect("root may");
        let directory = |uid: u32| {
            let own = shm.join(format!("ringwatch-{uid}"));
            fs::create_dir(&own).expect("made");
            std::os::unix::fs::chown(&own, Some(uid), Some(uid)).expect("root may");
            own
        };
        let (own, of_root) = (directory(ATTACKER), directory(0));
        directory(USER);
        let place = [("RINGWATCH_DIR", of_root.as_os_str())];
        let players = Players::start_with(&ground.room, Play::of("missing-rank").hold(300), &place);
        Some(Host { shm, own, _players: players, ground })
    }

    /// A file of the attacker's.
    fn file(&self, name: &str) -> PathBuf {
        let path = self.own.join(name);
        as_user(ATTACKER, || fs::write(&path, "")).expect("written");
        path
    }

    /// A segment of a user that comes now is read.
    fn assert_new_segments_are_read(&self, agent: &Agent) {
        let before = followed(agent);
        let idle = self.ground.idle(USER);
        let own = self.shm.join(format!("ringwatch-{USER}"));
        let path = as_user(USER, || Forged::small(Writer::running(idle.0.id())).put(&own));
        until("the new segment is read", || (followed(agent) > before).then_some(()));
        fs::remove_file(path).expect("root may");
    }
}

/// The findings about root's job, whose rank 3 is missing; the attacker's has two ranks.
fn of_root(host: &Host) -> Vec<Json> {
    let mut found = findings(&diagnosed(&host.ground.room));
    found.retain(|f| ranks(f) == [3]);
    found
}

/// Asserts that the agent is well and has root's finding, and says who does not answer.
fn assert_serves(agent: &Agent, host: &Host, silent: &str) {
    let line = agent.says("does not answer");
    assert!(line.contains(silent) && line.contains("not read (unresponsive)"), "{line}");
    until("it is counted", || (unread(agent, "unresponsive") == 1.0).then_some(()));
    assert_is_well(agent, host);
}

/// Asserts that the agent answers and has root's finding.
fn assert_is_well(agent: &Agent, host: &Host) {
    let began = Instant::now();
    assert_eq!(agent.get("/livez"), (200, "ok\n".to_owned()));
    assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
    until("root's finding", || (!of_root(host).is_empty()).then_some(()));
    until("it is ready", || (agent.get("/readyz").0 == 200).then_some(()));
}

/// Has an agent serve while something hangs, be killed, and the next one serve in its place. `also` is asserted of both.
fn assert_outlived(host: &Host, silent: &str, also: impl Fn(&Agent)) {
    for last in [false, true] {
        let agent = host.ground.agent_of_host(&host.shm);
        assert_serves(&agent, host, silent);
        also(&agent);
        let began = Instant::now();
        if last {
            agent.end_with_log();
        } else {
            agent.kill();
        }
        // No thread of it waits for what hangs.
        assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    }
    host.ground.assert_memory_held();
}

#[test]
fn a_directory_whose_lock_is_held_keeps_nobody_elses_segments_out() {
    let test = "a_directory_whose_lock_is_held_keeps_nobody_elses_segments_out";
    let _alone = alone();
    let Some(host) = Host::new(test) else { return };
    let attack = Attack::Directory(host.file("victim"));
    let Some(_hanging) = Hanging::start(&host.ground, &attack, test) else { return };
    assert_outlived(&host, &format!("user {ATTACKER}"), |agent| host.assert_new_segments_are_read(agent));
}

#[test]
fn a_dead_segment_whose_lock_is_held_is_left_alone_until_it_is_free() {
    let test = "a_dead_segment_whose_lock_is_held_is_left_alone_until_it_is_free";
    let _alone = alone();
    let Some(host) = Host::new(test) else { return };
    let put = || as_user(ATTACKER, || Forged::small(Writer::dead()).put(&host.own));
    let dead = put();
    let attack = Attack::File(dead.clone());
    let Some(hanging) = Hanging::start(&host.ground, &attack, test) else { return };
    for last in [false, true] {
        let other = put();
        let agent = host.ground.agent_of_host(&host.shm);
        assert_is_well(&agent, &host);
        // To remove the first one would wait for its lock, which shows as a file that is open for writing.
        until("the other one is removed", || (!other.exists()).then_some(()));
        assert!(dead.exists());
        assert_eq!(unread(&agent, "unresponsive"), 0.0);
        if !last {
            agent.kill();
            continue;
        }
        drop(hanging);
        until("it is removed", || (!dead.exists()).then_some(()));
        break;
    }
    host.ground.assert_memory_held();
}

#[test]
fn dev_shm_whose_lock_is_held_stops_no_agent() {
    let test = "dev_shm_whose_lock_is_held_stops_no_agent";
    let _alone = alone();
    let Some(host) = Host::new(test) else { return };
    let agent = host.ground.agent_of_host(&host.shm);
    assert_missing_rank(&findings(&diagnosed(&host.ground.room)));
    let victim = host.shm.join("victim");
    as_user(ATTACKER, || fs::write(&victim, "")).expect("written");
    let attack = Attack::Directory(victim);
    let Some(hanging) = Hanging::start(&host.ground, &attack, test) else { return };
    // What is followed is followed on, and new segments in known directories are found.
    assert_serves(&agent, &host, "/dev/shm does not answer");
    host.assert_new_segments_are_read(&agent);
    agent.kill();
    // The next one finds nothing, and says why.
    let agent = host.ground.agent_of_host(&host.shm);
    agent.says("/dev/shm does not answer");
    assert_eq!(agent.get("/livez"), (200, "ok\n".to_owned()));
    assert_eq!((unread(&agent, "unresponsive"), followed(&agent)), (1.0, 0.0));
    let mut command = host.ground.room.ringwatch(["diagnose", "--agent"]);
    let said = run(command.arg(socket(&host.ground.room)));
    // The finding of before the restart is known; "no findings" would not be said.
    assert!([Some(1), Some(2)].contains(&said.code), "{} {}", said.out, said.err);
    assert!(said.err.contains("/dev/shm does not answer"), "{}", said.err);
    drop(hanging);
    assert_missing_rank(&findings(&diagnosed(&host.ground.room)));
    until("nothing is unresponsive", || (unread(&agent, "unresponsive") == 0.0).then_some(()));
    host.ground.assert_memory_held();
}

#[test]
fn a_process_whose_files_in_proc_are_blocked_hides_no_containers() {
    let test = "a_process_whose_files_in_proc_are_blocked_hides_no_containers";
    let _alone = alone();
    let Some(host) = Host::new(test) else { return };
    let Some(_hanging) = Hanging::start(&host.ground, &Attack::Process, test) else { return };
    assert_outlived(&host, &format!("user {ATTACKER}"), |agent| {
        let before = followed(agent);
        let script = "mount -t tmpfs t /dev/shm; mkdir /dev/shm/ringwatch-0";
        let container = host.ground.occupied_as(USER, "-Urm", script, &[]);
        let shm = PathBuf::from(format!("/proc/{}/root/dev/shm/ringwatch-0", container.0.id()));
        as_user(USER, || Forged::small(Writer::running(container.0.id())).put(&shm));
        until("the container that came later is searched", || (followed(agent) > before).then_some(()));
    });
}

#[test]
fn a_segment_that_names_a_process_whose_files_are_blocked_stops_no_agent() {
    let test = "a_segment_that_names_a_process_whose_files_are_blocked_stops_no_agent";
    let _alone = alone();
    let Some(host) = Host::new(test) else { return };
    let Some(hanging) = Hanging::start(&host.ground, &Attack::Process, test) else { return };
    // Its start cannot be read: that would never end.
    let writer = Writer { pid: hanging.blocked_process(), start_ticks: 1 };
    as_user(ATTACKER, || Forged::small(writer).put(&host.own));
    assert_outlived(&host, &format!("user {ATTACKER}"), |agent| host.assert_new_segments_are_read(agent));
}

#[test]
fn a_culprit_whose_files_in_proc_are_blocked_keeps_nobody_from_their_stacks() {
    let test = "a_culprit_whose_files_in_proc_are_blocked_keeps_nobody_from_their_stacks";
    let _alone = alone();
    let Some(host) = Host::new(test) else { return };
    let Some(hanging) = Hanging::start(&host.ground, &Attack::StoppedProcess, test) else { return };
    let waiting = host.ground.idle(ATTACKER);
    as_user(ATTACKER, || {
        let ranks = [waiting.0.id(), hanging.blocked_process()];
        for (rank, pid) in (0..).zip(ranks) {
            let forged = Forged::small(Writer::running(pid));
            let slot = forged.communicator(0xa77a, rank, 2);
            if rank == 0 {
                forged.collective(slot, 0, ALL_REDUCE);
            }
            forged.put(&host.own);
        }
    });
    // It is followed when it blocks its files.
    let agent = host.ground.agent_of_host(&host.shm);
    until("all are followed", || (followed(&agent) >= 6.0).then_some(()));
    hanging.go_on();
    assert_serves(&agent, &host, &format!("user {ATTACKER}"));
    until("root's culprit has its place", || {
        let found = of_root(&host);
        let evidence = found.first()?.get("evidence").list();
        evidence.iter().any(|e| e.get("text").text().contains("in clock_nanosleep")).then_some(())
    });
    host.ground.assert_memory_held();
}

#[test]
fn detail_of_a_segment_whose_lock_is_held_is_requested_without_waiting() {
    let test = "detail_of_a_segment_whose_lock_is_held_is_requested_without_waiting";
    let _alone = alone();
    let Some(host) = Host::new(test) else { return };
    let idle = host.ground.idle(ATTACKER);
    let put = || {
        let forged = Forged::small(Writer::running(idle.0.id()));
        forged.communicator(0xa77a, 0, 1);
        as_user(ATTACKER, || forged.put(&host.own))
    };
    let (blocked, free) = (put(), put());
    let Some(_hanging) = Hanging::start(&host.ground, &Attack::File(blocked), test) else { return };
    let mut segments = Segments::new(vec![Place::Dir(host.own.clone())]);
    segments.use_probes(ProbeCommand::new(PROGRAM, &["probe"]));
    let mut comm = None;
    let mut poll = |segments: &mut Segments| {
        let began = Instant::now();
        for update in segments.poll(now_ns()) {
            if let Update::Comm(record) = update {
                comm = Some(record.comm);
            }
        }
        assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
        comm
    };
    let comm = until("both are followed", || poll(&mut segments).filter(|_| segments.len() == 2));
    assert_eq!(segments.request_detail(comm, u64::MAX), 2);
    let wanted = || {
        let bytes = fs::read(&free).expect("root may");
        let word = bytes.get(head::WANTED_COMM * 8..head::WANTED_COMM * 8 + 8).expect("a header");
        u64::from_le_bytes(word.try_into().expect("eight bytes"))
    };
    // Files of one user: the other one may have been asked first, or not be asked any more.
    let reported = |segments: &Segments| segments.unread(None).iter().any(|u| u.owner == Some(ATTACKER));
    until("the attacker is unresponsive", || {
        poll(&mut segments);
        reported(&segments).then_some(())
    });
    assert!([0, 0xa77a].contains(&wanted()));
}
