//! Runs a store and its model side by side, and compares the outcome of each operation.
//!
//! If the store is killed during an operation, its outcome is unknown. The harness then keeps every
//! model that is possible. Later outcomes rule out the models that predict others.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::runtime::Runtime;
use tssd_store::{Error, GetOptions, Key, Publisher, Store, VersionId, VersionInfo, VersionReader};

use super::model::Model;
use super::operations::{CLIENTS, KEYS, Operation, PutSpec, Read};
use super::version::{Stage, Version};
use crate::conformance::backend::{Backend, BackendKind as HomeKind, wait_until};
use crate::conformance::convert::{
    Outcome, PutResult, UNANSWERED, build_state_dict, expected_arrays, model_outcome, put_options,
    put_result, read, store_outcome, to_array, writer_ids,
};
use crate::conformance::types::{
    Array, Contribution, Dict, DropReason, Id, Job, Kind, ModelError, Progress, PutRequest,
};

/// Returns the runtime of all stores of a test.
///
/// It runs nothing else, so its number of tasks shows when the stores are idle.
fn runtime() -> &'static Runtime {
    thread_local! {
        static RUNTIME: &'static Runtime = {
            let mut builder = tokio::runtime::Builder::new_multi_thread();
            Box::leak(builder.worker_threads(1).enable_all().build().unwrap().into())
        };
    }
    RUNTIME.with(|runtime| *runtime)
}

/// Counts of operations and of their outcomes.
#[derive(Default)]
pub(crate) struct RunStats {
    pub(crate) sequences: u64,
    pub(crate) operations: BTreeMap<&'static str, u64>,
    pub(crate) errors: BTreeMap<String, u64>,
    /// Operations without an answer, by what the store had done of them.
    pub(crate) unanswered: BTreeMap<&'static str, u64>,
}

/// A bug that is planted in the model, to test the comparison itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PlantedBug {
    /// A deletion frees the numbers of its versions.
    ForgetsHighest,
    /// Retention keeps one version more than requested.
    KeepsOneMore,
    /// A fenced job may continue.
    SkipsFencing,
    /// A label does not keep its version.
    IgnoresPins,
    /// An open version stays open when a newer one becomes visible.
    KeepsSuperseded,
    /// A failed put does not count as a call.
    CountsSuccesses,
    /// A rewind is ignored.
    IgnoresRewinds,
    /// Versions in memory outlive their process.
    KeepsMemoryAfterCrash,
    /// An operation without an answer has had no effect.
    DropsUnanswered,
    /// An operation without an answer has had its effect.
    AssumesUnansweredDone,
}

/// A contribution that has begun and is not committed.
struct PendingContribution {
    client: usize,
    key: usize,
    id: Id,
    request: PutRequest,
    part: Contribution,
    publisher: Publisher,
}

/// A version that a client has open.
struct HeldVersion {
    client: usize,
    key: usize,
    id: Id,
    dict: Dict,
    opened: VersionReader,
}

pub(crate) struct Harness {
    kind: HomeKind,
    home: Option<Backend>,
    deviation: Option<PlantedBug>,
    prefix: String,
    clients: Vec<Store>,
    pending: Vec<PendingContribution>,
    held: Vec<HeldVersion>,
    /// Publishers of killed clients, whose memory this process still holds.
    orphaned_publishers: Vec<Publisher>,
    /// Models that are possible, by key.
    models: Vec<Vec<Model>>,
    next: Id,
    /// Ids of versions in the model and in the store.
    ids: BTreeMap<Id, VersionId>,
    /// Number of puts by client, key, job and writer.
    calls: BTreeMap<(usize, usize, Job, u32), u64>,
    /// Number of tasks of the runtime when nothing is in flight.
    idle_tasks: usize,
    /// Delay from the begin of the next operation to the kill of the store.
    kill_delay: Option<Duration>,
    /// Effect of the last operation in the store, if the operation had no answer.
    unanswered: Option<&'static str>,
}

