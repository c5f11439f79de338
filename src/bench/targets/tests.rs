use super::*;
use crate::bench::Report;
use crate::bench::fixtures::{report, settings};

fn targets(text: &str) -> Targets {
    Targets::from_yaml(text, "t.yaml").expect("targets")
}

fn link(gb_per_s: Option<f64>) -> Link {
    Link { gb_per_s, source: "NVML says nothing".to_owned() }
}

fn judged(text: &str, reports: &[Report], gb_per_s: Option<f64>) -> Vec<TargetRow> {
    judge(&targets(text), reports, 2, link(gb_per_s), None).rows
}

#[test]
fn the_sample_has_the_targets_of_the_field() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("config/targets.yaml");
    let sample = Targets::load(&path).unwrap();
    let (kb, mb) = (1024, 1024 * 1024);
    let of = |t: &Target| (t.collective, t.size_bytes, t.goals[0]);
    let about = |ns| Goal::AboutLatency { ns, tolerance: 0.2 };
    assert_eq!(
        sample.all().iter().map(of).collect::<Vec<_>>(),
        [
            (Collective::AllReduce, 100 * kb, Goal::MaxLatency { ns: 5e5 }),
            (Collective::AllReduce, 10 * mb, about(1e6)),
            (Collective::AllReduce, 100 * mb, about(1e7)),
            (Collective::Broadcast, 100 * mb, about(5e6)),
            (Collective::AllReduce, 1024 * mb, Goal::MinLinkShare { share: 0.9 }),
        ]
    );
    assert!(sample.all().iter().all(|t| t.dtype == DType::Float && t.goals.len() == 1));
}

#[test]
fn a_target_says_what_it_is_for_and_what_it_asks() {
    let t = targets(
        "link: 450 GB/s\ntolerance: 10 %\ndtype: bf16\ntargets:\n- operation: all_gather\n  size: 1.5G\n  ranks: 8\n  \
         nodes: 1-2\n  max_latency: 2 ms\n  about_latency: 1ms\n  min_algbw: 100 GB/s\n  min_busbw: 80% of link\n\
         - {operation: alltoall, size: 4096, dtype: half, about_latency: 7 us, tolerance: 50 %, min_busbw: 1 GB/s}\n",
    );
    assert_eq!(t.link_gb_per_s, Some(450.0));
    let (first, second) = (&t.all()[0], &t.all()[1]);
    assert_eq!((first.line, first.size_bytes, first.dtype), (5, 3 << 29, DType::Bfloat16));
    assert_eq!((first.ranks, first.nodes), (Some(Span { min: 8, max: 8 }), Some(Span { min: 1, max: 2 })));
    assert_eq!(
        first.goals,
        [
            Goal::MaxLatency { ns: 2e6 },
            Goal::AboutLatency { ns: 1e6, tolerance: 0.1 },
            Goal::MinAlgbw { gb_per_s: 100.0 },
            Goal::MinLinkShare { share: 0.8 },
        ]
    );
    assert_eq!(
        (second.collective, second.size_bytes, second.dtype),
        (Collective::AllToAll, 4096, DType::Half)
    );
    assert_eq!(
        second.goals,
        [Goal::AboutLatency { ns: 7e3, tolerance: 0.5 }, Goal::MinBusbw { gb_per_s: 1.0 }]
    );
}

#[test]
fn errors_name_file_line_and_remedy() {
    for (text, parts) in [
        ("", ["t.yaml:1: ", ""]),
        ("targets: []\n", ["t.yaml:1: there are no targets", "max_latency"]),
        ("links: 3\ntargets: []\n", ["t.yaml:1: unknown field `links`", "link"]),
        ("link: 450\ntargets:\n", ["t.yaml:", ""]),
        (
            "link: 450\ntargets:\n- {operation: reduce, size: 1K, max_latency: 1 ms}\n",
            ["t.yaml:1: link: \"450\" is no bandwidth", "450 GB/s"],
        ),
        (
            "targets:\n- operation: reduce\n  size: 1K\n  max_latency: 5\n",
            ["t.yaml:4: max_latency: \"5\" is no time", "0.5 ms"],
        ),
        (
            "targets:\n- operation: allreduce\n  size: 1K\n  max_latency: 5 us\n",
            ["t.yaml:2: operation: \"allreduce\" is none of", "all_reduce"],
        ),
        (
            "targets:\n- operation: reduce\n  size: large\n  max_latency: 5 us\n",
            ["t.yaml:3: size: \"large\" is no size", "32K"],
        ),
        (
            "targets:\n- operation: reduce\n  size: 1K\n  ranks: 8-2\n  max_latency: 5 us\n",
            ["t.yaml:4: ranks: \"8-2\" is no number", "2-8"],
        ),
        (
            "targets:\n- operation: reduce\n  size: 1K\n",
            ["t.yaml:2: the target asks for nothing", "min_busbw"],
        ),
        (
            "targets:\n- operation: reduce\n  size: 1K\n  min_busbw: 1 GB/s\n  tolerance: 5 %\n",
            ["t.yaml:5: tolerance belongs to about_latency", "leave it out"],
        ),
        (
            "targets:\n- operation: reduce\n  max_latency: 5 us\n",
            ["t.yaml:2: the target has no size", "size: 100 KB"],
        ),
        (
            "targets:\n- operation: reduce\n  size: 1K\n  latency: 5 us\n",
            ["t.yaml:4: unknown field `latency`", "max_latency"],
        ),
        (
            "targets:\n- size: 1K\n  max_latency: 5 us\n",
            ["t.yaml:2: the target has no operation", "all_reduce"],
        ),
        ("targets:\n- operation: [reduce]\n", ["t.yaml:2: ", ""]),
        (
            "targets:\n- operation: reduce\n  size: \"\\e[31m\"\n  max_latency: 5 us\n",
            ["t.yaml:3: size: ", ""],
        ),
        ("dtype: float8\ntargets: []\n", ["t.yaml:1: dtype: \"float8\" is none of", "bfloat16"]),
    ] {
        let said = Targets::from_yaml(text, "t.yaml").unwrap_err().to_string();
        assert!(parts.iter().all(|p| said.contains(p)), "{text}\n{said}");
        assert!(!said.contains(['\n', '\u{1b}']), "{said:?}");
    }
    let many = "- {operation: reduce, size: 1K, max_latency: 1 s}\n".repeat(257);
    let said = Targets::from_yaml(&format!("targets:\n{many}"), "t.yaml").unwrap_err().to_string();
    assert_eq!(said, "t.yaml:258: more than 256 targets; split the file");
    let missing = Targets::load(Path::new("/nowhere/t.yaml")).unwrap_err().to_string();
    assert!(missing.contains("/nowhere/t.yaml") && missing.contains("config/targets.yaml"), "{missing}");
}

