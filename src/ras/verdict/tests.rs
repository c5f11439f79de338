use super::*;
use crate::ras::status::{Absence, Flags, MissingRank};

const APART: Duration = Duration::from_secs(5);

/// A communicator of these processes, with the all-gathers and all-reduces that each has launched.
fn comm(hash: &str, ranks: &[(u32, u64, u64)]) -> Communicator {
    let rank = |(rank, (pid, gathers, reduces)): (usize, &(u32, u64, u64))| RankStatus {
        rank: rank as u32,
        host: "10.0.0.1".into(),
        pid: *pid,
        cuda_dev: Some(rank as i32),
        status: Flags::default(),
        collective_counts: [("AllGather".into(), *gathers), ("AllReduce".into(), *reduces)].into(),
    };
    Communicator {
        hash: hash.into(),
        secondary_hash: String::new(),
        size: ranks.len() as u32,
        ranks: ranks.iter().enumerate().map(rank).collect(),
        missing_ranks: Vec::new(),
    }
}

fn status(communicators: Vec<Communicator>) -> Status {
    Status { nccl_version: Some("2.28.9".into()), timestamp: None, communicators, ras: Default::default() }
}

/// Judges a job in which nothing moves: kinds, ranks and functions.
fn judged(communicators: Vec<Communicator>) -> (Vec<(Kind, Vec<u32>, String)>, Verdict) {
    let all = status(communicators);
    let verdict = judge(&all, &all, APART);
    let short = |f: &Finding| (f.kind, f.ranks.iter().map(|r| r.0).collect(), f.operation.func.clone());
    (verdict.findings.iter().map(short).collect(), verdict)
}

#[test]
fn a_rank_that_launched_less_is_named_with_its_process() {
    let (found, verdict) = judged(vec![comm("0xa", &[(1, 5, 101), (2, 5, 101), (3, 5, 100), (4, 5, 101)])]);
    assert_eq!(found, [(Kind::MissingRank, vec![2], "AllReduce".to_owned())]);
    assert_eq!(verdict.culprits, [[("10.0.0.1".to_owned(), 3)]]);
    assert_eq!(verdict.findings[0].operation.order, 105);
    let evidence: Vec<&str> = verdict.findings[0].evidence.iter().map(|e| &*e.text).collect();
    assert_eq!(evidence[1], "rank 2 launched 105 operations (AllGather 5, AllReduce 100)");
    assert!(!verdict.cannot_tell);
}

#[test]
fn ranks_that_go_on_are_not_accused() {
    let before = status(vec![comm("0xa", &[(1, 5, 101), (2, 5, 100)])]);
    let after = status(vec![comm("0xa", &[(1, 5, 103), (2, 5, 102)])]);
    let verdict = judge(&before, &after, APART);
    assert_eq!((verdict.findings.len(), verdict.cannot_tell), (0, false));
    assert!(verdict.notes[0].contains("operations are launched in 1 of 1"), "{:?}", verdict.notes);
}

#[test]
fn equal_counts_are_said_to_be_beyond_ras() {
    let (found, verdict) = judged(vec![comm("0xa", &[(1, 5, 101), (2, 5, 101)])]);
    assert_eq!((found, verdict.cannot_tell), (vec![], true));
    assert!(verdict.notes.iter().any(|n| n.contains("cannot tell these ranks apart")), "{:?}", verdict.notes);
}

#[test]
fn a_rank_that_waits_elsewhere_is_a_victim() {
    // Process 3 lags in the first communicator, since it waits for process 4 in the second.
    let world = comm("0xa", &[(1, 0, 10), (2, 0, 10), (3, 0, 9), (4, 0, 9)]);
    let pair = comm("0xb", &[(3, 7, 0), (4, 6, 0)]);
    let (found, _) = judged(vec![world, pair]);
    let named: Vec<_> = found.iter().map(|(kind, ranks, _)| (*kind, ranks.clone())).collect();
    assert_eq!(named, [(Kind::MissingRank, vec![3]), (Kind::MissingRank, vec![1])], "process 4 in both");
}

#[test]
fn processes_that_wait_for_each_other_are_one_circle() {
    let first = comm("0xa", &[(1, 1, 0), (2, 0, 0)]);
    let second = comm("0xb", &[(1, 0, 0), (2, 1, 0)]);
    let (found, _) = judged(vec![first, second]);
    assert_eq!(found.iter().map(|f| f.0).collect::<Vec<_>>(), [Kind::InterleavedCommunicators]);
}

#[test]
fn one_that_called_once_more_than_all_others_is_named() {
    let ranks: Vec<(u32, u64, u64)> = (0..8).map(|n| (n + 1, 0, if n == 5 { 11 } else { 10 })).collect();
    let (found, verdict) = judged(vec![comm("0xa", &ranks)]);
    assert_eq!(found, [(Kind::ShiftedOrder, vec![5], "AllReduce".to_owned())]);
    assert!(
        verdict.findings[0].evidence.iter().any(|e| e.text.starts_with("either rank 5 called once more"))
    );
    let ranks: Vec<(u32, u64, u64)> = (0..8).map(|n| (n + 1, 0, if n == 5 { 13 } else { 10 })).collect();
    assert_eq!(judged(vec![comm("0xa", &ranks)]).0[0].0, Kind::MissingRank, "it runs ahead of seven");
}

