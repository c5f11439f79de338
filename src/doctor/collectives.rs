//! Short real collectives over all ranks of a job and between pairs of them, and what the slowest ones say.

use super::{Area, Observation, Outcome, ras};
use crate::bench::cuda::{Buffer, Context, Cuda, HostBuffer, Stream};
use crate::bench::nccl::{Call, Failed, ID_BYTES, Nccl, UniqueId};
use crate::bench::rendezvous::{Launch, Rendezvous};
use crate::bench::{BenchError, median, version_text};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Bytes that an exchange and an all-reduce move: enough for the full rate of a link.
const LARGE: u64 = 64 << 20;
/// Bytes that are copied to the host, which is slower.
const TO_HOST: usize = 32 << 20;
/// Operations before the stopwatch runs: NCCL connects at the first one.
const WARM_UP: u32 = 3;
/// Operations that are timed.
const TIMED: u32 = 10;
/// A figure that is slower than the median of the others by this factor is named.
const SLOW: f64 = 1.3;
/// Peer access over NVLink is at least so much faster than the way through the host.
const OVER_HOST: f64 = 1.5;
/// One operation may take so long.
const PATIENCE: Duration = Duration::from_secs(30);
/// `ncclFloat` and `ncclSum`, of which the all-reduce is.
const FLOAT: i32 = 7;
const SUM: i32 = 0;
const FLOAT_BYTES: u64 = 4;

/// The kind of a pair that is connected by NVLink.
pub(super) const NVLINK: &str = "over NVLink";
/// Kinds of pairs of which no more is known.
const WITHIN: &str = "within a host";
const BETWEEN: &str = "between hosts";

/// One exchange of a pair of ranks, as one of them saw it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Exchange {
    /// The other rank.
    pub peer: u32,
    /// Both directions at once, in ns.
    pub time_ns: f64,
}

/// The measurements of one rank.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// Its host.
    pub host: String,
    /// Its GPU, by PCI address.
    pub gpu: String,
    /// Over what it reaches the other GPUs of its host, by their PCI address, as far as the driver says.
    pub paths: BTreeMap<String, String>,
    /// NCCL's version code.
    pub nccl: i32,
    /// An all-reduce of 8 bytes, in ns.
    pub small_ns: f64,
    /// An all-reduce of 64 MiB, in ns.
    pub large_ns: f64,
    /// A copy of 32 MiB to the host, in ns.
    pub to_host_ns: f64,
    /// The exchanges of both rounds; a rank without a partner has none.
    pub exchanges: Vec<Exchange>,
    /// The answer of NCCL's own RAS, on rank 0.
    pub ras: Option<String>,
}

/// Where the measurement is, for who waits for it.
#[derive(Debug, Clone, Default)]
pub(super) struct Step(Arc<Mutex<String>>);

impl Step {
    pub(super) fn set(&self, text: impl Into<String>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = text.into();
    }

    /// The step that was begun last.
    #[must_use]
    pub(super) fn now(&self) -> String {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// The partner of a rank in a round: neighbors by twos, and by twos shifted by one.
fn partner(rank: u32, world: u32, round: u32) -> Option<u32> {
    let at = (rank + world - round) % world;
    let other = at ^ 1;
    // Of an odd number the last one rests; of two there is one pair.
    (other < world && (round == 0 || world > 2)).then(|| (other + round) % world)
}

/// A rank's GPU, and NCCL on it.
struct Rank<'a> {
    nccl: &'a Nccl,
    rank: u32,
    comm: usize,
    stream: Stream,
    send: Buffer,
    receive: Buffer,
}

impl Rank<'_> {
    fn told(&self, result: Result<(), Failed>, what: &str) -> Result<(), BenchError> {
        result.map_err(|e| self.nccl.explain(e, self.rank, Some(self.comm), what))
    }

    /// Waits until the stream has nothing to do.
    fn wait(&self, what: &str) -> Result<(), BenchError> {
        let until = Instant::now() + PATIENCE;
        while !self.stream.is_idle()? {
            self.told(self.nccl.async_error(self.comm), what)?;
            if Instant::now() > until {
                let text = format!("rank {}: {what} did not end in {} s", self.rank, PATIENCE.as_secs());
                return Err(BenchError::Settings(text));
            }
            std::hint::spin_loop();
        }
        Ok(())
    }

