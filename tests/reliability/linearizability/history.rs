//! Histories: the calls of a key, their times and their responses.

use std::io::Write;

use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

/// One call of a key, with its response.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Operation {
    /// Number of the key.
    pub(crate) key: u8,
    /// Time of the invocation, in nanoseconds.
    pub(crate) invoked_at: u64,
    /// Time of the response, in nanoseconds. Without one, the time until which it may have taken effect.
    pub(crate) returned_at: u64,
    pub(crate) call: Call,
    /// `None` if the outcome is unknown: the connection was cut, or the client killed.
    pub(crate) response: Option<Response>,
}

/// Returns the position of a version as one number. Each epoch is above all earlier ones.
pub(crate) fn position(epoch: u32, number: u64) -> u64 {
    u64::from(epoch) << EPOCH_SHIFT | number
}

/// Returns the version number at a position.
pub(crate) fn version_number(place: u64) -> u64 {
    place & ((1 << EPOCH_SHIFT) - 1)
}

const EPOCH_SHIFT: u32 = 32;

/// A call. Versions are named by position, which is the number as long as the key is not rewound.
///
/// A put is named by its one writer, which no other put has.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Call {
    Put(u32),
    /// Reads the newest version: its contents, or its head.
    GetNewest,
    /// Reads the version of a number.
    GetVersion(u64),
    /// Waits for this number or a higher one, with a timeout in nanoseconds.
    Wait(u64, u64),
    /// Deletes the version of a number that the same client has observed.
    Delete(u64),
    /// Puts a part of the version of a number, as one of `of` writers.
    Part {
        number: u64,
        writer: u32,
        writers: u32,
    },
    /// Puts a label, which is used once, on the version of a number.
    Pin(u64, u32),
    /// Removes a label. Only the client that has set it does so.
    Unpin(u32),
}

impl Call {
    /// Returns the writer of a part.
    pub(crate) fn writer(self) -> Option<u32> {
        if let Self::Part { writer, .. } = self { Some(writer) } else { None }
    }
}

/// The response of a call.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Response {
    /// The put is visible as the version of this number.
    Put(u64),
    /// The put was refused or overtaken. No client ever observes it.
    Failed,
    /// The version of this number, which is this put.
    Found(u64, u32),
    /// No such version exists.
    NotFound,
    Deleted,
    /// The part is stored, and others are missing.
    PartsMissing,
    /// The label is set, or removed.
    Done,
    /// The version of this number is a mixture of puts.
    Torn(u64),
}

impl Operation {
    /// Returns the number and the put of a version that the operation has observed.
    pub(crate) fn observed_version(&self) -> Option<(u64, u32)> {
        match (self.call, self.response?) {
            (Call::Part { .. }, Response::Put(number)) => Some((number, shared_put_id(number))),
            (Call::Put(put), Response::Put(number)) | (_, Response::Found(number, put)) => {
                Some((number, put))
            }
            _ => None,
        }
    }

    /// Returns whether the call may have an effect without a response.
    fn changes(&self) -> bool {
        !matches!(self.call, Call::GetNewest | Call::GetVersion(_) | Call::Wait(..))
    }
}

/// Returns the name of the put of a version of several writers.
pub(crate) fn shared_put_id(number: u64) -> u32 {
    u32::try_from(number).unwrap()
}

/// Returns nanoseconds of the monotonic clock, which all processes of a host share.
pub(crate) fn monotonic_nanos() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec.cast_unsigned() * 1_000_000_000 + now.tv_nsec.cast_unsigned()
}

/// Logs the calls of one thread.
///
/// A call that changes something is also logged before its invocation, so that it is known if its
/// client is killed.
pub(crate) struct Recorder<W>(pub(crate) W);

impl<W: Write> Recorder<W> {
    /// Executes a call and logs it.
    pub(crate) fn record(
        &mut self,
        key: u8,
        call: Call,
        work: impl FnOnce() -> Option<Response>,
    ) -> Option<Response> {
        let asked = monotonic_nanos();
        let mut operation =
            Operation { key, invoked_at: asked, returned_at: u64::MAX, call, response: None };
        if operation.changes() {
            self.write(&operation);
        }
        operation.response = work();
        if operation.response.is_some() {
            operation.returned_at = monotonic_nanos();
            self.write(&operation);
        }
        operation.response
    }

    /// Writes a line at once. If the process is killed, the line is whole or has no end.
    fn write(&mut self, operation: &Operation) {
        let mut line = serde_json::to_vec(operation).unwrap();
        line.push(b'\n');
        self.0.write_all(&line).unwrap();
    }
}

/// Parses what one thread has logged.
pub(crate) fn parse_log(text: &str) -> Vec<Operation> {
    let mut operations: Vec<Operation> = Vec::new();
    for line in text.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n')) {
        let operation: Operation = serde_json::from_str(line).unwrap();
        // A call was logged at its invocation, and again with its response.
        operations
            .pop_if(|last| last.response.is_none() && last.invoked_at == operation.invoked_at);
        operations.push(operation);
    }
    operations
}
