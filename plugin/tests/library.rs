//! The built library, as it is shipped: what it is made of, and what it promises the process it enters.

#![allow(unsafe_code, reason = "plays NCCL's part of a C interface, forks and filters system calls")]
#![allow(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "the plugin's bans are not its tests'"
)]
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

mod support;

use ringwatch_wire::codes::{Loss, call, kind};
use ringwatch_wire::layout::head;
use std::collections::BTreeSet;
use std::ffi::{CStr, c_char, c_int};
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use support::abi::{self, COLL_DEFAULT, Coll, Descriptor, func, ty};
use support::child::{Ran, dir, exit_at_once, run, run_under, run_with};
use support::elf;
use support::library::{Plugin, null_library, plugin_library};
use support::segment::{Recording, in_dir, only};

/// The events that v5's init asks for where there is no CUDA: launches are of use for CUDA events alone.
const MASK: i32 = 0x75f;

// --- what it is made of

#[test]
fn it_is_small() {
    elf::is_small(plugin_library());
}

#[test]
fn no_panicking_code_is_linked_in() {
    elf::has_no_panicking_code(plugin_library());
}

#[test]
fn it_imports_little_and_nothing_new() {
    elf::imports_little_and_nothing_new(plugin_library(), &[]);
}

#[test]
fn it_needs_libc_alone_stays_mapped_and_exports_its_tables() {
    elf::needs_libc_alone_and_stays_mapped(plugin_library(), "libnccl-profiler-ringwatch.so");
    assert_eq!(elf::exports(plugin_library()), elf::tables());
}

// --- no system call

fn filter(number: c_int, allowed: bool) -> [libc::sock_filter; 2] {
    let jump = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    let ret = (libc::BPF_RET | libc::BPF_K) as u16;
    let verdict = if allowed { libc::SECCOMP_RET_ALLOW } else { libc::SECCOMP_RET_KILL_PROCESS };
    [
        libc::sock_filter { code: jump, jt: 0, jf: 1, k: number as u32 },
        libc::sock_filter { code: ret, jt: 0, jf: 0, k: verdict },
    ]
}

/// From here on any other system call of this thread kills the process.
fn forbid_system_calls(also: &[i64]) {
    let mut code = vec![libc::sock_filter {
        code: (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16,
        jt: 0,
        jf: 0,
        k: 0,
    }];
    for number in [libc::SYS_exit, libc::SYS_exit_group, libc::SYS_rt_sigreturn].iter().chain(also) {
        code.extend(filter(*number as c_int, true));
    }
    code.push(libc::sock_filter {
        code: (libc::BPF_RET | libc::BPF_K) as u16,
        jt: 0,
        jf: 0,
        k: libc::SECCOMP_RET_KILL_PROCESS,
    });
    let program = libc::sock_fprog { len: code.len() as u16, filter: code.as_mut_ptr() };
    // SAFETY: documented prctl calls with a program that lives through them.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program), 0);
    }
}

#[test]
fn the_filter_kills() {
    let Some(ran) = run("the_filter_kills") else {
        forbid_system_calls(&[]);
        // SAFETY: no arguments.
        unsafe { libc::syscall(libc::SYS_getppid) };
        exit_at_once(0);
    };
    assert_eq!(ran.signal(), Some(libc::SIGSYS));
}

#[test]
fn the_clock_is_read_without_a_system_call_here() {
    let Some(ran) = run("the_clock_is_read_without_a_system_call_here") else {
        forbid_system_calls(&[]);
        let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: fills one timespec.
        unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut t) };
        exit_at_once(0);
    };
    if !ran.status.success() {
        eprintln!("NOTE this machine's clock needs a system call: the hot path is tested with it allowed");
    }
}

#[test]
fn the_hot_path_makes_no_system_call() {
    no_system_call("the_hot_path_makes_no_system_call", None);
}

#[test]
fn the_hot_path_makes_no_system_call_with_another_plugin_either() {
    let test = "the_hot_path_makes_no_system_call_with_another_plugin_either";
    no_system_call(test, Some(null_library));
}

