//! Directories that hold segments, opened once and used by their descriptors.
//!
//! A path of another user may lead somewhere else at every use. So a directory is opened one component at a time,
//! without following links or crossing mounts, checked, and from then on only its descriptor counts: files are opened
//! and removed below it.
//!
//! Everything here may wait for the owner of a directory: listing one takes the lock of its inode, and removing a file
//! takes the file's lock as well. A user can hold both for ever, on tmpfs too. So a process that must not wait only holds
//! a [`Directory`], and has a probe use it.

use super::descriptors::held;
use super::probe::Bytes;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, RawDir, ResolveFlags, Stat};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::hash::{BuildHasher, RandomState};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::OnceLock;

const SUFFIX: &[u8] = b".seg";
pub(super) const DIRECTORY: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
pub(super) const ENTRY: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
const TMPFS_MAGIC: u64 = 0x0102_1994;
const FUSE_MAGIC: rustix::fs::FsWord = 0x6573_5546;

/// A file or directory, told apart from every other one on this host.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
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
    folder: Folder,
}

/// A directory's name, owner and place, without its descriptor.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Folder {
    /// For people: the directory is used by its descriptor.
    pub(super) path: Bytes,
    /// The user whose files it may hold; `None` where an administrator named it, and everybody may.
    pub(super) owner: Option<u32>,
    /// The users who may mount something in it.
    pub(super) mounts: Mounts,
    pub(super) id: FileId,
}

impl From<Directory> for OwnedFd {
    fn from(directory: Directory) -> Self {
        directory.fd
    }
}

impl AsFd for Directory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Folder {
    pub(super) fn path(&self) -> &Path {
        Path::new(&self.path.0)
    }
}

/// The users who may mount file systems in a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Mounts {
    /// The administrator's choice, who has named the directory.
    Named,
    /// The administrator of this process's own mount namespace, and users by FUSE.
    Own,
    /// The maker of the container.
    Foreign,
}

/// Opens an entry of a directory; of one that nobody named without crossing a mount: what is mounted there may never answer.
pub(super) fn open_entry(
    dir: BorrowedFd<'_>,
    name: &OsStr,
    flags: OFlags,
    mounts: Mounts,
) -> Result<OwnedFd, Errno> {
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

/// Why a file or directory is not read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
pub(super) enum Failure {
    #[error("{}", Errno::from_raw_os_error(*.0))]
    System(i32),
    #[error("not a regular file")]
    NotFile,
    #[error("it belongs to user {file}, and its directory to user {owner}")]
    ForeignOwner { file: u32, owner: u32 },
    /// Only the plugin of the user in its name would write there.
    #[error(
        "it is named after user {named}, and belongs to user {owner}: no plugin of user {named} writes there"
    )]
    ForeignName { named: u32, owner: u32 },
    /// The plugin writes to tmpfs; anything else may be a trap.
    #[error(
        "not a directory of its own on tmpfs; only those that are named in the settings may be elsewhere"
    )]
    NotTmpfs,
    /// Processes were listed before it began, and whether it runs is known when they are listed again.
    #[error("its process began a moment ago")]
    TooYoung,
    /// A user may have mounted it there, and a page of it may never come.
    #[error("a file system is mounted on it, and is not looked into")]
    Mounted,
    /// One user makes more than are looked at.
    #[error("more directories or files than one user may have here; remove what is not needed")]
    TooMany,
    /// All users together do.
    #[error("more directories than are looked at in one search; each search looks at others")]
    InTurns,
}

impl Failure {
    /// The error of the system, where it is one.
    pub(super) fn errno(self) -> Option<Errno> {
        if let Failure::System(errno) = self { Some(Errno::from_raw_os_error(errno)) } else { None }
    }
}

impl From<Errno> for Failure {
    fn from(e: Errno) -> Self {
        Failure::System(e.raw_os_error())
    }
}

impl Directory {
    /// Opens a directory that the user or an administrator named. It may be anywhere.
    pub(super) fn named(path: &Path) -> Result<Self, Failure> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = rustix::fs::open(path, flags, Mode::empty())?;
        let id = FileId::of(&rustix::fs::fstat(&fd)?);
        let folder = Folder { path: Bytes::from(path), owner: None, mounts: Mounts::Named, id };
        Ok(Directory { fd, folder })
    }

    /// A directory that another process has opened.
    pub(super) fn of(fd: OwnedFd, folder: Folder) -> Self {
        Directory { fd, folder }
    }

    /// The same, where it may be held for long.
    ///
    /// # Errors
    /// As [`held`].
    pub(super) fn held(self) -> Result<Self, Errno> {
        Ok(Directory { fd: held(self.fd)?, ..self })
    }

    pub(super) fn folder(&self) -> &Folder {
        &self.folder
    }

    #[cfg(test)]
    pub(super) fn id(&self) -> FileId {
        self.folder.id
    }

    pub(super) fn path(&self) -> &Path {
        self.folder.path()
    }

    /// The names of the segments in it, sorted, and whether there are more than are looked at.
    pub(super) fn segments(&self) -> Result<(Vec<OsString>, bool), Errno> {
        names(self.fd.as_fd(), None, |name, _| name.ends_with(SUFFIX))
    }

    /// The user of a file in it, where that is known.
    pub(super) fn owner_of(&self, name: &OsStr) -> Option<u32> {
        self.stat(name).ok().map(|stat| stat.st_uid)
    }

    /// Kind, owner and number of an entry, which is not opened for that.
    fn stat(&self, name: &OsStr) -> Result<Stat, Errno> {
        rustix::fs::fstat(open_entry(self.fd.as_fd(), name, ENTRY, self.folder.mounts)?)
    }

    /// Opens a segment for reading. It is a regular file, of the directory's owner where the directory has one.
    pub(super) fn open(&self, name: &OsStr) -> Result<(File, Stat), Failure> {
        // To open a device or a pipe can have an effect, so what it is is looked at first, without opening it.
        let entry = open_entry(self.fd.as_fd(), name, ENTRY, self.folder.mounts)?;
        let stat = rustix::fs::fstat(&entry)?;
        self.accept(&stat)?;
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = reopen(&entry, flags)?;
        // Whoever reads a mapping waits for the file system behind it, and no deadline helps then.
        let is_foreign = rustix::fs::fstatfs(&file)?.f_type == FUSE_MAGIC
            && rustix::fs::fstatfs(&self.fd)?.f_type != FUSE_MAGIC;
        if is_foreign { Err(Failure::Mounted) } else { Ok((File::from(file), stat)) }
    }

    /// Opens the same segment for writing, whose mode lets nobody write by accident: its owner may all the same.
    pub(super) fn open_to_write(&self, name: &OsStr, file: FileId) -> Result<File, Failure> {
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

    fn accept(&self, stat: &Stat) -> Result<(), Failure> {
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(Failure::NotFile);
        }
        match self.folder.owner {
            Some(owner) if owner != stat.st_uid => Err(Failure::ForeignOwner { file: stat.st_uid, owner }),
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

pub(super) fn is_tmpfs(fd: BorrowedFd<'_>) -> Result<bool, Errno> {
    let kind = rustix::fs::fstatfs(fd)?.f_type;
    Ok(u64::try_from(kind).is_ok_and(|k| k & 0xffff_ffff == TMPFS_MAGIC))
}

/// Names in a directory, sorted, as far as they are wanted; and whether there are too many. Of too many the first ones are
/// given, or, where turns are taken, those whose turn it is.
pub(super) fn names(
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
pub(super) const NAMES_MAX: usize = 4096;
