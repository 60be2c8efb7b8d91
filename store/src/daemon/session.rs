//! The session of one connection: receives requests, runs them and sends the replies.

mod blobs;
mod connection;
mod contributions;
mod in_flight;
mod prefetch;

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::task::JoinSet;

use super::DaemonOptions;
use crate::control::KnownVersion;
use crate::daemon::bucket_sync::UploadReceiver;
pub(crate) use crate::daemon::session::connection::IncomingConnection;
use crate::daemon::session::connection::Origin;
use crate::daemon::session::contributions::Contributions;
use crate::daemon::session::in_flight::{InFlightRequest, InFlightRequests, MAX_ACTIVE_REQUESTS};
use crate::daemon::state::{DAEMON_NAME, DaemonState, LocatedVersion};
use crate::daemon::tiered::BlobLocation;
use crate::daemon::uplink::UplinkPermit;
use crate::error::{Error, ErrorKind, Result};
use crate::io::sync::{Lock, MutexGuard, boxed};
use crate::key::Key;
use crate::ledger::Selector;
use crate::net::link::FrameReceiver;
use crate::net::wire::{
    self, Archives, Data, Failure, Frame, FrameKind, Hello, KeyPage, Limits, Location, MAX_FDS,
    MAX_INLINE_BYTES, Notice, ProtocolVersion, Reply, Request, SharedSegment, Welcome,
};
use crate::shm::{PeerId, SegmentId, SegmentMemory};
use crate::status::DaemonStatus;

/// Time within which a client must send its hello.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);

/// Maximum size in KiB of requested data that is not yet sent to a client.
const MAX_UNSENT_KIB: usize = 16 << 10;

/// Maximum number of archives in a head.
///
/// The names of an archive have at most 4 KiB for any key, so the head is within its limit.
const MAX_ARCHIVES_PER_HEAD: usize = 200;

/// Maximum total length in bytes of the keys in a reply. In JSON it is a few times longer at most.
const MAX_KEY_BYTES: usize = 128 << 10;

/// Interval of keepalive parts, which a client receives while its version is restored from the bucket.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);

/// Maximum time that a request waits. It limits the timeout that the request has.
const MAX_WAIT: Duration = Duration::from_hours(1);

/// A connection after the handshake.
struct Session {
    state: Arc<DaemonState>,
    peer: PeerId,
    origin: Origin,
    /// Contributions that are neither committed nor withdrawn.
    contributions: Lock<Contributions>,
    /// Uploads of contributions that were committed on this connection, by contribution number.
    uploads: Lock<BTreeMap<u64, UploadReceiver>>,
    outgoing: mpsc::Sender<OutgoingFrame>,
    requests: Arc<InFlightRequests>,
    /// Credit for data that is not yet sent to the client, in KiB. See [`MAX_UNSENT_KIB`].
    read_credit: Arc<Semaphore>,
    /// Orders replies that send descriptors of segments.
    ///
    /// A descriptor is sent once per connection, so replies that name its segment must follow the one that sends it.
    share_lock: tokio::sync::Mutex<()>,
}

/// The response to a request.
struct Response<'a> {
    reply: Reply,
    data: Data,
    fds: Vec<OwnedFd>,
    /// The guard of [`Session::share_lock`], held until the reply is queued.
    share_guard: Option<tokio::sync::MutexGuard<'a, ()>>,
    credits: Credits,
}

/// Permits that are returned once a response is sent.
#[derive(Default)]
struct Credits {
    _bytes: Vec<OwnedSemaphorePermit>,
    uplink: Option<UplinkPermit>,
}

impl From<Reply> for Response<'_> {
    fn from(reply: Reply) -> Self {
        let (fds, credits) = (Vec::new(), Credits::default());
        Self { reply, data: Data::default(), fds, share_guard: None, credits }
    }
}

/// A frame, and the permits that are returned once it is sent.
struct OutgoingFrame {
    frame: Frame,
    _credits: Credits,
}

