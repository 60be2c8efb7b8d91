//! Ledgers as records of a meta store.
//!
//! Each state is a record. The next state is the record with the next number, created only if that does not exist.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::error::{Error, ErrorKind, Result};
use crate::io::disk::TEMPORARY_PREFIX;
use crate::io::sync::{Lock, MutexGuard};
use crate::key::Key;
use crate::ledger::State;
use crate::metadata::backend::{MetaStore, Watch};

/// Maximum number of attempts to read, if the record to read is deleted meanwhile.
const MAX_READ_ATTEMPTS: u32 = 16;

/// Maximum number of records to read one after the other. Beyond that, a listing finds the newest record sooner.
const MAX_SEQUENTIAL_READS: usize = 16;

/// Maximum number of keys whose newest record is cached.
const MAX_CACHED_KEYS: usize = 64;

/// The records of all keys.
#[derive(Clone)]
pub(crate) struct Records {
    pub(super) meta: Arc<dyn MetaStore>,
    /// By key, the number of the newest record that is known to be durable.
    synced: Arc<Lock<BTreeMap<Key, u64>>>,
    /// By key, the newest record that was read or created, for a meta store with a grace period.
    cache: Arc<Lock<BTreeMap<Key, Record>>>,
}

/// A record of a ledger: its number and its state, and the other files in the folder of the records.
#[derive(Clone)]
pub(crate) struct Record {
    pub(super) number: u64,
    pub(crate) state: State,
    /// Names of older records, and of temporary files of processes that died.
    stale: Vec<String>,
    /// Whether a newer record may exist that could not be made durable.
    is_in_doubt: bool,
    /// A time before the record was read.
    read_at: Instant,
}

impl Default for Record {
    fn default() -> Self {
        let (number, state, stale) = (0, State::default(), Vec::new());
        Self { number, state, stale, is_in_doubt: false, read_at: Instant::now() }
    }
}

impl Record {
    /// Whether the key has neither records nor temporary files.
    pub(super) fn is_blank(&self) -> bool {
        self.number == 0 && self.stale.is_empty()
    }
}

impl Records {
    pub(crate) fn new(meta: Arc<dyn MetaStore>) -> Self {
        Self { meta, synced: Arc::default(), cache: Arc::default() }
    }

    /// Makes a record durable. The process that created it may have been killed before it was durable.
    pub(super) async fn sync(&self, key: &Key, record: &Record) -> Result<()> {
        if record.number > 0 && self.synced().get(key) != Some(&record.number) {
            self.meta.sync(&folder(key)).await?;
            self.synced().insert(key.clone(), record.number);
        }
        Ok(())
    }

