//! `ringwatch tune`: rules for NCCL's tuner, checked, compiled and converted; and what a job needs to follow them.

use super::{advise, tune_search};
use crate::cli::{Tune, Tuning};
use crate::tune::{self, Rules};
use anyhow::{Context, bail};
use std::ffi::OsString;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// The library that NCCL loads as its tuner.
const PLUGIN_VARIABLE: &str = "NCCL_TUNER_PLUGIN";
/// The compiled rules.
const RULES_VARIABLE: &str = "RINGWATCH_TUNE";
const MIN_CHANNELS_VARIABLE: &str = "NCCL_MIN_NCHANNELS";
const COSTS_VARIABLE: &str = "RINGWATCH_TUNE_COSTS";
const REQUIRE_VARIABLE: &str = "RINGWATCH_TUNE_REQUIRE";
/// Ranks agree by an all-gather of the preloaded library's.
const NODES_VARIABLE: &str = "RINGWATCH_TUNE_NODES";

pub(super) fn run(o: &Tune) -> anyhow::Result<u8> {
    if let Some(dirs) = &o.advise {
        return advise::run(dirs, &o.curves);
    }
    let Some(file) = &o.file else { return tune_search::run(o) };
    let rules = load(file)?;
    let compiled = rules.compile()?;
    let mut out = io::stdout().lock();
    if o.csv {
        if let Some(n) = rules.min_channels() {
            writeln!(out, "# needs {MIN_CHANNELS_VARIABLE}={n} in the job's environment")?;
        }
        out.write_all(rules.to_csv()?.as_bytes())?;
    } else {
        let several = |n: usize, what: &str| format!("{n} {what}{}", if n == 1 { "" } else { "s" });
        let (count, rows) = (several(rules.all().len(), "rule"), several(compiled.rows(), "row"));
        let environment =
            rules.min_channels().map_or(String::new(), |n| format!(", {MIN_CHANNELS_VARIABLE}={n}"));
        writeln!(out, "{}: {count}, {rows}, hash {:016x}{environment}", file.display(), compiled.hash())?;
    }
    if let Some(path) = &o.output {
        tune::write(&compiled, path).with_context(|| format!("cannot write {}", path.display()))?;
    }
    out.flush()?;
    Ok(0)
}

/// Reads rules. What people should know about them goes to standard error.
fn load(path: &Path) -> anyhow::Result<Rules> {
    let rules = Rules::load(path)?;
    for warning in rules.warnings() {
        // A closed standard error is no reason to stop.
        writeln!(io::stderr(), "ringwatch: {warning}").ok();
    }
    Ok(rules)
}

/// The variables by which a job follows rules, or notes NCCL's predictions in the file that `costs` makes; none where nobody
/// asked for any. `library` is the file name of the plugin, and the compiled rules go to `directory`.
pub(super) fn variables(
    o: &Tuning,
    library: &str,
    directory: &Path,
    costs: impl FnOnce() -> anyhow::Result<PathBuf>,
) -> anyhow::Result<Vec<(&'static str, OsString)>> {
    let Some(file) = &o.tune else { return Ok(Vec::new()) };
    let own = |v: &OsString| v.is_empty() || v == library;
    if let Some(other) = std::env::var_os(PLUGIN_VARIABLE).filter(|v| !own(v)) {
        bail!(
            "{PLUGIN_VARIABLE} is set to {}: NCCL takes one tuner plugin; unset it for --tune {}",
            other.display(),
            file.display()
        );
    }
    if o.observes() {
        if o.tune_require {
            bail!("--tune-require is for rules; leave it out with --tune observe");
        }
        if o.tune_nodes {
            bail!("--tune-nodes is for rules; leave it out with --tune observe");
        }
        return Ok(vec![(PLUGIN_VARIABLE, OsString::from(library)), (COSTS_VARIABLE, costs()?.into())]);
    }
    let rules = load(file)?;
    let mut variables = Vec::new();
    if let Some(n) = rules.min_channels() {
        let wanted = OsString::from(n.to_string());
        if let Some(set) = std::env::var_os(MIN_CHANNELS_VARIABLE).filter(|v| *v != wanted) {
            bail!(
                "{MIN_CHANNELS_VARIABLE} is set to {}, and {} was measured with {n}: unset the variable, or change the file",
                set.display(),
                file.display()
            );
        }
        variables.push((MIN_CHANNELS_VARIABLE, wanted));
    }
    // Any loaded tuner changes NCCL's policy for channels, so none is loaded for nothing.
    if rules.all().is_empty() {
        return Ok(variables);
    }
    let compiled = rules.compile()?;
    let path = tune::install(&compiled, directory)
        .with_context(|| format!("cannot write the compiled rules to {}", directory.display()))?;
    variables.push((PLUGIN_VARIABLE, OsString::from(library)));
    variables.push((RULES_VARIABLE, std::path::absolute(path)?.into()));
    for (name, _) in
        [(REQUIRE_VARIABLE, o.tune_require), (NODES_VARIABLE, o.tune_nodes)].iter().filter(|v| v.1)
    {
        variables.push((name, "1".into()));
    }
    Ok(variables)
}
