//! Connections that were closed or refused before they were served, and ports that could not be had: how many, why, and a
//! line in the log.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tracing::warn;

/// The least time between two lines of the log.
const AGAIN: Duration = Duration::from_secs(60);

/// Why a connection was not served to its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::runtime) enum Closed {
    /// HTTP: a newer connection needed its place, or a newer answer the memory of its own.
    Displaced,
    /// HTTP: the request's head did not come in time.
    SlowRequest,
    /// HTTP: request and answer together took too long.
    Deadline,
    /// HTTP: no descriptor or memory was left to accept it.
    HttpExhausted,
    /// Socket: all places of its kind were taken.
    Full,
    /// Socket: its user had as many connections as one user may have.
    UserFull,
    /// Socket: the question did not come, or the answer was not taken, in time.
    SlowAsker,
    /// Socket: no descriptor or memory was left to accept it.
    SocketExhausted,
}

/// One row for each reason, in their order: the server and the reason as metrics name them.
const NAMES: [(Closed, &str, &str); 8] = [
    (Closed::Displaced, "http", "displaced by a newer one"),
    (Closed::SlowRequest, "http", "request too slow"),
    (Closed::Deadline, "http", "deadline"),
    (Closed::HttpExhausted, "http", "descriptors or memory exhausted"),
    (Closed::Full, "socket", "too many connections"),
    (Closed::UserFull, "socket", "too many connections of one user"),
    (Closed::SlowAsker, "socket", "question or reading too slow"),
    (Closed::SocketExhausted, "socket", "descriptors or memory exhausted"),
];

/// Counters of all reasons.
#[derive(Debug, Default)]
pub(in crate::runtime) struct Connections {
    closed: [AtomicU64; NAMES.len()],
    listen_failures: AtomicU64,
}

impl Connections {
    /// Counts one.
    pub(in crate::runtime) fn closed(&self, why: Closed) {
        self.closed[why as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Counts an attempt to listen that failed.
    pub(in crate::runtime) fn listen_failed(&self) {
        self.listen_failures.fetch_add(1, Ordering::Relaxed);
    }

    /// Attempts to listen that failed.
    pub(in crate::runtime) fn listen_failures(&self) -> u64 {
        self.listen_failures.load(Ordering::Relaxed)
    }

    /// All counts, by server and reason.
    pub(in crate::runtime) fn counts(&self) -> BTreeMap<(&'static str, &'static str), u64> {
        NAMES.iter().zip(&self.closed).map(|((_, s, r), n)| ((*s, *r), n.load(Ordering::Relaxed))).collect()
    }
}

/// True for an error of accept that waiting can cure: no descriptor, no memory. Others are of the one connection.
pub(in crate::runtime) fn is_exhausted(e: &io::Error) -> bool {
    use rustix::io::Errno;
    let errno = Errno::from_io_error(e);
    [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM].map(Some).contains(&errno)
}

/// Reports the counts as they grow, at most once a minute.
#[derive(Debug, Default)]
pub(in crate::runtime) struct ClosedReport {
    reported: BTreeMap<(&'static str, &'static str), u64>,
    at: Option<Instant>,
}

impl ClosedReport {
    /// Logs what is new.
    pub(in crate::runtime) fn log(&mut self, connections: &Connections) {
        self.lines(connections, Instant::now()).iter().for_each(|l| warn!("{l}"));
    }

    /// The lines to log at this moment.
    fn lines(&mut self, connections: &Connections, now: Instant) -> Vec<String> {
        if self.at.is_some_and(|t| now.saturating_duration_since(t) < AGAIN) {
            return Vec::new();
        }
        let mut lines = Vec::new();
        for (key, all) in connections.counts() {
            let before = self.reported.insert(key, all).unwrap_or(0);
            let (server, reason) = key;
            if all > before {
                let more = all - before;
                lines.push(format!("{server}: closed {more} connections, {all} since the start: {reason}"));
            }
        }
        if !lines.is_empty() {
            self.at = Some(now);
        }
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reason_has_its_own_row() {
        let connections = Connections::default();
        for (n, (why, ..)) in NAMES.iter().enumerate() {
            assert_eq!(*why as usize, n, "{why:?}");
            (0..=n).for_each(|_| connections.closed(*why));
        }
        let counts = connections.counts();
        assert_eq!(counts.len(), NAMES.len());
        assert_eq!(counts[&("http", "deadline")], 3);
        assert_eq!(counts[&("socket", "descriptors or memory exhausted")], 8);
    }

    #[test]
    fn a_flood_is_one_line_a_minute_and_nothing_is_left_out() {
        let (connections, began) = (Connections::default(), Instant::now());
        let mut report = ClosedReport::default();
        assert_eq!(report.lines(&connections, began), Vec::<String>::new());
        (0..900).for_each(|_| connections.closed(Closed::Displaced));
        let first = report.lines(&connections, began);
        assert_eq!(first, ["http: closed 900 connections, 900 since the start: displaced by a newer one"]);
        (0..72).for_each(|_| connections.closed(Closed::Displaced));
        assert_eq!(report.lines(&connections, began + AGAIN / 2), Vec::<String>::new());
        let second = report.lines(&connections, began + AGAIN);
        assert_eq!(second, ["http: closed 72 connections, 972 since the start: displaced by a newer one"]);
        assert_eq!(report.lines(&connections, began + 3 * AGAIN), Vec::<String>::new());
    }

    #[test]
    fn only_what_waiting_can_cure_is_waited_out() {
        for (code, waits) in
            [(libc::EMFILE, true), (libc::ENFILE, true), (libc::ENOMEM, true), (libc::ECONNABORTED, false)]
        {
            assert_eq!(is_exhausted(&io::Error::from_raw_os_error(code)), waits, "{code}");
        }
    }
}
