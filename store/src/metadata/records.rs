//! Ledgers as records of a meta store: each state is a record, and the next state is the next record,
//! created only if it is not there.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::error::{Error, ErrorKind, Result};
use crate::io::disk::TEMPORARY;
use crate::io::sync::{Lock, MutexGuard};
use crate::key::Key;
use crate::ledger::State;
use crate::metadata::backend::{MetaStore, Watch};

/// How often a read starts anew because the record it was about to read is deleted.
const READ_TRIES: u32 = 16;

/// After so many that follow a record, what is listed is nearer to the newest.
const MAX_FOLLOWED: usize = 16;

/// Of how many keys the newest record is kept.
const MAX_RECENT: usize = 64;

/// The records of all keys.
#[derive(Clone)]
pub(crate) struct Records {
    pub(super) meta: Arc<dyn MetaStore>,
    /// The number of the newest record of each key that this process knows to be durable.
    settled: Arc<Lock<BTreeMap<Key, u64>>>,
    /// The newest record of each key that was read or created last, where those that follow it stay for a while.
    recent: Arc<Lock<BTreeMap<Key, Record>>>,
}

/// A ledger's state, the number of its record, and what else is in the folder of the records: older
/// ones, and what processes that died have left behind.
#[derive(Clone)]
pub(crate) struct Record {
    pub(super) number: u64,
    pub(crate) state: State,
    stale: Vec<String>,
    /// Whether there may be a newer one, which could not be made durable.
    is_in_doubt: bool,
    /// The moment before which it was read.
    read: Instant,
}

impl Default for Record {
    fn default() -> Self {
        let (number, state, stale) = (0, State::default(), Vec::new());
        Self { number, state, stale, is_in_doubt: false, read: Instant::now() }
    }
}

impl Record {
    /// Whether nothing of a key is there.
    pub(super) fn is_blank(&self) -> bool {
        self.number == 0 && self.stale.is_empty()
    }
}

impl Records {
    pub(crate) fn new(meta: Arc<dyn MetaStore>) -> Self {
        Self { meta, settled: Arc::default(), recent: Arc::default() }
    }

    /// Returns once a record is durable. Whoever has created it may have been killed before it was.
    pub(super) async fn settle(&self, key: &Key, record: &Record) -> Result<()> {
        if record.number > 0 && self.settled().get(key) != Some(&record.number) {
            self.meta.settle(&folder(key)).await?;
            self.settled().insert(key.clone(), record.number);
        }
        Ok(())
    }

