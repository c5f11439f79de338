//! Tensor, pipeline and data parallel training: 1F1B, and stages in chunks.

use super::families::Layout;
use super::steps::{call, compute, group, groups, issue, only, strided, transfer, wait};
use crate::simulator::{Call, Members, Step};
use crate::spec::Spec;
use ringwatch::model::Func;
use std::collections::BTreeMap;

/// A stage's work on one micro-batch, split by the sums of its tensor group.
fn work(spec: &Spec, ns: u64) -> Vec<Step> {
    let mut steps = Vec::new();
    for _ in 0..spec.layers.min(2) {
        steps.push(compute(ns, 0));
        if spec.inner > 1 {
            steps.push(issue(call("tp", Func::AllReduce, (spec.count / 8).max(64)), 0));
        }
    }
    steps
}

/// Transfers that the computing stream waits for.
fn exchange(calls: Vec<Call>) -> Vec<Step> {
    if calls.is_empty() {
        return Vec::new();
    }
    vec![wait(1, 0), group(calls, 1), wait(0, 1)]
}

/// One rank's calls to its neighbors; those that do not exist are left out.
struct Stage<'a> {
    spec: &'a Spec,
    at: u32,
    of: u32,
}

impl Stage<'_> {
    fn count(&self) -> u64 {
        (self.spec.count / 8).max(512)
    }

    fn next(&self, func: Func) -> Option<Call> {
        (self.at + 1 < self.of).then(|| transfer("pp", func, self.count(), 1))
    }

    fn before(&self, func: Func) -> Option<Call> {
        (self.at > 0).then(|| transfer("pp", func, self.count(), -1))
    }

    /// The communicator with the stage that comes so many after this one. Each edge of the ring has its own, so that a send
    /// never waits for a receive on the other side.
    fn edge(&self, after: u32) -> String {
        format!("edge{}", (self.at + after) % self.of)
    }

    /// One forward, one backward.
    fn one_forward_one_backward(&self) -> Vec<Step> {
        let (m, unit) = (self.spec.micro, self.spec.unit());
        let ahead = (self.of - self.at - 1).min(m);
        let calls = |list: [Option<Call>; 2]| exchange(list.into_iter().flatten().collect());
        let one = |c: Option<Call>| exchange(c.into_iter().collect());
        let forward = || work(self.spec, unit / 2);
        let backward = || work(self.spec, unit);
        let mut steps = Vec::new();
        for _ in 0..ahead {
            steps.extend(one(self.before(Func::Recv)));
            steps.extend(forward());
            steps.extend(one(self.next(Func::Send)));
        }
        let steady = m - ahead;
        if steady > 0 {
            steps.extend(one(self.before(Func::Recv)));
        }
        for i in 0..steady {
            steps.extend(forward());
            steps.extend(calls([self.next(Func::Send), self.next(Func::Recv)]));
            steps.extend(backward());
            match i + 1 == steady {
                true => steps.extend(one(self.before(Func::Send))),
                false => steps.extend(calls([self.before(Func::Send), self.before(Func::Recv)])),
            }
        }
        for _ in 0..ahead {
            steps.extend(one(self.next(Func::Recv)));
            steps.extend(backward());
            steps.extend(one(self.before(Func::Send)));
        }
        steps
    }

    /// Every stage has two chunks; the last hands over to the first. Sends do not hold up computing.
    fn chunks(&self) -> Vec<Step> {
        let unit = self.spec.unit();
        let mut steps = Vec::new();
        for (forward, chunk) in [(true, 0), (true, 1), (false, 1), (false, 0)] {
            let last = if forward { self.of - 1 } else { 0 };
            let first = self.of - 1 - last;
            // Nothing comes before the first chunk, and nothing follows the last one.
            let begins = chunk == usize::from(!forward);
            for _ in 0..self.spec.micro {
                if !(begins && self.at == first) {
                    let from = if forward { self.edge(self.of - 1) } else { self.edge(0) };
                    steps.extend([issue(transfer(&from, Func::Recv, self.count(), 1), 1), wait(0, 1)]);
                }
                steps.extend(work(self.spec, if forward { unit / 4 } else { unit / 2 }));
                if begins || self.at != last {
                    let to = if forward { self.edge(0) } else { self.edge(self.of - 1) };
                    steps.extend([wait(2, 0), issue(transfer(&to, Func::Send, self.count(), 1), 2)]);
                }
            }
        }
        steps.push(wait(0, 2));
        steps
    }
}

pub(super) fn layout(spec: &Spec) -> Layout {
    let (tp, pp) = (spec.inner, spec.outer);
    let a_stage = spec.ranks / pp;
    let mut comms = BTreeMap::new();
    if spec.variant {
        for at in 0..pp {
            let stages = [at.min((at + 1) % pp), at.max((at + 1) % pp)];
            let ranks = stages.iter().flat_map(|s| s * a_stage..(s + 1) * a_stage).collect();
            comms.insert(format!("edge{at}"), Members { ranks: Some(ranks), ..strided(a_stage) });
        }
    } else {
        comms.insert("pp".to_owned(), strided(a_stage));
    }
    if tp > 1 {
        comms.insert("tp".to_owned(), groups(tp));
    }
    if a_stage > tp {
        comms.insert("dp".to_owned(), Members { block: Some(a_stage), ..strided(tp) });
    }
    let mut step = Vec::new();
    for at in 0..pp {
        let stage = Stage { spec, at, of: pp };
        let steps = if spec.variant { stage.chunks() } else { stage.one_forward_one_backward() };
        step.push(only((at * a_stage..(at + 1) * a_stage).collect(), steps));
    }
    if a_stage > tp {
        step.extend([wait(3, 0), issue(call("dp", Func::ReduceScatter, spec.count), 3), wait(0, 3)]);
        step.extend([compute(spec.unit() / 4, 0), wait(3, 0)]);
        step.extend([issue(call("dp", Func::AllGather, spec.count), 3), wait(0, 3)]);
    }
    Layout { comms, step }
}
