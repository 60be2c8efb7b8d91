/// Rows of cells, as Markdown has them.
pub(crate) struct Table {
    lines: Vec<String>,
    columns: usize,
}

impl Table {
    /// One with these columns; names that begin with `>` are of figures, which end in one line.
    pub(crate) fn new(columns: &[&str]) -> Self {
        let mut table = Self { lines: Vec::new(), columns: columns.len() };
        table.line(columns.iter().map(|name| name.trim_start_matches('>').to_owned()));
        let rules = columns.iter().map(|name| if name.starts_with('>') { "---:" } else { "---" });
        table.lines.push(format!("|{}|\n", rules.collect::<Vec<_>>().join("|")));
        table
    }

    pub(crate) fn row(&mut self, cells: &[String]) {
        debug_assert_eq!(cells.len(), self.columns, "{cells:?}");
        self.line(cells.iter().map(|cell| escaped(cell)));
    }

    /// The whole table; nothing if it has no rows.
    pub(crate) fn text(self) -> String {
        if self.lines.len() > 2 { self.lines.concat() } else { String::new() }
    }

    fn line(&mut self, cells: impl Iterator<Item = String>) {
        let cells = cells.map(|cell| if cell.is_empty() { cell } else { format!(" {cell}") });
        self.lines.push(format!("|{} |\n", cells.collect::<Vec<_>>().join(" |")));
    }
}

/// Words of a suite, which may have what means something here.
fn escaped(cell: &str) -> String {
    cell.replace('|', "\\|").replace('<', "&lt;").replace("&lt;br>", "<br>")
}

#[cfg(test)]
mod tests {
    use super::Table;

    #[test]
    fn cells_hold_what_they_say() {
        let mut table = Table::new(&["a", ">b"]);
        table.row(&["x | <y>".into(), String::new()]);
        assert_eq!(table.text(), "| a | b |\n|---|---:|\n| x \\| &lt;y> | |\n");
        assert_eq!(Table::new(&["a"]).text(), "");
    }
}
