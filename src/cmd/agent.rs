//! `ringwatch agent`: the daemon.

use super::config::{load, path_of};
use super::{BROKEN, baselines, block_on, log};
use crate::cli::Agent;
use crate::runtime::agent::{self, State};
use tracing::{error, info};

pub(super) fn run(o: &Agent) -> anyhow::Result<u8> {
    log::daemon(&o.log);
    logged(serve(o))
}

/// Logs what keeps a daemon from its work, in the log's format.
pub(super) fn logged(ended: anyhow::Result<u8>) -> anyhow::Result<u8> {
    ended.or_else(|e| {
        error!("{e:#}");
        Ok(BROKEN)
    })
}

fn serve(o: &Agent) -> anyhow::Result<u8> {
    let config = load(&o.settings)?;
    let state = State::new(config.clone(), baselines(&config.baselines)?, super::probe_command());
    let from = path_of(&o.settings).map_or_else(|| "the defaults".to_owned(), |p| p.display().to_string());
    info!("agent {} with {from}", env!("CARGO_PKG_VERSION"));
    let told = super::analyser::teller(o.json);
    block_on(async { Ok(agent::run(config, state, || load(&o.settings), told).await?) })?;
    Ok(0)
}
