//! Texts that may be shown: nothing in them steers a terminal, and none is endless.

use serde_json::Value;

/// Control characters, and marks that turn the direction of what follows.
fn steers(c: char) -> bool {
    let turns =
        matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    c.is_control() || turns
}

/// Fails where a text could steer a terminal, or is longer than so many bytes.
pub(crate) fn text(what: &str, text: &str, most: usize) {
    assert!(text.len() <= most, "{what} is {} bytes long", text.len());
    if text.bytes().all(|b| matches!(b, b' '..=b'~')) {
        return;
    }
    let bad = text.chars().find(|c| steers(*c));
    assert!(bad.is_none(), "{what} holds {bad:?}: {text:?}");
}

/// The same of all texts in a value, keys too.
pub(crate) fn json(what: &str, value: &Value, most: usize) {
    match value {
        Value::String(s) => text(what, s, most),
        Value::Array(all) => all.iter().for_each(|v| json(what, v, most)),
        Value::Object(all) => all.iter().for_each(|(k, v)| {
            text(what, k, most);
            json(what, v, most);
        }),
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

/// The same of a text of lines, of which a line may be longer.
pub(crate) fn lines(what: &str, all: &str, most: usize) {
    all.split('\n').for_each(|line| text(what, line, most));
}
