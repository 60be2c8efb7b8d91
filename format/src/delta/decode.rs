//! Decoder of delta chunks.

use std::ops::{AddAssign, Range};

use super::add::{AddAtBits, AddAtGaps, AddAtPositions};
use super::class_map::ClassMaps;
use super::column::ColumnDecoder;
use super::error::{invalid, mismatch};
use super::layout::{BLOCK_ELEMENTS, Header, MAX_CLASSES, StoredColumn, chunk_elements, elements};
use super::positions::{GapStats, bitmap_stats};
use super::resolve::{ClassDecoder, ReadPositions, ResolveRanks, check_bitmap_len};
use super::values::{WideReader, count_exceptions, count_wide};
use crate::checksum::checksum;
use crate::convert::to_u64;
use crate::element::{ElementWidth, load, with_width};
use crate::error::{Error, ErrorKind, Result};
use crate::isa::{Instructions, Isa, Kernel};

/// Decoder of delta chunks. Reuses its working memory for every chunk.
pub struct DeltaDecoder {
    pub(super) isa: Isa,
    columns: ColumnDecoder,
    classes: [ClassDecoder; MAX_CLASSES],
    maps: ClassMaps,
    wide: Vec<u8>,
    exceptions: Vec<u8>,
}

/// A chunk whose columns are decoded and checked.
pub(super) struct Decoded<'a> {
    pub(super) header: Header,
    /// Listed elements of each class in each block.
    listed: Vec<[usize; MAX_CLASSES]>,
    /// The dense blocks.
    dense: &'a [u8],
}

/// Number of elements that a delta chunk changes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChangeCount {
    /// Elements that the chunk lists one by one.
    pub listed: u64,
    /// Elements of dense blocks, which the chunk has whole, whether they change or not.
    pub dense: u64,
}

/// Elements that a delta chunk of one class changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change<'a> {
    /// One element, at a position in elements. The sum of its pattern and `difference` is the pattern of the result.
    Listed {
        /// Number of elements of the chunk before this one.
        position: usize,
        /// Difference of the patterns, modulo 2^(8 * width).
        difference: u32,
    },
    /// The elements of a dense block.
    Dense {
        /// Number of elements of the chunk before the block.
        position: usize,
        /// Bytes of the result.
        bytes: &'a [u8],
    },
}

impl AddAssign for ChangeCount {
    fn add_assign(&mut self, other: Self) {
        self.listed += other.listed;
        self.dense += other.dense;
    }
}

impl DeltaDecoder {
    /// Creates a decoder.
    ///
    /// # Errors
    ///
    /// `Io` if zstd cannot allocate memory.
    pub fn new() -> Result<Self> {
        Self::with_isa(Isa::detect())
    }

    pub(super) fn with_isa(isa: Isa) -> Result<Self> {
        Ok(Self {
            isa,
            columns: ColumnDecoder::new()?,
            classes: std::array::from_fn(|_| ClassDecoder::default()),
            maps: ClassMaps::default(),
            wide: Vec::new(),
            exceptions: Vec::new(),
        })
    }

    /// Changes `target` from the base to the result, in place, and verifies the changed blocks.
    ///
    /// `target` has the bytes of one chunk of the base. Applied twice, a chunk gives a wrong result.
    ///
    /// # Errors
    ///
    /// - `DeltaChunk` (F-098); `TargetSize` if `target` is longer than a chunk, or no whole number of elements;
    ///   `FeatureMissing` in a build without zstd. `target` is unchanged.
    /// - `DeltaMismatch` (F-099). `target` is unchanged if a rank is outside its class, and has wrong bytes if a
    ///   checksum differs.
    pub fn apply(&mut self, chunk: &[u8], width: ElementWidth, target: &mut [u8]) -> Result<()> {
        self.resume(chunk, width, target, 0)
    }

