//! Tensors: metadata, and bytes that several of them may share.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;

use crate::blob::Blob;
use crate::dtype::Dtype;
use crate::error::{Error, ErrorKind, Result};
use crate::runs::Runs;
use crate::shape::{Sizes, check_shape, numel, row_major_strides, span_bytes};

/// What a tensor is, apart from its elements.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TensorMeta {
    dtype: Dtype,
    shape: Sizes,
    strides: Option<Box<[u64]>>,
    flags: TensorFlags,
}

impl TensorMeta {
    /// A contiguous tensor of this shape (elements).
    ///
    /// # Errors
    ///
    /// `RankTooLarge` over 64 dimensions, `ShapeOverflow` if it would be 2^63 bytes or more.
    #[inline]
    pub fn new(dtype: Dtype, shape: &[u64]) -> Result<Self> {
        check_shape(dtype.itemsize(), shape)?;
        Ok(Self { dtype, shape: shape.into(), strides: None, flags: TensorFlags::default() })
    }

    /// The same with these strides (elements). Row-major ones are dropped: they are the default.
    ///
    /// # Errors
    ///
    /// `ShapeMismatch` if there is not one stride per dimension, `ShapeOverflow` if the elements
    /// would span 2^63 bytes or more.
    pub fn with_strides(mut self, strides: &[u64]) -> Result<Self> {
        if strides.len() != self.shape.len() {
            return Err(Error::new(ErrorKind::ShapeMismatch).note(format_args!(
                "{} strides for {} dimensions",
                strides.len(),
                self.shape.len()
            )));
        }
        span_bytes(self.dtype.itemsize(), &self.shape, Some(strides))?;
        self.strides = (strides != row_major_strides(&self.shape)).then(|| strides.into());
        Ok(self)
    }

    /// The same with these flags.
    #[must_use]
    pub fn with_flags(mut self, flags: TensorFlags) -> Self {
        self.flags = flags;
        self
    }

    /// The type of the elements.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// The shape, in elements.
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// The strides, in elements; row-major unless they were given.
    pub fn strides(&self) -> Vec<u64> {
        self.strides.as_deref().map_or_else(|| row_major_strides(&self.shape), <[u64]>::to_vec)
    }

    /// True if the elements lie row-major without gaps.
    pub fn is_contiguous(&self) -> bool {
        self.strides.is_none() || self.numel() == 0
    }

    pub(crate) fn explicit_strides(&self) -> Option<&[u64]> {
        self.strides.as_deref()
    }

    /// What else torch or numpy need to know to make the object again.
    pub fn flags(&self) -> TensorFlags {
        self.flags
    }

    /// How many elements it has.
    #[inline]
    pub fn numel(&self) -> u64 {
        numel(&self.shape)
    }

    /// Length of the elements laid out, in bytes. A tensor with a stride of 0 spans less.
    pub fn nbytes(&self) -> u64 {
        self.numel().saturating_mul(self.dtype.itemsize())
    }

    /// From the first byte of the first element to the last byte of the last one, in bytes.
    #[inline]
    pub fn span_bytes(&self) -> u64 {
        span_bytes(self.dtype.itemsize(), &self.shape, self.explicit_strides())
            .expect("shape and strides were checked when they were set")
    }
}

/// Bits that say which object a tensor came from. Spec: section 6.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct TensorFlags(u8);