#[test]
fn a_plan_has_one_run_for_each_operation_and_type() {
    let t = targets(
        "targets:\n- {operation: all_reduce, size: 1M, max_latency: 1 s}\n\
         - {operation: broadcast, size: 1K, max_latency: 1 s}\n\
         - {operation: all_reduce, size: 1K, min_algbw: 1 GB/s}\n\
         - {operation: all_reduce, size: 1M, min_busbw: 1 GB/s}\n\
         - {operation: all_reduce, size: 2K, dtype: half, max_latency: 1 s}\n\
         - {operation: reduce, size: 2K, ranks: 4-8, max_latency: 1 s}\n\
         - {operation: all_gather, size: 2K, nodes: 2, max_latency: 1 s}\n\
         - {operation: all_gather, size: 8, max_latency: 1 s}\n",
    );
    let plan = |nodes| -> Vec<(Collective, DType, Vec<u64>)> {
        let runs = t.plan(&settings(), 2, nodes);
        assert!(runs.iter().all(|r| Some(&r.max_bytes) == r.sizes.last() && r.min_bytes == r.sizes[0]));
        runs.into_iter().map(|r| (r.collective, r.dtype, r.sizes)).collect()
    };
    let mut runs = vec![
        (Collective::AllReduce, DType::Float, vec![1024, 1 << 20]),
        (Collective::Broadcast, DType::Float, vec![1024]),
        (Collective::AllReduce, DType::Half, vec![2048]),
    ];
    assert_eq!(plan(Some(1)), runs);
    // Until something was measured nobody knows the nodes.
    runs.push((Collective::AllGather, DType::Float, vec![2048]));
    assert_eq!((plan(None), plan(Some(2))), (runs.clone(), runs));
}

#[test]
fn limits_are_reached_or_missed_by_so_much() {
    // 1 MiB in 100 us: 10.48576 GB/s.
    let reports = [report(Collective::AllReduce, &[(1 << 20, &[90.0, 100.0, 500.0])])];
    for (goal, verdict, reason) in [
        ("max_latency: 100 us", Verdict::Pass, None),
        ("max_latency: 80 us", Verdict::Fail, Some("25 % too slow")),
        ("max_latency: 99.99 us", Verdict::Fail, Some("less than 0.1 % too slow")),
        ("about_latency: 84 us", Verdict::Pass, None),
        ("about_latency: 80 us, tolerance: 24 %", Verdict::Fail, Some("0.8 % too slow")),
        ("about_latency: 10 ms", Verdict::Pass, None),
        ("min_algbw: 10 GB/s", Verdict::Pass, None),
        ("min_algbw: 20 GB/s", Verdict::Fail, Some("47.6 % too little")),
        ("min_busbw: 10485 MB/s", Verdict::Pass, None),
        ("min_busbw: 90 % of link", Verdict::Pass, None),
        ("min_busbw: 100 % of link", Verdict::Fail, Some("4.7 % too little")),
    ] {
        let text = format!("targets:\n- {{operation: all_reduce, size: 1M, {goal}}}\n");
        let rows = judged(&text, &reports, Some(11.0));
        assert_eq!((rows[0].verdict, rows[0].reason.as_deref()), (verdict, reason), "{goal}");
        assert!(rows[0].measured.is_some() && rows[0].limit.is_some(), "{goal}");
    }
}

