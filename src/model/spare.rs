//! Room for records, used again: a steady job's operations cost no allocation.

use super::{ChannelStamp, OpRecord};

/// Records that are kept for their room.
const KEPT: usize = 4096;
/// Longer lists of stamps are not kept: NCCL has 64 channels.
const USUAL_STAMPS: usize = 64;

/// Records that nobody needs any more.
#[derive(Debug, Clone, Default)]
pub struct Spare {
    #[expect(clippy::vec_box, reason = "the boxes are what is used again")]
    records: Vec<Box<OpRecord>>,
    /// Lists of stamps, empty; kept apart, as records outlive their stamps.
    stamps: Vec<Vec<ChannelStamp>>,
}

impl Spare {
    /// Takes what is not needed any more.
    pub fn give(&mut self, records: impl IntoIterator<Item = Box<OpRecord>>) {
        let room = KEPT.saturating_sub(self.records.len());
        self.records.extend(records.into_iter().take(room));
    }

    /// Takes a list of stamps that are not needed any more.
    pub fn give_stamps(&mut self, mut stamps: Vec<ChannelStamp>) {
        if (1..=USUAL_STAMPS).contains(&stamps.capacity()) && self.stamps.len() < KEPT {
            stamps.clear();
            self.stamps.push(stamps);
        }
    }

    /// An empty list for stamps.
    pub fn stamps(&mut self) -> Vec<ChannelStamp> {
        self.stamps.pop().unwrap_or_default()
    }

    /// Takes all that another one has.
    pub fn take_from(&mut self, other: &mut Spare) {
        self.give(other.records.drain(..));
        let room = KEPT.saturating_sub(self.stamps.len());
        self.stamps.extend(other.stamps.drain(..).take(room));
    }

    /// A record, in the room of one that was given.
    pub fn put(&mut self, record: OpRecord) -> Box<OpRecord> {
        match self.records.pop() {
            Some(mut room) => {
                *room = record;
                room
            }
            None => Box::new(record),
        }
    }
}
