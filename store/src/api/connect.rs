//! Constructors of a store: in memory, in a directory, in a bucket, or in a daemon.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

#[cfg(feature = "object")]
use object_store::{ObjectStore, multipart::MultipartStore};

use crate::api::store::Store;
use crate::blob::backend::MemoryVolume;
use crate::credentials::Credentials;
#[cfg(feature = "object")]
use crate::engine::address::from_bucket;
use crate::engine::address::{
    Address, StoreBackend, daemon_address, open_bucket, open_directory, unreachable_at,
};
use crate::engine::local::LocalController;
use crate::error::Result;
#[cfg(not(target_os = "linux"))]
use crate::error::{Error, ErrorKind};
#[cfg(feature = "object")]
use crate::io::bucket::{self, Bucket};
use crate::io::disk::Disk;
use crate::io::environment::SystemEnvironment;
use crate::metadata::OwnedLedgers;
#[cfg(target_os = "linux")]
use crate::net::client::RemoteController;
#[cfg(target_os = "linux")]
use crate::net::tls::Identity;

/// Options of a connection to a store outside this process.
#[derive(Clone, Debug)]
pub struct ConnectOptions {
    /// Certificate and key of this side, and the authority that it trusts, for daemons of other
    /// hosts.
    pub credentials: Option<Credentials>,
    /// Timeout of a response.
    pub timeout: Duration,
    /// Where to look for the command `tssd` before the `PATH`, in order: next to a file, or in a
    /// directory. By default next to the executable of this process.
    pub command_search: Vec<PathBuf>,
}

impl Default for ConnectOptions {
    fn default() -> Self {
        let command_search = std::env::current_exe().into_iter().collect();
        Self { credentials: None, timeout: Duration::from_secs(30), command_search }
    }
}

impl ConnectOptions {
    /// Reads credentials from the environment.
    ///
    /// `TSSD_CA`, `TSSD_CERT` and `TSSD_KEY` name the files. If one of them is not set, there are
    /// no credentials.
    pub fn from_environment() -> Self {
        let path = |name| std::env::var_os(name).filter(|path| !path.is_empty());
        let files = (path("TSSD_CA"), path("TSSD_CERT"), path("TSSD_KEY"));
        let (Some(ca), Some(cert), Some(key)) = files else { return Self::default() };
        let (ca, cert, key) = (ca.into(), cert.into(), key.into());
        Self { credentials: Some(Credentials { ca, cert, key }), ..Self::default() }
    }
}

impl Store {
    /// Creates a store in this process's memory. It ends with its last clone.
    pub fn memory() -> Self {
        let (ledgers, volume) = (OwnedLedgers::default(), MemoryVolume::default());
        let environment = Arc::new(SystemEnvironment);
        Self::new(LocalController::new(Arc::new(ledgers), Arc::new(volume), environment))
    }

    /// Opens a store in an existing directory. [`Store::directory`] can also create one.
    ///
    /// # Errors
    ///
    /// `Unreachable` if the directory does not exist or cannot be read.
    pub fn open_directory(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let check_directory = |root: &PathBuf| {
            if root.is_dir() { Ok(()) } else { Err(std::io::ErrorKind::NotADirectory.into()) }
        };
        let root = path.canonicalize().and_then(|root| check_directory(&root).map(|()| root));
        root.map(|root| Self::from_parts(open_directory(root)))
            .map_err(|error| unreachable_at(path, error))
    }

    /// Opens a store in a directory. Creates the directory if it does not exist.
    ///
    /// Each version is a directory of ordinary `.tssd` files and a manifest. Several processes may
    /// use the store at the same time.
    ///
    /// # Errors
    ///
    /// `Unreachable` if the directory cannot be created or read.
    pub fn directory(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let root = Disk::at(path.to_owned()).make_root().and_then(|()| path.canonicalize());
        root.map(|root| Self::from_parts(open_directory(root)))
            .map_err(|error| unreachable_at(path, error))
    }

    fn from_parts((ledgers, volume): StoreBackend) -> Self {
        Self::new(LocalController::new(ledgers, volume, Arc::new(SystemEnvironment)))
    }

    /// Connects to the store at an address.
    ///
    /// - `PATH` or `file:PATH`: an existing directory, or the daemon that serves it.
    /// - `unix:PATH`: the daemon that listens at this socket.
    /// - `unix:NAME`: the user's daemon with this name. If it does not run, `tssd serve` is
    ///   started: the program in `TSSD_BIN`, the one next to this executable
    ///   ([`ConnectOptions::command_search`]), or the one on the `PATH`. It exits a minute after
    ///   its last client has disconnected, unless it holds a version.
    /// - `tls://HOST:PORT`: the daemon of another host that listens there (`tssd serve --listen`),
    ///   with the credentials in the files that `TSSD_CA`, `TSSD_CERT` and `TSSD_KEY` name.
    /// - `tcp://HOST:PORT`: a daemon of this host, without encryption.
    /// - `s3://BUCKET/PREFIX`, `gs://BUCKET/PREFIX`, `az://CONTAINER/PREFIX`: the objects below a
    ///   prefix of a bucket (feature `object`). The usual environment variables give the region,
    ///   endpoint and keys.
    /// - `memory:`: a new store in this process.
    ///
    /// # Errors
    ///
    /// - `Unreachable` if the store cannot be reached.
    /// - `Invalid` for another kind of address, or credentials that cannot be read.
    /// - `Refused` for an unencrypted connection to another host.
    /// - `Unsupported` for a daemon on a system other than Linux.
    pub async fn connect(url: &str) -> Result<Self> {
        Self::connect_with(url, &ConnectOptions::from_environment()).await
    }

