//! Storage of archives: immutable bytes under names. A volume knows nothing about tensors.

pub(crate) mod backend;
mod delta_reader;
mod remote;
mod requests;
mod verify;

use std::sync::Arc;

use tssd_format::{Blob, JobChecksums, WriteJob};

use crate::error::Result;
use crate::io::local_archive::LocalArchive;
use crate::ledger::Durability;
use crate::route::Route;

pub(crate) use self::delta_reader::open_resolved;
pub(crate) use self::remote::{RangeCopy, RangeJob, RangeReader, RemoteArchive, VerifyMode};
pub(crate) use self::verify::{StreamingVerifier, VerifiedChunks};

/// A store of immutable blobs under names.
///
/// Calls may block on the disk. An async caller runs them on a thread that may block, unless
/// [`is_in_memory`](Self::is_in_memory) is true.
///
/// # Contract
///
/// - A blob exists completely or not at all, also after a crash. It never changes.
/// - Names are `/`-separated.
/// - An open blob stays readable after it is deleted. In the memory of a daemon it does only while it is
///   [held](crate::shm::Pool::hold). In a bucket, reads of it fail with `Overtaken`.
pub(crate) trait Volume: Send + Sync {
    /// Returns the durability that a blob put here gets.
    ///
    /// # Errors
    ///
    /// `Invalid` if the volume cannot provide the wanted durability.
    fn admit(&self, wanted: Durability) -> Result<Durability> {
        Ok(wanted)
    }

    /// Whether no call for this blob blocks on a disk, a network or a GPU.
    ///
    /// The blob is in the memory of this host, or does not exist.
    fn is_in_memory(&self, _name: &str) -> bool {
        false
    }

    /// Reserves space for a new blob of `len` bytes, with at least this durability.
    ///
    /// The blob is invisible until it is sealed. Dropping the reservation frees the space.
    fn reserve(&self, name: &str, len: u64, durability: Durability)
    -> Result<Box<dyn Reservation>>;

    /// Opens a blob. Returns none if it does not exist.
    fn open(&self, name: &str) -> Result<Option<LocalArchive>>;

    /// Opens blobs, local or remote, to read ranges of them. Returns none if one of them does not exist.
    fn open_all(&self, names: &[String]) -> Result<Option<Vec<OpenArchive>>> {
        let open = |name: &String| Ok(self.open(name)?.map(OpenArchive::Local));
        names.iter().map(open).collect()
    }

    /// Deletes a blob, if it exists.
    fn delete(&self, name: &str) -> Result<()>;

    /// Returns the names of the entries directly below `name`, sorted: one path component each.
    fn list(&self, name: &str) -> Result<Vec<String>>;

    /// Returns how bytes reach this volume.
    fn route(&self) -> Route;

    /// Removes an empty folder.
    fn remove_folder(&self, name: &str) -> Result<()>;
}

/// An open archive, local or remote.
#[derive(Clone)]
pub(crate) enum OpenArchive {
    Local(LocalArchive),
    Remote(RemoteArchive),
}

impl OpenArchive {
    pub(crate) fn blob(&self) -> &dyn Blob {
        match self {
            Self::Local(archive) => &*archive.blob,
            Self::Remote(archive) => archive,
        }
    }

    /// Returns an owned handle of the blob.
    pub(crate) fn to_blob(&self) -> Arc<dyn Blob> {
        match self {
            Self::Local(archive) => archive.blob.clone(),
            Self::Remote(archive) => Arc::new(archive.clone()),
        }
    }

    /// Returns the remote archive, if it is one.
    pub(crate) fn remote(&self) -> Option<&RemoteArchive> {
        match self {
            Self::Local(_) => None,
            Self::Remote(archive) => Some(archive),
        }
    }

    /// Whether the index has checksums of the data.
    pub(crate) fn has_checksums(&self) -> bool {
        self.local().is_none_or(|archive| archive.has_checksums)
    }

    /// Returns the archive as a local one, which reads the bytes of a remote one when they are needed.
    pub(crate) fn into_local(self) -> LocalArchive {
        match self {
            Self::Local(archive) => archive,
            Self::Remote(archive) => LocalArchive::new(archive),
        }
    }

    /// Returns the local archive, if it is one.
    pub(crate) fn local(&self) -> Option<&LocalArchive> {
        match self {
            Self::Local(archive) => Some(archive),
            Self::Remote(_) => None,
        }
    }
}

/// A blob being written. It is invisible until it is [sealed](Self::seal).
pub(crate) trait Reservation: Send {
    /// Splits the blob into consecutive parts of these lengths in bytes.
    ///
    /// Each part may be written on its own thread.
    fn parts(&mut self, lens: &[u64]) -> Vec<Box<dyn Part + '_>>;

    /// Makes the blob visible under its name, with the reserved durability.
    ///
    /// Returns false if the name is taken. A bucket also returns true if an equal blob has the name, because the
    /// response to the first request of this put may have been lost.
    fn seal(self: Box<Self>) -> Result<bool>;
}

/// A part of a blob being written.
pub(crate) trait Part: Send {
    /// Starts the parts of a job that can run ahead.
    ///
    /// The caller passes the same job to [`write_job`](Self::write_job) later.
    fn begin(&mut self, _job: &WriteJob) -> Result<()> {
        Ok(())
    }

    /// Runs a job whose range is this part.
    fn write_job(&mut self, job: &WriteJob) -> Result<JobChecksums>;

    /// Writes bytes. Their length is the length of the part.
    fn write(&mut self, bytes: &[u8]) -> Result<()>;
}

/// Splits memory into parts of these lengths in bytes.
pub(crate) fn split<'a>(memory: &'a mut [u8], lens: &[u64]) -> Vec<Box<dyn Part + 'a>> {
    split_slices(memory, lens).map(|slice| Box::new(slice) as Box<dyn Part>).collect()
}

/// Splits memory into slices of these lengths in bytes.
pub(crate) fn split_slices<'a>(
    mut memory: &'a mut [u8],
    lens: &[u64],
) -> impl Iterator<Item = &'a mut [u8]> {
    lens.iter().map(move |len| {
        let len = usize::try_from(*len).unwrap_or(usize::MAX);
        let (slice, rest) = std::mem::take(&mut memory).split_at_mut(len);
        memory = rest;
        slice
    })
}

/// Returns the distinct first path components after `prefix`, sorted. The names must be sorted.
pub(crate) fn child_names<'a>(prefix: &str, names: impl Iterator<Item = &'a str>) -> Vec<String> {
    let below = names.map_while(|name| name.strip_prefix(prefix));
    let mut parts: Vec<String> =
        below.map(|rest| rest.split_once('/').map_or(rest, |(part, _)| part).to_owned()).collect();
    parts.sort_unstable();
    parts.dedup();
    parts
}