fn no_system_call(test: &str, chain: Option<fn() -> &'static Path>) {
    // Reading the clock is allowed, and on machines without a usable vDSO that is a system call.
    let clock = "RINGWATCH_TEST_CLOCK";
    let run = |allowed: bool| {
        run_with(test, |c, _| {
            if allowed {
                c.env(clock, "1");
            }
            if let Some(other) = chain {
                c.env("RINGWATCH_CHAIN", other()).env("RINGWATCH_NULL_MASK", "0xffff");
            }
        })
    };
    let Some(ran) = run(false) else { hot_path(std::env::var_os(clock).is_some()) };
    let ran = if ran.signal() == Some(libc::SIGSYS) && !vdso() { run(true).unwrap() } else { ran };
    let ran = ran.succeeded();
    let recording = only(&ran.dir);
    assert!(recording.balanced() > 7 * 60);
    assert_eq!(recording.reader().seen(call::FINALIZE), 21);
}

fn vdso() -> bool {
    let source = std::fs::read_to_string("/sys/devices/system/clocksource/clocksource0/current_clocksource");
    source.is_ok_and(|s| {
        ["tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page"].contains(&s.trim())
    })
}

fn hot_path(clock: bool) -> ! {
    let plugin = Plugin::built();
    let contexts = [1, 2, 3, 4, 5, 6, 7].map(|v| plugin.init(v, v as u64).context);
    forbid_system_calls(if clock { &[libc::SYS_clock_gettime] } else { &[] });
    for (i, context) in contexts.iter().enumerate() {
        support::every_callback(&plugin, i + 1, *context);
    }
    exit_at_once(0);
}

// --- handles, types, arguments

#[test]
fn bad_handles_types_and_arguments_are_counted_and_harmless() {
    let Some(ran) = run("bad_handles_types_and_arguments_are_counted_and_harmless") else {
        let p = Plugin::built();
        let ctx = p.init(5, 1).context;
        let coll = |parent| Coll { parent, ..COLL_DEFAULT }.at(5);
        // Foreign: another process's nonce in context, parent and handle.
        let alien = ctx ^ (1 << 60);
        assert_eq!(p.start(5, alien, &coll(0)), 0);
        p.stop(5, alien);
        p.record(5, alien, 22, None);
        p.finalize(5, alien);
        // NULL.
        assert_eq!(p.start(5, 0, &coll(0)), 0);
        p.stop(5, 0);
        p.record(5, 0, 8, None);
        p.finalize(5, 0);
        // Unknown types: none, several bits, a bit no version has, all of them.
        for kind in [0, 3, 0xfff, 1 << 16, 1 << 63, !0] {
            assert_eq!(p.start(5, ctx, &Descriptor::new(5, kind, 0, 0)), 0, "{kind:#x}");
        }
        // Types that are not recorded.
        for kind in [ty::PROXY_CTRL, ty::NET_PLUGIN, ty::CE_SYNC] {
            assert_eq!(p.start(5, ctx, &Descriptor::new(5, kind, 0, 0)), 0);
        }
        // A NULL descriptor and a NULL place.
        let mut out = 7usize as *mut std::ffi::c_void;
        let table = p.table(5);
        // SAFETY: NULL arguments are what is tested.
        unsafe {
            (table.start)(ctx as *mut _, &mut out, std::ptr::null());
            (table.start)(ctx as *mut _, std::ptr::null_mut(), coll(0).as_ptr().cast());
        }
        assert!(out.is_null(), "the place is written even then");
        // Repeated stops, unknown states, states without arguments, parents of the wrong kind.
        let op = p.start(5, ctx, &coll(0));
        assert_ne!(op, 0);
        p.stop(5, op);
        p.stop(5, op);
        p.record(5, op, 999, None);
        p.record(5, op, i32::MIN, Some((1, 1)));
        let kernel = p.start(5, ctx, &abi::kernel_ch(5, op, 0, 10));
        p.record(5, kernel, 22, None);
        assert_eq!(p.start(5, ctx, &abi::kernel_ch(5, kernel, 0, 10)), 0);
        assert_eq!(p.start(5, ctx, &abi::proxy_step(5, op, 0)), 0);
        p.stop(5, ctx);
        // Stale: the transfers' ring goes round.
        let transfer = || p.start(5, ctx, &abi::proxy_op(5, op, p.pid, 1, 4, 4096, true));
        let first = transfer();
        for _ in 0..5000 {
            assert_ne!(transfer(), 0);
        }
        p.stop(5, first);
        p.record(5, op, 22, None);
        p.finalize(5, ctx);
        p.finalize(5, ctx);
        return;
    };
    let recording = only(&ran.succeeded().dir);
    recording.balanced();
    let want = [
        (Loss::Foreign, 4),
        (Loss::Stale, 1),
        (Loss::Null, 4),
        (Loss::UnknownType, 6),
        (Loss::NotRecorded, 3),
        (Loss::UnknownState, 3),
        (Loss::Repeated, 1),
        (Loss::BadCall, 3),
        (Loss::BadParent, 3),
    ];
    assert_eq!(recording.losses(), want);
}

