use plotters::style::Color;
use plotters::style::text_anchor::HPos;

use crate::bench::plot::axis::Axis;
use crate::bench::plot::canvas::{Canvas, Drawn};
use crate::bench::plot::text::short;
use crate::bench::plot::theme::Ink;
use crate::bench::quantity::times;

const WIDTH: u32 = 900;
const TOP: i32 = 54;
const BOTTOM: i32 = 34;
const ROW: i32 = 44;
const BAR: i32 = 12;
/// Where bars may be: what is left of them says what was done, what is right of them the ratio.
const BARS: (i32, i32) = (345, 660);

/// Ratios as bars from 1: to the right where ours is faster.
pub(crate) struct Bars {
    pub(crate) rows: Vec<Row>,
}

/// A race.
pub(crate) struct Row {
    pub(crate) what: String,
    pub(crate) place: String,
    pub(crate) bars: Vec<Bar>,
}

/// How many times as fast as another ours is.
pub(crate) struct Bar {
    pub(crate) ratio: f64,
    pub(crate) other: String,
    pub(crate) ink: Ink,
}

impl Bars {
    pub(crate) fn size(&self) -> (u32, u32) {
        (WIDTH, u32::try_from(self.bottom() + BOTTOM).unwrap_or(u32::MAX))
    }

    fn bottom(&self) -> i32 {
        TOP + ROW * i32::try_from(self.rows.len()).unwrap_or(0)
    }

    pub(crate) fn draw(&self, canvas: &Canvas<'_>) -> Drawn {
        let ratios = self.rows.iter().flat_map(|row| &row.bars).map(|bar| bar.ratio);
        let low = ratios.clone().fold(0.5, f64::min) / 1.1;
        let high = ratios.fold(2.0, f64::max) * 1.1;
        let axis = Axis::log(low, high, BARS.0, BARS.1);
        legend(canvas)?;
        for tick in axis.ticks() {
            let (x, bottom) = (axis.at(tick), self.bottom());
            canvas.line([(x, TOP), (x, bottom)], canvas.theme.grid)?;
            let place = (x, bottom + 16);
            canvas.write(&times_plainly(tick), place, HPos::Center, canvas.theme.muted)?;
        }
        for (row, number) in self.rows.iter().zip(0..) {
            row.draw(canvas, &axis, TOP + ROW * number)?;
        }
        let one = axis.at(1.0);
        canvas.line([(one, TOP - 6), (one, self.bottom())], canvas.theme.text)
    }
}

impl Row {
    fn draw(&self, canvas: &Canvas<'_>, axis: &Axis, top: i32) -> Drawn {
        let theme = canvas.theme;
        canvas.write(&short(&self.what, 47), (8, top + 14), HPos::Left, theme.text)?;
        canvas.write(&short(&self.place, 47), (8, top + 29), HPos::Left, theme.muted)?;
        let height = (BAR + 3) * i32::try_from(self.bars.len()).unwrap_or(0) - 3;
        let start = top + (ROW - height) / 2;
        for (bar, number) in self.bars.iter().zip(0..) {
            let y = start + (BAR + 3) * number;
            let (one, end) = (axis.at(1.0), axis.at(bar.ratio));
            let corners = [(one.min(end), y), (one.max(end).max(one.min(end) + 1), y + BAR)];
            canvas.rectangle(corners, theme.colour(bar.ink).filled())?;
            let place = (BARS.1 + 66, y + BAR / 2);
            canvas.write(&times(bar.ratio), place, HPos::Right, theme.text)?;
            let place = (BARS.1 + 74, y + BAR / 2);
            canvas.write(&short(&bar.other, 23), place, HPos::Left, theme.muted)?;
        }
        Ok(())
    }
}

fn legend(canvas: &Canvas<'_>) -> Drawn {
    let theme = canvas.theme;
    let title = "How many times as fast ours is (right of 1: faster)";
    canvas.write(title, (8, 18), HPos::Left, theme.text)?;
    let entries = [(345, Ink::Ours, "as the best peer"), (480, Ink::Limit, "as the machine")];
    for (x, ink, text) in entries {
        canvas.rectangle([(x, 13), (x + 10, 23)], theme.colour(ink).filled())?;
        canvas.write(text, (x + 16, 18), HPos::Left, theme.muted)?;
    }
    Ok(())
}

/// A round ratio.
fn times_plainly(ratio: f64) -> String {
    format!("{ratio}×")
}
