//! Where archives are: bytes by name. A volume never sees a tensor.

pub(crate) mod backend;
mod remote;
mod verify;

use std::sync::Arc;

use tssd_format::{Blob, JobChecksums, WriteJob};

use crate::error::Result;
use crate::io::local_archive::Near;
use crate::ledger::Durability;
use crate::route::Route;

pub(crate) use self::remote::{Boxed, Far, Holder, Job, Proof};
pub(crate) use self::verify::Proving;

/// Immutable blobs by name. Calls may wait for the disk: async callers bring a thread that may, unless
/// [`is_in_memory`](Self::is_in_memory).
///
/// # Contract
///
/// - A blob is there completely or not at all, also after a crash, and never changes.
/// - Names are `/`-separated.
/// - A blob that is open stays readable after it is deleted.
pub(crate) trait Volume: Send + Sync {
    /// How durable what is put here is, if it can be as durable as is wanted.
    fn admit(&self, wanted: Durability) -> Result<Durability> {
        Ok(wanted)
    }

    /// Whether no call on a blob waits for a disk, for others or for a GPU: it is in memory of this host, or nowhere.
    fn is_in_memory(&self, _name: &str) -> bool {
        false
    }

    /// Room for a new blob of this many bytes, which is to be at least so durable. Nobody sees it
    /// before it is sealed; dropping it gives the room back.
    fn reserve(&self, name: &str, len: u64, durability: Durability)
    -> Result<Box<dyn Reservation>>;

    /// A blob, if it is there.
    fn open(&self, name: &str) -> Result<Option<Near>>;

    /// Blobs to be read by ranges, wherever they are; none if one of them is not there.
    fn open_all(&self, names: &[String]) -> Result<Option<Vec<Archived>>> {
        let open = |name: &String| Ok(self.open(name)?.map(Archived::Near));
        names.iter().map(open).collect()
    }

    /// Deletes a blob, if it is there.
    fn delete(&self, name: &str) -> Result<()>;

    /// The last parts of the names directly below `name`, sorted.
    fn list(&self, name: &str) -> Result<Vec<String>>;

    /// How bytes come here.
    fn route(&self) -> Route;

    /// Forgets a folder that is empty.
    fn remove_folder(&self, name: &str) -> Result<()>;
}

/// An archive that is open, wherever it is.
#[derive(Clone)]
pub(crate) enum Archived {
    Near(Near),
    Far(Far),
}

impl Archived {
    pub(crate) fn blob(&self) -> &dyn Blob {
        match self {
            Self::Near(near) => &*near.blob,
            Self::Far(far) => far,
        }
    }

    /// The same, to be kept.
    pub(crate) fn to_blob(&self) -> Arc<dyn Blob> {
        match self {
            Self::Near(near) => near.blob.clone(),
            Self::Far(far) => Arc::new(far.clone()),
        }
    }

    /// If its bytes are elsewhere, where.
    pub(crate) fn far(&self) -> Option<&Far> {
        match self {
            Self::Near(_) => None,
            Self::Far(far) => Some(far),
        }
    }

    /// Whether its index has the checksums of its bytes.
    pub(crate) fn is_summed(&self) -> bool {
        self.near().is_none_or(|near| near.is_summed)
    }

    /// If its bytes are here, where.
    pub(crate) fn near(&self) -> Option<&Near> {
        match self {
            Self::Near(near) => Some(near),
            Self::Far(_) => None,
        }
    }
}

/// A blob that is being written.
pub(crate) trait Reservation: Send {
    /// Its parts, one for each of these lengths in bytes from its beginning on; each may be written
    /// on a thread of its own.
    fn parts(&mut self, lens: &[u64]) -> Vec<Box<dyn Part + '_>>;

    /// Makes it visible under its name, as durable as it is to be; false if the name is taken.
    fn seal(self: Box<Self>) -> Result<bool>;
}

/// A part of a blob that is being written.
pub(crate) trait Part: Send {
    /// Begins ahead what of a job can be. [`fill`](Self::fill) is called with the same job later.
    fn begin(&mut self, _job: &WriteJob) -> Result<()> {
        Ok(())
    }

    /// Runs a job whose range is this part.
    fn fill(&mut self, job: &WriteJob) -> Result<JobChecksums>;

    /// Writes these bytes, which are as long as the part.
    fn write(&mut self, bytes: &[u8]) -> Result<()>;
}

/// Memory as parts of these lengths.
pub(crate) fn split<'a>(memory: &'a mut [u8], lens: &[u64]) -> Vec<Box<dyn Part + 'a>> {
    slices(memory, lens).map(|slice| Box::new(slice) as Box<dyn Part>).collect()
}

/// Memory in pieces of these lengths.
pub(crate) fn slices<'a>(
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

/// The first parts of what follows a prefix in names that are sorted, each once.
pub(crate) fn directly_below<'a>(
    prefix: &str,
    names: impl Iterator<Item = &'a str>,
) -> Vec<String> {
    let below = names.map_while(|name| name.strip_prefix(prefix));
    let mut parts: Vec<String> =
        below.map(|rest| rest.split_once('/').map_or(rest, |(part, _)| part).to_owned()).collect();
    parts.sort_unstable();
    parts.dedup();
    parts
}
