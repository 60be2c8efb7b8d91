use std::num::NonZeroU32;
use std::time::Duration;

use tssd_format::{Attrs, Compression};

use crate::ledger::{Durability, JobId, WriterSet};
use crate::merge::DivergencePolicy;
use crate::route::Transport;

/// How a state dict is put. The default suits a single writer.
#[derive(Clone, Debug)]
pub struct PutOptions {
    /// The number of the version, such as the training step. None is the highest number + 1.
    pub version: Option<u64>,
    /// The global rank of this writer. None is the rank of the dict's meshes, or the only writer.
    pub writer: Option<u32>,
    /// All writers of the version. None is all ranks of the dict's meshes, or one writer if it has none.
    pub writers: Option<WriterSet>,
    /// The run that the contribution belongs to. A single writer needs none.
    ///
    /// All writers of a run have the same job, and each run has a new one.
    pub job: Option<JobId>,
    /// Attributes of the whole state dict, such as the metadata of safetensors.
    ///
    /// Writers that set the same attribute must agree on its value.
    pub attrs: Attrs,
    /// How to merge a plain leaf on which writers disagree.
    pub on_divergence: DivergencePolicy,
    /// Which replicas of a shard are stored.
    pub replicas: Replicas,
    /// When a version whose number is not above the highest opens a new epoch.
    pub rewind: Rewind,
    /// Whether the put fails if an element of a tensor is NaN or infinite. It reads all elements once more.
    ///
    /// What counts is the dtype in which an element is stored.
    pub check_finite: bool,
    /// Whether leaves without a type of the format are accepted ([`tssd_format::Value::Opaque`]).
    pub allow_opaque: bool,
    /// How storages are compressed. None by default, so that a read is one copy.
    pub compression: Compression,
    /// Whether the archive contains BLAKE3 digests: one for each storage, and one for the whole archive.
    pub digests: bool,
    /// Whether the version outlives its daemon, or its host. All writers must agree.
    ///
    /// A store in a directory keeps every version on disk, and a store in a bucket keeps it there.
    pub durability: Durability,
    /// The memory that holds tensors of GPUs after the put.
    pub residency: Residency,
    /// The transport that must be used. None accepts each.
    pub require_transport: Option<Transport>,
    /// How long to wait for other writers and for memory.
    pub timeout: Duration,
}

impl Default for PutOptions {
    fn default() -> Self {
        Self {
            version: None,
            writer: None,
            writers: None,
            job: None,
            attrs: Attrs::new(),
            on_divergence: DivergencePolicy::default(),
            replicas: Replicas::default(),
            rewind: Rewind::default(),
            check_finite: false,
            allow_opaque: false,
            compression: Compression::None,
            digests: false,
            durability: Durability::default(),
            residency: Residency::default(),
            require_transport: None,
            timeout: Duration::from_mins(1),
        }
    }
}

/// When a put whose number is not above the highest one opens a new epoch and retires the newer versions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Rewind {
    /// If the newer versions are of other runs which have ended, and are neither durable nor pinned.
    ///
    /// So a program can run any number of times. Spec: `spec/reshard.md`, R-086.
    #[default]
    IfRunsEnded,
    /// Never: the put is refused.
    Never,
    /// Always.
    Always,
}

/// Which replicas of a shard are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Replicas {
    /// The replica of the writer whose coordinate is 0 in each replicated dimension.
    ///
    /// The other writers contribute the metadata of the shard without its bytes.
    #[default]
    Primary,
    /// All replicas.
    All,
}

/// The memory that holds tensors of GPUs after a put.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Residency {
    /// Host memory. Every reader can use it, and the archive contains checksums.
    #[default]
    Host,
    /// Memory of the same GPU, in an immutable copy. Readers of that GPU copy within its memory.
    ///
    /// It needs GPU memory for each version that is kept, and for one more. The store cannot read the bytes, so there
    /// are no checksums. If a GPU cannot hold the copy, host memory does, unless [`Transport::CudaIpc`] is required.
    Device,
    /// Buckets that are reused: the version is streamed to its current receivers, and cannot be read later.
    ///
    /// The buckets are in the memory of the GPU, or in host memory. They are the only memory that is needed. The put
    /// returns when all [receivers](crate::Store::receiver) have the version.
    Ring(Ring),
    /// The tensors themselves: receivers copy from them once.
    ///
    /// It needs memory of `cuMemAlloc` (torch's default; not with expandable segments) and processes of one PID
    /// namespace. Tensors that cannot be exported go through the ring, and `transport_reason` of the report says why.
    InPlace(Ring),
}

impl Residency {
    /// The ring that a version is streamed through.
    pub(crate) fn ring(self) -> Option<Ring> {
        match self {
            Self::Host | Self::Device => None,
            Self::Ring(ring) | Self::InPlace(ring) => Some(ring),
        }
    }
}

/// The buckets that a version is streamed through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ring {
    /// Bytes of a bucket. Larger tensors are split.
    pub bucket_bytes: u64,
    /// Number of buckets: one is filled while readers copy from the others.
    pub buckets: NonZeroU32,
    /// Number of readers that must be present when the put begins.
    pub readers: u64,
}

/// Two buckets of 512 MiB, for at least one reader.
impl Default for Ring {
    fn default() -> Self {
        Self { bucket_bytes: 512 << 20, buckets: NonZeroU32::MIN.saturating_add(1), readers: 1 }
    }
}

impl Ring {
    /// The most bytes that the archive of a bucket has in front of its index, unless one element is larger.
    pub(crate) fn max_data_bytes(&self) -> u64 {
        self.bucket_bytes.saturating_add(HEAD_AND_GAP_BYTES)
    }
}

/// The head of an archive, and the gap up to its first tensor.
const HEAD_AND_GAP_BYTES: u64 = 2 * 4096;