/// Performs the handshake and serves a connection until it ends.
pub(crate) async fn run(
    state: Arc<DaemonState>,
    connection: IncomingConnection,
    options: Arc<DaemonOptions>,
) {
    let IncomingConnection { mut sender, mut receiver, origin } = connection;
    let Ok(Some((number, hello))) =
        tokio::time::timeout(HANDSHAKE_TIMEOUT, receive_hello(&mut receiver)).await
    else {
        return;
    };
    let client = match hello.and_then(|client| origin.check_access(&options).map(|()| client)) {
        Ok(client) => client,
        Err(error) => {
            tracing::warn!(?origin, %error, "turned away");
            state.counters.lock().rejected_connections += 1;
            // The connection ends whether or not this reply can be sent.
            let _ =
                sender.send(&reply_frame(number, Reply::Failed(error.into()).into()).frame).await;
            return;
        }
    };
    receiver.set_limits(origin.limits());
    // `None` if the process has exited since its hello, or if its exit cannot be observed. Then its mappings count
    // as released at the end of the connection. Even so, segments that it leased are not recycled. The pidfd is
    // opened after the hello, so that a connection without a hello takes one descriptor and not two.
    let process = origin.open_pidfd();
    let peer = state.next_number();
    tracing::info!(peer, ?origin, client, "connected");
    state.add_peer(peer, origin.pid(), origin.address(), client);
    let mut unmapped = state.pool.add_peer(peer);
    let (outgoing, mut frames) = mpsc::channel::<OutgoingFrame>(MAX_ACTIVE_REQUESTS);
    let session = Arc::new(Session {
        state,
        peer,
        origin,
        contributions: Lock::default(),
        uploads: Lock::default(),
        outgoing,
        requests: InFlightRequests::new(),
        read_credit: Arc::new(Semaphore::new(MAX_UNSENT_KIB)),
        share_lock: tokio::sync::Mutex::default(),
    });
    let welcome = Welcome {
        protocol: ProtocolVersion::CURRENT,
        daemon: DAEMON_NAME.to_owned(),
        pid: std::process::id(),
        instance: session.state.instance,
        inline_max_bytes: MAX_INLINE_BYTES.into(),
        // Other daemons cannot read the memory of GPUs of this host when they verify a version.
        supports_devices: session.origin.is_local() && !session.state.control_plane.is_shared(),
    };
    // A client that has disconnected is detected below.
    let _ = session.outgoing.send(reply_frame(number, Reply::Welcome(welcome).into())).await;
    let sending = async {
        loop {
            let frame = tokio::select! {
                frame = frames.recv() => frame,
                segment = unmapped.recv() => segment.map(unmap_frame),
            };
            let Some(frame) = frame else { break };
            if sender.send(&frame.frame).await.is_err() {
                break;
            }
        }
    };
    let mut tasks = JoinSet::new();
    let said_goodbye = tokio::select! {
        said_goodbye = session.receive_all(&mut receiver, &mut tasks) => said_goodbye,
        () = sending => false,
        () = session.state.closed() => false,
    };
    sender.close();
    tracing::info!(peer, said_goodbye, "disconnected");
    // Requests that run are completed without a reply. Requests that wait are cancelled.
    drop(frames);
    while tasks.join_next().await.is_some() {}
    session.close().await;
    let pool = session.state.pool.clone();
    match process {
        // The mappings of the process can outlive the connection.
        Some(process) if !said_goodbye && pool.is_mapped_by(peer) => {
            let pid = session.origin.pid();
            session.state.process_watcher.watch(pool, pid, process, peer);
        }
        _ => pool.record_exit(peer),
    }
}

/// Receives the first request of a client.
///
/// Returns the number of the request, and the name of the program or the reason to reject the client. Returns
/// `None` if the client does not speak the protocol at all.
async fn receive_hello(receiver: &mut FrameReceiver) -> Option<(u64, Result<String>)> {
    let frame = receiver.receive().await.ok()??;
    if frame.kind != FrameKind::Request {
        return None;
    }
    let hello = match serde_json::from_slice(&frame.head) {
        Ok(Request::Hello(Hello { protocol, client })) => {
            let (theirs, own) = (protocol.major, ProtocolVersion::CURRENT.major);
            if theirs == own {
                Ok(client)
            } else {
                let text = format_args!(
                    "protocol version {theirs} is not supported: daemon {DAEMON_NAME} (process {}) \
                     supports version {own}; use the same tssd release for the client and the \
                     daemon, and restart the daemon",
                    std::process::id()
                );
                Err(Error::new(ErrorKind::Refused, text))
            }
        }
        Ok(_) => Err(Error::new(ErrorKind::Invalid, "hello comes first")),
        Err(error) => Err(malformed_request(&error)),
    };
    Some((frame.number, hello))
}

