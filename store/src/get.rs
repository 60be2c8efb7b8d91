//! Getting: a version, or parts of it, as values or into the caller's memory.

mod target;
mod tree;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bytes::Bytes;
use indexmap::{IndexMap, IndexSet};
use tssd_format::{
    Attrs, Error as FormatError, ErrorKind as FormatKind, Node, ObjectPath, Region, Runs,
    ShardPlace, StateDict, Tensor, TensorMeta, TensorReference, Value, copy_runs, numel,
};

use self::target::{check, split};
pub(crate) use self::tree::choose_writer;
use self::tree::{Tree, Wish, is_whole};
use crate::controller::{Controller, Got};
use crate::environment::in_place;
use crate::error::{Error, ErrorKind, Result};
use crate::ledger::{Digest, VersionId};
use crate::parallel;
use crate::plan::{self, Copy, Wanted};
use crate::private::Private;
use crate::route::Transport;
use crate::store::Store;
use crate::version::OpenVersion;
use crate::volume::{Job, Proof};

/// How a state dict is read. The default reads the newest version, whole.
#[derive(Clone, Debug, Default)]
pub struct GetOptions {
    /// The number of the version; none is the newest.
    pub version: Option<u64>,
    /// Whose values to take where writers hold different ones
    /// ([`Divergent::Keep`](crate::Divergent::Keep)).
    pub writer: Option<u32>,
    /// The slices that are wanted of a leaf, by fqn; all other leaves come whole.
    pub slices: BTreeMap<String, Vec<ShardPlace>>,
    /// Whether bytes are taken as they are, without a look at their checksums: what is compressed is
    /// proven all the same.
    pub unverified: bool,
    /// How the bytes must come; none: any way is good.
    pub require: Option<Transport>,
}

/// A tensor in the caller's memory that a get fills.
#[derive(Debug)]
pub struct Target<'a> {
    /// The leaf.
    pub fqn: String,
    /// The part of the leaf that is wanted; none is all of it.
    pub place: Option<ShardPlace>,
    /// Dtype, shape and strides of the memory.
    pub meta: TensorMeta,
    /// The memory, from the first element to the last.
    pub bytes: &'a mut [u8],
}

/// What a get has done.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct GetReport {
    /// The number of the version that was read.
    pub version: u64,
    /// Its epoch.
    pub epoch: u32,
    /// Its identity.
    pub id: VersionId,
    /// What the version contains: equal digests are equal contents. Of a version of one writer it is the
    /// digest of its put.
    pub digest: Digest,
    /// What the writers said of the state dict as a whole.
    pub attrs: Attrs,
    /// How many bytes of tensors were asked for: tied ones once.
    pub bytes_needed: u64,
    /// How many bytes of tensors were copied, or are seen through views.
    pub bytes_transferred: u64,
    /// How many bytes were checksummed: each chunk once for a version.
    pub bytes_verified: u64,
    /// How the bytes came.
    pub transport: Transport,
    /// Why that way.
    pub why: String,
    /// How long it took to find out what to copy.
    pub plan_seconds: f64,
    /// How long it took.
    pub seconds: f64,
}

/// Plans of the last reads, by layout and wish: a version with the layout of the one before it needs
/// no planning.
#[derive(Default)]
pub(crate) struct PlanCache(Mutex<VecDeque<([u8; 32], Arc<Plan>)>>);

type Plan = Vec<Vec<Copy>>;

/// How many plans are kept.
const PLANS: usize = 16;

/// A box of a leaf that is to be copied.
struct Request<'a> {
    fqn: String,
    references: &'a [TensorReference],
    wanted: Wanted,
}

/// Large contiguous targets are cut into parts of about this many bytes, for several threads.
const PART_BYTES: u64 = 16 << 20;

/// Runs that have fewer bytes together stay in the cache: their reader is likely to be near.
const STREAM_MIN: u64 = 1 << 20;

/// Storages of fewer bytes are no work for a thread.
const SMALL_BYTES: u64 = 64 << 10;

/// A read in progress: the version, and what is counted.
pub(crate) struct Read<'a> {
    version: &'a OpenVersion,
    controller: &'a dyn Controller,
    plans: &'a PlanCache,
    unverified: bool,
    writer: Option<u32>,
    started: Instant,
    copying: Duration,
    /// How long it took to plan.
    planned: Duration,
    verified_before: u64,
    needed: u64,
    transferred: u64,
}

