//! A daemon: one controller and one arena, for all processes of a host.

mod counters;
mod delegate;
pub(crate) mod elsewhere;
mod hosts;
pub(crate) mod house;
mod http;
mod lost;
mod metrics;
mod mirror;
mod place;
mod reading;
mod registry;
mod replicas;
mod session;
mod spare;
pub(crate) mod tiers;

use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream, UnixListener};
use tokio::task::JoinSet;

use self::house::House;
use self::mirror::Bucket;
pub use self::place::default_memory_limit;
use self::place::listen;
use self::session::Guest;
use self::spare::Spare;
use crate::credentials::Credentials;
use crate::error::{Error, ErrorKind, Result};
use crate::io::disk::{self, CLAIM, FileLock};
use crate::io::sync::boxed;
use crate::net::socket::{beside, socket_of};
use crate::net::tls::{Endpoint, Identity};

/// How many connections there are at most from this host, and as many from elsewhere.
const MAX_PEERS: usize = 1024;

/// How long what has begun has to end when the daemon does, and then the sessions.
const DRAIN: Duration = Duration::from_secs(10);

/// How long the last answers have to go.
const FAREWELL: Duration = Duration::from_millis(100);

/// How a daemon serves.
#[derive(Clone, Debug)]
pub struct DaemonOptions {
    /// Where it listens. Its folder must be there.
    pub socket: PathBuf,
    /// The directory for versions that must last; none keeps everything in memory. No other process may
    /// use it meanwhile, but through the daemon.
    pub root: Option<PathBuf>,
    /// How many of the newest versions of a key are kept, as long as nobody says otherwise.
    pub keep: NonZeroU32,
    /// How many bytes of memory segments take at most, together.
    pub memory_limit: u64,
    /// Whose processes may connect, besides those of the user that the daemon runs as, and root's; of a
    /// socket's group only these may, unless nobody is named.
    pub allow_uids: Vec<u32>,
    /// The group whose members may connect: they can reach the socket, and that is all the proof there
    /// is of a membership. They must be able to enter the socket's folder, in which nobody else than the
    /// daemon's user should write.
    pub socket_group: Option<u32>,
    /// Where `/metrics`, `/healthz` and `/readyz` are answered over HTTP: an address of this host alone.
    pub metrics: Option<SocketAddr>,
    /// Where clients of other hosts connect, by TCP; none: they do not. Without credentials it is an address
    /// of this host alone, and whoever can connect to it may.
    pub listen: Option<SocketAddr>,
    /// What the daemon proves itself with to other hosts, and whom it believes.
    pub credentials: Option<Credentials>,
    /// The daemon that decides, in place of this one: `tls://HOST:PORT`. Archives stay here; the others read
    /// them where this one listens.
    pub controller: Option<String>,
    /// Where several daemons have their ledgers, in place of each its own: `etcd://HOST:PORT[,HOST:PORT…][/PREFIX]`.
    /// They find each other there, archives stay where they are put, and the others read them where this one
    /// listens.
    pub meta: Option<String>,
    /// Where versions are copied that must outlast the host: the address of a store in a bucket, `s3://BUCKET/PREFIX`,
    /// or `file:DIR`, a directory that other hosts have too. What is in it, and not known otherwise, is served.
    pub bucket: Option<String>,
    /// How many bytes go there in a second at most, of all versions together.
    pub bucket_rate: Option<u64>,
    /// `HOST:PORT`, by which other hosts reach this daemon, if that is not the address that it listens at.
    pub advertise: Option<String>,
    /// How long after its last client has left it ends, unless it holds a version that would be lost
    /// then; none: it stays.
    pub linger: Option<Duration>,
}

/// A daemon that listens.
pub struct Daemon {
    listener: UnixListener,
    house: Arc<House>,
    metrics: Option<TcpListener>,
    /// Where other hosts connect.
    far: Option<TcpListener>,
    identity: Identity,
    options: Arc<DaemonOptions>,
    /// Held as long as the daemon lives, however it ends.
    _locks: Vec<FileLock>,
}

impl DaemonOptions {
    /// Those of the daemon of a store, by the store's name: it listens in a folder that is the user's,
    /// keeps one version, and takes half of the memory.
    ///
    /// # Errors
    ///
    /// `Invalid` for a name that is none; `Io` if that folder is not the user's alone.
    pub fn of(name: &str) -> Result<Self> {
        Ok(Self::at(socket_of(name)?, default_memory_limit()?))
    }

