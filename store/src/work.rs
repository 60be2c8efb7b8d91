//! Where work is done: right here, on a thread that may wait, or a while later.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex};

use tokio::runtime::Runtime;

use crate::error::{Error, Result};
use crate::sync::spawn_blocking;

/// Runs blocking work on a thread of the runtime that may block.
pub(crate) async fn wait<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let span = tracing::Span::current();
    let result = Arc::new(Mutex::new(None));
    let slot = result.clone();
    let task = Box::new(move || {
        let done = span.in_scope(work);
        *slot.lock().expect("no other thread uses it now") = Some(done);
    });
    run_blocking(task).await?;
    let done = result.lock().expect("the task has ended").take();
    done.expect("a task that ended well has written its result")
}

/// Not generic: code of the runtime is compiled once, not for each kind of work.
async fn run_blocking(task: Box<dyn FnOnce() + Send>) -> Result<()> {
    spawn_blocking(task)
        .await
        .map_err(|error| Error::io("a thread of the store ended", std::io::Error::other(error)))
}

/// Runs a future to completion on this thread.
pub(crate) fn block_on<F: Future>(runtime: &Runtime, future: F) -> F::Output {
    // Without an output, the future is of one type for the runtime, whose code is compiled once.
    let mut output = None;
    {
        let mut future = pin!(async { output = Some(future.await) });
        runtime.block_on(future.as_mut() as Pin<&mut dyn Future<Output = ()>>);
    }
    output.expect("the future has completed")
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
