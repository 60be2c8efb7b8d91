//! What a caller's work on a device is in order by.

/// A stream of the caller's, by the driver's handle; `Stream::default()` is the device's default stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stream(pub usize);
