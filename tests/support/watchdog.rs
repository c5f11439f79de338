//! The service manager's end of `sd_notify`: what a daemon reports, and when.

use super::{PATIENCE, Room};
use std::os::unix::net::UnixDatagram;
use std::path::PathBuf;
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

/// Receives signs of life.
#[derive(Debug)]
pub(crate) struct Watchdog {
    path: PathBuf,
    signs: Receiver<Instant>,
}

impl Watchdog {
    pub(crate) fn new(room: &Room) -> Self {
        let path = room.path("notify");
        let socket = UnixDatagram::bind(&path).expect("a new socket");
        let (send, signs) = mpsc::channel();
        // It ends with the test's process.
        std::thread::spawn(move || {
            let mut message = [0; 4096];
            while let Ok(n) = socket.recv(&mut message) {
                let is_sign = message[..n].split(|b| *b == b'\n').any(|l| l == b"WATCHDOG=1");
                if is_sign && send.send(Instant::now()).is_err() {
                    return;
                }
            }
        });
        Watchdog { path, signs }
    }

    /// What makes a daemon report to it.
    pub(crate) fn variables(&self) -> [(&'static str, PathBuf); 1] {
        [("NOTIFY_SOCKET", self.path.clone())]
    }

    /// Waits for the next sign of life; those that came before do not count.
    pub(crate) fn next(&self) {
        self.signs.try_iter().for_each(drop);
        self.signs.recv_timeout(PATIENCE).expect("a sign of life");
    }

    /// Asserts that no sign of life comes for so long.
    pub(crate) fn is_silent_for(&self, time: Duration) {
        self.signs.try_iter().for_each(drop);
        assert!(self.signs.recv_timeout(time).is_err(), "a sign of life");
    }

    /// Asserts that signs of life came since the last call, and never later than this after the one before.
    pub(crate) fn served_within(&self, time: Duration) {
        let mut all: Vec<Instant> = self.signs.try_iter().collect();
        all.push(Instant::now());
        assert!(all.len() > 2, "{} signs of life", all.len() - 1);
        let gaps: Vec<Duration> = all.windows(2).map(|two| two[1] - two[0]).collect();
        assert!(gaps.iter().all(|gap| *gap < time), "{gaps:?}");
    }
}
