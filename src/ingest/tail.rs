//! Following one segment: what is new, what moved on, what was lost.

use super::attribution;
use super::cgroup::Groups;
use super::decode;
use super::host::Host;
use super::mapping::{MapError, Mapping};
use super::process::{self, Life};
use super::stacks::Answer;
use super::window::{Open, Told, Window};
use crate::model::{
    ChannelStamp, CommId, CommRecord, HostFact, Liveness, OpRecord, SegmentId, SegmentRecord, Spare, Timing,
    Update,
};
use ringwatch_wire::codes::{Flaw, Loss, kind};
use ringwatch_wire::layout::{Region, head};
use ringwatch_wire::reader::{CommSlot, Found, OpSlot, Reader};
use std::collections::BTreeMap;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};

/// How often the pages of a segment that was read are given back, in ns.
const KEEP_PAGES_NS: u64 = 3_000_000_000;

/// Handle kind of an issued operation, in bits 44 to 47 of a parent's number; see the plugin's handles.
const ISSUED_KIND: u64 = 4;
const VALUE_MASK: u64 = (1 << 44) - 1;

/// Operations kept after they are settled.
const RECENT: usize = 1024;
/// An operation this many tickets back is not looked at again: a host runs ahead of its GPU by no more than
/// CUDA's queue of about a thousand launches, so nothing new is to be expected of it.
const SETTLED_TICKETS: u64 = 4096;

/// A process of which nothing was heard for so long, and at two looks, is asked after more often, in ns.
const QUIET_NS: u64 = 250_000_000;
/// How often then, in ns.
const QUIET_LOOK_NS: u64 = 50_000_000;
/// How often where it issues operations, in ns.
const MOVING_LOOK_NS: u64 = 1_000_000_000;

/// Tickets of one ring: how far it was read and what has to be looked at again.
#[derive(Debug, Default)]
struct Cursor {
    /// Set by the first look: what was overwritten before it is history, not loss.
    begun: bool,
    next: u64,
    open: Vec<u64>,
    missed: u64,
    /// How much of the ring was new at the last look; 1 is all of it.
    fill: f64,
}

impl Cursor {
    /// The tickets to look at now: the open ones and the new ones. Those that were overwritten unread
    /// are counted.
    fn take(&mut self, head: u64, slots: u64) -> impl Iterator<Item = u64> + use<> {
        let first = head.saturating_sub(slots);
        if !self.begun {
            self.begun = true;
            // The oldest slots of a busy ring are overwritten while they are read.
            self.next = if first > 0 { first + slots / 8 } else { 0 };
        }
        if first > self.next {
            self.missed += first - self.next;
            self.next = first;
        }
        self.fill = head.saturating_sub(self.next) as f64 / slots.max(1) as f64;
        let new = self.next..head;
        self.next = self.next.max(head);
        std::mem::take(&mut self.open).into_iter().chain(new)
    }
}

/// What all that are followed use together.
#[derive(Debug, Default)]
pub(super) struct Shared {
    /// Room for records.
    pub(super) spare: Spare,
    pub(super) groups: Groups,
}

/// One segment being followed.
#[derive(Debug)]
pub(super) struct Tail {
    mapping: Mapping,
    record: SegmentRecord,
    life: Option<Life>,
    host: Option<Host>,
    looked_ns: u64,
    /// When its process was last asked after.
    asked_ns: u64,
    /// When something new was last read of it.
    moved_ns: u64,
    /// When it was last read at all.
    read_ns: u64,
    /// When its pages were last given back.
    emptied_ns: u64,
    /// NCCL's version, as its code.
    nccl: Option<u32>,
    comms: BTreeMap<u16, (CommSlot, CommRecord)>,
    ops: Window,
    op: Cursor,
    channel: Cursor,
    proxy: Cursor,
    told_missed: [u64; 3],
    host_clock: u64,
    /// Nothing more will come: the process is gone and the segment was read to its end.
    done: bool,
}

