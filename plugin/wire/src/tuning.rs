#![doc = include_str!("TUNING.md")]

/// `RINGTUNE` as little-endian bytes.
pub const MAGIC: u64 = u64::from_le_bytes(*b"RINGTUNE");
/// The version of this format.
pub const FORMAT_VERSION: u32 = 1;
/// Length of the header in bytes.
pub const HEADER_BYTES: usize = 64;
/// Length of a row in bytes.
pub const ROW_BYTES: usize = 48;
/// Most rows of a table.
pub const ROWS_MAX: usize = 1023;
/// Length of the longest table in bytes.
pub const BYTES_MAX: usize = HEADER_BYTES + ROWS_MAX * ROW_BYTES;
/// Collectives that NCCL asks a tuner about: Broadcast, Reduce, AllGather, ReduceScatter, AllReduce.
pub const COLLECTIVES: usize = 5;
/// Algorithms that rules can name, TREE to PAT.
pub const ALGORITHMS: usize = 7;
/// Protocols: LL, LL128, SIMPLE.
pub const PROTOCOLS: usize = 3;
/// Every entry of NCCL's cost table that rules can name.
pub const ALL_ENTRIES: u32 = (1 << (ALGORITHMS * PROTOCOLS)) - 1;
/// Most channels: NCCL keeps the number in eight signed bits.
pub const CHANNELS_MAX: u8 = 127;
/// Most rows of one size range that apply to one communicator.
pub const CANDIDATES: usize = 4;
/// Any number of pipelined operations.
pub const ANY_PIPE_OPS: u32 = u32::MAX;

/// A row's condition on registered buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Registered {
    /// Only buffers that are not registered.
    No = 0,
    /// Only registered buffers.
    Yes = 1,
    /// Either.
    Any = 255,
}

/// One row of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Row {
    /// Least size in bytes.
    pub min_bytes: u64,
    /// Largest size in bytes, inclusive.
    pub max_bytes: u64,
    /// Least number of ranks.
    pub min_ranks: u32,
    /// Largest number of ranks, inclusive.
    pub max_ranks: u32,
    /// Least number of nodes.
    pub min_nodes: u32,
    /// Largest number of nodes, inclusive.
    pub max_nodes: u32,
    /// Preferred entries, a bit each; 0 leaves the choice to NCCL.
    pub prefer: u32,
    /// Forbidden entries, a bit each.
    pub forbid: u32,
    /// Number of pipelined operations, or [`ANY_PIPE_OPS`].
    pub pipe_ops: u32,
    /// The collective, NCCL's number.
    pub collective: u8,
    /// Channels; 0 leaves them to NCCL.
    pub channels: u8,
    /// Registered buffers.
    pub registered: Registered,
}

/// Why a file is no table of rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// It does not begin as a table does.
    Magic,
    /// Its format version is unknown.
    Version,
    /// Its length is not that of its rows, or there are too many.
    Length,
    /// Its bytes are not those that were written.
    Hash,
    /// A row holds a value that none may have.
    Row,
    /// Rows are out of order, or their ranges overlap.
    Order,
}

/// The bit of an algorithm and a protocol, NCCL's numbers; 0 where the table has no such entry.
pub const fn entry(algorithm: usize, protocol: usize) -> u32 {
    if algorithm < ALGORITHMS && protocol < PROTOCOLS { 1 << (algorithm * PROTOCOLS + protocol) } else { 0 }
}

/// All entries of an algorithm.
pub const fn entries_of(algorithm: usize) -> u32 {
    entry(algorithm, 0) | entry(algorithm, 1) | entry(algorithm, 2)
}

/// A table of rules that was checked as a whole.
#[derive(Debug, Clone, Copy)]
pub struct Rules<'a> {
    rows: &'a [[u8; ROW_BYTES]],
    hash: u64,
}

impl<'a> Rules<'a> {
    /// Reads a table, whatever the bytes are.
    ///
    /// # Errors
    /// The first thing that is wrong. No part of a wrong table is used.
    pub fn read(bytes: &'a [u8]) -> Result<Self, Refusal> {
        let (header, rest) = bytes.split_first_chunk::<HEADER_BYTES>().ok_or(Refusal::Length)?;
        if u64_at(header, 0) != MAGIC {
            return Err(Refusal::Magic);
        }
        if u32_at(header, 8) != FORMAT_VERSION {
            return Err(Refusal::Version);
        }
        let (rows, left) = rest.as_chunks::<ROW_BYTES>();
        if !left.is_empty() || rows.len() > ROWS_MAX || rows.len() as u64 != u64::from(u32_at(header, 12)) {
            return Err(Refusal::Length);
        }
        let hash = u64_at(header, 16);
        if hash_of(bytes) != hash || header.iter().skip(24).any(|b| *b != 0) {
            return Err(Refusal::Hash);
        }
        let mut before: Option<Row> = None;
        for bytes in rows {
            let row = row_of(bytes).ok_or(Refusal::Row)?;
            if before.is_some_and(|b| !may_follow(&b, &row)) {
                return Err(Refusal::Order);
            }
            before = Some(row);
        }
        Ok(Rules { rows, hash })
    }

