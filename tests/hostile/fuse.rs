//! A file system that stops to answer: an overlay on a FUSE mount, made by a user in namespaces of its own.
//!
//! To processes outside of the user namespace the kernel refuses FUSE mounts, but it reads an overlay with the rights of
//! who mounted it. So the overlay is what makes a foreign process wait. The server takes every request, which makes the
//! wait one that not even SIGKILL ends.

#![expect(unsafe_code, reason = "mounts, and a server between fork and exec")]

use crate::ground::{ATTACKER, Ground, Running};
use crate::support::skipped;
use std::ffi::{CStr, CString};
use std::fs::{self, File};
use std::io::{Error, Result};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The device, in the kernel's numbers.
const DEVICE: (u32, u32) = (10, 229);
/// The shortest buffer with which the kernel lets a server read.
const REQUEST_BYTES: usize = 8192;

/// A process whose /dev/shm does not answer. It answers again, with an error, when this is dropped.
#[derive(Debug)]
pub(crate) struct Hanging {
    /// Who is in the namespace.
    pub(crate) process: Running,
    _node: Option<Node>,
}

/// A device node of the test's own.
#[derive(Debug)]
struct Node(PathBuf);

impl Drop for Node {
    fn drop(&mut self) {
        drop(fs::remove_file(&self.0));
    }
}

impl Hanging {
    /// `None` where FUSE or overlays cannot be had, and the test counts as skipped.
    pub(crate) fn start(ground: &Ground, test: &str) -> Option<Self> {
        let Some((device, node)) = device() else {
            skipped(test, "/dev/fuse, or the right to make it (mknod c 10 229) and FUSE in the kernel");
            return None;
        };
        let lower = [ground.directory("fuse", ATTACKER), ground.directory("lower", ATTACKER)];
        let plan = Plan::new(&device, &lower);
        let mut command = Command::new("sleep");
        command.arg("600").uid(ATTACKER).gid(ATTACKER);
        // SAFETY: between fork and exec `enter` makes system calls alone, on memory that is there by then.
        unsafe { command.pre_exec(move || plan.enter()) };
        match command.spawn() {
            Ok(child) => Some(Hanging { process: Running(child), _node: node }),
            Err(e) => {
                skipped(test, &format!("overlays on FUSE in user namespaces: {e}"));
                None
            }
        }
    }
}

/// A path by which every user may open the device: /dev/fuse, or a node that is made for this test.
fn device() -> Option<(PathBuf, Option<Node>)> {
    let own = PathBuf::from("/dev/fuse");
    let of_all = |m: fs::Metadata| m.permissions().mode() & 0o006 == 0o006;
    if fs::metadata(&own).is_ok_and(of_all) && File::open(&own).is_ok() {
        return Some((own, None));
    }
    // Some file systems carry no devices.
    [std::env::temp_dir(), PathBuf::from("/dev")].into_iter().find_map(|dir| {
        let path = dir.join(format!("ringwatch-hostile-fuse-{}", std::process::id()));
        let name = CString::new(path.as_os_str().as_bytes()).ok()?;
        let (major, minor) = DEVICE;
        // SAFETY: a path with its end, and numbers.
        if unsafe { libc::mknod(name.as_ptr(), libc::S_IFCHR | 0o666, libc::makedev(major, minor)) } != 0 {
            return None;
        }
        let node = Node(path.clone());
        fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).ok()?;
        File::open(&path).ok()?;
        Some((path, Some(node)))
    })
}

