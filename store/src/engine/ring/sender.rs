//! The sending side of a ring.

use std::collections::BTreeSet;
#[cfg(target_os = "linux")]
use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

#[cfg(target_os = "linux")]
use tokio::sync::oneshot;
use tssd_format::{Error as FormatError, ErrorKind as FormatKind, StateDict, Value};

use super::bucket::BucketBuilder;
#[cfg(target_os = "linux")]
use super::exporter_key;
use super::{BucketHeader, RING_ATTR, channel};
#[cfg(target_os = "linux")]
use crate::device;
use crate::engine::context::Context;
use crate::engine::get::GetOptions;
use crate::engine::put::{PutOptions, PutReport, Residency, Rewind, Ring, Role};
use crate::error::{Error, ErrorKind, Result};
use crate::io::environment::{Environment, SystemEnvironment};
use crate::io::sync::boxed;
use crate::key::Key;
use crate::ledger::{
    ArchiveDigest, Durability, EarlierRun, Obstacle, Refusal, RunStatus, WriterSet,
};
#[cfg(target_os = "linux")]
use crate::route::Transport;

/// Puts a state dict to the current [receivers](crate::Store::receiver). Returns when all have read it.
pub(crate) async fn put(
    context: &Arc<Context>,
    key: &Key,
    dict: &StateDict,
    options: &PutOptions,
    ring: Ring,
) -> Result<PutReport> {
    let mut sender = Sender::new(context, key, options, ring)?;
    for (path, leaf) in dict.leaves() {
        sender.enqueue_new(&path.fqn(), leaf)?;
    }
    sender.finish().await
}

/// A put of a version through a ring.
pub(crate) struct Sender {
    context: Arc<Context>,
    key: Key,
    options: PutOptions,
    ring: Ring,
    started: Instant,
    writer: u32,
    /// The fqns of all leaves.
    names: BTreeSet<String>,
    builder: BucketBuilder,
    /// Leaves to export. If no tensors are exported, leaves go to `builder`.
    pending: Vec<(String, Value)>,
    active: Option<ActivePut>,
    /// Why tensors were not exported.
    export_failure: Option<String>,
}

/// The state of a put from its first bucket on.
struct ActivePut {
    device: Option<String>,
    channel: Key,
    version: u64,
    /// Identity of this put.
    put: u64,
    readers: u64,
    /// Number of buckets that were put.
    parts: u64,
    /// The sum of the reports of all buckets.
    report: Option<PutReport>,
    digests: Vec<u8>,
}

impl ActivePut {
    /// Returns the header of the next bucket.
    fn header(&self, is_last: bool) -> BucketHeader {
        let Self { version, put, parts: part, .. } = *self;
        BucketHeader { version, put, part, is_last, is_exported: false }
    }
}

