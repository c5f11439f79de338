//! Opening the process's state, and a communicator in its segment.

use crate::communicator::Comm;
use crate::event_pairs::{Driver, EventPairs};
use crate::ffi::InitArgs;
use crate::governor::{Facts, Governor};
use crate::live::{self, Live, Page, map_page};
use crate::pair_orders::Pairs;
use crate::runtime::clock::{self, now_ns};
use crate::runtime::log::{Log, Message};
use crate::runtime::nccl::{self, Linker};
use crate::runtime::settings::Settings;
use crate::runtime::{names, prefetch, process, shm, sys};
use core::ffi::c_int;
use ringwatch_wire::codes::Loss;
use ringwatch_wire::layout::{Geometry, comm, head};
use ringwatch_wire::ring::Segment;
use ringwatch_wire::sync::{Claim, Word};

/// Opens the process's state if need be; `version` is the profiler's ABI, `None` for a call of the API.
pub(crate) fn open(
    version: Option<u32>,
    mask_at: usize,
    log: &Log,
) -> Option<(&'static Page, &'static Live)> {
    let Some(page) = map_page() else {
        log.say(Message::NoForkGuard);
        return None;
    };
    page.open(|| open_process(page, version, mask_at, log));
    Some((page, live::live()?))
}

/// Opens the process's state, if need be, for a call of the API: NCCL has no logger to give there.
pub(crate) fn open_for_calls() -> Option<&'static Live> {
    open(None, 0, &Log::new(None)).map(|(_, live)| live)
}

fn open_process(page: &'static Page, version: Option<u32>, mask_at: usize, log: &Log) -> Live {
    clock::measure();
    prefetch::look();
    let settings = Settings::from_environment(log);
    let identity = process::Identity::read();
    let nccl = nccl::version(log);
    let format = |words: &[Word], geometry: &Geometry| {
        let segment = Segment::new(words, geometry);
        segment.format(geometry);
        identity.write(&segment);
        segment.set(head::NCCL, u64::from(nccl.unwrap_or(0)) | u64::from(version.unwrap_or(0)) << 32);
        process::write_environment(&segment);
        segment.open_for_readers();
    };
    let made = shm::create(&settings, &identity, log, format);
    let (words, geometry): (&'static [Word], Geometry) = made.unwrap_or_else(|| {
        for w in &page.header {
            w.set(0);
        }
        format(&page.header, &Geometry::full());
        (&page.header, Geometry::full())
    });
    let segment = Segment::new(words, &geometry);
    let nonce = (identity.nonce & 0xffff) as u16;
    let nccl = nccl.unwrap_or(0);
    let events = EventPairs::new(Driver::find(), &page.events);
    // A call of the API comes before the profiler's first init; which one that will be NCCL's version says.
    let abi = version.unwrap_or_else(|| abi_to_come(nccl));
    let facts = Facts {
        abi,
        nccl,
        refused: refused(abi, nccl, log),
        // A mask on a stack or a heap is a test's, and gone after init.
        switchable: version.is_none() || Linker::get().is_some_and(|l| l.is_static(mask_at)),
        events: events.available(),
    };
    let governor = Governor::new(&page.governor, &segment, &page.bare, &facts, &settings);
    governor.begin(now_ns());
    let pairs = Pairs::new(&page.pairs);
    let nonce = nonce.max(1);
    page.bare.prepare(&segment, nonce, nccl);
    Live { segment, nonce, nccl, pairs, governor, events, bare: &page.bare }
}

/// NCCL's set-up of kernel events makes files of 34 MB in /dev/shm, and crashes when it cannot. 64 MiB, in bytes, is
/// the size of a container's /dev/shm by default; where that or a file may not be larger they are not asked for.
const LITTLE_SHM: u64 = 64 << 20;

/// True where kernel events would harm the job: in NCCL 2.27 (the only one to use ABI v4), whose all-to-alls then
/// fail, and where there is little shared memory or files have to be small.
fn refused(version: u32, nccl: u32, log: &Log) -> bool {
    let little = sys::open(c"/dev/shm", sys::DIRECTORY)
        .and_then(|d| sys::file_system(&d))
        .is_none_or(|fs| fs.total <= LITTLE_SHM)
        || sys::file_size_limit().is_none_or(|limit| limit <= LITTLE_SHM);
    let refused = little || version == 4 || (22700..22800).contains(&nccl);
    if refused {
        log.say(Message::NoKernelTimes);
    }
    refused
}

pub(crate) fn enter_comm(live: &Live, args: &InitArgs) -> Result<u64, Loss> {
    let (ticket, slot) = live.segment.comm.claim_free(Loss::CommTable, |slot| {
        // Free when never used, or when NCCL has freed the communicator.
        slot.first().is_some_and(|s| s.get() == 0)
            || slot.get(comm::FINALIZED_NS).is_some_and(|w| w.get() != 0)
    })?;
    let number = |n: c_int| u64::from(u32::try_from(n).unwrap_or(0));
    slot.set(comm::ID, args.id);
    slot.set(comm::RANK, number(args.rank) | number(args.ranks) << 32);
    slot.set(comm::NODES, number(args.nodes) | if args.known { comm::KNOWN } else { 0 });
    slot.set(comm::INIT_NS, now_ns());
    slot.set(comm::FINALIZED_NS, 0);
    slot.set(comm::ISSUED, 0);
    slot.set(comm::REPLAYED, 0);
    for (i, w) in names::long_text(args.name).iter().enumerate() {
        slot.set(comm::NAME + i, *w);
    }
    // A late event of the slot's last communicator may have left it waiting.
    if let Some(old) = live.segment.comm.slot(ticket) {
        live.governor.finalized(&Comm::new(ticket, old));
    }
    // Its books are left alone: late events of the slot's last communicator count in them as well.
    for i in (comm::STATE..comm::CALLS).chain(comm::WANTS..comm::WORDS) {
        slot.set(i, 0);
    }
    place_on(&slot, &nccl::gpu_address());
    slot.publish();
    Ok(ticket)
}

/// The ABI by which this NCCL will drive a profiler, if that is to be this library; 0 if not.
fn abi_to_come(nccl: u32) -> u32 {
    let named = sys::variable(c"NCCL_PROFILER_PLUGIN").map_or(&[][..], |v| v.to_bytes());
    if !named.ends_with(b"libringwatch-preload.so") && !named.ends_with(b"libnccl-profiler-ringwatch.so") {
        return 0;
    }
    match nccl / 100 {
        ..223 => 0,
        223 => 1,
        224 | 225 => 2,
        226 => 3,
        227 => 4,
        228 => 5,
        229 | 230 => 6,
        231.. => 7,
    }
}

/// Writes down a communicator's GPU.
pub(crate) fn place_on(slot: &Claim<'_, { comm::WORDS }>, gpu: &[u64; comm::GPU_WORDS]) {
    for (i, w) in gpu.iter().enumerate() {
        slot.set(comm::GPU + i, *w);
    }
}
