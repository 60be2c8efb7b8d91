//! A store and its model side by side: each operation is done by both, and their answers are compared.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::runtime::Runtime;
use tssd_format::{
    DeviceMesh, Dtype, Region, Shard, ShardPlace, StateDict, Tensor, TensorMeta, TensorSlice, Value,
};
use tssd_store::ledger::Reason;
use tssd_store::{
    Divergent, Durability, Error, ErrorKind, GetOptions, JobId, Key, Opened, Publisher, PutOptions,
    PutReport, Refusal, Store, Target, VersionId, WriterSet,
};

use super::home::{Home, Kind as HomeKind, eventually};
use super::model::Model;
use super::operations::{Box, CLIENTS, COLUMNS, KEYS, LEAVES, Operation, ROWS, Read, Wish};
use super::version::{Stage, gone};
use super::words::{Array, Ask, Dict, End, Extent, Fault, Id, Job, Kind, Part, Progress, Writers};

/// What all stores of a test run on, and nothing else: when they are at rest is seen by its tasks.
fn runtime() -> &'static Runtime {
    thread_local! {
        static RUNTIME: &'static Runtime = {
            let mut builder = tokio::runtime::Builder::new_multi_thread();
            std::boxed::Box::leak(builder.worker_threads(1).enable_all().build().unwrap().into())
        };
    }
    RUNTIME.with(|runtime| *runtime)
}

/// What has been asked and answered so far.
#[derive(Default)]
pub(crate) struct Tally {
    pub(crate) sequences: u64,
    pub(crate) operations: BTreeMap<&'static str, u64>,
    pub(crate) faults: BTreeMap<String, u64>,
}

/// A model that is wrong on purpose: a test of the test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Deviation {
    /// A deletion frees its numbers.
    ForgetsHighest,
    /// One version more is kept than is said.
    KeepsOneMore,
    /// A job that has been fenced may go on.
    FencesNobody,
    /// A label holds nothing.
    PinsNothing,
    /// What is older and open stays open.
    SupersedesNothing,
    /// A put that failed is no call.
    CountsSuccesses,
    /// Nobody goes back.
    RewindsNothing,
    /// What is in memory outlives its process.
    RemembersAll,
}

/// A contribution that has begun.
struct Begun {
    client: usize,
    key: usize,
    id: Id,
    ask: Ask,
    part: Part,
    publisher: Publisher,
}

/// A version that somebody reads.
struct Held {
    client: usize,
    key: usize,
    id: Id,
    dict: Dict,
    opened: Opened,
}

pub(crate) struct World {
    kind: HomeKind,
    home: Option<Home>,
    deviation: Option<Deviation>,
    prefix: String,
    clients: Vec<Store>,
    begun: Vec<Begun>,
    held: Vec<Held>,
    /// What killed processes have left, as far as it is memory of this one.
    dead: Vec<Publisher>,
    models: Vec<Model>,
    next: Id,
    /// Which version of the store is which one of the model.
    ids: BTreeMap<Id, VersionId>,
    /// How many puts there were of each writer of each job to each key, by client.
    calls: BTreeMap<(usize, usize, Job, u32), u64>,
    /// How many tasks there are when nothing is under way.
    at_rest: usize,
}

/// An answer as text: what is compared.
type Said = Result<String, String>;

