//! Linker flags of the cdylib.

fn main() {
    // NCCL may call a plugin after it has closed the library.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    // The benchmark finds the loaded library by this name.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libnccl-profiler-ringwatch-shim.so");
    println!("cargo::rerun-if-changed=build.rs");
}
