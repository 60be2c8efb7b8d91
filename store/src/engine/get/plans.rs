//! What is copied where, kept for the next version of the same layout.

use std::collections::VecDeque;
use std::sync::Arc;

use tssd_format::{
    Error as FormatError, ErrorKind as FormatKind, Region, Result, ShardSpec, TensorMeta,
    TensorReference,
};

use super::target::{TargetMemory, expect_apart, span};
use super::{native, wide};
use crate::device::BlobMut;
use crate::io::sync::Lock;
use crate::plan::{self, Copy, Wanted};

/// Plans of the last reads, by layout and wish: a version with the layout of the one before it needs
/// no planning.
#[derive(Default)]
pub(crate) struct PlanCache(Lock<VecDeque<([u8; 32], Arc<Plan>)>>);

/// How many plans are kept.
const PLANS: usize = 16;

/// Large contiguous targets are cut into parts of about this many bytes, for several threads.
const PART_BYTES: u64 = 16 << 20;

/// What is wanted of a leaf: a box of it, or all of it, and how it is to lie in memory.
pub(super) struct Request<'a> {
    pub(super) leaf: Leaf<'a>,
    pub(super) part: Option<Box<'a>>,
    pub(super) meta: &'a TensorMeta,
}

/// Which leaf is meant.
#[derive(Clone, Copy)]
pub(super) enum Leaf<'a> {
    /// The one that this fqn names, if it names one.
    Named(&'a str),
    /// The one of these references, which has this fqn, maybe with others.
    Run(&'a str, &'a [TensorReference]),
}

impl<'a> Leaf<'a> {
    pub(super) fn fqn(self) -> &'a str {
        let (Self::Named(fqn) | Self::Run(fqn, _)) = self;
        fqn
    }
}

/// A box of a global tensor.
#[derive(Clone, Copy)]
pub(super) struct Box<'a> {
    pub(super) offsets: &'a [u64],
    pub(super) shape: &'a [u64],
    pub(super) global_shape: &'a [u64],
}

impl<'a> From<&'a ShardSpec> for Box<'a> {
    fn from(place: &'a ShardSpec) -> Self {
        let slice = place.slice();
        let (offsets, shape) = (slice.offsets(), slice.local_shape());
        Self { offsets, shape, global_shape: slice.global_shape() }
    }
}

/// How much of what is wanted a version must have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cover {
    /// Each element.
    Whole,
    /// Others may have the rest.
    Part,
}

/// What fills each target.
#[derive(Default)]
pub(super) struct Plan {
    /// The parts of each target, in order.
    targets: Vec<Vec<Part>>,
    /// How far storages are read, side by side: what a version must have is compared each time.
    ends: Vec<(u32, u64)>,
    /// How many bytes are copied.
    pub(super) bytes: u64,
}

/// A part of a target, from where the one before it ends, and what fills it: its copies count from there.
struct Part {
    /// How many bytes of its memory.
    len: usize,
    copies: Vec<Copy>,
}

/// A part of a target in this process's memory, and what fills it.
pub(super) type Here<'p, 't> = (&'p [Copy], &'t mut [u8]);

/// A part of a target that this process does not see.
pub(super) struct Beyond<'p, 't> {
    /// The number of the target.
    pub(super) number: usize,
    pub(super) blob: &'t dyn BlobMut,
    /// Where it begins there, and how many bytes it has.
    pub(super) start: u64,
    pub(super) len: usize,
    pub(super) copies: &'p [Copy],
}

impl PlanCache {
    /// The plan of a name, if it is one of the last.
    pub(super) fn get(&self, name: &[u8; 32]) -> Option<Arc<Plan>> {
        let plans = self.0.lock();
        plans.iter().find(|(other, _)| other == name).map(|(_, plan)| plan.clone())
    }

    pub(super) fn insert(&self, name: [u8; 32], plan: Arc<Plan>) {
        let mut plans = self.0.lock();
        plans.push_front((name, plan));
        plans.truncate(PLANS);
    }
}

