//! Where segments are now: the directories of all places, and the names in them.
//!
//! What does not answer keeps what was known of it. So a directory that hangs neither hides the segments in it that are
//! followed, nor reports them as new when it answers again.

use super::containers::{ContainerShm, Containers};
use super::directory::{Directory, Failure, FileId, Folder, Mounts};
use super::discover::Place;
use super::probe::{Asked, Bytes, Object, Outcome, Pool, Subject, Task, Unanswered, Users};
use super::shown;
use super::survey::FileName;
use crate::model::{Unread, UnreadReason};
use rustix::io::Errno;
use std::collections::{BTreeMap, HashMap};
use std::ffi::OsString;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Names of one user's files in all containers together that are looked at.
const NAMES_OF_OWNER_MAX: usize = 8192;
/// Time between two searches for containers.
const CONTAINERS_EVERY: Duration = Duration::from_secs(2);

/// Every segment's directory and name, and what could not be searched.
#[derive(Debug, Default)]
pub(super) struct Listing {
    pub(super) files: Vec<FileName>,
    pub(super) unread: Vec<Unread>,
    /// Every place was searched, with containers, or is reported as unread.
    pub(super) is_complete: bool,
}

/// A directory that is open, and what was in it the last time.
#[derive(Debug)]
struct Open {
    directory: Arc<Directory>,
    /// With their owners, as far as these are known.
    names: Vec<(OsString, Option<u32>)>,
    /// There were more names.
    cut: bool,
    /// Why it could not be listed.
    failure: Option<Failure>,
    is_listed: bool,
}

/// Searches places again and again.
#[derive(Debug, Default)]
pub(super) struct Search {
    containers: Option<Containers>,
    /// When containers were looked for last.
    containers_at: Option<Instant>,
    /// Directories that were found by the last search, so that their descriptors are shared.
    open: BTreeMap<FileId, Open>,
    /// The host's own /dev/shm, once it was opened.
    own_shm: Option<FileId>,
    /// Searches so far.
    turn: u64,
}

/// The results of one search so far.
#[derive(Debug, Default)]
struct Found {
    directories: BTreeMap<FileId, Arc<Directory>>,
    unread: Vec<Unread>,
    /// Something is to be searched in the next search.
    is_cut: bool,
}

impl Search {
    /// From now on looks into containers too, where the host is searched.
    pub(super) fn look_into_containers(&mut self) {
        self.containers = Some(Containers::default());
    }

    /// Searches places.
    pub(super) fn search(&mut self, places: &[Place], pool: &mut Pool) -> Listing {
        self.turn += 1;
        let mut found = Found::default();
        for place in places {
            match place {
                Place::Dir(path) => self.named(path, pool, &mut found),
                Place::Host => {
                    self.host(pool, &mut found);
                    self.look_for_containers(pool, &mut found);
                }
            }
        }
        let mut before = std::mem::take(&mut self.open);
        for (id, directory) in found.directories {
            let known = before.remove(&id).filter(|o| o.directory.folder().owner == directory.folder().owner);
            let new = || Open { directory, names: Vec::new(), cut: false, failure: None, is_listed: false };
            self.open.insert(id, known.unwrap_or_else(new));
        }
        found.is_cut |= !self.list(pool);
        let mut listing = self.listing(found.unread);
        let containers = self.containers.as_ref().filter(|_| places.contains(&Place::Host));
        listing.is_complete = !found.is_cut && containers.is_none_or(Containers::is_complete);
        listing
    }

    /// The directories of the host itself that are open: those that may be cleaned.
    pub(super) fn own_directories(&self) -> Vec<Arc<Directory>> {
        let all = self.open.values().map(|o| &o.directory);
        all.filter(|d| d.folder().mounts != Mounts::Foreign).map(Arc::clone).collect()
    }

    /// A directory that the settings name.
    fn named(&self, path: &Path, pool: &mut Pool, found: &mut Found) {
        let subject = Subject { user: None, object: Object::Path(Bytes::from(path)) };
        let task = Task::OpenNamed { path: Bytes::from(path) };
        match pool.ask_one(Asked { subject, task, fd: None }) {
            Ok((Outcome::Folder(folder), fds)) => self.add(folder, fds.into_iter().next(), found),
            Ok((Outcome::Failed(why, _), _)) if why.errno() == Some(Errno::NOENT) => {}
            Ok((Outcome::Failed(why, _), _)) => found.unread.push(unread(path, why)),
            _ => self.keep(found, |f| f.path() == path),
        }
    }

