//! Who keeps what, where each host has its memory for itself.

use std::any::Any;
use std::sync::Arc;

use async_trait::async_trait;

use crate::error::Result;
use crate::ledger::{SessionId, Version};

/// What of a version others keep.
#[derive(Default)]
pub(crate) struct Reached {
    /// As long as it lives, the volume opens that by its name.
    pub(crate) held: Option<Arc<dyn Any + Send + Sync>>,
    /// Who kept some of it and has ended.
    pub(crate) ended: Vec<SessionId>,
}

/// Finds what other processes keep.
#[async_trait]
pub(crate) trait Keepers: Send + Sync {
    /// Whether archives end with the process that keeps them, and all others need to know which it is.
    fn are_many(&self) -> bool;

    /// All of them that are found, with their addresses.
    async fn all(&self) -> Result<Vec<(SessionId, String)>>;

    /// Finds what of a version others keep than a process.
    async fn reach(&self, folder: &str, version: &Version, own: SessionId) -> Result<Reached>;
}

/// Whoever opens the volume finds all there is.
pub(crate) struct Everyone;

#[async_trait]
impl Keepers for Everyone {
    fn are_many(&self) -> bool {
        false
    }

    async fn all(&self) -> Result<Vec<(SessionId, String)>> {
        Ok(Vec::new())
    }

    async fn reach(&self, _folder: &str, _version: &Version, _own: SessionId) -> Result<Reached> {
        Ok(Reached::default())
    }
}
