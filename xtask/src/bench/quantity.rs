//! Formatting of numbers: three significant digits and a unit.

use serde_json::Number;

/// Formats a time in seconds: `25.3 ms`.
pub(crate) fn time(seconds: f64) -> String {
    scaled(seconds, &[(1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns")])
}

/// Formats a number of bytes: `1.19 GB`. A GB is 10^9 bytes.
pub(crate) fn bytes(bytes: f64) -> String {
    scaled(bytes, &[(1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B")])
}

/// Formats a rate: `16.4 GB/s`.
pub(crate) fn rate(bytes_per_second: f64) -> String {
    format!("{} GB/s", digits(bytes_per_second / 1e9))
}

/// Formats a ratio: `1.74×`.
pub(crate) fn ratio(ratio: f64) -> String {
    format!("{}×", digits(ratio))
}

/// Formats an integer: `20,000`.
pub(crate) fn integer(number: u64) -> String {
    let digits = number.to_string();
    let mut grouped = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped
}

/// Formats a count. Integers have all of their digits, other numbers three.
pub(crate) fn count(number: &Number) -> String {
    match (number.as_u64(), number.as_f64()) {
        (Some(number), _) => integer(number),
        (None, Some(number)) => digits(number),
        (None, None) => number.to_string(),
    }
}

/// Formats a float with the fewest digits that represent it, for targets and axes.
pub(crate) fn shortest_float(number: f64) -> String {
    if number.fract() == 0.0 && (0.0..1e15).contains(&number) {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "it is whole"
        )]
        return integer(number as u64);
    }
    number.to_string()
}

/// Formats a value in the largest unit in which it is at least 1.
fn scaled(value: f64, units: &[(f64, &str)]) -> String {
    // A value that rounds up to 1000 of a unit is formatted as 1.00 of the next one.
    let fits = |(size, _): &&(f64, &str)| value.abs() >= size * 0.9995;
    let (size, unit) = units.iter().find(fits).or(units.last()).copied().unwrap_or((1.0, ""));
    format!("{} {unit}", digits(value / size))
}

/// Formats a value with three significant digits.
fn digits(value: f64) -> String {
    let decimals = match value.abs() {
        value if value >= 99.95 => 0,
        value if value >= 9.995 => 1,
        value if value >= 0.9995 => 2,
        value if value >= 0.0001 => 3,
        _ => 0,
    };
    let rounded = format!("{value:.decimals$}");
    match rounded.parse() {
        Ok(number) if decimals == 0 => shortest_float(number),
        _ => rounded,
    }
}

#[cfg(test)]
mod tests {
    use super::{bytes, count, rate, ratio, shortest_float, time};

    #[test]
    fn figures_have_three_digits_and_a_unit() {
        assert_eq!(time(0.025_34), "25.3 ms");
        assert_eq!(time(0.000_35), "350 µs");
        assert_eq!(time(4.1), "4.10 s");
        assert_eq!(time(0.000_999_9), "1.00 ms");
        assert_eq!(time(3e-8), "30.0 ns");
        assert_eq!(time(0.0), "0 ns");
        assert_eq!(time(2_000.0), "2,000 s");
        assert_eq!(bytes(1.192e9), "1.19 GB");
        assert_eq!(bytes(536e6), "536 MB");
        assert_eq!(bytes(12.0), "12.0 B");
        assert_eq!(rate(16.44e9), "16.4 GB/s");
        assert_eq!(ratio(0.8476), "0.848×");
        assert_eq!(ratio(770.2), "770×");
        assert_eq!(count(&131_072.into()), "131,072");
        assert_eq!(shortest_float(0.85), "0.85");
        assert_eq!(shortest_float(20_000.0), "20,000");
    }
}
