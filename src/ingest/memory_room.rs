//! How much memory this process may still take before the kernel kills a process of its control group.

use std::fs;
use std::path::{Path, PathBuf};

/// Where control groups are mounted.
const MOUNT: &str = "/sys/fs/cgroup";

/// The files of one version of control groups.
struct Names {
    limit: &'static str,
    usage: &'static str,
    /// The line of `memory.stat` with the cache that the kernel drops first, in bytes.
    reclaimable: &'static str,
}

const VERSION_1: Names = Names {
    limit: "memory.limit_in_bytes",
    usage: "memory.usage_in_bytes",
    reclaimable: "total_inactive_file ",
};
const VERSION_2: Names =
    Names { limit: "memory.max", usage: "memory.current", reclaimable: "inactive_file " };

/// The room in bytes; absent where no control group limits it.
pub(super) fn bytes() -> Option<u64> {
    of(&fs::read_to_string("/proc/self/cgroup").ok()?, Path::new(MOUNT))
}

/// The least room of a process's group and the groups above it, by the text of its `/proc/PID/cgroup`.
fn of(groups: &str, mount: &Path) -> Option<u64> {
    let room = |line: &str| {
        let (_, rest) = line.split_once(':')?;
        let (controllers, path) = rest.split_once(':')?;
        let (names, base) = match controllers.split(',').any(|c| c == "memory") {
            true => (VERSION_1, mount.join("memory")),
            false if controllers.is_empty() => (VERSION_2, mount.to_owned()),
            false => return None,
        };
        let own = base.join(path.trim_start_matches('/'));
        // A container may see its own group as the root of the mount, and name it by the host's path.
        let own: PathBuf = if own.is_dir() { own } else { base.clone() };
        let chain = own.ancestors().take_while(|dir| dir.starts_with(&base));
        chain.filter_map(|dir| room_of(dir, &names)).min()
    };
    groups.lines().filter_map(room).min()
}

fn room_of(dir: &Path, names: &Names) -> Option<u64> {
    let text = |name: &str| fs::read_to_string(dir.join(name)).ok();
    // `max` is no number.
    let limit: u64 = text(names.limit)?.trim().parse().ok()?;
    let usage: u64 = text(names.usage)?.trim().parse().ok()?;
    let stat = text("memory.stat").unwrap_or_default();
    let line = stat.lines().find_map(|l| l.strip_prefix(names.reclaimable));
    let reclaimable = line.and_then(|n| n.trim().parse::<u64>().ok()).unwrap_or(0);
    // Version 1 writes a number of almost 2^63 where there is no limit.
    (limit < 1 << 60).then(|| limit.saturating_sub(usage.saturating_sub(reclaimable)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(dir: &Path, names: &Names, limit: &str, usage: u64, cache: u64) {
        fs::create_dir_all(dir).expect("a directory");
        let write = |name: &str, text: String| fs::write(dir.join(name), text).expect("written");
        write(names.limit, format!("{limit}\n"));
        write(names.usage, format!("{usage}\n"));
        write("memory.stat", format!("anon 1\n{}{cache}\n", names.reclaimable));
    }

    #[test]
    fn the_narrowest_group_above_a_process_decides() {
        let mount = tempfile::tempdir().expect("a directory");
        group(mount.path(), &VERSION_2, "max", 900, 0);
        group(&mount.path().join("a"), &VERSION_2, "1000", 700, 100);
        group(&mount.path().join("a/b"), &VERSION_2, "max", 50, 0);
        group(&mount.path().join("a/c"), &VERSION_2, "300", 250, 0);
        let room = |text| of(text, mount.path());
        assert_eq!(room("0::/a/b\n"), Some(400));
        assert_eq!(room("0::/a/c\n"), Some(50));
        assert_eq!(room("0::/\n"), None, "without a limit");
        assert_eq!(room("0::/not/here\n"), None, "a container's root");
        assert_eq!(room("1:cpu:/a\n"), None, "another controller");
        assert_eq!(room("garbage"), None);
    }

    #[test]
    fn version_1_is_read_by_its_own_names() {
        let mount = tempfile::tempdir().expect("a directory");
        let none = 0x7fff_ffff_ffff_f000_u64.to_string();
        group(&mount.path().join("memory"), &VERSION_1, &none, 900, 0);
        group(&mount.path().join("memory/a"), &VERSION_1, "1000", 990, 20);
        assert_eq!(of("4:memory:/a\n0::/\n", mount.path()), Some(30));
        assert_eq!(of("4:memory:/\n", mount.path()), None);
    }
}