fn malformed_request(error: &serde_json::Error) -> Error {
    Error::new(ErrorKind::Invalid, format_args!("a request that is not understood: {error}"))
}

impl Session {
    fn contributions(&self) -> MutexGuard<'_, Contributions> {
        self.contributions.lock()
    }

    fn uploads(&self) -> MutexGuard<'_, BTreeMap<u64, UploadReceiver>> {
        self.uploads.lock()
    }

    /// Receives requests and notices until the connection ends. Returns whether the client said goodbye.
    async fn receive_all(
        self: &Arc<Self>,
        receiver: &mut FrameReceiver,
        tasks: &mut JoinSet<()>,
    ) -> bool {
        loop {
            while tasks.try_join_next().is_some() {}
            let Ok(Some(frame)) = receiver.receive().await else { return false };
            match frame.kind {
                FrameKind::Notice => match serde_json::from_slice(&frame.head) {
                    Ok(Notice::Release { lease }) => self.state.release(self.peer, lease).await,
                    Ok(Notice::Unmap { segments }) => {
                        for segment in segments {
                            self.state.pool.record_unmap(self.peer, segment);
                        }
                    }
                    Ok(Notice::ReadStats(got)) => self.state.counters.lock().add_read(got),
                    Ok(Notice::Unfollow { follower }) => {
                        self.state.unfollow(self.peer, follower).await;
                    }
                    Ok(Notice::RunsConnected { processes }) => {
                        self.state.connected_runs.mark_proxy(self.peer);
                        for process in processes {
                            self.state.connected_runs.add(self.peer, process);
                        }
                    }
                    Ok(Notice::RunsDisconnected { runs }) => {
                        for run in runs {
                            self.state.connected_runs.remove(self.peer, &run);
                        }
                    }
                    Ok(Notice::Cancel { request }) => self.requests.cancel(request),
                    Ok(Notice::Goodbye) => return true,
                    // A notice of a later minor version of the protocol.
                    Err(_) => {}
                },
                FrameKind::Request => {
                    let request = self.requests.register(frame.number).await;
                    let session = self.clone();
                    tasks.spawn(boxed(async move { session.respond(frame, request).await }));
                }
                // Only daemons send these.
                FrameKind::Part | FrameKind::Reply => return false,
            }
        }
    }

    /// Runs a request and queues its reply.
    async fn respond(&self, frame: Frame, in_flight: InFlightRequest) {
        let started = Instant::now();
        let Frame { number, head, data, fds, .. } = frame;
        let data = data.into_bytes();
        let bytes = data.len();
        let request = serde_json::from_slice::<Request>(&head);
        // The request may wait for long. It does not need its head.
        drop(head);
        let op = request.as_ref().map_or("unknown", Request::op);
        let result = match request {
            Ok(request) => self.handle(&in_flight, request, data, fds).await,
            Err(error) => Err(malformed_request(&error)),
        };
        let failed = result.as_ref().err().map(Error::kind);
        let (peer, seconds) = (self.peer, started.elapsed().as_secs_f64());
        match &result {
            Ok(_) => tracing::debug!(peer, op, bytes, seconds, "answered"),
            Err(error) => tracing::debug!(peer, op, bytes, seconds, %error, "failed"),
        }
        *self.state.counters.lock().requests.entry((op, failed)).or_default() += 1;
        let mut answer = result.unwrap_or_else(|error| Reply::Failed(Failure::from(error)).into());
        let share_guard = answer.share_guard.take();
        let slot = self.outgoing.reserve().await;
        // A client that has this reply may send a new request in its place.
        drop(in_flight);
        // A client that has disconnected needs no reply.
        if let Ok(slot) = slot {
            slot.send(reply_frame(number, answer));
        }
        // Other replies that send descriptors follow this one.
        drop(share_guard);
    }

    /// Runs a request.
    async fn handle(
        &self,
        in_flight: &InFlightRequest,
        request: Request,
        data: Bytes,
        fds: Vec<OwnedFd>,
    ) -> Result<Response<'_>> {
        let controller = &self.state.control_plane;
        // Data and descriptors that the request does not use are freed before it waits.
        let data = if request.accepts_data() { data } else { Bytes::new() };
        let fds =
            if matches!(request, Request::AttachDeviceMemory { .. }) { fds } else { Vec::new() };
        let answer = match request {
            Request::Hello(_) => {
                return Err(Error::new(ErrorKind::Invalid, "hello is said once"));
            }
            Request::Begin(begin) => return self.begin(in_flight, begin, data).await,
            Request::Extend { contribution, file_len, device } => {
                return self.extend(in_flight, contribution, file_len, device, data).await;
            }
            Request::Commit { contribution, digest, lens } => {
                Reply::Progress(self.commit(in_flight, contribution, digest, lens, data).await?)
            }
            Request::AwaitUpload { contribution, timeout } => {
                Reply::Progress(self.wait_stored(in_flight, contribution, timeout).await?)
            }
            Request::Write { contribution, offset } => {
                self.write(contribution, offset, &data)?;
                Reply::Done
            }
            Request::Withdraw { contribution } => {
                self.withdraw(contribution).await?;
                Reply::Done
            }
            Request::Locate { key, selector, supports_devices } => {
                return self.locate(in_flight, &Key::new(key)?, selector, supports_devices).await;
            }
            Request::AttachDeviceMemory { segment } => {
                self.attach_device_memory(segment, fds)?;
                Reply::Done
            }
            Request::Prefetch { key, selector, archives } => {
                let key = Key::new(key)?;
                let fetched = self.prefetch(in_flight, &key, selector, archives.as_deref());
                Reply::Prefetched(fetched.await?)
            }
            Request::AwaitNewer { key, seen, seen_position: position, timeout } => {
                let key = Key::new(key)?;
                let seen = seen.map(|id| KnownVersion { id, position });
                let newer = controller.wait_for_newer(&key, seen, timeout.min(MAX_WAIT));
                Reply::Newest(self.unless_abandoned(in_flight, newer).await.transpose()?.flatten())
            }
            Request::Follow { key } => {
                Reply::Follower(self.state.follow(self.peer, &Key::new(key)?)?)
            }
            Request::Next { follower, supports_devices, timeout } => {
                return self
                    .next_version(in_flight, follower, supports_devices, timeout.min(MAX_WAIT))
                    .await;
            }
            Request::AwaitUnread { key, max_unread, timeout } => {
                let key = Key::new(key)?;
                let unread = self.state.wait_unread(&key, max_unread, timeout.min(MAX_WAIT));
                self.unless_abandoned(in_flight, unread)
                    .await
                    .map_or(Reply::Done, Reply::UnreadCounts)
            }
            Request::RunStatus { run } => Reply::RunStatus(self.state.connected_runs.find(&run)),
            Request::Status => Reply::Status(self.status().await),
            request @ (Request::Read { .. }
            | Request::Fetch { .. }
            | Request::Announce { .. }
            | Request::PresentPieces { .. }
            | Request::Discard { .. }
            | Request::FindUnknownBlobs { .. }) => {
                return self.handle_blobs(in_flight, request, data).await;
            }
            request @ (Request::Versions { .. }
            | Request::Keys { .. }
            | Request::Delete { .. }
            | Request::Retain { .. }
            | Request::Pin { .. }
            | Request::Rollback { .. }
            | Request::Unpin { .. }
            | Request::Pins { .. }) => self.handle_catalog(request).await?,
        };
        Ok(answer.into())
    }

    /// Runs a request about the keys, versions and pins of the control plane.
    async fn handle_catalog(&self, request: Request) -> Result<Reply> {
        let controller = &self.state.control_plane;
        Ok(match request {
            Request::Versions { key } => {
                Reply::Versions(controller.versions(&Key::new(key)?).await?)
            }
            Request::Keys { prefix, after } => {
                Reply::Keys(page_of_keys(&controller.keys(&prefix).await?, after.as_deref()))
            }
            Request::Delete { key, selection } => {
                let key = Key::new(key)?;
                let deleted = controller.delete(&key, selection);
                let deleted = self.state.with_bucket_sync(&key, deleted).await?;
                self.state.release_retired(&key).await;
                Reply::Deleted(deleted)
            }
            Request::Retain { key, keep, ttl } => {
                let key = Key::new(key)?;
                self.state.with_bucket_sync(&key, controller.retain(&key, keep, ttl)).await?;
                Reply::Done
            }
            Request::Pin { key, selector, label } => {
                let key = Key::new(key)?;
                let pinned = controller.pin(&key, selector, &label);
                Reply::Pinned(self.state.with_bucket_sync(&key, pinned).await?)
            }
            Request::Rollback { key, selector } => {
                let key = Key::new(key)?;
                Reply::RolledBack(self.state.rollback(&key, selector).await?)
            }
            Request::Unpin { key, label } => {
                let key = Key::new(key)?;
                self.state.with_bucket_sync(&key, controller.unpin(&key, &label)).await?;
                Reply::Done
            }
            Request::Pins { key } => Reply::Pins(controller.pins(&Key::new(key)?).await?),
            request => {
                let text = format_args!("`{}` is not a request about keys", request.op());
                return Err(Error::new(ErrorKind::Invalid, text));
            }
        })
    }

    /// Waits for the next version for a follower.
    async fn next_version(
        &self,
        in_flight: &InFlightRequest,
        follower: u64,
        supports_devices: bool,
        timeout: Duration,
    ) -> Result<Response<'_>> {
        in_flight.release_active_slot(0);
        match self
            .state
            .next_version(self.peer, follower, timeout, self.abandoned(in_flight))
            .await?
        {
            Some((key, leased)) => {
                self.send_lease(in_flight.number, &key, leased, supports_devices).await
            }
            None => Ok(Reply::Done.into()),
        }
    }

    /// Waits for a future. Returns `None` if the request is abandoned first.
    async fn unless_abandoned<T>(
        &self,
        in_flight: &InFlightRequest,
        waiting: impl Future<Output = T>,
    ) -> Option<T> {
        in_flight.release_active_slot(0);
        tokio::select! {
            done = waiting => Some(done),
            () = self.abandoned(in_flight) => None,
        }
    }

    /// Waits until the request is abandoned: it is cancelled, the client disconnects, or the daemon closes.
    async fn abandoned(&self, in_flight: &InFlightRequest) {
        tokio::select! {
            () = in_flight.cancelled() => {}
            () = self.outgoing.closed() => {}
            () = self.state.closed() => {}
        }
    }

    /// Whether the client still waits for the reply.
    fn is_awaited(&self, in_flight: &InFlightRequest) -> bool {
        !in_flight.is_cancelled() && !self.outgoing.is_closed()
    }

    /// Returns the status of the daemon with its peers.
    async fn status(&self) -> DaemonStatus {
        let (hosts, hosts_error) = match self.state.peers().await {
            Ok(hosts) => (hosts, None),
            Err(error) => (Vec::new(), Some(error)),
        };
        DaemonStatus { hosts, hosts_error, ..self.state.status() }
    }

    /// Leases a version, and returns its locations with the segments that the client does not have yet.
    async fn locate(
        &self,
        in_flight: &InFlightRequest,
        key: &Key,
        selector: Selector,
        devices: bool,
    ) -> Result<Response<'_>> {
        let leased = self.state.lease(self.peer, key, selector);
        let leased = self.with_keepalive(in_flight, leased).await?;
        self.send_lease(in_flight.number, key, leased, devices).await
    }

    /// As [`Self::locate`], for a version that is leased already. Releases the lease on failure.
    async fn send_lease(
        &self,
        number: u64,
        key: &Key,
        LocatedVersion { grant, manifest, archives }: LocatedVersion,
        devices: bool,
    ) -> Result<Response<'_>> {
        let has_device_archives =
            archives.values().any(|place| matches!(place, BlobLocation::Device(_)));
        if has_device_archives && !(self.origin.is_local() && devices) {
            self.state.release(self.peer, grant.lease).await;
            let text = format_args!(
                "key `{key}`: version {} is in the memory of a GPU, which only processes of its host that know of \
                 such memory can read: put it with residency=host",
                grant.number
            );
            return Err(Error::new(ErrorKind::Unsupported, text));
        }
        let location = |name: &String, place: &BlobLocation| match (place, self.origin) {
            (BlobLocation::Device(span), _) => Location::Device(*span),
            (BlobLocation::Local(span), Origin::Process { .. }) => Location::Span(*span),
            (BlobLocation::Local(span), Origin::Address(_)) => {
                Location::Blob { blob: name.clone(), len: span.len, address: None }
            }
            (BlobLocation::Remote(holder, len), _) => {
                let address = Some(holder.endpoint.to_string());
                Location::Blob { blob: name.clone(), len: *len, address }
            }
        };
        let located = archives.iter();
        let located =
            located.map(|(file, place)| (file.clone(), location(&grant.archives[file], place)));
        let mut leased = wire::LeaseReply {
            lease: grant.lease,
            id: grant.id,
            number: grant.number,
            epoch: grant.epoch,
            manifest: location(&grant.manifest, &BlobLocation::Local(manifest)),
            archives: located.collect(),
            segments: Vec::new(),
        };
        // Archives that do not fit into the head of the reply precede it in parts.
        for part in split_archives(&mut leased.archives) {
            let mut part = reply_frame(number, Reply::Archives(part).into());
            part.frame.kind = FrameKind::Part;
            let _ = self.outgoing.send(part).await;
        }
        if !self.origin.is_local() {
            return Ok(Reply::Leased(leased).into());
        }
        let segments = archives.values().flat_map(BlobLocation::segments);
        let segments: Vec<SegmentId> = segments.chain([manifest.segment]).collect();
        let share_guard = self.share_lock.lock().await;
        let mut shared = Vec::new();
        for segment in segments {
            match self.state.pool.share(self.peer, segment) {
                Ok(None) => {}
                Ok(Some(SegmentMemory { memory, capacity, device })) => {
                    let device_uuid = device.map(|uuid| uuid.to_string());
                    shared.push((SharedSegment { segment, capacity, device_uuid }, memory));
                }
                Err(error) => {
                    drop(share_guard);
                    self.state.release(self.peer, leased.lease).await;
                    return Err(Error::io("segment", error));
                }
            }
        }
        // Descriptors that do not fit into the frame of the reply precede it in parts.
        while shared.len() > usize::from(MAX_FDS) {
            let (segments, fds) = shared.drain(..usize::from(MAX_FDS)).unzip();
            let mut part =
                reply_frame(number, Response { fds, ..Reply::Segments(segments).into() });
            part.frame.kind = FrameKind::Part;
            let _ = self.outgoing.send(part).await;
        }
        let (segments, fds) = shared.into_iter().unzip();
        leased.segments = segments;
        Ok(Response { fds, share_guard: Some(share_guard), ..Reply::Leased(leased).into() })
    }

    /// Waits for a future that may take long. Sends the client an empty part at each interval.
    async fn with_keepalive<T>(
        &self,
        in_flight: &InFlightRequest,
        work: impl Future<Output = T>,
    ) -> T {
        let mut work = std::pin::pin!(work);
        loop {
            tokio::select! {
                // Most work is done at once, and needs no timer.
                biased;
                done = &mut work => return done,
                () = tokio::time::sleep(KEEPALIVE_INTERVAL) => {
                    in_flight.release_active_slot(0);
                    let mut part = reply_frame(in_flight.number, Reply::Archives(Archives::new()).into());
                    part.frame.kind = FrameKind::Part;
                    // If the queue is full, the client receives other frames.
                    let _ = self.outgoing.try_send(part);
                }
            }
        }
    }

    /// Withdraws the open contributions and releases the leases after the connection has ended.
    async fn close(&self) {
        self.withdraw_all().await;
        self.state.pool.remove_peer(self.peer);
        self.state.remove_peer(self.peer, self.origin.is_local()).await;
    }
}

