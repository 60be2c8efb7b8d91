//! Conformance tests: every metadata backend passes the same tests.

use std::any::Any;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use crate::error::Result;
use crate::io::disk::Disk;
use crate::key::Key;
use crate::ledger::State;
use crate::metadata::backend::{DirectoryMeta, MemoryMeta, MetaStore};
use crate::metadata::{Ledgers, SharedLedgers, save};
use crate::testing::faulty_metadata::FaultyMetaStore;

/// A metadata backend, opened twice, as by two processes.
struct Backend {
    name: &'static str,
    metas: [Arc<dyn MetaStore>; 2],
    /// Whether the backend detects that a process has ended.
    detects_exit: bool,
    /// Resources that must live until the end of the test.
    _resources: Option<Box<dyn Any>>,
}

#[cfg_attr(not(feature = "etcd"), expect(clippy::unused_async, reason = "it is with etcd"))]
async fn backends() -> Vec<Backend> {
    vec![
        memory(),
        directory(),
        #[cfg(feature = "etcd")]
        etcd().await,
        #[cfg(feature = "object")]
        object(),
    ]
}

fn memory() -> Backend {
    let memory: Arc<dyn MetaStore> = Arc::new(MemoryMeta::default());
    let metas = [memory.clone(), memory];
    Backend { name: "memory", metas, detects_exit: true, _resources: None }
}

fn directory() -> Backend {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().canonicalize().unwrap();
    let directory = || Arc::new(DirectoryMeta::new(Disk::at(root.clone()))) as Arc<dyn MetaStore>;
    let (metas, keep) = ([directory(), directory()], Box::new(folder));
    Backend { name: "directory", metas, detects_exit: true, _resources: Some(keep) }
}

#[cfg(feature = "etcd")]
async fn etcd() -> Backend {
    let etcd = crate::testing::etcd_server::Etcd::start(1);
    let url = format!("{}/some/prefix", etcd.url());
    let connect =
        async || Arc::new(crate::metadata::backend::EtcdMeta::connect(&url).await.unwrap());
    let metas: [Arc<dyn MetaStore>; 2] = [connect().await, connect().await];
    Backend { name: "etcd", metas, detects_exit: true, _resources: Some(Box::new(etcd)) }
}

#[cfg(feature = "object")]
fn object() -> Backend {
    let objects = Arc::new(crate::testing::faulty_bucket::FaultyBucket::default());
    let object = || {
        let root = object_store::path::Path::parse("some/prefix").unwrap();
        let bucket = crate::io::bucket::Bucket::new(objects.clone(), root, "s3://test/some/prefix");
        Arc::new(crate::metadata::backend::ObjectMeta::new(bucket.unwrap())) as Arc<dyn MetaStore>
    };
    let metas = [object(), object()];
    Backend { name: "object", metas, detects_exit: false, _resources: None }
}

