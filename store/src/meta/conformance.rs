//! What every meta store does, whatever it keeps its records in: the same tests for all.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use super::{DirectoryMeta, MemoryMeta, MetaStore};
use crate::disk::Disk;
use crate::error::Result;
use crate::key::Key;
use crate::ledger::State;
use crate::ledgers::{Ledgers, SharedLedgers, save};

/// A meta store as two processes have it, and what is to be kept until the end.
type Pair = ([Arc<dyn MetaStore>; 2], Option<tempfile::TempDir>);

/// Each kind, by name.
fn kinds() -> Vec<(&'static str, Pair)> {
    let memory: Arc<dyn MetaStore> = Arc::new(MemoryMeta::default());
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().canonicalize().unwrap();
    let directory = || Arc::new(DirectoryMeta::new(Disk::at(root.clone()))) as Arc<dyn MetaStore>;
    let directories = [directory(), directory()];
    vec![
        ("memory", ([memory.clone(), memory], None)),
        ("directory", (directories, Some(folder))),
        #[cfg(feature = "object")]
        ("object", (objects(), None)),
    ]
}

#[cfg(feature = "object")]
fn objects() -> [Arc<dyn MetaStore>; 2] {
    let objects = Arc::new(object_store::memory::InMemory::new());
    let object = || {
        let root = object_store::path::Path::parse("some/prefix").unwrap();
        let bucket = crate::bucket::Bucket::new(objects.clone(), root, "s3://test/some/prefix");
        Arc::new(super::ObjectMeta::new(bucket.unwrap())) as Arc<dyn MetaStore>
    };
    [object(), object()]
}

