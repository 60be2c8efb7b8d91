//! A run that never happened, to test with: its figures are invented.

use crate::bench::kept::Kept;
use crate::bench::machine::Machine;

pub(crate) const LINES: &str = include_str!("example.jsonl");

pub(crate) fn kept() -> Kept {
    let machine = Machine {
        cpu: "a machine".into(),
        cores: 2,
        memory: 16_000_000_000,
        kernel: "Linux 1.0".into(),
        rust: "rustc 1.0".into(),
    };
    let kept = Kept::parse(LINES, machine).unwrap();
    Kept { date: "2000-01-01".into(), commit: "0123456789ab".into(), ..kept }
}