/// Removes archives until the rest fits into a reply, and returns the removed ones in parts that fit.
fn split_archives(archives: &mut Archives) -> Vec<Archives> {
    let mut parts = Vec::new();
    while let Some((file, _)) = archives.iter().nth(MAX_ARCHIVES_PER_HEAD) {
        let file = file.clone();
        let rest = archives.split_off(&file);
        parts.push(std::mem::replace(archives, rest));
    }
    parts
}

/// Returns the keys after `after` that fit into a reply.
fn page_of_keys(keys: &[Key], after: Option<&str>) -> KeyPage {
    let first = after.map_or(0, |after| keys.partition_point(|key| key.as_str() <= after));
    let mut bytes = 0;
    let fit = keys[first..].iter().take_while(|key| {
        bytes += key.as_str().len();
        bytes <= MAX_KEY_BYTES
    });
    let fit: Vec<String> = fit.map(ToString::to_string).collect();
    KeyPage { more: first + fit.len() < keys.len(), keys: fit }
}

fn semaphore_closed(error: tokio::sync::AcquireError) -> Error {
    Error::io("the daemon ends", std::io::Error::other(error))
}

/// Encodes a response as a frame, or an error in its place if it exceeds the limits of a frame.
fn reply_frame(number: u64, answer: Response<'_>) -> OutgoingFrame {
    let Response { reply, data, fds, credits, .. } = answer;
    let head = serde_json::to_vec(&reply).expect("a reply is JSON");
    let mut frame = Frame { kind: FrameKind::Reply, number, head, data, fds };
    if !frame.is_within(Limits::DAEMON) {
        let len = frame.head.len();
        let text = format_args!("the answer has {len} bytes, too many for one: ask for less");
        let failed = Reply::Failed(Error::new(ErrorKind::Invalid, text).into());
        frame.head = serde_json::to_vec(&failed).expect("a reply is JSON");
        (frame.data, frame.fds) = (Data::default(), Vec::new());
    }
    OutgoingFrame { frame, _credits: credits }
}

