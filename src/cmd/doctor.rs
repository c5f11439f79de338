//! `ringwatch doctor`: what is wrong for NCCL on this machine, and how to fix it.

use super::{BROKEN, FINDINGS};
use crate::bench::{self, Launch};
use crate::cli::Doctor;
use crate::doctor::{self, Area, Host, Observation, Outcome, Report, Status};
use anyhow::{Context, bail};
use std::io::{self, Write};
use std::net::TcpListener;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

pub(super) fn run(o: &Doctor) -> anyhow::Result<u8> {
    let mut host = Host::here();
    (host.nvml, host.cuda, host.config) = (o.nvml.clone(), o.cuda.clone(), o.config.clone());
    let host = Arc::new(host);
    let mut checks = doctor::checks();
    if o.list {
        let mut out = io::stdout().lock();
        for c in &checks {
            writeln!(out, "{:<18} {}", c.id, c.area)?;
        }
        return Ok(0);
    }
    for id in &o.checks {
        if !checks.iter().any(|c| c.id == id) {
            bail!("there is no check {id:?}; ringwatch doctor --list names them");
        }
    }
    checks.retain(|c| o.checks.is_empty() || o.checks.iter().any(|id| id == c.id));
    let limit = Duration::from_secs(o.limit);
    if !o.ranks {
        return finish(o, &host, &doctor::run(&host, &checks, limit));
    }
    let launch = Launch::read(|name| std::env::var(name).ok(), 0)?;
    let Some(launch) = launch else {
        return match doctor::devices(&host, limit) {
            0 | 1 => {
                let mut report = doctor::run(&host, &checks, limit);
                let seen = Observation {
                    status: Status::Skip,
                    seen: "there are no two GPUs here, and neither torchrun nor srun has started this"
                        .to_owned(),
                    fix: None,
                };
                report.outcomes.push(Outcome::new("collectives", Area::Ranks, Duration::ZERO, vec![seen]));
                finish(o, &host, &report)
            }
            n => one_each(n),
        };
    };
    let (report, is_stuck) = doctor::run_ranks(&host, &checks, limit, &launch, o.nccl.clone())?;
    let code = report.map_or(Ok(0), |report| finish(o, &host, &report));
    if is_stuck {
        // Ending in the usual way would wait for the thread that does not come back.
        bench::leave(code.unwrap_or(BROKEN));
    }
    code
}

/// Starts this command once for each GPU of the host, as torchrun would. Rank 0 prints and has the exit code.
fn one_each(gpus: usize) -> anyhow::Result<u8> {
    let program = std::env::current_exe().context("cannot find ringwatch's own program")?;
    let port =
        TcpListener::bind(("127.0.0.1", 0)).and_then(|l| l.local_addr()).context("no free port")?.port();
    // The rendezvous listens behind the port that it is told.
    let port = port.clamp(1024, u16::MAX - 64) - 1;
    let mut ranks = Vec::new();
    for rank in 0..gpus {
        let mut command = Command::new(&program);
        command.args(std::env::args_os().skip(1)).stdin(Stdio::null());
        command.envs([
            ("WORLD_SIZE", gpus.to_string()),
            ("RANK", rank.to_string()),
            ("LOCAL_RANK", rank.to_string()),
        ]);
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
        ranks.push(command.spawn().with_context(|| format!("cannot start rank {rank}"))?);
    }
    let mut codes = Vec::new();
    for child in &mut ranks {
        codes.push(child.wait().context("a rank's process cannot be waited for")?.code());
    }
    let first = codes.first().copied().flatten();
    Ok(first.and_then(|c| u8::try_from(c).ok()).unwrap_or(BROKEN))
}

/// Prints a report, writes the bundle, and makes an exit code of it.
fn finish(o: &Doctor, host: &Host, report: &Report) -> anyhow::Result<u8> {
    let text = text(report, o.verbose);
    if let Some(path) = &o.bundle {
        let what = || format!("cannot write {}", path.display());
        let file = std::fs::File::create(path).with_context(what)?;
        doctor::write_bundle(file, host, report, &text).with_context(what)?;
    }
    let mut out = io::stdout().lock();
    if o.json {
        writeln!(out, "{}", serde_json::to_string(report)?)?;
    } else {
        out.write_all(text.as_bytes())?;
    }
    out.flush()?;
    // A check that hangs still runs on a thread of this process, which does not keep it.
    Ok(if report.has_failed() { FINDINGS } else { 0 })
}

/// A report as people read it: an area after the other, what is wrong with its remedy.
fn text(report: &Report, verbose: bool) -> String {
    let mut t = format!(
        "ringwatch {} doctor on {}, Linux {}\n",
        report.ringwatch_version, report.host, report.kernel
    );
    let mut area: Option<Area> = None;
    for o in &report.outcomes {
        if area != Some(o.area) {
            area = Some(o.area);
            t.push_str(&format!("\n{}\n", o.area));
        }
        t.push_str(&lines(o, verbose));
    }
    let n = |s| report.count(s);
    t.push_str(&format!(
        "\n{} passed, {} warnings, {} failures, {} skipped\n",
        n(Status::Pass),
        n(Status::Warn),
        n(Status::Fail),
        n(Status::Skip)
    ));
    t
}

/// A check: its worst result, and everything that is wrong; with `verbose` all it saw.
fn lines(o: &Outcome, verbose: bool) -> String {
    let mut t = String::new();
    for (i, r) in o.results.iter().enumerate() {
        if i > 0 && r.status < Status::Warn && !verbose && o.status >= Status::Warn {
            continue;
        }
        let name = if i == 0 { o.id.as_str() } else { "" };
        let seen = r.seen.replace('\n', &format!("\n  {:25}", ""));
        t.push_str(&format!("  {} {name:<18} {seen}\n", r.status));
        if let Some(fix) = &r.fix {
            t.push_str(&format!("  {:23} fix: {fix}\n", ""));
        }
    }
    t
}
