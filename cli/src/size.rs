//! Sizes, counts and lists of names as text.

use std::fmt;
use std::str::FromStr;

/// A number of bytes: parsed from `500MB`, `1.5GiB` or `4096`, displayed as `1.21 GB`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Size(pub(crate) u64);

const UNITS: [(&str, u64); 8] = [
    ("KB", 1_000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("TB", 1_000_000_000_000),
    ("KIB", 1 << 10),
    ("MIB", 1 << 20),
    ("GIB", 1 << 30),
    ("TIB", 1 << 40),
];

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let malformed = || format!("`{text}` is no size: write 4096, 500MB or 1.5GiB");
        let text = text.trim();
        let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let (number, unit) = text.split_at(end);
        let unit = unit.trim().to_ascii_uppercase();
        let scale = match unit.as_str() {
            "" | "B" => 1,
            unit => UNITS
                .iter()
                .find(|(name, _)| *name == unit || name.strip_suffix('B') == Some(unit))
                .map(|(_, scale)| *scale)
                .ok_or_else(malformed)?,
        };
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        if whole.is_empty() && fraction.is_empty() || fraction.len() > 9 {
            return Err(malformed());
        }
        // Integers, not floats, so that 0.1GB is exactly 100,000,000 bytes.
        let digits: u128 = format!("{whole}{fraction}").parse().map_err(|_| malformed())?;
        let divisor = 10_u128.pow(u32::try_from(fraction.len()).map_err(|_| malformed())?);
        let bytes = digits.checked_mul(u128::from(scale)).ok_or_else(malformed)? / divisor;
        u64::try_from(bytes).map(Self).map_err(|_| malformed())
    }
}

/// Displays three significant digits. The JSON output has the exact number.
impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let decimal = UNITS[..4].iter().rev().find(|(_, scale)| self.0 >= *scale);
        let Some((unit, scale)) = decimal else {
            return f.pad(&format!("{} B", self.0));
        };
        let unit = if *unit == "KB" { "kB" } else { unit };
        let hundredths = u128::from(self.0) * 100 / u128::from(*scale);
        let (whole, rest) = (hundredths / 100, hundredths % 100);
        let text = match whole {
            0..10 => format!("{whole}.{rest:02} {unit}"),
            10..100 => format!("{whole}.{} {unit}", rest / 10),
            _ => format!("{whole} {unit}"),
        };
        f.pad(&text)
    }
}

/// Returns the throughput in GB/s (1e9 bytes per second).
#[expect(clippy::cast_precision_loss, reason = "three digits of it are shown")]
pub(crate) fn gigabytes_per_second(bytes: u64, seconds: f64) -> f64 {
    bytes as f64 / seconds.max(1e-9) / 1e9
}

/// Returns the throughput as text, in GB/s, or in MB/s below 0.1 GB/s.
pub(crate) fn format_throughput(bytes: u64, seconds: f64) -> String {
    match gigabytes_per_second(bytes, seconds) {
        speed if speed < 0.1 => format!("{:.1} MB/s", speed * 1000.0),
        speed if speed < 10.0 => format!("{speed:.2} GB/s"),
        speed => format!("{speed:.1} GB/s"),
    }
}

/// Returns a number with its noun: `1 tensor`, `2 tensors`.
pub(crate) fn pluralize(number: impl TryInto<u64>, noun: &str) -> String {
    let number = number.try_into().unwrap_or(u64::MAX);
    let plural = match noun.strip_suffix("leaf") {
        Some(kind) => format!("{kind}leaves"),
        None => format!("{noun}s"),
    };
    if number == 1 { format!("1 {noun}") } else { format!("{number} {plural}") }
}

/// Joins the first four names with commas, and adds the number of the others.
pub(crate) fn join_names(names: &[impl AsRef<str>]) -> String {
    const SHOWN_MAX: usize = 4;
    let shown: Vec<&str> = names.iter().take(SHOWN_MAX).map(AsRef::as_ref).collect();
    let shown = shown.join(", ");
    match names.len().checked_sub(SHOWN_MAX).filter(|more| *more > 0) {
        Some(more) => format!("{shown} and {more} more"),
        None => shown,
    }
}

#[cfg(test)]
mod tests {
    use super::Size;

    #[test]
    fn size_parses_exactly() {
        for (text, bytes) in [
            ("4096", 4096),
            ("0", 0),
            ("500MB", 500_000_000),
            ("500 mb", 500_000_000),
            ("1GiB", 1 << 30),
            ("1.5GiB", 3 << 29),
            ("0.1GB", 100_000_000),
            ("2k", 2000),
            (".5K", 500),
            ("7B", 7),
        ] {
            assert_eq!(text.parse(), Ok(Size(bytes)), "{text}");
        }
        for text in ["", "MB", ".", "1.2.3", "-1", "1XB", "99999999999TB", "1e3"] {
            assert!(text.parse::<Size>().is_err(), "{text}");
        }
    }

    #[test]
    fn size_displays_three_digits() {
        for (bytes, text) in [
            (0, "0 B"),
            (999, "999 B"),
            (1000, "1.00 kB"),
            (12_345, "12.3 kB"),
            (999_999, "999 kB"),
            (1_213_000_000, "1.21 GB"),
            (u64::MAX, "18446744 TB"),
        ] {
            assert_eq!(Size(bytes).to_string(), text);
        }
    }
}