#[tokio::test(flavor = "multi_thread")]
async fn records_are_created_once_and_never_change() {
    for (kind, ([one, other], _keep)) in kinds() {
        let name = "policy%2Factor/.ledger/00000000000000000001.json";
        assert_eq!(one.get(name).await.unwrap(), None, "{kind}");
        assert_eq!(one.list("policy%2Factor/.ledger").await.unwrap(), [""; 0], "{kind}");
        one.delete(name).await.unwrap();
        for record in [b"".to_vec(), vec![0, 255, b'\n'], vec![7; 70_000]] {
            let len = record.len();
            let name = format!("{name}{len}");
            assert!(one.create(&name, record.clone()).await.unwrap(), "{kind} {len}");
            one.settle("policy%2Factor/.ledger").await.unwrap();
            for meta in [&one, &other] {
                assert_eq!(meta.get(&name).await.unwrap().as_ref(), Some(&record), "{kind} {len}");
                // Not even the same once more.
                assert!(!meta.create(&name, record.clone()).await.unwrap(), "{kind} {len}");
                assert!(!meta.create(&name, b"other".to_vec()).await.unwrap(), "{kind} {len}");
            }
            assert_eq!(one.get(&name).await.unwrap(), Some(record), "{kind} {len}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_listing_has_what_is_directly_below() {
    for (kind, ([one, other], _keep)) in kinds() {
        for name in ["a/x", "a/y/z", "a/y/w", "a%/x", "b", "ab/x"] {
            assert!(one.create(name, name.into()).await.unwrap(), "{kind}");
        }
        assert_eq!(other.list("").await.unwrap(), ["a", "a%", "ab", "b"], "{kind}");
        assert_eq!(other.list("a").await.unwrap(), ["x", "y"], "{kind}");
        assert_eq!(other.list("a/y").await.unwrap(), ["w", "z"], "{kind}");
        other.delete("a/y/w").await.unwrap();
        assert_eq!(one.get("a/y/w").await.unwrap(), None, "{kind}");
        assert_eq!(one.list("a/y").await.unwrap(), ["z"], "{kind}");
        assert_eq!(one.get("a/y/z").await.unwrap(), Some(b"a/y/z".to_vec()), "{kind}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn of_many_that_create_one_name_one_succeeds() {
    for (kind, ([one, other], _keep)) in kinds() {
        for round in 0..20 {
            let create = |number: u8| {
                let meta = if number.is_multiple_of(2) { one.clone() } else { other.clone() };
                let name = format!("race/{round}");
                tokio::spawn(async move { (number, meta.create(&name, vec![number; 99]).await) })
            };
            let mut winners = Vec::new();
            for creating in (0..8).map(create).collect::<Vec<_>>() {
                let (number, created) = creating.await.unwrap();
                winners.extend(created.unwrap().then_some(number));
            }
            let [winner] = *winners else { panic!("{kind}: {winners:?}") };
            let found = one.get(&format!("race/{round}")).await.unwrap();
            assert_eq!(found, Some(vec![winner; 99]), "{kind}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn who_holds_a_name_keeps_others_away_or_nobody_relies_on_it() {
    for (kind, ([one, other], _keep)) in kinds() {
        let held = one.lock("policy/.lock").await.unwrap();
        let short = Duration::from_millis(50);
        let second = tokio::time::timeout(short, other.lock("policy/.lock")).await;
        assert_eq!(second.is_err(), one.grace().is_none(), "{kind}");
        drop((held, second));
        other.lock("policy/.lock").await.unwrap();
        let session = one.lock(".sessions/1").await.unwrap();
        assert!(!other.has_ended(".sessions/1").await.unwrap(), "{kind}");
        drop(session);
        // Who cannot tell takes nobody for dead.
        let can_tell = one.grace().is_none();
        assert_eq!(other.has_ended(".sessions/1").await.unwrap(), can_tell, "{kind}");
    }
}

/// The same ledger over each: no step is lost, and none is made twice.
#[tokio::test(flavor = "multi_thread")]
async fn steps_of_two_processes_follow_each_other() {
    const STEPS: u32 = 40;
    let key = Key::new("policy").unwrap();
    let kept = |state: &State| (1..=2 * STEPS + 1).find(|keep| *state == keeping(*keep));
    for (kind, (metas, _keep)) in kinds() {
        let count = |meta: Arc<dyn MetaStore>| {
            let (ledgers, key) = (SharedLedgers::new(meta), key.clone());
            tokio::spawn(async move {
                let mut made = BTreeSet::new();
                while made.len() < STEPS as usize {
                    let turn = ledgers.turn(&key).await?;
                    let next = kept(turn.state()).unwrap_or(0) + 1;
                    if save(turn, keeping(next)).await? {
                        made.insert(next);
                    }
                }
                Ok(made)
            })
        };
        let [one, other]: [tokio::task::JoinHandle<Result<BTreeSet<u32>>>; 2] = metas.map(count);
        let (one, other) = (one.await.unwrap().unwrap(), other.await.unwrap().unwrap());
        assert!(one.is_disjoint(&other), "{kind}");
        // The first state is that of a key that was never written, which keeps one version.
        assert_eq!(one.union(&other).max(), Some(&(2 * STEPS + 1)), "{kind}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn who_waits_sees_what_another_process_does() {
    let key = Key::new("policy").unwrap();
    for (kind, ([one, other], _keep)) in kinds() {
        let (one, other) = (SharedLedgers::new(one), SharedLedgers::new(other));
        let seen = one.state(&key).await.unwrap();
        let (waiting, waited) = (one.clone(), key.clone());
        let changed = tokio::spawn(async move {
            waiting.changed(&waited, &seen, Duration::from_mins(1)).await;
        });
        assert!(save(other.turn(&key).await.unwrap(), keeping(5)).await.unwrap(), "{kind}");
        tokio::time::timeout(Duration::from_secs(20), changed).await.unwrap().unwrap();
        assert_eq!(*one.state(&key).await.unwrap(), keeping(5), "{kind}");
        // Patience ends.
        let seen = one.state(&key).await.unwrap();
        let brief = one.changed(&key, &seen, Duration::from_millis(30));
        tokio::time::timeout(Duration::from_secs(20), brief).await.unwrap();
    }
}

fn keeping(keep: u32) -> State {
    State::keeping(std::num::NonZeroU32::new(keep).unwrap())
}
