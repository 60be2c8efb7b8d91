//! State dicts of which every element says whose it is: which key's, version's and writer's.

use tssd_format::{Shard, ShardPlace, StateDict, Tensor, TensorSlice, Value};

/// Tensors that each writer has alone.
const TENSORS: u64 = 3;

/// What a version holds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Contents<'a> {
    pub(crate) key: &'a str,
    pub(crate) version: u64,
    pub(crate) writers: u32,
    /// Of each tensor, and of each row of the one that all writers share.
    pub(crate) elements: u64,
}

impl Contents<'_> {
    /// What one writer contributes.
    pub(crate) fn part(&self, writer: u32) -> StateDict {
        let mut dict = StateDict::new();
        for (name, tensor) in self.entries(writer) {
            dict.insert(name, tensor);
        }
        dict
    }

    /// The same, entry by entry: tensors of its own, and its row of one that all have.
    pub(crate) fn entries(&self, writer: u32) -> Vec<(String, Value)> {
        let mut entries = vec![("version".to_owned(), Value::from(self.version.cast_signed()))];
        for tensor in 0..TENSORS {
            let elements = self.elements_of(writer, tensor);
            let own = Tensor::from_slice(&elements, &[self.elements]).unwrap();
            entries.push((name_of(writer, tensor), Value::from(own)));
        }
        let (rows, len) = (u64::from(self.writers), self.elements);
        let slice = TensorSlice::new(&[writer.into(), 0], &[1, len], &[rows, len]).unwrap();
        let row = Tensor::from_slice(&self.elements_of(writer, TENSORS), &[1, len]).unwrap();
        let shared = Shard::new(row, ShardPlace::new(slice)).unwrap();
        entries.push(("shared".to_owned(), Value::from(shared)));
        entries
    }

    /// Proves that a state dict is this one, whole; says how many tensors were compared.
    pub(crate) fn check(&self, dict: &StateDict) -> u64 {
        let Value::Int(version) = dict.leaf("version").unwrap() else { panic!("an int") };
        assert_eq!(version.as_i64(), Some(self.version.cast_signed()), "{self:?}");
        let mut shared = Vec::new();
        for writer in 0..self.writers {
            for tensor in 0..TENSORS {
                let name = name_of(writer, tensor);
                self.compare(dict, &name, &self.elements_of(writer, tensor));
            }
            shared.extend(self.elements_of(writer, TENSORS));
        }
        self.compare(dict, "shared", &shared);
        u64::from(self.writers) * TENSORS + 1
    }

    fn compare(&self, dict: &StateDict, name: &str, expected: &[i64]) {
        let Value::Tensor(tensor) = dict.leaf(name).unwrap() else { panic!("a tensor") };
        let found = tensor.view();
        assert!(found.as_slice::<i64>().unwrap() == expected, "{self:?}: {name} is another's");
    }

    /// No two tensors of a test have the same.
    fn elements_of(&self, writer: u32, tensor: u64) -> Vec<i64> {
        let bytes = self.key.bytes().chain(self.version.to_le_bytes()).chain(writer.to_le_bytes());
        let seed = bytes.chain(tensor.to_le_bytes()).fold(0xCBF2_9CE4_8422_2325, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3)
        });
        (0..self.elements).map(|at| seed.wrapping_add(at).cast_signed()).collect()
    }
}

fn name_of(writer: u32, tensor: u64) -> String {
    format!("rank{writer}_{tensor}")
}
