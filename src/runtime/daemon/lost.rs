//! The losses on the way out, logged as they grow: a reader of the log need not look at the metrics to know.

use crate::export::metrics::Exported;
use crate::export::otlp::TOO_MANY;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Between two times that it is said.
const AGAIN: Duration = Duration::from_secs(10);

/// The losses that were logged so far.
#[derive(Debug, Default)]
pub(super) struct Lost {
    said: BTreeMap<(&'static str, &'static str), u64>,
    at: Option<Instant>,
}

impl Lost {
    /// The new lines about losses, if it is time to log them.
    pub(super) fn news(&mut self, exported: &[Exported], now: Instant) -> Vec<String> {
        if self.at.is_some_and(|t| now.saturating_duration_since(t) < AGAIN) {
            return Vec::new();
        }
        let mut news = Vec::new();
        for e in exported {
            // What was chosen not to be sent is not lost.
            for (reason, all) in e.lost.iter().filter(|(reason, _)| **reason != TOO_MANY) {
                let said = self.said.entry((e.signal, reason)).or_default();
                let more = all.saturating_sub(*said);
                if more > 0 {
                    *said = *all;
                    news.push(format!("{more} {} are lost, {all} since the start: {reason}", e.signal));
                }
            }
        }
        if !news.is_empty() {
            self.at = Some(now);
        }
        news
    }
}

/// The lines at the end about what still waits, and about the spans and logs that are with the sender.
pub(super) fn unsent(exported: &[Exported], sending: [u64; 2]) -> Vec<String> {
    let of = |e: &Exported| {
        let more = ["spans", "logs"].iter().position(|s| *s == e.signal).and_then(|i| sending.get(i));
        (e.queued + more.copied().unwrap_or(0), e.signal)
    };
    let all = exported.iter().map(of).filter(|(n, _)| *n > 0);
    all.map(|(n, signal)| format!("{n} {signal} are lost: it ends before they are sent")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_said_when_it_grows_and_not_too_often() {
        let spans = |full, many| Exported {
            signal: "spans",
            queued: 3,
            lost: [("the queue was full", full), (TOO_MANY, many)].into(),
            ..Exported::default()
        };
        let began = Instant::now();
        let mut lost = Lost::default();
        assert_eq!(lost.news(&[spans(0, 5)], began), Vec::<String>::new());
        let said = lost.news(&[spans(2, 5)], began);
        assert_eq!(said, ["2 spans are lost, 2 since the start: the queue was full"]);
        assert_eq!(lost.news(&[spans(7, 5)], began + AGAIN / 2), Vec::<String>::new());
        let said = lost.news(&[spans(7, 9)], began + AGAIN);
        assert_eq!(said, ["5 spans are lost, 7 since the start: the queue was full"]);
        assert_eq!(lost.news(&[spans(7, 9)], began + 3 * AGAIN), Vec::<String>::new());
        assert_eq!(unsent(&[spans(7, 9)], [4, 1]), ["7 spans are lost: it ends before they are sent"]);
    }
}
