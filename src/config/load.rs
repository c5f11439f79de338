//! From a file, the environment and the command line to settings, and what is wrong on the way.

use super::Config;
use super::excerpt::{Keys, is_name, masked};
use crate::secret::{MASK, serialize_exposed};
use serde_yaml::Value;
use std::path::{Path, PathBuf};

/// Variables that override a key begin so; `RINGWATCH_AGENT_HTTP__LISTEN` is `http.listen`.
const PREFIX: &str = "RINGWATCH_AGENT_";

/// The fault in the settings.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file cannot be read.
    #[error("{}: {why}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        why: std::io::Error,
    },
    /// The file is not what it should be. Its message ends with the line, and a mark below it.
    #[error("{message}")]
    Text {
        /// File, line, key, what is wrong.
        message: String,
    },
    /// An override names no key, or its value is none.
    #[error("{origin}: {why}")]
    Override {
        /// The variable or the option.
        origin: String,
        /// The fault.
        why: String,
    },
    /// A value is out of its range.
    #[error("{origin}: {key}: {why}")]
    Range {
        /// The file, or what stands for it.
        origin: String,
        /// The key.
        key: &'static str,
        /// The fault.
        why: String,
    },
    /// The settings cannot be written as text.
    #[error("settings cannot be written: {0}")]
    Write(String),
}

/// Single keys that override the file's.
#[derive(Debug, Clone, Default)]
pub struct Overrides {
    /// Where it comes from, the key's path, and its value as YAML.
    all: Vec<(String, Vec<String>, String)>,
}

impl Overrides {
    /// From the environment's variables.
    #[must_use]
    pub fn environment(mut self, variables: impl Iterator<Item = (String, String)>) -> Self {
        let mut found: Vec<_> = variables
            .filter_map(|(name, value)| {
                let path = name.strip_prefix(PREFIX)?.split("__").map(str::to_ascii_lowercase).collect();
                Some((name, path, value))
            })
            .collect();
        found.sort();
        self.all.extend(found);
        self
    }

    /// From `--set KEY=VALUE` options, which come after the environment.
    ///
    /// # Errors
    /// An option without `=`.
    pub fn options(mut self, options: &[String]) -> Result<Self, Error> {
        for o in options {
            let Some((key, value)) = o.split_once('=') else {
                return Err(Error::Override {
                    origin: format!("--set {}", named(o)),
                    why: "not KEY=VALUE, http.listen=127.0.0.1:9478 for example".to_owned(),
                });
            };
            let path = key.split('.').map(str::to_owned).collect();
            self.all.push((format!("--set {}", named(key)), path, value.to_owned()));
        }
        Ok(self)
    }
}

/// The key as it was given, unless it looks like a value: a URL without its key may hold a password.
fn named(key: &str) -> &str {
    if is_name(key) { key } else { MASK }
}

/// Reads settings: the defaults, then the file, then what overrides it.
///
/// # Errors
/// What is wrong, with file, line and key.
pub fn load(path: Option<&Path>, overrides: &Overrides) -> Result<Config, Error> {
    let origin = path.map_or_else(|| "settings".to_owned(), |p| p.display().to_string());
    let mut config = match path {
        Some(path) => {
            let text =
                std::fs::read_to_string(path).map_err(|why| Error::Read { path: path.to_owned(), why })?;
            parse(&text, &origin)?
        }
        None => Config::default(),
    };
    for (origin, keys, value) in &overrides.all {
        config = apply(&config, origin, keys, value)?;
    }
    take_old_name(&mut config).map_err(|(key, why)| Error::Range { origin: origin.clone(), key, why })?;
    config.check().map_err(|(key, why)| Error::Range { origin, key, why })?;
    Ok(config)
}

/// Takes `cluster.node`, as `node` was called when the bus alone had it.
fn take_old_name(config: &mut Config) -> Result<(), (&'static str, String)> {
    match (config.cluster.node.take(), &config.node) {
        (Some(old), Some(new)) if old != *new => {
            Err(("cluster.node", format!("{old:?} is not {new:?}, which node says; leave it out")))
        }
        (Some(old), _) => {
            config.node = Some(old);
            Ok(())
        }
        (None, _) => Ok(()),
    }
}

