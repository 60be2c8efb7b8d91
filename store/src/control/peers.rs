//! What a controller knows of other processes.

use std::sync::Arc;

use async_trait::async_trait;

use crate::control::replica_locator::{ReplicaLocator, SingleHost};
use crate::error::Result;
use crate::ledger::{RunId, RunStatus};

/// What a controller knows of other processes: the archives that they hold, and the runs that they belong to.
pub(crate) struct Peers {
    pub(crate) replica_locator: Arc<dyn ReplicaLocator>,
    pub(crate) runs: Arc<dyn RunDirectory>,
}

impl Default for Peers {
    fn default() -> Self {
        Self { replica_locator: Arc::new(SingleHost), runs: Arc::new(UnknownRuns) }
    }
}

/// Finds the connected processes of runs.
#[async_trait]
pub(crate) trait RunDirectory: Send + Sync {
    /// Returns whether a process of a run is connected.
    ///
    /// # Errors
    ///
    /// `Unreachable` if a daemon to which such a process may be connected does not answer.
    async fn status(&self, run: &RunId) -> Result<RunStatus>;
}

/// A store to which processes do not connect.
struct UnknownRuns;

#[async_trait]
impl RunDirectory for UnknownRuns {
    async fn status(&self, _run: &RunId) -> Result<RunStatus> {
        Ok(RunStatus::Unknown)
    }
}
