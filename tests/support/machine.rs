//! GPUs that are not there: the driver's word on where each rank's is.

use super::{Room, skipped};
use std::path::{Path, PathBuf};
use std::process::Command;

/// A driver's library to be preloaded into players; `None` without a C compiler, and the test counts as skipped.
pub(crate) fn driver(room: &Room, test: &str) -> Option<PathBuf> {
    library(room, test, "fake_driver.c", "libcuda.so.1")
}

/// A library of a source in `tests/data`; `None` without a C compiler, and the test counts as skipped.
pub(crate) fn library(room: &Room, test: &str, source: &str, name: &str) -> Option<PathBuf> {
    if Command::new("cc").arg("--version").output().is_err() {
        skipped(test, "a C compiler (cc)");
        return None;
    }
    let to = room.path(name);
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(source);
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-fPIC", "-pthread", "-Wall", "-Werror", &format!("-Wl,-soname,{name}"), "-o"])
        .arg(&to)
        .arg(source);
    let said = cc.output().expect("cc starts");
    assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
    Some(to)
}
