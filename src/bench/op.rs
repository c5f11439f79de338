//! The operations, element types and reductions; their buffers and bandwidths as nccl-tests defines them.

use super::nccl::Call;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// Declares an enum whose values people write as words.
macro_rules! words {
    ($(#[$doc:meta])* $name:ident { $($(#[$vdoc:meta])* $value:ident = $word:literal $(| $alias:literal)*,)* }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
        pub enum $name { $($(#[$vdoc])* #[serde(rename = $word)] $value,)* }

        impl $name {
            /// All of them.
            pub const ALL: &[Self] = &[$(Self::$value,)*];

            /// Its name as nccl-tests has it.
            #[must_use]
            pub fn as_str(self) -> &'static str {
                match self { $(Self::$value => $word,)* }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(self.as_str())
            }
        }

        impl FromStr for $name {
            type Err = String;

            fn from_str(text: &str) -> Result<Self, String> {
                match text {
                    $($word $(| $alias)* => Ok(Self::$value),)*
                    _ => Err(format!("{text:?} is none of {}", [$($word),*].join(", "))),
                }
            }
        }
    };
}

words! {
    /// The operation that is measured.
    Collective {
        /// Every rank gets the reduction of all ranks' data.
        AllReduce = "all_reduce",
        /// Every rank gets the root's data.
        Broadcast = "broadcast",
        /// The root gets the reduction of all ranks' data.
        Reduce = "reduce",
        /// Every rank gets all ranks' parts.
        AllGather = "all_gather",
        /// Every rank gets its part of the reduction.
        ReduceScatter = "reduce_scatter",
        /// Every rank sends a part to every rank: sends and receives in one group.
        AllToAll = "all_to_all" | "alltoall",
        /// Every rank sends to the next one in a ring and receives from the one before.
        SendRecv = "sendrecv",
    }
}

words! {
    /// Element types that a benchmark may use.
    DType {
        /// Signed, 8 bits.
        Int8 = "int8",
        /// Unsigned, 8 bits.
        Uint8 = "uint8",
        /// Signed, 32 bits.
        Int32 = "int32",
        /// Unsigned, 32 bits.
        Uint32 = "uint32",
        /// Signed, 64 bits.
        Int64 = "int64",
        /// Unsigned, 64 bits.
        Uint64 = "uint64",
        /// IEEE half precision.
        Half = "half" | "float16" | "f16",
        /// IEEE single precision.
        Float = "float" | "float32" | "f32",
        /// IEEE double precision.
        Double = "double" | "float64" | "f64",
        /// The upper half of a single-precision number.
        Bfloat16 = "bfloat16" | "bf16",
    }
}

words! {
    /// How values are reduced.
    RedOp {
        /// Added.
        Sum = "sum",
        /// Multiplied.
        Prod = "prod",
        /// The largest.
        Max = "max",
        /// The smallest.
        Min = "min",
        /// The sum divided by the number of ranks.
        Avg = "avg",
    }
}

impl DType {
    /// Bytes of an element.
    #[must_use]
    pub fn bytes(self) -> u64 {
        match self {
            Self::Int8 | Self::Uint8 => 1,
            Self::Half | Self::Bfloat16 => 2,
            Self::Int32 | Self::Uint32 | Self::Float => 4,
            Self::Int64 | Self::Uint64 | Self::Double => 8,
        }
    }

    /// `ncclDataType_t`.
    #[must_use]
    pub fn code(self) -> i32 {
        match self {
            Self::Int8 => 0,
            Self::Uint8 => 1,
            Self::Int32 => 2,
            Self::Uint32 => 3,
            Self::Int64 => 4,
            Self::Uint64 => 5,
            Self::Half => 6,
            Self::Float => 7,
            Self::Double => 8,
            Self::Bfloat16 => 9,
        }
    }
}

impl RedOp {
    /// `ncclRedOp_t`.
    #[must_use]
    pub fn code(self) -> i32 {
        match self {
            Self::Sum => 0,
            Self::Prod => 1,
            Self::Max => 2,
            Self::Min => 3,
            Self::Avg => 4,
        }
    }
}

/// Where an operation's result goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Placement {
    /// Into another buffer.
    OutOfPlace,
    /// Over its input, as NCCL defines it for each operation.
    InPlace,
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::OutOfPlace => "out of place",
            Self::InPlace => "in place",
        })
    }
}

/// The counts of one operation at one size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// The size as nccl-tests shows it: bytes of the larger of both buffers.
    pub size_bytes: u64,
    /// Elements as NCCL's call gets them: of one rank's part where a buffer has one for each rank.
    pub count: u64,
    /// Elements that a rank sends from.
    pub send_count: u64,
    /// Elements that a rank receives into.
    pub recv_count: u64,
}

impl Collective {
    /// Returns whether values are reduced.
    #[must_use]
    pub fn reduces(self) -> bool {
        matches!(self, Self::AllReduce | Self::Reduce | Self::ReduceScatter)
    }

