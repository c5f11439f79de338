//! `ringwatch bench --compare`: the same sweep under several environments, in turn, each in a process of its own,
//! since NCCL loads a plugin once a process.

use super::audit::{Audit, Auditor};
use super::bench::{facts, number};
use super::{BROKEN, FINDINGS};
use crate::bench::{
    Comparison, Launch, Ratio, Report, Row, Settings, Step, Trial, VariantSummary, order, parse_mask,
    summarise,
};
use crate::bundle;
use crate::cli::Bench;
use anyhow::{Context, bail};
use serde::Serialize;
use std::ffi::{OsStr, OsString};
use std::fmt::Write as _;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

const PLUGIN_VARIABLE: &str = "NCCL_PROFILER_PLUGIN";
const PATH_VARIABLE: &str = "LD_LIBRARY_PATH";
const OWN_VARIABLES: &str = "RINGWATCH_";
const ROUNDS: u32 = 5;
const VARIANT_TIMEOUT_S: u64 = 600;
/// A child whose result is there has so long to end.
const ENDING: Duration = Duration::from_secs(30);
/// Lines of a failed child that are told.
const LAST_LINES: usize = 8;
/// What is kept of a child's output, in bytes.
const KEPT: usize = 64 << 10;

/// What a child gets in its environment.
#[derive(Debug)]
struct Variant {
    name: String,
    /// A directory in front of the library path, and the plugin's name there.
    plugin: Option<(Option<PathBuf>, OsString)>,
    variables: Vec<(String, String)>,
    /// Whether it may write segments.
    segments: bool,
}

/// What is printed as JSON: the comparison, and what the segments held.
#[derive(Debug, Serialize)]
struct Output<'a> {
    #[serde(flatten)]
    comparison: &'a Comparison,
    audits: &'a [VariantAudit],
}

/// What the segments of one variant held in one round.
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
        for v in order(variants.len(), round).into_iter().filter_map(|i| variants.get(i)) {
            epoch += 1;
            if first {
                // Progress, for whoever watches a terminal: the result is on stdout.
                writeln!(io::stderr(), "ringwatch: round {} of {rounds}: {}", round + 1, v.name).ok();
            }
            let room = scratch()?;
            let mut auditor = v.segments.then(|| Auditor::new(room.path()));
            let (report, failure) = match measure(v, settings, epoch, limit, room.path(), &mut auditor) {
                Ok(report) => (report, None),
                Err(e) => (None, Some(format!("{e:#}"))),
            };
            if let Some(failure) = &failure {
                writeln!(io::stderr(), "ringwatch: {} failed: {failure}", v.name).ok();
            }
            let audit = auditor.and_then(Auditor::finish);
            // Another plugin may have no segments; ours has, or was not loaded.
            if audit.is_some() || (v.is_ours() && failure.is_none()) {
                audits.push(VariantAudit { variant: v.name.clone(), round, audit });
            }
            trials.push(Trial { variant: v.name.clone(), round, report, failure });
        }
    }
    let comparison = summarise(variants.iter().map(|v| v.summary(&variants)).collect(), rounds, trials);
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

/// A directory in memory that goes with the child.
fn scratch() -> anyhow::Result<tempfile::TempDir> {
    let shm = PathBuf::from("/dev/shm");
    let base = if shm.is_dir() { shm } else { std::env::temp_dir() };
    tempfile::Builder::new()
        .prefix("rw-bench-")
        .tempdir_in(&base)
        .or_else(|_| tempfile::tempdir())
        .with_context(|| format!("cannot make a directory in {} or the temporary directory", base.display()))
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

impl Variant {
    /// Whether it loads this program's own plugin.
    fn is_ours(&self) -> bool {
        self.plugin.as_ref().is_some_and(|(_, file)| file == bundle::FILE_NAME)
    }

    fn summary(&self, all: &[Variant]) -> VariantSummary {
        let plugin =
            self.plugin.as_ref().map(|(_, f)| (PLUGIN_VARIABLE.to_owned(), f.to_string_lossy().into_owned()));
        // What NCCL charges for the same events, whoever listens.
        let floor = all.iter().find(|v| v.name == "null" && self.name == "ringwatch-full");
        VariantSummary {
            name: self.name.clone(),
            variables: plugin.into_iter().chain(self.variables.clone()).collect(),
            floor: floor.map(|f| f.name.clone()),
            measured: 0,
            failures: Vec::new(),
            wrong: None,
        }
    }

    /// Nothing of another plugin's, and what this one needs.
    fn dress(&self, command: &mut Command, segments: &Path) {
        command.env_remove(PLUGIN_VARIABLE);
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with(OWN_VARIABLES) {
                command.env_remove(name);
            }
        }
        if let Some((dir, file)) = &self.plugin {
            command.env(PLUGIN_VARIABLE, file);
            if let Some(dir) = dir {
                let mut path = dir.clone().into_os_string();
                if let Some(old) = std::env::var_os(PATH_VARIABLE).filter(|p| !p.is_empty()) {
                    path.push(":");
                    path.push(old);
                }
                command.env(PATH_VARIABLE, path);
            }
        }
        if self.segments {
            command.env("RINGWATCH_DIR", segments);
        }
        command.envs(self.variables.iter().map(|(k, v)| (k, v)));
    }
}

