//! The shared libraries that a job on this host would load: NCCL's, and those of PyTorch.

use super::elf;
use super::host::Host;
use super::process;
use crate::bench::nccl::{self, FILE_NAME as NCCL, IN_WHEEL};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Where PyTorch's wheel has the library that uses NCCL.
const TORCH: &str = "torch/lib/libtorch_cuda.so";
/// The dynamic linkers of the architectures that NCCL is built for.
const LINKERS: &[&str] = &["/lib64/ld-linux-x86-64.so.2", "/lib/ld-linux-aarch64.so.1"];
/// The linker's own directories, searched last.
const DEFAULT_DIRECTORIES: &[&str] = &[
    "/lib64",
    "/usr/lib64",
    "/lib/x86_64-linux-gnu",
    "/usr/lib/x86_64-linux-gnu",
    "/lib/aarch64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/lib",
    "/usr/lib",
];
/// The linker may take so long to list what a library needs.
const LISTING: Duration = Duration::from_secs(8);

/// A file of libnccl.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Library {
    /// The file.
    pub(super) path: PathBuf,
    /// The facts that it holds about itself, or why it cannot be read.
    pub(super) facts: Result<elf::Nccl, String>,
}

impl Library {
    fn read(path: &Path) -> Self {
        Library { path: path.to_owned(), facts: elf::nccl(path) }
    }

    /// Its version, `-` where it is not known.
    pub(super) fn version(&self) -> &str {
        self.facts.as_ref().ok().and_then(|f| f.version.as_deref()).unwrap_or("-")
    }
}

/// Every NCCL that a job on this host could load.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Libraries {
    /// The one that a program gets which asks for it by name.
    pub(super) by_name: Option<Library>,
    /// The one that PyTorch gets, with the file of PyTorch that asks for it.
    pub(super) of_torch: Option<(PathBuf, Library)>,
    /// Others in packages of Python.
    pub(super) others: Vec<Library>,
}

impl Libraries {
    /// Searches the host.
    pub(super) fn find(host: &Host) -> Self {
        let wheels = packages(host);
        let by_name = by_name(host).map(|p| Library::read(&p));
        let torch = wheels.iter().map(|p| p.join(TORCH)).find(|p| p.is_file());
        let of_torch = torch.and_then(|torch| {
            let needed = needed_by(&torch);
            let path = needed.iter().find(|(name, _)| name == NCCL).and_then(|(_, path)| path.clone())?;
            Some((torch, Library::read(&path)))
        });
        let mut known: BTreeSet<PathBuf> = [&by_name, &of_torch.as_ref().map(|(_, l)| l.clone())]
            .into_iter()
            .flatten()
            .map(|l| real(&l.path))
            .collect();
        let in_wheels = wheels.iter().map(|p| p.join(IN_WHEEL)).filter(|p| p.is_file());
        let others = in_wheels.filter(|p| known.insert(real(p))).map(|p| Library::read(&p)).collect();
        Libraries { by_name, of_torch, others }
    }

    /// The one that a job most likely loads: PyTorch's, else the one by name, else a wheel's.
    pub(super) fn of_job(&self) -> Option<&Library> {
        self.of_torch.as_ref().map(|(_, l)| l).or(self.by_name.as_ref()).or(self.others.first())
    }

    /// All of them.
    pub(super) fn all(&self) -> impl Iterator<Item = &Library> {
        self.by_name.iter().chain(self.of_torch.iter().map(|(_, l)| l)).chain(&self.others)
    }
}

fn real(path: &Path) -> PathBuf {
    std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned())
}

/// The file that the dynamic linker gives to a program that asks for NCCL by name.
fn by_name(host: &Host) -> Option<PathBuf> {
    let of_list = |name: &str| host.variable(name).map(str::to_owned).unwrap_or_default();
    let preload = of_list("LD_PRELOAD");
    let preloaded = preload.split([':', ' ']).map(Path::new);
    let is_nccl = |p: &Path| p.file_name().is_some_and(|n| n.to_string_lossy().starts_with("libnccl.so"));
    if let Some(path) = preloaded.filter(|p| p.is_absolute() && is_nccl(p)).find(|p| p.is_file()) {
        return Some(path.to_owned());
    }
    found(host, NCCL)
}

/// The file that the dynamic linker finds for a name: in LD_LIBRARY_PATH, in its cache, in its own directories.
pub(super) fn found(host: &Host, name: &str) -> Option<PathBuf> {
    let path = host.variable("LD_LIBRARY_PATH").unwrap_or_default();
    let own = path.split([':', ';']).filter(|d| !d.is_empty()).map(|d| Path::new(d).join(name));
    own.into_iter()
        .find(|p| p.is_file())
        .or_else(|| cached(host, name))
        .or_else(|| DEFAULT_DIRECTORIES.iter().map(|d| host.path(d).join(name)).find(|p| p.is_file()))
}

