//! Classes of operations: how many, how fast, how wide.

use crate::model::{Algo, ClassRow, Proto};
use crate::view::format::{self, or_absent};
use crate::view::page::{Ctx, Page};
use crate::view::table::{self, Column, Key, Sort, Table};
use crate::view::theme::Role;

/// All columns but the series.
pub(super) const SORTABLE: usize = 11;

/// The widest series shown: one minute.
const SECONDS: usize = 60;

pub(super) fn page(ctx: &Ctx<'_>) -> Page {
    let columns = columns(ctx);
    let sort = ctx.app.sort();
    let mut rows: Vec<&ClassRow> = ctx.snap.classes.iter().filter(|c| ctx.filter.class(c)).collect();
    table::sort(&columns, &mut rows, sort);
    let selected = (!rows.is_empty()).then(|| ctx.app.position().min(rows.len() - 1));
    let laid = table::layout(ctx, &columns, &rows, sort, selected, |_| Role::Plain);
    let title = format!("Collectives ({})", ctx.filter.tally(rows.len(), ctx.snap.classes.len()));
    let by = match sort {
        Some(_) => table::sort_words(&columns, sort).trim_start_matches(", ").to_owned(),
        None => "by share of time".to_owned(),
    };
    let mut page = Page { head: vec![ctx.rule(&title, &by)], selected, ..Page::default() };
    page.head.extend(laid.head);
    page.body = laid.rows;
    if let Some(row) = selected.and_then(|i| rows.get(i)) {
        page.foot.push(ctx.rule("Selected", ""));
        page.foot.extend(details(ctx, row));
    } else {
        page.body.push(super::nothing(ctx, "no operations seen yet", ctx.snap.classes.len()));
    }
    page
}

/// The table alone, as the overview shows it: in the order of the data.
pub(super) fn table(ctx: &Ctx<'_>, rows: &[&ClassRow]) -> Table {
    table::layout(ctx, &columns(ctx), rows, None::<Sort>, None, |_| Role::Plain)
}

fn columns<'a>(ctx: &'a Ctx<'_>) -> Vec<Column<'a, ClassRow>> {
    let algo_proto = |c: &ClassRow| format::algo_proto(c.algo, c.proto);
    vec![
        Column::text("operation", 0, 14, |c: &ClassRow| c.func.to_string()).at_least(9),
        Column::number(
            "size",
            0,
            |c: &ClassRow| or_absent(c.size_class, format::size_class),
            |c| Key::num(c.size_class.map(f64::from)),
        )
        .at_least(7),
        Column::text("algo/proto", 1, 21, algo_proto).at_least(10),
        Column::number("count", 5, |c: &ClassRow| format::count(c.count), |c| Key::count(c.count))
            .at_least(6),
        Column::number(
            "ops/s",
            3,
            |c: &ClassRow| or_absent(c.ops_per_s, format::rate),
            |c| Key::num(c.ops_per_s),
        )
        .at_least(6),
        Column::number(
            "bytes/s",
            6,
            |c: &ClassRow| or_absent(c.bytes_per_s, format::bandwidth),
            |c| Key::num(c.bytes_per_s),
        )
        .at_least(10),
        Column::number(
            "p50",
            0,
            |c: &ClassRow| or_absent(c.p50_ns, format::duration),
            |c| Key::num(c.p50_ns),
        )
        .at_least(8),
        Column::number(
            "p99",
            4,
            |c: &ClassRow| or_absent(c.p99_ns, format::duration),
            |c| Key::num(c.p99_ns),
        )
        .at_least(8),
        Column::number(
            "busbw",
            0,
            |c: &ClassRow| or_absent(c.busbw, format::bandwidth),
            |c| Key::num(c.busbw),
        )
        .at_least(10),
        Column::number("share", 2, |c: &ClassRow| or_absent(c.share, format::share), |c| Key::num(c.share)),
        Column::text("communicator", 8, 32, |c: &ClassRow| ctx.comm(c.comm)),
        Column::series("last seconds", 7, SECONDS, |c: &ClassRow| ctx.theme.spark(&c.spark)),
    ]
}

fn details(ctx: &Ctx<'_>, c: &ClassRow) -> Vec<ratatui::text::Line<'static>> {
    let size = match c.size_class {
        Some(class) if class < 63 => {
            format!("{} to {}", format::size_class(class), format::size_class(class + 1))
        }
        other => or_absent(other, format::size_class),
    };
    let pairs = [
        ("operation", format!("{} of {size}", c.func)),
        ("algorithm", c.algo.map_or(format::ABSENT, Algo::as_str).to_owned()),
        ("protocol", c.proto.map_or(format::ABSENT, Proto::as_str).to_owned()),
        ("communicator", ctx.comm(c.comm)),
        ("timed", format!("{} of {}{}", c.timed, c.count, if c.sampled { " sampled" } else { "" })),
        ("rate", or_absent(c.ops_per_s, |v| format!("{} ops/s", format::rate(v)))),
        ("bytes", or_absent(c.bytes_per_s, format::bandwidth)),
        (
            "last seconds",
            ctx.theme.spark(c.spark.get(c.spark.len().saturating_sub(SECONDS)..).unwrap_or_default()),
        ),
    ];
    table::details(ctx, &pairs, 4)
}
