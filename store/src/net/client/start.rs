//! The user's daemon of a name: joined, or started by the first who comes.

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
use crate::net::socket::{beside, socket_of};

/// For how long a daemon is waited for.
const PATIENCE: Duration = Duration::from_secs(10);

/// How often it is looked for.
const WAIT: Duration = Duration::from_millis(2);

/// A daemon that fails is started so often: one that was ending may have been in the way.
const TRIES: u32 = 3;

/// How long after a try the next one comes.
const PAUSE: Duration = Duration::from_millis(100);

/// For how many seconds it stays when nobody is connected any more.
const LINGER: u32 = 60;

/// So many characters of what a daemon has written are told.
const MAX_REASON: usize = 2000;

/// A connection to the user's daemon of a name, which is started if there is none.
pub(crate) async fn join(name: &str) -> Result<RemoteController> {
    let socket = socket_of(name)?;
    let mut starter = Starter { name, socket: &socket, lock: None, child: None, failed: 0 };
    let joined = timeout(PATIENCE, starter.join()).await;
    joined.unwrap_or_else(|_| {
        let text = format_args!("it has not answered for {PATIENCE:?}{}", starter.reason());
        Err(unreachable(&socket, &text))
    })
}

/// One who wants a daemon. Several may want the same at once: who has the lock starts it.
struct Starter<'a> {
    name: &'a str,
    socket: &'a Path,
    lock: Option<FileLock>,
    child: Option<Child>,
    /// How many that were started have failed.
    failed: u32,
}

impl Starter<'_> {
    async fn join(&mut self) -> Result<RemoteController> {
        loop {
            match UnixStream::connect(self.socket).await {
                Ok(stream) => match RemoteController::greet(stream, self.socket).await {
                    // It was about to end.
                    Err(_) if !self.socket.exists() => {}
                    greeted => return greeted,
                },
                Err(error) => match error.kind() {
                    io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {}
                    _ => return Err(unreachable(self.socket, &error)),
                },
            }
            self.advance().await?;
        }
    }

    /// Nobody listens: does the next thing about it. Then somebody may.
    async fn advance(&mut self) -> Result<()> {
        let at = |error| Error::io(self.socket.display(), error);
        match (&self.lock, &mut self.child) {
            (None, _) => {
                self.lock = disk::lock(&beside(self.socket, "start")).map_err(at)?;
                if self.lock.is_none() {
                    sleep(WAIT).await;
                }
            }
            (Some(_), None) => self.child = Some(self.start()?),
            (Some(_), Some(child)) => match child.try_wait().map_err(at)? {
                None => sleep(WAIT).await,
                Some(_) if self.failed + 1 < TRIES => {
                    self.failed += 1;
                    self.child = None;
                    sleep(PAUSE).await;
                }
                Some(status) => {
                    let text = format_args!("it could not be started ({status}){}", self.reason());
                    return Err(unreachable(self.socket, &text));
                }
            },
        }
        Ok(())
    }

    /// Starts a process that has nothing of ours but the environment.
    fn start(&self) -> Result<Child> {
        let path = beside(self.socket, "log");
        let log = File::create(&path).map_err(|error| Error::io(path.display(), error))?;
        let program = program();
        let mut command = Command::new(&program);
        command
            .arg("serve")
            .arg(format!("--socket={}", self.name))
            .arg(format!("--linger={LINGER}"))
            // A service manager that waits for us does not wait for the daemon.
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

    /// What the daemon has written before it failed, if anything.
    fn reason(&self) -> String {
        let path = beside(self.socket, "log");
        let (Some(_), Ok(Some(log))) = (&self.child, disk::read(&path)) else {
            return String::new();
        };
        let text = String::from_utf8_lossy(&log);
        let text = text.trim();
        let begin = text.ceil_char_boundary(text.len().saturating_sub(MAX_REASON));
        match &text[begin..] {
            "" => format!("; its log `{}` is empty", path.display()),
            text => format!("; its log `{}`: {text}", path.display()),
        }
    }
}

impl Drop for Starter<'_> {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            // It outlives us, or we hear of its end: no process is left that nobody waits for.
            std::thread::spawn(move || child.wait());
        }
    }
}

/// The command `tssd`: the one that is named, this very program, or the one on the PATH.
fn program() -> PathBuf {
    if let Some(program) = std::env::var_os("TSSD_BIN").filter(|program| !program.is_empty()) {
        return program.into();
    }
    let own = std::env::current_exe().ok();
    let own = own.filter(|own| own.file_name().is_some_and(|name| name == "tssd"));
    own.unwrap_or_else(|| "tssd".into())
}
