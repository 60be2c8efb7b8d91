//! What the format takes: each case against what bounds it, memcpy, reading or safetensors, in one run.
//! A name or a part of one runs that case alone.
#![expect(clippy::unwrap_used, reason = "a bench fails by panicking")]

mod compress;
mod encode;
mod file;
mod lookup;
mod open;
mod part;
mod small;
mod theirs;
mod verify;

use tssd_tests::bench::{Bench, Suite};

fn main() {
    Bench::run(
        Suite::new("format").with_crates(&["safetensors", "object_store"]),
        &[
            ("open", open::all_names),
            ("encode", encode::into_memory),
            ("verify", verify::a_file),
            ("save", file::save),
            ("load", file::load),
            ("one", part::one_tensor),
            ("slice", part::five_percent),
            ("small", small::save_and_load),
            ("lookup", lookup::one_of_many),
            ("compress", compress::bfloat16),
            ("fit", file::fits),
        ],
    );
}
