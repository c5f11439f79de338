//! The segment's file: whole from its first moment, within the process's limits, and not to be cut short.

#![allow(unsafe_code, reason = "forks, traces, sets limits and filters system calls")]
#![allow(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "the plugin's bans are not its tests'"
)]
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

mod support;

use std::os::unix::fs::{PermissionsExt as _, chown};
use std::path::{Path, PathBuf};
use support::abi::COLL_DEFAULT;
use support::child::{Ran, dir, ended, exit_at_once, forked, run, run_with};
use support::library::Plugin;
use support::locks;
use support::seccomp::{self, Then};
use support::segment::Recording;

/// Variables by which a test tells its child what to do.
const LIMIT: &str = "RINGWATCH_TEST_LIMIT";
const KERNEL: &str = "RINGWATCH_TEST_KERNEL";

/// Kernels that make the plugin take another way to its file, as [`kernel`] plays them.
const KERNELS: [&str; 3] = ["", "no unnamed files", "no links"];

fn kernel() -> String {
    let name = std::env::var(KERNEL).unwrap();
    match name.as_str() {
        "no unnamed files" => seccomp::no_unnamed_files(),
        "no links" => seccomp::no_links(),
        _ => assert_eq!(name, ""),
    }
    name
}

/// The test's children, one a kernel; `None` in a child.
fn on_each_kernel(test: &str) -> Option<Vec<Ran>> {
    let with = |kernel| {
        run_with(test, |c, _| {
            c.env(KERNEL, kernel);
        })
    };
    KERNELS.map(with).into_iter().collect()
}

/// Every file of a directory, whatever its name.
fn files(dir: &Path) -> Vec<PathBuf> {
    std::fs::read_dir(dir).map_or_else(|_| Vec::new(), |entries| entries.map(|e| e.unwrap().path()).collect())
}

/// Checks that a file is a whole segment that no other process may write to.
#[track_caller]
fn whole(path: &Path) -> Recording {
    let recording = Recording::read(path);
    assert!(recording.is_open(), "{} is no whole segment", path.display());
    assert_eq!(std::fs::metadata(path).unwrap().permissions().mode() & 0o7777, 0o400);
    recording
}

/// The one file of a directory, a whole segment.
#[track_caller]
fn one_whole(dir: &Path) -> Recording {
    let [one] = &files(dir)[..] else { panic!("{:?}", files(dir)) };
    whole(one)
}

// --- whole from its first moment

/// Steps through the system calls of a forked process that stops itself, until it ends; returns how many there were.
fn step_through(child: libc::pid_t, mut at_each: impl FnMut()) -> usize {
    for calls in 0.. {
        let status = ended(child);
        if !libc::WIFSTOPPED(status) {
            assert_eq!(status, 0, "the traced process failed");
            return calls;
        }
        at_each();
        // SAFETY: continues a process that this thread traces and that has stopped.
        let to_next = unsafe { libc::ptrace(libc::PTRACE_SYSCALL, child, 0, 0) };
        assert_eq!(to_next, 0);
    }
    unreachable!("a process ends");
}

/// A kill may come between any two system calls: what is in the directory then is what it leaves.
#[test]
fn a_file_with_a_name_is_a_whole_and_locked_segment_at_every_system_call() {
    let test = "a_file_with_a_name_is_a_whole_and_locked_segment_at_every_system_call";
    let Some(ran) = run(test) else {
        let plugin = Plugin::built();
        let child = forked(|| {
            // SAFETY: asks to be traced by the parent, and stops until it does.
            unsafe {
                assert_eq!(libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0), 0);
                libc::raise(libc::SIGSTOP);
            }
            plugin.init(5, 1);
            exit_at_once(0);
        });
        let mut with_file = 0;
        let stops = step_through(child, || {
            for file in files(&dir()) {
                whole(&file);
                assert_eq!(locks::holder(&file), Some(child));
                with_file += 1;
            }
        });
        assert!(stops > 20 && with_file > 0, "{with_file} of {stops} stops had a file");
        return;
    };
    one_whole(&ran.succeeded().dir);
}

