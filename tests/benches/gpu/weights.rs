//! Tensors of a device, where torch would have them.

use std::sync::Arc;

use tssd_format::{StateDict, Tensor, TensorMeta};
use tssd_gpu::DeviceMemory;
use tssd_store::{Target, TargetMemory};
use tssd_tests::caller::{Allocation, DeviceContext};

pub(crate) struct Weights {
    pub(crate) tensors: Vec<(String, TensorMeta, Arc<Allocation>)>,
}

impl Weights {
    /// All zero.
    pub(crate) fn new(caller: &DeviceContext, shapes: &[(String, TensorMeta)]) -> Self {
        let (mut tensors, mut pool) = (Vec::new(), Pool::default());
        for (name, meta) in shapes {
            let memory = pool.allocate(caller, usize::try_from(meta.nbytes()).unwrap());
            tensors.push((name.clone(), meta.clone(), memory));
        }
        Self { tensors }
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.tensors.iter().map(|(_, meta, _)| meta.nbytes()).sum()
    }

    pub(crate) fn allocations(&self) -> impl Iterator<Item = &Arc<Allocation>> {
        self.tensors.iter().map(|(_, _, allocation)| allocation)
    }

    /// Writes words that are all different, and other ones in tensors that follow each other.
    pub(crate) fn write(&self, caller: &DeviceContext) {
        const TENSORS: usize = 1000;
        let longest = self.allocations().map(|allocation| allocation.len).max().unwrap_or(0);
        let words = (0..longest as u64 / 8 + 1 + TENSORS as u64)
            .map(|word| word.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let bytes: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
        for (number, allocation) in self.allocations().enumerate() {
            caller.write(allocation, &bytes[number % TENSORS * 8..][..allocation.len]);
        }
    }

    pub(crate) fn clear(&self, caller: &DeviceContext) {
        self.allocations().for_each(|allocation| caller.enqueue_clear(allocation));
        caller.synchronize();
    }

    /// The checksum of each tensor.
    pub(crate) fn sums(&self, caller: &DeviceContext) -> Vec<u32> {
        self.allocations().map(|allocation| crc32fast::hash(&caller.read(allocation))).collect()
    }

    /// As a state dict.
    pub(crate) fn dict(&self, caller: &DeviceContext) -> StateDict {
        let mut dict = StateDict::new();
        for ((name, meta, _), storage) in
            self.tensors.iter().zip(caller.to_storages(self.allocations()))
        {
            dict.insert(name.as_str(), Tensor::new(meta.clone(), storage, 0).unwrap());
        }
        dict
    }

    /// As memory that may be filled.
    pub(crate) fn memories(&self, caller: &DeviceContext) -> Vec<DeviceMemory> {
        caller.device_memories(self.allocations())
    }

    /// The same as targets.
    pub(crate) fn targets<'a>(&self, memories: &'a [DeviceMemory]) -> Vec<Target<'a>> {
        let target = |((name, meta, _), memory): (&(String, TensorMeta, _), &'a DeviceMemory)| {
            let memory = TargetMemory::Elsewhere(memory);
            Target { fqn: name.clone(), place: None, meta: meta.clone(), memory }
        };
        self.tensors.iter().zip(memories).map(target).collect()
    }
}

/// As torch's allocator does: what is small lies together, in blocks of 2 MiB, or 20 MiB from 1 MiB on; from 10 MiB on
/// each has an allocation of its own.
#[derive(Default)]
struct Pool {
    small: Option<Block>,
    large: Option<Block>,
}

/// A block, and how much of it is taken.
struct Block {
    memory: Arc<Allocation>,
    taken: usize,
}

impl Pool {
    fn allocate(&mut self, caller: &DeviceContext, len: usize) -> Arc<Allocation> {
        const MIB: usize = 1 << 20;
        let (block, size) = match len {
            ..MIB => (&mut self.small, 2 * MIB),
            MIB..10_485_760 => (&mut self.large, 20 * MIB),
            _ => return caller.allocate(len),
        };
        let block = match block {
            Some(block) if block.taken + len <= size => block,
            block => block.insert(Block { memory: caller.allocate(size), taken: 0 }),
        };
        let start = block.taken;
        block.taken = (start + len).next_multiple_of(512);
        block.memory.part(start..start + len)
    }
}
