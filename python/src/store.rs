//! A store of state dicts: put in one sharding, got in another.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString, PyTuple};
use tokio::runtime::{Builder, Runtime};
use tssd_format::{AttrValue, Attrs, Node, Region, TensorMeta, TensorReference};
use tssd_store::{
    ConnectOptions, Credentials, Divergent, Durability, GetOptions, GetReport, JobId, Key, Opened,
    PendingPut, PutOptions, PutReport, Replicas, Store as Inner, Target, VersionInfo, WriterSet,
};

use crate::error::{Failure, Refusal, Result};
use crate::interrupt::Interrupt;
use crate::into::{Place, fill, places, places_of};
use crate::memory::{Block, Memory};
use crate::object::{Contents, Framework, METADATA_ATTR, Maker, Source};
use crate::slice::TensorSlice;
use crate::stream::{Publishing, Reading, Subscribed};
use crate::value::take;

/// How often signals are looked for while something is waited for.
const EVERY: Duration = Duration::from_millis(50);

/// State dicts by key, in immutable versions.
///
/// Args:
///     url: a directory that is there; "unix:PATH" or "unix:NAME", a daemon of this host, of which one of that
///         name is started if there is none; "tls://HOST:PORT", of another host; "memory:", in this
///         process. None: what TSSD_STORE names, else "unix:default".
///     ca, cert, key_file: for "tls:", files in PEM: the certificate of the authority that is believed,
///         one's own, and one's key. None: what TSSD_CA, TSSD_CERT and TSSD_KEY name.
///     connect_timeout: for how many seconds an answer is waited for at first.
///
/// Raises:
///     TssdConnectionError: the store cannot be reached.
///     TssdValueError: there is no such kind of address, or a file is not what it should be.
#[pyclass(frozen, module = "tssd")]
pub(crate) struct Store {
    url: String,
    credentials: Option<(String, String, String)>,
    connect_timeout: f64,
    connected: Mutex<Option<Arc<Connected>>>,
}

/// A store, and the threads on which it waits: they are those of one process.
pub(crate) struct Connected {
    process: u32,
    pub(crate) store: Inner,
    pub(crate) runtime: Runtime,
}

impl Connected {
    /// Does something, which Ctrl-C ends.
    pub(crate) fn run<T>(
        &self,
        py: Python<'_>,
        timeout: Option<f64>,
        work: impl Future<Output = tssd_store::Result<T>> + Send,
    ) -> Result<T>
    where
        T: Send,
    {
        let interrupt = Interrupt::new();
        let timeout = timeout.map(seconds).transpose()?;
        let all = async {
            let mut work = pin!(work);
            let late = async {
                match timeout {
                    Some(timeout) => {
                        tokio::time::sleep(timeout).await;
                        timeout
                    }
                    None => std::future::pending().await,
                }
            };
            let mut late = pin!(late);
            loop {
                tokio::select! {
                    done = &mut work => return Ok(done?),
                    timeout = &mut late => {
                        let text = format!("it has not happened within {timeout:?}");
                        return Err(Refusal::new("timeout", text).into());
                    }
                    () = tokio::time::sleep(EVERY) => interrupt.check()?,
                }
            }
        };
        py.detach(|| self.runtime.block_on(all))
    }
}

fn seconds(seconds: f64) -> Result<Duration> {
    let span = Duration::try_from_secs_f64(seconds);
    Ok(span.map_err(|error| PyValueError::new_err(format!("{seconds} seconds: {error}")))?)
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

impl Store {
    fn connected(&self, py: Python<'_>) -> Result<Arc<Connected>> {
        py.detach(|| {
            let mut connected = self.connected.lock().expect("nothing panics that holds it");
            if let Some(own) = connected.as_ref().filter(|own| own.process == std::process::id()) {
                return Ok(own.clone());
            }
            if let Some(parents) = connected.take() {
                // Its threads were not forked: nothing can be waited for.
                std::mem::forget(parents);
            }
            let mut options = ConnectOptions::from_environment();
            options.timeout = seconds(self.connect_timeout)?;
            if let Some((ca, cert, key)) = &self.credentials {
                let (ca, cert, key) = (ca.into(), cert.into(), key.into());
                options.credentials = Some(Credentials { ca, cert, key });
            }
            let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build();
            let runtime = runtime.map_err(Failure::from)?;
            let store = runtime.block_on(Inner::create_with(&self.url, &options))?;
            let own = Arc::new(Connected { process: std::process::id(), store, runtime });
            Ok(connected.insert(own).clone())
        })
    }
}

/// What all puts may say.
struct Put<'py> {
    version: Option<u64>,
    writers: Option<Bound<'py, PyAny>>,
    writer: Option<u32>,
    job: Option<String>,
    divergent: &'py str,
    replicas: &'py str,
    durability: &'py str,
    require: Option<&'py str>,
    rewind: bool,
    timeout: Option<f64>,
}

