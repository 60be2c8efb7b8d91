//! Client of a daemon: a controller, and the maps of the daemon's memory in this process.

mod calls;
mod connection_pool;
mod contribution;
mod launcher;
mod maps;
mod send_queue;

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::os::unix::net::UnixStream as BlockingStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use tokio::net::UnixStream;
use tssd_format::Blob;

use self::calls::Calls;
pub(crate) use self::calls::{ReleaseOnDrop, Response};
use self::maps::SegmentMaps;
use crate::blob::{OpenArchive, RemoteArchive};
use crate::control::{
    self, Catalog, Controller, InlinePut, KnownVersion, LocatedVersion, PrefetchedVersion,
    Proposal, ReadStats, VersionFollower, VersionInfo,
};
use crate::error::{Error, ErrorKind, Result};
use crate::io::exec::run_blocking;
use crate::key::Key;
use crate::ledger::{ArchiveDigest, Label, RunId, RunStatus, Selection, Selector, VersionPosition};
use crate::net::client::connection_pool::Connector;
pub(crate) use crate::net::client::connection_pool::{Announcement, ConnectionPool, RangesRequest};
use crate::net::client::contribution::RemoteContribution;
pub(crate) use crate::net::client::launcher::connect_or_start;
use crate::net::link::{FrameReceiver, FrameSender, split_tcp, split_unix};
use crate::net::tls::{Duplex, Endpoint, IO_TIMEOUT, Identity};
use crate::net::wire::{
    Archives, Begin, BeginReply, Hello, KeyPage, Limits, Location, Notice, PrefetchReply,
    ProtocolVersion, Reply, Request, UnreadCounts,
};
use crate::route::{Route, Transport};
use crate::status::DaemonStatus;

/// Timeout of a response, in addition to the time that the request itself waits.
const RESPONSE_TIMEOUT: Duration = Duration::from_mins(1);

/// Time that a prefetch from another host may take.
const PREFETCH_TIMEOUT: Duration = Duration::from_hours(1);

/// A controller in a daemon.
#[derive(Clone)]
pub(crate) struct RemoteController(Arc<Client>);

/// One connection to a daemon. It stays open as long as a store or a view uses it.
struct Client {
    calls: Calls,
    maps: Arc<SegmentMaps>,
    /// Connections for bytes that are not in this host's memory.
    pool: Arc<ConnectionPool>,
    instance: u64,
    /// Whether the daemon accepts archives in GPU memory.
    supports_devices: bool,
    /// Maximum length in bytes of an archive that is sent as data of a frame.
    inline_max_bytes: u64,
    /// How bytes travel to the daemon.
    route: Route,
}

impl RemoteController {
    /// Connects to the daemon that listens at a socket.
    pub(crate) async fn connect(socket: &Path) -> Result<Self> {
        let connected = UnixStream::connect(socket).await;
        Self::from_stream(connected.map_err(|error| connect_error(socket, error))?, socket).await
    }

    /// Connects to the daemon of another host.
    pub(crate) async fn connect_remote(
        endpoint: &Endpoint,
        identity: &Identity,
        timeout: Duration,
    ) -> Result<Self> {
        let (sender, receiver) =
            split_tcp(endpoint.connect(identity, timeout).await?, Limits::REMOTE_DAEMON);
        let connector = {
            let (endpoint, identity) = (endpoint.clone(), identity.clone());
            Arc::new(move || endpoint.connect_blocking(&identity, timeout))
        };
        let connecting = Self::handshake(sender, receiver, endpoint.route(), connector);
        let timed_out =
            |_| endpoint.unreachable(&format_args!("it has not answered for {timeout:?}"));
        tokio::time::timeout(timeout, connecting).await.map_err(timed_out)?
    }

    async fn from_stream(stream: UnixStream, socket: &Path) -> Result<Self> {
        let connector = {
            let socket = socket.to_owned();
            Arc::new(move || connect_blocking(&socket))
        };
        let (sender, receiver) = split_unix(stream, Limits::DAEMON);
        let route = Route::new(Transport::SharedMemory, "the daemon is of this host");
        Self::handshake(sender, receiver, route, connector).await
    }

