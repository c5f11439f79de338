//! The packages, installed into clean roots, and the files that put the plugin into jobs which Ringwatch does not start.

use crate::support::{PROGRAM, Room, Said, run, skipped};
use ringwatch::bundle;
use serde_yaml::Value;
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Each package with the tools that it takes.
const PACKAGES: [(&str, &[&str]); 6] = [
    ("tarball", &["systemd-analyze"]),
    ("deb", &["dpkg-deb", "systemd-analyze"]),
    ("rpm", &["rpmbuild", "systemd-analyze"]),
    ("wheel", &[]),
    ("image", &["buildah"]),
    ("sbom", &[]),
];

/// Where the .deb and the .rpm put the libraries.
const FOLDER: &str = "/usr/lib/ringwatch";

fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
}

fn text(name: &str) -> String {
    fs::read_to_string(file(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
}

/// True where a program can be started; without it the test counts as skipped.
fn has(test: &str, program: &str) -> bool {
    let there = Command::new(program).arg("--version").output().is_ok_and(|o| o.status.success());
    if !there {
        skipped(test, program);
    }
    there
}

/// True for root, which `check` asks for the image; else the test counts as skipped.
fn is_root(test: &str) -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        skipped(test, "root, which can mount an image");
    }
    root
}

/// True where clean roots can be entered; else the test counts as skipped.
fn can_enter_roots(test: &str) -> bool {
    let user = (!rustix::process::geteuid().is_root()).then_some("--map-root-user");
    let tried = Command::new("unshare").args(user).args(["--mount", "--pid", "--fork", "true"]).output();
    let can = tried.is_ok_and(|o| o.status.success());
    if !can {
        skipped(test, "unshare, and the right to make mount and pid namespaces (root)");
    }
    can
}

/// A script of `config/packages`. Cargo, which it asks for the crates, has the home of whoever runs the tests. Packages are
/// too large for the memory that rooms are in.
fn script(room: &Room, name: &str, scratch: &Path) -> Command {
    let mut command = room.command("python3");
    command.arg(file("config/packages").join(name)).env("TMPDIR", scratch);
    if let Some(home) = std::env::var_os("HOME") {
        command.env("HOME", home);
    }
    command
}

/// Builds packages of the program under test.
fn build(room: &Room, scratch: &Path, output: &Path, packages: &[&str]) {
    let mut command = script(room, "build", scratch);
    command.args(["--fast", "--base", "this-machine", "--binary", PROGRAM, "--output"]);
    let said = run(command.arg(output).args(packages).arg("checksums"));
    assert_eq!(said.code, Some(0), "{}", said.err);
}

/// Runs `check` on packages, and returns what it prints.
fn check(room: &Room, scratch: &Path, output: &Path, packages: &[&str]) -> Said {
    run(script(room, "check", scratch).arg("--output").arg(output).args(packages))
}

/// Damages a package by a shell's commands, in a folder where it lies alone, and returns what `check` says.
fn damaged(room: &Room, scratch: &Path, output: &Path, package: &str, damage: &str) -> String {
    let copy = tempfile::tempdir_in(scratch).unwrap();
    let patterns =
        [("tarball", ".gz"), ("deb", ".deb"), ("rpm", ".rpm"), ("wheel", ".whl"), ("sbom", ".json")];
    for path in crate::support::files(output) {
        let name = path.file_name().unwrap().to_str().unwrap();
        if package == "checksums" || patterns.iter().any(|(p, end)| *p == package && name.ends_with(end)) {
            fs::copy(&path, copy.path().join(name)).unwrap();
        }
    }
    let done = run(room.command("sh").args(["-ec", damage]).current_dir(copy.path()));
    assert_eq!(done.code, Some(0), "{damage}: {}", done.err);
    let said = check(room, scratch, copy.path(), &[package]);
    assert_eq!(said.code, Some(1), "{package} passes after {damage}: {}", said.out);
    said.err
}

/// The packages whose tools are here; `None` where none can be tested. For each other one the test counts as skipped.
fn possible(test: &str, packages: &[&str]) -> Option<Vec<&'static str>> {
    if !["python3", "strip", "objdump"].iter().all(|t| has(test, t)) || !can_enter_roots(test) {
        return None;
    }
    let asked = PACKAGES.iter().filter(|(name, _)| packages.contains(name));
    let asked = asked.filter(|(name, _)| *name != "image" || is_root(test));
    Some(asked.filter(|(_, tools)| tools.iter().all(|t| has(test, t))).map(|(name, _)| *name).collect())
}

