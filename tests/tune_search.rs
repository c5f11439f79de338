//! `ringwatch tune --search` and `--verify`: the whole search with the real plugin, against an NCCL of host memory whose times
//! depend on the tuner's choice.

use crate::support::fake_gpu::{fake, over_fake, processes_of};
use crate::support::{Play, Players, Room, Said, run};
use ringwatch::tune::{Range, Rules, Selection};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A name for the test that calls this.
macro_rules! fake_or_skip {
    ($name:literal) => {
        match fake($name) {
            Some(dir) => dir,
            None => return,
        }
    };
}

/// Short turns, and few of them.
const QUICK: &str = "-n 2 --millis 1 --confidence 90";
/// How often the tests measure at most.
const ATTEMPTS: u32 = 3;
const RING: usize = 1;
const SIMPLE: usize = 2;

fn tune(room: &Room, fake: &Path, arguments: &str) -> Command {
    let mut command = over_fake(room, fake, "tune", &format!("{arguments} {QUICK}"));
    command.env("FAKE_TUNING", "1");
    command
}

fn written(room: &Room, name: &str, text: &str) -> PathBuf {
    let path = room.path(name);
    fs::write(&path, text).expect("a file");
    path
}

/// The rules that a run wrote to standard output.
fn rules(said: &Said) -> Rules {
    Rules::from_yaml(&said.out, "standard output")
        .unwrap_or_else(|e| panic!("{e}: {} {}", said.out, said.err))
}

/// Measures until it is decided: where background jobs take the CPUs, nothing can be proven in a few rounds.
fn measured(measure: impl Fn() -> Said, is_decided: impl Fn(&Said) -> bool) -> Said {
    let again = || Some(measure()).filter(&is_decided);
    (1..ATTEMPTS).find_map(|_| again()).unwrap_or_else(measure)
}

#[test]
fn a_search_finds_the_fastest_choice_and_writes_it_with_its_evidence() {
    let _alone = crate::alone();
    let dir = fake_or_skip!("a_search_finds_the_fastest_choice_and_writes_it_with_its_evidence");
    let room = Room::new();
    let search = || run(&mut tune(&room, dir, "--search -t 2 -b 1K -e 64K -f 64 --channels 16"));
    let is_found = |s: &Said| {
        let protocols: Vec<_> = rules(s).all().iter().map(|r| r.choose.protocol).collect();
        protocols == [Some(SIMPLE)]
    };
    let said = measured(search, |s| s.code == Some(0) && is_found(s));
    assert_eq!(said.code, Some(0), "{}", said.err);
    let found = rules(&said);
    let [rule] = found.all() else { panic!("one rule: {} {}", said.out, said.err) };
    assert_eq!(rule.choose, Selection { algorithm: Some(RING), protocol: Some(SIMPLE) }, "{}", said.out);
    assert_eq!(rule.bytes, Range { min: (8 << 10) + 1, max: 64 << 10 }, "{}", said.out);
    assert_eq!((rule.ranks, rule.nodes), (Range { min: 2, max: 2 }, Range { min: 1, max: 1 }));
    for part in [
        "# NCCL 2.28.9, 2 x Fake GPU, 2 ranks on 1 node.",
        "environment:\n  NCCL_MIN_NCHANNELS: 32\n",
        "  # 65536 bytes: default ",
        " confidence, ",
        "; the variable alone: ratio ",
    ] {
        assert!(said.out.contains(part), "{part}: {}", said.out);
    }
    for part in ["all_reduce: coarse 1 of ", "all_reduce: confirm 1 of ", " left\n"] {
        assert!(said.err.contains(part), "{part}: {}", said.err);
    }
}

