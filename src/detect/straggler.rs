//! `straggler`: a rank arrives late and the others wait for it.
//!
//! Reported at once when one arrival is very late, else when the cost of late arrivals sets a rank apart from the others
//! ([`apart`]), or when the ranks of a host are late more often than chance makes them. The cost to the job decides whether it
//! is a warning. A communicator's first operation never counts (the join leaves it out). Ranks that work longer than they used
//! to are an info ([`work`]).

mod apart;
mod work;

use super::cost::{Cost, Lost, RECENT_NS, wall_ns};
use super::{Rule, Settings, add_host_facts, fact, names, number, seconds, wall, who};
use crate::join::{Communicator, Join, LateCosts, LateEvent, Measure, Track};
use crate::model::{CommId, Confidence, Finding, Kind, Rank, SegmentId, Severity};
use apart::{Apart, CHANCE, by_chance};
use std::cell::OnceCell;
use std::collections::BTreeMap;
pub(super) use work::longer_work;

/// The greatest chance where the cost is too small for a warning and others are late as well: the rule tests every
/// communicator again with every arrival.
const CHANCE_OF_INFO: f64 = 0.0001;
/// Communicators that a process may work in before its operations in all of them count for one.
const SEVERAL: u64 = 4;
/// Ranks of a host that are described one by one.
const DESCRIBED: usize = 4;

/// A late rank, or the late ranks of one host.
#[derive(Debug)]
struct Suspect<'a> {
    ranks: Vec<Rank>,
    host: Option<&'a str>,
    events: Vec<&'a LateEvent>,
    /// How likely it is that chance alone made them late so often; absent where they came very late once, or nobody else
    /// was late at all.
    chance: Option<f64>,
    /// True where it may be chance after all: the finding is an info, whatever it costs.
    is_unsure: bool,
}

/// The rule.
#[derive(Debug)]
pub struct StragglerRule {
    settings: Settings,
}

impl StragglerRule {
    /// With these limits.
    pub fn new(settings: Settings) -> Self {
        StragglerRule { settings }
    }
}

impl Rule for StragglerRule {
    fn check(&self, join: &Join, now_ns: u64) -> Vec<Finding> {
        self.check_but(join, now_ns, &|_, _, _, _| false)
    }
}

/// A late arrival, to be held against those of other communicators.
#[derive(Debug, Clone, Copy)]
struct Arrival {
    comm: CommId,
    late: SegmentId,
    began_ns: u64,
    came_ns: u64,
}

/// True when a rank came late because it, or what it is part of, was waiting for a late rank elsewhere at that time:
/// one cause is told once, where it began.
fn held_up(join: &Join, c: &Communicator, e: &LateEvent, known: &[Arrival]) -> bool {
    let Some(me) = c.members().get(&e.rank).map(|m| m.record.segment) else { return false };
    let began_ns = e.came_ns.saturating_sub(e.by_ns);
    // They are in the order in which they came.
    let first = known.partition_point(|a| a.came_ns <= began_ns);
    let last = known.partition_point(|a| a.came_ns <= e.came_ns);
    known.get(first..last).unwrap_or_default().iter().any(|a| {
        // It ended while the others were waiting here, and explains most of that.
        let then = a.came_ns > began_ns && (a.came_ns, a.comm) < (e.came_ns, c.id);
        let most = a.came_ns.saturating_sub(a.began_ns.max(began_ns)) >= e.by_ns / 2;
        a.comm != c.id
            && then
            && most
            && join.communicator(a.comm).is_some()
            && (a.late == me || join.memberships(me).iter().any(|(comm, _)| *comm == a.comm))
    })
}

