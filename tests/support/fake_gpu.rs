//! CUDA and NCCL over the host's memory, for tests of `ringwatch bench` without a GPU.

use super::{Room, Said, finish, skipped};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU16, Ordering};

/// Directory of a fake libcuda.so.1 and a fake libnccl.so.2, built once. `None` without a
/// C compiler, and the test counts as skipped.
pub(crate) fn fake(test: &str) -> Option<&'static Path> {
    static BUILT: OnceLock<Option<PathBuf>> = OnceLock::new();
    let built = BUILT.get_or_init(|| {
        Command::new("cc").arg("--version").output().ok()?;
        let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("fake-gpu");
        std::fs::create_dir_all(&dir).expect("the fake libraries are built");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/fake_gpu.c");
        for (which, name) in [("-DFAKE_CUDA", "libcuda.so.1"), ("-DFAKE_NCCL", "libnccl.so.2")] {
            let mut cc = Command::new("cc");
            cc.args(["-shared", "-fPIC", "-O2", "-Wall", "-Werror", which, "-o"]).arg(dir.join(name));
            cc.arg(&source).arg(format!("-Wl,-soname,{name}"));
            if which == "-DFAKE_NCCL" {
                cc.arg("-L").arg(&dir).args(["-l:libcuda.so.1", "-ldl"]);
            }
            let said = cc.output().expect("the fake libraries are built");
            assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
        }
        Some(dir)
    });
    if built.is_none() {
        skipped(test, "a C compiler (cc)");
    }
    built.as_deref()
}

/// `bench` with these options over the fake libraries.
pub(crate) fn bench(room: &Room, fake: &Path, arguments: &str) -> Command {
    over_fake(room, fake, "bench", arguments)
}

/// A verb with these options over the fake libraries.
pub(crate) fn over_fake(room: &Room, fake: &Path, verb: &str, arguments: &str) -> Command {
    let mut command = room.ringwatch([verb]);
    command.args(arguments.split_whitespace());
    command.arg("--cuda").arg(fake.join("libcuda.so.1")).arg("--nccl").arg(fake.join("libnccl.so.2"));
    command.env("LD_LIBRARY_PATH", fake);
    for name in ["LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES"] {
        command.env_remove(name);
    }
    command
}

/// One process a rank, as torchrun starts them.
pub(crate) fn processes(
    room: &Room,
    fake: &Path,
    arguments: &str,
    world: u32,
    more: &[(&str, &str)],
) -> Vec<Said> {
    processes_of(&|| bench(room, fake, arguments), room, world, more)
}

/// The same of any command.
pub(crate) fn processes_of(
    command: &dyn Fn() -> Command,
    room: &Room,
    world: u32,
    more: &[(&str, &str)],
) -> Vec<Said> {
    let port = free_port();
    let start = |rank: u32| -> Child {
        let mut command = command();
        command
            .envs(
                [("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", world)]
                    .map(|(k, v)| (k, v.to_string())),
            )
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", port.to_string())
            .env("TORCHELASTIC_RUN_ID", room.path(""))
            .env("FAKE_ARENA", room.path("arena"))
            .env("FAKE_GPUS", "8")
            .envs(more.iter().copied())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command.spawn().expect("the command starts")
    };
    let children: Vec<Child> = (0..world).map(start).collect();
    let said = children.into_iter().map(finish).map(|o| Said {
        code: o.status.code(),
        out: String::from_utf8(o.stdout).expect("text"),
        err: String::from_utf8(o.stderr).expect("text"),
    });
    said.collect()
}

/// A port behind which 32 belong to one test alone, below those that the system gives away.
fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let process = u16::try_from(std::process::id() % 8).unwrap_or(0);
    31_200 + process * 165 + NEXT.fetch_add(1, Ordering::Relaxed) * 33
}
