//! The readers' side of a ring.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tssd_format::{Error as FormatError, ErrorKind as FormatKind, Region};

use super::bucket::leaves_of;
use super::{MARK, Mark, channel, lender};
use crate::control::Following;
#[cfg(target_os = "linux")]
use crate::device::Segment;
use crate::engine::context::Context;
use crate::engine::get::{GetOptions, Read, Target};
use crate::engine::version::OpenVersion;
use crate::error::{Error, ErrorKind, Result};
use crate::key::Key;
use crate::route::{Route, Transport};

/// Receives versions that are put with [`Residency::Ring`](crate::Residency::Ring): see [`Store::receiver`](crate::Store::receiver). As long as it is there, such puts
/// wait for it.
pub struct Receiver {
    context: Arc<Context>,
    /// The key of the buckets.
    channel: Key,
    following: Box<dyn Following>,
    /// The GPU that it receives from.
    device: Option<String>,
    /// What was lent last: what comes next is in the same allocations, mostly, which stay open so.
    #[cfg(target_os = "linux")]
    lent: Option<Arc<dyn Segment>>,
}

/// What was received.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct ReceiveReport {
    /// The number of the version.
    pub version: u64,
    /// In how many buckets it came.
    pub buckets: u64,
    /// How many bytes of tensors were copied.
    pub bytes: u64,
    /// How the bytes came.
    pub transport: Transport,
    /// Why that way.
    pub why: String,
    /// How long it took, from when its first bucket was there.
    pub seconds: f64,
}

impl Receiver {
    pub(crate) async fn new(
        context: &Arc<Context>,
        key: &Key,
        device: Option<&str>,
    ) -> Result<Self> {
        let channel = channel(key, device)?;
        let following = context.controller().follow(&channel).await?;
        Ok(Self {
            context: context.clone(),
            channel,
            following,
            device: device.map(str::to_owned),
            #[cfg(target_os = "linux")]
            lent: None,
        })
    }

