//! Following one segment: what is new, what moved on, what was lost.

use super::attribution;
use super::comm_table::read_comms;
use super::decode;
use super::directory::FileId;
use super::host::Host;
use super::life::Life;
use super::mapping::MapError;
use super::process_reading::Reading;
use super::rings::{RECENT, Rings, whole};
use super::segment_file::SegmentFile;
use super::stacks::Answer;
use super::survey::{FileName, Running};
use super::window::{Open, Told, Window};
use crate::model::{
    BEYOND_MEMORY, ChannelStamp, CommId, CommRecord, HostFact, Liveness, OpRecord, SegmentId, SegmentRecord,
    Sink, Spare, Update,
};
use ringwatch_wire::codes::{Flaw, Loss};
use ringwatch_wire::layout::head;
use ringwatch_wire::reader::{CommSlot, Reader};
use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::path::Path;

/// How often the pages of a segment that was read are given back, in ns.
const KEEP_PAGES_NS: u64 = 3_000_000_000;

/// In the middle of a look operations are told by ticket, up to the first that is not whole, so that none is told after those
/// that came behind it. One that lies so many tickets behind what was read is not waited for.
const LAG: u64 = 128;

/// A process of which nothing was heard for so long, and at two looks, is asked after more often, in ns.
const QUIET_NS: u64 = 250_000_000;
/// How often then, in ns.
const QUIET_LOOK_NS: u64 = 50_000_000;
/// How often where it issues operations, in ns.
const MOVING_LOOK_NS: u64 = 1_000_000_000;

/// The state that all followed segments share.
#[derive(Debug, Default)]
pub(super) struct Shared {
    /// Room for records.
    pub(super) spare: Spare,
    /// Room for what is put together: one after the other uses the same, which is in the processor's caches.
    #[expect(clippy::vec_box, reason = "the boxes are what is used again")]
    pub(super) opens: Vec<Box<Open>>,
    /// Communicators are not told apart by their users.
    pub(super) share_communicators: bool,
}

/// One segment being followed.
#[derive(Debug)]
pub(super) struct Tail {
    file: SegmentFile,
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
    /// Communicators that were left out, as they are counted.
    told_unknown: u64,
    ops: Window,
    rings: Rings,
    told_missed: [u64; 4],
    host_clock: u64,
    /// True where the segment's record, or its end, changed since it was last reported.
    changed: bool,
    /// Its owner made something else of it.
    spoilt: bool,
    /// It was begun to be read, and not closed since.
    begun: bool,
    /// There is more to read of what was there.
    more: bool,
    /// The last look did not come to its end.
    behind: bool,
    /// Nothing more will come: the process is gone and the segment was read to its end.
    done: bool,
}

/// When a segment is found, host monotonic ns.
#[derive(Debug, Clone, Copy)]
pub(super) struct Watch {
    /// When segments were first looked for.
    pub(super) since_ns: u64,
    pub(super) now_ns: u64,
}

