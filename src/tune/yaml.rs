//! Rules as people write them, in YAML.

use super::names::{ALGORITHMS, COLLECTIVES, PROTOCOLS, number};
use super::{Fault, Range, Rule, Selection};
use ringwatch_wire::tuning;
use serde::Deserialize;
use serde::de::{self, Deserializer, Visitor};
use serde_saphyr::Spanned;
use std::fmt;

/// The file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    environment: Variables,
    rules: Vec<Spanned<Written>>,
}

/// Variables that a job needs beside its rules. NCCL has no others that a search tries.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Variables {
    #[serde(rename = "NCCL_MIN_NCHANNELS", default)]
    min_channels: Option<MinChannels>,
}

/// A rule as it is written.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    operation: String,
    #[serde(default)]
    min_bytes: Option<Size>,
    #[serde(default)]
    max_bytes: Option<Size>,
    #[serde(default)]
    ranks: Option<Numbers>,
    #[serde(default)]
    nodes: Option<Numbers>,
    #[serde(default)]
    registered: Option<Flag>,
    #[serde(default)]
    pipe_ops: Option<Count>,
    #[serde(default)]
    algorithm: Option<String>,
    #[serde(default)]
    protocol: Option<String>,
    #[serde(default)]
    channels: Option<Channels>,
    #[serde(default)]
    forbid: Vec<Forbidden>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Forbidden {
    #[serde(default)]
    algorithm: Option<String>,
    #[serde(default)]
    protocol: Option<String>,
}

/// The rules of a file, and its `NCCL_MIN_NCHANNELS`.
pub(super) fn read(text: &str) -> Result<(Vec<Rule>, Option<u32>), Fault> {
    // Where people see the line, the parser's own excerpt would come twice.
    let options = serde_saphyr::options! { with_snippet: false };
    let file: File = serde_saphyr::from_str_with_options(text, options).map_err(|e| {
        let line = e.location().map_or(1, |l| usize::try_from(l.line()).unwrap_or(1).max(1));
        Fault { line, why: message(&e) }
    })?;
    let min_channels = file.environment.min_channels.map(|n| n.0);
    let rules = file.rules.into_iter().map(|rule| {
        let line = usize::try_from(rule.defined.line()).unwrap_or(1).max(1);
        rule.value.meant(line).map_err(|why| Fault { line, why })
    });
    Ok((rules.collect::<Result<_, _>>()?, min_channels))
}

/// A rule and what stands above it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Commented {
    pub(super) comments: Vec<String>,
    pub(super) rule: Rule,
}

/// Writes rules with comments, so that [`read`] finds the same rules.
pub(super) fn write(head: &[String], min_channels: Option<u32>, rules: &[Commented]) -> String {
    let mut text: String = head.iter().map(|line| format!("# {line}\n")).collect();
    text.extend(min_channels.map(|n| format!("environment:\n  NCCL_MIN_NCHANNELS: {n}\n")));
    if rules.is_empty() {
        return text + "rules: []\n";
    }
    text.push_str("rules:\n");
    for Commented { comments, rule } in rules {
        text.extend(comments.iter().map(|line| format!("  # {line}\n")));
        for (i, (key, value)) in fields(rule).iter().enumerate() {
            let mark = if i == 0 { "- " } else { "  " };
            text.push_str(&format!("  {mark}{key}: {value}\n"));
        }
        text.extend(rule.forbid.first().map(|_| "    forbid:\n"));
        for forbidden in &rule.forbid {
            let pairs: Vec<String> = entry(*forbidden).iter().map(|(k, v)| format!("{k}: {v}")).collect();
            text.push_str(&format!("      - {{{}}}\n", pairs.join(", ")));
        }
    }
    text
}

/// The keys of a rule that are not left out, but for `forbid`.
fn fields(rule: &Rule) -> Vec<(&'static str, String)> {
    let mut all = vec![("operation", COLLECTIVES.get(rule.collective).copied().unwrap_or("?").to_owned())];
    let any = Range::<u64>::ANY;
    let numbers =
        |r: Range<u32>| if r.min == r.max { r.min.to_string() } else { format!("{}-{}", r.min, r.max) };
    if rule.bytes.min != any.min {
        all.push(("min_bytes", rule.bytes.min.to_string()));
    }
    if rule.bytes.max != any.max {
        all.push(("max_bytes", rule.bytes.max.to_string()));
    }
    for (key, range) in [("ranks", rule.ranks), ("nodes", rule.nodes)] {
        if range != Range::<u32>::ANY {
            all.push((key, numbers(range)));
        }
    }
    all.extend(rule.is_registered.map(|r| ("registered", r.to_string())));
    all.extend(rule.pipe_ops.map(|n| ("pipe_ops", n.to_string())));
    all.extend(entry(rule.choose));
    all.extend(rule.channels.map(|n| ("channels", n.to_string())));
    all
}

