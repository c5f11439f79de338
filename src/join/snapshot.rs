//! The join as rows for a screen.

use super::{Class, ClassKey, Communicator, Instance, Join, Member, Process, Track};
use crate::model::{
    ClassRow, CommId, CommRow, FlightRow, JobRow, JobSums, Lane, Liveness, LossRow, OpState, Rank, RankCell,
    RankRow, SegmentRow, Snapshot, missed_reason,
};
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

/// Operations in flight that a screen gets at most.
const IN_FLIGHT: usize = 256;

/// Builds snapshots.
#[derive(Debug, Clone, Copy)]
pub struct View<'a> {
    pub(super) join: &'a Join,
    pub(super) now_ns: u64,
    owner: Option<u32>,
}

impl<'a> View<'a> {
    /// Of a join at a moment.
    pub fn new(join: &'a Join, now_ns: u64) -> Self {
        View { join, now_ns, owner: None }
    }

    /// Only what belongs to one user: processes, and the communicators that one of them is in.
    #[must_use]
    pub fn of_user(self, uid: u32) -> Self {
        View { owner: Some(uid), ..self }
    }

    /// The processes that are shown.
    fn processes(&self) -> impl Iterator<Item = &'a Process> {
        let owner = self.owner;
        self.join.processes().filter(move |p| owner.is_none() || p.record.owner == owner)
    }

    /// The communicators that are shown.
    pub fn communicators(&self) -> impl Iterator<Item = &'a Communicator> {
        let (join, owner) = (self.join, self.owner);
        let own = move |c: &&Communicator| {
            c.members()
                .values()
                .any(|m| join.process(m.record.segment).is_some_and(|p| p.record.owner == owner))
        };
        join.communicators().filter(move |c| owner.is_none() || own(c))
    }

    /// The classes of those communicators.
    fn classes_shown(&self) -> impl Iterator<Item = (&'a ClassKey, &'a Class)> {
        let shown: BTreeSet<CommId> = self.communicators().map(|c| c.id).collect();
        self.join.classes().filter(move |(k, _)| shown.contains(&k.comm))
    }

    /// Everything but the findings, the source and the wall clock.
    pub fn snapshot(&self) -> Snapshot {
        Snapshot {
            at_ns: self.now_ns,
            jobs: self.jobs(),
            comms: self.comms(),
            in_flight: self.in_flight(),
            classes: self.classes(),
            ranks: self.ranks(),
            segments: self.segments(),
            losses: self.losses(),
            ..Snapshot::default()
        }
    }

    fn jobs(&self) -> Vec<JobRow> {
        let mut jobs: BTreeMap<Option<String>, Vec<&Process>> = BTreeMap::new();
        for p in self.processes() {
            jobs.entry(p.record.job.name.clone()).or_default().push(p);
        }
        jobs.into_iter()
            .map(|(name, processes)| {
                let ids: BTreeSet<_> = processes.iter().map(|p| p.record.id).collect();
                let comms: Vec<_> = self
                    .communicators()
                    .filter(|c| c.members().values().any(|m| ids.contains(&m.record.segment)))
                    .map(|c| c.id)
                    .collect();
                let (mut ops, mut share) = (None, None);
                for (k, class) in self.join.classes().filter(|(k, _)| comms.contains(&k.comm)) {
                    let Some(rates) = class.rates(self.now_ns) else { continue };
                    *ops.get_or_insert(0.0) += rates.ops_per_s;
                    // A communicator of some of the job's ranks takes that part of the job's time.
                    let members = self.join.communicator(k.comm).map_or(0, |c| c.members().len());
                    if let Some(busy) = rates.share {
                        *share.get_or_insert(0.0) +=
                            busy * members as f64 / processes.len().max(members) as f64;
                    }
                }
                let versions: BTreeSet<String> =
                    processes.iter().filter_map(|p| p.record.nccl.clone()).collect();
                let count =
                    |is: fn(Liveness) -> bool| processes.iter().filter(|p| is(p.record.liveness)).count();
                JobRow {
                    name,
                    alive: count(|l| l == Liveness::Alive),
                    gone: count(Liveness::is_gone),
                    unknown: count(|l| l == Liveness::Unknown),
                    size: processes.iter().find_map(|p| p.record.job.size),
                    comms: comms.len(),
                    nccl: (!versions.is_empty()).then(|| versions.into_iter().collect::<Vec<_>>().join(", ")),
                    ops_per_s: ops,
                    comm_share: share,
                    sums: self.sums(&processes, comms),
                }
            })
            .collect()
    }

    /// The totals of a job since it was first seen.
    fn sums(&self, processes: &[&Process], comms: Vec<CommId>) -> JobSums {
        let hosts: BTreeSet<&str> =
            processes.iter().map(|p| p.record.host.as_str()).filter(|h| !h.is_empty()).collect();
        let classes: Vec<(&ClassKey, &Class)> =
            self.join.classes().filter(|(k, _)| comms.contains(&k.comm)).collect();
        let began = processes.iter().map(|p| p.record.created_ns).min();
        let ended = processes.iter().try_fold(0, |last: u64, p| match p.record.liveness {
            Liveness::Alive | Liveness::Unknown => Some(self.now_ns),
            Liveness::Gone(at) => at.map(|t| last.max(t)),
        });
        // Of black boxes nobody saw the end; it was not before the last operation.
        let ended = ended.or_else(|| classes.iter().map(|(_, c)| c.last_ns()).max().filter(|t| *t > 0));
        let seen_ns = began.zip(ended).and_then(|(from, to)| to.checked_sub(from)).filter(|ns| *ns > 0);
        let mut busy_ns = None;
        for (k, class) in &classes {
            // A communicator of some of the job's ranks takes that part of the job's time.
            let members = self.join.communicator(k.comm).map_or(0, |c| c.members().len());
            if let Some(ns) = class.busy_in_all_ns() {
                *busy_ns.get_or_insert(0.0) += ns * members as f64 / processes.len().max(members) as f64;
            }
        }
        let mut lost: BTreeMap<Cow<'static, str>, u64> = BTreeMap::new();
        for row in processes.iter().flat_map(|p| loss_rows(p)).filter(|l| l.count > 0) {
            let sum = lost.entry(row.reason).or_default();
            *sum = sum.saturating_add(row.count);
        }
        JobSums {
            comms,
            hosts: hosts.into_iter().map(str::to_owned).collect(),
            seen_ns,
            comm_share: busy_ns.zip(seen_ns).map(|(busy, seen)| (busy / seen as f64).min(1.0)),
            lost: lost.into_iter().collect(),
        }
    }

    fn comms(&self) -> Vec<CommRow> {
        self.communicators()
            .map(|c| {
                let rates: Vec<f64> = self
                    .join
                    .classes()
                    .filter(|(k, _)| k.comm == c.id)
                    .filter_map(|(_, class)| class.rates(self.now_ns).map(|r| r.ops_per_s))
                    .collect();
                comm_row(self.join, c, (!rates.is_empty()).then(|| rates.iter().sum()))
            })
            .collect()
    }

    fn in_flight(&self) -> Vec<FlightRow> {
        let mut rows: Vec<FlightRow> = self
            .communicators()
            .filter(|c| !self.join.has_ended(c))
            .flat_map(|c| c.in_flight().filter_map(move |(t, o, i)| self.flight_row(c, t, o, i)))
            .collect();
        rows.sort_by_key(|r| std::cmp::Reverse(r.age_ns));
        rows.truncate(IN_FLIGHT);
        rows
    }

    /// An operation in flight, with every rank's state.
    pub(super) fn flight_row(
        &self,
        c: &Communicator,
        track: Track,
        order: u64,
        instance: &Instance,
    ) -> Option<FlightRow> {
        let lane = match track {
            Track::Collective => Lane::Collective,
            Track::Replay => Lane::Replay,
            Track::Pair(..) => return None,
        };
        let first = instance.first()?;
        let ranks: Vec<RankCell> =
            c.members().keys().map(|r| RankCell { rank: *r, state: c.state(track, order, *r) }).collect();
        let operation = c.describe(track, order, &first.op);
        Some(FlightRow {
            comm: c.id,
            lane,
            order,
            func: first.op.func,
            bytes: operation.bytes,
            algo: first.op.algo,
            proto: first.op.proto,
            age_ns: self.now_ns.saturating_sub(instance.began_ns().unwrap_or(self.now_ns)),
            ranks,
        })
    }

    fn classes(&self) -> Vec<ClassRow> {
        let mut rows: Vec<ClassRow> =
            self.classes_shown().map(|(k, class)| self.class_row(k, class)).collect();
        by_share(&mut rows);
        rows
    }

    pub(super) fn class_row(&self, k: &ClassKey, class: &Class) -> ClassRow {
        let rates = class.rates(self.now_ns);
        let ranks = match k.func {
            crate::model::Func::SendRecv => Some(2),
            _ => self.join.communicator(k.comm).and_then(Communicator::ranks),
        };
        let p50 = class.quantile(0.5);
        let busbw = match (class.mean_bytes(), ranks, p50) {
            (Some(bytes), Some(n), Some(t)) => super::busbw(k.func, bytes, n, t),
            _ => None,
        };
        ClassRow {
            comm: k.comm,
            func: k.func,
            algo: k.algo,
            proto: k.proto,
            size_class: k.size_class,
            count: class.count(),
            timed: class.timed(),
            by_events: class.by_events(),
            sampled: false,
            bytes: class.bytes(),
            ops_per_s: rates.map(|r| r.ops_per_s),
            bytes_per_s: rates.and_then(|r| r.bytes_per_s),
            p50_ns: p50,
            p99_ns: class.quantile(0.99),
            busbw,
            share: rates.and_then(|r| r.share),
            spark: class.spark(self.now_ns),
        }
    }

    fn ranks(&self) -> Vec<RankRow> {
        self.communicators().flat_map(|c| self.rank_rows(c, usize::MAX)).collect()
    }

    /// The ranks of a communicator; of those that one waits for so many are named at most.
    pub(super) fn rank_rows(&self, c: &Communicator, most: usize) -> Vec<RankRow> {
        // Many wait in the same operation, for the same ranks.
        let mut lacking: BTreeMap<(Track, u64), Vec<Rank>> = BTreeMap::new();
        let open: Vec<(Track, u64)> =
            c.incomplete().filter(|(t, ..)| !matches!(t, Track::Pair(..))).map(|(t, o, _)| (t, o)).collect();
        let mut row = |rank: &Rank, m: &Member| {
            let process = self.join.process(m.record.segment).map(|p| &p.record);
            let alive = process.is_some_and(|p| p.liveness == Liveness::Alive);
            let goes_on = alive || !self.join.is_live();
            let oldest = open.iter().filter(|_| goes_on).find_map(|(t, o)| {
                let state = c.state(*t, *o, *rank);
                (!matches!(state, OpState::Finished | OpState::InDoubt)).then_some((*t, *o, state))
            });
            let waits_for: Vec<Rank> = oldest.map_or_else(Vec::new, |(t, o, _)| {
                let of = lacking.entry((t, o)).or_insert_with(|| {
                    let lacks =
                        |r: &&Rank| matches!(c.state(t, o, **r), OpState::NotIssued | OpState::Called);
                    c.members().keys().filter(lacks).copied().collect()
                });
                of.iter().filter(|r| *r != rank).take(most).copied().collect()
            });
            RankRow {
                comm: c.id,
                rank: *rank,
                pid: process.map_or(0, |p| p.pid),
                host: process.map_or_else(String::new, |p| p.host.clone()),
                job_rank: process.and_then(|p| p.job.rank),
                alive,
                gpu: m.record.gpu.as_deref().map(str::to_owned),
                issued: m.issued_in_all(),
                finished: m.finished,
                state: oldest.map(|(.., state)| state),
                waits_for,
                waiting_ns: m.waiting_ns,
                late: m.late,
                worst_late_ns: m.worst_late_ns,
                late_cost_ns: m.late_cost_ns,
            }
        };
        c.members().iter().map(|(rank, m)| row(rank, m)).collect()
    }

    fn segments(&self) -> Vec<SegmentRow> {
        self.processes().map(segment_row).collect()
    }

    fn losses(&self) -> Vec<LossRow> {
        self.processes().flat_map(loss_rows).collect()
    }
}

