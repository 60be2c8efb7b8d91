//! Leases of a daemon: versions that come and go while readers hold them, and some of the readers are lost.

#![expect(
    clippy::unwrap_used,
    reason = "these are tests, in a library because two packages share it"
)]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use crate::control::layout::{archives, folder};
use crate::control::{Catalog, Proposal};
use crate::daemon::elsewhere::Elsewhere;
use crate::daemon::house::{House, Leased};
use crate::daemon::tiers::{Place, Tiers};
use crate::engine::local::LocalController;
use crate::error::{Error, ErrorKind, Result};
use crate::io::sync::spawn;
use crate::key::Key;
use crate::ledger::{Durability, LeaseId, Selection, Selector, WriterSet, pending};
use crate::metadata::OwnedLedgers;
use crate::net::tls::Identity;
use crate::shm::{PeerId, Pool};
use crate::testing::schedules::{
    Bug, Observer, World, archive, dawdle, digest_of, once_in, value_of,
};

/// Enough for all: the pool has its own subject.
const LIMIT: u64 = 64 << 20;

struct Stage {
    house: House,
    controller: LocalController,
    world: Arc<World>,
    observer: Observer<Seen>,
    bug: Option<Bug>,
}

#[derive(Default)]
struct Seen {
    /// The value of each version that is visible, or was.
    values: BTreeMap<u64, u64>,
}

fn key() -> Key {
    Key::new("policy").unwrap()
}

pub(crate) fn run(bug: Option<Bug>) {
    shuttle::future::block_on(async move {
        let pool = Arc::new(Pool::new(LIMIT));
        let tiers = Tiers::new(pool, None, Elsewhere::new(Identity::default()));
        let world = Arc::new(World::default());
        let ledgers = Arc::new(OwnedLedgers::default());
        let controller = LocalController::new(ledgers, Arc::new(tiers.clone()), world.clone());
        let house = House::new(Arc::new(controller.clone()), tiers);
        let stage =
            Arc::new(Stage { house, controller, world, observer: Observer::default(), bug });
        stage.put(0).await;
        let mut tasks = vec![spawn(put(stage.clone())), spawn(get(stage.clone(), 2))];
        if once_in(2) {
            tasks.push(spawn(get(stage.clone(), 3)));
        }
        if once_in(2) {
            tasks.push(spawn(delete(stage.clone())));
        }
        for task in tasks {
            task.await.unwrap();
        }
        stage.end().await;
        stage.observer.end();
    });
}

async fn put(stage: Arc<Stage>) {
    for value in 1..4 {
        stage.put(value).await;
        dawdle().await;
    }
}

/// A reader of the same host, until its process ends.
async fn get(stage: Arc<Stage>, peer: PeerId) {
    stage.house.join(peer, (0, None), "a reader".into());
    for _ in 0..2 {
        let leased = match stage.lease(peer).await {
            Ok(leased) => leased,
            Err(error) => {
                let is_missing = error.kind() == ErrorKind::NotFound;
                stage.observer.must(is_missing, || format!("reader {peer}: {error}"));
                continue;
            }
        };
        let (lease, number, name) = leased;
        let Some(near) = stage.house.pool.open(&name).unwrap() else {
            stage.observer.must(false, || format!("version {number} is leased and not there"));
            continue;
        };
        let bytes = near.blob.bytes().unwrap();
        let value = value_of(bytes);
        stage.learn(number, value);
        dawdle().await;
        // The right to new reads ends, not what is read.
        if once_in(6) {
            stage.world.pass(Duration::from_mins(11));
        }
        let is_lost = once_in(5);
        if is_lost {
            let is_said = stage.bug != Some(Bug::LosesSilently);
            stage.house.lose(peer, is_said).await;
        } else if let Some(lease) = lease.filter(|_| stage.bug == Some(Bug::ReleasesTooSoon)) {
            stage.house.release(peer, lease).await;
        }
        dawdle().await;
        let is_same = value == value_of(bytes);
        stage.observer.must(is_same, || format!("version {number} changes under its reader"));
        drop(near);
        if is_lost {
            break;
        }
        if let Some(lease) = lease {
            stage.house.release(peer, lease).await;
        }
    }
    stage.house.lose(peer, true).await;
    stage.house.pool.exited(peer);
}

