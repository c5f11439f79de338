//! The library as it is shipped, before jobs of a fake NCCL: one without a profiler, and ones with several ABIs.
//!
//! The C parts are compiled here; without `cc` the tests count as skipped.

#![allow(unsafe_code, reason = "the plugin's tests, whose support this is, need it")]
#![allow(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "the plugin's bans are not its tests'"
)]
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

#[path = "cases/nodes.rs"]
mod nodes;
#[path = "../../tests/support/mod.rs"]
mod support;

use ringwatch_wire::codes::{Flaw, Loss, flag, kind, made, timed};
use ringwatch_wire::layout::Region;
use ringwatch_wire::reader::{CommSlot, OpSlot};
use ringwatch_wire::tuning::{ANY_PIPE_OPS, Registered, Row, entry};
use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};
use support::segment::{Recording, in_dir, only};
use support::{elf, library};

/// NCCLs: without a profiler, and of the ABIs that differ for us.
const ABIS: [u32; 5] = [0, 1, 4, 5, 7];
const BROADCAST: u8 = 1;
const REDUCE: u8 = 2;
const ALL_GATHER: u8 = 3;
const ALL_REDUCE: u8 = 5;
const SEND: u8 = 7;
const RECV: u8 = 8;
const ALL_TO_ALL: u8 = 9;
const SCATTER: u8 = 10;
const GATHER: u8 = 11;
const PUT_SIGNAL: u8 = 13;
const SIGNAL: u8 = 14;
const WAIT_SIGNAL: u8 = 15;
const DEV_COMM_CREATE: u8 = 16;

fn preload() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| library::build(env!("CARGO_MANIFEST_DIR"), "libringwatch_preload.so"))
}

// --- what it is made of

#[test]
fn it_is_small() {
    elf::is_small(preload());
}

#[test]
fn no_panicking_code_is_linked_in() {
    elf::has_no_panicking_code(preload());
}

#[test]
fn it_imports_little_and_nothing_new() {
    // The keys are weak: asked for, and done without.
    let keys = ["pthread_key_create", "pthread_getspecific", "pthread_setspecific"];
    elf::imports_little_and_nothing_new(preload(), &[&keys[..], &["setenv"]].concat());
}

#[test]
fn it_needs_libc_alone_stays_mapped_and_exports_nccls_names() {
    elf::needs_libc_alone_and_stays_mapped(preload(), "libringwatch-preload.so");
    let exports = elf::exports(preload());
    assert!(exports.is_superset(&elf::tables()), "{exports:?}");
    let calls: BTreeSet<&str> =
        exports.iter().map(String::as_str).filter(|n| !elf::tables().contains(*n)).collect();
    assert!(calls.iter().all(|n| n.starts_with("nccl")), "{calls:?}");
    assert_eq!(calls.len(), 37, "{calls:?}");
}

// --- jobs

/// The fake NCCL and the jobs, compiled; `None` without a compiler.
fn built() -> Option<&'static Path> {
    static BUILT: OnceLock<Option<tempfile::TempDir>> = OnceLock::new();
    let dir = BUILT.get_or_init(|| {
        let dir = tempfile::tempdir().unwrap();
        let cc = |args: &[&str]| {
            let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
            let mut c = Command::new("cc");
            c.current_dir(dir.path()).args(["-w", "-O1"]);
            for a in args {
                if a.ends_with(".c") {
                    c.arg(source.join(a))
                } else {
                    c.arg(a)
                };
            }
            let Ok(out) = c.output() else { return false };
            assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
            true
        };
        let nccl = ["-shared", "-fPIC", "-Wl,-soname,libnccl.so.2", "-o"];
        for variant in ["old", "cuda", "cuda11"] {
            std::fs::create_dir(dir.path().join(variant)).unwrap();
        }
        (cc(&[&nccl[..], &["libnccl.so.2", "fake_nccl.c", "-lpthread", "-ldl"]].concat())
            && cc(&[&nccl[..], &["old/libnccl.so.2", "-DOLD", "fake_nccl.c", "-lpthread", "-ldl"]].concat())
            && cc(&[
                "-shared",
                "-fPIC",
                "-Wl,-soname,libcuda.so.1",
                "-o",
                "cuda/libcuda.so.1",
                "fake_cuda.c",
            ])
            && cc(&[
                "-shared",
                "-fPIC",
                "-DOLD",
                "-Wl,-soname,libcuda.so.1",
                "-o",
                "cuda11/libcuda.so.1",
                "fake_cuda.c",
            ])
            && cc(&[
                &nccl[..],
                &["cuda/libnccl.so.2", "fake_nccl.c", "-lpthread", "-ldl", "-Wl,--no-as-needed"],
                &["-Lcuda", "-l:libcuda.so.1"],
            ]
            .concat())
            && cc(&["-shared", "-fPIC", "-o", "libjob.so", "job.c", "-L.", "-l:libnccl.so.2"])
            && cc(&[
                "-Wl,-z,now",
                "-DLINKED",
                "-o",
                "linked",
                "main.c",
                "job.c",
                "-L.",
                "-l:libnccl.so.2",
                "-lpthread",
            ])
            && cc(&["-o", "local", "main.c", "-ldl"]))
        .then_some(dir)
    });
    dir.as_ref().map(tempfile::TempDir::path)
}

