//! Segments that say to be somebody else's.

use super::forged::{ALL_GATHER, ALL_REDUCE, Forged, Writer};
use super::ground::{ATTACKER, Ground, program_for_all};
use super::unread::{followed, unread};
use crate::support::agent::{diagnosed, socket};
use crate::support::{Json, Play, Players, as_user, findings, run, until};
use ringwatch_wire::layout::head;
use ringwatch_wire::reader::Reader;
use ringwatch_wire::sync::Word;
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::path::Path;

fn words(path: &Path) -> Vec<Word> {
    let bytes = fs::read(path).expect("a segment");
    let (words, _) = bytes.as_chunks::<8>();
    words.iter().map(|w| Word::new(u64::from_le_bytes(*w))).collect()
}

fn of_owner(all: Vec<Json>, owner: u32) -> Vec<Json> {
    all.into_iter().filter(|f| *f.get("owner") == Json::Number(f64::from(owner))).collect()
}

#[test]
fn a_claim_to_roots_communicators_is_a_communicator_of_ones_own() {
    let Some(ground) = Ground::of("a_claim_to_roots_communicators_is_a_communicator_of_ones_own") else {
        return;
    };
    let directory = ground.directory("of-attacker", ATTACKER);
    let agent = ground.agent(&[&ground.room.segments(), &directory], "");
    let job = [("RINGWATCH_JOB", OsStr::new("roots-own-job"))];
    let mut players = Players::start_with(&ground.room, Play::of("missing-rank").hold(120), &job);
    players.played();
    let ids: BTreeSet<u64> = ground
        .room
        .segment_files()
        .iter()
        .flat_map(|path| {
            let words = words(path);
            let reader = Reader::open(&words).expect("a segment of the plugin");
            reader.comms().filter_map(|c| Some(c.id?.0)).collect::<Vec<_>>()
        })
        .collect();
    assert!(!ids.is_empty());
    let idle = ground.idle(ATTACKER);
    let writer = Writer::running(idle.0.id());
    as_user(ATTACKER, || {
        // Two ranks that contradict root's in each of their operations, and each other: so they get a finding.
        for (rank, func) in [(1, ALL_GATHER), (2, ALL_REDUCE)] {
            let forged = Forged::small(writer);
            // One that names no boot may be of any machine, but its process is on this one.
            let forged = if rank == 2 { forged.without_boot() } else { forged };
            for id in ids.iter().take(2) {
                let slot = forged.communicator(*id, rank, 4);
                (0..6).for_each(|order| forged.collective(slot, order, func));
            }
            forged.put(&directory);
        }
    });
    let all = until("both users' findings", || {
        let all = findings(&diagnosed(&ground.room));
        let kinds = |owner| of_owner(all.clone(), owner).len();
        (kinds(0) > 0 && kinds(ATTACKER) > 0).then(|| all.clone())
    });
    let of_attacker = format!("{:?}", of_owner(all.clone(), ATTACKER));
    assert!(of_attacker.contains("on host ") && !of_attacker.contains("host forged"), "{of_attacker}");
    let of_root = of_owner(all, 0);
    crate::support::assert_missing_rank(&of_root);
    // Root's ranks are not the attacker's to see.
    let shown = |verb: &[&str]| {
        let mut command = ground.as_user(ATTACKER, &program_for_all());
        run(command.args(verb).arg(socket(&ground.room)))
    };
    let top = shown(&["top", "--once", "--agent"]);
    assert_eq!(top.code, Some(0), "{top:?}");
    assert!(!top.out.contains("roots-own-job"), "{}", top.out);
    let said = shown(&["diagnose", "--json", "--agent"]);
    let own = findings(&said.out);
    assert!(!own.is_empty(), "{said:?}");
    assert_eq!(of_owner(own.clone(), ATTACKER).len(), own.len(), "{own:#?}");
    let rows = snapshot_of_attacker(&ground);
    assert!(rows.contains("forged") && !rows.contains("roots-own-job"), "{rows}");
    for child in &players.children {
        assert!(!rows.contains(&format!("\"pid\":{},", child.id())), "{rows}");
    }
    drop(players);
    assert_eq!(agent.end().1, Some(0));
}

/// All that the socket answers to the attacker.
fn snapshot_of_attacker(ground: &Ground) -> String {
    use std::io::{BufRead, BufReader, Write};
    as_user(ATTACKER, || {
        let mut s = std::os::unix::net::UnixStream::connect(socket(&ground.room)).expect("it listens");
        s.write_all(b"{\"ringwatch\":1,\"want\":\"snapshot\"}\n").expect("it reads");
        let mut line = String::new();
        BufReader::new(s).read_line(&mut line).expect("it answers");
        line
    })
}

#[test]
fn a_copy_of_anothers_segment_is_refused_and_the_first_one_read_on() {
    let Some(ground) = Ground::of("a_copy_of_anothers_segment_is_refused_and_the_first_one_read_on") else {
        return;
    };
    let directory = ground.directory("of-attacker", ATTACKER);
    let agent = ground.agent(&[&ground.room.segments(), &directory], "");
    let mut players = Players::start(&ground.room, Play::of("missing-rank").hold(120));
    until("root's segments are read", || (followed(&agent) == 4.0).then_some(()));
    // The name of a segment says all of its process's identity.
    let files = ground.room.segment_files();
    let idle = ground.idle(ATTACKER);
    let own = Writer::running(idle.0.id());
    let nonces: Vec<u64> = files.iter().map(|f| reader_nonce(f)).collect();
    as_user(ATTACKER, || {
        for nonce in nonces {
            Forged::small(own).with_nonce(nonce).put(&directory);
        }
    });
    until("the copies are refused", || (unread(&agent, "duplicate") == 4.0).then_some(()));
    assert_eq!(followed(&agent), 4.0);
    players.played();
    crate::support::assert_missing_rank(&findings(&diagnosed(&ground.room)));
    drop(players);
    let (_, log) = agent.end_with_log();
    let refused = log.iter().filter(|l| l.contains("not read (duplicate)")).count();
    assert_eq!(refused, 4, "{log:#?}");
}

fn reader_nonce(path: &Path) -> u64 {
    let words = words(path);
    Reader::open(&words).expect("a segment of the plugin").header(head::NONCE)
}
