//! `ringwatch report` in its forms: a page in a browser, tables, a timeline. Their source are recordings of real jobs on two H200s.

mod protobuf;

use crate::support::skip::skipped;
use crate::support::{Room, Said, run};
use parquet::file::reader::{FileReader, SerializedFileReader};
use protobuf::{Field, fields};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

fn recording(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

/// Makes a report of a recording.
fn report(room: &Room, name: &str, format: &str) -> PathBuf {
    let file = room.path(&format!("{}.{format}", name.replace('/', "-")));
    let said = report_to(room, name, format, &file);
    assert_eq!((said.code, &*said.out, &*said.err), (Some(0), "", ""));
    file
}

fn report_to(room: &Room, name: &str, format: &str, file: &Path) -> Said {
    let mut command = room.ringwatch(["report", "--format", format, "--replay"]);
    run(command.arg(recording(name)).arg("-o").arg(file))
}

/// axe-core, where .ci/run has installed it.
fn axe() -> Option<PathBuf> {
    let found = fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("target/axe/lib")).ok()?;
    let mut places =
        found.filter_map(|e| Some(e.ok()?.path().join("site-packages/axe_core_python/axe.min.js")));
    places.find(|path| path.is_file())
}

/// What a page says of itself in a browser: `SCRIPT` below makes it.
struct Visit {
    result: Value,
    console: Vec<String>,
}

/// Counts what is drawn on each chart, and asks axe-core about both themes.
const SCRIPT: &str = r##"
const refused = [];
addEventListener("securitypolicyviolation", (event) => refused.push(event.blockedURI));
addEventListener("load", async () => {
  const out = { charts: [], faults: [], requests: [] };
  const inked = (canvas) => {
    const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
    let inked = 0;
    for (let at = 3; at < pixels.length; at += 4) inked += pixels[at] > 0;
    return inked;
  };
  for (const theme of ["light", "dark"]) {
    if (document.documentElement.dataset.theme !== theme) document.getElementById("theme").click();
    for (const chart of document.querySelectorAll(".chart")) {
      const canvases = [...chart.querySelectorAll("canvas")];
      out.charts.push({
        theme, chart: chart.dataset.chart, points: Number(chart.dataset.points),
        inked: canvases.reduce((sum, canvas) => sum + inked(canvas), 0),
      });
    }
    const found = await axe.run(document);
    for (const v of found.violations) out.faults.push([theme, v.impact, v.id, v.nodes[0].html].join(": "));
  }
  const select = document.querySelector("select[data-job]");
  if (select && select.options.length > 1) {
    select.value = "1";
    select.dispatchEvent(new Event("change"));
    out.picked = document.querySelector(".chart.slowest").dataset.points;
  }
  out.requests = [...refused, ...performance.getEntriesByType("resource").map((entry) => entry.name)];
  const pre = document.createElement("pre");
  pre.id = "visit";
  pre.textContent = "BEGIN" + btoa(unescape(encodeURIComponent(JSON.stringify(out)))) + "END";
  document.body.append(pre);
});
"##;

fn visit(room: &Room, page: &Path, axe: &Path) -> Visit {
    let html = fs::read_to_string(page).unwrap();
    let watched = room.path("watched.html");
    let scripts =
        format!("<script>{}</script><script>{SCRIPT}</script></body>", fs::read_to_string(axe).unwrap());
    let (before, after) = html.rsplit_once("</body>").unwrap();
    fs::write(&watched, format!("{before}{scripts}{after}")).unwrap();
    let mut command = Command::new("chromium");
    command
        .args([
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            "--disable-background-networking",
        ])
        .args(["--disable-component-update", "--disable-sync", "--window-size=1200,900", "--dump-dom"])
        // The browser's own errands go nowhere.
        .args(["--virtual-time-budget=30000", "--enable-logging=stderr", "--proxy-server=127.0.0.1:9"])
        .arg(format!("--user-data-dir={}", room.path("profile").display()))
        .arg(format!("file://{}", watched.display()));
    let said = run(&mut command);
    let dom = &said.out;
    let text = dom.rsplit_once("BEGIN").and_then(|(_, rest)| rest.split_once("END")).map(|(text, _)| text);
    let text = text.unwrap_or_else(|| panic!("the page did not come to its end: {}", said.err));
    let console = said.err.lines().filter(|l| l.contains(":CONSOLE")).map(str::to_owned).collect();
    use base64::Engine as _;
    let json = base64::engine::general_purpose::STANDARD.decode(text).unwrap();
    Visit { result: serde_json::from_slice(&json).unwrap(), console }
}

