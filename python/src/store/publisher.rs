//! A version that is put tensor by tensor.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use tssd_format::{AttrValue, Shard, ShardSpec, TensorSlice, Value};
use tssd_gpu::CopyStats;
use tssd_store::{Key, Publisher, PutOptions};

use super::report::put_report;
use crate::builder::MODULE_METADATA_ATTR;
use crate::cast_rule::{CastRule, ObjectPart};
use crate::device::SharedCopyStats;
use crate::error::{BindingError, Result};
use crate::importer::{ImportedStateDict, import_state_dict};
use crate::interrupt::InterruptCheck;
use crate::store::connection::Connection;
use crate::store::put_arguments::{find_job_and_rank, mesh_ranks, verify_mesh_coverage};

/// A version that is put tensor by tensor: see `Store.publish`.
#[pyclass(frozen, name = "Publisher", module = "tssd")]
pub(crate) struct PyPublisher {
    connection: Arc<Connection>,
    key: Key,
    import_options: ImportOptions,
    /// `None` once the publisher is finished or has failed.
    active: Mutex<Option<ActivePublish>>,
    /// The PutReport; `None` until the publisher is finished.
    report: Mutex<Option<Py<PyAny>>>,
}

/// A publish that is neither finished nor has failed.
struct ActivePublish {
    publisher: Publisher,
    /// The device copies of each entry, or of each of its parts.
    copies: Vec<SharedCopyStats>,
    /// The values that are stored as an object of their base class: their fqns and their classes.
    stored_as_base: Vec<(String, String)>,
    /// The `_metadata` of ordered dicts, by path.
    modules: serde_json::Map<String, serde_json::Value>,
    /// The ranks of the meshes of all shards. `None` if there are no shards.
    ranks: Option<BTreeSet<u32>>,
}

/// How values are imported.
pub(crate) struct ImportOptions {
    pub(super) allow_pickle: bool,
    /// Whether the caller gave `writers`.
    pub(super) has_writers: bool,
    /// The dtype in which floating tensors are stored, and the names of those that keep their dtype.
    pub(super) transfer: Option<(Py<PyAny>, Option<Py<PyAny>>)>,
    /// The largest size, in bytes, of the cast copies that exist at a time.
    pub(super) cast_bytes: u64,
}

impl PyPublisher {
    pub(crate) fn new(
        connection: Arc<Connection>,
        key: Key,
        options: &PutOptions,
        bucket_bytes: u64,
        import_options: ImportOptions,
    ) -> Result<Self> {
        let publisher = connection.store.publish(&key, options, bucket_bytes)?;
        let (copies, modules, ranks) = (Vec::new(), serde_json::Map::new(), None);
        let stored_as_base = Vec::new();
        let active = ActivePublish { publisher, copies, stored_as_base, modules, ranks };
        let active = Mutex::new(Some(active));
        Ok(Self { connection, key, import_options, active, report: Mutex::default() })
    }