impl World {
    pub(crate) fn new(kind: HomeKind, home: Home, deviation: Option<Deviation>) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let prefix = format!("{}/", NEXT.fetch_add(1, Ordering::Relaxed));
        let at_rest = runtime().metrics().num_alive_tasks();
        let clients = (0..CLIENTS).map(|client| home.connect(client, runtime())).collect();
        let models = (0..KEYS).map(|_| Model::new()).collect();
        let (begun, held, dead) = (Vec::new(), Vec::new(), Vec::new());
        let (ids, calls) = (BTreeMap::new(), BTreeMap::new());
        let home = Some(home);
        Self {
            kind,
            home,
            deviation,
            prefix,
            clients,
            begun,
            held,
            dead,
            models,
            next: 0,
            ids,
            calls,
            at_rest,
        }
    }

    /// Plays operations as long as both say the same; else says where they differ.
    pub(crate) fn play(
        &mut self,
        operations: &[Operation],
        tally: &mut Tally,
    ) -> Result<(), String> {
        for (at, operation) in operations.iter().enumerate() {
            *tally.operations.entry(operation.name()).or_default() += 1;
            let answers = self.step(operation).map_err(|text| format!("step {at}: {text}"))?;
            if let Some((expected, said)) = answers {
                if expected != said {
                    return Err(format!(
                        "step {at}, {operation:?}: the store says\n  {said:?}\nand the model\n  {expected:?}"
                    ));
                }
                if let Err(fault) = &said {
                    let name = fault.split([',', '{']).next().unwrap_or_default();
                    *tally
                        .faults
                        .entry(name.replace(['(', ')'], " ").trim().to_owned())
                        .or_default() += 1;
                }
            }
        }
        Ok(())
    }

    /// Ends all that is under way; the home goes on.
    pub(crate) fn end(mut self) -> Home {
        let Self { begun, held, dead, clients, .. } = &mut self;
        runtime().block_on(async {
            begun.clear();
            held.clear();
            dead.clear();
            clients.clear();
        });
        self.come_to_rest();
        self.home.take().unwrap()
    }

    fn come_to_rest(&self) {
        eventually("all is done", || runtime().metrics().num_alive_tasks() <= self.at_rest);
    }

    fn key(&self, key: usize) -> Key {
        Key::new(format!("{}{key}", self.prefix)).unwrap()
    }

    /// Does an operation; gives the answers of the model and of the store, unless there is none.
    fn step(&mut self, operation: &Operation) -> Result<Option<(Said, Said)>, String> {
        let answers = match operation {
            Operation::Put { client, key, wish } => Some(self.put(*client, *key, wish)?),
            Operation::Begin { client, key, wish } => Some(self.begin(*client, *key, wish)),
            Operation::Finish { back } => self.finish(*back)?,
            Operation::Abort { back } => self.abort(*back),
            Operation::Get { client, key, number, read } => {
                Some(self.get(*client, *key, *number, read)?)
            }
            Operation::Hold { client, key, number } => Some(self.hold(*client, *key, *number)?),
            Operation::Release => self.release(),
            Operation::List { client, key } => Some(self.list(*client, *key)),
            Operation::Wait { client, key, number } => {
                let newest = self.models[*key].visible().last().map(|version| version.number);
                let expected = newest.filter(|newest| newest >= number).ok_or(Fault::NotCome);
                let (store, at) = (&self.clients[*client], self.key(*key));
                let said = runtime().block_on(store.wait_for_version(&at, *number, Duration::ZERO));
                Some((model(expected), real(said.map(|info| info.number))))
            }
            Operation::Delete { client, key, number } => {
                let expected = self.models[*key].delete(*number);
                if self.deviation == Some(Deviation::ForgetsHighest) {
                    self.models[*key].highest = None;
                }
                let (store, at) = (&self.clients[*client], self.key(*key));
                let said = runtime().block_on(store.delete(&at, *number));
                Some((model(Ok(expected)), real(said)))
            }
            Operation::Retain { client, key, keep } => {
                let more = usize::from(self.deviation == Some(Deviation::KeepsOneMore));
                self.models[*key].retain(usize::try_from(*keep).unwrap() + more);
                let (store, at) = (&self.clients[*client], self.key(*key));
                let said = runtime().block_on(store.retain(&at, NonZeroU32::new(*keep).unwrap()));
                Some((model(Ok(())), real(said)))
            }
            Operation::Pin { client, key, number, label } => {
                let label = label.to_string();
                let expected = self.models[*key].pin(*number, &label);
                if self.deviation == Some(Deviation::PinsNothing) {
                    self.models[*key].pins.clear();
                }
                let (store, at) = (&self.clients[*client], self.key(*key));
                let said = runtime().block_on(store.pin(&at, *number, &label));
                Some((model(expected), real(said)))
            }
            Operation::Unpin { client, key, label } => {
                let label = label.to_string();
                self.models[*key].unpin(&label);
                let (store, at) = (&self.clients[*client], self.key(*key));
                let said = runtime().block_on(store.unpin(&at, &label));
                Some((model(Ok(())), real(said)))
            }
            Operation::Leave { client } => {
                self.leave(*client);
                None
            }
            Operation::Kill => {
                self.kill();
                None
            }
        };
        for model in &mut self.models {
            match self.deviation {
                Some(Deviation::FencesNobody) => model.fenced.clear(),
                Some(Deviation::SupersedesNothing) => {
                    model.versions.iter_mut().for_each(|version| {
                        if matches!(version.stage, Stage::Dropped(End::Superseded { .. })) {
                            version.stage = Stage::Open;
                        }
                    });
                }
                _ => {}
            }
        }
        Ok(answers)
    }

    /// What a writer says, its call counted.
    fn ask(&mut self, client: usize, key: usize, wish: &Wish) -> Ask {
        let mut ask = wish.ask();
        ask.rewind &= self.deviation != Some(Deviation::RewindsNothing);
        if let Some(job) = ask.job {
            // All of a memory are one client.
            let client = if self.kind == HomeKind::Memory { 0 } else { client };
            let calls = self.calls.entry((client, key, job, ask.writer)).or_default();
            *calls += 1;
            ask.call = Some(*calls);
        }
        ask
    }

    fn uncount(&mut self, client: usize, key: usize, ask: &Ask) {
        if let Some(job) = ask.job.filter(|_| self.deviation == Some(Deviation::CountsSuccesses)) {
            let client = if self.kind == HomeKind::Memory { 0 } else { client };
            *self.calls.entry((client, key, job, ask.writer)).or_default() -= 1;
        }
    }

    /// The model's begin. A store in memory finds out that nothing lasts there when it makes room.
    fn model_begin(&mut self, key: usize, ask: &Ask) -> Result<Id, Fault> {
        if ask.durable && self.kind == HomeKind::Daemon {
            return Err(Fault::Invalid);
        }
        self.next += 1;
        let id = self.models[key].begin(ask, self.next)?;
        if ask.durable && self.kind == HomeKind::Memory {
            self.models[key].abort(id, ask.writer);
            return Err(Fault::Invalid);
        }
        Ok(id)
    }

    /// The model's answer to a put: number, epoch, visible, missing.
    fn progress(&self, key: usize, id: Id, progress: Progress) -> Put {
        let version = self.models[key].get(id).expect("it was put");
        (version.number, version.epoch, progress.visible, progress.missing)
    }

    fn put(&mut self, client: usize, key: usize, wish: &Wish) -> Result<(Said, Said), String> {
        let (ask, part) = (self.ask(client, key, wish), wish.part(false));
        let begun = self.model_begin(key, &ask);
        let expected = begun.clone().and_then(|id| {
            let progress = self.models[key].commit(id, &ask, &part)?;
            Ok(self.progress(key, id, progress))
        });
        let options = options(wish, &expected);
        let (store, at) = (self.clients[client].clone(), self.key(key));
        let said =
            runtime().block_on(store.put_state_dict(&at, &state_dict(&part, wish), &options));
        if said.is_err() {
            self.uncount(client, key, &ask);
        }
        if let (Ok(id), Ok(report)) = (begun, &said) {
            self.same_version(id, report.id)?;
        }
        Ok((model(expected), real(said.map(|report| put_of(&report)))))
    }

    fn begin(&mut self, client: usize, key: usize, wish: &Wish) -> (Said, Said) {
        let (ask, part) = (self.ask(client, key, wish), wish.part(true));
        let expected = self.model_begin(key, &ask);
        let options = options(wish, &expected);
        let (store, at) = (self.clients[client].clone(), self.key(key));
        let dict = state_dict(&part, wish);
        let publisher = runtime().block_on(async {
            let mut publisher = store.publish(&at, &options, 1 << 20)?;
            for (number, (name, value)) in dict.entries().iter().enumerate() {
                let tssd_format::Key::Str(name) = name else { unreachable!("all names are text") };
                publisher.add(name.as_str().unwrap(), value.clone()).await?;
                if number == 0 && part.archives == 2 {
                    publisher.flush().await?;
                }
            }
            publisher.flush().await?;
            Ok::<_, Error>(publisher)
        });
        let said = real(publisher.as_ref().map(|_| ()));
        if publisher.is_err() {
            self.uncount(client, key, &ask);
        }
        if let (Ok(id), Ok(publisher)) = (&expected, publisher) {
            self.begun.push(Begun { client, key, id: *id, ask, part, publisher });
        }
        (model(expected.map(drop)), said)
    }

    fn take(&mut self, back: usize) -> Option<Begun> {
        let at = self.begun.len().checked_sub(back + 1)?;
        Some(self.begun.remove(at))
    }

    fn finish(&mut self, back: usize) -> Result<Option<(Said, Said)>, String> {
        let Some(Begun { client, key, id, ask, part, publisher }) = self.take(back) else {
            return Ok(None);
        };
        let committed = self.models[key].commit(id, &ask, &part);
        let expected = committed.map(|progress| self.progress(key, id, progress));
        let said = runtime().block_on(publisher.finish());
        if said.is_err() {
            self.uncount(client, key, &ask);
        }
        if let Ok(report) = &said {
            self.same_version(id, report.id)?;
        }
        Ok(Some((model(expected), real(said.map(|report| put_of(&report))))))
    }

    /// What is published twice cannot be: the contribution is taken back, and why is what has become of the
    /// version, if it is gone already.
    fn abort(&mut self, back: usize) -> Option<(Said, Said)> {
        let Begun { key, id, ask, mut publisher, .. } = self.take(back)?;
        let expected = match self.models[key].get(id) {
            Some(version) if matches!(version.stage, Stage::Dropped(_)) => gone(version),
            _ => Fault::Invalid,
        };
        self.models[key].abort(id, ask.writer);
        let said = runtime().block_on(publisher.add("matrix", 0_i64));
        drop(publisher);
        Some((model(Err::<(), _>(expected)), real(said)))
    }

    /// What a version is called in the store stays so.
    fn same_version(&mut self, id: Id, found: VersionId) -> Result<(), String> {
        let known = *self.ids.entry(id).or_insert(found);
        let other = self.ids.iter().find(|(other, version)| **version == found && **other != id);
        if known == found && other.is_none() {
            return Ok(());
        }
        Err(format!("version {id} of the model was {known} and is {found} now, as is {other:?}"))
    }

    fn get(
        &mut self,
        client: usize,
        key: usize,
        number: Option<u64>,
        read: &Read,
    ) -> Result<(Said, Said), String> {
        let found = self.models[key].find(number);
        let id = found.as_ref().ok().map(|version| version.id);
        let expected = found.and_then(|version| {
            let Stage::Visible(dict) = &version.stage else { unreachable!("it was found") };
            wanted(dict, read)
        });
        let dict = id.and_then(|id| match &self.models[key].get(id)?.stage {
            Stage::Visible(dict) => Some(dict.clone()),
            _ => None,
        });
        let (store, at) = (self.clients[client].clone(), self.key(key));
        let options = GetOptions { version: number, ..GetOptions::default() };
        let said =
            runtime().block_on(self::read(&store, &at, &options, read, &dict.unwrap_or_default()));
        let found = said.as_ref().ok().and_then(|(_, id)| *id);
        if let (Some(id), Some(found)) = (id, found) {
            self.same_version(id, found)?;
        }
        let said = real(said.map(|(arrays, _)| arrays));
        if id.is_some() && self.kind.is_daemon() {
            // A lease that ends deletes what is owed.
            self.models[key].sweep();
            self.let_go(client, key);
        }
        Ok((model(expected), said))
    }

    /// A daemon hears that somebody has let go of a version before it answers what comes next.
    fn let_go(&self, client: usize, key: usize) {
        let key = self.key(key);
        let head = runtime().block_on(self.clients[client].head(&key));
        assert!(head.is_ok(), "the daemon is there");
    }

    fn hold(
        &mut self,
        client: usize,
        key: usize,
        number: Option<u64>,
    ) -> Result<(Said, Said), String> {
        let is_leased = self.kind.is_daemon();
        let (store, at) = (self.clients[client].clone(), self.key(key));
        let options = GetOptions { version: number, ..GetOptions::default() };
        let opened = runtime().block_on(store.open(&at, &options));
        let said = real(opened.as_ref().map(Opened::version));
        let found = self.models[key].find(number).cloned();
        let expected = model(found.clone().map(|version| version.number));
        if let (Ok(version), Ok(opened)) = (found, opened) {
            let id = version.id;
            self.same_version(id, opened.id())?;
            let Stage::Visible(dict) = version.stage else { unreachable!("it was found") };
            let mut versions = self.models[key].versions.iter_mut();
            versions.find(|version| version.id == id).unwrap().readers += usize::from(is_leased);
            self.held.push(Held { client, key, id, dict, opened });
        }
        Ok((expected, said))
    }

    /// What somebody has held is as it was, whatever has become of the version.
    fn release(&mut self) -> Option<(Said, Said)> {
        let Held { client, key, id, dict, opened } = self.held.pop()?;
        let arrays = dict.iter().filter(|(_, array)| array.kind != Kind::Number);
        let expected: Vec<&Array> = arrays.clone().map(|(_, array)| array).collect();
        let said = runtime().block_on(async {
            let mut said = Vec::new();
            for (name, array) in arrays.clone() {
                said.push(array_of(&opened.tensor(name, None).await?, (0, 0), array.shape));
            }
            Ok::<_, Error>(said)
        });
        drop(opened);
        if self.kind.is_daemon() {
            self.models[key].sweep();
            self.let_go(client, key);
        }
        let mut versions = self.models[key].versions.iter_mut();
        if let Some(version) = versions.find(|version| version.id == id) {
            version.readers = version.readers.saturating_sub(1);
        }
        Some((model(Ok(expected)), real(said)))
    }

    /// All that can be seen of a key without reading it.
    fn list(&self, client: usize, key: usize) -> (Said, Said) {
        let of = &self.models[key];
        let versions: Vec<_> = of.visible().into_iter().collect();
        let labels = of.pins.iter().map(|(label, id)| (label.clone(), of.get(*id).unwrap().number));
        let labels: BTreeMap<String, u64> = labels.collect();
        let visible = versions.iter().map(|it| (it.number, it.epoch, it.writers.clone()));
        let visible: Vec<(u64, u32, Writers)> = visible.collect();
        let has_one = |key: &usize| !self.models[*key].visible().is_empty();
        let keys: Vec<Key> = (0..KEYS).filter(has_one).map(|key| self.key(key)).collect();
        let expected = (visible, labels, keys, !versions.is_empty());
        let (store, at) = (&self.clients[client], self.key(key));
        let said = runtime().block_on(async {
            let versions = store.versions(&at).await?;
            let visible = versions.iter().map(|it| (it.number, it.epoch, writers_of(&it.writers)));
            let visible: Vec<(u64, u32, Writers)> = visible.collect();
            let keys = store.keys(Some(&self.prefix)).await?;
            let exists = store.exists(&at, None).await?;
            Ok::<_, Error>((visible, store.pins(&at).await?, keys, exists))
        });
        (model(Ok(expected)), real(said))
    }

    /// A client dies. What it has not finished is taken back if somebody sees that it is gone, and else stays.
    fn leave(&mut self, client: usize) {
        while let Some(at) = self.held.iter().position(|held| held.client == client) {
            let held = self.held.remove(at);
            self.held.push(held);
            let released = self.release();
            assert!(
                released.is_some_and(|(expected, said)| expected == said),
                "a view has changed"
            );
        }
        let (gone, left) =
            std::mem::take(&mut self.begun).into_iter().partition(|it| it.client == client);
        self.begun = left;
        let gone: Vec<Begun> = gone;
        // Nobody sees that a process is gone that has written to a directory.
        let is_seen = self.kind != HomeKind::Directory || client == 0;
        for Begun { key, id, ask, publisher, .. } in gone {
            if is_seen {
                self.models[key].abort(id, ask.writer);
                runtime().block_on(async { drop(publisher) });
            } else {
                self.dead.push(publisher);
            }
        }
        if self.kind == HomeKind::Memory {
            self.come_to_rest();
            return;
        }
        self.calls.retain(|(of, ..), _| *of != client);
        let home = self.home.as_ref().unwrap();
        if !self.kind.is_daemon() {
            self.come_to_rest();
            self.clients[client] = home.connect(client, runtime());
            return;
        }
        let other = self.clients[1 - client].clone();
        self.clients[client] = other.clone();
        // One is near, the other one is not.
        eventually("a client that has left is forgotten", || {
            let status = runtime().block_on(other.status()).unwrap();
            status.peers.iter().all(|peer| peer.address.is_some() == (client == 0))
        });
        self.clients[client] = home.connect(client, runtime());
    }

    fn kill(&mut self) {
        let Some(Home::Process(process)) = self.home.take() else {
            unreachable!("it is a process")
        };
        self.home = Some(Home::Process(process.kill()));
        runtime().block_on(async {
            self.begun.clear();
            self.held.clear();
            self.clients.clear();
        });
        self.calls.clear();
        if self.deviation != Some(Deviation::RemembersAll) {
            self.models.iter_mut().for_each(Model::crash);
        }
        let home = self.home.as_ref().unwrap();
        self.clients = (0..CLIENTS).map(|client| home.connect(client, runtime())).collect();
    }
}

