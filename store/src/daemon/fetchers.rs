//! The daemons that fetch blobs of this one, so that they can fetch from each other.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::time::{Duration, Instant};

use tssd_format::checksum;

use crate::daemon::replicas::{blob_key, blob_version};
use crate::io::sync::Lock;
use crate::key::Key;
use crate::net::client::Announcement;
use crate::net::tls::Endpoint;
use crate::net::wire::{BlobFetcher, BlobFetchers};
use crate::status::{FetcherStatus, MAX_STATUSES};

/// Time for which a daemon that fetches a blob is listed. It announces itself several times in this time.
const FETCHING_TTL: Duration = Duration::from_secs(2);

/// Time for which a daemon that has all that it wants of a blob is listed.
const COMPLETE_TTL: Duration = Duration::from_mins(10);

/// Largest number of daemons that are listed for a blob.
const MAX_FETCHERS: usize = 1024;

/// Largest length of the different tables of a blob, in bytes. Daemons whose tables do not fit are not listed.
const MAX_TABLES_BYTES: usize = 4 << 20;

/// Number of blobs from which on those without daemons are removed.
const CLEANUP_BLOBS: usize = 256;

/// Largest number of blobs with daemons. No daemons are listed for others.
const MAX_BLOBS: usize = 16 << 10;

/// The daemons that fetch blobs of this one, or parts of them.
#[derive(Default)]
pub(crate) struct Fetchers(Lock<BTreeMap<String, BTreeMap<Endpoint, Listed>>>);

/// A listed daemon.
struct Listed {
    since: Instant,
    announcement: Announcement,
}

impl Listed {
    fn is_current(&self, now: Instant) -> bool {
        let ttl = if self.announcement.is_complete { COMPLETE_TTL } else { FETCHING_TTL };
        now.saturating_duration_since(self.since) < ttl
    }
}

impl Fetchers {
    /// Lists a daemon for a blob. Returns the others that are listed, and the tables of what they want.
    pub(crate) fn announce(
        &self,
        blob: &str,
        address: &Endpoint,
        mut announcement: Announcement,
        now: Instant,
    ) -> (BlobFetchers, Vec<u8>) {
        let mut blobs = self.0.lock();
        if blobs.len() >= CLEANUP_BLOBS && !blobs.contains_key(blob) {
            for fetchers in blobs.values_mut() {
                fetchers.retain(|_, listed| listed.is_current(now));
            }
            blobs.retain(|_, fetchers| !fetchers.is_empty());
            if blobs.len() >= MAX_BLOBS {
                return (BlobFetchers::default(), Vec::new());
            }
        }
        let fetchers = blobs.entry(blob.to_owned()).or_default();
        fetchers.retain(|_, listed| listed.is_current(now));
        // Most daemons want the same parts as another one.
        let mut tables = fetchers.values().map(|listed| &listed.announcement.parts);
        if let Some(known) = tables.find(|known| **known == announcement.parts) {
            announcement.parts = known.clone();
        }
        let parts = |listed: &Listed| {
            let parts = &listed.announcement.parts;
            (parts.as_ptr(), parts.len())
        };
        let tables: BTreeMap<*const u8, usize> = fetchers.values().map(parts).collect();
        let tables_fit = tables.contains_key(&announcement.parts.as_ptr())
            || tables.values().sum::<usize>() + announcement.parts.len() <= MAX_TABLES_BYTES;
        if (fetchers.len() < MAX_FETCHERS || fetchers.contains_key(address)) && tables_fit {
            fetchers.insert(address.clone(), Listed { since: now, announcement });
        }
        list(fetchers.iter().filter(|(fetcher, _)| *fetcher != address))
    }

    /// Returns the listed daemons by version and address. At most [`MAX_STATUSES`] are returned.
    pub(crate) fn statuses(&self, now: Instant) -> Vec<FetcherStatus> {
        let blobs = self.0.lock();
        let mut statuses: BTreeMap<(Key, u64, String), (u64, bool)> = BTreeMap::new();
        for (blob, fetchers) in &*blobs {
            let Some((key, version)) = blob_key(blob).zip(blob_version(blob)) else { continue };
            for (address, listed) in fetchers.iter().filter(|(_, listed)| listed.is_current(now)) {
                let Announcement { is_complete, present_bytes, .. } = listed.announcement;
                let status = statuses.entry((key.clone(), version, address.to_string()));
                let (present, all) = status.or_insert((0, true));
                *present = present.saturating_add(present_bytes);
                *all &= is_complete;
            }
        }
        let status = |((key, version, address), (present_bytes, is_complete)): ((Key, _, _), _)| {
            FetcherStatus { key: key.to_string(), version, address, present_bytes, is_complete }
        };
        statuses.into_iter().map(status).take(MAX_STATUSES).collect()
    }
}

