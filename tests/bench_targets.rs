//! `ringwatch bench` against targets and against saved measurements, over a GPU that is the host's memory.

use crate::support::fake_gpu::{bench, fake, processes};
use crate::support::{Room, Said, run};
use ringwatch::bench::{Measurements, Report};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Few operations: what is tested here is no time.
const QUICK: &str = "-n 2 -w 1 --repeat 4";

fn written(room: &Room, name: &str, text: &str) -> PathBuf {
    let path = room.path(name);
    fs::write(&path, text).unwrap();
    path
}

/// The rows of the tables, without comments.
fn rows(out: &str) -> Vec<&str> {
    out.lines().filter(|l| !l.starts_with('#')).map(str::trim).collect()
}

/// A file that was measured, with every time of it multiplied.
fn scaled(path: &Path, to: PathBuf, factor: f64) -> PathBuf {
    let mut all = Measurements::load(path).unwrap();
    for size in all.reports.iter_mut().flat_map(|r| &mut r.sizes) {
        for t in std::iter::once(&mut size.out_of_place).chain(&mut size.in_place) {
            t.repeats_ns.iter_mut().for_each(|ns| *ns *= factor);
            t.time_ns *= factor;
        }
    }
    all.save(&to).unwrap();
    to
}

fn exits(said: &Said, code: i32) {
    assert_eq!(said.code, Some(code), "{}\n{}", said.out, said.err);
}

#[test]
fn targets_are_measured_in_one_call_and_decide_the_exit_code() {
    let Some(dir) = fake("targets_are_measured_in_one_call_and_decide_the_exit_code") else { return };
    let room = Room::new();
    let reached = "- {operation: all_reduce, size: 4K, max_latency: 60 s}\n\
        - {operation: broadcast, size: 8K, about_latency: 60 s, min_algbw: 0.000001 MB/s}\n\
        - {operation: all_reduce, size: 64K, min_busbw: 0.0001 % of link}\n\
        - {operation: all_reduce, size: 4K, dtype: half, max_latency: 60 s}\n\
        - {operation: reduce, size: 4K, ranks: 8, max_latency: 1 ns}\n";
    let missed = "- {operation: all_reduce, size: 4K, max_latency: 1 ns}\n";
    let check = |text: &str, code: i32, last: &str| -> Said {
        let file = written(&room, "targets.yaml", text);
        let said = run(bench(&room, dir, &format!("{QUICK} -t 2")).arg("--targets").arg(file));
        exits(&said, code);
        assert!(said.out.ends_with(last), "{}", said.out);
        said
    };
    let said = check(
        &format!("link: 1 GB/s\ntargets:\n{reached}"),
        0,
        "# targets: 5 passed, 0 failed, 0 unknown, 1 skipped\n",
    );
    let table = rows(&said.out);
    assert_eq!(table.len(), 6, "{}", said.out);
    for (row, begin) in table.iter().zip([
        "all_reduce           4096      float  latency <= 60 s ",
        "broadcast           8192      float  latency about 60 s + 20 %",
        "broadcast           8192      float  algbw >= ",
        "all_reduce          65536      float  busbw >= ",
        "all_reduce           4096       half  latency <= 60 s ",
        "reduce           4096      float  latency <= ",
    ]) {
        assert!(row.starts_with(begin), "{row}\n{begin}");
    }
    assert!(table[..5].iter().all(|r| r.ends_with(" pass")), "{}", said.out);
    assert!(table[5].ends_with("  -  - (for 8 ranks; this run has 2)"), "{}", table[5]);
    for part in [
        "# ranks: 2, nodes: 1\n",
        "# link: 1.0 GB/s (stated in ",
        "\n# wrong elements: 0\n",
        "# NCCL 2.28.9 (",
        "[Fake GPU]",
    ] {
        assert!(said.out.contains(part), "{part} is missing:\n{}", said.out);
    }
    // One run for each operation and type, and none for what nobody can judge.
    let progress: Vec<&str> = said.err.lines().collect();
    let wanted = ["all_reduce of float, 2 sizes", "broadcast of float, 1 size", "all_reduce of half, 1 size"];
    assert_eq!(progress, wanted.map(|w| format!("ringwatch: {w}")));

    let said =
        check(&format!("link: 1 GB/s\ntargets:\n{reached}{missed}"), 1, " 1 failed, 0 unknown, 1 skipped\n");
    assert!(rows(&said.out)[6].contains(" FAIL: "), "{}", said.out);
    // Without a link one row is neither.
    let said =
        check(&format!("targets:\n{reached}"), 2, "# targets: 4 passed, 0 failed, 1 unknown, 1 skipped\n");
    assert!(rows(&said.out)[3].ends_with("  unknown: the link is not known"), "{}", said.out);
    assert!(said.err.ends_with(": 1 of 6 targets are unknown\n"), "{}", said.err);
    // A miss is a miss, whatever else is not known.
    check(
        &format!("targets:\n{reached}{missed}"),
        1,
        "# targets: 4 passed, 1 failed, 1 unknown, 1 skipped\n",
    );
    let other = "targets:\n- {operation: reduce, size: 4K, ranks: 3-8, max_latency: 1 s}\n";
    let said = check(other, 2, "# targets: 0 passed, 0 failed, 0 unknown, 1 skipped\n");
    assert!(said.err.ends_with("no target is for 2 ranks; nothing was judged\n"), "{}", said.err);
}

