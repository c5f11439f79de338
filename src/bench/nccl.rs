//! NCCL's public C interface, as much of it as a benchmark needs, loaded when it is asked for.
//!
//! Communicators and streams are opaque pointers, kept as numbers.

#![expect(unsafe_code, reason = "calls of a C library that is loaded at run time")]

use super::error::BenchError;
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use std::ffi::{CStr, c_char, c_int};
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// `ncclSuccess`.
pub const SUCCESS: c_int = 0;
/// `ncclInProgress`: no failure, only not done yet.
pub const IN_PROGRESS: c_int = 7;
/// The name under which the library is found.
pub const FILE_NAME: &str = "libnccl.so.2";
/// Where NVIDIA's wheels put it, below a site-packages directory.
pub const IN_WHEEL: &str = "nvidia/nccl/lib/libnccl.so.2";
/// Bytes of an id.
pub const ID_BYTES: usize = 128;

/// The id that names a communicator before it exists; NCCL passes it by value.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct UniqueId(pub [u8; ID_BYTES]);

/// Declares the functions of the library that give back a result code.
macro_rules! functions {
    ($($field:ident = $symbol:literal ($($argument:ty),*);)*) => {
        #[derive(Debug, Clone, Copy)]
        struct Functions {
            $($field: unsafe extern "C" fn($($argument),*) -> c_int,)*
            error_string: unsafe extern "C" fn(c_int) -> *const c_char,
            /// Since NCCL 2.13.
            last_error: Option<unsafe extern "C" fn(usize) -> *const c_char>,
        }

        impl Functions {
            fn load(library: &Library, name: &str) -> Result<Self, BenchError> {
                let missing = |symbol| BenchError::Symbol { library: name.to_owned(), symbol };
                // SAFETY: the symbol is a function of this signature in every release.
                let error_string = unsafe { library.get("ncclGetErrorString") };
                // SAFETY: as above, where it is there.
                let last_error = unsafe { library.get("ncclGetLastError") };
                Ok(Functions {
                    $($field: {
                        // SAFETY: as above.
                        let found = unsafe { library.get::<unsafe extern "C" fn($($argument),*) -> c_int>($symbol) };
                        *found.map_err(|_| missing($symbol))?
                    },)*
                    error_string: *error_string.map_err(|_| missing("ncclGetErrorString"))?,
                    last_error: last_error.ok().map(|f| *f),
                })
            }
        }
    };
}

functions! {
    version = "ncclGetVersion"(*mut c_int);
    unique_id = "ncclGetUniqueId"(*mut UniqueId);
    init_rank = "ncclCommInitRank"(*mut usize, c_int, UniqueId, c_int);
    destroy = "ncclCommDestroy"(usize);
    abort = "ncclCommAbort"(usize);
    async_error = "ncclCommGetAsyncError"(usize, *mut c_int);
    group_start = "ncclGroupStart"();
    group_end = "ncclGroupEnd"();
    all_reduce = "ncclAllReduce"(u64, u64, usize, c_int, c_int, usize, usize);
    broadcast = "ncclBroadcast"(u64, u64, usize, c_int, c_int, usize, usize);
    reduce = "ncclReduce"(u64, u64, usize, c_int, c_int, c_int, usize, usize);
    all_gather = "ncclAllGather"(u64, u64, usize, c_int, usize, usize);
    reduce_scatter = "ncclReduceScatter"(u64, u64, usize, c_int, c_int, usize, usize);
    send = "ncclSend"(u64, usize, c_int, c_int, usize, usize);
    recv = "ncclRecv"(u64, usize, c_int, c_int, usize, usize);
}

/// A failed call: which, and NCCL's code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Failed {
    /// The function.
    pub call: &'static str,
    /// NCCL's result code.
    pub code: c_int,
}

/// A result with NCCL's code in it; [`Nccl::explain`] makes an error of it that people can read.
pub type Outcome = Result<(), Failed>;

fn told(call: &'static str, code: c_int) -> Outcome {
    if code == SUCCESS { Ok(()) } else { Err(Failed { call, code }) }
}

/// The loaded library.
#[derive(Debug)]
pub struct Nccl {
    f: Functions,
    path: PathBuf,
    version: i32,
    /// Never closed: its threads and what it does at the process's end may come later than we go.
    _library: ManuallyDrop<Library>,
}