impl TensorFlags {
    /// `tensor.requires_grad`.
    pub const REQUIRES_GRAD: Self = Self(1);
    /// A `torch.nn.Parameter`.
    pub const PARAMETER: Self = Self(2);
    /// A `numpy.ndarray`.
    pub const NDARRAY: Self = Self(4);
    /// A numpy scalar, such as `numpy.float32(1)`.
    pub const SCALAR: Self = Self(8);
    /// The flags with their names in the JSON view.
    pub const NAMES: [(Self, &'static str); 4] = [
        (Self::REQUIRES_GRAD, "requires_grad"),
        (Self::PARAMETER, "parameter"),
        (Self::NDARRAY, "ndarray"),
        (Self::SCALAR, "scalar"),
    ];

    /// The flags with these bits, if all of them are known.
    pub const fn from_bits(bits: u8) -> Option<Self> {
        if bits < 16 { Some(Self(bits)) } else { None }
    }

    /// The bits.
    pub const fn bits(self) -> u8 {
        self.0
    }

    /// These and those.
    #[must_use]
    pub const fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// True if all of `other` are among these.
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

/// Bytes that tensors lie in, shared and immutable. Two tensors whose bytes overlap in memory are
/// tied: they are stored once, and come back overlapping.
#[derive(Clone)]
pub struct Storage(Place);

#[derive(Clone)]
enum Place {
    Memory(Bytes),
    Elsewhere(Arc<dyn Blob>, u64),
}

impl Storage {
    /// Bytes that belong to `owner`, such as a memory map or another library's buffer.
    pub fn from_owner(owner: impl AsRef<[u8]> + Send + 'static) -> Self {
        Self(Place::Memory(Bytes::from_owner(owner)))
    }

    /// Bytes that are not in this process's memory, such as a GPU's: they are read when they are written to an
    /// archive. Two tensors are tied if they overlap in one blob.
    ///
    /// # Errors
    ///
    /// `Io` if its length cannot be had.
    pub fn elsewhere(blob: Arc<dyn Blob>) -> Result<Self> {
        if let Some(bytes) = blob.bytes() {
            return Ok(bytes.clone().into());
        }
        let len = blob.size()?;
        Ok(Self(Place::Elsewhere(blob, len)))
    }

    /// How many bytes there are.
    pub fn len(&self) -> u64 {
        match &self.0 {
            Place::Memory(bytes) => u64::try_from(bytes.len()).unwrap_or(u64::MAX),
            Place::Elsewhere(_, len) => *len,
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The bytes, if they are in this process's memory.
    pub fn bytes(&self) -> Option<&Bytes> {
        match &self.0 {
            Place::Memory(bytes) => Some(bytes),
            Place::Elsewhere(..) => None,
        }
    }

    /// Where the bytes are, if that is elsewhere.
    pub fn blob(&self) -> Option<&Arc<dyn Blob>> {
        match &self.0 {
            Place::Memory(_) => None,
            Place::Elsewhere(blob, _) => Some(blob),
        }
    }
}

impl Default for Storage {
    fn default() -> Self {
        Bytes::new().into()
    }
}

impl From<Bytes> for Storage {
    fn from(bytes: Bytes) -> Self {
        Self(Place::Memory(bytes))
    }
}

impl From<Vec<u8>> for Storage {
    fn from(bytes: Vec<u8>) -> Self {
        Bytes::from(bytes).into()
    }
}

/// Elements are given in native memory order, which must be little-endian.
impl<T: Element> From<&[T]> for Storage {
    fn from(elements: &[T]) -> Self {
        Bytes::copy_from_slice(bytemuck::cast_slice(elements)).into()
    }
}

impl fmt::Debug for Storage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = if self.bytes().is_some() { "" } else { " elsewhere" };
        write!(f, "Storage({} bytes{place})", self.len())
    }
}

/// A tensor in this process's memory, or elsewhere. Cloning one clones no bytes.
#[derive(Clone, Debug)]
pub struct Tensor {
    meta: TensorMeta,
    storage: Storage,
    byte_offset: u64,
}

impl Tensor {
    /// A tensor whose element 0 is `byte_offset` bytes into `storage`.
    ///
    /// # Errors
    ///
    /// `ShapeMismatch` if the elements do not all lie in the storage.
    #[inline]
    pub fn new(meta: TensorMeta, storage: Storage, byte_offset: u64) -> Result<Self> {
        let end = byte_offset.checked_add(meta.span_bytes());
        let len = storage.len();
        let has_elements = meta.numel() > 0;
        if has_elements && end.is_none_or(|end| end > len) {
            return Err(Error::new(ErrorKind::ShapeMismatch).note(format_args!(
                "{} of shape {:?} at byte {byte_offset} does not fit into {len} bytes",
                meta.dtype, meta.shape
            )));
        }
        let byte_offset = if has_elements { byte_offset } else { 0 };
        Ok(Self { meta, storage, byte_offset })
    }

    /// A contiguous tensor with these elements.
    ///
    /// # Errors
    ///
    /// As [`TensorMeta::new`]; `ShapeMismatch` if the shape has another number of elements.
    ///
    /// # Examples
    ///
    /// ```
    /// use tssd_format::Tensor;
    /// let tensor = Tensor::from_slice(&[1.0_f32, 2.0, 3.0, 4.0], &[2, 2])?;
    /// assert_eq!(tensor.view().as_slice::<f32>()?, [1.0, 2.0, 3.0, 4.0]);
    /// # Ok::<(), tssd_format::Error>(())
    /// ```
    pub fn from_slice<T: Element>(elements: &[T], shape: &[u64]) -> Result<Self> {
        let meta = TensorMeta::new(T::DTYPE, shape)?;
        if u64::try_from(elements.len()) != Ok(meta.numel()) {
            return Err(Error::new(ErrorKind::ShapeMismatch)
                .note(format_args!("{} elements for shape {shape:?}", elements.len())));
        }
        Self::new(meta, elements.into(), 0)
    }

    /// What it is, apart from its elements.
    pub fn meta(&self) -> &TensorMeta {
        &self.meta
    }

    /// The bytes it lies in.
    pub fn storage(&self) -> &Storage {
        &self.storage
    }

    /// Where its element 0 is in the storage, in bytes.
    pub fn byte_offset(&self) -> u64 {
        self.byte_offset
    }

    /// The same tensor in this process's memory: a copy of what it spans, unless it is there.
    ///
    /// # Errors
    ///
    /// `Io` if what is elsewhere cannot be read.
    pub fn to_memory(&self) -> Result<Self> {
        let Some(blob) = self.storage.blob() else { return Ok(self.clone()) };
        let span = self.byte_offset..self.byte_offset + self.meta.span_bytes();
        let bytes = if self.meta.numel() == 0 { Bytes::new() } else { blob.stable(span)? };
        Self::new(self.meta.clone(), bytes.into(), 0)
    }

    /// Its elements.
    ///
    /// # Panics
    ///
    /// If they are not in this process's memory: [`Tensor::to_memory`] brings them there.
    pub fn view(&self) -> TensorView<'_> {
        let bytes = self.storage.bytes().expect("its elements are in this process's memory");
        let start = usize::try_from(self.byte_offset).unwrap_or(bytes.len()).min(bytes.len());
        let span = usize::try_from(self.meta.span_bytes()).unwrap_or(0);
        TensorView { meta: &self.meta, bytes: bytes.get(start..start + span).unwrap_or_default() }
    }
}

/// Equal if metadata and elements are, bit for bit, wherever they lie in this process's memory; what is elsewhere
/// is only equal to itself.
impl PartialEq for Tensor {
    fn eq(&self, other: &Self) -> bool {
        if self.meta != other.meta {
            return false;
        }
        match (self.storage.blob(), other.storage.blob()) {
            (None, None) => self.view().elements_equal(&other.view()),
            (Some(own), Some(others)) => {
                Arc::ptr_eq(own, others) && self.byte_offset == other.byte_offset
            }
            _ => false,
        }
    }
}

/// A look at the elements of a tensor: no copy, no ownership.
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'a> {
    meta: &'a TensorMeta,
    bytes: &'a [u8],
}

