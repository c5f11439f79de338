//! The binary layouts of NCCL's profiler events, versions 1 to 7, as a writer of bytes.
//!
//! Each field is put at its offset by number. The plugin has structs for the same tables; that the
//! two agree is the point of having both.

use super::plugin::{Abi, c_string};
use super::trace::Descriptor;

/// Words of the largest descriptor (136 bytes, v7).
const WORDS: usize = 17;
/// The bytes in padding, behind the end, and everywhere once the call is over: a plugin that reads
/// what it should not, or keeps a pointer, shall notice.
const POISON: u64 = 0xa5a5_a5a5_a5a5_a5a5;
/// The recordings hold no buffer addresses; NCCL never gives NULL.
const SEND_BUFFER: u64 = 0x7f52_0000_0000;
const RECV_BUFFER: u64 = 0x7f53_0000_0000;
/// An id that NCCL does not have, for names that v1's numbers cannot express.
const NO_ID: u8 = 0xff;

/// The parts of a descriptor beyond its recorded fields.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Setting {
    /// `parentObj`: what the plugin returned for the parent.
    pub(super) parent: usize,
    /// `parentGroup` of v5 and later.
    pub(super) parent_group: usize,
    /// The rank in the communicator, where NCCL fills it in.
    pub(super) rank: i32,
    /// The communicator's hash, which v1 to v3 repeat in each descriptor.
    pub(super) comm_id: u64,
    /// Ranks of the communicator, for v1's and v2's traffic estimate.
    pub(super) ranks: i32,
    /// The GPU's stamp to deliver instead of the recorded one, in ns.
    pub(super) stamp_ns: u64,
    /// The pid to deliver instead of the recorded one.
    pub(super) pid: i32,
}

/// Returns whether a version knows a type of event.
pub(super) fn has_type(abi: Abi, type_bit: u64) -> bool {
    let since = match type_bit {
        0x1 | 0x2 | 0x4 | 0x8 | 0x10 | 0x20 => 1,
        0x40 | 0x80 => 3,
        0x100 | 0x200 | 0x400 | 0x800 => 5,
        0x1000 | 0x2000 | 0x4000 => 6,
        0x8000 => 7,
        _ => return false,
    };
    abi.number() >= since
}

/// The bits of a mask that mean something to a version.
pub(super) fn known_bits(abi: Abi) -> u64 {
    (0..u64::BITS).map(|bit| 1 << bit).filter(|&bit| has_type(abi, bit)).sum()
}

/// Returns whether a version knows a state.
pub(super) fn has_state(abi: Abi, state: u32) -> bool {
    let version = abi.number();
    match state {
        0..=7 => version <= 3,
        8..=18 => true,
        19 | 20 | 22 => version >= 4,
        21 => version >= 3,
        23 | 24 => version >= 5,
        25..=30 => version >= 6,
        31 => version >= 7,
        _ => false,
    }
}

/// The mask bits any of which makes NCCL fire a type of event.
pub(super) fn implied_by(abi: Abi, type_bit: u64) -> u64 {
    match (type_bit, abi.number()) {
        (0x1, 1..=2) => 0x1e,
        (0x1, _) => 0xdf,
        (0x2, 1..=2) | (0x4, 1..=2) => 0x1a,
        (0x2, _) => 0xda,
        (0x4, 3..=4) => 0x5c,
        (0x4, _) => 0xdc,
        (0x8, _) => 0x98,
        (0x10, _) => 0x90,
        (0x40, 7) => 0x8040,
        (0x100, _) => 0x7fdf,
        (0x200, _) => 0x72da,
        (0x400, _) => 0x4dc,
        (0x1000, _) => 0x7000,
        (0x8000, _) => 0x8000,
        (bit, _) => bit,
    }
}

/// One descriptor in memory, as NCCL has it on its stack.
#[derive(Debug)]
pub(super) struct DescriptorBytes {
    words: [u64; WORDS],
}

impl DescriptorBytes {
    /// Lays out a descriptor for a version that [has its type](has_type).
    pub(super) fn new(abi: Abi, descriptor: &Descriptor, setting: &Setting) -> Self {
        let version = abi.number();
        let len = match version {
            2 => 128,
            1 | 3 => 120,
            4 => 104,
            5 | 6 => 112,
            _ => 136,
        };
        let mut bytes = Self { words: [POISON; WORDS] };
        bytes.words[..len / 8].fill(0);
        let type_bit = descriptor.type_bit();
        if version >= 5 {
            bytes.u64(0, type_bit);
        } else {
            // Seven bytes of padding that nobody promised to be zero.
            bytes.u64(0, POISON);
            bytes.u8(0, type_bit as u8);
        }
        bytes.u64(8, setting.parent as u64);
        bytes.i32(16, setting.rank);
        bytes.fields(version, descriptor, setting);
        bytes
    }

