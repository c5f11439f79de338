//! The plugin as NCCL meets it: a table of C functions, of the built library or of the crate linked in.

use super::abi::Descriptor;
use ringwatch_wire::sync::Word;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

pub type LogFn = unsafe extern "C" fn(c_int, u64, *const c_char, c_int, *const c_char, ...);

/// The table by its published offsets, and the spare words behind it.
#[repr(C)]
#[derive(Debug)]
pub struct CTable {
    pub name: *const c_char,
    pub init: *const c_void,
    pub start: unsafe extern "C" fn(*mut c_void, *mut *mut c_void, *const c_void) -> c_int,
    pub stop: unsafe extern "C" fn(*mut c_void) -> c_int,
    pub record: unsafe extern "C" fn(*mut c_void, c_int, *const c_void) -> c_int,
    pub finalize: unsafe extern "C" fn(*mut c_void) -> c_int,
    pub spare: [usize; 8],
}

type InitBare = unsafe extern "C" fn(*mut *mut c_void, *mut c_int) -> c_int;
type Init4 = unsafe extern "C" fn(
    *mut *mut c_void,
    *mut c_int,
    *const c_char,
    u64,
    c_int,
    c_int,
    c_int,
    Option<LogFn>,
) -> c_int;
type Init5 = unsafe extern "C" fn(
    *mut *mut c_void,
    u64,
    *mut c_int,
    *const c_char,
    c_int,
    c_int,
    c_int,
    Option<LogFn>,
) -> c_int;

/// The built library: `RINGWATCH_PLUGIN_SO` when set, or built once here as it is shipped.
pub fn plugin_library() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| match std::env::var_os("RINGWATCH_PLUGIN_SO") {
        Some(path) => path.into(),
        None => build(env!("CARGO_MANIFEST_DIR"), "libringwatch_plugin.so"),
    })
}

/// The plugin that does nothing, built the same way.
pub fn null_library() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| build(concat!(env!("CARGO_MANIFEST_DIR"), "/null"), "libringwatch_null.so"))
}

/// Builds the library of a package as it is shipped.
pub fn build(package: &str, file: &str) -> PathBuf {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).join("plugin");
    let manifest = Path::new(package).join("Cargo.toml");
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    // What the tests are built with is not how the plugin is shipped.
    for name in ["RUSTC_WRAPPER", "RUSTC_WORKSPACE_WRAPPER", "RUSTFLAGS", "CARGO_ENCODED_RUSTFLAGS"] {
        cargo.env_remove(name);
    }
    let built = cargo
        .args(["build", "--quiet", "--lib", "--profile", "plugin", "--manifest-path"])
        .arg(manifest)
        .arg("--target-dir")
        .arg(&target)
        .output()
        .unwrap();
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    target.join("plugin").join(file)
}

/// Makes a library from C; `None` without a C compiler, and the test counts as skipped.
pub fn compile(test: &str, source: &str, flags: &[&str], to: &Path) -> Option<()> {
    let c = to.with_extension("c");
    std::fs::write(&c, source).unwrap();
    let made = Command::new("cc").args(["-shared", "-fPIC"]).args(flags).arg("-o").arg(to).arg(&c).output();
    let Ok(made) = made else {
        super::skip::skipped(test, "a C compiler (cc)");
        return None;
    };
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    Some(())
}

/// A plugin that writes down every callback, of the ABI versions whose bits are set.
pub fn recorder(test: &str, versions: u32, to: &Path) -> Option<()> {
    let versions = format!("-DRECORDER_VERSIONS={versions}");
    compile(test, include_str!("recorder.c"), &[&versions, "-lpthread"], to)
}

/// The result of an init.
#[derive(Debug, Clone, Copy)]
pub struct Opened {
    pub context: u64,
    pub mask: i32,
}

/// The mask of [`Plugin::init_switched`].
static MASK: Word = Word::new(0);

/// Seven tables.
#[derive(Debug, Clone, Copy)]
pub struct Plugin {
    tables: [&'static CTable; 7],
    handle: usize,
    /// Read once: asking again is a system call.
    pub pid: i32,
}

// SAFETY: the tables are immutable and their functions may be called from any thread.
unsafe impl Send for Plugin {}
// SAFETY: as above.
unsafe impl Sync for Plugin {}

impl Plugin {
    /// Opens a library as NCCL does.
    pub fn open(path: &Path) -> Self {
        let path = CString::new(path.to_str().unwrap()).unwrap();
        // SAFETY: opens a library whose initialisers are those of this crate alone.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            // SAFETY: dlerror after a failed dlopen is a C string.
            panic!("{:?}", unsafe { CStr::from_ptr(libc::dlerror()) });
        }
        let tables = [1, 2, 3, 4, 5, 6, 7].map(|v| {
            let symbol = CString::new(format!("ncclProfiler_v{v}")).unwrap();
            // SAFETY: a handle of dlopen's and a C string.
            let at = unsafe { libc::dlsym(handle, symbol.as_ptr()) };
            // SAFETY: the symbol is a table of this shape; the library stays mapped (NODELETE).
            unsafe { at.cast::<CTable>().as_ref() }.unwrap_or_else(|| panic!("no symbol {symbol:?}"))
        });
        Plugin { tables, handle: handle as usize, pid: std::process::id() as i32 }
    }