#[test]
fn every_chart_has_data_and_the_page_loads_nothing_and_has_no_fault() {
    let room = Room::new();
    let has_browser = Command::new("chromium").arg("--version").output().is_ok();
    let Some(axe) = axe().filter(|_| has_browser) else {
        return skipped("report::every_chart_has_data", "chromium, and axe-core-python in target/axe");
    };
    for (name, charts) in [
        ("steps/ddp", &["steps", "share", "waited", "held", "bandwidth", "latency", "slowest"][..]),
        ("recordings/missing", &["steps", "share", "waited", "held", "bandwidth", "latency", "slowest"][..]),
        ("steps/inference", &["steps", "share", "waited", "held", "bandwidth", "latency", "slowest"][..]),
    ] {
        let page = report(&room, name, "html");
        let seen = visit(&room, &page, &axe);
        assert_eq!(seen.console, [""; 0], "{name}");
        assert_eq!(seen.result["requests"], Value::Array(vec![]), "{name}: {:#}", seen.result);
        assert_eq!(seen.result["faults"], Value::Array(vec![]), "{name}: {:#}", seen.result);
        for theme in ["light", "dark"] {
            let all = seen.result["charts"].as_array().unwrap();
            let own: Vec<&Value> = all.iter().filter(|c| c["theme"] == theme).collect();
            let drawn: Vec<&str> = own.iter().map(|c| c["chart"].as_str().unwrap()).collect();
            assert_eq!(drawn, charts, "{name}");
            for chart in own {
                let (points, inked) = (chart["points"].as_u64(), chart["inked"].as_u64());
                assert!(points > Some(0) && inked > Some(500), "{name}: {chart}");
            }
        }
        assert!(seen.result["picked"].as_str().is_some_and(|n| n != "0"), "{name}: {:#}", seen.result);
    }
}

/// The rows of a table in CSV.
fn rows(lines: &str) -> Vec<BTreeMap<&str, &str>> {
    let mut lines = lines.lines();
    let heads: Vec<&str> = lines.next().unwrap().split(',').collect();
    lines.map(|line| heads.iter().copied().zip(line.split(',')).collect()).collect()
}

/// The charts' data in a page.
fn data(html: &str) -> Value {
    let text = html.split_once("id=\"data\">").unwrap().1.split_once("</script>").unwrap().0;
    serde_json::from_str(text).unwrap()
}

#[test]
fn the_share_of_time_in_nccl_is_that_of_the_kernels_in_the_table() {
    let room = Room::new();
    // All of its operations are timed, and transfers run beside each other.
    let lines = fs::read_to_string(report(&room, "steps/pipeline", "csv")).unwrap();
    let html = fs::read_to_string(report(&room, "steps/pipeline", "html")).unwrap();
    let charts = &data(&html)[0];
    for rank in ["0", "1"] {
        let own = rows(&lines).into_iter().filter(|row| row["job_rank"] == rank);
        let spans = own.filter_map(|row| Some((row["started"].parse().ok()?, row["ended"].parse().ok()?)));
        let mut spans: Vec<(u64, u64)> = spans.collect();
        spans.sort_unstable();
        let (mut union_ns, mut until) = (0, 0);
        for (from, to) in spans {
            union_ns += to.saturating_sub(from.max(until));
            until = until.max(to);
        }
        let series = charts["ranks"].as_array().unwrap().iter().find(|r| r["label"] == rank).unwrap();
        let shares = series["in_nccl"].as_array().unwrap().iter().filter_map(Value::as_f64).sum::<f64>();
        let charted_ms = shares * charts["bin_ms"].as_f64().unwrap();
        let union_ms = union_ns as f64 / 1e6;
        assert!((charted_ms / union_ms - 1.0).abs() < 0.03, "rank {rank}: {charted_ms} of {union_ms} ms");
    }
}

#[test]
fn a_rank_that_others_wait_for_at_the_end_is_in_the_charts_and_in_the_table() {
    let room = Room::new();
    let html = fs::read_to_string(report(&room, "recordings/missing", "html")).unwrap();
    let charts = &data(&html)[0];
    let bin_s = charts["bin_ms"].as_f64().unwrap() / 1e3;
    let sum = |rank: usize, of: &str| {
        let all = charts["ranks"][rank][of].as_array().unwrap().iter();
        all.filter_map(Value::as_f64).sum::<f64>() * bin_s
    };
    // Rank 0 has waited for 5.5 s when the recording ends.
    assert!((5.0..6.5).contains(&sum(1, "held")), "{}", sum(1, "held"));
    assert!((5.0..6.5).contains(&sum(0, "waited")), "{}", sum(0, "waited"));
    let lines = fs::read_to_string(report(&room, "recordings/missing", "csv")).unwrap();
    let open =
        rows(&lines).into_iter().find(|row| row["issue_order"] == "1332" && row["bytes"] == "16777216");
    let open = open.expect("the operation that hangs");
    assert_eq!((open["rank"], open["is_finished"], open["ended"]), ("0", "0", ""));
}

