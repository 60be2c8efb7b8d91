//! Three hosts with a daemon, an etcd member and trainers each, and a fourth with the bucket.
//!
//! Each host is a network namespace. Whatever is killed or disconnected, no version is lost that
//! was acknowledged as durable.

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

/// Number of rounds in CI.
const ROUNDS: u64 = 10;

/// Rounds with one cluster. After them only the bucket is kept.
const ROUNDS_PER_CLUSTER: u64 = 10;

/// Creates the network of the hosts. Returns `None` if the system does not allow it.
fn network() -> Option<Network> {
    // The bucket has a host of its own.
    let network = Network::new(u8::try_from(HOSTS + 1).unwrap());
    network.map_err(|reason| eprintln!("left out: no network namespaces: {reason}")).ok()
}

#[test]
#[ignore = "cargo xtask reliability runs it"]
fn durable_versions_survive_host_faults() {
    let campaign = Proof::begin("hosts");
    let (mut rng, mut rounds) = (Dice::new(0x5EED), 0);
    let (mut faults, mut figures) = (BTreeMap::<String, u64>::new(), [0; 3]);
    while campaign.goes_on(rounds, ROUNDS) {
        let Some(network) = network() else { return campaign.end(json!({ "left out": true })) };
        let mut cluster = Cluster::new(network);
        let mut load = Load::begin(&cluster);
        for _ in 0..ROUNDS_PER_CLUSTER {
            *faults.entry(cluster.round(&mut load, &mut rng)).or_default() += 1;
            rounds += 1;
        }
        let acknowledged = load.end();
        cluster.outlive(&acknowledged);
        let counts = [acknowledged.len(), acknowledged.durable(), acknowledged.checked];
        figures = std::array::from_fn(|at| figures[at] + counts[at]);
    }
    let [acknowledged, durable, tensors] = figures;
    campaign.end(json!({
        "rounds": rounds, "faults": faults, "versions acknowledged": acknowledged,
        "durable versions acknowledged": durable, "tensors read": tensors, "lost": 0, "mixed": 0,
    }));
}

/// Trainers run on two hosts, and a generator on the third.
#[test]
#[ignore = "cargo xtask reliability runs it"]
fn durable_versions_of_a_killed_host_are_readable_on_other_hosts() {
    let campaign = Proof::begin("hosts: what lasts");
    let Some(network) = network() else { return campaign.end(json!({ "left out": true })) };
    let mut cluster = Cluster::new(network);
    let trainers = [cluster.connect(0), cluster.connect(1)];
    let generator = cluster.connect(2);
    let reports = publish_as(&trainers, 1, Durability::Object);
    assert!(reports.iter().any(|report| report.stored), "{reports:?}");
    assert_eq!(read(&generator, None, 2).unwrap(), 1);
    publish(&trainers, 2);
    cluster.kill_daemon(1);
    // The newest version was not durable yet.
    eventually("a host that was killed is missed", || {
        let error = read(&generator, Some(2), 2).unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Unreachable), "{error}");
        matches!(error.refusal(), Some(Refusal::Dropped { reason: Reason::Lost { .. }, .. }))
    });
    assert_eq!(read(&generator, None, 2).unwrap(), 1);
    // A reader without cached data also gets the part of the killed host from the bucket.
    assert_eq!(read(&trainers[0], None, 2).unwrap(), 1);
    cluster.launch_daemon(1);
    let trainers = [trainers[0].clone(), cluster.connect(1)];
    publish_as(&trainers, 3, Durability::Object);
    cluster.kill_daemon(1);
    // This version was durable.
    for version in [None, Some(3)] {
        assert_eq!(read(&generator, version, 2).unwrap(), 3);
    }
    campaign.end(json!({ "hosts": HOSTS, "killed": 2, "lost": 0 }));
}
