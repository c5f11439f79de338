//! The properties that ranks must agree on.

use crate::model::{DataType, Func, OpRecord, Rank, RedOp};

/// The properties that must be equal on all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Signature {
    /// The operation.
    pub func: Func,
    /// Data type, where known.
    pub dtype: Option<DataType>,
    /// Message size in bytes, where known.
    pub bytes: Option<u64>,
    /// Elements.
    pub count: u64,
    /// Root, of a rooted collective.
    pub root: Option<Rank>,
    /// Reduction operation, where known.
    pub redop: Option<RedOp>,
}

impl Signature {
    /// Of an operation in a communicator of so many ranks.
    pub fn of(op: &OpRecord, ranks: Option<u32>) -> Self {
        Signature {
            func: op.func,
            dtype: op.dtype,
            bytes: op.bytes(ranks),
            count: op.count,
            root: op.root.filter(|_| op.func.is_rooted()),
            redop: op.redop,
        }
    }

    /// True when a send and a receive may be the two ends of one transfer.
    pub fn transfers_as(&self, other: &Signature) -> bool {
        match (self.bytes, other.bytes) {
            (Some(a), Some(b)) => self.func == other.func || a == b,
            _ => true,
        }
    }

    /// True when two ranks may have meant the same operation.
    pub fn agrees(&self, other: &Signature) -> bool {
        // A file of another tool may not say how much.
        let is_unknown = |s: &Signature| s.dtype.is_none() && s.count == 0;
        let types = match (self.dtype, other.dtype) {
            (Some(a), Some(b)) if a == b => self.count == other.count,
            // Where the record of the call was lost, NCCL's own form is left: these as bytes.
            (Some(DataType::Int8), Some(_)) | (Some(_), Some(DataType::Int8))
                if matches!(self.func, Func::AllGather | Func::Broadcast) =>
            {
                self.bytes == other.bytes
            }
            (Some(_), Some(_)) => false,
            _ if is_unknown(self) || is_unknown(other) => true,
            // NCCL does not name every type.
            _ => self.count == other.count,
        };
        let reductions = match (self.redop, other.redop) {
            (Some(a), Some(b)) => a == b,
            _ => true,
        };
        self.func == other.func && types && self.root == other.root && reductions
    }
}
