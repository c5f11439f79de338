//! Segments that are made to use up the agent's memory or its mappings.

use super::forged::{ALL_REDUCE, Forged, Writer, next_nonce};
use super::ground::{ATTACKER, Ground};
use super::unread::{followed, unread};
use crate::support::agent::{Agent, diagnosed};
use crate::support::{Play, Players, as_user, assert_missing_rank, findings, until};
use ringwatch_wire::layout::{Geometry, HEADER_BYTES, Region};
use std::fs::File;
use std::path::{Path, PathBuf};

/// Asserts that root's job gets its verdict, beside whatever is said of the attacker's.
fn assert_diagnosed(ground: &Ground, agent: &Agent) {
    let players = Players::start(&ground.room, Play::of("missing-rank").hold(120));
    let found = until("root's finding", || {
        let all = findings(&diagnosed(&ground.room));
        let of_root: Vec<_> = all.into_iter().filter(|f| f.get("owner").number() == 0.0).collect();
        (!of_root.is_empty()).then_some(of_root)
    });
    assert_missing_rank(&found);
    assert_eq!(agent.get("/livez").0, 200);
    drop(players);
    ground.assert_memory_held();
}

/// Puts a segment there of which the reader wants every page of the operations.
fn put_whole(geometry: Geometry, writer: Writer, directory: &Path) -> PathBuf {
    let forged = Forged::new(geometry, writer);
    forged.claims_operations(1 << geometry.shift(Region::Op));
    forged.put(directory)
}

/// Cuts a segment behind its header, which stays, so that the segment remains one.
fn spoil(file: &File) {
    file.set_len(HEADER_BYTES as u64).expect("shrinks");
    // Operations that are new again and again make the reader look behind the end.
    let at = 8 * ringwatch_wire::layout::head::NEXT_OP as u64;
    std::os::unix::fs::FileExt::write_all_at(file, &(1u64 << 20).to_le_bytes(), at).expect("written");
}

fn open_to_write(path: &Path) -> File {
    File::options().write(true).open(path).expect("its own file")
}

#[test]
fn segments_cut_page_by_page_do_not_kill_the_agent() {
    let Some(ground) = Ground::of("segments_cut_page_by_page_do_not_kill_the_agent") else { return };
    let directory = ground.directory("of-attacker", ATTACKER);
    let idle = ground.idle(ATTACKER);
    let writer = Writer::running(idle.0.id());
    let agent = ground.agent(&[&ground.room.segments(), &directory], "");
    // Of 50 MB, in which seven have more pages than the kernel allows mappings, and as large as a plugin makes them.
    let (large, usual) = (Geometry::new([2, 18, 4, 6, 4]), Geometry::full());
    let cut = |geometry: Geometry, n: usize| -> Vec<PathBuf> {
        as_user(ATTACKER, || (0..n).map(|_| put_whole(geometry, writer, &directory)).collect())
    };
    let all = [cut(large, 7), cut(usual, 8)].concat();
    until("they are found", || (followed(&agent) + unread(&agent, "limits") >= 15.0).then_some(()));
    as_user(ATTACKER, || {
        let files: Vec<(File, u64)> = all
            .iter()
            .map(|path| open_to_write(path))
            .map(|f| (f.metadata().expect("its size").len(), f))
            .map(|(length, f)| (f, length))
            .collect();
        for (file, length) in &files {
            let pages = length.div_ceil(4096);
            // Two thousand steps are as bad as one.
            let step = (pages / 2000).max(1);
            (1..=pages).rev().step_by(step as usize).for_each(|n| file.set_len(n * 4096).expect("shrinks"));
        }
        files.iter().for_each(|(file, _)| spoil(file));
    });
    let given_up = || ["damaged", "limits", "not-a-segment"].map(|r| unread(&agent, r)).iter().sum::<f64>();
    until("all are given up", || (given_up() >= 15.0).then_some(()));
    assert_eq!(given_up(), 15.0, "each once");
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", agent.child.id())).expect("its mappings");
    assert!(maps.lines().count() < 5000, "{} mappings", maps.lines().count());
    assert_diagnosed(&ground, &agent);
}

