//! Contributions of a connection: the memory of their archives, their commit and their upload.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use rustix::fs::FileType;

use super::{InFlightRequest, MAX_WAIT, Response, Session};
use crate::control::{
    ArchivePlacement, CommittedContribution, DeviceMemoryRequest, Progress, Proposal,
};
use crate::daemon::remote_blobs::{ReplicaKind, ReplicaLocation};
use crate::daemon::state::CommitGuard;
use crate::device::HEAD_BYTES;
use crate::error::{Error, ErrorKind, Result};
use crate::io::exec::run_blocking;
use crate::io::sync::Lock;
use crate::key::Key;
use crate::ledger::{ArchiveDigest, Durability, WriterSet};
use crate::net::tls::Endpoint;
use crate::net::wire::{
    Begin, BeginReply, Failure, MAX_INLINE_BYTES, Reply, SharedSegment, WriteTarget,
};
use crate::shm::{BlobWriter, Pool, PoolExhausted, SegmentId};

/// Maximum number of uploads per connection that a client can wait for.
const MAX_UPLOADS: usize = 1024;

/// Maximum length in bytes of the UUID of a GPU.
const MAX_UUID_LEN: usize = 64;

/// Maximum length in bytes of the name of a host.
pub(super) const MAX_HOST_LEN: usize = 255;

/// Maximum size in bytes of an archive in the memory of a GPU.
const MAX_DEVICE_BYTES: u64 = 1 << 46;

/// Open contributions by number. `None` stands for one that waits for memory in an `extend`.
pub(crate) type Contributions = BTreeMap<u64, Option<Contribution>>;

/// An open contribution.
pub(crate) struct Contribution {
    placement: ArchivePlacement,
    /// All writers of the version.
    writers: WriterSet,
    /// The digest that the writer has committed in an earlier try.
    committed: Option<ArchiveDigest>,
    /// Lengths of its archives in bytes. The last archive is being written.
    lens: Vec<u64>,
    /// Where the last archive is written.
    target: Target,
    /// The part of the last archive in the memory of a GPU.
    device: Option<DeviceMemoryRequest>,
    /// The segment for that part, once it is allocated.
    device_segment: Option<SegmentId>,
    /// Maximum time to wait for memory.
    timeout: Duration,
    _commit_guard: CommitGuard,
}

/// The memory into which an archive is written.
enum Target {
    /// Memory of the client. The archive is the data of the frame that completes it.
    Inline,
    /// A segment that the client has mapped for writing.
    ClientSegment(SegmentId),
    /// Memory of another daemon.
    Remote(Endpoint),
    /// A segment of this daemon, and the number of bytes that the client has sent so far.
    DaemonSegment(BlobWriter, u64),
}

fn unknown_contribution(contribution: u64) -> Error {
    let text = format_args!("contribution {contribution} is none of this connection's");
    Error::new(ErrorKind::Invalid, text)
}

/// Checks the lengths of archives that another daemon stores.
///
/// # Errors
///
/// `Invalid` if there is none, or if their sum overflows.
fn check_remote_lens(lens: Vec<u64>) -> Result<Vec<u64>> {
    let bytes = lens.iter().try_fold(0_u64, |all, len| all.checked_add(*len));
    if lens.is_empty() || bytes.is_none() {
        let text = "the lengths of the archives that are kept, one at least, must have a sum";
        return Err(Error::new(ErrorKind::Invalid, text));
    }
    Ok(lens)
}

impl Contribution {
    /// Returns how many bytes of the last archive are in host memory.
    ///
    /// If its data is in the memory of a GPU, these are the head, the index and the trailer.
    fn host_len(&self) -> u64 {
        let len = self.lens.last().copied().unwrap_or_default();
        match &self.device {
            Some(device) => HEAD_BYTES.saturating_add(len.saturating_sub(device.len)),
            None => len,
        }
    }
}

