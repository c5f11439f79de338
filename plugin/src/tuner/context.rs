//! A tuner context for each communicator, and the rules selected for each size of communicator.
//!
//! Contexts are places in a static array: whatever NCCL passes later is compared with their addresses and never followed.

#![expect(unsafe_code, reason = "selections are mappings that live as long as the process")]

use super::decision::{Choice, Choices, Ends};
use crate::runtime::sys;
use core::ffi::c_void;
use ringwatch_wire::sync::Word;
use ringwatch_wire::tuning::{COLLECTIVES, Rules};

/// Most communicators at once. Others get a context that decides nothing.
const CONTEXTS_MAX: usize = 1024;
/// Most sizes of communicators in one process.
const SIZES_MAX: usize = 64;

/// The context that NCCL gets for a communicator.
#[derive(Debug)]
pub(super) struct Context {
    /// While a communicator has it: 1, and above that bit its ranks and nodes, if its calls are noted.
    taken: Word,
    /// Address of its [`Choices`]; 0 while no rules apply.
    choices: Word,
}

impl Context {
    const fn new() -> Self {
        Context { taken: Word::new(0), choices: Word::new(0) }
    }
}

static CONTEXTS: [Context; CONTEXTS_MAX] = [const { Context::new() }; CONTEXTS_MAX];
/// The context of communicators for which no rules apply. NCCL takes NULL for a tuner that failed.
static IDLE: Context = Context::new();

/// Choices that wait for an agreement, by the index of their context. They are no part of the contexts, which every call
/// reads.
#[derive(Debug)]
struct Waiting {
    /// FREE, KEPT, or CLAIMED until the context is closed.
    state: Word,
    comm_id: Word,
    /// Address of the [`Choices`].
    choices: Word,
}

const FREE: u64 = 0;
const KEPT: u64 = 1;
const CLAIMED: u64 = 2;

static WAITING: [Waiting; CONTEXTS_MAX] =
    [const { Waiting { state: Word::new(FREE), comm_id: Word::new(0), choices: Word::new(0) } };
        CONTEXTS_MAX];

/// The rules selected for communicators of one size.
#[derive(Debug)]
struct Selection {
    /// Ranks (low 32 bits) and nodes; 0 while it is free.
    size: Word,
    /// Address of its [`Choices`]; 0 until they are selected.
    choices: Word,
}

static SELECTIONS: [Selection; SIZES_MAX] =
    [const { Selection { size: Word::new(0), choices: Word::new(0) } }; SIZES_MAX];

/// The context of a communicator for which no rules apply.
pub(super) fn idle() -> *mut c_void {
    (&raw const IDLE).cast_mut().cast()
}

/// A context for a communicator, in which no rules apply yet; `None` where none is left.
pub(super) fn open() -> Option<*mut c_void> {
    let free = CONTEXTS.iter().find(|c| c.taken.get() == 0 && c.taken.replace(0, 1))?;
    Some((&raw const *free).cast_mut().cast())
}

/// A context for a communicator of this size, whose calls are noted; one that has no size where none is left.
pub(super) fn open_noted(size: u64) -> *mut c_void {
    let Some(context) = open() else { return idle() };
    if let Some(context) = find(context) {
        context.taken.set_last(size << 1 | 1);
    }
    context
}

/// The size of the communicator of a context whose calls are noted; 0 unknown.
pub(super) fn size(context: *mut c_void) -> u64 {
    find(context).map_or(0, |c| c.taken.get_first() >> 1)
}

/// From now on a communicator's calls are decided by these choices.
pub(super) fn activate(context: *mut c_void, choices: &'static Choices<'static>) {
    if let Some(context) = find(context) {
        context.choices.set_last((&raw const *choices).expose_provenance() as u64);
    }
}

/// Keeps choices until the ranks of the communicator have agreed on them.
pub(super) fn wait(context: *mut c_void, comm_id: u64, choices: &'static Choices<'static>) {
    if let Some(waiting) = index(context).and_then(|i| WAITING.get(i)) {
        waiting.comm_id.set(comm_id);
        waiting.choices.set((&raw const *choices).expose_provenance() as u64);
        waiting.state.set_last(KEPT);
    }
}

/// Takes one of the contexts that wait for the agreement of this communicator; false where none is left. Each rank in the
/// process takes one, whichever it is.
pub(super) fn claim(comm_id: u64) -> bool {
    let is_of = |w: &&Waiting| w.state.get_first() == KEPT && w.comm_id.get() == comm_id;
    WAITING.iter().filter(is_of).any(|w| w.state.replace(KEPT, CLAIMED))
}

