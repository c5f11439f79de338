// Which events NCCL brings for a mask: a type is asked for by its own bit and by those of what hangs on it. `replay`
// in the program has a table of its own of this; a test there includes this file (hence no inner doc comments) and holds
// both against each other.

const GROUP: u32 = 1 << 0;
const COLL: u32 = 1 << 1;
const P2P: u32 = 1 << 2;
const PROXY_OP: u32 = 1 << 3;
const PROXY_STEP: u32 = 1 << 4;
const KERNEL_CH: u32 = 1 << 6;
const NET_PLUGIN: u32 = 1 << 7;
const GROUP_API: u32 = 1 << 8;
const COLL_API: u32 = 1 << 9;
const P2P_API: u32 = 1 << 10;
const KERNEL_LAUNCH: u32 = 1 << 11;
const CE_COLL: u32 = 1 << 12;
const CE_SYNC: u32 = 1 << 13;
const CE_BATCH: u32 = 1 << 14;
const KERNEL_PHASE: u32 = 1 << 15;

const CALLS: u32 = GROUP_API | COLL_API | P2P_API | KERNEL_LAUNCH;
const COPIES: u32 = CE_COLL | CE_SYNC | CE_BATCH;
/// Events that hang on every operation.
const BELOW: u32 = PROXY_OP | PROXY_STEP | KERNEL_CH | NET_PLUGIN;
/// The same up to NCCL 2.25.
const BELOW_OLD: u32 = PROXY_OP | PROXY_STEP;

/// The bits any of which makes NCCL of an ABI version start events of the type with this bit number. Of types that
/// no version up to v7 has: their own.
pub(super) const fn implied_by(version: u32, bit: u32) -> u32 {
    let Some(own) = 1_u32.checked_shl(bit) else { return 0 };
    match (own, version) {
        (GROUP, 1 | 2) => COLL | P2P | BELOW_OLD,
        (GROUP, _) => GROUP | COLL | P2P | BELOW,
        // Sends and receives came with the collectives then, and their own bit brought nothing.
        (COLL | P2P, 1 | 2) => COLL | BELOW_OLD,
        (COLL, _) => COLL | BELOW,
        (P2P, 3 | 4) => P2P | PROXY_OP | PROXY_STEP | KERNEL_CH,
        (P2P, _) => P2P | BELOW,
        (PROXY_OP, _) => PROXY_OP | PROXY_STEP | NET_PLUGIN,
        (PROXY_STEP, _) => PROXY_STEP | NET_PLUGIN,
        (KERNEL_CH, 7) => KERNEL_CH | KERNEL_PHASE,
        (GROUP_API, _) => GROUP | COLL | P2P | BELOW | CALLS | COPIES,
        (COLL_API, _) => COLL_API | COLL | BELOW | COPIES,
        (P2P_API, _) => P2P_API | P2P | BELOW,
        (CE_COLL, _) => COPIES,
        _ => own,
    }
}
