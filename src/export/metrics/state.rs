//! The current state: operations in flight, processes, findings, and what was lost on the way.

use super::family::{Families, Value};
use super::finding_ranks::FindingRanks;
use super::scope::{ScopeId, Scopes, uid_text};
use super::store::Store;
use crate::export::catalogue as c;
use crate::join::Join;
use crate::model::{
    Change, CloseReason, Finding, FindingEvent, FindingId, Kind, Liveness, SegmentId, Severity, missed_reason,
};
use std::collections::{BTreeMap, HashMap, HashSet};

/// Findings that are remembered as counted.
const COUNTED: usize = 65_536;

#[derive(Debug, Default)]
struct Now {
    in_flight: u64,
    oldest_ns: Option<u64>,
    ranks: Option<u64>,
    seen: u64,
}

/// Operations in flight and the ranks of communicators.
pub(super) fn in_flight(out: &mut Families, scopes: &mut Scopes, join: &Join, now_ns: u64, budget: usize) {
    let mut now: Store<ScopeId, Now> = Store::new(budget);
    for comm in join.communicators().filter(|c| !c.closed() && !join.has_ended(c)) {
        let of = now.at(scopes.of(join, comm.id, None));
        of.seen += comm.members().len() as u64;
        if let Some(ranks) = comm.ranks() {
            *of.ranks.get_or_insert(0) += u64::from(ranks);
        }
        for (_, _, instance) in comm.in_flight() {
            of.in_flight += 1;
            if let Some(began) = instance.began_ns() {
                let age = now_ns.saturating_sub(began);
                of.oldest_ns = Some(of.oldest_ns.map_or(age, |o| o.max(age)));
            }
        }
    }
    for (scope, of) in now.iter() {
        let s = scopes.get(*scope);
        let labels = [&*s.node, &*s.job, &*s.uid, &*s.communicator];
        out.number(c::IN_FLIGHT, &labels, of.in_flight as f64);
        out.known(c::OLDEST, &labels, of.oldest_ns.map(|n| n as f64 / 1e9));
        let labels = |state| [&*s.node, &*s.job, &*s.uid, &*s.communicator, state];
        out.known(c::COMM_RANKS, &labels("all"), of.ranks.map(|n| n as f64));
        out.number(c::COMM_RANKS, &labels("seen"), of.seen as f64);
    }
    if let Some(of) = now.overflow() {
        out.overflow(c::IN_FLIGHT, Value::Number(of.in_flight as f64));
        if let Some(oldest) = of.oldest_ns {
            out.overflow(c::OLDEST, Value::Number(oldest as f64 / 1e9));
        }
    }
}

/// A job on a node: the node, its name and its user.
type JobOnNode<'a> = (&'a str, &'a str, Option<u32>);

/// Processes by job, of jobs that have one here: the segments of a job that has ended are no part of it.
pub(super) fn processes(out: &mut Families, join: &Join) {
    let mut jobs: BTreeMap<JobOnNode<'_>, [u64; 2]> = BTreeMap::new();
    let mut nccl: BTreeMap<JobOnNode<'_>, [Option<f64>; 2]> = BTreeMap::new();
    for p in join.processes() {
        let name = p.record.job.name.as_deref().unwrap_or("");
        let alive = p.record.liveness == Liveness::Alive;
        let job = (p.record.host.as_str(), name, p.record.owner);
        jobs.entry(job).or_default()[usize::from(!alive)] += 1;
        if let Some(fact) = p.host.as_ref().filter(|_| alive) {
            let worst = nccl.entry(job).or_default();
            for (worst, own) in worst.iter_mut().zip([fact.nccl_busy, fact.nccl_starved]) {
                *worst = own.map_or(*worst, |own| Some(worst.map_or(own, |w| w.max(own))));
            }
        }
    }
    for ((node, job, owner), shares) in nccl {
        for (metric, share) in [c::NCCL_BUSY, c::NCCL_STARVED].into_iter().zip(shares) {
            if let Some(share) = share {
                out.number(metric, &[node, job, &uid_text(owner)], share);
            }
        }
    }
    for ((node, job, owner), [alive, gone]) in jobs.into_iter().filter(|(_, [alive, _])| *alive > 0) {
        let uid = uid_text(owner);
        out.number(c::PROCESSES, &[node, job, &uid, "alive"], alive as f64);
        out.number(c::PROCESSES, &[node, job, &uid, "gone"], gone as f64);
    }
}

