//! A put between begin and commit.

use async_trait::async_trait;

use super::local::{LocalController, Place};
use super::{Contribution, Progress};
use crate::error::{Error, ErrorKind, Result};
use crate::ledger::Digest;
use crate::volume::{Part, Reservation, Volume};

/// A contribution to a version. One that is dropped undecided, because its future was, withdraws
/// itself.
pub(super) struct Attempt {
    controller: LocalController,
    place: Option<Place>,
    file_len: u64,
    /// None if the archive is stored already.
    reservation: Option<Box<dyn Reservation>>,
}

impl Attempt {
    pub(super) fn new(controller: LocalController, place: Place, file_len: u64) -> Self {
        Self { controller, place: Some(place), file_len, reservation: None }
    }

    /// Makes room for the archive.
    pub(super) async fn reserve(&mut self) -> Result<()> {
        let Some(place) = &self.place else { return Ok(()) };
        let (path, len, durability) = (place.path(), self.file_len, place.durability);
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
        self.controller.withdraw(&place).await;
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

    async fn commit(mut self: Box<Self>, digest: Digest) -> Result<Progress> {
        if let Err(error) = self.seal().await {
            return Err(self.end(error).await);
        }
        let place = self.place.clone().expect("a contribution ends once");
        match self.controller.commit(&place, digest, self.file_len).await {
            Ok(progress) => {
                self.place = None;
                Ok(progress)
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
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        if let Some(place) = self.place.take() {
            let controller = self.controller.clone();
            drop(runtime.spawn(async move { controller.withdraw(&place).await }));
        }
    }
}
