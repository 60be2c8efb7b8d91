//! The state of the ledger of one key, and queries of it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::MAX_TOMBSTONES;
use super::command::Effect;
use super::durability::Durability;
use super::identity::{JobId, LeaseId, RunProcess, SessionId, Timestamp, VersionId};
use super::refusal::Refusal;
use super::selector::Selector;
use super::version::{Contribution, Status, Tombstone, Version, VersionOutcome, VersionPosition};
use super::writers::WriterSet;

/// The state of the ledger of one key. The default is the state of a key that was never written.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct State {
    /// Number of rewinds of the key that became visible, and of rollbacks.
    pub(super) epoch: u32,
    /// The highest number that ever became visible in the epoch. Deletion does not change it.
    pub(super) highest: Option<u64>,
    /// The process that put the version with that number, if it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) newest_process: Option<RunProcess>,
    /// The newest version that became visible and durable.
    pub(super) newest_durable: Option<VersionPosition>,
    pub(super) keep: NonZeroU32,
    pub(super) ttl: Option<Duration>,
    /// The newest job that contributed to the key.
    pub(super) job: Option<Job>,
    /// The older jobs, oldest first.
    pub(super) fenced_jobs: VecDeque<JobId>,
    /// The versions that have data, ordered by epoch and number. The pair of epoch and number is unique.
    ///
    /// A step copies the state and changes one or two versions. `Arc` lets both states share the others.
    pub(super) versions: Vec<Arc<Version>>,
    /// Tombstones of the versions whose data is deleted, oldest first.
    pub(super) tombstones: VecDeque<Tombstone>,
    pub(super) leases: BTreeMap<LeaseId, Lease>,
    pub(super) pins: BTreeMap<String, VersionId>,
}

/// The newest job, with the values that its next put is checked against.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Job {
    pub(super) id: JobId,
    /// The writers of the version that the job opened last.
    pub(super) writers: Option<WriterSet>,
    /// The last put of the job that opened a version with an implicit number.
    pub(super) last_sequence: Option<LastSequence>,
}

/// The last put of a job that opened a version with an implicit number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct LastSequence {
    /// The sequence number of the put.
    pub(super) sequence: u64,
    /// The number of the version.
    pub(super) number: u64,
}

/// A reader's lease on a version.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lease {
    /// The leased version.
    pub version: VersionId,
    /// The reader.
    pub holder: String,
    /// The time until which new reads may start.
    pub expires_at: Timestamp,
    /// Whether that time has passed. The data stays nevertheless until the lease is released.
    pub expired: bool,
}

impl Default for State {
    fn default() -> Self {
        Self {
            epoch: 0,
            highest: None,
            newest_process: None,
            newest_durable: None,
            keep: NonZeroU32::MIN,
            ttl: None,
            job: None,
            fenced_jobs: VecDeque::new(),
            versions: Vec::new(),
            tombstones: VecDeque::new(),
            leases: BTreeMap::new(),
            pins: BTreeMap::new(),
        }
    }
}

impl State {
    /// Returns the state of a key that was never written and keeps its newest `keep` versions.
    pub fn with_keep(keep: NonZeroU32) -> Self {
        Self { keep, ..Self::default() }
    }

    /// Whether another state differs from this one, and only in its leases.
    pub(crate) fn differs_only_in_leases(&self, other: &Self) -> bool {
        self.leases != other.leases
            && *self == Self { leases: self.leases.clone(), ..other.clone() }
    }