    /// Returns whether one rank is the root.
    #[must_use]
    pub fn has_root(self) -> bool {
        matches!(self, Self::Broadcast | Self::Reduce)
    }

    /// Returns whether it can be done in place.
    #[must_use]
    pub fn works_in_place(self) -> bool {
        !matches!(self, Self::AllToAll | Self::SendRecv)
    }

    /// Returns whether one operation is several calls, which need a group.
    #[must_use]
    pub fn is_grouped(self) -> bool {
        matches!(self, Self::AllToAll | Self::SendRecv)
    }

    /// Returns whether the larger buffer has a part for each rank.
    fn has_parts(self) -> bool {
        matches!(self, Self::AllGather | Self::ReduceScatter | Self::AllToAll)
    }

    /// The counts for a size, rounded down as nccl-tests does: to whole elements, and to parts of whole 16
    /// bytes. `None` where nothing is left.
    #[must_use]
    pub fn shape(self, bytes: u64, dtype: DType, ranks: u32) -> Option<Shape> {
        let (size, ranks) = (dtype.bytes(), u64::from(ranks));
        let mut count = bytes / size;
        if self.has_parts() {
            count = count / ranks / (16 / size) * (16 / size);
        }
        if count == 0 {
            return None;
        }
        let all = count * ranks;
        let (send_count, recv_count) = match self {
            Self::AllGather => (count, all),
            Self::ReduceScatter => (all, count),
            Self::AllToAll => (all, all),
            _ => (count, count),
        };
        Some(Shape { size_bytes: send_count.max(recv_count) * size, count, send_count, recv_count })
    }

    /// The factor from algorithm bandwidth to bus bandwidth: what the slowest link carries, whatever
    /// the number of ranks.
    #[must_use]
    pub fn bus_factor(self, ranks: u32) -> f64 {
        let n = f64::from(ranks);
        match self {
            Self::AllReduce => 2.0 * (n - 1.0) / n,
            Self::AllGather | Self::ReduceScatter | Self::AllToAll => (n - 1.0) / n,
            Self::Broadcast | Self::Reduce | Self::SendRecv => 1.0,
        }
    }

    #[cfg(test)]
    fn calls(self, o: &OneRank<'_>) -> Vec<Call> {
        let mut calls = Vec::new();
        self.each_call(o, |c| {
            calls.push(*c);
            Ok::<(), ()>(())
        })
        .ok();
        calls
    }

    /// Hands out the calls of one operation of one rank. `send` and `recv` are addresses of buffers of the shape's
    /// counts; in place only `recv` is used, which then has room for the larger count. No heap: this lies in
    /// the loop that is timed.
    ///
    /// # Errors
    /// The first error of `each`, after which no more calls are made.
    pub fn each_call<E>(
        self,
        o: &OneRank<'_>,
        mut each: impl FnMut(&Call) -> Result<(), E>,
    ) -> Result<(), E> {
        let OneRank { shape, dtype, op, root, rank, ranks, placement, .. } = *o;
        let (count, size) = (shape.count, dtype.bytes());
        let (dtype, op) = (dtype.code(), op.code());
        let part = count * size;
        let own = u64::from(rank) * part;
        let (send, recv) = match (placement, self) {
            (Placement::OutOfPlace, _) => (o.send, o.recv),
            (Placement::InPlace, Self::AllGather) => (o.recv + own, o.recv),
            (Placement::InPlace, Self::ReduceScatter) => (o.recv, o.recv + own),
            (Placement::InPlace, _) => (o.recv, o.recv),
        };
        match self {
            Self::AllReduce => each(&Call::AllReduce { send, recv, count, dtype, op }),
            Self::Broadcast => each(&Call::Broadcast { send, recv, count, dtype, root }),
            Self::Reduce => each(&Call::Reduce { send, recv, count, dtype, op, root }),
            Self::AllGather => each(&Call::AllGather { send, recv, count, dtype }),
            Self::ReduceScatter => each(&Call::ReduceScatter { send, recv, count, dtype, op }),
            Self::AllToAll => {
                for peer in 0..ranks {
                    let at = u64::from(peer) * part;
                    each(&Call::Send { from: send + at, count, dtype, peer })?;
                    each(&Call::Recv { to: recv + at, count, dtype, peer })?;
                }
                Ok(())
            }
            Self::SendRecv => {
                each(&Call::Send { from: send, count, dtype, peer: next(rank, ranks) })?;
                each(&Call::Recv { to: recv, count, dtype, peer: previous(rank, ranks) })
            }
        }
    }
}

/// The facts that one rank needs to issue one operation.
#[derive(Debug, Clone, Copy)]
pub struct OneRank<'a> {
    /// The counts.
    pub shape: &'a Shape,
    /// The element type.
    pub dtype: DType,
    /// The reduction; not looked at where nothing is reduced.
    pub op: RedOp,
    /// The root; not looked at where there is none.
    pub root: u32,
    /// This rank.
    pub rank: u32,
    /// How many there are.
    pub ranks: u32,
    /// In place or not.
    pub placement: Placement,
    /// Address of the send buffer.
    pub send: u64,
    /// Address of the receive buffer.
    pub recv: u64,
}

