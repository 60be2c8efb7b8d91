//! An iterator over the versions of a key as they become visible.

use std::sync::{Arc, Mutex};

use pyo3::exceptions::{PyStopIteration, PyValueError};
use pyo3::prelude::*;
use tokio::sync::watch;
use tssd_store::{Key, Subscription};

use super::report::version_info;
use crate::error::Result;
use crate::store::connection::Connection;

/// An iterator over the versions of a key as they become visible: see `Store.subscribe`.
#[pyclass(frozen, name = "Subscription", module = "tssd")]
pub(crate) struct PySubscription {
    connection: Arc<Connection>,
    subscription: Mutex<Subscription>,
    is_closed: watch::Sender<bool>,
}

impl PySubscription {
    pub(crate) fn new(connection: Arc<Connection>, key: &Key) -> Self {
        let subscription = Mutex::new(connection.store.subscribe(key));
        Self { connection, subscription, is_closed: watch::Sender::new(false) }
    }
}

#[pymethods]
impl PySubscription {
    fn __iter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    /// Waits until the newest version differs from the last one returned, and returns it as VersionInfo.
    fn __next__<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyAny>> {
        let busy = |_| PyValueError::new_err("another thread waits for it");
        let mut subscription = self.subscription.try_lock().map_err(busy)?;
        let subscription = &mut *subscription;
        let mut closing = self.is_closed.subscribe();
        let next = self.connection.block_on(py, None, async {
            tokio::select! {
                biased;
                _ = closing.wait_for(|is_closed| *is_closed) => Ok(None),
                info = subscription.next() => info.map(Some),
            }
        })?;
        version_info(py, &next.ok_or_else(|| PyStopIteration::new_err(()))?)
    }

    /// Ends the iteration, also for a thread that waits for the next version.
    fn close(&self) {
        self.is_closed.send_replace(true);
    }
}
