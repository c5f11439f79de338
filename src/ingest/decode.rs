//! Wire records into the model. Total: whatever the bytes say, something honest comes out.

use crate::model::{
    Algo, ChannelStamp, CommId, CommRecord, DataType, Flags, Func, Job, Lane, Making, NetPhase, NetProgress,
    OpRecord, Proto, Rank, RedOp, Returned, RulesState, SegmentId, Timing, TunerRules, Untimed, steers,
};
use ringwatch_wire::codes::{self, flag, kind, made, phase, timed, tuned};
use ringwatch_wire::layout::head;
use ringwatch_wire::reader::{ChannelSlot, CommSlot, OpSlot, ProxySlot, Reader, Text};
use std::sync::LazyLock;

/// Text of the job's own making: control characters and broken UTF-8 go, they could steer a terminal.
pub(super) fn clean(bytes: impl Iterator<Item = u8>) -> String {
    let bytes: Vec<u8> = bytes.collect();
    String::from_utf8_lossy(&bytes).chars().filter(|c| !steers(*c)).collect::<String>().trim().to_owned()
}

pub(super) fn text<const N: usize>(t: &Text<N>) -> Option<String> {
    Some(clean(t.bytes())).filter(|s| !s.is_empty())
}

fn by_name<T: Copy>(
    all: &[T],
    name: impl Fn(T) -> &'static str,
    table: &[(u8, &str)],
    code: u8,
) -> Option<T> {
    let text = table.iter().find(|(c, _)| *c == code)?.1;
    all.iter().copied().find(|t| name(*t) == text)
}

/// The model's values by the wire's codes, matched once by their names.
macro_rules! by_code {
    ($name:ident, $all:ident, $table:expr) => {
        fn $name(code: u8) -> Option<$all> {
            static VALUES: LazyLock<[Option<$all>; 256]> = LazyLock::new(|| {
                std::array::from_fn(|code| by_name($all::ALL, $all::as_str, $table, u8::try_from(code).ok()?))
            });
            VALUES[usize::from(code)]
        }
    };
}

by_code!(known_func, Func, codes::FUNCS);
by_code!(dtype, DataType, codes::TYPES);
by_code!(plain_algo, Algo, codes::ALGOS);
by_code!(proto, Proto, codes::PROTOS);
by_code!(redop, RedOp, codes::REDOPS);

pub(super) fn func(code: u8) -> Func {
    known_func(code).unwrap_or(Func::Unknown)
}

fn algo(code: u8, flags: u8) -> Option<Algo> {
    if flags & flag::COPY_ENGINE != 0 {
        return Some(Algo::CopyEngine);
    }
    if flags & flag::SYMMETRIC != 0 {
        return Some(Algo::Symmetric);
    }
    plain_algo(code)
}

pub(super) fn timing(code: u8) -> Timing {
    match code {
        timed::KERNEL => Timing::Kernel,
        timed::EVENTS => Timing::Events,
        timed::LAUNCH => Timing::Launch,
        timed::NOT_BUDGET => Timing::Not(Untimed::Budget),
        timed::NOT_CAPTURED => Timing::Not(Untimed::Captured),
        timed::NOT_OFFERED => Timing::Not(Untimed::Offered),
        timed::NOT_ASKED => Timing::Not(Untimed::Asked),
        timed::NOT_FREE => Timing::Not(Untimed::Free),
        timed::NOT_ALONE => Timing::Not(Untimed::Alone),
        _ => Timing::Unknown,
    }
}

fn rank(n: i32) -> Option<Rank> {
    u32::try_from(n).ok().map(Rank)
}

/// `22809` as `2.28.9`.
pub(super) fn nccl_version(code: u32) -> String {
    format!("{}.{}.{}", code / 10_000, code / 100 % 100, code % 100)
}

/// The lines of its environment that a process wrote down.
pub(super) fn environment(reader: &Reader<'_>) -> Vec<String> {
    clean_lines(reader.text::<{ head::ENV_WORDS }>(head::ENV).bytes())
}

