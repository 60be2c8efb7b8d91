//! The volume of a daemon: memory, and below it a directory for what must last.

use std::sync::Arc;

use super::elsewhere::{Elsewhere, Keeper};
use super::replicas::Replicas;
use crate::blob::backend::ArenaVolume;
use crate::blob::backend::DirectoryVolume;
use crate::blob::{Part, Reservation, Volume, directly_below};
use crate::error::{Error, ErrorKind, Result};
use crate::io::local_archive::Near;
use crate::ledger::Durability;
use crate::route::Route;
use crate::shm::{Hollow, Pool, SegmentId, Span};

/// Blobs in memory, and those that are durable in a directory too.
#[derive(Clone)]
pub(crate) struct Tiers {
    pub(crate) pool: Arc<Pool>,
    memory: ArenaVolume,
    directory: Option<DirectoryVolume>,
    /// What other daemons keep.
    pub(crate) elsewhere: Arc<Elsewhere>,
    /// What of that readers of this host have asked for.
    pub(crate) replicas: Arc<Replicas>,
}

/// Where a blob is.
pub(crate) enum Place {
    Here(Span),
    /// In the memory of a GPU.
    Hollow(Hollow),
    /// So many bytes that this daemon keeps.
    There(Keeper, u64),
}

impl Place {
    /// The segments that have it.
    pub(crate) fn segments(&self) -> impl Iterator<Item = SegmentId> + use<> {
        let (one, other) = match self {
            Self::Here(span) => (Some(span.segment), None),
            Self::Hollow(hollow) => (Some(hollow.shell.segment), Some(hollow.device)),
            Self::There(..) => (None, None),
        };
        one.into_iter().chain(other)
    }

    /// How many bytes it has.
    pub(crate) fn len(&self) -> u64 {
        match self {
            Self::Here(span) => span.len,
            Self::Hollow(hollow) => hollow.len,
            Self::There(_, len) => *len,
        }
    }
}

/// A file is copied in parts of this many bytes.
const PART_BYTES: usize = 16 << 20;

impl Tiers {
    pub(crate) fn new(
        pool: Arc<Pool>,
        directory: Option<DirectoryVolume>,
        elsewhere: Elsewhere,
    ) -> Self {
        let elsewhere = Arc::new(elsewhere);
        let replicas = Arc::new(Replicas::new(pool.clone(), elsewhere.clone()));
        Self { memory: ArenaVolume(pool.clone()), pool, directory, elsewhere, replicas }
    }

    /// The directory, if there is one; the daemon keeps nothing else.
    fn directory(&self) -> Result<&DirectoryVolume> {
        self.directory.as_ref().ok_or_else(|| {
            let text =
                "this daemon keeps everything in memory: what must last needs serve --root DIR";
            Error::new(ErrorKind::Invalid, text)
        })
    }

    /// Copies a blob from memory to the directory: it is there, durably, when this returns.
    pub(crate) fn persist(&self, name: &str) -> Result<()> {
        let gone = || Error::new(ErrorKind::Corrupt, format_args!("`{name}` is gone"));
        let blob = self.memory.open(name)?.ok_or_else(gone)?;
        let bytes = blob.blob.bytes().ok_or_else(gone)?;
        write(self.directory()?, name, bytes, &|_| {})
    }

    /// Where a blob is; one that is in the directory alone is opened.
    pub(crate) fn place(&self, name: &str) -> Result<Option<Place>> {
        if let Some(hollow) = self.pool.hollow(name) {
            return Ok(Some(Place::Hollow(hollow)));
        }
        if let Some(span) = self.pool.span(name) {
            return Ok(Some(Place::Here(span)));
        }
        if let Some((keeper, len)) = self.elsewhere.place(name) {
            return Ok(Some(Place::There(keeper, len)));
        }
        let Some(directory) = &self.directory else { return Ok(None) };
        let Some((file, len)) = directory.lend(name)? else { return Ok(None) };
        if len == 0 {
            // Nobody could map it.
            return Err(Error::new(ErrorKind::Corrupt, format_args!("`{name}` is empty")));
        }
        Ok(Some(Place::Here(self.pool.adopt(name, file.into(), len))))
    }
}

/// Writes a blob where it lasts, in parts on all cores; before each part it is said how many bytes that has.
pub(crate) fn write(
    volume: &dyn Volume,
    name: &str,
    bytes: &[u8],
    before: &(dyn Fn(u64) + Sync),
) -> Result<()> {
    let len = |bytes: &[u8]| u64::try_from(bytes.len()).expect("usize is at most 64 bits");
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
    // A process that was killed before it could say so may have written the same: a proof is taken over.
    let there = volume.open(name)?;
    if there.is_some_and(|there| there.blob.bytes().is_some_and(|there| there == bytes)) {
        return Ok(());
    }
    Err(Error::new(ErrorKind::Busy, format_args!("`{name}` is there already")))
}

impl Volume for Tiers {
    fn admit(&self, wanted: Durability) -> Result<Durability> {
        match wanted {
            Durability::Memory | Durability::Object => {}
            Durability::Disk => drop(self.directory()?),
        }
        Ok(wanted)
    }

    fn is_in_memory(&self, name: &str) -> bool {
        let is_elsewhere = self.elsewhere.place(name).is_some() || self.pool.hollow(name).is_some();
        self.directory.is_none() && !is_elsewhere
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
                Box::new(Reserved { tiers: self.clone(), name: name.to_owned(), memory })
            }
        })
    }

    fn open(&self, name: &str) -> Result<Option<Near>> {
        if let Some(blob) = self.memory.open(name)? {
            return Ok(Some(blob));
        }
        if let Some(far) = self.elsewhere.open(name) {
            return Ok(Some(Near::new(far)));
        }
        self.directory.as_ref().map_or(Ok(None), |directory| directory.open(name))
    }

    fn delete(&self, name: &str) -> Result<()> {
        self.memory.delete(name)?;
        self.elsewhere.discard(name);
        self.directory.as_ref().map_or(Ok(()), |directory| directory.delete(name))
    }

    fn list(&self, name: &str) -> Result<Vec<String>> {
        let mut names = self.memory.list(name)?;
        let prefix = format!("{name}/");
        let elsewhere = self.elsewhere.names(&prefix);
        names.extend(directly_below(&prefix, elsewhere.iter().map(String::as_str)));
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

/// A blob that goes to the directory as well.
struct Reserved {
    tiers: Tiers,
    name: String,
    memory: Box<dyn Reservation>,
}

impl Reservation for Reserved {
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
