//! Device memory that several processes map: one allocates it, others import it by a descriptor.
#![expect(unsafe_code, reason = "the driver is a library of C")]

use std::ffi::c_void;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::OnceLock;

use cudarc::driver::{result, sys};

use crate::driver::{self, Context, driver_error};
use tssd_store::{Error, ErrorKind, Result};

/// Functions that virtual memory management needs in addition.
const SYMBOLS: [&str; 10] = [
    "cuMemAddressFree",
    "cuMemAddressReserve",
    "cuMemCreate",
    "cuMemExportToShareableHandle",
    "cuMemGetAllocationGranularity",
    "cuMemImportFromShareableHandle",
    "cuMemMap",
    "cuMemRelease",
    "cuMemSetAccess",
    "cuMemUnmap",
];

const POSIX_DESCRIPTOR: sys::CUmemAllocationHandleType =
    sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// Checks that memory of a device can have a descriptor. The error is the reason why not.
///
/// The driver must be loaded.
pub(crate) fn check_support(device: sys::CUdevice) -> Result<(), String> {
    static SUPPORT: OnceLock<Result<(), String>> = OnceLock::new();
    SUPPORT.get_or_init(|| driver::check_symbols(&SYMBOLS)).clone()?;
    let attributes = [
        sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
        sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
    ];
    for attribute in attributes {
        // SAFETY: the driver returned `device`.
        match unsafe { result::device::get_attribute(device, attribute) } {
            Ok(supported) if supported != 0 => {}
            _ => return Err("the device has no memory that other processes can map".to_owned()),
        }
    }
    Ok(())
}

/// A handle of an allocation, until it is mapped.
struct Allocation(sys::CUmemGenericAllocationHandle);

impl Drop for Allocation {
    fn drop(&mut self) {
        // SAFETY: the driver returned the handle, and it is not used again. Maps of the allocation keep the memory.
        let _ = unsafe { sys::cuMemRelease(self.0) };
    }
}

/// Mapped memory of a device.
pub(crate) struct DeviceMap {
    context: Context,
    pub(crate) pointer: u64,
    len: usize,
}

impl DeviceMap {
    /// Allocates `len` bytes. Returns the mapped memory and its descriptor: either keeps the memory alive.
    pub(crate) fn create(
        context: Context,
        device: sys::CUdevice,
        len: u64,
    ) -> Result<(Self, OwnedFd)> {
        let guard = context.enter()?;
        let properties = properties(device);
        let len = valid_len(len, &properties)?;
        let mut allocation = 0;
        // SAFETY: the pointer is valid for a handle, and the properties are complete.
        let created =
            unsafe { sys::cuMemCreate(&raw mut allocation, len, &raw const properties, 0) };
        created.result().map_err(|error| allocation_error(len, error))?;
        let allocation = Allocation(allocation);
        let mut descriptor: RawFd = -1;
        // SAFETY: the exported handle is a descriptor, for which the pointer is valid.
        let exported = unsafe {
            let pointer = (&raw mut descriptor).cast::<c_void>();
            sys::cuMemExportToShareableHandle(pointer, allocation.0, POSIX_DESCRIPTOR, 0)
        };
        exported.result().map_err(|error| driver_error("memory with a descriptor", error))?;
        // SAFETY: the descriptor is new and has no other owner.
        let descriptor = unsafe { OwnedFd::from_raw_fd(descriptor) };
        let mapped = Self::map(context, device, &allocation, len)?;
        drop(guard);
        Ok((mapped, descriptor))
    }

    /// Maps the memory of a descriptor, which must have `len` bytes.
    pub(crate) fn import(
        context: Context,
        device: sys::CUdevice,
        descriptor: &OwnedFd,
        len: u64,
    ) -> Result<Self> {
        let guard = context.enter()?;
        let len = valid_len(len, &properties(device))?;
        let number = usize::try_from(descriptor.as_raw_fd()).expect("descriptors are not negative");
        let mut allocation = 0;
        // SAFETY: the pointer is valid for a handle. The driver takes the descriptor number as a pointer value. It
        // rejects descriptors that are not its own.
        let imported = unsafe {
            let number = std::ptr::without_provenance_mut::<c_void>(number);
            sys::cuMemImportFromShareableHandle(&raw mut allocation, number, POSIX_DESCRIPTOR)
        };
        imported.result().map_err(|error| driver_error("memory of another process", error))?;
        let mapped = Self::map(context, device, &Allocation(allocation), len)?;
        drop(guard);
        Ok(mapped)
    }

