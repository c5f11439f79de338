//! The all-gather by which the ranks of a communicator agree on the tuner's rules, at the end of its init.
//!
//! It is made only where the user asks for it (`RINGWATCH_TUNE_NODES`): a rank without the preloaded library takes no part,
//! and nobody can know that before. Whether a rank takes part follows from the calls alone, which are the same on all
//! ranks, and from nothing that can fail on one rank. A rank that cannot take part fails its communicator's init, since
//! the others wait for it.
//!
//! No wait is unbounded. NCCL's call, which may wait for another rank to connect, runs on a thread of its own. Where that
//! thread is late it is left behind with its communicator, of which nothing is on the GPU then; where the all-gather
//! itself is late, the communicator is aborted.

mod driver;
mod thread;

use super::real::{self, Real};
use super::{IN_PROGRESS, SUCCESS, accepted, comms};
use crate::preloaded::Calls;
use crate::runtime::clock::now_ns;
use crate::runtime::log::Log;
use crate::runtime::segment_name::Text;
use crate::runtime::thread_word::{Thread, is_preloaded};
use crate::runtime::{nccl, settings, sys};
use crate::tuner::all_gather::{Failure, Part, WORDS, Words};
use core::ffi::{CStr, c_int, c_void};
use driver::{Buffer, Driver};
use ringwatch_wire::layout::comm;
use ringwatch_wire::sync::Word;
use thread::{Returned, Slot, call};

/// Most communicators that one group makes.
const BATCH_MAX: usize = 64;
/// Communicators that all threads are making in groups, and those that do not block.
const MAKING_MAX: usize = 512;

/// A communicator that a call makes.
#[derive(Debug, Clone, Copy)]
pub(super) struct New {
    /// Where NCCL stores its pointer, as a number.
    pub(super) place: usize,
    /// NCCL's id of it, where the call says it.
    pub(super) id: Option<u64>,
    /// Its calls block.
    pub(super) blocks: bool,
}

/// True where ranks agree by an all-gather.
pub(super) fn is_on() -> bool {
    is_preloaded() && settings::tune_by_all_gather()
}

/// Makes a communicator by `real`, and lets its ranks agree.
pub(super) fn around(new: New, real: impl FnOnce() -> c_int) -> c_int {
    if !new.blocks && settings::tune_is_required() {
        return refuse(Failure::RequiredButNotBlocking);
    }
    let thread = Thread::get();
    if thread.depth > 0 {
        // A communicator that is not kept could take no part at the end of the group.
        if !keep(&new) {
            return refuse(Failure::TooMany);
        }
        Thread { agrees: true, ..thread }.set();
        return real();
    }
    let result = real();
    if accepted(result) { finish(&[new], result) } else { result }
}

/// Makes all ranks of a communicator by `real`, and lets them agree.
pub(super) fn around_all(places: usize, ranks: c_int, real: impl FnOnce() -> c_int) -> c_int {
    let Some(count) = usize::try_from(ranks).ok().filter(|n| *n <= BATCH_MAX) else {
        return refuse(Failure::TooMany);
    };
    let result = real();
    // SAFETY: without a configuration.
    if result != SUCCESS || places == 0 || !unsafe { blocks(core::ptr::null(), 0) } {
        return result;
    }
    let mut all = [New { place: 0, id: None, blocks: true }; BATCH_MAX];
    for (i, new) in all.iter_mut().take(count).enumerate() {
        new.place = places + i * size_of::<usize>();
    }
    finish(all.get(..count).unwrap_or(&[]), result)
}

/// The outermost group of this thread has ended with a result: the ranks that it has made agree.
pub(super) fn end_of_group(launches: bool, result: c_int) -> c_int {
    let me = sys::thread();
    let mut all = [New { place: 0, id: None, blocks: true }; BATCH_MAX];
    let mut count = 0;
    for making in MAKING.iter().filter(|m| m.thread.get_first() == me) {
        if let Some(new) = all.get_mut(count) {
            *new = making.read();
            count += 1;
        }
        making.thread.set_last(0);
    }
    if launches && accepted(result) { finish(all.get(..count).unwrap_or(&[]), result) } else { result }
}

