//! A finding: what is wrong, who caused it, whom it holds up, and how we know.

use super::{CommId, Exit, Rank, Track};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use std::borrow::Cow;
use std::fmt;

macro_rules! spelled {
    ($(#[$doc:meta])* $name:ident { $($(#[$line:meta])* $variant:ident = $text:literal),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum $name { $($(#[$line])* $variant),+ }
        impl $name {
            /// Every value, in order.
            pub const ALL: &'static [$name] = &[$($name::$variant),+];
            /// The name used in JSON, in text and on the screen.
            pub const fn as_str(self) -> &'static str {
                match self { $($name::$variant => $text),+ }
            }
        }
        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
                s.serialize_str(self.as_str())
            }
        }
        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
                let text = Cow::<'de, str>::deserialize(d)?;
                let known = Self::ALL.iter().copied().find(|v| v.as_str() == text);
                known.ok_or_else(|| de::Error::custom(format_args!(concat!("{:?} is no ", stringify!($name)), text)))
            }
        }
    };
}

spelled! {
    /// The kinds of finding, spelled as they are in JSON. Names never change; new ones are added.
    Kind {
        /// Ranks wait in an operation that a rank never issued, or in the making of a communicator that it never
        /// joined.
        MissingRank = "missing-rank",
        /// Ranks issued different operations at one issue order, or do not agree who is in the communicator.
        Mismatch = "mismatch",
        /// A rank is one call ahead of the others or behind them.
        ShiftedOrder = "shifted-order",
        /// Ranks entered two or more communicators in different orders and wait for each other in a circle.
        InterleavedCommunicators = "interleaved-communicators",
        /// A rank sends what its peer does not receive.
        SendWithoutReceive = "send-without-receive",
        /// A rank receives what its peer does not send.
        ReceiveWithoutSend = "receive-without-send",
        /// An operation is issued everywhere and does not start on a GPU.
        NotStarted = "not-started",
        /// An operation started everywhere and does not end.
        StuckTransfer = "stuck-transfer",
        /// A rank did not replay a CUDA graph that the others replayed.
        MissingReplay = "missing-replay",
        /// A rank aborted the communicator while others wait in it.
        AbortedRank = "aborted-rank",
        /// A rank arrives late and the others wait for it.
        Straggler = "straggler",
        /// Transfers are slower than they were learned to be: the fabric, not a rank.
        SlowTransfer = "slow-transfer",
        /// From some moment on a class of operations takes longer.
        ChangePoint = "change-point",
        /// Transfers between two ranks are slow.
        SlowPair = "slow-pair",
        /// What one node takes part in is slow.
        SlowNode = "slow-node",
        /// NCCL chose another algorithm, protocol or channel count than before, or than on other ranks.
        ChoiceDiffers = "choice-differs",
        /// Many collectives are so small that they cost only latency.
        TinyCollectives = "tiny-collectives",
        /// The job spends much of its time in communication that nothing overlaps.
        CommunicationShare = "communication-share",
        /// Ranks have very different amounts to exchange.
        Imbalance = "imbalance",
        /// The driver reported an error of a GPU.
        Xid = "xid",
        /// A GPU's memory has errors.
        EccErrors = "ecc-errors",
        /// A link works, and has to send again and again.
        LinkErrors = "link-errors",
        /// A link that was up, or is up on its siblings, is down.
        LinkDown = "link-down",
        /// A busy GPU's way to the host is narrower or slower than both ends can.
        PcieDowngrade = "pcie-downgrade",
        /// A busy GPU's clocks are held down.
        ThrottledGpu = "throttled-gpu",
        /// A GPU runs slower than its siblings in the same communicator on the same host.
        SlowGpu = "slow-gpu",
        /// Nothing is heard of a node on which ranks were at work.
        SilentNode = "silent-node",
        /// A node's wall clock differs from the others'.
        ClockSkew = "clock-skew",
    }
}
spelled! {
    /// How much a finding matters.
    Severity {
        /// Worth knowing; the job is well.
        Info = "info",
        /// The job is slower than it could be.
        Warning = "warning",
        /// The job stands still, or will.
        Critical = "critical",
    }
}
spelled! {
    /// How sure a finding is.
    Confidence {
        /// It follows from the facts; nothing that comes later can change it.
        Proven = "proven",
        /// It rests on time passing without a sign, or on statistics.
        Likely = "likely",
    }
}

