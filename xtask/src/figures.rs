use std::fs;
use std::io;

use serde_json::{Map, Value};

use crate::workspace::Workspace;

/// Prefix of lines with figures. A JSON object follows: the name of a campaign, and its figures.
const PREFIX: &str = "reliability ";

/// Figures of campaigns, by name of the campaign.
pub(crate) type Figures = Map<String, Value>;

/// Returns the figures in the output of tests.
pub(crate) fn parse_output(output: &str) -> Figures {
    let lines = output.lines().filter_map(|line| line.strip_prefix(PREFIX));
    let objects = lines.filter_map(|line| serde_json::from_str::<Figures>(line).ok());
    objects.flatten().collect()
}

/// Prints figures, and saves them in `target/reliability.json`.
///
/// They replace earlier figures of the same campaigns.
pub(crate) fn save(workspace: &Workspace, figures: Figures) -> io::Result<()> {
    for (campaign, figures) in &figures {
        println!("{campaign}: {}", format_line(figures));
    }
    let path = workspace.target.join("reliability.json");
    let saved = fs::read_to_string(&path).unwrap_or_default();
    let mut saved: Figures = serde_json::from_str(&saved).unwrap_or_default();
    saved.extend(figures);
    fs::write(&path, format!("{:#}\n", Value::Object(saved)))?;
    println!("\nthe figures are in {}", path.display());
    Ok(())
}

/// Formats the figures of a campaign as one line. Skips nested figures, which are too long for it.
fn format_line(figures: &Value) -> String {
    let Value::Object(figures) = figures else { return figures.to_string() };
    let scalars = figures.iter().filter(|(_, figure)| !figure.is_object() && !figure.is_array());
    let texts: Vec<String> = scalars.map(|(name, figure)| format!("{name} {figure}")).collect();
    texts.join(", ")
}

#[cfg(test)]
mod tests {
    use super::{format_line, parse_output};

    #[test]
    fn figures_are_found_among_other_output() {
        let output = "running 1 test\nreliability {\"crash states\":{\"states\":5,\"by\":{\"a\":1},\"bad\":0}}\n\
                      test a ... ok\nreliability of what\n";
        let figures = parse_output(output);
        assert_eq!(figures.len(), 1);
        assert_eq!(format_line(&figures["crash states"]), "states 5, bad 0");
    }
}
