//! `ringwatch agent`: the daemon.

use super::config::{load, path_of};
use super::{baselines, block_on};
use crate::cli::Agent;
use crate::model::Finding;
use crate::report;
use crate::runtime::agent::{self, State};
use std::io::{self, Write};

pub(super) fn run(o: &Agent) -> anyhow::Result<u8> {
    let config = load(&o.settings)?;
    let state = State::new(config.clone(), baselines(&config.baselines)?);
    let from = path_of(&o.settings).map_or_else(|| "the defaults".to_owned(), |p| p.display().to_string());
    eprintln!("ringwatch: agent {} with {from}", env!("CARGO_PKG_VERSION"));
    let json = o.json;
    let told = move |finding: &Finding| {
        let mut out = io::stdout().lock();
        let written = if json {
            report::json(&mut out, std::slice::from_ref(finding))
        } else {
            report::finding(&mut out, finding)
        };
        // Where nobody reads the log any more, the other ways out go on.
        drop(written.and_then(|()| out.flush()));
    };
    block_on(async { Ok(agent::run(config, state, || load(&o.settings), told).await?) })?;
    Ok(0)
}
