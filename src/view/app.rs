//! The state of the screens and how a message changes it. No terminal, no clock.

use super::clean;
use super::table::Sort;
use super::theme::Theme;
use super::widgets;
use crate::model::{At, CommId, Snapshot};
use std::cell::Cell;

/// The longest filter that can be typed.
const FILTER_MAX: usize = 100;

/// The screens, in the order of their keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Screen {
    /// A whole cluster: a mark a node, and the ways down. Only where a cluster is looked at.
    Cluster,
    /// Findings, operations in flight, communicators, collectives and losses on one screen.
    #[default]
    Overview,
    /// Classes of operations with their times and bandwidths.
    Collectives,
    /// The ranks of one communicator and whom they wait for.
    Ranks,
    /// Every finding with all its evidence.
    Findings,
    /// Processes and what was lost.
    Losses,
}

impl Screen {
    /// Every screen of one host, in the order of their keys.
    pub const ALL: [Screen; 5] =
        [Screen::Overview, Screen::Collectives, Screen::Ranks, Screen::Findings, Screen::Losses];
    /// Every screen of a cluster, in the order of their keys.
    pub const OF_CLUSTER: [Screen; 6] = [
        Screen::Cluster,
        Screen::Overview,
        Screen::Collectives,
        Screen::Ranks,
        Screen::Findings,
        Screen::Losses,
    ];

    /// The name on the screen.
    pub const fn title(self) -> &'static str {
        match self {
            Screen::Cluster => "Cluster",
            Screen::Overview => "Overview",
            Screen::Collectives => "Collectives",
            Screen::Ranks => "Ranks",
            Screen::Findings => "Findings",
            Screen::Losses => "Losses",
        }
    }

    /// Its place among all, which is its key.
    pub(super) const fn index(self) -> usize {
        self as usize
    }
}

/// An event of the screens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Msg {
    /// Leave.
    Quit,
    /// Stop the process. Changes nothing here: the owner of the terminal suspends and resumes.
    Suspend,
    /// Draw again from nothing. Changes nothing here either.
    Redraw,
    /// Show or hide the help.
    Help,
    /// Close the help, else clear the filter.
    Escape,
    /// Show a screen.
    Show(Screen),
    /// The next screen.
    NextScreen,
    /// The previous screen.
    PreviousScreen,
    /// Look at what is selected: a job, a node or a communicator of the cluster.
    Into,
    /// Look at what is around it.
    Out,
    /// Move the selection or the text by so many lines.
    Move(isize),
    /// Move by so many pages.
    Page(isize),
    /// To the first line.
    Top,
    /// To the last line.
    Bottom,
    /// The next communicator of the ranks screen.
    NextComm,
    /// The previous communicator of the ranks screen.
    PreviousComm,
    /// Sort by the next column.
    SortNext,
    /// Sort the other way round.
    SortReverse,
    /// Stop or resume taking snapshots.
    Pause,
    /// Begin to type a filter.
    FilterStart,
    /// A character of the filter.
    FilterPush(char),
    /// Take the last character of the filter back.
    FilterPop,
    /// Keep the filter and stop typing.
    FilterKeep,
    /// Drop the filter and stop typing.
    FilterClear,
}

/// The extent of the last frame; keys move within it.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Extent {
    /// Lines of one page.
    pub(super) page: usize,
    /// The greatest position.
    pub(super) last: usize,
}

/// The state of the screens.
#[derive(Debug, Default)]
pub struct App {
    pub(super) theme: Theme,
    pub(super) snapshot: Snapshot,
    /// The snapshot that came in during a pause, shown when it ends.
    pending: Option<Snapshot>,
    pub(super) paused: bool,
    pub(super) screen: Screen,
    pub(super) help: bool,
    pub(super) filter: String,
    pub(super) editing: bool,
    /// The communicator of the ranks screen; absent until one is chosen.
    pub(super) comm: Option<CommId>,
    /// Where in a cluster the user looks.
    pub(super) at: At,
    sorts: [Option<Sort>; 6],
    positions: [usize; 6],
    /// Written by drawing: only a frame knows how many lines it had and could have had.
    pub(super) extent: Cell<Extent>,
    quit: bool,
}

impl App {
    /// Nothing known yet, in the default theme.
    pub fn new() -> App {
        App::default()
    }

    /// Nothing known yet, in a theme.
    pub fn with_theme(theme: Theme) -> App {
        App { theme, ..App::default() }
    }

    /// True once the user wants to leave.
    pub fn quit(&self) -> bool {
        self.quit
    }

    /// True while snapshots are held back.
    pub fn paused(&self) -> bool {
        self.paused
    }

    /// The screen shown.
    pub fn screen(&self) -> Screen {
        self.screen
    }

    /// True while a filter is typed, when letters are no commands.
    pub fn editing(&self) -> bool {
        self.editing
    }

    /// True while the help is shown.
    pub fn help(&self) -> bool {
        self.help
    }

    /// Takes what is known now. During a pause it is held back until the pause ends.
    pub fn set_snapshot(&mut self, mut snapshot: Snapshot) {
        clean::snapshot(&mut snapshot, self.theme.ascii);
        if self.paused {
            self.pending = Some(snapshot);
            return;
        }
        // Whoever looks at a cluster begins with all of it.
        let first = snapshot.fleet.is_some() && self.snapshot.fleet.is_none();
        self.snapshot = snapshot;
        if first {
            self.show(Screen::Cluster);
        }
    }

