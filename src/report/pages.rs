//! Each job on one page: who is in it, what it ran and how fast, who was late, what was found, what was lost.

use super::{finding, number, size};
use crate::model::{
    ClassRow, CommId, CommRow, Coverage, Finding, JobRow, RankRow, Snapshot, StepRow, Unread, size_text,
    steers,
};
use serde::Serialize;
use std::io::{self, Write};

/// Classes of operations of one communicator that the text shows.
const CLASSES: usize = 16;
/// Ranks that came late that it shows.
const LATE: usize = 5;
/// Processes of which it shows the steps.
const STEPS: usize = 8;
/// Communicators it shows; jobs that make them again and again have hundreds.
const COMMUNICATORS: usize = 12;
/// Hosts it names.
const HOSTS: usize = 8;

/// The pages of all jobs. What is not known is `null`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Pages {
    /// Where it comes from, in words.
    pub source: String,
    /// The moment, `HH:MM:SS` in UTC.
    pub at: Option<String>,
    /// A page for each job.
    pub jobs: Vec<Page>,
    /// Findings about no job that is known: devices that nobody uses, for example.
    pub findings: Vec<Finding>,
    /// Segments and directories that were not read: no page is about them.
    pub unread: Vec<Unread>,
}

/// One job.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Page {
    /// Its name.
    pub job: Option<String>,
    /// Processes that run.
    pub running: usize,
    /// Processes that are gone.
    pub gone: usize,
    /// Processes of which nobody knows whether they run: files describe them.
    #[serde(skip_serializing_if = "crate::model::is_zero")]
    pub unknown: usize,
    /// Processes that it should have.
    pub size: Option<u32>,
    /// The hosts of those that are seen.
    pub hosts: Vec<String>,
    /// Nodes that its largest communicator spans, as NCCL counts them.
    pub nodes: Option<u32>,
    /// NCCL's versions.
    pub nccl: Option<String>,
    /// From the beginning of its first process to the end of its last one, or to now, in s.
    pub seen_s: Option<f64>,
    /// Share of that time in collectives, 0 to 1.
    pub communication_share: Option<f64>,
    /// Of how many operations the GPU time is known.
    pub coverage: Coverage,
    /// Its communicators.
    pub communicators: Vec<CommPage>,
    /// The steps of its processes, by rank; absent where nobody measured them.
    pub steps: Option<Vec<StepRow>>,
    /// Ranks that were late, the latest first.
    pub stragglers: Vec<Late>,
    /// The findings, open ones first.
    pub findings: Vec<Finding>,
    /// Records that were lost, by reason.
    pub losses: Vec<Loss>,
}

/// One communicator.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CommPage {
    /// Its id, 16 hexadecimal digits.
    pub communicator: String,
    /// The user's name for it.
    pub name: Option<String>,
    /// Ranks it has.
    pub ranks: Option<u32>,
    /// Ranks that are seen.
    pub seen: usize,
    /// Nodes it spans.
    pub nodes: Option<u32>,
    /// True once all ranks have freed it.
    pub closed: bool,
    /// Its operations by class, those first that took the most time.
    pub operations: Vec<Operations>,
}

/// Operations of one class.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Operations {
    /// Which.
    pub operation: &'static str,
    /// The least size of the class in bytes; the next class begins at twice that.
    pub from_bytes: Option<u64>,
    /// Algorithm.
    pub algorithm: Option<&'static str>,
    /// Protocol.
    pub protocol: Option<&'static str>,
    /// How many.
    pub count: u64,
    /// Message bytes of all of them.
    pub bytes: Option<u64>,
    /// Median transfer time in ns.
    pub p50_ns: Option<f64>,
    /// 99th percentile of it in ns.
    pub p99_ns: Option<f64>,
    /// Bus bandwidth at the median, in bytes a second, by nccl-tests' definition.
    pub busbw: Option<f64>,
    /// The number of them whose transfer time is known.
    pub timed: u64,
    /// By what: `kernels`, `events`, or both.
    pub timed_by: Option<&'static str>,
}

