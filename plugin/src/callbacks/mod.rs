//! The profiler's tables and their entry points, each monomorphised over the version of the ABI.

#![expect(unsafe_code, reason = "the C boundary")]

mod init;

use crate::abi::{Abi, Taker, v1, v2, v3, v4, v5, v6, v7};
use crate::bare::{self, Entry, Here};
use crate::event::{Event, bit};
use crate::ffi::{InitArgs, InitBare, InitV4, InitV5, LogFn, NAME, SUCCESS};
use crate::forward::{self, Said};
use crate::gate;
use crate::live::{self, Live};
use crate::record::{Carried, Started};
use crate::{handle, record};
use core::ffi::{c_char, c_int, c_void};
use init::Mask;
use ringwatch_wire::codes::{Loss, call};
use ringwatch_wire::lines::Head;

/// Records an event of a context, books it, and gives its handle.
struct Recorder {
    live: &'static Live,
    context: u64,
}

impl Taker for Recorder {
    type Out = u64;

    #[inline(always)]
    fn take(self, event: &Event) -> u64 {
        let call = (event.bit as usize).min(call::START_UNKNOWN);
        match record::start(self.live, self.context, event) {
            Ok(Started { handle, booked }) => {
                if booked {
                    self.live.segment.book(call, Ok(()));
                }
                handle
            }
            Err(loss) => refuse(self.live, call, loss),
        }
    }
}

/// The first version whose NCCL tells of calls.
const FIRST_WITH_CALLS: u32 = 5;

/// Slots behind the last one that NCCL knows: forks look for extra functions there and must find NULL.
const SPARE: usize = 8;

/// The exported table. `I` is the version's init function.
#[repr(C)]
#[derive(Debug)]
pub struct Table<I> {
    name: *const c_char,
    init: I,
    start: unsafe extern "C" fn(*mut c_void, *mut *mut c_void, *const c_void) -> c_int,
    stop: unsafe extern "C" fn(*mut c_void) -> c_int,
    record: unsafe extern "C" fn(*mut c_void, c_int, *const c_void) -> c_int,
    finalize: unsafe extern "C" fn(*mut c_void) -> c_int,
    spare: [*const c_void; SPARE],
}

// SAFETY: the table is immutable, and its pointers are to static text, functions or nothing.
unsafe impl<I> Sync for Table<I> {}

impl<I> Table<I> {
    const fn of<A: Abi>(init: I) -> Self {
        Table {
            name: NAME.as_ptr(),
            init,
            start: start::<A>,
            stop: stop::<A>,
            record: record_state::<A>,
            finalize,
            spare: [core::ptr::null(); SPARE],
        }
    }
}

fn open<A: Abi>(context: *mut *mut c_void, mask: *mut c_int, args: &InitArgs) -> c_int {
    let place = Mask { wanted: A::MASK, place: mask.expose_provenance() };
    let given = init::open_comm(A::VERSION, args, place);
    if !context.is_null() {
        // SAFETY: NCCL passes a place for one pointer.
        unsafe { context.write(handle::to_pointer(given.context)) };
    }
    if !mask.is_null() {
        // SAFETY: NCCL passes a pointer to its mask, an aligned int. Other threads read it with atomic
        // loads while we write, so this store is one whole word.
        unsafe { core::ptr::write_volatile(mask, given.mask) };
        // Another thread may have switched it meanwhile, or changed what another plugin wants.
        if let Some(live) = live::live() {
            live.governor.sync();
            if let Some(chain) = live::chain() {
                chain.merge(&live.governor);
            }
        }
    }
    SUCCESS
}

unsafe extern "C" fn init_bare<A: Abi>(context: *mut *mut c_void, mask: *mut c_int) -> c_int {
    open::<A>(context, mask, &InitArgs::unknown())
}

unsafe extern "C" fn init_v4<A: Abi>(
    context: *mut *mut c_void,
    mask: *mut c_int,
    name: *const c_char,
    id: u64,
    nodes: c_int,
    ranks: c_int,
    rank: c_int,
    log: Option<LogFn>,
) -> c_int {
    open::<A>(context, mask, &InitArgs { known: true, id, name, nodes, ranks, rank, log })
}

