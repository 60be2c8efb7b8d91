//! Connects to a named daemon of the user, and starts it if it does not run.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use tokio::net::UnixStream;
use tokio::time::{sleep, timeout};

use super::{RemoteController, unreachable};
use crate::error::{Error, Result};
use crate::io::disk::{self, FileLock};
use crate::net::socket::{sibling_path, socket_path};

/// Timeout of the connection, including the start of a daemon.
const START_TIMEOUT: Duration = Duration::from_secs(10);

/// Interval between attempts to connect.
const POLL_INTERVAL: Duration = Duration::from_millis(2);

/// Maximum number of starts. The first can fail because of a daemon that is shutting down.
const MAX_STARTS: u32 = 3;

/// Delay before the next start.
const RETRY_DELAY: Duration = Duration::from_millis(100);

/// Seconds that the daemon keeps running without a client.
const LINGER_SECONDS: u32 = 60;

/// Maximum length in bytes of the log text in an error.
const MAX_LOG_BYTES: usize = 2000;

/// Connects to the user's daemon with this name. Starts it if it does not run.
pub(crate) async fn connect_or_start(name: &str) -> Result<RemoteController> {
    let socket = socket_path(name)?;
    let mut launcher = Launcher { name, socket: &socket, lock: None, child: None, failures: 0 };
    let connected = timeout(START_TIMEOUT, launcher.connect()).await;
    connected.unwrap_or_else(|_| {
        let text =
            format_args!("it has not answered for {START_TIMEOUT:?}{}", launcher.log_excerpt());
        Err(unreachable(&socket, &text))
    })
}

/// Connects to a daemon. Of the processes that want to start one, only the lock holder does.
struct Launcher<'a> {
    name: &'a str,
    socket: &'a Path,
    lock: Option<FileLock>,
    child: Option<Child>,
    /// Number of started daemons that have failed.
    failures: u32,
}

impl Launcher<'_> {
    async fn connect(&mut self) -> Result<RemoteController> {
        loop {
            match UnixStream::connect(self.socket).await {
                Ok(stream) => match RemoteController::from_stream(stream, self.socket).await {
                    // The daemon was shutting down.
                    Err(_) if !self.socket.exists() => {}
                    connected => return connected,
                },
                Err(error) => match error.kind() {
                    io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {}
                    _ => return Err(unreachable(self.socket, &error)),
                },
            }
            self.step().await?;
        }
    }

    /// Takes the next step towards a running daemon: takes the lock, starts it, or waits.
    async fn step(&mut self) -> Result<()> {
        let io_error = |error| Error::io(self.socket.display(), error);
        match (&self.lock, &mut self.child) {
            (None, _) => {
                self.lock = disk::lock(&sibling_path(self.socket, "start")).map_err(io_error)?;
                if self.lock.is_none() {
                    sleep(POLL_INTERVAL).await;
                }
            }
            (Some(_), None) => self.child = Some(self.spawn_daemon()?),
            (Some(_), Some(child)) => match child.try_wait().map_err(io_error)? {
                None => sleep(POLL_INTERVAL).await,
                Some(_) if self.failures + 1 < MAX_STARTS => {
                    self.failures += 1;
                    self.child = None;
                    sleep(RETRY_DELAY).await;
                }
                Some(status) => {
                    let text =
                        format_args!("it could not be started ({status}){}", self.log_excerpt());
                    return Err(unreachable(self.socket, &text));
                }
            },
        }
        Ok(())
    }

    /// Starts a daemon, which inherits only the environment.
    fn spawn_daemon(&self) -> Result<Child> {
        let path = sibling_path(self.socket, "log");
        let log = File::create(&path).map_err(|error| Error::io(path.display(), error))?;
        let program = daemon_command();
        let mut command = Command::new(&program);
        command
            .arg("serve")
            .arg(format!("--socket={}", self.name))
            .arg(format!("--linger={LINGER_SECONDS}"))
            // The daemon must not report to a service manager that waits for this process.
            .env_remove("NOTIFY_SOCKET")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log);
        command.spawn().map_err(|error| {
            let text = format_args!(
                "`{}` cannot be started: {error}; put tssd on the PATH, or name it in TSSD_BIN",
                program.display()
            );
            unreachable(self.socket, &text)
        })
    }

    /// Returns the end of the log of the daemon that was started, as text for an error.
    fn log_excerpt(&self) -> String {
        let path = sibling_path(self.socket, "log");
        let (Some(_), Ok(Some(log))) = (&self.child, disk::read(&path)) else {
            return String::new();
        };
        let text = String::from_utf8_lossy(&log);
        let text = text.trim();
        let begin = text.ceil_char_boundary(text.len().saturating_sub(MAX_LOG_BYTES));
        match &text[begin..] {
            "" => format!("; its log `{}` is empty", path.display()),
            text => format!("; its log `{}`: {text}", path.display()),
        }
    }
}

impl Drop for Launcher<'_> {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            // Reaps the daemon if it exits before this process.
            std::thread::spawn(move || child.wait());
        }
    }
}

/// Returns the command `tssd`: that in `TSSD_BIN`, this executable, or the one on the `PATH`.
fn daemon_command() -> PathBuf {
    if let Some(program) = std::env::var_os("TSSD_BIN").filter(|program| !program.is_empty()) {
        return program.into();
    }
    let executable = std::env::current_exe().ok();
    let executable = executable.filter(|path| path.file_name().is_some_and(|name| name == "tssd"));
    executable.unwrap_or_else(|| "tssd".into())
}