/// A rank that was late.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Late {
    /// The communicator, 16 hexadecimal digits.
    pub communicator: String,
    /// The rank in it.
    pub rank: u32,
    /// Its host.
    pub host: String,
    /// Its process.
    pub pid: u32,
    /// How often it came last.
    pub times: u64,
    /// By how much at worst, in ns.
    pub worst_ns: Option<u64>,
    /// Wall time that the job lost by it, in ns: what held the rank elsewhere is not in it.
    pub cost_ns: u64,
    /// How long it waited for others itself, in ns.
    pub waited_ns: Option<u64>,
}

/// Records that were lost.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Loss {
    /// Why.
    pub reason: String,
    /// How many.
    pub count: u64,
}

impl Pages {
    /// From all that is known at a moment.
    pub fn of(s: &Snapshot) -> Self {
        let touches = |f: &Finding, comms: &[CommId]| {
            comms.contains(&f.communicator) || f.victims.iter().any(|v| comms.contains(&v.communicator))
        };
        let rest = s.findings.iter().filter(|f| !s.jobs.iter().any(|j| touches(f, &j.sums.comms)));
        Pages {
            source: s.source.clone(),
            at: s.wall.clone(),
            jobs: s.jobs.iter().map(|j| Page::of(s, j, |f| touches(f, &j.sums.comms))).collect(),
            findings: rest.cloned().collect(),
            unread: s.unread.clone(),
        }
    }

    /// Writes them for people, at most 110 columns wide but for what findings say.
    ///
    /// # Errors
    /// Those of the writer.
    pub fn text(&self, out: &mut impl Write) -> io::Result<()> {
        let at = self.at.as_ref().map_or_else(String::new, |t| format!(" at {t} UTC"));
        writeln!(out, "{}{at}", plain(&self.source))?;
        if self.jobs.is_empty() {
            writeln!(out, "no jobs")?;
        }
        for page in &self.jobs {
            writeln!(out)?;
            page.text(out)?;
        }
        if !self.findings.is_empty() {
            writeln!(out, "\nfindings about no job that is known here")?;
            findings(out, &self.findings)?;
        }
        if !self.unread.is_empty() {
            writeln!(out, "\nnot read: nothing here is about these")?;
            self.unread.iter().try_for_each(|u| writeln!(out, "  {}", plain(&u.to_string())))?;
        }
        Ok(())
    }
}

impl Page {
    fn of(s: &Snapshot, job: &JobRow, is_own: impl Fn(&Finding) -> bool) -> Self {
        let comms: Vec<&CommRow> = s.comms.iter().filter(|c| job.sums.comms.contains(&c.id)).collect();
        let mut late: Vec<&RankRow> =
            s.ranks.iter().filter(|r| r.late > 0 && job.sums.comms.contains(&r.comm)).collect();
        late.sort_by_key(|r| (std::cmp::Reverse((r.worst_late_ns, r.late)), r.comm, r.rank));
        let lost =
            job.sums.lost.iter().map(|(reason, count)| Loss { reason: reason.to_string(), count: *count });
        Page {
            job: job.name.clone(),
            running: job.alive,
            gone: job.gone,
            unknown: job.unknown,
            size: job.size,
            hosts: job.sums.hosts.clone(),
            nodes: comms.iter().max_by_key(|c| c.ranks).and_then(|c| c.nodes),
            nccl: job.nccl.clone(),
            seen_s: job.sums.seen_ns.map(|ns| ns as f64 / 1e9),
            communication_share: job.sums.comm_share,
            coverage: comms.iter().fold(Coverage::default(), |sum, c| sum + c.coverage),
            communicators: comms.into_iter().map(|c| CommPage::of(s, c)).collect(),
            steps: s.steps.as_ref().map(|all| {
                let own = all.iter().filter(|row| job.sums.comms.contains(&row.comm));
                own.cloned().collect()
            }),
            stragglers: late.into_iter().map(Late::of).collect(),
            findings: s.findings.iter().filter(|f| is_own(f)).cloned().collect(),
            losses: lost.collect(),
        }
    }

