//! `ringwatch bench --compare`: the same sweep under several environments, each in a process of its own, since NCCL
//! loads a plugin once a process. The processes of a round live together and measure in turns, size by size.

use super::bench::{facts, number};
use super::demo_workers::{PLUGIN_VARIABLE, Player, Variant, give_turns};
use super::self_check::Audit;
use super::{BROKEN, FINDINGS};
use crate::bench::{Comparison, Launch, Ratio, Row, Settings, Trial, VariantSummary, parse_mask, summarise};
use crate::bundle;
use crate::cli::Bench;
use anyhow::{Context, bail};
use serde::Serialize;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::io::{self, Write};
use std::path::Path;
use std::time::Duration;

const ROUNDS: u32 = 5;
const VARIANT_TIMEOUT_S: u64 = 600;

/// The JSON output: the comparison, and what the segments held.
#[derive(Debug, Serialize)]
struct Output<'a> {
    #[serde(flatten)]
    comparison: &'a Comparison,
    audits: &'a [VariantAudit],
}

/// The content of the segments of one variant in one round.
#[derive(Debug, Serialize)]
struct VariantAudit {
    variant: String,
    round: u32,
    /// `None`: no segment was there.
    #[serde(flatten)]
    audit: Option<Audit>,
}

pub(super) fn run(o: &Bench, settings: &Settings, launch: Option<&Launch>) -> anyhow::Result<u8> {
    // /dev/shm is often mounted noexec, so the plugins lie elsewhere.
    let libraries = tempfile::tempdir().context("cannot make a temporary directory for the plugins")?;
    let variants = choose(o, libraries.path())?;
    let rounds = o.rounds.unwrap_or(ROUNDS);
    let limit = Duration::from_secs(o.variant_timeout.unwrap_or(VARIANT_TIMEOUT_S));
    let first = launch.is_none_or(|l| l.rank == 0);
    let (mut trials, mut audits) = (Vec::new(), Vec::new());
    let mut epoch = o.epoch;
    for round in 0..rounds {
        if first {
            // Progress, for whoever watches a terminal: the result is on stdout.
            writeln!(io::stderr(), "ringwatch: round {} of {rounds}", round + 1).ok();
        }
        let mut players = Vec::new();
        for v in &variants {
            epoch += 1;
            players.push(Player::start(v, settings, epoch, limit)?);
        }
        if first {
            give_turns(&mut players, round);
        }
        for (player, v) in players.into_iter().zip(&variants) {
            let (outcome, audit) = player.finish();
            let (report, failure) = match outcome {
                Ok(report) => (report, None),
                Err(e) => (None, Some(format!("{e:#}"))),
            };
            if let Some(failure) = &failure {
                writeln!(io::stderr(), "ringwatch: {} failed: {failure}", v.name).ok();
            }
            // Another plugin may have no segments; ours has, or was not loaded.
            if audit.is_some() || (v.is_ours() && failure.is_none()) {
                audits.push(VariantAudit { variant: v.name.clone(), round, audit });
            }
            trials.push(Trial { variant: v.name.clone(), round, report, failure });
        }
    }
    let comparison = summarise(variants.iter().map(|v| summary(v, &variants)).collect(), rounds, trials);
    if first {
        let mut out = io::stdout().lock();
        if o.json {
            let output = Output { comparison: &comparison, audits: &audits };
            writeln!(out, "{}", serde_json::to_string(&output)?)?;
        } else {
            out.write_all(table(&comparison, &audits).as_bytes())?;
        }
        out.flush()?;
    }
    Ok(if comparison.variants.iter().any(|v| !v.failures.is_empty()) {
        BROKEN
    } else if comparison.variants.iter().any(|v| v.wrong.is_some_and(|w| w > 0)) {
        FINDINGS
    } else {
        0
    })
}

/// The variants that are asked for, the baseline first.
fn choose(o: &Bench, libraries: &Path) -> anyhow::Result<Vec<Variant>> {
    let mask = o.null_mask.as_deref().unwrap_or("0x42");
    if parse_mask(mask).is_none() {
        bail!("--null-mask {mask:?}: a number, decimal or hexadecimal behind 0x");
    }
    bundle::install(libraries).context("cannot write the plugin")?;
    bundle::install_null(libraries).context("cannot write the plugin that does nothing")?;
    let own = |file: &str| Some((Some(libraries.to_owned()), OsString::from(file)));
    let variable = |name: &str, value: &str| vec![(name.to_owned(), value.to_owned())];
    let variant = |name: &str, plugin, variables, segments| Variant {
        name: name.to_owned(),
        plugin,
        variables,
        segments,
    };
    let mut known = vec![
        variant("none", None, Vec::new(), false),
        variant("ringwatch", own(bundle::FILE_NAME), Vec::new(), true),
        variant("ringwatch-full", own(bundle::FILE_NAME), variable("RINGWATCH_DETAIL", "full"), true),
        variant("null", own(bundle::NULL_FILE_NAME), variable("RINGWATCH_NULL_MASK", mask), false),
    ];
    for text in &o.with {
        let more = with(text)?;
        if known.iter().any(|k| k.name == more.name) {
            bail!("--with {text}: there is a variant {} already", more.name);
        }
        known.push(more);
    }
    if o.variants.is_empty() {
        return Ok(known);
    }
    let mut chosen: Vec<Variant> = Vec::new();
    for name in &o.variants {
        if chosen.iter().any(|c| c.name == *name) {
            bail!("--variants: {name} is there twice");
        }
        let Some(at) = known.iter().position(|k| k.name == *name) else {
            let names: Vec<&str> = known.iter().chain(&chosen).map(|k| k.name.as_str()).collect();
            bail!("--variants: {name:?} is none of {}; --with NAME=PATH adds one", names.join(", "));
        };
        chosen.push(known.remove(at));
    }
    Ok(chosen)
}

