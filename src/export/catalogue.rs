//! Every metric there is: name, kind, unit, labels and help. Exporters, dashboards, alert rules and the list in
//! `dashboards/METRICS.md` are held against it by tests.

/// The kinds of metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Only grows; begins at zero when its series appears.
    Counter,
    /// A value at a moment.
    Gauge,
    /// Observations counted by their size.
    Histogram,
    /// Always 1: its labels are what it says.
    Info,
}

impl Kind {
    /// Its name in OpenMetrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
            Kind::Histogram => "histogram",
            Kind::Info => "info",
        }
    }
}

/// The instruments of OpenTelemetry that its conventions for hardware use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Instrument {
    /// Only grows.
    Counter,
    /// Goes up and down; adds up over components.
    UpDownCounter,
    /// A value at a moment.
    Gauge,
}

impl Instrument {
    /// Its name in the conventions.
    pub const fn as_str(self) -> &'static str {
        match self {
            Instrument::Counter => "Counter",
            Instrument::UpDownCounter => "UpDownCounter",
            Instrument::Gauge => "Gauge",
        }
    }
}

/// A metric as OpenTelemetry's semantic conventions for hardware name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Convention {
    /// Its name.
    pub name: &'static str,
    /// Its instrument.
    pub instrument: Instrument,
    /// Its unit as UCUM writes it.
    pub unit: &'static str,
    /// The help text, in the conventions' words.
    pub help: &'static str,
}

/// One metric.
#[derive(Debug, PartialEq, Eq)]
pub struct Metric {
    /// The family's name, with its unit and without a kind's suffix.
    pub name: &'static str,
    /// The kind.
    pub kind: Kind,
    /// The base unit its name ends with; absent for numbers of things.
    pub unit: Option<&'static str>,
    /// Its labels, in the order in which their values are given. A label without a value is left out.
    pub labels: &'static [&'static str],
    /// The help text.
    pub help: &'static str,
    /// The same thing by OpenTelemetry's conventions for hardware, where they have it: OTLP carries it under both names.
    pub convention: Option<Convention>,
}

impl Metric {
    /// The name in a query; a histogram has three.
    pub fn exposed(&self) -> Vec<String> {
        let with = |suffixes: &[&str]| suffixes.iter().map(|s| format!("{}{s}", self.name)).collect();
        match self.kind {
            Kind::Counter => with(&["_total"]),
            Kind::Gauge => with(&[""]),
            Kind::Histogram => with(&["_bucket", "_sum", "_count"]),
            Kind::Info => with(&["_info"]),
        }
    }

    /// True when the number of its series depends on what jobs do, so that the budget holds it.
    pub fn is_budgeted(&self) -> bool {
        self.labels.contains(&"job_name")
    }
}

/// The label of the series that takes what the budget leaves no series of its own.
pub const OVERFLOW: &str = "overflow";
/// The label that every series has where a cluster is named.
pub const CLUSTER: &str = "cluster";
/// The labels of the container that a GPU was given to, as dcgm-exporter names them: of every series with a `gpu` or a
/// `rank`, where a container is known.
pub const CONTAINER: [&str; 3] = ["pod", "namespace", "container"];

macro_rules! catalogue {
    (@convention) => { None };
    (@convention $it:expr) => { Some($it) };
    ($($id:ident = $kind:ident $name:literal $unit:expr, [$($label:literal),*], $help:literal $(, $convention:expr)?;)+) => {
        $(
            #[doc = $help]
            pub const $id: &Metric = &Metric {
                name: $name, kind: Kind::$kind, unit: $unit, labels: &[$($label),*], help: $help,
                convention: catalogue!(@convention $($convention)?),
            };
        )+
        /// All of them, in the order in which they are given out.
        pub const ALL: &[&Metric] = &[$($id),+];
    };
}

const S: Option<&str> = Some("seconds");
const B: Option<&str> = Some("bytes");
const R: Option<&str> = Some("ratio");

