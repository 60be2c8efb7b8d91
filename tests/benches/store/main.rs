//! The speed table of the store (`docs/performance.md`): each row against what bounds it, in one run, with
//! its target. A name or a part of one runs that row alone.
#![expect(clippy::unwrap_used, reason = "a bench fails by panicking")]

mod copies;
mod hostile;
mod house;
mod plans;
mod pull;
mod sharded;
mod tiny;
mod views;

use tssd_tests::race::rows;

fn main() {
    if pull::is_child() {
        return;
    }
    rows(&[
        ("put", copies::put),
        ("get", copies::get),
        ("views", views::of_one_version),
        ("tiny", tiny::put_and_get),
        ("plan", plans::many_ranks),
        ("pull", pull::over_loopback),
        ("hostile", hostile::attacked),
        ("sharded", sharded::four_to_two),
    ]);
}
