//! `ringwatch run -- CMD`: a job with the plugin loaded, watched to its end.

use super::observe::CostLog;
use super::{baselines, block_on, plugin, record, tune};
use crate::bundle;
use crate::cli::Run;
use crate::detect::{Baseline, Settings, where_it_is};
use crate::ingest::{Segments, default_dir, now_ns};
use crate::model::{Change, FindingEvent, FindingId};
use crate::recording::Limits;
use crate::report;
use crate::runtime::signals::{self, Signals};
use crate::runtime::{EndsToCome, Monitor, Recorder, Stack};
use anyhow::{Context, bail};
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::io::{self, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::time::Duration;
use tokio::process::Command;

/// How often black boxes are looked through: a job that restarts its workers leaves some each time.
const REAP: Duration = Duration::from_secs(2);
/// Black boxes of earlier jobs may take this much of shared memory before the oldest are removed, in bytes.
const BLACK_BOXES: u64 = 256 << 20;

const PLUGIN_VARIABLE: &str = "NCCL_PROFILER_PLUGIN";
/// The variable with the plugin that is loaded behind ours.
const CHAIN_VARIABLE: &str = "RINGWATCH_CHAIN";

/// The environment of the job.
struct Surroundings {
    segments: PathBuf,
    job: String,
    variables: Vec<(&'static str, OsString)>,
    /// NCCL's predictions, where they are wanted.
    costs: Option<CostLog>,
}

/// The plugin that the user has in NCCL's one slot, where ours, `own`, goes now.
fn other_plugin(own: &str) -> Option<OsString> {
    // NCCL itself takes `none` for none.
    let none =
        |v: &OsString| v.is_empty() || v == bundle::FILE_NAME || v == own || v.eq_ignore_ascii_case("none");
    std::env::var_os(PLUGIN_VARIABLE).filter(|v| !none(v))
}

fn prepare(o: &Run) -> anyhow::Result<Surroundings> {
    let own = if o.preload { bundle::PRELOAD_FILE_NAME } else { bundle::FILE_NAME };
    let other = other_plugin(own);
    if let Some(other) = other.as_ref().filter(|_| !o.replace && !o.chain) {
        bail!(
            "{PLUGIN_VARIABLE} is set to {}: NCCL takes one profiler plugin; give --chain to run with both, --replace to run without it, or unset it",
            other.display()
        );
    }
    let library = bundle::install(&plugin::default_dir())
        .context("cannot write the plugin; set XDG_CACHE_HOME to a directory you may write")?;
    let dir = library.parent().map(Path::to_owned).unwrap_or_default();
    // The one spelling that every NCCL release finds, 2.27.3 too: a bare name beginning with lib and ending
    // with .so, on the library path.
    let mut path = OsString::from(&dir);
    if let Some(old) = std::env::var_os("LD_LIBRARY_PATH").filter(|p| !p.is_empty()) {
        path.push(":");
        path.push(old);
    }
    // A directory that the user did not name is left to the plugin, which is stricter about its own default.
    let given = std::env::var_os("RINGWATCH_DIR").filter(|d| !d.is_empty()).map(PathBuf::from);
    let segments = given.unwrap_or_else(default_dir);
    let job = std::env::var("RINGWATCH_JOB").ok().filter(|j| !j.is_empty()).unwrap_or_else(|| {
        let name = o.command.first().map(Path::new).and_then(Path::file_name).unwrap_or_default();
        format!("{}-{}", name.to_string_lossy(), std::process::id())
    });
    let mut variables = vec![
        (PLUGIN_VARIABLE, OsString::from(own)),
        ("LD_LIBRARY_PATH", path),
        ("RINGWATCH_JOB", OsString::from(&job)),
    ];
    let costs = if o.tuning.observes() { Some(CostLog::of_job()?) } else { None };
    let path = || costs.as_ref().map(|c| c.path().to_owned()).context("no file for predictions");
    variables.extend(tune::variables(&o.tuning, own, &dir, path)?);
    if let Some(other) = other.filter(|_| o.chain) {
        variables.push((CHAIN_VARIABLE, other));
    }
    if o.preload {
        let mut preload = plugin::preload(&dir);
        if let Some(old) = std::env::var_os("LD_PRELOAD").filter(|p| !p.is_empty()) {
            preload.push(":");
            preload.push(old);
        }
        variables.push(("LD_PRELOAD", preload));
    }
    Ok(Surroundings { segments, job, variables, costs })
}

/// The command that was to be run cannot be started.
#[derive(Debug)]
pub(super) struct CannotStart {
    program: String,
    kind: io::ErrorKind,
}

impl CannotStart {
    /// The exit code that a shell, `env` and `nice` have for it.
    pub(super) fn exit_code(&self) -> u8 {
        if self.kind == io::ErrorKind::NotFound { 127 } else { 126 }
    }
}

impl std::fmt::Display for CannotStart {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "cannot start {}", self.program)
    }
}

