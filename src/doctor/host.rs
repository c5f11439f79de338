//! The host that checks read: below which root, with which environment, within which limits.

use crate::ingest::hardware::{Inventory, inventory};
use crate::ingest::unix_ns;
use rustix::process::{Resource, getrlimit};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::channel;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// More than this of a file of the kernel is not read, in bytes.
const READ_MAX: u64 = 1 << 20;
/// Beginnings of variables that checks read. Others may hold secrets and are not even kept.
const READ: &[&str] = &["NCCL_", "TORCH_NCCL_", "RINGWATCH_", "CUDA_", "LD_", "OMPI_", "FI_", "UCX_"];
/// Variables that are read by name: where Python's packages and a user's NCCL settings are.
const READ_NAMES: &[&str] = &["HOME", "PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "WORLD_SIZE", "SLURM_NTASKS"];

/// Limits of this process. Absent is unlimited.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Limits {
    /// Bytes that it may lock in memory, soft.
    pub memlock_bytes: Option<u64>,
    /// Files that it may have open, hard: NCCL raises the soft limit.
    pub files: Option<u64>,
    /// Bytes of the largest file that it may write, soft.
    pub file_bytes: Option<u64>,
    /// True if the process has CAP_IPC_LOCK, for which the first limit does not count.
    pub may_lock: bool,
}

/// CAP_IPC_LOCK's bit.
const IPC_LOCK: u32 = 14;

/// True if this process has CAP_IPC_LOCK, by the line `CapEff` of its status.
fn may_lock() -> bool {
    let status = text(Path::new("/proc/self/status")).unwrap_or_default();
    let effective = status.lines().find_map(|l| l.strip_prefix("CapEff:"));
    effective.and_then(|c| u64::from_str_radix(c.trim(), 16).ok()).is_some_and(|c| c >> IPC_LOCK & 1 == 1)
}

impl Limits {
    fn of_this_process() -> Self {
        Limits {
            memlock_bytes: getrlimit(Resource::Memlock).current,
            files: getrlimit(Resource::Nofile).maximum,
            file_bytes: getrlimit(Resource::Fsize).current,
            may_lock: may_lock(),
        }
    }
}

/// A network interface with an address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Interface {
    /// Its name.
    pub name: String,
    /// Its first address.
    pub address: String,
    /// True if it is up and has a carrier.
    pub is_up: bool,
    /// True for the loopback.
    pub is_loopback: bool,
}

/// The host that checks read.
#[derive(Debug, Clone, Default)]
pub struct Host {
    /// Where /proc, /sys, /dev and /etc are.
    pub root: PathBuf,
    /// The environment, as far as checks may see it.
    pub variables: BTreeMap<String, String>,
    /// Limits of this process.
    pub limits: Limits,
    /// Interfaces with an address, in the kernel's order.
    pub interfaces: Vec<Interface>,
    /// NVML's library, where it is not `libnvidia-ml.so.1` on the loader's path.
    pub nvml: Option<PathBuf>,
    /// CUDA's library, where it is not `libcuda.so.1` on the loader's path.
    pub cuda: Option<PathBuf>,
    /// The settings of the agent, where they are not the default's.
    pub config: Option<PathBuf>,
    /// This program, which plays a recorded job on the plugin.
    pub program: Option<PathBuf>,
    /// The driver's answer; asked once, since NVML does not bear to be opened and closed by several threads.
    pub(super) gpus: OnceLock<Result<Inventory, String>>,
}

impl Host {
    /// This host, as this process sees it.
    #[must_use]
    pub fn here() -> Self {
        let kept = |name: &str| READ.iter().any(|b| name.starts_with(b)) || READ_NAMES.contains(&name);
        let variables = std::env::vars_os()
            .filter_map(|(k, v)| Some((k.into_string().ok()?, v.to_string_lossy().into_owned())))
            .filter(|(name, _)| kept(name))
            .collect();
        Host {
            root: PathBuf::from("/"),
            variables,
            limits: Limits::of_this_process(),
            interfaces: interfaces(),
            program: std::env::current_exe().ok(),
            ..Host::default()
        }
    }

