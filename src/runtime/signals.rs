//! Signals, with who sent them.
//!
//! They are blocked and waited for on a thread of their own, because only so it is known whether a terminal
//! sent one, which then reached the whole foreground group, the job included. What the caller ignores (under
//! nohup, in a script's background) stays ignored, here and in the job.

#![expect(unsafe_code, reason = "signal masks")]

use std::io;
use std::mem::MaybeUninit;
use tokio::process::Command;
use tokio::sync::mpsc;

/// A signal that came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Asked {
    number: i32,
    /// The kernel sent it for a terminal: to every process of the foreground group.
    pub from_terminal: bool,
}

impl Asked {
    /// True for the signals that ask a program to end.
    pub fn to_end(self) -> bool {
        matches!(self.number, libc::SIGINT | libc::SIGQUIT | libc::SIGTERM | libc::SIGHUP)
    }

    /// True for the signal that asks a daemon to read its settings anew.
    pub fn to_reload(self) -> bool {
        self.number == libc::SIGHUP
    }

    /// Sends the same to another process, which may have ended this very moment.
    pub fn pass_on(self, pid: u32) {
        if let Ok(pid) = libc::pid_t::try_from(pid) {
            // SAFETY: kill only takes numbers.
            unsafe { libc::kill(pid, self.number) };
        }
    }
}

/// The signals that are taken, as far as the caller does not ignore them.
const TAKEN: [i32; 7] =
    [libc::SIGINT, libc::SIGQUIT, libc::SIGTERM, libc::SIGHUP, libc::SIGUSR1, libc::SIGUSR2, libc::SIGALRM];
/// si_code of what the kernel itself sends.
const BY_KERNEL: i32 = 0x80;

/// The signals of this process from now on.
#[derive(Debug)]
pub struct Signals {
    received: mpsc::UnboundedReceiver<Asked>,
}

fn ignored(number: i32) -> bool {
    let mut old = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: asks only; `old` has room for the answer.
    let asked = unsafe { libc::sigaction(number, std::ptr::null(), old.as_mut_ptr()) };
    // SAFETY: filled, and zeroes before, which are a valid value too.
    let old = unsafe { old.assume_init() };
    asked == 0 && old.sa_sigaction == libc::SIG_IGN
}

fn taken() -> libc::sigset_t {
    let mut set = MaybeUninit::<libc::sigset_t>::zeroed();
    // SAFETY: initialises the set.
    unsafe { libc::sigemptyset(set.as_mut_ptr()) };
    for number in TAKEN.into_iter().filter(|n| !ignored(*n)) {
        // SAFETY: an initialised set and a valid number.
        unsafe { libc::sigaddset(set.as_mut_ptr(), number) };
    }
    // SAFETY: initialised above.
    unsafe { set.assume_init() }
}

impl Signals {
    /// Takes them over. Threads that are started later inherit that.
    ///
    /// # Errors
    /// The system's error when the thread cannot be started.
    pub fn new() -> io::Result<Self> {
        let set = taken();
        // SAFETY: an initialised set; blocking these signals is what is wanted.
        unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &set, std::ptr::null_mut()) };
        let (send, received) = mpsc::unbounded_channel();
        std::thread::Builder::new().name("signals".into()).spawn(move || {
            loop {
                let mut info = MaybeUninit::<libc::siginfo_t>::zeroed();
                // SAFETY: an initialised set, and room for one siginfo.
                let number = unsafe { libc::sigwaitinfo(&set, info.as_mut_ptr()) };
                if number <= 0 {
                    continue;
                }
                // SAFETY: filled by sigwaitinfo.
                let from_terminal = unsafe { info.assume_init() }.si_code == BY_KERNEL;
                if send.send(Asked { number, from_terminal }).is_err() {
                    return;
                }
            }
        })?;
        Ok(Signals { received })
    }

    /// The next one.
    pub async fn next(&mut self) -> Asked {
        match self.received.recv().await {
            Some(asked) => asked,
            // The thread ends only with this value.
            None => std::future::pending().await,
        }
    }
}

/// Gives a command's process its signals back, which it would otherwise inherit blocked.
pub fn release(command: &mut Command) {
    let set = taken();
    // SAFETY: between fork and exec only sigprocmask is called, which may be.
    unsafe {
        command.pre_exec(move || {
            libc::pthread_sigmask(libc::SIG_UNBLOCK, &set, std::ptr::null_mut());
            Ok(())
        });
    }
}
