//! Rollback: makes an old version the newest one, without moving its data.

use std::sync::Arc;

use super::command::Outcome;
use super::identity::Timestamp;
use super::refusal::Refusal;
use super::selector::Selector;
use super::state::State;
use super::version::{Status, Version, VersionPosition};

impl State {
    /// Gives a version the next number in a new epoch, or the position that its source has.
    ///
    /// Its data stays where it is. Nothing changes if it is the newest visible version already, or has that position.
    pub(super) fn roll_back(
        &mut self,
        selector: &Selector,
        position: Option<VersionPosition>,
        now: Timestamp,
    ) -> Result<Outcome, Refusal> {
        let version = self.select(selector)?;
        let (id, old) = (version.id, version.position());
        let is_newest = self.head().is_some_and(|head| head.id == id);
        if position.map_or(is_newest, |position| position == old) {
            return Ok(Outcome::RolledBack { id });
        }
        // A bucket refuses a copy of an older epoch, so the upload of any version would fail.
        let uploading = self.visible().chain([version]).find(|it| it.is_upload_pending());
        if let Some(Version { number, .. }) = uploading {
            return Err(Refusal::UploadPending { number: *number });
        }
        let new = match position {
            Some(position) => self.refuse_older_position(position)?,
            None => self.position_after_highest()?,
        };
        let manifest = version.manifest().cloned().ok_or(Refusal::UnknownVersion { id })?;
        let moved = Version {
            epoch: new.epoch,
            number: new.number,
            stored_at: Some(version.stored_position()),
            rewind_from: None,
            replaces_ended_runs: false,
            // At a position of its own, it is no copy, and retires older versions as any version of this store.
            is_copy: version.is_copy && position.is_some(),
            status: Status::Visible { since: now, manifest },
            ..version.clone()
        };
        self.versions.retain(|version| version.id != id);
        let index = self.versions.partition_point(|version| version.position() < new);
        self.versions.insert(index, Arc::new(moved));
        self.make_newest(id);
        Ok(Outcome::RolledBack { id })
    }

    /// Returns the position after the highest number, in a new epoch.
    fn position_after_highest(&self) -> Result<VersionPosition, Refusal> {
        let number = self.highest.unwrap_or(0).checked_add(1).ok_or(Refusal::NumbersExhausted)?;
        Ok(VersionPosition { epoch: self.next_epoch()?, number })
    }

    fn refuse_older_position(&self, position: VersionPosition) -> Result<VersionPosition, Refusal> {
        let highest = self.highest.map(|number| VersionPosition { epoch: self.epoch, number });
        if Some(position) > highest {
            return Ok(position);
        }
        let highest = self.highest.unwrap_or_default();
        Err(Refusal::VersionNotNewer { number: position.number, highest, earlier: None })
    }
}
