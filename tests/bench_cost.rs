//! `ringwatch bench --cost` over the fake NCCL: which events come in which phase, and what is printed. Nothing here asserts
//! a time.

use crate::support::fake_gpu::{bench, fake, processes};
use crate::support::{Room, Said, run};
use ringwatch::bench::CostReport;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Operations of a phase: 25 times the one that is not timed.
const CALLS: u64 = 25;
/// Phases of one kind: a round that does not count and the fewest that are allowed.
const PHASES: u64 = 1 + 6;
/// Starts of an operation in the fake NCCL: the call and the collective.
const STARTS: u64 = 2;
const SHORT: &str = "--cost --rounds 6 --calls 25";

/// A name for the test that calls this.
macro_rules! fake_or_skip {
    ($name:literal) => {
        match fake($name) {
            Some(dir) => dir,
            None => return,
        }
    };
}

/// Compiles one of the tests' C sources.
fn compile(source: &str, options: &[&str], out: &Path) {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(source);
    let mut cc = Command::new("cc");
    cc.args(["-O2", "-Wall", "-Werror"]).args(options).arg("-o").arg(out).arg(source).arg("-ldl");
    let said = cc.output().unwrap();
    assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
}

/// Builds the plugin that counts, with the table of ABI v5 under this name.
fn counting_plugin(room: &Room, table: &str) -> PathBuf {
    let library = room.path(&format!("libcount-{table}.so"));
    compile("count_plugin.c", &["-shared", "-fPIC", &format!("-DTABLE={table}")], &library);
    library
}

/// The last line of numbers that a library has written.
fn last_numbers(file: &Path) -> Vec<u64> {
    let text = std::fs::read_to_string(file).unwrap();
    text.lines().last().unwrap().split_whitespace().map(|n| n.parse().unwrap()).collect()
}

fn report(said: &Said) -> CostReport {
    assert_eq!((said.code, said.err.as_str()), (Some(0), ""), "{}", said.out);
    serde_json::from_str(&said.out).unwrap()
}

/// Runs `bench --cost` with the plugin that counts, and returns what it, the fake NCCL and the program reported.
fn counted(dir: &Path, arguments: &str, more: &[(&str, &str)]) -> (CostReport, Vec<u64>, u64) {
    let room = Room::new();
    let plugin = counting_plugin(&room, "ncclProfiler_v5");
    let mut command = bench(&room, dir, &format!("{arguments} {SHORT} --json"));
    command.arg("--plugin").arg(plugin).envs(more.iter().copied()).env("FAKE_PROFILER", "1");
    command.env("COUNT_FILE", room.path("count")).env("FAKE_EVENTS", room.path("events"));
    let said = run(&mut command);
    let report = report(&said);
    (report, last_numbers(&room.path("count")), last_numbers(&room.path("events"))[0])
}

#[test]
fn events_reach_the_plugin_in_its_phases_only() {
    let dir = fake_or_skip!("events_reach_the_plugin_in_its_phases_only");
    for (arguments, ranks) in [("-b 8 -e 8 -t 2", 2), ("-b 8 -e 8 -t 1 -g 2", 2), ("-b 8 -e 64 -f 8 -t 3", 3)]
    {
        let (report, count, events) = counted(dir, arguments, &[]);
        let sizes = report.rows.len() as u64;
        let phases = ranks * sizes * PHASES * (CALLS + 1) * STARTS;
        // As many events with empty callbacks as with the plugin, none without, and no handle of one side on the other. The
        // operation that begins the phase after stops the last call's handle again, as NCCL does.
        let late_stops = ranks * sizes * PHASES;
        assert_eq!(count, [ranks, phases, phases + late_stops, 0], "{arguments}");
        assert_eq!(events, 2 * phases, "{arguments}");
        for row in &report.rows {
            assert_eq!((row.phases.nccl.len(), row.phases.plugin.len()), (6, 6));
            assert_eq!((row.phases.facts.stray_events, row.phases.facts.mask_changes), (0, 0));
            assert_eq!(
                (row.phases.facts.plugin_mask, row.phases.facts.nccl_mask, row.phases.facts.abi),
                (2, 2, 5)
            );
        }
    }
}

#[test]
fn a_plugin_that_switches_its_mask_does_so_in_its_own_phases() {
    let dir = fake_or_skip!("a_plugin_that_switches_its_mask_does_so_in_its_own_phases");
    let (report, count, events) = counted(dir, "-b 8 -e 8 -t 2", &[("COUNT_SWITCH", "1")]);
    let phases = 2 * PHASES * (CALLS + 1) * STARTS;
    assert_eq!((count[1], count[3], events), (phases, 0, 2 * phases));
    let facts = report.rows[0].phases.facts;
    assert!(facts.mask_changes > 0, "{facts:?}");
    // The time that the plugin takes back is not NCCL's price.
    assert_eq!((facts.nccl_mask, facts.stray_events), (2, 0), "{facts:?}");
    // A plugin that asks for nothing costs nothing, and the table says so.
    let room = Room::new();
    let mut command = bench(&room, dir, &format!("-b 8 -e 8 -t 2 {SHORT}"));
    let said = run(command
        .arg("--plugin")
        .arg(counting_plugin(&room, "ncclProfiler_v5"))
        .env("COUNT_MASK", "0")
        .env("FAKE_PROFILER", "1"));
    assert!(said.out.contains("the plugin asks for no events"), "{}", said.out);
}

