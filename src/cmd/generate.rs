//! `completion` and `man`: what shells and man read, made of the command line itself.

use crate::cli::{Cli, Completion, Man};
use anyhow::Context;
use clap::CommandFactory;
use std::io::Write;

pub(super) fn completion(o: &Completion) -> anyhow::Result<u8> {
    let mut script = Vec::new();
    clap_complete::generate(o.shell, &mut Cli::command(), "ringwatch", &mut script);
    std::io::stdout().lock().write_all(&script)?;
    Ok(0)
}

pub(super) fn man(o: &Man) -> anyhow::Result<u8> {
    if let Some(dir) = &o.dir {
        let into = || format!("cannot write man pages into {}", dir.display());
        std::fs::create_dir_all(dir).with_context(into)?;
        clap_mangen::generate_to(Cli::command(), dir).with_context(into)?;
        return Ok(0);
    }
    let mut page = Vec::new();
    clap_mangen::Man::new(Cli::command()).render(&mut page)?;
    std::io::stdout().lock().write_all(&page)?;
    Ok(0)
}
