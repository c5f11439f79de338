//! What a job is made of, drawn from a seed. Each field can be made simpler alone, which is how a failing job shrinks.

use super::random::Random;

/// How a job divides its work, which decides who talks to whom.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Family {
    Ddp,
    Sharded,
    Pipeline,
    Experts,
    Context,
    Reinforcement,
    Inference,
    Rooted,
}

impl Family {
    pub(crate) const ALL: [Family; 8] = [
        Family::Ddp,
        Family::Sharded,
        Family::Pipeline,
        Family::Experts,
        Family::Context,
        Family::Reinforcement,
        Family::Inference,
        Family::Rooted,
    ];

    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Family::Ddp => "ddp",
            Family::Sharded => "sharded",
            Family::Pipeline => "pipeline",
            Family::Experts => "experts",
            Family::Context => "context",
            Family::Reinforcement => "reinforcement",
            Family::Inference => "inference",
            Family::Rooted => "rooted",
        }
    }
}

macro_rules! kinds {
    ($($name:ident = $text:literal),+ $(,)?) => {
        /// What goes wrong.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
        pub(crate) enum FaultKind { $($name),+ }
        impl FaultKind {
            pub(crate) const ALL: &'static [FaultKind] = &[$(FaultKind::$name),+];
            pub(crate) fn as_str(self) -> &'static str {
                match self { $(FaultKind::$name => $text),+ }
            }
        }
    };
}

kinds! {
    HostHangs = "host-hangs",
    Stopped = "stopped",
    Killed = "killed",
    Exits = "exits",
    NodeLost = "node-lost",
    CallSkipped = "call-skipped",
    CallExtra = "call-extra",
    CallsSwapped = "calls-swapped",
    OtherCount = "other-count",
    OtherFunc = "other-func",
    OtherType = "other-type",
    OtherRoot = "other-root",
    TransferSkipped = "transfer-skipped",
    DataStuck = "data-stuck",
    LinkBroken = "link-broken",
    Aborted = "aborted",
    GpuOccupied = "gpu-occupied",
    NeverJoined = "never-joined",
    ReplaySkipped = "replay-skipped",
    OtherChoice = "other-choice",
    LateOnce = "late-once",
    Paused = "paused",
    LateOften = "late-often",
    GpuSlow = "gpu-slow",
    NodeSlow = "node-slow",
    PairSlow = "pair-slow",
    NetworkSlow = "network-slow",
    NicSlow = "nic-slow",
}

impl FaultKind {
    /// True for what makes a job slower and not stand still.
    pub(crate) fn is_slow(self) -> bool {
        self >= FaultKind::LateOnce
    }

    /// True for what makes data slow and no rank late.
    pub(crate) fn is_data(self) -> bool {
        self >= FaultKind::PairSlow
    }
}

/// A fault to be planted. Its place is found in the run of the healthy job.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct FaultSpec {
    pub(crate) kind: FaultKind,
    /// Decides who and where.
    pub(crate) luck: u64,
    /// When, in ms of the job's time.
    pub(crate) at_ms: u64,
    /// How bad, from 0 to 1.
    pub(crate) size: f64,
}

/// Everything that is drawn from a seed.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Spec {
    pub(crate) seed: u64,
    pub(crate) family: Family,
    pub(crate) ranks: u32,
    pub(crate) a_node: u32,
    /// Sizes of the inner groups: tensor, and pipeline or shards.
    pub(crate) inner: u32,
    pub(crate) outer: u32,
    pub(crate) layers: u32,
    pub(crate) micro: u32,
    /// Another form of the family: HSDP, interleaved stages, native all-to-all.
    pub(crate) variant: bool,
    /// One piece of computing, in us.
    pub(crate) unit_us: u64,
    /// Elements of one operation.
    pub(crate) count: u64,
    pub(crate) noise: f64,
    /// GPUs differ in speed by up to this share, and not by any fault.
    pub(crate) gpus_differ: f64,
    /// Hosts take this share of computing's time to launch it, and differ in that by up to `hosts_differ`.
    pub(crate) host_share: f64,
    pub(crate) hosts_differ: f64,
    pub(crate) tail_share: f64,
    pub(crate) tail_factor: f64,
    pub(crate) disturbed: f64,
    pub(crate) depth: usize,
    /// The host waits for the streams after each step.
    pub(crate) sync: bool,
    pub(crate) timed_of: u64,
    /// NCCL tells one end for all transfers of a launch.
    pub(crate) one_end_a_launch: bool,
    /// Exchanges are timed by CUDA events, each launch as a whole.
    pub(crate) launches_by_events: bool,
    pub(crate) abi: u32,
    pub(crate) lost_stamps: f64,
    pub(crate) lost_records: u32,
    pub(crate) late_records_us: u64,
    pub(crate) gpu_drift: f64,
    pub(crate) host_drift: f64,
    pub(crate) preloaded: bool,
    pub(crate) host_facts: bool,
    /// Agents read the GPUs' load.
    pub(crate) reads_load: bool,
    pub(crate) compile_ms: u64,
    pub(crate) warm_up_ms: u64,
    /// Every so many steps; all ranks, or rank 0 alone.
    pub(crate) checkpoint_ms: u64,
    pub(crate) checkpoint_alone: bool,
    pub(crate) evaluation: bool,
    pub(crate) subgroups: u32,
    pub(crate) ends: bool,
    pub(crate) until_ms: u64,
    /// How many calls of all ranks the job may have; more are slowed down to it. Jobs with many are rare.
    pub(crate) calls: u64,
    pub(crate) faults: Vec<FaultSpec>,
}

