//! The command line, as clap sees it.

mod tune;

pub use tune::{Measuring, Tune};

use crate::secret::SecretText;
use clap::builder::PossibleValue;
use clap::{Args, Parser, Subcommand, ValueEnum};
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

/// Where an agent's socket is by default.
const SOCKET: &str = "/run/ringwatch/agent.sock";

/// Which rank, which operation, and why: live telemetry and hang diagnosis for NCCL jobs.
#[derive(Debug, Parser)]
#[command(name = "ringwatch", version, max_term_width = 100, arg_required_else_help = true)]
pub struct Cli {
    /// The verb.
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
    /// Record what the ranks of running jobs report, for --replay and for programs that read Parquet
    Record(Record),
    /// Say what is wrong now, from live segments or from the black boxes of dead processes
    ///
    /// Exit code 0: no findings of severity warning or critical, and everything was seen; 1: such findings; 2: error, or not
    /// everything was seen.
    Diagnose(Diagnose),
    /// Ask NCCL's own RAS which rank of a job lags that was started without Ringwatch
    ///
    /// It asks twice what each rank has launched, and looks at the processes of this host. NCCL 2.28 or later.
    ///
    /// Exit code 0: no rank lags; 1: findings; 2: error, or nothing goes on and RAS cannot tell ranks apart.
    Attach(Attach),
    /// Sum up each job on one page: who is in it, what it ran and how fast, who was late, what was found, what was lost
    Report(Report),
    /// Compare two recordings: which steps, operations and ranks became slower, by how much, and how sure that is
    ///
    /// Exit code 0: nothing became worse by more than the threshold, with 99 % confidence; 1: something did; 2: error.
    Diff(Diff),
    /// Answer an assistant's questions about jobs, over standard input and output (Model Context Protocol)
    ///
    /// Tools: findings, report, in_flight and explain. They only read, and each call looks anew. The assistant's program starts it.
    Mcp(Mcp),
    /// Check this machine before a job runs: libraries, GPUs, links, network, limits and NCCL's variables
    ///
    /// Each check has an id and returns PASS, WARN, FAIL or SKIP, what it saw and how to fix it.
    ///
    /// Exit code 0: nothing fails; 1: something does; 2: error.
    Doctor(Doctor),
    /// Say what an error text of NCCL, PyTorch or the driver means, why it comes and what to do
    ///
    /// Exit code 0: something in it is known; 1: nothing; 2: error.
    Explain(Explain),
    /// Watch this node for good: findings to the log, metrics for Prometheus, screens for `top --agent`
    ///
    /// Stays in the foreground; SIGHUP reads the settings anew, SIGTERM ends it. Tells a service manager when it is
    /// ready (sd_notify).
    Agent(Agent),
    /// Judge what the agents of all nodes say on the bus, and speak for the cluster
    ///
    /// Any number may run: all hear everything, and a lease decides which one speaks. Settings are the agent's.
    Analyser(Agent),
    /// Try the cluster's bus on this host, or see who is on one
    Cluster(Cluster),
    /// Show, check or describe the agent's settings
    Config(Config),
    /// Replay a job recorded on 4 x H200 through the real plugin in real processes, and watch it
    Demo(Demo),
    /// Measure NCCL's operations on this node's GPUs, or on a job's (torchrun, srun)
    ///
    /// Times, bandwidths and most options are those of nccl-tests. Started by torchrun, or by srun with MASTER_ADDR
    /// set, every process is one rank (or --gpus ranks) of one benchmark, and rank 0 prints.
    ///
    /// Exit code 0: all data were right; 1: some were wrong; 2: error.
    Bench(Box<Bench>),
    /// Put the plugin into a directory and print how to load it into any job
    Plugin(Plugin),
    /// Check rules for NCCL's tuner, or search for them on these GPUs
    ///
    /// `tune FILE` checks and compiles rules. They are YAML, or the CSV of NVIDIA's example tuner where the name ends in .csv
    /// or .conf. `run --tune` and `plugin --tune` apply them.
    ///
    /// `tune --search` measures what NCCL offers against its default and writes rules with their evidence. `tune --verify`
    /// measures rules again. `tune --advise` says what a job should change in its use of NCCL.
    ///
    /// Exit code 0: the rules are right, or were measured; 1: --verify has dropped rules, or rules would make a size slower;
    /// 2: error.
    Tune(Box<Tune>),
    /// Print a shell's completions of verbs and options
    ///
    /// For bash: `ringwatch completion bash > /etc/bash_completion.d/ringwatch`. Packages install those of bash, zsh and fish.
    Completion(Completion),
    /// Print the man page, or write those of all verbs into a directory
    Man(Man),
    /// Play one rank of a recorded job on a plugin (what demo starts)
    #[command(hide = true)]
    Replay(Replay),
    /// Do what other users may block for the process on standard input (what the agent starts)
    #[command(hide = true)]
    Probe,
}

