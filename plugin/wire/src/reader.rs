//! Reading a segment. Every byte is hostile: the reader may be root, the writer is not.
//!
//! Nothing here trusts an index, a length or a text of the segment; the worst that a segment can do is to
//! say untrue things about its own job.

use crate::codes::{Flaw, Loss, UNKNOWN, call, flag, kind, made};
use crate::layout::{
    FORMAT_VERSION, Geometry, HEADER_WORDS, LineRings, MAGIC, MAX_BYTES, OLDEST_VERSION, Region, channel,
    comm, group, head, line, lines, op, proxy,
};
use crate::lines::{IssueBits, LineRing};
use crate::ring::{Extent, Ring, Segment};
use crate::sync::{self, Seen, Word};

/// Why bytes are no segment that can be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OpenError {
    /// Shorter than a header.
    Short,
    /// The magic is absent: not a segment, or one whose writer has not finished opening it.
    NotReady,
    /// Another format version than this reader's.
    Version(u32),
    /// The table of regions contradicts itself or the length.
    Geometry,
}

/// The result of looking at one ticket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found<T> {
    /// The record, whole.
    Is(T),
    /// Not published yet, or just being written: look again.
    NotYet,
    /// A later ticket has the slot.
    Overwritten,
}

/// Text of up to `8 * N - 1` bytes. It may hold anything but NUL.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Text<const N: usize> {
    words: [u64; N],
}

impl<const N: usize> Default for Text<N> {
    fn default() -> Self {
        Text { words: [0; N] }
    }
}

impl<const N: usize> Text<N> {
    /// Its bytes, up to the first NUL, one by one.
    pub fn bytes(&self) -> impl Iterator<Item = u8> + '_ {
        self.words.iter().flat_map(|w| w.to_le_bytes()).take_while(|b| *b != 0)
    }
}

/// A communicator slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CommSlot {
    /// Number of this communicator in the process.
    pub ticket: u64,
    /// Id and rank; `None` until the first operation told them (ABI v1 to v3).
    pub id: Option<(u64, u32)>,
    /// Ranks; `None` when the ABI does not say.
    pub ranks: Option<u32>,
    /// Nodes.
    pub nodes: Option<u32>,
    /// When it was made, host monotonic ns.
    pub init_ns: u64,
    /// When it was freed.
    pub finalized_ns: Option<u64>,
    /// Collectives issued by calls: the next issue order.
    pub issued: u64,
    /// Collectives issued by graph replays.
    pub replayed: u64,
    /// The user's name for it.
    pub name: Text<{ comm::NAME_WORDS }>,
    /// PCI address of the GPU.
    pub gpu: Text<{ comm::GPU_WORDS }>,
    /// How far its making is, see [`crate::codes::made`]; `None` where nobody looked.
    pub made: Option<u8>,
    /// NCCL's result, where it was not made.
    pub failed: Option<u8>,
    /// When it was ready, host monotonic ns.
    pub ready_ns: Option<u64>,
    /// The outcome of the agreement on the tuner's rules: [`crate::codes::tuned`].
    pub tuned: u8,
}

