//! Child processes of a bench: this program in another role.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdout, Command, Stdio};

use crate::test_daemon::TestDaemon;

/// Environment variable: the role of a child process.
const ROLE: &str = "TSSD_BENCH_ROLE";

/// Returns the role of this process, if it is a child process.
pub fn role() -> Option<String> {
    std::env::var(ROLE).ok()
}

/// Sends words without spaces to the parent.
#[expect(clippy::print_stdout, reason = "the parent reads it")]
pub fn send_to_parent(words: &[&str]) {
    println!("{}", words.join(" "));
}

/// Receives a line from the parent. `None` if the parent has ended or closed the pipe.
pub fn receive_from_parent() -> Option<String> {
    let mut line = String::new();
    let read = std::io::stdin().read_line(&mut line).unwrap();
    (read > 0).then_some(line)
}

/// Waits until the parent has ended or closed the pipe.
pub fn wait_for_parent() {
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
}

/// Serves a daemon. Sends its URL, its TCP address and the address of its metrics to the parent.
#[expect(clippy::needless_pass_by_value, reason = "it ends when the parent does")]
pub fn serve_for_parent(served: TestDaemon) {
    send_to_parent(&[&served.url(), served.address(), &served.metrics_address().to_string()]);
    wait_for_parent();
}

/// A child process. It ends on drop.
pub struct Peer {
    child: Child,
    output: BufReader<ChildStdout>,
    /// Words that the child process has sent first.
    pub startup_words: Vec<String>,
}

impl Peer {
    /// Starts this program in another role, and waits for its first line.
    ///
    /// # Panics
    ///
    /// If it cannot be started.
    pub fn start(role: &str) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.env(ROLE, role).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let mut peer = Self { child, output, startup_words: Vec::new() };
        peer.startup_words = peer.receive();
        peer
    }

    /// Sends a line to the child process.
    ///
    /// # Panics
    ///
    /// If the process has ended.
    pub fn send(&mut self, line: &str) {
        writeln!(self.child.stdin.as_mut().unwrap(), "{line}").unwrap();
    }

    /// Receives words from the child process.
    ///
    /// # Panics
    ///
    /// If it sends no more.
    pub fn receive(&mut self) -> Vec<String> {
        let mut line = String::new();
        let read = self.output.read_line(&mut line).unwrap();
        assert!(read > 0, "the other process has ended");
        line.split_whitespace().map(str::to_owned).collect()
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        self.child.wait().unwrap();
    }
}