struct Job {
    folder: tempfile::TempDir,
    command: Command,
}

struct Done {
    status: ExitStatus,
    out: String,
    folder: tempfile::TempDir,
}

/// A job before which the library is loaded. `how`: `linked` or `local`.
#[track_caller]
fn job(how: &str, abi: u32, what: &str) -> Option<Job> {
    let Some(dir) = built() else {
        support::skip::skipped(what, "a C compiler (cc)");
        return None;
    };
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new(dir.join(how));
    command
        .arg(what)
        .env("LD_LIBRARY_PATH", dir)
        .env("LD_PRELOAD", preload())
        .env("FAKE_ABI", abi.to_string())
        .env("RINGWATCH_DIR", folder.path().join("segments"))
        .env_remove("NCCL_PROFILER_PLUGIN")
        .env_remove("RINGWATCH_SEGMENT_BYTES");
    Some(Job { folder, command })
}

impl Job {
    /// With another build of the fake NCCL: `old`, without its newest functions, or `cuda`, with a fake driver.
    fn variant(self, name: &str) -> Self {
        self.variants(&[name])
    }

    /// With the libraries of several such builds, the first ones first.
    fn variants(mut self, names: &[&str]) -> Self {
        let dir = built().unwrap();
        let path: Vec<_> = names.iter().chain(&["."]).map(|n| dir.join(n).display().to_string()).collect();
        self.command.env("LD_LIBRARY_PATH", path.join(":"));
        self
    }

    fn env(mut self, name: &str, value: &str) -> Self {
        self.command.env(name, value);
        self
    }

    fn run(mut self) -> Done {
        let out = self.command.output().unwrap();
        let text =
            format!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
        Done { status: out.status, out: text, folder: self.folder }
    }