#[test]
fn a_device_stays_one_and_a_link_leads_to_the_file() {
    let room = Room::new();
    let said = report_to(&room, "recordings/missing", "md", Path::new("/dev/null"));
    assert_eq!((said.code, &*said.err), (Some(0), ""));
    assert!(!fs::metadata("/dev/null").unwrap().file_type().is_file());
    let (target, link) = (room.path("target.md"), room.path("link.md"));
    fs::write(&target, "old").unwrap();
    std::os::unix::fs::symlink(&target, &link).unwrap();
    assert_eq!(report_to(&room, "recordings/missing", "md", &link).code, Some(0));
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    assert!(fs::read_to_string(&target).unwrap().starts_with("# Ringwatch report"));
}

#[test]
fn a_document_begins_with_the_verdict() {
    let room = Room::new();
    let html = fs::read_to_string(report(&room, "recordings/missing", "html")).unwrap();
    let verdict = html.find("missing-rank: rank 1 in AllReduce").expect("the finding");
    assert!(verdict < html.find("<h2 id=\"job-0\">").expect("the job"));
    assert!(html.contains("py-spy dump --pid 2886"), "the next command");
    let text = fs::read_to_string(report(&room, "recordings/missing", "md")).unwrap();
    assert!(text.contains("### warning: missing-rank: rank 1 in AllReduce"), "{text}");
    assert!(text.contains("| AllReduce | 2 | 16 MiB | RING/SIMPLE |"), "{text}");
    let healthy = fs::read_to_string(report(&room, "steps/ddp", "md")).unwrap();
    assert!(healthy.contains("No findings.") && healthy.contains("| 0 | vm |"), "{healthy}");
}

#[test]
fn csv_and_parquet_have_the_same_rows() {
    let room = Room::new();
    let lines = fs::read_to_string(report(&room, "recordings/missing", "csv")).unwrap();
    let rows = rows(&lines);
    let number = |row: &BTreeMap<&str, &str>, head: &str| row[head].parse::<i64>().ok();
    let file = fs::File::open(report(&room, "recordings/missing", "parquet")).unwrap();
    let reader = SerializedFileReader::new(file).unwrap();
    assert_eq!(reader.metadata().file_metadata().num_rows(), rows.len() as i64);
    for (row, own) in reader.get_row_iter(None).unwrap().zip(&rows) {
        for (head, value) in row.unwrap().get_column_iter() {
            let text = match value {
                parquet::record::Field::Null => String::new(),
                parquet::record::Field::Str(text) => text.clone(),
                other => other.to_string(),
            };
            // Times have other texts.
            if !["called", "issued", "started", "ended"].contains(&&**head) {
                assert_eq!(text, own[&**head], "{head}");
            }
        }
    }
    let timed: Vec<_> = rows.iter().filter(|row| !row["started"].is_empty()).collect();
    assert!(timed.len() > 500 && timed.len() < rows.len(), "{} of {}", timed.len(), rows.len());
    for row in timed {
        let took = number(row, "ended").zip(number(row, "started")).map(|(end, start)| end - start);
        assert_eq!(took, number(row, "duration_ns"), "{row:?}");
        assert!(number(row, "waited_ns") <= number(row, "duration_ns"), "{row:?}");
        assert!(["0", "1"].contains(&row["rank"]) && row["host"] == "vm", "{row:?}");
    }
    assert!(rows.iter().all(|row| row["is_finished"] == "1" || row["ended"].is_empty()));
}

/// A track of a trace.
#[derive(Debug, Default)]
struct Track {
    name: String,
    parent: Option<u64>,
    is_counter: bool,
    /// The ends of open slices and the last moment.
    open: usize,
    last_ns: u64,
    slices: usize,
    instants: usize,
    values: usize,
}

