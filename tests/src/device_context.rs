//! Device memory of the caller of a store, filled on a stream of the caller.
#![expect(unsafe_code, reason = "the caller's tensors are made here")]
#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

use std::ffi::c_char;
use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::{result, sys};
use tssd_format::Storage;
use tssd_gpu::{Device, DeviceMemory, Stream, StreamFences};

/// Returns the devices. If there are none, prints the reason.
#[expect(clippy::print_stdout, reason = "tests say what they leave out")]
pub fn devices() -> Vec<Device> {
    match Device::all() {
        Ok(devices) => devices,
        Err(error) => {
            println!("left out: {error}");
            Vec::new()
        }
    }
}

/// The primary context of a device, which is current on this thread, and a stream of it.
pub struct DeviceContext {
    stream: sys::CUstream,
}

impl DeviceContext {
    /// Creates a context and a stream on the device of this number.
    pub fn new(ordinal: usize) -> Self {
        tssd_gpu::register();
        let device = result::device::get(i32::try_from(ordinal).unwrap()).unwrap();
        // SAFETY: the driver has returned this device.
        let context = unsafe { result::primary_ctx::retain(device) }.unwrap();
        // SAFETY: the context is retained by the call above, and never released.
        unsafe { result::ctx::set_current(context) }.unwrap();
        let stream = result::stream::create(result::stream::StreamKind::NonBlocking).unwrap();
        Self { stream }
    }

    /// Returns the stream, for the store.
    pub fn stream(&self) -> Stream {
        Stream(self.stream.addr())
    }

    /// Allocates zeroed device memory.
    pub fn allocate(&self, len: usize) -> Arc<Allocation> {
        // SAFETY: `Allocation` frees the pointer once, when its last reference is dropped.
        let pointer = unsafe { result::malloc_sync(len.max(1)) }.unwrap();
        let allocation = Arc::new(Allocation { pointer, len, origin: Origin::Allocated });
        self.enqueue_clear(&allocation);
        self.synchronize();
        allocation
    }

    /// Opens memory of another process by its handle, with this length in bytes.
    pub fn open_ipc(&self, handle: IpcHandle, len: usize) -> Arc<Allocation> {
        let bytes = handle.iter().flat_map(|word| word.to_le_bytes());
        let bytes: Vec<c_char> = bytes.map(|byte| c_char::from_le_bytes([byte])).collect();
        let handle = sys::CUipcMemHandle { reserved: bytes.try_into().unwrap() };
        let (mut pointer, flags) =
            (0, sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32);
        // SAFETY: `pointer` is writable for the result; the driver rejects an invalid handle.
        unsafe { sys::cuIpcOpenMemHandle_v2(&raw mut pointer, handle, flags) }.result().unwrap();
        Arc::new(Allocation { pointer, len, origin: Origin::Opened })
    }

    /// Allocates host memory and registers it with the driver, for copies at the speed of the bus.
    pub fn allocate_pinned(&self, len: usize) -> Pinned {
        let mut bytes = vec![0; len.max(1)].into_boxed_slice();
        // SAFETY: the box has `bytes.len()` bytes, and does not move them while `Pinned` keeps it.
        unsafe { sys::cuMemHostRegister_v2(bytes.as_mut_ptr().cast(), bytes.len(), 0) }
            .result()
            .unwrap();
        Pinned(bytes)
    }

    /// Returns the number of free bytes of the device.
    pub fn free_bytes(&self) -> u64 {
        result::mem_get_info().unwrap().0 as u64
    }

    /// Enqueues writing zeros on the stream.
    pub fn enqueue_clear(&self, allocation: &Allocation) {
        if allocation.len > 0 {
            let (pointer, len) = (allocation.pointer, allocation.len);
            // SAFETY: the allocation has `len` bytes at `pointer`.
            unsafe { result::memset_d8_async(pointer, 0, len, self.stream) }.unwrap();
        }
    }

    /// Enqueues writing bytes on the stream.
    ///
    /// # Panics
    ///
    /// If their number differs from the length of the allocation.
    pub fn enqueue_fill(&self, allocation: &Allocation, bytes: Vec<u8>) {
        assert_eq!(bytes.len(), allocation.len);
        // Leaked, because the stream may read the bytes at any later time.
        let bytes: &'static [u8] = bytes.leak();
        // SAFETY: the allocation has as many bytes as asserted, and the source is never freed.
        unsafe { result::memcpy_htod_async(allocation.pointer, bytes, self.stream) }.unwrap();
    }

    /// Writes bytes and waits until they are written.
    ///
    /// # Panics
    ///
    /// If the bytes exceed the allocation.
    pub fn write(&self, allocation: &Allocation, bytes: &[u8]) {
        assert!(bytes.len() <= allocation.len, "the bytes fit in the allocation");
        // SAFETY: the allocation has enough bytes as asserted; `wait` ends the copy before the
        // borrow ends.
        unsafe { result::memcpy_htod_async(allocation.pointer, bytes, self.stream) }.unwrap();
        self.synchronize();
    }

    /// Enqueues copying bytes between allocations, each with an offset, on the stream.
    ///
    /// # Panics
    ///
    /// If a range exceeds its allocation.
    pub fn enqueue_copy(&self, to: (&Allocation, usize), from: (&Allocation, usize), len: usize) {
        assert!(
            to.1 + len <= to.0.len && from.1 + len <= from.0.len,
            "the ranges are inside the allocations"
        );
        let (to, from) = (to.0.pointer + to.1 as u64, from.0.pointer + from.1 as u64);
        // SAFETY: both ranges are inside their allocations, as asserted.
        unsafe { result::memcpy_dtod_async(to, from, len, self.stream) }.unwrap();
    }

