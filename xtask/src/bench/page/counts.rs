use crate::bench::kept::Kept;
use crate::bench::page::Table;
use crate::bench::quantity::count;

/// A table for all operations of which the same was counted: a row for each, a column for each thing.
pub(crate) fn all(all: &[Kept]) -> String {
    let mut tables: Vec<(Vec<&str>, Table)> = Vec::new();
    for operation in all.iter().flat_map(|kept| &kept.counts) {
        let names: Vec<&str> = operation.counts.keys().map(String::as_str).collect();
        let at = tables.iter().position(|(known, _)| *known == names).unwrap_or_else(|| {
            let columns: Vec<String> = names.iter().map(|name| format!(">{name}")).collect();
            let columns = std::iter::once("Operation").chain(columns.iter().map(String::as_str));
            tables.push((names.clone(), Table::new(&columns.collect::<Vec<_>>())));
            tables.len() - 1
        });
        let cells = operation.counts.values().map(count);
        tables[at]
            .1
            .row(&std::iter::once(operation.operation.clone()).chain(cells).collect::<Vec<_>>());
    }
    tables.into_iter().map(|(_, table)| table.text()).collect::<Vec<_>>().join("\n")
}
