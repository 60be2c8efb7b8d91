//! The receiving side of a ring.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tssd_format::{Error as FormatError, ErrorKind as FormatKind, Region};

use super::bucket::leaves_of;
use super::{BucketHeader, RING_ATTR, channel, exporter_key};
use crate::control::VersionFollower;
#[cfg(target_os = "linux")]
use crate::device::Segment;
use crate::engine::context::Context;
use crate::engine::get::{GetOptions, Read, Target};
use crate::engine::version::OpenVersion;
use crate::error::{Error, ErrorKind, Result};
use crate::key::Key;
use crate::route::{Route, Transport};

/// Receives versions that are put with [`Residency::Ring`](crate::Residency::Ring).
///
/// [`Store::receiver`](crate::Store::receiver) creates it. Such puts wait for each receiver until it is dropped.
pub struct Receiver {
    context: Arc<Context>,
    /// The key of the buckets.
    channel: Key,
    follower: Box<dyn VersionFollower>,
    /// The GPU that it receives from. `None` is host memory.
    device: Option<String>,
    /// The last exported memory. It stays mapped, because the next export mostly uses the same allocations.
    #[cfg(target_os = "linux")]
    exported: Option<Arc<dyn Segment>>,
}

/// The result of a receive.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct ReceiveReport {
    /// The number of the version.
    pub version: u64,
    /// Number of buckets of the version.
    pub buckets: u64,
    /// Bytes of tensors that were copied.
    pub bytes: u64,
    /// The transport of the bytes.
    pub transport: Transport,
    /// Why this transport was used.
    pub transport_reason: String,
    /// The time from the arrival of the first bucket, in seconds.
    pub seconds: f64,
}

impl Receiver {
    pub(crate) async fn new(
        context: &Arc<Context>,
        key: &Key,
        device: Option<&str>,
    ) -> Result<Self> {
        let channel = channel(key, device)?;
        let follower = context.controller().follow(&channel).await?;
        Ok(Self {
            context: context.clone(),
            channel,
            follower,
            device: device.map(str::to_owned),
            #[cfg(target_os = "linux")]
            exported: None,
        })
    }

