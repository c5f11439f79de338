//! From one call of NCCL's to one decision: a bounded search in the rows of a communicator, and the edit of NCCL's cost
//! table.
//!
//! A decision depends on the call, the rules and the communicator's size alone, which are the same on all ranks.

#![cfg_attr(target_arch = "x86_64", expect(unsafe_code, reason = "compares four costs at once"))]

use ringwatch_wire::tuning::{
    ALGORITHMS, ANY_PIPE_OPS, CANDIDATES, COLLECTIVES, PROTOCOLS, ROWS_MAX, Registered, Row, entries_of,
};

/// The cost of a forbidden entry, in us. It is above every real cost, and below the 3.6e9 from which on NCCL takes no entry
/// at all. A negative cost would win from NCCL 2.31 on.
pub const FORBIDDEN_US: f32 = 1.0e9;

/// Algorithms whose channels NCCL does not limit to those that the communicator has: COLLNET_DIRECT and COLLNET_CHAIN, and
/// NVLS over several nodes.
const UNLIMITED: u32 = entries_of(2) | entries_of(3);
const UNLIMITED_BETWEEN_NODES: u32 = entries_of(4);

/// One question of NCCL's.
#[derive(Debug, Clone, Copy)]
pub struct Call {
    /// The collective, NCCL's number.
    pub collective: usize,
    /// Size in bytes.
    pub bytes: u64,
    /// Number of pipelined operations.
    pub pipe_ops: u32,
    /// True where both buffers are registered.
    pub is_registered: bool,
}

/// A row as a communicator uses it.
#[derive(Debug, Clone, Copy)]
pub struct Choice {
    min_bytes: u64,
    prefer: u32,
    forbid: u32,
    pipe_ops: u32,
    channels: u8,
    /// Bit 0: for buffers that are not registered; bit 1: for registered ones.
    registered: u8,
}

impl Choice {
    /// The part of a row that is asked about at each call.
    pub fn of(row: &Row) -> Self {
        Choice {
            min_bytes: row.min_bytes,
            prefer: row.prefer,
            forbid: row.forbid,
            pipe_ops: row.pipe_ops,
            channels: row.channels,
            registered: match row.registered {
                Registered::No => 1,
                Registered::Yes => 2,
                Registered::Any => 3,
            },
        }
    }

    #[inline]
    fn matches(&self, call: &Call) -> bool {
        (self.pipe_ops == ANY_PIPE_OPS || self.pipe_ops == call.pipe_ops)
            && self.registered >> u8::from(call.is_registered) & 1 != 0
    }
}

/// The rows that apply to communicators of one size.
#[derive(Debug)]
pub struct Choices<'a> {
    all: &'a [Choice],
    /// Where the rows of each collective begin and, one further, end.
    starts: [u16; COLLECTIVES + 1],
    /// Where their ranges end.
    ends: &'a [Ends; COLLECTIVES],
    /// Entries for which NCCL would take more channels than there are.
    unlimited: u32,
}

/// Rows of a collective that have been counted so far.
fn before_collective(starts: &[u16; COLLECTIVES + 1], collective: usize) -> usize {
    let at = |i: usize| starts.get(i).copied().unwrap_or(0);
    usize::from(at(collective + 1).saturating_sub(at(collective)))
}

