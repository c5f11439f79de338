//! Where a process's threads are in the kernel, from /proc: read without its knowing, whatever program it is.

use std::collections::BTreeMap;
use std::fs;

/// Threads that are looked at.
const THREADS_MAX: usize = 512;
/// Places that are told, those with most threads first.
const PLACES_MAX: usize = 12;
/// Kernel frames of a place.
const FRAMES_MAX: usize = 4;

/// System calls in which threads stand for long, by number.
const CALLS: &[(i64, &str)] = &[
    (libc::SYS_read, "read"),
    (libc::SYS_write, "write"),
    (libc::SYS_pread64, "pread64"),
    (libc::SYS_pwrite64, "pwrite64"),
    (libc::SYS_readv, "readv"),
    (libc::SYS_writev, "writev"),
    (libc::SYS_openat, "openat"),
    (libc::SYS_fsync, "fsync"),
    (libc::SYS_ioctl, "ioctl"),
    (libc::SYS_flock, "flock"),
    (libc::SYS_fcntl, "fcntl"),
    (libc::SYS_ppoll, "ppoll"),
    (libc::SYS_pselect6, "pselect6"),
    (libc::SYS_epoll_pwait, "epoll_pwait"),
    (libc::SYS_accept, "accept"),
    (libc::SYS_connect, "connect"),
    (libc::SYS_recvfrom, "recvfrom"),
    (libc::SYS_recvmsg, "recvmsg"),
    (libc::SYS_sendto, "sendto"),
    (libc::SYS_sendmsg, "sendmsg"),
    (libc::SYS_futex, "futex"),
    (libc::SYS_nanosleep, "nanosleep"),
    (libc::SYS_clock_nanosleep, "clock_nanosleep"),
    (libc::SYS_restart_syscall, "a call that goes on after a signal"),
    (libc::SYS_rt_sigtimedwait, "rt_sigtimedwait"),
    (libc::SYS_wait4, "wait4"),
    (libc::SYS_waitid, "waitid"),
    (libc::SYS_munmap, "munmap"),
    (libc::SYS_mmap, "mmap"),
    (libc::SYS_madvise, "madvise"),
];

/// System calls that only x86 has.
#[cfg(target_arch = "x86_64")]
const OLD_CALLS: &[(i64, &str)] = &[
    (libc::SYS_open, "open"),
    (libc::SYS_poll, "poll"),
    (libc::SYS_select, "select"),
    (libc::SYS_epoll_wait, "epoll_wait"),
    (libc::SYS_pause, "pause"),
];
#[cfg(not(target_arch = "x86_64"))]
const OLD_CALLS: &[(i64, &str)] = &[];

/// The places in the kernel at which threads of a process stand, each with its threads' names and how many they are, most
/// first: `python3 x8 in futex at futex_wait_queue`. Threads that run are in none.
pub(super) fn places(pid: u32) -> Vec<String> {
    let Ok(tasks) = fs::read_dir(format!("/proc/{pid}/task")) else { return Vec::new() };
    let mut by: BTreeMap<(String, String), usize> = BTreeMap::new();
    for task in tasks.flatten().take(THREADS_MAX) {
        let read = |name: &str| fs::read_to_string(task.path().join(name)).ok();
        let name = read("comm").unwrap_or_default().trim().escape_debug().to_string();
        if let Some(place) =
            place(read("syscall").as_deref(), read("stack").as_deref(), read("wchan").as_deref())
        {
            *by.entry((name, place)).or_default() += 1;
        }
    }
    let mut all: Vec<((String, String), usize)> = by.into_iter().collect();
    all.sort_by_key(|(_, n)| std::cmp::Reverse(*n));
    let told = |((name, place), n): ((String, String), usize)| match n {
        1 => format!("{name} {place}"),
        n => format!("{name} x{n} {place}"),
    };
    all.into_iter().take(PLACES_MAX).map(told).collect()
}

/// Where a thread is, as far as the kernel lets on: its system call, and the innermost functions, or the one in which it
/// sleeps.
pub(super) fn place(syscall: Option<&str>, stack: Option<&str>, wchan: Option<&str>) -> Option<String> {
    let number = syscall.and_then(|s| s.split_whitespace().next()?.parse::<i64>().ok()).filter(|n| *n >= 0);
    let call = number.map(|n| {
        let known = CALLS.iter().chain(OLD_CALLS).find(|(of, _)| *of == n);
        known.map_or_else(|| format!("in system call {n}"), |(_, name)| format!("in {name}"))
    });
    let function = |line: &str| {
        let name = line.trim().trim_start_matches("[<0>] ").split('+').next()?.to_owned();
        let entry = name.is_empty() || name.starts_with("entry_") || name.contains("do_syscall");
        (!entry).then_some(name)
    };
    let frames: Vec<String> =
        stack.into_iter().flat_map(str::lines).filter_map(function).take(FRAMES_MAX).collect();
    let sleeps = wchan.map(str::trim).filter(|w| !w.is_empty() && *w != "0" && !w.contains("do_syscall"));
    let at = match (frames.is_empty(), sleeps) {
        (false, _) => Some(format!("at {}", frames.join(" < "))),
        (true, Some(w)) => Some(format!("at {w}")),
        (true, None) => None,
    };
    let words: Vec<String> = call.into_iter().chain(at).collect();
    (!words.is_empty()).then(|| words.join(" ").escape_debug().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_told_as_far_as_the_kernel_lets_on() {
        let stack =
            "[<0>] futex_wait_queue+0x6a/0xa0\n[<0>] futex_wait+0x1/0x2\n[<0>] do_syscall_64+0x71/0x280\n";
        let syscall = format!("{} 0x1 0x0", libc::SYS_futex);
        let all = place(Some(&syscall), Some(stack), Some("futex_wait_queue"));
        assert_eq!(all.as_deref(), Some("in futex at futex_wait_queue < futex_wait"));
        let without = place(Some(&syscall), None, Some("futex_wait_queue\n"));
        assert_eq!(without.as_deref(), Some("in futex at futex_wait_queue"));
        assert_eq!(place(Some("100000 0x1"), None, None).as_deref(), Some("in system call 100000"));
        assert_eq!(place(Some("running\n"), Some(""), Some("0")), None);
        assert_eq!(place(Some("-1 0x0 0x0"), None, Some("0")), None);
        assert_eq!(place(None, None, None), None);
    }

    #[test]
    fn threads_of_one_name_at_one_place_are_counted() {
        let stop = std::sync::Arc::new(std::sync::Barrier::new(4));
        let wait = || {
            let stop = std::sync::Arc::clone(&stop);
            let named = std::thread::Builder::new().name("waits-here".to_owned());
            named.spawn(move || stop.wait()).unwrap()
        };
        let threads = [wait(), wait(), wait()];
        let until = std::time::Instant::now() + std::time::Duration::from_secs(20);
        let mut told = Vec::new();
        while std::time::Instant::now() < until {
            told = places(std::process::id());
            if told.iter().any(|t| t.starts_with("waits-here x3 in futex")) {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        stop.wait();
        for t in threads {
            t.join().unwrap();
        }
        // Who may not read another's system call may still read its name and where it sleeps.
        assert!(told.iter().any(|t| t.starts_with("waits-here x3 ")), "{told:?}");
        assert_eq!(places(u32::MAX), Vec::<String>::new());
    }
}
