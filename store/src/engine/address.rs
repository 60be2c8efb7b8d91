//! Where stores are, and what they are made of there.

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

/// How addresses of buckets begin.
const BUCKETS: [&str; 7] = ["s3", "s3a", "gs", "az", "azure", "abfs", "abfss"];

/// Whether an address is that of a bucket, or of an object in one, such as `s3://BUCKET/NAME`.
pub fn is_object(url: &str) -> bool {
    url.split_once("://").is_some_and(|(scheme, _)| BUCKETS.contains(&scheme))
}

/// Where a store is.
pub(crate) enum Address<'a> {
    Memory,
    Directory(&'a Path),
    Socket(&'a Path),
    Host(&'a str),
    Bucket(&'a str),
}

impl<'a> Address<'a> {
    pub(crate) fn of(url: &'a str) -> Result<Self> {
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
            _ if is_object(url) => Ok(Self::Bucket(url)),
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

/// Where the daemon listens that serves a directory.
pub(crate) fn claimed_by(path: &Path) -> Result<Option<String>> {
    disk::claimed_by(path).map_err(|error| unreachable_at(path, &error))
}

/// A store's ledgers and volume.
pub(crate) type Parts = (Arc<dyn Ledgers>, Arc<dyn Volume>);

/// Those in a directory.
pub(crate) fn directory(root: PathBuf) -> Parts {
    let disk = Disk::at(root);
    let ledgers = SharedLedgers::new(Arc::new(DirectoryMeta::new(disk.clone())));
    (Arc::new(ledgers), Arc::new(DirectoryVolume::new(disk)))
}

/// Those in a bucket.
#[cfg(feature = "object")]
pub(crate) fn open_bucket(url: &str, patience: Duration) -> Result<Parts> {
    Ok(over(Bucket::open(url, patience)?))
}

#[cfg(not(feature = "object"))]
pub(crate) fn open_bucket(url: &str, _patience: Duration) -> Result<Parts> {
    let text = format_args!(
        "`{url}`: stores in buckets need the feature `object`: `cargo install --features object`, or the wheel"
    );
    Err(Error::new(ErrorKind::Invalid, text))
}

/// The same, however it is reached.
#[cfg(feature = "object")]
pub(crate) fn over(bucket: Bucket) -> Parts {
    let ledgers = SharedLedgers::new(Arc::new(ObjectMeta::new(bucket.clone())));
    (Arc::new(ledgers), Arc::new(ObjectVolume::new(bucket)))
}

/// Those of what outlasts a host: in a bucket, or in a directory that other hosts have too, `file:DIR`.
pub(crate) fn at_bucket(url: &str, patience: Duration) -> Result<Parts> {
    match Address::of(url)? {
        Address::Bucket(url) => open_bucket(url, patience),
        Address::Directory(path) if url.starts_with("file:") => {
            let root = path.canonicalize().map_err(|error| unreachable_at(path, &error))?;
            Ok(directory(root))
        }
        _ => {
            let text = format_args!(
                "`{url}` is no bucket: s3://BUCKET/PREFIX, gs://…, az://…, or file:DIR for a directory that all hosts have"
            );
            Err(Error::new(ErrorKind::Invalid, text))
        }
    }
}

pub(crate) fn unreachable_at(path: &Path, error: &std::io::Error) -> Error {
    let path = path.display();
    Error::new(ErrorKind::Unreachable, format_args!("no store at `{path}`: {error}"))
}
