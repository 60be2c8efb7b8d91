//! The speed table of the format (`docs/performance.md`): each row against what bounds it, memcpy, reading
//! or safetensors, in one run, with its target. A name or a part of one runs that row alone.
#![expect(clippy::unwrap_used, reason = "a bench fails by panicking")]

mod compress;
mod dcp;
mod encode;
mod lookup;
mod model;
mod open;
mod small;
mod verify;

use tssd_tests::race::rows;

fn main() {
    rows(&[
        ("open", open::as_safetensors),
        ("million", open::a_million),
        ("encode", encode::into_warm_memory),
        ("verify", verify::a_file),
        ("small", small::save_and_load),
        ("lookup", lookup::one_of_many),
        ("compress", compress::bfloat16),
    ]);
}
