//! Names of segment files, and the fixed buffers in which names and paths are built without a heap.

#![expect(unsafe_code, reason = "C strings")]

use core::ffi::CStr;

/// A path or name, NUL-terminated, built without a heap.
pub(crate) struct Text<const N: usize> {
    bytes: [u8; N],
    len: usize,
}

impl<const N: usize> Text<N> {
    pub(crate) const fn new() -> Self {
        Text { bytes: [0; N], len: 0 }
    }

    pub(crate) fn push(&mut self, more: &[u8]) -> &mut Self {
        for b in more {
            // The last byte stays NUL.
            if self.len + 1 < N
                && let Some(place) = self.bytes.get_mut(self.len)
            {
                *place = *b;
                self.len += 1;
            }
        }
        self
    }

    pub(crate) fn push_number(&mut self, n: u64, radix: u64) -> &mut Self {
        let mut divisor = 1u64;
        // The radixes are the constants 10 and 16; `max` says so to the compiler, which then needs no
        // code for a division by zero.
        let radix = radix.max(2);
        while let Some(d) = divisor.checked_mul(radix)
            && d <= n
        {
            divisor = d;
        }
        while divisor > 0 {
            let digit = (n / divisor % radix) as u8;
            self.push(&[if digit < 10 { b'0' + digit } else { b'a' + digit - 10 }]);
            divisor /= radix;
        }
        self
    }

    /// Adds a number as 16 hexadecimal digits.
    pub(crate) fn push_digits(&mut self, n: u64) -> &mut Self {
        for place in 1..=16 {
            let digit = (n >> (64 - 4 * place) & 0xf) as u8;
            self.push(&[if digit < 10 { b'0' + digit } else { b'a' + digit - 10 }]);
        }
        self
    }

    pub(crate) fn as_c(&self) -> &CStr {
        // SAFETY: `push` leaves at least one NUL behind the text, and the pointer is to all of it.
        unsafe { CStr::from_ptr(self.bytes.as_ptr().cast()) }
    }
}

/// The process that a segment file is named after: `<pid>-<start ticks>-<nonce in hex>.seg`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SegmentName {
    /// Process id, in the writer's own pid namespace.
    pub(crate) pid: u32,
    /// Start time of the process in clock ticks since boot.
    pub(crate) start_ticks: u64,
    /// A random number that tells segments of the same process apart.
    pub(crate) nonce: u64,
}

impl SegmentName {
    pub(crate) fn text(&self) -> Text<64> {
        let mut text = Text::new();
        text.push_number(u64::from(self.pid), 10)
            .push(b"-")
            .push_number(self.start_ticks, 10)
            .push(b"-")
            .push_number(self.nonce, 16)
            .push(b".seg");
        text
    }

    /// Reads a file's name; `None` unless it is byte for byte what [`SegmentName::text`] writes.
    pub(crate) fn parse(name: &CStr) -> Option<Self> {
        let mut parts = name.to_bytes().strip_suffix(b".seg")?.split(|b| *b == b'-');
        let read = SegmentName {
            pid: u32::try_from(number(parts.next()?, 10)?).ok()?,
            start_ticks: number(parts.next()?, 10)?,
            nonce: number(parts.next()?, 16)?,
        };
        // The comparison refuses what numbers alone would allow: leading zeros, capitals and further parts.
        if read.text().as_c() == name { Some(read) } else { None }
    }
}

fn number(digits: &[u8], radix: u64) -> Option<u64> {
    let mut n = 0u64;
    for b in digits {
        let digit = match b {
            b'0'..=b'9' => b - b'0',
            b'a'..=b'f' if radix == 16 => b - b'a' + 10,
            _ => return None,
        };
        n = n.checked_mul(radix)?.checked_add(u64::from(digit))?;
    }
    Some(n)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_read_as_it_is_written() {
        let name = SegmentName { pid: 4242, start_ticks: 1000, nonce: 0x1234_5678_9abc_def1 };
        assert_eq!(name.text().as_c(), c"4242-1000-123456789abcdef1.seg");
        let longest = SegmentName { pid: u32::MAX, start_ticks: u64::MAX, nonce: u64::MAX };
        for n in [name, longest, SegmentName { pid: 0, start_ticks: 0, nonce: 1 }] {
            assert_eq!(SegmentName::parse(n.text().as_c()), Some(n));
        }
    }

    #[test]
    fn other_names_are_no_segments() {
        for other in [
            c".seg",
            c"model.seg",
            c"1-2.seg",
            c"1-2-.seg",
            c"-2-3.seg",
            c"1-2-3-4.seg",
            c"1-2-3.seg.bak",
            c"01-2-3.seg",
            c"1-2-03.seg",
            c"1-2-AB.seg",
            c"1-2-xyz.seg",
            c"+1-2-3.seg",
            c"4294967296-2-3.seg",
            c"1-2-10000000000000000.seg",
        ] {
            assert_eq!(SegmentName::parse(other), None, "{other:?}");
        }
    }
}
