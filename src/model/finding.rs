//! A finding: what is wrong, who caused it, whom it holds up, and how we know.

use super::{Change, CloseReason, CommId, Confidence, Exit, JobCost, Kind, Rank, Severity, Track};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use std::borrow::Cow;
use std::fmt;

/// Why a rank is missing, late or slow.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Cause {
    /// It is in an operation of another communicator.
    BusyElsewhere(CommId),
    /// Its process is gone, and how it ended, where that is known.
    ProcessGone(Option<Exit>),
    /// A signal or a debugger stopped its process.
    Stopped,
    /// It lives, is in no operation and works or waits in its own code.
    InHostCode,
    /// It never joined the communicator.
    NeverJoined,
    /// Something is wrong with a device that it uses.
    Device(Kind, Place),
    /// Nothing tells.
    Unknown,
}

impl Cause {
    /// The name used in JSON and in text.
    pub const fn as_str(&self) -> &'static str {
        match self {
            Cause::BusyElsewhere(_) => "busy-elsewhere",
            Cause::ProcessGone(_) => "process-gone",
            Cause::Stopped => "stopped",
            Cause::InHostCode => "in-host-code",
            Cause::NeverJoined => "never-joined",
            Cause::Device(kind, _) => kind.as_str(),
            Cause::Unknown => "unknown",
        }
    }
}

impl Serialize for Cause {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        let mut map = s.serialize_map(None)?;
        map.serialize_entry("kind", self.as_str())?;
        match self {
            Cause::BusyElsewhere(comm) => {
                map.serialize_entry("communicator", &comm.to_string())?;
                if let Some(owner) = comm.owner() {
                    map.serialize_entry("owner", &owner)?;
                }
            }
            Cause::ProcessGone(Some(Exit::Code(code))) => map.serialize_entry("exit_code", code)?,
            Cause::ProcessGone(Some(Exit::Signal(n))) => map.serialize_entry("signal", n)?,
            Cause::Device(_, place) => {
                map.serialize_entry("host", &place.host)?;
                map.serialize_entry("device", &place.device)?;
            }
            _ => {}
        }
        map.end()
    }
}

impl<'de> Deserialize<'de> for Cause {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        struct Fields {
            kind: String,
            communicator: Option<String>,
            owner: Option<u32>,
            exit_code: Option<i32>,
            signal: Option<i32>,
            host: Option<String>,
            device: Option<String>,
        }
        let f = Fields::deserialize(d)?;
        let exit = f.exit_code.map(Exit::Code).or(f.signal.map(Exit::Signal));
        let comm = f.communicator.and_then(|c| u64::from_str_radix(&c, 16).ok());
        let comm = comm.map(|hash| CommId::new(hash, f.owner));
        match f.kind.as_str() {
            "busy-elsewhere" => {
                comm.map(Cause::BusyElsewhere).ok_or_else(|| de::Error::missing_field("communicator"))
            }
            "process-gone" => Ok(Cause::ProcessGone(exit)),
            "stopped" => Ok(Cause::Stopped),
            "in-host-code" => Ok(Cause::InHostCode),
            "never-joined" => Ok(Cause::NeverJoined),
            kind => {
                let known = Kind::ALL.iter().copied().find(|k| k.as_str() == kind);
                // A newer agent may know more.
                let place = f.host.zip(f.device).map(|(host, device)| Place { host, device });
                Ok(known.zip(place).map_or(Cause::Unknown, |(k, p)| Cause::Device(k, p)))
            }
        }
    }
}

/// A device, and the host it is in.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Place {
    /// The host.
    pub host: String,
    /// The device in words: `GPU 0000:1a:00.0`, `RDMA port mlx5_0/1`.
    pub device: String,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of host {}", self.device, self.host)
    }
}

/// The name of the making of a communicator in an operation's place.
pub const COMM_INIT: &str = "CommInit";

/// A finding's name, which is the same in every process that sees the same facts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FindingId(pub u64);

