//! The rules of what a version is, each told as a story.

mod endings;
mod jobs;
mod numbers;
mod retention;
mod stored;

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::time::Duration;

use super::*;

const MINUTE: u64 = 60_000;

/// A ledger that is told a story: one moment, effects carried out only where the story says so.
#[derive(Default)]
struct Ledger {
    state: State,
    now: u64,
    ids: u128,
    /// Who keeps what is committed.
    keeper: Option<SessionId>,
}

impl Ledger {
    fn keeping(keep: u32) -> Self {
        let mut ledger = Self::default();
        let keep = NonZeroU32::new(keep).unwrap();
        ledger.give(Command::Retain { keep, ttl: None }).unwrap();
        ledger
    }

    fn give(&mut self, command: Command) -> Result<Outcome, Refusal> {
        let Step { state, outcome, .. } = step(&self.state, command)?;
        self.state = state;
        Ok(outcome)
    }

    /// A process ends.
    fn end(&mut self, session: u128) {
        let (session, slices) = (SessionId(session), BTreeMap::new());
        self.give(Command::SessionEnded { session, slices }).unwrap();
    }

    fn begin(&mut self, put: Put<'_>) -> Result<VersionId, Refusal> {
        match self.begin_outcome(put)? {
            Outcome::Begun { id, .. } | Outcome::Retry { id, .. } => Ok(id),
            outcome => panic!("{outcome:?}"),
        }
    }

    fn begin_outcome(&mut self, put: Put<'_>) -> Result<Outcome, Refusal> {
        self.ids += 1;
        let Put { writer, writers, job, number, call, rewind, defaulted, .. } = put;
        let Put { durability, offers, session, epoch, .. } = put;
        self.give(Command::Begin(Begin {
            epoch,
            writer,
            writers: writers.parse().unwrap(),
            writers_defaulted: defaulted,
            job: job.map(job_id),
            call,
            number,
            rewind,
            durability,
            digest: offers.map(|contents| Digest([contents; 16])),
            session: session.map(SessionId),
            id: VersionId(self.ids),
            now: Timestamp(self.now),
        }))
    }

    fn commit(&mut self, id: VersionId, put: Put<'_>, contents: u8) -> Result<Outcome, Refusal> {
        self.give(Command::Commit(Commit {
            id,
            writer: put.writer,
            job: put.job.map(job_id),
            digest: Digest([contents; 16]),
            archives: vec![ArchiveReference {
                name: format!("{id}.{}", put.writer),
                file_len: 1,
                bytes: 1,
            }],
            keeper: self.keeper,
            now: Timestamp(self.now),
        }))
    }

    /// Begins and commits; the contents are the number of the writer.
    fn put(&mut self, put: Put<'_>) -> Result<VersionId, Refusal> {
        let id = self.begin(put)?;
        self.commit(id, put, 7)?;
        Ok(id)
    }

    fn prove(&mut self, id: VersionId) -> Result<Outcome, Refusal> {
        let (name, digest) = (format!("{id}"), Digest([1; 16]));
        let manifest = ManifestReference { name, digest, file_len: 1, keeper: None };
        self.give(Command::Proved { id, manifest, now: Timestamp(self.now) })
    }

    /// Carries out all that is owed: proofs succeed.
    fn settle(&mut self) {
        while let Some(effect) = pending(&self.state).first().copied() {
            match effect {
                Effect::Prove { id } => self.prove(id).unwrap(),
                Effect::Delete { id, .. } => self.give(Command::Reclaimed { id }).unwrap(),
            };
        }
    }

    fn lease(&mut self, lease: u128, selector: Selector) -> Result<Outcome, Refusal> {
        self.give(Command::Lease {
            selector,
            lease: LeaseId(lease),
            holder: "reader".to_owned(),
            ttl: Duration::from_mins(1),
            now: Timestamp(self.now),
        })
    }

    fn expire(&mut self) {
        self.give(Command::Expire { now: Timestamp(self.now) }).unwrap();
    }

    fn visible(&self) -> Vec<u64> {
        self.state.visible().map(|version| version.number).collect()
    }

    fn reason(&self, id: VersionId) -> Reason {
        match self.state.outcome_of(id) {
            Some(Fate::Dropped(reason)) => reason,
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
    call: Option<u64>,
    rewind: bool,
    defaulted: bool,
    durability: Durability,
    /// The contents that it says it will have.
    offers: Option<u8>,
    session: Option<u128>,
    /// Where it has its place, if it is a copy.
    epoch: Option<u32>,
}

/// A put of one writer without a job.
fn alone(number: Option<u64>) -> Put<'static> {
    Put {
        writer: 0,
        writers: "0",
        job: None,
        number,
        call: None,
        rewind: false,
        defaulted: true,
        durability: Durability::Memory,
        offers: None,
        session: None,
        epoch: None,
    }
}

/// One of two writers of a job, with a number of the caller's.
fn step_of(job: &str, writer: u32, number: u64) -> Put<'_> {
    Put { writer, writers: "0-1", job: Some(job), number: Some(number), ..alone(None) }
}

/// One of two writers of a job, with an implicit number.
fn call_of(job: &str, writer: u32, call: u64) -> Put<'_> {
    Put { number: None, call: Some(call), ..step_of(job, writer, 0) }
}

fn job_id(job: &str) -> JobId {
    JobId(job.to_owned())
}

fn writers(text: &str) -> WriterSet {
    text.parse().unwrap()
}
