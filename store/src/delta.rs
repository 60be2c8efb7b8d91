//! Deltas between archives of a store: parts of bytes, and archives that are stored as the difference from another one.

pub(crate) mod layout;
pub(crate) mod parts;
pub(crate) mod runs;
pub(crate) mod stored;
