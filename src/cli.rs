//! The command line, as clap sees it.

use clap::{Args, Parser, Subcommand, ValueEnum};
use std::ffi::OsString;
use std::path::PathBuf;

/// Which rank, which operation, and why: live telemetry and hang diagnosis for NCCL jobs.
#[derive(Debug, Parser)]
#[command(name = "ringwatch", version, max_term_width = 100, arg_required_else_help = true)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub verb: Verb,
}

/// The verbs.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Show the node's NCCL jobs live, like top: what is in flight, who waits for whom, what is wrong
    Top(Top),
    /// Run a command with the plugin loaded, tell findings as they come, and sum up at the end
    ///
    /// The command's output, its signals and its exit code stay its own; ringwatch writes to stderr only.
    Run(Run),
    /// Say what is wrong now, from live segments or from the black boxes of dead processes
    ///
    /// Exit code 0: no findings; 1: findings; 2: error.
    Diagnose(Diagnose),
    /// Replay a job recorded on 4 x H200 through the real plugin in real processes, and watch it
    Demo(Demo),
    /// Put the plugin into a directory and print how to load it into any job
    Plugin(Plugin),
    /// Play one rank of a recorded job on a plugin (what demo starts)
    #[command(hide = true)]
    Replay(Replay),
}

/// Options of `top`.
#[derive(Debug, Args)]
pub struct Top {
    /// Print one frame as text and exit
    #[arg(long)]
    pub once: bool,
    /// Directory of the segments [default: $RINGWATCH_DIR, else every job on this host that may be read]
    #[arg(long, value_name = "DIR")]
    pub dir: Option<PathBuf>,
    /// Width of the frame that --once prints, in columns
    #[arg(long, value_name = "N", default_value_t = 120, value_parser = clap::value_parser!(u16).range(20..=500))]
    pub width: u16,
}

/// Options of `run`.
#[derive(Debug, Args)]
pub struct Run {
    /// Keep the segments (black boxes) even when all went well
    #[arg(long)]
    pub keep: bool,
    /// Replace another profiler plugin that NCCL_PROFILER_PLUGIN names
    #[arg(long)]
    pub replace: bool,
    /// Load the library that sees NCCL's calls as well: for NCCL before 2.23, inits and calls that hang,
    /// reduction operations
    #[arg(long)]
    pub preload: bool,
    /// The command and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "CMD")]
    pub command: Vec<OsString>,
}

/// Options of `diagnose`.
#[derive(Debug, Args)]
pub struct Diagnose {
    /// Print findings as JSON, one object a line
    #[arg(long)]
    pub json: bool,
    /// Directory of segments, live or left by dead processes [default: $RINGWATCH_DIR, else this host's live jobs]
    #[arg(value_name = "DIR")]
    pub dir: Option<PathBuf>,
}

/// The recorded jobs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Scenario {
    /// A healthy mix of operations; in the last one rank 3 comes 0.3 s late
    Mixed,
    /// Rank 3 never issues the last all-reduce
    MissingRank,
    /// Rank 1 issues an all-gather where the others issue an all-reduce
    Mismatch,
}

/// Options of `demo`.
#[derive(Debug, Args)]
pub struct Demo {
    /// Which recorded job
    #[arg(long, value_enum, default_value_t = Scenario::Mixed)]
    pub scenario: Scenario,
    /// The recording in which ranks 0-1 and 2-3 count as two nodes, with network transfers
    #[arg(long)]
    pub two_node: bool,
    /// No screen: print what diagnose would print
    #[arg(long)]
    pub headless: bool,
    /// With --headless: JSON, one object a line
    #[arg(long, requires = "headless")]
    pub json: bool,
    /// How long to watch, in seconds [default: 7 headless, else until q]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=86_400))]
    pub seconds: Option<u32>,
}

/// Options of `plugin`.
#[derive(Debug, Args)]
pub struct Plugin {
    /// Directory to put it into [default: the user's cache]
    #[arg(value_name = "DIR")]
    pub dir: Option<PathBuf>,
    /// Print how to load the library that sees NCCL's calls as well (LD_PRELOAD), which is the plugin too
    #[arg(long)]
    pub preload: bool,
}

/// Options of `replay`.
#[derive(Debug, Args)]
pub struct Replay {
    /// Which recorded job
    #[arg(long, value_enum)]
    pub scenario: Scenario,
    /// Its two-node recording
    #[arg(long)]
    pub two_node: bool,
    /// Which rank
    #[arg(long)]
    pub rank: usize,
    /// Profiler ABI version
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u8).range(1..=7))]
    pub abi: u8,
    /// The plugin's file
    #[arg(long)]
    pub plugin: PathBuf,
    /// CLOCK_MONOTONIC in ns at which the recording begins
    #[arg(long)]
    pub start_at: Option<u64>,
    /// As fast as the plugin takes it
    #[arg(long)]
    pub unpaced: bool,
    /// How often
    #[arg(long, default_value_t = 1)]
    pub loops: u32,
    /// Stay alive for so many seconds afterwards, as the recorded process did
    #[arg(long, default_value_t = 0)]
    pub hold: u32,
}