impl StragglerRule {
    /// True where an arrival says something of its rank that came so late, in ns, once the job is warm.
    fn significant(&self, e: &LateEvent, often_ns: u64) -> bool {
        if e.held_elsewhere != Some(false) {
            return false;
        }
        // One that has long been at work in others is warm in a communicator that is seldom used.
        let order = e.operation.order.max(e.finished / SEVERAL);
        // A host may issue a little late without its GPU having been idle. A graph issues when the GPU comes to it.
        let least = match e.measure {
            Measure::Host | Measure::Standstill if e.track != Track::Replay => self.settings.late_at_once_ns,
            _ => self.least_ns(order, often_ns),
        };
        e.by_ns >= least && order >= self.settings.warm_up
    }

    /// How late a rank has to come to an operation of this order, in ns. While a job gets going, ranks are a little late in
    /// turn: libraries are loaded, memory is taken, plans are made. Less and less of that is to be expected.
    fn least_ns(&self, order: u64, often_ns: u64) -> u64 {
        let s = self.settings;
        let (first, often) = (s.late_at_once_ns.max(1) as f64, often_ns.max(1) as f64);
        let span = s.warm_up_often.saturating_sub(s.warm_up).max(1) as f64;
        let warm = (order.saturating_sub(s.warm_up) as f64 / span).min(1.0);
        (first * (often / first).powf(warm)) as u64
    }

    /// Leaves out what was told as a hang before the rank came: communicator, track, order and rank.
    pub(super) fn check_but(
        &self,
        join: &Join,
        now_ns: u64,
        told: &dyn Fn(CommId, Track, u64, Rank) -> bool,
    ) -> Vec<Finding> {
        let mut known: Vec<Arrival> = join.notable().flat_map(|c| self.arrivals(join, c)).collect();
        known.sort_by_key(|a| a.came_ns);
        join.notable().flat_map(|c| self.judge(join, c, &known, now_ns, told)).collect()
    }

    /// The late arrivals of a communicator that count.
    fn arrivals(&self, join: &Join, c: &Communicator) -> Vec<Arrival> {
        let of = |e: &LateEvent| {
            let late = c.members().get(&e.rank)?.record.segment;
            join.process(late)?;
            Some(Arrival {
                comm: c.id,
                late,
                began_ns: e.came_ns.saturating_sub(e.by_ns),
                came_ns: e.came_ns,
            })
        };
        c.late().filter(|e| self.significant(e, self.settings.late_often_ns)).filter_map(of).collect()
    }

    /// The late ranks of a communicator. Whoever is late by less than the setting says is told where that costs enough for a
    /// warning: a GPU that loses little in each of many operations.
    fn judge(
        &self,
        join: &Join,
        c: &Communicator,
        known: &[Arrival],
        now_ns: u64,
        told_before: &dyn Fn(CommId, Track, u64, Rank) -> bool,
    ) -> Vec<Finding> {
        let before_mismatch =
            |e: &&LateEvent| c.mismatch().is_none_or(|(t, o, _)| (e.track, e.operation.order) < (t, o));
        let own = |e: &&LateEvent| {
            !held_up(join, c, e, known) && !told_before(c.id, e.track, e.operation.order, e.rank)
        };
        let costs = OnceCell::new();
        let costs = || costs.get_or_init(|| c.late_costs());
        let find = |often_ns: u64| -> Vec<Finding> {
            let events = c.late().filter(before_mismatch).filter(|e| self.significant(e, often_ns));
            let events: Vec<&LateEvent> = events.filter(own).collect();
            let suspects = self.suspects(join, c, &events, &costs);
            suspects.into_iter().filter_map(|s| self.told(join, c, &s, now_ns)).collect()
        };
        let mut found = find(self.settings.late_often_ns);
        if c.late().any(|e| e.by_ns < self.settings.late_often_ns) {
            let told: Vec<Rank> = found.iter().flat_map(|f| f.ranks.iter().copied()).collect();
            let matters = |f: &Finding| f.severity >= Severity::Warning || self.is_dear(f);
            let is_new = |f: &Finding| !f.ranks.iter().any(|r| told.contains(r));
            found.extend(find(0).into_iter().filter(|f| matters(f) && is_new(f)));
        }
        found
    }

