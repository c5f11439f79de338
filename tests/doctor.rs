//! `ringwatch doctor` as people run it: on this machine, against a driver's library of two GPUs, against libraries of NCCL
//! that `cc` builds here, and with one process a rank.

use crate::support::{Room, Said, finish, run, skipped};
use ringwatch::doctor::{Outcome, Report, Status};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// Builds a shared library; `None` without a C compiler, and the test counts as skipped.
fn library(test: &str, to: &Path, source: &Path, more: &[&str]) -> Option<()> {
    if Command::new("cc").arg("--version").output().is_err() {
        skipped(test, "a C compiler (cc)");
        return None;
    }
    std::fs::create_dir_all(to.parent().unwrap()).unwrap();
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-fPIC", "-O1", "-o"]).arg(to).arg(source).args(more);
    let said = cc.output().unwrap();
    assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
    Some(())
}

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

/// A library that says of itself what a libnccl of this version says.
fn nccl(test: &str, room: &Room, at: &str, version: &str) -> Option<PathBuf> {
    let source = room.path(&format!("nccl-{version}.c"));
    let names = ["NCCL_DEBUG", "NCCL_SOCKET_IFNAME", "NCCL_P2P_DISABLE", "NCCL_BUFFSIZE"];
    let texts: String = names.iter().map(|n| format!("\"{n}\", ")).collect();
    let text = format!("const char *texts[] = {{{texts}\"NCCL version {version}+cuda12.9\"}};\n");
    std::fs::write(&source, text).unwrap();
    let to = room.path(at).join("libnccl.so.2");
    library(test, &to, &source, &["-Wl,-soname,libnccl.so.2"])?;
    Some(to)
}

/// The command without what this machine's environment says of NCCL.
fn doctor(room: &Room, arguments: &str) -> Command {
    let mut command = room.ringwatch(["doctor"]);
    command.args(arguments.split_whitespace());
    let ours = |n: &str| {
        ["NCCL_", "LD_", "VIRTUAL_ENV", "CONDA_", "CUDA_", "WORLD_SIZE", "SLURM_"]
            .iter()
            .any(|b| n.starts_with(b))
    };
    for (name, _) in std::env::vars_os() {
        if ours(&name.to_string_lossy()) {
            command.env_remove(name);
        }
    }
    command.env("HOME", room.path(""));
    command
}

fn report(said: &Said) -> Report {
    serde_json::from_str(&said.out).unwrap_or_else(|e| panic!("{e}: {} {}", said.out, said.err))
}

fn outcome<'r>(report: &'r Report, id: &str) -> &'r Outcome {
    report.outcomes.iter().find(|o| o.id == id).unwrap_or_else(|| panic!("{id}: {report:?}"))
}

/// All that a check saw, with its remedies.
fn text(report: &Report, id: &str) -> String {
    let one =
        |r: &ringwatch::doctor::Observation| format!("{} -> {}", r.seen, r.fix.as_deref().unwrap_or("-"));
    outcome(report, id).results.iter().map(one).collect::<Vec<_>>().join("\n")
}

#[test]
fn it_says_what_it_checks_and_refuses_what_it_does_not_know() {
    let room = Room::new();
    let said = run(&mut doctor(&room, "--list"));
    assert_eq!(said.code, Some(0));
    for id in ["driver", "nccl-versions", "p2p", "socket-interface", "file-size", "variable-names"] {
        assert!(said.out.lines().any(|l| l.split_whitespace().next() == Some(id)), "{id}: {}", said.out);
    }
    let said = run(&mut doctor(&room, "dirver"));
    assert_eq!(said.code, Some(2));
    assert!(said.err.contains("there is no check \"dirver\"; ringwatch doctor --list"), "{}", said.err);
}

#[test]
fn the_plugin_records_with_every_interface_and_nothing_here_fails() {
    let room = Room::new();
    // Other tests may take the CPUs.
    let said = run(&mut doctor(&room, "--json --limit 60"));
    let r = report(&said);
    assert_eq!(outcome(&r, "plugin").status, Status::Pass, "{}", text(&r, "plugin"));
    let failed: Vec<_> = r.outcomes.iter().filter(|o| o.status == Status::Fail).collect();
    assert!(failed.is_empty() && said.code == Some(0), "{failed:#?}");
}

#[test]
fn a_limit_of_the_shell_is_a_failure_and_exit_code_1() {
    let room = Room::new();
    let program = doctor(&room, "").get_program().to_owned();
    let mut shell = Command::new("sh");
    shell.arg("-c").arg(format!("ulimit -f 1000; exec {} doctor file-size", program.display()));
    let said = run(&mut shell);
    assert_eq!(said.code, Some(1), "{}", said.err);
    assert!(
        said.out.contains("FAIL file-size") && said.out.contains("fix: ulimit -f unlimited"),
        "{}",
        said.out
    );
    assert!(said.out.ends_with("0 passed, 0 warnings, 1 failures, 0 skipped\n"), "{}", said.out);
}

