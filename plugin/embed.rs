//! Builds the plugin, and the one that does nothing, and hands them to the program, which carries them inside.
//!
//! They are built as they enter other people's processes: profile `plugin`, no unwinding, no std. That
//! profile cannot be had for one package of an ordinary build, so Cargo is called again, with a target
//! directory of its own.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

fn main() {
    for path in [
        "plugin/src",
        "plugin/Cargo.toml",
        "plugin/build.rs",
        "plugin/null/src",
        "plugin/null/Cargo.toml",
        "plugin/null/build.rs",
        "plugin/wire/src",
        "plugin/wire/Cargo.toml",
    ] {
        println!("cargo::rerun-if-changed={path}");
    }
    let root = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("Cargo sets CARGO_MANIFEST_DIR"));
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("Cargo sets OUT_DIR"));
    let target = env::var("TARGET").expect("Cargo sets TARGET");
    let built = build(&root, &out.join("plugin"), &target);
    for (variable, file) in [
        ("RINGWATCH_PLUGIN_LIBRARY", "libringwatch_plugin.so"),
        ("RINGWATCH_NULL_LIBRARY", "libringwatch_null.so"),
    ] {
        let library = built.join(file);
        assert!(library.is_file(), "the plugin was built, but not to {}", library.display());
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
        .args([
            "build",
            "--package",
            "ringwatch-plugin",
            "--package",
            "ringwatch-null",
            "--profile",
            "plugin",
            "--target",
            target,
        ])
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
