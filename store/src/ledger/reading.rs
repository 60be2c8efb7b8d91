//! Leases and pins: what holds the data of a version.

use super::command::Outcome;
use super::identity::{LeaseId, Timestamp};
use super::refusal::{Reason, Refusal};
use super::selector::Selector;
use super::state::{Lease, State};
use super::version::{Status, Version};

impl State {
    pub(super) fn lease_version(
        &mut self,
        selector: Selector,
        lease: LeaseId,
        holder: String,
        until: Timestamp,
    ) -> Result<Outcome, Refusal> {
        if let Some(held) = self.leases.get_mut(&lease) {
            if held.expired {
                return Err(Refusal::LeaseExpired { lease });
            }
            held.until = held.until.max(until);
            let id = held.version;
            return leased(self.named(id)?);
        }
        let version = self.found(selector)?;
        let outcome = leased(version)?;
        let held = Lease { version: version.id, holder, until, expired: false };
        self.leases.insert(lease, held);
        Ok(outcome)
    }

    pub(super) fn release(&mut self, lease: LeaseId) -> Outcome {
        self.leases.remove(&lease);
        Outcome::Done
    }

    pub(super) fn holder_gone(&mut self, holder: &str) -> Outcome {
        self.leases.retain(|_, lease| lease.holder != holder);
        Outcome::Done
    }

    pub(super) fn pin(&mut self, selector: Selector, label: String) -> Result<Outcome, Refusal> {
        let Version { id, number, .. } = *self.found(selector)?;
        self.pins.insert(label, id);
        self.retire_surplus();
        Ok(Outcome::Pinned { id, number })
    }

    pub(super) fn unpin(&mut self, label: &str) -> Outcome {
        self.pins.remove(label);
        self.retire_surplus();
        Outcome::Done
    }

    /// The visible version that is meant.
    ///
    /// # Errors
    ///
    /// [`Refusal::NotFound`], which says what there is instead.
    pub fn found(&self, selector: Selector) -> Result<&Version, Refusal> {
        self.version(selector).ok_or_else(|| {
            self.lost(selector).unwrap_or_else(|| Refusal::NotFound {
                selector,
                newest: self.head().map(|version| version.number),
                coming: self.open().next_back().map(|open| (open.number, open.missing())),
            })
        })
    }

    /// What is to be said of a version that is lost: why readers do not find what they have seen, or heard of.
    fn lost(&self, selector: Selector) -> Option<Refusal> {
        let known = self.versions().rev().filter_map(|version| match &version.status {
            Status::Dropped { reason } => Some((version.id, version.number, reason)),
            _ => None,
        });
        let ended = self.ended.iter().rev();
        let ended =
            ended.filter_map(|ended| Some((ended.id, ended.number, ended.reason.as_ref()?)));
        let mut lost = known.chain(ended).filter(|(id, number, reason)| {
            let is_meant = match selector {
                Selector::Newest => Some(*number) == self.highest,
                Selector::Number(wanted) => *number == wanted,
                Selector::Id(wanted) => *id == wanted,
            };
            is_meant && matches!(reason, Reason::Lost { .. })
        });
        let (_, number, reason) = lost.next()?;
        Some(Refusal::Dropped { number, reason: reason.clone() })
    }
}

/// What a reader is told; only a version that was never visible has nothing to tell.
fn leased(version: &Version) -> Result<Outcome, Refusal> {
    let Version { id, epoch, number, .. } = *version;
    let manifest = version.manifest().cloned().ok_or(Refusal::Unknown { id })?;
    Ok(Outcome::Leased { id, epoch, number, manifest })
}
