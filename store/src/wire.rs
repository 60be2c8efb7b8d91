//! What goes between a store and a daemon: frames, and the messages in them. Pure. Spec:
//! `spec/protocol.md`.

mod frame;
mod message;

pub(crate) use frame::{Frame, FrameKind, HEADER_BYTES, Header, INLINE, Limits, MAX_FDS};
pub(crate) use message::{
    Archives, Begin, Begun, Failure, Hello, Leased, Notice, Protocol, Reply, Request, Room,
    SharedSegment, Welcome,
};