/// The job, from these lines.
pub(super) fn job(env: &[String]) -> Job {
    let get = |key: &str| {
        env.iter().find_map(|line| line.strip_prefix(key)?.strip_prefix('=')).filter(|v| !v.is_empty())
    };
    let number = |keys: &[&str]| keys.iter().find_map(|k| get(k)?.parse().ok());
    // torchrun's run id is "none" unless the user names one.
    let name = get("RINGWATCH_JOB")
        .map(str::to_owned)
        .or_else(|| get("SLURM_JOB_ID").map(|id| format!("slurm-{id}")))
        .or_else(|| get("TORCHELASTIC_RUN_ID").filter(|id| *id != "none").map(str::to_owned))
        .or_else(|| get("PBS_JOBID").or_else(|| get("LSB_JOBID")).map(str::to_owned));
    Job {
        name,
        rank: number(&["RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"]),
        size: number(&["WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"]),
        local: number(&["LOCAL_WORLD_SIZE"]),
        labels: std::collections::BTreeMap::new(),
    }
}

fn clean_lines(bytes: impl Iterator<Item = u8>) -> Vec<String> {
    let bytes: Vec<u8> = bytes.collect();
    bytes.split(|b| *b == b'\n').map(|line| clean(line.iter().copied())).collect()
}

fn making(slot: &CommSlot) -> Option<Making> {
    match slot.made? {
        made::INITIALISING => Some(Making::Begun),
        made::READY => Some(Making::Ready(slot.ready_ns)),
        made::FAILED => Some(Making::Failed(slot.failed.unwrap_or(0))),
        made::ABORTED => Some(Making::Aborted),
        _ => None,
    }
}

/// A communicator's rules for NCCL's tuner. `hash` is that of the process's rules.
fn rules(slot: &CommSlot, hash: Option<u64>) -> Option<TunerRules> {
    let state = match slot.tuned {
        tuned::UNKNOWN => return None,
        tuned::AGREED => RulesState::Applied,
        tuned::DIFFERENT => RulesState::Different,
        tuned::ABSENT_RANK => RulesState::AbsentRank,
        _ => RulesState::Off,
    };
    Some(TunerRules { state, hash })
}

/// A communicator; `None` until its id is known. `rules_hash` is that of the process's rules for NCCL's tuner.
pub(super) fn comm(
    segment: SegmentId,
    owner: Option<u32>,
    host_clock: u64,
    rules_hash: Option<u64>,
    slot: &CommSlot,
) -> Option<CommRecord> {
    let (id, rank) = slot.id?;
    Some(CommRecord {
        segment,
        comm: CommId::new(id, owner),
        rank: Rank(rank),
        ranks: slot.ranks,
        nodes: slot.nodes,
        name: text(&slot.name),
        gpu: text(&slot.gpu).map(Into::into),
        host_clock,
        issued: slot.issued,
        replayed: slot.replayed,
        init_ns: slot.init_ns,
        making: making(slot),
        rules: rules(slot, rules_hash),
        finalized_ns: slot.finalized_ns,
    })
}

