//! Directories that hold segments, opened once and used by their descriptors.
//!
//! A path of another user may lead somewhere else at every use. So a directory is opened one component at a time,
//! without following links or crossing mounts, checked, and from then on only its descriptor counts: files are opened
//! and removed below it. Inside a container a mount may also be a file system that never answers; to cross none is what
//! keeps the agent from waiting for it.

use super::descriptors::held;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, RawDir, ResolveFlags, Stat};
use rustix::io::Errno;
use std::cmp::Ordering;
use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::hash::{BuildHasher, RandomState};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

/// What the plugin's own directories in /dev/shm are called.
const PREFIX: &[u8] = b"ringwatch-";
const SUFFIX: &[u8] = b".seg";
const DIRECTORY: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
const ENTRY: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
const TMPFS_MAGIC: u64 = 0x0102_1994;

/// A file or directory, told apart from every other one on this host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct FileId {
    device: u64,
    inode: u64,
}

impl FileId {
    #[expect(clippy::useless_conversion, reason = "the types differ by architecture")]
    pub(super) fn of(stat: &Stat) -> Self {
        FileId { device: u64::from(stat.st_dev), inode: u64::from(stat.st_ino) }
    }
}

/// A directory that holds segments.
#[derive(Debug)]
pub(super) struct Directory {
    fd: OwnedFd,
    /// For people: the directory is used by its descriptor.
    path: PathBuf,
    /// The user whose files it may hold; `None` where an administrator named it, and everybody may.
    owner: Option<u32>,
    /// Who may mount something in it.
    mounts: Mounts,
    id: FileId,
}

/// Who may mount file systems in a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mounts {
    /// Whoever the administrator lets, who has named the directory.
    Named,
    /// The administrator of this process's own mount namespace, and users by FUSE.
    Own,
    /// Whoever made the container.
    Foreign,
}

/// Directories that are open.
pub(super) type OpenDirectories = HashMap<FileId, Arc<Directory>>;

/// Opens an entry of a directory; of one that nobody named without crossing a mount: what is mounted there may never answer.
fn open_entry(dir: BorrowedFd<'_>, name: &OsStr, flags: OFlags, mounts: Mounts) -> Result<OwnedFd, Errno> {
    let across = || rustix::fs::openat(dir, name, flags, Mode::empty());
    let within = || {
        let resolve = ResolveFlags::BENEATH
            | ResolveFlags::NO_XDEV
            | ResolveFlags::NO_SYMLINKS
            | ResolveFlags::NO_MAGICLINKS;
        rustix::fs::openat2(dir, name, flags, Mode::empty(), resolve)
    };
    match mounts {
        Mounts::Named => across(),
        // A kernel before 5.6, or a sandbox of one, does not know the call.
        Mounts::Own => {
            within().or_else(|e| if matches!(e, Errno::NOSYS | Errno::PERM) { across() } else { Err(e) })
        }
        Mounts::Foreign => within(),
    }
}

/// Why a directory is not read.
#[derive(Debug, thiserror::Error)]
pub(super) enum DirectoryError {
    #[error("{0}")]
    Io(#[from] Errno),
    /// The plugin writes to tmpfs; anything else may be a trap.
    #[error(
        "not a directory of its own on tmpfs; only those that are named in the settings may be elsewhere"
    )]
    NotTmpfs,
    /// One user makes more than are looked at.
    #[error("more directories or files than one user may have here; remove what is not needed")]
    TooMany,
    /// All users together do.
    #[error("more directories than are looked at in one search; each search looks at others")]
    InTurns,
}