/// A folder on a disk.
fn scratch() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

#[test]
fn every_package_installs_into_a_clean_root_and_runs_there() {
    let test = "every_package_installs_into_a_clean_root_and_runs_there";
    let Some(mut packages) = possible(test, &PACKAGES.map(|(name, _)| name)) else { return };
    let (room, scratch) = (Room::new(), scratch());
    let output = scratch.path().join("packages");
    build(&room, scratch.path(), &output, &packages);
    let first = fs::read_to_string(output.join("SHA256SUMS")).unwrap();
    packages.push("checksums");
    let said = check(&room, scratch.path(), &output, &packages);
    assert_eq!((said.code, said.err.as_str()), (Some(0), ""), "{}", said.out);
    assert_eq!(said.out.matches("ok ").count(), packages.len(), "{}", said.out);

    // A second build gives the same bytes.
    build(&room, scratch.path(), &output, &["tarball", "sbom"]);
    assert_eq!(fs::read_to_string(output.join("SHA256SUMS")).unwrap(), first);
}

#[test]
fn a_damaged_package_does_not_pass() {
    let made = ["tarball", "deb", "rpm", "wheel", "sbom"];
    let Some(packages) = possible("a_damaged_package_does_not_pass", &made) else { return };
    let (room, scratch) = (Room::new(), scratch());
    let output = scratch.path().join("packages");
    build(&room, scratch.path(), &output, &packages);
    let refuses = |package: &str, damage: &str, why: &str| {
        if package == "checksums" || packages.contains(&package) {
            let said = damaged(&room, scratch.path(), &output, package, damage);
            assert!(said.contains(why), "{package} after {damage}: {said}");
        }
    };
    let repack = |change: &str| {
        let tar = "tar --owner=root --group=root --numeric-owner --use-compress-program='gzip -1' -c -f";
        format!("n=$(ls); mkdir d; tar -x -C d -f $n; cd d/*; {change}; cd ../..; {tar} $n -C d $(ls d)")
    };
    refuses(
        "tarball",
        &repack("rm usr/lib/ringwatch/libringwatch-preload.so"),
        "files are missing: usr/lib/r",
    );
    refuses(
        "tarball",
        &repack("sed -i 's/^Type=/Typ=/' usr/lib/systemd/system/*.service"),
        "systemd-analyze",
    );
    let control = "sed -i 's/libc6 (>= [0-9.]*)/libc6 (>= 2.17)/' d/DEBIAN/control";
    refuses("deb", &format!("n=$(ls); dpkg-deb -R $n d; {control}; dpkg-deb -Znone -b d $n"), "needs glibc");
    refuses("wheel", "mv *.whl $(ls | sed 's/manylinux_[0-9]*_[0-9]*/manylinux_2_17/')", "the tag inside is");
    refuses("rpm", "n=$(ls); head -c 100000 $n >c; mv c $n", "rpm");
    refuses("sbom", "sed -i 's/\"name\": \"tokio\"/\"name\": \"tokyo\"/' *.json", "tokyo");
    refuses("checksums", "echo >>$(ls | grep tar.gz)", "FAILED");
}

/// The program under test judges the plugin that an environment names.
fn judged(room: &Room, variables: &BTreeMap<String, String>) -> Said {
    run(room.ringwatch(["doctor", "job-plugins"]).envs(variables))
}

/// A script of `config/examples/jobs` whose folder of libraries is another one.
fn job_script(room: &Room, name: &str, folder: &Path) -> PathBuf {
    let source = text(&format!("config/examples/jobs/{name}"));
    let line = format!("folder={FOLDER}\n");
    assert_eq!(source.matches(&line).count(), 1, "{name} names its folder once");
    let path = room.path(name);
    fs::write(&path, source.replace(&line, &format!("folder={}\n", folder.display()))).unwrap();
    path
}

/// The variables that slurmstepd sets by a TaskProlog's output: `export NAME=value`, without a shell's quotes.
fn slurm_reads(output: &str) -> BTreeMap<String, String> {
    let lines = output.lines().map(|l| l.strip_prefix("export ").unwrap_or_else(|| panic!("{l:?}")));
    lines.map(|l| l.split_once('=').unwrap()).map(|(n, v)| (n.to_owned(), v.to_owned())).collect()
}

