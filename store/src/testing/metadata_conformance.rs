//! What every meta store does, whatever it keeps its records in: the same tests for all.

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
use crate::testing::faulty_metadata::Faulty;

/// A meta store as two processes have it.
struct Kind {
    name: &'static str,
    metas: [Arc<dyn MetaStore>; 2],
    /// Whether it can tell that a process has ended.
    tells: bool,
    /// What is to be kept until the end.
    _keep: Option<Box<dyn Any>>,
}

#[cfg_attr(not(feature = "etcd"), expect(clippy::unused_async, reason = "it is with etcd"))]
async fn kinds() -> Vec<Kind> {
    vec![
        memory(),
        directory(),
        #[cfg(feature = "etcd")]
        etcd().await,
        #[cfg(feature = "object")]
        object(),
    ]
}

fn memory() -> Kind {
    let memory: Arc<dyn MetaStore> = Arc::new(MemoryMeta::default());
    let metas = [memory.clone(), memory];
    Kind { name: "memory", metas, tells: true, _keep: None }
}

fn directory() -> Kind {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().canonicalize().unwrap();
    let directory = || Arc::new(DirectoryMeta::new(Disk::at(root.clone()))) as Arc<dyn MetaStore>;
    let (metas, keep) = ([directory(), directory()], Box::new(folder));
    Kind { name: "directory", metas, tells: true, _keep: Some(keep) }
}

#[cfg(feature = "etcd")]
async fn etcd() -> Kind {
    let etcd = crate::testing::etcd_server::Etcd::start(1);
    let url = format!("{}/some/prefix", etcd.url());
    let connect =
        async || Arc::new(crate::metadata::backend::EtcdMeta::connect(&url).await.unwrap());
    let metas: [Arc<dyn MetaStore>; 2] = [connect().await, connect().await];
    Kind { name: "etcd", metas, tells: true, _keep: Some(Box::new(etcd)) }
}

#[cfg(feature = "object")]
fn object() -> Kind {
    let objects = Arc::new(crate::testing::faulty_bucket::Faulty::default());
    let object = || {
        let root = object_store::path::Path::parse("some/prefix").unwrap();
        let bucket = crate::io::bucket::Bucket::new(objects.clone(), root, "s3://test/some/prefix");
        Arc::new(crate::metadata::backend::ObjectMeta::new(bucket.unwrap())) as Arc<dyn MetaStore>
    };
    let metas = [object(), object()];
    Kind { name: "object", metas, tells: false, _keep: None }
}