impl fmt::Display for FindingId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// Ranks that wait because of a finding's cause, and in what.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Victims {
    /// The communicator: NCCL's number in 16 hexadecimal digits, and beside it its owner's, where that is known.
    #[serde(flatten, with = "communicator")]
    pub communicator: CommId,
    /// The waiting ranks, as that communicator numbers its ranks.
    #[serde(serialize_with = "as_numbers")]
    pub ranks: Vec<Rank>,
    /// The issue order in which they wait.
    pub order: u64,
    /// The track of that order.
    pub track: Track,
}

/// The operation a finding is about. Absent fields are not known.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OperationRef {
    /// Issue order within the communicator, from 0.
    pub order: u64,
    /// Function as NCCL names it, `AllReduce` for example.
    pub func: String,
    /// Message size in bytes as nccl-tests defines it.
    pub bytes: Option<u64>,
    /// Data type as NCCL names it.
    pub dtype: Option<String>,
    /// Algorithm as NCCL names it.
    pub algo: Option<String>,
    /// Protocol as NCCL names it.
    pub proto: Option<String>,
    /// Reduction operation as NCCL names it.
    pub redop: Option<String>,
    /// The track of the order.
    pub track: Track,
}

impl OperationRef {
    /// Something of which only the name and the place are known.
    pub fn named(func: impl Into<String>, track: Track, order: u64) -> Self {
        let func = func.into();
        OperationRef { order, func, bytes: None, dtype: None, algo: None, proto: None, redop: None, track }
    }
}

/// One fact that supports a finding, with its number where it has one.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Evidence {
    /// The fact in words, complete without the number beside it.
    pub text: String,
    /// The number, absent where the fact has none.
    pub value: Option<f64>,
    /// The number's unit: `s`, `bytes`, `count`, `1`.
    pub unit: Option<Cow<'static, str>>,
}

/// A finding: what is wrong, in which communicator, because of which ranks, and what to do next.
///
/// Rules fill what they know of it, beginning with [`Finding::new`]; the detector gives it its id and keeps the
/// times at which it was seen.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Finding {
    /// The kind.
    pub kind: Kind,
    /// The communicator: NCCL's number in 16 hexadecimal digits, and beside it its owner's, where that is known.
    #[serde(flatten, with = "communicator")]
    pub communicator: CommId,
    /// The job's name for the communicator, where it gave one: `tensor`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub communicator_name: Option<String>,
    /// The culprits, as that communicator numbers its ranks.
    #[serde(serialize_with = "as_numbers")]
    pub ranks: Vec<Rank>,
    /// The operation in which it shows.
    pub operation: OperationRef,
    /// When it began, RFC 3339 in UTC; absent when no clock pair is known.
    pub since: Option<String>,
    /// The facts it rests on.
    pub evidence: Vec<Evidence>,
    /// The next thing to do.
    pub advice: String,
    /// Its name, 16 hexadecimal digits.
    #[serde(serialize_with = "as_text", deserialize_with = "finding_id")]
    pub id: FindingId,
    /// Why a rank is missing, late or slow, where that is known.
    pub cause: Option<Cause>,
    /// The device that it is about; absent for findings about ranks. What such a finding names as its communicator is
    /// one that uses the device, or 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub place: Option<Place>,
    /// The ranks that wait because of it.
    pub victims: Vec<Victims>,
    /// How much it matters.
    pub severity: Severity,
    /// How sure it is.
    pub confidence: Confidence,
    /// When it was first seen, RFC 3339 in UTC.
    pub first_seen: Option<String>,
    /// When it was last seen, RFC 3339 in UTC.
    pub last_seen: Option<String>,
    /// False once the condition has passed; a closed finding stays in the summary.
    pub open: bool,
    /// When it was closed, RFC 3339 in UTC; absent while it is open, and where no clock pair is known.
    #[serde(default)]
    pub closed_at: Option<String>,
    /// Why it was closed; absent while it is open.
    #[serde(default)]
    pub close_reason: Option<CloseReason>,
    /// The cost to the job; absent where nothing is slow, and where that is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost: Option<JobCost>,
    /// How often it was opened: more than once where the same comes again, once a loop for example.
    #[serde(default = "once")]
    pub count: u64,
    /// The subject, where that is neither its communicator nor its ranks: a host.
    #[serde(skip)]
    pub subject: Option<String>,
    /// When it began on the host's monotonic clock, in ns.
    #[serde(skip)]
    pub since_ns: u64,
    /// When it was first seen, host monotonic ns.
    #[serde(skip)]
    pub first_seen_ns: u64,
    /// When it was last seen, host monotonic ns.
    #[serde(skip)]
    pub last_seen_ns: u64,
    /// When it was closed, host monotonic ns; 0 while it is open.
    #[serde(skip)]
    pub closed_ns: u64,
}

