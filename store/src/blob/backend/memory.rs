//! Blobs in the memory of this process.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use tssd_format::{JobChecksums, WriteJob};

use crate::blob::{Part, Reservation, Volume, child_names, split};
use crate::error::{Error, ErrorKind, Result};
use crate::io::local_archive::LocalArchive;
use crate::io::sync::{Lock, MutexGuard};
use crate::ledger::Durability;
use crate::route::{Route, Transport};

/// A volume in the memory of this process.
#[derive(Clone, Debug, Default)]
pub(crate) struct MemoryVolume {
    blobs: Arc<Lock<BTreeMap<String, Bytes>>>,
}

impl MemoryVolume {
    fn blobs(&self) -> MutexGuard<'_, BTreeMap<String, Bytes>> {
        self.blobs.lock()
    }
}

impl Volume for MemoryVolume {
    fn admit(&self, wanted: Durability) -> Result<Durability> {
        match wanted {
            Durability::Memory => Ok(wanted),
            Durability::Disk | Durability::Object => {
                let text = "this store is in memory: what must last needs a directory, or a bucket";
                Err(Error::new(ErrorKind::Invalid, text))
            }
        }
    }

    fn is_in_memory(&self, _name: &str) -> bool {
        true
    }

    fn reserve(
        &self,
        name: &str,
        len: u64,
        _durability: Durability,
    ) -> Result<Box<dyn Reservation>> {
        let too_large =
            |_| Error::new(ErrorKind::Invalid, format_args!("{len} bytes do not fit into memory"));
        let len = usize::try_from(len).map_err(too_large)?;
        // Storages are aligned relative to the blob. A page-aligned blob makes their addresses aligned too.
        let memory = vec![0; len + PAGE];
        let start = memory.as_ptr().align_offset(PAGE);
        let range = start..start + len;
        Ok(Box::new(MemoryReservation {
            volume: self.clone(),
            name: name.to_owned(),
            memory,
            range,
        }))
    }

    fn open(&self, name: &str) -> Result<Option<LocalArchive>> {
        Ok(self.blobs().get(name).cloned().map(LocalArchive::new))
    }

    fn delete(&self, name: &str) -> Result<()> {
        self.blobs().remove(name);
        Ok(())
    }

    fn list(&self, name: &str) -> Result<Vec<String>> {
        let prefix = format!("{name}/");
        let blobs = self.blobs();
        let names = blobs.range(prefix.clone()..).map(|(name, _)| name.as_str());
        Ok(child_names(&prefix, names))
    }

    fn route(&self) -> Route {
        Route::new(Transport::Memory, "the store is in this process")
    }

    fn remove_folder(&self, _name: &str) -> Result<()> {
        Ok(())
    }
}

const PAGE: usize = 4096;

struct MemoryReservation {
    volume: MemoryVolume,
    name: String,
    memory: Vec<u8>,
    range: Range<usize>,
}

impl Reservation for MemoryReservation {
    fn parts(&mut self, lens: &[u64]) -> Vec<Box<dyn Part + '_>> {
        split(&mut self.memory[self.range.clone()], lens)
    }

    fn seal(self: Box<Self>) -> Result<bool> {
        let mut blobs = self.volume.blobs();
        let is_new = !blobs.contains_key(&self.name);
        if is_new {
            blobs.insert(self.name, Bytes::from(self.memory).slice(self.range));
        }
        Ok(is_new)
    }
}

impl Part for &mut [u8] {
    fn write_job(&mut self, job: &WriteJob) -> Result<JobChecksums> {
        job.run(self).map_err(|error| Error::from_request("fill", error))
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.copy_from_slice(bytes);
        Ok(())
    }
}
