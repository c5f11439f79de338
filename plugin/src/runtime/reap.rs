//! Removes segments of dead processes where they take too much room.
//!
//! Restart after restart must not fill the shared memory that NCCL needs. What an agent has not read by then is
//! lost with the segment. The directory may hold anything, so a file goes only when its name, owner, header and
//! dead writer all say that it is a segment of ours.

use crate::runtime::process::{self, Identity};
use crate::runtime::segment_name::SegmentName;
use crate::runtime::sys::{self, Fd, FileSystem};
use core::ffi::CStr;
use ringwatch_wire::layout::{FORMAT_VERSION, MAGIC, OLDEST_VERSION, head};

/// Most segments that one init removes; the next init continues.
const REMOVED_MAX: usize = 64;

/// A segment whose writer has ended.
#[derive(Clone, Copy)]
struct DeadSegment {
    modified_ns: u64,
    bytes: u64,
    name: SegmentName,
}

/// The oldest dead segments, oldest first, and the bytes of all of them.
struct DeadSegments {
    oldest: [Option<DeadSegment>; REMOVED_MAX],
    bytes: u64,
}

impl DeadSegments {
    fn add(&mut self, segment: DeadSegment) {
        self.bytes = self.bytes.saturating_add(segment.bytes);
        let mut carried = Some(segment);
        for slot in &mut self.oldest {
            // Every slot keeps the older of the two; the newest of all falls off the end.
            if slot.is_none_or(|s| carried.is_some_and(|c| c.modified_ns < s.modified_ns)) {
                core::mem::swap(slot, &mut carried);
            }
        }
    }
}

/// Removes dead segments, oldest first, until they take at most a sixteenth of the file system, and 64 MiB.
pub(crate) fn reap(dir: &Fd, fs: &FileSystem, own: &Identity) {
    let budget = (fs.total / 16).min(64 << 20);
    let mut dead = DeadSegments { oldest: [None; REMOVED_MAX], bytes: 0 };
    sys::names(dir, |name| {
        if let Some(segment) = dead_segment(dir, name, own) {
            dead.add(segment);
        }
        true
    });
    for segment in dead.oldest.iter().flatten() {
        if dead.bytes <= budget {
            return;
        }
        if sys::unlink(dir, segment.name.text().as_c()) {
            dead.bytes = dead.bytes.saturating_sub(segment.bytes);
        }
    }
}

fn dead_segment(dir: &Fd, file_name: &CStr, own: &Identity) -> Option<DeadSegment> {
    let name = SegmentName::parse(file_name)?;
    // Another copy of the plugin in this process may have made it. Closing the file would drop that copy's lock.
    if name.pid == own.pid && name.start_ticks == own.start_ticks {
        return None;
    }
    // The check comes before the open, because opening a device or a pipe has effects.
    let listed = sys::facts_at(dir, file_name)?;
    if !listed.is_regular || listed.uid != own.uid {
        return None;
    }
    let file = sys::open_at(dir, file_name)?;
    if sys::facts(&file)? != listed || !is_segment(&file, &name) {
        return None;
    }
    // A job may have closed all its descriptors, and the lock with them. Then its pid proves that it lives, and in another
    // pid namespace its mapping does.
    if sys::is_locked(&file) || process::runs(name.pid, name.start_ticks) || sys::is_written(&file) {
        return None;
    }
    Some(DeadSegment { modified_ns: listed.modified_ns, bytes: listed.bytes, name })
}

/// Checks that a file begins as a finished segment of a known version, and of the process in its name.
fn is_segment(file: &Fd, name: &SegmentName) -> bool {
    const WORDS: usize = head::NONCE + 1;
    let mut bytes = [0u8; WORDS * 8];
    if sys::read(file, &mut bytes) < bytes.len() {
        return false;
    }
    let word = |i: usize| {
        let bytes = bytes.get(i * 8..i * 8 + 8).and_then(|b| b.try_into().ok());
        bytes.map_or(0, u64::from_le_bytes)
    };
    word(head::MAGIC) == MAGIC
        && (OLDEST_VERSION..=FORMAT_VERSION).contains(&(word(head::VERSION) as u32))
        && word(head::PID) as u32 == name.pid
        && word(head::START_TICKS) == name.start_ticks
        && word(head::NONCE) == name.nonce
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segment(modified_ns: u64) -> DeadSegment {
        DeadSegment { modified_ns, bytes: 10, name: SegmentName { pid: 1, start_ticks: 2, nonce: 3 } }
    }

    #[test]
    fn the_oldest_are_kept_in_order_and_all_are_counted() {
        let mut dead = DeadSegments { oldest: [None; REMOVED_MAX], bytes: 0 };
        // 37 and 101 have no common factor: every age from 0 to 100 comes once, in no order.
        for i in 0..101 {
            dead.add(segment(i * 37 % 101));
        }
        let ages: Vec<u64> = dead.oldest.iter().flatten().map(|s| s.modified_ns).collect();
        assert_eq!(ages, (0..REMOVED_MAX as u64).collect::<Vec<_>>());
        assert_eq!(dead.bytes, 1010);
    }
}
