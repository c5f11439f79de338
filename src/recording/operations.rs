//! Operations of messages as a table, and back.
//!
//! Columns that people ask for are plain; all else that a record has is in `rest`, a message of the bus, so that nothing is lost.

use crate::cluster::Moment;
use crate::cluster::message::Record;
use crate::columns::{Cell, Head, Rows, Table, Type};
use crate::model::{Algo, DataType, Func, Proto};
use prost::Message as _;

pub(super) const NAME: &str = "operations";

pub(super) const HEADS: &[Head] = &[
    ("message", Type::Number),
    ("host", Type::Text),
    ("process", Type::Text),
    ("communicator", Type::Text),
    ("rank", Type::Word),
    ("lane", Type::Text),
    ("peer", Type::Word),
    ("issue_order", Type::Number),
    ("operation", Type::Text),
    ("data_type", Type::Text),
    ("count", Type::Word),
    ("algorithm", Type::Text),
    ("protocol", Type::Text),
    ("channels", Type::Word),
    ("issued", Type::Time),
    ("started", Type::Time),
    ("ended", Type::Time),
    ("duration_ns", Type::Number),
    ("called_before_ns", Type::Number),
    ("end_seen_after_ns", Type::Number),
    ("is_finished", Type::Word),
    ("is_latest", Type::Word),
    ("root", Type::Word),
    ("warps", Type::Word),
    ("launch", Type::Number),
    ("ticket", Type::Number),
    ("sequence", Type::Number),
    ("timing", Type::Word),
    ("flags", Type::Word),
    ("channels_started", Type::Word),
    ("channels_stopped", Type::Word),
    ("is_event", Type::Word),
    ("rest", Type::Bytes),
];

/// The lanes by their numbers in a message.
const LANES: [&str; 6] = ["", "collective", "replay", "send", "receive", "call"];

/// Names of one word list, which a message numbers from 1.
struct Words<T: 'static>(&'static [T], fn(&T) -> &'static str);

const FUNCTIONS: Words<Func> = Words(Func::ALL, |w| w.as_str());
const TYPES: Words<DataType> = Words(DataType::ALL, |w| w.as_str());
const ALGORITHMS: Words<Algo> = Words(Algo::ALL, |w| w.as_str());
const PROTOCOLS: Words<Proto> = Words(Proto::ALL, |w| w.as_str());

impl<T> Words<T> {
    /// Takes a number out of a record, where it has a name.
    fn take(&self, number: &mut u32) -> Option<&'static str> {
        let word = self.0.get((*number as usize).checked_sub(1)?)?;
        *number = 0;
        Some((self.1)(word))
    }

    fn number(&self, name: Option<&str>) -> Option<u32> {
        let at = self.0.iter().position(|w| Some((self.1)(w)) == name)?;
        u32::try_from(at + 1).ok()
    }
}

/// Takes an optional number out of a record, where a column can hold it.
fn take(number: &mut Option<u64>) -> Option<i64> {
    let taken = i64::try_from((*number)?).ok()?;
    *number = None;
    Some(taken)
}

/// Takes a word out of a record; 0 is absent.
fn word(number: &mut u32) -> Cell<'static> {
    Cell::Number(match std::mem::take(number) {
        0 => None,
        n => Some(i64::from(n)),
    })
}