    /// The time of one operation, in ns.
    fn time(&self, what: &str, mut issue: impl FnMut() -> Result<(), BenchError>) -> Result<f64, BenchError> {
        for _ in 0..WARM_UP {
            issue()?;
        }
        self.wait(what)?;
        let begun = Instant::now();
        for _ in 0..TIMED {
            issue()?;
        }
        self.wait(what)?;
        Ok(begun.elapsed().as_nanos() as f64 / f64::from(TIMED))
    }

    fn all_reduce(&self, bytes: u64) -> Result<f64, BenchError> {
        let (send, recv) = (self.send.address(), self.receive.address());
        let call = Call::AllReduce { send, recv, count: bytes / FLOAT_BYTES, dtype: FLOAT, op: SUM };
        self.time("all-reduce", || {
            self.told(self.nccl.issue(&call, self.comm, self.stream.raw()), "all-reduce")
        })
    }

    fn exchange(&self, peer: u32) -> Result<f64, BenchError> {
        let count = LARGE / FLOAT_BYTES;
        let send = Call::Send { from: self.send.address(), count, dtype: FLOAT, peer };
        let receive = Call::Recv { to: self.receive.address(), count, dtype: FLOAT, peer };
        let what = format!("exchange with rank {peer}");
        self.time(&what, || {
            let stream = self.stream.raw();
            self.told(self.nccl.group_start(), &what)?;
            self.told(self.nccl.issue(&send, self.comm, stream), &what)?;
            self.told(self.nccl.issue(&receive, self.comm, stream), &what)?;
            self.told(self.nccl.group_end(), &what)
        })
    }
}

/// The libraries that a measurement takes, and this rank's device.
#[derive(Debug)]
pub(super) struct Ready {
    cuda: Arc<Cuda>,
    nccl: Arc<Nccl>,
    device: i32,
}

impl Ready {
    /// Loads the libraries.
    ///
    /// # Errors
    /// Which is missing.
    pub(super) fn new(launch: &Launch, cuda: Option<&Path>, nccl: Option<&Path>) -> Result<Self, BenchError> {
        let cuda = Cuda::open(cuda)?;
        let nccl = Nccl::open(nccl)?;
        let count = u32::try_from(cuda.device_count()).unwrap_or(u32::MAX);
        if count == 0 {
            return Err(BenchError::Settings("CUDA has no device".to_owned()));
        }
        let device = i32::try_from(launch.local_rank % count).unwrap_or(0);
        Ok(Ready { cuda, nccl, device })
    }
}

/// Measures, together with all other ranks, which must all be ready.
///
/// # Errors
/// What failed, and where.
pub(super) fn measure(ready: &Ready, meeting: &mut Rendezvous, step: &Step) -> Result<Measured, BenchError> {
    let (rank, world) = (meeting.rank(), meeting.world());
    step.set("taking the GPU");
    let context = Context::new(&ready.cuda, ready.device)?;
    context.enter()?;
    let (_, gpu) = ready.cuda.describe(ready.device)?;
    let id = if rank == 0 { ready.nccl.unique_id()?.0.to_vec() } else { Vec::new() };
    let id = meeting.all_gather(&id)?.swap_remove(0);
    let id: [u8; ID_BYTES] =
        id.try_into().map_err(|_| BenchError::Settings("rank 0 sent no id of a communicator".to_owned()))?;
    let stream = Stream::new(&context)?;
    let (send, receive) = (Buffer::new(&context, LARGE)?, Buffer::new(&context, LARGE)?);
    stream.fill(&send, 0, LARGE, 0)?;
    step.set("ncclCommInitRank: all ranks have to come");
    let mut comm = 0;
    let joined = ready.nccl.init_rank(&mut comm, world, &UniqueId(id), rank);
    joined.map_err(|e| ready.nccl.explain(e, rank, None, "making a communicator of all ranks"))?;
    let r = Rank { nccl: &ready.nccl, rank, comm, stream, send, receive };
    let measured = sweep(&r, meeting, step, world, &context);
    // The first error is what matters.
    let freed = if measured.is_ok() { r.nccl.destroy(comm) } else { r.nccl.abort(comm) };
    let measured = measured?;
    freed.map_err(|e| ready.nccl.explain(e, rank, None, "freeing the communicator"))?;
    Ok(Measured { gpu, nccl: ready.nccl.version(), ..measured })
}

