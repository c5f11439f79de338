//! `ringwatch agent`: the daemon.

use super::config::{load, path_of};
use super::{baselines, block_on};
use crate::cli::Agent;
use crate::runtime::agent::{self, State};

pub(super) fn run(o: &Agent) -> anyhow::Result<u8> {
    let config = load(&o.settings)?;
    let state = State::new(config.clone(), baselines(&config.baselines)?);
    let from = path_of(&o.settings).map_or_else(|| "the defaults".to_owned(), |p| p.display().to_string());
    eprintln!("ringwatch: agent {} with {from}", env!("CARGO_PKG_VERSION"));
    let told = super::analyser::teller(o.json);
    block_on(async { Ok(agent::run(config, state, || load(&o.settings), told).await?) })?;
    Ok(0)
}