/// Settings from a text. A file without a key is all defaults.
fn parse(text: &str, origin: &str) -> Result<Config, Error> {
    // A file of comments alone is no map.
    let said = text
        .lines()
        .any(|l| !l.trim().is_empty() && !l.trim_start().starts_with(['#', '%']) && l.trim() != "---");
    if !said {
        return Ok(Config::default());
    }
    if let Some(line) = too_many_brackets(text) {
        return Err(Error::Text { message: format!("{origin}:{line}: {BRACKETS}") });
    }
    serde_yaml::from_str(text).map_err(|e| Error::Text { message: shown(text, origin, &e) })
}

/// Brackets that settings may have: `serde_yaml` refuses those that are nested deep, but only after a scan whose time grows
/// with the square of their number. 90,000 take 19 s.
const BRACKETS_MAX: usize = 1024;
const BRACKETS: &str = "more than 1024 brackets; write a list or a map on lines of its own, without brackets";

/// The line in which brackets become too many, from 1; absent where they do not. Those in lines of comments do not count.
fn too_many_brackets(text: &str) -> Option<usize> {
    let lines = text.lines().enumerate().filter(|(_, l)| !l.trim_start().starts_with('#'));
    let mut all = lines.flat_map(|(n, l)| l.bytes().filter(|c| matches!(c, b'{' | b'[')).map(move |_| n + 1));
    all.nth(BRACKETS_MAX)
}

/// An error as people read it: file, line, what, and the line with a mark below.
fn shown(text: &str, origin: &str, e: &serde_yaml::Error) -> String {
    let what = e.to_string();
    let Some(at) = e.location() else { return format!("{origin}: {}", masked(&what, "")) };
    let what = what.rsplit_once(" at line ").map_or(what.as_str(), |(before, _)| before);
    let (line, what) = Keys::new().excerpt(text, at.line().saturating_sub(1), what);
    let number = at.line().to_string();
    // A masked line may be shorter than it was.
    let mark = " ".repeat(at.column().saturating_sub(1).min(line.chars().count()));
    let below = " ".repeat(number.len());
    format!("{origin}:{}:{}: {what}\n {number} | {line}\n {below} | {mark}^", at.line(), at.column())
}

fn apply(config: &Config, origin: &str, keys: &[String], value: &str) -> Result<Config, Error> {
    let wrong = |why: String| Error::Override { origin: origin.to_owned(), why };
    let invalid = |e: serde_yaml::Error| wrong(masked(&e.to_string(), ""));
    if too_many_brackets(value).is_some() {
        return Err(wrong(BRACKETS.to_owned()));
    }
    let value: Value = serde_yaml::from_str(value).map_err(invalid)?;
    let all = serialize_exposed(|| serde_yaml::to_value(config));
    let mut all = all.map_err(|e| Error::Write(e.to_string()))?;
    let mut place = &mut all;
    for (depth, key) in keys.iter().enumerate() {
        let key_path = keys[..=depth].join(".");
        // Users name their tags themselves.
        let free = depth > 0 && matches!(keys[depth - 1].as_str(), "tags" | "headers");
        let Some(map) = place.as_mapping_mut() else {
            return Err(wrong(format!("no such key: {} holds no keys", keys[..depth].join("."))));
        };
        let known: Vec<String> = map.keys().filter_map(|k| k.as_str().map(str::to_owned)).collect();
        if !free && !known.contains(key) {
            return Err(wrong(format!("no such key: {}; there are {}", named(&key_path), known.join(", "))));
        }
        place = map.entry(Value::String(key.clone())).or_insert(Value::Null);
    }
    *place = value;
    serde_yaml::from_value(all).map_err(invalid)
}

/// Settings as YAML, every key. Secrets are masked.
///
/// # Errors
/// None that a setting of ours could cause.
pub fn print(config: &Config) -> Result<String, Error> {
    serde_yaml::to_string(config).map_err(|e| Error::Write(e.to_string()))
}

