//! Connects to a named daemon of the user, and starts it if it does not run.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::fs::Access;
use tokio::net::UnixStream;
use tokio::time::{sleep, timeout};

use super::{RemoteController, connect_error, unreachable};
use crate::error::{Error, ErrorKind, Result};
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

/// Name of the command that serves a store.
const COMMAND: &str = "tssd";

/// Environment variable that names the command.
const COMMAND_VARIABLE: &str = "TSSD_BIN";

/// Connects to the user's daemon with this name. Starts it if it does not run.
///
/// `command_search` is [`ConnectOptions::command_search`](crate::ConnectOptions::command_search).
pub(crate) async fn connect_or_start(
    name: &str,
    command_search: &[PathBuf],
) -> Result<RemoteController> {
    let (socket, lock, child) = (socket_path(name)?, None, None);
    let mut launcher = Launcher { name, socket: &socket, command_search, lock, child, failures: 0 };
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
    command_search: &'a [PathBuf],
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
                    _ => return Err(connect_error(self.socket, error)),
                },
            }
            self.step().await?;
        }
    }

    /// Takes the next step towards a running daemon: takes the lock, starts it, or waits.
    async fn step(&mut self) -> Result<()> {
        let io_error = |error| Error::io_at(self.socket, error);
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
        let log = File::create(&path).map_err(|error| Error::io_at(path, error))?;
        let program = find_command(self.command_search);
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
        command.spawn().map_err(|error| self.spawn_error(&program, &error))
    }

    /// Returns the error for a command that could not be executed: where it was looked for, or why it failed.
    fn spawn_error(&self, program: &Path, error: &io::Error) -> Error {
        let (name, command) = (self.name, program.display());
        let cause = match error.kind() {
            io::ErrorKind::NotFound if program == Path::new(COMMAND) => {
                let places: Vec<String> =
                    self.command_search.iter().map(|place| describe_place(place)).collect();
                let places = places.join(", ");
                format!("not found {places}{}on PATH", if places.is_empty() { "" } else { " nor " })
            }
            io::ErrorKind::NotFound if !program.exists() => {
                format!("of {COMMAND_VARIABLE} not found")
            }
            _ => format!("failed: {error}"),
        };
        let text =
            format_args!("cannot start the daemon \"{name}\": command \"{command}\" {cause}");
        let help = format_args!(
            "set {COMMAND_VARIABLE} to the command, or start \"{COMMAND} serve --socket {name}\""
        );
        Error::new(ErrorKind::Unreachable, text).with_help(help)
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

/// Returns the command: that in `TSSD_BIN`, the first at one of the places, or its name, which the `PATH` resolves.
fn find_command(places: &[PathBuf]) -> PathBuf {
    let variable = std::env::var_os(COMMAND_VARIABLE).filter(|program| !program.is_empty());
    if let Some(program) = variable {
        return program.into();
    }
    let mut candidates = places.iter().map(|place| {
        if place.is_file() { place.with_file_name(COMMAND) } else { place.join(COMMAND) }
    });
    candidates.find(|path| is_executable(path)).unwrap_or_else(|| COMMAND.into())
}

fn is_executable(path: &Path) -> bool {
    path.is_file() && rustix::fs::access(path, Access::EXEC_OK).is_ok()
}

fn describe_place(place: &Path) -> String {
    let relation = if place.is_file() { "next to" } else { "in" };
    format!("{relation} {}", place.display())
}
