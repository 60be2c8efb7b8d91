//! Waiting for one version after the other.

use super::{Store, TURN};
use crate::controller::VersionInfo;
use crate::error::Result;
use crate::key::Key;
use crate::ledger::VersionId;

/// The versions of a key as they become visible: see [`Store::subscribe`].
#[derive(Debug)]
pub struct Subscription {
    pub(super) store: Store,
    pub(super) key: Key,
    pub(super) seen: Option<VersionId>,
}

impl Subscription {
    /// The newest version, as soon as it is another than the one before. Those that came and were
    /// replaced meanwhile are passed over.
    ///
    /// # Errors
    ///
    /// As [`Store::versions`].
    pub async fn next(&mut self) -> Result<VersionInfo> {
        loop {
            let newer = self.store.0.controller.newer(&self.key, self.seen, TURN).await?;
            if let Some(info) = newer {
                self.seen = Some(info.id);
                return Ok(info);
            }
        }
    }
}
