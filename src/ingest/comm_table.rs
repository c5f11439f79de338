//! The communicators of one segment, as its table changes.

use super::decode;
use crate::model::{CommRecord, SegmentId, Sink, Update};
use ringwatch_wire::reader::{CommSlot, Reader};
use std::collections::{BTreeMap, HashSet};

/// Reads communicators, and keeps no more new ones than make `most` of them; returns how many it left out.
pub(super) fn read_comms(
    reader: &Reader<'_>,
    (segment, owner, host_clock): (SegmentId, Option<u32>, u64),
    most: usize,
    known: &mut BTreeMap<u16, (CommSlot, CommRecord)>,
    out: &mut dyn Sink,
) -> u64 {
    let (mut there, mut unknown) = (0, 0);
    for slot in reader.comms() {
        there += 1;
        let key = (slot.ticket & 0xffff) as u16;
        if known.get(&key).is_some_and(|(was, _)| *was == slot) {
            continue;
        }
        if known.len() >= most && !known.contains_key(&key) {
            unknown += 1;
            continue;
        }
        let Some(record) = decode::comm(segment, owner, host_clock, reader.rules(), &slot) else { continue };
        if let Some((_, was)) = known.get(&key)
            && (was.comm, was.rank) != (record.comm, record.rank)
            && was.init_ns == record.init_ns
        {
            // Until NCCL tells, its id is what the call let expect.
            out.take(Update::Left { segment, comm: was.comm, rank: was.rank });
        }
        if known.get(&key).is_none_or(|(_, was)| *was != record) {
            out.take(Update::Comm(record.clone()));
        }
        known.insert(key, (slot, record));
    }
    if known.len() > there {
        forget_comms(reader, segment, known, out);
    }
    unknown
}

/// Communicators whose slots were given away: operations of theirs may be read yet.
const FORMER_COMMS: usize = 256;

/// Forgets communicators whose slots were given away: at once where they were not freed, as no plugin does that, and the
/// oldest of the others when there are many.
fn forget_comms(
    reader: &Reader<'_>,
    segment: SegmentId,
    known: &mut BTreeMap<u16, (CommSlot, CommRecord)>,
    out: &mut dyn Sink,
) {
    let there: HashSet<u64> = reader.comms().map(|slot| slot.ticket).collect();
    known.retain(|_, (slot, record)| {
        let stays = there.contains(&slot.ticket) || record.finalized_ns.is_some();
        if !stays {
            out.take(Update::Left { segment, comm: record.comm, rank: record.rank });
        }
        stays
    });
    let mut former: Vec<(u64, u16)> = known
        .iter()
        .filter(|(_, (slot, _))| !there.contains(&slot.ticket))
        .map(|(key, (slot, _))| (slot.ticket, *key))
        .collect();
    former.sort_unstable();
    let surplus = former.len().saturating_sub(FORMER_COMMS);
    for (_, key) in former.into_iter().take(surplus) {
        known.remove(&key);
    }
}
