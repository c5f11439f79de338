//! `ringwatch attach`: a job that hangs and was started without Ringwatch, by NCCL's own RAS, /proc and stacks.

use super::{BROKEN, FINDINGS};
use crate::cli::Attach;
use crate::ingest::{Glimpse, StackKind, glimpse};
use crate::model::{Cause, Evidence, Finding, ProcessState};
use crate::ras::{Client, DEFAULT_ADDRESS, Status, Verdict, judge};
use crate::report;
use anyhow::{Context, bail};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;
use time::PrimitiveDateTime;
use time::macros::format_description;

/// The variables that hold a job's name, as people know it.
const JOB_NAMES: [&str; 3] = ["SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", "RAY_JOB_ID"];
/// Processes of this host whose stacks are read.
const STACKS: usize = 16;
/// Bytes of a saved answer that are read.
const SAVED_MAX: u64 = 256 << 20;
/// Frames of a stack that are shown.
const FRAMES: usize = 8;

pub(super) fn run(o: &Attach) -> anyhow::Result<u8> {
    if let [before, after] = o.saved.as_slice() {
        let (before, after) = (saved(before)?, saved(after)?);
        let apart = apart(&before, &after)?;
        return print(o, judge(&before, &after, apart), &after);
    }
    let pid = o.target.as_deref().map(pid_of).transpose()?;
    let address = match (&o.ras, pid) {
        (Some(address), _) => address.clone(),
        (None, Some(pid)) => variable(pid, "NCCL_RAS_ADDR").unwrap_or_else(|| DEFAULT_ADDRESS.to_owned()),
        (None, None) => DEFAULT_ADDRESS.to_owned(),
    };
    if pid.and_then(|pid| variable(pid, "NCCL_RAS_ENABLE")).as_deref() == Some("0") {
        bail!("the job has switched NCCL's RAS off (NCCL_RAS_ENABLE=0): nothing can be asked");
    }
    let apart = Duration::from_secs(u64::from(o.seconds));
    let (before, after) = in_network_of(pid, || answers(&address, apart))?;
    if let Some(pid) = pid
        && !speaks_for(&after, pid)
    {
        bail!(
            "the RAS at {address} speaks for another job: process {pid} and those that it started are not among its ranks; each job needs \
             an address of its own (NCCL_RAS_ADDR), and the first one of a host has {DEFAULT_ADDRESS}"
        );
    }
    let mut verdict = judge(&before, &after, apart);
    let own = own_processes(&after);
    add_processes(&mut verdict, &own);
    print(o, verdict, &after)
}

/// An answer that ncclras wrote to a file (`ncclras -f json -v`).
fn saved(path: &Path) -> anyhow::Result<Status> {
    let what = || path.display().to_string();
    let mut bytes = Vec::new();
    File::open(path).with_context(what)?.take(SAVED_MAX + 1).read_to_end(&mut bytes).with_context(what)?;
    if bytes.len() as u64 > SAVED_MAX {
        bail!("{}: it has more than {} MiB", what(), SAVED_MAX >> 20);
    }
    let status = Status::parse(&String::from_utf8_lossy(&bytes));
    status.map_err(|why| anyhow::anyhow!("{}: it is no answer of NCCL's RAS in JSON: {why}", what()))
}

/// The time between two saved answers.
fn apart(before: &Status, after: &Status) -> anyhow::Result<Duration> {
    let format = format_description!("[year]-[month]-[day] [hour]:[minute]:[second]");
    let at = |status: &Status| PrimitiveDateTime::parse(status.timestamp.as_deref()?, format).ok();
    let apart = at(before).zip(at(after)).map(|(before, after)| after - before);
    let Some(apart) = apart.and_then(|a| Duration::try_from(a).ok()).filter(|a| !a.is_zero()) else {
        bail!(
            "the second answer is not later than the first one by their timestamps; name the older file first"
        );
    };
    Ok(apart)
}