/// One child, to its end. No report where another rank's process has it.
fn measure(
    v: &Variant,
    s: &Settings,
    epoch: u64,
    limit: Duration,
    room: &Path,
    auditor: &mut Option<Auditor>,
) -> anyhow::Result<Option<Report>> {
    let exe = std::env::current_exe().context("cannot find ringwatch's own program")?;
    // Not among the segments.
    let place = tempfile::tempdir().context("cannot make a temporary directory for the result")?;
    let result = place.path().join("result.json");
    let mut command = Command::new(exe);
    command.arg("bench").args(arguments(s)).args(["--epoch", &epoch.to_string(), "--result"]).arg(&result);
    v.dress(&mut command, room);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().context("cannot start ringwatch again")?;
    let (out, err) = (keep_last(child.stdout.take()), keep_last(child.stderr.take()));
    let ended = wait(&mut child, &result, limit, auditor);
    let said = [err, out].map(|t| t.join().unwrap_or_default());
    let last = said.iter().map(|s| last_lines(s)).find(|s| !s.is_empty()).unwrap_or_default();
    let status = ended.with_context(|| last.clone())?;
    match status.code() {
        Some(code) if code == 0 || code == i32::from(FINDINGS) => {}
        _ => bail!("{status}\n{last}"),
    }
    if !result.exists() {
        return Ok(None);
    }
    let json = std::fs::read(&result).context("cannot read its result")?;
    Ok(Some(serde_json::from_slice(&json).context("cannot read its result")?))
}

fn wait(
    child: &mut Child,
    result: &Path,
    limit: Duration,
    auditor: &mut Option<Auditor>,
) -> anyhow::Result<ExitStatus> {
    let start = Instant::now();
    let mut ready: Option<Instant> = None;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        if ready.is_none() && result.exists() {
            ready = Some(Instant::now());
        }
        let late = ready.is_some_and(|r| r.elapsed() > ENDING);
        if late || start.elapsed() > limit {
            child.kill()?;
            child.wait()?;
            if late {
                bail!("it had its result and did not end in {} s", ENDING.as_secs());
            }
            bail!("it did not end in {} s (--variant-timeout)", limit.as_secs());
        }
        if let Some(auditor) = auditor {
            auditor.look();
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Reads a pipe to its end and keeps the last of it.
fn keep_last(pipe: Option<impl Read + Send + 'static>) -> std::thread::JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let mut kept = Vec::new();
        let mut piece = [0; 4096];
        let Some(mut pipe) = pipe else { return kept };
        while let Ok(n) = pipe.read(&mut piece) {
            if n == 0 {
                break;
            }
            kept.extend_from_slice(&piece[..n]);
            if kept.len() > 2 * KEPT {
                kept.drain(..kept.len() - KEPT);
            }
        }
        kept
    })
}

fn last_lines(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    let lines: Vec<&str> = text.lines().filter(|l| !l.trim().is_empty()).collect();
    lines[lines.len().saturating_sub(LAST_LINES)..].join("\n")
}

/// The settings as options again.
fn arguments(s: &Settings) -> Vec<OsString> {
    let mut a: Vec<OsString> = vec![s.collective.as_str().into()];
    let mut option = |name: &str, value: &dyn AsRef<OsStr>| {
        a.push(name.into());
        a.push(value.as_ref().to_owned());
    };
    option("--min-bytes", &s.min_bytes.to_string());
    option("--max-bytes", &s.max_bytes.to_string());
    match s.step {
        Step::Factor(f) => option("--step-factor", &f.to_string()),
        Step::Bytes(b) => option("--step-bytes", &b.to_string()),
    }
    for (name, value) in [
        ("--iters", s.iters),
        ("--warmup-iters", s.warmup_iters),
        ("--check", u32::from(s.check)),
        ("--root", s.root),
        ("--batch", s.batch),
        ("--repeat", s.repeat),
    ] {
        option(name, &value.to_string());
    }
    option("--op", &s.redop.as_str());
    option("--dtype", &s.dtype.as_str());
    option("--timeout", &s.timeout_s.to_string());
    if s.threads > 0 {
        option("--threads", &s.threads.to_string());
        option("--gpus", &s.gpus.to_string());
    }
    if let Some(n) = s.graph {
        option("--cuda-graph", &n.to_string());
    }
    if let Some(path) = &s.nccl {
        option("--nccl", path);
    }
    if let Some(path) = &s.cuda {
        option("--cuda", path);
    }
    for (flag, set) in [("--blocking", s.blocking), ("--pin", s.pin), ("--events", s.events)] {
        if set {
            a.push(flag.into());
        }
    }
    a
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
