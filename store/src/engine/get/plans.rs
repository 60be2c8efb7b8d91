//! Copy plans, which are cached for other versions with the same layout.

use std::collections::VecDeque;
use std::sync::Arc;

use tssd_format::{
    Error as FormatError, ErrorKind as FormatKind, Region, Result, ShardSpec, TensorMeta,
};

use super::target::{TargetMemory, check_no_overlap, span};
use super::{to_u64, to_usize};
use crate::device::BlobMut;
use crate::io::sync::Lock;
use crate::plan::{self, RegionCopy, RegionRequest, SingleCopy, StorageId, TensorLeaf, dtype_word};

/// Plans of recent reads, by layout and requests. A version with a cached layout needs no planning.
#[derive(Default)]
pub(crate) struct PlanCache(Lock<VecDeque<([u8; 32], Arc<Plan>)>>);

/// Maximum number of cached plans.
const MAX_PLANS: usize = 16;

/// Large contiguous targets are split into parts of about this many bytes, for several threads.
const PART_BYTES: u64 = 16 << 20;

/// A request for a leaf, or for a region of it, and the layout of the target.
pub(super) struct Request<'a> {
    pub(super) leaf: LeafSelector<'a>,
    pub(super) region: Option<GlobalRegion<'a>>,
    pub(super) meta: &'a TensorMeta,
}

/// Selects a leaf.
#[derive(Clone, Copy)]
pub(super) enum LeafSelector<'a> {
    /// The only leaf with this fqn.
    Fqn(&'a str),
    /// This leaf. Other leaves may have the same fqn.
    Leaf(&'a str, TensorLeaf<'a>),
}

impl<'a> LeafSelector<'a> {
    pub(super) fn fqn(self) -> &'a str {
        let (Self::Fqn(fqn) | Self::Leaf(fqn, _)) = self;
        fqn
    }
}

/// A region of a global tensor.
#[derive(Clone, Copy)]
pub(super) struct GlobalRegion<'a> {
    pub(super) offsets: &'a [u64],
    pub(super) shape: &'a [u64],
    pub(super) global_shape: &'a [u64],
}

impl<'a> From<&'a ShardSpec> for GlobalRegion<'a> {
    fn from(place: &'a ShardSpec) -> Self {
        let slice = place.slice();
        let (offsets, shape) = (slice.offsets(), slice.local_shape());
        Self { offsets, shape, global_shape: slice.global_shape() }
    }
}

/// How much of a request a version must hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Coverage {
    /// All elements.
    Whole,
    /// Any elements. Other versions may hold the rest.
    Part,
}

/// The layout that a plan depends on.
pub(super) struct PlanLayout {
    /// The fingerprint that the manifest records.
    pub(super) manifest: [u8; 16],
    /// The fingerprint of the groups of distributed leaves.
    pub(super) groups: [u8; 16],
}

/// The copies that fill each target.
#[derive(Default)]
pub(super) struct Plan {
    /// The parts of each target, in order.
    targets: Vec<Vec<TargetPart>>,
    /// Ends of the ranges that are read from storages of the manifest. Contiguous, because each read compares them.
    ends: Vec<(u32, u64)>,
    /// Bytes that are copied.
    pub(super) bytes: u64,
}

/// A part of a target, which begins where the part before it ends.
///
/// The target offsets of its copies are relative to its start.
struct TargetPart {
    /// Bytes of memory of the part.
    len: usize,
    copies: Vec<RegionCopy>,
}

/// Copies, and the part of a target in this process's memory that they fill.
pub(super) type HostPart<'p, 't> = (&'p [RegionCopy], &'t mut [u8]);

/// A part of a target that this process cannot address.
pub(super) struct DevicePart<'p, 't> {
    /// Index of the target.
    pub(super) target_index: usize,
    pub(super) blob: &'t dyn BlobMut,
    /// Offset of the part in the blob, in bytes. `len` is its length in bytes.
    pub(super) start: u64,
    pub(super) len: usize,
    pub(super) copies: &'p [RegionCopy],
}

impl<'p> DevicePart<'p, '_> {
    /// Returns each single copy.
    pub(super) fn single_copies(&self) -> impl Iterator<Item = SingleCopy<'p>> + use<'p> {
        self.copies.iter().flat_map(RegionCopy::each)
    }
}

impl PlanCache {
    /// Returns the cached plan with this fingerprint.
    pub(super) fn get(&self, name: &[u8; 32]) -> Option<Arc<Plan>> {
        let plans = self.0.lock();
        plans.iter().find(|(other, _)| other == name).map(|(_, plan)| plan.clone())
    }

