//! A controller in a daemon of this host, and what of its memory this process has mapped.

mod calls;
mod lines;
mod maps;
mod outgoing;
mod room;
mod start;

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
pub(crate) use self::calls::{Answer, Owed};
use self::lines::Dial;
pub(crate) use self::lines::Lines;
use self::maps::Maps;
use self::room::RemoteContribution;
pub(crate) use self::start::join;
use crate::blob::{Archived, Far};
use crate::control::{
    self, Catalog, Controller, Following, Got, InlinePut, Located, Proposal, VersionInfo,
};
use crate::error::{Error, ErrorKind, Result};
use crate::io::exec::run_blocking;
use crate::key::Key;
use crate::ledger::{Digest, Selection, Selector, VersionId};
use crate::net::link::{Receiver, Sender, split, split_net};
use crate::net::tls::{Duplex, Endpoint, Identity, SILENCE};
use crate::net::wire::{
    Archives, Begin, Begun, Hello, Keys, Limits, Location, Notice, Prefetched, Protocol, Reply,
    Request, Unread,
};
use crate::route::{Route, Transport};
use crate::status::DaemonStatus;

/// A call whose answer does not come within this time, beyond what it waits for, has failed.
const PATIENCE: Duration = Duration::from_mins(1);

/// A version may take so long to come from another host.
const FETCH: Duration = Duration::from_hours(1);

/// A controller in a daemon.
#[derive(Clone)]
pub(crate) struct RemoteController(Arc<Client>);

/// One connection. It ends with the last store and the last view.
struct Client {
    calls: Calls,
    maps: Arc<Maps>,
    /// For the bytes that are not in this host's memory.
    lines: Arc<Lines>,
    instance: u64,
    /// Whether it takes archives in the memory of GPUs.
    takes_devices: bool,
    /// Archives of at most so many bytes go in frames.
    inline: u64,
    /// How bytes travel to it.
    route: Route,
}

impl RemoteController {
    /// Connects to the daemon that listens at a socket.
    pub(crate) async fn connect(socket: &Path) -> Result<Self> {
        let connected = UnixStream::connect(socket).await;
        Self::greet(connected.map_err(|error| unreachable(socket, &error))?, socket).await
    }

    /// Connects to the daemon of another host.
    pub(crate) async fn reach(
        endpoint: &Endpoint,
        identity: &Identity,
        timeout: Duration,
    ) -> Result<Self> {
        let link = split_net(endpoint.connect(identity, timeout).await?, Limits::FAR_DAEMON);
        let dial = {
            let (endpoint, identity) = (endpoint.clone(), identity.clone());
            Arc::new(move || endpoint.dial(&identity, timeout))
        };
        let unreachable = |error: &dyn std::fmt::Display| endpoint.unreachable(error);
        let reached = Self::start(link, endpoint.route(), dial, &unreachable);
        let slow = |_| endpoint.unreachable(&format_args!("it has not answered for {timeout:?}"));
        tokio::time::timeout(timeout, reached).await.map_err(slow)?
    }

    async fn greet(stream: UnixStream, socket: &Path) -> Result<Self> {
        let dial = {
            let socket = socket.to_owned();
            Arc::new(move || dial(&socket))
        };
        let link = split(stream, Limits::DAEMON);
        let route = Route::new(Transport::Arena, "the daemon is of this host");
        Self::start(link, route, dial, &|error| unreachable(socket, error)).await
    }

    /// Says hello.
    async fn start(
        link: (Sender, Receiver),
        route: Route,
        dial: Dial,
        unreachable: &(dyn Fn(&dyn std::fmt::Display) -> Error + Sync),
    ) -> Result<Self> {
        let maps = Arc::new(Maps::default());
        let is_near = route.transport == Transport::Arena;
        let limits = if is_near { Limits::CLIENT } else { Limits::FAR_CLIENT };
        let calls = Calls::start(link, limits, maps.clone());
        let answer = calls.call(&Request::Hello(hello()), Bytes::new(), PATIENCE).await?;
        match answer.reply {
            Reply::Welcome(welcome) if welcome.protocol.major == Protocol::OWN.major => {
                let lines = Arc::new(Lines::new(dial).while_held(calls.openness()));
                let instance = welcome.instance;
                let takes_devices = is_near && welcome.devices;
                let inline = welcome.inline.min(limits.data.into());
                let client = Client { calls, maps, lines, instance, takes_devices, inline, route };
                Ok(Self(Arc::new(client)))
            }
            Reply::Welcome(welcome) => {
                let (theirs, own) = (welcome.protocol.major, Protocol::OWN.major);
                Err(unreachable(&format_args!("it speaks protocol {theirs}, not {own}")))
            }
            other => Err(unexpected(&other)),
        }
    }