    fn settled(&self) -> MutexGuard<'_, BTreeMap<Key, u64>> {
        self.settled.lock()
    }

    /// The newest record of a key; an empty one of a key that has none.
    pub(crate) async fn load(&self, key: &Key) -> Result<Record> {
        match self.meta.grace() {
            None => self.listed(key).await,
            Some(grace) => self.followed(key, grace).await,
        }
    }

    /// The newest record where those that follow one stay for a while: the one that none follows, looked for from the
    /// newest that is known or listed.
    async fn followed(&self, key: &Key, grace: Duration) -> Result<Record> {
        let mut known = self.recent().get(key).cloned();
        loop {
            let read = Instant::now();
            let known = known.take().filter(|known| known.read.elapsed() < grace / 2);
            let mut record = match known {
                Some(known) => known,
                None => self.listed(key).await?,
            };
            // What has followed it has done so since then.
            let since = record.read;
            let mut is_newest = false;
            for _ in 0..MAX_FOLLOWED {
                let name = record_name(key, record.number.saturating_add(1));
                let Some(next) = self.meta.get(&name).await? else {
                    is_newest = true;
                    break;
                };
                record.stale.extend((record.number > 0).then(|| file_name(record.number)));
                record.state = opened(&name, &next)?;
                record.number += 1;
            }
            // So it cannot have been deleted already: there is none that was not found.
            if is_newest && since.elapsed() < grace {
                record.read = read;
                self.remember(key, &record);
                return Ok(record);
            }
        }
    }

    /// Keeps a record from which those that follow it can be found.
    fn remember(&self, key: &Key, record: &Record) {
        let mut recent = self.recent();
        if recent.len() >= MAX_RECENT {
            recent.pop_first();
        }
        recent.insert(key.clone(), record.clone());
    }

    /// Tells of changes of a key's records.
    pub(super) fn watch(&self, key: &Key, patience: Duration) -> Box<dyn Watch> {
        self.meta.watch(&folder(key), patience)
    }

    fn recent(&self) -> MutexGuard<'_, BTreeMap<Key, Record>> {
        self.recent.lock()
    }

    /// The newest record of a key that is listed.
    async fn listed(&self, key: &Key) -> Result<Record> {
        let (folder, read) = (folder(key), Instant::now());
        for _ in 0..READ_TRIES {
            let mut records = self.meta.list_records(&folder).await?;
            records.retain(|(name, _)| is_ours(name));
            let newest = records.iter_mut().rev().find_map(|(name, record)| {
                record_number(name).map(|number| (number, record.take()))
            });
            let mut names: Vec<String> = records.into_iter().map(|(name, _)| name).collect();
            let Some((number, record)) = newest else {
                return Ok(Record { stale: names, read, ..Record::default() });
            };
            let name = record_name(key, number);
            let record = match record {
                Some(record) => record,
                // Whoever has created a newer one since may have deleted this one: look again.
                None => match self.meta.get(&name).await? {
                    Some(record) => record,
                    None => continue,
                },
            };
            let state = opened(&name, &record)?;
            names.retain(|name| *name != file_name(number));
            return Ok(Record { number, state, stale: names, is_in_doubt: false, read });
        }
        Err(Error::new(
            ErrorKind::Corrupt,
            format_args!("the records in `{folder}` cannot be read"),
        ))
    }

    /// Creates the next record, unless nothing has changed; false if somebody else has.
    ///
    /// If that fails, the record may be there all the same. Then the one that is created next replaces it too.
    pub(super) async fn append(&self, key: &Key, last: &mut Record, next: State) -> Result<bool> {
        if last.state == next && !last.is_in_doubt {
            // Whoever gets the answer takes it for durable.
            return self.settle(key, last).await.map(|()| true);
        }
        let number = last.number.checked_add(1).ok_or_else(|| {
            Error::new(ErrorKind::Corrupt, format_args!("key `{key}` has no record numbers left"))
        })?;
        let name = record_name(key, number);
        let record = sealed(&name, &next).map_err(|error| {
            Error::new(ErrorKind::Invalid, format_args!("key `{key}`: {error}"))
        })?;
        let before = (last.number > 0).then(|| file_name(last.number));
        let next_name = file_name(number);
        let created = self.meta.follow(&folder(key), before.as_deref(), &next_name, record).await;
        if created.is_err() {
            last.stale.extend([last.number, number].map(file_name));
            (last.number, last.is_in_doubt) = (number, true);
        }
        if !created? {
            self.recent().remove(key);
            if self.meta.keeps_away() {
                // Nobody else could have.
                let text = format_args!("key `{key}` was written without its lock; try again");
                return Err(Error::new(ErrorKind::Busy, text));
            }
            return Ok(false);
        }
        if !self.was_next(key, last).await? {
            self.recent().remove(key);
            let text =
                format_args!("key `{key}`: a step of its ledger took longer than others wait");
            return Err(Error::new(ErrorKind::Busy, text));
        }
        self.settled().insert(key.clone(), number);
        // The record before the newest stays, for readers that have just listed it.
        let stale = std::mem::take(&mut last.stale);
        let mut stale = self.meta.retire(&folder(key), stale).await;
        stale.extend((last.number > 0).then(|| file_name(last.number)));
        *last = Record { number, state: next, stale, is_in_doubt: false, read: last.read };
        if self.meta.grace().is_some() {
            self.remember(key, last);
        }
        Ok(true)
    }

    /// Whether the record that was just created is the first of its number: where nobody can be kept away, another
    /// one may have been there and be deleted.
    ///
    /// The oldest are deleted first, so as long as the one before is there, none that followed it was. The very first
    /// has none before: of that the clock tells.
    async fn was_next(&self, key: &Key, before: &Record) -> Result<bool> {
        let Some(grace) = self.meta.grace() else { return Ok(true) };
        if before.read.elapsed() >= grace / 2 {
            return Ok(false);
        }
        let is_first = before.number == 0;
        Ok(is_first || self.meta.get(&record_name(key, before.number)).await?.is_some())
    }

    /// The records of a key that are damaged, by their names.
    pub(crate) async fn damaged(&self, key: &Key) -> Result<Vec<(String, Error)>> {
        let mut damaged = Vec::new();
        for number in self.meta.list(&folder(key)).await?.iter().filter_map(|it| record_number(it))
        {
            let name = record_name(key, number);
            let found = self.meta.get(&name).await.and_then(|record| {
                // It was deleted meanwhile.
                record.map_or(Ok(()), |record| opened(&name, &record).map(drop))
            });
            damaged.extend(found.err().map(|error| (name, error)));
        }
        Ok(damaged)
    }

    /// The keys that have a folder, in no order.
    pub(crate) async fn keys(&self) -> Result<Vec<Key>> {
        let mut keys = Vec::new();
        let mut folders = vec![String::new()];
        while let Some(folder) = folders.pop() {
            for name in self.meta.list(&folder).await? {
                let path = if folder.is_empty() { name } else { format!("{folder}/{name}") };
                match Key::from_path(&path) {
                    Some(key) => keys.push(key),
                    // The beginning of a long key ends so.
                    None => folders.extend(path.ends_with('%').then_some(path)),
                }
            }
        }
        Ok(keys)
    }
}

