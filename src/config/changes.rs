//! The differences between two settings, key by key.

use super::{Config, Error};
use crate::secret::serialize_exposed;
use serde_yaml::Value;
use std::collections::BTreeMap;
use std::fmt;

/// One key whose value differs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// The key's path, `http.listen` for example.
    pub key: String,
    /// Both values as text, masked where they are secret; absent keys have none.
    from: Option<String>,
    to: Option<String>,
}

impl Change {
    /// True for a key that is this one, or lies below it.
    pub fn is_below(&self, key: &str) -> bool {
        self.key.strip_prefix(key).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
    }
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = |value: &Option<String>| value.clone().unwrap_or_else(|| "nothing".to_owned());
        if self.from == self.to {
            // The masks are equal, and what is behind them is not.
            write!(f, "{} (a secret)", self.key)
        } else {
            write!(f, "{}: {} -> {}", self.key, shown(&self.from), shown(&self.to))
        }
    }
}

/// The keys that differ, sorted.
///
/// # Errors
/// None that a setting of ours could cause.
pub fn changes(old: &Config, new: &Config) -> Result<Vec<Change>, Error> {
    let (exposed, masked) = (serialize_exposed(|| pair(old, new))?, pair(old, new)?);
    let keys = exposed.0.iter().chain(&exposed.1).map(|(key, _)| key);
    let mut keys: Vec<&String> = keys.filter(|k| exposed.0.get(*k) != exposed.1.get(*k)).collect();
    keys.sort();
    keys.dedup();
    let text = |leaves: &Leaves, key: &String| leaves.get(key).map(shown);
    let change =
        |key: &String| Change { key: key.clone(), from: text(&masked.0, key), to: text(&masked.1, key) };
    Ok(keys.into_iter().map(change).collect())
}

type Leaves = BTreeMap<String, Value>;

fn pair(old: &Config, new: &Config) -> Result<(Leaves, Leaves), Error> {
    let leaves = |config: &Config| {
        let tree = serde_yaml::to_value(config).map_err(|e| Error::Write(e.to_string()))?;
        let mut leaves = Leaves::new();
        flatten(tree, "", &mut leaves);
        Ok(leaves)
    };
    Ok((leaves(old)?, leaves(new)?))
}

/// Every value that is no map, by its path.
fn flatten(value: Value, path: &str, leaves: &mut Leaves) {
    let Value::Mapping(map) = value else {
        leaves.insert(path.to_owned(), value);
        return;
    };
    for (key, value) in map {
        let key = key.as_str().unwrap_or_default();
        let path = if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") };
        flatten(value, &path, leaves);
    }
}

/// A value on one line.
fn shown(value: &Value) -> String {
    serde_json::to_string(value).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(text: &str) -> Config {
        serde_yaml::from_str(text).expect("settings")
    }

    fn between(old: &str, new: &str) -> Vec<String> {
        changes(&config(old), &config(new)).expect("trees").iter().map(Change::to_string).collect()
    }

    #[test]
    fn every_key_that_differs_is_named_with_both_values() {
        assert_eq!(between("stacks: python", "{}"), [""; 0], "it is the default");
        let got = between(
            "{detect: {patience_ms: 5000}, tags: {a: x, b: y}, baselines: [/a]}",
            "{http: {listen: null}, tags: {b: z, c: w}}",
        );
        assert_eq!(
            got,
            [
                "baselines: [\"/a\"] -> []",
                "detect.patience_ms: 5000 -> 3000",
                "http.listen: \"127.0.0.1:9478\" -> null",
                "tags.a: \"x\" -> nothing",
                "tags.b: \"y\" -> \"z\"",
                "tags.c: nothing -> \"w\"",
            ]
        );
    }

    #[test]
    fn changed_secrets_are_named_and_not_shown() {
        let old =
            "{cluster: {servers: [nats://u:p4ss@h]}, otlp: {endpoint: http://u:p4ss@h, headers: {a: p4ss}}}";
        let new =
            "{cluster: {servers: [nats://u:w0rd@h]}, otlp: {endpoint: http://u:w0rd@i, headers: {a: w0rd}}}";
        assert_eq!(
            between(old, new),
            [
                "cluster.servers (a secret)",
                "otlp.endpoint: \"http://***@h\" -> \"http://***@i\"",
                "otlp.headers.a (a secret)",
            ]
        );
    }

    #[test]
    fn a_key_is_below_itself_and_its_section() {
        let change = Change { key: "cluster.stacks".to_owned(), from: None, to: None };
        assert!(change.is_below("cluster") && change.is_below("cluster.stacks"));
        assert!(
            !change.is_below("clus") && !change.is_below("cluster.stacks.x") && !change.is_below("stacks")
        );
    }
}
