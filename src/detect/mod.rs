//! From what the ranks did to what is wrong: one rule a file, and who remembers what was found.
//!
//! Pure like the join: rules are told the time and read the join; they keep nothing. What they gave, `ledger` keeps.

mod choice;
mod circle;
mod cost;
mod endings;
mod hang;
mod hang_context;
mod hardware;
mod held_by_gpu;
mod host;
mod interleaved;
mod ledger;
mod mismatch;
mod missing_rank;
mod never_joined;
mod nodes;
mod not_started;
mod out_of_order;
mod slow_transfer;
mod standstill;
mod straggler;
mod stuck_transfer;
mod transfers;
mod tuner_rules;
mod usage;
mod victims;

pub use choice::{ChoiceRule, SplitChoiceRule};
pub use hang::HangRule;
pub use host::where_it_is;
pub use mismatch::MismatchRule;
pub use never_joined::NeverJoinedRule;
pub use slow_transfer::{Baseline, BaselineSource, SlowTransferRule};
pub use straggler::StragglerRule;
pub use usage::UsageRule;

use crate::join::{Communicator, Join};
use crate::model::{Cause, Evidence, Finding, FindingEvent, FindingId, Liveness, Rank, rank_list};
use ledger::Ledger;
pub(crate) use ledger::most_recent;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// One way in which a job can be sick.
pub trait Rule: std::fmt::Debug + Send {
    /// The findings now.
    fn check(&self, join: &Join, now_ns: u64) -> Vec<Finding>;
}

/// When the rules speak.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    /// How long ranks wait in an operation before a rank that did not issue it is missing, in ns.
    #[serde(rename = "patience_ms", with = "ms")]
    #[schemars(with = "u64")]
    pub patience_ns: u64,
    /// The longest that this becomes where a job's own rhythm is slow, in ns.
    #[serde(rename = "patience_most_ms", with = "ms")]
    #[schemars(with = "u64")]
    pub patience_most_ns: u64,
    /// The same, when that rank's process is gone, or it has aborted: the others might be on their way out too.
    #[serde(rename = "patience_gone_ms", with = "ms")]
    #[schemars(with = "u64")]
    pub patience_gone_ns: u64,
    /// How long a circle of communicators has to stand that the GPUs' starts prove, in ns: NCCL tells of starts late.
    #[serde(rename = "settle_circle_ms", with = "ms")]
    #[schemars(with = "u64")]
    pub settle_circle_ns: u64,
    /// The same, where it may be a slow start: in a communicator's first operation.
    #[serde(rename = "patience_unsure_ms", with = "ms")]
    #[schemars(with = "u64")]
    pub patience_unsure_ns: u64,
    /// The same, where no stamp says that a GPU began to wait: it may be queued behind a computation.
    #[serde(rename = "patience_silent_ms", with = "ms")]
    #[schemars(with = "u64")]
    pub patience_silent_ns: u64,
    /// The same, where all ranks issued the operation and no stamp says that a GPU began.
    #[serde(rename = "patience_blind_ms", with = "ms")]
    #[schemars(with = "u64")]
    pub patience_blind_ns: u64,
    /// How long a rank may be away in its own code before that is critical, in ns; longer where the job is used to it.
    #[serde(rename = "patience_away_ms", with = "ms")]
    #[schemars(with = "u64")]
    pub patience_away_ns: u64,
    /// How long a mismatch waits for the next operations, which tell a wrong call from one too many, in ns.
    #[serde(rename = "settle_shift_ms", with = "ms")]
    #[schemars(with = "u64")]
    pub settle_shift_ns: u64,
    /// How long a communicator may be in the making before ranks that have not joined it are missing, in ns.
    #[serde(rename = "patience_init_ms", with = "ms")]
    #[schemars(with = "u64")]
    pub patience_init_ns: u64,
    /// Lateness that is told at once, in ns.
    #[serde(rename = "late_at_once_ms", with = "ms")]
    #[schemars(with = "u64")]
    pub late_at_once_ns: u64,
    /// Lateness in ns that is told when it repeats; less is told where it costs enough for a warning.
    #[serde(rename = "late_often_ms", with = "ms")]
    #[schemars(with = "u64")]
    pub late_often_ns: u64,
    /// How often it has to repeat.
    pub late_times: usize,
    /// Operations of a communicator before lateness is told at all.
    pub warm_up: u64,
    /// And before lateness counts that has to repeat.
    pub warm_up_often: u64,
    /// A straggler that was not late again for this long is over, in ns.
    #[serde(rename = "late_over_ms", with = "ms")]
    #[schemars(with = "u64")]
    pub late_over_ns: u64,
    /// Something slow is a warning from this share of the job's time in its last minute on, in per cent.
    pub warning_cost_percent: u32,
    /// A finding that its rule has not given again for this long is over, in ns.
    #[serde(rename = "settle_ms", with = "ms")]
    #[schemars(with = "u64")]
    pub settle_ns: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            patience_ns: 3_000_000_000,
            patience_most_ns: 60_000_000_000,
            patience_gone_ns: 150_000_000,
            settle_circle_ns: 150_000_000,
            patience_away_ns: 30_000_000_000,
            settle_shift_ns: 100_000_000,
            patience_unsure_ns: 30_000_000_000,
            patience_silent_ns: 4_000_000_000,
            patience_blind_ns: 10_000_000_000,
            patience_init_ns: 30_000_000_000,
            late_at_once_ns: 200_000_000,
            late_often_ns: 5_000_000,
            late_times: 5,
            warm_up: 8,
            warm_up_often: 24,
            late_over_ns: 60_000_000_000,
            warning_cost_percent: 3,
            settle_ns: 2_000_000_000,
        }
    }
}