#[test]
fn wrong_data_fail_a_target_and_the_sample_is_a_file_of_targets() {
    let Some(dir) = fake("wrong_data_fail_a_target_and_the_sample_is_a_file_of_targets") else { return };
    let room = Room::new();
    let file = written(&room, "t.yaml", "targets:\n- {operation: all_reduce, size: 4K, max_latency: 60 s}\n");
    let mut command = bench(&room, dir, QUICK);
    let said = run(command.arg("--targets").arg(&file).env("FAKE_WRONG", "1"));
    exits(&said, 1);
    assert!(rows(&said.out)[0].contains(" wrong elements"), "{}", said.out);
    // The sample, whose buffers the fake GPU has no room for: it is read, and the first run says so.
    let sample = Path::new(env!("CARGO_MANIFEST_DIR")).join("config/targets.yaml");
    let said = run(bench(&room, dir, "-n 1 -w 0 -c 0 --repeat 1 -t 4").arg("--targets").arg(sample));
    exits(&said, 2);
    assert!(said.err.contains("has no room for two buffers of 1073741824 bytes"), "{}", said.err);
}

#[test]
fn the_link_is_the_nvlinks_by_nvml() {
    let Some(dir) = fake("the_link_is_the_nvlinks_by_nvml") else { return };
    let room = Room::new();
    let nvml = room.path("libnvml.so");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/fake_nvml.c");
    let built = Command::new("cc").args(["-shared", "-fPIC", "-O1", "-o"]).arg(&nvml).arg(source).status();
    assert!(built.unwrap().success());
    let text = "targets:\n- {operation: all_reduce, size: 4K, min_busbw: 0.0001 % of link}\n";
    let file = written(&room, "t.yaml", text);
    let with = |threads: &str| {
        let mut command = bench(&room, dir, &format!("{QUICK} --json {threads}"));
        run(command.arg("--targets").arg(&file).arg("--nvml").arg(&nvml))
    };
    let said = with("-t 2");
    exits(&said, 0);
    let json: Value = serde_json::from_str(&said.out).unwrap();
    let link = &json["targets"]["link"];
    assert!((link["gb_per_s"].as_f64().unwrap() - 3.0 * 26.562).abs() < 1e-6, "{link}");
    assert_eq!(link["source"], "3 NVLinks x 26.56 GB/s by NVML");
    let row = &json["targets"]["rows"][0];
    assert_eq!((&row["verdict"], &row["metric"]), (&"pass".into(), &"busbw_gb_per_s".into()));
    // The fake NVML has two GPUs, the fake CUDA four.
    let said = with("-t 4");
    exits(&said, 2);
    let json: Value = serde_json::from_str(&said.out).unwrap();
    assert_eq!(json["targets"]["rows"][0]["verdict"], "unknown");
    assert_eq!(json["targets"]["rows"][0]["limit"], Value::Null);
    assert!(json["targets"]["link"]["source"].as_str().unwrap().contains("state link:"), "{json}");
}

