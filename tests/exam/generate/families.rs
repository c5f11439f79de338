//! One step of the work of each family, as its framework would issue it.

use super::pipeline;
use super::steps::{
    all, call, compute, group, groups, host, idle, issue, overlapped, repeat, rooted, strided, sync,
    transfer, wait,
};
use crate::simulator::{Call, Members, Step};
use crate::spec::{Family, Spec};
use ringwatch::model::Func;
use std::collections::BTreeMap;

/// The communicators of a job, and one step of its work.
#[derive(Debug)]
pub(crate) struct Layout {
    pub(crate) comms: BTreeMap<String, Members>,
    pub(crate) step: Vec<Step>,
}

fn layout<const N: usize>(comms: [(&str, Members); N], step: Vec<Step>) -> Layout {
    Layout { comms: comms.into_iter().map(|(n, m)| (n.to_owned(), m)).collect(), step }
}

pub(super) fn of(spec: &Spec) -> Layout {
    let mut made = match spec.family {
        Family::Ddp => ddp(spec),
        Family::Sharded => sharded(spec),
        Family::Pipeline => pipeline::layout(spec),
        Family::Experts => experts(spec),
        Family::Context => context(spec),
        Family::Reinforcement => reinforcement(spec),
        Family::Inference => inference(spec),
        Family::Rooted => mixed(spec),
    };
    if spec.host_share > 0.0 {
        made.step = launched(made.step, spec.host_share);
    }
    if spec.sync {
        made.step.push(sync());
    }
    for members in made.comms.values_mut() {
        members.preloaded = spec.preloaded;
    }
    made
}

/// The same steps with a host that takes this share of what a GPU computes to launch it.
fn launched(steps: Vec<Step>, share: f64) -> Vec<Step> {
    let mut all = Vec::new();
    for mut step in steps {
        step.steps = launched(std::mem::take(&mut step.steps), share);
        if let Some(ns) = step.compute {
            all.push(Step { ranks: step.ranks.clone(), ..host((ns.0 as f64 * share) as u64) });
        }
        all.push(step);
    }
    all
}

/// Gradients are reduced in buckets while the backward pass goes on.
fn ddp(spec: &Spec) -> Layout {
    let unit = spec.unit();
    let mut step = vec![host(unit / 8), compute(unit * 2, 0)];
    for _ in 0..spec.layers {
        step.extend(overlapped(unit, call("world", Func::AllReduce, spec.count)));
    }
    step.extend([wait(0, 1), compute(unit / 4, 0)]);
    if spec.variant {
        // The loss of the step, for the log.
        step.extend([wait(1, 0), issue(call("world", Func::AllReduce, 1), 1), wait(0, 1)]);
    }
    layout([("world", all())], step)
}

/// Each layer's weights are gathered ahead of its computing, and gradients scattered behind it.
fn sharded(spec: &Spec) -> Layout {
    let (unit, hybrid) = (spec.unit(), spec.variant && spec.outer > 1);
    let shard = if hybrid { "shard" } else { "world" };
    let gather = || issue(call(shard, Func::AllGather, spec.count), 1);
    let mut step = vec![host(unit / 8), gather()];
    for _ in 1..spec.layers {
        // The next layer's weights come while this layer computes.
        step.extend([wait(0, 1), gather(), compute(unit, 0)]);
    }
    step.extend([wait(0, 1), compute(unit, 0)]);
    for _ in 0..spec.layers {
        step.extend([gather(), wait(0, 1), compute(unit * 2, 0), wait(1, 0)]);
        step.push(issue(call(shard, Func::ReduceScatter, spec.count), 1));
        if hybrid {
            step.extend([wait(2, 1), issue(call("replicas", Func::AllReduce, spec.count), 2)]);
        }
    }
    step.extend([wait(0, 1), wait(0, 2), compute(unit / 4, 0), wait(1, 0)]);
    match hybrid {
        true => layout([("shard", groups(spec.inner)), ("replicas", strided(spec.inner))], step),
        false => layout([("world", all())], step),
    }
}

/// Tokens go to their experts and come back, in each layer.
fn experts(spec: &Spec) -> Layout {
    let unit = spec.unit();
    let whole = spec.variant || spec.inner > 8;
    let count = (spec.count / u64::from(spec.inner)).max(64);
    let exchange = || match whole {
        true => issue(call("ep", Func::AlltoAll, count), 1),
        false => Step { exchange: Some(call("ep", Func::Send, count)), stream: 1, ..Step::default() },
    };
    let mut step = vec![host(unit / 8)];
    for _ in 0..spec.layers {
        step.extend([compute(unit, 0), wait(1, 0), exchange(), wait(0, 1)]);
        step.extend([compute(unit / 2, 0), wait(1, 0), exchange(), wait(0, 1)]);
    }
    step.extend([
        compute(unit, 0),
        wait(2, 0),
        issue(call("dp", Func::AllReduce, spec.count), 2),
        wait(0, 2),
    ]);
    layout(
        [("ep", groups(spec.inner)), ("dp", if spec.outer > 1 { strided(spec.inner) } else { all() })],
        step,
    )
}

