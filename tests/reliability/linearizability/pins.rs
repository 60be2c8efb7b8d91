//! Labels: each keeps its version from the moment at which it is set until it is removed.
//!
//! Each label is set once. The client that has set it removes it later, so its moments have an
//! order.

use std::collections::BTreeMap;

use super::history::{Call, Operation, Response};

/// A label of a version.
struct Pin {
    /// Index of the operation that sets it.
    index: usize,
    asked: u64,
    /// When it was set at the latest. `u64::MAX` if the outcome is unknown.
    answered: u64,
    is_known: bool,
    /// Earliest and latest time of the removal.
    released: (u64, u64),
}

/// All labels, by the number of their versions.
pub(crate) struct Pins(BTreeMap<u64, Vec<Pin>>);

impl Pins {
    pub(crate) fn from_operations(operations: &[Operation]) -> Self {
        let mut released: BTreeMap<u32, (u64, u64)> = BTreeMap::new();
        for operation in operations {
            if let Call::Unpin(label) = operation.call {
                let answered = operation.response.map_or(u64::MAX, |_| operation.returned_at);
                // A client whose connection was cut may repeat the call.
                let moments = released.entry(label).or_insert((u64::MAX, u64::MAX));
                *moments = (operation.invoked_at.min(moments.0), answered.min(moments.1));
            }
        }
        let mut pins: BTreeMap<u64, Vec<Pin>> = BTreeMap::new();
        for (index, operation) in operations.iter().enumerate() {
            let Operation { call, invoked_at, returned_at, response, .. } = *operation;
            let Call::Pin(number, label) = call else { continue };
            if response != Some(Response::NotFound) {
                let released = released.get(&label).copied().unwrap_or((u64::MAX, u64::MAX));
                let is_known = response.is_some();
                let answered = if is_known { returned_at } else { u64::MAX };
                pins.entry(number).or_default().push(Pin {
                    index,
                    asked: invoked_at,
                    answered,
                    is_known,
                    released,
                });
            }
        }
        Self(pins)
    }

    fn labels_of(&self, number: u64) -> &[Pin] {
        self.0.get(&number).map_or(&[], Vec::as_slice)
    }

    /// Returns whether all labels of a version may have been removed by this time.
    pub(crate) fn may_be_released(&self, number: u64, now: u64) -> bool {
        self.labels_of(number).iter().all(|pin| !pin.is_known || pin.released.0 <= now)
    }

    /// Returns whether a label may keep a displaced version for a read.
    ///
    /// The label was set when the version was visible, or when another label kept it.
    pub(crate) fn may_keep(
        &self,
        number: u64,
        index: usize,
        read: &Operation,
        was_visible: impl Fn(usize) -> bool,
    ) -> bool {
        let pins = self.labels_of(number);
        // Times from which on a label must have kept the version.
        let (mut pending, mut visited) = (vec![read.invoked_at], vec![index]);
        while let Some(asked) = pending.pop() {
            for pin in pins {
                if visited.contains(&pin.index)
                    || pin.asked > read.returned_at
                    || pin.released.1 < asked
                {
                    continue;
                }
                let is_certain = pin.is_known && pin.answered <= read.returned_at;
                if is_certain || was_visible(pin.index) {
                    return true;
                }
                visited.push(pin.index);
                pending.push(pin.asked);
            }
        }
        false
    }
}