/// A communicator of a group.
struct Making {
    /// Its thread; 0 for none.
    thread: Word,
    place: Word,
    id: Word,
    /// Bit 0: the id is known; bit 1: it blocks.
    flags: Word,
}

static MAKING: [Making; MAKING_MAX] =
    [const { Making { thread: Word::new(0), place: Word::new(0), id: Word::new(0), flags: Word::new(0) } };
        MAKING_MAX];

impl Making {
    fn read(&self) -> New {
        let flags = self.flags.get();
        New {
            place: self.place.get() as usize,
            id: if flags & 1 != 0 { Some(self.id.get()) } else { None },
            blocks: flags & 2 != 0,
        }
    }
}

/// Keeps a communicator for the end of the group; false where there is no room.
fn keep(new: &New) -> bool {
    let me = sys::thread();
    if MAKING.iter().filter(|m| m.thread.get_first() == me).count() >= BATCH_MAX {
        return false;
    }
    let Some(making) = MAKING.iter().find(|m| m.thread.get() == 0 && m.thread.replace(0, me)) else {
        return false;
    };
    making.place.set(new.place as u64);
    making.id.set(new.id.unwrap_or(0));
    making.flags.set(u64::from(new.id.is_some()) | u64::from(new.blocks) << 1);
    true
}

/// Communicators that do not block, whose children do not block either.
static NON_BLOCKING: [Word; MAKING_MAX] = [const { Word::new(0) }; MAKING_MAX];

fn note_non_blocking(pointer: usize) {
    let is_there = || NON_BLOCKING.iter().any(|w| w.get() == pointer as u64);
    if pointer != 0 && !is_there() {
        NON_BLOCKING.iter().find(|w| w.get() == 0 && w.replace(0, pointer as u64));
    }
}

/// A communicator is freed: another one may get its pointer.
pub(super) fn forget(pointer: usize) {
    if pointer != 0 {
        NON_BLOCKING.iter().filter(|w| w.get() == pointer as u64).for_each(|w| w.set(0));
    }
}

/// Returns whether the calls of a communicator block that is made with this configuration, NULL for none, from this
/// parent, 0 for none.
///
/// # Safety
/// `config` is NULL or NCCL's configuration.
pub(super) unsafe fn blocks(config: *const c_void, parent: usize) -> bool {
    const VARIABLE: &CStr = c"NCCL_COMM_BLOCKING";
    /// The configuration's length, a magic number and a version come before `blocking`.
    const PLACE: usize = 16;
    /// NCCL_CONFIG_UNDEF_INT.
    const UNDEFINED: c_int = c_int::MIN;
    match sys::variable(VARIABLE).map(CStr::to_bytes) {
        Some(b"0") => return false,
        Some(b"1") => return true,
        _ => {}
    }
    let inherited = parent == 0 || !NON_BLOCKING.iter().any(|w| w.get() == parent as u64);
    if config.is_null() {
        return inherited;
    }
    // SAFETY: every configuration begins with its length.
    let length = unsafe { config.cast::<usize>().read_unaligned() };
    if length < PLACE + size_of::<c_int>() {
        return inherited;
    }
    // SAFETY: the configuration is longer than that.
    match unsafe { config.cast::<u8>().add(PLACE).cast::<c_int>().read_unaligned() } {
        UNDEFINED => inherited,
        blocking => blocking != 0,
    }
}

