//! The daemon of a host: one control plane and one pool of shared memory for all its processes.

mod bucket_sync;
mod chunk_verifier;
mod connected_runs;
mod control_plane;
mod counters;
mod delta_base;
mod delta_history;
mod fetchers;
mod host_defaults;
mod http;
mod metrics;
mod peers;
mod process_watcher;
mod proxy;
mod rate_limiter;
mod read_encoder;
pub(crate) mod remote_blobs;
mod replicas;
mod reserve_fd;
mod session;
pub(crate) mod state;
pub(crate) mod tiered;
mod uplink;

use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream, UnixListener};
use tokio::task::JoinSet;

use self::session::IncomingConnection;
use crate::credentials::Credentials;
use crate::daemon::bucket_sync::Bucket;
pub use crate::daemon::bucket_sync::BucketDeltas;
pub use crate::daemon::host_defaults::default_memory_limit;
use crate::daemon::host_defaults::listen;
use crate::daemon::reserve_fd::ReserveFd;
use crate::daemon::state::DaemonState;
use crate::error::{Error, ErrorKind, Result};
use crate::io::disk::{self, DAEMON_LOCK, FileLock};
use crate::io::sync::boxed;
use crate::net::socket::{sibling_path, socket_path};
use crate::net::tls::{Endpoint, Identity};

/// Maximum number of connections through the socket, and of connections through TCP.
const MAX_CONNECTIONS: usize = 1024;

/// Time that open contributions, and then sessions, have to finish when the daemon shuts down.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(10);

/// Time to send the last replies before the sessions are closed.
const REPLY_FLUSH_DELAY: Duration = Duration::from_millis(100);

/// Options of a daemon.
#[derive(Clone, Debug)]
pub struct DaemonOptions {
    /// The path of the Unix socket. Its folder must exist.
    pub socket: PathBuf,
    /// The directory for versions of durability `disk`. If `None`, all versions are in memory only.
    ///
    /// While the daemon runs, other processes may use the directory only through the daemon.
    pub root: Option<PathBuf>,
    /// Number of newest versions to keep per key. A client can set another number for a key.
    pub keep: NonZeroU32,
    /// Maximum total size of the segments in host memory, in bytes.
    pub memory_limit: u64,
    /// Users whose processes may connect, in addition to root and the user that runs the daemon.
    ///
    /// If the list is empty and `socket_group` is set, all members of the group may connect. If the list is not
    /// empty, only the listed users may connect, also within the group.
    pub allow_uids: Vec<u32>,
    /// The group that owns the socket: its members may connect.
    ///
    /// The permissions of the socket are the only check of the membership. The members must be able to enter the
    /// folder of the socket. Only the user that runs the daemon should be able to write to that folder.
    pub socket_group: Option<u32>,
    /// The loopback address of the HTTP server for `/metrics`, `/healthz` and `/readyz`.
    pub metrics: Option<SocketAddr>,
    /// The TCP address for clients on other hosts. If `None`, only processes of this host can connect.
    ///
    /// Without `credentials` it must be a loopback address, and the daemon accepts every connection to it.
    pub listen: Option<SocketAddr>,
    /// The TLS certificate and key of the daemon, and the authorities that it accepts for clients.
    pub credentials: Option<Credentials>,
    /// The address of the daemon that is the controller instead of this one: `tls://HOST:PORT`.
    ///
    /// Archives stay in the memory of this daemon. Other daemons read them at the address in `listen`.
    pub controller: Option<String>,
    /// The etcd cluster in which several daemons share their ledgers.
    ///
    /// The address is `etcd://HOST:PORT[,HOST:PORT…][/PREFIX]`. The daemons find each other there. Archives stay in
    /// the memory of the daemon that received the put. Other daemons read them at the address in `listen`.
    pub meta: Option<String>,
    /// The bucket for versions of durability `object`.
    ///
    /// The address is `s3://BUCKET/PREFIX`, or `file:DIR` for a directory that all hosts share. The daemon also
    /// serves versions that are only in the bucket.
    pub bucket: Option<String>,
    /// Maximum upload rate to the bucket in bytes per second, for all versions together.
    pub bucket_rate: Option<u64>,
    /// Which versions are uploaded to the bucket whole. The others are uploaded as deltas, if `deltas` is true.
    pub bucket_deltas: BucketDeltas,
    /// Maximum rate at which this daemon sends to other hosts, in bytes per second. If `None`, it is not limited.
    pub send_rate: Option<u64>,
    /// Maximum number of hosts to which this daemon sends at the same time. Others wait. If `None`, it is not limited.
    pub send_hosts: Option<NonZeroU32>,
    /// Rate in bytes per second below which a fetch from other hosts is slow: the daemon logs a warning.
    pub min_fetch_rate: Option<u64>,
    /// Whether hosts that have an earlier version get the difference only.
    ///
    /// Then the archives of the version that was deleted last are retained, in memory that nothing else needs.
    pub deltas: bool,
    /// `HOST:PORT` at which other hosts reach this daemon, if it differs from `listen`.
    pub advertise: Option<String>,
    /// Time without a client after which the daemon exits. If `None`, it does not exit by itself.
    ///
    /// It does not exit while it has a version that would be lost.
    pub linger: Option<Duration>,
}

