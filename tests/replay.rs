//! The recordings, their compact form, and the player, watched by a plugin written in C.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use crate::support::skipped;
use proptest::prelude::*;
use ringwatch::replay::{
    Abi, Call, Descriptor, Event, Pace, PlayReport, Player, PlayerOptions, RankTrace, ReplayError, Scenario,
    Trace, fixture, fixture_bytes, monotonic_ns,
};

const JOBS: [(Scenario, bool); 6] = [
    (Scenario::Mixed, false),
    (Scenario::MissingRank, false),
    (Scenario::Mismatch, false),
    (Scenario::Mixed, true),
    (Scenario::MissingRank, true),
    (Scenario::Mismatch, true),
];

fn node_name(two_node: bool) -> &'static str {
    if two_node { "two-node" } else { "one-node" }
}

// The recordings.

#[test]
fn fixtures_hold_as_many_callbacks_as_the_logs_had_lines() {
    let lines = [11_616, 1_194, 1_278, 36_842, 2_000, 2_264];
    for ((scenario, two_node), lines) in JOBS.into_iter().zip(lines) {
        assert_eq!(fixture(scenario, two_node).event_count(), lines, "{scenario} {two_node}");
    }
}

#[test]
fn fixtures_hold_as_many_starts_of_each_kind_as_the_logs() {
    let mut starts: BTreeMap<&str, u32> = BTreeMap::new();
    let (mut stops, mut states, mut inits, mut finalizes) = (0, 0, 0, 0);
    for (scenario, two_node) in JOBS {
        for event in fixture(scenario, two_node).ranks.iter().flat_map(|rank| &rank.events) {
            match &event.call {
                Call::Start { descriptor, .. } => *starts.entry(descriptor.type_name()).or_default() += 1,
                Call::Stop { .. } => stops += 1,
                Call::State { .. } => states += 1,
                Call::Init { .. } => inits += 1,
                Call::Finalize { .. } => finalizes += 1,
            }
        }
    }
    let expected = [
        ("Coll", 382),
        ("CollApi", 350),
        ("Group", 374),
        ("GroupApi", 342),
        ("KernelCh", 4_082),
        ("KernelLaunch", 342),
        ("P2p", 80),
        ("P2pApi", 80),
        ("ProxyCtrl", 1_283),
        ("ProxyOp", 390),
        ("ProxyStep", 6_660),
    ];
    assert_eq!(starts, BTreeMap::from(expected));
    assert_eq!((stops, states, inits, finalizes), (14_141, 26_648, 32, 8));
}

/// By hand, with RINGWATCH_TRACE_LOGS set to the folder of the original logs: checks that the
/// fixtures hold every byte of them, and with RINGWATCH_TRACE_WRITE set writes the fixtures first.
#[test]
#[ignore = "needs the original logs, in the folder that RINGWATCH_TRACE_LOGS names"]
fn fixtures_equal_the_original_logs() {
    let logs = std::env::var_os("RINGWATCH_TRACE_LOGS").map(PathBuf::from);
    let logs = logs.expect("RINGWATCH_TRACE_LOGS names the folder");
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/traces");
    for (scenario, two_node) in JOBS {
        let folder = logs.join(node_name(two_node)).join(scenario.as_str());
        let texts: Vec<(String, String)> = (0..4)
            .map(|rank| format!("rank{rank}"))
            .map(|label| {
                let text = std::fs::read_to_string(folder.join(format!("{label}.log"))).unwrap();
                (label, text)
            })
            .collect();
        let parsed = Trace::parse_logs(texts.iter().map(|(l, t)| (l.as_str(), t.as_str()))).unwrap();
        let file = data.join(format!("{}-{scenario}.rwt", node_name(two_node)));
        if std::env::var_os("RINGWATCH_TRACE_WRITE").is_some() {
            std::fs::write(&file, parsed.encode()).unwrap();
        }
        let decoded = Trace::decode(&std::fs::read(&file).unwrap()).unwrap();
        assert!(decoded == parsed, "{} differs from its logs", file.display());
        for (rank, (label, text)) in decoded.ranks.iter().zip(&texts) {
            assert!(rank.to_log() == *text, "{scenario} {label} is not given back to the letter");
        }
    }
}