/// Times are written in ms, and counted in ns.
mod ms {
    use serde::{Deserialize, Deserializer, Serializer, de};

    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks for a reference")]
    pub(super) fn serialize<S: Serializer>(ns: &u64, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_u64(ns / 1_000_000)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<u64, D::Error> {
        let ms = u64::deserialize(d)?;
        ms.checked_mul(1_000_000).ok_or_else(|| de::Error::custom("too many milliseconds"))
    }
}

/// How often the slow kinds are looked for, in ns.
const SLOW_EVERY_NS: u64 = 1_000_000_000;
/// Rules that go through all classes of operations run once for each so many classes.
const SLOW_CLASSES: usize = 65_536;
/// Culprits that are described one by one.
const DESCRIBED: usize = 8;

/// All rules, and what they found so far.
#[derive(Debug)]
pub struct Detector {
    rules: Vec<Box<dyn Rule>>,
    straggler: StragglerRule,
    /// Rules about machines and nodes, asked once a second.
    slow: Vec<Box<dyn Rule>>,
    slow_ns: Option<u64>,
    /// Rules about classes of operations, asked as often, or more rarely where there are very
    /// many; and what they gave last.
    of_classes: Vec<Box<dyn Rule>>,
    of_classes_ns: Option<u64>,
    baselines: Vec<Baseline>,
    given: Vec<FindingId>,
    ledger: Ledger,
    settings: Settings,
}

impl Detector {
    /// With every rule.
    pub fn new(settings: Settings) -> Self {
        let (rules, straggler) = (fast_rules(settings), StragglerRule::new(settings));
        let (slow, of_classes) = (slow_rules(), class_rules(Vec::new(), settings));
        Detector {
            rules,
            straggler,
            slow,
            slow_ns: None,
            of_classes,
            of_classes_ns: None,
            baselines: Vec::new(),
            given: Vec::new(),
            ledger: Ledger::default(),
            settings,
        }
    }

    /// From now on speaks by these; what was found stays.
    pub fn set(&mut self, settings: Settings) {
        self.rules = fast_rules(settings);
        self.straggler = StragglerRule::new(settings);
        self.of_classes = class_rules(self.baselines.clone(), settings);
        self.settings = settings;
    }

    /// Judges transfers by what benchmarks said as well.
    pub fn set_baselines(&mut self, baselines: Vec<Baseline>) {
        self.of_classes = class_rules(baselines.clone(), self.settings);
        self.baselines = baselines;
    }

    /// Takes over findings of an earlier run on this host; those that were open stay so until it shows whether their rules
    /// give them again.
    pub fn restore(&mut self, findings: Vec<Finding>, now_ns: u64) {
        self.ledger.restore(findings, now_ns);
    }