fn sweep(
    r: &Rank<'_>,
    meeting: &mut Rendezvous,
    step: &Step,
    world: u32,
    context: &Arc<Context>,
) -> Result<Measured, BenchError> {
    let mut m = Measured::default();
    step.set("an all-reduce of 8 bytes over all ranks");
    m.small_ns = r.all_reduce(8)?;
    step.set("an all-reduce of 64 MiB over all ranks");
    m.large_ns = r.all_reduce(LARGE)?;
    for round in 0..2 {
        meeting.start_together()?;
        if let Some(peer) = partner(r.rank, world, round) {
            step.set(format!("an exchange of 64 MiB with rank {peer}"));
            m.exchanges.push(Exchange { peer, time_ns: r.exchange(peer)? });
        }
    }
    meeting.start_together()?;
    step.set("a copy to the host");
    let mut host = HostBuffer::new(context, TO_HOST)?;
    m.to_host_ns = r.time("copy to the host", || r.stream.copy_out(&mut host, &r.send, 0, TO_HOST))?;
    if r.rank == 0 && r.nccl.version() >= ras::FROM {
        step.set("asking NCCL's RAS");
        m.ras = Some(ras::ask(r.nccl.version()).unwrap_or_else(|e| format!("RAS does not answer: {e}")));
    }
    meeting.barrier()?;
    Ok(m)
}

/// GB/s of so many bytes in so many ns.
fn rate(bytes: u64, ns: f64) -> f64 {
    bytes as f64 / ns
}

/// A pair of ranks, the slower end's time, and over what they are connected.
#[derive(Debug, Clone)]
struct Pair {
    ranks: (u32, u32),
    time_ns: f64,
    kind: String,
}

/// Over what two ranks are connected. Ranks that share a GPU have no path.
fn kind(a: &Measured, b: &Measured) -> String {
    if a.host != b.host {
        return BETWEEN.to_owned();
    }
    a.paths.get(&b.gpu).cloned().unwrap_or_else(|| WITHIN.to_owned())
}

fn pairs(all: &[Measured]) -> Vec<Pair> {
    let mut found: BTreeMap<(u32, u32), Pair> = BTreeMap::new();
    for (rank, m) in (0..).zip(all) {
        for e in &m.exchanges {
            let Some(peer) = all.get(e.peer as usize) else { continue };
            let ranks = (rank.min(e.peer), rank.max(e.peer));
            let new = || Pair { ranks, time_ns: 0.0, kind: kind(m, peer) };
            let pair = found.entry(ranks).or_insert_with(new);
            pair.time_ns = pair.time_ns.max(e.time_ns);
        }
    }
    found.into_values().collect()
}

/// Where a rank is.
fn place(rank: u32, all: &[Measured]) -> String {
    all.get(rank as usize).map_or("-".to_owned(), |m| format!("rank {rank} ({} of {})", m.gpu, m.host))
}

/// Judges the pairs of one kind: those within hosts, or those between.
fn slow_pairs(pairs: &[Pair], all: &[Measured], kind: &str) -> Vec<Observation> {
    let times: Vec<f64> = pairs.iter().map(|p| p.time_ns).collect();
    let of_others = |skip: &dyn Fn(&Pair) -> bool| {
        median(&pairs.iter().filter(|p| !skip(p)).map(|p| p.time_ns).collect::<Vec<_>>())
    };
    let is_slow = |p: &Pair| {
        let others = of_others(&|o| o.ranks == p.ranks);
        others > 0.0 && p.time_ns > SLOW * others
    };
    let slow: Vec<&Pair> = pairs.iter().filter(|p| is_slow(p)).collect();
    let has = |p: &Pair, r: u32| p.ranks.0 == r || p.ranks.1 == r;
    let mut wrong = Vec::new();
    // A GPU of which every pair is slow is slow itself.
    let mut guilty: Vec<u32> = (0..u32::try_from(all.len()).unwrap_or(u32::MAX))
        .filter(|r| pairs.iter().filter(|p| has(p, *r)).count() > 1)
        .filter(|r| pairs.iter().filter(|p| has(p, *r)).all(is_slow))
        .collect();
    guilty.retain(|r| slow.iter().filter(|p| has(p, *r)).count() > 1);
    for r in &guilty {
        let own = median(&slow.iter().filter(|p| has(p, *r)).map(|p| p.time_ns).collect::<Vec<_>>());
        let others = of_others(&|o| has(o, *r));
        let seen = format!(
            "{}: all its exchanges {kind} are slow, {:.1} GB/s each way where others have {:.1}",
            place(*r, all),
            rate(LARGE, own),
            rate(LARGE, others)
        );
        wrong.push(Observation::warn(
            seen,
            "look at this GPU's links, clocks and PCIe slot (checks nvlink, clocks, pcie)",
        ));
    }
    for p in slow.iter().filter(|p| !guilty.iter().any(|r| has(p, *r))) {
        let others = of_others(&|o| o.ranks == p.ranks);
        let seen = format!(
            "{} and {}: {:.1} GB/s each way {kind}, {:.2} times as long as the median of the others ({:.1} GB/s)",
            place(p.ranks.0, all),
            place(p.ranks.1, all),
            rate(LARGE, p.time_ns),
            p.time_ns / others,
            rate(LARGE, others)
        );
        wrong.push(Observation::warn(
            seen,
            "look at the way between these two: NVLink, PCIe switch, cable, or switch port",
        ));
    }
    if wrong.is_empty() && !times.is_empty() {
        let slowest = times.iter().copied().fold(0.0, f64::max);
        wrong.push(Observation::pass(format!(
            "{} pairs {kind}: {:.1} GB/s each way, the slowest {:.1}",
            times.len(),
            rate(LARGE, median(&times)),
            rate(LARGE, slowest)
        )));
    }
    wrong
}

