//! The caller's side: memory of a device, filled on a stream of the caller's.

use std::sync::Arc;

use cudarc::driver::{result, sys};
use tssd_store::{Device, DeviceMemory, Stream};

/// The devices; none, and said so, where there are none.
pub(crate) fn devices() -> Vec<Device> {
    match Device::all() {
        Ok(devices) => devices,
        Err(error) => {
            println!("left out: {error}");
            Vec::new()
        }
    }
}

/// A device's primary context, current on this thread as long as this is there, and a stream of it.
pub(crate) struct Caller {
    stream: sys::CUstream,
}

impl Caller {
    pub(crate) fn new(ordinal: usize) -> Self {
        let device = result::device::get(i32::try_from(ordinal).unwrap()).unwrap();
        // SAFETY: the device was given by the driver.
        let context = unsafe { result::primary_ctx::retain(device) }.unwrap();
        // SAFETY: the context was retained.
        unsafe { result::ctx::set_current(context) }.unwrap();
        let stream = result::stream::create(result::stream::StreamKind::NonBlocking).unwrap();
        Self { stream }
    }

    pub(crate) fn stream(&self) -> Stream {
        Stream(self.stream.addr())
    }

    /// New memory, zero.
    pub(crate) fn allocate(&self, len: usize) -> Arc<Allocation> {
        // SAFETY: it is freed once, when nobody has it any more.
        let pointer = unsafe { result::malloc_sync(len.max(1)) }.unwrap();
        let allocation = Arc::new(Allocation { pointer, len });
        self.fill(&allocation, vec![0; len]);
        self.wait();
        allocation
    }

    /// Gives the stream bytes to write, which it does later.
    pub(crate) fn fill(&self, allocation: &Allocation, bytes: Vec<u8>) {
        assert_eq!(bytes.len(), allocation.len);
        // The stream may read it at any time.
        let bytes: &'static [u8] = bytes.leak();
        // SAFETY: there is memory for so many bytes, and the source stays.
        unsafe { result::memcpy_htod_async(allocation.pointer, bytes, self.stream) }.unwrap();
    }

    /// Gives the stream work that takes a while and changes nothing.
    pub(crate) fn stall(&self, allocation: &Allocation) {
        let half = allocation.len / 2;
        for _ in 0..if half > 0 { 64 } else { 0 } {
            let (target, source) = (allocation.pointer + half as u64, allocation.pointer);
            // SAFETY: both halves are there, and do not overlap.
            unsafe { result::memcpy_dtod_async(target, source, half, self.stream) }.unwrap();
        }
    }

    /// Until the stream has done what it was given.
    pub(crate) fn wait(&self) {
        // SAFETY: the stream is there.
        unsafe { result::stream::synchronize(self.stream) }.unwrap();
    }

    /// The same as a blob, as it is when the stream has done what it was given.
    pub(crate) fn memory(&self, allocation: &Arc<Allocation>) -> DeviceMemory {
        let (pointer, len) = (allocation.pointer, allocation.len as u64);
        // SAFETY: it is memory as long as the allocation is there, and tests use it when its blob is gone, or before.
        unsafe { DeviceMemory::new(pointer, len, self.stream(), allocation.clone()) }.unwrap()
    }

    /// What is there when the stream has done what it was given.
    pub(crate) fn read(&self, allocation: &Allocation) -> Vec<u8> {
        let mut bytes = vec![0; allocation.len];
        // SAFETY: there are so many bytes, and they are waited for here.
        unsafe { result::memcpy_dtoh_async(&mut bytes, allocation.pointer, self.stream) }.unwrap();
        self.wait();
        bytes
    }
}

/// Memory of a device.
pub(crate) struct Allocation {
    pub(crate) pointer: u64,
    pub(crate) len: usize,
}

impl Drop for Allocation {
    fn drop(&mut self) {
        // SAFETY: it was allocated, and nobody has it any more.
        let _ = unsafe { result::free_sync(self.pointer) };
    }
}
