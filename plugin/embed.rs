//! Builds the libraries that enter other people's processes and hands them to the program, which carries them
//! inside.
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
