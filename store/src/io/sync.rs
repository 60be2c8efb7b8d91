//! Synchronization primitives of the standard library and tokio.
//!
//! With the feature `shuttle` they come from shuttle instead: the tests in `schedules` then control the order in which
//! tasks run.

use std::fmt;
use std::pin::Pin;

#[cfg(not(feature = "shuttle"))]
pub(crate) use std::sync::{Mutex, MutexGuard};
#[cfg(all(target_os = "linux", not(feature = "shuttle")))]
pub(crate) use tokio::sync::{Notify, mpsc};
#[cfg(not(feature = "shuttle"))]
pub(crate) use tokio::{
    runtime::Handle,
    select, spawn,
    sync::{Mutex as AsyncMutex, OnceCell, OwnedMutexGuard, watch},
    task::spawn_blocking,
    time::{sleep, timeout},
};

#[cfg(feature = "shuttle")]
pub(crate) use shuttle::sync::{Mutex, MutexGuard};
#[cfg(feature = "shuttle")]
pub(crate) use shuttle_tokio::{
    runtime::Handle,
    select, spawn,
    sync::{Mutex as AsyncMutex, Notify, OnceCell, OwnedMutexGuard, mpsc, watch},
    task::spawn_blocking,
    time::{sleep, timeout},
};

/// A mutex whose holders do not panic. If one does, the next call of [`lock`](Self::lock) panics too.
#[derive(Default)]
pub(crate) struct Lock<T>(Mutex<T>);

impl<T> Lock<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(Mutex::new(value))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().expect("no code panics while it holds a lock of the store")
    }

    pub(crate) fn into_inner(self) -> T {
        self.0.into_inner().expect("no code panics while it holds a lock of the store")
    }
}

impl<T: fmt::Debug> fmt::Debug for Lock<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.lock().fmt(f)
    }
}

/// A boxed future, whose type depends only on the output.
///
/// The code of the runtime is compiled only once per output type.
pub(crate) type BoxFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// Boxes a future.
pub(crate) fn boxed<T>(future: impl Future<Output = T> + Send + 'static) -> BoxFuture<T> {
    Box::pin(future)
}
