//! The /dev/shm of containers: found by the mount namespaces of the processes on this host.

use super::descriptors::held;
use super::directory::{Failure, FileId};
use super::probe::{Asked, Object, Outcome, Pool, Subject, Task, Unanswered};
use super::search::reason_of;
use super::shm::Shm;
use crate::model::{Unread, UnreadReason};
use rustix::io::Errno;
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;

/// Passes in which a new namespace is asked about each time: a container mounts its /dev/shm after its namespace was made.
const YOUNG_PASSES: u64 = 8;
/// Passes between two questions after that.
const OLD_PASSES: u64 = 15;
/// Namespaces that are followed at most: of one user who is not root, and of all of these together.
const NAMESPACES_OF_USER_MAX: usize = 512;
const NAMESPACES_MAX: usize = 4096;

/// A container's /dev/shm, and the user of a process in it.
#[derive(Debug, Clone)]
pub(super) struct ContainerShm {
    pub(super) shm: Arc<Shm>,
    pub(super) uid: u32,
    namespace: u64,
}

impl ContainerShm {
    pub(super) fn subject(&self) -> Subject {
        subject(self.uid, self.namespace)
    }
}

fn subject(uid: u32, namespace: u64) -> Subject {
    Subject { user: Some(uid), object: Object::MountNamespace(namespace) }
}

/// A mount namespace.
#[derive(Debug)]
struct Namespace {
    /// A process in it, and the user of that process.
    pid: u32,
    uid: u32,
    shm: Option<Arc<Shm>>,
    /// The search that found it, and the one in which it is asked about next.
    first_pass: u64,
    due_pass: u64,
    /// The last search in which a process was in it.
    seen_pass: u64,
    /// Its /dev/shm is a link or not on tmpfs.
    not_tmpfs: bool,
    /// Why it could not be opened.
    failed: Option<Errno>,
}

/// The containers' mount namespaces, and what each has in /dev/shm.
#[derive(Debug, Default)]
pub(super) struct Containers {
    own: Option<u64>,
    namespaces: BTreeMap<u64, Namespace>,
    /// Processes in namespaces that are not followed, by user, as the last search found them.
    left_out: BTreeMap<u32, usize>,
    /// Processes whose namespaces may not be known, by user.
    forbidden: BTreeMap<u32, usize>,
    /// Searches so far.
    pass: u64,
    /// The last search asked about everything, but for whom others report.
    is_complete: bool,
}

impl Containers {
    /// True when all namespaces were looked for, and looked into where that could be done.
    pub(super) fn is_complete(&self) -> bool {
        self.is_complete
    }

    /// Searches once.
    pub(super) fn search(&mut self, pool: &mut Pool) {
        let Some(processes) = processes(pool) else {
            self.is_complete = false;
            return;
        };
        if self.own.is_none() {
            self.own = own_namespace(pool);
        }
        self.pass += 1;
        self.is_complete = true;
        self.left_out.clear();
        self.forbidden.clear();
        let silent = self.look_for_namespaces(processes, pool);
        let pass = self.pass;
        // A namespace that does not answer now is kept until it answers.
        self.namespaces.retain(|_, n| n.seen_pass == pass || silent.contains(&n.uid));
        self.open_due(pool);
    }

    /// Every /dev/shm that could be opened, each once.
    pub(super) fn shms(&self) -> Vec<ContainerShm> {
        let mut shms: BTreeMap<FileId, ContainerShm> = BTreeMap::new();
        for (id, n) in &self.namespaces {
            if let Some(shm) = &n.shm {
                let new = || ContainerShm { shm: Arc::clone(shm), uid: n.uid, namespace: *id };
                shms.entry(shm.id).or_insert_with(new);
            }
        }
        shms.into_values().collect()
    }

    /// True when one more namespace of a user may be followed. Root's are, whatever others have.
    fn has_room(&self, uid: u32) -> bool {
        let of_users = self.namespaces.values().filter(|n| n.uid != 0);
        let of_user = self.namespaces.values().filter(|n| n.uid == uid);
        uid == 0 || of_user.count() < NAMESPACES_OF_USER_MAX && of_users.count() < NAMESPACES_MAX
    }

    /// Finds the namespaces of processes; returns the users of whom something is not known.
    fn look_for_namespaces(&mut self, mut processes: Vec<(u32, u32)>, pool: &mut Pool) -> BTreeSet<u32> {
        let mut silent = BTreeSet::new();
        let of = |(pid, uid): &(u32, u32)| Subject { user: Some(*uid), object: Object::Process(*pid) };
        processes.sort_by_key(|p| pool.rank(&of(p)));
        let asked: Vec<Asked<'_>> = processes
            .iter()
            .map(|p| Asked { subject: of(p), task: Task::FindNamespace { pid: p.0 }, fd: None })
            .collect();
        for ((pid, uid), answer) in processes.iter().zip(pool.ask(&asked)) {
            match answer {
                Ok((Outcome::Namespace(id), _)) if Some(id) != self.own => self.saw(id, *pid, *uid),
                Ok((Outcome::Failed(why, _), _))
                    if matches!(why.errno(), Some(Errno::ACCESS | Errno::PERM)) =>
                {
                    *self.forbidden.entry(*uid).or_default() += 1;
                }
                Ok(_) => {}
                Err(why) => {
                    silent.insert(*uid);
                    self.is_complete &= why == Unanswered::Unresponsive;
                }
            }
        }
        silent
    }

