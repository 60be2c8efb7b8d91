//! Versions that labels hold: from the moment at which one is given to the one at which it is taken away.
//!
//! Each label is given once, and taken away by whoever has given it, after that: its moments have an order.

use std::collections::BTreeMap;

use super::history::{Answer, Call, Operation};

/// A label at a version.
struct Pin {
    /// Which operation gives it.
    index: usize,
    asked: u64,
    /// When it was given for sure; never, if nobody knows whether it was.
    answered: u64,
    is_known: bool,
    /// When it was taken away: not before the one, and after the other for sure.
    released: (u64, u64),
}

/// All labels, by the numbers of their versions.
pub(crate) struct Pins(BTreeMap<u64, Vec<Pin>>);

impl Pins {
    pub(crate) fn of(operations: &[Operation]) -> Self {
        let mut released: BTreeMap<u32, (u64, u64)> = BTreeMap::new();
        for operation in operations {
            if let Call::Unpin(label) = operation.call {
                let answered = operation.answer.map_or(u64::MAX, |_| operation.answered);
                // Whoever was cut off may ask again.
                let moments = released.entry(label).or_insert((u64::MAX, u64::MAX));
                *moments = (operation.asked.min(moments.0), answered.min(moments.1));
            }
        }
        let mut pins: BTreeMap<u64, Vec<Pin>> = BTreeMap::new();
        for (index, operation) in operations.iter().enumerate() {
            let Operation { call, asked, answered, answer, .. } = *operation;
            let Call::Pin(number, label) = call else { continue };
            if answer != Some(Answer::Nothing) {
                let released = released.get(&label).copied().unwrap_or((u64::MAX, u64::MAX));
                let is_known = answer.is_some();
                let answered = if is_known { answered } else { u64::MAX };
                pins.entry(number).or_default().push(Pin {
                    index,
                    asked,
                    answered,
                    is_known,
                    released,
                });
            }
        }
        Self(pins)
    }

    fn of_number(&self, number: u64) -> &[Pin] {
        self.0.get(&number).map_or(&[], Vec::as_slice)
    }

    /// Whether all labels of a version may have been taken away by then.
    pub(crate) fn are_released(&self, number: u64, now: u64) -> bool {
        self.of_number(number).iter().all(|pin| !pin.is_known || pin.released.0 <= now)
    }

    /// Whether a label may hold a displaced version for a reader: one that was given when the version was there, by
    /// itself or by another label.
    pub(crate) fn hold(
        &self,
        number: u64,
        index: usize,
        read: &Operation,
        was_there: impl Fn(usize) -> bool,
    ) -> bool {
        let pins = self.of_number(number);
        // From which moments on it has to be held.
        let (mut open, mut tried) = (vec![read.asked], vec![index]);
        while let Some(asked) = open.pop() {
            for pin in pins {
                if tried.contains(&pin.index) || pin.asked > read.answered || pin.released.1 < asked
                {
                    continue;
                }
                let is_proven = pin.is_known && pin.answered <= read.answered;
                if is_proven || was_there(pin.index) {
                    return true;
                }
                tried.push(pin.index);
                open.push(pin.asked);
            }
        }
        false
    }
}
