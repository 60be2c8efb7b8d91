//! Host memory that the driver has pinned: GPUs copy from and to it by DMA.

use std::any::Any;
use std::ops::Range;

use tssd_store::device::host_maps::{self, HostMap};

use crate::driver::{self, Context};

/// State of this crate for a map of the store.
enum PinState {
    Pinned {
        _registration: Registration,
    },
    /// The map could not be pinned, with the reason.
    Pageable(String),
}

/// The registration of a pinned map. The store drops it before it unmaps the memory.
struct Registration {
    context: Context,
    start: usize,
}

impl Drop for Registration {
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.enter() {
            driver::unpin(self.start);
        }
    }
}

/// Pins the map of the store that contains `memory`, once. The error is the reason why it is pageable.
pub(crate) fn pin(context: Context, memory: &Range<usize>) -> Result<(), String> {
    let pinned = host_maps::with_map(memory, |map| pin_map(context, map));
    pinned.unwrap_or_else(|| {
        Err("it is no memory of a daemon that this process has mapped".to_owned())
    })
}

#[expect(unsafe_code, reason = "pinned memory must stay mapped")]
fn pin_map(context: Context, map: HostMap<'_>) -> Result<(), String> {
    let HostMap { start, len, is_writable, driver_state } = map;
    let known = driver_state.as_ref().and_then(|state| (&**state as &dyn Any).downcast_ref());
    match known {
        Some(PinState::Pinned { .. }) => return Ok(()),
        Some(PinState::Pageable(reason)) => return Err(reason.clone()),
        None => {}
    }
    let guard = context.enter().map_err(|error| error.to_string())?;
    // SAFETY: the memory is mapped until the store removes the map. It drops `Registration` first, which unpins the
    // memory.
    let pinned = unsafe { driver::pin(start, len, is_writable) };
    drop(guard);
    let state = match &pinned {
        Ok(()) => PinState::Pinned { _registration: Registration { context, start } },
        Err(reason) => PinState::Pageable(reason.clone()),
    };
    *driver_state = Some(Box::new(state));
    pinned
}
