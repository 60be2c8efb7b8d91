//! Three hosts with a daemon, an etcd member and trainers each, and a fourth with the bucket.
//!
//! Each host is a network namespace. Whatever is killed or disconnected, no version is lost that
//! was acknowledged as durable.

mod cluster;

use std::collections::BTreeMap;

use serde_json::json;
use tssd_store::ledger::{Reason, Refusal};
use tssd_store::{Durability, ErrorKind};
use tssd_tests::campaign::Campaign;
use tssd_tests::network::Network;
use tssd_tests::rng::SeededRng;
use tssd_tests::training_steps::{publish, publish_with_durability, read_step, wait_until};

use self::cluster::{Cluster, FaultKind, HOSTS, Workload};

/// Creates the network of the hosts. Returns `None` if the system does not allow it.
fn network() -> Option<Network> {
    // The bucket has a host of its own.
    let network = Network::new(u8::try_from(HOSTS + 1).unwrap());
    network.map_err(|reason| eprintln!("left out: no network namespaces: {reason}")).ok()
}

#[test]
#[ignore = "cargo xtask reliability runs it"]
fn durable_versions_survive_host_faults() {
    let campaign = Campaign::start("hosts");
    let (mut rng, mut rounds) = (SeededRng::new(0x5EED), 0);
    let (mut faults, mut figures) = (BTreeMap::<&str, u64>::new(), [0; 3]);
    while campaign.should_continue(rounds, 1) {
        let Some(network) = network() else { return campaign.finish(json!({ "left out": true })) };
        let mut cluster = Cluster::new(network);
        let mut load = Workload::start(&cluster);
        for kind in FaultKind::ALL {
            *faults.entry(cluster.run_round(&mut load, kind, &mut rng)).or_default() += 1;
        }
        rounds += FaultKind::ALL.len() as u64;
        // Only the bucket is kept.
        let acknowledged = load.finish();
        cluster.check_after_total_loss(&acknowledged);
        let counts =
            [acknowledged.len(), acknowledged.durable_count(), acknowledged.compared_tensors];
        figures = std::array::from_fn(|at| figures[at] + counts[at]);
    }
    let [acknowledged, durable, tensors] = figures;
    campaign.finish(json!({
        "rounds": rounds, "faults": faults, "versions acknowledged": acknowledged,
        "durable versions acknowledged": durable, "tensors read": tensors, "lost": 0, "mixed": 0,
    }));
}

/// Trainers run on two hosts, and a generator on the third.
#[test]
#[ignore = "cargo xtask reliability runs it"]
fn durable_versions_of_a_killed_host_are_readable_on_other_hosts() {
    let campaign = Campaign::start("hosts: what lasts");
    let Some(network) = network() else { return campaign.finish(json!({ "left out": true })) };
    let mut cluster = Cluster::new(network);
    let trainers = [cluster.connect(0), cluster.connect(1)];
    let generator = cluster.connect(2);
    let reports = publish_with_durability(&trainers, 1, Durability::Object);
    assert!(reports.iter().any(|report| report.stored), "{reports:?}");
    assert_eq!(read_step(&generator, None, 2).unwrap(), 1);
    publish(&trainers, 2);
    cluster.kill_daemon(1);
    // The newest version was not durable yet.
    wait_until("a host that was killed is missed", || {
        let error = read_step(&generator, Some(2), 2).unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Unreachable), "{error}");
        matches!(error.refusal(), Some(Refusal::Dropped { reason: Reason::Lost { .. }, .. }))
    });
    assert_eq!(read_step(&generator, None, 2).unwrap(), 1);
    // A reader without cached data also gets the part of the killed host from the bucket.
    assert_eq!(read_step(&trainers[0], None, 2).unwrap(), 1);
    cluster.start_daemon(1);
    let trainers = [trainers[0].clone(), cluster.connect(1)];
    publish_with_durability(&trainers, 3, Durability::Object);
    cluster.kill_daemon(1);
    // This version was durable.
    for version in [None, Some(3)] {
        assert_eq!(read_step(&generator, version, 2).unwrap(), 3);
    }
    campaign.finish(json!({ "hosts": HOSTS, "killed": 2, "lost": 0 }));
}
