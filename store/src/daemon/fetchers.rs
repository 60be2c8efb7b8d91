//! The daemons that fetch blobs of this one, so that they can fetch from each other.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tssd_format::checksum;

use crate::io::sync::Lock;
use crate::net::tls::Endpoint;
use crate::net::wire::{BlobFetcher, BlobFetchers};

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
pub(crate) struct Fetchers(Lock<BTreeMap<String, BTreeMap<Endpoint, Announcement>>>);

struct Announcement {
    since: Instant,
    is_complete: bool,
    /// The part that it wants of each piece. Empty: it wants all.
    parts: Arc<[u8]>,
}

impl Announcement {
    fn is_current(&self, now: Instant) -> bool {
        let ttl = if self.is_complete { COMPLETE_TTL } else { FETCHING_TTL };
        now.saturating_duration_since(self.since) < ttl
    }
}

impl Fetchers {
    /// Lists a daemon for a blob, with the part that it wants of each piece; empty if it wants all.
    ///
    /// Returns the others that are listed, and the tables of what they want.
    pub(crate) fn announce(
        &self,
        blob: &str,
        address: &Endpoint,
        is_complete: bool,
        parts: &[u8],
        now: Instant,
    ) -> (BlobFetchers, Vec<u8>) {
        let mut blobs = self.0.lock();
        if blobs.len() >= CLEANUP_BLOBS && !blobs.contains_key(blob) {
            for fetchers in blobs.values_mut() {
                fetchers.retain(|_, announcement| announcement.is_current(now));
            }
            blobs.retain(|_, fetchers| !fetchers.is_empty());
            if blobs.len() >= MAX_BLOBS {
                return (BlobFetchers::default(), Vec::new());
            }
        }
        let fetchers = blobs.entry(blob.to_owned()).or_default();
        fetchers.retain(|_, announcement| announcement.is_current(now));
        // Most daemons want the same parts as another one.
        let mut known = fetchers.values().map(|announcement| &announcement.parts);
        let known = known.find(|known| ***known == *parts).cloned();
        let parts: Arc<[u8]> = known.unwrap_or_else(|| parts.into());
        let tables: BTreeMap<*const u8, usize> =
            fetchers.values().map(|it| (it.parts.as_ptr(), it.parts.len())).collect();
        let tables_fit = tables.contains_key(&parts.as_ptr())
            || tables.values().sum::<usize>() + parts.len() <= MAX_TABLES_BYTES;
        if (fetchers.len() < MAX_FETCHERS || fetchers.contains_key(address)) && tables_fit {
            let announcement = Announcement { since: now, is_complete, parts };
            fetchers.insert(address.clone(), announcement);
        }
        list(fetchers.iter().filter(|(fetcher, _)| *fetcher != address))
    }
}

/// Returns daemons, and the tables of what they want.
fn list<'a>(
    announcements: impl Iterator<Item = (&'a Endpoint, &'a Announcement)>,
) -> (BlobFetchers, Vec<u8>) {
    let (mut listed, mut tables) = (BlobFetchers::default(), Vec::new());
    let mut numbers: BTreeMap<*const u8, u32> = BTreeMap::new();
    for (address, Announcement { is_complete, parts, .. }) in announcements {
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

    #[test]
    fn daemons_are_listed_while_they_announce_themselves() {
        let (fetchers, start) = (Fetchers::default(), Instant::now());
        let address = |host: &str| format!("tcp://{host}:7000").parse::<Endpoint>().unwrap();
        let announce = |blob, host: &str, is_complete, after: Duration| {
            let (found, tables) =
                fetchers.announce(blob, &address(host), is_complete, &[], start + after);
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
            fetchers.announce("x", &address, false, parts, now)
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