/// A daemon that listens for connections.
pub struct Daemon {
    listener: UnixListener,
    state: Arc<DaemonState>,
    metrics: Option<TcpListener>,
    /// For clients on other hosts.
    remote_listener: Option<TcpListener>,
    identity: Identity,
    options: Arc<DaemonOptions>,
    /// The locks on the socket and on the directory. The kernel releases them when the process exits.
    _locks: Vec<FileLock>,
}

impl DaemonOptions {
    /// Returns the default options for the daemon of the store `name`.
    ///
    /// The socket is in a folder that belongs to the user. The daemon keeps one version per key and uses at most
    /// half of the memory.
    ///
    /// # Errors
    ///
    /// `Invalid` if `name` is not a valid name; `Io` if other users can access the folder.
    pub fn for_store(name: &str) -> Result<Self> {
        Ok(Self::for_socket(socket_path(name)?, default_memory_limit()?))
    }

    /// Returns the options for a daemon on a socket that keeps one version per key in memory.
    ///
    /// Only root and the user that runs the daemon may connect.
    pub fn for_socket(socket: impl Into<PathBuf>, memory_limit: u64) -> Self {
        Self {
            socket: socket.into(),
            root: None,
            keep: NonZeroU32::MIN,
            memory_limit,
            allow_uids: Vec::new(),
            socket_group: None,
            metrics: None,
            listen: None,
            credentials: None,
            controller: None,
            meta: None,
            bucket: None,
            bucket_rate: None,
            bucket_deltas: BucketDeltas::default(),
            send_rate: None,
            send_hosts: None,
            min_fetch_rate: None,
            deltas: true,
            advertise: None,
            linger: None,
        }
    }

    /// Whether processes of a user may connect.
    fn admits(&self, uid: u32) -> bool {
        let own = rustix::process::geteuid().as_raw();
        let is_named = match self.allow_uids.as_slice() {
            // The permissions of the socket admit only members of the group.
            [] => self.socket_group.is_some(),
            named => named.contains(&uid),
        };
        uid == own || uid == 0 || is_named
    }

    /// Returns the mode of the socket. [`Self::admits`] checks the user of each connection afterwards.
    fn socket_mode(&self) -> u32 {
        match (self.socket_group, self.allow_uids.is_empty()) {
            (Some(_), _) => 0o660,
            (None, false) => 0o666,
            (None, true) => 0o600,
        }
    }
}

impl Daemon {
    /// Takes the locks, opens the storage and listens on the addresses of the options.
    ///
    /// # Errors
    ///
    /// - `Busy` if another daemon serves the socket, with its process id, or if another process uses the directory.
    /// - `Invalid` if `metrics` is not a loopback address, if `listen` is not one and there are no credentials, if
    ///   the credentials cannot be read, if `bucket` is not the address of a bucket, if the group cannot enter the
    ///   folder of the socket, or if options contradict each other.
    /// - `Unreachable` if the controller, the shared ledgers or the bucket cannot be reached.
    /// - `Io` if a system call fails.
    pub async fn bind(options: DaemonOptions) -> Result<Self> {
        let bucket = options.bucket.as_deref().map(Bucket::open).transpose()?;
        Self::bind_with_bucket(options, bucket).await
    }

