//! The ledger under random commands: several writers and jobs, commands lost, repeated and out of
//! order, effects carried out late, twice or never.
#![expect(clippy::unwrap_used, reason = "this is a test, though clippy sees its helpers alone")]

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;
use std::time::Duration;

use proptest::prelude::*;
use tssd_store::ledger::{
    ArchiveReference, Begin, Command, Commit, Contribution, Digest, Durability, Effect, Fate,
    JobId, LeaseId, MAX_DELETIONS, MAX_ENDED, MAX_OPEN, ManifestReference, OPEN_LIMIT, Outcome,
    Reason, Refusal, Selection, Selector, SessionId, State, Status, Step, Timestamp, Version,
    VersionId, WriterSet, pending, step,
};

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(1000) })]

    #[test]
    fn no_sequence_of_commands_breaks_a_rule(moves in prop::collection::vec(any_move(), 1..120)) {
        let mut world = World::default();
        for next in moves {
            world.play(next);
        }
        world.end();
    }
}

/// What happens next. Versions are named by how many began after them; numbers and calls count from
/// a little below the highest.
#[derive(Clone, Debug)]
enum Move {
    /// One command, however senseless.
    Give(Command),
    /// A writer begins; a repetition has the identity of the last begin.
    Begin { begin: Begin, repeats: bool },
    /// A writer commits, by default under the job of the version; a process keeps it, or all do.
    Commit { back: usize, writer: u32, job: Option<JobId>, contents: u8, keeper: Option<SessionId> },
    /// All writers of a version that are missing commit.
    Complete { back: usize, keeper: Option<SessionId> },
    /// A command about the version.
    About { back: usize, about: About },
    /// Somebody carries out everything that is owed.
    Settle,
}

#[derive(Clone, Debug)]
enum About {
    Abort(u32),
    Proved(bool),
    Rejected,
    Reclaimed,
    Delete,
    Lease(u128),
    Keep(WriterSet, SessionId),
    LetGo(u32, SessionId),
    Stored,
    NotStored,
    Abandon,
}