impl<'a> Choices<'a> {
    /// `None` where more than [`CANDIDATES`] rows have one range. `all` holds the rows of `rows`, in their order; `ends` is
    /// filled.
    pub fn new(
        all: &'a [Choice],
        ends: &'a mut [Ends; COLLECTIVES],
        rows: impl Iterator<Item = Row>,
        nodes: u32,
    ) -> Option<Self> {
        *ends = [[u64::MAX; ENDS]; COLLECTIVES];
        let mut starts = [0u16; COLLECTIVES + 1];
        let mut of_range = 0;
        let mut before: Option<Row> = None;
        for row in rows {
            let is_same = before.is_some_and(|b| {
                (b.collective, b.min_bytes, b.max_bytes) == (row.collective, row.min_bytes, row.max_bytes)
            });
            of_range = if is_same { of_range + 1 } else { 1 };
            if of_range > CANDIDATES {
                return None;
            }
            before = Some(row);
            let of_collective = before_collective(&starts, usize::from(row.collective));
            if let Some(end) =
                ends.get_mut(usize::from(row.collective)).and_then(|e| e.get_mut(of_collective))
            {
                *end = row.max_bytes;
            }
            for start in starts.iter_mut().skip(usize::from(row.collective) + 1) {
                *start += 1;
            }
        }
        let unlimited = if nodes > 1 { UNLIMITED | UNLIMITED_BETWEEN_NODES } else { UNLIMITED };
        Some(Choices { all, starts, ends, unlimited })
    }

    fn of(&self, collective: usize) -> &'a [Choice] {
        let start = self.starts.get(collective).copied().unwrap_or(0);
        let end = self.starts.get(collective.wrapping_add(1)).copied().unwrap_or(start);
        self.all.get(usize::from(start)..usize::from(end)).unwrap_or(&[])
    }

    /// Edits the cost table for a call, and returns the number of channels; 0 leaves them to NCCL.
    ///
    /// The first row decides that matches, and whose preferred entries, if it has any, are possible.
    #[inline]
    pub fn decide<const N: usize>(&self, call: &Call, table: &mut [f32; N]) -> u8 {
        let of_collective = self.of(call.collective);
        let possible = possible(table);
        let Some(ends) = self.ends.get(call.collective) else { return 0 };
        let first = first_that_ends_at(ends, call.bytes);
        for choice in of_collective.iter().skip(first).take(CANDIDATES) {
            if choice.min_bytes > call.bytes {
                break;
            }
            if !choice.matches(call) {
                continue;
            }
            if choice.prefer == 0 {
                forbid(table, choice.forbid & possible);
                // NCCL may choose any entry, so that a number of channels has to be right for all of them.
                return if self.unlimited & possible == 0 { choice.channels } else { 0 };
            }
            if choice.prefer & possible != 0 {
                let entry = cheapest(table, choice.prefer & possible);
                if let Some(cost) = table.get_mut(entry) {
                    *cost = 0.0;
                }
                return if self.unlimited >> entry & 1 == 0 { choice.channels } else { 0 };
            }
        }
        0
    }
}

/// Where the ranges of one collective end, and behind them the largest size.
pub type Ends = [u64; ENDS];
/// One more than there are rows, and a power of two.
const ENDS: usize = 1024;
const _: () = assert!(ENDS == ROWS_MAX + 1);

/// The first row whose range ends at this size or above. Ranges are sorted, and disjoint or the same, so that no other
/// range can hold the size. All tables take the same ten steps, which the compiler writes out.
#[inline]
fn first_that_ends_at(ends: &Ends, bytes: u64) -> usize {
    let mut first = 0;
    let mut step = ENDS / 2;
    while step > 0 {
        let end = ends.get((first + step - 1) % ENDS).copied().unwrap_or(u64::MAX);
        first += if end < bytes { step } else { 0 };
        step /= 2;
    }
    first
}

/// The entries that NCCL holds for possible: impossible ones have a negative cost.
#[inline]
fn possible<const N: usize>(table: &[f32; N]) -> u32 {
    let (fours, rest) = table.as_chunks::<4>();
    let mut bits = 0;
    for (n, four) in fours.iter().enumerate() {
        bits |= not_negative(four) << (4 * n);
    }
    for (n, cost) in rest.iter().enumerate() {
        bits |= u32::from(*cost >= 0.0) << (4 * fours.len() + n);
    }
    bits
}

/// A bit for each number that is 0 or more. The compiler makes 20 comparisons of it by itself.
#[cfg(target_arch = "x86_64")]
#[inline]
fn not_negative(four: &[f32; 4]) -> u32 {
    use core::arch::x86_64::{_mm_cmpge_ps, _mm_loadu_ps, _mm_movemask_ps, _mm_setzero_ps};
    // SAFETY: every x86-64 processor has these instructions, and four numbers are read from an array of four.
    unsafe { _mm_movemask_ps(_mm_cmpge_ps(_mm_loadu_ps(four.as_ptr()), _mm_setzero_ps())) as u32 }
}

