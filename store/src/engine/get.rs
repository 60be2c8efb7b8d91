//! Getting: a version, or parts of it, as values or into the caller's memory.

mod beyond;
mod plans;
mod target;
mod tree;
mod way;
mod wishes;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use indexmap::IndexMap;
use tssd_format::{
    Attrs, Error as FormatError, ErrorKind as FormatKind, Node, ObjectPath, Region, Runs,
    ShardSpec, StateDict, Tensor, TensorMeta, TensorReference, Value, copy_runs, zeroed,
};

pub(crate) use self::plans::PlanCache;
use self::plans::{Box, Cover, Leaf, Plan, Request};
use self::target::expect_room;
pub use self::target::{Target, TargetMemory};
use self::tree::Tree;
use self::way::{Way, leaves};
use self::wishes::{Wish, Wishes};
use crate::blob::{Job, Proof};
use crate::control::{Controller, Got};
use crate::engine::version::{OpenVersion, Tally};
use crate::error::{Error, ErrorKind, Result};
use crate::io::cancel::{GoesOn, Stop};
use crate::io::cow_map::Private;
use crate::io::exec::block_in_place;
use crate::io::parallel;
use crate::ledger::{Digest, VersionId};
use crate::plan::{self, Copy};
use crate::route::Transport;

/// How a state dict is read. The default reads the newest version, whole.
#[derive(Clone, Debug, Default)]
pub struct GetOptions {
    /// The number of the version; none is the newest.
    pub version: Option<u64>,
    /// Whose values to take where writers hold different ones
    /// ([`Divergent::Keep`](crate::Divergent::Keep)).
    pub writer: Option<u32>,
    /// The slices that are wanted of a leaf, by fqn; all other leaves come whole.
    pub slices: BTreeMap<String, Vec<ShardSpec>>,
    /// Whether bytes are taken as they are, without a look at their checksums: what is compressed is
    /// proven all the same.
    pub unverified: bool,
    /// How the bytes must come; none: any way is good.
    pub require: Option<Transport>,
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
    /// How many came over a connection, from another host or a bucket: more than were asked for where that is
    /// cheaper than a further request, and where whole chunks are needed to prove parts of them.
    pub bytes_received: u64,
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

/// A thread gets targets of at least this many bytes together: fewer are copied before it has started.
const SHARE_BYTES: usize = 1 << 20;

/// Storages of fewer bytes are no work for a thread.
const SMALL_BYTES: u64 = 64 << 10;

/// What all gets of one store share.
pub(crate) struct GetContext {
    pub(crate) controller: Arc<dyn Controller>,
    pub(crate) plans: PlanCache,
}

/// A read in progress: the version, and what is counted.
pub(crate) struct Read<'a> {
    version: &'a OpenVersion,
    context: &'a GetContext,
    unverified: bool,
    writer: Option<u32>,
    goes_on: Option<GoesOn<'a>>,
    started: Instant,
    copying: Duration,
    /// How long it took to plan.
    planned: Duration,
    before: Tally,
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
            goes_on: None,
            planned: Duration::ZERO,
            started: Instant::now(),
            copying: Duration::ZERO,
            before: version.tally(),
            needed: 0,
            transferred: 0,
        }
    }

    pub(crate) fn report(&self) -> GetReport {
        let Tally { verified, received } = self.version.tally().since(self.before);
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
            why: self.version.route().why.clone(),
            plan_seconds: self.planned.as_secs_f64(),
            seconds: self.started.elapsed().as_secs_f64(),
        }
    }

    /// The whole state dict, with slices where they are wanted. A leaf that lies in one piece is a
    /// view; others are assembled. Tied leaves come back tied.
    pub(crate) fn state_dict(&mut self, options: &GetOptions) -> Result<StateDict> {
        let root = self.version.tree(options.writer)?;
        let way = Way::To(&ObjectPath::root());
        if !options.slices.is_empty() {
            let mut names = BTreeSet::new();
            leaves(way, &root, &mut |way, node| {
                if matches!(node, Node::Tensors(_)) {
                    names.insert(way.path().fqn());
                }
            });
            if let Some(fqn) = options.slices.keys().find(|fqn| !names.contains(*fqn)) {
                return Err(
                    self.format_error(FormatError::new(FormatKind::NotFound).with_path(fqn))
                );
            }
        }
        let mut wishes = Wishes::default();
        leaves(way, &root, &mut |way, node| wishes.add(way, node, &options.slices));
        let needed = wishes.needed();
        let tree = self.tree(wishes, &options.slices)?;
        self.needed += needed;
        let value = tree.value(way, &root);
        value.and_then(StateDict::from_value).map_err(|error| self.format_error(error))
    }

    /// All that is wished for, with a tree of it in mind.
    fn tree<'w>(
        &mut self,
        wishes: Wishes<'w>,
        slices: &'w BTreeMap<String, Vec<ShardSpec>>,
    ) -> Result<Tree<'w>> {
        let views = self.views(wishes.viewed)?;
        let made = self.assemble(&wishes.assembled)?;
        let made = wishes.assembled.into_keys().zip(made).collect();
        Ok(Tree { views, made, slices })
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
        let found = found.map(|(storage, _)| *storage);
        if self.unverified {
            self.transferred += found.map(|storage| self.version.storage_len(storage)).sum::<u64>();
        } else {
            self.views(found.collect())?;
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
        let mut wishes = Wishes::default();
        wishes.add(Way::To(path), node, &options.slices);
        let tree = self.tree(wishes, &options.slices)?;
        tree.value(Way::To(path), node).map_err(|error| self.format_error(error))
    }

    /// One tensor, whole, or one box of it.
    pub(crate) fn tensor(
        &mut self,
        fqn: &str,
        region: Option<&Region>,
        writer: Option<u32>,
    ) -> Result<Tensor> {
        let references = self.version.tensor(fqn, writer)?;
        let TensorReference { meta, storage, byte_offset, .. } = &references[0];
        let is_far = storage.is_some_and(|storage| self.version.far(storage).is_some());
        if region.is_none() && plan::is_whole(&references) && !is_far {
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
        let whole = Region::whole(&global_shape);
        let region = region.unwrap_or(&whole);
        let (offsets, shape) = (region.offsets(), region.shape());
        let meta = self.meta(&references[0], shape)?;
        let mut memory = memory(meta.nbytes())?;
        self.needed += meta.nbytes();
        let part = Some(Box { offsets, shape, global_shape: &global_shape });
        let request = Request { leaf: Leaf::Named(fqn), part, meta: &meta };
        let memories = vec![(&mut memory).into()];
        self.fill((&[request], Cover::Whole), memories, |_| Ok(references.clone()))?;
        Tensor::new(meta, memory.into(), 0).map_err(|error| self.format_error(error))
    }

    /// The archives that leaves are in, or the parts of them that are wanted.
    pub(crate) fn archives_of(
        &mut self,
        wanted: &[(String, Option<ShardSpec>)],
        writer: Option<u32>,
    ) -> Result<BTreeSet<String>> {
        let leaf = |(fqn, _): &(String, _)| self.version.tensor(fqn, writer);
        let leaves: Vec<Arc<[TensorReference]>> = wanted.iter().map(leaf).collect::<Result<_>>()?;
        let mut metas = Vec::with_capacity(wanted.len());
        for ((_, place), references) in wanted.iter().zip(&leaves) {
            let global_shape = plan::global_shape(&references[0]);
            let shape = place.as_ref().map_or(&*global_shape, |place| place.slice().local_shape());
            metas.push(self.meta(&references[0], shape)?);
        }
        let mut requests = Vec::with_capacity(wanted.len());
        for ((fqn, place), meta) in wanted.iter().zip(&metas) {
            requests.push(Request {
                leaf: Leaf::Named(fqn),
                part: place.as_ref().map(Box::from),
                meta,
            });
        }
        let plan = self.plan((&requests, Cover::Whole), |at| Ok(leaves[at].clone()))?;
        Ok(self.version.archives_of(plan.copies().map(|copy| copy.storage)))
    }

    /// Fills the caller's tensors; allocates nothing of their size.
    pub(crate) fn fill_targets(
        &mut self,
        targets: &mut [Target<'_>],
        writer: Option<u32>,
    ) -> Result<()> {
        let mut requests = Vec::with_capacity(targets.len());
        let mut memories = Vec::with_capacity(targets.len());
        for target in targets {
            expect_room(target).map_err(|error| self.format_error(error))?;
            let Target { fqn, place, meta, memory } = target;
            let part = place.as_ref().map(Box::from);
            requests.push(Request { leaf: Leaf::Named(fqn), part, meta });
            memories.push(match memory {
                TargetMemory::Here(bytes) => TargetMemory::Here(bytes),
                TargetMemory::Elsewhere(blob) => TargetMemory::Elsewhere(*blob),
            });
        }
        let version = self.version;
        self.fill((&requests, Cover::Whole), memories, |at| {
            version.tensor(requests[at].leaf.fqn(), writer)
        })?;
        // No element is there twice, so they are not more than there is memory.
        self.needed += requests.iter().map(|request| request.meta.nbytes()).sum::<u64>();
        Ok(())
    }

    /// Fills what of the caller's tensors these references hold: others have the rest. Says which box of which target that
    /// was.
    pub(crate) fn fill_parts(
        &mut self,
        targets: &mut [Target<'_>],
        leaves: &BTreeMap<String, Vec<TensorReference>>,
    ) -> Result<Vec<(usize, Region)>> {
        let mut requests = Vec::new();
        let mut memories = Vec::new();
        let mut filled = Vec::new();
        for (at, target) in targets.iter_mut().enumerate() {
            expect_room(target).map_err(|error| self.format_error(error))?;
            let Target { fqn, place, meta, memory } = target;
            let Some(references) = leaves.get(fqn) else { continue };
            let part = place.as_ref().map(Box::from);
            let wanted = match &part {
                Some(part) => Region::new(part.offsets, part.shape)
                    .map_err(|error| self.format_error(error.with_path(&**fqn)))?,
                None => Region::whole(meta.shape()),
            };
            filled.extend(references.iter().filter_map(|reference| {
                plan::region(reference).intersect(&wanted).map(|region| (at, region))
            }));
            requests.push(Request { leaf: Leaf::Run(fqn, references), part, meta });
            memories.push(match memory {
                TargetMemory::Here(bytes) => TargetMemory::Here(bytes),
                TargetMemory::Elsewhere(blob) => TargetMemory::Elsewhere(*blob),
            });
        }
        let before = self.transferred;
        let references = |at: usize| match requests[at].leaf {
            Leaf::Run(_, references) => Ok(references.into()),
            Leaf::Named(_) => unreachable!("each has its own"),
        };
        self.fill((&requests, Cover::Part), memories, references)?;
        self.needed += self.transferred - before;
        Ok(filled)
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
            runs: Runs::contiguous(self.version.storage_len(storage)),
        };
        let copies: Vec<Copy> = storages.iter().map(|storage| whole(*storage)).collect();
        let memories = storages.iter().map(|storage| memory(self.version.storage_len(*storage)));
        let mut memories: Vec<Vec<u8>> = memories.collect::<Result<_>>()?;
        let copies = copies.iter().map(std::slice::from_ref);
        self.pull(copies.zip(memories.iter_mut().map(Vec::as_mut_slice)).collect())?;
        Ok(storages.into_iter().zip(memories.into_iter().map(Bytes::from)).collect())
    }

    /// Tensors in new memory, one for each wish.
    fn assemble(&mut self, wishes: &IndexMap<Wish<'_>, String>) -> Result<Vec<Tensor>> {
        let mut metas = Vec::with_capacity(wishes.len());
        let mut memories = Vec::with_capacity(wishes.len());
        for (references, place) in wishes.keys() {
            let global_shape = plan::global_shape(&references[0]);
            let shape = place.map_or(&*global_shape, |place| place.slice().local_shape());
            let meta = self.meta(&references[0], shape)?;
            memories.push(memory(meta.nbytes())?);
            metas.push(meta);
        }
        let mut requests = Vec::with_capacity(wishes.len());
        for (((references, place), fqn), meta) in wishes.iter().zip(&metas) {
            requests.push(Request {
                leaf: Leaf::Run(fqn, references),
                part: place.map(Box::from),
                meta,
            });
        }
        let targets = memories.iter_mut().map(TargetMemory::from).collect();
        let references = |at| Ok(wishes.get_index(at).expect("one for each").0.0.into());
        self.fill((&requests, Cover::Whole), targets, references)?;
        let tensor = |(meta, memory): (TensorMeta, Vec<u8>)| Tensor::new(meta, memory.into(), 0);
        let tensors = metas.into_iter().zip(memories).map(tensor);
        tensors.collect::<tssd_format::Result<_>>().map_err(|error| self.format_error(error))
    }

    /// Plans all requests before any byte is touched, then copies on all cores. The slices of the leaf that a
    /// request is about are looked up if there is no plan yet.
    fn fill(
        &mut self,
        (requests, cover): (&[Request<'_>], Cover),
        targets: Vec<TargetMemory<'_>>,
        references: impl Fn(usize) -> Result<Arc<[TensorReference]>>,
    ) -> Result<()> {
        let plan = self.plan((requests, cover), references)?;
        self.transferred += plan.bytes;
        let (mut parts, beyond) = plan.cut(targets);
        let is_near = |copy: &&Copy| self.version.far(copy.storage).is_none();
        let fill = |(copies, target): &mut (&[Copy], &mut [u8])| {
            copies.iter().filter(is_near).try_for_each(|copy| self.copy(copy, target))
        };
        let started = Instant::now();
        let copied = parallel::map(shares(&mut parts), |share| share.iter_mut().try_for_each(fill));
        let filled =
            copied.and_then(|_| self.pull(parts)).and_then(|()| self.send(requests, beyond));
        self.copying += started.elapsed();
        filled.map_err(Error::target_modified)
    }

    /// Fills targets with what is elsewhere.
    fn pull(&self, parts: Vec<(&[Copy], &mut [u8])>) -> Result<()> {
        let Some(holder) = self.version.holder() else { return Ok(()) };
        let mut verified = 0;
        let mut jobs = Vec::new();
        for (copies, target) in parts {
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
        let received = match self.goes_on {
            Some(goes_on) => Stop::watch(goes_on, |stop| holder.pull(jobs, stop))?,
            None => holder.pull(jobs, &Stop::default())?,
        };
        self.version.count(Tally { verified, received });
        Ok(())
    }

    fn plan(
        &mut self,
        requests: (&[Request<'_>], Cover),
        references: impl Fn(usize) -> Result<Arc<[TensorReference]>>,
    ) -> Result<Arc<Plan>> {
        let started = Instant::now();
        let name = plans::name(&self.version.layout, self.writer, requests);
        // The version says itself what layout it has: what it says must not make us look where nothing is.
        let known =
            self.context.plans.get(&name).filter(|plan| plan.fits(self.version.storage_lens()));
        let plan = known.map_or_else(|| self.new_plan(name, requests, references), Ok);
        self.planned += started.elapsed();
        plan
    }

    fn new_plan(
        &self,
        name: [u8; 32],
        (requests, cover): (&[Request<'_>], Cover),
        references: impl Fn(usize) -> Result<Arc<[TensorReference]>>,
    ) -> Result<Arc<Plan>> {
        let mut plan = Plan::default();
        for (at, request) in requests.iter().enumerate() {
            let added = plan.add(request, &references(at)?, cover);
            added.map_err(|error| self.format_error(error))?;
        }
        let plan = Arc::new(plan);
        self.context.plans.insert(name, plan.clone());
        Ok(plan)
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
        let bytes = window.bytes.clone();
        copy_runs(&copy.runs, &bytes, target, |run| window.prove(&run))
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

/// Fills the caller's tensors from a version; what is elsewhere, as long as that goes on. The memory is the caller's: no
/// other thread may have it when the future is dropped that this is called in.
pub(crate) fn fill(
    version: &OpenVersion,
    context: &GetContext,
    targets: &mut [Target<'_>],
    options: &GetOptions,
    goes_on: Option<GoesOn<'_>>,
) -> Result<GetReport> {
    let mut fill = || {
        let mut read = Read::new(version, context, options);
        read.goes_on = goes_on;
        read.fill_targets(targets, options.writer)?;
        Ok(read.report())
    };
    if version.holder().is_some() { block_in_place(fill) } else { fill() }
}

/// Parts of targets, for a thread each.
fn shares<'p, 'a, 't>(
    mut parts: &'p mut [(&'a [Copy], &'t mut [u8])],
) -> Vec<&'p mut [(&'a [Copy], &'t mut [u8])]> {
    let mut shares = Vec::new();
    let mut bytes = 0;
    let mut count = 0;
    while count < parts.len() {
        bytes += parts[count].1.len();
        count += 1;
        if bytes >= SHARE_BYTES {
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
        let Tally { verified, received } = self.version.tally().since(self.before);
        self.context.controller.got(Got {
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
            plan_seconds = self.planned.as_secs_f64(),
            copy_seconds = self.copying.as_secs_f64(),
            seconds = self.started.elapsed().as_secs_f64(),
            "read"
        );
    }
}

/// New memory; what does not fit is refused before the system is asked to give up.
fn memory(bytes: u64) -> Result<Vec<u8>> {
    let too_large =
        || Error::new(ErrorKind::Invalid, format_args!("{bytes} bytes do not fit into memory"));
    let len = usize::try_from(bytes).map_err(|_| too_large())?;
    zeroed(len).map_err(|_| too_large())
}

/// Lengths of what is in memory.
fn native(bytes: u64) -> usize {
    usize::try_from(bytes).expect("what is in memory fits usize")
}

fn wide(len: usize) -> u64 {
    u64::try_from(len).expect("usize is at most 64 bits")
}
