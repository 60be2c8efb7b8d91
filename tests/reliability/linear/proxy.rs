//! A way to a daemon that is slow, and cut: now, or after a byte.
//!
//! It passes on descriptors too, so it stands before a Unix socket as well as before an address. (The daemon then
//! takes the process of the proxy for its client.)

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

/// How much is passed on at once.
const BLOCK: usize = 64 << 10;

/// Where a proxy stands, or what is behind it.
#[derive(Clone, Debug)]
pub(crate) enum Place {
    Socket(PathBuf),
    Address(SocketAddr),
}

impl Place {
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

/// To the daemon, or from it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Direction {
    Up,
    Down,
}

/// A proxy. It ends with this, and so do its connections.
pub(crate) struct Proxy {
    place: Place,
    shared: Arc<Mutex<State>>,
    thread: Option<JoinHandle<()>>,
}

struct State {
    behind: Place,
    /// Both ends of each connection.
    connections: Vec<[Weak<OwnedFd>; 2]>,
    /// How long each block waits.
    delay: Duration,
    /// How many bytes have gone up, and down.
    passed: [u64; 2],
    /// After how many bytes everything is cut.
    limit: Option<(Direction, u64)>,
    /// Nobody is let through any more.
    is_closed: bool,
}

impl State {
    /// How many of so many bytes may pass, and whether the end comes then.
    fn admit(&mut self, direction: Direction, bytes: usize) -> (usize, bool) {
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
                // It may be closed by its other end already.
                let _ = rustix::net::shutdown(&*end, Shutdown::Both);
                cut += 1;
            }
        }
        cut / 2
    }
}

impl Proxy {
    /// Before what listens at an address.
    pub(crate) fn before(behind: SocketAddr) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let place = Place::Address(listener.local_addr().unwrap());
        Self::start(Listener::Address(listener), place, Place::Address(behind))
    }

    /// At a socket, before another one.
    pub(crate) fn at(socket: PathBuf, behind: PathBuf) -> Self {
        let listener = UnixListener::bind(&socket).unwrap();
        Self::start(Listener::Socket(listener), Place::Socket(socket), Place::Socket(behind))
    }

    fn start(listener: Listener, place: Place, behind: Place) -> Self {
        let shared = Arc::new(Mutex::new(State {
            behind,
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
                // Who cannot be let through is sent away.
                let _ = admit(client, &state);
            }
        });
        Self { place, shared, thread: Some(thread) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.shared.lock().unwrap()
    }

    /// Its address, as that of a store.
    pub(crate) fn url(&self) -> String {
        self.place.url()
    }

    /// What is behind it from now on.
    pub(crate) fn turn_to(&self, behind: SocketAddr) {
        self.state().behind = Place::Address(behind);
    }

    /// How long each block waits from now on.
    pub(crate) fn delay(&self, delay: Duration) {
        self.state().delay = delay;
    }

    /// Cuts all connections; says how many.
    pub(crate) fn cut(&self) -> u64 {
        self.state().cut()
    }

    /// How many bytes have gone in a direction.
    pub(crate) fn passed(&self, direction: Direction) -> u64 {
        self.state().passed[direction as usize]
    }

    /// Counts anew; cuts everything, once, after so many bytes in a direction.
    pub(crate) fn cut_after(&self, direction: Direction, bytes: u64) {
        let mut state = self.state();
        state.cut();
        (state.passed, state.limit) = ([0; 2], Some((direction, bytes)));
    }

    /// Whether that has happened.
    pub(crate) fn has_cut(&self) -> bool {
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
        // Whoever accepts sees it with the next one that comes.
        let _ = self.place.connect();
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            assert!(ended.is_ok() || thread::panicking(), "the proxy ends well");
        }
    }
}

/// Lets a client through, on two threads.
fn admit(client: OwnedFd, shared: &Arc<Mutex<State>>) -> io::Result<()> {
    let behind = shared.lock().unwrap().behind.clone();
    let ends = [Arc::new(client), Arc::new(behind.connect()?)];
    {
        let mut state = shared.lock().unwrap();
        state.connections.retain(|ends| ends[0].strong_count() > 0);
        state.connections.push([Arc::downgrade(&ends[0]), Arc::downgrade(&ends[1])]);
    }
    for direction in [Direction::Up, Direction::Down] {
        let (mut from, mut to) = (ends[0].clone(), ends[1].clone());
        if direction == Direction::Down {
            std::mem::swap(&mut from, &mut to);
        }
        let shared = shared.clone();
        thread::spawn(move || {
            // One that is cut is no failure.
            let _ = relay(&from, &to, direction, &shared);
            let _ = rustix::net::shutdown(&*from, Shutdown::Both);
            let _ = rustix::net::shutdown(&*to, Shutdown::Both);
        });
    }
    Ok(())
}

/// Passes on what comes, until the end or the cut.
fn relay(
    from: &OwnedFd,
    to: &OwnedFd,
    direction: Direction,
    shared: &Mutex<State>,
) -> io::Result<()> {
    let mut block = vec![0; BLOCK];
    loop {
        let mut fds = VecDeque::new();
        let come = receive(from, &mut block, &mut fds)?;
        if come == 0 {
            return Ok(());
        }
        let delay = shared.lock().unwrap().delay;
        if !delay.is_zero() {
            thread::sleep(delay);
        }
        let (admitted, is_end) = shared.lock().unwrap().admit(direction, come);
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

/// Descriptors go with the first of the bytes, as they came.
fn send(to: &OwnedFd, mut bytes: &[u8], fds: &[OwnedFd]) -> io::Result<()> {
    let borrowed: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
    let mut fds = &borrowed[..];
    while !bytes.is_empty() {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(64))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(fds)), "there is space for them");
        }
        let parts = [IoSlice::new(bytes)];
        let sent = rustix::net::sendmsg(to, &parts, &mut control, SendFlags::NOSIGNAL)?;
        (bytes, fds) = (&bytes[sent..], &[]);
    }
    Ok(())
}