    /// The users' directories in the host's own /dev/shm.
    fn host(&mut self, pool: &mut Pool, found: &mut Found) {
        let known = self.folders(|f| f.mounts == Mounts::Own);
        let task = Task::OpenUsers { container: None, known, turn: self.turn };
        let subject = Subject { user: None, object: Object::HostShm };
        match pool.ask_one(Asked { subject, task, fd: None }) {
            Ok((Outcome::Users(users), fds)) => {
                self.own_shm = Some(users.shm);
                self.add_users(users, fds, found);
            }
            Ok((Outcome::Failed(why, _), _)) => found.unread.push(unread(Path::new("/dev/shm"), why)),
            _ => self.keep(found, |f| f.mounts == Mounts::Own),
        }
    }

    fn look_for_containers(&mut self, pool: &mut Pool, found: &mut Found) {
        let Some(mut containers) = self.containers.take() else { return };
        if self.containers_at.is_none_or(|t| t.elapsed() >= CONTAINERS_EVERY) {
            self.containers_at = Some(Instant::now());
            containers.search(pool);
        }
        let mut shms = containers.shms();
        shms.retain(|c| Some(c.shm.id) != self.own_shm);
        shms.sort_by_key(|c| pool.rank(&c.subject()));
        let below = |c: &ContainerShm| {
            let path = c.shm.path().to_owned();
            move |f: &Folder| f.path().parent() == Some(&path)
        };
        let asked: Vec<Asked<'_>> = shms
            .iter()
            .map(|c| Asked {
                subject: c.subject(),
                task: Task::OpenUsers {
                    container: Some(Bytes::from(c.shm.path())),
                    known: self.folders(below(c)),
                    turn: self.turn,
                },
                fd: Some(c.shm.as_fd()),
            })
            .collect();
        for (c, answer) in shms.iter().zip(pool.ask(&asked)) {
            match answer {
                Ok((Outcome::Users(users), fds)) => self.add_users(users, fds, found),
                Ok((Outcome::Failed(why, _), _)) => {
                    found.unread.push(Unread { owner: Some(c.uid), ..unread(c.shm.path(), why) });
                }
                Ok(_) => {}
                Err(why) => {
                    found.is_cut |= why != Unanswered::Unresponsive;
                    self.keep(found, below(c));
                }
            }
        }
        found.unread.extend(containers.unread());
        self.containers = Some(containers);
    }

    fn folders(&self, wanted: impl Fn(&Folder) -> bool) -> Vec<Folder> {
        self.open.values().map(|o| o.directory.folder()).filter(|f| wanted(f)).cloned().collect()
    }

    /// Keeps directories that are open.
    fn keep(&self, found: &mut Found, wanted: impl Fn(&Folder) -> bool) {
        let kept = self.open.iter().filter(|(_, o)| wanted(o.directory.folder()));
        found.directories.extend(kept.map(|(id, o)| (*id, Arc::clone(&o.directory))));
    }

    fn add_users(&self, users: Users, fds: Vec<OwnedFd>, found: &mut Found) {
        found.is_cut |= users.more;
        self.keep(found, |f| users.known.contains(&f.id));
        let mut fds = fds.into_iter();
        for folder in users.opened {
            self.add(folder, fds.next(), found);
        }
        let refused = users.refused.into_iter();
        found
            .unread
            .extend(refused.map(|r| Unread { owner: r.owner, ..unread(Path::new(&r.path.0), r.why) }));
    }

    /// Adds a directory that was opened now, unless it is open already.
    fn add(&self, folder: Folder, fd: Option<OwnedFd>, found: &mut Found) {
        let is_same = |o: &&Open| *o.directory.folder() == folder;
        if let Some(open) = self.open.get(&folder.id).filter(is_same) {
            found.directories.insert(folder.id, Arc::clone(&open.directory));
            return;
        }
        let Some(fd) = fd else { return };
        let (id, path, owner) = (folder.id, folder.path().to_owned(), folder.owner);
        match Directory::of(fd, folder).held() {
            Ok(directory) => {
                found.directories.entry(id).or_insert_with(|| Arc::new(directory));
            }
            Err(e) => found.unread.push(Unread { owner, ..unread(&path, e.into()) }),
        }
    }