/// A finding with what its JSON for people leaves out: moments of the host's monotonic clock.
#[derive(Debug, Serialize, Deserialize)]
pub struct TimedFinding<F> {
    finding: F,
    subject: Option<String>,
    since_ns: u64,
    first_seen_ns: u64,
    last_seen_ns: u64,
    #[serde(default)]
    closed_ns: u64,
}

impl<'a> TimedFinding<&'a Finding> {
    /// The finding, to be written.
    pub fn of(f: &'a Finding) -> Self {
        TimedFinding {
            finding: f,
            subject: f.subject.clone(),
            since_ns: f.since_ns,
            first_seen_ns: f.first_seen_ns,
            last_seen_ns: f.last_seen_ns,
            closed_ns: f.closed_ns,
        }
    }
}

impl TimedFinding<Finding> {
    /// The finding, as it was before it was written.
    pub fn whole(self) -> Finding {
        Finding {
            subject: self.subject,
            since_ns: self.since_ns,
            first_seen_ns: self.first_seen_ns,
            last_seen_ns: self.last_seen_ns,
            closed_ns: self.closed_ns,
            ..self.finding
        }
    }
}

/// A change of a finding, which is reported once.
#[derive(Debug, Clone, PartialEq)]
pub struct FindingEvent {
    /// The change.
    pub change: Change,
    /// The finding as it is now.
    pub finding: Finding,
}

impl FindingEvent {
    /// The findings that were opened.
    pub fn opened(events: &[FindingEvent]) -> impl Iterator<Item = &Finding> {
        events.iter().filter(|e| e.change == Change::Opened).map(|e| &e.finding)
    }
}

impl Finding {
    /// A finding with the kind's own severity, proven, open, without victims or evidence.
    pub fn new(kind: Kind, communicator: CommId, ranks: Vec<Rank>, operation: OperationRef) -> Self {
        let mut f = Finding {
            kind,
            communicator,
            communicator_name: None,
            ranks,
            operation,
            since: None,
            evidence: Vec::new(),
            advice: String::new(),
            id: FindingId(0),
            cause: None,
            place: None,
            victims: Vec::new(),
            severity: kind.severity(),
            confidence: Confidence::Proven,
            first_seen: None,
            last_seen: None,
            open: true,
            closed_at: None,
            close_reason: None,
            cost: None,
            count: 1,
            subject: None,
            since_ns: 0,
            first_seen_ns: 0,
            last_seen_ns: 0,
            closed_ns: 0,
        };
        f.id = f.named();
        f
    }

    /// The id that its contents give. A hang is one finding an operation, whatever ranks and whatever kind turn out to
    /// be its cause; what comes again and again is one finding a culprit, however many operations it shows in.
    pub fn named(&self) -> FindingId {
        let mut hash = Fnv::default();
        if let Some(subject) = &self.subject {
            hash.bytes(self.kind.as_str().as_bytes());
            hash.bytes(subject.as_bytes());
            return FindingId(hash.0);
        }
        hash.number(self.communicator.nccl_hash());
        if let Some(owner) = self.communicator.owner() {
            hash.number(u64::from(owner));
        }
        if self.kind.is_hang() {
            hash.bytes(if self.operation.func == COMM_INIT { b"making" } else { b"hang" });
            let (track, a, b) = match self.operation.track {
                Track::Collective => (0, Rank(0), Rank(0)),
                Track::Replay => (1, Rank(0), Rank(0)),
                Track::Pair(a, b) => (2, a, b),
            };
            for n in [track, u64::from(a.0), u64::from(b.0), self.operation.order] {
                hash.number(n);
            }
        } else {
            hash.bytes(self.kind.as_str().as_bytes());
            // This is told of a class of operations, the others of ranks.
            if self.kind == Kind::ChoiceDiffers {
                hash.bytes(self.operation.func.as_bytes());
            }
            self.ranks.iter().for_each(|r| hash.number(u64::from(r.0)));
        }
        FindingId(hash.0)
    }