unsafe extern "C" fn init_v5<A: Abi>(
    context: *mut *mut c_void,
    id: u64,
    mask: *mut c_int,
    name: *const c_char,
    nodes: c_int,
    ranks: c_int,
    rank: c_int,
    log: Option<LogFn>,
) -> c_int {
    open::<A>(context, mask, &InitArgs { known: true, id, name, nodes, ranks, rank, log })
}

unsafe extern "C" fn start<A: Abi>(
    context: *mut c_void,
    out: *mut *mut c_void,
    descriptor: *const c_void,
) -> c_int {
    // SAFETY: NCCL passes a descriptor of the version whose table it called, valid for this call.
    let seen = unsafe { descriptor.cast::<A::Descriptor>().as_ref() };
    if A::VERSION >= FIRST_WITH_CALLS
        && let Some(d) = seen
        && let (kind, true) = A::kind(d)
        && !out.is_null()
        && let Some(process) = live::bare()
    {
        match bare::enter(process, handle::to_number(context)) {
            Entry::Here(here) => {
                let Here { process, head, ring, .. } = here;
                // The larger ones are functions of their own, so that the small ones save no registers for them.
                // A table of all five would be one more cache line.
                let recorded = if kind & (COLL_API | COLL) != 0 {
                    match kind {
                        COLL_API => return start_call::<A>(context, out, d, process, head, ring),
                        COLL => return start_issue::<A>(context, out, d, process, head, ring),
                        _ => false,
                    }
                } else {
                    match kind {
                        GROUP_API => A::bare_group(d, &here),
                        GROUP => here.plan(),
                        KERNEL_LAUNCH => here.launch(),
                        _ => false,
                    }
                };
                if recorded {
                    return no_handle(out);
                }
                return start_not_bare::<A>(context, out, d, process, head, ring);
            }
            Entry::Elsewhere => return start_elsewhere::<A>(context, out, d, process),
            Entry::Closed => {}
        }
    }
    start_any::<A>(context, out, seen)
}

const COLL_API: u64 = 1 << bit::COLL_API;
const COLL: u64 = 1 << bit::COLL;
const P2P_API: u64 = 1 << bit::P2P_API;
const P2P: u64 = 1 << bit::P2P;
const GROUP_API: u64 = 1 << bit::GROUP_API;
const GROUP: u64 = 1 << bit::GROUP;
const KERNEL_LAUNCH: u64 = 1 << bit::KERNEL_LAUNCH;

/// NCCL gets no handle.
#[inline(always)]
fn no_handle(out: *mut *mut c_void) -> c_int {
    // SAFETY: NCCL passes a place for one handle.
    unsafe { out.write(core::ptr::null_mut()) };
    SUCCESS
}

