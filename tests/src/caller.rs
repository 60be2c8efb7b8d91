//! The caller's side: memory of a device, filled on a stream of the caller's.
#![expect(unsafe_code, reason = "the caller's tensors are made here")]
#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

use std::ffi::c_char;
use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::{result, sys};
use tssd_format::Storage;
use tssd_store::{Device, DeviceMemory, Moments, Stream};

/// The devices; none, and said so, where there are none.
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

/// A device's primary context, current on this thread as long as this is there, and a stream of it.
pub struct Caller {
    stream: sys::CUstream,
}

impl Caller {
    /// On the device of this number.
    pub fn new(ordinal: usize) -> Self {
        let device = result::device::get(i32::try_from(ordinal).unwrap()).unwrap();
        // SAFETY: the device was given by the driver.
        let context = unsafe { result::primary_ctx::retain(device) }.unwrap();
        // SAFETY: the context was retained.
        unsafe { result::ctx::set_current(context) }.unwrap();
        let stream = result::stream::create(result::stream::StreamKind::NonBlocking).unwrap();
        Self { stream }
    }

    /// The stream, for the store.
    pub fn stream(&self) -> Stream {
        Stream(self.stream.addr())
    }

    /// New memory, zero.
    pub fn allocate(&self, len: usize) -> Arc<Allocation> {
        // SAFETY: it is freed once, when nobody has it any more.
        let pointer = unsafe { result::malloc_sync(len.max(1)) }.unwrap();
        let allocation = Arc::new(Allocation { pointer, len, origin: Origin::Own });
        self.clear(&allocation);
        self.wait();
        allocation
    }

    /// Memory of another process, by its handle, and as many bytes of it as that says.
    pub fn open(&self, handle: Handle, len: usize) -> Arc<Allocation> {
        let bytes = handle.iter().flat_map(|word| word.to_le_bytes());
        let bytes: Vec<c_char> = bytes.map(|byte| c_char::from_le_bytes([byte])).collect();
        let handle = sys::CUipcMemHandle { reserved: bytes.try_into().unwrap() };
        let (mut pointer, flags) =
            (0, sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32);
        // SAFETY: there is room for a pointer; the driver refuses what is no handle.
        unsafe { sys::cuIpcOpenMemHandle_v2(&raw mut pointer, handle, flags) }.result().unwrap();
        Arc::new(Allocation { pointer, len, origin: Origin::Opened })
    }

    /// Memory of the host that the driver copies to and from at the speed of the bus.
    pub fn pinned(&self, len: usize) -> Pinned {
        let mut bytes = vec![0; len.max(1)].into_boxed_slice();
        // SAFETY: there are so many bytes, which stay where they are.
        unsafe { sys::cuMemHostRegister_v2(bytes.as_mut_ptr().cast(), bytes.len(), 0) }
            .result()
            .unwrap();
        Pinned(bytes)
    }

    /// How many bytes of the device's memory nobody has.
    pub fn free(&self) -> u64 {
        result::mem_get_info().unwrap().0 as u64
    }

    /// Gives the stream zeros to write, which it does later.
    pub fn clear(&self, allocation: &Allocation) {
        if allocation.len > 0 {
            let (pointer, len) = (allocation.pointer, allocation.len);
            // SAFETY: there is memory for so many bytes.
            unsafe { result::memset_d8_async(pointer, 0, len, self.stream) }.unwrap();
        }
    }

    /// Gives the stream bytes to write, which it does later.
    ///
    /// # Panics
    ///
    /// If they are not as many as the memory has.
    pub fn fill(&self, allocation: &Allocation, bytes: Vec<u8>) {
        assert_eq!(bytes.len(), allocation.len);
        // The stream may read it at any time.
        let bytes: &'static [u8] = bytes.leak();
        // SAFETY: there is memory for so many bytes, and the source stays.
        unsafe { result::memcpy_htod_async(allocation.pointer, bytes, self.stream) }.unwrap();
    }

    /// Writes bytes, and waits until they are there.
    ///
    /// # Panics
    ///
    /// If they are more than the memory has.
    pub fn write(&self, allocation: &Allocation, bytes: &[u8]) {
        assert!(bytes.len() <= allocation.len, "there is memory for so many bytes");
        // SAFETY: as asserted, and the source is waited for.
        unsafe { result::memcpy_htod_async(allocation.pointer, bytes, self.stream) }.unwrap();
        self.wait();
    }

    /// Gives the stream bytes of one memory to copy to another, which it does later.
    ///
    /// # Panics
    ///
    /// If the ranges do not lie there.
    pub fn copy(&self, to: (&Allocation, usize), from: (&Allocation, usize), len: usize) {
        assert!(to.1 + len <= to.0.len && from.1 + len <= from.0.len, "ranges of the memory");
        let (to, from) = (to.0.pointer + to.1 as u64, from.0.pointer + from.1 as u64);
        // SAFETY: both ranges are there.
        unsafe { result::memcpy_dtod_async(to, from, len, self.stream) }.unwrap();
    }

