//! What a client says: it goes from the thread that says it, which wakes up no other, as far as the system takes it at
//! once. A task sends the rest.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};

use tokio::sync::Notify;

use crate::io::sync::{Lock, MutexGuard};
use crate::net::link::Sender;
use crate::net::wire::Frame;

/// Where frames go out, in the order in which they are said. The connection ends with the last one, once all have gone.
#[derive(Clone)]
pub(super) struct Outgoing(Arc<Open>);

/// The same for whoever does not keep the connection.
#[derive(Clone)]
pub(super) struct WeakOutgoing(Weak<Open>);

/// Ends the queue, once all have gone who say something.
struct Open(Arc<Queue>);

struct Queue {
    /// The process that has connected. One that was forked from it must not speak for it.
    process: u32,
    state: Lock<State>,
    /// Wakes up the task: there are frames for it, or no more will come.
    turn: Notify,
}

#[derive(Default)]
struct State {
    /// Not here while the task sends, nor once the connection is lost.
    sender: Option<Sender>,
    /// What has not gone: how many bytes of the first one have is said with it.
    frames: VecDeque<(Frame, usize)>,
    /// Nobody says anything any more, or nobody hears it.
    has_ended: bool,
}

impl Outgoing {
    /// Takes over one end of a connection; what is returned sends until that ends.
    pub(super) fn start(sender: Sender) -> (Self, impl Future<Output = ()> + Send) {
        let state = State { sender: Some(sender), ..State::default() };
        let queue = Arc::new(Queue {
            process: std::process::id(),
            state: Lock::new(state),
            turn: Notify::new(),
        });
        (Self(Arc::new(Open(queue.clone()))), send(Ending(queue)))
    }

    /// Says something, which goes after all that was said before. Nothing once the connection is lost: says whether it
    /// is not.
    pub(super) fn send(&self, frame: Frame) -> bool {
        let Open(queue) = &*self.0;
        let Some(mut state) = queue.state().filter(|state| !state.has_ended) else { return false };
        let direct = state.sender.as_ref().filter(|_| state.frames.is_empty());
        if let Err(sent) = direct.map_or(Err(0), |sender| sender.send_now(&frame, 0)) {
            state.frames.push_back((frame, sent));
            queue.turn.notify_one();
        }
        true
    }

    pub(super) fn downgrade(&self) -> WeakOutgoing {
        WeakOutgoing(Arc::downgrade(&self.0))
    }
}

impl WeakOutgoing {
    pub(super) fn upgrade(&self) -> Option<Outgoing> {
        self.0.upgrade().map(Outgoing)
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        if let Some(mut state) = self.0.state() {
            state.has_ended = true;
            self.0.turn.notify_one();
        }
    }
}

impl Queue {
    /// None in a process that was forked: another thread may have held it then.
    fn state(&self) -> Option<MutexGuard<'_, State>> {
        let is_own = self.process == std::process::id();
        is_own.then(|| self.state.lock())
    }
}

/// Sends what has not gone from the thread that said it.
async fn send(ending: Ending) {
    let queue = &ending.0;
    loop {
        let next = {
            let Some(mut state) = queue.state() else { return };
            match state.frames.pop_front() {
                Some(frame) => state.sender.take().zip(Some(frame)),
                None if state.has_ended => return,
                None => None,
            }
        };
        let Some((mut sender, (frame, sent))) = next else {
            queue.turn.notified().await;
            continue;
        };
        if sender.send_rest(&frame, sent).await.is_err() {
            sender.close();
            return;
        }
        let Some(mut state) = queue.state() else { return };
        state.sender = Some(sender);
    }
}

/// The end of the task. If its runtime ends first, the rest goes as far as the system takes it: the last words of a
/// store that is dropped with its runtime are there.
struct Ending(Arc<Queue>);

impl Drop for Ending {
    fn drop(&mut self) {
        let Some(mut state) = self.0.state() else { return };
        state.has_ended = true;
        let (sender, frames) = (state.sender.take(), std::mem::take(&mut state.frames));
        drop(state);
        // It is not here if it had sent a part of a frame: nothing may follow that.
        let Some(sender) = sender else { return };
        for (frame, sent) in frames {
            if sender.send_now(&frame, sent).is_err() {
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
    use crate::net::link::split;
    use crate::net::wire::{FrameKind, Limits};

    fn frame(number: u64, len: usize, fds: Vec<OwnedFd>) -> Frame {
        let (kind, data) = (FrameKind::Request, bytes::Bytes::from(vec![7; len]).into());
        Frame { kind, number, head: b"{}".to_vec(), data, fds }
    }

    /// More than a socket holds, and less, in turn.
    const LENS: [usize; 7] = [1, 3 << 20, 0, 5, 1 << 20, 1 << 20, 2];

    #[tokio::test]
    async fn what_is_said_goes_in_turn() {
        let (near, far) = UnixStream::pair().unwrap();
        let (sender, _hears) = split(near, Limits::DAEMON);
        let (_says, mut receiver) = split(far, Limits::DAEMON);
        let (outgoing, sending) = Outgoing::start(sender);
        let sending = tokio::spawn(sending);
        for (number, len) in (0..).zip(LENS) {
            let fds = std::fs::File::open("/dev/null").unwrap();
            assert!(outgoing.send(frame(number, len, vec![fds.into()])));
        }
        drop(outgoing);
        for (number, len) in (0..).zip(LENS) {
            let come = receiver.receive().await.unwrap().unwrap();
            assert_eq!((come.number, come.data.len(), come.fds.len()), (number, len, 1));
            assert!(come.data.into_bytes().iter().all(|byte| *byte == 7));
        }
        assert!(receiver.receive().await.unwrap().is_none());
        sending.await.unwrap();
    }

    #[test]
    fn what_fits_goes_without_a_runtime() {
        let runtime = || Builder::new_current_thread().enable_all().build().unwrap();
        for lens in [&LENS[..1], &LENS[3..4], &[]] {
            let (first, second) = (runtime(), runtime());
            let (near, far) = {
                let _inside = first.enter();
                UnixStream::pair().unwrap()
            };
            let far = far.into_std().unwrap();
            let (outgoing, sending) = {
                let _inside = first.enter();
                Outgoing::start(split(near, Limits::DAEMON).0)
            };
            first.spawn(sending);
            for (number, len) in (0..).zip(lens) {
                assert!(outgoing.send(frame(number, *len, Vec::new())));
            }
            drop(first);
            assert!(!outgoing.send(frame(9, 0, Vec::new())), "nobody sends it");
            second.block_on(async {
                let far = UnixStream::from_std(far).unwrap();
                let (_says, mut receiver) = split(far, Limits::DAEMON);
                for (number, len) in (0..).zip(lens) {
                    let come = receiver.receive().await.unwrap().unwrap();
                    assert_eq!((come.number, come.data.len()), (number, *len));
                }
                assert!(receiver.receive().await.unwrap().is_none());
            });
        }
    }

    #[tokio::test]
    async fn what_nobody_hears_is_said_to_be_lost() {
        let (near, far) = UnixStream::pair().unwrap();
        let (outgoing, sending) = Outgoing::start(split(near, Limits::DAEMON).0);
        drop(far);
        assert!(outgoing.send(frame(0, 1, Vec::new())), "it is not known yet");
        sending.await;
        assert!(!outgoing.send(frame(1, 1, Vec::new())));
    }
}