type FindingKey = (ScopeId, Kind, Severity);

/// Findings of a key: how many were opened, and how many open ones changed to what it says.
#[derive(Debug, Clone, Copy, Default)]
struct Count {
    opened: u64,
    updated: u64,
}

/// Findings, counted when they are opened, change and are closed.
#[derive(Debug)]
pub(super) struct Findings {
    opened: Store<FindingKey, Count>,
    closed: Store<(FindingKey, CloseReason), u64>,
    /// As what those that are open were counted: a job that has ended is not known any more when they are closed.
    keys: BTreeMap<FindingId, FindingKey>,
}

impl Findings {
    pub(super) fn new(budget: usize) -> Self {
        Findings { opened: Store::new(budget), closed: Store::new(budget), keys: BTreeMap::new() }
    }

    pub(super) fn add(&mut self, scopes: &mut Scopes, join: &Join, event: &FindingEvent) {
        let f = &event.finding;
        match event.change {
            Change::Opened => {
                let key = key(scopes, join, f);
                self.opened.at(key).opened += 1;
                self.keys.insert(f.id, key);
                if self.keys.len() > COUNTED {
                    self.keys.pop_first();
                }
            }
            // What it is now has a series, which stays and becomes 0 when it is closed.
            Change::Updated => {
                let scope = self.keys.get(&f.id).map_or_else(|| key(scopes, join, f).0, |k| k.0);
                self.opened.at((scope, f.kind, f.severity)).updated += 1;
            }
            Change::Closed => {
                let key = self.keys.remove(&f.id).unwrap_or_else(|| key(scopes, join, f));
                *self.closed.at((key, f.close_reason.unwrap_or(CloseReason::Resolved))) += 1;
            }
        }
    }

    pub(super) fn expire(&mut self, now_ns: u64, idle_ns: u64) {
        self.opened.expire(now_ns, idle_ns);
        self.closed.expire(now_ns, idle_ns);
    }

    pub(super) fn folded(&self) -> u64 {
        self.opened.folded() + self.closed.folded()
    }

    pub(super) fn len(&self) -> usize {
        self.opened.len() + self.closed.len()
    }

    pub(super) fn scopes(&self) -> impl Iterator<Item = ScopeId> {
        let open = self.keys.values().map(|k| k.0);
        self.opened.iter().map(|(k, _)| k.0).chain(self.closed.iter().map(|(k, _)| k.0.0)).chain(open)
    }

    pub(super) fn gather(&mut self, out: &mut Families, scopes: &mut Scopes, join: &Join, open: &[Finding]) {
        let mut now: HashMap<FindingKey, u64> = HashMap::new();
        let mut named = FindingRanks::default();
        for f in open.iter().filter(|f| f.open) {
            // By what it is now: a rank that is away is a warning first, and critical when it stays away.
            let scope = self.keys.get(&f.id).map_or_else(|| key(scopes, join, f).0, |k| k.0);
            let key = (scope, f.kind, f.severity);
            self.opened.touch(&key);
            *now.entry(key).or_default() += 1;
            let s = scopes.get(scope);
            named.add(join, &s.node, (&s.job, s.uid.parse().ok()), f);
        }
        named.gather(out, c::FINDING_RANKS);
        let mut folded = 0;
        let counted: HashMap<FindingKey, Count> = self.opened.iter().map(|(k, n)| (*k, *n)).collect();
        // One that was found before this agent was started is open, and none that it has opened.
        for (k, n) in now.iter().filter(|(k, _)| !counted.contains_key(k)) {
            if counted.len() < self.opened.budget() {
                let s = scopes.get(k.0);
                out.number(c::FINDINGS, &[&*s.node, &*s.job, &*s.uid, k.1.as_str(), k.2.as_str()], *n as f64);
            } else {
                folded += n;
            }
        }
        for (k, n) in &counted {
            let s = scopes.get(k.0);
            let labels = [&*s.node, &*s.job, &*s.uid, k.1.as_str(), k.2.as_str()];
            out.number(c::FINDINGS_TOTAL, &labels, n.opened as f64);
            out.number(c::FINDINGS_UPDATED, &labels, n.updated as f64);
            out.number(c::FINDINGS, &labels, now.get(k).copied().unwrap_or(0) as f64);
        }
        // A counter that begins with its first event hides that from every rate.
        let zero = |k: &FindingKey| CloseReason::ALL.iter().map(|r| ((*k, *r), 0)).collect::<Vec<_>>();
        let mut closed: HashMap<(FindingKey, CloseReason), u64> = counted.keys().flat_map(zero).collect();
        closed.extend(self.closed.iter().map(|(key, n)| (*key, *n)));
        for ((k, reason), n) in closed {
            let s = scopes.get(k.0);
            let labels = [&*s.node, &*s.job, &*s.uid, k.1.as_str(), k.2.as_str(), reason.as_str()];
            out.number(c::FINDINGS_CLOSED, &labels, n as f64);
        }
        if let Some(n) = self.opened.overflow() {
            out.overflow(c::FINDINGS_TOTAL, Value::Number(n.opened as f64));
            out.overflow(c::FINDINGS_UPDATED, Value::Number(n.updated as f64));
            out.overflow(c::FINDINGS, Value::Number(folded as f64));
        }
        if let Some(n) = self.closed.overflow() {
            out.overflow(c::FINDINGS_CLOSED, Value::Number(*n as f64));
        }
    }
}