    /// Asks every rule. Returns the changes of findings, each once.
    pub fn check(&mut self, join: &Join, now_ns: u64) -> Vec<FindingEvent> {
        let mut seen = BTreeSet::new();
        let mut given: Vec<Finding> = self.rules.iter().flat_map(|r| r.check(join, now_ns)).collect();
        let ledger = &self.ledger;
        let told = |comm, track, order, rank| ledger.holds_up(comm, track, order, rank);
        given.extend(self.straggler.check_but(join, now_ns, &told));
        if self.slow_ns.is_none_or(|t| now_ns.saturating_sub(t) >= SLOW_EVERY_NS) {
            self.slow_ns = Some(now_ns);
            given.extend(self.slow.iter().flat_map(|r| r.check(join, now_ns)));
        }
        let every_ns = SLOW_EVERY_NS.saturating_mul((join.class_count() / SLOW_CLASSES).max(1) as u64);
        if self.of_classes_ns.is_none_or(|t| now_ns.saturating_sub(t) >= every_ns) {
            self.of_classes_ns = Some(now_ns);
            let mut of_classes: Vec<Finding> =
                self.of_classes.iter().flat_map(|r| r.check(join, now_ns)).collect();
            let known: Vec<&Finding> = given.iter().chain(&of_classes).collect();
            let of_work = straggler::longer_work(join, now_ns, &known);
            of_classes.extend(of_work);
            self.given = of_classes.iter().map(Finding::named).collect();
            given.extend(of_classes);
        } else {
            // What they gave holds until they are asked again.
            for id in &self.given {
                self.ledger.confirm(*id, join, now_ns);
            }
            seen.extend(&self.given);
        }
        // Records that were not read yet may refute a finding.
        given.retain(|f| !join.has_unread(f.communicator, now_ns));
        seen.extend(self.ledger.open().filter(|f| join.has_unread(f.communicator, now_ns)).map(|f| f.id));
        for mut finding in given {
            let id = self.ledger.name(&finding);
            seen.insert(id);
            finding.communicator_name = join.communicator(finding.communicator).and_then(Communicator::name);
            cost::hold_severity(&mut finding, self.ledger.get(id), &self.settings);
            let is_of_device = |k: &&Finding| !finding.open && matches!(k.cause, Some(Cause::Device(..)));
            match self.ledger.get(id).filter(is_of_device) {
                // What its devices did is forgotten in time; what it was told with stays.
                Some(k) => {
                    finding.cause.clone_from(&k.cause);
                    finding.evidence.clone_from(&k.evidence);
                    finding.advice.clone_from(&k.advice);
                }
                None => hardware::explain(&mut finding, join, now_ns),
            }
            self.ledger.take(Finding { id, ..finding }, join, now_ns);
        }
        self.ledger.pass(join, &seen, self.settings.settle_ns, now_ns)
    }

    /// How many findings of each user are left out, since the user has too many open ones.
    pub fn left_out(&self) -> &BTreeMap<Option<u32>, usize> {
        self.ledger.left_out()
    }

