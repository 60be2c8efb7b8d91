use std::collections::BTreeSet;
use std::sync::Arc;

use tssd_format::{AttrValue, Shard, ShardSpec, StateDict, Value};

use crate::engine::context::Context;
use crate::engine::put::{PutOptions, PutReport, Replicas, Ring, VersionWriter, split_tensor};
use crate::engine::ring::Sender;
use crate::error::{Error, ErrorKind, Result};
use crate::key::Key;
use crate::ledger::JobId;

/// Puts a state dict entry by entry: see [`Store::publish`](crate::Store::publish).
///
/// Dropping it before [`Publisher::finish`] withdraws the version.
#[must_use = "a version is invisible before it is finished"]
pub struct Publisher {
    key: Key,
    /// Names of the entries so far.
    names: BTreeSet<String>,
    sink: Sink,
}

/// The destination of the entries.
enum Sink {
    Version(Box<BucketWriter>),
    Ring(Box<Sender>),
}

impl Publisher {
    pub(super) fn new(
        context: &Arc<Context>,
        key: &Key,
        options: &PutOptions,
        bucket_bytes: u64,
    ) -> Result<Self> {
        if bucket_bytes == 0 {
            return Err(Error::new(ErrorKind::Invalid, "buckets of no bytes hold nothing"));
        }
        let sink = match options.residency.ring() {
            Some(ring) => {
                let ring = Ring { bucket_bytes, ..ring };
                Sink::Ring(Box::new(Sender::new(context, key, options, ring)?))
            }
            None => {
                Sink::Version(Box::new(BucketWriter::new(context, key, options, bucket_bytes)?))
            }
        };
        Ok(Self { key: key.clone(), names: BTreeSet::new(), sink })
    }

    /// Adds an entry of the state dict. Writes the bucket if it is full.
    ///
    /// A tensor that is larger than a bucket is split. A get returns it whole. Tensors must keep
    /// their contents until the version is finished, or [`Publisher::flush`] returns.
    ///
    /// # Errors
    ///
    /// As [`Store::put_state_dict`](crate::Store::put_state_dict). After an error the version is
    /// withdrawn.
    pub async fn add(&mut self, name: impl Into<String>, value: impl Into<Value>) -> Result<()> {
        let (name, value) = (name.into(), value.into());
        self.add_name(&name).await?;
        match &mut self.sink {
            Sink::Version(writer) => writer.add(name, value).await,
            Sink::Ring(sender) => {
                let mut dict = StateDict::new();
                dict.insert(name, value);
                for (path, leaf) in dict.leaves() {
                    sender.add(&path.fqn(), leaf).await?;
                }
                Ok(())
            }
        }
    }

    /// Adds a tensor part by part.
    ///
    /// In addition to the version, only one part is in memory.
    ///
    /// # Errors
    ///
    /// As [`Publisher::add`].
    ///
    /// # Examples
    ///
    /// ```
    /// use tssd_format::{Dtype, Shard, ShardSpec, Tensor, TensorSlice};
    /// use tssd_store::{GetOptions, Key, PutOptions, Store, pieces};
    /// # tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
    /// let (store, key) = (Store::memory(), Key::new("policy")?);
    /// let mut publisher = store.publish(&key, &PutOptions::default(), 64 << 20)?;
    /// let mut parts = publisher.parts("weight").await?;
    /// for region in pieces(&[3, 2], Dtype::Uint8, 4)? {
    ///     let bytes = vec![7_u8; usize::try_from(region.shape().iter().product::<u64>())?];
    ///     let part = Tensor::from_slice(&bytes, region.shape())?;
    ///     let slice = TensorSlice::new(region.offsets(), region.shape(), &[3, 2])?;
    ///     parts.add([Shard::new(part, ShardSpec::new(slice))?]).await?;
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
        self.add_name(&name).await?;
        if let Sink::Ring(sender) = &mut self.sink {
            sender.reserve_fqn(&name)?;
        }
        Ok(Parts { sink: &mut self.sink, name })
    }

    /// Records the name of an entry. Fails if an earlier entry has it.
    async fn add_name(&mut self, name: &str) -> Result<()> {
        if self.names.insert(name.to_owned()) {
            return Ok(());
        }
        let text = format!("`{name}` was added before: publish another version of it");
        let error = Error::new(ErrorKind::Invalid, text);
        Err(match &mut self.sink {
            Sink::Version(writer) => writer.version.withdraw(error).await,
            Sink::Ring(_) => error,
        })
    }

    /// Sets job and writer, unless the options have set the job.
    ///
    /// A version with shards needs both. Without a job, or after the first archive is written, the
    /// call has no effect.
    ///
    /// # Errors
    ///
    /// As [`Store::publish`](crate::Store::publish).
    pub fn identify(&mut self, job: Option<JobId>, writer: Option<u32>) -> Result<()> {
        match &mut self.sink {
            Sink::Version(writing) => {
                let version = &mut writing.version;
                if version.has_begun() || version.options().job.is_some() || job.is_none() {
                    return Ok(());
                }
                let options = version.options_mut();
                options.job = job;
                options.writer = options.writer.or(writer);
                version.renumber()
            }
            // A ring has one writer.
            Sink::Ring(_) => Ok(()),
        }
    }

    /// Sets an attribute of the whole state dict. Archives that are written later contain it.
    pub fn describe(&mut self, name: impl Into<String>, value: AttrValue) {
        match &mut self.sink {
            Sink::Version(writer) => {
                drop(writer.version.options_mut().attrs.insert(name.into(), value));
            }
            // Its buckets have the attributes of the first one.
            Sink::Ring(_) => {}
        }
    }

    /// Returns whether this writer stores the bytes of a shard at this place.
    ///
    /// Unless all replicas are stored, only the first is. A ring has no other writer, so it sends
    /// each.
    pub fn stores(&self, place: &ShardSpec) -> bool {
        match &self.sink {
            Sink::Version(writer) => {
                writer.version.options().replicas == Replicas::All || place.is_first_replica()
            }
            Sink::Ring(_) => true,
        }
    }

    /// Returns whether an archive has been written.
    ///
    /// From then on the writers of the version are fixed.
    pub fn has_begun(&self) -> bool {
        match &self.sink {
            Sink::Version(writer) => writer.version.has_begun(),
            Sink::Ring(_) => false,
        }
    }

    /// Writes the pending entries. Their memory can be reused afterwards.
    ///
    /// # Errors
    ///
    /// As [`Publisher::add`].
    pub async fn flush(&mut self) -> Result<()> {
        match &mut self.sink {
            Sink::Version(writer) => writer.flush().await,
            Sink::Ring(sender) => sender.flush().await,
        }
    }

    /// Writes the pending entries and commits.
    ///
    /// The version is visible if all other writers have committed.
    ///
    /// # Errors
    ///
    /// As [`Store::put_state_dict`](crate::Store::put_state_dict).
    pub async fn finish(self) -> Result<PutReport> {
        match self.sink {
            Sink::Version(writer) => writer.finish().await,
            Sink::Ring(sender) => sender.finish().await,
        }
    }
}

