//! A FUSE file system that stops to answer, mounted by a user in namespaces of its own, and what that user blocks with it.
//!
//! To processes outside of the user namespace the kernel refuses FUSE mounts. But others wait for them all the same: an
//! overlay is read with the rights of who mounted it; a `write` from a buffer in a FUSE file holds the lock of the inode
//! that it writes to; and an exec that closes a FUSE file holds a lock behind several files of its process in /proc. The
//! server takes every request, which makes most of these waits ones that not even SIGKILL ends.

#![expect(unsafe_code, reason = "mounts, and a server between fork and exec")]

use super::ground::{ATTACKER, Ground, Running};
use crate::support::{skipped, until};
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

/// What an attacker blocks.
#[derive(Debug, Clone)]
pub(crate) enum Attack {
    /// The /dev/shm of a mount namespace of its own: whoever opens that waits.
    ContainerShm,
    /// The lock of a file: whoever removes or writes to the file waits.
    File(PathBuf),
    /// The lock of a file's directory as well: whoever lists the directory waits.
    Directory(PathBuf),
    /// Several files of a process in /proc.
    Process,
    /// The same, once [`Hanging::go_on`] is called.
    StoppedProcess,
}

/// A process that blocks something. What it blocks answers again when this is dropped.
#[derive(Debug)]
pub(crate) struct Hanging {
    /// Who is in the namespace, and the parent of those who block.
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
    pub(crate) fn start(ground: &Ground, attack: &Attack, test: &str) -> Option<Self> {
        let Some((device, node)) = device() else {
            skipped(test, "/dev/fuse, or the right to make it (mknod c 10 229) and FUSE in the kernel");
            return None;
        };
        let lower = [ground.new_directory("fuse", ATTACKER), ground.new_directory("lower", ATTACKER)];
        let plan = Plan::new(&device, &lower, attack);
        let mut command = Command::new("sleep");
        command.arg("600").uid(ATTACKER).gid(ATTACKER);
        // SAFETY: between fork and exec `enter` makes system calls alone, on memory that is there by then.
        unsafe { command.pre_exec(move || plan.enter()) };
        match command.spawn() {
            Ok(child) => {
                let hanging = Hanging { process: Running(child), _node: node };
                hanging.wait_until_blocked(attack);
                Some(hanging)
            }
            Err(e) => {
                skipped(test, &format!("overlays on FUSE in user namespaces: {e}"));
                None
            }
        }
    }

    /// The process whose files in /proc are blocked.
    pub(crate) fn blocked_process(&self) -> u32 {
        // The server was started before it.
        self.children().get(1).copied().expect("it was started")
    }

    /// Lets a stopped process go on to what blocks its files.
    pub(crate) fn go_on(&self) {
        let pid = i32::try_from(self.blocked_process()).ok().and_then(rustix::process::Pid::from_raw);
        rustix::process::kill_process(pid.expect("a pid"), rustix::process::Signal::CONT)
            .expect("it is there");
        self.wait_until_blocked(&Attack::Process);
    }

