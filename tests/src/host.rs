//! Hosts of a test network, or this machine.

use std::fs::File;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::ops::Range;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU16, Ordering};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// Ports below the range of outgoing connections.
///
/// So a free one stays free until its server listens.
const PORTS: Range<u16> = 10_000..30_000;

/// Number of ports tried by this process.
static TRIED: AtomicU16 = AtomicU16::new(0);

/// Host on which a process runs.
#[derive(Clone, Debug)]
pub struct Host {
    /// Address of the host.
    pub address: Ipv4Addr,
    /// Its network namespace, if it is not that of this machine.
    pub namespace: Option<PathBuf>,
}

impl Default for Host {
    /// Returns this machine.
    fn default() -> Self {
        Self { address: Ipv4Addr::LOCALHOST, namespace: None }
    }
}

impl Host {
    /// Returns the command prefix that runs a program on this host, and ends it together with this process.
    pub fn command_prefix(&self) -> Vec<String> {
        let enter_namespace = |namespace: &PathBuf| {
            vec!["nsenter".to_owned(), format!("--net={}", namespace.display())]
        };
        let mut words = self.namespace.as_ref().map(enter_namespace).unwrap_or_default();
        words.extend(["setpriv", "--pdeathsig", "KILL"].map(str::to_owned));
        words
    }

    /// Returns an address on which a server can listen.
    ///
    /// # Panics
    ///
    /// If no port is free.
    pub fn free_address(&self) -> SocketAddr {
        // Concurrent processes begin at different ports.
        let process = u16::try_from(std::process::id() * 61 % u32::from(u16::MAX)).unwrap_or(0);
        let Range { start, end } = PORTS;
        let free = (start..end).find_map(|_| {
            let tried = TRIED.fetch_add(1, Ordering::Relaxed);
            let port = start + process.wrapping_add(tried) % (end - start);
            let address = SocketAddr::from((self.address, port));
            self.run(|| TcpListener::bind(address).is_ok()).then_some(address)
        });
        free.expect("there are ports")
    }

    /// Runs a closure on this host, for example to connect.
    ///
    /// # Panics
    ///
    /// If the host does not exist any longer, or the closure panics.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        let enter = || {
            if let Some(namespace) = &self.namespace {
                let namespace =
                    File::open(namespace).expect("a host is there as long as its network");
                let kind = Some(LinkNameSpaceType::Network);
                move_into_link_name_space(namespace.as_fd(), kind)
                    .expect("a host is there as long as its network");
            }
        };
        // A thread cannot leave the namespace, so it is used once.
        let thread = || {
            enter();
            work()
        };
        std::thread::scope(|scope| scope.spawn(thread).join())
            .expect("it panics as its caller would")
    }
}