    /// Goes on with [`DeltaDecoder::apply`] after an error or a crash.
    ///
    /// The first `done` blocks of 65,536 elements of `target` have the result already, and the others the base.
    ///
    /// # Errors
    ///
    /// As [`DeltaDecoder::apply`]; `DeltaMismatch` without a change if the first `done` blocks are not the result.
    pub fn resume(
        &mut self,
        chunk: &[u8],
        width: ElementWidth,
        target: &mut [u8],
        done: usize,
    ) -> Result<()> {
        let decoded = with_width!(width, W => self.change::<W>(chunk, width, target, done))?;
        verify_blocks(&decoded.header, target, done..decoded.header.blocks.len())
    }

    /// Writes the base with the changes of a chunk to `target`, and verifies it.
    ///
    /// # Errors
    ///
    /// As [`DeltaDecoder::apply`]; `TargetSize` if `base` and `target` differ in length.
    pub fn apply_to(
        &mut self,
        chunk: &[u8],
        width: ElementWidth,
        base: &[u8],
        target: &mut [u8],
    ) -> Result<()> {
        if base.len() != target.len() {
            let detail = format_args!("{} bytes, not {}", target.len(), base.len());
            return Err(Error::new(ErrorKind::TargetSize).with_detail(detail));
        }
        let decoded =
            with_width!(width, W => self.copy_and_change::<W>(chunk, width, base, target))?;
        verify_blocks(&decoded.header, target, 0..decoded.header.blocks.len())
    }

    /// Checks a chunk without its base, and counts the elements that it changes.
    ///
    /// `len` is the number of bytes of the chunk in the base.
    ///
    /// # Errors
    ///
    /// `DeltaChunk` (F-098); `TargetSize` if `len` is more than a chunk has, or no whole number of elements;
    /// `FeatureMissing` in a build without zstd.
    pub fn count(&mut self, chunk: &[u8], width: ElementWidth, len: usize) -> Result<ChangeCount> {
        let elements = chunk_elements(len, width)?;
        let decoded = with_width!(width, W => self.decode::<W>(chunk, width, elements))?;
        let listed: usize = decoded.listed.iter().flatten().sum();
        let dense = decoded.header.dense_len() / width.bytes();
        Ok(ChangeCount { listed: to_u64(listed), dense: to_u64(dense) })
    }

    /// Visits the changes of a chunk of one class in ascending order, without its base.
    ///
    /// `len` is the number of bytes of the chunk in the base.
    ///
    /// ```
    /// # #[cfg(feature = "zstd")] {
    /// use tssd_format::{Change, DeltaDecoder, DeltaEncoder, DeltaOptions, ElementWidth};
    ///
    /// let (width, options) = (ElementWidth::Two, DeltaOptions::default());
    /// let mut chunk = Vec::new();
    /// DeltaEncoder::new()?.encode([&[0, 1, 2, 3], &[0, 1, 5, 3]], width, &options, &mut chunk)?;
    ///
    /// DeltaDecoder::new()?.for_each_change(&chunk, width, 4, |change| {
    ///     assert_eq!(change, Change::Listed { position: 1, difference: 3 });
    /// })?;
    /// # }
    /// # Ok::<(), tssd_format::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// `NotFoldable` if the chunk has more than one class; else as [`DeltaDecoder::count`].
    pub fn for_each_change(
        &mut self,
        chunk: &[u8],
        width: ElementWidth,
        len: usize,
        visit: impl FnMut(Change<'_>),
    ) -> Result<()> {
        let elements = chunk_elements(len, width)?;
        with_width!(width, W => self.visit_changes::<W>(chunk, width, elements, visit))
    }

    fn visit_changes<const W: usize>(
        &mut self,
        chunk: &[u8],
        width: ElementWidth,
        elements: usize,
        mut visit: impl FnMut(Change<'_>),
    ) -> Result<()> {
        let decoded = self.decode::<W>(chunk, width, elements)?;
        if decoded.header.classes > 1 {
            let detail = format_args!("a chunk of {} classes", decoded.header.classes);
            return Err(Error::new(ErrorKind::NotFoldable).with_detail(detail));
        }
        self.resolve_one_class(&decoded);
        for (number, block) in self.blocks::<W>(&decoded).enumerate() {
            let start = number * BLOCK_ELEMENTS;
            match block {
                BlockChanges::Dense(block) => {
                    visit(Change::Dense { position: start, bytes: block.as_flattened() });
                }
                BlockChanges::Sparse { positions, differences } => {
                    for (position, difference) in positions.iter().zip(differences) {
                        let position = start + usize::from(*position);
                        visit(Change::Listed { position, difference: load(difference) });
                    }
                }
            }
        }
        Ok(())
    }

    fn change<'a, const W: usize>(
        &mut self,
        chunk: &'a [u8],
        width: ElementWidth,
        target: &mut [u8],
        done: usize,
    ) -> Result<Decoded<'a>> {
        let base = elements::<W>(target, width)?;
        let decoded = self.decode::<W>(chunk, width, base.len())?;
        verify_blocks(&decoded.header, target, 0..done.min(decoded.header.blocks.len()))?;
        if decoded.header.classes > 1 {
            self.resolve::<W>(&decoded, base, done)?;
        }
        let (target, _) = target.as_chunks_mut::<W>();
        self.write_blocks(&decoded, target, done, |_, _| {});
        Ok(decoded)
    }

