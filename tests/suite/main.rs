//! Everything that crosses crates, in one test binary.

/// Meshes, placements and boxes against naive index sets.
mod geometry;
/// Foreign and damaged bytes: every change is found, nothing panics.
mod damage;
/// State dicts to bytes and back.
mod roundtrip;
/// The byte tables of the spec, and the vectors.
mod spec;
