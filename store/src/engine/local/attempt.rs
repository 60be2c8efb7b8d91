//! A put between begin and commit.

use async_trait::async_trait;

use super::LocalController;
use crate::blob::{Part, Reservation, Volume};
use crate::control::{Committed, Contribution, OnDevice, Place};
use crate::error::{Error, ErrorKind, Result};
use crate::io::sync::Handle;
use crate::ledger::Digest;

/// A contribution to a version. One that is dropped undecided, because its future was, withdraws
/// itself.
pub(super) struct Attempt {
    controller: LocalController,
    place: Option<Place>,
    /// The lengths of its archives in bytes; the last one is being written.
    lens: Vec<u64>,
    /// None if the archive is stored already.
    reservation: Option<Box<dyn Reservation>>,
}

impl Attempt {
    pub(super) fn new(controller: LocalController, place: Place, file_len: u64) -> Self {
        Self { controller, place: Some(place), lens: vec![file_len], reservation: None }
    }

    /// Makes room for the last archive.
    pub(super) async fn reserve(&mut self) -> Result<()> {
        let (Some(place), Some(len)) = (&self.place, self.lens.last().copied()) else {
            return Ok(());
        };
        let (path, durability) = (place.path(self.lens.len() - 1), place.durability);
        let reserve = move |volume: &dyn Volume| volume.reserve(&path, len, durability);
        let reserved = self.controller.on_disk(reserve).await;
        match reserved {
            Ok(reservation) => self.reservation = Some(reservation),
            Err(error) => return Err(self.end(error).await),
        }
        Ok(())
    }

    /// Takes back what is not committed, and says why.
    async fn end(&mut self, error: Error) -> Error {
        let Some(place) = self.place.take() else { return error };
        self.reservation = None;
        let error = self.controller.reason(&place, error).await;
        self.controller.withdraw(&place, self.lens.len()).await;
        error
    }

    async fn seal(&mut self) -> Result<()> {
        let Some(reservation) = self.reservation.take() else { return Ok(()) };
        if self.controller.on_disk(|_| reservation.seal()).await? {
            return Ok(());
        }
        Err(Error::new(ErrorKind::Busy, "an archive of this name is there already"))
    }
}

#[async_trait]
impl Contribution for Attempt {
    fn parts(&mut self, lens: &[u64]) -> Vec<Box<dyn Part + '_>> {
        self.reservation.as_mut().map_or_else(Vec::new, |reservation| reservation.parts(lens))
    }

    async fn extend(&mut self, file_len: u64, _device: Option<OnDevice>) -> Result<()> {
        let is_stored = self.reservation.is_none();
        if let Err(error) = self.seal().await {
            return Err(self.end(error).await);
        }
        self.lens.push(file_len);
        if is_stored { Ok(()) } else { self.reserve().await }
    }

    async fn commit(mut self: Box<Self>, digest: Digest) -> Result<Committed> {
        let place = self.place.clone().expect("a contribution ends once");
        if let Err(error) = self.seal().await {
            // Files are swept when another try of the same put is part of a complete version, and when the
            // version has ended: then the ledger says what became of it, wherever archives are.
            if !self.controller.is_decided(&place).await {
                return Err(self.end(error).await);
            }
        }
        match self.controller.commit(&place, digest, &self.lens).await {
            Ok(progress) => {
                self.place = None;
                Ok(Committed { progress, upload: None })
            }
            Err(error) => Err(self.end(error).await),
        }
    }

    async fn withdraw(mut self: Box<Self>, error: Error) -> Error {
        self.end(error).await
    }
}

impl Drop for Attempt {
    fn drop(&mut self) {
        let Ok(runtime) = Handle::try_current() else { return };
        if let Some(place) = self.place.take() {
            let (controller, count) = (self.controller.clone(), self.lens.len());
            drop(runtime.spawn(async move { controller.withdraw(&place, count).await }));
        }
    }
}
