//! A whole cluster: how much there is, a mark a node, and ways down to jobs, nodes and communicators.

use super::{communicators, findings};
use crate::model::{At, CommRow, Fleet, JobRow, NodeCell, NodeState};
use crate::view::App;
use crate::view::draw::with_ctx;
use crate::view::format;
use crate::view::page::{Ctx, Page, fit, width};
use crate::view::table::{self, Column, Key, Table};
use crate::view::theme::Role;
use ratatui::text::Line;

/// Nodes that are listed, the worst first; the map has them all.
const NODES: usize = 16;
/// The widest name beside the map.
const LABEL: usize = 24;
/// Marks stand in groups of so many.
const GROUP: usize = 8;

/// The rows that the list leads to.
#[derive(Debug, Default)]
struct Ways<'a> {
    jobs: Vec<&'a JobRow>,
    nodes: Vec<&'a NodeCell>,
    comms: Vec<&'a CommRow>,
}

impl<'a> Ways<'a> {
    fn of(ctx: &Ctx<'a>, fleet: &'a Fleet) -> Self {
        let at = &fleet.at;
        let mut ways = Ways::default();
        if at.job.is_none() && at.node.is_none() && at.communicator.is_none() {
            ways.jobs.extend(ctx.snap.jobs.iter().filter(|j| ctx.filter.job(j)));
        }
        if at.node.is_none() && at.communicator.is_none() {
            ways.nodes.extend(fleet.nodes.iter().filter(|n| ctx.filter.node(n)));
            ways.nodes.sort_by_key(|n| std::cmp::Reverse(n.state));
            ways.nodes.truncate(NODES);
        }
        ways.comms.extend(ctx.snap.comms.iter().filter(|c| ctx.filter.comm(c)));
        ways
    }

    fn len(&self) -> usize {
        self.jobs.len() + self.nodes.len() + self.comms.len()
    }
}

/// Where the selected line leads from here.
pub(in crate::view) fn way(app: &App) -> Option<At> {
    with_ctx(app, 80, |ctx| {
        let fleet = ctx.snap.fleet.as_ref()?;
        let ways = Ways::of(ctx, fleet);
        let i = app.position().min(ways.len().checked_sub(1)?);
        let at = fleet.at.clone();
        if let Some(job) = ways.jobs.get(i) {
            return Some(At { job: Some(job.name.clone().unwrap_or_default()), ..at });
        }
        let i = i - ways.jobs.len();
        if let Some(node) = ways.nodes.get(i) {
            return Some(At { node: Some(node.name.clone()), ..at });
        }
        let comm = ways.comms.get(i - ways.nodes.len())?;
        Some(At { communicator: Some(comm.id), ..at })
    })
}

pub(super) fn page(ctx: &Ctx<'_>, height: usize) -> Page {
    let Some(fleet) = &ctx.snap.fleet else {
        return Page { body: vec![super::nothing(ctx, "no cluster is looked at", 0)], ..Page::default() };
    };
    let asked = if ctx.app.at == fleet.at { "" } else { "asking" };
    let mut page = Page { head: vec![ctx.rule(&fleet.at.to_string(), asked)], ..Page::default() };
    page.head.extend(totals(ctx, fleet));
    page.head.extend(map(ctx, fleet, (height / 4).max(2)));
    page.head.extend(wrong(ctx, fleet, (height / 8).clamp(1, 8)));
    list(ctx, fleet, &mut page);
    page
}

