//! A daemon in the process of the demo.

use std::path::Path;

use tssd_store::DaemonOptions;
use tssd_store::blocking::{Daemon, Store};

use crate::failure::Result;
use crate::store::store_failure;

/// Runs `work` with the store of a daemon, which runs on its own threads until `work` returns.
pub(super) fn with_daemon<T>(
    socket: &Path,
    model_bytes: u64,
    work: impl FnOnce(&Store) -> Result<T>,
) -> Result<T> {
    // Memory for two concurrent versions, doubled for overhead, plus 256 MiB.
    let limit = model_bytes.saturating_mul(4).saturating_add(1 << 28);
    let daemon = Daemon::bind(DaemonOptions::for_socket(socket, limit))
        .map_err(|error| store_failure(&error))?;
    let (sender, receiver) = tokio::sync::oneshot::channel();
    let server = std::thread::spawn(move || daemon.serve(receiver));
    let result = Store::connect(&format!("unix:{}", socket.display()))
        .map_err(|error| store_failure(&error))
        .and_then(|store| work(&store));
    drop(sender);
    // The result of the daemon does not matter: the demo has compared all bytes.
    let _ = server.join();
    result
}
