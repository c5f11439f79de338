//! Parses, dispatches, and turns errors into an exit code.

use clap::Parser;
use ringwatch::{cli::Cli, cmd};
use std::process::ExitCode;

fn main() -> ExitCode {
    match cmd::dispatch(Cli::parse()) {
        Ok(code) => ExitCode::from(code),
        Err(e) if is_broken_pipe(&e) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("ringwatch: {e:#}");
            ExitCode::from(cmd::BROKEN)
        }
    }
}

/// Whoever reads our output has seen enough: `ringwatch diagnose | head` is no failure.
fn is_broken_pipe(e: &anyhow::Error) -> bool {
    e.chain().any(|c| {
        c.downcast_ref::<std::io::Error>().is_some_and(|e| e.kind() == std::io::ErrorKind::BrokenPipe)
    })
}
