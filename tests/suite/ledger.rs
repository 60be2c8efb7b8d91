//! The ledger under random commands of several writers and jobs.
//!
//! Commands are lost, repeated and reordered. Effects run late, twice or never.
#![expect(clippy::unwrap_used, reason = "this is a test, though clippy sees its helpers alone")]

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;
use std::time::Duration;

use proptest::prelude::*;
use tssd_store::ledger::{
    ArchiveDigest, ArchiveReference, Begin, Command, Commit, Contribution, Durability, Effect,
    JobId, Label, LeaseId, MAX_OPEN, MAX_PENDING_DELETIONS, MAX_TOMBSTONES, ManifestReference,
    OPEN_TIMEOUT, Outcome, Reason, Refusal, RunId, RunProcess, RunStatus, Selection, Selector,
    SessionId, State, Status, Step, Timestamp, Version, VersionId, VersionOutcome, WriterSet,
    pending, step,
};

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(1000) })]

    #[test]
    fn random_commands_keep_all_invariants(actions in prop::collection::vec(any_action(), 1..120)) {
        let mut model = LedgerModel::default();
        for action in actions {
            model.run(action);
        }
        model.finish();
    }
}

/// One random action.
///
/// `nth_newest` selects a version by the number of versions that began after it. Numbers and calls are relative to a
/// little below the highest one.
#[derive(Clone, Debug)]
enum Action {
    /// One arbitrary command, which may make no sense.
    Apply(Command),
    /// A writer begins. A repeated begin has the version id of the last one.
    Begin { begin: Begin, repeats: bool },
    /// A writer commits, by default under the job of the version. With `replica`, only that session has the archive.
    Commit {
        nth_newest: usize,
        writer: u32,
        job: Option<JobId>,
        contents: u8,
        replica: Option<SessionId>,
        /// The version whose archives are the bases.
        base: Option<usize>,
    },
    /// All missing writers of a version commit.
    Complete { nth_newest: usize, replica: Option<SessionId>, base: Option<usize> },
    /// A command that names a version.
    OnVersion { nth_newest: usize, action: VersionAction },
    /// Runs all pending effects.
    RunPendingEffects,
}

/// How the archives of a contribution are stored.
#[derive(Clone, Copy)]
struct Stored {
    contents: u8,
    replica: Option<SessionId>,
    base: Option<VersionId>,
}

/// A command that names a version, without the id.
#[derive(Clone, Debug)]
enum VersionAction {
    Abort(u32),
    Proved(bool),
    Rejected,
    Reclaimed,
    Delete,
    Lease(u128),
    PublishReplicas(WriterSet, SessionId),
    ReleaseReplica(u32, SessionId),
    Stored,
    NotStored,
    Abandon,
}

fn any_action() -> impl Strategy<Value = Action> {
    let nth_newest = 0..4_usize;
    let replica = || prop::option::weighted(0.4, any_session());
    let job = prop::option::weighted(0.2, any_job());
    let base = prop::option::weighted(0.4, 0..4_usize);
    let commit = (nth_newest.clone(), 0..4_u32, job, 0..3_u8, replica(), base.clone());
    prop_oneof![
        8 => (any_begin(), prop::bool::weighted(0.1))
            .prop_map(|(begin, repeats)| Action::Begin { begin, repeats }),
        4 => commit.prop_map(|(nth_newest, writer, job, contents, replica, base)| {
            Action::Commit { nth_newest, writer, job, contents, replica, base }
        }),
        6 => (nth_newest.clone(), replica(), base)
            .prop_map(|(nth_newest, replica, base)| Action::Complete { nth_newest, replica, base }),
        3 => (nth_newest, any_version_action())
            .prop_map(|(nth_newest, action)| Action::OnVersion { nth_newest, action }),
        5 => Just(Action::RunPendingEffects),
        5 => any_command().prop_map(Action::Apply),
    ]
}