    /// Maps an allocation, which must have `len` bytes. The context must be current on this thread.
    fn map(
        context: Context,
        device: sys::CUdevice,
        allocation: &Allocation,
        len: usize,
    ) -> Result<Self> {
        let failed = |error| driver_error(format_args!("a map of {len} bytes"), error);
        let mut pointer = 0;
        // SAFETY: the pointer is valid for an address; no address is requested.
        let reserved = unsafe { sys::cuMemAddressReserve(&raw mut pointer, len, 0, 0, 0) };
        reserved.result().map_err(failed)?;
        // SAFETY: the addresses were just reserved. The driver rejects an allocation with fewer bytes.
        let mapped = unsafe { sys::cuMemMap(pointer, len, 0, allocation.0, 0) };
        if let Err(error) = mapped.result() {
            // SAFETY: nothing is mapped at these addresses.
            let _ = unsafe { sys::cuMemAddressFree(pointer, len) };
            return Err(failed(error));
        }
        // From here on, its drop unmaps it.
        let map = Self { context, pointer, len };
        let access = sys::CUmemAccessDesc {
            location: location(device),
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: the addresses are mapped, and the description is complete.
        let allowed = unsafe { sys::cuMemSetAccess(pointer, len, &raw const access, 1) };
        allowed.result().map_err(failed)?;
        Ok(map)
    }
}

impl Drop for DeviceMap {
    fn drop(&mut self) {
        let Ok(_entered) = self.context.enter() else { return };
        // SAFETY: it was mapped here, and every user has waited for its own copies.
        let _ = unsafe { sys::cuMemUnmap(self.pointer, self.len) };
        // SAFETY: the addresses were reserved here, and nothing is mapped there any more.
        let _ = unsafe { sys::cuMemAddressFree(self.pointer, self.len) };
    }
}

fn location(device: sys::CUdevice) -> sys::CUmemLocation {
    let type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
    sys::CUmemLocation { type_, id: device }
}

fn properties(device: sys::CUdevice) -> sys::CUmemAllocationProp {
    sys::CUmemAllocationProp {
        type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: POSIX_DESCRIPTOR,
        location: location(device),
        win32HandleMetaData: std::ptr::null_mut(),
        allocFlags: sys::CUmemAllocationProp_st__bindgen_ty_1 {
            compressionType: 0,
            gpuDirectRDMACapable: 0,
            usage: 0,
            reserved: [0; 4],
        },
    }
}

/// Converts a length that memory of a device can have: a multiple of the granularity, and not 0.
fn valid_len(len: u64, properties: &sys::CUmemAllocationProp) -> Result<usize> {
    let mut granularity = 0;
    let minimum = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
    // SAFETY: the pointer is valid for a length, and the properties are complete.
    let status = unsafe {
        sys::cuMemGetAllocationGranularity(&raw mut granularity, &raw const *properties, minimum)
    };
    status.result().map_err(|error| driver_error("its granularity", error))?;
    let native_len = usize::try_from(len).ok();
    native_len
        .filter(|len| *len > 0 && granularity > 0 && len.is_multiple_of(granularity))
        .ok_or_else(|| {
            let text = format_args!(
                "{len} bytes are no memory of a GPU, which has multiples of {granularity}"
            );
            Error::new(ErrorKind::Unsupported, text)
        })
}

/// The error of an allocation: the device is out of memory, or another error of the driver.
fn allocation_error(len: usize, error: result::DriverError) -> Error {
    if error.0 == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY {
        let text = format_args!(
            "the GPU has no {len} bytes left for another version: those that are kept, read or pinned stay there. \
             Wait until they are let go, keep fewer, or put with residency=host"
        );
        return Error::new(ErrorKind::Busy, text);
    }
    driver_error(format_args!("{len} bytes with a descriptor"), error)
}
