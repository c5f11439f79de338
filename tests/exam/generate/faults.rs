//! Faults, planted where the healthy job is at some moment.

use super::{MS, slow, steps};
use crate::random::Random;
use crate::simulator::{Call, Case, Choice, FOREVER, Fault, Ns, Stay};
use crate::spec::{FaultKind, FaultSpec, Spec};
use ringwatch::model::{Algo, DataType, Func, Proto, Track};
use std::collections::{BTreeMap, BTreeSet};

/// A fault, and who is to blame.
#[derive(Debug, Clone)]
pub(crate) struct Planted {
    pub(crate) kind: FaultKind,
    /// Ranks of the job.
    pub(crate) culprits: BTreeSet<u32>,
    /// Ranks that a finding may name as well.
    pub(crate) involved: BTreeSet<u32>,
    /// When it is planted, in the healthy job's time.
    pub(crate) at_ns: u64,
    /// The place in the case's lists.
    pub(crate) fault: Option<usize>,
    pub(crate) slow: Option<usize>,
}

/// A case without a program.
pub(super) fn empty_case(spec: &Spec) -> Case {
    Case {
        about: format!("{} of seed {}: {}", spec.family.as_str(), spec.seed, spec.label()),
        ranks: spec.ranks,
        nodes: spec.nodes(),
        comms: BTreeMap::new(),
        program: Vec::new(),
        faults: Vec::new(),
        slow: Vec::new(),
        choices: Vec::new(),
        expect: Vec::new(),
        until: Ns(spec.until_ms * MS),
        look: Ns(match spec.ranks {
            0..=4 => 100 * MS,
            5..=8 => 150 * MS,
            _ => 200 * MS,
        }),
        noise: spec.noise,
        gpus_differ: spec.gpus_differ,
        hosts_differ: spec.hosts_differ,
        latency: Ns(15_000),
        disturbed: spec.disturbed,
        depth: spec.depth,
        late_records: Some(Ns(spec.late_records_us * 1_000)),
        one_end_a_launch: spec.one_end_a_launch,
        launches_by_events: spec.times_launches(),
        timed_of: (spec.timed_of > 1).then_some(spec.timed_of),
        lost_stamps: spec.lost_stamps,
        drift_ppm: spec.gpu_drift,
        host_facts: spec.host_facts,
        hardware: None,
        load_every: spec.reads_load.then_some(Ns(2_000 * MS)),
        buffered: false,
        restart: None,
        abi: spec.abi,
        nccl: match spec.abi {
            2 => "2.24.3",
            4 => "2.27.5",
            _ => "2.28.9",
        }
        .to_owned(),
        // The preloaded library sees the call that makes a communicator, and with it the number of its ranks.
        sizes_unknown: spec.abi < 4 && !spec.preloaded,
        keyed: true,
        tail_share: spec.tail_share,
        tail_factor: spec.tail_factor,
        host_drift_ppm: spec.host_drift,
        node_loss: None,
    }
}

/// The name of a communicator, by its place among all.
fn name_of(case: &Case, comm: usize) -> String {
    let mut next = 0;
    for (name, members) in &case.comms {
        next += members.groups(case.ranks).len();
        if comm < next {
            return name.clone();
        }
    }
    unreachable!("there is no communicator {comm}")
}

fn members_of(case: &Case, comm: usize) -> Vec<u32> {
    let mut all = case.comms.values().flat_map(|m| m.groups(case.ranks));
    all.nth(comm).unwrap_or_default()
}

/// The place of a rank's call, for a fault of that rank.
pub(super) fn at(case: &Case, healthy: &[Stay], stay: &Stay) -> Option<Fault> {
    let comm = name_of(case, stay.comm);
    let call = healthy
        .iter()
        .filter(|s| s.rank == stay.rank && s.comm == stay.comm && s.ticket < stay.ticket)
        .count();
    Some(Fault { ranks: vec![stay.rank], comm, call, ..Fault::default() })
}

/// A rank's call at a place, as the program has it.
fn call_at(case: &Case, fault: &Fault) -> Option<Call> {
    case.calls(*fault.ranks.first()?).into_iter().filter(|c| c.comm == fault.comm).nth(fault.call)
}

/// What a fault needs of the call at which it is planted.
fn fits(kind: FaultKind, case: &Case, stay: &Stay) -> bool {
    let members = members_of(case, stay.comm);
    let transfer = matches!(stay.track, Track::Pair(..));
    let collective = stay.track == Track::Collective && members.len() > 1;
    match kind {
        FaultKind::TransferSkipped => transfer,
        FaultKind::CallSkipped
        | FaultKind::CallExtra
        | FaultKind::CallsSwapped
        | FaultKind::OtherCount
        | FaultKind::OtherFunc
        | FaultKind::OtherType
        | FaultKind::OtherChoice
        | FaultKind::DataStuck
        | FaultKind::LinkBroken => collective,
        FaultKind::OtherRoot => collective && stay.func.is_rooted() && members.len() > 2,
        FaultKind::ReplaySkipped => stay.track == Track::Replay,
        FaultKind::Aborted => collective,
        FaultKind::PairSlow => transfer,
        FaultKind::NetworkSlow => members.len() > 1,
        _ => members.len() > 1,
    }
}

