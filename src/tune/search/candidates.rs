//! The candidates of a size: the entries that NCCL offers there, with numbers of channels.

use super::super::Selection;
use super::TunerChoice;
use ringwatch_wire::cost_log::CostRecord;
use ringwatch_wire::tuning::PROTOCOLS;

/// An entry that NCCL predicts to take longer than its best one by this factor is left out.
const SLOW_FACTOR: f32 = 4.0;

/// The candidates for one call that NCCL described, the most promising first. The first is a tuner that decides nothing.
pub fn candidates(record: &CostRecord, channels: &[u8]) -> Vec<TunerChoice> {
    let mut offered: Vec<(usize, f32)> =
        record.costs_us.iter().copied().enumerate().filter(|(_, cost)| *cost >= 0.0).collect();
    offered.sort_by(|a, b| a.1.total_cmp(&b.1));
    let best = offered.first().map_or(0.0, |(_, cost)| *cost);
    offered.retain(|(_, cost)| *cost <= best * SLOW_FACTOR);
    let of_entry = |(entry, _): (usize, f32)| {
        let entry = Selection { algorithm: Some(entry / PROTOCOLS), protocol: Some(entry % PROTOCOLS) };
        let own = std::iter::once(None).chain(channels.iter().copied().map(Some));
        own.map(move |channels| TunerChoice { entry, channels })
    };
    std::iter::once(TunerChoice::NONE).chain(offered.into_iter().flat_map(of_entry)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_entries_that_nccl_offers_are_candidates() {
        let mut costs_us = [-1.0; 21];
        (costs_us[0], costs_us[3], costs_us[5]) = (20.0, 10.0, 100.0);
        let record = CostRecord { collective: 4, bytes: 1024, ranks: 2, nodes: 1, costs_us };
        let all: Vec<String> = candidates(&record, &[4]).iter().map(TunerChoice::to_string).collect();
        assert_eq!(all, ["no rule", "RING/LL", "RING/LL, 4 channels", "TREE/LL", "TREE/LL, 4 channels"]);
        let nothing = CostRecord { costs_us: [-1.0; 21], ..record };
        assert_eq!(candidates(&nothing, &[4]), [TunerChoice::NONE]);
    }
}