impl Spec {
    /// True where operations may stand still of which no stamp says so.
    pub(crate) fn is_blind(&self) -> bool {
        self.timed_of > 1 || self.abi < 3 || self.times_launches()
    }

    /// True where its exchanges are launches of sends and receives, each timed as a whole.
    pub(crate) fn times_launches(&self) -> bool {
        self.launches_by_events && self.family == Family::Experts && !self.variant && self.inner <= 8
    }

    pub(crate) fn from_seed(seed: u64) -> Self {
        let mut r = Random::new(seed);
        let family = r.pick(&Family::ALL);
        let (ranks, a_node, inner, outer) = sizes(&mut r, family);
        let old = r.chance(0.12);
        // Drawn apart, so that seeds stay nearly the jobs that they were: many loops compute the same in each step.
        let mut apart = Random::new(seed ^ 0x6770_7573);
        let noise = r.spread(0.02, 0.5) * if apart.chance(0.3) { 0.1 } else { 1.0 };
        let gpus_differ = if apart.chance(0.5) { apart.spread(0.003, 0.025) } else { 0.0 };
        let tails = r.chance(0.5);
        let busy_hosts = apart.chance(0.3);
        let mut spec = Spec {
            seed,
            family,
            ranks,
            a_node,
            inner,
            outer,
            layers: 1 + (r.next() % 4) as u32,
            micro: outer * (1 + (r.next() % 2) as u32),
            variant: r.chance(0.4),
            unit_us: r.spread(2_000.0, 25_000.0) as u64,
            count: r.spread(4_096.0, 60_000_000.0) as u64,
            noise,
            gpus_differ,
            host_share: if busy_hosts { apart.spread(0.02, 0.4) } else { 0.0 },
            hosts_differ: if busy_hosts { apart.spread(0.05, 0.6) } else { 0.0 },
            tail_share: if tails { r.spread(0.000_1, 0.01) } else { 0.0 },
            tail_factor: if tails { r.spread(1.0, 8.0) } else { 0.0 },
            disturbed: if r.chance(0.3) { r.spread(0.001, 0.05) } else { 0.0 },
            depth: r.pick(&[1_000, 1_000, 200, 40]),
            sync: r.chance(0.5),
            timed_of: if r.chance(0.5) { 1 } else { r.pick(&[2, 8, 32, 128]) },
            abi: if old { 2 } else { r.pick(&[4, 5, 5, 5]) },
            // As in releases from 2.27 on.
            one_end_a_launch: !old && Random::new(seed ^ 0x0065_6e64).chance(0.8),
            launches_by_events: !old && Random::new(seed ^ 0x6c61_756e).chance(0.7),
            lost_stamps: if r.chance(0.2) { r.spread(0.000_5, 0.05) } else { 0.0 },
            lost_records: if r.chance(0.1) { 1 + (r.next() % 4) as u32 } else { 0 },
            late_records_us: r.spread(60.0, 30_000.0) as u64,
            gpu_drift: r.between(-30.0, 30.0),
            host_drift: r.between(-40.0, 40.0),
            preloaded: r.chance(0.3),
            host_facts: r.chance(0.6),
            // Drawn apart, so that seeds stay the jobs that they were.
            reads_load: Random::new(seed ^ 0x6c6f_6164).chance(0.9),
            compile_ms: if r.chance(0.3) { r.between(100.0, 2_000.0) as u64 } else { 0 },
            warm_up_ms: if r.chance(0.6) { r.between(10.0, 300.0) as u64 } else { 0 },
            checkpoint_ms: if r.chance(0.3) { r.between(100.0, 2_500.0) as u64 } else { 0 },
            checkpoint_alone: r.chance(0.3),
            evaluation: r.chance(0.2),
            subgroups: if r.chance(0.2) { 1 + (r.next() % 2) as u32 } else { 0 },
            ends: r.chance(0.15),
            until_ms: r.between(6_000.0, 11_000.0) as u64,
            calls: if r.chance(0.005) { 20_000 } else { r.spread(600.0, 2_000.0) as u64 },
            faults: Vec::new(),
        };
        spec.draw_faults(&mut r);
        spec
    }

