//! The mutations of the exam still apply to the sources; `tests/exam/mutations/run` measures them.

use std::path::Path;
use std::process::Command;

#[test]
fn every_mutation_of_the_exam_applies() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    if Command::new("git").arg("--version").output().is_err() {
        crate::support::skip::skipped("every_mutation_of_the_exam_applies", "git");
        return;
    }
    let files = std::fs::read_dir(root.join("tests/exam/mutations")).expect("the mutations");
    let mut patches: Vec<_> = files.map(|f| f.expect("a file").path()).collect();
    patches.retain(|p| p.extension().is_some_and(|e| e == "patch"));
    patches.sort();
    assert!(patches.len() >= 10, "mutations are lost: {patches:?}");
    let mut stale = Vec::new();
    for patch in &patches {
        let mut git = Command::new("git");
        // The sources alone count, with or without a repository around them.
        git.current_dir(root)
            .env_remove("GIT_DIR")
            .env("GIT_CEILING_DIRECTORIES", root.parent().unwrap_or(root));
        let out = git.args(["apply", "--check"]).arg(patch).output().expect("git runs");
        if !out.status.success() {
            let name = patch.file_name().expect("a name").to_string_lossy();
            stale.push(format!("{name}: {}", String::from_utf8_lossy(&out.stderr).trim()));
        }
    }
    assert!(stale.is_empty(), "write these patches again:\n{}", stale.join("\n"));
}