/// What a put is told: number, epoch, visible, missing.
type Put = (u64, u32, bool, Writers);

fn put_of(report: &PutReport) -> Put {
    (report.version, report.epoch, report.visible, writers_of(&report.missing))
}

fn writers_of(writers: &WriterSet) -> Writers {
    writers.iter().collect()
}

fn model<T: Debug>(answer: Result<T, Fault>) -> Said {
    match answer {
        Ok(answer) => Ok(format!("{answer:?}")),
        Err(fault) => Err(format!("{fault:?}, {}", kind_of(&fault).name())),
    }
}

fn real<T: Debug, E: std::borrow::Borrow<Error>>(answer: Result<T, E>) -> Said {
    let answer = match answer {
        Ok(answer) => return Ok(format!("{answer:?}")),
        Err(error) => error,
    };
    let error = answer.borrow();
    Err(match fault_of(error) {
        Some(fault) => format!("{fault:?}, {}", error.kind().name()),
        None => format!("{}: {error}", error.kind().name()),
    })
}

/// What a caller can do about it.
fn kind_of(fault: &Fault) -> ErrorKind {
    match fault {
        Fault::Invalid => ErrorKind::Invalid,
        Fault::Busy => ErrorKind::Busy,
        Fault::NotFound { .. } | Fault::Gone | Fault::NoLeaf | Fault::NotCome => {
            ErrorKind::NotFound
        }
        Fault::Dropped(End::Rejected) => ErrorKind::Rejected,
        Fault::Dropped(End::Superseded { .. } | End::Deleted) => ErrorKind::Overtaken,
        _ => ErrorKind::Refused,
    }
}

