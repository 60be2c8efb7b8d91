//! Daemons of several hosts that share their ledgers in etcd. None of them is the controller of the others.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use rustix::process::Signal;
use tssd_format::{Dtype, StateDict, Storage, Tensor, TensorMeta};
use tssd_store::blocking::Store;
use tssd_store::ledger::{Reason, Refusal};
use tssd_store::{Credentials, Durability, ErrorKind, GetOptions, Key, PutOptions};
use tssd_tests::certificates::CertificateAuthority;
use tssd_tests::command::{DaemonProcess, binary};
use tssd_tests::etcd::Etcd;
use tssd_tests::test_daemon::TestDaemon;
use tssd_tests::training_steps::{
    key, options, publish, publish_with_durability, read_step, step_part, wait_until,
};

/// Starts a daemon that stores its ledgers in etcd, and retains 2 versions.
fn start_host(etcd: &Etcd) -> TestDaemon {
    TestDaemon::with_options(1 << 30, |options| {
        options.meta = Some(etcd.url());
        options.keep = 2.try_into().unwrap();
    })
}

/// Returns the writers whose archives were lost, if that is why a version was dropped.
fn lost_writers(error: &tssd_store::Error) -> Option<String> {
    match error.refusal() {
        Some(Refusal::Dropped { reason: Reason::Lost { writers, .. }, .. }) => {
            Some(writers.to_string())
        }
        _ => None,
    }
}

#[test]
fn puts_from_several_hosts_form_one_version() {
    let mut etcd = Etcd::start(1);
    let hosts = [start_host(&etcd), start_host(&etcd), start_host(&etcd)];
    let stores = hosts.each_ref().map(TestDaemon::connect);
    for (host, store) in hosts.iter().zip(&stores) {
        assert_eq!(known_hosts(store), (hosts.each_ref().map(address).into(), vec![address(host)]));
    }
    let remote = hosts[2].connect_tcp();
    let waiting_store = hosts[2].connect();
    let waiter = std::thread::spawn(move || {
        waiting_store.wait_for_version(&key(), 6, Duration::from_mins(1)).unwrap()
    });
    for step in 1..=6 {
        publish(&stores[..2], step);
        for store in stores.iter().chain([&remote]) {
            assert_eq!(read_step(store, None, 2).unwrap(), step);
        }
    }
    waiter.join().unwrap();
    assert_eq!(read_step(&stores[2], Some(5), 2).unwrap(), 5, "two versions are retained");
    let error = read_step(&stores[2], Some(4), 2).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
    // The daemons that store the archives learn which ones are no longer needed.
    for store in &stores {
        wait_until("the daemons free the memory of retired versions", || {
            let memory = store.status().unwrap().memory;
            memory.used_bytes - memory.free_bytes - memory.retained_bytes < 28 << 20
        });
    }
    // Pins and deletions apply on all hosts.
    stores[0].pin(&key(), Some(5), "best").unwrap();
    assert_eq!(stores[1].pins(&key()).unwrap()["best"], 5);
    assert_eq!(stores[2].delete(&key(), None).unwrap(), 2);
    assert_eq!(stores[0].keys(None).unwrap(), [] as [Key; 0]);
    for store in &stores {
        wait_until("the daemons free replicas of deleted versions", || {
            let memory = store.status().unwrap().memory;
            memory.used_bytes - memory.free_bytes < 12 << 20
        });
    }
    // `status` works while etcd is unreachable.
    etcd.kill_member(0);
    let status = stores[0].status().unwrap();
    assert_eq!(status.hosts, []);
    assert!(status.hosts_error.is_some());
}

fn address(host: &TestDaemon) -> String {
    host.address().to_owned()
}

/// Returns the addresses of all daemons in the status of a store, and those that it marks as its own.
fn known_hosts(store: &Store) -> (BTreeSet<String>, Vec<String>) {
    let hosts = store.status().unwrap().hosts;
    let own = hosts.iter().filter(|host| host.is_self).map(|host| host.address.clone()).collect();
    (hosts.into_iter().map(|host| host.address).collect(), own)
}