macro_rules! conventions {
    ($($id:ident = $instrument:ident $name:literal $unit:literal, $help:literal;)+) => {
        $(const $id: Convention = Convention {
            name: $name, instrument: Instrument::$instrument, unit: $unit, help: $help,
        };)+
    };
}

// What else there is of them has no counterpart here: `hw.gpu.io` does not say over which wires, `hw.gpu.memory.utilization`
// is what is in use and not the bandwidth, and a state (`hw.status`) is what rules find, not what is read.
conventions! {
    HW_ERRORS = Counter "hw.errors" "{error}", "Number of errors encountered by the component.";
    HW_POWER = Gauge "hw.power" "W", "Instantaneous power consumed by the component.";
    HW_TEMPERATURE = Gauge "hw.temperature" "Cel", "Temperature in degrees Celsius.";
    HW_GPU_BUSY = Gauge "hw.gpu.utilization" "1", "Fraction of time spent in a specific task.";
    HW_GPU_MEMORY_USED = UpDownCounter "hw.gpu.memory.usage" "By", "GPU memory used.";
    HW_GPU_MEMORY = UpDownCounter "hw.gpu.memory.limit" "By", "Size of the GPU memory.";
    HW_NETWORK_UP = UpDownCounter "hw.network.up" "1", "Link status: 1 (up) or 0 (down).";
    HW_NETWORK_SPEED = UpDownCounter "hw.network.bandwidth.limit" "By/s", "Link speed.";
    HW_NETWORK_IO = Counter "hw.network.io" "By", "Received and transmitted network traffic in bytes.";
}