/// An error of the store in the model's words; none if the model has none for it.
fn fault_of(error: &Error) -> Option<Fault> {
    let Some(refusal) = error.refusal() else {
        return match error.kind() {
            ErrorKind::Invalid => Some(Fault::Invalid),
            ErrorKind::Busy => Some(Fault::Busy),
            ErrorKind::NotFound if error.to_string().contains("has not come") => {
                Some(Fault::NotCome)
            }
            ErrorKind::NotFound => Some(Fault::NoLeaf),
            _ => None,
        };
    };
    Some(match refusal {
        Refusal::NotAWriter { .. } => Fault::NotAWriter,
        Refusal::JobRequired { .. } => Fault::JobRequired,
        Refusal::JobsDisagree { .. } => Fault::JobsDisagree,
        Refusal::WritersDisagree { .. } => Fault::WritersDisagree,
        Refusal::DurabilityDisagrees { .. } => Fault::DurabilityDisagrees,
        Refusal::VersionNotNewer { highest, .. } => Fault::NotNewer { highest: *highest },
        Refusal::LateCall { .. } => Fault::LateCall,
        Refusal::NotBegun { .. } => Fault::NotBegun,
        Refusal::ContributionDiffers { .. } => Fault::Differs,
        Refusal::Gone { .. } => Fault::Gone,
        Refusal::NotFound { newest, coming, .. } => Fault::NotFound {
            newest: *newest,
            coming: coming.as_ref().map(|(number, missing)| (*number, writers_of(missing))),
        },
        // Whether the job or the version was looked at first.
        Refusal::Fenced { .. } | Refusal::Dropped { reason: Reason::Fenced { .. }, .. } => {
            Fault::Fenced
        }
        Refusal::Dropped { reason, .. } => Fault::Dropped(match reason {
            Reason::Superseded { by } => End::Superseded { by: *by },
            Reason::Rejected { .. } => End::Rejected,
            Reason::Aborted { .. } => End::Aborted,
            Reason::Deleted => End::Deleted,
            _ => return None,
        }),
        _ => return None,
    })
}

