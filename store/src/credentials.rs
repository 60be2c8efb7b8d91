//! Who a side is, and whom it believes.

use std::path::PathBuf;

/// What a side proves itself with, and whom it believes: files in PEM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Credentials {
    /// The certificates of the authority whose certificates are believed.
    pub ca: PathBuf,
    /// This side's certificate, and those between it and the authority's.
    pub cert: PathBuf,
    /// Its private key.
    pub key: PathBuf,
}