#[tokio::test(flavor = "multi_thread")]
async fn records_are_created_once_and_never_change() {
    for Kind { name: kind, metas: [one, other], _keep, .. } in kinds().await {
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
    for Kind { name: kind, metas: [one, other], _keep, .. } in kinds().await {
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
    for Kind { name: kind, metas: [one, other], _keep, .. } in kinds().await {
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
    for Kind { name: kind, metas: [one, other], tells, _keep } in kinds().await {
        let held = one.lock("policy/.lock").await.unwrap();
        let short = Duration::from_millis(50);
        let second = tokio::time::timeout(short, other.lock("policy/.lock")).await;
        assert_eq!(second.is_err(), one.keeps_away(), "{kind}");
        drop((held, second));
        other.lock("policy/.lock").await.unwrap();
        let session = one.session(".sessions/1", b"who".to_vec()).await.unwrap();
        assert!(!other.has_ended(".sessions/1").await.unwrap(), "{kind}");
        drop(session);
        // Who cannot tell takes nobody for dead.
        let mut has_ended = other.has_ended(".sessions/1").await.unwrap();
        for _ in 0..200 {
            if has_ended || !tells {
                break;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
            has_ended = other.has_ended(".sessions/1").await.unwrap();
        }
        assert_eq!(has_ended, tells, "{kind}");
    }
}

/// The same ledger over each: no step is lost, and none is made twice.
#[tokio::test(flavor = "multi_thread")]
async fn steps_of_two_processes_follow_each_other() {
    const STEPS: u32 = 40;
    let key = Key::new("policy").unwrap();
    let kept = |state: &State| (1..=2 * STEPS + 1).find(|keep| *state == keeping(*keep));
    for Kind { name: kind, metas, _keep, .. } in kinds().await {
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

/// The same where requests fail: what was acknowledged is there, and what failed is there once or not at all.
#[tokio::test(flavor = "multi_thread")]
async fn steps_follow_each_other_whatever_fails() {
    const STEPS: usize = 40;
    let key = Key::new("policy").unwrap();
    let kept = |state: &State| (1..10_000).find(|keep| *state == keeping(*keep)).unwrap();
    for Kind { name: kind, metas, _keep, .. } in kinds().await {
        let faulty = metas.map(|meta| Arc::new(Faulty::new(meta, 7)));
        let count = |meta: &Arc<Faulty>| {
            let (ledgers, key) = (SharedLedgers::new(meta.clone()), key.clone());
            tokio::spawn(async move {
                let (mut made, mut unknown, mut last) = (BTreeSet::new(), BTreeSet::new(), 0);
                while made.len() < STEPS {
                    let Ok(turn) = ledgers.turn(&key).await else { continue };
                    let now = kept(turn.state());
                    assert!(now >= last, "it goes back from {last} to {now}");
                    last = now;
                    match save(turn, keeping(now + 1)).await {
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
        let state = SharedLedgers::new(faulty[0].bare()).state(&key).await.unwrap();
        let newest = kept(&state);
        assert!(acknowledged.iter().all(|step| *step <= newest), "{kind}");
        // Each was made by somebody.
        let is_made = |step: &u32| {
            acknowledged.contains(step) || one.1.contains(step) || other.1.contains(step)
        };
        assert!((2..=newest).all(|step| is_made(&step)), "{kind}");
        let failed = faulty.iter().all(|meta| meta.has_failed());
        assert!(failed, "{kind}: requests failed, done and not done");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn who_waits_sees_what_another_process_does() {
    let key = Key::new("policy").unwrap();
    for Kind { name: kind, metas: [one, other], _keep, .. } in kinds().await {
        let (one, other) = (SharedLedgers::new(one), SharedLedgers::new(other));
        let seen = one.state(&key).await.unwrap();
        let (waiting, waited) = (one.clone(), key.clone());
        let changed = tokio::spawn(async move {
            waiting.changed(&waited, &seen, Duration::from_mins(1)).await;
        });
        assert!(save(other.turn(&key).await.unwrap(), keeping(5)).await.unwrap(), "{kind}");
        tokio::time::timeout(Duration::from_secs(20), changed).await.unwrap().unwrap();
        assert_eq!(*one.state(&key).await.unwrap(), keeping(5), "{kind}");
        // Nothing has changed since.
        let seen = one.state(&key).await.unwrap();
        let long = one.changed(&key, &seen, Duration::from_mins(1));
        tokio::time::timeout(Duration::from_millis(50), long).await.unwrap_err();
        // Patience ends.
        let brief = one.changed(&key, &seen, Duration::from_millis(30));
        tokio::time::timeout(Duration::from_secs(20), brief).await.unwrap();
    }
}

fn keeping(keep: u32) -> State {
    State::keeping(std::num::NonZeroU32::new(keep).unwrap())
}

#[cfg(feature = "etcd")]
mod etcd_alone {
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
    async fn what_follows_a_record_that_others_have_followed_is_none() {
        let etcd = Etcd::start(1);
        let (one, other) = (connect(&etcd).await, connect(&etcd).await);
        let record = || b"{}".to_vec();
        assert!(one.follow("a/.ledger", None, "1", record()).await.unwrap());
        assert!(one.follow("a/.ledger", Some("1"), "2", record()).await.unwrap());
        assert!(one.follow("a/.ledger", Some("2"), "3", record()).await.unwrap());
        // The newest two stay.
        assert_eq!(one.list("a/.ledger").await.unwrap(), ["2", "3"]);
        // Nothing is left to be deleted later.
        assert_eq!(one.retire("a/.ledger", vec!["1".to_owned()]).await, [""; 0]);
        // Who has stopped meanwhile believes that the first one is the last, or that there is none.
        assert!(!other.follow("a/.ledger", Some("1"), "2", record()).await.unwrap());
        assert!(!other.follow("a/.ledger", None, "1", record()).await.unwrap());
        assert!(other.follow("a", None, "1", record()).await.is_ok_and(|created| !created));
        assert!(other.follow("a/.ledger", Some("3"), "4", record()).await.unwrap());
        let listed = one.list_records("a/.ledger").await.unwrap();
        assert_eq!(listed, ["3", "4"].map(|name| (name.to_owned(), Some(record()))));
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_listing_has_more_names_than_a_page() {
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
    async fn a_member_that_is_killed_delays_and_no_more() {
        let mut etcd = Etcd::start(3);
        let meta = connect(&etcd).await;
        let session = meta.session(".sessions/1", b"tls://h1:7777".to_vec()).await.unwrap();
        for member in 0..3 {
            etcd.kill_member(member);
            let name = format!("a/{member}");
            assert!(meta.create(&name, vec![7]).await.unwrap());
            assert_eq!(meta.get(&name).await.unwrap(), Some(vec![7]));
            let said = meta.get(".sessions/1").await.unwrap();
            assert_eq!(said, Some(b"tls://h1:7777".to_vec()));
            etcd.start_member(member);
            etcd.wait();
        }
        drop(session);
    }

    /// A way to a member of etcd on which answers are lost from a moment on, until it is cut.
    struct Deaf {
        url: String,
        mute: watch::Sender<bool>,
        cut: watch::Sender<u32>,
    }

    impl Deaf {
        async fn before(etcd: &Etcd) -> Self {
            let address = etcd.url().replace("etcd://", "");
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let url = format!("etcd://{}/tssd", listener.local_addr().unwrap());
            let (mute, cut) = (watch::Sender::new(false), watch::Sender::new(0));
            let (hears, mut ends) = (mute.subscribe(), cut.subscribe());
            tokio::spawn(async move {
                while let Ok((client, _)) = listener.accept().await {
                    let server = TcpStream::connect(&address).await.unwrap();
                    ends.mark_unchanged();
                    tokio::spawn(pass(client, server, hears.clone(), ends.clone()));
                }
            });
            Self { url, mute, cut }
        }
    }

    /// Passes on what both say, but no answer to who is deaf, until the way is cut.
    async fn pass(
        client: TcpStream,
        server: TcpStream,
        is_deaf: watch::Receiver<bool>,
        mut ends: watch::Receiver<u32>,
    ) {
        let ((mut asked, mut answer), (mut answers, mut ask)) =
            (client.into_split(), server.into_split());
        let answered = async {
            let mut block = vec![0; 4096];
            while let Ok(len @ 1..) = answers.read(&mut block).await {
                if !*is_deaf.borrow() && answer.write_all(&block[..len]).await.is_err() {
                    break;
                }
            }
        };
        tokio::select! {
            _ = tokio::io::copy(&mut asked, &mut ask) => {}
            () = answered => {}
            _ = ends.changed() => {}
        }
    }

    /// What is created by a request whose answer is lost is ours as long as it is there. Once others have followed it
    /// so often that it is deleted, nobody can tell: neither that it was created nor that it was not.
    #[tokio::test(flavor = "multi_thread")]
    async fn who_has_not_heard_an_answer_and_asks_again_is_told_no_lie() {
        let etcd = Etcd::start(1);
        let other = connect(&etcd).await;
        let way = Deaf::before(&etcd).await;
        let own = Arc::new(EtcdMeta::connect(&way.url).await.unwrap());
        let record = || b"{}".to_vec();
        let unknown = Err(crate::ErrorKind::Unreachable);
        for (folder, follows, expected) in
            [("a", 0, Ok(true)), ("b", 1, Ok(true)), ("c", 2, unknown), ("d", 5, unknown)]
        {
            assert!(own.follow(folder, None, "1", record()).await.unwrap());
            way.mute.send_replace(true);
            let asking = {
                let own = own.clone();
                tokio::spawn(async move { own.follow(folder, Some("1"), "2", record()).await })
            };
            while other.get(&format!("{folder}/2")).await.unwrap().is_none() {
                tokio::task::yield_now().await;
            }
            for number in 2..2 + follows {
                let (last, next) = (number.to_string(), (number + 1).to_string());
                assert!(other.follow(folder, Some(&last), &next, record()).await.unwrap());
            }
            way.mute.send_replace(false);
            way.cut.send_modify(|times| *times += 1);
            let told = asking.await.unwrap();
            let told = told.map_err(|error| error.kind());
            assert_eq!(told, expected, "{folder}");
        }
        // Who has asked once knows: somebody else was quicker.
        assert!(!own.follow("c", Some("1"), "2", record()).await.unwrap());
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_session_whose_lease_has_run_out_is_there_again() {
        let etcd = Etcd::start(1);
        let (own, other) = (connect(&etcd).await, connect(&etcd).await);
        let said = b"tls://h1:7777".to_vec();
        let session = own.session(".sessions/1", said.clone()).await.unwrap();
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
        assert_eq!(found, Some(said));
        drop(session);
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn who_watches_is_woken_by_changes_alone() {
        let etcd = Etcd::start(1);
        let (own, other) = (connect(&etcd).await, connect(&etcd).await);
        let mut watch = own.watch("a", Duration::from_mins(1));
        for name in ["a/1", "a/2"] {
            // What has changed before is not told; who is told anything else looks in vain, but not again and again,
            // and not as often as somebody who is told nothing.
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
    async fn who_cannot_be_reached_or_let_in_is_said() {
        let error = EtcdMeta::connect("etcd://").await.err().unwrap();
        assert_eq!(error.kind(), crate::ErrorKind::Invalid, "{error}");
        let error = EtcdMeta::connect("etcd://root:secret@127.0.0.1:1").await.err().unwrap();
        assert!(error.to_string().contains("ETCDCTL_USER"), "{error}");
        let error = EtcdMeta::connect("etcd://no host:1").await.err().unwrap();
        assert_eq!(error.kind(), crate::ErrorKind::Invalid, "{error}");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn what_etcd_refuses_is_not_asked_for_again() {
        let etcd = Etcd::start(1);
        let meta = connect(&etcd).await;
        // A request has at most 1.5 MiB there, and a message of a connection 2 MiB.
        for len in [1_700_000, 3 << 20] {
            let created = meta.create("a/large", vec![7; len]);
            let created = tokio::time::timeout(Duration::from_secs(20), created).await;
            let error = created.expect("it is said before patience ends").unwrap_err();
            assert_eq!(error.kind(), crate::ErrorKind::Refused, "{error}");
        }
        assert_eq!(meta.get("a/large").await.unwrap(), None);
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn prefixes_keep_stores_apart_and_there_is_one_if_none_is_named() {
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