    fn text(&self, out: &mut impl Write) -> io::Result<()> {
        let unknown = || "-".to_owned();
        writeln!(out, "job {}", self.job.as_deref().map_or_else(unknown, plain))?;
        let of = self.size.map_or_else(unknown, |n| n.to_string());
        if self.unknown > 0 {
            writeln!(out, "  ranks         {} in files, of {of}", self.unknown)?;
        } else {
            writeln!(out, "  ranks         {} running, {} gone, of {of}", self.running, self.gone)?;
        }
        let mut hosts: Vec<String> = self.hosts.iter().take(HOSTS).map(|h| plain(h)).collect();
        if self.hosts.len() > HOSTS {
            hosts.push(format!("and {} more", self.hosts.len() - HOSTS));
        }
        let nodes = self.nodes.map_or_else(unknown, |n| n.to_string());
        writeln!(
            out,
            "  nodes         {nodes}; seen here: {}",
            if hosts.is_empty() { unknown() } else { hosts.join(", ") }
        )?;
        writeln!(out, "  NCCL          {}", self.nccl.as_deref().map_or_else(unknown, plain))?;
        writeln!(out, "  seen for      {}", self.seen_s.map_or_else(unknown, lasting))?;
        let share = self.communication_share.map_or_else(unknown, |s| format!("{:.1} %", s * 100.0));
        writeln!(out, "  communicates  {share} of that time")?;
        let c = self.coverage;
        let timed = c.share().map_or_else(unknown, |s| format!("{:.1} %", s * 100.0));
        writeln!(
            out,
            "  GPU times     of {timed} of {} operations (each rank's part is one), {} impossible ones dropped",
            c.operations, c.impossible
        )?;
        for comm in self.communicators.iter().take(COMMUNICATORS) {
            comm.text(out)?;
        }
        if self.communicators.len() > COMMUNICATORS {
            writeln!(out, "\n  and {} more communicators", self.communicators.len() - COMMUNICATORS)?;
        }
        self.steps(out)?;
        self.late(out)?;
        if self.findings.is_empty() {
            writeln!(out, "\n  findings: none")?;
        } else {
            let open = self.findings.iter().filter(|f| f.open).count();
            writeln!(out, "\n  findings: {open} open, {} over", self.findings.len() - open)?;
            findings(out, &self.findings)?;
        }
        if self.losses.is_empty() {
            return writeln!(out, "\n  losses: none");
        }
        writeln!(out, "\n  losses (records)")?;
        for l in &self.losses {
            writeln!(out, "    {:>10}  {}", l.count, plain(&l.reason))?;
        }
        Ok(())
    }

    fn steps(&self, out: &mut impl Write) -> io::Result<()> {
        let Some(steps) = &self.steps else { return Ok(()) };
        if steps.is_empty() {
            return writeln!(out, "\n  steps: no sequence of calls repeats");
        }
        writeln!(
            out,
            "\n  {:<16}{:<24}{:>9}{:>9}{:>11}{:>11}{:>11}{:>10}{:>9}",
            "steps of rank", "host", "pid", "steps", "mean ms", "p50 ms", "p99 ms", "in NCCL", "drift"
        )?;
        for row in steps.iter().take(STEPS) {
            writeln!(
                out,
                "  {:<16}{:<24}{:>9}{:>9}{:>11}{:>11}{:>11}{:>10}{:>9}",
                row.job_rank.map_or_else(|| "-".to_owned(), |r| r.to_string()),
                plain(&row.host),
                row.pid,
                row.steps,
                number(Some(row.mean_ns), 1e6),
                number(row.p50_ns, 1e6),
                number(row.p99_ns, 1e6),
                row.nccl_share.map_or_else(|| "-".to_owned(), |s| format!("{:.1} %", s * 100.0)),
                row.drift.map_or_else(|| "-".to_owned(), |d| format!("{:+.1} %", d * 100.0)),
            )?;
        }
        if steps.len() > STEPS {
            writeln!(out, "  and {} more", steps.len() - STEPS)?;
        }
        // Ranks wait for one another: a slow step of one is a slow step of all.
        let slowest = steps.iter().find_map(|row| Some((row, row.slowest.as_ref()?)));
        let Some((row, slow)) = slowest else { return Ok(()) };
        let rank = row.job_rank.map_or_else(|| format!("pid {}", row.pid), |r| format!("rank {r}"));
        let at = slow.at.as_ref().map_or_else(String::new, |at| format!(" at {at} UTC"));
        let took = number(Some(slow.took_ns as f64), 1e6);
        writeln!(out, "  slowest of {rank}: step {}{at}, {took} ms", slow.number)?;
        slow.cause.as_ref().map_or(Ok(()), |cause| writeln!(out, "    {cause}"))
    }

