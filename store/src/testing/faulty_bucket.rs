//! An object store in memory that fails at one request, in each of the ways that those of the clouds do.

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

/// What happens at a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// It is done, and the answer is lost.
    LostAnswer,
    /// It is not done: 500, 503, a timeout, a cut connection.
    NotDone,
    /// 409: it is not done, because of another one that may not be done either.
    Conflict,
    /// 412: the same, in other words.
    Precondition,
    /// The body of the answer ends too early, or comes after some time.
    CutBody,
    SlowBody,
    /// The listing lacks what was created last.
    StaleList,
    /// 403: it is not allowed, and there is no use in asking again.
    Denied,
}

/// Those that pass.
pub(crate) const FAULTS: [Fault; 7] = [
    Fault::LostAnswer,
    Fault::NotDone,
    Fault::Conflict,
    Fault::Precondition,
    Fault::CutBody,
    Fault::SlowBody,
    Fault::StaleList,
];

#[derive(Debug, Default)]
pub(crate) struct Faulty {
    inner: Arc<InMemory>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// How many requests there were.
    count: usize,
    /// At which request what happens, and whether it has.
    fault: Option<(usize, Fault)>,
    happened: bool,
    /// Whether those that follow fail too.
    lasts: bool,
    /// The listings before the newest object was created.
    listings: BTreeMap<Path, ListResult>,
    /// Uploads that are neither complete nor given up.
    pub(crate) uploads: usize,
}

impl Faulty {
    /// From the next request on, the one of this number, counted from 0, fails in this way.
    pub(crate) fn plan(&self, number: usize, fault: Fault) {
        let mut state = self.state();
        (state.count, state.fault, state.happened) = (0, Some((number, fault)), false);
    }

    /// From the next request on none is done.
    pub(crate) fn end(&self) {
        self.plan(0, Fault::NotDone);
        self.state().lasts = true;
    }

    /// Nothing fails; requests are counted from 0.
    pub(crate) fn mend(&self) {
        let mut state = self.state();
        (state.count, state.fault, state.lasts) = (0, None, false);
    }

    /// How many requests there were, and whether the fault was at one that it can be at.
    pub(crate) fn seen(&self) -> (usize, bool) {
        let state = self.state();
        (state.count, state.happened)
    }

    /// How many uploads are neither complete nor given up.
    pub(crate) fn uploads(&self) -> usize {
        self.state().uploads
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// What happens at this request, if it is one of those that it can happen to.
    fn next(&self, possible: &[Fault]) -> Option<Fault> {
        let mut state = self.state();
        let number = state.count;
        state.count += 1;
        let is_meant = |at| at == number || (state.lasts && at < number);
        let fault = state.fault.filter(|(at, fault)| is_meant(*at) && possible.contains(fault));
        state.happened |= fault.is_some();
        fault.map(|(_, fault)| fault)
    }

    /// Does something, or not.
    async fn may<T>(
        &self,
        possible: &[Fault],
        path: &Path,
        work: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        let source = || "as planned".into();
        match self.next(possible) {
            Some(Fault::NotDone) => Err(Error::Generic { store: "Faulty", source: source() }),
            Some(Fault::Conflict) => {
                Err(Error::AlreadyExists { path: path.to_string(), source: source() })
            }
            Some(Fault::Precondition) => {
                Err(Error::Precondition { path: path.to_string(), source: source() })
            }
            Some(Fault::Denied) => {
                Err(Error::PermissionDenied { path: path.to_string(), source: source() })
            }
            Some(Fault::LostAnswer) => {
                work.await?;
                Err(Error::Generic { store: "Faulty", source: source() })
            }
            _ => work.await,
        }
    }
}

impl fmt::Display for Faulty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Faulty")
    }
}

const BOTH: [Fault; 2] = [Fault::LostAnswer, Fault::NotDone];

#[async_trait]
impl ObjectStore for Faulty {
    async fn put_opts(
        &self,
        path: &Path,
        payload: PutPayload,
        options: PutOptions,
    ) -> Result<PutResult> {
        let all = [BOTH[0], BOTH[1], Fault::Conflict, Fault::Precondition, Fault::Denied];
        let possible = if options.mode == PutMode::Create { &all[..] } else { &BOTH };
        if let Some(folder) = path.as_ref().rsplit_once('/') {
            let folder = Path::parse(folder.0).unwrap();
            let listing = self.inner.list_with_delimiter(Some(&folder)).await?;
            self.state().listings.insert(folder, listing);
        }
        self.may(possible, path, self.inner.put_opts(path, payload, options)).await
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
        let possible = [Fault::NotDone, Fault::CutBody, Fault::SlowBody];
        let fault = self.next(&possible);
        if fault == Some(Fault::NotDone) {
            return Err(Error::Generic { store: "Faulty", source: "as planned".into() });
        }
        let mut got = self.inner.get_opts(path, options).await?;
        if fault.is_some() {
            let (meta, range) = (got.meta.clone(), got.range.clone());
            let bytes = got.bytes().await?;
            let half = bytes.slice(..bytes.len() / 2);
            let rest: Result<Bytes> = if fault == Some(Fault::CutBody) {
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
        match self.next(&BOTH) {
            None => {
                let inner = self.inner.clone();
                let delete = move |path: Result<Path>| {
                    let inner = inner.clone();
                    async move {
                        let path = path?;
                        // Some of the clouds say it if there is no such object.
                        inner.head(&path).await?;
                        inner.delete(&path).await.map(|()| path)
                    }
                };
                paths.then(delete).boxed()
            }
            Some(fault) => {
                let failed =
                    || Err(Error::Generic { store: "Faulty", source: "as planned".into() });
                if fault == Fault::NotDone {
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
        match self.next(&[Fault::NotDone, Fault::StaleList]) {
            Some(Fault::NotDone) => {
                Err(Error::Generic { store: "Faulty", source: "as planned".into() })
            }
            Some(_) => {
                let known = self.state().listings.remove(path);
                match known {
                    Some(known) => Ok(known),
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
impl MultipartStore for Faulty {
    async fn create_multipart(&self, path: &Path) -> Result<String> {
        let begin = async {
            let id = self.inner.create_multipart(path).await?;
            self.state().uploads += 1;
            Ok(id)
        };
        // If its answer is lost, nobody knows its number: such uploads a bucket's own rules end.
        self.may(&[Fault::NotDone], path, begin).await
    }

    async fn put_part(
        &self,
        path: &Path,
        id: &String,
        part: usize,
        data: PutPayload,
    ) -> Result<PartId> {
        self.may(&BOTH, path, self.inner.put_part(path, id, part, data)).await
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
        self.may(&BOTH, path, complete).await
    }

    async fn abort_multipart(&self, path: &Path, id: &String) -> Result<()> {
        let abort = async {
            // As those of the clouds say it.
            self.inner.abort_multipart(path, id).await.map_err(|source| Error::NotFound {
                path: path.to_string(),
                source: source.into(),
            })?;
            self.state().uploads -= 1;
            Ok(())
        };
        self.may(&BOTH, path, abort).await
    }
}
