//! The environment of the scenarios, and the archives that their writers put.

use std::collections::BTreeMap;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use tssd_format::{StateDict, TorchStoreStateDict};

use crate::io::environment::Environment;
use crate::ledger::{ArchiveDigest, Timestamp};

/// An environment with a clock that the test advances, and consecutive numbers as random numbers.
#[derive(Default)]
pub(crate) struct TestEnvironment {
    clock: AtomicU64,
    next: AtomicU64,
}

impl TestEnvironment {
    /// Advances the clock.
    pub(crate) fn advance(&self, span: Duration) {
        self.clock.fetch_add(u64::try_from(span.as_millis()).unwrap(), Ordering::SeqCst);
    }
}

impl Environment for TestEnvironment {
    fn now(&self) -> Timestamp {
        Timestamp(self.clock.load(Ordering::SeqCst))
    }

    fn random_id(&self) -> u128 {
        self.next.fetch_add(1, Ordering::SeqCst).into()
    }
}

/// Number of different values.
const VALUES: u64 = 16;

/// Returns all archives, by writer and value.
///
/// They are encoded once: encoding takes longer than a schedule.
fn archives() -> &'static BTreeMap<(u32, u64), Bytes> {
    static ARCHIVES: OnceLock<BTreeMap<(u32, u64), Bytes>> = OnceLock::new();
    ARCHIVES.get_or_init(|| {
        let encoded = |(writer, value)| {
            let mut dict = StateDict::new();
            dict.insert(format!("value of {writer}"), i64::try_from(value).unwrap());
            let encoded = TorchStoreStateDict::from_state_dict(&dict).unwrap();
            ((writer, value), encoded.as_bytes().clone())
        };
        (0..2)
            .flat_map(|writer| (0..VALUES).map(move |value| (writer, value)))
            .map(encoded)
            .collect()
    })
}

/// Returns the archive that a writer puts for a value.
pub(crate) fn archive(writer: u32, value: u64) -> &'static Bytes {
    &archives()[&(writer, value)]
}

/// Returns the digest of the archive that a writer puts for a value.
pub(crate) fn digest_of(writer: u32, value: u64) -> ArchiveDigest {
    static DIGESTS: OnceLock<BTreeMap<(u32, u64), ArchiveDigest>> = OnceLock::new();
    let digests =
        || archives().iter().map(|(put, bytes)| (*put, ArchiveDigest::compute(bytes))).collect();
    DIGESTS.get_or_init(digests)[&(writer, value)]
}

/// Returns the writer and the value of an archive, or `None` if the bytes are no such archive.
pub(crate) fn value_of(bytes: &[u8]) -> Option<(u32, u64)> {
    archives().iter().find(|(_, put)| ***put == *bytes).map(|(put, _)| *put)
}
