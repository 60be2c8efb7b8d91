//! Communication between processes: messages, connections, and the client of a daemon.

pub(crate) mod client;
pub(crate) mod encoding;
pub(crate) mod link;
pub(crate) mod socket;
pub(crate) mod tls;
pub(crate) mod wire;
