//! The owner of a process: user, container, pod, batch job, and the user's own tags.
//!
//! Only what is on a list here is taken from an environment, and its values are cut: nothing secret becomes a label.

use crate::model::steers;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// Variables that become labels, and the labels' names: OpenTelemetry's where it has some.
const VARIABLES: &[(&str, &str)] = &[
    ("SLURM_JOB_ID", "slurm.job.id"),
    ("SLURM_JOB_NAME", "slurm.job.name"),
    ("SLURM_STEP_ID", "slurm.step.id"),
    ("SLURM_JOB_PARTITION", "slurm.job.partition"),
    ("SLURM_JOB_ACCOUNT", "slurm.job.account"),
    ("PBS_JOBID", "pbs.job.id"),
    ("PBS_JOBNAME", "pbs.job.name"),
    ("LSB_JOBID", "lsf.job.id"),
    ("LSB_JOBNAME", "lsf.job.name"),
    ("TORCHELASTIC_RUN_ID", "torchrun.run.id"),
    ("TORCHELASTIC_RESTART_COUNT", "torchrun.restart_count"),
    ("RAY_JOB_ID", "ray.job.id"),
    ("POD_NAME", "k8s.pod.name"),
    ("POD_NAMESPACE", "k8s.namespace.name"),
];
/// The user's own: `team=vision,experiment=42`.
const TAGS: &str = "RINGWATCH_TAGS";
/// Tags taken, and the longest name and value.
const TAGS_MAX: usize = 16;
const TEXT_MAX: usize = 128;

/// Labels of a process: from the lines of its environment that its plugin wrote down, and, while it runs, from its control
/// groups. `/proc/PID/environ` is not read: a process can keep whoever reads its memory waiting for ever.
pub(super) fn labels(
    lines: &[String],
    owner: u32,
    control_groups: &str,
    root: &Path,
) -> BTreeMap<String, String> {
    let mut labels = BTreeMap::new();
    labels.insert("user.id".to_owned(), owner.to_string());
    if let Some(name) = user(owner, root) {
        labels.insert("user.name".to_owned(), name);
    }
    cgroup(control_groups, &mut labels);
    // What the plugin saw when the process began is the last word.
    for line in lines {
        variable(line, &mut labels);
    }
    labels
}

fn variable(line: &str, labels: &mut BTreeMap<String, String>) {
    let Some((name, value)) = line.split_once('=').filter(|(_, v)| !v.is_empty()) else { return };
    if name == TAGS {
        for tag in value.split(',').take(TAGS_MAX) {
            let Some((name, value)) = tag.split_once('=') else { continue };
            let (name, value) = (name.trim(), value.trim());
            let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-');
            // A tag of ours' names would say what is not so.
            let free = !labels.contains_key(name) && VARIABLES.iter().all(|(_, l)| *l != name);
            if !name.is_empty() && name.len() <= TEXT_MAX && name.chars().all(plain) && free {
                labels.insert(name.to_owned(), cut(value));
            }
        }
        return;
    }
    if let Some((_, label)) = VARIABLES.iter().find(|(v, _)| *v == name) {
        // torchrun's run id is "none" unless the user names one.
        if !(name == "TORCHELASTIC_RUN_ID" && value == "none") {
            labels.insert((*label).to_owned(), cut(value));
        }
    }
}

/// A value as a label: a control group's name may hold what steers a terminal.
fn cut(value: &str) -> String {
    value.chars().filter(|c| !steers(*c)).take(TEXT_MAX).collect()
}

/// The name of a user, where the host's list has it.
fn user(uid: u32, root: &Path) -> Option<String> {
    let text = fs::read_to_string(root.join("etc/passwd")).ok()?;
    text.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        (fields.nth(1)?.parse() == Ok(uid)).then(|| cut(name))
    })
}

