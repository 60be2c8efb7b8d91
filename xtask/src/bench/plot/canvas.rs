use std::io;

use plotters::coord::Shift;
use plotters::element::{Circle, PathElement, Rectangle, Text};
use plotters::prelude::{DrawingArea, DrawingAreaErrorKind, IntoDrawingArea, SVGBackend};
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{IntoTextStyle, RGBColor, ShapeStyle};

use crate::bench::plot::theme::Theme;

/// A size of 15 is one of 12 pixels in the file.
const FONT: (&str, i32) = ("sans-serif", 15);

/// Whether something could be drawn.
pub(crate) type Drawn = Result<(), DrawingAreaErrorKind<io::Error>>;

/// What a plot is drawn on, and in which colours.
pub(crate) struct Canvas<'a> {
    area: DrawingArea<SVGBackend<'a>, Shift>,
    pub(crate) theme: &'a Theme,
}

impl Canvas<'_> {
    /// The SVG of what is drawn on one of this size.
    pub(crate) fn svg(
        size: (u32, u32),
        theme: &Theme,
        draw: impl FnOnce(&Canvas<'_>) -> Drawn,
    ) -> io::Result<String> {
        let mut text = String::new();
        {
            let area = SVGBackend::with_string(&mut text, size).into_drawing_area();
            let canvas = Canvas { area, theme };
            draw(&canvas).and_then(|()| canvas.area.present()).map_err(io::Error::other)?;
        }
        Ok(text)
    }

    /// Writes text; `place` is its left or right end or its middle, at half its height.
    pub(crate) fn write(
        &self,
        text: &str,
        place: (i32, i32),
        end: HPos,
        colour: RGBColor,
    ) -> Drawn {
        let style =
            FONT.into_text_style(&self.area).pos(Pos::new(end, VPos::Center)).color(&colour);
        self.area.draw(&Text::new(text.to_owned(), place, style))
    }

    /// A line through these points.
    pub(crate) fn line(
        &self,
        points: impl Into<Vec<(i32, i32)>>,
        style: impl Into<ShapeStyle>,
    ) -> Drawn {
        self.area.draw(&PathElement::new(points, style))
    }

    pub(crate) fn rectangle(&self, corners: [(i32, i32); 2], style: ShapeStyle) -> Drawn {
        self.area.draw(&Rectangle::new(corners, style))
    }

    pub(crate) fn circle(&self, centre: (i32, i32), radius: i32, style: ShapeStyle) -> Drawn {
        self.area.draw(&Circle::new(centre, radius, style))
    }
}
