//! A screen as lines: what stays, what scrolls, and the helpers that fit words into a width.

use super::filter::Filter;
use super::theme::{Role, Theme};
use crate::model::{CommId, Snapshot};
use ratatui::style::Style;
use ratatui::text::{Line, Span};
use std::collections::HashMap;

/// The state that a widget may look at.
#[derive(Debug)]
pub(super) struct Ctx<'a> {
    pub(super) app: &'a super::App,
    pub(super) snap: &'a Snapshot,
    pub(super) theme: Theme,
    pub(super) names: &'a HashMap<CommId, &'a str>,
    pub(super) filter: Filter<'a>,
    pub(super) width: usize,
}

impl Ctx<'_> {
    /// A communicator's identity, followed by its name if it has one.
    pub(super) fn comm(&self, id: CommId) -> String {
        match self.names.get(&id) {
            Some(name) => format!("{id} {name}"),
            None => id.to_string(),
        }
    }

    pub(super) fn span(&self, role: Role, text: impl Into<String>) -> Span<'static> {
        Span::styled(text.into(), self.theme.style(role))
    }

    pub(super) fn line(&self, role: Role, text: impl Into<String>) -> Line<'static> {
        Line::from(self.span(role, fit(&text.into(), self.width, self.theme)))
    }

    /// The rule that opens a section, its title in it and a remark at its end.
    pub(super) fn rule(&self, title: &str, remark: &str) -> Line<'static> {
        let r = self.theme.rule();
        let mut room = self.width.saturating_sub(width(title) + 4);
        let remark = if remark.is_empty() || room < 8 {
            String::new()
        } else {
            format!(" {} {r}", fit(remark, room.saturating_sub(4), self.theme))
        };
        room = room.saturating_sub(width(&remark));
        Line::from(vec![
            self.span(Role::Dim, format!("{r}{r} ")),
            self.span(Role::Title, title),
            self.span(Role::Dim, format!(" {}{remark}", r.repeat(room))),
        ])
    }
}

/// One screen: a head and a foot that stay, and a body that scrolls between them.
#[derive(Debug, Default)]
pub(super) struct Page {
    pub(super) head: Vec<Line<'static>>,
    pub(super) body: Vec<Line<'static>>,
    pub(super) foot: Vec<Line<'static>>,
    /// The selected line of the body; without one the body is scrolled as text.
    pub(super) selected: Option<usize>,
    /// How far the body can be scrolled, where that is not what its length says.
    pub(super) last: Option<usize>,
}

/// The columns a text takes on the screen.
pub(super) fn width(s: &str) -> usize {
    if s.is_ascii() { s.len() } else { Span::raw(s).width() }
}

/// A text cut to `room` columns, with an ellipsis where it was cut.
pub(super) fn fit(s: &str, room: usize, theme: Theme) -> String {
    if width(s) <= room {
        return s.to_owned();
    }
    if room == 0 {
        return String::new();
    }
    let mut out = String::new();
    let mut used = 0;
    for g in Span::raw(s).styled_graphemes(Style::new()) {
        let w = width(g.symbol);
        if used + w + 1 > room {
            break;
        }
        out.push_str(g.symbol);
        used += w;
    }
    out.push_str(theme.ellipsis());
    out
}

/// A text broken between words into lines of at most `room` columns; longer words are cut up.
pub(super) fn wrap(s: &str, room: usize) -> Vec<String> {
    let room = room.max(1);
    let mut lines = vec![String::new()];
    let mut used = 0;
    for word in s.split_whitespace() {
        let w = width(word);
        if used > 0 && used + 1 + w > room {
            lines.push(String::new());
            used = 0;
        }
        if let Some(line) = lines.last_mut().filter(|_| used > 0) {
            line.push(' ');
            used += 1;
        }
        if w <= room - used {
            if let Some(line) = lines.last_mut() {
                line.push_str(word);
            }
            used += w;
            continue;
        }
        for g in Span::raw(word).styled_graphemes(Style::new()) {
            let w = width(g.symbol);
            if used > 0 && used + w > room {
                lines.push(String::new());
                used = 0;
            }
            if let Some(line) = lines.last_mut() {
                line.push_str(g.symbol);
            }
            used += w;
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fitting() {
        let t = Theme::default();
        assert_eq!(fit("AllReduce", 9, t), "AllReduce");
        assert_eq!(fit("AllReduce", 5, t), "AllR…");
        assert_eq!(fit("AllReduce", 0, t), "");
        assert_eq!(fit("日本語", 5, t), "日本…");
        assert_eq!(fit("日本語", 4, t), "日…");
        assert_eq!(fit("abc", 2, Theme { ascii: true, ..t }), "a~");
    }

    #[test]
    fn wrapping() {
        assert_eq!(wrap("one two three", 7), ["one two", "three"]);
        assert_eq!(wrap("", 7), [""]);
        assert_eq!(wrap("abcdefghij", 4), ["abcd", "efgh", "ij"]);
        assert_eq!(wrap("日本語", 1), ["日", "本", "語"]);
        assert_eq!(wrap("a b", 0), ["a", "b"]);
    }
}
