//! Other hosts: how they are named, and connections to them, by TCP in the open or by TLS.
//!
//! In the open nothing leaves the host. By TLS both sides prove who they are: whoever has
//! a certificate of the one authority is admitted.

use std::fmt;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::net::RecvFlags;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, ClientConnection, RootCertStore, ServerConfig, StreamOwned};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::{TlsAcceptor, TlsConnector};

use crate::credentials::Credentials;
use crate::error::{Error, ErrorKind, Result};
use crate::io::exec::run_blocking;
use crate::route::{Route, Transport};

/// A connection that sends nothing for this time while it owes something is lost, and so is one whose
/// peer's host does not acknowledge for so long.
pub(crate) const SILENCE: Duration = Duration::from_secs(30);

/// After so long without a word the peer's host is asked whether it is still there.
const KEEPALIVE: Duration = Duration::from_secs(15);

/// Where a daemon of another host listens: `tls://HOST:PORT`, or `tcp://HOST:PORT` on this one.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Endpoint {
    is_tls: bool,
    host: String,
    port: u16,
}

/// Credentials that were read.
#[derive(Clone, Default)]
pub(crate) struct Identity(Option<Configs>);

#[derive(Clone)]
struct Configs {
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
}

/// A connection of bytes both ways.
pub(crate) trait Duplex: Read + Write + Send {
    /// The socket below it.
    fn socket(&self) -> BorrowedFd<'_>;

    /// Whether the other side has not ended it, as far as is known.
    fn is_open(&self) -> bool {
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        match rustix::net::recv(self.socket(), &mut [0; 1], flags) {
            Ok((come, _)) => come > 0,
            Err(error) => error == rustix::io::Errno::AGAIN,
        }
    }
}

impl Duplex for TcpStream {
    fn socket(&self) -> BorrowedFd<'_> {
        self.as_fd()
    }
}

impl Duplex for UnixStream {
    fn socket(&self) -> BorrowedFd<'_> {
        self.as_fd()
    }
}

impl Duplex for StreamOwned<ClientConnection, TcpStream> {
    fn socket(&self) -> BorrowedFd<'_> {
        self.sock.as_fd()
    }
}

/// The same, for tasks.
pub(crate) trait AsyncDuplex: AsyncRead + AsyncWrite + Send + Sync + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Sync + Unpin> AsyncDuplex for T {}

impl FromStr for Endpoint {
    type Err = Error;

    fn from_str(url: &str) -> Result<Self> {
        let (scheme, rest) = url.split_once(':').unwrap_or(("", url));
        let is_tls = scheme == "tls";
        let place = rest.strip_prefix("//").unwrap_or(rest);
        let parts = place.rsplit_once(':').and_then(|(host, port)| {
            let host =
                host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
            let port: u16 = port.parse().ok().filter(|port| *port != 0)?;
            (!host.is_empty()).then(|| (host.to_owned(), port))
        });
        match parts {
            Some((host, port)) if is_tls || scheme == "tcp" => Ok(Self { is_tls, host, port }),
            _ => Err(Error::new(
                ErrorKind::Invalid,
                format_args!("`{url}` is no address: write tls://HOST:PORT, or tcp://HOST:PORT"),
            )),
        }
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.is_tls { "tls" } else { "tcp" };
        let (host, port) = (&self.host, self.port);
        if host.contains(':') {
            write!(f, "{scheme}://[{host}]:{port}")
        } else {
            write!(f, "{scheme}://{host}:{port}")
        }
    }
}

impl Endpoint {
    /// Connects, for a thread that waits.
    pub(crate) fn dial(&self, identity: &Identity, timeout: Duration) -> Result<Box<dyn Duplex>> {
        let stream = self.reach(timeout)?;
        let unreachable = |error| self.unreachable(&error);
        stream.set_read_timeout(Some(SILENCE)).map_err(unreachable)?;
        stream.set_write_timeout(Some(SILENCE)).map_err(unreachable)?;
        if !self.is_tls {
            return Ok(Box::new(stream));
        }
        let (config, name) = (identity.client(self)?, self.server_name()?);
        let connection =
            ClientConnection::new(config, name).map_err(|error| self.unreachable(&error))?;
        let mut stream = StreamOwned::new(connection, stream);
        // So that what is wrong with it is said as such.
        shake_hands(&mut stream, Instant::now() + timeout).map_err(unreachable)?;
        Ok(Box::new(stream))
    }

