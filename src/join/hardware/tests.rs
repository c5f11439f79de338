//! From operations and readings, fed as they come, to the books.

use crate::join::testing::{all_reduce, member, process};
use crate::join::{Join, Wire, WireWindow};
use crate::model::{
    Algo, CommRecord, Fact, Func, GpuFact, Holder, InterfaceFact, Lane, Moved, PodsFact, PortFact, Rank,
    Reading, SegmentId, Traffic, Update,
};

const S: u64 = 1_000_000_000;
const MS: u64 = 1_000_000;
/// A ring all-reduce of 4 MiB over two ranks puts its size on the wire once each way.
const BYTES: f64 = (4 << 20) as f64;

fn on_gpu(update: Update, gpu: &str) -> Update {
    match update {
        Update::Comm(c) => Update::Comm(CommRecord { gpu: Some(gpu.into()), ..c }),
        other => other,
    }
}

fn read(j: &mut Join, gpu: &str, from_ns: u64, at_ns: u64, bytes: f64, links: &[f64]) {
    let moved = |b: f64| Moved { tx_bytes: b, rx_bytes: b };
    let t = Traffic {
        gpu: gpu.to_owned(),
        from_ns,
        nvlink: Some(moved(bytes)),
        links: (0..).zip(links.iter().map(|b| moved(*b))).collect(),
        pcie: None,
    };
    j.feed(Update::Hardware(Box::new(Reading { host: "node".to_owned(), at_ns, fact: Fact::Traffic(t) })));
}

/// Two ranks that all-reduce 100 times a second from 10 s to 14 s; the wires are read from 9 s to 16 s and move so many
/// times what they should.
fn job(times: f64) -> Join {
    let mut j = Join::new();
    let gpus = ["0000:1A:00.0", "0000:1B:00.0"];
    for r in 0..2 {
        j.feed(process(r));
        j.feed(on_gpu(member(r, 2, 400), gpus[r as usize]));
    }
    for tick in 90..160u64 {
        let at = tick * S / 10;
        let runs = (100..140).contains(&tick);
        for gpu in ["0000:1a:00.0", "0000:1b:00.0"] {
            let bytes = if runs { 10.0 * BYTES * times } else { 100.0 };
            read(&mut j, gpu, at, at + S / 10, bytes, &[]);
        }
        for i in 0..if runs { 10 } else { 0 } {
            let (order, issued) = ((tick - 100) * 10 + i, at + i * 10 * MS);
            for r in 0..2 {
                let kernel = Some((issued + 10_000, Some(issued + 2 * MS)));
                j.feed(Update::Op(Box::new(all_reduce(r, order, issued, kernel))));
            }
        }
        j.tick(at + S / 10);
    }
    j.tick(30 * S);
    j
}

#[test]
fn traffic_is_attributed_to_the_operations_that_made_it() {
    let j = job(1.02);
    let wires: Vec<_> = j.hardware().wires().collect();
    assert_eq!(wires.len(), 2);
    for (host, gpu, totals) in wires {
        let (_, func, share) = totals.by().next().expect("the all-reduces");
        assert_eq!((host, func, totals.by().count()), ("node", Func::AllReduce, 1));
        assert!((share.expected.tx_bytes / (400.0 * BYTES) - 1.0).abs() < 1e-6, "{share:?}");
        assert!((share.attributed.rx_bytes / share.expected.rx_bytes - 1.02).abs() < 0.01, "{share:?}");
        assert_eq!(totals.foreign.tx_bytes, 0.0, "{totals:?}");
        let seconds: Vec<(u64, Option<f64>)> =
            j.hardware().windows(host, gpu).map(|w| (w.second, w.efficiency())).collect();
        assert_eq!(seconds.len(), 7, "{seconds:?}");
        for (second, efficiency) in seconds {
            let runs = (10..14).contains(&second);
            assert_eq!(efficiency.is_some(), runs, "second {second}");
            assert!(efficiency.is_none_or(|e| (e - 1.0 / 1.02).abs() < 0.005), "{efficiency:?}");
        }
    }
}

