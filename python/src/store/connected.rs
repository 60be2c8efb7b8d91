//! A store, and the threads of this process that wait for it.

use std::mem::ManuallyDrop;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use tokio::runtime::{Builder, Runtime};
use tssd_store::{ConnectOptions, Store};

use crate::error::{Failure, Refusal, Result};
use crate::interrupt::{EVERY, Interrupt};

/// A store, and the threads on which it waits: they are those of one process.
pub(crate) struct Connected {
    pub(super) process: u32,
    pub(crate) store: ManuallyDrop<Store>,
    pub(crate) runtime: ManuallyDrop<Runtime>,
}

impl Drop for Connected {
    #[expect(unsafe_code, reason = "what was forked is left alone")]
    fn drop(&mut self) {
        if self.process != std::process::id() {
            // Its threads were not forked: nobody answers, and nothing can be waited for.
            return;
        }
        // SAFETY: it is not looked at again.
        let store = unsafe { ManuallyDrop::take(&mut self.store) };
        // SAFETY: as above.
        let runtime = unsafe { ManuallyDrop::take(&mut self.runtime) };
        {
            let _inside = runtime.enter();
            drop(store);
        }
        runtime.shutdown_background();
    }
}

impl Connected {
    pub(super) fn new(url: &str, options: &ConnectOptions) -> Result<Arc<Self>> {
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.map_err(Failure::from)?;
        let connecting = async {
            let connecting = Store::create_with(url, options);
            let late = |_| {
                let text = format!("`{url}` has not answered within {:?}", options.timeout);
                Failure::from(Refusal::new("unreachable", text))
            };
            Ok(tokio::time::timeout(options.timeout, connecting).await.map_err(late)??)
        };
        let store: Result<Store> = runtime.block_on(connecting);
        let store = match store {
            Ok(store) => store,
            Err(error) => {
                // What it waits for may take longer.
                runtime.shutdown_background();
                return Err(error);
            }
        };
        let (store, runtime) = (ManuallyDrop::new(store), ManuallyDrop::new(runtime));
        Ok(Arc::new(Self { process: std::process::id(), store, runtime }))
    }

    /// Whether it can be asked here still: not in a process that was forked since, nor once the daemon is gone.
    pub(super) fn is_usable(&self) -> bool {
        self.process == std::process::id() && self.store.is_connected()
    }

    /// Does something, which Ctrl-C ends. In a process that was forked since nobody would do it.
    pub(crate) fn run<T>(
        &self,
        py: Python<'_>,
        timeout: Option<f64>,
        work: impl Future<Output = tssd_store::Result<T>> + Send,
    ) -> Result<T>
    where
        T: Send,
    {
        if self.process != std::process::id() {
            let text = "it was opened before this process was forked";
            return Err(Refusal::new("invalid", text).advice("open it again").into());
        }
        let timeout = timeout.map(seconds).transpose()?;
        py.detach(|| self.wait(timeout, pin!(work)))
    }

    /// Waits for work on this thread. The runtime would have to be woken up for a timer that looks for signals.
    fn wait<T>(
        &self,
        timeout: Option<Duration>,
        mut work: Pin<&mut impl Future<Output = tssd_store::Result<T>>>,
    ) -> Result<T> {
        let _inside = self.runtime.enter();
        let (interrupt, started) = (Interrupt::new(), Instant::now());
        let waker = Waker::from(Arc::new(Unpark(thread::current())));
        let mut looked = started;
        loop {
            if let Poll::Ready(done) = work.as_mut().poll(&mut Context::from_waker(&waker)) {
                return Ok(done?);
            }
            if looked.elapsed() >= EVERY {
                interrupt.check()?;
                looked = Instant::now();
            }
            let left = match timeout {
                Some(timeout) => timeout.checked_sub(started.elapsed()).ok_or_else(|| {
                    let text = format!("it has not happened within {timeout:?}");
                    Failure::from(Refusal::new("timeout", text))
                })?,
                None => EVERY,
            };
            thread::park_timeout(left.min(EVERY));
        }
    }
}

/// Wakes up the thread that waits.
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

pub(crate) fn seconds(seconds: f64) -> Result<Duration> {
    let span = Duration::try_from_secs_f64(seconds);
    Ok(span.map_err(|error| PyValueError::new_err(format!("{seconds} seconds: {error}")))?)
}
