//! NCCL's tuner tables, v1 to v6: rules that choose algorithm, protocol and channels, or nothing at all.
//!
//! NCCL loads this library as its tuner only where `NCCL_TUNER_PLUGIN` names it. Even then nothing is changed unless
//! `RINGWATCH_TUNE` names rules, and unless all ranks of the communicator have agreed on them. `getCollInfo` always
//! succeeds: an error would fail the job's collective.

#![expect(unsafe_code, reason = "the C boundary")]

mod agreement;
pub(crate) mod all_gather;
mod context;
mod cost_log;
pub mod decision;
mod inits;
mod report;
mod roll;
mod rule_file;

pub(crate) use inits::note;

use crate::ffi::{LogFn, NAME, SUCCESS};
use crate::live;
use crate::runtime::log::Log;
use crate::runtime::{settings, thread_word};
use agreement::{Outcome, Party};
use core::ffi::{c_char, c_int, c_void};
use decision::{Call, Choices, ENTRIES, ENTRIES_OF_OLD, Shape};
use report::{Report, report};
use ringwatch_wire::codes::tuned;
use ringwatch_wire::cost_log::size_word;
use ringwatch_wire::layout::head;
use ringwatch_wire::tuning::Rules;
use roll::{Arrival, NO_RANK};
use rule_file::RuleFile;

/// NCCL's answer for a configuration that cannot be: the user required rules on which ranks do not agree.
const INVALID_USAGE: c_int = 5;

/// Slots behind the last one that NCCL knows: later versions look for functions there and must find NULL.
const SPARE: usize = 8;

/// The exported table. The optional `getChunkSize` of v6 is the first spare slot, and absent.
#[repr(C)]
#[derive(Debug)]
pub struct Table<Init, GetCollInfo, Finalize> {
    /// The name in NCCL's log.
    pub name: *const c_char,
    /// Opens a communicator.
    pub init: Init,
    /// Decides one call.
    pub get_coll_info: GetCollInfo,
    /// Closes a communicator.
    pub finalize: Finalize,
    /// NULL.
    pub spare: [*const c_void; SPARE],
}

// SAFETY: the table is immutable, and its pointers are to static text, functions or nothing.
unsafe impl<I, G, F> Sync for Table<I, G, F> {}

impl<I, G, F> Table<I, G, F> {
    const fn of(init: I, get_coll_info: G, finalize: F) -> Self {
        Table { name: NAME.as_ptr(), init, get_coll_info, finalize, spare: [core::ptr::null(); SPARE] }
    }
}

/// How ranks are spread over NVLink domains, as v5 and v6 say it.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs, reason = "NCCL's own names")]
pub struct NvlDomainInfo {
    pub n_nvl_domains: c_int,
    pub min_ranks_per_nvl_domain: c_int,
    pub max_ranks_per_nvl_domain: c_int,
}

/// The constants of NCCL's cost model, as v5 and v6 hand them over. They are left as they are.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs, reason = "NCCL's own names")]
pub struct Constants {
    pub base_latencies: [[f64; 3]; 7],
    pub hw_latencies: [[[f64; 3]; 7]; 3],
    pub ll_max_bws: [[f64; 3]; 4],
    pub per_ch_max_ring_ll128_bws: [[f64; 3]; 4],
    pub per_ch_max_tree_ll128_bws: [[f64; 3]; 4],
    pub per_ch_max_tree_bws: [[f64; 3]; 4],
    pub per_ch_max_nvls_tree_bws: [[f64; 3]; 4],
}

/// `init` of v1.
pub type InitV1 = unsafe extern "C" fn(usize, usize, Option<LogFn>) -> c_int;
/// `init` of v2 to v4.
pub type InitV2 = unsafe extern "C" fn(usize, usize, Option<LogFn>, *mut *mut c_void) -> c_int;
/// `init` of v5 and v6.
pub type InitV5 = unsafe extern "C" fn(
    *mut *mut c_void,
    u64,
    usize,
    usize,
    Option<LogFn>,
    *mut NvlDomainInfo,
    *mut Constants,
) -> c_int;
/// `getCollInfo` of v1.
pub type GetV1 =
    unsafe extern "C" fn(c_int, usize, c_int, c_int, c_int, *mut c_int, *mut c_int, *mut c_int) -> c_int;
