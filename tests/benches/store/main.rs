//! What the store takes: each case against what bounds it, in one run. A name or a part of one runs that
//! case alone.
#![expect(clippy::unwrap_used, reason = "a bench fails by panicking")]

#[cfg(feature = "object")]
mod bucket;
mod copies;
mod directory;
mod fits;
mod hostile;
mod plans;
mod pull;
mod reshard;
mod scale;
mod tiny;
mod views;

use tssd_store::Key;
use tssd_tests::bench::{Bench, Suite};

fn main() {
    if pull::is_child() {
        return;
    }
    Bench::run(
        Suite::new("store").with_crates(&["object_store"]),
        &[
            ("put", copies::put),
            ("get", copies::get),
            ("cold", copies::cold),
            ("views", views::of_one_version),
            ("tiny", tiny::put_and_get),
            ("reshard", reshard::all),
            ("pull", pull::over_loopback),
            ("directory", directory::put_and_get),
            #[cfg(feature = "object")]
            ("bucket", bucket::up_and_down),
            ("plan", plans::many_ranks),
            ("hostile", hostile::attacked),
            ("fit", fits::all),
            #[cfg(feature = "object")]
            ("fit to a bucket", bucket::fits),
            ("scale", scale::all),
        ],
    );
}

/// The key of all cases.
fn key() -> Key {
    Key::new("model").unwrap()
}