    /// Exchanges hello and welcome, and checks the protocol version.
    async fn handshake(
        sender: FrameSender,
        receiver: FrameReceiver,
        route: Route,
        connector: Connector,
    ) -> Result<Self> {
        let maps = Arc::new(SegmentMaps::default());
        let is_near = route.transport == Transport::SharedMemory;
        let limits = if is_near { Limits::CLIENT } else { Limits::REMOTE_CLIENT };
        let calls = Calls::start(sender, receiver, limits, maps.clone());
        let response = calls.call(&Request::Hello(hello()), Bytes::new(), RESPONSE_TIMEOUT).await?;
        match response.reply {
            Reply::Welcome(welcome) if welcome.protocol.major == ProtocolVersion::CURRENT.major => {
                let pool = ConnectionPool::new(connector).valid_while(calls.open_check());
                let pool = Arc::new(if is_near { pool.with_prefetch() } else { pool });
                let instance = welcome.instance;
                let supports_devices = is_near && welcome.supports_devices;
                let inline_max_bytes = welcome.inline_max_bytes.min(limits.data.into());
                let client = Client {
                    calls,
                    maps,
                    pool,
                    instance,
                    supports_devices,
                    inline_max_bytes,
                    route,
                };
                Ok(Self(Arc::new(client)))
            }
            Reply::Welcome(welcome) => {
                let (theirs, own) = (welcome.protocol.major, ProtocolVersion::CURRENT.major);
                let text = format_args!(
                    "daemon {} (process {}) supports protocol version {theirs}, this program \
                     supports version {own}; use the same tssd release for both",
                    welcome.daemon, welcome.pid
                );
                Err(Error::new(ErrorKind::Refused, text))
            }
            other => Err(unexpected_reply(&other)),
        }
    }

    /// Sends a request. `timeout` is the time that the request itself may wait.
    pub(crate) async fn send_request(
        &self,
        request: &Request,
        timeout: Duration,
    ) -> Result<Response> {
        self.0.calls.call(request, Bytes::new(), timeout.saturating_add(RESPONSE_TIMEOUT)).await
    }

    /// Sends a notice, which has no reply.
    pub(crate) fn notify(&self, notice: &Notice) {
        self.0.calls.notify(notice);
    }

    /// Returns the number that identifies this start of the daemon.
    pub(crate) fn instance(&self) -> u64 {
        self.0.instance
    }

    /// Returns whether the connection is open.
    pub(crate) fn is_open(&self) -> bool {
        self.0.calls.is_open()
    }

    /// Begins a contribution. An inline archive is sent as data of the request, with its digest.
    async fn begin_contribution(
        &self,
        key: &Key,
        proposal: &Proposal,
        inline: Option<(Bytes, ArchiveDigest)>,
    ) -> Result<(BeginReply, RemoteContribution)> {
        let (data, digest) =
            inline.map_or_else(Default::default, |(data, digest)| (data, Some(digest)));
        let response_timeout = proposal.timeout.saturating_add(RESPONSE_TIMEOUT);
        let begin = Begin {
            key: key.to_string(),
            proposal: proposal.clone(),
            replica_address: None,
            digest,
        };
        let request = Request::Begin(begin);
        let Response { reply, release } =
            self.0.calls.call(&request, data, response_timeout).await?;
        let Reply::Begun(begun) = reply else { return Err(unexpected_reply(&reply)) };
        if begun.progress.is_some() && digest.is_none() {
            return Err(protocol_violation("it has committed what was not written"));
        }
        let contribution =
            RemoteContribution::new(self.0.clone(), &begun, proposal, release).await?;
        Ok((begun, contribution))
    }

    async fn call(&self, request: Request) -> Result<Reply> {
        Ok(self.0.calls.call(&request, Bytes::new(), RESPONSE_TIMEOUT).await?.reply)
    }
}

impl Client {
    fn open_archive(&self, location: Location) -> Result<OpenArchive> {
        Ok(match location {
            Location::Span(span) => OpenArchive::Local(self.maps.open_archive(span)?),
            Location::Device(span) => OpenArchive::Local(self.maps.open_device_archive(span)?),
            Location::Blob { blob, len, .. } => OpenArchive::Remote(RemoteArchive {
                reader: self.pool.clone(),
                blob: blob.into(),
                len,
                tail: None,
            }),
        })
    }