#[test]
fn what_was_measured_is_saved_and_compared_with() {
    let Some(dir) = fake("what_was_measured_is_saved_and_compared_with") else { return };
    let room = Room::new();
    let options = format!("all_reduce -b 1K -e 4K -f 4 {QUICK} -t 2 --rounds 4");
    let saved = room.path("saved.json");
    let said = run(bench(&room, dir, &options).arg("--save").arg(&saved));
    exits(&said, 0);
    assert!(said.out.contains("# average bus bandwidth: "), "{}", said.out);
    let all = Measurements::load(&saved).unwrap();
    assert_eq!((all.schema, all.reports.len(), all.reports[0].sizes.len()), (1, 4, 2));
    assert!(all.reports[0].sizes.iter().all(|s| s.out_of_place.repeats_ns.len() == 4));

    let against = |old: &Path, options: &str| run(bench(&room, dir, options).arg("--against").arg(old));
    // The fake's times say more about the machine's load than anything else: by this factor they never differ.
    let (quick, slow) =
        (scaled(&saved, room.path("quick.json"), 1e-9), scaled(&saved, room.path("slow.json"), 1e9));
    let said = against(&quick, &options);
    exits(&said, 1);
    let slower = rows(&said.out).iter().filter(|r| r.ends_with(" SLOWER")).count();
    assert_eq!(slower, 4, "{}", said.out);
    assert!(said.out.contains("# changes: 4 slower, 0 faster, "), "{}", said.out);
    let said = against(&slow, &options);
    exits(&said, 0);
    assert!(said.out.contains("# changes: 0 slower, 4 faster, "), "{}", said.out);
    // One round is no comparison, however many repeats it has.
    let said = against(&saved, "all_reduce -b 1K -e 4K -f 4 -n 2 --repeat 10 --rounds 1 -t 2");
    exits(&said, 2);
    assert!(said.err.contains("nothing can be compared: samples: 4 saved, 1 new"), "{}", said.err);
    // Another number of ranks is another measurement; another NCCL is the point of one.
    let said = against(&saved, &format!("all_reduce -b 1K -e 1K {QUICK} -t 4"));
    exits(&said, 2);
    assert!(said.err.contains("ranks: 4, and the saved file has ranks: 2"), "{}", said.err);
    assert!(said.out.contains("# 4 rows of "), "{}", said.out);
    let mut other = Measurements::load(&slow).unwrap();
    other.reports.iter_mut().for_each(|r| r.environment.nccl_version = 22_703);
    other.save(&slow).unwrap();
    let said = against(&slow, &options);
    exits(&said, 0);
    assert!(said.out.contains("# NCCL differs: 2.27.3 was saved, 2.28.9 is now\n"), "{}", said.out);
}

#[test]
fn json_holds_the_verdicts_the_changes_and_every_report() {
    let Some(dir) = fake("json_holds_the_verdicts_the_changes_and_every_report") else { return };
    let room = Room::new();
    let text = "targets:\n- {operation: all_reduce, size: 4K, max_latency: 60 s}\n\
        - {operation: sendrecv, size: 4K, max_latency: 60 s}\n";
    let (file, saved) = (written(&room, "t.yaml", text), room.path("saved.json"));
    let with = |more: &[&str]| -> Value {
        let mut command = bench(&room, dir, &format!("{QUICK} -t 2 --json --rounds 4"));
        let said = run(command.arg("--targets").arg(&file).args(more));
        exits(&said, 0);
        assert_eq!(said.err, "");
        serde_json::from_str(&said.out).unwrap()
    };
    let path = saved.to_str().unwrap();
    let json = with(&["--save", path]);
    assert_eq!((json["schema"].as_u64(), json["reports"].as_array().unwrap().len()), (Some(1), 8));
    let verdict = |i: usize| json["targets"]["rows"][i]["verdict"].clone();
    assert_eq!((verdict(0), verdict(1), &json["against"]), ("pass".into(), "pass".into(), &Value::Null));
    assert_eq!(Measurements::load(&saved).unwrap().reports.len(), 8);
    // What is printed is as good as what is saved, and may be replaced by it.
    let printed = written(&room, "printed.json", &json.to_string());
    let slow = scaled(&printed, room.path("slow.json"), 1e9);
    let json = with(&["--against", slow.to_str().unwrap(), "--threshold", "10", "--save", path]);
    let against = &json["against"];
    assert_eq!((against["threshold"].as_f64(), against["rows"].as_array().unwrap().len()), (Some(0.1), 3));
    for row in against["rows"].as_array().unwrap() {
        // Each round is one sample.
        assert_eq!((&row["old_samples"], &row["new_samples"]), (&4.into(), &4.into()), "{row}");
        assert!(row["confidence"].is_number() && row["trend"] == "improvement", "{row}");
    }
    // With one operation and nothing to judge the document stays what it was.
    let mut command = bench(&room, dir, &format!("{QUICK} -b 8 -e 8 -t 2 --json --rounds 1 --save {path}"));
    let said = run(&mut command);
    exits(&said, 0);
    let report: Report = serde_json::from_str(&said.out).unwrap();
    assert_eq!(report, Measurements::load(&saved).unwrap().reports[0]);
}