#[test]
fn a_process_killed_while_it_opens_leaves_nothing() {
    let test = "a_process_killed_while_it_opens_leaves_nothing";
    let calls = [libc::SYS_fcntl, libc::SYS_fallocate, libc::SYS_madvise, libc::SYS_linkat];
    for call in calls {
        let Some(ran) = run_with(test, |c, _| {
            c.env(LIMIT, call.to_string());
        }) else {
            let plugin = Plugin::built();
            seccomp::on(std::env::var(LIMIT).unwrap().parse().unwrap(), None, Then::Kill);
            plugin.init(5, 1);
            return;
        };
        assert_eq!(ran.signal(), Some(libc::SIGSYS), "system call {call}: {}", ran.output);
        assert_eq!(files(&ran.dir), <[PathBuf; 0]>::default(), "system call {call}");
    }
}

#[test]
fn every_kernel_gives_a_whole_segment() {
    let Some(all) = on_each_kernel("every_kernel_gives_a_whole_segment") else {
        let plugin = Plugin::built();
        kernel();
        let opened = plugin.init(5, 1);
        assert_ne!(plugin.start(5, opened.context, &COLL_DEFAULT.at(5)), 0);
        let [file] = &files(&dir())[..] else { panic!("{:?}", files(&dir())) };
        // Asked by another process: this one would lose its lock.
        let me = plugin.pid;
        support::child::succeeds(forked(|| assert_eq!(locks::holder(file), Some(me))));
        return;
    };
    for ran in all {
        let recording = one_whole(&ran.succeeded().dir);
        assert_eq!(recording.ops().len(), 1);
        recording.balanced();
    }
}

#[test]
fn no_room_leaves_no_file() {
    let Some(all) = on_each_kernel("no_room_leaves_no_file") else {
        let plugin = Plugin::built();
        kernel();
        seccomp::on(libc::SYS_fallocate, None, Then::Fail(libc::ENOSPC));
        assert_eq!(plugin.init(5, 1).mask, 0);
        return;
    };
    for ran in all {
        assert_eq!(files(&ran.succeeded().dir), <[PathBuf; 0]>::default());
    }
}

// --- limits

fn limit(resource: libc::__rlimit_resource_t, soft: u64) {
    let mut limits = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: fills and reads one struct.
    unsafe {
        assert_eq!(libc::getrlimit(resource, &mut limits), 0);
        limits.rlim_cur = soft;
        assert_eq!(libc::setrlimit(resource, &limits), 0);
    }
}

fn named_limit() -> u64 {
    std::env::var(LIMIT).unwrap().parse().unwrap()
}

/// True while this thread blocks the signal that a file beyond the limit raises.
fn blocks_file_size_signal() -> bool {
    let mut set = std::mem::MaybeUninit::<libc::sigset_t>::zeroed();
    // SAFETY: fills and reads one set.
    unsafe {
        assert_eq!(libc::pthread_sigmask(libc::SIG_BLOCK, std::ptr::null(), set.as_mut_ptr()), 0);
        libc::sigismember(set.as_ptr(), libc::SIGXFSZ) == 1
    }
}

/// Runs a child with each of these limits; the child sets it itself.
fn with_limits(test: &str, limits: &[u64], kernels: &[&str], check: impl Fn(u64, Ran)) -> Option<()> {
    for kernel in kernels {
        for limit in limits {
            let ran = run_with(test, |c, _| {
                c.env(LIMIT, limit.to_string()).env(KERNEL, kernel);
            })?;
            eprintln!("limit {limit}, kernel {kernel:?}");
            check(*limit, ran.succeeded());
        }
    }
    Some(())
}

/// The segment is as small as the limit wants it; none where not even the smallest fits.
fn fits(limit: u64, ran: Ran) {
    let files = files(&ran.dir);
    assert_eq!(files.len(), usize::from(limit >= 15_360), "{files:?}");
    for file in files {
        whole(&file).balanced();
        let bytes = std::fs::metadata(&file).unwrap().len();
        assert!(bytes <= limit, "{bytes} bytes");
    }
}