fn any_begin() -> impl Strategy<Value = Begin> {
    let party = prop_oneof![
        2 => (0..2_u32).prop_map(|writer| (WriterSet::one(writer), writer)),
        8 => (0..2_u32).prop_map(|writer| ((0..2).collect(), writer)),
        1 => (0..4_u32).prop_map(|writer| ((0..3).collect(), writer)),
    ];
    let name = prop_oneof![
        3 => (0..8_u64).prop_map(|number| (Some(number), None)),
        4 => (0..4_u64).prop_map(|sequence| (None, Some(sequence))),
        1 => Just((None, None)),
    ];
    let digest = prop::option::weighted(0.3, any_digest());
    let job = prop::option::weighted(0.8, any_job());
    let durability = prop_oneof![
        6 => Just(Durability::Memory),
        1 => Just(Durability::Disk),
        3 => Just(Durability::Object),
    ];
    let flags = (prop::bool::weighted(0.3), prop::bool::weighted(0.2), durability);
    let session = prop::option::weighted(0.5, any_session());
    let run = (prop::option::weighted(0.7, any_process()), any_run_statuses());
    (party, name, job, digest, flags, session, run).prop_map(
        |(party, name, job, digest, flags, session, (process, run_statuses))| {
            let (writers, writer) = party;
            let ((number, sequence), (rewind, writers_defaulted, durability)) = (name, flags);
            let (id, now) = (VersionId(0), Timestamp(0));
            Begin {
                writer,
                writers,
                writers_defaulted,
                job,
                sequence,
                number,
                rewind,
                durability,
                digest,
                session,
                id,
                epoch: None,
                keeps_earlier_runs: false,
                process,
                run_statuses,
                now,
            }
        },
    )
}

fn any_process() -> impl Strategy<Value = RunProcess> {
    (0..3_u32).prop_map(|pid| RunProcess {
        run: RunId(pid.to_string()),
        host: "host".to_owned(),
        pid,
    })
}

/// Returns statuses of all runs, or of some, so that the ledger asks for the others.
fn any_run_statuses() -> impl Strategy<Value = BTreeMap<RunId, RunStatus>> {
    let status = prop_oneof![
        4 => Just(RunStatus::Disconnected),
        2 => any_process().prop_map(RunStatus::Connected),
        1 => Just(RunStatus::Unknown),
    ];
    let statuses = prop::collection::vec(prop::option::weighted(0.9, status), 3);
    statuses.prop_map(|statuses| {
        let of_run = |(run, status): (usize, Option<RunStatus>)| {
            status.map(|status| (RunId(run.to_string()), status))
        };
        statuses.into_iter().enumerate().filter_map(of_run).collect()
    })
}

fn any_session() -> impl Strategy<Value = SessionId> {
    (0..3_u128).prop_map(SessionId)
}

/// Selects the newest job most of the time, so that versions become complete.
fn any_job() -> impl Strategy<Value = JobId> {
    let name = prop_oneof![40 => Just(NEWEST), 1 => Just(NEWER), 3 => Just(OLDER)];
    name.prop_map(|name| JobId(name.to_owned()))
}

const LABELS: [&str; 3] = ["good", "best", "last"];

const NEWEST: &str = "newest";
const NEWER: &str = "newer";
const OLDER: &str = "older";

fn any_digest() -> impl Strategy<Value = ArchiveDigest> {
    (0..3_u8).prop_map(|contents| ArchiveDigest([contents; 16]))
}

fn any_version_action() -> impl Strategy<Value = VersionAction> {
    prop_oneof![
        3 => (0..4_u32).prop_map(VersionAction::Abort),
        2 => prop::bool::weighted(0.2).prop_map(VersionAction::Proved),
        1 => Just(VersionAction::Rejected),
        1 => Just(VersionAction::Reclaimed),
        1 => Just(VersionAction::Delete),
        2 => (0..4_u128).prop_map(VersionAction::Lease),
        2 => (prop::collection::vec(0..3_u32, 1..3), any_session())
            .prop_map(|(writers, session)| {
                VersionAction::PublishReplicas(writers.into_iter().collect(), session)
            }),
        1 => (0..2_u32, any_session())
            .prop_map(|(writer, session)| VersionAction::ReleaseReplica(writer, session)),
        3 => Just(VersionAction::Stored),
        1 => Just(VersionAction::NotStored),
        1 => Just(VersionAction::Abandon),
    ]
}

fn any_command() -> impl Strategy<Value = Command> {
    let label = || prop::sample::select(&LABELS[..]).prop_map(|label| Label::new(label).unwrap());
    let selector = prop_oneof![
        2 => Just(Selector::Newest),
        2 => (0..6_u64).prop_map(Selector::Number),
        1 => label().prop_map(Selector::Label),
    ];
    let lease = |(selector, lease, holder): (_, _, u8)| Command::Lease {
        selector,
        lease: LeaseId(lease),
        holder: holder.to_string(),
        ttl: Duration::from_mins(2),
        now: Timestamp(0),
    };
    let keep = (1..4_u32).prop_map(|keep| NonZeroU32::new(keep).unwrap());
    let ttl = prop::option::weighted(0.3, Just(Duration::from_mins(30)));
    let selection = prop_oneof![
        1 => Just(Selection::All),
        4 => (0..6_u64).prop_map(Selection::Number),
        1 => label().prop_map(Selection::Label),
    ];
    let rollback = |selector| Command::Rollback { selector, position: None, now: Timestamp(0) };
    prop_oneof![
        3 => (0..480_000_u64).prop_map(|now| Command::Expire { now: Timestamp(now) }),
        4 => (selector.clone(), 0..4_u128, 0..2_u8).prop_map(lease),
        2 => (0..4_u128).prop_map(|lease| Command::Release { lease: LeaseId(lease) }),
        2 => any_session().prop_map(session_ended),
        2 => (selector.clone(), label())
            .prop_map(|(selector, label)| Command::Pin { selector, label }),
        2 => label().prop_map(|label| Command::Unpin { label: label.into() }),
        2 => selector.prop_map(rollback),
        2 => (keep, ttl).prop_map(|(keep, ttl)| Command::Retain { keep, ttl }),
        1 => selection.prop_map(|selection| Command::Delete { selection }),
    ]
}

