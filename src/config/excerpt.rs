//! The part of a file of settings that an error may show: the line, the key, and a value only where no secret can be.
//!
//! A broken file says little of where its secrets are: the faulty line may be a header's value, or a URL in the wrong
//! section. So a value is shown only if its key is known, in a section without secrets, and its line is plain. A message
//! of the parser quotes only what its line shows.

use super::Config;
use crate::secret::MASK;
use serde_yaml::Value;

/// The sections that hold secrets; a test compares them with the schema.
const SECRET: [&str; 3] = ["cluster", "notify", "otlp"];

/// The keys of a file.
pub(super) struct Keys(Value);

impl Keys {
    pub(super) fn new() -> Self {
        // Without the keys nothing counts as known, and every value is masked.
        Keys(serde_yaml::to_value(Config::default()).unwrap_or_default())
    }

    fn knows(&self, key: &str) -> bool {
        is_below(&self.0, key)
    }

    /// The faulty line as it may be shown, and the message beside it.
    pub(super) fn excerpt(&self, text: &str, line: usize, message: &str) -> (String, String) {
        let lines: Vec<&str> = text.lines().collect();
        let faulty = lines.get(line).copied().unwrap_or_default();
        let section = lines.iter().take(line + 1).rev().find_map(|l| section(l));
        let shown = self.shown(faulty, section, message);
        let message = masked(message, &shown);
        (shown, message)
    }

    fn shown(&self, line: &str, section: Option<&str>, message: &str) -> String {
        let start = line.len() - line.trim_start().trim_start_matches("- ").len();
        let (indent, rest) = line.split_at(start);
        let Some((key, value)) = rest.split_once(':').filter(|(key, _)| is_name(key)) else {
            return format!("{indent}{MASK}");
        };
        let value = value.split(" #").next().unwrap_or_default().trim_end();
        let harmless = section
            .filter(|s| !SECRET.contains(s))
            .and_then(|s| self.0.get(s).map(|below| s == key || is_below(below, key)))
            .unwrap_or(false);
        if value.is_empty() || (harmless && is_plain(value)) {
            format!("{indent}{key}:{value}")
        } else if self.knows(key) || message.contains(&format!("`{key}`")) {
            format!("{indent}{key}: {MASK}")
        } else {
            format!("{indent}{MASK}")
        }
    }
}

/// The section that begins at a line.
fn section(line: &str) -> Option<&str> {
    let key = line.split_once(':')?.0;
    (is_name(key)).then_some(key)
}

/// Returns whether a text looks like a key or a variable, and not like a URL or a token.
pub(super) fn is_name(text: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-');
    (1..=64).contains(&text.len()) && text.chars().all(plain)
}

/// One scalar, or a list of some; no map, and no URL.
fn is_plain(value: &str) -> bool {
    !value.contains(['{', '@', '*', '&']) && !value.contains(": ") && !value.contains("://")
}

fn is_below(value: &Value, key: &str) -> bool {
    let Some(map) = value.as_mapping() else { return false };
    map.iter().any(|(k, v)| k.as_str() == Some(key) || is_below(v, key))
}