    /// Returns whether an archive can be opened without mapping memory or sending a request.
    fn is_mapped(&self, location: &Location) -> bool {
        matches!(location, Location::Span(span) if self.maps.is_mapped(span.segment))
    }

    /// Returns how the bytes of these archives travel.
    fn route_for(&self, archives: &Archives) -> Route {
        let on_devices =
            archives.values().filter(|location| matches!(location, Location::Device(_))).count();
        if on_devices > 0 {
            let all = archives.len();
            let why = format!("{on_devices} of {all} archives are in the memory of GPUs");
            return Route::new(Transport::CudaIpc, why);
        }
        let addresses = archives.values().filter_map(|location| match location {
            Location::Span(_) | Location::Device(_) => None,
            Location::Blob { address, .. } => address.as_deref(),
        });
        let addresses: Vec<&str> = addresses.collect();
        let Some(endpoint) = addresses.first().and_then(|at| at.parse::<Endpoint>().ok()) else {
            return self.route.clone();
        };
        if self.route.transport != Transport::SharedMemory {
            return self.route.clone();
        }
        let (count, all) = (addresses.len(), archives.len());
        let why = format!("{count} of {all} archives are at other daemons, such as {endpoint}");
        Route { reason: why, ..endpoint.route() }
    }

    /// Opens a manifest. If it is not in this host's memory, reads all of it now.
    fn open_manifest(&self, location: Location) -> Result<Arc<dyn Blob>> {
        let opened = self.open_archive(location)?;
        let Some(remote) = opened.remote() else { return Ok(opened.to_blob()) };
        Ok(Arc::new(Bytes::from(self.pool.read_manifest(&remote.blob, remote.len)?)))
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.maps.clear();
        // If views still use a map, no goodbye is sent: the daemon waits for the end of this
        // process.
        if self.maps.is_all_unmapped() {
            self.calls.notify(&Notice::Goodbye);
        }
    }
}

#[async_trait]
impl Catalog for RemoteController {
    async fn versions(&self, key: &Key) -> Result<Vec<VersionInfo>> {
        match self.call(Request::Versions { key: key.to_string() }).await? {
            Reply::Versions(versions) => Ok(versions),
            other => Err(unexpected_reply(&other)),
        }
    }

    async fn wait_for_newer(
        &self,
        key: &Key,
        seen: Option<KnownVersion>,
        timeout: Duration,
    ) -> Result<Option<VersionInfo>> {
        let (key, seen_position) = (key.to_string(), seen.and_then(|seen| seen.position));
        let seen = seen.map(|seen| seen.id);
        let request = Request::AwaitNewer { key, seen, seen_position, timeout };
        let response_timeout = timeout.saturating_add(RESPONSE_TIMEOUT);
        match self.0.calls.call(&request, Bytes::new(), response_timeout).await?.reply {
            Reply::Newest(version) => Ok(version),
            other => Err(unexpected_reply(&other)),
        }
    }

    async fn keys(&self, prefix: &str) -> Result<Vec<Key>> {
        let (mut all, mut after) = (Vec::new(), None);
        loop {
            match self.call(Request::Keys { prefix: prefix.to_owned(), after }).await? {
                Reply::Keys(KeyPage { keys, more }) => {
                    // An empty page ends the loop: to ask again with the same key would never end.
                    after = keys.last().filter(|_| more).cloned();
                    all.extend(keys.into_iter().map(Key::new).collect::<Result<Vec<_>>>()?);
                }
                other => return Err(unexpected_reply(&other)),
            }
            if after.is_none() {
                return Ok(all);
            }
        }
    }

    async fn delete(&self, key: &Key, selection: Selection) -> Result<u64> {
        match self.call(Request::Delete { key: key.to_string(), selection }).await? {
            Reply::Deleted(count) => Ok(count),
            other => Err(unexpected_reply(&other)),
        }
    }

    async fn retain(&self, key: &Key, keep: NonZeroU32, ttl: Option<Duration>) -> Result<()> {
        expect_done(self.call(Request::Retain { key: key.to_string(), keep, ttl }).await?)
    }

    async fn pin(&self, key: &Key, selector: Selector, label: &Label) -> Result<u64> {
        let (key, label) = (key.to_string(), label.clone());
        match self.call(Request::Pin { key, selector, label }).await? {
            Reply::Pinned(number) => Ok(number),
            other => Err(unexpected_reply(&other)),
        }
    }

