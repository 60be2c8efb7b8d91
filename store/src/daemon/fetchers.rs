//! The daemons that fetch blobs of this one, so that they can fetch from each other.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::io::sync::Lock;
use crate::net::tls::Endpoint;
use crate::net::wire::BlobFetcher;

/// Time for which a daemon that fetches a blob is listed. It announces itself several times in this time.
const FETCHING_TTL: Duration = Duration::from_secs(2);

/// Time for which a daemon that has all of a blob is listed.
const COMPLETE_TTL: Duration = Duration::from_mins(10);

/// Largest number of daemons that are listed for a blob.
const MAX_FETCHERS: usize = 1024;

/// Number of blobs from which on those without daemons are removed.
const CLEANUP_BLOBS: usize = 256;

/// The daemons that fetch blobs of this one, or have all of them.
#[derive(Default)]
pub(crate) struct Fetchers(Lock<BTreeMap<String, BTreeMap<Endpoint, Announcement>>>);

struct Announcement {
    since: Instant,
    is_complete: bool,
}

impl Announcement {
    fn is_current(&self, now: Instant) -> bool {
        let ttl = if self.is_complete { COMPLETE_TTL } else { FETCHING_TTL };
        now.saturating_duration_since(self.since) < ttl
    }
}

impl Fetchers {
    /// Lists a daemon for a blob. Returns the others that are listed.
    pub(crate) fn announce(
        &self,
        blob: &str,
        address: Endpoint,
        is_complete: bool,
        now: Instant,
    ) -> Vec<BlobFetcher> {
        let mut blobs = self.0.lock();
        if blobs.len() >= CLEANUP_BLOBS {
            for fetchers in blobs.values_mut() {
                fetchers.retain(|_, announcement| announcement.is_current(now));
            }
            blobs.retain(|_, fetchers| !fetchers.is_empty());
        }
        let fetchers = blobs.entry(blob.to_owned()).or_default();
        fetchers.retain(|_, announcement| announcement.is_current(now));
        let others = fetchers.iter().filter(|(fetcher, _)| **fetcher != address);
        let others = others.map(|(fetcher, announcement)| BlobFetcher {
            address: fetcher.to_string(),
            is_complete: announcement.is_complete,
        });
        let others = others.collect();
        if fetchers.len() < MAX_FETCHERS || fetchers.contains_key(&address) {
            fetchers.insert(address, Announcement { since: now, is_complete });
        }
        others
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn daemons_are_listed_while_they_announce_themselves() {
        let (fetchers, start) = (Fetchers::default(), Instant::now());
        let address = |host: &str| format!("tcp://{host}:7000").parse::<Endpoint>().unwrap();
        let announce = |blob, host: &str, is_complete, after: Duration| {
            let found = fetchers.announce(blob, address(host), is_complete, start + after);
            found
                .into_iter()
                .map(|fetcher| (fetcher.address, fetcher.is_complete))
                .collect::<Vec<_>>()
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
}