    pub(super) fn insert(&self, name: [u8; 32], plan: Arc<Plan>) {
        let mut plans = self.0.lock();
        plans.push_front((name, plan));
        plans.truncate(MAX_PLANS);
    }
}

/// Returns the fingerprint under which a plan is cached.
///
/// It covers the layout of the version (the place of each leaf), the writer, and all requests.
pub(super) fn plan_fingerprint(
    layout: &PlanLayout,
    writer: Option<u32>,
    requests: &[Request<'_>],
    coverage: Coverage,
) -> [u8; 32] {
    let mut bytes = Vec::with_capacity(128 * requests.len());
    bytes.extend(layout.manifest);
    bytes.extend(layout.groups);
    bytes.push(u8::from(coverage == Coverage::Part));
    bytes.extend(writer.map_or(u64::MAX, u64::from).to_le_bytes());
    let mut add = |words: &[u64]| {
        for word in words {
            bytes.extend_from_slice(&word.to_le_bytes());
        }
    };
    // Tied leaves may begin at the same place and have different strides.
    let add_order = |add: &mut dyn FnMut(&[u64]), meta: &TensorMeta| {
        let is_contiguous = meta.is_contiguous();
        add(&[dtype_word(meta.dtype()), u64::from(is_contiguous)]);
        if !is_contiguous {
            add(&meta.strides());
        }
    };
    for Request { leaf, region, meta } in requests {
        match leaf {
            LeafSelector::Fqn(fqn) => add(&[0, to_u64(fqn.len())]),
            LeafSelector::Leaf(_, TensorLeaf::Distributed(tensor)) => {
                add(&[2, u64::from(tensor.group)]);
            }
            LeafSelector::Leaf(_, TensorLeaf::Run(references)) => {
                let global_shape = TensorLeaf::Run(references).global_shape();
                add(&[1, to_u64(references.len()), to_u64(global_shape.len())]);
                add(global_shape);
                for reference in *references {
                    let storage = reference.storage.map_or(u64::MAX, u64::from);
                    let region = plan::region(reference);
                    add(&[storage, reference.byte_offset, to_u64(region.rank())]);
                    add(region.offsets());
                    add(region.shape());
                    add_order(&mut add, &reference.meta);
                }
            }
        }
        add(&[to_u64(meta.shape().len())]);
        add(meta.shape());
        add_order(&mut add, meta);
        add(&[u64::from(region.is_some())]);
        for vector in region.iter().flat_map(|part| [part.offsets, part.shape, part.global_shape]) {
            add(&[to_u64(vector.len())]);
            add(vector);
        }
    }
    for Request { leaf, .. } in requests {
        if let LeafSelector::Fqn(fqn) = leaf {
            bytes.extend(fqn.as_bytes());
        }
    }
    *blake3::hash(&bytes).as_bytes()
}

impl Plan {
    /// Plans the copies that fill the next target.
    pub(super) fn add(
        &mut self,
        request: &Request<'_>,
        stored: TensorLeaf<'_>,
        cover: Coverage,
    ) -> Result<()> {
        let Request { leaf, region, meta } = request;
        let fqn = leaf.fqn();
        check_no_overlap(fqn, meta)?;
        let global_shape = stored.global_shape();
        let (region, global_shape) = match region {
            Some(part) => {
                let region = Region::new(part.offsets, part.shape);
                (region.map_err(|error| error.with_path(fqn))?, part.global_shape.to_vec())
            }
            None => (Region::whole(global_shape), global_shape.to_vec()),
        };
        if region.shape() != meta.shape() {
            return Err(FormatError::new(FormatKind::SliceMismatch).with_path(fqn).with_detail(
                format_args!("target {:?}, wanted {:?}", meta.shape(), region.shape()),
            ));
        }
        let wanted =
            RegionRequest { region, global_shape: global_shape.into(), meta: (*meta).clone() };
        let part = |wanted: RegionRequest| {
            let copies = match cover {
                Coverage::Whole => plan::plan(stored, &wanted),
                Coverage::Part => plan::plan_partial(stored, &wanted),
            };
            let copies = copies.map_err(|error| error.with_path(fqn))?;
            Ok(TargetPart { len: to_usize(span(&wanted.meta)), copies })
        };
        let parts: Vec<TargetPart> =
            split_rows(wanted).into_iter().map(part).collect::<Result<_>>()?;
        self.push(parts);
        Ok(())
    }

    /// Adds the parts of the next target.
    fn push(&mut self, parts: Vec<TargetPart>) {
        for copy in parts.iter().flat_map(|part| &part.copies) {
            self.bytes += copy.total_bytes();
            let StorageId::Own(own) = copy.storage else { continue };
            let end = copy.source_offset.saturating_add(copy.runs.source_span());
            match self.ends.last_mut() {
                Some((storage, last)) if *storage == own => *last = end.max(*last),
                _ => self.ends.push((own, end)),
            }
        }
        self.targets.push(parts);
    }

    /// Returns each single copy.
    pub(super) fn copies(&self) -> impl Iterator<Item = SingleCopy<'_>> {
        self.targets.iter().flatten().flat_map(|part| &part.copies).flat_map(RegionCopy::each)
    }

    /// Returns the single copies that fill each target, in order.
    pub(super) fn copies_by_target(&self) -> impl Iterator<Item = Vec<SingleCopy<'_>>> {
        self.targets.iter().map(|parts| {
            parts.iter().flat_map(|part| &part.copies).flat_map(RegionCopy::each).collect()
        })
    }

    /// Returns whether storages of the manifest with these lengths contain all ranges that are read from them.
    ///
    /// The storages of groups contain them if their groups have the fingerprint of the plan.
    pub(super) fn fits(&self, lens: impl Fn(u32) -> Option<u64>) -> bool {
        self.ends.iter().all(|(storage, end)| lens(*storage).is_some_and(|len| *end <= len))
    }

    /// Splits the targets into the parts of the plan.
    ///
    /// Returns the parts in host memory, and the parts in device memory.
    pub(super) fn split_targets<'p, 't>(
        &'p self,
        targets: Vec<TargetMemory<'t>>,
    ) -> (Vec<HostPart<'p, 't>>, Vec<DevicePart<'p, 't>>) {
        let mut host_parts = Vec::with_capacity(self.targets.len());
        let mut device_parts = Vec::new();
        for (number, (parts, target)) in self.targets.iter().zip(targets).enumerate() {
            match target {
                TargetMemory::Host(mut rest) => {
                    for part in parts {
                        let (memory, tail) = rest.split_at_mut(part.len);
                        host_parts.push((&*part.copies, memory));
                        rest = tail;
                    }
                }
                TargetMemory::Device(blob) => {
                    let mut start = 0;
                    for TargetPart { len, copies } in parts {
                        device_parts.push(DevicePart {
                            target_index: number,
                            blob,
                            start,
                            len: *len,
                            copies,
                        });
                        start += to_u64(*len);
                    }
                }
            }
        }
        (host_parts, device_parts)
    }
}

