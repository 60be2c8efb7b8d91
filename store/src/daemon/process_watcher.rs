//! Watches processes that disconnected while they had memory of the daemon mapped.
//!
//! Each process is watched by one pidfd until it exits, for any number of connections. With one pidfd per
//! connection, a process that reconnects repeatedly could exhaust the descriptors of the daemon.

use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::io::sync::{Lock, MutexGuard, boxed};
use crate::shm::{PeerId, Pool};

/// Processes that may still have memory mapped after they disconnected.
#[derive(Default)]
pub(crate) struct ProcessWatcher(Lock<Vec<WatchedProcess>>);

struct WatchedProcess {
    pid: u32,
    /// The pidfd that is watched. It stays open while this entry exists.
    descriptor: RawFd,
    /// The peer ids of its connections.
    peers: Vec<PeerId>,
}

impl WatchedProcess {
    /// Whether the process still has its process id. While it does, the kernel does not reuse the id.
    fn has_pid(&self) -> bool {
        let path = format!("/proc/self/fdinfo/{}", self.descriptor);
        let text = std::fs::read_to_string(path).unwrap_or_default();
        text.lines().any(|line| {
            line.strip_prefix("Pid:").is_some_and(|pid| pid.trim() == self.pid.to_string())
        })
    }
}

impl ProcessWatcher {
    fn processes(&self) -> MutexGuard<'_, Vec<WatchedProcess>> {
        self.0.lock()
    }

    /// Watches the process of a peer that disconnected.
    ///
    /// When the process exits, the pool drops the mappings of the peer.
    pub(crate) fn watch(
        self: &Arc<Self>,
        pool: Arc<Pool>,
        pid: u32,
        process: OwnedFd,
        peer: PeerId,
    ) {
        let mut processes = self.processes();
        if let Some(watched) = processes.iter_mut().find(|it| it.pid == pid && it.has_pid()) {
            watched.peers.push(peer);
            return;
        }
        let descriptor = process.as_raw_fd();
        processes.push(WatchedProcess { pid, descriptor, peers: vec![peer] });
        drop(processes);
        let watcher = self.clone();
        tokio::spawn(boxed(async move {
            let process = wait_for_exit(process).await;
            let exited = watcher
                .processes()
                .extract_if(.., |it| it.descriptor == descriptor)
                .collect::<Vec<_>>();
            // The entries are removed, so the number of the descriptor may be reused from here on.
            drop(process);
            exited.iter().flat_map(|it| &it.peers).for_each(|peer| pool.record_exit(*peer));
        }));
    }
}

/// Waits until a process exits, and returns its pidfd, so that the caller closes it.
#[expect(unsafe_code, reason = "the runtime watches a descriptor that is ours")]
async fn wait_for_exit(process: OwnedFd) -> Option<AsyncFd<OwnedFd>> {
    // SAFETY: `AsyncFd` requires that the descriptor stays open and the same while it is registered. An `OwnedFd`
    // keeps its descriptor open while it exists, and no operation on it replaces the descriptor.
    let process = unsafe { AsyncFd::register_with_interest(process, Interest::READABLE) };
    let process = process.ok()?;
    let _ = process.readable().await;
    Some(process)
}
