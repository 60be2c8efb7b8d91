//! A store and its model side by side: each operation is done by both, and their answers are compared.
//!
//! When the store is killed while it does something, nobody knows whether it was done. Then there are several
//! models that it may be, and each answer rules out those that would have given another one.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::runtime::Runtime;
use tssd_store::{Error, GetOptions, Key, Opened, Publisher, Store, VersionId, VersionInfo};

use super::home::{Home, Kind as HomeKind, eventually};
use super::interpreter::{
    LOST, Put, Said, array_of, model, options, put_of, read, real, state_dict, wanted, writers_of,
};
use super::model::Model;
use super::operations::{CLIENTS, KEYS, Operation, Read, Wish};
use super::version::{Stage, Version};
use super::words::{Array, Ask, Dict, End, Fault, Id, Job, Kind, Part, Progress};

/// What all stores of a test run on, and nothing else: when they are at rest is seen by its tasks.
fn runtime() -> &'static Runtime {
    thread_local! {
        static RUNTIME: &'static Runtime = {
            let mut builder = tokio::runtime::Builder::new_multi_thread();
            Box::leak(builder.worker_threads(1).enable_all().build().unwrap().into())
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
    /// What has become of operations that were not answered.
    pub(crate) unanswered: BTreeMap<&'static str, u64>,
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
    /// What was not answered was not done.
    ForgetsUnanswered,
    /// What was not answered was done.
    BelievesUnanswered,
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
    /// Of each key all that it may be.
    models: Vec<Vec<Model>>,
    next: Id,
    /// Which version of the store is which one of the model.
    ids: BTreeMap<Id, VersionId>,
    /// How many puts there were of each writer of each job to each key, by client.
    calls: BTreeMap<(usize, usize, Job, u32), u64>,
    /// How many tasks there are when nothing is under way.
    at_rest: usize,
    /// How long after the next operation has begun the store is killed.
    doom: Option<Duration>,
    /// What has become of the last operation, if it was not answered.
    unanswered: Option<&'static str>,
}

/// What the store has said of a key, and of which version; and what each model that is possible says.
struct Answers {
    key: usize,
    expected: Vec<(Said, Option<Id>)>,
    said: Said,
    of: Option<VersionId>,
}

