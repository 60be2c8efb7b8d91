//! A file descriptor in reserve for the case that the process has no others left.

use std::fs::File;
use std::io;
use std::time::Duration;

/// Time to wait for a descriptor to become free.
const RETRY_DELAY: Duration = Duration::from_millis(50);

/// A file descriptor in reserve.
///
/// If no descriptors are left, the daemon closes it to accept one connection and to close that at once. The client
/// then sees immediately that it is not served, instead of waiting in the backlog.
pub(crate) struct ReserveFd(Option<File>);

impl ReserveFd {
    pub(crate) fn new() -> Self {
        Self(File::open("/dev/null").ok())
    }

    /// Closes the connection that has waited longest, unless a descriptor becomes free soon.
    ///
    /// Called after `accept` has failed. Returns the number of connections that were closed, 0 or 1.
    pub(crate) async fn reject_one<T>(
        &mut self,
        accept: impl Future<Output = io::Result<T>>,
    ) -> u64 {
        tokio::time::sleep(RETRY_DELAY / 10).await;
        if File::open("/dev/null").is_ok() {
            // A descriptor is free again: the connection can be served.
            return 0;
        }
        self.0 = None;
        // A zero timeout: only a connection that waits already is accepted.
        let shed = tokio::time::timeout(Duration::ZERO, accept).await;
        let is_shed = matches!(shed, Ok(Ok(_)));
        drop(shed);
        *self = Self::new();
        if !is_shed {
            tokio::time::sleep(RETRY_DELAY).await;
        }
        u64::from(is_shed)
    }
}