#[test]
fn what_others_move_is_foreign() {
    let j = job(1.5);
    for (_, _, totals) in j.hardware().wires() {
        assert!((totals.foreign.tx_bytes / (200.0 * BYTES) - 1.0).abs() < 0.01, "{totals:?}");
    }
}

#[test]
fn where_the_wires_are_not_read_nothing_is_kept() {
    let mut j = Join::new();
    for r in 0..2 {
        j.feed(process(r));
        j.feed(on_gpu(member(r, 2, 1), "0000:1a:00.0"));
        j.feed(Update::Op(Box::new(all_reduce(r, 0, S, Some((S + 10_000, Some(S + MS)))))));
    }
    j.tick(20 * S);
    assert_eq!(j.hardware().wires().count(), 0);
    assert_eq!(j.hardware().windows("node", "0000:1a:00.0").count(), 0);
}

#[test]
fn an_operation_without_gpu_times_marks_its_second_as_a_guess() {
    let mut j = Join::new();
    let gpu = "0000:1a:00.0";
    read(&mut j, gpu, 10 * S, 11 * S, BYTES, &[]);
    for r in 0..2 {
        j.feed(process(r));
        j.feed(on_gpu(member(r, 2, 2), gpu));
        let mut untimed = all_reduce(r, 0, 10 * S + MS, None);
        untimed.timing = crate::model::Timing::Not(crate::model::Untimed::Budget);
        j.feed(Update::Op(Box::new(untimed)));
        let next = Some((12 * S + 10_000, Some(12 * S + MS)));
        j.feed(Update::Op(Box::new(all_reduce(r, 1, 12 * S, next))));
    }
    j.tick(13 * S);
    j.tick(20 * S);
    let windows: Vec<&WireWindow> = j.hardware().windows("node", gpu).collect();
    assert_eq!((windows[0].second, windows[0].estimated), (10, true), "{windows:?}");
    // Both ranks are on one GPU here: what it should move is the sum.
    assert_eq!(windows[0].expected(), Wire { tx_bytes: 2.0 * BYTES, rx_bytes: 2.0 * BYTES });
}

#[test]
fn what_a_host_issued_ahead_is_where_it_ran() {
    let mut j = Join::new();
    let gpu = "0000:1a:00.0";
    for i in 9..20 {
        read(&mut j, gpu, i * S, (i + 1) * S, if (10..15).contains(&i) { 20.0 * BYTES } else { 0.0 }, &[]);
    }
    for r in 0..2 {
        j.feed(process(r));
        j.feed(on_gpu(member(r, 2, 101), if r == 0 { gpu } else { "0000:1b:00.0" }));
    }
    // A hundred are issued at once and run for five seconds, twenty a second; the first and the last one are timed.
    for order in 0..100u64 {
        for r in 0..2 {
            let start = 10 * S + order * 50 * MS + 1_000;
            let timed = order == 0 || order == 99;
            let kernel = timed.then_some((start, Some(start + 49 * MS)));
            let mut op = all_reduce(r, order, 10 * S + order, kernel);
            if !timed {
                op.timing = crate::model::Timing::Not(crate::model::Untimed::Budget);
            }
            j.feed(Update::Op(Box::new(op)));
        }
    }
    j.tick(15 * S);
    j.tick(15 * S + 2 * S);
    j.tick(25 * S);
    let (_, _, totals) = j.hardware().wires().next().expect("the GPU's books");
    let (.., share) = totals.by().next().expect("the all-reduces");
    assert!((share.attributed.tx_bytes / (100.0 * BYTES) - 1.0).abs() < 0.03, "{share:?}");
    assert!(totals.foreign.tx_bytes < 2.0 * BYTES, "{totals:?}");
}

