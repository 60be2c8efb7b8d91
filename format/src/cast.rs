//! Casts between floating dtypes. The elements are converted while they are read.
// Kernels must be inlined into the function that enables their instructions.
#![allow(clippy::inline_always)]

use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use bytemuck::{cast_slice, cast_slice_mut};
use bytes::Bytes;
use half::f16;
use half::slice::HalfFloatSliceExt;

use crate::blob::Blob;
use crate::convert::{to_u64, to_usize};
use crate::dtype::Dtype;
use crate::isa::{Instructions, Isa, Kernel};
use crate::tensor::Storage;

/// A cast from one floating dtype to another: to the nearest value, and to the even one of two nearest.
///
/// A NaN stays a NaN. A number beyond the range of the target becomes infinite.
#[derive(Clone, Copy)]
pub struct Cast {
    from: Dtype,
    to: Dtype,
    convert: Convert,
}

/// Converts elements. The target has as many elements as the source.
type Convert = fn(&[u8], &mut [u8]);

impl Cast {
    /// Returns the cast between two dtypes: float32 to bfloat16 or float16, float64 to float32, and bfloat16 or float16 to
    /// float32. `None` for all others.
    pub fn between(from: Dtype, to: Dtype) -> Option<Self> {
        let convert: Convert = match (from, to) {
            (Dtype::Float32, Dtype::Bfloat16) => float32_to_bfloat16,
            (Dtype::Float32, Dtype::Float16) => float32_to_float16,
            (Dtype::Float64, Dtype::Float32) => float64_to_float32,
            (Dtype::Bfloat16, Dtype::Float32) => bfloat16_to_float32,
            (Dtype::Float16, Dtype::Float32) => float16_to_float32,
            _ => return None,
        };
        Some(Self { from, to, convert })
    }

    /// Returns a storage with the cast elements. Element `i` of it is the cast element `i` of `elements`.
    ///
    /// The elements are cast whenever they are read, so the storage needs no memory. Bytes after the last whole element
    /// are ignored. Tensors are tied if they are made from one storage, not if they are made from two casts of it.
    ///
    /// # Examples
    ///
    /// ```
    /// use tssd_format::{Cast, Dtype, Tensor, TensorMeta};
    ///
    /// let master = Tensor::from_slice(&[1.0_f32, 2.5, -3.0], &[3])?;
    /// let elements = master.storage().bytes().expect("it is in memory").clone();
    /// let cast = Cast::between(Dtype::Float32, Dtype::Bfloat16).expect("there is such a cast");
    /// let tensor = Tensor::new(TensorMeta::new(Dtype::Bfloat16, &[3])?, cast.storage(elements), 0)?;
    /// assert_eq!(tensor.to_memory()?.view().span(), [0x80, 0x3f, 0x20, 0x40, 0x40, 0xc0]);
    /// # Ok::<(), tssd_format::Error>(())
    /// ```
    pub fn storage(self, elements: Bytes) -> Storage {
        Storage::from_blob(Arc::new(CastBlob { cast: self, elements }))
            .expect("its length is known")
    }

    fn source_width(self) -> usize {
        to_usize(self.from.itemsize())
    }

    fn target_width(self) -> usize {
        to_usize(self.to.itemsize())
    }
}

impl fmt::Debug for Cast {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Cast({} to {})", self.from, self.to)
    }
}

/// Elements that are cast when they are read.
#[derive(Debug)]
struct CastBlob {
    cast: Cast,
    /// The source elements.
    elements: Bytes,
}

impl CastBlob {
    /// Returns the source bytes of these elements.
    fn source(&self, elements: Range<usize>) -> io::Result<&[u8]> {
        let width = self.cast.source_width();
        let bytes = self.elements.get(elements.start * width..elements.end * width);
        bytes.ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
    }

    /// Casts one element, and copies the bytes from `skip` on to `target`.
    fn read_part(&self, element: usize, skip: usize, target: &mut [u8]) -> io::Result<()> {
        let mut whole = [0; size_of::<f64>()];
        let whole = &mut whole[..self.cast.target_width()];
        (self.cast.convert)(self.source(element..element + 1)?, whole);
        target.copy_from_slice(&whole[skip..][..target.len()]);
        Ok(())
    }
}