/// The way through the host's memory: of each GPU against the median of the others, and against the pairs' way.
fn host_path(all: &[Measured], pairs: &[Pair]) -> Vec<Observation> {
    let mut wrong = Vec::new();
    let times: Vec<f64> = all.iter().map(|m| m.to_host_ns).collect();
    for (i, m) in all.iter().enumerate() {
        let others: Vec<f64> = times.iter().enumerate().filter(|(j, _)| *j != i).map(|(_, t)| *t).collect();
        let usual = median(&others);
        if usual > 0.0 && m.to_host_ns > SLOW * usual {
            let seen = format!(
                "{}: {:.1} GB/s to the host, where others have {:.1}",
                place(u32::try_from(i).unwrap_or(0), all),
                rate(TO_HOST as u64, m.to_host_ns),
                rate(TO_HOST as u64, usual)
            );
            wrong.push(Observation::warn(
                seen,
                "look at its PCIe lanes (check pcie) and at its NUMA node (check numa)",
            ));
        }
    }
    let mut through_host: Vec<String> = Vec::new();
    for p in pairs.iter().filter(|p| p.kind == NVLINK) {
        let ends = [p.ranks.0, p.ranks.1].into_iter().filter_map(|r| all.get(r as usize));
        let to_host = ends.map(|m| rate(TO_HOST as u64, m.to_host_ns)).fold(0.0, f64::max);
        let own = rate(LARGE, p.time_ns);
        if own < OVER_HOST * to_host {
            through_host.push(format!(
                "ranks {} and {} {own:.1} GB/s (to the host {to_host:.1})",
                p.ranks.0, p.ranks.1
            ));
        }
    }
    if !through_host.is_empty() {
        let seen = format!(
            "pairs with NVLink that are hardly faster than the way through the host: {}",
            through_host.join("; ")
        );
        let fix = "NCCL does not use NVLink there: see NCCL_P2P_DISABLE, NCCL_P2P_LEVEL and the checks p2p and nvlink";
        wrong.push(Observation::warn(seen, fix));
    }
    if wrong.is_empty() {
        let usual = rate(TO_HOST as u64, median(&times));
        wrong.push(Observation::pass(format!("{usual:.1} GB/s from a GPU to its host")));
    }
    wrong
}

/// Judges the measurements of all ranks, by rank.
#[must_use]
pub fn judge(all: &[Measured]) -> Vec<Outcome> {
    let Some(first) = all.first() else { return Vec::new() };
    let world = all.len() as f64;
    let slowest = |each: fn(&Measured) -> f64| all.iter().map(each).fold(0.0, f64::max);
    let (small, large) = (slowest(|m| m.small_ns), slowest(|m| m.large_ns));
    let bus = 2.0 * (world - 1.0) / world * rate(LARGE, large);
    let took = |ns: f64| format!("{:.1} us", ns / 1e3);
    let seen = format!(
        "NCCL {}, {} ranks: all-reduce of 8 B {}, of 64 MiB {} (bus bandwidth {bus:.1} GB/s)",
        version_text(first.nccl),
        all.len(),
        took(small),
        took(large)
    );
    let pairs = pairs(all);
    let kinds: BTreeSet<&str> = pairs.iter().map(|p| p.kind.as_str()).collect();
    let of_kind = |kind: &str| pairs.iter().filter(|p| p.kind == kind).cloned().collect::<Vec<_>>();
    let of_pairs: Vec<Observation> =
        kinds.into_iter().flat_map(|k| slow_pairs(&of_kind(k), all, k)).collect();
    let outcome = |id, results| Outcome::new(id, Area::Ranks, Duration::ZERO, results);
    let mut outcomes = vec![
        outcome("collectives", vec![Observation::pass(seen)]),
        outcome("pairs", of_pairs),
        outcome("host-path", host_path(all, &pairs)),
    ];
    if let Some(text) = &first.ras {
        outcomes.push(outcome("nccl-ras", vec![ras::judge(text)]));
    }
    outcomes
}