    /// Locks the publish. An error if another thread uses it.
    fn lock_active(&self) -> Result<MutexGuard<'_, Option<ActivePublish>>> {
        let busy = |_| PyValueError::new_err("another thread puts into it");
        Ok(self.active.try_lock().map_err(busy)?)
    }

    /// Runs `work` on the active publish. An error aborts the publish: its version would lack an entry.
    fn with_active(&self, work: impl FnOnce(&mut ActivePublish) -> Result<()>) -> Result<()> {
        let mut active = self.lock_active()?;
        let result = work(active.as_mut().ok_or_else(closed_error)?);
        result
            .inspect_err(|_| self.abort(active.take()))
            .map_err(|error| error.with_key(self.key.as_str(), None))
    }

    /// Drops a publish inside the runtime: nothing of its version remains.
    fn abort(&self, active: Option<ActivePublish>) {
        let _guard = self.connection.runtime.enter();
        drop(active);
    }

    /// Adds one entry.
    fn add(&self, active: &mut ActivePublish, name: &str, value: &Bound<'_, PyAny>) -> Result<()> {
        let py = value.py();
        let dict = PyDict::new(py);
        dict.set_item(name, value)?;
        let transfer = self.import_options.transfer.as_ref().map(|(dtype, keep)| {
            CastRule::new(dtype.bind(py), keep.as_ref().map(|keep| keep.bind(py)))
        });
        let transfer = transfer.transpose()?;
        if let Some(transfer) = &transfer {
            let parts = transfer.split(value, name, self.import_options.cast_bytes);
            if let Some(parts) = parts.map_err(|error| error.with_fqn(name))? {
                return self.add_parts(active, name, &dict, transfer, parts);
            }
        }
        let mut imported = import_state_dict(&dict, self.import_options.allow_pickle, transfer)?;
        let ranks = mesh_ranks(&imported);
        if ranks.is_some() {
            identify(py, active)?;
        }
        let Some(value) = single_value(&imported) else {
            // A rank that has no part of this tensor is still one of several writers.
            active.ranks.get_or_insert_default().extend(ranks.unwrap_or_default());
            return Ok(());
        };
        active.copies.push(imported.devices.copy_stats().clone());
        active.stored_as_base.append(&mut imported.stored_as_base);
        if !imported.module_metadata.is_empty() {
            active.modules.append(&mut imported.module_metadata);
            let modules = serde_json::Value::Object(active.modules.clone()).to_string();
            active.publisher.describe(MODULE_METADATA_ATTR, AttrValue::Text(modules.into()));
        }
        let has_begun = active.publisher.has_begun();
        self.connection.block_on(py, None, active.publisher.add(name, value))?;
        // This call may have written the first archive, of the entries that were put before this one. So the check
        // comes before the ranks of this entry are added.
        if active.publisher.has_begun() && !has_begun {
            self.check_coverage(py, active)?;
        }
        if let Some(ranks) = ranks {
            active.ranks.get_or_insert_default().extend(ranks);
        }
        Ok(())
    }

    /// Adds a tensor, or a shard of one, in parts, each of which is cast by itself.
    fn add_parts<'py>(
        &self,
        active: &mut ActivePublish,
        name: &str,
        dict: &Bound<'py, PyDict>,
        transfer: &CastRule<'py>,
        parts: Vec<ObjectPart>,
    ) -> Result<()> {
        let py = dict.py();
        let value = dict.as_any().get_item(name)?;
        let import_part = |part| {
            import_state_dict(
                dict,
                self.import_options.allow_pickle,
                Some(transfer.with_part(part)),
            )
        };
        // The smallest part is enough to determine the mesh and the placement.
        let smallest = parts[0].first_element()?;
        let imported = import_part(smallest.clone())?;
        if let Some(ranks) = mesh_ranks(&imported) {
            identify(py, active)?;
            active.ranks.get_or_insert_default().extend(ranks);
        }
        let is_stored = match single_value(&imported) {
            Some(Value::Shards(shards)) => {
                shards.iter().any(|shard| active.publisher.stores(shard.spec()))
            }
            _ => true,
        };
        // If another rank stores this replica, the version needs only its description, from the smallest part.
        let parts = if is_stored { parts } else { vec![smallest] };
        self.check_before_first_write(py, active)?;
        let interrupt = InterruptCheck::new();
        let mut writer = self.connection.block_on(py, None, active.publisher.parts(name))?;
        for part in parts {
            interrupt.check()?;
            let imported = import_part(part.clone())?;
            active.copies.push(imported.devices.copy_stats().clone());
            let shards = match (single_value(&imported), &part.region) {
                (Some(Value::Tensor(local)), Some(region)) => {
                    let shape: Vec<u64> = value.getattr("shape")?.extract()?;
                    let slice = TensorSlice::new(region.offsets(), region.shape(), &shape)?;
                    vec![Shard::new(local, ShardSpec::new(slice))?]
                }
                (Some(Value::Shards(shards)), _) => shards,
                _ => {
                    let text = "its local tensors are others each time that they are asked for";
                    return Err(BindingError::new("invalid", text).with_fqn(name).into());
                }
            };
            self.connection.block_on(py, None, writer.add(shards))?;
        }
        Ok(())
    }

    /// Calls `check_coverage` if nothing has been written yet.
    fn check_before_first_write(&self, py: Python<'_>, active: &ActivePublish) -> Result<()> {
        if active.publisher.has_begun() { Ok(()) } else { self.check_coverage(py, active) }
    }

    /// Checks that the meshes of the first archive contain all ranks, unless the caller gave `writers`.
    fn check_coverage(&self, py: Python<'_>, active: &ActivePublish) -> Result<()> {
        let ranks = active.ranks.as_ref().filter(|_| !self.import_options.has_writers);
        ranks.map_or(Ok(()), |ranks| verify_mesh_coverage(py, ranks))
    }
}

