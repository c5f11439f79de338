//! Lists the tests that the same `cargo test --workspace` skipped, and what each of them needs.

#[path = "../support/skip.rs"]
#[allow(dead_code, reason = "it only reads the list")]
mod skip;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

fn main() {
    let Some(list) = skip::list() else { return };
    let text = fs::read_to_string(&list).unwrap_or_default();
    print!("{}", summary(&text));
    if let Some(folder) = list.parent() {
        remove_old(folder, &list);
    }
}

/// The tests by what they need; a test that lacks the same thing twice counts once.
fn summary(text: &str) -> String {
    let mut by_need: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for line in text.lines() {
        let Some((test, needs)) = line.strip_prefix("SKIPPED: ").and_then(|l| l.split_once(" needs ")) else {
            continue;
        };
        let tests = by_need.entry(needs).or_default();
        if !tests.contains(&test) {
            tests.push(test);
        }
    }
    let count: usize = by_need.values().map(Vec::len).sum();
    if count == 0 {
        return "\nno test was skipped for want of a tool\n\n".to_owned();
    }
    let mut out = format!("\n{count} tests were skipped; .ci/run installs what they need:\n");
    for (needs, tests) in by_need {
        out += &format!("  {needs}:\n");
        tests.iter().for_each(|t| out += &format!("    {t}\n"));
    }
    out.push('\n');
    out
}

/// Removes this run's list and those of runs that have ended.
fn remove_old(folder: &Path, own: &Path) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let runs = name
            .split_once('-')
            .and_then(|(pid, started)| Some((pid.parse().ok()?, started.parse().ok()?)))
            .is_some_and(|(pid, started): (u32, u64)| skip::started(pid) == Some(started));
        if entry.path() == own || !runs {
            // Another run may have removed it at the same moment.
            fs::remove_file(entry.path()).ok();
        }
    }
}
