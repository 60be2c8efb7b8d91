//! The volume of a daemon: memory, with a directory below it for durable blobs.

use std::sync::Arc;

use super::replicas::Replicas;
use crate::blob::backend::DirectoryVolume;
use crate::blob::backend::PoolVolume;
use crate::blob::{Part, Reservation, Volume, child_names};
use crate::convert::to_u64;
use crate::daemon::remote_blobs::{RemoteBlobIndex, ReplicaLocation};
use crate::error::{Error, ErrorKind, Result};
use crate::io::local_archive::LocalArchive;
use crate::ledger::Durability;
use crate::route::Route;
use crate::shm::{DeviceSpan, Pool, SegmentId, Span};

/// A volume of blobs in memory. Durable blobs are in a directory too.
#[derive(Clone)]
pub(crate) struct TieredVolume {
    pub(crate) pool: Arc<Pool>,
    memory: PoolVolume,
    directory: Option<DirectoryVolume>,
    /// The blobs of other daemons.
    pub(crate) remote_blobs: Arc<RemoteBlobIndex>,
    /// Cached copies of blobs of other daemons.
    pub(crate) replicas: Arc<Replicas>,
}

/// Location of a blob.
pub(crate) enum BlobLocation {
    /// In a segment of host memory, or in a file of the directory that is in the pool as a segment.
    Local(Span),
    /// In the memory of a GPU of this host.
    Device(DeviceSpan),
    /// In another daemon, with the length in bytes.
    Remote(ReplicaLocation, u64),
}

impl BlobLocation {
    /// Returns the segments of this host that contain the blob.
    pub(crate) fn segments(&self) -> impl Iterator<Item = SegmentId> + use<> {
        let (host, device) = match self {
            Self::Local(span) => (Some(span.segment), None),
            Self::Device(span) => (Some(span.host_part.segment), Some(span.device_segment)),
            Self::Remote(..) => (None, None),
        };
        host.into_iter().chain(device)
    }

    /// Returns the length of the blob in bytes.
    pub(crate) fn len(&self) -> u64 {
        match self {
            Self::Local(span) => span.len,
            Self::Device(span) => span.len,
            Self::Remote(_, len) => *len,
        }
    }
}

/// Length in bytes of the parts in which a blob is copied.
const PART_BYTES: usize = 16 << 20;

impl TieredVolume {
    pub(crate) fn new(
        pool: Arc<Pool>,
        directory: Option<DirectoryVolume>,
        remote_blobs: RemoteBlobIndex,
        deltas: bool,
    ) -> Self {
        let remote_blobs = Arc::new(remote_blobs);
        let replicas = Arc::new(Replicas::new(pool.clone(), remote_blobs.clone(), deltas));
        Self { memory: PoolVolume(pool.clone()), pool, directory, remote_blobs, replicas }
    }

    /// Returns the directory.
    ///
    /// # Errors
    ///
    /// `Invalid` if this daemon has none.
    fn directory(&self) -> Result<&DirectoryVolume> {
        self.directory.as_ref().ok_or_else(|| {
            let text =
                "this daemon keeps everything in memory: what must last needs serve --root DIR";
            Error::new(ErrorKind::Invalid, text)
        })
    }

    /// Copies a blob from memory to the directory. It is durable when this returns.
    pub(crate) fn persist(&self, name: &str) -> Result<()> {
        let missing = || Error::new(ErrorKind::Corrupt, format_args!("`{name}` is gone"));
        let blob = self.memory.open(name)?.ok_or_else(missing)?;
        let bytes = blob.blob.bytes().ok_or_else(missing)?;
        write_durable(self.directory()?, name, bytes, &|_| {})
    }

