//! `tssd serve`: runs a daemon in the foreground.

use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::json;
use tssd_store::blocking::Daemon;
use tssd_store::{BucketDeltas, Credentials, DaemonOptions, ErrorKind};

use crate::console::Console;
use crate::exit::Exit;
use crate::failure::{Failure, Result};
use crate::interrupt;
use crate::notify::notify;
use crate::size::Size;
use crate::store::store_failure;

/// Serve a store to the processes of this host, in shared memory, until SIGTERM or Ctrl-C.
///
/// Whoever connects to unix:NAME when nobody serves it starts a daemon in the background. That one ends
/// a minute after its last client has left, unless it holds a version (`TSSD_STAY=1`: it stays); it
/// writes its errors to a file beside its socket. A daemon that you start yourself stays.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Where to listen: a path, or the name of a store (a socket in the user's runtime directory)
    #[arg(long, value_name = "PATH", default_value = "default")]
    socket: PathBuf,
    /// The directory for versions that must last (put --durability disk)
    #[arg(long, value_name = "DIR")]
    root: Option<PathBuf>,
    /// How many of the newest versions of a key are kept, unless somebody says otherwise
    #[arg(long, value_name = "COUNT", default_value = "1")]
    keep: NonZeroU32,
    /// How much memory versions take at most [default: half of what there is]
    #[arg(long, value_name = "SIZE")]
    memory_limit: Option<Size>,
    /// Let the members of a group connect too: its name or number. They must be able to enter the
    /// folder of --socket, so that is a path then; only this daemon's user should write there
    #[arg(long, value_name = "GROUP")]
    socket_group: Option<String>,
    /// Let processes of this user connect too; with --socket-group, of its members these alone
    #[arg(long, value_name = "UID")]
    allow_uid: Vec<u32>,
    /// Answer /metrics (Prometheus), /healthz and /readyz at this address of this host alone
    #[arg(long, value_name = "ADDR")]
    metrics: Option<SocketAddr>,
    /// Let clients of other hosts connect at this address too (`tls://ADDR`), with --cert, --key and
    /// --client-ca; without them (`tcp://ADDR`) it is one of this host alone, and whoever can connect may
    #[arg(long, value_name = "ADDR")]
    listen: Option<SocketAddr>,
    /// Let the daemon at this address decide (`tls://HOST:PORT`): what is put here stays here, and the daemons
    /// of other hosts read it where this one listens
    #[arg(long, value_name = "URL", requires = "listen", conflicts_with = "root")]
    controller: Option<String>,
    /// Share the ledgers with the daemons of other hosts in etcd (`etcd://HOST:PORT[,HOST:PORT…][/PREFIX]`): they find
    /// each other there, and what is put to one of them the others read where it listens. What the environment says
    /// to etcdctl of users and certificates counts here too
    #[arg(long, value_name = "URL", requires = "listen", conflicts_with_all = ["root", "controller"])]
    meta: Option<String>,
    /// Where versions go that must outlast this host (put --durability object): `s3://BUCKET/PREFIX`, `gs://…`, `az://…`,
    /// or `file:DIR`, a directory that other hosts have too. What is there already is served
    #[arg(long, value_name = "URL", conflicts_with = "controller")]
    bucket: Option<String>,
    /// How many bytes go there in a second at most
    #[arg(long, value_name = "SIZE", requires = "bucket")]
    bucket_rate: Option<Size>,
    /// Upload one version in this many whole, and the others as deltas of the version before. 1: all whole
    #[arg(long, value_name = "COUNT", requires = "bucket", default_value = "1")]
    anchor_every: NonZeroU32,
    /// Upload a version whole when the deltas since the last whole one have this size, in percent of a version
    #[arg(long, value_name = "PERCENT", requires = "bucket", default_value = "25",
        value_parser = clap::value_parser!(u32).range(..=100))]
    anchor_share: u32,
    /// Maximum rate at which the daemon sends to other hosts, in bytes per second
    #[arg(long, value_name = "SIZE", requires = "listen")]
    send_rate: Option<Size>,
    /// Maximum number of hosts to which the daemon sends at the same time. Others wait
    #[arg(long, value_name = "COUNT", requires = "listen")]
    send_hosts: Option<NonZeroU32>,
    /// Warn if a version comes from other hosts with less than this rate, in bytes per second
    #[arg(long, value_name = "SIZE", requires = "listen")]
    min_fetch_rate: Option<Size>,
    /// Whether hosts send and request the difference from an earlier version, and upload it to the bucket
    #[arg(long, value_enum, default_value = "auto")]
    delta: Deltas,
    /// The name by which other daemons reach this one, if that is not the address of --listen
    #[arg(long, value_name = "HOST:PORT", requires = "listen")]
    advertise: Option<String>,
    /// This daemon's certificate, in PEM, and those between it and the authority's
    #[arg(long, value_name = "FILE", requires_all = ["key", "client_ca"])]
    cert: Option<PathBuf>,
    /// Its private key, in PEM
    #[arg(long, value_name = "FILE", requires_all = ["cert", "client_ca"])]
    key: Option<PathBuf>,
    /// The certificate of the authority that clients' certificates must come from, in PEM
    #[arg(long, value_name = "FILE", requires_all = ["cert", "key"])]
    client_ca: Option<PathBuf>,
    /// Stay when nobody needs the daemon, also if a client has started it
    #[arg(long, env = "TSSD_STAY", value_parser = clap::builder::FalseyValueParser::new())]
    stay: bool,
    /// A client has started it: it is in the background, and ends so many seconds after the last has left
    #[arg(long, hide = true, value_name = "SECONDS")]
    linger: Option<u64>,
}

