//! The log of the daemons: its lines, what it says of settings that were read again, and of GPUs that are not there.

use crate::support::agent::Agent;
use crate::support::{Room, run, until};
use serde_json::Value;
use std::fs;
use std::io::Read;
use std::os::fd::AsFd;

/// An agent that cannot start, once it has said what it is.
const FAILS: [&str; 5] = ["agent", "--set", "socket.path=null", "--set", "http.listen=\"[fe80::1]:1\""];

fn is_time(text: &str) -> bool {
    let digits = text.bytes().filter(u8::is_ascii_digit).count();
    text.len() == "2026-11-22T20:31:35.123456Z".len()
        && text.as_bytes()[10] == b'T'
        && text.ends_with('Z')
        && digits == 20
}

#[test]
fn lines_of_text_have_time_and_level() {
    let room = Room::new();
    let said = run(&mut room.ringwatch(FAILS));
    assert_eq!((said.code, said.out.as_str()), (Some(2), ""));
    let lines: Vec<&str> = said.err.lines().collect();
    assert!(lines.iter().all(|l| is_time(l.split(' ').next().unwrap())), "{lines:#?}");
    assert!(lines[0].contains("Z  INFO agent "), "{lines:#?}");
    let last = lines.last().unwrap();
    assert!(last.contains("Z ERROR http.listen: [fe80::1]:1: "), "{lines:#?}");
}

#[test]
fn lines_of_json_are_objects_by_option_or_variable() {
    let room = Room::new();
    let by_option = run(room.ringwatch(FAILS).args(["--log-format", "json"]));
    let by_variable = run(room.ringwatch(FAILS).env("RINGWATCH_LOG_FORMAT", "json"));
    for said in [by_option, by_variable] {
        let lines: Vec<Value> = said.err.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
        assert!(lines.iter().all(|l| is_time(l["timestamp"].as_str().unwrap())), "{lines:#?}");
        assert_eq!(lines[0]["level"], "INFO");
        let last = lines.last().unwrap();
        assert_eq!((said.code, &last["level"]), (Some(2), &Value::from("ERROR")));
        assert!(last["message"].as_str().unwrap().starts_with("http.listen: [fe80::1]:1: "), "{last}");
        assert_eq!(last["target"], "ringwatch::cmd::agent");
    }
}

#[test]
fn the_level_is_an_option_and_a_variable() {
    let room = Room::new();
    for (arguments, variable) in [(&["--log-level", "error"][..], None), (&[], Some("error"))] {
        let mut command = room.ringwatch(FAILS);
        let said = run(command.args(arguments).envs(variable.map(|v| ("RINGWATCH_LOG", v))));
        assert_eq!(said.err.lines().count(), 1, "{}", said.err);
        assert!(said.err.contains(" ERROR "), "{}", said.err);
    }
    let wrong = run(room.ringwatch(FAILS).env("RINGWATCH_LOG", "loud"));
    assert!(wrong.code == Some(2) && wrong.err.contains("'loud'"), "{}", wrong.err);
}

#[test]
fn the_journal_gets_its_own_levels_and_no_time() {
    let room = Room::new();
    let (mut read, write) = std::io::pipe().unwrap();
    let stat = rustix::fs::fstat(write.as_fd()).unwrap();
    let mut command = room.ringwatch(FAILS);
    command.env("JOURNAL_STREAM", format!("{}:{}", stat.st_dev, stat.st_ino)).stderr(write);
    assert_eq!(command.status().unwrap().code(), Some(2));
    drop(command);
    let mut text = String::new();
    read.read_to_string(&mut text).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines[0].starts_with("<6>INFO: agent "), "{text}");
    assert!(lines.last().unwrap().starts_with("<3>ERROR: http.listen"), "{text}");
}

#[test]
fn settings_that_are_read_again_are_named_with_what_becomes_of_them() {
    let room = Room::new();
    let file = room.path("agent.yaml");
    fs::write(&file, "otlp:\n  headers: {x-key: pL4nt3d-1}\n").unwrap();
    let agent = Agent::start(&room, &["--config", file.to_str().unwrap()]);
    fs::write(
        &file,
        "otlp:\n  headers: {x-key: pL4nt3d-2}\ndetect: {patience_ms: 5000}\ntags: {team: a}\nlimits: {cpu: 0.5}\n",
    )
    .unwrap();
    agent.signal(rustix::process::Signal::HUP);
    let mut lines = agent.says_all(&["taken over", "need a restart"]);
    let of = |lines: &[String], text: &str| {
        let line = lines.iter().find(|l| l.contains(text)).unwrap();
        line.split_once(text).unwrap().1.to_owned()
    };
    assert_eq!(of(&lines, "taken over: "), "detect.patience_ms: 3000 -> 5000, limits.cpu: 0.25 -> 0.5");
    assert_eq!(of(&lines, "need a restart: "), "otlp.headers.x-key (a secret), tags.team: nothing -> \"a\"");
    assert!(lines.iter().any(|l| l.contains(" WARN these settings need")), "{lines:#?}");
    // Nothing new, and still not restarted.
    agent.signal(rustix::process::Signal::HUP);
    let again = agent.says_all(&["nothing is to be taken over", "need a restart"]);
    assert_eq!(of(&again, "need a restart: "), of(&lines, "need a restart: "));
    lines.extend(again);
    assert!(!lines.concat().contains("pL4nt3d"), "{lines:#?}");
    assert_eq!(agent.end().1, Some(0));
}

#[test]
fn gpus_that_are_not_there_are_named_once_with_what_to_do() {
    let room = Room::new();
    let agent = Agent::start(&room, &["--set", "hardware.nvml=/nonexistent/libnvidia-ml.so.1"]);
    until("the samplers have answered", || {
        let up = agent.series("ringwatch_sampler_up");
        (up.len() >= 5).then_some(())
    });
    let mut lines = agent.says_all(&["no GPU is watched"]);
    lines.extend(agent.end_with_log().1);
    let about: Vec<_> = lines.iter().filter(|l| l.contains("/nonexistent/libnvidia-ml.so.1")).collect();
    assert_eq!(about.len(), 1, "{lines:#?}");
    assert!(about[0].contains(" INFO ") && about[0].contains("install NVIDIA's driver"), "{about:?}");
}

#[test]
fn verbs_that_people_type_say_it_plainly() {
    let room = Room::new();
    let said = run(&mut room.ringwatch(["top", "--once", "--agent", "/nonexistent/agent.sock"]));
    assert!(said.err.starts_with("ringwatch: /nonexistent/agent.sock: "), "{}", said.err);
}

#[test]
fn a_file_that_is_not_there_is_no_text_to_explain() {
    let room = Room::new();
    for name in ["logs/rank0", "rank0.log", "slurm-17.out", "notes.txt", "job.err", "./my logs/rank 0.log"] {
        let said = run(&mut room.ringwatch(["explain", name]));
        assert_eq!((said.code, said.out.as_str()), (Some(2), ""), "{name}");
        assert_eq!(said.err, format!("ringwatch: {name}: there is no such file\n"));
    }
    for text in ["NET/IB : Got completion with error 12", "unhandled system error", "see rank0.log"] {
        let said = run(&mut room.ringwatch(["explain", text]));
        assert!(matches!(said.code, Some(0 | 1)), "{text}: {}", said.err);
    }
}
