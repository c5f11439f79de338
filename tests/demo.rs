//! The demo: six recorded jobs through the real plugin in real processes, and the verdict on each.

use crate::support;
use crate::support::{
    Json, Room, assert_mismatch, assert_missing_rank, evidence, files, findings, finish, ranks,
};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};

/// Parent of a process, from procfs.
fn parent(pid: &str) -> Option<u32> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.get(stat.rfind(')')? + 1..)?.split_whitespace().nth(1)?.parse().ok()
}

/// The directory of this demo's segments, told from other demos' by who started their processes; and those.
fn segments_of(room: &Room, demo: &Child) -> Option<(PathBuf, BTreeSet<String>)> {
    // Where there is no /dev/shm they lie in the temporary directory.
    for dir in files(Path::new("/dev/shm")).into_iter().chain(files(&room.path("tmp"))) {
        if !dir.file_name()?.to_string_lossy().starts_with("ringwatch-demo-") {
            continue;
        }
        let pids: BTreeSet<String> = files(&dir)
            .iter()
            .filter_map(|f| Some(f.file_name()?.to_str()?.split('-').next()?.to_owned()))
            .filter(|pid| parent(pid) == Some(demo.id()))
            .collect();
        if pids.len() == 4 {
            return Some((dir, pids));
        }
    }
    None
}

fn demo(scenario: &str, two_node: bool) -> Vec<Json> {
    let room = Room::new();
    let mut command = room.ringwatch(["demo", "--scenario", scenario, "--headless", "--json"]);
    if two_node {
        command.arg("--two-node");
    }
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the demo starts");
    let (dir, players) = support::until("four segments", || segments_of(&room, &child));
    let said = finish(child);
    let err = String::from_utf8_lossy(&said.stderr);
    assert_eq!((said.status.code(), err.as_ref()), (Some(0), ""), "{scenario}");
    assert!(!dir.exists(), "{} is left behind", dir.display());
    assert_eq!(files(&room.path("tmp")), Vec::<PathBuf>::new(), "left in the temporary directory");
    let left: Vec<&String> =
        players.iter().filter(|p| Path::new("/proc").join(p.as_str()).exists()).collect();
    assert!(left.is_empty(), "players {left:?} outlive the demo");
    findings(&String::from_utf8(said.stdout).expect("text"))
}

fn assert_straggler(found: &[Json]) {
    assert_eq!(found.len(), 1, "{found:#?}");
    let f = &found[0];
    assert_eq!((f.get("kind").text(), ranks(f)), ("straggler", vec![3]), "{f:#?}");
    let first = &f.get("evidence").list()[0];
    let late = first.get("value").number();
    assert_eq!(first.get("unit").text(), "s");
    assert!((late - 0.30).abs() <= 0.01, "rank 3 came {late} s late: {:#?}", evidence(f));
    assert_eq!(f.get("operation").get("bytes"), &Json::Number(8_388_608.0));
}

#[test]
fn missing_rank_on_one_node() {
    assert_missing_rank(&demo("missing-rank", false));
}

#[test]
fn missing_rank_on_two_nodes() {
    assert_missing_rank(&demo("missing-rank", true));
}

#[test]
fn mismatch_on_one_node() {
    assert_mismatch(&demo("mismatch", false));
}

#[test]
fn mismatch_on_two_nodes() {
    assert_mismatch(&demo("mismatch", true));
}

#[test]
fn mixed_on_one_node() {
    assert_straggler(&demo("mixed", false));
}

#[test]
fn mixed_on_two_nodes() {
    assert_straggler(&demo("mixed", true));
}
