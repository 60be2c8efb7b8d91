//! The scheme of torch for transfers between processes (`reduce_tensor`), without Python.
//!
//! Each tensor is sent as the IPC handle of its allocation, and its offset in the allocation.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use tssd_tests::device_context::{Allocation, DeviceContext, IpcHandle};

use crate::reader::{Command, Reader};
use crate::weights::Weights;

/// For each tensor: the handle of its allocation, the length of the allocation, the tensor offset.
#[derive(Serialize, Deserialize)]
pub(crate) struct Handles(Vec<(IpcHandle, usize, usize)>);

/// Sends the handles to the reader.
///
/// They are created for each version, because torch allocates new memory for each.
pub(crate) fn publish(weights: &Weights, reader: &Reader) {
    let handle = |(whole, start): (&Allocation, usize)| (whole.handle(), whole.len, start);
    let handles = weights.allocations().map(|allocation| handle(allocation.whole()));
    reader.send(&Command::Handles(Handles(handles.collect())));
}

/// Copies the tensors in the reader. Each handle is opened once, and closed after the copies.
pub(crate) fn copy(caller: &DeviceContext, weights: &Weights, handles: &Handles) {
    let mut opened = BTreeMap::new();
    for (own, (handle, len, start)) in weights.allocations().zip(&handles.0) {
        let other = opened.entry(*handle).or_insert_with(|| caller.open_ipc(*handle, *len));
        caller.enqueue_copy((own, 0), (other, *start), own.len);
    }
    caller.synchronize();
}
