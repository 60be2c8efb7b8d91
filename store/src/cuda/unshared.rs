//! What processes share of GPUs, where there are none.

use std::convert::Infallible;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use tssd_format::{Fill, Filled, Layout};

use super::{ABSENT, absent};
use crate::error::Result;
use crate::ring::Loan;

/// Memory of a GPU that processes share: there is none.
pub(crate) struct DeviceSegment(Infallible);

/// An archive that is written there.
pub(crate) struct Filling(Infallible);

/// What of an archive is on its way from GPUs: nothing.
#[derive(Default)]
pub(crate) struct Arriving(());

/// The memory of a part, to which they write nothing.
pub(crate) struct Landing<'a>(&'a mut [u8]);

/// Why nothing of an archive is put to the memory of a GPU.
pub(crate) fn home(_layout: &Layout) -> std::result::Result<String, String> {
    Err(ABSENT.to_owned())
}

/// Why nothing of an archive is lent.
#[expect(clippy::unnecessary_wraps, reason = "with the feature it can fail")]
pub(crate) fn lend(_layout: &Layout) -> Result<std::result::Result<Loan, String>> {
    Ok(Err(ABSENT.to_owned()))
}

impl DeviceSegment {
    pub(crate) fn create(_uuid: &str, _len: u64) -> Result<(Arc<Self>, OwnedFd)> {
        Err(absent())
    }

    pub(crate) fn import(_uuid: &str, _memory: &OwnedFd, _len: u64) -> Result<Arc<Self>> {
        Err(absent())
    }

    pub(crate) fn borrow(_uuid: &str, _loan: &Loan, _len: u64) -> Result<Arc<Self>> {
        Err(absent())
    }

    pub(crate) fn read(&self, _target: &mut [u8], _offset: u64) -> Result<()> {
        match self.0 {}
    }
}

#[expect(
    clippy::unnecessary_wraps,
    clippy::unused_self,
    reason = "with the feature it does something"
)]
impl<'a> Landing<'a> {
    pub(crate) fn new(part: &'a mut [u8]) -> Self {
        Self(part)
    }

    pub(crate) fn begin(&mut self, _job: &Fill, Arriving(()): &Arriving) -> Result<()> {
        Ok(())
    }

    pub(crate) fn land(&mut self) -> Result<(&mut [u8], bool)> {
        Ok((self.0, false))
    }
}

impl Filling {
    pub(crate) fn new(segment: &Arc<DeviceSegment>) -> Result<Self> {
        match segment.0 {}
    }

    pub(crate) fn fill(&self, _job: &Fill, _head: Option<&mut [u8]>) -> Result<Filled> {
        match self.0 {}
    }

    pub(crate) fn finish(&self) -> Result<()> {
        match self.0 {}
    }
}
