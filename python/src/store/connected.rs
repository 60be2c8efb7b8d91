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
use tssd_store::{ConnectOptions, GetReport, Opened, Store, Target};

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
        let store: Result<Store> =
            Patience::new(None).and_then(|patience| wait(&runtime, &patience, pin!(connecting)));
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
        let patience = Patience::new(timeout)?;
        py.detach(|| wait(&self.runtime, &patience, pin!(async { Ok(work.await?) })))
    }

    /// Fills memory, as long as there is patience.
    pub(super) fn fill(
        &self,
        opened: &Opened,
        targets: &mut [Target<'_>],
        patience: &Patience,
    ) -> Result<GetReport> {
        let _inside = self.runtime.enter();
        opened.fill_while(targets, || patience.check())
    }
}

/// Waits for work on this thread. The runtime would have to be woken up for a timer that looks for signals.
fn wait<T>(
    runtime: &Runtime,
    patience: &Patience,
    mut work: Pin<&mut impl Future<Output = Result<T>>>,
) -> Result<T> {
    let _inside = runtime.enter();
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut looked = Instant::now();
    loop {
        if let Poll::Ready(done) = work.as_mut().poll(&mut Context::from_waker(&waker)) {
            return done;
        }
        // Not at once: what takes little time, such as most puts, is rather done than cancelled.
        if looked.elapsed() >= EVERY {
            patience.interrupt.check()?;
            looked = Instant::now();
        }
        thread::park_timeout(patience.left()?);
    }
}

/// How long this thread waits: until a signal, or for a time.
pub(super) struct Patience {
    interrupt: Interrupt,
    timeout: Option<Duration>,
    started: Instant,
}

impl Patience {
    /// For so many seconds, or as long as it takes.
    pub(super) fn new(timeout: Option<f64>) -> Result<Self> {
        let timeout = timeout.map(seconds).transpose()?;
        Ok(Self { interrupt: Interrupt::new(), timeout, started: Instant::now() })
    }

    /// What ends it, if something does.
    pub(super) fn check(&self) -> Result<()> {
        self.interrupt.check()?;
        self.left().map(drop)
    }

    /// How long nobody need look.
    fn left(&self) -> Result<Duration> {
        let Some(timeout) = self.timeout else { return Ok(EVERY) };
        let left = timeout.checked_sub(self.started.elapsed()).ok_or_else(|| {
            let text = format!("it has not happened within {timeout:?}");
            Failure::from(Refusal::new("timeout", text))
        })?;
        Ok(left.min(EVERY))
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
