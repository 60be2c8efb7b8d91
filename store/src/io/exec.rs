//! Execution of blocking work: inline, on a blocking thread, or after a delay.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::{Pin, pin};
use std::sync::Arc;

use tokio::runtime::Runtime;

use crate::error::{Error, Result};
use crate::io::sync::{Lock, spawn_blocking};

/// Maximum bytes that work in memory may touch to run [inline](run_inline).
///
/// For less work, the hand-over to another thread takes longer than the work.
pub(crate) const INLINE_MAX_BYTES: u64 = 256 << 10;

/// Runs blocking work on a thread of the runtime that may block.
pub(crate) async fn run_blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let span = tracing::Span::current();
    let result = Arc::new(Lock::new(None));
    let slot = result.clone();
    let task = Box::new(move || {
        let done = span.in_scope(work);
        *slot.lock() = Some(done);
    });
    run_task(task).await?;
    let done = result.lock().take();
    done.expect("a task that ended well has written its result")
}

/// Runs a task on a blocking thread. It is not generic: the code of the runtime is compiled only once.
async fn run_task(task: Box<dyn FnOnce() + Send>) -> Result<()> {
    spawn_blocking(task)
        .await
        .map_err(|error| Error::io("a thread of the store ended", std::io::Error::other(error)))
}

/// Runs a future to completion on this thread.
pub(crate) fn block_on<F: Future>(runtime: &Runtime, future: F) -> F::Output {
    // Without an output, all futures have one type for the runtime, whose code is compiled only once.
    let mut output = None;
    {
        let mut future = pin!(async { output = Some(future.await) });
        runtime.block_on(future.as_mut() as Pin<&mut dyn Future<Output = ()>>);
    }
    output.expect("the future has completed")
}

/// Runs short work on this thread. A panic becomes an error, as on another thread.
pub(crate) fn run_inline<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| {
        Err(Error::io("work of the store ended", std::io::Error::other("it panicked")))
    })
}

/// Sleeps before a retry. The delay grows with each try and is partly random.
#[cfg(any(feature = "etcd", feature = "object", target_os = "linux"))]
pub(crate) async fn backoff(tries: u32) {
    let mut random = [0];
    let _ = getrandom::fill(&mut random);
    let limit = 100_u64 << tries.min(6);
    let span = limit / 2 + limit * u64::from(random[0]) / 512;
    tokio::time::sleep(std::time::Duration::from_millis(span)).await;
}

/// Runs long work on this thread. A multi-threaded runtime moves its other tasks to other threads.
pub(crate) fn block_in_place<T>(work: impl FnOnce() -> T) -> T {
    use tokio::runtime::{Handle, RuntimeFlavor};
    match Handle::current().runtime_flavor() {
        RuntimeFlavor::MultiThread => tokio::task::block_in_place(work),
        _ => work(),
    }
}
