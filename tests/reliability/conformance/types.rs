//! Plain types of the model. They use no type of the store.

use std::collections::{BTreeMap, BTreeSet};

pub(crate) type Id = usize;
pub(crate) type Job = u8;
pub(crate) type Writers = BTreeSet<u32>;

/// A state dict as its readers see it: whole arrays by fqn, in order.
pub(crate) type Dict = Vec<(String, Array)>;

/// A matrix, or a plain number as a single element.
///
/// Each element has its position, so that the elements of a slice say where they belong.
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

/// The contribution of one writer: whole arrays and slices of arrays.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Contribution {
    pub(crate) leaves: Vec<(String, Array, Extent)>,
    /// Whether the leaf of the lowest writer is taken where writers differ. Otherwise they must not differ.
    pub(crate) takes_lowest: bool,
    /// Number of archives of the contribution, and whether its slices have mesh coordinates.
    ///
    /// A contribution that differs in one of these does not repeat the other.
    pub(crate) archives: usize,
    pub(crate) on_mesh: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Extent {
    Whole,
    Slice,
}

/// The request of a writer to contribute to a version.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct PutRequest {
    pub(crate) writer: u32,
    pub(crate) writers: Writers,
    /// Whether the request names no writers: they are those of the mesh, or a single writer.
    pub(crate) infers_writers: bool,
    pub(crate) job: Option<Job>,
    /// Sequence number of this put among those of its job, key and writer, if it has no version number.
    pub(crate) sequence: Option<u64>,
    pub(crate) number: Option<u64>,
    pub(crate) rewind: bool,
    pub(crate) durable: bool,
}

/// Reason why the model refuses a request.
#[derive(Clone, Debug, PartialEq, PartialOrd, Eq, Ord)]
pub(crate) enum ModelError {
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
    StaleSequence,
    /// Two versions are open.
    Busy,
    NotBegun,
    ContributionDiffers,
    Dropped(DropReason),
    Gone,
    NotFound {
        newest: Option<u64>,
        open: Option<(u64, Writers)>,
    },
    LeafNotFound,
    WaitTimedOut,
}

impl ModelError {
    /// Returns this error if a condition holds.
    pub(crate) fn err_if(self, is_so: bool) -> Result<(), Self> {
        if is_so { Err(self) } else { Ok(()) }
    }
}

/// How a version ended that never became visible.
#[derive(Clone, Debug, PartialEq, PartialOrd, Eq, Ord)]
pub(crate) enum DropReason {
    Superseded { by: u64 },
    Rejected,
    Aborted,
    Deleted,
}

/// State of a version after a contribution.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Progress {
    pub(crate) visible: bool,
    pub(crate) missing: Writers,
}
