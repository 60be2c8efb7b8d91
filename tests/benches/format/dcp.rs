//! torch.distributed.checkpoint, in a process of its own that saves and loads when it is told to.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/torch/dcp_peer.py");

/// The process.
pub(crate) struct Peer {
    child: Child,
    /// Until it is told that there is no more to do.
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Peer {
    /// Starts it, with tensors of these names; none without the environment that has torch.
    pub(crate) fn start(folder: &Path, names: &[String]) -> Option<Self> {
        let python = python().filter(|python| python.exists())?;
        let mut child = Command::new(python)
            .args([SCRIPT.as_ref(), folder.as_os_str()])
            .arg(names.len().to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut input = child.stdin.take().unwrap();
        input.write_all((names.join("\n") + "\n").as_bytes()).unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Some(Self { child, input: Some(input), output })
    }

    /// Lets it save and load all tensors once; how long that took by its own clock.
    pub(crate) fn save_and_load(&mut self) -> Duration {
        writeln!(self.input.as_mut().unwrap()).unwrap();
        let mut seconds = String::new();
        self.output.read_line(&mut seconds).unwrap();
        Duration::from_secs_f64(seconds.trim().parse().unwrap())
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        drop(self.input.take());
        let _ends_with_its_input = self.child.wait();
    }
}

/// The Python of the environment that `cargo xtask test --all` makes: this program is
/// TARGET/PROFILE/deps/NAME.
fn python() -> Option<PathBuf> {
    let program = std::env::current_exe().ok()?;
    let name = if cfg!(windows) { "Scripts/python.exe" } else { "bin/python" };
    Some(program.ancestors().nth(3)?.join("venv").join(name))
}