    fn late(&self, out: &mut impl Write) -> io::Result<()> {
        if self.stragglers.is_empty() {
            return writeln!(out, "\n  late ranks: none");
        }
        writeln!(
            out,
            "\n  {:<20}{:>8}  {:<24}{:>9}{:>8}{:>12}{:>12}{:>12}",
            "late in", "rank", "host", "pid", "times", "worst ms", "cost s", "waited s"
        )?;
        for l in self.stragglers.iter().take(LATE) {
            writeln!(
                out,
                "  {:<20}{:>8}  {:<24}{:>9}{:>8}{:>12}{:>12}{:>12}",
                l.communicator,
                l.rank,
                plain(&l.host),
                l.pid,
                l.times,
                number(l.worst_ns.map(|n| n as f64), 1e6),
                number(Some(l.cost_ns as f64), 1e9),
                number(l.waited_ns.map(|n| n as f64), 1e9),
            )?;
        }
        if self.stragglers.len() > LATE {
            writeln!(out, "  and {} more", self.stragglers.len() - LATE)?;
        }
        Ok(())
    }
}

impl CommPage {
    fn of(s: &Snapshot, c: &CommRow) -> Self {
        let mut classes: Vec<&ClassRow> = s.classes.iter().filter(|k| k.comm == c.id).collect();
        let time = |k: &ClassRow| k.p50_ns.unwrap_or(0.0) * k.count as f64;
        classes.sort_by(|a, b| time(b).total_cmp(&time(a)).then(b.count.cmp(&a.count)));
        CommPage {
            communicator: c.id.to_string(),
            name: c.name.clone(),
            ranks: c.ranks,
            seen: c.seen,
            nodes: c.nodes,
            closed: c.closed,
            operations: classes.into_iter().map(Operations::of).collect(),
        }
    }

    fn text(&self, out: &mut impl Write) -> io::Result<()> {
        let known = |n: Option<u32>| n.map_or_else(|| "-".to_owned(), |n| n.to_string());
        let name = self.name.as_deref().map_or_else(String::new, |n| format!(" {}", plain(n)));
        let closed = if self.closed { ", freed" } else { "" };
        let nodes = format!("{} {}", known(self.nodes), if self.nodes == Some(1) { "node" } else { "nodes" });
        writeln!(
            out,
            "\n  communicator {}{name}: {} of {} ranks seen, on {nodes}{closed}",
            self.communicator,
            self.seen,
            known(self.ranks)
        )?;
        if self.operations.is_empty() {
            return writeln!(out, "    no operations that are over");
        }
        writeln!(
            out,
            "    {:<14}{:>9}  {:<15}{:>9}{:>11}{:>10}{:>10}{:>8}  timed",
            "operation", "size", "algorithm", "count", "bytes", "p50 us", "p99 us", "GB/s"
        )?;
        for o in self.operations.iter().take(CLASSES) {
            o.text(out)?;
        }
        if self.operations.len() > CLASSES {
            writeln!(out, "    and {} more", self.operations.len() - CLASSES)?;
        }
        Ok(())
    }
}

