//! Element types: the dtypes of torch, generated from one table, and dtypes that a file describes. Spec: section 6.

use std::fmt;

use crate::error::{Error, ErrorKind, Result};
use crate::record;

/// One row of the dtype table. `spec/dtypes.json` has the same rows.
struct Row {
    name: &'static str,
    class: DtypeClass,
    values: u8,
    bits: u8,
    safetensors: Option<&'static str>,
}

/// The kind of values that the elements of a dtype hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum DtypeClass {
    /// False and true.
    Bool,
    /// Signed integers in two's complement.
    Int,
    /// Unsigned integers.
    Uint,
    /// Floating-point numbers.
    Float,
    /// Complex numbers: a real and an imaginary float.
    Complex,
    /// Bits without a numeric meaning.
    Bits,
    /// Anything else, such as a block of quantized values with its scale.
    Other,
}

impl DtypeClass {
    /// Returns the name in `spec/dtypes.json`, such as `float`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bool => "bool",
            Self::Int => "int",
            Self::Uint => "uint",
            Self::Float => "float",
            Self::Complex => "complex",
            Self::Bits => "bits",
            Self::Other => "other",
        }
    }

    /// Returns the number in a Dtype record.
    pub(crate) const fn number(self) -> u8 {
        match self {
            Self::Other => 0,
            Self::Bool => 1,
            Self::Int => 2,
            Self::Uint => 3,
            Self::Float => 4,
            Self::Complex => 5,
            Self::Bits => 6,
        }
    }

    /// Returns the class with this number in a Dtype record, if there is one.
    pub(crate) const fn from_number(number: u8) -> Option<Self> {
        Some(match number {
            0 => Self::Other,
            1 => Self::Bool,
            2 => Self::Int,
            3 => Self::Uint,
            4 => Self::Float,
            5 => Self::Complex,
            6 => Self::Bits,
            _ => return None,
        })
    }
}

/// A dtype that this version of the format does not list. A file that uses it describes it in a Dtype record.
///
/// Tensors of such a dtype can be listed, verified, copied and resharded. Their elements cannot be converted.
///
/// # Examples
///
/// ```
/// use tssd_format::{Dtype, DtypeClass, OtherDtype, Tensor, TensorMeta};
///
/// // 32 values of 4 bits and a 16-bit scale in each element of 18 bytes.
/// let q4 = OtherDtype::new(0x8000, "example.q4_0")?
///     .with_layout(18, 32, 4)?
///     .with_class(DtypeClass::Other);
/// let meta = TensorMeta::new(Dtype::Other(q4), &[4096, 128])?;
/// assert_eq!(meta.nbytes(), 18 * 4096 * 128);
/// # Ok::<(), tssd_format::Error>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OtherDtype {
    number: u16,
    itemsize: u16,
    bits: u16,
    values: u8,
    class: DtypeClass,
    /// The name, then zeros.
    name: [u8; MAX_DTYPE_NAME_BYTES],
}

/// The maximum length of the name of a dtype in bytes.
const MAX_DTYPE_NAME_BYTES: usize = 32;

const INVALID_NAME: &str = "its name is not 1 to 32 bytes of a-z 0-9 _ .";

/// The maximum size of an element in bytes.
const MAX_ITEMSIZE: u16 = 256;

impl OtherDtype {
    /// Creates a dtype whose elements are one byte with one value of 8 bits, of class [`DtypeClass::Other`].
    ///
    /// Numbers from 0x8000 on are for vendors, with names such as `example.q4_0`.
    ///
    /// # Errors
    ///
    /// `DtypeTable` (F-057) if the number is 0 or the number or name of a listed dtype, or if the name does not have 1
    /// to 32 bytes of `a-z 0-9 _ .`.
    pub fn new(number: u16, name: &str) -> Result<Self> {
        let is_name_byte =
            |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"_.".contains(&byte);
        let mut bytes = [0; MAX_DTYPE_NAME_BYTES];
        match bytes.get_mut(..name.len()) {
            Some(target) if !name.is_empty() && name.bytes().all(is_name_byte) => {
                target.copy_from_slice(name.as_bytes());
            }
            _ => return Err(dtype_error(number, INVALID_NAME)),
        }
        if number == 0 || listed_itemsize(number) != 0 {
            return Err(dtype_error(number, "the number is not free"));
        }
        if Dtype::ALL.iter().any(|listed| listed.name() == name) {
            return Err(dtype_error(number, "the name is that of another dtype"));
        }
        let class = DtypeClass::Other;
        Ok(Self { number, itemsize: 1, bits: 8, values: 1, class, name: bytes })
    }

