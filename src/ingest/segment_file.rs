//! A segment's file: where it is, and its mapping.

use super::descriptors::held;
use super::directory::FileId;
use super::life::Life;
use super::lock::Lock;
use super::mapping::{MapError, Mapping};
use super::probe::OpenedSegment;
use super::survey::FileName;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

/// A segment that was found and mapped.
#[derive(Debug)]
pub(super) struct SegmentFile {
    file: FileName,
    pub(super) mapping: Mapping,
}

impl SegmentFile {
    /// Maps what was opened, by its descriptor; how its process lives is told beside it.
    pub(super) fn of(
        file: FileName,
        opened: &OpenedSegment,
        fd: OwnedFd,
        end: Option<OwnedFd>,
    ) -> Result<(Self, Option<Life>), MapError> {
        let life = opened.life.map(|found| Life::new(found, end)).transpose()?;
        let keeps_lock = matches!(life, Some(Life::Lock));
        let mapping = Mapping::of(File::from(held(fd)?), &opened.facts, opened.lock, keeps_lock)?;
        Ok((SegmentFile { file, mapping }, life))
    }

    /// Its path, for people.
    pub(super) fn path(&self) -> PathBuf {
        self.file.path()
    }

    /// Where it is, and which file it is.
    pub(super) fn name(&self) -> (FileName, FileId) {
        (self.file.clone(), self.mapping.file())
    }

    /// The holder of its lock now, where that is what shows that its process lives.
    pub(super) fn lock(&self) -> Lock {
        self.mapping.lock()
    }
}
