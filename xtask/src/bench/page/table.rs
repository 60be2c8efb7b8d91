/// A Markdown table.
pub(crate) struct Table {
    lines: Vec<String>,
    columns: usize,
}

impl Table {
    /// Creates a table with these columns. Columns whose names begin with `>` are right-aligned.
    pub(crate) fn new(columns: &[&str]) -> Self {
        let mut table = Self { lines: Vec::new(), columns: columns.len() };
        table.line(columns.iter().map(|name| name.trim_start_matches('>').to_owned()));
        let rules = columns.iter().map(|name| if name.starts_with('>') { "---:" } else { "---" });
        table.lines.push(format!("|{}|\n", rules.collect::<Vec<_>>().join("|")));
        table
    }

    pub(crate) fn row(&mut self, cells: &[String]) {
        debug_assert_eq!(cells.len(), self.columns, "{cells:?}");
        self.line(cells.iter().map(|cell| escape(cell)));
    }

    /// Returns the table as Markdown, or an empty text if it has no rows.
    pub(crate) fn text(self) -> String {
        if self.lines.len() > 2 { self.lines.concat() } else { String::new() }
    }

    fn line(&mut self, cells: impl Iterator<Item = String>) {
        let cells = cells.map(|cell| if cell.is_empty() { cell } else { format!(" {cell}") });
        self.lines.push(format!("|{} |\n", cells.collect::<Vec<_>>().join(" |")));
    }
}

/// Escapes characters with a meaning in Markdown tables, except `<br>`.
fn escape(cell: &str) -> String {
    cell.replace('|', "\\|").replace('<', "&lt;").replace("&lt;br>", "<br>")
}

#[cfg(test)]
mod tests {
    use super::Table;

    #[test]
    fn cells_are_escaped() {
        let mut table = Table::new(&["a", ">b"]);
        table.row(&["x | <y>".into(), String::new()]);
        assert_eq!(table.text(), "| a | b |\n|---|---:|\n| x \\| &lt;y> | |\n");
        assert_eq!(Table::new(&["a"]).text(), "");
    }
}