impl<'a> TensorView<'a> {
    /// What the tensor is.
    pub fn meta(&self) -> &'a TensorMeta {
        self.meta
    }

    /// The bytes from its first element to its last, gaps and all.
    pub fn span(&self) -> &'a [u8] {
        self.bytes
    }

    /// The elements of a contiguous tensor.
    ///
    /// # Errors
    ///
    /// `WrongType` if its dtype is not `T`'s, `NotContiguous` if there are gaps or another order,
    /// `Misaligned` if the memory is not aligned for `T`.
    pub fn as_slice<T: Element>(&self) -> Result<&'a [T]> {
        if self.meta.dtype != T::DTYPE {
            return Err(Error::new(ErrorKind::WrongType).note(format_args!(
                "expected {}, found {}",
                T::DTYPE,
                self.meta.dtype
            )));
        }
        if self.meta.numel() == 0 {
            return Ok(&[]);
        }
        bytemuck::try_cast_slice(self.contiguous()?)
            .map_err(|error| Error::new(ErrorKind::Misaligned).note(error))
    }

    /// The bytes of the elements of a contiguous tensor.
    ///
    /// # Errors
    ///
    /// `NotContiguous` if there are gaps or another order.
    pub fn contiguous(&self) -> Result<&'a [u8]> {
        if self.meta.is_contiguous() {
            Ok(self.bytes)
        } else {
            Err(Error::new(ErrorKind::NotContiguous)
                .note(format_args!("strides {:?}", self.meta.strides())))
        }
    }

    /// The elements laid out row-major, in new memory.
    ///
    /// # Errors
    ///
    /// `LimitExceeded` if they are more than `limit_bytes`: a tensor with a stride of 0 can be of any
    /// size, however short the file.
    pub fn to_contiguous(&self, limit_bytes: u64) -> Result<Vec<u8>> {
        let nbytes = self.meta.nbytes();
        let len =
            usize::try_from(nbytes).ok().filter(|_| nbytes <= limit_bytes).ok_or_else(|| {
                Error::new(ErrorKind::LimitExceeded)
                    .note(format_args!("{nbytes} bytes, limit {limit_bytes}"))
            })?;
        let mut elements = Vec::with_capacity(len);
        let strides = self.meta.strides();
        Runs::to_row_major(self.meta.dtype.itemsize(), &self.meta.shape, &strides).for_each(
            |source, _, run| {
                // Row-major order of the target is the order of the calls.
                elements.extend_from_slice(part(self.bytes, source, run));
            },
        );
        Ok(elements)
    }

    /// True if both have the same elements in the same order, bit for bit.
    pub fn elements_equal(&self, other: &Self) -> bool {
        if self.meta.shape != other.meta.shape || self.meta.dtype != other.meta.dtype {
            return false;
        }
        let (own, others) = (self.meta.strides(), other.meta.strides());
        // Strides can make any number of elements of the same bytes.
        if own == others && self.bytes == other.bytes {
            return true;
        }
        // What is repeated on both sides is compared once.
        let mut shape = self.meta.shape.to_vec();
        for ((size, own), other) in shape.iter_mut().zip(&own).zip(&others) {
            if (*own, *other) == (0, 0) {
                *size = (*size).min(1);
            }
        }
        let mut equal = true;
        Runs::new(self.meta.dtype.itemsize(), &shape, &own, &others).for_each(
            |left, right, run| {
                equal = equal && part(self.bytes, left, run) == part(other.bytes, right, run);
            },
        );
        equal
    }
}

fn part(bytes: &[u8], start: u64, len: u64) -> &[u8] {
    let index = |value| usize::try_from(value).expect("runs lie inside the span");
    &bytes[index(start)..][..index(len)]
}

/// A Rust type that is the element of a dtype.
pub trait Element: bytemuck::Pod + private::Sealed {
    /// The dtype.
    const DTYPE: Dtype;
}

mod private {
    pub trait Sealed {}
}

macro_rules! elements {
    ($($ty:ty => $dtype:ident,)*) => {
        $(impl private::Sealed for $ty {}
        impl Element for $ty { const DTYPE: Dtype = Dtype::$dtype; })*
    };
}

elements! {
    u8 => Uint8, i8 => Int8, u16 => Uint16, i16 => Int16, u32 => Uint32, i32 => Int32,
    u64 => Uint64, i64 => Int64, f32 => Float32, f64 => Float64,
    half::f16 => Float16, half::bf16 => Bfloat16,
}
