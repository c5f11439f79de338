//! A communicator's entry among the dirty ones.

/// A communicator's entry among the dirty ones, kept with it.
#[derive(Debug, Clone, Default)]
pub(in crate::join) struct DirtyEntry {
    /// Something was heard of it since it was last looked at.
    pub(in crate::join) touched: bool,
    /// Rules may have something to say of it.
    pub(in crate::join) notable: bool,
    /// It is freed on all its ranks.
    pub(in crate::join) closed: bool,
    /// When it is to be looked at though nothing is heard, host monotonic ns.
    pub(in crate::join) due_ns: Option<u64>,
    /// When it was freed on its last rank, or 0, once it was freed everywhere or all its processes are gone.
    pub(in crate::join) over_ns: Option<u64>,
}
