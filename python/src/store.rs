//! The Python class `Store`: state dicts are put in one sharding and read in another.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyIterator, PyString, PyTuple};
use tssd_format::{MapKey, Node, Step};
use tssd_store::{
    ConnectOptions, Credentials, ErrorKind, GetOptions, Key, Residency, RunId, SeenVersion,
    Selection, Selector, VersionReader, WaitOptions,
};

/// Extraction of version numbers, writer ranks and transports from Python arguments.
mod arguments;
/// The connection of this process to a store.
mod connection;
/// Reads into the caller's tensors.
mod fill;
/// Reads without `into`: views of stored bytes, and copies.
mod loaded_tree;
/// An open version, leased while it is read.
mod open_version;
/// The state dict of a version on torch's "meta" device, without tensor bytes.
mod outline;
/// A put that continues in the background.
mod pending_put;
/// A version pinned under a label.
mod pin;
/// A version that is put tensor by tensor.
mod publisher;
/// Options of a put.
mod put_arguments;
/// A receiver that fills tensors with the versions of a ring.
mod receiver;
/// Reports of puts and gets, as Python dataclasses.
mod report;
/// Selection of leaves by name.
mod select;
/// A version whose bytes are on this host, and not yet in the caller's tensors.
mod staged_version;
/// An iterator over the versions of a key as they become visible.
mod subscription;

use self::arguments::After;
pub(crate) use self::pin::PyPin;
pub(crate) use self::receiver::PyReceiver;
use self::report::{GetDetails, get_report, put_report, version_info};
use self::select::select;
pub(crate) use self::staged_version::StagedVersion;
pub(crate) use self::subscription::PySubscription;
use crate::builder::{Framework, ObjectBuilder};
use crate::cast_rule::CastRule;
use crate::encoded::TorchStoreStateDict;
use crate::error::{BindingError, Failure, Result, type_error};
use crate::mapping::Mapping;
use crate::slice::{TensorShard, TensorSlice};
use crate::store::connection::{Connection, Deadline, VersionRead, parse_seconds};
use crate::store::fill::{Differences, FillOptions, FillResult, fill_state_dict, fill_tensor};
use crate::store::loaded_tree::LoadedTree;
pub(crate) use crate::store::open_version::{OpenVersion, VersionItems, VersionSlice};
use crate::store::pending_put::ImportDetails;
pub(crate) use crate::store::pending_put::PyPendingPut;
use crate::store::publisher::ImportOptions;
pub(crate) use crate::store::publisher::PyPublisher;
use crate::store::put_arguments::{PutArguments, PyPutOptions, import_for_put};

/// A store of state dicts by key, in immutable versions.
///
/// Args:
///     url: the address of the store: a directory, which is created if it does not exist; "unix:PATH" or
///         "unix:NAME", a daemon of this host (if no daemon of that name runs, one is started);
///         "tls://HOST:PORT", a daemon of another host; "s3://BUCKET/PREFIX", "gs:" or "az:", a bucket, with
///         credentials from the environment; "memory:", the memory of this process.
///         None: the value of TSSD_STORE, else "unix:default".
///     ca, cert, key_file: for "tls:", PEM files: the certificate of the trusted authority, the certificate of
///         this client, and its private key. None: the files that TSSD_CA, TSSD_CERT and TSSD_KEY name.
///     connect_timeout: how many seconds to wait for the first answer.
///
/// Raises:
///     TssdConnectionError: the store cannot be reached.
///     TssdValueError: the kind of address is unknown, or a file is invalid.
///     TssdUnsupportedError: the address is that of a daemon, and this system is not Linux.
#[pyclass(frozen, module = "tssd")]
pub(crate) struct Store {
    url: String,
    credentials: Option<(String, String, String)>,
    connect_timeout: f64,
    connection: Mutex<Option<Arc<Connection>>>,
}

/// Converts a Python `str` to a [`Key`].
fn extract_key(key: &Bound<'_, PyAny>) -> Result<Key> {
    let key: String = key.extract().map_err(|_| {
        let class = key.get_type().name().map_or_else(|_| "?".to_owned(), |name| name.to_string());
        type_error(format!(
            "a key is a str, this is a {class}: the order is put_state_dict(state_dict, key) and \
             put(key, value)"
        ))
    })?;
    Ok(Key::new(key)?)
}

/// Returns an iterator over keys. A single `str` is an error, as it would yield its characters.
fn iter_keys<'py>(keys: &Bound<'py, PyAny>) -> Result<Bound<'py, PyIterator>> {
    if keys.is_instance_of::<PyString>() {
        return Err(PyTypeError::new_err("several keys are a list of strs, this is one str").into());
    }
    Ok(keys.try_iter()?)
}

/// The version of a key that a call refers to.
enum VersionSelector<'py> {
    /// A version that the caller has open.
    Lease(Bound<'py, OpenVersion>),
    Stored(Selector),
}

impl<'py> VersionSelector<'py> {
    fn extract(version: Option<&Bound<'py, PyAny>>) -> Result<Self> {
        if let Some(Ok(lease)) = version.map(|version| version.cast::<OpenVersion>()) {
            return Ok(Self::Lease(lease.clone()));
        }
        Ok(Self::Stored(arguments::extract_optional_selector(version)?))
    }
}

/// A version to read, and how to read it.
struct ReadRequest<'py, 'a> {
    version: VersionSelector<'py>,
    writer: Option<u32>,
    verify: bool,
    require_transport: Option<&'a str>,
    timeout: Option<f64>,
}

impl ReadRequest<'_, '_> {
    /// Returns the version number, if the caller gave one.
    fn number(&self) -> Option<u64> {
        match &self.version {
            VersionSelector::Stored(selector) => arguments::selected_number(selector),
            VersionSelector::Lease(_) => None,
        }
    }