    /// Gives the stream work that takes a while and changes nothing.
    pub fn stall(&self, allocation: &Allocation) {
        let half = allocation.len / 2;
        for _ in 0..if half > 0 { 64 } else { 0 } {
            self.copy((allocation, half), (allocation, 0), half);
        }
    }

    /// Until the stream has done what it was given.
    ///
    /// # Panics
    ///
    /// If that fails.
    pub fn wait(&self) {
        // SAFETY: the stream is there.
        unsafe { result::stream::synchronize(self.stream) }.unwrap();
    }

    /// The same as a blob, as it is when the stream has done what it was given.
    pub fn memory(&self, allocation: &Arc<Allocation>) -> DeviceMemory {
        let (pointer, len) = (allocation.pointer, allocation.len as u64);
        // SAFETY: it is memory as long as the allocation is there, and tests use it when its blob is gone, or before.
        unsafe { DeviceMemory::new(pointer, len, self.stream(), allocation.clone()) }.unwrap()
    }

    /// Several, which wait for one moment.
    pub fn memories<'a>(
        &self,
        allocations: impl IntoIterator<Item = &'a Arc<Allocation>>,
    ) -> Vec<DeviceMemory> {
        let moments = Moments::default();
        let memory = |allocation: &Arc<Allocation>| {
            let (pointer, len) = (allocation.pointer, allocation.len as u64);
            // SAFETY: as above.
            unsafe { moments.memory(pointer, len, self.stream(), allocation.clone()) }.unwrap()
        };
        allocations.into_iter().map(memory).collect()
    }

    /// The same as storages.
    pub fn storages<'a>(
        &self,
        allocations: impl IntoIterator<Item = &'a Arc<Allocation>>,
    ) -> Vec<Storage> {
        let memories = self.memories(allocations).into_iter();
        memories.map(|memory| Storage::elsewhere(Arc::new(memory)).unwrap()).collect()
    }

    /// The same as a storage.
    pub fn storage(&self, allocation: &Arc<Allocation>) -> Storage {
        Storage::elsewhere(Arc::new(self.memory(allocation))).unwrap()
    }

    /// What is there when the stream has done what it was given.
    pub fn read(&self, allocation: &Allocation) -> Vec<u8> {
        let mut bytes = vec![0; allocation.len];
        self.read_into(allocation, &mut bytes);
        bytes
    }

    /// The same into memory that is there: the first bytes, as many as fit.
    pub fn read_into(&self, allocation: &Allocation, bytes: &mut [u8]) {
        assert!(bytes.len() <= allocation.len, "there are so many bytes");
        // SAFETY: as asserted, and they are waited for here.
        unsafe { result::memcpy_dtoh_async(bytes, allocation.pointer, self.stream) }.unwrap();
        self.wait();
    }
}

/// Memory of a device.
pub struct Allocation {
    /// Where it is, for the driver.
    pub pointer: u64,
    /// In bytes.
    pub len: usize,
    origin: Origin,
}

enum Origin {
    Own,
    /// It is another process's.
    Opened,
    /// It is a part of this one.
    Part(Arc<Allocation>),
}

/// What other processes open memory by: the 64 bytes of the driver.
pub type Handle = [u64; 8];

impl Allocation {
    /// A part of it, which keeps it.
    ///
    /// # Panics
    ///
    /// If it has no such range.
    pub fn part(self: &Arc<Self>, range: Range<usize>) -> Arc<Self> {
        assert!(range.start <= range.end && range.end <= self.len, "a range of the memory");
        let pointer = self.pointer + range.start as u64;
        Arc::new(Self { pointer, len: range.len(), origin: Origin::Part(self.clone()) })
    }

    /// What was allocated at once, and where in it this begins.
    pub fn whole(&self) -> (&Self, usize) {
        match &self.origin {
            Origin::Part(whole) => (whole, usize::try_from(self.pointer - whole.pointer).unwrap()),
            _ => (self, 0),
        }
    }

    /// What other processes open it by, if it is no part.
    pub fn handle(&self) -> Handle {
        let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
        // SAFETY: there is room for a handle.
        unsafe { sys::cuIpcGetMemHandle(&raw mut handle, self.pointer) }.result().unwrap();
        let bytes = handle.reserved.map(|byte| byte.to_le_bytes()[0]);
        let (words, _) = bytes.as_chunks::<8>();
        std::array::from_fn(|at| u64::from_le_bytes(words[at]))
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        match self.origin {
            Origin::Own => {
                // SAFETY: it was allocated, and nobody has it any more.
                let _ = unsafe { result::free_sync(self.pointer) };
            }
            Origin::Opened => {
                // SAFETY: it was opened, and nobody has it any more.
                let _ = unsafe { sys::cuIpcCloseMemHandle(self.pointer) };
            }
            Origin::Part(_) => {}
        }
    }
}

/// Memory of the host that is registered with the driver.
pub struct Pinned(Box<[u8]>);

impl Pinned {
    /// The bytes.
    pub fn bytes(&mut self) -> &mut [u8] {
        &mut self.0
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: it was registered, and what was begun with it was waited for.
        let _ = unsafe { sys::cuMemHostUnregister(self.0.as_mut_ptr().cast()) };
    }
}