#[cfg(not(target_arch = "x86_64"))]
#[inline]
fn not_negative(four: &[f32; 4]) -> u32 {
    four.iter().enumerate().fold(0, |bits, (n, cost)| bits | u32::from(*cost >= 0.0) << n)
}

/// The entry of the least cost among those whose bits are set, of which there is one at least.
#[inline]
fn cheapest<const N: usize>(table: &[f32; N], entries: u32) -> usize {
    let mut best = entries.trailing_zeros() as usize;
    let mut rest = entries & entries.wrapping_sub(1);
    while rest != 0 {
        let entry = rest.trailing_zeros() as usize;
        rest &= rest - 1;
        if let (Some(cost), Some(least)) = (table.get(entry), table.get(best))
            && cost < least
        {
            best = entry;
        }
    }
    best
}

/// Makes entries too expensive.
#[inline]
fn forbid<const N: usize>(table: &mut [f32; N], entries: u32) {
    let (fours, rest) = table.as_chunks_mut::<4>();
    let in_fours = 4 * fours.len();
    for (n, four) in fours.iter_mut().enumerate() {
        forbid_of_four(four, entries >> (4 * n));
    }
    for (n, cost) in rest.iter_mut().enumerate() {
        if entries >> (in_fours + n) & 1 != 0 {
            *cost = FORBIDDEN_US;
        }
    }
}

/// Makes those of four entries too expensive whose bits are set among the lowest four.
#[cfg(target_arch = "x86_64")]
#[inline]
fn forbid_of_four(four: &mut [f32; 4], entries: u32) {
    use core::arch::x86_64::{
        _mm_and_ps, _mm_and_si128, _mm_andnot_ps, _mm_castsi128_ps, _mm_cmpeq_epi32, _mm_loadu_ps, _mm_or_ps,
        _mm_set_epi32, _mm_set1_epi32, _mm_set1_ps, _mm_storeu_ps,
    };
    // SAFETY: every x86-64 processor has these instructions; four numbers are read and written in an array of four.
    unsafe {
        let bits = _mm_set_epi32(8, 4, 2, 1);
        let asked = _mm_and_si128(_mm_set1_epi32(entries.cast_signed()), bits);
        let is_asked = _mm_castsi128_ps(_mm_cmpeq_epi32(asked, bits));
        let kept = _mm_andnot_ps(is_asked, _mm_loadu_ps(four.as_ptr()));
        let raised = _mm_and_ps(is_asked, _mm_set1_ps(FORBIDDEN_US));
        _mm_storeu_ps(four.as_mut_ptr(), _mm_or_ps(kept, raised));
    }
}

#[cfg(not(target_arch = "x86_64"))]
#[inline]
fn forbid_of_four(four: &mut [f32; 4], entries: u32) {
    for (n, cost) in four.iter_mut().enumerate() {
        if entries >> n & 1 != 0 {
            *cost = FORBIDDEN_US;
        }
    }
}

/// Entries of the cost table from NCCL 2.23 on.
pub const ENTRIES: usize = ALGORITHMS * PROTOCOLS;
/// Entries before, without PAT.
pub const ENTRIES_OF_OLD: usize = ENTRIES - PROTOCOLS;

/// The part of a cost table with these numbers of algorithms and protocols that rules can name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    /// The first [`ENTRIES`] entries: later algorithms are left alone.
    Full,
    /// The first [`ENTRIES_OF_OLD`] entries.
    WithoutPat,
}

