//! In place of GPUs, in a library that is built without the feature `cuda`, or for another system than Linux.
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

const ABSENT: &str = "this library supports GPUs on Linux only";

fn absent() -> Error {
    Error::new(ErrorKind::Unsupported, format_args!("no CUDA: {ABSENT}"))
}

/// A GPU that this process sees: there is none.
#[derive(Clone, Debug, PartialEq)]
pub struct Device(Infallible);

/// Memory of a device, such as that of a tensor's storage: there is none.
#[derive(Debug)]
pub struct DeviceMemory(Infallible);

/// The moments that the tensors of one call wait for: there are none.
#[derive(Debug, Default)]
pub struct StreamFences(());

/// Registers nothing: there is no CUDA on this system.
pub fn register() {}

impl Device {
    /// All that this process sees.
    ///
    /// # Errors
    ///
    /// `Unsupported`.
    pub fn all() -> Result<Vec<Self>> {
        Err(absent())
    }

    /// What it is known by, in all processes and whatever they call it.
    pub fn uuid(&self) -> String {
        match self.0 {}
    }

    /// What its maker calls it.
    pub fn name(&self) -> &str {
        match self.0 {}
    }
}

impl DeviceMemory {
    /// So many bytes from a pointer on.
    ///
    /// # Errors
    ///
    /// `Unsupported`.
    ///
    /// # Safety
    ///
    /// With GPUs, what this is given must be true.
    pub unsafe fn new(
        _pointer: u64,
        _len: u64,
        _stream: Stream,
        _owner: impl Send + Sync + 'static,
    ) -> Result<Self> {
        Err(absent())
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
        Err(absent())
    }

    /// The device.
    pub fn device(&self) -> &Device {
        match self.0 {}
    }

    /// The same, whose bytes are counted with those of others.
    #[must_use]
    pub fn with_stats(self, _stats: &Arc<Mutex<CopyStats>>) -> Self {
        match self.0 {}
    }

    /// How its bytes have come, or gone there, until now.
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

    fn kind(&self) -> Option<&dyn Any> {
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
