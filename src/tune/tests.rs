use super::*;
use proptest::prelude::*;
use ringwatch_wire::tuning::{ANY_PIPE_OPS, Row};

fn yaml(text: &str) -> Rules {
    Rules::from_yaml(text, "tune.yaml").expect("rules")
}

fn wrong(text: &str) -> String {
    let read = Rules::from_yaml(text, "tune.yaml").and_then(|r| r.compile());
    read.expect_err("refused").to_string()
}

fn rows(rules: &Rules) -> Vec<Row> {
    let compiled = rules.compile().expect("a table");
    tuning::Rules::read(compiled.bytes()).expect("valid").rows().collect()
}

/// Ranges, preferred entries and channels of rows.
fn brief(rules: &Rules) -> Vec<(u64, u64, u32, u8)> {
    rows(rules).iter().map(|r| (r.min_bytes, r.max_bytes, r.prefer, r.channels)).collect()
}

#[test]
fn the_first_rule_that_matches_comes_first() {
    let rules = yaml(
        "rules:\n\
         - {operation: AllReduce, min_bytes: 1K, max_bytes: 4K, algorithm: TREE, protocol: LL}\n\
         - {operation: all_reduce, max_bytes: 8191, ranks: 2-8, channels: 3}\n\
         - {operation: AllReduce, channels: 5}\n\
         - {operation: AllReduce, channels: 6}\n",
    );
    let tree_ll = 1;
    assert_eq!(
        brief(&rules),
        [
            (0, 1023, 0, 3),
            (0, 1023, 0, 5),
            (1024, 4096, tree_ll, 0),
            (1024, 4096, 0, 3),
            (1024, 4096, 0, 5),
            (4097, 8191, 0, 3),
            (4097, 8191, 0, 5),
            (8192, u64::MAX, 0, 5),
        ]
    );
    let all = rows(&rules);
    assert_eq!((all[0].min_ranks, all[0].max_ranks, all[0].pipe_ops), (2, 8, ANY_PIPE_OPS));
    assert_eq!(rules.warnings(), ["tune.yaml:5: no size is left for this rule; rules above it decide all"]);
}

#[test]
fn equal_rules_have_equal_hashes_however_they_are_written() {
    let a =
        yaml("rules:\n- operation: AllGather\n  max_bytes: 64KiB\n  algorithm: RING\n  protocol: LL128\n");
    let b = yaml(
        "# note\nrules:\n- {protocol: ll128, algorithm: ring, max_bytes: 65536, operation: all-gather}\n",
    );
    assert_eq!(a.compile().expect("a table").hash(), b.compile().expect("a table").hash());
    let c = yaml("rules:\n- {operation: AllGather, max_bytes: 65537, algorithm: RING, protocol: LL128}\n");
    assert_ne!(a.compile().expect("a table").hash(), c.compile().expect("a table").hash());
}

#[test]
fn what_is_wrong_is_told_with_file_line_and_remedy() {
    for (text, said) in [
        ("rules:\n- operation: AllReduce\n  algoritm: TREE\n", "tune.yaml:3: unknown field `algoritm`"),
        (
            "rules:\n- operation: Send\n  channels: 2\n",
            "tune.yaml:2: \"Send\" is no operation with rules; there are Broadcast",
        ),
        (
            "rules:\n- operation: AllReduce\n  algorithm: STAR\n",
            "tune.yaml:2: \"STAR\" is no algorithm; there are TREE",
        ),
        (
            "rules:\n- operation: AllReduce\n  min_bytes: much\n",
            "tune.yaml:3: invalid value: string \"much\", expected a size",
        ),
        (
            "rules:\n- operation: AllReduce\n  channels: 1\n\n- operation: AllReduce\n  ranks: 8-2\n  channels: 1\n",
            "tune.yaml:5: a range of ranks",
        ),
        ("rules:\n- {operation: AllReduce}\n", "tune.yaml:2: the rule changes nothing"),
        (
            "environment:\n  NCCL_MIN_NCHANNELS: 65\nrules: []\n",
            "tune.yaml:2: invalid value: string \"65\", expected NCCL_MIN_NCHANNELS: a number from 1 to 64",
        ),
        ("environment: {NCCL_ALGO: Ring}\nrules: []\n", "tune.yaml:1: unknown field `NCCL_ALGO`"),
        (
            "rules:\n- operation: AllReduce\n  channels: 0\n",
            "tune.yaml:3: invalid value: string \"0\", expected channels: a number from 1 to 127",
        ),
        (
            "rules:\n- operation: AllReduce\n  channels: 900\n",
            "tune.yaml:3: invalid value: string \"900\", expected channels: a number from 1 to 127",
        ),
        (
            "rules:\n- {operation: AllReduce, channels: -1}\n",
            "tune.yaml:2: invalid value: string \"-1\", expected channels: a number from 1 to 127",
        ),
        (
            "rules:\n- {operation: AllReduce, pipe_ops: x, channels: 2}\n",
            "tune.yaml:2: invalid value: string \"x\", expected pipe_ops: a number",
        ),
        (
            "rules:\n- {operation: AllReduce, registered: maybe, channels: 2}\n",
            "tune.yaml:2: invalid value: string \"maybe\", expected registered: true or false",
        ),
        (
            "rules:\n- {operation: AllReduce, min_bytes: 2, max_bytes: 1, channels: 1}\n",
            "tune.yaml:2: min_bytes is above",
        ),
        (
            "rules:\n- {operation: AllReduce, algorithm: TREE, forbid: [{algorithm: RING}]}\n",
            "tune.yaml:2: forbid does nothing",
        ),
        ("rules:\n- {operation: AllReduce, forbid: [{}]}\n", "tune.yaml:2: an entry of forbid is empty"),
        (
            "rules:\n- {operation: AllReduce, forbid: [{protocol: LL}, {protocol: LL128}, {protocol: SIMPLE}]}\n",
            "tune.yaml:2: everything is forbidden",
        ),
        ("rules: 5\n", "tune.yaml:1: "),
        ("", "tune.yaml:1: "),
    ] {
        let got = wrong(text);
        assert!(got.starts_with(said), "{got}");
        assert!(!got.contains('\n'), "{got}");
    }
}

