//! State dicts in which each element identifies its key, version and writer.

use tssd_format::{Shard, ShardSpec, StateDict, Tensor, TensorSlice, Value};

/// Number of tensors that only one writer has, by writer.
const TENSORS: u64 = 3;

/// Expected contents of a version.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Contents<'a> {
    pub(crate) key: &'a str,
    pub(crate) version: u64,
    pub(crate) writers: u32,
    /// Elements of each tensor, and of each row of the shared tensor.
    pub(crate) elements: u64,
}

impl Contents<'_> {
    /// Returns the state dict that one writer puts.
    pub(crate) fn part(&self, writer: u32) -> StateDict {
        let mut dict = StateDict::new();
        for (name, tensor) in self.entries(writer) {
            dict.insert(name, tensor);
        }
        dict
    }

    /// Returns the entries that one writer puts: its own tensors, and its row of the shared tensor.
    pub(crate) fn entries(&self, writer: u32) -> Vec<(String, Value)> {
        let mut entries = vec![("version".to_owned(), Value::from(self.version.cast_signed()))];
        for tensor in 0..TENSORS {
            let elements = self.elements_of(writer, tensor);
            let own = Tensor::from_slice(&elements, &[self.elements]).unwrap();
            entries.push((tensor_name(writer, tensor), Value::from(own)));
        }
        let (rows, len) = (u64::from(self.writers), self.elements);
        let slice = TensorSlice::new(&[writer.into(), 0], &[1, len], &[rows, len]).unwrap();
        let row = Tensor::from_slice(&self.elements_of(writer, TENSORS), &[1, len]).unwrap();
        let shared = Shard::new(row, ShardSpec::new(slice)).unwrap();
        entries.push(("shared".to_owned(), Value::from(shared)));
        entries
    }

    /// Checks that a state dict has exactly these contents. Returns the number of tensors compared.
    pub(crate) fn assert_matches(&self, dict: &StateDict) -> u64 {
        let Value::Int(version) = dict.leaf("version").unwrap() else { panic!("an int") };
        assert_eq!(version.as_i64(), Some(self.version.cast_signed()), "{self:?}");
        let mut shared = Vec::new();
        for writer in 0..self.writers {
            for tensor in 0..TENSORS {
                let name = tensor_name(writer, tensor);
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
        assert!(
            found.as_slice::<i64>().unwrap() == expected,
            "{self:?}: {name} has wrong elements"
        );
    }

    /// Returns elements that differ for each key, version, writer and tensor.
    fn elements_of(&self, writer: u32, tensor: u64) -> Vec<i64> {
        let bytes = self.key.bytes().chain(self.version.to_le_bytes()).chain(writer.to_le_bytes());
        let seed = bytes.chain(tensor.to_le_bytes()).fold(0xCBF2_9CE4_8422_2325, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3)
        });
        (0..self.elements).map(|at| seed.wrapping_add(at).cast_signed()).collect()
    }
}

fn tensor_name(writer: u32, tensor: u64) -> String {
    format!("rank{writer}_{tensor}")
}