/// Splits a large contiguous request into rows, so that several threads can fill it.
fn split_rows(wanted: RegionRequest) -> Vec<RegionRequest> {
    let rows = wanted.meta.shape().first().copied().unwrap_or(1);
    let row_bytes = wanted.meta.nbytes().checked_div(rows).unwrap_or(0);
    if wanted.meta.nbytes() < 2 * PART_BYTES || !wanted.meta.is_contiguous() || rows < 2 {
        return vec![wanted];
    }
    let step = PART_BYTES.div_ceil(row_bytes);
    let part = |row: u64| {
        let mut offsets = wanted.region.offsets().to_vec();
        let mut shape = wanted.region.shape().to_vec();
        offsets[0] += row;
        shape[0] = step.min(rows - row);
        let region = Region::new(&offsets, &shape).expect("a part of a region");
        let meta = TensorMeta::new(wanted.meta.dtype(), &shape).expect("a part of a tensor");
        RegionRequest { region, global_shape: wanted.global_shape.clone(), meta }
    };
    (0..rows).step_by(to_usize(step)).map(part).collect()
}

#[cfg(test)]
mod tests {
    use tssd_format::{
        ChunkPolicy, DeviceMesh, DistributedTensor, Dtype, Placement, Runs, TensorReference,
        TensorSlice,
    };

    use super::*;

    fn meta(shape: &[u64]) -> TensorMeta {
        TensorMeta::new(Dtype::Uint8, shape).unwrap()
    }

    fn copy(storage: u32, source: u64, len: u64) -> RegionCopy {
        RegionCopy {
            storage: storage.into(),
            source_offset: source,
            target_offset: 0,
            runs: Runs::contiguous(len),
            repeats: Vec::new(),
        }
    }

