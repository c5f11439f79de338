//! Where everything lies: the header's words, the regions, the words of each slot.

/// `RINGWSEG` as little-endian bytes.
pub const MAGIC: u64 = u64::from_le_bytes(*b"RINGWSEG");
/// The version of this format. It changes with any change of layout or meaning.
pub const FORMAT_VERSION: u32 = 4;
/// The oldest format version that the reader knows.
pub const OLDEST_VERSION: u32 = 1;
/// Words of the header.
pub const HEADER_WORDS: usize = 512;
/// Words of the header as a reader may allocate it before it knows the geometry.
pub const HEADER_BYTES: usize = HEADER_WORDS * 8;
/// The largest segment a reader accepts, in bytes.
pub const MAX_BYTES: u64 = 64 << 20;

/// Word indices in the header. Texts are bytes padded with NUL.
pub mod head {
    #![allow(missing_docs, reason = "the table in the crate's documentation says what each is")]
    pub const MAGIC: usize = 0;
    /// Format version (low 32 bits), header words (high 32 bits).
    pub const VERSION: usize = 1;
    pub const BYTES: usize = 2;
    /// Five regions of two words: byte offset; stride in words (low 32) and slots (high 32).
    pub const REGIONS: usize = 3;
    /// pid (low 32), uid (high 32).
    pub const PID: usize = 13;
    /// Start time of the process, in clock ticks since boot, as /proc/PID/stat has it.
    pub const START_TICKS: usize = 14;
    pub const NONCE: usize = 15;
    pub const CREATED_MONO_NS: usize = 16;
    pub const CREATED_UNIX_NS: usize = 17;
    /// NCCL's version code, 22809 for 2.28.9 (low 32), profiler ABI version (high 32).
    pub const NCCL: usize = 18;
    pub const PLUGIN_VERSION: usize = 19;
    pub const PLUGIN_VERSION_WORDS: usize = 2;
    pub const BOOT_ID: usize = 21;
    pub const BOOT_ID_WORDS: usize = 5;
    pub const HOST: usize = 26;
    pub const HOST_WORDS: usize = 8;
    pub const PROGRAM: usize = 34;
    pub const PROGRAM_WORDS: usize = 2;
    /// Content hash of the tuner's rules (see [`crate::tuning`]); 0 without rules, and in files of older writers.
    pub const RULES: usize = 36;
    /// The rings of lines: byte offset; lines of a ring (low 32) and rings (high 32). Both 0 where there are none.
    pub const LINES: usize = 37;
    pub const LINES_SHAPE: usize = 38;
    /// Next ticket of each ring, each on a cache line of its own: op, group, channel, proxy.
    pub const NEXT_OP: usize = 64;
    pub const NEXT_GROUP: usize = 72;
    pub const NEXT_CHANNEL: usize = 80;
    pub const NEXT_PROXY: usize = 88;
    /// Communicators begun so far.
    pub const NEXT_COMM: usize = 96;
    /// Plans (NCCL's Group events) begun so far.
    pub const NEXT_PLAN: usize = 104;
    /// The two words that a reader may write: the communicator of which detail is wanted, and until when, host monotonic
    /// ns. 0 nobody wants any. The writer believes neither.
    pub const WANTED_COMM: usize = 112;
    pub const WANTED_UNTIL: usize = 113;
    /// Callbacks that left no record (in version 1: that were seen) and that left one, by kind; losses by reason;
    /// flaws.
    pub const REFUSED: usize = 128;
    pub const RECORDED: usize = 160;
    pub const LOST: usize = 192;
    pub const FLAWS: usize = 224;
    /// `KEY=value` lines of the job's environment.
    pub const ENV: usize = 256;
    pub const ENV_WORDS: usize = 256;
}