#[test]
fn v1_to_v4_read_one_byte_of_the_type() {
    let Some(ran) = run("v1_to_v4_read_one_byte_of_the_type") else {
        let p = Plugin::built();
        for v in 1..=4 {
            let ctx = p.init(v, 1).context;
            // Descriptors are made with garbage behind the one byte.
            assert_ne!(p.start(v, ctx, &COLL_DEFAULT.at(v)), 0, "v{v}");
        }
        return;
    };
    assert_eq!(only(&ran.succeeded().dir).ops().len(), 4);
}

// --- life of a process

#[test]
fn init_after_the_last_finalize_works() {
    let Some(ran) = run("init_after_the_last_finalize_works") else {
        let p = Plugin::built();
        let first = p.init(5, 1);
        p.finalize(5, first.context);
        let second = p.init(5, 2);
        assert_ne!(first.context, second.context);
        assert_eq!(second.mask, MASK);
        assert_ne!(p.start(5, second.context, &COLL_DEFAULT.at(5)), 0);
        return;
    };
    let recording = only(&ran.succeeded().dir);
    let mut comms: Vec<_> = recording.reader().comms().collect();
    comms.sort_by_key(|c| c.ticket);
    assert_eq!(comms.len(), 2);
    assert!(comms[0].finalized_ns.is_some() && comms[1].finalized_ns.is_none());
    assert_eq!(recording.ops()[0].comm, comms[1].ticket as u16);
}

/// Opens sixteen communicators at once, and checks what they were given.
fn sixteen_inits(log: Option<support::library::LogFn>) {
    let p = Plugin::built();
    let barrier = std::sync::Barrier::new(16);
    let opened = Mutex::new(Vec::new());
    std::thread::scope(|s| {
        for i in 0..16 {
            let (barrier, opened) = (&barrier, &opened);
            s.spawn(move || {
                barrier.wait();
                let o = p.init_with(5, i, c"pg", 16, i as i32, log);
                opened.lock().unwrap().push(o);
            });
        }
    });
    let opened = opened.into_inner().unwrap();
    let contexts: BTreeSet<_> = opened.iter().map(|o| o.context).collect();
    assert_eq!(contexts.len(), 16, "{opened:x?}");
    assert!(opened.iter().all(|o| o.mask == MASK), "{opened:x?}");
}

fn sixteen_opened(ran: Ran) {
    let recording = only(&ran.succeeded().dir);
    assert_eq!(recording.reader().comms().count(), 16);
    assert_eq!(recording.reader().recorded(call::INIT), 16);
}

#[test]
fn sixteen_threads_initialise_at_once() {
    let Some(ran) = run("sixteen_threads_initialise_at_once") else { return sixteen_inits(None) };
    sixteen_opened(ran);
}

/// NCCL keeps one mask for the process and the last writer wins: an init that gave up waiting for another
/// would switch everything off.
#[test]
fn a_slow_opening_disarms_nobody() {
    let Some(ran) = run("a_slow_opening_disarms_nobody") else {
        SLOW.store(300, Ordering::Relaxed);
        return sixteen_inits(Some(logger()));
    };
    sixteen_opened(ran);
}

#[test]
fn a_library_closed_and_opened_again_goes_on() {
    let Some(ran) = run("a_library_closed_and_opened_again_goes_on") else {
        let p = Plugin::built();
        let first = p.init(5, 1).context;
        let old = p.start(5, first, &COLL_DEFAULT.at(5));
        p.finalize(5, first);
        p.close();
        let p = Plugin::built();
        let second = p.init(5, 2).context;
        assert_ne!(first, second);
        p.stop(5, old);
        assert_ne!(p.start(5, second, &COLL_DEFAULT.at(5)), 0);
        p.close();
        // NCCL's threads may be late: the code is mapped still.
        p.stop(5, old);
        return;
    };
    let recording = only(&ran.succeeded().dir);
    assert_eq!(recording.ops().len(), 2);
    assert_eq!(recording.reader().comms().count(), 2);
    assert_eq!(recording.losses(), []);
}

fn wait_for(child: libc::pid_t) {
    let mut status = 0;
    // SAFETY: waits for a child of ours.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0, "the child failed");
}

