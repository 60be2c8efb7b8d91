//! Options of a put, extracted from the arguments of the Python methods.

use std::collections::BTreeSet;
use std::num::NonZeroU32;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use tssd_format::{AttrValue, Attrs, Value};
use tssd_store::{
    DivergencePolicy, Durability, JobId, PutOptions, Replicas, Residency, Rewind, Ring, Transport,
    WriterSet,
};

use crate::builder::MODULE_METADATA_ATTR;
use crate::cast_rule::CastRule;
use crate::encoded::TorchStoreStateDict;
use crate::error::{Result, type_error};
use crate::importer::{ImportedStateDict, import_state_dict};
use crate::metadata;
use crate::store::arguments::{invalid_choice, parse_transport};
use crate::store::connection::parse_seconds;

/// The largest size of the metadata of a version, in bytes.
const MAX_METADATA: usize = 64 << 10;

/// Imports a Python state dict, or one that is encoded. The tensors are shared, not copied.
pub(super) fn import_for_put<'py>(
    object: &Bound<'py, PyAny>,
    allow_pickle: bool,
    transfer: Option<CastRule<'py>>,
) -> Result<ImportedStateDict> {
    match object.cast::<TorchStoreStateDict>() {
        Ok(encoded) if transfer.is_none() => encoded.get().to_imported(),
        Ok(_) => {
            let text = "a TorchStoreStateDict is stored as it is: cast before you encode it";
            Err(type_error(text).into())
        }
        Err(_) => import_state_dict(object, allow_pickle, transfer),
    }
}

/// Returns the job and the rank of this process, each if `_ranks.py` finds it.
pub(super) fn find_job_and_rank(py: Python<'_>) -> Result<(Option<JobId>, Option<u32>)> {
    let ranks = py.import("tssd._ranks")?;
    let job: Option<String> = ranks.call_method0("job")?.extract()?;
    Ok((job.map(JobId), ranks.call_method0("rank")?.extract()?))
}

/// Checks that the meshes of a put without `writers` contain all ranks of the process group.
///
/// # Errors
///
/// A `TssdValueError` that lists the ranks in `ranks`, and the ranks that are missing.
pub(super) fn verify_mesh_coverage(py: Python<'_>, ranks: &BTreeSet<u32>) -> Result<()> {
    py.import("tssd._ranks")?.call_method1("verify_mesh_coverage", (ranks,))?;
    Ok(())
}

/// The arguments that all puts have in common.
pub(super) struct PutArguments<'py> {
    pub(super) version: Option<u64>,
    pub(super) writers: Option<Bound<'py, PyAny>>,
    pub(super) writer: Option<u32>,
    pub(super) job: Option<String>,
    pub(super) durability: &'py str,
    pub(super) timeout: Option<f64>,
}

impl PutArguments<'_> {
    /// Converts the arguments to options. `imported` is the state dict; `None` if it is not known yet.
    ///
    /// The job and the rank of this process are looked up only if the put has shards, or if `writers` is given.
    pub(super) fn options(
        &self,
        py: Python<'_>,
        options: &PyPutOptions<'_>,
        metadata: Option<&Bound<'_, PyDict>>,
        imported: Option<&ImportedStateDict>,
    ) -> Result<PutOptions> {
        let attrs = build_attrs(metadata, imported)?;
        let mesh_ranks = imported.and_then(mesh_ranks);
        let writers = match &self.writers {
            None => None,
            Some(writers) => {
                let ranks = py.import("tssd._ranks")?.call_method1("parse_writers", (writers,))?;
                Some(ranks.extract::<Vec<u32>>()?.into_iter().collect::<WriterSet>())
            }
        };
        let mut options = PutOptions {
            version: self.version,
            writer: self.writer,
            writers,
            job: self.job.clone().map(JobId),
            attrs,
            on_divergence: options.on_divergence,
            replicas: options.replicas,
            durability: match self.durability {
                "memory" => Durability::Memory,
                "disk" => Durability::Disk,
                "object" => Durability::Object,
                other => {
                    let choices = "\"memory\", \"disk\" or \"object\"";
                    return Err(invalid_choice("durability", choices, other).into());
                }
            },
            residency: options.residency,
            rewind: if options.rewind { Rewind::Always } else { Rewind::IfRunsEnded },
            check_finite: options.check_finite,
            allow_opaque: true,
            require_transport: options.require_transport,
            ..PutOptions::default()
        };
        if let Some(timeout) = self.timeout {
            options.timeout = parse_seconds(timeout)?;
        }
        if let (Some(ranks), None) = (&mesh_ranks, &options.writers) {
            verify_mesh_coverage(py, ranks)?;
        }
        if mesh_ranks.is_some() || options.writers.is_some() {
            let (job, writer) = find_job_and_rank(py)?;
            options.job = options.job.or(job);
            options.writer = options.writer.or(writer);
        }
        Ok(options)
    }
}

