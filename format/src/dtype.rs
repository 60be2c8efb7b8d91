//! Element types: the 47 dtypes of torch, generated from one table.

use std::fmt;

/// One row of the dtype table. `spec/dtypes.json` has the same rows.
struct Row {
    name: &'static str,
    itemsize: u8,
    bits: u8,
    safetensors: Option<&'static str>,
}

macro_rules! dtypes {
    ($($code:literal $variant:ident $name:literal $itemsize:literal $bits:literal $safetensors:expr;)*) => {
        /// The type of the elements of a tensor. The code of a dtype is its `ScalarType` number in torch.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[non_exhaustive]
        #[repr(u16)]
        pub enum Dtype {
            $(#[doc = concat!("`torch.", $name, "`.")] $variant = $code,)*
        }

        impl Dtype {
            /// All dtypes, in the order of their codes.
            pub const ALL: &[Self] = &[$(Self::$variant,)*];

            /// Returns the dtype with this code, if there is one.
            #[inline]
            pub const fn from_code(code: u16) -> Option<Self> {
                match code { $($code => Some(Self::$variant),)* _ => None }
            }

            /// Returns the code in files, which is the `ScalarType` number of torch.
            pub const fn code(self) -> u16 {
                match self { $(Self::$variant => $code,)* }
            }

            #[inline]
            const fn row(self) -> &'static Row {
                // Codes have no gaps. A widening cast: `usize::from` is not const.
                &ROWS[self.code() as usize]
            }
        }

        static ROWS: [Row; Dtype::ALL.len()] = [$(Row {
            name: $name, itemsize: $itemsize, bits: $bits, safetensors: $safetensors,
        },)*];
    };
}

dtypes! {
    0 Uint8 "uint8" 1 8 Some("U8");
    1 Int8 "int8" 1 8 Some("I8");
    2 Int16 "int16" 2 16 Some("I16");
    3 Int32 "int32" 4 32 Some("I32");
    4 Int64 "int64" 8 64 Some("I64");
    5 Float16 "float16" 2 16 Some("F16");
    6 Float32 "float32" 4 32 Some("F32");
    7 Float64 "float64" 8 64 Some("F64");
    8 Complex32 "complex32" 4 32 None;
    9 Complex64 "complex64" 8 64 Some("C64");
    10 Complex128 "complex128" 16 128 None;
    11 Bool "bool" 1 8 Some("BOOL");
    12 Qint8 "qint8" 1 8 None;
    13 Quint8 "quint8" 1 8 None;
    14 Qint32 "qint32" 4 32 None;
    15 Bfloat16 "bfloat16" 2 16 Some("BF16");
    16 Quint4x2 "quint4x2" 1 8 None;
    17 Quint2x4 "quint2x4" 1 8 None;
    18 Bits1x8 "bits1x8" 1 8 None;
    19 Bits2x4 "bits2x4" 1 8 None;
    20 Bits4x2 "bits4x2" 1 8 None;
    21 Bits8 "bits8" 1 8 None;
    22 Bits16 "bits16" 2 16 None;
    23 Float8E5m2 "float8_e5m2" 1 8 Some("F8_E5M2");
    24 Float8E4m3fn "float8_e4m3fn" 1 8 Some("F8_E4M3");
    25 Float8E5m2fnuz "float8_e5m2fnuz" 1 8 Some("F8_E5M2FNUZ");
    26 Float8E4m3fnuz "float8_e4m3fnuz" 1 8 Some("F8_E4M3FNUZ");
    27 Uint16 "uint16" 2 16 Some("U16");
    28 Uint32 "uint32" 4 32 Some("U32");
    29 Uint64 "uint64" 8 64 Some("U64");
    30 Uint1 "uint1" 1 1 None;
    31 Uint2 "uint2" 1 2 None;
    32 Uint3 "uint3" 1 3 None;
    33 Uint4 "uint4" 1 4 None;
    34 Uint5 "uint5" 1 5 None;
    35 Uint6 "uint6" 1 6 None;
    36 Uint7 "uint7" 1 7 None;
    37 Int1 "int1" 1 1 None;
    38 Int2 "int2" 1 2 None;
    39 Int3 "int3" 1 3 None;
    40 Int4 "int4" 1 4 None;
    41 Int5 "int5" 1 5 None;
    42 Int6 "int6" 1 6 None;
    43 Int7 "int7" 1 7 None;
    44 Float8E8m0fnu "float8_e8m0fnu" 1 8 Some("F8_E8M0");
    45 Float4E2m1fnX2 "float4_e2m1fn_x2" 1 8 Some("F4");
    46 Bcomplex32 "bcomplex32" 4 32 None;
}

impl Dtype {
    /// Returns the name without the prefix `torch.`, such as `bfloat16`.
    pub const fn name(self) -> &'static str {
        self.row().name
    }

    /// Returns the size of one element in bytes as torch reports it: 1 for types of less than 8 bits.
    #[inline]
    pub const fn itemsize(self) -> u64 {
        // A widening cast: `u64::from` is not const.
        self.row().itemsize as u64
    }

    /// Returns the number of bits of an element that carry its value.
    ///
    /// This is 4 for `int4`, and 8 for `float4_e2m1fn_x2` (two values of 4 bits).
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
