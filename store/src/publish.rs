//! Putting a state dict piece by piece: one version of many archives, visible at the end.

use std::collections::BTreeSet;
use std::time::Instant;

use tracing::Instrument;
use tssd_format::{
    AttrValue, Dtype, Error as FormatError, Region, Shard, ShardPlace, StateDict, Tensor,
    TensorMeta, TensorSlice, Value,
};

use crate::controller::{Begun, Committed, Contribution, OnDevice, Proposal, digest};
use crate::error::{Error, ErrorKind, Result};
use crate::key::Key;
use crate::ledger::{Digest, JobId, VersionId};
use crate::put::{
    PutOptions, PutPhases, PutReport, Replicas, Role, arrange, call, proposal, residency, stored,
    write,
};
use crate::ring::{Ring, Sender};
use crate::route::Route;
use crate::store::Store;

/// A version that is being published: see [`Store::publish`]. Dropped before [`Publisher::finish`], it
/// leaves nothing behind.
#[must_use = "nobody sees a version before it is finished"]
pub struct Publisher {
    key: Key,
    /// Of what was added.
    names: BTreeSet<String>,
    to: To,
}

/// Where what is added goes.
enum To {
    Version(Box<Writing>),
    Ring(Box<Sender>),
}

impl Publisher {
    pub(crate) fn new(
        store: Store,
        key: &Key,
        options: &PutOptions,
        bucket_bytes: u64,
    ) -> Result<Self> {
        if bucket_bytes == 0 {
            return Err(Error::new(ErrorKind::Invalid, "buckets of no bytes hold nothing"));
        }
        let to = match options.residency.ring() {
            Some(ring) => {
                let ring = Ring { bucket_bytes, ..ring };
                To::Ring(Box::new(Sender::new(&store, key, options, ring)?))
            }
            None => To::Version(Box::new(Writing::new(store, key, options, bucket_bytes)?)),
        };
        Ok(Self { key: key.clone(), names: BTreeSet::new(), to })
    }

    /// Adds an entry of the state dict. When a bucket is full, it is written; a tensor that is larger
    /// than a bucket is cut, and comes back whole. Tensors must keep their contents until the version is
    /// finished, or [`Publisher::flush`] returns.
    ///
    /// # Errors
    ///
    /// As [`Store::put_state_dict`]. After an error nothing is left of the version.
    pub async fn add(&mut self, name: impl Into<String>, value: impl Into<Value>) -> Result<()> {
        let (name, value) = (name.into(), value.into());
        self.prove_new(&name).await?;
        match &mut self.to {
            To::Version(writing) => writing.add(name, value).await,
            To::Ring(sender) => {
                let mut dict = StateDict::new();
                dict.insert(name, value);
                for (path, leaf) in dict.leaves() {
                    sender.add(&path.fqn(), leaf).await?;
                }
                Ok(())
            }
        }
    }

