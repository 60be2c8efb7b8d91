//! Scenario "leases": versions of a daemon are replaced and deleted while readers hold leases.
//!
//! Some readers are lost.

#![expect(
    clippy::unwrap_used,
    reason = "these are tests, in a library because two packages share it"
)]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use crate::control::layout::{archives, folder};
use crate::control::{Catalog, Proposal};
use crate::daemon::remote_blobs::RemoteBlobIndex;
use crate::daemon::state::{DaemonState, LocatedVersion};
use crate::daemon::tiered::{BlobLocation, TieredVolume};
use crate::engine::local::LocalController;
use crate::error::{Error, ErrorKind, Result};
use crate::io::sync::spawn;
use crate::key::Key;
use crate::ledger::{Durability, LeaseId, Selection, Selector, WriterSet, pending};
use crate::metadata::OwnedLedgers;
use crate::net::tls::Identity;
use crate::shm::{PeerId, Pool};
use crate::testing::schedules::{
    Bug, Observer, TestEnvironment, archive, digest_of, one_in, value_of, yield_randomly,
};

/// Memory limit of the pool in bytes. It is never reached: the scenario "pool" tests that.
const LIMIT: u64 = 64 << 20;

/// State that the tasks share.
struct Fixture {
    daemon: DaemonState,
    controller: LocalController,
    world: Arc<TestEnvironment>,
    observer: Observer<Observed>,
    bug: Option<Bug>,
}

/// Results that the tasks have observed.
#[derive(Default)]
struct Observed {
    /// Value of each version that was read, by version number.
    values: BTreeMap<u64, u64>,
}

fn key() -> Key {
    Key::new("policy").unwrap()
}

pub(crate) fn run(bug: Option<Bug>) {
    shuttle::future::block_on(async move {
        let pool = Arc::new(Pool::new(LIMIT));
        let tiers =
            TieredVolume::new(pool, None, RemoteBlobIndex::new(Identity::default(), None), false);
        let world = Arc::new(TestEnvironment::default());
        let ledgers = Arc::new(OwnedLedgers::default());
        let controller = LocalController::new(ledgers, Arc::new(tiers.clone()), world.clone());
        let daemon = DaemonState::new(Arc::new(controller.clone()), tiers);
        let fixture =
            Arc::new(Fixture { daemon, controller, world, observer: Observer::default(), bug });
        fixture.put(0).await;
        let mut tasks = vec![spawn(put(fixture.clone())), spawn(get(fixture.clone(), 2))];
        if one_in(2) {
            tasks.push(spawn(get(fixture.clone(), 3)));
        }
        if one_in(2) {
            tasks.push(spawn(delete(fixture.clone())));
        }
        for task in tasks {
            task.await.unwrap();
        }
        fixture.check_final_state().await;
        fixture.observer.assert_no_violation();
    });
}

async fn put(fixture: Arc<Fixture>) {
    for value in 1..4 {
        fixture.put(value).await;
        yield_randomly().await;
    }
}

/// Reads the newest version twice on the same host, and then ends its process.
async fn get(fixture: Arc<Fixture>, peer: PeerId) {
    fixture.daemon.add_peer(peer, 0, None, "a reader".into());
    for _ in 0..2 {
        let leased = match fixture.lease(peer).await {
            Ok(leased) => leased,
            Err(error) => {
                let is_missing = error.kind() == ErrorKind::NotFound;
                fixture.observer.check(is_missing, || format!("reader {peer}: {error}"));
                continue;
            }
        };
        let (lease, number, name) = leased;
        let Some(archive) = fixture.daemon.pool.open(&name).unwrap() else {
            fixture.observer.check(false, || format!("version {number} is leased and not there"));
            continue;
        };
        let bytes = archive.blob.bytes().unwrap();
        let value = value_of(bytes);
        fixture.check_value(number, value);
        yield_randomly().await;
        // The lease expires, which ends the right to new reads. The mapped bytes stay unchanged.
        if one_in(6) {
            fixture.world.advance(Duration::from_mins(11));
        }
        let is_lost = one_in(5);
        if is_lost {
            let is_reported = fixture.bug != Some(Bug::UnreportedReaderLoss);
            fixture.daemon.remove_peer(peer, is_reported).await;
        } else if let Some(lease) = lease.filter(|_| fixture.bug == Some(Bug::EarlyLeaseRelease)) {
            fixture.daemon.release(peer, lease).await;
        }
        yield_randomly().await;
        let is_same = value == value_of(bytes);
        fixture.observer.check(is_same, || format!("version {number} changes under its reader"));
        drop(archive);
        if is_lost {
            break;
        }
        if let Some(lease) = lease {
            fixture.daemon.release(peer, lease).await;
        }
    }
    fixture.daemon.remove_peer(peer, true).await;
    fixture.daemon.pool.record_exit(peer);
}

