//! Where segments go when somebody else was first in `/dev/shm`. Each test has a mount namespace of its own.

#![allow(unsafe_code, reason = "the plugin's tests, whose support this is, need it")]
#![allow(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "the plugin's bans are not its tests'"
)]
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

mod support;

use std::collections::BTreeMap;
use std::process::Command;
use support::child::{is_child, run_under};
use support::library::Plugin;

/// Another user.
const OTHER: u32 = 12_345;

/// The content of a `/dev/shm` of its own after a command has prepared it and so many processes have opened a segment
/// at once: the entries by name, each with kind, owner and mode as `find` prints them. Absent in the processes
/// themselves, and where such a test cannot be had.
fn made(test: &str, prepare: &str, processes: usize) -> Option<BTreeMap<String, String>> {
    if is_child(test) {
        Plugin::built().init(5, 1);
        return None;
    }
    let mount = ["-m", "mount", "-t", "tmpfs", "none", "/mnt"];
    if !Command::new("unshare").args(mount).output().is_ok_and(|o| o.status.success()) {
        support::skip::skipped(test, "unshare, and the right to make a mount namespace (root)");
        return None;
    }
    let script = format!(
        "set -e; mount -t tmpfs -o mode=1777,size=1g none /dev/shm; unset RINGWATCH_DIR; cd /dev/shm; {prepare}
         for n in $(seq {processes}); do \"$@\" >/dev/null 2>&1 & all=\"$all $!\"; done
         for one in $all; do wait $one; done
         find . -mindepth 1 -printf 'ENTRY %P %y %U %m\\n'"
    );
    let ran = run_under(test, &["unshare", "-m", "sh", "-c", &script, "sh"], |_, _| {})?.succeeded();
    let entry = |line: &str| {
        let (name, facts) = line.strip_prefix("ENTRY ")?.split_once(' ')?;
        Some((name.to_owned(), facts.to_owned()))
    };
    Some(ran.output.lines().filter_map(entry).collect())
}

/// Asserts that the segments are in one directory, which is root's alone, beside what was there before; its name.
fn assert_beside(made: &BTreeMap<String, String>, before: &str, segments: usize) -> String {
    let dirs: Vec<&String> =
        made.keys().filter(|n| n.starts_with("ringwatch-0-") && !n.contains('/')).collect();
    let own: Vec<_> = dirs.into_iter().filter(|n| made[*n] == "d 0 700").collect();
    let [own] = own.as_slice() else { panic!("not one directory in {made:#?}") };
    let inside: Vec<_> = made.iter().filter(|(n, _)| n.ends_with(".seg")).collect();
    assert!(
        inside.iter().all(|(n, facts)| n.starts_with(&format!("{own}/")) && *facts == "f 0 400"),
        "{made:#?}"
    );
    assert_eq!(inside.len(), segments, "{made:#?}");
    assert_eq!(made["ringwatch-0"], before);
    (*own).clone()
}

/// Processes that begin together: no more than whose segments stay after their end.
const TOGETHER: usize = 12;

#[test]
fn somebody_elses_directory_of_ones_name_costs_nobody_their_segment() {
    let test = "somebody_elses_directory_of_ones_name_costs_nobody_their_segment";
    let prepare = format!("mkdir -m 777 ringwatch-0; chown {OTHER} ringwatch-0;");
    let Some(made) = made(test, &prepare, 1) else { return };
    let own = assert_beside(&made, &format!("d {OTHER} 777"), 1);
    assert_eq!(own.len(), "ringwatch-0-".len() + 16);
}

#[test]
fn a_file_or_a_link_of_ones_name_costs_nobody_their_segment() {
    let test = "a_file_or_a_link_of_ones_name_costs_nobody_their_segment";
    let Some(made) = made(test, "mkdir -m 777 other; ln -s other ringwatch-0;", 1) else { return };
    assert_beside(&made, "l 0 777", 1);
}

#[test]
fn processes_that_begin_together_share_one_directory() {
    let test = "processes_that_begin_together_share_one_directory";
    // Names that look like ours, and are somebody else's, a file, or not of our making.
    let prepare = format!(
        "mkdir ringwatch-0 ringwatch-0-0000000000000000 ringwatch-0-short; touch ringwatch-0-0000000000000001;
         chown {OTHER} ringwatch-0 ringwatch-0-0000000000000000; chmod 755 ringwatch-0 ringwatch-0-short;"
    );
    let Some(made) = made(test, &prepare, TOGETHER) else { return };
    assert_beside(&made, &format!("d {OTHER} 755"), TOGETHER);
}

#[test]
fn a_directory_of_ones_own_is_used_again() {
    let test = "a_directory_of_ones_own_is_used_again";
    let prepare = format!(
        "mkdir ringwatch-0; chown {OTHER} ringwatch-0; mkdir -m 700 ringwatch-0-ffffffffffffffff ringwatch-0-0123456789abcdef;
         rmdir ringwatch-0-0123456789abcdef;"
    );
    let Some(made) = made(test, &prepare, 2) else { return };
    assert_eq!(assert_beside(&made, &format!("d {OTHER} 755"), 2), "ringwatch-0-ffffffffffffffff");
}

#[test]
fn without_a_thief_the_directory_is_the_usual_one() {
    let test = "without_a_thief_the_directory_is_the_usual_one";
    let Some(made) = made(test, "mkdir -m 700 ringwatch-0-0123456789abcdef;", 2) else { return };
    let inside = made.keys().filter(|n| n.starts_with("ringwatch-0/")).count();
    assert_eq!((inside, made["ringwatch-0"].as_str()), (2, "d 0 700"), "{made:#?}");
}
