//! Linker flags of the cdylib.

fn main() {
    // NCCL loads it as its plugin by the soname, which is loaded already: one library, one state. It stays
    // mapped as the plugin does.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libringwatch-preload.so");
    println!("cargo::rerun-if-changed=build.rs");
}