impl Operations {
    fn of(k: &ClassRow) -> Self {
        Operations {
            operation: k.func.as_str(),
            from_bytes: k.size_class.and_then(|c| 1u64.checked_shl(u32::from(c))),
            algorithm: k.algo.map(|a| a.as_str()),
            protocol: k.proto.map(|p| p.as_str()),
            count: k.count,
            bytes: k.bytes,
            p50_ns: k.p50_ns,
            p99_ns: k.p99_ns,
            busbw: k.busbw,
            timed: k.timed,
            timed_by: match (k.timed, k.by_events) {
                (0, _) => None,
                (_, 0) => Some("kernels"),
                (timed, events) if timed == events => Some("events"),
                _ => Some("kernels and events"),
            },
        }
    }

    fn text(&self, out: &mut impl Write) -> io::Result<()> {
        let unknown = || "-".to_owned();
        let algorithm = match (self.algorithm, self.protocol) {
            (Some(a), Some(p)) => format!("{a}/{p}"),
            (Some(a), None) => a.to_owned(),
            _ => unknown(),
        };
        // Rounded down: what is not all is not called all.
        let timed = self.timed_by.map_or_else(unknown, |by| {
            format!("{} % {by}", self.timed.saturating_mul(100) / self.count.max(1))
        });
        let class = self.from_bytes.and_then(|b| u8::try_from(b.ilog2()).ok());
        writeln!(
            out,
            "    {:<14}{:>9}  {algorithm:<15}{:>9}{:>11}{:>10}{:>10}{:>8}  {timed}",
            self.operation,
            class.map_or_else(unknown, size),
            self.count,
            self.bytes.map_or_else(unknown, size_text),
            number(self.p50_ns, 1e3),
            number(self.p99_ns, 1e3),
            number(self.busbw, 1e9),
        )
    }
}

impl Late {
    fn of(r: &RankRow) -> Self {
        Late {
            communicator: r.comm.to_string(),
            rank: r.rank.0,
            host: r.host.clone(),
            pid: r.pid,
            times: r.late,
            worst_ns: r.worst_late_ns,
            cost_ns: r.late_cost_ns,
            waited_ns: r.waiting_ns,
        }
    }
}

/// Findings, each with when it was seen.
fn findings(out: &mut impl Write, all: &[Finding]) -> io::Result<()> {
    for f in all {
        let mut text = Vec::new();
        finding(&mut text, f)?;
        for line in String::from_utf8_lossy(&text).lines() {
            writeln!(out, "    {}", plain(line))?;
        }
        let when = |t: &Option<String>| t.clone().unwrap_or_else(|| "-".to_owned());
        let state = if f.open { "open" } else { "over" };
        writeln!(
            out,
            "        {state}; first seen {}, last seen {}",
            when(&f.first_seen),
            when(&f.last_seen)
        )?;
    }
    Ok(())
}

/// A text of a job's, without what could steer a terminal.
pub(super) fn plain(text: &str) -> String {
    text.chars().filter(|c| !steers(*c)).collect()
}

/// `12 min 34 s`.
pub(super) fn lasting(seconds: f64) -> String {
    let whole = seconds as u64;
    match (whole / 3600, whole / 60 % 60, whole % 60) {
        (0, 0, _) => format!("{seconds:.1} s"),
        (0, m, s) => format!("{m} min {s} s"),
        (h, m, _) => format!("{h} h {m} min"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_told_as_people_tell_them() {
        let of = [
            (0.25, "0.2 s"),
            (59.96, "60.0 s"),
            (60.0, "1 min 0 s"),
            (3_599.0, "59 min 59 s"),
            (93_784.0, "26 h 3 min"),
        ];
        for (seconds, text) in of {
            assert_eq!(lasting(seconds), text);
        }
    }

    #[test]
    fn nothing_steers_a_terminal() {
        assert_eq!(plain("a\u{1b}[2Jb\u{202e}c\nd"), "a[2Jbcd");
    }
}