impl Put<'_> {
    /// The job and the writer are found out where they matter.
    fn options(&self, py: Python<'_>, attrs: Attrs, is_sharded: bool) -> Result<PutOptions> {
        let wrong = |what: &str, value: &str, those: &str| {
            PyValueError::new_err(format!("{what} is {those}, not {value:?}"))
        };
        let helper = || py.import("tssd._ranks");
        let writers = match &self.writers {
            None => None,
            Some(writers) => {
                let ranks = helper()?.call_method1("writers", (writers,))?;
                Some(ranks.extract::<Vec<u32>>()?.into_iter().collect::<WriterSet>())
            }
        };
        let mut options = PutOptions {
            version: self.version,
            writer: self.writer,
            writers,
            job: self.job.clone().map(JobId),
            attrs,
            divergent: match self.divergent {
                "error" => Divergent::Error,
                "lowest" => Divergent::Lowest,
                "keep" => Divergent::Keep,
                other => {
                    return Err(
                        wrong("divergent", other, "\"error\", \"lowest\" or \"keep\"").into()
                    );
                }
            },
            replicas: match self.replicas {
                "primary" => Replicas::Primary,
                "all" => Replicas::All,
                other => return Err(wrong("replicas", other, "\"primary\" or \"all\"").into()),
            },
            durability: match self.durability {
                "memory" => Durability::Memory,
                "disk" => Durability::Disk,
                other => return Err(wrong("durability", other, "\"memory\" or \"disk\"").into()),
            },
            rewind: self.rewind,
            allow_opaque: true,
            require: self.require.map(str::parse).transpose()?,
            ..PutOptions::default()
        };
        if let Some(timeout) = self.timeout {
            options.timeout = seconds(timeout)?;
        }
        if is_sharded || options.writers.is_some() {
            if options.job.is_none() {
                options.job = helper()?.call_method0("job")?.extract::<Option<_>>()?.map(JobId);
            }
            if options.writer.is_none() {
                options.writer = helper()?.call_method0("rank")?.extract()?;
            }
        }
        Ok(options)
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
        let store = Self { url, credentials, connect_timeout, connected: Mutex::default() };
        store.connected(py)?;
        Ok(store)
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
    ///     durability: "memory", or "disk": it outlives the daemon, and is on the disk when this returns.
    ///     wait: False: returns a PendingPut as soon as the tensors may be written to again.
    ///     metadata: a dict of str to str, int or bytes about the state dict as a whole.
    ///     require: "arena", "file", "memory", "tcp" or "tls": any other way is an error.
    ///     rewind: whether a version that is not above the highest gives up those from it on.
    ///     allow_pickle: as for `save_file`.
    ///     timeout: for how many seconds others, and memory, are waited for. None: 60.
    ///
    /// Returns:
    ///     A PutReport: the version, whether it is visible, else whose contributions are missing.
    ///
    /// Raises:
    ///     TssdTypeError, TssdValueError: as `save_file`; the store does not allow it, or the contributions do
    ///         not fit together.
    ///     TssdTimeoutError: others were in the way, or had the memory.
    #[pyo3(signature = (state_dict, key, *, version=None, writers=None, writer=None, job=None, divergent="error", replicas="primary", durability="memory", wait=true, metadata=None, require=None, rewind=false, allow_pickle=false, timeout=None))]
    #[expect(clippy::too_many_arguments, reason = "they are the arguments of the Python method")]
    fn put_state_dict<'py>(
        &self,
        state_dict: &Bound<'py, PyAny>,
        key: &Bound<'py, PyAny>,
        version: Option<u64>,
        writers: Option<Bound<'py, PyAny>>,
        writer: Option<u32>,
        job: Option<String>,
        divergent: &'py str,
        replicas: &'py str,
        durability: &'py str,
        wait: bool,
        metadata: Option<&Bound<'py, PyDict>>,
        require: Option<&'py str>,
        rewind: bool,
        allow_pickle: bool,
        timeout: Option<f64>,
    ) -> Result<Bound<'py, PyAny>> {
        let py = state_dict.py();
        let put = Put {
            version,
            writers,
            writer,
            job,
            divergent,
            replicas,
            durability,
            require,
            rewind,
            timeout,
        };
        let key = key_of(key)?;
        let taken = take(state_dict, allow_pickle)?;
        let mut attrs = crate::file::attrs(metadata)?;
        if let Some(metadata) = &taken.metadata {
            attrs.insert(METADATA_ATTR.to_owned(), AttrValue::Text(metadata.as_str().into()));
        }
        let leaves = taken.dict.leaves();
        let is_sharded =
            leaves.iter().any(|(_, leaf)| matches!(leaf, tssd_format::Value::Shards(_)));
        let options = put.options(py, attrs, is_sharded)?;
        let own = self.connected(py)?;
        let about = |error: Failure| error.of_key(key.as_str(), version);
        if wait {
            let put = own.store.put_state_dict(&key, &taken.dict, &options);
            return put_report(py, &own.run(py, None, put).map_err(about)?);
        }
        let put = own.store.put_state_dict_later(&key, &taken.dict, &options);
        let pending = own.run(py, None, put).map_err(about)?;
        let waiting = Mutex::new(Some(pending));
        let pending = Pending { own, waiting, done: Mutex::default() };
        Ok(Bound::new(py, pending)?.into_any())
    }

    /// Gets a version of a state dict, whole, or into the caller's tensors in whatever sharding they have.
    ///
    /// Args:
    ///     key: the name.
    ///     into: tensors to fill in place: a nested dict of tensors, views, DTensors of any mesh and placement,
    ///         TensorShards or writable arrays, by the fqns of the leaves. None: new tensors, whole.
    ///     version: the number of the version; None: the newest.
    ///     writer: whose values to take where writers hold different ones.
    ///     strict: whether every tensor that is stored must be in `into`. What is in `into` must be stored.
    ///     verify: whether bytes are compared with their checksums.
    ///     require: as for `put_state_dict`.
    ///     return_report: whether a GetReport comes as well.
    ///     allow_pickle: as for `load_file`.
    ///     timeout: for how many seconds the store's answer is waited for.
    ///
    /// Returns:
    ///     The state dict, or `into`; with `return_report` a pair of that and the report.
    ///
    /// Raises:
    ///     TssdKeyError: there is no such key, version or leaf.
    ///     TssdValueError: shapes or dtypes differ; nothing was written then.
    ///     TssdCorruptError: bytes are damaged.
    #[pyo3(signature = (key, into=None, *, version=None, writer=None, strict=true, verify=true, require=None, return_report=false, allow_pickle=false, timeout=None))]
    #[expect(
        clippy::too_many_arguments,
        clippy::fn_params_excessive_bools,
        reason = "they are the arguments of the Python method"
    )]
    fn get_state_dict<'py>(
        &self,
        key: &Bound<'py, PyAny>,
        into: Option<&Bound<'py, PyAny>>,
        version: Option<u64>,
        writer: Option<u32>,
        strict: bool,
        verify: bool,
        require: Option<&str>,
        return_report: bool,
        allow_pickle: bool,
        timeout: Option<f64>,
    ) -> Result<Bound<'py, PyAny>> {
        let (py, name) = (key.py(), key_of(key)?);
        let require = require.map(str::parse).transpose()?;
        let options =
            GetOptions { version, writer, unverified: !verify, require, ..GetOptions::default() };
        let wanted = into.map(places).transpose()?;
        let own = self.connected(py)?;
        let get = || {
            let opened = own.run(py, timeout, own.store.open(&name, &options))?;
            if let (Some(into), Some(places)) = (into, wanted) {
                if strict {
                    all_wanted(opened.structure(), &places)?;
                }
                let report = filled(py, &own, &opened, places)?;
                return Ok((into.clone(), report));
            }
            let version = Version::read(py, &own, &opened, timeout)?;
            let framework = Framework::of(py, None)?;
            let made = Maker::new(py, &version, &version, framework).allow_pickle(allow_pickle);
            Ok::<_, Failure>((made.state_dict()?, version.report))
        };
        let (value, report) = get().map_err(|error| error.of_key(name.as_str(), version))?;
        if return_report {
            let report = get_report(py, &report)?;
            return Ok(PyTuple::new(py, [value, report])?.into_any());
        }
        Ok(value)
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
        let dict = if let Ok(dict) = value.cast::<PyDict>() {
            dict.clone()
        } else {
            let dict = PyDict::new(py);
            dict.set_item("", value)?;
            dict
        };
        Ok(slf.call_method("put_state_dict", (dict, key), options)?)
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
        version: Option<u64>,
        writer: Option<u32>,
        verify: bool,
        require: Option<&str>,
        timeout: Option<f64>,
    ) -> Result<Bound<'py, PyAny>> {
        let (py, name) = (key.py(), key_of(key)?);
        let require = require.map(str::parse).transpose()?;
        let options =
            GetOptions { version, writer, unverified: !verify, require, ..GetOptions::default() };
        let fqn = fqn.unwrap_or_default();
        let wanted = into.map(|into| places_of(into, fqn)).transpose()?;
        let own = self.connected(py)?;
        let get = || {
            let opened = own.run(py, timeout, own.store.open(&name, &options))?;
            if let (Some(into), Some(places)) = (into, wanted) {
                filled(py, &own, &opened, places)?;
                return Ok(into.clone());
            }
            let region = tensor_slice.map(|slice| slice.get().0.region());
            let version = Version::read_leaf(py, &own, &opened, fqn, region.as_ref())?;
            let framework = Framework::of(py, None)?;
            let mut maker = Maker::new(py, &version, &version, framework);
            match &version.root {
                Node::Tensors(run) => maker.tensors(run),
                Node::Leaf(value) => maker.value(value),
                _ => Err(Refusal::new("not_found", format!("`{fqn}` is no leaf")).into()),
            }
        };
        get().map_err(|error: Failure| error.of_key(name.as_str(), version))
    }

    /// Puts a version tensor by tensor: `with store.publish(key) as p: p.put(name, tensor)`. It is visible, in
    /// one step, when the block has ended; if the block raises, nothing is left of it.
    ///
    /// Args:
    ///     bucket_bytes: tensors are written when so many bytes of them have come; larger ones in parts.
    ///     key, version, writers, writer, job, metadata, require, rewind, allow_pickle, timeout: as for
    ///         `put_state_dict`.
    ///
    /// Raises:
    ///     As `put_state_dict`.
    #[pyo3(signature = (key, *, version=None, writers=None, writer=None, job=None, bucket_bytes=512 << 20, metadata=None, require=None, rewind=false, allow_pickle=false, timeout=None))]
    #[expect(clippy::too_many_arguments, reason = "they are the arguments of the Python method")]
    fn publish<'py>(
        &self,
        key: &Bound<'py, PyAny>,
        version: Option<u64>,
        writers: Option<Bound<'py, PyAny>>,
        writer: Option<u32>,
        job: Option<String>,
        bucket_bytes: u64,
        metadata: Option<&Bound<'py, PyDict>>,
        require: Option<&'py str>,
        rewind: bool,
        allow_pickle: bool,
        timeout: Option<f64>,
    ) -> Result<Publishing> {
        let (divergent, replicas, durability) = ("error", "primary", "memory");
        let put = Put {
            version,
            writers,
            writer,
            job,
            divergent,
            replicas,
            durability,
            require,
            rewind,
            timeout,
        };
        let (py, name) = (key.py(), key_of(key)?);
        let options = put.options(py, crate::file::attrs(metadata)?, false)?;
        Publishing::new(self.connected(py)?, name, &options, bucket_bytes, allow_pickle)
    }

    /// Opens a version to read it tensor by tensor: it stays there, whatever is put, as long as what this
    /// returns is open.
    ///
    /// Raises:
    ///     TssdKeyError: there is no such key or version.
    #[pyo3(signature = (key, *, version=None, writer=None, verify=true, require=None, timeout=None))]
    fn open(
        &self,
        key: &Bound<'_, PyAny>,
        version: Option<u64>,
        writer: Option<u32>,
        verify: bool,
        require: Option<&str>,
        timeout: Option<f64>,
    ) -> Result<Reading> {
        let (py, name) = (key.py(), key_of(key)?);
        let require = require.map(str::parse).transpose()?;
        let options =
            GetOptions { version, writer, unverified: !verify, require, ..GetOptions::default() };
        let own = self.connected(py)?;
        let opened = own.run(py, timeout, own.store.open(&name, &options));
        let opened = opened.map_err(|error| error.of_key(name.as_str(), version))?;
        Ok(Reading::new(own, name, opened))
    }

    /// The versions of a key as they become visible, from the newest on; those that were replaced before
    /// they were asked for are passed over.
    fn subscribe(&self, key: &Bound<'_, PyAny>) -> Result<Subscribed> {
        Ok(Subscribed::new(self.connected(key.py())?, &key_of(key)?))
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
    fn exists(&self, key: &Bound<'_, PyAny>, version: Option<u64>) -> Result<bool> {
        let (own, name) = (self.connected(key.py())?, key_of(key)?);
        own.run(key.py(), None, own.store.exists(&name, version))
    }

    /// The visible versions of a key, oldest first, as VersionInfo; none for a key that was never put.
    fn versions<'py>(&self, key: &Bound<'py, PyAny>) -> Result<Vec<Bound<'py, PyAny>>> {
        let (own, name) = (self.connected(key.py())?, key_of(key)?);
        let versions = own.run(key.py(), None, own.store.versions(&name))?;
        versions.iter().map(|info| version_info(key.py(), info)).collect()
    }

    /// The newest visible version of a key, as VersionInfo; None for a key that has none.
    fn head<'py>(&self, key: &Bound<'py, PyAny>) -> Result<Option<Bound<'py, PyAny>>> {
        let (own, name) = (self.connected(key.py())?, key_of(key)?);
        let head = own.run(key.py(), None, own.store.head(&name))?;
        head.map(|info| version_info(key.py(), &info)).transpose()
    }

    /// Deletes a version of a key, or all; says how many there were. Who has one open keeps it.
    #[pyo3(signature = (key, version=None))]
    fn delete(&self, key: &Bound<'_, PyAny>, version: Option<u64>) -> Result<u64> {
        let (own, name) = (self.connected(key.py())?, key_of(key)?);
        own.run(key.py(), None, own.store.delete(&name, version))
    }

    /// How many of the newest versions of a key are kept from now on; at first one.
    fn retain(&self, key: &Bound<'_, PyAny>, keep: NonZeroU32) -> Result<()> {
        let (own, name) = (self.connected(key.py())?, key_of(key)?);
        own.run(key.py(), None, own.store.retain(&name, keep))
    }

    /// Waits until a version is visible whose number is `version` or higher; gives the newest.
    ///
    /// Raises:
    ///     TssdTimeoutError: there is none after `timeout` seconds.
    #[pyo3(signature = (key, version, timeout=None))]
    fn wait_for_version<'py>(
        &self,
        key: &Bound<'py, PyAny>,
        version: u64,
        timeout: Option<f64>,
    ) -> Result<Bound<'py, PyAny>> {
        let (own, name) = (self.connected(key.py())?, key_of(key)?);
        let forever = Duration::from_secs(u64::from(u32::MAX));
        let wait = own.store.wait_for_version(&name, version, forever);
        let info = own.run(key.py(), timeout, wait);
        version_info(key.py(), &info.map_err(|error| error.of_key(name.as_str(), Some(version)))?)
    }

    /// Lets a label hold a version, the newest if none is given, whose number is returned.
    #[pyo3(signature = (key, label, version=None))]
    fn pin(&self, key: &Bound<'_, PyAny>, label: &str, version: Option<u64>) -> Result<u64> {
        let (own, name) = (self.connected(key.py())?, key_of(key)?);
        own.run(key.py(), None, own.store.pin(&name, version, label))
    }

    /// Lets a label hold its version no longer.
    fn unpin(&self, key: &Bound<'_, PyAny>, label: &str) -> Result<()> {
        let (own, name) = (self.connected(key.py())?, key_of(key)?);
        own.run(key.py(), None, own.store.unpin(&name, label))
    }

    /// The labels of a key, each with the number of the version that it holds.
    fn pins(&self, key: &Bound<'_, PyAny>) -> Result<BTreeMap<String, u64>> {
        let (own, name) = (self.connected(key.py())?, key_of(key)?);
        own.run(key.py(), None, own.store.pins(&name))
    }

    /// Brings a version into the memory of this host's daemon ahead of a get of the number that is returned.
    #[pyo3(signature = (key, *, version=None, timeout=None))]
    fn prefetch(
        &self,
        key: &Bound<'_, PyAny>,
        version: Option<u64>,
        timeout: Option<f64>,
    ) -> Result<u64> {
        let (own, name) = (self.connected(key.py())?, key_of(key)?);
        let options = GetOptions { version, ..GetOptions::default() };
        let fetched = own.run(key.py(), timeout, own.store.prefetch(&name, &[], &options));
        Ok(fetched.map_err(|error| error.of_key(name.as_str(), version))?.version)
    }

    /// Ends the connection. What was got stays; another call connects again.
    fn close(&self) {
        drop(self.connected.lock().expect("nothing panics that holds it").take());
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_error))]
    fn __exit__(&self, _error: &Bound<'_, PyTuple>) {
        self.close();
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

/// A put that goes on by itself.
#[pyclass(frozen, name = "PendingPut", module = "tssd")]
pub(crate) struct Pending {
    own: Arc<Connected>,
    waiting: Mutex<Option<PendingPut>>,
    done: Mutex<Option<PutReport>>,
}

#[pymethods]
impl Pending {
    /// Waits until the contribution is committed, and gives its PutReport.
    ///
    /// Raises:
    ///     As `put_state_dict`; TssdTimeoutError after `timeout` seconds: then it can be asked again.
    #[pyo3(signature = (timeout=None))]
    fn result<'py>(&self, py: Python<'py>, timeout: Option<f64>) -> Result<Bound<'py, PyAny>> {
        let lock = |_| PyValueError::new_err("another thread waits for it");
        let mut pending = self.waiting.try_lock().map_err(lock)?;
        if let Some(waiting) = pending.as_mut() {
            let report = self.own.run(py, timeout, waiting.done())?;
            *pending = None;
            *self.done.lock().expect("nothing panics that holds it") = Some(report);
        }
        let done = self.done.lock().expect("nothing panics that holds it").clone();
        put_report(py, &done.ok_or_else(|| PyValueError::new_err("the put has failed"))?)
    }
}

