//! Does what a probe is asked: the only code that touches what other users can block.

use super::message::{Bytes, FileFacts, OpenedSegment, Outcome, Task};
use crate::ingest::cgroup::Groups;
use crate::ingest::directory::{Directory, Failure, FileId, Folder, is_tmpfs};
use crate::ingest::life::Identity;
use crate::ingest::lock;
use crate::ingest::pid_namespaces::PidNamespaces;
use crate::ingest::process_reading::ProcessReader;
use crate::ingest::reap::{Kept, reap};
use crate::ingest::rights::Watched;
use crate::ingest::shm::Shm;
use crate::ingest::{stacks, threads};
use rustix::fs::{AtFlags, Mode, OFlags, Stat};
use rustix::io::Errno;
use std::collections::HashMap;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A process that nobody asked for so long is forgotten, in ns.
const FORGOTTEN_NS: u64 = 60_000_000_000;
/// The longest list of control groups that is read, in bytes.
const CONTROL_GROUPS_MAX: u64 = 64 << 10;
/// Processes of the host that are listed at most.
const PROCESSES_MAX: usize = 65_536;

/// The outcome of a task, and descriptors.
pub(in crate::ingest) type Answered = (Outcome, Vec<OwnedFd>);

/// The state between one task and the next.
#[derive(Debug, Default)]
pub(in crate::ingest) struct Answerer {
    groups: Groups,
    namespaces: PidNamespaces,
    /// Processes that are read again and again, by pid and start time, and when they were read last.
    readers: HashMap<(u32, u64), (ProcessReader, u64)>,
}

impl Answerer {
    /// Does one task. Where it is about files of several users, `step` is called with the user before each file.
    pub(in crate::ingest) fn answer(
        &mut self,
        task: &Task,
        fd: Option<OwnedFd>,
        now_ns: u64,
        step: &mut dyn FnMut(u32),
    ) -> Answered {
        self.attempt(task, fd, now_ns, step)
            .unwrap_or_else(|(why, owner)| (Outcome::Failed(why, owner), vec![]))
    }