/// Words of a communicator slot.
pub mod comm {
    #![allow(missing_docs, reason = "the table in the crate's documentation says what each is")]
    pub const WORDS: usize = 32;
    pub const ID: usize = 1;
    /// rank (low 32), ranks (high 32; 0 unknown).
    pub const RANK: usize = 2;
    /// nodes (low 32; 0 unknown), flags (high 32): bit 0 = id and rank are known; bits 8 to 15 = what became of the tuner's
    /// rules ([`crate::codes::tuned`]), 0 in files of older writers.
    pub const NODES: usize = 3;
    pub const INIT_NS: usize = 4;
    /// 0 while alive.
    pub const FINALIZED_NS: usize = 5;
    pub const ISSUED: usize = 6;
    pub const REPLAYED: usize = 7;
    pub const NAME: usize = 8;
    pub const NAME_WORDS: usize = 8;
    /// PCI address of the device.
    pub const GPU: usize = 16;
    pub const GPU_WORDS: usize = 3;
    /// How far its making is, as the preloaded library sees it (see [`crate::codes::made`]): state (8 bits),
    /// NCCL's result of a failure (8). 0 where nobody looked.
    pub const STATE: usize = 19;
    /// When it was ready; 0 unknown.
    pub const READY_NS: usize = 20;
    /// Books of its own, so that the threads of different communicators do not share a cache line; added to the
    /// header's now and then, and when it is freed. Calls: collectives (low 32), point-to-point (high 32).
    pub const CALLS: usize = 21;
    /// Issues: collectives (low 32), point-to-point (high 32).
    pub const ISSUES: usize = 22;
    /// Plans.
    pub const PLANS: usize = 23;
    /// The writer's own notes, of no meaning to a reader. For which kinds of its next operations kernel events are wanted.
    pub const WANTS: usize = 24;
    /// Issue of the operation that was timed by kernel events last, host monotonic ns.
    pub const TIMED_NS: usize = 25;
    /// Last call, host monotonic ns.
    pub const CALLED_NS: usize = 26;
    /// Why the operation called last is worth timing (low 8 bits), and its group's ticket + 1.
    pub const HINT: usize = 27;
    /// Ticket + 1 of the first operation of the group that is being captured.
    pub const CAPTURING: usize = 28;
    /// Ticket + 1 of the operation called last.
    pub const CALLED: usize = 29;
    /// The same at the last kernel launch.
    pub const LAUNCHED: usize = 30;
    /// Shot (a pair of CUDA events) of the last launch (low 27 bits; 0 none, 32767 none because it carries several
    /// operations, or because none was free), whether it times a launch of several as a whole (bit 27), and what LAUNCHED was
    /// before it.
    pub const SHOT: usize = 31;
    /// Word 3, bit 32: ID and RANK are known.
    pub const KNOWN: u64 = 1 << 32;
    /// Word 3, from this bit on: what became of the tuner's rules, in eight bits.
    pub const TUNED_SHIFT: u32 = 40;
}

/// Words of an operation slot.
pub mod op {
    #![allow(missing_docs, reason = "the table in the crate's documentation says what each is")]
    pub const WORDS: usize = 24;
    /// comm slot (16 bits), then a byte each: kind, func, dtype, algo, proto, flags.
    pub const WHAT: usize = 1;
    /// Issue order; all ones when it has none.
    pub const ORDER: usize = 2;
    pub const COUNT: usize = 3;
    /// root or peer (i32, low 32), channels (8), warps (8).
    pub const ROOT: usize = 4;
    pub const CALLED_NS: usize = 5;
    pub const ISSUED_NS: usize = 6;
    /// Group ticket + 1; 0 none.
    pub const GROUP: usize = 7;
    /// NCCL's sequence number; all ones when it has none.
    pub const SEQ: usize = 8;
    pub const STREAM: usize = 9;
    pub const USER_TAG: usize = 10;
    /// Ticket + 1 of the captured call that this replays; 0 none.
    pub const CAPTURE: usize = 11;
    pub const PLAN: usize = 12;
    /// kernelVariant of a symmetric kernel.
    pub const VARIANT: usize = 13;
    pub const VARIANT_WORDS: usize = 4;
    /// Marks: ns after ISSUED_NS.
    pub const ENQUEUED: usize = 17;
    /// Mark: channels started (16 bits), stopped (next 16 bits).
    pub const PROGRESS: usize = 18;
    /// How its GPU time is measured, or why not (low 8 bits): [`crate::codes::timed`].
    pub const TIMED: usize = 19;
    /// Mark: ns between the CUDA events around its launch, which carries it alone, or is timed as a whole.
    pub const EVENT_NS: usize = 20;
    /// Reduction operation: NCCL's number + 1, 6 for any that the user made, 0 unknown (8 bits); seen by the
    /// preloaded library (bit 8); called inside a group (bit 9).
    pub const REDOP: usize = 21;
    /// Mark: the API call's result (low 4 bits, 15 for larger ones), ns after CALLED_NS at its return.
    pub const RETURNED: usize = 22;
    /// Word 21, bit 8.
    pub const PRELOADED: u64 = 1 << 8;
    /// Word 21, bit 9.
    pub const GROUPED: u64 = 1 << 9;
    /// Mark: ns after ISSUED_NS when that was read: it had ended by then.
    pub const EVENT_SEEN: usize = 23;
    pub const NO_ORDER: u64 = u64::MAX;
}

