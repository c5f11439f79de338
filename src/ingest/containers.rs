//! The /dev/shm of containers: found by the mount namespaces of the processes on this host.
//!
//! A thread looks for namespaces and has them opened by the helper process; whoever reads segments takes what is there
//! and never waits.

use super::directory::{DirectoryError, FileId, Shm};
use super::open_roots::{Helper, Question, Refusal, Running, namespace_of};
use crate::model::{Unread, UnreadReason};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::process::Child;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Time between two searches.
const EVERY: Duration = Duration::from_secs(2);
/// Passes in which a new namespace is asked about each time: a container mounts its /dev/shm after its namespace was made.
const YOUNG_PASSES: u64 = 8;
/// Passes between two questions after that.
const OLD_PASSES: u64 = 15;
/// Namespaces that are followed at most: of one user who is not root, and of all of these together.
const NAMESPACES_OF_USER_MAX: usize = 512;
const NAMESPACES_MAX: usize = 4096;
/// Helpers that may be stuck at once: of all users together, and of one user who is not root.
const STUCK_MAX: usize = 8;
const STUCK_OF_USER_MAX: usize = 2;
/// The time that opening the namespaces of one user may take in a pass, and of all users who were slow in the pass before.
/// Root's are opened whatever they take.
const OPENING_OF_USER_MAX: Duration = Duration::from_secs(1);
const OPENING_OF_SLOW_MAX: Duration = Duration::from_secs(2);
/// A user is slow whose namespaces take longer in a pass.
const SLOW: Duration = Duration::from_millis(100);

/// What is known of containers, for whoever reads segments.
#[derive(Debug)]
pub(super) struct Containers {
    found: Arc<Mutex<Found>>,
    /// Hanging up is the sign to stop.
    _stop: SyncSender<()>,
}

/// What one search found.
#[derive(Debug, Default, Clone)]
pub(super) struct Found {
    /// Every /dev/shm but the host's own, each once.
    pub(super) shms: Vec<Arc<Shm>>,
    /// Namespaces that are not read.
    pub(super) unread: Vec<Unread>,
    /// Searches so far.
    pub(super) passes: u64,
}

impl Containers {
    /// Begins to look.
    pub(super) fn start(helper: Helper) -> std::io::Result<Self> {
        let found = Arc::new(Mutex::new(Found::default()));
        let (stop, stopped) = sync_channel(0);
        let shared = Arc::clone(&found);
        std::thread::Builder::new()
            .name("containers".to_owned())
            .spawn(move || Search::new(helper).run(&shared, &stopped))?;
        Ok(Containers { found, _stop: stop })
    }

    pub(super) fn found(&self) -> Found {
        self.found.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
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
    /// Its file system did not answer: the number of the helper that waits for it.
    stuck: Option<u64>,
}

/// A helper that its file system keeps waiting.
#[derive(Debug)]
struct Stuck {
    number: u64,
    uid: u32,
    child: Child,
}

#[derive(Debug)]
struct Search {
    helper: Helper,
    running: Option<Running>,
    own: Option<u64>,
    namespaces: BTreeMap<u64, Namespace>,
    stuck: Vec<Stuck>,
    next_stuck: u64,
    /// Users whose namespaces took long in the last pass.
    slow: BTreeSet<u32>,
    /// Processes in namespaces that are not followed, by user, as the last pass found them.
    left_out: BTreeMap<u32, usize>,
    pass: u64,
    /// Why no helper can be had.
    trouble: Option<String>,
}

/// A namespace that is to be opened in this pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Due {
    pass: u64,
    uid: u32,
    id: u64,
}

/// Opens what is due, by `open`, which returns how long it took. Namespaces of users who were slow come last, and a user who
/// takes too long goes on in the next pass: nobody's containers wait for those of somebody else. Returns who was slow.
fn in_turn(mut due: Vec<Due>, slow: &BTreeSet<u32>, mut open: impl FnMut(u64) -> Duration) -> BTreeSet<u32> {
    due.sort_unstable_by_key(|d| (slow.contains(&d.uid), *d));
    let mut taken: BTreeMap<u32, Duration> = BTreeMap::new();
    let mut taken_by_slow = Duration::ZERO;
    for Due { uid, id, .. } in due {
        let is_slow = slow.contains(&uid);
        let of_user = taken.entry(uid).or_default();
        let is_spent = *of_user >= OPENING_OF_USER_MAX || is_slow && taken_by_slow >= OPENING_OF_SLOW_MAX;
        if is_spent && uid != 0 {
            continue;
        }
        let took = open(id);
        *of_user += took;
        if is_slow {
            taken_by_slow += took;
        }
    }
    taken.into_iter().filter(|(_, time)| *time > SLOW).map(|(uid, _)| uid).collect()
}