/// Keys and values go around a ring while attention is computed block by block.
fn context(spec: &Spec) -> Layout {
    let unit = spec.unit();
    let count = (spec.count / 4).max(1_024);
    let mut step = vec![host(unit / 8), compute(unit, 0)];
    let round = vec![
        wait(1, 0),
        group(vec![transfer("cp", Func::Send, count, 1), transfer("cp", Func::Recv, count, -1)], 1),
        compute(unit / u64::from(spec.inner), 0),
        wait(0, 1),
    ];
    for _ in 0..spec.layers {
        step.extend([repeat(spec.inner - 1, round.clone()), compute(unit / 2, 0)]);
    }
    step.extend([wait(2, 0), issue(call("world", Func::AllReduce, spec.count), 2), wait(0, 2)]);
    layout([("cp", groups(spec.inner)), ("world", all())], step)
}

/// Generation token by token, scores, some training, and the new weights for the generators.
fn reinforcement(spec: &Spec) -> Layout {
    let unit = spec.unit();
    let token = vec![
        compute(unit / 4, 0),
        issue(call("tp", Func::AllReduce, 8_192), 0),
        compute(unit / 4, 0),
        issue(call("tp", Func::AllReduce, 8_192), 0),
        sync(),
    ];
    let mut step = vec![repeat(8 * spec.layers, token), host(unit * 2)];
    step.extend([issue(call("world", Func::AllGather, 4_096), 1), sync()]);
    for _ in 0..spec.layers {
        step.extend([issue(call("world", Func::AllGather, spec.count), 1), wait(0, 1), compute(unit * 2, 0)]);
        step.extend([wait(1, 0), issue(call("world", Func::ReduceScatter, spec.count), 1)]);
    }
    step.extend([wait(0, 1), compute(unit, 0), wait(1, 0)]);
    let weights = rooted("world", Func::Broadcast, spec.count, 0);
    step.extend([repeat(spec.layers, vec![issue(weights, 1)]), sync()]);
    layout([("tp", groups(spec.inner)), ("world", all())], step)
}

/// Requests come, are read in one eager pass, and answered token by token by replays of a graph.
fn inference(spec: &Spec) -> Layout {
    let unit = spec.unit() / 4;
    let sum = |count| call("tp", Func::AllReduce, count);
    let prefill: Vec<Step> = vec![
        compute(unit * 2, 0),
        issue(sum(spec.count / 16 + 1), 0),
        compute(unit, 0),
        issue(sum(8_192), 0),
    ];
    let replay = |calls: Vec<Call>| Step { replay: Some(calls), ..Step::default() };
    let decode = vec![
        compute(unit, 0),
        replay((0..2 * spec.layers).map(|_| call("decode", Func::AllReduce, 8_192)).collect()),
        sync(),
    ];
    let step = vec![
        idle(unit * 4),
        repeat(spec.layers, prefill),
        sync(),
        repeat(6 + 4 * spec.micro, decode),
        sync(),
    ];
    layout([("tp", groups(spec.inner)), ("decode", groups(spec.inner))], step)
}

/// A solver: halos with the neighbors, sums, and now and then something from one to all or from all to one.
fn mixed(spec: &Spec) -> Layout {
    let unit = spec.unit();
    let halo = (spec.count / 16).max(256);
    let mut calls = vec![transfer("world", Func::Send, halo, 1), transfer("world", Func::Recv, halo, -1)];
    if spec.ranks > 2 {
        calls.extend([transfer("world", Func::Send, halo, -1), transfer("world", Func::Recv, halo, 1)]);
    }
    let round = vec![compute(unit, 0), group(calls, 0), issue(call("world", Func::AllReduce, 2), 0)];
    let root = (spec.seed % u64::from(spec.ranks)) as u32;
    let step = vec![
        host(unit / 8),
        repeat(spec.layers, round),
        issue(rooted("world", Func::Broadcast, spec.count, root), 0),
        compute(unit, 0),
        issue(rooted("world", Func::Reduce, spec.count, 0), 0),
    ];
    layout([("world", all())], step)
}