    /// Sets the size of an element in bytes, its number of values, and the bits of one value.
    ///
    /// # Errors
    ///
    /// `DtypeTable` (F-057) unless the size is 1 to 256, the others are at least 1, and the values fit in the element.
    pub fn with_layout(self, itemsize: u16, values: u8, bits: u16) -> Result<Self> {
        let value_bits = u32::from(values) * u32::from(bits);
        if !(1..=MAX_ITEMSIZE).contains(&itemsize)
            || value_bits == 0
            || value_bits > 8 * u32::from(itemsize)
        {
            return Err(dtype_error(self.number, "its values do not fit in its elements"));
        }
        Ok(Self { itemsize, bits, values, ..self })
    }

    /// Sets the kind of values that elements hold.
    #[must_use]
    pub const fn with_class(self, class: DtypeClass) -> Self {
        Self { class, ..self }
    }

    /// Returns the number in files.
    pub const fn number(&self) -> u16 {
        self.number
    }

    /// Returns the size of one element in bytes.
    pub(crate) fn itemsize(&self) -> u64 {
        self.itemsize.into()
    }

    /// Returns the Dtype record, given the heap range of the name.
    pub(crate) fn to_record(self, name: u64) -> record::Dtype {
        record::Dtype {
            name: name.into(),
            number: self.number.into(),
            size: self.itemsize.into(),
            bits: self.bits.into(),
            values: self.values,
            class: self.class.number(),
        }
    }

    /// Decodes and validates a Dtype record by itself, given its name.
    pub(crate) fn from_record(record: &record::Dtype, name: &[u8]) -> Result<Self> {
        let number = record.number.to_native();
        let name = std::str::from_utf8(name).map_err(|_| dtype_error(number, INVALID_NAME))?;
        let class = DtypeClass::from_number(record.class);
        let class = class.ok_or_else(|| dtype_error(number, "its class is unknown"))?;
        let (itemsize, bits) = (record.size.to_native(), record.bits.to_native());
        let dtype = Self::new(number, name)?.with_layout(itemsize, record.values, bits)?;
        Ok(dtype.with_class(class))
    }

    /// Returns the name.
    pub fn name(&self) -> &str {
        let len = self.name.iter().position(|byte| *byte == 0).unwrap_or(self.name.len());
        std::str::from_utf8(&self.name[..len]).unwrap_or_default()
    }
}

impl fmt::Debug for OtherDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { number, itemsize, bits, values, class, .. } = self;
        write!(f, "{} ({number:#06x}, {itemsize} bytes, ", self.name())?;
        write!(f, "{values} x {bits} bits, {})", class.name())
    }
}

#[cold]
fn dtype_error(number: u16, note: &str) -> Error {
    Error::new(ErrorKind::DtypeTable).with_detail(format_args!("dtype {number:#06x}: {note}"))
}

