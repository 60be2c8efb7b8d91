//! Device tensors, allocated like by torch.

use std::sync::Arc;

use tssd_format::{StateDict, Tensor, TensorMeta};
use tssd_gpu::DeviceMemory;
use tssd_store::{Target, TargetMemory};
use tssd_tests::device_context::{Allocation, DeviceContext};

/// Device tensors of a model.
pub(crate) struct Weights {
    pub(crate) tensors: Vec<(String, TensorMeta, Arc<Allocation>)>,
}

impl Weights {
    /// Allocates zeroed tensors of these names and shapes.
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

    /// Fills each tensor with distinct words. Up to 1,000 successive tensors have different contents.
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

    /// Returns the CRC-32 of each tensor.
    pub(crate) fn checksums(&self, caller: &DeviceContext) -> Vec<u32> {
        self.allocations().map(|allocation| crc32fast::hash(&caller.read(allocation))).collect()
    }

    /// Returns the tensors as a state dict.
    pub(crate) fn dict(&self, caller: &DeviceContext) -> StateDict {
        let mut dict = StateDict::new();
        for ((name, meta, _), storage) in
            self.tensors.iter().zip(caller.to_storages(self.allocations()))
        {
            dict.insert(name.as_str(), Tensor::new(meta.clone(), storage, 0).unwrap());
        }
        dict
    }

    /// Returns the memory of the tensors, for targets.
    pub(crate) fn device_memories(&self, caller: &DeviceContext) -> Vec<DeviceMemory> {
        caller.device_memories(self.allocations())
    }

    /// Returns the tensors as targets of a get.
    pub(crate) fn targets<'a>(&self, memories: &'a [DeviceMemory]) -> Vec<Target<'a>> {
        let target = |((name, meta, _), memory): (&(String, TensorMeta, _), &'a DeviceMemory)| {
            let memory = TargetMemory::Device(memory);
            Target { fqn: name.clone(), shard_spec: None, meta: meta.clone(), memory }
        };
        self.tensors.iter().zip(memories).map(target).collect()
    }
}

/// A memory pool that imitates the allocator of torch.
///
/// Tensors below 1 MiB share blocks of 2 MiB. Tensors below 10 MiB share blocks of 20 MiB. Larger tensors have their
/// own allocation.
#[derive(Default)]
struct Pool {
    small: Option<Block>,
    large: Option<Block>,
}

/// A block of memory that several tensors share.
struct Block {
    memory: Arc<Allocation>,
    /// Number of bytes in use, from the start.
    used: usize,
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
            Some(block) if block.used + len <= size => block,
            block => block.insert(Block { memory: caller.allocate(size), used: 0 }),
        };
        let start = block.used;
        block.used = (start + len).next_multiple_of(512);
        block.memory.part(start..start + len)
    }
}
