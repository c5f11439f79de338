//! Messages of agents on the bus: what an analyser reads, judges and tells.

use crate::outputs::Watch;
use prost::Message as _;
use ringwatch::cluster::message::{Envelope, VERSION};
use ringwatch::cluster::subject::{self, Topic};
use ringwatch::cluster::{Moment, Reader, Refusal};
use ringwatch::model::{Source, Update};
use std::time::Duration;

const S: u64 = 1_000_000_000;
const SILENT: Duration = Duration::from_secs(3);
/// Stands between two messages of one input.
const NEXT: &[u8] = b"\xffNEXT\xff";

/// The bus, heard.
#[derive(Debug)]
struct Bus {
    reader: Reader,
    waiting: Vec<(String, Vec<u8>)>,
    taken: Vec<Update>,
}

impl Source for Bus {
    fn poll(&mut self, now_ns: u64) -> Vec<Update> {
        let now = Moment { mono_ns: now_ns, unix_ns: now_ns + 1_795_000_000 * S };
        for (subject, bytes) in self.waiting.drain(..) {
            self.reader.read(&subject, &bytes, now, false, &mut self.taken);
        }
        self.reader.look(now_ns, &mut self.taken);
        std::mem::take(&mut self.taken)
    }

    fn describe(&self) -> String {
        "a bus".to_owned()
    }
}

pub(super) fn check(bytes: &[u8]) {
    let mut watch = Watch::new(Bus { reader: Reader::new(SILENT), waiting: Vec::new(), taken: Vec::new() });
    let mut now_ns = 100 * S;
    for (n, message) in pieces(bytes).into_iter().enumerate() {
        watch.source().waiting.extend(sent(message, n as u64 + 1));
        now_ns += S;
        watch.step(now_ns);
    }
    replayed_is_refused(watch.source(), bytes, now_ns);
    // What was said is judged, its nodes fall silent and are forgotten.
    for after_ns in [S, S, S, S, S, 60 * S] {
        now_ns += after_ns;
        watch.step(now_ns);
    }
    watch.write(bytes, now_ns);
    watch.step(now_ns + 7200 * S);
    assert!(watch.source().reader.nodes().is_empty(), "a silent node is forgotten");
}

fn pieces(bytes: &[u8]) -> Vec<&[u8]> {
    let mut all = Vec::new();
    let mut rest = bytes;
    while let Some(at) = rest.windows(NEXT.len()).position(|w| w == NEXT) {
        all.push(&rest[..at]);
        rest = &rest[at + NEXT.len()..];
    }
    all.push(rest);
    all.truncate(8);
    all
}

/// A message as its node may publish it, where it is one: of this version, on the node's own subjects, in turn.
fn sent(bytes: &[u8], sequence: u64) -> Vec<(String, Vec<u8>)> {
    let Ok(mut e) = Envelope::decode(bytes) else { return vec![(Topic::Node.of("a"), bytes.to_vec())] };
    // By bytes: a number that is none equals nothing, itself included.
    let written = e.encode_to_vec();
    let again = Envelope::decode(&*written).map(|read| read.encode_to_vec());
    assert_eq!(again, Ok(written), "it reads as it was written");
    let as_it_is = (Topic::Bucket(1).of(&e.node), bytes.to_vec());
    (e.version, e.sequence) = (VERSION, sequence);
    let own = Topic::Node.of(&e.node);
    assert_eq!(subject::parse(&own).map(|(_, token, _)| token.to_owned()), Some(subject::token(&e.node)));
    vec![as_it_is, (own, e.encode_to_vec())]
}

/// What was heard once says nothing more, and nothing is said for another node.
fn replayed_is_refused(bus: &mut Bus, bytes: &[u8], now_ns: u64) {
    let Some(message) = pieces(bytes).first().copied() else { return };
    let now = Moment { mono_ns: now_ns, unix_ns: now_ns };
    let count = |bus: &Bus, why| bus.reader.refused().get(&why).copied().unwrap_or(0);
    let Ok(e) = Envelope::decode(message) else { return };
    // A node with such a name, or one too many, is not heard at all.
    if !bus.reader.nodes().contains_key(&e.node) {
        return;
    }
    for (subject, bytes) in sent(message, 1).into_iter().skip(1) {
        let before = (count(bus, Refusal::Replayed), count(bus, Refusal::Node));
        let mut out = Vec::new();
        bus.reader.read(&subject, &bytes, now, false, &mut out);
        bus.reader.read(&format!("{subject}x"), &bytes, now, false, &mut out);
        let after = (count(bus, Refusal::Replayed), count(bus, Refusal::Node));
        assert_eq!((after, out.len()), ((before.0 + 1, before.1 + 1), 0));
    }
}
