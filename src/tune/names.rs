//! NCCL's names and the numbers behind them.

/// Collectives that NCCL asks a tuner about, by NCCL's number.
pub const COLLECTIVES: [&str; 5] = ["Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce"];
/// Algorithms, by NCCL's number.
pub const ALGORITHMS: [&str; 7] =
    ["TREE", "RING", "COLLNET_DIRECT", "COLLNET_CHAIN", "NVLS", "NVLS_TREE", "PAT"];
/// Protocols, by NCCL's number.
pub const PROTOCOLS: [&str; 3] = ["LL", "LL128", "SIMPLE"];

/// A name as it is compared: `AllReduce`, `all_reduce` and `all-reduce` are the same.
fn plain(name: &str) -> String {
    name.chars().filter(|c| !matches!(c, '_' | '-')).map(|c| c.to_ascii_lowercase()).collect()
}

/// The number of a name.
///
/// # Errors
/// All names that there are.
pub(super) fn number(names: &[&str], what: &str, name: &str) -> Result<usize, String> {
    let wanted = plain(name);
    let found = names.iter().position(|n| plain(n) == wanted);
    found.ok_or_else(|| format!("{name:?} is no {what}; there are {}", names.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringwatch_wire::codes::{ALGOS, FUNCS, PROTOS};
    use ringwatch_wire::tuning;

    #[test]
    fn names_and_numbers_are_nccls() {
        for (names, codes, count) in [
            (&COLLECTIVES[..], FUNCS, tuning::COLLECTIVES),
            (&ALGORITHMS, ALGOS, tuning::ALGORITHMS),
            (&PROTOCOLS, PROTOS, tuning::PROTOCOLS),
        ] {
            assert_eq!(names.len(), count);
            for (i, name) in names.iter().enumerate() {
                assert_eq!(codes[i], (i as u8 + 1, *name));
                for spelled in [name.to_string(), name.to_lowercase(), name.replace('_', "-")] {
                    assert_eq!(number(names, "name", &spelled), Ok(i));
                }
            }
        }
        assert_eq!(
            number(&PROTOCOLS, "protocol", "LL64"),
            Err("\"LL64\" is no protocol; there are LL, LL128, SIMPLE".to_owned())
        );
    }
}