impl World {
    pub(crate) fn new(kind: HomeKind, home: Home, deviation: Option<Deviation>) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let prefix = format!("{}/", NEXT.fetch_add(1, Ordering::Relaxed));
        let at_rest = runtime().metrics().num_alive_tasks();
        let clients = (0..CLIENTS).map(|client| home.connect(client, runtime())).collect();
        let models = (0..KEYS).map(|_| vec![Model::new()]).collect();
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
            doom: None,
            unanswered: None,
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
            let said = self.step(operation);
            let said = said.map_err(|text| format!("step {at}, {operation:?}: {text}"))?;
            if let Some(outcome) = self.unanswered.take() {
                *tally.unanswered.entry(outcome).or_default() += 1;
            }
            if let Some(Err(fault)) = said {
                let name = fault.split([',', '{']).next().unwrap_or_default();
                let name = name.replace(['(', ')'], " ").trim().to_owned();
                *tally.faults.entry(name).or_default() += 1;
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

    /// Does an operation, and maybe kills the store meanwhile; gives what the store says.
    fn step(&mut self, operation: &Operation) -> Result<Option<Said>, String> {
        let doom = match operation {
            Operation::Doom { after } => {
                self.doom = Some(*after);
                return Ok(None);
            }
            _ => self.doom,
        };
        let said = match doom {
            Some(after) => self.be_killed(operation, after)?,
            None => self.act(operation)?,
        };
        for model in self.models.iter_mut().flatten() {
            match self.deviation {
                Some(Deviation::FencesNobody) => {
                    model.jobs = model.jobs.pop().into_iter().collect();
                }
                Some(Deviation::SupersedesNothing) => {
                    for version in model.versions.values_mut() {
                        let is_superseded = matches!(
                            version.stage,
                            Stage::Ended(Fault::Dropped(End::Superseded { .. }))
                        );
                        if is_superseded {
                            version.stage = Stage::Open;
                        }
                    }
                }
                _ => {}
            }
        }
        Ok(said)
    }

    /// Does an operation, and kills the store so long after it has begun. If there is no answer, it was done, or it
    /// was not; or of a put only that its job has taken over.
    fn be_killed(
        &mut self,
        operation: &Operation,
        after: Duration,
    ) -> Result<Option<Said>, String> {
        let before = self.models.clone();
        let Some(Home::Process(process)) = &self.home else { unreachable!("it is a process") };
        let killed = process.kill_after(after);
        let acted = self.act(operation);
        killed.join().unwrap();
        let said = acted.inspect_err(|_| self.kill())?;
        let is_lost = said == Some(Err(LOST.to_owned()));
        let done = self.models.clone();
        if is_lost {
            let mut begun = before.clone();
            if let Operation::Put { key, wish, .. } = operation {
                let id = self.next_id();
                for model in &mut begun[*key] {
                    // Whether it is refused is not known either.
                    let _ = model.begin(&wish.ask(), id);
                }
            }
            let possible = |key: usize| match self.deviation {
                Some(Deviation::ForgetsUnanswered) => before[key].clone(),
                Some(Deviation::BelievesUnanswered) => done[key].clone(),
                _ => [&before[key][..], &begun[key], &done[key]].concat(),
            };
            self.models = (0..KEYS).map(possible).collect();
        }
        self.doom = None;
        self.kill();
        // From here on all models that are possible have the same versions.
        for key in 0..KEYS {
            self.list(0, key).map(drop)?;
        }
        let is_possible = |left: Vec<Vec<Model>>| {
            let mut keys = crashed(left).into_iter().zip(&self.models);
            keys.all(|(left, now)| left.iter().any(|model| now.contains(model)))
        };
        let outcome = is_lost.then(|| match (is_possible(before), is_possible(done)) {
            (true, true) => "no difference is seen",
            (true, false) => "not done",
            (false, true) => "done",
            (false, false) => "begun",
        });
        self.unanswered = outcome;
        Ok(said)
    }

    /// Does an operation; gives what the store says, if it is asked.
    fn act(&mut self, operation: &Operation) -> Result<Option<Said>, String> {
        let said = match operation {
            Operation::Put { client, key, wish } => self.put(*client, *key, wish)?,
            Operation::Begin { client, key, wish } => self.begin(*client, *key, wish)?,
            Operation::Finish { back } => return self.finish(*back),
            Operation::Abort { back } => return self.abort(*back),
            Operation::Get { client, key, number, read } => {
                self.get(*client, *key, *number, read)?
            }
            Operation::Hold { client, key, number } => self.hold(*client, *key, *number)?,
            Operation::Release => return self.release(),
            Operation::List { client, key } => self.list(*client, *key)?,
            Operation::Wait { client, key, number } => {
                let expected = self.each(*key, |model| {
                    let newest = model.find(None).map_or(0, Version::number);
                    if newest >= *number && model.find(None).is_ok() {
                        Ok((newest, None))
                    } else {
                        Err(Fault::NotCome)
                    }
                });
                let (store, at) = (&self.clients[*client], self.key(*key));
                let said = runtime().block_on(store.wait_for_version(&at, *number, Duration::ZERO));
                self.compare(*key, expected, real(said.map(|info| info.number)))?
            }
            Operation::Delete { client, key, number } => {
                let forgets = self.deviation == Some(Deviation::ForgetsHighest);
                let expected = self.each(*key, |model| {
                    let count = model.delete(*number);
                    model.next.1 *= u64::from(!forgets);
                    Ok((count, None))
                });
                let (store, at) = (&self.clients[*client], self.key(*key));
                let said = runtime().block_on(store.delete(&at, *number));
                self.compare(*key, expected, real(said))?
            }
            Operation::Retain { client, key, keep } => {
                let more = usize::from(self.deviation == Some(Deviation::KeepsOneMore));
                let expected = self.each(*key, |model| {
                    model.keep = usize::try_from(*keep).unwrap() + more;
                    model.settle();
                    Ok(((), None))
                });
                let (store, at) = (&self.clients[*client], self.key(*key));
                let said = runtime().block_on(store.retain(&at, NonZeroU32::new(*keep).unwrap()));
                self.compare(*key, expected, real(said))?
            }
            Operation::Pin { client, key, number, label } => {
                let label = label.to_string();
                let forgets = self.deviation == Some(Deviation::PinsNothing);
                let expected = self.each(*key, |model| {
                    let pinned = model.pin(*number, &label);
                    model.pins.retain(|_, _| !forgets);
                    Ok((pinned?, None))
                });
                let (store, at) = (&self.clients[*client], self.key(*key));
                let said = runtime().block_on(store.pin(&at, *number, &label));
                self.compare(*key, expected, real(said))?
            }
            Operation::Unpin { client, key, label } => {
                let label = label.to_string();
                let expected = self.each(*key, |model| {
                    model.pins.remove(&label);
                    model.settle();
                    Ok(((), None))
                });
                let (store, at) = (&self.clients[*client], self.key(*key));
                let said = runtime().block_on(store.unpin(&at, &label));
                self.compare(*key, expected, real(said))?
            }
            Operation::Leave { client } => {
                self.leave(*client)?;
                return Ok(None);
            }
            Operation::Kill => {
                self.kill();
                return Ok(None);
            }
            Operation::Doom { .. } => unreachable!("it is told to what comes next"),
        };
        Ok(Some(said))
    }

    fn next_id(&mut self) -> Id {
        self.next += 1;
        self.next
    }

    /// Asks all models that are possible: for an answer, and for the version that it is about.
    fn each<T: Debug>(
        &mut self,
        key: usize,
        ask: impl Fn(&mut Model) -> Result<(T, Option<Id>), Fault>,
    ) -> Vec<(Said, Option<Id>)> {
        let answer = |it: &mut Model| match ask(it) {
            Ok((answer, id)) => (model(Ok(answer)), id),
            Err(fault) => (model(Err::<T, _>(fault)), None),
        };
        self.models[key].iter_mut().map(answer).collect()
    }

    fn compare(
        &mut self,
        key: usize,
        expected: Vec<(Said, Option<Id>)>,
        said: Said,
    ) -> Result<Said, String> {
        self.settle(&Answers { key, expected, said: said.clone(), of: None })?;
        Ok(said)
    }

    /// Rules out the models that say something else. Gives the version that the others mean.
    fn settle(&mut self, answers: &Answers) -> Result<Option<Id>, String> {
        let Answers { key, expected, said, of } = answers;
        if self.doom.is_some() && said.as_ref().is_err_and(|fault| fault == LOST) {
            return Ok(None);
        }
        let is_right = |(expected, id): &(Said, Option<Id>)| {
            expected == said && id.zip(*of).is_none_or(|(id, of)| self.is_same(id, of))
        };
        let is_right: Vec<bool> = expected.iter().map(is_right).collect();
        if !is_right.contains(&true) {
            let ids = &self.ids;
            return Err(format!(
                "the store says\n  {said:?} of {of:?}\nand the model\n  {expected:?} of {ids:?}"
            ));
        }
        let mut each = is_right.iter();
        self.models[*key].retain(|_| *each.next().unwrap());
        let right = expected.iter().zip(is_right).filter(|(_, is_right)| *is_right);
        let ids: BTreeSet<Id> = right.filter_map(|((_, id), _)| *id).collect();
        assert!(ids.len() <= 1, "the models mean different versions: {ids:?}");
        let id = ids.first().copied();
        self.ids.extend(id.zip(*of));
        Ok(id)
    }

    /// Whether a version of the store may be one of the model: what it is called stays so.
    fn is_same(&self, id: Id, of: VersionId) -> bool {
        match self.ids.get(&id) {
            Some(known) => *known == of,
            None => self.is_new(of),
        }
    }

    fn is_new(&self, of: VersionId) -> bool {
        self.ids.values().all(|known| *known != of)
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
            ask.call = Some(*calls).filter(|_| ask.number.is_none());
        }
        ask
    }

