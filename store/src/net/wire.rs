//! What goes between a store and a daemon: frames, and the messages in them. Pure. Spec:
//! `spec/protocol.md`.

mod frame;
mod message;
mod range;

pub(crate) use frame::{
    Data, Frame, FrameKind, HEADER_BYTES, Header, INLINE, Limits, MAX_FDS, MAX_WRITE,
};
pub(crate) use message::{
    Archives, Begin, Begun, Failure, Hello, Keys, Leased, Location, Notice, Prefetched, Protocol,
    Reply, Request, Room, SharedSegment, Sum, Unread, Welcome,
};
pub(crate) use range::{MAX_READ, Piece, Range};
