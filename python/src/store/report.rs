//! Reports of puts and gets, as the dataclasses of `tssd/_reports.py`.

use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyDict};
use tssd_format::Attrs;
use tssd_gpu::CopyStats;
use tssd_store::{GetReport, PutPhases, PutReport, ReceiveReport, VersionInfo};

use crate::error::Result;
use crate::store::fill::Differences;

/// Returns the `DeviceCopies` of a put, a get or a receive. `None` if there were none.
fn device_copies(py: Python<'_>, copied: Option<CopyStats>) -> Result<Option<Bound<'_, PyAny>>> {
    let Some(copied) = copied else { return Ok(None) };
    let class = py.import("tssd._reports")?.getattr("DeviceCopies")?;
    Ok(Some(class.call1((
        copied.pinned,
        copied.pageable,
        copied.device,
        copied.pageable_reason,
    ))?))
}

/// Returns a `PutReport`.
pub(super) fn put_report<'py>(
    py: Python<'py>,
    report: &PutReport,
    copied: Option<CopyStats>,
    stored_as_base: &[(String, String)],
) -> Result<Bound<'py, PyAny>> {
    let class = py.import("tssd._reports")?.getattr("PutReport")?;
    let PutPhases { arrange, begin, write, commit, store, .. } = report.phases;
    let phases = PyDict::new(py);
    let durations = [
        ("arrange", arrange),
        ("begin", begin),
        ("write", write),
        ("commit", commit),
        ("store", store),
    ];
    for (phase, seconds) in durations {
        phases.set_item(phase, seconds)?;
    }
    let fields = PyDict::new(py);
    fields.set_item("version", report.version)?;
    fields.set_item("epoch", report.epoch)?;
    fields.set_item("id", report.id.to_string())?;
    fields.set_item("digest", report.digest.to_string())?;
    fields.set_item("visible", report.visible)?;
    fields.set_item("missing", report.missing.iter().collect::<Vec<u32>>())?;
    fields.set_item("stored", report.stored)?;
    fields.set_item("bytes", report.bytes)?;
    fields.set_item("transport", report.transport.to_string())?;
    fields.set_item("transport_reason", &report.transport_reason)?;
    fields.set_item("phases", phases)?;
    fields.set_item("seconds", report.seconds)?;
    fields.set_item("device_copies", device_copies(py, copied)?)?;
    fields.set_item("stored_as_base", stored_as_base.iter().cloned().into_py_dict(py)?)?;
    Ok(class.call((), Some(&fields))?)
}

/// What the report of a get says about this process.
#[derive(Default)]
pub(super) struct GetDetails {
    /// Number of bytes that the caller sees through views.
    pub(super) viewed: u64,
    /// Number of bytes in staging tensors.
    pub(super) staged: u64,
    /// The copies to devices. `None` if there were none.
    pub(super) copied: Option<CopyStats>,
}

/// Returns a `GetReport`.
pub(super) fn get_report<'py>(
    py: Python<'py>,
    report: &GetReport,
    differences: &Differences,
    details: GetDetails,
) -> Result<Bound<'py, PyAny>> {
    let GetDetails { viewed, staged, copied } = details;
    let fields = PyDict::new(py);
    fields.set_item("version", report.version)?;
    fields.set_item("epoch", report.epoch)?;
    fields.set_item("id", report.id.to_string())?;
    fields.set_item("digest", report.digest.to_string())?;
    fields.set_item("bytes_needed", report.bytes_needed)?;
    fields.set_item("bytes_transferred", report.bytes_transferred)?;
    fields.set_item("bytes_viewed", viewed)?;
    fields.set_item("bytes_staged", staged)?;
    fields.set_item("bytes_received", report.bytes_received)?;
    fields.set_item("bytes_verified", report.bytes_verified)?;
    fields.set_item("transport", report.transport.to_string())?;
    fields.set_item("transport_reason", &report.transport_reason)?;
    fields.set_item("plan_seconds", report.plan_seconds)?;
    fields.set_item("seconds", report.seconds)?;
    fields.set_item("missing_keys", &differences.missing)?;
    fields.set_item("unexpected_keys", &differences.unexpected)?;
    fields.set_item("cast", &differences.cast)?;
    fields.set_item("device_copies", device_copies(py, copied)?)?;
    Ok(py.import("tssd._reports")?.getattr("GetReport")?.call((), Some(&fields))?)
}

/// Returns a `ReceiveReport`.
pub(super) fn receive_report<'py>(
    py: Python<'py>,
    report: &ReceiveReport,
    copied: Option<CopyStats>,
) -> Result<Bound<'py, PyAny>> {
    let class = py.import("tssd._reports")?.getattr("ReceiveReport")?;
    let ReceiveReport { version, buckets, bytes, transport, transport_reason, seconds, .. } =
        report;
    let copies = device_copies(py, copied)?;
    Ok(class.call1((
        version,
        buckets,
        bytes,
        transport.to_string(),
        transport_reason,
        seconds,
        copies,
    ))?)
}

/// Returns a `VersionInfo`, without metadata.
pub(super) fn version_info<'py>(py: Python<'py>, info: &VersionInfo) -> Result<Bound<'py, PyAny>> {
    let class = py.import("tssd._reports")?.getattr("VersionInfo")?;
    Ok(class.call1((
        info.number,
        info.epoch,
        info.id.to_string(),
        info.bytes,
        info.writers.iter().collect::<Vec<u32>>(),
        Duration::from_millis(info.since.0).as_secs_f64(),
        info.process.as_ref().map(|process| process.run.0.as_str()),
    ))?)
}

/// Returns a `VersionInfo` with the metadata in `attrs`.
pub(super) fn version_info_with_metadata<'py>(
    py: Python<'py>,
    info: &VersionInfo,
    attrs: &Attrs,
) -> Result<Bound<'py, PyAny>> {
    let metadata = PyDict::new(py);
    metadata.set_item("metadata", crate::metadata::from_attrs(py, attrs)?)?;
    let replace = py.import("dataclasses")?.getattr("replace")?;
    Ok(replace.call((version_info(py, info)?,), Some(&metadata))?)
}