macro_rules! dtypes {
    ($($number:literal $variant:ident $name:literal $class:ident $itemsize:literal $values:literal $bits:literal
        $safetensors:expr;)*) => {
        /// The type of the elements of a tensor.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[non_exhaustive]
        #[repr(u16)]
        pub enum Dtype {
            $(#[doc = concat!("`torch.", $name, "`.")] $variant = $number,)*
            /// A dtype that is described in the file.
            Other(OtherDtype) = 0,
        }

        impl Dtype {
            /// All dtypes of torch, in the order of their numbers.
            pub const ALL: &[Self] = &[$(Self::$variant,)*];

            /// Returns the dtype of torch with this number, if there is one.
            #[inline]
            pub const fn from_number(number: u16) -> Option<Self> {
                match number {
                    $($number => Some(Self::$variant),)*
                    _ => None,
                }
            }

            /// Returns the number in files.
            #[inline]
            pub const fn number(&self) -> u16 {
                match self {
                    $(Self::$variant => $number,)*
                    Self::Other(other) => other.number,
                }
            }

            /// Returns the row of a listed dtype.
            const fn row(self) -> Option<&'static Row> {
                Some(match self {
                    $(Self::$variant => &Row {
                        name: $name,
                        class: DtypeClass::$class,
                        values: $values,
                        bits: $bits,
                        safetensors: $safetensors,
                    },)*
                    Self::Other(_) => return None,
                })
            }
        }

        /// The size of the elements of each listed dtype, by number; 0 for other numbers.
        ///
        /// A table, because opening a file looks at it for each tensor.
        static ITEMSIZES: [u8; NUMBERS] = {
            let mut itemsizes = [0; NUMBERS];
            $(itemsizes[$number] = $itemsize;)*
            itemsizes
        };
    };
}

/// The numbers of dtypes lie below this one.
const NUMBERS: usize = 0x85;

dtypes! {
    0x01 Bool "bool" Bool 1 1 8 Some("BOOL");
    0x10 Int8 "int8" Int 1 1 8 Some("I8");
    0x11 Int16 "int16" Int 2 1 16 Some("I16");
    0x12 Int32 "int32" Int 4 1 32 Some("I32");
    0x13 Int64 "int64" Int 8 1 64 Some("I64");
    0x21 Int1 "int1" Int 1 1 1 None;
    0x22 Int2 "int2" Int 1 1 2 None;
    0x23 Int3 "int3" Int 1 1 3 None;
    0x24 Int4 "int4" Int 1 1 4 None;
    0x25 Int5 "int5" Int 1 1 5 None;
    0x26 Int6 "int6" Int 1 1 6 None;
    0x27 Int7 "int7" Int 1 1 7 None;
    0x30 Uint8 "uint8" Uint 1 1 8 Some("U8");
    0x31 Uint16 "uint16" Uint 2 1 16 Some("U16");
    0x32 Uint32 "uint32" Uint 4 1 32 Some("U32");
    0x33 Uint64 "uint64" Uint 8 1 64 Some("U64");
    0x41 Uint1 "uint1" Uint 1 1 1 None;
    0x42 Uint2 "uint2" Uint 1 1 2 None;
    0x43 Uint3 "uint3" Uint 1 1 3 None;
    0x44 Uint4 "uint4" Uint 1 1 4 None;
    0x45 Uint5 "uint5" Uint 1 1 5 None;
    0x46 Uint6 "uint6" Uint 1 1 6 None;
    0x47 Uint7 "uint7" Uint 1 1 7 None;
    0x50 Float16 "float16" Float 2 1 16 Some("F16");
    0x51 Float32 "float32" Float 4 1 32 Some("F32");
    0x52 Float64 "float64" Float 8 1 64 Some("F64");
    0x53 Bfloat16 "bfloat16" Float 2 1 16 Some("BF16");
    0x58 Float8E5m2 "float8_e5m2" Float 1 1 8 Some("F8_E5M2");
    0x59 Float8E4m3fn "float8_e4m3fn" Float 1 1 8 Some("F8_E4M3");
    0x5A Float8E5m2fnuz "float8_e5m2fnuz" Float 1 1 8 Some("F8_E5M2FNUZ");
    0x5B Float8E4m3fnuz "float8_e4m3fnuz" Float 1 1 8 Some("F8_E4M3FNUZ");
    0x5C Float8E8m0fnu "float8_e8m0fnu" Float 1 1 8 Some("F8_E8M0");
    0x60 Float4E2m1fnX2 "float4_e2m1fn_x2" Float 1 2 4 Some("F4");
    0x70 Complex32 "complex32" Complex 4 1 32 None;
    0x71 Complex64 "complex64" Complex 8 1 64 Some("C64");
    0x72 Complex128 "complex128" Complex 16 1 128 None;
    0x73 Bcomplex32 "bcomplex32" Complex 4 1 32 None;
    0x80 Bits8 "bits8" Bits 1 1 8 None;
    0x81 Bits16 "bits16" Bits 2 1 16 None;
    0x82 Bits1x8 "bits1x8" Bits 1 8 1 None;
    0x83 Bits2x4 "bits2x4" Bits 1 4 2 None;
    0x84 Bits4x2 "bits4x2" Bits 1 2 4 None;
}

