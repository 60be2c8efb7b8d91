//! Clocks that jump: ten years forward and back, to zero, far into the future.
//!
//! Clocks that stop, and that step.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tssd_format::StateDict;

use crate::blob::Volume;
use crate::blob::backend::{DirectoryVolume, MemoryVolume};
use crate::control::{Catalog, Proposal};
use crate::engine::local::LocalController;
use crate::io::disk::Disk;
use crate::io::environment::{Environment, SystemEnvironment};
use crate::key::Key;
use crate::ledger::{Command, Durability, LeaseId, Selector, Timestamp};
use crate::metadata::backend::DirectoryMeta;
use crate::metadata::{Ledgers, OwnedLedgers, SharedLedgers};
use crate::testing::crash::SeededRng;
use crate::{GetOptions, PutOptions, Store};

/// A day of November 2026, in milliseconds since the Unix epoch.
const TODAY: u64 = 1_795_000_000_000;

const TEN_YEARS: u64 = 10 * 365 * 24 * 3600 * 1000;

/// A time far beyond any calendar date, in milliseconds.
const FAR_FUTURE: u64 = u64::MAX / 2;

/// How long an open version is kept, in milliseconds.
const OPEN_MILLIS: u64 = 10 * 60 * 1000;

/// A clock that the test sets.
#[derive(Clone)]
struct Clock(Arc<AtomicU64>);

impl Clock {
    fn set(&self, now: u64) {
        self.0.store(now, Ordering::SeqCst);
    }
}

impl Environment for Clock {
    fn now(&self) -> Timestamp {
        Timestamp(self.0.load(Ordering::SeqCst))
    }

    fn random_id(&self) -> u128 {
        SystemEnvironment.random_id()
    }
}

fn put_options(number: u64) -> PutOptions {
    PutOptions { version: Some(number), ..PutOptions::default() }
}

fn proposal(number: u64) -> Proposal {
    Proposal::single_writer(number, Durability::Disk)
}

/// Returns a controller over a directory, and one that owns its ledgers, as in a daemon.
fn controllers(folder: &std::path::Path) -> [(LocalController, Clock); 2] {
    let clock = || Clock(Arc::new(AtomicU64::new(TODAY)));
    let disk = Disk::at(folder.canonicalize().unwrap());
    let shared = SharedLedgers::new(Arc::new(DirectoryMeta::new(disk.clone())));
    let all: [(Arc<dyn Ledgers>, Arc<dyn Volume>); 2] = [
        (Arc::new(shared), Arc::new(DirectoryVolume::new(disk))),
        (Arc::new(OwnedLedgers::default()), Arc::new(MemoryVolume::default())),
    ];
    all.map(|(ledgers, volume)| {
        let clock = clock();
        (LocalController::new(ledgers, volume, Arc::new(clock.clone())), clock)
    })
}

#[tokio::test]
async fn clock_jumps_delete_no_retained_version() {
    let (mut dice, folder) = (SeededRng::new(0xC10C), tempfile::tempdir().unwrap());
    for (controller, clock) in controllers(folder.path()) {
        let (store, key) = (Store::new(controller.clone()), Key::new("policy").unwrap());
        store.retain(&key, NonZeroU32::new(3).unwrap()).await.unwrap();
        let (mut now, mut kept) = (TODAY, Vec::new());
        for number in 1..=120 {
            now = match dice.below(8) {
                0 => now.saturating_add(TEN_YEARS),
                1 => now.saturating_sub(TEN_YEARS),
                2 => 0,
                3 => FAR_FUTURE,
                4 => TODAY,
                5 => now.saturating_sub(1),
                6 => now.saturating_add(OPEN_MILLIS),
                _ => now,
            };
            clock.set(now);
            let mut dict = StateDict::new();
            dict.insert("number", i64::try_from(number).unwrap());
            assert!(store.put_state_dict(&key, &dict, &put_options(number)).await.unwrap().visible);
            kept.push(number);
            kept.drain(..kept.len().saturating_sub(3));
            // The retained versions are complete, independent of the clock.
            let versions = store.versions(&key).await.unwrap();
            assert_eq!(
                versions.iter().map(|info| info.number).collect::<Vec<_>>(),
                kept,
                "at {now}"
            );
            for number in &kept {
                let options = GetOptions { version: (*number).into(), ..GetOptions::default() };
                let (dict, _) = store.get_state_dict(&key, &options).await.unwrap();
                let expected = tssd_format::Value::from(i64::try_from(*number).unwrap());
                assert_eq!(dict.leaf("number").unwrap(), &expected);
            }
        }
    }
}