    fn attempt(
        &mut self,
        task: &Task,
        fd: Option<OwnedFd>,
        now_ns: u64,
        step: &mut dyn FnMut(u32),
    ) -> Result<Answered, (Failure, Option<u32>)> {
        let of_nobody = |why: Failure| (why, None);
        let directory = |folder: &Folder| {
            let fd = fd.as_ref().ok_or(Errno::BADF).and_then(|fd| rustix::io::fcntl_dupfd_cloexec(fd, 0));
            Ok(Directory::of(fd.map_err(|e| (Failure::from(e), None))?, folder.clone()))
        };
        Ok(match task {
            Task::OpenUsers { container, known, turn } => {
                let shm = match (container, &fd) {
                    (Some(path), Some(fd)) => {
                        let own = rustix::io::fcntl_dupfd_cloexec(fd, 0).map_err(|e| of_nobody(e.into()))?;
                        let id = FileId::of(&rustix::fs::fstat(&own).map_err(|e| of_nobody(e.into()))?);
                        Shm::of_container(own, PathBuf::from(&path.0), id)
                    }
                    _ => Shm::own().map_err(of_nobody)?,
                };
                let (users, opened) = shm.users(known, *turn).map_err(of_nobody)?;
                (Outcome::Users(users), opened.into_iter().map(OwnedFd::from).collect())
            }
            Task::OpenNamed { path } => {
                let named = Directory::named(Path::new(&path.0)).map_err(of_nobody)?;
                (Outcome::Folder(named.folder().clone()), vec![named.into()])
            }
            Task::OpenRoot { pid, namespace } => {
                let (fd, id) = open_root(*pid, *namespace).map_err(of_nobody)?;
                (Outcome::Directory(id), vec![fd])
            }
            Task::List { folder } => {
                let directory = directory(folder)?;
                let (names, cut) = directory.segments().map_err(|e| of_nobody(e.into()))?;
                let owner = |name: &OsString| folder.owner.or_else(|| directory.owner_of(name));
                (Outcome::Names(names.iter().map(|n| (Bytes::from(n), owner(n))).collect(), cut), vec![])
            }
            Task::OpenSegment { folder, name } => self.open_segment(&directory(folder)?, name)?,
            Task::Reap { folder, keep_bytes, keep_for_s, spared } => {
                let kept = Kept { bytes: *keep_bytes, time: keep_for_s.map(Duration::from_secs), spared };
                let removed = reap(&directory(folder)?, &kept, &mut self.namespaces, step);
                (Outcome::Removed(removed.iter().map(Bytes::from).collect()), vec![])
            }
            Task::RequestDetail { folder, name, file, words } => {
                let opened = directory(folder)?.open_to_write(&name.0, *file).map_err(of_nobody)?;
                for (word, value) in words {
                    let written = opened.write_all_at(&value.to_le_bytes(), word * 8);
                    written.map_err(|e| of_nobody(Errno::from_io_error(&e).unwrap_or(Errno::IO).into()))?;
                }
                (Outcome::Done, vec![])
            }
            Task::ListProcesses => {
                (Outcome::Processes(processes().map_err(|e| of_nobody(e.into()))?), vec![])
            }
            Task::FindNamespace { pid } => {
                (Outcome::Namespace(namespace(*pid).map_err(|e| of_nobody(e.into()))?), vec![])
            }
            Task::ReadProcess { pid, start_ticks } => {
                let reading = self.read_process(*pid, *start_ticks, now_ns);
                (Outcome::Reading(reading.ok_or_else(|| of_nobody(Errno::MFILE.into()))?), vec![])
            }
            Task::FindThreads { pid } => (Outcome::Texts(threads::places(*pid)), vec![]),
            #[cfg(test)]
            Task::Sleep { ms } => {
                std::thread::sleep(Duration::from_millis(*ms));
                (Outcome::Done, vec![])
            }
            Task::ReadStack { pid, owner, kind } => {
                let watched = Watched { pid: *pid, owner: *owner };
                (Outcome::Texts(stacks::read(*kind, watched)), vec![])
            }
        })
    }

    fn open_segment(
        &mut self,
        directory: &Directory,
        name: &Bytes,
    ) -> Result<Answered, (Failure, Option<u32>)> {
        let (file, stat) = directory.open(&name.0).map_err(|why| (why, directory.owner_of(&name.0)))?;
        let owner = stat.st_uid;
        let of_owner = |why: Failure| (why, Some(owner));
        let lock = lock::holder(&file);
        let found = match Identity::read(&file) {
            Some(identity) => identity.find_process(owner, lock, &mut self.namespaces).map_err(of_owner)?,
            None => None,
        };
        let (life, end) = found.unzip();
        let control_groups = match life {
            Some(super::FoundLife::Process(pid, _)) => control_groups(pid),
            _ => String::new(),
        };
        let facts = facts(&file, &stat).map_err(|e| of_owner(e.into()))?;
        let mut fds = vec![OwnedFd::from(file)];
        fds.extend(end.flatten());
        Ok((Outcome::Segment(OpenedSegment { facts, lock, life, control_groups }), fds))
    }

    fn read_process(
        &mut self,
        pid: u32,
        start_ticks: u64,
        now_ns: u64,
    ) -> Option<crate::ingest::process_reading::Reading> {
        if !self.readers.contains_key(&(pid, start_ticks)) {
            self.readers.retain(|_, (_, read_ns)| now_ns.saturating_sub(*read_ns) < FORGOTTEN_NS);
        }
        let new = || (ProcessReader::new(pid, start_ticks), now_ns);
        let (reader, read_ns) = self.readers.entry((pid, start_ticks)).or_insert_with(new);
        *read_ns = now_ns;
        reader.read(now_ns, &mut self.groups)
    }
}