#[test]
fn slurms_task_prolog_names_the_plugin_and_respects_a_choice() {
    let room = Room::new();
    let plugin = room.plugin();
    let prolog = job_script(&room, "slurm-task-prolog.sh", plugin.parent().unwrap());
    // As slurmstepd runs it: with the task's environment, without PATH.
    let printed = |variables: &[(&str, &str)]| {
        let said = run(Command::new("/bin/sh").arg(&prolog).env_clear().envs(variables.iter().copied()));
        assert_eq!((said.code, said.err.as_str()), (Some(0), ""));
        said.out
    };
    let variables = slurm_reads(&printed(&[]));
    assert_eq!(variables, [("NCCL_PROFILER_PLUGIN".to_owned(), plugin.display().to_string())].into());
    let said = judged(&room, &variables);
    assert!(said.code == Some(0) && said.out.contains("PASS job-plugins"), "{}{}", said.out, said.err);
    for own in ["none", "", "libother.so"] {
        assert_eq!(printed(&[("NCCL_PROFILER_PLUGIN", own)]), "", "{own:?}");
    }
    fs::remove_file(&plugin).unwrap();
    assert_eq!(printed(&[]), "");
}

/// enroot's hook, its container's environment file, and a stand-in for `enroot-mount` that notes its input.
struct Hook {
    room: Room,
    plugin: PathBuf,
    hook: PathBuf,
}

impl Hook {
    fn new() -> Self {
        let room = Room::new();
        let plugin = room.plugin();
        let hook = job_script(&room, "enroot-hook.sh", plugin.parent().unwrap());
        let mount = room.path("enroot-mount");
        let stand_in = format!(
            "#!/bin/sh\n[ \"$*\" = '--root /rootfs -' ] && cat >>{}/mounts\n",
            room.path("").display()
        );
        fs::write(&mount, stand_in).unwrap();
        fs::set_permissions(&mount, fs::Permissions::from_mode(0o755)).unwrap();
        fs::write(room.path("environ"), "PATH=/bin\n").unwrap();
        Hook { room, plugin, hook }
    }

    /// Runs it, and returns the container's environment, what was mounted, and what went to standard error.
    fn run(&self) -> [String; 3] {
        let path = format!("{}:/usr/bin:/bin", self.room.path("").display());
        let mut command = self.room.command("bash");
        command.arg(&self.hook).env("PATH", path).env("ENROOT_ROOTFS", "/rootfs");
        let said = run(command.env("ENROOT_ENVIRON", self.room.path("environ")));
        assert_eq!((said.code, said.out.as_str()), (Some(0), ""), "{}", said.err);
        let read = |name: &str| fs::read_to_string(self.room.path(name)).unwrap_or_default();
        [read("environ"), read("mounts"), said.err]
    }
}

#[test]
fn enroots_hook_mounts_the_plugin_and_fails_no_container() {
    let hook = Hook::new();
    let folder = hook.plugin.parent().unwrap().display().to_string();
    let environ = format!("PATH=/bin\nNCCL_PROFILER_PLUGIN={}\n", hook.plugin.display());
    let mounts = format!("{folder} {folder} none x-create=dir,bind,ro,nosuid,nodev,private\n");
    // The second time it changes nothing.
    for _ in 0..2 {
        assert_eq!(hook.run(), [environ.clone(), mounts.clone(), String::new()]);
    }

    let chosen = Hook::new();
    fs::write(chosen.room.path("environ"), "NCCL_PROFILER_PLUGIN=libown.so\n").unwrap();
    assert_eq!(chosen.run(), ["NCCL_PROFILER_PLUGIN=libown.so\n", "", ""].map(str::to_owned));

    let unmounted = Hook::new();
    fs::write(unmounted.room.path("enroot-mount"), "#!/bin/sh\nexit 1\n").unwrap();
    let [environ, mounts, error] = unmounted.run();
    assert_eq!((environ.as_str(), mounts.as_str()), ("PATH=/bin\n", ""));
    assert!(error.contains("starts without the plugin"), "{error}");

    let missing = Hook::new();
    fs::remove_file(&missing.plugin).unwrap();
    assert_eq!(missing.run(), ["PATH=/bin\n", "", ""].map(str::to_owned));
}

fn yaml(name: &str) -> Value {
    serde_yaml::from_str(&text(name)).unwrap()
}

/// An entry of a list by its name.
fn named<'a>(list: &'a Value, name: &str) -> &'a Value {
    let list = list.as_sequence().unwrap();
    list.iter().find(|e| e["name"] == name).unwrap_or_else(|| panic!("no {name} in {list:?}"))
}