/// The outcome of an operation in the store, and in each model that is possible.
struct Comparison {
    key: usize,
    expected: Vec<(Outcome, Option<Id>)>,
    actual: Outcome,
    version: Option<VersionId>,
}

impl Harness {
    pub(crate) fn new(kind: HomeKind, home: Backend, deviation: Option<PlantedBug>) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let prefix = format!("{}/", NEXT.fetch_add(1, Ordering::Relaxed));
        let idle_tasks = runtime().metrics().num_alive_tasks();
        let clients = (0..CLIENTS).map(|client| home.connect(client, runtime())).collect();
        let models = (0..KEYS).map(|_| vec![Model::new()]).collect();
        let (pending, held, orphaned_publishers) = (Vec::new(), Vec::new(), Vec::new());
        let (ids, calls) = (BTreeMap::new(), BTreeMap::new());
        let home = Some(home);
        Self {
            kind,
            home,
            deviation,
            prefix,
            clients,
            pending,
            held,
            orphaned_publishers,
            models,
            next: 0,
            ids,
            calls,
            idle_tasks,
            kill_delay: None,
            unanswered: None,
        }
    }

    /// Runs operations until the outcomes of store and model differ. Describes the difference.
    pub(crate) fn run(
        &mut self,
        operations: &[Operation],
        tally: &mut RunStats,
    ) -> Result<(), String> {
        for (at, operation) in operations.iter().enumerate() {
            *tally.operations.entry(operation.name()).or_default() += 1;
            let actual = self.step(operation);
            let actual = actual.map_err(|text| format!("step {at}, {operation:?}: {text}"))?;
            if let Some(outcome) = self.unanswered.take() {
                *tally.unanswered.entry(outcome).or_default() += 1;
            }
            if let Some(Err(fault)) = actual {
                let name = fault.split([',', '{']).next().unwrap_or_default();
                let name = name.replace(['(', ')'], " ").trim().to_owned();
                *tally.errors.entry(name).or_default() += 1;
            }
        }
        Ok(())
    }

    /// Ends everything in flight and returns the backend.
    pub(crate) fn finish(mut self) -> Backend {
        let Self { pending, held, orphaned_publishers, clients, .. } = &mut self;
        runtime().block_on(async {
            pending.clear();
            held.clear();
            orphaned_publishers.clear();
            clients.clear();
        });
        self.wait_until_idle();
        self.home.take().unwrap()
    }

    fn wait_until_idle(&self) {
        wait_until("all is done", || runtime().metrics().num_alive_tasks() <= self.idle_tasks);
    }

    fn key(&self, key: usize) -> Key {
        Key::new(format!("{}{key}", self.prefix)).unwrap()
    }

    /// Executes an operation, during which the store may be killed. Returns the outcome in the store.
    fn step(&mut self, operation: &Operation) -> Result<Option<Outcome>, String> {
        let kill_delay = match operation {
            Operation::KillDuringNext { after } => {
                self.kill_delay = Some(*after);
                return Ok(None);
            }
            _ => self.kill_delay,
        };
        let actual = match kill_delay {
            Some(after) => self.step_and_kill(operation, after)?,
            None => self.execute(operation)?,
        };
        for model in self.models.iter_mut().flatten() {
            match self.deviation {
                Some(PlantedBug::SkipsFencing) => {
                    model.jobs = model.jobs.pop().into_iter().collect();
                }
                Some(PlantedBug::KeepsSuperseded) => {
                    for version in model.versions.values_mut() {
                        let is_superseded = matches!(
                            version.stage,
                            Stage::Ended(ModelError::Dropped(DropReason::Superseded { .. }))
                        );
                        if is_superseded {
                            version.stage = Stage::Open;
                        }
                    }
                }
                _ => {}
            }
        }
        Ok(actual)
    }

    /// Executes an operation, and kills the store this long after it has begun.
    ///
    /// Without an answer the store has executed the operation or not. A put may also have fenced
    /// older jobs only.
    fn step_and_kill(
        &mut self,
        operation: &Operation,
        after: Duration,
    ) -> Result<Option<Outcome>, String> {
        let before = self.models.clone();
        let Some(Backend::Process(process)) = &self.home else { unreachable!("it is a process") };
        let killer = process.kill_after(after);
        let executed = self.execute(operation);
        killer.join().unwrap();
        let actual = executed.inspect_err(|_| self.kill())?;
        let is_unanswered = actual == Some(Err(UNANSWERED.to_owned()));
        let done = self.models.clone();
        if is_unanswered {
            let mut begun = before.clone();
            if let Operation::Put { key, wish, .. } = operation {
                let id = self.next_id();
                for model in &mut begun[*key] {
                    // It is unknown, too, whether the model refuses it.
                    let _ = model.begin(&wish.request(), id);
                }
            }
            let possible = |key: usize| match self.deviation {
                Some(PlantedBug::DropsUnanswered) => before[key].clone(),
                Some(PlantedBug::AssumesUnansweredDone) => done[key].clone(),
                _ => [&before[key][..], &begun[key], &done[key]].concat(),
            };
            self.models = (0..KEYS).map(possible).collect();
        }
        self.kill_delay = None;
        self.kill();
        // The list leaves only models that have the same versions.
        for key in 0..KEYS {
            self.list(0, key).map(drop)?;
        }
        let is_possible = |candidates: Vec<Vec<Model>>| {
            let mut keys = crash_all(candidates).into_iter().zip(&self.models);
            keys.all(|(candidates, now)| candidates.iter().any(|model| now.contains(model)))
        };
        let outcome = is_unanswered.then(|| match (is_possible(before), is_possible(done)) {
            (true, true) => "no difference is seen",
            (true, false) => "not done",
            (false, true) => "done",
            (false, false) => "begun",
        });
        self.unanswered = outcome;
        Ok(actual)
    }

    /// Executes an operation. Returns the outcome in the store, if the operation has one.
    fn execute(&mut self, operation: &Operation) -> Result<Option<Outcome>, String> {
        let actual = match operation {
            Operation::Put { client, key, wish } => self.put(*client, *key, wish)?,
            Operation::Begin { client, key, wish } => self.begin(*client, *key, wish)?,
            Operation::Finish { from_last } => return self.finish_publisher(*from_last),
            Operation::Abort { back } => return self.abort(*back),
            Operation::Get { client, key, number, read } => {
                self.get(*client, *key, *number, read)?
            }
            Operation::Open { client, key, number } => self.hold(*client, *key, *number)?,
            Operation::Release => return self.release(),
            Operation::List { client, key } => self.list(*client, *key)?,
            Operation::Wait { client, key, number } => {
                let expected = self.query_models(*key, |model| {
                    let newest = model.find(None).map_or(0, Version::number);
                    if newest >= *number && model.find(None).is_ok() {
                        Ok((newest, None))
                    } else {
                        Err(ModelError::WaitTimedOut)
                    }
                });
                let (store, at) = (&self.clients[*client], self.key(*key));
                let actual =
                    runtime().block_on(store.wait_for_version(&at, *number, Duration::ZERO));
                self.compare(*key, expected, store_outcome(actual.map(|info| info.number)))?
            }
            Operation::Delete { client, key, number } => {
                let forgets = self.deviation == Some(PlantedBug::ForgetsHighest);
                let expected = self.query_models(*key, |model| {
                    let count = model.delete(*number);
                    model.next_position.1 *= u64::from(!forgets);
                    Ok((count, None))
                });
                let (store, at) = (&self.clients[*client], self.key(*key));
                let actual = runtime().block_on(store.delete(&at, *number));
                self.compare(*key, expected, store_outcome(actual))?
            }
            Operation::Retain { client, key, keep } => {
                let more = usize::from(self.deviation == Some(PlantedBug::KeepsOneMore));
                let expected = self.query_models(*key, |model| {
                    model.keep = usize::try_from(*keep).unwrap() + more;
                    model.apply_retention();
                    Ok(((), None))
                });
                let (store, at) = (&self.clients[*client], self.key(*key));
                let actual = runtime().block_on(store.retain(&at, NonZeroU32::new(*keep).unwrap()));
                self.compare(*key, expected, store_outcome(actual))?
            }
            Operation::Pin { client, key, number, label } => {
                let label = format!("label-{label}");
                let forgets = self.deviation == Some(PlantedBug::IgnoresPins);
                let expected = self.query_models(*key, |model| {
                    let pinned = model.pin(*number, &label);
                    model.pins.retain(|_, _| !forgets);
                    Ok((pinned?, None))
                });
                let (store, at) = (&self.clients[*client], self.key(*key));
                let actual = runtime().block_on(store.pin(&at, *number, &label));
                self.compare(*key, expected, store_outcome(actual))?
            }
            Operation::Unpin { client, key, label } => {
                let label = format!("label-{label}");
                let expected = self.query_models(*key, |model| {
                    model.pins.remove(&label);
                    model.apply_retention();
                    Ok(((), None))
                });
                let (store, at) = (&self.clients[*client], self.key(*key));
                let actual = runtime().block_on(store.unpin(&at, &label));
                self.compare(*key, expected, store_outcome(actual))?
            }
            Operation::Disconnect { client } => {
                self.disconnect(*client)?;
                return Ok(None);
            }
            Operation::Kill => {
                self.kill();
                return Ok(None);
            }
            Operation::KillDuringNext { .. } => unreachable!("it is told to what comes next"),
        };
        Ok(Some(actual))
    }

    fn next_id(&mut self) -> Id {
        self.next += 1;
        self.next
    }

    /// Queries all models that are possible: for an outcome, and for the version that it refers to.
    fn query_models<T: Debug>(
        &mut self,
        key: usize,
        query: impl Fn(&mut Model) -> Result<(T, Option<Id>), ModelError>,
    ) -> Vec<(Outcome, Option<Id>)> {
        let answer = |it: &mut Model| match query(it) {
            Ok((answer, id)) => (model_outcome(Ok(answer)), id),
            Err(fault) => (model_outcome(Err::<T, _>(fault)), None),
        };
        self.models[key].iter_mut().map(answer).collect()
    }

    fn compare(
        &mut self,
        key: usize,
        expected: Vec<(Outcome, Option<Id>)>,
        actual: Outcome,
    ) -> Result<Outcome, String> {
        self.retain_matching_models(&Comparison {
            key,
            expected,
            actual: actual.clone(),
            version: None,
        })?;
        Ok(actual)
    }

    /// Removes the models whose outcome differs. Returns the version that the others refer to.
    fn retain_matching_models(&mut self, comparison: &Comparison) -> Result<Option<Id>, String> {
        let Comparison { key, expected, actual, version } = comparison;
        if self.kill_delay.is_some() && actual.as_ref().is_err_and(|fault| fault == UNANSWERED) {
            return Ok(None);
        }
        let is_right = |(expected, id): &(Outcome, Option<Id>)| {
            expected == actual
                && id.zip(*version).is_none_or(|(id, version)| self.matches_version(id, version))
        };
        let is_right: Vec<bool> = expected.iter().map(is_right).collect();
        if !is_right.contains(&true) {
            let ids = &self.ids;
            return Err(format!(
                "the store says\n  {actual:?} of {version:?}\nand the model\n  {expected:?} of {ids:?}"
            ));
        }
        let mut flags = is_right.iter();
        self.models[*key].retain(|_| *flags.next().unwrap());
        let right = expected.iter().zip(is_right).filter(|(_, is_right)| *is_right);
        let ids: BTreeSet<Id> = right.filter_map(|((_, id), _)| *id).collect();
        assert!(ids.len() <= 1, "the models refer to different versions: {ids:?}");
        let id = ids.first().copied();
        self.ids.extend(id.zip(*version));
        Ok(id)
    }

    /// Returns whether a version of the model may be this version of the store. Their ids stay paired.
    fn matches_version(&self, id: Id, version: VersionId) -> bool {
        match self.ids.get(&id) {
            Some(known) => *known == version,
            None => self.is_unmapped(version),
        }
    }

    fn is_unmapped(&self, version: VersionId) -> bool {
        self.ids.values().all(|known| *known != version)
    }

    /// Returns the request of a put, and counts its call.
    fn request(&mut self, client: usize, key: usize, wish: &PutSpec) -> PutRequest {
        let mut request = wish.request();
        request.rewind &= self.deviation != Some(PlantedBug::IgnoresRewinds);
        if let Some(job) = request.job {
            // All clients of a store in memory are one client.
            let client = if self.kind == HomeKind::Memory { 0 } else { client };
            let calls = self.calls.entry((client, key, job, request.writer)).or_default();
            *calls += 1;
            request.sequence = Some(*calls).filter(|_| request.number.is_none());
        }
        request
    }

    fn revert_call_count(&mut self, client: usize, key: usize, request: &PutRequest) {
        if let Some(job) =
            request.job.filter(|_| self.deviation == Some(PlantedBug::CountsSuccesses))
        {
            let client = if self.kind == HomeKind::Memory { 0 } else { client };
            *self.calls.entry((client, key, job, request.writer)).or_default() -= 1;
        }
    }

    fn put(&mut self, client: usize, key: usize, wish: &PutSpec) -> Result<Outcome, String> {
        let (request, part) = (self.request(client, key, wish), wish.contribution(false));
        let (id, kind) = (self.next_id(), self.kind);
        let expected = self.query_models(key, |model| {
            let id = begin(model, kind, &request, id)?;
            commit(model, id, &request, &part)
        });
        let options = put_options(wish, is_busy(&expected));
        let (store, at) = (self.clients[client].clone(), self.key(key));
        let dict = build_state_dict(&part, wish);
        let put = runtime().block_on(store.put_state_dict(&at, &dict, &options));
        if put.is_err() {
            self.revert_call_count(client, key, &request);
        }
        let version = put.as_ref().ok().map(|report| report.id);
        let actual = store_outcome(put.map(|report| put_result(&report)));
        self.retain_matching_models(&Comparison {
            key,
            expected,
            actual: actual.clone(),
            version,
        })?;
        Ok(actual)
    }

    fn begin(&mut self, client: usize, key: usize, wish: &PutSpec) -> Result<Outcome, String> {
        let (request, part) = (self.request(client, key, wish), wish.contribution(true));
        let (id, kind) = (self.next_id(), self.kind);
        let expected =
            self.query_models(key, |model| Ok(((), Some(begin(model, kind, &request, id)?))));
        let options = put_options(wish, is_busy(&expected));
        let (store, at) = (self.clients[client].clone(), self.key(key));
        let dict = build_state_dict(&part, wish);
        let publisher = runtime().block_on(async {
            let mut publisher = store.publish(&at, &options, 1 << 20)?;
            for (number, (name, value)) in dict.entries().iter().enumerate() {
                let tssd_format::MapKey::Str(name) = name else {
                    unreachable!("all names are text")
                };
                publisher.add(name.as_str().unwrap(), value.clone()).await?;
                if number == 0 && part.archives == 2 {
                    publisher.flush().await?;
                }
            }
            publisher.flush().await?;
            Ok::<_, Error>(publisher)
        });
        let actual = store_outcome(publisher.as_ref().map(|_| ()));
        if publisher.is_err() {
            self.revert_call_count(client, key, &request);
        }
        let id = self.retain_matching_models(&Comparison {
            key,
            expected,
            actual: actual.clone(),
            version: None,
        })?;
        if let (Some(id), Ok(publisher)) = (id, publisher) {
            self.pending.push(PendingContribution { client, key, id, request, part, publisher });
        }
        Ok(actual)
    }

    fn take_pending(&mut self, back: usize) -> Option<PendingContribution> {
        let at = self.pending.len().checked_sub(back + 1)?;
        Some(self.pending.remove(at))
    }

    fn finish_publisher(&mut self, back: usize) -> Result<Option<Outcome>, String> {
        let Some(PendingContribution { client, key, id, request, part, publisher }) =
            self.take_pending(back)
        else {
            return Ok(None);
        };
        let expected = self.query_models(key, |model| commit(model, id, &request, &part));
        let put = runtime().block_on(publisher.finish());
        if put.is_err() {
            self.revert_call_count(client, key, &request);
        }
        let version = put.as_ref().ok().map(|report| report.id);
        let actual = store_outcome(put.map(|report| put_result(&report)));
        self.retain_matching_models(&Comparison {
            key,
            expected,
            actual: actual.clone(),
            version,
        })?;
        Ok(Some(actual))
    }

    /// Aborts a contribution by adding a leaf twice.
    ///
    /// The error is that of the version, if the version has ended already.
    fn abort(&mut self, back: usize) -> Result<Option<Outcome>, String> {
        let Some(PendingContribution { key, id, request, mut publisher, .. }) =
            self.take_pending(back)
        else {
            return Ok(None);
        };
        let expected = self.query_models::<()>(key, |model| {
            let stage = model.versions[&id].stage.clone();
            model.abort(id, request.writer);
            match stage {
                Stage::Ended(fault) if fault != ModelError::Gone => Err(fault),
                _ => Err(ModelError::Invalid),
            }
        });
        let actual = store_outcome(runtime().block_on(publisher.add("matrix", 0_i64)));
        drop(publisher);
        self.compare(key, expected, actual).map(Some)
    }

    fn get(
        &mut self,
        client: usize,
        key: usize,
        number: Option<u64>,
        read: &Read,
    ) -> Result<Outcome, String> {
        let is_leased = self.kind.is_daemon();
        let dict = self.models[key].iter().find_map(|model| model.find(number).ok());
        let dict = dict.map(Version::dict).unwrap_or_default();
        let expected = self.query_models(key, |model| {
            let version = model.find(number)?;
            let (id, dict) = (version.id, version.dict());
            if is_leased {
                // The end of a lease deletes the data that is pending deletion.
                model.apply_retention();
            }
            Ok((expected_arrays(&dict, read)?, Some(id)))
        });
        let (store, at) = (self.clients[client].clone(), self.key(key));
        let options = GetOptions { version: number.into(), ..GetOptions::default() };
        let outcome = runtime().block_on(self::read(&store, &at, &options, read, &dict));
        let version = outcome.as_ref().ok().and_then(|(_, id)| *id);
        let actual = store_outcome(outcome.map(|(arrays, _)| arrays));
        self.sync_release(client, key);
        self.retain_matching_models(&Comparison {
            key,
            expected,
            actual: actual.clone(),
            version,
        })?;
        Ok(actual)
    }

    /// Waits until the daemon has processed the release of a version.
    ///
    /// The daemon processes it before the next request of the same client.
    fn sync_release(&self, client: usize, key: usize) {
        if self.kind.is_daemon() {
            let head = runtime().block_on(self.clients[client].head(&self.key(key)));
            assert!(head.is_ok() || self.kill_delay.is_some(), "the daemon answers");
        }
    }

    fn hold(&mut self, client: usize, key: usize, number: Option<u64>) -> Result<Outcome, String> {
        let expected = self.query_models(key, |model| {
            let version = model.find(number)?;
            Ok((version.number(), Some(version.id)))
        });
        let (store, at) = (self.clients[client].clone(), self.key(key));
        let options = GetOptions { version: number.into(), ..GetOptions::default() };
        let opened = runtime().block_on(store.open(&at, &options));
        let actual = store_outcome(opened.as_ref().map(VersionReader::version));
        let version = opened.as_ref().ok().map(VersionReader::id);
        let id = self.retain_matching_models(&Comparison {
            key,
            expected,
            actual: actual.clone(),
            version,
        })?;
        if let (Some(id), Ok(opened)) = (id, opened) {
            let dict = self.models[key][0].versions[&id].dict();
            if self.kind.is_daemon() {
                self.models[key].iter_mut().for_each(|model| model.leases.push(id));
            }
            self.held.push(HeldVersion { client, key, id, dict, opened });
        }
        Ok(actual)
    }

    /// Reads an open version, which must be unchanged, and closes it.
    fn release(&mut self) -> Result<Option<Outcome>, String> {
        let Some(HeldVersion { client, key, id, dict, opened }) = self.held.pop() else {
            return Ok(None);
        };
        let is_leased = self.kind.is_daemon();
        let arrays = dict.iter().filter(|(_, array)| array.kind != Kind::Number);
        let held: Vec<&Array> = arrays.clone().map(|(_, array)| array).collect();
        let expected = self.query_models(key, |model| {
            if let Some(at) = model.leases.iter().position(|lease| *lease == id) {
                model.leases.remove(at);
            }
            if is_leased {
                model.apply_retention();
            }
            Ok((&held, None))
        });
        let actual = runtime().block_on(async {
            let mut actual = Vec::new();
            for (name, array) in arrays {
                actual.push(to_array(&opened.tensor(name, None).await?, (0, 0), array.shape));
            }
            Ok::<_, Error>(actual)
        });
        drop(opened);
        self.sync_release(client, key);
        self.compare(key, expected, store_outcome(actual)).map(Some)
    }

    /// Lists all metadata of a key, and checks which keys exist.
    fn list(&mut self, client: usize, key: usize) -> Result<Outcome, String> {
        let ids = self.ids.clone();
        let expected = self.query_models(key, |model| {
            let visible = model.in_stage(&Stage::Visible);
            let seen =
                |it: &&Version| (it.position, it.request.writers.clone(), ids.get(&it.id).copied());
            let labels = model.pins.iter();
            let labels = labels.map(|(label, id)| (label.clone(), model.versions[id].number()));
            let labels: BTreeMap<String, u64> = labels.collect();
            let visible: Vec<_> = visible.iter().map(seen).collect();
            let exists = !visible.is_empty();
            Ok(((visible, labels, exists), None))
        });
        let (store, at) = (self.clients[client].clone(), self.key(key));
        let actual = runtime().block_on(async {
            let versions = store.versions(&at).await?;
            let seen = |it: &VersionInfo| {
                let id = Some(it.id).filter(|id| !self.is_unmapped(*id));
                ((it.epoch, it.number), writer_ids(&it.writers), id)
            };
            let visible: Vec<_> = versions.iter().map(seen).collect();
            let labels: BTreeMap<String, u64> = store.pins(&at).await?;
            Ok::<_, Error>((visible, labels, store.exists(&at, None).await?))
        });
        let actual = self.compare(key, expected, store_outcome(actual))?;
        let keys = runtime().block_on(store.keys(Some(&self.prefix)));
        for key in 0..KEYS {
            let expected = self.query_models(key, |model| Ok((model.find(None).is_ok(), None)));
            let at = self.key(key);
            let actual = store_outcome(keys.as_ref().map(|keys| keys.contains(&at)));
            self.compare(key, expected, actual).map(drop)?;
        }
        Ok(actual)
    }

    /// Disconnects a client and connects another one.
    ///
    /// The store withdraws its contributions if it detects the end of the client. Otherwise they
    /// stay open.
    fn disconnect(&mut self, client: usize) -> Result<(), String> {
        while let Some(at) = self.held.iter().position(|held| held.client == client) {
            let held = self.held.remove(at);
            self.held.push(held);
            self.release()?;
        }
        let (closed, remaining) =
            std::mem::take(&mut self.pending).into_iter().partition(|it| it.client == client);
        self.pending = remaining;
        let closed: Vec<PendingContribution> = closed;
        // The end of a process that writes to a directory is not detected.
        let is_detected = self.kind != HomeKind::Directory || client == 0;
        for PendingContribution { key, id, request, publisher, .. } in closed {
            if is_detected {
                self.models[key].iter_mut().for_each(|model| model.abort(id, request.writer));
                runtime().block_on(async { drop(publisher) });
            } else {
                self.orphaned_publishers.push(publisher);
            }
        }
        if self.kind == HomeKind::Memory {
            self.wait_until_idle();
            return Ok(());
        }
        self.calls.retain(|(owner, ..), _| *owner != client);
        let home = self.home.as_ref().unwrap();
        if !self.kind.is_daemon() {
            self.wait_until_idle();
            self.clients[client] = home.connect(client, runtime());
            return Ok(());
        }
        let other = self.clients[1 - client].clone();
        self.clients[client] = other.clone();
        // Client 0 shares the memory of the daemon, the other client uses TCP.
        wait_until("a client that has left is forgotten", || {
            let status = runtime().block_on(other.status()).unwrap();
            status.peers.iter().all(|peer| peer.address.is_some() == (client == 0))
        });
        self.clients[client] = home.connect(client, runtime());
        Ok(())
    }

    fn kill(&mut self) {
        let Some(Backend::Process(process)) = self.home.take() else {
            unreachable!("it is a process")
        };
        self.home = Some(Backend::Process(process.restart()));
        runtime().block_on(async {
            self.pending.clear();
            self.held.clear();
            self.clients.clear();
        });
        self.calls.clear();
        if self.deviation != Some(PlantedBug::KeepsMemoryAfterCrash) {
            self.models = crash_all(std::mem::take(&mut self.models));
        }
        let home = self.home.as_ref().unwrap();
        self.clients = (0..CLIENTS).map(|client| home.connect(client, runtime())).collect();
    }
}

