//! Encoder of delta chunks.

use super::class_map::ClassMaps;
use super::classes::{ChooseClasses, ClassPlan, DeltaClasses};
use super::column::ColumnEncoder;
use super::compare::Comparison;
use super::decode::ChangeCount;
use super::layout::{
    BLOCK_ELEMENTS, Block, Header, MAX_CLASSES, MAX_COUNT, StoredColumn, elements,
};
use super::positions::{POSITION_SLACK, RankBits, max_gap_bytes, push_gaps, push_positions};
use super::values::{Values, max_value_bytes, wide_bytes};
use crate::convert::to_u64;
use crate::element::{ElementWidth, load, magnitude_mask, with_width};
use crate::error::{Error, ErrorKind, Result};
use crate::isa::{GROUP, Instructions, Isa, Kernel};

/// Options of [`DeltaEncoder::encode`].
#[derive(Clone, Copy, Debug, Default)]
pub struct DeltaOptions<'a> {
    /// Number of classes.
    pub classes: DeltaClasses,
    /// CRC-32 of each block of 65,536 elements of the result, if the caller has them. The encoder trusts them.
    pub checksums: Option<&'a [u32]>,
}

/// What [`DeltaEncoder::encode`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EncodedDelta {
    /// The elements that the chunk lists or has whole.
    pub changes: ChangeCount,
    /// CRC-32 of the chunk in the result.
    pub crc32: u32,
}

/// Encoder of delta chunks. Reuses its working memory for every chunk.
pub struct DeltaEncoder {
    isa: Isa,
    columns: ColumnEncoder,
    /// Masks of the changed elements of a block.
    changed: Vec<u64>,
    positions: Positions,
    maps: ClassMaps,
    changes: ClassChanges,
    classes: [ClassEncoder; MAX_CLASSES],
    column: Vec<u8>,
}

impl DeltaEncoder {
    /// Creates an encoder.
    ///
    /// # Errors
    ///
    /// `Io` if zstd cannot allocate memory; `FeatureMissing` in a build without zstd.
    pub fn new() -> Result<Self> {
        Self::with_isa(Isa::detect())
    }

    pub(super) fn with_isa(isa: Isa) -> Result<Self> {
        Ok(Self {
            isa,
            columns: ColumnEncoder::new()?,
            changed: Vec::new(),
            positions: Positions::default(),
            maps: ClassMaps::default(),
            changes: ClassChanges::default(),
            classes: std::array::from_fn(|_| ClassEncoder::default()),
            column: Vec::new(),
        })
    }

    /// Appends to `chunk` the difference between two versions of a chunk, which have the same length.
    ///
    /// # Errors
    ///
    /// `TargetSize` if the lengths differ, are no multiple of the width or more than a chunk has, or if the number of
    /// checksums is not that of the blocks.
    pub fn encode(
        &mut self,
        [base, result]: [&[u8]; 2],
        width: ElementWidth,
        options: &DeltaOptions<'_>,
        chunk: &mut Vec<u8>,
    ) -> Result<EncodedDelta> {
        with_width!(width, W => {
            let versions = [elements::<W>(base, width)?, elements::<W>(result, width)?];
            self.encode_typed(width, versions, options, chunk)
        })
    }

    fn encode_typed<const W: usize>(
        &mut self,
        width: ElementWidth,
        [old, new]: [&[[u8; W]]; 2],
        options: &DeltaOptions<'_>,
        chunk: &mut Vec<u8>,
    ) -> Result<EncodedDelta> {
        if old.len() != new.len() {
            let detail = format_args!("{} elements, not {}", new.len(), old.len());
            return Err(Error::new(ErrorKind::TargetSize).with_detail(detail));
        }
        let count = new.len().div_ceil(BLOCK_ELEMENTS);
        if let Some(checksums) = options.checksums
            && checksums.len() != count
        {
            let detail = format_args!("{} checksums of {count} blocks", checksums.len());
            return Err(Error::new(ErrorKind::TargetSize).with_detail(detail));
        }
        let plan = self.isa.run(ChooseClasses { old, new, classes: options.classes });
        self.start();
        let blocks = old.chunks(BLOCK_ELEMENTS).zip(new.chunks(BLOCK_ELEMENTS)).enumerate();
        let blocks = blocks.map(|(number, (old, new))| {
            let crc = options.checksums.map(|checksums| checksums[number]);
            self.encode_block(old, new, crc, &plan)
        });
        let header = plan.header(width, old.len(), blocks.collect());
        let dense = header.blocks.iter().zip(new.chunks(BLOCK_ELEMENTS));
        let dense = dense.filter(|(block, _)| block.dense).map(|(_, new)| new.as_flattened());
        self.finish(&header, dense, chunk)?;
        Ok(EncodedDelta { changes: self.changes(&header), crc32: header.crc32() })
    }