/// Returns whether a visible version was not visible before, or had another position.
fn is_new_position(before: &State, version: &Version) -> bool {
    let earlier = before.visible().find(|earlier| earlier.id == version.id);
    earlier.is_none_or(|earlier| earlier.position() != version.position())
}

fn session_ended(session: SessionId) -> Command {
    Command::SessionEnded { session, slices: BTreeMap::new() }
}

/// The ledger, and everything that an observer of it has recorded.
#[derive(Default)]
struct LedgerModel {
    state: State,
    now: u64,
    keep: Option<NonZeroU32>,
    /// All versions that have begun, oldest first.
    begun: Vec<VersionId>,
    /// Each version as it was when it opened.
    opened: BTreeMap<VersionId, Version>,
    /// Each version as it was when it became visible.
    made_visible: BTreeMap<VersionId, Version>,
    committed: BTreeMap<(VersionId, u32), ArchiveDigest>,
    sequences: BTreeMap<(JobId, u64), VersionId>,
    last_sequence: u64,
    jobs: u32,
    fenced_jobs: BTreeSet<JobId>,
    outcomes: BTreeMap<VersionId, VersionOutcome>,
    begin_count: u128,
}

impl LedgerModel {
    fn run(&mut self, action: Action) {
        match action {
            Action::Apply(command) => {
                let command = self.resolve(command);
                self.apply(&command)
            }
            Action::Begin { begin, repeats } => {
                self.begin_count += u128::from(!repeats);
                let (id, now) = (VersionId(self.begin_count), Timestamp(self.now));
                let number = begin.number.map(|number| self.lowest() + number);
                let sequence =
                    begin.sequence.map(|sequence| self.last_sequence.saturating_sub(1) + sequence);
                let job = begin.job.map(|job| self.job(&job));
                self.apply(&Command::Begin(Begin { id, now, number, sequence, job, ..begin }))
            }
            Action::Commit { nth_newest, writer, job, contents, replica, base } => {
                let Some(id) = self.nth_newest(nth_newest) else {
                    return;
                };
                let version_job = self.opened[&id].job.clone();
                let job = job.map(|job| self.job(&job)).or(version_job);
                let base = base.and_then(|base| self.nth_newest(base));
                self.commit(id, writer, job, Stored { contents, replica, base })
            }
            Action::Complete { nth_newest, replica, base } => {
                let Some(id) = self.nth_newest(nth_newest) else { return };
                let base = base.and_then(|base| self.nth_newest(base));
                self.complete(id, replica, base);
                return;
            }
            Action::OnVersion { nth_newest, action } => {
                let Some(id) = self.nth_newest(nth_newest) else { return };
                self.apply(&self.version_command(id, action))
            }
            Action::RunPendingEffects => {
                self.run_pending_effects();
                return;
            }
        }
        .ok();
    }

    fn job(&mut self, name: &JobId) -> JobId {
        self.jobs += u32::from(name.0 == NEWER);
        JobId((self.jobs - u32::from(name.0 == OLDER && self.jobs > 0)).to_string())
    }

    /// Returns the number that actions and commands refer to as 0.
    fn lowest(&self) -> u64 {
        self.state.highest().unwrap_or(0).saturating_sub(3)
    }

    /// Replaces relative numbers and timestamps of a command by absolute ones. `Expire` advances the clock.
    fn resolve(&mut self, mut command: Command) -> Command {
        let lowest = self.lowest();
        match &mut command {
            Command::Expire { now } => {
                self.now += now.0;
                now.0 = self.now;
            }
            Command::Lease { now, .. } | Command::Rollback { now, .. } => now.0 = self.now,
            _ => {}
        }
        match &mut command {
            Command::Lease { selector: Selector::Number(number), .. }
            | Command::Pin { selector: Selector::Number(number), .. }
            | Command::Rollback { selector: Selector::Number(number), .. }
            | Command::Delete { selection: Selection::Number(number) } => *number += lowest,
            _ => {}
        }
        command
    }

