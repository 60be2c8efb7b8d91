//! Locates archives that other processes hold, if each host has its own memory.

use std::any::Any;
use std::sync::Arc;

use async_trait::async_trait;

use crate::error::Result;
use crate::ledger::{SessionId, Version};

/// Replicas of a version in other processes.
#[derive(Default)]
pub(crate) struct ResolvedReplicas {
    /// While this is alive, the volume opens the replicas by their names.
    pub(crate) guard: Option<Arc<dyn Any + Send + Sync>>,
    /// Sessions that have ended, and that the ledger still lists as holders of archives of the version.
    pub(crate) ended_sessions: Vec<SessionId>,
}

/// Locates archives that other processes hold.
#[async_trait]
pub(crate) trait ReplicaLocator: Send + Sync {
    /// Returns whether archives are lost with the process that holds them.
    ///
    /// Then the ledger must record which process that is.
    fn is_multi_host(&self) -> bool;

    /// Returns the sessions of all registered processes, with their addresses.
    async fn hosts(&self) -> Result<Vec<(SessionId, String)>>;

    /// Locates the archives of a version that processes other than `own` hold.
    ///
    /// `folder` is the folder of the version in the volume.
    async fn resolve(
        &self,
        folder: &str,
        version: &Version,
        own: SessionId,
    ) -> Result<ResolvedReplicas>;
}

/// A single host: every process that opens the volume finds all archives.
pub(crate) struct SingleHost;

#[async_trait]
impl ReplicaLocator for SingleHost {
    fn is_multi_host(&self) -> bool {
        false
    }

    async fn hosts(&self) -> Result<Vec<(SessionId, String)>> {
        Ok(Vec::new())
    }

    async fn resolve(
        &self,
        _folder: &str,
        _version: &Version,
        _own: SessionId,
    ) -> Result<ResolvedReplicas> {
        Ok(ResolvedReplicas::default())
    }
}
