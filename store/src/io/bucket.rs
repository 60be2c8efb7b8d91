//! A bucket of an object store (S3, Google Cloud Storage, Azure), or what is below a prefix of one.

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

use crate::error::{Error, ErrorKind, Result, causes};
use crate::io::exec::backoff;
use crate::io::sync::boxed;

/// A request may take so long, its bytes included: many share a line that may be slow.
const REQUEST: &str = "2 minutes";

/// The name of an object is not longer, prefix included, in any of the stores.
const MAX_PATH_BYTES: usize = 1024;

/// How many requests for bytes are under way at once.
const REQUESTS: usize = 16;

/// The objects below a prefix. Requests are made by threads of its own, whoever asks and waits for them.
#[derive(Clone)]
pub(crate) struct Bucket(Arc<Inner>);

struct Inner {
    objects: Arc<dyn ObjectStore>,
    uploads: Arc<dyn MultipartStore>,
    /// The prefix, and how it is shown.
    root: Path,
    shown: String,
    /// The right to have a request for bytes under way.
    requests: Arc<Semaphore>,
    runtime: Background,
}

/// A runtime that may be dropped anywhere.
struct Background(Option<Runtime>);

impl Drop for Background {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

/// What is to come of a request.
type Answer<T> = std::result::Result<T, object_store::Error>;

impl Bucket {
    /// The bucket at an address such as `s3://BUCKET/PREFIX`, with what the environment says of regions,
    /// endpoints and keys. Requests that fail are tried again that long, with longer and longer pauses of random
    /// length in between.
    pub(crate) fn open(url: &str, patience: Duration) -> Result<Self> {
        let (scheme, rest) = url.split_once("://").unwrap_or_default();
        let (_, below) = rest.split_once('/').unwrap_or((rest, ""));
        let root = prefix(below, url)?;
        // A process has one; one that has chosen another already keeps that.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let retry = RetryConfig { retry_timeout: patience, ..RetryConfig::default() };
        let timeout = ClientConfigKey::Timeout;
        let failed =
            |error| Error::new(ErrorKind::Invalid, format_args!("`{url}`: {}", causes(&error)));
        match scheme {
            "s3" | "s3a" => {
                let builder = AmazonS3Builder::from_env().with_url(url).with_retry(retry);
                let builder = builder.with_config(AmazonS3ConfigKey::Client(timeout), REQUEST);
                Self::new(Arc::new(builder.build().map_err(failed)?), root, url)
            }
            "gs" => {
                let builder = GoogleCloudStorageBuilder::from_env().with_url(url).with_retry(retry);
                let builder = builder.with_config(GoogleConfigKey::Client(timeout), REQUEST);
                Self::new(Arc::new(builder.build().map_err(failed)?), root, url)
            }
            _ => {
                let builder = MicrosoftAzureBuilder::from_env().with_url(url).with_retry(retry);
                let builder = builder.with_config(AzureConfigKey::Client(timeout), REQUEST);
                Self::new(Arc::new(builder.build().map_err(failed)?), root, url)
            }
        }
    }

