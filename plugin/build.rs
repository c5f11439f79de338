//! Linker flags of the cdylib.

fn main() {
    // NCCL closes a plugin with its last communicator while late callbacks may still come, and the segment
    // has to outlive that: the library stays mapped.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libnccl-profiler-ringwatch.so");
    println!("cargo::rerun-if-changed=build.rs");
}
