//! An object store in memory that injects the faults of cloud object stores into single requests.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::stream::{self, BoxStream};
use object_store::memory::InMemory;
use object_store::multipart::{MultipartStore, PartId};
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, GetResultPayload, ListResult, MultipartUpload,
    ObjectMeta, ObjectStore, ObjectStoreExt, PutMode, PutMultipartOptions, PutOptions, PutPayload,
    PutResult, Result,
};

/// A fault of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The request is executed, but its response is lost.
    LostResponse,
    /// The request is not executed: status 500 or 503, a timeout, a lost connection.
    NotExecuted,
    /// Status 409: the request is not executed because of a concurrent one, which may fail too.
    Conflict,
    /// Status 412: like [`Self::Conflict`], with the status that other object stores use.
    Precondition,
    /// The body of the response is truncated.
    TruncatedBody,
    /// The body of the response is delayed.
    SlowBody,
    /// The listing lacks the object that was created last.
    StaleList,
    /// Status 403: permission denied. Retries are futile.
    PermissionDenied,
}

/// The transient faults, which a retry overcomes.
pub(crate) const TRANSIENT_FAULTS: [Fault; 7] = [
    Fault::LostResponse,
    Fault::NotExecuted,
    Fault::Conflict,
    Fault::Precondition,
    Fault::TruncatedBody,
    Fault::SlowBody,
    Fault::StaleList,
];

/// An object store in memory with injected faults.
#[derive(Debug, Default)]
pub(crate) struct FaultyBucket {
    inner: Arc<InMemory>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Number of requests so far.
    count: usize,
    /// The planned fault, and the number of its request, counted from 0.
    fault: Option<(usize, Fault)>,
    /// Whether the planned fault took effect.
    has_triggered: bool,
    /// Whether all later requests fail too.
    is_permanent: bool,
    /// Listings of folders before their newest object was created.
    listings: BTreeMap<Path, ListResult>,
    /// Number of uploads that are neither completed nor aborted.
    pub(crate) uploads: usize,
}

impl FaultyBucket {
    /// Plans a fault for the request with this number, counted from 0 at the next request.
    pub(crate) fn inject_fault(&self, number: usize, fault: Fault) {
        let mut state = self.state();
        (state.count, state.fault, state.has_triggered) = (0, Some((number, fault)), false);
    }

    /// Lets the next request and all later ones fail.
    pub(crate) fn fail_all(&self) {
        self.inject_fault(0, Fault::NotExecuted);
        self.state().is_permanent = true;
    }

    /// Removes the planned fault, and sets the count of requests to 0.
    pub(crate) fn clear_fault(&self) {
        let mut state = self.state();
        (state.count, state.fault, state.is_permanent) = (0, None, false);
    }

    /// Returns the number of requests, and whether the planned fault took effect.
    ///
    /// A fault has no effect on requests that it does not apply to.
    pub(crate) fn request_stats(&self) -> (usize, bool) {
        let state = self.state();
        (state.count, state.has_triggered)
    }

    /// Returns the number of uploads that are neither completed nor aborted.
    pub(crate) fn open_uploads(&self) -> usize {
        self.state().uploads
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Counts a request, and returns the fault that is planned for it, if that is one of the possible ones.
    fn next_fault(&self, possible: &[Fault]) -> Option<Fault> {
        let mut state = self.state();
        let number = state.count;
        state.count += 1;
        let is_planned = |at| at == number || (state.is_permanent && at < number);
        let fault = state.fault.filter(|(at, fault)| is_planned(*at) && possible.contains(fault));
        state.has_triggered |= fault.is_some();
        fault.map(|(_, fault)| fault)
    }

    /// Executes a request, unless its fault prevents that.
    async fn execute<T>(
        &self,
        possible: &[Fault],
        path: &Path,
        work: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        let source = || "as planned".into();
        match self.next_fault(possible) {
            Some(Fault::NotExecuted) => Err(Error::Generic { store: "Faulty", source: source() }),
            Some(Fault::Conflict) => {
                Err(Error::AlreadyExists { path: path.to_string(), source: source() })
            }
            Some(Fault::Precondition) => {
                Err(Error::Precondition { path: path.to_string(), source: source() })
            }
            Some(Fault::PermissionDenied) => {
                Err(Error::PermissionDenied { path: path.to_string(), source: source() })
            }
            Some(Fault::LostResponse) => {
                work.await?;
                Err(Error::Generic { store: "Faulty", source: source() })
            }
            _ => work.await,
        }
    }
}

impl fmt::Display for FaultyBucket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Faulty")
    }
}

const RESPONSE_FAULTS: [Fault; 2] = [Fault::LostResponse, Fault::NotExecuted];