    fn uncount(&mut self, client: usize, key: usize, ask: &Ask) {
        if let Some(job) = ask.job.filter(|_| self.deviation == Some(Deviation::CountsSuccesses)) {
            let client = if self.kind == HomeKind::Memory { 0 } else { client };
            *self.calls.entry((client, key, job, ask.writer)).or_default() -= 1;
        }
    }

    fn put(&mut self, client: usize, key: usize, wish: &Wish) -> Result<Said, String> {
        let (ask, part) = (self.ask(client, key, wish), wish.part(false));
        let (id, kind) = (self.next_id(), self.kind);
        let expected = self.each(key, |model| {
            let id = begin(model, kind, &ask, id)?;
            commit(model, id, &ask, &part)
        });
        let options = options(wish, is_busy(&expected));
        let (store, at) = (self.clients[client].clone(), self.key(key));
        let dict = state_dict(&part, wish);
        let put = runtime().block_on(store.put_state_dict(&at, &dict, &options));
        if put.is_err() {
            self.uncount(client, key, &ask);
        }
        let of = put.as_ref().ok().map(|report| report.id);
        let said = real(put.map(|report| put_of(&report)));
        self.settle(&Answers { key, expected, said: said.clone(), of })?;
        Ok(said)
    }

    fn begin(&mut self, client: usize, key: usize, wish: &Wish) -> Result<Said, String> {
        let (ask, part) = (self.ask(client, key, wish), wish.part(true));
        let (id, kind) = (self.next_id(), self.kind);
        let expected = self.each(key, |model| Ok(((), Some(begin(model, kind, &ask, id)?))));
        let options = options(wish, is_busy(&expected));
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
        let id = self.settle(&Answers { key, expected, said: said.clone(), of: None })?;
        if let (Some(id), Ok(publisher)) = (id, publisher) {
            self.begun.push(Begun { client, key, id, ask, part, publisher });
        }
        Ok(said)
    }

