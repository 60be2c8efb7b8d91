//! Following a key: every version of it, one after the other, and none is missed.

use std::time::Duration;

use crate::controller::Following;
use crate::error::Result;
use crate::get::GetOptions;
use crate::key::Key;
use crate::opened::Opened;
use crate::store::Store;
use crate::version::OpenVersion;

/// Every version of a key from a moment on: see [`Store::follow`]. Dropped, it follows the key no longer.
pub struct Follower {
    store: Store,
    key: Key,
    following: Box<dyn Following>,
}

impl Follower {
    pub(crate) async fn new(store: &Store, key: &Key) -> Result<Self> {
        let following = store.controller().follow(key).await?;
        Ok(Self { store: store.clone(), key: key.clone(), following })
    }

    /// The key.
    pub fn key(&self) -> &Key {
        &self.key
    }

    /// The next version, under its lease; none if there is none within `timeout`. `version` of the options says nothing.
    ///
    /// # Errors
    ///
    /// As [`Store::open`]; `Busy` in place of versions that were missed because too many waited.
    pub async fn next(
        &mut self,
        options: &GetOptions,
        timeout: Duration,
    ) -> Result<Option<Opened>> {
        match self.open(options, timeout).await? {
            Some(version) => Opened::new(self.store.clone(), version, options).map(Some),
            None => Ok(None),
        }
    }

    pub(crate) async fn open(
        &mut self,
        options: &GetOptions,
        timeout: Duration,
    ) -> Result<Option<OpenVersion>> {
        let Some(located) = self.following.next(timeout).await? else { return Ok(None) };
        located.route.admit(options.require)?;
        self.store.open_located(&self.key, located).await.map(Some)
    }
}

impl std::fmt::Debug for Follower {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Follower").field("key", &self.key).finish_non_exhaustive()
    }
}
