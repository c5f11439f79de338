//! Times, bandwidths, shares and sizes as a file of targets has them. An error says what would have been right.

use super::super::sizes::parse_bytes;
use super::Span;

/// Splits a text into a number above zero and its unit.
fn number(text: &str) -> Option<(f64, &str)> {
    let text = text.trim();
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (digits, unit) = text.split_at(end);
    let value: f64 = digits.parse().ok()?;
    (value.is_finite() && value > 0.0).then(|| (value, unit.trim()))
}

/// Reads `0.5 ms` as ns.
pub(super) fn time_ns(text: &str) -> Result<f64, String> {
    let factor = |unit: &str| match unit {
        "ns" => Some(1.0),
        "us" | "µs" | "μs" => Some(1e3),
        "ms" => Some(1e6),
        "s" => Some(1e9),
        _ => None,
    };
    let read = number(text).and_then(|(value, unit)| Some(value * factor(unit)?));
    read.ok_or_else(|| format!("{text:?} is no time; write a number and ns, us, ms or s, as in 0.5 ms"))
}

/// Reads `450 GB/s` as 10^9 bytes a second.
pub(super) fn gb_per_s(text: &str) -> Result<f64, String> {
    let factor = |unit: &str| match unit {
        "MB/s" => Some(1e-3),
        "GB/s" => Some(1.0),
        "TB/s" => Some(1e3),
        "Gbit/s" => Some(0.125),
        _ => None,
    };
    let read = number(text).and_then(|(value, unit)| Some(value * factor(unit)?));
    read.ok_or_else(|| {
        format!("{text:?} is no bandwidth; write a number and MB/s, GB/s, TB/s or Gbit/s, as in 450 GB/s")
    })
}

/// Reads `90 %` as 0.9.
pub(super) fn share(text: &str) -> Result<f64, String> {
    let read = number(text).filter(|(value, unit)| *unit == "%" && *value <= 1000.0);
    read.map(|(value, _)| value / 100.0)
        .ok_or_else(|| format!("{text:?} is no share; write per cent above 0, as in 20 %"))
}

/// A bandwidth, or a share of the link.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Bandwidth {
    GbPerS(f64),
    LinkShare(f64),
}

/// Reads `400 GB/s`, or `90 % of link`.
pub(super) fn bandwidth(text: &str) -> Result<Bandwidth, String> {
    let wrong = || format!("{text:?} is no bandwidth; write 400 GB/s, or 90 % of link");
    match text.split_once(" of ") {
        Some((part, "link")) => share(part).map(Bandwidth::LinkShare).map_err(|_| wrong()),
        Some(_) => Err(wrong()),
        None => gb_per_s(text).map(Bandwidth::GbPerS).map_err(|_| wrong()),
    }
}

/// Reads `100 KB`: as the options of `bench`, with a blank where people put one.
pub(super) fn size(text: &str) -> Result<u64, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    match parse_bytes(&format!("{number}{}", unit.trim_start())) {
        Ok(0) => Err("size 0: there is nothing to send; write a size like 100 KB".to_owned()),
        other => other,
    }
}

/// Reads `8`, or `2-8`.
pub(super) fn span(text: &str) -> Result<Span, String> {
    let (min, max) = text.split_once('-').unwrap_or((text, text));
    let read = min.trim().parse().ok().zip(max.trim().parse().ok());
    read.map(|(min, max)| Span { min, max })
        .filter(|s| s.min > 0 && s.min <= s.max)
        .ok_or_else(|| format!("{text:?} is no number of ranks or nodes; write 8, or 2-8"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_read_with_and_without_a_blank() {
        for (text, ns) in [("0.5 ms", 5e5), ("500us", 5e5), ("500 µs", 5e5), ("2 s", 2e9), ("7ns", 7.0)] {
            assert_eq!(time_ns(text), Ok(ns), "{text}");
        }
        for (text, gb) in [("450 GB/s", 450.0), ("500MB/s", 0.5), ("1.5 TB/s", 1500.0), ("400 Gbit/s", 50.0)]
        {
            assert_eq!(gb_per_s(text), Ok(gb), "{text}");
        }
        assert_eq!((share("90 %"), share("12.5%")), (Ok(0.9), Ok(0.125)));
        assert_eq!(bandwidth("90 % of link"), Ok(Bandwidth::LinkShare(0.9)));
        assert_eq!(bandwidth("400 GB/s"), Ok(Bandwidth::GbPerS(400.0)));
        for (text, bytes) in [("100 KB", 102_400), ("100KiB", 102_400), ("10M", 10 << 20), ("4096", 4096)] {
            assert_eq!(size(text), Ok(bytes), "{text}");
        }
        assert_eq!(span("8"), Ok(Span { min: 8, max: 8 }));
        assert_eq!(span("2 - 8"), Ok(Span { min: 2, max: 8 }));
    }

    #[test]
    fn what_is_no_value_is_answered_with_one_that_is() {
        for text in ["", "5", "ms", "-1 ms", "0 ms", "1e3 ms", "inf ms", "1.2.3 ms", "5 min"] {
            assert!(time_ns(text).unwrap_err().contains("0.5 ms"), "{text}");
        }
        // Bits or bytes: a letter's case is no way to say it.
        for text in ["450", "450 Gb/s", "450 GiB/s", "450 gb/s", "NaN GB/s"] {
            assert!(gb_per_s(text).unwrap_err().contains("450 GB/s"), "{text}");
        }
        for text in ["90", "0 %", "2000 %", "0.9"] {
            assert!(share(text).unwrap_err().contains("20 %"), "{text}");
        }
        for text in ["90 %", "90 % of links", "90 of link", "fast"] {
            assert!(bandwidth(text).unwrap_err().contains("90 % of link"), "{text}");
        }
        for text in ["0", "much", "100 XB"] {
            assert!(size(text).is_err(), "{text}");
        }
        for text in ["0", "8-2", "2-", "many", "0-4"] {
            assert!(span(text).unwrap_err().contains("2-8"), "{text}");
        }
    }
}
