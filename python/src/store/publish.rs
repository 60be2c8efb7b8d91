//! A version that is put tensor by tensor.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use tssd_format::{AttrValue, Shard, ShardPlace, TensorSlice, Value};
use tssd_store::{Copied, Key, Publisher, PutOptions};

use super::connected::Connected;
use super::put::{own_rank, prove_covered, shards};
use super::report::put_report;
use crate::device::Copies;
use crate::error::{Refusal, Result};
use crate::interrupt::Interrupt;
use crate::local::{Part, Transfer};
use crate::object::METADATA_ATTR;
use crate::value::{Taken, take};

/// A version that is put tensor by tensor: see `Store.publish`.
#[pyclass(frozen, name = "Publisher", module = "tssd")]
pub(crate) struct Publishing {
    own: Arc<Connected>,
    key: Key,
    taking: Taking,
    open: Mutex<Option<Open>>,
    report: Mutex<Option<Py<PyAny>>>,
}

/// One that is neither finished nor has failed.
struct Open {
    publisher: Publisher,
    /// Those of each entry.
    copies: Vec<Copies>,
    /// The `_metadata` of ordered dicts, by path.
    modules: serde_json::Map<String, serde_json::Value>,
    /// The ranks of the meshes of shards; none if there are no shards.
    ranks: Option<BTreeSet<u32>>,
}

/// How values are taken over.
pub(crate) struct Taking {
    pub(super) allow_pickle: bool,
    /// Whether it was said who puts.
    pub(super) names_writers: bool,
    /// The dtype that floating tensors are stored as, and the names of those that are not.
    pub(super) transfer: Option<(Py<PyAny>, Option<Py<PyAny>>)>,
    /// What is cast has at most so many bytes at a time.
    pub(super) cast_bytes: u64,
}

impl Publishing {
    pub(crate) fn new(
        own: Arc<Connected>,
        key: Key,
        options: &PutOptions,
        bucket_bytes: u64,
        taking: Taking,
    ) -> Result<Self> {
        let publisher = own.store.publish(&key, options, bucket_bytes)?;
        let (copies, modules, ranks) = (Vec::new(), serde_json::Map::new(), None);
        let open = Mutex::new(Some(Open { publisher, copies, modules, ranks }));
        Ok(Self { own, key, taking, open, report: Mutex::default() })
    }