/// Returns the size of the elements of a listed dtype in bytes, and 0 if the number is not listed.
#[expect(clippy::inline_always, reason = "for each tensor; a hint alone is taken by chance")]
#[inline(always)]
pub(crate) fn listed_itemsize(number: u16) -> u8 {
    let number = usize::from(number);
    if number < NUMBERS { ITEMSIZES[number] } else { 0 }
}

impl Dtype {
    /// Returns the name without the prefix `torch.`, such as `bfloat16`.
    pub fn name(&self) -> &str {
        match self {
            Self::Other(other) => other.name(),
            listed => listed.row().map_or("", |row| row.name),
        }
    }

    /// Returns the kind of values that elements hold.
    pub fn class(self) -> DtypeClass {
        match self {
            Self::Other(other) => other.class,
            listed => listed.row().map_or(DtypeClass::Other, |row| row.class),
        }
    }

    /// Returns the size of one element in bytes as torch reports it: 1 for types of less than 8 bits.
    #[inline]
    pub fn itemsize(self) -> u64 {
        match self {
            Self::Other(other) => other.itemsize(),
            listed => listed_itemsize(listed.number()).into(),
        }
    }

    /// Returns the number of values in one element: 2 for `float4_e2m1fn_x2`, 1 for most dtypes.
    pub fn values(self) -> u8 {
        match self {
            Self::Other(other) => other.values,
            listed => listed.row().map_or(1, |row| row.values),
        }
    }

    /// Returns the number of bits of one value: 4 for `int4` and for `float4_e2m1fn_x2`.
    pub fn bits(self) -> u16 {
        match self {
            Self::Other(other) => other.bits,
            listed => listed.row().map_or(8, |row| row.bits.into()),
        }
    }

    /// Returns the name of the type in safetensors, if safetensors has the type.
    pub fn safetensors(self) -> Option<&'static str> {
        self.row().and_then(|row| row.safetensors)
    }

    /// Returns the dtype of torch with this name, such as `bfloat16` or `torch.bfloat16`.
    pub fn from_name(name: &str) -> Option<Self> {
        let name = name.strip_prefix("torch.").unwrap_or(name);
        Self::ALL.iter().copied().find(|dtype| dtype.name() == name)
    }

    /// Returns the dtype with this name in safetensors, such as `BF16`.
    pub fn from_safetensors(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|dtype| dtype.safetensors() == Some(name))
    }
}

/// A dtype in 16 bytes, for the metadata of tensors. Few tensors have a dtype that is not listed.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) enum CompactDtype {
    /// The number of a listed dtype.
    Listed(u16),
    Other(Box<OtherDtype>),
}

impl CompactDtype {
    /// Returns the number in files.
    #[inline]
    pub(crate) fn number(&self) -> u16 {
        match self {
            Self::Listed(number) => *number,
            Self::Other(other) => other.number(),
        }
    }

    /// Returns the size of one element in bytes.
    #[inline]
    pub(crate) fn itemsize(&self) -> u64 {
        match self {
            Self::Listed(number) => u64::from(listed_itemsize(*number)),
            Self::Other(other) => other.itemsize(),
        }
    }

    pub(crate) fn to_dtype(&self) -> Dtype {
        match self {
            Self::Listed(number) => {
                Dtype::from_number(*number).expect("the number of a listed dtype")
            }
            Self::Other(other) => Dtype::Other(**other),
        }
    }
}

impl From<Dtype> for CompactDtype {
    #[inline]
    fn from(dtype: Dtype) -> Self {
        match dtype {
            Dtype::Other(other) => Self::Other(other.into()),
            listed => Self::Listed(listed.number()),
        }
    }
}

impl fmt::Debug for CompactDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.to_dtype().fmt(f)
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
