//! The help, drawn over whatever is shown.

use crate::model::OpState;
use crate::view::page::{Ctx, fit, width};
use crate::view::theme::Role;
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::text::Line;
use ratatui::widgets::{Clear, Widget};

const KEYS: [(&str, &str); 12] = [
    ("1-5, Tab, Shift-Tab", "screens; 0 is a whole cluster's"),
    ("Enter, Backspace", "into a job, node or communicator, and out"),
    ("Up Down j k", "select a row or scroll"),
    ("PgUp PgDn, g G", "a page, the first and the last line"),
    ("Left Right h l", "communicator of the ranks screen"),
    ("s, S", "sort by the next column, the other way round"),
    ("/", "filter by words; Enter keeps, Esc clears it"),
    ("p, Space", "pause and go on"),
    ("?", "this help"),
    ("Esc", "close the help, clear the filter"),
    ("Ctrl-L, Ctrl-Z", "draw again, suspend"),
    ("q, Ctrl-C", "quit"),
];

/// Draws the help in the middle of the area.
pub(in crate::view) fn overlay(buf: &mut Buffer, area: Rect, ctx: &Ctx<'_>) {
    let lines = lines(ctx);
    let inner = lines.iter().map(Line::width).max().unwrap_or(0);
    let w = u16::try_from(inner + 4).unwrap_or(u16::MAX).min(area.width);
    let h = u16::try_from(lines.len() + 2).unwrap_or(u16::MAX).min(area.height);
    let frame =
        Rect { x: area.x + (area.width - w) / 2, y: area.y + (area.height - h) / 2, width: w, height: h };
    Clear.render(frame, buf);
    border(buf, frame, ctx);
    for (y, line) in (frame.y + 1..frame.bottom().saturating_sub(1)).zip(&lines) {
        buf.set_line(frame.x + 2, y, line, frame.width.saturating_sub(4));
    }
}

fn lines(ctx: &Ctx<'_>) -> Vec<Line<'static>> {
    let text = |role, t: &str| Line::from(ctx.span(role, t));
    let mut lines = Vec::new();
    for (keys, what) in KEYS {
        lines.push(Line::from(vec![
            ctx.span(Role::Label, format!("{keys:<21}")),
            ctx.span(Role::Plain, what),
        ]));
    }
    let state = |s: OpState| format!("{} {}", s.mark(), s.as_str());
    let marks = [
        OpState::NotIssued,
        OpState::Called,
        OpState::Issued,
        OpState::Started,
        OpState::Finished,
        OpState::InDoubt,
    ];
    lines.push(Line::default());
    lines.push(text(Role::Label, "What a rank has done with an operation"));
    lines.push(text(Role::Plain, &marks.map(state).join("  ")));
    lines.push(Line::default());
    lines.push(text(Role::Plain, "-  not known, which is never 0        *  the selected row"));
    lines.push(text(Role::Plain, "X  the row's rank waits for the column's   ~  started, on the network"));
    lines.push(text(Role::Plain, "NO_COLOR and RINGWATCH_ASCII are honoured."));
    lines
}

fn border(buf: &mut Buffer, area: Rect, ctx: &Ctx<'_>) {
    let (corners, side) =
        if ctx.theme.ascii { (["+", "+", "+", "+"], "|") } else { (["┌", "┐", "└", "┘"], "│") };
    let room = usize::from(area.width).saturating_sub(2);
    let title = fit(" Help ", room, ctx.theme);
    let rest = ctx.theme.rule().repeat(room.saturating_sub(width(&title)));
    let style = ctx.theme.style(Role::Title);
    let top = format!("{}{title}{rest}{}", corners[0], corners[1]);
    let bottom = format!("{}{}{}", corners[2], ctx.theme.rule().repeat(room), corners[3]);
    for y in area.y..area.bottom() {
        buf.set_string(area.x, y, side, style);
        buf.set_string(area.right().saturating_sub(1), y, side, style);
    }
    buf.set_string(area.x, area.y, top, style);
    buf.set_string(area.x, area.bottom().saturating_sub(1), bottom, style);
}
