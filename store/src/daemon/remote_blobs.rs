//! Index of the archives that other daemons store, and connections to those daemons.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::sync::{Mutex as AsyncMutex, Semaphore};
use tssd_format::{Blob, checksum};

use crate::blob::RemoteArchive;
use crate::convert::{to_u64, to_usize};
use crate::daemon::chunk_verifier::{ChunkVerifier, gather};
use crate::daemon::delta_base::DeltaBase;
use crate::error::{Error, ErrorKind, Result};
use crate::io::exec::run_blocking;
use crate::io::sync::{Lock, MutexGuard};
use crate::net::client::{Announcement, ConnectionPool, RangesRequest};
use crate::net::encoding;
use crate::net::tls::{Endpoint, Identity};
use crate::net::wire::{BlobFetcher, Encodings, Range, ReadChecksum};

/// Timeout of a connection attempt.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum number of concurrent reads from one daemon.
const MAX_READS_PER_PEER: usize = 8;

/// Maximum number of concurrent reads from all daemons that fetch a blob too. Each takes a thread, and may wait for another
/// daemon.
const MAX_FETCHER_READS: usize = 256;

/// Maximum number of names in a discard request, so that it stays within the limits of a frame.
const NAMES_PER_REQUEST: usize = 16;

/// Timeout of a probe of a daemon.
const PROBE_TIMEOUT: Duration = Duration::from_secs(2);

/// Time for which a failed probe is not repeated.
const FAILED_PROBE_TTL: Duration = Duration::from_secs(5);

/// Number of tries of a discard request.
const DISCARD_TRIES: u32 = 3;

/// Index of the blobs that other daemons store, by name.
pub(crate) struct RemoteBlobIndex {
    identity: Identity,
    /// Where other daemons reach this one. `None`: they do not.
    own: Option<Endpoint>,
    /// Rate in bytes per second below which a fetch is slow.
    min_fetch_rate: Option<u64>,
    fetcher_permits: Arc<Semaphore>,
    inner: Lock<Inner>,
}

#[derive(Default)]
struct Inner {
    blobs: BTreeMap<String, RemoteBlob>,
    peers: BTreeMap<Endpoint, Peer>,
    traffic: RemoteReadStats,
}

/// Counters of the reads from other daemons.
#[derive(Clone, Default)]
pub(crate) struct RemoteReadStats {
    /// Bytes read, by the kind of replica that sent them.
    pub(crate) read_bytes: BTreeMap<ReplicaKind, u64>,
    /// Bytes read from daemons that fetched the blob at the same time.
    pub(crate) fetcher_bytes: u64,
    /// Number of such daemons that failed, or sent damaged bytes.
    pub(crate) avoided_fetchers: u64,
    /// Number of locations that were skipped because the daemon failed, or does not have the blob.
    pub(crate) skipped: u64,
}

/// Kind of replica that a daemon stores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum ReplicaKind {
    /// The blob was put to that daemon.
    Origin,
    /// The daemon read the blob from another one and caches it.
    Replica,
}

impl ReplicaKind {
    pub(crate) const ALL: [Self; 2] = [Self::Origin, Self::Replica];
}

impl fmt::Display for ReplicaKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Origin => "origin",
            Self::Replica => "replica",
        })
    }
}

/// Location of a blob in another daemon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ReplicaLocation {
    pub(crate) endpoint: Endpoint,
    pub(crate) kind: ReplicaKind,
}

/// Bytes of a blob, and who sent them.
pub(crate) struct RemoteRead {
    pub(crate) data: Bytes,
    pub(crate) checksum: ReadChecksum,
    /// The bytes as they came, if they came encoded, and the encodings that they use.
    pub(crate) encoded: Option<(Bytes, Encodings)>,
    /// Whether the sender lacks the base from which the bytes may be differences.
    pub(crate) lacks_base: bool,
    /// The address of a daemon, or [`BUCKET`].
    pub(crate) sender: String,
}

impl RemoteRead {
    /// Returns how many bytes were sent for it.
    pub(crate) fn moved_bytes(&self) -> u64 {
        to_u64(self.encoded.as_ref().map_or(self.data.len(), |(encoded, _)| encoded.len()))
    }
}