pub(super) fn comm_row(join: &Join, c: &Communicator, ops_per_s: Option<f64>) -> CommRow {
    let members = c.members();
    let ended = join.has_ended(c);
    CommRow {
        id: c.id,
        name: members.values().find_map(|m| m.record.name.clone()),
        ranks: c.ranks(),
        seen: members.len(),
        nodes: members.values().find_map(|m| m.record.nodes),
        issued: members.values().map(|m| m.issued_in_all()).max().unwrap_or(0),
        finished: c.finished(),
        in_flight: if ended { 0 } else { c.in_flight().count() },
        ops_per_s,
        coverage: c.coverage(),
        closed: c.closed() || ended,
    }
}

/// Puts the class with the greatest share of time first.
pub(super) fn by_share(rows: &mut [ClassRow]) {
    rows.sort_by(|a, b| {
        let key = |r: &ClassRow| r.share.unwrap_or(-1.0);
        key(b).total_cmp(&key(a)).then(b.count.cmp(&a.count))
    });
}

pub(super) fn segment_row(p: &Process) -> SegmentRow {
    let r = &p.record;
    SegmentRow {
        pid: r.pid,
        host: r.host.clone(),
        program: r.program.clone(),
        job_rank: r.job.rank,
        alive: r.liveness == Liveness::Alive,
        nccl: r.nccl.clone(),
        abi: r.abi,
        clock_error_ns: p.clocks.values().filter_map(super::ClockMap::error_ns).max(),
        lost: lost(p),
    }
}

/// Records of a process that were lost, all reasons.
pub(super) fn lost(p: &Process) -> u64 {
    let all = p.record.losses.iter().map(|l| &l.1).chain(p.missed.values());
    all.fold(0, |sum, n| sum.saturating_add(*n))
}

pub(super) fn loss_rows(p: &Process) -> Vec<LossRow> {
    let lost = p.record.losses.iter().map(|(reason, count)| (*reason, *count));
    let missed = p.missed.iter().map(|(what, count)| (missed_reason(what), *count));
    lost.chain(missed)
        .map(|(reason, count)| LossRow { pid: p.record.pid, reason: reason.into(), count })
        .collect()
}
