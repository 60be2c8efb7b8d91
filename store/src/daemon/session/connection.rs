//! Incoming connections: from a process of this host, which shares its memory, or through TCP.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;

use rustix::process::{Pid, PidfdFlags};
use tokio::net::{TcpStream, UnixStream};

use super::HANDSHAKE_TIMEOUT;
use crate::daemon::DaemonOptions;
use crate::error::{Error, ErrorKind, Result};
use crate::net::link::{self, FrameReceiver, FrameSender};
use crate::net::tls::Identity;
use crate::net::wire::Limits;

/// A connection before the handshake of the protocol.
pub(crate) struct IncomingConnection {
    pub(crate) sender: FrameSender,
    pub(crate) receiver: FrameReceiver,
    pub(crate) origin: Origin,
}

/// Origin of a connection.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Origin {
    /// A process of this host. `pid` is `None` if it is in another PID namespace.
    Process { pid: Option<Pid>, uid: u32 },
    /// A TCP client. It is authenticated by TLS, unless the daemon listens only on a loopback address.
    Address(SocketAddr),
}

impl IncomingConnection {
    /// Wraps a connection through the Unix socket. Returns `None` if its credentials cannot be read.
    pub(crate) fn local(stream: UnixStream) -> Option<Self> {
        let credentials = stream.peer_cred().ok()?;
        let (sender, receiver) = link::split_unix(stream, Limits::BEFORE_HELLO);
        let pid = credentials.pid().and_then(Pid::from_raw);
        let origin = Origin::Process { pid, uid: credentials.uid() };
        Some(Self { sender, receiver, origin })
    }

    /// Accepts a connection through TCP. Returns `None` if the TLS handshake fails or takes too long.
    pub(crate) async fn remote(
        stream: TcpStream,
        address: SocketAddr,
        identity: &Identity,
    ) -> Option<Self> {
        let accepted = identity.accept(stream, HANDSHAKE_TIMEOUT).await;
        let accepted =
            accepted.inspect_err(|error| tracing::warn!(%address, %error, "turned away")).ok()?;
        let (sender, receiver) = link::split_tcp(accepted, Limits::BEFORE_HELLO);
        Some(Self { sender, receiver, origin: Origin::Address(address) })
    }
}

impl Origin {
    /// Checks that the client may connect.
    ///
    /// # Errors
    ///
    /// `Refused` if it is a process of a user that the options do not admit.
    pub(crate) fn check_access(self, options: &DaemonOptions) -> Result<()> {
        match self {
            Self::Process { uid, .. } if !options.admits(uid) => {
                let text =
                    format_args!("processes of user {uid} may not connect; serve with --allow-uid");
                Err(Error::new(ErrorKind::Refused, text))
            }
            Self::Process { .. } | Self::Address(_) => Ok(()),
        }
    }

    /// Whether the client shares the memory of this host.
    pub(crate) fn is_local(self) -> bool {
        matches!(self, Self::Process { .. })
    }

    /// Returns the limits of its frames after the handshake.
    pub(crate) fn limits(self) -> Limits {
        if self.is_local() { Limits::CLIENT } else { Limits::REMOTE_CLIENT }
    }

    /// Returns its process id, or 0 if it is on another host or in another PID namespace.
    pub(crate) fn pid(self) -> u32 {
        match self {
            Self::Process { pid: Some(pid), .. } => pid.as_raw_nonzero().get().cast_unsigned(),
            Self::Process { pid: None, .. } | Self::Address(_) => 0,
        }
    }

    /// Returns the address of a TCP client.
    pub(crate) fn address(self) -> Option<SocketAddr> {
        match self {
            Self::Process { .. } => None,
            Self::Address(address) => Some(address),
        }
    }

    /// Opens a pidfd of its process. `None` if the process has exited, is hidden, or is on another host.
    pub(crate) fn open_pidfd(self) -> Option<OwnedFd> {
        match self {
            Self::Process { pid: Some(pid), .. } => {
                rustix::process::pidfd_open(pid, PidfdFlags::NONBLOCK).ok()
            }
            Self::Process { pid: None, .. } | Self::Address(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn daemon_admits_same_user_root_and_allowed_users() {
        let own = rustix::process::geteuid().as_raw();
        let other = own + 7;
        let mut options = DaemonOptions::for_socket("socket", 0);
        let pid = Some(rustix::process::getpid());
        let allow =
            |uid: u32, options: &DaemonOptions| Origin::Process { pid, uid }.check_access(options);
        assert!(allow(own, &options).is_ok() && allow(0, &options).is_ok());
        assert!(allow(other, &options).is_err());
        // The permissions of the socket admit only members of the group.
        options.socket_group = Some(1);
        assert!(allow(other, &options).is_ok());
        options.allow_uids = vec![other];
        assert!(allow(other, &options).is_ok());
        let error = allow(other + 1, &options).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Refused);
        assert!(error.to_string().contains(&(other + 1).to_string()), "{error}");
    }
}
