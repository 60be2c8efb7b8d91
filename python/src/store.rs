//! A store of state dicts: put in one sharding, got in another.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyIterator, PyString, PyTuple};
use tssd_format::{Key as Name, Node, Step};
use tssd_store::{ConnectOptions, Credentials, ErrorKind, GetOptions, Key, Opened, Residency};

/// A store, and the threads of this process that wait for it.
mod connected;
/// The caller's own tensors, which a get fills.
mod into;
/// A version that stays there while it is read.
mod lease;
mod number;
/// What a version holds, without the bytes of its tensors.
mod outline;
/// A put that goes on by itself.
mod pending;
/// A label that holds a version.
mod pin;
/// A version that is put tensor by tensor.
mod publish;
/// How state dicts are put.
mod put;
/// Tensors that are filled with versions of a ring.
mod receiver;
/// What was done.
mod report;
/// Which leaves are wanted.
mod select;
/// The versions of a key as they come.
mod subscription;
/// What a get without `into` reads.
mod version;

use self::connected::{Connected, Patience, seconds};
use self::into::{Allowed, Differences, Filled, fill_all, fill_one};
pub(crate) use self::lease::{Items, LeaseSlice, OpenVersion};
pub(crate) use self::pending::Pending;
pub(crate) use self::pin::Pinned;
pub(crate) use self::publish::Publishing;
use self::publish::Taking;
use self::put::{Put, taken};
pub(crate) use self::receiver::Receiving;
use self::report::{get_report, put_report, version_info};
use self::select::select;
pub(crate) use self::subscription::Subscribed;
use self::version::{Reading, Version};
use crate::error::{Failure, Refusal, Result};
use crate::local::Transfer;
use crate::object::{Framework, Maker};
use crate::slice::{TensorShard, TensorSlice};
use crate::tssd::TorchStoreStateDict;

/// State dicts by key, in immutable versions.
///
/// Args:
///     url: a directory that is there; "unix:PATH" or "unix:NAME", a daemon of this host, of which one of that
///         name is started if there is none; "tls://HOST:PORT", of another host; "s3://BUCKET/PREFIX",
///         "gs:", "az:", a bucket, with what the environment says of keys; "memory:", in this process.
///         None: what TSSD_STORE names, else "unix:default".
///     ca, cert, key_file: for "tls:", files in PEM: the certificate of the authority that is believed,
///         one's own, and one's key. None: what TSSD_CA, TSSD_CERT and TSSD_KEY name.
///     connect_timeout: for how many seconds an answer is waited for at first.
///
/// Raises:
///     TssdConnectionError: the store cannot be reached.
///     TssdValueError: there is no such kind of address, or a file is not what it should be.
///     TssdUnsupportedError: the address of a daemon, off Linux.
#[pyclass(frozen, module = "tssd")]
pub(crate) struct Store {
    url: String,
    credentials: Option<(String, String, String)>,
    connect_timeout: f64,
    connected: Mutex<Option<Arc<Connected>>>,
}

fn key_of(key: &Bound<'_, PyAny>) -> Result<Key> {
    let key: String = key.extract().map_err(|_| {
        let class = key.get_type().name().map_or_else(|_| "?".to_owned(), |name| name.to_string());
        PyTypeError::new_err(format!(
            "a key is a str, this is a {class}: the order is put_state_dict(state_dict, key) and \
             put(key, value)"
        ))
    })?;
    Ok(Key::new(key)?)
}

/// Keys; a str is one, not several.
fn several<'py>(keys: &Bound<'py, PyAny>) -> Result<Bound<'py, PyIterator>> {
    if keys.is_instance_of::<PyString>() {
        return Err(PyTypeError::new_err("several keys are a list of strs, this is one str").into());
    }
    Ok(keys.try_iter()?)
}

/// Which version of a key is meant.
enum Which<'py> {
    Newest,
    /// One that is held.
    Lease(Bound<'py, OpenVersion>),
    Number(u64),
}

impl<'py> Which<'py> {
    fn of(version: Option<&Bound<'py, PyAny>>) -> Result<Self> {
        let Some(version) = version else { return Ok(Self::Newest) };
        if let Ok(lease) = version.cast::<OpenVersion>() {
            return Ok(Self::Lease(lease.clone()));
        }
        Ok(Self::Number(number::number(version)?))
    }
}

/// How a version is read.
struct Get<'py, 'a> {
    version: Which<'py>,
    writer: Option<u32>,
    verify: bool,
    require: Option<&'a str>,
    timeout: Option<f64>,
}

