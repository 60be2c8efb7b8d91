//! Versions on their way to a bucket.

use super::LocalController;
use crate::control::Contributed;
use crate::error::Result;
use crate::key::Key;
use crate::ledger::{Command, VersionId};

impl LocalController {
    /// What is committed to the versions of a key that are on their way to a bucket.
    pub(crate) async fn to_be_stored(&self, key: &Key) -> Result<Vec<Contributed>> {
        let state = self.0.ledgers.state(key).await?;
        let coming = state.versions().filter(|version| version.is_to_be_stored());
        Ok(coming.flat_map(|version| Contributed::of(key, version)).collect())
    }

    /// All of a version is in the bucket that was asked for.
    pub(crate) async fn stored(&self, key: &Key, id: VersionId) -> Result<()> {
        self.apply(key, Command::Stored { id }).await?;
        // What this has retired.
        let _ = self.reclaim_owed(key).await;
        Ok(())
    }

    /// A version will not be in the bucket that was asked for.
    pub(crate) async fn not_stored(&self, key: &Key, id: VersionId) -> Result<()> {
        self.apply(key, Command::NotStored { id }).await?;
        self.reclaim_owed(key).await
    }
}
