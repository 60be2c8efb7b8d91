//! Where work is done: right here, on a thread that may wait, or a while later.

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::error::{Error, Result};
use crate::sync::spawn_blocking;

/// Runs something that takes long on a thread that may.
pub(crate) async fn wait<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let span = tracing::Span::current();
    spawn_blocking(move || span.in_scope(work))
        .await
        .map_err(|error| Error::io("a thread of the store ended", std::io::Error::other(error)))?
}

/// Whoever asks for something that touches no more bytes than these, of memory alone, does it [at once](at_once): to
/// hand it to another thread, and to hear of it, takes longer.
pub(crate) const BRIEF: u64 = 256 << 10;

/// Runs something brief right here. A panic is an error, as it is where another thread runs it.
pub(crate) fn at_once<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| {
        Err(Error::io("work of the store ended", std::io::Error::other("it panicked")))
    })
}

/// Waits before something is tried again: longer each time, and never as long as others do.
#[cfg(any(feature = "etcd", feature = "object", target_os = "linux"))]
pub(crate) async fn pause(tries: u32) {
    let mut random = [0];
    let _ = getrandom::fill(&mut random);
    let longest = 100_u64 << tries.min(6);
    let span = longest / 2 + longest * u64::from(random[0]) / 512;
    tokio::time::sleep(std::time::Duration::from_millis(span)).await;
}

/// Runs something that takes long on this thread, whose other tasks go elsewhere if they can.
pub(crate) fn in_place<T>(work: impl FnOnce() -> T) -> T {
    use tokio::runtime::{Handle, RuntimeFlavor};
    match Handle::current().runtime_flavor() {
        RuntimeFlavor::MultiThread => tokio::task::block_in_place(work),
        _ => work(),
    }
}
