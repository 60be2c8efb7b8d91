/// A CUDA stream of the caller, by its handle.
///
/// `Stream::default()` is the default stream of the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stream(pub usize);
