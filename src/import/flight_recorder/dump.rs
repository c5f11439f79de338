//! One rank's dump: its fields, read and checked.

use super::super::document::{Document, Value};
use super::super::fault::Fault;
use crate::model::{DataType, Func, Rank, steers};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

/// The newest version whose fields are known. Newer ones of the same major version have more fields.
const VERSION: (u64, u64) = (2, 10);
/// Entries of a dump that are read; PyTorch keeps 2,000 by default.
const ENTRIES_MAX: usize = 1 << 20;
/// Ranks in all groups of a dump together.
const RANKS_MAX: usize = 1 << 22;
/// Tensors of one operation that are added up.
const TENSORS_MAX: usize = 4096;
/// Frames of one call that are searched for the caller's own code.
const FRAMES_MAX: usize = 64;
/// Characters of a name that are kept.
const TEXT_MAX: usize = 200;

/// A rank's dump.
#[derive(Debug, Default)]
pub(super) struct Dump {
    pub(super) library: Option<String>,
    /// It is of a version with fields that are not known.
    pub(super) is_newer: bool,
    pub(super) groups: Vec<Group>,
    /// In the order in which they were recorded.
    pub(super) entries: Vec<Entry>,
    /// No call before the first entry or between entries is missing.
    pub(super) is_whole: bool,
}

/// A process group, as one rank describes it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Group {
    pub(super) name: String,
    pub(super) description: String,
    /// The job's ranks in it, in its own order; absent where the dump does not list them.
    pub(super) ranks: Option<Arc<[u32]>>,
}

/// A call.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Entry {
    /// Its number in the process, from 0.
    pub(super) record: u64,
    /// The number of its group in the dump.
    pub(super) group: usize,
    pub(super) call: Call,
    /// Of a collective its number in the group, from 1; of transfers the number of their launch.
    pub(super) sequence: u64,
    pub(super) dtype: Option<DataType>,
    /// NCCL's count; absent where ranks may have different ones, or none is given.
    pub(super) count: Option<u64>,
    /// Unix time in ns.
    pub(super) created_ns: u64,
    /// When a thread of PyTorch noticed that its kernel had started, Unix time in ns.
    pub(super) started_seen_ns: Option<u64>,
    pub(super) is_finished: bool,
    /// When a thread of PyTorch noticed the end, Unix time in ns.
    pub(super) ended_seen_ns: Option<u64>,
    pub(super) duration_ns: Option<u64>,
    /// The line of the caller's own code.
    pub(super) site: Option<u32>,
}

/// The operation of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Call {
    Collective(Func),
    Send(Rank),
    Recv(Rank),
    /// The launch of the transfers before it.
    Launch,
}

/// Lines of source code, each once for all dumps.
#[derive(Debug, Default)]
pub(super) struct Sites {
    lines: Vec<String>,
    known: HashMap<String, u32>,
}

impl Sites {
    fn keep(&mut self, line: String) -> u32 {
        let next = u32::try_from(self.lines.len()).unwrap_or(u32::MAX);
        *self.known.entry(line).or_insert_with_key(|line| {
            self.lines.push(line.clone());
            next
        })
    }

    pub(super) fn line(&self, site: u32) -> Option<&str> {
        self.lines.get(site as usize).map(String::as_str)
    }
}

/// Text of the file, safe to be shown.
fn shown(text: &str) -> String {
    text.chars().take(TEXT_MAX).map(|c| if steers(c) { '?' } else { c }).collect()
}