impl<'a> Read<'a> {
    pub(crate) fn new(version: &'a OpenVersion, store: &'a Store, options: &GetOptions) -> Self {
        let (controller, plans) = (store.controller(), store.plans());
        Self {
            version,
            controller,
            plans,
            unverified: options.unverified,
            writer: options.writer,
            planned: Duration::ZERO,
            started: Instant::now(),
            copying: Duration::ZERO,
            verified_before: version.bytes_verified(),
            needed: 0,
            transferred: 0,
        }
    }

    pub(crate) fn report(&self) -> GetReport {
        GetReport {
            version: self.version.number,
            epoch: self.version.epoch,
            id: self.version.id,
            digest: self.version.digest,
            attrs: self.version.attrs.clone(),
            bytes_needed: self.needed,
            bytes_transferred: self.transferred,
            bytes_verified: self.version.bytes_verified() - self.verified_before,
            transport: self.version.route().transport,
            why: self.version.route().why.clone(),
            plan_seconds: self.planned.as_secs_f64(),
            seconds: self.started.elapsed().as_secs_f64(),
        }
    }

    /// The whole state dict, with slices where they are wanted. A leaf that lies in one piece is a
    /// view; others are assembled. Tied leaves come back tied.
    pub(crate) fn state_dict(&mut self, options: &GetOptions) -> Result<StateDict> {
        let root = self.version.tree(options.writer)?;
        let leaves = Node::clone(&root).into_leaves();
        let tensors = leaves.iter().filter(|(_, node)| matches!(node, Node::Tensors(_)));
        let names: BTreeSet<String> = if options.slices.is_empty() {
            BTreeSet::new()
        } else {
            tensors.map(|(path, _)| path.fqn()).collect()
        };
        if let Some(fqn) = options.slices.keys().find(|fqn| !names.contains(*fqn)) {
            return Err(self.format_error(FormatError::new(FormatKind::NotFound).at(fqn)));
        }
        let mut viewed = BTreeSet::new();
        let mut wishes: IndexMap<Wish<'_>, String> = IndexMap::new();
        for (path, node) in &leaves {
            wish(path, node, options, &mut viewed, &mut wishes);
        }
        let views = self.views(viewed)?;
        let made = self.assemble(&wishes)?;
        self.needed += distinct(&leaves, &options.slices);
        let made = wishes.into_keys().zip(made).collect();
        let tree = Tree { views, made, slices: &options.slices };
        let value = tree.value(&ObjectPath::root(), &root);
        value.and_then(StateDict::from_value).map_err(|error| self.format_error(error))
    }

    /// Whole storages, in their order: views where they can be.
    pub(crate) fn storages(&mut self, storages: &[u32]) -> Result<Vec<Bytes>> {
        let views = self.views(storages.iter().copied().collect())?;
        self.needed += views.values().map(|bytes| wide(bytes.len())).sum::<u64>();
        Ok(storages.iter().map(|storage| views[storage].clone()).collect())
    }

    /// Whole storages in memory of this reader alone, where that takes no copy.
    pub(crate) fn private(&mut self, storages: &[u32]) -> Result<Vec<Option<Private>>> {
        let private = self.version.private(storages)?;
        let found = storages.iter().zip(&private).filter(|(_, found)| found.is_some());
        let found: BTreeSet<u32> = found.map(|(storage, _)| *storage).collect();
        if self.unverified {
            let lens = found.iter().map(|storage| self.version.storage_len(*storage));
            self.transferred += lens.sum::<u64>();
        } else {
            self.views(found)?;
        }
        Ok(private)
    }

    /// One leaf: a view if it lies in one piece, sliced if slices of it are wanted.
    pub(crate) fn leaf(
        &mut self,
        path: &ObjectPath,
        node: &Node,
        options: &GetOptions,
    ) -> Result<Value> {
        let mut viewed = BTreeSet::new();
        let mut wishes: IndexMap<Wish<'_>, String> = IndexMap::new();
        wish(path, node, options, &mut viewed, &mut wishes);
        let views = self.views(viewed)?;
        let made = self.assemble(&wishes)?;
        let made = wishes.into_keys().zip(made).collect();
        let tree = Tree { views, made, slices: &options.slices };
        tree.value(path, node).map_err(|error| self.format_error(error))
    }

