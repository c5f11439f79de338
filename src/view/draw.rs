//! A frame: header, tabs, the screen's page, footer.

use super::app::{App, Extent, Screen};
use super::filter::Filter;
use super::format;
use super::page::{Ctx, Page, fit, width};
use super::theme::Role;
use super::widgets;
use ratatui::Frame;
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::text::{Line, Span};
use std::collections::HashMap;

/// Smaller frames only say so: cut to less, the tables mislead.
const LEAST: (u16, u16) = (40, 10);

/// The surroundings of the page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Chrome {
    /// Header, tabs and footer.
    Full,
    /// The header alone: text has no keyboard.
    Text,
}

/// Draws one frame.
pub fn draw(frame: &mut Frame<'_>, app: &App) {
    let area = frame.area();
    paint(frame.buffer_mut(), area, app, Chrome::Full);
}

/// Calls `f` with what widgets look at.
pub(super) fn with_ctx<T>(app: &App, width: u16, f: impl FnOnce(&Ctx<'_>) -> T) -> T {
    let snap = &app.snapshot;
    let names: HashMap<_, _> = snap.comms.iter().filter_map(|c| Some((c.id, c.name.as_deref()?))).collect();
    let filter = Filter::new(&app.filter, &names);
    f(&Ctx { app, snap, theme: app.theme, names: &names, filter, width: usize::from(width) })
}

/// The height at which a frame of text holds everything the screen shows.
pub(super) fn text_height(app: &App, width: u16) -> u16 {
    let lines = with_ctx(app, width, |ctx| {
        let page = widgets::page(ctx, usize::MAX);
        header(ctx).len() + page.head.len() + page.body.len()
    });
    u16::try_from(lines).unwrap_or(u16::MAX)
}

pub(super) fn paint(buf: &mut Buffer, area: Rect, app: &App, chrome: Chrome) {
    let area = area.intersection(buf.area);
    if area.width < LEAST.0 || (area.height < LEAST.1 && chrome == Chrome::Full) {
        return too_small(buf, area);
    }
    with_ctx(app, area.width, |ctx| {
        let mut top = header(ctx);
        if chrome == Chrome::Full {
            top.push(tabs(ctx));
        }
        let used = put(buf, area, &top);
        let footer = u16::from(chrome == Chrome::Full);
        let body = Rect { y: area.y + used, height: area.height.saturating_sub(used + footer), ..area };
        let mut page = widgets::page(ctx, usize::from(body.height));
        if chrome == Chrome::Text {
            page.foot.clear();
            page.selected = None;
        }
        let place = put_page(buf, body, page, ctx);
        if chrome == Chrome::Full {
            let last = Rect { y: area.bottom() - 1, height: 1, ..area };
            put(buf, last, &[foot_line(ctx, &place)]);
            if app.help {
                widgets::help::overlay(buf, area, ctx);
            }
        }
    });
}

fn too_small(buf: &mut Buffer, area: Rect) {
    let text = format!("too small: {}x{} needs {}x{}", area.width, area.height, LEAST.0, LEAST.1);
    put(buf, area, &[Line::raw(text)]);
}

/// Writes lines from the top of an area and says how many there was room for.
fn put(buf: &mut Buffer, area: Rect, lines: &[Line<'_>]) -> u16 {
    let mut used = 0;
    for (y, line) in (area.y..area.bottom()).zip(lines) {
        buf.set_line(area.x, y, line, area.width);
        used += 1;
    }
    used
}

/// Writes a page and returns which part of its body is seen, in words; empty if all of it is.
fn put_page(buf: &mut Buffer, area: Rect, page: Page, ctx: &Ctx<'_>) -> String {
    let used = put(buf, area, &page.head);
    let mut room = Rect { y: area.y + used, height: area.height - used, ..area };
    let foot = u16::try_from(page.foot.len()).unwrap_or(u16::MAX);
    // The details of a row must not take the place of the rows.
    if foot > 0 && room.height >= foot.saturating_add(4) {
        room.height -= foot;
        put(buf, Rect { y: room.bottom(), height: foot, ..area }, &page.foot);
    }
    let (rows, len) = (usize::from(room.height), page.body.len());
    let hidden = len.saturating_sub(rows);
    let natural = if page.selected.is_some() { len.saturating_sub(1) } else { hidden };
    let last = page.last.unwrap_or(natural);
    ctx.app.extent.set(Extent { page: rows.max(1), last });
    let first = match page.selected {
        Some(row) => row.saturating_sub(rows / 2).min(hidden),
        None => ctx.app.position().min(last).min(hidden),
    };
    put(buf, room, page.body.get(first..).unwrap_or_default());
    if hidden == 0 || rows == 0 {
        return String::new();
    }
    format!("lines {}-{} of {len}", first + 1, (first + rows).min(len))
}

fn header(ctx: &Ctx<'_>) -> Vec<Line<'static>> {
    let snap = ctx.snap;
    let mut right = Vec::new();
    if ctx.app.paused {
        let age = format!("PAUSED, {} old", format::duration_ns(ctx.app.behind_ns()));
        right.push(ctx.span(Role::Bad, age));
    }
    right.push(match &snap.wall {
        Some(wall) => ctx.span(Role::Label, format!("{} UTC", fit(wall, 24, ctx.theme))),
        None => ctx.span(Role::Dim, "no wall time"),
    });
    if !snap.unread.is_empty() {
        right.push(ctx.span(Role::Bad, format!("not read: {}", snap.unread.len())));
    }
    let lost = snap.fleet.as_ref().map_or_else(|| snap.lost(), |f| f.totals.lost);
    let role = if lost > 0 { Role::Warn } else { Role::Plain };
    right.push(ctx.span(role, format!("lost: {}", format::count(lost))));
    let right_width = right.iter().map(Span::width).sum::<usize>() + 2 * right.len();
    let name = "ringwatch";
    let room = ctx.width.saturating_sub(name.len() + 3 + right_width);
    let source = fit(&snap.source, room, ctx.theme);
    let gap = room.saturating_sub(width(&source));
    let mut first = vec![
        Span::raw(" "),
        ctx.span(Role::Title, name),
        Span::raw("  "),
        ctx.span(Role::Plain, source),
        Span::raw(" ".repeat(gap)),
    ];
    for span in right {
        first.extend([Span::raw("  "), span]);
    }
    vec![Line::from(first), status(ctx)]
}

/// The state of the whole in one line; what does not fit is left out from the end.
fn status(ctx: &Ctx<'_>) -> Line<'static> {
    let snap = ctx.snap;
    let jobs = &snap.jobs;
    // Of a cluster only one node's processes are listed.
    let (alive, gone) = match &snap.fleet {
        Some(_) => (jobs.iter().map(|j| j.alive).sum(), jobs.iter().map(|j| j.gone).sum()),
        None => {
            let alive = snap.segments.iter().filter(|s| s.alive).count();
            (alive, snap.segments.len() - alive)
        }
    };
    let rest = snap.fleet.as_ref().map(|f| f.rest.clone()).unwrap_or_default();
    let rate = jobs.iter().filter_map(|j| j.ops_per_s).reduce(|a, b| a + b);
    // The mean over jobs, each by its processes; jobs without a share have no say.
    let (mut sum, mut weight) = (0.0, 0.0);
    for job in jobs {
        if let Some(share) = job.comm_share {
            let n = (job.alive + job.gone).max(1) as f64;
            sum += share * n;
            weight += n;
        }
    }
    let share = (weight > 0.0).then(|| format::share(sum / weight));
    let job = match jobs.as_slice() {
        [only] => {
            format!("job {}", fit(only.name.as_deref().unwrap_or(format::ABSENT), 24, ctx.theme))
        }
        many => format::plural(many.len(), "job"),
    };
    let mut parts = vec![
        job,
        format!("{alive} alive, {gone} gone"),
        format!("{} ops/s", format::or_absent(rate, format::rate)),
        format!("communicating {}", share.unwrap_or_else(|| format::ABSENT.to_owned())),
        format!("in flight {}", snap.in_flight.len() + rest.in_flight),
        format::plural(snap.comms.len() + rest.comms, "communicator"),
    ];
    if let Some(nccl) = jobs.first().filter(|_| jobs.len() == 1).and_then(|j| j.nccl.as_ref()) {
        parts.push(format!("NCCL {nccl}"));
    }
    let mut line = String::new();
    for part in parts {
        let gap = if line.is_empty() { 1 } else { 3 };
        if width(&line) + gap + width(&part) > ctx.width {
            break;
        }
        line.push_str(&" ".repeat(gap));
        line.push_str(&part);
    }
    Line::from(ctx.span(Role::Plain, line))
}

fn tabs(ctx: &Ctx<'_>) -> Line<'static> {
    let open = ctx.snap.findings.iter().filter(|f| f.open).count();
    let mut spans = Vec::new();
    let mut used = 0;
    for screen in ctx.app.screens().iter().copied() {
        let mut label = format!("{} {}", screen.index(), screen.title());
        if screen == Screen::Findings && open > 0 {
            label.push_str(&format!(" ({open} open)"));
        }
        let shown = screen == ctx.app.screen;
        let text = if shown { format!("[{label}]") } else { format!(" {label} ") };
        used += width(&text);
        if used > ctx.width {
            break;
        }
        spans.push(ctx.span(if shown { Role::Selected } else { Role::Plain }, text));
    }
    Line::from(spans)
}

fn foot_line(ctx: &Ctx<'_>, place: &str) -> Line<'static> {
    let app = ctx.app;
    let room = ctx.width.saturating_sub(width(place) + 2);
    let (role, text) = if app.editing {
        (Role::Label, format!(" filter: {}_   Enter keeps it, Esc clears it", app.filter))
    } else if !app.filter.is_empty() {
        (Role::Warn, format!(" filter: {}   Esc clears it   ? help  q quit", app.filter))
    } else {
        let cluster = ctx.snap.fleet.is_some();
        let own = match app.screen {
            Screen::Cluster => "  Enter in",
            Screen::Overview | Screen::Findings => "",
            Screen::Collectives | Screen::Losses => "  s/S sort",
            Screen::Ranks if cluster => "  s/S sort",
            Screen::Ranks => "  s/S sort  </> communicator",
        };
        let (first, out) = if cluster { (0, "  Backspace out") } else { (1, "  p pause") };
        (Role::Dim, format!(" ? help  {first}-5 screens  / filter{own}{out}  q quit"))
    };
    let text = fit(&text, room, ctx.theme);
    let gap = " ".repeat(room.saturating_sub(width(&text)) + 1);
    Line::from(vec![ctx.span(role, text), Span::raw(gap), ctx.span(Role::Dim, place)])
}