/// Words of a line: one operation that was recorded by the thread which has its ring, or the launch of a group's.
pub mod line {
    #![allow(missing_docs, reason = "the table in the crate's documentation says what each is")]
    pub const WORDS: usize = 8;
    /// comm slot (16 bits), func (8), dtype (8), root (i32, high 32).
    pub const WHAT: usize = 1;
    /// Elements (low 48 bits), kind (next 4). In version 3 elements alone, and the kind is a collective.
    pub const COUNT: usize = 2;
    pub const CALLED_NS: usize = 3;
    pub const STREAM: usize = 4;
    /// Mark: NCCL's sequence number; of a send or a receive the peer.
    pub const SEQ: usize = 5;
    /// Mark: issue order.
    pub const ORDER: usize = 6;
    /// Mark: see [`crate::lines::IssueBits`].
    pub const ISSUE: usize = 7;
    /// The kind's place in word COUNT.
    pub const KIND_SHIFT: u32 = 48;
    /// The count of elements in it.
    pub const COUNT_MASK: u64 = (1 << KIND_SHIFT) - 1;
    /// Kinds: a collective.
    pub const COLLECTIVE: u64 = 0;
    /// A send.
    pub const SEND: u64 = 1;
    /// A receive.
    pub const RECV: u64 = 2;
    /// The launch of operations that were called before in the same group. It has a communicator and a time.
    pub const LAUNCH: u64 = 3;
}

/// Words of the head of a ring of lines.
pub mod lines {
    #![allow(missing_docs, reason = "the table in the crate's documentation says what each is")]
    pub const WORDS: usize = 16;
    /// Words of a head in version 3: the first half.
    pub const WORDS_OF_VERSION_3: usize = 8;
    /// The next ticket of the ring, which is how many calls and launches it has recorded.
    pub const NEXT: usize = 0;
    /// Issues of collectives recorded in the ring.
    pub const ISSUES: usize = 1;
    /// Plans of its calls.
    pub const PLANS: usize = 2;
    /// The writer's own notes, of no meaning to a reader. The thread that has the ring; 0 none yet.
    pub const OWNER: usize = 3;
    /// The bare call or the group that the thread is making.
    pub const CALL: usize = 4;
    /// The names that the codes in CODES are of, by their addresses.
    pub const CALL_NAMES: usize = 5;
    pub const ISSUE_NAMES: usize = 6;
    pub const CODES: usize = 7;
    /// Launches, calls of sends and receives, and issues of these, recorded in the ring.
    pub const LAUNCHES: usize = 8;
    pub const PAIR_CALLS: usize = 9;
    pub const PAIR_ISSUES: usize = 10;
    /// The writer's own notes. The first line of the group that may not have been issued.
    pub const PENDING: usize = 11;
    /// The ticket + 1 of the group's last launch; 0 none yet.
    pub const LAUNCHED: usize = 12;
    /// The same group among the groups with records, as its handle's value + 1; 0 none.
    pub const RECORDED: usize = 13;
    /// A line's ticket in one number with its ring's and this bit, where operations of both kinds are named.
    pub const NUMBER: u64 = 1 << 43;
    /// The ring's number in it.
    pub const RING_SHIFT: u32 = 38;
}