    /// One tensor, whole, or one box of it.
    pub(crate) fn tensor(
        &mut self,
        fqn: &str,
        region: Option<&Region>,
        writer: Option<u32>,
    ) -> Result<Tensor> {
        let references = &*self.version.tensor(fqn, writer)?;
        let TensorReference { meta, storage, byte_offset, .. } = &references[0];
        let is_far = storage.is_some_and(|storage| self.version.far(storage).is_some());
        if region.is_none() && is_whole(references) && !is_far {
            let span = *byte_offset..byte_offset + meta.span_bytes();
            let bytes = storage
                .map(|storage| self.version.view(storage, span, self.unverified))
                .transpose()?;
            self.needed += meta.nbytes();
            self.transferred += meta.span_bytes();
            let tensor = Tensor::new(meta.clone(), bytes.unwrap_or_default().into(), 0);
            return tensor.map_err(|error| self.format_error(error));
        }
        let global_shape = plan::global_shape(&references[0]);
        let region = region.cloned().unwrap_or_else(|| Region::whole(&global_shape));
        let meta = self.meta(&references[0], region.shape())?;
        let request = Request {
            fqn: fqn.to_owned(),
            references,
            wanted: Wanted { region, global_shape: global_shape.into(), meta: meta.clone() },
        };
        let mut memory = memory(meta.nbytes())?;
        self.needed += meta.nbytes();
        self.fill(vec![(request, &mut memory)])?;
        Tensor::new(meta, memory.into(), 0).map_err(|error| self.format_error(error))
    }

    /// The archives that leaves are in, or the parts of them that are wanted.
    pub(crate) fn archives_of(
        &mut self,
        wanted: &[(String, Option<ShardPlace>)],
        writer: Option<u32>,
    ) -> Result<BTreeSet<String>> {
        let leaf = |(fqn, _): &(String, _)| self.version.tensor(fqn, writer);
        let leaves: Vec<Arc<[TensorReference]>> = wanted.iter().map(leaf).collect::<Result<_>>()?;
        let mut requests = Vec::with_capacity(wanted.len());
        for ((fqn, place), references) in wanted.iter().zip(&leaves) {
            let (region, global_shape) = wanted_box(place.as_ref(), references);
            let meta = self.meta(&references[0], region.shape())?;
            let wanted = Wanted { region, global_shape: global_shape.into(), meta };
            requests.push(Request { fqn: fqn.clone(), references, wanted });
        }
        let plan = self.plan(&requests)?;
        let copies = plan.iter().flatten();
        Ok(self.version.archives_of(copies.map(|copy| copy.storage)))
    }

