//! Ranks on several nodes agree on the tuner's rules by an all-gather in the communicator's init, or no rank follows any.
//!
//! Each rank is a process, and each node has a directory of segments of its own. The fake NCCL gathers through files.

use super::*;
use ringwatch_wire::codes::tuned;
use std::process::Output;

const RANKS: usize = 4;
const WAIT_MS: &str = "1500";
/// The fake NCCL prints the first where the rule applies, and the second where it does not.
const TUNED: &str = "asked, channels 4, cost 0\n";
const DEFAULT: &str = "asked, channels 0, cost 10\n";

fn row(channels: u8) -> Row {
    Row {
        min_bytes: 0,
        max_bytes: 4096,
        min_ranks: 0,
        max_ranks: u32::MAX,
        min_nodes: 2,
        max_nodes: 2,
        prefer: entry(0, 0),
        forbid: 0,
        pipe_ops: ANY_PIPE_OPS,
        collective: 4,
        channels,
        registered: Registered::Any,
    }
}

/// A job of four ranks on two nodes.
struct Nodes {
    folder: tempfile::TempDir,
    abi: u32,
    how: &'static str,
}

/// The ranks' output, and the seconds that the slowest one took.
struct Said {
    ranks: Vec<String>,
    seconds: f64,
}

impl Said {
    /// Every rank says this.
    #[track_caller]
    fn all(&self, what: &str) {
        for (rank, said) in self.ranks.iter().enumerate() {
            assert!(said.contains(what), "rank {rank} does not say {what:?}: {said}");
        }
    }

    #[track_caller]
    fn none(&self, what: &str) {
        for (rank, said) in self.ranks.iter().enumerate() {
            assert!(!said.contains(what), "rank {rank} says {what:?}: {said}");
        }
    }
}

impl Nodes {
    fn new(abi: u32, how: &'static str) -> Self {
        let folder = tempfile::Builder::new().tempdir_in("/dev/shm").unwrap();
        std::fs::create_dir(folder.path().join("meet")).unwrap();
        Nodes { folder, abi, how }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn segments(&self, node: usize) -> PathBuf {
        self.path(&format!("node{node}"))
    }

    /// Runs all ranks; `change` makes some differ. It needs what [`built`] returns.
    #[track_caller]
    fn run(&self, ranks: usize, change: impl Fn(usize, &mut Command)) -> Said {
        let rules = support::tuner::write_rules(&self.path("rules"), &[row(4)]);
        let begun = Instant::now();
        let started: Vec<Child> = (0..ranks)
            .map(|rank| {
                let mut command = job("linked", self.abi, "nodes").unwrap().variant("cuda").command;
                command
                    .env("HOW", self.how)
                    .env("RANK", rank.to_string())
                    .env("RANKS", ranks.to_string())
                    .env("FAKE_ID", "7")
                    .env("FAKE_NODES", "2")
                    .env("FAKE_ASK", "1")
                    .env("FAKE_LOG", "1")
                    .env("FAKE_MEET", self.path("meet"))
                    .env("NCCL_TUNER_PLUGIN", "libringwatch-preload.so")
                    .env("RINGWATCH_DIR", self.segments(rank * 2 / ranks))
                    .env("RINGWATCH_TUNE", &rules)
                    .env("RINGWATCH_TUNE_NODES", "1")
                    .env("RINGWATCH_TUNE_WAIT_MS", WAIT_MS)
                    .stdout(Stdio::piped())
                    .stderr(Stdio::piped());
                change(rank, &mut command);
                command.spawn().unwrap()
            })
            .collect();
        let ranks: Vec<String> = started.into_iter().map(|c| text(c.wait_with_output().unwrap())).collect();
        Said { ranks, seconds: begun.elapsed().as_secs_f64() }
    }

    /// The outcomes of the agreement in all segments.
    fn recorded(&self) -> Vec<u8> {
        let files = (0..2).flat_map(|node| in_dir(&self.segments(node)));
        files.flat_map(|f| comms(&Recording::read(&f))).filter(|c| c.id.is_some()).map(|c| c.tuned).collect()
    }
}

fn text(out: Output) -> String {
    assert!(out.status.success(), "{}: {out:?}", out.status);
    format!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr))
}

