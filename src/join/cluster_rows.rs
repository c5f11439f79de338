//! The join as rows for a screen of a whole cluster: as many as a screen bears, whatever there is.

use super::snapshot::{View, by_share, comm_row, loss_rows, lost, segment_row};
use super::{Class, ClassKey, Communicator, Instance, Join, Process, Track};
use crate::model::{
    At, ClassRow, CommId, CommRow, Finding, FlightRow, JobRow, JobSums, Liveness, OpState, Rank, RankRow,
    Rest, SegmentId, SegmentRow, Snapshot, size_text,
};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Rows of each kind at most.
const JOBS: usize = 64;
const COMMS: usize = 64;
const IN_FLIGHT: usize = 64;
const CLASSES: usize = 64;
const RANKS: usize = 1024;
const SEGMENTS: usize = 256;
const LOSSES: usize = 64;
/// Ranks that are named at most where one waits for many.
const WAITS_FOR: usize = 8;
/// An operation in flight for longer, in ns, stands still.
const STILL_NS: u64 = 1_000_000_000;

/// The limits of what is shown, and facts that the join itself does not know.
#[derive(Debug, Clone, Copy)]
pub struct RowLimits<'a> {
    /// Where one looks.
    pub at: &'a At,
    /// Only rows that hold all these words, in small letters.
    pub words: &'a [String],
    /// The findings now.
    pub findings: &'a [Finding],
    /// Collectives a second, by communicator.
    pub rates: &'a BTreeMap<CommId, f64>,
    /// True where every operation is told, so that classes can be counted.
    pub whole: bool,
}

impl RowLimits<'_> {
    /// True where every operation of a class is counted.
    fn counts(&self, class: &Class) -> bool {
        self.whole || class.is_sketched()
    }

    fn keeps(&self, text: &str) -> bool {
        self.words.is_empty() || {
            let text = text.to_lowercase();
            self.words.iter().all(|w| text.contains(w.as_str()))
        }
    }

    fn job(&self, p: &Process) -> bool {
        self.at.job.as_deref().is_none_or(|j| p.record.job.name.as_deref().unwrap_or_default() == j)
    }

    fn node(&self, p: &Process) -> bool {
        self.at.node.as_ref().is_none_or(|n| p.record.host == *n)
    }
}

/// The rows of a cluster.
#[derive(Debug, Clone, Default)]
pub struct ClusterRows {
    /// The rows.
    pub snapshot: Snapshot,
    /// The rows that there was no room for.
    pub rest: Rest,
    /// Processes that run, by host, of the job and the communicator that are looked at.
    pub hosts: BTreeMap<String, usize>,
    /// Records that were lost, of all processes.
    pub lost: u64,
    /// Processes that run, of all.
    pub processes: usize,
}

/// The order in which communicators are shown: findings first, then what stands still for the longest, then the
/// busiest.
type Weight = (bool, Reverse<bool>, Reverse<u64>, Reverse<u64>, CommId);

/// Operations in flight: since when, and which one.
type Flying<'a> = (u64, &'a Communicator, Track, u64, &'a Instance);