/// Words of a group slot (one outermost ncclGroup, or one bare call).
pub mod group {
    #![allow(missing_docs, reason = "the table in the crate's documentation says what each is")]
    pub const WORDS: usize = 8;
    /// comm slot (16 bits), depth (16), captured (1).
    pub const WHAT: usize = 1;
    pub const START_NS: usize = 2;
    /// Marks: ns after START_NS.
    pub const END_CALLED: usize = 3;
    pub const LAUNCH_START: usize = 4;
    pub const LAUNCH_STOP: usize = 5;
    pub const STOP: usize = 6;
}

/// Words of a channel slot (one kernel on one channel).
pub mod channel {
    #![allow(missing_docs, reason = "the table in the crate's documentation says what each is")]
    pub const WORDS: usize = 6;
    /// Op ticket (low 56 bits), channel (high 8).
    pub const OP: usize = 1;
    /// GPU clock ns; 0 when the ABI has none.
    pub const START_GPU_NS: usize = 2;
    /// Host time of the start callback.
    pub const START_SEEN_NS: usize = 3;
    /// Mark: duration on the GPU clock + BIAS.
    pub const DURATION: usize = 4;
    /// Mark: ns after START_SEEN_NS.
    pub const STOP_SEEN: usize = 5;
    /// Added to durations so that a wrong, negative one can be told.
    pub const BIAS: u64 = 1 << 47;
}

/// Words of a proxy slot (one direction of one channel to one peer).
pub mod proxy {
    #![allow(missing_docs, reason = "the table in the crate's documentation says what each is")]
    pub const WORDS: usize = 24;
    /// The parent's handle as NCCL passed it; of another process for PXN.
    pub const PARENT: usize = 1;
    /// comm slot (16 bits; all ones unknown), channel (8), send (1), foreign (1); peer (i32, high 32).
    pub const WHAT: usize = 2;
    /// steps (low 32), chunk bytes (high 32).
    pub const STEPS: usize = 3;
    pub const START_NS: usize = 4;
    /// Process that issued the operation.
    pub const PID: usize = 5;
    /// Marks.
    pub const BYTES: usize = 6;
    pub const STARTED: usize = 7;
    pub const DONE: usize = 8;
    pub const STOP: usize = 9;
    /// Marks: ns waited for GPU, peer, wire, flush.
    pub const WAITED: usize = 10;
    /// Marks, one a live step (step mod 8): phase (4 bits), since (44 bits, ns after START_NS).
    pub const LIVE: usize = 16;
    pub const LIVE_WORDS: usize = 8;
    pub const NO_COMM: u64 = 0xffff;
}

/// The regions, in the order of the header's table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Region {
    /// Communicators.
    Comm,
    /// Operations.
    Op,
    /// Groups.
    Group,
    /// Kernels by channel.
    Channel,
    /// Network transfers.
    Proxy,
}

impl Region {
    /// Every region, in order.
    pub const ALL: [Region; 5] = [Region::Comm, Region::Op, Region::Group, Region::Channel, Region::Proxy];

    /// Words of one slot.
    pub const fn words(self) -> usize {
        match self {
            Region::Comm => comm::WORDS,
            Region::Op => op::WORDS,
            Region::Group => group::WORDS,
            Region::Channel => channel::WORDS,
            Region::Proxy => proxy::WORDS,
        }
    }

    /// The header word that counts its tickets.
    pub const fn next(self) -> usize {
        match self {
            Region::Comm => head::NEXT_COMM,
            Region::Op => head::NEXT_OP,
            Region::Group => head::NEXT_GROUP,
            Region::Channel => head::NEXT_CHANNEL,
            Region::Proxy => head::NEXT_PROXY,
        }
    }

    const fn default_shift(self) -> u32 {
        match self {
            Region::Comm => 8,
            Region::Op => 13,
            Region::Group => 12,
            Region::Channel => 15,
            Region::Proxy => 12,
        }
    }

