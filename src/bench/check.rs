//! Data that show what an operation did: patterns to send, and what must come out.
//!
//! Values are small whole numbers, so chosen that every order of reducing them is exact in the element type; what
//! comes out is then compared to the bit. Only averages of floats over a number of ranks that is no power of
//! two are compared within a tolerance, since NCCL multiplies by a rounded 1/n. Patterns repeat after a prime
//! number of elements: a part that lands where another belongs is out of step with it.

use super::op::{Collective, DType, Placement, RedOp, Shape, previous};

/// Elements after which a pattern repeats: a prime, so that no power of two is a multiple.
pub const PERIOD: u64 = 4093;
/// The content of a place where a result is to come: no value of any type's patterns, so that what was never written
/// is wrong.
pub const STALE: u8 = 0xff;

/// The facts that the values depend on.
#[derive(Debug, Clone, Copy)]
pub struct Rule {
    /// The operation that is measured.
    pub collective: Collective,
    /// The element type.
    pub dtype: DType,
    /// The reduction; not looked at where nothing is reduced.
    pub op: RedOp,
    /// The root; not looked at where there is none.
    pub root: u32,
    /// How many ranks.
    pub ranks: u32,
}

/// A run of elements in a buffer and the values that belong there, or must be there.
#[derive(Debug, Clone, PartialEq)]
pub struct Region {
    /// Where it begins, in elements from the operation's place in the buffer.
    pub at: u64,
    /// How many elements.
    pub count: u64,
    /// The values of one period, beginning at the region's first element.
    pub values: Vec<f64>,
    /// How far a value may be off, as a share of itself: 0 is to the bit.
    pub tolerance: f64,
}

/// The largest whole number up to which every one is exact in a type (and small enough for a quick sum).
fn exact(dtype: DType) -> u64 {
    match dtype {
        DType::Int8 => 127,
        DType::Uint8 => 255,
        DType::Bfloat16 => 256,
        DType::Half => 2048,
        _ => 65_536,
    }
}