impl View<'_> {
    /// The rows of a part, the most important ones of each kind.
    pub fn narrowed(&self, n: &RowLimits<'_>) -> ClusterRows {
        let join = self.join;
        let mut out = ClusterRows::default();
        for p in join.processes() {
            out.lost = out.lost.saturating_add(lost(p));
            out.processes += usize::from(!p.record.liveness.is_gone());
        }
        let of = |c: &Communicator| name_of(c).unwrap_or_default().to_owned();
        let within = self.within(n);
        let found: BTreeSet<CommId> = n.findings.iter().map(|f| f.communicator).collect();
        let mut flying: Vec<Flying<'_>> = Vec::new();
        let mut weighed: Vec<(Weight, &Communicator)> = Vec::new();
        for c in within.iter().copied() {
            let mut still = 0;
            let ended = join.has_ended(c);
            for (track, order, i) in c.in_flight().take(if ended { 0 } else { IN_FLIGHT }) {
                let age = i.began_ns().map_or(0, |t| self.now_ns.saturating_sub(t));
                still = still.max(age);
                flying.push((age, c, track, order, i));
            }
            let still = if still >= STILL_NS { still } else { 0 };
            let rate = n.rates.get(&c.id).copied().unwrap_or(0.0).max(0.0) as u64;
            let closed = c.closed() || ended;
            weighed.push(((closed, Reverse(found.contains(&c.id)), Reverse(still), Reverse(rate), c.id), c));
        }
        weighed.sort_by_key(|w| w.0);
        let text = |c: &Communicator| {
            let state = if c.closed() || join.has_ended(c) { "closed" } else { "open" };
            format!("{state} {} {}", c.id, of(c))
        };
        let kept: Vec<&Communicator> =
            weighed.iter().map(|w| w.1).filter(|c| n.words.is_empty() || n.keeps(&text(c))).collect();
        out.rest.comms = kept.len().saturating_sub(COMMS);
        let comms: Vec<CommRow> =
            kept.iter().take(COMMS).map(|c| comm_row(join, c, n.rates.get(&c.id).copied())).collect();
        let (in_flight, more) = self.flying(n, flying);
        out.rest.in_flight = more;
        let chosen = kept.first().copied().or_else(|| weighed.first().map(|w| w.1));
        let (ranks, more) = chosen.map_or_else(Default::default, |c| self.ranks_of(n, c));
        out.rest.ranks = more;
        let (classes, more) = self.classes_of(n, &within);
        out.rest.classes = more;
        let (jobs, more) = self.jobs_of(n);
        out.rest.jobs = more;
        let (segments, more) = self.segments_of(n);
        out.rest.segments = more;
        out.hosts = self.hosts_of(n);
        let mut losses: Vec<_> = join
            .processes()
            .filter(|p| n.job(p) && n.node(p))
            .flat_map(loss_rows)
            .filter(|l| l.count > 0)
            .collect();
        losses.sort_by_key(|l| Reverse(l.count));
        losses.truncate(LOSSES);
        let at_ns = self.now_ns;
        out.snapshot = Snapshot {
            at_ns,
            jobs,
            comms,
            in_flight,
            classes,
            ranks,
            segments,
            losses,
            ..Snapshot::default()
        };
        out
    }

    /// The communicators of what is looked at.
    fn within(&self, n: &RowLimits<'_>) -> Vec<&Communicator> {
        let join = self.join;
        if let Some(id) = n.at.communicator {
            return join.communicator(id).into_iter().collect();
        }
        if n.at.node.is_some() {
            let mut ids: Vec<CommId> = join
                .processes()
                .filter(|p| n.job(p) && n.node(p))
                .flat_map(|p| join.memberships(p.record.id).iter().map(|(c, _)| *c))
                .collect();
            ids.sort_unstable();
            ids.dedup();
            return ids.into_iter().filter_map(|c| join.communicator(c)).collect();
        }
        // A communicator is its first rank's job's.
        let first = |c: &Communicator| {
            c.members().values().next().and_then(|m| join.process(m.record.segment)).is_some_and(|p| n.job(p))
        };
        join.communicators().filter(|c| n.at.job.is_none() || first(c)).collect()
    }

    fn flying(&self, n: &RowLimits<'_>, mut all: Vec<Flying<'_>>) -> (Vec<FlightRow>, usize) {
        all.sort_by_key(|f| Reverse(f.0));
        let fits = |f: &FlightRow, c: &Communicator| {
            n.words.is_empty() || {
                let states: BTreeSet<&str> = f.ranks.iter().map(|r| r.state.as_str()).collect();
                let how = (f.algo.map_or("", |a| a.as_str()), f.proto.map_or("", |p| p.as_str()));
                let states = states.into_iter().collect::<Vec<_>>().join(" ");
                n.keeps(&format!(
                    "{} {}/{} {states} {} {}",
                    f.func,
                    how.0,
                    how.1,
                    c.id,
                    name_of(c).unwrap_or_default()
                ))
            }
        };
        let looked = all.len().min(4 * IN_FLIGHT);
        let mut rows: Vec<FlightRow> = Vec::new();
        for (_, c, track, order, i) in all.iter().take(looked) {
            if rows.len() == IN_FLIGHT {
                break;
            }
            rows.extend(self.flight_row(c, *track, *order, i).filter(|f| fits(f, c)));
        }
        let more = all.len().saturating_sub(if n.words.is_empty() { rows.len() } else { looked });
        (rows, more)
    }

    /// The ranks of the communicator shown: those that are least far, and those of the node looked at, before the others.
    fn ranks_of(&self, n: &RowLimits<'_>, c: &Communicator) -> (Vec<RankRow>, usize) {
        let mut rows = self.rank_rows(c, WAITS_FOR);
        let name = name_of(c).unwrap_or_default();
        rows.retain(|r| {
            let alive = if r.alive { "alive" } else { "gone" };
            let state = r.state.map_or("idle", OpState::as_str);
            let (gpu, id) = (r.gpu.as_deref().unwrap_or_default(), c.id);
            n.words.is_empty()
                || n.keeps(&format!(
                    "{} {gpu} {alive} {state} rank {} pid {} {id} {name}",
                    r.host, r.rank, r.pid
                ))
        });
        let more = rows.len().saturating_sub(RANKS);
        if more > 0 {
            rows.sort_by_key(|r| {
                let far = match r.state {
                    Some(OpState::NotIssued) => 0,
                    Some(OpState::Called) => 1,
                    _ if !r.alive => 2,
                    Some(OpState::InDoubt) => 3,
                    Some(_) => 4,
                    None => 5,
                };
                (n.at.node.as_ref().is_none_or(|node| r.host != *node), far, r.rank)
            });
            rows.truncate(RANKS);
            rows.sort_by_key(|r| r.rank);
        }
        (rows, more)
    }

    fn classes_of(&self, n: &RowLimits<'_>, within: &[&Communicator]) -> (Vec<ClassRow>, usize) {
        let ids: BTreeSet<CommId> = within.iter().map(|c| c.id).collect();
        let fits = |k: &ClassKey| {
            let name = self.join.communicator(k.comm).and_then(name_of).unwrap_or_default();
            let how = (k.algo.map_or("", |a| a.as_str()), k.proto.map_or("", |p| p.as_str()));
            let size = k.size_class.filter(|s| *s < 64).map(|s| size_text(1 << s)).unwrap_or_default();
            n.keeps(&format!("{} {}/{} {size} {} {name}", k.func, how.0, how.1, k.comm))
        };
        let mut all: Vec<(f64, u64, &ClassKey, &Class)> = self
            .join
            .classes()
            .filter(|(k, _)| ids.contains(&k.comm) && (n.words.is_empty() || fits(k)))
            .map(|(k, c)| {
                let share = c.rates(self.now_ns).and_then(|r| r.share).filter(|_| n.counts(c));
                (share.unwrap_or(-1.0), c.count(), k, c)
            })
            .collect();
        let more = all.len().saturating_sub(CLASSES);
        all.sort_by(|a, b| b.0.total_cmp(&a.0).then(b.1.cmp(&a.1)));
        all.truncate(CLASSES);
        let mut rows: Vec<ClassRow> = all
            .into_iter()
            .map(|(.., k, c)| {
                let row = self.class_row(k, c);
                if n.counts(c) {
                    return row;
                }
                // A sample says how long operations take, not how many there are.
                ClassRow { ops_per_s: None, bytes_per_s: None, share: None, sampled: true, ..row }
            })
            .collect();
        by_share(&mut rows);
        (rows, more)
    }

    fn jobs_of(&self, n: &RowLimits<'_>) -> (Vec<JobRow>, usize) {
        let join = self.join;
        let mut jobs: BTreeMap<Option<&str>, (JobRow, BTreeSet<&str>)> = BTreeMap::new();
        for p in join.processes().filter(|p| n.job(p) && n.node(p)) {
            let empty = || {
                let name = p.record.job.name.clone();
                let row = JobRow {
                    unknown: 0,
                    name,
                    alive: 0,
                    gone: 0,
                    size: None,
                    comms: 0,
                    nccl: None,
                    ops_per_s: None,
                    comm_share: None,
                    sums: JobSums::default(),
                };
                (row, BTreeSet::new())
            };
            let (row, versions) = jobs.entry(p.record.job.name.as_deref()).or_insert_with(empty);
            match p.record.liveness {
                Liveness::Alive => row.alive += 1,
                _ => row.gone += 1,
            }
            row.size = row.size.or(p.record.job.size);
            versions.extend(p.record.nccl.as_deref());
        }
        for c in join.communicators() {
            let first = c.members().values().next().and_then(|m| join.process(m.record.segment));
            let Some((row, _)) = first.and_then(|p| jobs.get_mut(&p.record.job.name.as_deref())) else {
                continue;
            };
            row.comms += 1;
            if let Some(rate) = n.rates.get(&c.id) {
                *row.ops_per_s.get_or_insert(0.0) += rate;
            }
        }
        let mut rows: Vec<JobRow> = jobs
            .into_values()
            .map(|(row, versions)| {
                let nccl = versions.into_iter().take(4).collect::<Vec<_>>().join(", ");
                JobRow { nccl: (!nccl.is_empty()).then_some(nccl), ..row }
            })
            .filter(|j| {
                let name = j.name.as_deref().unwrap_or_default();
                n.keeps(&format!("{name} {}", j.nccl.as_deref().unwrap_or_default()))
            })
            .collect();
        // Jobs that are over are history; the largest first among the rest.
        rows.sort_by_key(|j| (j.alive == 0, Reverse(j.alive)));
        let more = rows.len().saturating_sub(JOBS);
        rows.truncate(JOBS);
        (rows, more)
    }

    /// The processes of the node looked at.
    fn segments_of(&self, n: &RowLimits<'_>) -> (Vec<SegmentRow>, usize) {
        if n.at.node.is_none() {
            return (Vec::new(), 0);
        }
        let own = self.join.processes().filter(|p| n.job(p) && n.node(p));
        let mut rows: Vec<SegmentRow> = own
            .map(segment_row)
            .filter(|s| {
                let alive = if s.alive { "alive" } else { "gone" };
                let nccl = s.nccl.as_deref().unwrap_or_default();
                n.keeps(&format!("{} {} {nccl} {alive} {}", s.host, s.program, s.pid))
            })
            .collect();
        rows.sort_by_key(|s| (!s.alive, s.job_rank, s.pid));
        let more = rows.len().saturating_sub(SEGMENTS);
        rows.truncate(SEGMENTS);
        (rows, more)
    }

    fn hosts_of(&self, n: &RowLimits<'_>) -> BTreeMap<String, usize> {
        let join = self.join;
        let mut hosts: BTreeMap<String, usize> = BTreeMap::new();
        let mut count = |p: &Process| {
            let alive = usize::from(!p.record.liveness.is_gone());
            match hosts.get_mut(&p.record.host) {
                Some(known) => *known += alive,
                None => drop(hosts.insert(p.record.host.clone(), alive)),
            }
        };
        match n.at.communicator.and_then(|c| join.communicator(c)) {
            Some(c) => {
                let segments: BTreeSet<SegmentId> = c.members().values().map(|m| m.record.segment).collect();
                segments.into_iter().filter_map(|s| join.process(s)).for_each(count);
            }
            None => join.processes().filter(|p| n.job(p)).for_each(&mut count),
        }
        hosts
    }
}

