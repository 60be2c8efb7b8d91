//! Clocks that jump: ten years forward and back, to the beginning of time and far beyond; that stand still, and step.

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
use crate::testing::crash::Dice;
use crate::{GetOptions, PutOptions, Store};

/// A day of November 2026, in milliseconds.
const TODAY: u64 = 1_795_000_000_000;

const TEN_YEARS: u64 = 10 * 365 * 24 * 3600 * 1000;

/// A moment of no calendar.
const FAR: u64 = u64::MAX / 2;

/// How long an open version is kept, in milliseconds.
const OPEN: u64 = 10 * 60 * 1000;

/// A clock that shows what it is told to.
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

    fn random(&self) -> u128 {
        SystemEnvironment.random()
    }
}

fn at(number: u64) -> PutOptions {
    PutOptions { version: Some(number), ..PutOptions::default() }
}

fn proposal(number: u64) -> Proposal {
    Proposal::alone(number, Durability::Disk)
}

/// Embedded in a directory, and as a daemon has it.
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
async fn a_clock_that_jumps_takes_no_version_along() {
    let (mut dice, folder) = (Dice::new(0xC10C), tempfile::tempdir().unwrap());
    for (controller, clock) in controllers(folder.path()) {
        let (store, key) = (Store::new(controller.clone()), Key::new("policy").unwrap());
        store.retain(&key, NonZeroU32::new(3).unwrap()).await.unwrap();
        let (mut now, mut kept) = (TODAY, Vec::new());
        for number in 1..=120 {
            now = match dice.roll(8) {
                0 => now.saturating_add(TEN_YEARS),
                1 => now.saturating_sub(TEN_YEARS),
                2 => 0,
                3 => FAR,
                4 => TODAY,
                5 => now.saturating_sub(1),
                6 => now.saturating_add(OPEN),
                _ => now,
            };
            clock.set(now);
            let mut dict = StateDict::new();
            dict.insert("number", i64::try_from(number).unwrap());
            assert!(store.put_state_dict(&key, &dict, &at(number)).await.unwrap().visible);
            kept.push(number);
            kept.drain(..kept.len().saturating_sub(3));
            // As many as are kept are there, and whole, whatever the clock says.
            let versions = store.versions(&key).await.unwrap();
            assert_eq!(
                versions.iter().map(|info| info.number).collect::<Vec<_>>(),
                kept,
                "at {now}"
            );
            for number in &kept {
                let options = GetOptions { version: Some(*number), ..GetOptions::default() };
                let (dict, _) = store.get_state_dict(&key, &options).await.unwrap();
                let expected = tssd_format::Value::from(i64::try_from(*number).unwrap());
                assert_eq!(dict.leaf("number").unwrap(), &expected);
            }
        }
    }
}

#[tokio::test]
async fn what_is_leased_stays_whatever_the_clock_says() {
    let folder = tempfile::tempdir().unwrap();
    for (controller, clock) in controllers(folder.path()) {
        let (store, key) = (Store::new(controller.clone()), Key::new("policy").unwrap());
        let put = async |number| {
            store.put_state_dict(&key, &StateDict::new(), &at(number)).await.unwrap()
        };
        put(1).await;
        let (lease, ttl) = (LeaseId(7), Duration::from_secs(1));
        let (selector, holder) = (Selector::Newest, "reader".to_owned());
        let now = controller.now();
        controller.apply(&key, Command::Lease { selector, lease, holder, ttl, now }).await.unwrap();
        let held =
            async || controller.state(&key).await.unwrap().versions().any(|it| it.number == 1);
        for (now, number) in [(TODAY + TEN_YEARS, 2), (FAR, 3), (0, 4), (TODAY, 5)] {
            clock.set(now);
            put(number).await;
            controller.reclaim_owed(&key).await.unwrap();
            assert!(held().await, "at {now}");
        }
        controller.apply(&key, Command::Release { lease }).await.unwrap();
        controller.reclaim_owed(&key).await.unwrap();
        assert!(!held().await);
    }
}

#[tokio::test]
async fn ages_go_by_the_clock_and_nothing_else_does() {
    let folder = tempfile::tempdir().unwrap();
    for (controller, clock) in controllers(folder.path()) {
        let (store, key) = (Store::new(controller.clone()), Key::new("policy").unwrap());
        let numbers = async || {
            let versions = store.versions(&key).await.unwrap();
            versions.iter().map(|info| info.number).collect::<Vec<_>>()
        };
        store.put_state_dict(&key, &StateDict::new(), &at(1)).await.unwrap();
        assert_eq!(store.versions(&key).await.unwrap()[0].since, Timestamp(TODAY));
        // An open version, of which nobody has said that it ends.
        let (open, _) = controller.open(&key, &proposal(2), || true).await.unwrap();
        let is_open = async || {
            controller.apply(&key, Command::Expire { now: controller.now() }).await.unwrap();
            controller.state(&key).await.unwrap().open().any(|it| it.id == open.id)
        };
        for (now, is_kept) in [
            (TODAY - TEN_YEARS, true),
            (0, true),
            (TODAY + OPEN - 1, true),
            (TODAY + OPEN, false),
            (0, false),
        ] {
            clock.set(now);
            assert_eq!(is_open().await, is_kept, "at {now}");
        }
        // With a time to live, versions go when it is over; a clock that is behind lets them live.
        clock.set(TODAY);
        controller
            .retain(&key, NonZeroU32::new(9).unwrap(), Some(Duration::from_millis(OPEN)))
            .await
            .unwrap();
        for (now, is_kept) in
            [(0, true), (TODAY + OPEN - 1, true), (TODAY + OPEN, false), (0, false)]
        {
            clock.set(now);
            controller.apply(&key, Command::Expire { now: controller.now() }).await.unwrap();
            assert_eq!(numbers().await, if is_kept { vec![1] } else { vec![] }, "at {now}");
        }
        assert!(store.put_state_dict(&key, &StateDict::new(), &at(3)).await.unwrap().visible);
    }
}
