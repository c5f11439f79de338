//! GPUs that are not there: the driver's word on where each rank's is.

use super::Room;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A driver's library to be preloaded into players; `None`, said with the test's name, without a C compiler.
pub(crate) fn driver(room: &Room, test: &str) -> Option<PathBuf> {
    if Command::new("cc").arg("--version").output().is_err() {
        eprintln!("SKIPPED {test}: there is no C compiler (cc)");
        return None;
    }
    let to = room.path("libcuda.so.1");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/fake_driver.c");
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-fPIC", "-pthread", "-Wall", "-Werror", "-Wl,-soname,libcuda.so.1", "-o"])
        .arg(&to)
        .arg(source);
    let said = cc.output().expect("cc starts");
    assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
    Some(to)
}
