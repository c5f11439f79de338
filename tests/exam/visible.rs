//! How much of a slow fault the timed operations show. What no record shows, nobody can find.

use crate::simulator::Stay;
use crate::spec::FaultKind;
use crate::truth::Key;
use ringwatch::model::{Func, Rank, Track};
use std::collections::{BTreeMap, BTreeSet};

const MS: u64 = 1_000_000;
/// Timed operations of one kind, before slow data and in it, without which nobody can tell it from usual data. They are one
/// timed run of the plugin.
const A_RUN: usize = 32;
/// Timed operations that a rank has to be late in until nobody takes it for chance.
const LATE: usize = 8;
/// A host that is disturbed is late in every operation of a second: late arrivals of one second show no more than that.
const DISTURBED_NS: u64 = 1_000 * MS;
/// Operations of a track in which ranks are late while a job gets going: the setting `warm_up` says that they do not count.
pub(crate) const WARM_UP: u64 = 8;
/// Data that takes so many times as long is slow.
const SLOWER: f64 = 1.3;

/// Operations that are compared: those of a communicator, or of a pair of its ranks.
type Kind = (usize, Option<Track>, Func);

fn kind(s: &Stay) -> Kind {
    let pair = matches!(s.track, Track::Pair(..));
    (s.comm, pair.then_some(s.track), if pair { Func::Send } else { s.func })
}

/// One operation as its ranks went through it.
struct Passage {
    kind: Kind,
    order: u64,
    first_ns: u64,
    last_ns: u64,
    last: u32,
    /// The place of this operation in the sequence of the last rank's calls.
    last_ticket: u64,
    /// When each rank came.
    came_ns: Vec<(u64, u32)>,
    ended_ns: u64,
    timed: bool,
    by_launch: bool,
    /// Its records show which rank came last: its ranks are on one host, or the ends of those that waited are reported after that.
    /// The end of a launch of several transfers may be that of another one. How long whole launches took shows it only where each
    /// rank exchanges with all others: next to a rank that waits both neighbors may be the late one.
    shows_last: bool,
    /// A transfer whose ends have no other peers in their launches: in a pipeline one of the two waits in every step.
    is_by_itself: bool,
}

/// The operations that ended, by place.
fn passages(stays: &[Stay], a_node: u32) -> BTreeMap<Key, Passage> {
    let mut parts: BTreeMap<Key, Vec<&Stay>> = BTreeMap::new();
    stays.iter().for_each(|s| parts.entry(s.key()).or_default().push(s));
    let mut peers: BTreeMap<(u32, u64), BTreeSet<Rank>> = BTreeMap::new();
    for s in stays {
        if let (Track::Pair(a, b), Some(plan)) = (s.track, s.plan) {
            peers.entry((s.rank, plan)).or_default().extend([a, b]);
        }
    }
    let mut ranks: BTreeMap<usize, BTreeSet<u32>> = BTreeMap::new();
    for s in stays {
        ranks.entry(s.comm).or_default().insert(s.rank);
    }
    let is_with_all = |s: &&Stay| {
        let peers = s.plan.and_then(|p| peers.get(&(s.rank, p)));
        peers.zip(ranks.get(&s.comm)).is_some_and(|(peers, ranks)| peers.len() >= ranks.len())
    };
    let has_others = |s: &&Stay| s.plan.and_then(|p| peers.get(&(s.rank, p))).is_some_and(|p| p.len() > 2);
    let passage = |parts: Vec<&Stay>| {
        let started: Vec<(u64, u32)> =
            parts.iter().map(|s| Some((s.started_ns?, s.rank))).collect::<Option<_>>()?;
        let (last_ns, last) = started.iter().copied().max()?;
        let last_ticket = parts.iter().find(|s| s.rank == last)?.ticket;
        let is_local = parts.iter().all(|s| s.rank / a_node == last / a_node);
        let ends_later = |s: &&Stay| s.rank == last || s.reported_end_ns >= Some(last_ns);
        let by_launch = parts.iter().any(|s| s.by_launch);
        let is_by_itself = matches!(parts.first()?.track, Track::Pair(..)) && !parts.iter().any(has_others);
        let shows_launch = by_launch && parts.iter().all(is_with_all);
        let shows_end = !by_launch && parts.iter().all(ends_later);
        Some(Passage {
            shows_last: is_local || is_by_itself || shows_launch || shows_end,
            kind: kind(parts.first()?),
            order: parts.first()?.order,
            first_ns: started.iter().map(|(t, _)| *t).min()?,
            last_ns,
            last,
            last_ticket,
            came_ns: started,
            ended_ns: parts.iter().map(|s| s.reported_end_ns).min()??,
            timed: parts.iter().all(|s| s.timed || s.by_launch),
            by_launch,
            is_by_itself,
        })
    };
    parts.into_iter().filter_map(|(key, parts)| Some((key, passage(parts)?))).collect()
}

/// The untimed operations of each rank, with others than the culprits: when they ended.
#[derive(Default)]
struct Untimed<'a> {
    by_rank: BTreeMap<u32, BTreeMap<u64, Vec<&'a Stay>>>,
}