impl Kind {
    /// True for the kinds that are about a device, whoever uses it.
    pub const fn is_device(self) -> bool {
        (self as u8) >= (Kind::Xid as u8)
    }

    /// True for the kinds in which ranks stand still.
    pub const fn is_hang(self) -> bool {
        (self as u8) < (Kind::Straggler as u8)
    }

    /// How much it matters, unless its rule knows better.
    pub const fn severity(self) -> Severity {
        match self {
            _ if self.is_hang() => Severity::Critical,
            Kind::TinyCollectives | Kind::CommunicationShare | Kind::ChoiceDiffers => Severity::Info,
            _ => Severity::Warning,
        }
    }
}

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
            Cause::BusyElsewhere(comm) => map.serialize_entry("communicator", &comm.to_string())?,
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
            exit_code: Option<i32>,
            signal: Option<i32>,
            host: Option<String>,
            device: Option<String>,
        }
        let f = Fields::deserialize(d)?;
        let exit = f.exit_code.map(Exit::Code).or(f.signal.map(Exit::Signal));
        let comm = f.communicator.and_then(|c| u64::from_str_radix(&c, 16).ok()).map(CommId);
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

/// What stands for the making of a communicator in an operation's place.
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
    /// The communicator, 16 hexadecimal digits.
    #[serde(serialize_with = "as_text", deserialize_with = "communicator")]
    pub communicator: CommId,
    /// Who waits, as that communicator numbers its ranks.
    #[serde(serialize_with = "as_numbers")]
    pub ranks: Vec<Rank>,
    /// The issue order in which they wait.
    pub order: u64,
    /// Which count that order belongs to.
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
    /// Which count the order belongs to.
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

/// What is wrong, in which communicator, because of which ranks, and what to do next.
///
/// Rules fill what they know of it, beginning with [`Finding::new`]; the detector gives it its id and keeps the
/// times at which it was seen.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Finding {
    /// What is wrong.
    pub kind: Kind,
    /// The communicator, 16 hexadecimal digits.
    #[serde(serialize_with = "as_text", deserialize_with = "communicator")]
    pub communicator: CommId,
    /// The culprits, as that communicator numbers its ranks.
    #[serde(serialize_with = "as_numbers")]
    pub ranks: Vec<Rank>,
    /// The operation in which it shows.
    pub operation: OperationRef,
    /// When it began, RFC 3339 in UTC; absent when no clock pair is known.
    pub since: Option<String>,
    /// The facts it rests on.
    pub evidence: Vec<Evidence>,
    /// What to do next.
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
    /// Who waits because of it.
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
    /// What it is about, where that is neither its communicator nor its ranks: a host.
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
}

impl Finding {
    /// A finding with the kind's own severity, proven, open, without victims or evidence.
    pub fn new(kind: Kind, communicator: CommId, ranks: Vec<Rank>, operation: OperationRef) -> Self {
        let mut f = Finding {
            kind,
            communicator,
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
            subject: None,
            since_ns: 0,
            first_seen_ns: 0,
            last_seen_ns: 0,
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
        hash.number(self.communicator.0);
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
        format!(
            "{}: {plural} {} in {}{size} (order {}, communicator {})",
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

fn as_text<S: Serializer>(id: &impl fmt::Display, s: S) -> Result<S::Ok, S::Error> {
    s.collect_str(id)
}

fn hexadecimal<'de, D: Deserializer<'de>>(d: D) -> Result<u64, D::Error> {
    let text = Cow::<'de, str>::deserialize(d)?;
    u64::from_str_radix(&text, 16).map_err(|_| de::Error::custom(format_args!("{text:?} is no id")))
}

fn communicator<'de, D: Deserializer<'de>>(d: D) -> Result<CommId, D::Error> {
    hexadecimal(d).map(CommId)
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
        Finding::new(kind, CommId(7), ranks, OperationRef::named("AllReduce", track, order))
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

    #[test]
    fn names_are_spelled_once() {
        let names: std::collections::BTreeSet<&str> = Kind::ALL.iter().map(|k| k.as_str()).collect();
        assert_eq!(names.len(), Kind::ALL.len());
        assert!(Kind::AbortedRank.is_hang() && !Kind::Straggler.is_hang());
        assert!(!Kind::Imbalance.is_device() && Kind::SlowGpu.is_device() && !Kind::SlowGpu.is_hang());
    }
}
