use super::*;
use crate::bench::fixtures::report;

/// Ten times around one in us, as many times longer as `by`.
fn around(us: f64, by: f64) -> Vec<f64> {
    (0..10).map(|i| us * by * (1.0 + f64::from(i) / 1000.0)).collect()
}

fn all_reduce(repeats_us: &[f64]) -> Report {
    report(Collective::AllReduce, &[(1 << 20, repeats_us)])
}

/// One round for each time.
fn rounds(times_us: &[f64]) -> Vec<Report> {
    times_us.iter().map(|us| all_reduce(&[*us])).collect()
}

fn compared(old: Vec<Report>, new: Vec<Report>) -> Changes {
    compare(&Measurements::new(old), &new, "old.json", 0.05)
}

#[test]
fn a_change_counts_beyond_the_threshold_and_with_confidence() {
    let noisy: Vec<f64> = (0..10).map(|i| if i % 2 == 0 { 60.0 } else { 160.0 }).collect();
    for (new, trend) in [
        (around(100.0, 1.10), Trend::Regression),
        (around(100.0, 0.90), Trend::Improvement),
        (around(100.0, 1.04), Trend::WithinThreshold),
        (around(100.0, 1.00), Trend::WithinThreshold),
        (noisy, Trend::NotConfident),
        // Four of each can say it, three cannot.
        (around(100.0, 1.10)[..4].to_vec(), Trend::Regression),
    ] {
        let c = compared(rounds(&around(100.0, 1.0)), rounds(&new));
        let row = &c.rows[0];
        assert_eq!((c.rows.len(), row.trend), (1, trend), "{row:?}");
        assert!(row.confidence.is_some() && row.reason.is_none(), "{row:?}");
        assert_eq!((c.differences.len(), c.not_measured, c.count(trend)), (0, 0, 1));
    }
    let row = &compared(rounds(&around(100.0, 1.0)), rounds(&around(100.0, 1.10))).rows[0];
    let (low, high) = row.interval.unwrap();
    assert!((row.change.unwrap() - 0.10).abs() < 1e-9 && low < 0.10 && 0.10 < high, "{row:?}");
}

#[test]
fn too_few_rounds_are_unknown_and_say_so() {
    for (old, new, said) in [
        (10, 1, "samples: 10 saved, 1 new;"),
        (1, 10, "samples: 1 saved, 10 new;"),
        (3, 3, "3 and 3 samples give 90 % at most"),
    ] {
        let c = compared(rounds(&around(100.0, 1.0)[..old]), rounds(&around(100.0, 2.0)[..new]));
        let row = &c.rows[0];
        assert_eq!(row.trend, Trend::Unknown);
        let reason = row.reason.as_ref().unwrap();
        assert!(reason.starts_with(said) && reason.contains("--rounds"), "{reason}");
        // The change is known, how sure it is may not be.
        assert!(row.change.is_some());
        assert_eq!(row.confidence.is_some(), old == new);
    }
}

#[test]
fn what_is_not_alike_is_not_compared_and_says_why() {
    let old = || all_reduce(&around(100.0, 1.0));
    let new = |change: fn(&mut Report)| {
        let mut report = old();
        change(&mut report);
        report
    };
    for (new, reason) in [
        (report(Collective::Reduce, &[(1 << 20, &[1.0])]), "reduce, and the saved file has all_reduce"),
        (
            new(|r| r.environment = crate::bench::fixtures::environment(4)),
            "ranks: 4, and the saved file has ranks: 2",
        ),
        (new(|r| r.environment.ranks[1].host = "b".to_owned()), "nodes: 2, and the saved file has nodes: 1"),
        (new(|r| r.settings.dtype = DType::Half), "half, and the saved file has float"),
        (new(|r| r.settings.redop = RedOp::Max), "max, and the saved file has sum"),
        (
            new(|r| r.settings.graph = Some(4)),
            "graphs of 4 operations, groups of 1, and the saved file has groups of 1",
        ),
        (new(|r| r.sizes[0].size_bytes = 4), "4 bytes, and the saved file has 1048576 bytes"),
    ] {
        let c = compared(vec![old()], vec![new]);
        let row = &c.rows[0];
        assert_eq!((row.trend, row.reason.as_deref()), (Trend::NotComparable, Some(reason)));
        assert_eq!((row.change, row.old_ns, c.not_measured), (None, None, 1));
    }
}

#[test]
fn versions_gpus_and_variables_are_compared_and_named() {
    let mut new = rounds(&around(100.0, 1.0));
    for r in &mut new {
        r.environment.nccl_version = 23_004;
        r.environment.ranks[1].name = "Other".to_owned();
        r.environment.variables.insert("NCCL_ALGO".to_owned(), "Tree".to_owned());
        r.settings.iters = 100;
    }
    let c = compared(rounds(&around(100.0, 1.0)), new);
    assert_eq!(c.rows[0].trend, Trend::WithinThreshold);
    let named = |d: &Difference| format!("{}: {} -> {}", d.what, d.old, d.new);
    assert_eq!(
        c.differences.iter().map(named).collect::<Vec<_>>(),
        ["NCCL: 2.28.9 -> 2.30.4", "GPU: GPU -> GPU, Other", "--iters: 1 -> 100", "NCCL_ALGO: - -> Tree"]
    );
}

#[test]
fn of_several_rounds_each_is_one_sample() {
    // Within a round all repeats are alike, so that they seem to be sure of what differs between rounds.
    let round = |us: f64| all_reduce(&around(us, 1.0));
    let old = Measurements::new([100.0, 120.0, 140.0, 110.0].map(round).to_vec());
    let new = [111.0, 133.0, 155.0, 122.0].map(round);
    let row = &compare(&old, &new, "old.json", 0.05).rows[0];
    assert_eq!((row.old_samples, row.new_samples, row.trend), (4, 4, Trend::NotConfident), "{row:?}");
}