/// Whoever has to wait does not here: others do nothing meanwhile.
fn options<T>(wish: &Wish, expected: &Result<T, Fault>) -> PutOptions {
    let is_busy = matches!(expected, Err(Fault::Busy));
    PutOptions {
        version: wish.number,
        writer: Some(wish.writer),
        writers: (!wish.found).then(|| (0..wish.of).collect()),
        job: wish.job.map(|job| JobId(format!("job-{job}"))),
        divergent: if wish.lowest { Divergent::Lowest } else { Divergent::Error },
        rewind: wish.rewind,
        durability: if wish.durable { Durability::Disk } else { Durability::Memory },
        timeout: if is_busy { Duration::ZERO } else { Duration::from_secs(20) },
        ..PutOptions::default()
    }
}

fn words(array: &Array) -> Vec<u32> {
    array.elements.values().copied().collect()
}

fn tensor(array: &Array, shape: &[u64]) -> Tensor {
    match array.kind {
        Kind::Int32 => {
            let words: Vec<i32> = words(array).into_iter().map(u32::cast_signed).collect();
            Tensor::from_slice(&words, shape).unwrap()
        }
        _ => Tensor::from_slice(&words(array), shape).unwrap(),
    }
}

/// What is put, as the store takes it.
fn state_dict(part: &Part, wish: &Wish) -> StateDict {
    let mut dict = StateDict::new();
    for (name, array, extent) in &part.leaves {
        let (rows, columns) = array.shape;
        let value: Value = match (extent, array.kind) {
            (Extent::Whole, Kind::Number) => i64::from(words(array)[0]).into(),
            (Extent::Whole, _) => tensor(array, &[rows, columns]).into(),
            (Extent::Slice, _) => {
                let (first, after) = wish.rows();
                let local = [after - first, columns];
                let mut slice = TensorSlice::new(&[first, 0], &local, &[rows, columns]).unwrap();
                let of = u64::from(wish.of);
                if wish.found {
                    slice = slice.on_mesh(&[of], Some(&[wish.writer.into()])).unwrap();
                }
                let mut place = ShardPlace::new(slice);
                if wish.found {
                    place = place.on_mesh(DeviceMesh::from_shape(&[of]).unwrap()).unwrap();
                }
                Shard::new(tensor(array, &local), place).unwrap().into()
            }
        };
        dict.insert(name.as_str(), value);
    }
    dict
}

