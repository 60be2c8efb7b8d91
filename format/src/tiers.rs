//! Chunk codec 4, "tiers": byte planes, the last one in codes of fixed widths. Spec: section 6, "Tiers", and F-100.
//!
//! The exponents of weights have few values: most of them are one of three. A processor with vector instructions decodes
//! such codes at half the speed of a copy or more.
// Kernels must be inlined into the function that enables their instructions.
#![allow(clippy::inline_always)]

mod block;
mod symbols;
#[cfg(test)]
mod tests;

use std::array;

use self::block::{BLOCK, EscapedBytes, GROUP, TierBlock, invalid, split_at};
use self::symbols::Symbols;
use crate::codec::saves_enough;
use crate::error::Result;
use crate::isa::{Instructions, Isa, Kernel};
use crate::plane_blocks::{BLOCK_ELEMENTS, Block, PlaneBlock, with_plane_width};

/// Distance in bytes from the bytes in use to those that the decoder asks for in advance.
///
/// Measured: without it decoding takes half as long again, because several streams are read at once.
const PREFETCH_DISTANCE: usize = 4096;

/// Encoder of chunks. Reuses its working memory for every chunk.
pub(crate) struct TiersEncoder {
    isa: Isa,
    /// All planes but the last one.
    planes: Vec<u8>,
    /// The last plane of a block.
    block: Vec<u8>,
    /// The last plane in tiers.
    tiers: Vec<u8>,
    escaped: EscapedBytes,
}

impl TiersEncoder {
    pub(crate) fn new() -> Self {
        let (planes, block, tiers) = (Vec::new(), vec![0; BLOCK], Vec::new());
        Self { isa: Isa::detect(), planes, block, tiers, escaped: EscapedBytes::new() }
    }

    /// Encodes a chunk of elements of `width` bytes; `None` if that saves too little.
    pub(crate) fn encode(&mut self, raw: &[u8], width: u8) -> Option<Vec<u8>> {
        with_plane_width!(width, W => self.encode_elements::<W>(raw))
    }

    fn encode_elements<const W: usize>(&mut self, raw: &[u8]) -> Option<Vec<u8>>
    where
        [[u8; W]; BLOCK_ELEMENTS]: Block<W>,
    {
        let (elements, tail) = raw.as_chunks::<W>();
        let planes_len = elements.len() * (W - 1);
        if self.planes.len() < planes_len {
            self.planes.resize(planes_len, 0);
        }
        self.tiers.clear();
        let isa = self.isa;
        isa.run(Encode { elements, encoder: self });
        let stored_len = planes_len + self.tiers.len() + tail.len();
        saves_enough(raw.len(), stored_len)
            .then(|| [&self.planes[..planes_len], &self.tiers, tail].concat())
    }
}

struct Encode<'a, const W: usize> {
    elements: &'a [[u8; W]],
    encoder: &'a mut TiersEncoder,
}

impl<const W: usize> Kernel for Encode<'_, W>
where
    [[u8; W]; BLOCK_ELEMENTS]: Block<W>,
{
    type Output = ();

    #[inline(always)]
    fn run<I: Instructions>(self, isa: I) {
        let TiersEncoder { planes, block, tiers, escaped, .. } = self.encoder;
        let count = self.elements.len();
        let planes = &mut planes[..count * (W - 1)];
        let symbols = Symbols::of_elements(self.elements);
        tiers.extend_from_slice(symbols.as_bytes());
        for (start, elements) in (0..).step_by(BLOCK).zip(self.elements.chunks(BLOCK)) {
            let mut targets = planes.chunks_mut(count.max(1));
            let mut low: [&mut [u8]; W] =
                array::from_fn(|_| targets.next().map_or(&mut [][..], |plane| &mut plane[start..]));
            split(isa, elements, &mut low, block);
            symbols.encode_block(isa, &block[..elements.len()], escaped, tiers);
        }
    }
}

/// Writes all planes of elements but the last one to the start of `low`, and the last one to `last`.
#[inline(always)]
fn split<I: Instructions, const W: usize>(
    isa: I,
    elements: &[[u8; W]],
    low: &mut [&mut [u8]; W],
    last: &mut [u8],
) where
    [[u8; W]; BLOCK_ELEMENTS]: Block<W>,
{
    let (blocks, rest) = elements.as_chunks::<BLOCK_ELEMENTS>();
    let mut write = |start: usize, planes: [PlaneBlock; W], len: usize| {
        let (high, others) = planes.split_last().expect("a width of 1 or more");
        last[start..start + len].copy_from_slice(&high[..len]);
        for (target, plane) in low.iter_mut().zip(others) {
            target[start..start + len].copy_from_slice(&plane[..len]);
        }
    };
    for (start, block) in (0..).step_by(BLOCK_ELEMENTS).zip(blocks) {
        prefetch(isa, elements.as_flattened(), start * W, W * BLOCK_ELEMENTS);
        write(start, block.split(), BLOCK_ELEMENTS);
    }
    let mut block = [[0; W]; BLOCK_ELEMENTS];
    block[..rest.len()].copy_from_slice(rest);
    write(blocks.len() * BLOCK_ELEMENTS, block.split(), rest.len());
}

