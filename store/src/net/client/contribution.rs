//! A contribution to a version in a daemon.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use tssd_format::{JobChecksums, WriteJob};

use super::calls::ReleaseOnDrop;
use super::{Client, RESPONSE_TIMEOUT, protocol_violation, unexpected_reply};
use crate::blob::{Part, split, split_slices};
use crate::control::{
    self, CommitResult, Contribution, DeviceMemoryRequest, Progress, Proposal, UploadFuture,
};
use crate::device::{self, Download, DownloadTarget, HEAD_BYTES, HEAD_LEN, Upload};
use crate::error::{Error, ErrorKind, Result};
use crate::io::exec::{backoff, run_blocking};
use crate::ledger::{ArchiveDigest, Durability};
use crate::net::wire::{BeginReply, MAX_WRITE_BYTES, Reply, Request, SharedSegment, WriteTarget};
use crate::shm::{SegmentId, WriteMap};

/// Maximum number of retries while a GPU has too little free memory.
const MAX_DEVICE_RETRIES: u32 = 3;

/// An open contribution. Dropping it before the commit withdraws it.
pub(super) struct RemoteContribution {
    client: Arc<Client>,
    contribution: u64,
    /// Length of the archive, or of its host part, in bytes.
    file_len: usize,
    buffer: HostBuffer,
    device: Option<DeviceTarget>,
    /// Copies from devices to the segment, if this process has a driver.
    download: Option<Box<dyn Download>>,
    /// How long the daemon waits for other writers.
    timeout: Duration,
    /// Whether the contribution is also uploaded to a bucket.
    is_uploaded: bool,
    /// Progress of the version, if the contribution is already committed.
    progress: Option<Progress>,
    /// Withdraws the contribution.
    release: ReleaseOnDrop,
}

/// Host memory to which the archive is written.
enum HostBuffer {
    /// There is nothing to write.
    None,
    Inline(Vec<u8>),
    /// Sent as `write` requests before the commit.
    Frames(Vec<u8>),
    Segment(SegmentId, WriteMap),
}

/// GPU memory for the part of an archive in front of its index.
struct DeviceTarget {
    len: u64,
    upload: Box<dyn Upload>,
}

impl RemoteContribution {
    pub(super) async fn new(
        client: Arc<Client>,
        begun: &BeginReply,
        proposal: &Proposal,
        release: ReleaseOnDrop,
    ) -> Result<Self> {
        let mut created = Self {
            client,
            contribution: begun.contribution,
            file_len: 0,
            buffer: HostBuffer::None,
            device: None,
            download: None,
            timeout: proposal.timeout,
            is_uploaded: proposal.durability == Durability::Object,
            progress: begun.progress.clone(),
            release,
        };
        if begun.committed_digest.is_none() && begun.progress.is_none() {
            let (host, device) = (begun.write_target, begun.device_segment.as_ref());
            created.set_targets(host, device, proposal.file_len, proposal.device.as_ref()).await?;
        }
        Ok(created)
    }

    /// Sets the write targets of the next archive.
    ///
    /// An archive in GPU memory has one for its host part and one for the rest. Others have one.
    async fn set_targets(
        &mut self,
        host: WriteTarget,
        shared: Option<&SharedSegment>,
        file_len: u64,
        device: Option<&DeviceMemoryRequest>,
    ) -> Result<()> {
        let Some(on_device) = device else { return self.set_host_target(host, file_len).await };
        let shared =
            shared.ok_or_else(|| protocol_violation("it has no room in the memory of a GPU"))?;
        self.set_device_target(shared, on_device.len).await?;
        self.set_host_target(host, HEAD_BYTES + file_len.saturating_sub(on_device.len)).await
    }