impl Dump {
    pub(super) fn read(document: &Document, sites: &mut Sites) -> Result<Self, Fault> {
        let root = document.root();
        let entries = root.get("entries").filter(|_| root.is_object());
        let entries =
            entries.ok_or_else(|| Fault::of_file("it has no entries: it is no Flight Recorder dump"))?;
        if entries.items().len() > ENTRIES_MAX {
            return Err(Fault::of_file(format!("it has more than {ENTRIES_MAX} entries")));
        }
        let mut dump = Dump { is_newer: version(root)? > VERSION, ..Dump::default() };
        let library = root.get("comm_lib_version").or_else(|| root.get("nccl_version"));
        dump.library = library.and_then(Value::text).filter(|t| !t.is_empty()).map(shown);
        let mut known: HashMap<(String, String), usize> = HashMap::new();
        let listed = listed_groups(root)?;
        for (at, value) in entries.items().enumerate() {
            let entry = Reader { value, at };
            let (name, description) = entry.group()?;
            let group = *known.entry((name, description)).or_insert_with_key(|(name, description)| {
                let ranks = listed.get(name).cloned();
                dump.groups.push(Group { name: name.clone(), description: description.clone(), ranks });
                dump.groups.len() - 1
            });
            let size = dump.groups[group].ranks.as_ref().map(|r| r.len());
            dump.entries.push(entry.read(group, size, sites)?);
        }
        // A rank may be in groups in which it has called nothing yet.
        let called: HashSet<&str> = known.keys().map(|(name, _)| name.as_str()).collect();
        for (name, ranks) in listed.into_iter().filter(|(name, _)| !called.contains(name.as_str())) {
            dump.groups.push(Group { name, description: String::new(), ranks: Some(ranks) });
        }
        dump.is_whole = dump.entries.iter().zip(0..).all(|(e, n)| e.record == n);
        dump.end_transfers();
        dump.entries.retain(|e| e.call != Call::Launch);
        Ok(dump)
    }

    /// Gives the sends and receives of a launch the state of the launch, which comes behind them and has the same number. Alone
    /// they stay as they were when they were called.
    fn end_transfers(&mut self) {
        let is_transfer = |e: &Entry| matches!(e.call, Call::Send(_) | Call::Recv(_));
        for at in 0..self.entries.len() {
            let launch = self.entries[at].clone();
            if launch.call != Call::Launch {
                continue;
            }
            let (before, _) = self.entries.split_at_mut(at);
            let parts = before
                .iter_mut()
                .rev()
                .take_while(|e| e.group != launch.group || is_transfer(e) && e.sequence == launch.sequence);
            for part in parts.filter(|e| e.group == launch.group) {
                part.is_finished |= launch.is_finished;
                part.started_seen_ns = part.started_seen_ns.or(launch.started_seen_ns);
                part.ended_seen_ns = part.ended_seen_ns.or(launch.ended_seen_ns);
            }
        }
    }
}

/// The version of the format, `2.10`.
fn version(root: Value<'_>) -> Result<(u64, u64), Fault> {
    let text = root.get("version").and_then(Value::text);
    let text = text.ok_or_else(|| Fault::of_file("it has no version: it is no Flight Recorder dump"))?;
    let parts = text.split_once('.').and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
    match parts {
        Some(version @ (2, _)) => Ok(version),
        _ => Err(Fault::of_file(format!(
            "its version is {:?}, and 2.0 to {}.{} can be read; use a newer ringwatch",
            shown(text),
            VERSION.0,
            VERSION.1
        ))),
    }
}

/// The ranks of each group that the dump lists, by name. Gloo lists none by their names.
fn listed_groups(root: Value<'_>) -> Result<BTreeMap<String, Arc<[u32]>>, Fault> {
    let mut room = RANKS_MAX;
    let mut listed = BTreeMap::new();
    for (name, group) in root.get("pg_config").into_iter().flat_map(Value::pairs) {
        let Some(name) = name.text().filter(|n| !n.is_empty()) else { continue };
        let wrong = || Fault::of_file(format!("pg_config: the ranks of {:?} are no list", shown(name)));
        let Some(text) = group.get("ranks").and_then(Value::text) else { continue };
        let inner = text.trim().strip_prefix('[').and_then(|t| t.strip_suffix(']')).ok_or_else(wrong)?;
        let mut ranks = Vec::new();
        for rank in inner.split(',').map(str::trim).filter(|t| !t.is_empty()) {
            ranks.push(rank.parse().map_err(|_| wrong())?);
            room = room
                .checked_sub(1)
                .ok_or_else(|| Fault::of_file(format!("its groups have more than {RANKS_MAX} ranks")))?;
        }
        if !ranks.is_empty() {
            listed.insert(shown(name), ranks.into());
        }
    }
    Ok(listed)
}