    /// Connects, for tasks; also gives a handle on the socket.
    pub(crate) async fn connect(
        &self,
        identity: &Identity,
        timeout: Duration,
    ) -> Result<(Box<dyn AsyncDuplex>, TcpStream)> {
        let endpoint = self.clone();
        let stream = run_blocking(move || endpoint.reach(timeout)).await?;
        let unreachable = |error| self.unreachable(&error);
        let handle = stream.try_clone().map_err(unreachable)?;
        stream.set_nonblocking(true).map_err(unreachable)?;
        let stream = tokio::net::TcpStream::from_std(stream).map_err(unreachable)?;
        if !self.is_tls {
            return Ok((Box::new(stream), handle));
        }
        let (config, name) = (identity.client(self)?, self.server_name()?);
        let greeted = TlsConnector::from(config).connect(name, stream);
        let greeted = tokio::time::timeout(timeout, greeted).await.map_err(|_| {
            self.unreachable(&format_args!("it has not said hello for {timeout:?}"))
        })?;
        Ok((Box::new(greeted.map_err(unreachable)?), handle))
    }

    /// A connection to the first of its addresses that answers.
    fn reach(&self, timeout: Duration) -> Result<TcpStream> {
        let unreachable = |error| self.unreachable(&error);
        let addresses = (self.host.as_str(), self.port).to_socket_addrs().map_err(unreachable)?;
        let addresses: Vec<SocketAddr> = addresses.collect();
        if !self.is_tls && !addresses.iter().all(|address| address.ip().is_loopback()) {
            return Err(Error::new(
                ErrorKind::Refused,
                format_args!("{self} leads off this host in the open: use tls://"),
            ));
        }
        let mut failed = io::Error::other("it has no address");
        for address in addresses {
            match TcpStream::connect_timeout(&address, timeout) {
                Ok(stream) => {
                    prepare(&stream).map_err(unreachable)?;
                    return Ok(stream);
                }
                Err(error) => failed = error,
            }
        }
        Err(self.unreachable(&failed))
    }

    fn server_name(&self) -> Result<ServerName<'static>> {
        ServerName::try_from(self.host.clone()).map_err(|error| self.unreachable(&error))
    }

    pub(crate) fn is_tls(&self) -> bool {
        self.is_tls
    }

    /// How bytes travel to it.
    pub(crate) fn route(&self) -> Route {
        let transport = if self.is_tls { Transport::Tls } else { Transport::Tcp };
        Route::new(transport, format!("the daemon is at {self}"))
    }

    pub(crate) fn unreachable(&self, error: &dyn fmt::Display) -> Error {
        Error::new(ErrorKind::Unreachable, format_args!("no daemon at `{self}`: {error}"))
    }
}

impl Identity {
    /// Reads credentials.
    ///
    /// # Errors
    ///
    /// `Invalid` for a file that is missing or not what it should be, by its name.
    pub(crate) fn read(credentials: &Credentials) -> Result<Self> {
        let Credentials { ca, cert, key } = credentials;
        let certificates = |path: &Path| {
            let read = CertificateDer::pem_file_iter(path).and_then(Iterator::collect);
            let read: Vec<CertificateDer<'static>> = read.map_err(|error| bad(path, &error))?;
            if read.is_empty() { Err(bad(path, &"it has no certificate")) } else { Ok(read) }
        };
        let mut roots = RootCertStore::empty();
        for root in certificates(ca)? {
            roots.add(root).map_err(|error| bad(ca, &error))?;
        }
        let chain = certificates(cert)?;
        let private = PrivateKeyDer::from_pem_file(key).map_err(|error| bad(key, &error))?;
        let roots = Arc::new(roots);
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let verifier =
            WebPkiClientVerifier::builder_with_provider(roots.clone(), provider.clone()).build();
        let verifier = verifier.map_err(|error| bad(ca, &error))?;
        let server = ServerConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(|error| bad(cert, &error))?
            .with_client_cert_verifier(verifier)
            .with_single_cert(chain.clone(), private.clone_key())
            .map_err(|error| bad(cert, &error))?;
        let client = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(|error| bad(cert, &error))?
            .with_root_certificates(roots)
            .with_client_auth_cert(chain, private)
            .map_err(|error| bad(cert, &error))?;
        Ok(Self(Some(Configs { client: Arc::new(client), server: Arc::new(server) })))
    }