/// Options of `completion`.
#[derive(Debug, Args)]
pub struct Completion {
    /// The shell
    pub shell: clap_complete::Shell,
}

/// Options of `man`.
#[derive(Debug, Args)]
pub struct Man {
    /// Write one page a verb into this directory
    #[arg(long, value_name = "DIR")]
    pub dir: Option<PathBuf>,
}

/// Options of `cluster`.
#[derive(Debug, Args)]
pub struct Cluster {
    /// What to do
    #[command(subcommand)]
    pub verb: ClusterVerb,
}

/// The verbs for a cluster.
#[derive(Debug, Subcommand)]
pub enum ClusterVerb {
    /// Start a NATS server for this host alone, and an analyser, until Ctrl-C
    Up(ClusterUp),
    /// Show the nodes on the bus, and what became of what they saw
    Status(ClusterAt),
}

/// Options of `cluster up`.
#[derive(Debug, Args)]
pub struct ClusterUp {
    /// The server's port
    #[arg(long, value_name = "N", default_value_t = 4222)]
    pub port: u16,
    /// The port of the analyser's /metrics, /livez and /readyz
    #[arg(long, value_name = "N", default_value_t = 9479)]
    pub http: u16,
    /// Where the server keeps its files [default: the user's cache]
    #[arg(long, value_name = "DIR")]
    pub dir: Option<PathBuf>,
    /// The server's program [default: $RINGWATCH_NATS_SERVER, else nats-server on the PATH]
    #[arg(long, value_name = "PATH")]
    pub server: Option<PathBuf>,
    /// Findings as JSON, one object a line
    #[arg(long)]
    pub json: bool,
}

/// Where a cluster's bus is.
#[derive(Debug, Clone, Args)]
pub struct ClusterAt {
    /// The cluster's bus, nats://host:4222 for example; several with commas between them
    #[arg(long, value_name = "URL")]
    pub cluster: Option<SecretText>,
    /// Credentials for it (JWT and seed)
    #[arg(long, value_name = "FILE", requires = "cluster")]
    pub cluster_credentials: Option<PathBuf>,
    /// A seed for it (NKey)
    #[arg(long, value_name = "FILE", requires = "cluster")]
    pub cluster_nkey: Option<PathBuf>,
    /// Certificates (PEM) that its servers' are checked against
    #[arg(long, value_name = "FILE", requires = "cluster")]
    pub cluster_ca: Option<PathBuf>,
}

/// Options of `agent`.
#[derive(Debug, Args)]
pub struct Agent {
    /// Which settings
    #[command(flatten)]
    pub settings: Settings,
    /// Findings as JSON, one object a line
    #[arg(long)]
    pub json: bool,
    /// How the log is written
    #[command(flatten)]
    pub log: Log,
}

/// How a daemon's log is written, to standard error.
#[derive(Debug, Clone, Args)]
pub struct Log {
    /// Text or JSON, one object a line; under systemd's journal text has no time
    #[arg(long, value_name = "FORMAT", value_enum, default_value_t = LogFormat::Text, env = "RINGWATCH_LOG_FORMAT", hide_env_values = true)]
    pub log_format: LogFormat,
    /// The least level that is logged
    #[arg(long, value_name = "LEVEL", value_enum, default_value_t = LogLevel::Info, env = "RINGWATCH_LOG", hide_env_values = true)]
    pub log_level: LogLevel,
}

/// The formats of a log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// A line with time, level and message
    Text,
    /// An object with timestamp, level, message and target
    Json,
}

