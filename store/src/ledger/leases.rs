//! Leases and pins, which hold the data of a version.

use super::command::Outcome;
use super::identity::{LeaseId, Timestamp};
use super::refusal::{PendingVersion, Reason, Refusal};
use super::selector::{Label, Selector};
use super::state::{Lease, State};
use super::version::{Status, Version};

impl State {
    pub(super) fn lease_version(
        &mut self,
        selector: &Selector,
        lease: LeaseId,
        holder: String,
        until: Timestamp,
    ) -> Result<Outcome, Refusal> {
        if let Some(held) = self.leases.get_mut(&lease) {
            if held.expired {
                return Err(Refusal::LeaseExpired { lease });
            }
            held.expires_at = held.expires_at.max(until);
            let id = held.version;
            return lease_outcome(self.version_by_id_mut(id)?);
        }
        let version = self.select(selector)?;
        let outcome = lease_outcome(version)?;
        let held = Lease { version: version.id, holder, expires_at: until, expired: false };
        self.leases.insert(lease, held);
        Ok(outcome)
    }

    pub(super) fn release(&mut self, lease: LeaseId) -> Outcome {
        self.leases.remove(&lease);
        Outcome::Done
    }

    pub(super) fn pin(&mut self, selector: &Selector, label: Label) -> Result<Outcome, Refusal> {
        let Version { id, number, .. } = *self.select(selector)?;
        self.pins.insert(label.into(), id);
        self.retire_surplus();
        Ok(Outcome::Pinned { id, number })
    }

    pub(super) fn unpin(&mut self, label: &str) -> Outcome {
        self.pins.remove(label);
        self.retire_surplus();
        Outcome::Done
    }

    /// Returns the version that a selector selects. It is visible, unless a label selects it.
    ///
    /// # Errors
    ///
    /// [`Refusal::NotFound`] with the newest visible and open versions, or [`Refusal::Dropped`] if the version is lost.
    pub fn select(&self, selector: &Selector) -> Result<&Version, Refusal> {
        self.version(selector).ok_or_else(|| {
            self.lost_refusal(selector).unwrap_or_else(|| Refusal::NotFound {
                selector: selector.clone(),
                newest: self.head().map(|version| version.number),
                newest_open: self
                    .open()
                    .next_back()
                    .map(|open| PendingVersion { number: open.number, missing: open.missing() }),
            })
        })
    }

    /// Returns the refusal for a version that was lost with its hosts: readers may have seen it before.
    fn lost_refusal(&self, selector: &Selector) -> Option<Refusal> {
        let known = self.versions().rev().filter_map(|version| match &version.status {
            Status::Dropped { reason } => Some((version.id, version.number, reason)),
            _ => None,
        });
        let ended = self.tombstones.iter().rev();
        let ended =
            ended.filter_map(|ended| Some((ended.id, ended.number, ended.reason.as_ref()?)));
        let mut lost = known.chain(ended).filter(|(id, number, reason)| {
            let is_selected = match selector {
                Selector::Newest => Some(*number) == self.highest,
                Selector::Number(wanted) => number == wanted,
                Selector::Id(wanted) => id == wanted,
                // The pin ends with the version.
                Selector::Label(_) => false,
            };
            is_selected && matches!(reason, Reason::Lost { .. })
        });
        let (_, number, reason) = lost.next()?;
        Some(Refusal::Dropped { number, reason: reason.clone() })
    }
}

/// Returns the answer to a reader. A version that was never visible is refused as [`Refusal::UnknownVersion`].
fn lease_outcome(version: &Version) -> Result<Outcome, Refusal> {
    let Version { id, epoch, number, .. } = *version;
    let manifest = version.manifest().cloned().ok_or(Refusal::UnknownVersion { id })?;
    Ok(Outcome::Leased { id, epoch, number, manifest })
}