impl Sender {
    pub(crate) fn new(
        context: &Arc<Context>,
        key: &Key,
        options: &PutOptions,
        ring: Ring,
    ) -> Result<Self> {
        if options.durability != Durability::Memory || options.digests {
            let text = "what goes through a ring stays nowhere: durability and digests need residency=host";
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        Ok(Self {
            context: context.clone(),
            key: key.clone(),
            options: options.clone(),
            ring,
            started: Instant::now(),
            writer: single_writer(&format!("key `{key}`"), &StateDict::new(), options)?,
            names: BTreeSet::new(),
            builder: BucketBuilder::new(ring.bucket_bytes),
            pending: Vec::new(),
            active: None,
            export_failure: None,
        })
    }

    fn exports(&self) -> bool {
        matches!(self.options.residency, Residency::InPlace(_))
    }

    /// Accepts a leaf that was not added before.
    fn enqueue_new(&mut self, fqn: &str, leaf: &Value) -> Result<()> {
        self.reserve_fqn(fqn)?;
        self.enqueue(fqn, leaf)
    }

    /// Reserves the fqn of a leaf. Returns an error if it is reserved already.
    pub(crate) fn reserve_fqn(&mut self, fqn: &str) -> Result<()> {
        if self.names.insert(fqn.to_owned()) {
            return Ok(());
        }
        let error = FormatError::new(FormatKind::AmbiguousFqn);
        Err(Error::from_request(format_args!("`{fqn}`"), error))
    }

    fn enqueue(&mut self, fqn: &str, leaf: &Value) -> Result<()> {
        if let Value::Shards(_) = leaf {
            // The meshes of its shards may name other writers.
            let mut alone = StateDict::new();
            alone.insert(fqn, leaf.clone());
            single_writer(&format!("`{fqn}`"), &alone, &self.options)?;
        }
        if self.exports() {
            self.pending.push((fqn.to_owned(), leaf.clone()));
            return Ok(());
        }
        self.builder.add(fqn, leaf)
    }

    /// Adds a leaf, and puts all full buckets but one.
    ///
    /// The leaf must not change until [`Sender::flush`] or [`Sender::finish`] returns.
    pub(crate) async fn add(&mut self, fqn: &str, leaf: &Value) -> Result<()> {
        self.enqueue_new(fqn, leaf)?;
        // The header of the last bucket says that it is the last one. So one full bucket is kept.
        while self.builder.full_count() > 1 {
            self.put_full(false).await?;
        }
        Ok(())
    }

    /// Adds a part of a tensor whose fqn is reserved, and puts it.
    pub(crate) async fn add_part(&mut self, fqn: &str, part: &Value) -> Result<()> {
        self.enqueue(fqn, part)?;
        self.put_all(false).await
    }

    /// Puts all leaves that were added.
    pub(crate) async fn flush(&mut self) -> Result<()> {
        self.put_all(false).await
    }

    /// Puts the remaining leaves. Returns when all receivers have read everything.
    pub(crate) async fn finish(mut self) -> Result<PutReport> {
        self.put_all(true).await?;
        let active = self.active.take().expect("there is one bucket at least");
        wait_until_read(&self.context, &active.channel, 0, self.options.timeout).await?;
        let report = active.report.expect("it is put");
        let mut transport_reason =
            format!("{}; {} readers took it", report.transport_reason, active.readers);
        if let Some(reason) = &self.export_failure {
            transport_reason = format!("{transport_reason}; not in place: {reason}");
        }
        Ok(PutReport {
            version: active.version,
            digest: ArchiveDigest::compute(&active.digests),
            transport_reason,
            seconds: self.started.elapsed().as_secs_f64(),
            ..report
        })
    }

    async fn put_all(&mut self, is_last: bool) -> Result<()> {
        let pending = std::mem::take(&mut self.pending);
        if !pending.is_empty() {
            match self.export_leaves(&pending, is_last).await? {
                ExportOutcome::Received => return Ok(()),
                ExportOutcome::Impossible(why) => {
                    self.export_failure = Some(why);
                    for (fqn, leaf) in &pending {
                        self.builder.add(fqn, leaf)?;
                    }
                }
            }
        }
        self.builder.flush()?;
        while self.builder.full_count() > 1 {
            self.put_full(false).await?;
        }
        if self.builder.full_count() > 0 || is_last { self.put_full(is_last).await } else { Ok(()) }
    }

    /// Puts the first full bucket, or an empty one if there is none.
    async fn put_full(&mut self, is_last: bool) -> Result<()> {
        let bucket = self.builder.pop().unwrap_or_default();
        self.begin(&bucket).await?;
        let active = self.active.as_ref().expect("it has begun");
        let max_unread = u64::from(self.ring.buckets.get()) - 1;
        wait_until_read(&self.context, &active.channel, max_unread, self.options.timeout).await?;
        let header = active.header(is_last);
        let residency = Residency::Ring(self.ring);
        // An empty bucket uses no transport.
        let require = self.options.require_transport.filter(|_| !bucket.entries().is_empty());
        let put =
            PutOptions { residency, require_transport: require, ..self.bucket_options(header) };
        let report = self.context.put(&active.channel, &bucket, &put).await?;
        self.count(report);
        Ok(())
    }

    /// Returns the options to put a bucket with.
    fn bucket_options(&self, header: BucketHeader) -> PutOptions {
        let mut attrs = self.options.attrs.clone();
        attrs.extend([header.to_attr()]);
        PutOptions {
            version: None,
            writer: Some(self.writer),
            writers: Some(WriterSet::one(self.writer)),
            job: None,
            attrs,
            rewind: Rewind::Never,
            ..self.options.clone()
        }
    }

    fn count(&mut self, report: PutReport) {
        let active = self.active.as_mut().expect("it has begun");
        active.parts += 1;
        active.digests.extend(report.digest.0);
        match &mut active.report {
            None => active.report = Some(report),
            Some(all) => {
                all.bytes += report.bytes;
                all.phases += report.phases;
                all.id = report.id;
            }
        }
    }

    /// Checks that a bucket goes to the channel of this put.
    ///
    /// The first bucket determines the channel, and waits for receivers there.
    async fn begin(&mut self, bucket: &StateDict) -> Result<()> {
        let device = device_of(bucket)?;
        if let Some(active) = &self.active {
            return match (&active.device, &device) {
                (known, Some(other)) if known.as_ref() != Some(other) => {
                    Err(mixed_devices(known.as_deref(), other))
                }
                _ => Ok(()),
            };
        }
        let channel = channel(&self.key, device.as_deref())?;
        let version = next_version(&self.context, &channel, &self.options).await?;
        let timeout = self.options.timeout;
        let readers =
            wait_for_receivers(&self.context, &channel, self.ring.readers, timeout).await?;
        let put = u64::try_from(SystemEnvironment.random_id() >> 64).expect("it is half of it");
        self.active = Some(ActivePut {
            device,
            channel,
            version,
            put,
            readers,
            parts: 0,
            report: None,
            digests: Vec::new(),
        });
        Ok(())
    }
}

/// Returns the writer of a version. A version that goes through a ring has no other writer.
fn single_writer(what: &str, dict: &StateDict, options: &PutOptions) -> Result<u32> {
    let role = Role::of(dict, options)?;
    if role.is_alone() {
        return Ok(role.writer());
    }
    let text = format_args!(
        "{what}: a version that goes through a ring has one writer: gather its shards, or put those of each rank under a \
         key of their own, with writers= that rank"
    );
    Err(Error::new(ErrorKind::Invalid, text))
}

/// The result of an attempt to export tensors.
enum ExportOutcome {
    /// All receivers have read the tensors.
    Received,
    /// The tensors cannot be exported. Contains the reason.
    Impossible(String),
}

#[cfg(not(target_os = "linux"))]
impl Sender {
    async fn export_leaves(
        &mut self,
        _pending: &[(String, Value)],
        _is_last: bool,
    ) -> Result<ExportOutcome> {
        Ok(ExportOutcome::Impossible("there are no GPUs here".to_owned()))
    }
}

#[cfg(target_os = "linux")]
impl Sender {
    /// Exports tensors to the receivers, and waits until all have read them.
    async fn export_leaves(
        &mut self,
        pending: &[(String, Value)],
        is_last: bool,
    ) -> Result<ExportOutcome> {
        if let Some(other) =
            self.options.require_transport.filter(|transport| *transport != Transport::CudaIpc)
        {
            return Ok(ExportOutcome::Impossible(format!("{other} is required")));
        }
        let mut builder = BucketBuilder::new(u64::MAX);
        for (fqn, leaf) in pending {
            builder.add(fqn, leaf)?;
        }
        builder.flush()?;
        let bucket = builder.pop().unwrap_or_default();
        self.begin(&bucket).await?;
        let active = self.active.as_ref().expect("it has begun");
        let export = match super::export::export(&bucket, active.device.as_deref()).await? {
            Ok(export) => export,
            Err(why) => return Ok(ExportOutcome::Impossible(why)),
        };
        let header = BucketHeader { is_exported: true, ..active.header(is_last) };
        let options = PutOptions {
            residency: Residency::Host,
            require_transport: None,
            ..self.bucket_options(header)
        };
        let (context, channel, left) =
            (self.context.clone(), active.channel.clone(), self.options.timeout);
        // Receivers see that the export is valid as long as this call and its connection exist.
        let _follower = context.controller().follow(&exporter_key(&channel, active.put)?).await?;
        let (caller_guard, caller_dropped) = oneshot::channel::<Infallible>();
        // The task continues if the caller drops the future. It holds the tensors until all have read them, or the
        // export is withdrawn.
        let task = tokio::spawn(boxed(async move {
            let put = context.put(&channel, &export.dict, &options).await;
            let all_read = match &put {
                Ok(_) => tokio::select! {
                    all_read = wait_until_read(&context, &channel, 0, left) => Some(all_read),
                    _ = caller_dropped => None,
                },
                Err(_) => None,
            };
            if !matches!(all_read, Some(Ok(()))) {
                // The export is withdrawn by a newer version: a receiver that is reading now finds it afterwards, and
                // discards what it has read.
                let header =
                    BucketHeader { part: u64::MAX, is_last: false, is_exported: false, ..header };
                let mut attrs = options.attrs.clone();
                attrs.extend([header.to_attr()]);
                let timeout = PutOptions::default().timeout;
                let options = PutOptions { attrs, timeout, ..options };
                context.put(&channel, &StateDict::new(), &options).await?;
            }
            all_read.transpose()?;
            drop(bucket);
            put.map(|report| export.report(report))
        }));
        let cancelled = |error| Error::io("the put was cut off", std::io::Error::other(error));
        let result = task.await;
        drop(caller_guard);
        self.count(result.map_err(cancelled)??);
        Ok(ExportOutcome::Received)
    }
}

/// Returns the GPU that holds the tensors of a state dict. `None` is host memory.
fn device_of(dict: &StateDict) -> Result<Option<String>> {
    #[cfg(target_os = "linux")]
    let devices =
        device::driver().map_or_else(|_| BTreeSet::new(), |driver| driver.devices_of(dict));
    #[cfg(not(target_os = "linux"))]
    let devices = BTreeSet::<String>::new();
    let mut devices = devices.into_iter();
    let device = devices.next();
    match devices.next() {
        None => Ok(device),
        Some(other) => Err(mixed_devices(device.as_deref(), &other)),
    }
}

fn mixed_devices(home: Option<&str>, other: &str) -> Error {
    let text = format_args!(
        "a ring is of one GPU, or of the host's memory, and tensors are {} and on {other}: put what is on each by itself",
        home.map_or("there".to_owned(), |home| format!("on {home}"))
    );
    Error::new(ErrorKind::Invalid, text)
}

/// Returns the number of the version: the requested one, or the one after the last version.
async fn next_version(context: &Context, channel: &Key, options: &PutOptions) -> Result<u64> {
    let last = match context.open(channel, &GetOptions::default()).await {
        // The number of an incomplete version may be used again.
        Ok(version) => version
            .attrs
            .get(RING_ATTR)
            .and_then(BucketHeader::parse)
            .map(|header| header.version.saturating_sub(u64::from(!header.is_last))),
        Err(error) if error.kind() == ErrorKind::NotFound => None,
        Err(error) => return Err(error),
    };
    let next = last.map_or(1, |last| last.saturating_add(1));
    match (options.version, last) {
        (Some(number), Some(highest)) if number <= highest && options.rewind != Rewind::Always => {
            let earlier = match earlier_run(context, channel, options).await? {
                Some(RunStatus::Disconnected) => return Ok(number),
                Some(RunStatus::Connected(process)) => {
                    let obstacle = Obstacle::Connected;
                    Some(EarlierRun { process, version: highest, obstacle })
                }
                Some(RunStatus::Unknown) | None => None,
            };
            let refusal = Refusal::VersionNotNewer { number, highest, earlier };
            Err(Error::from_refusal(channel, refusal))
        }
        (Some(number), _) => Ok(number),
        (None, _) => Ok(next),
    }
}

/// Returns the status of the run that has put the last version of a channel, if that is another run.
async fn earlier_run(
    context: &Context,
    channel: &Key,
    options: &PutOptions,
) -> Result<Option<RunStatus>> {
    if options.rewind == Rewind::Never {
        return Ok(None);
    }
    let last = context.controller().versions(channel).await?.pop();
    // Buckets are put without a job.
    let own = context.writer_process().run_process(None).run;
    match last.and_then(|last| last.process).filter(|process| process.run != own) {
        Some(process) => context.controller().run_status(&process.run).await.map(Some),
        None => Ok(None),
    }
}

/// Waits until at least `wanted` receivers exist. Returns their number.
async fn wait_for_receivers(
    context: &Context,
    channel: &Key,
    wanted: u64,
    timeout: Duration,
) -> Result<u64> {
    let since = Instant::now();
    loop {
        let (readers, _) =
            context.controller().wait_until_read(channel, u64::MAX, Duration::ZERO).await?;
        if readers >= wanted.max(1) {
            return Ok(readers);
        }
        if since.elapsed() >= timeout {
            let text = format_args!(
                "`{channel}`: {readers} readers are there to receive it, {wanted} are wanted: open a receiver in each \
                 before the put"
            );
            return Err(Error::new(ErrorKind::Busy, text));
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Waits until at most `max_unread` buckets are unread.
async fn wait_until_read(
    context: &Context,
    channel: &Key,
    max_unread: u64,
    timeout: Duration,
) -> Result<()> {
    let since = Instant::now();
    let (readers, unread) = loop {
        let left = timeout.saturating_sub(since.elapsed());
        let (readers, unread) =
            context.controller().wait_until_read(channel, max_unread, left).await?;
        if unread <= max_unread {
            return Ok(());
        }
        // The daemon limits how long one request waits.
        if since.elapsed() >= timeout {
            break (readers, unread);
        }
    };
    let text = format_args!(
        "`{channel}`: {unread} buckets have not been taken by all {readers} readers for {timeout:?}: `status` says \
         who holds them"
    );
    Err(Error::new(ErrorKind::Busy, text))
}
