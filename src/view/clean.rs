//! Makes the strings of a snapshot safe to draw.
//!
//! A job names its communicators, hosts and programs as it likes. Escape sequences could drive the
//! operator's terminal, and direction marks could reorder what it shows; neither gets past here.

use super::format::ABSENT;
use crate::model::{Finding, Snapshot};

/// Longer strings are cut: no name is worth the time to lay it out.
const LONGEST: usize = 4096;

/// Cleans every string of a snapshot that a watched process could have chosen.
pub(super) fn snapshot(s: &mut Snapshot, ascii: bool) {
    let fix = |t: &mut String| *t = text(t, ascii);
    let maybe = |t: &mut Option<String>| t.iter_mut().for_each(fix);
    fix(&mut s.source);
    maybe(&mut s.wall);
    for job in &mut s.jobs {
        maybe(&mut job.name);
        maybe(&mut job.nccl);
    }
    s.comms.iter_mut().for_each(|c| maybe(&mut c.name));
    for rank in &mut s.ranks {
        fix(&mut rank.host);
        maybe(&mut rank.gpu);
    }
    for segment in &mut s.segments {
        fix(&mut segment.host);
        fix(&mut segment.program);
        maybe(&mut segment.nccl);
    }
    s.losses.iter_mut().for_each(|l| fix(l.reason.to_mut()));
    for unread in &mut s.unread {
        fix(&mut unread.path);
        fix(&mut unread.detail);
    }
    s.findings.iter_mut().for_each(|f| finding(f, ascii));
    if let Some(fleet) = &mut s.fleet {
        fleet.nodes.iter_mut().for_each(|n| fix(&mut n.name));
        maybe(&mut fleet.at.node);
        // The empty name is that of jobs without one.
        fleet.at.job.iter_mut().filter(|j| !j.is_empty()).for_each(fix);
    }
}

fn finding(f: &mut Finding, ascii: bool) {
    let fix = |t: &mut String| *t = text(t, ascii);
    fix(&mut f.operation.func);
    fix(&mut f.advice);
    f.evidence.iter_mut().for_each(|e| fix(&mut e.text));
    if let Some(place) = &mut f.place {
        fix(&mut place.host);
        fix(&mut place.device);
    }
    for t in [
        &mut f.operation.dtype,
        &mut f.operation.algo,
        &mut f.operation.proto,
        &mut f.operation.redop,
        &mut f.since,
    ] {
        t.iter_mut().for_each(fix);
    }
}

/// One string without escape sequences, control characters and direction marks; `-` if nothing is left.
pub(super) fn text(raw: &str, ascii: bool) -> String {
    let mut out = String::with_capacity(raw.len().min(LONGEST));
    // The search for an end that never comes is bounded by this as well.
    let mut rest = &raw[..raw.floor_char_boundary(4 * LONGEST)];
    while let Some(c) = rest.chars().next() {
        if out.len() >= LONGEST {
            break;
        }
        let tail = &rest[c.len_utf8()..];
        rest = match c {
            '\u{1b}' => after_escape(tail),
            '\u{9b}' => after_csi(tail),
            _ => tail,
        };
        match c {
            '\t' | '\n' | '\r' => out.push(' '),
            _ if c.is_control() || is_invisible(c) => {}
            _ if ascii && !c.is_ascii() => out.push('?'),
            _ => out.push(c),
        }
    }
    let kept = out.trim();
    if kept.is_empty() { ABSENT.to_owned() } else { kept.to_owned() }
}

/// The text behind an escape sequence whose ESC has been read. An unfinished one swallows only the ESC.
fn after_escape(s: &str) -> &str {
    match s.chars().next() {
        Some('[') => after_csi(&s[1..]),
        Some(']' | 'P' | '^' | '_' | 'X') => {
            let body = &s[1..];
            let bell = body.find('\u{7}').map(|i| i + 1);
            let end = body.find("\u{1b}\\").map(|i| i + 2);
            match (bell, end) {
                (Some(a), Some(b)) => &body[a.min(b)..],
                (Some(a), None) | (None, Some(a)) => &body[a..],
                (None, None) => s,
            }
        }
        Some(c @ '\u{20}'..='\u{7e}') => &s[c.len_utf8()..],
        _ => s,
    }
}

/// The text behind a control sequence's parameters and its final byte.
fn after_csi(s: &str) -> &str {
    match s.find(|c: char| !('\u{20}'..='\u{3f}').contains(&c)) {
        Some(i) if matches!(s.as_bytes()[i], 0x40..=0x7e) => &s[i + 1..],
        _ => s,
    }
}

/// Characters that take no room but change how others are shown.
fn is_invisible(c: char) -> bool {
    matches!(c,
        '\u{ad}' | '\u{61c}' | '\u{115f}' | '\u{1160}' | '\u{180e}' | '\u{200b}'..='\u{200f}'
        | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{fe00}'..='\u{fe0f}' | '\u{feff}'
        | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e0fff}')
}

#[cfg(test)]
mod tests {
    use super::text;

    #[test]
    fn escapes_go_and_words_stay() {
        for (raw, kept) in [
            ("plain", "plain"),
            ("\u{1b}[31mred\u{1b}[0m", "red"),
            ("\u{1b}]0;title\u{7}name", "name"),
            ("\u{1b}]52;c;ZXZpbA==\u{1b}\\name", "name"),
            ("\u{1b}P1$r\u{1b}\\x", "x"),
            ("\u{9b}2Jx", "x"),
            ("a\u{1b}", "a"),
            ("a\u{1b}[", "a"),
            ("a\u{1b}]never ended", "a]never ended"),
            ("\u{1b}cx", "x"),
            ("two\nlines\tx", "two lines x"),
            ("\u{202e}gpj.exe", "gpj.exe"),
            ("\u{0}\u{8}\u{7f}\u{85}", "-"),
            ("", "-"),
            ("grün", "grün"),
        ] {
            assert_eq!(text(raw, false), kept, "{raw:?}");
        }
        assert_eq!(text("grün", true), "gr?n");
        assert_eq!(text(&"x".repeat(1 << 20), false).len(), 4096);
    }
}