impl Get<'_, '_> {
    fn number(&self) -> Option<u64> {
        match self.version {
            Which::Number(number) => Some(number),
            _ => None,
        }
    }

    fn open(&self, py: Python<'_>, own: &Connected, key: &Key) -> Result<Arc<Opened>> {
        let options = GetOptions {
            version: self.number(),
            writer: self.writer,
            unverified: !self.verify,
            require: self.require.map(str::parse).transpose()?,
            ..GetOptions::default()
        };
        if let Which::Lease(lease) = &self.version {
            return Ok(Arc::new(lease.get().of_key(key)?.with(&options)?));
        }
        Ok(Arc::new(own.run(py, self.timeout, own.store.open(key, &options))?))
    }
}

impl Store {
    fn connected(&self, py: Python<'_>) -> Result<Arc<Connected>> {
        py.detach(|| {
            let usable = |own: &Option<Arc<Connected>>| own.clone().filter(|own| own.is_usable());
            if let Some(own) = usable(&self.own()) {
                return Ok(own);
            }
            let mut options = ConnectOptions::from_environment();
            options.timeout = seconds(self.connect_timeout)?;
            if let Some((ca, cert, key)) = &self.credentials {
                let (ca, cert, key) = (ca.into(), cert.into(), key.into());
                options.credentials = Some(Credentials { ca, cert, key });
            }
            // Nobody has the lock meanwhile: the handler of a signal may want it.
            let new = Connected::new(&self.url, &options)?;
            let mut own = self.own();
            // Somebody else may have connected too.
            Ok(usable(&own).unwrap_or_else(|| own.insert(new).clone()))
        })
    }

    fn own(&self) -> MutexGuard<'_, Option<Arc<Connected>>> {
        self.connected.lock().expect("nothing panics that holds it")
    }

    /// The store, and a key that is one.
    fn of(&self, key: &Bound<'_, PyAny>) -> Result<(Arc<Connected>, Key)> {
        let name = key_of(key)?;
        Ok((self.connected(key.py())?, name))
    }
}

