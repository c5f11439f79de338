//! Rules for NCCL's tuner: as people write them, and the compiled table that the plugin reads in the job.

use crate::plain;
use ringwatch::tune::Rules;
use ringwatch_plugin::tuner::decision::{Call, Choice, Choices, ENTRIES, FORBIDDEN_US};
use ringwatch_wire::tuning::{self, CANDIDATES, HEADER_BYTES, Row, seal};

/// Longer inputs are not tried, in bytes.
const INPUT_MAX: usize = 64 << 10;

/// YAML, and the CSV of NVIDIA's example tuner.
pub(super) fn text(bytes: &[u8]) {
    if bytes.len() > INPUT_MAX {
        return;
    }
    let text = String::from_utf8_lossy(bytes);
    for read in [Rules::from_yaml(&text, "rules"), Rules::from_csv(&text, "rules")] {
        match read.and_then(|rules| rules.compile().map(|compiled| (rules, compiled))) {
            Ok((rules, compiled)) => {
                let table = tuning::Rules::read(compiled.bytes()).unwrap();
                assert_eq!(table.hash(), compiled.hash());
                asked(&table);
                written_as_csv(&rules);
                rules.warnings().iter().for_each(|w| plain::text("a warning", w, INPUT_MAX));
            }
            Err(e) => plain::text("an error", &e.to_string(), 8 * INPUT_MAX),
        }
    }
}

/// Rules that are written as CSV are read again, and written the same.
fn written_as_csv(rules: &Rules) {
    let Ok(csv) = rules.to_csv() else { return };
    let again = Rules::from_csv(&csv, "rules");
    // Rows for the sizes without rules may be one too many.
    let Ok(again) = again else { return };
    let rows =
        |text: &str| text.lines().filter(|l| !l.starts_with('#')).map(str::to_owned).collect::<Vec<_>>();
    assert_eq!(rows(&again.to_csv().unwrap()), rows(&csv));
}

/// The compiled table. Its hash is made right, as no damage would get past it.
pub(super) fn table(bytes: &[u8]) {
    let mut bytes = bytes[..bytes.len().min(INPUT_MAX)].to_vec();
    asked_if_valid(&bytes);
    if bytes.len() >= HEADER_BYTES {
        seal(&mut bytes);
        asked_if_valid(&bytes);
    }
}

fn asked_if_valid(bytes: &[u8]) {
    if let Ok(table) = tuning::Rules::read(bytes) {
        let mut again = vec![0; HEADER_BYTES];
        table.rows().for_each(|r| again.extend(r.to_bytes()));
        seal(&mut again);
        assert_eq!(again, bytes, "a valid table is written the same");
        asked(&table);
    }
}

/// Whatever the rules: impossible entries stay as they are, and costs stay possible.
fn asked(table: &tuning::Rules<'_>) {
    for (ranks, nodes) in [(2, 1), (8, 1), (16, 2), (u32::MAX, u32::MAX)] {
        let rows: Vec<Row> = table.rows_for(ranks, nodes).collect();
        let choices: Vec<Choice> = rows.iter().map(Choice::of).collect();
        let mut ends = Box::new([[0; 1024]; tuning::COLLECTIVES]);
        let Some(choices) = Choices::new(&choices, &mut ends, rows.iter().copied(), nodes) else {
            assert!(rows.len() > CANDIDATES);
            continue;
        };
        let sizes = rows.iter().flat_map(|r| [r.min_bytes, r.max_bytes, r.max_bytes.wrapping_add(1)]);
        for bytes in sizes.take(512).chain([0, u64::MAX]) {
            for collective in [0, 4, 5, usize::MAX] {
                let call = Call { collective, bytes, pipe_ops: 1, is_registered: bytes % 2 == 0 };
                let before: [f32; ENTRIES] =
                    std::array::from_fn(|i| if bytes >> i & 1 == 0 { 10.0 + i as f32 } else { -1.0 });
                let mut costs = before;
                let channels = choices.decide(&call, &mut costs);
                assert!(channels <= tuning::CHANNELS_MAX);
                for (now, before) in costs.iter().zip(before) {
                    let is_edited = before >= 0.0 && (*now == 0.0 || *now == FORBIDDEN_US);
                    assert!(*now == before || is_edited, "{before} became {now}");
                }
            }
        }
    }
}