/// A number that looks thrown.
fn mix(a: u64, b: u64) -> u64 {
    let mut x = a ^ b.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

impl Rule {
    /// The value that a rank sends, to a peer where there is one for each, in the batch's operation `nth`, at
    /// an index of the pattern.
    fn source(&self, rank: u32, peer: u32, nth: u32, index: u64) -> u64 {
        let index = index % PERIOD;
        let seed = mix(u64::from(rank) << 32 | u64::from(peer), u64::from(nth) + 1);
        let thrown = mix(index, seed);
        let n = u64::from(self.ranks);
        if !self.collective.reduces() {
            return thrown % 127;
        }
        // The place of this rank among all, which goes round with the index.
        let place = (u64::from(rank) + index + u64::from(nth)) % n;
        match self.op {
            RedOp::Max | RedOp::Min => thrown % 127,
            RedOp::Sum | RedOp::Avg => {
                let room = exact(self.dtype) / n;
                if room >= 2 { thrown % room.min(100) } else { u64::from(place < exact(self.dtype) / 2) }
            }
            // 64 is the largest product: 2 from up to six ranks.
            RedOp::Prod => 1 + u64::from(place < index % 7),
        }
    }

    /// The reduction of all ranks' values at an index, in the type's own arithmetic.
    fn reduced(&self, nth: u32, index: u64) -> f64 {
        let values = (0..self.ranks).map(|r| self.source(r, 0, nth, index));
        let n = u64::from(self.ranks);
        let whole = match self.op {
            RedOp::Max => values.max().unwrap_or(0),
            RedOp::Min => values.min().unwrap_or(0),
            RedOp::Prod => values.product(),
            RedOp::Sum => values.sum(),
            RedOp::Avg => {
                let sum: u64 = values.sum();
                if is_float(self.dtype) {
                    return sum as f64 / n as f64;
                }
                sum / n
            }
        };
        whole as f64
    }

    fn tolerance(&self) -> f64 {
        if self.op != RedOp::Avg || self.ranks.is_power_of_two() {
            return 0.0;
        }
        // One rounding of the factor, one of each product, one of each addition.
        let epsilon = match self.dtype {
            DType::Half => 1.0 / 1024.0,
            DType::Bfloat16 => 1.0 / 128.0,
            DType::Float => f64::from(f32::EPSILON),
            DType::Double => f64::EPSILON,
            _ => return 0.0,
        };
        epsilon * (f64::from(self.ranks) + 2.0)
    }

    fn region(&self, at: u64, count: u64, tolerance: f64, value: impl Fn(u64) -> f64) -> Region {
        Region { at, count, values: (0..PERIOD.min(count)).map(value).collect(), tolerance }
    }

    fn sent(&self, at: u64, count: u64, (rank, peer, nth): (u32, u32, u32)) -> Region {
        self.region(at, count, 0.0, |i| self.source(rank, peer, nth, i) as f64)
    }

    /// The values that a rank puts into its input before operation `nth` of a batch. In place the input lies in the
    /// receive buffer, else at the start of the send buffer.
    #[must_use]
    pub fn input(&self, shape: &Shape, placement: Placement, rank: u32, nth: u32) -> Vec<Region> {
        let count = shape.count;
        match self.collective {
            Collective::AllToAll => {
                (0..self.ranks).map(|p| self.sent(u64::from(p) * count, count, (rank, p, nth))).collect()
            }
            Collective::AllGather if placement == Placement::InPlace => {
                vec![self.sent(u64::from(rank) * count, count, (rank, 0, nth))]
            }
            _ => vec![self.sent(0, shape.send_count, (rank, 0, nth))],
        }
    }

    /// The values that must be in a rank's receive buffer after operation `nth` of a batch; nothing where the rank
    /// receives nothing.
    #[must_use]
    pub fn output(&self, shape: &Shape, placement: Placement, rank: u32, nth: u32) -> Vec<Region> {
        let count = shape.count;
        let reduced =
            |at, first: u64| self.region(at, count, self.tolerance(), |i| self.reduced(nth, first + i));
        match self.collective {
            Collective::AllReduce => vec![reduced(0, 0)],
            Collective::Reduce if rank == self.root => vec![reduced(0, 0)],
            Collective::Reduce => Vec::new(),
            Collective::ReduceScatter => {
                let own = u64::from(rank) * count;
                vec![reduced(if placement == Placement::InPlace { own } else { 0 }, own)]
            }
            Collective::Broadcast => vec![self.sent(0, count, (self.root, 0, nth))],
            Collective::AllGather => {
                (0..self.ranks).map(|r| self.sent(u64::from(r) * count, count, (r, 0, nth))).collect()
            }
            Collective::AllToAll => {
                (0..self.ranks).map(|r| self.sent(u64::from(r) * count, count, (r, rank, nth))).collect()
            }
            Collective::SendRecv => vec![self.sent(0, count, (previous(rank, self.ranks), 0, nth))],
        }
    }
}

fn is_float(dtype: DType) -> bool {
    matches!(dtype, DType::Half | DType::Bfloat16 | DType::Float | DType::Double)
}

impl Region {
    /// The bytes of one period.
    #[must_use]
    pub fn tile(&self, dtype: DType) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.values.len() * 8);
        for v in &self.values {
            encode(dtype, *v, &mut bytes);
        }
        bytes
    }

    /// How many elements of a piece are wrong. The piece begins `skipped` elements into the region; `tile` is what
    /// [`Self::tile`] gives.
    #[must_use]
    pub fn count_wrong(&self, dtype: DType, tile: &[u8], skipped: u64, piece: &[u8]) -> u64 {
        let size = usize::try_from(dtype.bytes()).unwrap_or(1);
        let period = tile.len() / size;
        let mut at = usize::try_from(skipped % (period.max(1) as u64)).unwrap_or(0);
        let mut rest = piece;
        let mut wrong = 0;
        while !rest.is_empty() && !tile.is_empty() {
            let n = (period - at).min(rest.len() / size);
            if n == 0 {
                break;
            }
            let (got, later) = rest.split_at(n * size);
            let expected = &tile[at * size..(at + n) * size];
            if got != expected {
                let pairs = got.chunks_exact(size).zip(expected.chunks_exact(size)).zip(&self.values[at..]);
                wrong +=
                    pairs.filter(|((g, e), v)| g != e && !self.is_near(decode(dtype, g), **v)).count() as u64;
            }
            rest = later;
            at = 0;
        }
        wrong
    }

    fn is_near(&self, got: f64, expected: f64) -> bool {
        self.tolerance > 0.0 && (got - expected).abs() <= self.tolerance * expected.abs()
    }
}