impl Tail {
    /// The segment, unless another job is wanted, or a later beginning.
    pub(super) fn of(
        (file, life): (SegmentFile, Option<Life>),
        control_groups: &str,
        wanted: Option<(&str, u64)>,
        watch: Watch,
    ) -> Result<Option<Self>, MapError> {
        let mapping = &file.mapping;
        let reader = mapping.reader().ok_or(MapError::Geometry)?;
        let environment = decode::environment(&reader);
        let mut job = decode::job(&environment);
        let begun = reader.header(head::CREATED_MONO_NS);
        if wanted.is_some_and(|(name, since)| job.name.as_deref() != Some(name) || begun < since) {
            return Ok(None);
        }
        let (pid, nccl) = (reader.pid(), reader.nccl());
        let boot = decode::text(&reader.text::<{ head::BOOT_ID_WORDS }>(head::BOOT_ID));
        let seen = life.as_ref().and_then(Life::process);
        job.labels = attribution::labels(&environment, mapping.owner(), control_groups, Path::new("/"));
        let record = SegmentRecord {
            id: SegmentId(reader.header(head::NONCE)),
            path: file.path(),
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
        let host_clock = clock_of(boot.as_deref().unwrap_or_default());
        let is_of_this_boot = super::process::boot_id().is_some_and(|boot| clock_of(&boot) == host_clock);
        let now_ns = watch.now_ns;
        // Of a process that is seen by its lock alone nobody here knows the pid.
        let host = seen.map(|(pid, _)| Host::new(record.id, pid));
        Ok(Some(Tail {
            file,
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
            told_unknown: 0,
            ops: Window::default(),
            rings: Rings::of(is_of_this_boot && begun >= watch.since_ns),
            told_missed: [0; 4],
            host_clock,
            changed: false,
            spoilt: false,
            begun: false,
            more: false,
            behind: false,
            done: false,
        }))
    }

    /// Names the host of a process of this machine. What the process calls it is its container's name, in a container, or what its
    /// user made up.
    pub(super) fn name_host(&mut self, node: &str) {
        let this_boot = super::process::boot_id().map(|boot| clock_of(&boot));
        if this_boot == Some(self.host_clock) || self.record.liveness == Liveness::Alive {
            node.clone_into(&mut self.record.host);
        }
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

    /// Takes what was read of its process, or that nothing could be.
    pub(super) fn read_process(&mut self, reading: Option<Reading>, now_ns: u64) -> Option<HostFact> {
        let host = self.host.as_mut()?;
        host.is_requested = false;
        host.take(reading?, now_ns)
    }

    /// Its file, when its process lives and takes part in a communicator.
    pub(super) fn takes_part(&self, comm: CommId) -> Option<(FileName, FileId)> {
        let takes_part = self.comms.values().any(|(_, c)| c.comm == comm);
        (takes_part && self.record.liveness == Liveness::Alive).then(|| self.file.name())
    }

    /// True while its process lives and the last look found something new.
    pub(super) fn moves(&self) -> bool {
        self.record.liveness == Liveness::Alive && self.moved_ns == self.read_ns
    }

    /// How much of its fullest ring was new at the last look.
    pub(super) fn fill(&self) -> f64 {
        self.rings.fill()
    }

    /// When its process opened it, host monotonic ns.
    pub(super) fn created_ns(&self) -> u64 {
        self.record.created_ns
    }

    /// The identity of the file.
    pub(super) fn file(&self) -> FileId {
        self.file.mapping.file()
    }

    /// The owner of the file.
    pub(super) fn owner(&self) -> u32 {
        self.file.mapping.owner()
    }

    /// How many communicators of it are known.
    pub(super) fn comms(&self) -> usize {
        self.comms.len()
    }

    /// True when its owner has made something else of it.
    pub(super) fn is_spoilt(&self) -> bool {
        self.spoilt
    }

    /// True when nothing more will come.
    pub(super) fn done(&self) -> bool {
        self.done
    }

    pub(super) fn record(&self) -> SegmentRecord {
        self.record.clone()
    }

    /// The descriptor by which the kernel reports the end of its process, where it lives and the kernel does.
    pub(super) fn end(&self) -> Option<BorrowedFd<'_>> {
        self.life.as_ref().filter(|_| self.record.liveness == Liveness::Alive).and_then(Life::end)
    }

    /// Sees whether its process runs; `ended` is what the kernel said of its end. Returns the process where it is time to
    /// have it read.
    pub(super) fn look_at_process(&mut self, now_ns: u64, ended: bool) -> Option<Running> {
        let was_read_over = self.host.as_ref().is_some_and(Host::is_over);
        // How it ended may be read after everything else was.
        if self.done && (was_read_over || !self.is_gone()) {
            return None;
        }
        if self.record.liveness == Liveness::Alive
            && !self.life.as_ref().is_some_and(|l| l.goes_on(ended, was_read_over, || self.file.lock()))
        {
            // It was seen alive at the last look: it ended in between.
            self.record.liveness = Liveness::Gone(Some(self.looked_ns));
            self.asked_ns = 0;
        }
        self.looked_ns = now_ns;
        // Who issues operations runs, whatever else is to be said of it.
        let moves = self.moved_ns == self.read_ns || now_ns.saturating_sub(self.moved_ns) < QUIET_NS;
        let every_ns = if moves && !self.is_gone() { MOVING_LOOK_NS } else { QUIET_LOOK_NS };
        let host = self.host.as_mut().filter(|h| !h.is_requested)?;
        if now_ns.saturating_sub(self.asked_ns) < every_ns {
            return None;
        }
        let (pid, start_ticks) = self.life.as_ref().and_then(Life::process)?;
        (self.asked_ns, host.is_requested) = (now_ns, true);
        Some(Running { segment: self.record.id, owner: self.file.mapping.owner(), pid, start_ticks })
    }

    /// Begins a look: what is there by now is read in turns. Whether its process runs was seen before: what a process wrote
    /// before its end is read after it was seen gone.
    pub(super) fn begin(&mut self, now_ns: u64, comms_most: usize, shared: &mut Shared, out: &mut dyn Sink) {
        if self.done {
            return;
        }
        self.begun = true;
        self.read_ns = now_ns;
        self.more = true;
        let Some(reader) = self.file.mapping.reader() else {
            self.spoilt = true;
            return;
        };
        let (books, nccl) = (losses(&reader), reader.nccl());
        let owner = Some(self.owner()).filter(|_| !shared.share_communicators);
        let of = (self.record.id, owner, self.host_clock);
        let unknown = read_comms(&reader, of, comms_most, &mut self.comms, out);
        if unknown > self.told_unknown {
            let count = unknown - std::mem::replace(&mut self.told_unknown, unknown);
            out.take(Update::Missed { segment: self.record.id, what: BEYOND_MEMORY, count });
        }
        let before = self.rings.passed();
        self.rings.begin(&reader);
        self.ops.begin();
        if before != self.rings.until() {
            self.moved_ns = now_ns;
        }
        if self.record.losses != books {
            self.record.losses = books;
            self.changed = true;
        }
        if nccl != self.nccl {
            self.nccl = nccl;
            self.record.nccl = nccl.map(decode::nccl_version).or(self.record.nccl.take());
            self.changed = true;
        }
    }

    /// Reads some of what is new and tells it; true when there is more.
    pub(super) fn turn(&mut self, share: usize, shared: &mut Shared, out: &mut dyn Sink) -> bool {
        if self.done || !self.more {
            return false;
        }
        self.ops.lend(&mut shared.opens);
        // The mapping outlives the reader; taking it out keeps the borrow checker's eyes off `self`.
        self.more = match self.file.mapping.reader() {
            Some(reader) => self.rings.turn(&reader, &mut self.ops, share),
            None => {
                self.spoilt = true;
                false
            }
        };
        let comms = &self.comms;
        let late = if self.more { self.rings.next_op().saturating_sub(LAG) } else { u64::MAX };
        let mut waits = false;
        let (reader, lines) = (self.file.mapping.reader(), self.rings.lines());
        let mut tell_lines = |until_ns: u64, shared: &mut Shared, out: &mut dyn Sink| {
            let Some(reader) = &reader else { return };
            lines.tell(reader, until_ns, |slot| {
                let Some((_, comm)) = comms.get(&slot.comm) else { return false };
                out.operation(shared.spare.put(decode::op(comm, slot)));
                true
            });
        };
        self.ops.tell(|open| {
            if waits {
                return Told::Later;
            }
            // An operation of a communicator that nobody knows yet is told once it is known.
            let Some((_, comm)) = comms.get(&open.slot.comm) else { return Told::Parked };
            let whole = whole(open);
            waits = !whole && open.slot.ticket >= late;
            if waits {
                return Told::Later;
            }
            // A rank's operations are told in the order of their calls, from whichever ring.
            tell_lines(open.slot.called_ns.or(open.slot.issued_ns).unwrap_or(0), shared, out);
            let room = shared.spare.stamps();
            let stamps = if whole { open.stamps.hand_over(room) } else { copied(open.stamps.values(), room) };
            out.operation(shared.spare.put(assemble(comm, open, stamps)));
            if whole { Told::Whole } else { Told::SoFar }
        });
        if !self.more {
            tell_lines(u64::MAX, shared, out);
        }
        self.ops.lend(&mut shared.opens);
        self.more
    }

    /// True where the last look left something for the next one.
    pub(super) fn is_behind(&self) -> bool {
        self.behind
    }

    /// Closes a look: tells what was lost, and what changed of the segment itself. What was not read is read in the next look.
    pub(super) fn close(&mut self, now_ns: u64, shared: &mut Shared, out: &mut dyn Sink) {
        self.behind = !self.done && (!self.begun || self.more);
        if self.done || !self.begun {
            return;
        }
        for ((what, missed), told) in self.rings.missed().into_iter().zip(&mut self.told_missed) {
            let count = missed - *told;
            if count > 0 {
                *told = missed;
                out.take(Update::Missed { segment: self.record.id, what, count });
            }
        }
        if self.more {
            return;
        }
        self.begun = false;
        // What is settled and told needs no memory here, but for the newest, whose last stamps may come late.
        if self.ops.span() > 2 * RECENT as usize {
            let rings = &self.rings;
            self.ops.lend(&mut shared.opens);
            self.ops.forget_below(rings.next_op().saturating_sub(RECENT), |t| rings.is_open(t));
            self.ops.lend(&mut shared.opens);
        }
        self.done = self.is_gone() || self.spoilt;
        if self.spoilt {
            self.record.losses = vec![("segment spoilt by its owner", 1)];
        }
        if std::mem::take(&mut self.changed) || self.done {
            out.take(Update::Segment(self.record.clone()));
        }
        if self.done {
            self.file.mapping.close();
            (self.ops, self.comms) = (Window::default(), BTreeMap::new());
        } else if now_ns.saturating_sub(self.emptied_ns) >= KEEP_PAGES_NS {
            self.emptied_ns = now_ns;
            self.file.mapping.give_back();
        }
    }

    fn is_gone(&self) -> bool {
        self.record.liveness != Liveness::Alive
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

fn copied(stamps: &[ChannelStamp], mut room: Vec<ChannelStamp>) -> Vec<ChannelStamp> {
    room.extend_from_slice(stamps);
    room
}

/// An operation's record, with these stamps.
fn assemble(comm: &CommRecord, open: &Open, stamps: Vec<ChannelStamp>) -> OpRecord {
    let mut record = OpRecord { stamps, net: open.net.values().to_vec(), ..decode::op(comm, &open.slot) };
    // Version 1 counted in the operation as well, and channels are overwritten before it.
    let stopped = record.stamps.iter().filter(|s| s.stop_seen_ns.is_some()).count();
    let count = |n: usize| u16::try_from(n).unwrap_or(u16::MAX);
    record.started = record.started.max(count(record.stamps.len()));
    record.stopped = record.stopped.max(count(stopped));
    record
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{UNCOUNTED, UNRECORDED, hides_operations};

    #[test]
    fn reasons_that_hide_operations_are_reasons_of_the_plugin() {
        let all = Loss::ALL.map(Loss::as_str).into_iter().chain(Flaw::ALL.map(Flaw::as_str));
        let hiding: Vec<&str> = all.filter(|reason| hides_operations(reason)).collect();
        assert_eq!(hiding.len(), UNCOUNTED.len() + UNRECORDED.len(), "{hiding:?}");
        assert!(!hides_operations(Loss::Foreign.as_str()), "PXN is no loss");
    }
}
