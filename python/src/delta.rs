//! Deltas between files: made, applied and folded. `tssd/delta.py` has the documented functions.

use std::path::{Path, PathBuf};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use tssd_format::{Archive, ChangeCount, DeltaClasses, DeltaDraft, Options, open_shard_set};
use tssd_store::file;

use crate::error::{Failure, Result, value_error};
use crate::file::{compression, write_file};
use crate::interrupt::InterruptCheck;

/// Opens a file, or the shard set of a directory.
fn open(path: &Path) -> Result<Archive> {
    let opened = if path.is_dir() { open_shard_set(path) } else { Archive::open(path) };
    opened.map_err(|error| Failure::from(error).with_file(path))
}

fn classes(text: &str) -> Result<DeltaClasses> {
    match text {
        "1" => Ok(DeltaClasses::One),
        "2" => Ok(DeltaClasses::Two),
        "4" => Ok(DeltaClasses::Four),
        "auto" => Ok(DeltaClasses::Auto),
        other => {
            let message = format!("classes is 1, 2, 4 or \"auto\", not {other}");
            Err(value_error(message).into())
        }
    }
}

/// Writes the delta from one file to another. Returns the listed and the dense elements, and the length of the file.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "what Python gives is owned")]
pub(crate) fn _delta_make(
    py: Python<'_>,
    base: PathBuf,
    result: PathBuf,
    filename: PathBuf,
    classes: &str,
    fsync: bool,
) -> Result<(u64, u64, u64)> {
    let classes = self::classes(classes)?;
    let interrupt = InterruptCheck::new();
    py.detach(|| {
        let (base, result) = (open(&base)?, open(&result)?);
        let draft = DeltaDraft::between(&base, &result, classes)?;
        let (layout, changes) = file::plan_delta(draft, || interrupt.check())?;
        write_file(&layout, &filename, fsync, &interrupt)?;
        let ChangeCount { listed, dense } = changes;
        Ok((listed, dense, layout.file_len()))
    })
}

/// Writes one delta with the effect of several. Returns the length of the file.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "what Python gives is owned")]
pub(crate) fn _delta_fold(
    py: Python<'_>,
    deltas: Vec<PathBuf>,
    filename: PathBuf,
    fsync: bool,
) -> Result<u64> {
    let [first, others @ ..] = &deltas[..] else {
        return Err(PyValueError::new_err("fold takes two deltas or more, not none").into());
    };
    let [others @ .., last] = others else {
        return Err(PyValueError::new_err("fold takes two deltas or more, not one").into());
    };
    let interrupt = InterruptCheck::new();
    py.detach(|| {
        let mut folded = open(first)?;
        let plan = |folded: &Archive, next: &Path| {
            let next_archive = open(next)?;
            let fold = || {
                let draft = DeltaDraft::fold(folded, &next_archive)?;
                Ok(file::plan_delta(draft, || interrupt.check())?.0)
            };
            fold().map_err(|error: Failure| error.with_file(next))
        };
        for next in others {
            let mut bytes = Vec::new();
            let layout = plan(&folded, next)?;
            let mut reopen = || {
                layout.write_to(&mut bytes)?;
                Archive::from_bytes(std::mem::take(&mut bytes))
            };
            folded = reopen().map_err(|error| Failure::from(error).with_file(next))?;
        }
        let layout = plan(&folded, last)?;
        write_file(&layout, &filename, fsync, &interrupt)?;
        Ok(layout.file_len())
    })
}

/// Writes the result of a delta to a file. Without a name, returns the bytes of the file.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "what Python gives is owned")]
pub(crate) fn _delta_apply<'py>(
    py: Python<'py>,
    base: PathBuf,
    delta: PathBuf,
    filename: Option<PathBuf>,
    compression: Option<&str>,
    fsync: bool,
) -> Result<Option<Bound<'py, PyBytes>>> {
    let options = Options::new().digests().allow_opaque();
    let options = options.compress(self::compression(compression)?);
    let interrupt = InterruptCheck::new();
    let layout = py.detach(|| {
        let opened = open(&delta)?;
        let options = options.attrs_of(&opened);
        let base_archive = open(&base)?;
        let applied = opened.result_from(base_archive);
        let applied = applied.map_err(|error| Failure::from(error).with_file(&base))?;
        let plan = || {
            file::verify(applied.verify_jobs(), || interrupt.check())?;
            file::verify(applied.deep_verify_jobs(), || interrupt.check())?;
            file::plan(&applied.to_state_dict()?, &options, || interrupt.check())
        };
        plan().map_err(|error: Failure| error.with_file(&delta))
    })?;
    let Some(filename) = filename else {
        let len = usize::try_from(layout.file_len()).map_err(std::io::Error::other)?;
        let bytes = PyBytes::new_with(py, len, |target| {
            py.detach(|| file::write_into(&layout, target, || interrupt.check()))
                .map_err(|error: Failure| PyErr::from(error))
        });
        return Ok(Some(bytes?));
    };
    py.detach(|| write_file(&layout, &filename, fsync, &interrupt))?;
    Ok(None)
}