/// Appends a value in a type's bytes. Values are whole and small, or quotients of such.
fn encode(dtype: DType, value: f64, into: &mut Vec<u8>) {
    match dtype {
        DType::Int8 => into.extend((value as i8).to_ne_bytes()),
        DType::Uint8 => into.extend((value as u8).to_ne_bytes()),
        DType::Int32 => into.extend((value as i32).to_ne_bytes()),
        DType::Uint32 => into.extend((value as u32).to_ne_bytes()),
        DType::Int64 => into.extend((value as i64).to_ne_bytes()),
        DType::Uint64 => into.extend((value as u64).to_ne_bytes()),
        DType::Float => into.extend((value as f32).to_ne_bytes()),
        DType::Double => into.extend(value.to_ne_bytes()),
        DType::Half => into.extend(half_bits(value).to_ne_bytes()),
        DType::Bfloat16 => into.extend(bfloat16_bits(value).to_ne_bytes()),
    }
}

/// Reads one element.
fn decode(dtype: DType, bytes: &[u8]) -> f64 {
    let mut whole = [0u8; 8];
    let n = bytes.len().min(8);
    whole[..n].copy_from_slice(&bytes[..n]);
    let [a, b, c, d, ..] = whole;
    match dtype {
        DType::Int8 => f64::from(i8::from_ne_bytes([a])),
        DType::Uint8 => f64::from(a),
        DType::Int32 => f64::from(i32::from_ne_bytes([a, b, c, d])),
        DType::Uint32 => f64::from(u32::from_ne_bytes([a, b, c, d])),
        DType::Int64 => i64::from_ne_bytes(whole) as f64,
        DType::Uint64 => u64::from_ne_bytes(whole) as f64,
        DType::Float => f64::from(f32::from_ne_bytes([a, b, c, d])),
        DType::Double => f64::from_ne_bytes(whole),
        DType::Half => half_value(u16::from_ne_bytes([a, b])),
        DType::Bfloat16 => f64::from(f32::from_bits(u32::from(u16::from_ne_bytes([a, b])) << 16)),
    }
}

/// Rounds to nearest even, as the hardware does.
fn bfloat16_bits(value: f64) -> u16 {
    let bits = (value as f32).to_bits();
    ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) as u16
}

/// Rounds to nearest even. For numbers from 0 up to 2048, which is all that is used: no sign, no infinity.
fn half_bits(value: f64) -> u16 {
    if value < 1.0 / 16_384.0 {
        // Subnormal: whole multiples of 2^-24.
        return (value * 16_777_216.0).round_ties_even() as u16;
    }
    let exponent = ((value.to_bits() >> 52) & 0x7ff) as i32 - 1023;
    // The mantissa in units of its last place; 2048 carries into the exponent by itself.
    let mantissa = (value * f64::from(10 - exponent).exp2()).round_ties_even() as i32;
    (((exponent + 15) << 10) + (mantissa - 1024)) as u16
}

