use std::fs::{File, OpenOptions};
use std::io::Write;

use serde_json::Value;

/// Environment variable: the file to which records are appended, one JSON object per line.
const RECORDS: &str = "TSSD_BENCH_RECORDS";

/// Destination of records: a file, or none.
pub(crate) struct Records(Option<File>);

impl Records {
    pub(crate) fn from_env() -> Self {
        let path = std::env::var_os(RECORDS);
        Self(path.map(|path| OpenOptions::new().create(true).append(true).open(path).unwrap()))
    }

    pub(crate) fn write(&mut self, record: &Value) {
        if let Some(file) = &mut self.0 {
            writeln!(file, "{record}").unwrap();
        }
    }
}

/// Rounds a number to six significant digits. More are noise.
pub(crate) fn number(value: f64) -> Value {
    if value.fract() == 0.0 && value.abs() < 1e15 {
        #[expect(clippy::cast_possible_truncation, reason = "it has no fraction, and 15 digits")]
        return Value::from(value as i64);
    }
    Value::from(format!("{value:.5e}").parse::<f64>().unwrap())
}
