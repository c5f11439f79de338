//! Calls of the API, which make operations.

use super::begin_group;
use super::operation::{Record, What, root_word};
use crate::bare;
use crate::communicator::Comm;
use crate::event::Api;
use crate::handle::{Handle, Kind, VALUE_MASK, group};
use crate::live::Live;
use crate::preloaded;
use crate::runtime::clock::now_ns;
use crate::runtime::names::{RECV, SEND, bytes_of};
use crate::timing;
use ringwatch_wire::codes::{Loss, flag, kind, timed};
use ringwatch_wire::layout::op;

/// An API call: the group's value, and the ticket of its operation.
#[inline(always)]
pub(super) fn called(live: &'static Live, c: Comm, parent: u64, api: &Api) -> Result<(u64, u64), Loss> {
    let group = match parent {
        0 => {
            let context = Handle { kind: Kind::Comm, value: c.ticket }.pack(live.nonce);
            bare::group_of_call(live, context, |depth| begin_group(live, context, depth, false).ok())
        }
        _ => Some(parent & VALUE_MASK).filter(|_| Kind::Group.is(parent, live.nonce)),
    };
    let is_bare = parent == 0 && group.is_none();
    let group = group.unwrap_or(group::BARE);
    if preloaded::seen()
        && let Some(again) = called_again(live, c, group, api)
    {
        return Ok(again);
    }
    // The group of a bare collective may have gone the hot path, which leaves this undone.
    if is_bare && api.collective {
        timing::begin_bare(&c);
    }
    let (ticket, slot) = live.segment.op.claim()?;
    let kind = match (api.collective, api.func) {
        (true, _) => kind::COLLECTIVE,
        (false, SEND) => kind::SEND,
        (false, _) => kind::RECV,
    };
    let flags = if api.captured { flag::CAPTURED } else { 0 };
    let what = What { kind, func: api.func, dtype: api.dtype, algo: 0, proto: 0, flags };
    let now = now_ns();
    let mut r = Record::blank();
    r.set(op::WHAT, what.word(c.ticket));
    r.set(op::COUNT, api.count);
    r.set(op::ROOT, root_word(api.root, 0, 0));
    r.set(op::CALLED_NS, now);
    // The group may be another communicator's: groups span communicators.
    let in_group = if group & group::BARE != 0 { 0 } else { (group & group::TICKET) + 1 };
    r.set(op::GROUP, in_group);
    r.set(op::STREAM, api.stream);
    r.set(op::USER_TAG, api.user_tag);
    if group & group::KERNEL != 0 {
        r.set(op::TIMED, u64::from(timed::KERNEL));
    }
    r.publish(slot);
    let bytes = bytes_of(api.dtype, api.count);
    let is_first = timing::note_call(live, &c, ticket, now, bytes, in_group, api.collective);
    note_transfer(live, api, in_group, is_first);
    timing::note_broadcast(live, api.func, in_group == 0);
    timing::note_capture(live, &c, ticket, api);
    Ok((group, ticket))
}

/// A call that the preloaded library saw before: what NCCL says beside it.
#[cold]
#[inline(never)]
fn called_again(live: &'static Live, c: Comm, group: u64, api: &Api) -> Option<(u64, u64)> {
    let seen = preloaded::told(live, c.ticket, api.func)?;
    let slot = live.segment.op.claim_again(seen.op)?;
    let now = now_ns();
    let captured = if api.captured { flag::CAPTURED } else { 0 };
    slot.set(op::WHAT, seen.what | u64::from(captured) << 56);
    slot.set(op::CALLED_NS, now);
    let in_group = if group & group::BARE != 0 { 0 } else { (group & group::TICKET) + 1 };
    slot.set(op::GROUP, in_group);
    slot.set(op::USER_TAG, api.user_tag);
    if group & group::KERNEL != 0 {
        slot.set(op::TIMED, u64::from(timed::KERNEL));
    }
    slot.publish();
    let is_first = timing::note_call(
        live,
        &c,
        seen.op,
        now,
        bytes_of((seen.what >> 32 & 0xff) as u8, api.count),
        in_group,
        api.collective,
    );
    note_transfer(live, api, in_group, is_first);
    timing::note_broadcast(live, api.func, in_group == 0);
    timing::note_capture(live, &c, seen.op, api);
    Some((group, seen.op))
}

/// Tells the governor of a call that sends or receives.
#[inline(always)]
fn note_transfer(live: &Live, api: &Api, in_group: u64, is_first: bool) {
    if !api.collective {
        // A bare call that makes several is an all-to-all, which sends first.
        let is_send = api.func != RECV || in_group == 0;
        live.governor.saw_transfer(is_send, is_first == (in_group != 0));
    }
}