impl Tail {
    /// The segment, unless another job is wanted, or a later beginning.
    pub(super) fn of(
        path: PathBuf,
        mapping: Mapping,
        wanted: Option<(&str, u64)>,
        now_ns: u64,
    ) -> Result<Option<Self>, MapError> {
        let reader = mapping.reader().ok_or(MapError::Geometry)?;
        let environment = decode::environment(&reader);
        let mut job = decode::job(&environment);
        let begun = reader.header(head::CREATED_MONO_NS);
        if wanted.is_some_and(|(name, since)| job.name.as_deref() != Some(name) || begun < since) {
            return Ok(None);
        }
        let (pid, nccl) = (reader.pid(), reader.nccl());
        let start_ticks = reader.header(head::START_TICKS);
        let boot = decode::text(&reader.text::<{ head::BOOT_ID_WORDS }>(head::BOOT_ID));
        let this_boot = boot.is_none() || process::boot_id().is_none() || boot == process::boot_id();
        let life = if this_boot { Life::find(pid, start_ticks, &mapping) } else { None };
        let seen = match life {
            Some(Life::Process(pid, ..)) => Some(pid),
            _ => None,
        };
        job.labels = attribution::labels(&environment, mapping.owner(), seen, Path::new("/"));
        let record = SegmentRecord {
            id: SegmentId(reader.header(head::NONCE)),
            path,
            pid,
            host: decode::text(&reader.text::<{ head::HOST_WORDS }>(head::HOST)).unwrap_or_default(),
            program: decode::text(&reader.text::<{ head::PROGRAM_WORDS }>(head::PROGRAM)).unwrap_or_default(),
            nccl: nccl.map(decode::nccl_version),
            abi: reader.abi(),
            job,
            owner: Some(mapping.owner()),
            liveness: if life.is_some() { Liveness::Alive } else { Liveness::Gone(None) },
            created_ns: begun,
            created_unix_ns: reader.header(head::CREATED_UNIX_NS),
            losses: Vec::new(),
        };
        // Of a process that is seen by its lock alone nobody here knows the pid.
        let host = seen.map(|pid| Host::new(record.id, pid));
        Ok(Some(Tail {
            mapping,
            record,
            life,
            host,
            looked_ns: now_ns,
            asked_ns: 0,
            moved_ns: 0,
            read_ns: now_ns,
            emptied_ns: now_ns,
            nccl,
            comms: BTreeMap::new(),
            ops: Window::default(),
            op: Cursor::default(),
            channel: Cursor::default(),
            proxy: Cursor::default(),
            told_missed: [0; 3],
            host_clock: clock_of(boot.as_deref().unwrap_or_default()),
            done: false,
        }))
    }

    pub(super) fn id(&self) -> SegmentId {
        self.record.id
    }

    pub(super) fn liveness(&self) -> Liveness {
        self.record.liveness
    }

    /// The pid of its process, as this process sees it.
    pub(super) fn host_pid(&self) -> Option<u32> {
        self.host.as_ref().map(Host::pid)
    }

    /// Takes where its process is.
    pub(super) fn stack(&mut self, answer: Answer, now_ns: u64) -> Option<HostFact> {
        self.host.as_mut().map(|h| h.stack(answer, now_ns))
    }

    /// Asks its plugin for detail of a communicator; true when its process lives and takes part in it.
    pub(super) fn want(&self, comm: CommId, until_ns: u64) -> std::io::Result<bool> {
        let takes_part = self.comms.values().any(|(_, c)| c.comm == comm);
        let asked = takes_part && self.record.liveness == Liveness::Alive;
        if asked {
            self.mapping.want(comm.0, until_ns)?;
        }
        Ok(asked)
    }

    /// True while its process lives and the last look found something new.
    pub(super) fn moves(&self) -> bool {
        self.record.liveness == Liveness::Alive && self.moved_ns == self.read_ns
    }

    /// How much of its fullest ring was new at the last look.
    pub(super) fn fill(&self) -> f64 {
        [&self.op, &self.channel, &self.proxy].iter().fold(0.0, |most, c| most.max(c.fill))
    }

    /// True when nothing more will come.
    pub(super) fn done(&self) -> bool {
        self.done
    }

