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
/// Ranks in all groups of all dumps together.
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
    /// In the order in which they were recorded. A launch of several collectives is one entry.
    pub(super) entries: Vec<Entry>,
    /// The dump has every transfer that the process has called.
    pub(super) is_whole: bool,
    /// The dump has every call since this moment, Unix time in ns; 0: since the process began.
    pub(super) covered_from_ns: u64,
    /// Receives from any rank, which name no peer.
    pub(super) unpaired: usize,
}

/// A process group, as one rank describes it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Group {
    pub(super) name: String,
    pub(super) description: String,
    /// The job's ranks in it, in its own order; absent where the dump does not list them.
    pub(super) ranks: Option<Arc<[u32]>>,
    /// The number of groups of this name that the process had before: a job may end its groups and make them again.
    pub(super) generation: usize,
}

/// A call.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Entry {
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
    /// PyTorch's name of the call.
    pub(super) name: u32,
    /// When a thread of PyTorch noticed that its kernel had started, Unix time in ns.
    pub(super) started_seen_ns: Option<u64>,
    pub(super) is_finished: bool,
    /// A call over Gloo that PyTorch waits for no more: it has ended or failed.
    pub(super) is_retired: bool,
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
    /// A receive from any rank.
    Unpaired,
    /// The launch of the transfers before it, or of the collectives of this number.
    Launch(u64),
}

/// Texts and lists of ranks, each once for all dumps.
#[derive(Debug, Default)]
pub(super) struct Sites {
    lines: Vec<String>,
    known: HashMap<String, u32>,
    lists: HashMap<String, Arc<[u32]>>,
    /// Groups by name, generation and list, and their ranks together.
    groups: HashSet<(String, usize, String)>,
    ranks: usize,
}

impl Sites {
    pub(super) fn keep(&mut self, line: String) -> u32 {
        let next = u32::try_from(self.lines.len()).unwrap_or(u32::MAX);
        *self.known.entry(line).or_insert_with_key(|line| {
            self.lines.push(line.clone());
            next
        })
    }

    /// The ranks in a text such as `[0, 1]`; absent where it is no list.
    fn ranks(&mut self, text: &str) -> Option<Arc<[u32]>> {
        if let Some(known) = self.lists.get(text) {
            return Some(Arc::clone(known));
        }
        let inner = text.trim().strip_prefix('[')?.strip_suffix(']')?;
        let numbers = inner.split(',').map(str::trim).filter(|t| !t.is_empty());
        let ranks: Arc<[u32]> = numbers.map(|t| t.parse().ok()).collect::<Option<Vec<u32>>>()?.into();
        self.lists.insert(text.to_owned(), Arc::clone(&ranks));
        Some(ranks)
    }

    /// Takes a group. An error where all groups together have too many ranks.
    fn take_group(&mut self, group: &Group) -> Result<(), Fault> {
        let ranks = group.ranks.as_ref();
        let list = ranks.map_or_else(String::new, |r| format!("{:p} {}", r.as_ptr(), r.len()));
        if self.groups.insert((group.name.clone(), group.generation, list)) {
            self.ranks += ranks.map_or(1, |r| r.len());
        }
        if self.ranks > RANKS_MAX {
            return Err(Fault::of_file(format!("all groups together have more than {RANKS_MAX} ranks")));
        }
        Ok(())
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
        let mut dump = Dump { is_newer: version(root)? > VERSION, ..Dump::default() };
        // Of a rank that has called nothing, JSON has no entries.
        let entries = root.get("entries");
        if entries.is_none() && root.get("pg_config").is_none() {
            return Err(Fault::of_file(
                "it has neither entries nor pg_config: it is no Flight Recorder dump",
            ));
        }
        let library = root.get("comm_lib_version").or_else(|| root.get("nccl_version"));
        dump.library = library.and_then(Value::text).filter(|t| !t.is_empty()).map(shown);
        let mut records = Vec::new();
        let listed = listed_groups(root, sites)?;
        let mut known: HashMap<(u64, String), usize> = HashMap::new();
        let mut generations: HashMap<String, usize> = HashMap::new();
        for (at, value) in entries.into_iter().flat_map(Value::items).enumerate() {
            if at >= ENTRIES_MAX {
                return Err(Fault::of_file(format!("it has more than {ENTRIES_MAX} entries")));
            }
            let entry = Reader { value, at };
            let (number, name, description) = entry.group()?;
            let key = (number, name);
            let group = match known.get(&key) {
                Some(group) => *group,
                None => {
                    let name = key.1.clone();
                    let before = generations.entry(name.clone()).or_default();
                    let generation = std::mem::replace(before, *before + 1);
                    let ranks = listed.get(&name).cloned();
                    dump.groups.push(Group { name, description, ranks, generation });
                    known.insert(key, dump.groups.len() - 1);
                    dump.groups.len() - 1
                }
            };
            let size = dump.groups[group].ranks.as_ref().map(|r| r.len());
            records.push(entry.number("record_id")?);
            dump.entries.push(entry.read(group, size, sites)?);
        }
        // A rank may be in groups in which it has called nothing yet.
        for (name, ranks) in listed.into_iter().filter(|(name, _)| !generations.contains_key(name)) {
            dump.groups.push(Group { name, description: String::new(), ranks: Some(ranks), generation: 0 });
        }
        dump.groups.iter().try_for_each(|group| sites.take_group(group))?;
        dump.note_coverage(&records)?;
        dump.join_launches();
        Ok(dump)
    }