    /// True if this is the machine that the process runs on, and no copy of a part of one.
    #[must_use]
    pub fn is_here(&self) -> bool {
        self.root == Path::new("/")
    }

    /// A file below the root.
    #[must_use]
    pub fn path(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    /// A file below the root as text, without the space around it.
    #[must_use]
    pub fn text(&self, path: &str) -> Option<String> {
        text(&self.path(path))
    }

    /// The entries of a directory below the root, sorted by name.
    #[must_use]
    pub fn entries(&self, path: &str) -> Vec<(String, PathBuf)> {
        let Ok(all) = std::fs::read_dir(self.path(path)) else { return Vec::new() };
        let mut all: Vec<_> =
            all.flatten().map(|e| (e.file_name().to_string_lossy().into_owned(), e.path())).collect();
        all.sort();
        all
    }

    /// A variable that is set and not empty.
    #[must_use]
    pub fn variable(&self, name: &str) -> Option<&str> {
        self.variables.get(name).map(String::as_str).filter(|v| !v.is_empty())
    }

    /// The PCI addresses of NVIDIA's GPUs, whether a driver has them or not.
    #[must_use]
    pub fn gpu_addresses(&self) -> Vec<String> {
        let is_gpu = |dir: &Path| {
            text(&dir.join("vendor")).as_deref() == Some("0x10de")
                && text(&dir.join("class")).is_some_and(|c| c.starts_with("0x03"))
        };
        let all = self.entries("sys/bus/pci/devices").into_iter();
        all.filter(|(_, dir)| is_gpu(dir)).map(|(name, _)| name).collect()
    }

    /// The addresses that the driver has and whose device this process can reach: a container sees all GPUs of its
    /// host on PCI.
    #[must_use]
    pub fn own_gpu_addresses(&self) -> Vec<String> {
        let is_own = |address: &String| {
            let driver = std::fs::read_link(self.path(&format!("sys/bus/pci/devices/{address}/driver"))).ok();
            let facts = self.text(&format!("proc/driver/nvidia/gpus/{address}/information"));
            let minor =
                facts.as_deref().and_then(|t| t.lines().find_map(|l| l.strip_prefix("Device Minor:")));
            driver.is_some_and(|d| d.ends_with("nvidia"))
                && minor.is_some_and(|m| self.path(&format!("dev/nvidia{}", m.trim())).exists())
        };
        self.gpu_addresses().into_iter().filter(is_own).collect()
    }

    /// True inside a container, as its runtime marks it.
    #[must_use]
    pub fn is_container(&self) -> bool {
        let marks = [".dockerenv", "run/.containerenv", "var/run/secrets/kubernetes.io"];
        marks.iter().any(|m| self.path(m).exists())
    }

    /// The answer of the GPUs' driver, or why there is none.
    ///
    /// # Errors
    /// Why there is no driver or no GPU.
    pub fn gpus(&self) -> Result<&Inventory, &str> {
        let asked = self.gpus.get_or_init(|| inventory(self.nvml.as_ref()).map_err(|e| e.to_string()));
        asked.as_ref().map_err(String::as_str)
    }

    /// The same, absent also where the driver does not answer in time.
    #[must_use]
    pub fn gpus_within(self: &Arc<Self>, limit: Duration) -> Option<Inventory> {
        let host = self.clone();
        within(limit, move || host.gpus().ok().cloned()).flatten()
    }

    /// The names of RDMA devices that this process can reach: a container sees those of its host as well.
    #[must_use]
    pub fn rdma_devices(&self) -> Vec<String> {
        if !self.entries("dev/infiniband").iter().any(|(name, _)| name.starts_with("uverbs")) {
            return Vec::new();
        }
        self.entries("sys/class/infiniband").into_iter().map(|(name, _)| name).collect()
    }

    /// The wall clock, Unix time in ms.
    #[must_use]
    pub fn unix_ms(&self) -> u64 {
        unix_ns() / 1_000_000
    }
}

/// A file as text, without the space around it.
pub(super) fn text(path: &Path) -> Option<String> {
    // A pipe in a file's place must not hold up who reads it.
    let file = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path).ok()?;
    if !file.metadata().ok()?.is_file() {
        return None;
    }
    let mut bytes = Vec::new();
    file.take(READ_MAX).read_to_end(&mut bytes).ok()?;
    Some(String::from_utf8_lossy(&bytes).trim().to_owned())
}