    /// A tensor of this name that is added part by part, as it is made: no more than a part of it is there beside the
    /// version.
    ///
    /// # Errors
    ///
    /// As [`Publisher::add`].
    ///
    /// # Examples
    ///
    /// ```
    /// use tssd_format::{Dtype, Shard, ShardPlace, Tensor, TensorSlice};
    /// use tssd_store::{GetOptions, Key, PutOptions, Store, pieces};
    /// # tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
    /// let (store, key) = (Store::memory(), Key::new("policy")?);
    /// let mut publisher = store.publish(&key, &PutOptions::default(), 64 << 20)?;
    /// let mut parts = publisher.parts("weight").await?;
    /// for region in pieces(&[3, 2], Dtype::Uint8, 4)? {
    ///     let bytes = vec![7_u8; usize::try_from(region.shape().iter().product::<u64>())?];
    ///     let part = Tensor::from_slice(&bytes, region.shape())?;
    ///     let slice = TensorSlice::new(region.offsets(), region.shape(), &[3, 2])?;
    ///     parts.add([Shard::new(part, ShardPlace::new(slice))?]).await?;
    /// }
    /// publisher.finish().await?;
    /// let whole = store.get(&key, "weight", &GetOptions::default()).await?;
    /// assert_eq!(whole, Tensor::from_slice(&[7_u8; 6], &[3, 2])?);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// # })?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub async fn parts(&mut self, name: impl Into<String>) -> Result<Parts<'_>> {
        let name = name.into();
        self.prove_new(&name).await?;
        if let To::Ring(sender) = &mut self.to {
            sender.take_name(&name)?;
        }
        Ok(Parts { to: &mut self.to, name })
    }

    /// Refuses a name that is taken.
    async fn prove_new(&mut self, name: &str) -> Result<()> {
        if self.names.insert(name.to_owned()) {
            return Ok(());
        }
        let text = format!("`{name}` was added before: publish another version of it");
        let error = Error::new(ErrorKind::Invalid, text);
        Err(match &mut self.to {
            To::Version(writing) => writing.withdraw(error).await,
            To::Ring(_) => error,
        })
    }

    /// Says of which job it is, and which writer, unless that is said: versions with shards need it. Nothing may
    /// be written yet.
    ///
    /// # Errors
    ///
    /// As [`Store::publish`].
    pub fn identify(&mut self, job: Option<JobId>, writer: Option<u32>) -> Result<()> {
        match &mut self.to {
            To::Version(writing) => writing.identify(job, writer),
            // Each bucket has one writer.
            To::Ring(_) => Ok(()),
        }
    }

    /// Says something of the state dict as a whole, in place of what was said of it under this name: archives that are
    /// written from now on have it.
    pub fn describe(&mut self, name: impl Into<String>, value: AttrValue) {
        match &mut self.to {
            To::Version(writing) => drop(writing.options.attrs.insert(name.into(), value)),
            // Its buckets are versions of their own, and have what the first one had.
            To::Ring(_) => {}
        }
    }

    /// Whether this writer stores what belongs there. Of replicas the first one is stored, unless all are to be; what goes
    /// through a ring has no other writer.
    pub fn stores(&self, place: &ShardPlace) -> bool {
        match &self.to {
            To::Version(writing) => {
                writing.options.replicas == Replicas::All || place.is_first_replica()
            }
            To::Ring(_) => true,
        }
    }

    /// Whether something is written: who contributes is settled then.
    pub fn has_begun(&self) -> bool {
        match &self.to {
            To::Version(writing) => writing.begun.is_some(),
            To::Ring(_) => false,
        }
    }

    /// Writes what has been added: its memory may be used for something else afterwards.
    ///
    /// # Errors
    ///
    /// As [`Publisher::add`].
    pub async fn flush(&mut self) -> Result<()> {
        match &mut self.to {
            To::Version(writing) => writing.flush().await,
            To::Ring(sender) => sender.flush().await,
        }
    }

    /// Writes what is left, and commits: the version is visible if no other writer's contribution is
    /// missing.
    ///
    /// # Errors
    ///
    /// As [`Store::put_state_dict`].
    pub async fn finish(self) -> Result<PutReport> {
        match self.to {
            To::Version(writing) => writing.finish().await,
            To::Ring(sender) => sender.finish().await,
        }
    }
}

/// A tensor that is added part by part, as it is made: see [`Publisher::parts`].
pub struct Parts<'a> {
    to: &'a mut To,
    name: String,
}

impl Parts<'_> {
    /// Adds a part, such as one of [`pieces`], and writes it: its memory may be used for something else afterwards. It may
    /// be several boxes; of no boxes nothing is written. All parts together make the tensor whole.
    ///
    /// # Errors
    ///
    /// As [`Publisher::add`].
    pub async fn add(&mut self, part: impl IntoIterator<Item = Shard>) -> Result<()> {
        let part: Vec<Shard> = part.into_iter().collect();
        if part.is_empty() {
            return Ok(());
        }
        let part = Value::Shards(part);
        match self.to {
            To::Version(writing) => {
                writing.add_whole(self.name.clone(), part).await?;
                writing.flush().await
            }
            To::Ring(sender) => sender.add_part(&self.name, &part).await,
        }
    }
}

/// A version of one archive after the other.
struct Writing {
    store: Store,
    route: Route,
    /// What it does is said in this.
    span: tracing::Span,
    key: Key,
    options: PutOptions,
    bucket_bytes: u64,
    call: Option<u64>,
    started: Instant,
    /// What is in no archive yet, and how many bytes its tensors have.
    pending: StateDict,
    pending_bytes: u64,
    begun: Option<Open>,
    /// Bytes of all archives.
    bytes: u64,
    phases: PutPhases,
}

/// The contribution, from the first archive on.
struct Open {
    id: VersionId,
    epoch: u32,
    number: u64,
    /// Whether nobody else contributes.
    is_alone: bool,
    /// What was committed in an earlier try: then nothing is written.
    committed: Option<Digest>,
    contribution: Box<dyn Contribution>,
    digests: Vec<u8>,
}

impl Writing {
    fn new(store: Store, key: &Key, options: &PutOptions, bucket_bytes: u64) -> Result<Self> {
        let call = call(store.calls(), key, options)?;
        let route = residency::admit(store.controller(), options)?;
        let span = tracing::debug_span!("publish", %key, version = tracing::field::Empty);
        Ok(Self {
            store,
            route,
            span,
            key: key.clone(),
            options: options.clone(),
            bucket_bytes,
            call,
            started: Instant::now(),
            pending: StateDict::new(),
            pending_bytes: 0,
            begun: None,
            bytes: 0,
            phases: PutPhases::default(),
        })
    }

