//! `ringwatch explain`: what an error text means and what to do about it.

use super::FINDINGS;
use crate::cli::Explain;
use crate::explain::{Explained, Texts};
use anyhow::{Context, bail};
use serde::Serialize;
use std::fs::File;
use std::io::{self, BufReader, Write};
use std::path::Path;

/// One explanation as JSON.
#[derive(Debug, Serialize)]
struct Line<'a> {
    /// The file; absent for a text that was typed.
    file: Option<String>,
    #[serde(flatten)]
    explained: &'a Explained,
}

pub(super) fn run(o: &Explain) -> anyhow::Result<u8> {
    let texts = Texts::built_in()?;
    let mut out = io::stdout().lock();
    let mut all = 0;
    for given in &o.texts {
        let path = Path::new(given);
        let (file, found) = if given == "-" {
            (Some("-"), texts.explain(io::stdin().lock()).context("cannot read standard input")?)
        } else if path.is_dir() {
            bail!("{}: a directory; name log files, or a text in quotes", path.display());
        } else if path.exists() {
            (given.to_str(), of_file(&texts, path)?)
        } else {
            let text = given.to_str().context("a text has to be UTF-8")?;
            if looks_like_a_file(text) {
                bail!("{text}: there is no such file");
            }
            (None, texts.explain(text.as_bytes())?)
        };
        all += found.len();
        write(&mut out, file, &found, o.json)?;
    }
    if all == 0 && !o.json {
        writeln!(
            out,
            "nothing known in it ({} texts of NCCL, PyTorch and the driver are)",
            texts.known().len()
        )?;
    }
    out.flush()?;
    Ok(if all == 0 { FINDINGS } else { 0 })
}

/// Nobody asks about a word with a `/` in it, or one that ends like a log; error texts hold both, between other words.
fn looks_like_a_file(text: &str) -> bool {
    let is_log = [".log", ".out", ".txt", ".err"].iter().any(|end| text.ends_with(end));
    if text.contains(char::is_whitespace) {
        is_log && ["/", "./", "../"].iter().any(|begin| text.starts_with(begin))
    } else {
        is_log || text.contains('/')
    }
}

/// The known lines of a log.
pub(super) fn of_file(texts: &Texts, path: &Path) -> anyhow::Result<Vec<Explained>> {
    let file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
    texts.explain(BufReader::new(file)).with_context(|| format!("cannot read {}", path.display()))
}

/// Writes explanations, for people or as JSON, one object a line.
pub(super) fn write(
    out: &mut impl Write,
    file: Option<&str>,
    found: &[Explained],
    json: bool,
) -> anyhow::Result<()> {
    for e in found {
        if json {
            let line = Line { file: file.map(str::to_owned), explained: e };
            writeln!(out, "{}", serde_json::to_string(&line)?)?;
            continue;
        }
        let often = if e.count > 1 { format!(", {} lines like it", e.count) } else { String::new() };
        match file {
            Some(f) => writeln!(out, "{}: {f}, line {}{often}", e.known.id, e.line)?,
            None => writeln!(out, "{}{often}", e.known.id)?,
        }
        writeln!(out, "    {}", e.text)?;
        writeln!(out, "    means: {}", e.known.means)?;
        writeln!(out, "    cause: {}", e.known.cause)?;
        for remedy in &e.known.remedy {
            writeln!(out, "    next: {remedy}")?;
        }
    }
    Ok(())
}
