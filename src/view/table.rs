//! Tables: columns measured by their content, dropped from the least important when room is short.

use super::page::{Ctx, fit, width};
use super::theme::{Role, Theme};
use ratatui::style::Style;
use ratatui::text::{Line, Span};
use std::cmp::Ordering;

/// How a cell stands in its column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Align {
    /// Text.
    Left,
    /// Numbers.
    Right,
    /// Series: the end is what counts, so the beginning is cut.
    Tail,
}

/// The value that a row is sorted by. Absent values come last, whichever way.
#[derive(Debug, Clone, PartialEq, PartialOrd)]
pub(super) enum Key {
    Num(f64),
    Text(String),
    Absent,
}

impl Key {
    pub(super) fn num(v: Option<f64>) -> Key {
        v.filter(|v| v.is_finite()).map_or(Key::Absent, Key::Num)
    }

    pub(super) fn count(v: u64) -> Key {
        Key::Num(v as f64)
    }
}

/// The column a table is sorted by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Sort {
    /// Index of the column.
    pub(super) column: usize,
    /// Against the column's natural direction, which is up for text and down for numbers.
    pub(super) reversed: bool,
}

type CellOf<'a, R> = Box<dyn Fn(&R) -> String + 'a>;
type KeyOf<'a, R> = Box<dyn Fn(&R) -> Key + 'a>;

/// One column.
pub(super) struct Column<'a, R> {
    pub(super) title: String,
    /// A line over the title, for headings of two lines.
    pub(super) over: String,
    align: Align,
    min: usize,
    max: usize,
    /// Columns of a greater number are dropped first; 0 stays.
    drop: u8,
    cell: CellOf<'a, R>,
    key: KeyOf<'a, R>,
}

impl<'a, R> Column<'a, R> {
    /// A column of text, sorted as text.
    pub(super) fn text(title: &str, drop: u8, max: usize, cell: impl Fn(&R) -> String + Clone + 'a) -> Self {
        let by = cell.clone();
        let key = move |r: &R| match by(r) {
            t if t == super::format::ABSENT => Key::Absent,
            t => Key::Text(t.to_lowercase()),
        };
        Self::new(title, Align::Left, drop, max, cell, key)
    }

    /// A column of numbers.
    pub(super) fn number(
        title: &str,
        drop: u8,
        cell: impl Fn(&R) -> String + 'a,
        key: impl Fn(&R) -> Key + 'a,
    ) -> Self {
        Self::new(title, Align::Right, drop, 16, cell, key)
    }

    /// A column that cannot be sorted by.
    pub(super) fn series(title: &str, drop: u8, max: usize, cell: impl Fn(&R) -> String + 'a) -> Self {
        Self::new(title, Align::Tail, drop, max, cell, |_| Key::Absent)
    }

    fn new(
        title: &str,
        align: Align,
        drop: u8,
        max: usize,
        cell: impl Fn(&R) -> String + 'a,
        key: impl Fn(&R) -> Key + 'a,
    ) -> Self {
        Column {
            title: title.to_owned(),
            over: String::new(),
            align,
            min: 0,
            max,
            drop,
            cell: Box::new(cell),
            key: Box::new(key),
        }
    }

    /// Never narrower than this, so that the columns stand still while the values change.
    pub(super) fn at_least(mut self, min: usize) -> Self {
        self.min = min;
        self
    }

    /// With a line over its title.
    pub(super) fn over(mut self, over: String) -> Self {
        self.over = over;
        self
    }
}

