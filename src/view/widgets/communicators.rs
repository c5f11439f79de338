//! Jobs and communicators, as the overview shows them.

use crate::model::{CommRow, JobRow};
use crate::view::format::{self, ABSENT, or_absent};
use crate::view::page::Ctx;
use crate::view::table::{self, Column, Key, Table};
use crate::view::theme::Role;

pub(super) fn jobs(ctx: &Ctx<'_>, rows: &[&JobRow], selected: Option<usize>) -> Table {
    let text = |v: &Option<String>| v.clone().unwrap_or_else(|| ABSENT.to_owned());
    let columns = [
        Column::text("job", 0, 40, move |j: &JobRow| text(&j.name)).at_least(12),
        number("alive", 0, |j: &JobRow| j.alive.to_string()),
        number("gone", 0, |j: &JobRow| j.gone.to_string()),
        number("size", 1, |j: &JobRow| or_absent(j.size, |n| n.to_string())),
        number("comms", 2, |j: &JobRow| j.comms.to_string()),
        number("ops/s", 0, |j: &JobRow| or_absent(j.ops_per_s, format::rate)).at_least(7),
        number("communicating", 0, |j: &JobRow| or_absent(j.comm_share, format::share)),
        Column::text("NCCL", 3, 16, move |j: &JobRow| text(&j.nccl)),
    ];
    table::layout(ctx, &columns, rows, None, selected, |j| if j.gone > 0 { Role::Warn } else { Role::Plain })
}

pub(super) fn communicators(ctx: &Ctx<'_>, rows: &[&CommRow], selected: Option<usize>) -> Table {
    let columns = [
        Column::text("communicator", 0, 16, |c: &CommRow| c.id.to_string()),
        Column::text("name", 1, 32, |c: &CommRow| c.name.clone().unwrap_or_else(|| ABSENT.to_owned()))
            .at_least(8),
        number("ranks", 0, |c: &CommRow| match c.ranks {
            Some(n) => format!("{}/{n}", c.seen),
            None => format!("{}/{ABSENT}", c.seen),
        }),
        number("nodes", 4, |c: &CommRow| or_absent(c.nodes, |n| n.to_string())),
        number("issued", 0, |c: &CommRow| format::count(c.issued)).at_least(6),
        number("finished", 0, |c: &CommRow| format::count(c.finished)),
        number("in flight", 2, |c: &CommRow| c.in_flight.to_string()),
        number("ops/s", 3, |c: &CommRow| or_absent(c.ops_per_s, format::rate)).at_least(6),
        number("timed", 3, |c: &CommRow| or_absent(c.coverage.share(), format::share)),
        Column::text("state", 5, 6, |c: &CommRow| if c.closed { "closed" } else { "open" }.to_owned()),
    ];
    table::layout(ctx, &columns, rows, None, selected, |c| if c.closed { Role::Dim } else { Role::Plain })
}

/// A column of a table that is never sorted.
fn number<'a, R>(title: &str, drop: u8, cell: impl Fn(&R) -> String + 'a) -> Column<'a, R> {
    Column::number(title, drop, cell, |_| Key::Absent)
}
