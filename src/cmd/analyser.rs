//! `ringwatch analyser`: the daemon that judges what all agents say.

use super::block_on;
use super::config::{load, path_of};
use crate::cli::Agent;
use crate::model::Finding;
use crate::report;
use crate::runtime::analyser;
use anyhow::bail;
use std::io::{self, Write};

pub(super) fn run(o: &Agent) -> anyhow::Result<u8> {
    let config = load(&o.settings)?;
    if !config.cluster.is_enabled() {
        bail!(
            "cluster.servers: no server is named; name one (--set 'cluster.servers=[\"nats://host:4222\"]'), or try it out with `ringwatch cluster up`"
        );
    }
    let from = path_of(&o.settings).map_or_else(|| "the defaults".to_owned(), |p| p.display().to_string());
    eprintln!("ringwatch: analyser {} with {from}", env!("CARGO_PKG_VERSION"));
    block_on(async { Ok(analyser::run(config, || load(&o.settings), teller(o.json)).await?) })?;
    Ok(0)
}

/// Prints findings as they come.
pub(super) fn teller(json: bool) -> impl FnMut(&Finding) + Send + 'static {
    move |finding: &Finding| {
        let mut out = io::stdout().lock();
        let written = if json {
            report::json(&mut out, std::slice::from_ref(finding))
        } else {
            report::finding(&mut out, finding)
        };
        // Where nobody reads the log any more, the other ways out go on.
        drop(written.and_then(|()| out.flush()));
    }
}
