//! The options of `ringwatch tune`.

use super::{duration, types};
use clap::Args;
use std::path::PathBuf;
use std::time::Duration;

/// Options of `tune`.
#[derive(Debug, Args)]
pub struct Tune {
    /// The rules to check and compile
    #[arg(value_name = "FILE", required_unless_present_any = ["measure", "advise"], conflicts_with_all = ["measure", "advise"])]
    pub file: Option<PathBuf>,
    /// Print them as the CSV of NVIDIA's example tuner, with a row for every size
    #[arg(long, conflicts_with_all = ["measure", "advise"])]
    pub csv: bool,
    /// Write the compiled table, which RINGWATCH_TUNE names to the plugin; with --search and --verify the rules (YAML), which
    /// go to standard output otherwise
    #[arg(long, short, value_name = "PATH", conflicts_with_all = ["csv", "advise"])]
    pub output: Option<PathBuf>,
    /// Search for rules: measure what NCCL offers against its default on these GPUs, alone or under torchrun or srun
    #[arg(long, group = "measure")]
    pub search: bool,
    /// Measure a file of rules against NCCL's default once more, and write it without the rules that do not hold
    #[arg(long, value_name = "RULES", group = "measure")]
    pub verify: Option<PathBuf>,
    /// Advise on what a job should change, by its recorded operations in directories of segments [default: $RINGWATCH_DIR, else
    /// this host's jobs]
    #[arg(long, value_name = "DIR", num_args = 0.., conflicts_with = "measure")]
    pub advise: Option<Vec<PathBuf>>,
    /// With --advise: what `ringwatch bench --save` wrote on this machine, from which gains are estimated
    #[arg(long, value_name = "FILE", requires = "advise", conflicts_with = "file")]
    pub curves: Vec<PathBuf>,
    /// What is measured, and how
    #[command(flatten)]
    pub measuring: Measuring,
}

/// The measurement of `--search` and `--verify`.
#[derive(Debug, Args)]
pub struct Measuring {
    /// Operations [default: all_reduce; with --verify those of the rules]
    #[arg(long, value_name = "A,B,...", value_delimiter = ',', requires = "measure", value_parser = ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce"])]
    pub operation: Vec<String>,
    /// Smallest size in bytes; K, M and G are powers of 1024 [default: 4K]
    #[arg(short = 'b', long, value_name = "SIZE", requires = "measure")]
    pub min_bytes: Option<String>,
    /// Largest size in bytes [default: 256M]
    #[arg(short = 'e', long, value_name = "SIZE", requires = "measure")]
    pub max_bytes: Option<String>,
    /// From one size to the next: times this [default: 4]
    #[arg(short = 'f', long, value_name = "N", requires = "measure")]
    pub step_factor: Option<u64>,
    /// Threads a process [default: one for each visible GPU; 1 with --gpus, torchrun or srun]
    #[arg(short = 't', long, value_name = "N", requires = "measure", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub threads: Option<u32>,
    /// GPUs a thread [default: 1]
    #[arg(short = 'g', long, value_name = "N", requires = "measure", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub gpus: Option<u32>,
    /// Element type [default: float]
    #[arg(short = 'd', long, value_name = "TYPE", requires = "measure", value_parser = types())]
    pub dtype: Option<String>,
    /// The confidence with which all rules of the file are real gains, in per cent [default: 99]
    #[arg(long, value_name = "PERCENT", requires = "measure", value_parser = confidence)]
    pub confidence: Option<f64>,
    /// Measure no longer than this: 90s, 30m, 2h [default: 15m]
    #[arg(long, value_name = "TIME", requires = "measure", value_parser = duration)]
    pub time_limit: Option<Duration>,
    /// Numbers of channels to try beside NCCL's own; the second stage tries those between the best [default: 4,16,32]
    #[arg(long, value_name = "N,...", value_delimiter = ',', requires = "measure", conflicts_with = "verify", value_parser = clap::value_parser!(u8).range(1..=127))]
    pub channels: Vec<u8>,
    /// Also measure with NCCL_MIN_NCHANNELS set to these, since rules cannot raise the channels of a communicator; 0 leaves it
    /// out [default: 32; with --verify as the file says]
    #[arg(long, value_name = "N,...", value_delimiter = ',', requires = "measure", value_parser = clap::value_parser!(u32).range(0..=127))]
    pub raise_channels: Vec<u32>,
    /// Time about so many milliseconds of operations in each turn [default: 10]
    #[arg(long, value_name = "MS", requires = "measure", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub millis: Option<u32>,
    /// Operations that are timed together, at most [default: 1000]
    #[arg(short = 'n', long, value_name = "N", requires = "measure", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub iters: Option<u32>,
    /// Write rules even where they make a size slower than 0.99 of the default
    #[arg(long, requires = "measure")]
    pub accept_slower: bool,
    /// Print the candidates and the expected time, and measure nothing. Each size is called once, to learn what NCCL offers
    #[arg(long, requires = "search")]
    pub dry_run: bool,
    /// Give a process up when it stands still for so long [default: 60]
    #[arg(long, value_name = "SECONDS", requires = "measure", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub timeout: Option<u64>,
    /// NCCL's library [default: libnccl.so.2 of the dynamic linker, else of a Python's site-packages]
    #[arg(long, value_name = "PATH", requires = "measure")]
    pub nccl: Option<PathBuf>,
    /// The CUDA driver's library
    #[arg(long, value_name = "PATH", hide = true, requires = "measure")]
    pub cuda: Option<PathBuf>,
}

/// Reads a confidence.
fn confidence(text: &str) -> Result<f64, String> {
    let number = text.trim().trim_end_matches('%').trim_end().parse::<f64>().ok();
    number.filter(|n| (50.0..=99.999).contains(n)).ok_or_else(|| "give per cent from 50 to 99.999".to_owned())
}