    pub(super) fn record(&self) -> SegmentRecord {
        self.record.clone()
    }

    /// What the kernel tells the end of its process by, where it lives and the kernel does.
    pub(super) fn end(&self) -> Option<BorrowedFd<'_>> {
        self.life.as_ref().filter(|_| self.record.liveness == Liveness::Alive).and_then(Life::end)
    }

    /// Reads what is new. Where it is time to see whether the process runs, `ended` says what the kernel told of that.
    pub(super) fn poll(
        &mut self,
        now_ns: u64,
        ended: Option<bool>,
        shared: &mut Shared,
        out: &mut dyn FnMut(Update),
    ) {
        let look = ended.is_some();
        if self.done {
            return;
        }
        // Looked at before reading: what a process wrote before its end is read after it was seen gone.
        let mut gone = self.record.liveness != Liveness::Alive;
        if let (Some(ended), false) = (ended, gone)
            && !self.life.as_ref().is_some_and(|l| l.goes_on(&self.mapping, ended))
        {
            gone = true;
            // It was seen alive at the last look: it ended in between.
            self.record.liveness = Liveness::Gone(Some(self.looked_ns));
        }
        if look {
            self.looked_ns = now_ns;
        }
        // Who issues operations runs, whatever else is to be said of it.
        let moves = self.moved_ns == self.read_ns || now_ns.saturating_sub(self.moved_ns) < QUIET_NS;
        let asked_for =
            now_ns.saturating_sub(self.asked_ns) >= if moves { MOVING_LOOK_NS } else { QUIET_LOOK_NS };
        if look && (gone || asked_for) {
            self.asked_ns = now_ns;
            let start = self.life.as_ref().and_then(Life::start_ticks);
            let fact = self
                .host
                .as_mut()
                .zip(start)
                .and_then(|(h, start)| h.look(start, now_ns, &mut shared.groups));
            if let Some(fact) = fact {
                out(Update::Host(Box::new(fact)));
            }
        }
        let mut changed = gone;
        let before = self.op.next + self.channel.next + self.proxy.next;
        // The mapping outlives the reader; taking it out keeps the borrow checker's eyes off `self`.
        let spoilt = match self.mapping.reader() {
            Some(reader) => {
                let books = losses(&reader);
                read_comms(&reader, (self.record.id, self.host_clock), &mut self.comms, out);
                self.op.read_ops(&reader, &mut self.ops);
                let recent = self.op.next.saturating_sub(RECENT as u64)..self.op.next;
                self.channel.read_channels(&reader, &mut self.ops, &recent);
                self.proxy.read_transfers(&reader, &mut self.ops, &recent);
                if self.record.losses != books {
                    self.record.losses = books;
                    changed = true;
                }
                if reader.nccl() != self.nccl {
                    self.nccl = reader.nccl();
                    self.record.nccl = self.nccl.map(decode::nccl_version).or(self.record.nccl.take());
                    changed = true;
                }
                false
            }
            None => true,
        };
        if spoilt {
            self.record.losses = vec![("segment spoilt by its owner", 1)];
            changed = true;
        }
        self.read_ns = now_ns;
        if before != self.op.next + self.channel.next + self.proxy.next {
            self.moved_ns = now_ns;
        }
        if gone || spoilt || now_ns.saturating_sub(self.emptied_ns) >= KEEP_PAGES_NS {
            self.emptied_ns = now_ns;
            self.mapping.give_back();
        }
        self.tell(&mut shared.spare, out);
        if changed {
            out(Update::Segment(self.record.clone()));
        }
        self.done = gone || spoilt;
        if self.done {
            self.ops = Window::default();
        }
    }

    fn tell(&mut self, spare: &mut Spare, out: &mut dyn FnMut(Update)) {
        let comms = &self.comms;
        self.ops.tell(|open| {
            // An operation of a communicator that nobody knows yet is told once it is known.
            let Some((_, comm)) = comms.get(&open.slot.comm) else { return Told::Later };
            out(Update::Op(spare.put(assemble(comm, open))));
            if whole(open) { Told::Whole } else { Told::SoFar }
        });
        for (i, (what, missed)) in [
            ("operations", self.op.missed),
            ("channel stamps", self.channel.missed),
            ("network transfers", self.proxy.missed),
        ]
        .into_iter()
        .enumerate()
        {
            let new = missed - self.told_missed[i];
            if new > 0 {
                self.told_missed[i] = missed;
                out(Update::Missed { segment: self.record.id, what, count: new });
            }
        }
        // What is settled and told needs no memory here, but for the newest, whose last stamps may come late.
        if self.ops.span() > 2 * RECENT {
            let open = &self.op.open;
            self.ops
                .forget_below(self.op.next.saturating_sub(RECENT as u64), |t| open.binary_search(&t).is_ok());
        }
    }
}