    fn take(&mut self, back: usize) -> Option<Begun> {
        let at = self.begun.len().checked_sub(back + 1)?;
        Some(self.begun.remove(at))
    }

    fn finish(&mut self, back: usize) -> Result<Option<Said>, String> {
        let Some(Begun { client, key, id, ask, part, publisher }) = self.take(back) else {
            return Ok(None);
        };
        let expected = self.each(key, |model| commit(model, id, &ask, &part));
        let put = runtime().block_on(publisher.finish());
        if put.is_err() {
            self.uncount(client, key, &ask);
        }
        let of = put.as_ref().ok().map(|report| report.id);
        let said = real(put.map(|report| put_of(&report)));
        self.settle(&Answers { key, expected, said: said.clone(), of })?;
        Ok(Some(said))
    }

    /// What is published twice cannot be: the contribution is taken back, and why is what has become of the
    /// version, if it is gone already.
    fn abort(&mut self, back: usize) -> Result<Option<Said>, String> {
        let Some(Begun { key, id, ask, mut publisher, .. }) = self.take(back) else {
            return Ok(None);
        };
        let expected = self.each::<()>(key, |model| {
            let stage = model.versions[&id].stage.clone();
            model.abort(id, ask.writer);
            match stage {
                Stage::Ended(fault) if fault != Fault::Gone => Err(fault),
                _ => Err(Fault::Invalid),
            }
        });
        let said = real(runtime().block_on(publisher.add("matrix", 0_i64)));
        drop(publisher);
        self.compare(key, expected, said).map(Some)
    }