fn entry(selection: Selection) -> Vec<(&'static str, String)> {
    let name = |names: &[&str], i: Option<usize>| Some((*names.get(i?)?).to_owned());
    let algorithm = name(&ALGORITHMS, selection.algorithm).map(|a| ("algorithm", a));
    algorithm.into_iter().chain(name(&PROTOCOLS, selection.protocol).map(|p| ("protocol", p))).collect()
}

/// The parser's message, on one line and without the place, which stands before it.
fn message(error: &serde_saphyr::Error) -> String {
    let text = error.to_string();
    let first = text.lines().next().unwrap_or_default();
    let first = first.rsplit_once(" at line ").map_or(first, |(before, _)| before);
    let what = first.split_once(": ").filter(|(place, _)| place.starts_with("error: line "));
    // It quotes the file, of which nothing may steer a terminal.
    let plain = |c: char| if c == ' ' || c.is_ascii_graphic() || c.is_alphanumeric() { c } else { '?' };
    what.map_or(first, |(_, what)| what).chars().map(plain).collect()
}

impl Written {
    fn meant(self, line: usize) -> Result<Rule, String> {
        let any = Range::<u64>::ANY;
        Ok(Rule {
            line,
            collective: number(&COLLECTIVES, "operation with rules", &self.operation)?,
            bytes: Range {
                min: self.min_bytes.map_or(any.min, |s| s.0),
                max: self.max_bytes.map_or(any.max, |s| s.0),
            },
            ranks: self.ranks.map_or(Range::<u32>::ANY, |n| n.0),
            nodes: self.nodes.map_or(Range::<u32>::ANY, |n| n.0),
            is_registered: self.registered.map(|f| f.0),
            pipe_ops: self.pipe_ops.map(|n| n.0),
            choose: selection(self.algorithm.as_deref(), self.protocol.as_deref())?,
            forbid: self
                .forbid
                .iter()
                .map(|f| selection(f.algorithm.as_deref(), f.protocol.as_deref()))
                .collect::<Result<_, _>>()?,
            channels: self.channels.map(|c| c.0),
        })
    }
}

fn selection(algorithm: Option<&str>, protocol: Option<&str>) -> Result<Selection, String> {
    Ok(Selection {
        algorithm: algorithm.map(|a| number(&ALGORITHMS, "algorithm", a)).transpose()?,
        protocol: protocol.map(|p| number(&PROTOCOLS, "protocol", p)).transpose()?,
    })
}

/// A size: `65536`, `64K`, `64KiB`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Size(u64);

/// A number, or several: `8`, `2-8`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Numbers(Range<u32>);

/// True or false.
#[derive(Debug, Clone, Copy)]
struct Flag(bool);

/// A number of operations.
#[derive(Debug, Clone, Copy)]
struct Count(u32);

/// A number of channels.
#[derive(Debug, Clone, Copy)]
struct Channels(u8);

/// The least number of channels of a communicator.
#[derive(Debug, Clone, Copy)]
struct MinChannels(u32);

/// NCCL makes no more channels.
const NCCL_CHANNELS_MAX: u32 = 64;

fn min_channels(text: &str) -> Option<MinChannels> {
    text.parse().ok().filter(|n| (1..=NCCL_CHANNELS_MAX).contains(n)).map(MinChannels)
}

fn channels(text: &str) -> Option<Channels> {
    text.parse().ok().filter(|n| (1..=tuning::CHANNELS_MAX).contains(n)).map(Channels)
}

fn size(text: &str) -> Option<u64> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let factor = match unit.trim().to_ascii_lowercase().trim_end_matches("ib") {
        "" | "b" => 1,
        "k" => 1 << 10,
        "m" => 1 << 20,
        "g" => 1u64 << 30,
        "t" => 1 << 40,
        _ => return None,
    };
    number.parse::<u64>().ok()?.checked_mul(factor)
}