    fn open(
        &self,
        py: Python<'_>,
        connection: &Connection,
        key: &Key,
    ) -> Result<Arc<VersionReader>> {
        let version = match &self.version {
            VersionSelector::Stored(selector) => selector.clone(),
            VersionSelector::Lease(_) => Selector::Newest,
        };
        let options = GetOptions {
            version,
            writer: self.writer,
            unverified: !self.verify,
            require_transport: self
                .require_transport
                .map(arguments::parse_transport)
                .transpose()?,
            ..GetOptions::default()
        };
        if let VersionSelector::Lease(lease) = &self.version {
            return Ok(Arc::new(lease.get().reader_for_key(key)?.with_options(&options)?));
        }
        Ok(Arc::new(connection.block_on(py, self.timeout, connection.store.open(key, &options))?))
    }
}

impl Store {
    /// Returns the connection to the store. Connects if there is none, or if it is unusable.
    fn connect(&self, py: Python<'_>) -> Result<Arc<Connection>> {
        let usable = |slot: &Option<Arc<Connection>>| {
            slot.clone().filter(|connection| connection.is_usable())
        };
        if let Some(connection) = py.detach(|| usable(&self.lock_connection())) {
            return Ok(connection);
        }
        let mut options = ConnectOptions::from_environment();
        options.command_search =
            py.import("tssd._command")?.call_method0("search_paths")?.extract()?;
        py.detach(|| {
            options.timeout = parse_seconds(self.connect_timeout)?;
            if let Some((ca, cert, key)) = &self.credentials {
                let (ca, cert, key) = (ca.into(), cert.into(), key.into());
                options.credentials = Some(Credentials { ca, cert, key });
            }
            // The lock is not held while connecting: a signal handler may acquire it.
            let new = Connection::new(&self.url, &options)?;
            let mut slot = self.lock_connection();
            // Another thread may have connected in the meantime.
            Ok(usable(&slot).unwrap_or_else(|| slot.insert(new).clone()))
        })
    }

    fn lock_connection(&self) -> MutexGuard<'_, Option<Arc<Connection>>> {
        self.connection.lock().expect("nothing panics that holds it")
    }

    /// Converts `key` and connects, in that order: an invalid key is reported without a connection.
    fn connect_for_key(&self, key: &Bound<'_, PyAny>) -> Result<(Arc<Connection>, Key)> {
        let name = extract_key(key)?;
        Ok((self.connect(key.py())?, name))
    }
}

/// Returns whether a state dict is one value that was put by itself and is a container, such as a list.
fn is_single_container(root: &Node) -> bool {
    match root {
        Node::Container(_, children) => children.iter().any(|(step, child)| {
            matches!(step, Step::Key(MapKey::Str(name)) if name.as_bytes().is_empty())
                && matches!(child, Node::Container(..))
        }),
        _ => false,
    }
}

#[pymethods]
impl Store {
    #[new]
    #[pyo3(signature = (url=None, *, ca=None, cert=None, key_file=None, connect_timeout=30.0))]
    fn new(
        py: Python<'_>,
        url: Option<String>,
        ca: Option<String>,
        cert: Option<String>,
        key_file: Option<String>,
        connect_timeout: f64,
    ) -> Result<Self> {
        let store = Self::_connect_lazily(url, ca, cert, key_file, connect_timeout)?;
        store.connect(py)?;
        Ok(store)
    }

    /// Creates a store that connects at its first call.
    #[staticmethod]
    fn _connect_lazily(
        url: Option<String>,
        ca: Option<String>,
        cert: Option<String>,
        key_file: Option<String>,
        connect_timeout: f64,
    ) -> Result<Self> {
        let from_environment = std::env::var("TSSD_STORE").ok().filter(|url| !url.is_empty());
        let url = url.or(from_environment).unwrap_or_else(|| "unix:default".to_owned());
        let credentials = match (ca, cert, key_file) {
            (None, None, None) => None,
            (Some(ca), Some(cert), Some(key)) => Some((ca, cert, key)),
            _ => {
                let text = "ca, cert and key_file are given together, or none of them";
                return Err(PyValueError::new_err(text).into());
            }
        };
        Ok(Self { url, credentials, connect_timeout, connection: Mutex::default() })
    }

    /// The address of the store.
    #[getter]
    fn url(&self) -> &str {
        &self.url
    }