/// What a plan is kept under: the layout of the version, which says where each leaf lies, whose leaves are
/// read, and all that is wanted of them.
pub(super) fn name(
    layout: &[u8; 16],
    writer: Option<u32>,
    (requests, cover): (&[Request<'_>], Cover),
) -> [u8; 32] {
    let mut bytes = Vec::with_capacity(128 * requests.len());
    bytes.extend(layout);
    bytes.push(u8::from(cover == Cover::Part));
    bytes.extend(writer.map_or(u64::MAX, u64::from).to_le_bytes());
    let mut add = |words: &[u64]| bytes.extend(words.iter().flat_map(|word| word.to_le_bytes()));
    // Leaves may be tied that begin at one place, and lie there in different orders.
    let add_order = |add: &mut dyn FnMut(&[u64]), meta: &TensorMeta| {
        add(&[u64::from(meta.dtype().code()), u64::from(meta.is_contiguous())]);
        if !meta.is_contiguous() {
            add(&meta.strides());
        }
    };
    for Request { leaf, part, meta } in requests {
        match leaf {
            Leaf::Named(fqn) => add(&[0, wide(fqn.len())]),
            Leaf::Run(_, references) => {
                let global_shape = plan::global_shape(&references[0]);
                add(&[1, wide(references.len()), wide(global_shape.len())]);
                add(&global_shape);
                for reference in *references {
                    let storage = reference.storage.map_or(u64::MAX, u64::from);
                    let region = plan::region(reference);
                    add(&[storage, reference.byte_offset, wide(region.rank())]);
                    add(region.offsets());
                    add(region.shape());
                    add_order(&mut add, &reference.meta);
                }
            }
        }
        add(&[wide(meta.shape().len())]);
        add(meta.shape());
        add_order(&mut add, meta);
        add(&[u64::from(part.is_some())]);
        for vector in part.iter().flat_map(|part| [part.offsets, part.shape, part.global_shape]) {
            add(&[wide(vector.len())]);
            add(vector);
        }
    }
    for Request { leaf, .. } in requests {
        if let Leaf::Named(fqn) = leaf {
            bytes.extend(fqn.as_bytes());
        }
    }
    *blake3::hash(&bytes).as_bytes()
}

impl Plan {
    /// Adds what fills the next target.
    pub(super) fn add(
        &mut self,
        request: &Request<'_>,
        references: &[TensorReference],
        cover: Cover,
    ) -> Result<()> {
        let Request { leaf, part, meta } = request;
        let fqn = leaf.fqn();
        expect_apart(fqn, meta)?;
        let global_shape = plan::global_shape(&references[0]);
        let (region, global_shape) = match part {
            Some(part) => {
                let region = Region::new(part.offsets, part.shape);
                (region.map_err(|error| error.with_path(fqn))?, part.global_shape.to_vec())
            }
            None => (Region::whole(&global_shape), global_shape),
        };
        if region.shape() != meta.shape() {
            return Err(FormatError::new(FormatKind::SliceMismatch).with_path(fqn).with_detail(
                format_args!("target {:?}, wanted {:?}", meta.shape(), region.shape()),
            ));
        }
        let wanted = Wanted { region, global_shape: global_shape.into(), meta: (*meta).clone() };
        let part = |wanted: Wanted| {
            let copies = match cover {
                Cover::Whole => plan::plan(references, &wanted),
                Cover::Part => plan::shared(references, &wanted),
            };
            let copies = copies.map_err(|error| error.with_path(fqn))?;
            Ok(Part { len: native(span(&wanted.meta)), copies })
        };
        let parts: Vec<Part> = rows(wanted).into_iter().map(part).collect::<Result<_>>()?;
        self.push(parts);
        Ok(())
    }

    /// The parts of the next target.
    fn push(&mut self, parts: Vec<Part>) {
        for copy in parts.iter().flat_map(|part| &part.copies) {
            self.bytes += copy.runs.total_bytes();
            let end = copy.source.saturating_add(copy.runs.source_span());
            match self.ends.last_mut() {
                Some((storage, last)) if *storage == copy.storage => *last = end.max(*last),
                _ => self.ends.push((copy.storage, end)),
            }
        }
        self.targets.push(parts);
    }

    /// All that is copied.
    pub(super) fn copies(&self) -> impl Iterator<Item = &Copy> {
        self.targets.iter().flatten().flat_map(|part| &part.copies)
    }

    /// Whether storages of these lengths have all that is copied.
    pub(super) fn fits(&self, lens: impl Fn(u32) -> Option<u64>) -> bool {
        self.ends.iter().all(|(storage, end)| lens(*storage).is_some_and(|len| *end <= len))
    }

    /// The memory of each part of the targets that are here, with the copies that fill it; and the parts of those that
    /// are elsewhere.
    pub(super) fn cut<'p, 't>(
        &'p self,
        targets: Vec<TargetMemory<'t>>,
    ) -> (Vec<Here<'p, 't>>, Vec<Beyond<'p, 't>>) {
        let mut cut = Vec::with_capacity(self.targets.len());
        let mut beyond = Vec::new();
        for (number, (parts, target)) in self.targets.iter().zip(targets).enumerate() {
            match target {
                TargetMemory::Here(mut rest) => {
                    for part in parts {
                        let (memory, tail) = rest.split_at_mut(part.len);
                        cut.push((&*part.copies, memory));
                        rest = tail;
                    }
                }
                TargetMemory::Elsewhere(blob) => {
                    let mut start = 0;
                    for Part { len, copies } in parts {
                        beyond.push(Beyond { number, blob, start, len: *len, copies });
                        start += wide(*len);
                    }
                }
            }
        }
        (cut, beyond)
    }
}

/// Cuts a large contiguous wish into rows, so that several threads can fill it.
fn rows(wanted: Wanted) -> Vec<Wanted> {
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
        Wanted { region, global_shape: wanted.global_shape.clone(), meta }
    };
    (0..rows).step_by(native(step)).map(part).collect()
}

#[cfg(test)]
mod tests {
    use tssd_format::{Dtype, Runs, TensorSlice};

    use super::*;

    fn meta(shape: &[u64]) -> TensorMeta {
        TensorMeta::new(Dtype::Uint8, shape).unwrap()
    }

    fn copy(storage: u32, source: u64, len: u64) -> Copy {
        Copy { storage, source, target: 0, runs: Runs::contiguous(len) }
    }

    #[test]
    fn a_plan_fits_what_has_all_that_it_copies() {
        let mut plan = Plan::default();
        plan.push(vec![Part { len: 4, copies: vec![copy(1, 8, 4)] }]);
        assert_eq!(plan.bytes, 4);
        let lens = |lens: &'static [u64]| move |storage: u32| lens.get(storage as usize).copied();
        assert!(plan.fits(lens(&[0, 12])));
        assert!(!plan.fits(lens(&[12, 11])));
        assert!(!plan.fits(lens(&[12])));
    }

    #[test]
    fn a_plan_knows_how_far_it_reads() {
        let mut plan = Plan::default();
        plan.push(vec![Part { len: 9, copies: vec![copy(1, 8, 4), copy(1, 2, 5)] }]);
        plan.push(vec![Part { len: 3, copies: vec![copy(2, 0, 3)] }]);
        plan.push(vec![Part { len: 1, copies: vec![copy(1, 20, 1)] }]);
        assert_eq!(plan.bytes, 13);
        assert_eq!(plan.ends, [(1, 12), (2, 3), (1, 21)]);
        let sources: Vec<u64> = plan.copies().map(|copy| copy.source).collect();
        assert_eq!(sources, [8, 2, 0, 20]);
    }

    #[test]
    fn the_last_plans_are_kept() {
        let cache = PlanCache::default();
        let name = |number: usize| [u8::try_from(number).unwrap(); 32];
        for number in 0..=PLANS {
            let plan = Plan { bytes: wide(number), ..Plan::default() };
            cache.insert(name(number), Arc::new(plan));
        }
        assert!(cache.get(&name(0)).is_none());
        for number in 1..=PLANS {
            assert_eq!(cache.get(&name(number)).unwrap().bytes, wide(number));
        }
    }

    /// What a test wants of one leaf.
    #[derive(Clone)]
    struct Wish {
        fqn: &'static str,
        references: Option<Vec<TensorReference>>,
        part: Option<[Vec<u64>; 3]>,
        meta: TensorMeta,
    }

    impl Wish {
        fn request(&self) -> Request<'_> {
            let leaf = match &self.references {
                Some(references) => Leaf::Run(self.fqn, references),
                None => Leaf::Named(self.fqn),
            };
            let part = self.part.as_ref().map(|[offsets, shape, global_shape]| Box {
                offsets,
                shape,
                global_shape,
            });
            Request { leaf, part, meta: &self.meta }
        }
    }

    /// All that can differ in what is read and wanted, each time one of it: each has a name of its own.
    #[test]
    fn what_differs_has_another_name() {
        let place = |offsets: [u64; 2], global: [u64; 2]| {
            Some(ShardSpec::new(TensorSlice::new(&offsets, &[2, 3], &global).unwrap()))
        };
        let reference = TensorReference {
            meta: meta(&[2, 3]),
            storage: Some(1),
            byte_offset: 0,
            shard_spec: None,
        };
        let wish = Wish { fqn: "weight", references: None, part: None, meta: meta(&[2, 3]) };
        let referring =
            |reference: TensorReference| Wish { references: Some(vec![reference]), ..wish.clone() };
        let part = |vectors: [[u64; 2]; 3]| Wish {
            part: Some(vectors.map(|vector| vector.to_vec())),
            ..wish.clone()
        };
        let of_meta = |meta: TensorMeta| Wish { meta, ..wish.clone() };
        let named = |fqn| Wish { fqn, ..wish.clone() };
        let wishes: Vec<Vec<Wish>> = vec![
            vec![],
            vec![wish.clone()],
            vec![wish.clone(), wish.clone()],
            vec![named("bias")],
            vec![named("ab"), named("c")],
            vec![named("a"), named("bc")],
            vec![named("abc")],
            vec![of_meta(meta(&[3, 2]))],
            vec![of_meta(meta(&[6]))],
            vec![of_meta(TensorMeta::new(Dtype::Int8, &[2, 3]).unwrap())],
            vec![of_meta(meta(&[2, 3]).with_strides(&[1, 2]).unwrap())],
            vec![of_meta(meta(&[2, 3]).with_strides(&[4, 1]).unwrap())],
            vec![part([[0, 0], [2, 3], [2, 3]])],
            vec![part([[0, 1], [2, 3], [2, 3]])],
            vec![part([[0, 0], [2, 4], [2, 3]])],
            vec![part([[0, 0], [2, 3], [2, 5]])],
            vec![referring(reference.clone())],
            vec![Wish {
                references: Some(vec![reference.clone(), reference.clone()]),
                ..wish.clone()
            }],
            vec![referring(TensorReference { storage: None, ..reference.clone() })],
            vec![referring(TensorReference { storage: Some(2), ..reference.clone() })],
            vec![referring(TensorReference { byte_offset: 1, ..reference.clone() })],
            vec![referring(TensorReference {
                meta: meta(&[2, 3]).with_strides(&[1, 2]).unwrap(),
                ..reference.clone()
            })],
            vec![referring(TensorReference {
                meta: TensorMeta::new(Dtype::Int8, &[2, 3]).unwrap(),
                ..reference.clone()
            })],
            vec![referring(TensorReference {
                shard_spec: place([0, 0], [2, 4]),
                ..reference.clone()
            })],
            vec![referring(TensorReference {
                shard_spec: place([0, 0], [3, 4]),
                ..reference.clone()
            })],
            vec![referring(TensorReference {
                shard_spec: place([1, 0], [3, 4]),
                ..reference.clone()
            })],
        ];
        let mut names = Vec::new();
        for wishes in &wishes {
            let requests: Vec<Request<'_>> = wishes.iter().map(Wish::request).collect();
            for (layout, writer, cover) in [
                ([1; 16], None, Cover::Whole),
                ([2; 16], None, Cover::Whole),
                ([1; 16], Some(0), Cover::Whole),
                ([1; 16], Some(1), Cover::Whole),
                ([1; 16], None, Cover::Part),
            ] {
                let found = name(&layout, writer, (&requests, cover));
                assert_eq!(found, name(&layout, writer, (&requests, cover)));
                names.push(found);
            }
        }
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
    }

    /// Large wishes in parts of whole rows, one behind the other; all others as they are.
    #[test]
    fn large_wishes_are_cut_into_rows() {
        const MIB: u64 = 1 << 20;
        let wanted = |offset: u64, meta: TensorMeta| {
            let mut offsets = vec![0; meta.shape().len()];
            offsets.first_mut().into_iter().for_each(|first| *first = offset);
            let region = Region::new(&offsets, meta.shape()).unwrap();
            let global_shape = offsets.iter().zip(meta.shape()).map(|(offset, len)| offset + len);
            Wanted { region, global_shape: global_shape.collect(), meta }
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
            // Sixteen MiB are no whole number of rows: a part has more.
            (7, meta(&[8, 5 * MIB]), vec![4, 4]),
            (7, meta(&[9, 5 * MIB]), vec![4, 4, 1]),
            (0, strided, vec![64]),
        ] {
            let parts = rows(wanted(offset, meta.clone()));
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
    fn what_does_not_fit_is_refused_by_name() {
        let references = [TensorReference {
            meta: meta(&[2, 3]),
            storage: Some(1),
            byte_offset: 5,
            shard_spec: None,
        }];
        let add =
            |plan: &mut Plan, wish: &Wish| plan.add(&wish.request(), &references, Cover::Whole);
        let wish = |meta| Wish { fqn: "weight", references: None, part: None, meta };
        let mut plan = Plan::default();
        add(&mut plan, &wish(meta(&[2, 3]))).unwrap();
        let all = Wish { references: Some(references.to_vec()), ..wish(meta(&[2, 3])) };
        add(&mut plan, &all).unwrap();
        let found: Vec<_> = plan.copies().map(|copy| (copy.source, copy.target)).collect();
        assert_eq!((plan.targets.len(), found), (2, vec![(5, 0), (5, 0)]));
        assert_eq!((plan.bytes, &plan.ends[..]), (12, &[(1, 11)][..]));
        let part = |shape: [u64; 2], global_shape: [u64; 2]| Wish {
            part: Some([vec![0, 0], shape.to_vec(), global_shape.to_vec()]),
            ..wish(meta(&[2, 3]))
        };
        let by_run = |meta| Wish { references: Some(references.to_vec()), ..wish(meta) };
        for (wrong, kind) in [
            (wish(meta(&[3, 2])), FormatKind::SliceMismatch),
            (wish(meta(&[6])), FormatKind::SliceMismatch),
            (by_run(meta(&[2, 2])), FormatKind::SliceMismatch),
            (part([2, 2], [2, 3]), FormatKind::SliceMismatch),
            // Of another tensor than the one that is there.
            (part([2, 3], [2, 4]), FormatKind::OutsideGlobal),
        ] {
            let error = add(&mut plan, &wrong).unwrap_err();
            assert_eq!((error.kind(), error.path()), (kind, Some("weight")));
        }
        assert_eq!(plan.targets.len(), 2);
    }

    /// Memory that only counts.
    #[derive(Debug)]
    struct Far;

    impl BlobMut for Far {
        fn size(&self) -> u64 {
            9
        }

        fn write_all_at(&self, _: &[u8], _: u64) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn each_part_has_its_memory() {
        let mut plan = Plan::default();
        let part = |len, source| Part { len, copies: vec![copy(0, source, wide(len))] };
        plan.push(vec![part(2, 10), part(3, 20)]);
        plan.push(vec![part(4, 30), part(5, 40)]);
        let mut memory = [1, 2, 3, 4, 5, 6];
        let targets = vec![TargetMemory::Here(&mut memory), TargetMemory::Elsewhere(&Far)];
        let (here, beyond) = plan.cut(targets);
        let here: Vec<_> =
            here.iter().map(|(copies, bytes)| (copies[0].source, &bytes[..])).collect();
        assert_eq!(here, [(10, &[1, 2][..]), (20, &[3, 4, 5])]);
        let beyond: Vec<_> = beyond
            .iter()
            .map(|part| (part.number, part.start, part.len, part.copies[0].source))
            .collect();
        assert_eq!(beyond, [(1, 0, 4, 30), (1, 4, 5, 40)]);
    }
}
