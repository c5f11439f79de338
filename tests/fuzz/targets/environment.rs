//! What the plugin reads in other people's processes: variables and names of files.

use ringwatch::ingest::parsers as agents;
use ringwatch_plugin::parsers as plugins;
use std::ffi::{CString, OsStr};
use std::os::unix::ffi::OsStrExt;

pub(super) fn check(bytes: &[u8]) {
    let end = bytes.iter().position(|b| *b == 0).unwrap_or(bytes.len());
    let text = CString::new(&bytes[..end]).unwrap();
    let digits = std::str::from_utf8(text.as_bytes()).ok().filter(|t| t.bytes().all(|b| b.is_ascii_digit()));
    let value = digits.and_then(|d| if d.is_empty() { Some(0) } else { d.parse::<u64>().ok() });
    assert_eq!(plugins::number(&text), value, "{text:?}");
    if let Some(ppm) = plugins::share(&text) {
        let written = std::str::from_utf8(text.as_bytes()).unwrap().trim_end_matches('%');
        let percent: f64 = written.parse().unwrap();
        // What lies behind the fourth digit is dropped, not rounded.
        assert!((-1e-6..1.0 + 1e-6).contains(&(percent * 1e4 - ppm as f64)), "{text:?} is {ppm} millionths");
        assert!(ppm <= 1_000_000, "{ppm}");
    }
    let name = plugins::parse_segment_name(&text);
    assert_eq!(agents::segment_name(OsStr::from_bytes(text.as_bytes())), name, "{text:?}: plugin and agent");
    if let Some((pid, start_ticks, nonce)) = name {
        let (written, len) = plugins::segment_name(pid, start_ticks, nonce);
        assert_eq!(&written[..len], text.as_bytes(), "it reads as it was written");
    }
}