catalogue! {
    OPERATIONS = Counter "ringwatch_operations" None,
        ["node", "job_name", "uid", "communicator", "collective", "algorithm", "protocol", "size_class"],
        "Operations that are over; each node counts those its own ranks take part in.";
    OPERATION_BYTES = Counter "ringwatch_operation_bytes" B,
        ["node", "job_name", "uid", "communicator", "collective", "algorithm", "protocol", "size_class"],
        "Message sizes of operations that are over, as nccl-tests counts them.";
    TRANSFER = Histogram "ringwatch_collective_transfer_seconds" S,
        ["node", "job_name", "uid", "communicator", "collective", "algorithm", "protocol", "size_class"],
        "Time of the rank that came last, which waited for nobody; of operations timed on all ranks seen.";
    TIMED_BYTES = Counter "ringwatch_timed_bytes" B,
        ["node", "job_name", "uid", "communicator", "collective", "algorithm", "protocol", "size_class"],
        "Message sizes of the operations whose transfer time is known: over ringwatch_timed_seconds, algorithm bandwidth.";
    TIMED_SECONDS = Counter "ringwatch_timed_seconds" S,
        ["node", "job_name", "uid", "communicator", "collective", "algorithm", "protocol", "size_class"],
        "Transfer times of those operations; the histogram's own sum is not there when it is native.";
    BUS_BYTES = Counter "ringwatch_bus_bytes" B,
        ["node", "job_name", "uid", "communicator", "collective", "algorithm", "protocol", "size_class"],
        "Message sizes times the bus factor of nccl-tests, of the same operations: over ringwatch_timed_seconds, bus bandwidth.";
    UNTIMED = Counter "ringwatch_untimed_operations" None, ["node", "job_name", "uid", "reason"],
        "Ranks' parts of operations whose GPU time is not known, by reason.";
    WAITING = Counter "ringwatch_rank_waiting_seconds" S, ["node", "job_name", "uid", "communicator", "rank"],
        "Time a rank's kernels spent waiting for other ranks.";
    LATE = Counter "ringwatch_rank_late" None, ["node", "job_name", "uid", "communicator", "rank"],
        "Collectives to which this rank came last, at least a millisecond after the first.";
    LATE_SECONDS = Counter "ringwatch_rank_late_seconds" S, ["node", "job_name", "uid", "communicator", "rank"],
        "How long others waited for this rank in those.";
    NETWORK_BYTES = Counter "ringwatch_network_bytes" B, ["node", "job_name", "uid", "communicator", "direction"],
        "Bytes that NCCL's proxy moved over the network.";
    NETWORK_WAIT = Counter "ringwatch_network_wait_seconds" S, ["node", "job_name", "uid", "communicator", "phase"],
        "Time network steps waited for the GPU, the peer, the wire and the flush, over all steps.";
    IN_FLIGHT = Gauge "ringwatch_operations_in_flight" None, ["node", "job_name", "uid", "communicator"],
        "Collectives that some rank has yet to finish, or to issue.";
    OLDEST = Gauge "ringwatch_oldest_operation_age_seconds" S, ["node", "job_name", "uid", "communicator"],
        "Age of the oldest collective in flight; absent while none is.";
    COMM_RANKS = Gauge "ringwatch_communicator_ranks" None, ["node", "job_name", "uid", "communicator", "state"],
        "Ranks of the communicator: all, and those seen here.";
    PROCESSES = Gauge "ringwatch_job_processes" None, ["node", "job_name", "uid", "state"],
        "Processes of the job on this node, alive and gone, while one is alive.";
    NCCL_BUSY = Gauge "ringwatch_nccl_threads_busy_ratio" Some("ratio"), ["node", "job_name", "uid"],
        "Share of the last second in which the busiest of NCCL's own threads of the job's processes on this node ran.";
    NCCL_STARVED = Gauge "ringwatch_nccl_threads_starved_ratio" Some("ratio"), ["node", "job_name", "uid"],
        "Share of the last second in which the worst-off of these threads wanted a CPU and had none.";
    FINDINGS = Gauge "ringwatch_findings" None, ["node", "job_name", "uid", "kind", "severity"],
        "Findings that are open; 0 for those that were.";
    FINDING_RANKS = Gauge "ringwatch_finding_ranks" None, ["node", "job_name", "uid", "kind", "severity", "job_rank", "host"],
        "Open findings that name this rank of the job, or this host where they name no rank: 8 of a finding and 256 in all at most.";
    FINDINGS_TOTAL = Counter "ringwatch_findings_opened" None, ["node", "job_name", "uid", "kind", "severity"],
        "Findings opened so far.";
    FINDINGS_UPDATED = Counter "ringwatch_findings_updated" None, ["node", "job_name", "uid", "kind", "severity"],
        "Changes of open findings so far, by what they changed to: severity, ranks, cause.";
    FINDINGS_CLOSED = Counter "ringwatch_findings_closed" None, ["node", "job_name", "uid", "kind", "severity", "reason"],
        "Findings closed so far, by reason: resolved, job-ended, superseded, unobserved (while no agent ran).";
    LOST = Counter "ringwatch_lost_records" None, ["node", "job_name", "uid", "reason"],
        "Records that were lost, by reason: what the job's plugin could not record, and what was overwritten unread.";
    GPU = Info "ringwatch_gpu" None, ["node", "gpu", "index", "uuid", "model", "numa_node"],
        "What a GPU is.";
    GPU_SM_CLOCK = Gauge "ringwatch_gpu_sm_clock_hertz" Some("hertz"), ["node", "gpu"],
        "Clock of its multiprocessors.";
    GPU_SM_CLOCK_MAX = Gauge "ringwatch_gpu_sm_clock_limit_hertz" Some("hertz"), ["node", "gpu"],
        "The highest clock its multiprocessors can have.";
    GPU_MEMORY_CLOCK = Gauge "ringwatch_gpu_memory_clock_hertz" Some("hertz"), ["node", "gpu"],
        "Clock of its memory.";
    GPU_POWER = Gauge "ringwatch_gpu_power_watts" Some("watts"), ["node", "gpu"],
        "Power it draws.", HW_POWER;
    GPU_POWER_LIMIT = Gauge "ringwatch_gpu_power_limit_watts" Some("watts"), ["node", "gpu"],
        "Power it may draw.";
    GPU_TEMPERATURE = Gauge "ringwatch_gpu_temperature_celsius" Some("celsius"), ["node", "gpu"],
        "Its temperature.", HW_TEMPERATURE;
    GPU_THROTTLED = Gauge "ringwatch_gpu_throttled" None, ["node", "gpu", "reason"],
        "1 while its clocks are held down for this reason, else 0.";
    GPU_BUSY = Gauge "ringwatch_gpu_utilization_ratio" R, ["node", "gpu"],
        "Share of time with a kernel on it.", HW_GPU_BUSY;
    GPU_SM_ACTIVE = Gauge "ringwatch_gpu_sm_active_ratio" R, ["node", "gpu"],
        "Share of its multiprocessors in use.";
    GPU_MEMORY_ACTIVE = Gauge "ringwatch_gpu_memory_active_ratio" R, ["node", "gpu"],
        "Share of its memory bandwidth in use.";
    GPU_TENSOR_ACTIVE = Gauge "ringwatch_gpu_tensor_active_ratio" R, ["node", "gpu"],
        "Share of its tensor cores in use.";
    GPU_MEMORY_USED = Gauge "ringwatch_gpu_memory_used_bytes" B, ["node", "gpu"],
        "Memory in use.", HW_GPU_MEMORY_USED;
    GPU_MEMORY = Gauge "ringwatch_gpu_memory_size_bytes" B, ["node", "gpu"],
        "Memory it has.", HW_GPU_MEMORY;
    GPU_ECC = Counter "ringwatch_gpu_memory_errors" None, ["node", "gpu", "error_type"],
        "Memory errors, corrected and not, since the driver was loaded.", HW_ERRORS;
    GPU_REMAPPED = Gauge "ringwatch_gpu_remapped_rows" None, ["node", "gpu", "error_type"],
        "Rows of memory that were replaced.";
    GPU_REMAP_PENDING = Gauge "ringwatch_gpu_remap_pending" None, ["node", "gpu"],
        "1 while rows wait to be replaced at the next reset.";
    GPU_REMAP_FAILED = Gauge "ringwatch_gpu_remap_failed" None, ["node", "gpu"],
        "1 when replacing rows failed.";
    GPU_XID = Counter "ringwatch_gpu_xid_errors" None, ["node", "gpu", "code"],
        "Errors the driver reported, by NVIDIA's number, since this agent started.";
    NVLINK_UP = Gauge "ringwatch_nvlink_up" None, ["node", "gpu", "link"],
        "1 while the link is up, else 0.";
    NVLINK_ERRORS = Counter "ringwatch_nvlink_errors" None, ["node", "gpu", "link", "error_type"],
        "Packets sent again, recoveries and checksum errors of a link since the driver was loaded.";
    NVLINK_BYTES = Counter "ringwatch_nvlink_bytes" B, ["node", "gpu", "direction"],
        "Bytes over all NVLinks of a GPU since this agent started.";
    WIRE_EXPECTED = Counter "ringwatch_wire_expected_bytes" B,
        ["node", "gpu", "uid", "communicator", "collective", "direction"],
        "Bytes that operations should have put on a GPU's NVLinks, by algorithm, protocol, size and ranks.";
    WIRE_COMPARABLE = Counter "ringwatch_wire_comparable_bytes" B,
        ["node", "gpu", "uid", "communicator", "collective", "direction"],
        "Those of them that fell into seconds in which the GPU's counters were read.";
    WIRE_ATTRIBUTED = Counter "ringwatch_wire_attributed_bytes" B,
        ["node", "gpu", "uid", "communicator", "collective", "direction"],
        "Bytes that the counters moved for them in these seconds; over the comparable ones, near 1.";
    WIRE_FOREIGN = Counter "ringwatch_wire_foreign_bytes" B, ["node", "gpu", "direction"],
        "Bytes on a GPU's NVLinks that belong to no operation that is known.";
    WIRE_UNKNOWN = Counter "ringwatch_wire_unknown_bytes" B, ["node", "gpu", "direction"],
        "Bytes on a GPU's NVLinks in seconds with operations of which it is not known what they should move.";
    NETWORK_MEASURED = Counter "ringwatch_network_measured_bytes" B, ["node", "direction"],
        "Bytes over a node's RDMA ports, or its interfaces of hardware where it has none, since this agent started.";
    NETWORK_EXPECTED = Counter "ringwatch_network_expected_bytes" B,
        ["node", "uid", "communicator", "collective", "direction"],
        "Bytes that operations should have put on a node's network, by algorithm, protocol, size, ranks and nodes.";
    NETWORK_COMPARABLE = Counter "ringwatch_network_comparable_bytes" B,
        ["node", "uid", "communicator", "collective", "direction"],
        "Those of them that fell into seconds in which the node's counters were read.";
    NETWORK_ATTRIBUTED = Counter "ringwatch_network_attributed_bytes" B,
        ["node", "uid", "communicator", "collective", "direction"],
        "Bytes that the counters moved for them in these seconds; over the comparable ones, near 1.";
    NETWORK_FOREIGN = Counter "ringwatch_network_foreign_bytes" B, ["node", "direction"],
        "Bytes on a node's network that belong to no operation that is known.";
    NETWORK_UNKNOWN = Counter "ringwatch_network_unknown_bytes" B, ["node", "direction"],
        "Bytes on a node's network in seconds with operations of which it is not known what they should move.";
    PCIE_BYTES = Counter "ringwatch_pcie_bytes" B, ["node", "gpu", "direction"],
        "Bytes over PCIe since this agent started.";
    PCIE_LANES = Gauge "ringwatch_pcie_lanes" None, ["node", "gpu", "state"],
        "PCIe lanes: current and limit.";
    PCIE_GENERATION = Gauge "ringwatch_pcie_generation" None, ["node", "gpu", "state"],
        "PCIe generation: current and limit.";
    PCIE_REPLAYS = Counter "ringwatch_pcie_replays" None, ["node", "gpu"],
        "PCIe packets sent again.";
    PORT_UP = Gauge "ringwatch_nic_port_up" None, ["node", "device", "port"],
        "1 while an RDMA port is active, else 0.", HW_NETWORK_UP;
    PORT_SPEED = Gauge "ringwatch_nic_port_speed_bytes_per_second" Some("bytes_per_second"),
        ["node", "device", "port"], "Speed of an RDMA port.", HW_NETWORK_SPEED;
    PORT_BYTES = Counter "ringwatch_nic_port_bytes" B, ["node", "device", "port", "direction"],
        "Bytes over an RDMA port.", HW_NETWORK_IO;
    PORT_ERRORS = Counter "ringwatch_nic_port_errors" None, ["node", "device", "port", "error_type"],
        "What went wrong on an RDMA port: retransmits, packets out of order, congestion marks, errors, link downs.", HW_ERRORS;
    INTERFACE_UP = Gauge "ringwatch_interface_up" None, ["node", "interface"],
        "1 while a network interface is up, else 0.", HW_NETWORK_UP;
    INTERFACE_SPEED = Gauge "ringwatch_interface_speed_bytes_per_second" Some("bytes_per_second"),
        ["node", "interface"], "Speed of a network interface.", HW_NETWORK_SPEED;
    INTERFACE_BYTES = Counter "ringwatch_interface_bytes" B, ["node", "interface", "direction"],
        "Bytes over a network interface.", HW_NETWORK_IO;
    INTERFACE_ERRORS = Counter "ringwatch_interface_errors" None, ["node", "interface", "error_type"],
        "What went wrong on a network interface: drops, errors, link downs.", HW_ERRORS;
    INTERFACE_DRIVER = Counter "ringwatch_interface_driver_events" None, ["node", "interface", "counter"],
        "What an interface's driver counts of drops, errors, pauses and congestion, by the driver's name for it.";
    NODE_CPUS = Gauge "ringwatch_node_cpus" None, ["node"],
        "CPUs of the node.";
    NODE_CPU = Gauge "ringwatch_node_cpu_utilization_ratio" R, ["node"],
        "Share of its CPU time in use.";
    NODE_PRESSURE = Gauge "ringwatch_node_pressure_ratio" R, ["node", "resource"],
        "Share of the last ten seconds in which some task wanted the resource and had to wait.";
    NODE_MEMORY = Gauge "ringwatch_node_memory_size_bytes" B, ["node"],
        "Memory it has.";
    NODE_MEMORY_AVAILABLE = Gauge "ringwatch_node_memory_available_bytes" B, ["node"],
        "Memory that can still be had.";
    NODE_TCP_RETRANSMITS = Counter "ringwatch_node_tcp_retransmits" None, ["node"],
        "TCP segments sent again since boot.";
    NODE_OOM = Counter "ringwatch_node_oom_kills" None, ["node"],
        "Processes killed for want of memory since boot.";
    SAMPLER_UP = Gauge "ringwatch_sampler_up" None, ["node", "sampler"],
        "1 while a sampler gives readings, else 0.";
    SAMPLER_READINGS = Counter "ringwatch_sampler_readings" None, ["node", "sampler"],
        "Readings a sampler gave.";
    SAMPLER_FAILURES = Counter "ringwatch_sampler_failures" None, ["node", "sampler"],
        "Questions of a sampler that failed.";
    SAMPLER_COST = Counter "ringwatch_sampler_cost_seconds" S, ["node", "sampler"],
        "CPU and waiting time a sampler took.";
    AGENT_CPU = Counter "ringwatch_agent_cpu_seconds" S, ["node"],
        "CPU time the agent used.";
    AGENT_MEMORY = Gauge "ringwatch_agent_resident_memory_bytes" B, ["node"],
        "Memory the agent holds.";
    AGENT_FDS = Gauge "ringwatch_agent_open_fds" None, ["node"],
        "Files the agent has open.";
    AGENT_SEGMENTS = Gauge "ringwatch_agent_segments" None, ["node"],
        "Segments the agent follows.";
    AGENT_UNREAD = Gauge "ringwatch_agent_unread_segments" None, ["node", "reason"],
        "Segments, and directories of segments, that the agent does not read now, by reason.";
    AGENT_START = Gauge "ringwatch_agent_start_time_seconds" S, ["node"],
        "When the agent started, seconds since the epoch.";
    AGENT_POLLS = Counter "ringwatch_agent_polls" None, ["node"],
        "Looks the agent took at its sources.";
    AGENT_POLL_SECONDS = Counter "ringwatch_agent_poll_seconds" S, ["node"],
        "Time the agent spent taking in what was new and judging it.";
    AGENT_CONNECTIONS_CLOSED = Counter "ringwatch_agent_connections_closed" None, ["node", "server", "reason"],
        "Connections to the agent that were closed or refused before they were served; server is http or socket.";
    AGENT_LISTEN_FAILURES = Counter "ringwatch_agent_listen_failures" None, ["node"],
        "Attempts of the agent to listen on http.listen that failed, since the address was taken; none where systemd holds the port.";
    LOST_EXPORTS = Counter "ringwatch_lost_exports" None, ["node", "signal", "reason"],
        "What was not exported, by reason: operations that were not taken in time, spans, log records, and notices about findings.";
    SENT = Counter "ringwatch_exported" None, ["node", "signal"],
        "Spans, log records, metric points and notices about findings that a receiver took.";
    QUEUED = Gauge "ringwatch_export_queue" None, ["node", "signal"],
        "Spans and log records that wait to be sent.";
    SERIES = Gauge "ringwatch_agent_series" None, ["node"],
        "Series held under the budget.";
    FOLDED = Counter "ringwatch_agent_folded_observations" None, ["node"],
        "Observations that went into a series with overflow=\"true\" because the budget was spent.";
    BUS_CONNECTED = Gauge "ringwatch_bus_connected" None, ["node"],
        "1 while the agent reaches a server of the cluster's bus, else 0; absent without a bus.";
    BUS_PUBLISHED_BYTES = Counter "ringwatch_bus_published_bytes" B, ["node"],
        "Bytes the agent published.";
    BUS_OPERATIONS = Counter "ringwatch_bus_published_operations" None, ["node"],
        "Ranks' parts of operations the agent published.";
    BUS_LEFT_OUT = Counter "ringwatch_bus_left_out_operations" None, ["node", "reason"],
        "Ranks' parts of operations the agent did not publish, by reason.";
    BUS_LEVEL = Gauge "ringwatch_bus_sampling_level" None, ["node"],
        "Of a communicator one in 2^level operations is published, or 4096 / 2^level a second where that is more.";
    BUS_WAITING = Gauge "ringwatch_bus_waiting_bytes" B, ["node"],
        "Bytes that wait to be sent.";
    CLUSTER_FINDINGS = Gauge "ringwatch_cluster_findings" None, ["node", "job_name", "uid", "kind", "severity"],
        "Findings that are open in the partitions the analyser on this node speaks for; agents tell theirs under another name.";
    CLUSTER_FINDING_RANKS = Gauge "ringwatch_cluster_finding_ranks" None, ["node", "job_name", "uid", "kind", "severity", "job_rank", "host"],
        "Open findings in the partitions the analyser on this node speaks for that name this rank of the job, or this host.";
    CLUSTER_OPERATIONS = Counter "ringwatch_cluster_operations" None, ["node", "job_name", "uid", "collective"],
        "Operations that are over, over all nodes and each counted once; every analyser counts all that agents tell of.";
    CLUSTER_BYTES = Counter "ringwatch_cluster_operation_bytes" B, ["node", "job_name", "uid", "collective"],
        "Their message sizes, as nccl-tests counts them.";
    ANALYSER_NODES = Gauge "ringwatch_analyser_nodes" None, ["node", "state"],
        "Nodes the analyser hears, those that are silent, and those whose agent has ended.";
    ANALYSER_MESSAGES = Counter "ringwatch_analyser_messages" None, ["node"],
        "Messages of agents the analyser heard.";
    ANALYSER_BYTES = Counter "ringwatch_analyser_received_bytes" B, ["node"],
        "Bytes of them.";
    ANALYSER_MISSED = Counter "ringwatch_analyser_missed_messages" None, ["node"],
        "Messages of agents that never came, by the gaps in their numbers.";
    ANALYSER_REFUSED = Counter "ringwatch_analyser_refused" None, ["node", "reason"],
        "Messages, or parts of them, the analyser refused, by reason.";
    ANALYSER_DROPPED = Counter "ringwatch_analyser_dropped_messages" None, ["node"],
        "Messages the analyser had no room for.";
    ANALYSER_SPEAKS = Gauge "ringwatch_analyser_speaks" None, ["node", "partition"],
        "1 while the analyser speaks for the partition, else 0; of all analysers one should.";
    ANALYSER_KEEPS = Gauge "ringwatch_analyser_keeps_verdicts" None, ["node"],
        "1 while JetStream keeps what the analyser tells, 0 where it does not answer, has no room or is not there.";
    ANALYSER_OBSERVED = Counter "ringwatch_analyser_observed_operations" None, ["node"],
        "Ranks' parts of operations that agents saw, as their books tell.";
    ANALYSER_PUBLISHED = Counter "ringwatch_analyser_published_operations" None, ["node"],
        "Those of them that agents published.";
    ANALYSER_LEFT_OUT = Counter "ringwatch_analyser_left_out_operations" None, ["node", "reason"],
        "Those that they did not, by reason.";
    ANALYSER_PROCESSES = Gauge "ringwatch_analyser_processes" None, ["node"],
        "Processes the analyser knows.";
    ANALYSER_COMMUNICATORS = Gauge "ringwatch_analyser_communicators" None, ["node"],
        "Communicators the analyser knows to be open.";
    ANALYSER_CLOCK = Gauge "ringwatch_analyser_clock_offset_seconds" S, ["node"],
        "What the wall clock that is most off differs by from the analyser's.";
    BUILD = Info "ringwatch_build" None, ["node", "version"],
        "Which build this is.";
}