/// A boot's id as a number: FNV-1a, which is the same in every process that may compare it.
fn clock_of(boot: &str) -> u64 {
    boot.bytes().fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3))
}

fn losses(reader: &Reader<'_>) -> Vec<(&'static str, u64)> {
    let mut into = Vec::new();
    for loss in Loss::ALL.into_iter().filter(|l| l.is_damage()) {
        let n = reader.lost(loss);
        if n > 0 {
            into.push((loss.as_str(), n));
        }
    }
    for flaw in Flaw::ALL {
        let n = reader.flaws(flaw);
        if n > 0 {
            into.push((flaw.as_str(), n));
        }
    }
    into
}

fn read_comms(
    reader: &Reader<'_>,
    (segment, host_clock): (SegmentId, u64),
    known: &mut BTreeMap<u16, (CommSlot, CommRecord)>,
    out: &mut dyn FnMut(Update),
) {
    for slot in reader.comms() {
        let key = (slot.ticket & 0xffff) as u16;
        if known.get(&key).is_some_and(|(was, _)| *was == slot) {
            continue;
        }
        let Some(record) = decode::comm(segment, host_clock, &slot) else { continue };
        if let Some((_, was)) = known.get(&key)
            && (was.comm, was.rank) != (record.comm, record.rank)
            && was.init_ns == record.init_ns
        {
            // Until NCCL tells, its id is what the call let expect.
            out(Update::Left { segment, comm: was.comm, rank: was.rank });
        }
        if known.get(&key).is_none_or(|(_, was)| *was != record) {
            out(Update::Comm(record.clone()));
        }
        known.insert(key, (slot, record));
    }
}

fn assemble(comm: &CommRecord, open: &Open) -> OpRecord {
    let mut record = decode::op(comm, &open.slot);
    record.stamps = open.stamps.iter().map(|(_, s)| *s).collect();
    record.net = open.net.iter().map(|(_, n)| n.clone()).collect();
    // Version 1 counted in the operation as well, and channels are overwritten before it.
    let stopped = record.stamps.iter().filter(|s| s.stop_seen_ns.is_some()).count();
    let count = |n: usize| u16::try_from(n).unwrap_or(u16::MAX);
    record.started = record.started.max(count(record.stamps.len()));
    record.stopped = record.stopped.max(count(stopped));
    record
}

/// True when nothing more is expected of an operation.
fn whole(open: &Open) -> bool {
    if !settled(&open.slot) || open.net.iter().any(|(_, n)| n.stop_ns.is_none()) {
        return false;
    }
    match decode::timing(open.slot.timed) {
        Timing::Kernel => {
            // After graphs a channel may bring another operation's stamps before its own.
            let stopped = |(_, s): &(u64, ChannelStamp)| s.stop_gpu_ns.is_some() && s.stop_seen_ns.is_some();
            let mut channels = [0u64; 4];
            for (_, s) in open.stamps.iter().filter(|s| stopped(s)) {
                channels[usize::from(s.channel >> 6)] |= 1 << (s.channel & 63);
            }
            let different = channels.iter().map(|c| c.count_ones()).sum::<u32>();
            let all = u32::from(open.slot.channels);
            open.slot.kind != kind::REPLAY && all > 0 && different == all && open.stamps.len() == all as usize
        }
        Timing::Not(_) | Timing::Events => open.stamps.is_empty(),
        Timing::Unknown => false,
    }
}

