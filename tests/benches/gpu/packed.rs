//! The scheme that ours grew out of: tensors of one dtype, back to back in a bucket, which is handed over by one handle
//! and written again when it was read.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tssd_tests::caller::{Allocation, DeviceContext, IpcHandle};

use crate::reader::{Ask, Reader};
use crate::weights::Weights;

/// As ours has them.
const BUCKET: usize = 512 << 20;

/// A bucket that is full, and what of each tensor is in it.
#[derive(Serialize, Deserialize)]
pub(crate) struct Bucket {
    handle: IpcHandle,
    len: usize,
    parts: Vec<Part>,
}

/// So many bytes of a tensor, from one on; they follow those of the part before.
#[derive(Clone, Copy, Serialize, Deserialize)]
struct Part {
    tensor: usize,
    from: usize,
    len: usize,
}

/// The writer's side.
pub(crate) struct Packer<'a> {
    caller: &'a DeviceContext,
    weights: &'a Weights,
    bucket: Arc<Allocation>,
    /// Of each bucket.
    parts: Vec<Vec<Part>>,
}

impl<'a> Packer<'a> {
    pub(crate) fn new(caller: &'a DeviceContext, weights: &'a Weights) -> Self {
        let (mut parts, mut room) = (vec![Vec::new()], BUCKET);
        for (tensor, allocation) in weights.allocations().enumerate() {
            let mut from = 0;
            while from < allocation.len {
                if room == 0 {
                    parts.push(Vec::new());
                    room = BUCKET;
                }
                let len = room.min(allocation.len - from);
                parts.last_mut().unwrap().push(Part { tensor, from, len });
                (from, room) = (from + len, room - len);
            }
        }
        let most = usize::try_from(weights.bytes()).unwrap().min(BUCKET);
        Self { caller, weights, bucket: caller.allocate(most), parts }
    }

    pub(crate) fn publish(&self, reader: &Reader) {
        for parts in &self.parts {
            let mut at = 0;
            for part in parts {
                let (_, _, tensor) = &self.weights.tensors[part.tensor];
                self.caller.enqueue_copy((&self.bucket, at), (tensor, part.from), part.len);
                at += part.len;
            }
            self.caller.synchronize();
            let (handle, len, parts) = (self.bucket.handle(), self.bucket.len, parts.clone());
            reader.ask(&Ask::Bucket(Bucket { handle, len, parts }));
        }
    }
}

/// The reader's side: the bucket is opened once.
pub(crate) fn unpack(
    caller: &DeviceContext,
    weights: &Weights,
    opened: &mut Option<(IpcHandle, Arc<Allocation>)>,
    bucket: &Bucket,
) {
    if opened.as_ref().is_none_or(|(handle, _)| *handle != bucket.handle) {
        *opened = Some((bucket.handle, caller.open_ipc(bucket.handle, bucket.len)));
    }
    let Some((_, memory)) = opened else { unreachable!("it is open") };
    let mut at = 0;
    for part in &bucket.parts {
        let (_, _, tensor) = &weights.tensors[part.tensor];
        caller.enqueue_copy((tensor, part.from), (memory, at), part.len);
        at += part.len;
    }
    caller.synchronize();
}
