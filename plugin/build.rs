//! Linker flags of the cdylib.

fn main() {
    // Not `rustc-cdylib-link-arg`: that would name the preload library, which holds this one, as well.
    // NCCL closes a plugin with its last communicator while late callbacks may still come, and the segment
    // has to outlive that: the library stays mapped.
    println!("cargo::rustc-link-arg=-Wl,-z,nodelete");
    println!("cargo::rustc-link-arg=-Wl,-soname,libnccl-profiler-ringwatch.so");
    println!("cargo::rerun-if-changed=build.rs");
}
