//! The targets of the `fuzz` test, driven by libFuzzer: by the coverage that an input has. `.ci/fuzz` builds and starts it.

#![no_main]
#![allow(clippy::unwrap_used, reason = "a target fails by panicking")]

mod budget;
mod outputs;
mod plain;
mod targets;

use std::sync::LazyLock;

#[global_allocator]
static ALLOCATOR: budget::Counted = budget::Counted;

/// The target that the variable `RINGWATCH_FUZZ_TARGET` names.
static TARGET: LazyLock<&targets::Target> = LazyLock::new(|| {
    let name = std::env::var("RINGWATCH_FUZZ_TARGET").unwrap_or_default();
    let known: Vec<&str> = targets::ALL.iter().map(|t| t.name).collect();
    let found = targets::ALL.iter().find(|t| t.name == name);
    found.unwrap_or_else(|| panic!("RINGWATCH_FUZZ_TARGET={name}: there are {}", known.join(", ")))
});

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| TARGET.run(bytes));