#[test]
fn what_is_not_known_is_neither_passed_nor_failed() {
    let text = "targets:\n\
        - {operation: all_reduce, size: 1M, max_latency: 1 s, min_busbw: 90 % of link}\n\
        - {operation: broadcast, size: 1M, max_latency: 1 s}\n\
        - {operation: all_reduce, size: 1M, ranks: 8, max_latency: 1 s}\n\
        - {operation: all_reduce, size: 1M, nodes: 2-4, max_latency: 1 s}\n\
        - {operation: all_reduce, size: 2, max_latency: 1 s}\n";
    let reports = [report(Collective::AllReduce, &[(1 << 20, &[100.0])])];
    let j = judge(&targets(text), &reports, 2, link(None), Some("not measured: rank 1 is lost"));
    let said = |i: usize| (j.rows[i].verdict, j.rows[i].reason.clone().unwrap_or_default());
    assert_eq!(j.rows[0].verdict, Verdict::Pass);
    assert_eq!(said(1), (Verdict::Unknown, "the link is not known".to_owned()));
    assert_eq!((j.rows[1].limit, j.rows[1].measured.is_some()), (None, true));
    assert_eq!(said(2), (Verdict::Unknown, "not measured: rank 1 is lost".to_owned()));
    assert_eq!(said(3), (Verdict::Skipped, "for 8 ranks; this run has 2".to_owned()));
    assert_eq!(said(4), (Verdict::Skipped, "for 2-4 nodes; this run has 1".to_owned()));
    assert_eq!(said(5), (Verdict::Skipped, "too small for float on 2 ranks".to_owned()));
    assert!(j.rows[2..].iter().all(|r| r.measured.is_none()));
    let counts = [Verdict::Pass, Verdict::Fail, Verdict::Unknown, Verdict::Skipped].map(|v| j.count(v));
    assert_eq!(counts, [1, 0, 2, 3]);
}

#[test]
fn wrong_data_fail_and_several_rounds_have_a_median() {
    let text = "targets:\n- {operation: all_reduce, size: 1M, max_latency: 150 us}\n";
    let round = |us| report(Collective::AllReduce, &[(1 << 20, &[us])]);
    let rows = judged(text, &[round(100.0), round(900.0), round(140.0)], None);
    assert_eq!((rows[0].verdict, rows[0].measured), (Verdict::Pass, Some(140e3)));
    let mut wrong = round(100.0);
    wrong.sizes[0].out_of_place.wrong = Some(3);
    let rows = judged(text, &[round(100.0), wrong], None);
    assert_eq!((rows[0].verdict, rows[0].reason.as_deref()), (Verdict::Fail, Some("3 wrong elements")));
    // A time of nothing is no time.
    let rows = judged(text, &[round(0.0)], None);
    assert_eq!((rows[0].verdict, rows[0].measured), (Verdict::Unknown, None));
}

#[test]
fn a_size_is_what_its_shape_makes_of_it() {
    // 100 KB in parts for three ranks are not whole: nccl-tests rounds down, and so does the measurement.
    let t = targets("targets:\n- {operation: all_gather, size: 100 KB, max_latency: 1 s}\n");
    let shape = Collective::AllGather.shape(102_400, DType::Float, 3).unwrap();
    assert_eq!(shape.size_bytes, 102_384);
    let report = report(Collective::AllGather, &[(shape.size_bytes, &[5.0])]);
    let rows = judge(&t, &[report], 3, link(None), None).rows;
    assert_eq!((rows[0].verdict, rows[0].measured), (Verdict::Pass, Some(5e3)));
}

#[test]
fn detection_expects_what_targets_of_latency_state() {
    let t = targets(
        "targets:\n- {operation: all_reduce, size: 10M, ranks: 8, max_latency: 2 ms, about_latency: 1 ms}\n\
         - {operation: all_reduce, size: 10M, ranks: 8, dtype: half, max_latency: 1.5 ms}\n\
         - {operation: all_reduce, size: 20M, ranks: 2-4, max_latency: 3 ms}\n\
         - {operation: all_reduce, size: 30M, nodes: 2, max_latency: 3 ms}\n\
         - {operation: reduce, size: 30M, min_busbw: 3 GB/s}\n\
         - {operation: broadcast, size: 30M, max_latency: 3 ms}\n",
    );
    let all = t.expectations();
    let of = |c: Collective, ranks| -> Vec<(u64, f64)> {
        let own = all.iter().filter(|e| e.collective == c && e.ranks == ranks);
        own.map(|e| (e.size_bytes >> 20, e.time_ns / 1e6)).collect()
    };
    assert_eq!(of(Collective::AllReduce, 8), [(10, 1.5)]);
    assert_eq!(
        (of(Collective::AllReduce, 2), of(Collective::AllReduce, 4)),
        (vec![(20, 3.0)], vec![(20, 3.0)])
    );
    assert!(of(Collective::AllReduce, 5).is_empty() && of(Collective::Reduce, 8).is_empty());
    for ranks in [2, 7, 1024] {
        assert_eq!(of(Collective::Broadcast, ranks), [(30, 3.0)]);
    }
}