impl Blob for CastBlob {
    fn size(&self) -> io::Result<u64> {
        let elements = self.elements.len() / self.cast.source_width();
        Ok(to_u64(elements * self.cast.target_width()))
    }

    fn read_exact_at(&self, target: &mut [u8], offset: u64) -> io::Result<()> {
        let width = self.cast.target_width();
        let offset = usize::try_from(offset).map_err(io::Error::other)?;
        let (mut element, skip) = (offset / width, offset % width);
        // A range can begin and end within elements.
        let head = if skip == 0 { 0 } else { (width - skip).min(target.len()) };
        let (head, rest) = target.split_at_mut(head);
        if !head.is_empty() {
            self.read_part(element, skip, head)?;
            element += 1;
        }
        let whole = rest.len() / width;
        let (rest, tail) = rest.split_at_mut(whole * width);
        (self.cast.convert)(self.source(element..element + whole)?, rest);
        if tail.is_empty() { Ok(()) } else { self.read_part(element + whole, 0, tail) }
    }

    fn bytes(&self) -> Option<&Bytes> {
        None
    }
}

/// Converts each element with a function.
struct ForEach<'a, const A: usize, const B: usize, F> {
    source: &'a [u8],
    target: &'a mut [u8],
    convert: F,
}

impl<const A: usize, const B: usize, F: Fn([u8; A]) -> [u8; B]> Kernel for ForEach<'_, A, B, F> {
    type Output = ();

    #[inline(always)]
    fn run<I: Instructions>(self, _: I) {
        let source = self.source.as_chunks::<A>().0;
        for (target, source) in self.target.as_chunks_mut::<B>().0.iter_mut().zip(source) {
            *target = (self.convert)(*source);
        }
    }
}

fn float32_to_bfloat16(source: &[u8], target: &mut [u8]) {
    let convert = |element: [u8; 4]| {
        let bits = u32::from_le_bytes(element);
        let is_nan = bits & 0x7fff_ffff > 0x7f80_0000;
        let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
        let quiet = bits >> 16 | 0x40;
        let [low, high, ..] = (if is_nan { quiet } else { rounded }).to_le_bytes();
        [low, high]
    };
    Isa::detect().run(ForEach { source, target, convert });
}

fn bfloat16_to_float32(source: &[u8], target: &mut [u8]) {
    let convert = |[low, high]: [u8; 2]| [0, 0, low, high];
    Isa::detect().run(ForEach { source, target, convert });
}

fn float64_to_float32(source: &[u8], target: &mut [u8]) {
    #[expect(clippy::cast_possible_truncation, reason = "rounds to the nearest number")]
    let convert = |element: [u8; 8]| (f64::from_le_bytes(element) as f32).to_le_bytes();
    Isa::detect().run(ForEach { source, target, convert });
}

/// Elements that are converted together. They are copied to aligned memory in the fastest cache.
const GROUP: usize = 1024;

fn float32_to_float16(source: &[u8], target: &mut [u8]) {
    let (mut wide, mut narrow) = ([0_f32; GROUP], [f16::ZERO; GROUP]);
    for (source, target) in source.chunks(4 * GROUP).zip(target.chunks_mut(2 * GROUP)) {
        let len = source.len() / 4;
        cast_slice_mut(&mut wide[..len]).copy_from_slice(source);
        narrow[..len].convert_from_f32_slice(&wide[..len]);
        target.copy_from_slice(cast_slice(&narrow[..len]));
    }
}