#[tokio::test]
async fn leased_version_survives_clock_jumps() {
    let folder = tempfile::tempdir().unwrap();
    for (controller, clock) in controllers(folder.path()) {
        let (store, key) = (Store::new(controller.clone()), Key::new("policy").unwrap());
        let put = async |number| {
            store.put_state_dict(&key, &StateDict::new(), &put_options(number)).await.unwrap()
        };
        put(1).await;
        let (lease, ttl) = (LeaseId(7), Duration::from_secs(1));
        let (selector, holder) = (Selector::Newest, "reader".to_owned());
        let now = controller.now();
        controller.apply(&key, Command::Lease { selector, lease, holder, ttl, now }).await.unwrap();
        let held =
            async || controller.state(&key).await.unwrap().versions().any(|it| it.number == 1);
        for (now, number) in [(TODAY + TEN_YEARS, 2), (FAR_FUTURE, 3), (0, 4), (TODAY, 5)] {
            clock.set(now);
            put(number).await;
            controller.run_pending_deletions(&key).await.unwrap();
            assert!(held().await, "at {now}");
        }
        controller.apply(&key, Command::Release { lease }).await.unwrap();
        controller.run_pending_deletions(&key).await.unwrap();
        assert!(!held().await);
    }
}

#[tokio::test]
async fn only_ages_depend_on_the_clock() {
    let folder = tempfile::tempdir().unwrap();
    for (controller, clock) in controllers(folder.path()) {
        let (store, key) = (Store::new(controller.clone()), Key::new("policy").unwrap());
        let numbers = async || {
            let versions = store.versions(&key).await.unwrap();
            versions.iter().map(|info| info.number).collect::<Vec<_>>()
        };
        store.put_state_dict(&key, &StateDict::new(), &put_options(1)).await.unwrap();
        assert_eq!(store.versions(&key).await.unwrap()[0].since, Timestamp(TODAY));
        // An open version that is neither committed nor withdrawn.
        let (open, _) = controller.open(&key, &proposal(2), || true).await.unwrap();
        let is_open = async || {
            controller.apply(&key, Command::Expire { now: controller.now() }).await.unwrap();
            controller.state(&key).await.unwrap().open().any(|it| it.id == open.id)
        };
        for (now, is_kept) in [
            (TODAY - TEN_YEARS, true),
            (0, true),
            (TODAY + OPEN_MILLIS - 1, true),
            (TODAY + OPEN_MILLIS, false),
            (0, false),
        ] {
            clock.set(now);
            assert_eq!(is_open().await, is_kept, "at {now}");
        }
        // Versions with a time to live expire at its end. A clock that is set back extends their life.
        clock.set(TODAY);
        controller
            .retain(&key, NonZeroU32::new(9).unwrap(), Some(Duration::from_millis(OPEN_MILLIS)))
            .await
            .unwrap();
        for (now, is_kept) in
            [(0, true), (TODAY + OPEN_MILLIS - 1, true), (TODAY + OPEN_MILLIS, false), (0, false)]
        {
            clock.set(now);
            controller.apply(&key, Command::Expire { now: controller.now() }).await.unwrap();
            assert_eq!(numbers().await, if is_kept { vec![1] } else { vec![] }, "at {now}");
        }
        assert!(
            store.put_state_dict(&key, &StateDict::new(), &put_options(3)).await.unwrap().visible
        );
    }
}
