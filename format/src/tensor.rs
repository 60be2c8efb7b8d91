//! Tensors: metadata, and storages that several tensors may share.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;

use crate::blob::Blob;
use crate::dtype::{CompactDtype, Dtype, DtypeClass};
use crate::error::{Error, ErrorKind, Result};
use crate::runs::Runs;
use crate::shape::{Sizes, are_row_major, check_shape, numel, row_major_strides, span_bytes};

/// The metadata of a tensor: dtype, shape, strides and flags.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TensorMeta {
    dtype: CompactDtype,
    shape: Sizes,
    strides: Option<Box<[u64]>>,
    flags: TensorFlags,
}

impl TensorMeta {
    /// Creates the metadata of a contiguous tensor. The shape is in elements.
    ///
    /// # Errors
    ///
    /// `RankTooLarge` over 64 dimensions, `ShapeOverflow` if the tensor would have 2^63 bytes or more.
    #[inline]
    pub fn new(dtype: Dtype, shape: &[u64]) -> Result<Self> {
        Self::with_compact_dtype(dtype.into(), shape, TensorFlags::default())
    }

    /// Creates the metadata of a contiguous tensor, as [`TensorMeta::new`] does.
    #[inline]
    pub(crate) fn with_compact_dtype(
        dtype: CompactDtype,
        shape: &[u64],
        flags: TensorFlags,
    ) -> Result<Self> {
        check_shape(dtype.itemsize(), shape)?;
        Ok(Self { dtype, shape: shape.into(), strides: None, flags })
    }

    /// Sets the strides, in elements. Row-major strides are not stored, because they are the default.
    ///
    /// # Errors
    ///
    /// `ShapeMismatch` if there is not one stride per dimension, `ShapeOverflow` if the elements
    /// would span 2^63 bytes or more.
    pub fn with_strides(mut self, strides: &[u64]) -> Result<Self> {
        if strides.len() != self.shape.len() {
            return Err(Error::new(ErrorKind::ShapeMismatch).with_detail(format_args!(
                "{} strides for {} dimensions",
                strides.len(),
                self.shape.len()
            )));
        }
        span_bytes(self.itemsize(), &self.shape, Some(strides))?;
        self.strides = (!are_row_major(&self.shape, strides)).then(|| strides.into());
        Ok(self)
    }

    /// Sets the flags.
    #[must_use]
    pub fn with_flags(mut self, flags: TensorFlags) -> Self {
        self.flags = flags;
        self
    }

    /// Returns the type of the elements.
    pub fn dtype(&self) -> Dtype {
        self.dtype.to_dtype()
    }

    /// Returns the dtype as the metadata holds it.
    pub(crate) fn compact_dtype(&self) -> &CompactDtype {
        &self.dtype
    }

    /// Returns the size of one element in bytes.
    #[inline]
    pub(crate) fn itemsize(&self) -> u64 {
        self.dtype.itemsize()
    }

    /// Returns the shape, in elements.
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// Returns the strides, in elements; they are row-major unless set.
    pub fn strides(&self) -> Vec<u64> {
        self.strides.as_deref().map_or_else(|| row_major_strides(&self.shape), <[u64]>::to_vec)
    }

    /// Returns true if the elements are row-major without gaps.
    pub fn is_contiguous(&self) -> bool {
        self.strides.is_none() || self.numel() == 0
    }

    /// Checks that the flags fit dtype and shape (F-056).
    #[inline]
    pub(crate) fn check_flags(&self) -> Result<()> {
        if self.flags.fit(self.shape.len(), || self.dtype().class()) {
            Ok(())
        } else {
            Err(Error::new(ErrorKind::TensorFlags).with_detail(format_args!(
                "{:?} of {} with {} dimensions",
                self.flags,
                self.dtype(),
                self.shape.len()
            )))
        }
    }

    pub(crate) fn explicit_strides(&self) -> Option<&[u64]> {
        self.strides.as_deref()
    }

    /// Returns the flags that torch and numpy need to recreate the object.
    pub fn flags(&self) -> TensorFlags {
        self.flags
    }

    /// Returns the number of elements.
    #[inline]
    pub fn numel(&self) -> u64 {
        numel(&self.shape)
    }