/// Encodes the notice to unmap a segment.
fn unmap_frame(segment: SegmentId) -> OutgoingFrame {
    let notice = Notice::Unmap { segments: vec![segment] };
    let head = serde_json::to_vec(&notice).expect("a notice is JSON");
    let (data, fds) = (Data::default(), Vec::new());
    let frame = Frame { kind: FrameKind::Notice, number: 0, head, data, fds };
    OutgoingFrame { frame, _credits: Credits::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_match_spec() {
        let spec = include_str!("../../../spec/protocol.md");
        let seconds = |span: Duration| span.as_secs();
        let count = |count: usize| u64::try_from(count).unwrap();
        let (daemon, client, stranger) = (Limits::DAEMON, Limits::CLIENT, Limits::BEFORE_HELLO);
        let limits = [
            ("daemon_head", daemon.head.into()),
            ("daemon_data", daemon.data.into()),
            ("daemon_fds", daemon.fds.into()),
            ("client_head", client.head.into()),
            ("client_data", client.data.into()),
            ("client_fds", client.fds.into()),
            ("hello_head", stranger.head.into()),
            ("handshake_timeout", seconds(HANDSHAKE_TIMEOUT)),
            ("frame_timeout", seconds(crate::net::link::FRAME_TIMEOUT)),
            ("keepalive_interval", seconds(KEEPALIVE_INTERVAL)),
            ("max_wait", seconds(MAX_WAIT)),
            ("drain_timeout", seconds(super::super::DRAIN_TIMEOUT)),
            ("remote_client_data", Limits::REMOTE_CLIENT.data.into()),
            ("max_read_bytes", wire::MAX_READ_BYTES),
            ("max_unsent_bytes", count(MAX_UNSENT_KIB << 10)),
            ("max_copied_bytes", count(crate::daemon::state::MAX_COPIED_KIB << 10)),
            ("max_active_requests", count(MAX_ACTIVE_REQUESTS)),
            ("max_waiting_requests", count(in_flight::MAX_WAITING_REQUESTS)),
            ("max_followed_keys", count(crate::daemon::state::MAX_FOLLOWED_KEYS)),
            ("max_queued_versions", count(crate::daemon::state::MAX_QUEUED_VERSIONS)),
            ("max_host_len", count(contributions::MAX_HOST_LEN)),
            ("max_runs_per_connection", count(crate::daemon::connected_runs::MAX_RUNS_PER_PEER)),
            ("max_connections", count(super::super::MAX_CONNECTIONS)),
        ];
        for (name, value) in limits {
            assert!(spec.contains(&format!("\n| `{name}` | {value} | ")), "{name} = {value}");
        }
        assert_eq!((client.data, stranger.data, stranger.fds), (MAX_INLINE_BYTES, 0, 0));
    }
}