#[test]
fn weak_links_are_those_far_below_their_siblings() {
    let mut j = Join::new();
    let gpu = "0000:1a:00.0";
    for i in 10..20 {
        read(&mut j, gpu, i * S, (i + 1) * S, 4e9, &[1e9, 1e9, 0.0, 0.97e9, 1.02e9]);
    }
    assert_eq!(j.hardware().weak_links("node", gpu, 0), [(2, 0.0)]);
    assert_eq!(j.hardware().weak_links("node", gpu, 30 * S), [], "nothing was read since");
    let mut idle = Join::new();
    read(&mut idle, gpu, S, 2 * S, 10.0, &[10.0, 10.0, 0.0]);
    assert_eq!(idle.hardware().weak_links("node", gpu, 0), []);
}

#[test]
fn a_process_gets_the_names_of_the_pod_that_its_gpus_were_given_to() {
    let labels = |held: &[(&str, &str)], own: &[(&str, &str)], now_s: u64| {
        let mut j = Join::new();
        let Update::Segment(mut s) = process(0) else { unreachable!("a process") };
        s.job.labels = own.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        j.feed(Update::Segment(s));
        j.feed(on_gpu(member(0, 2, 0), "0000:1A:00.0"));
        let gpu = GpuFact {
            gpu: "0000:1a:00.0".to_owned(),
            uuid: Some("GPU-a".to_owned()),
            index: Some(3),
            ..GpuFact::default()
        };
        let holder = |(device, pod): &(&str, &str)| Holder {
            device: (*device).to_owned(),
            pod: (*pod).to_owned(),
            namespace: "ml".to_owned(),
            container: "main".to_owned(),
        };
        let pods = PodsFact { holders: held.iter().map(holder).collect() };
        for fact in [Fact::Gpu(Box::new(gpu)), Fact::Pods(pods)] {
            j.feed(Update::Hardware(Box::new(Reading { host: "node".to_owned(), at_ns: 10 * S, fact })));
        }
        j.tick(now_s * S);
        let named = j.labels(SegmentId(1));
        let get = |k: &str| named.get(k).cloned().unwrap_or_else(|| "-".to_owned());
        ["k8s.pod.name", "k8s.namespace.name", "k8s.container.name"].map(get).join(" ")
    };
    let train = "train-0 ml main";
    assert_eq!(labels(&[("GPU-b", "other"), ("GPU-a", "train-0")], &[], 20), train);
    assert_eq!(
        labels(&[("3", "train-0"), ("GPU-a::1", "train-0")], &[], 20),
        train,
        "by index, and shared with itself"
    );
    assert_eq!(
        labels(&[("GPU-a", "train-0")], &[("k8s.pod.name", "train-0")], 20),
        train,
        "what is not known is added"
    );
    assert_eq!(
        labels(&[("GPU-a::1", "train-0"), ("GPU-a::2", "train-1")], &[], 20),
        "- - -",
        "whose it is is not known"
    );
    assert_eq!(
        labels(&[("GPU-a", "train-0")], &[("k8s.pod.name", "mine")], 20),
        "mine - -",
        "nothing is mixed"
    );
    assert_eq!(labels(&[("GPU-a", "train-0")], &[], 90), "- - -", "a kubelet that is silent says nothing");
    assert_eq!(labels(&[("MIG-a", "train-0")], &[], 20), "- - -");
}

/// A job on two nodes with two ranks each, of which one node is seen: from 10 s to 14 s 100 ring all-reduces a second,
/// while two ports move so many times what these should.
struct OnTwoNodes {
    times: f64,
    algo: Algo,
    /// True where ports of RDMA are counted, false where interfaces are.
    rdma: bool,
    /// Ranks that are seen here.
    here: u32,
    gpu: &'static str,
    lane: Lane,
}

impl Default for OnTwoNodes {
    fn default() -> Self {
        let lane = Lane::Collective;
        OnTwoNodes { times: 1.0, algo: Algo::Ring, rdma: true, here: 2, gpu: "NVIDIA H200", lane }
    }
}

