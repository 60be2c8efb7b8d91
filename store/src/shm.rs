//! Memory that processes of one host share: segments, each an anonymous file that one process writes
//! and others map to read.
//!
//! Nothing has a name in a file system: a segment lives as long as somebody has it open or mapped, so
//! nothing is left behind whoever dies.

mod extents;
mod pool;
mod segment;

pub(crate) use pool::{Exhausted, Hollow, PeerId, Pool, SegmentId, Shared, Span, Spare, Writing};
#[cfg(test)]
pub(crate) use segment::create;
pub(crate) use segment::{ReadMap, WriteMap, check_lent, check_shared};
