//! How much is kept of one node: its devices, its readings and the texts in them.

use crate::cluster::texts::clipped;
use crate::model::{Fact, Reading, SegmentRecord};
use serde_json::Value;
use std::collections::HashSet;

/// The longest reading, in bytes: a GPU with 18 links, eight peers and a hundred processes takes 16 KiB.
const READING: usize = 64 << 10;
/// The longest list in a reading.
const LIST: usize = 256;
/// Devices of each kind that are followed of a node. Their history is what takes memory.
const GPUS: usize = 64;
const PORTS: usize = 128;
const INTERFACES: usize = 256;
const SAMPLERS: usize = 64;

/// The devices of a node's readings.
#[derive(Debug, Clone, Default)]
pub(super) struct Devices {
    gpus: HashSet<String>,
    ports: HashSet<(String, u32)>,
    interfaces: HashSet<String>,
    samplers: HashSet<String>,
}

impl Devices {
    /// True where there is room for what a reading is of.
    pub(super) fn admits(&mut self, fact: &Fact) -> bool {
        fn put<T: std::hash::Hash + Eq>(all: &mut HashSet<T>, one: T, most: usize) -> bool {
            all.contains(&one) || all.len() < most && all.insert(one)
        }
        match fact {
            Fact::Gpu(g) => put(&mut self.gpus, g.gpu.clone(), GPUS),
            Fact::Traffic(t) => put(&mut self.gpus, t.gpu.clone(), GPUS),
            Fact::Port(p) => put(&mut self.ports, (p.device.clone(), p.port), PORTS),
            Fact::Interface(i) => put(&mut self.interfaces, i.interface.clone(), INTERFACES),
            Fact::Sampler(s) => put(&mut self.samplers, s.sampler.clone(), SAMPLERS),
            Fact::Xid(_) | Fact::Alarm(_) | Fact::Node(_) | Fact::Pods(_) => true,
        }
    }
}

/// A reading whose texts can be shown: nothing in them steers a terminal, and none is endless.
pub(super) fn reading(bytes: &[u8]) -> serde_json::Result<Reading> {
    fn cut(v: &mut Value) {
        match v {
            Value::String(s) => *s = clipped(std::mem::take(s)),
            Value::Array(all) => {
                all.truncate(LIST);
                all.iter_mut().for_each(cut);
            }
            Value::Object(all) => {
                let first = std::mem::take(all).into_iter().take(LIST);
                all.extend(first.map(|(k, v)| (clipped(k), v)));
                all.values_mut().for_each(cut);
            }
            _ => {}
        }
    }
    if bytes.len() > READING {
        return Err(serde::de::Error::custom("longer than any reading"));
    }
    let mut value = serde_json::from_slice(bytes)?;
    cut(&mut value);
    serde_json::from_value(value)
}

/// Memory that a process takes, in bytes, as an estimate.
pub(super) fn process_bytes(p: &SegmentRecord) -> usize {
    const PROCESS: usize = 1024;
    let labels: usize = p.job.labels.iter().map(|(k, v)| k.len() + v.len() + 64).sum();
    let job = p.job.name.as_ref().map_or(0, String::len);
    PROCESS + p.host.len() + p.program.len() + job + labels
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::InterfaceFact;

    #[test]
    fn texts_and_lists_of_a_reading_are_cut() {
        let name = "a\u{1b}[2J\u{202e}".repeat(200);
        let fact = Fact::Interface(InterfaceFact { interface: name, ..InterfaceFact::default() });
        let sent = Reading { host: "a".to_owned(), at_ns: 1, fact };
        let read = reading(&serde_json::to_vec(&sent).expect("JSON")).expect("a reading");
        let Fact::Interface(kept) = read.fact else { panic!("{read:?}") };
        assert_eq!(kept.interface, "a[2J".repeat(64));
        let mut value: Value = serde_json::from_str("{\"a\":[]}").expect("JSON");
        value["a"] = vec![1; 100_000].into();
        assert!(reading(value.to_string().as_bytes()).is_err());
    }

    #[test]
    fn a_node_has_room_for_so_many_devices_of_each_kind() {
        let mut devices = Devices::default();
        let of = |n: usize| {
            Fact::Interface(InterfaceFact { interface: format!("eth{n}"), ..InterfaceFact::default() })
        };
        for _ in 0..2 {
            assert_eq!((0..INTERFACES + 7).filter(|n| devices.admits(&of(*n))).count(), INTERFACES);
        }
    }
}
