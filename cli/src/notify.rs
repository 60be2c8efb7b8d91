//! What a service manager is told, if one has started us.

use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// Says something to the service manager; without one, nothing.
pub(crate) fn notify(state: &str) -> io::Result<()> {
    let Some(address) = std::env::var_os("NOTIFY_SOCKET") else { return Ok(()) };
    let address = match address.as_encoded_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
        _ => SocketAddr::from_pathname(&address)?,
    };
    UnixDatagram::unbound()?.send_to_addr(state.as_bytes(), &address).map(drop)
}
