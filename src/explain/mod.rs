//! Error texts of NCCL, PyTorch and the driver: what they mean, why they come and what to do, from the list in
//! `texts.yaml`.

use regex::Regex;
use regex::bytes::{RegexSet, RegexSetBuilder};
use serde::{Deserialize, Serialize};
use std::io::{self, BufRead};
use thiserror::Error;

const TEXTS: &str = include_str!("texts.yaml");
/// A longer line is looked at up to here, in bytes.
const LINE_MAX: u64 = 64 << 10;
/// A longer line is shown up to here, in characters.
const SHOWN_MAX: usize = 1000;

/// One known text.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Known {
    /// A name that never changes.
    pub id: String,
    /// Regular expressions; one of them matches a line of it.
    #[serde(skip_serializing)]
    patterns: Vec<String>,
    /// The meaning, in other words.
    pub means: String,
    /// Why it comes.
    pub cause: String,
    /// The remedies, the most promising first.
    pub remedy: Vec<String>,
}

/// A known text that was found, and where.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Explained {
    /// The known text.
    #[serde(flatten)]
    pub known: Known,
    /// The first line with it, from 1.
    pub line: u64,
    /// The line, or the beginning of a long one.
    pub text: String,
    /// How many lines have it.
    pub count: u64,
}

/// Why the list cannot be used.
#[derive(Debug, Error)]
pub enum ListError {
    /// It is no list of texts.
    #[error("the list of known texts: {0}")]
    Yaml(#[from] serde_yaml::Error),
    /// A pattern is no regular expression.
    #[error("the list of known texts: {0}")]
    Pattern(#[from] regex::Error),
}

/// The texts that are known.
#[derive(Debug)]
pub struct Texts {
    known: Vec<Known>,
    set: RegexSet,
    /// For each pattern, whose it is.
    owners: Vec<usize>,
    colours: Regex,
}

impl Texts {
    /// The list of this program.
    ///
    /// # Errors
    /// None, as long as the list in the repository is right, which a test holds.
    pub fn built_in() -> Result<Self, ListError> {
        Self::read(TEXTS)
    }

    fn read(yaml: &str) -> Result<Self, ListError> {
        let known: Vec<Known> = serde_yaml::from_str(yaml)?;
        let all = || known.iter().enumerate().flat_map(|(i, k)| k.patterns.iter().map(move |p| (i, p)));
        // A word boundary of Unicode has no automaton: a line beyond ASCII would take a hundred times as long.
        let set = RegexSetBuilder::new(all().map(|(_, p)| p)).unicode(false).build()?;
        let owners = all().map(|(i, _)| i).collect();
        // What terminals and loggers put between words.
        let colours = Regex::new("\x1b\\[[0-9;]*[A-Za-z]")?;
        Ok(Texts { known, set, owners, colours })
    }

    /// The list.
    pub fn known(&self) -> &[Known] {
        &self.known
    }

    /// The known text of one line, if there is one.
    pub fn of_line(&self, line: &str) -> Option<&Known> {
        let first = self.set.matches(line.as_bytes()).into_iter().filter_map(|p| self.owners.get(p)).min()?;
        self.known.get(*first)
    }

    /// Explains the known lines of a text, by the first line of each.
    ///
    /// # Errors
    /// The reader's.
    pub fn explain(&self, mut from: impl BufRead) -> io::Result<Vec<Explained>> {
        let mut found: Vec<Explained> = Vec::new();
        let mut bytes = Vec::new();
        let mut number = 0;
        loop {
            bytes.clear();
            if io::Read::take(&mut from, LINE_MAX).read_until(b'\n', &mut bytes)? == 0 {
                return Ok(found);
            }
            number += 1;
            // The rest of a line that is too long belongs to it.
            if bytes.len() as u64 == LINE_MAX && bytes.last() != Some(&b'\n') {
                skip_line(&mut from)?;
            }
            let text = String::from_utf8_lossy(&bytes);
            let line = self.colours.replace_all(text.trim_end(), "");
            let Some(known) = self.of_line(&line) else { continue };
            if let Some(f) = found.iter_mut().find(|f| f.known.id == known.id) {
                f.count += 1;
            } else {
                found.push(Explained {
                    known: known.clone(),
                    line: number,
                    text: shown(line.trim()),
                    count: 1,
                });
            }
        }
    }
}

/// A line as it may be shown: a log may hold anything, what steers a terminal too.
fn shown(line: &str) -> String {
    let end = line.char_indices().nth(SHOWN_MAX).map_or(line.len(), |(at, _)| at);
    let cut = if end < line.len() { "..." } else { "" };
    let escaped = line[..end].escape_debug().to_string();
    format!("{}{cut}", escaped.replace("\\'", "'").replace("\\\"", "\""))
}

fn skip_line(from: &mut impl BufRead) -> io::Result<()> {
    loop {
        let piece = from.fill_buf()?;
        let (used, ended) = match piece.iter().position(|b| *b == b'\n') {
            Some(at) => (at + 1, true),
            None => (piece.len(), piece.is_empty()),
        };
        from.consume(used);
        if ended {
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lines as they stand in logs, and what they are.
    const LINES: &[(&str, &str)] = &[
        (
            "[rank3]:[E1121 10:00:00.1 ProcessGroupNCCL.cpp:632] [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12, OpType=ALLREDUCE, NumelIn=4, NumelOut=4, Timeout(ms)=600000) ran for 600041 milliseconds before timing out.",
            "pytorch-watchdog-timeout",
        ),
        (
            "[rank1]:[F1121 ProcessGroupNCCL.cpp:1432] [PG ID 0 PG GUID 0 Rank 1] ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress in monitoring enqueued collectives.",
            "pytorch-heartbeat",
        ),
        (
            "node7:412:412 [0] misc/shmutils.cc:72 NCCL WARN Error: failed to extend /dev/shm/nccl-QzKgGd to 33030532 bytes",
            "shared-memory",
        ),
        (
            "node7:412:431 [0] misc/ibvwrap.cc:262 NCCL WARN Call to ibv_create_qp failed with error Cannot allocate memory",
            "memlock",
        ),
        ("node7:412:431 [0] misc/ibvwrap.cc:262 NCCL WARN Call to ibv_create_qp failed", "ib-create-qp"),
        (
            "node7:1:9 [4] transport/net_ib.cc:1295 NCCL WARN NET/IB : Got completion from peer 10.0.0.2<51000> with status=12 opcode=0 len=0 vendor err 129 (Send)",
            "ib-retry",
        ),
        (
            "node7:1:9 [0] init.cc:943 NCCL WARN Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000",
            "duplicate-gpu",
        ),
        ("node7:1:9 [1] NCCL INFO Could not enable P2P between dev 0(=1b000) and dev 1(=43000)", "p2p"),
        (
            "ncclUnhandledCudaError: Call to CUDA function failed.\\nunhandled cuda error (run with NCCL_DEBUG=INFO for details)",
            "unhandled-cuda",
        ),
        (
            "node7:1:9 [1] enqueue.cc:1 NCCL WARN Cuda failure 'an illegal memory access was encountered'",
            "illegal-access",
        ),
        (
            "RuntimeError: NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)",
            "unhandled-system",
        ),
        (
            "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.\\nremote process exited or there was a network error",
            "remote-exit",
        ),
        ("node7:1:9 [1] bootstrap.cc:65 NCCL WARN Bootstrap : no socket interface found", "no-interface"),
        (
            "node7:1:9 [1] misc/socket.cc:484 NCCL WARN socketStartConnect: Connect to 10.2.3.4<36421> failed : Connection refused",
            "connect-failed",
        ),
        (
            "node7:1:9 [1] init.cc:2 NCCL WARN Mismatched NCCL version detected : rank 0 version 22809 rank 1 version 22703 ",
            "version-mismatch",
        ),
        (
            "NVRM: Xid (PCI:0000:1b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
            "xid-off-bus",
        ),
        (
            "NVRM: Xid (PCI:0000:1b:00): 74, pid=412, name=python3, NVLink: fatal error detected on link 7",
            "xid-nvlink",
        ),
        (
            "node7:1:9 [0] argcheck.cc:60 NCCL WARN Broadcast : invalid root 5 (root should be in the 0..4 range)",
            "invalid-argument",
        ),
        ("ImportError: libtorch_cuda.so: undefined symbol: ncclCommRegister", "undefined-symbol"),
        ("  exitcode  : -9 (pid: 4711)", "killed"),
    ];

    #[test]
    fn the_list_is_well_formed() {
        let texts = Texts::built_in().unwrap();
        let mut ids: Vec<&str> = texts.known().iter().map(|k| k.id.as_str()).collect();
        for k in texts.known() {
            assert!(!k.patterns.is_empty() && !k.remedy.is_empty(), "{}", k.id);
            for text in [&k.means, &k.cause].into_iter().chain(&k.remedy) {
                assert!(text.ends_with('.'), "{}: {text}", k.id);
            }
            // Whatever matches everything explains nothing.
            assert!(
                k.patterns.iter().all(|p| !Regex::new(p).unwrap().is_match("step 12 loss 0.5")),
                "{}",
                k.id
            );
        }
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), texts.known().len());
    }

    #[test]
    fn lines_of_real_logs_are_known() {
        let texts = Texts::built_in().unwrap();
        for (line, id) in LINES {
            assert_eq!(texts.of_line(line).map(|k| k.id.as_str()), Some(*id), "{line}");
        }
        for healthy in [
            "step 100 loss 2.31",
            "NCCL INFO Channel 00/24 : 0 1 2 3",
            "node7:1:9 [0] NCCL INFO comm 0x1 rank 0 nranks 4 - Init COMPLETE",
        ] {
            assert_eq!(texts.of_line(healthy), None, "{healthy}");
        }
    }

    #[test]
    fn each_is_told_once_with_its_first_line() {
        let texts = Texts::built_in().unwrap();
        let long = "x".repeat(3 * usize::try_from(LINE_MAX).unwrap());
        let log = format!(
            "hello\n{long}\n\x1b[31mDuplicate\x1b[0m GPU detected : a\nDuplicate GPU detected : b\n\x07EADDRINUSE"
        );
        let found = texts.explain(log.as_bytes()).unwrap();
        let told: Vec<_> = found.iter().map(|f| (f.known.id.as_str(), f.line, f.count)).collect();
        assert_eq!(told, [("duplicate-gpu", 3, 2), ("address-in-use", 5, 1)]);
        assert_eq!(found[0].text, "Duplicate GPU detected : a");
        assert_eq!(found[1].text, "\\u{7}EADDRINUSE");
    }

    #[test]
    fn a_list_that_is_none_says_where() {
        assert!(Texts::read("- id: x").unwrap_err().to_string().contains("patterns"));
        let bad = "- {id: x, patterns: ['('], means: a., cause: b., remedy: [c.]}";
        assert!(matches!(Texts::read(bad), Err(ListError::Pattern(_))));
    }
}