/// An operation slot.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct OpSlot {
    /// Its ticket.
    pub ticket: u64,
    /// Low 16 bits of the communicator's ticket.
    pub comm: u16,
    /// See [`crate::codes::kind`].
    pub kind: u8,
    /// See [`crate::codes::FUNCS`].
    pub func: u8,
    /// See [`crate::codes::TYPES`].
    pub dtype: u8,
    /// See [`crate::codes::ALGOS`].
    pub algo: u8,
    /// See [`crate::codes::PROTOS`].
    pub proto: u8,
    /// See [`crate::codes::flag`].
    pub flags: u8,
    /// Issue order.
    pub order: Option<u64>,
    /// Elements.
    pub count: u64,
    /// Root, or the peer of a point-to-point operation.
    pub root: i32,
    /// Channels; 0 unknown.
    pub channels: u8,
    /// Warps; 0 unknown.
    pub warps: u8,
    /// API call, host monotonic ns.
    pub called_ns: Option<u64>,
    /// Issue, host monotonic ns.
    pub issued_ns: Option<u64>,
    /// Ticket of its group.
    pub group: Option<u64>,
    /// NCCL's sequence number.
    pub seq: Option<u64>,
    /// CUDA stream.
    pub stream: u64,
    /// The user's tag (ABI v7).
    pub user_tag: u64,
    /// Ticket of the captured call that this replays.
    pub capture: Option<u64>,
    /// Number of the plan (kernel launch) it was part of.
    pub plan: u64,
    /// Symmetric kernel variant.
    pub variant: Text<{ op::VARIANT_WORDS }>,
    /// Enqueued, host monotonic ns.
    pub enqueued_ns: Option<u64>,
    /// Channels started.
    pub started: u16,
    /// Channels stopped.
    pub stopped: u16,
    /// See [`crate::codes::timed`].
    pub timed: u8,
    /// Between the CUDA events around its launch, ns.
    pub event_ns: Option<u64>,
    /// When that was read, host monotonic ns: it had ended by then.
    pub event_seen_ns: Option<u64>,
    /// See [`crate::codes::REDOPS`]; `None` where nobody looked.
    pub redop: Option<u8>,
    /// The preloaded library saw the call.
    pub preloaded: bool,
    /// It was called inside a group, as the preloaded library saw it.
    pub grouped: bool,
    /// The API call's result and its return, host monotonic ns.
    pub returned: Option<(u8, u64)>,
}

/// A group slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupSlot {
    /// Its ticket.
    pub ticket: u64,
    /// Low 16 bits of the first communicator's ticket.
    pub comm: u16,
    /// Depth of nesting.
    pub depth: u16,
    /// True when captured into a graph.
    pub captured: bool,
    /// First call, host monotonic ns.
    pub start_ns: u64,
    /// ncclGroupEnd called.
    pub end_called_ns: Option<u64>,
    /// First kernel launch, start.
    pub launch_start_ns: Option<u64>,
    /// Last kernel launch, end.
    pub launch_stop_ns: Option<u64>,
    /// End of the group.
    pub stop_ns: Option<u64>,
}

/// A channel slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChannelSlot {
    /// Its ticket.
    pub ticket: u64,
    /// Ticket of its operation.
    pub op: u64,
    /// Channel.
    pub channel: u8,
    /// Kernel start, GPU clock ns.
    pub start_gpu_ns: Option<u64>,
    /// Kernel duration, GPU clock ns; negative when NCCL's stamps are wrong.
    pub duration_ns: Option<i64>,
    /// Start callback, host monotonic ns.
    pub start_seen_ns: u64,
    /// Stop callback, host monotonic ns.
    pub stop_seen_ns: Option<u64>,
}

/// A proxy slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProxySlot {
    /// Its ticket.
    pub ticket: u64,
    /// The parent's handle; of the process `pid`.
    pub parent: u64,
    /// Low 16 bits of the communicator's ticket; `None` for another process's.
    pub comm: Option<u16>,
    /// Channel.
    pub channel: u8,
    /// Sends.
    pub is_send: bool,
    /// Issued by another process (PXN).
    pub foreign: bool,
    /// Peer rank.
    pub peer: i32,
    /// Steps planned.
    pub steps: u32,
    /// Bytes of a whole step.
    pub chunk: u32,
    /// Start, host monotonic ns.
    pub start_ns: u64,
    /// Process that issued the operation.
    pub pid: u32,
    /// Bytes moved.
    pub bytes: u64,
    /// Steps begun.
    pub started: u64,
    /// Steps done.
    pub done: u64,
    /// End, host monotonic ns.
    pub stop_ns: Option<u64>,
    /// Waited for GPU, peer, wire, flush, ns.
    pub waited_ns: [u64; 4],
    /// The live steps: phase and since when (host monotonic ns).
    pub live: [Option<(u8, u64)>; proxy::LIVE_WORDS],
}

/// A segment opened for reading.
#[derive(Debug, Clone, Copy)]
pub struct Reader<'a> {
    segment: Segment<'a>,
}

fn low(word: u64) -> u32 {
    (word & 0xffff_ffff) as u32
}

fn high(word: u64) -> u32 {
    (word >> 32) as u32
}

fn some(word: u64) -> Option<u64> {
    if word == 0 { None } else { Some(word) }
}

fn byte(word: u64, shift: u32) -> u8 {
    ((word >> shift) & 0xff) as u8
}

fn short(word: u64) -> u16 {
    (word & 0xffff) as u16
}

