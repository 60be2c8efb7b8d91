//! Queue of outgoing frames.
//!
//! The thread that adds a frame sends as much of it as the kernel accepts without blocking, which
//! wakes no other thread. A task sends the rest.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};

use tokio::sync::Notify;

use crate::io::sync::{Lock, MutexGuard};
use crate::net::link::FrameSender;
use crate::net::wire::Frame;

/// Sends frames in order.
///
/// The connection ends when the last clone is dropped and all frames are sent.
#[derive(Clone)]
pub(super) struct SendQueue(Arc<CloseOnDrop>);

/// A weak reference, which does not keep the connection open.
#[derive(Clone)]
pub(super) struct WeakSendQueue(Weak<CloseOnDrop>);

/// Closes the queue on drop.
struct CloseOnDrop(Arc<Queue>);

struct Queue {
    /// Id of the process that has connected. A forked process must not send on the connection.
    pid: u32,
    state: Lock<State>,
    /// Wakes the task: there are frames to send, or the queue is closed.
    wakeup: Notify,
}

#[derive(Default)]
struct State {
    /// None while the task sends, and after the connection is lost.
    sender: Option<FrameSender>,
    /// Frames to send. Each has the number of its bytes that are already sent, which only the first
    /// can have.
    frames: VecDeque<(Frame, usize)>,
    /// Whether the queue is closed, or the connection lost.
    is_closed: bool,
}

impl SendQueue {
    /// Creates the queue of a connection. The returned future sends until the connection ends.
    pub(super) fn start(sender: FrameSender) -> (Self, impl Future<Output = ()> + Send) {
        let state = State { sender: Some(sender), ..State::default() };
        let queue = Arc::new(Queue {
            pid: std::process::id(),
            state: Lock::new(state),
            wakeup: Notify::new(),
        });
        (Self(Arc::new(CloseOnDrop(queue.clone()))), send_queued(FlushOnDrop(queue)))
    }

    /// Sends a frame after all earlier ones. Returns false if the connection is lost.
    pub(super) fn send(&self, frame: Frame) -> bool {
        let CloseOnDrop(queue) = &*self.0;
        let Some(mut state) = queue.state().filter(|state| !state.is_closed) else { return false };
        let direct = state.sender.as_ref().filter(|_| state.frames.is_empty());
        if let Err(sent) = direct.map_or(Err(0), |sender| sender.try_send(&frame, 0)) {
            state.frames.push_back((frame, sent));
            queue.wakeup.notify_one();
        }
        true
    }

    pub(super) fn downgrade(&self) -> WeakSendQueue {
        WeakSendQueue(Arc::downgrade(&self.0))
    }
}

impl WeakSendQueue {
    pub(super) fn upgrade(&self) -> Option<SendQueue> {
        self.0.upgrade().map(SendQueue)
    }
}

impl Drop for CloseOnDrop {
    fn drop(&mut self) {
        if let Some(mut state) = self.0.state() {
            state.is_closed = true;
            self.0.wakeup.notify_one();
        }
    }
}

impl Queue {
    /// Locks the state. Returns none in a forked process: another thread may have held the lock.
    fn state(&self) -> Option<MutexGuard<'_, State>> {
        let is_same_process = self.pid == std::process::id();
        is_same_process.then(|| self.state.lock())
    }
}

/// Sends the frames that the adding threads could not send.
async fn send_queued(guard: FlushOnDrop) {
    let queue = &guard.0;
    loop {
        let next = {
            let Some(mut state) = queue.state() else { return };
            match state.frames.pop_front() {
                Some(frame) => state.sender.take().zip(Some(frame)),
                None if state.is_closed => return,
                None => None,
            }
        };
        let Some((mut sender, (frame, sent))) = next else {
            queue.wakeup.notified().await;
            continue;
        };
        if sender.send_remaining(&frame, sent).await.is_err() {
            sender.close();
            return;
        }
        let Some(mut state) = queue.state() else { return };
        state.sender = Some(sender);
    }
}