/// Reads one entry.
struct Reader<'a> {
    value: Value<'a>,
    at: usize,
}

impl<'a> Reader<'a> {
    fn wrong(&self, why: impl Into<String>) -> Fault {
        Fault::at_entry(self.at, why)
    }

    fn number(&self, key: &str) -> Result<u64, Fault> {
        let number = self.value.get(key).and_then(Value::unsigned);
        number.ok_or_else(|| self.wrong(format!("{key} is no number from 0")))
    }

    fn text(&self, key: &str) -> Result<&'a str, Fault> {
        self.value.get(key).and_then(Value::text).ok_or_else(|| self.wrong(format!("{key} is no text")))
    }

    /// A time in Unix ns. JSON has 0 where there is none.
    fn time(&self, key: &str) -> Option<u64> {
        self.value.get(key).and_then(Value::unsigned).filter(|t| *t > 0)
    }

    /// Name and description of the group.
    fn group(&self) -> Result<(String, String), Fault> {
        let group = self.value.get("process_group");
        let mut texts = group.into_iter().flat_map(Value::items).map(Value::text);
        match (texts.next().flatten(), texts.next().flatten()) {
            (Some(name), Some(description)) => Ok((shown(name), shown(description))),
            _ => Err(self.wrong("process_group is no pair of name and description")),
        }
    }

    /// `size`: the number of ranks of its group, where it is known.
    fn read(&self, group: usize, size: Option<usize>, sites: &mut Sites) -> Result<Entry, Fault> {
        let name = self.text("profiling_name")?;
        let (backend, name) = name.split_once(':').unwrap_or(("", name));
        let is_transfer = self.value.get("is_p2p").and_then(Value::boolean).unwrap_or(false);
        let call = self.call(name, is_transfer, size)?;
        let is_transfer = !matches!(call, Call::Collective(_));
        let sequence = self.number(if is_transfer { "p2p_seq_id" } else { "collective_seq_id" })?;
        let state = self.text("state")?;
        let is_retired = self.value.get("retired").and_then(Value::boolean).unwrap_or(false);
        // NCCL's calls also retire when they time out. Gloo's end in no other way, and have no other state.
        let is_finished = state == "completed" || is_retired && backend == "gloo";
        let ms = self.value.get("duration_ms").and_then(Value::number);
        let (dtype, count) = self.amount(call, name);
        Ok(Entry {
            record: self.number("record_id")?,
            group,
            call,
            sequence,
            dtype,
            count,
            created_ns: self.number("time_created_ns")?,
            started_seen_ns: self.time("time_discovered_started_ns"),
            is_finished,
            ended_seen_ns: self.time("time_discovered_completed_ns"),
            duration_ns: ms.filter(|ms| (0.0..1e12).contains(ms)).map(|ms| (ms * 1e6) as u64),
            site: self.site().map(|line| sites.keep(line)),
        })
    }

    fn call(&self, name: &str, is_transfer: bool, size: Option<usize>) -> Result<Call, Fault> {
        let (name, peers) = name.split_once(' ').unwrap_or((name, ""));
        let peer = |text: Option<&str>| {
            let rank = text.and_then(|t| t.trim().parse::<u32>().ok());
            let rank = rank.filter(|r| size.is_none_or(|n| (*r as usize) < n));
            rank.map(Rank).ok_or_else(|| self.wrong(format!("{:?} names no rank of its group", shown(peers))))
        };
        Ok(match name {
            "send" => Call::Send(peer(peers.split_once("->").map(|(_, to)| to))?),
            "recv" => Call::Recv(peer(peers.split_once("<-").map(|(_, from)| from))?),
            "coalesced" if is_transfer => Call::Launch,
            _ => Call::Collective(function(name)),
        })
    }

    /// Data type and NCCL's count of a call, as far as all ranks have to agree on them.
    fn amount(&self, call: Call, name: &str) -> (Option<DataType>, Option<u64>) {
        let is_uneven = name.contains("_v") || matches!(call, Call::Collective(Func::AlltoAll));
        let side = match call {
            Call::Launch => return (None, None),
            Call::Collective(_) if is_uneven => return (None, None),
            // Each rank's share, and NCCL counts what goes to one rank.
            Call::Collective(Func::ReduceScatter | Func::Scatter) | Call::Recv(_) => "output",
            _ => "input",
        };
        let mut types = self.value.get(&format!("{side}_dtypes")).into_iter().flat_map(Value::items);
        let first = types.next().and_then(Value::text);
        let is_one_type = types.take(TENSORS_MAX).all(|t| t.text() == first);
        let sizes = self.value.get(&format!("{side}_sizes"));
        let elements = sizes.and_then(|sizes| {
            let tensors = sizes.items();
            if tensors.len() == 0 || tensors.len() > TENSORS_MAX {
                return None;
            }
            tensors.map(elements).try_fold(0_u64, |sum, n| sum.checked_add(n?))
        });
        (first.filter(|_| is_one_type).and_then(data_type), elements)
    }

    /// The innermost frame that is not PyTorch's own.
    fn site(&self) -> Option<String> {
        let frames = self.value.get("frames")?;
        let own = |frame: &Value<'_>| {
            let file = frame.get("filename").and_then(Value::text);
            file.is_some_and(|f| !f.contains("/torch/"))
        };
        let frame = frames.items().take(FRAMES_MAX).find(own)?;
        let file = shown(frame.get("filename")?.text()?);
        let function = shown(frame.get("name").and_then(Value::text).unwrap_or("?"));
        Some(match frame.get("line").and_then(Value::unsigned) {
            Some(line) => format!("{function} ({file}:{line})"),
            None => format!("{function} ({file})"),
        })
    }
}

