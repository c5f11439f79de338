//! The life of a segment's writer: how others learn it, and which files of the dead are removed.

#![allow(unsafe_code, reason = "forks and kills")]
#![allow(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "the plugin's bans are not its tests'"
)]
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

mod support;

use ringwatch_wire::layout::{FORMAT_VERSION, head};
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{chown, symlink};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, SystemTime};
use support::child::{command, dir, ended, forked, is_child, run, run_with, succeeds};
use support::library::{Plugin, plugin_library};
use support::locks;
use support::segment::{Recording, in_dir};

/// A forked process that has done its work and waits for the end of this value.
struct Waiting {
    pid: libc::pid_t,
    _end: std::io::PipeWriter,
}

fn waiting(work: impl FnOnce()) -> Waiting {
    let (mut done, has_done) = std::io::pipe().unwrap();
    let (mut end, ours) = std::io::pipe().unwrap();
    let mut ours = Some(ours);
    let pid = forked(|| {
        drop(ours.take());
        work();
        (&has_done).write_all(b"!").unwrap();
        end.read_to_end(&mut Vec::new()).unwrap();
    });
    drop(has_done);
    done.read_exact(&mut [0]).expect("the forked process does its work");
    Waiting { pid, _end: ours.take().unwrap() }
}

/// The first steps of a job's process.
fn open_segment() {
    Plugin::built().init(5, 1);
}

// --- the lock

/// A started process and what it prints; killed in the end.
struct Started {
    child: Child,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
}

impl Started {
    #[track_caller]
    fn wait_for(&mut self, line: &str) {
        assert!(self.lines.any(|l| l.unwrap() == line), "it ended without a line {line:?}");
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// In the child: a writer with a forked child of its own, which inherits every descriptor and outlives it.
fn writer_and_orphan() {
    let plugin = Plugin::built();
    let control = dir().parent().unwrap().join("control");
    File::create(&control).unwrap();
    let (mut end, ours) = std::io::pipe().unwrap();
    let mut ours = Some(ours);
    let writer = waiting(|| {
        drop(ours.take());
        plugin.init(5, 1);
        let flock = locks::flocked(&control);
        forked(|| drop(end.read_to_end(&mut Vec::new())));
        std::mem::forget(flock);
    });
    println!("\nready");
    assert_eq!(libc::WTERMSIG(ended(writer.pid)), libc::SIGKILL);
    println!("\nended");
    std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
}

/// Namespaces' pids of a process, from ours inwards.
fn pids(pid: i32) -> Vec<i32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|l| l.strip_prefix("NSpid:")).unwrap();
    line.split_whitespace().map(|p| p.parse().unwrap()).collect()
}

/// A reader outside kills the writer; returns its pids.
fn the_lock_ends_with_the_writer(test: &str, wrapper: &[&str]) -> Vec<i32> {
    let (mut command, folder) = command(test, wrapper);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut started = Started { child, lines };
    started.wait_for("ready");
    let [file] = &in_dir(&folder.path().join("segments"))[..] else { panic!("one segment") };
    let control = folder.path().join("control");
    let writer = locks::holder(file).expect("the writer holds its segment's lock");
    let pids = pids(writer);
    assert_eq!(pids.last().map(|p| p.unsigned_abs()), Some(Recording::read(file).reader().pid()));
    assert!(locks::is_flocked(&control));
    // SAFETY: a process that this test started.
    assert_eq!(unsafe { libc::kill(writer, libc::SIGKILL) }, 0);
    started.wait_for("ended");
    assert_eq!(locks::holder(file), None, "unlocked as soon as the writer's parent learns of its end");
    assert!(locks::is_flocked(&control), "the orphan lives, and an flock would hold");
    pids
}

#[test]
fn the_lock_ends_with_the_process_though_a_child_has_its_descriptors() {
    let test = "the_lock_ends_with_the_process_though_a_child_has_its_descriptors";
    if is_child(test) {
        return writer_and_orphan();
    }
    the_lock_ends_with_the_writer(test, &[]);
}

/// The reader learns the writer's pid as it knows it itself, which the segment cannot say.
#[test]
fn the_lock_of_a_process_in_a_pid_namespace_ends_with_it() {
    let test = "the_lock_of_a_process_in_a_pid_namespace_ends_with_it";
    if is_child(test) {
        return writer_and_orphan();
    }
    let unshare = ["unshare", "--pid", "--fork", "--kill-child"];
    let may = Command::new(unshare[0]).args(&unshare[1..]).arg("true").output();
    if !may.is_ok_and(|o| o.status.success()) {
        return support::skip::skipped(test, "unshare, and the right to make a pid namespace (root)");
    }
    let pids = the_lock_ends_with_the_writer(test, &unshare);
    assert!(pids.len() >= 2 && pids.first() != pids.last(), "{pids:?}");
}