/// Fails if a tensor that is stored is in no target.
fn all_wanted(root: &Node, places: &[Place]) -> Result<()> {
    let leaves = root.clone().into_leaves();
    let tensors = leaves.iter().filter(|(_, leaf)| matches!(leaf, Node::Tensors(_)));
    let missing = tensors.map(|(path, _)| path.fqn());
    let missing: Vec<String> =
        missing.filter(|fqn| places.iter().all(|place| place.fqn != *fqn)).collect();
    let Some(first) = missing.first() else { return Ok(()) };
    let others = missing.len() - 1;
    let text = format!("`{first}` and {others} other tensors of the version are not in `into`");
    Err(Refusal::new("invalid", text).advice("say strict=False if they are not wanted").into())
}

/// Fills the caller's tensors, with the GIL released.
fn filled(
    py: Python<'_>,
    own: &Connected,
    opened: &Opened,
    places: Vec<Place>,
) -> Result<GetReport> {
    if places.is_empty() {
        return Ok(opened.report());
    }
    py.detach(|| {
        let _inside = own.runtime.enter();
        fill(opened, places)
    })
}

/// A version whose bytes are in memory of this process.
pub(crate) struct Version {
    root: Node,
    attrs: Attrs,
    report: GetReport,
    memory: Memory,
    /// Where each storage is in the memory.
    blocks: BTreeMap<u32, std::ops::Range<usize>>,
    stored: BTreeMap<u32, Bytes>,
}