#[test]
fn a_forked_child_leaves_the_parents_segment_alone() {
    let Some(ran) = run("a_forked_child_leaves_the_parents_segment_alone") else {
        let p = Plugin::built();
        let ctx = p.init(5, 1).context;
        let op = p.start(5, ctx, &COLL_DEFAULT.at(5));
        let path = in_dir(&dir()).remove(0);
        let before = std::fs::read(&path).unwrap();
        // SAFETY: the child calls the plugin, opens files and exits.
        match unsafe { libc::fork() } {
            0 => {
                // Callbacks of the parent's handles do nothing, and say so by NULL.
                p.stop(5, op);
                p.record(5, op, 22, None);
                if p.start(5, ctx, &COLL_DEFAULT.at(5)) != 0 || std::fs::read(&path).unwrap() != before {
                    exit_at_once(1);
                }
                p.finalize(5, ctx);
                // A child that uses NCCL itself has a segment of its own, and the parent's handles mean
                // nothing in it.
                let own = p.init(5, 2);
                if own.mask != MASK || own.context == ctx {
                    exit_at_once(2);
                }
                p.stop(5, op);
                let own_op = p.start(5, own.context, &COLL_DEFAULT.at(5));
                if own_op == 0 || std::fs::read(&path).unwrap() != before {
                    exit_at_once(3);
                }
                // A grandchild as well.
                // SAFETY: as above.
                match unsafe { libc::fork() } {
                    0 => {
                        let got = p.start(5, own.context, &COLL_DEFAULT.at(5));
                        exit_at_once(i32::from(got != 0));
                    }
                    grandchild => wait_for(grandchild),
                }
                exit_at_once(0)
            }
            child => wait_for(child),
        }
        assert_eq!(std::fs::read(&path).unwrap(), before);
        p.stop(5, op);
        assert_ne!(p.start(5, ctx, &COLL_DEFAULT.at(5)), 0);
        return;
    };
    let ran = ran.succeeded();
    let mut all: Vec<_> = ran.segments().iter().map(|p| Recording::read(p)).collect();
    assert_eq!(all.len(), 2);
    all.sort_by_key(|r| r.reader().header(head::CREATED_MONO_NS));
    assert_ne!(all[0].reader().pid(), all[1].reader().pid());
    assert_eq!((all[0].ops().len(), all[0].losses()), (2, vec![]));
    assert_eq!((all[1].ops().len(), all[1].losses()), (1, vec![]));
}

#[test]
fn a_killed_process_leaves_what_was_in_flight() {
    let Some(ran) = run("a_killed_process_leaves_what_was_in_flight") else {
        let p = Plugin::built();
        let ctx = p.init(5, 1).context;
        let group = p.start(5, ctx, &abi::group_api(5, false, 1));
        let done = p.start(5, ctx, &COLL_DEFAULT.at(5));
        p.stop(5, done);
        let call = p.start(5, ctx, &abi::coll_api(5, group, func::ALL_REDUCE, 77, false));
        p.stop(5, call);
        let op = p.start(5, ctx, &Coll { parent: call, count: 77, ..COLL_DEFAULT }.at(5));
        let kernel = p.start(5, ctx, &abi::kernel_ch(5, op, 4, 1_000));
        assert_ne!(kernel, 0);
        // SAFETY: kills this process.
        unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
        return;
    };
    assert_eq!(ran.signal(), Some(libc::SIGKILL));
    let path = &ran.segments()[0];
    assert_eq!(std::fs::metadata(path).unwrap().permissions().mode() & 0o777, 0o400);
    assert_eq!(std::fs::metadata(&ran.dir).unwrap().permissions().mode() & 0o777, 0o700);
    let recording = only(&ran.dir);
    let ops = recording.ops();
    assert_eq!(ops.len(), 2);
    let o = &ops[1];
    assert_eq!((o.count, o.order), (77, Some(1)));
    assert!(o.called_ns.is_some() && o.issued_ns >= o.called_ns);
    let k = &recording.channels()[0];
    assert_eq!(
        (k.op, k.channel, k.start_gpu_ns, k.duration_ns, k.stop_seen_ns),
        (1, 4, Some(1000), None, None)
    );
}