    fn copy_and_change<'a, const W: usize>(
        &mut self,
        chunk: &'a [u8],
        width: ElementWidth,
        base: &[u8],
        target: &mut [u8],
    ) -> Result<Decoded<'a>> {
        let base = elements::<W>(base, width)?;
        let decoded = self.decode::<W>(chunk, width, base.len())?;
        if decoded.header.classes > 1 {
            self.resolve(&decoded, base, 0)?;
        }
        let (target, _) = target.as_chunks_mut::<W>();
        // Copied block by block, so that the changes find the copy in the cache.
        self.write_blocks(&decoded, target, 0, |start, block| {
            block.copy_from_slice(&base[start..start + block.len()]);
        });
        Ok(decoded)
    }

    /// Decodes and checks all columns. Ranks need the base, so that [`Self::resolve`] checks them.
    pub(super) fn decode<'a, const W: usize>(
        &mut self,
        chunk: &'a [u8],
        width: ElementWidth,
        elements: usize,
    ) -> Result<Decoded<'a>> {
        let (header, stored, mut rest) = Header::read(chunk, width, elements)?;
        let mut listed = vec![[0; MAX_CLASSES]; header.blocks.len()];
        for class in 0..header.classes {
            self.decode_class(&header, class, &stored[2 * class..], &mut rest, &mut listed)?;
        }
        let classes = &mut self.classes[..header.classes];
        let len = classes.iter().map(|class| class.wide).sum();
        let last = stored.len() - 2;
        self.columns.take(stored[last], &mut rest, len, &mut self.wide)?;
        let len = count_exceptions(&self.wide) * W;
        self.columns.take(stored[last + 1], &mut rest, len, &mut self.exceptions)?;
        let (exceptions, _) = self.exceptions.as_chunks();
        let mut wide = WideReader { wide: self.wide.iter(), exceptions: exceptions.iter() };
        for class in classes {
            let ClassDecoder { packed, differences, .. } = class;
            let wide = &mut wide;
            self.isa.run(ReadValues::<W> { packed, wide, differences });
        }
        Ok(Decoded { header, listed, dense: rest })
    }

    fn decode_class(
        &mut self,
        header: &Header,
        class: usize,
        stored: &[StoredColumn],
        rest: &mut &[u8],
        listed: &mut [[usize; MAX_CLASSES]],
    ) -> Result<()> {
        let decoder = &mut self.classes[class];
        let len = header.blocks.iter().map(|block| usize::from(block.counts[class])).sum();
        self.columns.take(stored[0], rest, len, &mut decoder.gaps)?;
        let (mut gaps, mut total) = (&decoder.gaps[..], 0);
        for (number, block) in header.blocks.iter().enumerate().filter(|(_, block)| !block.dense) {
            let (bytes, after) = gaps.split_at(block.counts[class].into());
            gaps = after;
            let is_bitmap = header.bitmaps[class];
            let stats = self.isa.run(ReadStats { bytes, is_bitmap }).ok_or_else(|| {
                invalid(format_args!("class {class}: the gaps of block {number} end with 255"))
            })?;
            let len = header.block_len(number);
            if is_bitmap && header.classes == 1 {
                check_bitmap_len(bytes.len(), len).map_err(invalid)?;
            }
            if stats.span > len {
                let rank = stats.span - 1;
                return Err(invalid(format_args!(
                    "class {class}: rank {rank} in block {number} of {len} elements"
                )));
            }
            listed[number][class] = stats.listed;
            total += stats.listed;
            // Bounds the memory for differences by the length of the target.
            let all: usize = listed[number].iter().sum();
            if all > len {
                return Err(invalid(format_args!(
                    "{all} listed elements in block {number} of {len} elements"
                )));
            }
        }
        self.columns.take(stored[1], rest, total.div_ceil(2), &mut decoder.packed)?;
        if total % 2 == 1 && decoder.packed.last().is_some_and(|last| last >> 4 != 0) {
            return Err(invalid(format_args!("class {class}: the unused half of the last value")));
        }
        decoder.wide = self.isa.run(CountWide(&decoder.packed));
        decoder.differences.resize(total * header.width.bytes(), 0);
        Ok(())
    }

    /// Finds the positions of all listed elements of a chunk of several classes, but not of the first `done` blocks.
    fn resolve<const W: usize>(
        &mut self,
        decoded: &Decoded<'_>,
        base: &[[u8; W]],
        done: usize,
    ) -> Result<()> {
        for (class, decoder) in self.classes.iter_mut().enumerate() {
            decoder.start(decoded.listed.iter().map(|listed| listed[class]).sum());
        }
        for (number, base) in base.chunks(BLOCK_ELEMENTS).enumerate() {
            let block = &decoded.header.blocks[number];
            if block.dense {
                continue;
            }
            if number < done {
                for (class, decoder) in self.classes.iter_mut().enumerate() {
                    decoder.skip(block.counts[class], decoded.listed[number][class]);
                }
                continue;
            }
            let (header, counts, listed) =
                (&decoded.header, &block.counts, &decoded.listed[number]);
            let (isa, maps, classes) = (self.isa, &mut self.maps, &mut self.classes);
            match header.classes {
                2 => {
                    isa.run(ResolveRanks::<W, 2> { base, header, counts, listed, maps, classes })?;
                }
                _ => {
                    isa.run(ResolveRanks::<W, 4> { base, header, counts, listed, maps, classes })?;
                }
            }
        }
        Ok(())
    }

    /// Finds the positions of all listed elements of a chunk of one class.
    pub(super) fn resolve_one_class(&mut self, decoded: &Decoded<'_>) {
        let class = &mut self.classes[0];
        class.start(decoded.listed.iter().map(|listed| listed[0]).sum());
        for (block, listed) in decoded.header.blocks.iter().zip(&decoded.listed) {
            let (is_bitmap, count) = (decoded.header.bitmaps[0], block.counts[0]);
            self.isa.run(ReadPositions { class, is_bitmap, count, listed: listed[0] });
        }
    }

    /// Returns the positions and differences of each block of a resolved chunk of one class, `None` if it is dense.
    pub(super) fn blocks<'a, const W: usize>(
        &'a self,
        decoded: &'a Decoded,
    ) -> impl Iterator<Item = BlockChanges<'a, W>> {
        let (class, mut start, mut dense) = (&self.classes[0], 0, decoded.dense);
        decoded.listed.iter().enumerate().map(move |(number, listed)| {
            let len = decoded.header.block_len(number);
            if decoded.header.blocks[number].dense {
                let (block, rest) = dense.split_at(len * W);
                dense = rest;
                return BlockChanges::Dense(block.as_chunks().0);
            }
            let range = start..start + listed[0];
            start = range.end;
            BlockChanges::Sparse {
                positions: &class.positions[range.clone()],
                differences: &class.differences()[range],
            }
        })
    }

    /// Writes the changes of all blocks but the first `done`.
    ///
    /// Before a sparse block is changed, `prepare(start, block)` is called.
    fn write_blocks<const W: usize>(
        &mut self,
        decoded: &Decoded<'_>,
        target: &mut [[u8; W]],
        done: usize,
        prepare: impl Fn(usize, &mut [[u8; W]]),
    ) {
        let (mut dense, mut starts) = (decoded.dense, [0; MAX_CLASSES]);
        let mut gaps = &self.classes[0].gaps[..];
        for (number, block) in target.chunks_mut(BLOCK_ELEMENTS).enumerate() {
            let header = &decoded.header.blocks[number];
            if header.dense {
                let (bytes, rest) = dense.split_at(W * block.len());
                dense = rest;
                if number >= done {
                    block.as_flattened_mut().copy_from_slice(bytes);
                }
                continue;
            }
            if number >= done {
                prepare(number * BLOCK_ELEMENTS, block);
            }
            for (class, decoder) in self.classes.iter().enumerate().take(decoded.header.classes) {
                let range = starts[class]..starts[class] + decoded.listed[number][class];
                starts[class] = range.end;
                let differences = &decoder.differences()[range.clone()];
                if decoded.header.classes > 1 && number < done {
                    continue;
                }
                if decoded.header.classes > 1 {
                    let positions = &decoder.positions[range];
                    self.isa.run(AddAtPositions { positions, differences, block });
                    continue;
                }
                let (bytes, rest) = gaps.split_at(header.counts[0].into());
                gaps = rest;
                if number < done {
                    continue;
                }
                if decoded.header.bitmaps[0] {
                    self.isa.run(AddAtBits { bitmap: bytes, differences, block });
                } else {
                    self.isa.run(AddAtGaps { gaps: bytes, differences, block });
                }
            }
        }
    }
}

