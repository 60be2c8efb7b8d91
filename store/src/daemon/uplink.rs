//! Limits of what a daemon sends to other hosts.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::num::NonZeroU32;
use std::pin::pin;
use std::sync::Arc;

use tokio::sync::Notify;

use crate::convert::to_usize;
use crate::daemon::rate_limiter::RateLimiter;
use crate::io::sync::Lock;

/// The link from this host to others, with its limits.
pub(crate) struct Uplink {
    rate_limiter: RateLimiter,
    /// Maximum number of hosts to which bytes are sent at the same time.
    max_peers: Option<usize>,
    /// The hosts to which bytes are sent, with the number of replies.
    peers: Lock<BTreeMap<IpAddr, usize>>,
    /// Notified when a host has got its last reply.
    changed: Notify,
}

impl Uplink {
    /// Creates a link with a maximum of bytes per second, and of hosts at the same time.
    ///
    /// Returns `None` if neither is limited.
    pub(crate) fn limited(
        bytes_per_second: Option<u64>,
        max_peers: Option<NonZeroU32>,
    ) -> Option<Arc<Self>> {
        if bytes_per_second.is_none() && max_peers.is_none() {
            return None;
        }
        Some(Arc::new(Self {
            rate_limiter: RateLimiter::new(bytes_per_second),
            max_peers: max_peers.map(|max| to_usize(u64::from(max.get()))),
            peers: Lock::default(),
            changed: Notify::new(),
        }))
    }

    /// Waits until `bytes` bytes may be sent to a host. The permit is dropped when they are sent.
    pub(crate) async fn admit(self: &Arc<Self>, peer: IpAddr, bytes: u64) -> UplinkPermit {
        loop {
            let mut changed = pin!(self.changed.notified());
            changed.as_mut().enable();
            {
                let mut peers = self.peers.lock();
                if self.max_peers.is_none_or(|max| peers.len() < max) || peers.contains_key(&peer) {
                    *peers.entry(peer).or_default() += 1;
                    break;
                }
            }
            changed.await;
        }
        let permit = UplinkPermit { uplink: self.clone(), peer };
        tokio::time::sleep(self.rate_limiter.reserve(bytes)).await;
        permit
    }
}

/// Permits one reply to a host.
pub(crate) struct UplinkPermit {
    uplink: Arc<Uplink>,
    peer: IpAddr,
}

impl Drop for UplinkPermit {
    fn drop(&mut self) {
        let mut peers = self.uplink.peers.lock();
        if let Some(replies) = peers.get_mut(&self.peer) {
            *replies -= 1;
            if *replies == 0 {
                peers.remove(&self.peer);
                self.uplink.changed.notify_waiters();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn uplink_limits_hosts() {
        assert!(Uplink::limited(None, None).is_none());
        let uplink = Uplink::limited(None, NonZeroU32::new(2)).expect("it is limited");
        let [first, second, third] = [1, 2, 3].map(|host| IpAddr::from([10, 0, 0, host]));
        let held = [uplink.admit(first, 0).await, uplink.admit(second, 0).await];
        // A host that is served already gets more.
        drop(uplink.admit(first, 0).await);
        let admit = uplink.admit(third, 0);
        assert!(tokio::time::timeout(Duration::from_secs(5), admit).await.is_err());
        let waiting = tokio::spawn({
            let uplink = uplink.clone();
            async move { uplink.admit(third, 0).await }
        });
        tokio::task::yield_now().await;
        drop(held);
        drop(waiting.await);
        assert!(uplink.peers.lock().is_empty());
    }
}