/// Through the logger's address, since NCCL may be loaded where nobody finds it by name.
#[test]
fn nccls_exact_version_is_found() {
    let Some(ran) = run_with("nccls_exact_version_is_found", |c, folder| {
        let source = folder.join("nccl.c");
        std::fs::write(
            &source,
            "int ncclGetVersion(int *v) { *v = 22809; return 0; } void logger(int l, ...) {}",
        )
        .unwrap();
        let built = std::process::Command::new("cc")
            .args(["-shared", "-fPIC", "-o"])
            .arg(folder.join("libthis-is-nccl.so"))
            .arg(&source)
            .status();
        if built.is_ok_and(|s| s.success()) {
            c.env("NCCL", folder.join("libthis-is-nccl.so"));
        }
    }) else {
        let Some(nccl) = std::env::var_os("NCCL") else {
            return support::skip::skipped("nccls_exact_version_is_found", "a C compiler (cc)");
        };
        let path = std::ffi::CString::new(nccl.into_encoded_bytes()).unwrap();
        // SAFETY: the library made above.
        let log = unsafe {
            let handle = libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL);
            let at = libc::dlsym(handle, c"logger".as_ptr());
            assert!(!at.is_null());
            std::mem::transmute::<*mut std::ffi::c_void, support::library::LogFn>(at)
        };
        Plugin::built().init_with(5, 1, c"pg", 1, 0, Some(log));
        return;
    };
    let ran = ran.succeeded();
    if let Some(path) = ran.segments().pop() {
        assert_eq!(Recording::read(&path).reader().nccl(), Some(22_809));
    }
}

// --- no room for a segment

/// How long the logger takes, in ms.
static SLOW: AtomicU64 = AtomicU64::new(0);
static SAID: Mutex<Vec<(c_int, String)>> = Mutex::new(Vec::new());

/// Stands for NCCL's variadic logger, whose only argument is always one C string; called through a variadic
/// type, a function of fixed arguments finds its integer arguments in the same registers on x86-64 and arm64 Linux.
unsafe extern "C" fn log(
    level: c_int,
    _flags: u64,
    _file: *const c_char,
    _line: c_int,
    format: *const c_char,
    text: *const c_char,
) {
    // SAFETY: the plugin passes C strings.
    let (format, text) = unsafe { (CStr::from_ptr(format), CStr::from_ptr(text)) };
    assert_eq!(format, c"%s");
    std::thread::sleep(Duration::from_millis(SLOW.load(Ordering::Relaxed)));
    SAID.lock().unwrap().push((level, text.to_str().unwrap().to_owned()));
}

fn logger() -> support::library::LogFn {
    type Fixed = unsafe extern "C" fn(c_int, u64, *const c_char, c_int, *const c_char, *const c_char);
    // SAFETY: see `log`.
    unsafe { std::mem::transmute::<Fixed, support::library::LogFn>(log) }
}

/// Opens where nothing can be made: init succeeds, asks for nothing, and callbacks that come all the same
/// are harmless.
fn disarmed(said: &str) {
    let p = Plugin::built();
    let mut contexts = BTreeSet::new();
    for v in 1..=7 {
        let o = p.init_with(v, 1, c"pg", 2, 0, Some(logger()));
        assert_eq!(o.mask, 0, "v{v}");
        assert!(contexts.insert(o.context), "v{v}: contexts differ even then");
    }
    for (v, context) in contexts.into_iter().enumerate() {
        support::every_callback(&p, v + 1, context);
    }
    let text = SAID.lock().unwrap();
    // v1 to v3 have no logger, and only the first init opens: nothing may be said at all.
    assert!(text.is_empty() || text.iter().any(|(_, t)| t.contains(said)), "{text:?}");
}

/// As `disarmed`, the first init having a logger.
fn disarmed_aloud(said: &str) {
    let p = Plugin::built();
    let o = p.init_with(5, 1, c"pg", 2, 0, Some(logger()));
    assert_eq!(o.mask, 0);
    {
        let text = SAID.lock().unwrap();
        assert!(text.iter().any(|(level, t)| *level == 2 && t.contains(said)), "{text:?}");
        assert!(!text.iter().any(|(_, t)| t.contains("more communicators")), "{text:?}");
    }
    disarmed(said);
}

fn nothing_made(ran: Ran) {
    let ran = ran.succeeded();
    assert!(ran.segments().is_empty());
}

#[test]
fn a_directory_below_a_file_disarms() {
    let Some(ran) = run_with("a_directory_below_a_file_disarms", |c, folder| {
        std::fs::write(folder.join("file"), "x").unwrap();
        c.env("RINGWATCH_DIR", folder.join("file/dir"));
    }) else {
        return disarmed_aloud("cannot make or open the segment directory");
    };
    nothing_made(ran);
}

