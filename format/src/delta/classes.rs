//! Choice of the classes: how many, their thresholds, and whether their positions are bitmaps.

use super::layout::{MAX_CLASSES, NO_THRESHOLDS};
use crate::element::{load, magnitude_mask};
use crate::isa::{GROUP, Instructions, Kernel};

/// Number of classes of a delta chunk.
///
/// The elements of a class have base patterns of like magnitude, so that they change about equally often. More classes
/// make the chunk smaller, and making and applying it slower: a reader of one class reads only what changes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DeltaClasses {
    /// One class. Such chunks can be folded without the base.
    #[default]
    One,
    /// At most two classes.
    Two,
    /// At most four classes.
    Four,
    /// Two classes if they save at least 10 %, and up to four if they save another 10 %; else one.
    Auto,
}

/// The classes of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ClassPlan {
    pub(super) classes: usize,
    pub(super) thresholds: [u32; MAX_CLASSES - 1],
    pub(super) bitmaps: [bool; MAX_CLASSES],
}

/// Chooses the classes of a chunk from a sample of its elements.
pub(super) struct ChooseClasses<'a, const W: usize> {
    pub(super) old: &'a [[u8; W]],
    pub(super) new: &'a [[u8; W]],
    pub(super) classes: DeltaClasses,
}

/// Groups in a sample, if the chunk has as many.
const SAMPLE_GROUPS: usize = 256;

/// Groups in a sample that decides only whether the positions of the only class are a bitmap.
const SMALL_SAMPLE_GROUPS: usize = 64;

/// Bins of the histogram of patterns: bf16 and fp32 have 256 exponents.
const BINS: usize = 256;

/// Bytes that a further class costs: its Huffman tables, and the headers of frames, columns and blocks.
const CLASS_BYTES: u64 = 150;

/// Bits of a value, for estimates of whether classes save enough.
const VALUE_BITS: u64 = 2;

/// Smallest saving of [`DeltaClasses::Auto`], in percent.
const MIN_GAIN_PERCENT: u64 = 10;

impl<const W: usize> Kernel for ChooseClasses<'_, W> {
    type Output = ClassPlan;

    #[inline(always)]
    fn run<I: Instructions>(self, isa: I) -> ClassPlan {
        let (old, _) = self.old.as_chunks::<GROUP>();
        let (new, _) = self.new.as_chunks::<GROUP>();
        if self.classes == DeltaClasses::One {
            let step = old.len().div_ceil(SMALL_SAMPLE_GROUPS).max(1);
            let sample = || old.iter().zip(new).step_by(step);
            let changed = sample().map(|(old, new)| isa.changed(old, new).count_ones() as usize);
            let bin = Bin { first: 0, elements: sample().len() * GROUP, changed: changed.sum() };
            return ClassPlan::new(&[bin]);
        }
        let step = old.len().div_ceil(SAMPLE_GROUPS).max(1);
        let sample = || old.iter().zip(new).step_by(step);
        // A pass of its own: so little work for each group lets the processor load many groups at the same time.
        let mut masks = [0; SAMPLE_GROUPS];
        for (mask, (old, new)) in masks.iter_mut().zip(sample()) {
            *mask = isa.changed(old, new);
        }
        let (mut elements, mut changed) = ([[0_u32; BINS]; 4], [0_u32; BINS]);
        let shift = bin_shift::<W>();
        let bin = |element| (load(element) & magnitude_mask::<W>()) as usize >> shift;
        let count = |counts: &mut [u32; BINS], element| {
            let count = &mut counts[bin(element) % BINS];
            *count = count.wrapping_add(1);
        };
        for (mut mask, (old, _)) in masks.into_iter().zip(sample()) {
            for [a, b, c, d] in old.as_chunks::<4>().0 {
                // Neighbors often share a bin. With a table for each, increments do not wait for each other.
                count(&mut elements[0], a);
                count(&mut elements[1], b);
                count(&mut elements[2], c);
                count(&mut elements[3], d);
            }
            while mask != 0 {
                count(&mut changed, &old[mask.trailing_zeros() as usize]);
                mask &= mask.wrapping_sub(1);
            }
        }
        let elements = std::array::from_fn(|bin| elements.iter().map(|counts| counts[bin]).sum());
        choose(&merge_bins(shift, &elements, &changed), self.classes, self.old.len())
    }
}