    /// Everything found so far, open findings first, then by time.
    pub fn findings(&self) -> Vec<Finding> {
        self.ledger.findings()
    }
}

#[cfg(test)]
impl Detector {
    /// Asks every rule, and returns what was opened.
    fn opened(&mut self, join: &Join, now_ns: u64) -> Vec<Finding> {
        FindingEvent::opened(&self.check(join, now_ns)).cloned().collect()
    }
}

fn fast_rules(settings: Settings) -> Vec<Box<dyn Rule>> {
    vec![
        Box::new(MismatchRule::new(settings)),
        Box::new(HangRule::new(settings)),
        Box::new(NeverJoinedRule::new(settings)),
        Box::new(SplitChoiceRule::new(settings)),
        Box::new(tuner_rules::TunerRulesRule),
    ]
}

fn slow_rules() -> Vec<Box<dyn Rule>> {
    vec![Box::new(hardware::HardwareRule), Box::new(nodes::NodeRule)]
}

fn class_rules(baselines: Vec<Baseline>, settings: Settings) -> Vec<Box<dyn Rule>> {
    vec![Box::new(SlowTransferRule::new(baselines, settings)), Box::new(ChoiceRule), Box::new(UsageRule)]
}

/// A moment as RFC 3339, as far as the job's own pair of clocks tells it.
fn wall(join: &Join, mono_ns: u64) -> Option<String> {
    rfc3339(join.unix_ns(mono_ns)?)
}

/// A moment of the wall clock, ns since the epoch, as RFC 3339 in UTC.
pub(crate) fn rfc3339(unix_ns: u64) -> Option<String> {
    let at = time::OffsetDateTime::from_unix_timestamp_nanos(i128::from(unix_ns)).ok()?;
    let millis = at.replace_nanosecond(at.nanosecond() / 1_000_000 * 1_000_000).ok()?;
    millis.format(&time::format_description::well_known::Rfc3339).ok()
}

/// Adds what the host knows of a finding's culprits, which held up others between two moments.
fn add_host_facts(f: &mut Finding, join: &Join, comm: &Communicator, from_ns: u64, to_ns: u64) {
    let mut advised = false;
    for rank in f.ranks.iter().take(DESCRIBED) {
        let process = comm.members().get(rank).and_then(|m| join.process(m.record.segment));
        let Some(process) = process else { continue };
        let suspect = host::Suspect { rank: *rank, process, from_ns, to_ns };
        f.evidence.extend(if f.kind.is_hang() { suspect.evidence() } else { suspect.wants() });
        if !advised {
            let advice = suspect.advice();
            advised = !advice.is_empty();
            f.advice += &advice;
        }
    }
}

fn fact(text: impl Into<String>) -> Evidence {
    Evidence { text: text.into(), value: None, unit: None }
}

fn number(text: impl Into<String>, value: f64, unit: &'static str) -> Evidence {
    Evidence { text: text.into(), value: Some(value), unit: Some(unit.into()) }
}

/// Three digits behind the point.
fn rounded(n: f64) -> f64 {
    (n * 1e3).round() / 1e3
}

fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

/// `rank 3`, `ranks 0, 1, 2`.
fn names(ranks: &[Rank]) -> String {
    format!("{} {}", if ranks.len() == 1 { "rank" } else { "ranks" }, rank_list(ranks))
}

/// A verb that agrees with the number of ranks: the first form where there is one.
fn verb<'a>(ranks: &[Rank], one: &'a str, several: &'a str) -> &'a str {
    if ranks.len() == 1 { one } else { several }
}

/// The process of a rank: `rank 3 is job rank 3, pid 1136 on host a`.
fn who(join: &Join, comm: &Communicator, rank: Rank) -> Option<Evidence> {
    let member = comm.members().get(&rank)?;
    let p = &join.process(member.record.segment)?.record;
    let job = p.job.rank.map_or_else(String::new, |r| format!("job rank {r}, "));
    let gpu = member.record.gpu.as_ref().map_or_else(String::new, |g| format!(", GPU {g}"));
    if p.liveness == Liveness::Unknown {
        return Some(fact(format!("rank {rank} is {job}by {}", p.path.display())));
    }
    Some(fact(format!("rank {rank} is {job}pid {} ({}) on host {}{gpu}", p.pid, p.program, p.host)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::join::testing::{member, process};
    use crate::model::{CommId, Kind, OperationRef, SegmentId, Track, Update};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    const S: u64 = 1_000_000_000;

    /// Gives a finding for as long as it is told to.
    #[derive(Debug)]
    struct Gives(Arc<AtomicBool>);

    impl Rule for Gives {
        fn check(&self, join: &Join, _now_ns: u64) -> Vec<Finding> {
            let operation = OperationRef::named("AllReduce", Track::Collective, 4);
            let of = |c: &Communicator| {
                Finding::new(Kind::TinyCollectives, c.id, vec![Rank(0)], operation.clone())
            };
            join.communicators().filter(|_| self.0.load(Ordering::Relaxed)).map(of).collect()
        }
    }

    #[test]
    fn what_is_asked_for_rarely_stays_open_until_it_is_asked_for_again() {
        let mut join = Join::new();
        join.feed(process(0));
        join.feed(member(0, 1, 1));
        let gives = Arc::new(AtomicBool::new(true));
        let mut detector = Detector::new(Settings::default());
        detector.of_classes = vec![Box::new(Gives(Arc::clone(&gives)))];
        assert_eq!(detector.opened(&join, S).len(), 1);
        // As where there are so many classes that they are gone through every ten seconds.
        detector.of_classes_ns = Some(10 * S);
        gives.store(false, Ordering::Relaxed);
        for n in 2..=10 {
            assert_eq!(detector.opened(&join, n * S), []);
            let [f] = detector.findings().try_into().expect("one");
            assert_eq!((f.open, f.last_seen_ns), (true, n * S));
        }
        for n in 11..=13 {
            detector.check(&join, n * S);
        }
        assert!(!detector.findings()[0].open, "it was asked for again, and did not come");
    }

    #[test]
    fn what_is_unread_of_another_process_keeps_back_a_verdict_for_a_while_alone() {
        let mut join = Join::new();
        for n in [0, 9] {
            let Update::Segment(mut record) = process(n) else { unreachable!("a process") };
            record.owner = Some(1000);
            join.feed(Update::Segment(record));
        }
        let Update::Comm(mut record) = member(0, 1, 1) else { unreachable!("a member") };
        record.comm = CommId::new(7, Some(1000));
        join.feed(Update::Comm(record));
        let mut detector = Detector::new(Settings::default());
        detector.rules = vec![Box::new(Gives(Arc::new(AtomicBool::new(true))))];
        // The other process is never read to its end; nor is, from 12 s on, the one that the verdict is about.
        for n in 1..=10 {
            join.set_unread(vec![SegmentId(10)], n * S);
            assert_eq!(detector.opened(&join, n * S), [], "{n} s");
        }
        join.set_unread(vec![SegmentId(10)], 11 * S);
        assert_eq!(detector.opened(&join, 11 * S).len(), 1);
        let mut detector = Detector::new(Settings::default());
        detector.rules = vec![Box::new(Gives(Arc::new(AtomicBool::new(true))))];
        for n in 12..=30 {
            join.set_unread(vec![SegmentId(1), SegmentId(10)], n * S);
            assert_eq!(detector.opened(&join, n * S), [], "{n} s");
        }
    }
}