#[test]
fn rules_that_would_make_a_size_slower_are_not_written() {
    let _alone = crate::alone();
    let dir = fake_or_skip!("rules_that_would_make_a_size_slower_are_not_written");
    let room = Room::new();
    let file = room.path("rules.yaml");
    let arguments = "--search -t 2 -b 1K -e 64K -f 64 --channels 16 --raise-channels 0 --output";
    let search = || {
        // An attempt of before that proved nothing has left a file.
        fs::remove_file(&file).ok();
        run(tune(&room, dir, &format!("{arguments} {}", file.display())).env("FAKE_TUNING", "slow"))
    };
    let said = measured(search, |s| s.code == Some(1));
    assert_eq!((said.code, file.exists()), (Some(1), false), "{} {}", said.out, said.err);
    assert!(said.out.contains("RING/LL128"), "the table is printed all the same: {}", said.out);
    for part in ["1024 bytes take ", "any loaded tuner changes", "nothing is written", "--accept-slower"] {
        assert!(said.err.contains(part), "{part}: {}", said.err);
    }
}

#[test]
fn a_dry_run_prints_what_nccl_offers_and_measures_nothing() {
    let _alone = crate::alone();
    let dir = fake_or_skip!("a_dry_run_prints_what_nccl_offers_and_measures_nothing");
    let room = Room::new();
    let arguments = "--search --dry-run --operation all_reduce,all_gather -t 2 -b 64K -e 64K --channels 4,8";
    let said = run(&mut tune(&room, dir, arguments));
    assert_eq!((said.code, said.err.as_str()), (Some(0), ""), "{}", said.out);
    let wanted = "# all_reduce on 2 ranks: candidates of each size\n         65536  10 candidates\n                \
                  TREE/LL; channels: NCCL's own 4 8\n                RING/LL128; channels: NCCL's own 4 8\n                \
                  RING/SIMPLE; channels: NCCL's own 4 8\n# all of them also with NCCL_MIN_NCHANNELS=32\n# expected time: about ";
    assert!(said.out.starts_with(wanted), "{}", said.out);
    assert!(said.out.contains("# all_gather on 2 ranks"), "{}", said.out);
}

/// The first rule gains, the second one does nothing, the third is for other ranks.
const OLD_RULES: &str = "rules:\n\
    - {operation: AllReduce, min_bytes: 40K, algorithm: RING, protocol: LL128}\n\
    - {operation: AllReduce, max_bytes: 8K, algorithm: RING, protocol: SIMPLE}\n\
    - {operation: AllReduce, ranks: 8, channels: 2}\n";

#[test]
fn verify_drops_the_rule_that_does_not_hold() {
    let _alone = crate::alone();
    let dir = fake_or_skip!("verify_drops_the_rule_that_does_not_hold");
    let room = Room::new();
    let file = written(&room, "old.yaml", OLD_RULES);
    let kept = room.path("kept.yaml");
    let arguments = format!("--verify {} -t 2 -b 1K -e 64K -f 64 -o {}", file.display(), kept.display());
    let said =
        measured(|| run(&mut tune(&room, dir, &arguments)), |s| s.out.contains("line 2: RING/LL128 holds\n"));
    assert_eq!(said.code, Some(1), "{} {}", said.out, said.err);
    let rules = Rules::load(&kept).expect("rules");
    let protocols: Vec<Option<usize>> = rules.all().iter().map(|r| r.choose.protocol).collect();
    assert_eq!(protocols, [Some(1), None], "{}", said.out);
    assert!(
        said.out.contains("# dropped line 3: RING/SIMPLE: no gain of 2 % is proven (1024 bytes: "),
        "{}",
        said.out
    );
    assert!(said.out.contains("line 2: RING/LL128 holds\n"), "{}", said.out);
    let text = fs::read_to_string(&kept).expect("a file");
    assert!(text.contains("1 of 3 rules were dropped") && text.contains("# not verified: "), "{text}");
}

#[test]
fn the_ranks_of_a_job_measure_together() {
    let _alone = crate::alone();
    let dir = fake_or_skip!("the_ranks_of_a_job_measure_together");
    let room = Room::new();
    let file = written(&room, "old.yaml", &OLD_RULES.replace("8K", "512"));
    let arguments = format!("--verify {} -b 64K -e 64K", file.display());
    let measure = || processes_of(&|| tune(&room, dir, &arguments), &room, 2, &[]);
    let proven = (1..ATTEMPTS).find_map(|_| Some(measure()).filter(|all| all[0].code == Some(0)));
    let all = proven.unwrap_or_else(measure);
    assert_eq!((all[0].code, all[1].code), (Some(0), Some(0)), "{} {}", all[0].err, all[1].err);
    assert_eq!((all[1].out.as_str(), all[1].err.as_str()), ("", ""), "rank 0 alone prints");
    assert_eq!(rules(&all[0]).all().len(), 3, "{}", all[0].out);
}

