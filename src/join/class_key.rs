//! The key of a class of operations, and the figures that its statistics give.

use crate::model::{Algo, CommId, Func, Proto, Rank};

/// The key of a class.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ClassKey {
    /// The communicator.
    pub comm: CommId,
    /// The operation.
    pub func: Func,
    /// `floor(log2(bytes))`; absent without a size, and for empty messages.
    pub size_class: Option<u8>,
    /// Algorithm.
    pub algo: Option<Algo>,
    /// Protocol.
    pub proto: Option<Proto>,
}

/// Size class of a message: messages of 2^class up to 2^(class+1)-1 bytes share one.
pub fn size_class(bytes: u64) -> Option<u8> {
    bytes.checked_ilog2().and_then(|n| u8::try_from(n).ok())
}

/// The properties that make transfers comparable in time: sizes of one class differ by up to two, and times with them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Transfer {
    /// Message size in bytes.
    pub bytes: u64,
    /// The ranks of a transfer from one to another.
    pub pair: Option<(Rank, Rank)>,
    /// True where CUDA events timed it, in which the launch counts too.
    pub by_events: bool,
}

/// Rates of a class. What no operation told is absent.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rates {
    /// Operations a second.
    pub ops_per_s: f64,
    /// Message bytes a second.
    pub bytes_per_s: Option<f64>,
    /// Share of wall time, 0 to 1, mean over the timed ranks.
    pub share: Option<f64>,
}

/// How busy a class was for some time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Load {
    /// Share of wall time, 0 to 1, mean over the timed ranks.
    pub share: Option<f64>,
    /// Seconds in which it had operations.
    pub seconds: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn size_classes_are_powers_of_two() {
        assert_eq!(size_class(0), None);
        assert_eq!(size_class(1), Some(0));
        assert_eq!(size_class(1023), Some(9));
        assert_eq!(size_class(1024), Some(10));
        assert_eq!(size_class(u64::MAX), Some(63));
    }
}
