//! The content of a message: rows of a node's own processes and ranks, and nobody else's.

use super::admission::reading;
use super::{ANNOUNCED, Claim, ENDED, MEMBERS, Node, PROCESS_BYTES, PROCESSES, Reader, Refusal, Told, mixed};
use crate::cluster::message::{self as m, OperationKey};
use crate::model::{CommId, Rank, SegmentId, Update};
use std::collections::HashMap;

/// Reasons in an agent's accounts that are kept, and the longest, in characters.
const REASONS: usize = 32;
const REASON: usize = 64;

impl Reader {
    /// Takes what a message of a known node says.
    pub(super) fn contents(&mut self, mut e: m::Envelope, out: &mut Vec<Update>) {
        let name = std::mem::take(&mut e.node);
        self.processes(&name, std::mem::take(&mut e.processes), out);
        self.members(&name, std::mem::take(&mut e.members), out);
        self.rows(&name, &mut e, out);
        self.readings(&name, &e.readings, out);
        // Findings of agents are for those who read the bus: an analyser judges by itself.
        let room = ANNOUNCED.saturating_sub(self.announced.len());
        self.announced.extend(e.announced.iter().filter_map(OperationKey::key).take(room));
        if let (Some(node), Some(mut books)) = (self.nodes.get_mut(&name), e.books) {
            books.left_out.truncate(REASONS);
            for l in &mut books.left_out {
                l.what = l.what.chars().filter(|c| !c.is_control()).take(REASON).collect();
            }
            node.books = Some(books);
        }
    }

