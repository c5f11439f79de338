//! Numbers as people read them. Absent is `-`, never 0.

use crate::model::{Algo, Lane, Proto, Rank, size_text};
use std::fmt::Write;

/// The text for an absent value.
pub(super) const ABSENT: &str = "-";

/// An optional value, `-` when absent.
pub(super) fn or_absent<T>(value: Option<T>, show: impl FnOnce(T) -> String) -> String {
    value.map_or_else(|| ABSENT.to_owned(), show)
}

/// A duration in nanoseconds: `8.3 us`, `17.4 ms`, `0.300 s`, `12.4 s`, `2m03s`, `3h05m`, `2d04h`.
pub(super) fn duration(ns: f64) -> String {
    if !ns.is_finite() || ns < 0.0 {
        return ABSENT.to_owned();
    }
    // Thresholds lie where rounding would otherwise give four digits before the point.
    let (us, ms, s) = (ns / 1e3, ns / 1e6, ns / 1e9);
    if ns < 999.5 {
        format!("{ns:.0} ns")
    } else if us < 999.95 {
        format!("{us:.1} us")
    } else if ms < 99.95 {
        format!("{ms:.1} ms")
    } else if s < 9.9995 {
        format!("{s:.3} s")
    } else if s < 59.95 {
        format!("{s:.1} s")
    } else {
        long_duration(s.round() as u64)
    }
}

fn long_duration(s: u64) -> String {
    let (m, h, d) = (s / 60, s / 3600, s / 86_400);
    if h == 0 {
        format!("{m}m{:02}s", s % 60)
    } else if d == 0 {
        format!("{h}h{:02}m", m % 60)
    } else {
        format!("{d}d{:02}h", h % 24)
    }
}

/// As [`duration`], of a whole number.
pub(super) fn duration_ns(ns: u64) -> String {
    duration(ns as f64)
}

/// The lower bound of a size class: `16 MiB` for 24.
pub(super) fn size_class(class: u8) -> String {
    or_absent(1_u64.checked_shl(u32::from(class)), size_text)
}