/// The user's name for a communicator.
fn name_of(c: &Communicator) -> Option<&str> {
    // Ranks name it alike; who looks through thousands that say nothing finds nothing.
    c.members().values().take(8).find_map(|m| m.record.name.as_deref())
}

impl Join {
    /// The hosts of a communicator's ranks.
    pub fn hosts_of_ranks<'a>(&'a self, comm: CommId, ranks: &'a [Rank]) -> impl Iterator<Item = &'a str> {
        let members = self.communicator(comm).map(Communicator::members);
        ranks.iter().filter_map(move |r| {
            let segment = members?.get(r)?.record.segment;
            self.process(segment).map(|p| p.record.host.as_str())
        })
    }
}

/// How fast communicators are: collectives a second, from what their first ranks have issued.
#[derive(Debug, Clone, Default)]
pub struct Pace {
    at_ns: u64,
    issued: HashMap<CommId, u64>,
    rates: BTreeMap<CommId, f64>,
}

impl Pace {
    /// The pace is taken over so many ns at least.
    const OVER_NS: u64 = 2_000_000_000;

    /// Looks at what was issued by now.
    pub fn look(&mut self, join: &Join, now_ns: u64) {
        let over = now_ns.saturating_sub(self.at_ns);
        if over < Self::OVER_NS {
            return;
        }
        let known = self.at_ns > 0;
        let before = std::mem::take(&mut self.issued);
        self.rates.clear();
        for c in join.communicators() {
            let Some(first) = c.members().values().next() else { continue };
            let now = first.issued_in_all();
            if let Some(was) = before.get(&c.id).filter(|_| known) {
                self.rates.insert(c.id, now.saturating_sub(*was) as f64 * 1e9 / over as f64);
            }
            self.issued.insert(c.id, now);
        }
        self.at_ns = now_ns;
    }

