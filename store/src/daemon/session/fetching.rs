//! Versions that come from other daemons ahead of those who will read them.

use std::time::Instant;

use tssd_format::Archive;

use super::{LONGEST, Session};
use crate::daemon::house::House;
use crate::environment::wait;
use crate::error::{Error, ErrorKind, Result};
use crate::key::Key;
use crate::ledger::Selector;
use crate::net::Endpoint;
use crate::parallel;
use crate::volume::Holder;
use crate::wire::Prefetched;

impl Session {
    /// Copies what of a version is elsewhere: the archives that are named, or all.
    pub(super) async fn prefetch(
        &self,
        key: &Key,
        selector: Selector,
        archives: Option<&[String]>,
    ) -> Result<Prefetched> {
        let started = Instant::now();
        let (grant, far) = self.house.fetch(key, selector, archives).await?;
        let mut bytes = 0;
        for (name, endpoint, len) in far {
            if let Err(error) = self.copy(name, endpoint, len).await {
                self.house.give_up(&grant).await;
                return Err(error);
            }
            bytes += len;
        }
        let fetched = Prefetched { number: grant.number, id: grant.id, bytes };
        self.house.fetched(key, grant).await;
        self.house.counters.count().bytes_fetched += bytes;
        let seconds = started.elapsed().as_secs_f64();
        tracing::debug!(peer = self.peer, %key, version = fetched.number, bytes, seconds, "fetched");
        Ok(fetched)
    }

    /// Copies an archive into this daemon's memory, and proves it.
    async fn copy(&self, name: String, endpoint: Endpoint, len: u64) -> Result<()> {
        let deadline = Instant::now() + LONGEST;
        let mut writing = self.in_memory(deadline, |pool| pool.write_own(len)).await?;
        let number = self.house.number();
        let (house, lines) = (self.house.clone(), self.house.tiers.elsewhere.host(&endpoint));
        wait(move || {
            let failed = |error| Error::io(format_args!("`{name}` from {endpoint}"), error);
            lines.read_exact_at(&name, writing.bytes_mut(), 0).map_err(failed)?;
            // It has its name when it is proven.
            let unproven = format!("fetch/{number}");
            writing.publish(&unproven).map_err(failed)?;
            let proven = prove(&house, &unproven, &name);
            // Somebody else may have been sooner: then his is as good.
            if proven.is_err() || !house.pool.rename(&unproven, &name) {
                house.pool.delete(&unproven);
            }
            // It is there as long as somebody holds the version, as whoever fetches it does.
            house.pool.delete(&name);
            proven
        })
        .await
    }
}

/// Proves an archive that is in memory.
fn prove(house: &House, blob: &str, name: &str) -> Result<()> {
    let failed = |error| Error::format(name, error);
    let opened = house.pool.open(blob).map_err(|error| Error::io(name, error))?;
    let opened = opened.ok_or_else(|| {
        Error::new(ErrorKind::Busy, format_args!("`{name}` was deleted meanwhile"))
    })?;
    let archive = Archive::from_blob(opened.blob).map_err(failed)?;
    parallel::map(archive.verify_jobs(), |job| job.run()).map(drop).map_err(failed)
}