#[test]
fn what_cannot_be_measured_is_exit_code_2_with_a_reason() {
    let _alone = crate::alone();
    let dir = fake_or_skip!("what_cannot_be_measured_is_exit_code_2_with_a_reason");
    let room = Room::new();
    for (arguments, reason) in [
        ("--search -t 1", "one rank"),
        ("--search -t 2 -b 8K -e 4K", "--min-bytes 8192 is more than --max-bytes 4096"),
        ("--search -t 2 -b much", "--min-bytes: \"much\" is no size"),
        ("--search -t 2 -f 1", "--step-factor 1"),
        ("--search -t 9", "9 GPUs are needed"),
        ("--search -t 2 -o /nowhere/rules.yaml", "cannot write /nowhere/rules.yaml"),
        ("--verify /nowhere/rules.yaml -t 2", "/nowhere/rules.yaml"),
    ] {
        let said = run(&mut tune(&room, dir, arguments));
        assert_eq!((said.code, said.out.as_str()), (Some(2), ""), "{arguments}: {}", said.err);
        assert!(said.err.contains(reason), "{arguments}: {}", said.err);
    }
    let said = run(tune(&room, dir, "--search -t 2").env("NCCL_TUNER_PLUGIN", "libother.so"));
    assert_eq!(said.code, Some(2), "{}", said.err);
    assert!(said.err.contains("libother.so") && said.err.contains("unset it"), "{}", said.err);
}

#[test]
fn advice_comes_from_the_segments_of_a_job() {
    let _alone = crate::alone();
    let room = Room::new();
    let advise = |more: &[&str]| run(room.ringwatch(["tune", "--advise"]).arg(room.segments()).args(more));
    let nothing = advise(&[]);
    assert_eq!((nothing.code, nothing.out.as_str()), (Some(2), ""), "{}", nothing.err);
    let mut players = Players::start(&room, Play::of("mixed").unpaced().loops(5));
    players.played();
    players.end();
    let said = advise(&[]);
    assert_eq!((said.code, said.err.as_str()), (Some(0), ""), "{}", said.out);
    assert!(
        said.out.contains("use fewer communicators: 5 have the same 4 processes\n   why:  "),
        "{}",
        said.out
    );
    assert!(said.out.contains("\n   gain: not estimated: "), "{}", said.out);
    let missing = advise(&["--curves", "/nowhere/curves.json"]);
    assert_eq!(missing.code, Some(2), "{}", missing.err);
    assert!(missing.err.contains("/nowhere/curves.json"), "{}", missing.err);
}

#[test]
fn options_that_make_no_sense_together_are_exit_code_2() {
    let _alone = crate::alone();
    let room = Room::new();
    for arguments in [
        &["tune"][..],
        &["tune", "--dry-run"],
        &["tune", "rules.yaml", "--search"],
        &["tune", "--search", "--verify", "rules.yaml"],
        &["tune", "rules.yaml", "--confidence", "95"],
        &["tune", "--search", "--confidence", "12"],
        &["tune", "--search", "--operation", "sendrecv"],
        &["tune", "--search", "--channels", "0"],
        &["tune", "--search", "--time-limit", "soon"],
        &["tune", "--search", "--csv"],
        &["tune", "--search", "--advise"],
        &["tune", "rules.yaml", "--curves", "curves.json"],
    ] {
        let said = run(&mut room.ringwatch(arguments));
        assert_eq!((said.code, said.out.as_str()), (Some(2), ""), "{arguments:?}");
        assert!(said.err.contains("error: "), "{arguments:?}: {}", said.err);
    }
}