/// What is to be read of a version.
#[derive(Default)]
struct Wanted {
    /// Storages that leaves are views of.
    storages: Vec<u32>,
    /// Those that are no tensors.
    stored: Vec<u32>,
    /// Tensors that are assembled, by the storages that they get.
    made: Vec<(u32, String, TensorMeta)>,
}

impl Wanted {
    /// Goes through a tree; tensors of several slices become whole ones.
    fn of(&mut self, path: &tssd_format::ObjectPath, node: &mut Node) -> Result<()> {
        match node {
            Node::Container(_, children) => {
                for (step, child) in children {
                    self.of(&path.clone().step(step.clone()), child)?;
                }
            }
            Node::Stored(_, storage) => self.stored.push(*storage),
            Node::Tensors(run) => {
                let global =
                    run[0].place.as_ref().map(|place| place.slice().global_shape().to_vec());
                let is_whole = run.len() == 1
                    && global.as_ref().is_none_or(|global| *global == run[0].meta.shape());
                if is_whole {
                    run[0].place = None;
                    self.storages.extend(run[0].storage);
                    return Ok(());
                }
                let (dtype, flags) = (run[0].meta.dtype(), run[0].meta.flags());
                let shape = global.unwrap_or_else(|| run[0].meta.shape().to_vec());
                let meta = TensorMeta::new(dtype, &shape)?.with_flags(flags);
                let number = u32::MAX - u32::try_from(self.made.len()).unwrap_or(u32::MAX);
                let storage = (meta.nbytes() > 0).then_some(number);
                let whole =
                    TensorReference { meta: meta.clone(), storage, byte_offset: 0, place: None };
                self.made.push((number, path.fqn(), meta));
                *run = vec![whole];
            }
            Node::Leaf(_) => {}
        }
        Ok(())
    }
}