impl<'a> Reader<'a> {
    /// Checks header and geometry.
    ///
    /// # Errors
    /// [`OpenError`] says what is wrong; `NotReady` may be gone a moment later.
    pub fn open(words: &'a [Word]) -> Result<Self, OpenError> {
        let header = words.get(..HEADER_WORDS).ok_or(OpenError::Short)?;
        let at = |i: usize| header.get(i).map_or(0, Word::get);
        if header.first().map_or(0, Word::get_first) != MAGIC {
            return Err(OpenError::NotReady);
        }
        let version = at(head::VERSION);
        if !(OLDEST_VERSION..=FORMAT_VERSION).contains(&low(version)) {
            return Err(OpenError::Version(low(version)));
        }
        let mut shifts = [0u32; 5];
        for (i, (shift, region)) in shifts.iter_mut().zip(Region::ALL).enumerate() {
            let shape = at(head::REGIONS + i * 2 + 1);
            let slots = high(shape);
            if low(shape) as usize != region.words() || !slots.is_power_of_two() || slots > 1 << 24 {
                return Err(OpenError::Geometry);
            }
            *shift = slots.trailing_zeros();
        }
        let lines = match low(version) {
            ..3 => Some(LineRings::NONE),
            3 => line_rings(at(head::LINES_SHAPE)).map(LineRings::of_version_3),
            _ => line_rings(at(head::LINES_SHAPE)),
        };
        let geometry = Geometry::new(shifts).with_lines(lines.ok_or(OpenError::Geometry)?);
        let lines_at = if geometry.lines().rings() > 0 { geometry.lines_start() as u64 * 8 } else { 0 };
        let fits = high(version) as usize == HEADER_WORDS
            && geometry.bytes() <= MAX_BYTES
            && geometry.bytes() == at(head::BYTES)
            && geometry.bytes() <= words.len() as u64 * 8
            && Region::ALL
                .iter()
                .enumerate()
                .all(|(i, r)| at(head::REGIONS + i * 2) == geometry.start(*r) as u64 * 8)
            && (low(version) < 3 || at(head::LINES) == lines_at);
        if !fits {
            return Err(OpenError::Geometry);
        }
        Ok(Reader { segment: Segment::new(words, &geometry) })
    }

    /// The format version it was written in.
    pub fn format(&self) -> u32 {
        low(self.header(head::VERSION))
    }

    /// A header word.
    pub fn header(&self, i: usize) -> u64 {
        self.segment.get(i)
    }

    /// A header text.
    pub fn text<const N: usize>(&self, at: usize) -> Text<N> {
        let mut words = [0; N];
        for (i, w) in words.iter_mut().enumerate() {
            *w = self.segment.get(at.saturating_add(i));
        }
        Text { words }
    }

    /// Process id, as the process sees it.
    pub fn pid(&self) -> u32 {
        low(self.header(head::PID))
    }

    /// User id.
    pub fn uid(&self) -> u32 {
        high(self.header(head::PID))
    }

    /// NCCL's version code, 22809 for 2.28.9; `None` when unknown.
    pub fn nccl(&self) -> Option<u32> {
        some(u64::from(low(self.header(head::NCCL)))).map(low)
    }

    /// Profiler ABI version in use.
    pub fn abi(&self) -> Option<u32> {
        some(u64::from(high(self.header(head::NCCL)))).map(low)
    }

    /// Content hash of the tuner's rules.
    pub fn rules(&self) -> Option<u64> {
        some(self.header(head::RULES))
    }

    /// Callbacks of a kind that were seen.
    pub fn seen(&self, kind: usize) -> u64 {
        let first = if kind < call::COUNT { self.header(head::REFUSED + kind) } else { 0 };
        // Version 1 counted what it saw, version 2 counts what it refused.
        if self.format() < 2 { first } else { first.wrapping_add(self.recorded(kind)) }
    }

