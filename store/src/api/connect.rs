//! The ways to a store.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

#[cfg(feature = "object")]
use object_store::{ObjectStore, multipart::MultipartStore};

use crate::api::store::Store;
use crate::blob::backend::MemoryVolume;
use crate::credentials::Credentials;
#[cfg(feature = "object")]
use crate::engine::address::over;
use crate::engine::address::{Address, Parts, claimed_by, directory, open_bucket, unreachable_at};
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

/// How a store is reached that is not in this process.
#[derive(Clone, Debug)]
pub struct ConnectOptions {
    /// What this side proves itself with to a daemon of another host, and whom it believes.
    pub credentials: Option<Credentials>,
    /// For how long an answer is waited for.
    pub timeout: Duration,
}

impl Default for ConnectOptions {
    fn default() -> Self {
        Self { credentials: None, timeout: Duration::from_secs(30) }
    }
}

impl ConnectOptions {
    /// With the credentials in the files that `TSSD_CA`, `TSSD_CERT` and `TSSD_KEY` name, if all do.
    pub fn from_environment() -> Self {
        let path = |name| std::env::var_os(name).filter(|path| !path.is_empty());
        let files = (path("TSSD_CA"), path("TSSD_CERT"), path("TSSD_KEY"));
        let (Some(ca), Some(cert), Some(key)) = files else { return Self::default() };
        let (ca, cert, key) = (ca.into(), cert.into(), key.into());
        Self { credentials: Some(Credentials { ca, cert, key }), ..Self::default() }
    }
}

impl Store {
    /// A store in this process's memory. It ends with its last clone.
    pub fn memory() -> Self {
        let (ledgers, volume) = (OwnedLedgers::default(), MemoryVolume::default());
        let environment = Arc::new(SystemEnvironment);
        Self::new(LocalController::new(Arc::new(ledgers), Arc::new(volume), environment))
    }

    /// A store in a directory that is there. See [`Store::directory`], which makes one.
    ///
    /// # Errors
    ///
    /// `Unreachable` if there is no such directory, or it cannot be read.
    pub fn open_directory(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let is_folder = |root: &PathBuf| {
            if root.is_dir() { Ok(()) } else { Err(std::io::ErrorKind::NotADirectory.into()) }
        };
        let reached = path.canonicalize().and_then(|root| is_folder(&root).map(|()| root));
        reached.map(|root| Self::of(directory(root))).map_err(|error| unreachable_at(path, &error))
    }

    /// A store in a directory, which is made if it is not there. Each version is a folder of ordinary
    /// `.tssd` files and a manifest; several processes may use the directory at once.
    ///
    /// # Errors
    ///
    /// `Unreachable` if the directory cannot be made or read.
    pub fn directory(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let reached = Disk::at(path.to_owned()).make_root().and_then(|()| path.canonicalize());
        reached.map(|root| Self::of(directory(root))).map_err(|error| unreachable_at(path, &error))
    }

    fn of((ledgers, volume): Parts) -> Self {
        Self::new(LocalController::new(ledgers, volume, Arc::new(SystemEnvironment)))
    }

    /// The store at an address:
    ///
    /// - `PATH` or `file:PATH`: a directory that is there, or the daemon that serves it;
    /// - `unix:PATH`: the daemon that listens at that socket;
    /// - `unix:NAME`: the user's of that name, which is started if there is none: `tssd serve`, by the
    ///   program that `TSSD_BIN` names or the one on the `PATH`. It ends a minute after its last client
    ///   has left, unless it holds a version;
    /// - `tls://HOST:PORT`: the daemon of another host that listens there (`tssd serve --listen`), with the
    ///   credentials in the files that `TSSD_CA`, `TSSD_CERT` and `TSSD_KEY` name;
    /// - `tcp://HOST:PORT`: a daemon of this host, in the open;
    /// - `s3://BUCKET/PREFIX`, `gs://BUCKET/PREFIX`, `az://CONTAINER/PREFIX`: what is below a prefix of a bucket
    ///   (feature `object`), with the regions, endpoints and keys that the usual environment variables say;
    /// - `memory:`: a new one in this process.
    ///
    /// # Errors
    ///
    /// `Unreachable` if it cannot be reached; `Invalid` for another kind of address, or credentials that
    /// cannot be read; `Refused` for a way in the open that leads off this host; `Unsupported` for a daemon where
    /// there are none: off Linux.
    pub async fn connect(url: &str) -> Result<Self> {
        Self::connect_with(url, &ConnectOptions::from_environment()).await
    }