impl Directory {
    /// Opens a directory that the user or an administrator named. It may be anywhere.
    pub(super) fn named(path: &Path) -> Result<Self, DirectoryError> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = rustix::fs::open(path, flags, Mode::empty())?;
        let id = FileId::of(&rustix::fs::fstat(&fd)?);
        Ok(Directory { fd, path: path.to_owned(), owner: None, mounts: Mounts::Named, id })
    }

    pub(super) fn id(&self) -> FileId {
        self.id
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The names of the segments in it, sorted, and whether there are more than are looked at.
    pub(super) fn segments(&self) -> Result<(Vec<OsString>, bool), Errno> {
        names(self.fd.as_fd(), None, |name, _| name.ends_with(SUFFIX))
    }

    /// The user whose files it may hold; `None` where an administrator named it.
    pub(super) fn owner(&self) -> Option<u32> {
        self.owner
    }

    /// The user of a file in it, where that is known.
    pub(super) fn owner_of(&self, name: &OsStr) -> Option<u32> {
        self.stat(name).ok().map(|stat| stat.st_uid)
    }

    /// Kind, owner and number of an entry, which is not opened for that.
    fn stat(&self, name: &OsStr) -> Result<Stat, Errno> {
        rustix::fs::fstat(open_entry(self.fd.as_fd(), name, ENTRY, self.mounts)?)
    }

    /// Opens a segment for reading. It is a regular file, of the directory's owner where the directory has one.
    pub(super) fn open(&self, name: &OsStr) -> Result<(File, Stat), OpenError> {
        // To open a device or a pipe can have an effect, so what it is is looked at first, without opening it.
        let entry = open_entry(self.fd.as_fd(), name, ENTRY, self.mounts)?;
        let stat = rustix::fs::fstat(&entry)?;
        self.accept(&stat)?;
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        Ok((File::from(reopen(&entry, flags)?), stat))
    }

    /// Opens the same segment for writing, whose mode lets nobody write by accident: its owner may all the same.
    pub(super) fn open_to_write(&self, name: &OsStr, file: FileId) -> Result<File, OpenError> {
        let (read, stat) = self.open(name)?;
        if FileId::of(&stat) != file {
            return Err(Errno::NOENT.into());
        }
        // Its user may hold a lease on it, which would keep who opens it waiting.
        let flags = OFlags::WRONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let opened = match reopen(&read, flags) {
            Err(Errno::ACCESS) => {
                rustix::fs::fchmod(&read, Mode::RUSR | Mode::WUSR)?;
                let opened = reopen(&read, flags);
                rustix::fs::fchmod(&read, Mode::RUSR)?;
                opened
            }
            opened => opened,
        };
        Ok(File::from(opened?))
    }

    fn accept(&self, stat: &Stat) -> Result<(), OpenError> {
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(OpenError::NotFile);
        }
        match self.owner {
            Some(owner) if owner != stat.st_uid => Err(OpenError::ForeignOwner { file: stat.st_uid, owner }),
            _ => Ok(()),
        }
    }

    /// Removes a file that was opened before, if it is still the one of that name.
    pub(super) fn remove(&self, name: &OsStr, file: FileId) -> Result<(), Errno> {
        if FileId::of(&self.stat(name)?) != file {
            return Err(Errno::NOENT);
        }
        rustix::fs::unlinkat(&self.fd, name, AtFlags::empty())
    }

    /// Size of its file system in bytes; unlimited where that is not known.
    pub(super) fn total_bytes(&self) -> u64 {
        rustix::fs::fstatvfs(&self.fd).map_or(u64::MAX, |f| f.f_blocks.saturating_mul(f.f_frsize))
    }
}

/// Opens what a descriptor stands for once more, in another way.
fn reopen(file: impl AsFd, flags: OFlags) -> Result<OwnedFd, Errno> {
    let own = format!("/proc/self/fd/{}", file.as_fd().as_raw_fd());
    rustix::fs::open(own, flags, Mode::empty())
}

/// Why a file of a directory is not opened.
#[derive(Debug, thiserror::Error)]
pub(super) enum OpenError {
    #[error("{0}")]
    Io(#[from] Errno),
    #[error("not a regular file")]
    NotFile,
    #[error("it belongs to user {file}, and its directory to user {owner}")]
    ForeignOwner { file: u32, owner: u32 },
}

/// A /dev/shm: the host's own, or a container's.
#[derive(Debug)]
pub(super) struct Shm {
    fd: OwnedFd,
    /// For people.
    path: PathBuf,
    mounts: Mounts,
    pub(super) id: FileId,
}

impl Shm {
    /// The /dev/shm of this process's own mount namespace.
    pub(super) fn own() -> Result<Self, DirectoryError> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = rustix::fs::open("/dev/shm", flags, Mode::empty())?;
        Self::of(fd, PathBuf::from("/dev/shm"), Mounts::Own)
    }

