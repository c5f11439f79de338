//! `ringwatch analyser`: the daemon that judges what all agents say.

use super::agent::logged;
use super::config::{load, path_of};
use super::{block_on, log};
use crate::cli::Agent;
use crate::model::FindingEvent;
use crate::report;
use crate::runtime::analyser;
use anyhow::bail;
use std::io::{self, Write};
use tracing::info;

pub(super) fn run(o: &Agent) -> anyhow::Result<u8> {
    log::daemon(&o.log);
    logged(serve(o))
}

fn serve(o: &Agent) -> anyhow::Result<u8> {
    let config = load(&o.settings)?;
    if !config.cluster.is_enabled() {
        bail!(
            "cluster.servers: no server is named; name one (--set 'cluster.servers=[\"nats://host:4222\"]'), or try it out with `ringwatch cluster up`"
        );
    }
    let from = path_of(&o.settings).map_or_else(|| "the defaults".to_owned(), |p| p.display().to_string());
    info!("analyser {} with {from}", env!("CARGO_PKG_VERSION"));
    block_on(async { Ok(analyser::run(config, || load(&o.settings), teller(o.json)).await?) })?;
    Ok(0)
}

/// Prints changes of findings as they come.
pub(super) fn teller(json: bool) -> impl FnMut(&FindingEvent) + Send + 'static {
    move |event: &FindingEvent| {
        let mut out = io::stdout().lock();
        let written = if json {
            report::json_events(&mut out, std::slice::from_ref(event))
        } else {
            report::event(&mut out, event)
        };
        // Where nobody reads the log any more, the other ways out go on.
        drop(written.and_then(|()| out.flush()));
    }
}