/// The levels of a log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LogLevel {
    /// What keeps it from working
    Error,
    /// What is lost or out of reach
    Warn,
    /// What it does, and what changes
    Info,
    /// More of that
    Debug,
    /// All there is
    Trace,
}

/// Where settings come from.
#[derive(Debug, Args)]
pub struct Settings {
    /// The file [default: /etc/ringwatch/agent.yaml if there is one, else the defaults]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Override one key, http.listen=127.0.0.1:9478 for example; so does RINGWATCH_AGENT_HTTP__LISTEN
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub set: Vec<String>,
}

/// Options of `config`.
#[derive(Debug, Args)]
pub struct Config {
    /// What to do
    #[command(subcommand)]
    pub verb: ConfigVerb,
}

/// The verbs for settings.
#[derive(Debug, Subcommand)]
pub enum ConfigVerb {
    /// Print the settings in force, every key
    Print(Settings),
    /// Say whether the settings are right
    ///
    /// Exit code 0: they are; 2: what is wrong, with file, line and key.
    Check(Settings),
    /// Print the JSON schema of the file
    Schema,
}

/// Options of `top`.
#[derive(Debug, Args)]
pub struct Top {
    /// Show what the node's agent knows: every job that you may see, whoever's it is [default socket:
    /// /run/ringwatch/agent.sock]
    #[arg(long, value_name = "SOCKET", num_args = 0..=1, default_missing_value = SOCKET, conflicts_with_all = ["dir", "baseline", "cluster"])]
    pub agent: Option<PathBuf>,
    /// Show what the analysers of a whole cluster know
    #[command(flatten)]
    pub at: ClusterAt,
    /// Play a recording: space pauses, . steps, + and - change the speed, brackets move by ten seconds
    #[arg(long, value_name = "DIR", conflicts_with_all = ["agent", "cluster", "dir", "baseline"])]
    pub replay: Option<PathBuf>,
    /// Print one frame as text and exit
    #[arg(long)]
    pub once: bool,
    /// Directory of the segments [default: $RINGWATCH_DIR, else every job on this host that may be read]
    #[arg(long, value_name = "DIR", conflicts_with = "cluster")]
    pub dir: Option<PathBuf>,
    /// What `ringwatch bench --json` or --save wrote on this machine, or a file of targets: transfers are judged by it as
    /// well
    #[arg(long, value_name = "FILE", conflicts_with = "cluster")]
    pub baseline: Vec<PathBuf>,
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
    /// What `ringwatch bench --json` or --save wrote on this machine, or a file of targets: transfers are judged by it as
    /// well
    #[arg(long, value_name = "FILE")]
    pub baseline: Vec<PathBuf>,
    /// Replace another profiler plugin that NCCL_PROFILER_PLUGIN names
    #[arg(long)]
    pub replace: bool,
    /// Keep the other profiler plugin that NCCL_PROFILER_PLUGIN names: it gets what it asks for
    #[arg(long, conflicts_with = "replace")]
    pub chain: bool,
    /// Load the library that sees NCCL's calls as well: for NCCL before 2.23, inits and calls that hang,
    /// reduction operations
    #[arg(long)]
    pub preload: bool,
    /// Record what the job's ranks report in this new directory
    #[arg(long, value_name = "DIR")]
    pub record: Option<PathBuf>,
    /// Which rules NCCL's tuner follows
    #[command(flatten)]
    pub tuning: Tuning,
    /// The command and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "CMD")]
    pub command: Vec<OsString>,
}

/// Options of `record`.
#[derive(Debug, Args)]
pub struct Record {
    /// A new directory for the recording
    #[arg(short = 'o', long, value_name = "DIR")]
    pub output: PathBuf,
    /// Directory of the segments [default: $RINGWATCH_DIR, else every job on this host that may be read]
    #[arg(long, value_name = "DIR")]
    pub dir: Option<PathBuf>,
    /// How long to record, in seconds [default: until Ctrl-C]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub seconds: Option<u32>,
    /// The most that the recording takes; the oldest blocks are removed. K, M and G are powers of 1024
    #[arg(long, value_name = "SIZE", default_value = "16G")]
    pub max_size: String,
    /// Blocks older than this are removed: 90s, 30m, 24h, 7d
    #[arg(long, value_name = "TIME", default_value = "7d", value_parser = duration)]
    pub max_age: Duration,
}

