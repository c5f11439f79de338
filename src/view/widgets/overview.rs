//! Everything at a glance, fitted to the height there is.

use super::{collectives, communicators, findings, flight, losses};
use crate::model::Snapshot;
use crate::view::format;
use crate::view::page::{Ctx, Page, wrap};
use crate::view::table::Table;
use crate::view::theme::Role;
use ratatui::text::Line;

/// A part of the overview that can be shown in more or fewer lines.
struct Section {
    rule: Line<'static>,
    head: Vec<Line<'static>>,
    /// Items of one or several lines, the most important first.
    items: Vec<Vec<Line<'static>>>,
    /// The name of one item, and the key of the screen that has them all.
    noun: (&'static str, &'static str),
    /// Lines it gets before others get more than their least.
    least: usize,
    /// Lines it gets before others get all they want.
    fair: usize,
}

impl Section {
    fn wants(&self) -> usize {
        self.items.iter().map(Vec::len).sum()
    }

    /// Its items in at most `room` lines; what is left out is counted.
    fn lines(self, ctx: &Ctx<'_>, room: usize) -> Vec<Line<'static>> {
        let mut lines = vec![self.rule];
        lines.extend(self.head);
        let all: usize = self.items.iter().map(Vec::len).sum();
        if all <= room {
            lines.extend(self.items.into_iter().flatten());
            return lines;
        }
        if room == 1 {
            // The heading has the count, so the one line goes to the first item.
            lines.extend(self.items.into_iter().flatten().take(1));
            return lines;
        }
        let (mut used, mut kept, count) = (0, 0, self.items.len());
        for item in self.items {
            // One line is kept for the count, unless the item is the last and fits.
            if used + item.len() + 1 > room && !(kept == 0 && count == 1) {
                if kept == 0 {
                    lines.extend(item.into_iter().take(room.saturating_sub(1)));
                    kept = 1;
                }
                break;
            }
            used += item.len();
            lines.extend(item.into_iter().take(room));
            kept += 1;
        }
        if kept < count && room > 0 {
            let (noun, key) = self.noun;
            let more = format::plural(count - kept, &format!("more {noun}"));
            lines.push(ctx.line(Role::Dim, format!(" {} {more} ({key})", ctx.theme.ellipsis())));
        }
        lines
    }
}

pub(super) fn page(ctx: &Ctx<'_>, height: usize) -> Page {
    if is_empty(ctx.snap) {
        return Page { body: newcomer(ctx), ..Page::default() };
    }
    let sections = sections(ctx);
    let total: usize = sections.iter().map(|s| 1 + s.head.len() + s.wants()).sum();
    let whole = total <= height;
    // At its top the overview is fitted to the screen; scrolled, it is the whole text.
    let fitted = ctx.app.position() == 0 && !whole;
    let rooms = if fitted { share_out(&sections, height) } else { vec![Some(usize::MAX); sections.len()] };
    let body = sections.into_iter().zip(rooms).filter_map(|(s, room)| Some(s.lines(ctx, room?))).flatten();
    let last = Some(total.saturating_sub(height));
    Page { body: body.collect(), last, ..Page::default() }
}

/// How many lines each section gets; `None` where not even its heading fits.
fn share_out(sections: &[Section], height: usize) -> Vec<Option<usize>> {
    let mut left = height;
    let mut rooms: Vec<Option<usize>> = sections
        .iter()
        .map(|s| {
            let need = 1 + s.head.len() + s.least.min(s.wants());
            let fits = need <= left;
            left -= if fits { need } else { 0 };
            fits.then(|| s.least.min(s.wants()))
        })
        .collect();
    for goal in [|s: &Section| s.fair.min(s.wants()), |s: &Section| s.wants()] {
        for (room, section) in rooms.iter_mut().zip(sections) {
            let Some(room) = room else { continue };
            let more = goal(section).saturating_sub(*room).min(left);
            *room += more;
            left -= more;
        }
    }
    rooms
}

fn is_empty(s: &Snapshot) -> bool {
    s.segments.is_empty() && s.comms.is_empty() && s.jobs.is_empty() && s.findings.is_empty()
}

fn sections(ctx: &Ctx<'_>) -> Vec<Section> {
    let mut list = vec![findings_section(ctx), flight_section(ctx)];
    list.extend(jobs_section(ctx));
    list.extend([comms_section(ctx), classes_section(ctx), losses_section(ctx)]);
    list
}

fn findings_section(ctx: &Ctx<'_>) -> Section {
    let items: Vec<_> = findings::rows(ctx).into_iter().map(|f| findings::brief(ctx, f)).collect();
    // One finding in full is worth more than the beginnings of two.
    let least = items.first().map_or(1, Vec::len) + usize::from(items.len() > 1);
    section(ctx, &findings::title(ctx), items, ("finding", "press 4"), (least, least), "no findings")
}

fn flight_section(ctx: &Ctx<'_>) -> Section {
    let all = ctx.snap.in_flight.len();
    let rows: Vec<_> = ctx.snap.in_flight.iter().filter(|f| ctx.filter.flight(f)).collect();
    let items: Vec<_> = rows.iter().map(|f| flight::item(ctx, f)).collect();
    let title = format!("In flight ({})", ctx.filter.tally(rows.len(), all));
    let least = items.first().map_or(1, Vec::len) + usize::from(items.len() > 1);
    let mut s = section(ctx, &title, items, ("operation", "scroll"), (least, 6), "nothing in flight");
    if !rows.is_empty() {
        s.head.push(flight::legend(ctx));
    }
    s
}

fn jobs_section(ctx: &Ctx<'_>) -> Option<Section> {
    let all = ctx.snap.jobs.len();
    let rows: Vec<_> = ctx.snap.jobs.iter().filter(|j| ctx.filter.job(j)).collect();
    let title = format!("Jobs ({})", ctx.filter.tally(rows.len(), all));
    (all > 1).then(|| {
        tabled(ctx, &title, communicators::jobs(ctx, &rows, None), ("job", "scroll"), (2, 4), "no job")
    })
}

fn comms_section(ctx: &Ctx<'_>) -> Section {
    let all = ctx.snap.comms.len();
    let mut rows: Vec<_> = ctx.snap.comms.iter().filter(|c| ctx.filter.comm(c)).collect();
    // Closed ones are history; busy ones first among the rest.
    rows.sort_by_key(|c| (c.closed, c.in_flight == 0));
    let title = format!("Communicators ({})", ctx.filter.tally(rows.len(), all));
    let table = communicators::communicators(ctx, &rows, None);
    tabled(ctx, &title, table, ("communicator", "scroll"), (1, 4), "no communicator yet")
}

fn classes_section(ctx: &Ctx<'_>) -> Section {
    let all = ctx.snap.classes.len();
    let rows: Vec<_> = ctx.snap.classes.iter().filter(|c| ctx.filter.class(c)).collect();
    let title = format!("Collectives ({})", ctx.filter.tally(rows.len(), all));
    let table = collectives::table(ctx, &rows);
    tabled(ctx, &title, table, ("class", "press 2"), (2, 6), "no operations timed yet")
}

fn losses_section(ctx: &Ctx<'_>) -> Section {
    let reasons = losses::reasons(ctx);
    let rows: Vec<_> = reasons.iter().collect();
    let table = losses::table(ctx, &rows);
    tabled(ctx, "Lost", table, ("reason", "press 5"), (1, 3), "nothing lost")
}

fn section(
    ctx: &Ctx<'_>,
    title: &str,
    mut items: Vec<Vec<Line<'static>>>,
    noun: (&'static str, &'static str),
    (least, fair): (usize, usize),
    empty: &str,
) -> Section {
    if items.is_empty() {
        let text = if ctx.filter.is_empty() { empty } else { "none matches the filter" };
        items.push(vec![ctx.line(Role::Dim, format!(" {text}"))]);
    }
    Section { rule: ctx.rule(title, ""), head: Vec::new(), items, noun, least, fair }
}

fn tabled(
    ctx: &Ctx<'_>,
    title: &str,
    table: Table,
    noun: (&'static str, &'static str),
    rooms: (usize, usize),
    empty: &str,
) -> Section {
    let some = !table.rows.is_empty();
    let items = table.rows.into_iter().map(|l| vec![l]).collect();
    let mut s = section(ctx, title, items, noun, rooms, empty);
    if some {
        s.head = table.head;
    }
    s
}

/// The hints when nothing has been attached yet.
fn newcomer(ctx: &Ctx<'_>) -> Vec<Line<'static>> {
    let mut lines = vec![ctx.rule("Nothing attached yet", ""), Line::default()];
    let mut say = |role: Role, indent: &str, text: &str| {
        for part in wrap(text, ctx.width.saturating_sub(indent.len() + 1)) {
            lines.push(ctx.line(role, format!("{indent}{part}")));
        }
    };
    say(Role::Plain, " ", "Start a job under Ringwatch:");
    say(Role::Label, "    ", "ringwatch run -- torchrun --nproc-per-node 8 train.py");
    say(Role::Plain, " ", "");
    say(
        Role::Plain,
        " ",
        "or name the plugin in the environment of a job that starts elsewhere, its directory on LD_LIBRARY_PATH:",
    );
    say(Role::Label, "    ", "NCCL_PROFILER_PLUGIN=libnccl-profiler-ringwatch.so");
    say(Role::Plain, " ", "");
    say(Role::Plain, " ", "or look at a recorded job, without a GPU:");
    say(Role::Label, "    ", "ringwatch demo");
    say(Role::Plain, " ", "");
    let source = if ctx.snap.source.is_empty() { "nothing yet" } else { &ctx.snap.source };
    say(Role::Plain, " ", &format!("Watched: {source}"));
    lines
}
