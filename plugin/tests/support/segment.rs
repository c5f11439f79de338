//! A segment file read whole.

use ringwatch_wire::codes::{Loss, call};
use ringwatch_wire::layout::Region;
use ringwatch_wire::reader::{ChannelSlot, Found, GroupSlot, OpSlot, ProxySlot, Reader};
use ringwatch_wire::sync::Word;
use std::path::{Path, PathBuf};

#[derive(Debug)]
pub struct Recording {
    words: Vec<Word>,
}

/// The segments of a directory, by name.
pub fn in_dir(dir: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(dir) else { return Vec::new() };
    let mut all: Vec<_> = entries.map(|e| e.unwrap().path()).filter(|p| p.extension().is_some()).collect();
    all.sort();
    all
}

/// The one segment of a directory.
#[track_caller]
pub fn only(dir: &Path) -> Recording {
    let all = in_dir(dir);
    assert_eq!(all.len(), 1, "{all:?}");
    Recording::read(&all[0])
}

impl Recording {
    pub fn read(path: &Path) -> Self {
        let bytes = std::fs::read(path).unwrap();
        let words =
            bytes.chunks_exact(8).map(|c| Word::new(u64::from_le_bytes(c.try_into().unwrap()))).collect();
        Recording { words }
    }

    #[track_caller]
    pub fn reader(&self) -> Reader<'_> {
        Reader::open(&self.words).unwrap()
    }

    /// True once its writer has opened it for readers.
    pub fn is_open(&self) -> bool {
        Reader::open(&self.words).is_ok()
    }

    pub fn ops(&self) -> Vec<OpSlot> {
        let r = self.reader();
        let mut all: Vec<_> = (0..r.ring(Region::Op).next()).filter_map(|t| is(r.op(t))).collect();
        let lines = self.lines();
        if !lines.is_empty() {
            all.extend(lines);
            all.sort_by_key(|o| o.called_ns.or(o.issued_ns));
        }
        all
    }

    /// The operations in lines, ring by ring.
    pub fn lines(&self) -> Vec<OpSlot> {
        let r = self.reader();
        let ring = |n: usize| (0..r.line_ring(n).next()).filter_map(move |t| is(r.line(n, t)).flatten());
        (0..r.line_rings()).flat_map(ring).collect()
    }

    pub fn groups(&self) -> Vec<GroupSlot> {
        let r = self.reader();
        (0..r.ring(Region::Group).next()).filter_map(|t| is(r.group(t))).collect()
    }

    pub fn channels(&self) -> Vec<ChannelSlot> {
        let r = self.reader();
        (0..r.ring(Region::Channel).next()).filter_map(|t| is(r.channel(t))).collect()
    }

    pub fn transfers(&self) -> Vec<ProxySlot> {
        let r = self.reader();
        (0..r.ring(Region::Proxy).next()).filter_map(|t| is(r.proxy(t))).collect()
    }

    /// Channels of an operation that started and that stopped, as their records say.
    pub fn progress(&self, op: u64) -> (u16, u16) {
        let of = self.channels().into_iter().filter(|c| c.op == op);
        of.fold((0, 0), |n, c| (n.0 + 1, n.1 + u16::from(c.stop_seen_ns.is_some())))
    }

    /// Every reason with its count, where it is not 0.
    pub fn losses(&self) -> Vec<(Loss, u64)> {
        let r = self.reader();
        Loss::ALL.iter().map(|l| (*l, r.lost(*l))).filter(|l| l.1 > 0).collect()
    }

    /// The books balance; returns how many calls they hold.
    #[track_caller]
    pub fn balanced(&self) -> u64 {
        let r = self.reader();
        let seen: u64 = (0..call::COUNT).map(|k| r.seen(k)).sum();
        let recorded: u64 = (0..call::COUNT).map(|k| r.recorded(k)).sum();
        let lost: u64 = Loss::ALL.iter().map(|l| r.lost(*l)).sum();
        assert_eq!(seen, recorded + lost, "seen = recorded {recorded} + lost {:?}", self.losses());
        seen
    }
}

fn is<T>(found: Found<T>) -> Option<T> {
    match found {
        Found::Is(t) => Some(t),
        _ => None,
    }
}
