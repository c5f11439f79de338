//! Lines in NCCL's log about an agreement.

use super::agreement::Outcome;
use crate::runtime::log::Log;
use crate::runtime::segment_name::Text;
use ringwatch_wire::codes::tuned;
use ringwatch_wire::sync::Word;

/// One communicator's outcome.
pub(super) struct Report<'a> {
    /// NCCL's id of the communicator, where it is known.
    pub(super) comm_id: Option<u64>,
    pub(super) outcome: &'a Outcome,
    /// Content hash of this rank's rules.
    pub(super) hash: u64,
    /// The communicator is not made, as the user required rules.
    pub(super) fails: bool,
}

/// Describes an outcome for NCCL's log. The ranks that are the cause follow where they are known.
const fn reason(code: u8) -> &'static [u8] {
    match code {
        tuned::AGREED => b"all ranks agree on the tuner's rules ",
        tuned::DIFFERENT => b"the tuner's rules are off, as they are not the same on all ranks",
        tuned::ABSENT_RANK => b"the tuner's rules are off, as a rank took no part in the agreement in time",
        tuned::NOT_AGREED => {
            b"the tuner's rules are off, as ranks on several nodes agree only with --tune-nodes (RINGWATCH_TUNE_NODES)"
        }
        tuned::UNDECIDED => b"the tuner's rules are off until all ranks have agreed on them by an all-gather",
        tuned::NO_PRELOAD => {
            b"the tuner's rules are off, as RINGWATCH_TUNE_NODES needs the preloaded library (LD_PRELOAD)"
        }
        tuned::OLD_NCCL => b"the tuner's rules are off, as NCCL before 2.22 does not tell what is possible",
        tuned::NO_ID => {
            b"the tuner's rules are off, as NCCL before 2.28 tells the communicator to the profiler alone: load it, before 2.27 with the preloaded library"
        }
        _ => b"the tuner's rules are off, as ranks cannot meet in the segment directory; set RINGWATCH_DIR to one on tmpfs",
    }
}

/// Outcomes that were reported, a bit each.
static REPORTED: Word = Word::new(0);

/// True once for each outcome. A job makes hundreds of communicators, and what holds for all is one warning.
fn is_first(code: u8) -> bool {
    let bit = 1 << (code & 63);
    let before = REPORTED.get();
    before & bit == 0 && REPORTED.replace(before, before | bit)
}

pub(super) fn report(log: &Log, about: &Report<'_>) {
    let code = about.outcome.code;
    let mut text = Text::<768>::new();
    text.push(b"ringwatch: ");
    if let Some(id) = about.comm_id {
        text.push(b"communicator ").push_digits(id).push(b": ");
    }
    text.push(reason(code));
    match code {
        tuned::AGREED => {
            text.push_digits(about.hash);
            return log.inform(text.as_c());
        }
        tuned::UNDECIDED => return log.inform(text.as_c()),
        _ => {}
    }
    let causes = about.outcome.causes.as_c().to_bytes();
    if !causes.is_empty() {
        text.push(b" (").push(causes).push(b")");
    }
    let end: &[u8] = if about.fails {
        b"; RINGWATCH_TUNE_REQUIRE is set, so the communicator is not made. Give every rank the same RINGWATCH_TUNE."
    } else {
        b"; NCCL's defaults apply. Give every rank the same RINGWATCH_TUNE."
    };
    text.push(end);
    let names_ranks = matches!(code, tuned::DIFFERENT | tuned::ABSENT_RANK);
    if names_ranks || about.fails || is_first(code) {
        log.warn(text.as_c());
    } else {
        log.inform(text.as_c());
    }
}
