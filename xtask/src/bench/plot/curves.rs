use plotters::style::Color;
use plotters::style::text_anchor::HPos;

use crate::bench::plot::axis::Axis;
use crate::bench::plot::canvas::{Canvas, Drawn};
use crate::bench::plot::text::short;
use crate::bench::plot::theme::Ink;

pub(crate) const SIZE: (u32, u32) = (900, 400);
const LEFT: i32 = 76;
const RIGHT: i32 = 680;
const TOP: i32 = 52;
const BOTTOM: i32 = 346;
/// The least distance of two names.
const APART: i32 = 16;
/// That of two values below the axis.
const TICK: i32 = 48;

/// Curves, each with its name at the end.
pub(crate) struct Curves {
    pub(crate) title: String,
    pub(crate) x_name: String,
    pub(crate) x_value: Box<dyn Fn(f64) -> String>,
    pub(crate) y_value: Box<dyn Fn(f64) -> String>,
    pub(crate) lines: Vec<Line>,
}

/// One of them.
pub(crate) struct Line {
    pub(crate) name: String,
    pub(crate) ink: Ink,
    /// The measured values.
    pub(crate) points: Vec<(f64, f64)>,
}

impl Curves {
    pub(crate) fn draw(&self, canvas: &Canvas<'_>) -> Drawn {
        let theme = canvas.theme;
        canvas.write(&short(&self.title, 110), (8, 18), HPos::Left, theme.text)?;
        let chart = Chart::of(self, canvas);
        chart.frame()?;
        for line in &self.lines {
            chart.line(line)?;
        }
        chart.names()
    }
}

/// Curves between two axes.
struct Chart<'a, 'b> {
    curves: &'a Curves,
    canvas: &'a Canvas<'b>,
    x: Axis,
    y: Axis,
}

impl<'a, 'b> Chart<'a, 'b> {
    fn of(curves: &'a Curves, canvas: &'a Canvas<'b>) -> Self {
        let all = || curves.lines.iter().flat_map(|line| &line.points);
        let x = Axis::over(all().map(|point| point.0), LEFT + 8, RIGHT - 8);
        let y = Axis::over(all().map(|point| point.1), BOTTOM, TOP);
        Self { curves, canvas, x, y }
    }

    /// The pixel of a point.
    fn at(&self, point: &(f64, f64)) -> (i32, i32) {
        (self.x.at(point.0), self.y.at(point.1))
    }

    fn frame(&self) -> Drawn {
        let Self { curves, canvas, x, y } = self;
        let theme = canvas.theme;
        for tick in y.ticks() {
            let at = y.at(tick);
            canvas.line([(LEFT, at), (RIGHT, at)], theme.grid)?;
            let text = (curves.y_value)(tick);
            canvas.write(&text, (LEFT - 8, at), HPos::Right, theme.muted)?;
        }
        canvas.line([(LEFT, BOTTOM), (RIGHT, BOTTOM)], theme.muted)?;
        for tick in self.x_ticks() {
            let at = x.at(tick);
            canvas.line([(at, BOTTOM), (at, BOTTOM + 5)], theme.muted)?;
            let text = (curves.x_value)(tick);
            canvas.write(&text, (at, BOTTOM + 16), HPos::Center, theme.muted)?;
        }
        let middle = i32::midpoint(LEFT, RIGHT);
        canvas.write(&curves.x_name, (middle, BOTTOM + 38), HPos::Center, theme.text)
    }

    /// The values that were measured, if there is room for them.
    fn x_ticks(&self) -> Vec<f64> {
        let points = self.curves.lines.iter().flat_map(|line| &line.points);
        let mut values: Vec<f64> = points.map(|point| point.0).collect();
        values.sort_by(f64::total_cmp);
        values.dedup();
        let has_room = values.is_sorted_by(|one, next| self.x.at(*one) + TICK <= self.x.at(*next));
        if has_room { values } else { self.x.ticks() }
    }

    fn line(&self, line: &Line) -> Drawn {
        let colour = self.canvas.theme.colour(line.ink);
        let points: Vec<(i32, i32)> = line.points.iter().map(|point| self.at(point)).collect();
        let width = if matches!(line.ink, Ink::Ours) { 3 } else { 2 };
        if points.len() > 1 {
            self.canvas.line(points.clone(), colour.stroke_width(width))?;
        }
        for point in points {
            self.canvas.circle(point, 4, colour.filled())?;
        }
        Ok(())
    }

    /// Names at the ends of lines, moved apart where they would lie on each other.
    fn names(&self) -> Drawn {
        let ends = self.curves.lines.iter().filter_map(|line| {
            let last = line.points.last()?;
            Some((self.at(last), &line.name, self.canvas.theme.colour(line.ink)))
        });
        let mut ends: Vec<_> = ends.collect();
        ends.sort_by_key(|((_, y), ..)| *y);
        let heights: Vec<i32> = ends.iter().map(|((_, y), ..)| *y).collect();
        for ((end, name, colour), at) in ends.into_iter().zip(apart(&heights)) {
            let leader = [(end.0 + 6, end.1), (RIGHT + 10, at)];
            self.canvas.line(leader, colour.mix(0.5))?;
            self.canvas.write(&short(name, 32), (RIGHT + 14, at), HPos::Left, colour)?;
        }
        Ok(())
    }
}

/// Moves sorted heights as far apart as names need, and up where the plot ends.
fn apart(heights: &[i32]) -> Vec<i32> {
    let mut moved = Vec::with_capacity(heights.len());
    let mut free = i32::MIN;
    for height in heights {
        moved.push((*height).max(free));
        free = moved.last().map_or(free, |last| last + APART);
    }
    let mut limit = BOTTOM;
    for height in moved.iter_mut().rev() {
        *height = (*height).min(limit);
        limit = *height - APART;
    }
    moved
}

#[cfg(test)]
mod tests {
    use super::{BOTTOM, apart};

    #[test]
    fn names_do_not_lie_on_each_other() {
        assert_eq!(apart(&[10, 12, 60]), [10, 26, 60]);
        assert_eq!(apart(&[BOTTOM - 1, BOTTOM]), [BOTTOM - 16, BOTTOM]);
        assert!(apart(&[]).is_empty());
    }
}
