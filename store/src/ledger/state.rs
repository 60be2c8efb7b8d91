//! All that the ledger knows of a key, and the questions it answers.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::MAX_ENDED;
use super::command::Effect;
use super::durability::Durability;
use super::identity::{JobId, LeaseId, SessionId, Timestamp, VersionId};
use super::refusal::Refusal;
use super::selector::Selector;
use super::version::{Contribution, Ended, Fate, Status, Version};
use super::writers::WriterSet;

/// The ledger of one key at one moment. The default is that of a key never written.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct State {
    /// How often the key was rewound, as readers see it.
    pub(super) epoch: u32,
    /// The highest number that was ever visible in the epoch. It survives deletion.
    pub(super) highest: Option<u64>,
    /// Epoch and number of the newest version that was visible and durable.
    #[serde(default)]
    pub(super) durable: Option<(u32, u64)>,
    pub(super) keep: NonZeroU32,
    pub(super) ttl: Option<Duration>,
    /// The newest job that contributed.
    pub(super) job: Option<Job>,
    /// The older ones, oldest first.
    pub(super) fenced: VecDeque<JobId>,
    /// Those that have data, in the order of their places; no two have the same place.
    /// A step copies the state, and changes one or two of them: they share the others.
    pub(super) versions: Vec<Arc<Version>>,
    /// Those whose data is gone, oldest first.
    pub(super) ended: VecDeque<Ended>,
    pub(super) leases: BTreeMap<LeaseId, Lease>,
    pub(super) pins: BTreeMap<String, VersionId>,
}

/// The newest job, and what its next put is compared with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Job {
    pub(super) id: JobId,
    /// The writers of the version that it opened last.
    pub(super) writers: Option<WriterSet>,
    /// The last of its calls that opened a version, and the number of that version.
    pub(super) last_call: Option<(u64, u64)>,
}

/// A reader's hold on a version.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lease {
    /// The version.
    pub version: VersionId,
    /// Who reads.
    pub holder: String,
    /// Until when new reads may start.
    pub until: Timestamp,
    /// Whether that moment has passed. The data stays until the lease is released all the same.
    pub expired: bool,
}

impl Default for State {
    fn default() -> Self {
        Self {
            epoch: 0,
            highest: None,
            durable: None,
            keep: NonZeroU32::MIN,
            ttl: None,
            job: None,
            fenced: VecDeque::new(),
            versions: Vec::new(),
            ended: VecDeque::new(),
            leases: BTreeMap::new(),
            pins: BTreeMap::new(),
        }
    }
}

impl State {
    /// That of a key never written, of which so many of the newest versions are kept.
    pub fn keeping(keep: NonZeroU32) -> Self {
        Self { keep, ..Self::default() }
    }

    /// Whether another state differs from this one, and in nothing but who reads.
    pub(crate) fn differs_in_leases_alone(&self, other: &Self) -> bool {
        self.leases != other.leases
            && *self == Self { leases: self.leases.clone(), ..other.clone() }
    }

    /// What is left when the process that holds the memory ends: versions that are on disk or in a bucket, and what
    /// is said of the key as a whole. Its open versions and leases end with the process, and the calls of what is
    /// neither visible nor pinned.
    #[must_use]
    pub fn durable(&self) -> Self {
        let durable = self.versions.iter().filter(|version| version.is_durable());
        let left = durable.map(|version| {
            if version.is_visible() || self.is_pinned(version.id) {
                return version.clone();
            }
            // It is about to be deleted: no call means it, as none means what was deleted just before.
            Arc::new(Version { call: None, ..Version::clone(version) })
        });
        let versions: Vec<Arc<Version>> = left.collect();
        let is_there = |id: &VersionId| versions.iter().any(|version| version.id == *id);
        let pins = self.pins.iter().filter(|(_, id)| is_there(id));
        let job =
            self.job.as_ref().map(|job| Job { writers: None, last_call: None, ..job.clone() });
        Self {
            epoch: self.durable.map_or(0, |(epoch, _)| epoch),
            highest: self.durable.map(|(_, number)| number),
            durable: self.durable,
            keep: self.keep,
            ttl: self.ttl,
            job,
            fenced: self.fenced.clone(),
            pins: pins.map(|(label, id)| (label.clone(), *id)).collect(),
            versions,
            ended: VecDeque::new(),
            leases: BTreeMap::new(),
        }
    }

    /// What is found by somebody who has nothing but the bucket of which this is the ledger: what is visible there.
    #[must_use]
    pub(crate) fn restored(&self) -> Self {
        let visible = self.visible().map(|version| {
            let (durability, sessions) = (Durability::Object, BTreeMap::new());
            Arc::new(Version { durability, sessions, stored: true, ..version.clone() })
        });
        let versions = visible.collect();
        let durable = self.highest.map(|number| (self.epoch, number));
        Self { durable, versions, ..self.clone() }.durable()
    }

