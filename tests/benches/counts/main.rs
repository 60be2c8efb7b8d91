//! Costs that do not depend on the clock: instructions, allocations, page faults, requests, bytes.
#![expect(clippy::unwrap_used, reason = "a bench fails by panicking")]

#[cfg(feature = "object")]
mod bucket;
mod instructions;
mod metrics;
mod operations;
mod reshard;
mod sharded;

use std::alloc::System;

use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};
use tssd_tests::bench::{Bench, Suite, peer};
use tssd_tests::test_daemon::TestDaemon;

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

fn main() {
    if instructions::run_if_child() {
        return;
    }
    if peer::role().is_some() {
        return peer::serve_for_parent(TestDaemon::new(16 << 30));
    }
    Bench::run(
        Suite::new("counts"),
        &[
            ("operations", operations::steady_state),
            ("reshard", reshard::all_layouts),
            #[cfg(feature = "object")]
            ("bucket", bucket::five_percent),
            ("plan", reshard::plan_memory),
            ("instructions", instructions::all),
        ],
    );
}
