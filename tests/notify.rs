//! Receivers of findings: a real agent with a recorded job, and the programs that come with it.

use crate::support::agent::Agent;
use crate::support::{Play, Players, Room};
use serde_json::Value;
use std::fs::{self, Permissions};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

/// A server that takes everything, and what it is sent: path and body.
fn server() -> (String, Receiver<(String, Value)>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("http://{}", listener.local_addr().expect("its address"));
    let (tell, told) = channel();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut reader = BufReader::new(stream.expect("a connection"));
            let mut head = String::new();
            while reader.read_line(&mut head).unwrap_or(0) > 2 {}
            let length =
                head.lines().find_map(|l| l.to_lowercase().strip_prefix("content-length: ")?.parse().ok());
            let mut body = vec![0; length.expect("its length")];
            reader.read_exact(&mut body).expect("a body");
            let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
            reader.get_mut().write_all(answer).expect("an answer");
            let path = head.split(' ').nth(1).unwrap_or("").to_owned();
            tell.send((path, serde_json::from_slice(&body).expect("JSON"))).ok();
        }
    });
    (url, told)
}

#[test]
fn receivers_hear_of_a_hang_whose_it_is_and_when_it_is_over() {
    let room = Room::new();
    let (url, told) = server();
    let (file, called) = (room.path("agent.yaml"), room.path("called"));
    let text = format!(
        "notify:\n  webhooks:\n  - {{url: '{url}/json'}}\n  - {{url: '{url}/slack', format: slack, severity: critical}}\n  \
         - {{url: '{url}/pager', format: pagerduty, routing_key: secret-key}}\n  - {{url: 'http://127.0.0.1:1/secret-path'}}\n  commands:\n  \
         - {{program: /bin/sh, arguments: ['-c', 'echo $RINGWATCH_CHANGE $RINGWATCH_KIND >> {}']}}\n",
        called.display()
    );
    fs::write(&file, text).expect("settings");
    let agent = Agent::start(&room, &["--config", file.to_str().expect("a name")]);
    let players = Players::start(&room, Play::of("missing-rank").hold(60));
    let mut all: Vec<(String, Value)> = Vec::new();
    let mut hear_until = |what: &str, is_it: &dyn Fn(&str, &Value) -> bool| {
        while !all.iter().any(|(path, body)| is_it(path, body)) {
            let next = told.recv_timeout(Duration::from_secs(60));
            all.push(next.unwrap_or_else(|_| panic!("{what} does not come: {all:?}")));
        }
        all.clone()
    };
    let is_hang = |body: &Value| body["finding"]["kind"] == "missing-rank";
    hear_until("the hang", &|path, body| {
        path == "/json" && is_hang(body) && body["finding"]["severity"] == "critical"
    });
    hear_until("the line", &|path, body| {
        path == "/slack" && body["text"].as_str().is_some_and(|t| t.starts_with("[critical] "))
    });
    let all = hear_until("the hang", &|path, body| path == "/json" && is_hang(body));
    let hang = all.into_iter().find(|(path, body)| path == "/json" && is_hang(body)).expect("it").1;
    let id = &hang["finding"]["id"];
    assert_eq!((&hang["change"], &hang["version"]), (&"opened".into(), &1.into()));
    assert_eq!(hang["named"][0]["job_rank"], 3, "{hang}");
    drop(players);
    let all = hear_until("the end of the hang", &|path, body| {
        path == "/pager" && body["event_action"] == "resolve" && body["dedup_key"] == *id
    });
    let incidents: Vec<_> =
        all.iter().filter(|(path, b)| path == "/pager" && b["dedup_key"] == *id).collect();
    assert_eq!(incidents.first().expect("one").1["event_action"], "trigger", "{incidents:?}");
    assert!(all.iter().all(|(_, body)| body["finding"]["severity"] != "info"), "{all:?}");
    let (status, metrics) = agent.get("/metrics");
    assert_eq!(status, 200);
    let of_notices =
        |l: &&str| l.starts_with("ringwatch_exported_total{") && l.contains("signal=\"notices\"");
    let line = metrics.lines().find(of_notices).expect("a series");
    let sent: f64 = line.rsplit(' ').next().and_then(|n| n.parse().ok()).expect("a number");
    assert!(sent >= all.len() as f64, "{sent} of {all:?}");
    let (log, code) = agent.end();
    assert_eq!(code, Some(0), "{log}");
    let called = fs::read_to_string(&called).expect("the program was started");
    assert!(called.lines().any(|l| l == "opened missing-rank"), "{called}");
    assert!(!log.contains("secret"), "{log}");
}

