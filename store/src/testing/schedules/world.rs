//! What a store takes from the world, and what writers put.

use std::collections::BTreeMap;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use tssd_format::{StateDict, TorchStoreStateDict};

use crate::io::environment::Environment;
use crate::ledger::{Digest, Timestamp};

/// A clock that is told to go on, and numbers in their order.
#[derive(Default)]
pub(crate) struct World {
    clock: AtomicU64,
    next: AtomicU64,
}

impl World {
    pub(crate) fn pass(&self, span: Duration) {
        self.clock.fetch_add(u64::try_from(span.as_millis()).unwrap(), Ordering::SeqCst);
    }
}

impl Environment for World {
    fn now(&self) -> Timestamp {
        Timestamp(self.clock.load(Ordering::SeqCst))
    }

    fn random(&self) -> u128 {
        self.next.fetch_add(1, Ordering::SeqCst).into()
    }
}

/// How many values there are.
const VALUES: u64 = 16;

/// All archives that anybody writes, by writer and value. To encode them each time would take longer than a
/// schedule.
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

/// What a writer puts.
pub(crate) fn archive(writer: u32, value: u64) -> &'static Bytes {
    &archives()[&(writer, value)]
}

/// What a writer says of what it puts.
pub(crate) fn digest_of(writer: u32, value: u64) -> Digest {
    static DIGESTS: OnceLock<BTreeMap<(u32, u64), Digest>> = OnceLock::new();
    let digests = || archives().iter().map(|(put, bytes)| (*put, Digest::of(bytes))).collect();
    DIGESTS.get_or_init(digests)[&(writer, value)]
}

/// Which writer's which value these bytes are, if they are any.
pub(crate) fn value_of(bytes: &[u8]) -> Option<(u32, u64)> {
    archives().iter().find(|(_, put)| ***put == *bytes).map(|(put, _)| *put)
}
