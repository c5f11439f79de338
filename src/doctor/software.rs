//! Drivers and libraries, the plugin, and Ringwatch's own agent and settings.

use super::host::{Host, text};
use super::libraries::{Libraries, found, needed_by};
use super::{Area, Check, Observation, elf, process};
use crate::bench::cuda::Cuda;
use crate::bench::nccl::FILE_NAME as NCCL;
use crate::bundle;
use crate::config::{self, Config, Overrides};
use crate::replay::Abi;
use crate::runtime;
use rustix::fs::{StatVfsMountFlags, statvfs};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

pub(super) const CHECKS: &[Check] = &[
    Check { id: "driver", area: Area::Software, run: driver },
    Check { id: "cuda", area: Area::Software, run: cuda },
    Check { id: "nccl", area: Area::Software, run: nccl },
    Check { id: "nccl-versions", area: Area::Software, run: nccl_versions },
    Check { id: "plugin", area: Area::Software, run: plugin },
    Check { id: "job-plugins", area: Area::Software, run: job_plugins },
    Check { id: "settings", area: Area::Software, run: settings },
    Check { id: "agent", area: Area::Software, run: agent },
    Check { id: "bus", area: Area::Software, run: bus },
    Check { id: "permissions", area: Area::Software, run: permissions },
];

/// A recorded job takes less than a second; this is half of a check's time.
const PLAYING: Duration = Duration::from_secs(5);
/// The agent's settings, when no file is named.
const SETTINGS: &str = "/etc/ringwatch/agent.yaml";

fn driver(host: &Host) -> Vec<Observation> {
    let addresses = host.gpu_addresses();
    match host.gpus() {
        Ok(i) => {
            let (driver, cuda) = (i.driver.as_deref().unwrap_or("-"), i.cuda.as_deref().unwrap_or("-"));
            vec![Observation::pass(format!("driver {driver}, for CUDA up to {cuda}, {} GPUs", i.gpus.len()))]
        }
        Err(_) if addresses.is_empty() => vec![Observation::skip("this host has no GPU of NVIDIA")],
        Err(_) if host.is_container() && host.own_gpu_addresses().is_empty() => {
            vec![Observation::skip("this container was given none of the host's GPUs")]
        }
        Err(why) => {
            let loaded = host.text("proc/driver/nvidia/version");
            let loaded =
                loaded.as_deref().and_then(|v| v.lines().next()).unwrap_or("no kernel module is loaded");
            let seen = format!("{} GPUs on PCI, and NVML cannot be used: {why} ({loaded})", addresses.len());
            let fix = "load the driver (modprobe nvidia); after an update of the driver restart the host; in a container \
                       start it with --gpus all";
            vec![Observation::fail(seen, fix)]
        }
    }
}

fn cuda(host: &Host) -> Vec<Observation> {
    let found = Cuda::open(host.cuda.as_deref()).and_then(|c| Ok((c.driver_version()?, c.device_count())));
    let visible = host.variables.get("CUDA_VISIBLE_DEVICES");
    let there = host.gpus().map_or(0, |i| i.gpus.len());
    match found {
        Ok((version, count)) => {
            let seen = format!("CUDA {}.{}, {count} devices", version / 1000, version % 1000 / 10);
            vec![match visible {
                Some(v) if count < there => {
                    Observation::pass(format!("{seen} of {there} (CUDA_VISIBLE_DEVICES={v})"))
                }
                // One MIG instance, or those that the control group leaves.
                None if count < there => Observation::pass(format!("{seen}, NVML has {there} GPUs")),
                _ => Observation::pass(seen),
            }]
        }
        Err(_) if there == 0 && (host.gpu_addresses().is_empty() || host.is_container()) => {
            vec![Observation::skip("no GPU of NVIDIA is here (see the check driver)")]
        }
        Err(e) => vec![match visible {
            Some(v) => Observation::fail(
                format!("{e} (CUDA_VISIBLE_DEVICES={v:?})"),
                "unset CUDA_VISIBLE_DEVICES, or name GPUs that are there: numbers from 0, or UUIDs",
            ),
            None => Observation::fail(e.to_string(), "put libcuda.so.1 of the driver on the loader's path"),
        }],
    }
}

