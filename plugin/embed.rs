//! Builds the plugin and hands it to the program, which carries it inside.
//!
//! The plugin is built as it enters other people's processes: profile `plugin`, no unwinding, no std. That
//! profile cannot be had for one package of an ordinary build, so Cargo is called again, with a target
//! directory of its own.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

fn main() {
    for path in
        ["plugin/src", "plugin/Cargo.toml", "plugin/build.rs", "plugin/wire/src", "plugin/wire/Cargo.toml"]
    {
        println!("cargo::rerun-if-changed={path}");
    }
    let root = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("Cargo sets CARGO_MANIFEST_DIR"));
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("Cargo sets OUT_DIR"));
    let target = env::var("TARGET").expect("Cargo sets TARGET");
    let library = build(&root, &out.join("plugin"), &target);
    println!("cargo::rustc-env=RINGWATCH_PLUGIN_LIBRARY={}", library.display());
    println!("cargo::rustc-env=RINGWATCH_TARGET={target}");
}

fn build(root: &Path, target_dir: &Path, target: &str) -> PathBuf {
    let cargo = env::var_os("CARGO").expect("Cargo sets CARGO");
    let mut command = Command::new(cargo);
    command
        .current_dir(root)
        .args(["build", "--package", "ringwatch-plugin", "--profile", "plugin", "--target", target])
        .arg("--target-dir")
        .arg(target_dir);
    // The outer build's wishes (clippy as compiler, loom's cfg, coverage) are not the plugin's.
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
    let library = target_dir.join(target).join("plugin").join("libringwatch_plugin.so");
    assert!(library.is_file(), "the plugin was built, but not to {}", library.display());
    library
}