    /// Returns the location of a blob.
    ///
    /// A blob that is only in the directory is added to the pool as a segment.
    pub(crate) fn locate(&self, name: &str) -> Result<Option<BlobLocation>> {
        if let Some(span) = self.pool.device_span(name) {
            return Ok(Some(BlobLocation::Device(span)));
        }
        if let Some(span) = self.pool.span(name) {
            return Ok(Some(BlobLocation::Local(span)));
        }
        if let Some((holder, len)) = self.remote_blobs.locate(name) {
            return Ok(Some(BlobLocation::Remote(holder, len)));
        }
        let Some(directory) = &self.directory else { return Ok(None) };
        let Some((file, len)) = directory.open_file(name)? else { return Ok(None) };
        if len == 0 {
            // An empty file cannot be mapped.
            return Err(Error::new(ErrorKind::Corrupt, format_args!("`{name}` is empty")));
        }
        let opened = directory.open(name)?;
        let size = opened.map(|archive| archive.blob.size()).transpose();
        if size.map_err(|error| Error::io(name, error))?.is_some_and(|size| size != len) {
            let text = format_args!(
                "`{name}` is stored as a delta: serve its directory with --bucket file:DIR instead of --root"
            );
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        Ok(Some(BlobLocation::Local(self.pool.add_file(name, file.into(), len))))
    }
}

/// Writes a durable blob to a volume, in parts on all cores.
///
/// `before` is called before each part, with its length in bytes.
///
/// # Errors
///
/// `Busy` if the volume has another blob of this name.
pub(crate) fn write_durable(
    volume: &dyn Volume,
    name: &str,
    bytes: &[u8],
    before: &(dyn Fn(u64) + Sync),
) -> Result<()> {
    let len = |bytes: &[u8]| to_u64(bytes.len());
    let mut reservation = volume.reserve(name, len(bytes), Durability::Disk)?;
    {
        let sources = bytes.chunks(PART_BYTES);
        let lens: Vec<u64> = sources.clone().map(len).collect();
        let work = sources.zip(reservation.parts(&lens)).collect();
        crate::io::parallel::map(work, |(source, mut part): (&[u8], Box<dyn Part + '_>)| {
            before(len(source));
            part.write(source)
        })?;
    }
    if reservation.seal()? {
        return Ok(());
    }
    // A process that was killed before it recorded the blob may have written the same bytes. That is no conflict.
    let existing = match volume.open(name) {
        // It is stored as a delta whose bases are not there any more.
        Err(error) if matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::Overtaken) => None,
        opened => opened?,
    };
    if existing
        .is_some_and(|existing| existing.blob.bytes().is_some_and(|existing| existing == bytes))
    {
        return Ok(());
    }
    Err(Error::new(ErrorKind::Busy, format_args!("`{name}` is there already")))
}

impl Volume for TieredVolume {
    fn admit(&self, durability: Durability) -> Result<Durability> {
        match durability {
            Durability::Memory | Durability::Object => {}
            Durability::Disk => drop(self.directory()?),
        }
        Ok(durability)
    }

    fn is_in_memory(&self, name: &str) -> bool {
        let is_remote_or_device =
            self.remote_blobs.locate(name).is_some() || self.pool.device_span(name).is_some();
        self.directory.is_none() && !is_remote_or_device
    }

    fn reserve(
        &self,
        name: &str,
        len: u64,
        durability: Durability,
    ) -> Result<Box<dyn Reservation>> {
        let memory = self.memory.reserve(name, len, durability)?;
        Ok(match durability {
            Durability::Memory | Durability::Object => memory,
            Durability::Disk => {
                Box::new(DurableReservation { tiers: self.clone(), name: name.to_owned(), memory })
            }
        })
    }

    fn open(&self, name: &str) -> Result<Option<LocalArchive>> {
        if let Some(blob) = self.memory.open(name)? {
            return Ok(Some(blob));
        }
        if let Some(remote) = self.remote_blobs.open(name) {
            return Ok(Some(LocalArchive::new(remote)));
        }
        self.directory.as_ref().map_or(Ok(None), |directory| directory.open(name))
    }

    fn delete(&self, name: &str) -> Result<()> {
        self.memory.delete(name)?;
        self.remote_blobs.discard(name);
        self.directory.as_ref().map_or(Ok(()), |directory| directory.delete(name))
    }

    fn list(&self, name: &str) -> Result<Vec<String>> {
        let mut names = self.memory.list(name)?;
        let prefix = format!("{name}/");
        let remote_names = self.remote_blobs.names(&prefix);
        names.extend(child_names(&prefix, remote_names.iter().map(String::as_str)));
        if let Some(directory) = &self.directory {
            names.extend(directory.list(name)?);
        }
        names.sort_unstable();
        names.dedup();
        Ok(names)
    }

    fn route(&self) -> Route {
        self.memory.route()
    }

    fn remove_folder(&self, name: &str) -> Result<()> {
        self.directory.as_ref().map_or(Ok(()), |directory| directory.remove_folder(name))
    }
}

/// A reservation of a blob in memory that is copied to the directory when it is sealed.
struct DurableReservation {
    tiers: TieredVolume,
    name: String,
    memory: Box<dyn Reservation>,
}

impl Reservation for DurableReservation {
    fn parts(&mut self, lens: &[u64]) -> Vec<Box<dyn Part + '_>> {
        self.memory.parts(lens)
    }

    fn seal(self: Box<Self>) -> Result<bool> {
        let Self { tiers, name, memory } = *self;
        if !memory.seal()? {
            return Ok(false);
        }
        let persisted = tiers.persist(&name);
        if persisted.is_err() {
            tiers.pool.delete(&name);
        }
        persisted.map(|()| true)
    }
}