    fn nth_newest(&self, nth_newest: usize) -> Option<VersionId> {
        self.begun.iter().rev().nth(nth_newest).copied()
    }

    fn commit(
        &mut self,
        id: VersionId,
        writer: u32,
        job: Option<JobId>,
        stored: Stored,
    ) -> Result<Outcome, Refusal> {
        let Stored { contents, replica, base } = stored;
        let archives = vec![ArchiveReference { name: format!("{id}.{writer}"), file_len: 9 }];
        let (digest, now) = (ArchiveDigest([contents; 16]), Timestamp(self.now));
        self.apply(&Command::Commit(Commit {
            id,
            writer,
            job,
            digest,
            archives,
            replica_session: replica,
            base,
            now,
        }))
    }

    fn complete(&mut self, id: VersionId, replica: Option<SessionId>, base: Option<VersionId>) {
        let Version { number, job, writers, durability, .. } = self.opened[&id].clone();
        for writer in writers.iter() {
            let begin = Begin {
                writer,
                writers: writers.clone(),
                writers_defaulted: false,
                job: job.clone(),
                sequence: None,
                number: Some(number),
                rewind: false,
                durability,
                digest: None,
                session: None,
                id: VersionId(u128::MAX - self.begin_count),
                epoch: None,
                keeps_earlier_runs: false,
                process: None,
                run_statuses: BTreeMap::new(),
                now: Timestamp(self.now),
            };
            self.begin_count += 1;
            self.apply(&Command::Begin(begin)).ok();
            self.commit(id, writer, job.clone(), Stored { contents: 1, replica, base }).ok();
        }
    }

    fn version_command(&self, id: VersionId, action: VersionAction) -> Command {
        let now = Timestamp(self.now);
        match action {
            VersionAction::Abort(writer) => Command::Abort { id, writer },
            VersionAction::Proved(is_other) => {
                let manifest = if is_other { manifest(VersionId(0)) } else { manifest(id) };
                Command::Verified { id, manifest, now }
            }
            VersionAction::Rejected => Command::Rejected { id, reason: "hole".repeat(400) },
            VersionAction::Reclaimed => Command::Reclaimed { id },
            VersionAction::Delete => Command::Delete { selection: Selection::Id(id) },
            VersionAction::PublishReplicas(writers, session) => {
                Command::PublishReplicas { id, writers, session }
            }
            VersionAction::ReleaseReplica(writer, session) => {
                Command::ReleaseReplica { id, writer, session }
            }
            VersionAction::Stored => Command::Uploaded { id },
            VersionAction::NotStored => Command::NotUploaded { id },
            VersionAction::Abandon => Command::Abandon { id },
            VersionAction::Lease(lease) => {
                let (selector, lease) = (Selector::Id(id), LeaseId(lease));
                let (holder, ttl) = ("0".to_owned(), Duration::from_mins(2));
                Command::Lease { selector, lease, holder, ttl, now }
            }
        }
    }

    /// Runs all pending effects, and checks that running an effect twice equals running it once.
    fn run_pending_effects(&mut self) {
        for _ in 0..1000 {
            let effects = pending(&self.state);
            let commands: Vec<_> =
                effects.iter().map(|effect| self.effect_result(*effect)).collect();
            let mut twice = self.state.clone();
            for command in commands.iter().chain(&commands) {
                if let Ok(step) = step(&twice, command.clone()) {
                    twice = step.state;
                }
            }
            for command in &commands {
                self.apply(command).ok();
            }
            assert_eq!(self.state, twice);
            if effects.is_empty() {
                return;
            }
        }
        panic!("effects never run out");
    }

    /// Returns the command that reports an effect as done.
    fn effect_result(&self, effect: Effect) -> Command {
        match effect {
            Effect::Verify { id } if id.0 % 8 == 7 => {
                self.version_command(id, VersionAction::Rejected)
            }
            Effect::Verify { id } => self.version_command(id, VersionAction::Proved(false)),
            Effect::Delete { id, .. } => Command::Reclaimed { id },
            _ => unreachable!("{effect:?}"),
        }
    }