impl Session {
    /// Opens a contribution, and commits it at once if its only archive came with the request.
    pub(crate) async fn begin(
        &self,
        in_flight: &InFlightRequest,
        Begin { key, mut proposal, replica_address, digest }: Begin,
        data: Bytes,
    ) -> Result<Response<'_>> {
        let key = &Key::new(key)?;
        let commit_guard = self.state.commit_guard()?;
        proposal.timeout = proposal.timeout.min(MAX_WAIT);
        self.check_device(proposal.device.as_ref(), proposal.file_len, proposal.durability)?;
        let deadline = Instant::now() + proposal.timeout;
        let file_len = proposal.file_len;
        self.state.check_durability(proposal.durability)?;
        let remote =
            replica_address.map(|url| self.remote_endpoint(&url, &proposal)).transpose()?;
        if let Some(process) = &proposal.process {
            if process.host.len() > MAX_HOST_LEN {
                let text = format_args!("the name of a host has at most {MAX_HOST_LEN} bytes");
                return Err(Error::new(ErrorKind::Invalid, text));
            }
            if remote.is_some() {
                self.state.connected_runs.mark_proxy(self.peer);
            }
            self.state.connected_runs.add(self.peer, process.clone());
        }
        let inline_archive =
            digest.filter(|_| file_len <= MAX_INLINE_BYTES.into()).map(|digest| (digest, data));
        let inline_archive = Lock::new(inline_archive);
        let take_inline = || inline_archive.lock().take();
        let is_wanted = || {
            // A request that waits for other writers frees its slot and its archive. It is not committed at once.
            drop(take_inline());
            in_flight.release_active_slot(0);
            self.is_awaited(in_flight)
        };
        if let (Durability::Object, Some(replicator)) =
            (proposal.durability, &self.state.replicator)
        {
            replicator.admit(key, deadline, is_wanted).await?;
            proposal.timeout = deadline.saturating_duration_since(Instant::now());
        }
        let (placement, committed) =
            self.state.control_plane.open(key, &proposal, &is_wanted).await?;
        let (timeout, id, epoch, number) =
            (proposal.timeout, placement.id, placement.epoch, placement.number);
        let mut open = Contribution {
            placement,
            writers: proposal.writers,
            committed,
            lens: vec![file_len],
            target: Target::Inline,
            device: proposal.device,
            device_segment: None,
            timeout,
            _commit_guard: commit_guard,
        };
        let stem = if remote.is_some() { open.placement.stem.clone() } else { String::new() };
        if let Some(endpoint) = remote {
            open.target = Target::Remote(endpoint);
        }
        let targets = self.allocate(&mut open, in_flight, deadline).await;
        let (target, fds, device) =
            match targets.and_then(|targets| in_flight.check_cancelled().map(|()| targets)) {
                Ok(targets) => targets,
                Err(error) => return Err(self.abort(open, error).await),
            };
        let contribution = self.state.next_number();
        let archive = take_inline().filter(|_| target == WriteTarget::Inline && device.is_none());
        let progress = if let Some((digest, data)) = archive {
            Some(self.commit_contribution(in_flight, contribution, open, digest, data).await?)
        } else {
            self.contributions().insert(contribution, Some(open));
            None
        };
        let begun = BeginReply {
            contribution,
            id,
            epoch,
            number,
            committed_digest: committed,
            write_target: target,
            device_segment: device,
            stem,
            progress,
        };
        let reply = Reply::Begun(begun);
        Ok(Response { fds, ..reply.into() })
    }

    /// Allocates the memory for the last archive of a contribution.
    ///
    /// The segment on the GPU comes first. The host segment comes last, because its descriptor exists only in the
    /// result and is sent only with the reply.
    async fn allocate(
        &self,
        open: &mut Contribution,
        in_flight: &InFlightRequest,
        deadline: Instant,
    ) -> Result<(WriteTarget, Vec<OwnedFd>, Option<SharedSegment>)> {
        let device = self.allocate_on_device(open)?;
        let (target, fds) = self.allocate_on_host(open, in_flight, deadline).await?;
        Ok((target, fds, device))
    }

    /// Allocates host memory, and returns its descriptor if the client has not mapped it yet.
    async fn allocate_on_host(
        &self,
        open: &mut Contribution,
        in_flight: &InFlightRequest,
        deadline: Instant,
    ) -> Result<(WriteTarget, Vec<OwnedFd>)> {
        let len = open.host_len();
        if let Target::Remote(_) = open.target {
            return Ok((WriteTarget::ClientReplica, Vec::new()));
        }
        open.target = Target::Inline;
        if open.committed.is_some() || len <= MAX_INLINE_BYTES.into() {
            return Ok((WriteTarget::Inline, Vec::new()));
        }
        if !self.origin.is_local() {
            let writing =
                self.with_memory(in_flight, deadline, 0, |pool| pool.begin_blob(len)).await?;
            open.target = Target::DaemonSegment(writing, 0);
            return Ok((WriteTarget::Frames, Vec::new()));
        }
        let acquired = self
            .with_memory(in_flight, deadline, 0, |pool| pool.acquire_segment(self.peer, len))
            .await?;
        open.target = Target::ClientSegment(acquired.segment);
        let target =
            WriteTarget::Segment { segment: acquired.segment, capacity: acquired.capacity };
        Ok((target, acquired.memory.into_iter().collect()))
    }

    /// Checks a request to store an archive in the memory of a GPU.
    ///
    /// # Errors
    ///
    /// `Invalid` if this connection, this daemon or the durability does not allow it, or if the sizes are not valid.
    fn check_device(
        &self,
        device: Option<&DeviceMemoryRequest>,
        file_len: u64,
        durability: Durability,
    ) -> Result<()> {
        let Some(DeviceMemoryRequest { uuid, len, min_capacity }) = device else { return Ok(()) };
        let text = if uuid.len() > MAX_UUID_LEN || (*len).max(*min_capacity) > MAX_DEVICE_BYTES {
            "no GPU is called so, or has so much memory"
        } else if !self.origin.is_local() {
            "only processes of this host put to the memory of its GPUs"
        } else if self.state.control_plane.is_shared() {
            "the controller on another host cannot read a manifest in GPU memory of this host"
        } else if durability != Durability::Memory {
            "what must last does not stay in the memory of a GPU"
        } else if *len < HEAD_BYTES || *len > file_len {
            "an archive has 4096 bytes in front of its data, and no more in front of its index than in all"
        } else {
            return Ok(());
        };
        Err(Error::new(ErrorKind::Invalid, text))
    }

    /// Allocates the segment on a GPU for the part of an archive before its index.
    fn allocate_on_device(&self, open: &mut Contribution) -> Result<Option<SharedSegment>> {
        let device = open.device.as_ref().filter(|_| open.committed.is_none());
        let Some(DeviceMemoryRequest { uuid, len, min_capacity }) = device else { return Ok(None) };
        let acquired = self.state.pool.acquire_device_segment(self.peer, uuid, (*len).max(*min_capacity)).ok_or_else(|| {
            let text = "this process has as many segments of GPUs as a daemon keeps for one: put larger buckets, \
                        or keep fewer versions";
            Error::new(ErrorKind::Busy, text)
        })?;
        open.device_segment = Some(acquired.segment);
        Ok(Some(SharedSegment {
            segment: acquired.segment,
            capacity: acquired.capacity,
            device_uuid: Some(uuid.clone()),
        }))
    }

    /// Attaches the memory that a client has allocated on a GPU to its segment.
    pub(crate) fn attach_device_memory(&self, segment: SegmentId, fds: Vec<OwnedFd>) -> Result<()> {
        let invalid = |text: &dyn std::fmt::Display| Error::new(ErrorKind::Invalid, text);
        let Ok([memory]) = <[OwnedFd; 1]>::try_from(fds) else {
            return Err(invalid(&"attach_device_memory takes one descriptor"));
        };
        let kind = rustix::fs::fstat(&memory).map(|status| FileType::from_raw_mode(status.st_mode));
        if matches!(kind, Err(_) | Ok(FileType::Socket | FileType::Fifo | FileType::Directory)) {
            return Err(invalid(&"the descriptor is not memory of a GPU"));
        }
        let attached = self.state.pool.attach_device_memory(self.peer, segment, memory);
        attached.map_err(|error| invalid(&format_args!("segment {segment}: {error}")))
    }

    /// Writes the next bytes of an archive that is sent in frames.
    pub(crate) fn write(&self, contribution: u64, offset: u64, data: &[u8]) -> Result<()> {
        let mut open = self.contributions();
        let open = open.get_mut(&contribution).and_then(Option::as_mut);
        let open = open.ok_or_else(|| unknown_contribution(contribution))?;
        let Target::DaemonSegment(writing, written) = &mut open.target else {
            return Err(Error::new(ErrorKind::Invalid, "its room is not in frames"));
        };
        // Writes are sequential, so no bytes of an earlier archive stay in the recycled segment.
        let start = usize::try_from(offset).ok().filter(|_| offset == *written);
        let range = start.and_then(|start| Some(start..start.checked_add(data.len())?));
        let target = range.and_then(|range| writing.bytes_mut().get_mut(range));
        let target = target.ok_or_else(|| {
            let len = data.len();
            let text =
                format_args!("{len} bytes at {offset} of an archive of which {written} have come");
            Error::new(ErrorKind::Invalid, text)
        })?;
        target.copy_from_slice(data);
        *written = written.saturating_add(u64::try_from(data.len()).unwrap_or(u64::MAX));
        Ok(())
    }

    /// Returns the address of the daemon that stores the archives of a contribution.
    ///
    /// # Errors
    ///
    /// `Refused` if the client is not a daemon; `Invalid` if this daemon or the durability does not allow it, or if
    /// `url` is not valid.
    fn remote_endpoint(&self, url: &str, proposal: &Proposal) -> Result<Endpoint> {
        if self.origin.is_local() {
            return Err(Error::new(ErrorKind::Refused, "only daemons keep archives"));
        }
        if proposal.durability != Durability::Memory {
            let text = "what must last is put on the host of the daemon that decides";
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        if self.state.control_plane.is_shared() {
            let text = "another daemon decides here: name that one as the controller";
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        let endpoint: Endpoint = url.parse()?;
        // A deployment with TLS must not read archives without it.
        if endpoint.is_tls() != self.state.volume.remote_blobs.is_tls() {
            let text =
                format_args!("`{endpoint}`: daemons talk to each other all by tls:, or none");
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        Ok(endpoint)
    }

    /// Completes the last archive of a contribution, and allocates memory for another one.
    pub(crate) async fn extend(
        &self,
        in_flight: &InFlightRequest,
        contribution: u64,
        file_len: u64,
        device: Option<DeviceMemoryRequest>,
        data: Bytes,
    ) -> Result<Response<'_>> {
        let taken = self.contributions().get_mut(&contribution).and_then(Option::take);
        let mut open = taken.ok_or_else(|| unknown_contribution(contribution))?;
        let extended = async {
            self.check_device(device.as_ref(), file_len, open.placement.durability)?;
            self.publish_archive(in_flight, &mut open, data).await?;
            open.lens.push(file_len);
            (open.device, open.device_segment) = (device, None);
            let deadline = Instant::now() + open.timeout;
            self.allocate(&mut open, in_flight, deadline).await
        };
        let error = match extended.await {
            Ok((target, fds, device)) => match self.contributions().get_mut(&contribution) {
                Some(waiting) => {
                    *waiting = Some(open);
                    let reply = match device {
                        Some(device_segment) => {
                            Reply::DeviceWriteTargets { write_target: target, device_segment }
                        }
                        None => Reply::WriteTarget(target),
                    };
                    return Ok(Response { fds, ..reply.into() });
                }
                None => unknown_contribution(contribution),
            },
            Err(error) => error,
        };
        self.contributions().remove(&contribution);
        Err(self.abort(open, error).await)
    }

    /// Runs an allocation, and waits for memory while the pool is exhausted.
    ///
    /// The wait ends at the deadline, or when the request is abandoned. `bytes` is the length of the data that the
    /// request keeps meanwhile.
    pub(crate) async fn with_memory<T>(
        &self,
        in_flight: &InFlightRequest,
        deadline: Instant,
        bytes: usize,
        work: impl FnMut(&Arc<Pool>) -> std::io::Result<Result<T, PoolExhausted>>,
    ) -> Result<T> {
        let left = deadline.saturating_duration_since(Instant::now());
        let cancelled = async {
            in_flight.release_active_slot(bytes);
            tokio::select! {
                () = tokio::time::sleep(left) => {}
                () = self.abandoned(in_flight) => {}
            }
        };
        let replicas = &self.state.volume.replicas;
        let done = replicas.with_memory(&*self.state.control_plane, cancelled, work).await;
        let done = done.map_err(|error| Error::io("memory", error))?;
        done.map_err(|exhausted| self.state.out_of_memory(&exhausted))
    }

    /// Removes a contribution. `None` if it waits for memory: then its `extend` fails.
    fn take_contribution(&self, contribution: u64) -> Result<Option<Contribution>> {
        self.contributions().remove(&contribution).ok_or_else(|| unknown_contribution(contribution))
    }

    /// Commits a contribution of this connection.
    pub(crate) async fn commit(
        &self,
        in_flight: &InFlightRequest,
        contribution: u64,
        digest: ArchiveDigest,
        lens: Vec<u64>,
        data: Bytes,
    ) -> Result<Progress> {
        let mut open = self
            .take_contribution(contribution)?
            .ok_or_else(|| unknown_contribution(contribution))?;
        if let Target::Remote(_) = open.target {
            match check_remote_lens(lens) {
                Ok(lens) => open.lens = lens,
                Err(error) => return Err(self.abort(open, error).await),
            }
        }
        self.commit_contribution(in_flight, contribution, open, digest, data).await
    }

    /// Commits a contribution. `data` is its last archive if that is sent inline.
    async fn commit_contribution(
        &self,
        in_flight: &InFlightRequest,
        contribution: u64,
        mut open: Contribution,
        digest: ArchiveDigest,
        data: Bytes,
    ) -> Result<Progress> {
        let committed = async {
            self.publish_archive(in_flight, &mut open, data).await?;
            let followers_guard = self.state.lock_commits(&open.placement.key).await;
            in_flight.check_cancelled()?;
            let progress =
                self.state.control_plane.commit(&open.placement, digest, &open.lens).await?;
            if progress.visible {
                let ArchivePlacement { key, id, epoch, number, .. } = &open.placement;
                self.state.notify_followers(key, *id, *epoch, *number).await;
            }
            drop(followers_guard);
            // A retry of a committed contribution is not counted again.
            if open.committed.is_none() {
                let mut counts = self.state.counters.lock();
                let bytes = open.lens.iter().copied().fold(0, u64::saturating_add);
                counts.puts += 1;
                counts.put_bytes = counts.put_bytes.saturating_add(bytes);
                counts.published += u64::from(progress.visible);
            }
            Ok(progress)
        };
        match committed.await {
            Ok(progress) => {
                self.state.release_replaced(&open.placement.key).await;
                self.enqueue_upload(contribution, open, digest).await?;
                Ok(progress)
            }
            Err(error) => Err(self.abort(open, error).await),
        }
    }

    /// Starts the upload of a committed contribution if its durability is `object`.
    async fn enqueue_upload(
        &self,
        contribution: u64,
        open: Contribution,
        digest: ArchiveDigest,
    ) -> Result<()> {
        let Some(replicator) = &self.state.replicator else { return Ok(()) };
        let Contribution { placement, writers, lens, committed, .. } = open;
        if placement.durability == Durability::Object {
            let committed_before = match committed {
                Some(_) => replicator.find_committed(&placement).await?,
                None => None,
            };
            let own = CommittedContribution { placement, writers, digest, lens };
            let upload = replicator.enqueue(committed_before.unwrap_or(own));
            let mut uploads = self.uploads();
            if uploads.len() >= MAX_UPLOADS {
                uploads.pop_first();
            }
            uploads.insert(contribution, upload);
        }
        Ok(())
    }

    /// Waits until a committed contribution is in the bucket. Returns the progress of its version there.
    ///
    /// # Errors
    ///
    /// The error of the upload; `Busy` after `timeout`; `Unreachable` if the daemon shuts down; `Invalid` if this
    /// connection has no such upload, or has waited for it before.
    pub(crate) async fn wait_stored(
        &self,
        in_flight: &InFlightRequest,
        contribution: u64,
        timeout: Duration,
    ) -> Result<Progress> {
        in_flight.release_active_slot(0);
        let upload = self.uploads().remove(&contribution);
        let mut upload = upload.ok_or_else(|| unknown_contribution(contribution))?;
        let timeout = timeout.min(MAX_WAIT);
        let waited = tokio::select! {
            biased;
            result = upload.wait_for(Option::is_some) => result.ok().and_then(|it| it.clone()),
            () = tokio::time::sleep(timeout) => None,
            () = self.abandoned(in_flight) => None,
        };
        match waited {
            Some(Ok(progress)) => Ok(progress),
            Some(Err(failure)) => {
                let text = format!("the version is not in the bucket: {}", failure.text);
                Err(Failure { text, ..failure }.into())
            }
            None if self.state.is_shutting_down() => {
                let text = "the daemon ends, and the version is not in the bucket";
                Err(Error::new(ErrorKind::Unreachable, text))
            }
            None => {
                let text = format_args!(
                    "the version is in memory, and not in the bucket after {timeout:?}: `status` says how far it is"
                );
                Err(Error::new(ErrorKind::Busy, text))
            }
        }
    }

    /// Completes the last archive: publishes it in the pool, and writes it to disk if it must be there.
    async fn publish_archive(
        &self,
        in_flight: &InFlightRequest,
        open: &mut Contribution,
        data: Bytes,
    ) -> Result<()> {
        if open.committed.is_some() {
            return Ok(());
        }
        let path = open.placement.path(open.lens.len() - 1);
        let len = open.host_len();
        let check_len = |written: u64| {
            let text = format!("an archive of {written} bytes where {len} were announced");
            if written == len { Ok(()) } else { Err(Error::new(ErrorKind::Invalid, text)) }
        };
        let failed = |error| Error::io(&path, error);
        match std::mem::replace(&mut open.target, Target::Inline) {
            Target::Remote(endpoint) => {
                let location = ReplicaLocation { endpoint, kind: ReplicaKind::Origin };
                for (number, len) in open.lens.iter().enumerate() {
                    let name = open.placement.path(number);
                    self.state.volume.remote_blobs.add_reference(
                        &name,
                        std::slice::from_ref(&location),
                        *len,
                    );
                }
                return Ok(());
            }
            Target::ClientSegment(segment) => {
                let published = self.state.pool.publish(self.peer, segment, &path, len);
                if let Err(error) = published {
                    open.target = Target::ClientSegment(segment);
                    return Err(failed(error));
                }
            }
            Target::DaemonSegment(writing, written) => {
                check_len(written)?;
                writing.publish(&path).map_err(failed)?;
            }
            Target::Inline => {
                check_len(u64::try_from(data.len()).unwrap_or(u64::MAX))?;
                let deadline = Instant::now() + open.timeout;
                let write = |pool: &Arc<Pool>| pool.write(&path, &data);
                self.with_memory(in_flight, deadline, data.len(), write).await?;
            }
        }
        if let Some(segment) = open.device_segment {
            let whole = open.lens.last().copied().unwrap_or_default();
            let published =
                self.state.pool.publish_device_archive(self.peer, segment, &path, whole);
            let invalid = |error| Error::new(ErrorKind::Invalid, format_args!("`{path}`: {error}"));
            published.map_err(invalid)?;
            // The archive owns the segment now: an abort must not return it.
            open.device_segment = None;
        }
        if open.placement.durability == Durability::Disk {
            let (tiers, started) = (self.state.volume.clone(), Instant::now());
            run_blocking(move || tiers.persist(&path)).await?;
            let seconds = started.elapsed().as_secs_f64();
            tracing::debug!(peer = self.peer, bytes = len, seconds, "on disk");
        }
        Ok(())
    }

    /// Withdraws a contribution. Fails with the outcome of its version if the ledger knows one.
    pub(crate) async fn withdraw(&self, contribution: u64) -> Result<()> {
        let Some(open) = self.take_contribution(contribution)? else { return Ok(()) };
        let (key, id, number) =
            (open.placement.key.clone(), open.placement.id, open.placement.number);
        let withdrawn =
            Error::new(ErrorKind::Refused, format_args!("version {number} of `{key}` ({id})"));
        let reason = self.abort(open, withdrawn).await;
        // The ledger knows why the put failed if another writer or daemon has ended the version.
        if reason.refusal().is_some() { Err(reason) } else { Ok(()) }
    }

    /// Withdraws a contribution that failed, and returns the error for the client.
    async fn abort(&self, open: Contribution, error: Error) -> Error {
        let error = self.state.control_plane.failure_cause(&open.placement, error).await;
        if let Target::ClientSegment(segment) = open.target {
            self.state.pool.release_segment(self.peer, segment);
        }
        if let Some(segment) = open.device_segment {
            self.state.pool.release_segment(self.peer, segment);
        }
        self.state.control_plane.withdraw(&open.placement, open.lens.len()).await;
        error
    }

    /// Withdraws all open contributions.
    pub(crate) async fn withdraw_all(&self) {
        let open = std::mem::take(&mut *self.contributions());
        for contribution in open.into_values().flatten() {
            let Contribution { placement, lens, .. } = contribution;
            self.state.control_plane.withdraw(&placement, lens.len()).await;
        }
    }
}
