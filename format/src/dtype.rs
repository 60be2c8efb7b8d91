//! Element types: the dtypes of torch, generated from one table. Spec: section 6.

use std::fmt;

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
        }
    }
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
        }

        impl Dtype {
            /// All dtypes, in the order of their numbers.
            pub const ALL: &[Self] = &[$(Self::$variant,)*];

            /// Returns the dtype with this number, if there is one.
            #[inline]
            pub const fn from_number(number: u16) -> Option<Self> {
                // The cast widens: `usize::from` is not const.
                let number = number as usize;
                if number < NUMBERS { BY_NUMBER[number] } else { None }
            }

            #[inline]
            const fn row(self) -> &'static Row {
                match self { $(Self::$variant => &Row {
                    name: $name,
                    class: DtypeClass::$class,
                    values: $values,
                    bits: $bits,
                    safetensors: $safetensors,
                },)* }
            }
        }

        /// The dtype of each number. Opening a file looks at it for each tensor.
        static BY_NUMBER: [Option<Dtype>; NUMBERS] = {
            let mut dtypes = [None; NUMBERS];
            $(dtypes[$number] = Some(Dtype::$variant);)*
            dtypes
        };

        /// The size of the elements of each number, for the same reason.
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

impl Dtype {
    /// Returns the dtype whose number is in a word of a leaf, if there is one.
    pub(crate) fn from_word(word: u64) -> Option<Self> {
        u16::try_from(word).ok().and_then(Self::from_number)
    }

    /// Returns the number in files.
    #[inline]
    pub const fn number(self) -> u16 {
        self as u16
    }

    /// Returns the name without the prefix `torch.`, such as `bfloat16`.
    pub const fn name(self) -> &'static str {
        self.row().name
    }

    /// Returns the kind of values that elements hold.
    pub const fn class(self) -> DtypeClass {
        self.row().class
    }

    /// Returns the size of one element in bytes as torch reports it: 1 for types of less than 8 bits.
    #[inline]
    pub const fn itemsize(self) -> u64 {
        // A widening cast: `u64::from` is not const.
        ITEMSIZES[self.number() as usize] as u64
    }

    /// Returns the number of values in one element: 2 for `float4_e2m1fn_x2`, 1 for most dtypes.
    pub const fn values(self) -> u8 {
        self.row().values
    }

    /// Returns the number of bits of one value: 4 for `int4` and for `float4_e2m1fn_x2`.
    pub const fn bits(self) -> u8 {
        self.row().bits
    }

    /// Returns the name of the type in safetensors, if safetensors has the type.
    pub const fn safetensors(self) -> Option<&'static str> {
        self.row().safetensors
    }

    /// Returns the dtype with this name, such as `bfloat16` or `torch.bfloat16`.
    pub fn from_name(name: &str) -> Option<Self> {
        let name = name.strip_prefix("torch.").unwrap_or(name);
        Self::ALL.iter().copied().find(|dtype| dtype.name() == name)
    }

    /// Returns the dtype with this name in safetensors, such as `BF16`.
    pub fn from_safetensors(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|dtype| dtype.safetensors() == Some(name))
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