#[test]
fn too_many_rules_of_one_size_are_refused_unless_their_communicators_differ() {
    let many = |ranks: fn(u32) -> String| {
        let rule =
            |i: u32| format!("- {{operation: Reduce, ranks: {}, algorithm: RING, protocol: LL}}\n", ranks(i));
        format!("rules:\n{}", (1..=5).map(rule).collect::<String>())
    };
    assert!(wrong(&many(|_| "8".to_owned())).starts_with("tune.yaml:6: more than 4 rules apply to 0 bytes"));
    assert_eq!(rows(&yaml(&many(|i| i.to_string()))).len(), 5);
    let lines = |n: usize| format!("rules:\n{}", "- {operation: Reduce, channels: 1}\n".repeat(n));
    assert!(wrong(&lines(1024)).contains("more than 1023 rules"));
}

#[test]
fn the_sample_is_right() {
    let rules = Rules::from_yaml(include_str!("../../config/tune.yaml"), "config/tune.yaml").expect("rules");
    assert_eq!((rules.all().len(), rows(&rules).len()), (3, 3));
    assert!(rules.warnings().is_empty(), "{:?}", rules.warnings());
}

const NVIDIAS: &str = "\
# collective_type,min_bytes,max_bytes,algorithm,protocol,channels,nNodes,nRanks,numPipeOps,regBuff
allreduce,0,65536,tree,simple,2,1,-1,-1,1

allgather,65537, 1048576 ,ring,ll128,-1,4,32,1
broadcast,0,32768,nvls_tree,simple,-1,1,-1
";

#[test]
fn nvidias_csv_is_read() {
    let rules = Rules::from_csv(NVIDIAS, "tuner.conf").expect("rules");
    let all = rules.all();
    assert_eq!(all.iter().map(|r| r.line).collect::<Vec<_>>(), [2, 4, 5]);
    assert_eq!((all[0].is_registered, all[0].channels, all[0].nodes.max), (Some(true), Some(2), 1));
    assert_eq!((all[1].pipe_ops, all[1].ranks.min, all[1].channels), (Some(1), 32, None));
    assert_eq!(all[2].choose, Selection { algorithm: Some(5), protocol: Some(2) });
    for (row, said) in [
        ("allreduce,0,1,tree", "tuner.conf:1: 4 columns; there are 8 to 10"),
        ("alltoall,0,1,tree,ll,1,-1,-1", "tuner.conf:1: \"alltoall\" is no collective_type"),
        ("allreduce,x,1,tree,ll,1,-1,-1", "tuner.conf:1: min_bytes \"x\" is no number of bytes"),
        ("allreduce,0,1,tree,ll,-2,-1,-1", "tuner.conf:1: channels -2 is neither"),
        ("allreduce,0,1,tree,ll,1,-1,-1,-1,2", "tuner.conf:1: regBuff 2 is neither"),
        ("allreduce,0,1,tree,ll,400,-1,-1", "tuner.conf:1: channels is not from 1 to 127"),
    ] {
        let got = Rules::from_csv(row, "tuner.conf").expect_err("refused").to_string();
        assert!(got.starts_with(said), "{got}");
    }
}

