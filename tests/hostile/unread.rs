//! Segments that cannot be read are counted by reason and logged once.

use super::forged::{Forged, Writer};
use super::ground::{ATTACKER, Ground, USER};
use crate::support::agent::Agent;
use crate::support::{as_user, until};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// How many segments or directories the agent does not read for this reason.
pub(crate) fn unread(agent: &Agent, reason: &str) -> f64 {
    let wanted = format!("reason=\"{reason}\"");
    let all = agent.series("ringwatch_agent_unread_segments");
    all.iter().find(|(labels, _)| labels.contains(&wanted)).map_or(0.0, |(_, n)| *n)
}

/// How many segments the agent reads.
pub(crate) fn followed(agent: &Agent) -> f64 {
    agent.sum("ringwatch_agent_segments")
}

/// Asserts that each of these files is named in one line of the log, with this reason.
fn assert_named_once(log: &[String], files: &[PathBuf], reason: &str) {
    for file in files {
        let name = file.file_name().expect("a name").to_string_lossy();
        let lines: Vec<&String> = log.iter().filter(|l| l.contains(&*name)).collect();
        let named = lines.len() == 1 && lines[0].contains(&format!("not read ({reason})"));
        assert!(named, "{name}, {reason}: {lines:#?}");
    }
}

#[test]
fn no_segment_is_missing_without_a_word_where_descriptors_are_few() {
    let Some(ground) = Ground::of("no_segment_is_missing_without_a_word_where_descriptors_are_few") else {
        return;
    };
    let directory = ground.directory("of-user", USER);
    let idle = ground.idle(USER);
    let writer = Writer::running(idle.0.id());
    let files: Vec<_> =
        as_user(USER, || (0..SEGMENTS).map(|_| Forged::small(writer).put(&directory)).collect());
    // Whatever is left over when each segment has taken what it takes, questions are answered.
    for descriptors in 61..=64 {
        followed_or_named(&ground, &directory, &files, descriptors);
    }
}

/// Segments that the agent is given, and for which it has too few descriptors.
const SEGMENTS: usize = 40;

/// Asserts that an agent with so many descriptors follows every segment or names it once, and says so when it is asked.
fn followed_or_named(ground: &Ground, directory: &Path, files: &[PathBuf], descriptors: usize) {
    let limit = format!("ulimit -Sn {descriptors} && ulimit -Hn {descriptors} &&");
    let agent = ground.agent(&[directory], &limit);
    let mut lines: Vec<String> = Vec::new();
    let times_named = |lines: &[String], file: &Path| {
        let name = file.file_name().expect("a name").to_string_lossy();
        lines.iter().filter(|l| l.contains("not read (") && l.contains(&*name)).count()
    };
    // A segment that was counted as unread may be read before it is logged, when a descriptor is free again.
    until("every segment is followed or named", || {
        lines.extend(agent.said_so_far());
        let named = files.iter().filter(|f| times_named(&lines, f) > 0).count() as f64;
        (followed(&agent) + named >= SEGMENTS as f64).then_some(())
    });
    let counted = unread(&agent, "descriptors") + unread(&agent, "limits");
    assert!(counted > 0.0, "{descriptors} descriptors do not suffice for {SEGMENTS} segments");
    lines.extend(agent.end_with_log().1);
    assert!(files.iter().all(|f| times_named(&lines, f) <= 1), "each once: {lines:#?}");
}

#[test]
fn segments_of_dead_processes_leave_descriptors_for_questions() {
    let Some(ground) = Ground::of("segments_of_dead_processes_leave_descriptors_for_questions") else {
        return;
    };
    const DEAD: usize = 80;
    let directory = ground.directory("of-user", USER);
    as_user(USER, || (0..DEAD).for_each(|_| drop(Forged::small(Writer::dead()).put(&directory))));
    let agent = ground.agent(&[&directory], "ulimit -Sn 64 && ulimit -Hn 64 &&");
    // What was read to its end holds no descriptor any more.
    until("all are read", || (followed(&agent) >= DEAD as f64).then_some(()));
    assert_eq!(unread(&agent, "descriptors"), 0.0);
}

#[test]
fn a_user_with_many_unread_files_does_not_hide_those_of_others() {
    let Some(ground) = Ground::of("a_user_with_many_unread_files_does_not_hide_those_of_others") else {
        return;
    };
    let (of_attacker, directory) = (ground.directory("a", ATTACKER), ground.directory("b", USER));
    as_user(ATTACKER, || {
        (0..1100).for_each(|n| fs::write(of_attacker.join(format!("{n}.seg")), [7; 8192]).expect("written"));
    });
    let file = as_user(USER, || {
        let forged = Forged::small(Writer::dead());
        let mut bytes = forged.bytes();
        bytes[8] = 9;
        let file = directory.join(forged.name());
        fs::write(&file, bytes).expect("written");
        file
    });
    let agent = ground.agent(&[&of_attacker, &directory], "");
    let line = agent.says(&file.file_name().expect("a name").to_string_lossy());
    assert!(line.contains("not read (format-version)"), "{line}");
}

#[test]
fn every_other_reason_is_counted_and_logged_once() {
    let Some(ground) = Ground::of("every_other_reason_is_counted_and_logged_once") else { return };
    let directory = ground.directory("of-user", USER);
    let of_attacker = ground.directory("of-attacker", ATTACKER);
    let writer = Writer::dead();
    let closed = as_user(USER, || {
        let path = Forged::small(writer).put(&directory);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o400)).expect("its own file");
        path
    });
    let (other, noise) = as_user(ATTACKER, || {
        let forged = Forged::small(writer);
        let mut bytes = forged.bytes();
        bytes[8] = 9;
        let other = of_attacker.join(forged.name());
        fs::write(&other, bytes).expect("written");
        let noise = of_attacker.join("noise.seg");
        fs::write(&noise, [7; 8192]).expect("written");
        (other, noise)
    });
    ground.open_to_all(&directory);
    ground.open_to_all(&of_attacker);
    for path in [&other, &noise] {
        ground.open_to_all(path);
    }
    // Root without the right to read every file, as in a container with few capabilities.
    let without = "exec setpriv --bounding-set -dac_override,-dac_read_search \"$0\" \"$@\" &&";
    let agent = ground.agent(&[&directory, &of_attacker], without);
    for reason in ["permission", "format-version", "not-a-segment"] {
        until(reason, || (unread(&agent, reason) == 1.0).then_some(()));
    }
    assert_eq!(followed(&agent), 0.0);
    let (_, log) = agent.end_with_log();
    for (file, reason) in [(closed, "permission"), (other, "format-version"), (noise, "not-a-segment")] {
        assert_named_once(&log, &[file], reason);
    }
}
