//! A store, and the threads of this process that wait for it.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use tokio::runtime::{Builder, Runtime};
use tssd_store::{ConnectOptions, Store};

use crate::error::{Failure, Refusal, Result};
use crate::interrupt::Interrupt;

/// How often signals are looked for while something is waited for.
const EVERY: Duration = Duration::from_millis(50);

/// A store, and the threads on which it waits: they are those of one process.
pub(crate) struct Connected {
    pub(super) process: u32,
    pub(crate) store: Store,
    pub(crate) runtime: Runtime,
}

impl Connected {
    pub(super) fn new(url: &str, options: &ConnectOptions) -> Result<Arc<Self>> {
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.map_err(Failure::from)?;
        let store = runtime.block_on(Store::create_with(url, options))?;
        Ok(Arc::new(Self { process: std::process::id(), store, runtime }))
    }

    /// Does something, which Ctrl-C ends.
    pub(crate) fn run<T>(
        &self,
        py: Python<'_>,
        timeout: Option<f64>,
        work: impl Future<Output = tssd_store::Result<T>> + Send,
    ) -> Result<T>
    where
        T: Send,
    {
        let interrupt = Interrupt::new();
        let timeout = timeout.map(seconds).transpose()?;
        let all = async {
            let mut work = pin!(work);
            let late = async {
                match timeout {
                    Some(timeout) => {
                        tokio::time::sleep(timeout).await;
                        timeout
                    }
                    None => std::future::pending().await,
                }
            };
            let mut late = pin!(late);
            loop {
                tokio::select! {
                    done = &mut work => return Ok(done?),
                    timeout = &mut late => {
                        let text = format!("it has not happened within {timeout:?}");
                        return Err(Refusal::new("timeout", text).into());
                    }
                    () = tokio::time::sleep(EVERY) => interrupt.check()?,
                }
            }
        };
        py.detach(|| self.runtime.block_on(all))
    }
}

pub(crate) fn seconds(seconds: f64) -> Result<Duration> {
    let span = Duration::try_from_secs_f64(seconds);
    Ok(span.map_err(|error| PyValueError::new_err(format!("{seconds} seconds: {error}")))?)
}