#[test]
fn names_of_variables_are_those_of_the_library_that_a_job_loads() {
    let room = Room::new();
    let Some(file) =
        nccl("names_of_variables_are_those_of_the_library_that_a_job_loads", &room, "lib", "2.99.1")
    else {
        return;
    };
    let mut command = doctor(&room, "--json nccl variable-names");
    command.env("LD_LIBRARY_PATH", file.parent().unwrap());
    command.envs([("NCCL_DEBUG", "WARN"), ("NCCL_SOCKET_IFNAM", "eth0"), ("NCCL_IB_HCA", "mlx5")]);
    let r = report(&run(&mut command));
    assert!(text(&r, "nccl").contains("NCCL 2.99.1, CUDA 12.9"), "{}", text(&r, "nccl"));
    let names = text(&r, "variable-names");
    assert_eq!(outcome(&r, "variable-names").status, Status::Warn);
    assert!(names.contains("NCCL_SOCKET_IFNAM is unknown to NCCL 2.99.1"), "{names}");
    assert!(names.contains("it is near to NCCL_SOCKET_IFNAME"), "{names}");
    assert!(names.contains("NCCL_IB_HCA is unknown") && !names.contains("NCCL_DEBUG "), "{names}");
}

#[test]
fn two_versions_of_nccl_are_named_with_who_loads_which() {
    let test = "two_versions_of_nccl_are_named_with_who_loads_which";
    let room = Room::new();
    let packages = "venv/lib/python3.12/site-packages";
    let Some(of_torch) = nccl(test, &room, &format!("{packages}/nvidia/nccl/lib"), "2.28.9") else { return };
    let Some(by_name) = nccl(test, &room, "system", "2.18.3") else { return };
    let torch = room.path(packages).join("torch/lib/libtorch_cuda.so");
    let source = room.path("torch.c");
    std::fs::write(&source, "const char *names[] = {\"TORCH_NCCL_BLOCKING_WAIT\"};\n").unwrap();
    let directory = of_torch.parent().unwrap().display();
    let flags = [
        format!("-L{directory}"),
        "-Wl,--no-as-needed,--disable-new-dtags".to_owned(),
        format!("-Wl,-rpath,{directory}"),
    ];
    let mut flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    flags.push("-l:libnccl.so.2");
    library(test, &torch, &source, &flags).unwrap();
    let mut command = doctor(&room, "--json nccl-versions variable-names");
    command.env("VIRTUAL_ENV", room.path("venv")).env("LD_LIBRARY_PATH", by_name.parent().unwrap());
    command.env("NCCL_BLOCKING_WAIT", "1");
    let r = report(&run(&mut command));
    let seen = text(&r, "nccl-versions");
    assert_eq!(outcome(&r, "nccl-versions").status, Status::Warn, "{seen}");
    assert!(
        seen.contains("loads NCCL 2.28.9 from") && seen.contains("programs that ask by name 2.18.3"),
        "{seen}"
    );
    let names = text(&r, "variable-names");
    assert!(
        names.contains("NCCL_BLOCKING_WAIT was renamed: PyTorch reads TORCH_NCCL_BLOCKING_WAIT"),
        "{names}"
    );
}

#[test]
fn a_sick_gpu_is_named_and_its_healthy_neighbor_is_not() {
    let room = Room::new();
    let nvml = room.path("libnvidia-ml.so.1");
    let test = "a_sick_gpu_is_named_and_its_healthy_neighbor_is_not";
    if library(test, &nvml, &data("fake_nvml.c"), &["-DMONITOR"]).is_none() {
        return skipped(test, "a C compiler (cc)");
    }
    let r = report(&run(doctor(&room, "--json").arg("--nvml").arg(&nvml)));
    assert_eq!(text(&r, "gpus"), "2 x Fake H200 -> -");
    let second = "GPU 1 (0000:1b:00.0)";
    let planted = [
        ("pcie", "8 of 16 lanes -> reseat"),
        ("clocks", "its clocks are held down (slowed down by the hardware, too hot), 87 C"),
        ("memory-errors", "a row of memory waits to be replaced"),
    ];
    for (id, part) in planted {
        let seen = text(&r, id);
        assert!(outcome(&r, id).status >= Status::Warn && seen.contains(second), "{id}: {seen}");
        assert!(seen.contains(part) && !seen.contains("GPU 0 "), "{id}: {seen}");
    }
    let p2p = text(&r, "p2p");
    assert!(p2p.contains("no peer access (not supported): 0000:1a:00.0 and 0000:1b:00.0"), "{p2p}");
    let topology = text(&r, "topology");
    assert!(topology.contains("GPU0  GPU1") && topology.contains("NV"), "{topology}");
}