    fn processes(&mut self, name: &str, processes: Vec<m::Process>, out: &mut Vec<Update>) {
        for p in processes {
            let room = |n: &Node| n.processes.contains_key(&p.segment) || n.processes.len() < PROCESSES;
            if !self.nodes.get(name).is_some_and(room) {
                self.forget_ended(name);
            }
            let Some(node) = self.nodes.get_mut(name) else { return };
            let (own, has_room) = (p.segment, room(node));
            let missed: Vec<(&'static str, u64)> = p.missed().collect();
            let (id, shares_communicators) = (SegmentId(mixed(name, own)), p.shares_communicators);
            // A node that has learned of another's segment speaks for that all the same.
            if self.of.get(&id).is_some_and(|holder| holder != name) {
                self.refuse(Refusal::Node);
                continue;
            }
            let told = Told { record: p.record(id, name), shares_communicators };
            let before = node.processes.get(&own).map_or(0, Told::bytes);
            let bytes = node.process_bytes - before + told.bytes();
            if !has_room || bytes > PROCESS_BYTES {
                self.refuse(Refusal::TooMuch);
                continue;
            }
            node.process_bytes = bytes;
            out.push(Update::Segment(told.record.clone()));
            for (what, total) in missed {
                let was = node.lost.entry((own, what)).or_default();
                let count = total.saturating_sub(std::mem::replace(was, total));
                if count > 0 {
                    out.push(Update::Missed { segment: id, what, count });
                }
            }
            if let Some((_, told)) = &mut node.anew {
                told.insert(own);
            }
            let ended = !told.alive();
            node.processes.insert(own, told);
            self.of.insert(id, name.to_owned());
            if ended {
                self.withdraw(|_, c| c.segment == id, out);
            }
        }
    }

    /// The process of another node that holds a rank and may go on, as far as is known.
    fn other_holder(&self, key: &(CommId, Rank), name: &str) -> Option<Claim> {
        let segment = *self.ranks.get(key)?;
        let node = self.of.get(&segment).filter(|n| *n != name)?;
        let holder = self.nodes.get(node)?;
        let goes_on = holder.processes.values().any(|t| t.id() == segment && t.alive());
        (goes_on && holder.claims(self.looked_ns)).then(|| Claim { segment, node: node.clone() })
    }

    fn members(&mut self, name: &str, rows: Vec<m::Member>, out: &mut Vec<Update>) {
        let crowded = |n: &Node| n.members.saturating_add(rows.len()) > MEMBERS || n.ended.len() > ENDED;
        if self.nodes.get(name).is_some_and(crowded) {
            self.forget_ended(name);
        }
        for c in rows {
            let Some(told) = self.nodes.get(name).and_then(|n| n.processes.get(&c.segment)) else {
                self.refuse(Refusal::Process);
                continue;
            };
            let (segment, key) = (told.id(), (told.communicator(c.comm), Rank(c.rank)));
            let other = self.other_holder(&key, name);
            if self.disputes.contains(&key) || other.is_some() {
                self.refuse(Refusal::Rank);
                let claim = Claim { segment, node: name.to_owned() };
                if c.left {
                    self.withdraw(|k, c| *k == key && *c == claim, out);
                } else {
                    self.disputes.claim(key, other.into_iter().chain([claim]), out);
                }
                continue;
            }
            self.member(name, segment, key, c, out);
        }
    }

    /// Takes a membership that nobody disputes.
    fn member(
        &mut self,
        name: &str,
        segment: SegmentId,
        key: (CommId, Rank),
        c: m::Member,
        out: &mut Vec<Update>,
    ) {
        let Some(node) = self.nodes.get_mut(name) else { return };
        let known = self.ranks.contains_key(&key);
        if c.left {
            node.members -= usize::from(self.ranks.remove(&key).is_some() && node.members > 0);
            node.ended.remove(&key);
            out.push(Update::Left { segment, comm: key.0, rank: key.1 });
            return;
        }
        if !known && node.members >= MEMBERS {
            self.refuse(Refusal::TooMuch);
            return;
        }
        node.members += usize::from(!known);
        self.ranks.insert(key, segment);
        match c.finalized_ns {
            Some(_) => node.ended.insert(key),
            None => node.ended.remove(&key),
        };
        // Clocks of two hosts are never the same one, whatever their agents say.
        let clock = mixed(name, c.host_clock);
        out.push(Update::Comm(c.record(segment, key.0, clock)));
    }

    /// Takes claims on ranks back. Who is left with one is asked to tell all: nothing of it was believed so far.
    pub(super) fn withdraw(&mut self, gone: impl Fn(&(CommId, Rank), &Claim) -> bool, out: &mut Vec<Update>) {
        for (key, left) in self.disputes.withdraw(gone, out) {
            self.ranks.remove(&key);
            self.gaps.extend(left.map(|c| c.node));
        }
    }

    fn rows(&mut self, name: &str, e: &mut m::Envelope, out: &mut Vec<Update>) {
        let mut refusals: Vec<Refusal> = Vec::new();
        let Some(node) = self.nodes.get(name) else { return };
        let own = Own { known: &node.processes, ranks: &self.ranks, disputes: &self.disputes };
        let mut put = |row: Result<Update, Refusal>| match row {
            Ok(update) => out.push(update),
            Err(why) => refusals.push(why),
        };
        for b in &e.beats {
            put(own.rank(b.segment, b.comm, b.rank).map(|(id, comm)| Update::Beat(b.beat(id, comm))));
        }
        for p in &e.pairs {
            put(own.rank(p.segment, p.comm, p.rank).map(|(id, comm)| Update::Pair(p.beat(id, comm))));
        }
        for s in std::mem::take(&mut e.signatures) {
            let of = own.rank(s.segment, s.comm, s.rank);
            put(of.map(|(id, comm)| Update::Signatures(Box::new(s.signatures(id, comm)))));
        }
        for t in std::mem::take(&mut e.types) {
            let of = own.rank(t.segment, t.comm, t.rank);
            put(of.map(|(id, comm)| Update::Signatures(Box::new(t.types(id, comm)))));
        }
        for r in std::mem::take(&mut e.records) {
            let of = own.rank(r.segment, r.comm, r.rank);
            let told = of.and_then(|(id, comm)| r.told(id, comm).ok_or(Refusal::Garbage));
            put(told.map(|t| Update::Told(Box::new(t))));
        }
        // Agents of before say neither whose a sketch is nor when it was: there the sample has to do.
        for s in std::mem::take(&mut e.sketches).into_iter().filter(|s| s.seconds > 0) {
            let of = own.speaker(&s).ok_or(Refusal::Rank);
            let sketch = of.and_then(|(id, comm)| s.sketch(id, comm).ok_or(Refusal::Garbage));
            put(sketch.map(|s| Update::Sketch(Box::new(s))));
        }
        for c in &e.calls {
            let id = own.known.get(&c.segment).map(Told::id).ok_or(Refusal::Process);
            put(id.map(|id| Update::Calls(Box::new(c.state(id)))));
        }
        for w in &e.work {
            let id = own.known.get(&w.segment).map(Told::id).ok_or(Refusal::Process);
            put(id.map(|id| Update::Work(Box::new(w.state(id)))));
        }
        for h in std::mem::take(&mut e.hosts) {
            let id = own.known.get(&h.segment).map(Told::id).ok_or(Refusal::Process);
            put(id.map(|id| Update::Host(Box::new(h.fact(id)))));
        }
        refusals.into_iter().for_each(|r| self.refuse(r));
    }

    fn readings(&mut self, name: &str, readings: &[Vec<u8>], out: &mut Vec<Update>) {
        for r in readings {
            let Some(node) = self.nodes.get_mut(name) else { return };
            match reading(r) {
                Ok(mut reading) if node.devices.admits(&reading.fact) => {
                    name.clone_into(&mut reading.host);
                    out.push(Update::Hardware(Box::new(reading)));
                }
                Ok(_) => self.refuse(Refusal::TooMuch),
                Err(_) => self.refuse(Refusal::Garbage),
            }
        }
    }
}

/// The processes and ranks of a node.
struct Own<'a> {
    known: &'a HashMap<u64, Told>,
    ranks: &'a HashMap<(CommId, Rank), SegmentId>,
    disputes: &'a super::Disputes,
}

impl Own<'_> {
    /// The process and the communicator of a row about a rank, if that rank is the node's.
    fn rank(&self, segment: u64, comm: u64, rank: u32) -> Result<(SegmentId, CommId), Refusal> {
        let told = self.known.get(&segment).ok_or(Refusal::Process)?;
        let key = (told.communicator(comm), Rank(rank));
        let holds = self.ranks.get(&key) == Some(&told.id()) && !self.disputes.contains(&key);
        if holds { Ok((told.id(), key.0)) } else { Err(Refusal::Rank) }
    }

    /// The process of the rank that speaks for the node in a sketch. Agents of before do not say which it is.
    fn speaker(&self, s: &m::Sketch) -> Option<(SegmentId, CommId)> {
        match s.segment {
            Some(own) => self.rank(own, s.comm, s.rank).ok(),
            None => self.known.keys().find_map(|own| self.rank(*own, s.comm, s.rank).ok()),
        }
    }
}