    /// Fills the caller's tensors; allocates nothing of their size.
    pub(crate) fn fill_targets(
        &mut self,
        targets: &mut [Target<'_>],
        writer: Option<u32>,
    ) -> Result<()> {
        let leaf = |target: &Target<'_>| self.version.tensor(&target.fqn, writer);
        let leaves: Vec<Arc<[TensorReference]>> =
            targets.iter().map(leaf).collect::<Result<_>>()?;
        let mut work = Vec::with_capacity(targets.len());
        for (target, references) in targets.iter_mut().zip(&leaves) {
            check(target).map_err(|error| self.format_error(error))?;
            let (region, global_shape) = wanted_box(target.place.as_ref(), references);
            let meta = target.meta.clone();
            if region.shape() != meta.shape() {
                let error = FormatError::new(FormatKind::SliceMismatch)
                    .at(&target.fqn)
                    .note(format_args!("target {:?}, wanted {:?}", meta.shape(), region.shape()));
                return Err(self.format_error(error));
            }
            self.needed += meta.nbytes();
            let wanted = Wanted { region, global_shape: global_shape.into(), meta };
            work.push((
                Request { fqn: target.fqn.clone(), references, wanted },
                &mut *target.bytes,
            ));
        }
        self.fill(work)
    }

    /// The storages that leaves are views of, proven.
    fn views(&mut self, storages: BTreeSet<u32>) -> Result<BTreeMap<u32, Bytes>> {
        let load = |storage: u32| -> Result<_> {
            let len = self.version.storage_len(storage);
            Ok((storage, self.version.view(storage, 0..len, self.unverified)?))
        };
        let (far, near): (Vec<u32>, Vec<u32>) =
            storages.into_iter().partition(|storage| self.version.far(*storage).is_some());
        // Small ones are looked at sooner than handed to another thread.
        let (small, large): (Vec<u32>, Vec<u32>) =
            near.into_iter().partition(|storage| self.version.storage_len(*storage) < SMALL_BYTES);
        let mut views: BTreeMap<u32, Bytes> = parallel::map(large, load)?.into_iter().collect();
        views.extend(self.pulled(far)?);
        for storage in small {
            views.extend([load(storage)?]);
        }
        self.transferred += views.values().map(|bytes| wide(bytes.len())).sum::<u64>();
        Ok(views)
    }

    /// Storages that are elsewhere, in new memory.
    fn pulled(&self, storages: Vec<u32>) -> Result<Vec<(u32, Bytes)>> {
        let whole = |storage: u32| Copy {
            storage,
            source: 0,
            target: 0,
            runs: Runs::run(self.version.storage_len(storage)),
        };
        let copies: Vec<Vec<Copy>> = storages.iter().map(|storage| vec![whole(*storage)]).collect();
        let memories = storages.iter().map(|storage| memory(self.version.storage_len(*storage)));
        let mut memories: Vec<Vec<u8>> = memories.collect::<Result<_>>()?;
        self.pull(copies.iter().zip(memories.iter_mut().map(Vec::as_mut_slice)))?;
        Ok(storages.into_iter().zip(memories.into_iter().map(Bytes::from)).collect())
    }

    /// Tensors in new memory, one for each wish.
    fn assemble(&mut self, wishes: &IndexMap<Wish<'_>, String>) -> Result<Vec<Tensor>> {
        let mut metas = Vec::with_capacity(wishes.len());
        let mut memories = Vec::with_capacity(wishes.len());
        let mut requests = Vec::with_capacity(wishes.len());
        for ((references, place), fqn) in wishes {
            let (region, global_shape) = wanted_box(*place, references);
            let meta = self.meta(&references[0], region.shape())?;
            memories.push(memory(meta.nbytes())?);
            let wanted = Wanted { region, global_shape: global_shape.into(), meta: meta.clone() };
            requests.push(Request { fqn: fqn.clone(), references, wanted });
            metas.push(meta);
        }
        let targets = memories.iter_mut().map(Vec::as_mut_slice);
        self.fill(requests.into_iter().zip(targets).collect())?;
        let tensor = |(meta, memory): (TensorMeta, Vec<u8>)| Tensor::new(meta, memory.into(), 0);
        let tensors = metas.into_iter().zip(memories).map(tensor);
        tensors.collect::<tssd_format::Result<_>>().map_err(|error| self.format_error(error))
    }

    /// Plans all requests before any byte is touched, then copies on all cores.
    fn fill(&mut self, work: Vec<(Request<'_>, &mut [u8])>) -> Result<()> {
        let mut requests = Vec::with_capacity(work.len());
        let mut targets = Vec::with_capacity(work.len());
        for (request, target) in work {
            split(request, target, &mut requests, &mut targets);
        }
        let plan = self.plan(&requests)?;
        let copies = plan.iter().flatten();
        self.transferred += copies.map(|copy| copy.runs.total_bytes()).sum::<u64>();
        let is_near = |copy: &&Copy| self.version.far(copy.storage).is_none();
        let run = |(copies, target): (&Vec<Copy>, &mut [u8])| {
            copies.iter().filter(is_near).try_for_each(|copy| self.copy(copy, target))
        };
        let started = Instant::now();
        let near = plan.iter().zip(targets.iter_mut().map(|target| &mut **target)).collect();
        let copied = parallel::map(near, run);
        let filled = copied.and_then(|_| self.pull(plan.iter().zip(targets)));
        self.copying += started.elapsed();
        filled.map_err(Error::target_modified)
    }

    /// Fills targets with what is elsewhere.
    fn pull<'t>(&self, work: impl Iterator<Item = (&'t Vec<Copy>, &'t mut [u8])>) -> Result<()> {
        let Some(holder) = self.version.holder() else { return Ok(()) };
        let mut verified = 0;
        let mut jobs = Vec::new();
        for (copies, target) in work {
            let mut boxes = Vec::new();
            for copy in copies {
                if let Some(far) = self.version.far(copy.storage) {
                    self.version.boxes(far, copy, self.unverified, &mut boxes);
                }
            }
            let proven = boxes.iter().filter(|each| each.proof != Proof::None);
            verified += proven.map(|each| each.runs.total_bytes()).sum::<u64>();
            if !boxes.is_empty() {
                jobs.push(Job { target, boxes });
            }
        }
        holder.pull(jobs)?;
        self.version.count_verified(verified);
        Ok(())
    }

    fn plan(&mut self, requests: &[Request<'_>]) -> Result<Arc<Plan>> {
        let started = Instant::now();
        let plan = self.known_plan(requests);
        self.planned += started.elapsed();
        plan
    }

    fn known_plan(&self, requests: &[Request<'_>]) -> Result<Arc<Plan>> {
        let name = self.name_of(requests);
        if let Some(plan) = self.plans.get(&name) {
            return Ok(plan);
        }
        let each = |request: &Request<'_>| {
            plan::plan(request.references, &request.wanted)
                .map_err(|error| self.format_error(error.at(&request.fqn)))
        };
        let plan = Arc::new(requests.iter().map(each).collect::<Result<Plan>>()?);
        self.plans.insert(name, plan.clone());
        Ok(plan)
    }

    /// What a plan is cached under: the layout of the version, which says where each leaf lies, and all that
    /// is wanted of it.
    fn name_of(&self, requests: &[Request<'_>]) -> [u8; 32] {
        let mut bytes = Vec::with_capacity(128 * requests.len());
        bytes.extend(self.version.layout);
        let writer = self.writer.map_or(u64::MAX, u64::from);
        bytes.extend(writer.to_le_bytes());
        for Request { fqn, wanted, .. } in requests {
            let (meta, region) = (&wanted.meta, &wanted.region);
            bytes.extend(wide(fqn.len()).to_le_bytes());
            bytes.extend(fqn.as_bytes());
            let strides = meta.strides();
            let vectors = [&*wanted.global_shape, region.offsets(), region.shape(), &strides];
            let words = [wide(region.rank()), u64::from(meta.dtype().code())];
            let words = words.iter().chain(vectors.into_iter().flatten());
            bytes.extend(words.flat_map(|word| word.to_le_bytes()));
        }
        *blake3::hash(&bytes).as_bytes()
    }

    fn copy(&self, copy: &Copy, target: &mut [u8]) -> Result<()> {
        let span = copy.runs.source_span();
        let range = copy.source..copy.source + span;
        let target = &mut target[native(copy.target)..];
        if copy.runs.loops().is_empty() {
            let target = &mut target[..native(span)];
            return self.version.copy(copy.storage, range, target, self.unverified);
        }
        let mut window = self.version.window(copy.storage, range, self.unverified)?;
        let mut copied = Ok(());
        let mut each = |run: &mut dyn FnMut(&[u8], &mut [u8])| {
            copy.runs.for_each(|from, to, bytes| {
                if copied.is_ok() {
                    let to = native(to)..native(to + bytes);
                    let source = window.bytes(from..from + bytes);
                    copied = source.map(|source| run(source, &mut target[to]));
                }
            });
        };
        if copy.runs.total_bytes() < STREAM_MIN {
            each(&mut |source, target| target.copy_from_slice(source));
        } else {
            copy_runs(each);
        }
        copied
    }

    /// A contiguous tensor of a leaf's dtype.
    fn meta(&self, reference: &TensorReference, shape: &[u64]) -> Result<TensorMeta> {
        TensorMeta::new(reference.meta.dtype(), shape)
            .map(|meta| meta.with_flags(reference.meta.flags()))
            .map_err(|error| self.format_error(error))
    }

    fn format_error(&self, error: FormatError) -> Error {
        Error::request(format_args!("version {}", self.version.number), error)
    }
}

/// Fills the caller's tensors from a version. The memory is the caller's: no other thread may have it when the
/// future is dropped that this is called in.
pub(crate) fn fill(
    version: &OpenVersion,
    store: &Store,
    targets: &mut [Target<'_>],
    options: &GetOptions,
) -> Result<GetReport> {
    let mut fill = || {
        let mut read = Read::new(version, store, options);
        read.fill_targets(targets, options.writer)?;
        Ok(read.report())
    };
    if version.holder().is_some() { in_place(fill) } else { fill() }
}

/// The box of a tensor that is wanted, and the shape that the tensor is said to have as a whole.
fn wanted_box(place: Option<&ShardPlace>, references: &[TensorReference]) -> (Region, Vec<u64>) {
    let global_shape = plan::global_shape(&references[0]);
    match place {
        Some(place) => (place.slice().region(), place.slice().global_shape().to_vec()),
        None => (Region::whole(&global_shape), global_shape),
    }
}

impl Drop for Read<'_> {
    fn drop(&mut self) {
        self.controller.got(Got {
            transport: self.version.route().transport,
            needed: self.needed,
            transferred: self.transferred,
            verified: self.version.bytes_verified() - self.verified_before,
        });
        let _entered = self.version.span().enter();
        tracing::debug!(
            bytes_needed = self.needed,
            bytes_transferred = self.transferred,
            bytes_verified = self.version.bytes_verified() - self.verified_before,
            plan_seconds = self.planned.as_secs_f64(),
            copy_seconds = self.copying.as_secs_f64(),
            seconds = self.started.elapsed().as_secs_f64(),
            "read"
        );
    }
}

impl PlanCache {
    fn get(&self, name: &[u8; 32]) -> Option<Arc<Plan>> {
        let plans = self.0.lock().expect("nobody panics while holding the plans");
        plans.iter().find(|(other, _)| other == name).map(|(_, plan)| plan.clone())
    }

    fn insert(&self, name: [u8; 32], plan: Arc<Plan>) {
        let mut plans = self.0.lock().expect("nobody panics while holding the plans");
        plans.push_front((name, plan));
        plans.truncate(PLANS);
    }
}

/// What a leaf is made of: storages that are seen, tensors that are assembled.
fn wish<'w>(
    path: &ObjectPath,
    node: &'w Node,
    options: &'w GetOptions,
    viewed: &mut BTreeSet<u32>,
    wishes: &mut IndexMap<Wish<'w>, String>,
) {
    match node {
        Node::Stored(_, storage) => drop(viewed.insert(*storage)),
        Node::Tensors(run) => {
            let fqn = path.fqn();
            match options.slices.get(&fqn) {
                Some(places) => places.iter().for_each(|place| {
                    wishes.entry((run.as_slice(), Some(place))).or_insert_with(|| fqn.clone());
                }),
                None if is_whole(run) => viewed.extend(run[0].storage),
                None => drop(wishes.entry((run.as_slice(), None)).or_insert(fqn)),
            }
        }
        _ => {}
    }
}

/// How many bytes the leaves have that a state dict is made of: tied ones once, slices as asked for.
fn distinct(leaves: &[(ObjectPath, Node)], slices: &BTreeMap<String, Vec<ShardPlace>>) -> u64 {
    let mut seen: IndexSet<Wish<'_>> = IndexSet::new();
    let mut bytes = 0;
    for (path, node) in leaves {
        let Node::Tensors(run) = node else { continue };
        let itemsize = run[0].meta.dtype().itemsize();
        match slices.get(&path.fqn()) {
            Some(places) => {
                for place in places.iter().filter(|place| seen.insert((run, Some(place)))) {
                    bytes += place.slice().region().numel() * itemsize;
                }
            }
            None if seen.insert((run, None)) => {
                bytes += numel(&plan::global_shape(&run[0])) * itemsize;
            }
            None => {}
        }
    }
    bytes
}

/// New memory; what does not fit is refused before the system is asked to give up.
fn memory(bytes: u64) -> Result<Vec<u8>> {
    let too_large =
        || Error::new(ErrorKind::Invalid, format_args!("{bytes} bytes do not fit into memory"));
    let len = usize::try_from(bytes).map_err(|_| too_large())?;
    Vec::<u8>::new().try_reserve_exact(len).map_err(|_| too_large())?;
    Ok(vec![0; len])
}

/// Lengths of what is in memory.
fn native(bytes: u64) -> usize {
    usize::try_from(bytes).expect("what is in memory fits usize")
}

fn wide(len: usize) -> u64 {
    u64::try_from(len).expect("usize is at most 64 bits")
}