/// The rank after this one in the ring.
#[must_use]
pub fn next(rank: u32, ranks: u32) -> u32 {
    (rank + 1) % ranks
}

/// The rank before this one in the ring.
#[must_use]
pub fn previous(rank: u32, ranks: u32) -> u32 {
    (rank + ranks - 1) % ranks
}

/// Algorithm bandwidth: bytes a nanosecond, which is GB/s (of 10^9 bytes).
#[must_use]
pub fn algbw_gb_per_s(size_bytes: u64, time_ns: f64) -> f64 {
    if time_ns > 0.0 { size_bytes as f64 / time_ns } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_are_those_of_nccl_tests() {
        let shape = |c: Collective, bytes, dtype| c.shape(bytes, dtype, 4);
        let s = |size_bytes, count, send_count, recv_count| {
            Some(Shape { size_bytes, count, send_count, recv_count })
        };
        assert_eq!(shape(Collective::AllReduce, 1027, DType::Float), s(1024, 256, 256, 256));
        assert_eq!(shape(Collective::AllReduce, 2, DType::Float), None);
        assert_eq!(shape(Collective::AllGather, 1024, DType::Float), s(1024, 64, 64, 256));
        // 100 bytes: 25 floats, 6 a rank, 4 of which are 16 bytes.
        assert_eq!(shape(Collective::AllGather, 100, DType::Float), s(64, 4, 4, 16));
        assert_eq!(shape(Collective::ReduceScatter, 100, DType::Float), s(64, 4, 16, 4));
        assert_eq!(shape(Collective::AllToAll, 1024, DType::Half), s(1024, 128, 512, 512));
        assert_eq!(shape(Collective::AllToAll, 63, DType::Int8), None);
        assert_eq!(shape(Collective::SendRecv, 17, DType::Double), s(16, 2, 2, 2));
    }

    #[test]
    fn bus_factors_are_those_of_nccl_tests() {
        for (c, factor) in [
            (Collective::AllReduce, 1.75),
            (Collective::AllGather, 0.875),
            (Collective::ReduceScatter, 0.875),
            (Collective::AllToAll, 0.875),
            (Collective::Broadcast, 1.0),
            (Collective::Reduce, 1.0),
            (Collective::SendRecv, 1.0),
        ] {
            assert!((c.bus_factor(8) - factor).abs() < 1e-12, "{c}");
        }
        // 1 GB in 10 ms.
        assert!((algbw_gb_per_s(1_000_000_000, 1e7) - 100.0).abs() < 1e-9);
        assert!(algbw_gb_per_s(1, 0.0).abs() < 1e-12);
    }

    #[test]
    fn names_are_read_back_and_wrong_ones_are_answered_with_the_right_ones() {
        for c in Collective::ALL {
            assert_eq!(c.as_str().parse(), Ok(*c));
        }
        for d in DType::ALL {
            assert_eq!(d.as_str().parse(), Ok(*d));
        }
        assert_eq!("bf16".parse(), Ok(DType::Bfloat16));
        let said = "avarage".parse::<RedOp>().unwrap_err();
        assert!(said.contains("avarage") && said.contains("avg"), "{said}");
    }

    #[test]
    fn calls_in_place_use_one_buffer() {
        let shape = Collective::AllGather.shape(1024, DType::Float, 4).unwrap();
        let one = OneRank {
            shape: &shape,
            dtype: DType::Float,
            op: RedOp::Sum,
            root: 0,
            rank: 2,
            ranks: 4,
            placement: Placement::InPlace,
            send: 0x1000,
            recv: 0x9000,
        };
        let gather = Collective::AllGather.calls(&one);
        assert_eq!(gather, [Call::AllGather { send: 0x9200, recv: 0x9000, count: 64, dtype: 7 }]);
        let scatter = Collective::ReduceScatter.calls(&one);
        assert_eq!(scatter, [Call::ReduceScatter { send: 0x9000, recv: 0x9200, count: 64, dtype: 7, op: 0 }]);
        let ring = Collective::SendRecv.calls(&OneRank { placement: Placement::OutOfPlace, rank: 3, ..one });
        assert_eq!(
            ring,
            [
                Call::Send { from: 0x1000, count: 64, dtype: 7, peer: 0 },
                Call::Recv { to: 0x9000, count: 64, dtype: 7, peer: 2 }
            ]
        );
        let all = Collective::AllToAll.calls(&OneRank { placement: Placement::OutOfPlace, ..one });
        assert_eq!(all.len(), 8);
        assert_eq!(all[7], Call::Recv { to: 0x9300, count: 64, dtype: 7, peer: 3 });
    }
}
