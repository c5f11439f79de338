//! The names of findings: what is wrong, how bad and how sure it is, and what becomes of it.

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use std::borrow::Cow;

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
        /// All of a job stands still, and nothing tells in which operation.
        Standstill = "standstill",
        /// A rank arrives late and the others wait for it.
        Straggler = "straggler",
        /// Transfers are slower than they were learned to be: the fabric, not a rank.
        SlowTransfer = "slow-transfer",
        /// From some moment on a class of operations takes longer.
        ChangePoint = "change-point",
        /// Transfers between two ranks are slow.
        SlowPair = "slow-pair",
        /// The operations that one node takes part in are slow.
        SlowNode = "slow-node",
        /// NCCL chose another algorithm, protocol or channel count than before, or than on other ranks.
        ChoiceDiffers = "choice-differs",
        /// Many collectives are so small that they cost only latency.
        TinyCollectives = "tiny-collectives",
        /// The job spends much of its time in communication that nothing overlaps.
        CommunicationShare = "communication-share",
        /// Ranks have very different amounts to exchange.
        Imbalance = "imbalance",
        /// Ranks have different rules for NCCL's tuner, which are off therefore.
        TunerRulesDiffer = "tuner-rules-differ",
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
        /// Processes of several nodes claim one rank.
        RankConflict = "rank-conflict",
    }
}
spelled! {
    /// How much a finding matters.
    Severity {
        /// Worth knowing; it costs the job little, or nobody knows what it costs.
        Info = "info",
        /// It costs the job a notable share of its time, or is about to hold it up.
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

spelled! {
    /// The change of a finding.
    Change {
        /// It was found, for the first time or again.
        Opened = "opened",
        /// Its kind, ranks, cause or severity turned out to be others.
        Updated = "updated",
        /// It is not so any more.
        Closed = "closed",
    }
}
spelled! {
    /// Why a finding was closed.
    CloseReason {
        /// The condition has passed, and the job goes on.
        Resolved = "resolved",
        /// The processes of its communicator have ended.
        JobEnded = "job-ended",
        /// Another finding explains the same better.
        Superseded = "superseded",
        /// It ended while nobody watched, before an agent was restarted for example.
        Unobserved = "unobserved",
    }
}

impl Severity {
    /// True from [`Severity::Warning`] on. Exit codes, `ringwatch run` and the alert rules go by these findings.
    pub const fn is_alarm(self) -> bool {
        !matches!(self, Severity::Info)
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
            // What these cost is not known.
            Kind::TinyCollectives | Kind::CommunicationShare | Kind::ChoiceDiffers | Kind::Imbalance => {
                Severity::Info
            }
            _ => Severity::Warning,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_spelled_once() {
        let names: std::collections::BTreeSet<&str> = Kind::ALL.iter().map(|k| k.as_str()).collect();
        assert_eq!(names.len(), Kind::ALL.len());
        assert!(Severity::Critical.is_alarm() && Severity::Warning.is_alarm() && !Severity::Info.is_alarm());
        assert!(Kind::AbortedRank.is_hang() && !Kind::Straggler.is_hang());
        assert!(!Kind::Imbalance.is_device() && Kind::SlowGpu.is_device() && !Kind::SlowGpu.is_hang());
    }
}