    pub fn built() -> Self {
        Self::open(plugin_library())
    }

    pub fn from_tables(tables: [&'static CTable; 7]) -> Self {
        Plugin { tables, handle: 0, pid: std::process::id() as i32 }
    }

    pub fn close(self) {
        // SAFETY: a handle of dlopen's, closed once.
        unsafe { libc::dlclose(self.handle as *mut c_void) };
    }

    pub fn table(&self, version: usize) -> &'static CTable {
        self.tables[version - 1]
    }

    /// One init, in the argument order of the version.
    pub fn init_with(
        &self,
        version: usize,
        id: u64,
        name: &CStr,
        ranks: i32,
        rank: i32,
        log: Option<LogFn>,
    ) -> Opened {
        let t = self.table(version);
        let mut context = std::ptr::null_mut();
        let mut mask = 0;
        let name = name.as_ptr();
        // SAFETY: the signatures of these versions, with places that live through the call.
        let rc = unsafe {
            match version {
                1..=3 => std::mem::transmute::<*const c_void, InitBare>(t.init)(&mut context, &mut mask),
                4 => std::mem::transmute::<*const c_void, Init4>(t.init)(
                    &mut context,
                    &mut mask,
                    name,
                    id,
                    1,
                    ranks,
                    rank,
                    log,
                ),
                _ => std::mem::transmute::<*const c_void, Init5>(t.init)(
                    &mut context,
                    id,
                    &mut mask,
                    name,
                    1,
                    ranks,
                    rank,
                    log,
                ),
            }
        };
        assert_eq!(rc, 0, "init always succeeds");
        assert!(!context.is_null(), "a context is never NULL");
        Opened { context: context as u64, mask }
    }

    /// Returns whether kernel events are asked for by the mask of [`Self::init_switched`].
    pub fn asks_for_kernels(&self) -> bool {
        MASK.get() & 1 << 6 != 0
    }

    /// Init of version 5 with a mask that the plugin may write later on, as NCCL's.
    pub fn init_switched(&self, id: u64) -> u64 {
        // The lower half of a word.
        let mask = std::ptr::from_ref(&MASK).cast_mut().cast();
        let mut context = std::ptr::null_mut();
        // SAFETY: the signature of this version, and a place for the mask that stays.
        let rc = unsafe {
            let init = std::mem::transmute::<*const c_void, Init5>(self.table(5).init);
            init(&mut context, id, mask, c"pg".as_ptr(), 1, 8, 3, None)
        };
        assert_eq!(rc, 0, "init always succeeds");
        context as u64
    }

    pub fn init(&self, version: usize, id: u64) -> Opened {
        self.init_with(version, id, c"pg", 8, 3, None)
    }

    /// startEvent; the handle's place holds garbage before, as NCCL's may.
    pub fn start(&self, version: usize, context: u64, d: &Descriptor) -> u64 {
        let mut out = 0xdead_beef_usize as *mut c_void;
        // SAFETY: a descriptor of this version and a place for one handle.
        let rc = unsafe { (self.table(version).start)(context as *mut c_void, &mut out, d.as_ptr().cast()) };
        assert_eq!(rc, 0);
        assert_ne!(out as usize, 0xdead_beef, "the handle's place is always written");
        out as u64
    }

    /// startEvent without a descriptor, without a place for the handle, or without both.
    pub fn start_badly(&self, version: usize, context: u64, how: usize) {
        let d = super::abi::group(version);
        let mut out = 0xdead_beef_usize as *mut c_void;
        let place: *mut *mut c_void = if how == 0 { &mut out } else { std::ptr::null_mut() };
        let d = if how == 1 { d.as_ptr().cast() } else { std::ptr::null() };
        // SAFETY: NULL is what is tested.
        assert_eq!(unsafe { (self.table(version).start)(context as *mut c_void, place, d) }, 0);
        assert!(how != 0 || out.is_null(), "the handle's place is always written");
    }

    pub fn stop(&self, version: usize, handle: u64) {
        // SAFETY: any number may be stopped.
        assert_eq!(unsafe { (self.table(version).stop)(handle as *mut c_void) }, 0);
    }

    pub fn record(&self, version: usize, handle: u64, state: i32, args: Option<(u64, i32)>) {
        let args = args.map(|(value, steps)| super::abi::Args { value, steps });
        let at = args.as_ref().map_or(std::ptr::null(), |a| std::ptr::from_ref(a).cast());
        // SAFETY: any number, any state, and NULL or arguments at least as long as any version's.
        assert_eq!(unsafe { (self.table(version).record)(handle as *mut c_void, state, at) }, 0);
    }

    pub fn finalize(&self, version: usize, context: u64) {
        // SAFETY: any number may be finalized.
        assert_eq!(unsafe { (self.table(version).finalize)(context as *mut c_void) }, 0);
    }
}
