//! Errors of delta chunks.

use std::fmt;

use crate::error::{Error, ErrorKind};

/// Returns the error of a delta chunk that breaks F-098.
pub(super) fn invalid(detail: impl fmt::Display) -> Error {
    Error::new(ErrorKind::DeltaChunk).with_detail(detail)
}

/// Returns the error of a delta chunk that does not fit its base (F-099).
pub(super) fn mismatch(detail: impl fmt::Display) -> Error {
    Error::new(ErrorKind::DeltaMismatch).with_detail(detail)
}
