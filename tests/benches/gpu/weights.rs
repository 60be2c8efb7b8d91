//! Tensors of a device, each in an allocation of its own.

use std::sync::Arc;

use tssd_format::{StateDict, Tensor, TensorMeta};
use tssd_store::{DeviceMemory, Target, TargetMemory};
use tssd_tests::caller::{Allocation, Caller};

pub(crate) struct Weights {
    pub(crate) tensors: Vec<(String, TensorMeta, Arc<Allocation>)>,
}

impl Weights {
    /// All zero.
    pub(crate) fn new(caller: &Caller, shapes: &[(String, TensorMeta)]) -> Self {
        let allocate = |(name, meta): &(String, TensorMeta)| {
            let len = usize::try_from(meta.nbytes()).unwrap();
            (name.clone(), meta.clone(), caller.allocate(len))
        };
        Self { tensors: shapes.iter().map(allocate).collect() }
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.tensors.iter().map(|(_, meta, _)| meta.nbytes()).sum()
    }

    pub(crate) fn allocations(&self) -> impl Iterator<Item = &Arc<Allocation>> {
        self.tensors.iter().map(|(_, _, allocation)| allocation)
    }

    /// Writes words that are all different, and other ones in tensors that follow each other.
    pub(crate) fn write(&self, caller: &Caller) {
        const TENSORS: usize = 1000;
        let longest = self.allocations().map(|allocation| allocation.len).max().unwrap_or(0);
        let words = (0..longest as u64 / 8 + 1 + TENSORS as u64)
            .map(|word| word.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let bytes: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
        for (number, allocation) in self.allocations().enumerate() {
            caller.write(allocation, &bytes[number % TENSORS * 8..][..allocation.len]);
        }
    }

    pub(crate) fn clear(&self, caller: &Caller) {
        self.allocations().for_each(|allocation| caller.clear(allocation));
        caller.wait();
    }

    /// The checksum of each tensor.
    pub(crate) fn sums(&self, caller: &Caller) -> Vec<u32> {
        self.allocations().map(|allocation| crc32fast::hash(&caller.read(allocation))).collect()
    }

    /// As a state dict.
    pub(crate) fn dict(&self, caller: &Caller) -> StateDict {
        let mut dict = StateDict::new();
        for (name, meta, allocation) in &self.tensors {
            dict.insert(
                name.as_str(),
                Tensor::new(meta.clone(), caller.storage(allocation), 0).unwrap(),
            );
        }
        dict
    }

    /// As memory that may be filled.
    pub(crate) fn memories(&self, caller: &Caller) -> Vec<DeviceMemory> {
        self.allocations().map(|allocation| caller.memory(allocation)).collect()
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
