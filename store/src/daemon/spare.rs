//! A descriptor for the time when there are no others.

use std::fs::File;
use std::io;
use std::time::Duration;

/// For how long it is waited that somebody leaves.
const SCARCE: Duration = Duration::from_millis(50);

/// Kept open, so that there is one to take a connection with when there are no more, and to end it: then its client
/// hears at once that it cannot be served, in place of waiting among others who cannot.
pub(crate) struct Spare(Option<File>);

impl Spare {
    pub(crate) fn new() -> Self {
        Self(File::open("/dev/null").ok())
    }

    /// After a connection could not be taken: if nobody leaves soon, the one that has waited longest is ended. Says how
    /// many were.
    pub(crate) async fn shed<T>(&mut self, accept: impl Future<Output = io::Result<T>>) -> u64 {
        tokio::time::sleep(SCARCE / 10).await;
        if File::open("/dev/null").is_ok() {
            // Somebody has left: whoever comes is served.
            return 0;
        }
        self.0 = None;
        // Who has not come yet is not meant.
        let shed = tokio::time::timeout(Duration::ZERO, accept).await;
        let is_shed = matches!(shed, Ok(Ok(_)));
        drop(shed);
        *self = Self::new();
        if !is_shed {
            tokio::time::sleep(SCARCE).await;
        }
        u64::from(is_shed)
    }
}
