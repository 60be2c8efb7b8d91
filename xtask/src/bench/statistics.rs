/// Returns the median. NaN if there are no values.
pub(crate) fn median(values: &[f64]) -> f64 {
    quantile(values, 0.5)
}

/// Returns the first and the third quartile.
pub(crate) fn quartiles(values: &[f64]) -> (f64, f64) {
    (quantile(values, 0.25), quantile(values, 0.75))
}

/// Returns the speed of `own` relative to `other`: the median of the ratios of each round.
///
/// Other load of the machine during a round slows down both, so the ratio is stable.
pub(crate) fn speed(own: &[f64], other: &[f64]) -> f64 {
    let ratios: Vec<f64> = own.iter().zip(other).map(|(own, other)| other / own).collect();
    median(&ratios)
}

/// Returns the exponent of the power of x with which y grows, from the first to the last point.
pub(crate) fn exponent(first: (f64, f64), last: (f64, f64)) -> Option<f64> {
    let exponent = (last.1 / first.1).ln() / (last.0 / first.0).ln();
    exponent.is_finite().then_some(exponent)
}

/// Returns a quantile, with linear interpolation between values.
fn quantile(values: &[f64], part: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let Some(last) = sorted.len().checked_sub(1) else { return f64::NAN };
    #[expect(clippy::cast_precision_loss, reason = "there are few rounds")]
    let at = part * last as f64;
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it is an index")]
    let below = at as usize;
    let above = (below + 1).min(last);
    sorted[below] + (sorted[above] - sorted[below]) * at.fract()
}

#[cfg(test)]
mod tests {
    use super::{exponent, median, quartiles, speed};

    fn is_near(found: f64, expected: f64) -> bool {
        (found - expected).abs() < 1e-12
    }

    #[test]
    fn quantiles_of_few_values() {
        assert!(is_near(median(&[3.0]), 3.0));
        assert!(is_near(median(&[3.0, 1.0]), 2.0));
        assert!(is_near(median(&[9.0, 1.0, 2.0]), 2.0));
        assert!(median(&[]).is_nan());
        let (low, high) = quartiles(&[5.0, 1.0, 2.0, 3.0, 4.0]);
        assert!(is_near(low, 2.0) && is_near(high, 4.0));
        let (low, high) = quartiles(&[1.0, 2.0]);
        assert!(is_near(low, 1.25) && is_near(high, 1.75));
    }

    #[test]
    fn speed_is_median_of_ratios_within_rounds() {
        // In the last round, both are ten times as slow.
        assert!(is_near(speed(&[1.0, 1.0, 10.0], &[2.0, 2.0, 20.0]), 2.0));
        assert!(is_near(speed(&[1.0, 2.0], &[0.5, 1.0]), 0.5));
    }

    #[test]
    fn exponent_of_growth() {
        assert!(is_near(exponent((1.0, 3.0), (8.0, 24.0)).unwrap(), 1.0));
        assert!(is_near(exponent((2.0, 5.0), (4.0, 20.0)).unwrap(), 2.0));
        assert_eq!(exponent((1.0, 0.0), (2.0, 1.0)), None);
        assert_eq!(exponent((1.0, 1.0), (1.0, 1.0)), None);
    }
}
