//! Texts of other nodes: they could steer a terminal or be endless, and may be shown.

use crate::model::steers;
use serde::de::DeserializeOwned;

/// The longest text of a message that is kept, in bytes.
const CLIPPED: usize = 256;

/// A text as it may be shown: cut, and without what steers.
pub(super) fn clipped(s: String) -> String {
    if s.len() <= CLIPPED && !s.chars().any(steers) {
        return s;
    }
    let mut kept = String::new();
    for c in s.chars().filter(|c| !steers(*c)) {
        if kept.len() + c.len_utf8() > CLIPPED {
            break;
        }
        kept.push(c);
    }
    kept
}

/// Reads JSON that another node wrote. Absent where it is none, where a text in it could steer a terminal, or where one is
/// longer than so many bytes as it is written.
pub fn from_json<T: DeserializeOwned>(bytes: &[u8], text_max: usize) -> Option<T> {
    let json = std::str::from_utf8(bytes).ok().filter(|json| is_plain(json, text_max))?;
    serde_json::from_str(json).ok()
}

/// Returns whether all texts in JSON can be shown and are no longer than this. It returns anything for what is no JSON.
fn is_plain(json: &str, text_max: usize) -> bool {
    let mut chars = json.char_indices();
    // Where the text begins that is being read.
    let mut begun = None;
    while let Some((at, c)) = chars.next() {
        match (begun, c) {
            (None, '"') => begun = Some(at + 1),
            (None, _) => {}
            (Some(from), '"') => {
                if at - from > text_max {
                    return false;
                }
                begun = None;
            }
            (Some(_), '\\') => {
                let steering = match chars.next() {
                    Some((_, 'b' | 'f' | 'n' | 'r' | 't')) => true,
                    Some((at, 'u')) => {
                        let code = json.get(at + 1..at + 5).and_then(|hex| u32::from_str_radix(hex, 16).ok());
                        // Halves of a pair stand for what lies behind all that steers.
                        code.and_then(char::from_u32).is_some_and(steers)
                    }
                    _ => false,
                };
                if steering {
                    return false;
                }
            }
            (Some(_), c) if steers(c) => return false,
            (Some(_), _) => {}
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(json: &str) -> Option<String> {
        from_json(json.as_bytes(), 24)
    }

    #[test]
    fn json_is_read_whose_texts_can_be_shown() {
        for (json, want) in [
            (r#" "rank 3" "#, Some("rank 3")),
            (r#""a\\u001b[31m""#, Some("a\\u001b[31m")),
            (r#""\u00e4\ud83d\ude00\"\\\/""#, Some("ä😀\"\\/")),
            (r#""0123456789abcdef01234567""#, Some("0123456789abcdef01234567")),
            (r#""0123456789abcdef012345678""#, None),
            (r#""a\u001b[31m""#, None),
            (r#""a\u202E""#, None),
            ("\"a\u{202e}\"", None),
            (r#""a\n""#, None),
            (r#""a"#, None),
            (r#""a\"#, None),
            (r#""a\u12"#, None),
        ] {
            assert_eq!(read(json).as_deref(), want, "{json}");
        }
        assert_eq!(
            from_json::<Vec<u8>>(b"[1,\n\t2]", 0),
            Some(vec![1, 2]),
            "space between values is none of theirs"
        );
        assert_eq!(from_json::<serde_json::Value>(br#"{"a\u009b":1}"#, 16), None, "names are texts");
        assert_eq!(from_json::<String>(b"\"\xff\"", 16), None);
    }
}