    #[test]
    fn plan_fits_storages_that_contain_all_ranges() {
        let mut plan = Plan::default();
        plan.push(vec![TargetPart { len: 4, copies: vec![copy(1, 8, 4)] }]);
        assert_eq!(plan.bytes, 4);
        let lens = |lens: &'static [u64]| move |storage: u32| lens.get(storage as usize).copied();
        assert!(plan.fits(lens(&[0, 12])));
        assert!(!plan.fits(lens(&[12, 11])));
        assert!(!plan.fits(lens(&[12])));
    }

    #[test]
    fn plan_records_ends_of_ranges() {
        let mut plan = Plan::default();
        plan.push(vec![TargetPart { len: 9, copies: vec![copy(1, 8, 4), copy(1, 2, 5)] }]);
        plan.push(vec![TargetPart { len: 3, copies: vec![copy(2, 0, 3)] }]);
        plan.push(vec![TargetPart { len: 1, copies: vec![copy(1, 20, 1)] }]);
        assert_eq!(plan.bytes, 13);
        assert_eq!(plan.ends, [(1, 12), (2, 3), (1, 21)]);
        let sources: Vec<u64> = plan.copies().map(|copy| copy.source_offset).collect();
        assert_eq!(sources, [8, 2, 0, 20]);
    }

    #[test]
    fn cache_keeps_recent_plans() {
        let cache = PlanCache::default();
        let name = |number: usize| [u8::try_from(number).unwrap(); 32];
        for number in 0..=MAX_PLANS {
            let plan = Plan { bytes: to_u64(number), ..Plan::default() };
            cache.insert(name(number), Arc::new(plan));
        }
        assert!(cache.get(&name(0)).is_none());
        for number in 1..=MAX_PLANS {
            assert_eq!(cache.get(&name(number)).unwrap().bytes, to_u64(number));
        }
    }

    /// A request of a test.
    #[derive(Clone)]
    struct TestRequest {
        fqn: &'static str,
        references: Option<Vec<TensorReference>>,
        part: Option<[Vec<u64>; 3]>,
        meta: TensorMeta,
    }