fn nccl(host: &Host) -> Vec<Observation> {
    let libraries = Libraries::find(host);
    let mut results = Vec::new();
    for library in libraries.all() {
        let who = match &libraries {
            l if l.of_torch.as_ref().is_some_and(|(_, t)| t == library) => "PyTorch loads",
            l if l.by_name.as_ref() == Some(library) => "a program that asks by name loads",
            _ => "is there as well:",
        };
        results.push(match &library.facts {
            Ok(facts) => {
                let cuda = facts.cuda.as_deref().unwrap_or("-");
                Observation::pass(format!(
                    "{who} {} (NCCL {}, CUDA {cuda})",
                    library.path.display(),
                    library.version()
                ))
            }
            Err(why) => Observation::fail(
                format!("{who} {}, which is no library: {why}", library.path.display()),
                "install it again; a file of Git LFS or a link to nowhere looks like this",
            ),
        });
    }
    if results.is_empty() {
        let seen = format!("{NCCL} is neither on the loader's path nor among Python's packages");
        results.push(if host.gpu_addresses().is_empty() {
            Observation::skip(seen)
        } else {
            let fix = "install it (pip install nvidia-nccl-cu12), or add its directory to LD_LIBRARY_PATH; a program may \
                       have NCCL inside";
            Observation::warn(seen, fix)
        });
    }
    results
}

fn nccl_versions(host: &Host) -> Vec<Observation> {
    let libraries = Libraries::find(host);
    let (Some(by_name), Some((torch, of_torch))) = (&libraries.by_name, &libraries.of_torch) else {
        return vec![Observation::skip("there are not two that a job could mix")];
    };
    let (first, second) = (of_torch.version(), by_name.version());
    vec![if first == second {
        Observation::pass(format!("PyTorch and programs that ask by name both load NCCL {first}"))
    } else {
        let seen = format!(
            "two versions: PyTorch ({}) loads NCCL {first} from {}, programs that ask by name {second} from {}",
            torch.display(),
            of_torch.path.display(),
            by_name.path.display()
        );
        let fix = "let all ranks and extensions use one: take the directory of one of them out of LD_LIBRARY_PATH, or \
                   name PyTorch's there";
        Observation::warn(seen, fix)
    }]
}

/// Plays one rank of a recorded job on the plugin, with one version of NCCL's interface.
fn played(program: &Path, plugin: &Path, segments: &Path, abi: Abi) -> Result<(), String> {
    let mut command = Command::new(program);
    command.args(["replay", "--scenario", "mixed", "--rank", "0", "--unpaced", "--abi"]);
    command.arg(abi.number().to_string()).arg("--plugin").arg(plugin);
    for (name, _) in std::env::vars_os().filter(|(n, _)| n.to_string_lossy().starts_with("RINGWATCH_")) {
        command.env_remove(name);
    }
    let said = process::run(command.env("RINGWATCH_DIR", segments), PLAYING).map_err(|e| e.to_string())?;
    if !said.status.success() {
        return Err(said.err.lines().last().map_or_else(|| said.status.to_string(), str::to_owned));
    }
    let is_segment = |e: std::fs::DirEntry| e.path().extension().is_some_and(|x| x == "seg");
    let there = std::fs::read_dir(segments).is_ok_and(|d| d.flatten().any(is_segment));
    if there { Ok(()) } else { Err("it recorded nothing".to_owned()) }
}