    /// Returns how many elements the columns and the dense blocks change.
    pub(super) fn changes(&self, header: &Header) -> ChangeCount {
        let listed: usize = self.classes.iter().map(|class| class.values.codes.len()).sum();
        let dense = header.dense_len() / header.width.bytes();
        ChangeCount { listed: to_u64(listed), dense: to_u64(dense) }
    }

    /// Forgets the columns of the chunk before.
    pub(super) fn start(&mut self) {
        self.classes.iter_mut().for_each(ClassEncoder::clear);
    }

    fn encode_block<const W: usize>(
        &mut self,
        old: &[[u8; W]],
        new: &[[u8; W]],
        crc: Option<u32>,
        plan: &ClassPlan,
    ) -> Block {
        let comparison = Comparison { isa: self.isa, plan, old, new };
        let (crc, listed) = comparison.run(crc, &mut self.changed, &mut self.maps);
        if is_dense(old, new, listed, plan) {
            return Block { crc, dense: true, ..Block::default() };
        }
        let starts = self.classes.each_ref().map(|class| class.gaps.len());
        let Self { isa, changed, positions, maps, changes, classes, .. } = self;
        let [class, ..] = classes;
        match plan.classes {
            1 => isa.run(EncodeOneClass { old, new, changed, positions, class, plan }),
            2 => {
                isa.run(EncodeClasses::<W, 2> {
                    old,
                    new,
                    changed,
                    positions,
                    maps,
                    changes,
                    classes,
                    plan,
                });
            }
            _ => {
                isa.run(EncodeClasses::<W, 4> {
                    old,
                    new,
                    changed,
                    positions,
                    maps,
                    changes,
                    classes,
                    plan,
                });
            }
        }
        Block { crc, dense: false, counts: self.counts_since(&starts) }
    }

    fn counts_since(&self, starts: &[usize; MAX_CLASSES]) -> [u16; MAX_CLASSES] {
        std::array::from_fn(|class| {
            let count = self.classes[class].gaps.len() - starts[class];
            u16::try_from(count).expect("`is_dense` rejects blocks of more gap bytes")
        })
    }

    /// Appends a sparse block of one class and `len` elements: ascending positions and their differences, none of which is 0.
    pub(super) fn push_changes<const W: usize>(
        &mut self,
        crc: u32,
        positions: &[u16],
        differences: &[u32],
        len: usize,
        plan: &ClassPlan,
    ) -> Block {
        let start = [self.classes[0].gaps.len(), 0, 0, 0];
        let (class, bits) = (&mut self.classes[0], &mut self.changes.bits);
        self.isa.run(PushChanges::<W> { positions, differences, len, class, bits, plan });
        let mut counts = [0; MAX_CLASSES];
        counts[0] = self.counts_since(&start)[0];
        Block { crc, dense: false, counts }
    }

    /// Appends the chunk of the columns.
    pub(super) fn finish<'a>(
        &mut self,
        header: &Header,
        dense: impl Iterator<Item = &'a [u8]>,
        chunk: &mut Vec<u8>,
    ) -> Result<()> {
        let mut stored = vec![StoredColumn::default(); header.columns()];
        let start = chunk.len();
        header.write(&stored, chunk);
        let fields = chunk.len() - 4 * stored.len();
        let mut slots = stored.iter_mut();
        let mut next = || slots.next().expect("as many as columns");
        for class in &self.classes[..header.classes] {
            *next() = self.columns.push(&class.gaps, chunk)?;
            self.isa.run(PackCodes { values: &class.values, packed: &mut self.column });
            *next() = self.columns.push(&self.column, chunk)?;
        }
        let classes = &self.classes[..header.classes];
        self.column.clear();
        for class in classes {
            self.column.extend(&class.values.wide);
        }
        *next() = self.columns.push(&self.column, chunk)?;
        self.column.clear();
        for class in classes {
            self.column.extend(&class.values.exceptions);
        }
        *next() = self.columns.push(&self.column, chunk)?;
        // The lengths are known only now.
        let mut head = Vec::with_capacity(fields - start + 4 * stored.len());
        header.write(&stored, &mut head);
        chunk[start..start + head.len()].copy_from_slice(&head);
        dense.for_each(|block| chunk.extend_from_slice(block));
        Ok(())
    }
}