/// The box of an array, if it has one there.
fn cut(array: &Array, (row, column, rows, columns): Box) -> Result<Array, Fault> {
    if row + rows > array.shape.0 || column + columns > array.shape.1 {
        return Err(Fault::Invalid);
    }
    let is_in = |place: &(u64, u64)| {
        (row..row + rows).contains(&place.0) && (column..column + columns).contains(&place.1)
    };
    let elements = array.elements.iter().filter(|(place, _)| is_in(place));
    Ok(Array { elements: elements.map(|(place, word)| (*place, *word)).collect(), ..array.clone() })
}

/// What a reader of a dict gets: names, and what they have.
type Arrays = Vec<(String, Vec<Array>)>;

fn wanted(dict: &Dict, read: &Read) -> Result<Arrays, Fault> {
    let leaf = |leaf: usize| {
        let found = dict.iter().find(|(name, _)| name == LEAVES[leaf]);
        found.map(|(_, array)| array).ok_or(Fault::NoLeaf)
    };
    let one = |at: usize, array: Array| (LEAVES[at].to_owned(), vec![array]);
    match read {
        Read::Whole => {
            Ok(dict.iter().map(|(name, array)| (name.clone(), vec![array.clone()])).collect())
        }
        Read::Tensor(at) => Ok(vec![one(*at, leaf(*at)?.clone())]),
        Read::Slice(at, part) => Ok(vec![one(*at, cut(leaf(*at)?, *part)?)]),
        Read::Into(targets) => {
            let target = |(at, part): &(usize, Option<Box>)| {
                let array = leaf(*at)?;
                let array = part.map_or_else(|| Ok(array.clone()), |part| cut(array, part))?;
                Ok(one(*at, array))
            };
            targets.iter().map(target).collect()
        }
        Read::Resharded(parts) => dict
            .iter()
            .map(|(name, array)| {
                let cuts = parts.iter().map(|part| cut(array, *part));
                let is_cut = name == LEAVES[0];
                let arrays =
                    if is_cut { cuts.collect::<Result<_, _>>()? } else { vec![array.clone()] };
                Ok((name.clone(), arrays))
            })
            .collect(),
    }
}