/// Reads `NAME=PATH[,VAR=VALUE...]`.
fn with(text: &str) -> anyhow::Result<Variant> {
    let wrong = || format!("--with {text:?}: NAME=PATH, and maybe ,VAR=VALUE");
    let mut parts = text.split(',');
    let (name, path) = parts.next().and_then(|p| p.split_once('=')).with_context(wrong)?;
    if name.is_empty() || path.is_empty() {
        bail!(wrong());
    }
    let mut variables = Vec::new();
    for part in parts {
        let (k, v) = part.split_once('=').filter(|(k, _)| !k.is_empty()).with_context(wrong)?;
        variables.push((k.to_owned(), v.to_owned()));
    }
    let path = std::path::absolute(path).with_context(wrong)?;
    if !path.is_file() {
        bail!("--with {text:?}: there is no file {}", path.display());
    }
    // A bare name beginning with lib and ending with .so, on the library path, is the one spelling that every
    // NCCL release finds.
    let file = path.file_name().unwrap_or_default();
    let bare = file.to_str().is_some_and(|f| f.starts_with("lib") && f.ends_with(".so"));
    let plugin = match path.parent().filter(|_| bare) {
        Some(dir) => (Some(dir.to_owned()), file.to_owned()),
        None => (None, path.clone().into_os_string()),
    };
    Ok(Variant { name: name.to_owned(), plugin: Some(plugin), variables, segments: true })
}

fn summary(v: &Variant, all: &[Variant]) -> VariantSummary {
    let plugin =
        v.plugin.as_ref().map(|(_, f)| (PLUGIN_VARIABLE.to_owned(), f.to_string_lossy().into_owned()));
    // What NCCL charges for the same events, whoever listens.
    let floor = all.iter().find(|o| o.name == "null" && v.name == "ringwatch-full");
    VariantSummary {
        name: v.name.clone(),
        variables: plugin.into_iter().chain(v.variables.clone()).collect(),
        floor: floor.map(|f| f.name.clone()),
        measured: 0,
        failures: Vec::new(),
        wrong: None,
    }
}

/// The comparison as people read it.
fn table(c: &Comparison, audits: &[VariantAudit]) -> String {
    let mut t = String::new();
    if let Some(report) = c.trials.iter().find_map(|t| t.report.as_ref()) {
        t.push_str(&facts(&report.settings, &report.environment));
    }
    let mut text = format!(
        "#\n# median time of {} rounds in us; behind it the median of the rounds' ratios to {} (smallest..largest)\n",
        c.rounds, c.baseline
    );
    let mut heads = format!("#{:>12}  {:>3}", "size (B)", "");
    for (i, v) in c.variants.iter().enumerate() {
        heads.push_str(&if i == 0 { format!("  {:>9}", v.name) } else { format!("  {:>31}", v.name) });
        if let Some(floor) = &v.floor {
            heads.push_str(&format!("  {:>20}", format!("to {floor}")));
        }
    }
    text.push_str(heads.trim_end());
    text.push('\n');
    for row in &c.rows {
        text.push_str(line(c, row).trim_end());
        text.push('\n');
    }
    t.push_str(&text);
    for v in &c.variants {
        let set: Vec<String> = v.variables.iter().map(|(k, v)| format!("{k}={v}")).collect();
        let set = if set.is_empty() { "no plugin".to_owned() } else { set.join(" ") };
        // Writing into a text cannot fail.
        writeln!(t, "# {}: {set}; {} of {} rounds", v.name, v.measured, c.rounds).unwrap_or_default();
        if let Some(wrong) = v.wrong.filter(|w| *w > 0) {
            writeln!(t, "#   {wrong} wrong elements, FAILED").unwrap_or_default();
        }
        for a in audits.iter().filter(|a| a.variant == v.name) {
            let unloaded =
                || "no segment: NCCL has not loaded the plugin, and nothing of it was measured".to_owned();
            let told = a.audit.as_ref().map_or_else(unloaded, ToString::to_string);
            writeln!(t, "#   round {}: {told}", a.round + 1).unwrap_or_default();
        }
        for failure in &v.failures {
            writeln!(t, "#   FAILED: {}", failure.replace('\n', "\n#     ")).unwrap_or_default();
        }
    }
    t
}

fn line(c: &Comparison, row: &Row) -> String {
    let mut text = format!(" {:>12}  {:>3}", row.size_bytes, if row.in_place { "in" } else { "out" });
    for (i, (cell, v)) in row.cells.iter().zip(&c.variants).enumerate() {
        let time = cell.time_ns.map_or("-".to_owned(), |t| number(t / 1000.0));
        text.push_str(&format!("  {time:>9}"));
        if i > 0 {
            text.push_str(&format!("  {:>20}", ratio(cell.ratio)));
        }
        if v.floor.is_some() {
            text.push_str(&format!("  {:>20}", ratio(cell.ratio_to_floor)));
        }
    }
    text
}

fn ratio(r: Option<Ratio>) -> String {
    r.map_or("-".to_owned(), |r| format!("{:.3} ({:.3}..{:.3})", r.median, r.min, r.max))
}