    /// One that the helper process has opened in another mount namespace.
    pub(super) fn of_container(fd: OwnedFd, path: PathBuf) -> Result<Self, DirectoryError> {
        Self::of(fd, path, Mounts::Foreign)
    }

    fn of(fd: OwnedFd, path: PathBuf, mounts: Mounts) -> Result<Self, DirectoryError> {
        if !is_tmpfs(fd.as_fd())? {
            return Err(DirectoryError::NotTmpfs);
        }
        let id = FileId::of(&rustix::fs::fstat(&fd)?);
        Ok(Shm { fd, path, mounts, id })
    }

    /// The same, where it may be held for long.
    ///
    /// # Errors
    /// As [`held`].
    pub(super) fn held(self) -> Result<Self, Errno> {
        Ok(Shm { fd: held(self.fd)?, ..self })
    }

    /// Opens `dev/shm` below a root that may be anybody's. The file system behind it may never answer: only a process that
    /// can be abandoned may call this.
    pub(super) fn open_below(root: BorrowedFd<'_>) -> Result<OwnedFd, DirectoryError> {
        let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        let fd = rustix::fs::openat2(root, "dev/shm", DIRECTORY, Mode::empty(), resolve)?;
        if is_tmpfs(fd.as_fd())? { Ok(fd) } else { Err(DirectoryError::NotTmpfs) }
    }

    /// The users' directories in it, and why others are not read. Those that are open already are not opened again. Of too
    /// many names each turn looks at others, so that nobody's are left out for good.
    pub(super) fn directories(
        &self,
        open: &OpenDirectories,
        turn: u64,
    ) -> Vec<Result<Arc<Directory>, UnreadDirectory>> {
        let refused = |path: PathBuf, owner, why| UnreadDirectory { path, owner, why };
        let wanted = |name: &[u8], kind| {
            name.starts_with(PREFIX) && matches!(kind, FileType::Directory | FileType::Unknown)
        };
        let (mut all, cut) = match names(self.fd.as_fd(), Some(turn), wanted) {
            Ok(listed) => listed,
            Err(e) => return vec![Err(refused(self.path.clone(), None, e.into()))],
        };
        if cut {
            let here = open.values().filter(|d| d.path.parent() == Some(&self.path));
            all.extend(here.filter_map(|d| d.path.file_name()).map(OsStr::to_owned));
            all.sort();
            all.dedup();
        }
        let mut of_owner: HashMap<Option<u32>, usize> = HashMap::new();
        let found = |name: OsString| match self.directory(&name, open) {
            Ok(d) => {
                let n = of_owner.entry(d.owner).or_default();
                *n += 1;
                match (*n).cmp(&(DIRECTORIES_OF_OWNER_MAX + 1)) {
                    Ordering::Less => Some(Ok(d)),
                    // One stands for all that are too many.
                    Ordering::Equal => Some(Err(refused(d.path.clone(), d.owner, DirectoryError::TooMany))),
                    Ordering::Greater => None,
                }
            }
            // It went away, or a file or a link has such a name.
            Err((_, DirectoryError::Io(Errno::NOENT | Errno::NOTDIR | Errno::LOOP))) => None,
            Err((owner, why)) => Some(Err(refused(self.path.join(name), owner, why))),
        };
        let too_many = cut.then(|| Err(refused(self.path.clone(), None, DirectoryError::InTurns)));
        all.into_iter().filter_map(found).chain(too_many).collect()
    }

