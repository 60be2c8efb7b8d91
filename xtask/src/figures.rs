use std::fs;
use std::io;

use serde_json::{Map, Value};

use crate::workspace::Workspace;

/// Lines of this kind are figures: an object with the name of the proof.
const FIGURES: &str = "reliability ";

/// What proofs have counted, by their names.
pub(crate) type Figures = Map<String, Value>;

/// What proofs have printed.
pub(crate) fn printed(output: &str) -> Figures {
    let lines = output.lines().filter_map(|line| line.strip_prefix(FIGURES));
    let objects = lines.filter_map(|line| serde_json::from_str::<Figures>(line).ok());
    objects.flatten().collect()
}

/// Says figures, and keeps them in `target/reliability.json` beside those of other proofs.
pub(crate) fn keep(workspace: &Workspace, figures: Figures) -> io::Result<()> {
    for (proof, figures) in &figures {
        println!("{proof}: {}", spelled(figures));
    }
    let path = workspace.target.join("reliability.json");
    let kept = fs::read_to_string(&path).unwrap_or_default();
    let mut kept: Figures = serde_json::from_str(&kept).unwrap_or_default();
    kept.extend(figures);
    fs::write(&path, format!("{:#}\n", Value::Object(kept)))?;
    println!("\nthe figures are in {}", path.display());
    Ok(())
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
    use super::{printed, spelled};

    #[test]
    fn figures_are_found_among_other_output() {
        let output = "running 1 test\nreliability {\"crash states\":{\"states\":5,\"by\":{\"a\":1},\"bad\":0}}\n\
                      test a ... ok\nreliability of what\n";
        let figures = printed(output);
        assert_eq!(figures.len(), 1);
        assert_eq!(spelled(&figures["crash states"]), "states 5, bad 0");
    }
}
