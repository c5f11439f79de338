//! Short forms of the steps of a program.

use crate::simulator::{Call, Members, Ns, Step};
use ringwatch::model::{DataType, Func};
use std::collections::BTreeMap;

pub(super) fn compute(ns: u64, stream: u8) -> Step {
    Step { compute: Some(Ns(ns.max(1_000))), stream, ..Step::default() }
}

pub(super) fn host(ns: u64) -> Step {
    Step { host: Some(Ns(ns)), ..Step::default() }
}

pub(super) fn idle(ns: u64) -> Step {
    Step { idle: Some(Ns(ns)), ..Step::default() }
}

pub(super) fn sync() -> Step {
    Step { sync: Some(true), ..Step::default() }
}

/// `stream` waits for what was issued to `on`.
pub(super) fn wait(stream: u8, on: u8) -> Step {
    Step { wait: Some(on), stream, ..Step::default() }
}

pub(super) fn call(comm: &str, func: Func, count: u64) -> Call {
    Call {
        comm: comm.to_owned(),
        func,
        count: count.max(1),
        dtype: DataType::Bfloat16,
        root: None,
        redop: None,
        by: 0,
        to: BTreeMap::new(),
        from: BTreeMap::new(),
        varies: None,
    }
}

pub(super) fn rooted(comm: &str, func: Func, count: u64, root: u32) -> Call {
    Call { root: Some(root), ..call(comm, func, count) }
}

pub(super) fn transfer(comm: &str, func: Func, count: u64, by: i64) -> Call {
    Call { by, ..call(comm, func, count) }
}

pub(super) fn issue(call: Call, stream: u8) -> Step {
    Step { call: Some(call), stream, ..Step::default() }
}

pub(super) fn group(calls: Vec<Call>, stream: u8) -> Step {
    match calls.len() {
        1 => Step { call: calls.into_iter().next(), stream, ..Step::default() },
        _ => Step { group: Some(calls), stream, ..Step::default() },
    }
}

/// What a stream computes, then a call on another stream that needs it.
pub(super) fn overlapped(ns: u64, call: Call) -> Vec<Step> {
    vec![compute(ns, 0), wait(1, 0), issue(call, 1)]
}

pub(super) fn repeat(times: u32, steps: Vec<Step>) -> Step {
    Step { repeat: Some(times), steps, ..Step::default() }
}

pub(super) fn only(ranks: Vec<u32>, steps: Vec<Step>) -> Step {
    Step { repeat: Some(1), steps, ranks: Some(ranks), ..Step::default() }
}

pub(super) fn all() -> Members {
    Members::default()
}

pub(super) fn groups(n: u32) -> Members {
    Members { groups: Some(n), ..Members::default() }
}

pub(super) fn strided(n: u32) -> Members {
    Members { strided: Some(n), ..Members::default() }
}