    fn open(&self) -> Result<MutexGuard<'_, Option<Open>>> {
        let busy = |_| PyValueError::new_err("another thread puts into it");
        Ok(self.open.try_lock().map_err(busy)?)
    }

    /// After an error it is open no longer: a version that lacks what was put is none.
    fn with(&self, work: impl FnOnce(&mut Open) -> Result<()>) -> Result<()> {
        let mut open = self.open()?;
        let done = work(open.as_mut().ok_or_else(over)?);
        done.inspect_err(|_| self.withdraw(open.take()))
            .map_err(|error| error.of_key(self.key.as_str(), None))
    }

    fn withdraw(&self, open: Option<Open>) {
        let _inside = self.own.runtime.enter();
        drop(open);
    }

    fn add(&self, open: &mut Open, name: &str, value: &Bound<'_, PyAny>) -> Result<()> {
        let py = value.py();
        let dict = PyDict::new(py);
        dict.set_item(name, value)?;
        let transfer = self.taking.transfer.as_ref().map(|(dtype, keep)| {
            Transfer::new(dtype.bind(py), keep.as_ref().map(|keep| keep.bind(py)))
        });
        let transfer = transfer.transpose()?;
        if let Some(transfer) = &transfer {
            let parts = transfer.parts(value, name, self.taking.cast_bytes);
            if let Some(parts) = parts.map_err(|error| error.of(name))? {
                return self.add_parts(open, name, (&dict, transfer), parts);
            }
        }
        let mut taken = take(&dict, self.taking.allow_pickle, transfer)?;
        let ranks = shards(&taken);
        if ranks.is_some() {
            identify(py, open)?;
        }
        let Some(value) = only(&taken) else {
            // Who has nothing of a tensor is one of several all the same.
            open.ranks.get_or_insert_default().extend(ranks.unwrap_or_default());
            return Ok(());
        };
        open.copies.push(taken.devices.copies().clone());
        if !taken.metadata.is_empty() {
            open.modules.append(&mut taken.metadata);
            let modules = serde_json::Value::Object(open.modules.clone()).to_string();
            open.publisher.describe(METADATA_ATTR, AttrValue::Text(modules.into()));
        }
        let has_begun = open.publisher.has_begun();
        self.own.run(py, None, open.publisher.add(name, value))?;
        // What is written by now was put before this.
        if open.publisher.has_begun() && !has_begun {
            self.prove_covered(py, open)?;
        }
        if let Some(ranks) = ranks {
            open.ranks.get_or_insert_default().extend(ranks);
        }
        Ok(())
    }

    /// A tensor, or a shard of one, that is cast box by box.
    fn add_parts<'py>(
        &self,
        open: &mut Open,
        name: &str,
        (dict, transfer): (&Bound<'py, PyDict>, &Transfer<'py>),
        parts: Vec<Part>,
    ) -> Result<()> {
        let py = dict.py();
        let value = dict.as_any().get_item(name)?;
        let take_part = |part| take(dict, self.taking.allow_pickle, Some(transfer.of_part(part)));
        // A little of it says whose it is.
        let one = parts[0].least()?;
        let taken = take_part(one.clone())?;
        if let Some(ranks) = shards(&taken) {
            identify(py, open)?;
            open.ranks.get_or_insert_default().extend(ranks);
        }
        let is_stored = match only(&taken) {
            Some(Value::Shards(shards)) => {
                shards.iter().any(|shard| open.publisher.stores(shard.place()))
            }
            _ => true,
        };
        // Of what another rank stores a version has no more than what it is.
        let parts = if is_stored { parts } else { vec![one] };
        self.begin(py, open)?;
        let interrupt = Interrupt::new();
        let mut written = self.own.run(py, None, open.publisher.parts(name))?;
        for part in parts {
            interrupt.check()?;
            let taken = take_part(part.clone())?;
            open.copies.push(taken.devices.copies().clone());
            let shards = match (only(&taken), &part.region) {
                (Some(Value::Tensor(local)), Some(region)) => {
                    let shape: Vec<u64> = value.getattr("shape")?.extract()?;
                    let slice = TensorSlice::new(region.offsets(), region.shape(), &shape)?;
                    vec![Shard::new(local, ShardPlace::new(slice))?]
                }
                (Some(Value::Shards(shards)), _) => shards,
                _ => {
                    let text = "its local tensors are others each time that they are asked for";
                    return Err(Refusal::new("invalid", text).of(name).into());
                }
            };
            self.own.run(py, None, written.add(shards))?;
        }
        Ok(())
    }

    /// Before something is written: see `prove_covered`.
    fn begin(&self, py: Python<'_>, open: &Open) -> Result<()> {
        if open.publisher.has_begun() { Ok(()) } else { self.prove_covered(py, open) }
    }

    /// The meshes of the first archive say who contributes, unless the caller has.
    fn prove_covered(&self, py: Python<'_>, open: &Open) -> Result<()> {
        let ranks = open.ranks.as_ref().filter(|_| !self.taking.names_writers);
        ranks.map_or(Ok(()), |ranks| prove_covered(py, ranks))
    }
}

/// Shards are of a job, and of the rank that this is.
fn identify(py: Python<'_>, open: &mut Open) -> Result<()> {
    let (job, writer) = own_rank(py)?;
    Ok(open.publisher.identify(job, writer)?)
}

/// The one entry of what was taken.
fn only(taken: &Taken) -> Option<Value> {
    taken.dict.entries().iter().next().map(|(_, value)| value.clone())
}

fn over() -> PyErr {
    PyValueError::new_err("it is finished, or has failed: publish another version")
}

#[pymethods]
impl Publishing {
    /// Puts one entry. It must rest until it is written: until `flush` returns, or the block ends.
    ///
    /// Args:
    ///     name: its fqn.
    ///     value: a tensor, or whatever else a state dict may have.
    ///
    /// Raises:
    ///     As `Store.put_state_dict`; then nothing is left of the version.
    fn put(&self, name: &str, value: &Bound<'_, PyAny>) -> Result<()> {
        self.with(|open| self.add(open, name, value))
    }

    /// Writes what was put: it may be changed again once this returns.
    ///
    /// Raises:
    ///     As `put`.
    fn flush(&self, py: Python<'_>) -> Result<()> {
        self.with(|open| {
            self.begin(py, open)?;
            self.own.run(py, None, open.publisher.flush())
        })
    }

    /// What has been put, once the block has ended: a PutReport.
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
            self.withdraw(self.open()?.take());
            return Ok(());
        }
        // Who has caught what a put has raised hears here at the latest that there is no version.
        self.with(|open| self.begin(py, open))?;
        let Some(Open { publisher, copies, .. }) = self.open()?.take() else { return Ok(()) };
        let finished = self.own.run(py, None, publisher.finish());
        let finished = finished.map_err(|error| error.of_key(self.key.as_str(), None))?;
        let mut copied = None;
        for copies in &copies {
            if let Some(more) = copies.copied() {
                *copied.get_or_insert_with(Copied::default) += &more;
            }
        }
        let report = put_report(py, &finished, copied)?.unbind();
        *self.report.lock().expect("nothing panics that holds it") = Some(report);
        Ok(())
    }
}
