//! An S3 server for tests: moto with a journal (`tests/s3/server.py`), so that it survives a kill.
#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::command::kill_and_wait;
use crate::host::Host;

/// Environment variable: a Python that has moto.
const PYTHON: &str = "TSSD_S3_PYTHON";

const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/s3/server.py");

const BUCKET: &str = "models";

/// Time within which the server must listen.
const STARTUP_TIMEOUT: Duration = Duration::from_mins(1);

/// The server. It ends on drop, and when this process ends.
pub struct S3Server {
    host: Host,
    address: SocketAddr,
    process: Option<Child>,
    folder: TempDir,
}

impl S3Server {
    /// Starts a server on a host, with one bucket.
    ///
    /// # Panics
    ///
    /// If moto is missing, or the server does not listen.
    pub fn start(host: Host) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let address = host.free_address();
        let mut server = Self { host, address, process: None, folder };
        server.restart();
        server
    }

    /// Starts the server with the objects of its journal, and waits until it listens.
    ///
    /// # Panics
    ///
    /// If it does not listen.
    pub fn restart(&mut self) {
        let prefix = self.host.command_prefix();
        let python = std::env::var_os(PYTHON).unwrap_or_else(|| "python3".into());
        let mut process = Command::new(&prefix[0])
            .args(&prefix[1..])
            .arg(python)
            .arg(SCRIPT)
            .arg(self.address.ip().to_string())
            .arg(self.address.port().to_string())
            .arg(self.folder.path().join("journal"))
            .arg(BUCKET)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let started = Instant::now();
        while !self.host.run(|| TcpStream::connect(self.address).is_ok()) {
            assert!(
                process.try_wait().unwrap().is_none() && started.elapsed() < STARTUP_TIMEOUT,
                "no S3 server; {PYTHON} names a Python with moto"
            );
            sleep(Duration::from_millis(20));
        }
        self.process = Some(process);
    }

    /// Kills the server.
    ///
    /// # Panics
    ///
    /// If it is not running.
    pub fn kill(&mut self) {
        kill_and_wait(&mut self.process.take().unwrap());
    }

    /// Returns the URL of a store in its bucket.
    pub fn url(&self) -> String {
        format!("s3://{BUCKET}/runs")
    }

    /// Returns the environment variables that a process needs to reach the server.
    pub fn environment(&self) -> Vec<(String, String)> {
        let endpoint = format!("http://{}", self.address);
        let all = [
            ("AWS_ENDPOINT_URL", endpoint.as_str()),
            ("AWS_ALLOW_HTTP", "true"),
            ("AWS_ACCESS_KEY_ID", "test"),
            ("AWS_SECRET_ACCESS_KEY", "test"),
            ("AWS_REGION", "us-east-1"),
        ];
        all.map(|(name, value)| (name.to_owned(), value.to_owned())).into()
    }
}

impl Drop for S3Server {
    fn drop(&mut self) {
        if let Some(process) = &mut self.process {
            kill_and_wait(process);
        }
    }
}
