//! Retention: what is retired, abandoned, deleted, and forgotten at last.

use std::num::NonZeroU32;
use std::time::Duration;

use super::OPEN_LIMIT;
use super::command::{Effect, Outcome};
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

    /// Retires what is visible beyond the newest ones and not pinned. Of the versions on disk, and of those in a
    /// bucket, as many of the newest stay, whatever is newer elsewhere: they are what a restart finds, or another
    /// host. So do those that are on their way to a bucket.
    pub(super) fn retire_surplus(&mut self) {
        let keep = usize::try_from(self.keep.get()).unwrap_or(usize::MAX);
        let on_disk = self.visible().rev().filter(|it| it.is_durable() && !it.stored).take(keep);
        let stored = self.visible().rev().filter(|version| version.stored).take(keep);
        let durable: Vec<_> = on_disk.chain(stored).map(|version| version.id).collect();
        let surplus = self.visible().rev().skip(keep).filter(|it| !it.is_to_be_stored());
        let surplus = surplus.map(|version| version.id);
        let surplus: Vec<_> = surplus.filter(|id| !durable.contains(id)).collect();
        self.retire_unpinned(&surplus);
    }

    fn retire_unpinned(&mut self, ids: &[VersionId]) {
        let unpinned: Vec<_> = ids.iter().copied().filter(|id| !self.is_pinned(*id)).collect();
        self.change(|version| unpinned.contains(&version.id), Version::retire);
    }

    pub(super) fn abandon(&mut self, id: VersionId) -> Outcome {
        self.change(|version| version.id == id && version.is_open(), Version::abandon);
        Outcome::Done
    }

    pub(super) fn expire(&mut self, now: Timestamp) -> Outcome {
        self.change(|version| version.is_abandoned(now), Version::abandon);
        if let Some(ttl) = self.ttl {
            let is_old = |version: &&Version| version.is_older(ttl, now);
            let old: Vec<_> = self.visible().filter(is_old).map(|version| version.id).collect();
            self.retire_unpinned(&old);
        }
        for lease in self.leases.values_mut() {
            lease.expired |= lease.until <= now;
        }
        Outcome::Done
    }

    pub(super) fn delete(&mut self, selection: Selection) -> Outcome {
        let mut ids = Vec::new();
        self.change(
            |version| selection.includes(version) && (version.is_open() || version.is_visible()),
            |version| {
                ids.push(version.id);
                if version.is_open() {
                    version.drop_because(Reason::Deleted);
                } else {
                    version.retire();
                }
            },
        );
        Outcome::Deleted { ids }
    }

    pub(super) fn reclaimed(&mut self, id: VersionId) -> Result<Outcome, Refusal> {
        if let Some(version) = self.known(id) {
            match self.owed(version) {
                Some(Effect::Delete { .. }) => self.forget(id),
                _ => {
                    return Err(Refusal::InUse { number: version.number });
                }
            }
        }
        Ok(Outcome::Done)
    }
}

impl Version {
    fn is_abandoned(&self, now: Timestamp) -> bool {
        match self.status {
            // Whoever has begun it says so.
            _ if self.copy => false,
            Status::Open { since } | Status::Proving { since } => since.after(OPEN_LIMIT) <= now,
            _ => false,
        }
    }

    fn abandon(&mut self) {
        self.drop_because(Reason::Abandoned { missing: self.missing() });
    }

    fn is_older(&self, ttl: Duration, now: Timestamp) -> bool {
        matches!(self.status, Status::Visible { since, .. } if since.after(ttl) <= now)
    }
}

impl Selection {
    fn includes(self, version: &Version) -> bool {
        match self {
            Self::All => true,
            Self::Number(number) => version.number == number,
            Self::Id(id) => version.id == id,
        }
    }
}
