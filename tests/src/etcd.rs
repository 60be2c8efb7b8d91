//! Members of etcd, for tests.

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

/// Names the program, if it is not on the path.
const PROGRAM: &str = "TSSD_ETCD";

/// How long members have until they answer.
const PATIENCE: Duration = Duration::from_mins(1);

/// How long somebody is known who has named himself once, in seconds.
const TOKEN_SECONDS: &str = "1";

/// Members that make one cluster. They end with this, however the process ends.
pub struct Etcd {
    members: Vec<Member>,
    /// What they prove themselves with, and whom they believe, if not everybody may listen.
    guard: Vec<OsString>,
    folder: TempDir,
}

struct Member {
    host: Host,
    client: SocketAddr,
    peer: SocketAddr,
    /// Where it says how it is, to everybody.
    metrics: SocketAddr,
    process: Option<Child>,
}

impl Member {
    fn new(host: Host, [client, peer, metrics]: [SocketAddr; 3]) -> Self {
        Self { host, client, peer, metrics, process: None }
    }
}

impl Etcd {
    /// So many members on this machine, which answer.
    ///
    /// # Panics
    ///
    /// If there is no etcd, or it does not answer.
    pub fn start(members: usize) -> Self {
        let host = Host::default();
        let member = |_| Member::new(host.clone(), [(); 3].map(|()| host.free_address()));
        Self::of((0..members).map(member).collect())
    }

    /// A member on each of several hosts; they answer.
    ///
    /// # Panics
    ///
    /// If there is no etcd, or it does not answer.
    pub fn on(hosts: &[Host]) -> Self {
        let member = |host: &Host| {
            let addresses = [2379, 2380, 2381].map(|port| (host.address, port).into());
            Member::new(host.clone(), addresses)
        };
        Self::of(hosts.iter().map(member).collect())
    }

    fn of(members: Vec<Member>) -> Self {
        let folder = tempfile::tempdir().expect("there is room for folders");
        let mut etcd = Self { members, guard: Vec::new(), folder };
        (0..etcd.members.len()).for_each(|member| etcd.launch(member));
        etcd.wait();
        etcd
    }

    /// From now on a member answers only who has a certificate of the same authority, and names himself: `root` may
    /// everything, `tssd` what is below `tssd/`. The password is the name.
    ///
    /// # Panics
    ///
    /// If it does not take that.
    pub fn guard(&mut self, ca: &Path, cert: &Path, key: &Path) {
        let member = &self.members[0];
        for (path, body) in [
            ("user/add", r#"{"name": "root", "password": "root"}"#),
            ("user/grant", r#"{"user": "root", "role": "root"}"#),
            ("user/add", r#"{"name": "tssd", "password": "tssd"}"#),
            ("role/add", r#"{"name": "tssd"}"#),
            (
                "role/grant",
                // From `tssd/` to `tssd0`, the next one after all that begin so.
                r#"{"name": "tssd", "perm": {"permType": 2, "key": "dHNzZC8=", "range_end": "dHNzZDA="}}"#,
            ),
            ("user/grant", r#"{"user": "tssd", "role": "tssd"}"#),
            ("enable", "{}"),
        ] {
            let path = format!("/v3/auth/{path}");
            let said = member.host.within(|| post(member.client, &path, body));
            let said = said.expect("it answers");
            assert!(said.starts_with("HTTP/1.0 200"), "{path} {body}: {said}");
        }
        let files = [("--trusted-ca-file", ca), ("--cert-file", cert), ("--key-file", key)];
        let files = files.into_iter().flat_map(|(flag, path)| [flag.into(), path.into()]);
        self.guard = files.chain(["--client-cert-auth".into()]).collect();
        self.kill(0);
        self.launch(0);
        self.wait();
    }

    /// Their address, as stores and daemons take it.
    pub fn url(&self) -> String {
        let hosts: Vec<_> = self.members.iter().map(|member| member.client.to_string()).collect();
        format!("etcd://{}", hosts.join(","))
    }

    /// How many requests the first member has answered that read or write keys.
    ///
    /// # Panics
    ///
    /// If it does not say so.
    pub fn requests(&self) -> u64 {
        let member = &self.members[0];
        let said = member.host.within(|| ask(member.metrics, "/metrics")).expect("it answers");
        let is_counted = |line: &&str| {
            line.starts_with("grpc_server_handled_total{grpc_code=\"OK\"")
                && line.contains("grpc_service=\"etcdserverpb.KV\"")
        };
        let counts = said.lines().filter(is_counted).filter_map(|line| line.rsplit(' ').next());
        counts.map(|count| count.parse::<u64>().expect("it is a number")).sum()
    }

    /// Kills a member.
    ///
    /// # Panics
    ///
    /// If it was killed already.
    pub fn kill(&mut self, member: usize) {
        let mut process = self.members[member].process.take().expect("it runs");
        process.kill().and_then(|()| process.wait()).expect("it is ours");
    }

    /// Starts a member over what it has written before.
    pub fn launch(&mut self, member: usize) {
        let of = |member: usize, peer: SocketAddr| format!("m{member}=http://{peer}");
        let cluster: Vec<_> =
            self.members.iter().enumerate().map(|(number, it)| of(number, it.peer)).collect();
        let Member { host, client, peer, metrics, .. } = &self.members[member];
        let scheme = if self.guard.is_empty() { "http" } else { "https" };
        let folder = self.folder.path();
        let log = File::create(folder.join(format!("m{member}.log"))).expect("there is room");
        let program =
            std::env::var_os(PROGRAM).map_or_else(|| PathBuf::from("etcd"), PathBuf::from);
        let by = host.enter();
        let mut command = Command::new(&by[0]);
        command
            .args(&by[1..])
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
            // A leader that is lost is missed soon.
            .args(["--heartbeat-interval=50", "--election-timeout=500", "--pre-vote"])
            .args(["--logger=zap", "--log-level=warn"])
            .args(&self.guard)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log);
        let process = command.spawn();
        let process = process.unwrap_or_else(|error| panic!("{}: {error}", program.display()));
        self.members[member].process = Some(process);
    }

    /// Waits until all that run answer.
    ///
    /// # Panics
    ///
    /// If one does not within a minute, with what it has said.
    pub fn wait(&mut self) {
        let started = Instant::now();
        let folder = self.folder.path();
        for (number, member) in self.members.iter_mut().enumerate() {
            let Some(process) = &mut member.process else { continue };
            while !member.host.within(|| is_healthy(member.metrics)) {
                let has_ended = process.try_wait().expect("it is ours").is_some();
                if has_ended || started.elapsed() > PATIENCE {
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

/// Whether a member answers and knows a leader.
fn is_healthy(address: SocketAddr) -> bool {
    ask(address, "/health").is_ok_and(|answer| answer.contains("\"health\":\"true\""))
}

fn ask(address: SocketAddr, path: &str) -> std::io::Result<String> {
    send(address, &format!("GET {path} HTTP/1.0\r\n\r\n"))
}

fn post(address: SocketAddr, path: &str, body: &str) -> std::io::Result<String> {
    let len = body.len();
    send(address, &format!("POST {path} HTTP/1.0\r\nContent-Length: {len}\r\n\r\n{body}"))
}

fn send(address: SocketAddr, request: &str) -> std::io::Result<String> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(Duration::from_secs(2)))?;
    stream.write_all(request.as_bytes())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}