/// A record as it is stored: a state, and in a line of its own a checksum over that and the name. So nobody takes what
/// has rotted, or a record of another key, for the ledger.
fn sealed(name: &str, state: &State) -> serde_json::Result<Vec<u8>> {
    let mut record = serde_json::to_vec(state)?;
    let sum = sum(name, &record);
    record.extend_from_slice(format!("\n{sum}\n").as_bytes());
    Ok(record)
}

/// The state of a record that is stored under a name.
fn opened(name: &str, record: &[u8]) -> Result<State> {
    let damaged = |why: &dyn std::fmt::Display| {
        Error::new(ErrorKind::Corrupt, format_args!("ledger record `{name}`: {why}"))
    };
    let mut lines = record.splitn(2, |byte| *byte == b'\n');
    let (state, seal) = (lines.next().unwrap_or_default(), lines.next().unwrap_or_default());
    if seal != format!("{}\n", sum(name, state)).as_bytes() {
        return Err(damaged(&"its checksum is not that of what it says under this name"));
    }
    serde_json::from_slice(state).map_err(|error| damaged(&error))
}

fn sum(name: &str, state: &[u8]) -> String {
    let mut crc = crc32fast::Hasher::new();
    crc.update(name.as_bytes());
    crc.update(state);
    format!("{:08x}", crc.finalize())
}

/// Whether a name in the folder of records is that of a record, or what is left of one: what else is there is not
/// ours.
fn is_ours(name: &str) -> bool {
    record_number(name).is_some() || name.starts_with(TEMPORARY)
}

/// The number of a record by the last part of its name.
fn record_number(name: &str) -> Option<u64> {
    let digits = name.strip_suffix(".json").filter(|digits| digits.len() == 20)?;
    digits.parse().ok().filter(|number| format!("{number:020}") == digits)
}

fn file_name(number: u64) -> String {
    format!("{number:020}.json")
}