    fn children(&self) -> Vec<u32> {
        let pid = self.process.0.id();
        let text = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).expect("it runs");
        text.split_whitespace().map(|pid| pid.parse().expect("a pid")).collect()
    }

    /// Waits until those who block are in their system calls.
    fn wait_until_blocked(&self, attack: &Attack) {
        let (many, places): (usize, &[&str]) = match attack {
            Attack::ContainerShm | Attack::StoppedProcess => return,
            Attack::File(_) => (1, &["fuse", "fault", "folio", "request"]),
            Attack::Directory(_) => (2, &["fuse", "fault", "folio", "request", "rwsem", "lock"]),
            Attack::Process => (1, &["fuse", "request"]),
        };
        let is_blocked = |pid: &u32| {
            // Reading `wchan` would wait as well.
            let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
            let stack = match attack {
                Attack::Process => String::new(),
                _ => fs::read_to_string(format!("/proc/{pid}/stack")).unwrap_or_default(),
            };
            let is_there = stack.is_empty() || places.iter().any(|p| stack.contains(p));
            status.lines().any(|l| l.starts_with("State:") && (l.contains("D (") || l.contains("S (")))
                && is_there
        };
        until("it blocks", || {
            let blockers = self.children().into_iter().skip(1).take(many).collect::<Vec<u32>>();
            (blockers.len() == many && blockers.iter().all(is_blocked)).then_some(())
        });
        // An exec closes its files a moment after it can be seen to wait.
        std::thread::sleep(std::time::Duration::from_millis(300));
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
    /// A file in the FUSE mount.
    file: CString,
    target: CString,
    attack: Attack,
    maps: [(&'static CStr, String); 3],
}

impl Plan {
    fn new(device: &Path, lower: &[PathBuf; 2], attack: &Attack) -> Self {
        let text = |path: &Path| CString::new(path.as_os_str().as_bytes()).expect("no NUL in it");
        let [fuse, empty] = lower;
        let option = format!("lowerdir={}:{}", fuse.display(), empty.display());
        let target = match attack {
            Attack::File(path) | Attack::Directory(path) => text(path),
            Attack::ContainerShm | Attack::Process | Attack::StoppedProcess => CString::default(),
        };
        Plan {
            device: text(device),
            fuse: text(fuse),
            lower: CString::new(option).expect("no NUL in it"),
            file: text(&fuse.join("file")),
            target,
            attack: attack.clone(),
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
            let file = open(path, libc::O_WRONLY | libc::O_CLOEXEC)?;
            // SAFETY: the text's bytes.
            let written = unsafe { libc::write(file.as_raw_fd(), text.as_ptr().cast(), text.len()) };
            if written < 0 {
                return Err(Error::last_os_error());
            }
        }
        let device = open(&self.device, libc::O_RDWR | libc::O_CLOEXEC)?;
        mount(c"fuse", &self.fuse, &fuse_options(device.as_raw_fd()))?;
        let mut ends = [0; 2];
        // SAFETY: room for two descriptors.
        checked(unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) })?;
        let silent = match self.attack {
            Attack::ContainerShm => None,
            Attack::Process | Attack::StoppedProcess => Some(opcode::FLUSH),
            Attack::File(_) | Attack::Directory(_) => Some(opcode::READ),
        };
        forked(&[ends[0], device.as_raw_fd()], || serve(1, 0, silent))?;
        match self.attack {
            // The pipe's other end closes when this process becomes `sleep`: from then on nothing is answered.
            Attack::ContainerShm => mount(c"overlay", c"/dev/shm", &self.lower),
            Attack::Process => self.exec(false),
            Attack::StoppedProcess => self.exec(true),
            Attack::File(_) => self.write(),
            Attack::Directory(_) => {
                self.write()?;
                forked(&[], || {
                    let time = libc::timespec { tv_sec: 0, tv_nsec: 300_000_000 };
                    // SAFETY: a path that ends in NUL, and a time.
                    unsafe {
                        libc::nanosleep(&raw const time, std::ptr::null_mut());
                        libc::unlink(self.target.as_ptr());
                    }
                })
            }
        }
    }

    /// Starts a process whose exec closes a file for ever.
    fn exec(&self, stops: bool) -> Result<()> {
        forked(&[], || {
            // No other process has the file: it could not end before the server does.
            let Ok(file) = open(&self.file, libc::O_RDONLY | libc::O_CLOEXEC) else { return };
            let arguments = [c"sleep".as_ptr(), c"600".as_ptr(), std::ptr::null()];
            // SAFETY: a path and arguments that end in NUL.
            unsafe {
                if stops {
                    libc::raise(libc::SIGSTOP);
                }
                libc::execv(c"/bin/sleep".as_ptr(), arguments.as_ptr());
            }
            std::mem::forget(file);
        })
    }

    /// Starts a process that writes to the target from a buffer that never comes.
    fn write(&self) -> Result<()> {
        let file = open(&self.file, libc::O_RDONLY | libc::O_CLOEXEC)?;
        // SAFETY: a new mapping wherever the kernel likes.
        let buffer = unsafe {
            let (access, kind) = (libc::PROT_READ, libc::MAP_PRIVATE);
            libc::mmap(std::ptr::null_mut(), 4096, access, kind, file.as_raw_fd(), 0)
        };
        if buffer == libc::MAP_FAILED {
            return Err(Error::last_os_error());
        }
        let target = open(&self.target, libc::O_WRONLY | libc::O_CLOEXEC)?;
        forked(&[target.as_raw_fd()], || {
            // SAFETY: a descriptor and a buffer of this process.
            unsafe { libc::write(0, buffer, 16) };
        })
    }
}

/// Starts a process that does something and ends with its parent. It has these descriptors alone, from 0 on.
fn forked(descriptors: &[RawFd], work: impl FnOnce()) -> Result<()> {
    // SAFETY: the child makes system calls alone, and never returns from here.
    unsafe {
        let parent = libc::getpid();
        if checked(libc::fork())? == 0 {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            let mut many = 0;
            for fd in descriptors {
                libc::dup2(*fd, many);
                many += 1;
            }
            // Nobody shall wait for the end of anything else that is open here.
            let others = libc::syscall(libc::SYS_close_range, many, libc::c_uint::MAX, 0);
            if others == 0 && libc::getppid() == parent {
                work();
            }
            libc::_exit(0);
        }
    }
    Ok(())
}