/// Elements of one tensor.
fn elements(sizes: Value<'_>) -> Option<u64> {
    let dimensions = sizes.items();
    if dimensions.len() > FRAMES_MAX {
        return None;
    }
    dimensions.map(Value::unsigned).try_fold(1_u64, |product, n| product.checked_mul(n?))
}

/// NCCL's operation for PyTorch's name of it.
fn function(name: &str) -> Func {
    match name.trim_start_matches('_').to_ascii_lowercase().as_str() {
        "all_reduce" | "allreduce" | "all_reduce_barrier" | "allreduce_coalesced" | "barrier" => {
            Func::AllReduce
        }
        "broadcast" | "broadcast_oop" => Func::Broadcast,
        "reduce" | "reduce_oop" => Func::Reduce,
        "gather" => Func::Gather,
        "scatter" => Func::Scatter,
        name if name.starts_with("all_gather") || name.starts_with("allgather") => Func::AllGather,
        name if name.starts_with("reduce_scatter") => Func::ReduceScatter,
        name if name.starts_with("all_to_all") || name.starts_with("alltoall") => Func::AlltoAll,
        _ => Func::Unknown,
    }
}

/// The data type that PyTorch hands to NCCL.
fn data_type(name: &str) -> Option<DataType> {
    Some(match name {
        "Float" => DataType::Float32,
        "Half" => DataType::Float16,
        "BFloat16" => DataType::Bfloat16,
        "Double" => DataType::Float64,
        "Long" => DataType::Int64,
        "Int" => DataType::Int32,
        "Char" => DataType::Int8,
        "Byte" | "Bool" => DataType::Uint8,
        "Float8_e4m3fn" => DataType::Float8e4m3,
        "Float8_e5m2" => DataType::Float8e5m2,
        _ => return None,
    })
}