    /// Address to give to the plugin.
    pub(super) fn as_mut_ptr(&mut self) -> *mut u64 {
        self.words.as_mut_ptr()
    }

    /// Makes the descriptor unusable, as NCCL's stack frame is once the call is over.
    pub(super) fn scribble(&mut self) {
        self.words.fill(std::hint::black_box(POISON));
        std::hint::black_box(&mut self.words);
    }

    fn fields(&mut self, version: u8, descriptor: &Descriptor, setting: &Setting) {
        match descriptor {
            Descriptor::GroupApi { depth, graph_captured } => {
                self.u8(24, (*graph_captured).into());
                self.i32(28, *depth);
            }
            Descriptor::CollApi { func, count, datatype, root, stream, graph_captured } => {
                self.name(24, func);
                self.u64(32, *count);
                self.name(40, datatype);
                self.i32(48, *root);
                self.u64(56, *stream);
                self.u8(64, (*graph_captured).into());
            }
            Descriptor::P2pApi { func, count, datatype, stream, graph_captured } => {
                self.name(24, func);
                self.u64(32, *count);
                self.name(40, datatype);
                self.u64(48, *stream);
                self.u8(56, (*graph_captured).into());
            }
            Descriptor::KernelLaunch { stream } => self.u64(24, *stream),
            Descriptor::Coll { .. } => self.coll(version, descriptor, setting),
            Descriptor::P2p { .. } => self.p2p(version, descriptor, setting),
            Descriptor::KernelCh { channel, .. } => {
                self.u8(24, *channel);
                if version >= 4 {
                    self.u64(32, setting.stamp_ns);
                }
            }
            Descriptor::ProxyOp { channel, peer, steps, chunk_bytes, send, .. } => {
                self.i32(24, setting.pid);
                self.u8(28, *channel);
                self.i32(32, *peer);
                self.i32(36, *steps);
                self.i32(40, *chunk_bytes);
                self.i32(44, (*send).into());
            }
            Descriptor::ProxyStep { step } => self.i32(24, *step),
            Descriptor::Group | Descriptor::Other(_) => {}
        }
    }

    fn coll(&mut self, version: u8, descriptor: &Descriptor, setting: &Setting) {
        let Descriptor::Coll { rank, seq, func, count, root, datatype, channels, warps, algo, proto } =
            descriptor
        else {
            return;
        };
        self.i32(16, *rank);
        if version >= 4 {
            self.u64(24, *seq);
            self.name(32, func);
            self.u64(40, SEND_BUFFER);
            self.u64(48, RECV_BUFFER);
            self.u64(56, *count);
            self.i32(64, *root);
            self.name(72, datatype);
            self.u8(80, *channels);
            self.u8(81, *warps);
            self.name(88, algo);
            self.name(96, proto);
            if version >= 5 {
                self.u64(104, setting.parent_group as u64);
            }
            // v7's kernelVariant, isSymColl and userTag stay NULL, false and 0.
            return;
        }
        // The name at 24 was never anything but NULL.
        self.u64(32, setting.comm_id);
        self.u64(40, *seq);
        self.u64(56, SEND_BUFFER);
        self.u64(64, RECV_BUFFER);
        self.u64(72, *count);
        self.i32(80, *root);
        let traffic = traffic_bytes(func, *count, datatype, setting.ranks);
        match version {
            1 => {
                self.u8(48, function_id(func));
                self.u8(84, datatype_id(datatype));
                self.u64(96, traffic);
                self.u8(104, *channels);
                self.u8(105, *warps);
                self.u8(106, algorithm_id(algo));
                self.u8(107, protocol_id(proto));
                self.i32(108, algo.starts_with("COLLNET").into());
                self.i32(112, algo.starts_with("NVLS").into());
            }
            2 => {
                self.name(48, func);
                self.name(88, datatype);
                self.u64(96, traffic);
                self.u8(104, *channels);
                self.u8(105, *warps);
                self.name(112, algo);
                self.name(120, proto);
            }
            _ => {
                self.name(48, func);
                self.name(88, datatype);
                self.u8(96, *channels);
                self.u8(97, *warps);
                self.name(104, algo);
                self.name(112, proto);
            }
        }
    }