    const fn least_shift(self) -> u32 {
        match self {
            Region::Comm => 2,
            Region::Op | Region::Group | Region::Proxy => 4,
            Region::Channel => 6,
        }
    }
}

/// How many slots each region has, as powers of two, and how many rings of lines there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    shifts: [u32; 5],
    lines: LineRings,
}

/// The rings of lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LineRings {
    rings: u32,
    shift: u32,
    head_words: usize,
}

impl LineRings {
    /// None, as in formats 1 and 2.
    pub const NONE: Self = LineRings::new(0, 0);
    /// Rings that the default geometry has, and lines of each as a power of two.
    const USUAL: Self = LineRings::new(8, 12);
    /// Rings with fewer lines are not worth their memory.
    const LEAST_SHIFT: u32 = 6;
    /// A reader accepts no more rings.
    pub const MOST: u32 = 32;

    /// So many rings of `1 << shift` lines.
    pub const fn new(rings: u32, shift: u32) -> Self {
        LineRings { rings, shift, head_words: lines::WORDS }
    }

    /// The same as version 3 has them.
    pub const fn of_version_3(self) -> Self {
        LineRings { head_words: lines::WORDS_OF_VERSION_3, ..self }
    }

    /// Words of a ring's head.
    pub const fn head_words(&self) -> usize {
        self.head_words
    }

    /// How many rings.
    pub const fn rings(&self) -> u32 {
        self.rings
    }

    /// The power of two of a ring's lines.
    pub const fn shift(&self) -> u32 {
        self.shift
    }

    /// Words of all rings: their heads first, then their lines.
    pub const fn words(&self) -> usize {
        self.rings as usize * (self.head_words + (line::WORDS << self.shift))
    }

    const fn halved(times: u32) -> Self {
        let shift = Self::USUAL.shift.saturating_sub(times);
        if shift < Self::LEAST_SHIFT { Self::NONE } else { LineRings { shift, ..Self::USUAL } }
    }
}

impl Geometry {
    /// The geometry with these powers of two, in the order of [`Region::ALL`], without lines.
    pub const fn new(shifts: [u32; 5]) -> Self {
        Geometry { shifts, lines: LineRings::NONE }
    }

    /// The same with rings of lines.
    pub const fn with_lines(self, lines: LineRings) -> Self {
        Geometry { lines, ..self }
    }

    /// The rings of lines.
    pub const fn lines(&self) -> LineRings {
        self.lines
    }

    /// The default: about 6 MiB.
    pub const fn full() -> Self {
        Self::halved(0)
    }

    /// The largest geometry of at most `bytes`; `None` when not even the smallest fits.
    pub fn within(bytes: u64) -> Option<Self> {
        (0..12).map(Self::halved).find(|g| g.bytes() <= bytes)
    }

    const fn halved(times: u32) -> Self {
        let mut shifts = [0; 5];
        let mut i = 0;
        while i < 5 {
            let r = Region::ALL[i];
            let shift = r.default_shift().saturating_sub(times);
            shifts[i] = if shift < r.least_shift() { r.least_shift() } else { shift };
            i += 1;
        }
        Geometry { shifts, lines: LineRings::halved(times) }
    }

    /// The power of two of a region's slots.
    pub const fn shift(&self, region: Region) -> u32 {
        self.shifts[region as usize]
    }

    /// First word of a region.
    pub const fn start(&self, region: Region) -> usize {
        let mut at = HEADER_WORDS;
        let mut i = 0;
        while i < region as usize {
            at += Region::ALL[i].words() << self.shifts[i];
            i += 1;
        }
        at
    }

    /// First word of the rings of lines, which follow the regions.
    pub const fn lines_start(&self) -> usize {
        let last = Region::Proxy;
        self.start(last) + (last.words() << self.shift(last))
    }

    /// Length of the whole segment in bytes.
    pub const fn bytes(&self) -> u64 {
        (self.lines_start() as u64 + self.lines.words() as u64) * 8
    }
}
