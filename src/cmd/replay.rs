//! `ringwatch replay` (hidden): one rank of a recorded job, in this process.

use crate::cli::Replay;
use crate::replay::{Abi, Pace, Player, PlayerOptions, Trace, fixture};
use anyhow::{Context, bail};
use std::time::Duration;

pub(super) fn run(o: &Replay) -> anyhow::Result<u8> {
    // Whoever started this must not leave it behind.
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
    let mut trace = match &o.trace {
        Some(path) => {
            let bytes = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
            // A recorder's own log is one rank's.
            match std::str::from_utf8(&bytes) {
                Ok(log) => Trace::parse_logs([("log", log)])?,
                Err(_) => Trace::decode(&bytes)?,
            }
        }
        None => fixture(o.scenario.into(), o.two_node),
    };
    // Processes that are told to begin together are one job, and no two of them have a communicator in common.
    trace.shift_ids(o.start_at.unwrap_or(0));
    let Some(rank) = trace.ranks.get(o.rank) else {
        bail!("--rank {}: the recording has ranks 0 to {}", o.rank, trace.ranks.len().saturating_sub(1));
    };
    let abi = Abi::new(o.abi).context("--abi: 1 to 7")?;
    let mut options = PlayerOptions::new(o.plugin.clone(), abi, trace.timeline());
    options.pace = match o.speed {
        _ if o.unpaced => Pace::Unpaced,
        Some(times) => Pace::Scaled(1.0 / times),
        None => Pace::Original,
    };
    options.honour_mask = o.honour_mask;
    options.hosts_ahead_ns = o.hosts_ahead_ms.saturating_mul(1_000_000);
    options.loops = o.loops;
    options.start_at_ns = o.start_at;
    let player = Player::new(options)?;
    let report = player.play(rank)?;
    println!("{}", serde_json::to_string(&report)?);
    // The recorded process lived on, with the plugin loaded.
    std::thread::sleep(Duration::from_secs(u64::from(o.hold)));
    Ok(0)
}
