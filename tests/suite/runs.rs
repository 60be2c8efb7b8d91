//! Several runs of the same program: which versions a later run replaces, and which it must not.

use std::time::Duration;

use tssd_format::{StateDict, Tensor};
use tssd_store::blocking::Store;
use tssd_store::ledger::{EarlierRun, Obstacle, Refusal};
use tssd_store::{
    Durability, Error, ErrorKind, GetOptions, JobId, Key, PutOptions, PutReport, Rewind,
    SeenVersion, VersionInfo, WaitOptions,
};
use tssd_tests::test_daemon::TestDaemon;
use tssd_tests::training_steps::wait_until;

fn key() -> Key {
    Key::new("policy").unwrap()
}

fn dict(value: u32) -> StateDict {
    let mut dict = StateDict::new();
    dict.insert("weight", Tensor::from_slice(&[value, 2 * value], &[2]).unwrap());
    dict
}

/// Puts as a process of the run `run-VALUE`. All puts of this process without a job would be of one run.
fn put(store: &Store, number: u64, value: u32) -> Result<PutReport, Error> {
    put_with(store, number, value, PutOptions::default())
}

fn put_with(
    store: &Store,
    number: u64,
    value: u32,
    options: PutOptions,
) -> Result<PutReport, Error> {
    let job = Some(JobId(format!("run-{value}")));
    let options = PutOptions { version: Some(number), job, ..options };
    store.put_state_dict(&key(), &dict(value), &options)
}

fn durable() -> PutOptions {
    PutOptions { durability: Durability::Disk, ..PutOptions::default() }
}

fn read(store: &Store) -> (StateDict, u32, u64) {
    let (dict, report) = store.get_state_dict(&key(), &GetOptions::default()).unwrap();
    (dict, report.epoch, report.version)
}

fn earlier_run(error: &Error) -> EarlierRun {
    match error.refusal() {
        Some(Refusal::VersionNotNewer { earlier: Some(earlier), .. }) => earlier.clone(),
        _ => panic!("{error}"),
    }
}

/// Puts from a new connection until the daemon has seen the end of the earlier ones.
fn put_when_disconnected(store: &Store, number: u64, value: u32) -> PutReport {
    let mut report = None;
    wait_until("the daemon sees that the earlier run has disconnected", || {
        report = put(store, number, value).ok();
        report.is_some()
    });
    report.unwrap()
}

#[test]
fn second_run_replaces_versions_of_first_run() {
    let daemon = TestDaemon::new(1 << 30);
    let reader = daemon.connect();
    let first = daemon.connect();
    for number in 1..=5 {
        put(&first, number, 1).unwrap();
    }
    let seen = reader.head(&key()).unwrap().unwrap();
    assert_eq!(reader.wait_for_version(&key(), 1, Duration::ZERO).unwrap(), seen, "it is stale");
    let wait = WaitOptions {
        version: 1,
        after: Some(SeenVersion::from(&seen)),
        timeout: Duration::from_millis(10),
        ..WaitOptions::default()
    };
    let error = reader.wait_for_version_with(&key(), &wait).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert!(error.to_string().contains("after version 5 of epoch 0"), "{error}");

    // While a process of the first run is connected, its numbers are taken.
    let second = daemon.connect();
    for number in [1, 5] {
        let error = put(&second, number, 2).unwrap_err();
        let earlier = earlier_run(&error);
        assert_eq!(earlier.obstacle, Obstacle::Connected);
        assert_eq!(earlier.process.pid, std::process::id());
        let text = error.to_string();
        assert!(text.contains(&format!("run run-1 (process {}", std::process::id())), "{text}");
        assert!(text.contains("end that process, use a higher number or none"), "{text}");
    }
    drop(first);
    let report = put_when_disconnected(&second, 1, 2);
    assert_eq!((report.epoch, report.version), (1, 1));
    assert_eq!(read(&reader), (dict(2), 1, 1));
    let newest = reader.wait_for_version_with(&key(), &wait).unwrap();
    assert_eq!((newest.epoch, newest.number), (1, 1));
    assert_ne!(newest.process, seen.process);
    // A reader that knows the run waits for that.
    let of_run = |info: &VersionInfo| WaitOptions {
        run: info.process.as_ref().map(|process| process.run.clone()),
        timeout: Duration::from_millis(10),
        ..WaitOptions::default()
    };
    assert_eq!(reader.wait_for_version_with(&key(), &of_run(&newest)).unwrap(), newest);
    let error = reader.wait_for_version_with(&key(), &of_run(&seen)).unwrap_err();
    assert!(
        error.to_string().contains(&format!("of run {}", seen.process.unwrap().run)),
        "{error}"
    );
    // The second run goes on, and a third one with the same number too.
    put(&second, 2, 2).unwrap();
    drop(second);
    let report = put_when_disconnected(&daemon.connect(), 2, 3);
    assert_eq!((report.epoch, report.version), (2, 2));
}