#[async_trait]
impl ObjectStore for FaultyBucket {
    async fn put_opts(
        &self,
        path: &Path,
        payload: PutPayload,
        options: PutOptions,
    ) -> Result<PutResult> {
        let all = [
            RESPONSE_FAULTS[0],
            RESPONSE_FAULTS[1],
            Fault::Conflict,
            Fault::Precondition,
            Fault::PermissionDenied,
        ];
        let possible = if options.mode == PutMode::Create { &all[..] } else { &RESPONSE_FAULTS };
        if let Some(folder) = path.as_ref().rsplit_once('/') {
            let folder = Path::parse(folder.0).unwrap();
            let listing = self.inner.list_with_delimiter(Some(&folder)).await?;
            self.state().listings.insert(folder, listing);
        }
        self.execute(possible, path, self.inner.put_opts(path, payload, options)).await
    }

    async fn put_multipart_opts(
        &self,
        _path: &Path,
        _options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        Err(Error::NotImplemented {
            operation: "put_multipart".into(),
            implementer: "Faulty".into(),
        })
    }

    async fn get_opts(&self, path: &Path, options: GetOptions) -> Result<GetResult> {
        let possible = [Fault::NotExecuted, Fault::TruncatedBody, Fault::SlowBody];
        let fault = self.next_fault(&possible);
        if fault == Some(Fault::NotExecuted) {
            return Err(Error::Generic { store: "Faulty", source: "as planned".into() });
        }
        let mut got = self.inner.get_opts(path, options).await?;
        if fault.is_some() {
            let (meta, range) = (got.meta.clone(), got.range.clone());
            let bytes = got.bytes().await?;
            let half = bytes.slice(..bytes.len() / 2);
            let rest: Result<Bytes> = if fault == Some(Fault::TruncatedBody) {
                Err(Error::Generic { store: "Faulty", source: "as planned".into() })
            } else {
                Ok(bytes.slice(half.len()..))
            };
            let parts = stream::iter([Ok(half), rest]).then(async |part| {
                tokio::time::sleep(std::time::Duration::from_millis(10)).await;
                part
            });
            got = GetResult {
                payload: GetResultPayload::Stream(parts.boxed()),
                meta,
                range,
                attributes: object_store::Attributes::new(),
                extensions: object_store::Extensions::default(),
            };
        }
        Ok(got)
    }

    fn delete_stream(
        &self,
        paths: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        match self.next_fault(&RESPONSE_FAULTS) {
            None => {
                let inner = self.inner.clone();
                let delete = move |path: Result<Path>| {
                    let inner = inner.clone();
                    async move {
                        let path = path?;
                        // Some cloud object stores return an error if the object does not exist.
                        inner.head(&path).await?;
                        inner.delete(&path).await.map(|()| path)
                    }
                };
                paths.then(delete).boxed()
            }
            Some(fault) => {
                let failed =
                    || Err(Error::Generic { store: "Faulty", source: "as planned".into() });
                if fault == Fault::NotExecuted {
                    return stream::iter([failed()]).boxed();
                }
                self.inner.delete_stream(paths).map(move |_| failed()).boxed()
            }
        }
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.inner.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        let root = Path::default();
        let path = prefix.unwrap_or(&root);
        match self.next_fault(&[Fault::NotExecuted, Fault::StaleList]) {
            Some(Fault::NotExecuted) => {
                Err(Error::Generic { store: "Faulty", source: "as planned".into() })
            }
            Some(_) => {
                let stale = self.state().listings.remove(path);
                match stale {
                    Some(stale) => Ok(stale),
                    None => self.inner.list_with_delimiter(prefix).await,
                }
            }
            None => self.inner.list_with_delimiter(prefix).await,
        }
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.inner.copy_opts(from, to, options).await
    }
}

#[async_trait]
impl MultipartStore for FaultyBucket {
    async fn create_multipart(&self, path: &Path) -> Result<String> {
        let begin = async {
            let id = self.inner.create_multipart(path).await?;
            self.state().uploads += 1;
            Ok(id)
        };
        // No `LostAnswer`: the caller would not know the identifier of the upload. Lifecycle rules of a bucket
        // abort such uploads.
        self.execute(&[Fault::NotExecuted], path, begin).await
    }

    async fn put_part(
        &self,
        path: &Path,
        id: &String,
        part: usize,
        data: PutPayload,
    ) -> Result<PartId> {
        self.execute(&RESPONSE_FAULTS, path, self.inner.put_part(path, id, part, data)).await
    }

    async fn complete_multipart(
        &self,
        path: &Path,
        id: &String,
        parts: Vec<PartId>,
    ) -> Result<PutResult> {
        let complete = async {
            let completed = self.inner.complete_multipart(path, id, parts).await?;
            self.state().uploads -= 1;
            Ok(completed)
        };
        self.execute(&RESPONSE_FAULTS, path, complete).await
    }

    async fn abort_multipart(&self, path: &Path, id: &String) -> Result<()> {
        let abort = async {
            // Cloud object stores return `NotFound` for an unknown upload.
            self.inner.abort_multipart(path, id).await.map_err(|source| Error::NotFound {
                path: path.to_string(),
                source: source.into(),
            })?;
            self.state().uploads -= 1;
            Ok(())
        };
        self.execute(&RESPONSE_FAULTS, path, abort).await
    }
}