    async fn rollback(&self, key: &Key, selector: Selector) -> Result<VersionInfo> {
        match self.call(Request::Rollback { key: key.to_string(), selector }).await? {
            Reply::RolledBack(info) => Ok(info),
            other => Err(unexpected_reply(&other)),
        }
    }

    async fn unpin(&self, key: &Key, label: &str) -> Result<()> {
        let (key, label) = (key.to_string(), label.to_owned());
        expect_done(self.call(Request::Unpin { key, label }).await?)
    }

    async fn pins(&self, key: &Key) -> Result<BTreeMap<String, u64>> {
        match self.call(Request::Pins { key: key.to_string() }).await? {
            Reply::Pins(pins) => Ok(pins),
            other => Err(unexpected_reply(&other)),
        }
    }
}

#[async_trait]
impl Controller for RemoteController {
    async fn begin(&self, key: &Key, proposal: Proposal) -> Result<control::BeginResult> {
        let (begun, contribution) = self.begin_contribution(key, &proposal, None).await?;
        Ok(contribution.into_begin_response(&begun))
    }

    fn inline_put(&self) -> Option<&dyn InlinePut> {
        Some(self)
    }

    async fn locate(&self, key: &Key, selector: Selector) -> Result<LocatedVersion> {
        let devices = self.0.route.transport == Transport::SharedMemory;
        let request = Request::Locate { key: key.to_string(), selector, supports_devices: devices };
        let response = self.0.calls.call(&request, Bytes::new(), RESPONSE_TIMEOUT).await?;
        open_leased(&self.0, response).await
    }

    async fn follow(&self, key: &Key) -> Result<Box<dyn VersionFollower>> {
        match self.call(Request::Follow { key: key.to_string() }).await? {
            Reply::Follower(follower) => {
                Ok(Box::new(RemoteFollower { client: self.0.clone(), follower }))
            }
            other => Err(unexpected_reply(&other)),
        }
    }

    async fn wait_until_read(
        &self,
        key: &Key,
        max_unread: u64,
        timeout: Duration,
    ) -> Result<(u64, u64)> {
        let request = Request::AwaitUnread { key: key.to_string(), max_unread, timeout };
        match self.send_request(&request, timeout).await?.reply {
            Reply::UnreadCounts(UnreadCounts { followers, versions }) => Ok((followers, versions)),
            other => Err(unexpected_reply(&other)),
        }
    }

    async fn prefetch(
        &self,
        key: &Key,
        selector: Selector,
        archives: Option<Vec<String>>,
    ) -> Result<PrefetchedVersion> {
        if self.0.route.transport != Transport::SharedMemory {
            let text = "versions are fetched into the daemon of this host: serve one with \
                        --controller, and connect to that";
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        let request = Request::Prefetch { key: key.to_string(), selector, archives };
        match self.send_request(&request, PREFETCH_TIMEOUT).await?.reply {
            Reply::Prefetched(PrefetchReply { number, id, bytes, size, base }) => {
                Ok(PrefetchedVersion { number, id, size, bytes, base })
            }
            other => Err(unexpected_reply(&other)),
        }
    }

    fn route(&self) -> Route {
        self.0.route.clone()
    }

    fn supports_device_memory(&self) -> bool {
        self.0.supports_devices
    }

    async fn run_status(&self, run: &RunId) -> Result<RunStatus> {
        match self.call(Request::RunStatus { run: run.clone() }).await? {
            Reply::RunStatus(status) => Ok(status),
            other => Err(unexpected_reply(&other)),
        }
    }

    fn record_read(&self, got: ReadStats) {
        self.0.calls.notify(&Notice::ReadStats(got));
    }

    fn is_open(&self) -> bool {
        Self::is_open(self)
    }

    async fn status(&self) -> Result<DaemonStatus> {
        match self.call(Request::Status).await? {
            Reply::Status(status) => Ok(status),
            other => Err(unexpected_reply(&other)),
        }
    }
}

#[async_trait]
impl InlinePut for RemoteController {
    fn max_bytes(&self) -> u64 {
        self.0.inline_max_bytes
    }

