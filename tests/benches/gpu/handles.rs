//! What torch does between processes (`reduce_tensor`), without Python: a handle for each tensor.

use serde::{Deserialize, Serialize};
use tssd_tests::caller::{Caller, Handle};

use crate::reader::{Ask, Reader};
use crate::weights::Weights;

/// One for each tensor, in order.
#[derive(Serialize, Deserialize)]
pub(crate) struct Handles(Vec<Handle>);

/// The writer's side: handles are made anew for each version, since memory is.
pub(crate) fn publish(weights: &Weights, reader: &Reader) {
    let handles = weights.allocations().map(|allocation| allocation.handle());
    reader.ask(&Ask::Handles(Handles(handles.collect())));
}

/// The reader's: all are open until all is copied.
pub(crate) fn copy(caller: &Caller, weights: &Weights, handles: &Handles) {
    let mut opened = Vec::new();
    for (own, handle) in weights.allocations().zip(&handles.0) {
        let other = caller.open(*handle, own.len);
        caller.copy((own, 0), (&other, 0), own.len);
        opened.push(other);
    }
    caller.wait();
}