#[test]
fn ranks_on_several_nodes_agree_before_the_first_operation() {
    if built().is_none() {
        return support::skip::skipped(
            "ranks_on_several_nodes_agree_before_the_first_operation",
            "a C compiler (cc)",
        );
    }
    for (abi, version) in [(1, 3), (4, 4), (5, 5), (7, 5)] {
        let nodes = Nodes::new(abi, "plain");
        let said = nodes.run(RANKS, |_, _| {});
        said.all(&format!("tuner v{version}: result 0, channels 0, cost 10\n"));
        said.all("init 0 A\n");
        said.all(TUNED);
        said.all("all ranks agree on the tuner's rules");
        assert_eq!(nodes.recorded(), [tuned::AGREED; RANKS], "ABI v{abi}");
    }
}

#[test]
fn a_rank_that_differs_is_named_and_no_node_applies_rules() {
    if built().is_none() {
        return support::skip::skipped(
            "a_rank_that_differs_is_named_and_no_node_applies_rules",
            "a C compiler (cc)",
        );
    }
    type File = fn(&Nodes) -> PathBuf;
    let other: File = |n| support::tuner::write_rules(&n.path("other"), &[row(5)]);
    let broken: File = |n| {
        std::fs::write(n.path("broken"), "no rules").unwrap();
        n.path("broken")
    };
    let missing: File = |n| n.path("nowhere");
    for (file, named) in [
        (other, "rank 3 has other rules"),
        (broken, "rank 3 refuses its rule file"),
        (missing, "rank 3 cannot read its rule file"),
    ] {
        let nodes = Nodes::new(5, "plain");
        let file = file(&nodes);
        let change = |rank, command: &mut Command| {
            if rank == 3 {
                command.env("RINGWATCH_TUNE", &file);
            }
        };
        let said = nodes.run(RANKS, change);
        said.all("init 0 A\n");
        said.all(DEFAULT);
        said.all(named);
        assert_eq!(nodes.recorded(), [tuned::DIFFERENT; RANKS], "{named}");
    }
}

#[test]
fn a_rank_without_rules_or_without_the_tuner_takes_part_all_the_same() {
    if built().is_none() {
        return support::skip::skipped(
            "a_rank_without_rules_or_without_the_tuner_takes_part_all_the_same",
            "a C compiler (cc)",
        );
    }
    for variable in ["RINGWATCH_TUNE", "NCCL_TUNER_PLUGIN"] {
        let nodes = Nodes::new(5, "plain");
        let change = |rank, command: &mut Command| {
            if rank == 0 {
                command.env_remove(variable);
            }
        };
        let said = nodes.run(RANKS, change);
        said.all("init 0 A\n");
        said.none(TUNED);
        for other in &said.ranks[1..] {
            assert!(other.contains(DEFAULT) && other.contains("(rank 0 "), "{other}");
        }
    }
}

/// Without a segment there is no record of the communicator, and the other ranks wait for this one all the same.
#[test]
fn a_rank_without_a_segment_takes_part_all_the_same() {
    if built().is_none() {
        return support::skip::skipped(
            "a_rank_without_a_segment_takes_part_all_the_same",
            "a C compiler (cc)",
        );
    }
    let nodes = Nodes::new(5, "plain");
    let change = |rank, command: &mut Command| {
        if rank == 2 {
            command.env("RINGWATCH_DIR", "/proc/nowhere");
        }
    };
    let said = nodes.run(RANKS, change);
    said.all("init 0 A\n");
    said.all(TUNED);
}