/// Returns daemons, and the tables of what they want.
fn list<'a>(fetchers: impl Iterator<Item = (&'a Endpoint, &'a Listed)>) -> (BlobFetchers, Vec<u8>) {
    let (mut listed, mut tables) = (BlobFetchers::default(), Vec::new());
    let mut numbers: BTreeMap<*const u8, u32> = BTreeMap::new();
    for (address, Listed { announcement: Announcement { is_complete, parts, .. }, .. }) in fetchers
    {
        // Equal tables are one table in memory.
        let table = match numbers.entry(parts.as_ptr()) {
            _ if parts.is_empty() => None,
            Entry::Occupied(number) => Some(*number.get()),
            Entry::Vacant(number) => {
                tables.extend_from_slice(parts);
                listed.tables += 1;
                Some(*number.insert(listed.tables - 1))
            }
        };
        let (address, is_complete) = (address.to_string(), *is_complete);
        listed.fetchers.push(BlobFetcher { address, is_complete, table });
    }
    if !tables.is_empty() {
        listed.crc32 = checksum(&tables);
    }
    (listed, tables)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn announcement(parts: &[u8], is_complete: bool) -> Announcement {
        Announcement { parts: parts.into(), is_complete, present_bytes: 5, known: 0 }
    }

    #[test]
    fn statuses_sum_the_archives_of_a_version() {
        let (fetchers, now) = (Fetchers::default(), Instant::now());
        let address = |host: &str| format!("tcp://{host}:7000").parse::<Endpoint>().unwrap();
        let archive = |number| format!("policy/0-7-0123456789abcdef/{number}-x.tssd");
        for (number, host, is_complete) in [(0, "a", true), (1, "a", false), (0, "b", true)] {
            let announced = announcement(&[], is_complete);
            fetchers.announce(&archive(number), &address(host), announced, now);
        }
        fetchers.announce("not of a version", &address("a"), announcement(&[], true), now);
        let status = |host, present_bytes, is_complete| {
            let address = address(host).to_string();
            FetcherStatus {
                key: "policy".to_owned(),
                version: 7,
                address,
                present_bytes,
                is_complete,
            }
        };
        assert_eq!(fetchers.statuses(now), [status("a", 10, false), status("b", 5, true)]);
        assert_eq!(
            fetchers.statuses(now + FETCHING_TTL),
            [status("a", 5, true), status("b", 5, true)]
        );
    }

    #[test]
    fn daemons_are_listed_while_they_announce_themselves() {
        let (fetchers, start) = (Fetchers::default(), Instant::now());
        let address = |host: &str| format!("tcp://{host}:7000").parse::<Endpoint>().unwrap();
        let announce = |blob, host: &str, is_complete, after: Duration| {
            let (found, tables) = fetchers.announce(
                blob,
                &address(host),
                announcement(&[], is_complete),
                start + after,
            );
            assert_eq!((tables, found.tables, found.crc32), (Vec::new(), 0, 0));
            let found = found.fetchers.into_iter();
            found.map(|fetcher| (fetcher.address, fetcher.is_complete)).collect::<Vec<_>>()
        };
        let entry = |host: &str, is_complete| (address(host).to_string(), is_complete);
        assert_eq!(announce("x", "a", false, Duration::ZERO), []);
        assert_eq!(announce("x", "b", true, Duration::ZERO), [entry("a", false)]);
        assert_eq!(announce("y", "c", false, Duration::ZERO), []);
        let both = [entry("a", false), entry("b", true)];
        assert_eq!(announce("x", "c", false, Duration::from_secs(1)), both);
        assert_eq!(announce("x", "c", false, FETCHING_TTL), [entry("b", true)]);
        assert_eq!(announce("x", "d", false, COMPLETE_TTL), []);
    }

    #[test]
    fn fetchers_with_the_same_wants_share_a_table() {
        let (fetchers, now) = (Fetchers::default(), Instant::now());
        let announce = |host: usize, parts: &[u8]| {
            let address = format!("tcp://{host}:7000").parse::<Endpoint>().unwrap();
            fetchers.announce("x", &address, announcement(parts, false), now)
        };
        let tables = [[1; 8], [2; 8], [1; 8]];
        for (host, table) in tables.iter().enumerate() {
            announce(host, table);
        }
        let (listed, data) = announce(3, &[]);
        let numbers: Vec<_> = listed.fetchers.iter().map(|fetcher| fetcher.table).collect();
        assert_eq!(numbers, [Some(0), Some(1), Some(0)]);
        assert_eq!((listed.tables, listed.crc32), (2, checksum(&data)));
        assert_eq!(data, [tables[0], tables[1]].concat());
        // A table that does not fit is left out, with its fetcher.
        announce(4, &vec![3; MAX_TABLES_BYTES]);
        let (listed, data) = announce(5, &[]);
        assert_eq!((listed.fetchers.len(), data.len()), (4, 16));
        assert_eq!(listed.fetchers[3].table, None);
    }
}