/// Encodings in which the bytes of a blob may come.
#[derive(Clone, Default)]
pub(crate) struct ReadEncodings {
    /// An archive that this daemon has, from which they may be differences.
    pub(crate) base: Option<Arc<dyn DeltaBase>>,
    /// Whether they may be in byte planes.
    pub(crate) planes: bool,
    /// Whether daemons that lack the base are asked only if no other one has it.
    pub(crate) base_only: bool,
}

/// Name of the bucket as a sender.
const BUCKET: &str = "bucket";

/// The other daemons that fetch a blob or parts of it, as its registry knows them.
pub(crate) struct Announced {
    pub(crate) fetchers: Vec<(Endpoint, BlobFetcher)>,
    /// Number of tables of what they want.
    pub(crate) tables: u32,
    /// CRC-32 of the tables.
    pub(crate) crc32: u32,
    /// The tables. Empty if they are known already.
    pub(crate) data: Vec<u8>,
}

impl Announced {
    /// Adds the daemons that another registry knows, if they want the whole blob.
    ///
    /// Only blobs that are restored have several registries, and they are restored as a whole.
    pub(crate) fn merge(&mut self, other: Self) {
        for (endpoint, fetcher) in other.fetchers {
            match self.fetchers.iter_mut().find(|(known, _)| *known == endpoint) {
                Some((_, known)) => known.is_complete |= fetcher.is_complete,
                None if fetcher.table.is_none() => self.fetchers.push((endpoint, fetcher)),
                None => {}
            }
        }
    }
}

/// Another daemon.
struct Peer {
    connections: Arc<ConnectionPool>,
    read_permits: Arc<Semaphore>,
    /// Names of blobs that it may delete. The task that adds the first name sends the requests.
    discard_queue: Arc<Lock<Vec<String>>>,
    /// Start of the last probe, and whether the daemon answered it.
    last_probe: Arc<AsyncMutex<Option<(Instant, bool)>>>,
}

/// A blob that other daemons store.
struct RemoteBlob {
    /// Locations in the order in which reads try them. There is one, or `bucket`.
    locations: Vec<ReplicaLocation>,
    len: u64,
    /// The blob in the bucket, while this daemon restores it. Reads then do not ask other daemons.
    bucket: Option<Arc<BucketSource>>,
    /// Number of references to this entry.
    references: u64,
}

/// A blob in the bucket, which daemons restore together.
pub(crate) struct BucketSource {
    blob: Arc<dyn Blob>,
    verifier: ChunkVerifier,
    /// The daemons that list those that restore the blob.
    registries: Vec<Endpoint>,
    read_bytes: AtomicU64,
}

impl BucketSource {
    pub(crate) fn new(blob: Arc<dyn Blob>, registries: Vec<Endpoint>) -> Self {
        Self { blob, verifier: ChunkVerifier::default(), registries, read_bytes: AtomicU64::new(0) }
    }

    /// Returns the number of bytes that were read from the bucket.
    pub(crate) fn read_bytes(&self) -> u64 {
        self.read_bytes.load(Ordering::Relaxed)
    }

    /// Reads ranges. If `verify` is true, verifies the chunks that contain them first.
    async fn read(
        self: Arc<Self>,
        name: &str,
        ranges: &[Range],
        verify: bool,
    ) -> Result<(Bytes, ReadChecksum)> {
        let (name, ranges) = (name.to_owned(), ranges.to_vec());
        run_blocking(move || {
            if verify {
                self.verifier.verify(&name, &self.blob, &ranges)?;
            }
            let data = gather(&*self.blob, &ranges)?.pieces().concat();
            let bytes = u64::try_from(data.len()).unwrap_or(u64::MAX);
            self.read_bytes.fetch_add(bytes, Ordering::Relaxed);
            let crc32 = verify.then(|| checksum(&data));
            Ok((data.into(), ReadChecksum { crc32 }))
        })
        .await
    }
}

impl RemoteBlob {
    fn new(len: u64) -> Self {
        Self { locations: Vec::new(), len, bucket: None, references: 0 }
    }
}

