//! Blocking API of the store, for programs without an async runtime.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::{Builder, Runtime};
use tssd_format::{ObjectPath, Region, Shard, StateDict, Tensor, Value};

use crate::api::connect::ConnectOptions;
use crate::api::store::PrefetchReport;
use crate::api::wait::WaitOptions;
use crate::control::VersionInfo;
use crate::engine::get::{GetOptions, GetReport, LeafPart, Target};
use crate::engine::put::{PutOptions, PutReport};
use crate::engine::ring::ReceiveReport;
use crate::error::{Error, Result};
use crate::io::exec::block_on;
use crate::key::Key;
use crate::ledger::{Selection, Selector};
use crate::status::DaemonStatus;

/// A blocking [`crate::Store`]. Several threads may call it at the same time.
///
/// # Panics
///
/// Its methods panic inside an async runtime. Use [`crate::Store`] there.
#[derive(Clone, Debug)]
pub struct Store {
    store: crate::Store,
    runtime: Arc<Runtime>,
}

/// Each method is the blocking form of the method of [`crate::Store`] with the same name.
impl Store {
    /// See [`crate::Store::memory`].
    ///
    /// # Errors
    ///
    /// `Io` if no threads can be started.
    pub fn memory() -> Result<Self> {
        Self::new(crate::Store::memory())
    }

    /// See [`crate::Store::directory`].
    ///
    /// # Errors
    ///
    /// See there; `Io` if no threads can be started.
    pub fn directory(path: impl AsRef<Path>) -> Result<Self> {
        Self::new(crate::Store::directory(path)?)
    }

    /// See [`crate::Store::connect`].
    ///
    /// # Errors
    ///
    /// See there; `Io` if no threads can be started.
    pub fn connect(url: &str) -> Result<Self> {
        Self::on_new_runtime(crate::Store::connect(url))
    }

    /// See [`crate::Store::connect_with`].
    ///
    /// # Errors
    ///
    /// See there; `Io` if no threads can be started.
    pub fn connect_with(url: &str, options: &ConnectOptions) -> Result<Self> {
        Self::on_new_runtime(crate::Store::connect_with(url, options))
    }

    /// See [`crate::Store::in_bucket`].
    ///
    /// # Errors
    ///
    /// See there; `Io` if no threads can be started.
    #[cfg(feature = "object")]
    pub fn in_bucket<B>(bucket: Arc<B>, prefix: &str) -> Result<Self>
    where
        B: object_store::ObjectStore + object_store::multipart::MultipartStore,
    {
        Self::new(crate::Store::in_bucket(bucket, prefix)?)
    }

    /// See [`crate::Store::create`].
    ///
    /// # Errors
    ///
    /// See there; `Io` if no threads can be started.
    pub fn create(url: &str) -> Result<Self> {
        Self::on_new_runtime(crate::Store::create(url))
    }

    /// See [`crate::Store::create_with`].
    ///
    /// # Errors
    ///
    /// See there; `Io` if no threads can be started.
    pub fn create_with(url: &str, options: &ConnectOptions) -> Result<Self> {
        Self::on_new_runtime(crate::Store::create_with(url, options))
    }

    fn new(store: crate::Store) -> Result<Self> {
        Self::on_new_runtime(std::future::ready(Ok(store)))
    }

    /// Opens a store on a new runtime.
    fn on_new_runtime(store: impl Future<Output = Result<crate::Store>>) -> Result<Self> {
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.map_err(|error| Error::io("no runtime", error))?;
        let store = block_on(&runtime, store)?;
        Ok(Self { store, runtime: Arc::new(runtime) })
    }

    /// Returns the store for async code.
    pub fn as_async(&self) -> &crate::Store {
        &self.store
    }
}

macro_rules! blocking_methods {
    ($($name:ident($($argument:ident: $ty:ty),*) -> $result:ty;)*) => {
        impl Store {
            $(
                #[doc = concat!("See [`crate::Store::", stringify!($name), "`].")]
                ///
                /// # Errors
                ///
                /// See there.
                pub fn $name(&self, $($argument: $ty),*) -> Result<$result> {
                    block_on(&self.runtime, self.store.$name($($argument),*))
                }
            )*
        }
    };
}

