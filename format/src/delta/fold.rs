//! Folding: two successive delta chunks of one class become one, without the base.

use super::classes::ClassPlan;
use super::decode::{BlockChanges, ChangeCount, Decoded, DeltaDecoder};
use super::encode::DeltaEncoder;
use super::layout::{Block, MAX_CLASSES, MAX_COUNT, NO_THRESHOLDS, chunk_elements};
use super::positions::max_gap_bytes;
use crate::element::{ElementWidth, load, store, with_width};
use crate::error::{Error, ErrorKind, Result};
use crate::isa::Isa;

/// Folds delta chunks. Reuses its working memory for every chunk.
pub struct DeltaFolder {
    first: DeltaDecoder,
    second: DeltaDecoder,
    encoder: DeltaEncoder,
    positions: Vec<u16>,
    differences: Vec<u32>,
}

impl DeltaFolder {
    /// Creates a folder.
    ///
    /// # Errors
    ///
    /// `Io` if zstd cannot allocate memory; `FeatureMissing` in a build without zstd.
    pub fn new() -> Result<Self> {
        Self::with_isa(Isa::detect())
    }

    pub(super) fn with_isa(isa: Isa) -> Result<Self> {
        Ok(Self {
            first: DeltaDecoder::with_isa(isa)?,
            second: DeltaDecoder::with_isa(isa)?,
            encoder: DeltaEncoder::with_isa(isa)?,
            positions: Vec::new(),
            differences: Vec::new(),
        })
    }

    /// Appends to `chunk` the difference that has the effect of `first` and then `second`.
    ///
    /// `len` is the number of bytes of the chunk in the base. If all elements of the result are dense, the appended bytes
    /// end with the chunk of the result.
    ///
    /// # Errors
    ///
    /// `NotFoldable` if a chunk has more than one class; else as [`DeltaDecoder::count`].
    pub fn fold(
        &mut self,
        [first, second]: [&[u8]; 2],
        width: ElementWidth,
        len: usize,
        chunk: &mut Vec<u8>,
    ) -> Result<ChangeCount> {
        let elements = chunk_elements(len, width)?;
        with_width!(width, W => self.fold_typed::<W>([first, second], width, elements, chunk))
    }

    fn fold_typed<const W: usize>(
        &mut self,
        [first, second]: [&[u8]; 2],
        width: ElementWidth,
        elements: usize,
        chunk: &mut Vec<u8>,
    ) -> Result<ChangeCount> {
        let first = self.first.decode::<W>(first, width, elements)?;
        let second = self.second.decode::<W>(second, width, elements)?;
        check_foldable(&first, &second)?;
        self.first.resolve_one_class(&first);
        self.second.resolve_one_class(&second);
        let plan = plan(&first, &second);
        self.encoder.start();
        let (mut blocks, mut dense): (Vec<Block>, Vec<Vec<[u8; W]>>) = (Vec::new(), Vec::new());
        let pairs = self.first.blocks::<W>(&first).zip(self.second.blocks::<W>(&second));
        for (number, (old, new)) in pairs.enumerate() {
            let (crc, len) = (second.header.blocks[number].crc, second.header.block_len(number));
            let folded = match (old, new) {
                (_, BlockChanges::Dense(block)) => Some(block.to_vec()),
                (BlockChanges::Dense(block), BlockChanges::Sparse { positions, differences }) => {
                    let mut block = block.to_vec();
                    for (position, difference) in positions.iter().zip(differences) {
                        let element = &mut block[usize::from(*position)];
                        *element = store(load(element).wrapping_add(load(difference)));
                    }
                    Some(block)
                }
                (
                    BlockChanges::Sparse { positions, differences },
                    BlockChanges::Sparse { positions: later, differences: more },
                ) => {
                    self.positions.clear();
                    self.differences.clear();
                    let first = positions.iter().zip(differences);
                    merge(first, later.iter().zip(more), |position, difference| {
                        self.positions.push(position);
                        self.differences.push(difference);
                    });
                    None
                }
            };
            if let Some(block) = folded {
                dense.push(block);
                blocks.push(Block { crc, dense: true, ..Block::default() });
                continue;
            }
            let (positions, differences) = (&self.positions, &self.differences);
            blocks.push(self.encoder.push_changes::<W>(crc, positions, differences, len, &plan));
        }
        let header = plan.header(width, second.header.elements, blocks);
        let dense = dense.iter().map(|block| block.as_flattened());
        self.encoder.finish(&header, dense, chunk)?;
        Ok(self.encoder.changes(&header))
    }
}

fn check_foldable(first: &Decoded<'_>, second: &Decoded<'_>) -> Result<()> {
    let classes = [first, second].map(|chunk| chunk.header.classes);
    if classes == [1, 1] {
        return Ok(());
    }
    let detail = format_args!("chunks of {} and {} classes", classes[0], classes[1]);
    Err(Error::new(ErrorKind::NotFoldable).with_detail(detail))
}

/// Returns the plan of the folded chunk: a bitmap where gaps may be longer or more than a count can hold.
fn plan(first: &Decoded<'_>, second: &Decoded<'_>) -> ClassPlan {
    let mut listed = 0;
    let mut overflows = false;
    for (first, second) in first.listed().zip(second.listed()) {
        listed += first + second;
        overflows |= max_gap_bytes(first + second) > MAX_COUNT;
    }
    let is_bitmap = overflows || listed * 8 > first.header.elements;
    let mut bitmaps = [false; MAX_CLASSES];
    bitmaps[0] = is_bitmap;
    ClassPlan { classes: 1, thresholds: NO_THRESHOLDS, bitmaps }
}

/// Visits the sums of the differences of two ascending lists, without those that are 0.
fn merge<'a, const W: usize>(
    first: impl Iterator<Item = (&'a u16, &'a [u8; W])>,
    second: impl Iterator<Item = (&'a u16, &'a [u8; W])>,
    mut visit: impl FnMut(u16, u32),
) {
    let (mut first, mut second) = (first.peekable(), second.peekable());
    loop {
        let position = match (first.peek(), second.peek()) {
            (Some((first, _)), Some((second, _))) => **first.min(second),
            (Some((position, _)), None) | (None, Some((position, _))) => **position,
            (None, None) => break,
        };
        let [first, second] =
            [first.next_if(|next| *next.0 == position), second.next_if(|next| *next.0 == position)]
                .map(|change| change.map_or(0, |(_, difference)| load(difference)));
        let sum = first.wrapping_add(second);
        if load(&store::<W>(sum)) != 0 {
            visit(position, sum);
        }
    }
}