    /// Those of a daemon that listens at a socket and keeps one version in memory, for processes of this
    /// user.
    pub fn at(socket: impl Into<PathBuf>, memory_limit: u64) -> Self {
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
            advertise: None,
            linger: None,
        }
    }

    /// Whether processes of a user are served.
    fn admits(&self, uid: u32) -> bool {
        let own = rustix::process::geteuid().as_raw();
        let is_named = match self.allow_uids.as_slice() {
            // Whoever is not of the group could not have connected.
            [] => self.socket_group.is_some(),
            named => named.contains(&uid),
        };
        uid == own || uid == 0 || is_named
    }

    /// What the socket's mode is: who can connect is then asked who it is.
    fn socket_mode(&self) -> u32 {
        match (self.socket_group, self.allow_uids.is_empty()) {
            (Some(_), _) => 0o660,
            (None, false) => 0o666,
            (None, true) => 0o600,
        }
    }
}

impl Daemon {
    /// Listens at a socket.
    ///
    /// # Errors
    ///
    /// `Busy` if another daemon does, with its process; `Invalid` if others than this host could ask for
    /// metrics, or connect without a proof of who they are, if credentials cannot be read, if the bucket is none, or
    /// if the socket's group could not reach it; `Unreachable` if the controller, the ledgers or the bucket cannot be
    /// reached; `Io` if the system does not let it.
    pub async fn bind(options: DaemonOptions) -> Result<Self> {
        let bucket = options.bucket.as_deref().map(Bucket::open).transpose()?;
        Self::over(options, bucket).await
    }

    /// The same with a bucket that is open.
    async fn over(options: DaemonOptions, bucket: Option<Bucket>) -> Result<Self> {
        let socket = &options.socket;
        let at = |error| Error::io(socket.display(), error);
        let lock_path = beside(socket, "lock");
        let Some(lock) = disk::lock(&lock_path).map_err(at)? else {
            let pid = std::fs::read_to_string(&lock_path).unwrap_or_default();
            let pid = pid.trim();
            return Err(Error::new(
                ErrorKind::Busy,
                format_args!("a daemon, process {pid}, serves `{}` already", socket.display()),
            ));
        };
        lock.write(&format!("{}\n", std::process::id())).map_err(at)?;
        let mut locks = vec![lock];
        if let Some(root) = &options.root {
            locks.push(claim(root, socket)?);
        }
        let metrics = match options.metrics {
            Some(address) => Some(http::bind(address).await?),
            None => None,
        };
        let identity = options.credentials.as_ref().map(Identity::read).transpose()?;
        let identity = identity.unwrap_or_default();
        let far = match options.listen {
            Some(address) => Some(listen_far(address, &identity).await?),
            None => None,
        };
        // What listens nowhere any more was left by a daemon that was killed.
        disk::remove(socket).map_err(at)?;
        let listener = listen(socket, options.socket_group, options.socket_mode())?;
        let is_alone = options.controller.is_none() && options.meta.is_none();
        let own = || own_endpoint(&options, far.as_ref(), &identity);
        let own = if is_alone { None } else { Some(own()?) };
        let house = Arc::new(House::open(&options, identity.clone(), own, bucket).await?);
        tracing::info!(socket = %options.socket.display(), memory = options.memory_limit, "serving");
        let options = Arc::new(options);
        Ok(Self { listener, house, metrics, far, identity, options, _locks: locks })
    }

    /// Where it listens.
    pub fn socket(&self) -> &Path {
        &self.options.socket
    }

    /// Where clients of other hosts connect, if they can: as an address of a store.
    pub fn address(&self) -> Option<String> {
        let address = self.far.as_ref()?.local_addr().ok()?;
        Some(self.identity.endpoint(address).to_string())
    }

    /// Where metrics are answered, if they are.
    pub fn metrics(&self) -> Option<SocketAddr> {
        self.metrics.as_ref()?.local_addr().ok()
    }

