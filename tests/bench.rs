//! `ringwatch bench`: the whole engine against a GPU that is the host's memory, and what is said where there is none.

use crate::support::fake_gpu::{bench, fake, processes};
use crate::support::{Room, Said, run};
use ringwatch::bench::Report;
use std::time::{Duration, Instant};

/// A name for the test that calls this.
macro_rules! fake_or_skip {
    ($name:literal) => {
        match fake($name) {
            Some(dir) => dir,
            None => return,
        }
    };
}

fn report(said: &Said) -> Report {
    assert_eq!((said.code, said.err.as_str()), (Some(0), ""), "{}", said.out);
    serde_json::from_str(&said.out).unwrap()
}

#[test]
fn every_operation_gives_right_results_in_every_way_of_running() {
    let dir = fake_or_skip!("every_operation_gives_right_results_in_every_way_of_running");
    let room = Room::new();
    let operations =
        ["all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "all_to_all", "sendrecv"];
    let ways =
        ["-t 4", "-t 1 -g 4", "-t 2 -g 2 -G 4", "-t 3 --batch 3", "-t 2 --blocking", "-t 1 -G 3 --batch 2"];
    for operation in operations {
        for way in ways {
            let arguments = format!("{operation} -b 256 -e 64K -f 16 -n 6 -w 1 --json --root 0 {way}");
            let r = report(&run(&mut bench(&room, dir, &arguments)));
            assert_eq!(r.wrong, Some(0), "{arguments}");
            assert!(
                r.sizes.len() == 3 && r.sizes.iter().all(|s| s.out_of_place.time_ns > 0.0),
                "{arguments}"
            );
            let twice = !["all_to_all", "sendrecv"].contains(&operation);
            assert!(r.sizes.iter().all(|s| s.in_place.is_some() == twice), "{arguments}");
        }
    }
}

#[test]
fn every_type_and_reduction_is_checked_to_the_bit() {
    let dir = fake_or_skip!("every_type_and_reduction_is_checked_to_the_bit");
    let room = Room::new();
    for dtype in
        ["int8", "uint8", "int32", "uint32", "int64", "uint64", "half", "float", "double", "bfloat16"]
    {
        for op in ["sum", "prod", "max", "min", "avg"] {
            for ranks in [3, 4] {
                let arguments = format!(
                    "reduce_scatter -b 48K -e 48K -n 1 -w 0 --json -d {dtype} -o {op} -t 1 -g {ranks}"
                );
                let r = report(&run(&mut bench(&room, dir, &arguments)));
                assert_eq!(r.wrong, Some(0), "{arguments}");
            }
        }
    }
}

#[test]
fn wrong_data_are_counted_and_are_exit_code_1() {
    let dir = fake_or_skip!("wrong_data_are_counted_and_are_exit_code_1");
    let room = Room::new();
    for operation in ["all_reduce", "all_gather", "all_to_all", "sendrecv"] {
        let said = run(bench(&room, dir, &format!("{operation} -b 4K -e 4K -n 1")).env("FAKE_WRONG", "1"));
        assert_eq!((said.code, said.err.as_str()), (Some(1), ""), "{}", said.out);
        assert!(said.out.contains(", FAILED\n"), "{}", said.out);
        assert!(!said.out.contains("elements: 0"), "{}", said.out);
    }
    // Whoever does not look finds nothing.
    let said = run(bench(&room, dir, "-b 4K -e 4K -n 1 -c 0").env("FAKE_WRONG", "1"));
    assert_eq!(said.code, Some(0));
    assert!(said.out.contains("wrong elements: not checked"), "{}", said.out);
}

#[test]
fn the_table_has_the_columns_of_nccl_tests() {
    let dir = fake_or_skip!("the_table_has_the_columns_of_nccl_tests");
    let said = run(&mut bench(&Room::new(), dir, "reduce -b 1K -e 2K -t 2 -r 1 -d half -o max"));
    assert_eq!((said.code, said.err.as_str()), (Some(0), ""));
    for part in
        ["# NCCL 2.28.9 (", "0000:1b:00.0 [Fake GPU]", "# average bus bandwidth: ", "# wrong elements: 0"]
    {
        assert!(said.out.contains(part), "{part} is missing:\n{}", said.out);
    }
    let rows: Vec<Vec<&str>> =
        said.out.lines().filter(|l| !l.starts_with('#')).map(|l| l.split_whitespace().collect()).collect();
    assert_eq!(rows.len(), 2, "{}", said.out);
    assert_eq!(rows[1][..5], ["2048", "1024", "half", "max", "1"]);
    assert_eq!((rows[1].len(), rows[1][8], rows[1][12]), (13, "0", "0"));
}

#[test]
fn repeats_and_events_are_all_in_the_json() {
    let dir = fake_or_skip!("repeats_and_events_are_all_in_the_json");
    let r = report(&run(&mut bench(&Room::new(), dir, "-b 64 -e 64 -n 7 --repeat 3 --events -t 3 --json")));
    assert_eq!((r.schema, r.environment.ranks.len(), r.settings.threads), (1, 3, 3));
    let t = &r.sizes[0].out_of_place;
    assert_eq!((t.repeats_ns.len(), t.operations), (3, 7));
    assert!(t.repeats_ns.contains(&t.time_ns), "the median of three is one of them");
    let events = t.events.as_ref().unwrap();
    assert_eq!(events.iter().map(|e| e.rank).collect::<Vec<_>>(), [0, 1, 2]);
    assert!(events.iter().all(|e| e.samples_ns.len() == 7 && e.floor_ns.is_finite() && e.floor_ns >= 0.0));
    let floors =
        |e: &ringwatch::bench::RankEvents| e.kernel_floor_ns.is_some_and(|k| k.is_finite() && k > 0.0);
    assert!(events.iter().all(floors), "{events:?}");
    let kernel = ringwatch::bench::KernelLaunch {
        grid: [24, 1, 1],
        block: [544, 1, 1],
        cluster: [4, 1, 1],
        shared_bytes: 82_240 + 21_568,
        waits: 1,
        records: 1,
    };
    assert!(events.iter().all(|e| e.kernel == Some(kernel)), "{events:?}");
    // What is not one kernel has no floor of one.
    for (nodes, is_one) in [("two", false), ("memset", false), ("host", true)] {
        let mut command = bench(&Room::new(), dir, "-b 64 -e 64 -n 2 --events -t 2 --json");
        let r = report(&run(command.env("FAKE_NODES", nodes)));
        let events = r.sizes[0].out_of_place.events.as_ref().unwrap();
        assert!(events.iter().all(|e| e.kernel.is_some() == is_one), "{nodes}: {events:?}");
        assert!(events.iter().all(|e| e.kernel_floor_ns.is_some() == is_one), "{nodes}: {events:?}");
    }
}

#[test]
fn what_events_measure_of_an_empty_kernel_stands_beside_them() {
    let dir = fake_or_skip!("what_events_measure_of_an_empty_kernel_stands_beside_them");
    let room = Room::new();
    let said = run(&mut bench(&room, dir, "-b 64 -e 128 -n 3 --events -t 1 -g 2"));
    assert_eq!((said.code, said.err.as_str()), (Some(0), ""), "{}", said.out);
    for size in ["64 B: ", "128 B: "] {
        let line = said.out.lines().find(|l| l.contains(&format!("# by CUDA events, {size}")));
        let line = line.unwrap_or_else(|| panic!("{size}{}", said.out));
        assert!(line.contains(" us are an empty kernel's, and of these "), "{line}");
    }
    assert!(!run(&mut bench(&room, dir, "-b 64 -e 64 -n 3 -t 1")).out.contains("CUDA events"));
    // The fake driver says at the process's end whether a module is left.
    for (fails, call) in [
        ("cuModuleLoadData", "cuModuleLoadData"),
        ("cuModuleGetFunction", "cuModuleGetFunction"),
        ("cuModuleGetFunction:2", "cuModuleGetFunction"),
        ("cuFuncSetAttribute", "cuFuncSetAttribute"),
        ("cuLaunchKernelEx", "cuLaunchKernelEx"),
        ("cuLaunchKernelEx:20", "cuLaunchKernelEx"),
        ("cuStreamWaitEvent:3", "cuStreamWaitEvent"),
        ("cuGraphGetNodes", "cuGraphGetNodes"),
        ("cuGraphNodeGetType", "cuGraphNodeGetType"),
        ("cuGraphKernelNodeGetParams", "cuGraphKernelNodeGetParams"),
        ("cuGraphKernelNodeGetAttribute", "cuGraphKernelNodeGetAttribute"),
        ("cuFuncGetAttribute", "cuFuncGetAttribute"),
    ] {
        let mut command = bench(&room, dir, "-b 64 -e 64 -n 3 --events -t 1 -g 2");
        let said = run(command.env("FAKE_FAIL", fails));
        assert_eq!(said.code, Some(2), "{fails}: {}", said.out);
        let told = format!("{call} on device ");
        assert!(
            said.err.contains(&told) && said.err.contains("CUDA_ERROR_LAUNCH_FAILED (719)"),
            "{}",
            said.err
        );
        assert_eq!(said.err.lines().count(), 1, "{fails}: {}", said.err);
    }
}

#[test]
fn what_hangs_is_aborted_in_time_and_named() {
    let dir = fake_or_skip!("what_hangs_is_aborted_in_time_and_named");
    let room = Room::new();
    for (name, value, arguments, named) in [
        (
            "FAKE_HANG",
            "allreduce:2",
            "-b 4K -e 4K",
            "ranks [0, 1, 2, 3]: all_reduce of 4096 bytes, out of place",
        ),
        ("FAKE_HANG", "send:1", "all_to_all -b 4K -e 4K -t 1 -g 4", "all_to_all of 4096 bytes, out of place"),
        ("FAKE_HANG", "allreduce:0", "-b 4K -e 4K -G 2 -w 0 -t 2", "all_reduce of 4096 bytes"),
        // Rank 2 is in a call, the others wait for it.
        ("FAKE_BLOCK", "ncclAllReduce:2", "-b 4K -e 4K", "ranks [0, 1, 3]: all_reduce of 4096 bytes"),
        // Nobody but the one thread, which is in the call: ended from outside.
        (
            "FAKE_BLOCK",
            "ncclAllReduce:2",
            "-b 4K -e 4K -t 1 -g 4",
            "a call did not come back in 1 s (--timeout)",
        ),
        ("FAKE_BLOCK", "ncclCommInitRank:2", "-b 4K -e 4K", "making a communicator of 4 ranks"),
    ] {
        let begun = Instant::now();
        let said = run(bench(&room, dir, &format!("{arguments} --timeout 1"))
            .env(name, value)
            .env("FAKE_TRACE", "1"));
        assert_eq!(said.code, Some(2), "{name}={value}: {}", said.err);
        assert!(said.err.contains(named) && said.err.contains("--timeout"), "{name}={value}: {}", said.err);
        // It came back at all: how soon is the machine's business.
        assert!(begun.elapsed() < Duration::from_secs(90), "{name}={value}: {:?}", begun.elapsed());
        if !value.contains("Init") {
            let ranks = if arguments.contains("-t 2") { 2 } else { 4 };
            let aborted = said.err.matches("abort of rank").count();
            assert_eq!(aborted, ranks, "{name}={value} {arguments}: each communicator once\n{}", said.err);
        }
    }
}

#[test]
fn failed_calls_are_told_with_code_text_and_place() {
    let dir = fake_or_skip!("failed_calls_are_told_with_code_text_and_place");
    let room = Room::new();
    for (fails, texts) in [
        (
            "ncclAllReduce:9",
            ["ncclAllReduce: unhandled system error (2)", "during all_reduce of 8 bytes", "was told to fail"],
        ),
        (
            "ncclCommInitRank:1",
            ["ncclCommInitRank: unhandled system error (2)", "making a communicator", "rank "],
        ),
        ("ncclGetUniqueId", ["ncclGetUniqueId: unhandled system error (2)", "rank 0", ""]),
        ("ncclCommDestroy", ["ncclCommDestroy: unhandled system error (2)", "rank ", ""]),
        ("cuInit", ["cuInit", "CUDA_ERROR_LAUNCH_FAILED (719): unspecified launch failure", ""]),
        ("cuStreamQuery:30", ["cuStreamQuery on device", "CUDA_ERROR_LAUNCH_FAILED (719)", ""]),
        ("cuMemAlloc", ["cuMemAlloc on device", "(719)", ""]),
    ] {
        let said = run(bench(&room, dir, "-b 8 -e 64 -n 50").env("FAKE_FAIL", fails));
        assert_eq!(said.code, Some(2), "{fails}: {}", said.out);
        for text in texts {
            assert!(said.err.contains(text), "{fails}: {text} is missing: {}", said.err);
        }
        assert_eq!(said.err.lines().count(), 1, "{fails}: {}", said.err);
    }
    let said = run(bench(&room, dir, "-b 8 -e 8 --timeout 30")
        .env("FAKE_ASYNC", "1")
        .env("FAKE_HANG", "allreduce:0"));
    assert_eq!(said.code, Some(2));
    assert!(said.err.contains("rank 1: ncclCommGetAsyncError: remote process exited"), "{}", said.err);
    let said = run(&mut bench(&room, dir, "-b 8 -e 8G"));
    assert!(said.code == Some(2) && said.err.contains("has no room for two buffers"), "{}", said.err);
}

#[test]
fn combinations_that_make_no_sense_are_exit_code_2() {
    let dir = fake_or_skip!("combinations_that_make_no_sense_are_exit_code_2");
    let room = Room::new();
    for (arguments, named) in [
        ("-b 8 -e 4", "--min-bytes"),
        ("-b x", "--min-bytes"),
        ("-b 8 -e 64 -f 1", "--step-factor"),
        ("broadcast -r 4", "--root 4"),
        ("all_gather -b 8 -e 8", "--max-bytes 8"),
        ("-t 5", "5 GPUs are needed and 4 are visible"),
        ("-G 2 --blocking", "--cuda-graph"),
        ("--compare --variants none,nobody", "nobody"),
        ("--compare --null-mask all", "--null-mask"),
        ("--compare --with x", "--with"),
        ("--compare --with x=/nowhere.so", "/nowhere.so"),
    ] {
        let said = run(&mut bench(&room, dir, arguments));
        assert_eq!((said.code, said.out.as_str()), (Some(2), ""), "{arguments}");
        assert!(said.err.contains(named), "{arguments}: {}", said.err);
    }
}

#[test]
fn processes_find_each_other_and_rank_0_alone_prints() {
    let dir = fake_or_skip!("processes_find_each_other_and_rank_0_alone_prints");
    let room = Room::new();
    let said = processes(&room, dir, "-b 8 -e 8K -f 32 -g 2 --json --events -n 4", 3, &[]);
    let r = report(&said[0]);
    assert_eq!((r.wrong, r.environment.processes, r.environment.ranks.len()), (Some(0), 3, 6));
    let pids: std::collections::BTreeSet<u32> = r.environment.ranks.iter().map(|r| r.pid).collect();
    assert_eq!(pids.len(), 3);
    assert_eq!(r.environment.ranks.iter().map(|r| r.device).collect::<Vec<_>>(), [0, 1, 2, 3, 4, 5]);
    assert_eq!(r.sizes[0].out_of_place.events.as_ref().unwrap().len(), 6);
    for other in &said[1..] {
        assert_eq!((other.code, other.out.as_str(), other.err.as_str()), (Some(0), "", ""));
    }
}

#[test]
fn a_process_that_fails_ends_all_and_the_reason_is_told() {
    let dir = fake_or_skip!("a_process_that_fails_ends_all_and_the_reason_is_told");
    let room = Room::new();
    let said = processes(&room, dir, "-b 8 -e 8 --timeout 2", 2, &[("FAKE_HANG", "allreduce:1")]);
    for s in &said {
        assert_eq!((s.code, s.out.contains("wrong elements")), (Some(2), false), "{}", s.err);
        assert!(s.err.contains("all_reduce of 8 bytes"), "{}", s.err);
    }
}

#[test]
fn the_variants_take_turns_and_get_their_own_environment() {
    let dir = fake_or_skip!("the_variants_take_turns_and_get_their_own_environment");
    let room = Room::new();
    let log = room.path("log");
    let other = room.plugin();
    let with = format!("other={},RINGWATCH_DETAIL=less", other.display());
    let mut command = bench(
        &room,
        dir,
        "--compare -b 8 -e 64 -f 8 -n 2 -w 0 --rounds 2 --repeat 3 --null-mask 0xf5f --json",
    );
    let said =
        run(command.arg("--with").arg(with).env("FAKE_LOG", &log).env("NCCL_PROFILER_PLUGIN", "libfoo.so"));
    assert_eq!(said.code, Some(0), "{}", said.err);
    let lines = std::fs::read_to_string(&log).unwrap();
    let (own, null) = ("libnccl-profiler-ringwatch.so loads", "libnccl-profiler-ringwatch-null.so loads");
    let variants = [
        "- - - - -".to_owned(),
        format!("{own} - - dir"),
        format!("{own} full - dir"),
        format!("{null} - 0xf5f -"),
        format!("{own} less - dir"),
    ];
    // Those of a round are alive together.
    for round in lines.lines().collect::<Vec<_>>().chunks(5) {
        assert!(variants.iter().all(|v| round.contains(&v.as_str())), "{lines}");
    }
    assert_eq!(lines.lines().count(), 10);
    let json: serde_json::Value = serde_json::from_str(&said.out).unwrap();
    assert_eq!((&json["schema"], &json["baseline"]), (&1.into(), &"none".into()));
    // What has loaded the real plugin has left a segment, which went with its directory.
    let audits = json["audits"].as_array().unwrap();
    let audited: Vec<_> = audits.iter().map(|a| (a["variant"].as_str().unwrap(), &a["operations"])).collect();
    let none = &serde_json::json!(0);
    let (a, b, c) = (("ringwatch", none), ("ringwatch-full", none), ("other", none));
    assert_eq!(audited, [a, b, c, a, b, c]);
    let rows = json["rows"].as_array().unwrap();
    assert_eq!((rows.len(), json["trials"].as_array().unwrap().len()), (4, 10));
    for row in rows {
        let cells = row["cells"].as_array().unwrap();
        assert_eq!(cells.len(), 5);
        assert!(
            cells.iter().all(|c| c["ratio"]["rounds"] == 2 && c["rounds_ns"].as_array().unwrap().len() == 2)
        );
        assert!(cells.iter().all(|c| c["ratio"]["pairs"] == 6));
        assert!(cells[2]["ratio_to_floor"]["median"].is_number() && cells[1]["ratio_to_floor"].is_null());
    }
}

#[test]
fn a_variant_that_fails_is_told_by_name_with_its_last_words() {
    let dir = fake_or_skip!("a_variant_that_fails_is_told_by_name_with_its_last_words");
    let room = Room::new();
    let with = format!("bad={},FAKE_FAIL=ncclAllReduce", room.plugin().display());
    let mut command = bench(&room, dir, "--compare -b 8 -e 8 -n 2 --rounds 1 --variants none,bad");
    let said = run(command.arg("--with").arg(with));
    assert_eq!(said.code, Some(2), "{}", said.out);
    assert!(said.err.contains("bad failed: exit status: 2"), "{}", said.err);
    for part in [
        "# none: no plugin; 1 of 1 rounds",
        "bad: ",
        "0 of 1 rounds",
        "ncclAllReduce: unhandled system error (2)",
    ] {
        assert!(said.out.contains(part), "{part} is missing:\n{}", said.out);
    }
    // And one that does not end.
    let with = format!("slow={},FAKE_HANG=allreduce", room.plugin().display());
    let mut command =
        bench(&room, dir, "--compare -b 8 -e 8 -n 2 --rounds 1 --variants slow --variant-timeout 1");
    let said = run(command.arg("--with").arg(with));
    assert_eq!(said.code, Some(2));
    assert!(said.out.contains("it did not end in 1 s"), "{}", said.out);
}

#[test]
fn processes_compare_in_lockstep() {
    let dir = fake_or_skip!("processes_compare_in_lockstep");
    let room = Room::new();
    let arguments = "--compare -b 8 -e 8 -n 2 --rounds 3 --variants none,null --json";
    let said = processes(&room, dir, arguments, 2, &[]);
    assert_eq!((said[0].code, said[1].code), (Some(0), Some(0)), "{}\n{}", said[0].err, said[1].err);
    let json: serde_json::Value = serde_json::from_str(&said[0].out).unwrap();
    assert_eq!(json["rows"][0]["cells"][1]["ratio"]["rounds"], 3);
    assert_eq!((said[1].out.as_str(), said[1].err.as_str()), ("", ""));
}

#[test]
fn without_cuda_or_nccl_it_says_what_it_looked_for() {
    let room = Room::new();
    let said = run(room.ringwatch(["bench", "--cuda", "/nowhere/libcuda.so.1"]).env_remove("WORLD_SIZE"));
    assert_eq!((said.code, said.out.as_str()), (Some(2), ""));
    for part in ["no CUDA driver", "/nowhere/libcuda.so.1", "NVIDIA's driver"] {
        assert!(said.err.contains(part), "{part}: {}", said.err);
    }
    let Some(dir) = fake("without_cuda_or_nccl_it_says_what_it_looked_for (its NCCL half)") else { return };
    let cuda = dir.join("libcuda.so.1");
    let ringwatch = || {
        let mut command = room.ringwatch(["bench", "--cuda"]);
        command.arg(&cuda).env_remove("WORLD_SIZE");
        command
    };
    let said = run(ringwatch().args(["--nccl", "/nowhere/libnccl.so.2"]));
    assert_eq!((said.code, said.out.as_str()), (Some(2), ""));
    for part in
        ["no NCCL", "/nowhere/libnccl.so.2", "--nccl PATH", "site-packages/nvidia/nccl/lib/libnccl.so.2"]
    {
        assert!(said.err.contains(part), "{part}: {}", said.err);
    }
    let said = run(ringwatch().arg("--nccl").arg(&cuda));
    assert!(said.code == Some(2) && said.err.contains("has no nccl"), "{}", said.err);
    // The wheels of a virtual environment are found.
    let packages = room.path("venv/lib/python3.12/site-packages/nvidia/nccl/lib");
    std::fs::create_dir_all(&packages).unwrap();
    std::fs::copy(dir.join("libnccl.so.2"), packages.join("libnccl.so.2")).unwrap();
    let said = run(ringwatch().args(["-b", "8", "-e", "8"]).env("VIRTUAL_ENV", room.path("venv")));
    // A machine with an NCCL of its own has that one.
    if said.code == Some(0) {
        assert!(said.out.contains("/venv/lib/python3.12/site-packages/"), "{}", said.out);
    }
}

#[test]
fn under_srun_the_address_of_rank_0_has_to_be_told() {
    let room = Room::new();
    let mut command = room.ringwatch(["bench"]);
    command
        .env_remove("MASTER_ADDR")
        .env("SLURM_NTASKS", "2")
        .env("SLURM_PROCID", "0")
        .env("SLURM_LOCALID", "0");
    let said = run(&mut command);
    assert_eq!((said.code, said.out.as_str()), (Some(2), ""));
    assert!(said.err.contains("MASTER_ADDR") && said.err.contains("scontrol"), "{}", said.err);
}

#[test]
fn the_null_plugin_takes_every_abi_and_asks_for_what_it_knows() {
    use ringwatch::replay::{Abi, Pace, Player, PlayerOptions, Scenario, fixture};
    let room = Room::new();
    let plugin = ringwatch::bundle::install_null(&room.path("null")).unwrap();
    for abi in Abi::ALL {
        let trace = fixture(Scenario::Mixed, false);
        let mut options = PlayerOptions::new(plugin.clone(), abi, trace.timeline());
        options.pace = Pace::Unpaced;
        let report = Player::new(options).unwrap().play(&trace.ranks[0]).unwrap();
        assert!(report.inits > 0, "{abi:?}: {report:?}");
        let bad = report.nonzero_returns + report.null_handles + report.unwritten_handles;
        assert_eq!((bad, report.warnings.len()), (0, 0), "{abi:?}: {report:?}");
        // By its default mask: collectives, and kernels on channels where the version knows them; no network.
        let told = |kind: &str| report.starts.contains_key(kind);
        assert!(told("Coll") && !told("ProxyOp"), "{abi:?}: {report:?}");
        if abi == Abi::ALL[4] {
            assert!(told("KernelCh"), "{abi:?}: {report:?}");
        }
    }
}

#[test]
fn the_null_plugin_is_as_small_as_it_can_be() {
    use object::{Object as _, ObjectSymbol as _};
    let file = object::File::parse(ringwatch::bundle::NULL_PLUGIN).unwrap();
    let names = |undefined: bool| -> Vec<String> {
        let found = file.dynamic_symbols().filter(|s| s.is_undefined() == undefined && !s.is_weak());
        let mut names: Vec<String> = found.filter_map(|s| Some(s.name().ok()?.to_owned())).collect();
        names.retain(|n| !n.is_empty());
        names.sort();
        names
    };
    assert_eq!(names(false), (1..=7).map(|v| format!("ncclProfiler_v{v}")).collect::<Vec<_>>());
    assert!(names(true).iter().all(|n| n == "getenv" || n == "strlen"), "{:?}", names(true));
    let all: Vec<_> = file.symbols().filter_map(|s| s.name().ok().map(str::to_owned)).collect();
    assert!(all.len() > 10 && !all.iter().any(|n| n.contains("panick")), "{all:?}");
}
