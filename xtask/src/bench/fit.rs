use crate::bench::record::FitPoint;
use crate::bench::statistics::median;

/// Cost of an operation in seconds. No term is negative.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Cost {
    /// Fixed cost per call.
    pub(crate) fixed: f64,
    /// Cost per tensor.
    pub(crate) per_tensor: f64,
    /// Cost per byte.
    pub(crate) per_byte: f64,
}

impl Cost {
    /// Fits the cost to measured times. `None` if there are no points.
    ///
    /// Minimizes the squares of the relative errors, so that all sizes have equal weight.
    pub(crate) fn fit(points: &[FitPoint]) -> Option<Self> {
        let rows: Vec<[f64; 3]> = points
            .iter()
            .map(|point| {
                let [tensors, bytes] = [point.tensors, point.bytes].map(to_float);
                [1.0, tensors, bytes].map(|amount| amount / median(&point.seconds))
            })
            .collect();
        // If the unconstrained solution has a negative term, at least one term of the best non-negative solution is
        // zero. So solve for each subset of the terms, and take the best non-negative solution.
        let subsets = (1_u8..8).map(|set| [0, 1, 2].map(|column| set >> column & 1 == 1));
        let solved = subsets.filter_map(|used| solve(&rows, used));
        let possible = solved.filter(|costs| costs.iter().all(|cost| *cost >= 0.0));
        let best = possible
            .min_by(|one, other| f64::total_cmp(&error(&rows, *one), &error(&rows, *other)));
        best.map(|[once, tensor, byte]| Self { fixed: once, per_tensor: tensor, per_byte: byte })
    }

    /// Returns the time in seconds that the fit predicts.
    pub(crate) fn seconds(&self, tensors: f64, bytes: f64) -> f64 {
        dot([1.0, tensors, bytes], [self.fixed, self.per_tensor, self.per_byte])
    }

    /// Returns the maximum relative error of the prediction.
    pub(crate) fn max_relative_error(&self, points: &[FitPoint]) -> f64 {
        let errors = points.iter().map(|point| {
            let predicted = self.seconds(to_float(point.tensors), to_float(point.bytes));
            (predicted / median(&point.seconds) - 1.0).abs()
        });
        errors.fold(0.0, f64::max)
    }
}

/// Converts a number to a float. Precise up to 2^53.
#[expect(clippy::cast_precision_loss, reason = "what is measured has fewer digits")]
pub(crate) fn to_float(number: u64) -> f64 {
    number as f64
}

fn dot(one: [f64; 3], other: [f64; 3]) -> f64 {
    one.iter().zip(other).map(|(one, other)| one * other).sum()
}

/// Returns the sum of the squared relative errors. Each row is scaled so that the measured time is 1.
fn error(rows: &[[f64; 3]], costs: [f64; 3]) -> f64 {
    rows.iter().map(|row| (dot(*row, costs) - 1.0).powi(2)).sum()
}

/// Solves the least squares problem for the used columns. `None` if they are linearly dependent.
fn solve(rows: &[[f64; 3]], used: [bool; 3]) -> Option<[f64; 3]> {
    // The columns differ by orders of magnitude, so normalize each to length 1.
    let lengths = [0, 1, 2].map(|column| {
        rows.iter().map(|row| row[column].powi(2)).sum::<f64>().sqrt().max(f64::MIN_POSITIVE)
    });
    let mut equations = [[0.0; 4]; 3];
    for (at, equation) in equations.iter_mut().enumerate() {
        for (column, cell) in equation.iter_mut().take(3).enumerate() {
            *cell = if used[at] && used[column] {
                rows.iter().map(|row| row[at] * row[column]).sum::<f64>()
                    / (lengths[at] * lengths[column])
            } else {
                f64::from(u8::from(at == column))
            };
        }
        if used[at] {
            equation[3] = rows.iter().map(|row| row[at]).sum::<f64>() / lengths[at];
        }
    }
    let solution = eliminate(equations)?;
    Some([0, 1, 2].map(|column| solution[column] / lengths[column]))
}

/// Solves three linear equations with three unknowns by Gaussian elimination with pivoting.
fn eliminate(mut rows: [[f64; 4]; 3]) -> Option<[f64; 3]> {
    for column in 0..3 {
        let pivot = (column..3)
            .max_by(|one, other| rows[*one][column].abs().total_cmp(&rows[*other][column].abs()))?;
        rows.swap(column, pivot);
        // A pivot this small means that the normalized columns are linearly dependent.
        if rows[column][column].abs() < 1e-9 {
            return None;
        }
        let pivot = rows[column];
        for (at, row) in rows.iter_mut().enumerate() {
            if at != column {
                let factor = row[column] / pivot[column];
                for (cell, pivot_cell) in row.iter_mut().zip(pivot) {
                    *cell -= factor * pivot_cell;
                }
            }
        }
    }
    Some([0, 1, 2].map(|at| rows[at][3] / rows[at][at]))
}

#[cfg(test)]
mod tests {
    use super::{Cost, to_float};
    use crate::bench::record::FitPoint;

    /// Returns times that follow a cost, with alternating relative errors of `noise`.
    fn points(cost: Cost, noise: f64) -> Vec<FitPoint> {
        let mut points = Vec::new();
        for tensors in [100, 3_000, 20_000] {
            for bytes in [1_000_000, 32_000_000, 400_000_000] {
                let sign = if points.len() % 2 == 0 { 1.0 } else { -1.0 };
                let seconds =
                    cost.seconds(to_float(tensors), to_float(bytes)) * (1.0 + sign * noise);
                points.push(FitPoint { tensors, bytes, seconds: vec![seconds; 3] });
            }
        }
        points
    }

    fn is_near(found: f64, expected: f64, tolerance: f64) -> bool {
        (found - expected).abs() <= expected * tolerance
    }

    #[test]
    fn fit_recovers_known_costs() {
        let cost = Cost { fixed: 1e-3, per_tensor: 2e-7, per_byte: 5e-11 };
        for (noise, tolerance) in [(0.0, 1e-9), (0.03, 0.1)] {
            let points = points(cost, noise);
            let found = Cost::fit(&points).unwrap();
            assert!(is_near(found.fixed, cost.fixed, tolerance), "{found:?}");
            assert!(is_near(found.per_tensor, cost.per_tensor, tolerance), "{found:?}");
            assert!(is_near(found.per_byte, cost.per_byte, tolerance), "{found:?}");
            assert!(found.max_relative_error(&points) <= noise * 1.5 + 1e-9, "{found:?}");
        }
    }

    #[test]
    fn costs_are_not_negative() {
        let cost = Cost { fixed: 0.0, per_tensor: 0.0, per_byte: 5e-11 };
        let found = Cost::fit(&points(cost, 0.05)).unwrap();
        assert!(found.fixed >= 0.0 && found.per_tensor >= 0.0, "{found:?}");
        assert!(is_near(found.per_byte, cost.per_byte, 0.1), "{found:?}");
    }

    #[test]
    fn fit_handles_few_points() {
        assert_eq!(Cost::fit(&[]), None);
        let point = FitPoint { tensors: 100, bytes: 1_000, seconds: vec![0.5] };
        let found = Cost::fit(std::slice::from_ref(&point)).unwrap();
        assert!(is_near(found.seconds(100.0, 1_000.0), 0.5, 1e-9), "{found:?}");
    }
}