#[test]
fn a_timeline_has_a_track_for_each_rank_and_joins_the_ranks_of_an_operation() {
    let room = Room::new();
    let bytes = fs::read(report(&room, "recordings/missing", "perfetto")).unwrap();
    let mut tracks: BTreeMap<u64, Track> = BTreeMap::new();
    let mut flows: BTreeMap<u64, BTreeSet<u64>> = BTreeMap::new();
    let mut findings = Vec::new();
    for (tag, packet) in fields(&bytes) {
        let Field::Bytes(packet) = packet else { panic!("a trace has packets alone") };
        assert_eq!(tag, 1);
        let packet: Vec<(u32, Field<'_>)> = fields(packet);
        let number = |all: &[(u32, Field<'_>)], tag: u32| {
            all.iter().find_map(|(t, f)| f.number().filter(|_| *t == tag))
        };
        let text = |all: &[(u32, Field<'_>)], tag: u32| {
            all.iter().find_map(|(t, f)| f.text().filter(|_| *t == tag)).map(str::to_owned)
        };
        assert_eq!(number(&packet, 10), Some(1), "one sequence");
        let inside = |tag: u32| packet.iter().find_map(|(t, f)| f.bytes().filter(|_| *t == tag)).map(fields);
        if let Some(descriptor) = inside(60) {
            let track = Track {
                name: text(&descriptor, 2).expect("a name"),
                parent: number(&descriptor, 5),
                is_counter: descriptor.iter().any(|(t, _)| *t == 8),
                ..Track::default()
            };
            assert!(track.parent.is_none_or(|p| tracks.contains_key(&p)), "a parent is described first");
            assert!(tracks.insert(number(&descriptor, 1).expect("a number"), track).is_none());
        }
        let Some(event) = inside(11) else { continue };
        let at_ns = number(&packet, 8).expect("a moment");
        let id = number(&event, 11).expect("a track");
        let track = tracks.get_mut(&id).expect("a track that is described");
        match number(&event, 9).expect("a type") {
            1 => {
                assert!(at_ns >= track.last_ns, "slices of a track nest: {track:?}");
                track.open += 1;
                track.slices += 1;
            }
            2 => track.open = track.open.checked_sub(1).expect("an open slice"),
            3 => track.instants += 1,
            4 => {
                assert!(track.is_counter && event.iter().any(|(t, _)| *t == 44));
                track.values += 1;
            }
            other => panic!("an unknown type {other}"),
        }
        if track.name == "findings" {
            findings.extend(text(&event, 23));
        } else if !track.is_counter {
            track.last_ns = at_ns.max(track.last_ns);
        }
        for (_, flow) in event.iter().filter(|(t, _)| *t == 47) {
            flows.entry(flow.number().unwrap()).or_default().insert(id);
        }
    }
    assert!(tracks.values().all(|t| t.open == 0), "every slice has an end");
    let of = |name: &str| {
        let found = tracks.iter().find(|(_, t)| t.name == name);
        found.unwrap_or_else(|| panic!("{name} in {tracks:#?}"))
    };
    let host = of("vm").0;
    for rank in ["rank 0 (pid 2885)", "rank 1 (pid 2886)"] {
        let (id, process) = of(rank);
        assert_eq!(process.parent, Some(*host));
        let own: Vec<&Track> = tracks.values().filter(|t| t.parent == Some(*id)).collect();
        assert!(own.len() >= 3 && own.iter().map(|t| t.slices).sum::<usize>() > 300, "{own:?}");
    }
    let joined = flows.values().filter(|tracks| tracks.len() == 2).count();
    assert!(joined > 1_000 && joined * 10 > flows.len() * 9, "{joined} of {}", flows.len());
    assert!(tracks.values().any(|t| t.is_counter && t.values > 10 && t.name.ends_with("bus bandwidth")));
    assert!(findings.iter().any(|f| f.starts_with("missing-rank: rank 1")), "{findings:?}");
}

#[test]
fn what_cannot_be_written_is_said_and_nothing_is_left() {
    let room = Room::new();
    let dir = room.path("there");
    fs::create_dir(&dir).unwrap();
    for (format, file, why) in [
        ("html", dir.clone(), "it is a directory; name a file"),
        ("csv", room.path("absent/x.csv"), "No such file or directory"),
        ("parquet", room.path("absent/x.parquet"), "No such file or directory"),
    ] {
        let said = report_to(&room, "recordings/missing", format, &file);
        assert_eq!(said.code, Some(2), "{}", said.err);
        assert!(said.err.contains(why) && said.err.contains("-o "), "{}", said.err);
    }
    let file = room.path("there/x.html");
    let said = run(room.ringwatch(["report", "--format", "html", "--replay", "/nowhere", "-o"]).arg(&file));
    assert_eq!(said.code, Some(2), "{}", said.err);
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 0, "a report that failed leaves no file");
    let said = run(&mut room.ringwatch(["report", "--format", "csv", "--agent", "/nowhere"]));
    assert!(said.code == Some(2) && said.err.contains("an agent does not keep operations"), "{}", said.err);
}
