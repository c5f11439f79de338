//! `ringwatch mcp`: a client that speaks the protocol line by line.

use crate::support::Room;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Stdio};

struct Client {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
    asked: u64,
}

impl Client {
    fn start(room: &Room, arguments: &[&Path]) -> Self {
        let mut command = room.ringwatch(["mcp"]);
        let mut child = command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (to, from) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        let mut client = Client { child, to, from, asked: 0 };
        let about = json!({"name": "test", "version": "1"});
        let said = client.ask(
            "initialize",
            json!({"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": about}),
        );
        assert_eq!(said["result"]["serverInfo"]["name"], "ringwatch", "{said}");
        client.say(&json!({"jsonrpc": "2.0", "method": "notifications/initialized"}));
        client
    }

    fn say(&mut self, message: &Value) {
        writeln!(self.to, "{message}").unwrap();
    }

    fn ask(&mut self, method: &str, params: Value) -> Value {
        self.asked += 1;
        let id = self.asked;
        self.say(&json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params}));
        let mut line = String::new();
        self.from.read_line(&mut line).unwrap();
        let said: Value = serde_json::from_str(&line).unwrap();
        assert_eq!(said["id"], id, "{said}");
        said
    }

    /// The answer of a tool: whether it is an error, and the answer.
    fn call(&mut self, tool: &str, arguments: Value) -> (bool, Value) {
        let said = self.ask("tools/call", json!({"name": tool, "arguments": arguments}));
        let result = &said["result"];
        (
            result["isError"] == true,
            result.get("structuredContent").unwrap_or(&result["content"][0]["text"]).clone(),
        )
    }

    fn end(mut self) {
        drop(self.to);
        assert_eq!(self.child.wait().unwrap().code(), Some(0));
    }
}

fn recording() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/recordings/missing")
}

#[test]
fn an_assistant_is_told_what_diagnose_and_report_show() {
    let room = Room::new();
    let mut client = Client::start(&room, &["--replay".as_ref(), &recording()]);
    let said = client.ask("tools/list", json!({}));
    let tools = said["result"]["tools"].as_array().unwrap();
    let names: Vec<&str> = tools.iter().map(|t| t["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["findings", "report", "in_flight", "explain"]);
    assert!(tools.iter().all(|t| t["annotations"]["readOnlyHint"] == true), "{tools:#?}");

    let (is_error, said) = client.call("findings", json!({"open": true}));
    assert!(!is_error, "{said}");
    let found = said["findings"].as_array().unwrap();
    assert_eq!(
        (found.len(), &found[0]["kind"], &found[0]["ranks"]),
        (1, &json!("missing-rank"), &json!([1]))
    );
    assert_eq!((&said["processes"], &said["more"]), (&json!(2), &json!(0)));
    assert_eq!(client.call("findings", json!({"kind": "straggler"})).1["findings"], json!([]));

    let (_, page) = client.call("report", json!({}));
    assert!(page.as_str().unwrap().contains("steps of rank"), "{page}");
    let (_, pages) = client.call("report", json!({"json": true}));
    assert_eq!(pages["jobs"][0]["steps"][0]["job_rank"], 0, "{pages}");
    let (_, said) = client.call("in_flight", json!({}));
    assert_eq!(said["in_flight"][0]["order"], 1_332, "{said}");
    let (_, said) = client.call(
        "explain",
        json!({"text": "NCCL WARN Error: remote process exited or there was a network error"}),
    );
    assert!(!said["explained"].as_array().unwrap().is_empty(), "{said}");
    client.end();
}

#[test]
fn what_is_asked_wrongly_is_said_and_ends_nothing() {
    let room = Room::new();
    let mut client = Client::start(&room, &[&room.path("absent")]);
    let texts = [
        ("findings", json!({}), "absent"),
        ("findings", json!({"open": 3}), "open is true or false"),
        ("explain", json!({}), "text is needed"),
        ("delete", json!({}), "there is no tool delete"),
    ];
    for (tool, arguments, expected) in texts {
        let (is_error, said) = client.call(tool, arguments);
        assert!(is_error && said.as_str().unwrap().contains(expected), "{tool}: {said}");
    }
    let said = client.ask("no/such/method", json!({}));
    assert!(said["error"]["code"].is_i64(), "{said}");
    client.end();
}