    /// Returns the state that remains when the process that holds the memory ends.
    ///
    /// The versions on disk and in a bucket remain, and so do retention, jobs and the newest durable number. Open
    /// versions, versions in memory, tombstones and leases end with the process. So do the sequence numbers of versions
    /// that are neither visible nor pinned.
    #[must_use]
    pub fn durable_state(&self) -> Self {
        let durable = self.versions.iter().filter(|version| version.is_durable());
        let kept = durable.map(|version| {
            if version.is_visible() || self.is_pinned(version.id) {
                return version.clone();
            }
            // This version will be deleted. Its sequence number no longer names it, as if the restart came after.
            Arc::new(Version { sequence: None, ..Version::clone(version) })
        });
        let versions: Vec<Arc<Version>> = kept.collect();
        let newest = versions.iter().find(|it| Some(it.position()) == self.newest_durable);
        let newest_process = newest.and_then(|version| version.process.clone());
        let has_data = |id: &VersionId| versions.iter().any(|version| version.id == *id);
        let pins = self.pins.iter().filter(|(_, id)| has_data(id));
        let job =
            self.job.as_ref().map(|job| Job { writers: None, last_sequence: None, ..job.clone() });
        Self {
            epoch: self.newest_durable.map_or(0, |newest| newest.epoch),
            highest: self.newest_durable.map(|newest| newest.number),
            newest_process,
            newest_durable: self.newest_durable,
            keep: self.keep,
            ttl: self.ttl,
            job,
            fenced_jobs: self.fenced_jobs.clone(),
            pins: pins.map(|(label, id)| (label.clone(), *id)).collect(),
            versions,
            tombstones: VecDeque::new(),
            leases: BTreeMap::new(),
        }
    }

    /// Returns the state that a host restores from a bucket, where this is the ledger of the bucket.
    ///
    /// It has the visible versions, all durable.
    #[must_use]
    pub(crate) fn restored_state(&self) -> Self {
        let visible = self.visible().map(|version| {
            let (durability, sessions) = (Durability::Object, BTreeMap::new());
            Arc::new(Version { durability, sessions, uploaded: true, ..version.clone() })
        });
        let versions = visible.collect();
        let durable = self.highest.map(|number| VersionPosition { epoch: self.epoch, number });
        Self { newest_durable: durable, versions, ..self.clone() }.durable_state()
    }

    /// Returns the newest visible version.
    pub fn head(&self) -> Option<&Version> {
        self.visible().next_back()
    }

    /// Returns the version that a selector selects. It is visible, unless a label selects it.
    pub fn version(&self, selector: &Selector) -> Option<&Version> {
        match selector {
            Selector::Newest => self.head(),
            // After a rewind, a version of an older epoch may have the same number.
            Selector::Number(number) => self.visible().rfind(|version| version.number == *number),
            Selector::Id(id) => self.visible().find(|version| version.id == *id),
            Selector::Label(label) => {
                let id = self.pins.get(label.as_str())?;
                self.version_by_id(*id).filter(|version| version.manifest().is_some())
            }
        }
    }

    /// Returns the visible versions, oldest first.
    pub fn visible(&self) -> impl DoubleEndedIterator<Item = &Version> {
        self.versions().filter(|version| version.is_visible())
    }

    /// Returns the open versions, ordered by epoch and number.
    pub fn open(&self) -> impl DoubleEndedIterator<Item = &Version> {
        self.versions().filter(|version| version.is_open())
    }

    /// Returns all versions that have data, ordered by epoch and number.
    pub fn versions(&self) -> impl DoubleEndedIterator<Item = &Version> {
        self.versions.iter().map(Arc::as_ref)
    }

    /// Returns the outcome of a version for a caller that waits for it.
    ///
    /// Returns `None` if the ledger never had the version or no longer remembers it.
    pub fn outcome_of(&self, id: VersionId) -> Option<VersionOutcome> {
        let ended = || self.tombstone(id).map(Tombstone::outcome);
        self.version_by_id(id).map(Version::outcome).or_else(ended)
    }

    /// Returns the highest number that ever became visible, or the highest one since the last rewind.
    pub fn highest(&self) -> Option<u64> {
        self.highest
    }

    /// Returns the number of rewinds of the key that became visible, and of rollbacks.
    pub fn epoch(&self) -> u32 {
        self.epoch
    }

    /// Returns how many of the newest versions are kept, and how long.
    pub(crate) fn retention(&self) -> (NonZeroU32, Option<Duration>) {
        (self.keep, self.ttl)
    }

    /// Returns the newest job that contributed to the key.
    pub fn job(&self) -> Option<&JobId> {
        self.job.as_ref().map(|job| &job.id)
    }