    /// The question to a cluster: where the user looks, and for which words.
    pub fn question(&self) -> (&At, &str) {
        (&self.at, &self.filter)
    }

    /// The screens there are.
    pub(super) fn screens(&self) -> &'static [Screen] {
        if self.snapshot.fleet.is_some() { &Screen::OF_CLUSTER } else { &Screen::ALL }
    }

    /// The screen so many further.
    fn beside(&self, by: usize) -> Screen {
        let screens = self.screens();
        let at = screens.iter().position(|s| *s == self.screen).unwrap_or(0);
        screens.get((at + by) % screens.len()).copied().unwrap_or_default()
    }

    /// How old a paused screen is, in ns, as far as later snapshots tell.
    pub(super) fn behind_ns(&self) -> u64 {
        self.pending.as_ref().map_or(0, |p| p.at_ns.saturating_sub(self.snapshot.at_ns))
    }

    /// The sorting of the screen shown.
    pub(super) fn sort(&self) -> Option<Sort> {
        self.sorts[self.screen.index()]
    }

    /// The selected line, or the first line shown, of the screen shown.
    pub(super) fn position(&self) -> usize {
        self.positions[self.screen.index()]
    }

    /// Applies a message.
    pub fn update(&mut self, msg: Msg) {
        match msg {
            Msg::Quit => self.quit = true,
            Msg::Suspend | Msg::Redraw => {}
            Msg::Help => self.help = !self.help,
            Msg::Escape if self.help => self.help = false,
            Msg::Escape | Msg::FilterClear => {
                self.editing = false;
                self.filter.clear();
                self.reset_position();
            }
            Msg::Show(screen) => self.show(screen),
            Msg::NextScreen => self.show(self.beside(1)),
            Msg::PreviousScreen => self.show(self.beside(self.screens().len() - 1)),
            Msg::Into => self.into(),
            Msg::Out => self.out(),
            Msg::Move(by) => self.go(by),
            Msg::Page(by) => self.go(by.saturating_mul(self.extent.get().page.max(1) as isize)),
            Msg::Top => self.reset_position(),
            Msg::Bottom => self.go(isize::MAX),
            Msg::NextComm => self.step_comm(true),
            Msg::PreviousComm => self.step_comm(false),
            Msg::SortNext => self.sort_next(),
            Msg::SortReverse => self.sort_reverse(),
            Msg::Pause => self.pause(),
            Msg::FilterStart => {
                self.help = false;
                self.editing = true;
            }
            Msg::FilterPush(c) if self.filter.chars().count() < FILTER_MAX && !c.is_control() => {
                self.filter.push(c);
                self.reset_position();
            }
            Msg::FilterPush(_) => {}
            Msg::FilterPop => {
                self.filter.pop();
                self.reset_position();
            }
            Msg::FilterKeep => self.editing = false,
        }
    }

    /// Looks at what is selected. Words that led to it are forgotten: they need not be in it.
    fn into(&mut self) {
        if self.screen != Screen::Cluster || self.help {
            return;
        }
        let Some(at) = widgets::cluster::way(self) else { return };
        let of_comm = at.communicator.is_some();
        self.at = at;
        self.filter.clear();
        self.positions = [0; 6];
        if of_comm {
            self.show(Screen::Ranks);
        }
    }

    /// Looks at what is around.
    fn out(&mut self) {
        let at = &mut self.at;
        if at.communicator.take().is_some() {
            if self.screen == Screen::Ranks {
                self.show(Screen::Cluster);
            }
        } else if at.node.take().is_none() && at.job.take().is_none() {
            return;
        }
        self.filter.clear();
        self.positions = [0; 6];
    }

    fn show(&mut self, screen: Screen) {
        if screen == Screen::Cluster && self.snapshot.fleet.is_none() {
            return;
        }
        self.screen = screen;
        self.help = false;
        // The old screen's extent says nothing about the new one, and no move may rest on it.
        self.extent.set(Extent { page: self.extent.get().page, last: usize::MAX });
    }

    fn go(&mut self, by: isize) {
        let last = self.extent.get().last;
        let position = &mut self.positions[self.screen.index()];
        // A list may have become shorter than the position since; begin from what was shown.
        *position = (*position).min(last).saturating_add_signed(by).min(last);
    }

    fn reset_position(&mut self) {
        self.positions[self.screen.index()] = 0;
    }

    fn step_comm(&mut self, forward: bool) {
        let next = widgets::ranks::neighbour(self, forward);
        if next.is_some() && self.screen == Screen::Ranks {
            self.comm = next;
            self.reset_position();
        }
    }

    fn sort_next(&mut self) {
        let columns = widgets::sortable_columns(self.screen);
        let sort = &mut self.sorts[self.screen.index()];
        let next = sort.map_or(0, |s| s.column + 1);
        // After the last column comes the order the data has of itself.
        *sort = (next < columns).then_some(Sort { column: next, reversed: false });
    }

    fn sort_reverse(&mut self) {
        if let Some(sort) = &mut self.sorts[self.screen.index()] {
            sort.reversed = !sort.reversed;
        }
    }

    fn pause(&mut self) {
        self.paused = !self.paused;
        if let Some(next) = self.pending.take().filter(|_| !self.paused) {
            self.snapshot = next;
        }
    }
}