/// Sets the job and the rank of this process, which a publish with shards needs.
fn identify(py: Python<'_>, active: &mut ActivePublish) -> Result<()> {
    let (job, writer) = find_job_and_rank(py)?;
    Ok(active.publisher.identify(job, writer)?)
}

/// Returns the value of the only entry of an imported dict. `None` if the dict is empty.
fn single_value(imported: &ImportedStateDict) -> Option<Value> {
    imported.dict.entries().iter().next().map(|(_, value)| value.clone())
}

/// Returns the error for a publish that is finished or has failed.
fn closed_error() -> PyErr {
    PyValueError::new_err("it is finished, or has failed: publish another version")
}

#[pymethods]
impl PyPublisher {
    /// Puts one entry. Its tensors must not change until `flush` returns, or the block ends.
    ///
    /// Args:
    ///     name: the fqn of the entry.
    ///     value: a tensor, or any other value that a state dict may have.
    ///
    /// Raises:
    ///     As `Store.put_state_dict`. After an error, nothing of the version remains.
    fn put(&self, name: &str, value: &Bound<'_, PyAny>) -> Result<()> {
        self.with_active(|active| self.add(active, name, value))
    }

    /// Writes the entries that were put. Their tensors may be changed again when this returns.
    ///
    /// Raises:
    ///     As `put`.
    fn flush(&self, py: Python<'_>) -> Result<()> {
        self.with_active(|active| {
            self.check_before_first_write(py, active)?;
            self.connection.block_on(py, None, active.publisher.flush())
        })
    }

    /// The PutReport, once the block has ended; None before.
    #[getter]
    fn report(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        let report = self.report.lock().expect("nothing panics that holds it");
        report.as_ref().map(|report| report.clone_ref(py))
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (error=None, *_rest))]
    fn __exit__(
        &self,
        py: Python<'_>,
        error: Option<&Bound<'_, PyAny>>,
        _rest: &Bound<'_, PyTuple>,
    ) -> Result<()> {
        if error.is_some() {
            self.abort(self.lock_active()?.take());
            return Ok(());
        }
        // If the caller caught the exception of a put, this raises: there is no version.
        self.with_active(|active| self.check_before_first_write(py, active))?;
        let Some(active) = self.lock_active()?.take() else { return Ok(()) };
        let ActivePublish { publisher, copies, stored_as_base, .. } = active;
        let report = self.connection.block_on(py, None, publisher.finish());
        let report = report.map_err(|error| error.with_key(self.key.as_str(), None))?;
        let mut total = None;
        for copies in &copies {
            if let Some(copied) = copies.snapshot() {
                *total.get_or_insert_with(CopyStats::default) += &copied;
            }
        }
        let report = put_report(py, &report, total, &stored_as_base)?.unbind();
        *self.report.lock().expect("nothing panics that holds it") = Some(report);
        Ok(())
    }
}
