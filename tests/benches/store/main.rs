//! Benchmarks of the store: each case is compared with its physical limit, in one run.
//!
//! Arguments select cases by name or part of a name.
#![expect(clippy::unwrap_used, reason = "a bench fails by panicking")]

#[cfg(feature = "object")]
mod bucket;
mod copies;
mod directory;
mod fits;
mod hostile;
mod manifest;
mod plans;
mod pull;
mod reshard;
mod scale;
mod tiny;
mod views;

use tssd_store::Key;
use tssd_tests::bench::{Bench, Suite};

fn main() {
    if pull::run_if_child() {
        return;
    }
    Bench::run(
        Suite::new("store").with_crates(&["object_store"]),
        &[
            ("put", copies::put),
            ("get", copies::get),
            ("cold", copies::cold),
            ("views", views::create_and_read),
            ("tiny", tiny::put_and_get),
            ("reshard", reshard::all),
            ("pull", pull::pull_over_loopback),
            ("directory", directory::put_and_get),
            #[cfg(feature = "object")]
            ("bucket", bucket::upload_and_download),
            ("plan", plans::many_ranks),
            ("manifest", manifest::of_many_writers),
            ("hostile", hostile::requests_under_attack),
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
