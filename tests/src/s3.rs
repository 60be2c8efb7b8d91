//! A server that speaks S3, for tests: moto behind a journal (`tests/s3/server.py`), so that it can be killed.
#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::command::end;
use crate::host::Host;

/// Names the Python that has moto.
const PYTHON: &str = "TSSD_S3_PYTHON";

const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/s3/server.py");

const BUCKET: &str = "models";

/// How long it has until it listens.
const PATIENCE: Duration = Duration::from_mins(1);

/// The server. It ends with this, however the process ends.
pub struct S3 {
    host: Host,
    address: SocketAddr,
    process: Option<Child>,
    folder: TempDir,
}

impl S3 {
    /// Starts one on a host, with one bucket.
    ///
    /// # Panics
    ///
    /// If there is no moto, or it does not listen.
    pub fn start(host: Host) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let address = host.free_address();
        let mut server = Self { host, address, process: None, folder };
        server.launch();
        server
    }

    /// Starts it with the objects that it had, and waits until it listens.
    ///
    /// # Panics
    ///
    /// If it does not.
    pub fn launch(&mut self) {
        let by = self.host.enter();
        let python = std::env::var_os(PYTHON).unwrap_or_else(|| "python3".into());
        let mut process = Command::new(&by[0])
            .args(&by[1..])
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
        while !self.host.within(|| TcpStream::connect(self.address).is_ok()) {
            assert!(
                process.try_wait().unwrap().is_none() && started.elapsed() < PATIENCE,
                "no S3 server; {PYTHON} names a Python with moto"
            );
            sleep(Duration::from_millis(20));
        }
        self.process = Some(process);
    }

    /// Kills it.
    ///
    /// # Panics
    ///
    /// If it was killed already.
    pub fn kill(&mut self) {
        end(&mut self.process.take().unwrap());
    }

    /// The address of a store in its bucket.
    pub fn url(&self) -> String {
        format!("s3://{BUCKET}/runs")
    }

    /// What a process must have in its environment to reach it.
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

impl Drop for S3 {
    fn drop(&mut self) {
        if let Some(process) = &mut self.process {
            end(process);
        }
    }
}