#[test]
fn a_failure_keeps_what_was_measured_before_it() {
    let Some(dir) = fake("a_failure_keeps_what_was_measured_before_it") else { return };
    let room = Room::new();
    let text = "targets:\n- {operation: all_reduce, size: 4K, max_latency: 60 s}\n\
        - {operation: broadcast, size: 4K, max_latency: 60 s}\n";
    let (file, saved) = (written(&room, "t.yaml", text), room.path("saved.json"));
    let mut command = bench(&room, dir, &format!("{QUICK} -t 2"));
    command.arg("--targets").arg(file).arg("--save").arg(&saved);
    let said = run(command.env("FAKE_FAIL", "ncclBroadcast"));
    exits(&said, 2);
    let table = rows(&said.out);
    assert!(table[0].ends_with(" pass") && table[1].contains(" unknown: not measured: "), "{}", said.out);
    assert!(said.err.contains("ncclBroadcast: unhandled system error"), "{}", said.err);
    assert_eq!(Measurements::load(&saved).unwrap().reports.len(), 1);
}

#[test]
fn processes_measure_targets_together_and_rank_0_alone_prints_and_saves() {
    let Some(dir) = fake("processes_measure_targets_together_and_rank_0_alone_prints_and_saves") else {
        return;
    };
    let room = Room::new();
    let text = "targets:\n- {operation: all_reduce, size: 4K, ranks: 2, max_latency: 60 s}\n\
        - {operation: broadcast, size: 4K, nodes: 2, max_latency: 60 s}\n\
        - {operation: all_gather, size: 4K, max_latency: 60 s}\n";
    let (file, saved) = (written(&room, "t.yaml", text), room.path("saved.json"));
    let options = format!("{QUICK} --json --targets {} --save {}", file.display(), saved.display());
    let said = processes(&room, dir, &options, 2, &[]);
    exits(&said[0], 0);
    assert_eq!((said[1].code, said[1].out.as_str(), said[1].err.as_str()), (Some(0), "", ""));
    let json: Value = serde_json::from_str(&said[0].out).unwrap();
    let verdicts: Vec<&Value> =
        json["targets"]["rows"].as_array().unwrap().iter().map(|r| &r["verdict"]).collect();
    assert_eq!(verdicts, ["pass", "skipped", "pass"]);
    assert_eq!((&json["targets"]["ranks"], &json["targets"]["nodes"]), (&2.into(), &1.into()));
    assert_eq!(Measurements::load(&saved).unwrap().reports.len(), 10, "5 rounds of two operations");
}