/// Closes the queue when the task ends.
///
/// If the runtime ends first, sends the remaining frames as far as the kernel accepts them without
/// blocking. So the last frames of a store that is dropped with its runtime are sent.
struct FlushOnDrop(Arc<Queue>);

impl Drop for FlushOnDrop {
    fn drop(&mut self) {
        let Some(mut state) = self.0.state() else { return };
        state.is_closed = true;
        let (sender, frames) = (state.sender.take(), std::mem::take(&mut state.frames));
        drop(state);
        // It is none if the task was interrupted within a frame: no other frame may follow that.
        let Some(sender) = sender else { return };
        for (frame, sent) in frames {
            if sender.try_send(&frame, sent).is_err() {
                break;
            }
        }
        sender.close();
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;

    use tokio::net::UnixStream;
    use tokio::runtime::Builder;

    use super::*;
    use crate::net::link::split_unix;
    use crate::net::wire::{FrameKind, Limits};

    fn frame(number: u64, len: usize, fds: Vec<OwnedFd>) -> Frame {
        let (kind, data) = (FrameKind::Request, bytes::Bytes::from(vec![7; len]).into());
        Frame { kind, number, head: b"{}".to_vec(), data, fds }
    }

    /// Alternates between more bytes than a socket buffer holds, and fewer.
    const LENS: [usize; 7] = [1, 3 << 20, 0, 5, 1 << 20, 1 << 20, 2];

    #[tokio::test]
    async fn frames_are_sent_in_order() {
        let (local, remote) = UnixStream::pair().unwrap();
        let (sender, _receiver) = split_unix(local, Limits::DAEMON);
        let (_sender, mut receiver) = split_unix(remote, Limits::DAEMON);
        let (outgoing, sending) = SendQueue::start(sender);
        let sending = tokio::spawn(sending);
        for (number, len) in (0..).zip(LENS) {
            let fds = std::fs::File::open("/dev/null").unwrap();
            assert!(outgoing.send(frame(number, len, vec![fds.into()])));
        }
        drop(outgoing);
        for (number, len) in (0..).zip(LENS) {
            let received = receiver.receive().await.unwrap().unwrap();
            assert_eq!(
                (received.number, received.data.len(), received.fds.len()),
                (number, len, 1)
            );
            assert!(received.data.into_bytes().iter().all(|byte| *byte == 7));
        }
        assert!(receiver.receive().await.unwrap().is_none());
        sending.await.unwrap();
    }

    #[test]
    fn small_frames_are_sent_without_runtime() {
        let runtime = || Builder::new_current_thread().enable_all().build().unwrap();
        for lens in [&LENS[..1], &LENS[3..4], &[]] {
            let (first, second) = (runtime(), runtime());
            let (local, remote) = {
                let _inside = first.enter();
                UnixStream::pair().unwrap()
            };
            let remote = remote.into_std().unwrap();
            let (outgoing, sending) = {
                let _inside = first.enter();
                SendQueue::start(split_unix(local, Limits::DAEMON).0)
            };
            first.spawn(sending);
            for (number, len) in (0..).zip(lens) {
                assert!(outgoing.send(frame(number, *len, Vec::new())));
            }
            drop(first);
            assert!(!outgoing.send(frame(9, 0, Vec::new())), "nobody sends it");
            second.block_on(async {
                let remote = UnixStream::from_std(remote).unwrap();
                let (_sender, mut receiver) = split_unix(remote, Limits::DAEMON);
                for (number, len) in (0..).zip(lens) {
                    let received = receiver.receive().await.unwrap().unwrap();
                    assert_eq!((received.number, received.data.len()), (number, *len));
                }
                assert!(receiver.receive().await.unwrap().is_none());
            });
        }
    }

    #[tokio::test]
    async fn send_fails_after_connection_is_lost() {
        let (local, remote) = UnixStream::pair().unwrap();
        let (outgoing, sending) = SendQueue::start(split_unix(local, Limits::DAEMON).0);
        drop(remote);
        assert!(outgoing.send(frame(0, 1, Vec::new())), "it is not known yet");
        sending.await;
        assert!(!outgoing.send(frame(1, 1, Vec::new())));
    }
}
