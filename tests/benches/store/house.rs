//! What the rows measure: a model, and threads that are as many as a row says.

use std::thread;

use bytes::Bytes;
use tssd_format::{Dtype, StateDict, Storage, Tensor, TensorMeta};
use tssd_store::Key;

/// Runs something on a thread that has only so many cores, with all threads that it starts.
pub(crate) fn on_cores(count: usize, work: impl FnOnce() + Send) {
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut cores = rustix::thread::CpuSet::new();
            (0..count).for_each(|core| cores.set(core));
            rustix::thread::sched_setaffinity(None, &cores).unwrap();
            work();
        });
    });
}

pub(crate) fn key() -> Key {
    Key::new("model").unwrap()
}

/// 400 tensors, 512 MiB together: as large as matrices and vectors of a small model.
pub(crate) fn model() -> StateDict {
    let mut dict = StateDict::new();
    for number in 0..400_u64 {
        // Half a MiB on average more or less.
        let rows = 320 + 32 * (number % 21);
        let meta = TensorMeta::new(Dtype::Bfloat16, &[rows, 1049]).unwrap();
        let fill = number.to_le_bytes()[0];
        let bytes = aligned(fill, usize::try_from(meta.nbytes()).unwrap());
        dict.insert(
            format!("layers.{number}.weight"),
            Tensor::new(meta, Storage::from(bytes), 0).unwrap(),
        );
    }
    dict
}

/// Memory as torch gives it to tensors: at a multiple of 64 bytes.
fn aligned(fill: u8, len: usize) -> Bytes {
    let memory = vec![fill; len + 64];
    let start = memory.as_ptr().align_offset(64);
    Bytes::from(memory).slice(start..start + len)
}

/// How many bytes its tensors have.
pub(crate) fn bytes(dict: &StateDict) -> u64 {
    dict.leaves()
        .iter()
        .map(|(_, leaf)| match leaf {
            tssd_format::Value::Tensor(tensor) => tensor.meta().nbytes(),
            _ => 0,
        })
        .sum()
}

/// Minor page faults of this process so far.
pub(crate) fn faults() -> u64 {
    let text = std::fs::read_to_string("/proc/self/stat").unwrap();
    let (_, rest) = text.rsplit_once(')').unwrap();
    rest.split_whitespace().nth(7).unwrap().parse().unwrap()
}
