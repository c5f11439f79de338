//! From one call of NCCL's to one decision: a bounded search in the rows of a communicator, and the edit of NCCL's cost
//! table.
//!
//! A decision depends on the call, the rules and the communicator's size alone, which are the same on all ranks.

use ringwatch_wire::tuning::{ANY_PIPE_OPS, CANDIDATES, COLLECTIVES, PROTOCOLS, Registered, Row, entries_of};

/// The cost of a forbidden entry, in us. It is above every real cost, and below the 3.6e9 from which on NCCL takes no entry
/// at all. A negative cost would win from NCCL 2.31 on.
pub const FORBIDDEN_US: f32 = 1.0e9;

/// Algorithms whose channels NCCL does not limit to those that the communicator has: COLLNET_DIRECT and COLLNET_CHAIN, and
/// NVLS over several nodes.
const UNLIMITED: u32 = entries_of(2) | entries_of(3);
const UNLIMITED_BETWEEN_NODES: u32 = entries_of(4);

/// What NCCL asks about.
#[derive(Debug, Clone, Copy)]
pub struct Call {
    /// The collective, NCCL's number.
    pub collective: usize,
    /// Size in bytes.
    pub bytes: u64,
    /// Number of pipelined operations.
    pub pipe_ops: u32,
    /// Whether both buffers are registered.
    pub is_registered: bool,
}

/// A row as a communicator uses it.
#[derive(Debug, Clone, Copy)]
pub struct Choice {
    min_bytes: u64,
    max_bytes: u64,
    prefer: u32,
    forbid: u32,
    pipe_ops: u32,
    channels: u8,
    registered: Registered,
}

impl Choice {
    /// The part of a row that is asked about at each call.
    pub fn of(row: &Row) -> Self {
        Choice {
            min_bytes: row.min_bytes,
            max_bytes: row.max_bytes,
            prefer: row.prefer,
            forbid: row.forbid,
            pipe_ops: row.pipe_ops,
            channels: row.channels,
            registered: row.registered,
        }
    }

    #[inline]
    fn matches(&self, call: &Call) -> bool {
        (self.pipe_ops == ANY_PIPE_OPS || self.pipe_ops == call.pipe_ops)
            && (self.registered == Registered::Any
                || (self.registered == Registered::Yes) == call.is_registered)
    }
}

/// The rows that apply to communicators of one size.
#[derive(Debug)]
pub struct Choices<'a> {
    all: &'a [Choice],
    /// Where the rows of each collective begin and, one further, end.
    starts: [u16; COLLECTIVES + 1],
    /// Entries for which NCCL would take more channels than there are.
    unlimited: u32,
}

impl<'a> Choices<'a> {
    /// `None` where more than [`CANDIDATES`] rows have one range. `all` holds the rows of `rows`, in their order.
    pub fn new(all: &'a [Choice], rows: impl Iterator<Item = Row>, nodes: u32) -> Option<Self> {
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
            for start in starts.iter_mut().skip(usize::from(row.collective) + 1) {
                *start += 1;
            }
        }
        let unlimited = if nodes > 1 { UNLIMITED | UNLIMITED_BETWEEN_NODES } else { UNLIMITED };
        Some(Choices { all, starts, unlimited })
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
    pub fn decide(&self, call: &Call, table: &mut [f32]) -> u8 {
        let of_collective = self.of(call.collective);
        // Ranges are sorted and disjoint, or the same: this is the first row of the only range that can hold the size.
        let first = of_collective.partition_point(|c| c.max_bytes < call.bytes);
        for choice in of_collective.iter().skip(first).take(CANDIDATES) {
            if choice.min_bytes > call.bytes {
                break;
            }
            if !choice.matches(call) {
                continue;
            }
            if choice.prefer == 0 {
                return self.without_preference(choice, table);
            }
            if let Some(entry) = cheapest(table, choice.prefer) {
                forbid(table, choice.forbid);
                if let Some(cost) = table.get_mut(entry) {
                    *cost = 0.0;
                }
                return if self.unlimited >> entry & 1 == 0 { choice.channels } else { 0 };
            }
        }
        0
    }

    fn without_preference(&self, choice: &Choice, table: &mut [f32]) -> u8 {
        forbid(table, choice.forbid);
        // NCCL may choose any entry, so that a number of channels has to be right for all of them.
        let is_unlimited = choice.channels != 0 && cheapest(table, self.unlimited).is_some();
        if is_unlimited { 0 } else { choice.channels }
    }
}

/// The possible entry of the least cost among those whose bits are set. NCCL marks impossible ones by a negative cost.
#[inline]
fn cheapest(table: &[f32], entries: u32) -> Option<usize> {
    let mut rest = entries;
    let mut best = None;
    let mut least = f32::INFINITY;
    while rest != 0 {
        let entry = rest.trailing_zeros() as usize;
        rest &= rest - 1;
        if let Some(cost) = table.get(entry)
            && *cost >= 0.0
            && *cost < least
        {
            least = *cost;
            best = Some(entry);
        }
    }
    best
}

/// Makes entries too expensive. Impossible ones stay impossible.
#[inline]
fn forbid(table: &mut [f32], entries: u32) {
    let mut rest = entries;
    while rest != 0 {
        let entry = rest.trailing_zeros() as usize;
        rest &= rest - 1;
        if let Some(cost) = table.get_mut(entry)
            && *cost >= 0.0
        {
            *cost = FORBIDDEN_US;
        }
    }
}

/// The length of a cost table with these numbers of algorithms and protocols; `None` for a shape that no known NCCL has.
#[inline]
pub fn table_length(algorithms: i32, protocols: i32) -> Option<usize> {
    /// Rows name entries by three protocols. No NCCL has had another number.
    const SHAPE: i32 = PROTOCOLS as i32;
    if protocols == SHAPE && (1..=16).contains(&algorithms) {
        Some((algorithms * SHAPE) as usize)
    } else {
        None
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
        let choices = Choices::new(&all, rows.iter().copied(), nodes).expect("few candidates");
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
        let unlimited = |nodes| Choices::new(&[], std::iter::empty(), nodes).expect("empty").unlimited;
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
    fn more_rows_of_a_range_than_candidates_are_refused() {
        let rows = vec![row(0, 9); CANDIDATES + 1];
        let all: Vec<Choice> = rows.iter().map(Choice::of).collect();
        assert!(Choices::new(&all, rows.into_iter(), 1).is_none());
    }

    #[test]
    fn only_known_shapes_of_the_table_are_edited() {
        assert_eq!((table_length(7, 3), table_length(6, 3)), (Some(21), Some(18)));
        for (algorithms, protocols) in [(7, 4), (7, 2), (0, 3), (-1, 3), (17, 3), (i32::MAX, 3)] {
            assert_eq!(table_length(algorithms, protocols), None);
        }
        let rows = [Row { prefer: entries_of(6), ..row(0, 99) }];
        let all: Vec<Choice> = rows.iter().map(Choice::of).collect();
        let choices = Choices::new(&all, rows.into_iter(), 1).expect("one row");
        let mut six = [1.0f32; 18];
        assert_eq!(choices.decide(&call(1), &mut six), 0, "NCCL before 2.23 has no PAT");
        assert_eq!(six, [1.0; 18]);
    }
}