/// Adds an operation of a message with this number, sent at this moment; and whether the row is the last one about the operation.
pub(super) fn push(
    table: &mut Table,
    (message, is_latest): (usize, bool),
    host: &str,
    at: Moment,
    record: Record,
) {
    let mut r = record;
    let process = format!("{:016x}", std::mem::take(&mut r.segment));
    let communicator = format!("{:016x}", std::mem::take(&mut r.comm));
    let lane = LANES.get(r.lane as usize).copied().filter(|l| !l.is_empty());
    if lane.is_some() {
        r.lane = 0;
    }
    let (is_transfer, peer) = (matches!(lane, Some("send" | "receive")), std::mem::take(&mut r.peer));
    let wall = |ns: u64| i64::try_from(ns.checked_add(at.unix_ns)?.checked_sub(at.mono_ns)?).ok();
    let take_wall = |ns: &mut Option<u64>| {
        let at = wall((*ns)?)?;
        *ns = None;
        Some(at)
    };
    let is_event = r.event_ns.is_some() && r.event_ns == r.duration_ns && r.event_seen_ns == r.ended_seen_ns;
    if is_event {
        (r.event_ns, r.event_seen_ns) = (None, None);
    }
    let rank = std::mem::take(&mut r.rank);
    // Rows of one operation are neighbors, and its ranks end together: times are small steps from row to row.
    let end_ns = r.started_ns.zip(r.duration_ns).and_then(|(start, lasted)| start.checked_add(lasted));
    let ended = end_ns.and_then(wall).filter(|_| r.started_ns.is_some_and(|t| wall(t).is_some()));
    let duration = if ended.is_some() { r.duration_ns.take().and(None) } else { take(&mut r.duration_ns) };
    let called = r.called_ns.zip(r.issued_ns).and_then(|(called, issued)| issued.checked_signed_diff(called));
    if called.is_some() {
        r.called_ns = None;
    }
    let from = if ended.is_some() { end_ns } else { r.issued_ns };
    let seen = r.ended_seen_ns.zip(from).and_then(|(seen, from)| seen.checked_signed_diff(from));
    if seen.is_some() {
        r.ended_seen_ns = None;
    }
    let cells = [
        Cell::Number(i64::try_from(message).ok()),
        Cell::Text(Some(host)),
        Cell::Text(Some(&process)),
        Cell::Text(Some(&communicator)),
        Cell::Number(Some(i64::from(rank))),
        Cell::Text(lane),
        Cell::Number((is_transfer || peer > 0).then_some(i64::from(peer))),
        Cell::Number(take(&mut r.order)),
        Cell::Text(FUNCTIONS.take(&mut r.func)),
        Cell::Text(TYPES.take(&mut r.dtype)),
        Cell::Number(i64::try_from(r.count).ok().inspect(|_| r.count = 0)),
        Cell::Text(ALGORITHMS.take(&mut r.algo)),
        Cell::Text(PROTOCOLS.take(&mut r.proto)),
        Cell::Number(r.channels.take().map(i64::from)),
        Cell::Number(take_wall(&mut r.issued_ns)),
        Cell::Number(take_wall(&mut r.started_ns)),
        Cell::Number(ended),
        Cell::Number(duration),
        Cell::Number(called),
        Cell::Number(seen),
        Cell::Number(Some(i64::from(std::mem::take(&mut r.finished)))),
        Cell::Number(Some(i64::from(is_latest))),
        Cell::Number(r.root.take().map(i64::from)),
        Cell::Number(r.warps.take().map(i64::from)),
        Cell::Number(take(&mut r.plan)),
        Cell::Number(i64::try_from(r.ticket).ok().inspect(|_| r.ticket = 0)),
        Cell::Number(take(&mut r.seq)),
        word(&mut r.timing),
        word(&mut r.flags),
        word(&mut r.started),
        word(&mut r.stopped),
        Cell::Number(is_event.then_some(1)),
        Cell::Bytes((r != Record::default()).then(|| r.encode_to_vec())),
    ];
    table.push(cells);
}