impl<'a> Untimed<'a> {
    fn of(stays: &'a [Stay], culprits: &BTreeSet<u32>) -> Self {
        let others = stays.iter().filter(|s| !culprits.contains(&s.rank));
        let with_others: BTreeSet<Key> = others.map(Stay::key).collect();
        let mut all = Untimed::default();
        for s in stays.iter().filter(|s| !s.timed && !s.by_launch && with_others.contains(&s.key())) {
            if let Some(ended_ns) = s.ended_ns {
                all.by_rank.entry(s.rank).or_default().entry(ended_ns).or_default().push(s);
            }
        }
        all
    }

    /// True where the last rank of an operation ended one of another communicator within the later half of the time by which it was
    /// late, and had issued it before that: nothing shows that it was not held there for most of it.
    fn may_hold(&self, p: &Passage, late_ns: u64) -> bool {
        let ends = self.by_rank.get(&p.last).into_iter();
        let half_ns = p.last_ns.saturating_sub(late_ns / 2);
        let mut ends = ends.flat_map(|e| e.range(half_ns..=p.last_ns)).flat_map(|(_, all)| all);
        ends.any(|s| s.comm != p.kind.0 && s.ticket < p.last_ticket && s.issued_ns < half_ns)
    }
}

/// True when timed operations show a slow fault between two moments: often, or once by at least `once_ns`. `other` is the job
/// without it.
pub(crate) fn is_visible(
    (kind, culprits): (FaultKind, &BTreeSet<u32>),
    happened: &[Stay],
    other: &[Stay],
    (from_ns, to_ns): (u64, u64),
    a_node: u32,
    once_ns: Option<u64>,
) -> bool {
    let (with, without) = (passages(happened, a_node), passages(other, a_node));
    let within = |p: &Passage| p.timed && (from_ns..to_ns).contains(&p.ended_ns);
    let both = with.iter().filter_map(|(key, p)| Some((p, without.get(key)?))).filter(|(p, _)| within(p));
    let mut earlier: BTreeMap<Kind, usize> = BTreeMap::new();
    for p in with.values().filter(|p| p.timed && p.ended_ns < from_ns) {
        *earlier.entry(p.kind).or_default() += 1;
    }
    let before = |kind: &Kind| earlier.get(kind).copied().unwrap_or(0);
    if !kind.is_data() {
        let both = both.filter(|(p, _)| p.order >= WARM_UP);
        let (times, by_ns) = once_ns.map_or((LATE, MS), |ns| (1, ns));
        let longer_ns =
            |p: &Passage, o: &Passage| (p.last_ns - p.first_ns).saturating_sub(o.last_ns - o.first_ns);
        // A culprit that shows comes after all others by half of its lateness: of ranks that come together nobody can tell who keeps
        // the rest waiting. Where all are culprits nobody waited for the fault.
        let others_ns = |p: &Passage| {
            let others = p.came_ns.iter().filter(|(_, r)| !culprits.contains(r));
            others.map(|(t, _)| *t).max()
        };
        let is_late = |p: &Passage, o: &Passage| {
            let is_last = |others_ns: u64| p.last_ns >= others_ns + longer_ns(p, o) / 2;
            longer_ns(p, o) >= by_ns && others_ns(p).is_some_and(is_last)
        };
        let is_unusual = |p: &Passage| once_ns.is_some() || !p.is_by_itself || before(&p.kind) >= A_RUN;
        let untimed = Untimed::of(happened, culprits);
        let late = both
            .filter(|(p, o)| culprits.contains(&p.last) && p.shows_last && is_late(p, o) && is_unusual(p))
            .filter(|(p, o)| !untimed.may_hold(p, longer_ns(p, o)));
        // A launch brings its rank late once, however many transfers it has.
        let late: BTreeSet<(u64, u32)> = late.map(|(p, _)| (p.last_ns, p.last)).collect();
        let since_ns = late.first().map_or(0, |(t, _)| *t);
        let is_longer = |(t, _): &(u64, u32)| once_ns.is_some() || t - since_ns > DISTURBED_NS;
        return late.len() >= times && late.last().is_some_and(is_longer);
    }
    // A launch that is timed as a whole shows nothing of its transfers' data.
    let both = both.filter(|(p, _)| !p.by_launch);
    // The end that was reported may be of another transfer, which ended before this one began.
    let data_ns = |p: &Passage| p.ended_ns.saturating_sub(p.last_ns) as f64;
    // The number of slow ones of each kind, and of all. The end of a transfer may be that of another one in its launch: where less than
    // half of a pair's are slow, nobody can tell whose ends these are.
    let mut slow: BTreeMap<Kind, (usize, usize)> = BTreeMap::new();
    for (p, o) in both {
        let of_kind = slow.entry(p.kind).or_default();
        of_kind.0 += usize::from(data_ns(p) >= data_ns(o) * SLOWER);
        of_kind.1 += 1;
    }
    let is_clear = |kind: &Kind, n: usize, of: usize| kind.1.is_none() || n * 2 >= of;
    slow.into_iter().any(|(kind, (n, of))| n >= A_RUN && is_clear(&kind, n, of) && before(&kind) >= A_RUN)
}
