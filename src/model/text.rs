//! Texts of jobs and other nodes, as they may be shown.

/// True for control characters, and for Unicode's marks that turn the direction of what follows: both steer a terminal.
pub fn steers(c: char) -> bool {
    let turns =
        matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    c.is_control() || turns
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_mark_of_direction_steers_and_no_letter_does() {
        // Unicode's property Bidi_Control, and a control character of each range.
        let marks =
            "\u{61c}\u{200e}\u{200f}\u{202a}\u{202b}\u{202c}\u{202d}\u{202e}\u{2066}\u{2067}\u{2068}\u{2069}";
        assert!(marks.chars().chain("\u{1b}\n\u{7f}\u{9b}".chars()).all(steers));
        assert!(!"rank 3: école, \u{645}\u{631}\u{62d}\u{628}\u{627}, 学".chars().any(steers));
    }
}
