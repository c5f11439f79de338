//! Signals as one stream.

use std::io;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// A signal that a program is asked to end with, or to pass on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Asked {
    /// SIGINT: by a terminal it goes to the whole foreground group.
    Interrupt,
    /// SIGQUIT: likewise.
    Quit,
    /// SIGTERM.
    Terminate,
    /// SIGHUP.
    HangUp,
    /// SIGUSR1.
    User1,
    /// SIGUSR2.
    User2,
}

impl Asked {
    /// The signal's number.
    pub fn signal(self) -> rustix::process::Signal {
        use rustix::process::Signal as S;
        match self {
            Asked::Interrupt => S::INT,
            Asked::Quit => S::QUIT,
            Asked::Terminate => S::TERM,
            Asked::HangUp => S::HUP,
            Asked::User1 => S::USR1,
            Asked::User2 => S::USR2,
        }
    }

    /// True for the signals that a terminal sends to every process of its foreground group.
    pub fn from_terminal(self) -> bool {
        matches!(self, Asked::Interrupt | Asked::Quit)
    }
}

/// The signals of this process from now on.
#[derive(Debug)]
pub struct Signals {
    interrupt: Signal,
    quit: Signal,
    terminate: Signal,
    hang_up: Signal,
    user1: Signal,
    user2: Signal,
}

impl Signals {
    /// Takes them over from their defaults. Needs a tokio runtime.
    ///
    /// # Errors
    /// The system's error when a handler cannot be installed.
    pub fn new() -> io::Result<Self> {
        Ok(Signals {
            interrupt: signal(SignalKind::interrupt())?,
            quit: signal(SignalKind::quit())?,
            terminate: signal(SignalKind::terminate())?,
            hang_up: signal(SignalKind::hangup())?,
            user1: signal(SignalKind::user_defined1())?,
            user2: signal(SignalKind::user_defined2())?,
        })
    }

    /// The next one.
    pub async fn next(&mut self) -> Asked {
        tokio::select! {
            _ = self.interrupt.recv() => Asked::Interrupt,
            _ = self.quit.recv() => Asked::Quit,
            _ = self.terminate.recv() => Asked::Terminate,
            _ = self.hang_up.recv() => Asked::HangUp,
            _ = self.user1.recv() => Asked::User1,
            _ = self.user2.recv() => Asked::User2,
        }
    }
}
