/// Ratio of the largest to the smallest value from which on an axis is logarithmic.
const MIN_LOG_RATIO: f64 = 7.0;

/// An axis of a plot.
pub(crate) struct Axis {
    low: f64,
    high: f64,
    is_log: bool,
    /// The pixels of `low` (`from`) and of `high` (`to`).
    from: i32,
    to: i32,
}

impl Axis {
    /// Creates an axis for these values, between two pixels.
    ///
    /// Linear axes begin at zero, so that heights are proportional.
    pub(crate) fn for_values(
        values: impl Iterator<Item = f64> + Clone,
        from: i32,
        to: i32,
    ) -> Self {
        let smallest = values.clone().fold(f64::INFINITY, f64::min);
        let largest = values.fold(f64::NEG_INFINITY, f64::max);
        if smallest > 0.0 && largest / smallest >= MIN_LOG_RATIO {
            Self::log(smallest / 1.15, largest * 1.15, from, to)
        } else {
            let high = if largest > 0.0 { largest * 1.08 } else { 1.0 };
            Self { low: 0.0, high, is_log: false, from, to }
        }
    }

    pub(crate) fn log(low: f64, high: f64, from: i32, to: i32) -> Self {
        Self { low, high, is_log: true, from, to }
    }

    /// Returns the pixel of a value.
    pub(crate) fn pixel(&self, value: f64) -> i32 {
        let fraction = if self.is_log {
            (value.max(f64::MIN_POSITIVE) / self.low).ln() / (self.high / self.low).ln()
        } else {
            (value - self.low) / (self.high - self.low)
        };
        let length = f64::from(self.to - self.from);
        #[expect(clippy::cast_possible_truncation, reason = "it is a pixel")]
        let pixel = (fraction.clamp(0.0, 1.0) * length).round() as i32;
        self.from + pixel
    }

    /// Returns round values for the labels of the axis.
    pub(crate) fn ticks(&self) -> Vec<f64> {
        if !self.is_log {
            return multiples(self.high);
        }
        let candidates = [&[1][..], &[1, 3], &[1, 2, 5]];
        let ticks = candidates.map(|factors| self.decades(factors));
        let enough = ticks.iter().find(|ticks| ticks.len() >= 4).or(ticks.last());
        enough.cloned().unwrap_or_default()
    }

    /// Returns these multiples of all powers of ten that are on the axis.
    fn decades(&self, factors: &[u8]) -> Vec<f64> {
        let values = (-15..=15).flat_map(|power| {
            // Parse instead of multiply: a product may differ from the nearest float of the decimal number.
            factors.iter().filter_map(move |factor| format!("{factor}e{power}").parse().ok())
        });
        values.filter(|tick: &f64| (self.low..=self.high).contains(tick)).collect()
    }
}

/// Returns the multiples of a round step from 0 to `high`: at most 7.
fn multiples(high: f64) -> Vec<f64> {
    let power = 10_f64.powf((high / 5.0).log10().floor());
    let steps = [1.0, 2.0, 5.0, 10.0].map(|factor| factor * power);
    let step = steps.into_iter().find(|step| high / step <= 6.0).unwrap_or(high);
    (0..=6).map(|at| f64::from(at) * step).take_while(|tick| *tick <= high).collect()
}

#[cfg(test)]
mod tests {
    use super::Axis;

    #[test]
    fn narrow_values_have_a_linear_axis() {
        let axis = Axis::for_values([2.0, 4.0].into_iter(), 300, 0);
        assert_eq!((axis.pixel(0.0), axis.pixel(4.32), axis.pixel(2.16)), (300, 0, 150));
        assert_eq!(axis.ticks(), [0.0, 1.0, 2.0, 3.0, 4.0]);
    }

    #[test]
    fn wide_values_have_a_logarithmic_axis() {
        let axis = Axis::log(0.5, 5_000.0, 0, 400);
        assert_eq!((axis.pixel(0.5), axis.pixel(50.0), axis.pixel(5_000.0)), (0, 200, 400));
        assert_eq!(axis.ticks(), [1.0, 10.0, 100.0, 1_000.0]);
        assert_eq!(Axis::log(0.05, 5.0, 0, 1).ticks(), [0.1, 0.3, 1.0, 3.0]);
        assert_eq!(Axis::log(0.5, 20.0, 0, 1).ticks(), [0.5, 1.0, 2.0, 5.0, 10.0, 20.0]);
    }

    #[test]
    fn zero_values_are_supported() {
        let axis = Axis::for_values([0.0, 0.0].into_iter(), 0, 10);
        assert_eq!(axis.pixel(0.0), 0);
        assert_eq!(Axis::for_values(std::iter::empty(), 0, 10).pixel(1.0), 10);
    }
}