#[test]
fn operations_graphs_and_groups_are_measured_as_bench_has_them() {
    let dir = fake_or_skip!("operations_graphs_and_groups_are_measured_as_bench_has_them");
    for arguments in
        ["all_gather -t 2", "reduce_scatter --batch 3 -t 2", "-G 5 -t 2", "sendrecv -t 2", "--blocking -t 2"]
    {
        let (report, count, _) = counted(dir, &format!("{arguments} -b 1K -e 1K"), &[]);
        assert_eq!((report.rows.len(), report.rows[0].phases.plugin.len()), (1, 6), "{arguments}");
        let starts = match arguments {
            "sendrecv -t 2" => 0,
            // The fake reports what is captured, one operation before, and no replay.
            "-G 5 -t 2" => 2 * (5 + 1) * STARTS,
            "reduce_scatter --batch 3 -t 2" => 3 * 2 * PHASES * (CALLS + 1) * STARTS,
            _ => 2 * PHASES * (CALLS + 1) * STARTS,
        };
        assert_eq!((count[0], count[1], count[3]), (2, starts, 0), "{arguments}");
    }
}

#[test]
fn the_plugin_of_this_program_is_measured_by_default() {
    let dir = fake_or_skip!("the_plugin_of_this_program_is_measured_by_default");
    let room = Room::new();
    let mut command = bench(&room, dir, &format!("-b 8 -e 64 -f 8 -t 2 {SHORT}"));
    let said = run(command.env("FAKE_PROFILER", "1").env("RINGWATCH_DETAIL", "calls"));
    assert_eq!((said.code, said.err.as_str()), (Some(0), ""), "{}", said.out);
    for part in [
        "what profiler events cost all_reduce of float, 6 rounds of phases of 25 operations (1 before them), 2 threads x 1 GPUs",
        "# plugin: Ringwatch's own\n",
        "# RINGWATCH_DETAIL=calls\n",
        "nccl: ratio",
        "plugin: ratio",
        "share: ns",
        "(profiler ABI v5)",
    ] {
        assert!(said.out.contains(part), "{part} is missing:\n{}", said.out);
    }
    let rows: Vec<&str> = said.out.lines().filter(|l| !l.starts_with('#')).collect();
    assert_eq!(rows.len(), 2, "{}", said.out);
    // Two numbers, and five values with their intervals.
    assert!(
        rows.iter().all(|r| r.split_whitespace().count() == 12 && r.matches("..").count() == 5),
        "{rows:?}"
    );
    // It has recorded the job where the environment says.
    assert!(!room.segment_files().is_empty());
}

#[test]
fn ranks_of_a_job_switch_their_events_together() {
    let dir = fake_or_skip!("ranks_of_a_job_switch_their_events_together");
    let room = Room::new();
    let plugin = counting_plugin(&room, "ncclProfiler_v5");
    let arguments = format!("-b 8 -e 8 {SHORT} --json --plugin {}", plugin.display());
    let (count, events) = (room.path("count"), room.path("events"));
    let more = [
        ("FAKE_PROFILER", "1"),
        ("COUNT_FILE", count.to_str().unwrap()),
        ("FAKE_EVENTS", events.to_str().unwrap()),
    ];
    let said = processes(&room, dir, &arguments, 2, &more);
    let report = report(&said[0]);
    assert_eq!((report.environment.processes, report.rows[0].phases.plugin.len()), (2, 6));
    assert_eq!((said[1].code, said[1].out.as_str(), said[1].err.as_str()), (Some(0), "", ""));
    let starts = PHASES * (CALLS + 1) * STARTS;
    for line in std::fs::read_to_string(&count).unwrap().lines() {
        assert_eq!(line, format!("1 {starts} {} 0", starts + PHASES));
    }
    assert_eq!(last_numbers(&events), [2 * starts]);
}

