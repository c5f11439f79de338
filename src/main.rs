//! Parses, dispatches, and turns errors into an exit code.

use clap::Parser;
use ringwatch::secret::mask_urls;
use ringwatch::{cli::Cli, cmd};
use std::process::ExitCode;

fn main() -> ExitCode {
    match cmd::dispatch(parsed()) {
        Ok(code) => ExitCode::from(code),
        Err(e) if is_broken_pipe(&e) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("ringwatch: {e:#}");
            ExitCode::from(cmd::exit_code(&e))
        }
    }
}

/// The command line. What clap says of a wrong one quotes it, and it may hold a URL with a password.
fn parsed() -> Cli {
    Cli::try_parse().unwrap_or_else(|e| {
        let text = e.to_string();
        let masked = mask_urls(&text);
        if masked == text {
            e.exit();
        }
        eprint!("{masked}");
        std::process::exit(e.exit_code());
    })
}

/// A reader that closes our output has seen enough: `ringwatch diagnose | head` is no failure.
fn is_broken_pipe(e: &anyhow::Error) -> bool {
    e.chain().any(|c| {
        c.downcast_ref::<std::io::Error>().is_some_and(|e| e.kind() == std::io::ErrorKind::BrokenPipe)
    })
}