/// `getCollInfo` of v2.
pub type GetV2 = unsafe extern "C" fn(
    *mut c_void,
    c_int,
    usize,
    c_int,
    c_int,
    c_int,
    *mut c_int,
    *mut c_int,
    *mut c_int,
) -> c_int;
/// `getCollInfo` of v3.
pub type GetV3 =
    unsafe extern "C" fn(*mut c_void, c_int, usize, c_int, *mut *mut f32, c_int, c_int, *mut c_int) -> c_int;
/// `getCollInfo` of v4 to v6.
pub type GetV4 = unsafe extern "C" fn(
    *mut c_void,
    c_int,
    usize,
    c_int,
    *mut *mut f32,
    c_int,
    c_int,
    c_int,
    *mut c_int,
) -> c_int;
/// `destroy` of v1.
pub type DestroyV1 = unsafe extern "C" fn() -> c_int;
/// `destroy` of v2 to v4, `finalize` of v5 and v6.
pub type Finalize = unsafe extern "C" fn(*mut c_void) -> c_int;

/// The arguments that the init of every version has in common.
struct InitArgs {
    version: u32,
    comm_id: Option<u64>,
    ranks: usize,
    nodes: usize,
    log: Log,
}

unsafe extern "C" fn init_v1(ranks: usize, nodes: usize, log: Option<LogFn>) -> c_int {
    // There is no context, so that a call could not be told from another communicator's.
    let args = InitArgs { version: 1, comm_id: None, ranks, nodes, log: Log::new(log) };
    open(&args).err().unwrap_or(SUCCESS)
}

unsafe extern "C" fn init_v2<const VERSION: u32>(
    ranks: usize,
    nodes: usize,
    log: Option<LogFn>,
    context: *mut *mut c_void,
) -> c_int {
    let args = InitArgs { version: VERSION, comm_id: None, ranks, nodes, log: Log::new(log) };
    opened(&args, context)
}

unsafe extern "C" fn init_v5<const VERSION: u32>(
    context: *mut *mut c_void,
    comm_id: u64,
    ranks: usize,
    nodes: usize,
    log: Option<LogFn>,
    _domains: *mut NvlDomainInfo,
    _constants: *mut Constants,
) -> c_int {
    let args = InitArgs { version: VERSION, comm_id: Some(comm_id), ranks, nodes, log: Log::new(log) };
    opened(&args, context)
}

/// Opens a communicator and hands over its context, which is never NULL.
fn opened(args: &InitArgs, place: *mut *mut c_void) -> c_int {
    let (context, result) = match open(args) {
        Ok(context) => (context, SUCCESS),
        Err(result) => (context::idle(), result),
    };
    if !place.is_null() {
        // SAFETY: NCCL passes a place for one pointer.
        unsafe { place.write(context) };
    }
    result
}

unsafe extern "C" fn get_coll_info_v1(
    _collective: c_int,
    _bytes: usize,
    _collnet: c_int,
    _nvls: c_int,
    _pipe_ops: c_int,
    _algorithm: *mut c_int,
    _protocol: *mut c_int,
    _channels: *mut c_int,
) -> c_int {
    SUCCESS
}

unsafe extern "C" fn get_coll_info_v2(
    _context: *mut c_void,
    _collective: c_int,
    _bytes: usize,
    _collnet: c_int,
    _nvls: c_int,
    _pipe_ops: c_int,
    _algorithm: *mut c_int,
    _protocol: *mut c_int,
    _channels: *mut c_int,
) -> c_int {
    SUCCESS
}

unsafe extern "C" fn get_coll_info_v3(
    context: *mut c_void,
    collective: c_int,
    bytes: usize,
    pipe_ops: c_int,
    table: *mut *mut f32,
    algorithms: c_int,
    protocols: c_int,
    channels: *mut c_int,
) -> c_int {
    // SAFETY: as NCCL calls v3, which does not tell about registered buffers.
    unsafe {
        get_coll_info_v4(context, collective, bytes, pipe_ops, table, algorithms, protocols, 0, channels)
    }
}