fn checked(result: libc::c_int) -> Result<libc::c_int> {
    if result < 0 { Err(Error::last_os_error()) } else { Ok(result) }
}

fn open(path: &CStr, flags: libc::c_int) -> Result<OwnedFd> {
    // SAFETY: the path ends in NUL; the descriptor is a new one, and nobody else's.
    unsafe { checked(libc::open(path.as_ptr(), flags)).map(|fd| OwnedFd::from_raw_fd(fd)) }
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

/// Answers what a directory is asked: one with a file, where requests of one kind are `silent`, of which each is taken and none
/// is answered. Else an empty one, until the pipe's other end is closed; then no request is answered any more.
fn serve(device: RawFd, pipe: RawFd, silent: Option<u32>) {
    let mut request = [0u8; REQUEST_BYTES];
    loop {
        let event = |fd, events| libc::pollfd { fd, events, revents: 0 };
        let mut polled = [event(device, libc::POLLIN), event(pipe, 0)];
        let watched = if silent.is_some() { 1 } else { 2 };
        // SAFETY: two pollfds and a buffer of our own, with their lengths.
        let read = unsafe {
            libc::poll(polled.as_mut_ptr(), watched, -1);
            if polled[1].revents != 0 {
                while libc::read(device, request.as_mut_ptr().cast(), request.len()) >= 0 {}
                return;
            }
            libc::read(device, request.as_mut_ptr().cast(), request.len())
        };
        let Ok(read) = usize::try_from(read) else { return };
        let Some(answer) = request.get(..read).and_then(|r| answer(r, silent)) else { continue };
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
    pub(super) const OPEN: u32 = 14;
    pub(super) const READ: u32 = 15;
    pub(super) const FLUSH: u32 = 25;
    pub(super) const INTERRUPT: u32 = 36;
    pub(super) const BATCH_FORGET: u32 = 42;
}

/// The longest answer, in bytes.
const ANSWER_BYTES: usize = 160;

/// The answer's bytes and their number; nothing where none is expected.
fn answer(request: &[u8], silent: Option<u32>) -> Option<([u8; ANSWER_BYTES], usize)> {
    /// The answer's head: length, error, the request's number.
    const HEAD: usize = 16;
    let code = u32::from_ne_bytes(request.get(4..8)?.try_into().ok()?);
    let is_file = request.get(16..24)? != 1u64.to_ne_bytes();
    let mut out = [0u8; ANSWER_BYTES];
    out[8..16].copy_from_slice(request.get(8..16)?);
    let mut put = |at: usize, value: u32| out[HEAD + at..HEAD + at + 4].copy_from_slice(&value.to_ne_bytes());
    // What is known of a file or directory holds for no time.
    let attributes = |put: &mut dyn FnMut(usize, u32), at: usize, is_file: bool| {
        put(at, if is_file { 2 } else { 1 });
        put(at + 8, if is_file { 4096 } else { 0 });
        put(at + 60, if is_file { 0o100_644 } else { 0o040_755 });
        put(at + 64, 2);
    };
    let (error, length) = match code {
        _ if silent == Some(code) => return None,
        opcode::FORGET | opcode::BATCH_FORGET | opcode::INTERRUPT => return None,
        opcode::INIT => {
            // Version 7.31, and the longest write.
            put(0, 7);
            put(4, 31);
            put(20, 4096);
            (0, 64)
        }
        opcode::GETATTR => {
            attributes(&mut put, 16, is_file);
            (0, 104)
        }
        opcode::LOOKUP if silent.is_some() => {
            put(0, 2);
            attributes(&mut put, 40, true);
            (0, 128)
        }
        opcode::STATFS => {
            // Blocks of 4 KiB, names of 255 bytes.
            put(40, 4096);
            put(44, 255);
            put(48, 4096);
            (0, 80)
        }
        opcode::OPEN | opcode::OPENDIR => (0, 16),
        opcode::READDIR | opcode::RELEASEDIR => (0, 0),
        opcode::LOOKUP => (libc::ENOENT, 0),
        _ => (libc::ENOSYS, 0),
    };
    let whole = HEAD + length;
    out[..4].copy_from_slice(&(whole as u32).to_ne_bytes());
    out[4..8].copy_from_slice(&(-error).to_ne_bytes());
    Some((out, whole))
}