#[cfg(test)]
mod tests {
    use super::super::Status;
    use super::*;

    /// Ranks whose exchanges all take as long, but for `slow`.
    fn measured(world: u32, slow: impl Fn(u32, u32) -> f64) -> Vec<Measured> {
        let of = |rank: u32| Measured {
            host: format!("node{}", rank / 4),
            gpu: format!("0000:{rank:02x}:00.0"),
            paths: (0..world).map(|r| (format!("0000:{r:02x}:00.0"), NVLINK.to_owned())).collect(),
            nccl: 22_809,
            small_ns: 1e4,
            large_ns: 1e6,
            to_host_ns: 6e5,
            exchanges: (0..2)
                .filter_map(|round| partner(rank, world, round))
                .map(|peer| Exchange { peer, time_ns: 2e5 * slow(rank, peer) })
                .collect(),
            ras: None,
        };
        (0..world).map(of).collect()
    }

    fn of<'o>(outcomes: &'o [Outcome], id: &str) -> &'o Outcome {
        outcomes.iter().find(|o| o.id == id).unwrap()
    }

    #[test]
    fn every_rank_has_a_partner_who_has_it_too() {
        for world in 2..10 {
            for round in 0..2 {
                for rank in 0..world {
                    let Some(peer) = partner(rank, world, round) else { continue };
                    assert_ne!(peer, rank);
                    assert_eq!(partner(peer, world, round), Some(rank), "{rank} of {world} in round {round}");
                }
            }
        }
        assert_eq!([0, 1, 2, 3].map(|r| partner(r, 4, 1)), [Some(3), Some(2), Some(1), Some(0)]);
        assert_eq!([0, 1].map(|r| partner(r, 2, 1)), [None, None], "of two there is one pair");
    }

    #[test]
    fn alike_pairs_pass_and_have_their_rate() {
        let all = judge(&measured(8, |_, _| 1.0));
        assert!(all.iter().all(|o| o.status == Status::Pass), "{all:#?}");
        let pairs = of(&all, "pairs");
        assert!(
            pairs.results.iter().any(|r| r.seen.starts_with("6 pairs over NVLink: 335.5 GB/s")),
            "{pairs:?}"
        );
        assert!(of(&all, "collectives").results[0].seen.contains("bus bandwidth 117.4 GB/s"));
    }

    #[test]
    fn the_slow_pair_is_named_and_nobody_else() {
        let all = judge(&measured(8, |a, b| if (a.min(b), a.max(b)) == (2, 3) { 2.0 } else { 1.0 }));
        let pairs = of(&all, "pairs");
        let bad: Vec<_> = pairs.results.iter().filter(|r| r.status == Status::Warn).collect();
        assert_eq!(bad.len(), 1, "{pairs:#?}");
        assert!(bad[0].seen.contains("rank 2 (0000:02:00.0 of node0) and rank 3"), "{}", bad[0].seen);
        assert!(bad[0].seen.contains("2.00 times as long"), "{}", bad[0].seen);
    }

    #[test]
    fn a_gpu_all_of_whose_pairs_are_slow_is_named_itself() {
        let all = judge(&measured(8, |a, b| if a == 1 || b == 1 { 3.0 } else { 1.0 }));
        let pairs = of(&all, "pairs");
        assert!(
            pairs.results[0].seen.starts_with("rank 1 (0000:01:00.0 of node0): all its exchanges"),
            "{pairs:#?}"
        );
        assert_eq!(pairs.results.iter().filter(|r| r.status == Status::Warn).count(), 1);
    }

    #[test]
    fn nvlink_that_is_not_used_is_named_even_for_two_ranks() {
        let mut two = measured(2, |_, _| 6.0);
        let all = judge(&two);
        let path = of(&all, "host-path");
        assert!(
            path.status == Status::Warn
                && path.results[0].seen.contains("ranks 0 and 1 55.9 GB/s (to the host 55.9)"),
            "{path:?}"
        );
        two.iter_mut().for_each(|m| m.paths.clear());
        assert_eq!(of(&judge(&two), "host-path").status, Status::Pass);
        two[1].to_host_ns *= 2.0;
        let all = judge(&two);
        assert!(of(&all, "host-path").results[0].seen.starts_with("rank 1"), "{all:#?}");
    }
}