    /// Fills the caller's tensors with the next version, bucket by bucket, as they come.
    ///
    /// # Errors
    ///
    /// `NotFound` if no version has come whole within `timeout`, or one does not have all that is wanted; else as
    /// [`Store::get_state_dict_into`](crate::Store::get_state_dict_into). [`Error::is_target_modified`] says whether a part of a version is in the
    /// targets: then the next one that comes whole mends that.
    pub async fn receive(
        &mut self,
        targets: &mut [Target<'_>],
        options: &GetOptions,
        timeout: Duration,
    ) -> Result<ReceiveReport> {
        let mut is_modified = false;
        let received = self.next(targets, (options, timeout), &mut is_modified).await;
        received.map_err(|error| if is_modified { error.target_modified() } else { error })
    }

    async fn next(
        &mut self,
        targets: &mut [Target<'_>],
        (options, patience): (&GetOptions, Duration),
        is_modified: &mut bool,
    ) -> Result<ReceiveReport> {
        // Which way is required is looked at where something comes that way.
        let any = GetOptions { require: None, ..options.clone() };
        let mut coming: Option<Coming> = None;
        let since = Instant::now();
        loop {
            let left = patience.saturating_sub(since.elapsed());
            let bucket = match self
                .context
                .open_next(&self.channel, &mut *self.following, &any, left)
                .await?
            {
                Some(bucket) => bucket,
                // A daemon does not wait as long as one may want.
                None if since.elapsed() < patience => continue,
                None => return Err(self.nothing(coming.as_ref())),
            };
            let mark = bucket.attrs.get(MARK).and_then(Mark::of).ok_or_else(|| {
                Error::new(ErrorKind::Corrupt, format_args!("`{}`: no bucket", &self.channel))
            })?;
            if mark.part == 0 {
                coming = Some(Coming::new(&mark, targets.len()));
            }
            // What began before this was there, or does not go on with what it began with.
            let Some(version) = coming.as_mut().filter(|version| version.is_next(&mark)) else {
                coming = None;
                continue;
            };
            let lent = match mark.is_lent.then(|| self.borrow(&bucket, options)) {
                // What it has lent goes with its writer, before anybody has opened it too.
                Some(Err(_)) if !self.is_lent(&bucket, &mark).await? => {
                    coming = None;
                    continue;
                }
                lent => lent.transpose()?,
            };
            let source = lent.as_ref().unwrap_or(&bucket);
            let leaves = leaves_of(source)?;
            if version.route.is_none() || !leaves.is_empty() {
                source.route().admit(options.require.filter(|_| !leaves.is_empty()))?;
                version.route = Some(source.route().clone());
            }
            let mut read = Read::new(source, self.context.get(), options);
            let filled = read.fill_parts(targets, &leaves);
            *is_modified |= match &filled {
                Ok(filled) => !filled.is_empty(),
                Err(error) => error.is_target_modified(),
            };
            let filled = filled?;
            if mark.is_lent && !self.is_lent(&bucket, &mark).await? {
                // Whoever has lent it may have written there meanwhile: it is as if it had not come.
                coming = None;
                continue;
            }
            version.next += 1;
            version.bytes += read.report().bytes_transferred;
            for (at, region) in filled {
                version.filled[at].push(region);
            }
            if mark.is_last {
                version.prove(targets)?;
                let route = version.route.take().expect("it has come some way");
                return Ok(ReceiveReport {
                    version: mark.version,
                    buckets: version.next,
                    bytes: version.bytes,
                    transport: route.transport,
                    why: route.why,
                    seconds: version.since.elapsed().as_secs_f64(),
                });
            }
        }
    }

    /// Whether what a bucket lends is still lent: its writer is there, and has put nothing after it.
    async fn is_lent(&self, bucket: &OpenVersion, mark: &Mark) -> Result<bool> {
        let channel = &self.channel;
        let lender = lender(channel, mark.put)?;
        let (lenders, _) =
            self.context.controller().unread(&lender, u64::MAX, Duration::ZERO).await?;
        let newest = self.context.controller().versions(channel).await?.pop();
        Ok(lenders > 0 && newest.is_some_and(|newest| newest.id == bucket.id))
    }

    #[cfg(not(target_os = "linux"))]
    fn borrow(&self, _bucket: &OpenVersion, _options: &GetOptions) -> Result<OpenVersion> {
        Err(Error::new(ErrorKind::Unsupported, "there are no GPUs here"))
    }

    /// What a bucket says is lent.
    #[cfg(target_os = "linux")]
    fn borrow(&mut self, bucket: &OpenVersion, options: &GetOptions) -> Result<OpenVersion> {
        let table = Read::new(bucket, self.context.get(), options).state_dict(options)?;
        let device = self.device.as_deref().ok_or_else(|| {
            Error::new(ErrorKind::Corrupt, "memory of a GPU that is lent to readers of the host's")
        })?;
        let (lent, memory) = super::export::open(&table, bucket, device)?;
        self.lent = Some(memory);
        Ok(lent)
    }

    fn nothing(&self, coming: Option<&Coming>) -> Error {
        let key = &self.channel;
        match coming {
            None => Error::new(ErrorKind::NotFound, format_args!("`{key}`: no version has come")),
            Some(coming) => {
                let (version, buckets) = (coming.version, coming.next);
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

/// A version on its way.
struct Coming {
    version: u64,
    put: u64,
    since: Instant,
    /// The part that comes next.
    next: u64,
    bytes: u64,
    /// The way of the last bucket that had something.
    route: Option<Route>,
    /// The boxes of each target that have come.
    filled: Vec<Vec<Region>>,
}

impl Coming {
    fn new(mark: &Mark, targets: usize) -> Self {
        let (Mark { version, put, .. }, filled) = (*mark, vec![Vec::new(); targets]);
        Self { version, put, since: Instant::now(), next: 0, bytes: 0, route: None, filled }
    }

    fn is_next(&self, mark: &Mark) -> bool {
        (self.version, self.put, self.next) == (mark.version, mark.put, mark.part)
    }

    /// All that is wanted has come.
    fn prove(&self, targets: &[Target<'_>]) -> Result<()> {
        for (target, filled) in targets.iter().zip(&self.filled) {
            let wanted = match &target.place {
                Some(place) => place.slice().region(),
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
                return Err(Error::request(format_args!("version {}", self.version), error));
            }
        }
        Ok(())
    }
}