#[test]
fn a_missing_parent_directory_disarms() {
    let Some(ran) = run_with("a_missing_parent_directory_disarms", |c, folder| {
        c.env("RINGWATCH_DIR", folder.join("no/such/dir"));
    }) else {
        return disarmed_aloud("cannot make or open the segment directory");
    };
    nothing_made(ran);
}

#[test]
fn a_file_size_limit_of_zero_disarms() {
    let Some(ran) = run("a_file_size_limit_of_zero_disarms") else {
        let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: reads one struct.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &none) }, 0);
        return disarmed_aloud("file size limit");
    };
    nothing_made(ran);
}

/// NCCL 2.28.9 makes files of 34 MB in /dev/shm for kernel events, and dies when it cannot.
#[test]
fn a_file_size_limit_of_nccls_own_files_asks_for_no_kernel_events() {
    for (limit, refused) in
        [(32 << 20, true), (64 << 20, true), (65 << 20, false), (libc::RLIM_INFINITY, false)]
    {
        let test = "a_file_size_limit_of_nccls_own_files_asks_for_no_kernel_events";
        let Some(ran) = run_with(test, |c, _| {
            c.env("RINGWATCH_TEST_LIMIT", limit.to_string());
        }) else {
            let limit = std::env::var("RINGWATCH_TEST_LIMIT").unwrap().parse().unwrap();
            let limits = libc::rlimit { rlim_cur: limit, rlim_max: libc::RLIM_INFINITY };
            // SAFETY: reads one struct.
            assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &limits) }, 0);
            Plugin::built().init_with(5, 1, c"pg", 2, 0, Some(logger()));
            let said = SAID.lock().unwrap();
            println!("refused: {}", said.iter().any(|(_, t)| t.contains("GPU times are not asked for")));
            return;
        };
        let said = ran.succeeded().output.clone();
        assert!(said.contains(&format!("refused: {refused}")), "{limit}: {said}");
    }
}

/// Where not even root can create a file.
#[test]
fn an_unwritable_directory_disarms() {
    let Some(ran) = run_with("an_unwritable_directory_disarms", |c, _| {
        c.env("RINGWATCH_DIR", "/proc/self");
    }) else {
        // /proc has no free blocks either, and that is found first.
        return disarmed_aloud("nothing is recorded");
    };
    nothing_made(ran);
}

/// Returns whether a test may have a mount namespace of its own; without one it counts as skipped.
fn may_mount(test: &str) -> bool {
    let out =
        std::process::Command::new("unshare").args(["-m", "mount", "-t", "tmpfs", "none", "/mnt"]).output();
    let may = out.is_ok_and(|o| o.status.success());
    if !may {
        support::skip::skipped(test, "unshare, and the right to make a mount namespace (root)");
    }
    may
}

/// The test's child in a mount namespace with a small tmpfs over /mnt, filled up by `fill` bytes.
fn on_tmpfs(test: &str, size: &str, fill: &str, options: &str) -> Option<Ran> {
    if std::env::var_os("RINGWATCH_TEST_CHILD").is_none() && !may_mount(test) {
        return Some(skipped());
    }
    let script = format!(
        "mount -t tmpfs -o size={size} none /mnt && head -c {fill} /dev/zero > /mnt/filler; \
         {options}; \"$@\"; code=$?; mkdir -p $COPY; cp /mnt/segments/* $COPY 2>/dev/null; exit $code"
    );
    run_under(test, &["unshare", "-m", "sh", "-c", &script, "sh"], |c, folder| {
        c.env("RINGWATCH_DIR", "/mnt/segments").env("COPY", folder.join("segments"));
    })
}

fn skipped() -> Ran {
    // A child that does nothing and succeeds: the promise was not tested, and the test has said so.
    run_under("nothing", &["true"], |_, _| {}).unwrap()
}

#[test]
fn sixty_four_kib_of_shared_memory_make_a_small_segment() {
    let Some(ran) = on_tmpfs("sixty_four_kib_of_shared_memory_make_a_small_segment", "64k", "0", "true")
    else {
        let p = Plugin::built();
        let o = p.init(5, 1);
        assert_eq!(o.mask, MASK);
        for seq in 0..100 {
            let op = p.start(5, o.context, &Coll { seq, ..COLL_DEFAULT }.at(5));
            p.stop(5, op);
        }
        support::every_callback(&p, 5, o.context);
        return;
    };
    let ran = ran.succeeded();
    let Some(path) = ran.segments().pop() else { return };
    let recording = Recording::read(&path);
    assert!(std::fs::metadata(&path).unwrap().len() <= 32 << 10);
    recording.balanced();
    assert!(recording.ops().len() >= 16);
}