#[test]
fn a_required_agreement_fails_init_on_all_nodes() {
    if built().is_none() {
        return support::skip::skipped("a_required_agreement_fails_init_on_all_nodes", "a C compiler (cc)");
    }
    let nodes = Nodes::new(5, "plain");
    let change = |rank, command: &mut Command| {
        // One rank requires it, and another one differs.
        if rank == 0 {
            command.env("RINGWATCH_TUNE_REQUIRE", "1");
        }
        if rank == 3 {
            command.env("RINGWATCH_TUNE", nodes.path("nowhere"));
        }
    };
    let said = nodes.run(RANKS, change);
    said.all("init 5\n");
    said.all("aborted\n");
    said.all("the communicator is not made");
    said.all("rank 3 cannot read its rule file");
    let nodes = Nodes::new(5, "plain");
    let said = nodes.run(RANKS, |_, c| {
        c.env("RINGWATCH_TUNE_REQUIRE", "1");
    });
    said.all(TUNED);
}

/// The other ranks end with an error that says what to do; nobody waits for ever, wherever NCCL waits.
#[test]
fn a_rank_without_the_preloaded_library_hangs_nobody() {
    if built().is_none() {
        return support::skip::skipped(
            "a_rank_without_the_preloaded_library_hangs_nobody",
            "a C compiler (cc)",
        );
    }
    // By the all-gather itself, and in the call while NCCL connects.
    for (connects, lacks) in [(false, "LD_PRELOAD"), (true, "LD_PRELOAD"), (false, "RINGWATCH_TUNE_NODES")] {
        let nodes = Nodes::new(5, "plain");
        let change = |rank, command: &mut Command| {
            if connects {
                command.env("FAKE_CONNECT", "1");
            }
            if rank == 1 {
                // It makes nothing that the others could meet.
                command.env_remove(lacks).env_remove("FAKE_MEET");
            }
        };
        let said = nodes.run(RANKS, change);
        assert!(said.seconds < 30.0, "{} s", said.seconds);
        assert!(said.ranks[1].contains("init 0 A\n") && !said.ranks[1].contains(TUNED), "{}", said.ranks[1]);
        for rank in [0, 2, 3] {
            let text = &said.ranks[rank];
            assert!(text.contains("init 2\n") && text.contains("took no part in the agreement"), "{text}");
            assert_eq!(
                text.contains("aborted\n"),
                !connects,
                "one that NCCL is inside of is left alone: {text}"
            );
        }
    }
}

#[test]
fn another_operation_in_the_place_of_the_agreement_is_an_error() {
    if built().is_none() {
        return support::skip::skipped(
            "another_operation_in_the_place_of_the_agreement_is_an_error",
            "a C compiler (cc)",
        );
    }
    let nodes = Nodes::new(5, "plain");
    let change = |rank, command: &mut Command| {
        if rank == 1 {
            command.env_remove("LD_PRELOAD");
        }
    };
    let said = nodes.run(RANKS, change);
    for rank in [0, 2, 3] {
        let text = &said.ranks[rank];
        assert!(text.contains("init 5\n") && text.contains("made another operation"), "{text}");
    }
}

#[test]
fn a_rank_without_memory_for_the_agreement_fails_and_hangs_nobody() {
    if built().is_none() {
        return support::skip::skipped(
            "a_rank_without_memory_for_the_agreement_fails_and_hangs_nobody",
            "a C compiler (cc)",
        );
    }
    let nodes = Nodes::new(5, "plain");
    let change = |rank, command: &mut Command| {
        if rank == 2 {
            command.env("FAKE_NO_MEMORY", "1");
        }
    };
    let said = nodes.run(RANKS, change);
    said.all("init 2\n");
    said.all("the communicator is not made");
    assert!(said.ranks[2].contains("got no GPU memory"), "{}", said.ranks[2]);
}