impl RemoteBlobIndex {
    pub(crate) fn new(identity: Identity, own: Option<Endpoint>) -> Self {
        let fetcher_permits = Arc::new(Semaphore::new(MAX_FETCHER_READS));
        Self { identity, own, min_fetch_rate: None, fetcher_permits, inner: Lock::default() }
    }

    /// Sets the rate in bytes per second below which a fetch is slow.
    pub(crate) fn with_min_fetch_rate(self, min_fetch_rate: Option<u64>) -> Self {
        Self { min_fetch_rate, ..self }
    }

    /// Returns the rate in bytes per second below which a fetch is slow.
    pub(crate) fn min_fetch_rate(&self) -> Option<u64> {
        self.min_fetch_rate
    }

    /// Returns the address at which other daemons reach this one.
    pub(crate) fn own(&self) -> Option<&Endpoint> {
        self.own.as_ref()
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock()
    }

    /// Adds a reference to a blob of `len` bytes and sets its locations. Reads try them in this order.
    ///
    /// `locations` must not be empty.
    pub(crate) fn add_reference(&self, name: &str, locations: &[ReplicaLocation], len: u64) {
        let mut inner = self.inner();
        let blob = inner.blobs.entry(name.to_owned()).or_insert_with(|| RemoteBlob::new(len));
        blob.locations = locations.to_vec();
        blob.references += 1;
    }

    /// Adds a reference to a blob of `len` bytes that is restored from the bucket.
    ///
    /// Reads of it come from the bucket until [`RemoteBlobIndex::remove_bucket`] is called.
    pub(crate) fn add_bucket(&self, name: &str, source: Arc<BucketSource>, len: u64) {
        let mut inner = self.inner();
        let blob = inner.blobs.entry(name.to_owned()).or_insert_with(|| RemoteBlob::new(len));
        blob.bucket = Some(source);
        blob.references += 1;
    }

    /// Ends the reads from the bucket, and removes the reference of [`RemoteBlobIndex::add_bucket`].
    pub(crate) fn remove_bucket(&self, name: &str) {
        if let Some(blob) = self.inner().blobs.get_mut(name) {
            blob.bucket = None;
        }
        self.remove_reference(name);
    }

    /// Returns the source in the bucket of a blob that is restored.
    pub(crate) fn bucket(&self, name: &str) -> Option<Arc<BucketSource>> {
        self.inner().blobs.get(name)?.bucket.clone()
    }

    /// Removes a reference. The last one removes the entry.
    pub(crate) fn remove_reference(&self, name: &str) {
        let mut inner = self.inner();
        if let Some(blob) = inner.blobs.get_mut(name) {
            blob.references -= 1;
            if blob.references == 0 {
                inner.blobs.remove(name);
            }
        }
    }

    /// Removes the entry of a blob and asks the daemons that store it to delete it, in the background.
    pub(crate) fn discard(&self, name: &str) {
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        let mut inner = self.inner();
        let Some(blob) = inner.blobs.remove(name) else { return };
        for location in blob.locations {
            let peer = self.peer_in(&mut inner, &location.endpoint);
            let (connections, discard_queue) =
                (peer.connections.clone(), peer.discard_queue.clone());
            let is_first = {
                let mut names = lock_names(&discard_queue);
                names.push(name.to_owned());
                names.len() == 1
            };
            // Otherwise the task that added the first name sends this one too. The task is not joined: no caller
            // waits for a slow daemon, and one that has exited has nothing to delete.
            if is_first {
                drop(runtime.spawn_blocking(move || send_discards(&connections, &discard_queue)));
            }
        }
    }

    /// Returns the names of the blobs that begin with a prefix.
    pub(crate) fn names(&self, prefix: &str) -> Vec<String> {
        let inner = self.inner();
        let blobs = inner.blobs.range(prefix.to_owned()..);
        let blobs = blobs.take_while(|(name, _)| name.starts_with(prefix));
        blobs.filter(|(_, blob)| !blob.locations.is_empty()).map(|(name, _)| name.clone()).collect()
    }

    /// Returns the length in bytes of a blob that this daemon reads from others, or restores from the bucket.
    pub(crate) fn len(&self, name: &str) -> Option<u64> {
        Some(self.inner().blobs.get(name)?.len)
    }