/// Another copy of the plugin in the same process must not open the first one's file: to close it would end its lock.
#[test]
fn two_copies_in_one_process_keep_both_locks() {
    let Some(ran) = run("two_copies_in_one_process_keep_both_locks") else {
        let copy = dir().parent().unwrap().join("copy.so");
        fs::copy(plugin_library(), &copy).unwrap();
        let writer = waiting(|| {
            Plugin::built().init(5, 1);
            Plugin::open(&copy).init(5, 1);
        });
        let holders: Vec<_> = in_dir(&dir()).iter().map(|f| locks::holder(f)).collect();
        assert_eq!(holders, [Some(writer.pid); 2]);
        return;
    };
    ran.succeeded();
}

// --- what is removed

/// Bytes of a segment that a plugin made.
fn template() -> Vec<u8> {
    succeeds(forked(open_segment));
    let [file] = &in_dir(&dir())[..] else { panic!("one segment") };
    let bytes = fs::read(file).unwrap();
    fs::remove_file(file).unwrap();
    bytes
}

/// The process and the version that a file's header names.
#[derive(Clone, Copy)]
struct Says {
    pid: u32,
    ticks: u64,
    nonce: u64,
    version: u32,
}

/// Pid 1 runs, but did not start so early: a process that has ended.
const DEAD: Says = Says { pid: 1, ticks: 7, nonce: 0xd0, version: FORMAT_VERSION };

impl Says {
    fn name(&self) -> String {
        format!("{}-{}-{:x}.seg", self.pid, self.ticks, self.nonce)
    }

    fn bytes(&self, template: &[u8]) -> Vec<u8> {
        let mut bytes = template.to_vec();
        for (at, half) in [(head::PID * 8, self.pid), (head::VERSION * 8, self.version)] {
            bytes[at..at + 4].copy_from_slice(&half.to_le_bytes());
        }
        for (at, word) in [(head::START_TICKS * 8, self.ticks), (head::NONCE * 8, self.nonce)] {
            bytes[at..at + 8].copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }
}

/// The directory in which the test plants files.
struct Planted {
    template: Vec<u8>,
    /// Length that every file gets; nothing is behind it.
    bytes: u64,
}

impl Planted {
    /// A file, `age` hours old.
    fn file(&self, name: &str, content: &[u8], age: u64) {
        let path = dir().join(name);
        fs::write(&path, content).unwrap();
        let file = File::options().write(true).open(&path).unwrap();
        file.set_len(self.bytes).unwrap();
        file.set_modified(SystemTime::now() - Duration::from_secs(age * 3600)).unwrap();
    }