impl Version {
    pub(crate) fn root(&self) -> &Node {
        &self.root
    }

    fn read(
        py: Python<'_>,
        own: &Connected,
        opened: &Opened,
        timeout: Option<f64>,
    ) -> Result<Self> {
        let mut root = opened.structure().clone();
        let mut wanted = Wanted::default();
        wanted.of(&tssd_format::ObjectPath::root(), &mut root)?;
        wanted.storages.sort_unstable();
        wanted.storages.dedup();
        Self::of(py, own, opened, root, &wanted, timeout)
    }

    fn of(
        py: Python<'_>,
        own: &Connected,
        opened: &Opened,
        root: Node,
        wanted: &Wanted,
        timeout: Option<f64>,
    ) -> Result<Self> {
        let (views, stored) = own.run(py, timeout, async {
            let views = opened.storages(&wanted.storages).await?;
            Ok((views, opened.storages(&wanted.stored).await?))
        })?;
        let stored = wanted.stored.iter().copied().zip(stored).collect();
        let mut blocks = BTreeMap::new();
        let mut len = 0_usize;
        let mut place = |number: u32, bytes: usize| {
            // As torch aligns what it allocates.
            let start = len.next_multiple_of(64);
            len = start + bytes;
            blocks.insert(number, start..len);
        };
        for (number, bytes) in wanted.storages.iter().zip(&views) {
            place(*number, bytes.len());
        }
        for (number, _, meta) in &wanted.made {
            place(*number, usize::try_from(meta.nbytes()).map_err(std::io::Error::other)?);
        }
        let report = opened.report();
        let mut all = report;
        let memory = py.detach(|| {
            let _inside = own.runtime.enter();
            Memory::filled(len.max(1), |target| {
                for (number, bytes) in wanted.storages.iter().zip(&views) {
                    tssd_format::copy(bytes, &mut target[blocks[number].clone()]);
                }
                let mut targets = Vec::with_capacity(wanted.made.len());
                let mut rest = target;
                let mut at = 0;
                for (number, fqn, meta) in &wanted.made {
                    let block = &blocks[number];
                    let (_, tail) = std::mem::take(&mut rest).split_at_mut(block.start - at);
                    let (bytes, tail) = tail.split_at_mut(block.len());
                    (rest, at) = (tail, block.end);
                    let (fqn, meta) = (fqn.clone(), meta.clone());
                    targets.push(Target { fqn, place: None, meta, bytes });
                }
                if !targets.is_empty() {
                    all = opened.fill(&mut targets)?;
                }
                Ok::<_, Failure>(())
            })
        })?;
        let seen: u64 = views.iter().map(|bytes| u64::try_from(bytes.len()).unwrap_or(0)).sum();
        all.bytes_needed += seen;
        all.bytes_transferred += seen;
        Ok(Self { root, attrs: opened.attrs().clone(), report: all, memory, blocks, stored })
    }

