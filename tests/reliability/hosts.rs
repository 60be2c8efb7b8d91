//! Three hosts, each with a daemon, a member of etcd and trainers, and a bucket on a fourth: in network namespaces of
//! their own. Whatever is killed and whoever is cut off, nothing is lost that was acknowledged as durable.

mod cluster;

use std::collections::BTreeMap;

use serde_json::json;
use tssd_store::ledger::{Reason, Refusal};
use tssd_store::{Durability, ErrorKind};
use tssd_tests::dice::Dice;
use tssd_tests::network::Network;
use tssd_tests::proof::Proof;
use tssd_tests::steps::{eventually, publish, publish_as, read};

use self::cluster::{Cluster, HOSTS, Load};

/// How many rounds CI wants.
const ROUNDS: u64 = 10;

/// Rounds of one cluster: then nothing is left of it but the bucket.
const SESSION: u64 = 10;

/// The hosts' network, where the system lets one have it.
fn network() -> Option<Network> {
    // The bucket has a host of its own.
    let network = Network::new(u8::try_from(HOSTS + 1).unwrap());
    network.map_err(|why| eprintln!("left out: no network namespaces: {why}")).ok()
}

#[test]
#[ignore = "cargo xtask reliability runs it"]
fn whoever_is_killed_or_cut_off_takes_nothing_along_that_was_durable() {
    let proof = Proof::begin("hosts");
    let (mut dice, mut rounds) = (Dice::new(0x5EED), 0);
    let (mut faults, mut figures) = (BTreeMap::<String, u64>::new(), [0; 3]);
    while proof.goes_on(rounds, ROUNDS) {
        let Some(network) = network() else { return proof.end(json!({ "left out": true })) };
        let mut cluster = Cluster::new(network);
        let mut load = Load::begin(&cluster);
        for _ in 0..SESSION {
            *faults.entry(cluster.round(&mut load, &mut dice)).or_default() += 1;
            rounds += 1;
        }
        let acknowledged = load.end();
        cluster.outlive(&acknowledged);
        let more = [acknowledged.len(), acknowledged.durable(), acknowledged.checked];
        figures = std::array::from_fn(|at| figures[at] + more[at]);
    }
    let [acknowledged, durable, tensors] = figures;
    proof.end(json!({
        "rounds": rounds, "faults": faults, "versions acknowledged": acknowledged,
        "durable versions acknowledged": durable, "tensors read": tensors, "lost": 0, "mixed": 0,
    }));
}

/// Trainers on two hosts, and a generator on a third.
#[test]
#[ignore = "cargo xtask reliability runs it"]
fn what_a_killed_host_had_made_durable_is_read_elsewhere() {
    let proof = Proof::begin("hosts: what lasts");
    let Some(network) = network() else { return proof.end(json!({ "left out": true })) };
    let mut cluster = Cluster::new(network);
    let trainers = [cluster.connect(0), cluster.connect(1)];
    let generator = cluster.connect(2);
    let reports = publish_as(&trainers, 1, Durability::Object);
    assert!(reports.iter().any(|report| report.stored), "{reports:?}");
    assert_eq!(read(&generator, None, 2).unwrap(), 1);
    publish(&trainers, 2);
    cluster.kill_daemon(1);
    // The newest was not durable yet.
    eventually("a host that was killed is missed", || {
        let error = read(&generator, Some(2), 2).unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Unreachable), "{error}");
        matches!(error.refusal(), Some(Refusal::Dropped { reason: Reason::Lost { .. }, .. }))
    });
    assert_eq!(read(&generator, None, 2).unwrap(), 1);
    // Whoever has read nothing yet has the half of the killed host from the bucket, too.
    assert_eq!(read(&trainers[0], None, 2).unwrap(), 1);
    cluster.launch_daemon(1);
    let trainers = [trainers[0].clone(), cluster.connect(1)];
    publish_as(&trainers, 3, Durability::Object);
    cluster.kill_daemon(1);
    // This one was.
    for version in [None, Some(3)] {
        assert_eq!(read(&generator, version, 2).unwrap(), 3);
    }
    proof.end(json!({ "hosts": HOSTS, "killed": 2, "lost": 0 }));
}