#[expect(clippy::useless_conversion, reason = "the types differ by architecture")]
pub(in crate::ingest) fn facts(file: &File, stat: &Stat) -> Result<FileFacts, Errno> {
    let seconds = u64::try_from(stat.st_mtime).unwrap_or(0);
    Ok(FileFacts {
        id: FileId::of(stat),
        owner: stat.st_uid,
        bytes: u64::try_from(stat.st_size).unwrap_or(0),
        blocks: i64::from(stat.st_blocks),
        written_ns: seconds.saturating_mul(1_000_000_000).saturating_add(u64::from(stat.st_mtime_nsec)),
        is_on_tmpfs: is_tmpfs(file.as_fd())?,
    })
}

/// Opens the /dev/shm of a process's mount namespace, where it is still in that.
fn open_root(pid: u32, expected: u64) -> Result<(OwnedFd, FileId), Failure> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let process = rustix::fs::open(format!("/proc/{pid}"), flags, Mode::empty())?;
    // The one magic link that is followed.
    let root = rustix::fs::openat(&process, "root", flags, Mode::empty())?;
    // The process may have ended, or moved to another namespace, since it was found.
    if namespace_of(process.as_fd()) != Ok(expected) {
        return Err(Errno::SRCH.into());
    }
    Shm::open_below(root.as_fd())
}

fn namespace(pid: u32) -> Result<u64, Errno> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    namespace_of(rustix::fs::open(format!("/proc/{pid}"), flags, Mode::empty())?.as_fd())
}

/// The mount namespace of a process, by its directory in /proc.
fn namespace_of(process: BorrowedFd<'_>) -> Result<u64, Errno> {
    // The link leads to the namespace itself, and asks nothing of any file system in it.
    rustix::fs::statat(process, "ns/mnt", AtFlags::empty()).map(|s| s.st_ino).map_err(|e| {
        // The kernel says the same of a process that has just gone.
        let is_there = rustix::fs::statat(process, "status", AtFlags::empty()).is_ok();
        if e == Errno::ACCESS && !is_there { Errno::SRCH } else { e }
    })
}

/// The processes of this host, and their users.
fn processes() -> Result<Vec<(u32, u32)>, Errno> {
    let all = fs::read_dir("/proc").map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::IO))?;
    let process = |entry: fs::DirEntry| {
        let pid = entry.file_name().to_str()?.parse().ok()?;
        Some((pid, entry.metadata().ok()?.uid()))
    };
    Ok(all.flatten().filter_map(process).take(PROCESSES_MAX).collect())
}

/// The list of a process's control groups.
fn control_groups(pid: u32) -> String {
    let mut text = Vec::new();
    let file = File::open(format!("/proc/{pid}/cgroup")).map(|f| f.take(CONTROL_GROUPS_MAX));
    // Without it the process is in none that is known.
    file.and_then(|mut f| f.read_to_end(&mut text)).unwrap_or_default();
    String::from_utf8_lossy(&text).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shm_is_opened_for_the_namespace_that_was_asked_for() {
        let pid = std::process::id();
        let own = namespace(pid).expect("known");
        let (_, id) = open_root(pid, own).expect("the host's own");
        assert_eq!(id, FileId::of(&rustix::fs::stat("/dev/shm").expect("there")));
        assert!(open_root(pid, own ^ 1).is_err());
        assert!(open_root(u32::MAX, own).is_err());
    }

    #[test]
    fn a_process_that_has_gone_is_not_taken_for_one_that_may_not_be_asked() {
        let mut child = std::process::Command::new("sleep").arg("100").spawn().expect("starts");
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let process = rustix::fs::open(format!("/proc/{}", child.id()), flags, Mode::empty()).expect("there");
        // The kernel still has a link that was looked up, as when the process goes meanwhile.
        assert!(namespace_of(process.as_fd()).is_ok());
        child.kill().expect("our own");
        child.wait().expect("gone");
        let why = namespace_of(process.as_fd()).expect_err("gone");
        assert!(matches!(why, Errno::SRCH | Errno::NOENT), "{why}");
    }

    #[test]
    fn this_process_is_listed_with_its_user() {
        let own = (std::process::id(), rustix::process::geteuid().as_raw());
        assert!(processes().expect("listed").contains(&own));
    }
}
