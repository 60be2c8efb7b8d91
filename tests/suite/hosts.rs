//! Daemons of several hosts that share their ledgers in etcd: none of them decides for the others.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use rustix::process::Signal;
use tssd_format::{StateDict, Tensor};
use tssd_store::blocking::Store;
use tssd_store::ledger::{Reason, Refusal};
use tssd_store::{Credentials, Durability, ErrorKind, GetOptions, Key, PutOptions};
use tssd_tests::authority::Authority;
use tssd_tests::command::{Serve, binary};
use tssd_tests::etcd::Etcd;
use tssd_tests::served::Served;
use tssd_tests::steps::{eventually, key, options, part, publish, publish_as, read};

/// A daemon that has its ledgers in etcd.
fn host(etcd: &Etcd) -> Served {
    Served::bound(1 << 30, |options| {
        options.meta = Some(etcd.url());
        options.keep = 2.try_into().unwrap();
    })
}

fn lost_writers(error: &tssd_store::Error) -> Option<String> {
    match error.refusal() {
        Some(Refusal::Dropped { reason: Reason::Lost { writers, .. }, .. }) => {
            Some(writers.to_string())
        }
        _ => None,
    }
}

#[test]
fn what_is_put_on_several_hosts_is_one_version_on_all() {
    let mut etcd = Etcd::start(1);
    let hosts = [host(&etcd), host(&etcd), host(&etcd)];
    let stores = hosts.each_ref().map(Served::connect);
    for (host, store) in hosts.iter().zip(&stores) {
        assert_eq!(found(store), (hosts.each_ref().map(address).into(), vec![address(host)]));
    }
    let far = hosts[2].connect_far();
    let waiting = hosts[2].connect();
    let waiter = std::thread::spawn(move || {
        waiting.wait_for_version(&key(), 6, Duration::from_mins(1)).unwrap()
    });
    for step in 1..=6 {
        publish(&stores[..2], step);
        for store in stores.iter().chain([&far]) {
            assert_eq!(read(store, None, 2).unwrap(), step);
        }
    }
    waiter.join().unwrap();
    assert_eq!(read(&stores[2], Some(5), 2).unwrap(), 5, "two are kept");
    let error = read(&stores[2], Some(4), 2).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
    // Who keeps them is told what nobody needs.
    for store in &stores {
        eventually("memory is written again", || {
            let memory = store.status().unwrap().memory;
            memory.used - memory.warm < 28 << 20
        });
    }
    // What is said of a key is said to all.
    stores[0].pin(&key(), Some(5), "best").unwrap();
    assert_eq!(stores[1].pins(&key()).unwrap()["best"], 5);
    assert_eq!(stores[2].delete(&key(), None).unwrap(), 2);
    assert_eq!(stores[0].keys(None).unwrap(), [] as [Key; 0]);
    for store in &stores {
        eventually("what was read is not kept either", || {
            let memory = store.status().unwrap().memory;
            memory.used - memory.warm < 12 << 20
        });
    }
    // How a daemon is can be asked whatever becomes of etcd.
    etcd.kill(0);
    let status = stores[0].status().unwrap();
    assert_eq!(status.hosts, []);
    assert!(status.hosts_error.is_some());
}

fn address(host: &Served) -> String {
    host.address().to_owned()
}

/// All daemons that one finds, and those of them that it says it is.
fn found(store: &Store) -> (BTreeSet<String>, Vec<String>) {
    let hosts = store.status().unwrap().hosts;
    let own = hosts.iter().filter(|host| host.is_own).map(|host| host.address.clone()).collect();
    (hosts.into_iter().map(|host| host.address).collect(), own)
}