    /// One leaf, or a box of one tensor.
    pub(crate) fn read_leaf(
        py: Python<'_>,
        own: &Connected,
        opened: &Opened,
        fqn: &str,
        region: Option<&Region>,
    ) -> Result<Self> {
        let leaves = opened.structure().clone().into_leaves();
        let found = leaves.into_iter().find(|(path, _)| path.fqn() == fqn);
        if let Some((path, mut node)) = found.filter(|_| region.is_none()) {
            let mut wanted = Wanted::default();
            wanted.of(&path, &mut node)?;
            return Self::of(py, own, opened, node, &wanted, None);
        }
        let tensor = own.run(py, None, opened.tensor(fqn, region))?;
        let meta = tensor.meta().clone();
        let bytes = tensor.view().span();
        let memory = Memory::filled(bytes.len().max(1), |target| {
            target[..bytes.len()].copy_from_slice(bytes);
            Ok::<_, Failure>(())
        })?;
        let storage = (!bytes.is_empty()).then_some(0);
        let blocks = BTreeMap::from([(0, 0..bytes.len())]);
        let reference = TensorReference { meta, storage, byte_offset: 0, place: None };
        let (attrs, report) = (opened.attrs().clone(), opened.report());
        let root = Node::Tensors(vec![reference]);
        Ok(Self { root, attrs, report, memory, blocks, stored: BTreeMap::new() })
    }
}