/// What the child does before it becomes `sleep`, with all texts made before.
struct Plan {
    device: CString,
    fuse: CString,
    lower: CString,
    maps: [(&'static CStr, String); 3],
}

impl Plan {
    fn new(device: &Path, lower: &[PathBuf; 2]) -> Self {
        let text = |path: &Path| CString::new(path.as_os_str().as_bytes()).expect("no NUL in it");
        let [fuse, empty] = lower;
        let option = format!("lowerdir={}:{}", fuse.display(), empty.display());
        Plan {
            device: text(device),
            fuse: text(fuse),
            lower: CString::new(option).expect("no NUL in it"),
            maps: [
                (c"/proc/self/setgroups", "deny".to_owned()),
                (c"/proc/self/uid_map", format!("0 {ATTACKER} 1")),
                (c"/proc/self/gid_map", format!("0 {ATTACKER} 1")),
            ],
        }
    }

    fn enter(&self) -> Result<()> {
        // SAFETY: plain system calls; texts end in NUL.
        unsafe {
            // A process that changed its user does not own its files in /proc.
            checked(libc::prctl(libc::PR_SET_DUMPABLE, 1))?;
            checked(libc::unshare(libc::CLONE_NEWUSER | libc::CLONE_NEWNS))?;
        }
        for (path, text) in &self.maps {
            let file = open(path, libc::O_WRONLY)?;
            // SAFETY: the text's bytes.
            let written = unsafe { libc::write(file.as_raw_fd(), text.as_ptr().cast(), text.len()) };
            if written < 0 {
                return Err(Error::last_os_error());
            }
        }
        let device = open(&self.device, libc::O_RDWR)?;
        mount(c"fuse", &self.fuse, &fuse_options(device.as_raw_fd()))?;
        let mut ends = [0; 2];
        // SAFETY: room for two descriptors; `fork` makes a process that only serves, and never returns from here.
        unsafe {
            checked(libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC))?;
            let parent = libc::getpid();
            if checked(libc::fork())? == 0 {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                libc::dup2(ends[0], 0);
                libc::dup2(device.as_raw_fd(), 1);
                // Nobody shall wait for the end of anything else that is open here.
                let others = libc::syscall(libc::SYS_close_range, 2, libc::c_uint::MAX, 0);
                if others == 0 && libc::getppid() == parent {
                    serve(1, 0);
                }
                libc::_exit(0);
            }
        }
        // The other end closes when this process becomes `sleep`: from then on nothing is answered.
        mount(c"overlay", c"/dev/shm", &self.lower)
    }
}

fn checked(result: libc::c_int) -> Result<libc::c_int> {
    if result < 0 { Err(Error::last_os_error()) } else { Ok(result) }
}

fn open(path: &CStr, flags: libc::c_int) -> Result<OwnedFd> {
    // SAFETY: the path ends in NUL; the descriptor is a new one, and nobody else's.
    unsafe { checked(libc::open(path.as_ptr(), flags | libc::O_CLOEXEC)).map(|fd| OwnedFd::from_raw_fd(fd)) }
}

fn mount(kind: &CStr, at: &CStr, options: &CStr) -> Result<()> {
    let flags = libc::MS_NOSUID | libc::MS_NODEV;
    // SAFETY: all texts end in NUL.
    unsafe { checked(libc::mount(kind.as_ptr(), at.as_ptr(), kind.as_ptr(), flags, options.as_ptr().cast())) }
        .map(drop)
}

/// `fd=N,...`, made without a heap.
fn fuse_options(device: RawFd) -> FixedText {
    let mut text = FixedText { bytes: [0; 96], length: 0 };
    text.push(b"fd=");
    let digits = (0..4).rev().map(|place| device / 10i32.pow(place));
    digits.filter(|rest| *rest > 0).for_each(|rest| text.push(&[b'0' + (rest % 10) as u8]));
    text.push(b",rootmode=40000,user_id=0,group_id=0,allow_other");
    text
}

struct FixedText {
    bytes: [u8; 96],
    length: usize,
}

impl FixedText {
    fn push(&mut self, more: &[u8]) {
        self.bytes[self.length..self.length + more.len()].copy_from_slice(more);
        self.length += more.len();
    }
}

impl std::ops::Deref for FixedText {
    type Target = CStr;
    fn deref(&self) -> &CStr {
        CStr::from_bytes_until_nul(&self.bytes).unwrap_or_default()
    }
}

/// Answers what an empty directory is asked, until the pipe's other end is closed; then takes requests and answers none.
fn serve(device: RawFd, pipe: RawFd) {
    let mut request = [0u8; REQUEST_BYTES];
    loop {
        let event = |fd, events| libc::pollfd { fd, events, revents: 0 };
        let mut polled = [event(device, libc::POLLIN), event(pipe, 0)];
        // SAFETY: two pollfds and a buffer of our own, with their lengths.
        let read = unsafe {
            libc::poll(polled.as_mut_ptr(), 2, -1);
            if polled[1].revents != 0 {
                while libc::read(device, request.as_mut_ptr().cast(), request.len()) >= 0 {}
                return;
            }
            libc::read(device, request.as_mut_ptr().cast(), request.len())
        };
        let Ok(read) = usize::try_from(read) else { return };
        let Some(answer) = request.get(..read).and_then(answer) else { continue };
        // SAFETY: the answer's bytes.
        unsafe { libc::write(device, answer.0.as_ptr().cast(), answer.1) };
    }
}

/// The kernel's numbers of the requests that are answered with more than an error.
mod opcode {
    pub(super) const FORGET: u32 = 2;
    pub(super) const GETATTR: u32 = 3;
    pub(super) const STATFS: u32 = 17;
    pub(super) const INIT: u32 = 26;
    pub(super) const OPENDIR: u32 = 27;
    pub(super) const READDIR: u32 = 28;
    pub(super) const RELEASEDIR: u32 = 29;
    pub(super) const LOOKUP: u32 = 1;
    pub(super) const INTERRUPT: u32 = 36;
    pub(super) const BATCH_FORGET: u32 = 42;
}

/// The answer's bytes and their number; nothing where none is expected.
fn answer(request: &[u8]) -> Option<([u8; 128], usize)> {
    /// The answer's head: length, error, the request's number.
    const HEAD: usize = 16;
    let code = u32::from_ne_bytes(request.get(4..8)?.try_into().ok()?);
    let mut out = [0u8; 128];
    out[8..16].copy_from_slice(request.get(8..16)?);
    let mut put = |at: usize, value: u32| out[HEAD + at..HEAD + at + 4].copy_from_slice(&value.to_ne_bytes());
    let (error, length) = match code {
        opcode::FORGET | opcode::BATCH_FORGET | opcode::INTERRUPT => return None,
        opcode::INIT => {
            // Version 7.31, and the longest write.
            put(0, 7);
            put(4, 31);
            put(20, 4096);
            (0, 64)
        }
        opcode::GETATTR => {
            // Inode 1, a directory with two links; what is known of it holds for no time.
            put(16, 1);
            put(16 + 60, 0o040_755);
            put(16 + 64, 2);
            (0, 104)
        }
        opcode::STATFS => {
            // Blocks of 4 KiB, names of 255 bytes.
            put(40, 4096);
            put(44, 255);
            put(48, 4096);
            (0, 80)
        }
        opcode::OPENDIR => (0, 16),
        opcode::READDIR | opcode::RELEASEDIR => (0, 0),
        opcode::LOOKUP => (libc::ENOENT, 0),
        _ => (libc::ENOSYS, 0),
    };
    let whole = HEAD + length;
    out[..4].copy_from_slice(&(whole as u32).to_ne_bytes());
    out[4..8].copy_from_slice(&(-error).to_ne_bytes());
    Some((out, whole))
}