#[test]
fn what_a_host_kept_alone_is_lost_with_it_and_nothing_else() {
    let etcd = Etcd::start(1);
    let [first, second, third] = [host(&etcd), host(&etcd), host(&etcd)];
    let stores = [first.connect(), second.connect()];
    let reader = third.connect();
    let own = Key::new("own").unwrap();
    reader.put_state_dict(&own, &part(1, 0, 1), &PutOptions::default()).unwrap();
    publish(&stores[..1], 1);
    // The last one makes the manifest, by which it is known what is lost.
    for writer in [1, 0] {
        let store = &stores[usize::try_from(writer).unwrap()];
        store.put_state_dict(&key(), &part(2, writer, 2), &options(2, writer, 2)).unwrap();
    }
    assert_eq!(reader.wait_for_version(&key(), 2, Duration::ZERO).unwrap().number, 2);
    drop(second);
    let mut last = String::new();
    // Until it is known that it has ended, it cannot be reached.
    eventually("a host that has ended is missed", || {
        let error = read(&reader, Some(2), 2).unwrap_err();
        last = error.to_string();
        assert!(matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Unreachable), "{error}");
        lost_writers(&error).as_deref() == Some("1")
    });
    assert_eq!(found(&reader).0, [address(&first), address(&third)].into());
    let said = "the hosts that kept the archives of writers 1 have ended, and with them weight[64:128, 0:4096]";
    assert!(last.contains(said), "{last}");
    // The one before is there, and so is what others keep.
    assert_eq!(read(&reader, None, 1).unwrap(), 1);
    assert!(reader.get_state_dict(&own, &GetOptions::default()).is_ok());
    // It goes on.
    publish(&stores[..1], 3);
    assert_eq!(read(&reader, None, 1).unwrap(), 3);
}

/// A daemon as a process.
fn process(etcd: &Etcd, folder: &Path, more: &[&str]) -> Serve {
    let meta = etcd.url();
    let args = ["--meta", &meta, "--listen", "127.0.0.1:0", "--keep", "2"];
    Serve::start(folder, &[&args, more].concat())
}

#[test]
fn who_was_killed_or_stopped_is_missed_and_who_comes_back_is_told() {
    let mut etcd = Etcd::start(3);
    let folders: Vec<_> = (0..3).map(|_| tempfile::tempdir().unwrap()).collect();
    let [first, stopped, killed] =
        [0, 1, 2].map(|host: usize| process(&etcd, folders[host].path(), &[]));
    let stores = [&first, &stopped, &killed].map(Serve::connect);
    let other = Key::new("other").unwrap();
    let get = |store: &Store, key: &Key| store.get_state_dict(key, &GetOptions::default());
    publish(&stores[..2], 1);
    // Who reads is lost too, and holds nothing then.
    let held = Key::new("held").unwrap();
    let mut large = StateDict::new();
    large.insert("weight", Tensor::from_slice(&vec![7_u64; 2 << 20], &[2 << 20]).unwrap());
    stores[0].put_state_dict(&held, &large, &PutOptions::default()).unwrap();
    let seen = get(&stores[2], &held).unwrap();
    for _ in 0..2 {
        stores[0].put_state_dict(&held, &part(1, 0, 1), &PutOptions::default()).unwrap();
    }
    stores[2].put_state_dict(&other, &part(1, 0, 1), &options(1, 0, 1)).unwrap();
    assert_eq!(read(&stores[2], None, 2).unwrap(), 1);
    // What is being put there when it is lost is not waited for.
    let begun = options(2, 1, 2);
    stopped.signal(Signal::STOP);
    killed.signal(Signal::KILL);
    etcd.kill(0);
    std::thread::scope(|scope| {
        let late = scope.spawn(|| stores[1].put_state_dict(&key(), &part(2, 1, 2), &begun));
        eventually("both are missed", || {
            let lost = [read(&stores[0], Some(1), 2).map(drop), get(&stores[0], &other).map(drop)];
            let mut lost = lost.into_iter().map(Result::err);
            lost.all(|error| error.is_some_and(|error| lost_writers(&error).is_some()))
        });
        publish(&stores[..1], 3);
        stopped.signal(Signal::CONT);
        // It is told what has become of its version, and goes on.
        let error = late.join().unwrap().unwrap_err();
        assert!(error.refusal().is_some(), "{error}");
    });
    assert_eq!(read(&stores[1], None, 1).unwrap(), 3);
    let error = read(&stores[1], Some(1), 2).unwrap_err();
    assert_eq!(lost_writers(&error).as_deref(), Some("1"), "{error}");
    publish(&stores[..2], 4);
    assert_eq!(read(&stores[0], None, 2).unwrap(), 4);
    for store in &stores[..2] {
        eventually("it keeps nothing of what is lost or was read by who is", || {
            let memory = store.status().unwrap().memory;
            memory.used - memory.warm < 28 << 20
        });
    }
    drop(seen);
}