async fn delete(fixture: Arc<Fixture>) {
    yield_randomly().await;
    fixture.controller.delete(&key(), Selection::All).await.unwrap();
}

impl Fixture {
    /// Puts a version like a session of the daemon.
    async fn put(&self, value: u64) {
        let bytes = archive(0, value);
        let len = u64::try_from(bytes.len()).unwrap();
        let proposal = Proposal {
            writer: 0,
            writers: WriterSet::one(0),
            writers_defaulted: false,
            job: None,
            sequence: None,
            number: None,
            rewind: false,
            keeps_earlier_runs: false,
            process: None,
            durability: Durability::Memory,
            file_len: len,
            device: None,
            timeout: Duration::from_hours(1),
        };
        let (control_plane, pool) = (&self.daemon.control_plane, &self.daemon.pool);
        let put = async {
            let (place, _) = control_plane.open(&key(), &proposal, &|| true).await?;
            let path = place.path(0);
            // Small blobs go into a slab, large ones into their own segment. Segments are slow to create, so they are
            // rare unless they help to find a planted bug.
            let is_small = !one_in(if self.bug.is_some() { 2 } else { 5 });
            if is_small {
                pool.write(&path, bytes).unwrap().unwrap();
            } else {
                let mut writing = pool.begin_blob(len).unwrap().unwrap();
                yield_randomly().await;
                writing.bytes_mut().copy_from_slice(bytes);
                writing.publish(&path).unwrap();
            }
            match control_plane.commit(&place, digest_of(0, value), &[len]).await {
                Ok(progress) => Ok(progress),
                Err(error) => {
                    control_plane.withdraw(&place, 1).await;
                    Err(error)
                }
            }
        };
        match put.await {
            Ok(progress) => {
                self.observer.check(progress.visible, || format!("{value} is not visible"));
            }
            // The open version was deleted, or expired because the clock jumped.
            Err(error) => {
                let is_expected = matches!(error.kind(), ErrorKind::Overtaken | ErrorKind::Refused);
                self.observer.check(is_expected, || format!("a put of {value}: {error}"));
            }
        }
    }

    /// Leases the newest version. Returns the lease, the version number and the name of the archive.
    async fn lease(&self, peer: PeerId) -> Result<(Option<LeaseId>, u64, String)> {
        if self.bug == Some(Bug::NoLease) {
            let state = self.controller.state(&key()).await?;
            let head = state.select(&Selector::Newest);
            let head = head.map_err(|refusal| Error::from_refusal(key(), refusal))?;
            let name = archives(head).remove(0);
            return Ok((None, head.number, format!("{}/{name}", folder(&key(), head))));
        }
        let LocatedVersion { grant, archives, .. } =
            self.daemon.lease(peer, &key(), Selector::Newest).await?;
        let is_local = archives.values().all(|place| matches!(place, BlobLocation::Local(_)));
        self.observer.check(is_local, || format!("version {} is elsewhere", grant.number));
        let name = grant.archives.into_values().next().unwrap();
        Ok((Some(grant.lease), grant.number, name))
    }

    /// Checks that a version always has the same value.
    fn check_value(&self, number: u64, value: Option<(u32, u64)>) {
        let Some((0, value)) = value else {
            self.observer.check(false, || format!("version {number} is {value:?}"));
            return;
        };
        let known = *self.observer.observed().values.entry(number).or_insert(value);
        self.observer.check(known == value, || format!("{number} is {known} and {value}"));
    }

    /// Checks the final state: no leases, and after a deletion of all versions no data.
    async fn check_final_state(&self) {
        let leases = self.daemon.status().leases;
        self.observer.check(leases.is_empty(), || format!("{leases:?} are held"));
        self.controller.delete(&key(), Selection::All).await.unwrap();
        let state = self.controller.state(&key()).await.unwrap();
        let (effects, count) = (pending(&state), state.versions().count());
        self.observer.check(effects.is_empty() && count == 0, || format!("{count}, {effects:?}"));
        let (memory, names) = (self.daemon.pool.status(), self.daemon.pool.names(""));
        self.observer.check(names.is_empty(), || format!("{names:?} are left"));
        self.observer.check(memory.used_bytes == memory.free_bytes, || {
            format!("memory is left: {memory:?}")
        });
    }
}
