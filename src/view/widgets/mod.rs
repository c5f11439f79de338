//! One screen, or one part of several, a file. Each turns what it may look at into lines.

pub(super) mod cluster;
mod collectives;
mod communicators;
mod findings;
mod flight;
pub(super) mod help;
mod losses;
mod overview;
pub(super) mod ranks;

use super::app::Screen;
use super::page::{Ctx, Page};
use super::theme::Role;

/// The page of the screen shown, for a body of `height` lines.
pub(super) fn page(ctx: &Ctx<'_>, height: usize) -> Page {
    match ctx.app.screen {
        Screen::Cluster => cluster::page(ctx, height),
        Screen::Overview => overview::page(ctx, height),
        Screen::Collectives => collectives::page(ctx),
        Screen::Ranks => ranks::page(ctx),
        Screen::Findings => findings::page(ctx),
        Screen::Losses => losses::page(ctx),
    }
}

/// How many columns of a screen's table can be sorted by: the first so many.
pub(super) const fn sortable_columns(screen: Screen) -> usize {
    match screen {
        Screen::Cluster | Screen::Overview | Screen::Findings => 0,
        Screen::Collectives => collectives::SORTABLE,
        Screen::Ranks => ranks::SORTABLE,
        Screen::Losses => losses::SORTABLE,
    }
}

/// The line of a table without rows: nothing there, or nothing that the filter keeps.
fn nothing(ctx: &Ctx<'_>, what: &str, all: usize) -> ratatui::text::Line<'static> {
    if all > 0 && !ctx.filter.is_empty() {
        return ctx.line(Role::Dim, format!(" none of {all} matches the filter (Esc clears it)"));
    }
    ctx.line(Role::Dim, format!(" {what}"))
}
