//! Settings from the environment, read once, at the first init. A bad value is told through NCCL's logger, and the
//! default is used.
//!
//! | variable | meaning | default |
//! |---|---|---|
//! | `RINGWATCH_DIR` | directory of the segments | `/dev/shm/ringwatch-<uid>`; where that is not the user's own, `/dev/shm/ringwatch-<uid>-<random>` |
//! | `RINGWATCH_SEGMENT_BYTES` | largest segment, in bytes | about 4 MiB, and at most an eighth of what is free |
//! | `RINGWATCH_OVERHEAD_BUDGET` | share of wall time that GPU times may cost a process, whatever number of GPUs it drives, `0%` to `100%` | `1%` |
//! | `RINGWATCH_DETAIL` | `auto`: GPU times within the budget; `full`: of every operation, whatever it costs; `calls`: none | `auto` |
//! | `RINGWATCH_GRAPHS` | CUDA graphs. `watch`: captures, and replays where NCCL tells of them; `full`: GPU times of every replay too, 5 us a captured operation; `off`: nothing of them, and up to NCCL 2.30 no kernel events, so that no capture can find them on | `watch` |
//! | `RINGWATCH_CHAIN` | another profiler plugin, which gets what it asks for as well; named as NCCL_PROFILER_PLUGIN names one | none |
//! | `RINGWATCH_TUNE` | compiled rules for NCCL's tuner, which `ringwatch tune` writes; the same on all ranks | none |
//! | `RINGWATCH_TUNE_REQUIRE` | `1`: a communicator whose ranks do not agree on the rules is not made | `0` |
//! | `RINGWATCH_TUNE_WAIT_MS` | longest wait for the other ranks' rules while a communicator is made, in ms, up to 600000 | 10000; 60000 with an all-gather |
//! | `RINGWATCH_TUNE_NODES` | `1`: ranks agree on the rules by an all-gather in each communicator's init; every rank has to set it and to preload the library | `0` |
//! | `RINGWATCH_TUNE_COSTS` | a file for NCCL's predicted times where no rules apply, which `ringwatch tune --search` and `run --tune observe` make | none |

use crate::runtime::log::{Log, Message};
use crate::runtime::sys::variable;
use core::ffi::CStr;

/// Longest directory that is accepted, so that a file name still fits behind it.
const DIR_MAX: usize = 3900;

/// The user's settings.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Settings {
    /// The directory, where the user named one.
    pub(crate) dir: Option<&'static CStr>,
    /// Largest segment in bytes, where the user named it.
    pub(crate) bytes: Option<u64>,
    /// Overhead budget, in millionths of wall time.
    pub(crate) budget_ppm: u64,
    /// The operations that get GPU times.
    pub(crate) detail: Detail,
    /// The treatment of CUDA graphs.
    pub(crate) graphs: Graphs,
}

/// The operations that get GPU times.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Detail {
    /// As many as the budget allows.
    Auto,
    /// All, as far as this NCCL bears it.
    Full,
    /// None.
    Calls,
}

/// The treatment of CUDA graphs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Graphs {
    /// Captures are recorded, and replays where NCCL tells of them.
    Watch,
    /// GPU times of every replay.
    Full,
    /// Nothing is recorded.
    Off,
}

const BUDGET_PPM: u64 = 10_000;

/// `1%`, `0.25%` or `1` in millionths; `None` for anything else and for more than 100 %.
pub(crate) fn share(text: &CStr) -> Option<u64> {
    let text = text.to_bytes();
    let text = text.strip_suffix(b"%").unwrap_or(text);
    let mut ppm = 0u64;
    // What the next digit counts; in the whole part it is not known before the point.
    let mut place = None;
    let mut digits = 0;
    for b in text {
        match (b, place) {
            (b'.', None) => place = Some(1_000),
            (b'0'..=b'9', None) => {
                ppm = ppm.checked_mul(10)?.checked_add(u64::from(b - b'0') * 10_000)?;
                digits += 1;
            }
            (b'0'..=b'9', Some(p)) => {
                ppm = ppm.checked_add(u64::from(b - b'0') * p)?;
                place = Some(p / 10);
                digits += 1;
            }
            _ => return None,
        }
    }
    if digits > 0 && ppm <= 1_000_000 { Some(ppm) } else { None }
}