    async fn add(&mut self, name: String, value: Value) -> Result<()> {
        let tensor = match &value {
            Value::Tensor(tensor) if tensor.meta().nbytes() > self.bucket_bytes => tensor,
            _ => return self.add_whole(name, value).await,
        };
        let pieces = cut(tensor, self.bucket_bytes);
        let pieces = pieces.map_err(|error| Error::request(format_args!("`{name}`"), error))?;
        for piece in pieces {
            self.add_whole(name.clone(), piece.into()).await?;
            // The next piece has the same name.
            self.flush().await?;
        }
        Ok(())
    }

    fn identify(&mut self, job: Option<JobId>, writer: Option<u32>) -> Result<()> {
        if self.begun.is_some() || self.options.job.is_some() || job.is_none() {
            return Ok(());
        }
        self.options.job = job;
        self.options.writer = self.options.writer.or(writer);
        self.call = call(self.store.calls(), &self.key, &self.options)?;
        Ok(())
    }

    async fn add_whole(&mut self, name: String, value: Value) -> Result<()> {
        let bytes = bytes_of(&value);
        if self.pending_bytes > 0 && self.pending_bytes.saturating_add(bytes) > self.bucket_bytes {
            self.flush().await?;
        }
        self.pending.insert(name, value);
        self.pending_bytes = self.pending_bytes.saturating_add(bytes);
        Ok(())
    }

    async fn flush(&mut self) -> Result<()> {
        if self.pending.entries().is_empty() {
            return Ok(());
        }
        self.write().await
    }

    /// Writes an archive of what is pending.
    async fn write(&mut self) -> Result<()> {
        let dict = std::mem::take(&mut self.pending);
        self.pending_bytes = 0;
        let span = self.span.clone();
        match self.write_archive(&dict).instrument(span).await {
            Ok(()) => Ok(()),
            Err(error) => Err(self.withdraw(error).await),
        }
    }

    async fn write_archive(&mut self, dict: &StateDict) -> Result<()> {
        let started = Instant::now();
        let is_alone = match &self.begun {
            Some(open) => open.is_alone,
            None => Role::of(dict, &self.options)?.is_alone(),
        };
        let controller = self.store.controller();
        let host = controller.route();
        let seen = residency::beside(controller, dict, is_alone, &self.options).await?;
        let layout = arrange(&self.key, &seen, &self.options, host.transport).await?;
        let (device, route) = residency::choose(controller, host, &layout, &self.options)?;
        // What is of this process's memory alone may go to the host's, whatever is required of the rest.
        if device.is_some() || layout.elsewhere().next().is_some() {
            route.admit(self.options.require)?;
            self.route = route;
        }
        let len = layout.file_len();
        let arranged = Instant::now();
        let is_seen = device.is_none();
        let open = self.make_room(dict, len, device).await?;
        let begun = Instant::now();
        let (contribution, written) =
            write(open.contribution, layout, (open.committed.is_some(), is_seen)).await?;
        let open = Open { contribution, ..open };
        self.phases.arrange += (arranged - started).as_secs_f64();
        self.phases.begin += (begun - arranged).as_secs_f64();
        self.phases.write += begun.elapsed().as_secs_f64();
        tracing::debug!(bytes = len, seconds = started.elapsed().as_secs_f64(), "bucket");
        let open = self.begun.insert(open);
        let digest = written?;
        let digest = if is_seen { digest } else { residency::unseen(digest, open.id) };
        open.digests.extend(digest.0);
        self.bytes += len;
        Ok(())
    }

    /// Room for the next archive: the first one begins the contribution.
    async fn make_room(
        &mut self,
        dict: &StateDict,
        len: u64,
        device: Option<OnDevice>,
    ) -> Result<Open> {
        if let Some(mut open) = self.begun.take() {
            open.contribution.extend(len, device).await?;
            return Ok(open);
        }
        let role = Role::of(dict, &self.options)?;
        let is_alone = role.is_alone();
        let proposal = Proposal { device, ..proposal(role, self.call, &self.options, len) };
        let begun = self.store.controller().begin(&self.key, proposal).await?;
        let Begun { id, epoch, number, committed, contribution } = begun;
        self.span.record("version", number);
        let digests = Vec::new();
        Ok(Open { id, epoch, number, is_alone, committed, contribution, digests })
    }

    async fn withdraw(&mut self, error: Error) -> Error {
        match self.begun.take() {
            Some(open) => open.contribution.withdraw(error).await,
            None => error,
        }
    }