async fn delete(stage: Arc<Stage>) {
    dawdle().await;
    stage.controller.delete(&key(), Selection::All).await.unwrap();
}

impl Stage {
    /// A put as sessions make it.
    async fn put(&self, value: u64) {
        let bytes = archive(0, value);
        let len = u64::try_from(bytes.len()).unwrap();
        let proposal = Proposal {
            writer: 0,
            writers: WriterSet::one(0),
            writers_defaulted: false,
            job: None,
            call: None,
            number: None,
            rewind: false,
            durability: Durability::Memory,
            file_len: len,
            device: None,
            timeout: Duration::from_hours(1),
        };
        let (registry, pool) = (&self.house.registry, &self.house.pool);
        let put = async {
            let (place, _) = registry.open(&key(), &proposal, &|| true).await?;
            let path = place.path(0);
            // What is as small goes into a slab. New segments take long to make, so there are few of them
            // where they find nothing.
            let is_small = !once_in(if self.bug.is_some() { 2 } else { 5 });
            if is_small {
                pool.write(&path, bytes).unwrap().unwrap();
            } else {
                let mut writing = pool.write_own(len).unwrap().unwrap();
                dawdle().await;
                writing.bytes_mut().copy_from_slice(bytes);
                writing.publish(&path).unwrap();
            }
            match registry.commit(&place, digest_of(0, value), &[len]).await {
                Ok(progress) => Ok(progress),
                Err(error) => {
                    registry.withdraw(&place, 1).await;
                    Err(error)
                }
            }
        };
        match put.await {
            Ok(progress) => {
                self.observer.must(progress.visible, || format!("{value} is not visible"));
            }
            // Deleted while it was open, or too old: the clock makes leaps.
            Err(error) => {
                let is_said = matches!(error.kind(), ErrorKind::Overtaken | ErrorKind::Refused);
                self.observer.must(is_said, || format!("a put of {value}: {error}"));
            }
        }
    }

    /// The newest version: a lease, its number, and the name of its archive.
    async fn lease(&self, peer: PeerId) -> Result<(Option<LeaseId>, u64, String)> {
        if self.bug == Some(Bug::LeasesNothing) {
            let state = self.controller.state(&key()).await?;
            let head = state.found(Selector::Newest);
            let head = head.map_err(|refusal| Error::refused(key(), refusal))?;
            let name = archives(head).remove(0);
            return Ok((None, head.number, format!("{}/{name}", folder(&key(), head))));
        }
        let Leased { grant, archives, .. } =
            self.house.lease(peer, &key(), Selector::Newest).await?;
        let is_here = archives.values().all(|place| matches!(place, Place::Here(_)));
        self.observer.must(is_here, || format!("version {} is elsewhere", grant.number));
        let name = grant.archives.into_values().next().unwrap();
        Ok((Some(grant.lease), grant.number, name))
    }

    /// A number has one value.
    fn learn(&self, number: u64, value: Option<(u32, u64)>) {
        let Some((0, value)) = value else {
            self.observer.must(false, || format!("version {number} is {value:?}"));
            return;
        };
        let known = *self.observer.seen().values.entry(number).or_insert(value);
        self.observer.must(known == value, || format!("{number} is {known} and {value}"));
    }

    /// Nobody reads any more: nothing is held, and nothing stays when it is deleted.
    async fn end(&self) {
        let held = self.house.status().leases;
        self.observer.must(held.is_empty(), || format!("{held:?} are held"));
        self.controller.delete(&key(), Selection::All).await.unwrap();
        let state = self.controller.state(&key()).await.unwrap();
        let (owed, count) = (pending(&state), state.versions().count());
        self.observer.must(owed.is_empty() && count == 0, || format!("{count}, {owed:?}"));
        let (memory, names) = (self.house.pool.status(), self.house.pool.names(""));
        self.observer.must(names.is_empty(), || format!("{names:?} are left"));
        self.observer.must(memory.used == memory.warm, || format!("memory is left: {memory:?}"));
    }
}