fn any_move() -> impl Strategy<Value = Move> {
    let back = 0..4_usize;
    let keeper = || prop::option::weighted(0.4, any_session());
    let job = prop::option::weighted(0.2, any_job());
    let commit = (back.clone(), 0..4_u32, job, 0..3_u8, keeper());
    prop_oneof![
        8 => (any_begin(), prop::bool::weighted(0.1))
            .prop_map(|(begin, repeats)| Move::Begin { begin, repeats }),
        4 => commit.prop_map(|(back, writer, job, contents, keeper)| {
            Move::Commit { back, writer, job, contents, keeper }
        }),
        6 => (back.clone(), keeper()).prop_map(|(back, keeper)| Move::Complete { back, keeper }),
        3 => (back, any_about()).prop_map(|(back, about)| Move::About { back, about }),
        5 => Just(Move::Settle),
        5 => any_command().prop_map(Move::Give),
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
        4 => (0..4_u64).prop_map(|call| (None, Some(call))),
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
    (party, name, job, digest, flags, session).prop_map(
        |(party, name, job, digest, flags, session)| {
            let (writers, writer) = party;
            let ((number, call), (rewind, writers_defaulted, durability)) = (name, flags);
            let (id, now) = (VersionId(0), Timestamp(0));
            Begin {
                writer,
                writers,
                writers_defaulted,
                job,
                call,
                number,
                rewind,
                durability,
                digest,
                session,
                id,
                epoch: None,
                now,
            }
        },
    )
}

fn any_session() -> impl Strategy<Value = SessionId> {
    (0..3_u128).prop_map(SessionId)
}

/// Mostly the newest job, so that versions become complete.
fn any_job() -> impl Strategy<Value = JobId> {
    let name = prop_oneof![40 => Just(NEWEST), 1 => Just(NEWER), 3 => Just(OLDER)];
    name.prop_map(|name| JobId(name.to_owned()))
}

const NEWEST: &str = "newest";
const NEWER: &str = "newer";
const OLDER: &str = "older";

fn any_digest() -> impl Strategy<Value = Digest> {
    (0..3_u8).prop_map(|contents| Digest([contents; 16]))
}

fn any_about() -> impl Strategy<Value = About> {
    prop_oneof![
        3 => (0..4_u32).prop_map(About::Abort),
        2 => prop::bool::weighted(0.2).prop_map(About::Proved),
        1 => Just(About::Rejected),
        1 => Just(About::Reclaimed),
        1 => Just(About::Delete),
        2 => (0..4_u128).prop_map(About::Lease),
        2 => (prop::collection::vec(0..3_u32, 1..3), any_session())
            .prop_map(|(writers, keeper)| About::Keep(writers.into_iter().collect(), keeper)),
        1 => (0..2_u32, any_session()).prop_map(|(writer, keeper)| About::LetGo(writer, keeper)),
        3 => Just(About::Stored),
        1 => Just(About::NotStored),
        1 => Just(About::Abandon),
    ]
}

fn any_command() -> impl Strategy<Value = Command> {
    let selector = prop_oneof![Just(Selector::Newest), (0..6_u64).prop_map(Selector::Number)];
    let label = || (0..3_u8).prop_map(|label| label.to_string());
    let lease = |(selector, lease, holder): (_, _, u8)| Command::Lease {
        selector,
        lease: LeaseId(lease),
        holder: holder.to_string(),
        ttl: Duration::from_mins(2),
        now: Timestamp(0),
    };
    let keep = (1..4_u32).prop_map(|keep| NonZeroU32::new(keep).unwrap());
    let ttl = prop::option::weighted(0.3, Just(Duration::from_mins(30)));
    let selection =
        prop_oneof![1 => Just(Selection::All), 4 => (0..6_u64).prop_map(Selection::Number)];
    prop_oneof![
        3 => (0..480_000_u64).prop_map(|now| Command::Expire { now: Timestamp(now) }),
        4 => (selector.clone(), 0..4_u128, 0..2_u8).prop_map(lease),
        2 => (0..4_u128).prop_map(|lease| Command::Release { lease: LeaseId(lease) }),
        1 => (0..2_u8).prop_map(|holder| Command::HolderGone { holder: holder.to_string() }),
        2 => any_session().prop_map(ended),
        2 => (selector, label()).prop_map(|(selector, label)| Command::Pin { selector, label }),
        2 => label().prop_map(|label| Command::Unpin { label }),
        2 => (keep, ttl).prop_map(|(keep, ttl)| Command::Retain { keep, ttl }),
        1 => selection.prop_map(|selection| Command::Delete { selection }),
    ]
}

fn ended(session: SessionId) -> Command {
    Command::SessionEnded { session, slices: BTreeMap::new() }
}

/// The ledger, and what an observer has seen of it.
#[derive(Default)]
struct World {
    state: State,
    now: u64,
    keep: Option<NonZeroU32>,
    /// The versions that were begun, oldest first.
    begun: Vec<VersionId>,
    /// What was said of each version when it opened.
    opened: BTreeMap<VersionId, Version>,
    /// What each version was when it became visible.
    shown: BTreeMap<VersionId, Version>,
    committed: BTreeMap<(VersionId, u32), Digest>,
    calls: BTreeMap<(JobId, u64), VersionId>,
    last_call: u64,
    jobs: u32,
    fenced: BTreeSet<JobId>,
    fates: BTreeMap<VersionId, Fate>,
    proposed: u128,
}

impl World {
    fn play(&mut self, next: Move) {
        match next {
            Move::Give(command) => {
                let command = self.dated(command);
                self.give(&command)
            }
            Move::Begin { begin, repeats } => {
                self.proposed += u128::from(!repeats);
                let (id, now) = (VersionId(self.proposed), Timestamp(self.now));
                let number = begin.number.map(|number| self.lowest() + number);
                let call = begin.call.map(|call| self.last_call.saturating_sub(1) + call);
                let job = begin.job.map(|job| self.job(&job));
                self.give(&Command::Begin(Begin { id, now, number, call, job, ..begin }))
            }
            Move::Commit { back, writer, job, contents, keeper } => {
                let Some(id) = self.back(back) else {
                    return;
                };
                let of_version = self.opened[&id].job.clone();
                let job = job.map(|job| self.job(&job)).or(of_version);
                self.commit(id, writer, job, contents, keeper)
            }
            Move::Complete { back, keeper } => {
                let Some(id) = self.back(back) else { return };
                self.complete(id, keeper);
                return;
            }
            Move::About { back, about } => {
                let Some(id) = self.back(back) else { return };
                self.give(&self.about(id, about))
            }
            Move::Settle => {
                self.settle();
                return;
            }
        }
        .ok();
    }

    fn job(&mut self, name: &JobId) -> JobId {
        self.jobs += u32::from(name.0 == NEWER);
        JobId((self.jobs - u32::from(name.0 == OLDER && self.jobs > 0)).to_string())
    }

    /// The number that a move calls 0.
    fn lowest(&self) -> u64 {
        self.state.highest().unwrap_or(0).saturating_sub(3)
    }

    /// A command with the numbers and the moment that it means. Time passes by what an expiry says.
    fn dated(&mut self, mut command: Command) -> Command {
        let lowest = self.lowest();
        match &mut command {
            Command::Expire { now } => {
                self.now += now.0;
                now.0 = self.now;
            }
            Command::Lease { now, .. } => now.0 = self.now,
            _ => {}
        }
        match &mut command {
            Command::Lease { selector: Selector::Number(number), .. }
            | Command::Pin { selector: Selector::Number(number), .. }
            | Command::Delete { selection: Selection::Number(number) } => *number += lowest,
            _ => {}
        }
        command
    }

    fn back(&self, back: usize) -> Option<VersionId> {
        self.begun.iter().rev().nth(back).copied()
    }

    fn commit(
        &mut self,
        id: VersionId,
        writer: u32,
        job: Option<JobId>,
        contents: u8,
        keeper: Option<SessionId>,
    ) -> Result<Outcome, Refusal> {
        let archives =
            vec![ArchiveReference { name: format!("{id}.{writer}"), file_len: 9, bytes: 8 }];
        let (digest, now) = (Digest([contents; 16]), Timestamp(self.now));
        self.give(&Command::Commit(Commit { id, writer, job, digest, archives, keeper, now }))
    }

    fn complete(&mut self, id: VersionId, keeper: Option<SessionId>) {
        let Version { number, job, writers, durability, .. } = self.opened[&id].clone();
        for writer in writers.iter() {
            let begin = Begin {
                writer,
                writers: writers.clone(),
                writers_defaulted: false,
                job: job.clone(),
                call: None,
                number: Some(number),
                rewind: false,
                durability,
                digest: None,
                session: None,
                id: VersionId(u128::MAX - self.proposed),
                epoch: None,
                now: Timestamp(self.now),
            };
            self.proposed += 1;
            self.give(&Command::Begin(begin)).ok();
            self.commit(id, writer, job.clone(), 1, keeper).ok();
        }
    }

    fn about(&self, id: VersionId, about: About) -> Command {
        let now = Timestamp(self.now);
        match about {
            About::Abort(writer) => Command::Abort { id, writer },
            About::Proved(other) => {
                let manifest = if other { manifest(VersionId(0)) } else { manifest(id) };
                Command::Proved { id, manifest, now }
            }
            About::Rejected => Command::Rejected { id, reason: "hole".repeat(400) },
            About::Reclaimed => Command::Reclaimed { id },
            About::Delete => Command::Delete { selection: Selection::Id(id) },
            About::Keep(writers, session) => Command::Keep { id, writers, session },
            About::LetGo(writer, session) => Command::LetGo { id, writer, session },
            About::Stored => Command::Stored { id },
            About::NotStored => Command::NotStored { id },
            About::Abandon => Command::Abandon { id },
            About::Lease(lease) => {
                let (selector, lease) = (Selector::Id(id), LeaseId(lease));
                let (holder, ttl) = ("0".to_owned(), Duration::from_mins(2));
                Command::Lease { selector, lease, holder, ttl, now }
            }
        }
    }

    /// Carries out what is owed, and proves that twice is as good as once.
    fn settle(&mut self) {
        for _ in 0..1000 {
            let owed = pending(&self.state);
            let commands: Vec<_> = owed.iter().map(|effect| self.carried_out(*effect)).collect();
            let mut twice = self.state.clone();
            for command in commands.iter().chain(&commands) {
                if let Ok(step) = step(&twice, command.clone()) {
                    twice = step.state;
                }
            }
            for command in &commands {
                self.give(command).ok();
            }
            assert_eq!(self.state, twice);
            if owed.is_empty() {
                return;
            }
        }
        panic!("effects are owed for ever");
    }

    fn carried_out(&self, effect: Effect) -> Command {
        match effect {
            Effect::Prove { id } if id.0 % 8 == 7 => self.about(id, About::Rejected),
            Effect::Prove { id } => self.about(id, About::Proved(false)),
            Effect::Delete { id, .. } => Command::Reclaimed { id },
            _ => unreachable!("{effect:?}"),
        }
    }

    /// When all is said and done nothing is open, and only what retention keeps is left.
    fn end(&mut self) {
        self.settle();
        self.now += u64::try_from(OPEN_LIMIT.as_millis()).unwrap();
        self.give(&Command::Expire { now: Timestamp(self.now) }).unwrap();
        for holder in ["0", "1"] {
            self.give(&Command::HolderGone { holder: holder.to_owned() }).unwrap();
        }
        for label in ["0", "1", "2"] {
            self.give(&Command::Unpin { label: label.to_owned() }).unwrap();
        }
        for id in self.begun.clone() {
            self.give(&Command::NotStored { id }).unwrap();
        }
        self.settle();
        assert!(self.state.versions().all(Version::is_visible));
        assert!(self.state.visible().count() <= 3 * self.keep());
        let ended = &serde_json::to_value(&self.state).unwrap()["ended"];
        assert!(ended.as_array().unwrap().len() <= MAX_ENDED);
        for id in self.opened.keys() {
            assert!(!matches!(self.state.outcome_of(*id), Some(Fate::Pending { .. })));
        }
    }

    fn keep(&self) -> usize {
        usize::try_from(self.keep.unwrap_or(NonZeroU32::MIN).get()).unwrap()
    }

    /// Gives a command, repeats it, and checks every rule.
    fn give(&mut self, command: &Command) -> Result<Outcome, Refusal> {
        let before = self.state.clone();
        let result = step(&before, command.clone());
        assert_eq!(result, step(&before, command.clone()), "not deterministic");
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
        self.check_fates();
        self.check_size();
        self.check_durable(&before);
        self.check_stored(&before);
        self.check_sessions(command);
        self.check_keepers(&before, command);
        Ok(outcome)
    }

    /// Who has begun and not committed has a session, and nothing of one that has ended is open.
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

    /// What a process kept alone is lost with it, and nothing else; what is lost nobody reads or holds.
    fn check_keepers(&mut self, before: &State, command: &Command) {
        for version in before.versions() {
            let now = self.state.versions().find(|now| now.id == version.id);
            let Some(now) = now else { continue };
            let mut alone = BTreeSet::new();
            for (writer, contribution) in &version.contributions {
                let keepers: Vec<_> = contribution.keepers().collect();
                let left = now.contributions.get(writer).map(|now| now.keepers().collect());
                let mut wanted = keepers.clone();
                match command {
                    Command::SessionEnded { session, .. } => {
                        wanted.retain(|keeper| keeper != session);
                        if keepers == [*session] && !version.stored {
                            alone.insert(*writer);
                        }
                    }
                    Command::Keep { id, writers, session }
                        if *id == version.id
                            && writers.contains(*writer)
                            && version.is_visible()
                            && !keepers.is_empty()
                            && !keepers.contains(session) =>
                    {
                        wanted.push(*session);
                    }
                    Command::LetGo { id, writer: of, session }
                        if (id, of) == (&version.id, writer) && keepers != [*session] =>
                    {
                        wanted.retain(|keeper| keeper != session);
                    }
                    Command::Commit(Commit { id, writer: of, .. })
                        if (id, of) == (&version.id, writer)
                            && *contribution == Contribution::Begun =>
                    {
                        continue;
                    }
                    _ => {}
                }
                assert!(left.is_none_or(|left: Vec<_>| left == wanted), "{command:?}");
            }
            let was_there = version.is_open() || version.is_visible();
            let reason = match &now.status {
                Status::Dropped { reason: Reason::Lost { writers, .. } } => Some(writers.clone()),
                _ => None,
            };
            // It has begun more in that version, and that is said first.
            let is_aborted = version.is_open()
                && matches!(&now.status, Status::Dropped { reason: Reason::Aborted { .. } });
            if was_there && !alone.is_empty() && !is_aborted {
                assert_eq!(reason, Some(alone.into_iter().collect()), "{command:?}");
                assert!(!self.state.is_held(now.id));
                let number = now.number;
                let said = self.state.found(Selector::Id(now.id)).err();
                let is_said = |said: &Refusal| matches!(said, Refusal::Dropped { number: of, reason: Reason::Lost { .. } } if *of == number);
                assert!(said.as_ref().is_some_and(is_said), "{said:?}");
                self.fates.insert(now.id, now.fate());
                self.shown.remove(&now.id);
            } else if was_there {
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
        let is_fenced = job.is_some_and(|job| self.fenced.contains(job));
        let is_incomplete =
            matches!(result, Err(Refusal::NotAWriter { .. } | Refusal::CallRequired { .. }));
        if let Some(by) = newest.clone().filter(|_| is_fenced && !is_incomplete) {
            assert_eq!(result, &Err(Refusal::Fenced { by }));
        }
        if let (Ok(step), Some(newest)) = (result, newest)
            && step.state.job() != Some(&newest)
        {
            assert!(matches!(command, Command::Begin(_)));
            self.fenced.insert(newest);
        }
    }

    /// Effects are what is owed from now on; what is held is not deleted; what is owed stays owed
    /// until it is done.
    fn check_effects(&self, before: &State, effects: &[Effect]) {
        let (earlier, owed) = (pending(before), pending(&self.state));
        let arisen: Vec<_> = owed.iter().filter(|it| !earlier.contains(it)).copied().collect();
        assert_eq!(effects, arisen);
        for effect in &owed {
            if let Effect::Delete { id, epoch, number } = *effect {
                let version = self.state.versions().find(|version| version.id == id).unwrap();
                assert_eq!((version.epoch, version.number), (epoch, number));
                assert!(!self.state.is_held(id) && !version.is_open() && !version.is_visible());
            }
        }
        for effect in earlier {
            if let Effect::Delete { id, .. } = effect {
                let is_known = self.state.versions().any(|version| version.id == id);
                assert!(owed.contains(&effect) || !is_known, "{effect:?} is owed no more");
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
                if let (None, Some(job), Some(call)) = (begin.number, &begin.job, begin.call) {
                    self.check_call(job, call, *id);
                }
            }
            (Command::Proved { id, manifest, .. }, _) => {
                let version = self.state.versions().find(|version| version.id == *id);
                assert_eq!(version.and_then(Version::manifest), Some(manifest));
            }
            (Command::Commit(commit), Outcome::Committed { missing, .. }) => {
                let Commit { id, writer, digest, .. } = commit;
                assert_eq!(commit.job, self.opened[id].job, "jobs are mixed");
                assert!(self.opened[id].writers.contains(*writer) && !missing.contains(*writer));
                let committed = self.committed.entry((*id, *writer)).or_insert(*digest);
                assert_eq!(committed, digest, "a contribution changed");
            }
            _ => {}
        }
    }

    /// A call is one version, and calls open in their order.
    fn check_call(&mut self, job: &JobId, call: u64, id: VersionId) {
        let is_later = |(of, later): &(JobId, u64)| of == job && *later > call;
        match self.calls.get(&(job.clone(), call)) {
            Some(of_call) => assert_eq!(*of_call, id, "one call opened two versions"),
            None => assert!(!self.calls.keys().any(is_later), "an early call opened late"),
        }
        self.calls.insert((job.clone(), call), id);
        self.last_call = self.last_call.max(call);
    }

    fn check_versions(&mut self, command: &Command) {
        let mut places = BTreeSet::new();
        for version in self.state.versions() {
            let opened = self.opened.entry(version.id).or_insert_with(|| version.clone());
            let said = |it: &Version| (it.epoch, it.number, it.call, it.rewinds);
            assert_eq!(said(opened), said(version));
            assert_eq!((&opened.job, &opened.writers), (&version.job, &version.writers));
            assert!(places.insert((version.epoch, version.number)), "a place is taken twice");
            for (writer, contribution) in &version.contributions {
                assert!(version.writers.contains(*writer));
                if let Contribution::Committed { digest, .. } = contribution {
                    assert_eq!(self.committed.get(&(version.id, *writer)), Some(digest));
                }
            }
            if version.manifest().is_some() {
                let shown = self.shown.entry(version.id).or_insert_with(|| {
                    let is_proof = |command: &Command| match command {
                        Command::Proved { id, manifest, .. } => {
                            *id == version.id && Some(manifest) == version.manifest()
                        }
                        _ => false,
                    };
                    assert!(is_proof(command), "visible without a proof");
                    assert!(version.missing().is_empty(), "visible without a contribution");
                    version.clone()
                });
                assert!(shown.contributions.keys().eq(version.contributions.keys()));
                let archives = |of: &Version| {
                    let all = of.contributions.values().map(Contribution::archives);
                    all.map(<[_]>::to_vec).collect::<Vec<_>>()
                };
                assert_eq!(archives(shown), archives(version));
                assert_eq!(shown.manifest(), version.manifest());
            }
            if version.is_open() {
                let is_fenced = version.job.as_ref().is_some_and(|job| self.fenced.contains(job));
                assert!(!is_fenced, "a fenced job has an open version");
                let is_proving = matches!(version.status, Status::Proving { .. });
                assert_eq!(is_proving, version.missing().is_empty());
            }
        }
        assert!(self.state.open().count() <= MAX_OPEN);
    }

    /// Versions become visible in the order of their places; nothing but deletion and age takes
    /// the head back.
    fn check_progress(&self, before: &State, command: &Command) {
        let reached = |state: &State| (state.epoch(), state.highest());
        let place = |version: &Version| (version.epoch, version.number);
        assert!(reached(before) <= reached(&self.state));
        for version in self.state.visible() {
            let is_new = before.version(Selector::Id(version.id)).is_none();
            if is_new {
                let (epoch, number) = place(version);
                assert!((epoch, Some(number)) > reached(before));
                assert_eq!((epoch, Some(number)), reached(&self.state));
                assert!(self.state.open().all(|open| place(open) > (epoch, number)));
            }
        }
        if !matches!(
            command,
            Command::Delete { .. } | Command::Expire { .. } | Command::SessionEnded { .. }
        ) {
            assert!(before.head().map(place) <= self.state.head().map(place));
        }
    }

    /// The newest K, of what is durable the newest K, what is on its way to a bucket and the pinned stay visible, no
    /// more and no less; what is held has its data.
    fn check_retention(&self, before: &State, command: &Command) {
        let visible = |state: &State| state.visible().map(|it| it.id).collect::<Vec<_>>();
        if !matches!(command, Command::Delete { .. } | Command::Expire { .. }) {
            let fresh =
                self.state.visible().filter(|it| before.version(Selector::Id(it.id)).is_none());
            let fresh: Vec<_> = fresh.collect();
            let is_taken_back = |version: &&Version| {
                let from = fresh.first().and_then(|it| it.rewinds.map(|from| (it.epoch, from)));
                from.is_some_and(|(epoch, from)| version.epoch < epoch && version.number >= from)
            };
            let is_lost = |version: &&Version| {
                let mut keepers = version.contributions.values().map(Contribution::keepers);
                match command {
                    Command::SessionEnded { session, .. } => {
                        !version.stored
                            && keepers.any(|keepers| keepers.collect::<Vec<_>>() == [*session])
                    }
                    _ => false,
                }
            };
            let stay = before.visible().filter(|it| !is_taken_back(it) && !is_lost(it));
            let stay = stay.chain(fresh.iter().copied());
            let mut stay: Vec<_> = stay.map(|version| version.id).collect();
            let now = |id: &VersionId| self.state.versions().find(|version| version.id == *id);
            let of = |stored: bool| {
                let is_it =
                    move |version: &Version| version.is_durable() && version.stored == stored;
                let durable = stay.iter().rev().filter(move |id| now(id).is_some_and(is_it));
                durable.take(self.keep()).copied()
            };
            let mut kept: BTreeSet<VersionId> = of(false).chain(of(true)).collect();
            kept.extend(stay.iter().rev().take(self.keep()));
            kept.extend(self.state.pins().map(|(_, id)| id));
            let coming = |id: &VersionId| now(id).is_some_and(Version::is_to_be_stored);
            stay.retain(|id| kept.contains(id) || coming(id));
            assert_eq!(visible(&self.state), stay, "{command:?}");
        }
        let has_data = |id| self.state.versions().any(|version| version.id == id);
        assert!(self.state.pins().all(|(_, id)| has_data(id)));
        let leases = (0..4).filter_map(|lease| self.state.lease(LeaseId(lease)));
        assert!(leases.into_iter().all(|lease| has_data(lease.version)));
    }

    /// What was said to one who waits is never taken back, only forgotten.
    fn check_fates(&mut self) {
        for id in self.opened.keys() {
            let (known, now) = (self.fates.get(id), self.state.outcome_of(*id));
            match (known, now) {
                (Some(Fate::Pending { .. }) | None, Some(now)) => {
                    self.fates.insert(*id, now);
                }
                // What is lost was visible before.
                (Some(Fate::Visible), Some(Fate::Dropped(Reason::Lost { .. }))) => {}
                (Some(known), Some(now)) => assert_eq!(known, &now),
                (known, None) => assert!(!matches!(known, Some(Fate::Pending { .. }))),
            }
        }
    }

    /// What is in a bucket stays there; what is left when all processes have ended is durable, and all that is.
    fn check_durable(&self, before: &State) {
        for version in before.versions().filter(|version| version.stored) {
            let now = self.state.versions().find(|now| now.id == version.id);
            assert!(now.is_none_or(|now| now.stored && now.is_durable()));
        }
        let durable = self.state.durable();
        let left = self.state.versions().filter(|version| version.is_durable());
        let is_kept = |version: &Version| {
            version.is_visible() || self.state.pins().any(|(_, id)| id == version.id)
        };
        let left = left.map(|version| {
            let mut version = version.clone();
            // A call means no version that is about to be deleted.
            version.call = version.call.filter(|_| is_kept(&version));
            version
        });
        assert!(durable.versions().cloned().eq(left));
        let newest = durable.versions().map(|version| (version.epoch, version.number)).max();
        assert!(newest <= durable.highest().map(|number| (durable.epoch(), number)));
        assert_eq!(durable.durable(), durable);
    }

    /// A state is itself again after it was a record.
    fn check_stored(&self, before: &State) {
        if self.state != *before {
            let text = serde_json::to_vec(&self.state).unwrap();
            assert_eq!(serde_json::from_slice::<State>(&text).unwrap(), self.state);
        }
    }

    fn check_size(&self) {
        let coming = self.state.versions().filter(|version| version.is_to_be_stored()).count();
        let held = self.state.pins().count() + 4 + coming;
        let kept = 3 * self.keep();
        assert!(self.state.versions().count() <= 2 * MAX_OPEN + kept + held + MAX_DELETIONS + 4);
    }
}

fn manifest(id: VersionId) -> ManifestReference {
    let (name, digest) = (format!("{id}.manifest"), Digest([9; 16]));
    ManifestReference { name, digest, file_len: 1, keeper: None }
}