    /// Returns the sessions that contribute to versions of the key, hold replicas of them, or read them.
    pub(crate) fn sessions(&self) -> BTreeSet<SessionId> {
        let of_version = |version: &Version| {
            let replicas = version.contributions.values().flat_map(Contribution::replica_sessions);
            version.sessions.values().copied().chain(replicas).collect::<Vec<_>>()
        };
        // A holder that does not parse as a session id is not a session.
        let readers = self.leases.values().filter_map(|lease| lease.holder.parse().ok());
        self.versions().flat_map(of_version).chain(readers).collect()
    }

    /// Returns the lease with this identity.
    pub fn lease(&self, lease: LeaseId) -> Option<&Lease> {
        self.leases.get(&lease)
    }

    /// Returns the labels, each with the version that it pins.
    pub fn pins(&self) -> impl Iterator<Item = (&str, VersionId)> {
        self.pins.iter().map(|(label, id)| (label.as_str(), *id))
    }

    /// Whether a lease or a pin holds the data of a version.
    pub fn is_held(&self, id: VersionId) -> bool {
        self.is_pinned(id) || self.leases.values().any(|lease| lease.version == id)
    }

    pub(super) fn is_pinned(&self, id: VersionId) -> bool {
        self.pins.values().any(|pinned| *pinned == id)
    }

    /// Returns the pending effects of all versions, in their order.
    pub(super) fn pending_effects(&self) -> Vec<Effect> {
        let bases = self.bases_in_use();
        let effect = |version: &Version| {
            let Version { id, epoch, number, .. } = *version;
            match version.status {
                Status::Open { .. } | Status::Visible { .. } => None,
                Status::Verifying { .. } => Some(Effect::Verify { id }),
                Status::Retired { .. } if self.is_held(id) || bases.contains(&id) => None,
                Status::Retired { .. } | Status::Dropped { .. } => {
                    Some(Effect::Delete { id, epoch, number })
                }
            }
        };
        self.versions().filter_map(effect).collect()
    }

    /// Returns the versions from which the archives of readable versions are computed.
    fn bases_in_use(&self) -> BTreeSet<VersionId> {
        let is_readable = |version: &&Version| {
            version.is_open() || version.is_visible() || self.is_held(version.id)
        };
        let mut bases = BTreeSet::new();
        let mut pending: Vec<&Version> = self.versions().filter(is_readable).collect();
        while let Some(version) = pending.pop() {
            for base in version.bases() {
                if bases.insert(base) {
                    pending.extend(self.version_by_id(base));
                }
            }
        }
        bases
    }

    /// Returns the version with this identity, if it has data.
    pub(super) fn version_by_id(&self, id: VersionId) -> Option<&Version> {
        self.versions().find(|version| version.id == id)
    }

    /// Returns the tombstone of the version with this identity.
    pub(super) fn tombstone(&self, id: VersionId) -> Option<&Tombstone> {
        self.tombstones.iter().rev().find(|ended| ended.id == id)
    }

    /// Returns the version that a command names, for a change.
    ///
    /// # Errors
    ///
    /// `Dropped` or `DataDeleted` if the data of the version is deleted, `UnknownVersion` if the ledger does not know it.
    pub(super) fn version_by_id_mut(&mut self, id: VersionId) -> Result<&mut Version, Refusal> {
        let ended = self.tombstone(id).map_or(Refusal::UnknownVersion { id }, Tombstone::refusal);
        let named = self.versions.iter_mut().find(|version| version.id == id);
        named.map(Arc::make_mut).ok_or(ended)
    }

    /// Applies a change to all versions that satisfy a predicate.
    pub(super) fn update_versions(
        &mut self,
        predicate: impl Fn(&Version) -> bool,
        mut change: impl FnMut(&mut Version),
    ) {
        for version in self.versions.iter_mut().filter(|version| predicate(version)) {
            change(Arc::make_mut(version));
        }
    }

    /// Replaces a version whose data is deleted by a tombstone.
    pub(super) fn replace_with_tombstone(&mut self, id: VersionId) {
        let removed = self.versions.extract_if(.., |version| version.id == id);
        self.tombstones.extend(removed.map(Arc::unwrap_or_clone).map(Tombstone::from));
        while self.tombstones.len() > MAX_TOMBSTONES {
            self.tombstones.pop_front();
        }
    }
}