/// Whether versions go to other hosts as differences.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Deltas {
    /// If the other host has an earlier version, and the difference is smaller.
    Auto,
    /// Versions go whole.
    Off,
}

/// Runs the daemon until it stops. Prints one line when it is ready.
pub(crate) fn run(args: &Args, console: Console) -> Result<Exit> {
    if args.linger.is_some() {
        // Do not receive signals of the client's terminal. A session leader keeps its session.
        let _ = rustix::process::setsid();
        // Do not keep the working directory of the client in use.
        let _ = std::env::set_current_dir("/");
    }
    let stop = interrupt::shutdown_signal()?;
    let name = args.socket.to_str().filter(|name| !name.contains('/'));
    let mut options = DaemonOptions::for_store(name.unwrap_or("default"))
        .map_err(|error| store_failure(&error))?;
    if name.is_none() {
        options.socket.clone_from(&args.socket);
    }
    options.root.clone_from(&args.root);
    options.keep = args.keep;
    options.allow_uids.clone_from(&args.allow_uid);
    options.socket_group = args.socket_group.as_deref().map(group_id).transpose()?;
    options.metrics = args.metrics;
    options.listen = args.listen;
    options.controller.clone_from(&args.controller);
    options.meta.clone_from(&args.meta);
    options.advertise.clone_from(&args.advertise);
    options.bucket.clone_from(&args.bucket);
    options.send_rate = args.send_rate.map(|Size(rate)| rate);
    options.send_hosts = args.send_hosts;
    options.min_fetch_rate = args.min_fetch_rate.map(|Size(rate)| rate);
    options.deltas = args.delta == Deltas::Auto;
    options.bucket_deltas =
        BucketDeltas { anchor_interval: args.anchor_every, max_percent: args.anchor_share };
    options.bucket_rate = args.bucket_rate.map(|Size(rate)| rate);
    if let (Some(ca), Some(cert), Some(key)) = (&args.client_ca, &args.cert, &args.key) {
        let (ca, cert, key) = (ca.clone(), cert.clone(), key.clone());
        options.credentials = Some(Credentials { ca, cert, key });
    }
    options.linger = args.linger.filter(|_| !args.stay).map(Duration::from_secs);
    if let Some(Size(limit)) = args.memory_limit {
        options.memory_limit = limit;
    }
    let (keep, limit) = (u64::from(args.keep.get()), options.memory_limit);
    // Besides the kept versions, one version is being written or still read.
    let model_limit = limit / (keep + 1);
    let daemon = Daemon::bind(options).map_err(|error| match error.kind() {
        ErrorKind::Unreachable => Failure::new(Exit::Unreachable, error)
            .help("check the address of --controller, --meta or --bucket, and whether it is there"),
        _ => store_failure(&error),
    })?;
    let (socket, pid) = (daemon.socket().display().to_string(), std::process::id());
    let (metrics, address) = (daemon.metrics(), daemon.address());
    let mut line = format!(
        "serving unix:{socket} (process {pid}, version {}): {} of memory, a model of up to {} with {} \
         kept",
        env!("CARGO_PKG_VERSION"),
        Size(limit),
        Size(model_limit),
        keep,
    );
    if let Some(meta) = &args.meta {
        line = format!("{line}, ledgers in {meta}");
    }
    if let Some(bucket) = &args.bucket {
        line = format!("{line}, what must last in {bucket}");
    }
    if let Some(address) = &address {
        line = format!("{line}, for other hosts {address}");
    }
    if let Some(metrics) = metrics {
        line = format!("{line}, metrics at http://{metrics}/metrics");
    }
    let json = json!({
        "socket": socket,
        "pid": pid,
        "version": env!("CARGO_PKG_VERSION"),
        "memory_limit": limit,
        "keep": keep,
        "model_limit": model_limit,
        "address": address,
        "metrics": metrics.map(|address| address.to_string()),
    });
    console.report(line, &json)?;
    notify("READY=1")
        .map_err(|error| Failure::new(Exit::Refused, format_args!("NOTIFY_SOCKET: {error}")))?;
    daemon.serve(stop).map_err(|error| store_failure(&error))?;
    // The daemon has stopped, so a failed notification has no effect.
    let _ = notify("STOPPING=1");
    Ok(Exit::Ok)
}

/// Returns the ID of a group, from its name or number.
fn group_id(name: &str) -> Result<u32> {
    if let Ok(id) = name.parse() {
        return Ok(id);
    }
    let path = Path::new("/etc/group");
    let groups = std::fs::read_to_string(path).map_err(|error| Failure::io("read", path, error))?;
    let id = groups.lines().find_map(|line| {
        let mut fields = line.split(':');
        (fields.next() == Some(name)).then(|| fields.nth(1)?.parse().ok())?
    });
    id.ok_or_else(|| {
        Failure::new(Exit::Usage, format_args!("no group `{name}` in {}", path.display()))
            .help("a group from elsewhere has a number too: `getent group NAME` prints it")
    })
}
