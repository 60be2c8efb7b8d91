//! Frames and messages between a store and a daemon, without I/O. Spec: `spec/protocol.md`.

mod frame;
mod message;
mod range;

pub(crate) use frame::{
    Data, Frame, FrameKind, HEADER_BYTES, Header, Limits, MAX_FDS, MAX_INLINE_BYTES,
    MAX_WRITE_BYTES,
};
pub(crate) use message::{
    Archives, Begin, BeginReply, BlobFetcher, BlobFetchers, Encodings, Failure, Hello, KeyPage,
    LeaseReply, Location, Notice, PrefetchReply, ProtocolVersion, ReadChecksum, ReadReply, Reply,
    Request, SharedSegment, UnreadCounts, Welcome, WriteTarget,
};
pub(crate) use range::{MAX_READ_BYTES, Piece, Range};