    /// Asks, for a daemon that asks for others; a new answer within this time.
    pub(crate) async fn ask(&self, request: &Request, patience: Duration) -> Result<Answer> {
        self.0.calls.call(request, Bytes::new(), patience.saturating_add(PATIENCE)).await
    }

    /// Which start of the daemon it is.
    pub(crate) fn instance(&self) -> u64 {
        self.0.instance
    }

    /// Whether the connection is there still.
    pub(crate) fn is_open(&self) -> bool {
        self.0.calls.is_open()
    }

    /// Begins a contribution. An inline archive is sent as data of the request, with its digest.
    async fn propose(
        &self,
        key: &Key,
        proposal: &Proposal,
        inline: Option<(Bytes, Digest)>,
    ) -> Result<(Begun, RemoteContribution)> {
        let (data, digest) =
            inline.map_or_else(Default::default, |(data, digest)| (data, Some(digest)));
        let patience = proposal.timeout.saturating_add(PATIENCE);
        let begin =
            Begin { key: key.to_string(), proposal: proposal.clone(), keeper: None, digest };
        let request = Request::Begin(begin);
        let Answer { reply, owed } = self.0.calls.call(&request, data, patience).await?;
        let Reply::Begun(begun) = reply else { return Err(unexpected(&reply)) };
        if begun.progress.is_some() && digest.is_none() {
            return Err(broken("it has committed what was not written"));
        }
        let contribution = RemoteContribution::new(self.0.clone(), &begun, proposal, owed).await?;
        Ok((begun, contribution))
    }

    async fn call(&self, request: Request) -> Result<Reply> {
        Ok(self.0.calls.call(&request, Bytes::new(), PATIENCE).await?.reply)
    }
}

impl Client {
    fn open(&self, place: Location) -> Result<Archived> {
        Ok(match place {
            Location::Span(span) => Archived::Near(self.maps.archive(span)?),
            Location::Hollow(hollow) => Archived::Near(self.maps.hollow(hollow)?),
            Location::Blob { blob, len, .. } => Archived::Far(Far {
                holder: self.lines.clone(),
                blob: blob.into(),
                len,
                tail: None,
            }),
        })
    }

    /// Whether nothing has to be mapped or asked for to open it.
    fn has_mapped(&self, place: &Location) -> bool {
        matches!(place, Location::Span(span) if self.maps.has(span.segment))
    }

    /// How the bytes of these archives come.
    fn route_of(&self, archives: &Archives) -> Route {
        let hollow = archives.values().filter(|place| matches!(place, Location::Hollow(_))).count();
        if hollow > 0 {
            let all = archives.len();
            let why = format!("{hollow} of {all} archives are in the memory of GPUs");
            return Route::new(Transport::CudaIpc, why);
        }
        let far = archives.values().filter_map(|place| match place {
            Location::Span(_) | Location::Hollow(_) => None,
            Location::Blob { at, .. } => at.as_deref(),
        });
        let far: Vec<&str> = far.collect();
        let Some(endpoint) = far.first().and_then(|at| at.parse::<Endpoint>().ok()) else {
            return self.route.clone();
        };
        if self.route.transport != Transport::Arena {
            return self.route.clone();
        }
        let (count, all) = (far.len(), archives.len());
        let why = format!("{count} of {all} archives are at other daemons, such as {endpoint}");
        Route { why, ..endpoint.route() }
    }