    /// Callbacks of a kind that were recorded.
    pub fn recorded(&self, kind: usize) -> u64 {
        let header = if kind < call::COUNT { self.header(head::RECORDED + kind) } else { 0 };
        // The communicators have books of their own.
        let own = |i: usize, shift: u32, bits: u64| {
            let ring = &self.segment.comm;
            let slots = (0..ring.slots()).filter_map(|n| ring.slot(n)?.get(i));
            slots.fold(0u64, |sum, w| sum.wrapping_add(w.get() >> shift & bits))
        };
        const HALF: u64 = 0xffff_ffff;
        let sum = |i| self.segment.lines.sum(i);
        let header = header.wrapping_add(match kind {
            // The tickets are those of all lines. They are read last, as they grow first.
            call::COLL_CALL => {
                let others = sum(lines::LAUNCHES).wrapping_add(sum(lines::PAIR_CALLS));
                sum(lines::NEXT).saturating_sub(others)
            }
            call::P2P_CALL => sum(lines::PAIR_CALLS),
            call::COLL => sum(lines::ISSUES),
            call::P2P => sum(lines::PAIR_ISSUES),
            _ => 0,
        });
        match kind {
            call::COLL_CALL if self.format() >= 2 => header.wrapping_add(own(comm::CALLS, 0, HALF)),
            call::P2P_CALL if self.format() >= 2 => header.wrapping_add(own(comm::CALLS, 32, HALF)),
            call::COLL if self.format() >= 2 => header.wrapping_add(own(comm::ISSUES, 0, HALF)),
            call::P2P if self.format() >= 2 => header.wrapping_add(own(comm::ISSUES, 32, HALF)),
            // Their numbers count them.
            call::PLAN if self.format() >= 2 => {
                let lines = self.segment.lines.sum(lines::PLANS);
                self.header(head::NEXT_PLAN).wrapping_add(own(comm::PLANS, 0, u64::MAX)).wrapping_add(lines)
            }
            call::KERNEL if self.format() >= 2 => self.header(head::NEXT_CHANNEL),
            _ => header,
        }
    }

    /// Callbacks lost for a reason.
    pub fn lost(&self, loss: Loss) -> u64 {
        self.header(head::LOST + loss as usize)
    }

    /// Records with a flaw.
    pub fn flaws(&self, flaw: Flaw) -> u64 {
        self.header(head::FLAWS + flaw as usize)
    }

    /// How far a region is.
    pub fn ring(&self, region: Region) -> Extent {
        match region {
            Region::Comm => self.segment.comm.extent(),
            Region::Op => self.segment.op.extent(),
            Region::Group => self.segment.group.extent(),
            Region::Channel => self.segment.channel.extent(),
            Region::Proxy => self.segment.proxy.extent(),
        }
    }

    /// How many rings of lines there are.
    pub fn line_rings(&self) -> usize {
        self.segment.lines.rings()
    }

    /// How far a ring of lines is.
    pub fn line_ring(&self, ring: usize) -> Extent {
        self.segment.lines.ring(ring).map_or(Extent::default(), |r| Extent::of(r.slots(), r.next()))
    }

    /// The operation in the line of a ticket; `None` in the line of a launch, which its operations show. Its ticket there is
    /// a number of its own: see [`lines::NUMBER`].
    pub fn line(&self, ring: usize, ticket: u64) -> Found<Option<OpSlot>> {
        let Some(lines) = self.segment.lines.ring(ring) else { return Found::NotYet };
        let launched_ns = |ticket| match find_line(&lines, ticket) {
            Found::Is(w) if line_kind(&w) == line::LAUNCH => Some(w[line::CALLED_NS]),
            _ => None,
        };
        let number = |ticket| line_number(ring as u64, ticket);
        find_line(&lines, ticket).map(|w| match self.format() {
            ..4 => Some(decode_line_of_version_3(number(ticket), lines.lap(ticket), &w)),
            _ => decode_line(ticket, number, lines.lap(ticket), &w, launched_ns),
        })
    }

