use std::fs;
use std::io;

use serde_json::{Map, Value};

use crate::runner;
use crate::step::{Step, Worth};
use crate::workspace::Workspace;

/// How many states of the disk after a power cut are looked at, at least.
const CRASH_STATES: &str = "1000000";

/// Names for how many seconds each proof goes on, if it has enough sooner.
const SECONDS: &str = "TSSD_RELIABILITY_SECONDS";

/// Lines of this kind are figures: an object with the name of the proof.
const FIGURES: &str = "reliability ";

/// Proves what `docs/guarantees.md` promises, for as long as CI has time or for so many minutes, and keeps the
/// figures in `target/reliability.json`.
pub(crate) fn run(workspace: &Workspace, minutes: u64, verbose: bool) -> io::Result<bool> {
    let has_passed = runner::run(workspace, steps(workspace, minutes), Vec::new(), verbose)?;
    let figures = figures(&fs::read_to_string(workspace.log())?);
    for (proof, figures) in &figures {
        println!("{proof}: {}", spelled(figures));
    }
    let path = workspace.target.join("reliability.json");
    fs::write(&path, format!("{:#}\n", Value::Object(figures)))?;
    println!("\nthe figures are in {}", path.display());
    Ok(has_passed)
}

fn steps(workspace: &Workspace, minutes: u64) -> Vec<Step> {
    let proofs = [
        Step::cargo(
            "power cuts",
            "test --workspace --all-features --lib -- crash:: --nocapture --test-threads=1",
        )
        .env("TSSD_CRASH_STATES", CRASH_STATES),
        Step::cargo(
            "faults",
            "test --workspace --all-features --test reliability -- --ignored --nocapture --test-threads=1",
        )
        .env("TSSD_BIN", workspace.tssd()),
    ];
    // The second step has several proofs, which share its time.
    let seconds = (minutes * 60 / 15).to_string();
    let mut steps = vec![
        Step::cargo("build", "build --workspace --all-features --lib --bins --tests")
            .worth(Worth::Nothing),
    ];
    steps.extend(proofs.map(|step| step.env(SECONDS, &seconds).worth(Worth::Tests)));
    steps
}

/// What the proofs have printed.
fn figures(output: &str) -> Map<String, Value> {
    let lines = output.lines().filter_map(|line| line.strip_prefix(FIGURES));
    let objects = lines.filter_map(|line| serde_json::from_str::<Map<String, Value>>(line).ok());
    objects.flatten().collect()
}

/// The figures of a proof in one line; what is an object has more to say than fits.
fn spelled(figures: &Value) -> String {
    let Value::Object(figures) = figures else { return figures.to_string() };
    let plain = figures.iter().filter(|(_, figure)| !figure.is_object() && !figure.is_array());
    let spelled: Vec<String> = plain.map(|(name, figure)| format!("{name} {figure}")).collect();
    spelled.join(", ")
}

#[cfg(test)]
mod tests {
    use super::{figures, spelled};

    #[test]
    fn figures_are_found_among_other_output() {
        let output = "running 1 test\nreliability {\"crash states\":{\"states\":5,\"by\":{\"a\":1},\"bad\":0}}\n\
                      test a ... ok\nreliability of what\n";
        let figures = figures(output);
        assert_eq!(figures.len(), 1);
        assert_eq!(spelled(&figures["crash states"]), "states 5, bad 0");
    }
}