#[test]
fn host_loss_loses_only_data_without_replicas() {
    let etcd = Etcd::start(1);
    let [first, second, third] = [start_host(&etcd), start_host(&etcd), start_host(&etcd)];
    let stores = [first.connect(), second.connect()];
    let reader = third.connect();
    let reader_key = Key::new("own").unwrap();
    reader.put_state_dict(&reader_key, &step_part(1, 0, 1), &PutOptions::default()).unwrap();
    publish(&stores[..1], 1);
    // Writer 0 commits last, so its host, which survives, stores the manifest. The manifest tells what is lost.
    for writer in [1, 0] {
        let store = &stores[usize::try_from(writer).unwrap()];
        store.put_state_dict(&key(), &step_part(2, writer, 2), &options(2, writer, 2)).unwrap();
    }
    assert_eq!(reader.wait_for_version(&key(), 2, Duration::ZERO).unwrap().number, 2);
    drop(second);
    let mut last_error = String::new();
    // Until its session expires, the host is only unreachable.
    wait_until("the version of the lost host is dropped", || {
        let error = read_step(&reader, Some(2), 2).unwrap_err();
        last_error = error.to_string();
        assert!(matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Unreachable), "{error}");
        lost_writers(&error).as_deref() == Some("1")
    });
    assert_eq!(known_hosts(&reader).0, [address(&first), address(&third)].into());
    let expected = "the hosts that kept the archives of writers 1 have ended, and with them weight[64:128, 0:4096]";
    assert!(last_error.contains(expected), "{last_error}");
    // The previous version and the data of other hosts are still readable.
    assert_eq!(read_step(&reader, None, 1).unwrap(), 1);
    assert!(reader.get_state_dict(&reader_key, &GetOptions::default()).is_ok());
    // Further puts succeed.
    publish(&stores[..1], 3);
    assert_eq!(read_step(&reader, None, 1).unwrap(), 3);
}

/// Starts a daemon with its ledgers in etcd as a separate process.
fn start_process(etcd: &Etcd, folder: &Path, extra: &[&str]) -> DaemonProcess {
    let meta = etcd.url();
    let args = ["--meta", &meta, "--listen", "127.0.0.1:0", "--keep", "2"];
    DaemonProcess::start(folder, &[&args, extra].concat())
}

#[test]
fn lost_hosts_are_detected_and_resumed_host_sees_dropped_version() {
    let mut etcd = Etcd::start(3);
    let folders: Vec<_> = (0..3).map(|_| tempfile::tempdir().unwrap()).collect();
    let [first, stopped, killed] =
        [0, 1, 2].map(|host: usize| start_process(&etcd, folders[host].path(), &[]));
    let stores = [&first, &stopped, &killed].map(DaemonProcess::connect);
    let other = Key::new("other").unwrap();
    let get = |store: &Store, key: &Key| store.get_state_dict(key, &GetOptions::default());
    publish(&stores[..2], 1);
    // The killed host also holds a lease as a reader, which ends with it.
    let leased_key = Key::new("held").unwrap();
    let mut large = StateDict::new();
    large.insert("weight", Tensor::from_slice(&vec![7_u64; 2 << 20], &[2 << 20]).unwrap());
    stores[0].put_state_dict(&leased_key, &large, &PutOptions::default()).unwrap();
    let view = get(&stores[2], &leased_key).unwrap();
    for _ in 0..2 {
        stores[0].put_state_dict(&leased_key, &step_part(1, 0, 1), &PutOptions::default()).unwrap();
    }
    stores[2].put_state_dict(&other, &step_part(1, 0, 1), &options(1, 0, 1)).unwrap();
    assert_eq!(read_step(&stores[2], None, 2).unwrap(), 1);
    // Other writers do not wait for the put that is in flight on the stopped host.
    let put_options = options(2, 1, 2);
    stopped.signal(Signal::STOP);
    killed.signal(Signal::KILL);
    etcd.kill_member(0);
    std::thread::scope(|scope| {
        let delayed_put =
            scope.spawn(|| stores[1].put_state_dict(&key(), &step_part(2, 1, 2), &put_options));
        wait_until("the versions of both lost hosts are dropped", || {
            let results =
                [read_step(&stores[0], Some(1), 2).map(drop), get(&stores[0], &other).map(drop)];
            let mut errors = results.into_iter().map(Result::err);
            errors.all(|error| error.is_some_and(|error| lost_writers(&error).is_some()))
        });
        publish(&stores[..1], 3);
        stopped.signal(Signal::CONT);
        // The resumed host learns that its version was dropped, and continues.
        let error = delayed_put.join().unwrap().unwrap_err();
        assert!(error.refusal().is_some(), "{error}");
    });
    assert_eq!(read_step(&stores[1], None, 1).unwrap(), 3);
    let error = read_step(&stores[1], Some(1), 2).unwrap_err();
    assert_eq!(lost_writers(&error).as_deref(), Some("1"), "{error}");
    publish(&stores[..2], 4);
    assert_eq!(read_step(&stores[0], None, 2).unwrap(), 4);
    for store in &stores[..2] {
        wait_until("the daemons free lost versions and leases of lost readers", || {
            let memory = store.status().unwrap().memory;
            memory.used_bytes - memory.free_bytes - memory.retained_bytes < 28 << 20
        });
    }
    drop(view);
}

