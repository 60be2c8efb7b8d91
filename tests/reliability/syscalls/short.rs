//! A process of whose reads and writes one does half of what it was asked for, which no tracer can do: `tests/libshort`
//! does.

use std::path::Path;

use tssd_tests::command::library;

use super::process::{Ended, Process};
use super::scenario::Scenario;
use super::strace::Call;

/// The calls that a file may answer with fewer bytes than it was asked for.
const CALLS: [&str; 4] = ["pread64", "pwrite64", "read", "write"];

pub(crate) fn may_be(call: &Call) -> bool {
    CALLS.contains(&call.name)
}

/// Runs a process one of whose calls is short.
pub(crate) fn run(scenario: Scenario, place: &Path, call: &Call) -> Ended {
    let meant = format!("{}:{}:{}", call.name, call.number, place.display());
    let library = library("tssd-short");
    let environment = [("LD_PRELOAD", library.as_os_str()), ("TSSD_SHORT", meant.as_ref())];
    let mut ended = Process::start(scenario, place, &environment).finish();
    let says = |word| ended.complaints.contains(word);
    ended.is_hit = says("short: ").then_some(true).or(says("whole: ").then_some(false));
    ended
}
