//! Reads the fields of a protobuf message, without knowing its type.

/// A field's value, as it is written.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Field<'a> {
    Number(u64),
    Bytes(&'a [u8]),
}

impl<'a> Field<'a> {
    pub(super) fn number(self) -> Option<u64> {
        if let Field::Number(n) = self { Some(n) } else { None }
    }

    pub(super) fn bytes(self) -> Option<&'a [u8]> {
        if let Field::Bytes(bytes) = self { Some(bytes) } else { None }
    }

    pub(super) fn text(self) -> Option<&'a str> {
        std::str::from_utf8(self.bytes()?).ok()
    }
}

fn varint(bytes: &mut &[u8]) -> u64 {
    let mut out = 0;
    for shift in (0..70).step_by(7) {
        let (first, rest) = bytes.split_first().expect("a varint has an end");
        *bytes = rest;
        out |= u64::from(first & 0x7f).checked_shl(shift).unwrap_or(0);
        if first & 0x80 == 0 {
            return out;
        }
    }
    panic!("a varint has at most ten bytes");
}

/// The fields of a message with their numbers.
pub(super) fn fields(mut bytes: &[u8]) -> Vec<(u32, Field<'_>)> {
    let mut out = Vec::new();
    while !bytes.is_empty() {
        let key = varint(&mut bytes);
        let length = match key & 7 {
            0 => None,
            1 => Some(8),
            2 => Some(usize::try_from(varint(&mut bytes)).expect("a length")),
            5 => Some(4),
            other => panic!("no wire type: {other}"),
        };
        let value = match length {
            None => Field::Number(varint(&mut bytes)),
            Some(length) => {
                let (value, rest) = bytes.split_at(length);
                bytes = rest;
                match key & 7 {
                    1 => Field::Number(u64::from_le_bytes(value.try_into().expect("eight bytes"))),
                    _ => Field::Bytes(value),
                }
            }
        };
        out.push((u32::try_from(key >> 3).expect("a field's number"), value));
    }
    out
}