impl Contents for Version {
    fn structure(&self) -> Node {
        self.root.clone()
    }

    fn attrs(&self) -> Attrs {
        self.attrs.clone()
    }

    fn stored(&self, storage: u32) -> Result<Bytes> {
        Ok(self.stored[&storage].clone())
    }
}

impl Source for Version {
    fn block(&self, storage: u32) -> Result<(Block, u64)> {
        Ok((self.memory.block(self.blocks[&storage].clone()), 0))
    }
}

pub(crate) fn put_report<'py>(py: Python<'py>, report: &PutReport) -> Result<Bound<'py, PyAny>> {
    let class = py.import("tssd._reports")?.getattr("PutReport")?;
    Ok(class.call1((
        report.version,
        report.epoch,
        report.id.to_string(),
        report.visible,
        report.missing.iter().collect::<Vec<u32>>(),
        report.bytes,
        report.transport.to_string(),
        &report.why,
        report.seconds,
    ))?)
}

fn get_report<'py>(py: Python<'py>, report: &GetReport) -> Result<Bound<'py, PyAny>> {
    let class = py.import("tssd._reports")?.getattr("GetReport")?;
    Ok(class.call1((
        report.version,
        report.epoch,
        report.id.to_string(),
        report.bytes_needed,
        report.bytes_transferred,
        report.bytes_verified,
        report.transport.to_string(),
        &report.why,
        report.plan_seconds,
        report.seconds,
    ))?)
}

pub(crate) fn version_info<'py>(py: Python<'py>, info: &VersionInfo) -> Result<Bound<'py, PyAny>> {
    let class = py.import("tssd._reports")?.getattr("VersionInfo")?;
    Ok(class.call1((
        info.number,
        info.epoch,
        info.id.to_string(),
        info.bytes,
        info.writers.iter().collect::<Vec<u32>>(),
    ))?)
}
