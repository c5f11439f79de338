//! The errors that network drivers count. Every driver has names of its own, hundreds of them; those that say
//! something about a network are on a list here, and no others are kept.

/// The meaning of a growing counter of a network driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum NicTrouble {
    /// Packets came and the host had no buffer for them.
    NoBuffer,
    /// Packets were discarded in the device or the driver.
    Discarded,
    /// Packets came or went with errors of the wire.
    Errors,
    /// Packets were held back or dropped because the instance used up what it may send.
    Allowance,
    /// One end of the link told the other one to wait.
    Paused,
    /// A switch on the way marked packets because its queue was long.
    Congested,
}

impl NicTrouble {
    /// True where packets did not arrive, or were late for a reason that the owner of the host can see to.
    pub const fn is_loss(self) -> bool {
        !matches!(self, NicTrouble::Paused | NicTrouble::Congested)
    }

    /// Why, in words that follow the counter's name.
    pub const fn words(self) -> &'static str {
        match self {
            NicTrouble::NoBuffer => "packets came that the host had no buffer for",
            NicTrouble::Discarded => "packets were discarded in the device or its driver",
            NicTrouble::Errors => "packets came or went with errors",
            NicTrouble::Allowance => {
                "the instance used up what it may send, and packets were held back or dropped"
            }
            NicTrouble::Paused => "one end of the link told the other one to wait",
            NicTrouble::Congested => "a switch on the way marked packets because its queue was long",
        }
    }
}

use NicTrouble::{Allowance, Congested, Discarded, Errors, NoBuffer, Paused};

/// Counters by name; `*` stands for the number of a queue, a priority or a lane, over which they are summed up.
const KNOWN: &[(&str, NicTrouble)] = &[
    // What several drivers call so: ena, i40e, ice, ixgbe, igb, gve, mana, virtio_net.
    ("rx_dropped", Discarded),
    ("tx_dropped", Discarded),
    ("rx_drops", Discarded),
    ("tx_drops", Discarded),
    ("rx_errors", Errors),
    ("tx_errors", Errors),
    ("rx_crc_errors", Errors),
    ("rx_missed_errors", NoBuffer),
    ("rx_fifo_errors", NoBuffer),
    ("rx_over_errors", NoBuffer),
    ("rx_no_buffer_count", NoBuffer),
    ("rx_no_dma_resources", NoBuffer),
    ("alloc_rx_page_failed", NoBuffer),
    ("alloc_rx_buff_failed", NoBuffer),
    ("rx_flow_control_xoff", Paused),
    ("tx_flow_control_xoff", Paused),
    // mlx5.
    ("rx_out_of_buffer", NoBuffer),
    ("rx_if_down_packets", Discarded),
    ("rx_buff_alloc_err", NoBuffer),
    ("rx_wqe_err", NoBuffer),
    ("dev_internal_queue_oob", NoBuffer),
    ("dev_out_of_buffer", NoBuffer),
    ("outbound_pci_buffer_overflow", Discarded),
    ("rx_discards_phy", Discarded),
    ("tx_discards_phy", Discarded),
    ("rx_prio*_discards", Discarded),
    ("rx_prio*_cong_discard", Discarded),
    ("rx_prio*_buf_discard", NoBuffer),
    ("rx_steer_missed_packets", Discarded),
    ("tx_queue_dropped", Discarded),
    ("rx_symbol_err_phy", Errors),
    ("rx_crc_errors_phy", Errors),
    ("rx_in_range_len_errors_phy", Errors),
    ("rx_pcs_symbol_err_phy", Errors),
    ("rx_icrc_encapsulated", Errors),
    ("tx_errors_phy", Errors),
    ("rx_pause_ctrl_phy", Paused),
    ("tx_pause_ctrl_phy", Paused),
    ("rx_global_pause", Paused),
    ("tx_global_pause", Paused),
    ("rx_prio*_pause", Paused),
    ("tx_prio*_pause", Paused),
    ("tx_pause_storm_warning_events", Paused),
    ("tx_pause_storm_error_events", Discarded),
    ("rx_ecn_mark", Congested),
    // ena.
    ("bw_in_allowance_exceeded", Allowance),
    ("bw_out_allowance_exceeded", Allowance),
    ("pps_allowance_exceeded", Allowance),
    ("conntrack_allowance_exceeded", Allowance),
    ("linklocal_allowance_exceeded", Allowance),
    ("rx_overruns", NoBuffer),
    ("queue_*_rx_page_alloc_fail", NoBuffer),
    ("queue_*_rx_skb_alloc_fail", NoBuffer),
    ("queue_*_rx_refil_partial", NoBuffer),
    ("queue_*_rx_bad_desc_num", Errors),
    // virtio_net, which sums up over queues itself since it names them rx0, and veth.
    ("rx_xdp_drops", Discarded),
    ("tx_xdp_tx_drops", Discarded),
    ("rx_hw_drops", Discarded),
    ("tx_hw_drops", Discarded),
    ("tx_tx_timeouts", Discarded),
    ("rx_queue_*_drops", Discarded),
    ("rx_queue_*_xdp_drops", Discarded),
    ("tx_queue_*_tx_timeouts", Discarded),
    ("tx_queue_*_xdp_xmit_errors", Errors),
    // bnxt.
    ("[*]: rx_discards", Discarded),
    ("[*]: rx_errors", Errors),
    ("[*]: tx_discards", Discarded),
    ("[*]: tx_errors", Errors),
    ("[*]: rx_buf_errors", NoBuffer),
    ("rx_total_discard_pkts", Discarded),
    ("tx_total_discard_pkts", Discarded),
    ("rx_total_ring_discards", Discarded),
    ("tx_total_ring_discards", Discarded),
    ("rx_total_oom_discards", NoBuffer),
    ("rx_total_buf_errors", NoBuffer),
    ("rx_stat_discard", Discarded),
    ("tx_stat_discard", Discarded),
    ("rx_stat_err", Errors),
    ("tx_stat_error", Errors),
    ("rx_fcs_err_frames", Errors),
    ("rx_discard_packets_cos*", Discarded),
    ("rx_pause_frames", Paused),
    ("tx_pause_frames", Paused),
    ("rx_pfc_ena_frames_pri*", Paused),
    ("tx_pfc_ena_frames_pri*", Paused),
    // i40e and ice.
    ("port.rx_dropped", Discarded),
    ("port.tx_dropped_link_down", Discarded),
    ("port.rx_crc_errors", Errors),
    ("port.illegal_bytes", Errors),
    ("port.tx_errors", Errors),
    ("port.link_xoff_rx", Paused),
    ("port.link_xoff_tx", Paused),
    ("port.rx_priority_*_xoff", Paused),
    ("port.tx_priority_*_xoff", Paused),
    ("rx_dropped.nic", Discarded),
    ("tx_dropped_link_down.nic", Discarded),
    ("rx_crc_errors.nic", Errors),
    ("illegal_bytes.nic", Errors),
    ("tx_errors.nic", Errors),
    ("link_xoff_rx.nic", Paused),
    ("link_xoff_tx.nic", Paused),
    ("rx_priority_*_xoff.nic", Paused),
    ("tx_priority_*_xoff.nic", Paused),
    // gve.
    ("rx_queue_drop_cnt[*]", Discarded),
    ("rx_no_buffers_posted[*]", NoBuffer),
    ("rx_skb_alloc_fail[*]", NoBuffer),
    ("rx_buf_alloc_fail[*]", NoBuffer),
    // mana and hv_netvsc.
    ("hc_rx_discards_no_wqe", NoBuffer),
    ("hc_rx_err_vport_disabled", Discarded),
    ("rx_no_memory", NoBuffer),
    ("tx_no_memory", Discarded),
    ("tx_no_space", Discarded),
    ("vf_tx_dropped", Discarded),
];

