use crate::bench::record::FitPoint;
use crate::bench::statistics::median;

/// What an operation costs: once, for each tensor, and for each byte. None is below zero.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Cost {
    pub(crate) once: f64,
    pub(crate) tensor: f64,
    pub(crate) byte: f64,
}

impl Cost {
    /// The cost that explains these times best. What counts is by what part of a time it is wrong, so
    /// that small sizes say as much as big ones.
    pub(crate) fn of(points: &[FitPoint]) -> Option<Self> {
        let rows: Vec<[f64; 3]> = points
            .iter()
            .map(|point| {
                let [tensors, bytes] = [point.tensors, point.bytes].map(float);
                [1.0, tensors, bytes].map(|amount| amount / median(&point.seconds))
            })
            .collect();
        // Where the best solution of all three is below zero, one of them is zero in the best that is
        // not: so each subset of them is solved for.
        let subsets = (1_u8..8).map(|set| [0, 1, 2].map(|column| set >> column & 1 == 1));
        let solved = subsets.filter_map(|used| solve(&rows, used));
        let possible = solved.filter(|costs| costs.iter().all(|cost| *cost >= 0.0));
        let best = possible
            .min_by(|one, other| f64::total_cmp(&error(&rows, *one), &error(&rows, *other)));
        best.map(|[once, tensor, byte]| Self { once, tensor, byte })
    }

    /// The seconds that it says.
    pub(crate) fn seconds(&self, tensors: f64, bytes: f64) -> f64 {
        dot([1.0, tensors, bytes], [self.once, self.tensor, self.byte])
    }

    /// By what part it is wrong where it is most wrong.
    pub(crate) fn worst(&self, points: &[FitPoint]) -> f64 {
        let parts = points.iter().map(|point| {
            let said = self.seconds(float(point.tensors), float(point.bytes));
            (said / median(&point.seconds) - 1.0).abs()
        });
        parts.fold(0.0, f64::max)
    }
}

/// A number to compute times with.
#[expect(clippy::cast_precision_loss, reason = "what is measured has fewer digits")]
pub(crate) fn float(number: u64) -> f64 {
    number as f64
}

fn dot(one: [f64; 3], other: [f64; 3]) -> f64 {
    one.iter().zip(other).map(|(one, other)| one * other).sum()
}

/// The squares of what is left of 1, the time itself as a part of it.
fn error(rows: &[[f64; 3]], costs: [f64; 3]) -> f64 {
    rows.iter().map(|row| (dot(*row, costs) - 1.0).powi(2)).sum()
}

/// Least squares with the columns that are used; nothing if they do not say enough.
fn solve(rows: &[[f64; 3]], used: [bool; 3]) -> Option<[f64; 3]> {
    // Bytes are many and seconds few: each column is brought to length 1.
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

/// Solves three equations of three unknowns.
fn eliminate(mut rows: [[f64; 4]; 3]) -> Option<[f64; 3]> {
    for column in 0..3 {
        let pivot = (column..3)
            .max_by(|one, other| rows[*one][column].abs().total_cmp(&rows[*other][column].abs()))?;
        rows.swap(column, pivot);
        // Columns of length 1 that are this much alike cannot be told apart.
        if rows[column][column].abs() < 1e-9 {
            return None;
        }
        let pivot = rows[column];
        for (at, row) in rows.iter_mut().enumerate() {
            if at != column {
                let factor = row[column] / pivot[column];
                for (cell, of_pivot) in row.iter_mut().zip(pivot) {
                    *cell -= factor * of_pivot;
                }
            }
        }
    }
    Some([0, 1, 2].map(|at| rows[at][3] / rows[at][at]))
}

#[cfg(test)]
mod tests {
    use super::{Cost, float};
    use crate::bench::record::FitPoint;

    /// Times of this cost, each a little wrong.
    fn points(cost: Cost, noise: f64) -> Vec<FitPoint> {
        let mut points = Vec::new();
        for tensors in [100, 3_000, 20_000] {
            for bytes in [1_000_000, 32_000_000, 400_000_000] {
                let sign = if points.len() % 2 == 0 { 1.0 } else { -1.0 };
                let seconds = cost.seconds(float(tensors), float(bytes)) * (1.0 + sign * noise);
                points.push(FitPoint { tensors, bytes, seconds: vec![seconds; 3] });
            }
        }
        points
    }

    fn is_near(found: f64, expected: f64, part: f64) -> bool {
        (found - expected).abs() <= expected * part
    }

    #[test]
    fn known_costs_are_found() {
        let cost = Cost { once: 1e-3, tensor: 2e-7, byte: 5e-11 };
        for (noise, part) in [(0.0, 1e-9), (0.03, 0.1)] {
            let points = points(cost, noise);
            let found = Cost::of(&points).unwrap();
            assert!(is_near(found.once, cost.once, part), "{found:?}");
            assert!(is_near(found.tensor, cost.tensor, part), "{found:?}");
            assert!(is_near(found.byte, cost.byte, part), "{found:?}");
            assert!(found.worst(&points) <= noise * 1.5 + 1e-9, "{found:?}");
        }
    }

    #[test]
    fn nothing_costs_less_than_nothing() {
        let cost = Cost { once: 0.0, tensor: 0.0, byte: 5e-11 };
        let found = Cost::of(&points(cost, 0.05)).unwrap();
        assert!(found.once >= 0.0 && found.tensor >= 0.0, "{found:?}");
        assert!(is_near(found.byte, cost.byte, 0.1), "{found:?}");
    }

    #[test]
    fn points_that_say_little() {
        assert_eq!(Cost::of(&[]), None);
        let point = FitPoint { tensors: 100, bytes: 1_000, seconds: vec![0.5] };
        let found = Cost::of(std::slice::from_ref(&point)).unwrap();
        assert!(is_near(found.seconds(100.0, 1_000.0), 0.5, 1e-9), "{found:?}");
    }
}