pub(super) fn run(o: &Run) -> anyhow::Result<u8> {
    let baselines = baselines(&o.baseline)?;
    let mut s = prepare(o)?;
    let segments = super::own_segments(s.segments.clone()).only_job(&s.job, now_ns());
    let mut monitor = Monitor::new(segments, Settings::default()).with_baselines(baselines.clone());
    // Before there is a thread, which would take signals in their usual way: the job would lose its observer.
    let mut signals = Signals::new()?;
    // Whatever becomes of the recording, the job is started.
    let mut recorder = o.record.clone().and_then(|dir| {
        let open = move || record::open(&dir, Limits::default());
        Recorder::begin(&mut monitor, &record::node(), record::moment(), open)
            .map_err(|e| say_unrecorded(&e))
            .ok()
    });
    let (status, broken) =
        block_on(watch(o, &mut s, &mut monitor, &mut signals, (&baselines, &mut recorder)))?;
    // Nor does a bug of ours change the job's exit code.
    let end = std::panic::AssertUnwindSafe(|| {
        let mut last = Vec::new();
        if !broken {
            // When nobody reads stderr there is nobody to tell.
            last = sum_up(o, &s, &mut monitor, status).unwrap_or_default();
        }
        if let Some(mut recorder) = recorder {
            record_step(&mut recorder, &mut monitor, last);
            if recorder.lost() > 0 {
                let lost = recorder.lost();
                writeln!(
                    io::stderr(),
                    "ringwatch: {lost} operations and findings are not recorded: the disk is too slow"
                )
                .ok();
            }
            recorder.end(monitor.join(), record::moment()).unwrap_or_else(|e| say_unrecorded(&e));
        }
    });
    if std::panic::catch_unwind(end).is_err() {
        writeln!(io::stderr(), "ringwatch: a bug in ringwatch; the job has ended before").ok();
    }
    Ok(code(status))
}

/// Records a step. The job comes first: what cannot be written is reported once, and the job goes on.
fn record_step(recorder: &mut Recorder, monitor: &mut Monitor<Segments>, events: Vec<FindingEvent>) {
    recorder.record(monitor, events, record::moment()).unwrap_or_else(|e| say_unrecorded(&e));
}

fn say_unrecorded(e: &io::Error) {
    writeln!(io::stderr(), "ringwatch: the recording cannot be written: {e}; it ends here").ok();
}

/// Sums the job up on stderr. Returns the changes of findings of the last step.
fn sum_up(
    o: &Run,
    s: &Surroundings,
    monitor: &mut Monitor<Segments>,
    status: ExitStatus,
) -> io::Result<Vec<FindingEvent>> {
    // Processes that began or ended since the last search would be missing from the sum, and their black boxes
    // would stay.
    monitor.source_mut().look_anew();
    let events = monitor.step(now_ns());
    let snapshot = monitor.snapshot(now_ns());
    let mut err = io::stderr().lock();
    if snapshot.segments.is_empty() {
        writeln!(
            err,
            "{}",
            if o.preload {
                "ringwatch: no process made an NCCL communicator, or NCCL is linked in statically"
            } else {
                "ringwatch: no process loaded the plugin: no NCCL communicator was made, NCCL is older than 2.23 (--preload sees it), or it is linked in without plugin support"
            }
        )?;
    } else {
        report::summary(&mut err, &snapshot)?;
    }
    let good = status.success() && !snapshot.findings.iter().any(|f| f.severity.is_alarm());
    let boxes: Vec<PathBuf> = monitor.source().gone().map(|(_, p)| p.to_owned()).collect();
    if good && !o.keep {
        for path in &boxes {
            // Somebody else may have cleaned up already.
            std::fs::remove_file(path).ok();
        }
    } else if !boxes.is_empty() {
        let dir = s.segments.display();
        writeln!(err, "ringwatch: {} black boxes kept in {dir} (ringwatch diagnose {dir})", boxes.len())?;
    }
    Ok(events)
}

