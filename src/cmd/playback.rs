//! A recording in place of live jobs.

use crate::detect::Settings;
use crate::join::FinishedSink;
use crate::model::{Snapshot, Source as _};
use crate::recording::Playback;
use crate::runtime::Monitor;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The fastest that a recording is played, as a multiple of its own time, and the slowest.
const SPEEDS: [f64; 11] = [0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0];
/// The speed of the recording's own time, among these.
const NORMAL: usize = 3;
/// The time by which a key moves the moment, in ns.
const STEP_NS: u64 = 1_000_000_000;
const SEEK_NS: u64 = 10 * STEP_NS;
/// Without messages the rules are asked so often, in ns of the recording.
const JUDGE_EVERY_NS: u64 = 250_000_000;
/// A longer time without messages is passed at once: nodes say something every 30 s.
const QUIET_MAX_NS: u64 = 120 * STEP_NS;

/// Plays a recording to its end, as fast as it can be read, and sends finished operations to `sink`. Returns the monitor and the
/// last moment.
pub(super) fn play(
    dir: &Path,
    sink: Option<Box<dyn FinishedSink>>,
) -> anyhow::Result<(Monitor<Playback>, u64)> {
    let mut playing = Playing::open(dir)?;
    playing.monitor = playing.monitor.with_steps().with_sink(sink);
    playing.advance(u64::MAX)?;
    playing.monitor.end(playing.now_ns);
    Ok((playing.monitor, playing.now_ns))
}

/// A recording that is being played.
#[derive(Debug)]
pub(super) struct Playing {
    dir: PathBuf,
    monitor: Monitor<Playback>,
    /// The moment in the recording, host monotonic ns, and the first one.
    now_ns: u64,
    first_ns: u64,
    judged_ns: u64,
    speed: usize,
    /// The time at which the moment was last moved, by the clock on the wall.
    moved: Instant,
    is_paused: bool,
    is_over: bool,
    /// It was opened near a moment, and lacks what finished before.
    is_partial: bool,
}

/// The request of a key about a recording.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Seek {
    Pause,
    Step,
    Faster,
    Slower,
    Forward,
    Back,
}

impl Seek {
    pub(super) fn of(key: char) -> Option<Self> {
        Some(match key {
            ' ' | 'p' => Seek::Pause,
            '.' => Seek::Step,
            '+' => Seek::Faster,
            '-' => Seek::Slower,
            ']' => Seek::Forward,
            '[' => Seek::Back,
            _ => return None,
        })
    }
}

impl Playing {
    pub(super) fn open(dir: &Path) -> anyhow::Result<Self> {
        Self::open_at(dir, 0)
    }

    fn open_at(dir: &Path, at_ns: u64) -> anyhow::Result<Self> {
        let mut monitor = Monitor::new(Playback::open_at(dir, at_ns)?, Settings::default()).following_live();
        let Some(first) = monitor.source_mut().next_at()? else {
            anyhow::bail!("{} holds nothing: it ended before it began", monitor.source().describe());
        };
        Ok(Playing {
            dir: dir.to_owned(),
            monitor,
            now_ns: first.mono_ns,
            first_ns: first.mono_ns,
            judged_ns: 0,
            speed: NORMAL,
            moved: Instant::now(),
            is_paused: false,
            is_over: false,
            is_partial: false,
        })
    }

    /// Plays until a moment of the recording, or to its end.
    fn advance(&mut self, until_ns: u64) -> anyhow::Result<()> {
        while let Some(next) = self.monitor.source_mut().next_at()? {
            // A hang makes no messages, and gets older all the same.
            let quiet_ns = self.judged_ns.saturating_add(JUDGE_EVERY_NS);
            let is_near = next.mono_ns.saturating_sub(self.judged_ns) <= QUIET_MAX_NS;
            let at_ns = if is_near { next.mono_ns.min(quiet_ns) } else { next.mono_ns };
            if at_ns > until_ns {
                self.now_ns = until_ns.max(self.now_ns);
                return Ok(());
            }
            self.monitor.step(at_ns);
            (self.judged_ns, self.now_ns) = (at_ns, at_ns.max(self.now_ns));
        }
        self.is_over = true;
        Ok(())
    }

    /// Moves on by the time that has passed.
    pub(super) fn step(&mut self) -> anyhow::Result<()> {
        let passed = self.moved.elapsed();
        self.moved = Instant::now();
        if self.is_paused {
            return Ok(());
        }
        let passed_ns = Duration::as_nanos(&passed) as f64 * SPEEDS[self.speed];
        self.advance(self.now_ns.saturating_add(passed_ns as u64))
    }

    pub(super) fn seek(&mut self, to: Seek) -> anyhow::Result<()> {
        match to {
            Seek::Pause => self.is_paused = !self.is_paused,
            Seek::Faster => self.speed = (self.speed + 1).min(SPEEDS.len() - 1),
            Seek::Slower => self.speed = self.speed.saturating_sub(1),
            Seek::Step => {
                self.is_paused = true;
                self.advance(self.now_ns.saturating_add(STEP_NS))?;
            }
            Seek::Forward => self.jump(self.now_ns.saturating_add(SEEK_NS))?,
            Seek::Back => self.jump(self.now_ns.saturating_sub(SEEK_NS).max(self.first_ns))?,
        }
        self.moved = Instant::now();
        Ok(())
    }

    /// Goes to a moment. A long recording is opened near it: sums and statistics are those since then.
    fn jump(&mut self, to_ns: u64) -> anyhow::Result<()> {
        if self.is_over && to_ns >= self.now_ns {
            return Ok(());
        }
        let near = Playing::open_at(&self.dir, to_ns)?;
        let (speed, is_paused, first_ns) = (self.speed, self.is_paused, self.first_ns);
        let is_partial = near.first_ns > first_ns;
        *self = Playing { speed, is_paused, first_ns, is_partial, ..near };
        self.advance(to_ns)
    }

    pub(super) fn snapshot(&self) -> Snapshot {
        let mut snapshot = self.monitor.snapshot(self.now_ns);
        let state = match () {
            () if self.is_over => "at its end".to_owned(),
            () if self.is_paused => "paused".to_owned(),
            () => format!("x{}", SPEEDS[self.speed]),
        };
        let played_s = self.now_ns.saturating_sub(self.first_ns) as f64 / 1e9;
        let name = self.monitor.source().describe();
        let sums = if self.is_partial { "; sums and rates lack what was before" } else { "" };
        snapshot.source = format!("{name}, {played_s:.0} s, {state} (space . + - [ ]){sums}");
        snapshot
    }
}