/// Plants all faults of a job.
pub(super) fn plant(case: &mut Case, spec: &Spec, healthy: &[Stay]) -> Vec<Planted> {
    spec.faults.iter().filter_map(|f| one(case, spec, healthy, f)).collect()
}

fn one(case: &mut Case, spec: &Spec, healthy: &[Stay], f: &FaultSpec) -> Option<Planted> {
    let mut r = Random::new(f.luck);
    let at_ns = f.at_ms * MS;
    if f.kind == FaultKind::NeverJoined {
        return never_joined(case, &mut r, at_ns);
    }
    if f.kind == FaultKind::NodeLost {
        let node = (r.next() % u64::from(spec.nodes())) as u32;
        case.node_loss = Some((node, Ns(at_ns)));
        return Some(planted(f.kind, on_node(spec, node), at_ns));
    }
    let next = |s: &Stay| healthy.iter().find(|n| n.rank == s.rank && n.ticket == s.ticket + 1);
    let swaps =
        |s: &Stay| next(s).is_some_and(|n| n.stream == s.stream && (n.comm, n.func) != (s.comm, s.func));
    let around = |s: &&Stay| {
        (at_ns..at_ns + 1_500 * MS).contains(&s.issued_ns)
            && fits(f.kind, case, s)
            && (f.kind != FaultKind::CallsSwapped || swaps(s))
    };
    let rank = (r.next() % u64::from(spec.ranks)) as u32;
    let mut places: Vec<&Stay> = healthy.iter().filter(|s| s.rank == rank).filter(around).collect();
    if places.is_empty() {
        places = healthy.iter().filter(around).collect();
    }
    places.truncate(400);
    if places.is_empty() {
        return None;
    }
    let stay = r.pick(&places).clone();
    let mut made = planted(f.kind, BTreeSet::from([stay.rank]), stay.issued_ns);
    if f.kind.is_data() {
        slow_data(case, spec, f, &stay, &mut made, &mut r);
        return Some(made);
    }
    let fault = at(case, healthy, &stay)?;
    if f.kind == FaultKind::OtherChoice {
        case.choices.push(other_choice(&fault, &stay));
        return Some(made);
    }
    let fault = fill(case, spec, healthy, f, fault, &stay, &mut made)?;
    made.fault = Some(case.faults.len());
    case.faults.push(fault);
    Some(made)
}

fn planted(kind: FaultKind, culprits: BTreeSet<u32>, at_ns: u64) -> Planted {
    Planted { kind, involved: culprits.clone(), culprits, at_ns, fault: None, slow: None }
}

fn on_node(spec: &Spec, node: u32) -> BTreeSet<u32> {
    (node * spec.a_node..(node + 1) * spec.a_node).collect()
}

fn never_joined(case: &mut Case, r: &mut Random, at_ns: u64) -> Option<Planted> {
    let rank = (r.next() % u64::from(case.ranks)) as u32;
    let comm = case.comms.values_mut().find(|m| m.later)?;
    comm.without.push(rank);
    Some(planted(FaultKind::NeverJoined, BTreeSet::from([rank]), at_ns))
}

fn other_choice(fault: &Fault, stay: &Stay) -> Choice {
    Choice {
        comm: fault.comm.clone(),
        ranks: Some(vec![stay.rank]),
        func: Some(stay.func),
        from: stay.order,
        every: None,
        algo: Algo::Tree,
        proto: Proto::Ll128,
        channels: 2,
    }
}

/// Slow data between two ranks, of a communicator, or in and out of a host.
fn slow_data(case: &mut Case, spec: &Spec, f: &FaultSpec, stay: &Stay, made: &mut Planted, r: &mut Random) {
    let factor = 2.0 + 6.0 * f.size;
    let members = members_of(case, stay.comm);
    let mut s = slow(made.at_ns, factor);
    made.involved = members.iter().copied().collect();
    match (f.kind, stay.track) {
        (FaultKind::PairSlow, Track::Pair(a, b)) => {
            let pair = (members[a.0 as usize], members[b.0 as usize]);
            s.pair = Some(pair);
            made.culprits = BTreeSet::from([pair.0, pair.1]);
        }
        (FaultKind::NicSlow, _) => {
            let node = (r.next() % u64::from(spec.nodes())) as u32;
            s.host = Some(node);
            made.culprits = on_node(spec, node);
            made.involved = (0..spec.ranks).collect();
        }
        _ => {
            // It slows all groups of that name.
            let name = name_of(case, stay.comm);
            made.culprits = case.comms[&name].groups(case.ranks).into_iter().flatten().collect();
            s.comm = Some(name);
            made.involved = (0..spec.ranks).collect();
        }
    }
    made.slow = Some(case.slow.len());
    case.slow.push(s);
}