unsafe extern "C" fn get_coll_info_v4(
    context: *mut c_void,
    collective: c_int,
    bytes: usize,
    pipe_ops: c_int,
    table: *mut *mut f32,
    algorithms: c_int,
    protocols: c_int,
    registered: c_int,
    channels: *mut c_int,
) -> c_int {
    let Some(choices) = context::choices(context) else {
        if !cost_log::is_open() {
            return SUCCESS;
        }
        // SAFETY: as NCCL calls this. The same arguments in the same places make this a jump.
        return unsafe {
            note_costs(
                context, collective, bytes, pipe_ops, table, algorithms, protocols, registered, channels,
            )
        };
    };
    let (Some(shape), Ok(collective)) = (Shape::of(algorithms, protocols), usize::try_from(collective))
    else {
        return SUCCESS;
    };
    let call =
        Call { collective, bytes: bytes as u64, pipe_ops: pipe_ops as u32, is_registered: registered != 0 };
    // SAFETY: NCCL passes one contiguous array of that many floats, whatever its declaration says, for this call alone.
    let count = unsafe {
        match shape {
            Shape::Full => table.cast::<[f32; ENTRIES]>().as_mut().map(|t| choices.decide(&call, t)),
            Shape::WithoutPat => {
                table.cast::<[f32; ENTRIES_OF_OLD]>().as_mut().map(|t| choices.decide(&call, t))
            }
        }
    };
    let count = count.unwrap_or(0);
    if count != 0 && !channels.is_null() {
        // SAFETY: NCCL passes a place for one int.
        unsafe { channels.write(c_int::from(count)) };
    }
    SUCCESS
}

/// Notes NCCL's predicted times for a call, whose arguments these are.
#[cold]
#[inline(never)]
unsafe extern "C" fn note_costs(
    context: *mut c_void,
    collective: c_int,
    bytes: usize,
    _pipe_ops: c_int,
    table: *mut *mut f32,
    algorithms: c_int,
    protocols: c_int,
    _registered: c_int,
    _channels: *mut c_int,
) -> c_int {
    let (Some(shape), Ok(collective)) = (Shape::of(algorithms, protocols), usize::try_from(collective))
    else {
        return SUCCESS;
    };
    let count = match shape {
        Shape::Full => ENTRIES,
        Shape::WithoutPat => ENTRIES_OF_OLD,
    };
    if !table.is_null() {
        // SAFETY: NCCL passes one contiguous array of at least this many floats, whatever its declaration says.
        let costs = unsafe { core::slice::from_raw_parts(table.cast::<f32>(), count) };
        cost_log::note(collective, bytes as u64, context::size(context), costs);
    }
    SUCCESS
}

unsafe extern "C" fn destroy_v1() -> c_int {
    SUCCESS
}

unsafe extern "C" fn finalize(context: *mut c_void) -> c_int {
    context::close(context);
    SUCCESS
}

