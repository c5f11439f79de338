//! The table of tuner rules: a file of every format version is read, and no other bytes are.

#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

use proptest::prelude::*;
use ringwatch_wire::tuning::*;

/// A file of version 1, as the first writer wrote it.
const V1: &[u8] = include_bytes!("data/tuning-v1.bin");

fn row(collective: u8, min_bytes: u64, max_bytes: u64) -> Row {
    Row {
        min_bytes,
        max_bytes,
        min_ranks: 0,
        max_ranks: u32::MAX,
        min_nodes: 1,
        max_nodes: 1,
        prefer: 0,
        forbid: 0,
        pipe_ops: ANY_PIPE_OPS,
        collective,
        channels: 0,
        registered: Registered::Any,
    }
}

/// Rows that use every field.
fn sample() -> Vec<Row> {
    vec![
        Row { forbid: entries_of(0), ..row(0, 0, u64::MAX) },
        Row { prefer: entry(4, 2), channels: 16, min_ranks: 8, max_ranks: 8, ..row(4, 0, 65_535) },
        Row { prefer: entry(1, 0), pipe_ops: 4, registered: Registered::Yes, ..row(4, 0, 65_535) },
        Row { prefer: entry(6, 1), registered: Registered::No, ..row(4, 65_536, 1 << 40) },
        Row { channels: CHANNELS_MAX, max_nodes: 64, ..row(4, (1 << 40) + 1, u64::MAX) },
    ]
}

fn written(rows: &[Row]) -> Vec<u8> {
    let mut table = vec![0; HEADER_BYTES];
    rows.iter().for_each(|r| table.extend(r.to_bytes()));
    seal(&mut table);
    table
}

#[test]
fn a_file_of_version_1_is_read_and_written_the_same() {
    let rules = Rules::read(V1).unwrap();
    assert_eq!(rules.rows().collect::<Vec<_>>(), sample());
    assert_eq!(written(&sample()), V1, "write a new version instead of changing this one");
    assert_eq!(rules.hash(), 0x5f2f_fc9d_5301_0d18);
}

#[test]
fn rows_are_selected_by_ranks_and_nodes() {
    let rules = Rules::read(V1).unwrap();
    let count = |ranks, nodes| rules.rows_for(ranks, nodes).count();
    assert_eq!((count(8, 1), count(4, 1), count(8, 2)), (5, 4, 1));
}

#[test]
fn rows_out_of_order_or_range_are_refused() {
    let refused = |rows: &[Row]| Rules::read(&written(rows)).unwrap_err();
    for rows in [
        [row(4, 0, 9), row(3, 0, 9)],
        [row(4, 10, 19), row(4, 0, 9)],
        [row(4, 0, 9), row(4, 9, 19)],
        [row(4, 0, 9), row(4, 0, 8)],
    ] {
        assert_eq!(refused(&rows), Refusal::Order, "{rows:?}");
    }
    for wrong in [
        row(5, 0, 9),
        row(4, 9, 0),
        Row { prefer: 1, forbid: 1, ..row(4, 0, 9) },
        Row { prefer: 1 << 21, ..row(4, 0, 9) },
        Row { channels: 128, ..row(4, 0, 9) },
        Row { min_ranks: 2, max_ranks: 1, ..row(4, 0, 9) },
    ] {
        assert_eq!(refused(&[wrong]), Refusal::Row, "{wrong:?}");
    }
    assert_eq!(refused(&vec![row(4, 0, 9); ROWS_MAX + 1]), Refusal::Length);
    assert!(Rules::read(&written(&[])).is_ok(), "no rules are rules");
}

#[test]
fn every_cut_and_every_changed_bit_is_refused() {
    for length in 0..V1.len() {
        assert!(Rules::read(&V1[..length]).is_err(), "{length} bytes");
    }
    for bit in 0..V1.len() * 8 {
        let mut changed = V1.to_vec();
        changed[bit / 8] ^= 1 << (bit % 8);
        assert!(Rules::read(&changed).is_err(), "bit {bit}");
    }
}

proptest! {
    #[test]
    fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..400), is_sealed: bool) {
        let mut bytes = bytes;
        if is_sealed {
            seal(&mut bytes);
        }
        if let Ok(rules) = Rules::read(&bytes) {
            prop_assert_eq!(written(&rules.rows().collect::<Vec<_>>()), bytes);
        }
    }
}
