//! A recording in place of live jobs.

use crate::detect::Settings;
use crate::model::Source as _;
use crate::recording::Playback;
use crate::runtime::Monitor;
use std::path::Path;

/// Plays a recording to its end, as fast as it can be read. Returns the monitor and the last moment.
pub(super) fn play(dir: &Path) -> anyhow::Result<(Monitor<Playback>, u64)> {
    let mut monitor = Monitor::new(Playback::open(dir)?, Settings::default()).following_live();
    let mut last_ns = 0;
    while let Some(at) = monitor.source_mut().next_at()? {
        last_ns = at.mono_ns;
        monitor.step(last_ns);
    }
    if last_ns == 0 {
        anyhow::bail!("{} holds nothing: it ended before it began", monitor.source().describe());
    }
    Ok((monitor, last_ns))
}