    /// True where a single rank costs the job much for its age. A pair or a network that is slow holds up all ranks of a host
    /// alike.
    fn is_dear(&self, f: &Finding) -> bool {
        f.ranks.len() == 1 && f.cost.is_some_and(|c| self.settings.is_dear(c))
    }

    /// The finding about a suspect, with its price; absent where chance explains it and it costs little.
    fn told(&self, join: &Join, c: &Communicator, s: &Suspect<'_>, now_ns: u64) -> Option<Finding> {
        let last_ns = s.events.iter().map(|e| e.at_ns).max()?;
        let cost = cost(join, c, s, now_ns);
        let mut f = finding(join, c, s)?;
        cost.put_on(&mut f, &self.settings);
        // A pipeline's bubbles and drain look the same as a rank of a transfer whose GPU is late: nobody is woken by these.
        if s.is_unsure || !s.events.iter().any(|e| e.costs()) {
            f.severity = Severity::Info;
        }
        if f.severity == Severity::Info && !self.is_dear(&f) && s.chance.is_some_and(|c| c >= CHANCE_OF_INFO)
        {
            return None;
        }
        f.open = now_ns.saturating_sub(last_ns) < self.settings.late_over_ns;
        Some(f)
    }

    /// Where ranks of the share `one` of all are late more often than chance makes some of `of` such: how likely that is.
    fn often(&self, times: usize, all: usize, one: f64, of: usize) -> Option<f64> {
        let chance = by_chance(times, all, one, of);
        (times >= self.settings.late_times && chance < CHANCE).then_some(chance)
    }

    /// The ranks that are late once very much, or too often. Each is tested for itself: several may be slow, and each
    /// of them is the last one only now and then.
    fn suspects<'a, 'b>(
        &self,
        join: &'a Join,
        c: &Communicator,
        events: &[&'a LateEvent],
        costs: &dyn Fn() -> &'b LateCosts,
    ) -> Vec<Suspect<'a>> {
        let mut by_rank: BTreeMap<Rank, Vec<&LateEvent>> = BTreeMap::new();
        events.iter().for_each(|e| by_rank.entry(e.rank).or_default().push(e));
        let mut found = self.hosts(join, c, &mut by_rank);
        let ranks = c.expected().max(2);
        for (rank, events_of) in by_rank {
            let worst = events_of.iter().map(|e| e.by_ns).max().unwrap_or(0);
            let repeats = self.often(events_of.len(), events.len(), 1.0 / ranks as f64, ranks);
            let is_late_often = events_of.len() >= self.settings.late_times;
            let apart = if is_late_often {
                apart::judge(&costs().of(rank), ranks, repeats.is_some())
            } else {
                Apart::No
            };
            let is_far = worst >= self.settings.late_at_once_ns;
            if apart == Apart::No && !is_far {
                continue;
            }
            let is_only_one = repeats.is_some() && events_of.len() == events.len();
            let chance = (!is_far && !is_only_one).then(|| repeats.unwrap_or(CHANCE));
            let is_unsure = !is_far && apart == Apart::Possibly;
            found.push(Suspect { ranks: vec![rank], host: None, events: events_of, chance, is_unsure });
        }
        found
    }