/// By hand, with RINGWATCH_TRACE_SHOW set to a fixture's name and a rank: prints it as a log.
#[test]
#[ignore = "prints the fixture that RINGWATCH_TRACE_SHOW names, one-node-mixed/rank0 for example"]
fn show_a_fixture() {
    let wanted = std::env::var("RINGWATCH_TRACE_SHOW").expect("RINGWATCH_TRACE_SHOW names a fixture");
    for (scenario, two_node) in JOBS {
        for rank in fixture(scenario, two_node).ranks {
            if format!("{}-{scenario}/{}", node_name(two_node), rank.label) == wanted {
                print!("{}", rank.to_log());
            }
        }
    }
}

#[test]
fn encoding_a_decoded_fixture_gives_the_same_trace() {
    for (scenario, two_node) in JOBS {
        let trace = fixture(scenario, two_node);
        assert!(Trace::decode(&trace.encode()).unwrap() == trace, "{scenario} {two_node}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_mutated_file_makes_decoding_panic(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..8),
        end in any::<prop::sample::Index>(),
        truncate in any::<bool>(),
    ) {
        let mut bytes = fixture_bytes(Scenario::Mismatch, false).to_vec();
        for (at, value) in changes {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        if truncate {
            bytes.truncate(end.index(bytes.len()));
        }
        drop(Trace::decode(&bytes));
    }

    /// Behind the compression, where a change is not caught by a checksum or a broken code.
    #[test]
    fn no_mutated_body_makes_decoding_panic(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
        end in any::<prop::sample::Index>(),
        truncate in any::<bool>(),
    ) {
        let bytes = fixture_bytes(Scenario::Mismatch, false);
        let mut body = miniz_oxide::inflate::decompress_to_vec(&bytes[12..]).unwrap();
        for (at, value) in changes {
            let at = at.index(body.len());
            body[at] = value;
        }
        if truncate {
            body.truncate(end.index(body.len()));
        }
        let mut bytes = bytes[..12].to_vec();
        bytes.extend(miniz_oxide::deflate::compress_to_vec(&body, 1));
        if let Ok(trace) = Trace::decode(&bytes) {
            // Whatever it says now, it can be said again.
            prop_assert!(Trace::decode(&trace.encode()).unwrap() == trace);
        }
    }
}

// The player.

/// A copy of the recording plugin of its own for a test, behaving as `flags` says; `None` and a word
/// on stderr where there is no C compiler.
fn recorder(test: &str, flags: &str) -> Option<(tempfile::TempDir, PathBuf)> {
    static BUILT: OnceLock<Option<(tempfile::TempDir, PathBuf)>> = OnceLock::new();
    let built = BUILT.get_or_init(|| {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/recorder.c");
        let folder = tempfile::tempdir().unwrap();
        let library = folder.path().join("recorder.so");
        let mut compiler = Command::new("cc");
        compiler.args(["-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o"]).arg(&library).arg(source);
        match compiler.args(["-ldl", "-lpthread"]).stdin(Stdio::null()).status() {
            Ok(status) => {
                assert!(status.success(), "tests/data/recorder.c does not compile");
                Some((folder, library))
            }
            Err(_) => None,
        }
    });
    let Some((_, library)) = built else {
        skipped(test, "a C compiler (cc)");
        return None;
    };
    let folder = tempfile::tempdir().unwrap();
    // The loader knows a library by its inode; a copy has statics of its own.
    let copy = folder.path().join(format!("recorder.{flags}.so"));
    std::fs::copy(library, &copy).unwrap();
    Some((folder, copy))
}

struct Played {
    report: PlayReport,
    /// What the plugin saw.
    log: RankTrace,
    /// What it saw beyond that.
    extra: Vec<String>,
}

fn play(trace: &Trace, rank: usize, plugin: &Path, adjust: impl FnOnce(&mut PlayerOptions)) -> Played {
    let mut options = PlayerOptions::new(plugin, Abi::RECORDED, trace.timeline());
    options.pace = Pace::Unpaced;
    adjust(&mut options);
    let player = Player::new(options).unwrap();
    let report = player.play(&trace.ranks[rank]).unwrap();
    // Unloads the plugin, which then closes its files.
    drop(player);
    let read = |suffix: &str| std::fs::read_to_string(format!("{}.{suffix}", plugin.display())).unwrap();
    let log = Trace::parse_logs([("seen", read("log").as_str())]).unwrap().ranks.remove(0);
    Played { report, log, extra: read("extra").lines().map(str::to_owned).collect() }
}

/// What a plugin of a version should see of a recording, with handles numbered as they are given.
/// The states that v1 to v3 have for ProxyOps are not part of it.
fn expected(rank: &RankTrace, version: u8) -> Vec<(u16, Call)> {
    let mut number = HashMap::new();
    let mut bits = HashMap::new();
    let mut next = 0;
    let mut groups: HashMap<u16, u64> = HashMap::new();
    let mut seen = Vec::new();
    let first_with = |bit: u64| match bit {
        0x40 => 3,
        0x100..=0x800 => 5,
        _ => 1,
    };
    for event in &rank.events {
        let call = match event.call.clone() {
            Call::Init { ctx, comm_id, name, nodes, ranks, rank } => {
                next += 1;
                number.insert(ctx, next);
                if version <= 3 {
                    Call::Init { ctx: next, comm_id: 0, name: None, nodes: 0, ranks: 0, rank: 0 }
                } else {
                    Call::Init { ctx: next, comm_id, name, nodes, ranks, rank }
                }
            }
            Call::Finalize { ctx } => Call::Finalize { ctx: number[&ctx] },
            Call::Start { handle, ctx, parent, mut descriptor } => {
                bits.insert(handle, descriptor.type_bit());
                if version < first_with(descriptor.type_bit()) {
                    continue;
                }
                next += 1;
                number.insert(handle, next);
                let mut parent = number.get(&parent).copied().unwrap_or(0);
                match &mut descriptor {
                    Descriptor::Group => drop(groups.insert(event.thread, next)),
                    Descriptor::Coll { .. } | Descriptor::P2p { .. } if version <= 4 => {
                        parent = groups[&event.thread];
                    }
                    Descriptor::KernelCh { stamp_ns, .. } if version == 3 => *stamp_ns = 0,
                    Descriptor::ProxyOp { pid, .. } => *pid = std::process::id() as i32,
                    _ => {}
                }
                if let (Descriptor::P2p { channels, .. }, 1..=3) = (&mut descriptor, version) {
                    *channels = 0;
                }
                Call::Start { handle: next, ctx: number[&ctx], parent, descriptor }
            }
            Call::Stop { handle } => match number.get(&handle) {
                Some(&handle) => Call::Stop { handle },
                None => continue,
            },
            Call::State { handle, state, arg } => {
                let Some(&handle_now) = number.get(&handle) else { continue };
                let arg = match (bits[&handle], state, version) {
                    (0x8, 19, 1..=3) | (0x10, 20, 1..=3) | (0x40, 22, 3) => continue,
                    (0x100, _, _) | (0x10, _, 1..=3) => None,
                    _ => arg,
                };
                Call::State { handle: handle_now, state, arg }
            }
        };
        seen.push((event.thread, call));
    }
    seen
}

fn seen(log: &RankTrace) -> Vec<(u16, Call)> {
    let new_state = |event: &&Event| !matches!(event.call, Call::State { state: 0..=7, .. });
    log.events.iter().filter(new_state).map(|event| (event.thread, event.call.clone())).collect()
}

#[test]
fn every_version_sees_its_part_of_the_recording_call_for_call() {
    let two_node = fixture(Scenario::Mixed, true);
    let one_node = fixture(Scenario::Mixed, false);
    for abi in Abi::ALL {
        for (trace, rank) in [(&one_node, 3), (&two_node, 0)] {
            let Some((_folder, plugin)) =
                recorder("every_version_sees_its_part_of_the_recording_call_for_call", "")
            else {
                return;
            };
            let played = play(trace, rank, &plugin, |options| options.abi = abi);
            let expected = expected(&trace.ranks[rank], abi.number());
            let seen = seen(&played.log);
            for (index, (seen, expected)) in seen.iter().zip(&expected).enumerate() {
                assert_eq!(seen, expected, "call {index} of {abi}");
            }
            assert_eq!(seen.len(), expected.len(), "{abi}");
            let report = played.report;
            assert_eq!(report.calls(), played.log.events.len() as u64);
            assert_eq!((report.nonzero_returns, report.null_handles, report.suppressed), (0, 0, 0));
            // Every thread of the recording is one thread of the replay, and no other.
            assert_eq!(played.log.threads.len(), trace.ranks[rank].threads.len());
            assert_eq!(played.log.threads.iter().collect::<BTreeSet<_>>().len(), played.log.threads.len());
        }
    }
}

/// For each Coll and P2p the Group that its thread opened last.
fn groups_of_operations(log: &RankTrace) -> Vec<u64> {
    let mut open = HashMap::new();
    let mut groups = Vec::new();
    for event in &log.events {
        match event.call {
            Call::Start { handle, descriptor: Descriptor::Group, .. } => {
                open.insert(event.thread, handle);
            }
            Call::Start { descriptor: Descriptor::Coll { .. } | Descriptor::P2p { .. }, .. } => {
                groups.push(open[&event.thread]);
            }
            _ => {}
        }
    }
    groups
}

#[test]
fn fields_that_only_some_versions_have_are_filled_in() {
    let trace = fixture(Scenario::Mixed, true);
    let hash = "694aaded5bf93092";
    for abi in Abi::ALL {
        let Some((_folder, plugin)) = recorder("fields_that_only_some_versions_have_are_filled_in", "")
        else {
            return;
        };
        let played = play(&trace, 0, &plugin, |options| options.abi = abi);
        let of = |kind: &str| -> Vec<&String> {
            played.extra.iter().filter(|l| l.split(' ').next() == Some(kind)).collect()
        };
        // The first is an all-reduce of 1048576 bf16 on 4 ranks.
        let first = match abi.number() {
            1 => {
                format!("coll name=(nil) hash={hash} traffic=4194304 op=0 collnet=0 nvls=0 buffers=1")
            }
            2 => format!("coll name=(nil) hash={hash} traffic=4194304 buffers=1"),
            3 => format!("coll name=(nil) hash={hash} buffers=1"),
            4 => "coll buffers=1".to_owned(),
            _ => {
                let group = played.log.events.iter().find_map(|event| match event.call {
                    Call::Start { handle, descriptor: Descriptor::Group, .. } => Some(handle),
                    _ => None,
                });
                format!("coll group={} buffers=1", group.unwrap())
            }
        };
        assert_eq!(*of("coll")[0], first, "{abi}");
        assert_eq!(of("p2p").len(), 10, "{abi}");
        if abi.number() >= 5 {
            let told = played.extra.iter().filter_map(|line| {
                line.split(' ')
                    .find_map(|word| word.strip_prefix("group="))
                    .map(|group| group.parse().unwrap())
            });
            assert_eq!(told.collect::<Vec<u64>>(), groups_of_operations(&played.log), "{abi}");
        }
        let proxy_ops = of("proxyop");
        assert!(!proxy_ops.is_empty() && proxy_ops.iter().all(|l| *l == "proxyop rank=0 local=1"));
    }
}

#[test]
fn old_versions_hear_of_the_network_through_states_of_the_proxy_operation() {
    let trace = fixture(Scenario::Mixed, true);
    let Some((_folder, plugin)) =
        recorder("old_versions_hear_of_the_network_through_states_of_the_proxy_operation", "")
    else {
        return;
    };
    let played = play(&trace, 2, &plugin, |options| options.abi = Abi::new(2).unwrap());
    // Bytes and direction of each ProxyOp, out of the steps of the recording.
    let mut ops: HashMap<u64, (bool, u64, u64)> = HashMap::new();
    let mut op_of_step = HashMap::new();
    let mut numbers = HashMap::new();
    let mut next = 0;
    for event in &trace.ranks[2].events {
        match &event.call {
            Call::Init { .. } => next += 1,
            Call::Start { handle, parent, descriptor, .. } if descriptor.type_bit() <= 0x20 => {
                next += 1;
                match descriptor {
                    Descriptor::ProxyOp { send, .. } => {
                        numbers.insert(*handle, next);
                        ops.insert(next, (*send, 0, 0));
                    }
                    Descriptor::ProxyStep { .. } => drop(op_of_step.insert(*handle, numbers[parent])),
                    _ => {}
                }
            }
            Call::State { handle, state: 9 | 11, arg } => {
                ops.get_mut(&op_of_step[handle]).unwrap().1 += arg.unwrap();
            }
            Call::Stop { handle } => {
                if let Some(op) = op_of_step.get(handle) {
                    ops.get_mut(op).unwrap().2 += 1;
                }
            }
            _ => {}
        }
    }
    let mut last: HashMap<u64, (u64, u64, u64)> = HashMap::new();
    for line in played.extra.iter().filter(|line| line.starts_with("opstate")) {
        let mut values =
            line.split(' ').skip(1).map(|w| w.split_once('=').unwrap().1.parse::<u64>().unwrap());
        let mut take = || values.next().unwrap();
        let (handle, state, bytes, steps) = (take(), take(), take(), take());
        let (send, ..) = ops[&handle];
        assert!(if send { (0..=3).contains(&state) } else { (4..=7).contains(&state) }, "{line}");
        let before = last.insert(handle, (state, bytes, steps)).unwrap_or_default();
        assert!(bytes >= before.1, "bytes only grow: {line}");
    }
    assert!(ops.len() > 50);
    for (handle, (send, bytes, steps)) in ops {
        assert_eq!(last[&handle], (if send { 3 } else { 7 }, bytes, steps));
    }
}

#[test]
fn calls_keep_their_distances_and_stamps_their_durations() {
    let trace = fixture(Scenario::MissingRank, false);
    for scale in [1.0, 2.0] {
        let Some((_folder, plugin)) =
            recorder("calls_keep_their_distances_and_stamps_their_durations", "paced")
        else {
            return;
        };
        let start_at_ns = monotonic_ns() + 20_000_000;
        let played = play(&trace, 0, &plugin, |options| {
            options.pace = if scale == 1.0 { Pace::Original } else { Pace::Scaled(scale) };
            options.start_at_ns = Some(start_at_ns);
        });
        let recorded = &trace.ranks[0];
        let timeline = trace.timeline();
        let mut punctual = 0;
        let mut slips = HashMap::new();
        for (seen, recorded) in played.log.events.iter().zip(&recorded.events) {
            let due = start_at_ns as i64 + ((recorded.at_ns - timeline.epoch_ns) as f64 * scale) as i64;
            let late = seen.at_ns as i64 - due;
            assert!(late >= -1, "{late} ns early");
            punctual += u32::from(late < 50_000_000);
            if let (
                Call::Start { parent, descriptor: Descriptor::KernelCh { stamp_ns: seen_stamp, .. }, .. },
                Call::Start { descriptor: Descriptor::KernelCh { stamp_ns, .. }, .. },
            ) = (&seen.call, &recorded.call)
            {
                let since = ((stamp_ns - timeline.gpu_epoch_ns) as f64 * scale) as u64;
                let slip = seen_stamp - timeline.gpu_epoch_ns - since;
                // All channels of an operation move by the same, which is no more than the callback did.
                assert_eq!(*slips.entry(*parent).or_insert(slip), slip);
                assert!(late >= slip as i64, "a callback came earlier behind its stamp than recorded");
            }
        }
        assert!(slips.len() >= 3);
        let all = played.log.events.len() as u32;
        assert!(punctual * 2 > all, "{punctual} of {all} callbacks were punctual within 50 ms");
        let last = recorded.events.last().unwrap().at_ns - timeline.epoch_ns;
        assert!(played.report.elapsed_ns as f64 >= last as f64 * scale);
    }
}

#[test]
fn loops_bring_fresh_communicators_and_growing_stamps() {
    let trace = fixture(Scenario::Mismatch, false);
    let Some((_folder, plugin)) = recorder("loops_bring_fresh_communicators_and_growing_stamps", "") else {
        return;
    };
    let played = play(&trace, 1, &plugin, |options| options.loops = 3);
    let ids: Vec<u64> = played
        .log
        .events
        .iter()
        .filter_map(|event| match event.call {
            Call::Init { comm_id, .. } => Some(comm_id),
            _ => None,
        })
        .collect();
    assert_eq!(ids, [0x87f_3daf_4182_fb9c, 0x87f_3daf_4182_fb9d, 0x87f_3daf_4182_fb9e]);
    assert_eq!(played.log.events.len(), 3 * trace.ranks[1].events.len());
    let stamps: Vec<u64> = played
        .log
        .events
        .iter()
        .filter_map(|event| match event.call {
            Call::Start { descriptor: Descriptor::KernelCh { stamp_ns, .. }, .. } => Some(stamp_ns),
            _ => None,
        })
        .collect();
    let a_loop = stamps.len() / 3;
    for (early, late) in stamps.iter().zip(&stamps[a_loop..]) {
        assert_eq!(late - early, trace.timeline().period_ns);
    }
}

#[test]
fn a_null_handle_spares_the_plugin_what_nccl_spares_it() {
    let trace = fixture(Scenario::MissingRank, true);
    let count = |log: &RankTrace, bit: u64| {
        let start =
            |e: &&Event| matches!(&e.call, Call::Start { descriptor, .. } if descriptor.type_bit() == bit);
        log.events.iter().filter(start).count()
    };
    let played = |version: u8, flags: &str| {
        let (_folder, plugin) = recorder("a_null_handle_spares_the_plugin_what_nccl_spares_it", flags)?;
        Some(play(&trace, 0, &plugin, |options| options.abi = Abi::new(version).unwrap()))
    };
    // Up to 2.27 a NULL group hides all of its plan; later only the group's own stop is left out.
    let Some(old) = played(4, "null=1") else { return };
    assert_eq!([0x2, 0x8, 0x10, 0x40].map(|bit| count(&old.log, bit)), [0, 0, 0, 0]);
    let new = played(5, "null=1").unwrap();
    assert_eq!([0x1, 0x2, 0x8].map(|bit| count(&new.log, bit)), [4, 4, count(&trace.ranks[0], 0x8)]);
    assert_eq!((new.report.null_handles, new.report.suppressed), (4, 4));
    // A NULL ProxyOp: steps begin since 2.28, but their states are not told.
    let new = played(5, "null=8").unwrap();
    assert!(count(&new.log, 0x10) > 0);
    assert!(!new.log.events.iter().any(|e| matches!(e.call, Call::State { state: 8..=12, .. })));
    // Up to 2.25 a Coll is stopped without a look at the handle.
    let old = played(2, "null=2").unwrap();
    assert!(old.log.events.iter().any(|e| e.call == Call::Stop { handle: 0 }));
    let new = played(5, "null=2").unwrap();
    assert!(!new.log.events.iter().any(|e| e.call == Call::Stop { handle: 0 }));
}

#[test]
fn the_mask_is_honoured_only_on_request() {
    let trace = fixture(Scenario::Mixed, true);
    // A mask of Coll alone.
    let Some((_folder, plugin)) = recorder("the_mask_is_honoured_only_on_request", "mask=2") else { return };
    let all = play(&trace, 1, &plugin, |_| {});
    assert_eq!(all.report.masked, 0);
    assert_eq!(all.report.calls(), trace.ranks[1].events.len() as u64);
    let some = play(&trace, 1, &plugin, |options| options.honour_mask = true);
    let kinds: Vec<&str> = some.report.starts.keys().map(String::as_str).collect();
    assert_eq!(kinds, ["Coll", "CollApi", "Group", "GroupApi"]);
    assert_eq!(some.report.calls() + some.report.masked, trace.ranks[1].events.len() as u64);
    assert_eq!(some.report.starts["Coll"], all.report.starts["Coll"]);
}

#[test]
fn warnings_and_unwritten_handles_are_reported() {
    let trace = fixture(Scenario::MissingRank, false);
    let Some((_folder, plugin)) = recorder("warnings_and_unwritten_handles_are_reported", "warn.silent")
    else {
        return;
    };
    let played = play(&trace, 0, &plugin, |_| {});
    assert_eq!(played.report.warnings, ["the segment is full"]);
    assert_eq!(played.report.unwritten_handles, played.report.starts["ProxyCtrl"]);
    assert!(played.report.suppressed > 0);
}

#[test]
fn a_plugin_that_cannot_be_used_is_named() {
    let trace = fixture(Scenario::MissingRank, false);
    let open = |path: &Path| Player::new(PlayerOptions::new(path, Abi::RECORDED, trace.timeline()));
    let error = open(Path::new("/nonexistent/libplugin.so")).unwrap_err();
    assert!(matches!(&error, ReplayError::Open { .. }), "{error}");
    assert!(error.to_string().contains("/nonexistent/libplugin.so"));
    // The C library is a library without the symbol.
    let error = open(Path::new("libc.so.6")).unwrap_err();
    assert!(matches!(&error, ReplayError::Symbol { .. }), "{error}");
    assert!(error.to_string().contains("ncclProfiler_v5"), "{error}");
}

#[test]
fn a_recording_that_contradicts_itself_harms_nobody() {
    let test = "a_recording_that_contradicts_itself_harms_nobody";
    let log = "\
5 1 stop h=9
6 1 state h=9 s=22 a=1
7 1 finalize ctx=4
8 1 start h=2 c=77 p=0 Group
9 1 init ctx=1 id=a name=- nn=1 nr=2 r=0
4 2 start h=3 c=1 p=2 KernelCh ch=0 pt=18446744073709551615
3 1 start h=4 c=1 p=4 Coll rank=0 seq=0 Odd n=18446744073709551615 root=0 dt=Odd nch=1 nw=1 algo=Odd proto=Odd
2 2 state h=4 s=4000000000 a=18446744073709551615
1 1 start h=5 c=1 p=4 type=4611686018427387904
";
    let trace = Trace::parse_logs([("rank0", log)]).unwrap();
    for abi in Abi::ALL {
        for pace in [Pace::Original, Pace::Scaled(1e-3), Pace::Scaled(f64::NAN), Pace::Unpaced] {
            let Some((_folder, plugin)) = recorder(test, "") else { return };
            let report = play(&trace, 0, &plugin, |options| {
                options.abi = abi;
                options.pace = pace;
                options.loops = 2;
            })
            .report;
            assert_eq!(report.inits, 2);
            assert!(report.suppressed + report.absent >= 8, "{report:?}");
        }
    }
    let Some((_folder, plugin)) = recorder(test, "") else { return };
    let mut broken = trace.ranks[0].clone();
    broken.threads.pop();
    let player = Player::new(PlayerOptions::new(plugin, Abi::RECORDED, trace.timeline())).unwrap();
    let error = player.play(&broken).unwrap_err();
    assert!(matches!(&error, ReplayError::NoThread { event: 5, .. }), "{error}");
}
