//! The versions of a key as they come.

use std::sync::{Arc, Mutex};

use pyo3::exceptions::{PyStopIteration, PyValueError};
use pyo3::prelude::*;
use tssd_store::{Key, Subscription};

use super::connected::Connected;
use super::report::version_info;
use crate::error::Result;

/// The versions of a key as they come: see `Store.subscribe`.
#[pyclass(frozen, name = "Subscription", module = "tssd")]
pub(crate) struct Subscribed {
    own: Arc<Connected>,
    subscription: Mutex<Option<Subscription>>,
}

impl Subscribed {
    pub(crate) fn new(own: Arc<Connected>, key: &Key) -> Self {
        let subscription = Mutex::new(Some(own.store.subscribe(key)));
        Self { own, subscription }
    }
}

#[pymethods]
impl Subscribed {
    fn __iter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    /// The newest version, as soon as it is another than the one before, as VersionInfo.
    fn __next__<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyAny>> {
        let busy = |_| PyValueError::new_err("another thread waits for it");
        let mut subscription = self.subscription.try_lock().map_err(busy)?;
        let open = subscription.as_mut().ok_or_else(|| PyStopIteration::new_err(()))?;
        version_info(py, &self.own.run(py, None, open.next())?)
    }

    /// It ends.
    fn close(&self) -> Result<()> {
        let busy = |_| PyValueError::new_err("another thread waits for it");
        *self.subscription.try_lock().map_err(busy)? = None;
        Ok(())
    }
}