    /// As [`Store::connect`], with the given options instead of those of the environment.
    ///
    /// # Errors
    ///
    /// As [`Store::connect`].
    pub async fn connect_with(url: &str, options: &ConnectOptions) -> Result<Self> {
        match Address::parse(url)? {
            Address::Memory => Ok(Self::memory()),
            Address::Directory(path) => match daemon_address(path)? {
                Some(socket) => Self::connect_daemon(Path::new(&socket), options).await,
                None => Self::open_directory(path),
            },
            Address::Socket(path) => Self::connect_daemon(path, options).await,
            Address::Host(url) => Self::connect_host(url, options).await,
            Address::Bucket(url) => Ok(Self::from_parts(open_bucket(url, options.timeout)?)),
        }
    }

    /// Opens a store below a prefix of a bucket that the caller has opened.
    ///
    /// [`Store::connect`] opens a bucket by its address, with settings from the environment. Use
    /// this method for other credentials, limits or retries.
    ///
    /// The bucket must support creation of an object only if it does not exist
    /// ([`object_store::PutMode::Create`]). A put of more than 16 MiB is sent in parts of at least
    /// 16 MiB, eight at a time. A get requests ranges of up to 8 MiB, sixteen at a time.
    ///
    /// # Errors
    ///
    /// `Invalid` if the prefix is not a valid object path; `Io` if no threads can be started.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::sync::Arc;
    ///
    /// use object_store::memory::InMemory;
    /// use tssd_format::{StateDict, Tensor};
    /// use tssd_store::{GetOptions, Key, PutOptions, Store};
    /// # tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
    /// let bucket = Arc::new(InMemory::new());
    /// let store = Store::in_bucket(bucket.clone(), "runs/7")?;
    /// let key = Key::new("policy")?;
    /// let mut dict = StateDict::new();
    /// dict.insert("weight", Tensor::from_slice(&[1.0_f32, 2.0], &[2])?);
    /// store.put_state_dict(&key, &dict, &PutOptions::default()).await?;
    ///
    /// let elsewhere = Store::in_bucket(bucket, "runs/7")?;
    /// let (got, _) = elsewhere.get_state_dict(&key, &GetOptions::default()).await?;
    /// assert_eq!(got, dict);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// # })?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[cfg(feature = "object")]
    pub fn in_bucket<B: ObjectStore + MultipartStore>(
        bucket: Arc<B>,
        prefix: &str,
    ) -> Result<Self> {
        let display_name = format!("{bucket}/{prefix}");
        Ok(Self::from_bucket(Bucket::new(
            bucket,
            bucket::parse_prefix(prefix, prefix)?,
            &display_name,
        )?))
    }

    #[cfg(feature = "object")]
    pub(crate) fn from_bucket(bucket: Bucket) -> Self {
        Self::from_parts(from_bucket(bucket))
    }

    #[cfg(target_os = "linux")]
    async fn connect_host(url: &str, options: &ConnectOptions) -> Result<Self> {
        let identity = options.credentials.as_ref().map(Identity::read).transpose()?;
        let identity = identity.unwrap_or_default();
        let controller =
            RemoteController::connect_remote(&url.parse()?, &identity, options.timeout).await?;
        Ok(Self::new(controller))
    }

    #[cfg(target_os = "linux")]
    async fn connect_daemon(socket: &Path, options: &ConnectOptions) -> Result<Self> {
        // A name has no slash.
        let controller = match socket.to_str().filter(|name| !name.contains('/')) {
            Some(name) => {
                crate::net::client::connect_or_start(name, &options.command_search).await?
            }
            None => RemoteController::connect(socket).await?,
        };
        Ok(Self::new(controller))
    }

    #[cfg(not(target_os = "linux"))]
    async fn connect_host(url: &str, _options: &ConnectOptions) -> Result<Self> {
        Err(daemon_unsupported(url))
    }

    #[cfg(not(target_os = "linux"))]
    async fn connect_daemon(socket: &Path, _options: &ConnectOptions) -> Result<Self> {
        Err(daemon_unsupported(&format!("unix:{}", socket.display())))
    }

    /// As [`Store::connect`], but creates the directory if it does not exist.
    ///
    /// # Errors
    ///
    /// As [`Store::connect`].
    pub async fn create(url: &str) -> Result<Self> {
        Self::create_with(url, &ConnectOptions::from_environment()).await
    }

    /// As [`Store::create`], with the given options instead of those of the environment.
    ///
    /// # Errors
    ///
    /// As [`Store::connect`].
    pub async fn create_with(url: &str, options: &ConnectOptions) -> Result<Self> {
        match Address::parse(url)? {
            Address::Directory(path) if daemon_address(path)?.is_none() => Self::directory(path),
            _ => Self::connect_with(url, options).await,
        }
    }
}

/// Returns the error for a daemon.
///
/// Shared memory and connections of daemons are implemented only for Linux.
#[cfg(not(target_os = "linux"))]
fn daemon_unsupported(url: &str) -> Error {
    let text = format_args!(
        "`{url}`: there are daemons on Linux alone; use a store in a directory (file:DIR), in a bucket, or in memory"
    );
    Error::new(ErrorKind::Unsupported, text)
}
