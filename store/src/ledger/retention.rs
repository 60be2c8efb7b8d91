//! Retention: retires, abandons, deletes and finally forgets versions.

use std::num::NonZeroU32;
use std::time::Duration;

use super::OPEN_TIMEOUT;
use super::command::Outcome;
use super::identity::{Timestamp, VersionId};
use super::refusal::{Reason, Refusal};
use super::selector::Selection;
use super::state::State;
use super::version::{Status, Version};

impl State {
    pub(super) fn retain(&mut self, keep: NonZeroU32, ttl: Option<Duration>) -> Outcome {
        self.keep = keep;
        self.ttl = ttl;
        self.retire_surplus();
        Outcome::Done
    }

    /// Retires the visible versions that retention does not keep.
    ///
    /// With `keep` from [`Command::Retain`](super::Command::Retain), these versions are kept:
    ///
    /// - the newest `keep` visible versions;
    /// - the newest `keep` versions on disk, which a restart finds;
    /// - the newest `keep` versions in a bucket, which other hosts find;
    /// - versions whose upload to a bucket is pending;
    /// - pinned versions.
    pub(super) fn retire_surplus(&mut self) {
        let keep = usize::try_from(self.keep.get()).unwrap_or(usize::MAX);
        let on_disk = self.visible().rev().filter(|it| it.is_durable() && !it.uploaded).take(keep);
        let stored = self.visible().rev().filter(|version| version.uploaded).take(keep);
        let durable: Vec<_> = on_disk.chain(stored).map(|version| version.id).collect();
        let surplus = self.visible().rev().skip(keep).filter(|it| !it.is_upload_pending());
        let surplus = surplus.map(|version| version.id);
        let surplus: Vec<_> = surplus.filter(|id| !durable.contains(id)).collect();
        self.retire_unpinned(&surplus);
    }

    fn retire_unpinned(&mut self, ids: &[VersionId]) {
        let unpinned: Vec<_> = ids.iter().copied().filter(|id| !self.is_pinned(*id)).collect();
        self.update_versions(|version| unpinned.contains(&version.id), Version::retire);
    }

    pub(super) fn abandon(&mut self, id: VersionId) -> Outcome {
        self.update_versions(|version| version.id == id && version.is_open(), Version::abandon);
        Outcome::Done
    }

    pub(super) fn expire(&mut self, now: Timestamp) -> Outcome {
        self.update_versions(|version| version.is_past_open_limit(now), Version::abandon);
        if let Some(ttl) = self.ttl {
            let is_expired = |version: &&Version| version.is_past_ttl(ttl, now);
            let expired: Vec<_> =
                self.visible().filter(is_expired).map(|version| version.id).collect();
            self.retire_unpinned(&expired);
        }
        for lease in self.leases.values_mut() {
            lease.expired |= lease.expires_at <= now;
        }
        Outcome::Done
    }

    pub(super) fn delete(&mut self, selection: &Selection) -> Outcome {
        let mut ids = Vec::new();
        let pinned = match selection {
            Selection::Label(label) => self.pins.get(label.as_str()).copied(),
            _ => None,
        };
        let is_selected = |version: &Version| match selection {
            Selection::All => true,
            Selection::Number(number) => version.number == *number,
            Selection::Id(id) => version.id == *id,
            Selection::Label(_) => pinned == Some(version.id),
        };
        self.update_versions(
            |version| is_selected(version) && (version.is_open() || version.is_visible()),
            |version| {
                ids.push(version.id);
                if version.is_open() {
                    version.mark_dropped(Reason::Deleted);
                } else {
                    version.retire();
                }
            },
        );
        Outcome::Deleted { ids }
    }

    pub(super) fn reclaimed(&mut self, id: VersionId) -> Result<Outcome, Refusal> {
        if let Some(version) = self.version_by_id(id) {
            if !self.pending_effects().iter().any(|effect| effect.is_deletion_of(id)) {
                return Err(Refusal::InUse { number: version.number });
            }
            self.replace_with_tombstone(id);
        }
        Ok(Outcome::Done)
    }
}

impl Version {
    fn is_past_open_limit(&self, now: Timestamp) -> bool {
        match self.status {
            // The store of the original version abandons it.
            _ if self.is_copy => false,
            Status::Open { since } | Status::Verifying { since } => {
                since.saturating_add(OPEN_TIMEOUT) <= now
            }
            _ => false,
        }
    }

    fn abandon(&mut self) {
        self.mark_dropped(Reason::Abandoned { missing: self.missing() });
    }

    fn is_past_ttl(&self, ttl: Duration, now: Timestamp) -> bool {
        matches!(self.status, Status::Visible { since, .. } if since.saturating_add(ttl) <= now)
    }
}
