//! A contribution to a version, from begin to commit.

use async_trait::async_trait;

use super::LocalController;
use crate::blob::{Part, Reservation, Volume};
use crate::control::{ArchivePlacement, CommitResult, Contribution, DeviceMemoryRequest};
use crate::error::{Error, ErrorKind, Result};
use crate::io::sync::Handle;
use crate::ledger::ArchiveDigest;

/// A contribution to a version.
///
/// Dropping it before it is committed or withdrawn withdraws it in the background.
pub(super) struct WriteTransaction {
    controller: LocalController,
    place: Option<ArchivePlacement>,
    /// Lengths of the archives in bytes. The last archive is being written.
    lens: Vec<u64>,
    /// `None` if the archive is stored already.
    reservation: Option<Box<dyn Reservation>>,
}

impl WriteTransaction {
    pub(super) fn new(controller: LocalController, place: ArchivePlacement, file_len: u64) -> Self {
        Self { controller, place: Some(place), lens: vec![file_len], reservation: None }
    }

    /// Reserves room for the last archive.
    pub(super) async fn reserve(&mut self) -> Result<()> {
        let (Some(place), Some(len)) = (&self.place, self.lens.last().copied()) else {
            return Ok(());
        };
        let (path, durability) = (place.path(self.lens.len() - 1), place.durability);
        let reserve = move |volume: &dyn Volume| volume.reserve(&path, len, durability);
        let reserved = self.controller.run_on_volume(reserve).await;
        match reserved {
            Ok(reservation) => self.reservation = Some(reservation),
            Err(error) => return Err(self.abort(error).await),
        }
        Ok(())
    }

    /// Withdraws what is not committed, and returns the reason why the put failed.
    async fn abort(&mut self, error: Error) -> Error {
        let Some(place) = self.place.take() else { return error };
        self.reservation = None;
        let error = self.controller.failure_cause(&place, error).await;
        self.controller.withdraw(&place, self.lens.len()).await;
        error
    }

    async fn seal(&mut self) -> Result<()> {
        let Some(reservation) = self.reservation.take() else { return Ok(()) };
        if self.controller.run_on_volume(|_| reservation.seal()).await? {
            return Ok(());
        }
        Err(Error::new(ErrorKind::Busy, "an archive of this name is there already"))
    }
}

#[async_trait]
impl Contribution for WriteTransaction {
    fn parts(&mut self, lens: &[u64]) -> Vec<Box<dyn Part + '_>> {
        self.reservation.as_mut().map_or_else(Vec::new, |reservation| reservation.parts(lens))
    }

    async fn extend(&mut self, file_len: u64, _device: Option<DeviceMemoryRequest>) -> Result<()> {
        let is_stored = self.reservation.is_none();
        if let Err(error) = self.seal().await {
            return Err(self.abort(error).await);
        }
        self.lens.push(file_len);
        if is_stored { Ok(()) } else { self.reserve().await }
    }

    async fn commit(mut self: Box<Self>, digest: ArchiveDigest) -> Result<CommitResult> {
        let place = self.place.clone().expect("a contribution ends once");
        if let Err(error) = self.seal().await {
            // The files of this attempt are swept if the version becomes visible with another attempt of the same put,
            // or ends. In both cases the ledger knows the result without them.
            if !self.controller.is_decided(&place).await {
                return Err(self.abort(error).await);
            }
        }
        match self.controller.commit(&place, digest, &self.lens).await {
            Ok(progress) => {
                self.place = None;
                Ok(CommitResult { progress, upload: None })
            }
            Err(error) => Err(self.abort(error).await),
        }
    }

    async fn withdraw(mut self: Box<Self>, error: Error) -> Error {
        self.abort(error).await
    }
}

impl Drop for WriteTransaction {
    fn drop(&mut self) {
        let Ok(runtime) = Handle::try_current() else { return };
        if let Some(place) = self.place.take() {
            let (controller, count) = (self.controller.clone(), self.lens.len());
            drop(runtime.spawn(async move { controller.withdraw(&place, count).await }));
        }
    }
}