#[test]
fn other_functions_are_a_mismatch_of_the_few() {
    let (found, _) = judged(vec![comm("0xa", &[(1, 5, 10), (2, 5, 10), (3, 6, 9), (4, 5, 10)])]);
    assert_eq!(found, [(Kind::Mismatch, vec![2], "a collective".to_owned())]);
    let (found, _) = judged(vec![comm("0xa", &[(1, 5, 10), (2, 6, 9)])]);
    assert_eq!(found[0].1, [0, 1], "of two, nobody knows which is wrong");
}

#[test]
fn a_rank_that_goes_on_in_another_communicator_is_not_accused() {
    // Gradients are reduced seldom, tensors in each layer: process 2 is not through with its layers.
    let seldom = || comm("0xa", &[(1, 0, 11), (2, 0, 10)]);
    let often = |n| comm("0xb", &[(2, 0, n), (3, 0, n)]);
    let (before, after) = (status(vec![seldom(), often(100)]), status(vec![seldom(), often(160)]));
    let verdict = judge(&before, &after, APART);
    assert_eq!((verdict.findings.len(), verdict.cannot_tell), (0, false), "{verdict:?}");
    assert!(
        verdict.notes.iter().any(|n| n.contains("goes on in another communicator")),
        "{:?}",
        verdict.notes
    );
}

#[test]
fn what_is_no_fault_of_a_communicator_is_not_taken_for_one() {
    let mut world = comm("0xa", &[(1, 5, 10), (2, 5, 10)]);
    world.ranks[0].status.async_error = 7;
    world.missing_ranks =
        vec![MissingRank { rank: 2, host: "10.0.0.1".into(), pid: 3, status: Absence::default() }];
    let (found, verdict) = judged(vec![world]);
    assert_eq!((found, verdict.cannot_tell), (vec![], true), "in progress, and one that has left");
    assert!(verdict.notes.iter().any(|n| n.contains("answers, and has freed it")), "{:?}", verdict.notes);
    let (_, verdict) = judged(vec![]);
    assert!(verdict.cannot_tell, "nothing is known of a job without communicators");
    let mut world = comm("0xa", &[(1, 5, 10), (2, 5, 10)]);
    world.ranks.iter_mut().for_each(|r| r.status.init_state = 7);
    let (_, verdict) = judged(vec![world]);
    assert!(verdict.cannot_tell && verdict.notes.iter().any(|n| n.contains("not made yet")), "{verdict:?}");
}

#[test]
fn a_process_that_is_gone_from_several_communicators_is_one_finding() {
    let lacks = |hash| {
        let mut world = comm(hash, &[(1, 0, 4)]);
        let status = Absence { unresponsive: true, considered_dead: true };
        world.missing_ranks = vec![MissingRank { rank: 1, host: "10.0.0.2".into(), pid: 9, status }];
        world
    };
    assert_eq!(judged(vec![lacks("0xa"), lacks("0xb")]).0.len(), 1);
}

#[test]
fn a_rank_that_does_not_answer_is_named_and_not_while_the_job_ends() {
    let mut world = comm("0xa", &[(1, 0, 4)]);
    world.size = 2;
    world.missing_ranks = vec![MissingRank {
        rank: 1,
        host: "10.0.0.2".into(),
        pid: 9,
        status: Absence { unresponsive: true, considered_dead: true },
    }];
    let (found, verdict) = judged(vec![world.clone()]);
    assert_eq!(found[0], (Kind::MissingRank, vec![1], "a collective".to_owned()));
    assert_eq!(verdict.findings[0].cause, Some(Cause::ProcessGone(None)));
    world.ranks[0].status.finalize_called = true;
    assert_eq!(judged(vec![world]).0, []);
}

#[test]
fn what_nccl_2_28_9_prints_of_a_missing_rank_is_read() {
    // Its JSON lacks a comma behind the last field before "status".
    let text = r#"{
  "nccl_version": "2.28.9",
  "communicators": [
    {
      "hash": "0xa1349768e9517ed7",
      "size": 2,
      "ranks": [
        {
          "rank": 0,
          "host": "h",
          "pid": 7,
          "cuda_dev": 0,
          "collective_counts": {
            "AllReduce": 4
          }
        }
      ],
      "missing_ranks": [
        {
          "rank": 1,
          "host": "h",
          "pid": 8,
          "nvml_dev": 1
          "status": {
            "unresponsive": true,
            "considered_dead": false
          }
        }
      ]
    }
  ]
}"#;
    let status = Status::parse(text).expect("read");
    assert_eq!(
        status.communicators[0].missing_ranks[0].status,
        Absence { unresponsive: true, considered_dead: false }
    );
    assert_eq!(status.communicators[0].id(), 0xa134_9768_e951_7ed7);
    let steered = Status::parse(&text.replace("\"h\"", "\"a\\u001b[2J\"")).expect_err("refused");
    assert!(steered.contains("steer a terminal"), "{steered}");
    let unknown = Status::parse(&text.replace("\"pid\": 8", "\"pid\": -1")).expect("read");
    assert_eq!(unknown.communicators[0].missing_ranks[0].pid, 0);
    let fault = Status::parse("{\"communicators\": [1]}").expect_err("refused");
    assert!(fault.contains("line 1"), "{fault}");
}
