//! Other processes of a bench: this program again, in another role.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdout, Command, Stdio};

use crate::served::Served;

/// Names the role of a child.
const ROLE: &str = "TSSD_BENCH_ROLE";

/// The role of this process, if it is a child.
pub fn role() -> Option<String> {
    std::env::var(ROLE).ok()
}

/// Tells the parent something: words without spaces.
#[expect(clippy::print_stdout, reason = "the parent reads it")]
pub fn say(words: &[&str]) {
    println!("{}", words.join(" "));
}

/// The next thing that the parent tells, a line; none if it is gone, or wants no more.
pub fn told() -> Option<String> {
    let mut line = String::new();
    let read = std::io::stdin().read_line(&mut line).unwrap();
    (read > 0).then_some(line)
}

/// Until the parent is gone, or wants no more.
pub fn until_the_end() {
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
}

/// Serves, and says where: over its socket, over TCP, and where its metrics are.
#[expect(clippy::needless_pass_by_value, reason = "it ends when the parent does")]
pub fn serve(served: Served) {
    say(&[&served.url(), served.address(), &served.metrics().to_string()]);
    until_the_end();
}

/// A child of this process. It ends with this.
pub struct Peer {
    child: Child,
    output: BufReader<ChildStdout>,
    /// The words that it has said when it began.
    pub said: Vec<String>,
}

impl Peer {
    /// Starts this program in another role, and waits until it has said something.
    ///
    /// # Panics
    ///
    /// If it cannot be started.
    pub fn start(role: &str) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.env(ROLE, role).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let mut peer = Self { child, output, said: Vec::new() };
        peer.said = peer.hear();
        peer
    }

    /// Tells it something: a line.
    ///
    /// # Panics
    ///
    /// If it is gone.
    pub fn tell(&mut self, line: &str) {
        writeln!(self.child.stdin.as_mut().unwrap(), "{line}").unwrap();
    }

    /// The words that it says next.
    ///
    /// # Panics
    ///
    /// If it says no more.
    pub fn hear(&mut self) -> Vec<String> {
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
