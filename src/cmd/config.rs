//! `ringwatch config`: the agent's settings, shown, checked and described.

use crate::cli::{Config, ConfigVerb, Settings};
use crate::config::{self, Error, Overrides};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// The file that is read when none is named, and there is one.
const FILE: &str = "/etc/ringwatch/agent.yaml";

pub(super) fn run(o: &Config) -> anyhow::Result<u8> {
    let mut out = io::stdout().lock();
    match &o.verb {
        ConfigVerb::Print(settings) => out.write_all(config::print(&load(settings)?)?.as_bytes())?,
        ConfigVerb::Check(settings) => {
            load(settings)?;
            let what =
                path_of(settings).map_or_else(|| "the defaults".to_owned(), |p| p.display().to_string());
            writeln!(out, "{what}: ok")?;
        }
        ConfigVerb::Schema => out.write_all(config::schema()?.as_bytes())?,
    }
    out.flush()?;
    Ok(0)
}

/// The file that is read, if one is.
pub(super) fn path_of(o: &Settings) -> Option<PathBuf> {
    o.config.clone().or_else(|| Some(PathBuf::from(FILE)).filter(|p| Path::exists(p)))
}

/// The settings, from the file, the environment and the command line.
pub(super) fn load(o: &Settings) -> Result<config::Config, Error> {
    let variables =
        std::env::vars_os().filter_map(|(k, v)| Some((k.into_string().ok()?, v.into_string().ok()?)));
    let overrides = Overrides::default().environment(variables).options(&o.set)?;
    config::load(path_of(o).as_deref(), &overrides)
}