    /// A user's directory; else whose it is, as far as that is known, and why it is not read.
    fn directory(
        &self,
        name: &OsStr,
        open: &OpenDirectories,
    ) -> Result<Arc<Directory>, (Option<u32>, DirectoryError)> {
        let shm = self.fd.as_fd();
        let flags = ENTRY | OFlags::DIRECTORY;
        let entry = open_entry(shm, name, flags, self.mounts).map_err(|e| match e {
            Errno::XDEV => (None, DirectoryError::NotTmpfs),
            e => (None, e.into()),
        })?;
        let stat = rustix::fs::fstat(&entry).map_err(|e| (None, e.into()))?;
        let id = FileId::of(&stat);
        let own = || -> Result<Arc<Directory>, DirectoryError> {
            if stat.st_dev != rustix::fs::fstat(shm)?.st_dev || !is_tmpfs(entry.as_fd())? {
                return Err(DirectoryError::NotTmpfs);
            }
            if let Some(known) = open.get(&id).filter(|d| d.owner == Some(stat.st_uid)) {
                return Ok(Arc::clone(known));
            }
            let fd = held(rustix::fs::openat(&entry, ".", DIRECTORY, Mode::empty())?)?;
            let path = self.path.join(name);
            Ok(Arc::new(Directory { fd, path, owner: Some(stat.st_uid), mounts: self.mounts, id }))
        };
        own().map_err(|e| (Some(stat.st_uid), e))
    }
}

/// A directory that is not read.
#[derive(Debug)]
pub(super) struct UnreadDirectory {
    pub(super) path: PathBuf,
    pub(super) owner: Option<u32>,
    pub(super) why: DirectoryError,
}

pub(super) fn is_tmpfs(fd: BorrowedFd<'_>) -> Result<bool, Errno> {
    let kind = rustix::fs::fstatfs(fd)?.f_type;
    Ok(u64::try_from(kind).is_ok_and(|k| k & 0xffff_ffff == TMPFS_MAGIC))
}

/// Names in a directory, sorted, as far as they are wanted; and whether there are too many. Of too many the first ones are
/// given, or, where turns are taken, those whose turn it is.
fn names(
    dir: BorrowedFd<'_>,
    turn: Option<u64>,
    wanted: impl Fn(&[u8], FileType) -> bool,
) -> Result<(Vec<OsString>, bool), Errno> {
    let (mut all, mut many) = (Vec::new(), 0);
    each_name(dir, |name, kind| {
        let is_wanted = wanted(name, kind);
        many += usize::from(is_wanted);
        if is_wanted && all.len() < NAMES_MAX {
            all.push(OsStr::from_bytes(name).to_owned());
        }
        many <= NAMES_MAX || turn.is_some()
    })?;
    let cut = many > NAMES_MAX;
    if let (true, Some(turn)) = (cut, turn) {
        // By a hash that nobody else can foresee. Half full, so that chance alone leaves none out.
        let turns = (many as u64).div_ceil(NAMES_MAX as u64 / 2);
        let hashes = HASHES.get_or_init(RandomState::new);
        all.clear();
        each_name(dir, |name, kind| {
            if wanted(name, kind) && hashes.hash_one(name) % turns == turn % turns {
                all.push(OsStr::from_bytes(name).to_owned());
            }
            all.len() < NAMES_MAX
        })?;
    }
    all.sort();
    Ok((all, cut))
}

/// Goes through a directory's names until it is told to stop.
fn each_name(dir: BorrowedFd<'_>, mut go_on: impl FnMut(&[u8], FileType) -> bool) -> Result<(), Errno> {
    // A descriptor of its own: reading moves it, and others read the same directory.
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let own = rustix::fs::openat(dir, ".", flags, Mode::empty())?;
    let mut room = [MaybeUninit::uninit(); 8192];
    let mut entries = RawDir::new(own, &mut room);
    while let Some(entry) = entries.next() {
        let entry = entry?;
        if !go_on(entry.file_name().to_bytes(), entry.file_type()) {
            break;
        }
    }
    Ok(())
}

/// How names are told to take turns.
static HASHES: OnceLock<RandomState> = OnceLock::new();