    fn client(&self, endpoint: &Endpoint) -> Result<Arc<ClientConfig>> {
        let configs = self.0.as_ref().ok_or_else(|| {
            let text = format_args!(
                "`{endpoint}` wants a proof of who you are: give the authority's certificate, yours and \
                 your key (TSSD_CA, TSSD_CERT, TSSD_KEY)"
            );
            Error::new(ErrorKind::Invalid, text)
        })?;
        Ok(configs.client.clone())
    }

    /// Whether connections are encrypted.
    pub(crate) fn is_some(&self) -> bool {
        self.0.is_some()
    }

    /// What listens here is called so.
    pub(crate) fn endpoint(&self, address: SocketAddr) -> Endpoint {
        Endpoint { is_tls: self.is_some(), host: address.ip().to_string(), port: address.port() }
    }

    /// A connection that has come: proves who is there, and that this is us.
    ///
    /// # Errors
    ///
    /// Why it is turned away.
    pub(crate) async fn accept(
        &self,
        stream: tokio::net::TcpStream,
        timeout: Duration,
    ) -> io::Result<(Box<dyn AsyncDuplex>, TcpStream)> {
        let stream = stream.into_std()?;
        prepare(&stream)?;
        let handle = stream.try_clone()?;
        let stream = tokio::net::TcpStream::from_std(stream)?;
        let Some(configs) = &self.0 else { return Ok((Box::new(stream), handle)) };
        let accepted = TlsAcceptor::from(configs.server.clone()).accept(stream);
        let accepted = tokio::time::timeout(timeout, accepted).await?;
        Ok((Box::new(accepted?), handle))
    }
}

fn bad(path: &Path, error: &dyn fmt::Display) -> Error {
    Error::new(ErrorKind::Invalid, format_args!("`{}`: {error}", path.display()))
}

/// Does all of the handshake by then, however slowly the other side speaks.
fn shake_hands(
    stream: &mut StreamOwned<ClientConnection, TcpStream>,
    until: Instant,
) -> io::Result<()> {
    let StreamOwned { conn, sock } = stream;
    while conn.is_handshaking() || conn.wants_write() {
        if conn.wants_write() {
            conn.write_tls(sock)?;
            continue;
        }
        if Instant::now() > until {
            return Err(io::Error::new(
                io::ErrorKind::TimedOut,
                "it has not said all of its hello",
            ));
        }
        if conn.read_tls(sock)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if let Err(error) = conn.process_new_packets() {
            // What it is told of that, it may not hear.
            let _ = conn.write_tls(sock);
            return Err(io::Error::new(io::ErrorKind::InvalidData, error));
        }
    }
    Ok(())
}

/// Small words go at once, and a host that is gone is found out.
fn prepare(stream: &TcpStream) -> io::Result<()> {
    use rustix::net::sockopt;
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, KEEPALIVE)?;
    sockopt::set_tcp_keepintvl(stream, KEEPALIVE / 3)?;
    let silence = u32::try_from(SILENCE.as_millis()).unwrap_or(u32::MAX);
    sockopt::set_tcp_user_timeout(stream, silence)?;
    Ok(())
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Identity").field(&self.is_some()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_and_written() {
        for (text, written) in [
            ("tls://gpu-7:7000", "tls://gpu-7:7000"),
            ("tls:10.0.0.7:7000", "tls://10.0.0.7:7000"),
            ("tcp://[::1]:7", "tcp://[::1]:7"),
            ("tcp:127.0.0.1:65535", "tcp://127.0.0.1:65535"),
        ] {
            let endpoint: Endpoint = text.parse().unwrap();
            assert_eq!(endpoint.to_string(), written);
            assert_eq!(written.parse::<Endpoint>().unwrap(), endpoint);
        }
        for text in ["tls://host", "tls://:7000", "tls://host:0", "tls://host:70000", "host:7", ""]
        {
            assert_eq!(text.parse::<Endpoint>().unwrap_err().kind(), ErrorKind::Invalid, "{text}");
        }
    }

    #[test]
    fn nothing_leaves_the_host_in_the_open() {
        // An address for documents: nobody has it.
        let endpoint: Endpoint = "tcp://192.0.2.1:7000".parse().unwrap();
        let error = endpoint.dial(&Identity::default(), SILENCE).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Refused);
        assert!(error.to_string().contains("use tls://"), "{error}");
    }
}