/// Lets the ranks of new communicators agree. `result` is NCCL's of the call that has made them.
fn finish(all: &[New], result: c_int) -> c_int {
    for new in all.iter().filter(|n| !n.blocks) {
        note_non_blocking(pointer_at(new.place));
    }
    // In a group with one that does not block, the others are not ready either.
    if result == IN_PROGRESS {
        return result;
    }
    let mut blocking = all.iter().filter(|n| n.blocks && pointer_at(n.place) != 0).peekable();
    if blocking.peek().is_none() {
        return result;
    }
    let Some(batch) = Batch::new() else { return fail(all, None, Failure::NoResources) };
    match agree(batch, blocking) {
        Ok(()) => {
            batch.free();
            result
        }
        Err(why) => fail(all, Some(batch), why),
    }
}

/// The pointer that NCCL has stored.
fn pointer_at(place: usize) -> usize {
    let place = core::ptr::with_exposed_provenance::<*mut c_void>(place);
    if place.is_null() {
        return 0;
    }
    // SAFETY: the place that the job gave NCCL; NCCL has stored a pointer there, and the call has not returned yet.
    unsafe { place.read() }.addr()
}

/// One rank of a communicator in the all-gather.
#[derive(Debug, Clone, Copy)]
struct Member {
    pointer: usize,
    device: c_int,
    rank: usize,
    ranks: usize,
    part: Part,
    buffer: Buffer,
    /// The contributions, in memory of the host.
    gathered: *mut Words,
}

impl Member {
    fn bytes(&self) -> usize {
        self.ranks * size_of::<Words>()
    }
}

/// The ranks that one call has made. It is a mapping, as the threads that refer to it may outlive the call.
struct Batch {
    slot: Slot,
    members: [Option<Member>; BATCH_MAX],
    /// A communicator to abort.
    doomed: usize,
}

impl Batch {
    fn new() -> Option<&'static mut Batch> {
        let at = sys::map(None, size_of::<Batch>())?.cast::<Batch>();
        // SAFETY: our own fresh mapping, long and aligned enough.
        unsafe {
            at.write(Batch { slot: Slot::new(), members: [None; BATCH_MAX], doomed: 0 });
            at.as_mut()
        }
    }

    /// Gives the memory back. No other thread refers to it.
    fn free(&mut self) {
        for m in self.members.iter().flatten() {
            m.buffer.keep();
            // SAFETY: the mapping of this length, into which nobody writes any more.
            unsafe { sys::unmap(m.gathered.cast(), m.bytes()) };
        }
        // SAFETY: the whole mapping, which nobody uses after this.
        unsafe { sys::unmap((&raw mut *self).cast(), size_of::<Batch>()) };
    }
}

fn agree<'a>(batch: &mut Batch, all: impl Iterator<Item = &'a New>) -> Result<(), Failure> {
    let until_ns = now_ns().saturating_add(settings::all_gather_wait_ns());
    let driver = Driver::find().ok_or(Failure::NoResources)?;
    driver.contexts.relaxed(|| {
        let mut places = batch.members.iter_mut();
        for new in all {
            if let Some(member) = prepare(&driver, new)? {
                *places.next().ok_or(Failure::TooMany)? = Some(member);
            }
        }
        if batch.members.iter().flatten().next().is_none() {
            return Ok(());
        }
        let argument = (&raw mut *batch).cast();
        // SAFETY: the batch is a mapping that stays where its thread does not end.
        match unsafe { call(gather, argument, &batch.slot, until_ns) } {
            Returned::Result(SUCCESS) => {}
            Returned::Result(_) => return Err(Failure::Refused),
            Returned::Late => return Err(Failure::AbsentRank),
            Returned::NoThread => return Err(Failure::NoResources),
        }
        for m in batch.members.iter().flatten() {
            fetch(&driver, m, until_ns)?;
        }
        let mut outcome = Ok(());
        for m in batch.members.iter().flatten() {
            // SAFETY: so many contributions were copied to it.
            let gathered = unsafe { core::slice::from_raw_parts(m.gathered, m.ranks) };
            // All conclude, so that all are recorded.
            outcome = outcome.and(m.part.conclude(gathered));
        }
        outcome
    })
}