/// A finding belongs to a job on a node, or to a node alone.
fn key(scopes: &mut Scopes, join: &Join, f: &Finding) -> FindingKey {
    let host = f.place.as_ref().map(|p| p.host.as_str()).or(f.subject.as_deref());
    let on_host =
        |segment: &SegmentId| host.is_none_or(|h| join.process(*segment).is_some_and(|p| p.record.host == h));
    let member = join.communicator(f.communicator).and_then(|c| {
        let culprits = f.ranks.iter().filter_map(|r| c.members().get(r));
        culprits.chain(c.members().values()).map(|m| m.record.segment).find(on_host)
    });
    let scope = match member {
        Some(segment) => scopes.of_process(join, segment),
        None => scopes.of_node(host.unwrap_or("")),
    };
    (scope, f.kind, f.severity)
}

/// The losses. Processes come and go; what they lost is added up.
#[derive(Debug)]
pub(super) struct Losses {
    counts: Store<(ScopeId, &'static str), u64>,
    told: HashMap<(SegmentId, &'static str), u64>,
    /// The scopes and reasons that have a series, or would have.
    known: HashSet<(ScopeId, &'static str)>,
}

impl Losses {
    pub(super) fn new(budget: usize) -> Self {
        Losses { counts: Store::new(budget), told: HashMap::new(), known: HashSet::new() }
    }

    /// Takes what was lost since the last call.
    pub(super) fn take(&mut self, scopes: &mut Scopes, join: &Join) {
        for p in join.processes() {
            let missed = p.missed.iter().map(|(what, n)| (missed_reason(what), *n));
            for (reason, n) in p.record.losses.iter().copied().chain(missed) {
                let told = self.told.entry((p.record.id, reason)).or_default();
                let more = n.saturating_sub(*told);
                *told = n.max(*told);
                let key = (scopes.of_process(join, p.record.id), reason);
                // A counter that begins at what was lost first would hide that from every rate.
                if more > 0 || self.known.insert(key) {
                    *self.counts.at(key) += more;
                } else {
                    self.counts.touch(&key);
                }
            }
        }
        self.told.retain(|(segment, _), _| join.process(*segment).is_some());
        if self.known.len() > COUNTED {
            self.known.clear();
        }
    }

    pub(super) fn expire(&mut self, now_ns: u64, idle_ns: u64) {
        self.counts.expire(now_ns, idle_ns);
    }

    pub(super) fn folded(&self) -> u64 {
        self.counts.folded()
    }

    pub(super) fn len(&self) -> usize {
        self.counts.len()
    }

    pub(super) fn scopes(&self) -> impl Iterator<Item = ScopeId> {
        self.counts.iter().map(|(k, _)| k.0)
    }

    pub(super) fn gather(&self, out: &mut Families, scopes: &Scopes) {
        for ((scope, reason), n) in self.counts.iter() {
            let s = scopes.get(*scope);
            out.number(c::LOST, &[&s.node, &s.job, &s.uid, reason], *n as f64);
        }
        if let Some(n) = self.counts.overflow() {
            out.overflow(c::LOST, Value::Number(*n as f64));
        }
    }
}