    /// Ends all open versions, leases, pins and uploads. Then only retained versions remain.
    fn finish(&mut self) {
        self.run_pending_effects();
        self.now += u64::try_from(OPEN_TIMEOUT.as_millis()).unwrap();
        self.apply(&Command::Expire { now: Timestamp(self.now) }).unwrap();
        for lease in 0..4 {
            self.apply(&Command::Release { lease: LeaseId(lease) }).unwrap();
        }
        for label in LABELS {
            self.apply(&Command::Unpin { label: label.to_owned() }).unwrap();
        }
        for id in self.begun.clone() {
            self.apply(&Command::NotUploaded { id }).unwrap();
        }
        self.run_pending_effects();
        let bases = transitive_bases(&self.state);
        assert!(self.state.versions().all(|it| it.is_visible() || bases.contains(&it.id)));
        assert!(self.state.visible().count() <= 3 * self.keep());
        let ended = &serde_json::to_value(&self.state).unwrap()["tombstones"];
        assert!(ended.as_array().unwrap().len() <= MAX_TOMBSTONES);
        for id in self.opened.keys() {
            assert!(!matches!(self.state.outcome_of(*id), Some(VersionOutcome::Pending { .. })));
        }
    }

    fn keep(&self) -> usize {
        usize::try_from(self.keep.unwrap_or(NonZeroU32::MIN).get()).unwrap()
    }

    /// Applies a command, applies it again, and checks every invariant.
    fn apply(&mut self, command: &Command) -> Result<Outcome, Refusal> {
        let before = self.state.clone();
        let result = step(&before, command.clone());
        assert_eq!(result, step(&before, command.clone()), "`step` is not deterministic");
        self.check_fenced(command, &result);
        let Step { state, outcome, effects } = result?;
        if let Ok(again) = step(&state, command.clone()) {
            assert_eq!((&again.state, again.effects), (&state, Vec::new()), "{command:?}");
        }
        if let Command::Retain { keep, .. } = command {
            self.keep = Some(*keep);
        }
        self.state = state;
        self.check_effects(&before, &effects);
        self.check_outcome(command, &outcome);
        self.check_versions(command);
        self.check_progress(&before, command);
        self.check_retention(&before, command);
        self.check_outcomes();
        self.check_size();
        self.check_durable(&before);
        self.check_serialization(&before);
        self.check_sessions(command);
        self.check_replicas(&before, command);
        Ok(outcome)
    }

    /// Only contributions that have begun and not committed have a session. No version of an ended session is open.
    fn check_sessions(&self, command: &Command) {
        for version in self.state.versions() {
            for (writer, session) in &version.sessions {
                assert_eq!(version.contributions[writer], Contribution::Begun);
                let has_ended =
                    matches!(command, Command::SessionEnded { session: it, .. } if it == session);
                assert!(!has_ended || !version.is_open(), "{version:?}");
            }
        }
    }

    /// A contribution is lost exactly if its last replica ends. A lost version is neither readable nor leased.
    fn check_replicas(&mut self, before: &State, command: &Command) {
        for version in before.versions() {
            let now = self.state.versions().find(|now| now.id == version.id);
            let Some(now) = now else { continue };
            let mut lost_writers = BTreeSet::new();
            for (writer, contribution) in &version.contributions {
                let replicas: Vec<_> = contribution.replica_sessions().collect();
                let remaining =
                    now.contributions.get(writer).map(|now| now.replica_sessions().collect());
                let mut expected = replicas.clone();
                match command {
                    Command::SessionEnded { session, .. } => {
                        expected.retain(|replica| replica != session);
                        if replicas == [*session] && !version.uploaded {
                            lost_writers.insert(*writer);
                        }
                    }
                    Command::PublishReplicas { id, writers, session }
                        if *id == version.id
                            && writers.contains(*writer)
                            && version.is_visible()
                            && !replicas.is_empty()
                            && !replicas.contains(session) =>
                    {
                        expected.push(*session);
                    }
                    Command::ReleaseReplica { id, writer: of, session }
                        if (id, of) == (&version.id, writer) && replicas != [*session] =>
                    {
                        expected.retain(|replica| replica != session);
                    }
                    Command::Commit(Commit { id, writer: of, .. })
                        if (id, of) == (&version.id, writer)
                            && *contribution == Contribution::Begun =>
                    {
                        continue;
                    }
                    _ => {}
                }
                assert!(
                    remaining.is_none_or(|remaining: Vec<_>| remaining == expected),
                    "{command:?}"
                );
            }
            let was_live = version.is_open() || version.is_visible();
            let reason = match &now.status {
                Status::Dropped { reason: Reason::Lost { writers, .. } } => Some(writers.clone()),
                _ => None,
            };
            // If the session also has an uncommitted contribution, the version is dropped as aborted instead.
            let is_aborted = version.is_open()
                && matches!(&now.status, Status::Dropped { reason: Reason::Aborted { .. } });
            if was_live && !lost_writers.is_empty() && !is_aborted {
                assert_eq!(reason, Some(lost_writers.into_iter().collect()), "{command:?}");
                assert!(!self.state.is_held(now.id));
                let number = now.number;
                let refusal = self.state.select(&Selector::Id(now.id)).err();
                let is_lost = |refusal: &Refusal| matches!(refusal, Refusal::Dropped { number: of, reason: Reason::Lost { .. } } if *of == number);
                assert!(refusal.as_ref().is_some_and(is_lost), "{refusal:?}");
                self.outcomes.insert(now.id, now.outcome());
                self.made_visible.remove(&now.id);
            } else if was_live {
                assert_eq!(reason, None, "{command:?}");
            }
        }
    }

