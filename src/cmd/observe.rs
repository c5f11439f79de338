//! `--tune observe`: the plugin is NCCL's tuner, decides nothing, and notes what NCCL predicts. Detection expects that of
//! transfers.

use super::baselines::predicted;
use crate::detect::Baseline;
use crate::tune::cost_log::{FILE_BYTES, records};
use anyhow::Context;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use tempfile::NamedTempFile;

/// The file to which processes of a job note NCCL's predicted times.
#[derive(Debug)]
pub(super) struct CostLog {
    file: NamedTempFile,
    /// Records that were read.
    seen: u64,
}

impl CostLog {
    /// A file that is gone with this value.
    pub(super) fn of_job() -> anyhow::Result<Self> {
        Ok(CostLog { file: empty(&memory())?, seen: 0 })
    }

    pub(super) fn path(&self) -> &Path {
        self.file.path()
    }

    /// All predictions, where there are new ones.
    pub(super) fn news(&mut self) -> Option<Vec<Baseline>> {
        let mut begun = [0; 8];
        self.file.as_file().read_exact_at(&mut begun, 8).ok()?;
        if u64::from_le_bytes(begun) == self.seen {
            return None;
        }
        let mut all = vec![0; FILE_BYTES];
        self.file.as_file().read_exact_at(&mut all, 0).ok()?;
        // One that is not whole yet is looked at again.
        self.seen = records(&all).count() as u64;
        Some(predicted(&all).collect())
    }
}

/// Makes the file for jobs that Ringwatch does not start, in the place of an older one, which its jobs keep. It is in the
/// directory of segments that the user named, if any.
pub(super) fn shared() -> anyhow::Result<PathBuf> {
    let named = std::env::var_os("RINGWATCH_DIR").map(PathBuf::from).filter(|d| d.is_dir());
    let name = format!("ringwatch-{}-observed.costs", rustix::process::geteuid().as_raw());
    let file = empty(&named.unwrap_or_else(memory))?;
    let path = file.path().with_file_name(name);
    file.persist(&path).with_context(|| format!("cannot make {}; remove what is there", path.display()))?;
    Ok(path)
}

/// A directory in memory, where there is one.
fn memory() -> PathBuf {
    let shm = Path::new("/dev/shm");
    if shm.is_dir() { shm.to_owned() } else { std::env::temp_dir() }
}

/// Its blocks are written: a store to a mapping that finds no room would end the job.
fn empty(directory: &Path) -> anyhow::Result<NamedTempFile> {
    let what = || {
        format!(
            "cannot make a file of {FILE_BYTES} bytes for NCCL's predicted times in {}",
            directory.display()
        )
    };
    let mut file = tempfile::Builder::new().prefix("ringwatch-").tempfile_in(directory).with_context(what)?;
    file.write_all(&vec![0; FILE_BYTES]).with_context(what)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::detect::BaselineSource;
    use crate::model::Func;
    use crate::tune::cost_log::{HEADER_WORDS, MAGIC, RECORD_WORDS, SIZE_WORD, size_word};

    fn put(log: &CostLog, word: usize, value: u64) {
        log.file.as_file().write_all_at(&value.to_le_bytes(), 8 * word as u64).unwrap();
    }

    #[test]
    fn predictions_come_once_they_are_whole() {
        let mut log = CostLog::of_job().unwrap();
        assert_eq!(log.news(), None);
        put(&log, 0, MAGIC);
        put(&log, 1, 1);
        assert_eq!(log.news(), Some(vec![]), "the record is begun");
        let record = HEADER_WORDS + 7 * RECORD_WORDS;
        let (ring_us, tree_us) = (40f32, 90f32);
        put(&log, record + 1, 4 << 20);
        put(&log, record + 2, u64::from(tree_us.to_bits()) | u64::from((-1f32).to_bits()) << 32);
        put(&log, record + 3, u64::from(ring_us.to_bits()) | u64::from((-1f32).to_bits()) << 32);
        for pair in 4..13 {
            put(&log, record + pair, u64::from((-1f32).to_bits()) * (1 | 1 << 32));
        }
        put(&log, record + SIZE_WORD, size_word(8, 1));
        put(&log, record, 1 + 4);
        let of = |source, func| Baseline { source, func, ranks: 8, bytes: 4 << 20, time_ns: 40e3 };
        assert_eq!(log.news(), Some(vec![of(BaselineSource::Predicted, Func::AllReduce)]));
        assert_eq!(log.news(), None);
        let path = log.path().to_owned();
        drop(log);
        assert!(!path.exists());
    }
}
