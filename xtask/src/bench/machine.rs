use std::fs;
use std::path::Path;
use std::process::Command;

use serde::{Deserialize, Serialize};

/// The machine that a run was measured on.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Machine {
    pub(crate) cpu: String,
    pub(crate) cores: usize,
    pub(crate) memory: u64,
    pub(crate) kernel: String,
    pub(crate) rust: String,
}

impl Machine {
    /// Returns the properties of this machine. Some are unknown on systems other than Linux.
    pub(crate) fn detect() -> Self {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        Self {
            cpu: value(&read("/proc/cpuinfo"), "model name").unwrap_or("unknown").into(),
            cores: std::thread::available_parallelism().map_or(0, usize::from),
            memory: memory(&read("/proc/meminfo")).unwrap_or(0),
            kernel: version(&stdout(Command::new("uname").arg("-sr"))).into(),
            rust: stdout(Command::new("rustc").arg("--version")),
        }
    }
}

/// Returns the current date in UTC.
pub(crate) fn today() -> String {
    stdout(Command::new("date").args(["-u", "+%F"]))
}

/// Returns the commit of a working tree, followed by ", changed" if files outside `docs` have changes.
pub(crate) fn commit(root: &Path) -> String {
    let git = |words: &[&str]| {
        let mut command = Command::new("git");
        command.arg("-C").arg(root).args(words);
        command
    };
    let unchanged = git(&["diff", "--quiet", "HEAD", "--", ".", ":!docs"]).status();
    let is_changed = unchanged.is_ok_and(|status| status.code() == Some(1));
    stdout(&mut git(&["rev-parse", "--short=12", "HEAD"]))
        + if is_changed { ", changed" } else { "" }
}

/// Returns the trimmed stdout of a command, or "unknown" if it is empty.
fn stdout(command: &mut Command) -> String {
    let output = command.output().map(|output| output.stdout).unwrap_or_default();
    let text = String::from_utf8_lossy(&output);
    if text.trim().is_empty() { "unknown".into() } else { text.trim().into() }
}

/// Returns the version of a kernel without its build name.
fn version(kernel: &str) -> &str {
    kernel.split('-').next().unwrap_or(kernel)
}

/// Returns the value of the first line of the form `name: value`.
fn value<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let mut pairs = text.lines().filter_map(|line| line.split_once(':'));
    pairs.find(|(found, _)| found.trim() == name).map(|(_, value)| value.trim())
}

/// Returns the total memory in bytes. `/proc/meminfo` has it in KiB.
fn memory(text: &str) -> Option<u64> {
    let kibibytes: u64 = value(text, "MemTotal")?.strip_suffix("kB")?.trim().parse().ok()?;
    Some(kibibytes * 1024)
}

#[cfg(test)]
mod tests {
    use super::{memory, value, version};

    #[test]
    fn linux_properties_are_parsed() {
        let text = "processor\t: 0\nmodel name\t: AMD EPYC\nmodel name\t: AMD\n";
        assert_eq!(value(text, "model name"), Some("AMD EPYC"));
        assert_eq!(value(text, "model"), None);
        assert_eq!(version("Linux 6.18.44-cloud-amd64"), "Linux 6.18.44");
        assert_eq!(memory("MemFree: 1 kB\nMemTotal:       16 kB\n"), Some(16_384));
    }
}