impl ClassPlan {
    pub(super) fn header(
        &self,
        width: ElementWidth,
        elements: usize,
        blocks: Vec<Block>,
    ) -> Header {
        let Self { classes, thresholds, bitmaps } = *self;
        Header { width, elements, classes, bitmaps, thresholds, blocks }
    }
}

/// Columns of one class, and working memory.
#[derive(Default)]
struct ClassEncoder {
    /// Gaps, or bitmaps.
    gaps: Vec<u8>,
    values: Values,
}

impl ClassEncoder {
    fn clear(&mut self) {
        self.gaps.clear();
        self.values.clear();
    }
}

/// Listed elements of a block by class.
struct ClassChanges {
    ranks: Box<[[u16; BLOCK_ELEMENTS]; MAX_CLASSES]>,
    differences: Box<[[u32; BLOCK_ELEMENTS]; MAX_CLASSES]>,
    bits: RankBits,
}

impl Default for ClassChanges {
    #[expect(clippy::large_stack_arrays, reason = "the vectors are allocated as zeros")]
    fn default() -> Self {
        let ranks = vec![[0; BLOCK_ELEMENTS]; MAX_CLASSES];
        let differences = vec![[0; BLOCK_ELEMENTS]; MAX_CLASSES];
        Self {
            ranks: ranks.into_boxed_slice().try_into().expect("4 classes"),
            differences: differences.into_boxed_slice().try_into().expect("4 classes"),
            bits: RankBits::default(),
        }
    }
}

/// Positions of the listed elements of a block.
struct Positions {
    entries: Box<[u16; BLOCK_ELEMENTS + POSITION_SLACK]>,
    len: usize,
}

impl Default for Positions {
    #[expect(clippy::large_stack_arrays, reason = "128 KiB, once for each encoder")]
    fn default() -> Self {
        Self { entries: Box::new([0; BLOCK_ELEMENTS + POSITION_SLACK]), len: 0 }
    }
}

impl Positions {
    /// Replaces the positions by those of the set bits of masks.
    #[inline(always)]
    fn read(&mut self, masks: &[u64]) {
        let listed: usize = masks.iter().map(|mask| mask.count_ones() as usize).sum();
        self.len = 0;
        if listed * 2 < masks.len() {
            self.push::<2>(masks);
        } else if listed > 3 * masks.len() {
            self.push::<8>(masks);
        } else {
            self.push::<4>(masks);
        }
    }

    #[inline(always)]
    fn push<const FIRST: usize>(&mut self, masks: &[u64]) {
        for (number, mask) in masks.iter().enumerate() {
            push_positions::<FIRST, 1>(*mask, number * GROUP, &mut self.entries[..], &mut self.len);
        }
    }

    #[inline(always)]
    fn as_slice(&self) -> &[u16] {
        &self.entries[..self.len]
    }
}

/// Returns whether the dense form of a block is smaller than the sparse one, both without entropy coding.
///
/// Blocks with more gap bytes than a count can hold are dense too.
fn is_dense<const W: usize>(
    old: &[[u8; W]],
    new: &[[u8; W]],
    listed: usize,
    plan: &ClassPlan,
) -> bool {
    let all_bitmaps = plan.bitmaps[..plan.classes].iter().all(|bitmap| *bitmap);
    if !all_bitmaps && max_gap_bytes(listed) > MAX_COUNT {
        return true;
    }
    let (dense, bitmap) = (W * old.len(), old.len().div_ceil(8));
    let gaps = if all_bitmaps { bitmap } else { listed + old.len() / 255 };
    if gaps + max_value_bytes::<W>(listed) < dense {
        return false;
    }
    let differences = old.iter().zip(new).map(|(old, new)| load(new).wrapping_sub(load(old)));
    gaps.min(bitmap) + listed.div_ceil(2) + wide_bytes::<W>(differences) >= dense
}

/// Encodes a sparse block of one class.
struct EncodeOneClass<'a, const W: usize> {
    old: &'a [[u8; W]],
    new: &'a [[u8; W]],
    changed: &'a [u64],
    positions: &'a mut Positions,
    class: &'a mut ClassEncoder,
    plan: &'a ClassPlan,
}