    /// Sets the GPU segment for the part in front of the index.
    ///
    /// Allocates it if no free one can be reused.
    async fn set_device_target(&mut self, shared: &SharedSegment, len: u64) -> Result<()> {
        if shared.capacity < len {
            return Err(protocol_violation("it lends less memory of a GPU than the archive takes"));
        }
        let (segment, new_memory) = self.device_segment(shared).await?;
        if let Some(memory) = new_memory {
            let request = Request::AttachDeviceMemory { segment: shared.segment };
            match self
                .client
                .calls
                .call_with_fd(&request, Bytes::new(), Some(memory), RESPONSE_TIMEOUT)
                .await?
                .reply
            {
                Reply::Done => self.client.maps.add_device_segment(shared.segment, segment.clone()),
                other => return Err(unexpected_reply(&other)),
            }
        }
        self.device = Some(DeviceTarget { len, upload: segment.upload()? });
        Ok(())
    }

    /// Sets the write target in host memory.
    async fn set_host_target(&mut self, target: WriteTarget, file_len: u64) -> Result<()> {
        self.file_len = usize::try_from(file_len)
            .map_err(|_| Error::new(ErrorKind::Invalid, "the archive does not fit into memory"))?;
        self.buffer = match target {
            WriteTarget::Inline => HostBuffer::Inline(vec![0; self.file_len]),
            WriteTarget::Frames => HostBuffer::Frames(vec![0; self.file_len]),
            WriteTarget::ClientReplica => {
                return Err(protocol_violation("nobody keeps the archive"));
            }
            WriteTarget::Segment { segment, capacity } => {
                let maps = self.client.maps.clone();
                if maps.needs_write_map(segment) {
                    // The segment is mapped with all its pages, which takes long.
                    run_blocking(move || maps.map_for_writing(segment, capacity)).await?;
                }
                let map = self.client.maps.take_write_map(segment)?;
                if map.len() < self.file_len {
                    return Err(protocol_violation("it lends less memory than the archive takes"));
                }
                self.download = device::driver().ok().map(device::Driver::download);
                HostBuffer::Segment(segment, map)
            }
        };
        Ok(())
    }

    /// Returns a GPU segment that is mapped or new.
    ///
    /// Retries, because memory that was just freed for it may take a moment to become available.
    async fn device_segment(
        &self,
        shared: &SharedSegment,
    ) -> Result<(Arc<dyn device::Segment>, Option<OwnedFd>)> {
        let mut retries = 0;
        loop {
            let (maps, shared) = (self.client.maps.clone(), shared.clone());
            match run_blocking(move || maps.device_write_segment(&shared)).await {
                Err(error) if error.kind() == ErrorKind::Busy && retries < MAX_DEVICE_RETRIES => {
                    retries += 1;
                    backoff(retries).await;
                }
                result => return result,
            }
        }
    }

    /// Returns the contribution in the form that the controller returns.
    pub(super) fn into_begin_response(self, begun: &BeginReply) -> control::BeginResult {
        let BeginReply { id, epoch, number, committed_digest: committed, .. } = *begun;
        control::BeginResult { id, epoch, number, committed, contribution: Box::new(self) }
    }

    /// Writes the whole archive. Does nothing if there is nothing to write.
    pub(super) fn write(&mut self, archive: &[u8]) -> Result<()> {
        let len = u64::try_from(archive.len()).unwrap_or(u64::MAX);
        self.parts(&[len]).iter_mut().try_for_each(|part| part.write(archive))
    }

    /// Ends writing, and returns the bytes that are not sent yet.
    fn end_writing(&mut self) -> Bytes {
        self.device = None;
        self.download = None;
        match std::mem::replace(&mut self.buffer, HostBuffer::None) {
            HostBuffer::None => Bytes::new(),
            HostBuffer::Inline(bytes) | HostBuffer::Frames(bytes) => bytes.into(),
            HostBuffer::Segment(segment, map) => {
                self.client.maps.put_back_write_map(segment, map);
                Bytes::new()
            }
        }
    }

