//! Everything that crosses crates, in one test binary.

/// Foreign and damaged bytes: every change is found, nothing panics.
mod damage;
/// Meshes, placements and boxes against naive index sets.
mod geometry;
/// The ledger of one key over random commands and crashes.
mod ledger;
/// State dicts to bytes and back.
mod roundtrip;
/// The byte tables of the spec, its rules, and the vectors as the reader takes them.
mod spec;
/// The good vectors as the writer writes them.
mod vectors;
