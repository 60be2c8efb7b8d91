//! What is copied where, kept for the next version of the same layout.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use tssd_format::{
    Error as FormatError, ErrorKind as FormatKind, Region, Result, ShardPlace, TensorMeta,
    TensorReference,
};

use super::target::{BlobMut, TargetMemory, expect_apart, span};
use super::{native, wide};
use crate::plan::{self, Copy, Wanted};

/// Plans of the last reads, by layout and wish: a version with the layout of the one before it needs
/// no planning.
#[derive(Default)]
pub(crate) struct PlanCache(Mutex<VecDeque<([u8; 32], Arc<Plan>)>>);

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

impl<'a> From<&'a ShardPlace> for Box<'a> {
    fn from(place: &'a ShardPlace) -> Self {
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
        let plans = self.0.lock().expect("nobody panics while holding the plans");
        plans.iter().find(|(other, _)| other == name).map(|(_, plan)| plan.clone())
    }

    pub(super) fn insert(&self, name: [u8; 32], plan: Arc<Plan>) {
        let mut plans = self.0.lock().expect("nobody panics while holding the plans");
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
                }
            }
        }
        add(&[u64::from(meta.dtype().code()), wide(meta.shape().len())]);
        add(meta.shape());
        add(&[u64::from(meta.is_contiguous())]);
        if !meta.is_contiguous() {
            add(&meta.strides());
        }
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
                (region.map_err(|error| error.at(fqn))?, part.global_shape.to_vec())
            }
            None => (Region::whole(&global_shape), global_shape),
        };
        if region.shape() != meta.shape() {
            return Err(FormatError::new(FormatKind::SliceMismatch).at(fqn).note(format_args!(
                "target {:?}, wanted {:?}",
                meta.shape(),
                region.shape()
            )));
        }
        let wanted = Wanted { region, global_shape: global_shape.into(), meta: (*meta).clone() };
        let part = |wanted: Wanted| {
            let copies = match cover {
                Cover::Whole => plan::plan(references, &wanted),
                Cover::Part => plan::shared(references, &wanted),
            };
            let copies = copies.map_err(|error| error.at(fqn))?;
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
    use tssd_format::Runs;

    use super::*;

    #[test]
    fn a_plan_fits_what_has_all_that_it_copies() {
        let copy = Copy { storage: 1, source: 8, target: 0, runs: Runs::run(4) };
        let part = Part { len: 4, copies: vec![copy] };
        let mut plan = Plan::default();
        plan.push(vec![part]);
        assert_eq!(plan.bytes, 4);
        let lens = |lens: &'static [u64]| move |storage: u32| lens.get(storage as usize).copied();
        assert!(plan.fits(lens(&[0, 12])));
        assert!(!plan.fits(lens(&[12, 11])));
        assert!(!plan.fits(lens(&[12])));
    }
}