/// Runs a program of `config/examples/hooks` for a finding, with this folder's programs before all others.
fn runs(name: &str, arguments: &[&str], programs: &Path, variables: &[(&str, &str)]) -> Output {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("config/examples/hooks").join(name);
    let path = format!("{}:{}", programs.display(), std::env::var("PATH").expect("a PATH"));
    let usual = [
        ("RINGWATCH_CHANGE", "opened"),
        ("RINGWATCH_KIND", "missing-rank"),
        ("RINGWATCH_SEVERITY", "critical"),
        ("RINGWATCH_JOB", "train \"7\" $(reboot)"),
        ("RINGWATCH_UID", "1000"),
        ("RINGWATCH_JOB_RANK", "12"),
        ("RINGWATCH_HOST", "n7"),
        ("RINGWATCH_OPEN_ON_HOST", "1"),
        ("RINGWATCH_SUMMARY", "train: missing-rank, rank 12 on n7"),
    ];
    let mut command = Command::new(file);
    command
        .args(arguments)
        .envs(usual)
        .envs(variables.iter().copied())
        .env("PATH", path)
        .stdin(Stdio::null());
    command.output().expect("it starts")
}

/// The same, which has to succeed.
fn hook(name: &str, arguments: &[&str], programs: &Path, variables: &[(&str, &str)]) {
    let said = runs(name, arguments, programs, variables);
    assert!(said.status.success(), "{name}: {}", String::from_utf8_lossy(&said.stderr));
}

#[test]
fn slurm_drains_the_node_that_a_finding_names() {
    let room = Room::new();
    let (bin, asked) = (room.path("bin"), room.path("asked"));
    fs::create_dir(&bin).expect("a folder");
    // Job 41 is one of user 1000.
    let answer = "case \"$*\" in *--jobs=41*--user=1000*) echo 41 ;; esac";
    for (name, answer) in [("scontrol", ""), ("squeue", answer)] {
        let text = format!(
            "#!/bin/sh\nfor a in {name} \"$@\"; do echo \"$a\"; done >> {}\n{answer}\n",
            asked.display()
        );
        fs::write(bin.join(name), text).expect("a program");
        fs::set_permissions(bin.join(name), Permissions::from_mode(0o755)).expect("it can be started");
    }
    let calls = || fs::read_to_string(&asked).unwrap_or_default();
    let job = ("RINGWATCH_JOB", "slurm-41");
    hook("slurm-drain", &["requeue"], &bin, &[("RINGWATCH_HOST", "n7.example.com"), job]);
    let drain = "scontrol\nupdate\nnodename=n7\nstate=drain\nreason=ringwatch: missing-rank, rank 12\n";
    assert!(calls().starts_with(drain) && calls().ends_with("scontrol\nrequeue\n41\n"), "{}", calls());
    for (arguments, variables) in [
        (&["requeue"][..], [job, ("RINGWATCH_UID", "1001")]),
        (&["requeue"], [("RINGWATCH_JOB", "slurm-41,42"), ("RINGWATCH_UID", "1000")]),
        (&[], [job, ("RINGWATCH_UID", "1000")]),
    ] {
        fs::write(&asked, "").expect("emptied");
        hook("slurm-drain", arguments, &bin, &variables);
        assert!(calls().starts_with("scontrol\nupdate\n"), "{}", calls());
        assert!(!calls().contains("requeue"), "{variables:?}: {}", calls());
    }
    fs::write(&asked, "").expect("emptied");
    hook("slurm-drain", &[], &bin, &[("RINGWATCH_CHANGE", "closed")]);
    hook("slurm-drain", &[], &bin, &[("RINGWATCH_HOST", "")]);
    assert!(!runs("slurm-drain", &[], &bin, &[("RINGWATCH_HOST", "n[1-4000]")]).status.success());
    assert_eq!(calls(), "", "an end, no host, and a range of hosts drain nothing");
}

#[test]
fn kubernetes_is_told_of_a_node_that_a_finding_names() {
    let room = Room::new();
    let (url, told) = server();
    let api = ("KUBERNETES_API", url.as_str());
    for (change, open, status) in [("opened", "1", "True"), ("closed", "1", "True"), ("closed", "0", "False")]
    {
        let variables = [api, ("RINGWATCH_CHANGE", change), ("RINGWATCH_OPEN_ON_HOST", open)];
        hook("kubernetes-condition", &[], &room.path("none"), &variables);
        let (path, body) = told.recv_timeout(Duration::from_secs(20)).expect("a request");
        assert_eq!(path, "/api/v1/nodes/n7/status");
        let condition = &body["status"]["conditions"][0];
        assert_eq!((&condition["type"], &condition["status"]), (&"RingwatchFinding".into(), &status.into()));
        assert_eq!(condition["reason"], "MissingRank");
        assert_eq!(condition["message"], "critical in train 7 reboot, rank 12");
    }
    for host in ["x/../../namespaces/a/pods/p?", "n[1-9]", "-x"] {
        let said = runs("kubernetes-condition", &[], &room.path("none"), &[api, ("RINGWATCH_HOST", host)]);
        assert!(!said.status.success(), "{host}");
    }
    assert!(told.try_recv().is_err(), "nothing else was asked");
}
