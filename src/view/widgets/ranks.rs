//! The ranks of one communicator: how far each is, and who waits for whom.

use crate::model::{CommId, OpState, Rank, RankRow};
use crate::view::App;
use crate::view::draw::with_ctx;
use crate::view::format::{self, ABSENT, or_absent};
use crate::view::page::{Ctx, Page};
use crate::view::table::{self, Column, Key};
use crate::view::theme::Role;
use ratatui::text::Line;

/// All columns but the matrix.
pub(super) const SORTABLE: usize = 13;

/// Larger communicators show no matrix: it would not fit beside the rest.
const MATRIX: usize = 32;

/// Lines that say who waits for whom.
const WAITS: usize = 3;

pub(super) fn page(ctx: &Ctx<'_>) -> Page {
    let choices = choices(ctx);
    let Some(comm) = current(ctx, &choices) else {
        let mut page = Page { head: vec![ctx.rule("Ranks", "")], ..Page::default() };
        page.body.push(super::nothing(ctx, "no rank seen yet", ctx.snap.ranks.len()));
        return page;
    };
    let all: Vec<&RankRow> = ctx.snap.ranks.iter().filter(|r| r.comm == comm).collect();
    let mut rows: Vec<&RankRow> = all.iter().copied().filter(|r| ctx.filter.rank(r)).collect();
    let (columns, sort) = (columns(&all), ctx.app.sort());
    table::sort(&columns, &mut rows, sort);
    let selected = (!rows.is_empty()).then(|| ctx.app.position().min(rows.len() - 1));
    let laid = table::layout(ctx, &columns, &rows, sort, selected, role);
    let title = format!("Ranks of {} ({})", ctx.comm(comm), ctx.filter.tally(rows.len(), all.len()));
    let at = choices.iter().position(|c| *c == comm).map_or(1, |i| i + 1);
    let remark = format!("communicator {at} of {}{}", choices.len(), table::sort_words(&columns, sort));
    let mut page = Page { head: vec![ctx.rule(&title, &remark)], selected, ..Page::default() };
    page.head.extend(waits(ctx, &all));
    page.head.extend(laid.head);
    page.body = laid.rows;
    if let Some(row) = selected.and_then(|i| rows.get(i)) {
        page.foot.push(ctx.rule("Selected", ""));
        page.foot.extend(details(ctx, row));
    }
    page
}

/// The communicator before or after the one shown.
pub(in crate::view) fn neighbour(app: &App, forward: bool) -> Option<CommId> {
    with_ctx(app, 80, |ctx| {
        let choices = choices(ctx);
        let shown = current(ctx, &choices)?;
        let at = choices.iter().position(|c| *c == shown)?;
        let step = if forward { 1 } else { choices.len() - 1 };
        choices.get((at + step) % choices.len()).copied()
    })
}

/// The communicators that have a rank which the filter keeps.
fn choices(ctx: &Ctx<'_>) -> Vec<CommId> {
    let mut list: Vec<CommId> =
        ctx.snap.ranks.iter().filter(|r| ctx.filter.rank(r)).map(|r| r.comm).collect();
    // Ranks come by communicator, so neighbours are all there is to remove.
    list.dedup();
    list
}

/// The one chosen; until one is, that of the first open finding, so that the screen shows the trouble.
fn current(ctx: &Ctx<'_>, choices: &[CommId]) -> Option<CommId> {
    let found = ctx.snap.findings.iter().find(|f| f.open).map(|f| f.communicator);
    let wanted = [ctx.app.comm, found];
    wanted.into_iter().flatten().find(|c| choices.contains(c)).or_else(|| choices.first().copied())
}

fn role(r: &RankRow) -> Role {
    match r.state {
        Some(OpState::NotIssued) => Role::Bad,
        Some(OpState::InDoubt) => Role::Warn,
        _ if !r.alive => Role::Warn,
        _ => Role::Plain,
    }
}

