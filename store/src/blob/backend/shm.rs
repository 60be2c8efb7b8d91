//! The shared memory pool of a daemon as a volume, for reads and writes by the daemon itself.

use std::sync::Arc;

use crate::blob::{Part, Reservation, Volume, child_names, split};
use crate::error::{Error, ErrorKind, Result};
use crate::io::local_archive::LocalArchive;
use crate::ledger::Durability;
use crate::route::{Route, Transport};
use crate::shm::Pool;

/// The blobs of a pool, by name. Blobs written here are copied into segments of the daemon.
#[derive(Clone)]
pub(crate) struct PoolVolume(pub(crate) Arc<Pool>);

impl Volume for PoolVolume {
    fn reserve(
        &self,
        name: &str,
        len: u64,
        _durability: Durability,
    ) -> Result<Box<dyn Reservation>> {
        let len = usize::try_from(len)
            .map_err(|_| Error::new(ErrorKind::Invalid, "it does not fit into memory"))?;
        Ok(Box::new(PoolReservation {
            pool: self.0.clone(),
            name: name.to_owned(),
            bytes: vec![0; len],
        }))
    }

    fn open(&self, name: &str) -> Result<Option<LocalArchive>> {
        self.0.open(name).map_err(|error| Error::io(name, error))
    }

    fn delete(&self, name: &str) -> Result<()> {
        self.0.delete(name);
        Ok(())
    }

    fn list(&self, name: &str) -> Result<Vec<String>> {
        let prefix = format!("{name}/");
        let names = self.0.names(&prefix);
        Ok(child_names(&prefix, names.iter().map(String::as_str)))
    }

    fn route(&self) -> Route {
        Route::new(Transport::SharedMemory, "the daemon is of this host")
    }

    fn remove_folder(&self, _name: &str) -> Result<()> {
        Ok(())
    }
}

struct PoolReservation {
    pool: Arc<Pool>,
    name: String,
    bytes: Vec<u8>,
}

impl Reservation for PoolReservation {
    fn parts(&mut self, lens: &[u64]) -> Vec<Box<dyn Part + '_>> {
        split(&mut self.bytes, lens)
    }

    fn seal(self: Box<Self>) -> Result<bool> {
        match self.pool.write(&self.name, &self.bytes) {
            Ok(Ok(())) => Ok(true),
            Ok(Err(exhausted)) => Err(Error::new(ErrorKind::Busy, exhausted)),
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => Ok(false),
            Err(error) => Err(Error::io(&self.name, error)),
        }
    }
}