#[test]
fn a_plugin_without_the_preloaded_library_keeps_rules_off() {
    if built().is_none() {
        return support::skip::skipped(
            "a_plugin_without_the_preloaded_library_keeps_rules_off",
            "a C compiler (cc)",
        );
    }
    let nodes = Nodes::new(5, "plain");
    let stock = library::build(concat!(env!("CARGO_MANIFEST_DIR"), "/.."), "libringwatch_plugin.so");
    let said = nodes.run(RANKS, |_, command| {
        command.env_remove("LD_PRELOAD").env("NCCL_TUNER_PLUGIN", &stock).env("NCCL_PROFILER_PLUGIN", &stock);
    });
    said.all("init 0 A\n");
    said.all(DEFAULT);
    said.all("needs the preloaded library");
    assert_eq!(nodes.recorded(), [tuned::NO_PRELOAD; RANKS]);
}

/// The ranks make two communicators in one group, in different orders.
#[test]
fn communicators_of_a_group_agree_when_the_group_has_ended() {
    if built().is_none() {
        return support::skip::skipped(
            "communicators_of_a_group_agree_when_the_group_has_ended",
            "a C compiler (cc)",
        );
    }
    for connects in [false, true] {
        let nodes = Nodes::new(5, "group");
        let said = nodes.run(RANKS, |_, command| {
            if connects {
                command.env("FAKE_CONNECT", "1");
            }
        });
        said.all("init 0 A B\n");
        for text in &said.ranks {
            assert_eq!(text.matches(TUNED).count(), 2, "{text}");
        }
        assert_eq!(nodes.recorded(), [tuned::AGREED; 2 * RANKS]);
    }
}

#[test]
fn children_agree_on_their_own() {
    if built().is_none() {
        return support::skip::skipped("children_agree_on_their_own", "a C compiler (cc)");
    }
    for abi in [4, 5] {
        let nodes = Nodes::new(abi, "split");
        let said = nodes.run(RANKS, |_, _| {});
        said.all("init 0 A B\n");
        for text in &said.ranks {
            assert_eq!(text.matches(TUNED).count(), 2, "ABI v{abi}: {text}");
        }
    }
}

#[test]
fn ranks_of_one_process_agree() {
    if built().is_none() {
        return support::skip::skipped("ranks_of_one_process_agree", "a C compiler (cc)");
    }
    for abi in [4, 5] {
        let nodes = Nodes::new(abi, "all");
        let said = nodes.run(1, |_, _| {});
        said.all("init 0 A B C\n");
        assert_eq!(said.ranks[0].matches(TUNED).count(), 3, "ABI v{abi}: {}", said.ranks[0]);
    }
}

/// A thread may go on while another one still reads the contributions.
#[test]
fn ranks_that_are_threads_follow_the_rules_from_their_first_operation_on() {
    if built().is_none() {
        return support::skip::skipped(
            "ranks_that_are_threads_follow_the_rules_from_their_first_operation_on",
            "a C compiler (cc)",
        );
    }
    for abi in [4, 5, 7] {
        let said = Nodes::new(abi, "threads").run(1, |_, _| {});
        said.none(DEFAULT);
        assert_eq!(said.ranks[0].matches(TUNED).count(), 80, "ABI v{abi}: {}", said.ranks[0]);
    }
}

#[test]
fn communicators_that_do_not_block_follow_no_rules() {
    if built().is_none() {
        return support::skip::skipped(
            "communicators_that_do_not_block_follow_no_rules",
            "a C compiler (cc)",
        );
    }
    let nodes = Nodes::new(5, "nonblocking");
    let said = nodes.run(RANKS, |_, _| {});
    said.all("init 0 A\n");
    said.all(DEFAULT);
    assert_eq!(nodes.recorded(), [tuned::UNDECIDED; RANKS]);
    let nodes = Nodes::new(5, "plain");
    let said = nodes.run(RANKS, |_, c| {
        c.env("NCCL_COMM_BLOCKING", "0");
    });
    said.all(DEFAULT);
    let nodes = Nodes::new(5, "nonblocking");
    let said = nodes.run(RANKS, |_, c| {
        c.env("RINGWATCH_TUNE_REQUIRE", "1");
    });
    said.all("init 5\n");
    said.all("a communicator that does not block");
}