    /// Returns the size of all elements, in bytes.
    ///
    /// The span of a tensor with a stride of 0 can be smaller.
    pub fn nbytes(&self) -> u64 {
        self.numel().saturating_mul(self.itemsize())
    }

    /// Returns the number of bytes from the first element to the end of the last element.
    #[inline]
    pub fn span_bytes(&self) -> u64 {
        span_bytes(self.itemsize(), &self.shape, self.explicit_strides())
            .expect("shape and strides were checked when they were set")
    }
}

/// Flags that identify the kind of object that a tensor was created from. Spec: section 6.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct TensorFlags(u8);

impl TensorFlags {
    /// `tensor.requires_grad`. Tensors of bools, ints, uints and bits do not have it.
    pub const REQUIRES_GRAD: Self = Self(1);
    /// A `torch.nn.Parameter`.
    pub const PARAMETER: Self = Self(2);
    /// A `numpy.ndarray`.
    pub const NDARRAY: Self = Self(4);
    /// A numpy scalar, such as `numpy.float32(1)`. It has no dimensions.
    pub const SCALAR: Self = Self(8);
    /// All flags with their names in the JSON view.
    pub const NAMES: [(Self, &'static str); 4] = [
        (Self::REQUIRES_GRAD, "requires_grad"),
        (Self::PARAMETER, "parameter"),
        (Self::NDARRAY, "ndarray"),
        (Self::SCALAR, "scalar"),
    ];

    /// Returns the flags with these bits.
    ///
    /// Returns `None` if a bit is unknown, or if the bits exclude each other: a numpy object has no flag of torch,
    /// and a numpy scalar is no array.
    #[inline]
    pub const fn from_bits(bits: u8) -> Option<Self> {
        if matches!(bits, 0..=4 | 8) { Some(Self(bits)) } else { None }
    }

    /// Returns true if a tensor of this rank, and of a dtype of this class, can have these flags (F-056).
    #[inline]
    pub(crate) fn fit(self, rank: usize, class: impl FnOnce() -> DtypeClass) -> bool {
        // Most tensors have no flags.
        self.0 == 0
            || Self::from_bits(self.0).is_some()
                && (rank == 0 || !self.contains(Self::SCALAR))
                && (!self.contains(Self::REQUIRES_GRAD) || has_gradients(class()))
    }

    /// Returns the bits.
    pub const fn bits(self) -> u8 {
        self.0
    }

    /// Returns the union of both sets of flags.
    #[must_use]
    pub const fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Returns true if `self` has all flags of `other`.
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

/// Returns whether tensors of this class can require a gradient: floats, complex numbers and unknown values.
fn has_gradients(class: DtypeClass) -> bool {
    matches!(class, DtypeClass::Float | DtypeClass::Complex | DtypeClass::Other)
}

/// Shared, immutable bytes that hold the elements of tensors.
///
/// Two tensors whose bytes overlap in memory are tied: an archive stores the bytes once, and the
/// loaded tensors overlap again.
#[derive(Clone)]
pub struct Storage(Location);

#[derive(Clone)]
enum Location {
    Memory(Bytes),
    Blob(Arc<dyn Blob>, u64),
}

impl Storage {
    /// Creates a storage from bytes that `owner` holds, such as a memory map or a foreign buffer.
    pub fn from_owner(owner: impl AsRef<[u8]> + Send + 'static) -> Self {
        Self(Location::Memory(Bytes::from_owner(owner)))
    }

    /// Creates a storage from a blob outside this process's memory, such as memory of a GPU.
    ///
    /// The bytes are read when they are written to an archive. Two tensors are tied if they overlap
    /// in one blob. A blob in memory becomes a storage in memory.
    ///
    /// # Errors
    ///
    /// `Io` if the blob cannot report its length.
    pub fn from_blob(blob: Arc<dyn Blob>) -> Result<Self> {
        if let Some(bytes) = blob.bytes() {
            return Ok(bytes.clone().into());
        }
        let len = blob.size()?;
        Ok(Self(Location::Blob(blob, len)))
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> u64 {
        match &self.0 {
            Location::Memory(bytes) => u64::try_from(bytes.len()).unwrap_or(u64::MAX),
            Location::Blob(_, len) => *len,
        }
    }

    /// Returns true if the storage has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the bytes, if they are in this process's memory.
    pub fn bytes(&self) -> Option<&Bytes> {
        match &self.0 {
            Location::Memory(bytes) => Some(bytes),
            Location::Blob(..) => None,
        }
    }

    /// Returns the blob with the bytes, if they are not in this process's memory.
    pub fn blob(&self) -> Option<&Arc<dyn Blob>> {
        match &self.0 {
            Location::Memory(_) => None,
            Location::Blob(blob, _) => Some(blob),
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
        Self(Location::Memory(bytes))
    }
}

impl From<Vec<u8>> for Storage {
    fn from(bytes: Vec<u8>) -> Self {
        Bytes::from(bytes).into()
    }
}

/// Copies elements in native byte order, which is little-endian on all supported hosts.
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

/// A tensor. Its storage is in this process's memory or in a blob. Cloning copies no elements.
#[derive(Clone, Debug)]
pub struct Tensor {
    meta: TensorMeta,
    storage: Storage,
    byte_offset: u64,
}

impl Tensor {
    /// Creates a tensor whose element 0 is at `byte_offset` of `storage`, in bytes.
    ///
    /// # Errors
    ///
    /// `ShapeMismatch` if an element lies outside the storage.
    #[inline]
    pub fn new(meta: TensorMeta, storage: Storage, byte_offset: u64) -> Result<Self> {
        let end = byte_offset.checked_add(meta.span_bytes());
        let len = storage.len();
        let has_elements = meta.numel() > 0;
        if has_elements && end.is_none_or(|end| end > len) {
            return Err(Error::new(ErrorKind::ShapeMismatch).with_detail(format_args!(
                "{} of shape {:?} at byte {byte_offset} does not fit into {len} bytes",
                meta.dtype(),
                meta.shape
            )));
        }
        let byte_offset = if has_elements { byte_offset } else { 0 };
        Ok(Self { meta, storage, byte_offset })
    }

    /// Creates a contiguous tensor with a copy of these elements.
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
                .with_detail(format_args!("{} elements for shape {shape:?}", elements.len())));
        }
        Self::new(meta, elements.into(), 0)
    }

    /// Returns the metadata.
    pub fn meta(&self) -> &TensorMeta {
        &self.meta
    }

    /// Returns the storage.
    pub fn storage(&self) -> &Storage {
        &self.storage
    }

    /// Returns the offset of element 0 in the storage, in bytes.
    pub fn byte_offset(&self) -> u64 {
        self.byte_offset
    }

    /// Returns the tensor in this process's memory.
    ///
    /// Copies the span of the tensor if it is in a blob; otherwise clones the tensor.
    ///
    /// # Errors
    ///
    /// `Io` if the blob cannot be read.
    pub fn to_memory(&self) -> Result<Self> {
        let Some(blob) = self.storage.blob() else { return Ok(self.clone()) };
        let span = self.byte_offset..self.byte_offset + self.meta.span_bytes();
        let bytes = if self.meta.numel() == 0 { Bytes::new() } else { blob.read_stable(span)? };
        Self::new(self.meta.clone(), bytes.into(), 0)
    }

    /// Returns a view of the elements.
    ///
    /// # Panics
    ///
    /// Panics if the elements are not in this process's memory. Call [`Tensor::to_memory`] first.
    pub fn view(&self) -> TensorView<'_> {
        let bytes = self.storage.bytes().expect("its elements are in this process's memory");
        let start = usize::try_from(self.byte_offset).unwrap_or(bytes.len()).min(bytes.len());
        let span = usize::try_from(self.meta.span_bytes()).unwrap_or(0);
        TensorView { meta: &self.meta, bytes: bytes.get(start..start + span).unwrap_or_default() }
    }
}

