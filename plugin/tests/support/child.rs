//! A test in a process of its own: the plugin has one state a process, reads its settings once, and some
//! tests kill.

use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};

const NAME: &str = "RINGWATCH_TEST_CHILD";

/// The output and the files of a child.
#[derive(Debug)]
pub struct Ran {
    pub status: ExitStatus,
    pub output: String,
    /// Its RINGWATCH_DIR, unless the test named another.
    pub dir: PathBuf,
    folder: tempfile::TempDir,
}

impl Ran {
    #[track_caller]
    pub fn succeeded(self) -> Self {
        assert!(self.status.success(), "{}: {}", self.status, self.output);
        self
    }

    /// A file that it left beside its segments.
    #[track_caller]
    pub fn file(&self, name: &str) -> String {
        std::fs::read_to_string(self.folder.path().join(name)).unwrap()
    }

    /// The bytes of such a file.
    #[track_caller]
    pub fn bytes(&self, name: &str) -> Vec<u8> {
        std::fs::read(self.folder.path().join(name)).unwrap()
    }

    pub fn signal(&self) -> Option<i32> {
        self.status.signal()
    }

    pub fn segments(&self) -> Vec<PathBuf> {
        super::segment::in_dir(&self.dir)
    }
}

/// `None` in the child, which then does the test's work; in the parent, what became of the child.
pub fn run(test: &str) -> Option<Ran> {
    run_with(test, |_, _| {})
}

pub fn run_with(test: &str, more: impl FnOnce(&mut Command, &Path)) -> Option<Ran> {
    if is_child(test) {
        return None;
    }
    run_under(test, &[], more)
}

/// As `run`, with the child behind another command.
pub fn run_under(test: &str, wrapper: &[&str], more: impl FnOnce(&mut Command, &Path)) -> Option<Ran> {
    if is_child(test) {
        return None;
    }
    let (mut command, folder) = command(test, wrapper);
    more(&mut command, folder.path());
    let out = command.output().unwrap();
    let output = format!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    let dir = folder.path().join("segments");
    Some(Ran { status: out.status, output, dir, folder })
}

/// The command of a test's child, behind another command, and the folder that its segments go below.
pub fn command(test: &str, wrapper: &[&str]) -> (Command, tempfile::TempDir) {
    let library = super::library::plugin_library();
    let folder = tempfile::tempdir().unwrap();
    let me = std::env::current_exe().unwrap();
    let mut command = match wrapper {
        [] => Command::new(&me),
        [first, rest @ ..] => {
            let mut c = Command::new(first);
            c.args(rest).arg(&me);
            c
        }
    };
    command
        .args([test, "--exact", "--nocapture", "--test-threads=1", "--include-ignored"])
        .env(NAME, test)
        .env("RINGWATCH_PLUGIN_SO", library)
        .env("RINGWATCH_DIR", folder.path().join("segments"))
        .env_remove("RINGWATCH_SEGMENT_BYTES")
        .env_remove("RINGWATCH_CHAIN")
        .env("RUST_BACKTRACE", "0");
    (command, folder)
}

/// True in the child of this test.
pub fn is_child(test: &str) -> bool {
    std::env::var_os(NAME).is_some_and(|n| n == test)
}

/// Ends the process without a word, without destructors and without the test's own end.
pub fn exit_at_once(code: i32) -> ! {
    // SAFETY: ends the process.
    unsafe {
        libc::syscall(libc::SYS_exit_group, code);
        libc::_exit(code)
    }
}

/// Runs `work` in a forked process and returns its pid; the process ends when `work` does.
pub fn forked(work: impl FnOnce()) -> libc::pid_t {
    // SAFETY: the child calls the plugin and system calls, and exits.
    match unsafe { libc::fork() } {
        0 => {
            // A panic must not go on into the copy of the test.
            let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
            exit_at_once(i32::from(done.is_err()));
        }
        child => {
            assert!(child > 0);
            child
        }
    }
}

/// Waits for a forked process, which must succeed.
#[track_caller]
pub fn succeeds(child: libc::pid_t) {
    assert_eq!(ended(child), 0, "the forked process failed");
}

/// Waits for a forked process; its status, as the kernel packs it.
pub fn ended(child: libc::pid_t) -> i32 {
    let mut status = 0;
    // SAFETY: waits for a child of ours.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    status
}

pub fn dir() -> PathBuf {
    std::env::var_os("RINGWATCH_DIR").unwrap().into()
}