    /// A manifest is read at once, whole.
    fn manifest(&self, place: Location) -> Result<Arc<dyn Blob>> {
        let opened = self.open(place)?;
        let Some(far) = opened.far() else { return Ok(opened.to_blob()) };
        Ok(Arc::new(Bytes::from(self.lines.manifest(&far.blob, far.len)?)))
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.maps.clear();
        // Views that are left keep their maps: then the daemon waits for the end of the process.
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
            other => Err(unexpected(&other)),
        }
    }

    async fn newer(
        &self,
        key: &Key,
        seen: Option<VersionId>,
        patience: Duration,
    ) -> Result<Option<VersionInfo>> {
        let request = Request::Newer { key: key.to_string(), seen, patience };
        let all = patience.saturating_add(PATIENCE);
        match self.0.calls.call(&request, Bytes::new(), all).await?.reply {
            Reply::Newer(version) => Ok(version),
            other => Err(unexpected(&other)),
        }
    }

    async fn keys(&self, prefix: &str) -> Result<Vec<Key>> {
        let (mut all, mut after) = (Vec::new(), None);
        loop {
            match self.call(Request::Keys { prefix: prefix.to_owned(), after }).await? {
                Reply::Keys(Keys { keys, more }) => {
                    // The last one again would be no end.
                    after = keys.last().filter(|_| more).cloned();
                    all.extend(keys.into_iter().map(Key::new).collect::<Result<Vec<_>>>()?);
                }
                other => return Err(unexpected(&other)),
            }
            if after.is_none() {
                return Ok(all);
            }
        }
    }

    async fn delete(&self, key: &Key, selection: Selection) -> Result<u64> {
        match self.call(Request::Delete { key: key.to_string(), selection }).await? {
            Reply::Deleted(count) => Ok(count),
            other => Err(unexpected(&other)),
        }
    }

    async fn retain(&self, key: &Key, keep: NonZeroU32, ttl: Option<Duration>) -> Result<()> {
        done(self.call(Request::Retain { key: key.to_string(), keep, ttl }).await?)
    }

    async fn pin(&self, key: &Key, selector: Selector, label: &str) -> Result<u64> {
        let (key, label) = (key.to_string(), label.to_owned());
        match self.call(Request::Pin { key, selector, label }).await? {
            Reply::Pinned(number) => Ok(number),
            other => Err(unexpected(&other)),
        }
    }

    async fn unpin(&self, key: &Key, label: &str) -> Result<()> {
        let (key, label) = (key.to_string(), label.to_owned());
        done(self.call(Request::Unpin { key, label }).await?)
    }

    async fn pins(&self, key: &Key) -> Result<BTreeMap<String, u64>> {
        match self.call(Request::Pins { key: key.to_string() }).await? {
            Reply::Pins(pins) => Ok(pins),
            other => Err(unexpected(&other)),
        }
    }
}

#[async_trait]
impl Controller for RemoteController {
    async fn begin(&self, key: &Key, proposal: Proposal) -> Result<control::Begun> {
        let (begun, contribution) = self.propose(key, &proposal, None).await?;
        Ok(contribution.begun(&begun))
    }

    fn inline_put(&self) -> Option<&dyn InlinePut> {
        Some(self)
    }

    async fn locate(&self, key: &Key, selector: Selector) -> Result<Located> {
        let devices = self.0.route.transport == Transport::Arena;
        let request = Request::Locate { key: key.to_string(), selector, devices };
        let answer = self.0.calls.call(&request, Bytes::new(), PATIENCE).await?;
        located(&self.0, answer).await
    }

    async fn follow(&self, key: &Key) -> Result<Box<dyn Following>> {
        match self.call(Request::Follow { key: key.to_string() }).await? {
            Reply::Following(follower) => {
                Ok(Box::new(RemoteFollowing { client: self.0.clone(), follower }))
            }
            other => Err(unexpected(&other)),
        }
    }

    async fn unread(&self, key: &Key, at_most: u64, patience: Duration) -> Result<(u64, u64)> {
        let request = Request::Unread { key: key.to_string(), at_most, patience };
        match self.ask(&request, patience).await?.reply {
            Reply::Unread(Unread { followers, versions }) => Ok((followers, versions)),
            other => Err(unexpected(&other)),
        }
    }