    /// Every communicator in the table.
    pub fn comms(&self) -> impl Iterator<Item = CommSlot> + '_ {
        let ring = &self.segment.comm;
        (0..ring.next().min(ring.slots())).filter_map(move |i| {
            let mut w = [0; comm::WORDS];
            let slot = ring.slot(i)?;
            // A slot being written now is complete at the next look.
            let Seen::Whole(ticket) = sync::read(slot, &mut w) else { return None };
            Some(decode_comm(ticket, &w))
        })
    }

    /// The operation of a ticket.
    pub fn op(&self, ticket: u64) -> Found<OpSlot> {
        let lap = self.segment.op.lap(ticket);
        find(&self.segment.op, ticket).map(|w| decode_op(ticket, lap, &w))
    }

    /// The group of a ticket.
    pub fn group(&self, ticket: u64) -> Found<GroupSlot> {
        let lap = self.segment.group.lap(ticket);
        find(&self.segment.group, ticket).map(|w| decode_group(ticket, lap, &w))
    }

    /// The channel record of a ticket.
    pub fn channel(&self, ticket: u64) -> Found<ChannelSlot> {
        let lap = self.segment.channel.lap(ticket);
        find(&self.segment.channel, ticket).map(|w| decode_channel(ticket, lap, &w))
    }

    /// The network transfer of a ticket.
    pub fn proxy(&self, ticket: u64) -> Found<ProxySlot> {
        let lap = self.segment.proxy.lap(ticket);
        find(&self.segment.proxy, ticket).map(|w| decode_proxy(ticket, lap, &w))
    }
}

impl<T> Found<T> {
    /// Changes the record.
    pub fn map<U>(self, f: impl FnOnce(T) -> U) -> Found<U> {
        match self {
            Found::Is(t) => Found::Is(f(t)),
            Found::NotYet => Found::NotYet,
            Found::Overwritten => Found::Overwritten,
        }
    }
}

fn find<const W: usize>(ring: &Ring<'_, W>, ticket: u64) -> Found<[u64; W]> {
    let mut words = [0; W];
    let Some(slot) = ring.slot(ticket) else { return Found::NotYet };
    match sync::read(slot, &mut words) {
        Seen::Whole(t) if t == ticket => Found::Is(words),
        Seen::Whole(t) if t > ticket => Found::Overwritten,
        _ if ring.next() > ticket.saturating_add(ring.slots()) => Found::Overwritten,
        _ => Found::NotYet,
    }
}

fn find_line(ring: &LineRing<'_>, ticket: u64) -> Found<[u64; line::WORDS]> {
    let mut words = [0; line::WORDS];
    let Some(slot) = ring.line(ticket) else { return Found::NotYet };
    match sync::read(slot, &mut words) {
        Seen::Whole(t) if t == ticket => Found::Is(words),
        Seen::Whole(t) if t > ticket => Found::Overwritten,
        _ if ring.next() > ticket.saturating_add(ring.slots()) => Found::Overwritten,
        _ => Found::NotYet,
    }
}

/// The shape in a header word; `None` for one that cannot be.
fn line_rings(word: u64) -> Option<LineRings> {
    if word == 0 {
        return Some(LineRings::NONE);
    }
    let (slots, rings) = (low(word), high(word));
    let possible = slots.is_power_of_two() && slots <= 1 << 24 && (1..=LineRings::MOST).contains(&rings);
    possible.then(|| LineRings::new(rings, slots.trailing_zeros()))
}

fn text_at<const N: usize>(w: &[u64], at: usize) -> Text<N> {
    let mut words = [0; N];
    for (o, i) in words.iter_mut().zip(w.iter().skip(at)) {
        *o = *i;
    }
    Text { words }
}

fn decode_comm(ticket: u64, w: &[u64; comm::WORDS]) -> CommSlot {
    let known = w[comm::NODES] & comm::KNOWN != 0;
    let state = w[comm::STATE];
    CommSlot {
        ticket,
        id: known.then(|| (w[comm::ID], low(w[comm::RANK]))),
        ranks: some(u64::from(high(w[comm::RANK]))).map(low),
        nodes: some(u64::from(low(w[comm::NODES]))).map(low),
        init_ns: w[comm::INIT_NS],
        finalized_ns: some(w[comm::FINALIZED_NS]),
        issued: w[comm::ISSUED],
        replayed: w[comm::REPLAYED],
        name: text_at(w, comm::NAME),
        gpu: text_at(w, comm::GPU),
        made: Some(byte(state, 0)).filter(|s| *s != made::UNKNOWN),
        failed: (byte(state, 0) == made::FAILED).then(|| byte(state, 8)),
        ready_ns: some(w[comm::READY_NS]),
        tuned: byte(w[comm::NODES], comm::TUNED_SHIFT),
    }
}

