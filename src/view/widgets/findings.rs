//! Findings: the banner of the overview and the full list.

use crate::model::Finding;
use crate::view::format;
use crate::view::page::{Ctx, Page, fit, width, wrap};
use crate::view::theme::Role;
use ratatui::text::{Line, Span};

/// Findings that the filter keeps, open ones first.
pub(super) fn rows<'a>(ctx: &Ctx<'a>) -> Vec<&'a Finding> {
    let mut rows: Vec<&Finding> = ctx.snap.findings.iter().filter(|f| ctx.filter.finding(f)).collect();
    rows.sort_by_key(|f| !f.open);
    rows
}

/// `Findings (1 open, 2 over)`.
pub(super) fn title(ctx: &Ctx<'_>) -> String {
    let all = ctx.snap.findings.len();
    let open = ctx.snap.findings.iter().filter(|f| f.open).count();
    match all {
        0 => "Findings".to_owned(),
        _ => format!("Findings ({open} open, {} over)", all - open),
    }
}

/// One finding in the few lines a glance takes in.
pub(super) fn brief(ctx: &Ctx<'_>, f: &Finding) -> Vec<Line<'static>> {
    let mut lines = vec![headline(ctx, f)];
    let since = f.since.as_deref().map(|s| format!(", since {}", time_of_day(s))).unwrap_or_default();
    let about = match &f.place {
        Some(_) => {
            format!("used by {} ranks", format::count(f.victims.iter().map(|v| v.ranks.len() as u64).sum()))
        }
        None => format!("communicator {}", ctx.comm(f.communicator)),
    };
    lines.push(ctx.line(Role::Plain, format!("   {about}{since}")));
    if let Some(first) = f.evidence.first() {
        lines.extend(paragraph(ctx, "evidence", &first.text, Role::Plain, 2));
    }
    lines.extend(paragraph(ctx, "advice", &f.advice, Role::Plain, 2));
    lines
}

/// The screen of all findings with all they rest on.
pub(super) fn page(ctx: &Ctx<'_>) -> Page {
    let rows = rows(ctx);
    let all = ctx.snap.findings.len();
    let kept = if ctx.filter.is_empty() { String::new() } else { ctx.filter.tally(rows.len(), all) };
    let mut page = Page { head: vec![ctx.rule(&title(ctx), &kept)], ..Page::default() };
    for f in &rows {
        if !page.body.is_empty() {
            page.body.push(Line::default());
        }
        page.body.extend(full(ctx, f));
    }
    if rows.is_empty() {
        page.body.push(super::nothing(ctx, "no findings", all));
    }
    page
}

fn full(ctx: &Ctx<'_>, f: &Finding) -> Vec<Line<'static>> {
    let op = &f.operation;
    let mut lines = vec![headline(ctx, f)];
    let mut field = |label: &str, value: &str| {
        lines.extend(paragraph(ctx, label, value, Role::Plain, usize::MAX));
    };
    let known = |v: &Option<String>| v.clone().unwrap_or_else(|| format::ABSENT.to_owned());
    let size = op.bytes.map_or_else(|| format::ABSENT.to_owned(), |b| format!("{b} bytes"));
    let how = format!("{}/{}", known(&op.algo), known(&op.proto));
    let redop = op.redop.as_ref().map_or_else(String::new, |r| format!(", {r}"));
    field(
        "operation",
        &format!("{}, {size}, order {}, {how}, {}{redop}", op.func, op.order, known(&op.dtype)),
    );
    field("communicator", &ctx.comm(f.communicator));
    field("since", &known(&f.since));
    let room = ctx.width.saturating_sub(17 + 12);
    for (i, e) in f.evidence.iter().enumerate() {
        let label = if i == 0 { "evidence" } else { "" };
        let number = fit(&format::evidence(e.value, e.unit.as_deref()), 10, ctx.theme);
        for (j, text) in wrap(&e.text, room).into_iter().enumerate() {
            let (label, number) = if j == 0 { (label, number.as_str()) } else { ("", "") };
            let pad = " ".repeat(10_usize.saturating_sub(width(number)));
            lines.push(Line::from(vec![
                ctx.span(Role::Label, format!("   {label:<14}")),
                ctx.span(Role::Label, format!("{pad}{number}")),
                ctx.span(Role::Plain, format!("  {text}")),
            ]));
        }
    }
    lines.extend(paragraph(ctx, "advice", &f.advice, Role::Plain, usize::MAX));
    lines
}

/// `! missing-rank  rank 3  AllReduce 16 MiB  #5, open for 12.4 s`.
pub(super) fn headline(ctx: &Ctx<'_>, f: &Finding) -> Line<'static> {
    let ranks = match f.ranks.len() {
        1 => format!("rank {}", format::ranks(&f.ranks)),
        _ => format!("ranks {}", fit(&format::ranks(&f.ranks), 24, ctx.theme)),
    };
    let age = format::duration_ns(ctx.snap.at_ns.saturating_sub(f.since_ns));
    let (mark, role, state) = match f.open {
        true if f.severity.is_alarm() => ('!', Role::Bad, format!("open for {age}")),
        true => ('i', Role::Plain, format!("open for {age}")),
        false => (' ', Role::Dim, format!("over, began {age} ago")),
    };
    let size = f.operation.bytes.map_or_else(String::new, |b| format!(" of {}", crate::model::size_text(b)));
    let what = match &f.place {
        Some(place) => place.to_string(),
        None => format!("{ranks} in {}{size} #{}", f.operation.func, f.operation.order),
    };
    let left = format!(" {mark} {}: {what}", f.kind.as_str());
    let left = fit(&left, ctx.width.saturating_sub(width(&state) + 3), ctx.theme);
    let gap = ctx.width.saturating_sub(width(&left) + width(&state) + 1);
    Line::from(vec![ctx.span(role, left), Span::raw(" ".repeat(gap)), ctx.span(role, state)])
}

/// A labelled text, wrapped under itself and cut after `most` lines.
fn paragraph(ctx: &Ctx<'_>, label: &str, text: &str, role: Role, most: usize) -> Vec<Line<'static>> {
    let room = ctx.width.saturating_sub(17 + 1);
    let mut parts = wrap(text, room);
    if parts.len() > most {
        let rest = parts.split_off(most.saturating_sub(1)).join(" ");
        parts.push(fit(&rest, room, ctx.theme));
    }
    let line = |(i, part): (usize, String)| {
        let label = if i == 0 { label } else { "" };
        Line::from(vec![ctx.span(Role::Label, format!("   {label:<14}")), ctx.span(role, part)])
    };
    parts.into_iter().enumerate().map(line).collect()
}

/// `12:34:56` of an RFC 3339 time; the whole text if it is none.
fn time_of_day(since: &str) -> &str {
    match since.split_once('T') {
        Some((_, time)) if since.ends_with('Z') => time.split_once(['.', 'Z']).map_or(since, |(hms, _)| hms),
        _ => since,
    }
}