    /// Enqueues work that takes a while and changes nothing.
    pub fn enqueue_delay(&self, allocation: &Allocation) {
        let half = allocation.len / 2;
        for _ in 0..if half > 0 { 64 } else { 0 } {
            self.enqueue_copy((allocation, half), (allocation, 0), half);
        }
    }

    /// Waits until the stream has executed all enqueued work.
    ///
    /// # Panics
    ///
    /// If the work fails.
    pub fn synchronize(&self) {
        // SAFETY: `new` has created the stream, which is never destroyed.
        unsafe { result::stream::synchronize(self.stream) }.unwrap();
    }

    /// Returns the allocation as a blob, as it is after the work that is enqueued now.
    pub fn device_memory(&self, allocation: &Arc<Allocation>) -> DeviceMemory {
        let (pointer, len) = (allocation.pointer, allocation.len as u64);
        // SAFETY: the blob keeps the allocation, which owns the memory. Tests write to the memory
        // only before the blob exists or after it is dropped.
        unsafe { DeviceMemory::new(pointer, len, self.stream(), allocation.clone()) }.unwrap()
    }

    /// Returns several allocations as blobs, which share one stream event.
    pub fn device_memories<'a>(
        &self,
        allocations: impl IntoIterator<Item = &'a Arc<Allocation>>,
    ) -> Vec<DeviceMemory> {
        let fences = StreamFences::default();
        let memory = |allocation: &Arc<Allocation>| {
            let (pointer, len) = (allocation.pointer, allocation.len as u64);
            // SAFETY: as in `memory`.
            unsafe {
                DeviceMemory::with_fences(&fences, pointer, len, self.stream(), allocation.clone())
            }
            .unwrap()
        };
        allocations.into_iter().map(memory).collect()
    }

    /// Returns several allocations as storages.
    pub fn to_storages<'a>(
        &self,
        allocations: impl IntoIterator<Item = &'a Arc<Allocation>>,
    ) -> Vec<Storage> {
        let memories = self.device_memories(allocations).into_iter();
        memories.map(|memory| Storage::from_blob(Arc::new(memory)).unwrap()).collect()
    }

    /// Returns the allocation as a storage.
    pub fn to_storage(&self, allocation: &Arc<Allocation>) -> Storage {
        Storage::from_blob(Arc::new(self.device_memory(allocation))).unwrap()
    }

    /// Returns the bytes after the work that is enqueued now.
    pub fn read(&self, allocation: &Allocation) -> Vec<u8> {
        let mut bytes = vec![0; allocation.len];
        self.read_into(allocation, &mut bytes);
        bytes
    }

    /// Reads the first bytes after the work that is enqueued now, as many as `bytes` has.
    pub fn read_into(&self, allocation: &Allocation, bytes: &mut [u8]) {
        assert!(bytes.len() <= allocation.len, "the allocation has enough bytes");
        // SAFETY: the allocation has enough bytes as asserted; `wait` ends the copy before the
        // borrow ends.
        unsafe { result::memcpy_dtoh_async(bytes, allocation.pointer, self.stream) }.unwrap();
        self.synchronize();
    }
}

/// Device memory.
pub struct Allocation {
    /// Device pointer.
    pub pointer: u64,
    /// Length in bytes.
    pub len: usize,
    origin: Origin,
}

enum Origin {
    Allocated,
    /// Opened memory of another process.
    Opened,
    /// A part of this allocation.
    Part(Arc<Allocation>),
}

/// Handle by which other processes open memory: the 64 bytes of the driver.
pub type IpcHandle = [u64; 8];

impl Allocation {
    /// Returns a part of the allocation, which keeps the whole.
    ///
    /// # Panics
    ///
    /// If the range exceeds the allocation.
    pub fn part(self: &Arc<Self>, range: Range<usize>) -> Arc<Self> {
        assert!(
            range.start <= range.end && range.end <= self.len,
            "the range is inside the allocation"
        );
        let pointer = self.pointer + range.start as u64;
        Arc::new(Self { pointer, len: range.len(), origin: Origin::Part(self.clone()) })
    }

    /// Returns the whole allocation, and the offset of this part in it.
    pub fn whole(&self) -> (&Self, usize) {
        match &self.origin {
            Origin::Part(whole) => (whole, usize::try_from(self.pointer - whole.pointer).unwrap()),
            _ => (self, 0),
        }
    }

    /// Returns the handle by which other processes open the allocation. It must not be a part.
    pub fn handle(&self) -> IpcHandle {
        let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
        // SAFETY: `handle` is writable for the result.
        unsafe { sys::cuIpcGetMemHandle(&raw mut handle, self.pointer) }.result().unwrap();
        let bytes = handle.reserved.map(|byte| byte.to_le_bytes()[0]);
        let (words, _) = bytes.as_chunks::<8>();
        std::array::from_fn(|at| u64::from_le_bytes(words[at]))
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        match self.origin {
            Origin::Allocated => {
                // SAFETY: the driver has allocated the memory, and this is its last reference.
                let _ = unsafe { result::free_sync(self.pointer) };
            }
            Origin::Opened => {
                // SAFETY: the driver has opened the memory, and this is its last reference.
                let _ = unsafe { sys::cuIpcCloseMemHandle(self.pointer) };
            }
            Origin::Part(_) => {}
        }
    }
}

/// Host memory that is registered with the driver.
pub struct Pinned(Box<[u8]>);

impl Pinned {
    /// Returns the bytes.
    pub fn bytes(&mut self) -> &mut [u8] {
        &mut self.0
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: the bytes are registered, and all copies that use them have been waited for.
        let _ = unsafe { sys::cuMemHostUnregister(self.0.as_mut_ptr().cast()) };
    }
}
