//! Runs: which process put a version, and whether another run may use its number again.

use std::collections::BTreeSet;

use super::command::Begin;
use super::identity::{RunId, RunProcess, RunStatus};
use super::refusal::{EarlierRun, Obstacle};
use super::state::State;
use super::version::Version;

/// What a begin must do about versions of earlier runs.
pub(super) enum EarlierRuns {
    /// Nothing: it opens or joins a version by the rules of one run.
    Irrelevant,
    /// It is not known yet whether these runs have connected processes.
    Unchecked(BTreeSet<RunId>),
    /// All of them have ended, and the put takes their numbers again: it opens a new epoch.
    Ended,
}

impl State {
    /// Decides whether a begin takes numbers of earlier runs again.
    ///
    /// That is so if its number is not newer, if it is of another run than every version that stands in its way, if
    /// these versions are in memory only and not pinned, and if no process of their runs is connected.
    pub(super) fn earlier_runs(&self, begin: &Begin) -> EarlierRuns {
        let (Some(number), Some(own)) = (begin.number, &begin.process) else {
            return EarlierRuns::Irrelevant;
        };
        let is_joined =
            self.open().any(|version| version.number == number && version.job == begin.job);
        let is_ordinary = begin.rewind || begin.epoch.is_some() || begin.keeps_earlier_runs;
        if is_ordinary || is_joined || self.timeline().is_newer(number) {
            return EarlierRuns::Irrelevant;
        }
        let blocking: Vec<&Version> = self.newer_versions(number).collect();
        if blocking.iter().any(|version| self.obstacle(version).is_some()) {
            return EarlierRuns::Irrelevant;
        }
        // The version with the highest number may be deleted already.
        let newest = [self.newest_process.as_ref()];
        let processes = blocking.iter().map(|version| version.process.as_ref()).chain(newest);
        let Some(runs) =
            processes.map(|it| it.map(|it| it.run.clone())).collect::<Option<BTreeSet<_>>>()
        else {
            return EarlierRuns::Irrelevant;
        };
        if runs.contains(&own.run) {
            return EarlierRuns::Irrelevant;
        }
        let unchecked: BTreeSet<RunId> =
            runs.iter().filter(|run| !begin.run_statuses.contains_key(run)).cloned().collect();
        if !unchecked.is_empty() {
            EarlierRuns::Unchecked(unchecked)
        } else if runs
            .iter()
            .all(|run| begin.run_statuses.get(run) == Some(&RunStatus::Disconnected))
        {
            EarlierRuns::Ended
        } else {
            EarlierRuns::Irrelevant
        }
    }

    /// Returns the earlier run for whose sake a number is refused, if it is known.
    pub(super) fn earlier_run(&self, number: u64, begin: &Begin) -> Option<EarlierRun> {
        let own = begin.process.as_ref()?;
        let is_other = |process: &&RunProcess| process.run != own.run;
        let kept = self.newer_versions(number).filter_map(|version| {
            let obstacle = self.obstacle(version)?;
            let process = version.process.as_ref().filter(is_other)?.clone();
            Some(EarlierRun { process, version: version.number, obstacle })
        });
        let statuses = begin.run_statuses.values();
        let connected = statuses.clone().find_map(|status| match status {
            RunStatus::Connected(process) => Some((process.clone(), Obstacle::Connected)),
            RunStatus::Disconnected | RunStatus::Unknown => None,
        });
        // Processes do not connect to a directory or a bucket, and all that is put there is durable.
        let is_unknown = statuses.into_iter().any(|status| *status == RunStatus::Unknown);
        let newest = || {
            let newest = self.head().filter(|_| is_unknown)?.process.as_ref().filter(is_other)?;
            Some((newest.clone(), Obstacle::Durable))
        };
        kept.last().or_else(|| {
            let (process, obstacle) = connected.or_else(newest)?;
            Some(EarlierRun { process, version: self.highest().unwrap_or_default(), obstacle })
        })
    }

    /// Returns the visible and open versions that a put with this number would retire, oldest first.
    fn newer_versions(&self, number: u64) -> impl Iterator<Item = &Version> {
        let is_current = |version: &&Version| version.is_visible() || version.is_open();
        self.versions().filter(is_current).filter(move |version| version.number >= number)
    }

    /// Returns why a put of another run does not retire a version.
    pub(super) fn obstacle(&self, version: &Version) -> Option<Obstacle> {
        if self.is_pinned(version.id) {
            return Some(Obstacle::Pinned);
        }
        (version.durability != super::Durability::Memory).then_some(Obstacle::Durable)
    }
}