/// A message of the parser in which what it quotes is masked, unless it stands in what is shown. What is in backticks are
/// our own names, but for an unknown variant.
pub(super) fn masked(message: &str, shown: &str) -> String {
    let mut out = String::new();
    let mut rest = message;
    while let Some(at) = rest.find(['"', '`']) {
        let (before, quoted) = rest.split_at(at);
        let (mark, quoted) = quoted.split_at(1);
        // A text may hold escaped quotes: up to the last one before what was expected in its place.
        let until =
            if mark == "\"" { quoted.find(", expected").unwrap_or(quoted.len()) } else { quoted.len() };
        let end = if mark == "\"" { quoted[..until].rfind('"') } else { quoted.find('`') };
        let (inside, after) = quoted.split_at(end.unwrap_or(quoted.len()));
        let ours = mark == "`" && is_name(inside) && !before.ends_with("unknown variant ");
        let inside = if ours || (!inside.is_empty() && shown.contains(inside)) { inside } else { MASK };
        out += &format!("{before}{mark}{inside}");
        match after.strip_prefix(mark) {
            Some(more) => {
                out += mark;
                rest = more;
            }
            None => return out,
        }
    }
    out + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_shown_only_where_no_secret_can_be() {
        for (text, line, shown) in [
            ("detect:\n  patience_ms: soon # note\n", 1, "  patience_ms: soon"),
            ("http:\n  listen: nowhere\n", 1, "  listen: nowhere"),
            ("http:\n  listen: 127.0.0.1:99999\n", 1, "  listen: 127.0.0.1:99999"),
            ("segments:\n  directories: [/a, /b\n", 1, "  directories: [/a, /b"),
            ("http:\n  port: s3cr3t\n", 1, "  port: ***"),
            ("http:\n  password: s3cr3t\n", 1, "  ***"),
            ("otlp:\n  timeout_ms: s3cr3t\n", 1, "  timeout_ms: ***"),
            ("otlp:\n  headers:\n    x-token: s3cr3t: b\n", 2, "    ***"),
            ("otlp:\n  headers:\n    authorization: >\n     s3cr3t\n    b ad\n", 3, "     ***"),
            ("cluster:\n  servers: nats://u:s3cr3t@h\n", 1, "  servers: ***"),
            ("cluster:\n  servers:\n  - nats://u:s3cr3t@h\n", 2, "  - ***"),
            ("http:\n otlp: {endpoint: \"http://u:s3cr3t@h\"\n", 1, " otlp: ***"),
            ("limits: {cpu: 1, token: s3cr3t\n", 0, "limits: ***"),
            ("{otlp: {headers: {a: s3cr3t}}\n", 0, "***"),
            ("\tservers: s3cr3t\n", 0, "\tservers: ***"),
            ("detect:\n  warm_up: http://u:s3cr3t@h\n", 1, "  warm_up: ***"),
            ("", 0, "***"),
        ] {
            let got = Keys::new().excerpt(text, line, "unknown field `port`, expected `listen`");
            assert_eq!(got.0, shown, "{text:?}");
        }
    }

    #[test]
    fn a_message_quotes_no_more_than_its_line() {
        for (message, shown, wanted) in [
            (
                "invalid type: string \"soon\", expected u64",
                "a: soon",
                "invalid type: string \"soon\", expected u64",
            ),
            (
                "invalid type: string \"s3cr3t\", expected u64",
                "a: ***",
                "invalid type: string \"***\", expected u64",
            ),
            (
                "invalid type: string \"s3\\\"cr3t\", expected \"x\"",
                "",
                "invalid type: string \"***\", expected \"***\"",
            ),
            ("unknown field `port`, expected one of `a`", "", "unknown field `port`, expected one of `a`"),
            ("unknown variant `s3cr3t`, expected `grpc`", "", "unknown variant `***`, expected `grpc`"),
            ("unknown field `nats://u:s3cr3t@h`", "", "unknown field `***`"),
            ("string \"s3cr3t", "", "string \"***"),
        ] {
            assert_eq!(masked(message, shown), wanted);
        }
    }

    /// Follows the schema's references to every type that is marked as a secret.
    fn has_secret(schema: &serde_json::Value, all: &serde_json::Value) -> bool {
        match schema {
            serde_json::Value::Object(map) => {
                let target =
                    map.get("$ref").and_then(|r| r.as_str()?.strip_prefix('#')).and_then(|p| all.pointer(p));
                map.get("writeOnly").is_some_and(|w| w == true)
                    || target.is_some_and(|t| has_secret(t, all))
                    || map.values().any(|v| has_secret(v, all))
            }
            serde_json::Value::Array(list) => list.iter().any(|v| has_secret(v, all)),
            _ => false,
        }
    }

    #[test]
    fn the_sections_with_secrets_are_those_of_the_schema() {
        let all: serde_json::Value =
            serde_json::from_str(&super::super::schema().expect("text")).expect("JSON");
        let sections = all["properties"].as_object().expect("keys");
        let secret: Vec<_> = sections.iter().filter(|(_, s)| has_secret(s, &all)).map(|(k, _)| k).collect();
        assert_eq!(secret, SECRET);
    }
}