/// The value that a variable names, or the first one, and then a line in the log.
fn one_of<T: Copy>(name: &CStr, values: &[(&CStr, T)], otherwise: T, log: &Log, bad: Message) -> T {
    let Some(text) = variable(name) else { return otherwise };
    let found = values.iter().find(|v| v.0.to_bytes().eq_ignore_ascii_case(text.to_bytes()));
    found.map_or_else(
        || {
            log.say(bad);
            otherwise
        },
        |v| v.1,
    )
}

pub(crate) fn number(text: &CStr) -> Option<u64> {
    let mut n = 0u64;
    for b in text.to_bytes() {
        if !b.is_ascii_digit() {
            return None;
        }
        n = n.checked_mul(10)?.checked_add(u64::from(b - b'0'))?;
    }
    Some(n)
}

/// The other plugin's library. Read where it is loaded: the process may be open long before.
pub(crate) fn chain() -> Option<&'static CStr> {
    // NCCL itself takes `none` for none.
    let none = |name: &&CStr| name.to_bytes().eq_ignore_ascii_case(b"none");
    variable(c"RINGWATCH_CHAIN").filter(|name| !none(name))
}

/// Longest wait for the other ranks' rules. Read where it is needed, as the process may be open long before.
pub(crate) fn tune_wait_ns() -> u64 {
    wait_ns(10_000)
}

/// The same for an all-gather. It is longer, as a wait in vain costs the communicator.
pub(crate) fn all_gather_wait_ns() -> u64 {
    wait_ns(60_000)
}

fn wait_ns(usual_ms: u64) -> u64 {
    const LONGEST_MS: u64 = 600_000;
    let asked = variable(c"RINGWATCH_TUNE_WAIT_MS").and_then(number);
    asked.unwrap_or(usual_ms).min(LONGEST_MS) * 1_000_000
}

/// Returns whether a communicator must not be made without agreement on the rules.
pub(crate) fn tune_is_required() -> bool {
    variable(c"RINGWATCH_TUNE_REQUIRE") == Some(c"1")
}

/// Returns whether ranks agree on the rules by an all-gather of the preloaded library's, on one node and on several.
pub(crate) fn tune_by_all_gather() -> bool {
    variable(c"RINGWATCH_TUNE_NODES") == Some(c"1")
}

impl Settings {
    pub(crate) fn from_environment(log: &Log) -> Self {
        let mut dir = variable(c"RINGWATCH_DIR");
        if dir.is_some_and(|d| d.count_bytes() > DIR_MAX) {
            log.say(Message::DirectoryTooLong);
            dir = None;
        }
        let asked = variable(c"RINGWATCH_SEGMENT_BYTES");
        let bytes = asked.and_then(number);
        if asked.is_some() && bytes.is_none() {
            log.say(Message::BadSegmentBytes);
        }
        let asked = variable(c"RINGWATCH_OVERHEAD_BUDGET");
        let budget = asked.and_then(share);
        if asked.is_some() && budget.is_none() {
            log.say(Message::BadBudget);
        }
        let details = [(c"auto", Detail::Auto), (c"full", Detail::Full), (c"calls", Detail::Calls)];
        let detail = one_of(c"RINGWATCH_DETAIL", &details, Detail::Auto, log, Message::BadDetail);
        let policies = [(c"watch", Graphs::Watch), (c"full", Graphs::Full), (c"off", Graphs::Off)];
        let graphs = one_of(c"RINGWATCH_GRAPHS", &policies, Graphs::Watch, log, Message::BadGraphs);
        Settings { dir, bytes, budget_ppm: budget.unwrap_or(BUDGET_PPM), detail, graphs }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_read_whole_or_not_at_all() {
        for (text, ppm) in [
            (c"1%", 10_000),
            (c"1", 10_000),
            (c"0.25%", 2_500),
            (c"0", 0),
            (c"100%", 1_000_000),
            (c".5", 5_000),
        ] {
            assert_eq!(share(text), Some(ppm), "{text:?}");
        }
        for bad in [c"", c"%", c".", c"1.2.3", c"-1", c"101%", c"1 %", c"one", c"99999999999999999999"] {
            assert_eq!(share(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn numbers_are_read_whole_or_not_at_all() {
        assert_eq!(number(c"1048576"), Some(1 << 20));
        for bad in [c"4M", c"-1", c"1e6", c"99999999999999999999"] {
            assert_eq!(number(bad), None, "{bad:?}");
        }
    }
}
