use std::collections::BTreeSet;

use crate::bench::kept::Kept;
use crate::bench::page::Table;
use crate::bench::quantity::count;

/// A row for each operation, a column for each thing that was counted.
pub(crate) fn all(all: &[Kept]) -> String {
    let counts = || all.iter().flat_map(|kept| &kept.counts);
    let names: BTreeSet<&str> =
        counts().flat_map(|count| count.counts.keys()).map(String::as_str).collect();
    let columns: Vec<String> = names.iter().map(|name| format!(">{name}")).collect();
    let columns = std::iter::once("Operation").chain(columns.iter().map(String::as_str));
    let mut table = Table::new(&columns.collect::<Vec<_>>());
    for operation in counts() {
        let cells = names.iter().map(|name| operation.counts.get(*name).map(count));
        let cells = cells.map(Option::unwrap_or_default);
        table.row(&std::iter::once(operation.operation.clone()).chain(cells).collect::<Vec<_>>());
    }
    table.text()
}
