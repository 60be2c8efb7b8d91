//! Prefetches: copies of versions from other daemons, before they are read.

use std::time::Instant;

use super::{InFlightRequest, MAX_WAIT, Session};
use crate::error::{ErrorKind, Result};
use crate::key::Key;
use crate::ledger::Selector;
use crate::net::wire::PrefetchReply;

impl Session {
    /// Copies the remote archives of a version into memory: the named ones, or all.
    pub(crate) async fn prefetch(
        &self,
        in_flight: &InFlightRequest,
        key: &Key,
        selector: Selector,
        archives: Option<&[String]>,
    ) -> Result<PrefetchReply> {
        let started = Instant::now();
        let (grant, remote) = self.state.begin_prefetch(key, selector, archives).await?;
        let (mut bytes, mut size, mut base) = (0, 0, None);
        for (name, len) in remote {
            if let Err(error) = self.copy_archive(in_flight, &name, len).await {
                self.state.abort_prefetch(&grant).await;
                return Err(error);
            }
            // It may be evicted already.
            let fetched = self.state.volume.replicas.fetched(&name).unwrap_or((len, None));
            size += len;
            bytes += fetched.0;
            base = base.max(fetched.1);
        }
        let prefetched = PrefetchReply { number: grant.number, id: grant.id, bytes, size, base };
        self.state.finish_prefetch(key, grant).await;
        let seconds = started.elapsed().as_secs_f64();
        tracing::debug!(peer = self.peer, %key, version = prefetched.number, bytes, seconds, "fetched");
        Ok(prefetched)
    }

    /// Copies an archive into the memory of this daemon, and verifies it.
    async fn copy_archive(&self, in_flight: &InFlightRequest, name: &str, len: u64) -> Result<()> {
        let (deadline, replicas) = (Instant::now() + MAX_WAIT, &self.state.volume.replicas);
        replicas.prepare(name, len, &*self.state.control_plane).await;
        loop {
            in_flight.check_cancelled()?;
            self.with_memory(in_flight, deadline, 0, |_| replicas.allocate(name, len)).await?;
            match replicas.complete(name).await {
                // A small archive allocates its memory in the pool only when it is complete.
                Err(error)
                    if error.kind() == ErrorKind::Busy
                        && replicas.evict_one(true, &*self.state.control_plane).await => {}
                completed => return completed,
            }
        }
    }
}
