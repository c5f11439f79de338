//! `tiny-collectives`, `communication-share`, `imbalance`: nothing is broken, and time is lost all the same.

use super::{Rule, fact, number, rounded, who};
use crate::join::{Class, ClassKey, Communicator, Exchanged, Join};
use crate::model::{CommId, Confidence, Finding, Func, Kind, OperationRef, Rank, Track, size_text};
use std::collections::{BTreeMap, BTreeSet};

/// Seconds over which it has to be so.
const SECONDS: u64 = 120;
/// And of these so many with operations.
const BUSY_SECONDS: u64 = 110;
/// Share of wall time inside collectives that is told.
const SHARE: f64 = 0.30;
/// Messages of less than 2^class bytes cost the same as ones of a byte.
const TINY_CLASS: u8 = 15;
/// Share of wall time that tiny ones may take.
const TINY_SHARE: f64 = 0.10;
/// How many of a communicator's operations have to be tiny.
const TINY_MOST: f64 = 0.8;
/// From this ratio to the middle on a rank exchanges much more than the others.
const UNEVEN: f64 = 2.0;
/// Sends of a rank before it is judged.
const SENDS: u64 = 200;

/// The rule.
#[derive(Debug)]
pub struct UsageRule;

impl Rule for UsageRule {
    fn check(&self, join: &Join, now_ns: u64) -> Vec<Finding> {
        let mut found = shares(join, now_ns);
        found.extend(join.communicators().filter_map(|c| uneven(join, c)));
        found
    }
}

/// A class and its share of wall time over the last minutes.
type Load<'a> = (&'a ClassKey, &'a Class, f64);

fn shares(join: &Join, now_ns: u64) -> Vec<Finding> {
    let mut loads: BTreeMap<CommId, Vec<Load<'_>>> = BTreeMap::new();
    for (key, class) in join.classes() {
        let load = class.load(now_ns, SECONDS).filter(|l| l.seconds >= BUSY_SECONDS);
        if let Some(share) = load.and_then(|l| l.share) {
            loads.entry(key.comm).or_default().push((key, class, share));
        }
    }
    let mut out: Vec<Finding> = loads.iter().filter_map(|(id, own)| tiny(join, *id, own)).collect();
    out.extend(busy(join, &loads));
    out
}

fn members(join: &Join, id: CommId) -> Vec<Rank> {
    join.communicator(id).map(|c| c.members().keys().copied().collect()).unwrap_or_default()
}

fn operation((key, class, _): &Load<'_>) -> OperationRef {
    OperationRef {
        bytes: class.mean_bytes(),
        algo: key.algo.map(|a| a.to_string()),
        proto: key.proto.map(|p| p.to_string()),
        ..OperationRef::named(key.func.as_str(), Track::Collective, 0)
    }
}

