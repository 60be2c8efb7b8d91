//! What was done, as the dataclasses of `tssd/_reports.py`.

use pyo3::prelude::*;
use pyo3::types::PyDict;
use tssd_format::Attrs;
use tssd_store::{Copied, GetReport, PutPhases, PutReport, ReceiveReport, VersionInfo};

use super::into::Differences;
use crate::error::Result;

/// How bytes came from devices, or went there.
fn device_copies(py: Python<'_>, copied: Option<Copied>) -> Result<Option<Bound<'_, PyAny>>> {
    let Some(copied) = copied else { return Ok(None) };
    let class = py.import("tssd._reports")?.getattr("DeviceCopies")?;
    Ok(Some(class.call1((copied.pinned, copied.pageable, copied.device, copied.why))?))
}

pub(super) fn put_report<'py>(
    py: Python<'py>,
    report: &PutReport,
    copied: Option<Copied>,
) -> Result<Bound<'py, PyAny>> {
    let class = py.import("tssd._reports")?.getattr("PutReport")?;
    let PutPhases { arrange, begin, write, commit, store, .. } = report.phases;
    let phases = PyDict::new(py);
    let all = [
        ("arrange", arrange),
        ("begin", begin),
        ("write", write),
        ("commit", commit),
        ("store", store),
    ];
    for (phase, seconds) in all {
        phases.set_item(phase, seconds)?;
    }
    let of = PyDict::new(py);
    of.set_item("version", report.version)?;
    of.set_item("epoch", report.epoch)?;
    of.set_item("id", report.id.to_string())?;
    of.set_item("digest", report.digest.to_string())?;
    of.set_item("visible", report.visible)?;
    of.set_item("missing", report.missing.iter().collect::<Vec<u32>>())?;
    of.set_item("stored", report.stored)?;
    of.set_item("bytes", report.bytes)?;
    of.set_item("transport", report.transport.to_string())?;
    of.set_item("why", &report.why)?;
    of.set_item("phases", phases)?;
    of.set_item("seconds", report.seconds)?;
    of.set_item("device_copies", device_copies(py, copied)?)?;
    Ok(class.call((), Some(&of))?)
}

pub(super) fn get_report<'py>(
    py: Python<'py>,
    report: &GetReport,
    viewed: u64,
    differences: &Differences,
    copied: Option<Copied>,
) -> Result<Bound<'py, PyAny>> {
    let of = PyDict::new(py);
    of.set_item("version", report.version)?;
    of.set_item("epoch", report.epoch)?;
    of.set_item("id", report.id.to_string())?;
    of.set_item("digest", report.digest.to_string())?;
    of.set_item("bytes_needed", report.bytes_needed)?;
    of.set_item("bytes_transferred", report.bytes_transferred)?;
    of.set_item("bytes_viewed", viewed)?;
    of.set_item("bytes_received", report.bytes_received)?;
    of.set_item("bytes_verified", report.bytes_verified)?;
    of.set_item("transport", report.transport.to_string())?;
    of.set_item("why", &report.why)?;
    of.set_item("plan_seconds", report.plan_seconds)?;
    of.set_item("seconds", report.seconds)?;
    of.set_item("missing_keys", &differences.missing)?;
    of.set_item("unexpected_keys", &differences.unexpected)?;
    of.set_item("cast", &differences.cast)?;
    of.set_item("device_copies", device_copies(py, copied)?)?;
    Ok(py.import("tssd._reports")?.getattr("GetReport")?.call((), Some(&of))?)
}

pub(super) fn receive_report<'py>(
    py: Python<'py>,
    report: &ReceiveReport,
    copied: Option<Copied>,
) -> Result<Bound<'py, PyAny>> {
    let class = py.import("tssd._reports")?.getattr("ReceiveReport")?;
    let ReceiveReport { version, buckets, bytes, transport, why, seconds, .. } = report;
    let copies = device_copies(py, copied)?;
    Ok(class.call1((version, buckets, bytes, transport.to_string(), why, seconds, copies))?)
}

pub(super) fn version_info<'py>(py: Python<'py>, info: &VersionInfo) -> Result<Bound<'py, PyAny>> {
    let class = py.import("tssd._reports")?.getattr("VersionInfo")?;
    Ok(class.call1((
        info.number,
        info.epoch,
        info.id.to_string(),
        info.bytes,
        info.writers.iter().collect::<Vec<u32>>(),
    ))?)
}

/// The newest version, with its metadata.
pub(super) fn head<'py>(
    py: Python<'py>,
    info: &VersionInfo,
    attrs: &Attrs,
) -> Result<Bound<'py, PyAny>> {
    let metadata = PyDict::new(py);
    metadata.set_item("metadata", crate::metadata::given(py, attrs)?)?;
    let replace = py.import("dataclasses")?.getattr("replace")?;
    Ok(replace.call((version_info(py, info)?,), Some(&metadata))?)
}
