//! One rank of a communicator.

use super::usage::Exchanged;
use crate::model::{CommRecord, Func, Track};

/// A call that NCCL has not issued.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Called {
    /// The operation's ticket.
    pub ticket: u64,
    /// Its function.
    pub func: Func,
    /// When it was called, host monotonic ns.
    pub at_ns: u64,
    /// Whether the call has returned; absent where nobody looked.
    pub returned: Option<bool>,
}

/// One rank of a communicator.
#[derive(Debug, Clone)]
pub struct Member {
    /// What its segment says.
    pub record: CommRecord,
    /// Collectives known to be done.
    pub finished: u64,
    /// Total waiting in ns, over the collectives whose waiting is known.
    pub waiting_ns: Option<u64>,
    /// How often it was late, and the worst, in ns.
    pub late: u64,
    /// Its greatest lateness in ns.
    pub worst_late_ns: Option<u64>,
    /// The latest call that NCCL has not issued yet.
    pub called: Option<Called>,
    /// What it exchanged with single others.
    pub exchanged: Exchanged,
    /// Ticket + 1 of the youngest operation that NCCL has issued.
    pub(super) issued_below: u64,
    /// Ticket of the first operation that a CUDA graph captured or replayed.
    pub(super) graphs_from: u64,
    /// Start of the latest believed kernel by channel, GPU clock.
    pub(super) channels: Vec<Option<u64>>,
    /// Orders below this are done.
    pub(super) done_below: DoneBelow,
}

/// Orders below which all is done, of the tracks that all ranks share.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct DoneBelow {
    collective: u64,
    replay: u64,
}

impl DoneBelow {
    pub(super) fn insert(&mut self, track: Track, order: u64) {
        match track {
            Track::Collective => self.collective = order,
            Track::Replay => self.replay = order,
            Track::Pair(..) => {}
        }
    }

    fn get(&self, track: Track) -> u64 {
        match track {
            Track::Collective => self.collective,
            Track::Replay => self.replay,
            Track::Pair(..) => 0,
        }
    }
}

impl Member {
    /// The start of its last kernel on a channel, as far as one is believed.
    pub(super) fn last_start(&self, channel: u8) -> Option<u64> {
        self.channels.get(usize::from(channel)).copied().flatten()
    }

    pub(super) fn started(&mut self, channel: u8, at: u64) {
        let channel = usize::from(channel);
        if self.channels.len() <= channel {
            self.channels.resize(channel + 1, None);
        }
        self.channels[channel] = Some(at);
    }

    /// Orders of a track below this are known to be done.
    pub(super) fn done_below(&self, track: Track) -> u64 {
        self.done_below.get(track)
    }

    /// Operations issued in a track, which is the next issue order.
    pub fn issued(&self, track: Track) -> Option<u64> {
        match track {
            Track::Collective => Some(self.record.issued),
            Track::Replay => Some(self.record.replayed),
            Track::Pair(..) => None,
        }
    }

    /// Operations issued, by calls and by replays.
    pub fn issued_in_all(&self) -> u64 {
        self.record.issued.saturating_add(self.record.replayed)
    }
}