    /// As [`Self::bind`], with a bucket that is open.
    async fn bind_with_bucket(options: DaemonOptions, bucket: Option<Bucket>) -> Result<Self> {
        let socket = &options.socket;
        let io_error = |error| Error::io_at(socket, error);
        let lock_path = sibling_path(socket, "lock");
        let Some(lock) = disk::lock(&lock_path).map_err(io_error)? else {
            let pid = std::fs::read_to_string(&lock_path).unwrap_or_default();
            let pid = pid.trim();
            return Err(Error::new(
                ErrorKind::Busy,
                format_args!("a daemon, process {pid}, serves `{}` already", socket.display()),
            ));
        };
        lock.write(&format!("{}\n", std::process::id())).map_err(io_error)?;
        let mut locks = vec![lock];
        if let Some(root) = &options.root {
            locks.push(lock_root(root, socket)?);
        }
        let metrics = match options.metrics {
            Some(address) => Some(http::bind(address).await?),
            None => None,
        };
        let identity = options.credentials.as_ref().map(Identity::read).transpose()?;
        let identity = identity.unwrap_or_default();
        let remote_listener = match options.listen {
            Some(address) => Some(listen_remote(address, &identity).await?),
            None => None,
        };
        // This daemon has the lock, so a socket at this path was left by a daemon that was killed.
        disk::remove(socket).map_err(io_error)?;
        let listener = listen(socket, options.socket_group, options.socket_mode())?;
        let is_standalone = options.controller.is_none() && options.meta.is_none();
        let endpoint = || own_endpoint(&options, remote_listener.as_ref(), &identity);
        let endpoint = if is_standalone { None } else { Some(endpoint()?) };
        let state =
            Arc::new(DaemonState::open(&options, identity.clone(), endpoint, bucket).await?);
        tracing::info!(socket = %options.socket.display(), memory = options.memory_limit, "serving");
        let options = Arc::new(options);
        Ok(Self { listener, state, metrics, remote_listener, identity, options, _locks: locks })
    }

    /// Returns the path of the Unix socket.
    pub fn socket(&self) -> &Path {
        &self.options.socket
    }

    /// Returns the address of this store for clients on other hosts, if the daemon listens on TCP.
    pub fn address(&self) -> Option<String> {
        let address = self.remote_listener.as_ref()?.local_addr().ok()?;
        Some(self.identity.endpoint(address).to_string())
    }

    /// Returns the address of the HTTP server, if there is one.
    pub fn metrics(&self) -> Option<SocketAddr> {
        self.metrics.as_ref()?.local_addr().ok()
    }

    /// Serves clients until `stop` completes, or until the daemon is idle for `linger`.
    ///
    /// Then the daemon rejects new contributions. Open contributions and uploads have 10 seconds to complete, and
    /// sessions have 10 seconds to end after that.
    ///
    /// # Errors
    ///
    /// None today: the result is always `Ok`.
    pub async fn serve(self, stop: impl Future<Output = ()>) -> Result<()> {
        // The HTTP server runs until this function returns, so that it reports the shutdown.
        let mut http_tasks = JoinSet::new();
        if let Some(listener) = self.metrics {
            http_tasks.spawn(boxed(http::serve(listener, self.state.clone())));
        }
        let (mut sessions, mut remote_sessions) = (JoinSet::new(), JoinSet::new());
        let mut stop = std::pin::pin!(stop);
        let mut reserve_fd = ReserveFd::new();
        let mut linger_expired = std::pin::pin!(self.state.wait_until_idle(self.options.linger));
        loop {
            tokio::select! {
                () = &mut stop => break,
                () = &mut linger_expired => break,
                Some(_) = sessions.join_next(), if !sessions.is_empty() => {}
                Some(_) = remote_sessions.join_next(), if !remote_sessions.is_empty() => {}
                accepted = self.listener.accept() => match accepted {
                    Ok((stream, _)) if sessions.len() < MAX_CONNECTIONS => {
                        let (state, options) = (self.state.clone(), self.options.clone());
                        if let Some(connection) = IncomingConnection::local(stream) {
                            sessions.spawn(boxed(session::run(state, connection, options)));
                        }
                    }
                    Ok(_) => self.state.counters.lock().rejected_connections += 1,
                    Err(_) => {
                        let shed = reserve_fd.reject_one(self.listener.accept()).await;
                        self.state.counters.lock().rejected_connections += shed;
                    }
                },
                accepted = accept(self.remote_listener.as_ref()) => match accepted {
                    Ok((stream, address)) if remote_sessions.len() < MAX_CONNECTIONS => {
                        let (state, options) = (self.state.clone(), self.options.clone());
                        let identity = self.identity.clone();
                        remote_sessions.spawn(boxed(async move {
                            match IncomingConnection::remote(stream, address, &identity).await {
                                Some(connection) => session::run(state, connection, options).await,
                                None => state.counters.lock().rejected_connections += 1,
                            }
                        }));
                    }
                    Ok(_) => self.state.counters.lock().rejected_connections += 1,
                    Err(_) => {
                        let shed = reserve_fd.reject_one(accept(self.remote_listener.as_ref())).await;
                        self.state.counters.lock().rejected_connections += shed;
                    }
                },
            }
        }
        tracing::info!("ending");
        // New clients cannot connect from here on.
        let _ = disk::remove(&self.options.socket);
        drop((self.listener, self.remote_listener));
        let is_busy = self.state.is_busy();
        // Contributions that are not committed and versions that are not uploaded exist only in this process.
        let _ = tokio::time::timeout(DRAIN_TIMEOUT, self.state.drain()).await;
        if is_busy {
            // Clients that wait for a commit or an upload receive their replies.
            tokio::time::sleep(REPLY_FLUSH_DELAY).await;
        }
        self.state.close();
        let sessions_end = async {
            while sessions.join_next().await.is_some() {}
            while remote_sessions.join_next().await.is_some() {}
        };
        // Sessions that take longer are aborted.
        let _ = tokio::time::timeout(DRAIN_TIMEOUT, sessions_end).await;
        self.state.control_plane.end_session().await;
        Ok(())
    }
}

