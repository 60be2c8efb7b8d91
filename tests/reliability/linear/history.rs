//! Histories: what was asked of a key, when, and what came of it.

use std::io::Write;

use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

/// One thing that was asked of one key.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Operation {
    /// The number of the key.
    pub(crate) key: u8,
    /// When it was asked, in nanoseconds.
    pub(crate) asked: u64,
    /// When the answer was there; without one, until when it may have had its effect.
    pub(crate) answered: u64,
    pub(crate) call: Call,
    /// None if nobody knows whether it was done: the connection was cut, or the client killed.
    pub(crate) answer: Option<Answer>,
}

/// The place of a version, as one number: each epoch is above all before it.
pub(crate) fn place(epoch: u32, number: u64) -> u64 {
    u64::from(epoch) << EPOCH | number
}

/// The number of a version that is at a place.
pub(crate) fn number_at(place: u64) -> u64 {
    place & ((1 << EPOCH) - 1)
}

const EPOCH: u32 = 32;

/// What is asked. Versions are named by their places, which are their numbers as long as nobody rewinds the key.
/// A put is named by its one writer, which no other put has.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Call {
    Put(u32),
    /// The newest version: its contents, or its head.
    Newest,
    /// The version of a number.
    Numbered(u64),
    /// The newest version as soon as it has this number or a higher one, for so many nanoseconds.
    Wait(u64, u64),
    /// Deletes the version of a number that the same client has seen.
    Delete(u64),
    /// A part of the version of a number, which all writers put together: as which one, of how many.
    Part {
        number: u64,
        writer: u32,
        of: u32,
    },
    /// Holds the version of a number under a label that is used once.
    Pin(u64, u32),
    /// By whoever has pinned it.
    Unpin(u32),
}

impl Call {
    /// Of several writers the one that puts its part.
    pub(crate) fn writer(self) -> Option<u32> {
        if let Self::Part { writer, .. } = self { Some(writer) } else { None }
    }
}

/// What came of it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Answer {
    /// The put is visible as the version of this number.
    Put(u64),
    /// The put was refused or overtaken: nobody will ever see it.
    Failed,
    /// The version of this number, which is this put.
    Found(u64, u32),
    /// There is no such version.
    Nothing,
    Deleted,
    /// The part is there, and others are missing.
    Waits,
    /// The label holds the version, or does no longer.
    Done,
    /// The version of this number is no one's put, but a mixture.
    Torn(u64),
}

impl Operation {
    /// The number of a version that it has shown to be there, and which put that is.
    pub(crate) fn seen(&self) -> Option<(u64, u32)> {
        match (self.call, self.answer?) {
            (Call::Part { .. }, Answer::Put(number)) => Some((number, name_of(number))),
            (Call::Put(put), Answer::Put(number)) | (_, Answer::Found(number, put)) => {
                Some((number, put))
            }
            _ => None,
        }
    }

    /// Whether it may have an effect though it was never answered.
    fn changes(&self) -> bool {
        !matches!(self.call, Call::Newest | Call::Numbered(_) | Call::Wait(..))
    }
}

/// What a version is named by that several writers put together.
pub(crate) fn name_of(number: u64) -> u32 {
    u32::try_from(number).unwrap()
}

/// Nanoseconds of the one clock that all processes of a host have.
pub(crate) fn now() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec.cast_unsigned() * 1_000_000_000 + now.tv_nsec.cast_unsigned()
}

/// Writes down what one thread asks. What changes something is written before it is asked too, so that it
/// is known of a client that is killed.
pub(crate) struct Recorder<W>(pub(crate) W);

impl<W: Write> Recorder<W> {
    /// Does something, and writes it down.
    pub(crate) fn record(
        &mut self,
        key: u8,
        call: Call,
        work: impl FnOnce() -> Option<Answer>,
    ) -> Option<Answer> {
        let asked = now();
        let mut operation = Operation { key, asked, answered: u64::MAX, call, answer: None };
        if operation.changes() {
            self.write(&operation);
        }
        operation.answer = work();
        if operation.answer.is_some() {
            operation.answered = now();
            self.write(&operation);
        }
        operation.answer
    }

    /// A line in one piece: whoever is killed leaves it whole, or without its end.
    fn write(&mut self, operation: &Operation) {
        let mut line = serde_json::to_vec(operation).unwrap();
        line.push(b'\n');
        self.0.write_all(&line).unwrap();
    }
}

/// What one thread has written down.
pub(crate) fn read(text: &str) -> Vec<Operation> {
    let mut operations: Vec<Operation> = Vec::new();
    for line in text.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n')) {
        let operation: Operation = serde_json::from_str(line).unwrap();
        // It was written when it was asked, and now again with its answer.
        operations.pop_if(|last| last.answer.is_none() && last.asked == operation.asked);
        operations.push(operation);
    }
    operations
}