/// Directory of a fake libcuda.so.1 and libnccl.so.2 whose GPUs are the host's memory.
fn fake_gpu(test: &str, room: &Room) -> Option<PathBuf> {
    let dir = room.path("gpu");
    let (cuda, nccl) = (dir.join("libcuda.so.1"), dir.join("libnccl.so.2"));
    library(test, &cuda, &data("fake_gpu.c"), &["-DFAKE_CUDA", "-Wl,-soname,libcuda.so.1"])?;
    let there = format!("-L{}", dir.display());
    library(
        test,
        &nccl,
        &data("fake_gpu.c"),
        &["-DFAKE_NCCL", "-Wl,-soname,libnccl.so.2", &there, "-l:libcuda.so.1", "-ldl"],
    )?;
    Some(dir)
}

/// One process a rank, as torchrun starts them; `more` is the environment of one of them.
fn ranks(room: &Room, fake: &Path, world: u32, port: u16, more: (u32, &[(&str, &str)])) -> Vec<Said> {
    let start = |rank: u32| -> Child {
        let mut command = doctor(room, "--ranks --json socket-interface");
        command.arg("--cuda").arg(fake.join("libcuda.so.1")).arg("--nccl").arg(fake.join("libnccl.so.2"));
        for (name, value) in [("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", world), ("FAKE_GPUS", 8)] {
            command.env(name, value.to_string());
        }
        command.env("LD_LIBRARY_PATH", fake).env("FAKE_ARENA", room.path("arena"));
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
        command.env("TORCHELASTIC_RUN_ID", room.path(""));
        if more.0 == rank {
            command.envs(more.1.iter().copied());
        }
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let children: Vec<Child> = (0..world).map(start).collect();
    let said = children.into_iter().map(finish).map(|o| Said {
        code: o.status.code(),
        out: String::from_utf8(o.stdout).unwrap(),
        err: String::from_utf8(o.stderr).unwrap(),
    });
    said.collect()
}

/// A port behind which 32 belong to one test alone, below those that the system gives away and above those of tests/bench.rs.
fn port(test: u16) -> u16 {
    29_600 + u16::try_from(std::process::id() % 8).unwrap() * 99 + test * 33
}

#[test]
fn ranks_that_are_alike_pass_and_rank_0_alone_prints() {
    let room = Room::new();
    let Some(fake) = fake_gpu("ranks_that_are_alike_pass_and_rank_0_alone_prints", &room) else { return };
    let said = ranks(&room, &fake, 3, port(0), (9, &[]));
    for other in &said[1..] {
        assert_eq!((other.code, other.out.as_str(), other.err.as_str()), (Some(0), "", ""));
    }
    let r = report(&said[0]);
    for id in ["ranks-alike", "ranks-clock", "collectives"] {
        assert_eq!(outcome(&r, id).status, Status::Pass, "{}", text(&r, id));
    }
    assert!(
        text(&r, "ranks-alike").contains("3 ranks on 1 hosts have the same"),
        "{}",
        text(&r, "ranks-alike")
    );
    assert!(text(&r, "collectives").contains("3 ranks: all-reduce of 8 B"), "{}", text(&r, "collectives"));
    assert!(outcome(&r, "pairs").results[0].status >= Status::Pass);
}

#[test]
fn a_rank_with_another_environment_is_named() {
    let room = Room::new();
    let Some(fake) = fake_gpu("a_rank_with_another_environment_is_named", &room) else { return };
    let said =
        ranks(&room, &fake, 2, port(1), (1, &[("NCCL_PROTO", "LL"), ("NCCL_SOCKET_IFNAME", "nowhere0")]));
    let r = report(&said[0]);
    let seen = text(&r, "ranks-alike");
    assert_eq!((outcome(&r, "ranks-alike").status, said[0].code), (Status::Fail, Some(1)), "{seen}");
    assert!(seen.contains("NCCL_PROTO is not set, but LL on rank 1"), "{seen}");
    let interface = text(&r, "socket-interface");
    assert!(interface.contains("(rank 1): NCCL_SOCKET_IFNAME=nowhere0 selects no interface"), "{interface}");
}

#[test]
fn a_rank_without_a_library_is_named_and_nobody_hangs() {
    let room = Room::new();
    let Some(fake) = fake_gpu("a_rank_without_a_library_is_named_and_nobody_hangs", &room) else { return };
    let said = ranks(&room, &fake, 2, port(2), (1, &[("FAKE_GPUS", "0")]));
    let r = report(&said[0]);
    let seen = text(&r, "collectives");
    assert_eq!(outcome(&r, "collectives").status, Status::Fail, "{seen}");
    assert!(seen.contains("ranks 1 cannot take part"), "{seen}");
}