impl Nccl {
    /// Loads the library: the named file; else by the dynamic linker; else from the wheels of the active
    /// virtual environment, of the python3 in `PATH`, of the system's Pythons, and of the user's.
    ///
    /// # Errors
    /// [`BenchError::NoNccl`] with every place that was tried; [`BenchError::Symbol`] for something else under
    /// that name.
    pub fn open(path: Option<&Path>) -> Result<Arc<Self>, BenchError> {
        let mut tried = Vec::new();
        let candidates = path.map_or_else(candidates, |p| vec![p.to_owned()]);
        for file in candidates {
            // A name without a directory is the dynamic linker's to find.
            let by_linker = path.is_none() && file.components().count() == 1;
            // SAFETY: NCCL's own name, or the file that the user named for it; its constructors run.
            match unsafe { Library::open(Some(&file), RTLD_NOW | RTLD_LOCAL) } {
                Ok(library) => return Self::with(library, &file, by_linker),
                Err(e) if by_linker => tried.push(format!("by the dynamic linker: {}", reason(&e))),
                Err(e) => tried.push(reason(&e)),
            }
        }
        if path.is_none() && tried.len() == 1 {
            tried.push(format!(
                "{IN_WHEEL} lies in no site-packages of $VIRTUAL_ENV, $CONDA_PREFIX, python3's prefix, /usr, /usr/local or ~/.local"
            ));
        }
        Err(BenchError::NoNccl { tried })
    }

    fn with(library: Library, file: &Path, by_linker: bool) -> Result<Arc<Self>, BenchError> {
        let f = Functions::load(&library, &file.display().to_string())?;
        let path = if by_linker { loaded_file().unwrap_or_else(|| file.to_owned()) } else { file.to_owned() };
        let mut nccl = Nccl { f, path, version: 0, _library: ManuallyDrop::new(library) };
        // SAFETY: a place for one int.
        let outcome = told("ncclGetVersion", unsafe { (f.version)(&mut nccl.version) });
        outcome.map_err(|e| nccl.explain(e, 0, None, ""))?;
        Ok(Arc::new(nccl))
    }

    /// The file that was loaded.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// NCCL's version code: 22809 is 2.28.9.
    #[must_use]
    pub fn version(&self) -> i32 {
        self.version
    }

    /// Makes an error of a failed call: NCCL's text, and its last error where it has one.
    #[must_use]
    pub fn explain(&self, failed: Failed, rank: u32, comm: Option<usize>, operation: &str) -> BenchError {
        let text = |at: *const c_char| {
            // SAFETY: NCCL gives a static C string or NULL; its last error lives until the next one.
            (!at.is_null()).then(|| unsafe { CStr::from_ptr(at) }.to_string_lossy().into_owned())
        };
        // SAFETY: any code has a text.
        let known = text(unsafe { (self.f.error_string)(failed.code) });
        // SAFETY: NCCL ignores the communicator, which may be NULL.
        let last = self.f.last_error.and_then(|f| text(unsafe { f(comm.unwrap_or(0)) }));
        BenchError::Nccl {
            rank,
            call: failed.call,
            code: failed.code,
            text: known.unwrap_or_else(|| "unknown".to_owned()),
            last: last.map(|l| l.trim().to_owned()).filter(|l| !l.is_empty()),
            operation: operation.to_owned(),
        }
    }

    /// A new id.
    ///
    /// # Errors
    /// NCCL's own.
    pub fn unique_id(&self) -> Result<UniqueId, BenchError> {
        let mut id = UniqueId([0; ID_BYTES]);
        // SAFETY: a place for one id.
        let outcome = told("ncclGetUniqueId", unsafe { (self.f.unique_id)(&mut id) });
        outcome.map_err(|e| self.explain(e, 0, None, "")).map(|()| id)
    }

    /// Joins a communicator as one of its ranks; in a group it is there when the group has ended. The current
    /// context says on which device. The place must stay where it is until then.
    ///
    /// # Errors
    /// NCCL's own.
    pub fn init_rank(&self, place: &mut usize, ranks: u32, id: &UniqueId, rank: u32) -> Outcome {
        // SAFETY: a place for one communicator, which NCCL fills by the group's end; the caller keeps it.
        told("ncclCommInitRank", unsafe { (self.f.init_rank)(place, int(ranks), *id, int(rank)) })
    }