/// Prints a verdict. Returns the exit code.
fn print(o: &Attach, verdict: Verdict, after: &Status) -> anyhow::Result<u8> {
    let version = after.nccl_version.as_deref().unwrap_or("-");
    let ranks: usize = after.communicators.iter().map(|c| c.ranks.len()).max().unwrap_or(0);
    eprintln!(
        "ringwatch: NCCL {version}, {} communicators, the largest has {ranks} ranks that answer",
        after.communicators.len()
    );
    verdict.notes.iter().for_each(|note| eprintln!("ringwatch: {note}"));
    let mut out = io::stdout().lock();
    if o.json {
        report::json(&mut out, &verdict.findings)?;
    } else if verdict.findings.is_empty() && verdict.cannot_tell {
        writeln!(out, "no rank lags, and nothing is launched: RAS cannot say which rank is to blame")?;
    } else {
        report::text(&mut out, &verdict.findings)?;
    }
    out.flush()?;
    Ok(match (verdict.findings.is_empty(), verdict.cannot_tell) {
        (false, _) => FINDINGS,
        (true, true) => BROKEN,
        (true, false) => 0,
    })
}

/// Two answers about the job, at least so far apart.
fn answers(address: &str, apart: Duration) -> anyhow::Result<(Status, Status)> {
    let ask = || Client::connect(address).and_then(Client::status);
    let hint = "is the job on this host, with NCCL 2.28 or later? Name one of its processes (ringwatch attach PID), or the address (--ras HOST:PORT)";
    let before = ask().context(hint)?;
    std::thread::sleep(apart);
    let after = ask().context("the second answer did not come: the job may have ended")?;
    Ok((before, after))
}

/// True where one of the ranks is this process or one that it started.
fn speaks_for(status: &Status, pid: u32) -> bool {
    let parents: BTreeMap<u32, u32> = processes().filter_map(|p| Some((p, parent_of(p)?))).collect();
    let is_below = |mut of: u32| {
        // A process that ends while it is looked at may leave a circle of numbers.
        for _ in 0..64 {
            if of == pid {
                return true;
            }
            match parents.get(&of) {
                Some(parent) => of = *parent,
                None => return false,
            }
        }
        false
    };
    let own: BTreeSet<u32> = parents.keys().copied().filter(|p| is_below(*p)).map(inner_pid).collect();
    let ranks = status
        .communicators
        .iter()
        .flat_map(|c| c.ranks.iter().map(|r| r.pid).chain(c.missing_ranks.iter().map(|r| r.pid)));
    ranks.into_iter().any(|rank| own.contains(&rank))
}

/// The numbers of all processes.
fn processes() -> impl Iterator<Item = u32> {
    let all = fs::read_dir("/proc").into_iter().flatten().flatten();
    all.filter_map(|e| e.file_name().to_str()?.parse().ok())
}

/// A line of a process's status.
fn status_line(pid: u32, name: &str) -> Option<String> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    Some(status.lines().find_map(|l| l.strip_prefix(name))?.trim().to_owned())
}

fn parent_of(pid: u32) -> Option<u32> {
    status_line(pid, "PPid:")?.parse().ok()
}

/// The number that a process has in its own container; NCCL reports this one.
fn inner_pid(pid: u32) -> u32 {
    let numbers = status_line(pid, "NSpid:");
    numbers.and_then(|n| n.split_whitespace().last()?.parse().ok()).unwrap_or(pid)
}

/// Runs this where the process's addresses are those of the job: a container has a network of its own.
fn in_network_of<T: Send>(
    pid: Option<u32>,
    what: impl FnOnce() -> anyhow::Result<T> + Send,
) -> anyhow::Result<T> {
    let Some(pid) = pid else { return what() };
    let network = format!("/proc/{pid}/ns/net");
    let number = |path: &str| fs::metadata(path).map(|m| m.ino());
    let is_same = match (number(&network), number("/proc/self/ns/net")) {
        (Ok(theirs), Ok(own)) => theirs == own,
        // A namespace that cannot be read cannot be entered either.
        _ => true,
    };
    if is_same {
        return what();
    }
    std::thread::scope(|scope| {
        let inside = scope.spawn(|| {
            let file = File::open(&network).with_context(|| network.clone())?;
            move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network)).with_context(|| {
                format!("process {pid} is in a container with a network of its own; run this as root, or inside of it")
            })?;
            what()
        });
        inside.join().unwrap_or_else(|_| bail!("the look at the job's network failed"))
    })
}

