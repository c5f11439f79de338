//! `ringwatch diagnose`: what is wrong now, and what was.

use super::{FINDINGS, baselines, explain, monitor, playback};
use crate::cli::Diagnose;
use crate::detect::Settings;
use crate::explain::Texts;
use crate::import::Import;
use crate::ingest::{Segments, now_ns, unix_ns};
use crate::join::FinishedSink;
use crate::model::{CloseReason, Finding, Snapshot, Source as _, Unread};
use crate::report;
use crate::runtime::{Monitor, ask};
use anyhow::bail;
use std::collections::BTreeSet;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

/// How long the search for segments may take: each container that does not answer costs a second.
const SEARCH_MAX: Duration = Duration::from_secs(10);
/// Findings of a job that has ended are still printed for this long: who was woken by them asks after the job is gone.
const ENDED: Duration = Duration::from_secs(3600);

/// The findings, and what they do not cover.
pub(super) struct Verdict {
    pub(super) findings: Vec<Finding>,
    /// Why no findings would not mean that all is well; empty where everything was seen.
    pub(super) unseen: Vec<String>,
}

pub(super) fn run(o: &Diagnose) -> anyhow::Result<u8> {
    o.dir.as_deref().map_or(Ok(()), directory)?;
    let texts = Texts::built_in()?;
    let mut logs = Vec::new();
    for path in &o.log {
        logs.push((path, explain::of_file(&texts, path)?));
    }
    let mut verdict = if o.at.cluster.is_some() {
        super::cluster::verdict(&o.at)?
    } else if let Some(socket) = &o.agent {
        of_agent(ask(socket)?)
    } else if let Some(dir) = &o.replay {
        of_recording(dir)?
    } else if !o.import.is_empty() {
        of_import(&o.import)?
    } else {
        look(o)?
    };
    // A directory or file that was named is asked for as a whole.
    if !o.all && o.dir.is_none() && o.import.is_empty() && o.replay.is_none() {
        let now_unix_ns = i128::from(unix_ns());
        verdict.findings.retain(|f| is_wanted(f, o.since, now_unix_ns));
    }
    for why in &verdict.unseen {
        eprintln!("ringwatch: {why}");
    }
    let mut out = io::stdout().lock();
    let (none, complete) = (verdict.findings.is_empty(), verdict.unseen.is_empty());
    let code = exit_code(&verdict);
    if o.json {
        report::json(&mut out, &verdict.findings)?;
    } else if none && !complete {
        writeln!(out, "no findings in what was seen, and not everything was")?;
    } else {
        report::text(&mut out, &verdict.findings)?;
    }
    for (path, explained) in &logs {
        explain::write(&mut out, Some(&shown(path)), explained, o.json)?;
    }
    out.flush()?;
    Ok(code)
}

/// Findings of severity info are printed, and are no reason to act.
fn exit_code(verdict: &Verdict) -> u8 {
    match (verdict.findings.iter().any(|f| f.severity.is_alarm()), verdict.unseen.is_empty()) {
        (true, _) => FINDINGS,
        (false, true) => 0,
        (false, false) => super::BROKEN,
    }
}

/// Returns whether a finding is printed: open ones, those closed since a moment that was asked for, and those whose
/// job ended a short time ago.
fn is_wanted(f: &Finding, since: Option<Duration>, now_unix_ns: i128) -> bool {
    let within = |time: Duration| {
        let at = f.closed_at.as_deref().and_then(|t| OffsetDateTime::parse(t, &Rfc3339).ok());
        at.is_some_and(|t| now_unix_ns - t.unix_timestamp_nanos() <= time.as_nanos() as i128)
    };
    let ended = f.close_reason == Some(CloseReason::JobEnded) && within(ENDED);
    f.open || since.map_or(ended, within)
}

/// The verdict of an agent, and what it does not see.
fn of_agent(s: Snapshot) -> Verdict {
    let mut unseen: Vec<String> = s.unread.iter().map(|u| format!("not read by the agent: {u}")).collect();
    unseen.extend(hidden(&s));
    unseen.extend(more(s.more_findings));
    if s.unsearched {
        unseen.push("the agent has not searched all of this host yet; try again".to_owned());
    }
    if s.segments.is_empty() {
        unseen.push("the agent sees no process of yours with the plugin; start the job with `ringwatch run -- CMD`, or load the plugin into it (`ringwatch plugin`)".to_owned());
    }
    Verdict { findings: s.findings, unseen }
}

/// Judges a recording. Returns the findings, and what the recording lacks.
fn of_recording(dir: &Path) -> anyhow::Result<Verdict> {
    let (monitor, _) = playback::play(dir, None)?;
    Ok(Verdict { findings: monitor.findings(), unseen: monitor.source().notes() })
}

