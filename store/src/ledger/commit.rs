//! Commit, abort and verification: the steps by which a version becomes visible or is dropped.

use std::collections::BTreeMap;

use super::MAX_REASON_BYTES;
use super::command::{Commit, Outcome};
use super::durability::Durability;
use super::identity::{SessionId, Timestamp, VersionId};
use super::refusal::{Reason, Refusal};
use super::state::State;
use super::version::{Contribution, ManifestReference, Status, Version, VersionPosition};
use super::writers::WriterSet;

impl State {
    pub(super) fn commit(&mut self, commit: Commit) -> Result<Outcome, Refusal> {
        let Commit { id, writer, job, digest, archives, replica_session, base, now } = commit;
        self.refuse_fenced(job.as_ref())?;
        self.refuse_deleted_base(id, writer, base)?;
        let version = self.version_by_id_mut(id)?;
        version.refuse_dropped()?;
        version.refuse_other_job(job.as_ref())?;
        let number = version.number;
        let process = version.process.clone();
        match version.contributions.get_mut(&writer) {
            None => return Err(Refusal::NotBegun { number, writer }),
            Some(Contribution::Committed { digest: committed, .. }) if *committed != digest => {
                let committed = *committed;
                return Err(Refusal::ContributionDiffers { number, writer, committed, process });
            }
            Some(Contribution::Committed { .. }) => {}
            Some(begun) => {
                let holders = replica_session.into_iter().collect();
                *begun =
                    Contribution::Committed { digest, archives, replica_sessions: holders, base };
            }
        }
        version.sessions.remove(&writer);
        let missing = version.missing();
        if missing.is_empty() && matches!(version.status, Status::Open { .. }) {
            version.status = Status::Verifying { since: now };
        }
        Ok(Outcome::Committed { visible: version.manifest().is_some(), missing })
    }

    /// Refuses the base of a new contribution whose data is deleted, or may be deleted now.
    fn refuse_deleted_base(
        &self,
        id: VersionId,
        writer: u32,
        base: Option<VersionId>,
    ) -> Result<(), Refusal> {
        let Some(base) = base else { return Ok(()) };
        let contribution = |version: &Version| version.contributions.get(&writer).cloned();
        if self.version_by_id(id).and_then(contribution) != Some(Contribution::Begun) {
            return Ok(());
        }
        let is_kept = |id| !self.pending_effects().iter().any(|effect| effect.is_deletion_of(id));
        // Archives that end with a process are no bases.
        let is_stored = |version: &&Version| {
            version.manifest().is_some()
                && version.contributions.values().all(|it| it.replica_sessions().next().is_none())
        };
        let usable = self.version_by_id(base).filter(is_stored);
        if usable.is_some_and(|version| is_kept(version.id)) {
            return Ok(());
        }
        Err(Refusal::BaseDeleted { base })
    }

    pub(super) fn abort(&mut self, id: VersionId, writer: u32) -> Outcome {
        let Ok(version) = self.version_by_id_mut(id) else {
            return Outcome::Done;
        };
        let begun = version.contributions.get(&writer) == Some(&Contribution::Begun);
        if begun && version.is_open() {
            version.contributions.remove(&writer);
            version.sessions.remove(&writer);
            if version.sequence.is_some() || version.contributions.is_empty() {
                version.mark_dropped(Reason::Aborted { writer });
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
            let sessions = version.sessions.iter().filter(|(_, each)| **each == session);
            sessions.map(|(writer, _)| (version.id, *writer))
        });
        let begun: Vec<(VersionId, u32)> = begun.collect();
        for (id, writer) in begun {
            self.abort(id, writer);
        }
        let has_replica = |version: &Version| {
            let mut holders =
                version.contributions.values().flat_map(Contribution::replica_sessions);
            holders.any(|holder| holder == session)
        };
        let mut lost = Vec::new();
        self.update_versions(has_replica, |version| {
            let slices = slices.remove(&version.id).unwrap_or_default();
            lost.extend(
                version.remove_replicas(session, truncate_reason(slices)).then_some(version.id),
            );
        });
        // Pins and leases cannot hold data that is lost.
        self.pins.retain(|_, id| !lost.contains(id));
        self.leases.retain(|_, lease| !lost.contains(&lease.version));
        let holder = session.to_string();
        self.leases.retain(|_, lease| lease.holder != holder);
        Outcome::Done
    }