    /// Frees a communicator whose work is done.
    ///
    /// # Errors
    /// NCCL's own.
    pub fn destroy(&self, comm: usize) -> Outcome {
        // SAFETY: the registry of communicators gives each away once.
        told("ncclCommDestroy", unsafe { (self.f.destroy)(comm) })
    }

    /// Ends and frees a communicator, whatever it is doing.
    ///
    /// # Errors
    /// NCCL's own.
    pub fn abort(&self, comm: usize) -> Outcome {
        // SAFETY: the registry of communicators gives each away once; NCCL allows this from any thread.
        told("ncclCommAbort", unsafe { (self.f.abort)(comm) })
    }

    /// The error of a communicator since its calls came back; fine while it is still at work.
    ///
    /// # Errors
    /// NCCL's own.
    pub fn async_error(&self, comm: usize) -> Outcome {
        let mut state = SUCCESS;
        // SAFETY: a communicator that is alive and a place for one code.
        told("ncclCommGetAsyncError", unsafe { (self.f.async_error)(comm, &mut state) })?;
        if state == IN_PROGRESS { Ok(()) } else { told("ncclCommGetAsyncError", state) }
    }

    /// Begins a group of calls.
    ///
    /// # Errors
    /// NCCL's own.
    pub fn group_start(&self) -> Outcome {
        // SAFETY: no arguments.
        told("ncclGroupStart", unsafe { (self.f.group_start)() })
    }

    /// Ends a group of calls, which are issued together.
    ///
    /// # Errors
    /// NCCL's own, of any of the calls.
    pub fn group_end(&self) -> Outcome {
        // SAFETY: no arguments.
        told("ncclGroupEnd", unsafe { (self.f.group_end)() })
    }

    /// Issues one call on a communicator and a stream.
    ///
    /// # Errors
    /// NCCL's own.
    pub fn issue(&self, call: &Call, comm: usize, stream: usize) -> Outcome {
        let f = &self.f;
        let len = |count: u64| usize::try_from(count).unwrap_or(usize::MAX);
        match *call {
            Call::AllReduce { send, recv, count, dtype, op } => told("ncclAllReduce", {
                // SAFETY: the engine keeps both buffers, at least as long, until the stream is idle; the
                // communicator and the stream are alive. So it is for all of these.
                unsafe { (f.all_reduce)(send, recv, len(count), dtype, op, comm, stream) }
            }),
            Call::Broadcast { send, recv, count, dtype, root } => told("ncclBroadcast", {
                // SAFETY: as above.
                unsafe { (f.broadcast)(send, recv, len(count), dtype, int(root), comm, stream) }
            }),
            Call::Reduce { send, recv, count, dtype, op, root } => told("ncclReduce", {
                // SAFETY: as above.
                unsafe { (f.reduce)(send, recv, len(count), dtype, op, int(root), comm, stream) }
            }),
            Call::AllGather { send, recv, count, dtype } => told("ncclAllGather", {
                // SAFETY: as above.
                unsafe { (f.all_gather)(send, recv, len(count), dtype, comm, stream) }
            }),
            Call::ReduceScatter { send, recv, count, dtype, op } => told("ncclReduceScatter", {
                // SAFETY: as above.
                unsafe { (f.reduce_scatter)(send, recv, len(count), dtype, op, comm, stream) }
            }),
            Call::Send { from, count, dtype, peer } => told("ncclSend", {
                // SAFETY: as above.
                unsafe { (f.send)(from, len(count), dtype, int(peer), comm, stream) }
            }),
            Call::Recv { to, count, dtype, peer } => told("ncclRecv", {
                // SAFETY: as above.
                unsafe { (f.recv)(to, len(count), dtype, int(peer), comm, stream) }
            }),
        }
    }
}

/// The dynamic linker's own words, which name the file.
fn reason(e: &libloading::Error) -> String {
    std::error::Error::source(e).map_or_else(|| e.to_string(), ToString::to_string)
}

fn int(n: u32) -> c_int {
    c_int::try_from(n).unwrap_or(c_int::MAX)
}