    /// Hosts of which most ranks are late in turn since some moment, too often even without the worst of them; takes out their
    /// ranks.
    fn hosts<'a>(
        &self,
        join: &'a Join,
        c: &Communicator,
        by_rank: &mut BTreeMap<Rank, Vec<&'a LateEvent>>,
    ) -> Vec<Suspect<'a>> {
        let host = |r: &Rank| Some(join.process(c.members().get(r)?.record.segment)?.record.host.as_str());
        let mut late: BTreeMap<&str, Vec<Rank>> = BTreeMap::new();
        by_rank.keys().for_each(|r| late.entry(host(r).unwrap_or_default()).or_default().push(*r));
        late.retain(|_, ranks| ranks.len() > 1);
        let all = by_rank.values().map(Vec::len).sum::<usize>();
        if late.is_empty() || all < self.settings.late_times {
            return Vec::new();
        }
        let mut hosts: BTreeMap<&str, Vec<Rank>> = BTreeMap::new();
        c.members().keys().for_each(|r| hosts.entry(host(r).unwrap_or_default()).or_default().push(*r));
        // The newest first.
        let mut events: Vec<&LateEvent> = by_rank.values().flatten().copied().collect();
        events.sort_by_key(|e| std::cmp::Reverse(e.came_ns));
        let mut found = Vec::new();
        for (name, ranks) in late {
            let of_host = hosts.get(name).cloned().unwrap_or_default();
            if ranks.len() * 2 <= of_host.len() || of_host.len() >= c.expected() {
                continue;
            }
            let of_all = (c.expected(), hosts.len());
            let Some((chance, many)) = self.late_in_turn(&events, &of_host, of_all) else { continue };
            ranks.iter().for_each(|r| drop(by_rank.remove(r)));
            let since = events.iter().take(many).filter(|e| of_host.contains(&e.rank)).copied().collect();
            let chance = Some(chance);
            found.push(Suspect { ranks: of_host, host: Some(name), events: since, chance, is_unsure: false });
        }
        found
    }

    /// Says among how many of the newest late arrivals, the newest of which is the first, most ranks of a host are late in turn, and
    /// how likely it is that chance does so to some host of a communicator of so many ranks and hosts. Absent where chance
    /// explains it, or one of the ranks is late alone.
    fn late_in_turn(
        &self,
        events: &[&LateEvent],
        of_host: &[Rank],
        (ranks, hosts): (usize, usize),
    ) -> Option<(f64, usize)> {
        let share = |n: usize, of: usize| n as f64 / of.max(1) as f64;
        let here = of_host.len();
        let mut times: BTreeMap<Rank, usize> = BTreeMap::new();
        let (mut sum, mut moments) = (0, 0.0);
        let mut best: Option<(f64, usize)> = None;
        for (all, e) in (1..).zip(events).filter(|(_, e)| of_host.contains(&e.rank)) {
            *times.entry(e.rank).or_default() += 1;
            sum += 1;
            if sum < self.settings.late_times {
                continue;
            }
            moments += 1.0;
            let chance = by_chance(sum, all, share(here, ranks), hosts);
            if times.len() * 2 <= here || best.is_some_and(|(known, _)| known <= chance) {
                continue;
            }
            let worst = times.values().copied().max().unwrap_or(0);
            // One of them may be slow, and hold up its neighbors first.
            let is_one = self.often(worst, sum, share(1, here), here).is_some();
            let but_worst = by_chance(sum - worst, all - worst, share(here - 1, ranks.saturating_sub(1)), 1);
            if !is_one && but_worst < CHANCE {
                best = Some((chance, all));
            }
        }
        best.map(|(chance, all)| (chance * moments, all)).filter(|(chance, _)| *chance < CHANCE)
    }
}

/// The cost of the late arrivals: in the minute that ended with the last of them, and since the job began.
fn cost(join: &Join, c: &Communicator, s: &Suspect<'_>, now_ns: u64) -> Cost {
    let last_ns = s.events.iter().map(|e| e.came_ns).max().unwrap_or(now_ns);
    let since_ns = last_ns.saturating_sub(RECENT_NS);
    let recent = LateEvent::sum_ns(s.events.iter().filter(|e| e.came_ns > since_ns).copied());
    let remembered = LateEvent::sum_ns(s.events.iter().copied());
    let add = |(recent, all): (u64, u64), rank: &Rank| {
        let (lately, ever) = c.forgotten_late_ns(*rank, since_ns);
        (recent.saturating_add(lately), all.saturating_add(ever))
    };
    let (recent_ns, all_ns) = s.ranks.iter().fold((recent, remembered), add);
    let wall_ns = wall_ns(join, c, now_ns);
    Cost {
        recent: Lost { lost_ns: recent_ns, of_ns: wall_ns.min(RECENT_NS) },
        in_all: Lost { lost_ns: all_ns, of_ns: wall_ns },
    }
}