/// Changes of one block.
pub(super) enum BlockChanges<'a, const W: usize> {
    Sparse { positions: &'a [u16], differences: &'a [[u8; W]] },
    Dense(&'a [[u8; W]]),
}

impl Decoded<'_> {
    /// Returns the number of listed elements of the first class in each block.
    pub(super) fn listed(&self) -> impl Iterator<Item = usize> {
        self.listed.iter().map(|listed| listed[0])
    }
}

/// Verifies the blocks of a result against the checksums of a chunk.
fn verify_blocks(header: &Header, result: &[u8], blocks: Range<usize>) -> Result<()> {
    let block_bytes = BLOCK_ELEMENTS * header.width.bytes();
    for (number, bytes) in
        result.chunks(block_bytes).enumerate().take(blocks.end).skip(blocks.start)
    {
        let (crc, expected) = (checksum(bytes), header.blocks[number].crc);
        if crc != expected {
            return Err(mismatch(format_args!(
                "block {number}: CRC {crc:#010x}, not {expected:#010x}"
            )));
        }
    }
    Ok(())
}

struct ReadStats<'a> {
    bytes: &'a [u8],
    is_bitmap: bool,
}

impl Kernel for ReadStats<'_> {
    type Output = Option<GapStats>;

    #[inline(always)]
    fn run<I: Instructions>(self, _: I) -> Option<GapStats> {
        if self.is_bitmap { Some(bitmap_stats(self.bytes)) } else { GapStats::new(self.bytes) }
    }
}

struct CountWide<'a>(&'a [u8]);

impl Kernel for CountWide<'_> {
    type Output = usize;

    #[inline(always)]
    fn run<I: Instructions>(self, _: I) -> usize {
        count_wide(self.0)
    }
}

struct ReadValues<'a, 'b, const W: usize> {
    packed: &'a [u8],
    wide: &'a mut WideReader<'b, W>,
    differences: &'a mut [u8],
}

impl<const W: usize> Kernel for ReadValues<'_, '_, W> {
    type Output = ();

    #[inline(always)]
    fn run<I: Instructions>(self, _: I) {
        self.wide.read(self.packed, self.differences.as_chunks_mut().0);
    }
}
