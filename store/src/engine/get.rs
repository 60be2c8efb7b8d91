//! Gets: a version, or parts of it, as values or in the caller's memory.

mod device_parts;
mod in_memory;
mod plans;
mod read_set;
mod target;
mod value_builder;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use indexmap::IndexMap;
use tssd_format::{
    Attrs, Error as FormatError, ErrorKind as FormatKind, Node, ObjectPath, Region, Runs,
    ShardSpec, StateDict, Tensor, TensorMeta, TensorReference, TensorSlice, Value, copy_runs,
    zeroed,
};

pub(crate) use self::plans::PlanCache;
use self::plans::{Coverage, GlobalRegion, LeafSelector, Plan, PlanLayout, Request};
use self::target::check_size;
pub use self::target::{LeafPart, Target, TargetMemory};
use crate::blob::{RangeJob, VerifyMode};
use crate::control::{Controller, ReadStats};
use crate::convert::{to_u64, to_usize};
use crate::engine::get::read_set::{ReadSet, TensorRequest};
use crate::engine::get::value_builder::ValueBuilder;
use crate::engine::lazy_path::{LazyPath, for_each_leaf};
use crate::engine::version::{OpenVersion, ReadCounters};
use crate::error::{Error, ErrorKind, Result};
use crate::io::cancel::{CancelCheck, CancelToken};
use crate::io::cow_map::CowBuffer;
use crate::io::exec::block_in_place;
use crate::io::parallel;
use crate::ledger::{ArchiveDigest, Selector, VersionId};
use crate::plan::{self, RegionCopy, SingleCopy, StorageId, TensorLeaf};
use crate::route::Transport;

/// How a state dict is read. The default reads the newest version as a whole.
#[derive(Clone, Debug, Default)]
pub struct GetOptions {
    /// The version: the newest by default, or one by number, id or label.
    pub version: Selector,
    /// The writer whose values are read where writers hold different ones.
    ///
    /// Such versions are put with [`Divergent::Keep`](crate::DivergencePolicy::Keep).
    pub writer: Option<u32>,
    /// The slices of each leaf, by fqn. All other leaves are read as a whole.
    pub slices: BTreeMap<String, Vec<ShardSpec>>,
    /// Whether checksums are ignored. Compressed chunks are verified in any case.
    pub unverified: bool,
    /// The transport that must be used. None accepts each.
    pub require_transport: Option<Transport>,
}

/// The result of a get.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct GetReport {
    /// The number of the version.
    pub version: u64,
    /// The epoch of the version: the number of rewinds of the key before it.
    pub epoch: u32,
    /// The identity of the version.
    pub id: VersionId,
    /// Digest of the contents. Equal digests mean equal contents.
    ///
    /// For a version of one writer it is the digest of its put.
    pub digest: ArchiveDigest,
    /// Attributes of the whole state dict.
    pub attrs: Attrs,
    /// Bytes of the requested tensors. Tied tensors count once.
    pub bytes_needed: u64,
    /// Bytes of tensors that were copied, or that views give access to.
    pub bytes_transferred: u64,
    /// Bytes that were received over a connection, from another host or a bucket.
    ///
    /// It is more than was requested if further bytes are cheaper than a further request, or if parts of chunks are
    /// needed, because chunks can only be verified as a whole.
    pub bytes_received: u64,
    /// Bytes that were checksummed. Each chunk of a version is checksummed once.
    pub bytes_verified: u64,
    /// The transport of the bytes.
    pub transport: Transport,
    /// Why this transport was used.
    pub transport_reason: String,
    /// The time to plan the copies, in seconds.
    pub plan_seconds: f64,
    /// The time of the get, in seconds.
    pub seconds: f64,
}

/// Minimum bytes of targets for one thread: fewer are copied before a thread has started.
const MIN_BYTES_PER_THREAD: usize = 1 << 20;

/// Storages of fewer bytes are verified on the calling thread.
const MIN_PARALLEL_STORAGE_BYTES: u64 = 64 << 10;

/// The state that all gets of one store share.
pub(crate) struct GetContext {
    pub(crate) controller: Arc<dyn Controller>,
    pub(crate) plans: PlanCache,
}

/// A read in progress: the version and the counters of the read.
pub(crate) struct Read<'a> {
    version: &'a OpenVersion,
    context: &'a GetContext,
    unverified: bool,
    writer: Option<u32>,
    cancel_check: Option<CancelCheck<'a>>,
    started: Instant,
    copy_time: Duration,
    /// The time to plan the copies so far.
    plan_time: Duration,
    before: ReadCounters,
    needed: u64,
    transferred: u64,
}

