//! What writers and readers say, in the words of the model: plain values, and nothing of the store.

use std::collections::{BTreeMap, BTreeSet};

pub(crate) type Id = usize;
pub(crate) type Job = u8;
pub(crate) type Writers = BTreeSet<u32>;

/// A state dict as its readers see it: whole arrays by fqn, in their order.
pub(crate) type Dict = Vec<(String, Array)>;

/// A matrix, or a plain number, which is one element of its kind. Each element has its place, so that the
/// elements of a slice say where they are.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Array {
    pub(crate) kind: Kind,
    pub(crate) shape: (u64, u64),
    pub(crate) elements: BTreeMap<(u64, u64), u32>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Kind {
    Number,
    Uint32,
    Int32,
}

/// What one writer puts: whole arrays and slices of arrays.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Part {
    pub(crate) leaves: Vec<(String, Array, Extent)>,
    /// Whether the lowest writer's leaf is taken where they differ. Else they must not.
    pub(crate) lowest: bool,
    /// In how many archives it is written, and whether its slices say where their writer stands: it is no
    /// repetition of what differs in that.
    pub(crate) archives: usize,
    pub(crate) on_mesh: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Extent {
    Whole,
    Slice,
}

/// What a writer says of its contribution.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Ask {
    pub(crate) writer: u32,
    pub(crate) writers: Writers,
    /// Whether nobody has said the writers: they are those of the dict's mesh, or one.
    pub(crate) found: bool,
    pub(crate) job: Option<Job>,
    /// Without a number: the how-manieth put of the job to the key by the writer it is.
    pub(crate) call: Option<u64>,
    pub(crate) number: Option<u64>,
    pub(crate) rewind: bool,
    pub(crate) durable: bool,
}

/// Why something is refused.
#[derive(Clone, Debug, PartialEq, PartialOrd, Eq, Ord)]
pub(crate) enum Fault {
    Invalid,
    NotAWriter,
    JobRequired,
    Fenced,
    JobsDisagree,
    WritersDisagree,
    DurabilityDisagrees,
    NotNewer {
        highest: u64,
    },
    LateCall,
    /// Two versions are open.
    Busy,
    NotBegun,
    Differs,
    Dropped(End),
    Gone,
    NotFound {
        newest: Option<u64>,
        coming: Option<(u64, Writers)>,
    },
    NoLeaf,
    NotCome,
}

impl Fault {
    /// Refuses something for this, when it is so.
    pub(crate) fn when(self, is_so: bool) -> Result<(), Self> {
        if is_so { Err(self) } else { Ok(()) }
    }
}

/// How a version ends that never became visible.
#[derive(Clone, Debug, PartialEq, PartialOrd, Eq, Ord)]
pub(crate) enum End {
    Superseded { by: u64 },
    Rejected,
    Aborted,
    Deleted,
}

/// How far a contribution has brought its version.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Progress {
    pub(crate) visible: bool,
    pub(crate) missing: Writers,
}