/// Container, pod and batch step, as cgroups are named after them.
pub(super) fn cgroup(text: &str, labels: &mut BTreeMap<String, String>) {
    let mut put = |name: &str, value: &str| {
        labels.entry(name.to_owned()).or_insert_with(|| cut(value));
    };
    for path in text.lines().filter_map(|l| l.splitn(3, ':').nth(2)) {
        let (is_kubernetes, is_slurm) = (path.contains("kubepods"), path.contains("slurm"));
        for part in path.split('/') {
            let bare = part.trim_end_matches(".scope").trim_end_matches(".slice");
            // `docker-<id>`, `cri-containerd-<id>`, `crio-<id>`, `libpod-<id>`, or the id alone.
            let last = bare.rsplit('-').next().unwrap_or(bare);
            let hexadecimal = |s: &str| s.len() == 64 && s.bytes().all(|b| b.is_ascii_hexdigit());
            if hexadecimal(last) {
                put("container.id", last);
            }
            // `kubepods-burstable-pod<uid>.slice` with `_` for `-`, or `pod<uid>`.
            if let Some((_, uid)) = bare.rsplit_once("pod").filter(|_| is_kubernetes) {
                let uid = uid.replace('_', "-");
                if uid.len() == 36 && uid.bytes().all(|b| b.is_ascii_hexdigit() || b == b'-') {
                    put("k8s.pod.uid", &uid);
                }
            }
            for (prefix, label) in [("job_", "slurm.job.id"), ("step_", "slurm.step.id")] {
                if let Some(n) = bare.strip_prefix(prefix).filter(|_| is_slurm) {
                    put(label, n);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const POD: &str = "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod7f3a1c52_9d4e_4f6b_8a21_0c5d7e9b1a34.slice/cri-containerd-9b1deb4d3b7d4bad9bdd2b0d7b3dcb6d9b1deb4d3b7d4bad9bdd2b0d7b3dcb6d.scope\n";

    /// A root with one user, 1000.
    fn root() -> tempfile::TempDir {
        let root = tempfile::tempdir().expect("a directory");
        fs::create_dir_all(root.path().join("etc")).expect("made");
        let users = "root:x:0:0::/root:/bin/sh\nann:x:1000:1000::/home/ann:/bin/sh\n";
        fs::write(root.path().join("etc/passwd"), users).expect("written");
        root
    }

    fn of(cgroup: &str, lines: &[&str]) -> BTreeMap<String, String> {
        let root = root();
        let lines: Vec<String> = lines.iter().map(|l| (*l).to_owned()).collect();
        labels(&lines, 1000, cgroup, root.path())
    }

    fn pairs(labels: &BTreeMap<String, String>) -> Vec<(&str, &str)> {
        labels.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect()
    }

    #[test]
    fn only_what_is_listed_becomes_a_label() {
        let lines = [
            "AWS_SECRET_ACCESS_KEY=hunter2",
            "SLURM_JOB_ID=77",
            "WANDB_API_KEY=hunter2",
            "SLURM_JOB_NAME=train",
            "RANK=3",
            "TORCHELASTIC_RUN_ID=none",
        ];
        let found = of("0::/\n", &lines);
        let want =
            [("slurm.job.id", "77"), ("slurm.job.name", "train"), ("user.id", "1000"), ("user.name", "ann")];
        assert_eq!(pairs(&found), want);
    }

    #[test]
    fn a_pod_is_known_by_its_cgroup() {
        let found = of(POD, &["POD_NAME=train-0", "POD_NAMESPACE=ml"]);
        assert_eq!(found["k8s.pod.uid"], "7f3a1c52-9d4e-4f6b-8a21-0c5d7e9b1a34");
        assert_eq!(found["container.id"], "9b1deb4d3b7d4bad9bdd2b0d7b3dcb6d9b1deb4d3b7d4bad9bdd2b0d7b3dcb6d");
        assert_eq!((&*found["k8s.pod.name"], &*found["k8s.namespace.name"]), ("train-0", "ml"));
    }

    #[test]
    fn a_batch_step_is_known_by_its_cgroup() {
        let found = of("12:memory:/slurm/uid_1000/job_123/step_0/task_0\n", &[]);
        assert_eq!((&*found["slurm.job.id"], &*found["slurm.step.id"]), ("123", "0"));
    }

    #[test]
    fn tags_are_the_users_own_and_say_nothing_else() {
        let tags = "RINGWATCH_TAGS=team=vision, run=42,bad name=x,user.name=root,slurm.job.id=1,=y,alone";
        let found = of("0::/\n", &[tags]);
        let want = [("run", "42"), ("team", "vision"), ("user.id", "1000"), ("user.name", "ann")];
        assert_eq!(pairs(&found), want);
    }

    #[test]
    fn a_process_that_is_gone_is_known_by_what_it_left() {
        let found = labels(&["PBS_JOBID=9.server".to_owned()], 7, "", Path::new("/nonexistent"));
        assert_eq!(pairs(&found), [("pbs.job.id", "9.server"), ("user.id", "7")]);
        let long = format!("SLURM_JOB_NAME={}", "x".repeat(1000));
        let found = labels(&[long], 7, "", Path::new("/nonexistent"));
        assert_eq!(found["slurm.job.name"].len(), TEXT_MAX);
    }
}