    fn draw_faults(&mut self, r: &mut Random) {
        let many = match r.unit() {
            x if x < 0.25 => 0,
            x if x < 0.95 => 1,
            _ => 2,
        };
        for _ in 0..many {
            let kind = loop {
                let kind = r.pick(FaultKind::ALL);
                if self.can_have(kind) {
                    break kind;
                }
            };
            self.faults.push(FaultSpec {
                kind,
                luck: r.next(),
                at_ms: r.between(2_000.0, 4_000.0) as u64,
                size: r.unit(),
            });
        }
        if self.faults.iter().any(|f| f.kind.is_data()) {
            // Data whose time is a good part of the computing's: 100 bytes take a nanosecond.
            let part = match self.family {
                Family::Pipeline => 8.0,
                Family::Context => 4.0,
                Family::Experts => f64::from(self.inner),
                Family::Rooted => 16.0,
                _ => 1.0,
            };
            self.count = (self.unit_us as f64 * 1e3 * 50.0 * part * r.between(0.05, 0.3)) as u64;
        }
        if self.faults.iter().any(|f| f.kind.is_data()) {
            self.calls = self.calls.max(2_500);
        }
        let blind = self.is_blind();
        for f in &self.faults {
            let after = match f.kind {
                FaultKind::NeverJoined => 34_000,
                k if k.is_slow() => 13_500,
                _ if blind => 14_500,
                _ => 8_500,
            };
            self.until_ms = self.until_ms.max(f.at_ms + after);
        }
        if self.faults.iter().any(|f| f.kind == FaultKind::NeverJoined) {
            self.subgroups = self.subgroups.max(1);
        }
    }

    fn can_have(&self, kind: FaultKind) -> bool {
        use Family::{Context, Experts, Inference, Pipeline, Rooted};
        let transfers = matches!(self.family, Pipeline | Context | Rooted)
            || self.family == Experts && !self.variant && self.inner <= 8;
        let nodes = self.ranks / self.a_node;
        match kind {
            FaultKind::NodeLost | FaultKind::NicSlow => nodes >= 2,
            FaultKind::NodeSlow => nodes >= 3 && self.a_node >= 2,
            FaultKind::TransferSkipped => transfers,
            FaultKind::ReplaySkipped => self.family == Inference,
            FaultKind::OtherRoot => self.family == Rooted || self.family == Family::Reinforcement,
            FaultKind::CallsSwapped => self.family != Family::Ddp && self.ranks > 2,
            FaultKind::PairSlow => transfers && self.ranks >= 4,
            _ => true,
        }
    }

    pub(crate) fn nodes(&self) -> u32 {
        (self.ranks / self.a_node).max(1)
    }

    pub(crate) fn unit(&self) -> u64 {
        self.unit_us * 1_000
    }

    /// The kinds of its faults, for people.
    pub(crate) fn label(&self) -> String {
        match self.faults.as_slice() {
            [] => "none".to_owned(),
            [one] => one.kind.as_str().to_owned(),
            _ => "two-at-once".to_owned(),
        }
    }
}

/// Ranks that a node has at most, each with a GPU of its own.
const A_NODE_MAX: u32 = 64;

/// Ranks, ranks a node, and the sizes of groups.
fn sizes(r: &mut Random, family: Family) -> (u32, u32, u32, u32) {
    let (ranks, a_node, inner, outer) = wished_sizes(r, family);
    let fits = |n: &u32| ranks.is_multiple_of(*n);
    let a_node = if a_node > A_NODE_MAX { (1..=A_NODE_MAX).rev().find(fits).unwrap_or(1) } else { a_node };
    (ranks, a_node, inner, outer)
}

/// The same, however many ranks a node gets. Large jobs are rare, since they take long.
fn wished_sizes(r: &mut Random, family: Family) -> (u32, u32, u32, u32) {
    let large = r.unit();
    let scale = match large {
        x if x < 0.001 => 16,
        x if x < 0.008 => 4,
        x if x < 0.05 => 2,
        _ => 1,
    };
    match family {
        Family::Pipeline => {
            let (tp, pp, dp) =
                (r.pick(&[1, 1, 2, 2]), r.pick(&[2, 4, 4]) * scale.min(2), r.pick(&[1, 2]) * scale);
            let ranks = tp * pp * dp;
            (ranks, r.pick(&[tp, ranks / pp, (ranks / 2).max(tp)]).max(1), tp, pp)
        }
        Family::Sharded | Family::Experts | Family::Context => {
            let (inner, groups) = (r.pick(&[2, 2, 4, 4, 8]), r.pick(&[1, 2, 2]) * scale);
            (inner * groups, r.pick(&[inner, inner, 2]), inner, groups)
        }
        Family::Inference | Family::Reinforcement => {
            let (tp, groups) = (r.pick(&[2, 4, 8]), r.pick(&[1, 1, 2]) * scale);
            (tp * groups, tp, tp, groups)
        }
        Family::Ddp | Family::Rooted => {
            let ranks = r.pick(&[2, 3, 4, 4, 6, 8, 8, 16]) * scale;
            let a_node = if ranks.is_multiple_of(4) { r.pick(&[4, 2, ranks]) } else { r.pick(&[1, ranks]) };
            (ranks, a_node, ranks, 1)
        }
    }
}