/// Returns by how many bits a pattern without sign is shifted for its bin.
const fn bin_shift<const W: usize>() -> u32 {
    magnitude_mask::<W>().count_ones().saturating_sub(BINS.ilog2())
}

/// Sampled elements with patterns from `first` to the next bin.
#[derive(Clone, Copy, Debug, Default)]
struct Bin {
    first: u32,
    elements: usize,
    changed: usize,
}

impl ClassPlan {
    fn new(classes: &[Bin]) -> Self {
        let mut plan = Self {
            classes: classes.len(),
            thresholds: NO_THRESHOLDS,
            bitmaps: [false; MAX_CLASSES],
        };
        for (bitmap, bin) in plan.bitmaps.iter_mut().zip(classes) {
            // Where more than 1 element in 8 is listed, a bitmap has fewer bytes than the gaps.
            *bitmap = bin.changed * 8 > bin.elements;
        }
        let firsts = classes.iter().skip(1).map(|bin| bin.first);
        plan.thresholds.iter_mut().zip(firsts).for_each(|(threshold, first)| *threshold = first);
        plan
    }
}

/// Merges neighboring bins until each has a share of the elements or of the changes that matters.
fn merge_bins(shift: u32, elements: &[u32; BINS], changed: &[u32; BINS]) -> Vec<Bin> {
    const MIN_SHARE: usize = 24;
    let total: usize = elements.iter().map(|count| *count as usize).sum();
    let total_changed: usize = changed.iter().map(|count| *count as usize).sum();
    let (mut bins, mut open) = (Vec::with_capacity(2 * MIN_SHARE + 1), Bin::default());
    for (bin, (elements, changed)) in (0_u32..).zip(elements.iter().zip(changed)) {
        open.elements += *elements as usize;
        open.changed += *changed as usize;
        let is_large =
            open.elements * MIN_SHARE > total || open.changed * MIN_SHARE > total_changed;
        if is_large && open.elements > 0 {
            bins.push(open);
            open = Bin { first: (bin + 1) << shift, ..Bin::default() };
        }
    }
    if open.elements > 0 {
        bins.push(open);
    }
    bins
}

/// Returns the best classes by the sampled bins of a chunk of `len` elements.
fn choose(bins: &[Bin], classes: DeltaClasses, len: usize) -> ClassPlan {
    let whole = sum(bins);
    if bins.len() < 2 || whole.changed == 0 {
        return ClassPlan::new(&[whole]);
    }
    // Bits of the chunk for one in the sample.
    let scale = |bits: u64| bits * len as u64 / whole.elements as u64;
    let bytes = |bits, classes| scale(bits) / 8 + CLASS_BYTES * classes;
    let splits = best_splits(bins);
    let values = scale(whole.changed as u64 * VALUE_BITS) / 8;
    let total = |count: usize| bytes(splits[count - 1].0, count as u64) + values;
    let smallest = |max| (1..=max).min_by_key(|count| total(*count)).expect("at least 1");
    let count = match classes {
        DeltaClasses::One => 1,
        DeltaClasses::Two => smallest(2),
        DeltaClasses::Four => smallest(MAX_CLASSES),
        DeltaClasses::Auto => {
            let limit = total(1) * (100 - MIN_GAIN_PERCENT) / 100;
            let two = if total(2) <= limit { 2 } else { 1 };
            let four = smallest(MAX_CLASSES);
            let limit = total(two) * (100 - MIN_GAIN_PERCENT) / 100;
            if total(four) <= limit { four } else { two }
        }
    };
    let mut starts = splits[count - 1].1[..count].to_vec();
    starts.push(bins.len());
    let classes: Vec<Bin> = starts.windows(2).map(|range| sum(&bins[range[0]..range[1]])).collect();
    ClassPlan::new(&classes)
}