/// Returns the address at which other daemons reach this one.
///
/// Also checks the options that have restrictions if the ledgers are not local.
fn own_endpoint(
    options: &DaemonOptions,
    listener: Option<&TcpListener>,
    identity: &Identity,
) -> Result<Endpoint> {
    let invalid = |text: &str| Error::new(ErrorKind::Invalid, text);
    if options.controller.is_some() && options.meta.is_some() {
        return Err(invalid("either another daemon decides, --controller, or all do, --meta"));
    }
    if options.root.is_some() {
        let text = match &options.meta {
            Some(_) => {
                "what is kept in a directory of one host does not outlast that: serve without --root"
            }
            None => "what must last belongs to the daemon that decides: serve that one with --root",
        };
        return Err(invalid(text));
    }
    if options.controller.is_some() && options.bucket.is_some() {
        let text = "what must outlast a host is put to the daemon that decides: serve that one with --bucket";
        return Err(invalid(text));
    }
    let address = listener.and_then(|listener| listener.local_addr().ok()).ok_or_else(|| {
        invalid("others could not read what is put here: --controller and --meta need --listen")
    })?;
    match &options.advertise {
        Some(place) if identity.is_tls() => format!("tls://{place}").parse(),
        Some(place) => format!("tcp://{place}").parse(),
        None if address.ip().is_unspecified() => {
            Err(invalid("say by which name others reach this daemon: --advertise HOST:PORT"))
        }
        None => Ok(identity.endpoint(address)),
    }
}

/// Accepts a connection. Pends forever if there is no listener.
async fn accept(listener: Option<&TcpListener>) -> std::io::Result<(TcpStream, SocketAddr)> {
    match listener {
        Some(listener) => listener.accept().await,
        None => std::future::pending().await,
    }
}

/// Listens on TCP. Without credentials the address must be a loopback address.
async fn listen_remote(address: SocketAddr, identity: &Identity) -> Result<TcpListener> {
    if !identity.is_tls() && !address.ip().is_loopback() {
        return Err(Error::new(
            ErrorKind::Invalid,
            format_args!(
                "{address} can be reached from other hosts: that needs --cert, --key and --client-ca, or an address of this host alone, such as 127.0.0.1"
            ),
        ));
    }
    TcpListener::bind(address).await.map_err(|error| Error::io(address, error))
}

/// Locks a directory for this daemon and writes the path of the socket into the lock file.
fn lock_root(root: &Path, socket: &Path) -> Result<FileLock> {
    let io_error = |error| Error::io_at(root, error);
    let lock = disk::lock(&root.join(DAEMON_LOCK)).map_err(io_error)?;
    let lock = lock.ok_or_else(|| {
        Error::new(
            ErrorKind::Busy,
            format_args!("other processes use `{}`, or another daemon does", root.display()),
        )
    })?;
    let socket = std::path::absolute(socket).map_err(io_error)?;
    lock.write(&socket.display().to_string()).map_err(io_error)?;
    Ok(lock)
}

impl std::fmt::Debug for Daemon {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Daemon").field("options", &self.options).finish_non_exhaustive()
    }
}