/// A bandwidth in bytes a second: `355.2 GB/s`, in powers of 1000.
pub(super) fn bandwidth(v: f64) -> String {
    if !v.is_finite() || v < 0.0 {
        return ABSENT.to_owned();
    }
    for (unit, one) in [("TB/s", 1e12), ("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)] {
        if v >= one * 0.999_95 {
            return format!("{:.1} {unit}", v / one);
        }
    }
    format!("{v:.0} B/s")
}

/// A rate or a large number: `0.25`, `12.3`, `4.5k`, `1.2M`.
pub(super) fn rate(v: f64) -> String {
    if !v.is_finite() || v < 0.0 {
        return ABSENT.to_owned();
    }
    for (unit, one) in [("G", 1e9), ("M", 1e6), ("k", 1e3)] {
        if v >= one * 0.999_95 {
            return format!("{:.1}{unit}", v / one);
        }
    }
    if v > 0.0 && v < 0.995 { format!("{v:.2}") } else { format!("{v:.1}") }
}

/// A count, exact up to five digits.
pub(super) fn count(n: u64) -> String {
    if n < 100_000 { n.to_string() } else { rate(n as f64) }
}

/// A share of 0 to 1: `34.2%`.
pub(super) fn share(v: f64) -> String {
    if v.is_finite() { format!("{:.1}%", v * 100.0) } else { ABSENT.to_owned() }
}

/// Algorithm and protocol: `RING/LL128`.
pub(super) fn algo_proto(algo: Option<Algo>, proto: Option<Proto>) -> String {
    match (algo, proto) {
        (None, None) => ABSENT.to_owned(),
        (a, p) => {
            format!("{}/{}", a.map_or(ABSENT, Algo::as_str), p.map_or(ABSENT, Proto::as_str))
        }
    }
}

/// An issue order with its lane: `#12`, `replay #12`, `to 3 #12`.
pub(super) fn order(lane: Lane, order: u64) -> String {
    match lane {
        Lane::Collective => format!("#{order}"),
        Lane::Replay => format!("replay #{order}"),
        Lane::Send(peer) => format!("to {peer} #{order}"),
        Lane::Recv(peer) => format!("from {peer} #{order}"),
        Lane::Call => format!("call #{order}"),
    }
}

/// Ranks, with runs closed up: `0-2, 5, 7-9`.
pub(super) fn ranks(list: &[Rank]) -> String {
    let mut sorted: Vec<u32> = list.iter().map(|r| r.0).collect();
    sorted.sort_unstable();
    sorted.dedup();
    let mut text = String::new();
    let mut rest = sorted.as_slice();
    while let Some(&first) = rest.first() {
        let mut len = 1;
        while rest.get(len).is_some_and(|&r| u64::from(r) == u64::from(first) + len as u64) {
            len += 1;
        }
        let last = rest[len - 1];
        if !text.is_empty() {
            text.push_str(", ");
        }
        // Writing to a String cannot fail.
        match len {
            1 => write!(text, "{first}").ok(),
            2 => write!(text, "{first}, {last}").ok(),
            _ => write!(text, "{first}-{last}").ok(),
        };
        rest = &rest[len..];
    }
    if text.is_empty() { ABSENT.to_owned() } else { text }
}

/// `1 rank`, `2 ranks`.
pub(super) fn plural(n: usize, one: &str) -> String {
    match n {
        1 => format!("1 {one}"),
        _ if one.ends_with('s') => format!("{n} {one}es"),
        _ => format!("{n} {one}s"),
    }
}

/// The number of a piece of evidence in its unit.
pub(super) fn evidence(value: Option<f64>, unit: Option<&str>) -> String {
    let Some(v) = value else { return ABSENT.to_owned() };
    match unit {
        Some("s") => duration(v * 1e9),
        Some("ns") => duration(v),
        Some("bytes") if v >= 0.0 => size_text(v as u64),
        Some("bytes/s") => bandwidth(v),
        Some("count" | "1") | None => number(v),
        Some(other) => format!("{} {other}", number(v)),
    }
}

fn number(v: f64) -> String {
    if v.fract() == 0.0 && v.abs() < 1e15 { format!("{v:.0}") } else { format!("{v:.3}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations() {
        for (ns, text) in [
            (0.0, "0 ns"),
            (850.0, "850 ns"),
            (8_300.0, "8.3 us"),
            (999_960.0, "1.0 ms"),
            (17_400_000.0, "17.4 ms"),
            (300_000_000.0, "0.300 s"),
            (9_999_900_000.0, "10.0 s"),
            (12_400_000_000.0, "12.4 s"),
            (59_970_000_000.0, "1m00s"),
            (123_000_000_000.0, "2m03s"),
            (11_100_000_000_000.0, "3h05m"),
            (187_200_000_000_000.0, "2d04h"),
            (f64::NAN, "-"),
            (-1.0, "-"),
        ] {
            assert_eq!(duration(ns), text);
        }
        assert_eq!(duration_ns(u64::MAX), "213503d23h");
    }

    #[test]
    fn sizes() {
        for (n, text) in
            [(8, "8 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (16 << 20, "16 MiB"), (u64::MAX, "16.0 EiB")]
        {
            assert_eq!(size_text(n), text);
        }
        assert_eq!(size_class(24), "16 MiB");
        assert_eq!(size_class(63), "8 EiB");
        assert_eq!(size_class(64), "-");
        assert_eq!(size_class(255), "-");
    }

    #[test]
    fn rates() {
        assert_eq!(bandwidth(355.2e9), "355.2 GB/s");
        assert_eq!(bandwidth(12.0), "12 B/s");
        assert_eq!(bandwidth(f64::INFINITY), "-");
        assert_eq!(rate(0.25), "0.25");
        assert_eq!(rate(12.34), "12.3");
        assert_eq!(rate(4_512.0), "4.5k");
        assert_eq!(count(99_999), "99999");
        assert_eq!(count(1_234_567), "1.2M");
        assert_eq!(share(0.342), "34.2%");
    }

    #[test]
    fn rank_lists() {
        let list = |v: &[u32]| ranks(&v.iter().map(|&r| Rank(r)).collect::<Vec<_>>());
        assert_eq!(list(&[]), "-");
        assert_eq!(list(&[3]), "3");
        assert_eq!(list(&[9, 0, 1, 2, 5, 7, 8]), "0-2, 5, 7-9");
        assert_eq!(list(&[1, 2]), "1, 2");
        assert_eq!(list(&[u32::MAX, u32::MAX - 1, u32::MAX - 2]), "4294967293-4294967295");
    }

    #[test]
    fn evidence_numbers() {
        assert_eq!(evidence(Some(0.3), Some("s")), "0.300 s");
        assert_eq!(evidence(Some(16_777_216.0), Some("bytes")), "16 MiB");
        assert_eq!(evidence(Some(4711.0), Some("count")), "4711");
        assert_eq!(evidence(Some(0.97), Some("1")), "0.970");
        assert_eq!(evidence(None, Some("s")), "-");
    }
}