/// The process that a text names: a pid, or a job, by one of its processes on this host.
fn pid_of(target: &str) -> anyhow::Result<u32> {
    let number = target.parse::<u32>().ok().filter(|pid| fs::metadata(format!("/proc/{pid}")).is_ok());
    // A job's number may be that of any process.
    if let Some(pid) = number.filter(|pid| has_nccl(*pid)) {
        return Ok(pid);
    }
    let is_named = |pid: &u32| JOB_NAMES.iter().any(|name| variable(*pid, name).as_deref() == Some(target));
    let mut own: Vec<u32> = processes().filter(is_named).collect();
    own.sort_by_key(|pid| (!has_nccl(*pid), *pid));
    let Some(pid) = own.first().copied().or(number) else {
        bail!(
            "{target}: no process of this host has this number, or this value of {}; processes of other users are seen by root alone",
            JOB_NAMES.join(", ")
        );
    };
    Ok(pid)
}

/// A variable of a process's environment, as it was when it started.
fn variable(pid: u32, name: &str) -> Option<String> {
    let all = fs::read(format!("/proc/{pid}/environ")).ok()?;
    let found = all.split(|b| *b == 0).find_map(|v| v.strip_prefix(name.as_bytes())?.strip_prefix(b"="));
    found.map(|value| String::from_utf8_lossy(value).into_owned())
}

fn has_nccl(pid: u32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/maps")).is_ok_and(|maps| maps.contains("nccl"))
}

/// The job's processes on this host, and their numbers here; absent where a process cannot be seen from here.
type OwnProcesses = BTreeMap<(String, u32), Option<u32>>;

fn own_processes(status: &Status) -> OwnProcesses {
    let addresses = own_addresses();
    let answering = status.communicators.iter().flat_map(|c| c.ranks.iter().map(|r| (r.host.clone(), r.pid)));
    let missing =
        status.communicators.iter().flat_map(|c| c.missing_ranks.iter().map(|r| (r.host.clone(), r.pid)));
    // RAS names hosts by address, and processes by their numbers in their containers.
    let own = answering.chain(missing).filter(|(host, pid)| *pid > 0 && addresses.contains(host));
    let mut known: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    processes().filter(|p| has_nccl(*p)).for_each(|p| known.entry(inner_pid(p)).or_default().push(p));
    let here = |pid: u32| match known.get(&pid).map(Vec::as_slice) {
        Some([one]) => Some(*one),
        // Several containers have a process with this number.
        _ => None,
    };
    own.map(|process| (process.clone(), here(process.1))).collect()
}

/// This host's names and addresses.
fn own_addresses() -> BTreeSet<String> {
    let mut all: BTreeSet<String> = ["localhost".to_owned()].into();
    all.insert(rustix::system::uname().nodename().to_string_lossy().into_owned());
    let table = fs::read_to_string("/proc/net/fib_trie").unwrap_or_default();
    let mut last = "";
    for line in table.lines().map(str::trim) {
        match line.strip_prefix("|-- ") {
            Some(address) => last = address,
            None if line.contains("host LOCAL") => drop(all.insert(last.to_owned())),
            None => {}
        }
    }
    all
}

/// Adds to findings and notes what is seen of the processes on this host.
fn add_processes(verdict: &mut Verdict, own: &OwnProcesses) {
    let Verdict { findings, culprits, notes, cannot_tell } = verdict;
    for (finding, processes) in findings.iter_mut().zip(culprits) {
        let here = processes.iter().filter_map(|p| own.get(p).map(|here| (p.1, *here)));
        here.take(4).for_each(|(pid, here)| describe(finding, pid, here));
    }
    if *cannot_tell {
        notes.extend(groups(own));
    }
}