    /// One line for people: kind, and ranks and operation, or device.
    pub fn headline(&self) -> String {
        if let Some(place) = &self.place {
            let users: usize = self.victims.iter().map(|v| v.ranks.len()).sum();
            let used = match self.victims.as_slice() {
                [] => String::new(),
                [v] => format!(" (rank {} of communicator {})", rank_list(&v.ranks), v.communicator),
                all => format!(" ({users} ranks of {} communicators)", all.len()),
            };
            return format!("{}: {place}{used}", self.kind.as_str());
        }
        let plural = if self.ranks.len() == 1 { "rank" } else { "ranks" };
        let size = self.operation.bytes.map_or_else(String::new, |b| format!(" of {b} bytes"));
        let name = self.communicator_name.as_deref().map_or_else(String::new, |n| format!(" {n:?}"));
        format!(
            "{}: {plural} {} in {}{size} (order {}, communicator {}{name})",
            self.kind.as_str(),
            rank_list(&self.ranks),
            self.operation.func,
            self.operation.order,
            self.communicator
        )
    }
}

/// `0, 1, 2` for a few ranks, `0-16383` where runs make it shorter.
pub fn rank_list(ranks: &[Rank]) -> String {
    /// Up to so many ranks are written out.
    const WRITTEN_OUT: usize = 16;
    /// Up to so many runs are written out.
    const RUNS: usize = 16;
    if ranks.len() <= WRITTEN_OUT {
        return ranks.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    }
    let mut runs: Vec<(u32, u32)> = Vec::new();
    for r in ranks {
        match runs.last_mut() {
            Some(run) if run.1.checked_add(1) == Some(r.0) => run.1 = r.0,
            _ => runs.push((r.0, r.0)),
        }
    }
    let text = |(a, b): &(u32, u32)| if a == b { a.to_string() } else { format!("{a}-{b}") };
    let list: Vec<String> = runs.iter().take(RUNS).map(text).collect();
    let rest: u64 = runs.iter().skip(RUNS).map(|(a, b)| u64::from(b - a) + 1).sum();
    let more = if rest > 0 { format!(" and {rest} more") } else { String::new() };
    list.join(", ") + &more
}

/// FNV-1a: the same in every build and on every machine.
struct Fnv(u64);

impl Default for Fnv {
    fn default() -> Self {
        Fnv(0xcbf2_9ce4_8422_2325)
    }
}

impl Fnv {
    fn bytes(&mut self, bytes: &[u8]) {
        for b in bytes {
            self.0 = (self.0 ^ u64::from(*b)).wrapping_mul(0x100_0000_01b3);
        }
    }

    fn number(&mut self, n: u64) {
        self.bytes(&n.to_le_bytes());
    }
}

/// How often a finding of a release was opened that did not count.
const fn once() -> u64 {
    1
}

fn as_text<S: Serializer>(id: &impl fmt::Display, s: S) -> Result<S::Ok, S::Error> {
    s.collect_str(id)
}

fn hexadecimal<'de, D: Deserializer<'de>>(d: D) -> Result<u64, D::Error> {
    let text = Cow::<'de, str>::deserialize(d)?;
    u64::from_str_radix(&text, 16).map_err(|_| de::Error::custom(format_args!("{text:?} is no id")))
}