/// Options of `diagnose`.
#[derive(Debug, Args)]
pub struct Diagnose {
    /// Ask the node's agent in place of looking: every job that you may see [default socket:
    /// /run/ringwatch/agent.sock]
    #[arg(long, value_name = "SOCKET", num_args = 0..=1, default_missing_value = SOCKET, conflicts_with_all = ["dir", "baseline"])]
    pub agent: Option<PathBuf>,
    /// Judge what another tool wrote: dumps of PyTorch's Flight Recorder, or a directory with one of each rank
    #[arg(long, value_name = "PATH", num_args = 1.., conflicts_with_all = ["dir", "agent", "cluster", "baseline", "since", "all"])]
    pub import: Vec<PathBuf>,
    /// Judge a recording, as it was judged when it was made
    #[arg(long, value_name = "DIR", conflicts_with_all = ["dir", "agent", "cluster", "import", "baseline", "since", "all"])]
    pub replay: Option<PathBuf>,
    /// Ask the analysers of a whole cluster
    #[command(flatten)]
    pub at: ClusterAt,
    /// Print findings as JSON, one object a line
    #[arg(long)]
    pub json: bool,
    /// What `ringwatch bench --json` or --save wrote on this machine, or a file of targets: transfers are judged by it as
    /// well
    #[arg(long, value_name = "FILE")]
    pub baseline: Vec<PathBuf>,
    /// A log of the job: what is known of the errors in it is told behind the findings
    #[arg(long, value_name = "FILE")]
    pub log: Vec<PathBuf>,
    /// Also print findings that were closed in this time, whatever for: 90s, 30m, 24h, 7d. Without it those are printed
    /// that are open, and those whose job ended in the last hour
    #[arg(long, value_name = "TIME", value_parser = duration, conflicts_with = "all")]
    pub since: Option<Duration>,
    /// Print every finding that is known, open or closed
    #[arg(long)]
    pub all: bool,
    /// Directory of segments, live or left by dead processes [default: $RINGWATCH_DIR, else this host's live jobs]
    #[arg(value_name = "DIR")]
    pub dir: Option<PathBuf>,
}

/// The jobs that a report is about.
#[derive(Debug, Clone, Args)]
pub struct Reported {
    /// Ask the node's agent in place of looking: every job that you may see [default socket:
    /// /run/ringwatch/agent.sock]
    #[arg(long, value_name = "SOCKET", num_args = 0..=1, default_missing_value = SOCKET, conflicts_with_all = ["dirs", "baseline"])]
    pub agent: Option<PathBuf>,
    /// Sum up what another tool wrote: dumps of PyTorch's Flight Recorder, or a directory with one of each rank
    #[arg(long, value_name = "PATH", num_args = 1.., conflicts_with_all = ["dirs", "agent"])]
    pub import: Vec<PathBuf>,
    /// Sum up a recording
    #[arg(long, value_name = "DIR", conflicts_with_all = ["dirs", "agent", "import"])]
    pub replay: Option<PathBuf>,
    /// The file of `ringwatch bench --json` or --save on this machine, or a file of targets: transfers in segments are judged by it as
    /// well, and charts show it
    #[arg(long, value_name = "FILE")]
    pub baseline: Vec<PathBuf>,
    /// Directories of segments, live or left by dead processes [default: $RINGWATCH_DIR, else this host's jobs]
    #[arg(value_name = "DIR")]
    pub dirs: Vec<PathBuf>,
}

/// Options of `report`.
#[derive(Debug, Args)]
pub struct Report {
    /// The jobs
    #[command(flatten)]
    pub on: Reported,
    /// The form
    #[arg(long, value_enum, default_value_t = ReportFormat::Text)]
    pub format: ReportFormat,
    /// Print one JSON document: --format json
    #[arg(long, conflicts_with = "format")]
    pub json: bool,
    /// Write to this file in place of standard output; it appears when it is complete
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
}

