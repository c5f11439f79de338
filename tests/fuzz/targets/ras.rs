//! An answer of NCCL's RAS of any bytes, and the verdict on it.

use crate::plain;
use ringwatch::ras::{Status, judge};
use std::time::Duration;

pub(super) fn check(bytes: &[u8]) {
    let status = match Status::parse(&String::from_utf8_lossy(bytes)) {
        Ok(status) => status,
        Err(why) => return plain::text("the error", &why, 4096),
    };
    let verdict = judge(&status, &status, Duration::from_secs(5));
    assert_eq!(verdict.findings.len(), verdict.culprits.len(), "each finding has its processes");
    verdict.notes.iter().for_each(|note| plain::text("a note", note, 1 << 20));
    for finding in &verdict.findings {
        plain::text("a headline", &finding.headline(), 1 << 20);
        finding.evidence.iter().for_each(|fact| plain::text("a fact", &fact.text, 1 << 20));
    }
}
