//! `straggler`: a rank arrives late and the others wait for it.
//!
//! Told at once when one arrival is very late, else when the same rank is late again and again. A
//! communicator's first operation never counts (the join leaves it out).

use super::{Rule, Settings, add_host_facts, fact, number, seconds, wall, who};
use crate::join::{Communicator, Join, LateEvent, Measure, Track};
use crate::model::{CommId, Confidence, Finding, Kind, Rank, SegmentId};
use std::collections::BTreeMap;

/// How likely it may be at most that some rank of equal ones is late so often.
const CHANCE: f64 = 0.01;

/// How likely it is that one of `ranks` equal ranks is the late one in at least `times` of `all` operations.
fn by_chance(times: usize, all: usize, ranks: usize) -> f64 {
    let one = 1.0 / ranks.max(2) as f64;
    let odds = one / (1.0 - one);
    // The terms of the binomial distribution, from none upwards.
    let mut term = (1.0 - one).powf(all as f64);
    let mut tail = 0.0;
    for k in 0..=all {
        if k >= times {
            tail += term;
        }
        term *= (all - k) as f64 / (k + 1) as f64 * odds;
    }
    (tail * ranks as f64).min(1.0)
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
    fn significant(&self, e: &LateEvent) -> bool {
        if e.held_elsewhere != Some(false) {
            return false;
        }
        // A host may issue a little late without its GPU having been idle. And while a job gets going, ranks are a
        // little late in turn: libraries are loaded, memory is taken, plans are made.
        let order = e.operation.order;
        let little = e.measure == Measure::Gpu && order >= self.settings.warm_up_often;
        let least = if little { self.settings.late_often_ns } else { self.settings.late_at_once_ns };
        e.by_ns >= least && order >= self.settings.warm_up
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
        c.late().filter(|e| self.significant(e)).filter_map(of).collect()
    }

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
        let mut by_rank: BTreeMap<Rank, Vec<&LateEvent>> = BTreeMap::new();
        let mut all = 0usize;
        let own = |e: &&LateEvent| {
            !held_up(join, c, e, known) && !told_before(c.id, e.track, e.operation.order, e.rank)
        };
        for e in c.late().filter(before_mismatch).filter(|e| self.significant(e)).filter(own) {
            by_rank.entry(e.rank).or_default().push(e);
            all += 1;
        }
        let told = |events: &[&LateEvent]| {
            let worst = events.iter().map(|e| e.by_ns).max().unwrap_or(0);
            // The same rank again and again, not every rank in turn.
            let often = events.len() >= self.settings.late_times
                && events.len() * 2 > all
                && by_chance(events.len(), all, c.expected()) < CHANCE;
            worst >= self.settings.late_at_once_ns || often
        };
        by_rank
            .into_iter()
            .filter(|(_, events)| told(events))
            .filter_map(|(rank, events)| {
                let last = events.iter().map(|e| e.at_ns).max()?;
                let mut f = finding(join, c, rank, &events)?;
                f.open = now_ns.saturating_sub(last) < self.settings.late_over_ns;
                Some(f)
            })
            .collect()
    }
}