/// `ranks 0-2 wait for rank 3`, one line a group.
fn waits(ctx: &Ctx<'_>, rows: &[&RankRow]) -> Vec<Line<'static>> {
    let mut groups: Vec<(&[Rank], Vec<Rank>)> = Vec::new();
    for r in rows.iter().filter(|r| !r.waits_for.is_empty()) {
        match groups.iter_mut().find(|(of, _)| *of == r.waits_for.as_slice()) {
            Some((_, who)) => who.push(r.rank),
            None => groups.push((&r.waits_for, vec![r.rank])),
        }
    }
    if groups.is_empty() {
        return vec![ctx.line(Role::Dim, " no rank is known to wait for another")];
    }
    let say = |list: &[Rank], one: &str, many: &str| {
        format!("{} {}", if list.len() == 1 { one } else { many }, format::ranks(list))
    };
    groups.sort_by_key(|(_, who)| std::cmp::Reverse(who.len()));
    let more = groups.len().saturating_sub(WAITS);
    let mut lines: Vec<Line<'static>> = groups
        .iter()
        .take(WAITS)
        .map(|(of, who)| {
            let verb = if who.len() == 1 { "waits" } else { "wait" };
            let (who, of) = (say(who, "rank", "ranks"), say(of, "rank", "ranks"));
            ctx.line(Role::Warn, format!(" {who} {verb} for {of}"))
        })
        .collect();
    if more > 0 {
        lines.push(ctx.line(Role::Dim, format!(" and {more} more groups")));
    }
    lines
}

fn columns<'a>(all: &[&RankRow]) -> Vec<Column<'a, RankRow>> {
    let alive = |r: &RankRow| if r.alive { "alive" } else { "gone" }.to_owned();
    let state = |r: &RankRow| match r.state {
        Some(s) => format!("{} {}", s.mark(), s.as_str()),
        None => "  idle".to_owned(),
    };
    let gpu = |r: &RankRow| r.gpu.clone().unwrap_or_else(|| ABSENT.to_owned());
    let mut columns = vec![
        Column::number("rank", 0, |r: &RankRow| r.rank.to_string(), |r| Key::count(r.rank.0.into())),
        Column::text("state", 0, 12, state).at_least(12),
        Column::number("finished", 3, |r: &RankRow| format::count(r.finished), |r| Key::count(r.finished)),
        Column::number("issued", 2, |r: &RankRow| format::count(r.issued), |r| Key::count(r.issued)),
        Column::text("waits for", 0, 14, |r: &RankRow| format::ranks(&r.waits_for)),
        Column::number(
            "waited",
            0,
            |r: &RankRow| or_absent(r.waiting_ns, format::duration_ns),
            |r| Key::num(r.waiting_ns.map(|v| v as f64)),
        )
        .at_least(8),
        Column::number("late", 1, |r: &RankRow| format::count(r.late), |r| Key::count(r.late)),
        Column::number(
            "worst late",
            6,
            |r: &RankRow| or_absent(r.worst_late_ns, format::duration_ns),
            |r| Key::num(r.worst_late_ns.map(|v| v as f64)),
        ),
        Column::text("process", 5, 7, alive),
        Column::number("pid", 8, |r: &RankRow| r.pid.to_string(), |r| Key::count(r.pid.into())).at_least(7),
        Column::text("host", 7, 24, |r: &RankRow| r.host.clone()),
        Column::number(
            "job rank",
            9,
            |r: &RankRow| or_absent(r.job_rank, |v| v.to_string()),
            |r| Key::num(r.job_rank.map(f64::from)),
        ),
        Column::text("GPU", 10, 16, gpu),
    ];
    columns.extend(matrix(all));
    columns
}

/// Row waits for column: one character a rank of the communicator.
fn matrix<'a>(all: &[&RankRow]) -> Option<Column<'a, RankRow>> {
    if all.len() > MATRIX || all.iter().all(|r| r.waits_for.is_empty()) {
        return None;
    }
    let mut ids: Vec<Rank> = all.iter().flat_map(|r| r.waits_for.iter().copied().chain([r.rank])).collect();
    ids.sort_unstable();
    ids.dedup();
    if ids.len() > MATRIX {
        return None;
    }
    let gap = if ids.len() <= 16 { " " } else { "" };
    let digits = |power: u32| -> String {
        let digit = |r: &Rank| match r.0 / 10_u32.pow(power) {
            0 if power > 0 => " ".to_owned(),
            n => (n % 10).to_string(),
        };
        ids.iter().map(digit).collect::<Vec<_>>().join(gap)
    };
    let units = digits(0);
    // The heading is one line of digits; ranks above 9 need the tens over it.
    let tens = if ids.iter().any(|r| r.0 > 9) { digits(1) } else { String::new() };
    let room = units.len();
    let cell = move |r: &RankRow| {
        let mark = |id: &Rank| match id {
            id if r.waits_for.contains(id) => "X",
            id if *id == r.rank => "-",
            _ => ".",
        };
        ids.iter().map(mark).collect::<Vec<_>>().join(gap)
    };
    Some(Column::series(&units, 4, room, cell).at_least(room).over(tens))
}

fn details(ctx: &Ctx<'_>, r: &RankRow) -> Vec<Line<'static>> {
    let pairs = [
        ("rank", r.rank.to_string()),
        ("pid", r.pid.to_string()),
        ("host", r.host.clone()),
        ("job rank", or_absent(r.job_rank, |v| v.to_string())),
        ("GPU", r.gpu.clone().unwrap_or_else(|| ABSENT.to_owned())),
        ("issued", r.issued.to_string()),
        ("finished", r.finished.to_string()),
        ("worst late", or_absent(r.worst_late_ns, format::duration_ns)),
        ("late cost", or_absent(r.worst_late_ns.map(|_| r.late_cost_ns), format::duration_ns)),
        ("waits for", format::ranks(&r.waits_for)),
    ];
    table::details(ctx, &pairs, 3)
}
