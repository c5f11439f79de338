//! The hosts' clocks against the observer's, and against each other by the ends of collectives.
//!
//! Messages give the first mapping: none arrives before it was sent, so the quickest of them bounds the distance of two
//! monotonic clocks, whatever the wall clocks say. Collectives give the second: all their ranks end within the last step,
//! so what their ends differ by is what the mapping is wrong by.

use crate::model::CommId;
use std::collections::{BTreeMap, VecDeque};

/// Ends that are remembered of a host.
const ENDS: usize = 64;
/// Ends before the clocks are believed to be known by them.
const ENOUGH: usize = 8;
/// Ends older than this, in ns, say nothing about now: clocks drift.
const OLD_NS: u64 = 60_000_000_000;
/// A mapping is made anew when it is wrong by more than this, in ns, and by more than its own error.
const WRONG_NS: i64 = 20_000;

/// One host's clock.
#[derive(Debug, Clone, Default)]
pub struct HostClock {
    /// The number to add to its monotonic times to have them on the observer's clock, in ns.
    pub shift_ns: i64,
    /// How far its wall clock is ahead of the observer's, in ns.
    pub wall_ahead_ns: i64,
    /// The correction of that by the ends of collectives, in ns.
    pub corrected_ns: i64,
    /// How much the ends differ from each other, in ns: the mapping is no better than this. Absent before there are
    /// enough.
    pub error_ns: Option<u64>,
    /// How many ends that rests on.
    pub ends: usize,
    recent: VecDeque<(u64, i64)>,
}

/// All of them, by host.
#[derive(Debug, Clone, Default)]
pub struct Hosts {
    by_name: BTreeMap<String, HostClock>,
}

impl Hosts {
    /// The hosts whose clocks were told.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &HostClock)> {
        self.by_name.iter().map(|(k, v)| (k.as_str(), v))
    }

    /// One host's clock.
    pub fn get(&self, host: &str) -> Option<&HostClock> {
        self.by_name.get(host)
    }

    /// The number to add to a host's monotonic times; absent where nobody reported it.
    pub(super) fn shift_ns(&self, host: &str) -> Option<i64> {
        self.by_name.get(host).map(|h| h.shift_ns.saturating_add(h.corrected_ns))
    }

    /// Takes what messages tell of a host's clock. True when times are to be mapped anew.
    pub(super) fn told(&mut self, host: &str, shift_ns: i64, wall_ahead_ns: i64) -> bool {
        let fresh = !self.by_name.contains_key(host);
        let h = self.by_name.entry(host.to_owned()).or_default();
        h.wall_ahead_ns = wall_ahead_ns;
        // What collectives have told is better, as long as messages do not contradict it.
        let known = h.shift_ns.saturating_add(h.corrected_ns);
        let far = known.abs_diff(shift_ns) > CONTRADICTS_NS;
        if fresh || h.error_ns.is_none() && h.shift_ns != shift_ns || far {
            (h.shift_ns, h.corrected_ns, h.error_ns) = (shift_ns, 0, None);
            h.recent.clear();
            return true;
        }
        false
    }

    /// Takes when a collective ended on each of its hosts, by the mapping so far.
    pub(super) fn ended(&mut self, ends: &[(String, u64)]) {
        let mut all: Vec<u64> = ends.iter().map(|(_, t)| *t).collect();
        all.sort_unstable();
        // With two hosts neither is right: both are off by half.
        let middle = match all.len() {
            0 | 1 => return,
            n if n % 2 == 0 => all[n / 2 - 1] / 2 + all[n / 2] / 2,
            n => all[n / 2],
        };
        for (host, at) in ends {
            let Some(h) = self.by_name.get_mut(host) else { continue };
            let Some(off) = at.checked_signed_diff(middle) else { continue };
            h.recent.push_back((*at, off));
            while h.recent.len() > ENDS
                || h.recent.front().is_some_and(|(t, _)| at.saturating_sub(*t) > OLD_NS)
            {
                h.recent.pop_front();
            }
        }
    }

    /// Makes the mappings anew that are wrong. Gives the hosts whose times are mapped otherwise from now on.
    pub(super) fn correct(&mut self) -> Vec<String> {
        let mut changed = Vec::new();
        for (name, h) in &mut self.by_name {
            if h.recent.len() < ENOUGH {
                continue;
            }
            let mut offs: Vec<i64> = h.recent.iter().map(|(_, off)| *off).collect();
            offs.sort_unstable();
            let median = offs[offs.len() / 2];
            let mut away: Vec<u64> = offs.iter().map(|o| o.abs_diff(median)).collect();
            away.sort_unstable();
            // Nine of ten are within it.
            let error = away[away.len() * 9 / 10];
            (h.error_ns, h.ends) = (Some(error), offs.len());
            let limit = WRONG_NS.max(i64::try_from(error).unwrap_or(i64::MAX));
            if median.abs() > limit {
                h.corrected_ns = h.corrected_ns.saturating_sub(median);
                h.recent.clear();
                changed.push(name.clone());
            }
        }
        changed
    }
}

/// Messages contradict what collectives told when they differ by more than they ever take, in ns.
const CONTRADICTS_NS: u64 = 500_000_000;

/// When a collective ended on each of its processes, for the clocks of their hosts.
pub(super) type Ends = (CommId, Vec<(crate::model::SegmentId, u64)>);

#[cfg(test)]
mod tests {
    use super::*;

    const MS: i64 = 1_000_000;
    const S: u64 = 1_000_000_000;

    fn run(hosts: &mut Hosts, off: &[(&str, i64)], times: u64) {
        for n in 0..times {
            let ends: Vec<(String, u64)> = off
                .iter()
                .map(|(h, off)| {
                    let corrected = hosts.get(h).map_or(0, |c| c.corrected_ns);
                    let noise = ((n * 7 + h.len() as u64) % 5 * 1_000) as i64;
                    ((*h).to_owned(), (S * (n + 10)).saturating_add_signed(off + corrected + noise))
                })
                .collect();
            hosts.ended(&ends);
        }
        hosts.correct();
    }

    #[test]
    fn the_ends_of_collectives_bring_clocks_together_to_microseconds() {
        let mut hosts = Hosts::default();
        for h in ["a", "bb", "ccc"] {
            assert!(hosts.told(h, 0, 0));
        }
        let off = [("a", 0), ("bb", 3 * MS), ("ccc", -MS)];
        run(&mut hosts, &off, 20);
        run(&mut hosts, &off, 20);
        let left = |h: &str, off: i64| off + hosts.get(h).unwrap().corrected_ns;
        let all = [left("a", 0), left("bb", 3 * MS), left("ccc", -MS)];
        let spread = all.iter().max().unwrap() - all.iter().min().unwrap();
        assert!(spread <= 10_000, "{all:?}");
        assert!(hosts.iter().all(|(_, h)| h.error_ns.is_some_and(|e| e <= 5_000)), "{hosts:?}");
    }

    #[test]
    fn messages_say_it_first_and_when_a_clock_has_jumped() {
        let mut hosts = Hosts::default();
        assert!(hosts.told("a", 100, 0) && hosts.told("a", 90, 0), "no collective told better");
        assert!(hosts.told("bb", 0, 0));
        run(&mut hosts, &[("a", 2 * MS), ("bb", 0)], 20);
        let known = hosts.shift_ns("a");
        assert!(!hosts.told("a", 80, 0), "a slower message says less");
        assert_eq!(hosts.shift_ns("a"), known);
        assert!(hosts.told("a", 3 * S as i64, 0));
        assert_eq!(hosts.shift_ns("a"), Some(3 * S as i64));
    }
}