    /// As [`Store::connect`], in a way that is said and not taken from the environment.
    ///
    /// # Errors
    ///
    /// As [`Store::connect`].
    pub async fn connect_with(url: &str, options: &ConnectOptions) -> Result<Self> {
        match Address::of(url)? {
            Address::Memory => Ok(Self::memory()),
            Address::Directory(path) => match claimed_by(path)? {
                Some(socket) => Self::daemon(Path::new(&socket)).await,
                None => Self::open_directory(path),
            },
            Address::Socket(path) => Self::daemon(path).await,
            Address::Host(url) => Self::host(url, options).await,
            Address::Bucket(url) => Ok(Self::of(open_bucket(url, options.timeout)?)),
        }
    }

    /// A store in a bucket that the caller has opened: what is below a prefix of it. [`Store::connect`] opens one by its
    /// address, with what the environment says; this is for one with other credentials, limits or retries.
    ///
    /// The bucket must create objects only where there are none ([`object_store::PutMode::Create`]). A put of more than
    /// 16 MiB goes in parts of 16 MiB or more, eight at once; a get asks for ranges of up to 8 MiB, sixteen at once.
    ///
    /// # Errors
    ///
    /// `Invalid` if the prefix is not a path of objects; `Io` if the system gives no threads.
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
        let shown = format!("{bucket}/{prefix}");
        Ok(Self::over(Bucket::new(bucket, bucket::prefix(prefix, prefix)?, &shown)?))
    }

    #[cfg(feature = "object")]
    pub(crate) fn over(bucket: Bucket) -> Self {
        Self::of(over(bucket))
    }

    #[cfg(target_os = "linux")]
    async fn host(url: &str, options: &ConnectOptions) -> Result<Self> {
        let identity = options.credentials.as_ref().map(Identity::read).transpose()?;
        let identity = identity.unwrap_or_default();
        let reached = RemoteController::reach(&url.parse()?, &identity, options.timeout).await?;
        Ok(Self::new(reached))
    }

    #[cfg(target_os = "linux")]
    async fn daemon(socket: &Path) -> Result<Self> {
        // A name has no folders.
        let controller = match socket.to_str().filter(|name| !name.contains('/')) {
            Some(name) => crate::net::client::join(name).await?,
            None => RemoteController::connect(socket).await?,
        };
        Ok(Self::new(controller))
    }

    #[cfg(not(target_os = "linux"))]
    async fn host(url: &str, _options: &ConnectOptions) -> Result<Self> {
        Err(no_daemons(url))
    }

    #[cfg(not(target_os = "linux"))]
    async fn daemon(socket: &Path) -> Result<Self> {
        Err(no_daemons(&format!("unix:{}", socket.display())))
    }

    /// As [`Store::connect`], but makes the directory if it is not there.
    ///
    /// # Errors
    ///
    /// As [`Store::connect`].
    pub async fn create(url: &str) -> Result<Self> {
        Self::create_with(url, &ConnectOptions::from_environment()).await
    }

    /// As [`Store::create`], in a way that is said and not taken from the environment.
    ///
    /// # Errors
    ///
    /// As [`Store::connect`].
    pub async fn create_with(url: &str, options: &ConnectOptions) -> Result<Self> {
        match Address::of(url)? {
            Address::Directory(path) if claimed_by(path)?.is_none() => Self::directory(path),
            _ => Self::connect_with(url, options).await,
        }
    }
}

/// Daemons share memory, and are reached, in ways that only Linux has so far.
#[cfg(not(target_os = "linux"))]
fn no_daemons(url: &str) -> Error {
    let text = format_args!(
        "`{url}`: there are daemons on Linux alone; use a store in a directory (file:DIR), in a bucket, or in memory"
    );
    Error::new(ErrorKind::Unsupported, text)
}
