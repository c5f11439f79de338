use super::simulated::{Conditions, Simulated};
use super::*;
use crate::tune::Rules;
use ringwatch_wire::cost_log::CostRecord;

const ALL_REDUCE: usize = 4;
const KIB: u64 = 1024;
const MIB: u64 = 1024 * KIB;
const SIZES: [u64; 5] = [64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB];
const RING: usize = 1;
const LL128: usize = 1;
const SIMPLE: usize = 2;

fn space(environments: &[Option<u32>]) -> Space {
    let mut costs_us = [-1.0; 21];
    for (entry, cost) in [(0, 20.0), (2, 21.0), (3, 15.0), (4, 12.0), (5, 14.0)] {
        costs_us[entry] = cost;
    }
    let of_size = |bytes: &u64| {
        candidates(
            &CostRecord { collective: ALL_REDUCE, bytes: *bytes, ranks: 4, nodes: 1, costs_us },
            &[8, 16, 32],
        )
    };
    Space {
        collective: ALL_REDUCE,
        sizes: SIZES.to_vec(),
        candidates: SIZES.iter().map(of_size).collect(),
        environments: environments.to_vec(),
        ranks: 4,
        nodes: 1,
    }
}

fn goal(minutes: u64) -> SearchGoal {
    SearchGoal { confidence: 0.99, operations: 1, deadline: Duration::from_secs(60 * minutes) }
}

fn searched(machine: &mut Simulated, space: &Space, goal: &SearchGoal) -> SearchResult {
    let Ok(outcome) = search(machine, space, goal, &mut |_| {});
    outcome
}

fn around() -> MeasuredOn {
    MeasuredOn {
        nccl: "2.28.9".to_owned(),
        gpus: "4 x GPU".to_owned(),
        confidence: "99 %".to_owned(),
        variables: vec!["NCCL_NVLS_ENABLE=0".to_owned()],
    }
}

fn is(c: &Conditions, algorithm: usize, protocol: usize) -> bool {
    c.entry == Selection { algorithm: Some(algorithm), protocol: Some(protocol) }
}

/// From 4 MiB on, 32 channels need the variable and are faster: with LL128 at 4 MiB, with SIMPLE at 16 MiB.
fn like_h100(c: &Conditions) -> f64 {
    let base = 10.0 + c.bytes as f64 / 1e5;
    let is_raised = c.min_channels.is_some() && c.channels.is_none_or(|n| n >= 32);
    let factor = match c.bytes {
        _ if c.channels == Some(8) => 1.5,
        b if b == 4 * MIB && is_raised && is(c, RING, LL128) => 0.85,
        b if b == 4 * MIB && is_raised => 0.92,
        b if b == 16 * MIB && is_raised && is(c, RING, SIMPLE) => 0.95,
        _ if is(c, 0, 0) || is(c, 0, SIMPLE) => 1.3,
        _ => 1.0,
    };
    base * factor
}

#[test]
fn the_best_entry_of_each_size_is_found_with_the_variable_that_it_needs() {
    for seed in 0..20 {
        let mut machine = Simulated::new(&SIZES, like_h100, (0.02, 0.006), seed);
        let space = space(&[None, Some(32)]);
        let outcome = searched(&mut machine, &space, &goal(60));
        assert_eq!(outcome.min_channels, Some(32), "seed {seed}");
        let verdicts: Vec<bool> = outcome.sizes.iter().map(|s| s.verdict.has_rule()).collect();
        assert_eq!(verdicts, [false, false, false, true, true], "seed {seed}: {:?}", outcome.sizes);
        let entry = |i: usize| outcome.sizes[i].choice.entry;
        assert_eq!(entry(3), Selection { algorithm: Some(RING), protocol: Some(LL128) }, "seed {seed}");
        assert_eq!(entry(4), Selection { algorithm: Some(RING), protocol: Some(SIMPLE) }, "seed {seed}");
        assert_eq!(outcome.harmed().count(), 0, "seed {seed}");
        assert!(outcome.sizes[3].evidence.environment.ratio() < 0.95, "the variable alone is measured");
    }
}

