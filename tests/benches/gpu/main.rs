//! Benchmarks of the store for GPU tensors, between two processes on one GPU.
//!
//! Each case is compared with plain copies of the driver and with other transfer schemes, in one run. Arguments select
//! cases by name or part of a name.
#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "a bench fails by panicking")]

mod handles;
mod host;
mod packed;
mod reader;
mod ring_memory;
mod transfer;
mod weights;

use std::time::Duration;

use tssd_gpu::Device;
use tssd_store::Key;
use tssd_tests::bench::{Bench, Suite, exit_with_error};

/// Timeout of all operations.
const TIMEOUT: Duration = Duration::from_mins(2);

/// Number of the device that is measured.
const ORDINAL: usize = 0;

fn main() {
    if reader::run_if_child() {
        return;
    }
    let device = Device::all()
        .unwrap_or_else(|error| exit_with_error(&error.to_string()))
        .swap_remove(ORDINAL);
    let suite = Suite::new("gpu").with_model("shape:qwen3-8b", 8_000_000_000);
    Bench::run(
        suite.with_version(device.name(), device.uuid()),
        &[
            ("across", transfer::model_tensors),
            ("many", transfer::many_tensors),
            ("host", host::put_and_get),
            ("memory", ring_memory::record_memory),
        ],
    );
}

fn key(name: &str) -> Key {
    Key::new(name).unwrap()
}