/// The context of a communicator, or NCCL's error where its ranks must agree and do not.
fn open(args: &InitArgs) -> Result<*mut c_void, c_int> {
    cost_log::open();
    let file = rule_file::rule_file();
    if matches!(file, RuleFile::Unset) && !settings::tune_is_required() {
        let (ranks, nodes) = (u32::try_from(args.ranks), u32::try_from(args.nodes));
        return Ok(match (cost_log::is_open(), ranks, nodes) {
            (true, Ok(ranks), Ok(nodes)) => context::open_noted(size_word(ranks, nodes)),
            _ => context::idle(),
        });
    }
    // NCCL asks no tuner about a communicator of one rank.
    let (Ok(ranks), Ok(nodes)) = (u32::try_from(args.ranks), u32::try_from(args.nodes)) else {
        return Ok(context::idle());
    };
    if ranks < 2 {
        return Ok(context::idle());
    }
    let member = inits::member(args.comm_id, ranks);
    let prepared = prepare(&file, ranks, nodes);
    let own = Arrival {
        rank: member.map_or(NO_RANK, |m| m.rank),
        hash: prepared.as_ref().map_or(0, |p| p.hash),
        lack: prepared.as_ref().err().copied().unwrap_or(0),
    };
    let comm_id = args.comm_id.or(member.map(|m| m.comm_id));
    let by_all_gather = settings::tune_by_all_gather();
    let outcome = match comm_id {
        _ if args.version < 3 => Outcome::new(tuned::OLD_NCCL),
        _ if by_all_gather && !thread_word::is_preloaded() => Outcome::new(tuned::NO_PRELOAD),
        Some(_) if by_all_gather => Outcome::new(tuned::UNDECIDED),
        _ if nodes != 1 => Outcome::new(tuned::NOT_AGREED),
        None => Outcome::new(tuned::NO_ID),
        Some(comm_id) => agreement::agree(&Party { comm_id, ranks, own }),
    };
    // The hash comes first: a reader takes it as that of the rules of which it reads the outcome.
    if let Some(live) = live::live() {
        live.segment.set(head::RULES, own.hash);
    }
    if let Some(m) = member {
        inits::record(m.ticket, outcome.code);
    }
    // With an all-gather, ranks that took no part would wait for one whose init fails here. They all fail after it.
    let fails = settings::tune_is_required() && (!by_all_gather || outcome.code == tuned::NO_PRELOAD);
    args.log.keep();
    report(&args.log, &Report { comm_id, outcome: &outcome, hash: own.hash, fails });
    match (prepared, comm_id) {
        (Ok(p), _) if outcome.code == tuned::AGREED => {
            context::activate(p.context, p.choices);
            return Ok(p.context);
        }
        (Ok(p), Some(comm_id)) if outcome.code == tuned::UNDECIDED => {
            context::wait(p.context, comm_id, p.choices);
            return Ok(p.context);
        }
        (Ok(p), _) => context::close(p.context),
        (Err(_), _) => {}
    }
    if fails { Err(INVALID_USAGE) } else { Ok(context::idle()) }
}

/// All that a communicator needs for its rules to apply, before its ranks agree on that.
struct Prepared {
    hash: u64,
    choices: &'static Choices<'static>,
    context: *mut c_void,
}

/// Everything that can fail on one rank alone fails here, so that the other ranks learn of it.
fn prepare(file: &RuleFile, ranks: u32, nodes: u32) -> Result<Prepared, u8> {
    let rules: &Rules<'static> = match file {
        RuleFile::Loaded(rules) => rules,
        RuleFile::Refused => return Err(tuned::REFUSED),
        RuleFile::Unset | RuleFile::Missing => return Err(tuned::MISSING),
    };
    let choices = context::select(rules, ranks, nodes).ok_or(tuned::REFUSED)?;
    let context = context::open().ok_or(tuned::REFUSED)?;
    Ok(Prepared { hash: rules.hash(), choices, context })
}

/// Exports the table of one version.
macro_rules! table {
    ($symbol:ident: $init:ty, $get:ty, $finalize:ty = $($function:expr),+) => {
        /// The table that NCCL looks up by this name.
        #[unsafe(no_mangle)]
        #[allow(non_upper_case_globals, reason = "NCCL's name")]
        pub static $symbol: Table<$init, $get, $finalize> = Table::of($($function),+);
    };
}

table!(ncclTunerPlugin_v1: InitV1, GetV1, DestroyV1 = init_v1, get_coll_info_v1, destroy_v1);
table!(ncclTunerPlugin_v2: InitV2, GetV2, Finalize = init_v2::<2>, get_coll_info_v2, finalize);
table!(ncclTunerPlugin_v3: InitV2, GetV3, Finalize = init_v2::<3>, get_coll_info_v3, finalize);
table!(ncclTunerPlugin_v4: InitV2, GetV4, Finalize = init_v2::<4>, get_coll_info_v4, finalize);
table!(ncclTunerPlugin_v5: InitV5, GetV4, Finalize = init_v5::<5>, get_coll_info_v4, finalize);
table!(ncclTunerPlugin_v6: InitV5, GetV4, Finalize = init_v5::<6>, get_coll_info_v4, finalize);
