//! Tests of the rules of versions.

mod jobs;
mod numbers;
mod outcomes;
mod retention;
mod rollback;
mod runs;
mod uploads;

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::time::Duration;

use super::*;

const MINUTE: u64 = 60_000;

/// A ledger under test. Its time stands still, and its effects run only when the test runs them.
#[derive(Default)]
struct TestLedger {
    state: State,
    now: u64,
    last_id: u128,
    /// The session that holds the archives that are committed.
    replica_session: Option<SessionId>,
    /// The version from whose archives those are stored as deltas that are committed.
    base: Option<VersionId>,
    /// What each begin says about runs.
    run_statuses: BTreeMap<RunId, RunStatus>,
}

impl TestLedger {
    fn with_keep(keep: u32) -> Self {
        let mut ledger = Self::default();
        let keep = NonZeroU32::new(keep).unwrap();
        ledger.apply(Command::Retain { keep, ttl: None }).unwrap();
        ledger
    }

    fn apply(&mut self, command: Command) -> Result<Outcome, Refusal> {
        let Step { state, outcome, .. } = step(&self.state, command)?;
        self.state = state;
        Ok(outcome)
    }

    /// Ends the session of a process.
    fn end_session(&mut self, session: u128) {
        let (session, slices) = (SessionId(session), BTreeMap::new());
        self.apply(Command::SessionEnded { session, slices }).unwrap();
    }

    fn begin(&mut self, put: Put<'_>) -> Result<VersionId, Refusal> {
        match self.begin_outcome(put)? {
            Outcome::Begun { id, .. } | Outcome::Retry { id, .. } => Ok(id),
            outcome => panic!("{outcome:?}"),
        }
    }

    fn begin_outcome(&mut self, put: Put<'_>) -> Result<Outcome, Refusal> {
        self.last_id += 1;
        let Put { writer, writers, job, number, sequence, rewind, defaulted, .. } = put;
        let Put { durability, announced_contents, session, epoch, .. } = put;
        self.apply(Command::Begin(Begin {
            epoch,
            writer,
            writers: writers.parse().unwrap(),
            writers_defaulted: defaulted,
            job: job.map(job_id),
            sequence,
            number,
            rewind,
            durability,
            digest: announced_contents.map(|contents| ArchiveDigest([contents; 16])),
            session: session.map(SessionId),
            id: VersionId(self.last_id),
            keeps_earlier_runs: false,
            process: put.run.map(run_process),
            run_statuses: self.run_statuses.clone(),
            now: Timestamp(self.now),
        }))
    }

    fn commit(&mut self, id: VersionId, put: Put<'_>, contents: u8) -> Result<Outcome, Refusal> {
        self.apply(Command::Commit(Commit {
            id,
            writer: put.writer,
            job: put.job.map(job_id),
            digest: ArchiveDigest([contents; 16]),
            archives: vec![ArchiveReference { name: format!("{id}.{}", put.writer), file_len: 1 }],
            replica_session: self.replica_session,
            base: self.base,
            now: Timestamp(self.now),
        }))
    }

    /// Begins and commits. The digest of the contents is 7 in every byte.
    fn put(&mut self, put: Put<'_>) -> Result<VersionId, Refusal> {
        let id = self.begin(put)?;
        self.commit(id, put, 7)?;
        Ok(id)
    }

    fn verify(&mut self, id: VersionId) -> Result<Outcome, Refusal> {
        let (name, digest) = (format!("{id}"), ArchiveDigest([1; 16]));
        let manifest = ManifestReference { name, digest, file_len: 1, replica_session: None };
        self.apply(Command::Verified { id, manifest, now: Timestamp(self.now) })
    }

    /// Runs all pending effects. Every verification succeeds.
    fn run_effects(&mut self) {
        while let Some(effect) = pending(&self.state).first().copied() {
            match effect {
                Effect::Verify { id } => self.verify(id).unwrap(),
                Effect::Delete { id, .. } => self.apply(Command::Reclaimed { id }).unwrap(),
            };
        }
    }

    fn lease(&mut self, lease: u128, selector: Selector) -> Result<Outcome, Refusal> {
        self.apply(Command::Lease {
            selector,
            lease: LeaseId(lease),
            holder: "reader".to_owned(),
            ttl: Duration::from_mins(1),
            now: Timestamp(self.now),
        })
    }

    fn expire(&mut self) {
        self.apply(Command::Expire { now: Timestamp(self.now) }).unwrap();
    }

    fn visible_numbers(&self) -> Vec<u64> {
        self.state.visible().map(|version| version.number).collect()
    }

    fn drop_reason(&self, id: VersionId) -> Reason {
        match self.state.outcome_of(id) {
            Some(VersionOutcome::Dropped(reason)) => reason,
            fate => panic!("{fate:?}"),
        }
    }
}

#[derive(Clone, Copy)]
struct Put<'a> {
    writer: u32,
    writers: &'static str,
    job: Option<&'a str>,
    number: Option<u64>,
    sequence: Option<u64>,
    rewind: bool,
    defaulted: bool,
    durability: Durability,
    /// The contents that the writer announces with its begin.
    announced_contents: Option<u8>,
    session: Option<u128>,
    /// The epoch of the version, if it is a copy.
    epoch: Option<u32>,
    /// The run of the process that puts.
    run: Option<&'a str>,
}

/// Returns a put of one writer without a job.
fn single_put(number: Option<u64>) -> Put<'static> {
    Put {
        writer: 0,
        writers: "0",
        job: None,
        number,
        sequence: None,
        rewind: false,
        defaulted: true,
        durability: Durability::Memory,
        announced_contents: None,
        session: None,
        epoch: None,
        run: None,
    }
}

/// Returns a put of one of two writers of a job, with an explicit number.
fn numbered_put(job: &str, writer: u32, number: u64) -> Put<'_> {
    Put { writer, writers: "0-1", job: Some(job), number: Some(number), ..single_put(None) }
}

/// Returns a put of one of two writers of a job, with an implicit number.
fn implicit_put(job: &str, writer: u32, sequence: u64) -> Put<'_> {
    Put { number: None, sequence: Some(sequence), ..numbered_put(job, writer, 0) }
}

fn job_id(job: &str) -> JobId {
    JobId(job.to_owned())
}

fn label(text: &str) -> Label {
    Label::new(text).unwrap()
}

/// Returns a process of a run.
fn run_process(run: &str) -> RunProcess {
    RunProcess { run: RunId(run.to_owned()), host: "gpu-7".to_owned(), pid: 812 }
}

fn writers(text: &str) -> WriterSet {
    text.parse().unwrap()
}