/// The place of a box in an array of this shape, or of a shape that it is in: then it fits no leaf.
fn place(part: Box, shape: (u64, u64)) -> ShardPlace {
    let (row, column, rows, columns) = part;
    let global = [shape.0.max(row + rows), shape.1.max(column + columns)];
    ShardPlace::new(TensorSlice::new(&[row, column], &[rows, columns], &global).unwrap())
}

/// Reads from the store what the model says is wanted; and the version's identity, where the store says it.
async fn read(
    store: &Store,
    key: &Key,
    options: &GetOptions,
    read: &Read,
    dict: &Dict,
) -> Result<(Arrays, Option<VersionId>), Error> {
    let of = |at: usize| dict.iter().find(|(name, _)| name == LEAVES[at]).map(|(_, array)| array);
    let shape = |at: usize| of(at).map_or((ROWS, COLUMNS), |array| array.shape);
    let one = |at: usize, array: Array| vec![(LEAVES[at].to_owned(), vec![array])];
    match read {
        Read::Whole => {
            let (dict, report) = store.get_state_dict(key, options).await?;
            Ok((arrays_of(&dict), Some(report.id)))
        }
        Read::Tensor(at) => {
            let tensor = store.get(key, LEAVES[*at], options).await?;
            Ok((one(*at, array_of(&tensor, (0, 0), shape(*at))), None))
        }
        Read::Slice(at, (row, column, rows, columns)) => {
            let region = Region::new(&[*row, *column], &[*rows, *columns]).unwrap();
            let tensor = store.get_slice(key, LEAVES[*at], &region, options).await?;
            Ok((one(*at, array_of(&tensor, (*row, *column), shape(*at))), None))
        }
        Read::Into(targets) => {
            let metas = targets.iter().map(|(at, part)| {
                let kind = of(*at).map_or(Kind::Uint32, |array| array.kind);
                let dtype = if kind == Kind::Int32 { Dtype::Int32 } else { Dtype::Uint32 };
                let (rows, columns) =
                    part.map_or(shape(*at), |(_, _, rows, columns)| (rows, columns));
                TensorMeta::new(dtype, &[rows, columns]).unwrap()
            });
            let metas: Vec<TensorMeta> = metas.collect();
            let mut memory: Vec<Vec<u8>> = metas
                .iter()
                .map(|meta| vec![0xEE; usize::try_from(meta.nbytes()).unwrap()])
                .collect();
            let places = targets.iter().map(|(at, part)| part.map(|part| place(part, shape(*at))));
            let mut into: Vec<Target<'_>> = places
                .zip(&metas)
                .zip(&mut memory)
                .zip(targets)
                .map(|(((place, meta), bytes), (at, _))| Target {
                    fqn: LEAVES[*at].to_owned(),
                    place,
                    meta: meta.clone(),
                    bytes,
                })
                .collect();
            let filled = store.get_state_dict_into(key, &mut into, options).await;
            let is_touched = memory.iter().flatten().any(|byte| *byte != 0xEE);
            let report = filled
                .inspect_err(|error| assert!(!is_touched, "{error}, and memory is touched"))?;
            let mut arrays = Arrays::new();
            for (((at, part), meta), bytes) in targets.iter().zip(metas).zip(memory) {
                let tensor = Tensor::new(meta, bytes.into(), 0).unwrap();
                let offset = part.map_or((0, 0), |(row, column, ..)| (row, column));
                arrays.extend(one(*at, array_of(&tensor, offset, shape(*at))));
            }
            Ok((arrays, Some(report.id)))
        }
        Read::Resharded(parts) => {
            let places = parts.iter().map(|part| place(*part, shape(0))).collect();
            let slices = BTreeMap::from([(LEAVES[0].to_owned(), places)]);
            let options = GetOptions { slices, ..options.clone() };
            let (dict, report) = store.get_state_dict(key, &options).await?;
            Ok((arrays_of(&dict), Some(report.id)))
        }
    }
}