impl Search {
    fn new(helper: Helper) -> Self {
        Search {
            helper,
            running: None,
            own: None,
            namespaces: BTreeMap::new(),
            stuck: Vec::new(),
            next_stuck: 0,
            slow: BTreeSet::new(),
            left_out: BTreeMap::new(),
            pass: 0,
            trouble: None,
        }
    }

    fn run(mut self, shared: &Mutex<Found>, stopped: &Receiver<()>) {
        loop {
            self.pass();
            *shared.lock().unwrap_or_else(PoisonError::into_inner) = self.found();
            match stopped.recv_timeout(EVERY) {
                Err(RecvTimeoutError::Timeout) => {}
                Ok(()) | Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    fn pass(&mut self) {
        self.pass += 1;
        self.stuck.retain_mut(|s| s.child.try_wait().is_ok_and(|ended| ended.is_none()));
        self.look_for_namespaces();
        let pass = self.pass;
        self.namespaces.retain(|_, n| n.seen_pass == pass);
        self.ask_due();
        if let Some(running) = self.running.take() {
            running.end();
        }
    }

    fn ask_due(&mut self) {
        let due = self.namespaces.iter().filter(|(_, n)| n.due_pass <= self.pass);
        let due = due.map(|(id, n)| Due { pass: n.due_pass, uid: n.uid, id: *id }).collect();
        let slow = std::mem::take(&mut self.slow);
        self.slow = in_turn(due, &slow, |id| {
            let began = Instant::now();
            self.ask(id);
            began.elapsed()
        });
    }

    /// True when one more namespace of a user may be followed. Root's are, whatever others have.
    fn has_room(&self, uid: u32) -> bool {
        let of_users = || self.namespaces.values().filter(|n| n.uid != 0);
        let of_user = of_users().filter(|n| n.uid == uid).count();
        uid == 0 || of_user < NAMESPACES_OF_USER_MAX && of_users().count() < NAMESPACES_MAX
    }

    fn look_for_namespaces(&mut self) {
        let own = |pid: &str| {
            let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
            let process = rustix::fs::open(format!("/proc/{pid}"), flags, Mode::empty()).ok()?;
            let uid = rustix::fs::fstat(&process).ok()?.st_uid;
            Some((namespace_of(process.as_fd())?, uid))
        };
        self.left_out.clear();
        self.own = own("self").map(|(namespace, _)| namespace);
        let Ok(processes) = std::fs::read_dir("/proc") else { return };
        for entry in processes.flatten() {
            let Some(pid) = entry.file_name().to_str().and_then(|n| n.parse::<u32>().ok()) else { continue };
            let Some((namespace, uid)) = own(&pid.to_string()) else { continue };
            if Some(namespace) == self.own {
                continue;
            }
            let pass = self.pass;
            if !self.namespaces.contains_key(&namespace) && !self.has_room(uid) {
                *self.left_out.entry(uid).or_default() += 1;
                continue;
            }
            let n = self.namespaces.entry(namespace).or_insert(Namespace {
                pid,
                uid,
                shm: None,
                first_pass: pass,
                due_pass: pass,
                seen_pass: pass,
                not_tmpfs: false,
                failed: None,
                stuck: None,
            });
            if n.seen_pass < pass {
                (n.seen_pass, n.pid, n.uid) = (pass, pid, uid);
            }
        }
    }

    /// True where another helper may get stuck for this user.
    fn may_ask(&self, uid: u32) -> bool {
        let of_user = self.stuck.iter().filter(|s| s.uid == uid).count();
        // Many users may be one person's; root's containers are asked whatever they do.
        if uid == 0 {
            return of_user < STUCK_MAX;
        }
        of_user < STUCK_OF_USER_MAX && self.stuck.len() < STUCK_MAX
    }

    fn ask(&mut self, id: u64) {
        let Some((pid, uid, stuck)) = self.namespaces.get(&id).map(|n| (n.pid, n.uid, n.stuck)) else {
            return;
        };
        // It is asked again when the helper that it kept waiting has ended: its file system answers by then.
        if stuck.is_some_and(|number| self.stuck.iter().any(|s| s.number == number)) || !self.may_ask(uid) {
            return;
        }
        let answer = match self.running.take().map_or_else(|| Running::start(&self.helper), Ok) {
            Ok(running) => {
                let (running, answer) = running.ask(Question { pid, namespace: id });
                self.running = running;
                answer
            }
            Err(e) => Err(Refusal::NoHelper(e)),
        };
        let pass = self.pass;
        let Some(n) = self.namespaces.get_mut(&id) else { return };
        n.due_pass = pass + if pass - n.first_pass < YOUNG_PASSES { 1 } else { OLD_PASSES };
        (n.stuck, n.not_tmpfs, n.failed) = (None, matches!(answer, Err(Refusal::NotTmpfs)), None);
        match answer {
            Ok(fd) => {
                let path = PathBuf::from(format!("/proc/{pid}/root/dev/shm"));
                let followed = n.shm.as_ref().map(|s| s.id);
                match Shm::of_container(fd, path) {
                    // A directory that is followed keeps its name while it stays the same one.
                    Ok(same) if Some(same.id) == followed => {}
                    Ok(new) => match new.held() {
                        Ok(new) => n.shm = Some(Arc::new(new)),
                        Err(errno) => (n.shm, n.failed) = (None, Some(errno)),
                    },
                    Err(DirectoryError::Io(errno)) => (n.shm, n.failed) = (None, Some(errno)),
                    Err(_) => (n.shm, n.not_tmpfs) = (None, true),
                }
                self.trouble = None;
            }
            Err(Refusal::Nothing | Refusal::NotTmpfs) => (n.shm, self.trouble) = (None, None),
            // Whoever could be opened before is followed on.
            Err(Refusal::Failed(errno)) => (n.failed, self.trouble) = (Some(errno), None),
            Err(Refusal::Stalled(child)) => {
                (n.shm, n.stuck) = (None, Some(self.next_stuck));
                self.stuck.push(Stuck { number: self.next_stuck, uid, child });
                self.next_stuck += 1;
            }
            Err(Refusal::NoHelper(e)) => self.trouble = Some(e.to_string()),
        }
    }

    fn found(&self) -> Found {
        let mut shms: BTreeMap<FileId, Arc<Shm>> = BTreeMap::new();
        for shm in self.namespaces.values().filter_map(|n| n.shm.as_ref()) {
            shms.entry(shm.id).or_insert_with(|| Arc::clone(shm));
        }
        if let Ok(own) = Shm::own() {
            shms.remove(&own.id);
        }
        Found { shms: shms.into_values().collect(), unread: self.unread(), passes: self.pass }
    }

    fn unread(&self) -> Vec<Unread> {
        let mut unread = Vec::new();
        for (id, n) in &self.namespaces {
            let cannot = n.failed.map(|e| {
                let (reason, advice) = super::search::reason_of(e);
                (reason, format!("its /dev/shm cannot be opened: {e}{advice}"))
            });
            let (reason, detail) = if n.not_tmpfs {
                (UnreadReason::ForeignOwner, "its /dev/shm is a link or not on tmpfs, and is not looked into")
            } else if let Some((reason, detail)) = &cannot {
                (*reason, detail.as_str())
            } else if n.stuck.is_some() {
                let detail = "the container's file system does not answer; it is left alone until it does";
                (UnreadReason::Unresponsive, detail)
            } else if n.due_pass <= self.pass && !self.may_ask(n.uid) {
                let detail = "not opened: too many file systems of this user, or of the host, do not answer";
                (UnreadReason::Unresponsive, detail)
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
        if let Some(why) = &self.trouble {
            unread.push(Unread {
                path: "containers".to_owned(),
                reason: UnreadReason::Io,
                detail: format!("the process that opens their /dev/shm cannot be started: {why}"),
                owner: None,
            });
        }
        unread
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn of(uid: u32, ids: std::ops::Range<u64>) -> impl Iterator<Item = Due> {
        ids.map(move |id| Due { pass: 1, uid, id })
    }

    #[test]
    fn nobodys_containers_wait_for_slow_ones_of_somebody_else() {
        let due: Vec<Due> = of(7, 0..5).chain(of(8, 5..7)).chain(of(0, 7..9)).collect();
        let pass = |due: &[Due], slow: &BTreeSet<u32>| {
            let mut opened = Vec::new();
            let slow = in_turn(due.to_vec(), slow, |id| {
                opened.push(id);
                if id < 5 { SECOND } else { Duration::from_millis(1) }
            });
            (opened, slow)
        };
        let (opened, slow) = pass(&due, &BTreeSet::new());
        assert_eq!((opened, &slow), (vec![7, 8, 0, 5, 6], &BTreeSet::from([7])), "one second of user 7's");
        // What was opened is due again later, so that the rest has its turn.
        let rest: Vec<Due> = due.into_iter().filter(|d| d.id != 0).collect();
        let (opened, slow) = pass(&rest, &slow);
        assert_eq!((opened, slow), (vec![7, 8, 5, 6, 1], BTreeSet::from([7])), "last, and once");
        let many: Vec<Due> = (10..20).map(|uid| Due { pass: 1, uid, id: u64::from(uid) }).collect();
        let all_slow = many.iter().map(|d| d.uid).collect();
        let mut opened = 0;
        in_turn(many, &all_slow, |_| {
            opened += 1;
            SECOND
        });
        assert_eq!(opened, 2, "slow users have two seconds together");
    }
}
