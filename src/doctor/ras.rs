//! NCCL's own RAS, which watches a job from inside: what it is asked, and what its answer means.

use super::Observation;
use crate::ras::{Client, DEFAULT_ADDRESS, Error};

/// The first release of NCCL with RAS, and the first one whose RAS runs diagnostics of its own.
pub(super) const FROM: i32 = 22_400;
const DIAGNOSTICS_FROM: i32 = 23_100;
/// Asks NCCL's own RAS about the job: its diagnostics, or its status where it has none.
pub(super) fn ask(version: i32) -> Result<String, Error> {
    let address = std::env::var("NCCL_RAS_ADDR").unwrap_or_else(|_| DEFAULT_ADDRESS.to_owned());
    Client::connect(&address)?.ask(if version >= DIAGNOSTICS_FROM { "DIAGNOSTICS" } else { "STATUS" })
}

/// The lines below a heading of RAS's status, up to the next heading.
fn section<'t>(text: &'t str, heading: &str) -> Vec<&'t str> {
    let mut lines = text.lines().map(str::trim).skip_while(|l| *l != heading).skip(2).peekable();
    let mut found = Vec::new();
    while let Some(line) = lines.next() {
        // A heading is underlined.
        if lines.peek().is_some_and(|next| next.starts_with("====")) {
            break;
        }
        if !line.is_empty() {
            found.push(line);
        }
    }
    found
}

/// Judges the answer of NCCL's own RAS: the lines that name something wrong, or that there are none.
pub(super) fn judge(text: &str) -> Observation {
    let fix = "NCCL's own RAS says so: see the section on RAS in NVIDIA's guide";
    let checks: Vec<&str> = text.lines().filter_map(|l| Some(&l[l.find(" NCCL DIAG [")? + 11..])).collect();
    if !checks.is_empty() {
        let is_good = |l: &&str| l.starts_with("[OK]") || l.starts_with("[INFO]");
        let bad: Vec<&str> = checks.iter().copied().filter(|l| !is_good(l)).collect();
        return if bad.is_empty() {
            let good = checks.iter().filter(|l| l.starts_with("[OK]")).count();
            Observation::pass(format!(
                "NCCL's diagnostics: {good} checks are OK, {} do not apply",
                checks.len() - good
            ))
        } else {
            Observation::warn(bad.join("\n"), fix)
        };
    }
    let mut bad = section(text, "Errors");
    bad.extend(section(text, "Warnings"));
    if text.contains("Job summary") && bad.is_empty() {
        Observation::pass("NCCL's RAS has neither errors nor warnings")
    } else if text.contains("Job summary") {
        Observation::warn(bad.join("\n"), fix)
    } else {
        Observation::skip(text.lines().next().unwrap_or("RAS says nothing").to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::super::Status;
    use super::*;

    #[test]
    fn what_nccls_ras_says_is_reduced_to_what_is_wrong() {
        let diagnostics = "h:1 NCCL DIAG === RAS Diagnostics ===\nh:1 NCCL DIAG [OK]   ECC: none\n\
                           h:1 NCCL DIAG [INFO] ATS state: unknown\nh:1 NCCL DIAG RAS diagnostics completed in 3 ms";
        assert_eq!(judge(diagnostics).seen, "NCCL's diagnostics: 1 checks are OK, 1 do not apply");
        let bad = diagnostics.replace("[INFO] ATS state: unknown", "[WARN] NVLink: 17 links on rank 2");
        assert_eq!(
            (judge(&bad).status, judge(&bad).seen.as_str()),
            (Status::Warn, "[WARN] NVLink: 17 links on rank 2")
        );
        let status = "Job summary\n===========\n\n 1 2\n\nErrors\n======\n\nWarnings\n========\n";
        assert_eq!(judge(status).status, Status::Pass);
        let bad =
            status.replace("Errors\n======\n", "Errors\n======\n\n#0-0 (1) INCOMPLETE\n  Missing rank 3\n");
        assert_eq!(judge(&bad).seen, "#0-0 (1) INCOMPLETE\nMissing rank 3");
        assert_eq!(judge("RAS does not answer: refused").status, Status::Skip);
    }
}
