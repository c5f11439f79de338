//! A job with the preloaded library, from its calls to a finding. The job and its NCCL are those of
//! `plugin/preload/tests`, in C: without a compiler this says so and passes.

use crate::support::{Room, run, skipped};
use std::path::Path;
use std::process::Command;

/// Compiles the fake NCCL and the job; false without a compiler.
fn built(dir: &Path) -> bool {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("plugin/preload/tests");
    let cc = |args: &[&str]| {
        let mut c = Command::new("cc");
        c.current_dir(dir).args(["-w", "-O1"]);
        for a in args {
            if a.ends_with(".c") {
                c.arg(sources.join(a))
            } else {
                c.arg(a)
            };
        }
        let Ok(out) = c.output() else { return false };
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        true
    };
    cc(&[
        "-shared",
        "-fPIC",
        "-Wl,-soname,libnccl.so.2",
        "-o",
        "libnccl.so.2",
        "fake_nccl.c",
        "-lpthread",
        "-ldl",
    ]) && cc(&["-DLINKED", "-o", "job", "main.c", "job.c", "-L.", "-l:libnccl.so.2", "-lpthread"])
}

#[test]
fn another_reduction_on_one_rank_is_found() {
    let room = Room::new();
    let dir = room.path("job");
    std::fs::create_dir_all(&dir).unwrap();
    if !built(&dir) {
        skipped("another_reduction_on_one_rank_is_found", "a C compiler (cc)");
        return;
    }
    for abi in ["0", "4", "5"] {
        let script = "for r in 0 1 2; do RANK=$r \"$0\" redop & done; wait";
        let mut command = room.ringwatch(["run", "--preload", "--", "sh", "-c", script]);
        command
            .arg(dir.join("job"))
            .env("LD_LIBRARY_PATH", &dir)
            .env("FAKE_ABI", abi)
            .env("FAKE_ID", "7")
            .env("WORLD_SIZE", "3")
            .env("LOCAL_WORLD_SIZE", "3");
        let said = run(&mut command);
        assert_eq!(said.code, Some(0), "{}", said.err);
        assert!(said.err.contains("mismatch: rank 1 in AllReduce of 4096 bytes (order 3,"), "{}", said.err);
        assert!(
            said.err.contains("rank 1 issued AllReduce of 1024 ncclFloat32 elements, 4096 bytes, ncclMax")
        );
        assert!(said.err.contains("3 processes, 1 communicators"), "{}", said.err);
    }
}
