//! Notifications to the service manager, by the protocol of `sd_notify`.

use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// Sends a state to the service manager. Does nothing if `NOTIFY_SOCKET` is not set.
pub(crate) fn notify(state: &str) -> io::Result<()> {
    let Some(address) = std::env::var_os("NOTIFY_SOCKET") else { return Ok(()) };
    let address = match address.as_encoded_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
        _ => SocketAddr::from_pathname(&address)?,
    };
    UnixDatagram::unbound()?.send_to_addr(state.as_bytes(), &address).map(drop)
}