fn decode_op(ticket: u64, lap: u64, w: &[u64; op::WORDS]) -> OpSlot {
    let what = w[op::WHAT];
    let issued = some(w[op::ISSUED_NS]);
    let progress = sync::marked(w[op::PROGRESS], lap).unwrap_or(0);
    OpSlot {
        ticket,
        comm: short(what),
        kind: byte(what, 16),
        func: byte(what, 24),
        dtype: byte(what, 32),
        algo: byte(what, 40),
        proto: byte(what, 48),
        flags: byte(what, 56),
        order: (w[op::ORDER] != op::NO_ORDER).then_some(w[op::ORDER]),
        count: w[op::COUNT],
        root: low(w[op::ROOT]) as i32,
        channels: byte(w[op::ROOT], 32),
        warps: byte(w[op::ROOT], 40),
        called_ns: some(w[op::CALLED_NS]),
        issued_ns: issued,
        group: w[op::GROUP].checked_sub(1),
        seq: (w[op::SEQ] != op::NO_ORDER).then_some(w[op::SEQ]),
        stream: w[op::STREAM],
        user_tag: w[op::USER_TAG],
        capture: w[op::CAPTURE].checked_sub(1),
        plan: w[op::PLAN],
        variant: text_at(w, op::VARIANT),
        enqueued_ns: sync::marked(w[op::ENQUEUED], lap).and_then(|d| issued.map(|i| i.saturating_add(d))),
        started: short(progress),
        stopped: short(progress >> 16),
        timed: byte(w[op::TIMED], 0),
        event_ns: sync::marked(w[op::EVENT_NS], lap),
        event_seen_ns: sync::marked(w[op::EVENT_SEEN], lap).and_then(|d| issued.map(|i| i.saturating_add(d))),
        redop: Some(byte(w[op::REDOP], 0)).filter(|r| *r != UNKNOWN),
        preloaded: w[op::REDOP] & op::PRELOADED != 0,
        grouped: w[op::REDOP] & op::GROUPED != 0,
        returned: sync::marked(w[op::RETURNED], lap)
            .and_then(|r| Some(((r & 0xf) as u8, some(w[op::CALLED_NS])?.saturating_add(r >> 4)))),
    }
}

/// A line's ticket as a number among those of both kinds of operation.
fn line_number(ring: u64, ticket: u64) -> u64 {
    lines::NUMBER | ring << lines::RING_SHIFT | ticket & ((1 << lines::RING_SHIFT) - 1)
}

fn line_kind(w: &[u64; line::WORDS]) -> u64 {
    w[line::COUNT] >> line::KIND_SHIFT & 0xf
}

/// The call of a line.
fn called_in_line(number: u64, w: &[u64; line::WORDS]) -> OpSlot {
    let what = w[line::WHAT];
    OpSlot {
        ticket: number,
        comm: short(what),
        kind: kind::COLLECTIVE,
        func: byte(what, 16),
        dtype: byte(what, 24),
        root: high(what) as i32,
        count: w[line::COUNT],
        called_ns: some(w[line::CALLED_NS]),
        stream: w[line::STREAM],
        ..OpSlot::default()
    }
}

/// The three marks of an issue. They are written one after the other: what is not whole yet is whole at a later look.
fn issue_marks(lap: u64, w: &[u64; line::WORDS]) -> Option<[u64; 3]> {
    let [seq, order, issue] = [line::SEQ, line::ORDER, line::ISSUE].map(|i| sync::marked(w[i], lap));
    Some([seq?, order?, issue?])
}

fn set_issue(op: &mut OpSlot, issue: IssueBits) {
    (op.algo, op.proto, op.channels, op.warps) = (issue.algo, issue.proto, issue.channels, issue.warps);
    (op.flags, op.timed) = (issue.flags, issue.timed);
}

fn decode_line_of_version_3(number: u64, lap: u64, w: &[u64; line::WORDS]) -> OpSlot {
    let mut op = called_in_line(number, w);
    if let Some([seq, order, issue]) = issue_marks(lap, w) {
        (op.seq, op.order) = (Some(seq), Some(order));
        set_issue(&mut op, IssueBits::of_version_3(issue));
        // It is issued within its call, which has one stamp; and launched alone.
        op.issued_ns = op.called_ns;
        op.plan = number + 1;
    }
    op
}

