//! A record that a handle names, for as long as its ticket has the slot.

use crate::runtime::clock::now_ns;
use ringwatch_wire::codes::Loss;
use ringwatch_wire::ring::Ring;
use ringwatch_wire::sync::{self, Word};

/// A slot, its ticket, and the ring that says whether they still belong together.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SlotRef<'a, const W: usize> {
    ring: &'a Ring<'static, W>,
    ticket: u64,
    slot: &'static [Word; W],
    lap: u64,
}

impl<'a, const W: usize> SlotRef<'a, W> {
    /// The record of a ticket.
    ///
    /// # Errors
    /// [`Loss::Stale`] when the ticket has lost its slot.
    #[inline]
    pub(crate) fn of(ring: &'a Ring<'static, W>, ticket: u64) -> Result<Self, Loss> {
        let slot = ring.held(ticket).ok_or(Loss::Stale)?;
        Ok(SlotRef { ring, ticket, slot, lap: ring.lap(ticket) })
    }

    /// A word that was written before the record was published.
    #[inline]
    pub(crate) fn word(&self, i: usize) -> u64 {
        self.slot.get(i).map_or(0, Word::get)
    }

    /// A mark.
    #[inline]
    pub(crate) fn mark(&self, i: usize) -> Option<u64> {
        sync::marked(self.word(i), self.lap)
    }

    fn holds(&self) -> bool {
        self.ring.held(self.ticket).is_some()
    }

    /// Why a mark was not made: the slot is lost, or else this.
    fn because(&self, done: bool, otherwise: Loss) -> Result<(), Loss> {
        match (done, self.holds()) {
            (true, _) => Ok(()),
            (false, true) => Err(otherwise),
            (false, false) => Err(Loss::Stale),
        }
    }

    /// Sets a mark that must not be set twice.
    ///
    /// # Errors
    /// [`Loss::Repeated`] when it was set already.
    #[inline]
    pub(crate) fn once(&self, i: usize, value: u64) -> Result<(), Loss> {
        let word = self.slot.get(i).ok_or(Loss::NoRoom)?;
        self.because(sync::mark_once(word, self.lap, value, || self.holds()), Loss::Repeated)
    }

    /// Sets a mark that only one thread ever sets.
    #[inline]
    pub(crate) fn put(&self, i: usize, value: u64) {
        if let Some(word) = self.slot.get(i) {
            sync::mark_put(word, self.lap, value);
        }
    }

    /// Sets a mark, whatever it was.
    ///
    /// # Errors
    /// [`Loss::Contended`] when other threads kept changing it.
    #[inline]
    pub(crate) fn set(&self, i: usize, value: u64) -> Result<(), Loss> {
        let word = self.slot.get(i).ok_or(Loss::NoRoom)?;
        self.because(sync::mark_set(word, self.lap, value, || self.holds()), Loss::Contended)
    }

    /// Adds to a mark.
    ///
    /// # Errors
    /// [`Loss::Contended`] when other threads kept changing it.
    #[inline]
    pub(crate) fn add(&self, i: usize, n: u64) -> Result<(), Loss> {
        let word = self.slot.get(i).ok_or(Loss::NoRoom)?;
        self.because(sync::mark_add(word, self.lap, n, || self.holds()), Loss::Contended)
    }

    /// ns since the time in a word.
    #[inline]
    pub(crate) fn since(&self, i: usize) -> u64 {
        now_ns().saturating_sub(self.word(i))
    }

    /// Sets the mark `to`, once, to the time since the word `from`.
    ///
    /// # Errors
    /// [`Loss::Repeated`] when it was set already.
    #[inline]
    pub(crate) fn once_since(&self, to: usize, from: usize) -> Result<(), Loss> {
        self.once(to, self.since(from))
    }
}
