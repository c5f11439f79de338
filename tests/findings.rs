//! The life of a finding at an agent: it is opened, it ends with its job, and it is there after a restart.

use crate::support::agent::{Agent, diagnosed, socket};
use crate::support::{Json, Play, Players, Room, Said, assert_missing_rank, changes, findings, run, until};

/// `ringwatch diagnose --json --agent` with more options.
fn diagnose(room: &Room, more: &[&str]) -> Said {
    run(room.ringwatch(["diagnose", "--json"]).args(more).arg("--agent").arg(socket(room)))
}

fn value(agent: &Agent, metric: &str, labels: &[&str]) -> f64 {
    let all = agent.series(metric);
    all.iter().filter(|(l, _)| labels.iter().all(|part| l.contains(part))).map(|(_, n)| n).sum()
}

fn is_over(f: &Json) -> bool {
    *f.get("open") == Json::Bool(false) && f.get("close_reason").text() == "job-ended"
}

#[test]
fn a_job_that_is_killed_in_a_hang_leaves_a_closed_finding_and_no_series() {
    let room = Room::new();
    let mut players = Players::start(&room, Play::of("missing-rank").hold(60));
    let agent = Agent::start(&room, &[]);
    assert_missing_rank(&findings(&diagnosed(&room)));
    let now = [
        "ringwatch_oldest_operation_age_seconds",
        "ringwatch_operations_in_flight",
        "ringwatch_job_processes",
    ];
    for metric in now {
        assert!(!agent.series(metric).is_empty(), "{metric}");
    }
    assert_eq!(value(&agent, "ringwatch_findings", &["missing-rank"]), 1.0);
    players.kill();
    // It is told for a while without being asked for, and as what it is.
    until("the finding is over", || {
        let said = diagnose(&room, &[]);
        let all = findings(&said.out);
        (said.code == Some(1) && all.len() == 1 && is_over(&all[0])).then_some(())
    });
    until("no series is of the job", || now.iter().all(|m| agent.series(m).is_empty()).then_some(()));
    assert_eq!(value(&agent, "ringwatch_findings", &["missing-rank"]), 0.0);
    let closed = ["missing-rank", "reason=\"job-ended\""];
    assert_eq!(value(&agent, "ringwatch_findings_closed_total", &closed), 1.0);
    let top = run(&mut room.ringwatch(["top", "--once", "--agent", socket(&room).to_str().unwrap()]));
    assert!(top.out.contains("in flight 0"), "{}", top.out);

    // What is over is told to who asks for it, also by an agent that began later.
    for more in [&["--all"][..], &["--since", "24h"]] {
        let all = findings(&diagnose(&room, more).out);
        assert!(all.len() == 1 && is_over(&all[0]), "{all:#?}");
    }
    let (told, code) = agent.end();
    assert_eq!(code, Some(0));
    let told: Vec<String> = changes(&told).into_iter().map(|(change, _)| change).collect();
    assert_eq!(told.iter().filter(|c| *c == "opened").count(), 1, "{told:?}");
    assert_eq!(told.last().map(String::as_str), Some("closed"), "{told:?}");
    assert_eq!(told.iter().filter(|c| *c == "closed").count(), 1, "{told:?}");
    let again = Agent::start(&room, &[]);
    let all = findings(&diagnose(&room, &["--since", "24h"]).out);
    assert!(all.len() == 1 && is_over(&all[0]), "{all:#?}");
    let (told, _) = again.end();
    assert_eq!(told, "", "nothing has changed");
}

#[test]
fn what_was_open_when_the_agent_was_killed_is_closed_once_by_the_next_one() {
    let room = Room::new();
    let mut players = Players::start(&room, Play::of("missing-rank").hold(60));
    let first = Agent::start(&room, &[]);
    let id = findings(&diagnosed(&room))[0].get("id").text().to_owned();
    first.kill();
    // Its job ends while no agent runs.
    players.kill();
    let second = Agent::start(&room, &[]);
    let over = until("the finding is over", || {
        let all = findings(&diagnose(&room, &["--all"]).out);
        all.into_iter().find(|f| f.get("id").text() == id && *f.get("open") == Json::Bool(false))
    });
    assert!(["job-ended", "unobserved"].contains(&over.get("close_reason").text()), "{over:#?}");
    let (told, _) = second.end();
    let told = changes(&told);
    assert!(told.iter().all(|(change, _)| change != "opened"), "{told:#?}");
    assert_eq!(told.iter().filter(|(change, _)| change == "closed").count(), 1, "{told:#?}");
}

#[test]
fn an_agent_that_sees_nothing_does_not_say_that_all_is_well() {
    let room = Room::new();
    let agent = Agent::start(&room, &[]);
    let said = diagnose(&room, &[]);
    assert_eq!((said.code, said.out.as_str()), (Some(2), ""), "{}", said.err);
    assert!(!said.err.is_empty());
    assert_eq!(agent.end().1, Some(0));
}
