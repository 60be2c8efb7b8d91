//! Result codes of the driver.

use std::ffi::{CStr, c_uint};

/// The driver's result type.
pub(crate) type CUresult = c_uint;

/// Error codes, with the numbers of the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Code {
    InvalidValue = 1,
    OutOfMemory = 2,
    NoDevice = 100,
    InvalidDevice = 101,
    InvalidContext = 201,
    InvalidHandle = 400,
    NotReady = 600,
    IllegalAddress = 700,
    AlreadyRegistered = 712,
    NotRegistered = 713,
    NotSupported = 801,
}

/// Returns the C name of an error code.
pub(crate) fn name(code: c_uint) -> Result<&'static CStr, Code> {
    let all = [
        (Code::InvalidValue, c"CUDA_ERROR_INVALID_VALUE"),
        (Code::OutOfMemory, c"CUDA_ERROR_OUT_OF_MEMORY"),
        (Code::NoDevice, c"CUDA_ERROR_NO_DEVICE"),
        (Code::InvalidDevice, c"CUDA_ERROR_INVALID_DEVICE"),
        (Code::InvalidContext, c"CUDA_ERROR_INVALID_CONTEXT"),
        (Code::InvalidHandle, c"CUDA_ERROR_INVALID_HANDLE"),
        (Code::NotReady, c"CUDA_ERROR_NOT_READY"),
        (Code::IllegalAddress, c"CUDA_ERROR_ILLEGAL_ADDRESS"),
        (Code::AlreadyRegistered, c"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"),
        (Code::NotRegistered, c"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"),
        (Code::NotSupported, c"CUDA_ERROR_NOT_SUPPORTED"),
    ];
    let found = all.into_iter().find(|(known, _)| *known as c_uint == code);
    found.map(|(_, name)| name).ok_or(Code::InvalidValue)
}

/// Executes a call of the driver API, and converts its result.
pub(crate) fn to_result(call: impl FnOnce() -> Result<(), Code>) -> CUresult {
    match call() {
        Ok(()) => 0,
        Err(code) => code as CUresult,
    }
}