#[test]
fn put_takes_at_most_ten_etcd_requests() {
    let etcd = Etcd::start(1);
    let daemon = TestDaemon::with_options(1 << 30, |options| {
        options.meta = Some(etcd.url());
        options.keep = 100.try_into().unwrap();
    });
    let store = daemon.connect();
    let mut fewest = u64::MAX;
    for step in 1..=8 {
        let before = etcd.kv_requests();
        store.put_state_dict(&key(), &step_part(step, 0, 1), &options(step, 0, 1)).unwrap();
        // The minimum excludes the requests of the periodic maintenance, which may run during a put.
        fewest = fewest.min(etcd.kv_requests() - before);
    }
    assert!(fewest <= 10, "{fewest} requests");
}

#[test]
fn versions_in_bucket_outlive_hosts() {
    let (etcd, bucket) = (Etcd::start(1), tempfile::tempdir().unwrap());
    let url = format!("file:{}", bucket.path().display());
    let start_host = || {
        TestDaemon::with_options(1 << 30, |options| {
            options.meta = Some(etcd.url());
            options.bucket = Some(url.clone());
        })
    };
    let [first, second, third] = [start_host(), start_host(), start_host()];
    let trainers = [first.connect(), second.connect()];
    let generator = third.connect();
    // The put that completes the upload reports `stored`.
    let reports = publish_with_durability(&trainers, 1, Durability::Object);
    assert!(reports.iter().any(|report| report.stored), "{reports:?}");
    publish(&trainers, 2);
    drop(second);
    // The host was lost before version 2 was in the bucket. Version 1 is complete.
    wait_until("the version of the lost host is dropped", || {
        read_step(&generator, Some(2), 2)
            .is_err_and(|error| lost_writers(&error).as_deref() == Some("1"))
    });
    assert_eq!(read_step(&generator, None, 2).unwrap(), 1);
    assert!(third.metric(r#"tssd_restored_bytes_total{reason="no_replica"}"#) > 0.0);
    drop((first, trainers, generator, third));
    // All hosts and their ledgers in etcd are lost.
    let new_etcd = Etcd::start(1);
    let daemon = TestDaemon::with_options(1 << 30, |options| {
        options.meta = Some(new_etcd.url());
        options.bucket = Some(url.clone());
    });
    let store = daemon.connect();
    assert_eq!(store.keys(None).unwrap(), [key()]);
    assert_eq!(read_step(&store, None, 2).unwrap(), 1);
    publish_with_durability(std::slice::from_ref(&store), 2, Durability::Object);
    assert_eq!(read_step(&Store::connect(&url).unwrap(), None, 1).unwrap(), 2);
}

/// Hosts that restore an archive at once read each byte of the bucket about once, and exchange the rest.
#[test]
fn hosts_restore_versions_from_bucket_together() {
    let (etcd, bucket) = (Etcd::start(1), tempfile::tempdir().unwrap());
    let url = format!("file:{}", bucket.path().display());
    let elements = 96 << 20;
    let noise: Vec<u8> = (0..elements / 8_u64)
        .flat_map(|at| at.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes())
        .collect();
    let meta = TensorMeta::new(Dtype::Uint8, &[elements]).unwrap();
    let mut dict = StateDict::new();
    dict.insert("weight", Tensor::new(meta, Storage::from(noise), 0).unwrap());
    Store::connect(&url).unwrap().put_state_dict(&key(), &dict, &PutOptions::default()).unwrap();
    let start_host = || {
        TestDaemon::with_options(1 << 30, |options| {
            options.meta = Some(etcd.url());
            options.bucket = Some(url.clone());
        })
    };
    let get = |host: &TestDaemon| {
        host.connect().get_state_dict(&key(), &GetOptions::default()).unwrap().0
    };
    let restored =
        |host: &TestDaemon| host.metric(r#"tssd_restored_bytes_total{reason="no_replica"}"#);
    let hosts = [(); 4].map(|()| start_host());
    let start = std::sync::Barrier::new(hosts.len());
    std::thread::scope(|scope| {
        for host in &hosts {
            scope.spawn(|| {
                start.wait();
                assert!(get(host) == dict);
            });
        }
    });
    let total: f64 = hosts.iter().map(restored).sum();
    assert!((100e6..150e6).contains(&total), "{total}");
    assert!(hosts.iter().all(|host| restored(host) > 5e6));
    // A host that comes later gets nearly all from the others.
    let late = start_host();
    assert!(get(&late) == dict);
    assert!(restored(&late) < 10e6, "{}", restored(&late));
    // If the others are lost, the bucket has everything.
    drop(hosts);
    let last = start_host();
    drop(late);
    assert!(get(&last) == dict);
    assert!(restored(&last) > 90e6, "{}", restored(&last));
}

#[test]
fn reads_fall_back_to_bucket_if_host_does_not_respond() {
    let (etcd, bucket) = (Etcd::start(1), tempfile::tempdir().unwrap());
    let url = format!("file:{}", bucket.path().display());
    let folders = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let [first, stopped] =
        folders.each_ref().map(|folder| start_process(&etcd, folder.path(), &["--bucket", &url]));
    let reader = TestDaemon::with_options(1 << 30, |options| {
        options.meta = Some(etcd.url());
        options.bucket = Some(url.clone());
    });
    let trainers = [first.connect(), stopped.connect()];
    let generator = reader.connect();
    publish_with_durability(&trainers, 1, Durability::Object);
    assert_eq!(read_step(&generator, None, 2).unwrap(), 1);
    // As long as the hosts respond, the bytes come from them.
    let restored =
        |why: &str| reader.metric(&format!("tssd_restored_bytes_total{{reason=\"{why}\"}}"));
    assert!(reader.metric(r#"tssd_leased_bytes_total{source="origin"}"#) > 0.0);
    assert!(restored("unreachable") + restored("no_replica") < 1.0);
    publish_with_durability(&trainers, 2, Durability::Object);
    stopped.signal(Signal::STOP);
    // Until its session expires, the stopped host is listed but does not respond.
    assert_eq!(read_step(&generator, None, 2).unwrap(), 2);
    assert!(restored("unreachable") > 0.0);
    assert!(restored("no_replica") < 1.0);
    stopped.signal(Signal::CONT);
    publish_with_durability(&trainers, 3, Durability::Object);
    assert_eq!(read_step(&generator, None, 2).unwrap(), 3);
    // A reader that opened the version before the host was killed continues from the bucket.
    publish_with_durability(&trainers, 4, Durability::Object);
    let before = restored("unreachable");
    let opened = generator.open(&key(), &GetOptions::default()).unwrap();
    drop(stopped);
    let leaves: Vec<_> = opened.map(|leaf| leaf.unwrap()).collect();
    assert_eq!(leaves.len(), 2);
    assert!(restored("unreachable") > before);
    assert_eq!(read_step(&generator, None, 2).unwrap(), 4);
}

#[test]
fn daemons_authenticate_to_etcd_with_certificates_and_passwords() {
    let (authority, foreign_authority) = (CertificateAuthority::new(), CertificateAuthority::new());
    let member = authority.issue("etcd", "127.0.0.1", |_| {});
    // etcd would take a common name in the certificate as the user name.
    let without_name = |params: &mut rcgen::CertificateParams| {
        params.distinguished_name = rcgen::DistinguishedName::new();
    };
    let trusted = authority.issue("host", "host", without_name);
    let untrusted = foreign_authority.issue("other", "host", without_name);
    let mut etcd = Etcd::start(1);
    etcd.enable_auth(&member.ca, &member.cert, &member.key);

    let variable = |name: &str, path: &Path| format!("ETCDCTL_{name}={}", path.display());
    let with_certificate = |credentials: &Credentials, ca: &Path| {
        vec![
            variable("CACERT", ca),
            variable("CERT", &credentials.cert),
            variable("KEY", &credentials.key),
        ]
    };
    let with_user = |user: &str, mut variables: Vec<String>| {
        variables.push(format!("ETCDCTL_USER={user}"));
        variables
    };
    let complete = || with_certificate(&trusted, &trusted.ca);
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
    let other_prefix = format!("{url}/elsewhere");
    let cases = [
        (vec![], &url, 4, "transport error: "),
        (complete(), &url, 5, "permission denied"),
        (with_user("tssd:wrong", complete()), &url, 5, "authentication failed"),
        (with_user("tssd:tssd", complete()), &other_prefix, 5, "permission denied"),
        (
            with_user("tssd:tssd", with_certificate(&untrusted, &trusted.ca)),
            &url,
            4,
            "transport error: ",
        ),
        (with_user("tssd:tssd", with_certificate(&trusted, &untrusted.ca)), &url, 4, "certificate"),
        (with_user("tssd", complete()), &url, 5, "ETCDCTL_USER without `:PASSWORD`"),
        (
            complete().split_off(1)[..1].to_vec(),
            &url,
            5,
            "only one of ETCDCTL_CERT and ETCDCTL_KEY",
        ),
    ];
    // The daemon retries some of these errors for a while, so the cases run in parallel.
    std::thread::scope(|scope| {
        for (environment, meta, code, message) in &cases {
            scope.spawn(move || {
                let (exit_code, stderr) = serve(environment, meta);
                assert_eq!(exit_code, Some(*code), "{environment:?} {meta}: {stderr}");
                assert!(stderr.contains(message), "{environment:?} {meta}: {stderr}");
            });
        }
    });

    let environment = with_user("tssd:tssd", complete());
    let command: Vec<&str> =
        ["env"].into_iter().chain(environment.iter().map(String::as_str)).collect();
    let folders = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let arguments = ["--memory-limit", "64MB", "--listen", "127.0.0.1:0", "--meta", &url];
    let hosts = folders
        .each_ref()
        .map(|folder| DaemonProcess::start_by(&command, folder.path(), &arguments));
    let [first, second] = hosts.each_ref().map(DaemonProcess::connect);
    for step in 1..=3 {
        publish(&[first.clone(), second.clone()], step);
        assert_eq!(read_step(&second, None, 2).unwrap(), step);
        // Longer than the lifetime of an authentication token (1 second).
        std::thread::sleep(Duration::from_millis(2500));
    }
    // The daemons renew their sessions too: the lease of a session lasts 10 seconds.
    std::thread::sleep(Duration::from_secs(10));
    publish(&[first.clone(), second.clone()], 4);
    assert_eq!(read_step(&first, None, 2).unwrap(), 4);
}