fn tiny(join: &Join, id: CommId, loads: &[Load<'_>]) -> Option<Finding> {
    // The sends and receives of a pipeline are what they are.
    let collectives = || loads.iter().filter(|(k, ..)| k.func != Func::SendRecv);
    let small = || collectives().filter(|(k, ..)| k.size_class.is_none_or(|c| c < TINY_CLASS));
    let count = |of: &mut dyn Iterator<Item = &Load<'_>>| of.map(|(_, c, _)| c.count()).sum::<u64>() as f64;
    let share: f64 = small().map(|(.., s)| s).sum();
    let (few, all) = (count(&mut small()), count(&mut collectives()));
    if share < TINY_SHARE || few < all * TINY_MOST {
        return None;
    }
    let worst = small().max_by(|a, b| a.2.total_cmp(&b.2))?;
    Some(Finding {
        confidence: Confidence::Likely,
        evidence: vec![
            number(
                format!(
                    "collectives of less than {} take {:.0} % of wall time",
                    size_text(1 << TINY_CLASS),
                    share * 100.0
                ),
                rounded(share),
                "1",
            ),
            number(
                format!("{:.0} % of the communicator's collectives are so small", few / all * 100.0),
                rounded(few / all),
                "1",
            ),
        ],
        advice: "put them together: larger buckets (bucket_cap_mb), one flattened tensor, a group of calls, or CUDA graphs; so small a message costs latency only".to_owned(),
        ..Finding::new(Kind::TinyCollectives, id, members(join, id), operation(worst))
    })
}

fn busy(join: &Join, loads: &BTreeMap<CommId, Vec<Load<'_>>>) -> Vec<Finding> {
    let mut out = Vec::new();
    let mut told = BTreeSet::new();
    // A process's communicators, and how many ranks it has in each.
    for p in join.processes().filter(|p| !p.record.liveness.is_gone() && !loads.is_empty()) {
        let mut comms: BTreeMap<CommId, u32> = BTreeMap::new();
        for (comm, _) in join.memberships(p.record.id).iter().filter(|(comm, _)| loads.contains_key(comm)) {
            *comms.entry(*comm).or_default() += 1;
        }
        let own = || comms.keys().filter_map(|c| loads.get(c));
        let sum = |all: &Vec<Load<'_>>| all.iter().map(|(.., s)| s).sum::<f64>();
        // What runs at the same time is known by single operations alone. Where these are a sample, one communicator's,
        // which come one after the other, are what is certain.
        let single = own().flatten().all(|(_, class, _)| class.has_all_records());
        // Several GPUs of a process work at the same time on one collective, whose share is a mean over them.
        let gpus = comms.values().copied().max().unwrap_or(1);
        let overlap = p.busy.overlap().filter(|_| single).map_or(1.0, |o| (o * f64::from(gpus)).min(1.0));
        let inside = if single { own().map(sum).sum() } else { own().map(sum).fold(0.0, f64::max) };
        let share = (inside * overlap).min(1.0);
        if share < SHARE {
            continue;
        }
        let mut all: Vec<&Load<'_>> = own().flatten().collect();
        all.sort_by(|a, b| b.2.total_cmp(&a.2));
        let Some(worst) = all.first() else { continue };
        // The ranks of one communicator spend their time together.
        if !told.insert(worst.0.comm) {
            continue;
        }
        let mut evidence = vec![number(
            format!("{:.0} % of wall time is spent inside collectives", share * 100.0),
            rounded(share),
            "1",
        )];
        if overlap < 0.95 {
            evidence.push(number(
                "collectives that run at the same time count once".to_owned(),
                rounded(overlap),
                "1",
            ));
        }
        if !single && comms.len() > 1 {
            evidence.push(fact(
                "this is of its busiest communicator alone; what of the others runs at the same time is not known",
            ));
        }
        for (key, class, s) in all.iter().take(3) {
            let size = class.mean_bytes().map_or_else(String::new, |b| format!(" of {}", size_text(b)));
            evidence.push(number(
                format!("{}{size} in communicator {}: {:.0} %", key.func, key.comm, s * 100.0),
                rounded(*s),
                "1",
            ));
        }
        evidence
            .push(fact("waiting for late ranks is in it; what the GPUs compute meanwhile is not known here"));
        out.push(Finding {
            confidence: Confidence::Likely,
            evidence,
            advice: "see whether it is waiting (straggler) or transfer; overlap it with computation, shard otherwise, or send less (larger local batches, lower precision)".to_owned(),
            ..Finding::new(Kind::CommunicationShare, worst.0.comm, members(join, worst.0.comm), operation(worst))
        });
    }
    out
}

/// Exchanges of everybody with everybody, in which one rank has much more to send or to receive.
fn uneven(join: &Join, c: &Communicator) -> Option<Finding> {
    let n = c.expected();
    let nothing = Exchanged::default();
    let all = || c.members().iter().map(|(r, m)| (*r, m.exchanged().unwrap_or(&nothing)));
    let dense = all().all(|(_, e)| e.sends >= SENDS && e.knows(n / 2));
    if n < 3 || c.members().len() < n || !dense {
        return None;
    }
    let middle = |of: &mut dyn Iterator<Item = u64>| {
        let mut v: Vec<u64> = of.collect();
        v.sort_unstable();
        v.get(v.len() / 2).copied().filter(|m| *m > 0)
    };
    let (sent, received) =
        (middle(&mut all().map(|(_, e)| e.sent_bytes))?, middle(&mut all().map(|(_, e)| e.received_bytes))?);
    let ratio =
        |e: &Exchanged| (e.sent_bytes as f64 / sent as f64, e.received_bytes as f64 / received as f64);
    let ranks: Vec<Rank> =
        all().filter(|(_, e)| ratio(e).0.max(ratio(e).1) >= UNEVEN).map(|(r, _)| r).collect();
    if ranks.is_empty() || ranks.len() * 2 > n {
        return None;
    }
    let mut evidence = Vec::new();
    for (rank, e) in all().filter(|(r, _)| ranks.contains(r)) {
        let (s, r) = ratio(e);
        let (what, by) = if s >= r { ("sends", s) } else { ("receives", r) };
        evidence.push(number(
            format!("rank {rank} {what} {by:.1} times as much as the rank in the middle"),
            rounded(by),
            "1",
        ));
        evidence.extend(who(join, c, rank));
    }
    Some(Finding {
        confidence: Confidence::Likely,
        evidence,
        advice: "even out what is exchanged: balance the experts or shards, cap what one of them takes, or give the busy one its own copies".to_owned(),
        ..Finding::new(
            Kind::Imbalance,
            c.id,
            ranks,
            OperationRef::named(Func::SendRecv.as_str(), Track::Collective, 0),
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::join::testing::{all_reduce, member, process};
    use crate::model::{DataType, Lane, OpRecord, Update};

    const MS: u64 = 1_000_000;

    /// `seconds` of a job of two ranks: every 10 ms an operation of so many floats that takes so long.
    fn job(seconds: u64, count: u64, takes_ns: u64, timed: impl Fn(u64) -> bool) -> Vec<Finding> {
        let mut join = Join::new();
        for r in 0..2 {
            join.feed(process(r));
            join.feed(member(r, 2, 0));
        }
        for i in 0..seconds * 100 {
            let at = 1_000_000_000 + i * 10 * MS;
            for r in 0..2 {
                let kernel = timed(i).then_some((at + 1_000, Some(at + 1_000 + takes_ns)));
                let mut o: OpRecord = all_reduce(r, i, at, kernel);
                if !timed(i) {
                    o.timing = crate::model::Timing::Not(crate::model::Untimed::Budget);
                }
                o.count = count;
                join.feed(Update::Op(Box::new(o)));
            }
            join.tick(at + 9 * MS);
        }
        UsageRule.check(&join, 1_000_000_000 + seconds * 1_000_000_000)
    }

    #[test]
    fn a_job_that_mostly_communicates_is_told_after_a_while() {
        let found = job(130, 1 << 20, 5 * MS, |_| true);
        assert_eq!(found.len(), 1, "{found:#?}");
        assert_eq!(found[0].kind, Kind::CommunicationShare);
        assert!((found[0].evidence[0].value.unwrap() - 0.5).abs() < 0.02, "{:?}", found[0].evidence);
        assert_eq!(job(60, 1 << 20, 5 * MS, |_| true), vec![], "a minute is no habit");
        assert_eq!(job(130, 1 << 20, MS, |_| true), vec![]);
        // One of ten timed says the same.
        let found = job(130, 1 << 20, 5 * MS, |i| i % 10 == 0);
        assert_eq!(found.len(), 1);
        assert!((found[0].evidence[0].value.unwrap() - 0.5).abs() < 0.02, "{:?}", found[0].evidence);
    }

    #[test]
    fn many_tiny_collectives_are_told() {
        let found = job(130, 256, 2 * MS, |_| true);
        assert_eq!(found.iter().map(|f| f.kind).collect::<Vec<_>>(), [Kind::TinyCollectives]);
        assert_eq!(job(130, 256, MS / 2, |_| true), vec![], "they may be tiny where they cost little");
    }

    fn exchange(bytes: impl Fn(u32, u32) -> u64, partners: impl Fn(u32, u32) -> bool) -> Vec<Finding> {
        let mut join = Join::new();
        for r in 0..4 {
            join.feed(process(r));
            join.feed(member(r, 4, 0));
        }
        for i in 0..100u64 {
            let mut ticket = i * 100;
            for a in 0..4 {
                for b in (0..4).filter(|b| *b != a && partners(a, *b)) {
                    for (rank, lane, func) in
                        [(a, Lane::Send(Rank(b)), Func::Send), (b, Lane::Recv(Rank(a)), Func::Recv)]
                    {
                        let at = (i + 1) * MS;
                        let mut o = all_reduce(rank, i, at, Some((at + 10, Some(at + 1_000))));
                        (o.lane, o.func, o.dtype) = (lane, func, Some(DataType::Int8));
                        (o.count, o.ticket) = (bytes(a, b), ticket);
                        ticket += 1;
                        join.feed(Update::Op(Box::new(o)));
                    }
                }
            }
            join.tick((i + 2) * MS);
        }
        UsageRule.check(&join, 200 * MS)
    }

    #[test]
    fn a_rank_that_everybody_sends_to_is_told() {
        let all = |_: u32, _: u32| true;
        let found = exchange(|_, b| if b == 2 { 4_000 } else { 1_000 }, all);
        assert_eq!(found.len(), 1, "{found:#?}");
        assert_eq!((found[0].kind, found[0].ranks.as_slice()), (Kind::Imbalance, &[Rank(2)][..]));
        assert!(found[0].evidence[0].text.contains("receives"), "{:?}", found[0].evidence);
        assert_eq!(exchange(|_, b| 1_000 + u64::from(b) * 100, all), vec![]);
        // A pipeline passes on to the next.
        assert_eq!(exchange(|a, _| 1_000 << a, |a, b| b == a + 1), vec![]);
    }
}