    impl TestRequest {
        fn as_request(&self) -> Request<'_> {
            let leaf = match &self.references {
                Some(references) => LeafSelector::Leaf(self.fqn, TensorLeaf::Run(references)),
                None => LeafSelector::Fqn(self.fqn),
            };
            let region = self.part.as_ref().map(|[offsets, shape, global_shape]| GlobalRegion {
                offsets,
                shape,
                global_shape,
            });
            Request { leaf, region, meta: &self.meta }
        }
    }

    /// Returns a tensor whose rows two devices hold.
    fn distributed_rows(group: u32) -> DistributedTensor {
        let mesh = Arc::new(DeviceMesh::from_shape(&[2]).unwrap());
        let rows = [Placement::Shard { dim: 0 }].into();
        DistributedTensor::new(meta(&[2, 3]), mesh, rows, group, ChunkPolicy::default()).unwrap()
    }

    /// Requests that differ in one property each. All have different fingerprints.
    #[test]
    fn different_requests_have_different_fingerprints() {
        let place = |offsets: [u64; 2], global: [u64; 2]| {
            Some(ShardSpec::new(TensorSlice::new(&offsets, &[2, 3], &global).unwrap()))
        };
        let reference = TensorReference {
            meta: meta(&[2, 3]),
            storage: Some(1),
            byte_offset: 0,
            shard_spec: None,
        };
        let request =
            TestRequest { fqn: "weight", references: None, part: None, meta: meta(&[2, 3]) };
        let with_reference = |reference: TensorReference| TestRequest {
            references: Some(vec![reference]),
            ..request.clone()
        };
        let part = |vectors: [[u64; 2]; 3]| TestRequest {
            part: Some(vectors.map(|vector| vector.to_vec())),
            ..request.clone()
        };
        let with_meta = |meta: TensorMeta| TestRequest { meta, ..request.clone() };
        let named = |fqn| TestRequest { fqn, ..request.clone() };
        let cases: Vec<Vec<TestRequest>> = vec![
            vec![],
            vec![request.clone()],
            vec![request.clone(), request.clone()],
            vec![named("bias")],
            vec![named("ab"), named("c")],
            vec![named("a"), named("bc")],
            vec![named("abc")],
            vec![with_meta(meta(&[3, 2]))],
            vec![with_meta(meta(&[6]))],
            vec![with_meta(TensorMeta::new(Dtype::Int8, &[2, 3]).unwrap())],
            vec![with_meta(meta(&[2, 3]).with_strides(&[1, 2]).unwrap())],
            vec![with_meta(meta(&[2, 3]).with_strides(&[4, 1]).unwrap())],
            vec![part([[0, 0], [2, 3], [2, 3]])],
            vec![part([[0, 1], [2, 3], [2, 3]])],
            vec![part([[0, 0], [2, 4], [2, 3]])],
            vec![part([[0, 0], [2, 3], [2, 5]])],
            vec![with_reference(reference.clone())],
            vec![TestRequest {
                references: Some(vec![reference.clone(), reference.clone()]),
                ..request.clone()
            }],
            vec![with_reference(TensorReference { storage: None, ..reference.clone() })],
            vec![with_reference(TensorReference { storage: Some(2), ..reference.clone() })],
            vec![with_reference(TensorReference { byte_offset: 1, ..reference.clone() })],
            vec![with_reference(TensorReference {
                meta: meta(&[2, 3]).with_strides(&[1, 2]).unwrap(),
                ..reference.clone()
            })],
            vec![with_reference(TensorReference {
                meta: TensorMeta::new(Dtype::Int8, &[2, 3]).unwrap(),
                ..reference.clone()
            })],
            vec![with_reference(TensorReference {
                shard_spec: place([0, 0], [2, 4]),
                ..reference.clone()
            })],
            vec![with_reference(TensorReference {
                shard_spec: place([0, 0], [3, 4]),
                ..reference.clone()
            })],
            vec![with_reference(TensorReference {
                shard_spec: place([1, 0], [3, 4]),
                ..reference.clone()
            })],
        ];
        let distributed = [distributed_rows(0), distributed_rows(1)];
        let whole = meta(&[2, 3]);
        let of_group = |tensor| {
            let leaf = LeafSelector::Leaf("weight", TensorLeaf::Distributed(tensor));
            vec![Request { leaf, region: None, meta: &whole }]
        };
        let mut fingerprints = Vec::new();
        let runs =
            cases.iter().map(|requests| requests.iter().map(TestRequest::as_request).collect());
        for requests in runs.chain(distributed.iter().map(of_group)) {
            for (manifest, groups, writer, cover) in [
                ([1; 16], [7; 16], None, Coverage::Whole),
                ([2; 16], [7; 16], None, Coverage::Whole),
                ([1; 16], [8; 16], None, Coverage::Whole),
                ([1; 16], [7; 16], Some(0), Coverage::Whole),
                ([1; 16], [7; 16], Some(1), Coverage::Whole),
                ([1; 16], [7; 16], None, Coverage::Part),
            ] {
                let layout = PlanLayout { manifest, groups };
                let fingerprint = plan_fingerprint(&layout, writer, &requests, cover);
                assert_eq!(fingerprint, plan_fingerprint(&layout, writer, &requests, cover));
                fingerprints.push(fingerprint);
            }
        }
        let count = fingerprints.len();
        fingerprints.sort_unstable();
        fingerprints.dedup();
        assert_eq!(fingerprints.len(), count);
    }

    /// Large requests are split into consecutive parts of whole rows. Other requests are not split.
    #[test]
    fn large_requests_are_split_into_rows() {
        const MIB: u64 = 1 << 20;
        let wanted = |offset: u64, meta: TensorMeta| {
            let mut offsets = vec![0; meta.shape().len()];
            offsets.first_mut().into_iter().for_each(|first| *first = offset);
            let region = Region::new(&offsets, meta.shape()).unwrap();
            let global_shape = offsets.iter().zip(meta.shape()).map(|(offset, len)| offset + len);
            RegionRequest { region, global_shape: global_shape.collect(), meta }
        };
        let strided = meta(&[64, MIB]).with_strides(&[2 * MIB, 1]).unwrap();
        for (offset, meta, expected) in [
            (0, meta(&[]), vec![1]),
            (0, meta(&[0]), vec![0]),
            (0, meta(&[0, 40 * MIB]), vec![0]),
            (5, meta(&[32 * MIB - 1]), vec![32 * MIB - 1]),
            (5, meta(&[32 * MIB]), vec![16 * MIB; 2]),
            (5, meta(&[33 * MIB]), vec![16 * MIB, 16 * MIB, MIB]),
            (0, meta(&[1, 40 * MIB]), vec![1]),
            (0, meta(&[2, 40 * MIB]), vec![1, 1]),
            // 16 MiB is not a whole number of rows: a part is larger.
            (7, meta(&[8, 5 * MIB]), vec![4, 4]),
            (7, meta(&[9, 5 * MIB]), vec![4, 4, 1]),
            (0, strided, vec![64]),
        ] {
            let parts = split_rows(wanted(offset, meta.clone()));
            let lens: Vec<u64> =
                parts.iter().map(|part| part.meta.shape().first().copied().unwrap_or(1)).collect();
            assert_eq!(lens, expected, "{meta:?}");
            let mut next = offset;
            for (part, len) in parts.iter().zip(&lens) {
                assert_eq!(part.region.shape(), part.meta.shape());
                assert_eq!(part.meta.shape().get(1..), meta.shape().get(1..));
                assert_eq!(part.region.offsets().first().copied().unwrap_or(0), next);
                assert_eq!(&part.global_shape, &wanted(offset, meta.clone()).global_shape);
                next += len;
            }
        }
    }

    #[test]
    fn mismatched_requests_are_rejected_by_fqn() {
        let references = [TensorReference {
            meta: meta(&[2, 3]),
            storage: Some(1),
            byte_offset: 5,
            shard_spec: None,
        }];
        let add = |plan: &mut Plan, request: &TestRequest| {
            plan.add(&request.as_request(), TensorLeaf::Run(&references), Coverage::Whole)
        };
        let request = |meta| TestRequest { fqn: "weight", references: None, part: None, meta };
        let mut plan = Plan::default();
        add(&mut plan, &request(meta(&[2, 3]))).unwrap();
        let all = TestRequest { references: Some(references.to_vec()), ..request(meta(&[2, 3])) };
        add(&mut plan, &all).unwrap();
        let found: Vec<_> =
            plan.copies().map(|copy| (copy.source_offset, copy.target_offset)).collect();
        assert_eq!((plan.targets.len(), found), (2, vec![(5, 0), (5, 0)]));
        assert_eq!((plan.bytes, &plan.ends[..]), (12, &[(1, 11)][..]));
        let part = |shape: [u64; 2], global_shape: [u64; 2]| TestRequest {
            part: Some([vec![0, 0], shape.to_vec(), global_shape.to_vec()]),
            ..request(meta(&[2, 3]))
        };
        let by_run = |meta| TestRequest { references: Some(references.to_vec()), ..request(meta) };
        for (wrong, kind) in [
            (request(meta(&[3, 2])), FormatKind::SliceMismatch),
            (request(meta(&[6])), FormatKind::SliceMismatch),
            (by_run(meta(&[2, 2])), FormatKind::SliceMismatch),
            (part([2, 2], [2, 3]), FormatKind::SliceMismatch),
            // The global shape differs from that of the stored tensor.
            (part([2, 3], [2, 4]), FormatKind::OutsideGlobal),
        ] {
            let error = add(&mut plan, &wrong).unwrap_err();
            assert_eq!((error.kind(), error.path()), (kind, Some("weight")));
        }
        assert_eq!(plan.targets.len(), 2);
    }

    /// Memory of 9 bytes that ignores writes.
    #[derive(Debug)]
    struct NullMemory;

    impl BlobMut for NullMemory {
        fn size(&self) -> u64 {
            9
        }

        fn write_all_at(&self, _: &[u8], _: u64) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn each_part_gets_its_memory() {
        let mut plan = Plan::default();
        let part = |len, source| TargetPart { len, copies: vec![copy(0, source, to_u64(len))] };
        plan.push(vec![part(2, 10), part(3, 20)]);
        plan.push(vec![part(4, 30), part(5, 40)]);
        let mut memory = [1, 2, 3, 4, 5, 6];
        let targets = vec![TargetMemory::Host(&mut memory), TargetMemory::Device(&NullMemory)];
        let (host_parts, device_parts) = plan.split_targets(targets);
        let host_parts: Vec<_> = host_parts
            .iter()
            .map(|(copies, bytes)| (copies[0].source_offset, &bytes[..]))
            .collect();
        assert_eq!(host_parts, [(10, &[1, 2][..]), (20, &[3, 4, 5])]);
        let device_parts: Vec<_> = device_parts
            .iter()
            .map(|part| (part.target_index, part.start, part.len, part.copies[0].source_offset))
            .collect();
        assert_eq!(device_parts, [(1, 0, 4, 30), (1, 4, 5, 40)]);
    }
}