impl<const W: usize> Kernel for EncodeOneClass<'_, W> {
    type Output = ();

    #[inline(always)]
    fn run<I: Instructions>(self, _: I) {
        let ClassEncoder { gaps, values } = self.class;
        self.positions.read(self.changed);
        let positions = self.positions.as_slice();
        if self.plan.bitmaps[0] {
            let end = gaps.len() + self.old.len().div_ceil(8);
            self.changed.iter().for_each(|mask| gaps.extend(mask.to_le_bytes()));
            gaps.truncate(end);
        } else {
            push_gaps(positions, gaps);
        }
        push_values(values, positions, self.old, self.new);
    }
}

/// Encodes a sparse block of at most `C` classes.
struct EncodeClasses<'a, const W: usize, const C: usize> {
    old: &'a [[u8; W]],
    new: &'a [[u8; W]],
    changed: &'a [u64],
    positions: &'a mut Positions,
    maps: &'a ClassMaps,
    changes: &'a mut ClassChanges,
    classes: &'a mut [ClassEncoder; MAX_CLASSES],
    plan: &'a ClassPlan,
}

impl<const W: usize, const C: usize> Kernel for EncodeClasses<'_, W, C> {
    type Output = ();

    #[inline(always)]
    fn run<I: Instructions>(self, _: I) {
        let Self { old, new, changed, positions, maps, changes, plan, .. } = self;
        let classes = self.classes.first_chunk_mut::<C>().expect("at most 4 classes");
        positions.read(changed);
        let new = &new[..old.len()];
        let (ranks, differences) = (&mut *changes.ranks, &mut *changes.differences);
        let mut counts = [0_usize; C];
        for position in positions.as_slice() {
            let at = usize::from(*position);
            let before = load(&old[at]);
            let magnitude = before & magnitude_mask::<W>();
            let above =
                plan.thresholds[..C - 1].iter().map(|limit| usize::from(magnitude >= *limit));
            let class = above.fold(0, usize::wrapping_add) % C;
            let count = counts[class];
            ranks[class][count % BLOCK_ELEMENTS] = maps.class(class).rank(*position);
            differences[class][count % BLOCK_ELEMENTS] = load(&new[at]).wrapping_sub(before);
            counts[class] = count.wrapping_add(1);
        }
        for (number, class) in classes.iter_mut().enumerate().take(plan.classes) {
            let ClassEncoder { gaps, values } = class;
            let ranks = &ranks[number][..counts[number]];
            if plan.bitmaps[number] {
                changes.bits.set(ranks, maps.class(number).len());
                changes.bits.write_bitmap(gaps);
            } else {
                push_gaps(ranks, gaps);
            }
            values.push::<W>(differences[number][..counts[number]].iter().copied());
        }
    }
}

/// Appends changes of one class.
struct PushChanges<'a, const W: usize> {
    positions: &'a [u16],
    differences: &'a [u32],
    len: usize,
    class: &'a mut ClassEncoder,
    bits: &'a mut RankBits,
    plan: &'a ClassPlan,
}

impl<const W: usize> Kernel for PushChanges<'_, W> {
    type Output = ();

    #[inline(always)]
    fn run<I: Instructions>(self, _: I) {
        let (gaps, bits) = (&mut self.class.gaps, self.bits);
        if self.plan.bitmaps[0] {
            bits.set(self.positions, self.len);
            bits.write_bitmap(gaps);
        } else {
            push_gaps(self.positions, gaps);
        }
        self.class.values.push::<W>(self.differences.iter().copied());
    }
}

struct PackCodes<'a> {
    values: &'a Values,
    packed: &'a mut Vec<u8>,
}

impl Kernel for PackCodes<'_> {
    type Output = ();

    #[inline(always)]
    fn run<I: Instructions>(self, _: I) {
        self.values.pack(self.packed);
    }
}

/// Appends the differences at positions.
#[inline(always)]
fn push_values<const W: usize>(
    values: &mut Values,
    positions: &[u16],
    old: &[[u8; W]],
    new: &[[u8; W]],
) {
    // The compiler omits bounds checks where the block is an array and positions are u16.
    match (old.as_array::<BLOCK_ELEMENTS>(), new.as_array::<BLOCK_ELEMENTS>()) {
        (Some(old), Some(new)) => values.push::<W>(positions.iter().map(|position| {
            let at = usize::from(*position);
            load(&new[at]).wrapping_sub(load(&old[at]))
        })),
        _ => values.push::<W>(positions.iter().map(|position| {
            let at = usize::from(*position);
            load(&new[at]).wrapping_sub(load(&old[at]))
        })),
    }
}
