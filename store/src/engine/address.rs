//! Addresses of stores, and the ledgers and volumes behind them.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crate::blob::Volume;
use crate::blob::backend::DirectoryVolume;
#[cfg(feature = "object")]
use crate::blob::backend::ObjectVolume;
use crate::error::{Error, ErrorKind, Result};
#[cfg(feature = "object")]
use crate::io::bucket::Bucket;
use crate::io::disk::{self, Disk};
use crate::metadata::backend::DirectoryMeta;
#[cfg(feature = "object")]
use crate::metadata::backend::ObjectMeta;
use crate::metadata::{Ledgers, SharedLedgers};

/// URL schemes of buckets.
const BUCKET_SCHEMES: [&str; 7] = ["s3", "s3a", "gs", "az", "azure", "abfs", "abfss"];

/// Returns whether a URL names a bucket, or an object in one, such as `s3://BUCKET/NAME`.
pub fn is_object_url(url: &str) -> bool {
    url.split_once("://").is_some_and(|(scheme, _)| BUCKET_SCHEMES.contains(&scheme))
}

/// The address of a store.
pub(crate) enum Address<'a> {
    Memory,
    Directory(&'a Path),
    Socket(&'a Path),
    Host(&'a str),
    Bucket(&'a str),
}

impl<'a> Address<'a> {
    pub(crate) fn parse(url: &'a str) -> Result<Self> {
        let path = |path: &'a str| {
            let path = path.strip_prefix("//").unwrap_or(path);
            // On Windows `file:///C:/store` is `C:/store`.
            let drive = path.strip_prefix('/').filter(|path| path.as_bytes().get(1) == Some(&b':'));
            Path::new(drive.filter(|_| cfg!(windows)).unwrap_or(path))
        };
        match url.split_once(':') {
            _ if url.is_empty() => {
                Err(Error::new(ErrorKind::Invalid, "the address of the store is empty"))
            }
            _ if is_object_url(url) => Ok(Self::Bucket(url)),
            Some(("memory", "")) => Ok(Self::Memory),
            Some(("file", rest)) => Ok(Self::Directory(path(rest))),
            Some(("unix", rest)) => Ok(Self::Socket(path(rest))),
            Some(("tls" | "tcp", _)) => Ok(Self::Host(url)),
            Some((scheme @ ("http" | "https"), _)) => Err(Error::new(
                ErrorKind::Invalid,
                format_args!(
                    "`{url}`: {scheme}: addresses are no stores; use s3:, gs:, az:, tls:, unix: or a directory"
                ),
            )),
            _ => Ok(Self::Directory(Path::new(url))),
        }
    }
}

/// Returns the address of the daemon that serves a directory, if there is one.
pub(crate) fn daemon_address(path: &Path) -> Result<Option<String>> {
    disk::daemon_socket(path).map_err(|error| unreachable_at(path, error))
}

/// The ledgers and the volume of a store.
pub(crate) type StoreBackend = (Arc<dyn Ledgers>, Arc<dyn Volume>);

/// Opens the ledgers and the volume in a directory.
pub(crate) fn open_directory(root: PathBuf) -> StoreBackend {
    let disk = Disk::at(root);
    let ledgers = SharedLedgers::new(Arc::new(DirectoryMeta::new(disk.clone())));
    (Arc::new(ledgers), Arc::new(DirectoryVolume::new(disk)))
}

/// Opens the ledgers and the volume in a bucket.
#[cfg(feature = "object")]
pub(crate) fn open_bucket(url: &str, timeout: Duration) -> Result<StoreBackend> {
    Ok(from_bucket(Bucket::open(url, timeout)?))
}

#[cfg(not(feature = "object"))]
pub(crate) fn open_bucket(url: &str, _timeout: Duration) -> Result<StoreBackend> {
    let text = format_args!(
        "`{url}`: stores in buckets need the feature `object`: `cargo install --features object`, or the wheel"
    );
    Err(Error::new(ErrorKind::Invalid, text))
}

/// Returns the ledgers and the volume in an open bucket.
#[cfg(feature = "object")]
pub(crate) fn from_bucket(bucket: Bucket) -> StoreBackend {
    let ledgers = SharedLedgers::new(Arc::new(ObjectMeta::new(bucket.clone())));
    (Arc::new(ledgers), Arc::new(ObjectVolume::new(bucket)))
}

/// Opens a store that outlives a host: in a bucket, or in a directory that hosts share (`file:DIR`).
pub(crate) fn open_shared_store(url: &str, timeout: Duration) -> Result<StoreBackend> {
    match Address::parse(url)? {
        Address::Bucket(url) => open_bucket(url, timeout),
        Address::Directory(path) if url.starts_with("file:") => {
            let root = path.canonicalize().map_err(|error| unreachable_at(path, error))?;
            Ok(open_directory(root))
        }
        _ => {
            let text = format_args!(
                "`{url}` is no bucket: s3://BUCKET/PREFIX, gs://…, az://…, or file:DIR for a directory that all hosts have"
            );
            Err(Error::new(ErrorKind::Invalid, text))
        }
    }
}

pub(crate) fn unreachable_at(path: &Path, error: std::io::Error) -> Error {
    let text = format_args!("no store at `{}`", path.display());
    Error::new(ErrorKind::Unreachable, text).with_source(error).with_file(path)
}