    pub(super) fn publish_replicas(
        &mut self,
        id: VersionId,
        writers: &WriterSet,
        session: SessionId,
    ) -> Outcome {
        if let Ok(version) = self.version_by_id_mut(id)
            && version.is_visible()
        {
            let contributions = version.contributions.iter_mut();
            for (_, contribution) in contributions.filter(|(writer, _)| writers.contains(**writer))
            {
                contribution.add_replica(session);
            }
        }
        Outcome::Done
    }

    pub(super) fn release_replica(
        &mut self,
        id: VersionId,
        writer: u32,
        session: SessionId,
    ) -> Outcome {
        if let Ok(version) = self.version_by_id_mut(id)
            && let Some(contribution) = version.contributions.get_mut(&writer)
            && contribution.replica_sessions().any(|holder| holder != session)
        {
            contribution.remove_replica(session);
        }
        Outcome::Done
    }

    pub(super) fn verified(
        &mut self,
        id: VersionId,
        manifest: ManifestReference,
        now: Timestamp,
    ) -> Result<Outcome, Refusal> {
        let version = self.version_by_id_mut(id)?;
        let number = version.number;
        match &version.status {
            Status::Open { .. } => {
                Err(Refusal::NotFullyCommitted { number, missing: version.missing() })
            }
            Status::Verifying { .. } => {
                version.status = Status::Visible { since: now, manifest };
                self.make_newest(id);
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

    /// Makes a visible version the newest version of its key.
    ///
    /// In the same step, drops older open versions and retires the versions that a rewind takes back.
    pub(super) fn make_newest(&mut self, id: VersionId) {
        let Some(version) = self.version_by_id(id) else {
            return;
        };
        let (position, rewinds) = (version.position(), version.rewind_from);
        let (is_durable, is_copy) = (version.is_durable(), version.is_copy);
        let (process, replaces_ended_runs) = (version.process.clone(), version.replaces_ended_runs);
        let VersionPosition { epoch, number } = position;
        self.update_versions(
            |version| version.is_open() && version.position() < position,
            |version| version.mark_dropped(Reason::Superseded { number }),
        );
        let is_retired = |version: &&Version| {
            version.epoch < epoch
                && rewinds.is_some_and(|from| version.number >= from)
                && !(replaces_ended_runs && self.obstacle(version).is_some())
        };
        let retired: Vec<_> = self.visible().filter(is_retired).map(|it| it.id).collect();
        self.update_versions(|version| retired.contains(&version.id), Version::retire);
        self.epoch = epoch;
        self.highest = Some(number);
        self.newest_process = process;
        if is_durable {
            self.newest_durable = Some(position);
        }
        // A copy does not retire older versions: they stay until the source store knows that the copy is visible.
        if !is_copy {
            self.retire_surplus();
        }
    }

    pub(super) fn uploaded(&mut self, id: VersionId) -> Result<Outcome, Refusal> {
        let version = self.version_by_id_mut(id)?;
        if version.manifest().is_none() {
            let (number, missing) = (version.number, version.missing());
            version.refuse_dropped()?;
            return Err(Refusal::NotFullyCommitted { number, missing });
        }
        if version.durability == Durability::Object {
            version.uploaded = true;
            let position = version.position();
            self.newest_durable = self.newest_durable.max(Some(position));
            self.retire_surplus();
        }
        Ok(Outcome::Done)
    }

    pub(super) fn not_uploaded(&mut self, id: VersionId) -> Outcome {
        let is_upload_pending = |version: &Version| version.id == id && version.is_upload_pending();
        self.update_versions(is_upload_pending, |version| version.durability = Durability::Memory);
        self.retire_surplus();
        Outcome::Done
    }

    pub(super) fn rejected(&mut self, id: VersionId, reason: String) -> Result<Outcome, Refusal> {
        let version = self.version_by_id_mut(id)?;
        let number = version.number;
        match &version.status {
            Status::Open { .. } => {
                Err(Refusal::NotFullyCommitted { number, missing: version.missing() })
            }
            Status::Verifying { .. } => {
                version.mark_dropped(Reason::Rejected { reason: truncate_reason(reason) });
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

fn truncate_reason(mut reason: String) -> String {
    reason.truncate(reason.floor_char_boundary(MAX_REASON_BYTES));
    reason
}
