//! Hands files to the program, which carries them inside: the libraries that enter other people's processes, which are built
//! here, and the chart library of reports, which is in a crate.
//!
//! They are built as they go there: profile `plugin`, no unwinding, no std. That profile cannot be had for one
//! package of an ordinary build, so Cargo is called again, with a target directory of its own.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Package, file, and the variable under which `src/bundle.rs` finds it.
const LIBRARIES: &[(&str, &str, &str)] = &[
    ("ringwatch-plugin", "libringwatch_plugin.so", "RINGWATCH_PLUGIN_LIBRARY"),
    ("ringwatch-null", "libringwatch_null.so", "RINGWATCH_NULL_LIBRARY"),
    ("ringwatch-shim", "libringwatch_shim.so", "RINGWATCH_SHIM_LIBRARY"),
    ("ringwatch-preload", "libringwatch_preload.so", "RINGWATCH_PRELOAD_LIBRARY"),
];

/// The chart library's file in its crate.
const ECHARTS: &str = "src/asset/echarts-5.5.1.min.js";

fn main() {
    for dir in ["plugin", "plugin/null", "plugin/preload", "plugin/shim", "plugin/wire"] {
        for path in ["src", "Cargo.toml", "build.rs"] {
            if Path::new(dir).join(path).exists() {
                println!("cargo::rerun-if-changed={dir}/{path}");
            }
        }
    }
    let root = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("Cargo sets CARGO_MANIFEST_DIR"));
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("Cargo sets OUT_DIR"));
    let target = env::var("TARGET").expect("Cargo sets TARGET");
    let built = build(&root, &out.join("plugin"), &target);
    for (_, file, variable) in LIBRARIES {
        let library = built.join(file);
        assert!(library.is_file(), "{file} was built, but not to {}", built.display());
        println!("cargo::rustc-env={variable}={}", library.display());
    }
    println!("cargo::rustc-env=RINGWATCH_TARGET={target}");
    println!("cargo::rustc-env=RINGWATCH_ECHARTS={}", charts(&root, &target).display());
}

/// Gives back the directory of the libraries.
fn build(root: &Path, target_dir: &Path, target: &str) -> PathBuf {
    let cargo = env::var_os("CARGO").expect("Cargo sets CARGO");
    let mut command = Command::new(cargo);
    command
        .current_dir(root)
        .args(["build", "--profile", "plugin", "--target", target])
        .args(LIBRARIES.iter().flat_map(|(package, ..)| ["--package", *package]))
        .arg("--target-dir")
        .arg(target_dir);
    // The outer build's wishes (clippy as compiler, loom's cfg, coverage) are not the plugins'.
    for name in [
        "RUSTC_WRAPPER",
        "RUSTC_WORKSPACE_WRAPPER",
        "RUSTFLAGS",
        "CARGO_ENCODED_RUSTFLAGS",
        "CARGO_TARGET_DIR",
        "CARGO_BUILD_TARGET_DIR",
        "CLIPPY_ARGS",
        "CLIPPY_CONF_DIR",
    ] {
        command.env_remove(name);
    }
    let status = command.status().expect("Cargo, which runs this, can be run again");
    assert!(status.success(), "the plugin does not build: {status}; its errors stand above");
    target_dir.join(target).join("plugin")
}

/// Returns the file of Apache ECharts. The crate `charming` has it, in the release that Cargo.lock names.
fn charts(root: &Path, target: &str) -> PathBuf {
    println!("cargo::rerun-if-changed=Cargo.lock");
    let cargo = env::var_os("CARGO").expect("Cargo sets CARGO");
    let asked = ["metadata", "--format-version", "1", "--locked", "--filter-platform", target];
    let answer = Command::new(cargo).current_dir(root).args(asked).output().expect("Cargo can be run again");
    assert!(answer.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&answer.stderr));
    let metadata: serde_json::Value =
        serde_json::from_slice(&answer.stdout).expect("cargo metadata prints JSON");
    let packages = metadata["packages"].as_array().into_iter().flatten();
    let manifest = packages.filter(|p| p["name"] == "charming").find_map(|p| p["manifest_path"].as_str());
    let crate_root =
        Path::new(manifest.expect("charming is a dependency")).parent().expect("a file is in a folder");
    let file = crate_root.join(ECHARTS);
    assert!(file.is_file(), "charming has no {ECHARTS}; name the file of its new release in plugin/embed.rs");
    file
}