    /// A fenced job changes nothing.
    fn check_fenced(&mut self, command: &Command, result: &Result<Step, Refusal>) {
        let job = match command {
            Command::Begin(Begin { job, .. }) | Command::Commit(Commit { job, .. }) => job.as_ref(),
            _ => None,
        };
        let newest = self.state.job().cloned();
        let is_fenced = job.is_some_and(|job| self.fenced_jobs.contains(job));
        let is_incomplete =
            matches!(result, Err(Refusal::NotAWriter { .. } | Refusal::SequenceRequired { .. }));
        if let Some(by) = newest.clone().filter(|_| is_fenced && !is_incomplete) {
            assert_eq!(result, &Err(Refusal::Fenced { job: by }));
        }
        if let (Ok(step), Some(newest)) = (result, newest)
            && step.state.job() != Some(&newest)
        {
            assert!(matches!(command, Command::Begin(_)));
            self.fenced_jobs.insert(newest);
        }
    }

    /// A step returns the effects that become pending. Data in use is never deleted. An effect stays pending until it
    /// is done.
    fn check_effects(&self, before: &State, effects: &[Effect]) {
        let (previous, current) = (pending(before), pending(&self.state));
        let new: Vec<_> = current.iter().filter(|it| !previous.contains(it)).copied().collect();
        assert_eq!(effects, new);
        for effect in &current {
            if let Effect::Delete { id, epoch, number } = *effect {
                let version = self.state.versions().find(|version| version.id == id).unwrap();
                assert_eq!((version.epoch, version.number), (epoch, number));
                assert!(!self.state.is_held(id) && !version.is_open() && !version.is_visible());
                assert!(!transitive_bases(&self.state).contains(&id));
            }
        }
        for base in transitive_bases(&self.state) {
            assert!(self.state.versions().any(|version| version.id == base), "a base is deleted");
        }
        for effect in previous {
            if let Effect::Delete { id, .. } = effect {
                let is_known = self.state.versions().any(|version| version.id == id);
                assert!(current.contains(&effect) || !is_known, "{effect:?} is no longer pending");
            }
        }
    }

    fn check_outcome(&mut self, command: &Command, outcome: &Outcome) {
        match (command, outcome) {
            (Command::Begin(begin), Outcome::Begun { id, .. } | Outcome::Retry { id, .. }) => {
                let version = self.state.versions().find(|version| version.id == *id).unwrap();
                assert_eq!((&version.job, &version.writers), (&begin.job, &begin.writers));
                if !self.begun.contains(id) {
                    self.begun.push(*id);
                }
                if let (None, Some(job), Some(sequence)) =
                    (begin.number, &begin.job, begin.sequence)
                {
                    self.check_sequence(job, sequence, *id);
                }
            }
            (Command::Verified { id, manifest, .. }, _) => {
                let version = self.state.versions().find(|version| version.id == *id);
                assert_eq!(version.and_then(Version::manifest), Some(manifest));
            }
            (Command::Commit(commit), Outcome::Committed { missing, .. }) => {
                let Commit { id, writer, digest, .. } = commit;
                assert_eq!(commit.job, self.opened[id].job, "the version mixes jobs");
                assert!(self.opened[id].writers.contains(*writer) && !missing.contains(*writer));
                let committed = self.committed.entry((*id, *writer)).or_insert(*digest);
                assert_eq!(committed, digest, "the contribution changed");
            }
            _ => {}
        }
    }

    /// A put opens one version, and the puts of a job open versions in order.
    fn check_sequence(&mut self, job: &JobId, sequence: u64, id: VersionId) {
        let is_later = |(other_job, other_sequence): &(JobId, u64)| {
            other_job == job && *other_sequence > sequence
        };
        match self.sequences.get(&(job.clone(), sequence)) {
            Some(opened) => assert_eq!(*opened, id, "one put opened two versions"),
            None => assert!(
                !self.sequences.keys().any(is_later),
                "a put opened a version after a later one"
            ),
        }
        self.sequences.insert((job.clone(), sequence), id);
        self.last_sequence = self.last_sequence.max(sequence);
    }

