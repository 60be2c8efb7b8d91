//! Commands on a store.

pub(crate) mod get;
pub(crate) mod head;
pub(crate) mod ls;
pub(crate) mod pin;
pub(crate) mod prefetch;
pub(crate) mod put;
pub(crate) mod rm;
pub(crate) mod rollback;
pub(crate) mod status;

use std::path::PathBuf;

use tssd_store::blocking::Store;
use tssd_store::{ConnectOptions, Credentials, Error, ErrorKind, Key, KeyVersion, Label, Selector};

use crate::exit::Exit;
use crate::failure::{Failure, Result};

/// Where the store is: the same for all of its commands.
#[derive(Debug, clap::Args)]
pub(crate) struct Address {
    /// The store: a directory; `unix:PATH` or `unix:NAME`, a daemon of this host; `tls://HOST:PORT`, of another;
    /// `s3://BUCKET/PREFIX`, `gs:`, `az:`, a bucket
    #[arg(long = "store", env = "TSSD_STORE", value_name = "URL")]
    url: String,
    /// For tls: the certificate of the authority that the daemon's must come from, in PEM
    #[arg(long, env = "TSSD_CA", value_name = "FILE", requires_all = ["cert", "key_file"])]
    ca: Option<PathBuf>,
    /// For tls: your certificate, in PEM
    #[arg(long, env = "TSSD_CERT", value_name = "FILE", requires_all = ["ca", "key_file"])]
    cert: Option<PathBuf>,
    /// For tls: your private key, in PEM
    #[arg(long, env = "TSSD_KEY", value_name = "FILE", requires_all = ["ca", "cert"])]
    key_file: Option<PathBuf>,
}

impl Address {
    /// Connects to an existing store.
    pub(crate) fn connect(&self) -> Result<Store> {
        Store::connect_with(&self.url, &self.options()).map_err(|error| connect_failure(&error))
    }

    /// Connects to a store, and creates it if it does not exist.
    pub(crate) fn create(&self) -> Result<Store> {
        Store::create_with(&self.url, &self.options()).map_err(|error| connect_failure(&error))
    }

    fn options(&self) -> ConnectOptions {
        let mut options = ConnectOptions::default();
        if let (Some(ca), Some(cert), Some(key)) = (&self.ca, &self.cert, &self.key_file) {
            let (ca, cert, key) = (ca.clone(), cert.clone(), key.clone());
            options.credentials = Some(Credentials { ca, cert, key });
        }
        options
    }
}

/// A version of a key: the same for all commands on one version.
#[derive(Debug, clap::Args)]
pub(crate) struct VersionName {
    /// The key, and optionally the number of the version: KEY (the newest) or KEY@VERSION
    key: KeyVersion,
    /// The version that this label pins
    #[arg(long, value_name = "LABEL")]
    label: Option<Label>,
}

impl VersionName {
    /// Returns the key and the version.
    pub(crate) fn parts(&self) -> Result<(&Key, Selector)> {
        select_version(&self.key, self.label.as_ref())
    }
}

/// Returns a key, and the version that a number or a label selects.
pub(crate) fn select_version<'a>(
    KeyVersion { key, version }: &'a KeyVersion,
    label: Option<&Label>,
) -> Result<(&'a Key, Selector)> {
    match (label, version) {
        (Some(label), None) => Ok((key, Selector::Label(label.clone()))),
        (None, version) => Ok((key, Selector::from(*version))),
        (Some(_), Some(number)) => {
            let text = format_args!("{key}@{number} and --label name two versions");
            Err(Failure::new(Exit::Usage, text).help("name one of them"))
        }
    }
}

fn connect_failure(error: &Error) -> Failure {
    match error.kind() {
        ErrorKind::Invalid => Failure::new(Exit::Usage, error),
        _ => store_failure(error),
    }
}

/// Creates the failure for an error of a store, with help.
pub(crate) fn store_failure(error: &Error) -> Failure {
    let (exit, help) = match error.kind() {
        ErrorKind::NotFound => {
            (Exit::NotFound, "`tssd ls` lists the keys, `tssd ls KEY` its versions")
        }
        ErrorKind::Corrupt => {
            (Exit::Mismatch, "`tssd verify` names all damage; get another version, or put it again")
        }
        ErrorKind::Unreachable => (Exit::Unreachable, "check --store or TSSD_STORE"),
        ErrorKind::Busy => (Exit::Refused, "try again later"),
        ErrorKind::Rejected => {
            (Exit::Refused, "mend the state dicts, then put again in every writer")
        }
        ErrorKind::Io => (Exit::Refused, "what was visible before is untouched"),
        _ => (Exit::Refused, ""),
    };
    let help = error.help().unwrap_or(help);
    // The failure prints the help.
    let mut failure = Failure::new(exit, error.without_help());
    if let Some(format) = error.format_error() {
        failure = failure.code(Failure::error_code(format.kind()));
    }
    if help.is_empty() { failure } else { failure.help(help) }
}