/// Decoder of chunks. Reuses its working memory, about 100 KiB, for every chunk.
pub(crate) struct TiersDecoder {
    isa: Isa,
    escaped: EscapedBytes,
}

impl TiersDecoder {
    pub(crate) fn new() -> Self {
        Self { isa: Isa::detect(), escaped: EscapedBytes::new() }
    }

    /// Decodes a stored chunk into `target`, which must have the length of the chunk.
    ///
    /// After an error, the bytes of `target` are unspecified.
    ///
    /// # Errors
    ///
    /// `TiersChunk` (F-100). Wrong lengths are found before any byte is decoded.
    pub(crate) fn decode(&mut self, stored: &[u8], width: u8, target: &mut [u8]) -> Result<()> {
        with_plane_width!(width, W => self.decode_elements::<W>(stored, target))
    }

    fn decode_elements<const W: usize>(&mut self, stored: &[u8], target: &mut [u8]) -> Result<()>
    where
        [[u8; W]; BLOCK_ELEMENTS]: Block<W>,
    {
        let (elements, tail) = target.as_chunks_mut::<W>();
        let (planes, rest) = split_at(stored, elements.len() * (W - 1), "planes")?;
        let (symbols, mut rest) = Symbols::read(rest)?;
        let blocks = elements.chunks(BLOCK).map(|block| TierBlock::read(&mut rest, block.len()));
        let blocks = blocks.collect::<Result<Vec<_>>>()?;
        if rest.len() != tail.len() {
            return Err(invalid(format_args!(
                "a tail of {} bytes, not {}",
                rest.len(),
                tail.len()
            )));
        }
        tail.copy_from_slice(rest);
        let count = elements.len();
        let starts = (0..).step_by(BLOCK);
        for ((start, elements), block) in starts.zip(elements.chunks_mut(BLOCK)).zip(blocks) {
            let planes = array::from_fn(|plane| planes.get(plane * count + start..).unwrap_or(&[]));
            let escaped = &mut self.escaped;
            self.isa.run(DecodeBlock { symbols: &symbols, planes, block, escaped, elements })?;
        }
        Ok(())
    }
}

struct DecodeBlock<'a, const W: usize> {
    symbols: &'a Symbols,
    /// All planes but the last one, from the start of the block.
    planes: [&'a [u8]; W],
    block: TierBlock<'a>,
    escaped: &'a mut EscapedBytes,
    elements: &'a mut [[u8; W]],
}

impl<const W: usize> Kernel for DecodeBlock<'_, W>
where
    [[u8; W]; BLOCK_ELEMENTS]: Block<W>,
{
    type Output = Result<()>;

    #[inline(always)]
    fn run<I: Instructions>(self, isa: I) -> Result<()> {
        let Self { symbols, planes, block, escaped, elements } = self;
        let mut last = symbols.decode_block(isa, &block, escaped)?;
        let mut group = [[0; BLOCK_ELEMENTS]; GROUP / BLOCK_ELEMENTS];
        for (start, elements) in (0..).step_by(GROUP).zip(elements.chunks_mut(GROUP)) {
            for plane in &planes[..W - 1] {
                prefetch(isa, plane, start, GROUP);
            }
            last.next_group(isa, group.as_flattened_mut());
            let starts = (start..).step_by(BLOCK_ELEMENTS);
            for ((start, last), elements) in
                starts.zip(&group).zip(elements.chunks_mut(BLOCK_ELEMENTS))
            {
                merge(&planes, start, last, elements);
            }
        }
        last.finish()
    }
}

/// Writes up to 64 elements, of which the other planes than `last` begin at byte `start` of `planes`.
#[inline(always)]
fn merge<const W: usize>(
    planes: &[&[u8]; W],
    start: usize,
    last: &PlaneBlock,
    elements: &mut [[u8; W]],
) where
    [[u8; W]; BLOCK_ELEMENTS]: Block<W>,
{
    let mut blocks = [last; W];
    if let Some(elements) = elements.first_chunk_mut() {
        for (block, plane) in blocks[..W - 1].iter_mut().zip(planes) {
            *block = plane[start..].first_chunk().expect("a plane has a byte for each element");
        }
        *elements = Block::merge(blocks);
        return;
    }
    let mut low = [[0; BLOCK_ELEMENTS]; W];
    for (low, plane) in low[..W - 1].iter_mut().zip(planes) {
        low[..elements.len()].copy_from_slice(&plane[start..start + elements.len()]);
    }
    for (block, low) in blocks[..W - 1].iter_mut().zip(&low) {
        *block = low;
    }
    let merged: [[u8; W]; BLOCK_ELEMENTS] = Block::merge(blocks);
    elements.copy_from_slice(&merged[..elements.len()]);
}

/// Asks the processor to load `len` bytes that are needed after those at `start`.
#[inline(always)]
fn prefetch<I: Instructions>(isa: I, bytes: &[u8], start: usize, len: usize) {
    let start = start + PREFETCH_DISTANCE;
    if let Some(ahead) = bytes.get(start..start + len) {
        isa.prefetch(ahead);
    }
}