    /// Finds out since when the dump has every call.
    fn note_coverage(&mut self, records: &[u64]) -> Result<(), Fault> {
        let is_contiguous =
            records.iter().zip(records.iter().skip(1)).all(|(a, b)| a.checked_add(1) == Some(*b));
        let is_ended = |e: &Entry| e.is_finished || e.is_retired;
        if !is_contiguous && !self.entries.iter().any(is_ended) {
            return Err(Fault::of_file(
                "it has only the calls that were active (TORCH_INCLUDE_ONLY_ACTIVE); the finished ones are needed",
            ));
        }
        let is_from_start = is_contiguous && records.first().is_none_or(|first| *first == 0);
        let first_ns = self.entries.first().map_or(0, |e| e.created_ns);
        self.covered_from_ns = if is_from_start { 0 } else { first_ns };
        // After a reset records are numbered anew, and transfers are not.
        let mut firsts: HashMap<usize, u64> = HashMap::new();
        for e in self.entries.iter().filter(|e| !matches!(e.call, Call::Collective(_))) {
            firsts.entry(e.group).or_insert(e.sequence);
        }
        self.is_whole = is_from_start && firsts.values().all(|first| *first <= 1);
        Ok(())
    }

    /// Makes one entry of the calls of each launch. PyTorch records the calls first, with the state that they had then, and the launch
    /// behind them with the same number: its state is that of all of them. Transfers stay entries of their own.
    fn join_launches(&mut self) {
        let mut out: Vec<Entry> = Vec::with_capacity(self.entries.len());
        let mut collectives: HashMap<(usize, u64), usize> = HashMap::new();
        let mut transfers: HashMap<(usize, u64), Vec<usize>> = HashMap::new();
        // Whether the last call of each group was a transfer.
        let mut is_transfer: HashMap<usize, bool> = HashMap::new();
        for entry in std::mem::take(&mut self.entries) {
            let key = (entry.group, entry.sequence);
            if !matches!(entry.call, Call::Launch(_)) {
                is_transfer.insert(entry.group, !matches!(entry.call, Call::Collective(_)));
            }
            match entry.call {
                Call::Collective(_) => match collectives.get(&key) {
                    Some(first) => out[*first].merge(&entry),
                    None => {
                        collectives.insert(key, out.len());
                        out.push(entry);
                    }
                },
                Call::Send(_) | Call::Recv(_) => {
                    transfers.entry(key).or_default().push(out.len());
                    out.push(entry);
                }
                // A launch of transfers has the number of the collective before it, and one of collectives that of the transfers.
                Call::Launch(number) => match is_transfer.remove(&entry.group) {
                    Some(true) => {
                        let parts = transfers.remove(&key).into_iter().flatten();
                        parts.for_each(|part| out[part].end_with(&entry));
                    }
                    Some(false) => {
                        if let Some(first) = collectives.get(&(entry.group, number)) {
                            out[*first].merge(&entry);
                        }
                    }
                    // The calls of the launch are not in the dump. Without transfers in the group it is one of collectives.
                    None if entry.sequence == 0 && number > 0 => {
                        collectives.insert((entry.group, number), out.len());
                        out.push(Entry { call: Call::Collective(Func::Unknown), sequence: number, ..entry });
                    }
                    None => {}
                },
                Call::Unpaired => self.unpaired += 1,
            }
        }
        self.entries = out;
    }
}

impl Entry {
    /// Takes the state of the launch that it is part of.
    fn end_with(&mut self, launch: &Entry) {
        self.is_finished |= launch.is_finished;
        self.is_retired |= launch.is_retired;
        self.started_seen_ns = self.started_seen_ns.or(launch.started_seen_ns);
        self.ended_seen_ns = self.ended_seen_ns.or(launch.ended_seen_ns);
    }