/// Two tensors in memory are equal if their metadata and the bits of their elements are equal.
///
/// Tensors outside this process's memory are equal only if they have the same blob, offset and metadata.
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

/// A borrowed view of the elements of a tensor.
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'a> {
    meta: &'a TensorMeta,
    bytes: &'a [u8],
}

impl<'a> TensorView<'a> {
    /// Returns the metadata of the tensor.
    pub fn meta(&self) -> &'a TensorMeta {
        self.meta
    }

    /// Returns the bytes from the first element to the end of the last one, gaps included.
    pub fn span(&self) -> &'a [u8] {
        self.bytes
    }

    /// Returns the elements of a contiguous tensor.
    ///
    /// # Errors
    ///
    /// - `WrongType` if the dtype is not that of `T`.
    /// - `NotContiguous` if the elements have gaps or another order.
    /// - `Misaligned` if the memory is not aligned for `T`.
    pub fn as_slice<T: Element>(&self) -> Result<&'a [T]> {
        if self.meta.dtype() != T::DTYPE {
            return Err(Error::new(ErrorKind::WrongType).with_detail(format_args!(
                "expected {}, found {}",
                T::DTYPE,
                self.meta.dtype()
            )));
        }
        if self.meta.numel() == 0 {
            return Ok(&[]);
        }
        bytemuck::try_cast_slice(self.contiguous_bytes()?)
            .map_err(|error| Error::new(ErrorKind::Misaligned).with_detail(error))
    }

    /// Returns the bytes of the elements of a contiguous tensor.
    ///
    /// # Errors
    ///
    /// `NotContiguous` if the elements have gaps or another order.
    pub fn contiguous_bytes(&self) -> Result<&'a [u8]> {
        if self.meta.is_contiguous() {
            Ok(self.bytes)
        } else {
            Err(Error::new(ErrorKind::NotContiguous)
                .with_detail(format_args!("strides {:?}", self.meta.strides())))
        }
    }

    /// Copies the elements to new memory in row-major order.
    ///
    /// # Errors
    ///
    /// `LimitExceeded` if the elements need more than `limit_bytes`. A tensor with a stride of 0 can
    /// have any size, even in a short file.
    pub fn to_contiguous(&self, limit_bytes: u64) -> Result<Vec<u8>> {
        let nbytes = self.meta.nbytes();
        let len =
            usize::try_from(nbytes).ok().filter(|_| nbytes <= limit_bytes).ok_or_else(|| {
                Error::new(ErrorKind::LimitExceeded)
                    .with_detail(format_args!("{nbytes} bytes, limit {limit_bytes}"))
            })?;
        let mut elements = Vec::with_capacity(len);
        let strides = self.meta.strides();
        Runs::to_row_major(self.meta.itemsize(), &self.meta.shape, &strides).for_each(
            |source, _, run| {
                // The calls are in row-major order of the target, so appending is correct.
                elements.extend_from_slice(subslice(self.bytes, source, run));
            },
        );
        Ok(elements)
    }

    /// Returns true if both have the same dtype, shape and element bits.
    pub fn elements_equal(&self, other: &Self) -> bool {
        if self.meta.shape != other.meta.shape || self.meta.dtype != other.meta.dtype {
            return false;
        }
        let (own, others) = (self.meta.strides(), other.meta.strides());
        // Strides of 0 allow any number of elements, so equal strides compare the bytes of the span instead.
        if own == others && self.bytes == other.bytes {
            return true;
        }
        // A dimension with stride 0 on both sides repeats the same elements, so one index is enough.
        let mut shape = self.meta.shape.to_vec();
        for ((size, own), other) in shape.iter_mut().zip(&own).zip(&others) {
            if (*own, *other) == (0, 0) {
                *size = (*size).min(1);
            }
        }
        let mut are_equal = true;
        Runs::new(self.meta.itemsize(), &shape, &own, &others).for_each(|left, right, run| {
            are_equal =
                are_equal && subslice(self.bytes, left, run) == subslice(other.bytes, right, run);
        });
        are_equal
    }
}

fn subslice(bytes: &[u8], start: u64, len: u64) -> &[u8] {
    let index = |value| usize::try_from(value).expect("runs lie inside the span");
    &bytes[index(start)..][..index(len)]
}

/// A Rust type whose values are the elements of a dtype.
pub trait Element: bytemuck::Pod + private::Sealed {
    /// The dtype of the elements.
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