    /// Returns the first location of a blob, and its length in bytes.
    pub(crate) fn locate(&self, name: &str) -> Option<(ReplicaLocation, u64)> {
        let inner = self.inner();
        let blob = inner.blobs.get(name)?;
        Some((blob.locations.first()?.clone(), blob.len))
    }

    /// Opens a blob that is restored in the bucket, and another one at its first location.
    pub(crate) fn open_source(&self, name: &str) -> Option<Arc<dyn Blob>> {
        match self.bucket(name) {
            Some(bucket) => Some(bucket.blob.clone()),
            None => Some(Arc::new(self.open(name)?)),
        }
    }

    /// Opens a blob at its first location.
    pub(crate) fn open(&self, name: &str) -> Option<RemoteArchive> {
        let (location, len) = self.locate(name)?;
        Some(RemoteArchive {
            reader: self.connections(&location.endpoint),
            blob: name.into(),
            len,
            tail: None,
        })
    }

    /// Returns the counters of the reads from other daemons.
    pub(crate) fn stats(&self) -> RemoteReadStats {
        self.inner().traffic.clone()
    }

    /// Returns the connections to a daemon.
    pub(crate) fn connections(&self, endpoint: &Endpoint) -> Arc<ConnectionPool> {
        self.peer_in(&mut self.inner(), endpoint).connections.clone()
    }

    /// Reads ranges of a blob from the first location that has them.
    ///
    /// If `verify` is true, the sender verifies the chunks that contain the ranges, and the result has the checksum of
    /// the data.
    ///
    /// # Errors
    ///
    /// `Unreachable` if any daemon that was tried is unreachable; otherwise the error of the last one. `Corrupt` if
    /// the data is damaged; `NotFound` if no daemon has the blob.
    pub(crate) async fn read(
        &self,
        name: &str,
        ranges: &[Range],
        verify: bool,
        encodings: &ReadEncodings,
    ) -> Result<RemoteRead> {
        if let Some(bucket) = self.bucket(name) {
            let (data, checksum) = bucket.read(name, ranges, verify).await?;
            let (encoded, sender) = (None, BUCKET.to_owned());
            return Ok(RemoteRead { data, checksum, encoded, lacks_base: false, sender });
        }
        let (blob, ranges, encodings) = (name.to_owned(), ranges.to_vec(), encodings.clone());
        // Daemons that take each other for holders would wait for each other.
        let request =
            RangesRequest { ranges, verify, local_only: true, accept: Encodings::default() };
        if encodings.base_only && self.has_several_replicas(name) {
            let (request, encodings) = (request.clone(), encodings.clone());
            if let Some(read) = self.read_with_base(name, request, encodings).await {
                return Ok(read);
            }
        }
        let encodings = ReadEncodings { base_only: false, ..encodings };
        let read = move |connections: &ConnectionPool| {
            let read = read_from(connections, &blob, request.clone(), &encodings)?;
            read.ok_or_else(|| Error::new(ErrorKind::NotFound, "a daemon sent no data"))
        };
        let (mut read, location) = self.call_holder(name, read).await?;
        self.count_read(location.kind, read.moved_bytes());
        read.sender = location.endpoint.to_string();
        Ok(read)
    }

    /// Reads ranges of a blob from the first location that has the base. Returns `None` if none has it, or after errors.
    async fn read_with_base(
        &self,
        name: &str,
        request: RangesRequest,
        encodings: ReadEncodings,
    ) -> Option<RemoteRead> {
        let locations = self.inner().blobs.get(name).map(|blob| blob.locations.clone());
        for location in locations.unwrap_or_default() {
            let (blob, request, encodings) = (name.to_owned(), request.clone(), encodings.clone());
            let read = move |connections: &ConnectionPool| {
                read_from(connections, &blob, request, &encodings)
            };
            match self.call_daemon(&location.endpoint, name, read).await {
                Ok(Some(mut read)) => {
                    self.count_read(location.kind, read.moved_bytes());
                    read.sender = location.endpoint.to_string();
                    return Some(read);
                }
                Ok(None) => {}
                // The next reads ask the others first.
                Err(_) => self.demote(name, &location),
            }
        }
        None
    }

