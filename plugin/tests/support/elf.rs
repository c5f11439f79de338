//! The parts of a library that enters other people's processes.

use object::elf;
use object::read::elf::{Dyn as _, ElfFile64, FileHeader as _, SectionHeader as _};
use object::{Object as _, ObjectSymbol as _};
use std::collections::BTreeSet;
use std::path::Path;

/// The functions that it may take from libc: the system calls of init, the environment, the clock and what compilers
/// assume.
const IMPORTS: &[&str] = &[
    "__errno_location",
    "clock_gettime",
    "close",
    "fallocate",
    "flock",
    "fallocate64",
    "fstatfs",
    "fstatfs64",
    "ftruncate",
    "ftruncate64",
    "geteuid",
    "getenv",
    "getpid",
    "linkat",
    "madvise",
    "memcpy",
    "memmove",
    "memset",
    "memcmp",
    "bcmp",
    "strlen",
    "mkdirat",
    "mmap",
    "mmap64",
    "munmap",
    "nanosleep",
    "open",
    "open64",
    "openat",
    "openat64",
    "read",
    "syscall",
    "uname",
    "unlinkat",
    // Weak: asked for, and done without.
    "dladdr",
    "dlopen",
    "dlsym",
    "__cxa_finalize",
    "__gmon_start__",
    "_ITM_deregisterTMCloneTable",
    "_ITM_registerTMCloneTable",
];

#[track_caller]
pub fn is_small(library: &Path) {
    let size = std::fs::metadata(library).unwrap().len();
    eprintln!("{} is {size} bytes", library.display());
    assert!(size < 512 << 10, "{size}");
}

#[track_caller]
pub fn has_no_panicking_code(library: &Path) {
    let bytes = std::fs::read(library).unwrap();
    let file = object::File::parse(&*bytes).unwrap();
    let names: Vec<_> = file.symbols().chain(file.dynamic_symbols()).filter_map(|s| s.name().ok()).collect();
    // Without its own symbols the library would pass whatever is in it.
    assert!(file.symbols().count() > 20, "stripped of its symbols");
    // Mangled names hold `panicking`; the handler's own name would be there if anything could call it.
    for bad in [
        "panick",
        "unwrap_failed",
        "expect_failed",
        "ringwatch_panicked",
        "_Unwind",
        "rust_alloc",
        "slice_index",
    ] {
        let found: Vec<_> = names.iter().filter(|n| n.contains(bad)).collect();
        assert!(found.is_empty(), "{found:?}");
    }
}

/// `also`: what this library may import beside what the plugin may.
#[track_caller]
pub fn imports_little_and_nothing_new(library: &Path, also: &[&str]) {
    let bytes = std::fs::read(library).unwrap();
    let file = ElfFile64::<object::LittleEndian>::parse(&*bytes).unwrap();
    let endian = object::LittleEndian;
    let sections = file.elf_section_table();
    let undefined: BTreeSet<_> = file
        .dynamic_symbols()
        .filter(|s| s.is_undefined())
        .filter_map(|s| s.name().ok())
        .filter(|n| !n.is_empty())
        .collect();
    eprintln!("imports {undefined:?}");
    let unknown: Vec<_> = undefined.iter().filter(|n| !IMPORTS.contains(n) && !also.contains(n)).collect();
    assert!(unknown.is_empty(), "{unknown:?}");

    let (mut versions, link) = sections.gnu_verneed(endian, &*bytes).unwrap().expect("versioned imports");
    let strings = sections.strings(endian, &*bytes, link).unwrap();
    let mut seen = 0;
    while let Some((_, mut needed)) = versions.next().unwrap() {
        while let Some(v) = needed.next().unwrap() {
            let name = std::str::from_utf8(v.name(endian, strings).unwrap()).unwrap();
            let number = name.strip_prefix("GLIBC_").unwrap_or_else(|| panic!("{name}"));
            let mut parts = number.split('.').map(|p| p.parse::<u32>().unwrap());
            let version = (parts.next().unwrap(), parts.next().unwrap());
            assert!(version <= (2, 17), "needs {name}");
            seen += 1;
        }
    }
    assert!(seen > 0);
}

#[track_caller]
pub fn needs_libc_alone_and_stays_mapped(library: &Path, name: &str) {
    let bytes = std::fs::read(library).unwrap();
    let file = ElfFile64::<object::LittleEndian>::parse(&*bytes).unwrap();
    let endian = object::LittleEndian;
    let header = file.elf_header();
    let sections = file.elf_section_table();
    let (mut needed, mut soname, mut flags) = (Vec::new(), None, 0u64);
    let mut found = false;
    for section in header.section_headers(endian, &*bytes).unwrap() {
        let Some((dynamic, link)) = section.dynamic(endian, &*bytes).unwrap() else { continue };
        let strings = sections.strings(endian, &*bytes, link).unwrap();
        found = true;
        for d in dynamic {
            let text =
                |d: &elf::Dyn64<_>| String::from_utf8(d.string(endian, strings).unwrap().to_vec()).unwrap();
            match d.tag(endian) {
                elf::DT_NEEDED => needed.push(text(d)),
                elf::DT_SONAME => soname = Some(text(d)),
                elf::DT_FLAGS_1 => flags = d.d_val(endian),
                _ => {}
            }
        }
    }
    assert!(found);
    assert_eq!(needed, ["libc.so.6"]);
    assert_eq!(soname.as_deref(), Some(name));
    assert_ne!(flags & elf::DF_1_NODELETE.0, 0);
}

pub fn exports(library: &Path) -> BTreeSet<String> {
    let bytes = std::fs::read(library).unwrap();
    let file = object::File::parse(&*bytes).unwrap();
    file.dynamic_symbols()
        .filter(|s| s.is_definition())
        .filter_map(|s| s.name().ok().map(str::to_owned))
        .collect()
}

/// The names of the profiler's and the tuner's tables.
pub fn tables() -> BTreeSet<String> {
    let profilers = (1..=7).map(|v| format!("ncclProfiler_v{v}"));
    profilers.chain((1..=6).map(|v| format!("ncclTunerPlugin_v{v}"))).collect()
}