fn fact(text: String) -> Evidence {
    Evidence { text, value: None, unit: None }
}

fn describe(finding: &mut Finding, named: u32, here: Option<u32>) {
    let Some(pid) = here else {
        let text = format!(
            "no process of this host with NCCL and the number {named} can be seen: it is gone, or another user's"
        );
        finding.evidence.push(fact(text));
        return;
    };
    let seen = glimpse(pid, StackKind::Python);
    let (text, cause) = match seen.as_ref().map(|s| &s.state) {
        None => (format!("process {pid} is gone"), Some(Cause::ProcessGone(None))),
        Some(ProcessState::Zombie(exit) | ProcessState::Gone(exit)) => {
            (format!("process {pid} has ended"), Some(Cause::ProcessGone(*exit)))
        }
        Some(ProcessState::Stopped { traced }) => {
            let by = if *traced { "a debugger" } else { "a signal (SIGSTOP)" };
            (
                format!("process {pid} is stopped by {by}; kill -CONT {pid} lets it go on"),
                Some(Cause::Stopped),
            )
        }
        Some(ProcessState::Running) => (format!("process {pid} runs"), None),
        Some(ProcessState::Sleeping { wchan } | ProcessState::Blocked { wchan }) => {
            let at = wchan.as_ref().map_or_else(String::new, |at| format!(" at {at}"));
            (format!("the main thread of process {pid} sleeps in the kernel{at}"), None)
        }
    };
    finding.evidence.push(fact(text));
    // The cause is one of all culprits.
    if finding.ranks.len() == 1 {
        finding.cause = cause.or(finding.cause.take());
    }
    if let Some(Glimpse { frames, threads, .. }) = seen {
        if !frames.is_empty() {
            let shown: Vec<&str> = frames.iter().take(FRAMES).map(String::as_str).collect();
            finding.evidence.push(fact(format!("process {pid} is in {}", shown.join(" < "))));
        }
        if !threads.is_empty() {
            let shown: Vec<&str> = threads.iter().take(4).map(String::as_str).collect();
            finding
                .evidence
                .push(fact(format!("threads of process {pid} in the kernel: {}", shown.join("; "))));
        }
    }
}

/// Where the processes of this host are, those together that are at the same place: one that is elsewhere stands out.
fn groups(own: &OwnProcesses) -> Vec<String> {
    let mut places: BTreeMap<String, Vec<u32>> = BTreeMap::new();
    for ((_, named), here) in own.iter().take(STACKS) {
        let Some(pid) = here else {
            places.entry("cannot be seen from here".to_owned()).or_default().push(*named);
            continue;
        };
        let place = match glimpse(*pid, StackKind::Python) {
            None => "gone".to_owned(),
            Some(Glimpse { state: ProcessState::Stopped { .. }, .. }) => "stopped".to_owned(),
            Some(Glimpse { frames, .. }) if !frames.is_empty() => {
                let shown: Vec<&str> = frames.iter().take(3).map(String::as_str).collect();
                format!("in {}", shown.join(" < "))
            }
            Some(Glimpse { threads, .. }) => match threads.first() {
                Some(place) => format!("in the kernel: {place}"),
                None => "running, and no tool could read its stack (pip install py-spy)".to_owned(),
            },
        };
        places.entry(place).or_default().push(*pid);
    }
    let mut all: Vec<(String, Vec<u32>)> = places.into_iter().collect();
    all.sort_by_key(|(_, pids)| pids.len());
    let line = |(place, pids): (String, Vec<u32>)| {
        let pids: Vec<String> = pids.iter().map(u32::to_string).collect();
        format!("process {}: {place}", pids.join(", "))
    };
    all.into_iter().map(line).collect()
}
