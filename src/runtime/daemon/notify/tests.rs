use super::*;
use crate::model::{CommId, FindingId, Kind, OperationRef, Rank, Severity, Track};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::sync::mpsc;
use std::time::Instant;

fn event(id: u64, kind: Kind, severity: Severity) -> FindingEvent {
    let operation = OperationRef::named("AllReduce", Track::Collective, 5);
    let mut finding = Finding::new(kind, CommId::unowned(7), vec![Rank(3)], operation);
    (finding.id, finding.severity) = (FindingId(id), severity);
    FindingEvent { change: Change::Opened, finding }
}

/// A server that answers with these statuses one after the other, and what it was sent.
fn server(statuses: &'static [&'static str]) -> (String, mpsc::Receiver<(String, serde_json::Value)>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("http://{}/hook/secret", listener.local_addr().expect("its address"));
    let (tell, told) = mpsc::channel();
    std::thread::spawn(move || {
        for status in statuses {
            let (stream, _) = listener.accept().expect("a request");
            let mut reader = BufReader::new(stream);
            let mut head = String::new();
            while reader.read_line(&mut head).expect("a line") > 2 {}
            let length =
                head.lines().find_map(|l| l.to_lowercase().strip_prefix("content-length: ")?.parse().ok());
            let mut body = vec![0; length.expect("its length")];
            reader.read_exact(&mut body).expect("a body");
            // The body of an answer that is taken never ends.
            let length = if status.starts_with("200") { 1 } else { 0 };
            let answer = format!("HTTP/1.1 {status}\r\ncontent-length: {length}\r\n\r\n");
            reader.get_mut().write_all(answer.as_bytes()).expect("an answer");
            tell.send((head, serde_json::from_slice(&body).expect("JSON"))).ok();
            if length > 0 {
                std::mem::forget(reader);
            }
        }
    });
    (url, told)
}

fn settings(text: &str) -> Settings {
    let settings: Settings = serde_yaml::from_str(text).expect("settings");
    settings.check().expect("right");
    settings
}

/// The counts of notices that were sent, failed, were refused and still wait, after these events.
fn after(settings: &Settings, events: &[FindingEvent]) -> [u64; 4] {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime");
    let (mut notifier, sending) =
        runtime.block_on(async { Notifier::start(settings, "n1").expect("TLS").expect("a receiver") });
    events.iter().for_each(|e| notifier.event(&Join::new(), e));
    let counts = Arc::clone(&notifier.counts);
    drop(notifier);
    runtime.block_on(sending.end(Duration::from_secs(30)));
    [&counts.sent, &counts.failed, &counts.refused, &counts.queued].map(|c| c.load(Ordering::Relaxed))
}

#[test]
fn a_webhook_that_is_busy_is_called_again_and_one_that_refuses_is_not() {
    let (url, told) = server(&["503 Busy", "200 OK", "404 Not Found"]);
    let settings = settings(&format!("webhooks: [{{url: '{url}', headers: {{x-a: b}}}}]"));
    let hang = event(1, Kind::MissingRank, Severity::Critical);
    let info = event(2, Kind::TinyCollectives, Severity::Info);
    let late = event(3, Kind::Straggler, Severity::Warning);
    assert_eq!(after(&settings, &[hang, info, late]), [1, 0, 1, 0]);
    let all: Vec<_> = told.iter().collect();
    let kinds: Vec<_> = all.iter().map(|(_, b)| b["finding"]["kind"].as_str().unwrap_or("")).collect();
    assert_eq!(
        kinds,
        ["missing-rank", "missing-rank", "straggler"],
        "no info, and nothing twice that was taken"
    );
    let head = &all[0].0;
    assert!(head.starts_with("POST /hook/secret HTTP/1.1") && head.contains("x-a: b"), "{head}");
}

#[test]
fn a_program_reads_the_finding_and_one_that_fails_or_hangs_is_counted() {
    let room = tempfile::tempdir().expect("a folder");
    let (file, pid) = (room.path().join("out"), room.path().join("pid"));
    let text = format!(
        "commands:\n- {{program: /bin/sh, arguments: ['-c', 'echo $RINGWATCH_KIND $CARGO_MANIFEST_DIR > {0}; cat >> {0}']}}\n\
         - {{program: /bin/sh, arguments: ['-c', 'exit 3'], severity: critical}}\n\
         - {{program: /bin/sh, arguments: ['-c', 'sleep 60 & echo $! > {1}; wait'], timeout_ms: 500}}\n\
         - {{program: /nonexistent}}\n",
        file.display(),
        pid.display()
    );
    let late = event(3, Kind::Straggler, Severity::Warning);
    assert_eq!(after(&settings(&text), &[late]), [1, 1, 1, 0], "the second is for what is critical");
    let written = std::fs::read_to_string(&file).expect("it was started");
    let (kind, json) = written.split_once('\n').expect("two lines");
    let json: serde_json::Value = serde_json::from_str(json).expect("JSON");
    assert_eq!(
        (kind, &json["change"]),
        ("straggler", &serde_json::json!("opened")),
        "without the agent's variables"
    );
    // The process that the program had started ends with it, once the kernel has delivered the signal.
    let pid: i32 = std::fs::read_to_string(&pid).expect("it was started").trim().parse().expect("a number");
    let is_gone = || {
        let state = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        state.is_empty() || state.contains(") Z ")
    };
    let deadline = Instant::now() + Duration::from_secs(30);
    while !is_gone() {
        assert!(Instant::now() < deadline, "{pid} still runs");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn the_jobs_of_one_user_leave_room_for_others_and_a_finding_waits_once() {
    let counts = Arc::new(NoticeCounts::default());
    let queue =
        Queue { state: Mutex::default(), wake: tokio::sync::Notify::new(), counts: Arc::clone(&counts) };
    let mut notices = Notices::new("n1".to_owned(), notify::Least::Warning);
    let mut notice = |id: u64, change: Change, owner: u32| {
        let event = FindingEvent { change, ..event(id, Kind::Straggler, Severity::Warning) };
        let notice = notices.of(&Join::new(), &event).expect("a notice");
        Notice { owner: Some(owner), ..notice }
    };
    let taken = (0..100).filter(|id| queue.push(notice(*id, Change::Opened, 1000))).count();
    assert_eq!((taken, queue.push(notice(200, Change::Opened, 1001))), (OF_USER_MAX, true));
    assert!(queue.push(notice(0, Change::Closed, 1000)), "neither its beginning nor its end is sent");
    assert!(queue.push(notice(300, Change::Opened, 1000)), "which makes room");
    let n = |c: &AtomicU64| c.load(Ordering::Relaxed);
    assert_eq!((n(&counts.full), n(&counts.queued)), (36, 65));
    assert_eq!(queue.change(|q| q.waiting.len()), 65);
}
