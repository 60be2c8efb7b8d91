//! DLPack: the protocol by which frameworks share tensor memory.
//!
//! The consumer of a tensor calls its deleter when it is done with the memory.

mod export;
mod import;

use std::ffi::c_void;

use tssd_format::Dtype;

pub(crate) use crate::dlpack::export::export_capsule;
pub(crate) use crate::dlpack::import::{ImportedTensor, import_tensor};

/// Dtypes of DLPack, each with its `DLDataTypeCode` and the bits of an element.
const DLPACK_DTYPES: [(Dtype, u8, u8); 21] = [
    (Dtype::Int8, 0, 8),
    (Dtype::Int16, 0, 16),
    (Dtype::Int32, 0, 32),
    (Dtype::Int64, 0, 64),
    (Dtype::Uint8, 1, 8),
    (Dtype::Float16, 2, 16),
    (Dtype::Float32, 2, 32),
    (Dtype::Float64, 2, 64),
    (Dtype::Bfloat16, 4, 16),
    (Dtype::Complex64, 5, 64),
    (Dtype::Complex128, 5, 128),
    (Dtype::Bool, 6, 8),
    (Dtype::Uint16, 1, 16),
    (Dtype::Uint32, 1, 32),
    (Dtype::Uint64, 1, 64),
    (Dtype::Complex32, 5, 32),
    (Dtype::Float8E4m3fn, 10, 8),
    (Dtype::Float8E4m3fnuz, 11, 8),
    (Dtype::Float8E5m2, 12, 8),
    (Dtype::Float8E5m2fnuz, 13, 8),
    (Dtype::Float8E8m0fnu, 14, 8),
];

/// Number of leading entries of [`DLPACK_DTYPES`] that every torch with DLPack supports.
const LEGACY_DTYPE_COUNT: usize = 12;

/// `kDLCPU`, `kDLCUDA` and `kDLCUDAManaged`.
const CPU: i32 = 1;
const CUDA: i32 = 2;
const CUDA_MANAGED: i32 = 13;

/// `DLDevice` of dlpack.h.
#[repr(C)]
struct Device {
    kind: i32,
    id: i32,
}

/// `DLDataType` of dlpack.h.
#[repr(C)]
struct DataType {
    code: u8,
    bits: u8,
    lanes: u16,
}

/// `DLTensor` of dlpack.h.
#[repr(C)]
struct Tensor {
    data: *mut c_void,
    device: Device,
    ndim: i32,
    dtype: DataType,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}
