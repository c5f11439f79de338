//! Limits of the process, of its container and of the host, and the clocks.

use super::host::{Host, bytes};
use super::{Area, Check, Observation};
use rustix::fs::statvfs;
use std::io::Write;
use std::path::Path;
use std::time::UNIX_EPOCH;

pub(super) const CHECKS: &[Check] = &[
    Check { id: "shared-memory", area: Area::Limits, run: shared_memory },
    Check { id: "memlock", area: Area::Limits, run: memlock },
    Check { id: "open-files", area: Area::Limits, run: open_files },
    Check { id: "file-size", area: Area::Limits, run: file_size },
    Check { id: "container", area: Area::Limits, run: container },
    Check { id: "clock-source", area: Area::Limits, run: clock_source },
    Check { id: "time", area: Area::Limits, run: time },
];

/// The size that container runtimes give to /dev/shm by default. NCCL 2.28.9 takes some 9 MiB for each pair of ranks that
/// have no peer access, and fails in ncclCommInitRank when the room is used up.
const SHM_OF_CONTAINERS: u64 = 64 << 20;
/// Bytes that RDMA has to lock at least, and with which nobody has met the limit: buffers of channels and peers.
const LOCKED_MIN: u64 = 64 << 20;
const LOCKED_ENOUGH: u64 = 16 << 30;
/// A process of NCCL opens at least a socket for each neighbor, channel and helper thread.
const FILES_MIN: u64 = 4096;
/// NCCL and Ringwatch make files of this size in /dev/shm.
const FILE_MIN: u64 = 1 << 30;
/// Threads that eight processes with a communicator or two have.
const TASKS_MIN: u64 = 4096;
/// Clocks of these sources are read without a system call.
const FAST_CLOCKS: &[&str] = &["tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page", "xen"];
/// A clock that is off by this much puts spans of two hosts in the wrong order, in us.
const OFF_MAX_US: i64 = 100_000;

fn shared_memory(host: &Host) -> Vec<Observation> {
    let path = host.path("dev/shm");
    let fix = "give the container more: --shm-size=16g (docker), an emptyDir with medium Memory at /dev/shm \
               (Kubernetes), or --ipc=host; on a host: mount -o remount,size=50% /dev/shm";
    let v = match statvfs(&path) {
        Ok(v) => v,
        Err(e) => {
            return vec![Observation::fail(format!("{}: {e}", path.display()), "mount a tmpfs at /dev/shm")];
        }
    };
    let (size, free) = (v.f_blocks.saturating_mul(v.f_frsize), v.f_bavail.saturating_mul(v.f_frsize));
    let seen = format!("{}: {} of {} free", path.display(), bytes(free), bytes(size));
    // A new file of a name that nobody can guess: others may write here too.
    if let Err(e) = tempfile::NamedTempFile::new_in(&path).and_then(|mut f| f.write_all(&[0; 4096])) {
        let fix = format!("let this user write to {}: chmod 1777", path.display());
        return vec![Observation::fail(format!("{seen}, and a file cannot be written there: {e}"), fix)];
    }
    vec![if free < SHM_OF_CONTAINERS / 2 {
        Observation::fail(format!("{seen}: too little for NCCL and Ringwatch"), fix)
    } else if size <= SHM_OF_CONTAINERS {
        Observation::warn(
            format!("{seen}: the default of containers, and too little for NCCL with several GPUs"),
            fix,
        )
    } else {
        Observation::pass(seen)
    }]
}

fn memlock(host: &Host) -> Vec<Observation> {
    let Some(limit) = host.limits.memlock_bytes else {
        return vec![Observation::pass("RLIMIT_MEMLOCK is unlimited")];
    };
    let devices = host.rdma_devices();
    let seen = format!("RLIMIT_MEMLOCK is {}", bytes(limit));
    if host.limits.may_lock {
        return vec![Observation::pass(format!(
            "{seen}, and does not count for this process (CAP_IPC_LOCK)"
        ))];
    }
    vec![if devices.is_empty() {
        Observation::pass(format!("{seen}; without an RDMA device NCCL locks no memory"))
    } else {
        let why = format!("{seen}, and RDMA ({}) has to lock all its buffers", devices.join(", "));
        let fix = "ulimit -l unlimited; LimitMEMLOCK=infinity in the service; --ulimit memlock=-1 in docker";
        match limit {
            n if n >= LOCKED_ENOUGH => Observation::pass(seen),
            n if n >= LOCKED_MIN => Observation::warn(why, fix),
            _ => Observation::fail(why, fix),
        }
    }]
}

fn open_files(host: &Host) -> Vec<Observation> {
    let Some(limit) = host.limits.files else { return vec![Observation::pass("RLIMIT_NOFILE is unlimited")] };
    let seen = format!("RLIMIT_NOFILE (hard) is {limit}");
    vec![if limit < FILES_MIN {
        let fix = "ulimit -Hn 1048576; LimitNOFILE=1048576 in the service; --ulimit nofile=1048576 in docker";
        Observation::warn(format!("{seen}: sockets of a large job take more"), fix)
    } else {
        Observation::pass(seen)
    }]
}