    /// Sends `write` requests if the target is frames.
    ///
    /// Returns the data of the request that completes the archive.
    async fn send_frames(&mut self) -> Result<Bytes> {
        let is_sent = matches!(self.buffer, HostBuffer::Frames(_));
        let mut bytes = self.end_writing();
        let mut offset = 0;
        while is_sent && !bytes.is_empty() {
            let part = bytes.split_to(bytes.len().min(MAX_WRITE_BYTES as usize));
            let len = u64::try_from(part.len()).unwrap_or(u64::MAX);
            let request = Request::Write { contribution: self.contribution, offset };
            match self.client.calls.call(&request, part, RESPONSE_TIMEOUT).await?.reply {
                Reply::Done => offset += len,
                other => return Err(unexpected_reply(&other)),
            }
        }
        Ok(bytes)
    }

    /// Commits the contribution.
    async fn send_commit(&mut self, digest: ArchiveDigest) -> Result<Progress> {
        let data = self.send_frames().await?;
        let request = Request::Commit { contribution: self.contribution, digest, lens: Vec::new() };
        // The daemon may have to wait for memory for the data.
        let response_timeout = self.timeout.saturating_add(RESPONSE_TIMEOUT);
        let response = self.client.calls.call(&request, data, response_timeout).await;
        // The daemon has decided the contribution, whether or not the reply arrives.
        self.release.disarm();
        match response?.reply {
            Reply::Progress(progress) => Ok(progress),
            other => Err(unexpected_reply(&other)),
        }
    }
}

#[async_trait]
impl Contribution for RemoteContribution {
    fn is_in_memory(&self) -> bool {
        self.device.is_none()
    }

    fn parts(&mut self, lens: &[u64]) -> Vec<Box<dyn Part + '_>> {
        let (memory, is_shared) = match &mut self.buffer {
            HostBuffer::None => return Vec::new(),
            HostBuffer::Inline(bytes) | HostBuffer::Frames(bytes) => (bytes.as_mut_slice(), false),
            HostBuffer::Segment(_, map) => (map.range_mut(0..self.file_len), true),
        };
        match &self.device {
            Some(device) => device.parts(memory, lens),
            None => match self.download.as_deref().filter(|_| is_shared) {
                Some(download) => segment_parts(memory, download, lens),
                None => split(memory, lens),
            },
        }
    }

    async fn extend(&mut self, file_len: u64, device: Option<DeviceMemoryRequest>) -> Result<()> {
        if matches!(self.buffer, HostBuffer::None) {
            return Ok(());
        }
        let data = self.send_frames().await?;
        let contribution = self.contribution;
        let request = Request::Extend { contribution, file_len, device: device.clone() };
        let response_timeout = self.timeout.saturating_add(RESPONSE_TIMEOUT);
        match self.client.calls.call(&request, data, response_timeout).await?.reply {
            Reply::WriteTarget(target) => {
                self.set_targets(target, None, file_len, device.as_ref()).await
            }
            Reply::DeviceWriteTargets { write_target, device_segment } => {
                self.set_targets(write_target, Some(&device_segment), file_len, device.as_ref())
                    .await
            }
            other => Err(unexpected_reply(&other)),
        }
    }

    async fn commit(mut self: Box<Self>, digest: ArchiveDigest) -> Result<CommitResult> {
        let progress = match self.progress.take() {
            Some(progress) => progress,
            None => self.send_commit(digest).await?,
        };
        let (client, contribution, timeout) =
            (self.client.clone(), self.contribution, self.timeout);
        let upload = async move {
            let request = Request::AwaitUpload { contribution, timeout };
            let response_timeout = timeout.saturating_add(RESPONSE_TIMEOUT);
            match client.calls.call(&request, Bytes::new(), response_timeout).await?.reply {
                Reply::Progress(progress) => Ok(progress),
                other => Err(unexpected_reply(&other)),
            }
        };
        let upload = self.is_uploaded.then(|| Box::pin(upload) as UploadFuture);
        Ok(CommitResult { progress, upload })
    }

    async fn withdraw(mut self: Box<Self>, error: Error) -> Error {
        self.end_writing();
        self.release.disarm();
        let request = Request::Withdraw { contribution: self.contribution };
        let call = self.client.calls.call(&request, Bytes::new(), RESPONSE_TIMEOUT);
        // A refusal that names the outcome of the version explains more than an error that follows
        // from it.
        match call.await {
            Err(reason) if error.refusal().is_none() && reason.refusal().is_some() => reason,
            _ => error,
        }
    }
}

