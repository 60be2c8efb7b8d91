//! etcd clusters for tests.

use std::ffi::OsString;
use std::fs::File;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use super::host::Host;

/// Environment variable: the program, if it is not in the path.
const PROGRAM: &str = "TSSD_ETCD";

/// Time within which members must answer.
const STARTUP_TIMEOUT: Duration = Duration::from_mins(1);

/// Lifetime of an authentication token in seconds.
const TOKEN_SECONDS: &str = "1";

/// The members of one cluster. They end on drop, and when this process ends.
pub struct Etcd {
    members: Vec<Member>,
    /// TLS arguments of the members, if they authenticate clients.
    tls_args: Vec<OsString>,
    folder: TempDir,
}

struct Member {
    host: Host,
    client: SocketAddr,
    peer: SocketAddr,
    /// Address of its metrics and health, which needs no authentication.
    metrics: SocketAddr,
    process: Option<Child>,
}

impl Member {
    fn new(host: Host, [client, peer, metrics]: [SocketAddr; 3]) -> Self {
        Self { host, client, peer, metrics, process: None }
    }
}

impl Etcd {
    /// Starts a cluster on this machine, and waits until all members answer.
    ///
    /// # Panics
    ///
    /// If etcd is missing or does not answer.
    pub fn start(members: usize) -> Self {
        let host = Host::default();
        let member = |_| Member::new(host.clone(), [(); 3].map(|()| host.free_address()));
        Self::from_members((0..members).map(member).collect())
    }

    /// Starts a cluster with one member on each host, and waits until all members answer.
    ///
    /// # Panics
    ///
    /// If etcd is missing or does not answer.
    pub fn on_hosts(hosts: &[Host]) -> Self {
        let member = |host: &Host| {
            let addresses = [2379, 2380, 2381].map(|port| (host.address, port).into());
            Member::new(host.clone(), addresses)
        };
        Self::from_members(hosts.iter().map(member).collect())
    }

    fn from_members(members: Vec<Member>) -> Self {
        let folder = tempfile::tempdir().expect("there is room for folders");
        let mut etcd = Self { members, tls_args: Vec::new(), folder };
        (0..etcd.members.len()).for_each(|member| etcd.start_member(member));
        etcd.wait();
        etcd
    }

