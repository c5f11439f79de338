//! Linker flags of the cdylib.

fn main() {
    // As the real plugin: NCCL may call after it has closed the library.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libnccl-profiler-ringwatch-null.so");
    println!("cargo::rerun-if-changed=build.rs");
}
