use plotters::style::Color;
use plotters::style::text_anchor::HPos;

use crate::bench::plot::axis::Axis;
use crate::bench::plot::canvas::{Canvas, DrawResult};
use crate::bench::plot::text::truncate;
use crate::bench::plot::theme::ColourRole;

pub(crate) const SIZE: (u32, u32) = (900, 400);
const LEFT: i32 = 76;
const RIGHT: i32 = 680;
const TOP: i32 = 52;
const BOTTOM: i32 = 346;
/// Minimum vertical distance of two names in pixels.
const NAME_DISTANCE: i32 = 16;
/// Minimum horizontal distance of two values below the axis in pixels.
const TICK_DISTANCE: i32 = 48;

/// A line chart. The name of each line is at its end.
pub(crate) struct Curves {
    pub(crate) title: String,
    pub(crate) x_name: String,
    pub(crate) x_value: Box<dyn Fn(f64) -> String>,
    pub(crate) y_value: Box<dyn Fn(f64) -> String>,
    pub(crate) lines: Vec<Line>,
}

/// A line of a chart.
pub(crate) struct Line {
    pub(crate) name: String,
    pub(crate) ink: ColourRole,
    /// The measured values.
    pub(crate) points: Vec<(f64, f64)>,
}

impl Curves {
    pub(crate) fn draw(&self, canvas: &Canvas<'_>) -> DrawResult {
        let theme = canvas.theme;
        canvas.write(&truncate(&self.title, 110), (8, 18), HPos::Left, theme.text)?;
        let chart = Chart::new(self, canvas);
        chart.frame()?;
        for line in &self.lines {
            chart.line(line)?;
        }
        chart.names()
    }
}

/// A line chart with its axes, on a canvas.
struct Chart<'a, 'b> {
    curves: &'a Curves,
    canvas: &'a Canvas<'b>,
    x: Axis,
    y: Axis,
}

impl<'a, 'b> Chart<'a, 'b> {
    fn new(curves: &'a Curves, canvas: &'a Canvas<'b>) -> Self {
        let all = || curves.lines.iter().flat_map(|line| &line.points);
        let x = Axis::for_values(all().map(|point| point.0), LEFT + 8, RIGHT - 8);
        let y = Axis::for_values(all().map(|point| point.1), BOTTOM, TOP);
        Self { curves, canvas, x, y }
    }

    /// Returns the pixel of a point.
    fn at(&self, point: &(f64, f64)) -> (i32, i32) {
        (self.x.pixel(point.0), self.y.pixel(point.1))
    }

    fn frame(&self) -> DrawResult {
        let Self { curves, canvas, x, y } = self;
        let theme = canvas.theme;
        for tick in y.ticks() {
            let at = y.pixel(tick);
            canvas.line([(LEFT, at), (RIGHT, at)], theme.grid)?;
            let text = (curves.y_value)(tick);
            canvas.write(&text, (LEFT - 8, at), HPos::Right, theme.muted)?;
        }
        canvas.line([(LEFT, BOTTOM), (RIGHT, BOTTOM)], theme.muted)?;
        for tick in self.x_ticks() {
            let at = x.pixel(tick);
            canvas.line([(at, BOTTOM), (at, BOTTOM + 5)], theme.muted)?;
            let text = (curves.x_value)(tick);
            canvas.write(&text, (at, BOTTOM + 16), HPos::Center, theme.muted)?;
        }
        let middle = i32::midpoint(LEFT, RIGHT);
        canvas.write(&curves.x_name, (middle, BOTTOM + 38), HPos::Center, theme.text)
    }

    /// Returns the x values for labels: the measured ones if they fit, otherwise round ones.
    fn x_ticks(&self) -> Vec<f64> {
        let points = self.curves.lines.iter().flat_map(|line| &line.points);
        let mut values: Vec<f64> = points.map(|point| point.0).collect();
        values.sort_by(f64::total_cmp);
        values.dedup();
        let fits = values
            .is_sorted_by(|one, next| self.x.pixel(*one) + TICK_DISTANCE <= self.x.pixel(*next));
        if fits { values } else { self.x.ticks() }
    }

    fn line(&self, line: &Line) -> DrawResult {
        let colour = self.canvas.theme.colour(line.ink);
        let points: Vec<(i32, i32)> = line.points.iter().map(|point| self.at(point)).collect();
        let width = if matches!(line.ink, ColourRole::Ours) { 3 } else { 2 };
        if points.len() > 1 {
            self.canvas.line(points.clone(), colour.stroke_width(width))?;
        }
        for point in points {
            self.canvas.circle(point, 4, colour.filled())?;
        }
        Ok(())
    }

    /// Writes the names at the ends of the lines, moved apart so that they do not overlap.
    fn names(&self) -> DrawResult {
        let ends = self.curves.lines.iter().filter_map(|line| {
            let last = line.points.last()?;
            Some((self.at(last), &line.name, self.canvas.theme.colour(line.ink)))
        });
        let mut ends: Vec<_> = ends.collect();
        ends.sort_by_key(|((_, y), ..)| *y);
        let heights: Vec<i32> = ends.iter().map(|((_, y), ..)| *y).collect();
        for ((end, name, colour), at) in ends.into_iter().zip(spread(&heights)) {
            let leader = [(end.0 + 6, end.1), (RIGHT + 10, at)];
            self.canvas.line(leader, colour.mix(0.5))?;
            self.canvas.write(&truncate(name, 32), (RIGHT + 14, at), HPos::Left, colour)?;
        }
        Ok(())
    }
}

/// Moves sorted heights apart by at least [`NAME_DISTANCE`], and keeps them above the plot bottom.
fn spread(heights: &[i32]) -> Vec<i32> {
    let mut moved = Vec::with_capacity(heights.len());
    let mut free = i32::MIN;
    for height in heights {
        moved.push((*height).max(free));
        free = moved.last().map_or(free, |last| last + NAME_DISTANCE);
    }
    let mut limit = BOTTOM;
    for height in moved.iter_mut().rev() {
        *height = (*height).min(limit);
        limit = *height - NAME_DISTANCE;
    }
    moved
}

#[cfg(test)]
mod tests {
    use super::{BOTTOM, spread};

    #[test]
    fn names_do_not_overlap() {
        assert_eq!(spread(&[10, 12, 60]), [10, 26, 60]);
        assert_eq!(spread(&[BOTTOM - 1, BOTTOM]), [BOTTOM - 16, BOTTOM]);
        assert!(spread(&[]).is_empty());
    }
}
