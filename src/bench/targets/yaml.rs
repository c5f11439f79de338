//! Targets as people write them, in YAML.

use super::units::{self, Bandwidth};
use super::{Goal, Target};
use crate::bench::op::{Collective, DType};
use serde::Deserialize;
use serde::de::{self, Deserializer, Visitor};
use serde_saphyr::Spanned;
use std::fmt;

/// The tolerance of `about_latency` where the file does not state it: longer by a fifth.
const TOLERANCE: f64 = 0.2;

/// No file has more targets: detection compares every transfer with all of them.
const TARGETS_MAX: usize = 256;

/// An error in a line, before the file's name is known.
#[derive(Debug)]
pub(super) struct Fault {
    pub(super) line: usize,
    pub(super) why: String,
}

/// The meaning of a file.
#[derive(Debug)]
pub(super) struct Meant {
    pub(super) link_gb_per_s: Option<f64>,
    pub(super) targets: Vec<Target>,
}

/// A value with its line.
type Field = Option<Spanned<Text>>;

/// The file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    link: Field,
    #[serde(default)]
    tolerance: Field,
    #[serde(default)]
    dtype: Field,
    targets: Spanned<Vec<Spanned<Written>>>,
}

/// A target as it is written.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    #[serde(default)]
    operation: Field,
    #[serde(default)]
    size: Field,
    #[serde(default)]
    ranks: Field,
    #[serde(default)]
    nodes: Field,
    #[serde(default)]
    dtype: Field,
    #[serde(default)]
    max_latency: Field,
    #[serde(default)]
    about_latency: Field,
    #[serde(default)]
    tolerance: Field,
    #[serde(default)]
    min_algbw: Field,
    #[serde(default)]
    min_busbw: Field,
}

pub(super) fn read(text: &str) -> Result<Meant, Fault> {
    // Where people see the line, the parser's own excerpt would come twice.
    let options = serde_saphyr::options! { with_snippet: false };
    let file: File = serde_saphyr::from_str_with_options(text, options).map_err(|e| {
        let line = e.location().map_or(1, |l| usize::try_from(l.line()).unwrap_or(1).max(1));
        Fault { line, why: message(&e) }
    })?;
    let link_gb_per_s = optional(&file.link, "link", units::gb_per_s)?;
    let defaults = Defaults {
        tolerance: optional(&file.tolerance, "tolerance", units::share)?.unwrap_or(TOLERANCE),
        dtype: optional(&file.dtype, "dtype", str::parse::<DType>)?.unwrap_or(DType::Float),
    };
    if file.targets.value.is_empty() {
        let why = "there are no targets; give at least one, with operation, size and max_latency".to_owned();
        return Err(Fault { line: line(&file.targets), why });
    }
    if let Some(first) = file.targets.value.get(TARGETS_MAX) {
        return Err(Fault {
            line: line(first),
            why: format!("more than {TARGETS_MAX} targets; split the file"),
        });
    }
    let targets = file.targets.value.iter().map(|t| t.value.meant(line(t), &defaults));
    Ok(Meant { link_gb_per_s, targets: targets.collect::<Result<_, _>>()? })
}

/// The parser's message, on one line and without the place, which stands before it.
fn message(error: &serde_saphyr::Error) -> String {
    let text = error.to_string();
    let first = text.lines().next().unwrap_or_default();
    let first = first.rsplit_once(" at line ").map_or(first, |(before, _)| before);
    let what = first.split_once(": ").filter(|(place, _)| place.starts_with("error: line "));
    printable(what.map_or(first, |(_, what)| what))
}

/// A text that quotes the file, of which nothing may steer a terminal.
fn printable(text: &str) -> String {
    let plain = |c: char| if c == ' ' || c.is_ascii_graphic() || c.is_alphanumeric() { c } else { '?' };
    text.chars().map(plain).collect()
}

fn line<T>(value: &Spanned<T>) -> usize {
    usize::try_from(value.defined.line()).unwrap_or(1).max(1)
}