fn float16_to_float32(source: &[u8], target: &mut [u8]) {
    let (mut wide, mut narrow) = ([0_f32; GROUP], [f16::ZERO; GROUP]);
    for (source, target) in source.chunks(2 * GROUP).zip(target.chunks_mut(4 * GROUP)) {
        let len = source.len() / 2;
        cast_slice_mut(&mut narrow[..len]).copy_from_slice(source);
        narrow[..len].convert_to_f32_slice(&mut wide[..len]);
        target.copy_from_slice(cast_slice(&wide[..len]));
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;
    use proptest::prelude::*;

    use super::*;

    /// Casts one element as the crate `half` or the language does.
    fn expected(from: Dtype, to: Dtype, element: &[u8]) -> Vec<u8> {
        match (from, to) {
            (Dtype::Float32, _) => {
                let value = f32::from_le_bytes(element.try_into().unwrap());
                if to == Dtype::Bfloat16 {
                    bf16::from_f32(value).to_le_bytes().to_vec()
                } else {
                    f16::from_f32(value).to_le_bytes().to_vec()
                }
            }
            (Dtype::Bfloat16, _) => {
                bf16::from_le_bytes(element.try_into().unwrap()).to_f32().to_le_bytes().to_vec()
            }
            (Dtype::Float16, _) => {
                f16::from_le_bytes(element.try_into().unwrap()).to_f32().to_le_bytes().to_vec()
            }
            #[expect(clippy::cast_possible_truncation, reason = "rounds to the nearest number")]
            _ => (f64::from_le_bytes(element.try_into().unwrap()) as f32).to_le_bytes().to_vec(),
        }
    }

    const CASTS: [(Dtype, Dtype); 5] = [
        (Dtype::Float32, Dtype::Bfloat16),
        (Dtype::Float32, Dtype::Float16),
        (Dtype::Float64, Dtype::Float32),
        (Dtype::Bfloat16, Dtype::Float32),
        (Dtype::Float16, Dtype::Float32),
    ];

    fn check(cast: Cast, bytes: &[u8]) {
        let width = cast.source_width();
        let elements = bytes.chunks_exact(width);
        let expected: Vec<u8> =
            elements.flat_map(|element| expected(cast.from, cast.to, element)).collect();
        let mut found = vec![0; expected.len()];
        let blob = CastBlob { cast, elements: Bytes::copy_from_slice(bytes) };
        blob.read_exact_at(&mut found, 0).unwrap();
        let width = cast.target_width();
        let is_nan = |bytes: &[u8]| match cast.to {
            Dtype::Float32 => f32::from_le_bytes(bytes.try_into().unwrap()).is_nan(),
            Dtype::Float16 => f16::from_le_bytes(bytes.try_into().unwrap()).is_nan(),
            _ => bf16::from_le_bytes(bytes.try_into().unwrap()).is_nan(),
        };
        for (found, expected) in found.chunks(width).zip(expected.chunks(width)) {
            // The payload of a NaN is not specified.
            assert!(
                found == expected || is_nan(found) && is_nan(expected),
                "{cast:?} {found:?} {expected:?}"
            );
        }
    }

    /// All patterns of the upper 16 bits with lower ones around the points where the rounding changes.
    #[test]
    fn cast_rounds_as_the_reference_does() {
        let lower = [0, 1, 0x0fff, 0x1000, 0x1001, 0x7fff, 0x8000, 0x8001, 0xffff_u32];
        let float32: Vec<u8> = (0..=0xffff_u32)
            .flat_map(|upper| lower.map(|lower| upper << 16 | lower))
            .flat_map(u32::to_le_bytes)
            .collect();
        let float16: Vec<u8> = (0..=0xffff_u16).flat_map(u16::to_le_bytes).collect();
        for (from, to) in CASTS {
            let cast = Cast::between(from, to).unwrap();
            check(cast, if cast.source_width() == 2 { &float16 } else { &float32 });
        }
    }

    proptest! {
        #[test]
        fn range_is_that_of_the_whole(
            kind in 0..CASTS.len(),
            bytes in prop::collection::vec(any::<u8>(), 0..20_000),
            start: prop::sample::Index,
            end: prop::sample::Index,
        ) {
            let cast = Cast::between(CASTS[kind].0, CASTS[kind].1).unwrap();
            check(cast, &bytes);
            let blob = CastBlob { cast, elements: bytes.into() };
            let len = blob.size().unwrap();
            let mut whole = vec![0; to_usize(len)];
            blob.read_exact_at(&mut whole, 0).unwrap();
            let (start, end) = (start.index(whole.len() + 1), end.index(whole.len() + 1));
            let (start, end) = (start.min(end), start.max(end));
            let mut part = vec![0; end - start];
            blob.read_exact_at(&mut part, to_u64(start)).unwrap();
            prop_assert_eq!(&part, &whole[start..end]);
            let error = blob.read_exact_at(&mut [0; 9], len - len.min(8)).unwrap_err();
            prop_assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
        }
    }

    #[test]
    fn other_pairs_have_no_cast() {
        for to in [Dtype::Float32, Dtype::Float8E4m3fn, Dtype::Int32] {
            assert!(Cast::between(Dtype::Float32, to).is_none(), "{to}");
        }
    }
}