    fn p2p(&mut self, version: u8, descriptor: &Descriptor, setting: &Setting) {
        let Descriptor::P2p { rank, func, count, datatype, peer, channels } = descriptor else { return };
        self.i32(16, *rank);
        if version >= 4 {
            self.name(24, func);
            self.u64(32, RECV_BUFFER);
            self.name(40, datatype);
            self.u64(48, *count);
            self.i32(56, *peer);
            self.u8(60, *channels);
            if version >= 5 {
                self.u64(64, setting.parent_group as u64);
            }
            return;
        }
        self.u64(32, setting.comm_id);
        if version == 1 {
            self.u8(40, function_id(func));
            self.u8(56, datatype_id(datatype));
        } else {
            self.name(40, func);
            self.name(56, datatype);
        }
        self.u64(48, RECV_BUFFER);
        self.u64(64, *count);
        self.i32(72, *peer);
    }

    fn u8(&mut self, offset: usize, value: u8) {
        let shift = offset % 8 * 8;
        let word = &mut self.words[offset / 8];
        *word = *word & !(0xff << shift) | u64::from(value) << shift;
    }

    fn i32(&mut self, offset: usize, value: i32) {
        let shift = offset % 8 * 8;
        let word = &mut self.words[offset / 8];
        *word = *word & !(0xffff_ffff << shift) | u64::from(value as u32) << shift;
    }

    fn u64(&mut self, offset: usize, value: u64) {
        self.words[offset / 8] = value;
    }

    fn name(&mut self, offset: usize, name: &str) {
        self.u64(offset, c_string(name).as_ptr() as u64);
    }
}

/// The argument of a state: 16 bytes up to v3, 8 since, in a room of 16.
#[derive(Debug)]
pub(super) struct StateBytes([u64; 2]);

impl StateBytes {
    /// The argument that v4 and later give, and any version for the proxy's own states.
    pub(super) fn word(value: u64) -> Self {
        Self([value, 0])
    }

    /// `transSize` and `steps` of v1 to v3.
    pub(super) fn proxy_op(bytes: u64, steps: u32) -> Self {
        Self([bytes, steps.into()])
    }

    pub(super) fn as_mut_ptr(&mut self) -> *mut u64 {
        self.0.as_mut_ptr()
    }

    pub(super) fn scribble(&mut self) {
        self.0.fill(std::hint::black_box(POISON));
        std::hint::black_box(&mut self.0);
    }
}

const FUNCTIONS: [&str; 11] = [
    "Broadcast",
    "Reduce",
    "AllGather",
    "ReduceScatter",
    "AllReduce",
    "SendRecv",
    "Send",
    "Recv",
    "AlltoAll",
    "Scatter",
    "Gather",
];
const DATATYPES: [&str; 12] = [
    "ncclInt8",
    "ncclUint8",
    "ncclInt32",
    "ncclUint32",
    "ncclInt64",
    "ncclUint64",
    "ncclFloat16",
    "ncclFloat32",
    "ncclFloat64",
    "ncclBfloat16",
    "ncclFloat8e4m3",
    "ncclFloat8e5m2",
];
const ALGORITHMS: [&str; 7] = ["TREE", "RING", "COLLNET_DIRECT", "COLLNET_CHAIN", "NVLS", "NVLS_TREE", "PAT"];
const PROTOCOLS: [&str; 3] = ["LL", "LL128", "SIMPLE"];

fn id(names: &[&str], name: &str) -> u8 {
    names.iter().position(|&known| known == name).map_or(NO_ID, |index| index as u8)
}

fn function_id(name: &str) -> u8 {
    id(&FUNCTIONS, name)
}

fn datatype_id(name: &str) -> u8 {
    id(&DATATYPES, name)
}

fn algorithm_id(name: &str) -> u8 {
    id(&ALGORITHMS, name)
}

fn protocol_id(name: &str) -> u8 {
    id(&PROTOCOLS, name)
}

