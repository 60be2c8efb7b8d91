//! Versions that come from other daemons ahead of those who will read them.

use std::time::Instant;

use super::{Asked, LONGEST, Session};
use crate::error::{ErrorKind, Result};
use crate::key::Key;
use crate::ledger::Selector;
use crate::net::wire::Prefetched;

impl Session {
    /// Copies what of a version is elsewhere: the archives that are named, or all.
    pub(crate) async fn prefetch(
        &self,
        asked: &Asked,
        key: &Key,
        (selector, archives): (Selector, Option<&[String]>),
    ) -> Result<Prefetched> {
        let started = Instant::now();
        let (grant, far) = self.house.fetch(key, selector, archives).await?;
        let mut bytes = 0;
        for (name, len) in far {
            if let Err(error) = self.copy(asked, &name, len).await {
                self.house.give_up(&grant).await;
                return Err(error);
            }
            bytes += len;
        }
        let fetched = Prefetched { number: grant.number, id: grant.id, bytes };
        self.house.fetched(key, grant).await;
        let seconds = started.elapsed().as_secs_f64();
        tracing::debug!(peer = self.peer, %key, version = fetched.number, bytes, seconds, "fetched");
        Ok(fetched)
    }

    /// Copies an archive into this daemon's memory, and proves it.
    async fn copy(&self, asked: &Asked, name: &str, len: u64) -> Result<()> {
        let (deadline, replicas) = (Instant::now() + LONGEST, &self.house.tiers.replicas);
        replicas.make(name, len, &*self.house.registry).await;
        loop {
            asked.check()?;
            self.in_memory((asked, deadline), 0, |_| replicas.begin(name, len)).await?;
            match replicas.complete(name).await {
                // What is small needs its memory only now.
                Err(error)
                    if error.kind() == ErrorKind::Busy
                        && replicas.let_go_of_one(true, &*self.house.registry).await => {}
                completed => return completed,
            }
        }
    }
}
