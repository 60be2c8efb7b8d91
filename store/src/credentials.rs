//! TLS credentials of a client or a daemon.

use std::path::PathBuf;

/// The TLS credentials of one side of a connection, as PEM files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Credentials {
    /// The certificates of the trusted certificate authority.
    pub ca: PathBuf,
    /// The certificate of this side, with the intermediate certificates up to the authority.
    pub cert: PathBuf,
    /// The private key of the certificate.
    pub key: PathBuf,
}