/// Sorts rows by a column; the order they came in decides between equals.
pub(super) fn sort<R>(columns: &[Column<'_, R>], rows: &mut Vec<&R>, sort: Option<Sort>) {
    let Some((column, sort)) = sort.and_then(|s| Some((columns.get(s.column)?, s))) else { return };
    let descending = descends(column, sort);
    let mut keyed: Vec<(Key, &R)> = rows.iter().map(|r| ((column.key)(r), *r)).collect();
    keyed.sort_by(|(a, _), (b, _)| match (a, b) {
        (Key::Absent, Key::Absent) => Ordering::Equal,
        (Key::Absent, _) => Ordering::Greater,
        (_, Key::Absent) => Ordering::Less,
        _ => {
            let up = a.partial_cmp(b).unwrap_or(Ordering::Equal);
            if descending { up.reverse() } else { up }
        }
    });
    *rows = keyed.into_iter().map(|(_, r)| r).collect();
}

fn descends<R>(column: &Column<'_, R>, sort: Sort) -> bool {
    (column.align == Align::Right) != sort.reversed
}

/// The words in the title of a sorted section.
pub(super) fn sort_words<R>(columns: &[Column<'_, R>], sort: Option<Sort>) -> String {
    match sort.and_then(|s| Some((columns.get(s.column)?, s))) {
        Some((c, s)) => {
            format!(", by {}, {}", c.title, if descends(c, s) { "descending" } else { "ascending" })
        }
        None => String::new(),
    }
}

/// A laid-out table: its heading and one line a row.
#[derive(Debug, Default)]
pub(super) struct Table {
    pub(super) head: Vec<Line<'static>>,
    pub(super) rows: Vec<Line<'static>>,
}

/// Lays rows out. One column at the left stays free for the mark of the selected row.
pub(super) fn layout<R>(
    ctx: &Ctx<'_>,
    columns: &[Column<'_, R>],
    rows: &[&R],
    sorted: Option<Sort>,
    selected: Option<usize>,
    role: impl Fn(&R) -> Role,
) -> Table {
    let titles: Vec<String> = columns
        .iter()
        .enumerate()
        .map(|(i, c)| match sorted.filter(|s| s.column == i) {
            Some(s) => format!("{}{}", c.title, ctx.theme.arrow(descends(c, s))),
            None => c.title.clone(),
        })
        .collect();
    let cells: Vec<Vec<String>> =
        rows.iter().map(|r| columns.iter().map(|c| (c.cell)(r)).collect()).collect();
    let mut widths: Vec<usize> = columns
        .iter()
        .enumerate()
        .map(|(i, c)| {
            let most = cells.iter().map(|row| width(&row[i])).max().unwrap_or(0);
            most.clamp(c.min, c.max.max(c.min)).max(width(&titles[i]))
        })
        .collect();
    // On narrow screens another column is worth more than air between them.
    let wanted = widths.iter().sum::<usize>() + 2 * columns.len();
    let gap = if ctx.width < 100 && wanted > ctx.width { 1 } else { 2 };
    drop_columns(columns, &mut widths, ctx.width.saturating_sub(1), gap);
    let shown: Vec<usize> = (0..columns.len()).filter(|&i| widths[i] > 0).collect();
    let compose = |text: &dyn Fn(usize) -> String| {
        let mut line = String::new();
        for &i in &shown {
            line.push_str(&" ".repeat(if line.is_empty() { 1 } else { gap }));
            line.push_str(&place(&text(i), widths[i], columns[i].align, ctx.theme));
        }
        fit(line.trim_end(), ctx.width, ctx.theme)
    };
    let mut head = Vec::new();
    if shown.iter().any(|&i| !columns[i].over.is_empty()) {
        head.push(Line::from(ctx.span(Role::Label, compose(&|i| columns[i].over.clone()))));
    }
    head.push(Line::from(ctx.span(Role::Label, compose(&|i| titles[i].clone()))));
    let lines = rows.iter().zip(&cells).enumerate().map(|(n, (row, cells))| {
        let text = compose(&|i| cells[i].clone());
        if selected == Some(n) {
            let pad = " ".repeat(ctx.width.saturating_sub(width(&text)));
            return Line::from(
                ctx.span(Role::Selected, format!("*{}{pad}", text.get(1..).unwrap_or_default())),
            );
        }
        Line::from(ctx.span(role(row), text))
    });
    Table { rows: lines.collect(), head }
}

/// Gives columns up until the rest fits; a dropped column has width 0.
fn drop_columns<R>(columns: &[Column<'_, R>], widths: &mut [usize], room: usize, gap: usize) {
    let wanted = widths.to_vec();
    while total(widths, gap) > room {
        let over = total(widths, gap) - room;
        let shown = (0..columns.len()).filter(|&i| widths[i] > 0);
        let Some(worst) = shown.max_by_key(|&i| columns[i].drop).filter(|&i| columns[i].drop > 0) else {
            // What must stay is cut instead: the widest text, or at last the line.
            let text = (0..columns.len()).filter(|&i| columns[i].align == Align::Left && widths[i] > 6);
            let Some(i) = text.max_by_key(|&i| widths[i]) else { return };
            widths[i] -= over.min(widths[i] - 6);
            continue;
        };
        // A series that loses a few values is better than none.
        let least = columns[worst].min.max(width(&columns[worst].title));
        let short = columns[worst].align == Align::Tail && widths[worst] >= least + over;
        widths[worst] = if short { widths[worst] - over } else { 0 };
    }
    // A wide column given up late may have made room for narrow ones given up before.
    let mut dropped: Vec<usize> = (0..columns.len()).filter(|&i| widths[i] == 0).collect();
    dropped.sort_by_key(|&i| columns[i].drop);
    for i in dropped {
        if total(widths, gap) + gap + wanted[i] <= room {
            widths[i] = wanted[i];
        }
    }
}

/// The columns of the screen that a table takes.
fn total(widths: &[usize], gap: usize) -> usize {
    let shown = widths.iter().filter(|w| **w > 0).count();
    widths.iter().sum::<usize>() + gap * shown.saturating_sub(1)
}

fn place(text: &str, room: usize, align: Align, theme: Theme) -> String {
    let text = if align == Align::Tail { tail(text, room) } else { fit(text, room, theme) };
    let pad = " ".repeat(room.saturating_sub(width(&text)));
    match align {
        Align::Left => text + &pad,
        Align::Right | Align::Tail => pad + &text,
    }
}

/// The last `room` characters; series hold one column a character.
fn tail(text: &str, room: usize) -> String {
    let skip = text.chars().count().saturating_sub(room);
    text.chars().skip(skip).collect()
}

/// Labels and values side by side, for the details of a selected row: `label value   label value`.
pub(super) fn details(ctx: &Ctx<'_>, pairs: &[(&str, String)], most: usize) -> Vec<Line<'static>> {
    let mut lines: Vec<Vec<Span<'static>>> = vec![Vec::new()];
    let mut used = 0;
    for (label, value) in pairs {
        let value = fit(value, ctx.width.saturating_sub(width(label) + 3), ctx.theme);
        let w = width(label) + 1 + width(&value);
        let gap = if used == 0 { 1 } else { 3 };
        if used > 0 && used + gap + w > ctx.width {
            if lines.len() == most {
                break;
            }
            lines.push(Vec::new());
            used = 0;
        }
        let gap = if used == 0 { 1 } else { 3 };
        if let Some(line) = lines.last_mut() {
            line.push(Span::raw(" ".repeat(gap)));
            line.push(ctx.span(Role::Dim, format!("{label} ")));
            line.push(Span::styled(value, Style::new()));
        }
        used += gap + w;
    }
    lines.into_iter().map(Line::from).collect()
}
