//! Versions that are uploaded to a bucket.

use super::LocalController;
use crate::control::CommittedContribution;
use crate::error::Result;
use crate::key::Key;
use crate::ledger::{Command, VersionId};

impl LocalController {
    /// Returns the committed contributions to versions of a key that are not in the bucket yet.
    pub(crate) async fn pending_uploads(&self, key: &Key) -> Result<Vec<CommittedContribution>> {
        let state = self.0.ledgers.state(key).await?;
        let pending = state.versions().filter(|version| version.is_upload_pending());
        Ok(pending.flat_map(|version| CommittedContribution::of(key, version)).collect())
    }

    /// Marks a version as stored: all of it is in the requested bucket.
    pub(crate) async fn mark_stored(&self, key: &Key, id: VersionId) -> Result<()> {
        self.apply(key, Command::Uploaded { id }).await?;
        // This may have retired older versions.
        let _ = self.run_pending_deletions(key).await;
        Ok(())
    }

    /// Marks a version as one that will not be in the requested bucket.
    pub(crate) async fn mark_not_stored(&self, key: &Key, id: VersionId) -> Result<()> {
        self.apply(key, Command::NotUploaded { id }).await?;
        self.run_pending_deletions(key).await
    }
}
