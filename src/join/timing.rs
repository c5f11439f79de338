//! What an operation's stamps say on one rank, and which of them can be believed.
//!
//! NCCL's stamps are wrong after CUDA graphs ran on a communicator, and when its reader falls 64 operations
//! behind: they then belong to another operation. A stamp is believed where the kernel starts after its
//! own call, stops after it starts, and starts after the channel's earlier operations.

use super::clock::ClockMap;
use crate::model::{ChannelStamp, Lane, OpRecord};

/// The kernel's time on one rank, on the host's clock and the GPU's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kernel {
    /// First channel start, host clock ns.
    pub start_ns: u64,
    /// Last channel stop minus first channel start, GPU clock ns.
    pub duration_ns: u64,
    /// Channels whose stamps were believed.
    pub believed: u16,
    /// Channels that brought stamps.
    pub stamped: u16,
}

impl Kernel {
    /// Last channel stop, host clock ns.
    pub fn end_ns(&self) -> u64 {
        self.start_ns.saturating_add(self.duration_ns)
    }
}

/// Slack for records whose call is not known, in ns: NCCL launches before it issues, and the launch itself seldom
/// takes longer.
const LAUNCH_SLACK_NS: u64 = 1_000_000;

/// The moment before which the kernel cannot have started; `None` when nothing says.
pub fn not_before(op: &OpRecord) -> Option<u64> {
    match (op.lane, op.called_ns, op.issued_ns) {
        // A replayed kernel waits for the callback that issues it.
        (Lane::Replay, _, issued) => issued,
        (_, Some(called), _) => Some(called),
        (_, None, Some(issued)) => Some(issued.saturating_sub(LAUNCH_SLACK_NS)),
        _ => None,
    }
}

/// What the stamps of one operation are held against.
#[derive(Debug)]
pub struct Limit<'a> {
    not_before: u64,
    clock: &'a ClockMap,
    /// The earliest start that is believed, on the GPU's clock and the host's. Later ones come after the call as well,
    /// whatever the clock's mapping.
    first: Option<(u64, u64)>,
}

impl<'a> Limit<'a> {
    /// Of an operation; `None` when nothing says when it was called.
    pub fn of(op: &OpRecord, clock: &'a ClockMap) -> Option<Self> {
        Some(Limit { not_before: not_before(op)?, clock, first: None })
    }

    /// True when one channel's stamps can be believed. `earlier` is the start of the channel's latest believed
    /// kernel, on the GPU's clock.
    pub fn believes(&mut self, stamp: &ChannelStamp, earlier: Option<u64>) -> bool {
        let (Some(start), Some(stop)) = (stamp.start_gpu_ns, stamp.stop_gpu_ns) else { return false };
        // It cannot have taken longer than from its call to the callback that told its end.
        let most =
            stamp.stop_seen_ns.map(|at| at.saturating_sub(self.not_before).saturating_add(LAUNCH_SLACK_NS));
        stop >= start
            && most.is_none_or(|most| stop - start <= most)
            && earlier.is_none_or(|e| start >= e)
            && self.comes_after(start)
    }

    fn comes_after(&mut self, start: u64) -> bool {
        if self.first.is_some_and(|(first, _)| start >= first) {
            return true;
        }
        let host = self.clock.to_host(start).filter(|host| *host >= self.not_before);
        if let Some(host) = host {
            self.first = Some((start, host));
        }
        host.is_some()
    }
}

/// The kernel's time from its channels' believed stamps; `None` when there is none. Channels still running
/// leave it open.
pub fn kernel(op: &OpRecord, limit: &mut Limit<'_>, earlier: impl Fn(u8) -> Option<u64>) -> Option<Kernel> {
    let (mut last_stop, mut believed) = (0, 0u16);
    for s in &op.stamps {
        if limit.believes(s, earlier(s.channel)) {
            last_stop = last_stop.max(s.stop_gpu_ns?);
            believed = believed.saturating_add(1);
        }
    }
    let (first_start, start_ns) = limit.first?;
    let stamped = u16::try_from(op.stamps.len()).unwrap_or(u16::MAX);
    Some(Kernel { start_ns, duration_ns: last_stop - first_start, believed, stamped })
}