    /// Collectives a second, by communicator.
    pub fn rates(&self) -> &BTreeMap<CommId, f64> {
        &self.rates
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::join::testing::{all_reduce, member, process};
    use crate::model::{Sketch, Update};

    const S: u64 = 1_000_000_000;

    fn narrow<'a>(at: &'a At, words: &'a [String], rates: &'a BTreeMap<CommId, f64>) -> RowLimits<'a> {
        RowLimits { at, words, findings: &[], rates, whole: true }
    }

    /// Two hosts of two ranks, a communicator of all and one a host; rank 3 lacks the last operation of the first.
    fn cluster() -> Join {
        let mut join = Join::new();
        for r in 0..4 {
            let Update::Segment(mut s) = process(r) else { unreachable!() };
            s.host = format!("node-{}", r / 2);
            join.feed(Update::Segment(s));
            join.feed(member(r, 4, if r == 3 { 1 } else { 2 }));
            let Update::Comm(mut c) = member(r, 2, 1) else { unreachable!() };
            (c.comm, c.rank) = (CommId::unowned(8 + u64::from(r / 2)), Rank(r % 2));
            join.feed(Update::Comm(c));
            for order in 0..if r == 3 { 1 } else { 2 } {
                let at = S * (order + 1);
                let op = all_reduce(r, order, at, Some((at + 5_000, (order == 0).then_some(at + 50_000))));
                join.feed(Update::Op(Box::new(op)));
            }
        }
        join.tick(6 * S);
        join
    }

    #[test]
    fn what_is_looked_at_is_shown_and_what_stands_still_comes_first() {
        let join = cluster();
        let view = View::new(&join, 6 * S);
        let rates = BTreeMap::from([(CommId::unowned(9), 100.0)]);
        let all = view.narrowed(&narrow(&At::default(), &[], &rates));
        let ids = |n: &ClusterRows| n.snapshot.comms.iter().map(|c| c.id.nccl_hash()).collect::<Vec<_>>();
        assert_eq!(ids(&all), [7, 9, 8], "what stands still, then the busiest");
        assert_eq!((all.snapshot.ranks.len(), all.snapshot.in_flight.len()), (4, 1));
        assert_eq!(all.snapshot.ranks[0].waits_for, [Rank(3)]);
        assert_eq!((all.snapshot.segments.len(), all.processes, all.hosts.len()), (0, 4, 2));
        let at = At { node: Some("node-1".into()), ..At::default() };
        let one = view.narrowed(&narrow(&at, &[], &rates));
        assert_eq!((ids(&one), one.snapshot.segments.len(), one.hosts.len()), (vec![7, 9], 2, 2));
        let at = At { communicator: Some(CommId::unowned(8)), ..At::default() };
        let one = view.narrowed(&narrow(&at, &[], &rates));
        assert_eq!((ids(&one), one.snapshot.ranks.len(), one.hosts.len()), (vec![8], 2, 1));
        let at = At { job: Some("other".into()), ..At::default() };
        let none = view.narrowed(&narrow(&at, &[], &rates));
        assert_eq!((ids(&none), none.snapshot.ranks.len(), none.snapshot.jobs.len()), (vec![], 0, 0));
        let words = ["node-1".to_owned(), "not issued".to_owned()];
        let found = view.narrowed(&narrow(&At::default(), &words, &rates));
        let ranks: Vec<Rank> = found.snapshot.ranks.iter().map(|r| r.rank).collect();
        assert_eq!((ranks, found.snapshot.comms.len()), (vec![Rank(3)], 0));
    }

    #[test]
    fn a_sample_says_that_it_is_one_and_what_sketches_count_is_all() {
        let mut join = cluster();
        let (at, rates) = (At::default(), BTreeMap::new());
        let rows = |join: &Join, whole| {
            let n = RowLimits { whole, ..narrow(&at, &[], &rates) };
            let rows = View::new(join, 8 * S).narrowed(&n).snapshot.classes;
            rows.iter().map(|r| (r.count, r.sampled, r.ops_per_s)).collect::<Vec<_>>()
        };
        assert_eq!(rows(&join, true), [(1, false, None)]);
        assert_eq!(rows(&join, false), [(1, true, None)]);
        let (key, _) = join.classes().next().expect("a class");
        let sketch = Sketch {
            segment: SegmentId(1),
            comm: key.comm,
            rank: Rank(0),
            ranks: 2,
            func: key.func,
            size_class: key.size_class,
            algo: key.algo,
            proto: key.proto,
            count: 640,
            timed: 0,
            by_events: 0,
            bytes: None,
            busy_ns: 0,
            from_ns: S,
            seconds: 5,
            whole: false,
            times: Vec::new(),
        };
        join.feed(Update::Sketch(Box::new(sketch)));
        assert_eq!(rows(&join, false), [(640, false, Some(128.0))]);
    }

    #[test]
    fn the_pace_is_what_was_issued_over_time() {
        let mut join = cluster();
        let mut pace = Pace::default();
        pace.look(&join, 6 * S);
        assert_eq!(pace.rates().len(), 0, "one look tells nothing");
        join.feed(member(0, 4, 102));
        pace.look(&join, 7 * S);
        assert_eq!(pace.rates().len(), 0, "a second is too short");
        pace.look(&join, 10 * S);
        assert_eq!(pace.rates()[&CommId::unowned(7)], 25.0);
    }
}