async fn watch(
    o: &Run,
    s: &mut Surroundings,
    monitor: &mut Monitor<Segments>,
    signals: &mut Signals,
    (baselines, recorder): (&[Baseline], &mut Option<Recorder>),
) -> anyhow::Result<(ExitStatus, bool)> {
    let (program, arguments) = o.command.split_first().context("no command")?;
    let mut command = Command::new(program);
    command.args(arguments).envs(s.variables.iter().map(|(k, v)| (k, v)));
    signals::release(&mut command);
    let mut child = command.spawn().map_err(|e| {
        let reason = CannotStart { program: program.display().to_string(), kind: e.kind() };
        anyhow::Error::new(e).context(reason)
    })?;
    let mut broken = false;
    let mut reporter = Reporter::default();
    let mut reaping = tokio::time::interval(REAP);
    let mut next = tokio::time::Instant::now();
    // Without it their ends are seen at the next look.
    let ends = monitor.source_mut().ends().and_then(EndsToCome::new).ok();
    loop {
        tokio::select! {
            status = child.wait() => return Ok((status?, broken)),
            asked = signals.next() => {
                // A terminal has sent it to the whole foreground group, the job included.
                if let (false, Some(pid)) = (asked.from_terminal, child.id()) {
                    asked.pass_on(pid);
                }
                // A job that is asked to end does so rank by rank: what looks wrong then is its end.
                if asked.to_end() {
                    monitor.stop_judging();
                }
            }
            _ = reaping.tick() => {
                monitor.source_mut().reap(BLACK_BOXES, None);
            }
            () = async {
                match &ends {
                    Some(ends) => ends.next().await,
                    None => std::future::pending().await,
                }
            } => {
                monitor.source_mut().look_at_processes();
                next = tokio::time::Instant::now();
            }
            () = tokio::time::sleep_until(next), if !broken => {
                if let Some(predicted) = s.costs.as_mut().and_then(CostLog::news) {
                    monitor.set_baselines(baselines.iter().copied().chain(predicted).collect());
                }
                // The job comes first: whatever happens to its observer, it runs on and keeps its exit code.
                let step = std::panic::AssertUnwindSafe(|| {
                    let events = monitor.step(now_ns());
                    if let Some(recorder) = recorder.as_mut() {
                        record_step(recorder, monitor, events.clone());
                    }
                    events
                });
                let stepped = std::panic::catch_unwind(step);
                next = tokio::time::Instant::now() + monitor.source().pause();
                match stepped {
                    Ok(events) => {
                        reporter.report(&mut io::stderr().lock(), &events);
                        tell_stacks(&monitor.take_stacks());
                    }
                    Err(_) => {
                        broken = true;
                        // A closed stderr must not be what ends us.
                        writeln!(io::stderr(), "ringwatch: a bug in ringwatch; the job goes on unwatched").ok();
                    }
                }
            }
        }
    }
}

/// Reports findings from severity warning on as they come.
#[derive(Debug, Default)]
struct Reporter {
    /// Findings that were reported and are open.
    open: BTreeSet<FindingId>,
}

impl Reporter {
    /// Writes changes of findings. A closed stderr is no reason to disturb the job.
    fn report(&mut self, err: &mut impl Write, events: &[FindingEvent]) {
        for e in events.iter().filter_map(|e| self.reportable(e)) {
            if write!(err, "ringwatch: ").and_then(|()| report::event(err, &e)).is_err() {
                return;
            }
        }
    }

    /// A change as somebody sees it who hears nothing of infos: a finding that becomes a warning is opened for them.
    fn reportable(&mut self, e: &FindingEvent) -> Option<FindingEvent> {
        let id = e.finding.id;
        let change = match e.change {
            Change::Closed => self.open.remove(&id).then_some(Change::Closed),
            _ if !e.finding.severity.is_alarm() => self.open.contains(&id).then_some(e.change),
            _ if self.open.insert(id) => Some(Change::Opened),
            change => Some(change),
        };
        Some(FindingEvent { change: change?, finding: e.finding.clone() })
    }
}

/// Tells where culprits are that were told of before: the answer comes a moment after the finding.
fn tell_stacks(stacks: &[Stack]) {
    let mut err = io::stderr().lock();
    for s in stacks {
        let text = format!("stack of rank {} ({}): {}", s.rank, s.communicator, where_it_is(&s.frames));
        if writeln!(err, "ringwatch: {text}").is_err() {
            return;
        }
    }
}

/// The child's code as a shell gives it: 128 and the signal's number for a death by signal.
fn code(status: ExitStatus) -> u8 {
    let code = status.code().or_else(|| status.signal().map(|s| 128 + s)).unwrap_or(1);
    u8::try_from(code & 0xff).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{CommId, Finding, Kind, OperationRef, Rank, Severity, Track};

    #[test]
    fn a_finding_is_reported_when_it_becomes_a_warning() {
        let event = |change, severity| {
            let operation = OperationRef::named("AllReduce", Track::Collective, 3);
            let f = Finding::new(Kind::Straggler, CommId::unowned(7), vec![Rank(1)], operation);
            FindingEvent { change, finding: Finding { severity, open: change != Change::Closed, ..f } }
        };
        let said = |events: &[FindingEvent]| {
            let (mut reporter, mut out) = (Reporter::default(), Vec::new());
            reporter.report(&mut out, events);
            String::from_utf8(out).expect("text")
        };
        let (opened, updated, closed) = (Change::Opened, Change::Updated, Change::Closed);
        let (info, warning) = (Severity::Info, Severity::Warning);
        assert_eq!(said(&[event(opened, info), event(updated, info), event(closed, info)]), "");
        let became = said(&[event(opened, info), event(updated, warning)]);
        assert!(became.starts_with("ringwatch: straggler: rank 1") && became.contains("next: "), "{became}");
        let all = [event(opened, warning), event(updated, info), event(closed, info), event(opened, info)];
        let lines: Vec<String> =
            said(&all).lines().filter(|l| l.starts_with("ringwatch")).map(str::to_owned).collect();
        assert_eq!(lines.len(), 3, "{lines:?}");
        assert!(lines[1].starts_with("ringwatch: updated (info): straggler"), "{lines:?}");
    }
}