fn plugin(host: &Host) -> Vec<Observation> {
    let Some(program) = &host.program else {
        return vec![Observation::skip("this program's own file is unknown")];
    };
    let fix = "see the text of the error; report it with the bundle (doctor --bundle FILE) if nothing on this host explains it";
    let is_noexec = |p: &Path| statvfs(p).is_ok_and(|v| v.f_flag.contains(StatVfsMountFlags::NOEXEC));
    // Where temporary files may not be executed, the user's cache, where the plugin goes otherwise.
    let cache = host.variable("HOME").map(|h| Path::new(h).join(".cache"));
    let places = [Some(std::env::temp_dir()), cache].into_iter().flatten();
    let Some(place) = places.filter(|p| !is_noexec(p)).find_map(|p| tempfile::tempdir_in(p).ok()) else {
        let seen =
            "neither the directory for temporary files nor ~/.cache takes a library that can be loaded";
        return vec![Observation::skip(seen)];
    };
    let file = match bundle::install(&place.path().join("plugin")) {
        Ok(file) => file,
        Err(e) => {
            return vec![Observation::fail(
                format!("the plugin cannot be written: {e}"),
                "make room in TMPDIR",
            )];
        }
    };
    let try_one = |abi: Abi| {
        let segments = place.path().join(abi.to_string());
        let made = std::fs::create_dir(&segments).map_err(|e| e.to_string());
        let why = made.and_then(|()| played(program, &file, &segments, abi)).err()?;
        Some(Observation::fail(format!("with interface {abi} it does not work: {why}"), fix))
    };
    // At the same time: one after the other they take the check's whole time on a busy host.
    let mut results: Vec<Observation> = std::thread::scope(|scope| {
        let tried: Vec<_> = Abi::ALL.iter().map(|abi| scope.spawn(|| try_one(*abi))).collect();
        let joined = tried.into_iter().map(|t| t.join().unwrap_or_else(|e| std::panic::resume_unwind(e)));
        joined.flatten().collect()
    });
    if results.is_empty() {
        results.push(Observation::pass(format!(
            "loaded, and recorded a job, with interfaces v1 to v{}",
            Abi::ALL.len()
        )));
    }
    results
}

/// The file that NCCL opens for the value of a variable that names a plugin.
pub(super) fn plugin_file(host: &Host, value: &str, kind: &str) -> Option<PathBuf> {
    if value.contains('/') {
        return Some(PathBuf::from(value)).filter(|p| p.is_file());
    }
    found(host, value).or_else(|| found(host, &format!("libnccl-{kind}-{value}.so")))
}

/// The plugin that NCCL would find where a variable names one.
fn job_plugin(host: &Host, variable: &str, value: &str, kind: &str, symbol: &str) -> Observation {
    let named = format!("{variable}={value}");
    let fix =
        "eval \"$(ringwatch plugin)\" prints what Ringwatch's plugin needs; NCCL itself says nothing of this";
    let Some(file) = plugin_file(host, value, kind) else {
        return Observation::fail(
            format!("{named}: the dynamic linker finds no such file; NCCL goes on without it"),
            fix,
        );
    };
    let shown = file.display();
    let is_noexec = |p: &Path| statvfs(p).is_ok_and(|v| v.f_flag.contains(StatVfsMountFlags::NOEXEC));
    if is_noexec(&file) {
        let fix = "move it to a directory that is not mounted noexec (often /dev/shm and /tmp are)";
        return Observation::fail(
            format!("{named}: {shown} is on a file system without leave to execute (noexec)"),
            fix,
        );
    }
    let missing: Vec<String> =
        needed_by(&file).into_iter().filter(|(_, path)| path.is_none()).map(|(name, _)| name).collect();
    match elf::exports(&file, symbol) {
        Err(why) => Observation::fail(format!("{named}: {why}; NCCL goes on without it"), fix),
        Ok(_) if !missing.is_empty() => {
            let seen = format!("{named}: {shown} needs {}, which is not found", missing.join(", "));
            Observation::fail(seen, "add the directories of these libraries to LD_LIBRARY_PATH")
        }
        Ok(names) if names.is_empty() => Observation::fail(
            format!("{named}: {shown} exports no {symbol}*: it is no {kind} of NCCL's"),
            fix,
        ),
        Ok(names) => Observation::pass(format!("{named}: {shown} ({})", names.join(", "))),
    }
}

