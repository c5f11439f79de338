//! The times of an operation's stamps on one rank, and which of them can be believed.
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

/// The most channels that NCCL gives a communicator.
const CHANNELS_MAX: usize = 64;

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

/// The limits that the stamps of one operation are compared with.
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

    /// The host's time of a believed start.
    fn host_of(&self, start: u64) -> Option<u64> {
        self.first
            .filter(|(first, _)| *first == start)
            .map(|(_, host)| host)
            .or_else(|| self.clock.to_host(start))
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

/// The kernel's time from its channels' believed stamps, and when it started on the GPU's clock; `None` when there is no
/// such stamp. Channels still running leave it open.
pub fn kernel(
    op: &OpRecord,
    limit: &mut Limit<'_>,
    earlier: impl Fn(u8) -> Option<u64>,
) -> Option<(Kernel, u64)> {
    let mut all = Span::default();
    for s in op.stamps.iter().filter(|s| limit.believes(s, earlier(s.channel))) {
        all.add(s.start_gpu_ns?, s.stop_gpu_ns?);
    }
    if all.last_start > all.first_stop && op.lane.is_collective() {
        let mut times = [(0, 0); CHANNELS_MAX];
        let believed = op.stamps.iter().filter(|s| limit.believes(s, earlier(s.channel)));
        for (s, time) in believed.take(CHANNELS_MAX).zip(&mut times) {
            *time = (s.start_gpu_ns?, s.stop_gpu_ns?);
        }
        all = youngest_together(times.get(..usize::from(all.channels))?);
    }
    let first = all.first_start?;
    let kernel = Kernel {
        start_ns: limit.host_of(first)?,
        duration_ns: all.last_stop.saturating_sub(first),
        believed: all.channels,
        stamped: u16::try_from(op.stamps.len()).unwrap_or(u16::MAX),
    };
    Some((kernel, first))
}

/// The first and last times of several channels, on the GPU's clock.
#[derive(Debug, Clone, Copy)]
struct Span {
    first_start: Option<u64>,
    last_start: u64,
    first_stop: u64,
    last_stop: u64,
    channels: u16,
}

impl Default for Span {
    fn default() -> Self {
        Span { first_start: None, last_start: 0, first_stop: u64::MAX, last_stop: 0, channels: 0 }
    }
}

impl Span {
    fn add(&mut self, start: u64, stop: u64) {
        self.first_start = Some(self.first_start.map_or(start, |first| first.min(start)));
        self.last_start = self.last_start.max(start);
        self.first_stop = self.first_stop.min(stop);
        self.last_stop = self.last_stop.max(stop);
        self.channels = self.channels.saturating_add(1);
    }
}

/// The channels that ran together with the one that started last, or with one that did. The channels of a kernel run at the
/// same time. Those that were done before the last one began tell of an earlier operation: NCCL 2.28 counts the operations
/// of a channel wrongly after a rank sent to itself.
fn youngest_together(times: &[(u64, u64)]) -> Span {
    let mut first = times.iter().map(|(start, _)| *start).max().unwrap_or(0);
    loop {
        let together = times.iter().filter(|(_, stop)| *stop >= first);
        match together.map(|(start, _)| *start).min() {
            Some(lower) if lower < first => first = lower,
            _ => break,
        }
    }
    let mut all = Span::default();
    times.iter().filter(|(start, _)| *start >= first).for_each(|(start, stop)| all.add(*start, *stop));
    all
}

/// True when all stamps are of kernels that were over before this operation was called: they tell of another one, and so does
/// the news that it stopped. NCCL 2.28 counts the operations of a channel wrongly after a rank sent to itself.
pub(super) fn is_of_earlier(op: &OpRecord, clock: &ClockMap) -> bool {
    let Some(limit) = not_before(op) else { return false };
    let ends = || op.stamps.iter().filter_map(|s| s.stop_gpu_ns);
    ends().next().is_some() && ends().all(|gpu| clock.to_host(gpu).is_some_and(|host| host < limit))
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
        kernel(o, &mut Limit::of(o, &clock)?, earlier).map(|(k, _)| k)
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
    fn channels_that_were_done_before_the_others_began_tell_of_another_operation() {
        let mut o = op(Lane::Collective, 0);
        o.called_ns = Some(100_000);
        o.stamps = vec![at(0, 120_000, 190_000), at(1, 200_000, 230_000), at(2, 210_000, 260_000)];
        let k = kernel_of(&o, |_| None).expect("two channels are right");
        assert_eq!((k.duration_ns, k.believed, k.stamped), (60_000, 2, 3));
        // Each of these runs together with another one.
        o.stamps = vec![at(0, 120_000, 210_000), at(1, 200_000, 230_000), at(2, 220_000, 260_000)];
        let k = kernel_of(&o, |_| None).expect("all are right");
        assert_eq!((k.duration_ns, k.believed, k.stamped), (140_000, 3, 3));
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
