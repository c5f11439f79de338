//! Segments that say what an attacker wants them to say.

use crate::support::skip::started;
use ringwatch_wire::codes::{Loss, kind};
use ringwatch_wire::layout::{Geometry, HEADER_BYTES, Region, comm, head, op};
use ringwatch_wire::ring::{Segment, text_word};
use ringwatch_wire::sync::Word;
use rustix::fs::FallocateFlags;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// NCCL's codes of two operations that do not go together.
pub(crate) const ALL_GATHER: u8 = 3;
pub(crate) const ALL_REDUCE: u8 = 5;

/// The process that a segment names as its writer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Writer {
    pub(crate) pid: u32,
    pub(crate) start_ticks: u64,
}

impl Writer {
    /// A process that runs.
    pub(crate) fn running(pid: u32) -> Self {
        Writer { pid, start_ticks: started(pid).expect("it runs") }
    }

    /// A process that has ended: no pid is so large.
    pub(crate) fn dead() -> Self {
        Writer { pid: 1 << 30, start_ticks: 1 }
    }
}

/// A number that no other segment has.
pub(crate) fn next_nonce() -> u64 {
    static NONCE: AtomicU64 = AtomicU64::new(0x6a09_e667);
    NONCE.fetch_add(1, Ordering::Relaxed) << 24 | u64::from(std::process::id() & 0xff_ffff)
}

/// A segment in memory.
pub(crate) struct Forged {
    words: Vec<Word>,
    geometry: Geometry,
    writer: Writer,
    nonce: u64,
}

impl Forged {
    /// One of these tables, which are as a plugin begins them.
    pub(crate) fn new(geometry: Geometry, writer: Writer) -> Self {
        let nonce = next_nonce();
        let words = (0..geometry.bytes() / 8).map(|_| Word::new(0)).collect();
        let forged = Forged { words, geometry, writer, nonce };
        let s = forged.segment();
        s.format(&geometry);
        s.set(head::PID, u64::from(writer.pid));
        s.set(head::START_TICKS, writer.start_ticks);
        s.set(head::NONCE, nonce);
        s.set(head::CREATED_MONO_NS, ringwatch::replay::monotonic_ns());
        s.set(head::NCCL, 22_809 | 5 << 32);
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").expect("this boot's id");
        s.set_text(head::BOOT_ID, head::BOOT_ID_WORDS, boot.trim().as_bytes());
        s.set_text(head::HOST, head::HOST_WORDS, b"forged");
        s.open_for_readers();
        forged
    }

    /// The smallest tables that a plugin makes.
    pub(crate) fn small(writer: Writer) -> Self {
        Self::new(Geometry::new([2, 4, 4, 6, 4]), writer)
    }

    fn segment(&self) -> Segment<'_> {
        Segment::new(&self.words, &self.geometry)
    }

    /// Says to be a rank of a communicator; returns its slot.
    pub(crate) fn communicator(&self, id: u64, rank: u32, ranks: u32) -> u64 {
        let s = self.segment();
        let (slot, claim) = s.comm.claim_free(Loss::CommTable, |_| true).expect("a free slot");
        claim.set(comm::ID, id);
        claim.set(comm::RANK, u64::from(rank) | u64::from(ranks) << 32);
        claim.set(comm::NODES, 1 | comm::KNOWN);
        claim.set(comm::INIT_NS, ringwatch::replay::monotonic_ns());
        (0..comm::NAME_WORDS)
            .for_each(|i| claim.set(comm::NAME + i, text_word(b"forged", i, comm::NAME_WORDS)));
        claim.publish();
        slot
    }

    /// Says to have issued a collective of this issue order.
    pub(crate) fn collective(&self, slot: u64, order: u64, func: u8) {
        let s = self.segment();
        let (_, claim) = s.op.claim().expect("a slot");
        let now = ringwatch::replay::monotonic_ns();
        (1..op::WORDS).for_each(|i| claim.set(i, 0));
        let float = 8;
        claim.set(
            op::WHAT,
            slot | u64::from(kind::COLLECTIVE) << 16
                | u64::from(func) << 24
                | float << 32
                | 2 << 40
                | 3 << 48,
        );
        claim.set(op::ORDER, order);
        claim.set(op::COUNT, 1 << 20);
        claim.set(op::CALLED_NS, now);
        claim.set(op::ISSUED_NS, now);
        claim.set(op::SEQ, order);
        claim.publish();
    }

    /// Says that so many operations were issued, of which no slot was written.
    pub(crate) fn claims_operations(&self, next: u64) {
        self.segment().set(head::NEXT_OP, next);
    }

    /// The same of all operations, groups, stamps and transfers that its tables have places for.
    pub(crate) fn claims_all(&self, geometry: &Geometry) {
        for region in [Region::Op, Region::Group, Region::Channel, Region::Proxy] {
            self.segment().set(region.next(), 1 << geometry.shift(region));
        }
    }

    /// Does not say in which boot it was made.
    pub(crate) fn without_boot(self) -> Self {
        self.segment().set_text(head::BOOT_ID, head::BOOT_ID_WORDS, b"");
        self
    }

    /// Says to be another segment.
    pub(crate) fn with_nonce(mut self, nonce: u64) -> Self {
        self.nonce = nonce;
        self.segment().set(head::NONCE, nonce);
        self
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        self.words.iter().flat_map(|w| w.get().to_le_bytes()).collect()
    }

    /// The name that a plugin gives to the segment of such a writer.
    pub(crate) fn name(&self) -> String {
        format!("{}-{}-{:x}.seg", self.writer.pid, self.writer.start_ticks, self.nonce)
    }

    /// Puts it into a directory, whole when it gets its name.
    pub(crate) fn put(&self, directory: &Path) -> PathBuf {
        let path = directory.join(self.name());
        let draft = path.with_extension("draft");
        fs::write(&draft, self.bytes()).expect("written");
        fs::rename(&draft, &path).expect("named");
        path
    }

    /// Writes what changed since into its file there, as a process that lives does.
    pub(crate) fn put_again(&self, path: &Path) {
        let file = fs::File::options().write(true).open(path).expect("its own file");
        std::os::unix::fs::FileExt::write_all_at(&file, &self.bytes(), 0).expect("written");
    }

    /// Puts it into a directory with holes for all but the header: what is read of it takes memory only then. Where it is `masked` there is as
    /// much memory behind its end as is missing.
    pub(crate) fn put_sparse(&self, directory: &Path, masked: bool) -> PathBuf {
        let path = directory.join(self.name());
        let draft = path.with_extension("draft");
        let bytes = self.bytes();
        fs::write(&draft, bytes.get(..HEADER_BYTES).expect("a header")).expect("written");
        let file = fs::File::options().write(true).open(&draft).expect("opens");
        let length = bytes.len() as u64;
        file.set_len(length).expect("grows");
        if masked {
            let missing = length - HEADER_BYTES as u64;
            rustix::fs::fallocate(&file, FallocateFlags::KEEP_SIZE, length.next_multiple_of(4096), missing)
                .expect("there is room");
        }
        fs::rename(&draft, &path).expect("named");
        path
    }
}