    async fn finish(mut self) -> Result<PutReport> {
        if self.begun.is_none() || !self.pending.entries().is_empty() {
            self.write().await?;
        }
        if let Err(error) = self.route.admit(self.options.require) {
            return Err(self.withdraw(error).await);
        }
        let open = self.begun.take().expect("an archive is written");
        // One archive has the digest that a put would give it.
        let digest = match <[u8; 16]>::try_from(open.digests.as_slice()) {
            Ok(only) => Digest(only),
            Err(_) => digest(&open.digests),
        };
        let written = Instant::now();
        let commit = async {
            let Committed { progress, storing } = open.contribution.commit(digest).await?;
            let commit = written.elapsed().as_secs_f64();
            let stored = stored(storing).await?;
            let store = written.elapsed().as_secs_f64() - commit;
            Ok::<_, Error>((progress, stored, PutPhases { commit, store, ..self.phases }))
        };
        let (progress, stored, phases) = commit.instrument(self.span.clone()).await?;
        Ok(PutReport {
            version: open.number,
            epoch: open.epoch,
            id: open.id,
            digest,
            visible: progress.visible,
            missing: progress.missing,
            stored,
            bytes: self.bytes,
            transport: self.route.transport,
            why: self.route.why,
            phases,
            seconds: self.started.elapsed().as_secs_f64(),
        })
    }
}

impl std::fmt::Debug for Publisher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Publisher").field("key", &self.key).finish_non_exhaustive()
    }
}

impl std::fmt::Debug for Parts<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Parts").field("name", &self.name).finish_non_exhaustive()
    }
}

/// How many bytes the tensors of an entry have that is one leaf.
fn bytes_of(value: &Value) -> u64 {
    match value {
        Value::Tensor(tensor) => tensor.meta().nbytes(),
        Value::Shards(shards) => shards.iter().map(|shard| shard.tensor().meta().nbytes()).sum(),
        _ => 0,
    }
}

/// The boxes of at most so many bytes, or of one element, that a tensor of this shape and dtype is cut into.
///
/// # Errors
///
/// `Invalid` if there is no such shape.
pub fn pieces(shape: &[u64], dtype: Dtype, limit: u64) -> Result<Vec<Region>> {
    boxes(shape, dtype, limit).map_err(|error| Error::request("a shape", error))
}

fn boxes(shape: &[u64], dtype: Dtype, limit: u64) -> Result<Vec<Region>, FormatError> {
    TensorMeta::new(dtype, shape)?;
    let mut boxes = Vec::new();
    let (mut offsets, mut sizes) = (vec![0; shape.len()], shape.to_vec());
    cut_box(&mut offsets, &mut sizes, 0, limit / dtype.itemsize(), &mut boxes)?;
    Ok(boxes)
}

/// Cuts a tensor into its pieces.
pub(crate) fn cut(tensor: &Tensor, limit: u64) -> Result<Vec<Shard>, FormatError> {
    let meta = tensor.meta();
    let (itemsize, strides) = (meta.dtype().itemsize(), meta.strides());
    let piece = |region: &Region| {
        let places = region.offsets().iter().zip(&strides);
        let offset: u64 = places.map(|(at, stride)| at * stride).sum();
        let meta = TensorMeta::new(meta.dtype(), region.shape())?
            .with_strides(&strides)?
            .with_flags(meta.flags());
        let local =
            Tensor::new(meta, tensor.storage().clone(), tensor.byte_offset() + offset * itemsize)?;
        let slice = TensorSlice::new(region.offsets(), region.shape(), tensor.meta().shape())?;
        Shard::new(local, ShardPlace::new(slice))
    };
    boxes(meta.shape(), meta.dtype(), limit)?.iter().map(piece).collect()
}

/// Cuts a box along a dimension, and along the next ones where a single step is still too large.
fn cut_box(
    offsets: &mut [u64],
    shape: &mut [u64],
    dim: usize,
    limit: u64,
    boxes: &mut Vec<Region>,
) -> Result<(), FormatError> {
    let numel: u64 = shape.iter().product();
    if numel <= limit || dim == shape.len() {
        boxes.push(Region::new(offsets, shape)?);
        return Ok(());
    }
    let (start, size) = (offsets[dim], shape[dim]);
    let step = (limit / (numel / size)).max(1);
    let mut at = 0;
    while at < size {
        (offsets[dim], shape[dim]) = (start + at, step.min(size - at));
        cut_box(offsets, shape, dim + 1, limit, boxes)?;
        at += step;
    }
    (offsets[dim], shape[dim]) = (start, size);
    Ok(())
}
