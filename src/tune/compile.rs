//! From rules, whose ranges overlap as people like it, to rows whose ranges are the same or disjoint.

use super::{Fault, Range, Rule};
use ringwatch_wire::tuning::{self, ANY_PIPE_OPS, CANDIDATES, HEADER_BYTES, ROWS_MAX, Registered, Row, seal};
use std::collections::BTreeSet;

/// The table that the plugin reads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Compiled {
    bytes: Vec<u8>,
    hash: u64,
    rows: usize,
}

impl Compiled {
    /// The table, as [`ringwatch_wire::tuning`] describes it.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Its content hash, which is equal for equal rules.
    pub fn hash(&self) -> u64 {
        self.hash
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }
}

/// Rules that apply to the same sizes of one collective.
struct Segment<'a> {
    collective: usize,
    bytes: Range<u64>,
    rules: Vec<&'a Rule>,
}

pub(super) fn compile(rules: &[Rule]) -> Result<Compiled, Fault> {
    let mut table = vec![0; HEADER_BYTES];
    let mut rows = 0;
    for segment in segments(rules) {
        check_candidates(&segment)?;
        for rule in &segment.rules {
            rows += 1;
            if rows > ROWS_MAX {
                let why = format!(
                    "the rules up to this one make more than {ROWS_MAX} rows; let fewer sizes overlap"
                );
                return Err(Fault { line: rule.line, why });
            }
            table.extend(row(rule, segment.collective, segment.bytes).to_bytes());
        }
    }
    seal(&mut table);
    // The plugin's own reader has the last word.
    let hash = tuning::Rules::read(&table).map(|r| r.hash());
    let hash = hash.map_err(|why| Fault { line: 1, why: format!("the table is not valid: {why:?}") })?;
    Ok(Compiled { bytes: table, hash, rows })
}

/// Rules that no segment has, as rules above them decide all their sizes.
pub(super) fn unused(rules: &[Rule]) -> Vec<&Rule> {
    let used: BTreeSet<*const Rule> =
        segments(rules).iter().flat_map(|s| s.rules.iter().map(|r| std::ptr::from_ref(*r))).collect();
    rules.iter().filter(|r| !used.contains(&std::ptr::from_ref(*r))).collect()
}

/// The sizes of each collective, cut wherever a rule begins or ends.
fn segments(rules: &[Rule]) -> Vec<Segment<'_>> {
    let mut all: Vec<Segment<'_>> = Vec::new();
    for collective in 0..tuning::COLLECTIVES {
        let own: Vec<&Rule> = rules.iter().filter(|r| r.collective == collective).collect();
        let begins = own.iter().map(|r| r.bytes.min);
        let starts: BTreeSet<u64> =
            begins.chain(own.iter().filter_map(|r| r.bytes.max.checked_add(1))).collect();
        let ends = starts.iter().skip(1).map(|next| next - 1).chain([u64::MAX]);
        for (min, max) in starts.iter().copied().zip(ends) {
            let bytes = Range { min, max };
            let matching = reachable(own.iter().copied().filter(|r| r.bytes.overlaps(bytes)));
            match all.last_mut() {
                _ if matching.is_empty() => {}
                Some(before)
                    if before.collective == collective
                        && before.bytes.max.checked_add(1) == Some(min)
                        && is_same(&before.rules, &matching) =>
                {
                    before.bytes.max = max;
                }
                _ => all.push(Segment { collective, bytes, rules: matching }),
            }
        }
    }
    all
}

fn is_same(a: &[&Rule], b: &[&Rule]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| std::ptr::eq(*a, *b))
}

/// The rules up to the first that decides whatever else holds.
fn reachable<'a>(rules: impl Iterator<Item = &'a Rule>) -> Vec<&'a Rule> {
    let mut all = Vec::new();
    for rule in rules {
        all.push(rule);
        if is_final(rule) {
            break;
        }
    }
    all
}

/// True for a rule without a condition. One that chooses may be impossible, and then the next one is asked.
fn is_final(rule: &Rule) -> bool {
    rule.choose.entries() == 0
        && rule.is_registered.is_none()
        && rule.pipe_ops.is_none()
        && rule.ranks == Range::<u32>::ANY
        && rule.nodes == Range::<u32>::ANY
}

/// The plugin asks a few rules about each call, so that it takes no time.
fn check_candidates(segment: &Segment<'_>) -> Result<(), Fault> {
    for (i, rule) in segment.rules.iter().enumerate() {
        let above = segment.rules.iter().take(i);
        let together = above.filter(|r| r.ranks.overlaps(rule.ranks) && r.nodes.overlaps(rule.nodes)).count();
        if together >= CANDIDATES {
            let why = format!(
                "more than {CANDIDATES} rules apply to {} bytes for the same ranks and nodes; narrow some of them",
                segment.bytes.min
            );
            return Err(Fault { line: rule.line, why });
        }
    }
    Ok(())
}

fn row(rule: &Rule, collective: usize, bytes: Range<u64>) -> Row {
    Row {
        min_bytes: bytes.min,
        max_bytes: bytes.max,
        min_ranks: rule.ranks.min,
        max_ranks: rule.ranks.max,
        min_nodes: rule.nodes.min,
        max_nodes: rule.nodes.max,
        prefer: rule.choose.entries(),
        forbid: rule.forbid.iter().fold(0, |all, s| all | s.entries()),
        pipe_ops: rule.pipe_ops.unwrap_or(ANY_PIPE_OPS),
        // Below the number of collectives.
        collective: collective as u8,
        channels: rule.channels.unwrap_or(0),
        registered: match rule.is_registered {
            None => Registered::Any,
            Some(false) => Registered::No,
            Some(true) => Registered::Yes,
        },
    }
}