/// The meaning of a driver's counter, under the name that stands for it on all queues. Absent for all that says
/// nothing of a network's trouble.
pub fn nic_counter(name: &str) -> Option<(&'static str, NicTrouble)> {
    let folded = folded(name);
    KNOWN.iter().find(|(known, _)| *known == folded).copied()
}

/// The name with `*` for each number in it.
fn folded(name: &str) -> String {
    let mut out = String::with_capacity(name.len());
    for c in name.chars() {
        match c {
            '0'..='9' if out.ends_with('*') => {}
            '0'..='9' => out.push('*'),
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn queues_and_priorities_are_one_counter() {
        for (name, known) in [
            ("rx_out_of_buffer", "rx_out_of_buffer"),
            ("rx_prio3_discards", "rx_prio*_discards"),
            ("rx_queue_17_drops", "rx_queue_*_drops"),
            ("[12]: rx_discards", "[*]: rx_discards"),
            ("rx_priority_0_xoff.nic", "rx_priority_*_xoff.nic"),
        ] {
            assert_eq!(nic_counter(name).map(|(n, _)| n), Some(known), "{name}");
        }
        assert_eq!(nic_counter("bw_in_allowance_exceeded").map(|(_, t)| t), Some(NicTrouble::Allowance));
        for name in ["", "peer_ifindex", "rx_packets", "tx_queue_0_packets", "rx_out_of_buffer2", "*"] {
            assert_eq!(nic_counter(name), None, "{name}");
        }
    }

    #[test]
    fn every_known_name_is_found_by_itself_and_stands_there_once() {
        let mut seen = BTreeSet::new();
        for (name, trouble) in KNOWN {
            assert!(seen.insert(name), "{name} twice");
            assert_eq!(nic_counter(&name.replace('*', "7")), Some((*name, *trouble)));
            // The kernel's names have room for 32 bytes.
            assert!(name.len() < 32 && name.is_ascii(), "{name}");
        }
    }
}
