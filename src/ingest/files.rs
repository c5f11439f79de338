//! Small files of the kernel, whose contents nobody vouches for.

use super::descriptors::is_shortage;
use crate::model::steers;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::fs::File;
use std::io::Read;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};

/// More than this of a file is not read.
const MOST: u64 = 256 * 1024;
/// Entries of a directory that are looked at.
const ENTRIES: usize = 1024;

/// Most files are shorter than this: they are read in one go.
const USUAL: usize = 4096;

/// Room for a usual file.
pub(super) const ROOM: [u8; USUAL] = [0; USUAL];

/// The content of a file, by its name in an open directory; no more than there is room for. For what is asked for
/// again and again: nothing is allocated, and the kernel has no long path to walk. `None` where it cannot be read.
///
/// # Errors
/// Nothing can be said of it: there is no descriptor or memory to open it.
pub(super) fn read<'r>(
    dir: BorrowedFd<'_>,
    name: &str,
    room: &'r mut [u8],
) -> Result<Option<&'r str>, Errno> {
    let file = match rustix::fs::openat(dir, name, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()) {
        Ok(file) => file,
        Err(e) if is_shortage(e) => return Err(e),
        Err(_) => return Ok(None),
    };
    let mut length = 0;
    while let Some(rest) = room.get_mut(length..) {
        match rustix::io::read(&file, rest) {
            Ok(0) => break,
            Ok(n) => length += n,
            Err(Errno::INTR) => {}
            Err(_) => return Ok(None),
        }
    }
    Ok(room.get(..length).and_then(|bytes| std::str::from_utf8(bytes).ok()))
}

/// The number behind a word in a text of `word number` lines.
pub(super) fn named(text: &str, word: &str) -> Option<u64> {
    text.lines().find_map(|l| l.strip_prefix(word)?.strip_prefix(' ')?.trim().parse().ok())
}

/// A file as text, without the space around it.
pub(super) fn text(path: &Path) -> Option<String> {
    let mut text = Vec::with_capacity(USUAL);
    File::open(path).ok()?.take(MOST).read_to_end(&mut text).ok()?;
    Some(String::from_utf8_lossy(&text).trim().to_owned())
}

/// A file that holds one number.
pub(super) fn number(path: &Path) -> Option<u64> {
    text(path)?.parse().ok()
}

/// The sum of those files that hold a number; absent where none does.
pub(super) fn sum(dir: &Path, names: &[&str]) -> Option<u64> {
    let numbers = names.iter().filter_map(|n| number(&dir.join(n)));
    numbers.fold(None, |sum: Option<u64>, n| Some(sum.unwrap_or(0).saturating_add(n)))
}

/// The entries of a directory, by name. Names that could steer a terminal are left out.
pub(super) fn entries(dir: &Path) -> Option<Vec<(String, PathBuf)>> {
    let mut all: Vec<(String, PathBuf)> = std::fs::read_dir(dir)
        .ok()?
        .flatten()
        .take(ENTRIES)
        .map(|e| (e.file_name().to_string_lossy().into_owned(), e.path()))
        .filter(|(name, _)| !name.chars().any(steers))
        .collect();
    all.sort();
    Some(all)
}
