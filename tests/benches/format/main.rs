//! Benchmarks of the format, compared with memcpy, with plain reads, or with safetensors, in one run.
//!
//! Arguments select cases by name or part of a name.
#![expect(clippy::unwrap_used, reason = "a bench fails by panicking")]

mod compress;
mod delta;
mod encode;
mod file;
mod lookup;
mod open;
mod part;
mod safetensors_peer;
mod small;
mod verify;

use tssd_tests::bench::{Bench, Suite};

fn main() {
    Bench::run(
        Suite::new("format").with_crates(&["safetensors", "object_store"]),
        &[
            ("open", open::open_archives),
            ("encode", encode::encode_into_memory),
            ("verify", verify::verify_file),
            ("save", file::save),
            ("load", file::load),
            ("one", part::copy_one_tensor),
            ("slice", part::copy_rows),
            ("small", small::save_and_load),
            ("lookup", lookup::look_up_tensors),
            ("compress", compress::compress_bfloat16),
            ("delta", delta::make_and_apply),
            ("fit", file::fits),
        ],
    );
}
