//! Commit, abort and proof: how a version becomes visible, or does not.

use std::collections::BTreeMap;

use super::MAX_REASON_BYTES;
use super::command::{Commit, Outcome};
use super::durability::Durability;
use super::identity::{SessionId, Timestamp, VersionId};
use super::refusal::{Reason, Refusal};
use super::state::State;
use super::version::{Contribution, ManifestReference, Status, Version};
use super::writers::WriterSet;

impl State {
    pub(super) fn commit(&mut self, commit: Commit) -> Result<Outcome, Refusal> {
        let Commit { id, writer, job, digest, archives, keeper, now } = commit;
        self.refuse_fenced(job.as_ref())?;
        let version = self.named(id)?;
        version.refuse_dropped()?;
        version.refuse_other_job(job.as_ref())?;
        let number = version.number;
        match version.contributions.get_mut(&writer) {
            None => return Err(Refusal::NotBegun { number, writer }),
            Some(Contribution::Committed { digest: committed, .. }) if *committed != digest => {
                return Err(Refusal::ContributionDiffers { number, writer, committed: *committed });
            }
            Some(Contribution::Committed { .. }) => {}
            Some(begun) => {
                let keepers = keeper.into_iter().collect();
                *begun = Contribution::Committed { digest, archives, keepers };
            }
        }
        version.sessions.remove(&writer);
        let missing = version.missing();
        if missing.is_empty() && matches!(version.status, Status::Open { .. }) {
            version.status = Status::Proving { since: now };
        }
        Ok(Outcome::Committed { visible: version.manifest().is_some(), missing })
    }

    pub(super) fn abort(&mut self, id: VersionId, writer: u32) -> Outcome {
        let Ok(version) = self.named(id) else {
            return Outcome::Done;
        };
        let begun = version.contributions.get(&writer) == Some(&Contribution::Begun);
        if begun && version.is_open() {
            version.contributions.remove(&writer);
            version.sessions.remove(&writer);
            if version.call.is_some() || version.contributions.is_empty() {
                version.drop_because(Reason::Aborted { writer });
            }
        }
        Outcome::Done
    }

    pub(super) fn session_ended(
        &mut self,
        session: SessionId,
        mut slices: BTreeMap<VersionId, String>,
    ) -> Outcome {
        let begun = self.open().flat_map(|version| {
            let of_it = version.sessions.iter().filter(|(_, each)| **each == session);
            of_it.map(|(writer, _)| (version.id, *writer))
        });
        let begun: Vec<(VersionId, u32)> = begun.collect();
        for (id, writer) in begun {
            self.abort(id, writer);
        }
        let is_kept = |version: &Version| {
            let mut keepers = version.contributions.values().flat_map(Contribution::keepers);
            keepers.any(|keeper| keeper == session)
        };
        let mut lost = Vec::new();
        self.change(is_kept, |version| {
            let slices = slices.remove(&version.id).unwrap_or_default();
            lost.extend(version.lose(session, cut(slices)).then_some(version.id));
        });
        // Whoever holds them can hold nothing of them.
        self.pins.retain(|_, id| !lost.contains(id));
        self.leases.retain(|_, lease| !lost.contains(&lease.version));
        self.holder_gone(&session.to_string())
    }

    pub(super) fn keep(
        &mut self,
        id: VersionId,
        writers: &WriterSet,
        session: SessionId,
    ) -> Outcome {
        if let Ok(version) = self.named(id)
            && version.is_visible()
        {
            let kept = version.contributions.iter_mut();
            for (_, contribution) in kept.filter(|(writer, _)| writers.contains(**writer)) {
                contribution.keep(session);
            }
        }
        Outcome::Done
    }

    pub(super) fn let_go(&mut self, id: VersionId, writer: u32, session: SessionId) -> Outcome {
        if let Ok(version) = self.named(id)
            && let Some(contribution) = version.contributions.get_mut(&writer)
            && contribution.keepers().any(|keeper| keeper != session)
        {
            contribution.lose(session);
        }
        Outcome::Done
    }

    pub(super) fn proved(
        &mut self,
        id: VersionId,
        manifest: ManifestReference,
        now: Timestamp,
    ) -> Result<Outcome, Refusal> {
        let version = self.named(id)?;
        let number = version.number;
        match &version.status {
            Status::Open { .. } => Err(Refusal::NotProving { number, missing: version.missing() }),
            Status::Proving { .. } => {
                version.status = Status::Visible { since: now, manifest };
                self.reached(id);
                Ok(Outcome::Done)
            }
            Status::Visible { manifest: shown, .. } | Status::Retired { manifest: shown } => {
                if shown.is_same(&manifest) {
                    Ok(Outcome::Done)
                } else {
                    Err(Refusal::ManifestDiffers { number })
                }
            }
            Status::Dropped { reason } => Err(Refusal::Dropped { number, reason: reason.clone() }),
        }
    }

    /// Readers have reached a version: what is older and open will never be the newest, and what a
    /// rewind takes back goes in the same step.
    fn reached(&mut self, id: VersionId) {
        let Some(version) = self.known(id) else {
            return;
        };
        let (place, rewinds) = (version.place(), version.rewinds);
        let (is_durable, is_copy) = (version.is_durable(), version.copy);
        let (epoch, number) = place;
        self.change(
            |version| version.is_open() && version.place() < place,
            |version| version.drop_because(Reason::Superseded { by: number }),
        );
        self.change(
            |version| version.epoch < epoch && rewinds.is_some_and(|from| version.number >= from),
            Version::retire,
        );
        self.epoch = epoch;
        self.highest = Some(number);
        if is_durable {
            self.durable = Some((epoch, number));
        }
        // What a copy replaces is kept until the store that it is of knows that the copy is there.
        if !is_copy {
            self.retire_surplus();
        }
    }

    pub(super) fn stored(&mut self, id: VersionId) -> Result<Outcome, Refusal> {
        let version = self.named(id)?;
        if version.manifest().is_none() {
            let (number, missing) = (version.number, version.missing());
            version.refuse_dropped()?;
            return Err(Refusal::NotProving { number, missing });
        }
        if version.durability == Durability::Object {
            version.stored = true;
            let place = version.place();
            self.durable = self.durable.max(Some(place));
            self.retire_surplus();
        }
        Ok(Outcome::Done)
    }

    pub(super) fn not_stored(&mut self, id: VersionId) -> Outcome {
        let is_it = |version: &Version| version.id == id && version.is_to_be_stored();
        self.change(is_it, |version| version.durability = Durability::Memory);
        self.retire_surplus();
        Outcome::Done
    }

    pub(super) fn rejected(&mut self, id: VersionId, reason: String) -> Result<Outcome, Refusal> {
        let version = self.named(id)?;
        let number = version.number;
        match &version.status {
            Status::Open { .. } => Err(Refusal::NotProving { number, missing: version.missing() }),
            Status::Proving { .. } => {
                version.drop_because(Reason::Rejected { reason: cut(reason) });
                Ok(Outcome::Done)
            }
            Status::Visible { .. } | Status::Retired { .. } => {
                Err(Refusal::AlreadyVisible { number })
            }
            Status::Dropped { reason: Reason::Rejected { .. } } => Ok(Outcome::Done),
            Status::Dropped { reason } => Err(Refusal::Dropped { number, reason: reason.clone() }),
        }
    }
}

fn cut(mut reason: String) -> String {
    reason.truncate(reason.floor_char_boundary(MAX_REASON_BYTES));
    reason
}