blocking_methods! {
    put_state_dict(key: &Key, dict: &StateDict, options: &PutOptions) -> PutReport;
    get_state_dict(key: &Key, options: &GetOptions) -> (StateDict, GetReport);
    get_state_dict_into(key: &Key, targets: &mut [Target<'_>], options: &GetOptions) -> GetReport;
    get(key: &Key, fqn: &str, options: &GetOptions) -> Tensor;
    get_slice(key: &Key, fqn: &str, region: &Region, options: &GetOptions) -> Tensor;
    versions(key: &Key) -> Vec<VersionInfo>;
    head(key: &Key) -> Option<VersionInfo>;
    keys(prefix: Option<&str>) -> Vec<Key>;
    exists(key: &Key, version: impl Into<Selector>) -> bool;
    delete(key: &Key, versions: impl Into<Selection>) -> u64;
    retain(key: &Key, keep: NonZeroU32) -> ();
    wait_for_version(key: &Key, version: u64, timeout: Duration) -> VersionInfo;
    wait_for_version_with(key: &Key, options: &WaitOptions) -> VersionInfo;
    prefetch(key: &Key, wanted: &[LeafPart], options: &GetOptions) -> PrefetchReport;
    pin(key: &Key, version: impl Into<Selector>, label: &str) -> u64;
    rollback(key: &Key, to: impl Into<Selector>) -> VersionInfo;
    unpin(key: &Key, label: &str) -> ();
    pins(key: &Key) -> BTreeMap<String, u64>;
    status() -> DaemonStatus;
}

/// A blocking [`crate::PendingPut`].
#[derive(Debug)]
pub struct PendingPut {
    pending: crate::PendingPut,
    runtime: Arc<Runtime>,
}

impl PendingPut {
    /// See [`crate::PendingPut::wait`].
    ///
    /// # Errors
    ///
    /// See there.
    pub fn wait(self) -> Result<PutReport> {
        block_on(&self.runtime, self.pending.wait())
    }

    /// See [`crate::PendingPut::committed`].
    ///
    /// # Errors
    ///
    /// See there.
    pub fn committed(&mut self) -> Result<PutReport> {
        block_on(&self.runtime, self.pending.committed())
    }
}

/// A blocking [`crate::Publisher`].
#[derive(Debug)]
#[must_use = "nobody sees a version before it is finished"]
pub struct Publisher {
    publisher: crate::Publisher,
    runtime: Arc<Runtime>,
}

/// Each method is the blocking form of the method of [`crate::Publisher`] with the same name.
#[expect(clippy::missing_errors_doc, reason = "they are said there")]
impl Publisher {
    /// See [`crate::Publisher::add`].
    pub fn add(&mut self, name: impl Into<String>, value: impl Into<Value>) -> Result<()> {
        block_on(&self.runtime, self.publisher.add(name, value))
    }

    /// See [`crate::Publisher::parts`].
    pub fn parts(&mut self, name: impl Into<String>) -> Result<Parts<'_>> {
        let parts = block_on(&self.runtime, self.publisher.parts(name))?;
        Ok(Parts { parts, runtime: &self.runtime })
    }

    /// See [`crate::Publisher::flush`].
    pub fn flush(&mut self) -> Result<()> {
        block_on(&self.runtime, self.publisher.flush())
    }

    /// See [`crate::Publisher::finish`].
    pub fn finish(self) -> Result<PutReport> {
        block_on(&self.runtime, self.publisher.finish())
    }
}

/// A blocking [`crate::Parts`].
#[derive(Debug)]
pub struct Parts<'a> {
    parts: crate::Parts<'a>,
    runtime: &'a Runtime,
}

impl Parts<'_> {
    /// See [`crate::Parts::add`].
    ///
    /// # Errors
    ///
    /// See there.
    pub fn add(&mut self, part: impl IntoIterator<Item = Shard>) -> Result<()> {
        block_on(self.runtime, self.parts.add(part))
    }
}

/// A blocking [`crate::VersionReader`], which is an iterator over the leaves.
#[derive(Debug)]
pub struct VersionReader {
    opened: crate::VersionReader,
    runtime: Arc<Runtime>,
}

impl VersionReader {
    /// Returns the number of the version.
    pub fn version(&self) -> u64 {
        self.opened.version()
    }

    /// See [`crate::VersionReader::tensor`].
    ///
    /// # Errors
    ///
    /// See there.
    pub fn tensor(&self, fqn: &str, region: Option<&Region>) -> Result<Tensor> {
        block_on(&self.runtime, self.opened.tensor(fqn, region))
    }
}

impl Iterator for VersionReader {
    type Item = Result<(ObjectPath, Value)>;

    fn next(&mut self) -> Option<Self::Item> {
        block_on(&self.runtime, self.opened.next()).transpose()
    }
}

/// A blocking [`crate::Subscription`], which is an iterator over the versions.
#[derive(Debug)]
pub struct Subscription {
    subscription: crate::Subscription,
    runtime: Arc<Runtime>,
}

impl Store {
    /// See [`crate::Store::put_state_dict_later`].
    ///
    /// The put continues as long as a clone of this store or the returned value exists.
    ///
    /// # Errors
    ///
    /// See there.
    pub fn put_state_dict_later(
        &self,
        key: &Key,
        dict: &StateDict,
        options: &PutOptions,
    ) -> Result<PendingPut> {
        let put = self.store.put_state_dict_later(key, dict, options);
        let pending = block_on(&self.runtime, put)?;
        Ok(PendingPut { pending, runtime: self.runtime.clone() })
    }

