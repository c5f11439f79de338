//! Real NCCL on real GPUs. `cargo test --test all gpu:: -- --ignored` where there are some.

use std::path::Path;
use std::process::Command;

#[test]
#[ignore = "needs 4 NVIDIA GPUs and PyTorch"]
fn the_live_jobs_get_their_verdicts() {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/gpu/live.py");
    let status = Command::new("python3")
        .arg(script)
        .arg(env!("CARGO_BIN_EXE_ringwatch"))
        .status()
        .expect("python3 runs the live test");
    assert!(status.success(), "see the lines that begin with FAILED");
}