/// An operation of a communicator.
pub(super) fn op(comm: &CommRecord, slot: &OpSlot) -> OpRecord {
    let peer = rank(slot.root).unwrap_or(Rank(u32::MAX));
    let lane = match slot.kind {
        kind::REPLAY => Lane::Replay,
        kind::SEND => Lane::Send(peer),
        kind::RECV => Lane::Recv(peer),
        kind::CALL => Lane::Call,
        _ => Lane::Collective,
    };
    let some = |n: u8| if n == 0 { None } else { Some(n) };
    OpRecord {
        segment: comm.segment,
        ticket: slot.ticket,
        comm: comm.comm,
        rank: comm.rank,
        lane,
        order: slot.order,
        func: func(slot.func),
        dtype: dtype(slot.dtype),
        count: slot.count,
        root: if lane.is_collective() || lane == Lane::Call { rank(slot.root) } else { None },
        algo: algo(slot.algo, slot.flags),
        proto: proto(slot.proto),
        channels: some(slot.channels),
        warps: some(slot.warps),
        seq: slot.seq,
        plan: slot.plan.checked_sub(1),
        flags: Flags {
            captured: slot.flags & flag::CAPTURED != 0,
            in_place: slot.flags & flag::IN_PLACE != 0,
            copy_engine: slot.flags & flag::COPY_ENGINE != 0,
            symmetric: slot.flags & flag::SYMMETRIC != 0,
            preloaded: slot.preloaded,
            grouped: slot.grouped,
        },
        called_ns: slot.called_ns,
        returned: slot.returned.map(|(result, at_ns)| Returned { at_ns, result }),
        redop: slot.redop.and_then(redop),
        issued_ns: slot.issued_ns,
        timing: timing(slot.timed),
        event_ns: slot.event_ns,
        event_seen_ns: slot.event_seen_ns,
        started: slot.started,
        stopped: slot.stopped,
        stamps: Vec::new(),
        net: Vec::new(),
    }
}

/// A channel's stamps.
pub(super) fn stamp(slot: &ChannelSlot) -> ChannelStamp {
    ChannelStamp {
        channel: slot.channel,
        start_gpu_ns: slot.start_gpu_ns,
        stop_gpu_ns: match (slot.start_gpu_ns, slot.duration_ns) {
            (Some(start), Some(d)) => start.checked_add_signed(d),
            _ => None,
        },
        start_seen_ns: slot.start_seen_ns,
        stop_seen_ns: slot.stop_seen_ns,
    }
}

/// A network transfer.
pub(super) fn transfer(slot: &ProxySlot) -> NetProgress {
    let waiting = slot.live.iter().flatten().min_by_key(|(_, since)| *since).map(|(p, since)| {
        let phase = match *p {
            phase::GPU => NetPhase::Gpu,
            phase::PEER => NetPhase::Peer,
            phase::WIRE => NetPhase::Wire,
            phase::FLUSH => NetPhase::Flush,
            _ => NetPhase::Posted,
        };
        (phase, *since)
    });
    let count = |n: u64| u32::try_from(n).unwrap_or(u32::MAX);
    NetProgress {
        channel: slot.channel,
        peer: rank(slot.peer).unwrap_or(Rank(u32::MAX)),
        is_send: slot.is_send,
        steps: slot.steps,
        started: count(slot.started),
        done: count(slot.done),
        bytes: slot.bytes,
        start_ns: slot.start_ns,
        stop_ns: slot.stop_ns,
        waited_ns: slot.waited_ns,
        waiting,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_of_the_wire_has_a_name_in_the_model() {
        for (code, name) in codes::FUNCS {
            assert_eq!(func(*code).as_str(), *name);
        }
        for (code, name) in codes::TYPES {
            assert_eq!(dtype(*code).map(DataType::as_str), Some(*name));
        }
        for (code, name) in codes::ALGOS {
            assert_eq!(algo(*code, 0).map(Algo::as_str), Some(*name));
        }
        for (code, name) in codes::PROTOS {
            assert_eq!(proto(*code).map(Proto::as_str), Some(*name));
        }
        for (code, name) in codes::REDOPS {
            assert_eq!(redop(*code).map(RedOp::as_str), Some(*name));
        }
        assert_eq!(func(0), Func::Unknown);
        assert_eq!(func(250), Func::Unknown);
        assert_eq!(dtype(0), None);
    }

    #[test]
    fn versions_read_as_nccl_writes_them() {
        assert_eq!(nccl_version(22809), "2.28.9");
        assert_eq!(nccl_version(23203), "2.32.3");
    }

    #[test]
    fn texts_of_the_job_cannot_steer_a_terminal() {
        assert_eq!(clean(b"a\x1b[31mb\x07\xff c\n".iter().copied()), "a[31mb\u{fffd} c");
    }
}
