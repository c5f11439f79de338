//! RDMA ports, from /sys/class/infiniband.

use super::{Absent, Batch, Sampler};
use crate::ingest::files::{entries, number, sum, text};
use crate::model::{Fact, PortFact, pci_address};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Counters of data that a sender sent again, or noticed to be lost. Names differ by driver; what a device lacks is
/// not counted.
const RETRANSMITS: &[&str] = &[
    "packet_seq_err",
    "local_ack_timeout_err",
    "roce_adp_retrans",
    "roce_adp_retrans_to",
    "retrans_pkts",
    "to_retransmits",
    "rdma_read_retransmits",
    "retransmit_tx_packets",
];
/// Counters of data that came out of order.
const OUT_OF_ORDER: &[&str] = &["out_of_sequence", "oos_drop_count", "rx_out_of_sequence"];
/// Congestion: marks that came, notices that came, and notices that were sent.
const CONGESTION: &[&str] =
    &["np_ecn_marked_roce_packets", "rp_cnp_handled", "np_cnp_sent", "ecn_marked_pkts", "rx_cnp_pkts"];
/// Errors of the wire.
const ERRORS: &[&str] = &[
    "symbol_error",
    "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
    "port_rcv_errors",
    "port_rcv_remote_physical_errors",
];

/// The sampler.
#[derive(Debug)]
pub struct Rdma {
    root: PathBuf,
    period: Duration,
}

impl Rdma {
    /// Over this copy of /sys.
    pub fn new(sys: &Path, period: Duration) -> Self {
        Rdma { root: sys.join("class/infiniband"), period }
    }
}

/// `4: ACTIVE`.
fn active(state: &str) -> Option<bool> {
    let (number, _) = state.split_once(':')?;
    Some(number.trim().parse::<u8>().ok()? == 4)
}

/// `400 Gb/sec (4X NDR)`, in Mb/s.
fn speed(rate: &str) -> Option<u64> {
    let gigabits: f64 = rate.split_whitespace().next()?.parse().ok()?;
    (gigabits.is_finite() && gigabits > 0.0).then_some((gigabits * 1e3) as u64)
}

fn port(device: &str, dir: &Path, port: &str, at: &Path) -> Option<PortFact> {
    let counters = at.join("counters");
    let hardware = at.join("hw_counters");
    // Counted in words of four bytes.
    let bytes = |name: &str| number(&counters.join(name)).map(|words| words.saturating_mul(4));
    let address = std::fs::canonicalize(dir.join("device")).ok();
    Some(PortFact {
        device: device.to_owned(),
        port: port.parse().ok()?,
        address: address.and_then(|p| pci_address(&p.file_name()?.to_string_lossy())),
        up: text(&at.join("state")).and_then(|s| active(&s)),
        speed_mbit_per_s: text(&at.join("rate")).and_then(|r| speed(&r)),
        tx_bytes: bytes("port_xmit_data"),
        rx_bytes: bytes("port_rcv_data"),
        retransmits: sum(&hardware, RETRANSMITS),
        out_of_order: sum(&hardware, OUT_OF_ORDER),
        congestion: sum(&hardware, CONGESTION),
        errors: sum(&counters, ERRORS),
        downs: number(&counters.join("link_downed")),
    })
}

impl Sampler for Rdma {
    fn name(&self) -> &'static str {
        "rdma"
    }

    fn period(&self) -> Duration {
        self.period
    }

    fn sample(&mut self, now_ns: u64, batch: &mut Batch) -> Result<(), Absent> {
        let devices = entries(&self.root).unwrap_or_default();
        let mut ports = 0;
        for (device, dir) in &devices {
            for (name, at) in entries(&dir.join("ports")).unwrap_or_default() {
                match port(device, dir, &name, &at) {
                    Some(fact) => {
                        ports += 1;
                        batch.tell(now_ns, Fact::Port(fact));
                    }
                    None => batch.failed(),
                }
            }
        }
        if ports == 0 {
            return Err(Absent(format!("{} holds no RDMA port", self.root.display())));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_and_rates_are_read_as_they_are_written() {
        assert_eq!(active("4: ACTIVE"), Some(true));
        assert_eq!(active("1: DOWN"), Some(false));
        assert_eq!(active("up"), None);
        assert_eq!(speed("400 Gb/sec (4X NDR)"), Some(400_000));
        assert_eq!(speed("2.5 Gb/sec (1X SDR)"), Some(2_500));
        for odd in ["", "fast", "NaN Gb/sec", "-1 Gb/sec", "inf"] {
            assert_eq!(speed(odd), None, "{odd}");
        }
    }
}
