//! Progress of the fetch of an archive: how much has come, from where, and at which rate.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::io::sync::Lock;

/// Time over which the rate of a fetch is measured.
const RATE_WINDOW: Duration = Duration::from_secs(2);

/// Progress of a fetch.
pub(crate) struct FetchProgress(Lock<Inner>);

struct Inner {
    started: Instant,
    /// When the fetch ended, or the last bytes came.
    last: Instant,
    /// Whether the fetch runs. Before and after, readers may fetch bytes themselves.
    is_running: bool,
    /// Received bytes by sender: the address of a daemon, or `bucket`.
    senders: BTreeMap<String, u64>,
    /// Number of the version from which the bytes came as differences.
    base: Option<u64>,
    /// Begin of the current window, and the bytes received in it.
    window: (Instant, u64),
    /// Bytes per second in the window before, if there was one.
    last_rate: Option<u64>,
}

impl FetchProgress {
    pub(crate) fn new(now: Instant) -> Self {
        Self(Lock::new(Inner {
            started: now,
            last: now,
            is_running: false,
            senders: BTreeMap::new(),
            base: None,
            window: (now, 0),
            last_rate: None,
        }))
    }

    /// Records that the fetch begins, or begins again.
    pub(crate) fn begin(&self, now: Instant) {
        let mut inner = self.0.lock();
        (inner.is_running, inner.window, inner.last_rate) = (true, (now, 0), None);
    }

    /// Records bytes from a sender.
    pub(crate) fn add(&self, sender: &str, bytes: u64, now: Instant) {
        let mut inner = self.0.lock();
        match inner.senders.get_mut(sender) {
            Some(sum) => *sum += bytes,
            None => drop(inner.senders.insert(sender.to_owned(), bytes)),
        }
        inner.last = now;
        inner.advance(now);
        inner.window.1 += bytes;
    }

    /// Records that bytes came as differences from a version.
    pub(crate) fn set_base(&self, version: Option<u64>) {
        let mut inner = self.0.lock();
        inner.base = version.or(inner.base);
    }

    /// Returns the number of the version from which bytes came as differences.
    pub(crate) fn base(&self) -> Option<u64> {
        self.0.lock().base
    }

    /// Records that the fetch has ended.
    pub(crate) fn end(&self, now: Instant) {
        let mut inner = self.0.lock();
        (inner.is_running, inner.last) = (false, now);
    }

    /// Returns the received bytes by sender.
    pub(crate) fn senders(&self) -> BTreeMap<String, u64> {
        self.0.lock().senders.clone()
    }

    /// Returns when the fetch began, and when it ended; the latter is `now` if it runs.
    pub(crate) fn span(&self, now: Instant) -> (Instant, Instant) {
        let inner = self.0.lock();
        (inner.started, if inner.is_running { now } else { inner.last })
    }

    /// Returns the bytes per second over the last two seconds. `None` if the fetch does not run.
    pub(crate) fn rate(&self, now: Instant) -> Option<u64> {
        let mut inner = self.0.lock();
        inner.advance(now);
        let (since, bytes) = inner.window;
        let current = || rate(bytes, now.saturating_duration_since(since));
        inner.is_running.then(|| inner.last_rate.unwrap_or_else(current))
    }

    /// Returns whether the fetch runs, and was slower than `floor` bytes per second in the last whole window.
    pub(crate) fn is_below(&self, floor: u64, now: Instant) -> bool {
        let mut inner = self.0.lock();
        inner.advance(now);
        inner.is_running && inner.last_rate.is_some_and(|rate| rate < floor)
    }
}

impl Inner {
    /// Begins a new window if the current one is over.
    fn advance(&mut self, now: Instant) {
        let (since, bytes) = self.window;
        let elapsed = now.saturating_duration_since(since);
        if elapsed >= RATE_WINDOW {
            self.last_rate = Some(rate(bytes, elapsed));
            self.window = (now, 0);
        }
    }
}

/// Returns bytes per second.
pub(crate) fn rate(bytes: u64, duration: Duration) -> u64 {
    let rate = u128::from(bytes) * 1000 / duration.as_millis().max(1);
    u64::try_from(rate).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rate_is_that_of_the_last_window() {
        let start = Instant::now();
        let at = |seconds: f64| start + Duration::from_secs_f64(seconds);
        let progress = FetchProgress::new(start);
        assert_eq!(progress.rate(start), None);
        progress.begin(start);
        progress.add("a", 1000, at(0.5));
        progress.set_base(Some(7));
        progress.set_base(None);
        assert_eq!(progress.base(), Some(7));
        assert_eq!(progress.rate(at(1.0)), Some(1000));
        assert!(!progress.is_below(10_000, at(1.0)));
        progress.add("b", 3000, at(1.5));
        // The first window has ended.
        assert_eq!(progress.rate(at(2.0)), Some(2000));
        assert!(progress.is_below(2001, at(2.1)) && !progress.is_below(1999, at(2.1)));
        progress.add("a", 500, at(3.0));
        assert_eq!(progress.rate(at(4.0)), Some(250));
        assert_eq!(progress.rate(at(20.0)), Some(0), "nothing has come since");
        assert_eq!(progress.span(at(20.0)), (start, at(20.0)));
        progress.end(at(21.0));
        assert_eq!((progress.rate(at(40.0)), progress.span(at(40.0))), (None, (start, at(21.0))));
        assert!(!progress.is_below(1000, at(40.0)));
        // The time without a fetch does not count.
        progress.begin(at(50.0));
        assert!(!progress.is_below(1000, at(51.0)));
        progress.add("a", 4000, at(51.0));
        assert_eq!(progress.rate(at(52.0)), Some(2000));
        let senders = [("a".to_owned(), 5500), ("b".to_owned(), 3000)];
        assert_eq!(progress.senders(), senders.into());
    }
}