    /// Restarts the only member with authentication of clients.
    ///
    /// A client needs a certificate of the same authority, and a user name. `root` may access all
    /// keys, `tssd` those below `tssd/`. The password equals the name.
    ///
    /// # Panics
    ///
    /// If etcd refuses a request.
    pub fn enable_auth(&mut self, ca: &Path, cert: &Path, key: &Path) {
        let member = &self.members[0];
        for (path, body) in [
            ("user/add", r#"{"name": "root", "password": "root"}"#),
            ("user/grant", r#"{"user": "root", "role": "root"}"#),
            ("user/add", r#"{"name": "tssd", "password": "tssd"}"#),
            ("role/add", r#"{"name": "tssd"}"#),
            (
                "role/grant",
                // The range ends at `tssd0`, the first key after all that begin with `tssd/`.
                r#"{"name": "tssd", "perm": {"permType": 2, "key": "dHNzZC8=", "range_end": "dHNzZDA="}}"#,
            ),
            ("user/grant", r#"{"user": "tssd", "role": "tssd"}"#),
            ("enable", "{}"),
        ] {
            let path = format!("/v3/auth/{path}");
            let response = member.host.run(|| http_post(member.client, &path, body));
            let response = response.expect("it answers");
            assert!(response.starts_with("HTTP/1.0 200"), "{path} {body}: {response}");
        }
        let files = [("--trusted-ca-file", ca), ("--cert-file", cert), ("--key-file", key)];
        let files = files.into_iter().flat_map(|(flag, path)| [flag.into(), path.into()]);
        self.tls_args = files.chain(["--client-cert-auth".into()]).collect();
        self.kill_member(0);
        self.start_member(0);
        self.wait();
    }

    /// Returns the URL of the cluster for stores and daemons.
    pub fn url(&self) -> String {
        let hosts: Vec<_> = self.members.iter().map(|member| member.client.to_string()).collect();
        format!("etcd://{}", hosts.join(","))
    }

    /// Returns the number of requests of the key-value service that the first member has answered.
    ///
    /// # Panics
    ///
    /// If it does not report this metric.
    pub fn kv_requests(&self) -> u64 {
        let member = &self.members[0];
        let response =
            member.host.run(|| http_get(member.metrics, "/metrics")).expect("it answers");
        let is_counted = |line: &&str| {
            line.starts_with("grpc_server_handled_total{grpc_code=\"OK\"")
                && line.contains("grpc_service=\"etcdserverpb.KV\"")
        };
        let counts = response.lines().filter(is_counted).filter_map(|line| line.rsplit(' ').next());
        counts.map(|count| count.parse::<u64>().expect("it is a number")).sum()
    }

    /// Kills a member.
    ///
    /// # Panics
    ///
    /// If it is not running.
    pub fn kill_member(&mut self, member: usize) {
        let mut process = self.members[member].process.take().expect("it runs");
        process.kill().and_then(|()| process.wait()).expect("it is ours");
    }

    /// Starts a member with the data that it has.
    pub fn start_member(&mut self, member: usize) {
        let peer_argument = |member: usize, peer: SocketAddr| format!("m{member}=http://{peer}");
        let cluster: Vec<_> = self
            .members
            .iter()
            .enumerate()
            .map(|(number, it)| peer_argument(number, it.peer))
            .collect();
        let Member { host, client, peer, metrics, .. } = &self.members[member];
        let scheme = if self.tls_args.is_empty() { "http" } else { "https" };
        let folder = self.folder.path();
        let log = File::create(folder.join(format!("m{member}.log"))).expect("there is room");
        let program =
            std::env::var_os(PROGRAM).map_or_else(|| PathBuf::from("etcd"), PathBuf::from);
        let prefix = host.command_prefix();
        let mut command = Command::new(&prefix[0]);
        command
            .args(&prefix[1..])
            .arg(&program)
            .arg(format!("--name=m{member}"))
            .arg(format!("--data-dir={}", folder.join(format!("m{member}")).display()))
            .arg(format!("--listen-client-urls={scheme}://{client}"))
            .arg(format!("--advertise-client-urls={scheme}://{client}"))
            .arg(format!("--listen-metrics-urls=http://{metrics}"))
            .args(["--auth-token-ttl", TOKEN_SECONDS])
            .arg(format!("--listen-peer-urls=http://{peer}"))
            .arg(format!("--initial-advertise-peer-urls=http://{peer}"))
            .arg(format!("--initial-cluster={}", cluster.join(",")))
            // A lost leader is detected early.
            .args(["--heartbeat-interval=50", "--election-timeout=500", "--pre-vote"])
            .args(["--logger=zap", "--log-level=warn"])
            .args(&self.tls_args)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log);
        let process = command.spawn();
        let process = process.unwrap_or_else(|error| panic!("{}: {error}", program.display()));
        self.members[member].process = Some(process);
    }

    /// Waits until all running members answer.
    ///
    /// # Panics
    ///
    /// If one does not answer within a minute. The message has its log.
    pub fn wait(&mut self) {
        let started = Instant::now();
        let folder = self.folder.path();
        for (number, member) in self.members.iter_mut().enumerate() {
            let Some(process) = &mut member.process else { continue };
            while !member.host.run(|| is_healthy(member.metrics)) {
                let has_ended = process.try_wait().expect("it is ours").is_some();
                if has_ended || started.elapsed() > STARTUP_TIMEOUT {
                    let log = std::fs::read_to_string(folder.join(format!("m{number}.log")));
                    panic!(
                        "etcd does not answer; it is `etcd` of the PATH, or what {PROGRAM} names:\n{}",
                        log.unwrap_or_default()
                    );
                }
                sleep(Duration::from_millis(20));
            }
        }
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        for process in self.members.iter_mut().filter_map(|member| member.process.as_mut()) {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

/// Returns whether a member answers and knows a leader.
fn is_healthy(address: SocketAddr) -> bool {
    http_get(address, "/health").is_ok_and(|answer| answer.contains("\"health\":\"true\""))
}

fn http_get(address: SocketAddr, path: &str) -> std::io::Result<String> {
    http_request(address, &format!("GET {path} HTTP/1.0\r\n\r\n"))
}

fn http_post(address: SocketAddr, path: &str, body: &str) -> std::io::Result<String> {
    let len = body.len();
    http_request(address, &format!("POST {path} HTTP/1.0\r\nContent-Length: {len}\r\n\r\n{body}"))
}

fn http_request(address: SocketAddr, request: &str) -> std::io::Result<String> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(Duration::from_secs(2)))?;
    stream.write_all(request.as_bytes())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}
