//! Test support: crash worlds, schedules, faulty backends, conformance suites.

#[cfg(test)]
#[cfg(feature = "object")]
mod bucket_faults;
#[cfg(test)]
mod clock;
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

#[cfg(all(test, feature = "etcd"))]
#[path = "../../tests/src/etcd.rs"]
#[expect(dead_code, unreachable_pub, reason = "other tests use all of it")]
pub(crate) mod etcd_server;
#[cfg(all(test, feature = "etcd"))]
#[path = "../../tests/src/host.rs"]
#[expect(unreachable_pub, reason = "other tests use it")]
pub(crate) mod host;