/// The files of another tool, judged as they are. Finished operations go to `sink`.
pub(super) fn imported(
    paths: &[PathBuf],
    sink: Option<Box<dyn FinishedSink>>,
) -> anyhow::Result<Monitor<Import>> {
    let import = Import::open(paths, unix_ns())?;
    let now_ns = import.at_ns();
    let mut monitor = Monitor::new(import, Settings::default()).with_sink(sink);
    monitor.step(now_ns);
    Ok(monitor)
}

/// Says until when waits in imported files are counted.
pub(super) fn say_moment(monitor: &Monitor<Import>) {
    let at = OffsetDateTime::from_unix_timestamp_nanos(i128::from(monitor.source().at_ns()));
    if let Some(at) = at.ok().and_then(|t| t.format(&Rfc3339).ok()) {
        eprintln!(
            "ringwatch: waits are counted until {at}, when the oldest file was written; copies keep that time with cp -p or rsync -t"
        );
    }
}

/// Adds to findings what only imported files know.
pub(super) fn add_evidence(import: &Import, findings: &mut [Finding]) {
    for finding in findings {
        let more = import.evidence(finding);
        finding.evidence.extend(more);
    }
}

/// The verdict on another tool's files.
fn of_import(paths: &[PathBuf]) -> anyhow::Result<Verdict> {
    let monitor = imported(paths, None)?;
    say_moment(&monitor);
    let mut findings = monitor.findings();
    add_evidence(monitor.source(), &mut findings);
    Ok(Verdict { findings, unseen: monitor.source().notes() })
}

/// Findings that a user has beyond the limit.
fn more(findings: u64) -> Option<String> {
    (findings > 0).then(|| format!("{findings} more findings are left out: a user has too many open ones"))
}

/// The operations that lost records keep from sight, a line for each reason.
fn hidden(s: &Snapshot) -> impl Iterator<Item = String> {
    s.hidden().into_iter().map(|(reason, (records, processes))| {
        format!("records of {records} operations in {processes} running processes are lost: {reason}")
    })
}

/// Reads what segments hold: their own history. The second look is for records that were being written during the first.
pub(super) fn read(monitor: &mut Monitor<Segments>) -> anyhow::Result<()> {
    let began = Instant::now();
    monitor.step(now_ns());
    while !monitor.source().is_searched() && began.elapsed() < SEARCH_MAX {
        std::thread::sleep(Duration::from_millis(50));
        monitor.step(now_ns());
    }
    std::thread::sleep(Duration::from_millis(250));
    monitor.step(now_ns());
    explain_nothing(monitor)
}

/// A directory that was named has to be one.
pub(super) fn directory(dir: &Path) -> anyhow::Result<()> {
    if !dir.is_dir() {
        bail!("{}: not a directory; name one that holds segments (*.seg)", dir.display());
    }
    Ok(())
}

/// Looks for oneself.
fn look(o: &Diagnose) -> anyhow::Result<Verdict> {
    let mut monitor = monitor(o.dir.clone()).with_baselines(baselines(&o.baseline)?);
    read(&mut monitor)?;
    // Asked about now: what dead jobs left is told when their directory is named.
    if o.dir.is_none() && monitor.join().all_gone() {
        let dirs = post_mortem(&monitor);
        bail!(
            "no job runs here; for the post-mortem segments of ended ones: ringwatch diagnose {}",
            dirs.join(" or ")
        );
    }
    let own = rustix::process::geteuid().as_raw();
    // Of a directory that was named everything is asked for.
    let is_missed = |u: &Unread| o.dir.is_some() || concerns(u, own);
    let unseen =
        monitor.source().unread(None).into_iter().filter(is_missed).map(|u| format!("not read: {u}"));
    let mut unseen: Vec<String> = unseen.chain(hidden(&monitor.snapshot(now_ns()))).collect();
    unseen.extend(more(monitor.findings_left_out(None)));
    if !monitor.source().is_searched() {
        unseen.push(format!("not all containers were searched within {} s; try again", SEARCH_MAX.as_secs()));
    }
    Ok(Verdict { findings: monitor.findings(), unseen })
}

/// A path whose name may be anybody's: what could steer a terminal is shown as an escape.
fn shown(path: &Path) -> String {
    path.display().to_string().escape_debug().to_string()
}

/// Returns whether a user misses something by what was not read: the segments of others are none of theirs.
fn concerns(u: &Unread, own: u32) -> bool {
    own == 0 || u.owner.is_none_or(|owner| owner == own)
}

/// The directories that hold segments of dead processes.
fn post_mortem(monitor: &Monitor<Segments>) -> Vec<String> {
    let dirs: BTreeSet<String> =
        monitor.source().gone().filter_map(|(_, path)| path.parent()).map(shown).collect();
    dirs.into_iter().collect()
}