fn totals(ctx: &Ctx<'_>, fleet: &Fleet) -> Vec<Line<'static>> {
    let t = &fleet.totals;
    let silent = if t.silent > 0 { format!(", {} silent", t.silent) } else { String::new() };
    let pairs = [
        ("nodes", format!("{}{silent}", t.nodes)),
        ("processes", t.processes.to_string()),
        ("communicators", t.communicators.to_string()),
        ("collectives/s", format::or_absent(t.ops_per_s, format::rate)),
        ("findings", t.findings.to_string()),
        ("messages missed", format::count(t.missed)),
        ("operations left out", format::count(t.left_out)),
    ];
    table::details(ctx, &pairs, 2)
}

/// One mark a node, or one for several where there are more than fit.
fn map(ctx: &Ctx<'_>, fleet: &Fleet, rows: usize) -> Vec<Line<'static>> {
    let all: Vec<&NodeCell> = fleet.nodes.iter().filter(|n| ctx.filter.node(n)).collect();
    let known = fleet.nodes.len() + fleet.rest.nodes;
    let label = all.iter().map(|n| width(&n.name)).max().unwrap_or(0).clamp(4, LABEL);
    let groups = (ctx.width.saturating_sub(label + 2) / (GROUP + 1)).max(1);
    let wide = groups * GROUP;
    let each = all.len().div_ceil(wide.saturating_mul(rows)).max(1);
    let remark = match each {
        1 => "one mark a node".to_owned(),
        n => format!("one mark the worst of {n} nodes"),
    };
    let mut lines = vec![ctx.rule(&format!("Nodes ({})", ctx.filter.tally(all.len(), known)), &remark)];
    let marks: Vec<(&str, NodeState)> = all
        .chunks(each)
        .map(|c| (c[0].name.as_str(), c.iter().map(|n| n.state).max().unwrap_or_default()))
        .collect();
    for row in marks.chunks(wide) {
        let name = fit(row[0].0, label, ctx.theme);
        let pad = " ".repeat(label.saturating_sub(width(&name)));
        let mut spans = vec![ctx.span(Role::Dim, format!(" {name}{pad} "))];
        for (i, (_, state)) in row.iter().enumerate() {
            let gap = if i > 0 && i % GROUP == 0 { " " } else { "" };
            spans.push(ctx.span(role(*state), format!("{gap}{}", state.mark())));
        }
        lines.push(Line::from(spans));
    }
    if all.is_empty() {
        lines.push(super::nothing(ctx, "no agent is heard", known));
        return lines;
    }
    let count = |s: &NodeState| (*s, all.iter().filter(|n| n.state == *s).count());
    let mut spans = Vec::new();
    for (s, n) in NodeState::ALL.iter().map(count).filter(|(_, n)| *n > 0) {
        let gap = if spans.is_empty() { " " } else { "  " };
        spans.push(ctx.span(role(s), format!("{gap}{} {n} {}", s.mark(), s.as_str())));
    }
    lines.push(Line::from(spans));
    if fleet.rest.nodes > 0 {
        let (more, bad) = (fleet.rest.nodes, fleet.rest.troubled);
        let text = format!(" {} {more} more nodes, {bad} of them not well", ctx.theme.ellipsis());
        lines.push(ctx.line(if bad > 0 { Role::Warn } else { Role::Dim }, text));
    }
    lines
}

/// The first findings, a line each.
fn wrong(ctx: &Ctx<'_>, fleet: &Fleet, most: usize) -> Vec<Line<'static>> {
    let rows = findings::rows(ctx);
    let all = ctx.snap.findings.len() + fleet.rest.findings;
    let mut lines = vec![ctx.rule(&format!("Findings ({})", ctx.filter.tally(rows.len(), all)), "press 4")];
    lines.extend(rows.iter().take(most).map(|f| findings::headline(ctx, f)));
    if rows.is_empty() {
        lines.push(super::nothing(ctx, "no findings", all));
    }
    let more = if ctx.filter.is_empty() { all } else { rows.len() }.saturating_sub(most);
    if more > 0 {
        let more = format::plural(more, "more finding");
        lines.push(ctx.line(Role::Dim, format!(" {} {more}", ctx.theme.ellipsis())));
    }
    lines
}

/// The rows that can be gone into.
fn list(ctx: &Ctx<'_>, fleet: &Fleet, page: &mut Page) {
    let ways = Ways::of(ctx, fleet);
    let last = ways.len().saturating_sub(1);
    let mut chosen = (ways.len() > 0).then(|| ctx.app.position().min(last));
    page.last = Some(last);
    // A section's own part of the position.
    let mut section =
        |page: &mut Page, title: String, rows: usize, table: &dyn Fn(Option<usize>) -> Table| {
            if rows == 0 {
                return;
            }
            let own = chosen.filter(|i| *i < rows);
            chosen = chosen.and_then(|i| i.checked_sub(rows));
            let laid = table(own);
            page.body.push(ctx.rule(&title, ""));
            page.body.extend(laid.head);
            page.selected = page.selected.or_else(|| own.map(|i| page.body.len() + i));
            page.body.extend(laid.rows);
        };
    let more = |shown: usize, rest: usize| {
        if rest > 0 { format!("{shown} of {}", shown + rest) } else { shown.to_string() }
    };
    let rest = &fleet.rest;
    let title = format!("Jobs ({})", more(ways.jobs.len(), rest.jobs));
    section(page, title, ways.jobs.len(), &|own| communicators::jobs(ctx, &ways.jobs, own));
    let title = format!(
        "Worst nodes ({})",
        more(ways.nodes.len(), fleet.nodes.len() + rest.nodes - ways.nodes.len())
    );
    section(page, title, ways.nodes.len(), &|own| nodes(ctx, &ways.nodes, own));
    let title = format!("Communicators ({})", more(ways.comms.len(), rest.comms));
    section(page, title, ways.comms.len(), &|own| communicators::communicators(ctx, &ways.comms, own));
    if ways.len() == 0 {
        page.body.push(super::nothing(ctx, "nothing runs here", ctx.snap.comms.len() + fleet.nodes.len()));
    }
}

fn nodes(ctx: &Ctx<'_>, rows: &[&NodeCell], selected: Option<usize>) -> Table {
    let state = |n: &NodeCell| format!("{} {}", n.state.mark(), n.state.as_str());
    let columns = [
        Column::text("node", 0, 40, |n: &NodeCell| n.name.clone()).at_least(12),
        Column::text("state", 0, 9, state).at_least(9),
        Column::number("processes", 1, |n: &NodeCell| n.processes.to_string(), |_| Key::Absent),
        Column::number("findings", 1, |n: &NodeCell| n.findings.to_string(), |_| Key::Absent),
    ];
    table::layout(ctx, &columns, rows, None, selected, |n| match n.state {
        NodeState::Well => Role::Plain,
        other => role(other),
    })
}

fn role(state: NodeState) -> Role {
    match state {
        NodeState::Blamed | NodeState::Silent => Role::Bad,
        NodeState::Named | NodeState::Held => Role::Warn,
        NodeState::Well => Role::Busy,
        NodeState::Idle | NodeState::Ended => Role::Dim,
    }
}
