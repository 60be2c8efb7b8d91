//! The pieces in which bytes are proven.

/// Storages are checksummed, and compressed, in pieces of this many raw bytes.
pub const CHUNK_BYTES: u64 = 1 << 20;
