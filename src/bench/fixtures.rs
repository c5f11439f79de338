//! Settings and reports for tests.

use super::{Collective, DType, Environment, RankInfo, RedOp, Report, Settings, SizeResult, Step, Timing};
use std::path::PathBuf;

/// One operation of each size from 8 to 64 bytes, on one GPU.
pub(crate) fn settings() -> Settings {
    Settings {
        collective: Collective::AllReduce,
        dtype: DType::Float,
        redop: RedOp::Sum,
        root: 0,
        min_bytes: 8,
        max_bytes: 64,
        step: Step::Factor(2),
        sizes: Vec::new(),
        iters: 1,
        warmup_iters: 0,
        millis: None,
        check: true,
        threads: 1,
        gpus: 1,
        graph: None,
        batch: 1,
        blocking: false,
        pin: false,
        events: false,
        repeat: 1,
        cost: None,
        timeout_s: 5,
        nccl: None,
        cuda: None,
    }
}

/// So many ranks of one host.
pub(crate) fn environment(ranks: u32) -> Environment {
    let rank = |rank| RankInfo {
        rank,
        host: "a".to_owned(),
        pid: 1,
        thread: rank,
        device: i32::try_from(rank).unwrap(),
        name: "GPU".to_owned(),
        pci: format!("0000:{rank:02x}:00.0"),
    };
    Environment {
        ringwatch_version: "1".to_owned(),
        nccl_version: 22_809,
        nccl_path: PathBuf::new(),
        cuda_driver_version: 12_080,
        processes: 1,
        ranks: (0..ranks).map(rank).collect(),
        variables: Default::default(),
    }
}

/// Repeats of one size, in us. The bandwidths are those of an all-reduce of two ranks.
pub(crate) fn timing(size_bytes: u64, repeats_us: &[f64]) -> Timing {
    let repeats_ns: Vec<f64> = repeats_us.iter().map(|us| us * 1e3).collect();
    let time_ns = super::median(&repeats_ns);
    let bw = size_bytes as f64 / time_ns;
    Timing {
        operations: 1,
        repeats_ns,
        time_ns,
        algbw_gb_per_s: bw,
        busbw_gb_per_s: bw,
        wrong: Some(0),
        events: None,
        phases: None,
    }
}

/// An operation on two ranks: sizes with their repeats in us, out of place.
pub(crate) fn report(collective: Collective, sizes: &[(u64, &[f64])]) -> Report {
    let size = |(bytes, repeats): &(u64, &[f64])| SizeResult {
        size_bytes: *bytes,
        count: bytes / 4,
        out_of_place: timing(*bytes, repeats),
        in_place: None,
    };
    let settings = Settings { collective, ..settings() };
    Report::new(settings, environment(2), sizes.iter().map(size).collect())
}
