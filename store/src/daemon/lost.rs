//! Processes whose connections were lost while they had memory mapped.
//!
//! Each is watched until it ends, by one descriptor, however many of its connections were lost: else a process that
//! connects again and again would take all that there are.

use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::io::sync::{Lock, MutexGuard, boxed};
use crate::shm::{PeerId, Pool};

#[derive(Default)]
pub(crate) struct Lost(Lock<Vec<Watched>>);

struct Watched {
    pid: u32,
    /// By which it is watched; open as long as this is there.
    descriptor: RawFd,
    /// What its connections were.
    peers: Vec<PeerId>,
}

impl Watched {
    /// Whether the process has its number still. As long as it has, no other one gets it.
    fn is_there(&self) -> bool {
        let path = format!("/proc/self/fdinfo/{}", self.descriptor);
        let text = std::fs::read_to_string(path).unwrap_or_default();
        text.lines().any(|line| {
            line.strip_prefix("Pid:").is_some_and(|pid| pid.trim() == self.pid.to_string())
        })
    }
}

impl Lost {
    fn all(&self) -> MutexGuard<'_, Vec<Watched>> {
        self.0.lock()
    }

    /// A peer whose process may have something mapped as long as it lives.
    pub(crate) fn add(
        self: &Arc<Self>,
        pool: Arc<Pool>,
        (pid, process): (u32, OwnedFd),
        peer: PeerId,
    ) {
        let mut all = self.all();
        if let Some(watched) = all.iter_mut().find(|it| it.pid == pid && it.is_there()) {
            watched.peers.push(peer);
            return;
        }
        let descriptor = process.as_raw_fd();
        all.push(Watched { pid, descriptor, peers: vec![peer] });
        drop(all);
        let lost = self.clone();
        tokio::spawn(boxed(async move {
            let process = exited(process).await;
            let gone =
                lost.all().extract_if(.., |it| it.descriptor == descriptor).collect::<Vec<_>>();
            // Only now may its descriptor be another's.
            drop(process);
            gone.iter().flat_map(|it| &it.peers).for_each(|peer| pool.exited(*peer));
        }));
    }
}

/// Returns when a process has ended, with what it was watched by.
#[expect(unsafe_code, reason = "the runtime watches a descriptor that is ours")]
async fn exited(process: OwnedFd) -> Option<AsyncFd<OwnedFd>> {
    // SAFETY: an `OwnedFd` has one descriptor, which is open as long as it lives, and gives no access
    // by which it could be replaced.
    let process = unsafe { AsyncFd::register_with_interest(process, Interest::READABLE) };
    let process = process.ok()?;
    let _ = process.readable().await;
    Some(process)
}