fn job_plugins(host: &Host) -> Vec<Observation> {
    let kinds = [
        ("NCCL_PROFILER_PLUGIN", "profiler", "ncclProfiler_v"),
        ("NCCL_TUNER_PLUGIN", "tuner", "ncclTunerPlugin_v"),
        ("NCCL_NET_PLUGIN", "net", "ncclNetPlugin_v"),
    ];
    let is_file =
        |v: &str| !v.eq_ignore_ascii_case("none") && !"STATIC_PLUGIN".starts_with(&v.to_uppercase());
    let mut results: Vec<Observation> = kinds
        .iter()
        .flat_map(|(variable, kind, symbol)| {
            // For the network it is a list.
            let values = host
                .variable(variable)
                .unwrap_or_default()
                .split(',')
                .filter(|v| !v.is_empty() && is_file(v));
            values.map(|value| job_plugin(host, variable, value, kind, symbol)).collect::<Vec<_>>()
        })
        .collect();
    let preload = host.variable("LD_PRELOAD").unwrap_or_default();
    for file in preload.split([':', ' ']).filter(|f| f.contains('/')) {
        if !Path::new(file).is_file() {
            let seen =
                format!("LD_PRELOAD names {file}, which is not there; every program says so and goes on");
            results.push(Observation::fail(seen, "correct the path, or unset it"));
        }
    }
    if results.is_empty() {
        results.push(Observation::skip(
            "the environment names no plugin; `ringwatch run` sets what it needs itself",
        ));
    }
    results
}

/// The agent's settings, and the file they are of.
fn load(host: &Host) -> Result<(Config, Option<PathBuf>), config::Error> {
    let file = host.config.clone().or_else(|| Some(host.path(SETTINGS)).filter(|p| p.exists()));
    let variables = host.variables.clone().into_iter();
    let config = config::load(file.as_deref(), &Overrides::default().environment(variables))?;
    Ok((config, file))
}

fn settings(host: &Host) -> Vec<Observation> {
    match load(host) {
        Ok((_, Some(file))) => vec![Observation::pass(format!("{} is right", file.display()))],
        Ok((_, None)) => vec![Observation::pass("no file: the defaults")],
        Err(e) => {
            vec![Observation::fail(e.to_string(), "correct it: ringwatch config check says when it is right")]
        }
    }
}

fn agent(host: &Host) -> Vec<Observation> {
    let Ok((config, _)) = load(host) else { return vec![Observation::skip("the settings cannot be read")] };
    let Some(path) = &config.socket.path else {
        return vec![Observation::skip("the agent's socket is switched off")];
    };
    let path = host.path(&path.display().to_string());
    if !path.exists() {
        return vec![Observation::skip(format!("no agent runs here: {} does not exist", path.display()))];
    }
    vec![match runtime::ask(&path) {
        Ok(s) => Observation::pass(format!("{}; {} communicators", s.source, s.comms.len())),
        Err(e) => {
            Observation::fail(e.to_string(), "systemctl status ringwatch-agent, or start `ringwatch agent`")
        }
    }]
}

fn bus(host: &Host) -> Vec<Observation> {
    let Ok((config, _)) = load(host) else { return vec![Observation::skip("the settings cannot be read")] };
    if config.cluster.servers.is_empty() {
        return vec![Observation::skip("the settings name no bus (cluster.servers)")];
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let asked = match runtime {
        Ok(r) => r.block_on(runtime::cluster::ask(&config.cluster)).map_err(|e| e.to_string()),
        Err(e) => Err(e.to_string()),
    };
    vec![match asked {
        Ok(c) if c.analysers == 0 => Observation::warn(
            format!(
                "the bus answers, with {} nodes and no analyser: nobody judges what spans hosts",
                c.nodes.len()
            ),
            "start `ringwatch analyser` somewhere",
        ),
        Ok(c) => Observation::pass(format!("{} analysers, {} nodes", c.analysers, c.nodes.len())),
        Err(e) => Observation::fail(
            e,
            "see cluster.servers in the settings, the server's log, and firewalls between",
        ),
    }]
}

fn permissions(host: &Host) -> Vec<Observation> {
    let euid = rustix::process::geteuid();
    if euid.is_root() {
        return vec![Observation::pass("root: the agent can see the jobs of all users")];
    }
    let ptrace = text(&host.path("proc/sys/kernel/yama/ptrace_scope")).and_then(|t| t.parse::<u32>().ok());
    let mut results =
        vec![Observation::pass(format!("user {}: Ringwatch sees this user's jobs", euid.as_raw()))];
    if ptrace.is_some_and(|level| level >= 2) {
        let seen = "kernel.yama.ptrace_scope forbids reading the stacks of this user's own processes";
        results.push(Observation::warn(seen, "sysctl kernel.yama.ptrace_scope=1, or run the agent as root"));
    }
    results
}