/// A communicator as two fields: NCCL's number, and its owner's where that is known.
mod communicator {
    use super::CommId;
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    #[derive(Serialize, Deserialize)]
    struct Fields {
        communicator: String,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        owner: Option<u32>,
    }

    pub(super) fn serialize<S: Serializer>(id: &CommId, s: S) -> Result<S::Ok, S::Error> {
        Fields { communicator: id.to_string(), owner: id.owner() }.serialize(s)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<CommId, D::Error> {
        let f = Fields::deserialize(d)?;
        let hash = u64::from_str_radix(&f.communicator, 16);
        let hash = hash.map_err(|_| D::Error::custom(format_args!("{:?} is no id", f.communicator)))?;
        Ok(CommId::new(hash, f.owner))
    }
}

fn finding_id<'de, D: Deserializer<'de>>(d: D) -> Result<FindingId, D::Error> {
    hexadecimal(d).map(FindingId)
}

#[expect(clippy::ptr_arg, reason = "serde passes the field's own type")]
fn as_numbers<S: Serializer>(ranks: &Vec<Rank>, s: S) -> Result<S::Ok, S::Error> {
    s.collect_seq(ranks.iter().map(|r| r.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn finding(kind: Kind, track: Track, order: u64, ranks: &[u32]) -> Finding {
        let ranks = ranks.iter().copied().map(Rank).collect();
        Finding::new(kind, CommId::unowned(7), ranks, OperationRef::named("AllReduce", track, order))
    }

    #[test]
    fn ids_are_the_same_everywhere_and_survive_a_better_culprit() {
        let one = finding(Kind::Mismatch, Track::Collective, 5, &[1]);
        // The number itself is a promise: alerts and tickets hold it.
        assert_eq!(one.id.to_string(), "734ceb3982931e7f");
        assert_eq!(one.id, finding(Kind::Mismatch, Track::Collective, 5, &[0, 1]).id);
        for other in [
            finding(Kind::Mismatch, Track::Collective, 6, &[1]),
            finding(Kind::Mismatch, Track::Replay, 5, &[1]),
        ] {
            assert_ne!(one.id, other.id);
        }
        // A mismatch that turns out to be a shifted order is still that hang.
        assert_eq!(one.id, finding(Kind::ShiftedOrder, Track::Collective, 5, &[1]).id);
        let late = finding(Kind::Straggler, Track::Collective, 5, &[1]);
        assert_eq!(late.id, finding(Kind::Straggler, Track::Collective, 9, &[1]).id);
        assert_ne!(late.id, finding(Kind::Straggler, Track::Collective, 5, &[2]).id);
    }

    #[test]
    fn a_device_is_named_where_there_is_one_and_nothing_is_added_elsewhere() {
        let mut f = finding(Kind::LinkDown, Track::Collective, 0, &[]);
        let text = |f: &Finding| serde_json::to_string(f).expect("it can be written");
        assert!(!text(&f).contains("place"), "{}", text(&f));
        let place = Place { host: "a".to_owned(), device: "GPU 0000:1a:00.0".to_owned() };
        f.cause = Some(Cause::Device(Kind::LinkDown, place.clone()));
        f.place = Some(place);
        assert!(text(&f).contains(r#""place":{"host":"a","device":"GPU 0000:1a:00.0"}"#), "{}", text(&f));
        assert!(text(&f).contains(r#""cause":{"kind":"link-down","host":"a","#), "{}", text(&f));
        assert_eq!(f.headline(), "link-down: GPU 0000:1a:00.0 of host a");
    }

    #[test]
    fn long_lists_of_ranks_become_runs() {
        let ranks = |n: std::ops::Range<u32>| n.map(Rank).collect::<Vec<_>>();
        assert_eq!(rank_list(&ranks(0..3)), "0, 1, 2");
        assert_eq!(rank_list(&ranks(0..16_384)), "0-16383");
        let every_other: Vec<Rank> = (0..64).map(|n| Rank(2 * n)).collect();
        assert!(rank_list(&every_other).ends_with("28, 30 and 48 more"));
    }
}