fn finding(join: &Join, c: &Communicator, rank: Rank, events: &[&LateEvent]) -> Option<Finding> {
    let worst = events.iter().max_by_key(|e| e.by_ns)?;
    let first = events.iter().map(|e| e.at_ns).min()?;
    let judged = c.judged();
    let mut evidence = vec![
        number(
            format!("rank {rank} came {:.3} s after the first rank", seconds(worst.by_ns)),
            seconds(worst.by_ns),
            "s",
        ),
        number(
            format!(
                "late so in {} of the {judged} collectives of which the last to come is known",
                events.len()
            ),
            events.len() as f64,
            "count",
        ),
    ];
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
    }));
    if worst.track == Track::Replay {
        evidence.push(fact("the operation was replayed by a CUDA graph"));
    }
    evidence.extend(who(join, c, rank));
    let came = events.iter().map(|e| e.came_ns).max()?;
    let mut f = Finding {
        since: wall(join, first),
        evidence,
        advice: format!(
            "look at what rank {rank} does before this operation: data loading, a slower GPU (clocks, throttling), a busy CPU, uneven work"
        ),
        since_ns: first,
        confidence: Confidence::Likely,
        ..Finding::new(Kind::Straggler, c.id, vec![rank], worst.operation.clone())
    };
    add_host_facts(&mut f, join, c, first, came);
    Some(f)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::join::testing::{all_reduce, member, process};
    use crate::model::{Timing, Update};

    const S: u64 = 1_000_000_000;

    /// `late[i]` is (rank, ns late) in the operation of order i, in a communicator that has been at work for a while.
    fn run(late: &[(u32, u64)]) -> Vec<Finding> {
        run_from(30, late)
    }

    fn run_from(first: u64, late: &[(u32, u64)]) -> Vec<Finding> {
        let mut j = Join::new();
        let n = first + late.len() as u64;
        for r in 0..4 {
            j.feed(process(r));
            j.feed(member(r, 4, n));
            for (o, (late_rank, by)) in late.iter().enumerate() {
                let at = S + o as u64 * S;
                let (arrive, end) = (at + if r == *late_rank { *by } else { 0 }, at + by + 100_000);
                j.feed(Update::Op(Box::new(all_reduce(
                    r,
                    first + o as u64,
                    arrive,
                    Some((arrive + 10_000, Some(end))),
                ))));
            }
        }
        j.tick(100 * S);
        StragglerRule::new(Settings::default()).check(&j, 100 * S)
    }

    #[test]
    fn a_very_late_rank_is_told_at_once() {
        let found = run(&[(0, 1_000), (3, 300_000_000), (1, 1_000)]);
        assert_eq!(found.len(), 1);
        let f = &found[0];
        assert_eq!((f.ranks.as_slice(), f.operation.order), ([Rank(3)].as_slice(), 31));
        assert!((f.evidence[0].value.expect("seconds") - 0.3).abs() < 1e-6);
        assert!(f.evidence.iter().any(|e| e.text.contains("on the GPUs")));
    }

    #[test]
    fn a_late_rank_without_a_cpu_is_told_so() {
        let mut j = Join::new();
        for r in 0..2 {
            j.feed(process(r));
            j.feed(member(r, 2, 12));
            for o in 10..12 {
                let late = if r == 1 && o == 11 { 300_000_000 } else { 0 };
                let at = S + (o - 10) * S;
                let kernel = Some((at + late + 10_000, Some(at + late + 100_000)));
                j.feed(Update::Op(Box::new(all_reduce(r, o, at + late, kernel))));
            }
        }
        let mut fact = crate::model::HostFact::new(SegmentId(2), 2 * S + 500_000_000);
        fact.cpu_starved = Some(0.4);
        j.feed(Update::Host(Box::new(fact)));
        j.tick(10 * S);
        let found = StragglerRule::new(Settings::default()).check(&j, 10 * S);
        assert!(found[0].evidence.iter().any(|e| e.text.contains("had none for up to 40 %")), "{found:?}");
        assert!(found[0].advice.contains("pinning"), "{found:?}");
    }

    #[test]
    fn the_first_operation_never_counts() {
        assert_eq!(run_from(0, &[(3, 900_000_000), (1, 1_000)]), vec![]);
    }

    #[test]
    fn a_job_that_gets_going_is_late_now_and_then() {
        let late = [(2, 30_000_000); 10];
        assert_eq!(run_from(1, &late), vec![]);
        assert_eq!(run(&late).len(), 1);
        assert_eq!(
            run_from(1, &[(3, 900_000_000), (1, 1_000)]),
            vec![],
            "plans are made, libraries are loaded"
        );
        assert_eq!(run_from(8, &[(3, 900_000_000), (1, 1_000)]).len(), 1);
    }

    #[test]
    fn a_little_late_counts_when_it_repeats_on_one_rank() {
        let mut late = vec![(0, 1_000)];
        late.extend([(2, 8_000_000); 4]);
        assert_eq!(run(&late), vec![], "four times are not enough");
        late.push((2, 9_000_000));
        let found = run(&late);
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].ranks, vec![Rank(2)]);
        assert_eq!(found[0].evidence[1].value, Some(5.0));
    }

    #[test]
    fn a_straggler_that_catches_up_is_over() {
        // The last operation is at 4 s; the rules are asked at 100 s.
        let found = run(&[(0, 1_000), (3, 300_000_000), (1, 1_000)]);
        assert!(!found[0].open);
    }

    #[test]
    fn the_same_rank_by_chance_is_noise() {
        assert!((by_chance(2, 2, 2) - 0.5).abs() < 1e-9);
        assert!(by_chance(5, 5, 4) < CHANCE && by_chance(5, 9, 4) > CHANCE);
        assert!(by_chance(8, 8, 2) < CHANCE && by_chance(5, 5, 2) > CHANCE);
        assert!(by_chance(300, 512, 16_384) < CHANCE);
    }

    #[test]
    fn ranks_late_in_turn_are_noise() {
        let late: Vec<(u32, u64)> = (0..24).map(|i| (i % 4, 8_000_000)).collect();
        assert_eq!(run(&late), vec![]);
    }

    #[test]
    fn an_operation_without_gpu_times_is_judged_when_its_last_rank_has_issued_it() {
        let mut j = Join::new();
        for r in 0..2u32 {
            j.feed(process(r));
            j.feed(member(r, 2, 12));
            for o in 9..11 {
                let t = S + o * 1_000_000;
                j.feed(Update::Op(Box::new(all_reduce(r, o, t, Some((t + 5_000, Some(t + 50_000)))))));
            }
            let mut last = all_reduce(r, 11, 3 * S + u64::from(r) * 300_000_000, None);
            // Its events are read at the next call, and there is none.
            last.timing = Timing::Events;
            j.feed(Update::Op(Box::new(last)));
        }
        j.tick(3 * S + 400_000_000);
        j.tick(3 * S + 500_000_000);
        let rule = StragglerRule::new(Settings::default());
        let found = rule.check(&j, 3 * S + 500_000_000);
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!((found[0].ranks.as_slice(), found[0].operation.order), ([Rank(1)].as_slice(), 11));
        assert!(found[0].evidence.iter().any(|e| e.text.contains("hosts' issue times")), "{found:?}");
        j.tick(60 * S);
        assert_eq!(rule.check(&j, 60 * S).len(), 1, "and once");
    }
}