fn arrays_of(dict: &StateDict) -> Arrays {
    let arrays = |value: &Value| match value {
        Value::Tensor(tensor) => {
            let shape = tensor.meta().shape();
            vec![array_of(tensor, (0, 0), (shape[0], shape[1]))]
        }
        Value::Shards(shards) => {
            let array = |shard: &Shard| {
                let (offsets, shape) = (shard.slice().offsets(), shard.slice().global_shape());
                array_of(shard.tensor(), (offsets[0], offsets[1]), (shape[0], shape[1]))
            };
            shards.iter().map(array).collect()
        }
        Value::Int(number) => {
            let number = u32::try_from(number.as_i64().unwrap()).unwrap();
            let elements = BTreeMap::from([((0, 0), number)]);
            vec![Array { kind: Kind::Number, shape: (1, 1), elements }]
        }
        other => panic!("nobody put {other:?}"),
    };
    let leaves = dict.leaves();
    leaves.iter().map(|(path, value)| (path.fqn(), arrays(value))).collect()
}

/// A tensor as the part of an array that begins at a place.
fn array_of(tensor: &Tensor, offset: (u64, u64), shape: (u64, u64)) -> Array {
    let kind = match tensor.meta().dtype() {
        Dtype::Int32 => Kind::Int32,
        Dtype::Uint32 => Kind::Uint32,
        other => panic!("nobody put {other}"),
    };
    let bytes = tensor.view().to_contiguous(1 << 20).unwrap();
    let words = bytes.chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().unwrap()));
    let local = tensor.meta().shape();
    let places = (0..local[0]).flat_map(|row| (0..local[1]).map(move |column| (row, column)));
    let places = places.map(|(row, column)| (offset.0 + row, offset.1 + column));
    Array { kind, shape, elements: places.zip(words).collect() }
}