/// How many calls in its communicator a rank makes in half a second or so, by what it makes in the whole run.
fn period(healthy: &[Stay], stay: &Stay, seconds: f64) -> usize {
    let own: Vec<u64> =
        healthy.iter().filter(|s| s.rank == stay.rank && s.comm == stay.comm).map(|s| s.issued_ns).collect();
    let span = own.last().unwrap_or(&1).saturating_sub(*own.first().unwrap_or(&0)).max(1);
    ((own.len() as f64 / (span as f64 / 1e9) * seconds) as usize).max(1)
}

fn fill(
    case: &Case,
    spec: &Spec,
    healthy: &[Stay],
    f: &FaultSpec,
    fault: Fault,
    stay: &Stay,
    made: &mut Planted,
) -> Option<Fault> {
    let call = call_at(case, &fault)?;
    let members = members_of(case, stay.comm);
    let all: BTreeSet<u32> = members.iter().copied().collect();
    let own = members.iter().position(|m| *m == stay.rank)? as u32;
    let n = members.len() as u32;
    let times = |from: f64, to: f64| Ns(((from + (to - from) * f.size) * 1e9) as u64);
    let changed = |call: Call| Fault { change: Some(call), ..fault.clone() };
    Some(match f.kind {
        FaultKind::HostHangs => Fault { hang: true, ..fault },
        FaultKind::Stopped => Fault { stop: true, ..fault },
        FaultKind::Killed => Fault { die: Some(9), ..fault },
        FaultKind::Exits => Fault { die: Some(-1), ..fault },
        FaultKind::CallSkipped | FaultKind::TransferSkipped | FaultKind::ReplaySkipped => {
            Fault { skip: true, ..fault }
        }
        FaultKind::CallExtra => Fault { extra: Some(call), ..fault },
        FaultKind::CallsSwapped => Fault { swap: true, ..fault },
        FaultKind::OtherCount => changed(Call { count: call.count + 1 + f.luck % 1_000, ..call }),
        FaultKind::OtherType => changed(Call { dtype: DataType::Float16, ..call }),
        FaultKind::OtherRoot => changed(Call { root: call.root.map(|r| (r + 1) % n), ..call }),
        FaultKind::OtherFunc => {
            let func = if call.func == Func::AllReduce { Func::AllGather } else { Func::AllReduce };
            changed(steps::call(&call.comm, func, call.count))
        }
        FaultKind::DataStuck => {
            let next = (own + 1) % n;
            made.culprits = BTreeSet::from([stay.rank, members[next as usize]]);
            made.involved = all;
            Fault { ranks: members, stuck: Some((own, next)), ..fault }
        }
        FaultKind::LinkBroken => {
            (made.culprits, made.involved) = (all.clone(), all);
            Fault { ranks: members, broken: true, ..fault }
        }
        FaultKind::Aborted => Fault { abort: true, ..fault },
        FaultKind::GpuOccupied => {
            made.involved = all;
            Fault { occupy: Some(FOREVER), ..fault }
        }
        FaultKind::LateOnce => Fault { delay: Some(times(0.1, 3.0)), ..fault },
        FaultKind::Paused => Fault { pause: Some(times(0.2, 5.0)), ..fault },
        // A host that is slow in every call costs something as soon as its GPU runs dry.
        FaultKind::LateOften if f.luck.is_multiple_of(2) => {
            let interval_s = 1.0 / period(healthy, stay, 1.0) as f64;
            Fault { delay: Some(times(0.5 * interval_s, 2.0 * interval_s)), every: Some(1), ..fault }
        }
        FaultKind::LateOften => {
            let every = period(healthy, stay, 0.25);
            Fault { delay: Some(times(0.004, 0.12)), every: Some(every), ..fault }
        }
        // A GPU that throttles is slower in all that it computes; one that somebody shares, now and then.
        FaultKind::GpuSlow if f.luck.is_multiple_of(2) => Fault { slower: Some(1.1 + f.size), ..fault },
        FaultKind::GpuSlow => {
            let every = period(healthy, stay, 0.25);
            Fault { occupy: Some(times(0.004, 0.12)), every: Some(every), ..fault }
        }
        FaultKind::NodeSlow => {
            made.culprits = on_node(spec, stay.rank / spec.a_node);
            made.involved = made.culprits.clone();
            let ranks = made.culprits.iter().copied().collect();
            if f.luck.is_multiple_of(2) {
                return Some(Fault { ranks, slower: Some(1.1 + f.size), ..fault });
            }
            let every = period(healthy, stay, 0.25);
            Fault { ranks, occupy: Some(times(0.01, 0.12)), every: Some(every), ..fault }
        }
        _ => return None,
    })
}
