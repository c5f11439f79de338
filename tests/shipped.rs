//! The files that come with the program: what people copy has to be right, and safe, as it is.

use serde_yaml::Value;
use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Every file below a directory.
fn files(dir: &Path) -> Vec<PathBuf> {
    let mut all = Vec::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() { all.extend(files(&path)) } else { all.push(path) }
    }
    all
}

/// Addresses that a line makes a server listen on, as it writes them. Comments do not listen.
fn listens_on(line: &str) -> Vec<String> {
    let line = line.split("# ").next().unwrap_or_default().trim_start();
    if line.starts_with('#') {
        return Vec::new();
    }
    // An address that means all interfaces is one, whatever the key is called.
    let words = line.split(|c: char| c.is_whitespace() || matches!(c, '"' | '\'' | ',' | '{' | '}'));
    let everywhere =
        words.clone().filter(|w| w.contains("0.0.0.0") || w.contains("[::]") || w.contains("*:"));
    let mut all: Vec<String> = everywhere.map(str::to_owned).collect();
    let keys = ["listen", "http", "host", "monitor_port", "http_port", "hostPort", "ListenStream"];
    let mut rest = line;
    while let Some((key, value)) = rest.split_once([':', '=']) {
        let key = key.trim().rsplit(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or_default();
        if keys.contains(&key) {
            let value = value.trim_start_matches([' ', '"', '\'']);
            let value = value.split(|c: char| c.is_whitespace() || "\"',}".contains(c)).next().unwrap_or("");
            // A key above others has no value of its own, the agent's null is no server, and `http:` begins URLs.
            let is_none = value.is_empty() || value == "null" || value.starts_with("//");
            all.extend((!is_none).then(|| value.to_owned()));
        }
        rest = value;
    }
    all
}

fn is_loopback(address: &str) -> bool {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host).trim_matches(['[', ']']);
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

#[test]
fn every_file_listens_on_the_loopback_alone() {
    let mut seen = Vec::new();
    for path in files(&root().join("config")) {
        // The schema names keys and their types; it sets none.
        if path.ends_with("schema.json") {
            continue;
        }
        for (n, line) in fs::read_to_string(&path).unwrap().lines().enumerate() {
            for address in listens_on(line) {
                assert!(is_loopback(&address), "{}:{}: {address} in {line:?}", path.display(), n + 1);
                seen.push(address);
            }
        }
    }
    // The agent's own, and two of the NATS server.
    for address in ["127.0.0.1:9478", "127.0.0.1:4222", "127.0.0.1:6222"] {
        assert!(seen.iter().any(|s| s == address), "{address} is not among {seen:?}");
    }
}

#[test]
fn addresses_that_others_reach_are_found() {
    for line in [
        "  listen: 0.0.0.0:9478",
        "listen: \"0.0.0.0:4222\"",
        "          args: [agent, --set, \"http.listen=0.0.0.0:9478\"]",
        "http: 8222",
        "  listen: '[::]:9478'",
        "listen: 10.0.0.7:4222",
        "  - {hostPort: 9478}",
        "addr: *:4222",
    ] {
        let all = listens_on(line);
        assert!(!all.is_empty() && !all.iter().all(|a| is_loopback(a)), "{line}: {all:?}");
    }
    for line in
        ["  listen: 127.0.0.1:9478", "listen: localhost:1", "  listen: \"[::1]:9478\"", "# listen: 0.0.0.0:1"]
    {
        assert!(listens_on(line).iter().all(|a| is_loopback(a)), "{line}");
    }
}

fn yaml(name: &str) -> Value {
    serde_yaml::from_str(&fs::read_to_string(root().join(name)).unwrap()).unwrap()
}

#[test]
fn every_yaml_file_is_one() {
    let is_yaml = |p: &PathBuf| p.extension().is_some_and(|e| e == "yaml");
    let all: Vec<PathBuf> = files(&root().join("config")).into_iter().filter(is_yaml).collect();
    assert!(all.len() >= 4, "{all:?}");
    for path in all {
        let read: Result<Value, _> = serde_yaml::from_str(&fs::read_to_string(&path).unwrap());
        assert!(read.as_ref().is_ok_and(Value::is_mapping), "{}: {read:?}", path.display());
    }
}

/// An entry of a list by its name.
fn named<'a>(list: &'a Value, name: &str) -> &'a Value {
    let list = list.as_sequence().unwrap();
    list.iter().find(|e| e["name"] == name).unwrap_or_else(|| panic!("no {name} in {list:?}"))
}

#[test]
fn the_daemonset_sees_the_node_and_is_named_after_it() {
    let set = yaml("config/deploy/daemonset.yaml");
    assert_eq!((set["kind"].as_str(), set["apiVersion"].as_str()), (Some("DaemonSet"), Some("apps/v1")));
    let template = &set["spec"]["template"];
    assert_eq!(set["spec"]["selector"]["matchLabels"], template["metadata"]["labels"]);
    let pod = &template["spec"];
    for key in ["hostPID", "hostNetwork"] {
        assert_eq!(pod[key], true, "{key}");
    }
    assert_eq!(pod["dnsPolicy"], "ClusterFirstWithHostNet");
    let agent = named(&pod["containers"], "agent");
    assert_eq!(agent["args"][0], "agent");
    let node = named(&agent["env"], "RINGWATCH_AGENT_NODE");
    assert_eq!(node["valueFrom"]["fieldRef"]["fieldPath"], "spec.nodeName");
    // The settings' own port, where nobody else reaches it; the kubelet would ask the pod's address.
    let port = ringwatch::config::Config::default().http.listen.unwrap().port();
    for (probe, path) in [("livenessProbe", "/livez"), ("readinessProbe", "/readyz")] {
        let get = &agent[probe]["httpGet"];
        assert_eq!((get["host"].as_str(), get["path"].as_str()), (Some("127.0.0.1"), Some(path)));
        assert_eq!(get["port"].as_u64(), Some(port.into()));
        // The agent takes two seconds to say that its state does not answer.
        assert!(agent[probe]["timeoutSeconds"].as_u64() > Some(2));
    }
    for (mount, path) in [
        ("run", "/run/ringwatch"),
        ("state", "/var/lib/ringwatch"),
        ("shm", "/dev/shm"),
        ("pods", "/var/lib/kubelet/pod-resources"),
    ] {
        assert_eq!(named(&agent["volumeMounts"], mount)["mountPath"], path);
        assert_eq!(named(&pod["volumes"], mount)["hostPath"]["path"], path);
    }
    let security = &agent["securityContext"];
    assert_eq!(security["capabilities"]["drop"][0], "ALL");
    assert_eq!(security["readOnlyRootFilesystem"], true);
    // The unit and the DaemonSet give the same rights.
    let unit = fs::read_to_string(root().join("config/deploy/ringwatch-agent.service")).unwrap();
    let line = unit.lines().find_map(|l| l.strip_prefix("CapabilityBoundingSet=")).unwrap();
    let of_unit: Vec<&str> = line.split(' ').filter_map(|c| c.strip_prefix("CAP_")).collect();
    let of_set = security["capabilities"]["add"].as_sequence().unwrap();
    assert_eq!(of_set.iter().filter_map(Value::as_str).collect::<Vec<_>>(), of_unit);
}