    fn saw(&mut self, id: u64, pid: u32, uid: u32) {
        let pass = self.pass;
        if !self.namespaces.contains_key(&id) && !self.has_room(uid) {
            *self.left_out.entry(uid).or_default() += 1;
            return;
        }
        let n = self.namespaces.entry(id).or_insert(Namespace {
            pid,
            uid,
            shm: None,
            first_pass: pass,
            due_pass: pass,
            seen_pass: pass,
            not_tmpfs: false,
            failed: None,
        });
        if n.seen_pass < pass {
            (n.seen_pass, n.pid, n.uid) = (pass, pid, uid);
        }
    }

    fn open_due(&mut self, pool: &mut Pool) {
        let mut due: Vec<(u64, u32, u32, u64)> = self
            .namespaces
            .iter()
            .filter(|(_, n)| n.due_pass <= self.pass)
            .map(|(id, n)| (n.due_pass, n.uid, n.pid, *id))
            .collect();
        due.sort_by_key(|d| (pool.rank(&subject(d.1, d.3)), *d));
        let asked: Vec<Asked<'_>> = due
            .iter()
            .map(|(_, uid, pid, id)| Asked {
                subject: subject(*uid, *id),
                task: Task::OpenRoot { pid: *pid, namespace: *id },
                fd: None,
            })
            .collect();
        for ((.., pid, id), answer) in due.iter().zip(pool.ask(&asked)) {
            match answer {
                Ok((outcome, fds)) => self.opened(*id, *pid, outcome, fds),
                Err(why) => self.is_complete &= why == Unanswered::Unresponsive,
            }
        }
    }

    fn opened(&mut self, id: u64, pid: u32, outcome: Outcome, fds: Vec<OwnedFd>) {
        let pass = self.pass;
        let Some(n) = self.namespaces.get_mut(&id) else { return };
        n.due_pass = pass + if pass - n.first_pass < YOUNG_PASSES { 1 } else { OLD_PASSES };
        (n.not_tmpfs, n.failed) = (false, None);
        match (outcome, fds.into_iter().next()) {
            // A directory that is followed keeps its name while it stays the same one.
            (Outcome::Directory(shm), Some(_)) if n.shm.as_ref().is_some_and(|s| s.id == shm) => {}
            (Outcome::Directory(shm), Some(fd)) => match held(fd) {
                Ok(fd) => {
                    let path = PathBuf::from(format!("/proc/{pid}/root/dev/shm"));
                    n.shm = Some(Arc::new(Shm::of_container(fd, path, shm)));
                }
                Err(e) => (n.shm, n.failed) = (None, Some(e)),
            },
            (Outcome::Failed(why, _), _) => match why.errno() {
                // It has none that can hold segments, or the process has gone.
                Some(Errno::NOENT | Errno::SRCH) => n.shm = None,
                Some(Errno::LOOP | Errno::NOTDIR) => (n.shm, n.not_tmpfs) = (None, true),
                // Whoever could be opened before is followed on.
                Some(e) => n.failed = Some(e),
                None => (n.shm, n.not_tmpfs) = (None, why == Failure::NotTmpfs),
            },
            _ => n.shm = None,
        }
    }

    /// Namespaces that are not looked into.
    pub(super) fn unread(&self) -> Vec<Unread> {
        let mut unread = Vec::new();
        for (id, n) in &self.namespaces {
            let (reason, detail) = if n.not_tmpfs {
                let detail = "its /dev/shm is a link or not on tmpfs, and is not looked into".to_owned();
                (UnreadReason::ForeignOwner, detail)
            } else if let Some(e) = n.failed {
                let (reason, advice) = reason_of(e);
                (reason, format!("its /dev/shm cannot be opened: {e}{advice}"))
            } else {
                continue;
            };
            unread.push(Unread {
                // The namespace names it for as long as it lives, whichever process is looked at.
                path: format!("mount namespace {id}"),
                reason,
                detail: format!("{detail} (process {}, user {})", n.pid, n.uid),
                owner: Some(n.uid),
            });
        }
        for (uid, many) in &self.left_out {
            let most = format!("{NAMESPACES_OF_USER_MAX} of a user and {NAMESPACES_MAX} of all");
            unread.push(Unread {
                path: format!("mount namespaces of user {uid}"),
                reason: UnreadReason::Limits,
                detail: format!("{many} are not looked into: more than {most}"),
                owner: Some(*uid),
            });
        }
        unread.extend(self.forbidden_unread());
        unread
    }

    /// Users whose containers may not be found. To users other than root this is said of their own processes alone: they
    /// are not expected to see those of others.
    fn forbidden_unread(&self) -> impl Iterator<Item = Unread> {
        let own = rustix::process::geteuid().as_raw();
        self.forbidden.iter().filter(move |(uid, _)| own == 0 || **uid == own).map(|(uid, many)| Unread {
            path: format!("containers of user {uid}"),
            reason: UnreadReason::Permission,
            detail: format!(
                "{many} processes may not be asked for their mount namespace; ringwatch needs CAP_SYS_PTRACE for that"
            ),
            owner: Some(*uid),
        })
    }
}

fn processes(pool: &mut Pool) -> Option<Vec<(u32, u32)>> {
    let subject = Subject { user: None, object: Object::Processes };
    match pool.ask_one(Asked { subject, task: Task::ListProcesses, fd: None }) {
        Ok((Outcome::Processes(all), _)) => Some(all),
        _ => None,
    }
}

fn own_namespace(pool: &mut Pool) -> Option<u64> {
    let pid = std::process::id();
    let subject = Subject { user: None, object: Object::Process(pid) };
    match pool.ask_one(Asked { subject, task: Task::FindNamespace { pid }, fd: None }) {
        Ok((Outcome::Namespace(id), _)) => Some(id),
        _ => None,
    }
}