/// The forms of a report.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ReportFormat {
    /// Pages for a terminal
    Text,
    /// One JSON document
    Json,
    /// One HTML file with charts, which loads nothing from elsewhere
    Html,
    /// Markdown, without charts
    Md,
    /// The operations, a line for each rank's part
    Csv,
    /// The same as a Parquet file
    Parquet,
    /// A timeline of the operations for ui.perfetto.dev
    Perfetto,
}

/// Options of `diff`.
#[derive(Debug, Args)]
pub struct Diff {
    /// The recording to compare with
    #[arg(value_name = "OLD")]
    pub old: PathBuf,
    /// The recording that is judged
    #[arg(value_name = "NEW")]
    pub new: PathBuf,
    /// The change of a time from which on it counts, in per cent
    #[arg(long, value_name = "PERCENT", default_value_t = 3.0, value_parser = percent)]
    pub threshold: f64,
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
}

/// Options of `attach`.
#[derive(Debug, Args)]
pub struct Attach {
    /// A process of the job on this host, or the job's number in Slurm, torchrun or Ray [default: the job that owns this host's RAS]
    #[arg(value_name = "PID|JOB")]
    pub target: Option<String>,
    /// Where NCCL's RAS listens [default: NCCL_RAS_ADDR of the process, else localhost:28028]
    #[arg(long, value_name = "HOST:PORT")]
    pub ras: Option<String>,
    /// Judge two answers that ncclras saved, the older one first (ncclras -f json -v), in place of asking
    #[arg(long, value_name = "FILE", num_args = 2, conflicts_with_all = ["target", "ras", "seconds"])]
    pub saved: Vec<PathBuf>,
    /// The time between the two answers
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=3600))]
    pub seconds: u32,
    /// Print JSON, one finding a line
    #[arg(long)]
    pub json: bool,
}

/// Options of `mcp`.
#[derive(Debug, Args)]
pub struct Mcp {
    /// The jobs
    #[command(flatten)]
    pub on: Reported,
}

