use serde_json::Value;

use crate::bench::fit::to_float;
use crate::bench::page::Table;
use crate::bench::quantity::bytes;
use crate::bench::saved_run::SavedRun;

/// Generates the table of the runs: a column for each suite.
pub(crate) fn all(all: &[SavedRun]) -> String {
    let names = all.iter().map(|kept| kept.suite.name.as_str());
    let columns: Vec<&str> = std::iter::once("").chain(names).collect();
    let mut table = Table::new(&columns);
    let mut row = |name: &str, cell: &dyn Fn(&SavedRun) -> String| {
        let cells: Vec<String> = all.iter().map(cell).collect();
        if cells.iter().any(|cell| !cell.is_empty()) {
            table.row(&std::iter::once(name.to_owned()).chain(cells).collect::<Vec<_>>());
        }
    };
    row("Date", &|kept| kept.date.clone());
    row("Commit", &|kept| kept.commit.clone());
    row("Duration", &|kept| format!("{} min {:02} s", kept.seconds / 60, kept.seconds % 60));
    row("CPU", &|kept| kept.machine.cpu.clone());
    row("Cores", &|kept| kept.machine.cores.to_string());
    row("Memory", &|kept| bytes(to_float(kept.machine.memory)));
    row("Kernel", &|kept| kept.machine.kernel.clone());
    row("Rust", &|kept| kept.machine.rust.clone());
    row("Versions", &|kept| {
        let versions = kept.suite.versions.iter();
        versions.map(|(name, version)| format!("{name} {version}")).collect::<Vec<_>>().join("<br>")
    });
    row("Options", &|kept| {
        let options = kept.suite.options.iter().filter(|(_, value)| !value.is_null());
        options
            .map(|(name, value)| format!("{name} {}", format_option(value)))
            .collect::<Vec<_>>()
            .join("<br>")
    });
    if all.is_empty() { String::new() } else { table.text() }
}

/// Formats the value of an option. Strings have no quotes.
fn format_option(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}