/// Does something on a thread of its own, which is left alone where it takes too long.
pub(super) fn within<T: Send + 'static>(
    limit: Duration,
    work: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let (send, receive) = channel();
    let spawned = std::thread::Builder::new().name("limited".to_owned()).spawn(move || {
        // Nobody receives what comes after the limit.
        send.send(work()).ok();
    });
    spawned.ok().and_then(|_| receive.recv_timeout(limit).ok())
}

/// Bytes as people write them.
pub(super) fn bytes(n: u64) -> String {
    const UNITS: &[(u64, &str)] = &[(1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
    match UNITS.iter().find(|(unit, _)| n >= *unit) {
        Some((unit, name)) if n.is_multiple_of(*unit) => format!("{} {name}", n / unit),
        Some((unit, name)) => format!("{:.1} {name}", n as f64 / *unit as f64),
        None => format!("{n} B"),
    }
}

/// The interfaces that have an address, as NCCL asks for them.
fn interfaces() -> Vec<Interface> {
    #![expect(unsafe_code, reason = "getifaddrs has no safe name in the packages that are here")]
    let mut first = std::ptr::null_mut();
    // SAFETY: a place for the head of a list, which is freed below.
    if unsafe { libc::getifaddrs(&mut first) } != 0 {
        return Vec::new();
    }
    let mut all: Vec<Interface> = Vec::new();
    let mut at = first;
    // SAFETY: `at` is NULL or an entry of the list.
    while let Some(entry) = unsafe { at.as_ref() } {
        at = entry.ifa_next;
        // SAFETY: the name is a C string of the list; the address is NULL or has its family in front.
        let (name, address) = unsafe { (std::ffi::CStr::from_ptr(entry.ifa_name), address(entry.ifa_addr)) };
        let (Some(address), name) = (address, name.to_string_lossy().into_owned()) else { continue };
        if all.iter().any(|i| i.name == name) {
            continue;
        }
        let has = |flag: libc::c_int| entry.ifa_flags & flag.cast_unsigned() != 0;
        all.push(Interface {
            name,
            address,
            is_up: has(libc::IFF_UP) && has(libc::IFF_RUNNING),
            is_loopback: has(libc::IFF_LOOPBACK),
        });
    }
    // SAFETY: the list is freed once, and nothing of it is kept.
    unsafe { libc::freeifaddrs(first) };
    all
}

/// An IP address as text.
///
/// # Safety
/// `at` is NULL or a socket address of the size that its family says.
#[expect(unsafe_code, reason = "reads what getifaddrs returned")]
unsafe fn address(at: *const libc::sockaddr) -> Option<String> {
    // SAFETY: as the caller says.
    let family = i32::from(unsafe { at.as_ref() }?.sa_family);
    match family {
        libc::AF_INET => {
            // SAFETY: as the caller says; the read needs no alignment.
            let a = unsafe { at.cast::<libc::sockaddr_in>().read_unaligned() };
            Some(std::net::Ipv4Addr::from(a.sin_addr.s_addr.to_ne_bytes()).to_string())
        }
        libc::AF_INET6 => {
            // SAFETY: as above.
            let a = unsafe { at.cast::<libc::sockaddr_in6>().read_unaligned() };
            Some(std::net::Ipv6Addr::from(a.sin6_addr.s6_addr).to_string())
        }
        _ => None,
    }
}