    fn synced(&self) -> MutexGuard<'_, BTreeMap<Key, u64>> {
        self.synced.lock()
    }

    /// Loads the newest record of a key. A key without records has an empty one.
    pub(crate) async fn load(&self, key: &Key) -> Result<Record> {
        match self.meta.grace_period() {
            None => self.load_listed(key).await,
            Some(grace) => self.load_newest(key, grace).await,
        }
    }

    /// Loads the newest record from a meta store with a grace period.
    ///
    /// Starts at the newest record that is cached or listed, and reads the next records until one has no successor.
    async fn load_newest(&self, key: &Key, grace: Duration) -> Result<Record> {
        let mut cached = self.cache().get(key).cloned();
        loop {
            let read_at = Instant::now();
            let cached = cached.take().filter(|cached| cached.read_at.elapsed() < grace / 2);
            let mut record = match cached {
                Some(cached) => cached,
                None => self.load_listed(key).await?,
            };
            // Any successor of this record was created after this time.
            let since = record.read_at;
            let mut is_newest = false;
            for _ in 0..MAX_SEQUENTIAL_READS {
                let name = record_name(key, record.number.saturating_add(1));
                let Some(next) = self.meta.get(&name).await? else {
                    is_newest = true;
                    break;
                };
                record.stale.extend((record.number > 0).then(|| file_name(record.number)));
                record.state = decode_record(&name, &next)?;
                record.number += 1;
            }
            // Within the grace period no successor can have been deleted, so none was missed.
            if is_newest && since.elapsed() < grace {
                record.read_at = read_at;
                self.store_in_cache(key, &record);
                return Ok(record);
            }
        }
    }

    /// Caches a record, from which its successors can be found.
    fn store_in_cache(&self, key: &Key, record: &Record) {
        let mut cache = self.cache();
        if cache.len() >= MAX_CACHED_KEYS {
            cache.pop_first();
        }
        cache.insert(key.clone(), record.clone());
    }

    /// Watches for changes of the records of a key, until the timeout.
    pub(super) fn watch(&self, key: &Key, timeout: Duration) -> Box<dyn Watch> {
        self.meta.watch(&folder(key), timeout)
    }

    fn cache(&self) -> MutexGuard<'_, BTreeMap<Key, Record>> {
        self.cache.lock()
    }

    /// Loads the newest listed record of a key.
    async fn load_listed(&self, key: &Key) -> Result<Record> {
        let (folder, read_at) = (folder(key), Instant::now());
        for _ in 0..MAX_READ_ATTEMPTS {
            let mut records = self.meta.list_records(&folder).await?;
            records.retain(|(name, _)| is_ledger_file(name));
            let newest = records.iter_mut().rev().find_map(|(name, record)| {
                record_number(name).map(|number| (number, record.take()))
            });
            let mut names: Vec<String> = records.into_iter().map(|(name, _)| name).collect();
            let Some((number, record)) = newest else {
                return Ok(Record { stale: names, read_at, ..Record::default() });
            };
            let name = record_name(key, number);
            let record = match record {
                Some(record) => record,
                // A process that has created a newer record since may have deleted this one: list again.
                None => match self.meta.get(&name).await? {
                    Some(record) => record,
                    None => continue,
                },
            };
            let state = decode_record(&name, &record)?;
            names.retain(|name| *name != file_name(number));
            return Ok(Record { number, state, stale: names, is_in_doubt: false, read_at });
        }
        Err(Error::new(
            ErrorKind::Corrupt,
            format_args!("the records in `{folder}` cannot be read"),
        ))
    }

    /// Creates the next record, unless the state has not changed. Returns `false` if another process has created it.
    ///
    /// After an error, the record may exist nevertheless. The next record that is created then replaces it.
    pub(super) async fn append(&self, key: &Key, last: &mut Record, next: State) -> Result<bool> {
        if last.state == next && !last.is_in_doubt {
            // The caller relies on a durable state after this call.
            return self.sync(key, last).await.map(|()| true);
        }
        let number = last.number.checked_add(1).ok_or_else(|| {
            Error::new(ErrorKind::Corrupt, format_args!("key `{key}` has no record numbers left"))
        })?;
        let name = record_name(key, number);
        let record = encode_record(&name, &next).map_err(|error| {
            Error::new(ErrorKind::Invalid, format_args!("key `{key}`: {error}"))
        })?;
        let previous = (last.number > 0).then(|| file_name(last.number));
        let next_name = file_name(number);
        let created =
            self.meta.create_next(&folder(key), previous.as_deref(), &next_name, record).await;
        if created.is_err() {
            last.stale.extend([last.number, number].map(file_name));
            (last.number, last.is_in_doubt) = (number, true);
        }
        if !created? {
            self.cache().remove(key);
            if self.meta.excludes_other_processes() {
                // The lock excludes other processes, so none of them may have created the record.
                let text = format_args!("key `{key}` was written without its lock; try again");
                return Err(Error::new(ErrorKind::Busy, text));
            }
            return Ok(false);
        }
        if !self.is_valid_successor(key, last).await? {
            self.cache().remove(key);
            let text =
                format_args!("key `{key}`: a step of its ledger took longer than others wait");
            return Err(Error::new(ErrorKind::Busy, text));
        }
        self.synced().insert(key.clone(), number);
        // The previous record stays, for readers that have just listed it.
        let stale = std::mem::take(&mut last.stale);
        let mut stale = self.meta.delete_superseded(&folder(key), stale).await;
        stale.extend((last.number > 0).then(|| file_name(last.number)));
        *last = Record { number, state: next, stale, is_in_doubt: false, read_at: last.read_at };
        if self.meta.grace_period().is_some() {
            self.store_in_cache(key, last);
        }
        Ok(true)
    }

    /// Whether the record that was just created is the first one with its number.
    ///
    /// If the meta store cannot exclude other processes, a record with this number may have existed and been deleted.
    /// The oldest records are deleted first: as long as the previous record exists, none of its successors was deleted.
    /// The first record has no previous one, so only the time since the read decides.
    async fn is_valid_successor(&self, key: &Key, previous: &Record) -> Result<bool> {
        let Some(grace) = self.meta.grace_period() else { return Ok(true) };
        if previous.read_at.elapsed() >= grace / 2 {
            return Ok(false);
        }
        let is_first = previous.number == 0;
        Ok(is_first || self.meta.get(&record_name(key, previous.number)).await?.is_some())
    }

    /// Returns the corrupt records of a key: name and error of each.
    pub(crate) async fn corrupt_records(&self, key: &Key) -> Result<Vec<(String, Error)>> {
        let mut damaged = Vec::new();
        for number in self.meta.list(&folder(key)).await?.iter().filter_map(|it| record_number(it))
        {
            let name = record_name(key, number);
            let found = self.meta.get(&name).await.and_then(|record| {
                // `None`: the record was deleted meanwhile.
                record.map_or(Ok(()), |record| decode_record(&name, &record).map(drop))
            });
            damaged.extend(found.err().map(|error| (name, error)));
        }
        Ok(damaged)
    }

    /// Returns the keys that have a folder, in no particular order.
    pub(crate) async fn keys(&self) -> Result<Vec<Key>> {
        let mut keys = Vec::new();
        let mut folders = vec![String::new()];
        while let Some(folder) = folders.pop() {
            for name in self.meta.list(&folder).await? {
                let path = if folder.is_empty() { name } else { format!("{folder}/{name}") };
                match Key::from_path(&path) {
                    Some(key) => keys.push(key),
                    // The first folders of a long key end with `%`.
                    None => folders.extend(path.ends_with('%').then_some(path)),
                }
            }
        }
        Ok(keys)
    }
}

