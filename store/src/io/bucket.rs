//! A bucket of an object store (S3, Google Cloud Storage, Azure), or the objects below a prefix of one.

use std::future::Future;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::multipart::MultipartStore;
use object_store::path::Path;
use object_store::{ClientConfigKey, ObjectStore, RetryConfig};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::{Semaphore, oneshot};

use crate::error::{Error, ErrorKind, Result};
use crate::io::exec::backoff;
use crate::io::sync::boxed;

/// Timeout of a request, including its body: many requests may share a slow connection.
const REQUEST_TIMEOUT: &str = "2 minutes";

/// Maximum bytes of an object name with its prefix. All stores accept this length.
const MAX_PATH_BYTES: usize = 1024;

/// Maximum number of range requests in flight.
const MAX_RANGE_REQUESTS: usize = 16;

/// The objects below a prefix of a bucket. Its own threads make the requests.
#[derive(Clone)]
pub(crate) struct Bucket(Arc<Inner>);

struct Inner {
    objects: Arc<dyn ObjectStore>,
    uploads: Arc<dyn MultipartStore>,
    /// The prefix. `shown` is the URL for messages.
    root: Path,
    shown: String,
    /// Limits the range requests in flight.
    requests: Arc<Semaphore>,
    runtime: BackgroundRuntime,
}

/// A runtime that can be dropped in any context, also in async code.
struct BackgroundRuntime(Option<Runtime>);

impl Drop for BackgroundRuntime {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

/// Result of a request.
type ObjectResult<T> = std::result::Result<T, object_store::Error>;

impl Bucket {
    /// Opens the bucket at a URL such as `s3://BUCKET/PREFIX`.
    ///
    /// Regions, endpoints and credentials come from environment variables. A failed request is retried for
    /// `retry_limit`, with growing delays of random length.
    pub(crate) fn open(url: &str, retry_limit: Duration) -> Result<Self> {
        let (scheme, rest) = url.split_once("://").unwrap_or_default();
        let (_, below) = rest.split_once('/').unwrap_or((rest, ""));
        let root = parse_prefix(below, url)?;
        // TLS needs a default provider. If the process has installed one already, that one stays.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let retry = RetryConfig { retry_timeout: retry_limit, ..RetryConfig::default() };
        let timeout = ClientConfigKey::Timeout;
        let failed = |error| Error::at_url(ErrorKind::Invalid, url, &error);
        match scheme {
            "s3" | "s3a" => {
                let builder = AmazonS3Builder::from_env().with_url(url).with_retry(retry);
                let builder =
                    builder.with_config(AmazonS3ConfigKey::Client(timeout), REQUEST_TIMEOUT);
                Self::new(Arc::new(builder.build().map_err(failed)?), root, url)
            }
            "gs" => {
                let builder = GoogleCloudStorageBuilder::from_env().with_url(url).with_retry(retry);
                let builder =
                    builder.with_config(GoogleConfigKey::Client(timeout), REQUEST_TIMEOUT);
                Self::new(Arc::new(builder.build().map_err(failed)?), root, url)
            }
            _ => {
                let builder = MicrosoftAzureBuilder::from_env().with_url(url).with_retry(retry);
                let builder = builder.with_config(AzureConfigKey::Client(timeout), REQUEST_TIMEOUT);
                Self::new(Arc::new(builder.build().map_err(failed)?), root, url)
            }
        }
    }

    /// Opens the objects below a prefix of an object store.
    pub(crate) fn new<S: ObjectStore + MultipartStore>(
        store: Arc<S>,
        root: Path,
        shown: &str,
    ) -> Result<Self> {
        let mut runtime = Builder::new_multi_thread();
        let runtime = runtime.worker_threads(2).thread_name("tssd-bucket").enable_all().build();
        let runtime = runtime.map_err(|error| Error::io("threads for a bucket", error))?;
        Ok(Self(Arc::new(Inner {
            objects: store.clone(),
            uploads: store,
            root,
            shown: shown.trim_end_matches('/').to_owned(),
            requests: Arc::new(Semaphore::new(MAX_RANGE_REQUESTS)),
            runtime: BackgroundRuntime(Some(runtime)),
        })))
    }

    pub(crate) fn objects(&self) -> Arc<dyn ObjectStore> {
        self.0.objects.clone()
    }

    pub(crate) fn uploads(&self) -> Arc<dyn MultipartStore> {
        self.0.uploads.clone()
    }

    pub(crate) fn request_permits(&self) -> Arc<Semaphore> {
        self.0.requests.clone()
    }

