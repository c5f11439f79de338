//! The content of a screen or a report at one moment. Absent is `None`, never 0.

use super::{Algo, CommId, Finding, Fleet, Func, Lane, Proto, Rank, Unread, hides_operations};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

/// How far an operation has come on one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum OpState {
    /// The rank has not issued it.
    NotIssued,
    /// The API was called; NCCL has not issued it.
    Called,
    /// Issued to the GPU; nothing says that it started.
    Issued,
    /// Started on the GPU.
    Started,
    /// Started, and its data is on its way through the network.
    Progressing,
    /// Finished.
    Finished,
    /// The record was lost or says too little.
    InDoubt,
}

impl OpState {
    /// Every state.
    pub const ALL: [OpState; 7] = [
        OpState::NotIssued,
        OpState::Called,
        OpState::Issued,
        OpState::Started,
        OpState::Progressing,
        OpState::Finished,
        OpState::InDoubt,
    ];

    /// One character, so that the state never rests on colour alone.
    pub const fn mark(self) -> char {
        match self {
            OpState::NotIssued => '!',
            OpState::Called => 'c',
            OpState::Issued => 'i',
            OpState::Started => '>',
            OpState::Progressing => '~',
            OpState::Finished => '=',
            OpState::InDoubt => '?',
        }
    }

    /// The state in words.
    pub const fn as_str(self) -> &'static str {
        match self {
            OpState::NotIssued => "not issued",
            OpState::Called => "called",
            OpState::Issued => "issued",
            OpState::Started => "started",
            OpState::Progressing => "on the network",
            OpState::Finished => "finished",
            OpState::InDoubt => "in doubt",
        }
    }
}

/// One job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct JobRow {
    /// Its name; absent when the environment names none.
    pub name: Option<String>,
    /// Processes that run.
    pub alive: usize,
    /// Processes that are gone.
    pub gone: usize,
    /// Processes of which nobody knows whether they run: files describe them.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub unknown: usize,
    /// Processes the job should have.
    pub size: Option<u32>,
    /// Its communicators.
    pub comms: usize,
    /// NCCL's versions, joined by `, ` if several.
    pub nccl: Option<String>,
    /// Operations a second over the last seconds, all ranks together.
    pub ops_per_s: Option<f64>,
    /// Share of wall time its ranks spent inside collectives, 0 to 1.
    pub comm_share: Option<f64>,
    /// The sums for a report.
    #[serde(default)]
    pub sums: JobSums,
}

/// True for a count that is left out of JSON.
#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
pub(crate) fn is_zero(n: &usize) -> bool {
    *n == 0
}

/// The sums of a job since it was first seen, for a report. Empty on a screen of a cluster.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct JobSums {
    /// Its communicators.
    pub comms: Vec<CommId>,
    /// The hosts of its processes, by name.
    pub hosts: Vec<String>,
    /// From the beginning of its first process to the end of its last one, or to now, in ns. Absent where the end was not
    /// seen and nothing it did says when it was.
    pub seen_ns: Option<u64>,
    /// Share of that time that its ranks spent inside collectives, 0 to 1, as far as these are timed.
    pub comm_share: Option<f64>,
    /// Records that were lost, by reason.
    pub lost: Vec<(Cow<'static, str>, u64)>,
}

/// Of how many operations the GPU time is known; each rank's part is one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Coverage {
    /// Operations issued, as far as their records were read.
    pub operations: u64,
    /// The number with a GPU time.
    pub timed: u64,
    /// The number whose stamps cannot be true; they count as not timed.
    pub impossible: u64,
}

impl Coverage {
    /// The share that is timed, 0 to 1; absent without operations.
    pub fn share(&self) -> Option<f64> {
        (self.operations > 0).then(|| self.timed as f64 / self.operations as f64)
    }
}

impl std::ops::Add for Coverage {
    type Output = Coverage;

    fn add(self, o: Coverage) -> Coverage {
        Coverage {
            operations: self.operations + o.operations,
            timed: self.timed + o.timed,
            impossible: self.impossible + o.impossible,
        }
    }
}