/// Splits the memory of a segment into parts of these lengths, in bytes.
fn segment_parts<'a>(
    memory: &'a mut [u8],
    download: &'a dyn Download,
    lens: &[u64],
) -> Vec<Box<dyn Part + 'a>> {
    let part = |memory| Box::new(SegmentPart(download.target(memory))) as Box<dyn Part>;
    split_slices(memory, lens).map(part).collect()
}

/// A part that GPUs write by DMA.
struct SegmentPart<'a>(Box<dyn DownloadTarget + 'a>);

impl Part for SegmentPart<'_> {
    fn begin(&mut self, job: &WriteJob) -> Result<()> {
        self.0.begin(job)
    }

    fn write_job(&mut self, job: &WriteJob) -> Result<JobChecksums> {
        let (memory, is_complete) = self.0.finish()?;
        let written = if is_complete { job.run_prefilled(memory) } else { job.run(memory) };
        written.map_err(|error| Error::from_request("fill", error))
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        let (mut memory, _) = self.0.finish()?;
        Part::write(&mut memory, bytes)
    }
}

impl DeviceTarget {
    /// Splits the archive into parts of these lengths, in bytes.
    ///
    /// The parts in front of the index are in GPU memory, the others in the host part.
    fn parts<'a>(&'a self, host_part: &'a mut [u8], lens: &[u64]) -> Vec<Box<dyn Part + 'a>> {
        let upload = &*self.upload;
        let (head, mut rest) = host_part.split_at_mut(host_part.len().min(HEAD_LEN));
        let (mut head, mut at) = (Some(head), 0);
        let mut parts: Vec<Box<dyn Part + 'a>> = Vec::with_capacity(lens.len());
        for len in lens {
            if at < self.len {
                parts.push(Box::new(DeviceArchivePart {
                    upload,
                    head: head.take(),
                    checksums: None,
                }));
            } else {
                let len = usize::try_from(*len).unwrap_or(usize::MAX).min(rest.len());
                let (memory, others) = std::mem::take(&mut rest).split_at_mut(len);
                rest = others;
                parts.push(Box::new(HostPart { upload, memory }));
            }
            at += len;
        }
        parts
    }
}

/// A part in GPU memory. The beginning of the archive is also written to the host part.
struct DeviceArchivePart<'a> {
    upload: &'a dyn Upload,
    head: Option<&'a mut [u8]>,
    /// Checksums of a job that has begun ahead.
    checksums: Option<JobChecksums>,
}

impl Part for DeviceArchivePart<'_> {
    fn begin(&mut self, job: &WriteJob) -> Result<()> {
        self.checksums = Some(self.upload.write(job, self.head.as_deref_mut())?);
        Ok(())
    }

    fn write_job(&mut self, job: &WriteJob) -> Result<JobChecksums> {
        match self.checksums.take() {
            Some(checksums) => Ok(checksums),
            None => self.upload.write(job, self.head.as_deref_mut()),
        }
    }

    fn write(&mut self, _bytes: &[u8]) -> Result<()> {
        Err(Error::new(ErrorKind::Invalid, "the memory of a GPU is filled by jobs"))
    }
}

/// A part of the host part behind the index offset. It is written when the GPU memory is complete.
struct HostPart<'a> {
    upload: &'a dyn Upload,
    memory: &'a mut [u8],
}

impl Part for HostPart<'_> {
    fn write_job(&mut self, job: &WriteJob) -> Result<JobChecksums> {
        Part::write_job(&mut &mut *self.memory, job)
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.upload.finish()?;
        Part::write(&mut &mut *self.memory, bytes)
    }
}

impl Drop for RemoteContribution {
    fn drop(&mut self) {
        // This precedes the withdrawal, after which the daemon may assign the segment to another
        // put.
        self.end_writing();
    }
}