fn optional<T>(
    field: &Field,
    name: &str,
    read: impl Fn(&str) -> Result<T, String>,
) -> Result<Option<T>, Fault> {
    let Some(field) = field else { return Ok(None) };
    let wrong = |why: String| Fault { line: line(field), why: printable(&format!("{name}: {why}")) };
    read(field.value.0.trim()).map(Some).map_err(wrong)
}

/// A value that a target has to have.
fn needed<T>(value: Option<T>, line: usize, example: &str) -> Result<T, Fault> {
    let (name, _) = example.split_once(':').unwrap_or((example, ""));
    value
        .ok_or_else(|| Fault { line, why: format!("the target has no {name}; give it one, as in {example}") })
}

/// The values that the file states for all its targets.
#[derive(Debug)]
struct Defaults {
    tolerance: f64,
    dtype: DType,
}

impl Written {
    fn meant(&self, line: usize, defaults: &Defaults) -> Result<Target, Fault> {
        let goals = self.goals(defaults.tolerance)?;
        if goals.is_empty() {
            let why =
                "the target asks for nothing; give it max_latency, about_latency, min_algbw or min_busbw";
            return Err(Fault { line, why: why.to_owned() });
        }
        if let (Some(tolerance), None) = (&self.tolerance, &self.about_latency) {
            let why = "tolerance belongs to about_latency, which is not there; leave it out".to_owned();
            return Err(Fault { line: self::line(tolerance), why });
        }
        Ok(Target {
            line,
            collective: needed(
                optional(&self.operation, "operation", str::parse::<Collective>)?,
                line,
                "operation: all_reduce",
            )?,
            size_bytes: needed(optional(&self.size, "size", units::size)?, line, "size: 100 KB")?,
            dtype: optional(&self.dtype, "dtype", str::parse::<DType>)?.unwrap_or(defaults.dtype),
            ranks: optional(&self.ranks, "ranks", units::span)?,
            nodes: optional(&self.nodes, "nodes", units::span)?,
            goals,
        })
    }

    fn goals(&self, tolerance: f64) -> Result<Vec<Goal>, Fault> {
        let tolerance = optional(&self.tolerance, "tolerance", units::share)?.unwrap_or(tolerance);
        let max = optional(&self.max_latency, "max_latency", units::time_ns)?;
        let about = optional(&self.about_latency, "about_latency", units::time_ns)?;
        let algbw = optional(&self.min_algbw, "min_algbw", units::gb_per_s)?;
        let busbw = optional(&self.min_busbw, "min_busbw", units::bandwidth)?;
        let goals = [
            max.map(|ns| Goal::MaxLatency { ns }),
            about.map(|ns| Goal::AboutLatency { ns, tolerance }),
            algbw.map(|gb_per_s| Goal::MinAlgbw { gb_per_s }),
            busbw.map(|b| match b {
                Bandwidth::GbPerS(gb_per_s) => Goal::MinBusbw { gb_per_s },
                Bandwidth::LinkShare(share) => Goal::MinLinkShare { share },
            }),
        ];
        Ok(goals.into_iter().flatten().collect())
    }
}

/// A scalar as it stands in the file: a number is a text here, since most values carry a unit.
#[derive(Debug)]
struct Text(String);

impl<'de> Deserialize<'de> for Text {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Scalar;
        impl Visitor<'_> for Scalar {
            type Value = Text;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number or a text")
            }

            fn visit_u64<E: de::Error>(self, value: u64) -> Result<Text, E> {
                Ok(Text(value.to_string()))
            }

            fn visit_i64<E: de::Error>(self, value: i64) -> Result<Text, E> {
                Ok(Text(value.to_string()))
            }

            fn visit_str<E: de::Error>(self, value: &str) -> Result<Text, E> {
                Ok(Text(value.to_owned()))
            }
        }
        deserializer.deserialize_str(Scalar)
    }
}