    /// Fills the caller's tensors with the next version, bucket by bucket.
    ///
    /// # Errors
    ///
    /// `NotFound` if no complete version arrives within `timeout`, or if a version does not contain all requested
    /// elements; else as [`Store::get_state_dict_into`](crate::Store::get_state_dict_into).
    ///
    /// [`Error::is_target_modified`] says whether the targets contain a part of a version. The next complete version
    /// overwrites it.
    pub async fn receive(
        &mut self,
        targets: &mut [Target<'_>],
        options: &GetOptions,
        timeout: Duration,
    ) -> Result<ReceiveReport> {
        let mut is_modified = false;
        let received = self.receive_next(targets, options, timeout, &mut is_modified).await;
        received.map_err(|error| if is_modified { error.with_target_modified() } else { error })
    }

    async fn receive_next(
        &mut self,
        targets: &mut [Target<'_>],
        options: &GetOptions,
        timeout: Duration,
        is_modified: &mut bool,
    ) -> Result<ReceiveReport> {
        // The required transport is checked only for buckets that contain tensors.
        let bucket_options = GetOptions { require_transport: None, ..options.clone() };
        let mut partial: Option<PartialVersion> = None;
        let since = Instant::now();
        loop {
            let left = timeout.saturating_sub(since.elapsed());
            let bucket = match self
                .context
                .open_next(&self.channel, &mut *self.follower, &bucket_options, left)
                .await?
            {
                Some(bucket) => bucket,
                // The daemon limits how long one request waits.
                None if since.elapsed() < timeout => continue,
                None => return Err(self.missing_version(partial.as_ref())),
            };
            let header =
                bucket.attrs.get(RING_ATTR).and_then(BucketHeader::parse).ok_or_else(|| {
                    Error::new(ErrorKind::Corrupt, format_args!("`{}`: no bucket", &self.channel))
                })?;
            if header.part == 0 {
                partial = Some(PartialVersion::new(&header, targets.len()));
            }
            // A bucket is ignored if its put began before this receiver existed, or if it does not continue the current
            // put.
            let Some(version) = partial.as_mut().filter(|version| version.is_next(&header)) else {
                partial = None;
                continue;
            };
            let exported = match header.is_exported.then(|| self.open_export(&bucket, options)) {
                // An export ends with its writer, which may happen before it is opened here.
                Some(Err(_)) if !self.is_export_valid(&bucket, &header).await? => {
                    partial = None;
                    continue;
                }
                exported => exported.transpose()?,
            };
            let source = exported.as_ref().unwrap_or(&bucket);
            let leaves = leaves_of(source)?;
            if version.route.is_none() || !leaves.is_empty() {
                source
                    .route()
                    .check_required(options.require_transport.filter(|_| !leaves.is_empty()))?;
                version.route = Some(source.route().clone());
            }
            let mut read = Read::new(source, self.context.get(), options);
            let filled = read.fill_parts(targets, &leaves);
            *is_modified |= match &filled {
                Ok(filled) => !filled.is_empty(),
                Err(error) => error.is_target_modified(),
            };
            let filled = filled?;
            if header.is_exported && !self.is_export_valid(&bucket, &header).await? {
                // The writer may have written to the tensors meanwhile: the version is discarded.
                partial = None;
                continue;
            }
            version.next += 1;
            version.bytes += read.report().bytes_transferred;
            for (at, region) in filled {
                version.filled[at].push(region);
            }
            if header.is_last {
                version.check_complete(targets)?;
                let route = version.route.take().expect("it has come some way");
                return Ok(ReceiveReport {
                    version: header.version,
                    buckets: version.next,
                    bytes: version.bytes,
                    transport: route.transport,
                    transport_reason: route.reason,
                    seconds: version.since.elapsed().as_secs_f64(),
                });
            }
        }
    }

    /// Returns whether an export is still valid: its writer is present, and has put no later bucket.
    async fn is_export_valid(&self, bucket: &OpenVersion, header: &BucketHeader) -> Result<bool> {
        let channel = &self.channel;
        let exporter = exporter_key(channel, header.put)?;
        let (exporters, _) =
            self.context.controller().wait_until_read(&exporter, u64::MAX, Duration::ZERO).await?;
        let newest = self.context.controller().versions(channel).await?.pop();
        Ok(exporters > 0 && newest.is_some_and(|newest| newest.id == bucket.id))
    }

    #[cfg(not(target_os = "linux"))]
    fn open_export(&self, _bucket: &OpenVersion, _options: &GetOptions) -> Result<OpenVersion> {
        Err(Error::new(ErrorKind::Unsupported, "there are no GPUs here"))
    }

    /// Opens the tensors that a bucket exports.
    #[cfg(target_os = "linux")]
    fn open_export(&mut self, bucket: &OpenVersion, options: &GetOptions) -> Result<OpenVersion> {
        let table = Read::new(bucket, self.context.get(), options).state_dict(options)?;
        let device = self.device.as_deref().ok_or_else(|| {
            Error::new(
                ErrorKind::Corrupt,
                "exported GPU memory was sent to a receiver in host memory",
            )
        })?;
        let (exported, memory) = super::export::open(&table, bucket, device)?;
        self.exported = Some(memory);
        Ok(exported)
    }

    fn missing_version(&self, partial: Option<&PartialVersion>) -> Error {
        let key = &self.channel;
        match partial {
            None => Error::new(ErrorKind::NotFound, format_args!("`{key}`: no version has come")),
            Some(partial) => {
                let (version, buckets) = (partial.version, partial.next);
                let text = format_args!(
                    "`{key}`: of version {version} {buckets} buckets have come, and no more: its writer may have ended"
                );
                Error::new(ErrorKind::NotFound, text)
            }
        }
    }
}

impl std::fmt::Debug for Receiver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Receiver").field("key", &self.channel).finish_non_exhaustive()
    }
}

/// A version of which some buckets have arrived.
struct PartialVersion {
    version: u64,
    put: u64,
    since: Instant,
    /// Index of the next bucket.
    next: u64,
    bytes: u64,
    /// Route of the last bucket that contained tensors.
    route: Option<Route>,
    /// The regions of each target that have arrived.
    filled: Vec<Vec<Region>>,
}

impl PartialVersion {
    fn new(header: &BucketHeader, targets: usize) -> Self {
        let (BucketHeader { version, put, .. }, filled) = (*header, vec![Vec::new(); targets]);
        Self { version, put, since: Instant::now(), next: 0, bytes: 0, route: None, filled }
    }

    fn is_next(&self, header: &BucketHeader) -> bool {
        (self.version, self.put, self.next) == (header.version, header.put, header.part)
    }

    /// Checks that all requested elements have arrived.
    fn check_complete(&self, targets: &[Target<'_>]) -> Result<()> {
        for (target, filled) in targets.iter().zip(&self.filled) {
            let wanted = match &target.shard_spec {
                Some(place) => place.slice().region().clone(),
                None => Region::whole(target.meta.shape()),
            };
            let mut holes = vec![wanted];
            for region in filled {
                holes = holes.iter().flat_map(|hole| hole.subtract(region)).collect();
            }
            if let Some(hole) = holes.into_iter().find(|hole| !hole.is_empty()) {
                let error = FormatError::new(FormatKind::Uncovered)
                    .with_path(&*target.fqn)
                    .with_region(hole.offsets(), hole.shape());
                return Err(Error::from_request(format_args!("version {}", self.version), error));
            }
        }
        Ok(())
    }
}