#[test]
fn a_csv_that_is_written_covers_every_size_and_says_channels() {
    let rules = Rules::from_csv(NVIDIAS, "x").expect("rules");
    let written = rules.to_csv().expect("a CSV");
    assert!(written.contains("allgather,65537,1048576,ring,ll128,32,4,32,1,-1\n"), "{written}");
    for collective in ["broadcast", "reduce", "allgather", "reducescatter", "allreduce"] {
        let row = format!("\n{collective},0,18446744073709551615,ring,simple,32,-1,-1,-1,-1\n");
        assert!(written.contains(&row), "{written}");
    }
    let again = Rules::from_csv(&written, "x").expect("rules");
    let rows =
        |text: &str| text.lines().filter(|l| !l.starts_with('#')).map(str::to_owned).collect::<Vec<_>>();
    assert_eq!(rows(&again.to_csv().expect("a CSV")), rows(&written), "nothing is added twice");
}

#[test]
fn what_nvidias_csv_cannot_say_is_refused() {
    for (rule, said) in [
        ("algorithm: TREE", "no row without both"),
        ("channels: 4", "no row without both"),
        ("forbid: [{algorithm: TREE}]", "no row without both"),
        ("algorithm: TREE, protocol: LL, ranks: 2-100", "narrow it"),
    ] {
        let rules = yaml(&format!("rules:\n- {{operation: AllReduce, {rule}}}\n"));
        let got = rules.to_csv().expect_err("refused").to_string();
        assert!(got.starts_with("tune.yaml:2: ") && got.contains(said), "{got}");
    }
    let rules = yaml("rules:\n- {operation: AllReduce, algorithm: TREE, protocol: LL, ranks: 2-4}\n");
    assert_eq!(rules.to_csv().expect("a CSV").matches(",tree,ll,").count(), 3);
}

fn any_rule() -> impl Strategy<Value = Rule> {
    let numbers = || (0u32..9, 0u32..9).prop_map(|(a, b)| Range { min: a.min(b), max: a.max(b) });
    let bytes = (0u64..64, 0u64..64).prop_map(|(a, b)| Range { min: a.min(b), max: a.max(b) });
    let conditions = (prop::option::of(any::<bool>()), prop::option::of(1u32..3));
    let choose = (prop::option::of(0usize..7), prop::option::of(0usize..3));
    (0usize..5, bytes, numbers(), numbers(), conditions, choose, prop::option::of(1u8..=127)).prop_map(
        |(collective, bytes, ranks, nodes, (is_registered, pipe_ops), (algorithm, protocol), channels)| {
            let choose = Selection { algorithm, protocol };
            Rule {
                line: 1,
                collective,
                bytes,
                ranks,
                nodes,
                is_registered,
                pipe_ops,
                choose,
                forbid: Vec::new(),
                channels,
            }
        },
    )
}

proptest! {
    /// The compiled rows say of every size and communicator what the rules say, in the same order.
    #[test]
    fn the_table_means_what_the_rules_mean(all in prop::collection::vec(any_rule(), 0..7)) {
        let Ok(compiled) = compile::compile(&all) else { return Ok(()) };
        let table = tuning::Rules::read(compiled.bytes()).expect("valid");
        for collective in 0..5 {
            for (bytes, ranks, nodes) in (0..65).map(|b| (b, (b % 9) as u32, (b / 7) as u32)) {
                let in_rules = all.iter().filter(|r| {
                    r.collective == collective
                        && (r.bytes.min..=r.bytes.max).contains(&bytes)
                        && (r.ranks.min..=r.ranks.max).contains(&ranks)
                        && (r.nodes.min..=r.nodes.max).contains(&nodes)
                });
                let in_table = table.rows_for(ranks, nodes).filter(|r| {
                    usize::from(r.collective) == collective && (r.min_bytes..=r.max_bytes).contains(&bytes)
                });
                let wanted: Vec<_> = in_rules.map(|r| (r.choose.entries(), r.channels.unwrap_or(0))).collect();
                let got: Vec<_> = in_table.map(|r| (r.prefer, r.channels)).collect();
                prop_assert_eq!(&wanted[..got.len().min(wanted.len())], &got[..]);
                // What is left out stands behind a rule that decides without condition.
                prop_assert!(got.len() == wanted.len() || got.last().is_some_and(|r| r.0 == 0));
            }
        }
    }

    #[test]
    fn any_text_is_rules_or_an_error_of_one_line(text in ".{0,200}") {
        for read in [Rules::from_yaml(&text, "x"), Rules::from_csv(&text, "x")] {
            if let Err(e) = read {
                prop_assert_eq!(e.to_string().lines().count(), 1);
            }
        }
    }
}
