use crate::bench::page::Table;
use crate::bench::quantity::count;
use crate::bench::saved_run::SavedRun;

/// Generates a table for each set of counters: a row for each operation, a column for each counter.
pub(crate) fn all(all: &[SavedRun]) -> String {
    let mut tables: Vec<(Vec<&str>, Table)> = Vec::new();
    for operation in all.iter().flat_map(|kept| &kept.counts) {
        let names: Vec<&str> = operation.counts.keys().map(String::as_str).collect();
        let index = tables.iter().position(|(known, _)| *known == names).unwrap_or_else(|| {
            let columns: Vec<String> = names.iter().map(|name| format!(">{name}")).collect();
            let columns = std::iter::once("Operation").chain(columns.iter().map(String::as_str));
            tables.push((names.clone(), Table::new(&columns.collect::<Vec<_>>())));
            tables.len() - 1
        });
        let cells = operation.counts.values().map(count);
        tables[index]
            .1
            .row(&std::iter::once(operation.operation.clone()).chain(cells).collect::<Vec<_>>());
    }
    tables.into_iter().map(|(_, table)| table.text()).collect::<Vec<_>>().join("\n")
}