#[test]
fn a_version_takes_few_requests_of_etcd() {
    let etcd = Etcd::start(1);
    let served = Served::bound(1 << 30, |options| {
        options.meta = Some(etcd.url());
        options.keep = 100.try_into().unwrap();
    });
    let store = served.connect();
    let mut least = u64::MAX;
    for step in 1..=8 {
        let before = etcd.requests();
        store.put_state_dict(&key(), &part(step, 0, 1), &options(step, 0, 1)).unwrap();
        // Now and then the daemon looks after its keys meanwhile.
        least = least.min(etcd.requests() - before);
    }
    assert!(least <= 10, "{least} requests");
}

#[test]
fn what_is_in_the_bucket_outlasts_the_hosts() {
    let (etcd, bucket) = (Etcd::start(1), tempfile::tempdir().unwrap());
    let url = format!("file:{}", bucket.path().display());
    let host = || {
        Served::bound(1 << 30, |options| {
            options.meta = Some(etcd.url());
            options.bucket = Some(url.clone());
        })
    };
    let [first, second, third] = [host(), host(), host()];
    let trainers = [first.connect(), second.connect()];
    let generator = third.connect();
    // Whoever is the last to be there says so.
    let reports = publish_as(&trainers, 1, Durability::Object);
    assert!(reports.iter().any(|report| report.stored), "{reports:?}");
    publish(&trainers, 2);
    drop(second);
    // It was killed before that was in the bucket: the one before is whole.
    eventually("a host that has ended is missed", || {
        read(&generator, Some(2), 2)
            .is_err_and(|error| lost_writers(&error).as_deref() == Some("1"))
    });
    assert_eq!(read(&generator, None, 2).unwrap(), 1);
    assert!(third.metric(r#"tssd_restored_bytes_total{why="alone"}"#) > 0.0);
    drop((first, trainers, generator, third));
    // Nobody of them is left, nor what they had in etcd.
    let other = Etcd::start(1);
    let served = Served::bound(1 << 30, |options| {
        options.meta = Some(other.url());
        options.bucket = Some(url.clone());
    });
    let store = served.connect();
    assert_eq!(store.keys(None).unwrap(), [key()]);
    assert_eq!(read(&store, None, 2).unwrap(), 1);
    publish_as(std::slice::from_ref(&store), 2, Durability::Object);
    assert_eq!(read(&Store::connect(&url).unwrap(), None, 1).unwrap(), 2);
}

#[test]
fn who_does_not_answer_is_passed_over_if_the_bucket_has_the_same() {
    let (etcd, bucket) = (Etcd::start(1), tempfile::tempdir().unwrap());
    let url = format!("file:{}", bucket.path().display());
    let folders = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let [first, stopped] =
        folders.each_ref().map(|folder| process(&etcd, folder.path(), &["--bucket", &url]));
    let reading = Served::bound(1 << 30, |options| {
        options.meta = Some(etcd.url());
        options.bucket = Some(url.clone());
    });
    let trainers = [first.connect(), stopped.connect()];
    let generator = reading.connect();
    publish_as(&trainers, 1, Durability::Object);
    assert_eq!(read(&generator, None, 2).unwrap(), 1);
    // From the hosts, as long as they answer.
    let restored =
        |why: &str| reading.metric(&format!("tssd_restored_bytes_total{{why=\"{why}\"}}"));
    assert!(reading.metric(r#"tssd_leased_bytes_total{source="origin"}"#) > 0.0);
    assert!(restored("unanswered") + restored("alone") < 1.0);
    publish_as(&trainers, 2, Durability::Object);
    stopped.signal(Signal::STOP);
    // It is there until its session ends, and says nothing.
    assert_eq!(read(&generator, None, 2).unwrap(), 2);
    assert!(restored("unanswered") > 0.0);
    assert!(restored("alone") < 1.0);
    stopped.signal(Signal::CONT);
    publish_as(&trainers, 3, Durability::Object);
    assert_eq!(read(&generator, None, 2).unwrap(), 3);
    // Who is about to read what is killed has it from there, too.
    publish_as(&trainers, 4, Durability::Object);
    let before = restored("unanswered");
    let opened = generator.open(&key(), &GetOptions::default()).unwrap();
    drop(stopped);
    let leaves: Vec<_> = opened.map(|leaf| leaf.unwrap()).collect();
    assert_eq!(leaves.len(), 2);
    assert!(restored("unanswered") > before);
    assert_eq!(read(&generator, None, 2).unwrap(), 4);
}

#[test]
fn etcd_that_is_guarded_is_reached_with_certificates_and_passwords() {
    let (authority, stranger) = (Authority::new(), Authority::new());
    let member = authority.issue("etcd", "127.0.0.1", |_| {});
    // A name in the certificate would be another way to name oneself.
    let nameless = |params: &mut rcgen::CertificateParams| {
        params.distinguished_name = rcgen::DistinguishedName::new();
    };
    let own = authority.issue("host", "host", nameless);
    let other = stranger.issue("other", "host", nameless);
    let mut etcd = Etcd::start(1);
    etcd.guard(&member.ca, &member.cert, &member.key);

    let variable = |name: &str, path: &Path| format!("ETCDCTL_{name}={}", path.display());
    let certified = |by: &Credentials, believed: &Path| {
        vec![variable("CACERT", believed), variable("CERT", &by.cert), variable("KEY", &by.key)]
    };
    let named = |user: &str, mut variables: Vec<String>| {
        variables.push(format!("ETCDCTL_USER={user}"));
        variables
    };
    let whole = || certified(&own, &own.ca);
    let serve = |environment: &[String], meta: &str| {
        let output = std::process::Command::new("timeout")
            .args(["60", "env"])
            .args(environment)
            .arg(binary())
            .args(["serve", "--memory-limit", "64MB", "--listen", "127.0.0.1:0", "--meta", meta])
            .arg("--socket")
            .arg(tempfile::tempdir().unwrap().path().join("socket"))
            .output()
            .unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    let url = etcd.url();
    let elsewhere = format!("{url}/elsewhere");
    let refused = [
        (vec![], &url, 4, "transport error: "),
        (whole(), &url, 5, "permission denied"),
        (named("tssd:wrong", whole()), &url, 5, "authentication failed"),
        (named("tssd:tssd", whole()), &elsewhere, 5, "permission denied"),
        (named("tssd:tssd", certified(&other, &own.ca)), &url, 4, "transport error: "),
        (named("tssd:tssd", certified(&own, &other.ca)), &url, 4, "certificate"),
        (named("tssd", whole()), &url, 5, "ETCDCTL_USER without `:PASSWORD`"),
        (whole().split_off(1)[..1].to_vec(), &url, 5, "only one of ETCDCTL_CERT and ETCDCTL_KEY"),
    ];
    // Who is not understood is asked again for a while: all at once.
    std::thread::scope(|scope| {
        for (environment, meta, code, says) in &refused {
            scope.spawn(move || {
                let (ended, said) = serve(environment, meta);
                assert_eq!(ended, Some(*code), "{environment:?} {meta}: {said}");
                assert!(said.contains(says), "{environment:?} {meta}: {said}");
            });
        }
    });

    let environment = named("tssd:tssd", whole());
    let by: Vec<&str> = ["env"].into_iter().chain(environment.iter().map(String::as_str)).collect();
    let folders = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let arguments = ["--memory-limit", "64MB", "--listen", "127.0.0.1:0", "--meta", &url];
    let hosts = folders.each_ref().map(|folder| Serve::under(&by, folder.path(), &arguments));
    let [first, second] = hosts.each_ref().map(Serve::connect);
    for step in 1..=3 {
        publish(&[first.clone(), second.clone()], step);
        assert_eq!(read(&second, None, 2).unwrap(), step);
        // Longer than somebody is known who has named himself once.
        std::thread::sleep(Duration::from_millis(2500));
    }
    // Sessions are renewed as well: a lease lives for ten seconds.
    std::thread::sleep(Duration::from_secs(10));
    publish(&[first.clone(), second.clone()], 4);
    assert_eq!(read(&first, None, 2).unwrap(), 4);
}