/// Version of the records that this crate reads and writes.
pub(crate) const RECORD_VERSION: u32 = 1;

/// The first line of a record. Spec: `spec/reshard.md`, R-058.
#[derive(Serialize, Deserialize)]
struct RecordBody<S> {
    record_version: u32,
    state: S,
}

/// The first member of the first line, which every version of records has.
#[derive(Deserialize)]
struct RecordHeader {
    record_version: u32,
}

/// Encodes a record: version and state, and on a second line a checksum over the name and the first line.
///
/// The checksum detects corruption, and records of another key.
fn encode_record(name: &str, state: &State) -> serde_json::Result<Vec<u8>> {
    let mut record = serde_json::to_vec(&RecordBody { record_version: RECORD_VERSION, state })?;
    let sum = record_checksum(name, &record);
    record.extend_from_slice(format!("\n{sum}\n").as_bytes());
    Ok(record)
}

/// Decodes the record `name`, and verifies its checksum and its version.
///
/// # Errors
///
/// - `Corrupt` if the checksum is wrong, or if the state is malformed.
/// - `Unsupported` if another release wrote the record.
fn decode_record(name: &str, record: &[u8]) -> Result<State> {
    let failed = |kind: ErrorKind, why: &dyn std::fmt::Display| {
        Error::new(kind, format_args!("ledger record `{name}`: {why}"))
    };
    let mut lines = record.splitn(2, |byte| *byte == b'\n');
    let (body, checksum) = (lines.next().unwrap_or_default(), lines.next().unwrap_or_default());
    if checksum != format!("{}\n", record_checksum(name, body)).as_bytes() {
        return Err(failed(
            ErrorKind::Corrupt,
            &"its checksum does not match its name and contents",
        ));
    }
    let Ok(RecordHeader { record_version }) = serde_json::from_slice(body) else {
        let why = "it has no record version, so a draft of tssd wrote it; put the versions again \
                   into an empty directory, or below a new prefix";
        return Err(failed(ErrorKind::Unsupported, &why));
    };
    if record_version != RECORD_VERSION {
        let why = format_args!(
            "record version {record_version} is not supported, only version {RECORD_VERSION}; use \
             the tssd release that wrote this store, or a later one"
        );
        return Err(failed(ErrorKind::Unsupported, &why));
    }
    let body: RecordBody<State> =
        serde_json::from_slice(body).map_err(|error| failed(ErrorKind::Corrupt, &error))?;
    Ok(body.state)
}

fn record_checksum(name: &str, body: &[u8]) -> String {
    let mut crc = crc32fast::Hasher::new();
    crc.update(name.as_bytes());
    crc.update(body);
    format!("{:08x}", crc.finalize())
}

/// Whether a name in the folder of records is a record or a temporary file. Other files do not belong to the ledger.
fn is_ledger_file(name: &str) -> bool {
    record_number(name).is_some() || name.starts_with(TEMPORARY_PREFIX)
}

/// Returns the number of a record from the last component of its name.
fn record_number(name: &str) -> Option<u64> {
    let digits = name.strip_suffix(".json").filter(|digits| digits.len() == 20)?;
    digits.parse().ok().filter(|number| format!("{number:020}") == digits)
}

fn file_name(number: u64) -> String {
    format!("{number:020}.json")
}

/// Returns the folder of the records of a key.
fn folder(key: &Key) -> String {
    format!("{}/.ledger", key.to_path())
}

fn record_name(key: &Key, number: u64) -> String {
    format!("{}/{}", folder(key), file_name(number))
}

