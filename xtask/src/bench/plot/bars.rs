use plotters::style::Color;
use plotters::style::text_anchor::HPos;

use crate::bench::plot::axis::Axis;
use crate::bench::plot::canvas::{Canvas, DrawResult};
use crate::bench::plot::text::truncate;
use crate::bench::plot::theme::ColourRole;
use crate::bench::quantity::ratio;

const WIDTH: u32 = 900;
const TOP: i32 = 54;
const BOTTOM: i32 = 34;
const ROW: i32 = 44;
const BAR: i32 = 12;
/// Horizontal range of the bars in pixels. The title of the race is left of it, the ratio right of it.
const BARS: (i32, i32) = (345, 660);

/// A bar chart of ratios. Bars start at 1, and extend to the right if ours is faster.
pub(crate) struct Bars {
    pub(crate) rows: Vec<Row>,
}

/// The bars of a race.
pub(crate) struct Row {
    pub(crate) what: String,
    pub(crate) place: String,
    pub(crate) bars: Vec<Bar>,
}

/// The speed of ours relative to another runner.
pub(crate) struct Bar {
    pub(crate) ratio: f64,
    pub(crate) other: String,
    pub(crate) ink: ColourRole,
}

impl Bars {
    pub(crate) fn size(&self) -> (u32, u32) {
        (WIDTH, u32::try_from(self.bottom() + BOTTOM).unwrap_or(u32::MAX))
    }

    fn bottom(&self) -> i32 {
        TOP + ROW * i32::try_from(self.rows.len()).unwrap_or(0)
    }

    pub(crate) fn draw(&self, canvas: &Canvas<'_>) -> DrawResult {
        let ratios = self.rows.iter().flat_map(|row| &row.bars).map(|bar| bar.ratio);
        let low = ratios.clone().fold(0.5, f64::min) / 1.1;
        let high = ratios.fold(2.0, f64::max) * 1.1;
        let axis = Axis::log(low, high, BARS.0, BARS.1);
        legend(canvas)?;
        for tick in axis.ticks() {
            let (x, bottom) = (axis.pixel(tick), self.bottom());
            canvas.line([(x, TOP), (x, bottom)], canvas.theme.grid)?;
            let place = (x, bottom + 16);
            canvas.write(&format_round_ratio(tick), place, HPos::Center, canvas.theme.muted)?;
        }
        for (row, number) in self.rows.iter().zip(0..) {
            row.draw(canvas, &axis, TOP + ROW * number)?;
        }
        let one = axis.pixel(1.0);
        canvas.line([(one, TOP - 6), (one, self.bottom())], canvas.theme.text)
    }
}

impl Row {
    fn draw(&self, canvas: &Canvas<'_>, axis: &Axis, top: i32) -> DrawResult {
        let theme = canvas.theme;
        canvas.write(&truncate(&self.what, 47), (8, top + 14), HPos::Left, theme.text)?;
        canvas.write(&truncate(&self.place, 47), (8, top + 29), HPos::Left, theme.muted)?;
        let height = (BAR + 3) * i32::try_from(self.bars.len()).unwrap_or(0) - 3;
        let start = top + (ROW - height) / 2;
        for (bar, number) in self.bars.iter().zip(0..) {
            let y = start + (BAR + 3) * number;
            let (one, end) = (axis.pixel(1.0), axis.pixel(bar.ratio));
            let corners = [(one.min(end), y), (one.max(end).max(one.min(end) + 1), y + BAR)];
            canvas.rectangle(corners, theme.colour(bar.ink).filled())?;
            let place = (BARS.1 + 66, y + BAR / 2);
            canvas.write(&ratio(bar.ratio), place, HPos::Right, theme.text)?;
            let place = (BARS.1 + 74, y + BAR / 2);
            canvas.write(&truncate(&bar.other, 23), place, HPos::Left, theme.muted)?;
        }
        Ok(())
    }
}

fn legend(canvas: &Canvas<'_>) -> DrawResult {
    let theme = canvas.theme;
    let title = "Relative speed of TSSD (right of 1: faster)";
    canvas.write(title, (8, 18), HPos::Left, theme.text)?;
    let entries = [(345, ColourRole::Ours, "vs. best peer"), (480, ColourRole::Limit, "vs. limit")];
    for (x, ink, text) in entries {
        canvas.rectangle([(x, 13), (x + 10, 23)], theme.colour(ink).filled())?;
        canvas.write(text, (x + 16, 18), HPos::Left, theme.muted)?;
    }
    Ok(())
}

/// Formats a round ratio, without decimals.
fn format_round_ratio(ratio: f64) -> String {
    format!("{ratio}×")
}