/// Returns, for each number of classes, the fewest bits of their positions and the first bin of each class.
fn best_splits(bins: &[Bin]) -> [(u64, [usize; MAX_CLASSES]); MAX_CLASSES] {
    let count = bins.len();
    // `cost[start][end]`: the bits of a class of these bins.
    let mut cost = vec![vec![0; count + 1]; count];
    for (start, row) in cost.iter_mut().enumerate() {
        let mut class = Bin::default();
        for (end, bin) in bins.iter().enumerate().skip(start) {
            class.elements += bin.elements;
            class.changed += bin.changed;
            row[end + 1] = class.position_bits();
        }
    }
    // `best[end]`: the best split of the bins before `end`.
    let mut best: Vec<(u64, [usize; MAX_CLASSES])> =
        (0..=count).map(|end| (cost[0][end], [0; MAX_CLASSES])).collect();
    let mut splits = [best[count]; MAX_CLASSES];
    for class in 1..MAX_CLASSES {
        for end in (1..=count).rev() {
            // An empty last class is allowed here and is never the smallest, as it costs `CLASS_BYTES`.
            for start in 1..end {
                let (bits, mut starts) = best[start];
                if bits + cost[start][end] < best[end].0 || starts[class - 1] >= end {
                    starts[class] = start;
                    best[end] = (bits + cost[start][end], starts);
                }
            }
        }
        splits[class] = best[count];
    }
    splits
}

fn sum(bins: &[Bin]) -> Bin {
    let first = bins.first().map_or(0, |bin| bin.first);
    let elements = bins.iter().map(|bin| bin.elements).sum();
    Bin { first, elements, changed: bins.iter().map(|bin| bin.changed).sum() }
}

impl Bin {
    /// Returns the bits that an ideal code needs for the positions of the changed elements.
    fn position_bits(self) -> u64 {
        let [all, changed, same] = [self.elements, self.changed, self.elements - self.changed]
            .map(|count| count as u64 * u64::from(log2(count)));
        all.saturating_sub(changed + same) >> LOG_BITS
    }
}

/// Fraction bits of [`log2`].
const LOG_BITS: u32 = 16;

/// Returns log2 of `value`, 0 for 0. In integers, so that all machines choose the same classes.
fn log2(value: usize) -> u32 {
    let Some(exponent) = value.checked_ilog2() else { return 0 };
    let mantissa = (value as u64) << (63 - exponent) << 1;
    let at = (mantissa >> 56) as usize;
    let [low, high] = [LOG2_TABLE[at], LOG2_TABLE[at + 1]];
    let fraction = (mantissa >> 40) as u32 & 0xFFFF;
    (exponent << LOG_BITS) + low + (((high - low) * fraction) >> 16)
}

/// `log2(1 + i / 256)`.
const LOG2_TABLE: [u32; 257] = {
    let mut table = [1 << LOG_BITS; 257];
    let mut at = 0;
    while at < 256 {
        let mut square = (256 + at as u64) << 22;
        let (mut result, mut bit) = (0, 1 << (LOG_BITS - 1));
        while bit > 0 {
            square = (square * square) >> 30;
            if square >= 2 << 30 {
                square >>= 1;
                result |= bit;
            }
            bit >>= 1;
        }
        table[at] = result;
        at += 1;
    }
    table
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[expect(clippy::cast_precision_loss, reason = "the tolerance is larger")]
    fn log2_is_accurate() {
        for value in (1..100_000).chain([usize::MAX]) {
            let (exact, found) = ((value as f64).log2(), f64::from(log2(value)) / 65_536.0);
            assert!((exact - found).abs() < 2e-4, "{value}: {found}, not {exact}");
        }
    }
}