    fn segment(&self, name: &str, says: Says, age: u64) {
        self.file(name, &says.bytes(&self.template), age);
    }
}

/// The room that the plugin leaves to dead segments here, in bytes.
fn budget() -> u64 {
    let path = std::ffi::CString::new(dir().as_os_str().as_bytes()).unwrap();
    let mut fs = std::mem::MaybeUninit::<libc::statfs>::zeroed();
    // SAFETY: fills the struct.
    let fs = unsafe {
        assert_eq!(libc::statfs(path.as_ptr(), fs.as_mut_ptr()), 0);
        fs.assume_init()
    };
    (fs.f_blocks * fs.f_bsize as u64 / 16).min(64 << 20)
}

fn names() -> BTreeSet<String> {
    let entries = fs::read_dir(dir()).unwrap();
    entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect()
}

/// Segments whose writers live, as only a lock says: from another pid namespace the pid says nothing.
const LOCKED: Says = Says { nonce: 0xe1, ..DEAD };
/// As a plugin before the first release locked it.
const FLOCKED: Says = Says { nonce: 0xe2, ..DEAD };

/// A writer that lives and has closed all its descriptors, as only its mapping says.
const MAPPED: Says = Says { nonce: 0xe4, ..DEAD };

/// Maps a file for writing, and closes it.
fn mapped(path: &std::path::Path) {
    fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    let file = File::options().read(true).write(true).open(path).unwrap();
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping wherever the kernel likes, for as long as this process lives.
    let at = unsafe { libc::mmap(std::ptr::null_mut(), 4096, access, libc::MAP_SHARED, file.as_raw_fd(), 0) };
    assert_ne!(at, libc::MAP_FAILED);
}

/// Writers that live, until this value ends.
struct Living {
    writers: [Waiting; 3],
    _flock: File,
}

/// Plants everything that must stay, all of it older than any dead segment.
fn plant_what_stays(planted: &Planted) -> Living {
    const OLD: u64 = 1000;
    let of = |nonce| Says { nonce, ..DEAD };
    // Foreign content.
    planted.file("model.seg", b"weights", OLD);
    planted.file(&of(0xf1).name(), b"right name, wrong content", OLD);
    planted.file(&of(0xf2).name(), b"", OLD);
    planted.file(&of(0xf3).name(), &of(0xf3).bytes(&planted.template)[..64], OLD);
    // A segment under a name that is not its own.
    for (name, says) in [
        ("backup.seg", of(0xf4)),
        ("1-7-0f5.seg", of(0xf5)),
        ("1-8-f6.seg", of(0xf6)),
        ("2-7-f7.seg", of(0xf7)),
        ("1-7-f8.seg", of(0xf9)),
    ] {
        planted.segment(name, says, OLD);
    }
    // Versions that this plugin does not know.
    for (nonce, version) in [(0xfa, FORMAT_VERSION + 1), (0xfb, 0)] {
        planted.segment(&of(nonce).name(), Says { version, ..of(nonce) }, OLD);
    }
    // No regular files.
    let target = dir().parent().unwrap().join("target.seg");
    fs::write(&target, of(0xfc).bytes(&planted.template)).unwrap();
    symlink(&target, dir().join(of(0xfc).name())).unwrap();
    fs::create_dir(dir().join(of(0xfd).name())).unwrap();
    assert!(Command::new("mkfifo").arg(dir().join(of(0xfe).name())).status().unwrap().success());
    // Another user's.
    // SAFETY: no arguments.
    if unsafe { libc::geteuid() } == 0 {
        planted.segment(&of(0xff).name(), of(0xff), OLD);
        chown(dir().join(of(0xff).name()), Some(65_534), None).unwrap();
    }
    // Writers that live.
    planted.segment(&LOCKED.name(), LOCKED, OLD);
    let locked = waiting(|| std::mem::forget(locks::locked(&dir().join(LOCKED.name()))));
    planted.segment(&MAPPED.name(), MAPPED, OLD);
    let mapping = waiting(|| mapped(&dir().join(MAPPED.name())));
    planted.segment(&FLOCKED.name(), FLOCKED, OLD);
    let flock = locks::flocked(&dir().join(FLOCKED.name()));
    // By the pid alone, where the job has closed all its descriptors.
    let stat = fs::read_to_string("/proc/self/stat").unwrap();
    let ticks = stat.rsplit(')').next().unwrap().split_whitespace().nth(19).unwrap().parse().unwrap();
    let me = Says { pid: std::process::id(), ticks, ..of(0xe3) };
    planted.segment(&me.name(), me, OLD);
    let before = names();
    let writer = waiting(open_segment);
    assert!(names().is_superset(&before));
    let new: Vec<String> = names().difference(&before).cloned().collect();
    let [live] = &new[..] else { panic!("{new:?}") };
    let old = SystemTime::now() - Duration::from_secs(OLD * 3600);
    File::open(dir().join(live)).unwrap().set_modified(old).unwrap();
    Living { writers: [writer, locked, mapping], _flock: flock }
}

#[test]
fn only_segments_of_dead_writers_are_removed_and_the_oldest_first() {
    let test = "only_segments_of_dead_writers_are_removed_and_the_oldest_first";
    let Some(ran) = run_with(test, |c, _| {
        c.env("RINGWATCH_SEGMENT_BYTES", "15360");
    }) else {
        let template = template();
        let planted = Planted { template, bytes: budget() / 4 };
        let living = plant_what_stays(&planted);
        let stays = names();
        assert!(stays.len() >= 18, "{stays:?}");
        // Six quarters of what the dead may take: the two oldest have to go.
        let ages = [(0xd1, 3), (0xd2, 6), (0xd3, 1), (0xd4, 5), (0xd5, 2), (0xd6, 4)];
        for (nonce, age) in ages {
            let version = if age == 6 { 1 } else { FORMAT_VERSION };
            let says = Says { nonce, version, ..DEAD };
            planted.segment(&says.name(), says, age);
        }
        let all = names();
        succeeds(forked(open_segment));
        let removed: BTreeSet<String> = all.difference(&names()).cloned().collect();
        let oldest = [0xd2, 0xd4].map(|nonce| Says { nonce, ..DEAD }.name());
        assert_eq!(removed, BTreeSet::from(oldest));
        assert!(names().is_superset(&stays));
        assert!(dir().parent().unwrap().join("target.seg").exists());
        // Their writers end, and they are the oldest.
        let writers = living.writers.each_ref().map(|w| w.pid);
        drop(living);
        for writer in writers {
            succeeds(writer);
        }
        succeeds(forked(open_segment));
        let gone = [LOCKED, FLOCKED, MAPPED].map(|says| says.name());
        assert!(gone.iter().all(|name| !names().contains(name)));
        return;
    };
    ran.succeeded();
}
