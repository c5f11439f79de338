//! `ringwatch tune --advise`: what a job should change, by its recorded operations.

use super::baselines::func;
use super::{diagnose, monitor_of};
use crate::advise::{Advice, Curve, Gain, advise};
use crate::bench::Measurements;
use crate::ingest::now_ns;
use anyhow::bail;
use std::io::{self, Write};
use std::path::PathBuf;

pub(super) fn run(dirs: &[PathBuf], curves: &[PathBuf]) -> anyhow::Result<u8> {
    for dir in dirs {
        diagnose::directory(dir)?;
    }
    let mut known: Vec<Curve> = Vec::new();
    for path in curves {
        for report in Measurements::load(path)?.reports {
            let ranks = u32::try_from(report.environment.ranks.len()).unwrap_or(u32::MAX);
            let points = report.sizes.iter().map(|s| (s.size_bytes, s.out_of_place.time_ns));
            known.extend(Curve::new(func(report.settings.collective), ranks, points));
        }
    }
    if known.is_empty() && !curves.is_empty() {
        bail!("--curves: a curve needs two sizes; ringwatch bench -b 1K -e 256M -f 4 --save FILE");
    }
    let mut monitor = monitor_of(dirs);
    diagnose::read(&mut monitor)?;
    let snapshot = monitor.snapshot(now_ns());
    let mut out = io::stdout().lock();
    let operations: u64 = snapshot.classes.iter().map(|c| c.count).sum();
    if operations == 0 {
        bail!("no operation is recorded there; `ringwatch run --keep` leaves segments behind");
    }
    let all = advise(&snapshot, &known);
    if all.is_empty() {
        writeln!(out, "no advice: {operations} operations were seen, and nothing in them costs much")?;
    }
    for (i, advice) in all.iter().enumerate() {
        out.write_all(text(i + 1, advice).as_bytes())?;
    }
    out.flush()?;
    Ok(0)
}

fn text(nth: usize, a: &Advice) -> String {
    let gain = match &a.gain {
        Gain::Estimated { saved_ns, of_ns: Some(of) } if *of > 0 => {
            let of = *of as f64;
            format!("at most {:.3} s of {:.1} s ({:.1} %)", saved_ns / 1e9, of / 1e9, saved_ns / of * 100.0)
        }
        Gain::Estimated { saved_ns, .. } => format!("at most {:.3} s", saved_ns / 1e9),
        Gain::Unknown(why) => format!("not estimated: {why}"),
    };
    format!("{nth}. {}\n   why:  {}\n   gain: {gain}\n   how:  {}\n", a.what, a.why, a.how)
}