/// One call of NCCL's: addresses on the device, counts in elements, NCCL's numbers for types and reductions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "NCCL's own names of the arguments")]
pub enum Call {
    /// `ncclAllReduce`
    AllReduce { send: u64, recv: u64, count: u64, dtype: c_int, op: c_int },
    /// `ncclBroadcast`
    Broadcast { send: u64, recv: u64, count: u64, dtype: c_int, root: u32 },
    /// `ncclReduce`
    Reduce { send: u64, recv: u64, count: u64, dtype: c_int, op: c_int, root: u32 },
    /// `ncclAllGather`, count of one rank's part
    AllGather { send: u64, recv: u64, count: u64, dtype: c_int },
    /// `ncclReduceScatter`, count of one rank's part
    ReduceScatter { send: u64, recv: u64, count: u64, dtype: c_int, op: c_int },
    /// `ncclSend`
    Send { from: u64, count: u64, dtype: c_int, peer: u32 },
    /// `ncclRecv`
    Recv { to: u64, count: u64, dtype: c_int, peer: u32 },
}

/// Where the library may lie, best first.
fn candidates() -> Vec<PathBuf> {
    let variable = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let mut found = vec![PathBuf::from(FILE_NAME)];
    let mut prefixes = Vec::new();
    prefixes.extend(variable("VIRTUAL_ENV"));
    prefixes.extend(variable("CONDA_PREFIX"));
    // The python3 that a shell would start, of a virtual environment that is not activated for example.
    let path = std::env::var_os("PATH").unwrap_or_default();
    let python = std::env::split_paths(&path).find(|d| d.join("python3").is_file());
    prefixes.extend(python.as_deref().and_then(Path::parent).map(Path::to_owned));
    prefixes.extend(["/usr", "/usr/local"].map(PathBuf::from));
    prefixes.extend(variable("HOME").map(|h| h.join(".local")));
    for prefix in prefixes {
        found.extend(wheels(&prefix));
    }
    found
}

/// The libraries that wheels have put below a Python's prefix, the newest Python's first.
fn wheels(prefix: &Path) -> Vec<PathBuf> {
    packages(prefix).into_iter().map(|p| p.join(IN_WHEEL)).filter(|f| f.is_file()).collect()
}

/// The directories of packages below a Python's prefix, the newest Python's first.
#[must_use]
pub fn packages(prefix: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(prefix.join("lib")) else { return Vec::new() };
    let mut pythons: Vec<PathBuf> = entries
        .flatten()
        .filter(|e| e.file_name().to_string_lossy().starts_with("python3"))
        .map(|e| e.path())
        .collect();
    // python3.9 comes before python3.10: by length, then by name.
    pythons.sort_by_key(|p| (p.as_os_str().len(), p.clone()));
    let below = |python: &PathBuf| ["site-packages", "dist-packages"].map(|d| python.join(d));
    pythons.iter().rev().flat_map(below).filter(|d| d.is_dir()).collect()
}

/// The file behind the library that the dynamic linker has found, as the kernel has it mapped.
fn loaded_file() -> Option<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let paths = maps.lines().filter_map(|l| l.find('/').map(|at| &l[at..]));
    let mut nccl = paths
        .filter(|p| Path::new(p).file_name().is_some_and(|n| n.to_string_lossy().starts_with("libnccl.so")));
    nccl.next().map(PathBuf::from)
}

/// A version code as people write it: 22809 as 2.28.9.
#[must_use]
pub fn version_text(code: i32) -> String {
    let (thousand, rest) = if code < 10_000 { (1000, 100) } else { (10_000, 100) };
    format!("{}.{}.{}", code / thousand, code % thousand / rest, code % rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_read_as_people_write_them() {
        assert_eq!(version_text(22_809), "2.28.9");
        assert_eq!(version_text(2_708), "2.7.8");
        assert_eq!(version_text(23_203), "2.32.3");
    }

    #[test]
    fn wheels_of_the_newest_python_come_first() {
        let dir = tempfile::tempdir().unwrap();
        for python in ["python3.9", "python3.12", "perl5"] {
            let packages = dir.path().join("lib").join(python).join("site-packages");
            std::fs::create_dir_all(packages.join("nvidia/nccl/lib")).unwrap();
            std::fs::write(packages.join(IN_WHEEL), "").unwrap();
        }
        let found = wheels(dir.path());
        let of = |python: &str| dir.path().join("lib").join(python).join("site-packages").join(IN_WHEEL);
        assert_eq!(found, [of("python3.12"), of("python3.9")]);
        assert!(wheels(&dir.path().join("nowhere")).is_empty());
    }
}
