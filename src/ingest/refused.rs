//! Segments that are not read: which, why, and in what order files are tried.

use super::directory::Directory;
use super::survey::FileName;
use crate::model::Unread;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Files that are not read, by path.
#[derive(Debug, Default)]
pub(super) struct Refused {
    files: BTreeMap<PathBuf, (Unread, u64)>,
}

impl Refused {
    /// A file was tried at a moment, in vain.
    pub(super) fn insert(&mut self, path: PathBuf, why: Unread, now_ns: u64) {
        self.files.insert(path, (why, now_ns));
    }

    pub(super) fn remove(&mut self, path: &Path) {
        self.files.remove(path);
    }

    /// Forgets files that are not there anymore.
    pub(super) fn keep_only(&mut self, listed: &HashSet<PathBuf>) {
        self.files.retain(|path, _| listed.contains(path));
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Unread> {
        self.files.values().map(|(why, _)| why)
    }

    /// True for a file that was never tried.
    pub(super) fn is_new(&self, path: &Path) -> bool {
        !self.files.contains_key(path)
    }

    /// Files in the order in which they are tried: those that never were, the first of each directory before the second of
    /// any; then those that were refused, the one first whose last try is the longest ago. So neither a directory full of
    /// garbage nor garbage from before keeps a new segment waiting.
    pub(super) fn in_order<'a>(
        &self,
        files: impl Iterator<Item = &'a FileName>,
    ) -> Vec<(PathBuf, &'a FileName)> {
        let mut of_directory: HashMap<*const Directory, usize> = HashMap::new();
        let mut all: Vec<_> = files
            .map(|file| {
                let path = file.path();
                let nth = of_directory.entry(Arc::as_ptr(&file.directory)).or_default();
                *nth += 1;
                let tried_ns = self.files.get(&path).map(|(_, tried_ns)| *tried_ns);
                ((tried_ns, *nth), path, file)
            })
            .collect();
        all.sort_by_key(|(order, ..)| *order);
        all.into_iter().map(|(_, path, file)| (path, file)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::UnreadReason;
    use std::ffi::OsString;

    #[test]
    fn new_files_come_first_in_turn_and_refused_ones_by_their_last_try() {
        let room = tempfile::tempdir_in("/dev/shm").expect("a directory");
        let dir = |name: &str| {
            let path = room.path().join(name);
            std::fs::create_dir(&path).expect("a directory");
            Arc::new(Directory::named(&path).expect("opens"))
        };
        let (a, b) = (dir("a"), dir("b"));
        let file = |d: &Arc<Directory>, name: &str| FileName {
            directory: Arc::clone(d),
            name: OsString::from(name),
            owner: None,
        };
        let files =
            [file(&a, "1"), file(&a, "2"), file(&a, "3"), file(&a, "4"), file(&b, "5"), file(&b, "6")];
        let mut refused = Refused::default();
        let why = |path: &str| Unread {
            path: path.to_owned(),
            reason: UnreadReason::NotASegment,
            detail: String::new(),
            owner: None,
        };
        refused.insert(a.path().join("1"), why("1"), 20);
        refused.insert(a.path().join("3"), why("3"), 10);
        let order: Vec<&OsString> =
            refused.in_order(files.iter()).into_iter().map(|(_, f)| &f.name).collect();
        assert_eq!(order, ["5", "2", "6", "4", "3", "1"]);
        assert!(refused.is_new(&a.path().join("2")) && !refused.is_new(&a.path().join("1")));
        refused.keep_only(&[a.path().join("3")].into());
        assert_eq!(refused.iter().map(|u| u.path.as_str()).collect::<Vec<_>>(), ["3"]);
    }
}
