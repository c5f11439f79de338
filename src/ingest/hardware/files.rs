//! Small files of the kernel, whose contents nobody vouches for.

use crate::ingest::decode::steers;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

/// More than this of a file is not read.
const MOST: u64 = 256 * 1024;
/// Entries of a directory that are looked at.
const ENTRIES: usize = 1024;

/// A file as text, without the space around it.
pub(super) fn text(path: &Path) -> Option<String> {
    let mut text = Vec::new();
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

/// What a directory holds, by name. Names that could steer a terminal are left out.
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
