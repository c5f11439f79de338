//! The sections about a job.

use crate::model::{CommId, Kind, RankRow, Snapshot, StepRow, size_text};
use crate::report::pages::{CommPage, Late, Operations, Page, plain};
use crate::timeline::{Bandwidth, JobCharts, RankSeries, SlowOperation};
use serde::Serialize;
use std::collections::BTreeMap;

/// Rows of a table at most; more are counted.
const ROWS: usize = 500;

/// A part of a document.
#[derive(Debug, Clone, Default, Serialize)]
pub(super) struct Section {
    id: String,
    title: &'static str,
    text: String,
    /// The name of the chart in report.js, where there are data for it.
    chart: Option<&'static str>,
    table: Option<Table>,
}

#[derive(Debug, Clone, Default, Serialize)]
struct Table {
    heads: Vec<&'static str>,
    rows: Vec<Vec<String>>,
    more: usize,
}

impl Table {
    /// A table, where there are rows.
    fn of<T>(
        heads: &[&'static str],
        all: impl IntoIterator<Item = T>,
        row: impl Fn(T) -> Vec<String>,
    ) -> Option<Self> {
        let mut all = all.into_iter();
        let rows: Vec<Vec<String>> = all.by_ref().take(ROWS).map(row).collect();
        (!rows.is_empty()).then(|| Table { heads: heads.to_vec(), rows, more: all.count() })
    }
}

/// The sections about a job, in the order in which people ask.
pub(super) fn of(s: &Snapshot, page: &Page, charts: &JobCharts, index: usize) -> Vec<Section> {
    let any = |pick: fn(&RankSeries) -> &Vec<Option<f32>>| {
        charts.ranks.iter().any(|r| pick(r).iter().flatten().any(|share| *share > 0.0))
    };
    let is_timed = any(|r| &r.in_nccl);
    let mut sections = vec![
        Section {
            title: "Steps",
            text: match &page.steps {
                Some(steps) if steps.is_empty() => "No sequence of calls repeats.".to_owned(),
                None => "Steps are measured in recordings and segments alone.".to_owned(),
                Some(_) => "What each process repeats, and how long it takes. A slow step of one rank is a slow step of all that wait for it.".to_owned(),
            },
            chart: (charts.steps.iter().any(|s| !s.points.is_empty())).then_some("steps"),
            table: steps(page.steps.as_deref().unwrap_or_default()),
            ..Section::default()
        },
        Section {
            title: "Communication over time",
            text: if is_timed {
                "The share of time in NCCL's kernels, mean over the ranks, and the part of it that is waiting for others. Where only some operations are timed, they stand for all. Whether computing ran beside them is not known.".to_owned()
            } else {
                "Nothing is known about it: of too few kernels both start and end are known.".to_owned()
            },
            chart: is_timed.then_some("share"),
            ..Section::default()
        },
        Section {
            title: "Who waited",
            text: "The share of time that each rank waited for others inside NCCL's kernels. A rank that waits less than the others is the one that they wait for. Gray: not known.".to_owned(),
            chart: any(|r| &r.waited).then_some("waited"),
            ..Section::default()
        },
        Section {
            title: "Who was waited for",
            text: "The share of time in which a rank was the last to come to an operation and others waited for it.".to_owned(),
            chart: any(|r| &r.held).then_some("held"),
            table: late(&page.stragglers),
            ..Section::default()
        },
        Section {
            title: "Bandwidth by size",
            text: "Bus bandwidth at the median transfer time, by nccl-tests' definition. Waiting for late ranks is not in it.".to_owned(),
            chart: (!charts.bandwidth.is_empty() || !charts.expected.is_empty()).then_some("bandwidth"),
            table: bandwidth(&charts.bandwidth),
            ..Section::default()
        },
        Section {
            title: "Latency",
            text: "Transfer times of operations by class, in all communicators of the job. Waiting for late ranks is not in them.".to_owned(),
            chart: charts.latency.iter().any(|l| !l.buckets.is_empty()).then_some("latency"),
            ..Section::default()
        },
        Section {
            title: "Slowest operations",
            text: "From the start of the first rank's kernel to the end of the last one's. Of many ranks those that came last and those that waited longest are shown.".to_owned(),
            chart: (!charts.slowest.is_empty()).then_some("slowest"),
            table: slowest(&charts.slowest),
            ..Section::default()
        },
        Section {
            title: "Communicators and operations",
            text: "Each class of operations, those that took the most time first.".to_owned(),
            table: operations(&page.communicators),
            ..Section::default()
        },
        Section {
            title: "Topology",
            text: "Where each rank ran, and its ranks in communicators.".to_owned(),
            table: topology(s, page),
            ..Section::default()
        },
        Section { title: "GPUs, links and network cards", text: hardware(page), ..Section::default() },
        Section {
            title: "Losses",
            text: if page.losses.is_empty() { "No records were lost." } else { "Records that were lost, by reason." }.to_owned(),
            table: Table::of(&["records", "reason"], &page.losses, |l| vec![l.count.to_string(), plain(&l.reason)]),
            ..Section::default()
        },
    ];
    for section in &mut sections {
        let is_empty = section.chart.is_none() && section.table.is_none();
        if is_empty
            && matches!(
                section.title,
                "Who waited" | "Who was waited for" | "Bandwidth by size" | "Latency" | "Slowest operations"
            )
        {
            section.text = format!("{} Nothing is known about it here.", section.text);
        }
        let id = section.title.to_lowercase().replace(", ", "-").replace(' ', "-");
        section.id = format!("{id}-{index}");
    }
    sections
}

fn number(n: Option<f64>, unit: f64, digits: usize) -> String {
    n.map_or_else(|| "-".to_owned(), |n| format!("{:.digits$}", n / unit))
}

fn or_unknown<T: ToString>(value: Option<T>) -> String {
    value.map_or_else(|| "-".to_owned(), |v| v.to_string())
}

fn steps(rows: &[StepRow]) -> Option<Table> {
    let heads = [
        "rank",
        "host",
        "pid",
        "steps",
        "mean ms",
        "p50 ms",
        "p99 ms",
        "in NCCL %",
        "drift %",
        "slowest step",
        "its ms",
        "more in it",
    ];
    Table::of(&heads, rows, |r| {
        let slow = r.slowest.as_ref();
        vec![
            or_unknown(r.job_rank),
            plain(&r.host),
            r.pid.to_string(),
            r.steps.to_string(),
            number(Some(r.mean_ns), 1e6, 2),
            number(r.p50_ns, 1e6, 2),
            number(r.p99_ns, 1e6, 2),
            number(r.nccl_share, 0.01, 1),
            number(r.drift, 0.01, 1),
            or_unknown(slow.map(|s| s.number)),
            number(slow.map(|s| s.took_ns as f64), 1e6, 2),
            or_unknown(slow.and_then(|s| s.cause.clone())),
        ]
    })
}

fn late(rows: &[Late]) -> Option<Table> {
    let heads =
        ["communicator", "rank", "host", "pid", "times late", "worst ms", "cost s", "waited itself s"];
    Table::of(&heads, rows, |l| {
        vec![
            l.communicator.clone(),
            l.rank.to_string(),
            plain(&l.host),
            l.pid.to_string(),
            l.times.to_string(),
            number(l.worst_ns.map(|ns| ns as f64), 1e6, 2),
            number(Some(l.cost_ns as f64), 1e9, 3),
            number(l.waited_ns.map(|ns| ns as f64), 1e9, 3),
        ]
    })
}

fn bandwidth(points: &[Bandwidth]) -> Option<Table> {
    let heads = ["operation", "ranks", "mean size", "algorithm", "operations", "GB/s"];
    Table::of(&heads, points, |p| {
        vec![
            p.operation.to_owned(),
            or_unknown(p.ranks),
            size_text(p.bytes as u64),
            or_unknown(p.algorithm.clone()),
            p.count.to_string(),
            number(Some(p.busbw), 1e9, 2),
        ]
    })
}

fn slowest(all: &[SlowOperation]) -> Option<Table> {
    let heads = [
        "operation",
        "communicator",
        "order",
        "size",
        "algorithm",
        "took ms",
        "transfer ms",
        "late rank",
        "late by ms",
    ];
    Table::of(&heads, all, |op| {
        vec![
            op.operation.clone(),
            plain(&op.communicator),
            op.order.to_string(),
            op.bytes.map_or_else(|| "-".to_owned(), size_text),
            or_unknown(op.algorithm.clone()),
            number(Some(op.took_ms), 1.0, 3),
            number(op.transfer_ms, 1.0, 3),
            or_unknown(op.late.map(|(rank, _)| rank)),
            number(op.late.map(|(_, by_ms)| by_ms), 1.0, 3),
        ]
    })
}

fn operations(comms: &[CommPage]) -> Option<Table> {
    let heads = [
        "communicator",
        "ranks",
        "operation",
        "from size",
        "algorithm",
        "count",
        "timed",
        "p50 µs",
        "p99 µs",
        "GB/s",
    ];
    let all = comms.iter().flat_map(|c| c.operations.iter().map(move |o| (c, o)));
    Table::of(&heads, all, |(c, o): (&CommPage, &Operations)| {
        let algorithm = match (o.algorithm, o.protocol) {
            (Some(a), Some(p)) => format!("{a}/{p}"),
            (a, _) => or_unknown(a),
        };
        vec![
            c.name.as_deref().map_or_else(|| c.communicator.clone(), plain),
            or_unknown(c.ranks),
            o.operation.to_owned(),
            o.from_bytes.map_or_else(|| "-".to_owned(), size_text),
            algorithm,
            o.count.to_string(),
            o.timed.to_string(),
            number(o.p50_ns, 1e3, 1),
            number(o.p99_ns, 1e3, 1),
            number(o.busbw, 1e9, 2),
        ]
    })
}

/// A row for each process of the job.
fn topology(s: &Snapshot, page: &Page) -> Option<Table> {
    let names: BTreeMap<CommId, &CommPage> = s
        .comms
        .iter()
        .filter_map(|c| Some((c.id, page.communicators.iter().find(|p| p.communicator == c.id.to_string())?)))
        .collect();
    // By host, rank in the job, and process.
    let mut processes: BTreeMap<(&str, Option<u32>, u32), Vec<&RankRow>> = BTreeMap::new();
    for row in s.ranks.iter().filter(|r| names.contains_key(&r.comm)) {
        processes.entry((&row.host, row.job_rank, row.pid)).or_default().push(row);
    }
    let heads = ["host", "rank", "pid", "state", "GPU", "ranks in communicators"];
    Table::of(&heads, processes, |((host, job_rank, pid), rows)| {
        let member = |r: &&RankRow| {
            let name = names.get(&r.comm).and_then(|c| c.name.as_deref());
            format!("{} in {}", r.rank, name.map_or_else(|| r.comm.to_string(), plain))
        };
        let mut gpus: Vec<&str> = rows.iter().filter_map(|r| r.gpu.as_deref()).collect();
        gpus.dedup();
        let mut members: Vec<String> = rows.iter().take(8).map(member).collect();
        if rows.len() > members.len() {
            members.push(format!("and {} more", rows.len() - members.len()));
        }
        vec![
            plain(host),
            or_unknown(job_rank),
            pid.to_string(),
            if rows.iter().any(|r| r.alive) { "running" } else { "gone or unknown" }.to_owned(),
            if gpus.is_empty() { "-".to_owned() } else { gpus.join(", ") },
            members.join("; "),
        ]
    })
}

fn hardware(page: &Page) -> String {
    let devices = page.findings.iter().filter(|f| f.place.is_some());
    let kinds: Vec<&str> = devices.map(|f| Kind::as_str(f.kind)).collect();
    if kinds.is_empty() {
        return "This source has no readings of them. An agent reads them and has them in its metrics."
            .to_owned();
    }
    format!("There are findings about them: {}. The agent's metrics have the readings.", kinds.join(", "))
}