    /// The newest visible version.
    pub fn head(&self) -> Option<&Version> {
        self.visible().next_back()
    }

    /// The visible version that a selector means.
    pub fn version(&self, selector: Selector) -> Option<&Version> {
        match selector {
            Selector::Newest => self.head(),
            Selector::Number(number) => self.visible().find(|version| version.number == number),
            Selector::Id(id) => self.visible().find(|version| version.id == id),
        }
    }

    /// The visible versions, oldest first.
    pub fn visible(&self) -> impl DoubleEndedIterator<Item = &Version> {
        self.versions().filter(|version| version.is_visible())
    }

    /// The open versions, in the order of their epochs and numbers.
    pub fn open(&self) -> impl DoubleEndedIterator<Item = &Version> {
        self.versions().filter(|version| version.is_open())
    }

    /// All versions that have data, in the order of their epochs and numbers.
    pub fn versions(&self) -> impl DoubleEndedIterator<Item = &Version> {
        self.versions.iter().map(Arc::as_ref)
    }

    /// What became of a version, as one who waits for it sees it: none if the ledger has never
    /// known it, or has forgotten it.
    pub fn outcome_of(&self, id: VersionId) -> Option<Fate> {
        let ended = || self.ended(id).map(Ended::fate);
        self.known(id).map(Version::fate).or_else(ended)
    }

    /// The highest number that was ever visible, or the one that the key was rewound to since.
    pub fn highest(&self) -> Option<u64> {
        self.highest
    }

    /// How often the key was rewound, as readers see it.
    pub fn epoch(&self) -> u32 {
        self.epoch
    }

    /// How many of the newest versions are kept, and for how long.
    pub(crate) fn retention(&self) -> (NonZeroU32, Option<Duration>) {
        (self.keep, self.ttl)
    }

    /// The newest job that contributed.
    pub fn job(&self) -> Option<&JobId> {
        self.job.as_ref().map(|job| &job.id)
    }

    /// The processes that matter to it: that have begun something, keep it, or read it.
    pub(crate) fn sessions(&self) -> BTreeSet<SessionId> {
        let of = |version: &Version| {
            let kept = version.contributions.values().flat_map(Contribution::keepers);
            version.sessions.values().copied().chain(kept).collect::<Vec<_>>()
        };
        // Other holders are no processes that others know.
        let reading = self.leases.values().filter_map(|lease| lease.holder.parse().ok());
        self.versions().flat_map(of).chain(reading).collect()
    }

    /// A lease that is held.
    pub fn lease(&self, lease: LeaseId) -> Option<&Lease> {
        self.leases.get(&lease)
    }

    /// The labels, each with the version that it holds.
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

    /// What somebody has to do about a version.
    pub(super) fn owed(&self, version: &Version) -> Option<Effect> {
        let Version { id, epoch, number, .. } = *version;
        match version.status {
            Status::Open { .. } | Status::Visible { .. } => None,
            Status::Proving { .. } => Some(Effect::Prove { id }),
            Status::Retired { .. } if self.is_held(id) => None,
            Status::Retired { .. } | Status::Dropped { .. } => {
                Some(Effect::Delete { id, epoch, number })
            }
        }
    }

    pub(super) fn known(&self, id: VersionId) -> Option<&Version> {
        self.versions().find(|version| version.id == id)
    }

    pub(super) fn ended(&self, id: VersionId) -> Option<&Ended> {
        self.ended.iter().rev().find(|ended| ended.id == id)
    }

    /// The version that a command names.
    pub(super) fn named(&mut self, id: VersionId) -> Result<&mut Version, Refusal> {
        let ended = self.ended(id).map_or(Refusal::Unknown { id }, Ended::refusal);
        let named = self.versions.iter_mut().find(|version| version.id == id);
        named.map(Arc::make_mut).ok_or(ended)
    }

    /// Changes some of the versions.
    pub(super) fn change(
        &mut self,
        which: impl Fn(&Version) -> bool,
        mut change: impl FnMut(&mut Version),
    ) {
        for version in self.versions.iter_mut().filter(|version| which(version)) {
            change(Arc::make_mut(version));
        }
    }

    /// Forgets the data of a version, and remembers what became of it.
    pub(super) fn forget(&mut self, id: VersionId) {
        let gone = self.versions.extract_if(.., |version| version.id == id);
        self.ended.extend(gone.map(Arc::unwrap_or_clone).map(Ended::from));
        while self.ended.len() > MAX_ENDED {
            self.ended.pop_front();
        }
    }
}
