//! As many segments as a large node has, of processes that live.

use super::forged::{ALL_REDUCE, Forged, Writer, next_nonce};
use super::ground::{ATTACKER, Ground, Running, USER};
use super::unread::{followed, unread};
use crate::support::{as_user, until};
use rustix::process::Signal;
use std::path::{Path, PathBuf};

/// How many segments of one user are read.
const OF_USER: usize = 512;
/// Operations that are there when the agent comes.
const FIRST: u64 = 8;
/// Operations that come while it is stopped: a segment has places for 16.
const MEANWHILE: u64 = 20;

/// One segment and its file.
struct Living {
    uid: u32,
    forged: Forged,
    path: PathBuf,
    slot: u64,
}

#[test]
fn of_a_thousand_living_segments_each_record_is_read_or_counted() {
    let Some(ground) = Ground::of("of_a_thousand_living_segments_each_record_is_read_or_counted") else {
        return;
    };
    let users = [(0, 150), (USER, 250), (ATTACKER, 600)];
    let mut processes: Vec<Running> = Vec::new();
    let mut directories: Vec<PathBuf> = Vec::new();
    let mut segments: Vec<Living> = Vec::new();
    for (uid, n) in users {
        let directory = ground.directory(&format!("of-{uid}"), uid);
        let idle = ground.idle(uid);
        let writer = Writer::running(idle.0.id());
        let make = || {
            let forged = Forged::small(writer);
            let slot = forged.communicator(next_nonce(), 0, 2);
            (0..FIRST).for_each(|order| forged.collective(slot, order, ALL_REDUCE));
            let path = forged.put(&directory);
            Living { uid, forged, path, slot }
        };
        segments.extend(as_user(uid, || (0..n).map(|_| make()).collect::<Vec<_>>()));
        processes.push(idle);
        directories.push(directory);
    }
    let directories: Vec<&Path> = directories.iter().map(PathBuf::as_path).collect();
    let agent = ground.agent(&directories, "");
    let found = || (followed(&agent), unread(&agent, "limits"));
    until("all segments", || (found().0 + found().1 >= 1000.0).then_some(()));
    let read = users.iter().map(|(_, n)| OF_USER.min(*n)).sum::<usize>() as f64;
    assert_eq!(found(), (read, 1000.0 - read));
    // The other rank of each communicator is never seen: its operations are in flight, or were lost.
    let in_flight = || agent.sum("ringwatch_operations_in_flight");
    let lost = || agent.sum("ringwatch_lost_records_total");
    until("what was there", || (in_flight() >= read * FIRST as f64).then_some(()));
    assert_eq!((in_flight(), lost()), (read * FIRST as f64, 0.0));
    agent.signal(Signal::STOP);
    for Living { uid, forged, path, slot } in &segments {
        (FIRST..FIRST + MEANWHILE).for_each(|order| forged.collective(*slot, order, ALL_REDUCE));
        as_user(*uid, || forged.put_again(path));
    }
    agent.signal(Signal::CONT);
    let all = read * (FIRST + MEANWHILE) as f64;
    until("all records", || (in_flight() + lost() >= all).then_some(()));
    assert_eq!(in_flight() + lost(), all);
    assert!(lost() >= read * (MEANWHILE - 16) as f64, "{} lost", lost());
    ground.assert_memory_held();
    assert_eq!(agent.end().1, Some(0));
}
