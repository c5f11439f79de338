//! Message sizes: how they are written, and the sweep from the smallest to the largest.

use super::error::BenchError;
use super::result::Settings;
use serde::{Deserialize, Serialize};

/// How a sweep goes from one size to the next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Step {
    /// Each size is the last one times this, at least 2.
    Factor(u64),
    /// Each size is this many bytes more, at least 1.
    Bytes(u64),
}

/// The largest sweep: more rows than anybody reads.
const MOST: usize = 100_000;

/// Reads `8`, `32K`, `4M`, `1G`, `1.5G`, `64KiB` as bytes; the suffixes are powers of 1024.
///
/// # Errors
/// What is wrong with the text.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let wrong = || format!("{text:?} is no size: give bytes, or a number with K, M, G or T (32K, 4M, 1.5G)");
    let lower = text.trim().to_ascii_lowercase();
    let number = lower.trim_end_matches("ib").trim_end_matches('b');
    let (number, shift) = match number.char_indices().last() {
        Some((at, 'k')) => (&number[..at], 10),
        Some((at, 'm')) => (&number[..at], 20),
        Some((at, 'g')) => (&number[..at], 30),
        Some((at, 't')) => (&number[..at], 40),
        _ => (number, 0),
    };
    let (whole, part) = number.split_once('.').map_or((number, None), |(w, p)| (w, Some(p)));
    let digits = |t: &str| !t.is_empty() && t.bytes().all(|b| b.is_ascii_digit());
    if !digits(whole) || part.is_some_and(|p| !digits(p) || p.len() > 9 || shift == 0) {
        return Err(wrong());
    }
    let unit = 1u64 << shift;
    let whole = whole.parse::<u64>().ok().and_then(|w| w.checked_mul(unit)).ok_or_else(wrong)?;
    let part = part.map_or(Some(0), |p| {
        let tenths = 10u128.pow(u32::try_from(p.len()).ok()?);
        u64::try_from(p.parse::<u128>().ok()? * u128::from(unit) / tenths).ok()
    });
    part.and_then(|p| whole.checked_add(p)).ok_or_else(wrong)
}

/// The sizes of a benchmark in bytes, ascending: those that its settings list, else the sweep that they describe.
///
/// # Errors
/// As [`sweep`].
pub fn of(s: &Settings) -> Result<Vec<u64>, BenchError> {
    if s.sizes.is_empty() { sweep(s.min_bytes, s.max_bytes, s.step) } else { Ok(s.sizes.clone()) }
}

/// The sizes of a sweep in bytes, ascending; both ends belong to it where the step hits them.
///
/// # Errors
/// [`BenchError::Settings`] where the ends or the step make no sweep.
pub fn sweep(min_bytes: u64, max_bytes: u64, step: Step) -> Result<Vec<u64>, BenchError> {
    let wrong = |text: String| Err(BenchError::Settings(text));
    if min_bytes == 0 {
        return wrong("--min-bytes 0: there is nothing to send".to_owned());
    }
    if min_bytes > max_bytes {
        return wrong(format!("--min-bytes {min_bytes} is more than --max-bytes {max_bytes}"));
    }
    match step {
        Step::Factor(f) if f < 2 => return wrong(format!("--step-factor {f}: at least 2")),
        Step::Bytes(0) => return wrong("--step-bytes 0: at least 1".to_owned()),
        _ => {}
    }
    let mut sizes = Vec::new();
    let mut size = Some(min_bytes);
    while let Some(s) = size.filter(|s| *s <= max_bytes) {
        if sizes.len() == MOST {
            return wrong(format!("more than {MOST} sizes: take a larger step"));
        }
        sizes.push(s);
        size = match step {
            Step::Factor(f) => s.checked_mul(f),
            Step::Bytes(b) => s.checked_add(b),
        };
    }
    Ok(sizes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_people_write_them() {
        for (text, bytes) in [
            ("8", 8),
            ("32K", 32 << 10),
            ("32k", 32 << 10),
            ("4M", 4 << 20),
            ("1G", 1 << 30),
            ("2T", 2 << 40),
            ("1.5G", 3 << 29),
            ("64KiB", 64 << 10),
            ("512B", 512),
            ("0", 0),
        ] {
            assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
        }
        for text in
            ["", "K", "-8", "8X", "1.5", "1.G", "0x10", "1e6", "99999999999999999999", "20000000T", "8 M"]
        {
            assert!(parse_bytes(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_sweep_has_both_its_ends() {
        assert_eq!(sweep(8, 64, Step::Factor(2)).unwrap(), [8, 16, 32, 64]);
        assert_eq!(sweep(8, 65, Step::Factor(4)).unwrap(), [8, 32]);
        assert_eq!(sweep(10, 30, Step::Bytes(10)).unwrap(), [10, 20, 30]);
        assert_eq!(sweep(7, 7, Step::Bytes(1)).unwrap(), [7]);
        assert_eq!(sweep(1 << 63, u64::MAX, Step::Factor(2)).unwrap(), [1 << 63]);
    }

    #[test]
    fn what_is_no_sweep_is_said_with_the_option() {
        for (min, max, step, named) in [
            (0, 8, Step::Factor(2), "--min-bytes"),
            (16, 8, Step::Factor(2), "--max-bytes"),
            (8, 16, Step::Factor(1), "--step-factor"),
            (8, 16, Step::Bytes(0), "--step-bytes"),
            (1, 1 << 40, Step::Bytes(1), "step"),
        ] {
            let said = sweep(min, max, step).unwrap_err().to_string();
            assert!(said.contains(named), "{said}");
        }
    }
}