#[test]
fn a_full_tmpfs_disarms() {
    let Some(ran) = on_tmpfs("a_full_tmpfs_disarms", "64k", "64k", "true") else {
        return disarmed_aloud("not enough shared memory");
    };
    nothing_made(ran);
}

#[test]
fn a_read_only_tmpfs_disarms() {
    let options = "mkdir /mnt/segments && mount -o remount,ro /mnt";
    let Some(ran) = on_tmpfs("a_read_only_tmpfs_disarms", "1m", "0", options) else {
        return disarmed_aloud("cannot create a file in the segment directory");
    };
    nothing_made(ran);
}

#[test]
fn without_dev_shm_nothing_is_recorded() {
    let options =
        "umount -l /dev/shm 2>/dev/null; mount -t tmpfs -o size=4k,ro none /dev/shm; unset RINGWATCH_DIR";
    let Some(ran) = on_tmpfs("without_dev_shm_nothing_is_recorded", "64k", "0", options) else {
        return disarmed_aloud("cannot make or open the segment directory");
    };
    nothing_made(ran);
}

// --- what it says and starts

#[test]
fn nothing_is_written_to_stdout_or_stderr() {
    let Some(ran) = run_with("nothing_is_written_to_stdout_or_stderr", |c, _| {
        c.env("RINGWATCH_SEGMENT_BYTES", "lots");
    }) else {
        let p = Plugin::built();
        let file = tempfile::tempfile().unwrap();
        let fds = [1, 2].map(|fd| {
            // SAFETY: descriptors of our own.
            unsafe {
                let kept = libc::dup(fd);
                libc::dup2(file.as_raw_fd(), fd);
                kept
            }
        });
        for v in 1..=7 {
            let ctx = p.init(v, 1).context;
            support::every_callback(&p, v, ctx);
        }
        for (fd, kept) in [1, 2].into_iter().zip(fds) {
            // SAFETY: as above.
            unsafe { libc::dup2(kept, fd) };
        }
        assert_eq!(file.metadata().unwrap().len(), 0);
        return;
    };
    ran.succeeded();
}

#[test]
fn bad_settings_are_told_to_nccls_logger() {
    let Some(ran) = run_with("bad_settings_are_told_to_nccls_logger", |c, _| {
        c.env("RINGWATCH_SEGMENT_BYTES", "4M");
    }) else {
        let p = Plugin::built();
        let o = p.init_with(5, 1, c"pg", 2, 0, Some(logger()));
        assert_eq!(o.mask, MASK, "a bad setting is no reason to do nothing");
        let said = SAID.lock().unwrap();
        assert!(
            said.iter().any(|(level, t)| *level == 2 && t.contains("RINGWATCH_SEGMENT_BYTES")),
            "{said:?}"
        );
        assert!(said.iter().any(|(level, t)| *level == 3 && t.contains("segment opened")), "{said:?}");
        return;
    };
    ran.succeeded();
}

#[test]
fn no_thread_is_started() {
    let Some(ran) = run("no_thread_is_started") else {
        let threads = || std::fs::read_dir("/proc/self/task").unwrap().count();
        let before = threads();
        let p = Plugin::built();
        for v in 1..=7 {
            let ctx = p.init(v, 1).context;
            support::every_callback(&p, v, ctx);
        }
        assert_eq!(threads(), before);
        return;
    };
    ran.succeeded();
}

#[test]
fn only_named_variables_enter_the_segment() {
    let Some(ran) = run_with("only_named_variables_enter_the_segment", |c, _| {
        c.env("RANK", "3").env("WORLD_SIZE", "8").env("SECRET_TOKEN", "hunter2");
    }) else {
        Plugin::built().init(5, 1);
        return;
    };
    let ran = ran.succeeded();
    let bytes = std::fs::read(&ran.segments()[0]).unwrap();
    let holds = |text: &[u8]| bytes.windows(text.len()).any(|w| w == text);
    assert!(holds(b"RANK=3\n") && holds(b"WORLD_SIZE=8\n"));
    assert!(!holds(b"hunter2") && !holds(b"SECRET"));
}

// --- many communicators, other processes

