//! A proxy in front of a daemon. It delays data, and cuts connections: now, or after a number of bytes.
//!
//! It forwards descriptors, too, so it works in front of a Unix socket and of a TCP address.
//! (Behind a Unix socket the daemon sees the process of the proxy as its client.)

use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, Shutdown,
};

/// Maximum size of a read, in bytes.
const BLOCK_BYTES: usize = 64 << 10;

/// Address of a proxy or of its upstream.
#[derive(Clone, Debug)]
pub(crate) enum Endpoint {
    Socket(PathBuf),
    Address(SocketAddr),
}

impl Endpoint {
    fn connect(&self) -> io::Result<OwnedFd> {
        Ok(match self {
            Self::Socket(path) => UnixStream::connect(path)?.into(),
            Self::Address(address) => {
                let stream = TcpStream::connect(address)?;
                stream.set_nodelay(true)?;
                stream.into()
            }
        })
    }

    fn url(&self) -> String {
        match self {
            Self::Socket(path) => format!("unix:{}", path.display()),
            Self::Address(address) => format!("tcp://{address}"),
        }
    }
}

enum Listener {
    Socket(UnixListener),
    Address(TcpListener),
}

impl Listener {
    fn accept(&self) -> io::Result<OwnedFd> {
        Ok(match self {
            Self::Socket(listener) => listener.accept()?.0.into(),
            Self::Address(listener) => {
                let stream = listener.accept()?.0;
                stream.set_nodelay(true)?;
                stream.into()
            }
        })
    }
}

/// Direction of data: to the daemon, or from it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Direction {
    ToDaemon,
    FromDaemon,
}

/// A proxy. It and its connections end on drop.
pub(crate) struct Proxy {
    endpoint: Endpoint,
    shared: Arc<Mutex<State>>,
    thread: Option<JoinHandle<()>>,
}

struct State {
    upstream: Endpoint,
    /// Both ends of each connection.
    connections: Vec<[Weak<OwnedFd>; 2]>,
    /// Delay of each block.
    delay: Duration,
    /// Number of bytes forwarded in each direction.
    passed: [u64; 2],
    /// Number of bytes in a direction after which all connections are cut.
    limit: Option<(Direction, u64)>,
    /// Set on drop: no further connection is accepted.
    is_closed: bool,
}

impl State {
    /// Returns how many of these bytes may be forwarded, and whether the limit is reached then.
    fn take_allowance(&mut self, direction: Direction, bytes: usize) -> (usize, bool) {
        let passed = &mut self.passed[direction as usize];
        let left = match self.limit {
            Some((limited, limit)) if limited == direction => limit - *passed,
            _ => u64::MAX,
        };
        let admitted = bytes.min(usize::try_from(left).unwrap_or(usize::MAX));
        *passed += admitted as u64;
        (admitted, admitted as u64 == left)
    }

    fn cut(&mut self) -> u64 {
        let mut cut = 0;
        for connection in self.connections.drain(..) {
            for end in connection.iter().filter_map(Weak::upgrade) {
                // The other end may have closed it already.
                let _ = rustix::net::shutdown(&*end, Shutdown::Both);
                cut += 1;
            }
        }
        cut / 2
    }
}