/// One communicator.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CommRow {
    /// The communicator.
    pub id: CommId,
    /// The user's name for it.
    pub name: Option<String>,
    /// Ranks it has.
    pub ranks: Option<u32>,
    /// Ranks whose segments are seen here.
    pub seen: usize,
    /// Nodes it spans.
    pub nodes: Option<u32>,
    /// Collectives issued by the rank that is furthest.
    pub issued: u64,
    /// Collectives finished on all ranks seen.
    pub finished: u64,
    /// Collectives in flight.
    pub in_flight: usize,
    /// Collectives a second over the last seconds.
    pub ops_per_s: Option<f64>,
    /// Of how many operations the GPU time is known.
    pub coverage: Coverage,
    /// True once all its ranks have freed it.
    pub closed: bool,
}

/// One rank's part of an operation in flight.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankCell {
    /// The rank.
    pub rank: Rank,
    /// How far it is.
    pub state: OpState,
}

/// One operation in flight.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FlightRow {
    /// The communicator.
    pub comm: CommId,
    /// The lane of the issue order.
    pub lane: Lane,
    /// Issue order.
    pub order: u64,
    /// The operation, as the rank that issued it first names it.
    pub func: Func,
    /// Message size.
    pub bytes: Option<u64>,
    /// Algorithm.
    pub algo: Option<Algo>,
    /// Protocol.
    pub proto: Option<Proto>,
    /// Time since the first rank issued it, in ns.
    pub age_ns: u64,
    /// Every rank's state, by rank.
    pub ranks: Vec<RankCell>,
}

/// One class of operations: same communicator, operation, size class, algorithm and protocol.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ClassRow {
    /// The communicator.
    pub comm: CommId,
    /// The operation.
    pub func: Func,
    /// Algorithm.
    pub algo: Option<Algo>,
    /// Protocol.
    pub proto: Option<Proto>,
    /// Size class: messages of at least 2^class and less than 2^(class+1) bytes. Absent without a size.
    pub size_class: Option<u8>,
    /// Operations seen.
    pub count: u64,
    /// True where these are a sample of the operations, and how many there are in all is not known.
    #[serde(default)]
    pub sampled: bool,
    /// Operations whose transfer time is known.
    pub timed: u64,
    /// The number of them that CUDA events timed on some rank, in place of the kernels' own stamps.
    #[serde(default)]
    pub by_events: u64,
    /// Message bytes of all operations seen; absent where the size of any is not known.
    #[serde(default)]
    pub bytes: Option<u64>,
    /// Operations a second over the last seconds.
    pub ops_per_s: Option<f64>,
    /// Message bytes a second over the last seconds.
    pub bytes_per_s: Option<f64>,
    /// Median transfer time in ns.
    pub p50_ns: Option<f64>,
    /// 99th percentile of the transfer time in ns.
    pub p99_ns: Option<f64>,
    /// Bus bandwidth at the median, in bytes a second, by nccl-tests' definition.
    pub busbw: Option<f64>,
    /// Share of wall time spent in this class, 0 to 1, mean over ranks.
    pub share: Option<f64>,
    /// Transfer times of the last seconds in ns, oldest first, one value a second; absent seconds are `None`.
    pub spark: Vec<Option<f64>>,
}

/// One rank of one communicator.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RankRow {
    /// The communicator.
    pub comm: CommId,
    /// The rank.
    pub rank: Rank,
    /// Process id.
    pub pid: u32,
    /// Host name.
    pub host: String,
    /// The rank in the job, from its environment.
    pub job_rank: Option<u32>,
    /// False when the process is gone.
    pub alive: bool,
    /// PCI address of its GPU.
    pub gpu: Option<String>,
    /// Collectives issued.
    pub issued: u64,
    /// Collectives finished.
    pub finished: u64,
    /// State of its oldest unfinished collective; absent when it has none.
    pub state: Option<OpState>,
    /// The ranks it waits for, as far as is known.
    pub waits_for: Vec<Rank>,
    /// Total waiting in ns over the collectives with known waiting.
    pub waiting_ns: Option<u64>,
    /// How often it was the late rank.
    pub late: u64,
    /// Its greatest lateness in ns.
    pub worst_late_ns: Option<u64>,
    /// Wall time that the job lost by its late arrivals, in ns.
    #[serde(default)]
    pub late_cost_ns: u64,
}