#[test]
fn three_hundred_communicators() {
    let Some(ran) = run("three_hundred_communicators") else {
        let p = Plugin::built();
        let opened: Vec<_> = (0..300).map(|i| p.init(5, i)).collect();
        let contexts: BTreeSet<_> = opened.iter().map(|o| o.context).collect();
        assert_eq!(contexts.len(), 300);
        assert!(opened.iter().all(|o| o.mask == MASK), "a full table does not blind the others");
        assert_eq!(p.start(5, opened[299].context, &COLL_DEFAULT.at(5)), 0);
        assert_ne!(p.start(5, opened[255].context, &COLL_DEFAULT.at(5)), 0);
        // Ten are freed, ten more are made in their places.
        for o in &opened[100..110] {
            p.finalize(5, o.context);
        }
        for i in 0..11 {
            let o = p.init(5, 1000 + i);
            assert!(!contexts.contains(&o.context));
            assert_eq!(p.start(5, o.context, &COLL_DEFAULT.at(5)) != 0, i < 10, "communicator {i}");
        }
        // The old ones' contexts name nobody now.
        assert_eq!(p.start(5, opened[105].context, &COLL_DEFAULT.at(5)), 0);
        return;
    };
    let recording = only(&ran.succeeded().dir);
    recording.balanced();
    assert_eq!(recording.losses(), [(Loss::CommTable, 45), (Loss::NoComm, 3)]);
    assert_eq!(recording.reader().comms().count(), 256);
    assert_eq!(recording.reader().comms().filter(|c| c.id.is_some_and(|i| i.0 >= 1000)).count(), 10);
}

/// PXN: context, parent and pid are another process's. Its numbers are kept and never followed, whether they
/// point to nothing at all or look like handles of ours.
#[test]
fn another_processs_transfers_are_recorded_and_never_followed() {
    let Some(ran) = run("another_processs_transfers_are_recorded_and_never_followed") else {
        let p = Plugin::built();
        let own = p.init(5, 1).context;
        let me = std::process::id() as i32;
        for v in 1..=7 {
            for (context, parent, pid) in [
                (0x10, 0x18, me + 1),
                (0x7fff_ffff_f000, 0x7fff_dead_b000, me + 1),
                (!0, !7, me),
                (own, own, me + 1),
            ] {
                let op = p.start(v, context, &abi::proxy_op(v, parent, pid, 6, 2, 1024, true));
                assert_ne!(op, 0, "v{v}: the steps of a foreign operation are wanted");
                let step = p.start(v, context, &abi::proxy_step(v, op, 0));
                p.record(v, step, 9, Some((1000, 0)));
                p.stop(v, step);
                p.stop(v, op);
            }
        }
        return;
    };
    let recording = only(&ran.succeeded().dir);
    let transfers = recording.transfers();
    assert_eq!(transfers.len(), 28);
    for t in &transfers {
        assert!(t.foreign && t.is_send && t.comm.is_none(), "{t:?}");
        assert_eq!((t.peer, t.channel, t.steps, t.chunk, t.bytes), (6, 3, 2, 1024, 1000));
        assert_eq!((t.started, t.done), (1, 1));
        assert!(t.stop_ns.is_some());
    }
    assert_eq!(transfers[1].parent, 0x7fff_dead_b000);
    assert_eq!(recording.losses(), []);
}

#[test]
fn kinds_are_what_the_codes_say() {
    // The sequences' test names them; a change of number would change every segment ever written.
    assert_eq!([kind::COLLECTIVE, kind::REPLAY, kind::SEND, kind::RECV], [1, 2, 3, 4]);
    assert!(Path::new(plugin_library()).is_absolute());
}

/// Restart after restart, dead segments must leave NCCL its shared memory.
#[test]
fn dead_segments_do_not_fill_a_small_shared_memory() {
    let test = "dead_segments_do_not_fill_a_small_shared_memory";
    // The child's shell starts the test's own child a hundred times: as many jobs, one after the other.
    if std::env::var_os("RINGWATCH_TEST_CHILD").is_none() && !may_mount(test) {
        return;
    }
    let script = "mount -t tmpfs -o size=64m none /mnt; for i in $(seq 100); do \"$@\" || exit 1; done; \
         used=$(du -sk /mnt | cut -f1); [ $used -gt 100 ] && [ $used -lt 6000 ] || { echo $used KiB; exit 7; }";
    let Some(ran) = run_under(test, &["unshare", "-m", "sh", "-c", script, "sh"], |c, _| {
        c.env("RINGWATCH_DIR", "/mnt/segments");
    }) else {
        Plugin::built().init(5, 1);
        return;
    };
    ran.succeeded();
}
