//! A host of a network, or this machine.

use std::fs::File;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::ops::Range;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU16, Ordering};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// Ports from which no connection goes out: what is free there is not taken before its server listens.
const PORTS: Range<u16> = 10_000..30_000;

/// How many were tried by this process.
static TRIED: AtomicU16 = AtomicU16::new(0);

/// Where something runs.
#[derive(Clone, Debug)]
pub struct Host {
    /// Its address.
    pub address: Ipv4Addr,
    /// Its network, if it is not that of this machine.
    pub namespace: Option<PathBuf>,
}

impl Default for Host {
    /// This machine as it is.
    fn default() -> Self {
        Self { address: Ipv4Addr::LOCALHOST, namespace: None }
    }
}

impl Host {
    /// What comes before a program's name, for it to run there, and to end whatever ends this process.
    pub fn enter(&self) -> Vec<String> {
        let into = |namespace: &PathBuf| {
            vec!["nsenter".to_owned(), format!("--net={}", namespace.display())]
        };
        let mut words = self.namespace.as_ref().map(into).unwrap_or_default();
        words.extend(["setpriv", "--pdeathsig", "KILL"].map(str::to_owned));
        words
    }

    /// An address at which a server may listen there.
    ///
    /// # Panics
    ///
    /// If there is none.
    pub fn free_address(&self) -> SocketAddr {
        // Processes that look at once begin at different ones.
        let process = u16::try_from(std::process::id() * 61 % u32::from(u16::MAX)).unwrap_or(0);
        let Range { start, end } = PORTS;
        let free = (start..end).find_map(|_| {
            let tried = TRIED.fetch_add(1, Ordering::Relaxed);
            let port = start + process.wrapping_add(tried) % (end - start);
            let address = SocketAddr::from((self.address, port));
            self.within(|| TcpListener::bind(address).is_ok()).then_some(address)
        });
        free.expect("there are ports")
    }

    /// Does something there, such as to connect.
    ///
    /// # Panics
    ///
    /// If there is no such host any more, or it does.
    pub fn within<T: Send>(&self, what: impl FnOnce() -> T + Send) -> T {
        let enter = || {
            if let Some(namespace) = &self.namespace {
                let namespace =
                    File::open(namespace).expect("a host is there as long as its network");
                let kind = Some(LinkNameSpaceType::Network);
                move_into_link_name_space(namespace.as_fd(), kind)
                    .expect("a host is there as long as its network");
            }
        };
        // A thread that has gone there does not come back.
        let thread = || {
            enter();
            what()
        };
        std::thread::scope(|scope| scope.spawn(thread).join())
            .expect("it panics as its caller would")
    }
}
