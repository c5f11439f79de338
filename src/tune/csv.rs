//! The CSV of NVIDIA's example tuner: ten columns, of which the last two may be absent, and the first row that matches
//! decides.
//!
//! That tuner takes one channel wherever no row matches or a row has no channels. So what is written has a row for every
//! size, and a number of channels in every row.

use super::names::{ALGORITHMS, COLLECTIVES, PROTOCOLS, number};
use super::{Fault, Range, Rule, Selection};
use std::fmt::Write;

const HEADER: &str =
    "collective_type,min_bytes,max_bytes,algorithm,protocol,channels,nNodes,nRanks,numPipeOps,regBuff";
const FIELDS: usize = 10;
/// Columns that older files have.
const FIELDS_MIN: usize = 8;
/// Any number, in the columns that can say so.
const ANY: i64 = -1;
/// More channels than a communicator usually has; NCCL takes as many of them as there are.
const ALL_CHANNELS: i64 = 32;
/// Algorithms for which NCCL takes exactly the channels that it is told, even if there are fewer: COLLNET_DIRECT,
/// COLLNET_CHAIN and NVLS.
const UNLIMITED: [usize; 3] = [2, 3, 4];
/// RING and SIMPLE work everywhere; the example tuner's documentation names them as its own default.
const FALLBACK: Selection = Selection { algorithm: Some(1), protocol: Some(2) };
/// Most rows that one rule may become: the CSV has no ranges of ranks or nodes.
const ROWS_MAX: u64 = 64;

pub(super) fn read(text: &str) -> Result<Vec<Rule>, Fault> {
    let lines = text.lines().enumerate().map(|(i, l)| (i + 1, l.trim()));
    let rows =
        lines.filter(|(_, l)| !l.is_empty() && !l.starts_with('#') && !l.starts_with("collective_type,"));
    rows.map(|(line, row)| rule(line, row).map_err(|why| Fault { line, why })).collect()
}

fn rule(line: usize, row: &str) -> Result<Rule, String> {
    let fields: Vec<&str> = row.split(',').map(str::trim).collect();
    if !(FIELDS_MIN..=FIELDS).contains(&fields.len()) {
        return Err(format!("{} columns; there are {FIELDS_MIN} to {FIELDS}: {HEADER}", fields.len()));
    }
    let field = |i: usize| fields.get(i).copied();
    let size = |i: usize, name: &str| {
        let text = field(i).unwrap_or_default();
        text.parse::<u64>().map_err(|_| format!("{name} {text:?} is no number of bytes"))
    };
    // A column that is absent, as in older files, matches anything.
    let number_or_any = |i: usize, name: &str| match field(i).map(str::parse::<i64>) {
        None | Some(Ok(ANY)) => Ok(None),
        Some(Ok(n)) => {
            u32::try_from(n).map(Some).map_err(|_| format!("{name} {n} is neither -1 nor a number"))
        }
        Some(Err(_)) => Err(format!("{name} {:?} is no number", field(i).unwrap_or_default())),
    };
    let exactly = |n: Option<u32>| n.map_or(Range::<u32>::ANY, |n| Range { min: n, max: n });
    let channels = number_or_any(5, "channels")?.filter(|n| *n != 0);
    Ok(Rule {
        line,
        collective: number(&COLLECTIVES, "collective_type", field(0).unwrap_or_default())?,
        bytes: Range { min: size(1, "min_bytes")?, max: size(2, "max_bytes")? },
        choose: Selection {
            algorithm: Some(number(&ALGORITHMS, "algorithm", field(3).unwrap_or_default())?),
            protocol: Some(number(&PROTOCOLS, "protocol", field(4).unwrap_or_default())?),
        },
        channels: channels.map(|n| u8::try_from(n).unwrap_or(u8::MAX)),
        nodes: exactly(number_or_any(6, "nNodes")?),
        ranks: exactly(number_or_any(7, "nRanks")?),
        pipe_ops: number_or_any(8, "numPipeOps")?,
        is_registered: match number_or_any(9, "regBuff")? {
            None => None,
            Some(0) => Some(false),
            Some(1) => Some(true),
            Some(n) => return Err(format!("regBuff {n} is neither -1, 0 nor 1")),
        },
        forbid: Vec::new(),
    })
}

pub(super) fn write(rules: &[Rule]) -> Result<String, Fault> {
    let mut text = format!("# {HEADER}\n");
    for rule in rules {
        write_rule(&mut text, rule)?;
    }
    let uncovered =
        (0..COLLECTIVES.len()).filter(|c| !rules.iter().any(|r| r.collective == *c && covers_all(r)));
    for (i, collective) in uncovered.enumerate() {
        if i == 0 {
            text.push_str(
                "# Sizes without a rule. The example tuner has no row that leaves the choice to NCCL.\n",
            );
        }
        write_row(&mut text, &fallback(collective), ANY, ANY, FALLBACK);
    }
    Ok(text)
}

fn fallback(collective: usize) -> Rule {
    Rule {
        line: 0,
        collective,
        bytes: Range::<u64>::ANY,
        ranks: Range::<u32>::ANY,
        nodes: Range::<u32>::ANY,
        is_registered: None,
        pipe_ops: None,
        choose: FALLBACK,
        forbid: Vec::new(),
        channels: None,
    }
}

/// True for a rule that matches every size and is possible everywhere.
fn covers_all(rule: &Rule) -> bool {
    let all = fallback(rule.collective);
    Rule { line: all.line, channels: all.channels, ..rule.clone() } == all
}

fn write_rule(text: &mut String, rule: &Rule) -> Result<(), Fault> {
    let fault = |why: &str| Err(Fault { line: rule.line, why: why.to_owned() });
    let Selection { algorithm: Some(_), protocol: Some(_) } = rule.choose else {
        return fault("NVIDIA's CSV has no row without both algorithm and protocol; give the rule both");
    };
    let numbers = |range: Range<u32>| match range {
        Range::<u32>::ANY => vec![ANY],
        Range { min, max } => (min..=max).take(ROWS_MAX as usize + 1).map(i64::from).collect::<Vec<_>>(),
    };
    let (nodes, ranks) = (numbers(rule.nodes), numbers(rule.ranks));
    if nodes.len() as u64 * ranks.len() as u64 > ROWS_MAX {
        return fault(
            "NVIDIA's CSV has no ranges of ranks or nodes, and this rule needs more than 64 rows; narrow it",
        );
    }
    for node in &nodes {
        for rank in &ranks {
            write_row(text, rule, *node, *rank, rule.choose);
        }
    }
    Ok(())
}

fn write_row(text: &mut String, rule: &Rule, nodes: i64, ranks: i64, choose: Selection) {
    let (algorithm, protocol) = (choose.algorithm.unwrap_or(0), choose.protocol.unwrap_or(0));
    let usual = if UNLIMITED.contains(&algorithm) { ANY } else { ALL_CHANNELS };
    let channels = rule.channels.map_or(usual, i64::from);
    let name = |names: &[&str], i: usize| names.get(i).copied().unwrap_or_default().to_ascii_lowercase();
    let written = writeln!(
        text,
        "{},{},{},{},{},{channels},{nodes},{ranks},{},{}",
        name(&COLLECTIVES, rule.collective),
        rule.bytes.min,
        rule.bytes.max,
        name(&ALGORITHMS, algorithm),
        name(&PROTOCOLS, protocol),
        rule.pipe_ops.map_or(ANY, i64::from),
        rule.is_registered.map_or(ANY, i64::from),
    );
    // A text has room for everything.
    debug_assert!(written.is_ok());
}