impl<'a> Read<'a> {
    pub(crate) fn new(
        version: &'a OpenVersion,
        context: &'a GetContext,
        options: &GetOptions,
    ) -> Self {
        Self {
            version,
            context,
            unverified: options.unverified,
            writer: options.writer,
            cancel_check: None,
            plan_time: Duration::ZERO,
            started: Instant::now(),
            copy_time: Duration::ZERO,
            before: version.counters(),
            needed: 0,
            transferred: 0,
        }
    }

    pub(crate) fn report(&self) -> GetReport {
        let ReadCounters { verified, received } = self.version.counters().since(self.before);
        GetReport {
            version: self.version.number,
            epoch: self.version.epoch,
            id: self.version.id,
            digest: self.version.digest,
            attrs: self.version.attrs.clone(),
            bytes_needed: self.needed,
            bytes_transferred: self.transferred,
            bytes_received: received,
            bytes_verified: verified,
            transport: self.version.route().transport,
            transport_reason: self.version.route().reason.clone(),
            plan_seconds: self.plan_time.as_secs_f64(),
            seconds: self.started.elapsed().as_secs_f64(),
        }
    }

    /// Reads the whole state dict, or slices of its leaves where they are requested.
    ///
    /// A leaf that lies in one archive as a whole is a view. Other leaves are assembled. Tied leaves stay tied.
    pub(crate) fn state_dict(&mut self, options: &GetOptions) -> Result<StateDict> {
        let root = self.version.tree(options.writer)?;
        let path = LazyPath::Full(&ObjectPath::root());
        if !options.slices.is_empty() {
            let mut names = BTreeSet::new();
            for_each_leaf(path, &root, &mut |path, node| {
                if TensorLeaf::of(node).is_some() {
                    names.insert(path.path().fqn());
                }
            });
            if let Some(fqn) = options.slices.keys().find(|fqn| !names.contains(*fqn)) {
                return Err(
                    self.format_error(FormatError::new(FormatKind::NotFound).with_path(fqn))
                );
            }
        }
        let mut read_set = ReadSet::default();
        for_each_leaf(path, &root, &mut |path, node| read_set.add(path, node, &options.slices));
        let needed = read_set.needed_bytes();
        let tree = self.load_tree(read_set, &options.slices)?;
        self.needed += needed;
        let value = tree.value(path, &root);
        value.and_then(StateDict::from_value).map_err(|error| self.format_error(error))
    }