/// The list for people, `dashboards/METRICS.md`.
pub fn markdown() -> String {
    let mut out = String::from(
        "# Metrics\n\n\
         What `/metrics` and OTLP give, from `src/export/catalogue.rs`; a test keeps this list in step with it. \
         Every series has `cluster` where the configuration names one. Series with a `gpu` or a `rank` have `pod`, \
         `namespace` and `container` as dcgm-exporter has them, where the kubelet or the process's environment names \
         them; where a GPU is shared by several containers they have none. `job_name` is the training job; Prometheus \
         keeps `job` for itself. `uid` is the user id of the job's processes: any user may name a job and a communicator \
         like another one's, and a query that adds up series groups by `uid` as well. `size_class` is `2^n` for messages of 2^n up to 2^(n+1)-1 bytes. Where more series \
         would be needed than the budget allows, one with `overflow=\"true\"` in place of the other labels takes the \
         rest. What is not known has no series; only a count of nothing is zero.\n\n\
         OTLP writes the names with dots, and gives what OpenTelemetry's conventions for hardware know under their names \
         as well (last column), with `hw.id`, `hw.type`, and `hw.name`, `hw.parent`, `hw.model` and `hw.vendor` where they \
         are known: so tools that know `hw.*` and boards that know ours both find it. Interfaces that are made of \
         software are no hardware.\n\n\
         | name | kind | unit | labels | meaning | in OTLP also |\n|---|---|---|---|---|---|\n",
    );
    for m in ALL {
        let name = match m.kind {
            Kind::Histogram => m.name.to_owned(),
            _ => m.exposed().concat(),
        };
        let labels = m.labels.iter().map(|l| format!("`{l}`")).collect::<Vec<_>>().join(", ");
        let (kind, unit) = (m.kind.as_str(), m.unit.unwrap_or(""));
        let also = m
            .convention
            .map_or_else(String::new, |c| format!("`{}` ({}, {})", c.name, c.instrument.as_str(), c.unit));
        out.push_str(&format!("| `{name}` | {kind} | {unit} | {labels} | {} | {also} |\n", m.help));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn names_are_as_prometheus_wants_them() {
        let mut names = BTreeSet::new();
        for m in ALL {
            assert!(names.insert(m.name), "{} twice", m.name);
            let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
            assert!(m.name.starts_with("ringwatch_") && m.name.chars().all(plain), "{}", m.name);
            for suffix in ["_total", "_info", "_bucket", "_count", "_sum"] {
                assert!(!m.name.ends_with(suffix), "{} ends with a suffix that its kind adds", m.name);
            }
            if let Some(unit) = m.unit {
                assert!(m.name.ends_with(&format!("_{unit}")), "{} does not end with {unit}", m.name);
            }
            for unit in ["seconds", "bytes", "ratio", "watts", "celsius", "hertz"] {
                assert!(
                    !m.name.ends_with(unit) || m.unit.is_some(),
                    "{} names a unit it does not have",
                    m.name
                );
            }
            assert!(m.help.ends_with('.'), "{}", m.name);
            let reserved = ["job", "instance", "le", "quantile", "cluster", OVERFLOW];
            assert!(m.labels.iter().all(|l| !reserved.contains(l) && l.chars().all(plain)), "{}", m.name);
        }
    }
}
