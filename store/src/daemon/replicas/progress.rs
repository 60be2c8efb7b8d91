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
    /// Time from the start to the last byte, once the fetch has ended.
    duration: Option<Duration>,
    /// Received bytes by sender: the address of a daemon, or `bucket`.
    senders: BTreeMap<String, u64>,
    /// Begin of the current window, and the bytes received in it.
    window: (Instant, u64),
    /// Bytes per second in the window before, if there was one.
    last_rate: Option<u64>,
}

impl FetchProgress {
    pub(crate) fn new(now: Instant) -> Self {
        let (senders, window) = (BTreeMap::new(), (now, 0));
        Self(Lock::new(Inner { started: now, duration: None, senders, window, last_rate: None }))
    }

    /// Records bytes from a sender.
    pub(crate) fn add(&self, sender: &str, bytes: u64, now: Instant) {
        let mut inner = self.0.lock();
        match inner.senders.get_mut(sender) {
            Some(sum) => *sum += bytes,
            None => drop(inner.senders.insert(sender.to_owned(), bytes)),
        }
        inner.advance(now);
        inner.window.1 += bytes;
    }

    /// Records that the fetch has ended.
    pub(crate) fn finish(&self, now: Instant) {
        let mut inner = self.0.lock();
        let started = inner.started;
        inner.duration.get_or_insert(now.saturating_duration_since(started));
    }

    /// Returns the received bytes by sender.
    pub(crate) fn senders(&self) -> BTreeMap<String, u64> {
        self.0.lock().senders.clone()
    }

    /// Returns the time since the fetch began, or the time that it took.
    pub(crate) fn duration(&self, now: Instant) -> Duration {
        let inner = self.0.lock();
        inner.duration.unwrap_or_else(|| now.saturating_duration_since(inner.started))
    }

    /// Returns the bytes per second: over the last two seconds, or over the whole fetch if it has ended.
    pub(crate) fn rate(&self, now: Instant) -> u64 {
        let mut inner = self.0.lock();
        if let Some(duration) = inner.duration {
            return rate(inner.senders.values().sum(), duration);
        }
        inner.advance(now);
        let (since, bytes) = inner.window;
        inner.last_rate.unwrap_or_else(|| rate(bytes, now.saturating_duration_since(since)))
    }

    /// Returns whether the fetch was slower than `floor` bytes per second in the last whole window.
    pub(crate) fn is_below(&self, floor: u64, now: Instant) -> bool {
        let mut inner = self.0.lock();
        inner.advance(now);
        inner.duration.is_none() && inner.last_rate.is_some_and(|rate| rate < floor)
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
fn rate(bytes: u64, duration: Duration) -> u64 {
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
        let is_rate = |seconds, wanted| progress.rate(at(seconds)) == wanted;
        progress.add("a", 1000, at(0.5));
        assert!(is_rate(1.0, 1000) && !progress.is_below(10_000, at(1.0)));
        progress.add("b", 3000, at(1.5));
        // The first window has ended.
        assert!(is_rate(2.0, 2000));
        assert!(progress.is_below(2001, at(2.1)) && !progress.is_below(1999, at(2.1)));
        progress.add("a", 500, at(3.0));
        assert!(is_rate(4.0, 250));
        assert!(is_rate(20.0, 0), "nothing has come since");
        progress.finish(at(20.0));
        progress.finish(at(30.0));
        assert!(is_rate(40.0, 225) && !progress.is_below(1000, at(40.0)));
        assert_eq!(progress.duration(at(50.0)), Duration::from_secs(20));
        let senders = [("a".to_owned(), 1500), ("b".to_owned(), 3000)];
        assert_eq!(progress.senders(), senders.into());
    }
}
