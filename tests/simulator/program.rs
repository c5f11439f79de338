//! Each rank's part of a case, written out, with the faults that are its own.

use super::case::{Call, Case, Fault, Ns, Step};
use ringwatch::model::Func;
use std::collections::BTreeMap;

/// What one rank does, written out.
#[derive(Debug, Clone)]
pub(crate) enum Action {
    Compute(Ns, u8),
    Host(Ns),
    Idle(Ns),
    Calls(Vec<Planned>, u8),
    Replay(Vec<Planned>, u8),
    Sync,
    Hang,
    Die(i32),
    Stop,
    Pause(Ns),
    Abort(String),
    /// A stream waits for what was issued to another one.
    Wait {
        stream: u8,
        on: u8,
    },
    Make(String),
    Free(String),
}

/// A call, and what is to become of it.
#[derive(Debug, Clone)]
pub(crate) struct Planned {
    pub(crate) call: Call,
    /// It is one of an exchange with all others.
    pub(crate) exchange: bool,
    pub(crate) stuck: Option<(u32, u32)>,
    pub(crate) takes: Option<Ns>,
    pub(crate) broken: bool,
    pub(crate) unrecorded: bool,
    pub(crate) overwritten: bool,
}

impl Planned {
    fn of(call: &Call) -> Self {
        Planned {
            call: call.clone(),
            exchange: false,
            stuck: None,
            takes: None,
            broken: false,
            unrecorded: false,
            overwritten: false,
        }
    }
}

impl Case {
    fn unroll(&self, step: &Step, rank: u32, into: &mut Vec<Action>) {
        if step.ranks.as_ref().is_some_and(|r| !r.contains(&rank)) {
            return;
        }
        for _ in 0..step.repeat.unwrap_or(0) {
            step.steps.iter().for_each(|s| self.unroll(s, rank, into));
        }
        let planned = |calls: &[Call]| calls.iter().map(Planned::of).collect::<Vec<_>>();
        into.extend(step.compute.map(|t| Action::Compute(t, step.stream)));
        into.extend(step.host.map(Action::Host));
        into.extend(step.idle.map(Action::Idle));
        into.extend(step.call.as_ref().map(|c| Action::Calls(vec![Planned::of(c)], step.stream)));
        into.extend(step.group.as_ref().map(|c| Action::Calls(planned(c), step.stream)));
        if let Some(call) = &step.exchange {
            let n = self.comms[&call.comm].groups(self.ranks).first().map_or(0, Vec::len) as i64;
            let one = |func, by| Call { func, by, ..call.clone() };
            // A copy to itself has one record, as both of its ends have the same place. CUDA events time launches with such a copy.
            let own = self.launches_by_events.then(|| one(Func::Send, 0));
            let others = (1..n).flat_map(|k| [one(Func::Send, k), one(Func::Recv, -k)]);
            let calls: Vec<Call> = own.into_iter().chain(others).collect();
            let exchange = planned(&calls).into_iter().map(|p| Planned { exchange: true, ..p }).collect();
            into.push(Action::Calls(exchange, step.stream));
        }
        into.extend(step.replay.as_ref().map(|c| Action::Replay(planned(c), step.stream)));
        into.extend(step.wait.map(|on| Action::Wait { stream: step.stream, on }));
        into.extend(step.make.clone().map(Action::Make));
        into.extend(step.free.clone().map(Action::Free));
        into.extend(step.exit.map(Action::Die));
        into.extend(step.sync.map(|_| Action::Sync));
    }

    /// A rank's calls as its program has them, without faults.
    pub(crate) fn calls(&self, rank: u32) -> Vec<Call> {
        let mut actions = Vec::new();
        self.program.iter().for_each(|s| self.unroll(s, rank, &mut actions));
        let calls = |a| match a {
            Action::Calls(planned, _) | Action::Replay(planned, _) => planned,
            _ => Vec::new(),
        };
        actions.into_iter().flat_map(calls).map(|p| p.call).collect()
    }

    /// A rank's program, with the faults that are its own. Each action has a number that faults elsewhere in the program
    /// do not change.
    pub(crate) fn actions(&self, rank: u32) -> Vec<(u32, Action)> {
        let mut healthy = Vec::new();
        for step in &self.program {
            self.unroll(step, rank, &mut healthy);
        }
        let mut actions = Vec::new();
        let mut calls: BTreeMap<String, usize> = BTreeMap::new();
        let mut swapped: Option<(u32, Action)> = None;
        let mut slower = 1.0;
        for (number, mut action) in (0..).step_by(16).zip(healthy) {
            let mut before = Vec::new();
            let mut keep = true;
            let mut swap = false;
            if let Action::Calls(planned, stream) | Action::Replay(planned, stream) = &mut action {
                let stream = *stream;
                for p in planned.iter_mut() {
                    let n = calls.entry(p.call.comm.clone()).or_default();
                    let at = *n;
                    *n += 1;
                    let comm = p.call.comm.clone();
                    for f in self.faults.iter().filter(|f| f.hits(rank, &comm, at)) {
                        keep &= !f.skip;
                        swap |= f.swap;
                        slower *= f.slower.unwrap_or(1.0);
                        f.apply(p, stream, &mut before);
                    }
                }
            }
            if let Action::Compute(took, _) = &mut action {
                *took = Ns((took.0 as f64 * slower) as u64);
            }
            actions.extend((number + 1..).zip(before));
            let is_call = matches!(action, Action::Calls(..) | Action::Replay(..));
            if swap {
                swapped = Some((number, action));
                continue;
            }
            if keep {
                actions.push((number, action));
            }
            if is_call {
                actions.extend(swapped.take());
            }
        }
        actions
    }
}

impl Fault {
    /// Changes a call, and lists what the rank does before it.
    fn apply(&self, p: &mut Planned, stream: u8, before: &mut Vec<Action>) {
        p.stuck = p.stuck.or(self.stuck);
        p.takes = p.takes.or(self.takes);
        p.broken |= self.broken;
        p.unrecorded |= self.unrecorded;
        p.overwritten |= self.overwritten;
        before.extend(self.delay.map(Action::Host));
        before.extend(self.occupy.map(|t| Action::Compute(t, stream)));
        before.extend(self.extra.as_ref().map(|c| Action::Calls(vec![Planned::of(c)], stream)));
        before.extend(self.hang.then_some(Action::Hang));
        before.extend(self.stop.then_some(Action::Stop));
        before.extend(self.pause.map(Action::Pause));
        before.extend(self.die.map(Action::Die));
        before.extend(self.abort.then(|| Action::Abort(self.comm.clone())));
        if let Some(change) = &self.change {
            p.call = change.clone();
        }
    }

    fn hits(&self, rank: u32, comm: &str, at: usize) -> bool {
        let often = match self.every {
            Some(n) => at >= self.call && (at - self.call).is_multiple_of(n),
            None => at == self.call,
        };
        often && self.comm == comm && self.ranks.contains(&rank)
    }
}