/// One process.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SegmentRow {
    /// Process id.
    pub pid: u32,
    /// Host name.
    pub host: String,
    /// The program's name.
    pub program: String,
    /// The rank in the job.
    pub job_rank: Option<u32>,
    /// False when the process is gone.
    pub alive: bool,
    /// NCCL's version.
    pub nccl: Option<String>,
    /// Profiler ABI version.
    pub abi: Option<u32>,
    /// Error bound of the mapping from its GPU's clock to the host's, in ns.
    pub clock_error_ns: Option<u64>,
    /// Records lost in it, all reasons.
    pub lost: u64,
}

/// The steps of a process: what repeats in its calls.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StepRow {
    /// Host name.
    pub host: String,
    /// Process id.
    pub pid: u32,
    /// The rank in the job.
    pub job_rank: Option<u32>,
    /// The communicator of the calls with which steps begin.
    pub comm: CommId,
    /// Steps that were seen whole.
    pub steps: u64,
    /// How often records were lost, each time with a step or more.
    pub interruptions: u64,
    /// Mean time from step to step, by the host's clock, in ns.
    pub mean_ns: f64,
    /// Median of the step times on the GPU, in ns.
    pub p50_ns: Option<f64>,
    /// 99th percentile of them, in ns.
    pub p99_ns: Option<f64>,
    /// Share of the step in NCCL's kernels, 0 to 1, of the steps in which all are timed.
    pub nccl_share: Option<f64>,
    /// The slowest step, where one was notably slower than the median.
    pub slowest: Option<SlowStep>,
    /// The change of the step time from the first quarter of the steps to the last one, relatively: 0.1 is a tenth slower. Medians are
    /// compared.
    #[serde(default)]
    pub drift: Option<f64>,
    /// Step times over time, oldest first; for charts alone.
    #[serde(skip)]
    pub series: Vec<StepPoint>,
}

/// The mean time of steps that follow each other.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct StepPoint {
    /// When the first of them began, host monotonic ns.
    pub at_ns: u64,
    /// The number of steps.
    pub steps: u64,
    /// From call to call, by the host's clock, in ns.
    pub host_ns: f64,
    /// From kernel to kernel, in ns.
    pub gpu_ns: Option<f64>,
}

/// A step that took long.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SlowStep {
    /// Its number among those that were seen whole, from 1.
    pub number: u64,
    /// When its first call was issued, host monotonic ns.
    pub at_ns: u64,
    /// The same as `HH:MM:SS` in UTC.
    pub at: Option<String>,
    /// How long it took, in ns.
    pub took_ns: u64,
    /// The thing that took longer than usual, in words.
    pub cause: Option<String>,
}

/// Records that were lost, where and by reason.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LossRow {
    /// Process id.
    pub pid: u32,
    /// The reason, `segment: ring overwritten` for example.
    pub reason: Cow<'static, str>,
    /// How many.
    pub count: u64,
}

/// Everything a screen needs, at one moment.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Snapshot {
    /// The moment, host monotonic ns.
    pub at_ns: u64,
    /// The moment as `HH:MM:SS` in UTC; absent when no clock pair is known.
    pub wall: Option<String>,
    /// Where the data comes from, in words.
    pub source: String,
    /// Jobs.
    pub jobs: Vec<JobRow>,
    /// Communicators.
    pub comms: Vec<CommRow>,
    /// Operations in flight, oldest first.
    pub in_flight: Vec<FlightRow>,
    /// Classes of operations, the one with the greatest share of time first.
    pub classes: Vec<ClassRow>,
    /// Ranks, by communicator and rank.
    pub ranks: Vec<RankRow>,
    /// Findings, open ones first.
    #[serde(with = "timed")]
    pub findings: Vec<Finding>,
    /// Findings that are left out, since their user has too many.
    #[serde(default)]
    pub more_findings: u64,
    /// Processes.
    pub segments: Vec<SegmentRow>,
    /// Losses by process and reason.
    pub losses: Vec<LossRow>,
    /// Steps, by process; absent where nobody measured them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub steps: Option<Vec<StepRow>>,
    /// Segments and directories that are not read: nothing here is about them.
    #[serde(default)]
    pub unread: Vec<Unread>,
    /// Not every place was searched yet: there may be segments that are neither shown nor unread.
    #[serde(default)]
    pub unsearched: bool,
    /// The cluster around it; absent where one host is shown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fleet: Option<Fleet>,
}

