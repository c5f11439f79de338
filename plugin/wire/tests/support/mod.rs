//! A look at everything in a segment, shared by the tests and the fuzz target.

#![allow(dead_code, unreachable_pub, reason = "each test uses its part")]

use ringwatch_wire::codes::{Flaw, Loss, call};
use ringwatch_wire::layout::{Region, head};
use ringwatch_wire::reader::{Found, OpenError, Reader};
use ringwatch_wire::sync::Word;

/// Bytes as words; a last partial word is dropped, as a mapping would.
pub fn words(bytes: &[u8]) -> Vec<Word> {
    bytes.chunks_exact(8).map(|c| Word::new(u64::from_le_bytes(c.try_into().unwrap_or_default()))).collect()
}

/// Opens and reads whatever a reader can be asked for; returns how many records it found.
pub fn walk(words: &[Word]) -> Result<usize, OpenError> {
    let reader = Reader::open(words)?;
    let mut found = 0;
    for c in reader.comms() {
        assert!(c.name.bytes().count() <= 64 && c.gpu.bytes().count() <= 24);
        found += 1;
    }
    found += reader.text::<{ head::ENV_WORDS }>(head::ENV).bytes().count().min(1);
    found += reader.text::<8>(usize::MAX).bytes().count();
    for kind in [0, call::COUNT - 1, call::COUNT, usize::MAX] {
        found += (reader.seen(kind) & reader.recorded(kind) & 1) as usize;
    }
    for loss in Loss::ALL {
        found += (reader.lost(loss) & 1) as usize;
    }
    for flaw in Flaw::ALL {
        found += (reader.flaws(flaw) & 1) as usize;
    }
    found += (reader.pid() ^ reader.uid()) as usize & 1;
    found += (reader.nccl().unwrap_or(0) ^ reader.abi().unwrap_or(0)) as usize & 1;
    for region in Region::ALL {
        let ring = reader.ring(region);
        let (next, slots) = (ring.next(), ring.slots());
        let mut tickets =
            vec![0, 1, slots, 1 << 44, (1 << 48) - 1, 1 << 48, i64::MAX as u64, u64::MAX - 1, u64::MAX];
        for d in 0..20 {
            tickets.extend([
                d,
                next.wrapping_add(d),
                next.wrapping_sub(d),
                next.wrapping_sub(slots).wrapping_add(d),
            ]);
        }
        for t in tickets {
            found += match region {
                Region::Comm => reader.comms().filter(|c| c.ticket == t).count(),
                Region::Op => one(reader.op(t).map(|o| o.variant.bytes().count())),
                Region::Group => one(reader.group(t)),
                Region::Channel => one(reader.channel(t)),
                Region::Proxy => one(reader.proxy(t)),
            };
        }
    }
    for ring in 0..reader.line_rings() + 1 {
        let next = reader.line_ring(ring).next();
        let slots = reader.line_ring(ring).slots();
        for t in (0..20).flat_map(|d| [d, next.wrapping_sub(d), next.wrapping_sub(slots).wrapping_add(d), !d])
        {
            found += one(reader.line(ring, t).map(|o| o.map(|o| o.variant.bytes().count())));
        }
    }
    Ok(found)
}

fn one<T>(found: Found<T>) -> usize {
    usize::from(matches!(found, Found::Is(_)))
}