    /// The content hash: equal for equal rules, and never 0.
    pub const fn hash(&self) -> u64 {
        if self.hash == 0 { 1 } else { self.hash }
    }

    /// All rows, in order.
    pub fn rows(&self) -> impl Iterator<Item = Row> + 'a {
        self.rows.iter().filter_map(row_of)
    }

    /// The rows that apply to communicators of this size, in order.
    pub fn rows_for(&self, ranks: u32, nodes: u32) -> impl Iterator<Item = Row> + 'a {
        self.rows().filter(move |r| {
            (r.min_ranks..=r.max_ranks).contains(&ranks) && (r.min_nodes..=r.max_nodes).contains(&nodes)
        })
    }
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..).and_then(|b| b.first_chunk()).map_or(0, |b| u64::from_le_bytes(*b))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..).and_then(|b| b.first_chunk()).map_or(0, |b| u32::from_le_bytes(*b))
}

/// The content hash of a whole table, whose own eight bytes do not count.
pub fn hash_of(table: &[u8]) -> u64 {
    const BASIS: u64 = 0xcbf2_9ce4_8422_2325;
    const PRIME: u64 = 0x0000_0100_0000_01b3;
    let counted = table.iter().take(16).chain(table.iter().skip(24));
    counted.fold(BASIS, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(PRIME))
}

fn row_of(bytes: &[u8; ROW_BYTES]) -> Option<Row> {
    let [.., collective, channels, registered, zero] = *bytes;
    let registered = match registered {
        0 => Registered::No,
        1 => Registered::Yes,
        255 => Registered::Any,
        _ => return None,
    };
    let row = Row {
        min_bytes: u64_at(bytes, 0),
        max_bytes: u64_at(bytes, 8),
        min_ranks: u32_at(bytes, 16),
        max_ranks: u32_at(bytes, 20),
        min_nodes: u32_at(bytes, 24),
        max_nodes: u32_at(bytes, 28),
        prefer: u32_at(bytes, 32),
        forbid: u32_at(bytes, 36),
        pipe_ops: u32_at(bytes, 40),
        collective,
        channels,
        registered,
    };
    if zero == 0 && row.is_valid() { Some(row) } else { None }
}

impl Row {
    /// True where each value is one that a row may have.
    pub const fn is_valid(&self) -> bool {
        self.min_bytes <= self.max_bytes
            && self.min_ranks <= self.max_ranks
            && self.min_nodes <= self.max_nodes
            && (self.prefer | self.forbid) & !ALL_ENTRIES == 0
            && (self.prefer == 0 || self.forbid == 0)
            && self.prefer.count_ones() as usize <= ALGORITHMS
            && (self.collective as usize) < COLLECTIVES
            && self.channels <= CHANNELS_MAX
    }

    /// The row as the table holds it.
    pub fn to_bytes(&self) -> [u8; ROW_BYTES] {
        let mut bytes = [0; ROW_BYTES];
        let words = [self.min_bytes, self.max_bytes].map(u64::to_le_bytes);
        let halves = [
            self.min_ranks,
            self.max_ranks,
            self.min_nodes,
            self.max_nodes,
            self.prefer,
            self.forbid,
            self.pipe_ops,
        ]
        .map(u32::to_le_bytes);
        let rest = [self.collective, self.channels, self.registered as u8, 0];
        let all = words.as_flattened().iter().chain(halves.as_flattened()).chain(&rest);
        for (place, byte) in bytes.iter_mut().zip(all) {
            *place = *byte;
        }
        bytes
    }
}

/// True where `next` may stand behind `row`.
fn may_follow(row: &Row, next: &Row) -> bool {
    if row.collective != next.collective {
        return row.collective < next.collective;
    }
    (row.min_bytes, row.max_bytes) == (next.min_bytes, next.max_bytes) || row.max_bytes < next.min_bytes
}

/// Writes the header of a table whose rows follow it in `table`. Does nothing to a table without room for a header.
pub fn seal(table: &mut [u8]) {
    let rows = table.len().saturating_sub(HEADER_BYTES) / ROW_BYTES;
    put(table, 0, &MAGIC.to_le_bytes());
    put(table, 8, &FORMAT_VERSION.to_le_bytes());
    put(table, 12, &(rows as u32).to_le_bytes());
    let hash = hash_of(table);
    put(table, 16, &hash.to_le_bytes());
}

fn put(table: &mut [u8], at: usize, bytes: &[u8]) {
    for (place, byte) in table.iter_mut().take(HEADER_BYTES).skip(at).zip(bytes) {
        *place = *byte;
    }
}