/// Prepares a rank for the all-gather; `None` for a communicator of one rank.
fn prepare(driver: &Driver, new: &New) -> Result<Option<Member>, Failure> {
    let pointer = pointer_at(new.place);
    let (rank, ranks) = real::place(pointer as u64).ok_or(Failure::Refused)?;
    let device = real::device(pointer as u64).ok_or(Failure::Refused)?;
    if ranks < 2 || rank < 0 {
        return Ok(None);
    }
    let (ticket, known) = recorded(pointer);
    let part = Part::take(known.or(new.id), ticket, rank.cast_unsigned());
    let (rank, ranks) = (rank as usize, ranks as usize);
    let bytes = ranks * size_of::<Words>();
    let gathered = sys::map(None, bytes).ok_or(Failure::NoResources)?.cast::<Words>();
    let mut buffer = None;
    nccl::on_device(Some(device), || {
        buffer = driver.take(bytes).filter(|b| driver.write(*b, rank * size_of::<Words>(), &part.words()));
    });
    let buffer = buffer.ok_or(Failure::NoResources)?;
    Ok(Some(Member { pointer, device, rank, ranks, part, buffer, gathered }))
}

/// A communicator's slot in the segment, and NCCL's id of it, where they are known.
fn recorded(pointer: usize) -> (Option<u64>, Option<u64>) {
    let Some(calls) = Calls::get() else { return (None, None) };
    let Some((ticket, _)) = calls.comm(pointer) else { return (None, None) };
    let Some(slot) = calls.live.segment.comm.held(ticket) else { return (None, None) };
    let word = |i: usize| slot.get(i).map_or(0, Word::get);
    let id = if word(comm::NODES) & comm::KNOWN != 0 { Some(word(comm::ID)) } else { None };
    (Some(ticket), id)
}

static GROUP_START: Real = Real::new(c"ncclGroupStart");
static GROUP_END: Real = Real::new(c"ncclGroupEnd");
static ALL_GATHER: Real = Real::new(c"ncclAllGather");
static ABORT: Real = Real::new(c"ncclCommAbort");

type Group = unsafe extern "C" fn() -> c_int;
type AllGather =
    unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, *mut c_void, *mut c_void) -> c_int;
type Abort = unsafe extern "C" fn(*mut c_void) -> c_int;

/// NCCL's number of 64-bit integers without sign.
const UINT64: c_int = 5;
const INVALID_USAGE: c_int = 5;

/// On a thread of its own: one group of all-gathers, so that the order of communicators does not matter.
unsafe extern "C" fn gather(argument: *mut c_void) -> *mut c_void {
    Thread { inside: true, ..Thread::default() }.set();
    // SAFETY: the batch, which stays for as long as this thread runs.
    let batch = unsafe { &*argument.cast::<Batch>() };
    batch.slot.fill(gather_all(batch));
    core::ptr::null_mut()
}

fn gather_all(batch: &Batch) -> c_int {
    let (Some(start), Some(end), Some(all_gather)) =
        (GROUP_START.get(0), GROUP_END.get(0), ALL_GATHER.get(0))
    else {
        return INVALID_USAGE;
    };
    // SAFETY: NCCL's functions of these names and signatures.
    let (start, end, all_gather) = unsafe {
        use core::mem::transmute;
        (
            transmute::<usize, Group>(start),
            transmute::<usize, Group>(end),
            transmute::<usize, AllGather>(all_gather),
        )
    };
    // SAFETY: as NCCL has it: communicators that are ready, and buffers in place.
    unsafe {
        let mut result = start();
        for m in batch.members.iter().flatten() {
            let own = m.buffer.device + (m.rank * size_of::<Words>()) as u64;
            let pointer = |at: u64| core::ptr::with_exposed_provenance_mut::<c_void>(at as usize);
            nccl::on_device(Some(m.device), || {
                if result == SUCCESS {
                    let (comm, stream) = (pointer(m.pointer as u64), pointer(m.buffer.stream as u64));
                    result = all_gather(pointer(own), pointer(m.buffer.device), WORDS, UINT64, comm, stream);
                }
            });
        }
        let ended = end();
        if result == SUCCESS { ended } else { result }
    }
}

