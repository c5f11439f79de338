//! The users' directories in a /dev/shm, the host's own or a container's.
//!
//! Who may wait here is said in [`super::directory`].

use super::descriptors::at_once;
use super::directory::{
    DIRECTORY, Directory, ENTRY, Failure, FileId, Folder, Mounts, is_tmpfs, names, open_entry,
};
use super::probe::{Bytes, RefusedFolder, Users};
use rustix::fs::{FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use std::cmp::Ordering;
use std::collections::HashMap;
use std::ffi::OsStr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

/// The beginning of the names of the plugin's own directories in /dev/shm.
const PREFIX: &str = "ringwatch-";
/// Directories of one user in one /dev/shm: the plugin makes one.
const DIRECTORIES_OF_OWNER_MAX: usize = 4;

/// A /dev/shm.
#[derive(Debug)]
pub(super) struct Shm {
    fd: OwnedFd,
    /// For people.
    path: PathBuf,
    mounts: Mounts,
    pub(super) id: FileId,
}

impl AsFd for Shm {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Shm {
    /// The /dev/shm of this process's own mount namespace.
    pub(super) fn own() -> Result<Self, Failure> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = rustix::fs::open("/dev/shm", flags, Mode::empty())?;
        if !is_tmpfs(fd.as_fd())? {
            return Err(Failure::NotTmpfs);
        }
        let id = FileId::of(&rustix::fs::fstat(&fd)?);
        Ok(Shm { fd, path: PathBuf::from("/dev/shm"), mounts: Mounts::Own, id })
    }

    /// One that a probe has opened in another mount namespace, and checked.
    pub(super) fn of_container(fd: OwnedFd, path: PathBuf, id: FileId) -> Self {
        Shm { fd, path, mounts: Mounts::Foreign, id }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Opens `dev/shm` below a root that may be anybody's.
    pub(super) fn open_below(root: BorrowedFd<'_>) -> Result<(OwnedFd, FileId), Failure> {
        let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        let fd = rustix::fs::openat2(root, "dev/shm", DIRECTORY, Mode::empty(), resolve)?;
        if !is_tmpfs(fd.as_fd())? {
            return Err(Failure::NotTmpfs);
        }
        let id = FileId::of(&rustix::fs::fstat(&fd)?);
        Ok((fd, id))
    }

    /// The users' directories in it, and why others are not read. Those that are known are not opened again. Of too many
    /// names each turn takes others, so that nobody's are left out for good.
    pub(super) fn users(&self, known: &[Folder], turn: u64) -> Result<(Users, Vec<Directory>), Failure> {
        let mut users = Users { shm: self.id, ..Users::default() };
        let wanted = |name: &[u8], kind| {
            name.starts_with(PREFIX.as_bytes()) && matches!(kind, FileType::Directory | FileType::Unknown)
        };
        let (mut all, cut) = names(self.fd.as_fd(), Some(turn), wanted)?;
        if cut {
            let here = known.iter().filter(|f| f.path().parent() == Some(&self.path));
            all.extend(here.filter_map(|f| f.path().file_name()).map(OsStr::to_owned));
            all.sort();
            all.dedup();
            users.refused.push(RefusedFolder {
                path: Bytes::from(&self.path),
                owner: None,
                why: Failure::InTurns,
            });
        }
        let known: HashMap<FileId, Option<u32>> = known.iter().map(|f| (f.id, f.owner)).collect();
        let (mut opened, mut of_owner) = (Vec::new(), HashMap::new());
        for name in all {
            self.add(&name, &known, &mut of_owner, (&mut users, &mut opened));
        }
        Ok((users, opened))
    }

    /// Adds what a name leads to.
    fn add(
        &self,
        name: &OsStr,
        known: &HashMap<FileId, Option<u32>>,
        of_owner: &mut HashMap<u32, usize>,
        (users, opened): (&mut Users, &mut Vec<Directory>),
    ) {
        let path = Bytes::from(&self.path.join(name));
        let (id, owner, entry) = match self.entry(name) {
            Ok(entry) => entry,
            // It went away, or a file or a link has such a name.
            Err((_, why)) if matches!(why.errno(), Some(Errno::NOENT | Errno::NOTDIR | Errno::LOOP)) => {
                return;
            }
            Err((owner, why)) => {
                users.refused.push(RefusedFolder { path, owner, why });
                return;
            }
        };
        let n = of_owner.entry(owner).or_default();
        *n += 1;
        match (*n).cmp(&(DIRECTORIES_OF_OWNER_MAX + 1)) {
            Ordering::Less => {}
            // One stands for all that are too many.
            Ordering::Equal => {
                users.refused.push(RefusedFolder { path, owner: Some(owner), why: Failure::TooMany });
                return;
            }
            Ordering::Greater => return,
        }
        // In a container users have other numbers.
        if let Some(named) = named_user(name).filter(|n| *n != owner && self.mounts == Mounts::Own) {
            let why = Failure::ForeignName { named, owner };
            users.refused.push(RefusedFolder { path: path.clone(), owner: Some(named), why });
        }
        if known.get(&id) == Some(&Some(owner)) {
            users.known.push(id);
        } else if opened.len() >= at_once() {
            users.more = true;
        } else {
            match rustix::fs::openat(&entry, ".", DIRECTORY, Mode::empty()) {
                Ok(fd) => {
                    let folder = Folder { path, owner: Some(owner), mounts: self.mounts, id };
                    users.opened.push(folder.clone());
                    opened.push(Directory::of(fd, folder));
                }
                Err(e) => users.refused.push(RefusedFolder { path, owner: Some(owner), why: e.into() }),
            }
        }
    }

    /// A user's directory, not yet open for reading; else whose it is, as far as that is known, and why it is not read.
    fn entry(&self, name: &OsStr) -> Result<(FileId, u32, OwnedFd), (Option<u32>, Failure)> {
        let shm = self.fd.as_fd();
        let entry = open_entry(shm, name, ENTRY | OFlags::DIRECTORY, self.mounts).map_err(|e| match e {
            Errno::XDEV => (None, Failure::NotTmpfs),
            e => (None, e.into()),
        })?;
        let stat = rustix::fs::fstat(&entry).map_err(|e| (None, e.into()))?;
        let on_shm = || -> Result<bool, Errno> {
            Ok(stat.st_dev == rustix::fs::fstat(shm)?.st_dev && is_tmpfs(entry.as_fd())?)
        };
        match on_shm() {
            Ok(true) => Ok((FileId::of(&stat), stat.st_uid, entry)),
            Ok(false) => Err((Some(stat.st_uid), Failure::NotTmpfs)),
            Err(e) => Err((Some(stat.st_uid), Failure::from(e))),
        }
    }
}

/// The user whose plugin makes a directory of this name.
fn named_user(name: &OsStr) -> Option<u32> {
    let number = name.to_str()?.strip_prefix(PREFIX)?;
    // The plugin writes a number in one way.
    number.parse().ok().filter(|n: &u32| n.to_string() == number)
}

/// The name of a directory.
#[cfg(test)]
fn file_name(folder: &Folder) -> std::ffi::OsString {
    folder.path().file_name().map(OsStr::to_owned).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::super::directory::NAMES_MAX;
    use super::*;
    use std::ffi::OsString;
    use std::fs;

    /// A directory on tmpfs as a /dev/shm with directories of users.
    fn shm(dir: &Path, mounts: Mounts) -> Shm {
        let fd = rustix::fs::open(dir, OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty()).expect("opens");
        let id = FileId::of(&rustix::fs::fstat(&fd).expect("open"));
        Shm { fd, path: dir.to_owned(), mounts, id }
    }

    fn on_tmpfs() -> tempfile::TempDir {
        tempfile::tempdir_in("/dev/shm").expect("a directory in /dev/shm")
    }

    fn names_of(users: &Users) -> Vec<OsString> {
        users.opened.iter().map(file_name).collect()
    }

    #[test]
    fn links_and_files_are_no_directories_of_users() {
        let dir = on_tmpfs();
        fs::create_dir(dir.path().join("ringwatch-1")).expect("made");
        fs::write(dir.path().join("ringwatch-2"), "").expect("written");
        std::os::unix::fs::symlink("/", dir.path().join("ringwatch-3")).expect("linked");
        fs::create_dir(dir.path().join("other")).expect("made");
        let (users, opened) = shm(dir.path(), Mounts::Foreign).users(&[], 0).expect("listed");
        assert_eq!((names_of(&users), users.refused.len()), (vec!["ringwatch-1".into()], 0));
        let (again, none) = shm(dir.path(), Mounts::Foreign).users(&users.opened, 0).expect("listed");
        assert_eq!((again.known, again.opened.len(), none.len()), (vec![opened[0].id()], 0, 0));
    }

    #[test]
    fn a_directory_of_anothers_name_is_reported_for_the_user_in_its_name() {
        let dir = on_tmpfs();
        let own = rustix::process::geteuid().as_raw();
        for name in [format!("ringwatch-{own}"), "ringwatch-60321".to_owned(), "ringwatch-060321".to_owned()]
        {
            fs::create_dir(dir.path().join(name)).expect("made");
        }
        let (users, _) = shm(dir.path(), Mounts::Own).users(&[], 0).expect("listed");
        assert_eq!(users.opened.len(), 3, "its owner's segments in it are read");
        let reported: Vec<_> = users.refused.iter().map(|r| (r.owner, r.why)).collect();
        assert_eq!(reported, [(Some(60_321), Failure::ForeignName { named: 60_321, owner: own })]);
        let (users, _) = shm(dir.path(), Mounts::Foreign).users(&[], 0).expect("listed");
        assert_eq!(users.refused, [], "a container has numbers of its own");
    }

    #[test]
    fn names_and_directories_without_number_are_cut_and_said_to_be() {
        let dir = on_tmpfs();
        for n in 0..20 {
            fs::create_dir(dir.path().join(format!("ringwatch-{n}"))).expect("made");
        }
        let (users, opened) = shm(dir.path(), Mounts::Foreign).users(&[], 0).expect("listed");
        assert_eq!(opened.len(), DIRECTORIES_OF_OWNER_MAX);
        let too_many = users.refused.iter().filter(|r| r.why == Failure::TooMany && r.owner.is_some());
        assert_eq!((too_many.count(), users.refused.len()), (1, 1));
        let first = opened.first().expect("opened");
        for n in 0..=NAMES_MAX {
            fs::write(first.path().join(format!("{n}.seg")), "").expect("written");
        }
        let (names, cut) = first.segments().expect("read");
        assert_eq!((names.len(), cut), (NAMES_MAX, true));
    }

    #[test]
    fn only_a_regular_file_is_opened_and_only_the_same_one_removed() {
        let dir = on_tmpfs();
        fs::create_dir(dir.path().join("ringwatch-1")).expect("made");
        let below = dir.path().join("ringwatch-1");
        fs::write(below.join("a.seg"), "x").expect("written");
        std::os::unix::fs::symlink("a.seg", below.join("b.seg")).expect("linked");
        fs::create_dir(below.join("c.seg")).expect("made");
        let (_, all) = shm(dir.path(), Mounts::Foreign).users(&[], 0).expect("listed");
        let user = all.first().expect("opened");
        assert_eq!(
            user.segments().expect("read"),
            (["a.seg", "b.seg", "c.seg"].map(OsString::from).to_vec(), false)
        );
        let (_, stat) = user.open("a.seg".as_ref()).expect("a file");
        assert!(matches!(user.open("b.seg".as_ref()), Err(Failure::NotFile)));
        assert!(matches!(user.open("c.seg".as_ref()), Err(Failure::NotFile)));
        let id = FileId::of(&stat);
        fs::write(below.join("new"), "y").expect("written");
        fs::rename(below.join("new"), below.join("a.seg")).expect("renamed");
        assert_eq!(user.remove("a.seg".as_ref(), id), Err(Errno::NOENT), "it is another file now");
        let (_, stat) = user.open("a.seg".as_ref()).expect("a file");
        user.remove("a.seg".as_ref(), FileId::of(&stat)).expect("removed");
        assert!(!below.join("a.seg").exists());
    }

    #[test]
    fn a_file_of_another_user_is_refused() {
        if !rustix::process::geteuid().is_root() {
            super::super::skip::skipped("a_file_of_another_user_is_refused", "root");
            return;
        }
        let dir = on_tmpfs();
        let below = dir.path().join("ringwatch-1");
        fs::create_dir(&below).expect("made");
        fs::write(below.join("a.seg"), "x").expect("written");
        std::os::unix::fs::chown(below.join("a.seg"), Some(12_345), None).expect("given");
        let (_, all) = shm(dir.path(), Mounts::Foreign).users(&[], 0).expect("listed");
        let user = all.first().expect("opened");
        assert_eq!(user.open("a.seg".as_ref()).err(), Some(Failure::ForeignOwner { file: 12_345, owner: 0 }));
    }

    #[test]
    fn what_is_not_on_tmpfs_is_refused() {
        let is_on_tmpfs = |path: &str| is_tmpfs(fs::File::open(path).expect("opens").as_fd());
        assert_eq!((is_on_tmpfs("/proc"), is_on_tmpfs("/dev/shm")), (Ok(false), Ok(true)));
    }
}