    /// Serves until `stop` is done, or nobody needs it any more if it lingers only; then nothing begins, and what has
    /// begun has 10 seconds to end.
    ///
    /// # Errors
    ///
    /// `Io` if the system takes the socket away.
    pub async fn serve(self, stop: impl Future<Output = ()>) -> Result<()> {
        // It ends with this: that the daemon is ending is told until it has.
        let mut watched = JoinSet::new();
        if let Some(listener) = self.metrics {
            watched.spawn(boxed(http::serve(listener, self.house.clone())));
        }
        let (mut sessions, mut far_sessions) = (JoinSet::new(), JoinSet::new());
        let mut stop = std::pin::pin!(stop);
        let mut spare = Spare::new();
        let mut unneeded = std::pin::pin!(self.house.unneeded(self.options.linger));
        loop {
            tokio::select! {
                () = &mut stop => break,
                () = &mut unneeded => break,
                Some(_) = sessions.join_next(), if !sessions.is_empty() => {}
                Some(_) = far_sessions.join_next(), if !far_sessions.is_empty() => {}
                accepted = self.listener.accept() => match accepted {
                    Ok((stream, _)) if sessions.len() < MAX_PEERS => {
                        let (house, options) = (self.house.clone(), self.options.clone());
                        if let Some(guest) = Guest::near(stream) {
                            sessions.spawn(boxed(session::run(house, guest, options)));
                        }
                    }
                    Ok(_) => self.house.counters.count().turned_away += 1,
                    Err(_) => {
                        let shed = spare.shed(self.listener.accept()).await;
                        self.house.counters.count().turned_away += shed;
                    }
                },
                accepted = accept(self.far.as_ref()) => match accepted {
                    Ok((stream, address)) if far_sessions.len() < MAX_PEERS => {
                        let (house, options) = (self.house.clone(), self.options.clone());
                        let identity = self.identity.clone();
                        far_sessions.spawn(boxed(async move {
                            match Guest::far(stream, address, &identity).await {
                                Some(guest) => session::run(house, guest, options).await,
                                None => house.counters.count().turned_away += 1,
                            }
                        }));
                    }
                    Ok(_) => self.house.counters.count().turned_away += 1,
                    Err(_) => {
                        let shed = spare.shed(accept(self.far.as_ref())).await;
                        self.house.counters.count().turned_away += shed;
                    }
                },
            }
        }
        tracing::info!("ending");
        // Who comes later finds nobody.
        let _ = disk::remove(&self.options.socket);
        drop((self.listener, self.far));
        let is_busy = self.house.is_busy();
        // What is on its way to memory or to the bucket is nowhere else.
        let _ = tokio::time::timeout(DRAIN, self.house.drain()).await;
        if is_busy {
            // Who has waited for it hears so.
            tokio::time::sleep(FAREWELL).await;
        }
        self.house.close();
        let all = async {
            while sessions.join_next().await.is_some() {}
            while far_sessions.join_next().await.is_some() {}
        };
        // Whoever takes longer is cut off.
        let _ = tokio::time::timeout(DRAIN, all).await;
        self.house.registry.leave().await;
        Ok(())
    }
}

/// How other daemons reach this one.
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
        Some(place) if identity.is_some() => format!("tls://{place}").parse(),
        Some(place) => format!("tcp://{place}").parse(),
        None if address.ip().is_unspecified() => {
            Err(invalid("say by which name others reach this daemon: --advertise HOST:PORT"))
        }
        None => Ok(identity.endpoint(address)),
    }
}

/// The next connection; never, if nobody listens.
async fn accept(listener: Option<&TcpListener>) -> std::io::Result<(TcpStream, SocketAddr)> {
    match listener {
        Some(listener) => listener.accept().await,
        None => std::future::pending().await,
    }
}

/// Listens for other hosts, if it is safe.
async fn listen_far(address: SocketAddr, identity: &Identity) -> Result<TcpListener> {
    if !identity.is_some() && !address.ip().is_loopback() {
        return Err(Error::new(
            ErrorKind::Invalid,
            format_args!(
                "{address} can be reached from other hosts: that needs --cert, --key and --client-ca, or an address of this host alone, such as 127.0.0.1"
            ),
        ));
    }
    TcpListener::bind(address).await.map_err(|error| Error::io(address, error))
}

/// Takes a directory for this daemon alone, and says in it where the daemon is.
fn claim(root: &Path, socket: &Path) -> Result<FileLock> {
    let at = |error| Error::io(root.display(), error);
    let lock = disk::lock(&root.join(CLAIM)).map_err(at)?;
    let lock = lock.ok_or_else(|| {
        Error::new(
            ErrorKind::Busy,
            format_args!("other processes use `{}`, or another daemon does", root.display()),
        )
    })?;
    let socket = std::path::absolute(socket).map_err(at)?;
    lock.write(&socket.display().to_string()).map_err(at)?;
    Ok(lock)
}

impl std::fmt::Debug for Daemon {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Daemon").field("options", &self.options).finish_non_exhaustive()
    }
}
