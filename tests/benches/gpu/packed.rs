//! A simpler transfer scheme, which the ring is derived from.
//!
//! Tensors of one dtype are packed into a bucket, which is shared by one handle. The bucket is reused after the reader
//! has copied it.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tssd_tests::device_context::{Allocation, DeviceContext, IpcHandle};

use crate::reader::{Command, Reader};
use crate::weights::Weights;

/// Size of a bucket in bytes, 512 MiB, as in the ring.
const BUCKET: usize = 512 << 20;

/// A full bucket, and the parts of tensors in it.
#[derive(Serialize, Deserialize)]
pub(crate) struct Bucket {
    handle: IpcHandle,
    len: usize,
    parts: Vec<Part>,
}

/// A range of bytes of a tensor. In the bucket, it follows the previous part.
#[derive(Clone, Copy, Serialize, Deserialize)]
struct Part {
    tensor: usize,
    /// Offset in the tensor.
    offset: usize,
    len: usize,
}

/// The writer.
pub(crate) struct Packer<'a> {
    caller: &'a DeviceContext,
    weights: &'a Weights,
    bucket: Arc<Allocation>,
    /// Parts of each bucket.
    parts: Vec<Vec<Part>>,
}

impl<'a> Packer<'a> {
    pub(crate) fn new(caller: &'a DeviceContext, weights: &'a Weights) -> Self {
        let (mut parts, mut free) = (vec![Vec::new()], BUCKET);
        for (tensor, allocation) in weights.allocations().enumerate() {
            let mut offset = 0;
            while offset < allocation.len {
                if free == 0 {
                    parts.push(Vec::new());
                    free = BUCKET;
                }
                let len = free.min(allocation.len - offset);
                parts.last_mut().unwrap().push(Part { tensor, offset, len });
                (offset, free) = (offset + len, free - len);
            }
        }
        let bucket_len = usize::try_from(weights.bytes()).unwrap().min(BUCKET);
        Self { caller, weights, bucket: caller.allocate(bucket_len), parts }
    }

    pub(crate) fn publish(&self, reader: &Reader) {
        for parts in &self.parts {
            let mut at = 0;
            for part in parts {
                let (_, _, tensor) = &self.weights.tensors[part.tensor];
                self.caller.enqueue_copy((&self.bucket, at), (tensor, part.offset), part.len);
                at += part.len;
            }
            self.caller.synchronize();
            let (handle, len, parts) = (self.bucket.handle(), self.bucket.len, parts.clone());
            reader.send(&Command::Bucket(Bucket { handle, len, parts }));
        }
    }
}

/// Copies the tensors out of a bucket in the reader. The handle of the bucket is opened once.
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
        caller.enqueue_copy((tensor, part.offset), (memory, at), part.len);
        at += part.len;
    }
    caller.synchronize();
}