#[test]
fn the_job_of_kubernetes_gets_the_plugin_from_its_init_container() {
    let job = yaml("config/examples/jobs/kubernetes-job.yaml");
    assert_eq!((job["apiVersion"].as_str(), job["kind"].as_str()), (Some("batch/v1"), Some("Job")));
    let pod = &job["spec"]["template"]["spec"];
    assert_eq!(pod["restartPolicy"], "Never");
    let (init, train) = (named(&pod["initContainers"], "ringwatch"), named(&pod["containers"], "train"));
    assert_eq!(
        init["image"],
        yaml("config/deploy/daemonset.yaml")["spec"]["template"]["spec"]["containers"][0]["image"]
    );
    assert_eq!(init["securityContext"]["capabilities"]["drop"][0], "ALL");

    // Both see one volume at one place, and the variable names what the program writes there.
    let mount = named(&init["volumeMounts"], "ringwatch")["mountPath"].as_str().unwrap();
    assert_eq!(named(&train["volumeMounts"], "ringwatch")["mountPath"], mount);
    for volume in ["ringwatch", "shm"] {
        assert!(named(&pod["volumes"], volume)["emptyDir"].is_mapping());
        named(&train["volumeMounts"], volume);
    }
    assert_eq!(named(&pod["volumes"], "shm")["emptyDir"]["medium"], "Memory");
    let args: Vec<&str> = init["args"].as_sequence().unwrap().iter().filter_map(Value::as_str).collect();
    let &["plugin", directory] = args.as_slice() else { panic!("{args:?}") };
    let variable = named(&train["env"], "NCCL_PROFILER_PLUGIN")["value"].as_str().unwrap();
    assert_eq!(variable, format!("{directory}/{}", bundle::FILE_NAME));

    // Everybody may write into an emptyDir, so the program takes a folder in it, and not the volume itself.
    let room = Room::new();
    let volume = room.path("volume");
    fs::create_dir(&volume).unwrap();
    fs::set_permissions(&volume, fs::Permissions::from_mode(0o777)).unwrap();
    let inside = directory.strip_prefix(mount).unwrap().trim_start_matches('/');
    assert_eq!(run(room.ringwatch(["plugin"]).arg(&volume)).code, Some(2));
    assert_eq!(run(room.ringwatch(["plugin"]).arg(volume.join(inside))).code, Some(0));
    let there = volume.join(inside).join(bundle::FILE_NAME).display().to_string();
    assert_eq!(judged(&room, &[("NCCL_PROFILER_PLUGIN".to_owned(), there)].into()).code, Some(0));
}

#[test]
fn the_page_about_jobs_names_what_the_packages_install() {
    let plugin = format!("{FOLDER}/{}", bundle::FILE_NAME);
    let ray = yaml("config/examples/jobs/ray-runtime-env.yaml");
    assert_eq!(ray["env_vars"].as_mapping().unwrap().len(), 1);
    assert_eq!(ray["env_vars"]["NCCL_PROFILER_PLUGIN"].as_str(), Some(plugin.as_str()));

    let page = text("config/examples/jobs/README.md");
    let libraries =
        page.split(|c: char| c.is_whitespace() || "`=:".contains(c)).filter(|w| w.ends_with(".so"));
    let installed = [plugin, format!("{FOLDER}/{}", bundle::PRELOAD_FILE_NAME)];
    let strange: Vec<&str> = libraries.filter(|l| !installed.iter().any(|i| i == l)).collect();
    assert!(strange.is_empty(), "{strange:?}");
    assert_eq!(installed.iter().filter(|l| page.contains(*l)).count(), 2);

    let blocks: Vec<&str> = page.split("```sh\n").skip(1).filter_map(|b| b.split("```").next()).collect();
    assert!(blocks.len() >= 6, "{}", blocks.len());
    let room = Room::new();
    for block in blocks {
        let said = run(room.command("sh").args(["-n", "-c", block]));
        assert_eq!((said.code, said.err.as_str()), (Some(0), ""), "{block}");
    }
    for name in ["slurm-task-prolog.sh", "enroot-hook.sh", "kubernetes-job.yaml", "ray-runtime-env.yaml"] {
        assert!(page.contains(&format!("[{name}]({name})")), "the page names {name}");
        let mode = fs::metadata(file("config/examples/jobs").join(name)).unwrap().permissions().mode();
        assert_eq!(mode & 0o111 != 0, name.ends_with(".sh"), "{name}: {mode:o}");
    }
}