    fn get(
        &mut self,
        client: usize,
        key: usize,
        number: Option<u64>,
        read: &Read,
    ) -> Result<Said, String> {
        let is_leased = self.kind.is_daemon();
        let dict = self.models[key].iter().find_map(|model| model.find(number).ok());
        let dict = dict.map(Version::dict).unwrap_or_default();
        let expected = self.each(key, |model| {
            let version = model.find(number)?;
            let (id, dict) = (version.id, version.dict());
            if is_leased {
                // A lease that ends deletes what is owed.
                model.settle();
            }
            Ok((wanted(&dict, read)?, Some(id)))
        });
        let (store, at) = (self.clients[client].clone(), self.key(key));
        let options = GetOptions { version: number, ..GetOptions::default() };
        let got = runtime().block_on(self::read(&store, &at, &options, read, &dict));
        let of = got.as_ref().ok().and_then(|(_, id)| *id);
        let said = real(got.map(|(arrays, _)| arrays));
        self.let_go(client, key);
        self.settle(&Answers { key, expected, said: said.clone(), of })?;
        Ok(said)
    }

    /// A daemon hears that somebody has let go of a version before it answers what comes next.
    fn let_go(&self, client: usize, key: usize) {
        if self.kind.is_daemon() {
            let head = runtime().block_on(self.clients[client].head(&self.key(key)));
            assert!(head.is_ok() || self.doom.is_some(), "the daemon is there");
        }
    }

    fn hold(&mut self, client: usize, key: usize, number: Option<u64>) -> Result<Said, String> {
        let expected = self.each(key, |model| {
            let version = model.find(number)?;
            Ok((version.number(), Some(version.id)))
        });
        let (store, at) = (self.clients[client].clone(), self.key(key));
        let options = GetOptions { version: number, ..GetOptions::default() };
        let opened = runtime().block_on(store.open(&at, &options));
        let said = real(opened.as_ref().map(Opened::version));
        let of = opened.as_ref().ok().map(Opened::id);
        let id = self.settle(&Answers { key, expected, said: said.clone(), of })?;
        if let (Some(id), Ok(opened)) = (id, opened) {
            let dict = self.models[key][0].versions[&id].dict();
            if self.kind.is_daemon() {
                self.models[key].iter_mut().for_each(|model| model.leases.push(id));
            }
            self.held.push(Held { client, key, id, dict, opened });
        }
        Ok(said)
    }

    /// What somebody has held is as it was, whatever has become of the version.
    fn release(&mut self) -> Result<Option<Said>, String> {
        let Some(Held { client, key, id, dict, opened }) = self.held.pop() else {
            return Ok(None);
        };
        let is_leased = self.kind.is_daemon();
        let arrays = dict.iter().filter(|(_, array)| array.kind != Kind::Number);
        let held: Vec<&Array> = arrays.clone().map(|(_, array)| array).collect();
        let expected = self.each(key, |model| {
            if let Some(at) = model.leases.iter().position(|lease| *lease == id) {
                model.leases.remove(at);
            }
            if is_leased {
                model.settle();
            }
            Ok((&held, None))
        });
        let said = runtime().block_on(async {
            let mut said = Vec::new();
            for (name, array) in arrays {
                said.push(array_of(&opened.tensor(name, None).await?, (0, 0), array.shape));
            }
            Ok::<_, Error>(said)
        });
        drop(opened);
        self.let_go(client, key);
        self.compare(key, expected, real(said)).map(Some)
    }

    /// All that can be seen of a key without reading it; and which keys there are.
    fn list(&mut self, client: usize, key: usize) -> Result<Said, String> {
        let ids = self.ids.clone();
        let expected = self.each(key, |model| {
            let visible = model.all(&Stage::Visible);
            let seen = |it: &&Version| (it.place, it.ask.writers.clone(), ids.get(&it.id).copied());
            let labels = model.pins.iter();
            let labels = labels.map(|(label, id)| (label.clone(), model.versions[id].number()));
            let labels: BTreeMap<String, u64> = labels.collect();
            let visible: Vec<_> = visible.iter().map(seen).collect();
            let exists = !visible.is_empty();
            Ok(((visible, labels, exists), None))
        });
        let (store, at) = (self.clients[client].clone(), self.key(key));
        let said = runtime().block_on(async {
            let versions = store.versions(&at).await?;
            let seen = |it: &VersionInfo| {
                let id = Some(it.id).filter(|id| !self.is_new(*id));
                ((it.epoch, it.number), writers_of(&it.writers), id)
            };
            let visible: Vec<_> = versions.iter().map(seen).collect();
            let labels: BTreeMap<String, u64> = store.pins(&at).await?;
            Ok::<_, Error>((visible, labels, store.exists(&at, None).await?))
        });
        let said = self.compare(key, expected, real(said))?;
        let keys = runtime().block_on(store.keys(Some(&self.prefix)));
        for key in 0..KEYS {
            let expected = self.each(key, |model| Ok((model.find(None).is_ok(), None)));
            let at = self.key(key);
            let said = real(keys.as_ref().map(|keys| keys.contains(&at)));
            self.compare(key, expected, said).map(drop)?;
        }
        Ok(said)
    }