/// Parts of the hot path that are functions of their own, so that small ones save no registers for larger ones. Each records
/// an event in a line where it can. Otherwise the event goes to another part, or to [`start_any`].
macro_rules! parts {
    ($($(#[$doc:meta])* $name:ident = |$d:ident, $here:ident| $recorded:expr $(, else $next:ident)?;)+) => {$(
        $(#[$doc])*
        #[inline(never)]
        extern "C" fn $name<A: Abi>(
            context: *mut c_void,
            out: *mut *mut c_void,
            $d: &A::Descriptor,
            process: &'static gate::Process,
            head: &'static Head,
            ring: u32,
        ) -> c_int {
            // In registers as far as here.
            let $here = Here { process, context: handle::to_number(context), head, ring };
            if $recorded {
                return no_handle(out);
            }
            parts!(@next (context, out, $d, process, head, ring) $($next)?)
        }
    )+};
    (@next $arguments:tt $next:ident) => { $next::<A> $arguments };
    (@next ($context:ident, $out:ident, $d:ident, $($rest:ident),+)) => {
        start_any::<A>($context, $out, Some($d))
    };
}

parts! {
    /// The call of what may be a bare collective.
    start_call = |d, here| A::bare_call(d, &here), else start_call_in_group;
    /// The issue of what may be one.
    start_issue = |d, here| A::bare_issue(d, &here), else start_issue_in_group;
    /// A group, a plan or a launch.
    start_of_group = |d, here| match A::kind(d).0 {
        GROUP_API => A::group_in_lines(d, &here),
        GROUP => here.plan_in_group(),
        _ => here.launch_in_group(),
    };
    /// The call of a collective in a group.
    start_call_in_group = |d, here| A::call_in_group(d, &here);
    /// The issue of a collective in a group.
    start_issue_in_group = |d, here| A::issue_in_group(d, &here);
    /// The call of a send or receive.
    start_pair_call = |d, here| A::pair_call(d, &here);
    /// The issue of a send or receive.
    start_pair_issue = |d, here| A::pair_issue(d, &here);
}

/// An event of a group, or of a send or receive.
#[inline(never)]
extern "C" fn start_not_bare<A: Abi>(
    context: *mut c_void,
    out: *mut *mut c_void,
    d: &A::Descriptor,
    process: &'static gate::Process,
    head: &'static Head,
    ring: u32,
) -> c_int {
    match A::kind(d).0 {
        P2P_API => start_pair_call::<A>(context, out, d, process, head, ring),
        P2P => start_pair_issue::<A>(context, out, d, process, head, ring),
        GROUP_API | GROUP | KERNEL_LAUNCH => start_of_group::<A>(context, out, d, process, head, ring),
        _ => start_any::<A>(context, out, Some(d)),
    }
}

/// An event on a thread whose ring is not where it is looked for first.
#[cold]
#[inline(never)]
extern "C" fn start_elsewhere<A: Abi>(
    context: *mut c_void,
    out: *mut *mut c_void,
    d: &A::Descriptor,
    process: &'static gate::Process,
) -> c_int {
    let Some(here) = bare::elsewhere(process, handle::to_number(context)) else {
        return start_any::<A>(context, out, Some(d));
    };
    let recorded = match A::kind(d).0 {
        COLL_API => A::bare_call(d, &here),
        COLL => A::bare_issue(d, &here),
        GROUP_API => A::bare_group(d, &here),
        GROUP => here.plan(),
        KERNEL_LAUNCH => here.launch(),
        _ => false,
    };
    let Here { process, head, ring, .. } = here;
    match A::kind(d).0 {
        _ if recorded => no_handle(out),
        COLL_API => start_call_in_group::<A>(context, out, d, process, head, ring),
        COLL => start_issue_in_group::<A>(context, out, d, process, head, ring),
        _ => start_not_bare::<A>(context, out, d, process, head, ring),
    }
}

/// Any event that has not gone the way of bare collectives.
#[inline(never)]
extern "C" fn start_any<A: Abi>(
    context: *mut c_void,
    out: *mut *mut c_void,
    seen: Option<&A::Descriptor>,
) -> c_int {
    if let Some(live) = live::live_alone() {
        let mut given = 0;
        match seen.filter(|_| !out.is_null()) {
            Some(d) => {
                let context = handle::to_number(context);
                given = A::tell(d, live.nccl, Recorder { live, context });
            }
            None => live.segment.book(call::START_UNKNOWN, Err(Loss::BadCall)),
        }
        if !out.is_null() {
            // SAFETY: NCCL passes a place for one handle, maybe uninitialised, so it is always written.
            unsafe { out.write(handle::to_pointer(given)) };
        }
        return SUCCESS;
    }
    start_chained::<A>(context, out, seen)
}

/// An event that another plugin gets as well: ours names our handles, theirs names theirs. Or one of nobody, where
/// nothing is open.
#[cold]
#[inline(never)]
fn start_chained<A: Abi>(context: *mut c_void, out: *mut *mut c_void, seen: Option<&A::Descriptor>) -> c_int {
    let given = match (live::live().zip(live::chain()), seen) {
        (None, _) => 0,
        (Some((live, chain)), Some(d)) if !out.is_null() => {
            let context = handle::to_number(context);
            let said = Said::of::<A>(d);
            let ours = match said.for_us(live, chain) {
                Ok(own) => {
                    // SAFETY: a copy of a descriptor of this version, whose parents alone were changed.
                    let own = unsafe { own.at::<A>().as_ref() };
                    own.map_or(0, |d| A::tell(d, live.nccl, Recorder { live, context }))
                }
                Err(loss) => refuse(live, said.bit() as usize, loss),
            };
            forward::start(chain, live, context, &said, ours)
        }
        (Some((live, _)), _) => refuse(live, call::START_UNKNOWN, Loss::BadCall),
    };
    if !out.is_null() {
        // SAFETY: as in `start`.
        unsafe { out.write(handle::to_pointer(given)) };
    }
    SUCCESS
}

/// Books a loss; the handle is NULL.
#[cold]
fn refuse(live: &Live, call: usize, loss: Loss) -> u64 {
    live.segment.book(call, Err(loss));
    0
}

/// Books a call, unless it carried nothing.
#[inline]
fn book(live: &Live, call: usize, outcome: Result<Carried, Loss>) {
    match outcome {
        Ok(Carried::Nothing) => {}
        Ok(Carried::Something) => live.segment.book(call, Ok(())),
        Err(loss) => {
            refuse(live, call, loss);
        }
    }
}

unsafe extern "C" fn stop<A: Abi>(event: *mut c_void) -> c_int {
    if handle::has_no_end(handle::to_number(event), A::VERSION) {
        return SUCCESS;
    }
    if let Some(live) = live::live_alone() {
        book(live, call::STOP, record::stop(live, handle::to_number(event)));
        return SUCCESS;
    }
    stop_chained(event)
}

/// The end of an event where there is another plugin, or where nothing is open.
#[cold]
#[inline(never)]
fn stop_chained(event: *mut c_void) -> c_int {
    if let Some(live) = live::live() {
        book(live, call::STOP, forward::stop(live, handle::to_number(event)));
    }
    SUCCESS
}

unsafe extern "C" fn record_state<A: Abi>(event: *mut c_void, value: c_int, args: *const c_void) -> c_int {
    if let Some(live) = live::live_alone() {
        // SAFETY: NCCL passes NULL or the state arguments of the version whose table it called.
        let arg = unsafe { args.cast::<A::StateArgs>().as_ref() }.map(A::state);
        book(live, call::STATE, record::state(live, handle::to_number(event), value, arg));
        return SUCCESS;
    }
    record_chained::<A>(event, value, args)
}

/// A state of an event where there is another plugin, or where nothing is open.
#[cold]
#[inline(never)]
fn record_chained<A: Abi>(event: *mut c_void, value: c_int, args: *const c_void) -> c_int {
    if let Some(live) = live::live() {
        // SAFETY: as in `record_state`.
        let arg = unsafe { args.cast::<A::StateArgs>().as_ref() }.map(A::state);
        book(live, call::STATE, forward::state(live, handle::to_number(event), value, arg));
    }
    SUCCESS
}

unsafe extern "C" fn finalize(context: *mut c_void) -> c_int {
    if let Some(live) = live::live() {
        let context = handle::to_number(context);
        live.segment.book(call::FINALIZE, record::finalize(live, context));
        if let Some(chain) = live::chain() {
            chain.finalize(live.nonce, context);
        }
    }
    SUCCESS
}

/// Exports the table of one version.
macro_rules! table {
    ($symbol:ident, $abi:ty, $init:ident: $signature:ty) => {
        /// The table that NCCL looks up by this name.
        #[unsafe(no_mangle)]
        #[allow(non_upper_case_globals, reason = "NCCL's name")]
        pub static $symbol: Table<$signature> = Table::of::<$abi>($init::<$abi>);
    };
}

table!(ncclProfiler_v1, v1::V1, init_bare: InitBare);
table!(ncclProfiler_v2, v2::V2, init_bare: InitBare);
table!(ncclProfiler_v3, v3::V3, init_bare: InitBare);
table!(ncclProfiler_v4, v4::V4, init_v4: InitV4);
table!(ncclProfiler_v5, v5::V5, init_v5: InitV5);
table!(ncclProfiler_v6, v6::V6, init_v5: InitV5);
table!(ncclProfiler_v7, v7::V7, init_v5: InitV5);

/// Address of our table of one version: another library may turn out to be this one.
pub(crate) fn own_table(version: u32) -> usize {
    match version {
        1 => (&raw const ncclProfiler_v1).addr(),
        2 => (&raw const ncclProfiler_v2).addr(),
        3 => (&raw const ncclProfiler_v3).addr(),
        4 => (&raw const ncclProfiler_v4).addr(),
        5 => (&raw const ncclProfiler_v5).addr(),
        6 => (&raw const ncclProfiler_v6).addr(),
        7 => (&raw const ncclProfiler_v7).addr(),
        _ => 0,
    }
}