/// A line; `launched_ns` returns when the launch in another line of the ring was.
fn decode_line(
    ticket: u64,
    number: impl Fn(u64) -> u64,
    lap: u64,
    w: &[u64; line::WORDS],
    launched_ns: impl Fn(u64) -> Option<u64>,
) -> Option<OpSlot> {
    let mut op = called_in_line(number(ticket), w);
    op.count &= line::COUNT_MASK;
    op.kind = match line_kind(w) {
        line::COLLECTIVE => kind::COLLECTIVE,
        line::SEND => kind::SEND,
        line::RECV => kind::RECV,
        _ => return None,
    };
    let Some([seq, order, issue]) = issue_marks(lap, w) else { return Some(op) };
    let issue = IssueBits::of(issue);
    set_issue(&mut op, issue);
    op.order = Some(order).filter(|_| issue.flags & flag::ORDER_UNKNOWN == 0);
    match op.kind {
        kind::COLLECTIVE => op.seq = Some(seq),
        _ => op.root = low(seq) as i32,
    }
    // Alone, it is issued within its call, which has one stamp.
    op.issued_ns = op.called_ns;
    if issue.launch == IssueBits::NO_LAUNCH {
        return Some(op);
    }
    let launch = ticket.wrapping_add(issue.launch);
    op.plan = number(launch) + 1;
    if issue.launch > 0 {
        op.issued_ns = launched_ns(launch).or(op.called_ns);
    }
    Some(op)
}

fn decode_group(ticket: u64, lap: u64, w: &[u64; group::WORDS]) -> GroupSlot {
    let start = w[group::START_NS];
    let after = |i: usize| sync::marked(w[i], lap).map(|d| start.saturating_add(d));
    GroupSlot {
        ticket,
        comm: short(w[group::WHAT]),
        depth: short(w[group::WHAT] >> 16),
        captured: w[group::WHAT] >> 32 & 1 == 1,
        start_ns: start,
        end_called_ns: after(group::END_CALLED),
        launch_start_ns: after(group::LAUNCH_START),
        launch_stop_ns: after(group::LAUNCH_STOP),
        stop_ns: after(group::STOP),
    }
}

fn decode_channel(ticket: u64, lap: u64, w: &[u64; channel::WORDS]) -> ChannelSlot {
    let start = some(w[channel::START_GPU_NS]);
    let seen = w[channel::START_SEEN_NS];
    ChannelSlot {
        ticket,
        op: w[channel::OP] & ((1 << 56) - 1),
        channel: byte(w[channel::OP], 56),
        start_gpu_ns: start,
        duration_ns: start.and_then(|_| {
            let d = sync::marked(w[channel::DURATION], lap)?;
            Some(d as i64 - channel::BIAS as i64)
        }),
        start_seen_ns: seen,
        stop_seen_ns: sync::marked(w[channel::STOP_SEEN], lap).map(|d| seen.saturating_add(d)),
    }
}

fn decode_proxy(ticket: u64, lap: u64, w: &[u64; proxy::WORDS]) -> ProxySlot {
    let what = w[proxy::WHAT];
    let start = w[proxy::START_NS];
    let value = |i: usize| sync::marked(w[i], lap).unwrap_or(0);
    let mut waited_ns = [0; 4];
    for (i, o) in waited_ns.iter_mut().enumerate() {
        *o = value(proxy::WAITED + i);
    }
    let mut live = [None; proxy::LIVE_WORDS];
    for (i, o) in live.iter_mut().enumerate() {
        let v = value(proxy::LIVE + i);
        *o = (v & 0xf != 0).then(|| (byte(v & 0xf, 0), start.saturating_add(v >> 4)));
    }
    ProxySlot {
        ticket,
        parent: w[proxy::PARENT],
        comm: (what & 0xffff != proxy::NO_COMM).then(|| short(what)),
        channel: byte(what, 16),
        is_send: what >> 24 & 1 == 1,
        foreign: what >> 25 & 1 == 1,
        peer: high(what) as i32,
        steps: low(w[proxy::STEPS]),
        chunk: high(w[proxy::STEPS]),
        start_ns: start,
        pid: low(w[proxy::PID]),
        bytes: value(proxy::BYTES),
        started: value(proxy::STARTED),
        done: value(proxy::DONE),
        stop_ns: sync::marked(w[proxy::STOP], lap).map(|d| start.saturating_add(d)),
        waited_ns,
        live,
    }
}