impl PutArguments<'_> {
    /// Returns the options with which the store counts a put that failed before it began.
    ///
    /// `None` if no other writer takes part in the put.
    pub(super) fn skipped_put_options(
        &self,
        state_dict: &Bound<'_, PyAny>,
    ) -> Result<Option<PutOptions>> {
        let py = state_dict.py();
        let ranks = py.import("tssd._ranks")?;
        if self.writers.is_none()
            && !ranks.call_method1("is_sharded", (state_dict,))?.is_truthy()?
        {
            return Ok(None);
        }
        let (job, writer) = find_job_and_rank(py)?;
        Ok(Some(PutOptions {
            version: self.version,
            job: self.job.clone().map(JobId).or(job),
            writer: self.writer.or(writer),
            ..PutOptions::default()
        }))
    }
}

/// The values of a `tssd.PutOptions`.
#[derive(Default)]
pub(super) struct PyPutOptions<'py> {
    on_divergence: DivergencePolicy,
    replicas: Replicas,
    /// The names of tensors that keep their dtype. `None`: there are no such names.
    pub(super) keep_dtype: Option<Bound<'py, PyAny>>,
    require_transport: Option<Transport>,
    rewind: bool,
    check_finite: bool,
    residency: Residency,
}

impl<'py> PyPutOptions<'py> {
    /// Extracts the argument `options` of a put. Without it, returns the defaults and calls no Python code.
    ///
    /// # Errors
    ///
    /// `TypeError` if the argument is not a `tssd.PutOptions`, or if a value has a wrong type. `TssdValueError` if a
    /// value is unknown.
    pub(super) fn extract(options: Option<&Bound<'py, PyAny>>) -> Result<Self> {
        let Some(options) = options else { return Ok(Self::default()) };
        let class = options.py().import("tssd._options")?.getattr("PutOptions")?;
        if !options.is_instance(&class)? {
            let given = options.get_type().name()?.to_string();
            let article = if given.starts_with(['a', 'e', 'i', 'o', 'u']) { "an" } else { "a" };
            let text = format!("options must be a tssd.PutOptions, not {article} {given}");
            return Err(type_error(text + "; help: PutOptions(rewind=True)").into());
        }
        let on_divergence: String = extract_field(options, "on_divergence", "a str")?;
        let replicas: String = extract_field(options, "replicas", "a str")?;
        let require_transport: Option<String> =
            extract_field(options, "require_transport", "a str or None")?;
        Ok(Self {
            on_divergence: match on_divergence.as_str() {
                "error" => DivergencePolicy::Error,
                "lowest" => DivergencePolicy::Lowest,
                "keep" => DivergencePolicy::Keep,
                other => {
                    let choices = "\"error\", \"lowest\" or \"keep\"";
                    return Err(invalid_choice("on_divergence", choices, other).into());
                }
            },
            replicas: match replicas.as_str() {
                "primary" => Replicas::Primary,
                "all" => Replicas::All,
                other => {
                    let choices = "\"primary\" or \"all\"";
                    return Err(invalid_choice("replicas", choices, other).into());
                }
            },
            keep_dtype: Some(options.getattr("keep_dtype")?),
            require_transport: require_transport.as_deref().map(parse_transport).transpose()?,
            rewind: extract_field(options, "rewind", "a bool")?,
            check_finite: extract_field(options, "check_finite", "a bool")?,
            residency: extract_residency(&options.getattr("residency")?)?,
        })
    }
}

