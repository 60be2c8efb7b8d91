//! Memory of a device that has a descriptor: what one process makes, others map.
#![expect(unsafe_code, reason = "the driver is a library of C")]

use std::ffi::c_void;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::OnceLock;

use cudarc::driver::{result, sys};

use crate::driver::{self, Context, failed};
use tssd_store::{Error, ErrorKind, Result};

/// What is called here, beside what is always.
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

const DESCRIPTOR: sys::CUmemAllocationHandleType =
    sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// Whether memory of a device can have a descriptor; or why not. The driver must be loaded.
pub(crate) fn is_there(device: sys::CUdevice) -> Result<(), String> {
    static THERE: OnceLock<Result<(), String>> = OnceLock::new();
    THERE.get_or_init(|| driver::has(&SYMBOLS)).clone()?;
    let attributes = [
        sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
        sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
    ];
    for attribute in attributes {
        // SAFETY: the device was given by the driver.
        match unsafe { result::device::get_attribute(device, attribute) } {
            Ok(supported) if supported != 0 => {}
            _ => return Err("the device has no memory that other processes can map".to_owned()),
        }
    }
    Ok(())
}

/// An allocation, until it is mapped.
struct Allocation(sys::CUmemGenericAllocationHandle);

impl Drop for Allocation {
    fn drop(&mut self) {
        // SAFETY: it was given by the driver, and is not used again. Maps of it hold the memory.
        let _ = unsafe { sys::cuMemRelease(self.0) };
    }
}

/// Memory of a device, mapped.
pub(crate) struct Mapped {
    context: Context,
    pub(crate) pointer: u64,
    len: usize,
}

impl Mapped {
    /// New memory of so many bytes, and its descriptor: it is there as long as either is.
    pub(crate) fn create(
        context: Context,
        device: sys::CUdevice,
        len: u64,
    ) -> Result<(Self, OwnedFd)> {
        let entered = context.enter()?;
        let properties = properties(device);
        let len = native(len, &properties)?;
        let mut allocation = 0;
        // SAFETY: there is room for a handle, and the properties are whole.
        let created =
            unsafe { sys::cuMemCreate(&raw mut allocation, len, &raw const properties, 0) };
        created.result().map_err(|error| no_memory(len, error))?;
        let allocation = Allocation(allocation);
        let mut descriptor: RawFd = -1;
        // SAFETY: what it is exported as is a descriptor, for which there is room.
        let exported = unsafe {
            let place = (&raw mut descriptor).cast::<c_void>();
            sys::cuMemExportToShareableHandle(place, allocation.0, DESCRIPTOR, 0)
        };
        exported.result().map_err(|error| failed("memory with a descriptor", error))?;
        // SAFETY: it is new, and nobody else's.
        let descriptor = unsafe { OwnedFd::from_raw_fd(descriptor) };
        let mapped = Self::map(context, device, &allocation, len)?;
        drop(entered);
        Ok((mapped, descriptor))
    }

    /// The memory of a descriptor, which must have so many bytes.
    pub(crate) fn import(
        context: Context,
        device: sys::CUdevice,
        descriptor: &OwnedFd,
        len: u64,
    ) -> Result<Self> {
        let entered = context.enter()?;
        let len = native(len, &properties(device))?;
        let number = usize::try_from(descriptor.as_raw_fd()).expect("descriptors are not negative");
        let mut allocation = 0;
        // SAFETY: there is room for a handle. The driver takes the number for a pointer, keeps what it needs, and refuses
        // what is no memory of its own.
        let imported = unsafe {
            let number = std::ptr::without_provenance_mut::<c_void>(number);
            sys::cuMemImportFromShareableHandle(&raw mut allocation, number, DESCRIPTOR)
        };
        imported.result().map_err(|error| failed("memory of another process", error))?;
        let mapped = Self::map(context, device, &Allocation(allocation), len)?;
        drop(entered);
        Ok(mapped)
    }

    /// Maps an allocation, which must have so many bytes. The context is this thread's.
    fn map(
        context: Context,
        device: sys::CUdevice,
        allocation: &Allocation,
        len: usize,
    ) -> Result<Self> {
        let failed = |error| failed(format_args!("a map of {len} bytes"), error);
        let mut pointer = 0;
        // SAFETY: there is room for an address; none is asked for.
        let reserved = unsafe { sys::cuMemAddressReserve(&raw mut pointer, len, 0, 0, 0) };
        reserved.result().map_err(failed)?;
        // SAFETY: the addresses were just reserved; what has not so many bytes is refused.
        let mapped = unsafe { sys::cuMemMap(pointer, len, 0, allocation.0, 0) };
        if let Err(error) = mapped.result() {
            // SAFETY: nothing is mapped there.
            let _ = unsafe { sys::cuMemAddressFree(pointer, len) };
            return Err(failed(error));
        }
        // Unmapped by its drop from here on.
        let own = Self { context, pointer, len };
        let access = sys::CUmemAccessDesc {
            location: location(device),
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: the addresses are mapped, and the description is whole.
        let allowed = unsafe { sys::cuMemSetAccess(pointer, len, &raw const access, 1) };
        allowed.result().map_err(failed)?;
        Ok(own)
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        let Ok(_entered) = self.context.enter() else { return };
        // SAFETY: it was mapped here, and whoever begins something with it has waited for that.
        let _ = unsafe { sys::cuMemUnmap(self.pointer, self.len) };
        // SAFETY: it was reserved here, and nothing is mapped there any more.
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
        requestedHandleTypes: DESCRIPTOR,
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

/// A length that memory of a device can have.
fn native(len: u64, properties: &sys::CUmemAllocationProp) -> Result<usize> {
    let mut granule = 0;
    let minimum = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
    // SAFETY: there is room for a number, and the properties are whole.
    let asked = unsafe {
        sys::cuMemGetAllocationGranularity(&raw mut granule, &raw const *properties, minimum)
    };
    asked.result().map_err(|error| failed("its granularity", error))?;
    let native = usize::try_from(len).ok();
    native.filter(|len| *len > 0 && granule > 0 && len.is_multiple_of(granule)).ok_or_else(|| {
        let text =
            format_args!("{len} bytes are no memory of a GPU, which has multiples of {granule}");
        Error::new(ErrorKind::Unsupported, text)
    })
}

/// There is no memory, or something else is wrong.
fn no_memory(len: usize, error: result::DriverError) -> Error {
    if error.0 == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY {
        let text = format_args!(
            "the GPU has no {len} bytes left for another version: those that are kept, read or pinned stay there. \
             Wait until they are let go, keep fewer, or put with residency=host"
        );
        return Error::new(ErrorKind::Busy, text);
    }
    failed(format_args!("{len} bytes with a descriptor"), error)
}