    /// A client dies. What it has not finished is taken back if somebody sees that it is gone, and else stays.
    fn leave(&mut self, client: usize) -> Result<(), String> {
        while let Some(at) = self.held.iter().position(|held| held.client == client) {
            let held = self.held.remove(at);
            self.held.push(held);
            self.release()?;
        }
        let (gone, left) =
            std::mem::take(&mut self.begun).into_iter().partition(|it| it.client == client);
        self.begun = left;
        let gone: Vec<Begun> = gone;
        // Nobody sees that a process is gone that has written to a directory.
        let is_seen = self.kind != HomeKind::Directory || client == 0;
        for Begun { key, id, ask, publisher, .. } in gone {
            if is_seen {
                self.models[key].iter_mut().for_each(|model| model.abort(id, ask.writer));
                runtime().block_on(async { drop(publisher) });
            } else {
                self.dead.push(publisher);
            }
        }
        if self.kind == HomeKind::Memory {
            self.come_to_rest();
            return Ok(());
        }
        self.calls.retain(|(of, ..), _| *of != client);
        let home = self.home.as_ref().unwrap();
        if !self.kind.is_daemon() {
            self.come_to_rest();
            self.clients[client] = home.connect(client, runtime());
            return Ok(());
        }
        let other = self.clients[1 - client].clone();
        self.clients[client] = other.clone();
        // One is near, the other one is not.
        eventually("a client that has left is forgotten", || {
            let status = runtime().block_on(other.status()).unwrap();
            status.peers.iter().all(|peer| peer.address.is_some() == (client == 0))
        });
        self.clients[client] = home.connect(client, runtime());
        Ok(())
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
            self.models = crashed(std::mem::take(&mut self.models));
        }
        let home = self.home.as_ref().unwrap();
        self.clients = (0..CLIENTS).map(|client| home.connect(client, runtime())).collect();
    }
}

/// What may be left of each key when the process has ended that holds what is in memory.
fn crashed(models: Vec<Vec<Model>>) -> Vec<Vec<Model>> {
    let different = |mut of: Vec<Model>| {
        of.iter_mut().for_each(Model::crash);
        let is_first = |(at, model): &(usize, &Model)| !of[..*at].contains(*model);
        of.iter().enumerate().filter(is_first).map(|(_, model)| model.clone()).collect()
    };
    models.into_iter().map(different).collect()
}

/// The model's begin. Where nothing lasts nobody is asked first.
fn begin(model: &mut Model, kind: HomeKind, ask: &Ask, id: Id) -> Result<Id, Fault> {
    if ask.durable && matches!(kind, HomeKind::Daemon | HomeKind::Memory) {
        return Err(Fault::Invalid);
    }
    model.begin(ask, id)
}

/// The model's commit: what its writer is told, and the version.
fn commit(model: &mut Model, id: Id, ask: &Ask, part: &Part) -> Result<(Put, Option<Id>), Fault> {
    let Progress { visible, missing } = model.commit(id, ask, part)?;
    let (epoch, number) = model.versions[&id].place;
    Ok(((number, epoch, visible, missing), Some(id)))
}

fn is_busy(expected: &[(Said, Option<Id>)]) -> bool {
    let busy = model(Err::<(), _>(Fault::Busy));
    expected.iter().any(|(expected, _)| *expected == busy)
}