/// Extracts a field of a `tssd.PutOptions`. `expected` describes its type in the error.
fn extract_field<'py, T: FromPyObjectOwned<'py>>(
    options: &Bound<'py, PyAny>,
    field: &str,
    expected: &str,
) -> Result<T> {
    let value = options.getattr(field)?;
    value
        .extract::<T>()
        .map_err(|_| type_error(format!("{field} is {expected}, not {value:?}")).into())
}

/// Extracts the residency of a put: a `str`, or a `tssd.Ring`.
fn extract_residency(residency: &Bound<'_, PyAny>) -> Result<Residency> {
    let choices = "\"host\", \"device\", \"ring\", \"in_place\" or a tssd.Ring";
    if let Ok(name) = residency.extract::<&str>() {
        return Ok(match name {
            "host" => Residency::Host,
            "device" => Residency::Device,
            "ring" => Residency::Ring(Ring::default()),
            "in_place" => Residency::InPlace(Ring::default()),
            other => return Err(invalid_choice("residency", choices, other).into()),
        });
    }
    let class = residency.py().import("tssd._ring")?.getattr("Ring")?;
    if !residency.is_instance(&class)? {
        let text = format!("residency is {choices}, not {residency:?}");
        return Err(type_error(text).into());
    }
    let buckets: u32 = residency.getattr("buckets")?.extract()?;
    let bucket_bytes: u64 = residency.getattr("bucket_bytes")?.extract()?;
    let buckets = NonZeroU32::new(buckets).filter(|_| bucket_bytes > 0);
    let empty_ring = || PyValueError::new_err("a ring has buckets, and these hold something");
    let readers = residency.getattr("readers")?.extract()?;
    let ring = Ring { bucket_bytes, buckets: buckets.ok_or_else(empty_ring)?, readers };
    let is_in_place: bool = residency.getattr("in_place")?.extract()?;
    Ok(if is_in_place { Residency::InPlace(ring) } else { Residency::Ring(ring) })
}

/// Returns the attributes of a version: the caller's metadata, and the `_metadata` of ordered dicts.
fn build_attrs(
    metadata: Option<&Bound<'_, PyDict>>,
    imported: Option<&ImportedStateDict>,
) -> Result<Attrs> {
    let mut attrs = metadata::to_attrs(metadata)?;
    let len = |value: &AttrValue| match value {
        AttrValue::Int(_) => 8,
        AttrValue::Text(text) => text.as_bytes().len(),
        AttrValue::Bytes(bytes) => bytes.len(),
    };
    let bytes: usize = attrs.iter().map(|(name, value)| name.len() + len(value)).sum();
    if bytes > MAX_METADATA {
        let text = format!("metadata has {bytes} bytes, at most {MAX_METADATA} are kept");
        return Err(PyValueError::new_err(text).into());
    }
    let modules = imported.and_then(ImportedStateDict::module_metadata_attr);
    attrs.extend(modules.map(|modules| (MODULE_METADATA_ATTR.to_owned(), modules)));
    Ok(attrs)
}

/// Returns the ranks of the meshes of all shards of a state dict. `None` if it has no shards.
pub(super) fn mesh_ranks(imported: &ImportedStateDict) -> Option<BTreeSet<u32>> {
    let mut ranks = imported.omits_tensors.then(BTreeSet::new);
    for (_, leaf) in imported.dict.leaves() {
        let Value::Shards(shards) = leaf else { continue };
        let meshes = shards.iter().filter_map(|shard| shard.spec().mesh());
        let ranks = ranks.get_or_insert_with(BTreeSet::new);
        meshes.for_each(|mesh| ranks.extend(mesh.ranks()));
    }
    ranks
}