#[tokio::test(flavor = "multi_thread")]
async fn records_are_created_once_and_immutable() {
    for Backend { name: kind, metas: [one, other], _resources, .. } in backends().await {
        let name = "policy%2Factor/.ledger/00000000000000000001.json";
        assert_eq!(one.get(name).await.unwrap(), None, "{kind}");
        assert_eq!(one.list("policy%2Factor/.ledger").await.unwrap(), [""; 0], "{kind}");
        one.delete(name).await.unwrap();
        for record in [b"".to_vec(), vec![0, 255, b'\n'], vec![7; 70_000]] {
            let len = record.len();
            let name = format!("{name}{len}");
            assert!(one.create(&name, record.clone()).await.unwrap(), "{kind} {len}");
            one.sync("policy%2Factor/.ledger").await.unwrap();
            for meta in [&one, &other] {
                assert_eq!(meta.get(&name).await.unwrap().as_ref(), Some(&record), "{kind} {len}");
                // A second record is refused even if it is equal.
                assert!(!meta.create(&name, record.clone()).await.unwrap(), "{kind} {len}");
                assert!(!meta.create(&name, b"other".to_vec()).await.unwrap(), "{kind} {len}");
            }
            assert_eq!(one.get(&name).await.unwrap(), Some(record), "{kind} {len}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn list_returns_direct_children() {
    for Backend { name: kind, metas: [one, other], _resources, .. } in backends().await {
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
async fn one_of_concurrent_creates_succeeds() {
    for Backend { name: kind, metas: [one, other], _resources, .. } in backends().await {
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
async fn locks_and_sessions_exclude_other_processes_if_supported() {
    for Backend { name: kind, metas: [one, other], detects_exit, _resources } in backends().await {
        let held = one.lock("policy/.lock").await.unwrap();
        let short = Duration::from_millis(50);
        let second = tokio::time::timeout(short, other.lock("policy/.lock")).await;
        assert_eq!(second.is_err(), one.excludes_other_processes(), "{kind}");
        drop((held, second));
        other.lock("policy/.lock").await.unwrap();
        let session = one.hold_session(".sessions/1", b"who".to_vec()).await.unwrap();
        assert!(!other.has_ended(".sessions/1").await.unwrap(), "{kind}");
        drop(session);
        // A backend that cannot detect the exit of a process reports every session as alive.
        let mut has_ended = other.has_ended(".sessions/1").await.unwrap();
        for _ in 0..200 {
            if has_ended || !detects_exit {
                break;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
            has_ended = other.has_ended(".sessions/1").await.unwrap();
        }
        assert_eq!(has_ended, detects_exit, "{kind}");
    }
}

/// Two processes advance one ledger: no step is lost, and none is made twice.
#[tokio::test(flavor = "multi_thread")]
async fn steps_of_two_processes_are_serialized() {
    const STEPS: u32 = 40;
    let key = Key::new("policy").unwrap();
    let kept = |state: &State| (1..=2 * STEPS + 1).find(|keep| *state == state_with_keep(*keep));
    for Backend { name: kind, metas, _resources, .. } in backends().await {
        let count = |meta: Arc<dyn MetaStore>| {
            let (ledgers, key) = (SharedLedgers::new(meta), key.clone());
            tokio::spawn(async move {
                let mut made = BTreeSet::new();
                while made.len() < STEPS as usize {
                    let guard = ledgers.lock(&key).await?;
                    let next = kept(guard.state()).unwrap_or(0) + 1;
                    if save(guard, state_with_keep(next)).await? {
                        made.insert(next);
                    }
                }
                Ok(made)
            })
        };
        let [one, other]: [tokio::task::JoinHandle<Result<BTreeSet<u32>>>; 2] = metas.map(count);
        let (one, other) = (one.await.unwrap().unwrap(), other.await.unwrap().unwrap());
        assert!(one.is_disjoint(&other), "{kind}");
        // The initial state has `keep` = 1.
        assert_eq!(one.union(&other).max(), Some(&(2 * STEPS + 1)), "{kind}");
    }
}

/// Requests fail at random: acknowledged steps are made, and failed ones are made once or not at all.
#[tokio::test(flavor = "multi_thread")]
async fn steps_are_serialized_despite_faults() {
    const STEPS: usize = 40;
    let key = Key::new("policy").unwrap();
    let kept = |state: &State| (1..10_000).find(|keep| *state == state_with_keep(*keep)).unwrap();
    for Backend { name: kind, metas, _resources, .. } in backends().await {
        let faulty = metas.map(|meta| Arc::new(FaultyMetaStore::new(meta, 7)));
        let count = |meta: &Arc<FaultyMetaStore>| {
            let (ledgers, key) = (SharedLedgers::new(meta.clone()), key.clone());
            tokio::spawn(async move {
                let (mut made, mut unknown, mut last) = (BTreeSet::new(), BTreeSet::new(), 0);
                while made.len() < STEPS {
                    let Ok(guard) = ledgers.lock(&key).await else { continue };
                    let now = kept(guard.state());
                    assert!(now >= last, "it goes back from {last} to {now}");
                    last = now;
                    match save(guard, state_with_keep(now + 1)).await {
                        Ok(true) => assert!(made.insert(now + 1)),
                        Ok(false) => {}
                        Err(_) => drop(unknown.insert(now + 1)),
                    }
                }
                (made, unknown)
            })
        };
        let [one, other] = faulty.each_ref().map(count);
        let (one, other) = (one.await.unwrap(), other.await.unwrap());
        assert!(one.0.is_disjoint(&other.0), "{kind}");
        let acknowledged: BTreeSet<u32> = one.0.union(&other.0).copied().collect();
        let state = SharedLedgers::new(faulty[0].inner()).state(&key).await.unwrap();
        let newest = kept(&state);
        assert!(acknowledged.iter().all(|step| *step <= newest), "{kind}");
        // Each step was made by one of the two processes.
        let is_made = |step: &u32| {
            acknowledged.contains(step) || one.1.contains(step) || other.1.contains(step)
        };
        assert!((2..=newest).all(|step| is_made(&step)), "{kind}");
        let failed = faulty.iter().all(|meta| meta.has_triggered_all_faults());
        assert!(failed, "{kind}: requests failed, done and not done");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn waiter_is_notified_of_changes_by_other_process() {
    let key = Key::new("policy").unwrap();
    for Backend { name: kind, metas: [one, other], _resources, .. } in backends().await {
        let (one, other) = (SharedLedgers::new(one), SharedLedgers::new(other));
        let seen = one.state(&key).await.unwrap();
        let (waiting, waited) = (one.clone(), key.clone());
        let changed = tokio::spawn(async move {
            waiting.changed(&waited, &seen, Duration::from_mins(1)).await;
        });
        assert!(save(other.lock(&key).await.unwrap(), state_with_keep(5)).await.unwrap(), "{kind}");
        tokio::time::timeout(Duration::from_secs(20), changed).await.unwrap().unwrap();
        assert_eq!(*one.state(&key).await.unwrap(), state_with_keep(5), "{kind}");
        // Nothing has changed since.
        let seen = one.state(&key).await.unwrap();
        let long = one.changed(&key, &seen, Duration::from_mins(1));
        tokio::time::timeout(Duration::from_millis(50), long).await.unwrap_err();
        // The wait ends after its timeout.
        let brief = one.changed(&key, &seen, Duration::from_millis(30));
        tokio::time::timeout(Duration::from_secs(20), brief).await.unwrap();
    }
}

fn state_with_keep(keep: u32) -> State {
    State::with_keep(std::num::NonZeroU32::new(keep).unwrap())
}

#[cfg(feature = "etcd")]
mod etcd_only {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpStream};
    use tokio::sync::watch;

    use super::*;
    use crate::metadata::backend::EtcdMeta;
    use crate::testing::etcd_server::Etcd;

    async fn connect(etcd: &Etcd) -> EtcdMeta {
        EtcdMeta::connect(&format!("{}/tssd", etcd.url())).await.unwrap()
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn create_next_after_superseded_record_is_refused() {
        let etcd = Etcd::start(1);
        let (one, other) = (connect(&etcd).await, connect(&etcd).await);
        let record = || b"{}".to_vec();
        assert!(one.create_next("a/.ledger", None, "1", record()).await.unwrap());
        assert!(one.create_next("a/.ledger", Some("1"), "2", record()).await.unwrap());
        assert!(one.create_next("a/.ledger", Some("2"), "3", record()).await.unwrap());
        // The newest two records are kept.
        assert_eq!(one.list("a/.ledger").await.unwrap(), ["2", "3"]);
        // There are no records to delete later.
        assert_eq!(one.delete_superseded("a/.ledger", vec!["1".to_owned()]).await, [""; 0]);
        // A process that was paused meanwhile assumes that the first record is the last one, or that there is none.
        assert!(!other.create_next("a/.ledger", Some("1"), "2", record()).await.unwrap());
        assert!(!other.create_next("a/.ledger", None, "1", record()).await.unwrap());
        assert!(other.create_next("a", None, "1", record()).await.is_ok_and(|created| !created));
        assert!(other.create_next("a/.ledger", Some("3"), "4", record()).await.unwrap());
        let listed = one.list_records("a/.ledger").await.unwrap();
        assert_eq!(listed, ["3", "4"].map(|name| (name.to_owned(), Some(record()))));
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn list_returns_more_names_than_a_page() {
        let etcd = Etcd::start(1);
        let meta = Arc::new(connect(&etcd).await);
        let create = |number: u32| {
            let meta = meta.clone();
            tokio::spawn(async move { meta.create(&format!("many/{number:05}"), vec![]).await })
        };
        for created in (0..2100).map(create).collect::<Vec<_>>() {
            assert!(created.await.unwrap().unwrap());
        }
        let listed = meta.list("many").await.unwrap();
        assert!(listed.iter().map(|name| name.parse::<u32>().unwrap()).eq(0..2100));
        assert_eq!(meta.list("").await.unwrap(), ["many"]);
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn requests_succeed_after_member_is_killed() {
        let mut etcd = Etcd::start(3);
        let meta = connect(&etcd).await;
        let session = meta.hold_session(".sessions/1", b"tls://h1:7777".to_vec()).await.unwrap();
        for member in 0..3 {
            etcd.kill_member(member);
            let name = format!("a/{member}");
            assert!(meta.create(&name, vec![7]).await.unwrap());
            assert_eq!(meta.get(&name).await.unwrap(), Some(vec![7]));
            let record = meta.get(".sessions/1").await.unwrap();
            assert_eq!(record, Some(b"tls://h1:7777".to_vec()));
            etcd.start_member(member);
            etcd.wait();
        }
        drop(session);
    }

    /// A proxy for an etcd member that can drop responses, and close its connections.
    struct LossyProxy {
        url: String,
        /// Whether responses are dropped.
        drops_responses: watch::Sender<bool>,
        /// Closes the current connections when it changes.
        disconnects: watch::Sender<u32>,
    }

    impl LossyProxy {
        async fn start(etcd: &Etcd) -> Self {
            let address = etcd.url().replace("etcd://", "");
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let url = format!("etcd://{}/tssd", listener.local_addr().unwrap());
            let (drops_responses, disconnects) = (watch::Sender::new(false), watch::Sender::new(0));
            let (is_dropping, mut closed) = (drops_responses.subscribe(), disconnects.subscribe());
            tokio::spawn(async move {
                while let Ok((client, _)) = listener.accept().await {
                    let server = TcpStream::connect(&address).await.unwrap();
                    closed.mark_unchanged();
                    tokio::spawn(forward(client, server, is_dropping.clone(), closed.clone()));
                }
            });
            Self { url, drops_responses, disconnects }
        }
    }

    /// Forwards both directions of a connection until it is closed. Responses can be dropped.
    async fn forward(
        client: TcpStream,
        server: TcpStream,
        is_dropping: watch::Receiver<bool>,
        mut closed: watch::Receiver<u32>,
    ) {
        let ((mut from_client, mut to_client), (mut from_server, mut to_server)) =
            (client.into_split(), server.into_split());
        let responses = async {
            let mut block = vec![0; 4096];
            while let Ok(len @ 1..) = from_server.read(&mut block).await {
                if !*is_dropping.borrow() && to_client.write_all(&block[..len]).await.is_err() {
                    break;
                }
            }
        };
        tokio::select! {
            _ = tokio::io::copy(&mut from_client, &mut to_server) => {}
            () = responses => {}
            _ = closed.changed() => {}
        }
    }

    /// The response to a `create_next` is lost, and the client retries.
    ///
    /// As long as the record exists, the retry reports that this process has created it. Later records cause its
    /// deletion. Then its creator is unknown, and the retry must return an error.
    #[tokio::test(flavor = "multi_thread")]
    async fn retry_after_lost_response_never_reports_wrong_result() {
        let etcd = Etcd::start(1);
        let other = connect(&etcd).await;
        let proxy = LossyProxy::start(&etcd).await;
        let own = Arc::new(EtcdMeta::connect(&proxy.url).await.unwrap());
        let record = || b"{}".to_vec();
        let unknown = Err(crate::ErrorKind::Unreachable);
        for (folder, follows, expected) in
            [("a", 0, Ok(true)), ("b", 1, Ok(true)), ("c", 2, unknown), ("d", 5, unknown)]
        {
            assert!(own.create_next(folder, None, "1", record()).await.unwrap());
            proxy.drops_responses.send_replace(true);
            let pending = {
                let own = own.clone();
                tokio::spawn(async move { own.create_next(folder, Some("1"), "2", record()).await })
            };
            while other.get(&format!("{folder}/2")).await.unwrap().is_none() {
                tokio::task::yield_now().await;
            }
            for number in 2..2 + follows {
                let (last, next) = (number.to_string(), (number + 1).to_string());
                assert!(other.create_next(folder, Some(&last), &next, record()).await.unwrap());
            }
            proxy.drops_responses.send_replace(false);
            proxy.disconnects.send_modify(|times| *times += 1);
            let result = pending.await.unwrap();
            let result = result.map_err(|error| error.kind());
            assert_eq!(result, expected, "{folder}");
        }
        // Without a retry, the result is certain: another process has created the record.
        assert!(!own.create_next("c", Some("1"), "2", record()).await.unwrap());
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn session_is_recreated_after_its_lease_expires() {
        let etcd = Etcd::start(1);
        let (own, other) = (connect(&etcd).await, connect(&etcd).await);
        let record = b"tls://h1:7777".to_vec();
        let session = own.hold_session(".sessions/1", record.clone()).await.unwrap();
        let host = etcd.url().replace("etcd://", "");
        let mut client = etcd_client::Client::connect([host], None).await.unwrap();
        for lease in client.leases().await.unwrap().leases() {
            client.lease_revoke(lease.id()).await.unwrap();
        }
        assert!(other.has_ended(".sessions/1").await.unwrap());
        let mut found = None;
        for _ in 0..200 {
            found = other.get(".sessions/1").await.unwrap();
            if found.is_some() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        assert_eq!(found, Some(record));
        drop(session);
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn watch_wakes_only_on_changes() {
        let etcd = Etcd::start(1);
        let (own, other) = (connect(&etcd).await, connect(&etcd).await);
        let mut watch = own.watch("a", Duration::from_mins(1));
        for name in ["a/1", "a/2"] {
            // Earlier changes do not wake the watch. A few spurious wakeups are allowed, but they must stop.
            let mut is_woken = true;
            for _ in 0..4 {
                let woken = tokio::time::timeout(Duration::from_millis(2500), watch.changed());
                is_woken = woken.await.is_ok();
                if !is_woken {
                    break;
                }
            }
            assert!(!is_woken, "nothing changes");
            assert!(other.create(name, vec![]).await.unwrap());
            let woken = tokio::time::timeout(Duration::from_secs(20), watch.changed());
            assert!(woken.await.unwrap());
            assert!(other.create(&format!("b{name}"), vec![]).await.unwrap());
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn invalid_url_or_credentials_are_reported() {
        let error = EtcdMeta::connect("etcd://").await.err().unwrap();
        assert_eq!(error.kind(), crate::ErrorKind::Invalid, "{error}");
        let error = EtcdMeta::connect("etcd://root:secret@127.0.0.1:1").await.err().unwrap();
        assert!(error.to_string().contains("ETCDCTL_USER"), "{error}");
        let error = EtcdMeta::connect("etcd://no host:1").await.err().unwrap();
        assert_eq!(error.kind(), crate::ErrorKind::Invalid, "{error}");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn requests_that_etcd_rejects_are_not_retried() {
        let etcd = Etcd::start(1);
        let meta = connect(&etcd).await;
        // etcd limits requests to 1.5 MiB, and gRPC messages to 2 MiB.
        for len in [1_700_000, 3 << 20] {
            let created = meta.create("a/large", vec![7; len]);
            let created = tokio::time::timeout(Duration::from_secs(20), created).await;
            let error = created.expect("the refusal comes before the timeout").unwrap_err();
            assert_eq!(error.kind(), crate::ErrorKind::Refused, "{error}");
        }
        assert_eq!(meta.get("a/large").await.unwrap(), None);
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn prefixes_isolate_stores_and_have_a_default() {
        let etcd = Etcd::start(1);
        let connect = async |prefix: &str| {
            EtcdMeta::connect(&format!("{}{prefix}", etcd.url())).await.unwrap()
        };
        let (some, other) = (connect("/some/prefix").await, connect("/other").await);
        assert!(some.create("a", vec![1]).await.unwrap());
        assert!(other.create("a", vec![2]).await.unwrap());
        assert!(connect("").await.create("a", vec![3]).await.unwrap());
        for (prefix, record) in [("/some/prefix/", 1), ("/other/", 2), ("/tssd", 3), ("/", 3)] {
            let found = connect(prefix).await.get("a").await.unwrap();
            assert_eq!(found, Some(vec![record]), "{prefix}");
        }
    }
}
