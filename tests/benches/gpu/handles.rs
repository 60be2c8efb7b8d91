//! What torch does between processes (`reduce_tensor`), without Python: for each tensor a handle of what was allocated
//! with it, and where in that it is.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use tssd_tests::caller::{Allocation, DeviceContext, IpcHandle};

use crate::reader::{Ask, Reader};
use crate::weights::Weights;

/// For each tensor, in order: a handle, how many bytes it is of, and where in them the tensor begins.
#[derive(Serialize, Deserialize)]
pub(crate) struct Handles(Vec<(IpcHandle, usize, usize)>);

/// The writer's side: handles are made anew for each version, since memory is.
pub(crate) fn publish(weights: &Weights, reader: &Reader) {
    let handle = |(whole, start): (&Allocation, usize)| (whole.handle(), whole.len, start);
    let handles = weights.allocations().map(|allocation| handle(allocation.whole()));
    reader.ask(&Ask::Handles(Handles(handles.collect())));
}

/// The reader's: what it has opened is open until all is copied.
pub(crate) fn copy(caller: &DeviceContext, weights: &Weights, handles: &Handles) {
    let mut opened = BTreeMap::new();
    for (own, (handle, len, start)) in weights.allocations().zip(&handles.0) {
        let other = opened.entry(*handle).or_insert_with(|| caller.open_ipc(*handle, *len));
        caller.enqueue_copy((own, 0), (other, *start), own.len);
    }
    caller.synchronize();
}