impl OnTwoNodes {
    /// 2 (n - 1) / n of 4 MiB, for four ranks.
    const A_NODE: f64 = 1.5 * BYTES;

    fn counters(&self, j: &mut Join, at_ns: u64, bytes: u64) {
        for nic in 0..2 {
            // One of them carries a third.
            let own = Some(if nic == 0 { bytes / 3 } else { bytes - bytes / 3 });
            let fact = if self.rdma {
                Fact::Port(PortFact {
                    device: format!("mlx5_{nic}"),
                    port: 1,
                    up: Some(true),
                    tx_bytes: own,
                    rx_bytes: own,
                    ..PortFact::default()
                })
            } else {
                Fact::Interface(InterfaceFact {
                    interface: format!("eth{nic}"),
                    device: Some(format!("0000:0{nic}:00.0")),
                    tx_bytes: own,
                    rx_bytes: own,
                    ..InterfaceFact::default()
                })
            };
            j.feed(Update::Hardware(Box::new(Reading { host: "node".to_owned(), at_ns, fact })));
        }
        // A bridge over both moves the same again, and is no hardware.
        let bridge = InterfaceFact {
            interface: "br0".to_owned(),
            tx_bytes: Some(bytes * 2),
            rx_bytes: Some(bytes * 2),
            ..InterfaceFact::default()
        };
        let fact = Fact::Interface(bridge);
        j.feed(Update::Hardware(Box::new(Reading { host: "node".to_owned(), at_ns, fact })));
    }

    fn run(&self, mut j: Join) -> Join {
        let gpu =
            GpuFact { gpu: "0000:1a:00.0".to_owned(), name: Some(self.gpu.to_owned()), ..GpuFact::default() };
        let fact = Fact::Gpu(Box::new(gpu));
        j.feed(Update::Hardware(Box::new(Reading { host: "node".to_owned(), at_ns: 9 * S, fact })));
        for r in 0..self.here {
            j.feed(process(r));
            let Update::Comm(c) = on_gpu(member(r, 4, 400), "0000:1a:00.0") else { unreachable!("a member") };
            j.feed(Update::Comm(CommRecord { nodes: Some(2), ..c }));
        }
        let mut counted = 1_000.0;
        for tick in 90..170u64 {
            let at = tick * S / 10;
            self.counters(&mut j, at, counted as u64);
            let runs = (100..140).contains(&tick);
            counted += if runs { 10.0 * Self::A_NODE * self.times } else { 300.0 };
            for i in 0..if runs { 10 } else { 0 } {
                let (order, issued) = ((tick - 100) * 10 + i, at + i * 10 * MS);
                for r in 0..self.here {
                    let kernel = Some((issued + 10_000, Some(issued + 2 * MS)));
                    let mut op = all_reduce(r, order, issued, kernel);
                    (op.algo, op.lane) = (Some(self.algo), self.lane);
                    j.feed(Update::Op(Box::new(op)));
                }
            }
            j.tick(at + S / 10);
        }
        j.tick(30 * S);
        j
    }

    /// Expected, attributed and foreign bytes sent, all as a share of what should have been; and what is unknown.
    fn books(&self) -> (f64, f64, f64, f64) {
        let j = self.run(Join::new());
        let (host, totals) = j.hardware().networks().next().expect("a network");
        assert_eq!(host, "node");
        let all = 400.0 * Self::A_NODE;
        let share = totals.by().next().map(|(.., s)| *s).unwrap_or_default();
        let of = |w: Wire| (w.tx_bytes / all * 1e3).round() / 1e3;
        (of(share.expected), of(share.attributed), of(totals.foreign), of(totals.unknown))
    }
}