#[test]
fn wait_ends_after_versions_in_memory_are_lost() {
    let daemon = TestDaemon::new(1 << 30);
    for number in 1..=3 {
        put(&daemon.connect(), number, 1).unwrap();
    }
    let seen = daemon.connect().head(&key()).unwrap().unwrap();
    drop(daemon);
    // A daemon that has started anew counts from the beginning.
    let daemon = TestDaemon::new(1 << 30);
    put(&daemon.connect(), 1, 2).unwrap();
    let wait_after = |after: SeenVersion| {
        let timeout = Duration::from_millis(10);
        let options = WaitOptions { after: Some(after), timeout, ..WaitOptions::default() };
        daemon.connect().wait_for_version_with(&key(), &options)
    };
    let newest = wait_after(SeenVersion::from(&seen)).unwrap();
    assert_eq!(newest.number, 1);
    for after in [SeenVersion::from(&newest), SeenVersion::from(seen.position())] {
        assert_eq!(wait_after(after).unwrap_err().kind(), ErrorKind::NotFound);
    }
}

#[test]
fn process_that_connects_again_continues_its_run() {
    let daemon = TestDaemon::new(1 << 30);
    let put = |number, value| {
        let options = PutOptions { version: Some(number), ..PutOptions::default() };
        daemon.connect().put_state_dict(&key(), &dict(value), &options)
    };
    daemon.connect().retain(&key(), 9.try_into().unwrap()).unwrap();
    for number in 1..=5 {
        put(number, 1).unwrap();
    }
    // A repeated put changes nothing, and a late one is refused: it does not retire newer versions.
    assert_eq!((put(3, 1).unwrap().epoch, put(3, 1).unwrap().version), (0, 3));
    assert!(matches!(put(3, 2).unwrap_err().refusal(), Some(Refusal::ContributionDiffers { .. })));
    assert_eq!(daemon.connect().versions(&key()).unwrap().len(), 5);
}

#[test]
fn earlier_run_is_kept_if_the_caller_asks_for_it() {
    let daemon = TestDaemon::new(1 << 30);
    for number in 1..=3 {
        put(&daemon.connect(), number, 1).unwrap();
    }
    let options = || PutOptions { rewind: Rewind::Never, ..PutOptions::default() };
    let error = put_with(&daemon.connect(), 1, 2, options()).unwrap_err();
    assert!(matches!(error.refusal(), Some(Refusal::VersionNotNewer { .. })), "{error}");
    assert_eq!(put_with(&daemon.connect(), 4, 2, options()).unwrap().epoch, 0);
    assert_eq!(put_when_disconnected(&daemon.connect(), 1, 3).epoch, 1);
}

#[test]
fn job_is_a_run_of_several_processes() {
    let daemon = TestDaemon::new(1 << 30);
    let put_part = |store: &Store, job: &str, writer: u32| {
        let options = PutOptions {
            version: Some(1),
            job: Some(JobId(job.to_owned())),
            writer: Some(writer),
            writers: Some("0-1".parse().unwrap()),
            ..PutOptions::default()
        };
        store.put_state_dict(&key(), &dict(1), &options)
    };
    let first = [daemon.connect(), daemon.connect()];
    for (writer, store) in (0..).zip(&first) {
        put_part(store, "run-1", writer).unwrap();
    }
    let [zero, one] = first;
    drop(zero);
    // One process of the job is left, and it repeats its put.
    let second = [daemon.connect(), daemon.connect()];
    let error = put_part(&second[0], "run-2", 0).unwrap_err();
    assert_eq!(earlier_run(&error).process.run.0, "run-1");
    assert!(put_part(&one, "run-1", 1).unwrap().visible, "the refused put has fenced no job");
    drop(one);
    wait_until("the daemon sees that the job has disconnected", || {
        put_part(&second[0], "run-2", 0).is_ok()
    });
    let report = put_part(&second[1], "run-2", 1).unwrap();
    assert_eq!((report.visible, report.epoch, report.version), (true, 1, 1));
}