/// Findings with what their JSON for people leaves out.
mod timed {
    use super::Finding;
    use crate::model::TimedFinding;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(findings: &[Finding], s: S) -> Result<S::Ok, S::Error> {
        s.collect_seq(findings.iter().map(TimedFinding::of))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<Vec<Finding>, D::Error> {
        let all = Vec::<TimedFinding<Finding>>::deserialize(d)?;
        Ok(all.into_iter().map(TimedFinding::whole).collect())
    }
}

impl Snapshot {
    /// Of how many operations the GPU time is known, in all communicators.
    pub fn coverage(&self) -> Coverage {
        self.comms.iter().fold(Coverage::default(), |sum, c| sum + c.coverage)
    }

    /// Operations of running processes of which nothing is known since their records were lost: each reason, how many records,
    /// and of how many processes.
    pub fn hidden(&self) -> BTreeMap<&str, (u64, usize)> {
        let alive: BTreeSet<u32> = self.segments.iter().filter(|s| s.alive).map(|s| s.pid).collect();
        let mut hidden = BTreeMap::new();
        for l in self.losses.iter().filter(|l| alive.contains(&l.pid) && hides_operations(&l.reason)) {
            let (records, processes) = hidden.entry(&*l.reason).or_insert((0u64, 0));
            *records = records.saturating_add(l.count);
            *processes += 1;
        }
        hidden
    }

    /// All losses together.
    pub fn lost(&self) -> u64 {
        self.losses.iter().fold(0, |sum, l| sum.saturating_add(l.count))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Cause, Evidence, Exit, Kind, OperationRef, Place, Track};

    #[test]
    fn what_goes_over_a_socket_is_what_was_sent() {
        let comm = CommId::unowned(u64::MAX);
        let track = Track::Pair(Rank(1), Rank(16_383));
        let mut f =
            Finding::new(Kind::MissingRank, comm, vec![Rank(3)], OperationRef::named("Send", track, 7));
        f.evidence.push(Evidence { text: "waits".into(), value: Some(3.5), unit: Some("s".into()) });
        for cause in [
            None,
            Some(Cause::BusyElsewhere(CommId::unowned(9))),
            Some(Cause::ProcessGone(Some(Exit::Signal(9)))),
            Some(Cause::ProcessGone(Some(Exit::Code(1)))),
            Some(Cause::InHostCode),
            Some(Cause::Device(Kind::Xid, Place { host: "a".into(), device: "GPU 0".into() })),
        ] {
            f.cause = cause;
            let text = serde_json::to_string(&f).expect("text");
            assert_eq!(serde_json::from_str::<Finding>(&text).expect("read"), f);
        }
        (f.since_ns, f.first_seen_ns, f.last_seen_ns) = (1, 2, 3);
        f.subject = Some("node7".into());
        let s = Snapshot {
            at_ns: u64::MAX,
            source: "agent".into(),
            comms: vec![CommRow {
                id: comm,
                name: None,
                ranks: Some(4),
                seen: 4,
                nodes: None,
                issued: 3,
                finished: 2,
                in_flight: 1,
                ops_per_s: Some(0.1),
                coverage: Coverage::default(),
                closed: false,
            }],
            in_flight: vec![FlightRow {
                comm,
                lane: Lane::Send(Rank(2)),
                order: 7,
                func: Func::AllReduce,
                bytes: None,
                algo: Some(Algo::Ring),
                proto: Some(Proto::Ll128),
                age_ns: 1,
                ranks: vec![RankCell { rank: Rank(0), state: OpState::Called }],
            }],
            losses: vec![LossRow { pid: 1, reason: "stale handle".into(), count: 2 }],
            findings: vec![f],
            ..Snapshot::default()
        };
        let text = serde_json::to_string(&s).expect("text");
        assert_eq!(serde_json::from_str::<Snapshot>(&text).expect("read"), s);
        for wrong in ["\"sideways\"", "\"1->\"", "3"] {
            assert!(serde_json::from_str::<Track>(wrong).is_err(), "{wrong}");
        }
    }
}
