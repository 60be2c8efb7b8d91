//! Stand-ins for systems other than Linux: every call returns `Unsupported`.
#![expect(unsafe_code, reason = "with GPUs it is for the caller to prove what these are given")]

use std::any::Any;
use std::convert::Infallible;
use std::io;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use tssd_format::Blob;

use crate::{CopyStats, Stream};
use tssd_store::device::BlobMut;
use tssd_store::{Error, ErrorKind, Result};

const UNSUPPORTED: &str = "this library supports GPUs on Linux only";

fn unsupported() -> Error {
    Error::new(ErrorKind::Unsupported, format_args!("no CUDA: {UNSUPPORTED}"))
}

/// A GPU that this process sees. It has no values on this system.
#[derive(Clone, Debug, PartialEq)]
pub struct Device(Infallible);

/// Memory of a device, such as that of a tensor's storage. It has no values on this system.
#[derive(Debug)]
pub struct DeviceMemory(Infallible);

/// Fences that the tensors of one call share. They contain nothing on this system.
#[derive(Debug, Default)]
pub struct StreamFences(());

/// Does nothing: this system has no CUDA.
pub fn register() {}

impl Device {
    /// Returns `Unsupported`.
    ///
    /// # Errors
    ///
    /// `Unsupported`.
    pub fn all() -> Result<Vec<Self>> {
        Err(unsupported())
    }

    /// Returns the UUID, which is the same in all processes.
    pub fn uuid(&self) -> String {
        match self.0 {}
    }

    /// Returns the product name.
    pub fn name(&self) -> &str {
        match self.0 {}
    }
}

impl DeviceMemory {
    /// Returns `Unsupported`.
    ///
    /// # Errors
    ///
    /// `Unsupported`.
    ///
    /// # Safety
    ///
    /// None: nothing is accessed.
    pub unsafe fn new(
        _pointer: u64,
        _len: u64,
        _stream: Stream,
        _owner: impl Send + Sync + 'static,
    ) -> Result<Self> {
        Err(unsupported())
    }

    /// Returns `Unsupported`.
    ///
    /// # Errors
    ///
    /// `Unsupported`.
    ///
    /// # Safety
    ///
    /// None: nothing is accessed.
    pub unsafe fn with_fences(
        _fences: &StreamFences,
        _pointer: u64,
        _len: u64,
        _stream: Stream,
        _owner: impl Send + Sync + 'static,
    ) -> Result<Self> {
        Err(unsupported())
    }

    /// Returns the device.
    pub fn device(&self) -> &Device {
        match self.0 {}
    }

    /// Counts the copies of this memory in `stats`, which other memory may share.
    #[must_use]
    pub fn with_stats(self, _stats: &Arc<Mutex<CopyStats>>) -> Self {
        match self.0 {}
    }

    /// Returns the copies from and to this memory so far.
    pub fn stats(&self) -> CopyStats {
        match self.0 {}
    }
}

impl Blob for DeviceMemory {
    fn size(&self) -> io::Result<u64> {
        match self.0 {}
    }

    fn read_exact_at(&self, _target: &mut [u8], _offset: u64) -> io::Result<()> {
        match self.0 {}
    }

    fn bytes(&self) -> Option<&Bytes> {
        match self.0 {}
    }

    fn as_any(&self) -> Option<&dyn Any> {
        match self.0 {}
    }
}

impl BlobMut for DeviceMemory {
    fn size(&self) -> u64 {
        match self.0 {}
    }

    fn write_all_at(&self, _bytes: &[u8], _offset: u64) -> io::Result<()> {
        match self.0 {}
    }
}