const FILE_SIZES: [u64; 5] = [0, 4096, 15_360, 64 << 10, 1 << 20];

#[test]
fn a_file_size_limit_makes_the_segment_small_and_harms_nobody() {
    let test = "a_file_size_limit_makes_the_segment_small_and_harms_nobody";
    let child = with_limits(test, &FILE_SIZES, &KERNELS, fits);
    if child.is_none() {
        let plugin = Plugin::built();
        limit(libc::RLIMIT_FSIZE, named_limit());
        kernel();
        let context = plugin.init(5, 1).context;
        assert!(!blocks_file_size_signal());
        support::every_callback(&plugin, 5, context);
    }
}

/// Somebody lowers the limit after the plugin has read it: here the plugin cannot read it at all.
#[test]
fn a_file_size_limit_that_nobody_could_foresee_harms_nobody() {
    let test = "a_file_size_limit_that_nobody_could_foresee_harms_nobody";
    let child = with_limits(test, &FILE_SIZES, &KERNELS, fits);
    if child.is_none() {
        let plugin = Plugin::built();
        limit(libc::RLIMIT_FSIZE, named_limit());
        kernel();
        seccomp::on(libc::SYS_prlimit64, None, Then::Fail(libc::EPERM));
        let context = plugin.init(5, 1).context;
        // The job's own mask is back, and no signal waits behind it.
        assert!(!blocks_file_size_signal());
        support::every_callback(&plugin, 5, context);
    }
}

#[test]
fn a_signal_that_the_job_itself_keeps_waiting_still_waits() {
    let test = "a_signal_that_the_job_itself_keeps_waiting_still_waits";
    let child = with_limits(test, &[0, 4096], &KERNELS, fits);
    if child.is_none() {
        let plugin = Plugin::built();
        limit(libc::RLIMIT_FSIZE, named_limit());
        kernel();
        seccomp::on(libc::SYS_prlimit64, None, Then::Fail(libc::EPERM));
        let mut set = std::mem::MaybeUninit::<libc::sigset_t>::zeroed();
        // SAFETY: fills and reads one set, and raises a signal that this thread blocks.
        unsafe {
            libc::sigaddset(set.as_mut_ptr(), libc::SIGXFSZ);
            assert_eq!(libc::pthread_sigmask(libc::SIG_BLOCK, set.as_ptr(), std::ptr::null_mut()), 0);
            assert_eq!(libc::raise(libc::SIGXFSZ), 0);
        }
        plugin.init(5, 1);
        assert!(blocks_file_size_signal());
        // SAFETY: as above.
        let waits = unsafe {
            assert_eq!(libc::sigpending(set.as_mut_ptr()), 0);
            libc::sigismember(set.as_ptr(), libc::SIGXFSZ)
        };
        assert_eq!(waits, 1);
    }
}

/// Nothing, or one whole segment.
fn nothing_half_made(limit: u64, ran: Ran) {
    let files = files(&ran.dir);
    eprintln!("limit {limit}: {} segments", files.len());
    assert!(files.len() <= 1, "{files:?}");
    for file in files {
        whole(&file);
    }
}

#[test]
fn no_spare_descriptor_harms_nobody() {
    let test = "no_spare_descriptor_harms_nobody";
    let child = with_limits(test, &[0, 1, 2, 3], &KERNELS, |spare, ran| {
        // The directory and the file.
        assert_eq!(files(&ran.dir).len(), usize::from(spare >= 2), "{spare} descriptors");
        nothing_half_made(spare, ran);
    });
    if child.is_none() {
        let plugin = Plugin::built();
        let spare = named_limit();
        kernel();
        // All numbers below the next one are taken.
        let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
        let next = loop {
            // SAFETY: copies a descriptor of ours.
            let copy = unsafe { libc::dup(2) };
            if usize::try_from(copy).unwrap() + 2 == open() {
                break copy as u64 + 1;
            }
        };
        limit(libc::RLIMIT_NOFILE, next + spare);
        let context = plugin.init(5, 1).context;
        limit(libc::RLIMIT_NOFILE, 1024);
        support::every_callback(&plugin, 5, context);
    }
}