    /// Puts this process's part of a state dict.
    ///
    /// The part is a version of its own, or a contribution to a version of several writers. That version becomes
    /// visible in one step, when all its writers have committed.
    ///
    /// Args:
    ///     state_dict: a dict of tensors, DTensors, TensorShards, arrays, numbers, strs and containers.
    ///     key: the name, at most 1024 bytes.
    ///     version: the version number, such as the training step. None: the highest number + 1.
    ///     writers: all processes that contribute: a count, a list of global ranks, or a ProcessGroup. None: the
    ///         ranks of the meshes of the DTensors, or this process alone.
    ///     writer: the global rank of this process. None: its rank in torch.distributed, if a rank is needed.
    ///     job: the name of the run: the same in all writers, and a new one after a restart. None: agreed through
    ///         torch.distributed, else set by the launcher.
    ///     durability: "memory"; "disk": the version survives the daemon, and is on disk when this returns;
    ///         "object": the version survives the host. It is visible as soon as it is in memory, and in the
    ///         daemon's bucket when this returns.
    ///     wait: False: returns a PendingPut as soon as the tensors may be written to again. The put continues in
    ///         the background as long as this process runs.
    ///     metadata: a dict of JSON values about the state dict as a whole, at most 64 KiB. `head` and `open`
    ///         give it back.
    ///     transfer_dtype: the dtype in which floating tensors are stored, such as torch.bfloat16. A cast copy is
    ///         stored. Floating tensors of fewer than 16 bits per element, and all other tensors, keep their dtype.
    ///     allow_pickle: as for `save_file`.
    ///     timeout: how many seconds to wait for other processes and for memory. None: 60.
    ///     options: a PutOptions, with the options that few puts need. None: the defaults of PutOptions.
    ///     mapping: a `tssd.mapping.Mapping`: the stored tensors that tensors of `state_dict` consist of. They are stored
    ///         under their own names, as entries of the state dict itself. None: all names are kept.
    ///
    /// Returns:
    ///     A PutReport: the version, whether it is visible, and if not, the writers whose contributions are missing.
    ///     With `wait=False`, a PendingPut.
    ///
    /// Raises:
    ///     TssdTypeError, TssdValueError: as `save_file`; or the store does not allow the put, or the contributions
    ///         are inconsistent.
    ///     TssdTimeoutError: another process blocked the put, or memory was not free in time.
    #[pyo3(signature = (state_dict, key, *, version=None, writers=None, writer=None, job=None, durability="memory", wait=true, metadata=None, transfer_dtype=None, allow_pickle=false, timeout=None, options=None, mapping=None))]
    #[expect(clippy::too_many_arguments, reason = "they are the arguments of the Python method")]
    fn put_state_dict<'py>(
        &self,
        state_dict: &Bound<'py, PyAny>,
        key: &Bound<'py, PyAny>,
        #[pyo3(from_py_with = arguments::extract_optional_version)] version: Option<u64>,
        writers: Option<Bound<'py, PyAny>>,
        #[pyo3(from_py_with = arguments::extract_optional_writer)] writer: Option<u32>,
        job: Option<String>,
        durability: &'py str,
        wait: bool,
        metadata: Option<&Bound<'py, PyDict>>,
        transfer_dtype: Option<&Bound<'py, PyAny>>,
        allow_pickle: bool,
        timeout: Option<f64>,
        options: Option<&Bound<'py, PyAny>>,
        mapping: Option<&Bound<'py, PyAny>>,
    ) -> Result<Bound<'py, PyAny>> {
        let py = state_dict.py();
        let name = extract_key(key)?;
        let mapping = mapping.map(Mapping::extract).transpose()?;
        let put = PutArguments { version, writers, writer, job, durability, timeout };
        let connection = self.connect(py)?;
        let with_key = |error: Failure| error.with_key(name.as_str(), version);
        let prepare = || {
            let put_options = PyPutOptions::extract(options)?;
            let keep_dtype = put_options.keep_dtype.as_ref();
            let transfer = transfer_dtype.map(|dtype| CastRule::new(dtype, keep_dtype));
            let mut imported = import_for_put(state_dict, allow_pickle, transfer.transpose()?)?;
            let options = put.options(py, &put_options, metadata, Some(&imported))?;
            if let Some(mapping) = &mapping {
                imported.dict = mapping.apply(imported.dict)?;
            }
            Ok::<_, Failure>((imported, options))
        };
        let (imported, options) = match prepare() {
            Ok(prepared) => prepared,
            Err(error) => {
                // Puts without a version number are matched by their count in each writer: count this one too.
                if let Ok(Some(options)) = put.skipped_put_options(state_dict) {
                    connection.store.skip_put(&name, &options);
                }
                return Err(with_key(error));
            }
        };
        let copies = imported.devices.copy_stats().clone();
        if wait {
            let put = connection.store.put_state_dict(&name, &imported.dict, &options);
            let report = connection.block_on(py, None, put).map_err(with_key)?;
            return put_report(py, &report, copies.snapshot(), &imported.stored_as_base);
        }
        let put = connection.store.put_state_dict_later(&name, &imported.dict, &options);
        let pending = connection.block_on(py, None, put).map_err(with_key)?;
        let details = ImportDetails { copies, stored_as_base: imported.stored_as_base };
        Ok(Bound::new(py, PyPendingPut::new(connection, name, pending, details))?.into_any())
    }

    /// Gets a version of a state dict: whole, or into the caller's tensors, in any sharding.
    ///
    /// Args:
    ///     key: the name.
    ///     into: tensors to fill in place: a nested dict of tensors, views, DTensors of any mesh and placement,
    ///         TensorShards or writable arrays, matched by the fqns of the leaves; or `Targets`, which name them. Other leaves in its dicts and
    ///         lists are replaced by the stored leaf of that fqn; by a pickled one only with `allow_pickle`.
    ///         Of a tensor that wraps tensors, the inner tensors are filled: it must agree with the stored one in all but
    ///         their elements, and a DTensor of such tensors must have the stored sharding.
    ///         None: whole tensors. A tensor is a view of the stored bytes if one stored slice contains all of it.
    ///         A view is copy-on-write: a write to it changes the data of no other reader. It retains the version
    ///         as long as it is alive. Views that are arrays of numpy are read-only. A forked process has the views
    ///         of its parent only as long as the parent has them.
    ///     version: the version number, a label that pins it, or the result of `open` or `wait_for_version`. None: the
    ///         newest version.
    ///     writer: the writer whose values to read where writers have different ones.
    ///     names: without `into`: the leaves to read: their fqns, the fqns of containers, or patterns such as
    ///         "model.layers.*.bias". Lists and tuples are read whole if anything in them is selected.
    ///     strict: with `into`: whether it must have exactly the tensors that are stored. False: the report lists
    ///         `missing_keys` and `unexpected_keys`. Shapes must always be equal.
    ///     cast: with `into`: whether the dtypes of floating tensors may differ from the stored ones.
    ///     copy: without `into`: whether every tensor gets memory of its own.
    ///     verify: whether bytes are verified against their checksums.
    ///     require_transport: the required transport: "cuda_ipc", "file", "memory", "object", "shared_memory", "tcp" or
    ///         "tls". Any other transport is an error. None: any transport.
    ///     return_report: whether a GetReport is returned as well.
    ///     allow_pickle: as for `load_file`.
    ///     timeout: how many seconds to wait for the store's answer, and for bytes that are not on this host.
    ///     mapping: with `into`: a `tssd.mapping.Mapping`: the stored tensors that tensors of `into` consist of, such as
    ///         the q, k and v of a fused parameter. None: each tensor is the stored one of the same name.
    ///
    /// Returns:
    ///     The state dict, or `into`. With `return_report`, a pair of that and the report.
    ///
    /// Raises:
    ///     TssdKeyError: the key, version or leaf does not exist.
    ///     TssdKeyError, TssdTypeError, TssdValueError: names, dtypes or shapes differ. Nothing was written. The
    ///         message lists the differences: the first 10, and the number of the others.
    ///     TssdValueError: without `into`, a DTensor of tensors that wrap tensors is stored in several parts.
    ///     TssdCorruptError: bytes are damaged.
    #[pyo3(signature = (key, into=None, *, version=None, writer=None, names=None, strict=true, cast=false, copy=false, verify=true, require_transport=None, return_report=false, allow_pickle=false, timeout=None, mapping=None))]
    #[expect(
        clippy::too_many_arguments,
        clippy::fn_params_excessive_bools,
        reason = "they are the arguments of the Python method"
    )]
    fn get_state_dict<'py>(
        &self,
        key: &Bound<'py, PyAny>,
        into: Option<&Bound<'py, PyAny>>,
        version: Option<&Bound<'py, PyAny>>,
        #[pyo3(from_py_with = arguments::extract_optional_writer)] writer: Option<u32>,
        names: Option<&Bound<'py, PyAny>>,
        strict: bool,
        cast: bool,
        copy: bool,
        verify: bool,
        require_transport: Option<&str>,
        return_report: bool,
        allow_pickle: bool,
        timeout: Option<f64>,
        mapping: Option<&Bound<'py, PyAny>>,
    ) -> Result<Bound<'py, PyAny>> {
        let (py, (connection, name)) = (key.py(), self.connect_for_key(key)?);
        let mapping = mapping.map(Mapping::extract).transpose()?;
        if mapping.is_some() && into.is_none() {
            return Err(
                PyValueError::new_err("`mapping` says what tensors of `into` consist of").into()
            );
        }
        let version = VersionSelector::extract(version)?;
        let request = ReadRequest { version, writer, verify, require_transport, timeout };
        let (number, deadline) = (request.number(), Deadline::new(timeout)?);
        let read = || {
            let reader = request.open(py, &connection, &name)?;
            let read =
                VersionRead { connection: &connection, reader: &reader, deadline: &deadline };
            if let Some(into) = into {
                if names.is_some() {
                    return Err(
                        PyValueError::new_err("`into` says itself which names it has").into()
                    );
                }
                let mapping = mapping.as_ref();
                let options = FillOptions { mapping, strict, cast, allow_pickle };
                let (filled, differences) = fill_state_dict(&read, into, options)?;
                let FillResult { report, copy_stats: copied, staged_bytes: staged } = filled;
                let details = GetDetails { staged, copied, ..GetDetails::default() };
                let report = || get_report(py, &report, &differences, details);
                return Ok((into.clone(), return_report.then(report).transpose()?));
            }
            let root = match names {
                Some(names) => select(py, &reader, names)?,
                None => reader.structure().clone(),
            };
            let version = LoadedTree::read(py, &read, root, copy)?;
            let framework = Framework::parse(py, None)?;
            let maker =
                ObjectBuilder::new(py, &version, &version, framework).allow_pickle(allow_pickle);
            let no_differences = Differences::default();
            let details = GetDetails { viewed: version.viewed_bytes, ..GetDetails::default() };
            let report = || get_report(py, &version.report, &no_differences, details);
            let report = return_report.then(report).transpose()?;
            Ok::<_, Failure>((maker.build_state_dict()?, report))
        };
        let (value, report) = read().map_err(|error| error.with_key(name.as_str(), number))?;
        Ok(match report {
            Some(report) => PyTuple::new(py, [value, report])?.into_any(),
            None => value,
        })
    }

    /// Brings the bytes of a version into the memory of this host, verified, for tensors that are filled later.
    ///
    /// The tensors are written by `StagedVersion.commit`, which needs no other process: until then, they can be in use. Of a
    /// version that is on another host, in a bucket or compressed, exactly the bytes that the tensors need are fetched to
    /// staging memory. A version in the memory of this host is verified in place.
    ///
    /// Args:
    ///     key, into, version, writer, strict, cast, verify, require_transport, allow_pickle, timeout, mapping: as for
    ///         `get_state_dict`.
    ///
    /// Returns:
    ///     A StagedVersion: `commit()`, `report`, `close()`, and a context manager. It leases the version.
    ///
    /// Raises:
    ///     As `get_state_dict`. No tensor is written.
    #[pyo3(signature = (key, into, *, version=None, writer=None, strict=true, cast=false, verify=true, require_transport=None, allow_pickle=false, timeout=None, mapping=None))]
    #[expect(
        clippy::too_many_arguments,
        clippy::fn_params_excessive_bools,
        reason = "they are the arguments of the Python method"
    )]
    fn stage(
        &self,
        key: &Bound<'_, PyAny>,
        into: &Bound<'_, PyAny>,
        version: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = arguments::extract_optional_writer)] writer: Option<u32>,
        strict: bool,
        cast: bool,
        verify: bool,
        require_transport: Option<&str>,
        allow_pickle: bool,
        timeout: Option<f64>,
        mapping: Option<&Bound<'_, PyAny>>,
    ) -> Result<StagedVersion> {
        let (py, (connection, name)) = (key.py(), self.connect_for_key(key)?);
        let mapping = mapping.map(Mapping::extract).transpose()?;
        let version = VersionSelector::extract(version)?;
        let request = ReadRequest { version, writer, verify, require_transport, timeout };
        let (number, deadline) = (request.number(), Deadline::new(timeout)?);
        let stage = || {
            let reader = request.open(py, &connection, &name)?;
            let read =
                VersionRead { connection: &connection, reader: &reader, deadline: &deadline };
            let options = FillOptions { mapping: mapping.as_ref(), strict, cast, allow_pickle };
            StagedVersion::new(&read, connection.clone(), name.clone(), into, options)
        };
        stage().map_err(|error| error.with_key(name.as_str(), number))
    }

    /// Puts one value, as a state dict that contains nothing else.
    ///
    /// See `put_state_dict` for the arguments.
    #[pyo3(signature = (key, value, **keywords))]
    fn put<'py>(
        slf: &Bound<'py, Self>,
        key: &Bound<'py, PyAny>,
        value: &Bound<'py, PyAny>,
        keywords: Option<&Bound<'py, PyDict>>,
    ) -> Result<Bound<'py, PyAny>> {
        let py = slf.py();
        let is_dict =
            value.is_instance_of::<PyDict>() || value.is_instance_of::<TorchStoreStateDict>();
        let dict = if is_dict {
            value.clone()
        } else {
            let dict = PyDict::new(py);
            dict.set_item("", value)?;
            dict.into_any()
        };
        Ok(slf.call_method("put_state_dict", (dict, key), keywords)?)
    }

    /// Puts several values, each under its own key, one after the other.
    ///
    /// See `put_state_dict` for the other arguments.
    ///
    /// Args:
    ///     values: a dict of keys to values.
    ///
    /// Returns:
    ///     A list of PutReports, one for each value. With `wait=False`, a list of PendingPuts.
    #[pyo3(signature = (values, **keywords))]
    fn put_batch<'py>(
        slf: &Bound<'py, Self>,
        values: &Bound<'py, PyDict>,
        keywords: Option<&Bound<'py, PyDict>>,
    ) -> Result<Vec<Bound<'py, PyAny>>> {
        values.iter().map(|(key, value)| Self::put(slf, &key, &value, keywords)).collect()
    }

    /// Gets several values.
    ///
    /// See `get` for the other arguments.
    ///
    /// Args:
    ///     keys: the names; or a dict of names to tensors to fill in place, or to None.
    ///
    /// Returns:
    ///     A dict of names to values.
    #[pyo3(signature = (keys, **keywords))]
    fn get_batch<'py>(
        slf: &Bound<'py, Self>,
        keys: &Bound<'py, PyAny>,
        keywords: Option<&Bound<'py, PyDict>>,
    ) -> Result<Bound<'py, PyDict>> {
        let py = slf.py();
        let values = PyDict::new(py);
        for key in iter_keys(keys)? {
            let key = key?;
            let into = match keys.cast::<PyDict>() {
                Ok(keys) => keys.get_item(&key)?,
                Err(_) => None,
            };
            values.set_item(&key, slf.call_method("get", (&key, into), keywords)?)?;
        }
        Ok(values)
    }

    /// Deletes all versions of several keys, and returns the number of versions deleted.
    ///
    /// A key without versions is not an error.
    fn delete_batch(&self, keys: &Bound<'_, PyAny>) -> Result<u64> {
        let mut count = 0;
        for key in iter_keys(keys)? {
            count += self.delete(&key?, None)?;
        }
        Ok(count)
    }

    /// Gets one value that was put with `put`, or one leaf of a state dict.
    ///
    /// Args:
    ///     key: the name.
    ///     into: a tensor to fill in place, which can wrap tensors.
    ///     fqn: the leaf of the state dict. None: the value that was put with `put`.
    ///     tensor_slice: the part of the tensor. None: the whole tensor, or the part that `into` describes.
    ///     version, writer, verify, require_transport, timeout: as for `get_state_dict`.
    ///
    /// Raises:
    ///     TssdKeyError: the key, version or leaf does not exist.
    #[pyo3(signature = (key, into=None, *, fqn=None, tensor_slice=None, version=None, writer=None, verify=true, require_transport=None, timeout=None))]
    #[expect(clippy::too_many_arguments, reason = "they are the arguments of the Python method")]
    fn get<'py>(
        &self,
        key: &Bound<'py, PyAny>,
        into: Option<&Bound<'py, PyAny>>,
        fqn: Option<&str>,
        tensor_slice: Option<&Bound<'py, TensorSlice>>,
        version: Option<&Bound<'py, PyAny>>,
        #[pyo3(from_py_with = arguments::extract_optional_writer)] writer: Option<u32>,
        verify: bool,
        require_transport: Option<&str>,
        timeout: Option<f64>,
    ) -> Result<Bound<'py, PyAny>> {
        let (py, (connection, name)) = (key.py(), self.connect_for_key(key)?);
        let version = VersionSelector::extract(version)?;
        let request = ReadRequest { version, writer, verify, require_transport, timeout };
        let (number, fqn) = (request.number(), fqn.unwrap_or_default());
        let deadline = Deadline::new(timeout)?;
        let read = || {
            let reader = request.open(py, &connection, &name)?;
            let read =
                VersionRead { connection: &connection, reader: &reader, deadline: &deadline };
            if let Some(into) = into {
                let target = match tensor_slice {
                    Some(slice) => {
                        let slices = vec![slice.get().0.clone()];
                        let shard = TensorShard::from_slices(py, into.clone().unbind(), slices)?;
                        Bound::new(py, shard)?.into_any()
                    }
                    None => into.clone(),
                };
                fill_tensor(&read, &target, fqn)?;
                return Ok(into.clone());
            }
            let slice = tensor_slice.map(|slice| &slice.get().0);
            if fqn.is_empty() && slice.is_none() && is_single_container(reader.structure()) {
                let root = reader.structure().clone();
                let version = LoadedTree::read(py, &read, root, false)?;
                let framework = Framework::parse(py, None)?;
                let dict =
                    ObjectBuilder::new(py, &version, &version, framework).build_state_dict()?;
                return Ok(dict.get_item("")?);
            }
            LoadedTree::read_leaf(py, &read, fqn, slice)?.to_object(py)
        };
        read().map_err(|error: Failure| error.with_key(name.as_str(), number))
    }

    /// Puts a version tensor by tensor: `with store.publish(key) as p: p.put(name, tensor)`.
    ///
    /// The version becomes visible in one step, when the block has ended. If the block raises, nothing of the
    /// version remains.
    ///
    /// Args:
    ///     bucket_bytes: tensors are written when this many bytes of them are pending; half as many with
    ///         `transfer_dtype`. Larger tensors are cast and written in parts, except those in a container.
    ///         Ranks that have the same box must pass the same value if `options` has `replicas="all"`, or if the
    ///         tensors name their own offsets.
    ///     key, version, writers, writer, job, durability, metadata, transfer_dtype, allow_pickle, timeout,
    ///         options: as for `put_state_dict`.
    ///
    /// Raises:
    ///     As `put_state_dict`.
    #[pyo3(signature = (key, *, version=None, writers=None, writer=None, job=None, bucket_bytes=512 << 20, durability="memory", metadata=None, transfer_dtype=None, allow_pickle=false, timeout=None, options=None), text_signature = "($self, key, *, version=None, writers=None, writer=None, job=None, bucket_bytes=536870912, durability='memory', metadata=None, transfer_dtype=None, allow_pickle=False, timeout=None, options=None)")]
    #[expect(clippy::too_many_arguments, reason = "they are the arguments of the Python method")]
    fn publish<'py>(
        &self,
        key: &Bound<'py, PyAny>,
        #[pyo3(from_py_with = arguments::extract_optional_version)] version: Option<u64>,
        writers: Option<Bound<'py, PyAny>>,
        #[pyo3(from_py_with = arguments::extract_optional_writer)] writer: Option<u32>,
        job: Option<String>,
        bucket_bytes: u64,
        durability: &'py str,
        metadata: Option<&Bound<'py, PyDict>>,
        transfer_dtype: Option<&Bound<'py, PyAny>>,
        allow_pickle: bool,
        timeout: Option<f64>,
        options: Option<&Bound<'py, PyAny>>,
    ) -> Result<PyPublisher> {
        let put = PutArguments { version, writers, writer, job, durability, timeout };
        let (py, (connection, name)) = (key.py(), self.connect_for_key(key)?);
        let has_writers = put.writers.is_some();
        let put_options = PyPutOptions::extract(options)?;
        let keep_dtype = put_options.keep_dtype.as_ref();
        let options = put.options(py, &put_options, metadata, None)?;
        let unbind = |object: &Bound<'py, PyAny>| object.clone().unbind();
        let transfer = transfer_dtype.map(|dtype| {
            // Invalid arguments are an error now, not at the first tensor.
            CastRule::new(dtype, keep_dtype).map(|_| (unbind(dtype), keep_dtype.map(unbind)))
        });
        let transfer = transfer.transpose()?;
        // The copies that are being cast take memory beside the pending tensors: each gets half of the bucket.
        let buffers =
            if transfer.is_some() && matches!(options.residency, Residency::Host) { 2 } else { 1 };
        let cast_bytes = bucket_bytes.div_ceil(buffers);
        let import_options = ImportOptions { allow_pickle, has_writers, transfer, cast_bytes };
        PyPublisher::new(connection, name, &options, cast_bytes, import_options)
    }

    /// Opens a version to read it tensor by tensor.
    ///
    /// Later puts do not remove the version while the returned object is open, or while a tensor of it is alive.
    ///
    /// Args:
    ///     names: the tensors to iterate over: their fqns, or patterns of fqns. None: all tensors.
    ///     key, version, writer, verify, require_transport, timeout: as for `get_state_dict`.
    ///
    /// Returns:
    ///     An OpenVersion.
    ///
    /// Raises:
    ///     TssdKeyError: the key or version does not exist.
    #[pyo3(signature = (key, *, version=None, names=None, writer=None, verify=true, require_transport=None, timeout=None))]
    #[expect(clippy::too_many_arguments, reason = "they are the arguments of the Python method")]
    fn open<'py>(
        &self,
        key: &Bound<'py, PyAny>,
        version: Option<&Bound<'py, PyAny>>,
        names: Option<&Bound<'py, PyAny>>,
        #[pyo3(from_py_with = arguments::extract_optional_writer)] writer: Option<u32>,
        verify: bool,
        require_transport: Option<&str>,
        timeout: Option<f64>,
    ) -> Result<OpenVersion> {
        let (py, (connection, name)) = (key.py(), self.connect_for_key(key)?);
        let version = VersionSelector::extract(version)?;
        let request = ReadRequest { version, writer, verify, require_transport, timeout };
        let open = || {
            let reader = request.open(py, &connection, &name)?;
            OpenVersion::new(py, connection.clone(), name.clone(), reader, names)
        };
        open().map_err(|error| error.with_key(name.as_str(), request.number()))
    }

    /// Iterates over the versions of a key as they become visible, starting with the newest.
    ///
    /// A version that is replaced before the iterator reaches it is skipped.
    fn subscribe(&self, key: &Bound<'_, PyAny>) -> Result<PySubscription> {
        Ok(PySubscription::new(self.connect(key.py())?, &extract_key(key)?))
    }

    /// Receives versions that are put to a key with `residency="ring"` or "in_place" from now on.
    ///
    /// The receiver fills the caller's tensors, which are all on one GPU or all in the host's memory. Such puts wait
    /// for the receiver until it is closed.
    ///
    /// Args:
    ///     into: tensors to fill in place, as for `get_state_dict`, in any sharding. Each `receive` fills them with
    ///         the next version. Their dtypes must be those of the put. Other tensors of the version are skipped.
    ///     verify: whether bytes that pass through the host's memory are verified against their checksums.
    ///     require_transport: as for `get_state_dict`.
    ///
    /// Returns:
    ///     A Receiver: `receive(timeout=None)`, `close()`, and a context manager.
    ///
    /// Raises:
    ///     TssdUnsupportedError: the store has no daemon, or its daemon is not the only controller of the store.
    #[pyo3(signature = (key, into, *, verify=true, require_transport=None))]
    fn receiver(
        &self,
        key: &Bound<'_, PyAny>,
        into: &Bound<'_, PyAny>,
        verify: bool,
        require_transport: Option<&str>,
    ) -> Result<PyReceiver> {
        let require_transport = require_transport.map(arguments::parse_transport).transpose()?;
        let options =
            GetOptions { unverified: !verify, require_transport, ..GetOptions::default() };
        PyReceiver::new(self.connect(key.py())?, extract_key(key)?, into, options)
    }

    /// Returns the keys that have a visible version and begin with `prefix`, sorted.
    #[pyo3(signature = (prefix=""))]
    fn keys(&self, py: Python<'_>, prefix: &str) -> Result<Vec<String>> {
        let connection = self.connect(py)?;
        let keys = connection.block_on(py, None, connection.store.keys(Some(prefix)))?;
        Ok(keys.iter().map(ToString::to_string).collect())
    }

    /// Returns whether a version of a key is visible, or whether it has a label. Without `version`, whether any version
    /// is visible.
    #[pyo3(signature = (key, version=None))]
    fn exists(&self, key: &Bound<'_, PyAny>, version: Option<&Bound<'_, PyAny>>) -> Result<bool> {
        let (connection, name) = self.connect_for_key(key)?;
        let version = arguments::extract_optional_selector(version)?;
        connection.block_on(key.py(), None, connection.store.exists(&name, version))
    }

    /// Returns the visible versions of a key as a list of VersionInfo, oldest first.
    ///
    /// The list is empty for a key that was never put.
    fn versions<'py>(&self, key: &Bound<'py, PyAny>) -> Result<Vec<Bound<'py, PyAny>>> {
        let (connection, name) = self.connect_for_key(key)?;
        let versions = connection.block_on(key.py(), None, connection.store.versions(&name))?;
        versions.iter().map(|info| version_info(key.py(), info)).collect()
    }

    /// Returns the newest visible version of a key as VersionInfo, with its `metadata`.
    ///
    /// None if the key has no visible version.
    fn head<'py>(&self, key: &Bound<'py, PyAny>) -> Result<Option<Bound<'py, PyAny>>> {
        let (py, (connection, name)) = (key.py(), self.connect_for_key(key)?);
        let head = connection.block_on(py, None, async {
            loop {
                let reader = match connection.store.open(&name, &GetOptions::default()).await {
                    Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
                    result => result?,
                };
                let mut versions = connection.store.versions(&name).await?.into_iter();
                // The version may have been removed since it was opened: then the newest one is opened again.
                if let Some(info) = versions.find(|info| info.id == reader.id()) {
                    return Ok(Some((info, reader)));
                }
            }
        });
        let head = head.map_err(|error| error.with_key(name.as_str(), None))?;
        head.map(|(info, reader)| report::version_info_with_metadata(py, &info, reader.attrs()))
            .transpose()
    }

    /// Deletes a version of a key, or all versions, and returns the number of versions deleted.
    ///
    /// A reader that has a version open can still read it. The labels of a version keep its data until `unpin`, and still
    /// select it.
    #[pyo3(signature = (key, version=None))]
    fn delete(&self, key: &Bound<'_, PyAny>, version: Option<&Bound<'_, PyAny>>) -> Result<u64> {
        let (connection, name) = self.connect_for_key(key)?;
        let versions = match arguments::extract_optional_selector(version)? {
            Selector::Newest => Selection::All,
            Selector::Number(number) => Selection::Number(number),
            Selector::Id(id) => Selection::Id(id),
            Selector::Label(label) => Selection::Label(label),
        };
        connection.block_on(key.py(), None, connection.store.delete(&name, versions))
    }

    /// Sets how many of the newest versions of a key are retained from now on. The default is 1.
    fn retain(&self, key: &Bound<'_, PyAny>, keep: NonZeroU32) -> Result<()> {
        let (connection, name) = self.connect_for_key(key)?;
        connection.block_on(key.py(), None, connection.store.retain(&name, keep))
    }

    /// Waits until a version whose number is `version` or higher is visible, and opens the newest version.
    ///
    /// The store may still have versions of an earlier run of the writers. With `after` or `run`, they do not count.
    ///
    /// Args:
    ///     key: the key.
    ///     version: the lowest number. 0: any version.
    ///     timeout: how many seconds to wait. None: without limit.
    ///     after: a version that the caller has seen, and which all that count must follow: an OpenVersion, a VersionInfo,
    ///         a PutReport, or a pair of epoch and number. "now": the newest version at the time of the call. Take it before the
    ///         writers start: `after=store.head(key)`. None: every version counts.
    ///     run: the run that must have put the version: the `job` of its writers. None: any.
    ///
    /// Returns:
    ///     An OpenVersion, as `open` returns it: later puts do not remove the version while it is open. It
    ///     converts to an int, the version number, and every get accepts it as `version=`.
    ///
    /// Raises:
    ///     TssdTimeoutError: no such version is visible after `timeout` seconds.
    #[pyo3(signature = (key, version=0, timeout=None, *, after=None, run=None))]
    fn wait_for_version(
        &self,
        key: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = arguments::extract_version)] version: u64,
        timeout: Option<f64>,
        after: Option<&Bound<'_, PyAny>>,
        run: Option<&str>,
    ) -> Result<OpenVersion> {
        let (py, (connection, name)) = (key.py(), self.connect_for_key(key)?);
        let forever = Duration::from_secs(u64::from(u32::MAX));
        let timeout = timeout.map_or(Ok(forever), parse_seconds)?;
        let after = after.map(arguments::extract_after).transpose()?.flatten();
        let result = connection.block_on(py, None, async {
            let after = match after {
                Some(After::Now) => {
                    connection.store.head(&name).await?.as_ref().map(SeenVersion::from)
                }
                Some(After::Seen(seen)) => Some(seen),
                None => None,
            };
            let deadline = Instant::now().checked_add(timeout);
            let run = run.map(|run| RunId(run.to_owned()));
            let mut options = WaitOptions { version, after, run, timeout };
            loop {
                let info = match connection.store.wait_for_version_with(&name, &options).await {
                    Err(error) if error.kind() == ErrorKind::NotFound => {
                        return Ok(Err(BindingError::new("timeout", error.to_string())));
                    }
                    info => info?,
                };
                let version = Selector::Id(info.id);
                let opened = GetOptions { version, ..GetOptions::default() };
                match connection.store.open(&name, &opened).await {
                    // In the meantime a newer version has replaced it, or it was deleted.
                    Err(error) if error.kind() == ErrorKind::NotFound => {}
                    result => return result.map(Ok),
                }
                options.timeout = deadline
                    .map_or(timeout, |deadline| deadline.saturating_duration_since(Instant::now()));
            }
        });
        let result = result.and_then(|reader| reader.map_err(Failure::from));
        let reader = result.map_err(|error| error.with_key(name.as_str(), Some(version)))?;
        OpenVersion::new(py, connection, name, Arc::new(reader), None)
    }

    /// Pins a version under a label. Without `version`, the newest is pinned.
    ///
    /// Later puts do not remove a pinned version. A label pins one version of a key at a time: it no longer pins
    /// the version that it pinned before. It is accepted wherever a version is, and has at least one character that is
    /// no digit.
    ///
    /// Returns:
    ///     A Pin, which converts to an int, the version number. As a context manager, it unpins the version when
    ///     its block ends. Otherwise `unpin` does so, in any process.
    #[pyo3(signature = (key, label, version=None))]
    fn pin(
        &self,
        key: &Bound<'_, PyAny>,
        label: &str,
        version: Option<&Bound<'_, PyAny>>,
    ) -> Result<PyPin> {
        let (connection, name) = self.connect_for_key(key)?;
        let selector = arguments::extract_optional_selector(version)?;
        let number = arguments::selected_number(&selector);
        let pinned =
            connection.block_on(key.py(), None, connection.store.pin(&name, selector, label));
        let version = pinned.map_err(|error| error.with_key(name.as_str(), number))?;
        Ok(PyPin::new(connection, name, label.to_owned(), version))
    }

    /// Makes an old version the newest one: it gets the next number, in a new epoch.
    ///
    /// No bytes move. The version no longer has its old number, and the next put must have a number above the new one.
    /// Waiters and subscribers get it as a new version. Retention applies as after a put: if it keeps one version, the one
    /// that was the newest is deleted. If the version is the newest one already, nothing changes.
    ///
    /// Args:
    ///     key: the key.
    ///     to: the version: its number, a label that pins it, a VersionInfo or an OpenVersion.
    ///
    /// Returns:
    ///     A VersionInfo of the version, with its new number.
    ///
    /// Raises:
    ///     TssdKeyError: there is no such version.
    ///     TssdValueError: a version of the key is being uploaded to a bucket.
    #[pyo3(signature = (key, to))]
    fn rollback<'py>(
        &self,
        key: &Bound<'py, PyAny>,
        to: &Bound<'py, PyAny>,
    ) -> Result<Bound<'py, PyAny>> {
        let (connection, name) = self.connect_for_key(key)?;
        if to.is_none() {
            return Err(type_error("to is an int or a label, not None".to_owned()).into());
        }
        let to = arguments::extract_selector(to, "to")?;
        let number = arguments::selected_number(&to);
        let newest = connection.block_on(key.py(), None, connection.store.rollback(&name, to));
        let newest = newest.map_err(|error| error.with_key(name.as_str(), number))?;
        version_info(key.py(), &newest)
    }

    /// Removes a label, so that it no longer pins its version.
    fn unpin(&self, key: &Bound<'_, PyAny>, label: &str) -> Result<()> {
        let (connection, name) = self.connect_for_key(key)?;
        connection.block_on(key.py(), None, connection.store.unpin(&name, label))
    }

    /// Returns the labels of a key, each with the number of the version that it pins.
    fn pins(&self, key: &Bound<'_, PyAny>) -> Result<BTreeMap<String, u64>> {
        let (connection, name) = self.connect_for_key(key)?;
        connection.block_on(key.py(), None, connection.store.pins(&name))
    }

    /// Copies a version into the memory of this host's daemon, ahead of a get.
    ///
    /// Returns:
    ///     The version number, for the get.
    #[pyo3(signature = (key, *, version=None, timeout=None))]
    fn prefetch(
        &self,
        key: &Bound<'_, PyAny>,
        version: Option<&Bound<'_, PyAny>>,
        timeout: Option<f64>,
    ) -> Result<u64> {
        let (connection, name) = self.connect_for_key(key)?;
        let version = arguments::extract_optional_selector(version)?;
        let number = arguments::selected_number(&version);
        let options = GetOptions { version, ..GetOptions::default() };
        let fetched =
            connection.block_on(key.py(), timeout, connection.store.prefetch(&name, &[], &options));
        Ok(fetched.map_err(|error| error.with_key(name.as_str(), number))?.version)
    }

    /// Closes the connection. State dicts that were read stay valid; the next call connects again.
    fn close(&self, py: Python<'_>) {
        let connection = py.detach(|| self.lock_connection().take());
        py.detach(|| drop(connection));
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*error))]
    fn __exit__(&self, error: &Bound<'_, PyTuple>) {
        self.close(error.py());
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        Ok(format!("Store({})", PyString::new(py, &self.url).repr()?))
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> Result<(Bound<'py, PyAny>, (Py<PyAny>,))> {
        let (py, this) = (slf.py(), slf.get());
        let (ca, cert, key) = match &this.credentials {
            Some((ca, cert, key)) => (Some(ca), Some(cert), Some(key)),
            None => (None, None, None),
        };
        let state = (&this.url, ca, cert, key, this.connect_timeout).into_pyobject(py)?;
        Ok((py.import("tssd._ranks")?.getattr("connect")?, (state.into_any().unbind(),)))
    }
}