    async fn put_inline(
        &self,
        key: &Key,
        proposal: Proposal,
        archive: Bytes,
        digest: ArchiveDigest,
    ) -> Result<control::BeginResult> {
        let inline = Some((archive.clone(), digest));
        let (begun, mut contribution) = self.begin_contribution(key, &proposal, inline).await?;
        contribution.write(&archive)?;
        Ok(contribution.into_begin_response(&begun))
    }
}

/// Opens a leased version, and maps its memory.
async fn open_leased(
    client: &Arc<Client>,
    Response { reply, release }: Response,
) -> Result<LocatedVersion> {
    let Reply::Leased(leased) = reply else { return Err(unexpected_reply(&reply)) };
    let (client, route) = (client.clone(), client.route_for(&leased.archives));
    let is_mapped = {
        let mut locations = leased.archives.values().chain([&leased.manifest]);
        locations.all(|location| client.is_mapped(location))
    };
    let open = move || {
        let named = leased.archives.into_iter();
        let named = named.map(|(name, location)| Ok((name, client.open_archive(location)?)));
        let archives = named.collect::<Result<BTreeMap<_, _>>>()?;
        Ok((client.open_manifest(leased.manifest)?, archives))
    };
    // A segment is mapped with all its pages, which takes long.
    let (manifest, archives) = if is_mapped { open()? } else { run_blocking(open).await? };
    let position = VersionPosition { epoch: leased.epoch, number: leased.number };
    Ok(LocatedVersion {
        id: leased.id,
        position,
        route,
        manifest,
        archives,
        lease: Arc::new(release),
    })
}

/// A follower of a key in a daemon.
struct RemoteFollower {
    client: Arc<Client>,
    follower: u64,
}

#[async_trait]
impl VersionFollower for RemoteFollower {
    async fn next(&mut self, timeout: Duration) -> Result<Option<LocatedVersion>> {
        let devices = self.client.route.transport == Transport::SharedMemory;
        let request = Request::Next { follower: self.follower, supports_devices: devices, timeout };
        let response_timeout = timeout.saturating_add(RESPONSE_TIMEOUT);
        let response = self.client.calls.call(&request, Bytes::new(), response_timeout).await?;
        match response.reply {
            Reply::Done => Ok(None),
            _ => open_leased(&self.client, response).await.map(Some),
        }
    }
}

impl Drop for RemoteFollower {
    fn drop(&mut self) {
        self.client.calls.notify(&Notice::Unfollow { follower: self.follower });
    }
}

fn expect_done(reply: Reply) -> Result<()> {
    match reply {
        Reply::Done => Ok(()),
        other => Err(unexpected_reply(&other)),
    }
}

fn unreachable(socket: &Path, error: &dyn std::fmt::Display) -> Error {
    let socket = socket.display();
    Error::new(ErrorKind::Unreachable, format_args!("no daemon at `{socket}`: {error}"))
}

/// Returns the error for a socket that the system cannot connect.
fn connect_error(socket: &Path, error: std::io::Error) -> Error {
    let text = format_args!("no daemon at `{}`", socket.display());
    Error::new(ErrorKind::Unreachable, text).with_source(error).with_file(socket)
}

fn connect_blocking(socket: &Path) -> Result<Box<dyn Duplex>> {
    let io_error = |error| connect_error(socket, error);
    let stream = BlockingStream::connect(socket).map_err(io_error)?;
    stream.set_read_timeout(Some(IO_TIMEOUT)).map_err(io_error)?;
    stream.set_write_timeout(Some(IO_TIMEOUT)).map_err(io_error)?;
    Ok(Box::new(stream))
}

/// Returns the first message of a connection.
fn hello() -> Hello {
    let client = concat!("tssd-store ", env!("CARGO_PKG_VERSION")).to_owned();
    Hello { protocol: ProtocolVersion::CURRENT, client }
}

/// Returns the error for a violation of the protocol by the daemon.
fn protocol_violation(text: &str) -> Error {
    Error::new(ErrorKind::Unreachable, format_args!("the daemon breaks the protocol: {text}"))
}

/// Returns the error for a reply of another kind than the request expects.
pub(crate) fn unexpected_reply(reply: &Reply) -> Error {
    let mut text = format!("{reply:?}");
    text.truncate(text.floor_char_boundary(100));
    Error::new(ErrorKind::Unreachable, format_args!("the daemon answers something else: {text}"))
}
