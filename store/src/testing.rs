//! Test support: simulated crashes, schedules, faulty backends and conformance suites.

#[cfg(test)]
#[cfg(feature = "object")]
mod bucket_fault_tests;
#[cfg(test)]
mod clock_jumps;
#[cfg(test)]
pub(crate) mod crash;
#[cfg(test)]
#[cfg(feature = "object")]
pub(crate) mod faulty_bucket;
#[cfg(test)]
mod faulty_metadata;
#[cfg(test)]
mod metadata_conformance;
#[cfg(all(target_os = "linux", feature = "shuttle"))]
pub mod schedules;
#[cfg(test)]
pub(crate) mod simulated_disk;
#[cfg(test)]
mod volume_conformance;

#[cfg(all(test, feature = "etcd"))]
#[path = "../../tests/src/etcd.rs"]
#[expect(dead_code, unreachable_pub, reason = "other tests use all of it")]
pub(crate) mod etcd_server;
#[cfg(all(test, feature = "etcd"))]
#[path = "../../tests/src/host.rs"]
#[expect(unreachable_pub, reason = "other tests use it")]
pub(crate) mod host;