    /// Lists every open directory; false where one was never listed and is not reported as unread.
    fn list(&mut self, pool: &mut Pool) -> bool {
        let mut all: Vec<&mut Open> = self.open.values_mut().collect();
        let subject = |o: &Open| {
            let folder = o.directory.folder();
            let object = Object::Directory(folder.id, folder.path.clone());
            Subject { user: folder.owner, object }
        };
        all.sort_by_key(|o| pool.rank(&subject(o)));
        let asked: Vec<Asked<'_>> = all
            .iter()
            .map(|o| Asked {
                subject: subject(o),
                task: Task::List { folder: o.directory.folder().clone() },
                fd: Some(o.directory.as_fd()),
            })
            .collect();
        let answers = pool.ask(&asked);
        drop(asked);
        let mut is_complete = true;
        for (open, answer) in all.into_iter().zip(answers) {
            match answer {
                Ok((Outcome::Names(names, cut), _)) => {
                    open.names = names.into_iter().map(|(name, owner)| (name.0, owner)).collect();
                    (open.cut, open.failure, open.is_listed) = (cut, None, true);
                }
                Ok((Outcome::Failed(why, _), _)) => open.failure = Some(why),
                Ok(_) | Err(Unanswered::Unresponsive) => {}
                Err(_) => is_complete &= open.is_listed,
            }
        }
        is_complete
    }

    fn listing(&self, unread_so_far: Vec<Unread>) -> Listing {
        let mut listing = Listing { unread: unread_so_far, ..Listing::default() };
        let mut of_owner: HashMap<Option<u32>, usize> = HashMap::new();
        for open in self.open.values() {
            let (directory, owner) = (&open.directory, open.directory.folder().owner);
            if let Some(why) = open.failure {
                listing.unread.push(Unread { owner, ..unread(directory.path(), why) });
            }
            // Of one user in all containers; an administrator's directories are theirs to keep small.
            let taken = of_owner.entry(owner).or_default();
            let room = if owner.is_some() { NAMES_OF_OWNER_MAX.saturating_sub(*taken) } else { usize::MAX };
            if open.cut || open.names.len() > room {
                listing.unread.push(Unread { owner, ..unread(directory.path(), Failure::TooMany) });
            }
            let before = listing.files.len();
            let file = |(name, owner): &(OsString, Option<u32>)| FileName {
                directory: Arc::clone(directory),
                name: name.clone(),
                owner: *owner,
            };
            listing.files.extend(open.names.iter().take(room).map(file));
            *taken += listing.files.len() - before;
        }
        listing
    }
}

fn unread(path: &Path, why: Failure) -> Unread {
    let (reason, advice) = match why {
        Failure::System(errno) => reason_of(Errno::from_raw_os_error(errno)),
        Failure::NotTmpfs | Failure::Mounted | Failure::ForeignName { .. } | Failure::ForeignOwner { .. } => {
            (UnreadReason::ForeignOwner, "")
        }
        Failure::TooMany | Failure::InTurns => (UnreadReason::Limits, ""),
        Failure::NotFile => (UnreadReason::NotASegment, ""),
        Failure::TooYoung => (UnreadReason::Incomplete, ""),
    };
    Unread { path: shown(path), reason, detail: format!("{why}{advice}"), owner: None }
}

/// The meaning of an error of the system for a segment, and what to do about it.
pub(super) fn reason_of(errno: Errno) -> (UnreadReason, &'static str) {
    match errno {
        Errno::ACCESS | Errno::PERM => {
            (UnreadReason::Permission, "; run ringwatch as the job's user or as root")
        }
        Errno::MFILE | Errno::NFILE => {
            (UnreadReason::Descriptors, "; raise the limit of open files (ulimit -n, LimitNOFILE)")
        }
        Errno::NOMEM => (UnreadReason::Limits, ""),
        Errno::XDEV => {
            (UnreadReason::ForeignOwner, ": another file system is mounted on it, and is not looked into")
        }
        _ => (UnreadReason::Io, ""),
    }
}
