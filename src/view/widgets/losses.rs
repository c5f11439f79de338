//! The losses, and the processes that they were in.

use crate::model::{LossRow, SegmentRow};
use crate::view::format::{self, ABSENT, or_absent};
use crate::view::page::{Ctx, Page, fit};
use crate::view::table::{self, Column, Key, Table};
use crate::view::theme::Role;
use std::collections::BTreeMap;

/// All columns.
pub(super) const SORTABLE: usize = 9;

/// Reasons shown above the processes; there are few.
const REASONS: usize = 8;
/// Segments that are not read, of those shown above the processes.
const UNREAD: usize = 6;

/// Losses of one reason over all processes.
pub(super) struct Reason {
    reason: String,
    count: u64,
    processes: usize,
}

/// The losses that the filter keeps, by reason, the greatest first.
pub(super) fn reasons(ctx: &Ctx<'_>) -> Vec<Reason> {
    let mut by: BTreeMap<&str, (u64, usize)> = BTreeMap::new();
    for l in ctx.snap.losses.iter().filter(|l| l.count > 0 && ctx.filter.loss(l)) {
        let entry = by.entry(&*l.reason).or_default();
        entry.0 = entry.0.saturating_add(l.count);
        entry.1 += 1;
    }
    let mut list: Vec<Reason> = by
        .into_iter()
        .map(|(reason, (count, processes))| Reason { reason: reason.to_owned(), count, processes })
        .collect();
    list.sort_by_key(|r| std::cmp::Reverse(r.count));
    list
}

/// The losses as a table.
pub(super) fn table(ctx: &Ctx<'_>, rows: &[&Reason]) -> Table {
    let columns = [
        Column::number("lost", 0, |r: &Reason| r.count.to_string(), |_| Key::Absent).at_least(8),
        Column::text("reason", 0, 60, |r: &Reason| r.reason.clone()).at_least(24),
        Column::number("processes", 1, |r: &Reason| r.processes.to_string(), |_| Key::Absent),
    ];
    table::layout(ctx, &columns, rows, None, None, |_| Role::Warn)
}

pub(super) fn page(ctx: &Ctx<'_>) -> Page {
    let reasons = reasons(ctx);
    let mut page =
        Page { head: vec![ctx.rule("Lost", &format!("{} in all", ctx.snap.lost()))], ..Page::default() };
    if reasons.is_empty() {
        page.head.push(super::nothing(ctx, "nothing lost", ctx.snap.losses.len()));
    } else {
        let shown = table(ctx, &reasons.iter().take(REASONS).collect::<Vec<_>>());
        page.head.extend(shown.head);
        page.head.extend(shown.rows);
        if reasons.len() > REASONS {
            page.head.push(ctx.line(Role::Dim, format!(" {} more reasons", reasons.len() - REASONS)));
        }
    }
    unread(ctx, &mut page);
    processes(ctx, &mut page);
    page
}

/// The sources that are not read, and why: nothing on any screen is about them.
fn unread(ctx: &Ctx<'_>, page: &mut Page) {
    let all = &ctx.snap.unread;
    if all.is_empty() {
        return;
    }
    page.head.push(ctx.rule("Not read", &format!("{} in all", all.len())));
    let line = |text: String| {
        ctx.line(Role::Bad, format!(" {}", fit(&text, ctx.width.saturating_sub(1), ctx.theme)))
    };
    page.head.extend(all.iter().take(UNREAD).map(|u| line(u.to_string())));
    if all.len() > UNREAD {
        page.head.push(ctx.line(Role::Dim, format!(" {} more", all.len() - UNREAD)));
    }
}

fn processes(ctx: &Ctx<'_>, page: &mut Page) {
    let (columns, sort) = (columns(), ctx.app.sort());
    let all = ctx.snap.segments.len();
    let mut rows: Vec<&SegmentRow> = ctx.snap.segments.iter().filter(|s| ctx.filter.segment(s)).collect();
    table::sort(&columns, &mut rows, sort);
    page.selected = (!rows.is_empty()).then(|| ctx.app.position().min(rows.len() - 1));
    let role = |s: &SegmentRow| match (s.alive, s.lost) {
        (true, 0) => Role::Plain,
        (true, _) => Role::Warn,
        (false, _) => Role::Dim,
    };
    let laid = table::layout(ctx, &columns, &rows, sort, page.selected, role);
    let by = table::sort_words(&columns, sort);
    let title = format!("Processes ({})", ctx.filter.tally(rows.len(), all));
    page.head.push(ctx.rule(&title, by.trim_start_matches(", ")));
    page.head.extend(laid.head);
    page.body = laid.rows;
    let Some(row) = page.selected.and_then(|i| rows.get(i)) else {
        page.body.push(super::nothing(ctx, "no process attached", all));
        return;
    };
    let of_it = ctx.snap.losses.iter().filter(|l| l.pid == row.pid && l.count > 0);
    let lost: Vec<String> = of_it.map(|l: &LossRow| format!("{} {}", l.count, l.reason)).collect();
    let lost = if lost.is_empty() { "nothing".to_owned() } else { lost.join(", ") };
    page.foot.push(ctx.rule("Selected", ""));
    let pairs = [
        ("pid", row.pid.to_string()),
        ("host", row.host.clone()),
        ("program", row.program.clone()),
        ("lost", lost),
    ];
    page.foot.extend(table::details(ctx, &pairs, 3));
}

fn columns() -> Vec<Column<'static, SegmentRow>> {
    let alive = |s: &SegmentRow| if s.alive { "alive" } else { "gone" }.to_owned();
    vec![
        Column::number("pid", 0, |s: &SegmentRow| s.pid.to_string(), |s| Key::count(s.pid.into()))
            .at_least(7),
        Column::text("process", 0, 7, alive),
        Column::number("lost", 0, |s: &SegmentRow| format::count(s.lost), |s| Key::count(s.lost)).at_least(6),
        Column::number(
            "job rank",
            1,
            |s: &SegmentRow| or_absent(s.job_rank, |r| r.to_string()),
            |s| Key::num(s.job_rank.map(f64::from)),
        ),
        Column::text("NCCL", 2, 12, |s: &SegmentRow| s.nccl.clone().unwrap_or_else(|| ABSENT.to_owned()))
            .at_least(6),
        Column::number(
            "ABI",
            3,
            |s: &SegmentRow| or_absent(s.abi, |v| format!("v{v}")),
            |s| Key::num(s.abi.map(f64::from)),
        ),
        Column::number(
            "clock error",
            4,
            |s: &SegmentRow| or_absent(s.clock_error_ns, format::duration_ns),
            |s| Key::num(s.clock_error_ns.map(|v| v as f64)),
        ),
        Column::text("host", 0, 32, |s: &SegmentRow| s.host.clone()).at_least(8),
        Column::text("program", 1, 40, |s: &SegmentRow| s.program.clone()).at_least(8),
    ]
}