/// An answer about no processes would be no answer.
fn explain_nothing(monitor: &Monitor<Segments>) -> anyhow::Result<()> {
    let source = monitor.source();
    if source.is_empty() {
        let unread = source.unread(None);
        for u in &unread {
            eprintln!("ringwatch: not read: {u}");
        }
        bail!(
            "no segments{} in {}; start the job with `ringwatch run -- CMD`, or load the plugin into it (`ringwatch plugin`)",
            if unread.is_empty() { "" } else { " that can be read" },
            source.describe()
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{BEYOND_MEMORY, CommId, Kind, LossRow, OperationRef, SegmentRow, Severity, Track};

    #[test]
    fn lost_operations_of_running_processes_keep_no_findings_from_being_the_last_word() {
        let process = |pid, alive| SegmentRow {
            pid,
            host: "a".to_owned(),
            program: "train".to_owned(),
            job_rank: None,
            alive,
            nccl: None,
            abi: None,
            clock_error_ns: None,
            lost: 0,
        };
        let loss = |pid, reason: &'static str| LossRow { pid, reason: reason.into(), count: 5 };
        let unseen = |losses| {
            let segments = vec![process(1, true), process(2, true), process(3, false)];
            of_agent(Snapshot { segments, losses, ..Snapshot::default() }).unseen
        };
        assert_eq!(unseen(vec![loss(1, "foreign handle"), loss(3, BEYOND_MEMORY)]), [""; 0]);
        let lines = unseen(vec![loss(1, BEYOND_MEMORY), loss(2, BEYOND_MEMORY), loss(1, "stale handle")]);
        let wanted = format!("records of 10 operations in 2 running processes are lost: {BEYOND_MEMORY}");
        assert_eq!(lines, [wanted]);
    }

    #[test]
    fn what_the_agent_has_not_searched_yet_keeps_no_findings_from_being_the_last_word() {
        let process = SegmentRow {
            pid: 1,
            host: "a".to_owned(),
            program: "train".to_owned(),
            job_rank: None,
            alive: true,
            nccl: None,
            abi: None,
            clock_error_ns: None,
            lost: 0,
        };
        let code = |unsearched| {
            exit_code(&of_agent(Snapshot {
                segments: vec![process.clone()],
                unsearched,
                ..Snapshot::default()
            }))
        };
        assert_eq!((code(false), code(true)), (0, super::super::BROKEN));
    }

    #[test]
    fn the_exit_code_goes_by_findings_from_warning_on() {
        let code = |severities: &[Severity], unseen: &[&str]| {
            let operation = OperationRef::named("AllReduce", Track::Collective, 3);
            let of = |s: &Severity| Finding {
                severity: *s,
                ..Finding::new(Kind::Straggler, CommId::unowned(1), vec![], operation.clone())
            };
            let unseen = unseen.iter().map(|t| (*t).to_owned()).collect();
            exit_code(&Verdict { findings: severities.iter().map(of).collect(), unseen })
        };
        assert_eq!((code(&[], &[]), code(&[Severity::Info], &[])), (0, 0));
        assert_eq!(code(&[Severity::Info], &["a segment"]), super::super::BROKEN);
        for alarm in [Severity::Warning, Severity::Critical] {
            assert_eq!(code(&[Severity::Info, alarm], &["a segment"]), FINDINGS);
        }
    }

    #[test]
    fn what_is_open_and_what_was_lately_are_printed_as_asked_for() {
        let operation = OperationRef::named("AllReduce", Track::Collective, 3);
        let closed = |reason, at: &str| Finding {
            open: false,
            close_reason: Some(reason),
            closed_at: Some(at.to_owned()),
            ..Finding::new(Kind::MissingRank, CommId::unowned(1), vec![], operation.clone())
        };
        let now =
            OffsetDateTime::parse("2026-11-22T12:00:00Z", &Rfc3339).expect("a time").unix_timestamp_nanos();
        let wanted = |f: &Finding, since| is_wanted(f, since, now);
        let hours = |n: u64| Some(Duration::from_secs(n * 3600));
        let ended = closed(CloseReason::JobEnded, "2026-11-22T11:30:00Z");
        assert!(
            wanted(&ended, None)
                && wanted(&ended, hours(1))
                && !wanted(&ended, Some(Duration::from_secs(60)))
        );
        let long_ago = closed(CloseReason::JobEnded, "2026-11-22T01:00:00Z");
        assert!(!wanted(&long_ago, None) && wanted(&long_ago, hours(24)));
        let resolved = closed(CloseReason::Resolved, "2026-11-22T11:59:00Z");
        assert!(!wanted(&resolved, None) && wanted(&resolved, hours(24)));
        let open = Finding { open: true, closed_at: None, close_reason: None, ..resolved };
        assert!(wanted(&open, None) && wanted(&open, hours(1)));
    }
}
