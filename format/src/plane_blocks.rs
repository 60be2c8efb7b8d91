//! Byte planes of elements: the split and the merge, in loops that the compiler turns into vector code.

#![cfg_attr(not(feature = "zstd"), expect(dead_code, reason = "only the encoder splits"))]
#![expect(
    clippy::inline_always,
    reason = "in the caller's loop the compiler can fuse the steps of a block"
)]

/// Elements that are split or merged at a time.
///
/// Measured: with loops of this length, which is known at compile time, the compiler emits the best vector code.
pub(crate) const BLOCK_ELEMENTS: usize = 64;

/// Evaluates an expression with the width of elements in bytes as the constant `$bytes`.
///
/// The width must be one of [`is_plane_width`](crate::planes::is_plane_width).
macro_rules! with_plane_width {
    ($width:expr, $bytes:ident => $result:expr) => {
        match $width {
            1 => {
                const $bytes: usize = 1;
                $result
            }
            2 => {
                const $bytes: usize = 2;
                $result
            }
            4 => {
                const $bytes: usize = 4;
                $result
            }
            8 => {
                const $bytes: usize = 8;
                $result
            }
            _ => unreachable!("`is_plane_width` knows no other"),
        }
    };
}
pub(crate) use with_plane_width;

/// Where the merge finds a plane.
#[derive(Clone, Copy)]
pub(crate) enum PlaneSource<'a> {
    /// In these bytes.
    Bytes(&'a [u8]),
    /// In the last bytes of the target itself.
    EndOfTarget,
    /// Nowhere yet: it counts as zeros.
    Missing,
}

/// Splits elements, at least one, into their planes, which lie one after the other.
pub(crate) fn split_planes<const W: usize>(elements: &[[u8; W]], planes: &mut [u8])
where
    [[u8; W]; BLOCK_ELEMENTS]: Block<W>,
{
    let (blocks, rest) = elements.as_chunks::<BLOCK_ELEMENTS>();
    let mut planes = planes.chunks_exact_mut(elements.len());
    let mut planes: [_; W] =
        std::array::from_fn(|_| planes.next().expect("W planes").as_chunks_mut());
    for (number, block) in blocks.iter().enumerate() {
        for ((plane, _), bytes) in planes.iter_mut().zip(block.split()) {
            plane[number] = bytes;
        }
    }
    let mut block = [[0; W]; BLOCK_ELEMENTS];
    block[..rest.len()].copy_from_slice(rest);
    for ((_, plane_rest), bytes) in planes.iter_mut().zip(block.split()) {
        plane_rest.copy_from_slice(&bytes[..rest.len()]);
    }
}

