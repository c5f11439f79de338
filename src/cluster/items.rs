//! How much a message would take in memory, before it is read: an empty item takes two bytes on the way and hundreds here.

use prost::bytes::Buf;
use prost::encoding::{DecodeContext, WireType, decode_key, decode_varint, skip_field};

/// The tags of records and of calls, which have items of their own.
const NESTED: [u32; 2] = [14, 23];

/// Counts the items of a message, with those of its records and calls; absent where it is no message.
pub(crate) fn count(mut message: &[u8]) -> Option<usize> {
    let mut items = 0usize;
    while message.has_remaining() {
        let (tag, wire) = decode_key(&mut message).ok()?;
        items += 1;
        if wire == WireType::LengthDelimited && NESTED.contains(&tag) {
            let length = usize::try_from(decode_varint(&mut message).ok()?).ok()?;
            let (mut record, rest) = message.split_at_checked(length)?;
            while record.has_remaining() {
                let (tag, wire) = decode_key(&mut record).ok()?;
                items += usize::from(wire == WireType::LengthDelimited);
                skip_field(wire, tag, &mut record, DecodeContext::default()).ok()?;
            }
            message = rest;
        } else {
            skip_field(wire, tag, &mut message, DecodeContext::default()).ok()?;
        }
    }
    Some(items)
}

#[cfg(test)]
mod tests {
    use super::count;
    use crate::cluster::message::{Beat, CallMix, Calls, Envelope, Net, Record};
    use prost::Message as _;

    #[test]
    fn items_of_messages_and_of_records_count() {
        let record = Record { net: vec![Net::default(); 3], ..Record::default() };
        let e = Envelope { beats: vec![Beat::default(); 5], records: vec![record; 2], ..Envelope::default() };
        assert_eq!(count(&e.encode_to_vec()), Some(5 + 2 + 2 * 3));
        let calls = Calls { mixes: vec![CallMix::default(); 7], ..Calls::default() };
        let e = Envelope { calls: vec![calls; 2], ..Envelope::default() };
        assert_eq!(count(&e.encode_to_vec()), Some(2 + 2 * 7));
        assert_eq!(count(&[]), Some(0));
        assert_eq!(count(&[0x72, 5, 0]), None, "a record that ends early");
        assert_eq!(count(&[0xff; 12]), None);
    }
}
