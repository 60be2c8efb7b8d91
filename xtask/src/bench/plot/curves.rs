use std::io;

use plotters::element::{Circle, PathElement};
use plotters::prelude::DrawingAreaErrorKind;
use plotters::style::Color;
use plotters::style::text_anchor::HPos;

use crate::bench::plot::Area;
use crate::bench::plot::axis::Axis;
use crate::bench::plot::text::{short, write};
use crate::bench::plot::theme::{Ink, Theme};

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
    /// How to read it.
    pub(crate) note: Option<String>,
    pub(crate) x_name: String,
    pub(crate) x_value: Box<dyn Fn(f64) -> String>,
    pub(crate) y_value: Box<dyn Fn(f64) -> String>,
    pub(crate) lines: Vec<Line>,
}

/// One of them.
pub(crate) struct Line {
    pub(crate) name: Option<String>,
    pub(crate) ink: Ink,
    pub(crate) is_filled: bool,
    /// What was measured.
    pub(crate) points: Vec<(f64, f64)>,
    /// What is drawn through it.
    pub(crate) curve: Vec<(f64, f64)>,
}

impl Curves {
    pub(crate) fn draw(
        &self,
        area: &Area<'_>,
        theme: &Theme,
    ) -> Result<(), DrawingAreaErrorKind<io::Error>> {
        let all = || self.lines.iter().flat_map(|line| &line.points);
        let x = Axis::over(all().map(|point| point.0), LEFT + 8, RIGHT - 8);
        let y = Axis::over(all().map(|point| point.1), BOTTOM, TOP);
        write(area, &short(&self.title, 110), (8, 18), HPos::Left, theme.text)?;
        if let Some(note) = &self.note {
            write(area, &short(note, 110), (8, 36), HPos::Left, theme.muted)?;
        }
        self.frame(area, theme, &x, &y)?;
        for line in &self.lines {
            line.draw(area, theme, &x, &y)?;
        }
        self.names(area, theme, &x, &y)
    }

    fn frame(
        &self,
        area: &Area<'_>,
        theme: &Theme,
        x: &Axis,
        y: &Axis,
    ) -> Result<(), DrawingAreaErrorKind<io::Error>> {
        for tick in y.ticks() {
            let at = y.at(tick);
            area.draw(&PathElement::new([(LEFT, at), (RIGHT, at)], theme.grid))?;
            let text = (self.y_value)(tick);
            write(area, &text, (LEFT - 8, at), HPos::Right, theme.muted)?;
        }
        area.draw(&PathElement::new([(LEFT, BOTTOM), (RIGHT, BOTTOM)], theme.muted))?;
        for tick in self.x_ticks(x) {
            let at = x.at(tick);
            area.draw(&PathElement::new([(at, BOTTOM), (at, BOTTOM + 5)], theme.muted))?;
            let text = (self.x_value)(tick);
            write(area, &text, (at, BOTTOM + 16), HPos::Center, theme.muted)?;
        }
        let middle = i32::midpoint(LEFT, RIGHT);
        write(area, &self.x_name, (middle, BOTTOM + 38), HPos::Center, theme.text)
    }

    /// The values that were measured, if there is room for them.
    fn x_ticks(&self, axis: &Axis) -> Vec<f64> {
        let points = self.lines.iter().flat_map(|line| &line.points);
        let mut values: Vec<f64> = points.map(|point| point.0).collect();
        values.sort_by(f64::total_cmp);
        values.dedup();
        let has_room = values.is_sorted_by(|one, next| axis.at(*one) + TICK <= axis.at(*next));
        if has_room { values } else { axis.ticks() }
    }

    /// Names at the ends of lines, moved apart where they would lie on each other.
    fn names(
        &self,
        area: &Area<'_>,
        theme: &Theme,
        x: &Axis,
        y: &Axis,
    ) -> Result<(), DrawingAreaErrorKind<io::Error>> {
        let ends = self.lines.iter().filter_map(|line| {
            let (last, name) = (line.points.last()?, line.name.as_ref()?);
            Some(((x.at(last.0), y.at(last.1)), name, theme.colour(line.ink)))
        });
        let mut ends: Vec<_> = ends.collect();
        ends.sort_by_key(|((_, y), ..)| *y);
        let heights: Vec<i32> = ends.iter().map(|((_, y), ..)| *y).collect();
        for ((end, name, colour), at) in ends.into_iter().zip(apart(&heights)) {
            let leader = [(end.0 + 6, end.1), (RIGHT + 10, at)];
            area.draw(&PathElement::new(leader, colour.mix(0.5)))?;
            write(area, &short(name, 32), (RIGHT + 14, at), HPos::Left, colour)?;
        }
        Ok(())
    }
}

impl Line {
    fn draw(
        &self,
        area: &Area<'_>,
        theme: &Theme,
        x: &Axis,
        y: &Axis,
    ) -> Result<(), DrawingAreaErrorKind<io::Error>> {
        let colour = theme.colour(self.ink);
        let at = |(one, other): &(f64, f64)| (x.at(*one), y.at(*other));
        let curve: Vec<(i32, i32)> = self.curve.iter().map(at).collect();
        let width = if matches!(self.ink, Ink::Ours) { 3 } else { 2 };
        if curve.len() > 1 {
            area.draw(&PathElement::new(curve, colour.stroke_width(width)))?;
        }
        for point in self.points.iter().map(at) {
            if self.is_filled {
                area.draw(&Circle::new(point, 4, colour.filled()))?;
            } else {
                area.draw(&Circle::new(point, 5, colour.stroke_width(2)))?;
            }
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