    /// See [`crate::Store::is_connected`].
    pub fn is_connected(&self) -> bool {
        self.store.is_connected()
    }

    /// See [`crate::Store::publish`].
    ///
    /// # Errors
    ///
    /// See there.
    pub fn publish(&self, key: &Key, options: &PutOptions, bucket_bytes: u64) -> Result<Publisher> {
        let publisher = self.store.publish(key, options, bucket_bytes)?;
        Ok(Publisher { publisher, runtime: self.runtime.clone() })
    }

    /// See [`crate::Store::open`].
    ///
    /// # Errors
    ///
    /// See there.
    pub fn open(&self, key: &Key, options: &GetOptions) -> Result<VersionReader> {
        let opened = block_on(&self.runtime, self.store.open(key, options))?;
        Ok(VersionReader { opened, runtime: self.runtime.clone() })
    }

    /// See [`crate::Store::subscribe`].
    pub fn subscribe(&self, key: &Key) -> Subscription {
        Subscription { subscription: self.store.subscribe(key), runtime: self.runtime.clone() }
    }
}

impl Store {
    /// See [`crate::Store::follow`].
    ///
    /// # Errors
    ///
    /// See there.
    pub fn follow(&self, key: &Key) -> Result<Follower> {
        let follower = block_on(&self.runtime, self.store.follow(key))?;
        Ok(Follower { follower, runtime: self.runtime.clone() })
    }

    /// See [`crate::Store::receiver`].
    ///
    /// # Errors
    ///
    /// See there.
    pub fn receiver(&self, key: &Key, device: Option<&str>) -> Result<Receiver> {
        let receiver = block_on(&self.runtime, self.store.receiver(key, device))?;
        Ok(Receiver { receiver, runtime: self.runtime.clone() })
    }
}

/// A blocking [`crate::Follower`].
#[derive(Debug)]
pub struct Follower {
    follower: crate::Follower,
    runtime: Arc<Runtime>,
}

impl Follower {
    /// See [`crate::Follower::next`].
    ///
    /// # Errors
    ///
    /// See there.
    pub fn next(
        &mut self,
        options: &GetOptions,
        timeout: Duration,
    ) -> Result<Option<VersionReader>> {
        let opened = block_on(&self.runtime, self.follower.next(options, timeout))?;
        Ok(opened.map(|opened| VersionReader { opened, runtime: self.runtime.clone() }))
    }
}

/// A blocking [`crate::Receiver`].
#[derive(Debug)]
pub struct Receiver {
    receiver: crate::Receiver,
    runtime: Arc<Runtime>,
}

impl Receiver {
    /// See [`crate::Receiver::receive`].
    ///
    /// # Errors
    ///
    /// See there.
    pub fn receive(
        &mut self,
        targets: &mut [Target<'_>],
        options: &GetOptions,
        timeout: Duration,
    ) -> Result<ReceiveReport> {
        block_on(&self.runtime, self.receiver.receive(targets, options, timeout))
    }
}

/// An iterator without an end: each item is the next version or an error.
impl Iterator for Subscription {
    type Item = Result<VersionInfo>;

    fn next(&mut self) -> Option<Self::Item> {
        Some(block_on(&self.runtime, self.subscription.next()))
    }
}

/// A blocking [`crate::Daemon`].
#[cfg(target_os = "linux")]
#[derive(Debug)]
pub struct Daemon {
    daemon: crate::Daemon,
    runtime: Runtime,
}

#[cfg(target_os = "linux")]
impl Daemon {
    /// See [`crate::Daemon::bind`].
    ///
    /// # Errors
    ///
    /// See there; `Io` if no threads can be started.
    pub fn bind(options: crate::DaemonOptions) -> Result<Self> {
        let runtime = Builder::new_multi_thread().enable_all().build();
        let runtime = runtime.map_err(|error| Error::io("no runtime", error))?;
        let daemon = runtime.block_on(crate::Daemon::bind(options))?;
        Ok(Self { daemon, runtime })
    }

    /// Returns the path of the socket.
    pub fn socket(&self) -> &Path {
        self.daemon.socket()
    }

    /// Returns the address for clients of other hosts, if the daemon serves them.
    pub fn address(&self) -> Option<String> {
        self.daemon.address()
    }

    /// Returns the address of the metrics, if the daemon serves them.
    pub fn metrics(&self) -> Option<std::net::SocketAddr> {
        self.daemon.metrics()
    }

    /// Serves until `stop` receives a message, or its sender is dropped.
    ///
    /// # Errors
    ///
    /// See [`crate::Daemon::serve`].
    pub fn serve(self, stop: tokio::sync::oneshot::Receiver<()>) -> Result<()> {
        let stop = async { drop(stop.await) };
        block_on(&self.runtime, self.daemon.serve(stop))
    }
}
