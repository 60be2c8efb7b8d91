//! Memory that processes of one host share.
//!
//! A segment is an anonymous file that one process writes and others map to read. It has no name in a file system and
//! lives as long as a process has it open or mapped. A process that dies therefore leaves nothing behind.

mod extents;
mod pool;
mod segment;

pub(crate) use pool::{
    BlobWriter, DeviceSpan, Evictor, PeerId, Pool, PoolExhausted, Retain, SegmentId, SegmentMemory,
    Span,
};
#[cfg(test)]
pub(crate) use segment::create;
pub(crate) use segment::{ReadMap, WriteMap, check_readable, check_writable};
