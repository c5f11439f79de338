//! The agent's settings: the file that comes with the program, its schema, and what is told of wrong ones.

use crate::support::Room;
use ringwatch::config::{self, Config, Overrides};
use serde_yaml::Value;
use std::fs;
use std::path::{Path, PathBuf};

fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
}

fn keys(value: &Value, prefix: &str, out: &mut Vec<String>) {
    let Some(map) = value.as_mapping() else { return };
    for (k, v) in map {
        let name = format!("{prefix}{}", k.as_str().unwrap());
        out.push(name.clone());
        keys(v, &format!("{name}."), out);
    }
}

#[test]
fn the_file_that_comes_with_it_says_the_defaults_and_every_key() {
    let path = file("config/agent.yaml");
    assert_eq!(config::load(Some(&path), &Overrides::default()).unwrap(), Config::default());
    let text = fs::read_to_string(&path).unwrap();
    let (mut shipped, mut all) = (Vec::new(), Vec::new());
    keys(&serde_yaml::from_str(&text).unwrap(), "", &mut shipped);
    keys(&serde_yaml::to_value(Config::default()).unwrap(), "", &mut all);
    assert_eq!(shipped, all, "every key, in the order of the settings");
}

#[test]
fn every_key_of_that_file_is_explained_above_it() {
    let text = fs::read_to_string(file("config/agent.yaml")).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    for (n, line) in lines.iter().enumerate() {
        let key = line.trim_start();
        if key.is_empty() || key.starts_with('#') || key.starts_with('-') {
            continue;
        }
        let above = n.checked_sub(1).map(|i| lines[i].trim_start());
        assert!(above.is_some_and(|a| a.starts_with("# ")), "line {}: {line}", n + 1);
    }
}

#[test]
fn the_schema_is_the_settings_own() {
    let path = file("config/schema.json");
    let schema = config::schema().unwrap();
    if std::env::var_os("INSTA_UPDATE").is_some_and(|v| v == "always") {
        fs::write(&path, &schema).unwrap();
    }
    assert!(
        fs::read_to_string(&path).is_ok_and(|s| s == schema),
        "config/schema.json is not what `ringwatch config schema` prints"
    );
}

/// Standard output, standard error and exit code of `ringwatch config`.
fn said(room: &Room, args: &[&str]) -> (String, String, Option<i32>) {
    let out = room.ringwatch(std::iter::once("config").chain(args.iter().copied())).output().unwrap();
    (String::from_utf8(out.stdout).unwrap(), String::from_utf8(out.stderr).unwrap(), out.status.code())
}

#[test]
fn what_is_wrong_is_told_with_file_line_and_key() {
    let room = Room::new();
    let path = room.path("agent.yaml");
    fs::write(&path, "http:\n  listen: 127.0.0.1:9478\n  port: 9\n").unwrap();
    let name = path.to_str().unwrap();
    let (out, err, code) = said(&room, &["check", "--config", name]);
    assert_eq!((out.as_str(), code), ("", Some(2)));
    assert!(err.starts_with(&format!("ringwatch: {name}:3:3: http: unknown field `port`")), "{err}");
    assert!(err.contains("3 |   port: ***\n   |   ^"), "{err}");
    fs::write(&path, "limits:\n  cpu: 0.5\n").unwrap();
    assert_eq!(said(&room, &["check", "--config", name]).0, format!("{name}: ok\n"));
    let (out, _, code) = said(&room, &["print", "--config", name, "--set", "detect.warm_up=9"]);
    assert_eq!(code, Some(0));
    let printed: Config = serde_yaml::from_str(&out).unwrap();
    assert_eq!((printed.limits.cpu, printed.detect.warm_up), (0.5, 9));
    let (_, err, code) = said(&room, &["check", "--config", "/nonexistent/agent.yaml"]);
    assert_eq!(code, Some(2));
    assert!(err.contains("/nonexistent/agent.yaml: No such file"), "{err}");
}

#[test]
fn the_old_name_of_the_node_is_still_read() {
    let load = |options: &[&str]| {
        let options: Vec<String> = options.iter().map(|o| (*o).to_owned()).collect();
        config::load(None, &Overrides::default().options(&options)?)
    };
    for options in [&["node=a"][..], &["cluster.node=a"], &["cluster.node=a", "node=a"]] {
        let config = load(options).unwrap();
        assert_eq!((config.node.as_deref(), config.cluster.node), (Some("a"), None), "{options:?}");
    }
    let wrong = load(&["cluster.node=a", "node=b"]).unwrap_err().to_string();
    assert!(wrong.contains("cluster.node: \"a\" is not \"b\""), "{wrong}");
    assert!(load(&["node=\"\""]).unwrap_err().to_string().contains("node: \"\" is no name"));
}

#[test]
fn the_examples_are_right() {
    let mut seen = 0;
    let all = fs::read_dir(file("config/examples")).unwrap().map(|e| e.unwrap().path());
    for path in all.filter(|p| p.extension().is_some_and(|e| e == "yaml")) {
        let config = config::load(Some(&path), &Overrides::default());
        assert!(config.is_ok_and(|c| c != Config::default()), "{}", path.display());
        seen += 1;
    }
    assert!(seen > 0);
}
