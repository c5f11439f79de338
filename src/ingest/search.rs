//! Where segments are now: the directories of all places, and the names in them.

use super::containers::Containers;
use super::directory::{Directory, DirectoryError, OpenDirectories, Shm};
use super::discover::Place;
use super::open_roots::Helper;
use super::shown;
use crate::model::{Unread, UnreadReason};
use rustix::io::Errno;
use std::collections::HashMap;
use std::ffi::OsString;
use std::path::Path;
use std::sync::Arc;

/// Names of one user's files in all containers together that are looked at.
const NAMES_OF_OWNER_MAX: usize = 8192;

/// Every segment's directory and name, and what could not be searched.
#[derive(Debug, Default)]
pub(super) struct Listing {
    pub(super) files: Vec<(Arc<Directory>, OsString)>,
    pub(super) unread: Vec<Unread>,
}

/// Searches places again and again.
#[derive(Debug)]
pub(super) struct Search {
    places: Vec<Place>,
    /// What opens containers, and, once something was searched, what looks for them.
    helper: Option<Helper>,
    containers: Option<Containers>,
    /// Directories that were found by the last search, so that their descriptors are shared.
    open: OpenDirectories,
    complete: bool,
    /// Searches so far.
    turn: u64,
}

impl Search {
    pub(super) fn new(places: Vec<Place>) -> Self {
        Search { places, helper: None, containers: None, open: HashMap::new(), complete: false, turn: 0 }
    }

    pub(super) fn places(&self) -> &[Place] {
        &self.places
    }

    pub(super) fn set_places(&mut self, places: Vec<Place>) {
        self.places = places;
    }

    /// From now on looks into containers too, with a helper process.
    pub(super) fn look_into_containers(&mut self, helper: Helper) {
        self.helper = Some(helper);
    }

    /// True where the last listing was of every place, with containers that were looked for by then.
    pub(super) fn is_complete(&self) -> bool {
        self.complete
    }

    /// The thread that looks for containers begins with the first search: by then its process has said which signals its
    /// threads take.
    fn containers(&mut self) -> std::io::Result<Option<&Containers>> {
        if let (None, Some(helper)) = (&self.containers, &self.helper) {
            self.containers = Some(Containers::start(helper.clone())?);
        }
        Ok(self.containers.as_ref())
    }

    pub(super) fn list(&mut self) -> Listing {
        let mut listing = Listing::default();
        let mut found: Vec<Arc<Directory>> = Vec::new();
        self.complete = true;
        self.turn += 1;
        for place in self.places.clone() {
            match &place {
                Place::Dir(path) => match Directory::named(path) {
                    Ok(d) => found.push(self.open.get(&d.id()).cloned().unwrap_or_else(|| Arc::new(d))),
                    Err(DirectoryError::Io(Errno::NOENT)) => {}
                    Err(e) => listing.unread.push(unread(path, &e)),
                },
                Place::Host => {
                    match Shm::own() {
                        Ok(shm) => collect(&shm, (&self.open, self.turn), &mut found, &mut listing.unread),
                        Err(e) => listing.unread.push(unread(Path::new("/dev/shm"), &e)),
                    }
                    match self.containers().map(|c| c.map(Containers::found)) {
                        Ok(None) => {}
                        Ok(Some(there)) => {
                            self.complete &= there.passes > 0;
                            listing.unread.extend(there.unread);
                            for shm in there.shms {
                                collect(&shm, (&self.open, self.turn), &mut found, &mut listing.unread);
                            }
                        }
                        Err(e) => listing.unread.push(Unread {
                            path: "containers".to_owned(),
                            reason: UnreadReason::Limits,
                            detail: format!("no thread can be had to look for them: {e}"),
                            owner: None,
                        }),
                    }
                }
            }
        }
        let mut open = HashMap::new();
        let mut of_owner: HashMap<Option<u32>, usize> = HashMap::new();
        for directory in found {
            let id = directory.id();
            if open.contains_key(&id) {
                continue;
            }
            match directory.segments() {
                Ok((names, cut)) => {
                    // Of one user in all containers; an administrator's directories are theirs to keep small.
                    let taken = of_owner.entry(directory.owner()).or_default();
                    let room =
                        if directory.owner().is_some() { NAMES_OF_OWNER_MAX - *taken } else { usize::MAX };
                    if cut || names.len() > room {
                        let why = unread(directory.path(), &DirectoryError::TooMany);
                        listing.unread.push(Unread { owner: directory.owner(), ..why });
                    }
                    let before = listing.files.len();
                    let names = names.into_iter().take(room).map(|name| (Arc::clone(&directory), name));
                    listing.files.extend(names);
                    *taken += listing.files.len() - before;
                }
                Err(e) => listing.unread.push(unread(directory.path(), &e.into())),
            }
            open.insert(id, directory);
        }
        self.open = open;
        listing
    }
}

fn collect(
    shm: &Shm,
    (open, turn): (&OpenDirectories, u64),
    found: &mut Vec<Arc<Directory>>,
    refused: &mut Vec<Unread>,
) {
    for directory in shm.directories(open, turn) {
        match directory {
            Ok(d) => found.push(d),
            Err(e) => refused.push(Unread { owner: e.owner, ..unread(&e.path, &e.why) }),
        }
    }
}

fn unread(path: &Path, e: &DirectoryError) -> Unread {
    let (reason, advice) = match e {
        DirectoryError::Io(errno) => reason_of(*errno),
        DirectoryError::NotTmpfs => (UnreadReason::ForeignOwner, ""),
        DirectoryError::TooMany | DirectoryError::InTurns => (UnreadReason::Limits, ""),
    };
    Unread { path: shown(path), reason, detail: format!("{e}{advice}"), owner: None }
}

/// What an error of the system means for a segment, and what to do about it.
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