/// Fetches the contributions of all ranks once they are there.
fn fetch(driver: &Driver, m: &Member, until_ns: u64) -> Result<(), Failure> {
    let mut outcome = Err(Failure::NoResources);
    nccl::on_device(Some(m.device), || {
        outcome = wait(driver, m, until_ns).and_then(|()| {
            // A copy to pageable memory may wait for the stream, which has nothing left to do.
            // SAFETY: the mapping is that long, and stays until this succeeds.
            if !unsafe { driver.read(m.buffer, m.gathered.cast(), m.bytes()) } {
                return Err(Failure::NoResources);
            }
            wait(driver, m, until_ns)
        });
    });
    outcome
}

fn wait(driver: &Driver, m: &Member, until_ns: u64) -> Result<(), Failure> {
    loop {
        match driver.is_done(m.buffer) {
            Some(true) => return Ok(()),
            Some(false) if now_ns() < until_ns => sys::nap(),
            Some(false) => return Err(Failure::AbsentRank),
            None => return Err(Failure::NoResources),
        }
    }
}

/// Ends communicators whose ranks could not agree, and says why.
fn fail(all: &[New], batch: Option<&mut Batch>, why: Failure) -> c_int {
    let answer = refuse(why);
    let is_left_behind = batch.as_ref().is_some_and(|b| b.slot.is_pending());
    if let Some(b) = &batch {
        for m in b.members.iter().flatten() {
            m.part.record(why.code());
        }
    }
    let mut doom = batch.map(|_| ()).and_then(|()| Batch::new());
    for new in all {
        let pointer = pointer_at(new.place);
        if pointer == 0 {
            continue;
        }
        forget(pointer);
        comms::destroy_recorded(pointer, true, || match &mut doom {
            // A thread is inside NCCL with it, and it has nothing on the GPU: it is left alone.
            _ if is_left_behind => SUCCESS,
            Some(doom) => abort(doom, pointer),
            None => SUCCESS,
        });
        let place = core::ptr::with_exposed_provenance_mut::<*mut c_void>(new.place);
        // SAFETY: the job's own place for the pointer; NCCL stores NULL where it fails.
        unsafe { place.write(core::ptr::null_mut()) };
    }
    answer
}

/// Aborts a communicator, and does not wait for longer than for an agreement.
fn abort(doom: &mut Batch, pointer: usize) -> c_int {
    if doom.slot.is_pending() {
        return SUCCESS;
    }
    doom.doomed = pointer;
    let until_ns = now_ns().saturating_add(settings::all_gather_wait_ns());
    let argument = (&raw mut *doom).cast();
    // SAFETY: the batch is a mapping that is never given back.
    match unsafe { call(abort_one, argument, &doom.slot, until_ns) } {
        Returned::Result(result) => result,
        _ => SUCCESS,
    }
}

unsafe extern "C" fn abort_one(argument: *mut c_void) -> *mut c_void {
    Thread { inside: true, ..Thread::default() }.set();
    // SAFETY: the batch, which stays for as long as this thread runs.
    let batch = unsafe { &*argument.cast::<Batch>() };
    let result = match ABORT.get(0) {
        // SAFETY: NCCL's function of this name and signature, and a communicator that nobody uses.
        Some(at) => unsafe {
            let abort = core::mem::transmute::<usize, Abort>(at);
            abort(core::ptr::with_exposed_provenance_mut(batch.doomed))
        },
        None => INVALID_USAGE,
    };
    batch.slot.fill(result);
    core::ptr::null_mut()
}

/// Says why a communicator is not made.
fn refuse(why: Failure) -> c_int {
    let mut text = Text::<768>::new();
    text.push(b"ringwatch: the communicator is not made: ").push(why.text());
    Log::kept().warn(text.as_c());
    // NCCL's log is off by default, and the job is about to fail.
    sys::complain(text.as_c());
    why.answer()
}