    async fn prefetch(
        &self,
        key: &Key,
        selector: Selector,
        archives: Option<Vec<String>>,
    ) -> Result<(u64, VersionId, u64)> {
        if self.0.route.transport != Transport::Arena {
            let text = "versions are fetched into the daemon of this host: serve one with \
                        --controller, and connect to that";
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        let request = Request::Prefetch { key: key.to_string(), selector, archives };
        match self.ask(&request, FETCH).await?.reply {
            Reply::Prefetched(Prefetched { number, id, bytes }) => Ok((number, id, bytes)),
            other => Err(unexpected(&other)),
        }
    }

    fn route(&self) -> Route {
        self.0.route.clone()
    }

    fn takes_devices(&self) -> bool {
        self.0.takes_devices
    }

    fn got(&self, got: Got) {
        self.0.calls.notify(&Notice::Got(got));
    }

    fn is_open(&self) -> bool {
        Self::is_open(self)
    }

    async fn status(&self) -> Result<DaemonStatus> {
        match self.call(Request::Status).await? {
            Reply::Status(status) => Ok(status),
            other => Err(unexpected(&other)),
        }
    }
}

#[async_trait]
impl InlinePut for RemoteController {
    fn max_bytes(&self) -> u64 {
        self.0.inline
    }

    async fn put_inline(
        &self,
        key: &Key,
        proposal: Proposal,
        archive: Bytes,
        digest: Digest,
    ) -> Result<control::Begun> {
        let inline = Some((archive.clone(), digest));
        let (begun, mut contribution) = self.propose(key, &proposal, inline).await?;
        contribution.write(&archive)?;
        Ok(contribution.begun(&begun))
    }
}

/// A version that was leased, with its memory mapped.
async fn located(client: &Arc<Client>, Answer { reply, owed }: Answer) -> Result<Located> {
    let Reply::Leased(leased) = reply else { return Err(unexpected(&reply)) };
    let (client, route) = (client.clone(), client.route_of(&leased.archives));
    let is_mapped = {
        let mut places = leased.archives.values().chain([&leased.manifest]);
        places.all(|place| client.has_mapped(place))
    };
    let open = move || {
        let named = leased.archives.into_iter();
        let named = named.map(|(name, place)| Ok((name, client.open(place)?)));
        let archives = named.collect::<Result<BTreeMap<_, _>>>()?;
        Ok((client.manifest(leased.manifest)?, archives))
    };
    // What has come for the first time is mapped with all its pages: that takes long.
    let (manifest, archives) = if is_mapped { open()? } else { run_blocking(open).await? };
    Ok(Located { id: leased.id, route, manifest, archives, lease: Arc::new(owed) })
}

/// What a daemon holds for this process of a key.
struct RemoteFollowing {
    client: Arc<Client>,
    follower: u64,
}

#[async_trait]
impl Following for RemoteFollowing {
    async fn next(&mut self, patience: Duration) -> Result<Option<Located>> {
        let devices = self.client.route.transport == Transport::Arena;
        let request = Request::Next { follower: self.follower, devices, patience };
        let all = patience.saturating_add(PATIENCE);
        let answer = self.client.calls.call(&request, Bytes::new(), all).await?;
        match answer.reply {
            Reply::Done => Ok(None),
            _ => located(&self.client, answer).await.map(Some),
        }
    }
}

impl Drop for RemoteFollowing {
    fn drop(&mut self) {
        self.client.calls.notify(&Notice::Unfollow { follower: self.follower });
    }
}

fn done(reply: Reply) -> Result<()> {
    match reply {
        Reply::Done => Ok(()),
        other => Err(unexpected(&other)),
    }
}

fn unreachable(socket: &Path, error: &dyn std::fmt::Display) -> Error {
    let socket = socket.display();
    Error::new(ErrorKind::Unreachable, format_args!("no daemon at `{socket}`: {error}"))
}

fn dial(socket: &Path) -> Result<Box<dyn Duplex>> {
    let failed = |error| unreachable(socket, &error);
    let stream = BlockingStream::connect(socket).map_err(failed)?;
    stream.set_read_timeout(Some(SILENCE)).map_err(failed)?;
    stream.set_write_timeout(Some(SILENCE)).map_err(failed)?;
    Ok(Box::new(stream))
}

/// What is said first.
fn hello() -> Hello {
    let client = concat!("tssd-store ", env!("CARGO_PKG_VERSION")).to_owned();
    Hello { protocol: Protocol::OWN, client }
}

/// A daemon that breaks the protocol.
fn broken(text: &str) -> Error {
    Error::new(ErrorKind::Unreachable, format_args!("the daemon breaks the protocol: {text}"))
}

/// A reply to another question.
pub(crate) fn unexpected(reply: &Reply) -> Error {
    let mut text = format!("{reply:?}");
    text.truncate(text.floor_char_boundary(100));
    Error::new(ErrorKind::Unreachable, format_args!("the daemon answers something else: {text}"))
}