/// Whether what was put as one value is a list or another container, and no leaf.
fn is_container(root: &Node) -> bool {
    match root {
        Node::Container(_, children) => children.iter().any(|(step, child)| {
            matches!(step, Step::Key(Name::Str(name)) if name.as_bytes().is_empty())
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
        let store = Self::_unconnected(url, ca, cert, key_file, connect_timeout)?;
        store.connected(py)?;
        Ok(store)
    }

    /// One that the first call connects.
    #[staticmethod]
    fn _unconnected(
        url: Option<String>,
        ca: Option<String>,
        cert: Option<String>,
        key_file: Option<String>,
        connect_timeout: f64,
    ) -> Result<Self> {
        let named = std::env::var("TSSD_STORE").ok().filter(|url| !url.is_empty());
        let url = url.or(named).unwrap_or_else(|| "unix:default".to_owned());
        let credentials = match (ca, cert, key_file) {
            (None, None, None) => None,
            (Some(ca), Some(cert), Some(key)) => Some((ca, cert, key)),
            _ => {
                let text = "ca, cert and key_file are given together, or none of them";
                return Err(PyValueError::new_err(text).into());
            }
        };
        Ok(Self { url, credentials, connect_timeout, connected: Mutex::default() })
    }

    /// Where it is.
    #[getter]
    fn url(&self) -> &str {
        &self.url
    }

    /// Puts this process's part of a state dict: a version of its own, or a contribution to one that becomes
    /// visible, in one step, when all writers have put theirs.
    ///
    /// Args:
    ///     state_dict: a dict of tensors, DTensors, TensorShards, arrays, numbers, strs and containers.
    ///     key: the name, at most 1024 bytes.
    ///     version: its number, such as the training step; None: the highest + 1.
    ///     writers: all who contribute: how many, a list of global ranks, or a ProcessGroup. None: the ranks
    ///         of the meshes of the DTensors, or this process alone.
    ///     writer: this process's global rank. None: that of torch.distributed, where it is needed.
    ///     job: the run: the same in all writers, another one after a restart. None: agreed through
    ///         torch.distributed, else the launcher's.
    ///     divergent: what becomes of a plain leaf that writers hold differently: "error", "lowest" (that of the
    ///         lowest writer) or "keep" (each writer's own; a get says `writer=`).
    ///     replicas: "primary" stores each replicated shard once, "all" as often as it is there.
    ///     durability: "memory"; "disk": it outlives the daemon, and is on the disk when this returns; or "object":
    ///         it outlives the host, is visible as soon as it is in memory, and in the daemon's bucket when this
    ///         returns.
    ///     wait: False: returns a PendingPut as soon as the tensors may be written to again. The put goes on as
    ///         long as this process does.
    ///     metadata: a dict about the state dict as a whole, as JSON has them, of at most 64 KiB: `head` and
    ///         `open` give it back.
    ///     transfer_dtype: the dtype that floating tensors are stored as, such as torch.bfloat16: a copy of
    ///         them. Those of fewer than 16 bits stay, and all others.
    ///     keep_dtype: fqns, or patterns of them, of floating tensors that stay as well: "*.norm.weight".
    ///     require: "arena", "cuda_ipc", "file", "memory", "object", "tcp" or "tls": any other way is an error.
    ///     rewind: whether a version that is not above the highest gives up those from it on.
    ///     allow_pickle: as for `save_file`.
    ///     timeout: for how many seconds others, and memory, are waited for. None: 60.
    ///     residency: "host": tensors of GPUs are put to the host's memory; "device": they stay in that of their
    ///         GPU, in a copy that does not change, which readers of the same GPU copy from. Nobody looks at the bytes:
    ///         there are no checksums of them. Where that cannot be, they go to the host's: `why` says it,
    ///         `require="cuda_ipc"` makes it an error. "ring", or a tssd.Ring: they go bucket by bucket to whoever has
    ///         a `receiver` of the key, and stay nowhere: the put returns when all of them have it. "lent": the same, but
    ///         receivers copy right from where tensors of a GPU are, if the driver lets them. A ring brings tensors alone.
    ///
    /// Returns:
    ///     A PutReport: the version, whether it is visible, else whose contributions are missing.
    ///
    /// Raises:
    ///     TssdTypeError, TssdValueError: as `save_file`; the store does not allow it, or the contributions do
    ///         not fit together.
    ///     TssdTimeoutError: others were in the way, or had the memory.
    #[pyo3(signature = (state_dict, key, *, version=None, writers=None, writer=None, job=None, divergent="error", replicas="primary", durability="memory", wait=true, metadata=None, transfer_dtype=None, keep_dtype=None, require=None, rewind=false, allow_pickle=false, timeout=None, residency=None), text_signature = "($self, state_dict, key, *, version=None, writers=None, writer=None, job=None, divergent='error', replicas='primary', durability='memory', wait=True, metadata=None, transfer_dtype=None, keep_dtype=(), require=None, rewind=False, allow_pickle=False, timeout=None, residency='host')")]
    #[expect(clippy::too_many_arguments, reason = "they are the arguments of the Python method")]
    fn put_state_dict<'py>(
        &self,
        state_dict: &Bound<'py, PyAny>,
        key: &Bound<'py, PyAny>,
        #[pyo3(from_py_with = number::version)] version: Option<u64>,
        writers: Option<Bound<'py, PyAny>>,
        #[pyo3(from_py_with = number::writer)] writer: Option<u32>,
        job: Option<String>,
        divergent: &'py str,
        replicas: &'py str,
        durability: &'py str,
        wait: bool,
        metadata: Option<&Bound<'py, PyDict>>,
        transfer_dtype: Option<&Bound<'py, PyAny>>,
        keep_dtype: Option<&Bound<'py, PyAny>>,
        require: Option<&'py str>,
        rewind: bool,
        allow_pickle: bool,
        timeout: Option<f64>,
        residency: Option<Bound<'py, PyAny>>,
    ) -> Result<Bound<'py, PyAny>> {
        let py = state_dict.py();
        let name = key_of(key)?;
        let put = Put {
            version,
            writers,
            writer,
            job,
            divergent,
            replicas,
            durability,
            residency,
            require,
            rewind,
            timeout,
        };
        let own = self.connected(py)?;
        let about = |error: Failure| error.of_key(name.as_str(), version);
        let ready = || {
            let transfer = transfer_dtype.map(|dtype| Transfer::new(dtype, keep_dtype));
            let taken = taken(state_dict, allow_pickle, transfer.transpose()?)?;
            let options = put.options(py, metadata, Some(&taken))?;
            Ok::<_, Failure>((taken, options))
        };
        let (taken, options) = match ready() {
            Ok(ready) => ready,
            Err(error) => {
                if let Some(options) = put.forgone(state_dict)? {
                    own.store.forgo(&name, &options);
                }
                return Err(about(error));
            }
        };
        let copies = taken.devices.copies().clone();
        if wait {
            let put = own.store.put_state_dict(&name, &taken.dict, &options);
            let report = own.run(py, None, put).map_err(about)?;
            return put_report(py, &report, copies.copied());
        }
        let put = own.store.put_state_dict_later(&name, &taken.dict, &options);
        let pending = own.run(py, None, put).map_err(about)?;
        Ok(Bound::new(py, Pending::new(own, name, pending, copies))?.into_any())
    }

    /// Gets a version of a state dict, whole, or into the caller's tensors in whatever sharding they have.
    ///
    /// Args:
    ///     key: the name.
    ///     into: tensors to fill in place: a nested dict of tensors, views, DTensors of any mesh and placement,
    ///         TensorShards or writable arrays, by the fqns of the leaves. Other leaves of its dicts and lists become
    ///         what is stored of that fqn; those that were pickled only with `allow_pickle`. None: whole tensors,
    ///         which are views of what is stored where one stored slice has all of a tensor. A view is
    ///         copy-on-write: who writes into it changes no one else's, and it holds the version as long as it
    ///         lives. Views of numpy are read-only. A process that is forked has its parent's views as long as the
    ///         parent has.
    ///     version: the number of the version, or what `open` or `wait_for_version` gave; None: the newest.
    ///     writer: whose values to take where writers hold different ones.
    ///     names: without `into`: the fqns of the leaves that are wanted, or of what they are in, or patterns
    ///         such as "model.layers.*.bias". Lists and tuples come whole, if anything in them is wanted.
    ///     strict: with `into`: whether it must have the tensors that are stored, no more and no fewer; else
    ///         the report names `missing_keys` and `unexpected_keys`. Shapes must always be the same.
    ///     cast: with `into`: whether floating tensors may be of another dtype than is stored.
    ///     copy: without `into`: whether all tensors get memory of their own.
    ///     verify: whether bytes are compared with their checksums.
    ///     require: as for `put_state_dict`.
    ///     return_report: whether a GetReport comes as well.
    ///     allow_pickle: as for `load_file`.
    ///     timeout: for how many seconds the store's answer is waited for, and bytes that are elsewhere.
    ///
    /// Returns:
    ///     The state dict, or `into`; with `return_report` a pair of that and the report.
    ///
    /// Raises:
    ///     TssdKeyError: there is no such key, version or leaf.
    ///     TssdKeyError, TssdTypeError, TssdValueError: names, dtypes or shapes differ; the message has all that
    ///         differs, and nothing was written.
    ///     TssdCorruptError: bytes are damaged.
    #[pyo3(signature = (key, into=None, *, version=None, writer=None, names=None, strict=true, cast=false, copy=false, verify=true, require=None, return_report=false, allow_pickle=false, timeout=None))]
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
        #[pyo3(from_py_with = number::writer)] writer: Option<u32>,
        names: Option<&Bound<'py, PyAny>>,
        strict: bool,
        cast: bool,
        copy: bool,
        verify: bool,
        require: Option<&str>,
        return_report: bool,
        allow_pickle: bool,
        timeout: Option<f64>,
    ) -> Result<Bound<'py, PyAny>> {
        let (py, (own, name)) = (key.py(), self.of(key)?);
        let version = Which::of(version)?;
        let get = Get { version, writer, verify, require, timeout };
        let (number, patience) = (get.number(), Patience::new(timeout)?);
        let read = || {
            let opened = get.open(py, &own, &name)?;
            if let Some(into) = into {
                if names.is_some() {
                    return Err(
                        PyValueError::new_err("`into` says itself which names it has").into()
                    );
                }
                let (filled, differences) = fill_all(
                    &own,
                    &opened,
                    into,
                    Allowed { strict, cast, pickle: allow_pickle },
                    (timeout, &patience),
                )?;
                let Filled { report, copied } = filled;
                let report = || get_report(py, &report, 0, &differences, copied);
                return Ok((into.clone(), return_report.then(report).transpose()?));
            }
            let root = match names {
                Some(names) => select(py, &opened, names)?,
                None => opened.structure().clone(),
            };
            let version = Version::read(py, &own, &opened, root, Reading { copy, timeout })?;
            let framework = Framework::of(py, None)?;
            let made = Maker::new(py, &version, &version, framework).allow_pickle(allow_pickle);
            let same = Differences::default();
            let report = || get_report(py, &version.report, version.viewed, &same, None);
            let report = return_report.then(report).transpose()?;
            Ok::<_, Failure>((made.state_dict()?, report))
        };
        let (value, report) = read().map_err(|error| error.of_key(name.as_str(), number))?;
        Ok(match report {
            Some(report) => PyTuple::new(py, [value, report])?.into_any(),
            None => value,
        })
    }

    /// Puts one value, as a state dict that has nothing else: see `put_state_dict` for the arguments.
    #[pyo3(signature = (key, value, **options))]
    fn put<'py>(
        slf: &Bound<'py, Self>,
        key: &Bound<'py, PyAny>,
        value: &Bound<'py, PyAny>,
        options: Option<&Bound<'py, PyDict>>,
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
        Ok(slf.call_method("put_state_dict", (dict, key), options)?)
    }

    /// Puts several values, each under its key, one after the other: see `put_state_dict` for the arguments.
    ///
    /// Args:
    ///     values: a dict of keys to values.
    ///
    /// Returns:
    ///     A list of their PutReports.
    #[pyo3(signature = (values, **options))]
    fn put_batch<'py>(
        slf: &Bound<'py, Self>,
        values: &Bound<'py, PyDict>,
        options: Option<&Bound<'py, PyDict>>,
    ) -> Result<Vec<Bound<'py, PyAny>>> {
        values.iter().map(|(key, value)| Self::put(slf, &key, &value, options)).collect()
    }

    /// Gets several values: see `get` for the arguments.
    ///
    /// Args:
    ///     keys: the names; or a dict of names to tensors that are filled, or None.
    ///
    /// Returns:
    ///     A dict of names to values.
    #[pyo3(signature = (keys, **options))]
    fn get_batch<'py>(
        slf: &Bound<'py, Self>,
        keys: &Bound<'py, PyAny>,
        options: Option<&Bound<'py, PyDict>>,
    ) -> Result<Bound<'py, PyDict>> {
        let py = slf.py();
        let values = PyDict::new(py);
        for key in several(keys)? {
            let key = key?;
            let into = match keys.cast::<PyDict>() {
                Ok(keys) => keys.get_item(&key)?,
                Err(_) => None,
            };
            values.set_item(&key, slf.call_method("get", (&key, into), options)?)?;
        }
        Ok(values)
    }

    /// Deletes all versions of several keys; says how many there were. A key that has none is no error.
    fn delete_batch(&self, keys: &Bound<'_, PyAny>) -> Result<u64> {
        let mut count = 0;
        for key in several(keys)? {
            count += self.delete(&key?, None)?;
        }
        Ok(count)
    }

    /// Gets one value that was `put`, or one tensor of a state dict.
    ///
    /// Args:
    ///     key: the name.
    ///     into: a tensor to fill in place.
    ///     fqn: the leaf of the state dict; None: what was put as one value.
    ///     tensor_slice: which part of the tensor; None: all of it, or what `into` says.
    ///     version, writer, verify, require, timeout: as for `get_state_dict`.
    ///
    /// Raises:
    ///     TssdKeyError: there is no such key, version or leaf.
    #[pyo3(signature = (key, into=None, *, fqn=None, tensor_slice=None, version=None, writer=None, verify=true, require=None, timeout=None))]
    #[expect(clippy::too_many_arguments, reason = "they are the arguments of the Python method")]
    fn get<'py>(
        &self,
        key: &Bound<'py, PyAny>,
        into: Option<&Bound<'py, PyAny>>,
        fqn: Option<&str>,
        tensor_slice: Option<&Bound<'py, TensorSlice>>,
        version: Option<&Bound<'py, PyAny>>,
        #[pyo3(from_py_with = number::writer)] writer: Option<u32>,
        verify: bool,
        require: Option<&str>,
        timeout: Option<f64>,
    ) -> Result<Bound<'py, PyAny>> {
        let (py, (own, name)) = (key.py(), self.of(key)?);
        let version = Which::of(version)?;
        let get = Get { version, writer, verify, require, timeout };
        let (number, fqn) = (get.number(), fqn.unwrap_or_default());
        let patience = Patience::new(timeout)?;
        let read = || {
            let opened = get.open(py, &own, &name)?;
            if let Some(into) = into {
                let whole = match tensor_slice {
                    Some(slice) => {
                        let slices = vec![slice.get().0.clone()];
                        let shard = TensorShard::of(py, into.clone().unbind(), slices)?;
                        Bound::new(py, shard)?.into_any()
                    }
                    None => into.clone(),
                };
                fill_one(&own, &opened, &whole, fqn, &patience)?;
                return Ok(into.clone());
            }
            let slice = tensor_slice.map(|slice| &slice.get().0);
            let reading = Reading { timeout, ..Reading::default() };
            if fqn.is_empty() && slice.is_none() && is_container(opened.structure()) {
                let root = opened.structure().clone();
                let version = Version::read(py, &own, &opened, root, reading)?;
                let framework = Framework::of(py, None)?;
                let made = Maker::new(py, &version, &version, framework).state_dict()?;
                return Ok(made.get_item("")?);
            }
            let version = Version::read_leaf(py, &own, &opened, fqn, slice, reading)?;
            version.object(py)
        };
        read().map_err(|error: Failure| error.of_key(name.as_str(), number))
    }

    /// Puts a version tensor by tensor: `with store.publish(key) as p: p.put(name, tensor)`. It is visible, in
    /// one step, when the block has ended; if the block raises, nothing is left of it.
    ///
    /// Args:
    ///     bucket_bytes: tensors are written when so many bytes of them have come, with `transfer_dtype` half as many;
    ///         larger ones are cast and written in parts, but for what is in a container.
    ///         Ranks that have the same box, with `replicas="all"` or in tensors that name their own offsets, say the same.
    ///     key, version, writers, writer, job, divergent, replicas, durability, metadata, transfer_dtype,
    ///         keep_dtype, require, rewind, allow_pickle, timeout, residency: as for `put_state_dict`.
    ///
    /// Raises:
    ///     As `put_state_dict`.
    #[pyo3(signature = (key, *, version=None, writers=None, writer=None, job=None, bucket_bytes=512 << 20, divergent="error", replicas="primary", durability="memory", metadata=None, transfer_dtype=None, keep_dtype=None, require=None, rewind=false, allow_pickle=false, timeout=None, residency=None), text_signature = "($self, key, *, version=None, writers=None, writer=None, job=None, bucket_bytes=536870912, divergent='error', replicas='primary', durability='memory', metadata=None, transfer_dtype=None, keep_dtype=(), require=None, rewind=False, allow_pickle=False, timeout=None, residency='host')")]
    #[expect(clippy::too_many_arguments, reason = "they are the arguments of the Python method")]
    fn publish<'py>(
        &self,
        key: &Bound<'py, PyAny>,
        #[pyo3(from_py_with = number::version)] version: Option<u64>,
        writers: Option<Bound<'py, PyAny>>,
        #[pyo3(from_py_with = number::writer)] writer: Option<u32>,
        job: Option<String>,
        bucket_bytes: u64,
        divergent: &'py str,
        replicas: &'py str,
        durability: &'py str,
        metadata: Option<&Bound<'py, PyDict>>,
        transfer_dtype: Option<&Bound<'py, PyAny>>,
        keep_dtype: Option<&Bound<'py, PyAny>>,
        require: Option<&'py str>,
        rewind: bool,
        allow_pickle: bool,
        timeout: Option<f64>,
        residency: Option<Bound<'py, PyAny>>,
    ) -> Result<Publishing> {
        let put = Put {
            version,
            writers,
            writer,
            job,
            divergent,
            replicas,
            durability,
            residency,
            require,
            rewind,
            timeout,
        };
        let (py, (own, name)) = (key.py(), self.of(key)?);
        let names_writers = put.writers.is_some();
        let options = put.options(py, metadata, None)?;
        let owned = |object: &Bound<'py, PyAny>| object.clone().unbind();
        let transfer = transfer_dtype.map(|dtype| {
            // What is wrong with it is said now.
            Transfer::new(dtype, keep_dtype).map(|_| (owned(dtype), keep_dtype.map(owned)))
        });
        let transfer = transfer.transpose()?;
        // What is cast is there beside what waits in the bucket: each gets a half.
        let halves =
            if transfer.is_some() && matches!(options.residency, Residency::Host) { 2 } else { 1 };
        let cast_bytes = bucket_bytes.div_ceil(halves);
        let taking = Taking { allow_pickle, names_writers, transfer, cast_bytes };
        Publishing::new(own, name, &options, cast_bytes, taking)
    }

    /// Opens a version to read it tensor by tensor: it stays there, whatever is put, as long as what this
    /// returns is open, or a tensor of it lives.
    ///
    /// Args:
    ///     names: the fqns of the tensors that are gone through, or patterns of them; None: all.
    ///     key, version, writer, verify, require, timeout: as for `get_state_dict`.
    ///
    /// Raises:
    ///     TssdKeyError: there is no such key or version.
    #[pyo3(signature = (key, *, version=None, names=None, writer=None, verify=true, require=None, timeout=None))]
    #[expect(clippy::too_many_arguments, reason = "they are the arguments of the Python method")]
    fn open<'py>(
        &self,
        key: &Bound<'py, PyAny>,
        version: Option<&Bound<'py, PyAny>>,
        names: Option<&Bound<'py, PyAny>>,
        #[pyo3(from_py_with = number::writer)] writer: Option<u32>,
        verify: bool,
        require: Option<&str>,
        timeout: Option<f64>,
    ) -> Result<OpenVersion> {
        let (py, (own, name)) = (key.py(), self.of(key)?);
        let version = Which::of(version)?;
        let get = Get { version, writer, verify, require, timeout };
        let open = || {
            let opened = get.open(py, &own, &name)?;
            OpenVersion::new(py, own.clone(), name.clone(), opened, names)
        };
        open().map_err(|error| error.of_key(name.as_str(), get.number()))
    }

    /// The versions of a key as they become visible, from the newest on; those that were replaced before
    /// they were asked for are passed over.
    fn subscribe(&self, key: &Bound<'_, PyAny>) -> Result<Subscribed> {
        Ok(Subscribed::new(self.connected(key.py())?, &key_of(key)?))
    }

    /// Receives what is put to a key with `residency="ring"` or "lent" from now on, into the caller's tensors: on one GPU,
    /// or all in the host's memory. Such puts wait for it until it is closed.
    ///
    /// Args:
    ///     into: tensors to fill in place, as for `get_state_dict`, in whatever sharding they have: each `receive` fills
    ///         them with the next version. Dtypes are those that are put. What else is put is passed over.
    ///     verify: whether bytes that come through the host's memory are compared with their checksums.
    ///     require: as for `put_state_dict`: another way is an error.
    ///
    /// Returns:
    ///     A Receiver: `receive(timeout=None)`, `close()`, and a context manager.
    ///
    /// Raises:
    ///     TssdUnsupportedError: the store has no daemon, or one that does not decide alone.
    #[pyo3(signature = (key, into, *, verify=true, require=None))]
    fn receiver(
        &self,
        key: &Bound<'_, PyAny>,
        into: &Bound<'_, PyAny>,
        verify: bool,
        require: Option<&str>,
    ) -> Result<Receiving> {
        let require = require.map(str::parse).transpose()?;
        let options = GetOptions { unverified: !verify, require, ..GetOptions::default() };
        Receiving::new(self.connected(key.py())?, key_of(key)?, into, options)
    }

    /// The keys that have a visible version and begin with `prefix`, sorted.
    #[pyo3(signature = (prefix=""))]
    fn keys(&self, py: Python<'_>, prefix: &str) -> Result<Vec<String>> {
        let own = self.connected(py)?;
        let keys = own.run(py, None, own.store.keys(Some(prefix)))?;
        Ok(keys.iter().map(ToString::to_string).collect())
    }

    /// Whether a version of a key is visible; any version, if none is given.
    #[pyo3(signature = (key, version=None))]
    fn exists(
        &self,
        key: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = number::version)] version: Option<u64>,
    ) -> Result<bool> {
        let (own, name) = self.of(key)?;
        own.run(key.py(), None, own.store.exists(&name, version))
    }

    /// The visible versions of a key, oldest first, as VersionInfo; none for a key that was never put.
    fn versions<'py>(&self, key: &Bound<'py, PyAny>) -> Result<Vec<Bound<'py, PyAny>>> {
        let (own, name) = self.of(key)?;
        let versions = own.run(key.py(), None, own.store.versions(&name))?;
        versions.iter().map(|info| version_info(key.py(), info)).collect()
    }

    /// The newest visible version of a key, as VersionInfo with its `metadata`; None for a key that has none.
    fn head<'py>(&self, key: &Bound<'py, PyAny>) -> Result<Option<Bound<'py, PyAny>>> {
        let (py, (own, name)) = (key.py(), self.of(key)?);
        let head = own.run(py, None, async {
            loop {
                let opened = match own.store.open(&name, &GetOptions::default()).await {
                    Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
                    opened => opened?,
                };
                let mut versions = own.store.versions(&name).await?.into_iter();
                // It may be gone since.
                if let Some(info) = versions.find(|info| info.id == opened.id()) {
                    return Ok(Some((info, opened)));
                }
            }
        });
        let head = head.map_err(|error| error.of_key(name.as_str(), None))?;
        head.map(|(info, opened)| report::head(py, &info, opened.attrs())).transpose()
    }

    /// Deletes a version of a key, or all; says how many there were. Who has one open keeps it.
    #[pyo3(signature = (key, version=None))]
    fn delete(
        &self,
        key: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = number::version)] version: Option<u64>,
    ) -> Result<u64> {
        let (own, name) = self.of(key)?;
        own.run(key.py(), None, own.store.delete(&name, version))
    }

    /// How many of the newest versions of a key are kept from now on; at first one.
    fn retain(&self, key: &Bound<'_, PyAny>, keep: NonZeroU32) -> Result<()> {
        let (own, name) = self.of(key)?;
        own.run(key.py(), None, own.store.retain(&name, keep))
    }

    /// Waits until a version is visible whose number is `version` or higher, and opens the newest.
    ///
    /// Returns:
    ///     What `open` returns: the version stays there, whatever is put, while it is open. It is an int where
    ///     one is wanted, and `version=` of every get.
    ///
    /// Raises:
    ///     TssdTimeoutError: there is none after `timeout` seconds.
    #[pyo3(signature = (key, version, timeout=None))]
    fn wait_for_version(
        &self,
        key: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = number::number)] version: u64,
        timeout: Option<f64>,
    ) -> Result<OpenVersion> {
        let (py, (own, name)) = (key.py(), self.of(key)?);
        let forever = Duration::from_secs(u64::from(u32::MAX));
        let patience = timeout.map_or(Ok(forever), seconds)?;
        let opened = own.run(py, None, async {
            loop {
                let waited = own.store.wait_for_version(&name, version, patience).await;
                if let Err(error) = &waited
                    && error.kind() == ErrorKind::NotFound
                {
                    return Ok(Err(Refusal::new("timeout", error.to_string())));
                }
                waited?;
                // Meanwhile it may be deleted, or the key rewound.
                match own.store.open(&name, &GetOptions::default()).await {
                    Err(error) if error.kind() == ErrorKind::NotFound => {}
                    Ok(opened) if opened.version() < version => {}
                    opened => return opened.map(Ok),
                }
            }
        });
        let opened = opened.and_then(|opened| opened.map_err(Failure::from));
        let opened = opened.map_err(|error| error.of_key(name.as_str(), Some(version)))?;
        OpenVersion::new(py, own, name, Arc::new(opened), None)
    }

    /// Lets a label hold a version, the newest if none is given: it stays, whatever is put. What the label held
    /// before, it holds no longer.
    ///
    /// Returns:
    ///     A Pin: the number of the version, as an int where one is wanted. As a context manager, it ends with
    ///     its block; else `unpin` ends it, in any process.
    #[pyo3(signature = (key, label, version=None))]
    fn pin(
        &self,
        key: &Bound<'_, PyAny>,
        label: &str,
        #[pyo3(from_py_with = number::version)] version: Option<u64>,
    ) -> Result<Pinned> {
        let (own, name) = self.of(key)?;
        let pinned = own.run(key.py(), None, own.store.pin(&name, version, label));
        let version = pinned.map_err(|error| error.of_key(name.as_str(), version))?;
        Ok(Pinned::new(own, name, label.to_owned(), version))
    }

    /// Lets a label hold its version no longer.
    fn unpin(&self, key: &Bound<'_, PyAny>, label: &str) -> Result<()> {
        let (own, name) = self.of(key)?;
        own.run(key.py(), None, own.store.unpin(&name, label))
    }

    /// The labels of a key, each with the number of the version that it holds.
    fn pins(&self, key: &Bound<'_, PyAny>) -> Result<BTreeMap<String, u64>> {
        let (own, name) = self.of(key)?;
        own.run(key.py(), None, own.store.pins(&name))
    }

    /// Brings a version into the memory of this host's daemon ahead of a get of the number that is returned.
    #[pyo3(signature = (key, *, version=None, timeout=None))]
    fn prefetch(
        &self,
        key: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = number::version)] version: Option<u64>,
        timeout: Option<f64>,
    ) -> Result<u64> {
        let (own, name) = self.of(key)?;
        let options = GetOptions { version, ..GetOptions::default() };
        let fetched = own.run(key.py(), timeout, own.store.prefetch(&name, &[], &options));
        Ok(fetched.map_err(|error| error.of_key(name.as_str(), version))?.version)
    }

    /// Ends the connection. What was got stays; another call connects again.
    fn close(&self, py: Python<'_>) {
        let own = py.detach(|| self.own().take());
        py.detach(|| drop(own));
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
        let (py, own) = (slf.py(), slf.get());
        let (ca, cert, key) = match &own.credentials {
            Some((ca, cert, key)) => (Some(ca), Some(cert), Some(key)),
            None => (None, None, None),
        };
        let state = (&own.url, ca, cert, key, own.connect_timeout).into_pyobject(py)?;
        Ok((py.import("tssd._ranks")?.getattr("connect")?, (state.into_any().unbind(),)))
    }
}