/// Names of one directory that are looked at: its owner may make as many as memory holds.
const NAMES_MAX: usize = 4096;
/// Directories of one user in one /dev/shm: the plugin makes one.
const DIRECTORIES_OF_OWNER_MAX: usize = 4;

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn shm(dir: &Path) -> Shm {
        let fd = rustix::fs::open(dir, OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty()).expect("opens");
        Shm::of(fd, dir.to_owned(), Mounts::Foreign).expect("tmpfs")
    }

    fn on_tmpfs() -> tempfile::TempDir {
        tempfile::tempdir_in("/dev/shm").expect("a directory in /dev/shm")
    }

    #[test]
    fn links_and_files_are_no_directories_of_users() {
        let dir = on_tmpfs();
        fs::create_dir(dir.path().join("ringwatch-1")).expect("made");
        fs::write(dir.path().join("ringwatch-2"), "").expect("written");
        std::os::unix::fs::symlink("/", dir.path().join("ringwatch-3")).expect("linked");
        fs::create_dir(dir.path().join("other")).expect("made");
        let all: Vec<PathBuf> = shm(dir.path())
            .directories(&OpenDirectories::new(), 0)
            .into_iter()
            .map(|d| d.expect("opens").path.clone())
            .collect();
        assert_eq!(all, [dir.path().join("ringwatch-1")]);
    }

    #[test]
    fn names_and_directories_without_number_are_cut_and_said_to_be() {
        let dir = on_tmpfs();
        for n in 0..20 {
            fs::create_dir(dir.path().join(format!("ringwatch-{n}"))).expect("made");
        }
        let found = shm(dir.path()).directories(&OpenDirectories::new(), 0);
        let too_many = |d: &Result<Arc<Directory>, UnreadDirectory>| {
            d.as_ref().is_err_and(|e| matches!(e.why, DirectoryError::TooMany) && e.owner.is_some())
        };
        assert_eq!(found.iter().filter(|d| d.is_ok()).count(), DIRECTORIES_OF_OWNER_MAX);
        assert_eq!(found.iter().filter(|d| too_many(d)).count(), 1);
        let first = found.into_iter().find_map(Result::ok).expect("opened");
        for n in 0..=NAMES_MAX {
            fs::write(first.path().join(format!("{n}.seg")), "").expect("written");
        }
        let (names, cut) = first.segments().expect("read");
        assert_eq!((names.len(), cut), (NAMES_MAX, true));
    }

    #[test]
    fn what_is_not_on_tmpfs_is_refused() {
        let fd = rustix::fs::open("/proc", OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty()).expect("opens");
        assert!(matches!(Shm::of(fd, "/proc".into(), Mounts::Own), Err(DirectoryError::NotTmpfs)));
    }

    #[test]
    fn only_a_regular_file_is_opened_and_only_the_same_one_removed() {
        let dir = on_tmpfs();
        fs::create_dir(dir.path().join("ringwatch-1")).expect("made");
        let below = dir.path().join("ringwatch-1");
        fs::write(below.join("a.seg"), "x").expect("written");
        std::os::unix::fs::symlink("a.seg", below.join("b.seg")).expect("linked");
        fs::create_dir(below.join("c.seg")).expect("made");
        let all = shm(dir.path()).directories(&OpenDirectories::new(), 0);
        let user = all[0].as_ref().expect("opens");
        assert_eq!(
            user.segments().expect("read"),
            (["a.seg", "b.seg", "c.seg"].map(OsString::from).to_vec(), false)
        );
        let (_, stat) = user.open("a.seg".as_ref()).expect("a file");
        assert!(matches!(user.open("b.seg".as_ref()), Err(OpenError::NotFile)));
        assert!(matches!(user.open("c.seg".as_ref()), Err(OpenError::NotFile)));
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
            eprintln!("skipped: only root can give a file to another user");
            return;
        }
        let dir = on_tmpfs();
        let below = dir.path().join("ringwatch-1");
        fs::create_dir(&below).expect("made");
        fs::write(below.join("a.seg"), "x").expect("written");
        std::os::unix::fs::chown(below.join("a.seg"), Some(12_345), None).expect("given");
        let all = shm(dir.path()).directories(&OpenDirectories::new(), 0);
        let user = all[0].as_ref().expect("opens");
        assert!(matches!(
            user.open("a.seg".as_ref()),
            Err(OpenError::ForeignOwner { file: 12_345, owner: 0 })
        ));
    }
}