fn half_value(bits: u16) -> f64 {
    let (sign, exponent, mantissa) = (bits >> 15, i32::from(bits >> 10 & 0x1f), f64::from(bits & 0x3ff));
    let size = match exponent {
        0 => mantissa * f64::from(-24).exp2(),
        31 if mantissa > 0.0 => f64::NAN,
        31 => f64::INFINITY,
        e => (1024.0 + mantissa) * f64::from(e - 25).exp2(),
    };
    if sign == 1 { -size } else { size }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(collective: Collective, dtype: DType, op: RedOp, ranks: u32) -> Rule {
        Rule { collective, dtype, op, root: 1 % ranks, ranks }
    }

    #[test]
    fn every_sum_and_product_is_exact_in_its_type() {
        for dtype in DType::ALL {
            for op in [RedOp::Sum, RedOp::Prod, RedOp::Max] {
                for ranks in [1, 2, 3, 8, 72, 300, 2000] {
                    let r = rule(Collective::AllReduce, *dtype, op, ranks);
                    for index in 0..200 {
                        let v = r.reduced(3, index);
                        assert!(v >= 0.0 && v <= exact(*dtype) as f64, "{dtype} {op} {ranks}: {v}");
                        let mut bytes = Vec::new();
                        encode(*dtype, v, &mut bytes);
                        assert_eq!(decode(*dtype, &bytes).to_bits(), v.to_bits(), "{dtype} {op} {ranks}");
                    }
                }
            }
        }
    }

    #[test]
    fn values_differ_between_ranks_peers_operations_and_places() {
        let r = rule(Collective::AllToAll, DType::Float, RedOp::Sum, 4);
        let line = |rank, peer, nth| (0..64).map(|i| r.source(rank, peer, nth, i)).collect::<Vec<_>>();
        let lines = [line(0, 0, 0), line(1, 0, 0), line(0, 1, 0), line(0, 0, 1)];
        for (i, a) in lines.iter().enumerate() {
            for b in &lines[i + 1..] {
                assert_ne!(a, b);
            }
        }
        // Shifted by a power of two they do not fit either.
        let late: Vec<_> = (0..64).map(|i| r.source(0, 0, 0, i + 4096)).collect();
        assert_ne!(lines[0], late);
    }

    #[test]
    fn right_data_pass_and_each_wrong_element_counts() {
        for dtype in DType::ALL {
            let r = rule(Collective::AllReduce, *dtype, RedOp::Sum, 4);
            let shape = Collective::AllReduce.shape(30_000 * dtype.bytes(), *dtype, 4).unwrap();
            let region = &r.output(&shape, Placement::OutOfPlace, 0, 0)[0];
            let tile = region.tile(*dtype);
            let size = dtype.bytes() as usize;
            let mut data: Vec<u8> = tile.iter().copied().cycle().take(30_000 * size).collect();
            assert_eq!(region.count_wrong(*dtype, &tile, 0, &data), 0);
            // In pieces, too.
            assert_eq!(region.count_wrong(*dtype, &tile, 10_001, &data[10_001 * size..]), 0);
            for at in [0, 4093, 29_999] {
                data[at * size] ^= 1;
            }
            assert_eq!(region.count_wrong(*dtype, &tile, 0, &data), 3, "{dtype}");
            assert!(region.count_wrong(*dtype, &tile, 1, &data) > 10_000, "out of step");
            let stale = vec![STALE; 30_000 * size];
            assert_eq!(region.count_wrong(*dtype, &tile, 0, &stale), 30_000, "{dtype}: never written");
        }
    }

    #[test]
    fn averages_of_three_may_be_off_by_rounding_alone() {
        let r = rule(Collective::AllReduce, DType::Float, RedOp::Avg, 3);
        let shape = Collective::AllReduce.shape(4000, DType::Float, 3).unwrap();
        let region = &r.output(&shape, Placement::OutOfPlace, 0, 0)[0];
        let tile = region.tile(DType::Float);
        let scaled =
            |by: f32| region.values.iter().flat_map(|v| (*v as f32 * by).to_ne_bytes()).collect::<Vec<u8>>();
        assert_eq!(region.count_wrong(DType::Float, &tile, 0, &scaled(1.0 + f32::EPSILON)), 0);
        assert!(region.count_wrong(DType::Float, &tile, 0, &scaled(1.001)) > 900);
        // Whole numbers are divided downwards, to the bit.
        assert!(rule(Collective::AllReduce, DType::Int32, RedOp::Avg, 3).tolerance() <= 0.0);
    }

    #[test]
    fn halves_round_as_the_hardware_does() {
        for (value, bits) in [
            (0.0, 0u16),
            (1.0, 0x3c00),
            (1.5, 0x3e00),
            (2048.0, 0x6800),
            (1.0 / 3.0, 0x3555),
            (2047.6, 0x6800),
            (6.0e-8, 0x0001),
        ] {
            assert_eq!(half_bits(value), bits, "{value}");
        }
        assert!((half_value(0x3555) - 1.0 / 3.0).abs() < 1e-4);
        assert_eq!(bfloat16_bits(1.0), 0x3f80);
        assert_eq!(bfloat16_bits(257.0), 0x4380);
    }

    #[test]
    fn only_the_root_of_a_reduce_receives() {
        let r = rule(Collective::Reduce, DType::Int32, RedOp::Sum, 4);
        let shape = Collective::Reduce.shape(1024, DType::Int32, 4).unwrap();
        assert_eq!(r.output(&shape, Placement::OutOfPlace, 1, 0).len(), 1);
        assert!(r.output(&shape, Placement::OutOfPlace, 0, 0).is_empty());
    }

    #[test]
    fn the_parts_of_a_scatter_are_the_whole_of_a_reduction() {
        let r = rule(Collective::ReduceScatter, DType::Int32, RedOp::Sum, 4);
        let shape = Collective::ReduceScatter.shape(64 << 10, DType::Int32, 4).unwrap();
        for rank in 0..4 {
            let out = &r.output(&shape, Placement::OutOfPlace, rank, 0)[0];
            let first = u64::from(rank) * shape.count;
            let sum: u64 = (0..4).map(|s| r.source(s, 0, 0, first + 5)).sum();
            assert_eq!((out.at, out.values[5] as u64), (0, sum));
            assert_eq!(r.output(&shape, Placement::InPlace, rank, 0)[0].at, first);
        }
    }
}
