//! Operations in flight: how long, and how far each rank is.

use crate::model::{FlightRow, OpState, RankCell};
use crate::view::format;
use crate::view::page::{Ctx, fit, width};
use crate::view::theme::Role;
use ratatui::text::{Line, Span};

/// Communicators up to this size show one mark a rank, larger ones runs of equal marks.
const CELLS: usize = 64;

/// The states, the furthest first, in the order in which they are counted.
const STATES: [OpState; 7] = [
    OpState::Finished,
    OpState::Progressing,
    OpState::Started,
    OpState::Issued,
    OpState::Called,
    OpState::NotIssued,
    OpState::InDoubt,
];

/// The meaning of the marks.
pub(super) fn legend(ctx: &Ctx<'_>) -> Line<'static> {
    // The rarest one has no room on a narrow screen; the help names it.
    let shown = |s: &&OpState| **s != OpState::Progressing || ctx.width >= 100;
    let words: Vec<String> =
        STATES.iter().filter(shown).map(|s| format!("{} {}", s.mark(), s.as_str())).collect();
    ctx.line(Role::Dim, format!(" by rank:  {}", words.join("  ")))
}

/// One operation: a line of its own and its ranks, on the same line where they fit.
pub(super) fn item(ctx: &Ctx<'_>, f: &FlightRow) -> Vec<Line<'static>> {
    let size = format::or_absent(f.bytes, crate::model::size_text);
    let mut operation = format!(
        " {:>8}  {:<13}  {:>8}  {:<11}  {:<8}  ",
        format::duration_ns(f.age_ns),
        f.func,
        size,
        format::algo_proto(f.algo, f.proto),
        format::order(f.lane, f.order),
    );
    // A name cut off says less than none: the identity leads to it in the table of communicators.
    let comm = ctx.comm(f.comm);
    let named = width(&operation) + width(&comm) <= ctx.width;
    operation.push_str(&if named { comm } else { f.comm.to_string() });
    let role = if f.ranks.iter().any(|r| r.state == OpState::NotIssued) { Role::Warn } else { Role::Plain };
    let (marks, counts) = (marks(ctx, &f.ranks), counts(&f.ranks));
    let marks_width = marks.iter().map(Span::width).sum::<usize>();
    let together = width(&operation) + 2 + marks_width + 2 + width(&counts);
    if together <= ctx.width {
        let mut spans = vec![ctx.span(role, operation), Span::raw("  ")];
        spans.extend(marks);
        spans.extend([Span::raw("  "), ctx.span(role, counts)]);
        return vec![Line::from(spans)];
    }
    let indent = " ".repeat(11);
    let first = ctx.line(role, operation);
    if indent.len() + marks_width + 2 + width(&counts) <= ctx.width {
        let mut spans = vec![Span::raw(indent)];
        spans.extend(marks);
        spans.extend([Span::raw("  "), ctx.span(role, counts)]);
        return vec![first, Line::from(spans)];
    }
    let mut second = vec![Span::raw(indent.clone())];
    second.extend(marks);
    vec![first, ctx.line(role, format!("{indent}{counts}")), cut(ctx, second)]
}

/// `3 started, 1 not issued (rank 3)`.
fn counts(ranks: &[RankCell]) -> String {
    let mut parts = Vec::new();
    for state in STATES {
        let of: Vec<_> = ranks.iter().filter(|r| r.state == state).map(|r| r.rank).collect();
        if of.is_empty() {
            continue;
        }
        let mut part = format!("{} {}", of.len(), state.as_str());
        // The few that lag are what one looks for; the many are seen from the marks.
        let lagging = matches!(state, OpState::Called | OpState::NotIssued | OpState::InDoubt);
        if lagging && of.len() < ranks.len() {
            let list = format::ranks(&of);
            if list.len() <= 24 {
                let plural = if of.len() == 1 { "rank" } else { "ranks" };
                part.push_str(&format!(" ({plural} {list})"));
            }
        }
        parts.push(part);
    }
    if parts.is_empty() { "no rank seen".to_owned() } else { parts.join(", ") }
}

fn marks(ctx: &Ctx<'_>, ranks: &[RankCell]) -> Vec<Span<'static>> {
    if ranks.len() > CELLS {
        return runs(ctx, ranks);
    }
    let mut spans: Vec<Span<'static>> = Vec::new();
    for (i, cell) in ranks.iter().enumerate() {
        // Groups of eight, as GPUs stand in nodes, so that a rank can be counted off.
        let gap = if i > 0 && i % 8 == 0 { " " } else { "" };
        spans.push(ctx.span(role(cell.state), format!("{gap}{}", cell.state.mark())));
    }
    spans
}

/// Equal neighbours as one: `> 0-511  ! 512  > 513-999`.
fn runs(ctx: &Ctx<'_>, ranks: &[RankCell]) -> Vec<Span<'static>> {
    ranks
        .chunk_by(|a, b| a.state == b.state && b.rank.0.checked_sub(1) == Some(a.rank.0))
        .take(256) // More than any line holds.
        .enumerate()
        .map(|(i, run)| {
            let of: Vec<_> = run.iter().map(|c| c.rank).collect();
            let gap = if i > 0 { "  " } else { "" };
            let state = run[0].state;
            ctx.span(role(state), format!("{gap}{} {}", state.mark(), format::ranks(&of)))
        })
        .collect()
}

fn role(state: OpState) -> Role {
    match state {
        OpState::NotIssued => Role::Bad,
        OpState::Called | OpState::InDoubt => Role::Warn,
        OpState::Issued => Role::Plain,
        OpState::Started | OpState::Progressing => Role::Busy,
        OpState::Finished => Role::Dim,
    }
}

/// Spans cut to the width of the page, with an ellipsis where they were cut.
fn cut(ctx: &Ctx<'_>, spans: Vec<Span<'static>>) -> Line<'static> {
    let mut room = ctx.width;
    let mut kept = Vec::new();
    for span in spans {
        let w = span.width();
        // The last column is kept for the ellipsis.
        if w >= room {
            kept.push(Span::styled(fit(&format!("{} ", span.content), room, ctx.theme), span.style));
            break;
        }
        room -= w;
        kept.push(span);
    }
    Line::from(kept)
}
