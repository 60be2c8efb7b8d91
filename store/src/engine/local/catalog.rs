//! The catalog of the local controller.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use async_trait::async_trait;

use super::LocalController;
use crate::control::{Catalog, KnownVersion, VersionInfo};
use crate::engine::local::effects::VERIFICATION_TIMEOUT;
use crate::error::{Error, Result};
use crate::key::Key;
use crate::ledger::{Command, Label, Outcome, Selection, Selector};

#[async_trait]
impl Catalog for LocalController {
    async fn versions(&self, key: &Key) -> Result<Vec<VersionInfo>> {
        Ok(self.state(key).await?.visible().map(VersionInfo::of).collect())
    }

    async fn wait_for_newer(
        &self,
        key: &Key,
        seen: Option<KnownVersion>,
        timeout: Duration,
    ) -> Result<Option<VersionInfo>> {
        let deadline = Instant::now().checked_add(timeout);
        loop {
            let state = self.state(key).await?;
            if let Some(head) = state.head().filter(|head| !seen.is_some_and(|seen| seen.is(head)))
            {
                return Ok(Some(VersionInfo::of(head)));
            }
            let left = deadline.map_or(Duration::MAX, |deadline| {
                deadline.saturating_duration_since(Instant::now())
            });
            if left.is_zero() {
                return Ok(None);
            }
            // A pending verification may be overdue after this time. Then `state` takes it over.
            self.0.ledgers.changed(key, &state, left.min(VERIFICATION_TIMEOUT)).await;
        }
    }

    async fn keys(&self, prefix: &str) -> Result<Vec<Key>> {
        let mut keys = self.0.ledgers.keys().await?;
        keys.retain(|key| key.as_str().starts_with(prefix));
        let mut visible = Vec::with_capacity(keys.len());
        for key in keys {
            // A key whose ledger cannot be read is listed too: a read of the key returns the error.
            if self.0.ledgers.state(&key).await.is_ok_and(|state| state.head().is_none()) {
                continue;
            }
            visible.push(key);
        }
        visible.sort_unstable();
        Ok(visible)
    }

    async fn delete(&self, key: &Key, selection: Selection) -> Result<u64> {
        let outcome = self.apply(key, Command::Delete { selection }).await?;
        // They are closed here even if another process deletes the data.
        if let Outcome::Deleted { ids } = &outcome {
            for id in ids {
                self.evict_located(key, *id);
            }
        }
        self.run_pending_deletions(key).await?;
        Ok(match outcome {
            Outcome::Deleted { ids } => u64::try_from(ids.len()).unwrap_or(u64::MAX),
            _ => 0,
        })
    }

    async fn retain(&self, key: &Key, keep: NonZeroU32, ttl: Option<Duration>) -> Result<()> {
        self.apply(key, Command::Retain { keep, ttl }).await?;
        self.run_pending_deletions(key).await
    }

    async fn pin(&self, key: &Key, selector: Selector, label: &Label) -> Result<u64> {
        let command = Command::Pin { selector, label: label.clone() };
        let outcome = self.apply(key, command).await?;
        self.run_pending_deletions(key).await?;
        match outcome {
            Outcome::Pinned { number, .. } => Ok(number),
            other => unreachable!("pin does not lead to {other:?}"),
        }
    }

    async fn rollback(&self, key: &Key, selector: Selector) -> Result<VersionInfo> {
        let command = Command::Rollback { selector, position: None, now: self.now() };
        let outcome = self.apply(key, command).await?;
        let Outcome::RolledBack { id } = outcome else {
            unreachable!("a rollback does not lead to {outcome:?}")
        };
        self.run_pending_deletions(key).await?;
        let state = self.state(key).await?;
        // Another process may have deleted it meanwhile.
        let version = state.select(&Selector::Id(id));
        version.map(VersionInfo::of).map_err(|refusal| Error::from_refusal(key, refusal))
    }

    async fn unpin(&self, key: &Key, label: &str) -> Result<()> {
        self.apply(key, Command::Unpin { label: label.to_owned() }).await?;
        self.run_pending_deletions(key).await
    }

    async fn pins(&self, key: &Key) -> Result<BTreeMap<String, u64>> {
        let state = self.state(key).await?;
        let find = |id| state.versions().find(|version| version.id == id);
        let pins = state
            .pins()
            .filter_map(|(label, id)| find(id).map(|version| (label.to_owned(), version.number)));
        Ok(pins.collect())
    }
}