/// When the kernel started, host clock ns, from believable starts alone: for kernels that have not stopped.
pub fn started(op: &OpRecord, clock: &ClockMap) -> Option<u64> {
    let limit = not_before(op)?;
    op.stamps
        .iter()
        .filter_map(|s| match s.start_gpu_ns {
            Some(gpu) => clock.to_host(gpu).filter(|h| *h >= limit),
            // NCCL 2.26 brings no stamp: the callback's time is all there is.
            None => Some(s.start_seen_ns),
        })
        .min()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::join::testing::{op, stamp};

    fn clock() -> ClockMap {
        let mut c = ClockMap::default();
        // GPU = host + 1,000,000 ns exactly, seen without delay, at two moments.
        c.observe(1_000_000, 0);
        c.observe(101_000_000, 100_000_000);
        c
    }

    fn kernel_of(o: &OpRecord, earlier: impl Fn(u8) -> Option<u64>) -> Option<Kernel> {
        let clock = clock();
        kernel(o, &mut Limit::of(o, &clock)?, earlier)
    }

    /// A stamp at host times, seen 50 us after it stops.
    fn at(channel: u8, start: u64, stop: u64) -> ChannelStamp {
        stamp(channel, start + 1_000_000, Some(stop + 1_000_000), start + 50_000)
    }

    #[test]
    fn duration_is_last_stop_minus_first_start() {
        let mut o = op(Lane::Collective, 0);
        o.called_ns = Some(100_000);
        o.stamps = vec![at(0, 120_000, 180_000), at(1, 110_000, 170_000)];
        let k = kernel_of(&o, |_| None).expect("believed");
        assert_eq!(k.duration_ns, 70_000);
        assert_eq!((k.believed, k.stamped), (2, 2));
        // 110 us after the apex at 0: 100 ppm of 110 us is 11 ns.
        assert_eq!(k.start_ns, 110_011);
    }

    #[test]
    fn stamps_from_before_the_call_are_not_believed() {
        let mut o = op(Lane::Collective, 0);
        o.called_ns = Some(100_000);
        o.stamps = vec![at(0, 60_000, 180_000), at(1, 110_000, 170_000)];
        let k = kernel_of(&o, |_| None).expect("one channel is right");
        assert_eq!((k.duration_ns, k.believed, k.stamped), (60_000, 1, 2));
        o.stamps.truncate(1);
        assert_eq!(kernel_of(&o, |_| None), None);
    }

    #[test]
    fn negative_durations_and_channels_out_of_order_are_not_believed() {
        let mut o = op(Lane::Collective, 0);
        o.called_ns = Some(100_000);
        o.stamps = vec![at(0, 120_000, 119_000)];
        assert_eq!(kernel_of(&o, |_| None), None);
        o.stamps = vec![at(0, 120_000, 120_000_000_000_000)];
        o.stamps[0].stop_seen_ns = Some(200_000);
        assert_eq!(kernel_of(&o, |_| None), None, "a day that was seen to end within a moment");
        o.stamps = vec![at(0, 120_000, 130_000)];
        assert_eq!(kernel_of(&o, |_| Some(1_120_001)), None);
        assert!(kernel_of(&o, |_| Some(1_120_000)).is_some(), "fused kernels start together");
    }

    #[test]
    fn a_replay_starts_after_it_was_issued() {
        let mut o = op(Lane::Replay, 0);
        o.issued_ns = Some(200_000);
        o.called_ns = Some(100_000);
        o.stamps = vec![at(0, 150_000, 260_000)];
        assert_eq!(kernel_of(&o, |_| None), None);
    }
}