impl Proxy {
    /// Starts a proxy in front of a TCP address.
    pub(crate) fn listen_tcp(upstream: SocketAddr) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let endpoint = Endpoint::Address(listener.local_addr().unwrap());
        Self::start(Listener::Address(listener), endpoint, Endpoint::Address(upstream))
    }

    /// Starts a proxy at a Unix socket, in front of another one.
    pub(crate) fn listen_unix(socket: PathBuf, upstream: PathBuf) -> Self {
        let listener = UnixListener::bind(&socket).unwrap();
        Self::start(
            Listener::Socket(listener),
            Endpoint::Socket(socket),
            Endpoint::Socket(upstream),
        )
    }

    fn start(listener: Listener, endpoint: Endpoint, upstream: Endpoint) -> Self {
        let shared = Arc::new(Mutex::new(State {
            upstream,
            connections: Vec::new(),
            delay: Duration::ZERO,
            passed: [0; 2],
            limit: None,
            is_closed: false,
        }));
        let state = shared.clone();
        let thread = thread::spawn(move || {
            while let Ok(client) = listener.accept() {
                if state.lock().unwrap().is_closed {
                    break;
                }
                // If the upstream is unreachable, the client is disconnected.
                let _ = connect_upstream(client, &state);
            }
        });
        Self { endpoint, shared, thread: Some(thread) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.shared.lock().unwrap()
    }

    /// Returns the address of the proxy, as a URL of a store.
    pub(crate) fn url(&self) -> String {
        self.endpoint.url()
    }

    /// Sets the upstream of new connections.
    pub(crate) fn set_upstream(&self, upstream: SocketAddr) {
        self.state().upstream = Endpoint::Address(upstream);
    }

    /// Sets the delay of each block.
    pub(crate) fn set_delay(&self, delay: Duration) {
        self.state().delay = delay;
    }

    /// Cuts all connections. Returns their number.
    pub(crate) fn cut_all(&self) -> u64 {
        self.state().cut()
    }

    /// Returns the number of bytes forwarded in a direction.
    pub(crate) fn forwarded_bytes(&self, direction: Direction) -> u64 {
        self.state().passed[direction as usize]
    }

    /// Resets the counts, and cuts all connections once, after this number of bytes.
    pub(crate) fn cut_after(&self, direction: Direction, bytes: u64) {
        let mut state = self.state();
        state.cut();
        (state.passed, state.limit) = ([0; 2], Some((direction, bytes)));
    }

    /// Returns whether that limit was reached.
    pub(crate) fn has_reached_limit(&self) -> bool {
        let state = self.state();
        state.limit.is_some_and(|(direction, limit)| state.passed[direction as usize] == limit)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        let mut state = self.state();
        state.is_closed = true;
        state.cut();
        drop(state);
        // The thread checks the flag when it accepts this connection.
        let _ = self.endpoint.connect();
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            assert!(ended.is_ok() || thread::panicking(), "the proxy thread panicked");
        }
    }
}

/// Connects a client to the upstream, with one thread for each direction.
fn connect_upstream(client: OwnedFd, shared: &Arc<Mutex<State>>) -> io::Result<()> {
    let upstream = shared.lock().unwrap().upstream.clone();
    let endpoints = [Arc::new(client), Arc::new(upstream.connect()?)];
    {
        let mut state = shared.lock().unwrap();
        state.connections.retain(|endpoints| endpoints[0].strong_count() > 0);
        state.connections.push([Arc::downgrade(&endpoints[0]), Arc::downgrade(&endpoints[1])]);
    }
    for direction in [Direction::ToDaemon, Direction::FromDaemon] {
        let (mut from, mut to) = (endpoints[0].clone(), endpoints[1].clone());
        if direction == Direction::FromDaemon {
            std::mem::swap(&mut from, &mut to);
        }
        let shared = shared.clone();
        thread::spawn(move || {
            // A cut connection is no error.
            let _ = relay(&from, &to, direction, &shared);
            let _ = rustix::net::shutdown(&*from, Shutdown::Both);
            let _ = rustix::net::shutdown(&*to, Shutdown::Both);
        });
    }
    Ok(())
}

/// Forwards data until the connection ends or is cut.
fn relay(
    from: &OwnedFd,
    to: &OwnedFd,
    direction: Direction,
    shared: &Mutex<State>,
) -> io::Result<()> {
    let mut block = vec![0; BLOCK_BYTES];
    loop {
        let mut fds = VecDeque::new();
        let received = receive(from, &mut block, &mut fds)?;
        if received == 0 {
            return Ok(());
        }
        let delay = shared.lock().unwrap().delay;
        if !delay.is_zero() {
            thread::sleep(delay);
        }
        let (admitted, is_end) = shared.lock().unwrap().take_allowance(direction, received);
        send(to, &block[..admitted], fds.make_contiguous())?;
        if is_end {
            shared.lock().unwrap().cut();
            return Ok(());
        }
    }
}

fn receive(from: &OwnedFd, block: &mut [u8], fds: &mut VecDeque<OwnedFd>) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(64))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let into = &mut [IoSliceMut::new(block)];
    let message = rustix::net::recvmsg(from, into, &mut control, RecvFlags::CMSG_CLOEXEC)?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(more) = message {
            fds.extend(more);
        }
    }
    Ok(message.bytes)
}

/// The descriptors go with the first bytes, as they were received.
fn send(to: &OwnedFd, mut bytes: &[u8], fds: &[OwnedFd]) -> io::Result<()> {
    let borrowed: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
    let mut fds = &borrowed[..];
    while !bytes.is_empty() {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(64))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(
                control.push(SendAncillaryMessage::ScmRights(fds)),
                "the control buffer has space for the descriptors"
            );
        }
        let parts = [IoSlice::new(bytes)];
        let sent = rustix::net::sendmsg(to, &parts, &mut control, SendFlags::NOSIGNAL)?;
        (bytes, fds) = (&bytes[sent..], &[]);
    }
    Ok(())
}