/// The operation in a row, and the number of its message. Absent where the row cannot be one.
pub(super) fn read(rows: &Rows, row: usize, at: impl Fn(usize) -> Option<Moment>) -> Option<(usize, Record)> {
    let number = |column: &str| rows.number(column, row);
    let unsigned = |column: &str| number(column).and_then(|n| u64::try_from(n).ok());
    let word = |column: &str| number(column).and_then(|n| u32::try_from(n).ok());
    let hex = |column: &str| u64::from_str_radix(rows.text(column, row)?, 16).ok();
    let message = usize::try_from(number("message")?).ok()?;
    let at = at(message)?;
    let mut r = match rows.bytes("rest", row) {
        Some(rest) => Record::decode(rest).ok()?,
        None => Record::default(),
    };
    (r.segment, r.comm) = (hex("process")?, hex("communicator")?);
    r.rank = word("rank")?;
    let lane = rows.text("lane", row).and_then(|l| LANES.iter().position(|known| *known == l));
    r.lane = lane.and_then(|l| u32::try_from(l).ok()).unwrap_or(r.lane);
    r.peer = word("peer").unwrap_or(0);
    r.order = unsigned("issue_order").or(r.order);
    r.func = FUNCTIONS.number(rows.text("operation", row)).unwrap_or(r.func);
    r.dtype = TYPES.number(rows.text("data_type", row)).unwrap_or(r.dtype);
    r.count = unsigned("count").unwrap_or(r.count);
    r.algo = ALGORITHMS.number(rows.text("algorithm", row)).unwrap_or(r.algo);
    r.proto = PROTOCOLS.number(rows.text("protocol", row)).unwrap_or(r.proto);
    r.channels = word("channels").or(r.channels);
    let mono = |unix: u64| unix.checked_add(at.mono_ns)?.checked_sub(at.unix_ns);
    r.issued_ns = unsigned("issued").and_then(mono).or(r.issued_ns);
    r.started_ns = unsigned("started").and_then(mono).or(r.started_ns);
    let end_ns = unsigned("ended").and_then(mono);
    let lasted = end_ns.zip(r.started_ns).and_then(|(end, start)| end.checked_sub(start));
    r.duration_ns = lasted.or_else(|| unsigned("duration_ns")).or(r.duration_ns);
    let called = r.issued_ns.zip(number("called_before_ns"));
    let called = called.and_then(|(issued, before)| issued.checked_add_signed(before.checked_neg()?));
    r.called_ns = called.or(r.called_ns);
    let seen = end_ns.or(r.issued_ns).zip(number("end_seen_after_ns"));
    r.ended_seen_ns = seen.and_then(|(from, after)| from.checked_add_signed(after)).or(r.ended_seen_ns);
    r.finished = number("is_finished") == Some(1);
    r.root = word("root");
    r.warps = word("warps");
    r.plan = unsigned("launch").or(r.plan);
    r.ticket = unsigned("ticket").unwrap_or(r.ticket);
    r.seq = unsigned("sequence").or(r.seq);
    r.timing = word("timing").unwrap_or(0);
    r.flags = word("flags").unwrap_or(0);
    r.started = word("channels_started").unwrap_or(0);
    r.stopped = word("channels_stopped").unwrap_or(0);
    if number("is_event") == Some(1) {
        (r.event_ns, r.event_seen_ns) = (r.duration_ns, r.ended_seen_ns);
    }
    Some((message, r))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const AT: Moment = Moment { mono_ns: 5_000_000, unix_ns: 1_800_000_000_000_000_000 };

    fn optional() -> impl Strategy<Value = Option<u64>> {
        proptest::option::of(prop_oneof![0..1_000_000_u64, any::<u64>()])
    }

    prop_compose! {
        fn record()(
            ids in any::<(u64, u64, u64, u32)>(), words in prop::array::uniform12(0..40_u32),
            times in prop::array::uniform6(optional()), numbers in (optional(), optional(), optional(), any::<u64>()),
            finished in any::<bool>(), root in proptest::option::of(any::<u32>()),
        ) -> Record {
            Record {
                segment: ids.0, ticket: ids.1, comm: ids.2, rank: ids.3, lane: words[0], peer: words[1],
                order: numbers.0, func: words[2], dtype: words[3], count: numbers.3, root, algo: words[4],
                proto: words[5], channels: root.map(|_| words[6]), warps: root, seq: numbers.1, plan: numbers.2,
                flags: words[7], called_ns: times[0], returned_ns: times[1], result: words[8], redop: words[9],
                issued_ns: times[2], timing: words[10], event_ns: times[5], event_seen_ns: times[4],
                started: words[11], stopped: words[11], started_ns: times[3], duration_ns: times[5],
                ended_seen_ns: times[4], finished, net: Vec::new(),
            }
        }
    }

    proptest! {
        #[test]
        fn an_operation_reads_as_it_was_written(all in prop::collection::vec(record(), 1..20)) {
            let dir = tempfile::tempdir().expect("a folder");
            let path = dir.path().join("operations.parquet");
            let mut table = Table::new(HEADS);
            for (n, r) in all.iter().enumerate() {
                push(&mut table, (n, true), "node", AT, r.clone());
            }
            table.write(NAME, &path).expect("room");
            let rows = Rows::read(&path).expect("a table");
            let read: Vec<Record> =
                (0..rows.rows).filter_map(|row| super::read(&rows, row, |_| Some(AT))).map(|(_, r)| r).collect();
            prop_assert_eq!(read, all);
        }
    }
}