/// Lets the rules apply from now on in all contexts of this communicator. All its ranks in the process have agreed: a rank
/// that goes on before the others must find its own context active, whichever it has taken.
pub(super) fn activate_claimed(comm_id: u64) {
    for (waiting, context) in WAITING.iter().zip(&CONTEXTS) {
        if waiting.state.get_first() == CLAIMED && waiting.comm_id.get() == comm_id {
            context.choices.set_last(waiting.choices.get());
        }
    }
}

/// Takes a communicator's context back.
pub(super) fn close(context: *mut c_void) {
    if let Some(waiting) = index(context).and_then(|i| WAITING.get(i)) {
        waiting.state.set_last(FREE);
    }
    if let Some(context) = find(context) {
        context.choices.set_last(0);
        context.taken.set_last(0);
    }
}

/// The choices of a context; `None` where no rules apply, and for what is no context of ours.
#[inline]
pub(super) fn choices(context: *mut c_void) -> Option<&'static Choices<'static>> {
    at(find(context)?.choices.get_first())
}

#[inline]
fn find(context: *mut c_void) -> Option<&'static Context> {
    CONTEXTS.get(index(context)?)
}

#[inline]
fn index(context: *mut c_void) -> Option<usize> {
    let offset = context.addr().wrapping_sub((&raw const CONTEXTS).addr());
    if offset.is_multiple_of(size_of::<Context>()) { Some(offset / size_of::<Context>()) } else { None }
}

#[inline]
fn at(address: u64) -> Option<&'static Choices<'static>> {
    // SAFETY: 0, or the address of choices that were written before it was stored, and that are never unmapped.
    unsafe { core::ptr::with_exposed_provenance::<Choices<'static>>(address as usize).as_ref() }
}

/// The rules for communicators of this size; `None` where they cannot be selected.
pub(super) fn select(rules: &Rules<'static>, ranks: u32, nodes: u32) -> Option<&'static Choices<'static>> {
    let size = u64::from(ranks) | u64::from(nodes) << 32;
    let selection = SELECTIONS.iter().find(|s| {
        s.size.get_first() == size || s.size.replace(0, size) || {
            // Another thread may have taken it for the same size.
            s.size.get_first() == size
        }
    })?;
    if selection.choices.get_first() == 0 {
        let (address, mapping) = make(rules, ranks, nodes)?;
        if !selection.choices.replace(0, address) {
            // SAFETY: another thread was first, so that nobody knows this mapping.
            unsafe { sys::unmap(mapping.0, mapping.1) };
        }
    }
    at(selection.choices.get_first())
}

/// Choices, and what they refer to, in one mapping. The rows follow it.
#[repr(C)]
struct Selected {
    choices: Choices<'static>,
    ends: [Ends; COLLECTIVES],
}

/// Selects rules into a mapping of their own.
fn make(rules: &Rules<'static>, ranks: u32, nodes: u32) -> Option<(u64, (*mut c_void, usize))> {
    let count = rules.rows_for(ranks, nodes).count();
    let bytes = size_of::<Selected>() + count * size_of::<Choice>();
    let mapping = sys::map(None, bytes)?;
    let selected = mapping.cast::<Selected>();
    // SAFETY: the mapping has room for one `Selected`, whose size is a multiple of a row's alignment, and `count` rows.
    let rows = unsafe { selected.add(1).cast::<Choice>() };
    for (i, row) in rules.rows_for(ranks, nodes).take(count).enumerate() {
        // SAFETY: `i` is below `count`.
        unsafe { rows.add(i).write(Choice::of(&row)) };
    }
    // SAFETY: `count` rows were written, and the mapping is never undone once its address is known.
    let rows = unsafe { core::slice::from_raw_parts(rows, count) };
    // SAFETY: zeroed memory of the mapping, which holds valid numbers, and which nobody else refers to.
    let ends = unsafe { &mut (*selected).ends };
    let Some(choices) = Choices::new(rows, ends, rules.rows_for(ranks, nodes), nodes) else {
        // SAFETY: nobody else knows this mapping.
        unsafe { sys::unmap(mapping, bytes) };
        return None;
    };
    // SAFETY: as above, with room for one `Choices`.
    let choices = unsafe {
        let place = &raw mut (*selected).choices;
        place.write(choices);
        place
    };
    Some((choices.expose_provenance() as u64, (mapping, bytes)))
}
