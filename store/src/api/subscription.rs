use std::sync::Arc;
use std::time::Duration;

use crate::control::{KnownVersion, VersionInfo};
use crate::engine::context::Context;
use crate::error::Result;
use crate::key::Key;

/// How long one request waits for a newer version.
///
/// A request of a dropped future ends after this time.
pub(super) const POLL_TIMEOUT: Duration = Duration::from_secs(1);

/// Waits for new versions of a key: see [`Store::subscribe`](crate::Store::subscribe).
#[derive(Debug)]
pub struct Subscription {
    context: Arc<Context>,
    key: Key,
    seen: Option<KnownVersion>,
}

impl Subscription {
    pub(super) fn new(context: &Arc<Context>, key: &Key) -> Self {
        Self { context: context.clone(), key: key.clone(), seen: None }
    }

    /// Waits until the newest version differs from the one that was returned last.
    ///
    /// Versions that were replaced in between are skipped.
    ///
    /// # Errors
    ///
    /// As [`Store::versions`](crate::Store::versions).
    pub async fn next(&mut self) -> Result<VersionInfo> {
        loop {
            let controller = self.context.controller();
            if let Some(info) =
                controller.wait_for_newer(&self.key, self.seen, POLL_TIMEOUT).await?
            {
                self.seen = Some(KnownVersion::from(&info));
                return Ok(info);
            }
        }
    }
}