/// NCCL's estimate of what a collective moves per rank, in bytes.
fn traffic_bytes(func: &str, count: u64, datatype: &str, ranks: i32) -> u64 {
    let element = match datatype_id(datatype) {
        2 | 3 | 7 => 4,
        4 | 5 | 8 => 8,
        6 | 9 => 2,
        _ => 1,
    };
    let factor = match func {
        "AllReduce" => 2,
        "AllGather" | "ReduceScatter" => u64::try_from(ranks).unwrap_or(1),
        _ => 1,
    };
    count.saturating_mul(element).saturating_mul(factor)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    #[test]
    fn small_fields_leave_their_neighbours_alone() {
        let mut bytes = DescriptorBytes { words: [u64::MAX; WORDS] };
        bytes.u8(3, 0);
        bytes.i32(12, 0x0102_0304);
        assert_eq!(bytes.words[0].to_ne_bytes(), [0xff, 0xff, 0xff, 0, 0xff, 0xff, 0xff, 0xff]);
        assert_eq!(bytes.words[1].to_ne_bytes(), [0xff, 0xff, 0xff, 0xff, 4, 3, 2, 1]);
    }

    #[test]
    fn what_lies_behind_a_descriptor_and_in_its_padding_is_poison() {
        for (version, len) in [(1, 120), (2, 128), (3, 120), (4, 104), (5, 112), (6, 112), (7, 136)] {
            let abi = Abi::new(version).unwrap();
            let bytes = DescriptorBytes::new(abi, &Descriptor::Group, &Setting::default());
            assert!(bytes.words[len / 8..].iter().all(|&word| word == POISON));
            assert_eq!(bytes.words[0], if version < 5 { POISON & !0xff | 1 } else { 1 });
            assert!(bytes.words[1..len / 8].iter().all(|&word| word == 0));
        }
    }

    #[test]
    fn ids_and_traffic_are_those_of_nccl() {
        assert_eq!(function_id("AllReduce"), 4);
        assert_eq!(function_id("Recv"), 7);
        assert_eq!(datatype_id("ncclBfloat16"), 9);
        assert_eq!(datatype_id("Unknown"), NO_ID);
        assert_eq!(algorithm_id("NVLS_TREE"), 5);
        assert_eq!(protocol_id("SIMPLE"), 2);
        assert_eq!(traffic_bytes("AllReduce", 10, "ncclBfloat16", 4), 40);
        assert_eq!(traffic_bytes("AllGather", 10, "ncclInt8", 4), 40);
    }

    #[test]
    fn older_versions_lack_what_came_later() {
        let abi = |version| Abi::new(version).unwrap();
        assert!(!has_type(abi(2), 0x40) && has_type(abi(3), 0x40));
        assert!(!has_type(abi(4), 0x200) && has_type(abi(5), 0x200));
        assert!(!has_state(abi(3), 19) && has_state(abi(4), 19));
        assert!(has_state(abi(3), 5) && !has_state(abi(4), 5));
        assert!(!has_state(abi(3), 22) && has_state(abi(4), 22));
    }

    /// The plugin's own table, by which it decides what another one behind it hears.
    mod plugin {
        include!(concat!(env!("CARGO_MANIFEST_DIR"), "/plugin/src/forward/implied.rs"));

        pub(super) fn table(version: u32, bit: u32) -> u64 {
            implied_by(version, bit).into()
        }
    }

    #[test]
    fn the_plugin_has_the_same_table() {
        for version in 1..=7 {
            for bit in 0..32 {
                let abi = Abi::new(version).unwrap();
                assert_eq!(
                    plugin::table(version.into(), bit),
                    implied_by(abi, 1 << bit),
                    "v{version}, bit {bit}"
                );
            }
        }
        assert_eq!(plugin::table(7, 40), 0, "no mask has that bit");
    }

    #[test]
    fn implied_masks_are_those_of_the_table() {
        let abi = |version| Abi::new(version).unwrap();
        // A Coll-only mask brings the whole way down to the Coll, and nothing of the network.
        for type_bit in [0x1, 0x2, 0x100, 0x200] {
            assert_ne!(implied_by(abi(5), type_bit) & 0x2, 0, "{type_bit:#x}");
        }
        for type_bit in [0x4, 0x8, 0x10, 0x20, 0x40, 0x400, 0x800] {
            assert_eq!(implied_by(abi(5), type_bit) & 0x2, 0, "{type_bit:#x}");
        }
        assert_eq!(implied_by(abi(2), 0x4) & 0x4, 0, "P2p alone enables nothing up to 2.25");
    }
}
