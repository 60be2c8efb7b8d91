use std::sync::Arc;
use std::time::Duration;

use super::reader::VersionReader;
use crate::control::VersionFollower;
use crate::engine::context::Context;
use crate::engine::get::GetOptions;
use crate::error::Result;
use crate::key::Key;

/// Receives every version of a key that becomes visible from now on.
///
/// See [`Store::follow`](crate::Store::follow). Dropping the follower ends that.
pub struct Follower {
    context: Arc<Context>,
    key: Key,
    following: Box<dyn VersionFollower>,
}

impl Follower {
    pub(super) async fn new(context: &Arc<Context>, key: &Key) -> Result<Self> {
        let following = context.controller().follow(key).await?;
        Ok(Self { context: context.clone(), key: key.clone(), following })
    }

    /// Returns the key.
    pub fn key(&self) -> &Key {
        &self.key
    }

    /// Returns the next version, under a lease, or none after `timeout`.
    ///
    /// The version number in the options is ignored.
    ///
    /// # Errors
    ///
    /// As [`Store::open`](crate::Store::open); `Busy` in place of versions that were dropped
    /// because too many waited.
    pub async fn next(
        &mut self,
        options: &GetOptions,
        timeout: Duration,
    ) -> Result<Option<VersionReader>> {
        let next = self.context.open_next(&self.key, &mut *self.following, options, timeout);
        match next.await? {
            Some(version) => VersionReader::new(self.context.clone(), version, options).map(Some),
            None => Ok(None),
        }
    }
}

impl std::fmt::Debug for Follower {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Follower").field("key", &self.key).finish_non_exhaustive()
    }
}
