use std::time::{Duration, Instant};

use super::store::Store;
use super::subscription::POLL_TIMEOUT;
use crate::control::{KnownVersion, VersionInfo};
use crate::error::{Error, ErrorKind, Result};
use crate::key::Key;
use crate::ledger::{RunId, Timestamp, VersionPosition};

/// Which version [`Store::wait_for_version_with`] waits for. By default it is any, for a minute.
///
/// The store may still have versions of an earlier run of the writers. A reader that must not get
/// them sets `after` or `run`.
#[derive(Clone, Debug)]
pub struct WaitOptions {
    /// The lowest number.
    pub version: u64,
    /// A version that the caller has seen, and which the version must follow.
    ///
    /// Take the newest version ([`Store::head`]) before the writers start.
    pub after: Option<SeenVersion>,
    /// The run that must have put the version: the job of its writers.
    pub run: Option<RunId>,
    /// How long to wait.
    pub timeout: Duration,
}

/// A version that a reader has seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SeenVersion {
    /// Its position.
    pub position: VersionPosition,
    /// When it became visible. `None`: not known.
    ///
    /// A daemon that had the versions in memory and has started anew counts positions from the
    /// beginning. By the time, its versions follow those of before.
    pub since: Option<Timestamp>,
}

impl From<&VersionInfo> for SeenVersion {
    fn from(info: &VersionInfo) -> Self {
        Self { position: info.position(), since: Some(info.since) }
    }
}

impl From<VersionPosition> for SeenVersion {
    fn from(position: VersionPosition) -> Self {
        Self { position, since: None }
    }
}

impl SeenVersion {
    fn is_before(&self, info: &VersionInfo) -> bool {
        info.position() > self.position || self.since.is_some_and(|since| info.since > since)
    }
}

impl Default for WaitOptions {
    fn default() -> Self {
        Self { version: 0, after: None, run: None, timeout: Duration::from_mins(1) }
    }
}

impl WaitOptions {
    fn accepts(&self, info: &VersionInfo) -> bool {
        let run = info.process.as_ref().map(|process| &process.run);
        info.number >= self.version
            && self.after.is_none_or(|seen| seen.is_before(info))
            && self.run.as_ref().is_none_or(|wanted| run == Some(wanted))
    }

    /// Returns the error for the end of the timeout. `newest` is the newest version that was seen.
    fn timeout_error(&self, key: &Key, newest: Option<&VersionInfo>) -> Error {
        let Self { version, after, run, timeout } = self;
        let after = after.map_or_else(String::new, |SeenVersion { position, .. }| {
            format!(" after version {} of epoch {}", position.number, position.epoch)
        });
        let run = run.as_ref().map_or_else(String::new, |run| format!(" of run {run}"));
        let newest = match newest {
            Some(info) => format!("the newest is {}", info.number),
            None => "there is none".to_owned(),
        };
        let text = format_args!(
            "key `{key}`: no version from {version} on{after}{run} was put within {timeout:?}; {newest}"
        );
        Error::new(ErrorKind::NotFound, text)
    }
}

impl Store {
    /// Waits until a version whose number is at least `version` is visible, and returns the newest.
    ///
    /// That may be a version of an earlier run of the writers: see [`WaitOptions`].
    ///
    /// # Errors
    ///
    /// `NotFound` if there is none after `timeout`; as [`Store::versions`].
    pub async fn wait_for_version(
        &self,
        key: &Key,
        version: u64,
        timeout: Duration,
    ) -> Result<VersionInfo> {
        let options = WaitOptions { version, timeout, ..WaitOptions::default() };
        self.wait_for_version_with(key, &options).await
    }

    /// Waits until the newest visible version is one that the options accept, and returns it.
    ///
    /// # Errors
    ///
    /// As [`Store::wait_for_version`].
    ///
    /// # Examples
    ///
    /// ```
    /// use tssd_format::StateDict;
    /// use tssd_store::{Key, PutOptions, Rewind, SeenVersion, Store, WaitOptions};
    /// # tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
    /// let (store, key) = (Store::memory(), Key::new("policy")?);
    /// # let stale = PutOptions { version: Some(5), ..PutOptions::default() };
    /// # store.put_state_dict(&key, &StateDict::new(), &stale).await?;
    /// let after = store.head(&key).await?.as_ref().map(SeenVersion::from);
    /// let first = PutOptions { version: Some(1), rewind: Rewind::Always, ..PutOptions::default() };
    /// store.put_state_dict(&key, &StateDict::new(), &first).await?;
    /// let options = WaitOptions { version: 1, after, ..WaitOptions::default() };
    /// let newest = store.wait_for_version_with(&key, &options).await?;
    /// assert_eq!((newest.epoch, newest.number), (1, 1));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// # })?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub async fn wait_for_version_with(
        &self,
        key: &Key,
        options: &WaitOptions,
    ) -> Result<VersionInfo> {
        let deadline = Instant::now().checked_add(options.timeout);
        let mut seen: Option<VersionInfo> = None;
        loop {
            let remaining = deadline.map_or(Duration::MAX, |deadline| {
                deadline.saturating_duration_since(Instant::now())
            });
            let last = seen.as_ref().map(KnownVersion::from);
            let timeout = remaining.min(POLL_TIMEOUT);
            match self.0.controller().wait_for_newer(key, last, timeout).await? {
                Some(info) if options.accepts(&info) => return Ok(info),
                Some(info) => seen = Some(info),
                None if remaining > POLL_TIMEOUT => {}
                None => return Err(options.timeout_error(key, seen.as_ref())),
            }
        }
    }
}
