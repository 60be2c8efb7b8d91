//! A saved run with invented figures, for tests.

use crate::bench::machine::Machine;
use crate::bench::saved_run::SavedRun;

pub(crate) const LINES: &str = include_str!("example.jsonl");

pub(crate) fn example_run() -> SavedRun {
    let machine = Machine {
        cpu: "a machine".into(),
        cores: 2,
        memory: 16_000_000_000,
        kernel: "Linux 1.0".into(),
        rust: "rustc 1.0".into(),
    };
    let kept = SavedRun::parse(LINES, machine).unwrap();
    SavedRun { date: "2000-01-01".into(), commit: "0123456789ab".into(), ..kept }
}