fn numbers(text: &str) -> Option<Range<u32>> {
    let (min, max) = text.split_once('-').unwrap_or((text, text));
    Some(Range { min: min.trim().parse().ok()?, max: max.trim().parse().ok()? })
}

/// Reads a number or a text.
struct Either<T> {
    expected: &'static str,
    read: fn(&str) -> Option<T>,
}

impl<T> Visitor<'_> for Either<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.expected)
    }

    fn visit_u64<E: de::Error>(self, value: u64) -> Result<T, E> {
        self.visit_str(&value.to_string())
    }

    fn visit_i64<E: de::Error>(self, value: i64) -> Result<T, E> {
        self.visit_str(&value.to_string())
    }

    fn visit_str<E: de::Error>(self, value: &str) -> Result<T, E> {
        (self.read)(value).ok_or_else(|| E::invalid_value(de::Unexpected::Str(value), &self))
    }
}

/// Reads a type from the text of a value, and says in an error what it should have been.
macro_rules! from_text {
    ($type:ident, $expected:literal, $read:expr) => {
        impl<'de> Deserialize<'de> for $type {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                deserializer.deserialize_str(Either { expected: $expected, read: $read })
            }
        }
    };
}

from_text!(Size, "a size like 65536, 64K or 1M", |text| size(text).map(Size));
from_text!(Numbers, "a number like 8, or a range like 2-8", |text| numbers(text).map(Numbers));
from_text!(Flag, "registered: true or false", |text| text.parse().ok().map(Flag));
from_text!(Count, "pipe_ops: a number of operations", |text| text.parse().ok().map(Count));
from_text!(Channels, "channels: a number from 1 to 127", channels);
from_text!(MinChannels, "NCCL_MIN_NCHANNELS: a number from 1 to 64", min_channels);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_rules_are_read_as_the_same_rules() {
        let sample = "rules:\n- {operation: AllReduce, max_bytes: 64K, ranks: 2-8, nodes: 1, algorithm: TREE}\n\
                      - {operation: Reduce, min_bytes: 1M, registered: true, pipe_ops: 4, protocol: LL, channels: 8}\n\
                      - {operation: AllGather, forbid: [{algorithm: NVLS, protocol: LL}, {protocol: LL128}]}\n";
        let (rules, _) = read(sample).unwrap_or_default();
        let commented: Vec<Commented> = rules
            .iter()
            .map(|r| Commented { comments: vec!["why: so".to_owned()], rule: r.clone() })
            .collect();
        let text = write(&["head".to_owned()], Some(32), &commented);
        let (again, min_channels) = read(&text).unwrap_or_default();
        let without_line =
            |all: Vec<Rule>| all.into_iter().map(|r| Rule { line: 0, ..r }).collect::<Vec<_>>();
        assert_eq!(without_line(again), without_line(rules), "{text}");
        assert_eq!(min_channels, Some(32));
        assert_eq!(read(&write(&[], None, &[])).unwrap_or_default(), (Vec::new(), None));
        assert_eq!(read(&write(&[], Some(8), &[])).unwrap_or_default(), (Vec::new(), Some(8)));
    }

    #[test]
    fn sizes_and_numbers_are_read_as_people_write_them() {
        for (text, bytes) in [
            ("0", 0),
            ("65536", 65_536),
            ("64K", 65_536),
            ("64KiB", 65_536),
            ("64 kib", 65_536),
            ("1M", 1 << 20),
            ("4G", 4 << 30),
            ("1T", 1 << 40),
            ("12b", 12),
        ] {
            assert_eq!(size(text), Some(bytes), "{text}");
        }
        for wrong in ["", "K", "-1", "1.5M", "1X", "99999999999999999999", "99999999T"] {
            assert_eq!(size(wrong), None, "{wrong}");
        }
        assert_eq!(numbers("8"), Some(Range { min: 8, max: 8 }));
        assert_eq!(numbers("2 - 8"), Some(Range { min: 2, max: 8 }));
        for wrong in ["", "-", "-1", "2-", "a", "1-2-3", "4294967296"] {
            assert_eq!(numbers(wrong), None, "{wrong}");
        }
    }
}
