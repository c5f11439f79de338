//! How things look: colours, which never carry meaning alone, and an ASCII fallback.

use ratatui::style::{Color, Modifier, Style};

/// The role of a piece of text; the theme decides how that looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    /// Titles and names that lead.
    Title,
    /// Table headings and labels.
    Label,
    /// Ordinary text.
    Plain,
    /// Text of less weight.
    Dim,
    /// Something in motion.
    Busy,
    /// Worth a look.
    Warn,
    /// Wrong.
    Bad,
    /// The selected row or screen.
    Selected,
}

/// The abilities of the terminal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Theme {
    /// Colours may be used.
    pub colour: bool,
    /// Only ASCII may be drawn.
    pub ascii: bool,
}

impl Default for Theme {
    fn default() -> Theme {
        Theme { colour: true, ascii: false }
    }
}

impl Theme {
    /// The theme for the environment: `NO_COLOR`, `TERM=dumb`, `RINGWATCH_ASCII` and the locale.
    pub fn from_env() -> Theme {
        Theme::from_vars(|name| std::env::var_os(name).map(|v| v.to_string_lossy().into_owned()))
    }

    /// As [`Theme::from_env`], with the variables given by a function.
    pub fn from_vars(var: impl Fn(&str) -> Option<String>) -> Theme {
        let set = |name: &str| var(name).filter(|v| !v.is_empty());
        let dumb = set("TERM").is_some_and(|t| t == "dumb");
        let locale = ["LC_ALL", "LC_CTYPE", "LANG"].into_iter().find_map(set).unwrap_or_default();
        let locale = locale.to_ascii_lowercase();
        let utf8 = locale.contains("utf-8") || locale.contains("utf8");
        Theme { colour: set("NO_COLOR").is_none() && !dumb, ascii: set("RINGWATCH_ASCII").is_some() || !utf8 }
    }

    pub(super) fn style(self, role: Role) -> Style {
        let plain = Style::new();
        let tint = |c: Color| if self.colour { plain.fg(c) } else { plain };
        match role {
            Role::Title => tint(Color::Cyan).add_modifier(Modifier::BOLD),
            Role::Label => plain.add_modifier(Modifier::BOLD),
            Role::Plain => plain,
            Role::Dim => tint(Color::DarkGray),
            Role::Busy => tint(Color::Green),
            Role::Warn => tint(Color::Yellow),
            Role::Bad => tint(Color::Red).add_modifier(Modifier::BOLD),
            Role::Selected => plain.add_modifier(Modifier::REVERSED),
        }
    }

    pub(super) fn rule(self) -> &'static str {
        if self.ascii { "-" } else { "─" }
    }

    pub(super) fn ellipsis(self) -> &'static str {
        if self.ascii { "~" } else { "…" }
    }

    /// The mark of a sorted column.
    pub(super) fn arrow(self, descending: bool) -> char {
        match (self.ascii, descending) {
            (false, true) => '▼',
            (false, false) => '▲',
            (true, true) => 'v',
            (true, false) => '^',
        }
    }

    /// One character a value, scaled to the greatest; absent values are blank.
    pub(super) fn spark(self, values: &[Option<f64>]) -> String {
        const BLOCKS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
        const ASCII: [char; 8] = ['_', '.', ':', '-', '=', '+', '*', '#'];
        let levels = if self.ascii { ASCII } else { BLOCKS };
        let known = |v: &Option<f64>| v.filter(|v| v.is_finite() && *v >= 0.0);
        let most = values.iter().filter_map(known).fold(0.0, f64::max);
        let level = |v: f64| if most > 0.0 { (v / most * 7.0).round() as usize } else { 0 };
        values.iter().map(|v| known(v).map_or(' ', |v| levels[level(v).min(7)])).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn theme(vars: &[(&str, &str)]) -> Theme {
        Theme::from_vars(|n| vars.iter().find(|(k, _)| *k == n).map(|(_, v)| (*v).to_owned()))
    }

    #[test]
    fn the_environment_decides() {
        let full = Theme { colour: true, ascii: false };
        assert_eq!(theme(&[("LANG", "en_US.UTF-8")]), full);
        assert_eq!(theme(&[("LANG", "C.utf8"), ("NO_COLOR", "")]), full);
        assert!(!theme(&[("LANG", "C.utf8"), ("NO_COLOR", "1")]).colour);
        assert!(!theme(&[("LANG", "C.utf8"), ("TERM", "dumb")]).colour);
        assert!(theme(&[]).ascii);
        assert!(theme(&[("LC_ALL", "C"), ("LANG", "en_US.UTF-8")]).ascii);
        assert!(!theme(&[("LC_ALL", ""), ("LANG", "en_US.UTF-8")]).ascii);
        assert!(theme(&[("LANG", "C.UTF-8"), ("RINGWATCH_ASCII", "1")]).ascii);
    }

    #[test]
    fn absent_seconds_are_blank_and_zero_is_not() {
        let t = Theme::default();
        assert_eq!(t.spark(&[Some(0.0), None, Some(5.0), Some(10.0), Some(f64::NAN)]), "▁ ▅█ ");
        assert_eq!(t.spark(&[None, None]), "  ");
        assert_eq!(t.spark(&[Some(0.0)]), "▁");
    }

    #[test]
    fn without_colour_nothing_is_coloured() {
        let t = Theme { colour: false, ascii: true };
        for role in [Role::Title, Role::Dim, Role::Busy, Role::Warn, Role::Bad, Role::Selected] {
            assert_eq!(t.style(role).fg, None);
        }
    }
}
