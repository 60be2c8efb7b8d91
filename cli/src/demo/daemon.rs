//! A daemon of the demonstration's own.

use std::path::Path;

use tssd_store::DaemonOptions;
use tssd_store::blocking::{Daemon, Store};

use crate::failure::Result;
use crate::store::failure;

/// Does something with the store of a daemon on threads of its own.
pub(super) fn with_daemon<T>(
    socket: &Path,
    model_bytes: u64,
    work: impl FnOnce(&Store) -> Result<T>,
) -> Result<T> {
    // Two versions at once, and as much again for what surrounds them.
    let limit = model_bytes.saturating_mul(4).saturating_add(1 << 28);
    let daemon = Daemon::bind(DaemonOptions::at(socket, limit)).map_err(|error| failure(&error))?;
    let (stop, stopped) = tokio::sync::oneshot::channel();
    let serving = std::thread::spawn(move || daemon.serve(stopped));
    let worked = Store::connect(&format!("unix:{}", socket.display()))
        .map_err(|error| failure(&error))
        .and_then(|store| work(&store));
    drop(stop);
    // It has ended, well or not; what it did was compared.
    let _ = serving.join();
    worked
}