#[cfg(test)]
mod tests {
    use std::any::Any;
    use std::num::NonZeroU32;
    use std::sync::atomic::{AtomicU64, Ordering};

    use async_trait::async_trait;

    use super::*;
    use crate::metadata::backend::MemoryMeta;
    use crate::metadata::{Ledgers, SharedLedgers, save};

    /// A meta store with a grace period that counts its requests.
    #[derive(Default)]
    struct CountingMeta {
        inner: MemoryMeta,
        grace: Option<Duration>,
        /// How long a listing takes.
        list_delay: Lock<Duration>,
        list_count: AtomicU64,
        sync_count: AtomicU64,
        retired: Lock<Vec<String>>,
    }

    impl CountingMeta {
        fn with_long_grace() -> Arc<Self> {
            Self::with_grace(Duration::from_hours(1))
        }

        fn with_grace(grace: Duration) -> Arc<Self> {
            Arc::new(Self { grace: Some(grace), ..Self::default() })
        }

        fn list_count(&self) -> u64 {
            self.list_count.load(Ordering::SeqCst)
        }

        fn sync_count(&self) -> u64 {
            self.sync_count.load(Ordering::SeqCst)
        }

        /// Returns the numbers of the records that were retired since the last call.
        fn take_retired(&self) -> Vec<u64> {
            let retired = std::mem::take(&mut *self.retired.lock());
            retired.iter().map(|name| record_number(name).unwrap()).collect()
        }
    }

    #[async_trait]
    impl MetaStore for CountingMeta {
        async fn create(&self, name: &str, record: Vec<u8>) -> Result<bool> {
            self.inner.create(name, record).await
        }

        async fn sync(&self, name: &str) -> Result<()> {
            self.sync_count.fetch_add(1, Ordering::SeqCst);
            self.inner.sync(name).await
        }

        async fn get(&self, name: &str) -> Result<Option<Vec<u8>>> {
            self.inner.get(name).await
        }

        async fn list(&self, name: &str) -> Result<Vec<String>> {
            self.list_count.fetch_add(1, Ordering::SeqCst);
            let delay = *self.list_delay.lock();
            tokio::time::sleep(delay).await;
            self.inner.list(name).await
        }

        async fn delete(&self, name: &str) -> Result<()> {
            self.inner.delete(name).await
        }

        async fn delete_superseded(&self, _folder: &str, names: Vec<String>) -> Vec<String> {
            self.retired.lock().extend(names);
            Vec::new()
        }

        fn grace_period(&self) -> Option<Duration> {
            self.grace
        }

        fn excludes_other_processes(&self) -> bool {
            self.grace.is_none()
        }

        async fn lock(&self, name: &str) -> Result<Box<dyn Any + Send>> {
            self.inner.lock(name).await
        }

        async fn has_ended(&self, name: &str) -> Result<bool> {
            self.inner.has_ended(name).await
        }
    }

    fn state_with_keep(keep: u32) -> State {
        State::with_keep(NonZeroU32::new(keep).unwrap())
    }

    fn key() -> Key {
        Key::new("policy").unwrap()
    }

    /// Creates the next record of a key.
    async fn append_next(records: &Records, key: &Key, keep: u32) {
        let mut last = records.load(key).await.unwrap();
        assert!(records.append(key, &mut last, state_with_keep(keep)).await.unwrap());
    }

    /// Returns a record with this first line, and a checksum that matches.
    fn record_of(name: &str, body: &str) -> Vec<u8> {
        format!("{body}\n{}\n", record_checksum(name, body.as_bytes())).into_bytes()
    }

