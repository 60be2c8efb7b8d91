//! Who connects: a process of this host, which shares its memory, or somebody elsewhere.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;

use rustix::process::{Pid, PidfdFlags};
use tokio::net::{TcpStream, UnixStream};

use super::HANDSHAKE;
use crate::daemon::DaemonOptions;
use crate::error::{Error, ErrorKind, Result};
use crate::net::link::{self, Receiver, Sender};
use crate::net::tls::Identity;
use crate::net::wire::Limits;

/// A connection that has come.
pub(crate) struct Guest {
    pub(crate) sender: Sender,
    pub(crate) receiver: Receiver,
    pub(crate) origin: Origin,
}

/// Where somebody is.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Origin {
    /// On this host; its process, if that is of this one's PID namespace.
    Process { pid: Option<Pid>, uid: u32 },
    /// Anywhere: it has proven who it is, unless this host is all there is.
    Address(SocketAddr),
}

impl Guest {
    /// A process that has connected to the socket.
    pub(crate) fn near(stream: UnixStream) -> Option<Self> {
        let credentials = stream.peer_cred().ok()?;
        let (sender, receiver) = link::split(stream, Limits::STRANGER);
        let pid = credentials.pid().and_then(Pid::from_raw);
        let origin = Origin::Process { pid, uid: credentials.uid() };
        Some(Self { sender, receiver, origin })
    }

    /// Somebody who has connected by TCP, and proves in time who that is.
    pub(crate) async fn far(
        stream: TcpStream,
        address: SocketAddr,
        identity: &Identity,
    ) -> Option<Self> {
        let accepted = identity.accept(stream, HANDSHAKE).await;
        let accepted =
            accepted.inspect_err(|error| tracing::warn!(%address, %error, "turned away")).ok()?;
        let (sender, receiver) = link::split_net(accepted, Limits::STRANGER);
        Some(Self { sender, receiver, origin: Origin::Address(address) })
    }
}

impl Origin {
    /// Whether it may connect.
    pub(crate) fn allow(self, options: &DaemonOptions) -> Result<()> {
        match self {
            Self::Process { uid, .. } if !options.admits(uid) => {
                let text =
                    format_args!("processes of user {uid} may not connect; serve with --allow-uid");
                Err(Error::new(ErrorKind::Refused, text))
            }
            Self::Process { .. } | Self::Address(_) => Ok(()),
        }
    }

    /// Whether it shares this host's memory.
    pub(crate) fn is_near(self) -> bool {
        matches!(self, Self::Process { .. })
    }

    /// What its frames have at most, once it has said hello.
    pub(crate) fn limits(self) -> Limits {
        if self.is_near() { Limits::CLIENT } else { Limits::FAR_CLIENT }
    }

    /// Its process; 0 for one of another host, or of a PID namespace that this one does not see.
    pub(crate) fn pid(self) -> u32 {
        match self {
            Self::Process { pid: Some(pid), .. } => pid.as_raw_nonzero().get().cast_unsigned(),
            Self::Process { pid: None, .. } | Self::Address(_) => 0,
        }
    }

    pub(crate) fn address(self) -> Option<SocketAddr> {
        match self {
            Self::Process { .. } => None,
            Self::Address(address) => Some(address),
        }
    }

    /// A handle on its process; none if it has ended, is hidden, or is not of this host.
    pub(crate) fn process(self) -> Option<OwnedFd> {
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
    fn processes_of_the_same_user_and_of_root_may_connect() {
        let own = rustix::process::geteuid().as_raw();
        let other = own + 7;
        let mut options = DaemonOptions::at("socket", 0);
        let pid = Some(rustix::process::getpid());
        let allow = |uid: u32, options: &DaemonOptions| Origin::Process { pid, uid }.allow(options);
        assert!(allow(own, &options).is_ok() && allow(0, &options).is_ok());
        assert!(allow(other, &options).is_err());
        // Who is not of the group cannot connect.
        options.socket_group = Some(1);
        assert!(allow(other, &options).is_ok());
        options.allow_uids = vec![other];
        assert!(allow(other, &options).is_ok());
        let error = allow(other + 1, &options).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Refused);
        assert!(error.to_string().contains(&(other + 1).to_string()), "{error}");
    }
}