#[test]
fn what_crosses_between_nodes_is_held_against_their_ports() {
    let sound = OnTwoNodes { times: 1.04, ..OnTwoNodes::default() };
    assert_eq!(sound.books(), (1.0, 1.04, 0.0, 0.0), "headers are the network's own");
    let j = sound.run(Join::new());
    let seconds: Vec<(u64, Option<f64>)> =
        j.hardware().network_windows("node").map(|w| (w.second, w.efficiency())).collect();
    assert!(seconds.len() >= 7, "{seconds:?}");
    for (second, efficiency) in seconds {
        assert_eq!(efficiency.is_some(), (10..14).contains(&second), "second {second}");
        assert!(efficiency.is_none_or(|e| (e - 1.0 / 1.04).abs() < 0.01), "{efficiency:?}");
    }
    let (expected, attributed, foreign, _) = OnTwoNodes { times: 1.5, ..OnTwoNodes::default() }.books();
    assert_eq!((expected, attributed, foreign), (1.0, 1.0, 0.5), "half as much again is somebody else's");
}

#[test]
fn without_rdma_the_interfaces_of_hardware_are_what_is_read() {
    assert_eq!(OnTwoNodes { rdma: false, ..OnTwoNodes::default() }.books(), (1.0, 1.0, 0.0, 0.0));
}

#[test]
fn what_is_not_known_of_a_network_is_not_made_up() {
    let unknown = |o: OnTwoNodes| {
        let (expected, attributed, foreign, unknown) = o.books();
        assert_eq!((expected, attributed, foreign), (0.0, 0.0, 0.0));
        assert!((unknown - 1.0).abs() < 1e-3, "{unknown}");
    };
    unknown(OnTwoNodes { algo: Algo::Nvls, ..OnTwoNodes::default() });
    // Both of what NCCL takes for nodes are here.
    unknown(OnTwoNodes { here: 4, ..OnTwoNodes::default() });
    // NVLink may carry it from host to host.
    unknown(OnTwoNodes { gpu: "NVIDIA GB200", ..OnTwoNodes::default() });
    // Of a ring it does not matter that a rank is not seen; of transfers between all it does.
    assert_eq!(OnTwoNodes { here: 1, ..OnTwoNodes::default() }.books().0, 1.0);
    // Who sees several hosts gets a part of what they do.
    let mut far = Join::new();
    far.observe_from(crate::join::ClockPair { mono_ns: 0, unix_ns: 1_795_244_764_000_000_000 });
    assert_eq!(OnTwoNodes::default().run(far).hardware().networks().count(), 0);
}

#[test]
fn transfers_cross_where_the_other_rank_is_elsewhere() {
    let to =
        |peer: u32| OnTwoNodes { lane: Lane::Send(Rank(peer)), times: 2.0 / 1.5, ..OnTwoNodes::default() };
    // Both ranks here send 4 MiB to rank 3.
    let (expected, attributed, ..) = to(3).books();
    assert_eq!((expected, attributed), (1.333, 1.333));
    let (expected, _, foreign, _) = to(1).books();
    assert_eq!((expected, foreign), (0.0, 1.333), "rank 1 is here: who uses the network is somebody else");
}

#[test]
fn a_counter_that_begins_anew_or_a_port_that_comes_is_a_gap_and_no_traffic() {
    let mut j = Join::new();
    let mut read = |s: u64, ports: &[u64]| {
        for (nic, n) in ports.iter().enumerate() {
            let port = PortFact {
                device: format!("mlx5_{nic}"),
                port: 1,
                tx_bytes: Some(*n),
                rx_bytes: Some(*n),
                ..PortFact::default()
            };
            let fact = Fact::Port(port);
            j.feed(Update::Hardware(Box::new(Reading { host: "node".to_owned(), at_ns: s * S, fact })));
        }
    };
    for (s, ports) in [
        (10, &[5_000][..]),
        (11, &[6_000]),
        (12, &[100]),
        (13, &[300]),
        (14, &[400, 1 << 40]),
        (15, &[500, 1 << 40]),
        (16, &[0]),
    ] {
        read(s, ports);
    }
    let totals = j.hardware().networks().next().expect("a network").1;
    assert_eq!(totals.measured.tx_bytes, 1_000.0 + 200.0 + 100.0);
}