/// Options of `explain`.
#[derive(Debug, Args)]
pub struct Explain {
    /// Print JSON, one object a line
    #[arg(long)]
    pub json: bool,
    /// Texts in quotes, log files, or - for standard input
    #[arg(required = true, value_name = "TEXT|FILE")]
    pub texts: Vec<OsString>,
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

/// Options of `bench`.
#[derive(Debug, Args)]
pub struct Bench {
    /// What is measured
    #[arg(value_name = "OPERATION", default_value = "all_reduce", value_parser = operations())]
    pub collective: String,
    /// Smallest size in bytes; K, M and G are powers of 1024 [default: 32M, or --max-bytes if that is less]
    #[arg(short = 'b', long, value_name = "SIZE")]
    pub min_bytes: Option<String>,
    /// Largest size in bytes [default: 32M, or --min-bytes if that is more]
    #[arg(short = 'e', long, value_name = "SIZE")]
    pub max_bytes: Option<String>,
    /// From one size to the next: times this [default: 2]
    #[arg(short = 'f', long, value_name = "N", conflicts_with = "step_bytes")]
    pub step_factor: Option<u64>,
    /// From one size to the next: so many bytes more
    #[arg(short = 'i', long, value_name = "SIZE")]
    pub step_bytes: Option<String>,
    /// Operations that are timed together
    #[arg(short = 'n', long, value_name = "N", default_value_t = 20)]
    pub iters: u32,
    /// Operations before that
    #[arg(short = 'w', long, value_name = "N", default_value_t = 5)]
    pub warmup_iters: u32,
    /// Time as many operations as take about so many milliseconds, at most --iters of them
    #[arg(long, value_name = "MS")]
    pub millis: Option<u32>,
    /// Compare the results with what they must be: 1, or 0 to leave it out
    #[arg(short = 'c', long, value_name = "0|1", default_value_t = 1, value_parser = clap::value_parser!(u8).range(0..=1))]
    pub check: u8,
    /// Threads a process [default: one for each visible GPU; 1 with --gpus, torchrun or srun]
    #[arg(short = 't', long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub threads: Option<u32>,
    /// GPUs a thread [default: 1]
    #[arg(short = 'g', long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub gpus: Option<u32>,
    /// Reduction
    #[arg(short = 'o', long, value_name = "OP", default_value = "sum", value_parser = ["sum", "prod", "max", "min", "avg"])]
    pub op: String,
    /// Element type
    #[arg(short = 'd', long, value_name = "TYPE", default_value = "float", value_parser = types())]
    pub dtype: String,
    /// Capture N operations into one CUDA graph, and launch it until --iters are done (at least)
    #[arg(short = 'G', long, value_name = "N")]
    pub cuda_graph: Option<u32>,
    /// The root of broadcast and reduce
    #[arg(short = 'r', long, value_name = "RANK", default_value_t = 0)]
    pub root: u32,
    /// Put N operations into each NCCL group; times are of one operation
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub batch: u32,
    /// Wait on the host after each operation
    #[arg(long)]
    pub blocking: bool,
    /// Give each thread a CPU of its own once its communicators are made; NCCL's own threads stay free. --compare
    /// always does, so that a ratio is not one of CPUs
    #[arg(long)]
    pub pin: bool,
    /// Time single operations by CUDA events as well; --json has every sample
    #[arg(long)]
    pub events: bool,
    /// Measure each size R times and report the median [default: 1; 10 with --targets, 3 with several rounds]
    #[arg(long, value_name = "R")]
    pub repeat: Option<u32>,
    /// Abort all communicators when work stands still for so long
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub timeout: u64,
    /// NCCL's library [default: libnccl.so.2 of the dynamic linker, else of a Python's site-packages]
    #[arg(long, value_name = "PATH")]
    pub nccl: Option<PathBuf>,
    /// The CUDA driver's library
    #[arg(long, value_name = "PATH", hide = true)]
    pub cuda: Option<PathBuf>,
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
    /// Write the JSON document to a file, print nothing (what --compare starts)
    #[arg(long, value_name = "FILE", hide = true)]
    pub result: Option<PathBuf>,
    /// Measure when told to on standard input, a socket (what --compare starts)
    #[arg(long, hide = true)]
    pub turns: bool,
    /// The sizes in bytes, ascending (what tune starts)
    #[arg(long, value_name = "A,B,...", value_delimiter = ',', hide = true, conflicts_with_all = ["min_bytes", "max_bytes", "step_factor", "step_bytes", "targets"])]
    pub sizes: Vec<u64>,
    /// Which of several benchmarks of one job (what --compare starts)
    #[arg(long, value_name = "N", hide = true, default_value_t = 0)]
    pub epoch: u64,
    /// Measure what a file of targets (YAML) asks for, and print which are reached: exit code 0 if all are, 1 if one is
    /// missed, 2 if one could not be judged
    #[arg(long, value_name = "FILE", conflicts_with_all = ["collective", "min_bytes", "max_bytes", "step_factor", "step_bytes", "dtype", "compare", "turns", "result"])]
    pub targets: Option<PathBuf>,
    /// Write what was measured to a file, every repeat of it, for --against and --baseline
    #[arg(long, value_name = "FILE", conflicts_with_all = ["compare", "turns", "result"])]
    pub save: Option<PathBuf>,
    /// Compare with a saved file (--save, --json): changes in per cent, how sure they are, and exit code 1 where something
    /// is slower
    #[arg(long, value_name = "OLD", conflicts_with_all = ["compare", "turns", "result"])]
    pub against: Option<PathBuf>,
    /// With --against: changes up to so many per cent do not count [default: 5]
    #[arg(long, value_name = "PERCENT", requires = "against", value_parser = percent)]
    pub threshold: Option<f64>,
    /// NVML's library
    #[arg(long, value_name = "PATH", hide = true)]
    pub nvml: Option<PathBuf>,
    /// Run the sweep under several variants of the environment in turn, and print what each costs
    #[arg(long)]
    pub compare: bool,
    /// With --compare: which variants, the first of them being what the others are divided by. none: no plugin;
    /// ringwatch: as `ringwatch run` sets it up; ringwatch-full: that with RINGWATCH_DETAIL=full; null: a plugin that does
    /// nothing, which is what NCCL itself charges; and names given by --with [default: all]
    #[arg(long, value_name = "A,B,...", value_delimiter = ',', requires = "compare")]
    pub variants: Vec<String>,
    /// With --compare: one more variant, with another profiler plugin, and variables of its own
    #[arg(long, value_name = "NAME=PATH[,VAR=VALUE...]", requires = "compare")]
    pub with: Vec<String>,
    /// Measure what a profiler plugin costs an operation, by phases with and without events beside each other in the
    /// same processes. Prints the time without events, and NCCL's own price and the plugin's with intervals of 95 %. The
    /// data are not checked
    #[arg(long, conflicts_with_all = ["compare", "targets", "save", "against", "events", "iters", "warmup_iters", "millis", "repeat", "turns", "result"])]
    pub cost: bool,
    /// With --cost: measure this profiler plugin [default: Ringwatch's own]
    #[arg(long, value_name = "FILE", requires = "cost")]
    pub plugin: Option<PathBuf>,
    /// With --cost: operations that each phase times [default: 1500]
    #[arg(long, value_name = "N", requires = "cost")]
    pub calls: Option<u32>,
    /// Measure everything so many times, with new communicators each time; with --compare: each variant, in turn; with
    /// --cost: phases of each kind, with the same communicators [default: 1; 5 with --compare, --save or --against; 60
    /// with --cost]
    #[arg(long, value_name = "R", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub rounds: Option<u32>,
    /// With --compare: the events that the null plugin asks for [default: 0x42, collectives and kernels on channels]
    #[arg(long, value_name = "MASK", requires = "compare")]
    pub null_mask: Option<String>,
    /// With --compare: end a variant whose set-up or turn takes longer than this [default: 600]
    #[arg(long, value_name = "SECONDS", requires = "compare", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub variant_timeout: Option<u64>,
}

/// Reads a number of per cent.
fn percent(text: &str) -> Result<f64, String> {
    let number = text.trim().trim_end_matches('%').trim_end().parse::<f64>().ok();
    let number = number.filter(|n| (0.0..=1000.0).contains(n));
    number.ok_or_else(|| "give per cent from 0 to 1000, as in 5".to_owned())
}

fn operations() -> impl clap::builder::TypedValueParser<Value = String> {
    clap::builder::PossibleValuesParser::new([
        PossibleValue::new("all_reduce"),
        PossibleValue::new("broadcast"),
        PossibleValue::new("reduce"),
        PossibleValue::new("all_gather"),
        PossibleValue::new("reduce_scatter"),
        PossibleValue::new("all_to_all").alias("alltoall"),
        PossibleValue::new("sendrecv"),
    ])
}

fn types() -> impl clap::builder::TypedValueParser<Value = String> {
    clap::builder::PossibleValuesParser::new([
        PossibleValue::new("int8"),
        PossibleValue::new("uint8"),
        PossibleValue::new("int32"),
        PossibleValue::new("uint32"),
        PossibleValue::new("int64"),
        PossibleValue::new("uint64"),
        PossibleValue::new("half").aliases(["float16", "f16"]),
        PossibleValue::new("float").aliases(["float32", "f32"]),
        PossibleValue::new("double").aliases(["float64", "f64"]),
        PossibleValue::new("bfloat16").alias("bf16"),
    ])
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
    /// Which rules NCCL's tuner follows
    #[command(flatten)]
    pub tuning: Tuning,
}

/// The rules that NCCL's tuner follows in a job.
#[derive(Debug, Args)]
pub struct Tuning {
    /// Let NCCL's tuner follow the rules in a file, where all ranks of a communicator agree on them. `observe` follows
    /// none: transfers that take twice as long as NCCL predicts are findings. Any tuner also ends NCCL's own policy for the
    /// number of channels
    #[arg(long, value_name = "FILE|observe")]
    pub tune: Option<PathBuf>,
    /// With --tune: make no communicator whose ranks do not agree. Without it NCCL's defaults apply there
    #[arg(long, requires = "tune")]
    pub tune_require: bool,
    /// With --tune and --preload: rules apply over several nodes as well. Ranks agree by an all-gather in the init of each
    /// communicator, so every rank of the job has to be started with this option. Where one is not, init fails
    #[arg(long, requires_all = ["tune", "preload"])]
    pub tune_nodes: bool,
}

impl Tuning {
    /// True where NCCL's predictions are wanted, and no rules.
    pub fn observes(&self) -> bool {
        self.tune.as_deref() == Some(std::path::Path::new("observe"))
    }
}

/// Options of `doctor`.
#[derive(Debug, Args)]
pub struct Doctor {
    /// Only these checks
    #[arg(value_name = "CHECK")]
    pub checks: Vec<String>,
    /// Check all ranks of a job: what differs between them, and short real collectives over all and between pairs. Started by
    /// torchrun or srun, or by itself with one rank for each GPU of this host; rank 0 prints
    #[arg(long)]
    pub ranks: bool,
    /// Print the ids of all checks
    #[arg(long)]
    pub list: bool,
    /// Print the report as JSON
    #[arg(long)]
    pub json: bool,
    /// Print all that checks saw, also where something else is wrong
    #[arg(short, long)]
    pub verbose: bool,
    /// Write the report and the facts that it rests on into a compressed tar file, without secrets
    #[arg(long, value_name = "FILE")]
    pub bundle: Option<PathBuf>,
    /// A check that takes longer fails
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=600))]
    pub limit: u64,
    /// The agent's settings [default: /etc/ringwatch/agent.yaml]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// NVML's library, where it is not libnvidia-ml.so.1 on the loader's path
    #[arg(long, value_name = "PATH")]
    pub nvml: Option<PathBuf>,
    /// CUDA's library, where it is not libcuda.so.1 on the loader's path
    #[arg(long, value_name = "PATH")]
    pub cuda: Option<PathBuf>,
    /// NCCL's library for the collectives of --ranks [default: the one that a job would load]
    #[arg(long, value_name = "PATH", requires = "ranks")]
    pub nccl: Option<PathBuf>,
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
    /// A recording of one's own in its place
    #[arg(long)]
    pub trace: Option<PathBuf>,
    /// Which rank
    #[arg(long)]
    pub rank: usize,
    /// Profiler ABI version
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u8).range(1..=7))]
    pub abi: u8,
    /// The plugin's file
    #[arg(long)]
    pub plugin: PathBuf,
    /// CLOCK_MONOTONIC in ns at which the recording begins: the same for all processes of one job
    #[arg(long)]
    pub start_at: Option<u64>,
    /// As fast as the plugin takes it
    #[arg(long)]
    pub unpaced: bool,
    /// Leave out what the plugin does not ask for, as NCCL does
    #[arg(long)]
    pub honour_mask: bool,
    /// Kernels of the recording start so long after their calls at least: calls that are late by less make no rank late
    #[arg(long, value_name = "MS", default_value_t = 0)]
    pub hosts_ahead_ms: u64,
    /// So many times as fast as it was recorded
    #[arg(long, value_name = "TIMES", conflicts_with = "unpaced")]
    pub speed: Option<f64>,
    /// How often
    #[arg(long, default_value_t = 1)]
    pub loops: u32,
    /// Stay alive for so many seconds afterwards, as the recorded process did
    #[arg(long, default_value_t = 0)]
    pub hold: u32,
}

/// A time as people write it: `90s`, `30m`, `24h`, `7d`.
fn duration(text: &str) -> Result<Duration, String> {
    let wrong = || format!("{text:?} is no time; write 90s, 30m, 24h or 7d");
    let (number, unit) = text.split_at_checked(text.len().saturating_sub(1)).ok_or_else(wrong)?;
    let seconds = match unit {
        "s" => 1,
        "m" => 60,
        "h" => 3600,
        "d" => 24 * 3600,
        _ => return Err(wrong()),
    };
    let number: u64 = number.parse().map_err(|_| wrong())?;
    number.checked_mul(seconds).map(Duration::from_secs).ok_or_else(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_as_people_write_them() {
        for (text, seconds) in [("90s", 90), ("30m", 1800), ("24h", 86_400), ("7d", 604_800), ("0s", 0)] {
            assert_eq!(duration(text), Ok(Duration::from_secs(seconds)));
        }
        for wrong in ["", "s", "24", "1.5h", "-1h", "1w", "9999999999999999999d", "é"] {
            assert!(duration(wrong).is_err(), "{wrong}");
        }
    }
}
