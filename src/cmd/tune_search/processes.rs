//! The processes of a search: rank 0 orders, and each rank's process starts one child for each arm.
//!
//! A job of one process has no others to order. NCCL reads its plugins' and most other variables once a process, hence a child
//! for each arm; the children of a batch live together and measure in turns.

use super::super::demo_workers::{PATH_VARIABLE, Player, Variant, give_turns, library_path};
use crate::bench::rendezvous::Rendezvous;
use crate::bench::{Collective, Launch, Report, Settings};
use crate::bundle;
use crate::tune::cost_log::FILE_BYTES;
use anyhow::Context;
use serde::{Deserialize, Serialize};
use std::ffi::OsString;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;
use tempfile::TempDir;

/// The longest that ranks wait for each other: longer than all arms of a batch can hang.
const PATIENCE: Duration = Duration::from_secs(900);

/// The environment of one child, the same on all ranks.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ArmEnvironment {
    pub(super) has_tuner: bool,
    pub(super) min_channels: Option<u32>,
    /// The compiled rules.
    pub(super) table: Option<Vec<u8>>,
    /// Rank 0's plugin notes NCCL's predicted times.
    pub(super) is_noted: bool,
}

/// The next measurements of all ranks.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct ArmBatch {
    pub(super) collective: Collective,
    pub(super) sizes: Vec<u64>,
    pub(super) arms: Vec<ArmEnvironment>,
    pub(super) repeats: u32,
    pub(super) is_checked: bool,
    /// One operation of each size is issued, and nothing is measured.
    pub(super) is_single: bool,
}

/// This process's part.
#[derive(Debug)]
pub(super) struct RankProcesses {
    base: Settings,
    launch: Option<Launch>,
    others: Option<Rendezvous>,
    /// The plugin, tables and the cost log. /dev/shm is often mounted noexec, so they lie elsewhere.
    directory: TempDir,
    /// NCCL before 2.28 tells the communicator to the profiler alone.
    needs_profiler: bool,
    epoch: u64,
    turn: u32,
}

impl RankProcesses {
    pub(super) fn gather(
        base: Settings,
        launch: Option<Launch>,
        needs_profiler: bool,
    ) -> anyhow::Result<Self> {
        let directory = tempfile::tempdir().context("cannot make a temporary directory for the plugin")?;
        bundle::install(directory.path()).context("cannot write the plugin")?;
        let others = launch.as_ref().map(|l| Rendezvous::join(l, PATIENCE)).transpose()?;
        Ok(RankProcesses { base, launch, others, directory, needs_profiler, epoch: 0, turn: 0 })
    }

    /// True for the process that decides and prints.
    pub(super) fn is_leader(&self) -> bool {
        self.launch.as_ref().is_none_or(|l| l.rank == 0)
    }

    /// Orders a batch and takes part in it. The results are of the arms, in their order.
    pub(super) fn order(&mut self, batch: &ArmBatch) -> anyhow::Result<Vec<Result<Report, String>>> {
        self.send(Some(batch))?;
        let results = self.play(batch)?;
        let missing = || "rank 0's process has no report".to_owned();
        Ok(results.into_iter().map(|r| r.and_then(|report| report.ok_or_else(missing))).collect())
    }

    /// Ends the others' work.
    pub(super) fn dismiss(&mut self) -> anyhow::Result<()> {
        self.send(None)
    }

    /// Tells the others why there is nothing more to do.
    pub(super) fn give_up(&mut self, reason: &str) {
        if let Some(others) = &mut self.others {
            others.give_up(reason);
        }
    }

    /// Does what rank 0 orders, until rank 0 dismisses the others.
    pub(super) fn follow(&mut self) -> anyhow::Result<()> {
        loop {
            let Some(others) = &mut self.others else { return Ok(()) };
            let all = others.all_gather(&[])?;
            let order = all.first().map(Vec::as_slice).unwrap_or_default();
            let batch: Option<ArmBatch> =
                serde_json::from_slice(order).context("rank 0 has sent what this rank cannot read")?;
            let Some(batch) = batch else { return Ok(()) };
            self.play(&batch)?;
        }
    }

    fn send(&mut self, batch: Option<&ArmBatch>) -> anyhow::Result<()> {
        if let Some(others) = &mut self.others {
            others.all_gather(&serde_json::to_vec(&batch)?)?;
        }
        Ok(())
    }

    /// This process's children of a batch, from start to end.
    fn play(&mut self, batch: &ArmBatch) -> anyhow::Result<Vec<Result<Option<Report>, String>>> {
        let settings = self.settings(batch);
        let limit = Duration::from_secs(self.base.timeout_s.saturating_add(30));
        let mut players = Vec::new();
        for (i, arm) in batch.arms.iter().enumerate() {
            let variant = self.variant(arm, i)?;
            self.epoch += 1;
            players.push(Player::start(&variant, &settings, self.epoch, limit)?);
        }
        if self.is_leader() {
            give_turns(&mut players, self.turn);
        }
        self.turn = self.turn.wrapping_add(1);
        Ok(players.into_iter().map(|p| p.finish().0.map_err(|e| format!("{e:#}"))).collect())
    }

    fn settings(&self, batch: &ArmBatch) -> Settings {
        let mut s = Settings {
            collective: batch.collective,
            sizes: batch.sizes.clone(),
            repeat: batch.repeats,
            check: batch.is_checked,
            ..self.base.clone()
        };
        if batch.is_single {
            (s.iters, s.warmup_iters, s.millis) = (1, 0, None);
        }
        s
    }

    fn variant(&self, arm: &ArmEnvironment, nth: usize) -> anyhow::Result<Variant> {
        let directory = self.directory.path();
        let mut variables = Vec::new();
        let mut set = |name: &str, value: OsString| {
            variables.push((name.to_owned(), value.to_string_lossy().into_owned()));
        };
        if let Some(dir) = std::env::var_os("RINGWATCH_DIR") {
            set("RINGWATCH_DIR", dir);
        }
        if let Some(n) = arm.min_channels {
            set("NCCL_MIN_NCHANNELS", n.to_string().into());
        }
        if arm.has_tuner {
            set("NCCL_TUNER_PLUGIN", bundle::FILE_NAME.into());
            set(PATH_VARIABLE, library_path(directory));
        }
        if let Some(table) = &arm.table {
            let path = directory.join(format!("arm-{nth}.rules"));
            fs::write(&path, table).with_context(|| format!("cannot write {}", path.display()))?;
            set("RINGWATCH_TUNE", path.into());
            // An arm whose ranks do not agree would be measured without its rules.
            set("RINGWATCH_TUNE_REQUIRE", "1".into());
        }
        if arm.is_noted {
            let path = self.cost_log();
            fs::write(&path, vec![0; FILE_BYTES])
                .with_context(|| format!("cannot write {}", path.display()))?;
            set("RINGWATCH_TUNE_COSTS", path.into());
        }
        let plugin = (Some(directory.to_owned()), OsString::from(bundle::FILE_NAME));
        Ok(Variant {
            name: format!("arm {nth}"),
            plugin: self.needs_profiler.then_some(plugin),
            variables,
            segments: false,
        })
    }

    /// The file in which this process's children note NCCL's predicted times.
    pub(super) fn cost_log(&self) -> PathBuf {
        self.directory.path().join("costs")
    }
}