#[test]
fn durable_versions_are_kept_until_the_caller_rewinds() {
    let folder = tempfile::tempdir().unwrap();
    let daemon = TestDaemon::with_root(folder.path());
    let first = daemon.connect();
    put_with(&first, 3, 1, durable()).unwrap();
    drop(first);
    let check_refusals = |store: &Store| {
        let mut error = put(store, 1, 2).unwrap_err();
        wait_until("the daemon sees that the first run has disconnected", || {
            error = put(store, 1, 2).unwrap_err();
            earlier_run(&error).obstacle == Obstacle::Durable
        });
        let text = error.to_string();
        assert!(
            text.contains("has put version 3, which is durable; use a higher number"),
            "{text}"
        );
        let error = put_with(store, 3, 2, durable()).unwrap_err();
        assert_eq!(earlier_run(&error).process.pid, std::process::id());
        // The same contents again are no error: the checkpoint is there.
        assert_eq!(put_with(store, 3, 1, durable()).unwrap().epoch, 0);
    };
    check_refusals(&daemon.connect());
    drop(daemon);
    // The record on disk names the run, also to a daemon that has started since, and to a process without a daemon.
    let daemon = TestDaemon::with_root(folder.path());
    check_refusals(&daemon.connect());
    drop(daemon);
    let store = Store::directory(folder.path()).unwrap();
    let error = put(&store, 1, 2).unwrap_err();
    assert_eq!(earlier_run(&error).obstacle, Obstacle::Durable);
    let rewind = PutOptions { version: Some(1), rewind: Rewind::Always, ..PutOptions::default() };
    assert_eq!(store.put_state_dict(&key(), &dict(2), &rewind).unwrap().epoch, 1);
}

#[test]
fn controller_knows_runs_of_proxy_daemon() {
    let controller = TestDaemon::new(1 << 30);
    let proxy = TestDaemon::with_controller(&controller);
    let (first, second) = (proxy.connect(), controller.connect());
    for number in 1..=3 {
        put(&first, number, 1).unwrap();
    }
    let error = put(&second, 1, 2).unwrap_err();
    assert_eq!(earlier_run(&error).obstacle, Obstacle::Connected);
    drop(first);
    assert_eq!(put_when_disconnected(&second, 1, 2).epoch, 1);
    put(&second, 2, 2).unwrap();
    // The other way round: the new run is at the proxy daemon.
    let third = proxy.connect();
    let error = put(&third, 1, 3).unwrap_err();
    assert_eq!(earlier_run(&error).obstacle, Obstacle::Connected);
    drop(second);
    assert_eq!(put_when_disconnected(&third, 1, 3).epoch, 2);
    assert_eq!(read(&controller.connect()), (dict(3), 2, 1));
}

#[cfg(feature = "etcd")]
#[test]
fn daemons_of_several_hosts_know_connected_runs() {
    let etcd = tssd_tests::etcd::Etcd::start(1);
    let start_host = || {
        TestDaemon::with_options(1 << 30, |options| {
            options.meta = Some(etcd.url());
        })
    };
    let hosts = [start_host(), start_host()];
    let (first, second) = (hosts[0].connect(), hosts[1].connect());
    for number in 1..=3 {
        put(&first, number, 1).unwrap();
    }
    let after = second.head(&key()).unwrap().as_ref().map(SeenVersion::from);
    let error = put(&second, 1, 2).unwrap_err();
    assert_eq!(earlier_run(&error).obstacle, Obstacle::Connected);
    drop(first);
    assert_eq!(put_when_disconnected(&second, 1, 2).epoch, 1);
    let reader = hosts[0].connect();
    let wait = WaitOptions { version: 1, after, ..WaitOptions::default() };
    let newest = reader.wait_for_version_with(&key(), &wait).unwrap();
    assert_eq!((newest.epoch, newest.number), (1, 1));
}
