//! Calls that NCCL has not told of yet, where it tells only of what it issues (profiler ABI v1 to v4): the last
//! 64 of each communicator.
//!
//! A communicator is used by one thread at a time, but NCCL may issue on another one. A call whose group has
//! ended is late: NCCL issues most operations before that, so younger calls are tried first.

use super::{Calls, get};
use crate::runtime::names::{RECV, SEND};
use ringwatch_wire::sync::Word;

const PLACES: usize = 64;
/// Ticket and key of each, and a count of them.
pub(crate) const WORDS: usize = PLACES * 2 + 1;
const COUNT: usize = PLACES * 2;

const LATE: u64 = 1;

/// Bytes of an element by its type's code. A type without a name is ncclUint8, which NCCL does not name.
const fn size(dtype: u8) -> u64 {
    match dtype {
        7 | 10 => 2,
        3 | 4 | 8 => 4,
        5 | 6 | 9 => 8,
        _ => 1,
    }
}

/// The key that a call and the event of its issue have in common.
pub(crate) fn key_of(func: u8, dtype: u8, count: u64, peer: i32) -> u64 {
    let peer = if func == SEND || func == RECV { peer as u32 as u64 } else { 0 };
    let bytes = count.wrapping_mul(size(dtype));
    (bytes ^ peer << 40).wrapping_mul(0x9e37_79b9_7f4a_7c15) & !0xff | u64::from(func)
}

fn words(calls: &Calls, comm: u64) -> Option<&'static [Word; WORDS]> {
    calls.page.pending.get(calls.index(comm))
}

/// Empties a communicator's.
pub(crate) fn clear(calls: &Calls, comm: u64) {
    for w in words(calls, comm).into_iter().flatten() {
        w.set(0);
    }
}

/// A call begins. It takes the place of the oldest.
pub(crate) fn push(calls: &Calls, comm: u64, ticket: u64, key: u64) {
    let Some(words) = words(calls, comm) else { return };
    let Some(count) = words.get(COUNT) else { return };
    let at = (count.add(1) as usize % PLACES) * 2;
    if let (Some(t), Some(k)) = (words.get(at), words.get(at + 1)) {
        t.set(0);
        k.set(key);
        t.set_last((ticket + 1) << 1);
    }
}

/// From the oldest on.
fn oldest_first(words: &[Word; WORDS]) -> impl Iterator<Item = (&Word, &Word)> {
    let first = get(words, COUNT) as usize;
    (0..PLACES).filter_map(move |i| {
        let at = ((first + i) % PLACES) * 2;
        Some((words.get(at)?, words.get(at + 1)?))
    })
}

/// The call that an event is of; it is pending no more.
pub(crate) fn take(calls: &Calls, comm: u64, key: u64) -> Option<u64> {
    let words = words(calls, comm)?;
    for late in [0, LATE] {
        for (ticket, k) in oldest_first(words) {
            let t = ticket.get_first();
            if t != 0 && t & LATE == late && k.get() == key && ticket.replace(t, 0) {
                return (t >> 1).checked_sub(1);
            }
        }
    }
    None
}

fn of(words: &[Word; WORDS], ticket: u64) -> Option<&Word> {
    // The newest is asked for most often.
    let newest = (get(words, COUNT) as usize).wrapping_sub(1);
    (0..PLACES).find_map(|i| {
        let w = words.get((newest.wrapping_sub(i) % PLACES) * 2)?;
        if w.get() >> 1 == ticket + 1 { Some(w) } else { None }
    })
}

/// A call's group has ended.
pub(crate) fn late(calls: &Calls, comm: u64, ticket: u64) {
    if let Some(w) = words(calls, comm).and_then(|w| of(w, ticket)) {
        w.replace((ticket + 1) << 1, (ticket + 1) << 1 | LATE);
    }
}

/// A call failed: NCCL will not issue it.
pub(crate) fn forget(calls: &Calls, comm: u64, ticket: u64) {
    if let Some(w) = words(calls, comm).and_then(|w| of(w, ticket)) {
        w.replace((ticket + 1) << 1, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringwatch_wire::codes::UNKNOWN;

    #[test]
    fn a_call_and_its_issue_have_one_key() {
        // NCCL issues all-gathers and broadcasts as bytes, and does not name ncclUint8.
        assert_eq!(key_of(3, 8, 100, -1), key_of(3, 1, 400, 7));
        assert_eq!(key_of(5, 2, 100, 0), key_of(5, UNKNOWN, 100, 0));
        assert_ne!(key_of(5, 8, 100, 0), key_of(5, 8, 101, 0));
        assert_ne!(key_of(7, 8, 100, 0), key_of(7, 8, 100, 1));
        assert_ne!(key_of(7, 8, 100, 0), key_of(8, 8, 100, 0));
    }
}
