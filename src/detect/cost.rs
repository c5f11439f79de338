//! The cost of a slow operation to the job: this alone decides whether it is a warning.

use super::{Settings, number};
use crate::join::{Communicator, Join};
use crate::model::{Evidence, Finding, JobCost, Liveness, Loss, Severity};
use std::time::Duration;

/// The recent cost is taken over at most so much of the job's time, in ns.
pub(super) const RECENT_NS: u64 = 60_000_000_000;
/// A warning becomes an info only where it costs less than this share of what makes a warning, so that a cost near the
/// limit does not change the severity again and again.
const HELD_SHARE: f64 = 0.5;

/// While a job is younger than this its ranks wait for each other in turn, and what that costs is set beside so much time.
const YOUNG: Duration = Duration::from_secs(10);

/// Time that a job lost, in ns, of some of its time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Lost {
    pub(super) lost_ns: u64,
    pub(super) of_ns: u64,
}

impl Lost {
    pub(super) fn share(&self) -> f64 {
        self.lost_ns as f64 / self.of_ns.max(1) as f64
    }

    fn loss(&self) -> Loss {
        Loss::new(self.lost_ns, self.of_ns)
    }
}

/// The cost of something slow to a job.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Cost {
    /// In the last minute.
    pub(super) recent: Lost,
    /// Since the job began.
    pub(super) in_all: Lost,
}

impl Cost {
    /// The severity is that of the share of a whole minute, however young the job is: while a job gets going, its ranks wait
    /// for each other in turn.
    pub(super) fn severity(&self, settings: &Settings) -> Severity {
        if percent_of_a_minute(self.recent.loss()) >= f64::from(settings.warning_cost_percent) {
            Severity::Warning
        } else {
            Severity::Info
        }
    }

    /// Puts the price on a finding: its severity, its cost, and a line of evidence.
    pub(super) fn put_on(&self, f: &mut Finding, settings: &Settings) {
        f.severity = self.severity(settings);
        f.cost = Some(JobCost { last_minute: self.recent.loss(), in_all: self.in_all.loss() });
        f.evidence.extend(f.cost.map(evidence));
    }
}

impl Settings {
    /// True where something cost as much of the last minute as makes a warning; of a job younger than that, as much of its time.
    pub(super) fn is_dear(&self, cost: JobCost) -> bool {
        let Loss { lost_s, of_s, .. } = cost.last_minute;
        lost_s / of_s.max(YOUNG.as_secs_f64()) * 100.0 >= f64::from(self.warning_cost_percent)
    }
}

fn percent_of_a_minute(loss: Loss) -> f64 {
    loss.lost_s / Duration::from_nanos(RECENT_NS).as_secs_f64() * 100.0
}

fn evidence(cost: JobCost) -> Evidence {
    number(format!("it cost the job {cost}"), cost.last_minute.percent, "%")
}

/// Keeps an open warning a warning while its cost stays near the limit.
pub(super) fn hold_severity(f: &mut Finding, known: Option<&Finding>, settings: &Settings) {
    let was_warning = known.is_some_and(|k| k.open && k.severity == Severity::Warning);
    let least = f64::from(settings.warning_cost_percent) * HELD_SHARE;
    let near = f.cost.is_some_and(|c| percent_of_a_minute(c.last_minute) >= least);
    if was_warning && near && f.severity == Severity::Info {
        f.severity = Severity::Warning;
    }
}