/// A library's entry in the dynamic linker's cache, as `ldconfig` lists it.
fn cached(host: &Host, name: &str) -> Option<PathBuf> {
    if !host.is_here() {
        return None;
    }
    let program = ["/sbin/ldconfig", "/usr/sbin/ldconfig"].into_iter().find(|p| Path::new(p).is_file())?;
    let text = output(Command::new(program).arg("-p"))?;
    let line = text.lines().find(|l| l.split_whitespace().next() == Some(name))?;
    Some(PathBuf::from(line.split_once("=> ")?.1.trim()))
}

/// Directories of Python's packages in which wheels may be, those of the active environment first.
pub(super) fn packages(host: &Host) -> Vec<PathBuf> {
    let mut prefixes: Vec<PathBuf> =
        ["VIRTUAL_ENV", "CONDA_PREFIX"].iter().filter_map(|n| host.variable(n)).map(PathBuf::from).collect();
    let path = host.variable("PATH").unwrap_or_default();
    let python = std::env::split_paths(path).find(|d| d.join("python3").is_file());
    prefixes.extend(python.as_deref().and_then(Path::parent).map(Path::to_owned));
    prefixes.extend(["usr", "usr/local"].map(|p| host.path(p)));
    prefixes.extend(host.variable("HOME").map(|h| Path::new(h).join(".local")));
    let mut known = BTreeSet::new();
    let all = prefixes.iter().flat_map(|p| nccl::packages(p));
    all.filter(|d| known.insert(real(d))).collect()
}

/// The libraries that a library needs and the file that the dynamic linker gives for each; absent where it finds none.
/// The linker itself is asked, so that its rules need no copy here; it runs no code of the library.
pub(super) fn needed_by(library: &Path) -> Vec<(String, Option<PathBuf>)> {
    let Some(linker) = LINKERS.iter().find(|l| Path::new(l).is_file()) else { return Vec::new() };
    let Some(text) = output(Command::new(linker).arg("--list").arg(library)) else { return Vec::new() };
    text.lines().filter_map(needed).collect()
}

/// `libnccl.so.2 => /usr/lib/libnccl.so.2 (0x00007f0000000000)` or `libx.so => not found`.
fn needed(line: &str) -> Option<(String, Option<PathBuf>)> {
    let (name, rest) = line.trim().split_once(" => ")?;
    let path = rest.rsplit_once(" (").map_or(rest, |(path, _)| path);
    Some((name.to_owned(), (path != "not found").then(|| PathBuf::from(path))))
}

/// The output of a program of the system, if it ends in time. A failure of its own is no matter: what it printed
/// counts.
fn output(command: &mut Command) -> Option<String> {
    process::run(command, LISTING).ok().map(|ended| ended.out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_linkers_list_is_read_as_it_is_written() {
        let found = needed("\tlibnccl.so.2 => /opt/a b/libnccl.so.2 (0x00007f00aa000000)");
        assert_eq!(found, Some(("libnccl.so.2".to_owned(), Some(PathBuf::from("/opt/a b/libnccl.so.2")))));
        assert_eq!(needed("\tlibx.so => not found"), Some(("libx.so".to_owned(), None)));
        assert_eq!(needed("\tlinux-vdso.so.1 (0x00007ffd5b7f2000)"), None);
    }

    #[test]
    fn the_directory_that_is_named_first_is_searched_first() {
        let dir = tempfile::tempdir().unwrap();
        let [first, second] = ["first", "second"].map(|d| dir.path().join(d));
        for d in [&first, &second] {
            std::fs::create_dir(d).unwrap();
            std::fs::write(d.join(NCCL), "no library").unwrap();
        }
        let path = format!("{}:{}", first.display(), second.display());
        let mut host = Host { root: dir.path().to_owned(), ..Host::default() };
        host.variables.insert("LD_LIBRARY_PATH".to_owned(), path);
        assert_eq!(by_name(&host), Some(first.join(NCCL)));
        host.variables.insert("LD_PRELOAD".to_owned(), second.join(NCCL).display().to_string());
        assert_eq!(by_name(&host), Some(second.join(NCCL)));
        let found = Libraries::find(&host);
        assert!(found.of_job().unwrap().facts.is_err(), "it is no library");
        assert_eq!(found.of_job().unwrap().version(), "-");
    }
}