#[test]
fn rules_are_written_with_their_evidence_and_mean_what_was_measured() {
    let mut machine = Simulated::new(&SIZES, like_h100, (0.02, 0.006), 1);
    let space = space(&[None, Some(32)]);
    let outcome = searched(&mut machine, &space, &goal(60));
    let text = rule_file(&[(space, outcome)], &around());
    let rules = Rules::from_yaml(&text, "found").expect("rules");
    let four = &rules.all()[0];
    // The geometric middle of 1 and 4 MiB, and of 4 and 16 MiB.
    assert_eq!((four.bytes.min, four.bytes.max), (2 * MIB + 1, 8 * MIB), "{text}");
    assert_eq!((four.ranks, four.nodes), (Range { min: 4, max: 4 }, Range { min: 1, max: 1 }));
    assert_eq!(rules.all()[1].bytes.max, 16 * MIB, "nothing is known beyond the largest size");
    for part in [
        "environment:\n  NCCL_MIN_NCHANNELS: 32\nrules:\n",
        "# Set for the default and the rules alike: NCCL_NVLS_ENABLE=0.\n",
        "4194304 bytes: default ",
        ", ratio 0.8",
        " with 99 % confidence, ",
        " rounds; the variable alone: ratio 0.9",
        "NCCL 2.28.9, 4 x GPU, 4 ranks on 1 node",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(rules.compile().is_ok_and(|c| c.rows() == 2));
}

#[test]
fn a_choice_that_fits_several_sizes_is_one_rule() {
    fn fast(c: &Conditions) -> f64 {
        if c.bytes >= MIB && is(c, 0, 0) && c.channels == Some(16) { 50.0 } else { 100.0 }
    }
    let mut machine = Simulated::new(&SIZES, fast, (0.01, 0.003), 5);
    let space = space(&[None]);
    let outcome = searched(&mut machine, &space, &goal(60));
    let text = rule_file(&[(space, outcome)], &around());
    let rules = Rules::from_yaml(&text, "found").expect("rules");
    assert_eq!(rules.all().len(), 1, "{text}");
    assert_eq!(rules.all()[0].bytes, Range { min: 512 * KIB + 1, max: 16 * MIB });
    assert_eq!(text.matches(" bytes: default ").count(), 3, "{text}");
    assert!(!text.contains("NCCL_MIN_NCHANNELS"), "{text}");
}

#[test]
fn pure_noise_gives_no_rules_more_often_than_promised() {
    // Noise that is much larger than the gain that counts, so that the best of the candidates always look promising.
    const SEARCHES: u64 = 1000;
    let space = space(&[None, Some(32)]);
    let mut tested = 0;
    let wrong = (0..SEARCHES).filter(|seed| {
        let mut machine = Simulated::new(&SIZES, |_| 100.0, (0.05, 0.06), *seed);
        let outcome = searched(&mut machine, &space, &goal(600));
        tested += usize::from(outcome.sizes.iter().any(|s| s.choice != TunerChoice::NONE));
        outcome.has_rules()
    });
    let wrong = wrong.count();
    // 1 % of 1000 are 10; 20 or more come by chance in one of 300 such tests.
    assert!(wrong < 20, "{wrong} of {SEARCHES} searches wrote a rule");
    assert!(tested > 900, "only {tested} searches had something to test");
}

#[test]
fn a_gain_below_two_per_cent_is_not_written_however_sure_it_is() {
    fn a_little(c: &Conditions) -> f64 {
        if is(c, RING, LL128) { 98.7 } else { 100.0 }
    }
    let space = space(&[None]);
    for seed in 0..20 {
        let mut machine = Simulated::new(&SIZES, a_little, (0.002, 0.001), seed);
        assert!(!searched(&mut machine, &space, &goal(60)).has_rules(), "seed {seed}");
    }
}

#[test]
fn what_a_loaded_tuner_costs_is_undone_or_reported() {
    fn tuned_is_slow(c: &Conditions) -> f64 {
        match c.bytes {
            b if b == MIB && is(c, RING, LL128) && c.channels == Some(16) => 80.0,
            b if b == 64 * KIB && is(c, RING, SIMPLE) => 100.0,
            b if (b == 64 * KIB || b == 256 * KIB) && c.has_tuner => 108.0,
            _ => 100.0,
        }
    }
    let mut machine = Simulated::new(&SIZES, tuned_is_slow, (0.01, 0.003), 2);
    let space = space(&[None]);
    let outcome = searched(&mut machine, &space, &goal(60));
    let verdicts: Vec<RuleVerdict> = outcome.sizes.iter().map(|s| s.verdict).collect();
    assert_eq!(verdicts[..3], [RuleVerdict::Guard, RuleVerdict::NoCandidate, RuleVerdict::Gain]);
    let harmed: Vec<u64> = outcome.harmed().map(|s| s.bytes).collect();
    assert_eq!(harmed, [256 * KIB]);
    let text = rule_file(&[(space, outcome)], &around());
    assert!(text.contains("any loaded tuner without this rule: ratio 1.08"), "{text}");
}

#[test]
fn a_search_respects_its_time_and_says_so() {
    let space = space(&[None, Some(32)]);
    for seconds in [10, 60, 150] {
        let mut machine = Simulated::new(&SIZES, like_h100, (0.02, 0.006), 4);
        let goal = SearchGoal { deadline: Duration::from_secs(seconds), ..goal(0) };
        let outcome = searched(&mut machine, &space, &goal);
        // A batch that was begun is ended; each of the three stages measures at least one.
        assert!(machine.elapsed < Duration::from_secs(seconds + 20), "{seconds} s: {:?}", machine.elapsed);
        assert!(outcome.notes.iter().any(|n| n.contains("the time limit ended")), "{:?}", outcome.notes);
    }
}

#[test]
fn candidates_that_fail_are_left_out_and_named() {
    let mut machine = Simulated::new(&SIZES, like_h100, (0.01, 0.003), 6);
    machine.fails = Some(32);
    let space = space(&[None, Some(32)]);
    let outcome = searched(&mut machine, &space, &goal(60));
    assert_eq!(outcome.notes, ["the communicator was not made"]);
    assert!(
        outcome.sizes[3].verdict == RuleVerdict::Gain,
        "LL128 with NCCL's own channels is left: {outcome:?}"
    );
}

#[test]
fn rules_that_give_wrong_data_are_not_written() {
    let mut machine = Simulated::new(&SIZES, like_h100, (0.01, 0.003), 6);
    machine.spoils = true;
    let outcome = searched(&mut machine, &space(&[None, Some(32)]), &goal(60));
    assert!(!outcome.has_rules(), "{outcome:?}");
    assert_eq!(outcome.notes, ["5 elements were wrong"]);
}

#[test]
fn progress_counts_to_the_end_of_each_stage() {
    let mut machine = Simulated::new(&SIZES, like_h100, (0.01, 0.003), 6);
    let mut all = Vec::new();
    let Ok(_) = search(&mut machine, &space(&[None]), &goal(60), &mut |p| all.push(*p));
    for stage in [SearchStage::Coarse, SearchStage::Fine] {
        let last = all.iter().rfind(|p| p.stage == stage).expect("progress");
        assert_eq!(last.done, last.all);
        let first = all.iter().find(|p| p.stage == stage).expect("progress");
        assert!(first.remaining > last.remaining && last.remaining > Duration::ZERO);
    }
    assert!(all.is_sorted_by_key(|p| p.elapsed));
}

#[test]
fn verify_keeps_what_holds_and_drops_what_does_not() {
    let rules = Rules::from_yaml(
        "rules:\n\
         - {operation: AllReduce, max_bytes: 100K, ranks: 4, algorithm: RING, protocol: LL128, channels: 32}\n\
         - {operation: AllReduce, min_bytes: 3M, max_bytes: 5M, algorithm: RING, protocol: LL128, channels: 32}\n\
         - {operation: AllReduce, ranks: 8, algorithm: TREE}\n\
         - {operation: AllGather, algorithm: RING}\n",
        "old",
    )
    .expect("rules");
    let mut space = Space { sizes: vec![64 * KIB], ..space(&[None]) };
    space.sizes = sizes_of(rules.all(), &space);
    assert_eq!(space.sizes.len(), 2, "the second rule gets a size of its own: {:?}", space.sizes);
    space.sizes[1] = 4 * MIB;
    let mut machine = Simulated::new(&space.sizes, like_h100, (0.01, 0.003), 8);
    let Ok(verified) = verify(&mut machine, &space, rules.all(), Some(32), &goal(60), &mut |_| {});
    let kinds: Vec<(bool, bool)> =
        verified.judged.iter().map(|j| (j.status.has_rule(), j.status == RuleStatus::NotMeasured)).collect();
    assert_eq!(kinds, [(false, false), (true, false), (true, true), (true, true)], "{verified:?}");
    assert_eq!((verified.sizes.len(), verified.notes.len()), (2, 0));
    let judged = verified.judged.clone();
    let text = verified_file(&[(space, verified)], &judged, &around());
    let kept = Rules::from_yaml(&text, "kept").expect("rules");
    assert_eq!(kept.all().len(), 3, "{text}");
    assert!(text.contains("1 of 4 rules were dropped") && text.contains("not verified"), "{text}");
}

/// From 1 MiB on, 32 channels alone are faster, and LL128 gains nothing beyond that.
fn channels_alone(c: &Conditions) -> f64 {
    let is_raised = c.bytes >= MIB && c.min_channels.is_some() && c.channels.is_none_or(|n| n >= 32);
    let is_worse = c.entry != Selection::default() && !is(c, RING, LL128);
    if is_raised && !is_worse { 90.0 } else { 100.0 }
}

#[test]
fn a_variable_that_gains_as_much_as_rules_is_written_without_rules() {
    let space = space(&[None, Some(32)]);
    for seed in 0..20 {
        let mut machine = Simulated::new(&SIZES, channels_alone, (0.01, 0.003), seed);
        let outcome = searched(&mut machine, &space, &goal(60));
        let verdicts: Vec<RuleVerdict> = outcome.sizes.iter().map(|s| s.verdict).collect();
        let (none, alone) = (RuleVerdict::NoCandidate, RuleVerdict::Environment);
        assert_eq!(verdicts, [none, none, alone, alone, alone], "seed {seed}");
        assert_eq!((outcome.has_rules(), outcome.harmed().count()), (false, 0), "seed {seed}");
        let text = rule_file(&[(space.clone(), outcome)], &around());
        let written = Rules::from_yaml(&text, "found").expect("rules");
        assert_eq!((written.all().len(), written.min_channels()), (0, Some(32)), "{text}");
        assert!(text.contains("# AllReduce, 4194304 bytes: default "), "{text}");
        assert!(text.contains(" us, the variable alone "), "{text}");

        let Ok(held) = verify(&mut machine, &space, &[], Some(32), &goal(60), &mut |_| {});
        assert_eq!((held.gains_alone().count(), held.harmed().count()), (3, 0), "seed {seed}");
        let text = verified_file(&[(space.clone(), held)], &[], &around());
        assert_eq!(Rules::from_yaml(&text, "kept").expect("rules").min_channels(), Some(32), "{text}");
    }
}

#[test]
fn a_variable_that_gains_nothing_is_dropped_by_verify() {
    let space = space(&[None]);
    let mut machine = Simulated::new(&SIZES, |_| 100.0, (0.01, 0.003), 3);
    let Ok(verified) = verify(&mut machine, &space, &[], Some(32), &goal(60), &mut |_| {});
    let text = verified_file(&[(space, verified)], &[], &around());
    assert_eq!(Rules::from_yaml(&text, "kept").expect("rules").min_channels(), None, "{text}");
    assert!(text.contains("NCCL_MIN_NCHANNELS=32 was dropped as well."), "{text}");
}

#[test]
fn the_expected_time_grows_with_the_candidates() {
    let times = Expected { start: Duration::from_secs(5), repeat: Duration::from_millis(100) };
    let small = expected(&space(&[None]), &goal(60), &times);
    let large = expected(&space(&[None, Some(32)]), &goal(60), &times);
    assert!(Duration::from_secs(60) < small && small < large, "{small:?} {large:?}");
}