    /// Returns the path of an object, given its name below the prefix.
    pub(crate) fn path(&self, name: &str) -> Result<Path> {
        let root = self.0.root.as_ref();
        let path = if root.is_empty() || name.is_empty() {
            format!("{root}{name}")
        } else {
            format!("{root}/{name}")
        };
        let len = path.len();
        if len > MAX_PATH_BYTES {
            let text = format_args!(
                "`{name}`: {len} bytes are more than the {MAX_PATH_BYTES} of a name in a bucket, where what is not \
                 `a-z 0-9 _ - .` in a key takes three"
            );
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        Path::parse(path)
            .map_err(|error| Error::new(ErrorKind::Invalid, format_args!("`{name}`: {error}")))
    }

    /// Returns the URL of an object for messages.
    pub(crate) fn display_name(&self, name: &str) -> String {
        format!("{}/{name}", self.0.shown)
    }

    /// Runs a future on the threads of the bucket, without waiting for it.
    pub(crate) fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        if let Some(runtime) = &self.0.runtime.0 {
            drop(runtime.spawn(boxed(work)));
        }
    }

    /// Runs a request on the threads of the bucket and returns its result.
    pub(crate) async fn request<T: Send + 'static>(
        &self,
        name: &str,
        work: impl Future<Output = ObjectResult<T>> + Send + 'static,
    ) -> Result<T> {
        let (sender, receiver) = oneshot::channel();
        self.spawn(async move { drop(sender.send(work.await)) });
        let result = receiver.await.map_err(|_| self.cut_off_error(name))?;
        result.map_err(|error| self.error(name, &error))
    }

    /// As [`request`](Self::request), for a thread that may block.
    pub(crate) fn request_blocking<T: Send + 'static>(
        &self,
        name: &str,
        work: impl Future<Output = ObjectResult<T>> + Send + 'static,
    ) -> Result<T> {
        let (sender, receiver) = mpsc::sync_channel(1);
        self.spawn(async move { drop(sender.send(work.await)) });
        let result = receiver.recv().map_err(|_| self.cut_off_error(name))?;
        result.map_err(|error| self.error(name, &error))
    }

    fn cut_off_error(&self, name: &str) -> Error {
        let shown = self.display_name(name);
        Error::new(ErrorKind::Unreachable, format_args!("`{shown}`: the request was cut off"))
    }

    /// Converts an error of the object store about the object `name`.
    pub(crate) fn error(&self, name: &str, error: &object_store::Error) -> Error {
        use object_store::Error as Failed;
        let kind = match error {
            Failed::NotFound { .. } => ErrorKind::NotFound,
            Failed::PermissionDenied { .. } | Failed::Unauthenticated { .. } => ErrorKind::Refused,
            Failed::InvalidPath { .. }
            | Failed::NotSupported { .. }
            | Failed::NotImplemented { .. }
            | Failed::UnknownConfigurationKey { .. } => ErrorKind::Invalid,
            _ => ErrorKind::Unreachable,
        };
        Error::at_url(kind, &self.display_name(name), error)
    }

    /// Lists the names directly below `name`, sorted.
    pub(crate) fn list(
        &self,
        name: &str,
    ) -> Result<impl Future<Output = ObjectResult<Vec<String>>> + Send + 'static> {
        let (objects, path) = (self.objects(), self.path(name)?);
        Ok(async move {
            let found = retry(|| objects.list_with_delimiter(Some(&path))).await?;
            let objects = found.objects.iter().map(|object| &object.location);
            let names = found.common_prefixes.iter().chain(objects).filter_map(Path::filename);
            let mut names: Vec<String> = names.map(str::to_owned).collect();
            names.sort_unstable();
            names.dedup();
            Ok(names)
        })
    }
}

/// Parses a prefix. `shown` names it in the error.
pub(crate) fn parse_prefix(prefix: &str, shown: &str) -> Result<Path> {
    Path::parse(prefix.trim_matches('/'))
        .map_err(|error| Error::new(ErrorKind::Invalid, format_args!("`{shown}`: {error}")))
}

/// Maximum number of retries, and maximum time after the first try at which one starts.
const TRIES: u32 = 4;
const RETRY_TIMEOUT: Duration = Duration::from_secs(20);

/// Retries a request that failed in transit.
///
/// The client retries most failures itself, but not a connection that is lost in the middle of a response.
pub(crate) async fn retry<T, F: Future<Output = ObjectResult<T>>>(
    mut work: impl FnMut() -> F,
) -> ObjectResult<T> {
    let (started, mut tries) = (Instant::now(), 0);
    loop {
        match work().await {
            Err(object_store::Error::Generic { .. })
                if tries < TRIES && started.elapsed() < RETRY_TIMEOUT =>
            {
                tries += 1;
                backoff(tries).await;
            }
            result => return result,
        }
    }
}

/// Returns none instead of the error of a missing object.
pub(crate) fn optional<T>(result: ObjectResult<T>) -> ObjectResult<Option<T>> {
    match result {
        Err(object_store::Error::NotFound { .. }) => Ok(None),
        result => result.map(Some),
    }
}
