use std::io;

use plotters::coord::Shift;
use plotters::element::{Circle, PathElement, Rectangle, Text};
use plotters::prelude::{DrawingArea, DrawingAreaErrorKind, IntoDrawingArea, SVGBackend};
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{IntoTextStyle, RGBColor, ShapeStyle};

use crate::bench::plot::theme::Theme;

/// Font of all text. Size 15 results in 12 pixels in the SVG file.
const FONT: (&str, i32) = ("sans-serif", 15);

/// Result of drawing.
pub(crate) type DrawResult = Result<(), DrawingAreaErrorKind<io::Error>>;

/// A drawing surface with its colours.
pub(crate) struct Canvas<'a> {
    area: DrawingArea<SVGBackend<'a>, Shift>,
    pub(crate) theme: &'a Theme,
}

impl Canvas<'_> {
    /// Returns the SVG that `draw` draws on a canvas of this size.
    pub(crate) fn svg(
        size: (u32, u32),
        theme: &Theme,
        draw: impl FnOnce(&Canvas<'_>) -> DrawResult,
    ) -> io::Result<String> {
        let mut text = String::new();
        {
            let area = SVGBackend::with_string(&mut text, size).into_drawing_area();
            let canvas = Canvas { area, theme };
            draw(&canvas).and_then(|()| canvas.area.present()).map_err(io::Error::other)?;
        }
        Ok(text)
    }

    /// Writes text. `anchor` is its left end, right end or middle, at half of its height.
    pub(crate) fn write(
        &self,
        text: &str,
        anchor: (i32, i32),
        alignment: HPos,
        colour: RGBColor,
    ) -> DrawResult {
        let style =
            FONT.into_text_style(&self.area).pos(Pos::new(alignment, VPos::Center)).color(&colour);
        self.area.draw(&Text::new(text.to_owned(), anchor, style))
    }

    /// Draws a line through points.
    pub(crate) fn line(
        &self,
        points: impl Into<Vec<(i32, i32)>>,
        style: impl Into<ShapeStyle>,
    ) -> DrawResult {
        self.area.draw(&PathElement::new(points, style))
    }

    pub(crate) fn rectangle(&self, corners: [(i32, i32); 2], style: ShapeStyle) -> DrawResult {
        self.area.draw(&Rectangle::new(corners, style))
    }

    pub(crate) fn circle(&self, centre: (i32, i32), radius: i32, style: ShapeStyle) -> DrawResult {
        self.area.draw(&Circle::new(centre, radius, style))
    }
}
