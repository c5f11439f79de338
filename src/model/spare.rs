//! Room for records, used again: a steady job's operations cost no allocation.

use super::OpRecord;

/// Records that are kept for their room.
const KEPT: usize = 4096;

/// Records that nobody needs any more.
#[derive(Debug, Clone, Default)]
pub struct Spare {
    #[expect(clippy::vec_box, reason = "the boxes are what is used again")]
    records: Vec<Box<OpRecord>>,
}

impl Spare {
    /// Takes what is not needed any more.
    pub fn give(&mut self, records: impl IntoIterator<Item = Box<OpRecord>>) {
        let room = KEPT.saturating_sub(self.records.len());
        self.records.extend(records.into_iter().take(room));
    }

    /// Takes all that another one has.
    pub fn take_from(&mut self, other: &mut Spare) {
        self.give(other.records.drain(..));
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