    #[test]
    fn record_of_other_version_is_unsupported() {
        let (name, state) = ("k/.ledger/1.json", state_with_keep(3));
        let encoded = encode_record(name, &state).unwrap();
        assert!(encoded.starts_with(br#"{"record_version":1,"state":{"epoch":0,"#));
        assert_eq!(decode_record(name, &encoded).unwrap(), state);
        let bare = serde_json::to_string(&state).unwrap();
        let other = format!(r#"{{"record_version":2,"state":{bare}}}"#);
        let changed = r#"{"record_version":2,"renamed":7}"#.to_owned();
        for (body, text) in [
            (other, "record version 2 is not supported, only version 1"),
            (changed, "record version 2 is not supported, only version 1"),
            (bare, "it has no record version, so a draft of tssd wrote it"),
        ] {
            let error = decode_record(name, &record_of(name, &body)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
            assert!(error.to_string().contains(text), "{error}");
        }
        for body in [r#"{"record_version":1,"state":{}}"#, r#"{"record_version":1}"#] {
            let error = decode_record(name, &record_of(name, body)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
        }
        let error = decode_record("other/.ledger/1.json", &encoded).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    }

    #[tokio::test]
    async fn following_records_are_found_without_listing() {
        let meta = CountingMeta::with_long_grace();
        let (one, other) = (Records::new(meta.clone()), Records::new(meta.clone()));
        let (key, second) = (key(), Key::new("second").unwrap());
        for key in [&key, &second] {
            assert!(one.load(key).await.unwrap().is_blank());
            assert!(other.load(key).await.unwrap().is_blank());
        }
        assert_eq!(meta.list_count(), 4);
        for keep in 2..9 {
            for key in [&key, &second] {
                append_next(&other, key, keep).await;
                assert_eq!(one.load(key).await.unwrap().state, state_with_keep(keep));
            }
        }
        assert_eq!(meta.list_count(), 4);
        // Many records later, a listing is used, and the newest record is found again.
        for keep in 9..50 {
            append_next(&other, &key, keep).await;
        }
        assert_eq!(one.load(&key).await.unwrap().state, state_with_keep(49));
        assert_eq!(meta.list_count(), 5);
    }

    #[tokio::test]
    async fn superseded_records_are_retired_once() {
        let meta = CountingMeta::with_long_grace();
        let (one, other) = (Records::new(meta.clone()), Records::new(meta.clone()));
        let key = key();
        one.load(&key).await.unwrap();
        let mut last = other.load(&key).await.unwrap();
        for (keep, retired) in [(2, vec![]), (3, vec![]), (4, vec![1]), (5, vec![2])] {
            assert!(other.append(&key, &mut last, state_with_keep(keep)).await.unwrap());
            assert_eq!(meta.take_retired(), retired, "{keep}");
        }
        // A process that has loaded the records of another process retires them too.
        let mut last = one.load(&key).await.unwrap();
        for (keep, retired) in [(6, vec![1, 2, 3]), (7, vec![4])] {
            assert!(one.append(&key, &mut last, state_with_keep(keep)).await.unwrap());
            assert_eq!(meta.take_retired(), retired, "{keep}");
        }
    }

    #[tokio::test]
    async fn foreign_files_are_not_retired() {
        let (meta, key) = (CountingMeta::with_long_grace(), key());
        let left = format!("{TEMPORARY_PREFIX}1");
        for name in ["notes.txt", "1.json", "+0000000000000000001.json", left.as_str()] {
            assert!(meta.create(&format!("{}/{name}", folder(&key)), vec![]).await.unwrap());
        }
        let records = Records::new(meta.clone());
        let last = records.load(&key).await.unwrap();
        assert_eq!((last.number, last.stale), (0, vec![left]));
    }

    #[tokio::test]
    async fn slow_listing_is_repeated() {
        let meta = CountingMeta::with_grace(Duration::from_millis(200));
        *meta.list_delay.lock() = Duration::from_millis(210);
        let (records, key) = (Records::new(meta.clone()), key());
        let load = tokio::spawn(async move { records.load(&key).await.map(|it| it.number) });
        while meta.list_count() < 2 {
            assert!(!load.is_finished(), "it is looked for again");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        *meta.list_delay.lock() = Duration::ZERO;
        assert_eq!(load.await.unwrap().unwrap(), 0);
    }

    #[tokio::test]
    async fn slow_step_is_refused() {
        let meta = CountingMeta::with_grace(Duration::from_millis(200));
        let (records, key) = (Records::new(meta), key());
        let mut last = records.load(&key).await.unwrap();
        tokio::time::sleep(Duration::from_millis(150)).await;
        let error = records.append(&key, &mut last, state_with_keep(2)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    }

    #[tokio::test]
    async fn reader_syncs_found_record_once() {
        let (meta, key) = (Arc::new(CountingMeta::default()), key());
        let ledgers = || SharedLedgers::new(meta.clone());
        let sync = async |ledgers: &SharedLedgers| {
            ledgers.lock(&key).await.unwrap().sync().await.unwrap();
            meta.sync_count()
        };
        let one = ledgers();
        assert_eq!(sync(&one).await, 0, "there is nothing");
        assert!(save(one.lock(&key).await.unwrap(), state_with_keep(2)).await.unwrap());
        assert_eq!(sync(&one).await, 0, "who has created it knows");
        let other = ledgers();
        assert_eq!(sync(&other).await, 1, "who has created it may have been killed");
        assert_eq!(sync(&other).await, 1);
        assert!(save(one.lock(&key).await.unwrap(), state_with_keep(3)).await.unwrap());
        assert_eq!(sync(&other).await, 2, "it is another one");
    }
}
