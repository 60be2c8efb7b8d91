//! Tables for people: columns as wide as they need to be, and nothing but spaces between them.

use std::fmt::{self, Write};

/// To which side the cells of a column stand.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Align {
    /// Words.
    Left,
    /// Numbers.
    Right,
}

/// Rows under a header.
#[derive(Debug)]
pub(crate) struct Table {
    columns: Vec<Align>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with these columns and no row yet.
    pub(crate) fn new(columns: &[(&str, Align)]) -> Self {
        Self {
            columns: columns.iter().map(|(_, align)| *align).collect(),
            rows: vec![columns.iter().map(|(name, _)| (*name).to_owned()).collect()],
        }
    }

    /// Appends a row; missing cells at its end are empty.
    pub(crate) fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.rows.push(cells.into_iter().collect());
    }

    fn width(&self, column: usize) -> usize {
        let widths = self.rows.iter().filter_map(|row| row.get(column));
        widths.map(|cell| cell.chars().count()).max().unwrap_or(0)
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for row in &self.rows {
            let mut line = String::new();
            for (column, align) in self.columns.iter().enumerate() {
                let width = self.width(column);
                let cell = row.get(column).map_or("", |cell| cell);
                let gap = if column == 0 { "" } else { "  " };
                match align {
                    Align::Left => write!(line, "{gap}{cell:width$}")?,
                    Align::Right => write!(line, "{gap}{cell:>width$}")?,
                }
            }
            writeln!(f, "{}", line.trim_end())?;
        }
        Ok(())
    }
}