/// Where the records of a key are.
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

    /// Records that stay for a while when others have followed them, and what is asked of them.
    #[derive(Default)]
    struct Staying {
        inner: MemoryMeta,
        grace: Option<Duration>,
        /// How long listings take.
        listing: Lock<Duration>,
        listed: AtomicU64,
        settled: AtomicU64,
        retired: Lock<Vec<String>>,
    }

    impl Staying {
        fn long() -> Arc<Self> {
            Self::for_(Duration::from_hours(1))
        }

        fn for_(grace: Duration) -> Arc<Self> {
            Arc::new(Self { grace: Some(grace), ..Self::default() })
        }

        fn listed(&self) -> u64 {
            self.listed.load(Ordering::SeqCst)
        }

        fn settled(&self) -> u64 {
            self.settled.load(Ordering::SeqCst)
        }

        /// The numbers of the records that are not needed any more, since this was asked last.
        fn retired(&self) -> Vec<u64> {
            let retired = std::mem::take(&mut *self.retired.lock());
            retired.iter().map(|name| record_number(name).unwrap()).collect()
        }
    }

    #[async_trait]
    impl MetaStore for Staying {
        async fn create(&self, name: &str, record: Vec<u8>) -> Result<bool> {
            self.inner.create(name, record).await
        }

        async fn settle(&self, name: &str) -> Result<()> {
            self.settled.fetch_add(1, Ordering::SeqCst);
            self.inner.settle(name).await
        }

        async fn get(&self, name: &str) -> Result<Option<Vec<u8>>> {
            self.inner.get(name).await
        }

        async fn list(&self, name: &str) -> Result<Vec<String>> {
            self.listed.fetch_add(1, Ordering::SeqCst);
            let takes = *self.listing.lock();
            tokio::time::sleep(takes).await;
            self.inner.list(name).await
        }

        async fn delete(&self, name: &str) -> Result<()> {
            self.inner.delete(name).await
        }

        async fn retire(&self, _folder: &str, names: Vec<String>) -> Vec<String> {
            self.retired.lock().extend(names);
            Vec::new()
        }

        fn grace(&self) -> Option<Duration> {
            self.grace
        }

        fn keeps_away(&self) -> bool {
            self.grace.is_none()
        }

        async fn lock(&self, name: &str) -> Result<Box<dyn Any + Send>> {
            self.inner.lock(name).await
        }

        async fn has_ended(&self, name: &str) -> Result<bool> {
            self.inner.has_ended(name).await
        }
    }

    fn keeping(keep: u32) -> State {
        State::keeping(NonZeroU32::new(keep).unwrap())
    }

    fn key() -> Key {
        Key::new("policy").unwrap()
    }

    /// Creates the next record of a key.
    async fn next(records: &Records, key: &Key, keep: u32) {
        let mut last = records.load(key).await.unwrap();
        assert!(records.append(key, &mut last, keeping(keep)).await.unwrap());
    }

    #[tokio::test]
    async fn what_follows_a_known_record_is_found_without_a_listing() {
        let meta = Staying::long();
        let (one, other) = (Records::new(meta.clone()), Records::new(meta.clone()));
        let (key, second) = (key(), Key::new("second").unwrap());
        for key in [&key, &second] {
            assert!(one.load(key).await.unwrap().is_blank());
            assert!(other.load(key).await.unwrap().is_blank());
        }
        assert_eq!(meta.listed(), 4);
        for keep in 2..9 {
            for key in [&key, &second] {
                next(&other, key, keep).await;
                assert_eq!(one.load(key).await.unwrap().state, keeping(keep));
            }
        }
        assert_eq!(meta.listed(), 4);
        // Far behind, a listing is nearer, and what is found is the newest all the same.
        for keep in 9..50 {
            next(&other, &key, keep).await;
        }
        assert_eq!(one.load(&key).await.unwrap().state, keeping(49));
        assert_eq!(meta.listed(), 5);
    }

    #[tokio::test]
    async fn what_was_followed_is_retired_once_whoever_has_created_it() {
        let meta = Staying::long();
        let (one, other) = (Records::new(meta.clone()), Records::new(meta.clone()));
        let key = key();
        one.load(&key).await.unwrap();
        let mut last = other.load(&key).await.unwrap();
        for (keep, retired) in [(2, vec![]), (3, vec![]), (4, vec![1]), (5, vec![2])] {
            assert!(other.append(&key, &mut last, keeping(keep)).await.unwrap());
            assert_eq!(meta.retired(), retired, "{keep}");
        }
        // Who has found what others have created knows it too.
        let mut last = one.load(&key).await.unwrap();
        for (keep, retired) in [(6, vec![1, 2, 3]), (7, vec![4])] {
            assert!(one.append(&key, &mut last, keeping(keep)).await.unwrap());
            assert_eq!(meta.retired(), retired, "{keep}");
        }
    }

    #[tokio::test]
    async fn what_is_not_of_a_ledger_is_not_retired() {
        let (meta, key) = (Staying::long(), key());
        let left = format!("{TEMPORARY}1");
        for name in ["notes.txt", "1.json", "+0000000000000000001.json", left.as_str()] {
            assert!(meta.create(&format!("{}/{name}", folder(&key)), vec![]).await.unwrap());
        }
        let records = Records::new(meta.clone());
        let last = records.load(&key).await.unwrap();
        assert_eq!((last.number, last.stale), (0, vec![left]));
    }

    #[tokio::test]
    async fn a_listing_that_has_taken_too_long_is_not_trusted() {
        let meta = Staying::for_(Duration::from_millis(200));
        *meta.listing.lock() = Duration::from_millis(210);
        let (records, key) = (Records::new(meta.clone()), key());
        let load = tokio::spawn(async move { records.load(&key).await.map(|it| it.number) });
        while meta.listed() < 2 {
            assert!(!load.is_finished(), "it is looked for again");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        *meta.listing.lock() = Duration::ZERO;
        assert_eq!(load.await.unwrap().unwrap(), 0);
    }

    #[tokio::test]
    async fn a_step_that_has_taken_too_long_is_none() {
        let meta = Staying::for_(Duration::from_millis(200));
        let (records, key) = (Records::new(meta), key());
        let mut last = records.load(&key).await.unwrap();
        tokio::time::sleep(Duration::from_millis(150)).await;
        let error = records.append(&key, &mut last, keeping(2)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    }

    #[tokio::test]
    async fn who_finds_a_record_settles_it_once() {
        let (meta, key) = (Arc::new(Staying::default()), key());
        let ledgers = || SharedLedgers::new(meta.clone());
        let settle = async |ledgers: &SharedLedgers| {
            ledgers.turn(&key).await.unwrap().settle().await.unwrap();
            meta.settled()
        };
        let one = ledgers();
        assert_eq!(settle(&one).await, 0, "there is nothing");
        assert!(save(one.turn(&key).await.unwrap(), keeping(2)).await.unwrap());
        assert_eq!(settle(&one).await, 0, "who has created it knows");
        let other = ledgers();
        assert_eq!(settle(&other).await, 1, "who has created it may have been killed");
        assert_eq!(settle(&other).await, 1);
        assert!(save(one.turn(&key).await.unwrap(), keeping(3)).await.unwrap());
        assert_eq!(settle(&other).await, 2, "it is another one");
    }
}
