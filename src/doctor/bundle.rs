//! A support bundle: the report, and the facts that it rests on, without what is nobody's business.

use super::{Host, Report};
use flate2::Compression;
use flate2::write::GzEncoder;
use std::io::{self, Write};
use tar::{Builder, Header};

/// Files of the host that are put in as they are.
const FILES: &[&str] = &[
    "proc/driver/nvidia/version",
    "proc/cpuinfo",
    "proc/meminfo",
    "proc/modules",
    "proc/mounts",
    "proc/net/dev",
    "proc/self/limits",
    "proc/sys/kernel/osrelease",
    "etc/os-release",
];
/// Parts of the names of variables whose values are masked.
const SECRET: &[&str] = &["TOKEN", "SECRET", "PASSW", "KEY", "CREDENTIAL", "HEADER", "AUTH"];
const MASK: &str = "***";

/// Writes a bundle, a compressed tar file. It holds the report as JSON and as text, the variables that NCCL, CUDA and
/// Ringwatch read, and some files of /proc. Values of variables that look like secrets are masked, and so is the name of
/// the user's home.
///
/// # Errors
/// What the writer says.
pub fn write(to: impl Write, host: &Host, report: &Report, text: &str) -> io::Result<()> {
    let mut tar = Builder::new(GzEncoder::new(to, Compression::default()));
    let at_s = report.at_unix_ms / 1000;
    let mut add = |name: &str, bytes: &[u8]| {
        let mut header = Header::new_gnu();
        header.set_size(bytes.len() as u64);
        header.set_mode(0o644);
        header.set_mtime(at_s);
        header.set_cksum();
        tar.append_data(&mut header, format!("ringwatch-doctor/{name}"), bytes)
    };
    let home = host.variable("HOME").filter(|h| h.len() > 1).map(str::to_owned);
    let redact =
        |text: &str| home.as_ref().map_or_else(|| text.to_owned(), |h| text.replace(h.as_str(), "~"));
    let json = serde_json::to_string_pretty(report).map_err(io::Error::other)?;
    add("report.json", redact(&json).as_bytes())?;
    add("report.txt", redact(text).as_bytes())?;
    let variables: String = host.variables.iter().map(|(k, v)| format!("{k}={}\n", shown(k, v))).collect();
    add("variables.txt", redact(&variables).as_bytes())?;
    for file in FILES {
        if let Some(text) = host.text(file) {
            add(&file.replace('/', "_"), redact(&text).as_bytes())?;
        }
    }
    tar.into_inner()?.finish()?.flush()
}

/// A value, or a mask in its place: where its name speaks of a secret, or where it is a URL with a user or a query.
pub(super) fn shown<'v>(name: &str, value: &'v str) -> &'v str {
    let is_url = value.split_once("://").is_some_and(|(_, rest)| rest.contains(['@', '?']));
    let name = name.to_uppercase();
    if is_url || SECRET.iter().any(|s| name.contains(s)) { MASK } else { value }
}