    /// Returns the CRC-32 of ranges of a blob. The daemon that has them verifies their chunks first.
    ///
    /// # Errors
    ///
    /// As [`RemoteBlobIndex::read`].
    pub(crate) async fn checksum(&self, name: &str, ranges: &[Range]) -> Result<u32> {
        let sum = if let Some(bucket) = self.bucket(name) {
            bucket.read(name, ranges, true).await?.1
        } else {
            let (blob, ranges) = (name.to_owned(), ranges.to_vec());
            let call = move |connections: &ConnectionPool| {
                connections.checksum_ranges(&blob, ranges.clone())
            };
            self.call_holder(name, call).await?.0
        };
        let text = format_args!("a daemon sent no checksum of `{name}`");
        sum.crc32.ok_or_else(|| Error::new(ErrorKind::Corrupt, text))
    }

    /// Calls the first daemon that has a blob, and the next one if it fails. Returns which daemon it was too.
    async fn call_holder<T: Send + 'static>(
        &self,
        name: &str,
        call: impl Fn(&ConnectionPool) -> Result<T> + Clone + Send + 'static,
    ) -> Result<(T, ReplicaLocation)> {
        let locations = self.inner().blobs.get(name).map(|blob| blob.locations.clone());
        let mut last_error: Option<Error> = None;
        for location in locations.unwrap_or_default() {
            match self.call_daemon(&location.endpoint, name, call.clone()).await {
                Ok(value) => return Ok((value, location)),
                // A cached replica may have been evicted, or may be damaged.
                Err(error)
                    if matches!(error.kind(), ErrorKind::Unreachable | ErrorKind::NotFound)
                        || location.kind == ReplicaKind::Replica =>
                {
                    self.demote(name, &location);
                    let is_unreachable =
                        |last_error: &Error| last_error.kind() == ErrorKind::Unreachable;
                    last_error = last_error.filter(is_unreachable).or(Some(error));
                }
                Err(error) => return Err(error),
            }
        }
        Err(last_error.unwrap_or_else(|| {
            let text = format_args!("`{name}` is not there (any more): locate its version again");
            Error::new(ErrorKind::NotFound, text)
        }))
    }

    /// Calls a holder on a thread, when few other calls to it run.
    async fn call_daemon<T: Send + 'static>(
        &self,
        endpoint: &Endpoint,
        name: &str,
        call: impl FnOnce(&ConnectionPool) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let (connections, read_permits) = {
            let mut inner = self.inner();
            let peer = self.peer_in(&mut inner, endpoint);
            (peer.connections.clone(), peer.read_permits.clone())
        };
        // Each call takes a connection and a thread.
        let permit = read_permits.acquire_owned().await;
        let _permit = permit.map_err(|error| Error::io(name, std::io::Error::other(error)))?;
        run_blocking(move || call(&connections)).await
    }

    fn count_read(&self, kind: ReplicaKind, bytes: u64) {
        *self.inner().traffic.read_bytes.entry(kind).or_default() += bytes;
    }

    /// Returns the daemons that list those that fetch a blob: the one where it was put.
    ///
    /// For a blob that is restored these are those of its [`BucketSource`].
    pub(crate) fn registries(&self, name: &str) -> Vec<Endpoint> {
        let inner = self.inner();
        let Some(blob) = inner.blobs.get(name) else { return Vec::new() };
        if let Some(bucket) = &blob.bucket {
            return bucket.registries.clone();
        }
        let mut locations = blob.locations.iter();
        let origin = locations.find(|location| location.kind == ReplicaKind::Origin);
        origin.into_iter().map(|location| location.endpoint.clone()).collect()
    }

    /// Tells a registry of a blob that this daemon fetches it, or parts of it. Returns the other daemons that do.
    ///
    /// # Errors
    ///
    /// `Unsupported` if other daemons do not reach this one; the error of the registry.
    pub(crate) async fn announce(
        &self,
        registry: &Endpoint,
        name: &str,
        announcement: Announcement,
    ) -> Result<Announced> {
        let Some(own) = &self.own else {
            return Err(Error::new(ErrorKind::Unsupported, "other daemons do not reach this one"));
        };
        let connections = self.connections(registry);
        let (name, address) = (name.to_owned(), own.to_string());
        let announce = move || connections.announce(&name, &address, &announcement);
        let (found, data) = run_blocking(announce).await?;
        // An address that this daemon cannot use is no source.
        let usable = found.fetchers.iter().filter_map(|fetcher| {
            let endpoint: Endpoint = fetcher.address.parse().ok()?;
            (endpoint.is_tls() == self.is_tls()).then(|| (endpoint, fetcher.clone()))
        });
        Ok(Announced { fetchers: usable.collect(), tables: found.tables, crc32: found.crc32, data })
    }

    /// Returns the pieces of a blob of which another fetcher has what it wants: a bit for each. `None`: it has all.
    ///
    /// # Errors
    ///
    /// The error of that daemon.
    pub(crate) async fn present_pieces(
        &self,
        endpoint: &Endpoint,
        name: &str,
    ) -> Result<Option<Vec<u8>>> {
        let connections = self.connections(endpoint);
        let blob = name.to_owned();
        run_blocking(move || connections.present_pieces(&blob)).await
    }

    /// Reads ranges of a blob from a daemon that fetches it too. The bytes are not verified.
    ///
    /// Returns `None` if that daemon lacks the base, and `encodings` excludes such daemons.
    ///
    /// # Errors
    ///
    /// The error of that daemon; `Corrupt` if it sent another number of bytes.
    pub(crate) async fn read_from_fetcher(
        &self,
        endpoint: &Endpoint,
        name: &str,
        ranges: Vec<Range>,
        encodings: &ReadEncodings,
    ) -> Result<Option<RemoteRead>> {
        // These reads wait for other daemons. Reads from holders must not wait for them: they have permits of their own.
        let permit = self.fetcher_permits.clone().acquire_owned().await;
        let _permit = permit.map_err(|error| Error::io(name, std::io::Error::other(error)))?;
        let (connections, blob) = (self.connections(endpoint), name.to_owned());
        let (encodings, accept) = (encodings.clone(), Encodings::default());
        let request = RangesRequest { ranges, verify: false, local_only: false, accept };
        let read = move || read_from(&connections, &blob, request, &encodings);
        let Some(read) = run_blocking(read).await? else { return Ok(None) };
        self.inner().traffic.fetcher_bytes += read.moved_bytes();
        Ok(Some(RemoteRead { sender: endpoint.to_string(), ..read }))
    }

    /// Counts a fetcher that failed, or sent damaged bytes.
    pub(crate) fn count_avoided_fetcher(&self) {
        self.inner().traffic.avoided_fetchers += 1;
    }

    /// Moves the first location of a blob to the end, if it is `location` and not the only one.
    fn demote(&self, name: &str, location: &ReplicaLocation) {
        let mut inner = self.inner();
        let Some(blob) = inner.blobs.get_mut(name) else { return };
        if blob.locations.len() > 1 && blob.locations.first() == Some(location) {
            blob.locations.rotate_left(1);
            inner.traffic.skipped += 1;
        }
    }

    /// Whether more than one daemon stores a blob.
    pub(crate) fn has_several_replicas(&self, name: &str) -> bool {
        self.inner().blobs.get(name).is_some_and(|blob| blob.locations.len() > 1)
    }

    /// Makes a daemon that answers the first location of a blob. Returns whether there is one.
    ///
    /// An answer to a probe that started at or after `since` counts.
    pub(crate) async fn prefer_reachable(&self, name: &str, since: Instant) -> bool {
        let locations = self.inner().blobs.get(name).map(|blob| blob.locations.clone());
        for location in locations.unwrap_or_default() {
            if self.is_reachable(&location.endpoint, since).await {
                return true;
            }
            self.demote(name, &location);
        }
        false
    }

    /// Whether a daemon answers. Probes it unless there is a recent result.
    ///
    /// A success counts if its probe started at or after `since`, a failure for [`FAILED_PROBE_TTL`].
    pub(crate) async fn is_reachable(&self, endpoint: &Endpoint, since: Instant) -> bool {
        let (connections, last_probe) = {
            let mut inner = self.inner();
            let peer = self.peer_in(&mut inner, endpoint);
            (peer.connections.clone(), peer.last_probe.clone())
        };
        let mut last_probe = last_probe.lock().await;
        // Another task may have probed the daemon meanwhile.
        match *last_probe {
            Some((started, true)) if started >= since => return true,
            Some((started, false)) if started.elapsed() < FAILED_PROBE_TTL => return false,
            _ => {}
        }
        let started = Instant::now();
        // An empty discard request is the probe.
        let answer =
            tokio::time::timeout(PROBE_TIMEOUT, run_blocking(move || connections.discard(&[])))
                .await;
        let has_answered = matches!(answer, Ok(Ok(())));
        *last_probe = Some((started, has_answered));
        has_answered
    }

    fn peer_in<'i>(&self, inner: &'i mut Inner, endpoint: &Endpoint) -> &'i Peer {
        inner.peers.entry(endpoint.clone()).or_insert_with(|| {
            let (endpoint, identity) = (endpoint.clone(), self.identity.clone());
            let connections = ConnectionPool::new(Arc::new(move || {
                endpoint.connect_blocking(&identity, CONNECT_TIMEOUT)
            }));
            Peer {
                connections: Arc::new(connections),
                read_permits: Arc::new(Semaphore::new(MAX_READS_PER_PEER)),
                discard_queue: Arc::default(),
                last_probe: Arc::default(),
            }
        })
    }

    /// Whether daemons talk to each other by TLS.
    pub(crate) fn is_tls(&self) -> bool {
        self.identity.is_tls()
    }
}