/// The JSON schema of the file.
///
/// # Errors
/// None that a setting of ours could cause.
pub fn schema() -> Result<String, Error> {
    let schema = schemars::schema_for!(Config);
    let mut text = serde_json::to_string_pretty(&schema).map_err(|e| Error::Write(e.to_string()))?;
    text.push('\n');
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wrong(text: &str) -> String {
        parse(text, "agent.yaml").expect_err("refused").to_string()
    }

    #[test]
    fn what_is_left_out_has_its_default() {
        for text in ["", "# nothing\n", "---\n", "tags: {}\n", "detect:\n  late_times: 5\n"] {
            assert_eq!(parse(text, "x").expect("fine"), Config::default(), "{text:?}");
        }
    }

    #[test]
    fn brackets_without_number_are_refused_before_they_cost_time() {
        let many = "{".repeat(BRACKETS_MAX + 1);
        assert_eq!(wrong(&format!("node: a\ntags: {many}")), format!("agent.yaml:2: {BRACKETS}"));
        let said = apply(&Config::default(), "--set node", &["node".to_owned()], &many);
        assert_eq!(said.expect_err("refused").to_string(), format!("--set node: {BRACKETS}"));
        assert!(parse(&format!("# {many}\nnode: a"), "agent.yaml").is_ok(), "a comment");
    }

    #[test]
    fn an_unknown_key_is_refused_with_file_line_and_key() {
        let said = wrong("segments:\n  keep_mib: 1\n  keep_mibs: 2\n");
        assert!(
            said.starts_with("agent.yaml:3:3: segments: unknown field `keep_mibs`, expected one of"),
            "{said}"
        );
        assert!(said.ends_with("3 |   keep_mibs: ***\n   |   ^"), "{said}");
        let said = wrong("detect:\n  patience_ms: soon\n");
        assert!(
            said.starts_with("agent.yaml:2:16: detect.patience_ms: invalid type: string \"soon\""),
            "{said}"
        );
        let said = wrong("http:\n  listen: nowhere\n");
        assert!(said.contains("agent.yaml:2") && said.contains("invalid socket address"), "{said}");
    }

    #[test]
    fn the_environment_and_the_command_line_override_single_keys() {
        let set = |v: &[(&str, &str)], o: &[&str]| {
            let o: Vec<String> = o.iter().map(|o| (*o).to_owned()).collect();
            let v = v.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned()));
            load(None, &Overrides::default().environment(v).options(&o)?)
        };
        let c = set(
            &[("RINGWATCH_AGENT_DETECT__LATE_TIMES", "7"), ("RINGWATCH_DIR", "/x"), ("HOME", "/")],
            &["http.listen=null", "tags.cluster=east", "limits.cpu=0.5"],
        )
        .expect("fine");
        assert_eq!((c.detect.late_times, c.http.listen, c.limits.cpu), (7, None, 0.5));
        assert_eq!(c.tags.get("cluster").map(String::as_str), Some("east"));
        let c = set(&[("RINGWATCH_AGENT_LIMITS__CPU", "0.1")], &["limits.cpu=0.2"]).expect("fine");
        assert!((c.limits.cpu - 0.2).abs() < 1e-9, "the command line has the last word");
        for (variables, options, said) in [
            (
                vec![("RINGWATCH_AGENT_DETECT__PATIENCE", "7")],
                vec![],
                "RINGWATCH_AGENT_DETECT__PATIENCE: no such key: detect.patience; there are patience_ms",
            ),
            (vec![], vec!["segments.keep_mib=much"], "--set segments.keep_mib: invalid type"),
            (vec![], vec!["limits.cpu=2"], "settings: limits.cpu: 2 is not in 0 to 1"),
            (vec![], vec!["limits"], "--set limits: not KEY=VALUE"),
            (
                vec![],
                vec!["http.listen.port=1"],
                "--set http.listen.port: no such key: http.listen holds no keys",
            ),
        ] {
            let got = set(&variables, &options).expect_err("refused").to_string();
            assert!(got.starts_with(said), "{got}");
        }
    }

    #[test]
    fn what_is_printed_is_read_back() {
        let mut c = Config::default();
        c.tags.insert("cluster".to_owned(), "east".to_owned());
        c.detect.patience_ns = 5_000_000_000;
        assert_eq!(parse(&print(&c).expect("text"), "x").expect("fine"), c);
    }
}