#[test]
fn who_spoils_segments_gets_no_new_ones_read() {
    let Some(ground) = Ground::of("who_spoils_segments_gets_no_new_ones_read") else { return };
    let directory = ground.directory("of-attacker", ATTACKER);
    let idle = ground.idle(ATTACKER);
    let writer = Writer::running(idle.0.id());
    let agent = ground.agent(&[&ground.room.segments(), &directory], "");
    // As many as one may spoil; what comes then is told and left alone.
    const SPOILT: usize = 16;
    let put = || put_whole(Geometry::full(), writer, &directory);
    let all: Vec<PathBuf> = as_user(ATTACKER, || (0..SPOILT).map(|_| put()).collect());
    until("they are read", || (followed(&agent) >= SPOILT as f64).then_some(()));
    as_user(ATTACKER, || all.iter().for_each(|path| spoil(&open_to_write(path))));
    until("they are given up", || (unread(&agent, "damaged") >= SPOILT as f64).then_some(()));
    as_user(ATTACKER, || (0..4).for_each(|_| drop(put())));
    until("new ones are counted", || (unread(&agent, "limits") >= 4.0).then_some(()));
    assert_eq!((followed(&agent), unread(&agent, "limits")), (SPOILT as f64, 4.0));
    agent.says("of this user were spoilt while they were read");
    assert_diagnosed(&ground, &agent);
}

/// Segments of which communicators are read, 256 of each.
const READ: usize = 200;

#[test]
fn communicators_without_number_do_not_take_the_agents_memory() {
    let Some(ground) = Ground::of("communicators_without_number_do_not_take_the_agents_memory") else {
        return;
    };
    let directory = ground.directory("of-attacker", ATTACKER);
    let idle = ground.idle(ATTACKER);
    let writer = Writer::running(idle.0.id());
    let agent = ground.agent(&[&ground.room.segments(), &directory], "");
    // Four of 33 MB, which no plugin makes, and many of those that a plugin may make.
    as_user(ATTACKER, || {
        for (n, shifts) in [(4, [16, 13, 4, 15, 13]), (READ, [8, 4, 4, 6, 4])] {
            for _ in 0..n {
                let forged = Forged::new(Geometry::new(shifts), writer);
                (0..1 << shifts[0]).for_each(|_| {
                    forged.communicator(next_nonce(), 0, 2);
                });
                forged.put(&directory);
            }
        }
    });
    until("what is too large is counted", || (unread(&agent, "limits") >= 4.0).then_some(()));
    until("the others are read", || (followed(&agent) >= READ as f64).then_some(()));
    assert_eq!((followed(&agent), unread(&agent, "limits")), (READ as f64, 4.0));
    // Each communicator has one rank, which is seen or counted.
    let all = (READ << 8) as f64;
    let seen = || {
        let ranks = agent.series("ringwatch_communicator_ranks");
        ranks.iter().filter(|(labels, _)| labels.contains("state=\"seen\"")).map(|(_, n)| n).sum::<f64>()
    };
    let lost = || agent.sum("ringwatch_lost_records_total");
    until("all communicators", || (seen() + lost() >= all).then_some(()));
    assert!(lost() > 0.0 && seen() + lost() == all, "{} seen and {} lost of {all}", seen(), lost());
    assert_diagnosed(&ground, &agent);
}

#[test]
fn holes_in_segments_are_not_filled_at_the_agents_expense() {
    let Some(ground) = Ground::of("holes_in_segments_are_not_filled_at_the_agents_expense") else { return };
    let directory = ground.directory("of-attacker", ATTACKER);
    let idle = ground.idle(ATTACKER);
    let writer = Writer::running(idle.0.id());
    let agent = ground.agent(&[&ground.room.segments(), &directory], "");
    // What is read of a hole in tmpfs becomes memory of who reads: 60 times 4 MiB are more than the agent has.
    as_user(ATTACKER, || {
        for n in 0..60 {
            let geometry = Geometry::full();
            let forged = Forged::new(geometry, writer);
            let slot = forged.communicator(0xb000, 0, 1);
            forged.collective(slot, 0, ALL_REDUCE);
            forged.claims_all(&geometry);
            forged.put_sparse(&directory, n % 2 == 0);
        }
    });
    until("they are found", || (followed(&agent) + unread(&agent, "limits") >= 60.0).then_some(()));
    assert_eq!(followed(&agent) + unread(&agent, "limits"), 60.0);
    assert_diagnosed(&ground, &agent);
}