    /// What is below a prefix of an object store.
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
            requests: Arc::new(Semaphore::new(REQUESTS)),
            runtime: Background(Some(runtime)),
        })))
    }

    pub(crate) fn objects(&self) -> Arc<dyn ObjectStore> {
        self.0.objects.clone()
    }

    pub(crate) fn uploads(&self) -> Arc<dyn MultipartStore> {
        self.0.uploads.clone()
    }

    pub(crate) fn requests(&self) -> Arc<Semaphore> {
        self.0.requests.clone()
    }

    /// Where an object is, by its name below the prefix.
    pub(crate) fn path(&self, name: &str) -> Result<Path> {
        let root = self.0.root.as_ref();
        let whole = if root.is_empty() || name.is_empty() {
            format!("{root}{name}")
        } else {
            format!("{root}/{name}")
        };
        let len = whole.len();
        if len > MAX_PATH_BYTES {
            let text = format_args!(
                "`{name}`: {len} bytes are more than the {MAX_PATH_BYTES} of a name in a bucket, where what is not \
                 `a-z 0-9 _ - .` in a key takes three"
            );
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        Path::parse(whole)
            .map_err(|error| Error::new(ErrorKind::Invalid, format_args!("`{name}`: {error}")))
    }

    /// What it is called in messages.
    pub(crate) fn shown(&self, name: &str) -> String {
        format!("{}/{name}", self.0.shown)
    }

    /// Lets the bucket's threads do something, whether it is waited for or not.
    pub(crate) fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        if let Some(runtime) = &self.0.runtime.0 {
            drop(runtime.spawn(boxed(work)));
        }
    }

    /// Lets them do something, and waits for it.
    pub(crate) async fn ask<T: Send + 'static>(
        &self,
        name: &str,
        work: impl Future<Output = Answer<T>> + Send + 'static,
    ) -> Result<T> {
        let (answer, answered) = oneshot::channel();
        self.spawn(async move { drop(answer.send(work.await)) });
        let answer = answered.await.map_err(|_| self.ended(name))?;
        answer.map_err(|error| self.error(name, &error))
    }

    /// The same for a thread that may wait.
    pub(crate) fn wait<T: Send + 'static>(
        &self,
        name: &str,
        work: impl Future<Output = Answer<T>> + Send + 'static,
    ) -> Result<T> {
        let (answer, answered) = mpsc::sync_channel(1);
        self.spawn(async move { drop(answer.send(work.await)) });
        let answer = answered.recv().map_err(|_| self.ended(name))?;
        answer.map_err(|error| self.error(name, &error))
    }

    fn ended(&self, name: &str) -> Error {
        let shown = self.shown(name);
        Error::new(ErrorKind::Unreachable, format_args!("`{shown}`: the request was cut off"))
    }

    /// An error of the object store at something.
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
        Error::new(kind, format_args!("`{}`: {}", self.shown(name), causes(error)))
    }

    /// The names directly below a name, sorted.
    pub(crate) fn list(
        &self,
        name: &str,
    ) -> Result<impl Future<Output = Answer<Vec<String>>> + Send + 'static> {
        let (objects, path) = (self.objects(), self.path(name)?);
        Ok(async move {
            let found = again(|| objects.list_with_delimiter(Some(&path))).await?;
            let objects = found.objects.iter().map(|object| &object.location);
            let names = found.common_prefixes.iter().chain(objects).filter_map(Path::filename);
            let mut names: Vec<String> = names.map(str::to_owned).collect();
            names.sort_unstable();
            names.dedup();
            Ok(names)
        })
    }
}

/// A prefix, of what is shown so.
pub(crate) fn prefix(prefix: &str, shown: &str) -> Result<Path> {
    Path::parse(prefix.trim_matches('/'))
        .map_err(|error| Error::new(ErrorKind::Invalid, format_args!("`{shown}`: {error}")))
}

/// How often something is done again that has failed on its way, and how long after the first try no more.
const TRIES: u32 = 4;
const PATIENCE: Duration = Duration::from_secs(20);

/// Does something until it has not failed on its way: requests are tried again by themselves, but not where the
/// connection is lost in the middle of an answer.
pub(crate) async fn again<T, F: Future<Output = Answer<T>>>(
    mut work: impl FnMut() -> F,
) -> Answer<T> {
    let (started, mut tries) = (Instant::now(), 0);
    loop {
        match work().await {
            Err(object_store::Error::Generic { .. })
                if tries < TRIES && started.elapsed() < PATIENCE =>
            {
                tries += 1;
                backoff(tries).await;
            }
            answer => return answer,
        }
    }
}

/// What is asked of an object; none if there is no such object.
pub(crate) fn optional<T>(answer: Answer<T>) -> Answer<Option<T>> {
    match answer {
        Err(object_store::Error::NotFound { .. }) => Ok(None),
        answer => answer.map(Some),
    }
}