    fn check_versions(&mut self, command: &Command) {
        let mut names = BTreeSet::new();
        for version in self.state.versions() {
            let opened = self.opened.entry(version.id).or_insert_with(|| version.clone());
            if matches!(command, Command::Rollback { .. })
                && opened.position() != version.position()
            {
                assert_eq!(opened.stored_position(), version.stored_position());
                assert_eq!(version.position(), self.state.head().unwrap().position());
                (opened.epoch, opened.number) = (version.epoch, version.number);
                (opened.stored_at, opened.rewind_from) = (version.stored_at, None);
            }
            let identity = |it: &Version| (it.epoch, it.number, it.sequence, it.rewind_from);
            assert_eq!(identity(opened), identity(version));
            assert_eq!((&opened.job, &opened.writers), (&version.job, &version.writers));
            assert!(names.insert((version.epoch, version.number)), "two versions have one name");
            for (writer, contribution) in &version.contributions {
                assert!(version.writers.contains(*writer));
                if let Contribution::Committed { digest, .. } = contribution {
                    assert_eq!(self.committed.get(&(version.id, *writer)), Some(digest));
                }
            }
            if version.manifest().is_some() {
                let visible_version = self.made_visible.entry(version.id).or_insert_with(|| {
                    let is_proof = |command: &Command| match command {
                        Command::Verified { id, manifest, .. } => {
                            *id == version.id && Some(manifest) == version.manifest()
                        }
                        _ => false,
                    };
                    assert!(is_proof(command), "visible without a valid manifest");
                    assert!(version.missing().is_empty(), "visible with a missing contribution");
                    version.clone()
                });
                assert!(visible_version.contributions.keys().eq(version.contributions.keys()));
                let archives = |of: &Version| {
                    let all = of.contributions.values().map(Contribution::archives);
                    all.map(<[_]>::to_vec).collect::<Vec<_>>()
                };
                assert_eq!(archives(visible_version), archives(version));
                assert_eq!(visible_version.manifest(), version.manifest());
            }
            if version.is_open() {
                let is_fenced =
                    version.job.as_ref().is_some_and(|job| self.fenced_jobs.contains(job));
                assert!(!is_fenced, "a fenced job has an open version");
                let is_proving = matches!(version.status, Status::Verifying { .. });
                assert_eq!(is_proving, version.missing().is_empty());
            }
        }
        assert!(self.state.open().count() <= MAX_OPEN);
    }

    /// Versions become visible in the order of epoch and number. Only deletion, expiry and the end of a session move
    /// the head backwards.
    fn check_progress(&self, before: &State, command: &Command) {
        let highest = |state: &State| (state.epoch(), state.highest());
        let name = |version: &Version| (version.epoch, version.number);
        assert!(highest(before) <= highest(&self.state));
        for version in self.state.visible() {
            if is_new_position(before, version) {
                let (epoch, number) = name(version);
                assert!((epoch, Some(number)) > highest(before));
                assert_eq!((epoch, Some(number)), highest(&self.state));
                assert!(self.state.open().all(|open| name(open) > (epoch, number)));
            }
        }
        if !matches!(
            command,
            Command::Delete { .. } | Command::Expire { .. } | Command::SessionEnded { .. }
        ) {
            assert!(before.head().map(name) <= self.state.head().map(name));
        }
    }

    /// Exactly these versions stay visible: the newest K, the newest K durable ones, those that are being uploaded to a
    /// bucket, and pinned ones. Pinned and leased versions have their data.
    fn check_retention(&self, before: &State, command: &Command) {
        let visible = |state: &State| state.visible().map(|it| it.id).collect::<Vec<_>>();
        if !matches!(command, Command::Delete { .. } | Command::Expire { .. }) {
            let new = self.state.visible().filter(|it| is_new_position(before, it));
            let new: Vec<_> = new.collect();
            let is_moved = |version: &&Version| new.iter().any(|new| new.id == version.id);
            // A later run replaces neither durable nor pinned versions by itself.
            let is_kept = |version: &Version| {
                let is_pinned = before.pins().any(|(_, id)| id == version.id);
                version.durability != Durability::Memory || is_pinned
            };
            let is_rewound = |version: &&Version| {
                new.first().is_some_and(|new| {
                    version.epoch < new.epoch
                        && new.rewind_from.is_some_and(|from| version.number >= from)
                        && !(new.replaces_ended_runs && is_kept(version))
                })
            };
            let is_lost = |version: &&Version| {
                let mut replicas =
                    version.contributions.values().map(Contribution::replica_sessions);
                match command {
                    Command::SessionEnded { session, .. } => {
                        !version.uploaded
                            && replicas.any(|replicas| replicas.collect::<Vec<_>>() == [*session])
                    }
                    _ => false,
                }
            };
            let expected =
                before.visible().filter(|it| !is_rewound(it) && !is_lost(it) && !is_moved(it));
            let expected = expected.chain(new.iter().copied());
            let mut expected: Vec<_> = expected.map(|version| version.id).collect();
            let now = |id: &VersionId| self.state.versions().find(|version| version.id == *id);
            let newest_durable = |stored: bool| {
                let is_match =
                    move |version: &Version| version.is_durable() && version.uploaded == stored;
                let durable = expected.iter().rev().filter(move |id| now(id).is_some_and(is_match));
                durable.take(self.keep()).copied()
            };
            let mut retained: BTreeSet<VersionId> =
                newest_durable(false).chain(newest_durable(true)).collect();
            retained.extend(expected.iter().rev().take(self.keep()));
            retained.extend(self.state.pins().map(|(_, id)| id));
            let is_uploading = |id: &VersionId| now(id).is_some_and(Version::is_upload_pending);
            expected.retain(|id| retained.contains(id) || is_uploading(id));
            assert_eq!(visible(&self.state), expected, "{command:?}");
        }
        let has_data = |id| self.state.versions().any(|version| version.id == id);
        assert!(self.state.pins().all(|(_, id)| has_data(id)));
        let leases = (0..4).filter_map(|lease| self.state.lease(LeaseId(lease)));
        assert!(leases.into_iter().all(|lease| has_data(lease.version)));
    }