/// How long the job of a communicator has run, in ns: until now, or until its last process ended.
pub(super) fn wall_ns(join: &Join, c: &Communicator, now_ns: u64) -> u64 {
    let processes = || c.members().values().filter_map(|m| join.process(m.record.segment));
    let began_ns = processes().map(|p| p.record.created_ns).min().unwrap_or(0);
    let ended_ns = processes().try_fold(0, |last: u64, p| match p.record.liveness {
        Liveness::Alive | Liveness::Unknown => None,
        // Of a post-mortem segment nobody saw the end; it was not before its last operation.
        Liveness::Gone(at) => Some(last.max(at.or(p.issuing.last_ns()).unwrap_or(now_ns))),
    });
    ended_ns.unwrap_or(now_ns).saturating_sub(began_ns)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::join::testing::{member, process};
    use crate::model::{CommId, Kind, OperationRef, Rank, Track, Update};

    const S: u64 = 1_000_000_000;

    fn of(recent_ms: u64) -> Cost {
        Cost {
            recent: Lost { lost_ns: recent_ms * 1_000_000, of_ns: RECENT_NS },
            in_all: Lost { lost_ns: 2 * S, of_ns: 200 * S },
        }
    }

    fn slow() -> Finding {
        let operation = OperationRef::named("AllReduce", Track::Collective, 1);
        Finding::new(Kind::Straggler, CommId::unowned(7), vec![Rank(1)], operation)
    }

    #[test]
    fn what_costs_three_per_cent_is_a_warning() {
        let settings = Settings::default();
        assert_eq!(of(1_800).severity(&settings), Severity::Warning);
        assert_eq!(of(1_790).severity(&settings), Severity::Info);
        assert_eq!(of(1_790).severity(&Settings { warning_cost_percent: 2, ..settings }), Severity::Warning);
    }

    #[test]
    fn the_cost_of_a_young_job_is_weighed_over_a_minute() {
        let cost = |lost_ns| {
            let young = Lost { lost_ns, of_ns: 5 * S };
            Cost { recent: young, in_all: young }.severity(&Settings::default())
        };
        assert_eq!(cost(S), Severity::Info);
        assert_eq!(cost(2 * S), Severity::Warning);
    }

    #[test]
    fn a_finding_gets_its_price_in_the_last_minute_and_in_all() {
        let mut f = slow();
        of(1_800).put_on(&mut f, &Settings::default());
        let cost = f.cost.expect("a price");
        assert_eq!(
            (cost.last_minute.lost_s, cost.last_minute.of_s, cost.last_minute.percent),
            (1.8, 60.0, 3.0)
        );
        assert_eq!((cost.in_all.lost_s, cost.in_all.of_s, cost.in_all.percent), (2.0, 200.0, 1.0));
        let text =
            "it cost the job 1.800 s of 60.0 s (3.0 %) in the last minute, 2.000 s of 200.0 s (1.0 %) in all";
        assert_eq!(f.evidence.last().map(|e| e.text.as_str()), Some(text));
    }

    #[test]
    fn a_cost_near_the_limit_does_not_change_the_severity_again_and_again() {
        let settings = Settings::default();
        let severity = |known: Option<&Finding>, ms| {
            let mut f = slow();
            of(ms).put_on(&mut f, &settings);
            hold_severity(&mut f, known, &settings);
            f.severity
        };
        let was = Finding { severity: Severity::Warning, ..slow() };
        assert_eq!(severity(None, 1_700), Severity::Info);
        assert_eq!(severity(Some(&was), 1_700), Severity::Warning);
        assert_eq!(severity(Some(&was), 800), Severity::Info);
        assert_eq!(severity(Some(&Finding { open: false, ..was }), 1_700), Severity::Info);
    }

    #[test]
    fn the_time_of_a_job_ends_with_its_last_process() {
        let mut join = Join::new();
        let mut wall = |ends: [Option<u64>; 2]| {
            for (rank, end) in (0..2).zip(ends) {
                let Update::Segment(mut s) = process(rank) else { unreachable!("a process") };
                s.created_ns = S;
                s.liveness = end.map_or(Liveness::Alive, |t| Liveness::Gone(Some(t)));
                join.feed(Update::Segment(s));
                join.feed(member(rank, 2, 1));
            }
            let c = join.communicators().next().expect("one");
            wall_ns(&join, c, 100 * S) / S
        };
        assert_eq!(wall([None, None]), 99);
        assert_eq!(wall([Some(5 * S), None]), 99);
        assert_eq!(wall([Some(5 * S), Some(9 * S)]), 8);
    }
}