/// Holds an operation again that was let go, for what came after all: a stamp where it was not to have any, not where it
/// has all. True when it is held.
fn hold_again(reader: &Reader<'_>, ops: &mut Window, recent: &Range<u64>, ticket: u64, stamp: bool) -> bool {
    if recent.contains(&ticket)
        && let Found::Is(slot) = reader.op(ticket)
        && !(stamp && decode::timing(slot.timed) == Timing::Kernel)
    {
        ops.slot(slot);
        return true;
    }
    false
}

/// True when nothing in the operation's own slot can change any more.
fn settled(slot: &OpSlot) -> bool {
    use ringwatch_wire::codes::{flag, timed};
    if slot.flags & flag::CAPTURED != 0 {
        return true;
    }
    // Where the call was seen, its return will be.
    if slot.preloaded && slot.returned.is_none() {
        return false;
    }
    let channels = u16::from(slot.channels);
    slot.issued_ns.is_some()
        && match slot.timed {
            // Version 1: the operation counts its channels.
            timed::UNKNOWN => channels > 0 && slot.stopped >= channels,
            timed::EVENTS => slot.event_ns.is_some(),
            _ => true,
        }
}

impl Cursor {
    fn read_ops(&mut self, reader: &Reader<'_>, ops: &mut Window) {
        let ring = reader.ring(Region::Op);
        for ticket in self.take(ring.next(), ring.slots()) {
            match reader.op(ticket) {
                Found::Is(slot) => {
                    let old = slot.issued_ns.is_some() && ticket + SETTLED_TICKETS < self.next;
                    if !old && !settled(&slot) {
                        self.open.push(ticket);
                    }
                    ops.slot(slot);
                }
                Found::NotYet => self.open.push(ticket),
                Found::Overwritten if !ops.contains(ticket) => self.missed += 1,
                Found::Overwritten => {}
            }
        }
    }

    fn read_channels(&mut self, reader: &Reader<'_>, ops: &mut Window, recent: &Range<u64>) {
        let ring = reader.ring(Region::Channel);
        for ticket in self.take(ring.next(), ring.slots()) {
            match reader.channel(ticket) {
                Found::Is(slot) => {
                    let stamp = decode::stamp(&slot);
                    // The duration is written a moment before the stop; this look may fall between.
                    let finished = stamp.stop_seen_ns.is_some()
                        && (stamp.stop_gpu_ns.is_some() || stamp.start_gpu_ns.is_none());
                    let held = ops.stamp(slot.op, ticket, stamp)
                        || hold_again(reader, ops, recent, slot.op, true)
                            && ops.stamp(slot.op, ticket, stamp);
                    if held {
                        if !finished {
                            self.open.push(ticket);
                        }
                    } else if slot.op >= reader.ring(Region::Op).next() {
                        // Its operation is being published this very moment.
                        self.open.push(ticket);
                    }
                }
                Found::NotYet => self.open.push(ticket),
                Found::Overwritten => self.missed += 1,
            }
        }
    }

    fn read_transfers(&mut self, reader: &Reader<'_>, ops: &mut Window, recent: &Range<u64>) {
        let ring = reader.ring(Region::Proxy);
        let nonce = reader.header(head::NONCE) & 0xffff;
        for ticket in self.take(ring.next(), ring.slots()) {
            match reader.proxy(ticket) {
                Found::Is(slot) => {
                    let ours = slot.parent >> 48 == nonce && slot.parent >> 44 & 0xf == ISSUED_KIND;
                    if slot.foreign || !ours {
                        continue;
                    }
                    let net = decode::transfer(&slot);
                    let (moves, op) = (net.stop_ns.is_none(), slot.parent & VALUE_MASK);
                    if !ops.contains(op) {
                        hold_again(reader, ops, recent, op, false);
                    }
                    if ops.transfer(op, ticket, net) && moves {
                        self.open.push(ticket);
                    }
                }
                Found::NotYet => self.open.push(ticket),
                Found::Overwritten => self.missed += 1,
            }
        }
    }
}