    /// The outcome of a version, once known, never changes. The ledger may only forget it.
    fn check_outcomes(&mut self) {
        for id in self.opened.keys() {
            let (known, now) = (self.outcomes.get(id), self.state.outcome_of(*id));
            match (known, now) {
                (Some(VersionOutcome::Pending { .. }) | None, Some(now)) => {
                    self.outcomes.insert(*id, now);
                }
                // A visible version may be lost later.
                (
                    Some(VersionOutcome::Visible),
                    Some(VersionOutcome::Dropped(Reason::Lost { .. })),
                ) => {}
                (Some(known), Some(now)) => assert_eq!(known, &now),
                (known, None) => assert!(!matches!(known, Some(VersionOutcome::Pending { .. }))),
            }
        }
    }

    /// A version that is stored in a bucket stays stored. After all sessions have ended, only durable
    /// versions remain, and all of them.
    fn check_durable(&self, before: &State) {
        for version in before.versions().filter(|version| version.uploaded) {
            let now = self.state.versions().find(|now| now.id == version.id);
            assert!(now.is_none_or(|now| now.uploaded && now.is_durable()));
        }
        let durable = self.state.durable_state();
        let remaining = self.state.versions().filter(|version| version.is_durable());
        let is_retained = |version: &Version| {
            version.is_visible() || self.state.pins().any(|(_, id)| id == version.id)
        };
        let remaining = remaining.map(|version| {
            let mut version = version.clone();
            // A version that is about to be deleted loses its sequence number.
            version.sequence = version.sequence.filter(|_| is_retained(&version));
            version
        });
        assert!(durable.versions().cloned().eq(remaining));
        let newest = durable.versions().map(|version| (version.epoch, version.number)).max();
        assert!(newest <= durable.highest().map(|number| (durable.epoch(), number)));
        assert_eq!(durable.durable_state(), durable);
    }

    /// Every state survives serialization to JSON.
    fn check_serialization(&self, before: &State) {
        if self.state != *before {
            let text = serde_json::to_vec(&self.state).unwrap();
            assert_eq!(serde_json::from_slice::<State>(&text).unwrap(), self.state);
        }
    }

    fn check_size(&self) {
        let uploading = self.state.versions().filter(|version| version.is_upload_pending()).count();
        let in_use = self.state.pins().count() + 4 + uploading;
        let retained = 3 * self.keep();
        assert!(
            self.state.versions().count()
                <= 2 * MAX_OPEN + retained + in_use + MAX_PENDING_DELETIONS + 4
        );
    }
}

/// Returns the versions from which the archives of readable versions are computed, one version after the other.
fn transitive_bases(state: &State) -> BTreeSet<VersionId> {
    let is_readable = |it: &&Version| it.is_open() || it.is_visible() || state.is_held(it.id);
    let mut bases: BTreeSet<VersionId> =
        state.versions().filter(is_readable).flat_map(Version::bases).collect();
    loop {
        let further = state.versions().filter(|version| bases.contains(&version.id));
        let further: Vec<VersionId> = further.flat_map(Version::bases).collect();
        let count = bases.len();
        bases.extend(further);
        if bases.len() == count {
            return bases;
        }
    }
}

fn manifest(id: VersionId) -> ManifestReference {
    let (name, digest) = (format!("{id}.manifest"), ArchiveDigest([9; 16]));
    ManifestReference { name, digest, file_len: 1, replica_session: None }
}
