//! Logs of any bytes, in which known error texts are looked for.

use crate::plain;
use ringwatch::explain::Texts;
use std::collections::BTreeSet;
use std::sync::LazyLock;

static TEXTS: LazyLock<Texts> = LazyLock::new(|| Texts::built_in().unwrap());
/// The longest line that is shown, in bytes: 1000 characters, each written as an escape.
const SHOWN_MAX: usize = 1000 * "\\u{10ffff}".len() + 3;

pub(super) fn check(bytes: &[u8]) {
    let found = TEXTS.explain(bytes).unwrap();
    let lines: Vec<&[u8]> = bytes.split(|b| *b == b'\n').collect();
    let mut ids = BTreeSet::new();
    for f in &found {
        assert!(ids.insert(&f.known.id), "{} comes twice", f.known.id);
        assert!(f.line >= 1 && f.line as usize <= lines.len(), "line {} of {}", f.line, lines.len());
        plain::text("a line of the log", &f.text, SHOWN_MAX);
    }
    let counted: u64 = found.iter().map(|f| f.count).sum();
    assert!(counted as usize <= lines.len(), "{counted} of {} lines", lines.len());
    // A line that stands alone is the same as in its log.
    for f in found.iter().take(2) {
        let alone = TEXTS.explain(lines[f.line as usize - 1]).unwrap();
        assert_eq!(alone.iter().map(|a| (&a.known, &a.text)).next(), Some((&f.known, &f.text)));
    }
}