/// Returns the models that are possible after the end of the process that holds data in memory.
fn crash_all(models: Vec<Vec<Model>>) -> Vec<Vec<Model>> {
    let distinct = |mut candidates: Vec<Model>| {
        candidates.iter_mut().for_each(Model::crash);
        let is_first = |(at, model): &(usize, &Model)| !candidates[..*at].contains(*model);
        candidates.iter().enumerate().filter(is_first).map(|(_, model)| model.clone()).collect()
    };
    models.into_iter().map(distinct).collect()
}

/// Begins a contribution in the model.
///
/// A store that has no disk refuses durable puts before all else.
fn begin(
    model: &mut Model,
    kind: HomeKind,
    request: &PutRequest,
    id: Id,
) -> Result<Id, ModelError> {
    if request.durable && matches!(kind, HomeKind::Daemon | HomeKind::Memory) {
        return Err(ModelError::Invalid);
    }
    model.begin(request, id)
}

/// Commits a contribution in the model. Returns the result of the put, and the version.
fn commit(
    model: &mut Model,
    id: Id,
    request: &PutRequest,
    part: &Contribution,
) -> Result<(PutResult, Option<Id>), ModelError> {
    let Progress { visible, missing } = model.commit(id, request, part)?;
    let (epoch, number) = model.versions[&id].position;
    Ok(((number, epoch, visible, missing), Some(id)))
}

fn is_busy(expected: &[(Outcome, Option<Id>)]) -> bool {
    let busy = model_outcome(Err::<(), _>(ModelError::Busy));
    expected.iter().any(|(expected, _)| *expected == busy)
}