impl Shape {
    /// `None` for a shape that no known NCCL has. Rows name entries by three protocols.
    #[inline]
    pub fn of(algorithms: i32, protocols: i32) -> Option<Self> {
        match algorithms {
            _ if protocols != PROTOCOLS as i32 => None,
            7..=64 => Some(Shape::Full),
            6 => Some(Shape::WithoutPat),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringwatch_wire::tuning::entry;

    const ALL_REDUCE: u8 = 4;
    const TREE: usize = 0;
    const RING: usize = 1;
    const COLLNET_CHAIN: usize = 3;
    const NVLS: usize = 4;
    const LL: usize = 0;
    const SIMPLE: usize = 2;

    fn row(min_bytes: u64, max_bytes: u64) -> Row {
        Row {
            min_bytes,
            max_bytes,
            min_ranks: 0,
            max_ranks: u32::MAX,
            min_nodes: 0,
            max_nodes: u32::MAX,
            prefer: 0,
            forbid: 0,
            pipe_ops: ANY_PIPE_OPS,
            collective: ALL_REDUCE,
            channels: 0,
            registered: Registered::Any,
        }
    }

    fn no_ends() -> Box<[Ends; COLLECTIVES]> {
        Box::new([[0; ENDS]; COLLECTIVES])
    }

    fn call(bytes: u64) -> Call {
        Call { collective: usize::from(ALL_REDUCE), bytes, pipe_ops: 1, is_registered: false }
    }

    /// The costs 10, 11, 12, ... with NVLS impossible.
    fn costs() -> [f32; 21] {
        let mut costs = std::array::from_fn(|i| 10.0 + i as f32);
        for protocol in 0..3 {
            costs[NVLS * 3 + protocol] = -1.0;
        }
        costs
    }

    fn decided(rows: &[Row], nodes: u32, call: &Call) -> ([f32; 21], u8) {
        let all: Vec<Choice> = rows.iter().map(Choice::of).collect();
        let mut ends = no_ends();
        let choices = Choices::new(&all, &mut ends, rows.iter().copied(), nodes).expect("few candidates");
        let mut table = costs();
        let channels = choices.decide(call, &mut table);
        (table, channels)
    }

    #[test]
    fn a_preferred_entry_costs_nothing_and_others_keep_their_cost() {
        let rows = [Row { prefer: entry(TREE, SIMPLE), channels: 8, ..row(1024, 2047) }];
        for bytes in [1024, 2047] {
            let (table, channels) = decided(&rows, 1, &call(bytes));
            let mut wanted = costs();
            wanted[2] = 0.0;
            assert_eq!((table, channels), (wanted, 8));
        }
        for bytes in [0, 1023, 2048, u64::MAX] {
            assert_eq!(decided(&rows, 1, &call(bytes)), (costs(), 0), "{bytes}");
        }
        let other = Call { collective: 3, ..call(1024) };
        assert_eq!(decided(&rows, 1, &other), (costs(), 0));
    }

    #[test]
    fn of_several_preferred_entries_nccls_cheapest_is_taken() {
        let rows = [Row { prefer: entries_of(RING) | entries_of(NVLS), ..row(0, u64::MAX) }];
        let (table, _) = decided(&rows, 1, &call(5));
        assert_eq!(table.iter().position(|c| *c == 0.0), Some(3), "RING, LL");
    }

    #[test]
    fn an_impossible_preference_falls_through_to_the_next_row() {
        let rows = [
            Row { prefer: entries_of(NVLS), channels: 16, ..row(0, 99) },
            Row { prefer: entry(RING, LL), channels: 4, ..row(0, 99) },
        ];
        let (table, channels) = decided(&rows, 1, &call(50));
        assert_eq!((table[3], channels), (0.0, 4));
        assert_eq!(table[NVLS * 3 + SIMPLE], -1.0, "impossible stays impossible");
        assert_eq!(
            decided(&rows[..1], 1, &call(50)),
            (costs(), 0),
            "nothing is possible, nothing is changed"
        );
    }

    #[test]
    fn forbidden_entries_are_expensive_and_never_negative() {
        let rows = [Row { forbid: entries_of(TREE) | entries_of(NVLS), channels: 2, ..row(0, 99) }];
        let (table, channels) = decided(&rows, 1, &call(50));
        assert_eq!(table[..3], [FORBIDDEN_US; 3]);
        assert_eq!(table[12..15], [-1.0; 3]);
        assert_eq!(table[3], costs()[3]);
        assert_eq!(channels, 0, "COLLNET could still be chosen, and takes any number of channels");
    }

    #[test]
    fn channels_are_left_alone_where_nccl_does_not_limit_them() {
        let collnet = [Row { prefer: entries_of(COLLNET_CHAIN), channels: 64, ..row(0, 99) }];
        assert_eq!(decided(&collnet, 1, &call(1)).1, 0);
        let nvls = [Row { prefer: entries_of(5), channels: 64, ..row(0, 99) }];
        assert_eq!(decided(&nvls, 2, &call(1)).1, 64, "NVLS_TREE is limited");
        let unlimited =
            |nodes| Choices::new(&[], &mut no_ends(), std::iter::empty(), nodes).expect("empty").unlimited;
        assert_eq!((unlimited(1) >> 12 & 7, unlimited(2) >> 12 & 7), (0, 7));
    }

    #[test]
    fn conditions_on_buffers_and_pipelined_operations_hold() {
        let rows = [
            Row { registered: Registered::Yes, channels: 1, prefer: entry(RING, LL), ..row(0, 99) },
            Row { pipe_ops: 4, channels: 2, prefer: entry(RING, LL), ..row(0, 99) },
            Row { registered: Registered::No, channels: 3, prefer: entry(RING, LL), ..row(0, 99) },
        ];
        for (is_registered, pipe_ops, channels) in [(true, 4, 1), (false, 4, 2), (false, 1, 3)] {
            let call = Call { is_registered, pipe_ops, ..call(1) };
            assert_eq!(decided(&rows, 1, &call).1, channels);
        }
    }

    #[test]
    fn every_size_finds_its_row_in_a_full_table() {
        let rows: Vec<Row> = (0..ROWS_MAX as u64)
            .map(|n| Row {
                prefer: entry(RING, LL),
                channels: (n % 100) as u8 + 1,
                ..row(n * 10, n * 10 + 8)
            })
            .collect();
        for n in 0..ROWS_MAX as u64 {
            let channels = (n % 100) as u8 + 1;
            for (bytes, wanted) in [(n * 10, channels), (n * 10 + 8, channels), (n * 10 + 9, 0)] {
                assert_eq!(decided(&rows, 1, &call(bytes)).1, wanted, "{bytes}");
            }
        }
        assert_eq!(decided(&rows, 1, &call(u64::MAX)).1, 0);
    }

    #[test]
    fn more_rows_of_a_range_than_candidates_are_refused() {
        let rows = vec![row(0, 9); CANDIDATES + 1];
        let all: Vec<Choice> = rows.iter().map(Choice::of).collect();
        assert!(Choices::new(&all, &mut no_ends(), rows.into_iter(), 1).is_none());
    }

    #[test]
    fn only_known_shapes_of_the_table_are_edited() {
        assert_eq!((Shape::of(7, 3), Shape::of(8, 3)), (Some(Shape::Full), Some(Shape::Full)));
        assert_eq!(Shape::of(6, 3), Some(Shape::WithoutPat));
        for (algorithms, protocols) in [(7, 4), (7, 2), (0, 3), (-1, 3), (5, 3), (i32::MAX, 3)] {
            assert_eq!(Shape::of(algorithms, protocols), None);
        }
        let rows = [Row { prefer: entries_of(6), ..row(0, 99) }];
        let all: Vec<Choice> = rows.iter().map(Choice::of).collect();
        let mut ends = no_ends();
        let choices = Choices::new(&all, &mut ends, rows.into_iter(), 1).expect("one row");
        let mut six = [1.0f32; 18];
        assert_eq!(choices.decide(&call(1), &mut six), 0, "NCCL before 2.23 has no PAT");
        assert_eq!(six, [1.0; 18]);
    }
}