fn finding(join: &Join, c: &Communicator, s: &Suspect<'_>) -> Option<Finding> {
    let events = s.events.as_slice();
    let worst = events.iter().max_by_key(|e| e.by_ns)?;
    let first = events.iter().map(|e| e.at_ns).min()?;
    let judged = c.judged();
    let mut evidence = vec![
        number(
            format!(
                "rank {} came {:.3} s {}",
                worst.rank,
                seconds(worst.by_ns),
                match worst.track {
                    Track::Pair(..) if worst.by_own_work => "later than when it worked as it used to",
                    _ if worst.measure == Measure::Standstill => "after the others",
                    Track::Pair(..) if !worst.in_exchange => "later than its peer is usually kept waiting",
                    _ => "after the median of the others",
                }
            ),
            seconds(worst.by_ns),
            "s",
        ),
        number(
            match events.iter().all(|e| e.is_for_all()) {
                true => format!(
                    "late so in {} of the {judged} collectives of which the last to come is known",
                    events.len()
                ),
                false if events.iter().any(|e| e.is_for_all()) => {
                    format!("late so in {} of its operations", events.len())
                }
                false => format!("late so in {} of its transfers", events.len()),
            },
            events.len() as f64,
            "count",
        ),
    ];
    if events.iter().any(|e| e.by_host) {
        evidence.push(fact("its GPU began as soon as its host had issued the operation: the host was late"));
    }
    if events.iter().any(|e| e.by_own_work) {
        evidence.push(fact(
            "since its last transfer it worked by itself for longer than it used to: its GPU or its work, and no other rank",
        ));
    }
    if let Some(t) = worst.transfer_ns {
        evidence.push(number(
            format!(
                "the transfer itself took {:.6} s: the others' time was waiting, not the network",
                seconds(t)
            ),
            seconds(t),
            "s",
        ));
    }
    evidence.push(fact(match worst.measure {
        Measure::Gpu => "measured by the kernels' times on the GPUs",
        Measure::Host => {
            "measured by the hosts' issue times: the GPUs' stamps of this operation cannot be believed or are absent"
        }
        Measure::Standstill => "measured by how long others stood still in the operation until it went on",
    }));
    if worst.unsure {
        evidence.push(fact(
            "it may have been held by others, or nobody may have waited for it: this lateness is in no cost",
        ));
    }
    if events.iter().any(|e| e.speaks_for > 1.0) {
        let of = events.iter().map(|e| e.speaks_for).sum::<f64>();
        evidence.push(number(
            format!("not every operation is timed: in its cost these speak for {of:.0} of them"),
            of.round(),
            "count",
        ));
    }
    if worst.track == Track::Replay {
        evidence.push(fact("the operation was replayed by a CUDA graph"));
    }
    if let Some(host) = s.host {
        evidence.push(fact(format!("{} are those of host {host}, and late in turn", names(&s.ranks))));
    }
    evidence.extend(s.ranks.iter().take(DESCRIBED).filter_map(|r| who(join, c, *r)));
    let culprit = s.host.map_or_else(|| names(&s.ranks), |h| format!("host {h}"));
    let does = if s.ranks.len() == 1 || s.host.is_some() { "does" } else { "do" };
    let came = events.iter().map(|e| e.came_ns).max()?;
    let mut f = Finding {
        since: wall(join, first),
        evidence,
        advice: format!(
            "look at what {culprit} {does} before this operation: data loading, a slower GPU (clocks, throttling), a busy CPU, uneven work"
        ),
        since_ns: first,
        confidence: Confidence::Likely,
        ..Finding::new(Kind::Straggler, c.id, s.ranks.clone(), worst.operation.clone())
    };
    add_host_facts(&mut f, join, c, first, came);
    Some(f)
}

#[cfg(test)]
mod tests;
