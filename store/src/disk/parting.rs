//! Letting go of files. When the last one lets go of a file without a name, the system takes its room back, which takes
//! 90 ms for 512 MiB in its cache: nobody is to wait for that but who needs the room.

use std::ops::Deref;
use std::process;
use std::sync::{Condvar, Mutex, MutexGuard};
use std::thread;

/// A file of fewer bytes is sooner let go than a thread started.
const LARGE: u64 = 16 << 20;

/// What has a file open, or mapped. When it is dropped, it lets go of that on a thread of its own, if the file is large.
#[derive(Debug)]
pub(crate) struct Parting<T: Send + 'static> {
    it: Option<T>,
    is_large: bool,
}

impl<T: Send + 'static> Parting<T> {
    /// Of a file of so many bytes.
    pub(crate) fn new(it: T, len: u64) -> Self {
        Self { it: Some(it), is_large: len >= LARGE }
    }
}

impl<T: Send + 'static> Deref for Parting<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.it.as_ref().expect("it is taken when it is dropped")
    }
}

impl<T: AsRef<[u8]> + Send + 'static> AsRef<[u8]> for Parting<T> {
    fn as_ref(&self) -> &[u8] {
        (**self).as_ref()
    }
}

impl<T: Send + 'static> Drop for Parting<T> {
    fn drop(&mut self) {
        let Some(it) = self.it.take().filter(|_| self.is_large) else { return };
        let counted = Counted::new();
        let part = move || {
            drop(it);
            drop(counted);
        };
        // Without a thread it is dropped here.
        drop(thread::Builder::new().name("tssd-parting".to_owned()).spawn(part));
    }
}

/// Waits until one of those that are being let go is gone; false if there is none.
pub(super) fn wait() -> bool {
    let state = state();
    let before = state.gone;
    let is_any = state.count > 0;
    let still = |state: &mut State| state.count > 0 && state.gone == before;
    drop(GONE.wait_while(state, still).expect(UNPOISONED));
    is_any
}

/// How many are being let go, by which process: one that was forked has none of these threads.
struct State {
    process: u32,
    count: usize,
    gone: u64,
}

static STATE: Mutex<State> = Mutex::new(State { process: 0, count: 0, gone: 0 });
static GONE: Condvar = Condvar::new();
const UNPOISONED: &str = "nobody panics while counting";

fn state() -> MutexGuard<'static, State> {
    let mut state = STATE.lock().expect(UNPOISONED);
    if state.process != process::id() {
        *state = State { process: process::id(), count: 0, gone: 0 };
    }
    state
}

/// One that is counted as long as this lives.
struct Counted;

impl Counted {
    fn new() -> Self {
        state().count += 1;
        Self
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        let mut state = state();
        state.count -= 1;
        state.gone += 1;
        GONE.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    /// Takes until it is told to drop, and says on which thread that was.
    struct Slow(mpsc::Receiver<()>, mpsc::Sender<thread::ThreadId>);

    impl Drop for Slow {
        fn drop(&mut self) {
            let _ = self.0.recv_timeout(Duration::from_mins(1));
            let _ = self.1.send(thread::current().id());
        }
    }

    #[test]
    fn who_lets_go_of_a_large_file_does_not_wait_but_who_needs_its_room_does() {
        let (go, told) = mpsc::channel();
        let (says, dropped) = mpsc::channel();
        drop(Parting::new(Slow(told, says), LARGE));
        assert!(dropped.try_recv().is_err(), "it is not dropped yet");
        let tells = thread::spawn(move || go.send(()));
        // Until there is none any more, of other tests either.
        while wait() {}
        tells.join().unwrap().unwrap();
        assert_ne!(dropped.try_recv().unwrap(), thread::current().id());
    }

    #[test]
    fn a_small_file_is_let_go_at_once() {
        let (go, told) = mpsc::channel();
        let (says, dropped) = mpsc::channel();
        go.send(()).unwrap();
        drop(Parting::new(Slow(told, says), LARGE - 1));
        assert_eq!(dropped.try_recv().unwrap(), thread::current().id());
    }
}