#[test]
fn what_cannot_be_measured_is_exit_code_2_with_the_reason() {
    let dir = fake_or_skip!("what_cannot_be_measured_is_exit_code_2_with_the_reason");
    let room = Room::new();
    let (fifth, seventh) =
        (counting_plugin(&room, "ncclProfiler_v5"), counting_plugin(&room, "ncclProfiler_v7"));
    let other = counting_plugin(&room, "ncclSomething_v5");
    let (fifth, seventh, other) = (fifth.display(), seventh.display(), other.display());
    let profiler = ("FAKE_PROFILER", "1");
    for (arguments, variables, named) in [
        (String::new(), vec![], "NCCL 2.28.9 has not loaded the profiler plugin"),
        (String::new(), vec![("FAKE_VERSION", "22203")], "NCCL 2.22.3 loads no profiler plugin"),
        (format!("--plugin {seventh}"), vec![profiler], "NCCL has not initialized it"),
        (format!("--plugin {other}"), vec![profiler], "it exports no ncclProfiler_v1 to ncclProfiler_v7"),
        ("--plugin /nowhere.so".to_owned(), vec![profiler], "--plugin /nowhere.so: cannot read it"),
        (format!("--plugin {fifth}"), vec![profiler, ("COUNT_FAIL", "1")], "its init returned an error"),
        ("--rounds 5".to_owned(), vec![profiler], "--rounds 5: with --cost from 6 to 400"),
        ("--calls 0".to_owned(), vec![profiler], "--calls 0"),
        ("--compare".to_owned(), vec![profiler], "--compare"),
        ("--events".to_owned(), vec![profiler], "--events"),
        ("-n 5".to_owned(), vec![profiler], "--iters"),
    ] {
        let mut command = bench(&room, dir, &format!("-b 8 -e 8 -t 2 --cost {arguments}"));
        let said = run(command.envs(variables));
        assert_eq!(said.code, Some(2), "{arguments}: {}", said.out);
        assert!(said.err.contains(named), "{arguments}: {}", said.err);
        assert!(!said.out.lines().any(|l| !l.starts_with('#')), "{arguments}: {}", said.out);
    }
    for arguments in ["--plugin x.so", "--calls 7"] {
        let said = run(&mut bench(&room, dir, arguments));
        assert!(said.code == Some(2) && said.err.contains("--cost"), "{}", said.err);
    }
}

#[test]
fn work_that_hangs_ends_with_its_name() {
    let dir = fake_or_skip!("work_that_hangs_ends_with_its_name");
    let room = Room::new();
    let mut command = bench(&room, dir, &format!("-b 8 -e 8 -t 2 --timeout 1 {SHORT}"));
    let said = run(command.env("FAKE_PROFILER", "1").env("FAKE_HANG", "allreduce:1"));
    assert_eq!(said.code, Some(2), "{}", said.out);
    assert!(said.err.contains("all_reduce of 8 bytes, with and without events"), "{}", said.err);
}

#[test]
fn the_shim_keeps_both_sides_apart_in_every_abi() {
    // Its libraries and its driver need the compiler that the fake needs.
    fake_or_skip!("the_shim_keeps_both_sides_apart_in_every_abi");
    let room = Room::new();
    let driver = room.path("driver");
    compile("shim_driver.c", &[], &driver);
    for version in 1..=7 {
        let plugin = room.path(&format!("libcount-{version}.so"));
        let table = format!("-DTABLE=ncclProfiler_v{version}");
        compile("count_plugin.c", &["-shared", "-fPIC", &format!("-DVERSION={version}"), &table], &plugin);
        let name = format!("libnccl-profiler-shim-{version}.so");
        let shim = ringwatch::bundle::install_shim(&room.path("shim"), &name, &[version]).unwrap();
        let count = room.path(&format!("count-{version}"));
        let mut command = room.command(driver.to_str().unwrap());
        command.arg(shim).arg(version.to_string()).env("RINGWATCH_SHIM_PLUGIN", &plugin);
        let said = run(command.env("COUNT_FILE", &count).env("COUNT_ARGUMENTS", "1"));
        assert_eq!((said.code, said.err.as_str()), (Some(0), ""), "v{version}");
        // One event, which was stopped in time and once too late, and nothing of the empty callbacks.
        assert_eq!(last_numbers(&count), [1, 1, 2, 0], "v{version}");
    }
}

#[test]
fn nccl_finds_only_the_versions_that_the_plugin_has() {
    use libloading::os::unix::Library;
    let room = Room::new();
    let path =
        ringwatch::bundle::install_shim(&room.path("shim"), "libnccl-profiler-other.so", &[4, 5]).unwrap();
    // SAFETY: the program's own library, whose constructors do nothing.
    #[expect(unsafe_code, reason = "loads a library")]
    let library = unsafe { Library::new(path) }.unwrap();
    let found = |version: u32| {
        // SAFETY: an address that nothing reads.
        #[expect(unsafe_code, reason = "looks up a symbol")]
        let symbol = unsafe { library.get::<*const u8>(format!("ncclProfiler_v{version}")) };
        symbol.is_ok()
    };
    assert_eq!((1..=8).filter(|v| found(*v)).collect::<Vec<_>>(), [4, 5]);
}

#[test]
fn the_shim_needs_little_and_has_no_panic() {
    use object::{Object as _, ObjectSymbol as _};
    let file = object::File::parse(ringwatch::bundle::SHIM).unwrap();
    let needed: Vec<&str> = file
        .dynamic_symbols()
        .filter(|s| s.is_undefined() && !s.is_weak())
        .filter_map(|s| s.name().ok())
        .filter(|n| !n.is_empty())
        .collect();
    let allowed = ["getenv", "dlopen", "dlsym", "sched_yield"];
    assert!(needed.iter().all(|n| allowed.contains(n)), "{needed:?}");
    let all: Vec<_> = file.symbols().filter_map(|s| s.name().ok().map(str::to_owned)).collect();
    assert!(all.len() > 10 && !all.iter().any(|n| n.contains("panick")), "{all:?}");
}
