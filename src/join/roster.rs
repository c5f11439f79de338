//! The memberships of every process, and a number for each that can wait or be waited for.

use crate::model::{CommId, Rank, SegmentId};
use std::collections::HashMap;
use std::sync::Arc;

/// The state of a process that matters to those that wait for it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Condition {
    /// Its segment was seen.
    pub known: bool,
    /// Nothing can rest on its issue orders.
    pub unsure: bool,
    /// It is gone.
    pub gone: bool,
    /// A signal has stopped it: it issues nothing, tells of nothing that ends on its GPU, and its network threads stand still.
    pub stopped: bool,
}

impl Condition {
    /// True where it will not finish what it began, or nothing reports that it did: who waits for it waits for its
    /// process.
    pub(super) fn is_out(self) -> bool {
        self.gone || self.stopped
    }
}

/// One process's GPU: what can wait and be waited for.
#[derive(Debug, Clone)]
struct Actor {
    gpu: Option<Arc<str>>,
    number: u32,
    /// Memberships that it has.
    seats: u32,
}

/// One process.
#[derive(Debug, Clone, Default)]
struct Entry {
    condition: Condition,
    actors: Vec<Actor>,
    /// Its memberships, sorted.
    seats: Vec<(CommId, Rank)>,
}

/// All processes that are known or are members of something.
#[derive(Debug, Clone, Default)]
pub(super) struct Roster {
    entries: HashMap<SegmentId, Entry>,
    /// By the actors' numbers.
    conditions: Vec<Condition>,
    /// Numbers that nobody has any more.
    free: Vec<u32>,
}

impl Roster {
    /// The processes among the first so many numbers that are gone or stopped.
    pub(super) fn out(&self, numbers: usize) -> Vec<u32> {
        let all = (0u32..).zip(&self.conditions).take(numbers);
        all.filter(|(_, c)| c.known && c.is_out()).map(|(number, _)| number).collect()
    }

    /// Takes a membership in; returns the number of the process's GPU. All memberships share one text of its address.
    pub(super) fn enter(
        &mut self,
        segment: SegmentId,
        gpu: &mut Option<Arc<str>>,
        comm: CommId,
        rank: Rank,
    ) -> u32 {
        let entry = self.entries.entry(segment).or_default();
        if let Err(at) = entry.seats.binary_search(&(comm, rank)) {
            entry.seats.insert(at, (comm, rank));
        }
        if let Some(a) = entry.actors.iter_mut().find(|a| a.gpu == *gpu) {
            a.seats += 1;
            gpu.clone_from(&a.gpu);
            return a.number;
        }
        let number = self.free.pop().unwrap_or_else(|| {
            self.conditions.push(Condition::default());
            self.conditions.len() as u32 - 1
        });
        self.conditions[number as usize] = entry.condition;
        entry.actors.push(Actor { gpu: gpu.clone(), number, seats: 1 });
        number
    }

    /// Takes a membership out again.
    pub(super) fn leave(&mut self, segment: SegmentId, number: u32, comm: CommId, rank: Rank) {
        let Some(entry) = self.entries.get_mut(&segment) else { return };
        if let Ok(at) = entry.seats.binary_search(&(comm, rank)) {
            entry.seats.remove(at);
        }
        if let Some(at) = entry.actors.iter().position(|a| a.number == number) {
            entry.actors[at].seats -= 1;
            if entry.actors[at].seats == 0 {
                entry.actors.remove(at);
                self.free.push(number);
            }
        }
        if entry.seats.is_empty() && !entry.condition.known {
            self.entries.remove(&segment);
        }
    }

    /// Says how a process is; true when that is news.
    pub(super) fn tell(&mut self, segment: SegmentId, condition: Condition) -> bool {
        let entry = self.entries.entry(segment).or_default();
        for a in &entry.actors {
            self.conditions[a.number as usize] = condition;
        }
        let news = std::mem::replace(&mut entry.condition, condition) != condition;
        if entry.seats.is_empty() && !condition.known {
            self.entries.remove(&segment);
        }
        news
    }

    /// How the process behind a number is.
    pub(super) fn condition(&self, number: u32) -> Condition {
        self.conditions.get(number as usize).copied().unwrap_or_default()
    }

    /// The memberships of a process, by communicator.
    pub(super) fn seats(&self, segment: SegmentId) -> &[(CommId, Rank)] {
        self.entries.get(&segment).map_or(&[], |e| &e.seats)
    }

    /// How many numbers were ever given at once.
    #[cfg(test)]
    pub(super) fn numbers(&self) -> usize {
        self.conditions.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const P: SegmentId = SegmentId(1);
    const A: CommId = CommId::unowned(1);
    const B: CommId = CommId::unowned(2);

    #[test]
    fn a_gpu_has_one_number_in_all_communicators_and_it_is_given_again() {
        let mut r = Roster::default();
        let first = r.enter(P, &mut Some("a".into()), A, Rank(0));
        assert_eq!(r.enter(P, &mut Some("a".into()), B, Rank(3)), first);
        let second = r.enter(P, &mut Some("b".into()), A, Rank(1));
        assert_ne!(second, first);
        assert_eq!(r.seats(P), [(A, Rank(0)), (A, Rank(1)), (B, Rank(3))]);
        r.leave(P, first, A, Rank(0));
        r.leave(P, first, B, Rank(3));
        assert_eq!(r.enter(SegmentId(2), &mut None, B, Rank(3)), first, "nobody has it any more");
        assert_eq!(r.numbers(), 2);
    }

    #[test]
    fn nothing_is_left_of_those_that_are_forgotten() {
        let mut r = Roster::default();
        for n in 0..1000 {
            let known = Condition { known: true, ..Condition::default() };
            let number = r.enter(SegmentId(n), &mut None, A, Rank(0));
            assert!(r.tell(SegmentId(n), known) && !r.tell(SegmentId(n), known));
            assert_eq!(r.condition(number), known);
            r.leave(SegmentId(n), number, A, Rank(0));
            r.tell(SegmentId(n), Condition::default());
        }
        assert_eq!((r.numbers(), r.entries.len()), (1, 0));
    }
}
