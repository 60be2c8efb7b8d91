//! The speed table of the store (`docs/performance.md`): each row against what bounds it, in one run, with
//! its target. A name or a part of one runs that row alone.
#![expect(clippy::unwrap_used, reason = "a bench fails by panicking")]

mod copies;
mod house;
mod plans;
mod sharded;
mod tiny;
mod views;

fn main() {
    let rows: [(&str, fn()); 6] = [
        ("put", copies::put),
        ("get", copies::get),
        ("views", views::of_one_version),
        ("tiny", tiny::put_and_get),
        ("plan", plans::many_ranks),
        ("sharded", sharded::four_to_two),
    ];
    // Cargo passes options as well.
    let wanted: Vec<String> =
        std::env::args().skip(1).filter(|argument| !argument.starts_with('-')).collect();
    for (name, run) in rows {
        if wanted.is_empty() || wanted.iter().any(|wanted| name.contains(wanted.as_str())) {
            run();
        }
    }
}