fn mapped_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').next().unwrap().parse::<u64>().unwrap() * 4096
}

#[test]
fn little_address_space_harms_nobody() {
    let test = "little_address_space_harms_nobody";
    let child = with_limits(test, &[0, 64 << 10, 512 << 10, 2 << 20, 1 << 30], &KERNELS, |spare, ran| {
        if spare == 0 || spare == 1 << 30 {
            assert_eq!(files(&ran.dir).len(), usize::from(spare > 0));
        }
        nothing_half_made(spare, ran);
    });
    if child.is_none() {
        let plugin = Plugin::built();
        let spare = named_limit();
        kernel();
        limit(libc::RLIMIT_AS, mapped_bytes() + spare);
        let context = plugin.init(5, 1).context;
        support::every_callback(&plugin, 5, context);
        // The test's own end may need memory.
        exit_at_once(0);
    }
}

#[test]
fn a_limit_of_data_or_locked_memory_harms_nobody() {
    let test = "a_limit_of_data_or_locked_memory_harms_nobody";
    let limits = [libc::RLIMIT_DATA, libc::RLIMIT_MEMLOCK].map(u64::from);
    let child = with_limits(test, &limits, &[""], |_, ran| {
        assert_eq!(files(&ran.dir), <[PathBuf; 0]>::default());
    });
    if child.is_none() {
        let plugin = Plugin::built();
        // SAFETY: from here on the kernel locks what is mapped, as far as the limit allows.
        assert_eq!(unsafe { libc::mlockall(libc::MCL_FUTURE) }, 0);
        become_ordinary();
        limit(named_limit() as libc::__rlimit_resource_t, 4096);
        let context = plugin.init(5, 1).context;
        support::every_callback(&plugin, 5, context);
        exit_at_once(0);
    }
}

// --- who may write to it

/// Gives up root's rights where the test has them; the folder of the segments goes to the new user.
fn become_ordinary() {
    const NOBODY: u32 = 65_534;
    // SAFETY: changes this process's own ids, group first.
    unsafe {
        if libc::geteuid() == 0 {
            chown(dir().parent().unwrap(), Some(NOBODY), Some(NOBODY)).unwrap();
            assert_eq!(libc::setgroups(0, std::ptr::null()), 0);
            assert_eq!(libc::setresgid(NOBODY, NOBODY, NOBODY), 0);
            assert_eq!(libc::setresuid(NOBODY, NOBODY, NOBODY), 0);
        }
        assert_ne!(libc::geteuid(), 0);
    }
}

#[test]
fn the_jobs_own_user_cannot_shorten_or_overwrite_it() {
    let Some(all) = on_each_kernel("the_jobs_own_user_cannot_shorten_or_overwrite_it") else {
        let plugin = Plugin::built();
        become_ordinary();
        kernel();
        let context = plugin.init(5, 1).context;
        let [file] = &files(&dir())[..] else { panic!("{:?}", files(&dir())) };
        let bytes = std::fs::metadata(file).unwrap().len();
        for command in ["truncate -s 0 \"$0\"", "cp /etc/passwd \"$0\"", ": > \"$0\"", "echo x >> \"$0\""] {
            let ran = std::process::Command::new("sh").args(["-c", command]).arg(file).output().unwrap();
            assert!(!ran.status.success(), "{command}");
            assert!(String::from_utf8_lossy(&ran.stderr).contains("Permission denied"), "{command}: {ran:?}");
            assert_eq!(std::fs::metadata(file).unwrap().len(), bytes, "{command}");
        }
        support::every_callback(&plugin, 5, context);
        return;
    };
    for ran in all {
        one_whole(&ran.succeeded().dir).balanced();
    }
}