#[test]
fn bad_files_and_options_are_exit_code_2_before_anything_is_measured() {
    let Some(dir) = fake("bad_files_and_options_are_exit_code_2_before_anything_is_measured") else { return };
    let room = Room::new();
    let path = |name: &str, text: &str| written(&room, name, text).display().to_string();
    let good = path("good.yaml", "targets:\n- {operation: reduce, size: 4K, max_latency: 1 s}\n");
    let unit = path("unit.yaml", "targets:\n- operation: reduce\n  size: 4K\n  max_latency: 5\n");
    let old = path("old.json", "{\"schema\": 99}");
    let other = path("other.json", "{\"schema\": 1,\n\"reports\": 7}");
    let comparison = path("comparison.json", "{\"schema\": 1, \"trials\": []}");
    let empty = path("empty.json", "{\"schema\": 1, \"reports\": []}");
    for (arguments, parts) in [
        (format!("--targets {unit}"), ["unit.yaml:4: max_latency: \"5\" is no time", "0.5 ms"]),
        ("--targets /nowhere.yaml".to_owned(), ["/nowhere.yaml", "config/targets.yaml is a sample"]),
        (format!("reduce --targets {good}"), ["--targets", "OPERATION"]),
        (format!("--targets {good} -b 8"), ["--targets", "--min-bytes"]),
        (format!("--targets {good} --compare"), ["--targets", "--compare"]),
        ("--threshold 5".to_owned(), ["--against", ""]),
        (format!("--against {old} --threshold much"), ["--threshold", "give per cent"]),
        (format!("--against {old}"), ["old.json: schema 99", "reads 1; measure again"]),
        (format!("--against {other}"), ["other.json: ", "line 2"]),
        (format!("--against {comparison}"), ["comparison.json: it holds a comparison", "--save"]),
        (format!("--against {empty}"), ["empty.json: it holds no measurement", "measure again"]),
        (format!("--against {good}"), ["good.yaml: ", "not what ringwatch bench --save or --json writes"]),
        ("--against /nowhere.json".to_owned(), ["cannot read /nowhere.json", ""]),
        ("--save /nowhere/x.json".to_owned(), ["cannot write /nowhere/x.json", ""]),
        ("--save /dev/null".to_owned(), ["cannot write /dev/null", "no regular file"]),
    ] {
        let said = run(&mut bench(&room, dir, &arguments));
        assert_eq!((said.code, said.out.as_str()), (Some(2), ""), "{arguments}: {}", said.err);
        assert!(parts.iter().all(|p| said.err.contains(p)), "{arguments}: {}", said.err);
    }
}

#[test]
fn detection_takes_saved_files_and_targets_as_baselines() {
    let room = Room::new();
    let diagnose = |name: &str, text: &str| {
        let file = written(&room, name, text);
        run(room.ringwatch(["diagnose", "--baseline"]).arg(file).arg(room.segments()))
    };
    let sample = include_str!("../config/targets.yaml");
    let report = include_str!("data/bench/report.json");
    let saved = format!("{{\"schema\": 1, \"reports\": [{report}, {report}]}}");
    let plain = run(room.ringwatch(["diagnose"]).arg(room.segments()));
    for (name, text) in
        [("t.yaml", sample), ("targets", sample), ("report.json", report), ("saved.json", saved.as_str())]
    {
        let said = diagnose(name, text);
        assert_eq!(
            (said.code, said.out, said.err),
            (plain.code, plain.out.clone(), plain.err.clone()),
            "{name}"
        );
    }
    let graphed = report.replace("\"graph\": null", "\"graph\": 4");
    for (name, text, parts) in [
        (
            "w.yaml",
            "targets:\n- {operation: x, size: 1K, max_latency: 1 s}\n",
            ["w.yaml:2: operation: ", "all_reduce"],
        ),
        (
            "bw.yaml",
            "targets:\n- {operation: reduce, size: 1K, min_algbw: 1 GB/s}\n",
            ["bw.yaml: no target that detection could use", "max_latency"],
        ),
        ("x.json", "{\"a\": 1}", ["x.json: ", "not what ringwatch bench --save or --json writes"]),
        ("v.json", "{\"schema\": 2}", ["v.json: schema 2", "reads 1"]),
        ("g.json", graphed.as_str(), ["g.json: batches and graphs", "measure without -G"]),
    ] {
        let said = diagnose(name, text);
        assert_eq!((said.code, said.out.as_str()), (Some(2), ""), "{name}: {}", said.err);
        assert!(
            said.err.contains("--baseline") && parts.iter().all(|p| said.err.contains(p)),
            "{}",
            said.err
        );
    }
}