/// Reads ranges of a blob from one daemon, and checks the length and, for `verify`, the checksum.
///
/// Returns `None` if the daemon lacks the base, and `encodings` excludes such daemons.
fn read_from(
    connections: &ConnectionPool,
    blob: &str,
    request: RangesRequest,
    encodings: &ReadEncodings,
) -> Result<Option<RemoteRead>> {
    let (ranges, verify) = (&request.ranges, request.verify);
    let bytes =
        ranges.iter().try_fold(0_u64, |all, range| all.checked_add(range.total_bytes(u64::MAX)?));
    let base = encodings.base.as_ref().and_then(|base| Some((base, base.read(ranges)?)));
    let name = base.as_ref().map(|(base, _)| base.name().to_owned());
    let base_only = encodings.base_only && name.is_some();
    let accept = Encodings { base: name, planes: encodings.planes, base_only };
    let request = RangesRequest { accept: accept.clone(), ..request };
    let (received, reply) = connections.fetch_ranges(blob, request)?;
    if reply.lacks_base && base_only {
        return Ok(None);
    }
    let (data, encoded) = if reply.is_encoded {
        let mut data = vec![0; to_usize(bytes.unwrap_or_default())];
        let base = base.as_ref().map(|(_, base)| &base[..]);
        let forms = encoding::decode(&received, base, &mut data)?;
        (data.into(), Some((received, forms.narrow(&accept))))
    } else {
        (received, None)
    };
    let checksum = ReadChecksum { crc32: reply.crc32 };
    let is_whole = u64::try_from(data.len()).ok() == bytes;
    if is_whole && (!verify || checksum.crc32 == Some(tssd_format::checksum(&data))) {
        let (lacks_base, sender) = (reply.lacks_base, String::new());
        return Ok(Some(RemoteRead { data, checksum, encoded, lacks_base, sender }));
    }
    let text = format_args!("bytes of `{blob}` came damaged; get them again");
    Err(Error::new(ErrorKind::Corrupt, text))
}

/// Sends the queued discard requests to a daemon until the queue is empty.
fn send_discards(connections: &ConnectionPool, discard_queue: &Lock<Vec<String>>) {
    loop {
        let names = lock_names(discard_queue).clone();
        for part in names.chunks(NAMES_PER_REQUEST) {
            let is_sent = (0..DISCARD_TRIES).any(|_| connections.discard(part).is_ok());
            if !is_sent {
                tracing::warn!(count = names.len(), "a daemon could not be told what to discard");
                break;
            }
        }
        let mut queue = lock_names(discard_queue);
        queue.drain(..names.len());
        if queue.is_empty() {
            return;
        }
    }
}

fn lock_names(discard_queue: &Lock<Vec<String>>) -> MutexGuard<'_, Vec<String>> {
    discard_queue.lock()
}
