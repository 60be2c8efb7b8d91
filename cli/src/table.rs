//! Text tables with aligned columns.

use std::fmt::{self, Write};

/// Alignment of the cells of a column.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Align {
    /// For text.
    Left,
    /// For numbers.
    Right,
}

/// A header and rows.
#[derive(Debug)]
pub(crate) struct Table {
    columns: Vec<Align>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// Creates a table with these columns and no rows.
    pub(crate) fn new(columns: &[(&str, Align)]) -> Self {
        Self {
            columns: columns.iter().map(|(_, align)| *align).collect(),
            rows: vec![columns.iter().map(|(name, _)| (*name).to_owned()).collect()],
        }
    }

    /// Appends a row. Missing cells at its end are empty, and long ones are abridged.
    pub(crate) fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        let abridged = |cell: String| tssd_format::abridge_name(&cell).into_owned();
        self.rows.push(cells.into_iter().map(abridged).collect());
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