    /// Reads the storages and the tensors of a read set.
    fn load_tree<'w>(
        &mut self,
        read_set: ReadSet<'w>,
        slices: &'w BTreeMap<String, Vec<ShardSpec>>,
    ) -> Result<ValueBuilder<'w>> {
        let views = self.load_views(read_set.viewed_storages)?;
        let assembled = self.assemble(&read_set.tensor_requests)?;
        let made = read_set.tensor_requests.into_keys().zip(assembled).collect();
        Ok(ValueBuilder { views, assembled: made, slices })
    }

    /// Reads whole storages, in the given order. They are views where possible.
    pub(crate) fn storages(&mut self, storages: &[u32]) -> Result<Vec<Bytes>> {
        let views = self.load_views(storages.iter().copied().collect())?;
        self.needed += views.values().map(|bytes| to_u64(bytes.len())).sum::<u64>();
        Ok(storages.iter().map(|storage| views[storage].clone()).collect())
    }

    /// Returns whole storages in copy-on-write memory of the caller, where that needs no copy.
    pub(crate) fn cow_buffers(&mut self, storages: &[u32]) -> Result<Vec<Option<CowBuffer>>> {
        let private = self.version.cow_buffers(storages)?;
        let found = storages.iter().zip(&private).filter(|(_, found)| found.is_some());
        let found = found.map(|(storage, _)| *storage);
        if self.unverified {
            self.transferred += found.map(|storage| self.version.storage_len(storage)).sum::<u64>();
        } else {
            self.load_views(found.collect())?;
        }
        Ok(private)
    }

    /// Reads one leaf: a view if it lies in one archive as a whole, or its requested slices.
    pub(crate) fn leaf(
        &mut self,
        path: &ObjectPath,
        node: &Node,
        options: &GetOptions,
    ) -> Result<Value> {
        let mut read_set = ReadSet::default();
        read_set.add(LazyPath::Full(path), node, &options.slices);
        let tree = self.load_tree(read_set, &options.slices)?;
        tree.value(LazyPath::Full(path), node).map_err(|error| self.format_error(error))
    }

    /// Reads one tensor, or one region of it.
    pub(crate) fn tensor(
        &mut self,
        fqn: &str,
        region: Option<&Region>,
        writer: Option<u32>,
    ) -> Result<Tensor> {
        let node = self.version.tensor(fqn, writer)?;
        let leaf = tensor_leaf(&node);
        if region.is_none()
            && let Some(whole) = leaf.whole()
            && let Some(tensor) = self.view_tensor(whole)?
        {
            return Ok(tensor);
        }
        let global_shape = leaf.global_shape();
        let whole = Region::whole(global_shape);
        let region = region.unwrap_or(&whole);
        let (offsets, shape) = (region.offsets(), region.shape());
        let meta = self.meta(leaf, shape)?;
        let mut memory = allocate(meta.nbytes())?;
        self.needed += meta.nbytes();
        let region = Some(GlobalRegion { offsets, shape, global_shape });
        let request = Request { leaf: LeafSelector::Fqn(fqn), region, meta: &meta };
        let memories = vec![(&mut memory).into()];
        self.fill(&[request], Coverage::Whole, memories)?;
        Tensor::new(meta, memory.into(), 0).map_err(|error| self.format_error(error))
    }

    /// Returns a view of a tensor; `None` if its archive is remote.
    fn view_tensor(&mut self, reference: &TensorReference) -> Result<Option<Tensor>> {
        let TensorReference { meta, storage, byte_offset, .. } = reference;
        let storage = storage.map(StorageId::Own);
        if storage.is_some_and(|storage| self.version.remote_archive(storage).is_some()) {
            return Ok(None);
        }
        let span = *byte_offset..byte_offset + meta.span_bytes();
        let bytes = storage.map(|storage| self.version.view(storage, span, self.unverified));
        let bytes = bytes.transpose()?.unwrap_or_default();
        self.needed += meta.nbytes();
        self.transferred += meta.span_bytes();
        let tensor = Tensor::new(meta.clone(), bytes.into(), 0);
        tensor.map(Some).map_err(|error| self.format_error(error))
    }

    /// Returns the archives that contain parts of leaves.
    pub(crate) fn archives_of(&mut self, parts: &[LeafPart]) -> Result<BTreeSet<String>> {
        let plan = self.plan_parts(parts)?;
        Ok(self.version.archives_of(plan.copies().map(|copy| copy.storage)))
    }

    /// Plans the copies of parts of leaves to contiguous memory.
    fn plan_parts(&mut self, parts: &[LeafPart]) -> Result<Arc<Plan>> {
        let leaf = |part: &LeafPart| self.version.tensor(&part.fqn, self.writer);
        let leaves: Vec<Arc<Node>> = parts.iter().map(leaf).collect::<Result<_>>()?;
        let mut metas = Vec::with_capacity(parts.len());
        for (part, node) in parts.iter().zip(&leaves) {
            let leaf = tensor_leaf(node);
            let slice = part.shard_spec.as_ref().map(ShardSpec::slice);
            let shape = slice.map_or(leaf.global_shape(), TensorSlice::local_shape);
            metas.push(self.meta(leaf, shape)?);
        }
        let mut requests = Vec::with_capacity(parts.len());
        for ((part, node), meta) in parts.iter().zip(&leaves).zip(&metas) {
            requests.push(Request {
                leaf: LeafSelector::Leaf(&part.fqn, tensor_leaf(node)),
                region: part.shard_spec.as_ref().map(GlobalRegion::from),
                meta,
            });
        }
        self.plan(&requests, Coverage::Whole)
    }

    /// Fills the caller's tensors. Allocates no memory of their size.
    pub(crate) fn fill_targets(&mut self, targets: &mut [Target<'_>]) -> Result<()> {
        let mut requests = Vec::with_capacity(targets.len());
        let mut memories = Vec::with_capacity(targets.len());
        for target in targets {
            check_size(target).map_err(|error| self.format_error(error))?;
            let Target { fqn, shard_spec, meta, memory } = target;
            let region = shard_spec.as_ref().map(GlobalRegion::from);
            requests.push(Request { leaf: LeafSelector::Fqn(fqn), region, meta });
            memories.push(match memory {
                TargetMemory::Host(bytes) => TargetMemory::Host(bytes),
                TargetMemory::Device(blob) => TargetMemory::Device(*blob),
            });
        }
        self.fill(&requests, Coverage::Whole, memories)?;
        // The elements of a target do not overlap, so the sum is at most the bytes of the memory.
        self.needed += requests.iter().map(|request| request.meta.nbytes()).sum::<u64>();
        Ok(())
    }

    /// Fills the parts of the caller's tensors that these references hold. Other references hold the rest.
    ///
    /// Returns each filled region with the index of its target.
    pub(crate) fn fill_parts(
        &mut self,
        targets: &mut [Target<'_>],
        leaves: &BTreeMap<String, Vec<TensorReference>>,
    ) -> Result<Vec<(usize, Region)>> {
        let mut requests = Vec::new();
        let mut memories = Vec::new();
        let mut filled = Vec::new();
        for (at, target) in targets.iter_mut().enumerate() {
            check_size(target).map_err(|error| self.format_error(error))?;
            let Target { fqn, shard_spec, meta, memory } = target;
            let Some(references) = leaves.get(fqn) else { continue };
            let region = shard_spec.as_ref().map(GlobalRegion::from);
            let wanted = match &region {
                Some(part) => Region::new(part.offsets, part.shape)
                    .map_err(|error| self.format_error(error.with_path(&**fqn)))?,
                None => Region::whole(meta.shape()),
            };
            filled.extend(references.iter().filter_map(|reference| {
                plan::region(reference).intersect(&wanted).map(|region| (at, region))
            }));
            requests.push(Request {
                leaf: LeafSelector::Leaf(fqn, TensorLeaf::Run(references)),
                region,
                meta,
            });
            memories.push(match memory {
                TargetMemory::Host(bytes) => TargetMemory::Host(bytes),
                TargetMemory::Device(blob) => TargetMemory::Device(*blob),
            });
        }
        let before = self.transferred;
        self.fill(&requests, Coverage::Part, memories)?;
        self.needed += self.transferred - before;
        Ok(filled)
    }

    /// Reads and verifies the storages that leaves are views of.
    fn load_views(&mut self, storages: BTreeSet<u32>) -> Result<BTreeMap<u32, Bytes>> {
        let load = |storage: u32| -> Result<_> {
            let len = self.version.storage_len(storage);
            Ok((storage, self.version.view(storage.into(), 0..len, self.unverified)?))
        };
        let (remote, local): (Vec<u32>, Vec<u32>) = storages
            .into_iter()
            .partition(|storage| self.version.remote_archive((*storage).into()).is_some());
        // To pass a small storage to another thread takes longer than to verify it.
        let (small, large): (Vec<u32>, Vec<u32>) = local
            .into_iter()
            .partition(|storage| self.version.storage_len(*storage) < MIN_PARALLEL_STORAGE_BYTES);
        let mut views: BTreeMap<u32, Bytes> = parallel::map(large, load)?.into_iter().collect();
        views.extend(self.read_remote(remote)?);
        for storage in small {
            views.extend([load(storage)?]);
        }
        self.transferred += views.values().map(|bytes| to_u64(bytes.len())).sum::<u64>();
        Ok(views)
    }

    /// Reads whole remote storages into new memory.
    fn read_remote(&self, storages: Vec<u32>) -> Result<Vec<(u32, Bytes)>> {
        let whole = |storage: u32| RegionCopy {
            storage: storage.into(),
            source_offset: 0,
            target_offset: 0,
            runs: Runs::contiguous(self.version.storage_len(storage)),
            repeats: Vec::new(),
        };
        let copies: Vec<RegionCopy> = storages.iter().map(|storage| whole(*storage)).collect();
        let memories = storages.iter().map(|storage| allocate(self.version.storage_len(*storage)));
        let mut memories: Vec<Vec<u8>> = memories.collect::<Result<_>>()?;
        let copies = copies.iter().map(std::slice::from_ref);
        self.pull(copies.zip(memories.iter_mut().map(Vec::as_mut_slice)).collect())?;
        Ok(storages.into_iter().zip(memories.into_iter().map(Bytes::from)).collect())
    }

    /// Assembles tensors in new memory, one for each request.
    fn assemble(&mut self, tensors: &IndexMap<TensorRequest<'_>, String>) -> Result<Vec<Tensor>> {
        let mut metas = Vec::with_capacity(tensors.len());
        let mut memories = Vec::with_capacity(tensors.len());
        for (leaf, place) in tensors.keys() {
            let shape = place.map_or(leaf.global_shape(), |place| place.slice().local_shape());
            let meta = self.meta(*leaf, shape)?;
            memories.push(allocate(meta.nbytes())?);
            metas.push(meta);
        }
        let mut requests = Vec::with_capacity(tensors.len());
        for (((leaf, place), fqn), meta) in tensors.iter().zip(&metas) {
            requests.push(Request {
                leaf: LeafSelector::Leaf(fqn, *leaf),
                region: place.map(GlobalRegion::from),
                meta,
            });
        }
        let targets = memories.iter_mut().map(TargetMemory::from).collect();
        self.fill(&requests, Coverage::Whole, targets)?;
        let tensor = |(meta, memory): (TensorMeta, Vec<u8>)| Tensor::new(meta, memory.into(), 0);
        let assembled = metas.into_iter().zip(memories).map(tensor);
        assembled.collect::<tssd_format::Result<_>>().map_err(|error| self.format_error(error))
    }

    /// Plans all requests before any byte is copied, then copies on all cores.
    fn fill(
        &mut self,
        requests: &[Request<'_>],
        coverage: Coverage,
        targets: Vec<TargetMemory<'_>>,
    ) -> Result<()> {
        let plan = self.plan(requests, coverage)?;
        self.version.load_held(plan.copies().map(|copy| copy.storage))?;
        self.transferred += plan.bytes;
        let (mut parts, device_parts) = plan.split_targets(targets);
        let is_local = |copy: &SingleCopy<'_>| self.version.remote_archive(copy.storage).is_none();
        let fill = |(copies, target): &mut (&[RegionCopy], &mut [u8])| {
            let mut local = copies.iter().flat_map(RegionCopy::each).filter(is_local);
            local.try_for_each(|copy| self.copy(copy, target))
        };
        let started = Instant::now();
        let copied =
            parallel::map(split_shares(&mut parts), |share| share.iter_mut().try_for_each(fill));
        let filled = copied
            .and_then(|_| self.pull(parts))
            .and_then(|()| self.fill_device_parts(requests, device_parts));
        self.copy_time += started.elapsed();
        filled.map_err(Error::with_target_modified)
    }

    /// Fills targets with the bytes of remote archives.
    fn pull(&self, parts: Vec<(&[RegionCopy], &mut [u8])>) -> Result<()> {
        let Some(reader) = self.version.range_reader() else { return Ok(()) };
        let mut verified = 0;
        let mut jobs = Vec::new();
        for (copies, target) in parts {
            let mut range_copies = Vec::new();
            for copy in copies.iter().flat_map(RegionCopy::each) {
                if let Some(remote) = self.version.remote_archive(copy.storage) {
                    self.version.add_range_copies(remote, copy, self.unverified, &mut range_copies);
                }
            }
            let verifiable = range_copies.iter().filter(|each| each.verify != VerifyMode::Skip);
            verified += verifiable.map(|each| each.runs.total_bytes()).sum::<u64>();
            if !range_copies.is_empty() {
                jobs.push(RangeJob { target, copies: range_copies });
            }
        }
        let received = match self.cancel_check {
            Some(cancel_check) => {
                CancelToken::run_cancellable(cancel_check, |stop| reader.read_ranges(jobs, stop))?
            }
            None => reader.read_ranges(jobs, &CancelToken::default())?,
        };
        self.version.count(ReadCounters { verified, received });
        Ok(())
    }

    fn plan(&mut self, requests: &[Request<'_>], coverage: Coverage) -> Result<Arc<Plan>> {
        let started = Instant::now();
        let layout =
            PlanLayout { manifest: self.version.layout, groups: self.version.group_fingerprint() };
        let name = plans::plan_fingerprint(&layout, self.writer, requests, coverage);
        // The manifest itself names its layout. A false name must not lead to a read beyond the end of a storage.
        let cached =
            self.context.plans.get(&name).filter(|plan| plan.fits(self.version.storage_lens()));
        let plan = cached.map_or_else(|| self.new_plan(name, requests, coverage), Ok);
        self.plan_time += started.elapsed();
        plan
    }

    fn new_plan(
        &self,
        name: [u8; 32],
        requests: &[Request<'_>],
        coverage: Coverage,
    ) -> Result<Arc<Plan>> {
        let mut plan = Plan::default();
        for request in requests {
            let added = match request.leaf {
                LeafSelector::Leaf(_, leaf) => plan.add(request, leaf, coverage),
                LeafSelector::Fqn(fqn) => {
                    let node = self.version.tensor(fqn, self.writer)?;
                    plan.add(request, tensor_leaf(&node), coverage)
                }
            };
            added.map_err(|error| self.format_error(error))?;
        }
        let plan = Arc::new(plan);
        self.context.plans.insert(name, plan.clone());
        Ok(plan)
    }

    fn copy(&self, copy: SingleCopy<'_>, target: &mut [u8]) -> Result<()> {
        let span = copy.runs.source_span();
        let range = copy.source_offset..copy.source_offset + span;
        let target = &mut target[to_usize(copy.target_offset)..];
        if copy.runs.loops().is_empty() {
            let target = &mut target[..to_usize(span)];
            return self.version.copy(copy.storage, range, target, self.unverified);
        }
        let mut window = self.version.window(copy.storage, range, self.unverified)?;
        let bytes = window.bytes.clone();
        copy_runs(copy.runs, &bytes, target, |run| window.verify(&run))
    }

    /// Returns the metadata of a contiguous tensor with the dtype of a leaf.
    fn meta(&self, leaf: TensorLeaf<'_>, shape: &[u64]) -> Result<TensorMeta> {
        TensorMeta::new(leaf.dtype(), shape)
            .map(|meta| meta.with_flags(leaf.flags()))
            .map_err(|error| self.format_error(error))
    }

    fn format_error(&self, error: FormatError) -> Error {
        Error::from_request(format_args!("version {}", self.version.number), error)
    }
}

/// Fills the caller's tensors from a version. Remote reads continue until `cancel_check` fails.
///
/// The copies are done when this function returns. So no thread writes to the caller's memory after the future that
/// calls it is dropped.
pub(crate) fn fill(
    version: &OpenVersion,
    context: &GetContext,
    targets: &mut [Target<'_>],
    options: &GetOptions,
    cancel_check: Option<CancelCheck<'_>>,
) -> Result<GetReport> {
    let mut fill = || {
        let mut read = Read::new(version, context, options);
        read.cancel_check = cancel_check;
        read.fill_targets(targets)?;
        Ok(read.report())
    };
    if version.range_reader().is_some() { block_in_place(fill) } else { fill() }
}

/// Returns the leaf of a node that is a tensor.
fn tensor_leaf(node: &Node) -> TensorLeaf<'_> {
    TensorLeaf::of(node).expect("it is a tensor")
}

/// Splits parts of targets into slices, one for each thread.
fn split_shares<'p, 'a, 't>(
    mut parts: &'p mut [(&'a [RegionCopy], &'t mut [u8])],
) -> Vec<&'p mut [(&'a [RegionCopy], &'t mut [u8])]> {
    let mut shares = Vec::new();
    let mut bytes = 0;
    let mut count = 0;
    while count < parts.len() {
        bytes += parts[count].1.len();
        count += 1;
        if bytes >= MIN_BYTES_PER_THREAD {
            let (share, rest) = std::mem::take(&mut parts).split_at_mut(count);
            shares.push(share);
            (parts, bytes, count) = (rest, 0, 0);
        }
    }
    shares.push(parts);
    shares
}

impl Drop for Read<'_> {
    fn drop(&mut self) {
        let ReadCounters { verified, received } = self.version.counters().since(self.before);
        self.context.controller.record_read(ReadStats {
            transport: self.version.route().transport,
            needed: self.needed,
            transferred: self.transferred,
            verified,
        });
        let _entered = self.version.span().enter();
        tracing::debug!(
            bytes_needed = self.needed,
            bytes_transferred = self.transferred,
            bytes_received = received,
            bytes_verified = verified,
            plan_seconds = self.plan_time.as_secs_f64(),
            copy_seconds = self.copy_time.as_secs_f64(),
            seconds = self.started.elapsed().as_secs_f64(),
            "read"
        );
    }
}

/// Allocates zeroed memory. If it does not fit, this returns an error and the process is not aborted.
fn allocate(bytes: u64) -> Result<Vec<u8>> {
    let too_large =
        || Error::new(ErrorKind::Invalid, format_args!("{bytes} bytes do not fit into memory"));
    let len = usize::try_from(bytes).map_err(|_| too_large())?;
    zeroed(len).map_err(|_| too_large())
}
