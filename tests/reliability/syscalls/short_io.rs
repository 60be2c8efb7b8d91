//! A process in which one read or write transfers half of the requested bytes.
//!
//! No tracer can do this, so the library `tests/libshort` does.

use std::path::Path;

use tssd_tests::command::preload_library;

use super::process::{Process, ProcessOutcome};
use super::scenario::Scenario;
use super::strace::Call;

/// Calls that may transfer fewer bytes than requested.
const SHORT_CALLS: [&str; 4] = ["pread64", "pwrite64", "read", "write"];

pub(crate) fn can_be_short(call: &Call) -> bool {
    SHORT_CALLS.contains(&call.name)
}

/// Runs a process in which one call is short.
pub(crate) fn run_with_short_call(scenario: Scenario, place: &Path, call: &Call) -> ProcessOutcome {
    let target = format!("{}:{}:{}", call.name, call.store_index, place.display());
    let library = preload_library("tssd-short");
    let environment = [("LD_PRELOAD", library.as_os_str()), ("TSSD_SHORT", target.as_ref())];
    let mut ended = Process::start(scenario, place, &environment).finish();
    let contains = |word| ended.stderr.contains(word);
    ended.fault_injected =
        contains("short: ").then_some(true).or(contains("whole: ").then_some(false));
    ended
}