/// Adds a tensor part by part: see [`Publisher::parts`].
pub struct Parts<'a> {
    sink: &'a mut Sink,
    name: String,
}

impl Parts<'_> {
    /// Adds a part, such as one of [`pieces`](crate::pieces), and writes it.
    ///
    /// Its memory can be reused afterwards. A part consists of any number of shards. All parts
    /// together must cover the tensor.
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
        match self.sink {
            Sink::Version(writer) => {
                writer.add_unsplit(self.name.clone(), part).await?;
                writer.flush().await
            }
            Sink::Ring(sender) => sender.add_part(&self.name, &part).await,
        }
    }
}

/// Collects entries in archives of about `bucket_bytes` bytes.
struct BucketWriter {
    version: VersionWriter,
    bucket_bytes: u64,
    /// The entries of the next archive.
    pending: StateDict,
    /// Number of bytes of the tensors in `pending`.
    pending_bytes: u64,
}

impl BucketWriter {
    fn new(context: &Context, key: &Key, options: &PutOptions, bucket_bytes: u64) -> Result<Self> {
        let span = tracing::debug_span!("publish", %key, version = tracing::field::Empty);
        let (controller, process) = (context.controller(), context.writer_process());
        let version = VersionWriter::new(controller, process, key, options, span)?;
        Ok(Self { version, bucket_bytes, pending: StateDict::new(), pending_bytes: 0 })
    }

    async fn add(&mut self, name: String, value: Value) -> Result<()> {
        let tensor = match &value {
            Value::Tensor(tensor) if tensor.meta().nbytes() > self.bucket_bytes => tensor,
            _ => return self.add_unsplit(name, value).await,
        };
        let parts = split_tensor(tensor, self.bucket_bytes);
        let parts = parts.map_err(|error| Error::from_request(format_args!("`{name}`"), error))?;
        for part in parts {
            self.add_unsplit(name.clone(), part.into()).await?;
            // The next part has the same name.
            self.flush().await?;
        }
        Ok(())
    }

    async fn add_unsplit(&mut self, name: String, value: Value) -> Result<()> {
        let bytes = tensor_bytes(&value);
        if self.pending_bytes > 0 && self.pending_bytes.saturating_add(bytes) > self.bucket_bytes {
            self.flush().await?;
        }
        self.pending.insert(name, value);
        self.pending_bytes = self.pending_bytes.saturating_add(bytes);
        Ok(())
    }

    async fn flush(&mut self) -> Result<()> {
        if self.pending.entries().is_empty() { Ok(()) } else { self.write().await }
    }

    async fn write(&mut self) -> Result<()> {
        self.pending_bytes = 0;
        self.version.write(&std::mem::take(&mut self.pending), false).await
    }

    async fn finish(mut self) -> Result<PutReport> {
        if !self.version.has_begun() || !self.pending.entries().is_empty() {
            self.write().await?;
        }
        self.version.stage().await?.commit(|_| {}).await
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

/// Returns the number of bytes of the tensors of an entry that is one leaf.
fn tensor_bytes(value: &Value) -> u64 {
    match value {
        Value::Tensor(tensor) => tensor.meta().nbytes(),
        Value::Shards(shards) => shards.iter().map(|shard| shard.tensor().meta().nbytes()).sum(),
        _ => 0,
    }
}
