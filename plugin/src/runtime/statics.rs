//! The statics that every callback reads outside of the process's pages, in one cache line.

use ringwatch_wire::sync::Word;

/// The pair of values that ties the processor's counter to the clock, see [`crate::runtime::clock`].
#[derive(Debug)]
pub(crate) struct Tie {
    /// ns a tick, times 2^32; 0 while not measured.
    pub(crate) rate: Word,
    /// ns to add to the counter's own ns.
    pub(crate) offset: Word,
    /// Counter at the last tie.
    pub(crate) tied: Word,
    /// Ticks after which it is tied anew; 0 while not measured.
    pub(crate) window: Word,
}

/// The line.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct Statics {
    /// Address of the process's page, see [`crate::live`]; 0 until the first init.
    pub(crate) page: Word,
    pub(crate) tie: Tie,
    /// Not 0 once a thread has issued what another one had called in a group, see [`crate::bare`].
    pub(crate) groups_elsewhere: Word,
}

pub(crate) static STATICS: Statics = Statics {
    page: Word::new(0),
    tie: Tie { rate: Word::new(0), offset: Word::new(0), tied: Word::new(0), window: Word::new(0) },
    groups_elsewhere: Word::new(0),
};
