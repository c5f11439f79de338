//! How metrics are kept and given out.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How metrics are kept and given out.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    /// Series that each group of metrics about jobs may have; what needs more shares one with `overflow="true"`.
    pub series_budget: usize,
    /// Series that nothing was counted in for so many seconds go.
    pub idle_seconds: u64,
    /// Gives native histograms to those who ask for Prometheus' protobuf.
    pub native_histograms: bool,
    /// Also gives the names of NVIDIA's NCCL Inspector, so that its dashboard works.
    pub inspector_names: bool,
    /// A name for the cluster, as a label of every series.
    pub cluster: Option<String>,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            series_budget: 2000,
            idle_seconds: 3600,
            native_histograms: true,
            inspector_names: false,
            cluster: None,
        }
    }
}
