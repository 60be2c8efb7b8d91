use std::io;

use plotters::element::Text;
use plotters::prelude::DrawingAreaErrorKind;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{IntoTextStyle, RGBColor};

use crate::bench::plot::Area;

/// A size of 15 is one of 12 pixels in the file.
const FONT: (&str, i32) = ("sans-serif", 15);

/// Writes text; `place` is its left or right end or its middle, at half its height.
pub(crate) fn write(
    area: &Area<'_>,
    text: &str,
    place: (i32, i32),
    end: HPos,
    colour: RGBColor,
) -> Result<(), DrawingAreaErrorKind<io::Error>> {
    let style = FONT.into_text_style(area).pos(Pos::new(end, VPos::Center)).color(&colour);
    area.draw(&Text::new(text.to_owned(), place, style))
}

/// At most this many characters.
pub(crate) fn short(text: &str, length: usize) -> String {
    if text.chars().count() <= length {
        return text.into();
    }
    let start: String = text.chars().take(length - 1).collect();
    format!("{}…", start.trim_end())
}

#[cfg(test)]
mod tests {
    use super::short;

    #[test]
    fn what_is_too_long_is_cut() {
        assert_eq!(short("abc", 3), "abc");
        assert_eq!(short("ab cd", 4), "ab…");
    }
}