fn file_size(host: &Host) -> Vec<Observation> {
    let Some(limit) = host.limits.file_bytes else {
        return vec![Observation::pass("RLIMIT_FSIZE is unlimited")];
    };
    let seen = format!("RLIMIT_FSIZE is {}", bytes(limit));
    let fix = "ulimit -f unlimited; LimitFSIZE=infinity in the service";
    vec![if limit < FILE_MIN {
        let why =
            format!("{seen}: the kernel ends a process (SIGXFSZ) that makes a larger file of shared memory");
        Observation::fail(why, fix)
    } else {
        Observation::warn(format!("{seen}: checkpoints may be larger"), fix)
    }]
}

/// The limit in a file of a control group; absent where there is none.
fn limit(host: &Host, paths: &[&str]) -> Option<u64> {
    // Version 1 writes a number near 2^63 where there is no limit.
    paths.iter().find_map(|p| host.text(p)?.parse().ok()).filter(|n| *n < 1 << 60)
}

fn container(host: &Host) -> Vec<Observation> {
    let memory = limit(host, &["sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes"]);
    let tasks = limit(host, &["sys/fs/cgroup/pids.max", "sys/fs/cgroup/pids/pids.max"]);
    let mut all = Vec::new();
    if let Some(n) = tasks.filter(|n| *n < TASKS_MIN) {
        let fix = "--pids-limit=-1 in docker; TasksMax=infinity in the service; podPidsLimit of the kubelet";
        all.push(Observation::warn(
            format!("the control group has room for {n} threads; a rank has some hundred"),
            fix,
        ));
    }
    if all.is_empty() {
        let of = |n: Option<u64>, text: &dyn Fn(u64) -> String| n.map_or("no limit".to_owned(), text);
        all.push(Observation::pass(format!(
            "memory: {}; threads: {}",
            of(memory, &|n| bytes(n)),
            of(tasks, &|n| n.to_string())
        )));
    }
    all
}

fn clock_source(host: &Host) -> Vec<Observation> {
    let path = "sys/devices/system/clocksource/clocksource0/current_clocksource";
    let Some(source) = host.text(path) else {
        return vec![Observation::skip(format!("/{path} cannot be read"))];
    };
    vec![if FAST_CLOCKS.contains(&source.as_str()) {
        Observation::pass(source)
    } else {
        let seen = format!("{source}: each reading of the clock is a system call of a microsecond or more");
        Observation::warn(seen, "boot with clocksource=tsc tsc=reliable if the hardware's TSC is invariant")
    }]
}

/// The kernel's clock: true if nothing has set it, and the error that it knows of.
fn kernel_clock() -> Option<(bool, i64)> {
    #![expect(unsafe_code, reason = "adjtimex has no safe name in the packages that are here")]
    // SAFETY: all zeros is a valid timex, and asks for nothing to be changed.
    let mut t: libc::timex = unsafe { std::mem::zeroed() };
    // SAFETY: a place for one timex.
    let state = unsafe { libc::adjtimex(&mut t) };
    (state >= 0).then_some((state == libc::TIME_ERROR || t.status & libc::STA_UNSYNC != 0, t.esterror))
}

fn time(host: &Host) -> Vec<Observation> {
    let now = host.unix_ms();
    // A clock cannot be before the moment at which this program was written to the disk.
    let written = host.program.as_deref().and_then(written_ms).unwrap_or(0);
    if now.saturating_add(60_000) < written {
        let seen =
            format!("the clock is {} s before the date of ringwatch's own file", (written - now) / 1000);
        return vec![Observation::fail(seen, "set the clock: chronyc makestep, or timedatectl set-ntp true")];
    }
    if !host.is_here() {
        return vec![Observation::skip("the clock is not this host's")];
    }
    vec![match kernel_clock() {
        None => Observation::skip("the kernel does not answer (adjtimex)"),
        Some((true, _)) => Observation::warn(
            "nothing keeps the clock in time (adjtimex: not synchronized): times of two hosts cannot be compared",
            "start chrony or systemd-timesyncd; in a container or virtual machine, on the host as well",
        ),
        Some((false, off_us)) if off_us > OFF_MAX_US => Observation::warn(
            format!("the clock may be off by {:.3} s (adjtimex)", off_us as f64 / 1e6),
            "see chronyc tracking, or timedatectl timesync-status",
        ),
        Some((false, off_us)) => {
            Observation::pass(format!("synchronized, off by at most {:.3} ms", off_us as f64 / 1e3))
        }
    }]
}

fn written_ms(path: &Path) -> Option<u64> {
    let time = std::fs::metadata(path).ok()?.modified().ok()?.duration_since(UNIX_EPOCH).ok()?;
    u64::try_from(time.as_millis()).ok()
}
