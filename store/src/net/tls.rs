//! Endpoints of daemons, and connections to them by plain TCP or TLS.
//!
//! Plain TCP connects only processes of the same host. With TLS, both sides authenticate: a peer is
//! accepted if its certificate was issued by the configured authority.

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

/// Timeout of reads and writes.
///
/// A connection is lost if the peer has to send and sends nothing for this time, or if the peer's
/// host acknowledges nothing for this time.
pub(crate) const IO_TIMEOUT: Duration = Duration::from_secs(30);

/// Time without traffic after which TCP keepalive probes the peer's host.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(15);

/// Address of a daemon: `tls://HOST:PORT` on another host, or `tcp://HOST:PORT` on this one.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Endpoint {
    is_tls: bool,
    host: String,
    port: u16,
}

/// TLS configuration from credentials. The default has none: it connects by plain TCP only.
#[derive(Clone, Default)]
pub(crate) struct Identity(Option<TlsConfigs>);

#[derive(Clone)]
struct TlsConfigs {
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
}

/// A blocking byte stream in both directions.
pub(crate) trait Duplex: Read + Write + Send {
    /// Returns the socket below the stream.
    fn socket(&self) -> BorrowedFd<'_>;

    /// Returns whether the peer has the stream open, as far as the kernel knows.
    fn is_open(&self) -> bool {
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        match rustix::net::recv(self.socket(), &mut [0; 1], flags) {
            Ok((received, _)) => received > 0,
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

/// An async byte stream in both directions.
pub(crate) trait AsyncDuplex: AsyncRead + AsyncWrite + Send + Sync + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Sync + Unpin> AsyncDuplex for T {}

/// A connection through TCP: the stream, with TLS or without, and its socket.
pub(crate) struct TcpConnection {
    pub(crate) stream: Box<dyn AsyncDuplex>,
    /// A second handle of the socket, which closes the connection while the stream is in use.
    pub(crate) socket: TcpStream,
}

impl FromStr for Endpoint {
    type Err = Error;

    fn from_str(url: &str) -> Result<Self> {
        let (scheme, rest) = url.split_once(':').unwrap_or(("", url));
        let is_tls = scheme == "tls";
        let authority = rest.strip_prefix("//").unwrap_or(rest);
        let parts = authority.rsplit_once(':').and_then(|(host, port)| {
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
    /// Connects, for blocking reads and writes.
    pub(crate) fn connect_blocking(
        &self,
        identity: &Identity,
        timeout: Duration,
    ) -> Result<Box<dyn Duplex>> {
        let stream = self.connect_tcp(timeout)?;
        let unreachable = |error| self.connect_error(error);
        stream.set_read_timeout(Some(IO_TIMEOUT)).map_err(unreachable)?;
        stream.set_write_timeout(Some(IO_TIMEOUT)).map_err(unreachable)?;
        if !self.is_tls {
            return Ok(Box::new(stream));
        }
        let (config, name) = (identity.client(self)?, self.server_name()?);
        let connection =
            ClientConnection::new(config, name).map_err(|error| self.unreachable(&error))?;
        let mut stream = StreamOwned::new(connection, stream);
        // With the handshake done here, its errors are reported as errors of the connection
        // attempt.
        complete_handshake(&mut stream, Instant::now() + timeout).map_err(unreachable)?;
        Ok(Box::new(stream))
    }

    /// Connects, for async reads and writes.
    pub(crate) async fn connect(
        &self,
        identity: &Identity,
        timeout: Duration,
    ) -> Result<TcpConnection> {
        let endpoint = self.clone();
        let stream = run_blocking(move || endpoint.connect_tcp(timeout)).await?;
        let unreachable = |error| self.connect_error(error);
        let socket = stream.try_clone().map_err(unreachable)?;
        stream.set_nonblocking(true).map_err(unreachable)?;
        let stream = tokio::net::TcpStream::from_std(stream).map_err(unreachable)?;
        if !self.is_tls {
            return Ok(TcpConnection { stream: Box::new(stream), socket });
        }
        let (config, name) = (identity.client(self)?, self.server_name()?);
        let handshake = TlsConnector::from(config).connect(name, stream);
        let connected = tokio::time::timeout(timeout, handshake).await.map_err(|_| {
            self.unreachable(&format_args!("the TLS handshake took longer than {timeout:?}"))
        })?;
        let stream = Box::new(connected.map_err(unreachable)?);
        Ok(TcpConnection { stream, socket })
    }

    /// Connects to the first address of the host that accepts.
    fn connect_tcp(&self, timeout: Duration) -> Result<TcpStream> {
        let unreachable = |error| self.connect_error(error);
        let addresses = (self.host.as_str(), self.port).to_socket_addrs().map_err(unreachable)?;
        let addresses: Vec<SocketAddr> = addresses.collect();
        if !self.is_tls && !addresses.iter().all(|address| address.ip().is_loopback()) {
            return Err(Error::new(
                ErrorKind::Refused,
                format_args!("{self} leads off this host in the open: use tls://"),
            ));
        }
        let mut last_error = io::Error::other("it has no address");
        for address in addresses {
            match TcpStream::connect_timeout(&address, timeout) {
                Ok(stream) => {
                    configure_socket(&stream).map_err(unreachable)?;
                    return Ok(stream);
                }
                Err(error) => last_error = error,
            }
        }
        Err(self.connect_error(last_error))
    }

    fn server_name(&self) -> Result<ServerName<'static>> {
        ServerName::try_from(self.host.clone()).map_err(|error| self.unreachable(&error))
    }

    pub(crate) fn is_tls(&self) -> bool {
        self.is_tls
    }

    /// Returns how bytes travel to the daemon.
    pub(crate) fn route(&self) -> Route {
        let transport = if self.is_tls { Transport::Tls } else { Transport::Tcp };
        Route::new(transport, format!("the daemon is at {self}"))
    }

    /// Returns the error for an endpoint that the system cannot connect.
    fn connect_error(&self, error: io::Error) -> Error {
        let url = self.to_string();
        Error::new(ErrorKind::Unreachable, format_args!("no daemon at `{url}`"))
            .with_source(error)
            .with_file(Path::new(&url))
    }

    pub(crate) fn unreachable(&self, error: &dyn fmt::Display) -> Error {
        Error::new(ErrorKind::Unreachable, format_args!("no daemon at `{self}`: {error}"))
    }
}

impl Identity {
    /// Reads the certificate files and the key.
    ///
    /// # Errors
    ///
    /// `Invalid`, with the path, for a file that is missing or has invalid contents.
    pub(crate) fn read(credentials: &Credentials) -> Result<Self> {
        let Credentials { ca, cert, key } = credentials;
        let certificates = |path: &Path| {
            let parsed = CertificateDer::pem_file_iter(path).and_then(Iterator::collect);
            let parsed: Vec<CertificateDer<'static>> =
                parsed.map_err(|error| invalid_file(path, &error))?;
            if parsed.is_empty() {
                Err(invalid_file(path, &"it has no certificate"))
            } else {
                Ok(parsed)
            }
        };
        let mut roots = RootCertStore::empty();
        for root in certificates(ca)? {
            roots.add(root).map_err(|error| invalid_file(ca, &error))?;
        }
        let chain = certificates(cert)?;
        let private_key =
            PrivateKeyDer::from_pem_file(key).map_err(|error| invalid_file(key, &error))?;
        let roots = Arc::new(roots);
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let verifier =
            WebPkiClientVerifier::builder_with_provider(roots.clone(), provider.clone()).build();
        let verifier = verifier.map_err(|error| invalid_file(ca, &error))?;
        let server = ServerConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(|error| invalid_file(cert, &error))?
            .with_client_cert_verifier(verifier)
            .with_single_cert(chain.clone(), private_key.clone_key())
            .map_err(|error| invalid_file(cert, &error))?;
        let client = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(|error| invalid_file(cert, &error))?
            .with_root_certificates(roots)
            .with_client_auth_cert(chain, private_key)
            .map_err(|error| invalid_file(cert, &error))?;
        Ok(Self(Some(TlsConfigs { client: Arc::new(client), server: Arc::new(server) })))
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

    /// Returns whether connections are encrypted.
    pub(crate) fn is_tls(&self) -> bool {
        self.0.is_some()
    }

    /// Returns the endpoint of a listener at `address`.
    pub(crate) fn endpoint(&self, address: SocketAddr) -> Endpoint {
        Endpoint { is_tls: self.is_tls(), host: address.ip().to_string(), port: address.port() }
    }

    /// Accepts a connection. With TLS, both sides authenticate.
    ///
    /// # Errors
    ///
    /// The reason why the connection is rejected.
    pub(crate) async fn accept(
        &self,
        stream: tokio::net::TcpStream,
        timeout: Duration,
    ) -> io::Result<TcpConnection> {
        let stream = stream.into_std()?;
        configure_socket(&stream)?;
        let socket = stream.try_clone()?;
        let stream = tokio::net::TcpStream::from_std(stream)?;
        let Some(configs) = &self.0 else {
            return Ok(TcpConnection { stream: Box::new(stream), socket });
        };
        let handshake = TlsAcceptor::from(configs.server.clone()).accept(stream);
        let accepted = tokio::time::timeout(timeout, handshake).await?;
        Ok(TcpConnection { stream: Box::new(accepted?), socket })
    }
}

fn invalid_file(path: &Path, error: &dyn fmt::Display) -> Error {
    Error::new(ErrorKind::Invalid, format_args!("`{}`: {error}", path.display()))
}

/// Completes the TLS handshake before `until`, even if the peer sends slowly.
fn complete_handshake(
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
            return Err(io::Error::new(io::ErrorKind::TimedOut, "the TLS handshake timed out"));
        }
        if conn.read_tls(sock)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if let Err(error) = conn.process_new_packets() {
            // The peer may not receive the TLS alert.
            let _ = conn.write_tls(sock);
            return Err(io::Error::new(io::ErrorKind::InvalidData, error));
        }
    }
    Ok(())
}

/// Sends small messages without delay, and detects hosts that no longer respond.
fn configure_socket(stream: &TcpStream) -> io::Result<()> {
    use rustix::net::sockopt;
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, KEEPALIVE_IDLE)?;
    sockopt::set_tcp_keepintvl(stream, KEEPALIVE_IDLE / 3)?;
    let user_timeout = u32::try_from(IO_TIMEOUT.as_millis()).unwrap_or(u32::MAX);
    sockopt::set_tcp_user_timeout(stream, user_timeout)?;
    Ok(())
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Identity").field(&self.is_tls()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoint_parses_and_displays_address() {
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
    fn plain_tcp_rejects_other_hosts() {
        // The address is reserved for documentation: no host has it.
        let endpoint: Endpoint = "tcp://192.0.2.1:7000".parse().unwrap();
        let error = endpoint.connect_blocking(&Identity::default(), IO_TIMEOUT).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Refused);
        assert!(error.to_string().contains("use tls://"), "{error}");
    }
}
