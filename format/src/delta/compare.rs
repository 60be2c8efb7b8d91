//! Comparison of two versions of a block.

use super::class_map::ClassMaps;
use super::classes::ClassPlan;
use super::layout::MAX_CLASSES;
use crate::isa::{GROUP, Instructions, Isa, Kernel, changed_elements};

/// Bytes of a version that are compared and checksummed at a time.
const STEP_BYTES: usize = 8 << 10;

/// Bytes of each version that are prefetched at a time. A processor stalls at many more.
const PREFETCH_BYTES: usize = 2 << 10;

/// Comparison of two versions of a block.
pub(super) struct Comparison<'a, const W: usize> {
    pub(super) isa: Isa,
    pub(super) plan: &'a ClassPlan,
    pub(super) old: &'a [[u8; W]],
    pub(super) new: &'a [[u8; W]],
}

impl<const W: usize> Comparison<'_, W> {
    /// Finds the changed elements, and with several classes the class of each element.
    ///
    /// Returns the checksum of the new version, unless `crc` is known, and the number of changed elements.
    pub(super) fn run(
        &self,
        crc: Option<u32>,
        changed: &mut Vec<u64>,
        maps: &mut ClassMaps,
    ) -> (u32, usize) {
        let (mut hasher, mut listed) = (crc32fast::Hasher::new(), 0);
        changed.clear();
        maps.clear();
        let thresholds = &self.plan.thresholds;
        // In steps, so that each checksum finds its bytes in the L1 cache.
        let steps = || self.old.chunks(STEP_BYTES / W).zip(self.new.chunks(STEP_BYTES / W));
        let mut next_steps = steps().skip(1);
        for (old, new) in steps() {
            let (changed, maps) = (&mut *changed, &mut *maps);
            listed += match self.plan.classes {
                1 => self.isa.run(FindChanged::<W, 1> { old, new, changed, maps, thresholds }),
                2 => self.isa.run(FindChanged::<W, 2> { old, new, changed, maps, thresholds }),
                _ => self.isa.run(FindChanged::<W, 4> { old, new, changed, maps, thresholds }),
            };
            if crc.is_none() {
                checksum_step(self.isa, new, next_steps.next(), &mut hasher);
            }
        }
        if self.plan.classes > 1 {
            maps.finish();
        }
        (crc.unwrap_or_else(|| hasher.finalize()), listed)
    }
}

/// A step of the old version and of the new one.
type Versions<'a, const W: usize> = (&'a [[u8; W]], &'a [[u8; W]]);

/// Extends a checksum by a step of the new version, while the processor loads the next step of both versions.
///
/// A checksum alone would leave the memory idle: the comparison is limited by the memory, the checksum is not.
fn checksum_step<const W: usize>(
    isa: Isa,
    step: &[[u8; W]],
    next: Option<Versions<'_, W>>,
    hasher: &mut crc32fast::Hasher,
) {
    let (old, new) = next.unwrap_or_default();
    let mut next = [old, new].map(|version| version.as_flattened().chunks(PREFETCH_BYTES));
    for part in step.as_flattened().chunks(PREFETCH_BYTES) {
        next.iter_mut().filter_map(Iterator::next).for_each(|bytes| isa.prefetch(bytes));
        hasher.update(part);
    }
}

/// Appends masks of the changed elements of a step, and returns their number. With several classes, appends to the
/// class maps too, while the elements are in the L1 cache.
struct FindChanged<'a, const W: usize, const C: usize> {
    old: &'a [[u8; W]],
    new: &'a [[u8; W]],
    changed: &'a mut Vec<u64>,
    maps: &'a mut ClassMaps,
    thresholds: &'a [u32; MAX_CLASSES - 1],
}

impl<const W: usize, const C: usize> Kernel for FindChanged<'_, W, C> {
    type Output = usize;

    #[inline(always)]
    fn run<I: Instructions>(self, isa: I) -> usize {
        let (old, old_tail) = self.old.as_chunks::<GROUP>();
        let (new, new_tail) = self.new.as_chunks::<GROUP>();
        let new = &new[..old.len()];
        let start = self.changed.len();
        self.changed.resize(start + self.old.len().div_ceil(GROUP), 0);
        let changed = &mut self.changed[start..];
        let mut count = 0_u32;
        let mut compare = |number: usize| {
            let mask = isa.changed(&old[number], &new[number]);
            changed[number] = mask;
            count = count.wrapping_add(mask.count_ones());
        };
        if C > 1 {
            self.maps.push::<W, C, I>(isa, self.old, self.thresholds, compare);
        } else {
            (0..old.len()).for_each(&mut compare);
        }
        if let Some(mask) = changed.get_mut(old.len()) {
            *mask = changed_elements(old_tail, new_tail);
            count = count.wrapping_add(mask.count_ones());
        }
        count as usize
    }
}
