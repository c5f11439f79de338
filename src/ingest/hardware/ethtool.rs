//! The counters of network interfaces' drivers, by the ETHTOOL ioctl. Netlink does not give these.
//!
//! The crates for it are wrappers of netlink, and async; the three questions below are all that is needed.

#![expect(unsafe_code, reason = "the ioctl takes a pointer to a buffer of our own")]

use crate::model::nic_counter;
use std::collections::BTreeMap;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixDatagram;

/// `SIOCETHTOOL` of linux/sockios.h.
const SIOCETHTOOL: libc::c_ulong = 0x8946;
/// Of linux/ethtool.h.
const GET_STRINGS: u32 = 0x1b;
const GET_STATISTICS: u32 = 0x1d;
const GET_SET_INFO: u32 = 0x37;
/// The set of strings that are the names of statistics.
const STATISTICS: u32 = 1;
/// A name has so many bytes.
const NAME: usize = 32;
/// A driver that counts more than this is not asked. NICs with a queue a CPU count some thousands.
const COUNTERS: usize = 16_384;
/// The buffer, in words of eight bytes. The kernel writes as much as the driver has, whatever it said before; names take
/// half of this at most, and numbers an eighth, so that a driver that grew in between finds room.
const WORDS: usize = COUNTERS * NAME / 8 * 2;
/// Interfaces whose names are remembered.
const REMEMBERED: usize = 1_024;

/// `struct ifreq` with a pointer in its union.
#[repr(C)]
struct Request {
    name: [u8; libc::IFNAMSIZ],
    data: *mut libc::c_void,
    /// The union is as long as its longest member, 24 bytes.
    rest: [u64; 2],
}

/// The wanted counters of a driver: their places, and the names that they are reported under.
#[derive(Debug)]
struct Wanted {
    counters: usize,
    places: Vec<(usize, &'static str)>,
}

/// The client of the ioctl.
#[derive(Debug)]
pub(super) struct Ethtool {
    socket: UnixDatagram,
    known: BTreeMap<String, Wanted>,
    buffer: Vec<u64>,
}

impl Ethtool {
    /// Asks the drivers of this process's network namespace.
    pub(super) fn new() -> io::Result<Self> {
        // The kernel takes any socket for it, and this one has no address.
        Ok(Ethtool { socket: UnixDatagram::unbound()?, known: BTreeMap::new(), buffer: vec![0; WORDS] })
    }

    /// The errors that an interface's driver counts, as far as [`nic_counter`] knows them, summed up over queues.
    /// Absent where the driver counts nothing of that kind, or may not be asked.
    pub(super) fn counters(&mut self, interface: &str) -> Option<BTreeMap<String, u64>> {
        let counters = self.size(interface).filter(|n| (1..=COUNTERS).contains(n))?;
        if self.known.get(interface).is_none_or(|w| w.counters != counters) {
            let places = self.places(interface, counters)?;
            if self.known.len() >= REMEMBERED {
                self.known.clear();
            }
            self.known.insert(interface.to_owned(), Wanted { counters, places });
        }
        if self.known.get(interface)?.places.is_empty() {
            return None;
        }
        self.read(interface, counters)?;
        let values = &self.buffer[1..=counters];
        let mut sums: BTreeMap<String, u64> = BTreeMap::new();
        for (place, name) in &self.known.get(interface)?.places {
            let sum = sums.entry((*name).to_owned()).or_default();
            *sum = sum.saturating_add(*values.get(*place)?);
        }
        Some(sums)
    }

    /// How many counters there are. `struct ethtool_sset_info`: command, reserved, mask of the sets, a number for each.
    fn size(&mut self, interface: &str) -> Option<usize> {
        self.put(&[GET_SET_INFO, 0, 1 << STATISTICS, 0, 0]);
        self.ask(interface)?;
        // A bit that is gone from the mask says that there is no such set.
        (self.word(2) == 1 << STATISTICS).then(|| self.word(4) as usize)
    }

    /// Where the counters are that are wanted. `struct ethtool_gstrings`: command, set, number, names.
    fn places(&mut self, interface: &str, counters: usize) -> Option<Vec<(usize, &'static str)>> {
        self.put(&[GET_STRINGS, STATISTICS, u32::try_from(counters).ok()?]);
        self.ask(interface)?;
        if self.word(2) as usize != counters {
            return None;
        }
        let bytes: Vec<u8> =
            self.buffer.iter().flat_map(|w| w.to_ne_bytes()).skip(12).take(counters * NAME).collect();
        let name = |raw: &[u8]| {
            let end = raw.iter().position(|b| *b == 0).unwrap_or(raw.len());
            nic_counter(std::str::from_utf8(&raw[..end]).ok()?.trim()).map(|(known, _)| known)
        };
        Some(bytes.chunks(NAME).enumerate().filter_map(|(i, raw)| Some((i, name(raw)?))).collect())
    }

    /// Has the counters behind the buffer's first word. `struct ethtool_stats`: command, number, values.
    fn read(&mut self, interface: &str, counters: usize) -> Option<()> {
        self.put(&[GET_STATISTICS, u32::try_from(counters).ok()?]);
        self.ask(interface)?;
        // Another number than that of the names: the values would be taken for others.
        (self.word(1) as usize == counters).then_some(())
    }

    /// Writes a question's head; the rest is zero.
    fn put(&mut self, head: &[u32]) {
        for (i, pair) in head.chunks(2).enumerate() {
            let bytes = [pair[0].to_ne_bytes(), pair.get(1).copied().unwrap_or(0).to_ne_bytes()].concat();
            self.buffer[i] = u64::from_ne_bytes(bytes.try_into().unwrap_or_default());
        }
    }

    /// The head's words of four bytes.
    fn word(&self, i: usize) -> u32 {
        let bytes = self.buffer[i / 2].to_ne_bytes();
        let at = i % 2 * 4;
        u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
    }

    fn ask(&mut self, interface: &str) -> Option<()> {
        let mut name = [0; libc::IFNAMSIZ];
        // The last byte stays zero.
        if interface.is_empty() || interface.len() >= name.len() {
            return None;
        }
        name[..interface.len()].copy_from_slice(interface.as_bytes());
        let mut request = Request { name, data: self.buffer.as_mut_ptr().cast(), rest: [0; 2] };
        // SAFETY: the request is a whole `struct ifreq`, and its pointer is to a buffer that is ours alone and has at
        // least twice the room that the largest answer asked for takes.
        let said = unsafe { libc::ioctl(self.socket.as_raw_fd(), SIOCETHTOOL as _, &raw mut request) };
        (said == 0).then_some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_request_is_as_the_kernel_has_it() {
        assert_eq!((size_of::<Request>(), std::mem::offset_of!(Request, data)), (40, 16));
        // Names at their largest, with their head, take half of the buffer.
        const { assert!(12 + COUNTERS * NAME <= WORDS * 8 / 2 + 12 && WORDS * 8 >= 8 * (1 + COUNTERS) * 4) };
    }

    #[test]
    fn heads_are_words_of_four_bytes() {
        let mut e = Ethtool::new().expect("a socket");
        e.put(&[7, 8, 9]);
        assert_eq!([e.word(0), e.word(1), e.word(2), e.word(3)], [7, 8, 9, 0]);
    }

    #[test]
    fn an_interface_that_is_not_there_says_nothing() {
        let mut e = Ethtool::new().expect("a socket");
        for name in ["", "rw-not-there", "a-name-that-is-far-too-long-for-an-interface", "lo"] {
            assert_eq!(e.counters(name), None, "{name}");
        }
    }
}
