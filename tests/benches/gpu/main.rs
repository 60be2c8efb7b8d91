//! What the store takes for tensors of a GPU, between two processes of it: each case against plain copies of the driver
//! and against the schemes that others use, in one run. A name or a part of one runs that case alone.
#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "a bench fails by panicking")]

mod across;
mod handles;
mod host;
mod packed;
mod reader;
mod room;
mod weights;

use std::time::Duration;

use tssd_gpu::Device;
use tssd_store::Key;
use tssd_tests::bench::{Bench, Suite, exit_with_error};

/// Nothing takes longer.
const SOON: Duration = Duration::from_mins(2);

/// The device that is measured: the first one.
const ORDINAL: usize = 0;

fn main() {
    if reader::is_child() {
        return;
    }
    let device = Device::all()
        .unwrap_or_else(|error| exit_with_error(&error.to_string()))
        .swap_remove(ORDINAL);
    let suite = Suite::new("gpu").with_model("shape:qwen3-8b", 8_000_000_000);
    Bench::run(
        suite.with_version(device.name(), device.uuid()),
        &[
            ("across", across::few),
            ("many", across::many),
            ("host", host::there_and_back),
            ("room", room::of_a_ring),
        ],
    );
}

fn key(name: &str) -> Key {
    Key::new(name).unwrap()
}