    /// Runs it until its segment is as wanted, and ends it.
    #[track_caller]
    fn until(mut self, wanted: impl Fn(&Recording) -> bool) -> Recording {
        let mut child = Ends(self.command.stdout(Stdio::null()).spawn().unwrap());
        let begun = Instant::now();
        loop {
            assert!(child.0.try_wait().unwrap().is_none(), "it ended by itself");
            if let [one] = &in_dir(&self.folder.path().join("segments"))[..] {
                let recording = Recording::read(one);
                if recording.is_open() && wanted(&recording) {
                    return recording;
                }
            }
            assert!(begun.elapsed() < Duration::from_secs(20), "nothing of the kind was recorded");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

struct Ends(Child);

impl Drop for Ends {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

impl Done {
    #[track_caller]
    fn good(self) -> Self {
        assert!(self.status.success(), "{}: {}", self.status, self.out);
        self
    }

    #[track_caller]
    fn recording(&self) -> Recording {
        let recording = only(&self.folder.path().join("segments"));
        recording.balanced();
        recording
    }
}

fn comms(r: &Recording) -> Vec<CommSlot> {
    let mut all: Vec<_> = r.reader().comms().collect();
    all.sort_by_key(|c| c.ticket);
    all
}

/// Function, count, reduction operation, order; of the operations that were issued, by order.
fn issued(ops: &[OpSlot]) -> Vec<(u8, u64, Option<u8>)> {
    let mut all: Vec<_> =
        ops.iter().filter(|o| o.issued_ns.is_some() && o.kind == kind::COLLECTIVE).collect();
    all.sort_by_key(|o| o.order);
    let orders: Vec<_> = all.iter().map(|o| o.order.unwrap()).collect();
    assert_eq!(orders, (0..all.len() as u64).collect::<Vec<_>>());
    all.iter().map(|o| (o.func, o.count, o.redop)).collect()
}

#[test]
fn every_call_is_one_operation_whoever_else_tells_of_it() {
    for how in ["linked", "local"] {
        for abi in ABIS {
            let Some(job) = job(how, abi, "every") else { return };
            let done = job.run().good();
            eprintln!("{how}, ABI v{abi}");
            let r = done.recording();
            assert_eq!(r.losses(), []);
            let [c] = &comms(&r)[..] else { panic!("{:?}", comms(&r)) };
            let id = u64::from_str_radix(done.out.trim(), 16).unwrap();
            assert_eq!((c.id, c.ranks), (Some((id, 0)), Some(2)), "NCCL's own id");
            assert_eq!(c.made, Some(made::READY));
            assert!(c.ready_ns.unwrap() >= c.init_ns && c.finalized_ns.is_some());
            assert_eq!(r.reader().abi(), Some(abi).filter(|v| *v > 0));
            let ops = r.ops();
            // Of these one fails, one does nothing and one is only simulated.
            assert_eq!(ops.len(), 18, "{ops:#?}");
            assert!(ops.iter().all(|o| o.preloaded && o.called_ns.is_some() && o.returned.is_some()));
            assert!(ops.iter().all(|o| o.stream == 0x5150));
            let grouped: BTreeSet<u64> = ops.iter().filter(|o| o.grouped).map(|o| o.count).collect();
            assert_eq!(grouped, BTreeSet::from([64, 10, 11, 12, 9999]));
            assert_eq!(
                issued(&ops),
                [
                    (ALL_REDUCE, 1024, Some(1)),
                    (ALL_REDUCE, 1024, Some(4)),
                    (ALL_REDUCE, 1024, Some(6)),
                    (BROADCAST, 100, None),
                    (BROADCAST, 200, None),
                    (REDUCE, 300, Some(3)),
                    (ALL_GATHER, 400, None),
                    (4, 500, Some(5)),
                    (ALL_REDUCE, 64, Some(1)),
                    (ALL_REDUCE, 64, Some(2)),
                    (ALL_REDUCE, 64, Some(3)),
                    (ALL_REDUCE, 2048, Some(1)),
                ]
            );
            assert_eq!(c.issued, 12);
            let failed: Vec<_> = ops.iter().filter(|o| o.returned.unwrap().0 != 0).collect();
            assert_eq!((failed.len(), failed[0].count, failed[0].returned.unwrap().0), (1, 666, 4));
            let none: Vec<u64> = ops.iter().filter(|o| o.issued_ns.is_none()).map(|o| o.count).collect();
            assert_eq!(none, [666, 0, 9999], "failed, empty, simulated");
            let pairs: BTreeMap<u64, (u8, i32, Option<u64>)> = ops
                .iter()
                .filter(|o| o.kind == kind::SEND || o.kind == kind::RECV)
                .map(|o| (o.count, (o.func, o.root, o.order)))
                .collect();
            // NCCL itself issues the second send first; each call keeps its own count all the same.
            let [first, second] = if abi == 0 { [0, 1] } else { [1, 0] };
            assert_eq!(pairs[&10], (SEND, 1, Some(first)));
            assert_eq!(pairs[&11], (SEND, 1, Some(second)));
            assert_eq!(pairs[&12], (RECV, 1, Some(0)));
            let grouped: BTreeSet<u64> =
                ops.iter().filter(|o| [64, 10, 11, 12].contains(&o.count)).map(|o| o.plan).collect();
            if abi == 0 {
                assert_eq!(grouped.len(), 1, "launched together");
                assert!(!grouped.contains(&0));
            }
            // Types are the user's own, even of those that NCCL issues as bytes.
            let types: Vec<u8> =
                ops.iter().filter(|o| [100, 200, 400].contains(&o.count)).map(|o| o.dtype).collect();
            assert_eq!(types, [8, 9, 2]);
            assert_ne!(ops[1].flags & flag::IN_PLACE, 0);
        }
    }
}

/// Growing a file beyond the limit raises SIGXFSZ, which ends a job.
#[test]
fn a_file_size_limit_ends_no_job() {
    for abi in [0, 5] {
        for limit in [0, 64 << 10, 1 << 20] {
            let Some(mut job) = job("linked", abi, "every") else { return };
            let limits = libc::rlimit { rlim_cur: limit, rlim_max: limit };
            // SAFETY: setrlimit may be called between fork and exec.
            unsafe {
                job.command.pre_exec(move || match libc::setrlimit(libc::RLIMIT_FSIZE, &limits) {
                    0 => Ok(()),
                    _ => Err(std::io::Error::last_os_error()),
                })
            };
            let done = job.run().good();
            let segments = done.folder.path().join("segments");
            if limit == 0 {
                assert_eq!(std::fs::read_dir(segments).unwrap().count(), 0);
                continue;
            }
            assert_eq!(done.recording().ops().len(), 18);
            let bytes = std::fs::metadata(&in_dir(&segments)[0]).unwrap().len();
            assert!(bytes <= limit, "{bytes} bytes, at most {limit}");
        }
    }
}

#[test]
fn an_all_to_all_is_a_call_and_its_parts() {
    for abi in [0, 5] {
        let Some(job) = job("linked", abi, "alltoall") else { return };
        let r = job.run().good().recording();
        let ops = r.ops();
        let call = ops.iter().find(|o| o.func == ALL_TO_ALL).unwrap();
        assert_eq!((call.count, call.kind, call.returned.unwrap().0), (32, kind::COLLECTIVE, 0));
        if abi == 0 {
            assert_eq!(issued(&ops).len(), 2);
        } else {
            assert_eq!(ops.len(), 6, "two sends, two receives");
            assert_eq!(call.order, None, "its parts are what NCCL issues");
            assert_eq!(issued(&ops), [(ALL_REDUCE, 1, Some(1))]);
        }
    }
}

/// NCCL 2.31 and later: `ncclAllReduceConfig` and its like.
#[test]
fn a_call_with_a_configuration_is_recorded_as_the_call_without_it() {
    for abi in [0, 7] {
        let Some(job) = job("linked", abi, "config") else { return };
        let ops = job.run().good().recording().ops();
        let calls: Vec<_> = ops.iter().filter(|o| o.preloaded).collect();
        let root = |o: &OpSlot| [BROADCAST, REDUCE, GATHER, SCATTER].contains(&o.func).then_some(o.root);
        let told: Vec<_> =
            calls.iter().map(|o| (o.func, o.count, root(o), o.redop, o.returned.unwrap().0)).collect();
        let wanted = [
            (ALL_REDUCE, 10, None, Some(4), 0),
            (BROADCAST, 20, Some(1), None, 0),
            (REDUCE, 30, Some(1), Some(3), 0),
            (ALL_GATHER, 40, None, None, 0),
            (4, 50, None, Some(5), 0),
            (ALL_TO_ALL, 60, None, None, 0),
            (GATHER, 70, Some(1), None, 0),
            (SCATTER, 80, Some(0), None, 0),
            (ALL_REDUCE, 90, None, Some(1), 4),
        ];
        assert_eq!(told, wanted, "ABI v{abi}");
        assert_ne!(calls[1].flags & flag::IN_PLACE, 0);
    }
}

/// NCCL 2.29 and later: one-sided operations, and a device communicator.
#[test]
fn a_call_without_an_order_is_recorded_and_counts_in_no_order() {
    for abi in ABIS {
        let Some(job) = job("linked", abi, "unordered") else { return };
        let r = job.run().good().recording();
        assert_eq!(r.losses(), [], "ABI v{abi}");
        let ops = r.ops();
        let calls: Vec<_> = ops.iter().filter(|o| o.kind == kind::CALL).collect();
        let told: Vec<_> = calls
            .iter()
            .map(|o| (o.func, o.root, o.count, o.dtype, o.grouped, o.returned.unwrap().0))
            .collect();
        let wanted = [
            (DEV_COMM_CREATE, -1, 0, 0, false, 0),
            (PUT_SIGNAL, 1, 100, 8, false, 0),
            (PUT_SIGNAL, 1, 101, 8, false, 4),
            (SIGNAL, 1, 0, 0, true, 0),
            (WAIT_SIGNAL, 1, 0, 0, true, 0),
            (WAIT_SIGNAL, -1, 0, 0, false, 0),
        ];
        assert_eq!(told, wanted, "ABI v{abi}");
        assert!(calls.iter().all(|o| o.preloaded && o.order.is_none() && o.issued_ns.is_none()));
        assert_eq!(issued(&ops), [(ALL_REDUCE, 1, Some(1)), (ALL_REDUCE, 2, Some(1))], "ABI v{abi}");
    }
}

#[test]
fn a_directory_that_somebody_else_made_first_costs_no_job_its_segment() {
    let test = "a_directory_that_somebody_else_made_first_costs_no_job_its_segment";
    let Some(job) = job("linked", 5, "alltoall") else { return };
    let may = Command::new("unshare").args(["-m", "mount", "-t", "tmpfs", "none", "/mnt"]).output();
    if !may.is_ok_and(|o| o.status.success()) {
        return support::skip::skipped(test, "unshare, and the right to make a mount namespace (root)");
    }
    let script = "set -e; mount -t tmpfs -o mode=1777,size=1g none /dev/shm; mkdir /dev/shm/ringwatch-0
         chown 12345 /dev/shm/ringwatch-0; LD_PRELOAD=$LIBRARY \"$@\"
         echo segments: /dev/shm/ringwatch-0-????????????????/*.seg";
    let mut command = Command::new("unshare");
    command
        .args(["-m", "sh", "-c", script, "sh"])
        .arg(job.command.get_program())
        .args(job.command.get_args());
    for (name, value) in job.command.get_envs().filter(|(n, _)| *n != "LD_PRELOAD" && *n != "RINGWATCH_DIR") {
        command.envs(value.map(|v| (name, v)));
    }
    command.env("LIBRARY", preload()).env_remove("RINGWATCH_DIR");
    let out = Job { folder: job.folder, command }.run().good().out;
    let segments = out.lines().find_map(|l| l.strip_prefix("segments: ")).unwrap();
    assert!(segments.split(' ').count() == 1 && !segments.contains('*'), "{segments}");
}

#[test]
fn a_function_that_this_nccl_has_not_is_an_invalid_usage() {
    let Some(job) = job("linked", 0, "missing") else { return };
    assert_eq!(job.variant("old").run().good().recording().ops().len(), 0);
}

/// Without any NCCL the functions are there, since the program is linked with them, and fail.
#[test]
fn without_nccl_a_call_fails_and_nothing_more() {
    // SAFETY: the library's own initialiser runs in this process, as the dynamic linker would have it.
    let handle = unsafe {
        let path = std::ffi::CString::new(preload().to_str().unwrap()).unwrap();
        libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL)
    };
    assert!(!handle.is_null());
    // SAFETY: a handle of dlopen's.
    let at = unsafe { libc::dlsym(handle, c"ncclGroupStart".as_ptr()) };
    // SAFETY: the function of this name takes nothing.
    let start = unsafe { std::mem::transmute::<*mut libc::c_void, unsafe extern "C" fn() -> i32>(at) };
    // SAFETY: as above.
    assert_eq!(unsafe { start() }, 2);
}

// --- times

#[test]
fn calls_that_nobody_else_times_are_timed_by_cuda_events() {
    for abi in [0, 1, 4] {
        let Some(job) = job("linked", abi, "timed") else { return };
        let r = job.variant("cuda").run().good().recording();
        assert_eq!(r.losses(), []);
        let all: Vec<CommSlot> = comms(&r).into_iter().filter(|c| c.id.is_some()).collect();
        assert_eq!(all.len(), 2);
        let ops: Vec<OpSlot> = r.ops().into_iter().filter(|o| o.issued_ns.is_some()).collect();
        assert_eq!(ops.len(), 80);
        if abi == 1 {
            // Ranks of one process that NCCL does not tell apart: left to the profiler, which knows no stream.
            assert!(ops.iter().all(|o| o.event_ns.is_none()));
            continue;
        }
        let gpu = |c: &CommSlot| String::from_utf8(c.gpu.bytes().collect()).unwrap();
        if abi == 0 {
            assert_eq!([gpu(&all[0]), gpu(&all[1])].iter().collect::<BTreeSet<_>>().len(), 2);
        }
        for count in [100, 300] {
            let timed: Vec<&OpSlot> =
                ops.iter().filter(|o| o.count == count && o.event_ns.is_some()).collect();
            // The last ones' events are read by a next call that never came, or at the end.
            assert!(timed.len() >= 15, "ABI v{abi}: {} of {count}", timed.len());
            assert!(timed.iter().all(|o| o.timed == timed::EVENTS && o.event_ns.unwrap() < 5_000_000));
        }
        // The time of what was launched together is none of theirs.
        for o in ops.iter().filter(|o| o.count == 200 || o.count == 400) {
            assert_eq!((o.timed, o.event_ns), (timed::NOT_ALONE, None), "ABI v{abi}: {}", o.count);
        }
    }
}

/// How many events there are before and after the context is reset; absent without a compiler.
fn events_made(variants: &[&str]) -> Option<Vec<usize>> {
    let out = job("linked", 0, "again")?.variants(variants).run().good().out;
    Some(out.split_whitespace().map(|n| n.parse().unwrap()).collect())
}

#[test]
fn events_do_not_outlive_their_context() {
    // The fake driver aborts where an event of the context that was reset is used.
    let Some(numbered) = events_made(&["cuda"]) else { return };
    // A pool of 64 pairs for each slot of the table of communicators, made again after the reset.
    assert_eq!(numbered, [256 * 128, 512 * 128]);
    // Without a number of the context none is used twice.
    assert_eq!(events_made(&["cuda11", "cuda"]), Some(vec![300 * 128, 600 * 128]));
}

#[test]
fn a_captured_call_runs_nothing_and_is_not_timed() {
    for abi in [0, 4] {
        let Some(job) = job("linked", abi, "captured") else { return };
        let r = job.variant("cuda").run().good().recording();
        let ops: Vec<OpSlot> = r.ops().into_iter().filter(|o| o.preloaded).collect();
        let captured: Vec<u64> =
            ops.iter().filter(|o| o.flags & flag::CAPTURED != 0).map(|o| o.count).collect();
        assert_eq!(captured, [2, 3]);
        assert!(ops.iter().all(|o| o.issued_ns.is_some() != captured.contains(&o.count)));
    }
}

// --- communicators

#[test]
fn an_init_that_hangs_is_seen() {
    for abi in ABIS {
        let Some(job) = job("local", abi, "hang-init") else { return };
        let r = job.env("FAKE_HANG", "1").until(|r| r.reader().comms().count() == 1);
        let c = &comms(&r)[0];
        assert_eq!((c.made, c.ranks, c.ready_ns), (Some(made::INITIALISING), Some(8), None));
        assert_eq!(c.id.unwrap().1, 5);
    }
}

#[test]
fn a_call_that_hangs_is_seen() {
    for abi in ABIS {
        let Some(job) = job("linked", abi, "hang-call") else { return };
        let r = job.until(|r| r.ops().len() == 2);
        let [done, hangs] = &r.ops()[..] else { panic!() };
        assert!(done.issued_ns.is_some() && done.returned.is_some());
        assert_eq!((hangs.count, hangs.redop), (777, Some(3)));
        assert!(hangs.called_ns.is_some() && hangs.issued_ns.is_none() && hangs.returned.is_none());
    }
}

#[test]
fn failed_and_aborted_communicators_say_so() {
    for abi in ABIS {
        let Some(failed) = job("linked", abi, "fail-init") else { return };
        let r = failed.run().good().recording();
        let c = &comms(&r)[0];
        assert_eq!((c.made, c.failed), (Some(made::FAILED), Some(4)));
        assert!(c.finalized_ns.is_some());
        let r = job("linked", abi, "abort").unwrap().run().good().recording();
        let c = &comms(&r)[0];
        assert_eq!((c.made, c.failed), (Some(made::ABORTED), None));
        assert!(c.finalized_ns.is_some());
    }
}

/// NCCL before 2.28 does not tell a tuner which communicator it is.
#[test]
fn the_tuner_learns_the_communicator_from_the_call() {
    let folder = tempfile::Builder::new().tempdir_in("/dev/shm").unwrap();
    let row = Row {
        min_bytes: 0,
        max_bytes: 4096,
        min_ranks: 3,
        max_ranks: 3,
        min_nodes: 1,
        max_nodes: 1,
        prefer: entry(0, 0),
        forbid: 0,
        pipe_ops: ANY_PIPE_OPS,
        collective: 4,
        channels: 4,
        registered: Registered::Any,
    };
    let rules = support::tuner::write_rules(&folder.path().join("rules"), &[row]);
    for (abi, version) in [(1, 3), (4, 4), (5, 5), (7, 5)] {
        if built().is_none() {
            return support::skip::skipped(
                "the_tuner_learns_the_communicator_from_the_call",
                "a C compiler (cc)",
            );
        }
        let (rules, folder) = (&rules, &folder);
        let rank = |rank: u32| {
            let mut job = job("linked", abi, "redop")?
                .env("RANK", &rank.to_string())
                .env("FAKE_ID", &abi.to_string())
                .env("NCCL_TUNER_PLUGIN", "libringwatch-preload.so");
            job.command.env("RINGWATCH_TUNE", rules).env("RINGWATCH_DIR", folder.path().join("segments"));
            Some(job.run().good().out)
        };
        let outputs: Vec<_> = std::thread::scope(|s| {
            let ranks: Vec<_> = (0..3).map(|r| s.spawn(move || rank(r))).collect();
            ranks.into_iter().map(|r| r.join().unwrap().unwrap()).collect()
        });
        let wanted = format!("tuner v{version}: result 0, channels 4, cost 0\n");
        assert!(outputs.iter().all(|o| o.contains(&wanted)), "ABI {abi}: {outputs:?}");
    }
}

#[test]
fn all_ranks_in_one_process() {
    for abi in ABIS {
        let Some(job) = job("linked", abi, "all") else { return };
        let done = job.run().good();
        let r = done.recording();
        let told: Vec<u64> = done.out.lines().map(|l| u64::from_str_radix(l, 16).unwrap()).collect();
        let all: Vec<CommSlot> = comms(&r).into_iter().filter(|c| c.id.is_some()).collect();
        let ranks: BTreeSet<u32> = all.iter().map(|c| c.id.unwrap().1).collect();
        assert_eq!((all.len(), ranks.len()), (4, 4), "ABI v{abi}: {all:#?}");
        let ids: BTreeSet<u64> = all.iter().map(|c| c.id.unwrap().0).collect();
        assert_eq!(ids.len(), 1);
        assert!(abi == 0 || ids.contains(&told[0]));
        for c in &all {
            let mine: Vec<OpSlot> = r.ops().into_iter().filter(|o| u64::from(o.comm) == c.ticket).collect();
            let counts: Vec<u64> = issued(&mine).iter().map(|o| o.1).collect();
            // Before v4 nothing tells which of the four NCCL means: all is left to the profiler, which counts
            // broadcasts in bytes.
            let apart = abi == 1;
            assert_eq!(counts, if apart { [100, 800, 101, 804] } else { [100, 200, 101, 201] }, "ABI v{abi}");
            assert_eq!(mine.len(), 4, "ABI v{abi}");
            assert!(mine.iter().all(|o| o.preloaded != apart));
        }
        assert_eq!(r.losses(), []);
    }
}

#[test]
fn ranks_that_are_made_in_a_group() {
    for abi in ABIS {
        let Some(job) = job("linked", abi, "group-init") else { return };
        let r = job.run().good().recording();
        let all: Vec<CommSlot> = comms(&r).into_iter().filter(|c| c.finalized_ns.is_none()).collect();
        assert_eq!(all.len(), 4, "ABI v{abi}: {all:#?}");
        for o in r.ops() {
            let c = all.iter().find(|c| c.ticket == u64::from(o.comm)).unwrap();
            assert_eq!(o.count, u64::from(100 + c.id.unwrap().1), "ABI v{abi}: rank i reduces 100 + i");
        }
        assert_eq!(r.ops().len(), 4);
    }
}

#[test]
fn children_have_ids_of_their_own() {
    for abi in ABIS {
        let Some(job) = job("linked", abi, "split") else { return };
        let done = job.run().good();
        let r = done.recording();
        let told: Vec<u64> = done.out.lines().map(|l| u64::from_str_radix(l, 16).unwrap()).collect();
        let alive: Vec<CommSlot> = comms(&r).into_iter().filter(|c| c.finalized_ns.is_none()).collect();
        assert_eq!(alive.len(), 3, "ABI v{abi}: the rank without a color has none: {alive:#?}");
        let ids: BTreeSet<u64> = alive.iter().map(|c| c.id.unwrap().0).collect();
        assert_eq!(ids.len(), 3);
        if abi > 0 {
            assert_eq!(ids, told.into_iter().collect());
        }
        for c in &alive[1..] {
            assert_eq!((c.id.unwrap().1, c.ranks), (1, Some(4)), "ABI v{abi}");
            assert_eq!(c.made, Some(made::READY));
        }
        let counts: Vec<(u16, u64)> = r.ops().iter().map(|o| (o.comm, o.count)).collect();
        let tickets: Vec<u16> = alive.iter().map(|c| c.ticket as u16).collect();
        assert_eq!(counts, [(tickets[0], 1), (tickets[1], 10), (tickets[2], 20)], "ABI v{abi}");
    }
}

#[test]
fn a_communicator_is_ready_when_nccl_says_so() {
    for abi in ABIS {
        let Some(job) = job("local", abi, "nonblocking") else { return };
        let r = job.variant("cuda").run().good().recording();
        // Its calls return before anything is launched: events around them would say nothing.
        assert!(r.ops().iter().all(|o| o.timed != timed::EVENTS && o.event_ns.is_none()));
        let c = &comms(&r)[0];
        assert_eq!((c.made, c.ranks, c.id.unwrap().1), (Some(made::READY), Some(2), 1));
        assert!(c.ready_ns.unwrap() > c.init_ns + 20_000_000);
        assert_eq!(issued(&r.ops()), [(ALL_REDUCE, 5, Some(2))]);
    }
}

#[test]
fn threads_do_not_disturb_each_other() {
    for abi in ABIS {
        let Some(job) = job("linked", abi, "threads") else { return };
        let r = job.run().good().recording();
        assert_eq!(r.losses(), []);
        let all = comms(&r);
        assert_eq!(all.len(), 4);
        for c in &all {
            assert_eq!(c.issued, 900);
            let mine: Vec<OpSlot> = r.ops().into_iter().filter(|o| u64::from(o.comm) == c.ticket).collect();
            assert_eq!(mine.len(), 900, "ABI v{abi}");
            let want: Vec<(u8, u64)> =
                (1..=300).flat_map(|i| [(ALL_REDUCE, i), (REDUCE, i), (BROADCAST, i)]).collect();
            let got: Vec<(u8, u64)> = issued(&mine).iter().map(|o| (o.0, o.1)).collect();
            assert_eq!(got, want);
        }
    }
}

#[test]
fn a_forked_child_leaves_its_parents_segment_alone() {
    for abi in ABIS {
        let Some(first) = job("local", abi, "fork") else { return };
        let r = first.run().good().recording();
        assert_eq!(issued(&r.ops()).iter().map(|o| o.1).collect::<Vec<_>>(), [1, 4]);
        let done = job("local", abi, "fork").unwrap().env("OWN", "1").run().good();
        let mut counts: Vec<Vec<u64>> = in_dir(&done.folder.path().join("segments"))
            .iter()
            .map(|p| issued(&Recording::read(p).ops()).iter().map(|o| o.1).collect())
            .collect();
        counts.sort();
        assert_eq!(counts, [vec![1, 4], vec![3]], "ABI v{abi}");
    }
}

// --- the promises

#[test]
fn a_process_that_makes_no_communicator_gets_nothing() {
    let Some(with) = job("linked", 5, "nothing") else { return };
    let with = with.run().good();
    let mut without = job("linked", 5, "nothing").unwrap();
    without.command.env_remove("LD_PRELOAD");
    let without = without.run().good();
    assert!(!with.folder.path().join("segments").exists());
    let numbers = |d: &Done| d.out.lines().map(|l| l.trim().parse::<usize>().unwrap()).collect::<Vec<_>>();
    let (with, without) = (numbers(&with), numbers(&without));
    assert_eq!(with[0], 1, "one thread");
    // The library's own segments, and nothing beside them.
    assert!(with[1] <= without[1] + 6, "{with:?} mappings, {without:?} without it");
}

#[test]
fn calls_make_no_system_call() {
    for abi in ABIS {
        let Some(first) = job("linked", abi, "seccomp") else { return };
        let mut done = first.run();
        if done.status.signal() == Some(libc::SIGSYS) {
            eprintln!("NOTE this machine's clock may need a system call: tried with it allowed");
            done = job("linked", abi, "seccomp").unwrap().env("TEST_CLOCK", "1").run();
        }
        let r = done.good().recording();
        assert_eq!(r.ops().len(), 18);
    }
}

#[test]
fn calls_do_not_allocate() {
    for abi in ABIS {
        let Some(job) = job("linked", abi, "allocations") else { return };
        job.run().good();
    }
}

#[test]
fn nothing_is_said() {
    for abi in ABIS {
        let Some(job) = job("linked", abi, "threads") else { return };
        assert_eq!(job.run().good().out, "");
    }
}

#[test]
fn another_plugin_is_left_alone() {
    let Some(job) = job("linked", 5, "every") else { return };
    let r = job.env("NCCL_PROFILER_PLUGIN", "libanother.so").run().good().recording();
    // It holds the profiler's place, so that the calls are all there is.
    assert_eq!(r.reader().abi(), None);
    assert_eq!(issued(&r.ops()).len(), 12);
}

#[test]
fn the_stock_plugin_is_this_library_too() {
    for name in ["libnccl-profiler-ringwatch.so", "/some/where/libnccl-profiler-ringwatch.so", ""] {
        let Some(job) = job("linked", 5, "every") else { return };
        let r = job.env("NCCL_PROFILER_PLUGIN", name).run().good().recording();
        assert_eq!(r.reader().abi(), Some(5), "{name}");
    }
}

/// The governor is made at the first call, before the profiler's first init: it must expect the right one.
#[test]
fn nccl_is_asked_for_the_same_events_as_by_the_plugin_alone() {
    let stock = library::build(
        Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_str().unwrap(),
        "libringwatch_plugin.so",
    );
    for abi in 1..=7 {
        let Some(with) = job("linked", abi, "mask") else { return };
        let with = with.variant("cuda").run().good().out;
        let mut alone = job("linked", abi, "mask").unwrap().variant("cuda");
        alone.command.env_remove("LD_PRELOAD");
        // By its path: it is no name of a library that is loaded already.
        let alone = alone.env("NCCL_PROFILER_PLUGIN", stock.to_str().unwrap()).run().good().out;
        assert_eq!(with, alone, "ABI v{abi}");
        eprintln!("ABI v{abi}: {with}");
    }
}

#[test]
fn too_much_for_a_small_segment_is_counted() {
    for abi in ABIS {
        for bytes in ["15360", "200000"] {
            let Some(job) = job("linked", abi, "crowd") else { return };
            let r = job.variant("cuda").env("RINGWATCH_SEGMENT_BYTES", bytes).run().good().recording();
            for (loss, n) in r.losses() {
                let expected = [Loss::CommTable, Loss::NoComm, Loss::Stale, Loss::Foreign];
                assert!(!loss.is_damage() || expected.contains(&loss), "ABI v{abi}, {bytes}: {n} {loss:?}");
            }
            assert!(r.ops().iter().all(|o| o.preloaded), "ABI v{abi}, {bytes}");
        }
    }
}

#[test]
fn a_group_that_outlives_the_ring_shifts_no_order() {
    for bytes in ["200000", "4194304"] {
        let Some(job) = job("linked", 0, "lapped") else { return };
        let r = job.env("RINGWATCH_SEGMENT_BYTES", bytes).run().good().recording();
        let slots = r.reader().ring(Region::Op).slots();
        let ops: Vec<OpSlot> = r.ops().into_iter().filter(|o| o.count != 50_000).collect();
        assert!(ops.iter().all(|o| o.issued_ns.is_some()), "{bytes}: all that are left were issued");
        let [first, second] = [0, 1].map(|rank: usize| -> Vec<&OpSlot> {
            let ticket = comms(&r)[rank].ticket;
            ops.iter().filter(|o| u64::from(o.comm) == ticket).collect()
        });
        // The first communicator's calls are lost, and counted; the other one's have the order of their calls.
        let first: Vec<_> = first.iter().map(|o| (o.kind, o.count, o.order)).collect();
        assert_eq!(first, [(kind::COLLECTIVE, 2, Some(1)), (kind::SEND, 2, Some(1))]);
        assert!(second.iter().all(|o| o.order == Some(o.count - 1000)), "{bytes}");
        // Two calls after the group were simulated.
        assert_eq!(second.len() as u64, slots - 4);
        assert_eq!(comms(&r).iter().map(|c| c.issued).collect::<Vec<_>>(), [2, 9001]);
        // Of the group as many were left as the ring has slots.
        assert_eq!(r.reader().flaws(Flaw::Overwritten), 9002 - slots, "{bytes}");
    }
}

#[test]
fn a_full_disk_does_not_disturb_the_job() {
    for abi in ABIS {
        let Some(job) = job("linked", abi, "every") else { return };
        let done = job.env("RINGWATCH_DIR", "/proc/no/such").run();
        done.good();
    }
}