/// Writes the elements that have these planes.
pub(crate) fn merge_planes<const W: usize>(planes: [PlaneSource<'_>; W], elements: &mut [[u8; W]])
where
    [[u8; W]; BLOCK_ELEMENTS]: Block<W>,
{
    let last = elements.len() * (W - 1);
    let whole = elements.len() / BLOCK_ELEMENTS * BLOCK_ELEMENTS;
    for start in (0..whole).step_by(BLOCK_ELEMENTS) {
        // The block is written before the bytes at the end of the target that later blocks read.
        let end = *block_at(elements.as_flattened(), last + start);
        let mut blocks = [&ZEROS; W];
        for (block, plane) in blocks.iter_mut().zip(&planes) {
            *block = match plane {
                PlaneSource::Bytes(bytes) => block_at(bytes, start),
                PlaneSource::EndOfTarget => &end,
                PlaneSource::Missing => &ZEROS,
            };
        }
        *elements[start..].first_chunk_mut().expect("a block") = Block::merge(blocks);
    }
    let rest = elements.len() - whole;
    let mut blocks = [ZEROS; W];
    for (block, plane) in blocks.iter_mut().zip(&planes) {
        block[..rest].copy_from_slice(match plane {
            PlaneSource::Bytes(bytes) => &bytes[whole..],
            PlaneSource::EndOfTarget => &elements.as_flattened()[last + whole..],
            PlaneSource::Missing => &ZEROS[..rest],
        });
    }
    let block: [[u8; W]; BLOCK_ELEMENTS] = Block::merge(blocks.each_ref());
    elements[whole..].copy_from_slice(&block[..rest]);
}

#[inline(always)]
fn block_at(bytes: &[u8], start: usize) -> &PlaneBlock {
    bytes[start..].first_chunk().expect("the caller passes starts of whole blocks")
}

/// Adds one plane to elements that have zeros there.
pub(crate) fn add_plane<const W: usize>(number: usize, plane: &[u8], elements: &mut [[u8; W]])
where
    [[u8; W]; BLOCK_ELEMENTS]: Block<W>,
{
    let (blocks, rest) = elements.as_chunks_mut::<BLOCK_ELEMENTS>();
    let (plane_blocks, plane_rest) = plane.as_chunks();
    for (block, plane) in blocks.iter_mut().zip(plane_blocks) {
        block.add(number, plane);
    }
    let mut block = [[0; W]; BLOCK_ELEMENTS];
    let mut plane = ZEROS;
    block[..rest.len()].copy_from_slice(rest);
    plane[..rest.len()].copy_from_slice(plane_rest);
    block.add(number, &plane);
    rest.copy_from_slice(&block[..rest.len()]);
}

/// One block of a plane.
pub(crate) type PlaneBlock = [u8; BLOCK_ELEMENTS];

const ZEROS: PlaneBlock = [0; BLOCK_ELEMENTS];

/// A block of elements of `W` bytes, each a little-endian integer.
pub(crate) trait Block<const W: usize>: Sized {
    /// Returns the planes of the elements, rotated left by one bit unless they are single bytes.
    fn split(&self) -> [PlaneBlock; W];

    /// Inverts `split`.
    fn merge(planes: [&PlaneBlock; W]) -> Self;

    /// Adds one plane, which was 0 before.
    fn add(&mut self, number: usize, plane: &PlaneBlock);
}

impl Block<1> for [[u8; 1]; BLOCK_ELEMENTS] {
    fn split(&self) -> [PlaneBlock; 1] {
        [self.map(|[byte]| byte)]
    }

    fn merge([plane]: [&PlaneBlock; 1]) -> Self {
        plane.map(|byte| [byte])
    }

    fn add(&mut self, _: usize, plane: &PlaneBlock) {
        *self = plane.map(|byte| [byte]);
    }
}

// Wide elements are split into halves, these again, and merged in the same order: the vector units of all machines can
// do a step from one width to the next.

impl Block<2> for [[u8; 2]; BLOCK_ELEMENTS] {
    #[inline(always)]
    fn split(&self) -> [PlaneBlock; 2] {
        split_u16(&load_u16(self))
    }

    #[inline(always)]
    fn merge([a, b]: [&PlaneBlock; 2]) -> Self {
        store_u16(&merge_u16(a, b))
    }

    #[inline(always)]
    fn add(&mut self, number: usize, plane: &PlaneBlock) {
        add_u16(self, number, plane);
    }
}

impl Block<4> for [[u8; 4]; BLOCK_ELEMENTS] {
    #[inline(always)]
    fn split(&self) -> [PlaneBlock; 4] {
        let [low, high] = split_u32(&load_u32(self));
        let ([a, b], [c, d]) = (split_u16(&low), split_u16(&high));
        [a, b, c, d]
    }

    #[inline(always)]
    fn merge([a, b, c, d]: [&PlaneBlock; 4]) -> Self {
        store_u32(&merge_u32(&merge_u16(a, b), &merge_u16(c, d)))
    }

    #[inline(always)]
    fn add(&mut self, number: usize, plane: &PlaneBlock) {
        add_u32(self, number, plane);
    }
}

impl Block<8> for [[u8; 8]; BLOCK_ELEMENTS] {
    #[inline(always)]
    #[expect(clippy::many_single_char_names, reason = "they are eight planes")]
    fn split(&self) -> [PlaneBlock; 8] {
        let [low, high] = split_u64(&load_u64(self));
        let ([low, mid_low], [mid_high, high]) = (split_u32(&low), split_u32(&high));
        let ([a, b], [c, d]) = (split_u16(&low), split_u16(&mid_low));
        let ([e, f], [g, h]) = (split_u16(&mid_high), split_u16(&high));
        [a, b, c, d, e, f, g, h]
    }

    #[inline(always)]
    #[expect(clippy::many_single_char_names, reason = "they are eight planes")]
    fn merge([a, b, c, d, e, f, g, h]: [&PlaneBlock; 8]) -> Self {
        let low = merge_u32(&merge_u16(a, b), &merge_u16(c, d));
        let high = merge_u32(&merge_u16(e, f), &merge_u16(g, h));
        store_u64(&merge_u64(&low, &high))
    }

    #[inline(always)]
    fn add(&mut self, number: usize, plane: &PlaneBlock) {
        add_u64(self, number, plane);
    }
}

macro_rules! block_functions {
    ($($int:ident $half:ident $load:ident $store:ident $split:ident $merge:ident $add:ident;)*) => {$(
        /// Returns the elements, rotated left.
        #[inline(always)]
        fn $load(bytes: &[[u8; size_of::<$int>()]; BLOCK_ELEMENTS]) -> [$int; BLOCK_ELEMENTS] {
            let mut values = [0; BLOCK_ELEMENTS];
            for (value, bytes) in values.iter_mut().zip(bytes) {
                *value = $int::from_le_bytes(*bytes).rotate_left(1);
            }
            values
        }

        /// Inverts the load.
        #[inline(always)]
        fn $store(values: &[$int; BLOCK_ELEMENTS]) -> [[u8; size_of::<$int>()]; BLOCK_ELEMENTS] {
            let mut bytes = [[0; size_of::<$int>()]; BLOCK_ELEMENTS];
            for (bytes, value) in bytes.iter_mut().zip(values) {
                *bytes = value.rotate_right(1).to_le_bytes();
            }
            bytes
        }

        /// Returns the low and the high halves of the values.
        #[inline(always)]
        #[expect(clippy::cast_possible_truncation, reason = "each cast takes one half")]
        fn $split(values: &[$int; BLOCK_ELEMENTS]) -> [[$half; BLOCK_ELEMENTS]; 2] {
            let [mut low, mut high] = [[0; BLOCK_ELEMENTS]; 2];
            for ((value, low), high) in values.iter().zip(&mut low).zip(&mut high) {
                *low = *value as $half;
                *high = (*value >> $half::BITS) as $half;
            }
            [low, high]
        }

        /// Inverts the split.
        #[inline(always)]
        fn $merge(low: &[$half; BLOCK_ELEMENTS], high: &[$half; BLOCK_ELEMENTS]) -> [$int; BLOCK_ELEMENTS] {
            let mut values = [0; BLOCK_ELEMENTS];
            for ((value, low), high) in values.iter_mut().zip(low).zip(high) {
                *value = $int::from(*low) | $int::from(*high) << $half::BITS;
            }
            values
        }

        /// Adds one plane to elements that have zeros there.
        #[inline(always)]
        fn $add(
            block: &mut [[u8; size_of::<$int>()]; BLOCK_ELEMENTS],
            number: usize,
            plane: &PlaneBlock,
        ) {
            for (element, byte) in block.iter_mut().zip(plane) {
                let part = ($int::from(*byte) << (8 * number)).rotate_right(1);
                *element = ($int::from_le_bytes(*element) | part).to_le_bytes();
            }
        }
    )*};
}

block_functions! {
    u16 u8 load_u16 store_u16 split_u16 merge_u16 add_u16;
    u32 u16 load_u32 store_u32 split_u32 merge_u32 add_u32;
    u64 u32 load_u64 store_u64 split_u64 merge_u64 add_u64;
}