    /// Takes another collective of the same launch, or the launch itself, which comes last.
    fn merge(&mut self, other: &Entry) {
        let is_launch = matches!(other.call, Call::Launch(_) | Call::Collective(Func::Unknown));
        if self.call != other.call && !is_launch {
            self.call = Call::Collective(Func::Unknown);
        }
        // Ranks may cut the data of a launch differently.
        (self.dtype, self.count, self.duration_ns) = (None, None, None);
        self.end_with(other);
        self.is_finished = other.is_finished;
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
fn listed_groups(root: Value<'_>, sites: &mut Sites) -> Result<BTreeMap<String, Arc<[u32]>>, Fault> {
    let mut listed = BTreeMap::new();
    for (name, group) in root.get("pg_config").into_iter().flat_map(Value::pairs) {
        let Some(name) = name.text().filter(|n| !n.is_empty()).map(shown) else { continue };
        let Some(text) = group.get("ranks").and_then(Value::text) else { continue };
        let ranks = sites.ranks(text);
        let ranks =
            ranks.ok_or_else(|| Fault::of_file(format!("pg_config: the ranks of {name:?} are no list")))?;
        if !ranks.is_empty() {
            listed.insert(name, ranks);
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

    /// Number, name and description of the group.
    fn group(&self) -> Result<(u64, String, String), Fault> {
        let number = self.value.get("pg_id").and_then(Value::unsigned).unwrap_or(0);
        let group = self.value.get("process_group");
        let mut texts = group.into_iter().flat_map(Value::items).map(Value::text);
        match (texts.next().flatten(), texts.next().flatten()) {
            (Some(name), Some(description)) => Ok((number, shown(name), shown(description))),
            _ => Err(self.wrong("process_group is no pair of name and description")),
        }
    }

    /// `size`: the number of ranks of its group, where it is known.
    fn read(&self, group: usize, size: Option<usize>, sites: &mut Sites) -> Result<Entry, Fault> {
        let title = self.text("profiling_name")?;
        let (backend, name) = title.split_once(':').unwrap_or(("", title));
        let call = self.call(name, size)?;
        let is_transfer = !matches!(call, Call::Collective(_));
        let sequence = self.number(if is_transfer { "p2p_seq_id" } else { "collective_seq_id" })?;
        let state = self.text("state")?;
        // Calls retire when they have ended, failed or timed out. Gloo's have no other state.
        let is_retired =
            self.value.get("retired").and_then(Value::boolean).unwrap_or(false) && backend == "gloo";
        let ms = self.value.get("duration_ms").and_then(Value::number);
        let (dtype, count) = self.amount(call, name);
        Ok(Entry {
            group,
            call,
            sequence,
            dtype,
            count,
            created_ns: self.number("time_created_ns")?,
            started_seen_ns: self.time("time_discovered_started_ns"),
            name: sites.keep(shown(name)),
            is_finished: state == "completed",
            is_retired,
            ended_seen_ns: self.time("time_discovered_completed_ns"),
            duration_ns: ms.filter(|ms| (0.0..1e12).contains(ms)).map(|ms| (ms * 1e6) as u64),
            site: self.site().map(|line| sites.keep(line)),
        })
    }

    fn call(&self, name: &str, size: Option<usize>) -> Result<Call, Fault> {
        let (name, peers) = name.split_once(' ').unwrap_or((name, ""));
        let peer = |text: Option<&str>| {
            let rank = text.and_then(|t| t.trim().parse::<u32>().ok());
            let rank = rank.filter(|r| size.is_none_or(|n| (*r as usize) < n));
            rank.map(Rank).ok_or_else(|| self.wrong(format!("{:?} names no rank of its group", shown(peers))))
        };
        Ok(match name {
            "send" => Call::Send(peer(peers.split_once("->").map(|(_, to)| to))?),
            "recv" if peers.ends_with("<-?") => Call::Unpaired,
            "recv" => Call::Recv(peer(peers.split_once("<-").map(|(_, from)| from))?),
            "coalesced" => Call::Launch(self.number("collective_seq_id")?),
            _ => Call::Collective(function(name)),
        })
    }

    /// Data type and NCCL's count of a call, as far as all ranks have to agree on them.
    fn amount(&self, call: Call, name: &str) -> (Option<DataType>, Option<u64>) {
        let is_uneven = name.contains("_v") || matches!(call, Call::Collective(Func::AlltoAll));
        let side = match call {
            Call::Launch(_) | Call::Unpaired => return (None, None),
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
            let each: Option<Vec<u64>> = tensors.map(elements).collect();
            // Lists of different sizes are cut by rank.
            let each = each.filter(|all| all.iter().all(|n| Some(n) == all.first()))?;
            each.into_iter().try_fold(0_u64, u64::checked_add)
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
        "all_reduce" | "allreduce" | "all_reduce_barrier" | "allreduce_coalesced" => Func::AllReduce,
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
